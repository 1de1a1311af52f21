"""The servers that are followed: which a policy is for, what they answered, and whether they are
still there."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from spectune.engines.vllm import servers as vllm_servers
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import PolicyError
from spectune.traces.schema import devices_of
from spectune.traces.store import TraceStore
from spectune.traces.tables import Acknowledgement, FollowedServer

SILENT: Final = timedelta(minutes=1)
"""Without a word for so long a server is silent; without a look `follow` has ended."""
GONE: Final = timedelta(minutes=10)
"""Servers without a word for so long are not counted on; `follow --once` may come now and then."""
KNOWN: Final = timedelta(days=1)
"""Servers without a word for so long are not named."""
LOOK_S: Final = 0.2
"""Seconds between two looks for an answer."""


@dataclass(frozen=True)
class Servers:
    """The servers that are followed anywhere, as they were at a moment."""

    every: tuple[FollowedServer, ...]
    now: datetime
    replaced: frozenset[str] = frozenset()
    """The nodes of earlier boots."""

    @classmethod
    def of(cls, store: TraceStore) -> Servers:
        """Those that a database knows."""
        boots = store.followed_servers()
        last = {server.place: server for server in boots}.values()
        return cls(tuple(last), store.clock(), frozenset(s.node for s in boots if s not in last))

    def of_deployment(self, deployment: str) -> list[FollowedServer]:
        """Those to count on in a deployment."""
        return [s for s in self.every if s.deployment == deployment and self._within(s, GONE)]

    def known(self) -> list[FollowedServer]:
        """Those that are named, wherever."""
        return [s for s in self.every if self._within(s, KNOWN)]

    def deployments(self) -> list[str]:
        """Where servers are followed."""
        return sorted({s.deployment for s in self.known()})

    def _within(self, server: FollowedServer, span: timedelta) -> bool:
        return _moment(server.heard_at) > self.now - span

    def silence(self, node: str) -> str:
        """Since when nothing is known of a node, for a line; empty where it speaks, or is none of
        those that are followed."""
        for server in self.every:
            heard, looked = _moment(server.heard_at), _moment(server.looked_at)
            if server.node == node and heard < looked - SILENT:
                return f"server silent since {heard:%Y-%m-%d %H:%M} UTC"
            if server.node == node and looked < self.now - SILENT:
                return f"not followed since {looked:%Y-%m-%d %H:%M} UTC"
        return ""


def _moment(moment: datetime | None) -> datetime:
    assert moment is not None, "of a server that was heard"
    return moment


def newest_answers(answers: Iterable[Acknowledgement], servers: Servers) -> list[Acknowledgement]:
    """The last answer of each node, but of boots in whose place another one is."""
    return list({a.node: a for a in answers if a.node not in servers.replaced}.values())


def answers_in_words(answers: Iterable[Acknowledgement], servers: Servers) -> str:
    """What servers did with a publication, each once, and which are silent."""
    said = []
    for a in newest_answers(answers, servers):
        silence = servers.silence(a.node)
        reason, away = a.reason and f": {a.reason}", silence and f" ({silence})"
        said.append(f"{a.node} {a.status}{reason}{away}")
    return "; ".join(said) or "nobody has applied it yet"


def why_not(
    server: FollowedServer, policy: Policy, name: str, pair: Mapping[str, Any], device: str
) -> str:
    """Why a server will not run a policy that is published on a device for a pair, by its name and
    its :attr:`PairSpec.models`; empty where it can, as far as is known: `serve` refuses what it
    cannot make ready."""
    if server.engine.get("engine") != "native":
        return vllm_servers.why_not(server, policy, name, pair, device)
    if device not in devices_of(here := server.engine["device_name"]):
        return f"it runs on {here}, and this is for {device}: say --device {here}"
    if any(server.models[part] != pair[part] for part in ("target", "drafts")):
        return f"it serves {server.engine['model']} as another pair than {name}"
    return ""


def able_servers(
    servers: Collection[FollowedServer],
    policy: Policy,
    pair: tuple[str, Mapping[str, Any]],
    device: str,
    tell: Callable[[str], None],
) -> list[FollowedServer]:
    """Those that can run a policy for a pair (its name and :attr:`PairSpec.models`) on a device;
    which cannot is told. Raises PolicyError where there are servers, and none can."""
    if not servers:
        return []
    reasons = {server.node: why_not(server, policy, *pair, device) for server in servers}
    lines = [f"{node}: {reason}" for node, reason in reasons.items() if reason]
    if len(lines) == len(servers):
        deployment = next(iter(servers)).deployment
        raise PolicyError(f"no server of deployment {deployment} can run it: {'; '.join(lines)}")
    for line in lines:
        tell(f"warning: it is not for {line}")
    return [server for server in servers if not reasons[server.node]]


def wait_for_answers(
    store: TraceStore, version: int, nodes: Collection[str], seconds: float
) -> bool:
    """Waits until each of these nodes, or where none is known any, has answered a publication;
    whether all of them applied it."""
    deadline = time.monotonic() + seconds
    while True:
        answers = {a.node: a.status for a in store.acknowledgements(version)}
        told = {node: answers.get(node) for node in nodes} if nodes else answers
        if told and all(told.values()):
            return set(told.values()) == {"applied"}
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
