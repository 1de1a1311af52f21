"""What a bench proves of policies that a search proposes: a race chooses one, and a confirmation
measures that one against what is in force."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from spectune.optimizer.bench import Bench, Prediction
from spectune.optimizer.confirm import (
    RACE_SHARE,
    Confirmation,
    Spread,
    confirm,
    left_s,
    planned,
    power_in_words,
    spread_of,
)
from spectune.optimizer.race import PASSES, Comparison, race
from spectune.optimizer.texts import ComparedTexts
from spectune.optimizer.verdict import Candidate, candidates_of, fastest_of
from spectune.runtime.policies.document import Policy
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import PolicyError, TraceError


@dataclass(frozen=True)
class Raced:
    """The ``candidates`` by role, the ``winner`` and the ``incumbent`` among them, and the race,
    which took so many ``seconds``."""

    candidates: tuple[Candidate, ...]
    winner: Candidate
    incumbent: Candidate
    race: Comparison
    seconds: float


def run_race(
    bench: Bench,
    roles: Mapping[str, Policy],
    incumbent: Policy,
    *,
    budget_s: float,
    passes: int = PASSES,
    tell: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = silent,
) -> Raced:
    """Races policies, by role, on the bench's race part, in its share of a budget, and chooses by
    execution and prediction together. A policy of several roles is executed once. Those that are no
    finalists are executed on all of the part. ``tell`` is told of what is not predicted."""
    policies = {policy.id: policy for policy in (*roles.values(), incumbent)}
    predictions: dict[str, Prediction] = {}
    for name, policy in policies.items():
        try:
            predictions[name] = bench.predict(policy, "race")
        except (PolicyError, TraceError) as error:
            tell(f"{policy.label()} is raced without a prediction: {error}")
    began = clock()
    comparison = race(
        bench,
        list(policies.values()),
        predictions,
        baselines={p.id for role, p in roles.items() if not role.startswith("finalist")},
        passes=passes,
        budget_s=budget_s * RACE_SHARE,
        clock=clock,
        progress=lambda done, total: progress("execute", done, total),
    )
    seconds = clock() - began
    outcomes = {name: prediction.result.outcome() for name, prediction in predictions.items()}
    candidates = candidates_of(roles, comparison, outcomes, incumbent)
    fastest = fastest_of(
        [policies[name] for name in comparison.survivors],
        comparison.timings,
        {name: prediction.speed for name, prediction in predictions.items()},
        bench.spread,
    )
    by_policy = {candidate.policy.id: candidate for candidate in candidates}
    winner, base = by_policy[fastest.id], by_policy[incumbent.id]
    return Raced(tuple(candidates), winner, base, comparison, seconds)


def confirm_winner(
    bench: Bench,
    raced: Raced,
    *,
    budget_s: float,
    passes: int = PASSES,
    tell: Callable[[str], None] = lambda line: None,
    progress: Progress = silent,
) -> tuple[Confirmation | None, ComparedTexts]:
    """The race's winner and the incumbent alone, on the part that nothing was fitted to or chosen
    by, in what the race left of the budget; and all texts compared. ``tell`` is told the power
    beforehand. None where the incumbent won."""
    names = winner, incumbent = raced.winner.policy.id, raced.incumbent.policy.id
    if winner == incumbent:
        return None, raced.race.texts
    costs, units = raced.race.timings.seconds, bench.units("confirm")
    # A cost need not be seconds; what a unit takes is in proportion to it.
    pace = raced.seconds / sum(float(np.nansum(of)) for of in costs.values())
    both_s = pace * sum(float(np.nanmean(costs[name])) for name in names)
    executions = planned(units, both_s, left_s(budget_s, raced.seconds), passes)
    used = min(units, executions)
    spread = spread_of(raced.race.timings, winner, incumbent) or Spread()
    power = power_in_words(spread, units, executions, seconds=both_s, budget_s=budget_s)
    tell(f"confirming {raced.winner.policy.label()} on {used} {bench.unit}: {power}")
    policies, expected = [raced.winner.policy, raced.incumbent.policy], {}
    for policy in policies:
        try:
            expected[policy.id] = bench.predict(policy, "confirm").costs
        except (PolicyError, TraceError):
            continue  # then nothing is projected
    with bench.execute(policies, "confirm") as execution:
        confirmation = confirm(
            *names,
            execution,
            units=units,
            executions=executions,
            expected=expected,
            by_size=bench.by_size,
            unit=bench.unit,
            chance=spread.chance(used, executions),
            progress=lambda done, total: progress("confirm", done, total),
        )
        return confirmation, raced.race.texts + execution.texts
