"""Notice the slots that are due, and turn each into at most one job. Any node may tick, at any time, as often as it likes.

Two locks keep a slot from firing twice. Who advances ``next_fire_at`` from the value it read (compare-and-swap) owns all slots
up to there; and a slot is a row of ``schedule_fire``, inserted ``ON CONFLICT DO NOTHING``: no row, no job, whatever happens to
``next_fire_at``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db.database import Database
from db.schedules import FireRow, JobRow, ScheduleRow
from optimizer.schedule.times import utc
from optimizer.schedule.values import Fire, Outcome, timing_of


def tick(database: Database, now: datetime | None = None) -> tuple[Fire, ...]:
    """Notices every slot that is due at ``now`` (database time by default), and returns those that this call has noticed.

    Slots of one schedule are judged together, as APScheduler 3 does (:func:`judge`).
    """
    with database.read() as session:
        moment = (now or database.now(session)).timestamp()
        due = session.scalars(select(ScheduleRow).where(ScheduleRow.enabled, ScheduleRow.next_fire_at <= moment)).all()
    noticed: list[Fire] = []
    for schedule in due:
        # Counting the slots of a long sleep takes a while, so it stays outside the transaction: the swap below guards it.
        slots, following = timing_of(schedule).due(schedule.next_fire_at, moment)
        with database.write() as session:
            if _advance(session, schedule, following):
                noticed += _fire(session, schedule, slots, moment, database.now(session).timestamp())
    return tuple(noticed)


def judge(
    slots: Sequence[int], now: float, *, misfire_grace_s: int | None, coalesce: bool, is_full: bool
) -> tuple[tuple[int, Outcome], ...]:
    """What becomes of slots (in order) that are noticed together at ``now``, in APScheduler 3's order of decisions:

    with ``coalesce`` only the latest is kept; if the schedule ``is_full`` (``max_instances`` jobs unfinished) those kept are
    skipped; of the rest, those later than the grace are misfired (exactly the grace late is in time); what is left is enqueued.
    """

    def outcome(slot: int) -> Outcome:
        if coalesce and slot != slots[-1]:
            return "coalesced"
        if is_full:
            return "skipped"
        if misfire_grace_s is not None and now - slot > misfire_grace_s:
            return "misfired"
        return "enqueued"

    return tuple((slot, outcome(slot)) for slot in slots)


def _advance(session: Session, schedule: ScheduleRow, following: int) -> bool:
    """Moves ``next_fire_at`` on if it stands where it was read and the schedule was not paused. Holds the row until commit."""
    swap = (
        update(ScheduleRow)
        .where(ScheduleRow.id == schedule.id, ScheduleRow.next_fire_at == schedule.next_fire_at, ScheduleRow.enabled)
        .values(next_fire_at=following)
        .returning(ScheduleRow.id)
    )
    return session.scalar(swap) is not None


def _fire(session: Session, schedule: ScheduleRow, slots: Sequence[int], now: float, noticed_at: float) -> list[Fire]:
    unfinished = select(func.count()).where(JobRow.schedule_id == schedule.id, JobRow.state.in_(("queued", "running")))
    is_full = schedule.max_instances is not None and session.scalar(unfinished) >= schedule.max_instances  # type: ignore[operator]
    judged = judge(slots, now, misfire_grace_s=schedule.misfire_grace_s, coalesce=schedule.coalesce, is_full=is_full)
    dialect_insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    rows = [{"schedule_id": schedule.id, "fire_at": s, "outcome": o, "noticed_at": noticed_at} for s, o in judged]
    won = set(session.scalars(dialect_insert(FireRow).on_conflict_do_nothing().returning(FireRow.fire_at), rows))
    jobs = [
        {
            "schedule_id": schedule.id,
            "fire_at": slot,
            "state": "queued",
            "attempt": 0,
            "max_attempts": schedule.max_attempts,
            # The id as well as the name: a schedule removed and added again is another one.
            "idempotency_key": f"{schedule.name}#{schedule.id}@{utc(slot):%Y-%m-%dT%H:%M:%SZ}",
            "queued_at": noticed_at,
        }
        for slot, outcome in judged
        if slot in won and outcome == "enqueued"
    ]
    if jobs:
        session.execute(insert(JobRow), jobs)
    return [Fire(schedule.name, utc(slot), outcome, utc(noticed_at)) for slot, outcome in judged if slot in won]
