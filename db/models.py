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
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column

import spectune.db.schedules  # noqa: F401  # its tables are on the same metadata
from spectune.db.base import Base, Document, Str16, Str32, Str64, Str200

CASCADE = "CASCADE"


class Packed:
    """Columns of a packed blob, which says itself how to read it. ``sha256`` is of ``data`` as
    stored."""

    sha256: Mapped[bytes]
    data: Mapped[bytes]


def _of_trajectory(name: str) -> ForeignKeyConstraint:
    columns = ["recording_id", "ordinal"]
    return ForeignKeyConstraint(
        columns, ["trajectory.recording_id", "trajectory.ordinal"], name=name, ondelete=CASCADE
    )


class PairRow(Base):
    """A target and its drafts; ``id`` is the fingerprint of their content."""

    __tablename__ = "pair"

    id: Mapped[Str64] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    document: Mapped[Document]
    created_at: Mapped[datetime]


class WorkloadRow(Base):
    """Prompts; ``id`` is the digest of the requests."""

    __tablename__ = "workload"

    id: Mapped[Str64] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    n_requests: Mapped[int]
    content: Mapped[list[Any]]
    created_at: Mapped[datetime]


class RecordingRow(Base):
    """One recording: a workload decoded by a pair (``source`` record) or served traffic (``source``
    serve)."""

    __tablename__ = "recording"

    id: Mapped[Str32] = mapped_column(primary_key=True)
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), index=True)
    workload_id: Mapped[str | None] = mapped_column(ForeignKey("workload.id"), index=True)
    source: Mapped[Str16]
    state: Mapped[Str16]
    sampling: Mapped[Document]
    max_new_tokens: Mapped[int]
    verifier: Mapped[Str16]
    options: Mapped[Document]
    progress: Mapped[Document]
    spec_sha256: Mapped[Str64] = mapped_column(index=True)
    created_at: Mapped[datetime] = mapped_column(index=True)
    finished_at: Mapped[datetime | None]


class TrajectoryRow(Packed, Base):
    """One decoded request. ``data`` packs the prompt's and the output's token ids; ``rounds`` to
    ``seconds`` sum its steps."""

    __tablename__ = "trajectory"

    recording_id: Mapped[str] = mapped_column(
        ForeignKey("recording.id", ondelete=CASCADE), primary_key=True
    )
    ordinal: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    request_id: Mapped[str]
    category: Mapped[str] = mapped_column(index=True)
    sampling: Mapped[Document]
    max_new_tokens: Mapped[int]
    verifier: Mapped[Str16]
    finish: Mapped[Str16]
    stop_strings: Mapped[list[Any]]
    n_prompt: Mapped[int]
    n_output: Mapped[int]
    rounds: Mapped[int]
    drafted: Mapped[int]
    accepted: Mapped[int]
    seconds: Mapped[float]
    created_at: Mapped[datetime] = mapped_column(index=True)


class PanoramaChunkRow(Packed, Base):
    """What one draft would propose from every start of one trajectory.

    Chains of ``gamma_max`` tokens are held, trees of ``width`` children a node and ``depth``
    levels, and what ``covers`` names. ``n`` positions; of the first proposals ``agree_count`` equal
    the text; ``acceptance``: the mean chance that the verifier keeps one. ``survived[j]`` and
    ``at_risk[j]`` are sums over the chains from every start: proposals 0..j all kept; proposals
    0..j-1 kept and a token of the text left at j.
    """

    __tablename__ = "panorama_chunk"

    recording_id: Mapped[Str32] = mapped_column(primary_key=True)
    ordinal: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    draft: Mapped[str] = mapped_column(String(128), primary_key=True)
    gamma_max: Mapped[int]
    width: Mapped[int]
    depth: Mapped[int]
    covers: Mapped[list[Any]]
    n: Mapped[int]
    agree_count: Mapped[int]
    acceptance: Mapped[float]
    at_risk: Mapped[list[Any]]
    survived: Mapped[list[Any]]

    __table_args__ = (_of_trajectory("fk_panorama_chunk_trajectory"),)


class PolicyRow(Base):
    """A policy document; ``id`` is the hash of its content."""

    __tablename__ = "policy"

    id: Mapped[Str64] = mapped_column(primary_key=True)
    label: Mapped[str]
    document: Mapped[Document]
    created_at: Mapped[datetime]


class LatencyProfileRow(Base):
    """Measured costs of one pair on one device in one dtype."""

    __tablename__ = "latency_profile"

    id: Mapped[Str32] = mapped_column(primary_key=True)
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"))
    device: Mapped[str]
    dtype: Mapped[Str16]
    document: Mapped[Document]
    environment: Mapped[Document]
    created_at: Mapped[datetime]

    __table_args__ = (Index("ix_latency_profile_of", "pair_id", "device", "dtype", "created_at"),)


class RunRow(Base):
    """A policy executed (or replayed) over a workload or recording; ``outcome`` is JSON, per
    request."""

    __tablename__ = "run"

    id: Mapped[Str32] = mapped_column(primary_key=True)
    kind: Mapped[Str16]
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), index=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policy.id"), index=True)
    workload_id: Mapped[Str64 | None]
    recording_id: Mapped[Str32 | None]
    profile_id: Mapped[Str32 | None]
    device: Mapped[str]
    dtype: Mapped[Str16]
    purpose: Mapped[str]
    options: Mapped[Document]
    outcome: Mapped[Document]
    created_at: Mapped[datetime] = mapped_column(index=True)


class StepChunkRow(Packed, Base):
    """The executed rounds of one request, of a recording or of a run.

    ``at_risk[j]`` counts rounds that kept j drafted tokens or more and had drafted one more;
    ``survived[j]`` those of them that kept it too.
    """

    __tablename__ = "step_chunk"

    id: Mapped[int] = mapped_column(primary_key=True)
    recording_id: Mapped[Str32 | None]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("run.id", ondelete=CASCADE))
    ordinal: Mapped[int]
    request_id: Mapped[str]
    category: Mapped[str]
    policies: Mapped[list[Any]]
    rounds: Mapped[int]
    drafted: Mapped[int]
    accepted: Mapped[int]
    emitted: Mapped[int]
    seconds: Mapped[float]
    at_risk: Mapped[list[Any]]
    survived: Mapped[list[Any]]

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

    id: Mapped[Str32] = mapped_column(primary_key=True)
    kind: Mapped[Str64] = mapped_column(index=True)
    pair_id: Mapped[str | None] = mapped_column(ForeignKey("pair.id"))
    provenance: Mapped[Document]
    created_at: Mapped[datetime]


class StudyRow(Packed, Base):
    """A finished search; ``data`` packs its trials."""

    __tablename__ = "study"

    id: Mapped[Str32] = mapped_column(primary_key=True)
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), index=True)
    recording_id: Mapped[Str32 | None]
    sampler: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    n_trials: Mapped[int]
    document: Mapped[Document]
    created_at: Mapped[datetime]


class PublicationRow(Base):
    """A policy put in force in a deployment, for a pair on a class of device. Rows are only ever
    added; of each deployment, pair and device the largest id is in force. ``sampling`` is what it
    was tuned for."""

    __tablename__ = "publication"

    id: Mapped[int] = mapped_column(primary_key=True)
    deployment: Mapped[str] = mapped_column(String(100))
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"))
    device: Mapped[str]
    policy_id: Mapped[str] = mapped_column(ForeignKey("policy.id"))
    sampling: Mapped[Document | None] = mapped_column(JSON(none_as_null=True))
    supersedes: Mapped[int | None] = mapped_column(ForeignKey("publication.id"))
    evidence: Mapped[Document]
    actor: Mapped[str]
    reason: Mapped[str]
    idempotency_key: Mapped[Str200 | None] = mapped_column(unique=True)
    created_at: Mapped[datetime]

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
    node: Mapped[str]
    status: Mapped[Str16]
    reason: Mapped[str]
    at: Mapped[datetime]


metadata = Base.metadata
PACKED: tuple[type[Packed], ...] = (
    TrajectoryRow,
    PanoramaChunkRow,
    StepChunkRow,
    ArtifactRow,
    StudyRow,
)
"""Tables whose rows hold a checksummed blob."""
