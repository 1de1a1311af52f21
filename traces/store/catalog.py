"""Everything stored that is no recording and no publication: pairs, workloads, profiles, policies,
artifacts, studies, runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import select, update

from spectune.db import CorruptedChunkError
from spectune.db.models import (
    ArtifactRow,
    LatencyProfileRow,
    PairRow,
    PolicyRow,
    RunRow,
    StepChunkRow,
    StudyRow,
    WorkloadRow,
)
from spectune.traces.packing import pack_document, unpack_document
from spectune.traces.schema import (
    Counts,
    LatencyProfile,
    Outcome,
    RequestOutcome,
    Step,
    Workload,
)
from spectune.traces.store.recording_rows import step_values
from spectune.traces.store.rows import Storage, named_row, require, unpacked, value_of

Document = Mapping[str, Any]


@dataclass(frozen=True)
class StoredPair:
    """A pair as it was described when first used; ``id`` is the fingerprint of its content."""

    id: str
    name: str
    document: Document
    created_at: datetime


@dataclass(frozen=True)
class StoredProfile:
    """A latency profile and when it was measured."""

    id: str
    profile: LatencyProfile
    created_at: datetime


@dataclass(frozen=True)
class StoredPolicy:
    """A policy document; ``id`` is the hash of its content."""

    id: str
    label: str
    document: Document
    created_at: datetime


@dataclass(frozen=True, eq=False)
class Artifact:
    """Something fitted: a JSON document and arrays; ``id`` is the hash of kind and content."""

    id: str
    kind: str
    pair_id: str | None
    document: Any
    arrays: Mapping[str, npt.NDArray[Any]]
    provenance: Document
    created_at: datetime


@dataclass(frozen=True)
class Study:
    """A finished search and its trials."""

    id: str
    pair_id: str
    recording_id: str | None
    sampler: str
    seed: int
    document: Document
    trials: tuple[Document, ...]
    created_at: datetime


@dataclass(frozen=True)
class Run:
    """A policy executed or replayed, and what came of it."""

    id: str
    pair_id: str
    policy_id: str
    outcome: Outcome
    device: str
    dtype: str
    workload_id: str | None = None
    purpose: str = ""
    options: Document = field(default_factory=dict)
    created_at: datetime | None = None


class Catalog(Storage):
    """Documents by id; equal content is stored once. Whatever is got is named by its id, an
    unambiguous beginning of one, or ``latest``, and raises NotFoundError where there is none;
    lists are newest first, of what has the values given."""

    def put_pair(self, pair_id: str, name: str, document: Document) -> None:
        """Stores a pair under its fingerprint; a pair that is there already keeps its document."""
        self._put(PairRow, id=pair_id, name=name, document=dict(document))

    def get_pair(self, text: str) -> StoredPair:
        """Also by name: the newest of it."""
        with self.database.read() as session:
            named = select(PairRow).where(PairRow.name == text).order_by(PairRow.created_at.desc())
            row = session.get(PairRow, text) or session.scalars(named).first()
            return value_of(StoredPair, row or named_row(session, PairRow, text))

    def list_pairs(self) -> tuple[StoredPair, ...]:
        return self._list(PairRow, lambda row: value_of(StoredPair, row))

    def put_workload(self, workload: Workload) -> str:
        """Stores a workload under its digest, which is returned."""
        digest, content = workload.digest(), workload.to_json()
        self._put(
            WorkloadRow, id=digest, name=workload.name, n_requests=len(content), content=content
        )
        return digest

    def get_workload(self, text: str) -> Workload:
        return self._get(WorkloadRow, text, lambda row: Workload.from_json(row.name, row.content))

    def put_profile(self, profile: LatencyProfile) -> str:
        """Stores a latency profile; its new id."""
        document = profile.to_json()
        named = {name: document[name] for name in ("pair_id", "device", "dtype", "environment")}
        return self._put_new(LatencyProfileRow, "prof", document=document, **named)

    def get_profile(self, text: str) -> StoredProfile:
        return self._get(
            LatencyProfileRow,
            text,
            lambda row: StoredProfile(
                row.id, LatencyProfile.from_json(row.document), row.created_at
            ),
        )

    def latest_profile(
        self,
        pair_id: str,
        device: str,
        dtype: str | None = None,
        hardware: str | None = None,
    ) -> StoredProfile | None:
        """The newest profile of a pair on a device, in a dtype and on hardware of that name (None:
        any); None where there is none."""
        fits = (
            found
            for found in self.profiles(pair_id, device, dtype)
            if hardware in (None, found.profile.environment.get("device"))
        )
        return next(fits, None)

    def profile_of(
        self,
        pair_id: str,
        name: str | None = None,
        *,
        device: str,
        dtype: str | None = None,
        hardware: str | None = None,
    ) -> LatencyProfile | None:
        """The profile named, else :meth:`latest_profile`; None where there is none."""
        latest = self.latest_profile
        found = self.get_profile(name) if name else latest(pair_id, device, dtype, hardware)
        return None if found is None else found.profile

    def profiles(
        self, pair_id: str | None = None, device: str | None = None, dtype: str | None = None
    ) -> Iterator[StoredProfile]:
        """Newest first, one in memory at a time."""
        wanted = {"pair_id": pair_id, "device": device, "dtype": dtype}
        for (name,) in self._columns(LatencyProfileRow, LatencyProfileRow.id, **wanted):
            yield self.get_profile(name)

    def put_policy(self, policy_id: str, document: Document, label: str) -> None:
        """Stores a policy under the hash of its content; one that is there already is left
        alone."""
        self._put(PolicyRow, id=policy_id, label=label, document=dict(document))

    def get_policy(self, text: str) -> StoredPolicy:
        return self._get(PolicyRow, text, lambda row: value_of(StoredPolicy, row))

    def list_policies(self) -> tuple[StoredPolicy, ...]:
        return self._list(PolicyRow, lambda row: value_of(StoredPolicy, row))

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
        chunk = vars(pack_document(document, arrays))
        name = _content_hash(kind, document, arrays or {})
        made = {"pair_id": pair_id, "provenance": dict(provenance or {})}
        if not self._put(ArtifactRow, id=name, kind=kind, **made, **chunk):
            try:
                self.get_artifact(name)
            except CorruptedChunkError:
                with self.database.write() as session:
                    session.execute(update(ArtifactRow).filter_by(id=name).values(**chunk))
        return name

    def get_artifact(self, text: str) -> Artifact:
        """Raises CorruptedChunkError when it is damaged."""
        return self._get(ArtifactRow, text, _artifact)

    def list_artifacts(
        self, kind: str | None = None, pair_id: str | None = None
    ) -> tuple[tuple[str, str, str | None, Document], ...]:
        """(id, kind, pair, provenance), without unpacking them."""
        row = ArtifactRow
        columns = (row.id, row.kind, row.pair_id, row.provenance)
        return self._columns(row, *columns, kind=kind, pair_id=pair_id)

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
        return self._put_new(
            StudyRow,
            "study",
            pair_id=pair_id,
            recording_id=recording_id,
            sampler=sampler,
            seed=seed,
            n_trials=len(trials),
            document=dict(document),
            **vars(pack_document([dict(t) for t in trials])),
        )

    def get_study(self, text: str) -> Study:
        """Raises CorruptedChunkError when its trials are damaged."""
        return self._get(StudyRow, text, _study)

    def list_studies(
        self, pair_id: str | None = None
    ) -> tuple[tuple[str, str, int, Document, datetime], ...]:
        """(id, pair, number of trials, document, created_at), without unpacking the trials."""
        row = StudyRow
        columns = (row.id, row.pair_id, row.n_trials, row.document, row.created_at)
        return self._columns(row, *columns, pair_id=pair_id)

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
        steps: Mapping[str, Sequence[Step]] | None = None,
    ) -> str:
        """Stores a run of a stored policy, with its rounds by request id if given; its new id."""
        categories = {r.request_id: r.category for r in outcome.per_request}
        packed = [(name, step_values(rounds)) for name, rounds in (steps or {}).items()]
        with self.database.write() as session:
            require(session, PolicyRow, policy_id)
            run = self._insert_new(
                session,
                RunRow,
                "run",
                kind=outcome.kind,
                pair_id=pair_id,
                policy_id=policy_id,
                workload_id=workload_id,
                device=device,
                dtype=dtype,
                purpose=purpose,
                options=dict(options or {}),
                outcome=outcome_document(outcome),
            )
            for ordinal, (name, values) in enumerate(packed):
                of = {"request_id": name, "category": categories.get(name, "")}
                session.add(StepChunkRow(run_id=run, ordinal=ordinal, **of, **values))
        return run

    def get_run(self, text: str) -> Run:
        return self._get(RunRow, text, _run)


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """An outcome per request, JSON-ready, with its totals for SQL; :func:`outcome_of` is the
    inverse."""
    document = {
        "policy": outcome.policy,
        "kind": outcome.kind,
        "total": outcome.total.to_json(),
        "per_request": [
            [r.request_id, r.category, *asdict(r.counts).values()] for r in outcome.per_request
        ],
    }
    first = [r.first_s for r in outcome.per_request]
    return {**document, "first_s": first} if any(first) else document


def outcome_of(document: Document) -> Outcome:
    """The outcome that :func:`outcome_document` wrote."""
    rows = document["per_request"]
    first = document.get("first_s") or [0.0] * len(rows)
    per_request = tuple(
        RequestOutcome(name, category, Counts(*counts), s)
        for (name, category, *counts), s in zip(rows, first, strict=True)
    )
    return Outcome(document["policy"], document["kind"], per_request)


def _content_hash(kind: str, document: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    h = hashlib.sha256(json.dumps([kind, document], sort_keys=True, ensure_ascii=False).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        h.update(f"{name} {array.dtype.str} {array.shape}".encode())
        h.update(array.tobytes())
    return h.hexdigest()[:12]


def _run(row: RunRow) -> Run:
    return value_of(Run, row, outcome=outcome_of(row.outcome))


def _artifact(row: ArtifactRow) -> Artifact:
    document, arrays = unpacked(row, unpack_document, f"artifact {row.id} ({row.kind})")
    return value_of(Artifact, row, document=document, arrays=arrays)


def _study(row: StudyRow) -> Study:
    trials, _ = unpacked(row, unpack_document, f"the trials of study {row.id}")
    return value_of(Study, row, trials=tuple(trials))
