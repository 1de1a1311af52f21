"""Whether a policy that takes turns with the incumbent is promoted, reverted, or neither: blocks of
two policies in pairs, by bounds that hold at every look.

A pair is two adjacent blocks of one server, one of each policy, in an order that a hash draws: what
drifts over minutes is alike in both, and of what is left the sign is random, so the pairs'
logarithms are uncorrelated. Speed is what users feel: the seconds that requests spend per token
after the first. The estimate is that of a tuning (:meth:`Timings.estimate`), pairs in place of
requests, at so many pairs as :data:`LOOKS` says and none between; all looks together are wrong one
time in a hundred (the union of their levels), however often somebody looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np

from spectune.optimizer.tuning.confirmation import FLOOR, Interval, ends_of
from spectune.optimizer.tuning.timings import Timings
from spectune.traces.cost_table import FloatArray

BLOCK_S: Final = 45.0
DROPPED_S: Final = 5.0
"""At the beginning of a block: requests of the other policy's steps are still in the batch."""
LOOKS: Final = (12, 24, 48, 96)
"""Pairs of each server after which the policies are compared."""
LEVEL: Final = 1.0 - 0.005 / len(LOOKS)
FEW_SERVERS: Final = 4
"""Of more servers each is one unit of the estimate, as they differ."""
HARM_ALPHA: Final = 0.008
"""Two-sided, over all pairs: a policy that is as fast is reverted half as often."""
HARM_PAIRS: Final = 4
HARM_FROM: Final = 3
"""After how many pairs harm is seen best, and from how many on it is looked for."""
USUAL: Final = 0.2
USUAL_PAIRS: Final = 12
"""The standard deviation that is assumed of pairs' logarithms, and the pairs that it counts as."""
USUAL_SLOPE: Final = 0.3
"""The power of the arrivals that seconds per token are assumed to grow by, about."""
FIRST_TOKENS: Final = 40
"""Requests without which no quantile of the time to the first token is taken."""
LEAST_TOKENS: Final = 20
"""A block of fewer tokens says nothing."""

Verdict = Literal["go on", "promote", "revert", "inconclusive"]


@dataclass(frozen=True)
class MeasuredBlock:
    """What requests did in a block: the ``seconds`` of their rounds and the ``tokens`` of these,
    prompts apart; how many arrived; and the seconds to the first tokens that fell in it."""

    seconds: float
    tokens: int
    arrivals: int
    first_tokens_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class BlockPair:
    """Two adjacent blocks of a server, one of each policy."""

    server: str
    number: int
    incumbent: MeasuredBlock
    candidate: MeasuredBlock

    @cached_property
    def counts(self) -> bool:
        """Whether both say something."""
        blocks = self.incumbent, self.candidate
        return all(b.tokens >= LEAST_TOKENS and b.seconds > 0 for b in blocks)

    @cached_property
    def log_ratio(self) -> float:
        """The logarithm of the candidate's speed over the incumbent's."""
        one, other = self.candidate, self.incumbent
        return math.log(other.seconds / other.tokens) - math.log(one.seconds / one.tokens)

    @cached_property
    def burst(self) -> float:
        """The logarithm of the arrivals in the incumbent's block over those in the candidate's."""
        return math.log1p(self.incumbent.arrivals) - math.log1p(self.candidate.arrivals)


@dataclass(frozen=True)
class Look:
    """The candidate's speed over the incumbent's by so many pairs, and its interval of
    :data:`LEVEL`."""

    pairs: int
    ratio: Interval

    @property
    def shows_a_gain(self) -> bool:
        ratio, low, _ = self.ratio
        return low > 1.0 and ratio >= FLOOR

    def told(self) -> str:
        ratio, low, high = self.ratio
        return f"{ratio:.3f} times as fast ({low:.3f} to {high:.3f}) by {self.pairs} pairs"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"pairs": self.pairs, "ratio": self.ratio[0], "interval": ends_of(self.ratio)}


@dataclass(frozen=True)
class Standing:
    """What is to be done, why, and the looks that were taken."""

    verdict: Verdict
    reason: str
    pairs: int
    looks: tuple[Look, ...] = ()


def judge(
    pairs: Sequence[BlockPair],
    servers: int = 1,
    first_token_limit_s: float | None = None,
    taken: Sequence[Look] = (),
) -> Standing:
    """What the pairs of ``servers`` servers, in the order that they ended, say of the candidate.
    ``taken``: the looks that were taken before, which are not taken again.

    It is reverted where it does harm (:func:`harm_of`), promoted where a look shows it faster and
    its ratio is at least :data:`FLOOR`; after the last look neither.
    """
    pairs, looks = [pair for pair in pairs if pair.counts], list(taken)
    if harm := harm_of(pairs, first_token_limit_s):
        return Standing("revert", harm, len(pairs), tuple(looks))
    for count in looks_of(servers)[len(looks) :]:
        if len(pairs) < count:
            rest = f"{len(pairs)} of {count} pairs until the next look"
            return Standing("go on", rest, len(pairs), tuple(looks))
        looks.append(Look(count, compared(pairs[:count], servers)))
        if looks[-1].shows_a_gain:
            return Standing("promote", looks[-1].told(), len(pairs), tuple(looks))
    return Standing("inconclusive", looks[-1].told(), len(pairs), tuple(looks))


def looks_of(servers: int) -> tuple[int, ...]:
    """Pairs of all of so many servers together after which policies are compared."""
    return tuple(count * servers for count in LOOKS)


def compared(pairs: Sequence[BlockPair], servers: int) -> Interval:
    """The candidate's speed over the incumbent's, and its interval; pairs weigh by the seconds that
    users spent in them."""
    logs = at_equal_arrivals(pairs)
    each = np.array([p.incumbent.seconds + p.candidate.seconds for p in pairs])
    costs = {"incumbent": each * np.exp(logs / 2), "candidate": each * np.exp(-logs / 2)}
    groups = None
    if servers > FEW_SERVERS:
        groups = np.unique([p.server for p in pairs], return_inverse=True)[1]
    timings = Timings({name: cost[:, None] for name, cost in costs.items()}, groups=groups)
    return timings.estimate("candidate", "incumbent").interval(LEVEL)


def at_equal_arrivals(pairs: Sequence[BlockPair]) -> FloatArray:
    """The pairs' logarithms less what their blocks' arrivals explain: a burst in one of two blocks
    slows it, whoever drafts. By arrivals, which a policy does not change, never by batch, which it
    does."""
    logs = np.array([p.log_ratio for p in pairs])
    burst = np.array([p.burst for p in pairs])
    centered = burst - burst.mean()
    slope = float(centered @ logs) / (float(centered @ centered) + (USUAL / USUAL_SLOPE) ** 2)
    adjusted: FloatArray = logs - slope * burst
    return adjusted


def harm_of(pairs: Sequence[BlockPair], first_token_limit_s: float | None = None) -> str:
    """Why the candidate is reverted; empty where it is not. Asked after every pair: that it is
    slower is shown by a bound that holds at all of them."""
    if len(pairs) >= HARM_FROM:
        high = math.exp(upper_end(at_equal_arrivals(pairs)))
        if high < 1.0:
            return f"at most {high:.3f} times as fast by {len(pairs)} pairs"
    if first_token_limit_s is not None:
        waits = [s for pair in pairs for s in pair.candidate.first_tokens_s]
        p95 = float(np.quantile(waits, 0.95)) if len(waits) >= FIRST_TOKENS else 0.0
        if p95 > first_token_limit_s:
            limit = f"beyond the limit of {first_token_limit_s:g} s"
            return f"95% of the first tokens come within {p95:.3g} s, {limit}"
    return ""


def upper_end(logs: FloatArray) -> float:
    """The upper end of a confidence sequence for the mean of logarithms of pairs: at all lengths
    together it is below the mean with a chance of less than :data:`HARM_ALPHA`. Their variance is
    estimated, towards :data:`USUAL` where they are few."""
    count, mean = len(logs), float(logs.mean())
    spread = USUAL_PAIRS * USUAL**2 + float(((logs - mean) ** 2).sum())
    variance = count * spread / (USUAL_PAIRS + count - 1)
    tightest = HARM_PAIRS * variance / count
    return mean + mixture_bound(variance, HARM_ALPHA, tightest) / count


def mixture_bound(variance: float, alpha: float, tightest: float) -> float:
    """What the absolute value of a sum of independent normal values of mean 0 exceeds at any time
    with a chance of at most ``alpha``, where the sum's variance is ``variance``: the two-sided
    normal mixture (Robbins 1970; Howard et al. 2021, eq. 14), tightest at the variance
    ``tightest``."""
    doubled = -2.0 * math.log(alpha)
    rho = tightest / (doubled + math.log(1.0 + doubled))
    return math.sqrt((variance + rho) * (math.log((variance + rho) / rho) + doubled))
