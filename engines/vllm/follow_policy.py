"""From what is published to ``policy.json``, and from ``status.json`` to acknowledgements."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from spectune.db.database import Database
from spectune.db.database_errors import NotFoundError
from spectune.engines.vllm.folder import (
    FORMAT,
    ServerDescription,
    Status,
    object_in,
    read_policy,
    read_status,
    renewed,
    seed_for,
    table_of,
    trial_of,
    version_of,
    without_trial,
    write_policy,
)
from spectune.engines.vllm.locks import is_locked
from spectune.engines.vllm.servers import Models, method_of, models_of
from spectune.runtime.checkpoints import identity
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.reload import REASON_LIMIT
from spectune.traces.errors import PairError, PolicyError
from spectune.traces.schema import devices_of
from spectune.traces.store import TraceStore
from spectune.traces.store.publications import Newest
from spectune.traces.tables import AckStatus, FollowedServer, Rollout
from spectune.traces.text import one_line

Texts = str | float | None
"""Whose tokens are noted: ``all``, ``none``, a share; None: as the agent was started."""
SILENT_S: Final = 30.0
"""Seconds without a word of the agent, which says one each second, until its server is silent."""
HEARD_S: Final = 15.0
"""Seconds between two times that it is stored when the agent was heard."""
TTL_S: Final = 60.0
"""Seconds until the trial of a rollout ends that is not renewed."""
RENEW_S: Final = 10.0
"""Seconds between two renewals."""


def served_pair(engine: ServerDescription, named: PairSpec | None) -> tuple[PairSpec, str]:
    """The pair of a server, and the name of what drafts in it: its draft model's, ``ngram``,
    ``none``, or vLLM's name of another method. Raises PairError where ``named`` is of other
    models."""
    name, loaded = method_of(engine)
    if named is None:
        is_read = name == "draft_model" or name.startswith("eagle")  # by transformers
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


def file_of(database: Database) -> str:
    """A database for messages, a file's with its whole path."""
    is_file = database.dialect == "sqlite"
    return os.path.abspath(database.name) if is_file else database.name


def place_of(folder: Path) -> str:
    """A host and a folder there, where a later boot takes the place of an earlier one."""
    return f"{socket.gethostname()}:{folder.resolve()}"


class PolicyWriter:
    """Keeps ``policy.json`` at what is published for the server whose agent writes into a folder:
    the newest publication of the deployment, for a pair with the server's models, that the server
    can run. What another database, or a person, put there stays while there is none.

    A rollout that somebody conducts is a trial beside it, which is renewed while the database says
    so. A tuning may put trials there while it holds its lock; what is published meanwhile ends
    them. That of one that was killed is taken out, if it is not over yet.

    ``policies``: ids of policies by version, as the agent told them; ``version``: the newest
    publication for the server, 0 for none; ``pair_id``: of the server, empty before it is seen.
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
        self._tell, self._named, self._meeting = tell, pair, threading.Lock()
        self._boot, self._node, self._draft, self._models = "", "", "", Models("", "", "")
        """Of the server that was seen last."""
        self._heard_s, self._was_silent = 0.0, ""
        self._chosen_by: tuple[str, tuple[Newest, ...]] | None = None
        """The boot and the publications that were chosen from last; None: nothing is known yet of
        the boot that runs."""
        self._table: Mapping[str, Any] | None = None
        """What ``policy.json`` is to say, None where nothing is published that can run."""
        self._versions: frozenset[int] = frozenset()
        """Those published for pairs with the server's models."""
        self._is_new = False
        """Whether it was published since the look before."""
        self._trial: Mapping[str, Any] = {}
        """What ``policy.json`` is to say of a rollout, as it was renewed last."""
        self._renewal, self._renewed_s, self._turns = 0, 0.0, set[tuple[object, ...]]()
        self._pair_drafts: dict[str, str | None] = {}
        """By pair, which of its drafts the server has loaded."""
        self._answers: dict[int, tuple[AckStatus, str]] = {}
        """The last answer of the server's node to a publication."""
        self._published: dict[int, str] = {}
        """The policies of the publications that were asked for."""
        self._said = ""
        """Why nothing is in force by this database, as it was said last."""

    @cached_property
    def owner(self) -> Mapping[str, str]:
        """What ``policy.json`` says of the database that it was written from."""
        database = self.store.database
        return {"id": database.id, "name": file_of(database)}

    def look(self) -> None:
        """Writes ``policy.json`` where it is not what should be in force, and stores what the agent
        answered. Raises TraceError, PairError and DatabaseError; the next look goes on there."""
        status = self.status = read_status(self.folder)
        if status is None:
            return
        for table in filter(None, (status.in_force, status.trial)):
            self.policies[table.version] = table.policy or ""
        try:
            newest = self._learn(status)
            self._trial = self._trial_of(status)
        finally:  # also without the database, from what is known of this boot
            self._keep()
        self._answer(status, newest)
        self._hear(status)

    def _learn(self, status: Status) -> tuple[Newest, ...]:
        """What is published in the deployment, of which the newest that the server can run is
        chosen."""
        if status.boot != self._boot:
            self._chosen_by, self._table, self._trial = None, None, {}
            self._meet_running(status)
        newest = self.store.newest_publications(self.deployment)
        if (status.boot, newest) != self._chosen_by:
            version, table = self._choose(status.engine, newest)
            self._is_new = self._chosen_by is not None and version != self.version
            self.version, self._table = version, table
            self._chosen_by = (status.boot, newest)
        return newest

    def _meet_running(self, status: Status) -> None:
        try:
            row, draft = self.meet(status.boot, status.engine)
        except PairError:
            if self.store.followed_server(status.boot) is None:
                # It restarted with other models: what stands in policy.json was made for others.
                self._chosen_by = (status.boot, ())
            raise
        answers = self.store.acknowledgements(node=row.node)
        self._answers = {a.version: (a.status, a.reason) for a in answers}
        self._node, self.pair_id, self._draft = row.node, row.pair_id, draft
        self._models, self._heard_s = Models(**row.models), 0.0
        self._boot, self._pair_drafts = status.boot, {}

    def _trial_of(self, status: Status) -> Mapping[str, Any]:
        """The trial of a rollout that is for this server now, renewed where that is due; empty
        where there is none."""
        for rollout in self.store.conducted_rollouts(self.deployment):
            draft, device = self._draft_for(rollout.pair_id), status.engine.device_name
            in_force = 0 if self._table is None else self._table["version"]
            if draft is None or not rollout.is_tried_by(status.boot, device, in_force):
                continue
            try:
                policy = parse_policy(rollout.policy.document, where=f"rollout {rollout.id}")
                table = table_of(policy, status.engine, draft)
            except PolicyError as error:
                self._take_turns(rollout, status, status.at, str(error))
                continue
            self._tell_turns(rollout, status)
            seed = seed_for(rollout.seed, status.boot)
            about = {"version": rollout.trial_version, "seed": seed, "block_s": rollout.block_s}
            trial = json.loads(json.dumps({**table, **about}))
            is_same = {**self._trial, **trial, "boot": status.boot} == self._trial
            if is_same and time.monotonic() < self._renewed_s + RENEW_S:
                return self._trial
            new = renewed(trial, status, self._renewal, TTL_S)
            self._renewal, self._renewed_s = new["renewal"], time.monotonic()
            return new
        return {}

    def _tell_turns(self, rollout: Rollout, status: Status) -> None:
        """Stores since when the server takes turns, or why it does not."""
        tried, refused, version = status.trial, status.refused, rollout.trial_version
        if tried is not None and tried.version == version:
            self._take_turns(rollout, status, tried.since)
        if refused is not None and refused.version == version:
            self._take_turns(rollout, status, status.at, refused.reason)
        if status.fault:
            self._take_turns(rollout, status, status.at, status.fault)

    def _take_turns(
        self, rollout: Rollout, status: Status, since: float, problem: str = ""
    ) -> None:
        key = rollout.id, status.boot, problem or since
        if key not in self._turns:
            self.store.take_turns(rollout.id, status.boot, since, one_line(problem, REASON_LIMIT))
            self._turns.add(key)
            told = f"it does not take part: {problem}" if problem else "the server takes turns"
            self._tell(f"rollout {rollout.id}: {told}")

    def _draft_for(self, pair_id: str) -> str | None:
        """The name of the server's draft in a pair; None where that is of other models."""
        if pair_id not in self._pair_drafts:
            models = self.store.get_pair(pair_id).models
            draft = self._models.draft_in(models)
            is_own = draft is None and pair_id == self.pair_id
            self._pair_drafts[pair_id] = self._draft if is_own else draft
        return self._pair_drafts[pair_id]

    @property
    def is_in_force(self) -> bool:
        """Whether the server runs the newest publication for it. Raises DatabaseError."""
        if self.status is None or self.status.in_force.version != self.version:
            return False
        # A version of another database may have the same number.
        policy_id = self._policy_id(self.version) if self.version else ""
        return (self.status.in_force.policy or "") == policy_id

    def meet(self, boot: str, engine: ServerDescription) -> tuple[FollowedServer, str]:
        """The row of a boot of the server, stored where it is new, and the name of what drafts in
        it, in the row's pair. Raises PairError and DatabaseError."""
        with self._meeting:
            spec, draft = served_pair(engine, self._named)
            if row := self.store.followed_server(boot):
                pair = self.store.get_pair(row.pair_id)
                return row, Models(**row.models).draft_in(pair.models) or draft
            self.store.put_pair(spec.id, spec.name, spec.to_json(), spec.models)
            row = self.store.follow_server(
                boot,
                spec.id,
                engine.about,
                deployment=self.deployment,
                node=f"vllm:{socket.gethostname()}:{boot[:8]}",
                place=place_of(self.folder),
                models=models_of(engine)._asdict(),
            )
            self._tell(f"server {boot}: pair {spec.name} ({spec.id}), draft {draft}")
            return row, draft

    @property
    def silent_since(self) -> str:
        """Since when the agent said nothing, for a line; empty where it goes on."""
        if self.status is None or time.time() < self.status.at + SILENT_S:
            return ""
        return f"{datetime.fromtimestamp(self.status.at, UTC):%Y-%m-%d %H:%M:%S} UTC"

    def _hear(self, status: Status) -> None:
        """Stores from time to time when the agent was heard; says once that it is silent."""
        if (silent := self.silent_since) != self._was_silent:
            said = f"silent since {silent}" if silent else "it is heard again"
            self._tell(f"server {self._boot}: {said}")
            self._was_silent, self._heard_s = silent, 0.0
        if time.monotonic() >= self._heard_s:
            at = datetime.fromtimestamp(status.at, UTC)
            fault = one_line(status.fault or "", REASON_LIMIT)
            self.store.hear(self._boot, self.deployment, at, status.dropped, fault)
            self._heard_s = time.monotonic() + HEARD_S

    def _choose(
        self, engine: ServerDescription, newest: Sequence[Newest]
    ) -> tuple[int, Mapping[str, Any] | None]:
        """The newest publication for the server, and what ``policy.json`` says of the newest that
        it can run."""
        devices = devices_of(engine.device_name)
        drafts = {
            n.pair_id: draft
            for n in newest
            if n.device in devices and (draft := self._draft_in(n)) is not None
        }
        if not drafts:
            self._explain(engine, newest)
            self._versions = frozenset()
            return 0, None
        published = self.store.list_publications(None, engine.device_name, self.deployment)
        published = tuple(p for p in published if p.pair_id in drafts)
        self._versions = frozenset(p.version for p in published)
        for publication in published:
            version = publication.version
            try:
                policy = parse_policy(publication.document, where=f"publication {version}")
                table = table_of(policy, engine, drafts[publication.pair_id])
            except PolicyError as error:
                if publication is published[0] and self._answers.get(version) is None:
                    self._tell(f"publication {version} is refused: {error}")
                    self._acknowledge(version, "refused", str(error))
                continue
            document = {"version": version, **table, "database": self.owner}
            return published[0].version, json.loads(json.dumps(document))
        return published[0].version, None

    def _draft_in(self, newest: Newest) -> str | None:
        """The name of the server's draft in the pair of a publication; None where that is of other
        models."""
        draft = self._models.draft_in(newest.models)
        return self._draft if draft is None and newest.pair_id == self.pair_id else draft

    def _explain(self, engine: ServerDescription, newest: Sequence[Newest]) -> None:
        """Says once why nothing that is published is for this server."""
        line = ""
        if newest:
            last = max(newest, key=lambda n: n.version)
            loaded = f"{engine.model} with {engine.draft_model or self._models.method}"
            line = (
                f"version {last.version} of deployment {self.deployment} is not for this server, "
                f"which serves {loaded} on {engine.device_name}: it is for pair {last.pair_name} "
                f"({last.pair_id}) on {last.device}"
            )
        else:
            elsewhere = {
                n.deployment: n.version
                for n in self.store.newest_publications()
                if n.device in devices_of(engine.device_name) and self._draft_in(n) is not None
            }
            there = ", ".join(f"{name} (version {n})" for name, n in sorted(elsewhere.items()))
            if there:
                line = (
                    f"nothing is published in deployment {self.deployment}; for this server's "
                    f"models there is: {there}; --deployment names what is followed"
                )
        self._say_once(line)

    def _say_once(self, line: str) -> None:
        if line and line != self._said:
            self._tell(line)
            self._said = line

    def _keep(self) -> None:
        """Writes ``policy.json`` where it says something else than what should be in force."""
        found = read_policy(self.folder)
        base, tried, trial = without_trial(found), trial_of(found), self._trial
        if (tried or trial) and is_locked(self.folder, "tune"):
            is_ended = self._is_new and self._table is not None
            trial = {} if is_ended or tried.get("version") == trial.get("version") else tried
        self._is_new = False
        texts = {} if self.texts is None else {"texts": self.texts}
        version, owner = version_of(base), object_in(base, "database")
        if base.get("database") and not owner:
            self._say_once(
                "policy.json: its `database` is no object with id and name, so it counts as "
                "written by hand"
            )
        is_known = self._chosen_by is not None
        is_ours = is_known and owner.get("id") == self.owner["id"]
        if self._table is not None:
            wanted = {**self._table, **texts}
        elif version > 0 and is_ours:
            wanted = {"version": 0, **texts}
        elif not (tried or trial) and texts.items() <= found.items():
            if version > 0 and owner and is_known:
                held = f"policy.json holds version {version} of {owner.get('name')}, which stays"
                self._say_once(f"{held}: nothing is published here for this server")
            return
        else:
            wanted = {"version": 0, **base, **texts}
        is_changed = {"format": FORMAT, **wanted} != base
        if not is_changed and trial == tried:
            return
        write_policy(self.folder, {**wanted, "trial": dict(trial)} if trial else wanted)
        if tried and tried.get("version") != trial.get("version"):
            self._tell("a trial that is over, or that nobody renews, is taken out")
        if self._table is None and version > 0 and not wanted["version"]:
            self._tell(
                f"version {version} is taken out of policy.json: nothing in deployment "
                f"{self.deployment} is for this server, which drafts as it was started"
            )
        if self._table is not None and is_changed:
            over = f", over version {version} of {owner.get('name')}" if owner else ""
            told = f"publication {wanted['version']} is in policy.json"
            self._tell(told if is_ours else told + over)

    def _answer(self, status: Status, newest: Sequence[Newest]) -> None:
        """Stores what the server did with what is published."""
        now, refused = status.in_force, status.refused
        is_told = self._answers.get(now.version) == ("applied", "")
        # A version of another database, or a table written by hand, may have the same number.
        if now.version > 0 and not is_told and self._policy_id(now.version) == now.policy:
            self._acknowledge(now.version, "applied", "")
        if refused is not None and refused.version and self._is_ours(refused.version):
            self._acknowledge(refused.version, "refused", refused.reason)
        for version in {n.version for n in newest}:
            if version != now.version and self._answers.get(version) == ("applied", ""):
                runs = f"version {now.version}" if now.version else "its own number of draft tokens"
                self._acknowledge(version, "withdrawn", f"the server runs {runs}")

    def _is_ours(self, version: int) -> bool:
        """Whether a version that the server names is this database's, and for the server."""
        if version in self._versions:
            return True
        found = read_policy(self.folder)
        owner = object_in(found, "database")
        return version_of(found) == version and owner.get("id") == self.owner["id"]

    def _policy_id(self, version: int) -> str | None:
        """The policy of a publication, None where there is none yet."""
        if version not in self._published:
            policy_id = self.store.published_policy_id(version)
            if policy_id is None:
                return None
            self._published[version] = policy_id
        return self._published[version]

    def _acknowledge(self, version: int, status: AckStatus, reason: str) -> None:
        """Stores what a server did with a publication, where its last answer was another; other
        versions need no answer."""
        answer = status, one_line(reason, REASON_LIMIT)
        if self._answers.get(version) == answer:
            return
        stored = self.store.acknowledgements(version, self._node)
        if not stored or (stored[-1].status, stored[-1].reason) != answer:
            with suppress(NotFoundError):
                self.store.acknowledge(version, self._node, *answer)
                self._tell(f"publication {version} is {status} by the server")
        self._answers[version] = answer
