"""From what is published to ``policy.json``, and from ``status.json`` to acknowledgements."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from spectune.db.errors import NotFoundError
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
from spectune.runtime.policies.document import parse_policy
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
    if not is_same(named.target, engine.model):
        raise PairError(
            f"the pair's target is {named.target}, but this server serves {engine.model}"
        )
    if loaded is None or name in named.methods:
        return named, name
    for draft, path in named.drafts.items():
        if is_same(path, loaded):
            return named, draft
    raise PairError(f"none of the pair's drafts is {loaded}, which this server loaded")


def is_same(path: str, other: str) -> bool:
    """Whether two checkpoints are the same. Raises PairError where one cannot be read."""
    return path == other or identity(path) == identity(other)


class PolicyWriter:
    """Keeps ``policy.json`` at what is published for the server whose agent writes into a folder.

    The file is written when another publication is in force, at a new boot of the server and at
    the first look, and not where its content changed: who measures policies in turns may.
    ``policies``: ids of policies by version, as the agent told them; ``version``: the publication
    that was answered last, 0 for none; ``pair_id``: of the server, empty before it is seen.
    ``tell`` gets a line of what changed.
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
        self.pair_id, self.version = "", 0
        self._tell, self._named = tell, pair
        self._boot, self._draft = "", ""
        """Of the server that was seen last."""
        self._answered: tuple[str, int] | None = None
        """The boot and the version that were answered last."""
        self._acknowledged: set[tuple[int, str, str, str]] = set()

    def look(self) -> None:
        """Writes ``policy.json`` where another publication is in force, and stores what the agent
        answered. Raises TraceError, PairError and DatabaseError; the next look goes on there."""
        status = self.status = read_status(self.folder)
        if status is None:
            return
        self.policies[status.in_force.version] = status.in_force.policy or ""
        if status.boot != self._boot:
            spec, self._draft = served_pair(status.engine, self._named)
            self.store.put_pair(spec.id, spec.name, spec.to_json())
            self._boot, self.pair_id = status.boot, spec.id
        version = self.store.active_version(self.pair_id, status.engine.device, self.deployment)
        if (status.boot, version) != self._answered:
            self._answer(status.engine, version)
            self._answered, self.version = (status.boot, version), version
        if status.in_force.version:
            self._acknowledge(status.in_force.version, "applied", "")
        if status.refused is not None and status.refused.version:
            self._acknowledge(status.refused.version, "refused", status.refused.reason)

    def _answer(self, engine: Engine, version: int) -> None:
        """Puts a publication into ``policy.json``, or refuses it: the last policy stays then."""
        if not version:
            if self.texts is not None or read_policy(self.folder).get("version"):
                self._write({"version": 0})
            return
        publication = self.store.active_publication(self.pair_id, engine.device, self.deployment)
        if publication is None or publication.version != version:
            return  # a newer one: the next look has it
        try:
            policy = parse_policy(publication.document, where=f"publication {version}")
            table = table_of(policy, engine, self._draft)
        except PolicyError as error:
            self._tell(f"publication {version} is refused: {error}")
            self._acknowledge(version, "refused", str(error))
            return
        self._write({"version": version, **table})
        self._tell(f"publication {version} ({policy.label()}) is in policy.json")

    def _write(self, document: dict[str, Any]) -> None:
        texts = {} if self.texts is None else {"texts": self.texts}
        write_policy(self.folder, {**document, **texts})

    def _acknowledge(self, version: int, status: AckStatus, reason: str) -> None:
        """Stores what a server did with a publication, once; other versions need no answer."""
        node = f"vllm:{socket.gethostname()}:{self._boot[:8]}"
        answer = version, node, status, one_line(reason, REASON_LIMIT)
        if answer in self._acknowledged:
            return
        stored = self.store.acknowledgements(version)
        if answer not in [(a.version, a.node, a.status, a.reason) for a in stored]:
            with suppress(NotFoundError):
                self.store.acknowledge(*answer)
                self._tell(f"publication {version} is {status} by the server")
        self._acknowledged.add(answer)
