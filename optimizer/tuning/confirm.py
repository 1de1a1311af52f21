"""Confirming a winner: it and the incumbent alone, executed afresh on requests that neither search
nor race has used.

A race's interval of the best of many, on the requests that chose it, promises more than there is
(the winner's curse). What a tuning publishes and reports is this module's one estimate: the ratio
of both policies' total costs, of which requests that were held out are a sample
(:meth:`optimizer.tuning.timings.Timings.estimate`), none of them left out. The number of executions
is settled before the first, so nobody looks and stops where it pleases; after them, units whose
ratio stands out, to either side, are executed twice more, so that a stall of the machine is
outvoted and what a policy does to a request stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from typing import Final

import numpy as np
from scipy.special import nctdtr, stdtrit

from spectune.optimizer.tuning.confirmation import LEAST, LEVEL, Confirmation, missed_share
from spectune.optimizer.tuning.parts import SPLIT, Parts, split
from spectune.optimizer.tuning.timings import NOISE, Expected, Timings
from spectune.traces.conversations import Index, conversations
from spectune.traces.errors import TraceError
from spectune.traces.schema import Workload

RACE_SHARE: Final = 1 / 2
"""Part of the time for executions that the race may use; the confirmation has the rest."""
WIDER: Final = 1.05
"""How much wider an interval may be where that saves executions."""
GAIN: Final = 0.05
"""The gain whose chance of being published is told."""
CHANCE: Final = 0.3
"""The chance below which it is told what would give as much."""


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the logarithm of two policies' ratio: over ``requests``, as they
    differ in what suits them, and of one execution of both, ``noise``. Those assumed while nothing
    is measured are of close policies on two CPU cores."""

    requests: float = 0.08
    noise: float = NOISE

    def chance(self, requests: int, executions: int, gain: float = GAIN) -> float:
        """The chance that a true gain is published after so many executions of both on so many
        requests (Student's t, noncentral)."""
        if requests < LEAST:
            return 0.0
        error = math.hypot(
            self.requests / math.sqrt(requests), self.noise / math.sqrt(max(requests, executions))
        )
        freedom = requests - 1
        least = stdtrit(freedom, (1 + LEVEL) / 2)
        return 1.0 - float(nctdtr(freedom, math.log1p(gain) / max(error, 1e-6), least))

    def enough(self, requests: int, most: int) -> int:
        """How many executions give an interval at most :data:`WIDER` times as wide as ``most``:
        where requests differ more than executions do, further passes tell next to nothing."""
        of_requests = self.requests**2 / requests
        error = WIDER**2 * (of_requests + self.noise**2 / most) - of_requests
        return min(most, max(requests, math.ceil(self.noise**2 / max(error, 1e-12))))

    def requests_for(self, chance: float) -> int:
        """The number of requests, executed once, that give a gain such a chance."""
        least = LEAST
        while self.chance(least, least) < chance:
            least = math.ceil(least * 1.05)
        return least


def confirm(
    winner: str,
    incumbent: str,
    execute: Callable[[str, int], float],
    *,
    units: int,
    executions: int,
    expected: Expected | None = None,
    by_size: bool = True,
    groups: Index | None = None,
    unit: str = "requests",
    chance: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Confirmation:
    """Executes both so many times, on each of the units held out (by number) before any twice; who
    goes first alternates. The winner begins, so that what a first execution costs speaks against
    it. ``execute`` returns a cost; ``groups``: as
    :attr:`optimizer.tuning.timings.Timings.groups`."""
    passes = max(1, math.ceil(executions / max(1, units)))
    costs = {p: np.full((units, passes + 3), np.nan) for p in (winner, incumbent)}
    timings = Timings(costs, expected, by_size, groups)

    def execute_both(n: int, k: int) -> None:
        for p in (winner, incumbent) if (n + k) % 2 == 0 else (incumbent, winner):
            costs[p][n, k] = execute(p, n)

    for turn in range(executions):
        k, n = divmod(turn, units)
        execute_both(n, k)
        progress(turn + 1, executions)
    for n in timings.outliers(winner, incumbent):
        done = int((~np.isnan(costs[winner][n])).sum())
        for k in range(done, done + 2 + (done % 2 == 0)):  # a median of an odd number
            execute_both(int(n), k)
    estimate = timings.estimate(winner, incumbent, projected=True, population=True)
    used = min(units, executions)
    of = used if groups is None else len(np.unique(groups[:used]))
    return Confirmation.of(
        winner,
        estimate.interval(LEVEL),
        used,
        passes,
        unit=unit,
        chance_of_5_percent=chance,
        conversations=of if of < used else None,
    )


def left_s(budget_s: float, raced_s: float) -> float:
    """Seconds that a race, which has at most :data:`RACE_SHARE`, leaves to the confirmation."""
    return budget_s - min(budget_s * RACE_SHARE, raced_s)


def planned(units: int, both_s: float, budget_s: float, passes: int) -> int:
    """How often both policies are executed to confirm with so many units held out: as often as fits
    in ``budget_s`` where both together take ``both_s`` a unit, on :data:`LEAST` of them at least,
    on none more than ``passes`` times."""
    return min(units * passes, max(min(units, LEAST), int(budget_s / max(both_s, 1e-9))))


def spread_of(timings: Timings, winner: str, incumbent: str) -> Spread | None:
    """The spread that a race measured of two policies; None where it executed both too seldom."""
    alone = timings.estimate(winner, incumbent, projected=True)
    sampled = timings.estimate(winner, incumbent, projected=True, population=True)
    both = ~(np.isnan(timings.seconds[winner]) | np.isnan(timings.seconds[incumbent]))
    executed, executions = both.any(1), int(both.sum())
    groups = np.arange(len(both)) if timings.groups is None else timings.groups
    if len(np.unique(groups[executed])) < LEAST:
        return None
    every = len(np.unique(groups))
    over_requests = math.sqrt(max(0.0, sampled.error**2 - alone.error**2) * every)
    return Spread(over_requests, alone.error * math.sqrt(executions))


def power_in_words(
    spread: Spread,
    units: int,
    executions: int,
    *,
    unit: str = "requests",
    seconds: float = 0.0,
    budget_s: float = 0.0,
    most: int | None = None,
) -> str:
    """A line on the chance that a gain of 5% is published by so many executions of both on units
    held out, and where that is below :data:`CHANCE`, on what would give as much: more time, where
    that is enough (they take ``seconds`` each, all that is executed ``budget_s``), or more
    requests."""
    used = min(units, executions)
    chance = spread.chance(used, executions)
    line = f"a gain of {100 * GAIN:.0f}% is published with a chance of {100 * chance:.0f}%"
    if chance >= CHANCE:
        return line
    most = units * executions if most is None else most
    longer = (min(most, 2**n * executions) for n in range(1, 5))
    enough = next((e for e in longer if spread.chance(min(units, e), e) >= CHANCE), None)
    if enough is not None and seconds:
        longer_s = budget_s + (enough - executions) * seconds / (1 - RACE_SHARE)
        return f"{line}; --budget {math.ceil(longer_s / 10) * 10}s gives about {100 * CHANCE:.0f}%"
    # Of requests a part is held out; runs are made of any requests.
    more = spread.requests_for(CHANCE) if unit == "runs" else _requests_for(spread)
    return f"{line}; about {more} {unit} give {100 * CHANCE:.0f}%"


def missed_in_words(used: int, unit: str) -> str:
    """On how few units a slowdown can go unseen where so many are executed."""
    return f"a slowdown on fewer than {100 * missed_share(used):.0f}% of {unit} can be missed"


def _requests_for(spread: Spread) -> int:
    """How many requests a workload needs for :data:`CHANCE` at :data:`GAIN`."""
    return math.ceil(spread.requests_for(CHANCE) * len(SPLIT) / SPLIT.count("c"))


def check_sample_size(
    categories: Sequence[str],
    *,
    publish: bool,
    parts: Parts | None = None,
    of: Index | None = None,
) -> str:
    """A line on the power of a confirmation, before any work, of requests of these categories.
    ``parts``: those of requests that a recording is left with. ``of``: the number of each request's
    conversation, int64 [requests]; None: each is one of its own.

    Raises TraceError where nothing could be raced, or, if something is to be published, confirmed.
    """
    unit = "requests"
    numbers = list(range(len(categories))) if of is None else of.tolist()
    parts = split(categories, numbers) if parts is None else parts
    if len(set(numbers)) < len(categories):  # turns of one count once
        unit, place = "conversations", {c: n for n, c in enumerate(dict.fromkeys(numbers))}
        parts = Parts(*(sorted({place[numbers[i]] for i in part}) for part in parts))
        category = dict(zip(reversed(numbers), reversed(categories), strict=True))
        categories = [category[c] for c in place]
    total, held = len(categories), len(parts.confirm)
    least = LEAST if publish else 1

    def suffice(parts: Parts) -> bool:
        return all((parts.search, parts.race)) and len(parts.confirm) >= least

    if not suffice(parts):
        more = (list(islice(cycle(categories or [""]), n)) for n in count(total))
        enough = next(len(these) for these in more if suffice(split(these)))
        give = (
            f"give {enough} or more of these categories (about {_requests_for(Spread())} {unit} "
            f"publish a gain of {100 * GAIN:.0f}% with a chance of {100 * CHANCE:.0f}%)"
        )
        if not all((parts.search, parts.race, parts.confirm)):
            raise TraceError(
                f"too few {unit} to search, race and confirm on different ones: {total}; {give}"
            )
        raise TraceError(
            f"{total} {unit} leave {held} to confirm a winner on, and {LEAST} are needed to "
            f"publish it: {give}; --no-publish shows what there is"
        )
    power = power_in_words(Spread(), held, held, unit=unit)
    rare = missed_in_words(held, unit)
    return f"{held} of {total} {unit} are held out to confirm the winner: {power}; {rare}"


def check_workload_size(workload: Workload, *, publish: bool) -> str:
    """:func:`check_sample_size` of a workload that is not recorded yet."""
    of = conversations([request.id for request in workload.requests])
    categories = [request.category for request in workload.requests]
    return check_sample_size(categories, publish=publish, of=of)
