"""A decoder that follows the database: publications in, acknowledgements out."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from spectune.db.errors import DatabaseError, NotFoundError, UnavailableError
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.deployment import other_sampling
from spectune.optimizer.inputs import published_policy
from spectune.runtime.decoder import check_lossless, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, AnyPolicy
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.policies.prepared_chooser import AnyPlan
from spectune.runtime.reload import Published, Status, WatchedSource
from spectune.traces.errors import PolicyError
from spectune.traces.schema import LatencyProfile, Sampling, Verifier
from spectune.traces.store import Publication, TraceStore
from spectune.traces.store.publications import DEFAULT_DEPLOYMENT
from spectune.traces.text import printable


def last_good(
    store: TraceStore,
    pair: LoadedPair,
    profile: LatencyProfile | None,
    verifier: Verifier = "coupled",
    sampling: Sampling | None = None,
    deployment: str = DEFAULT_DEPLOYMENT,
) -> AnyPlan:
    """The deployment's newest publication for this pair and device that this runtime can execute,
    or autoregression when there is none. Raises DatabaseError alone."""
    for publication in store.list_publications(pair.id, pair.device.type, deployment):
        try:
            return _checked(
                pair,
                _prepared(store, pair, published_policy(publication), profile),
                verifier,
                sampling,
            )
        except DatabaseError:
            raise
        except (
            Exception
        ):  # what was published decides what is raised here, and those before it may run
            continue
    return prepare(AUTOREGRESSIVE, pair.draft_names)


def _prepared(
    store: TraceStore,
    pair: LoadedPair,
    policy: AnyPolicy,
    profile: LatencyProfile | None,
    version: int = 0,
) -> AnyPlan:
    """A policy made ready for a loaded pair. Raises PolicyError where it cannot run here, a router
    of another head and a chooser with a candidate that cannot run included; UnavailableError where
    it may be ready another time."""
    try:
        return prepare_for(
            pair,
            policy,
            profile=profile,
            version=version,
            artifacts=fitted(store, pair.id),
        )
    except UnavailableError:
        raise
    except DatabaseError as error:  # something it needs is gone, damaged or of another's making
        raise PolicyError(str(error)) from None


def _checked(
    pair: LoadedPair, prepared: AnyPlan, verifier: Verifier, sampling: Sampling | None
) -> AnyPlan:
    """The same, where ``verifier`` can be used with all policies that may decode; else
    PolicyError."""
    check_lossless(pair, (c.policy for c in prepared.candidates), verifier, sampling or Sampling())
    return prepared


@contextmanager
def watch(
    store: TraceStore,
    pair: LoadedPair,
    initial: AnyPolicy | None,
    profile: LatencyProfile | None,
    *,
    deployment: str = DEFAULT_DEPLOYMENT,
    verifier: Verifier = "coupled",
    sampling: Sampling | None = None,
    interval_s: float = 1.0,
    node: str | None = None,
    warn: Callable[[str], None] = lambda line: print(printable(line), file=sys.stderr),
) -> Iterator[WatchedSource[AnyPlan]]:
    """A policy source that follows a deployment's publications for this pair and device.

    ``initial`` (None: the last good publication) is in force until the first look, which happens
    before this returns. A publication that is no policy, cannot be prepared (an unknown draft, a
    window that needs costs and has none) or that ``verifier`` would make lossy is acknowledged as
    refused. ``warn`` is told of one that was tuned for another sampling, as it comes into force.
    Raises PolicyError when ``initial`` cannot run.
    """
    device, who = pair.device.type, node or f"{socket.gethostname()}:{os.getpid()}"
    newest: list[Publication] = []  # what was fetched last

    def latest_profile() -> LatencyProfile | None:
        found = store.latest_profile(pair.id, device)
        return found.profile if found is not None else profile

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

    def ready(policy: AnyPolicy, version: int) -> AnyPlan:
        plan = _checked(
            pair,
            _prepared(store, pair, policy, latest_profile(), version),
            verifier,
            sampling,
        )
        if warning := other_sampling(newest[0], sampling or Sampling(), verifier):
            warn(f"warning: {warning}")
        return plan

    def acknowledge(version: int, status: Status, reason: str) -> None:
        with suppress(NotFoundError):  # a publication that is gone needs no answer
            store.acknowledge(version, who, status, reason)

    source = WatchedSource(
        last_good(store, pair, profile, verifier, sampling, deployment)
        if initial is None
        else _prepared(store, pair, initial, profile),
        fetch,
        ready,
        acknowledge,
        interval_s=interval_s,
        retry=(DatabaseError,),
    )
    source.poll()
    with source:
        yield source
