"""What ran in each round of a run whose policy changed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spectune.optimizer.execute import counts_of
from spectune.runtime.decoder import Decoded
from spectune.runtime.policies.document import Policy
from spectune.runtime.policies.plan import Plan
from spectune.traces.schema import Counts

Shares = dict[str, tuple[Policy, Counts]]
"""What each policy did of a run, by its id, in the order in which they first ran."""


def changes_of(decoded: Sequence[Decoded], before: Plan | None = None) -> list[dict[str, Any]]:
    """The first ``round``, from 1, of each ``request`` under another policy than the round before
    (``before`` and ``after``: labels; ``version``: the publication), given what was in force before
    the first. A policy that is published again is no other. JSON-ready."""
    changes = []
    for request in decoded:
        for start, plan in request.plans:
            if before is not None and plan.policy.id != before.policy.id:
                place = {"request": request.trajectory.request_id, "round": start + 1}
                labels = {"before": before.policy.label(), "after": plan.policy.label()}
                changes.append({**place, "version": plan.version, **labels})
            before = plan
    return changes


def change_in_words(change: dict[str, Any]) -> str:
    return (
        "the policy changed at request {request}, round {round}: {before}, then {after} (version "
        "{version})"
    ).format(**change)


def shares_of(decoded: Sequence[Decoded]) -> Shares:
    """What each policy did. A request, and its seconds before the first round, count for the policy
    that it began under."""
    shares: Shares = {}
    for request in decoded:
        ends = [start for start, _ in request.plans[1:]] + [len(request.steps)]
        waited = request.seconds - sum(step.own_s for step in request.steps)
        for (start, plan), end in zip(request.plans, ends, strict=True):
            steps = request.steps[start:end]
            counts = counts_of(steps, waited + sum(step.own_s for step in steps))
            counts, waited = replace(counts, requests=int(start == 0)), 0.0
            before = shares.get(plan.policy.id, (plan.policy, Counts()))[1]
            shares[plan.policy.id] = plan.policy, before + counts
    return shares


def label_of(shares: Shares, changes: Sequence[Any]) -> str:
    """A run's policies in few words: one label, or what ran first, and what then."""
    labels = [policy.label() for policy, _ in shares.values()]
    if len(changes) < len(labels):
        return ", then ".join(labels)
    return f"{labels[0]}, then {len(changes)} changes"
