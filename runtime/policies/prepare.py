"""From a policy document to what the loop runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.by_prompt import stored_chooser
from spectune.runtime.policies.document import Policy, PromptPolicy
from spectune.runtime.policies.plan import Choice, Plan, compile_plan
from spectune.traces.schema import LatencyProfile


def prepare(
    policy: Policy,
    drafts: Collection[str],
    *,
    profile: LatencyProfile | None = None,
    version: int = 0,
    artifacts: Artifacts | None = None,
) -> Plan:
    """Compiles a policy for a pair whose drafts are ``drafts``.

    ``artifacts`` finds what the policy names that was fitted. Raises PolicyError when the draft is
    unknown, the window needs costs and there is no profile, or an artifact cannot be had, has
    another shape or was fitted on another draft. Of a choice by prompt all that holds for each of
    its candidates.
    """
    plans = tuple(
        compile_plan(candidate, drafts, profile=profile, version=version, artifacts=artifacts)
        for candidate in policy.candidates
    )
    if not isinstance(policy, PromptPolicy):
        return plans[0]
    choice = Choice(stored_chooser(policy, artifacts), plans)
    return replace(
        plans[0], policy=policy, policy_id=policy.id, label=policy.label(), choice=choice
    )
