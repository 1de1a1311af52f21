"""Measured costs of policies on the same units (seconds of requests, say), and what they say of the
policies' speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from spectune.traces.cost_table import FloatArray

Expected = Mapping[str, FloatArray]
"""Predicted cost of each unit, float64 [units], by policy id."""
TIE: Final = 0.01
"""Relative difference in speed below which the simpler policy is preferred."""
TRIM: Final = 0.1
"""Share of the units at either end that a comparison leaves out: a stall falls on one unit of one
policy, and says nothing of it."""


def finite(values: Sequence[float]) -> list[float | None]:
    """For JSON, which has no infinity: an interval's end that is not known is None."""
    return [v if math.isfinite(v) else None for v in values]


@dataclass(frozen=True)
class Estimate:
    """The logarithm of a ratio, its standard error, and the degrees of freedom of that (0: the
    error is not known)."""

    log: float
    error: float
    freedom: float

    def interval(self, level: float) -> tuple[float, float, float]:
        """(ratio, the ends of its two-sided interval by Student's t)."""
        if self.freedom < 1:
            return math.exp(self.log), 0.0, math.inf
        half = self.error * float(stdtrit(self.freedom, (1 + level) / 2))
        return math.exp(self.log), math.exp(self.log - half), math.exp(self.log + half)


@dataclass(frozen=True)
class Timings:
    """Measured costs by policy id, float64 [units, passes], NaN where not executed; ``expected``
    are those predicted, of the policies of which they are. ``by_size``: as
    :attr:`optimizer.bench.Bench.by_size`."""

    seconds: Mapping[str, FloatArray]
    expected: Expected | None = None
    by_size: bool = True

    def ratio(
        self,
        policy_id: str,
        base_id: str,
        *,
        projected: bool = False,
        level: float = 0.95,
    ) -> tuple[float, float, float]:
        """(speed-up of one policy over another, its interval) on the passes that both were executed
        in; a unit counts with the median of its passes. (0, inf) where fewer than two units are
        shared. ``projected``: on all units (:meth:`estimate`)."""
        return self.estimate(policy_id, base_id, projected=projected).interval(level)

    def estimate(
        self, policy_id: str, base_id: str, *, projected: bool = False, population: bool = False
    ) -> Estimate:
        """The logarithm of the speed-up of one policy over another.

        ``projected`` estimates it on all units: the predicted ratio there, times by how much the
        executed ratios exceed those predicted, in the mean of the units' logarithms without the
        :data:`TRIM` at either end (standard error of Tukey and McLaughlin, from winsorised values).
        Which units were executed cancels as far as prediction knows how they differ, and so does a
        prediction that is off by a factor. Where one of the two is not predicted, nothing is
        projected.

        ``population`` also counts that these units are a sample of others: the spread of the
        predicted ratios, and their covariance with the rest where it adds.
        """
        one, other = self.seconds[policy_id], self.seconds[base_id]
        shared = ~(np.isnan(one) | np.isnan(other))
        rows = np.flatnonzero(shared.any(1))
        if not len(rows):
            return Estimate(0.0, 0.0, 0)
        a, b = (_medians(np.where(shared, costs, np.nan)[rows]) for costs in (one, other))
        if projected and {policy_id, base_id} <= (self.expected or {}).keys():
            assert self.expected is not None
            of_one, of_other = self.expected[policy_id], self.expected[base_id]
            log, deviations = self._speedup(of_one, of_other)
            beyond = np.log(b / a) - np.log(of_other[rows] / of_one[rows])
            mean, error, freedom = _trimmed(beyond)
            if population and freedom:
                joint = max(0.0, float(np.cov(deviations[rows], beyond)[0, 1]))
                sampled = float(deviations.var(ddof=1) + 2 * joint) / len(deviations)
                error, freedom = _summed((error**2, freedom), (sampled, len(deviations) - 1))
            return Estimate(log + mean, error, freedom)
        log, deviations = self._speedup(a, b)
        if len(rows) < 2:
            return Estimate(log, 0.0, 0)
        return Estimate(log, float(deviations.std(ddof=1)) / math.sqrt(len(rows)), len(rows) - 1)

    def _speedup(self, one: FloatArray, other: FloatArray) -> tuple[float, FloatArray]:
        """The logarithm of a speed-up over all units together, and how much each departs from it
        (to first order), float64 [units]."""
        if self.by_size:
            return math.log(other.sum() / one.sum()), other / other.mean() - one / one.mean()
        logs = np.log(other / one)
        return float(logs.mean()), logs - logs.mean()

    def leader(self, policies: Sequence[str]) -> str:
        """The fastest of some policies on the units of a race, by point estimate against the first
        of them."""
        return max(policies, key=lambda p: self.ratio(p, policies[0], projected=True)[0])


def _trimmed(values: FloatArray) -> tuple[float, float, float]:
    """(trimmed mean, its standard error, degrees of freedom)."""
    n = len(values)
    cut = int(TRIM * n)
    ordered = np.sort(values)
    middle = ordered[cut : n - cut]
    if len(middle) < 2:
        return float(middle.mean()), 0.0, 0
    spread = np.clip(ordered, middle[0], middle[-1]).std(ddof=1)
    return float(middle.mean()), float(spread / ((1 - 2 * cut / n) * math.sqrt(n))), len(middle) - 1


def _summed(*variances: tuple[float, float]) -> tuple[float, float]:
    """(standard error, degrees of freedom) of a sum of independent estimates, each with its
    variance and the degrees of freedom of that (Welch and Satterthwaite)."""
    total = sum(variance for variance, _ in variances)
    parts = sum(variance**2 / freedom for variance, freedom in variances)
    freedom = total**2 / parts if parts > 0 else min(freedom for _, freedom in variances)
    return math.sqrt(total), freedom


def _medians(costs: FloatArray) -> FloatArray:
    """The median of each row, without its NaNs (numpy's is slow where there are few)."""
    ordered, count = np.sort(costs, axis=1), (~np.isnan(costs)).sum(1)
    rows = np.arange(len(costs))
    middle: NDArray[np.float64] = (ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]) / 2
    return middle
