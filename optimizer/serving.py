"""A decoder that follows the database: publications in, acknowledgements out."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from db.errors import DatabaseError
from runtime.loading import LoadedPair
from runtime.policies.document import Policy, parse_policy
from runtime.policies.prepared import PreparedPolicy, prepare
from runtime.reload import Published, WatchedSource
from traces.errors import PolicyError
from traces.schema import LatencyProfile
from traces.store import TraceStore


def node_name() -> str:
    """This process among those that acknowledge publications: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


@contextmanager
def watch(
    store: TraceStore,
    pair: LoadedPair,
    initial: Policy,
    profile: LatencyProfile | None,
    *,
    interval_s: float = 1.0,
    node: str | None = None,
) -> Iterator[WatchedSource]:
    """A policy source that follows the publications for this pair and device.

    ``initial`` is in force until the first look, which happens before this returns. A publication that cannot be prepared (an unknown
    draft, a window that needs costs and has none) is acknowledged as refused. Raises PolicyError when ``initial`` cannot run.
    """
    device, who = pair.device.type, node or node_name()

    def latest_profile() -> LatencyProfile | None:
        found = store.latest_profile(pair.id, device)
        return found.profile if found is not None else profile

    def fetch() -> Published | None:
        if store.active_version(pair.id, device) == source_version():
            return None
        active = store.active_publication(pair.id, device)
        if active is None:
            return None
        try:
            return Published(active.version, parse_policy(dict(active.document), where=f"publication {active.version}"))
        except PolicyError as error:
            return Published(active.version, None, str(error))

    def ready(policy: Policy, version: int) -> PreparedPolicy:
        return prepare(policy, pair.draft_names, profile=latest_profile(), version=version)

    def acknowledge(version: int, status: Literal["applied", "refused"], reason: str) -> None:
        store.acknowledge(version, who, status, reason)

    def source_version() -> int:
        return source.seen

    source = WatchedSource(
        prepare(initial, pair.draft_names, profile=profile),
        fetch,
        ready,
        acknowledge,
        interval_s=interval_s,
        retry=(DatabaseError,),
    )
    source.poll()
    with source:
        yield source
