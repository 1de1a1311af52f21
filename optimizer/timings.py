"""Measured seconds of policies on the same requests, and what they say of the policies' speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Expected = Mapping[str, NDArray[np.float64]]
"""Predicted seconds of each request of a race, by policy id."""


def finite(values: Sequence[float]) -> list[float | None]:
    """For JSON, which has no infinity: an interval's end that is not known is None."""
    return [v if math.isfinite(v) else None for v in values]


@dataclass(frozen=True)
class Timings:
    """Measured seconds by policy id, as arrays of (request, pass), NaN where not executed."""

    seconds: Mapping[str, NDArray[np.float64]]
    expected: Expected | None = None
    """Of policies that are not in it nothing was predicted: their ratios are those executed."""

    def ratio(
        self,
        policy_id: str,
        base_id: str,
        *,
        projected: bool = False,
        level: float = 0.95,
    ) -> tuple[float, float, float]:
        """(speed-up of one policy over another, interval) on the passes both were executed in: a
        request counts with its median seconds; the interval is Student's, of the ratio of sums over
        requests, linearised in its logarithm. (0, inf) where fewer than two requests are shared.

        ``projected`` estimates the ratio on all requests of the race: the executed ratio, times the
        predicted one there, over the predicted one on the executed requests. Which requests were
        executed cancels as far as prediction knows how they differ, and so does a prediction that
        is off by a factor; what stays is noise, and what prediction does not know.
        """
        one, other = self.seconds[policy_id], self.seconds[base_id]
        shared = ~(np.isnan(one) | np.isnan(other))
        rows = np.flatnonzero(shared.any(1))
        if not len(rows):
            return 1.0, 0.0, float("inf")
        a, b = (_medians(np.where(shared, seconds, np.nan)[rows]) for seconds in (one, other))
        ratio, deviations = b.sum() / a.sum(), b / b.mean() - a / a.mean()
        if projected and {policy_id, base_id} <= (self.expected or {}).keys():
            assert self.expected is not None
            whole = self.expected[base_id].sum() / self.expected[policy_id].sum()
            a, b = self.expected[policy_id][rows], self.expected[base_id][rows]
            ratio *= whole * a.sum() / b.sum()
            deviations = deviations - b / b.mean() + a / a.mean()
        if len(rows) < 2:
            return float(ratio), 0.0, float("inf")
        error = (
            deviations.std(ddof=1) / np.sqrt(len(rows)) * stdtrit(len(rows) - 1, (1 + level) / 2)
        )
        return float(ratio), float(ratio * np.exp(-error)), float(ratio * np.exp(error))

    def leader(self, policies: Sequence[str]) -> str:
        """The fastest of some policies on the requests of a race, by point estimate against the
        first of them."""
        return max(policies, key=lambda p: self.ratio(p, policies[0], projected=True)[0])


def _medians(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of each row, without its NaNs (numpy's is slow where there are few)."""
    ordered, count = np.sort(seconds, axis=1), (~np.isnan(seconds)).sum(1)
    rows = np.arange(len(seconds))
    middle: NDArray[np.float64] = (ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]) / 2
    return middle
