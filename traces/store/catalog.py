"""Everything stored that is no recording and no publication: pairs, workloads, profiles, policies,
artifacts, studies, runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.traces.blobs import Content
from spectune.traces.schema import Outcome, Workload, kind_of
from spectune.traces.store.rows import Storage, insert, insert_absent, newest, require, resolve
from spectune.traces.tables import (
    Artifact,
    LatencyProfile,
    Pair,
    Run,
    StoredPolicy,
    StoredWorkload,
    Study,
)

Document = Mapping[str, Any]


class Catalog(Storage):
    """Documents by id; equal content is stored once. Whatever is got is named by its id, an
    unambiguous beginning of one, or ``latest``, and raises NotFoundError where there is none;
    lists are newest first, of what has the values given, without arrays and trials."""

    def put_pair(
        self, pair_id: str, name: str, document: Document, models: Document | None = None
    ) -> None:
        """Stores a pair under its fingerprint, with those of its ``models`` where they are known; a
        pair that is there already keeps its document, and its models where it has them."""
        values: dict[str, Any] = {"id": pair_id, "name": name, "document": dict(document)}
        values |= {"models": dict(models or {}), "created_at": self.clock()}
        with self.database.write() as session:
            if not insert_absent(session, Pair, values) and models:
                row = session.get_one(Pair, pair_id)
                row.models = row.models or dict(models)

    def get_pair(self, text: str) -> Pair:
        """Also by name: the newest of it."""
        with self.database.read() as session:
            named = session.scalars(newest(Pair, name=text)).first()
            pair = session.get(Pair, text) or named
            return pair or session.get_one(Pair, resolve(session, Pair, text))

    def list_pairs(self) -> tuple[Pair, ...]:
        return self._list(Pair)

    def put_workload(self, workload: Workload) -> str:
        """Stores a workload under its digest, which is returned."""
        digest, content = workload.digest(), workload.to_json()
        named: dict[str, Any] = {"id": digest, "name": workload.name, "n_requests": len(content)}
        self._put(StoredWorkload, **named, content=content)
        return digest

    def get_workload(self, text: str) -> Workload:
        row = self._get(StoredWorkload, text)
        return Workload.from_json(row.name, row.content)

    def put_profile(self, profile: LatencyProfile) -> str:
        """Stores a latency profile; its new id."""
        values = {f.name: getattr(profile, f.name) for f in fields(profile) if f.init}
        with self.database.write() as session:
            return self._put_new(session, LatencyProfile, "prof", **values)

    def get_profile(self, text: str) -> LatencyProfile:
        return self._get(LatencyProfile, text)

    def profile_of(
        self,
        pair_id: str,
        name: str | None = None,
        *,
        device: str,
        dtype: str | None = None,
        hardware: str | None = None,
    ) -> LatencyProfile | None:
        """The profile named, else the newest of a pair on a device, in a dtype and on hardware of
        that name (None: any); None where there is none."""
        if name:
            return self.get_profile(name)
        return next(self.profiles(pair_id, device, dtype, hardware), None)

    def profiles(
        self,
        pair_id: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        hardware: str | None = None,
    ) -> Iterator[LatencyProfile]:
        """Newest first, one in memory at a time. Profiles are of kinds of devices: of
        ``cuda:NVIDIA L4`` those of ``cuda``."""
        of: dict[str, Any] = {"pair_id": pair_id, "device": device and kind_of(device)}
        query = newest(LatencyProfile, LatencyProfile.id, **of, dtype=dtype)
        if hardware is not None:
            query = query.where(LatencyProfile.environment["device"].as_string() == hardware)
        with self.database.read() as session:
            names = session.scalars(query).all()
        for name in names:
            yield self.get_profile(name)

    def put_policy(self, policy_id: str, document: Document, label: str) -> None:
        """Stores a policy under the hash of its content; one that is there already is left
        alone."""
        self._put(StoredPolicy, id=policy_id, label=label, document=dict(document))

    def get_policy(self, text: str) -> StoredPolicy:
        return self._get(StoredPolicy, text)

    def list_policies(self) -> tuple[StoredPolicy, ...]:
        return self._list(StoredPolicy)

    def put_artifact(
        self,
        kind: str,
        document: Any,
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        pair_id: str | None = None,
        provenance: Document | None = None,
    ) -> str:
        """Stores something fitted; its id is 12 hex digits of the hash of kind and content: the
        same is stored once, and mended where what is stored is damaged."""
        name = _content_hash(kind, document, arrays or {})
        content = Content(dict(arrays or {}), document)
        made = {"pair_id": pair_id, "provenance": dict(provenance or {})}
        with self.database.write() as session:
            require(session, Pair, pair_id)
            row = {"id": name, "kind": kind, "content": content, "created_at": self.clock(), **made}
            statement = insert(session, Artifact).values(**row)
            session.execute(
                statement.on_conflict_do_update(
                    index_elements=["id"], set_={"content": statement.excluded.content}
                )
            )
        return name

    def get_artifact(self, text: str) -> Artifact:
        """Raises CorruptedChunkError when it is damaged."""
        return self._get(Artifact, text, "content")

    def list_artifacts(
        self, kind: str | None = None, pair_id: str | None = None
    ) -> tuple[Artifact, ...]:
        return self._list(Artifact, kind=kind, pair_id=pair_id)

    def put_study(
        self,
        pair_id: str,
        *,
        sampler: str,
        seed: int,
        document: Document,
        trials: Sequence[Document] = (),
        recording_id: str | None = None,
    ) -> str:
        """Stores a finished search; its new id. ``document`` is the summary that stays readable in
        SQL; trials are packed."""
        values: dict[str, Any] = {"sampler": sampler, "seed": seed, "document": dict(document)}
        values |= {"trials": [dict(t) for t in trials], "n_trials": len(trials)}
        values |= {"pair_id": pair_id, "recording_id": recording_id}
        with self.database.write() as session:
            return self._put_new(session, Study, "study", **values)

    def get_study(self, text: str) -> Study:
        """Raises CorruptedChunkError when its trials are damaged."""
        return self._get(Study, text, "trials")

    def list_studies(self, pair_id: str | None = None) -> tuple[Study, ...]:
        return self._list(Study, pair_id=pair_id)

    def put_run(
        self,
        pair_id: str,
        policy_id: str,
        outcome: Outcome,
        *,
        device: str,
        dtype: str,
        workload_id: str | None = None,
        purpose: str = "",
        options: Document | None = None,
    ) -> str:
        """Stores a run of a stored policy; its new id. Raises NotFoundError for an unknown pair or
        policy."""
        values: dict[str, Any] = {"pair_id": pair_id, "policy_id": policy_id, "device": device}
        values |= {"dtype": dtype, "workload_id": workload_id, "purpose": purpose}
        values |= {"options": dict(options or {}), "outcome": outcome, "kind": outcome.kind}
        with self.database.write() as session:
            require(session, StoredPolicy, policy_id)
            return self._put_new(session, Run, "run", **values)

    def get_run(self, text: str) -> Run:
        return self._get(Run, text)


def _content_hash(kind: str, document: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    h = hashlib.sha256(json.dumps([kind, document], sort_keys=True, ensure_ascii=False).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        h.update(f"{name} {array.dtype.str} {array.shape}".encode())
        h.update(array.tobytes())
    return h.hexdigest()[:12]
