"""Measured over predicted seconds of what a deployment served."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from spectune.engines.abilities import rules_of
from spectune.optimizer.replay.served_costs import fit_served, served_steps
from spectune.optimizer.replay.step_costs import step_costs, step_seconds
from spectune.runtime.costs import MeasuredRound, RoundKind, predicted_seconds
from spectune.runtime.policies.document import AUTOREGRESSIVE, LoadPolicy, Policy
from spectune.traces.cost_table import terms_from_json, terms_to_json
from spectune.traces.errors import PolicyError
from spectune.traces.recording import ServedRequest
from spectune.traces.store.alarms import WatchedRequest
from spectune.traces.tables import LatencyProfile, Recording

LEAST_STEPS: Final = 300
"""Steps of an engine that its costs are fitted to, at least."""
SAMPLED: Final = 200
"""Steps of a slot whose seconds are predicted, at most; of a request of the native decoder four."""


def engine_ratios(
    info: Recording, requests: Sequence[WatchedRequest], costs: dict[str, Any]
) -> list[float]:
    """Of steps of an engine. Their costs are fitted to the first that are enough, of which nothing
    is told, and put into ``costs`` (JSON-ready, by term)."""
    served = [ServedRequest(info.id, r.ordinal, r.n_prompt, r.steps) for r in requests]
    steps = served_steps(served, rules_of(info.engine, info.options.get("serving")))
    about = info.pair_id, str(info.options.get("device", "")), str(info.options.get("dtype", ""))
    if not costs:
        if len(steps) >= LEAST_STEPS:
            costs |= terms_to_json(fit_served(steps, *about, "").profile.terms)
        return []
    profile, ratios = LatencyProfile(*about, terms_from_json(costs)), list[float]()
    for load, seconds in steps[:: 1 + len(steps) // SAMPLED]:
        with suppress(PolicyError):  # a draft that was not loaded then
            predicted = step_seconds(step_costs(profile, load.draft), *load[1:])
            ratios += [seconds / predicted] if predicted > 0 else []
    return ratios


def native_ratios(
    requests: Sequence[WatchedRequest], policy: Policy, profile: LatencyProfile
) -> list[float]:
    """Of rounds of the native decoder under a policy that drafts chains; each other request of a
    step counts as one like it."""
    measured = list[tuple[MeasuredRound, int]]()
    for r in requests:
        steps = [s for s in r.steps if s.round_s > 0 and not s.reads_prompt]
        for s in steps[:: 1 + len(steps) // 4]:
            one = policy.at(s.batch) if isinstance(policy, LoadPolicy) else policy
            is_known = one.draft in profile.chain_drafts or not one.speculates
            if not is_known or one.is_tree or (s.drafted and s.draft != one.draft):
                continue
            rows = (s.lag, *[1] * (s.draft_steps - 1)) if s.draft_steps else ()
            kind = RoundKind.of(one if s.drafted else AUTOREGRESSIVE, tree=False)
            place = r.n_prompt + s.start - 1, rows, s.drafted, s.emitted
            measured.append(
                (MeasuredRound(kind, *place, s.draft_s, s.verify_s, s.round_s), s.batch)
            )
    predicted = predicted_seconds(profile, [[one] * batch for one, batch in measured])[:, 2]
    rounds = zip((one for one, _ in measured), predicted.tolist(), strict=True)
    return [one.round_s / expected for one, expected in rounds if expected > 0]
