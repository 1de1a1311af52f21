"""What is in force: a decoder that follows it (publications in, acknowledgements out), and what
tuning compares with."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from spectune.db.database_errors import DatabaseError, NotFoundError, UnavailableError
from spectune.optimizer.deployment import other_sampling
from spectune.optimizer.inputs import published_policy
from spectune.optimizer.stored_artifacts import fitted
from spectune.runtime.decoder import check_lossless, check_together, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.runtime.reload import PATIENCE_S, Published, Status, WatchedSource
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Sampling, Verifier
from spectune.traces.store import TraceStore
from spectune.traces.store.publications import DEFAULT_DEPLOYMENT
from spectune.traces.tables import LatencyProfile, Publication
from spectune.traces.text import printable


def last_good(
    store: TraceStore,
    pair: LoadedPair,
    profile: LatencyProfile | None,
    verifier: Verifier = "coupled",
    sampling: Sampling | None = None,
    deployment: str = DEFAULT_DEPLOYMENT,
    *,
    together: bool = False,
) -> Plan:
    """The deployment's newest publication for this pair and device that this runtime can execute,
    with ``together`` for several requests at once, or autoregression when there is none. Raises
    DatabaseError alone."""
    for publication in store.list_publications(pair.id, pair.device_name, deployment):
        try:
            policy = published_policy(publication)
            return ready_plan(store, pair, policy, profile, verifier, sampling, together=together)
        except DatabaseError:
            raise
        except Exception:  # whatever a published document makes them raise: earlier ones may run
            continue
    return prepare(AUTOREGRESSIVE, pair.draft_names)


def ready_plan(
    store: TraceStore,
    pair: LoadedPair,
    policy: Policy,
    profile: LatencyProfile | None,
    verifier: Verifier,
    sampling: Sampling | None,
    version: int = 0,
    *,
    together: bool = False,
) -> Plan:
    """A policy made ready for a loaded pair. Raises PolicyError where it cannot run here (a router
    of another head, a choice with a candidate that cannot run), serves one request at a time and is
    to serve several ``together``, or ``verifier`` cannot be used with all that may decode, before
    anything is captured for it; UnavailableError where it may be ready another time."""
    check_lossless(pair, policy.candidates, verifier, sampling or Sampling())
    try:
        plan = prepare_for(
            pair, policy, profile=profile, version=version, artifacts=fitted(store, pair.id)
        )
    except UnavailableError:
        raise
    except DatabaseError as error:  # something it needs is gone, damaged or of another's making
        raise PolicyError(str(error)) from None
    if together:
        check_together(plan)
    return plan


def node_name() -> str:
    """How this process is named in acknowledgements."""
    return f"{socket.gethostname()}:{os.getpid()}"


@contextmanager
def watch(
    store: TraceStore,
    pair: LoadedPair,
    profile: LatencyProfile | None,
    *,
    deployment: str = DEFAULT_DEPLOYMENT,
    verifier: Verifier = "coupled",
    sampling: Sampling | None = None,
    together: bool = False,
    interval_s: float = 1.0,
    patience_s: float = PATIENCE_S,
    node: str = "",
    warn: Callable[[str], None] = lambda line: print(printable(line), file=sys.stderr),
) -> Iterator[WatchedSource[Plan]]:
    """A policy source that follows a deployment's publications for this pair and device.

    ``profile``: what windows weigh costs by; None: whenever a policy comes into force, the newest
    of this pair on this hardware in this dtype. The last good publication is in force until the
    first look, which happens before this returns. A publication that is no policy,
    cannot be prepared (an unknown draft, a window that needs costs and has none), that
    ``verifier`` would make lossy or that cannot serve several requests ``together``, where it is
    to, is acknowledged as refused. ``warn`` is told of one that was tuned
    for another sampling, as it comes into force.
    """
    device, who = pair.device_name, node or node_name()
    newest: list[Publication] = []  # what was fetched last

    def fetch() -> Published | None:
        if store.active_version(pair.id, device, deployment) == source.seen:
            return None
        active = store.active_publication(pair.id, device, deployment)
        if active is None:
            return None
        newest[:] = [active]
        try:
            return Published(active.version, published_policy(active))
        except PolicyError as error:
            return Published(active.version, None, str(error))

    def ready(policy: Policy, version: int) -> Plan:
        # Costs of this hardware may have been measured meanwhile.
        costs = profile or store.profile_of(pair.id, **pair.place)
        plan = ready_plan(
            store, pair, policy, costs, verifier, sampling, version, together=together
        )
        if warning := other_sampling(newest[0], sampling or Sampling(), verifier):
            warn(f"warning: {warning}")
        return plan

    def acknowledge(version: int, status: Status, reason: str) -> None:
        with suppress(NotFoundError):  # a publication that is gone needs no answer
            store.acknowledge(version, who, status, reason)

    now = profile or store.profile_of(pair.id, **pair.place)
    first = last_good(store, pair, now, verifier, sampling, deployment, together=together)
    source = WatchedSource(
        first,
        fetch,
        ready,
        acknowledge,
        interval_s=interval_s,
        patience_s=patience_s,
        retry=(DatabaseError,),
    )
    source.poll()
    with source:
        yield source


def earlier_winners(
    store: TraceStore, pair: LoadedPair, verifier: Verifier, sampling: Sampling, count: int = 5
) -> list[Policy]:
    """Returns the policies of the pair's newest publications, on any device, those that a choice by
    prompt has one by one; what cannot be read, or used with a verifier, is passed over."""
    winners: dict[str, Policy] = {}
    for publication in store.list_publications(pair.id, limit=count):
        try:
            policies = published_policy(publication).candidates
            check_lossless(pair, policies, verifier, sampling)
            winners |= {policy.id: policy for policy in policies}
        except PolicyError:
            continue
    return list(winners.values())
