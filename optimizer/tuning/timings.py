"""Measured costs of policies on the same units (seconds of requests, say), and what they say of the
policies' speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from spectune.traces.conversations import Index, summed, variance_of_mean
from spectune.traces.cost_table import FloatArray

Expected = Mapping[str, FloatArray]
"""Predicted cost of each unit, float64 [units], by policy id."""
TIE: Final = 0.01
"""Relative difference in speed below which the simpler policy is preferred."""

NOISE: Final = 0.15
"""Standard deviation assumed of the logarithm of two policies' ratio in one execution of both."""
FAR: Final = 4.0
CLEAR: Final = 0.05
"""Of the logarithm of a ratio; see :meth:`Timings.outliers`."""
NORMAL_QUARTILE: Final = 0.6745
"""The median departure of a normal distribution of standard deviation 1."""


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
        from scipy.special import stdtrit  # what only watches rollouts has none

        half = self.error * float(stdtrit(self.freedom, (1 + level) / 2))
        return math.exp(self.log), math.exp(self.log - half), math.exp(self.log + half)


@dataclass(frozen=True)
class Timings:
    """Measured costs by policy id, float64 [units, passes], NaN where not executed; ``expected``
    are those predicted, of the policies of which they are. ``by_size``, ``groups``: as a
    :class:`optimizer.tuning.bench.Bench` has them (None: each unit is a group of its own)."""

    seconds: Mapping[str, FloatArray]
    expected: Expected | None = None
    by_size: bool = True
    groups: Index | None = None

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
        """The logarithm of the speed-up of one policy over another: of the ratio of their summed
        costs (the mean of the ratios' logarithms where units do not weigh :attr:`by_size`), a unit
        counting with the median of its passes. Every unit counts: what slows a few of them is as
        much of a policy's cost as what speeds up the others.

        ``projected`` estimates it on all units: the predicted ratio there, times by how much the
        executed ratio exceeds the one predicted of the units executed. Which units were executed
        cancels as far as prediction knows how they differ, and so does a prediction that is off by
        a factor. Where one of the two is not predicted, nothing is projected.

        ``population`` also counts that these units are a sample of others: the spread of the
        predicted ratios, and their covariance with the rest where it adds.
        """
        rows, a, b = self._executed(policy_id, base_id)
        if not len(rows):
            return Estimate(0.0, 0.0, 0)
        of_one, of_other = self._predicted(policy_id, base_id, projected)
        predicted, of_units = self._speedup(of_one, of_other)
        beyond, of_rows = self._speedup(a, b, of_one[rows], of_other[rows])
        rest, weights = self._grouped(of_rows, rows), self._grouped(self._weights(a, b), rows)
        if len(rest) < 2:
            return Estimate(predicted + beyond, 0.0, 0)
        variances = [variance_of_mean(float(rest.var(ddof=1)), weights)]
        if population and of_units.any():
            known, executed = self._grouped(of_units), self._grouped(of_units[rows], rows)
            joint = max(0.0, float(np.cov(executed, rest)[0, 1]))
            weights = self._grouped(self._weights(of_one, of_other))
            variances.append(variance_of_mean(float(known.var(ddof=1) + 2 * joint), weights))
        return Estimate(predicted + beyond, *_summed(*variances))

    def outliers(self, policy_id: str, base_id: str) -> NDArray[np.intp]:
        """Numbers of the executed units whose ratio of costs, over the predicted one, stands out
        from the others', to either side: by :data:`FAR` standard deviations, as told by the median
        departure, and by :data:`CLEAR` at least."""
        rows, a, b = self._executed(policy_id, base_id)
        of_one, of_other = self._predicted(policy_id, base_id)
        logs = np.log(b / a) - np.log(of_other / of_one)[rows]
        departures = np.abs(logs - np.median(logs))
        deviation = float(np.median(departures)) / NORMAL_QUARTILE
        far: NDArray[np.intp] = rows[departures > max(FAR * deviation, CLEAR)]
        return far

    def _executed(
        self, policy_id: str, base_id: str
    ) -> tuple[NDArray[np.intp], FloatArray, FloatArray]:
        """(numbers of the units that both were executed on, both policies' costs of these by the
        passes that both have)."""
        one, other = self.seconds[policy_id], self.seconds[base_id]
        shared = ~(np.isnan(one) | np.isnan(other))
        rows = np.flatnonzero(shared.any(1))
        a, b = (medians(np.where(shared, costs, np.nan)[rows]) for costs in (one, other))
        return rows, a, b

    def _predicted(
        self, policy_id: str, base_id: str, projected: bool = True
    ) -> tuple[FloatArray, FloatArray]:
        """Predicted costs of all units under both; all alike where one is not predicted."""
        if not projected or not {policy_id, base_id} <= (self.expected or {}).keys():
            return (np.ones(len(self.seconds[policy_id])),) * 2
        assert self.expected is not None
        return self.expected[policy_id], self.expected[base_id]

    def _speedup(
        self,
        one: FloatArray,
        other: FloatArray,
        of_one: FloatArray | float = 1.0,
        of_other: FloatArray | float = 1.0,
    ) -> tuple[float, FloatArray]:
        """The logarithm of a speed-up over all units together, beyond the speed-up that is
        predicted of them (none by default), and how much each departs from it (to first order),
        float64 [units]."""
        if self.by_size:
            scale = np.mean(one) / np.mean(of_one), np.mean(other) / np.mean(of_other)
            departs = (other - scale[1] * of_other) / other.mean()
            departs = departs - (one - scale[0] * of_one) / one.mean()
            return math.log(scale[1] / scale[0]), departs
        logs = np.log(other / one) - np.log(np.divide(of_other, of_one))
        return float(logs.mean()), logs - logs.mean()

    def _weights(self, one: FloatArray, other: FloatArray) -> FloatArray:
        """The share of each unit in what a speed-up is estimated from, float64 [units]."""
        if self.by_size:
            shares: FloatArray = (one / one.mean() + other / other.mean()) / 2
            return shares
        return np.ones(len(one))

    def _grouped(self, values: FloatArray, rows: NDArray[np.intp] | None = None) -> FloatArray:
        """The sum of the values of each group, scaled so that their mean is that of all values:
        float64 [groups], or as they are where no unit shares a group. ``rows``: of which units they
        are (None: of all)."""
        if self.groups is None:
            return values
        sums: FloatArray = summed(values, self.groups if rows is None else self.groups[rows])
        return sums * len(sums) / len(values)

    def leader(self, policies: Sequence[str]) -> str:
        """The fastest of some policies on the units of a race, by point estimate against the first
        of them."""
        return max(policies, key=lambda p: self.ratio(p, policies[0], projected=True)[0])


def _summed(*variances: tuple[float, float]) -> tuple[float, float]:
    """(standard error, degrees of freedom) of a sum of independent estimates, each with its
    variance and the degrees of freedom of that (Welch and Satterthwaite)."""
    total = sum(variance for variance, _ in variances)
    parts = sum(variance**2 / freedom for variance, freedom in variances)
    freedom = total**2 / parts if parts > 0 else min(freedom for _, freedom in variances)
    return math.sqrt(total), freedom


def medians(costs: FloatArray) -> FloatArray:
    """The median of each row, without its NaNs (numpy's is slow where there are few)."""
    ordered, count = np.sort(costs, axis=1), (~np.isnan(costs)).sum(1)
    rows = np.arange(len(costs))
    middle: NDArray[np.float64] = (ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]) / 2
    return middle
