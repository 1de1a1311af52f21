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
from sqlalchemy import select

from spectune.db import CorruptedChunkError, DatabaseError, UnavailableError
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
from spectune.traces.codec import CodecError
from spectune.traces.packing import pack_document, pack_steps, unpack_document, unpack_steps
from spectune.traces.schema import (
    Counts,
    LatencyProfile,
    Outcome,
    RequestOutcome,
    Step,
    Workload,
    policy_id,
)
from spectune.traces.store.recording_rows import step_row
from spectune.traces.store.rows import (
    Storage,
    chunk_of,
    chunk_values,
    equal,
    insert_absent,
    named_row,
    newest_first,
    readable,
    require,
    value_of,
)

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
    """A policy document; ``id`` is the hash of its content. ``document`` and ``problem`` as
    :class:`traces.store.publications.Publication`'s."""

    id: str
    label: str
    document: Any
    created_at: datetime
    problem: str = ""


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
    recording_id: str | None = None
    profile_id: str | None = None
    purpose: str = ""
    options: Document = field(default_factory=dict)
    created_at: datetime | None = None


class Catalog(Storage):
    """Documents by id; equal content is stored once."""

    def put_pair(self, pair_id: str, name: str, document: Document) -> None:
        """Stores a pair under its fingerprint; a pair that is there already keeps its document."""
        with self.database.write() as session:
            values = {
                "id": pair_id,
                "name": name,
                "document": dict(document),
                "created_at": self.clock(),
            }
            insert_absent(session, PairRow, values)

    def get_pair(self, text: str) -> StoredPair:
        """By id, an unambiguous beginning of one, or ``latest``; else the newest pair of that name.
        Raises NotFoundError."""
        with self.database.read() as session:
            named = session.scalars(
                select(PairRow).where(PairRow.name == text).order_by(PairRow.created_at.desc())
            ).first()
            row = session.get(PairRow, text) or named
            if row is None:
                row = named_row(session, PairRow, text)
            return value_of(StoredPair, row)

    def list_pairs(self) -> tuple[StoredPair, ...]:
        """All pairs, newest first."""
        with self.database.read() as session:
            return tuple(
                value_of(StoredPair, row)
                for row in session.scalars(select(PairRow).order_by(*newest_first(PairRow)))
            )

    def put_workload(self, workload: Workload) -> str:
        """Stores a workload under its digest, which is returned."""
        digest = workload.digest()
        content = workload.to_json()
        values = {
            "id": digest,
            "name": workload.name,
            "n_requests": len(content),
            "content": content,
            "created_at": self.clock(),
        }
        with self.database.write() as session:
            insert_absent(session, WorkloadRow, values)
        return digest

    def get_workload(self, text: str) -> Workload:
        """By digest, an unambiguous beginning of one, or ``latest``. Raises NotFoundError, or
        CorruptedChunkError where the digest is another's."""
        with self.database.read() as session:
            return workload_of(named_row(session, WorkloadRow, text))

    def put_profile(self, profile: LatencyProfile) -> str:
        """Stores a latency profile; its new id."""
        document = profile.to_json()
        values = {
            "pair_id": profile.pair_id,
            "device": profile.device,
            "dtype": profile.dtype,
            "document": document,
            "environment": document["environment"],
            "created_at": self.clock(),
        }
        with self.database.write() as session:
            require(session, PairRow, profile.pair_id, "first")
            return self.insert_new(session, LatencyProfileRow, "prof", values)

    def get_profile(self, text: str) -> StoredProfile:
        """By id, an unambiguous beginning of one, or ``latest``. Raises NotFoundError."""
        with self.database.read() as session:
            row = named_row(session, LatencyProfileRow, text)
            return StoredProfile(row.id, LatencyProfile.from_json(row.document), row.created_at)

    def list_profiles(
        self, pair_id: str | None = None, device: str | None = None, dtype: str | None = None
    ) -> tuple[StoredProfile, ...]:
        """Profiles of a pair, device and dtype (each optional) that can be read, newest first."""
        return tuple(self._profiles(pair_id, device, dtype))

    def latest_profile(
        self, pair_id: str, device: str, dtype: str | None = None
    ) -> StoredProfile | None:
        """The newest profile of a pair on a device that can be read, or None."""
        return next(self._profiles(pair_id, device, dtype), None)

    def _profiles(
        self, pair_id: str | None, device: str | None, dtype: str | None
    ) -> Iterator[StoredProfile]:
        row = LatencyProfileRow
        query = select(row.id).where(
            *equal({row.pair_id: pair_id, row.device: device, row.dtype: dtype})
        )
        with self.database.read() as session:
            names = session.scalars(query.order_by(*newest_first(row))).all()
        for name in names:
            try:
                yield self.get_profile(name)
            except UnavailableError:
                raise
            except (
                DatabaseError
            ):  # of another's making, or of a newer spectune's: the others are as good as they were
                continue

    def put_policy(self, policy_id: str, document: Document, label: str) -> None:
        """Stores a policy under the hash of its content; one that is there already is left alone.
        Raises CorruptedChunkError where that one has another content, so that nobody runs or
        publishes it in this one's place."""
        with self.database.write() as session:
            values = {
                "id": policy_id,
                "label": label,
                "document": dict(document),
                "created_at": self.clock(),
            }
            if not insert_absent(session, PolicyRow, values):
                policy_of(session.get_one(PolicyRow, policy_id))

    def get_policy(self, text: str) -> StoredPolicy:
        """By id, an unambiguous beginning of one, or ``latest``. Raises NotFoundError, or
        CorruptedChunkError where the id is another policy's."""
        with self.database.read() as session:
            return policy_of(named_row(session, PolicyRow, text))

    def list_policies(self) -> tuple[StoredPolicy, ...]:
        """All policies, newest first."""
        with self.database.read() as session:
            return tuple(
                _policy(row)
                for row in session.scalars(select(PolicyRow).order_by(*newest_first(PolicyRow)))
            )

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
        same is stored once."""
        chunk = pack_document(document, arrays)
        name = _content_hash(kind, document, arrays or {})
        values = {
            "id": name,
            "kind": kind,
            "pair_id": pair_id,
            "provenance": dict(provenance or {}),
            "created_at": self.clock(),
            **chunk_values(chunk),
        }
        with self.database.write() as session:
            if pair_id is not None:
                require(session, PairRow, pair_id, "first")
            insert_absent(session, ArtifactRow, values)
        return name

    def get_artifact(self, text: str) -> Artifact:
        """By id or an unambiguous beginning of one. Raises NotFoundError, or CorruptedChunkError
        when it is damaged."""
        with self.database.read() as session:
            row = named_row(session, ArtifactRow, text)
        try:
            document, arrays = unpack_document(chunk_of(row))
        except CodecError as error:
            raise CorruptedChunkError(
                f"artifact {row.id} ({row.kind}) cannot be used ({error})"
            ) from error
        return value_of(Artifact, row, document=document, arrays=arrays)

    def list_artifacts(
        self, kind: str | None = None, pair_id: str | None = None
    ) -> tuple[tuple[str, str, str | None, datetime], ...]:
        """(id, kind, pair, created_at) of a kind and pair (each optional), newest first, without
        unpacking them."""
        columns = (ArtifactRow.id, ArtifactRow.kind, ArtifactRow.pair_id, ArtifactRow.created_at)
        query = select(*columns).where(
            *equal({ArtifactRow.kind: kind, ArtifactRow.pair_id: pair_id})
        )
        with self.database.read() as session:
            rows = session.execute(query.order_by(*newest_first(ArtifactRow)))
            return tuple((name, of, pair, at) for name, of, pair, at in rows)

    def artifact_origins(
        self, kind: str, pair_id: str | None = None
    ) -> tuple[tuple[str, Document], ...]:
        """(id, provenance) of the artifacts of a kind and pair (optional), newest first, without
        unpacking them."""
        wanted = equal({ArtifactRow.kind: kind, ArtifactRow.pair_id: pair_id})
        query = (
            select(ArtifactRow.id, ArtifactRow.provenance)
            .where(*wanted)
            .order_by(*newest_first(ArtifactRow))
        )
        with self.database.read() as session:
            return tuple((name, provenance) for name, provenance in session.execute(query))

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
        values = {
            "pair_id": pair_id,
            "recording_id": recording_id,
            "sampler": sampler,
            "seed": seed,
            "n_trials": len(trials),
            "document": dict(document),
            "created_at": self.clock(),
            **chunk_values(pack_document([dict(t) for t in trials])),
        }
        with self.database.write() as session:
            require(session, PairRow, pair_id, "first")
            return self.insert_new(session, StudyRow, "study", values)

    def get_study(self, text: str) -> Study:
        """By id, an unambiguous beginning of one, or ``latest``. Raises NotFoundError or
        CorruptedChunkError."""
        with self.database.read() as session:
            row = named_row(session, StudyRow, text)
        try:
            trials, _ = unpack_document(chunk_of(row))
        except CodecError as error:
            raise CorruptedChunkError(
                f"the trials of study {row.id} cannot be used ({error})"
            ) from error
        return value_of(Study, row, trials=tuple(trials))

    def list_studies(
        self, pair_id: str | None = None
    ) -> tuple[tuple[str, str, int, Document, datetime], ...]:
        """(id, pair, number of trials, document, created_at), newest first, without unpacking the
        trials."""
        columns = (
            StudyRow.id,
            StudyRow.pair_id,
            StudyRow.n_trials,
            StudyRow.document,
            StudyRow.created_at,
        )
        query = (
            select(*columns)
            .where(*equal({StudyRow.pair_id: pair_id}))
            .order_by(*newest_first(StudyRow))
        )
        with self.database.read() as session:
            return tuple(
                (name, pair, trials, document, at)
                for name, pair, trials, document, at in session.execute(query)
            )

    def put_run(
        self,
        pair_id: str,
        policy_id: str,
        outcome: Outcome,
        *,
        device: str,
        dtype: str,
        workload_id: str | None = None,
        recording_id: str | None = None,
        profile_id: str | None = None,
        purpose: str = "",
        options: Document | None = None,
        steps: Mapping[str, Sequence[Step]] | None = None,
    ) -> str:
        """Stores an executed or replayed run of a stored policy, with its rounds by request id if
        given; its new id."""
        values = {
            "kind": outcome.kind,
            "pair_id": pair_id,
            "policy_id": policy_id,
            "workload_id": workload_id,
            "recording_id": recording_id,
            "profile_id": profile_id,
            "device": device,
            "dtype": dtype,
            "purpose": purpose,
            "options": dict(options or {}),
            "outcome": outcome_document(outcome),
            "created_at": self.clock(),
        }
        categories = {r.request_id: r.category for r in outcome.per_request}
        packed = [
            (name, rounds, chunk_values(pack_steps(rounds)))
            for name, rounds in (steps or {}).items()
        ]
        with self.database.write() as session:
            require(session, PairRow, pair_id, "first")
            require(session, PolicyRow, policy_id, "before its runs")
            run = self.insert_new(session, RunRow, "run", values)
            for ordinal, (name, rounds, chunk) in enumerate(packed):
                session.add(
                    step_row(None, run, ordinal, name, categories.get(name, ""), rounds, chunk)
                )
        return run

    def get_run(self, text: str) -> Run:
        """By id, an unambiguous beginning of one, or ``latest``. Raises NotFoundError."""
        with self.database.read() as session:
            return _run(named_row(session, RunRow, text))

    def list_runs(
        self, pair_id: str | None = None, policy_id: str | None = None
    ) -> tuple[Run, ...]:
        """Runs of a pair and policy (each optional), newest first."""
        query = select(RunRow).where(*equal({RunRow.pair_id: pair_id, RunRow.policy_id: policy_id}))
        with self.database.read() as session:
            return tuple(
                _run(row) for row in session.scalars(query.order_by(*newest_first(RunRow)))
            )

    def run_steps(self, run: str) -> dict[str, tuple[Step, ...]]:
        """The rounds of a run by request id, in the order they were given. Raises
        CorruptedChunkError naming the request."""
        with self.database.read() as session:
            rows = session.scalars(
                select(StepChunkRow)
                .where(StepChunkRow.run_id == run)
                .order_by(StepChunkRow.ordinal)
            ).all()
        steps: dict[str, tuple[Step, ...]] = {}
        for row in rows:
            try:
                steps[row.request_id] = unpack_steps(chunk_of(row))
            except CodecError as error:
                raise CorruptedChunkError(
                    f"run {run}: the steps of request {row.request_id!r} cannot be used ({error})"
                ) from error
        return steps


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """An outcome per request, JSON-ready, with its totals for SQL; :func:`outcome_of` is the
    inverse."""
    per_request = [
        [r.request_id, r.category, *asdict(r.counts).values()] for r in outcome.per_request
    ]
    document = {
        "policy": outcome.policy,
        "kind": outcome.kind,
        "total": outcome.total.to_json(),
        "per_request": per_request,
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


def workload_of(row: WorkloadRow) -> Workload:
    """The workload that a row holds. Raises CorruptedChunkError unless its id is the digest of
    it."""
    try:
        workload = Workload.from_json(row.name, row.content)
        if workload.digest() == row.id and len(workload.requests) == row.n_requests:
            return workload
    except (TypeError, ValueError):
        pass  # no workload at all
    raise _mistaken("workload", row.id)


def policy_of(row: PolicyRow) -> StoredPolicy:
    """The policy that a row holds. Raises CorruptedChunkError unless its id is the hash of it."""
    if not isinstance(row.document, dict) or policy_id(row.document) != row.id:
        raise _mistaken("policy", row.id)
    return _policy(row)


def _mistaken(what: str, name: str) -> CorruptedChunkError:
    return CorruptedChunkError(
        f"{what} {name} has another content than its id says; restore the database from a backup"
    )


def _content_hash(kind: str, document: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    h = hashlib.sha256(json.dumps([kind, document], sort_keys=True, ensure_ascii=False).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        h.update(f"{name} {array.dtype.str} {array.shape}".encode())
        h.update(array.tobytes())
    return h.hexdigest()[:12]


def _policy(row: PolicyRow) -> StoredPolicy:
    document, problem = readable(row.document)
    return value_of(StoredPolicy, row, document=document, problem=problem)


def _run(row: RunRow) -> Run:
    return value_of(Run, row, outcome=outcome_of(row.outcome))
