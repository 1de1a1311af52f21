"""Tables of the scheduler: schedules, each with the run at hand, and the attempts that ended."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from spectune.db.base import Base, Document, Str16, Str64, Str200


def _to_json(row: Base) -> dict[str, Any]:
    values = {c.key: getattr(row, c.key) for c in row.__mapper__.column_attrs}
    return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in values.items()}


class Schedule(Base):
    """What to tune, with which ``settings``, and when: ``cron`` in the zone ``tz``.

    ``slot`` is the moment that the run at hand stands for, NULL between runs; ``attempt`` counts
    the claims of that run. ``claims`` counts all of them and is the fencing token: who claimed
    earlier may neither extend the lease nor publish. A lease that has run out, or was handed back,
    may be claimed by anybody. ``last`` is how the newest attempt ended. ``since``: the run that is
    due tunes on nothing older, as the traffic changed then.
    """

    __tablename__ = "schedule"
    # The id of a removed schedule must never come back: a worker may be busy with it.
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[Str200] = mapped_column(unique=True)
    cron: Mapped[Str200]
    tz: Mapped[Str64]
    settings: Mapped[Document]
    next_at: Mapped[datetime] = mapped_column(index=True)
    slot: Mapped[datetime | None]
    attempt: Mapped[int] = mapped_column(default=0)
    claims: Mapped[int] = mapped_column(default=0)
    lease_owner: Mapped[Str200 | None]
    lease_until: Mapped[datetime | None]
    last: Mapped[Document | None] = mapped_column(JSON(none_as_null=True))
    since: Mapped[datetime | None]

    def to_json(self) -> dict[str, Any]:
        """Returns the row JSON-ready, moments in ISO 8601."""
        return _to_json(self)


class Attempt(Base):
    """One attempt at a slot that ended: ``done`` with a result, ``failed`` or ``released`` (handed
    back) with an error, or ``lost``, as its worker went silent."""

    __tablename__ = "schedule_attempt"

    id: Mapped[int] = mapped_column(primary_key=True)
    schedule_id: Mapped[int] = mapped_column(
        ForeignKey("schedule.id", ondelete="CASCADE"), index=True
    )
    slot: Mapped[datetime]
    attempt: Mapped[int]
    worker: Mapped[Str200]
    ended_at: Mapped[datetime]
    outcome: Mapped[Str16]
    result: Mapped[Document | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[str | None]

    def to_json(self) -> dict[str, Any]:
        """Returns the row JSON-ready, moments in ISO 8601."""
        return _to_json(self)
