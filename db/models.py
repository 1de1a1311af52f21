"""Every table but the scheduler's: what was recorded, run, measured, fitted, searched and
published.

Rows stay inside :mod:`db` and :mod:`traces.store`; everybody else sees the values of
:mod:`traces.schema`. Large columns of numbers are *packed*: one compressed blob per request (and
draft), with a checksum and the summaries that let SQL answer most questions without unpacking it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column

from spectune.db.base import Base
from spectune.db.types import OutsideJson, UtcDateTime

Document = dict[str, Any]
CASCADE = "CASCADE"


class Packed:
    """Columns of a packed blob. ``sha256`` is of ``data`` as stored; ``schema_version`` and
    ``codec`` say how to read it."""

    schema_version: Mapped[int]
    codec: Mapped[str] = mapped_column(String(16))
    sha256: Mapped[bytes] = mapped_column(LargeBinary)
    data: Mapped[bytes] = mapped_column(LargeBinary)


def _of_trajectory(name: str) -> ForeignKeyConstraint:
    columns = ["recording_id", "ordinal"]
    return ForeignKeyConstraint(
        columns, ["trajectory.recording_id", "trajectory.ordinal"], name=name, ondelete=CASCADE
    )


class PairRow(Base):
    """A target and its drafts; ``id`` is the fingerprint of their content."""

    __tablename__ = "pair"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(Text, index=True)
    document: Mapped[Document] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class WorkloadRow(Base):
    """Prompts; ``id`` is the digest of the requests."""

    __tablename__ = "workload"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(Text, index=True)
    n_requests: Mapped[int]
    content: Mapped[list[Any]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class RecordingRow(Base):
    """One recording: a workload decoded by a pair (``source`` record) or served traffic (``source``
    serve)."""

    __tablename__ = "recording"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), index=True)
    workload_id: Mapped[str | None] = mapped_column(ForeignKey("workload.id"), index=True)
    source: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    sampling: Mapped[Document] = mapped_column(JSON)
    max_new_tokens: Mapped[int]
    verifier: Mapped[str] = mapped_column(String(16))
    options: Mapped[Document] = mapped_column(JSON)
    progress: Mapped[Document] = mapped_column(JSON)
    spec_sha256: Mapped[str] = mapped_column(String(64), index=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class TrajectoryRow(Packed, Base):
    """One decoded request. ``data`` packs the prompt's and the output's token ids; ``rounds`` to
    ``seconds`` sum its steps."""

    __tablename__ = "trajectory"

    recording_id: Mapped[str] = mapped_column(
        ForeignKey("recording.id", ondelete=CASCADE), primary_key=True
    )
    ordinal: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    request_id: Mapped[str] = mapped_column(Text)
    category: Mapped[str] = mapped_column(Text, index=True)
    sampling: Mapped[Document] = mapped_column(JSON)
    max_new_tokens: Mapped[int]
    verifier: Mapped[str] = mapped_column(String(16))
    finish: Mapped[str] = mapped_column(String(16))
    stop_strings: Mapped[list[Any]] = mapped_column(JSON)
    n_prompt: Mapped[int]
    n_output: Mapped[int]
    rounds: Mapped[int]
    drafted: Mapped[int]
    accepted: Mapped[int]
    seconds: Mapped[float] = mapped_column(Double)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)


class PanoramaChunkRow(Packed, Base):
    """What one draft would propose from every start of one trajectory; ``kind`` is ``chain``, or of
    its trees ``tree`` (children ranked with the target's noise) or ``tree_q`` (ranked by
    probability alone).

    ``n`` positions; ``agree_count`` proposals that equal the text, ``none_count`` positions without
    a proposal; ``acceptance`` the mean chance that the verifier keeps a proposal. ``survived[j]``
    and ``at_risk[j]`` are sums over starts: proposals 0..j all kept; proposals 0..j-1 kept and a
    token of the text left at j. Of a tree these are its best children's, and the two lists are
    empty; ``width`` children of a node and ``gamma_max`` levels are held, and ``covers`` names the
    growths that replay exactly.
    """

    __tablename__ = "panorama_chunk"

    recording_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    ordinal: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    draft: Mapped[str] = mapped_column(String(128), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    gamma_max: Mapped[int]
    width: Mapped[int] = mapped_column(default=0, server_default="0")
    covers: Mapped[list[Any]] = mapped_column(JSON, default=list, server_default="[]")
    n: Mapped[int]
    agree_count: Mapped[int]
    none_count: Mapped[int]
    acceptance: Mapped[float] = mapped_column(Double)
    at_risk: Mapped[list[Any]] = mapped_column(JSON)
    survived: Mapped[list[Any]] = mapped_column(JSON)

    __table_args__ = (_of_trajectory("fk_panorama_chunk_trajectory"),)


class PolicyRow(Base):
    """A policy document; ``id`` is the hash of its content."""

    __tablename__ = "policy"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    label: Mapped[str] = mapped_column(Text)
    document: Mapped[Any] = mapped_column(OutsideJson)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class LatencyProfileRow(Base):
    """Measured costs of one pair on one device in one dtype."""

    __tablename__ = "latency_profile"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"))
    device: Mapped[str] = mapped_column(Text)
    dtype: Mapped[str] = mapped_column(String(16))
    document: Mapped[Document] = mapped_column(JSON)
    environment: Mapped[Document] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (Index("ix_latency_profile_of", "pair_id", "device", "dtype", "created_at"),)


class RunRow(Base):
    """A policy executed (or replayed) over a workload or recording; ``outcome`` is JSON, per
    request."""

    __tablename__ = "run"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), index=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policy.id"), index=True)
    workload_id: Mapped[str | None] = mapped_column(String(64))
    recording_id: Mapped[str | None] = mapped_column(String(32))
    profile_id: Mapped[str | None] = mapped_column(String(32))
    device: Mapped[str] = mapped_column(Text)
    dtype: Mapped[str] = mapped_column(String(16))
    purpose: Mapped[str] = mapped_column(Text)
    options: Mapped[Document] = mapped_column(JSON)
    outcome: Mapped[Document] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)


class StepChunkRow(Packed, Base):
    """The executed rounds of one request, of a recording or of a run.

    ``at_risk[j]`` counts rounds that kept j drafted tokens or more and had drafted one more;
    ``survived[j]`` those of them that kept it too.
    """

    __tablename__ = "step_chunk"

    id: Mapped[int] = mapped_column(primary_key=True)
    recording_id: Mapped[str | None] = mapped_column(String(32))
    run_id: Mapped[str | None] = mapped_column(ForeignKey("run.id", ondelete=CASCADE))
    ordinal: Mapped[int]
    request_id: Mapped[str] = mapped_column(Text)
    category: Mapped[str] = mapped_column(Text)
    policies: Mapped[list[Any]] = mapped_column(JSON)
    rounds: Mapped[int]
    drafted: Mapped[int]
    accepted: Mapped[int]
    emitted: Mapped[int]
    seconds: Mapped[float] = mapped_column(Double)
    at_risk: Mapped[list[Any]] = mapped_column(JSON)
    survived: Mapped[list[Any]] = mapped_column(JSON)

    __table_args__ = (
        _of_trajectory("fk_step_chunk_trajectory"),
        UniqueConstraint("recording_id", "ordinal"),
        UniqueConstraint("run_id", "ordinal"),
        CheckConstraint("(recording_id IS NULL) <> (run_id IS NULL)", name="one_owner"),
    )


class ArtifactRow(Packed, Base):
    """Something fitted that a policy needs; ``id`` is the hash of kind and content. ``data`` packs
    a JSON document and arrays."""

    __tablename__ = "artifact"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(64), index=True)
    pair_id: Mapped[str | None] = mapped_column(ForeignKey("pair.id"))
    provenance: Mapped[Document] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class StudyRow(Packed, Base):
    """A finished search; ``data`` packs its trials."""

    __tablename__ = "study"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), index=True)
    recording_id: Mapped[str | None] = mapped_column(String(32))
    sampler: Mapped[str] = mapped_column(Text)
    seed: Mapped[int] = mapped_column(BigInteger)
    n_trials: Mapped[int]
    document: Mapped[Document] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class PublicationRow(Base):
    """A policy put in force in a deployment, for a pair on a class of device. Rows are only ever
    added; of each deployment, pair and device the largest id is in force. ``sampling`` is what it
    was tuned for."""

    __tablename__ = "publication"

    id: Mapped[int] = mapped_column(primary_key=True)
    deployment: Mapped[str] = mapped_column(
        String(100), default="default", server_default="default"
    )
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"))
    device: Mapped[str] = mapped_column(Text)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policy.id"))
    sampling: Mapped[Any] = mapped_column(OutsideJson(none_as_null=True), nullable=True)
    supersedes: Mapped[int | None] = mapped_column(ForeignKey("publication.id"))
    evidence: Mapped[Any] = mapped_column(OutsideJson)
    actor: Mapped[str] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Text)
    idempotency_key: Mapped[str | None] = mapped_column(String(200), unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)

    # Without AUTOINCREMENT SQLite may hand out a deleted row's number again, and a watcher would
    # miss the newer one.
    __table_args__ = (
        Index("ix_publication_of", "deployment", "pair_id", "device", "id"),
        {"sqlite_autoincrement": True},
    )


class AcknowledgementRow(Base):
    """What one node did with a publication: ``applied``, or ``refused`` with the reason."""

    __tablename__ = "acknowledgement"

    id: Mapped[int] = mapped_column(primary_key=True)
    publication_id: Mapped[int] = mapped_column(
        ForeignKey("publication.id", ondelete=CASCADE), index=True
    )
    node: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
