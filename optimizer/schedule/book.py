"""The book of schedules: add, list, look up, pause, resume, remove, and what has happened so
far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from spectune.db.database import Database
from spectune.db.schedules import FireRow, JobRow, ScheduleRow
from spectune.optimizer.schedule.times import ScheduleError, Timing, parse_duration
from spectune.optimizer.schedule.values import (
    Fire,
    Schedule,
    fire_of,
    payload_of,
    schedule_of,
    timing_of,
)
from spectune.traces.text import check_name

MISFIRE_GRACE_S = 3_600
"""Default grace: workers that were down for an hour still run what was due; APScheduler's own
second suits no polling worker."""


def add_schedule(
    database: Database,
    name: str,
    *,
    cron: str | None = None,
    every: str | int | None = None,
    tz: str = "UTC",
    payload: Mapping[str, Any] | None = None,
    budget: str | float | None = None,
    misfire_grace: str | int | None = MISFIRE_GRACE_S,
    coalesce: bool = True,
    max_instances: int | None = 1,
    max_attempts: int = 3,
    now: datetime | None = None,
) -> Schedule:
    """Adds a schedule whose first slot is the first after ``now`` (database time by default).

    Exactly one of ``cron`` and ``every``; durations are text (``"6h"``) or seconds. The other
    parameters are :class:`Schedule`'s. Raises ScheduleError for a name that is taken or unfit and
    for any value that is out of range.
    """
    check_name(name, "schedule", ScheduleError)
    timing = Timing.parse(cron=cron, every=every, tz=tz, anchor=0)
    grace_s = parse_duration(misfire_grace) if isinstance(misfire_grace, str) else misfire_grace
    row = ScheduleRow(
        name=name,
        cron=timing.cron,
        interval_s=timing.interval_s,
        tz=timing.tz,
        anchor_at=timing.anchor,
        misfire_grace_s=grace_s,
        coalesce=coalesce,
        max_instances=max_instances,
        max_attempts=max_attempts,
        budget_s=float(parse_duration(budget)) if isinstance(budget, str) else budget,
        enabled=True,
        payload=_payload(name, payload),
    )
    try:
        timing_of(row)  # refused before a new database is made
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r} cannot be added: {error}") from None
    try:
        with database.write() as session:
            row.created_at = (now or database.now(session)).timestamp()
            row.anchor_at = int(row.created_at)
            row.next_fire_at = timing_of(row).next(row.anchor_at)
            session.add(row)
            session.flush()
            return schedule_of(row)
    except IntegrityError:
        raise ScheduleError(
            f"there is a schedule {name!r} already; remove it first or choose another name"
        ) from None


def _payload(name: str, payload: Mapping[str, Any] | None) -> Any:
    """A payload as it will be read back. Raises ScheduleError for what is no JSON."""
    try:
        return json.loads(json.dumps(dict(payload or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ScheduleError(f"the payload of schedule {name!r} is not JSON: {error}") from None


def list_schedules(database: Database) -> tuple[Schedule, ...]:
    """All schedules, by name."""
    with database.read() as session:
        return tuple(
            schedule_of(row)
            for row in session.scalars(select(ScheduleRow).order_by(ScheduleRow.name))
        )


def get_schedule(database: Database, name: str) -> Schedule:
    """The schedule of that name. Raises ScheduleError if there is none, with the nearest name."""
    with database.read() as session:
        return schedule_of(_row(session, name))


def pause_schedule(database: Database, name: str) -> Schedule:
    """Stops noticing slots. A job that is queued or running goes on. Pausing twice is pausing
    once."""
    with database.write() as session:
        row = _row(session, name, lock=True)
        row.enabled = False
        return schedule_of(row)


def resume_schedule(database: Database, name: str, *, now: datetime | None = None) -> Schedule:
    """Goes on with the first slot after ``now`` (database time by default): slots that passed while
    paused are not made up for.

    Resuming a schedule that is not paused changes nothing. Raises ScheduleError, and changes
    nothing, for one that is parked and still cannot be read.
    """
    with database.write() as session:
        row = _row(session, name, lock=True)
        if not row.enabled:
            try:
                payload_of(row)
                row.next_fire_at = timing_of(row).next(
                    int((now or database.now(session)).timestamp())
                )
            except ScheduleError as error:
                raise ScheduleError(
                    f"schedule {name!r} cannot be resumed: {error}; remove it and add it again"
                ) from None
            row.enabled, row.parked = True, None
        return schedule_of(row)


def remove_schedule(database: Database, name: str) -> Schedule:
    """Removes a schedule with its jobs and history, and returns what it was.

    A worker that runs one of its jobs loses its lease thereby: it notices, and can neither complete
    nor publish.
    """
    with database.write() as session:
        removed = schedule_of(_row(session, name, lock=True))
        session.execute(
            delete(ScheduleRow).where(ScheduleRow.id == removed.id)
        )  # jobs and fires go with it: ON DELETE CASCADE
        return removed


def history(database: Database, name: str | None = None, *, limit: int = 50) -> tuple[Fire, ...]:
    """The latest ``limit`` slots of one schedule or of all, newest first, each with its job.

    Raises ScheduleError for an unknown name.
    """
    query = (
        select(FireRow, ScheduleRow, JobRow)
        .join(ScheduleRow, ScheduleRow.id == FireRow.schedule_id)
        .outerjoin(
            JobRow,
            (JobRow.schedule_id == FireRow.schedule_id) & (JobRow.fire_at == FireRow.fire_at),
        )
        .order_by(FireRow.fire_at.desc(), ScheduleRow.name)
        .limit(limit)
    )
    with database.read() as session:
        if name is not None:
            query = query.where(FireRow.schedule_id == _row(session, name).id)
        return tuple(fire_of(fire, schedule, job) for fire, schedule, job in session.execute(query))


def _row(session: Session, name: str, *, lock: bool = False) -> ScheduleRow:
    query = select(ScheduleRow).where(ScheduleRow.name == name)
    row = session.scalars(query.with_for_update() if lock else query).first()
    if row is None:
        near = get_close_matches(name, session.scalars(select(ScheduleRow.name)).all(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`schedule list` shows what there is"
        raise ScheduleError(f"there is no schedule {name!r}; {hint}")
    return row
