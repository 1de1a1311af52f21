"""Whether the best of many policies gains over none on a few requests.

The best of many is flattered by the requests that choose it. So it is chosen by a third of the
conversations and judged by the others, by Student's t of the ratio of sums, linearised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import nctdtr, stdtrit

from spectune.optimizer.tuning.confirmation import FLOOR
from spectune.optimizer.tuning.timings import Estimate
from spectune.traces.conversations import Index, conversations_of, summed, variance_of_mean
from spectune.traces.cost_table import FloatArray
from spectune.traces.tables import Trajectory

LEVEL: Final = 0.95
"""Two-sided level of intervals. Where nothing gains, the lower end is above 1 in one of 20 cases at
most, also where the costs of a few requests are skewed."""
FEWEST: Final = 5
"""Conversations below which nothing is advised."""
GAIN: Final = 0.1
"""The gain whose chance of being seen is told."""
CHOOSING: Final = 3
"""One conversation in so many chooses, the others judge."""
ALIKE: Final = 1e-6
"""A standard error (of the logarithm of a ratio) below says that requests do not differ, which says
nothing of others."""


@dataclass(frozen=True)
class Worth:
    """The policy that was ``chosen`` (its number), its speed over no draft's on the
    ``conversations`` that judge it, with an interval, and the chance that a gain of :data:`GAIN`
    would have been seen there. ``most``: the largest upper end of the intervals of all policies,
    each on all conversations."""

    chosen: int
    ratio: tuple[float, float, float]
    conversations: int
    chance: float
    most: float

    @property
    def gains(self) -> bool | None:
        """Whether it gains beyond noise; False where no policy gains as much as is worth a change;
        None where neither is shown."""
        if not self.chance:
            return None
        return True if self.ratio[1] > 1 else False if self.most < FLOOR else None


def judge(without: FloatArray, costs: Sequence[FloatArray], conversations: Index) -> Worth:
    """Chooses the policy of the lowest cost and judges it. ``without``: what each request costs
    without a draft, float64 [requests], ``costs`` likewise under each policy; ``conversations``:
    int64 [requests]."""
    sums = summed(np.column_stack((without, *costs)), conversations)
    base, others = sums[:, 0], sums[:, 1:]
    chooses = np.arange(len(base)) % CHOOSING == CHOOSING - 1
    if not chooses.any():
        chooses[:] = True
    chosen = int(others[chooses].sum(0).argmin())
    judges = chooses if chooses.all() else ~chooses
    (estimate,) = _estimates(base[judges], others[judges][:, [chosen]])
    most = max(e.interval(LEVEL)[2] for e in _estimates(base, others))
    chance = 0.0
    if len(base) >= FEWEST and estimate.error > ALIKE:
        least = stdtrit(estimate.freedom, (1 + LEVEL) / 2)
        gain = math.log1p(GAIN) / estimate.error
        chance = 1.0 - float(nctdtr(estimate.freedom, gain, least))
    return Worth(chosen, estimate.interval(LEVEL), int(judges.sum()), chance, most)


def speedup(
    without: FloatArray, cost: FloatArray, conversations: Index
) -> tuple[float, float, float]:
    """(the speed of one policy over no draft's, its interval); arguments as of :func:`judge`."""
    sums = summed(np.column_stack((without, cost)), conversations)
    (estimate,) = _estimates(sums[:, 0], sums[:, 1:])
    return estimate.interval(LEVEL)


def independent(texts: Sequence[Trajectory]) -> Index:
    """The number of each text's conversation, int64 [texts], where one that begins with a prompt
    that an earlier one began with is no other: it tells nothing new."""
    begun: dict[bytes, int] = {}
    same: dict[int, int] = {}
    numbers = conversations_of(texts).tolist()
    for text, number in zip(texts, numbers, strict=True):
        if number not in same:
            same[number] = begun.setdefault(text.prompt_ids.tobytes(), number)
    return np.array([same[number] for number in numbers], dtype=np.int64)


def _estimates(none: FloatArray, costs: FloatArray) -> list[Estimate]:
    """Of each column of ``costs`` [n, K] the ratio of the sum of ``none`` [n] to its sum."""
    n, logs = len(none), np.log(none.sum() / costs.sum(0))
    if n < 2:
        return [Estimate(log, 0.0, 0) for log in logs.tolist()]
    shares = costs / costs.mean(0)
    base = (none / none.mean())[:, None]
    estimates = []
    columns = logs, (base - shares).var(0, ddof=1), (base + shares).T
    for log, variance, weights in zip(*columns, strict=True):
        of_mean, freedom = variance_of_mean(float(variance), weights)
        estimates.append(Estimate(float(log), math.sqrt(of_mean), freedom))
    return estimates
