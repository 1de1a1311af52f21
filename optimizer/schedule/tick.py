"""Notice the slots that are due, and turn each into at most one job. Any node may tick, at any
time, as often as it likes.

Two locks keep a slot from firing twice. Who advances ``next_fire_at`` from the value it read
(compare-and-swap) owns all slots up to there; and a slot is a row of ``schedule_fire``, inserted
``ON CONFLICT DO NOTHING``: no row, no job, whatever happens to ``next_fire_at``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from spectune.db.database import Database
from spectune.db.schedules import FireRow, JobRow, ScheduleRow
from spectune.optimizer.schedule.times import ScheduleError, Timing, utc
from spectune.optimizer.schedule.values import LATEST, Fire, Outcome, payload_of, timing_of

CLOCK_STEP_S = 120
"""The database's clock may go back by so much without anybody minding: slots come so much later
once."""

log = logging.getLogger("spectune.schedule")


def tick(database: Database, now: datetime | None = None) -> tuple[Fire, ...]:
    """Notices every slot that is due at ``now`` (database time by default), and returns those that
    this call has noticed.

    Slots of one schedule are judged together, as APScheduler 3 does (:func:`judge`). A schedule
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
        unreadable = {row.id: reason for row in schedules if (reason := _unreadable(row, moment))}
    noticed: list[Fire] = []
    for schedule in schedules:
        if schedule.id in unreadable:
            _park(database, schedule, unreadable[schedule.id])
        else:
            noticed += _notice(database, schedule, moment, is_own_clock=now is not None)
    return tuple(noticed)


def _unreadable(schedule: ScheduleRow, now: float) -> str | None:
    """Why nothing can be done with a schedule, or None. Its payload is looked at once it is
    needed."""
    try:
        timing_of(schedule)
        if _is_instant(schedule.next_fire_at) and schedule.next_fire_at <= now:
            payload_of(schedule)
    except ScheduleError as error:
        return str(error)
    return None


def _park(database: Database, schedule: ScheduleRow, reason: str) -> None:
    with database.write() as session:
        parked = update(ScheduleRow).where(ScheduleRow.id == schedule.id, ScheduleRow.enabled)
        is_ours = (
            session.scalar(parked.values(enabled=False, parked=reason).returning(ScheduleRow.id))
            is not None
        )
    if is_ours:
        log.warning("schedule %s is parked: %s", schedule.name, reason)


def _notice(
    database: Database, schedule: ScheduleRow, now: float, *, is_own_clock: bool
) -> list[Fire]:
    timing, following = timing_of(schedule), schedule.next_fire_at
    if not is_own_clock:
        timing = _begun(timing, now)
    latest = LATEST if is_own_clock else timing.next(int(now) + CLOCK_STEP_S)
    if not _is_instant(following) or following > latest:
        _set_back(database, schedule, timing.next(int(now)), now)
        return []
    if following > now:
        return []
    # Counting the slots of a long sleep takes a while, so it stays outside the transaction: the
    # swap below guards it.
    slots, following = timing.due(following, now)
    with database.write() as session:
        if not _advance(session, schedule, following):
            return []
        return _fire(session, schedule, slots, now, database.now(session).timestamp())


def _begun(timing: Timing, now: float) -> Timing:
    """The timing, of the same slots, if it was to begin later than ``now``: the schedule was added
    by a clock that was ahead."""
    if timing.interval_s is None or timing.anchor <= now:
        return timing
    return replace(
        timing,
        anchor=timing.anchor
        - (int(timing.anchor - now) // timing.interval_s + 1) * timing.interval_s,
    )


def _set_back(database: Database, schedule: ScheduleRow, following: int, now: float) -> None:
    """Goes on with the slot ``following``. What the clock noticed ahead of ``now`` and made no job
    of is to be judged when it is due."""
    with database.write() as session:
        if not _advance(session, schedule, following):
            return
        ahead = (
            FireRow.schedule_id == schedule.id,
            FireRow.fire_at > now,
            FireRow.outcome != "enqueued",
        )
        session.execute(delete(FireRow).where(*ahead))
    stood = schedule.next_fire_at
    log.warning(
        "schedule %s: the clock was set back: its next slot is %s, and not %s",
        schedule.name, utc(following), utc(stood) if _is_instant(stood) else repr(stood),
    )  # fmt: skip


def _is_instant(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= LATEST


def judge(
    slots: Sequence[int], now: float, *, misfire_grace_s: int | None, coalesce: bool, is_full: bool
) -> tuple[tuple[int, Outcome], ...]:
    """What becomes of slots (in order) that are noticed together at ``now``, in APScheduler 3's
    order of decisions:

    with ``coalesce`` only the latest is kept; if the schedule ``is_full`` (``max_instances`` jobs
    unfinished) those kept are skipped; of the rest, those later than the grace are misfired
    (exactly the grace late is in time); what is left is enqueued.
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
    """Moves ``next_fire_at`` on if it stands where it was read and the schedule was not paused.
    Holds the row until commit."""
    swap = (
        update(ScheduleRow)
        .where(
            ScheduleRow.id == schedule.id,
            ScheduleRow.next_fire_at == schedule.next_fire_at,
            ScheduleRow.enabled,
        )
        .values(next_fire_at=following)
        .returning(ScheduleRow.id)
    )
    return session.scalar(swap) is not None


def _fire(
    session: Session, schedule: ScheduleRow, slots: Sequence[int], now: float, noticed_at: float
) -> list[Fire]:
    limit = schedule.max_instances
    unfinished = select(func.count()).where(
        JobRow.schedule_id == schedule.id, JobRow.state.in_(("queued", "running"))
    )
    is_full = limit is not None and session.execute(unfinished).scalar_one() >= limit
    judged = judge(
        slots,
        now,
        misfire_grace_s=schedule.misfire_grace_s,
        coalesce=schedule.coalesce,
        is_full=is_full,
    )
    dialect_insert = (
        postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    )
    rows = [
        {"schedule_id": schedule.id, "fire_at": s, "outcome": o, "noticed_at": noticed_at}
        for s, o in judged
    ]
    won = set(
        session.scalars(
            dialect_insert(FireRow).on_conflict_do_nothing().returning(FireRow.fire_at), rows
        )
    )
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
    return [
        Fire(schedule.name, utc(slot), outcome, utc(noticed_at))
        for slot, outcome in judged
        if slot in won
    ]
