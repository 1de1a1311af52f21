"""Tables of the scheduler: what is to be done when, which slots have fired, and the jobs they
became.

Instants are UTC seconds since 1970, so that both databases compare them alike and without time
zones: a *slot* (``fire_at``, ``next_fire_at``) is a whole number, a moment of *database time*
(leases, timestamps) a double. :mod:`optimizer.schedule` turns rows into values and back; nothing
else reads these tables.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, CheckConstraint, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from spectune.db.base import Base, Document, Str16, Str64, Str200

OUTCOMES = ("enqueued", "misfired", "coalesced", "skipped")
"""What became of a slot: a job; nothing, as it came too late; nothing, as a later slot of the same
tick stands for it; nothing, as enough jobs of the schedule were unfinished."""
STATES = ("queued", "running", "done", "failed")
"""Where a job stands. ``running`` with an expired lease means that its worker is gone, and is
claimed like ``queued``; ``queued`` with a lease that has not run out waits until then."""


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(v) for v in values)})"


class ScheduleRow(Base):
    """One schedule: either ``cron`` in zone ``tz``, or every ``interval_s`` seconds from
    ``anchor_at``."""

    __tablename__ = "schedule"
    # AUTOINCREMENT: the id of a removed schedule or job must never come back, or a worker busy with
    # it could pass for its owner.
    __table_args__ = (
        CheckConstraint("(cron IS NULL) <> (interval_s IS NULL)", name="cron_or_interval"),
        CheckConstraint("interval_s IS NULL OR interval_s > 0", name="interval_positive"),
        Index("ix_schedule_due", "enabled", "next_fire_at"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[Str200] = mapped_column(unique=True)
    cron: Mapped[Str200 | None]
    interval_s: Mapped[int | None] = mapped_column(BigInteger)
    tz: Mapped[Str64]
    anchor_at: Mapped[int] = mapped_column(BigInteger)
    next_fire_at: Mapped[int] = mapped_column(BigInteger)
    misfire_grace_s: Mapped[int | None] = mapped_column(BigInteger)
    """A slot older than this when noticed is not run; NULL: no slot is too old."""
    coalesce: Mapped[bool]
    max_instances: Mapped[int | None]
    """Slots are skipped while this many jobs of the schedule are unfinished; NULL: no limit."""
    max_attempts: Mapped[int]
    budget_s: Mapped[float | None]
    enabled: Mapped[bool]
    parked: Mapped[str | None]
    """Why a schedule that could not be read was disabled; NULL: it was not."""
    payload: Mapped[Document]
    created_at: Mapped[float]


class FireRow(Base):
    """One slot that was noticed. Its primary key is what makes a slot fire once, however many nodes
    tick."""

    __tablename__ = "schedule_fire"
    __table_args__ = (CheckConstraint(_one_of("outcome", OUTCOMES), name="outcome"),)

    schedule_id: Mapped[int] = mapped_column(
        ForeignKey("schedule.id", ondelete="CASCADE"), primary_key=True
    )
    fire_at: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    outcome: Mapped[Str16]
    noticed_at: Mapped[float]


class JobRow(Base):
    """One job. ``attempt`` counts claims and is the fencing token: only the latest claim may renew,
    complete or publish."""

    __tablename__ = "schedule_job"
    __table_args__ = (
        CheckConstraint(_one_of("state", STATES), name="state"),
        Index("ix_schedule_job_claim", "state", "fire_at"),
        Index("ix_schedule_job_schedule", "schedule_id", "fire_at"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    schedule_id: Mapped[int] = mapped_column(ForeignKey("schedule.id", ondelete="CASCADE"))
    fire_at: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[Str16]
    attempt: Mapped[int]
    max_attempts: Mapped[int]
    lease_owner: Mapped[Str200 | None]
    lease_until: Mapped[float | None]
    idempotency_key: Mapped[str] = mapped_column(String(300), unique=True)
    result: Mapped[Document | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[str | None]
    queued_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
