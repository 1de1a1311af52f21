"""What ran in each round of a run whose policy changed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spectune.optimizer.execute import counts_of
from spectune.runtime.decoder import Decoded
from spectune.runtime.policies.document import Policy
from spectune.runtime.policies.plan import Plan
from spectune.traces.schema import Counts


@dataclass(frozen=True)
class Change:
    """The first round, from 1, of a request under another policy than the round before."""

    request: str
    round: int
    version: int
    before: str
    after: str

    def __str__(self) -> str:
        return (
            f"the policy changed at request {self.request}, round {self.round}: {self.before}, "
            f"then {self.after} (version {self.version})"
        )


@dataclass(frozen=True)
class Share:
    """What one policy did of a run. Seconds before a request's first round are of the policy that
    it began under."""

    policy: Policy
    counts: Counts

    def to_json(self) -> dict[str, Any]:
        return {"policy_id": self.policy.id, "label": self.policy.label(), **self.counts.to_json()}


def changes_of(decoded: Sequence[Decoded], before: Plan | None = None) -> list[Change]:
    """Where a run's policy changed, given what was in force before it. A policy that is published
    again is no other."""
    changes = []
    for request in decoded:
        for start, plan in request.plans:
            if before is not None and plan.policy.id != before.policy.id:
                name, labels = request.trajectory.request_id, (before.policy, plan.policy)
                changes.append(Change(name, start + 1, plan.version, *(p.label() for p in labels)))
            before = plan
    return changes


def shares_of(decoded: Sequence[Decoded]) -> list[Share]:
    """What each policy did, in the order in which they first ran."""
    shares: dict[str, Share] = {}
    for request in decoded:
        ends = [start for start, _ in request.plans[1:]] + [len(request.steps)]
        waited = request.seconds - sum(step.round_s for step in request.steps)
        seen: set[str] = set()
        for (start, plan), end in zip(request.plans, ends, strict=True):
            steps, name = request.steps[start:end], plan.policy.id
            counts = counts_of(steps, waited + sum(step.round_s for step in steps))
            waited = 0.0
            counts = counts if name not in seen else counts + Counts(requests=-1)
            seen.add(name)
            before = shares[name].counts if name in shares else Counts()
            shares[name] = Share(plan.policy, before + counts)
    return list(shares.values())


def label_of(shares: Sequence[Share], changes: Sequence[Change]) -> str:
    """A run's policies in few words: one label, or what ran first, and what then."""
    labels = [share.policy.label() for share in shares]
    if changes and changes[0].before != labels[0]:  # it came before anything ran
        changes = changes[1:]
    if len(labels) <= 3 and len(changes) == len(labels) - 1:
        return ", then ".join(labels)
    return f"{labels[0]}, then {len(changes)} changes"


def changes_json(shares: Sequence[Share], changes: Sequence[Change]) -> dict[str, Any]:
    """``changes`` (empty where the policy stayed) and ``by_policy``."""
    return {
        "changes": [asdict(change) for change in changes],
        "by_policy": [share.to_json() for share in shares],
    }
