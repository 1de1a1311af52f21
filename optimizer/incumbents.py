"""The policy in force, and those before it: what tuning compares with."""

from __future__ import annotations

from spectune.optimizer.artifacts import fitted
from spectune.optimizer.inputs import published_policy
from spectune.runtime.decoder import check_lossless, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, AnyPolicy, Policy
from spectune.traces.errors import PolicyError
from spectune.traces.schema import LatencyProfile, Sampling, Verifier
from spectune.traces.store import Publication, TraceStore


def incumbent_of(
    store: TraceStore,
    pair: LoadedPair,
    active: Publication | None,
    profile: LatencyProfile | None,
    verifier: Verifier,
    sampling: Sampling,
) -> tuple[AnyPolicy, str]:
    """(the policy in force, ""), or where there is none or it cannot run, or not under a verifier,
    (autoregression, why)."""
    if active is None:
        return AUTOREGRESSIVE, ""
    try:
        policy = published_policy(active)
        plan = prepare_for(pair, policy, profile=profile, artifacts=fitted(store, pair.id))
        check_lossless(pair, (c.policy for c in plan.candidates), verifier, sampling)
    except PolicyError as error:
        said = str(error).removeprefix(f"publication {active.version}: ")
        why = (
            f"publication {active.version} cannot run ({said}), so autoregression is the incumbent"
        )
        return AUTOREGRESSIVE, why
    return policy, ""


def earlier_winners(
    store: TraceStore, pair: LoadedPair, verifier: Verifier, sampling: Sampling, count: int = 5
) -> list[Policy]:
    """The plain policies of the pair's newest publications, on any device; those that cannot be
    read, or used with a verifier, are passed over."""
    found: dict[str, Policy] = {}
    for publication in store.list_publications(pair.id, limit=count):
        try:
            policy = published_policy(publication)
            if isinstance(policy, Policy):
                check_lossless(pair, [policy], verifier, sampling)
                found[policy.id] = policy
        except PolicyError:
            continue
    return list(found.values())
