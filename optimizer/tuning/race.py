"""Racing policies: executed in turns on the same units, the clearly slower dropped, so that most of
the time goes to telling the fastest apart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from spectune.optimizer.spaces import complexity
from spectune.optimizer.tuning.bench import Bench, Prediction
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.optimizer.tuning.timings import NOISE, TIE, Expected, Timings
from spectune.runtime.policies.document import Policy
from spectune.traces.conversations import Index
from spectune.traces.schema import Outcome

BLOCK: Final = 4
"""Units between two looks at who is to be dropped, where a bench says nothing else."""
PASSES: Final = 8
"""Most times that a policy is executed on a unit."""
DROP_LEVEL: Final = 0.998
"""Level of the interval that drops a policy: there are many looks at many policies."""


@dataclass(frozen=True)
class Comparison:
    """Policies executed on the same units in turns, ``outcomes`` by policy id. ``texts`` are those
    of the requests, of which those differ whose tokens were not equal in every execution: none
    unless arithmetic is of low precision. ``timings`` has every execution, ``survivors`` the
    policies that a race did not drop."""

    outcomes: Mapping[str, Outcome]
    texts: ComparedTexts
    timings: Timings
    survivors: tuple[str, ...]


def race(
    bench: Bench,
    policies: Sequence[Policy],
    predictions: Mapping[str, Prediction],
    *,
    baselines: Collection[str] = (),
    passes: int = PASSES,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Races policies on a bench's race part (:func:`eliminate`). ``predictions`` by id, of those
    that have any; the ``baselines`` (ids) are executed to the end of the first pass."""
    groups = {policy.id: bench.group(policy) for policy in policies}
    with bench.execute(policies, "race") as execution:
        timings, survivors = eliminate(
            list(groups),
            bench.units("race"),
            execution,
            baselines=baselines,
            expected={name: prediction.costs for name, prediction in predictions.items()},
            by_size=bench.by_size,
            conversations=bench.groups("race"),
            group=groups.__getitem__,
            block=bench.block,
            passes=passes,
            budget_s=budget_s,
            clock=clock,
            progress=progress,
        )
        outcomes = {name: execution.outcome(name, timings.seconds[name]) for name in groups}
        return Comparison(outcomes, execution.texts, timings, survivors)


def eliminate(
    policies: Sequence[str],
    units: int,
    execute: Callable[[str, int], float],
    *,
    baselines: Collection[str] = (),
    expected: Expected | None = None,
    by_size: bool = True,
    conversations: Index | None = None,
    group: Callable[[str], str] = str,
    block: int = BLOCK,
    passes: int = PASSES,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Timings, tuple[str, ...]]:
    """Passes over the units, every policy (by id) on each; who goes first rotates.

    ``execute`` returns the cost of a unit (by number) under a policy. After every ``block`` units
    those are dropped whose 99.8% interval of the projected ratio to the leader lies below 1;
    ``baselines`` are executed to the end of the first pass all the same. It ends after a pass that
    left one, or nobody who can be faster than the leader by more than a :data:`TIE` in a 95%
    interval, which is all that a winner is chosen by; after ``passes``; or after ``budget_s`` (at
    least one unit is executed). Returns the timings and who was not dropped.
    """
    costs = {p: np.full((units, passes), np.nan) for p in policies}
    timings = Timings(costs, expected, by_size, conversations)
    racing, began, turn = list(policies), clock(), 0
    for k in range(passes):
        for n in range(units):
            if turn and budget_s is not None and clock() - began > budget_s:
                return timings, tuple(racing)
            executed = [p for p in policies if p in racing or (k == 0 and p in baselines)]
            for p in _rotated(executed, turn, group):
                timings.seconds[p][n, k] = execute(p, n)
            turn += 1
            progress(turn, units * passes)
            if turn % block == 0 or n + 1 == units:
                leader = timings.leader(racing)
                racing = [
                    p
                    for p in racing
                    if p == leader
                    or timings.ratio(p, leader, projected=True, level=DROP_LEVEL)[2] >= 1.0
                ]
        others = [timings.ratio(p, leader, projected=True) for p in racing if p != leader]
        if all(high <= 1.0 + TIE for _, _, high in others):
            break
    return timings, tuple(racing)


def _rotated(policies: Sequence[str], turn: int, group: Callable[[str], str]) -> list[str]:
    """The policies group by group; which group begins, and who in it, changes with the turn."""
    groups: dict[str, list[str]] = {}
    for policy in policies:
        groups.setdefault(group(policy), []).append(policy)

    def shifted(items: list[str]) -> list[str]:
        return items[turn % len(items) :] + items[: turn % len(items)]

    return [policy for name in shifted(list(groups)) for policy in shifted(groups[name])]


def fastest_of(
    policies: Sequence[Policy], timings: Timings, predicted: Mapping[str, float], spread: float
) -> Policy:
    """The fastest of the policies that a race did not drop, by execution and ``predicted`` tokens/s
    (by id, where known; ``spread``: of their ratios) together; of those that it is not faster than
    beyond noise, and that are predicted within a tie, the simplest."""
    first = policies[0].id

    def log_speedup(policy: Policy) -> float:
        """Over the first, as executed and as predicted, each weighed by the inverse of its
        variance; of a single unit, whose error is not known, that of one execution is assumed."""
        if policy.id == first:
            return 0.0
        ratio, low, high = timings.ratio(policy.id, first, projected=True)
        expected = predicted.get(policy.id, 0.0) / predicted.get(first, math.inf)
        if expected <= 0.0:
            return math.log(ratio)
        known = low > 0.0 and math.isfinite(high)
        error = max(1e-6, math.log(high / low) / (2 * 1.96)) if known else NOISE
        weights = (error**-2, spread**-2)
        return float(np.average([math.log(ratio), math.log(expected)], weights=weights))

    fastest = max(policies, key=log_speedup)
    tied = [fastest]
    for policy in policies:
        _, low, high = timings.ratio(fastest.id, policy.id, projected=True)
        close = predicted.get(fastest.id, math.inf) <= predicted.get(policy.id, 0.0) * (1 + TIE)
        if low <= 1.0 and (close or high <= 1.0 + TIE):
            tied.append(policy)
    return min(tied, key=lambda p: (complexity(p), -log_speedup(p)))
