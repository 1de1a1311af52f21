"""From a policy document to what the loop runs."""

from __future__ import annotations

from collections.abc import Collection

from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import ChooserPolicy, Policy
from spectune.runtime.policies.plan import Plan, compile_plan
from spectune.runtime.policies.prepared_chooser import prepare_chooser
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
    unknown, the window needs costs and there is no profile, or an artifact cannot be had, has another
    shape or was fitted on another draft. Of a chooser all that holds for each of its candidates.
    """
    compiled = prepare_chooser if isinstance(policy, ChooserPolicy) else compile_plan
    return compiled(policy, drafts, profile=profile, version=version, artifacts=artifacts)
