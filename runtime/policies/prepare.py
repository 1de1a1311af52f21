"""From a policy document to what the loop runs."""

from __future__ import annotations

from collections.abc import Collection

from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AnyPolicy, ChooserPolicy
from spectune.runtime.policies.plan import compile_plan
from spectune.runtime.policies.prepared_chooser import AnyPlan, prepare_chooser
from spectune.traces.schema import LatencyProfile


def prepare(
    policy: AnyPolicy,
    drafts: Collection[str],
    *,
    profile: LatencyProfile | None = None,
    version: int = 0,
    artifacts: Artifacts | None = None,
) -> AnyPlan:
    """Compiles a policy for a pair whose drafts are ``drafts``.

    ``artifacts`` finds what the policy names that was fitted. Raises PolicyError when the draft is
    unknown, the window needs costs and there is no profile, or an artifact cannot be had, has
    another shape or was fitted on another draft. Of a chooser all that holds for each of its
    candidates.
    """
    if isinstance(policy, ChooserPolicy):
        return prepare_chooser(
            policy, drafts, profile=profile, version=version, artifacts=artifacts
        )
    return compile_plan(policy, drafts, profile=profile, version=version, artifacts=artifacts)
