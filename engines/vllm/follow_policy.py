"""From what is published to ``policy.json``, and from ``status.json`` to acknowledgements."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from spectune.db.errors import NotFoundError
from spectune.engines.abilities import VLLM
from spectune.engines.vllm.folder import (
    Engine,
    Status,
    read_policy,
    read_status,
    table_of,
    write_policy,
)
from spectune.runtime.checkpoints import identity
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.reload import REASON_LIMIT
from spectune.traces.errors import PairError, PolicyError
from spectune.traces.store import TraceStore
from spectune.traces.tables import AckStatus
from spectune.traces.text import one_line

Texts = str | float | None
"""Whose tokens are noted: ``all``, ``none``, a share; None: as the agent was started."""


def served_pair(engine: Engine, named: PairSpec | None) -> tuple[PairSpec, str]:
    """The pair of a server, and the name of what drafts in it: its draft model's, ``ngram``,
    ``none``, or vLLM's name of another method. Raises PairError where ``named`` is of other
    models."""
    loaded = engine.draft_model if engine.draft_model != engine.model else None
    method = engine.method or "none"
    name = "ngram" if method.startswith("ngram") else method
    if named is None:
        is_read = method == "draft_model" or method.startswith("eagle")  # by transformers
        drafts = {Path(loaded).name: loaded} if loaded is not None and is_read else {}
        document = {"name": Path(engine.model).name, "target": engine.model, "drafts": drafts}
        if not drafts and name not in ("none", "ngram"):
            document["methods"] = [name]
        return PairSpec.from_json(document, where="status.json"), next(iter(drafts), name)
    if identity(named.target) != identity(engine.model):
        raise PairError(
            f"the pair's target is {named.target}, but this server serves {engine.model}"
        )
    if loaded is None or name in named.methods:
        return named, name
    served = identity(loaded)
    for draft, path in named.drafts.items():
        if identity(path) == served:
            return named, draft
    raise PairError(f"none of the pair's drafts is {loaded}, which this server loaded")


class PolicyWriter:
    """Keeps ``policy.json`` at what is published for the server whose agent writes into a folder.

    The file is written when another publication is in force, at a new boot of the server and at
    the first look, and not where its content changed: who measures policies in turns may.
    ``policies``: ids of policies by version, as the agent told them. ``tell`` gets a line of what
    changed.
    """

    def __init__(
        self,
        store: TraceStore,
        folder: Path,
        deployment: str,
        tell: Callable[[str], None],
        *,
        pair: PairSpec | None = None,
        texts: Texts = None,
    ) -> None:
        self.store, self.folder, self.deployment, self.texts = store, folder, deployment, texts
        self.policies: dict[int, str] = {0: ""}
        self.status: Status | None = None
        self._tell, self._named = tell, pair
        self._server: tuple[str, Engine, str, str] | None = None
        """The boot, how it serves, its pair's id and its draft."""
        self._seen: tuple[str, int] | None = None
        """The boot and the version that were answered last."""
        self._acknowledged: set[tuple[int, str, str, str]] = set()

    @property
    def pair_id(self) -> str | None:
        """Of the server, None where none has told how it serves."""
        return self._server[2] if self._server else None

    @property
    def version(self) -> int:
        """Of the publication that was answered last, 0 where there is none."""
        return self._seen[1] if self._seen else 0

    def look(self) -> None:
        """Writes ``policy.json`` where another publication is in force, and stores what the agent
        answered. Raises TraceError, PairError and DatabaseError; the next look goes on there."""
        status = self.status = read_status(self.folder)
        if status is None:
            return
        self.policies[status.in_force.version] = status.in_force.policy or ""
        boot, engine, pair_id, draft = self._served(status)
        version = self.store.active_version(pair_id, engine.device, self.deployment)
        if (boot, version) != self._seen:
            self._answer(boot, engine, pair_id, draft, version)
            self._seen = boot, version
        if status.in_force.version:
            self._acknowledge(boot, status.in_force.version, "applied", "")
        if status.refused is not None and status.refused.version:
            reason = one_line(status.refused.reason, REASON_LIMIT)
            self._acknowledge(boot, status.refused.version, "refused", reason)

    def _served(self, status: Status) -> tuple[str, Engine, str, str]:
        if self._server is None or self._server[0] != status.boot:
            engine = status.engine
            spec, draft = served_pair(engine, self._named)
            self.store.put_pair(spec.id, spec.name, spec.to_json())
            self._server = status.boot, engine, spec.id, draft
        return self._server

    def _answer(self, boot: str, engine: Engine, pair_id: str, draft: str, version: int) -> None:
        """Puts a publication into ``policy.json``, or refuses it: the last policy stays then."""
        if not version:
            if self.texts is not None or read_policy(self.folder).get("version"):
                self._write({"version": 0})
            return
        publication = self.store.active_publication(pair_id, engine.device, self.deployment)
        if publication is None or publication.version != version:
            return  # a newer one: the next look has it
        try:
            policy = parse_policy(publication.document, where=f"publication {version}")
            if not isinstance(policy, Policy):
                VLLM.runs(policy)
            table = table_of(policy, engine, draft)
        except PolicyError as error:
            self._tell(f"publication {version} is refused: {error}")
            self._acknowledge(boot, version, "refused", one_line(str(error), REASON_LIMIT))
            return
        self._write({"version": version, **table})
        self._tell(f"publication {version} ({policy.label()}) is in policy.json")

    def _write(self, document: dict[str, Any]) -> None:
        texts = {} if self.texts is None else {"texts": self.texts}
        write_policy(self.folder, {**document, **texts})

    def _acknowledge(self, boot: str, version: int, status: AckStatus, reason: str) -> None:
        """Stores what a server did with a publication, once; other versions need no answer."""
        answer = version, f"vllm:{socket.gethostname()}:{boot[:8]}", status, reason
        if answer in self._acknowledged:
            return
        stored = self.store.acknowledgements(version)
        if answer not in [(a.version, a.node, a.status, a.reason) for a in stored]:
            with suppress(NotFoundError):
                self.store.acknowledge(*answer)
                self._tell(f"publication {version} is {status} by the server")
        self._acknowledged.add(answer)
