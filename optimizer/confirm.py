"""Confirming a winner: it and the incumbent alone, executed afresh on requests that neither search
nor race has used.

A race's interval of the best of many, on the requests that chose it, promises more than there is
(the winner's curse). What a tuning publishes and reports is this module's one estimate: the
incumbent's seconds over the winner's, summed over requests that were held out, as total tokens/s is
what a deployment gains; a request counts with the median of its executions, which one stall does
not move. The number of executions is settled before the first, so nobody looks and stops where it
pleases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from typing import Any, Final

import numpy as np
from scipy.special import stdtrit

from spectune.optimizer.parts import SPLIT, Parts, split
from spectune.optimizer.timings import Timings, finite
from spectune.traces.errors import TraceError

LEVEL: Final = 0.99
"""Two-sided level of the interval: its lower end is above the truth in one of 200 confirmations,
and in fewer than one of 100 where requests are few and noise has heavy tails (`bench/nulls.py`)."""
FLOOR: Final = 1.01
"""A ratio below is not worth a publication."""
LEAST: Final = 5
"""Requests to confirm on without which nothing is published."""
RACE_SHARE: Final = 2 / 3
"""Part of the time for executions that the race may use; the confirmation has the rest."""
SPREAD: Final = 0.1
"""Standard deviation over requests that is assumed of the logarithm of two close policies' ratio.
"""
POWER: Final = 0.8
"""Chance with which a gain is to be seen where a number of requests is told."""


@dataclass(frozen=True)
class Confirmation:
    """The speed of policy ``winner`` over the incumbent's on ``requests`` held out, each executed
    ``passes`` times by both, and its 99% interval over requests."""

    winner: str
    ratio: tuple[float, float, float]
    requests: int
    passes: int

    @property
    def against(self) -> str:
        """What speaks against a publication; empty where it is a gain beyond noise, and worth
        having."""
        value, low, _ = self.ratio
        if self.requests < LEAST:
            return f"{self.requests} requests are too few, {LEAST} are needed"
        if low <= 1.0:
            return "the gain is not beyond noise"
        return "" if value >= FLOOR else f"less than {FLOOR} times as fast is not worth a change"

    def __str__(self) -> str:
        value, low, high = self.ratio
        return (
            f"{value:.3f} times the incumbent's speed ({100 * LEVEL:.0f}% interval {low:.3f} to "
            f"{high:.3f}) on {self.requests} requests held out for it"
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; an interval's end that is not known is None."""
        return {
            "id": self.winner,
            "ratio": self.ratio[0],
            "interval": finite(self.ratio[1:]),
            "level": LEVEL,
            "floor": FLOOR,
            "requests": self.requests,
            "passes": self.passes,
            "holds": not self.against,
            "against": self.against,
        }


def confirm(
    winner: str,
    incumbent: str,
    execute: Callable[[str, int], float],
    *,
    requests: int,
    passes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Confirmation:
    """Executes both on each request (by number), ``passes`` times, who goes first alternating; the
    winner begins, so that what a first execution costs speaks against it. ``execute`` returns
    seconds."""
    seconds = {p: np.full((requests, passes), np.nan) for p in (winner, incumbent)}
    for k in range(passes):
        for n in range(requests):
            for p in (winner, incumbent) if (n + k) % 2 == 0 else (incumbent, winner):
                seconds[p][n, k] = execute(p, n)
            progress(k * requests + n + 1, requests * passes)
    ratio = Timings(seconds).ratio(winner, incumbent, level=LEVEL)
    return Confirmation(winner, ratio, requests, passes)


def left_s(budget_s: float, raced_s: float) -> float:
    """Seconds that a race, which has at most :data:`RACE_SHARE`, leaves to the confirmation."""
    return budget_s - min(budget_s * RACE_SHARE, raced_s)


def planned(requests: int, both_s: float, budget_s: float, most: int) -> tuple[int, int]:
    """(requests, passes) to confirm with, of so many held out: as many as fit in ``budget_s`` where
    both policies together take ``both_s`` a request, at least :data:`LEAST` once, all before any
    twice, none more than ``most`` times."""
    fit = int(budget_s / max(both_s, 1e-9))
    used = min(requests, max(LEAST, fit))
    return used, max(1, min(most, fit // max(1, used)))


def least_gain(requests: int) -> float:
    """The least true gain that a confirmation on so many requests sees with a chance of
    :data:`POWER`; inf below 2."""
    if requests < 2:
        return math.inf
    quantiles = stdtrit(requests - 1, (1 + LEVEL) / 2) + stdtrit(requests - 1, POWER)
    return float(math.expm1(quantiles * SPREAD / math.sqrt(requests)))


def said_of(categories: Sequence[str], *, publish: bool, parts: Parts | None = None) -> str:
    """What is to be said, before any work, of requests of these categories; empty where a gain of
    5% will be seen. ``parts``: those of requests that a recording is left with.

    Raises TraceError where nothing could be raced, or, if something is to be published, confirmed.
    """
    parts = split(categories) if parts is None else parts
    total, held = len(categories), len(parts.confirm)
    to_see = next(n for n in count(LEAST) if least_gain(n) <= 0.05)
    for_5 = math.ceil(to_see * len(SPLIT) / SPLIT.count("c"))
    needs = (
        f"a gain of 5% takes about {for_5} requests (their ratios spreading by {100 * SPREAD:.0f}%)"
    )
    least = LEAST if publish else 1

    def suffice(parts: Parts) -> bool:
        return all(parts) and len(parts.confirm) >= least

    if not suffice(parts):
        more = (list(islice(cycle(categories or [""]), n)) for n in count(total))
        enough = next(len(these) for these in more if suffice(split(these)))
        give = f"give {enough} or more of these categories; {needs}"
        if not all(parts):
            raise TraceError(
                f"too few requests to search, race and confirm on different ones: {total}; {give}"
            )
        raise TraceError(
            f"{total} requests leave {held} to confirm a winner on, and {LEAST} are needed to "
            f"publish it: {give}; --no-publish shows what there is"
        )
    if (seen := least_gain(held)) <= 0.05:
        return ""
    shown = f"gains below about {100 * seen:.0f}% will not be seen; " if math.isfinite(seen) else ""
    return f"{held} of {total} requests are held out to confirm the winner; {shown}{needs}"
