"""What a figure shows of its target: it is met by the unfavourable end of an interval alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

import numpy as np

MET: Final = "met"
AGREES: Final = "agrees"
NOT_SHOWN: Final = "not shown"
NOT_MET: Final = "**not met**"
RESAMPLES: Final = 2000

Interval = Sequence[float | None]


def of_draws(drawn: Sequence[float]) -> list[float]:
    """The median of a figure over drawn samples, and its 95% interval: what one order of requests
    gives is one draw among them."""
    return [float(np.quantile(drawn, share)) for share in (0.5, 0.025, 0.975)]


def outcome(verdict: str, over: Sequence[float], following: Sequence[float]) -> str:
    """Of an executed verdict, by how many times as fast as no draft it is, and what would be next
    as it, with their intervals: right where one of them excludes that they are alike."""
    loses = (verdict != "nothing" and over[2] < 1) or following[1] > 1
    shown = over[1] > 1 or following[2] < 1
    return "wrong" if loses else "right" if shown else "a tie"


def exactly(holds: bool) -> str:
    """Of a count that is to be 0."""
    return MET if holds else NOT_MET


def at_least(interval: Interval, target: float) -> str:
    """Of a figure that is to be large, by the ends of its 95% interval; None is an end that is not
    known."""
    low, high = interval
    if low is not None and low >= target:
        return MET
    return NOT_MET if high is not None and high < target else NOT_SHOWN


def at_most(interval: Interval, target: float) -> str:
    """Of a figure that is to be small."""
    low, high = (None if end is None else -end for end in interval)
    return at_least((high, low), -target)


ORDER: Final = (MET, AGREES, NOT_SHOWN, NOT_MET)


def worst(verdicts: Iterable[str]) -> str:
    """Of a target with several parts."""
    return max(verdicts, key=ORDER.index)


def best(verdicts: Iterable[str]) -> str:
    """Of a target that one of several may meet; of none it is not shown."""
    return min(verdicts, key=ORDER.index, default=NOT_SHOWN)


def quantile_interval(values: Sequence[float], quantile: float) -> tuple[float, float]:
    """The 95% interval of a quantile of a population that these are drawn from (bootstrap)."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.quantile(drawn, quantile, axis=1), (0.025, 0.975))
    return float(low), float(high)


def prediction_errors(
    rows: Iterable[Mapping[str, Any]], name: str
) -> tuple[list[float], list[float]]:
    """How far the predictions of a figure are off the median execution, by row; and each execution
    off the median of the others, where there are several."""
    errors, again = list[float](), list[float]()
    for row in rows:
        each = row[name]
        errors.append(abs(row[f"predicted_{name}"] / median(each) - 1))
        if len(each) > 1:
            again += [abs(x / median([*each[:i], *each[i + 1 :]]) - 1) for i, x in enumerate(each)]
    return errors, again
