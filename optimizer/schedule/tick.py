"""Notice the slots that are due, and turn each into at most one job. Any node may tick, at any
time, as often as it likes.

Two locks keep a slot from firing twice. Who advances ``next_fire_at`` from the value it read
(compare-and-swap) owns all slots up to there; and a slot is a row of ``schedule_fire``, inserted
``ON CONFLICT DO NOTHING``: no row, no job, whatever happens to ``next_fire_at``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from spectune.db.database import Database
from spectune.db.schedules import FireRow, JobRow, ScheduleRow
from spectune.optimizer.schedule.times import ScheduleError, utc
from spectune.optimizer.schedule.values import LATEST, Fire, Outcome, payload_of, timing_of

CLOCK_STEP_S = 120
"""The database's clock may go back by so much without anybody minding: slots come so much later
once."""

log = logging.getLogger("spectune.schedule")


def tick(database: Database, now: datetime | None = None) -> tuple[Fire, ...]:
    """Notices every slot that is due at ``now`` (database time by default), and returns those that
    this call has noticed.

    Slots of one schedule are judged together, as APScheduler 3 does (:func:`_judged`). A schedule
    that cannot be read is parked: disabled, with its reason, and the others go on. By database
    time, one whose next slot is later than the first slot after now goes on with that: the clock
    was set back. A ``now`` that is given is a clock of the caller's, and may be behind another's.
    """
    with database.read() as session:
        schedules = session.scalars(
            select(ScheduleRow).where(ScheduleRow.enabled).order_by(ScheduleRow.id)
        ).all()
        # After the rows, so that no slot that another node has just moved on to seems to be of the
        # future.
        moment = (now or database.now(session)).timestamp()
    noticed: list[Fire] = []
    for schedule in schedules:
        try:
            noticed += _notice(database, schedule, moment, is_own_clock=now is not None)
        except ScheduleError as error:
            _park(database, schedule, str(error))
    return tuple(noticed)


def _is_instant(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= LATEST


def _park(database: Database, schedule: ScheduleRow, reason: str) -> None:
    with database.write() as session:
        is_ours = _set(session, schedule, enabled=False, parked=reason)
    if is_ours:
        log.warning("schedule %s is parked: %s", schedule.name, reason)


def _set(session: Session, schedule: ScheduleRow, *swapped: ColumnElement[bool], **to: Any) -> bool:
    """Sets columns of a schedule that was not paused, where what is ``swapped`` stands as it was
    read. Holds the row until commit."""
    where = ScheduleRow.id == schedule.id, ScheduleRow.enabled, *swapped
    swap = update(ScheduleRow).where(*where).values(**to).returning(ScheduleRow.id)
    return session.scalar(swap) is not None


def _advance(session: Session, schedule: ScheduleRow, following: int) -> bool:
    """Moves ``next_fire_at`` on if it stands where it was read."""
    stands = ScheduleRow.next_fire_at == schedule.next_fire_at
    return _set(session, schedule, stands, next_fire_at=following)


def _notice(
    database: Database, schedule: ScheduleRow, now: float, *, is_own_clock: bool
) -> list[Fire]:
    """Raises ScheduleError for a schedule that cannot be read, or never fires again."""
    timing, following = timing_of(schedule), schedule.next_fire_at
    latest = LATEST if is_own_clock else timing.next(int(now) + CLOCK_STEP_S)
    if not _is_instant(following) or following > latest:
        _set_back(database, schedule, timing.next(int(now)), now)
        return []
    if following > now:
        return []
    payload_of(schedule)
    # Counting the slots of a long sleep takes a while, so it stays outside the transaction: the
    # swap below guards it.
    slots, following = timing.due(following, now)
    with database.write() as session:
        if not _advance(session, schedule, following):
            return []
        return _fire(session, schedule, slots, now, database.now(session).timestamp())


def _set_back(database: Database, schedule: ScheduleRow, following: int, now: float) -> None:
    """Goes on with the slot ``following``. What the clock noticed ahead of ``now`` and made no job
    of is to be judged when it is due."""
    ahead = FireRow.schedule_id == schedule.id, FireRow.fire_at > now
    with database.write() as session:
        if not _advance(session, schedule, following):
            return
        session.execute(delete(FireRow).where(*ahead, FireRow.outcome != "enqueued"))
    stood = schedule.next_fire_at
    log.warning(
        "schedule %s: the clock was set back: its next slot is %s, and not %s",
        schedule.name, utc(following), utc(stood) if _is_instant(stood) else repr(stood),
    )  # fmt: skip


def _judged(
    schedule: ScheduleRow, slots: Sequence[int], now: float, *, is_full: bool
) -> list[tuple[int, Outcome]]:
    """What becomes of slots (in order) that are noticed together at ``now``, in APScheduler 3's
    order of decisions:

    with ``coalesce`` only the latest is kept; if the schedule ``is_full`` (``max_instances`` jobs
    unfinished) those kept are skipped; of the rest, those later than the grace are misfired
    (exactly the grace late is in time); what is left is enqueued.
    """
    grace_s = schedule.misfire_grace_s

    def outcome(slot: int) -> Outcome:
        if schedule.coalesce and slot != slots[-1]:
            return "coalesced"
        if is_full:
            return "skipped"
        return "misfired" if grace_s is not None and now - slot > grace_s else "enqueued"

    return [(slot, outcome(slot)) for slot in slots]


def _fire(
    session: Session, schedule: ScheduleRow, slots: Sequence[int], now: float, noticed_at: float
) -> list[Fire]:
    limit = schedule.max_instances
    unfinished = select(func.count()).where(
        JobRow.schedule_id == schedule.id, JobRow.state.in_(("queued", "running"))
    )
    is_full = limit is not None and session.execute(unfinished).scalar_one() >= limit
    judged = _judged(schedule, slots, now, is_full=is_full)
    is_postgresql = session.get_bind().dialect.name == "postgresql"
    inserted = (postgresql.insert if is_postgresql else sqlite.insert)(FireRow)
    rows = [
        {"schedule_id": schedule.id, "fire_at": s, "outcome": o, "noticed_at": noticed_at}
        for s, o in judged
    ]
    once = inserted.on_conflict_do_nothing().returning(FireRow.fire_at)
    won = set(session.scalars(once, rows))
    fired = [(slot, outcome) for slot, outcome in judged if slot in won]
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
        for slot, outcome in fired
        if outcome == "enqueued"
    ]
    if jobs:
        session.execute(insert(JobRow), jobs)
    return [Fire(schedule.name, utc(slot), outcome, utc(noticed_at)) for slot, outcome in fired]
