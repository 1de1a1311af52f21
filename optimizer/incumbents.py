"""The policy in force and its successors: what tuning compares with, and how a winner takes its
place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy.orm import Session

from spectune.db.errors import StaleVersionError
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.inputs import published_policy
from spectune.optimizer.verdict import Tuned
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
        return (
            AUTOREGRESSIVE,
            f"publication {active.version} cannot run ({said}), so autoregression is the incumbent",
        )
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


def publish(
    store: TraceStore,
    pair: LoadedPair,
    tuned: Tuned,
    *,
    over: Publication | None,
    deployment: str,
    sampling: Mapping[str, Any] | None,
    actor: str,
    idempotency_key: str | None = None,
    guard: Callable[[Session], None] | None = None,
) -> Tuned:
    """Puts the winner, a policy that is stored, in force in a deployment with its evidence and the
    sampling it was tuned for, once per idempotency key, in place of ``over`` (None: of nothing).

    Where another version came into force meanwhile nothing is published, and the reason says so.
    Raises what ``guard`` raises.
    """
    try:
        published = store.publish(
            pair.id,
            pair.device.type,
            tuned.winner.policy.id,
            actor=actor,
            deployment=deployment,
            sampling=sampling,
            evidence=tuned.to_json(),
            reason=tuned.reason,
            idempotency_key=idempotency_key,
            expected=over.version if over else 0,
            guard=guard,
        )
    except StaleVersionError:
        now = store.active_version(pair.id, pair.device.type, deployment)
        reason = f"version {now} came into force meanwhile and was not compared, so it stays"
        reason = f"{reason}; `tune --recording {tuned.recording}` compares with it"
        return replace(tuned, reason=reason, superseded_by=now)
    return replace(tuned, published=published)
