"""Who may work on a job: claim, renew, complete, fail, retry, hand back. Leases are measured by the
database's clock alone.

``attempt`` counts the claims of a job and is its fencing token. Everything a worker writes about a
job names the attempt it claimed, so a worker that slept through its lease changes nothing once
another has claimed the job.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select, update
from sqlalchemy.orm import Session

from spectune.db.database import Database
from spectune.db.schedules import JobRow, ScheduleRow
from spectune.optimizer.schedule.times import ScheduleError
from spectune.optimizer.schedule.values import Job, job_of, payload_of, shown_moment

LONGEST_LEASE_S = 600.0
"""No lease is longer, so one that ends later than this from now was given before the database's
clock was set back, and is none."""
RETRY_S = 10.0
"""Pause before a job whose database was away is claimed again; twice as long after each further
attempt, at most as a lease."""

log = logging.getLogger("spectune.schedule")


def claim(database: Database, owner: str, *, lease_s: float) -> Job | None:
    """Leases the oldest job that is queued or whose worker's lease has run out; None if there is
    none.

    The job returned is ``running``, its ``attempt`` is one more than before, and no other worker
    has it for ``lease_s`` seconds of database time. A job whose last allowed attempt ran out, or of
    which something needed cannot be read, is marked failed on the way. Raises ScheduleError for a
    lease longer than :data:`LONGEST_LEASE_S`.
    """
    if not 0 < lease_s <= LONGEST_LEASE_S:
        raise ScheduleError(
            f"a lease of {lease_s:g} s cannot be given: from 0 to {LONGEST_LEASE_S:g} s is possible"
        )
    with database.write() as session:
        while True:
            now = database.now(session).timestamp()
            until = JobRow.lease_until
            # By the database alone: SQLite also keeps text there, which Python compares with no
            # number.
            is_ahead = until > now + LONGEST_LEASE_S
            is_free = or_(until.is_(None), until < now, is_ahead)
            # SKIP LOCKED: on PostgreSQL claimers pass each other by; on SQLite write transactions
            # are serial, and it is left out.
            query = (
                select(JobRow, is_ahead)
                .where(JobRow.state.in_(("queued", "running")), is_free)
                .order_by(JobRow.fire_at, JobRow.id)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            found = session.execute(query).first()
            if found is None:
                return None
            row, is_ahead_of_any = found
            if is_ahead_of_any:
                leased = shown_moment(row.lease_until)
                log.warning(
                    "job %d: leased until %s: the database's clock was set back; claiming it",
                    row.id,
                    leased,
                )
            try:
                schedule = _schedule_to_run(session, row)
            except ScheduleError as error:
                row.state, row.finished_at, row.lease_until, row.error = (
                    "failed",
                    now,
                    None,
                    str(error),
                )
                session.flush()
                continue
            row.state, row.attempt, row.lease_owner, row.lease_until = (
                "running",
                row.attempt + 1,
                owner,
                now + lease_s,
            )
            row.started_at = now
            session.flush()
            return job_of(row, schedule)


def _schedule_to_run(session: Session, row: JobRow) -> ScheduleRow:
    """The schedule of a job that may have one more attempt. Raises ScheduleError, saying why, for
    one that may not."""
    if not (isinstance(row.attempt, int) and isinstance(row.max_attempts, int)):
        raise ScheduleError(f"attempt {row.attempt!r} of {row.max_attempts!r} is no number")
    if row.attempt >= row.max_attempts:
        raise ScheduleError(
            f"worker {row.lease_owner} went silent in attempt {row.attempt} of {row.max_attempts}"
        )
    schedule = session.get(ScheduleRow, row.schedule_id)
    if schedule is None:
        raise ScheduleError("its schedule is gone")
    payload_of(schedule)
    return schedule


def renew(database: Database, job: Job, *, lease_s: float) -> bool:
    """Extends the lease to ``lease_s`` seconds from now. False if the job is no longer this
    claim's."""
    with database.write() as session:
        return _write(session, job, lease_until=database.now(session).timestamp() + lease_s)


def owns(database: Database, job: Job, session: Session | None = None) -> bool:
    """Whether the claim still holds and its lease has not run out.

    With the ``session`` of a write transaction the answer stays true until that transaction ends:
    nobody can claim the job in between, so what is written in it is written by the owner.
    """
    query = select(JobRow.lease_until).where(_claimed(job))
    with database.read() if session is None else nullcontext(session) as asked:
        lease_until = asked.scalar(query if session is None else query.with_for_update())
        return lease_until is not None and lease_until > database.now(asked).timestamp()


def complete(database: Database, job: Job, result: Mapping[str, Any]) -> bool:
    """Marks the job done with its result. False, and nothing changes, if the job is no longer this
    claim's."""
    with database.write() as session:
        now = database.now(session).timestamp()
        return _write(
            session,
            job,
            state="done",
            result=dict(result),
            error=None,
            finished_at=now,
            lease_until=None,
        )


def fail(database: Database, job: Job, error: str) -> bool:
    """Marks the job failed. False, and nothing changes, if the job is no longer this claim's."""
    with database.write() as session:
        return _write(
            session,
            job,
            state="failed",
            error=error,
            finished_at=database.now(session).timestamp(),
            lease_until=None,
        )


def retry(database: Database, job: Job, error: str) -> bool:
    """Hands the job back to the queue with its error, for the next attempt after a pause. False if
    it is no longer this claim's."""
    pause_s = min(LONGEST_LEASE_S, RETRY_S * 2 ** min(job.attempt - 1, 10))
    with database.write() as session:
        now = database.now(session).timestamp()
        return _write(
            session, job, state="queued", error=error, lease_until=now + pause_s, started_at=None
        )


def release(database: Database, job: Job) -> bool:
    """Hands the job back to the queue, at no cost to its attempts. False if it is no longer this
    claim's."""
    with database.write() as session:
        # The token must never go back, so it is the limit that moves.
        return _write(
            session,
            job,
            state="queued",
            max_attempts=JobRow.max_attempts + 1,
            lease_until=None,
            started_at=None,
        )


def _claimed(job: Job) -> ColumnElement[bool]:
    token = and_(
        JobRow.id == job.id, JobRow.attempt == job.attempt, JobRow.lease_owner == job.lease_owner
    )
    return and_(token, JobRow.state == "running")


def _write(session: Session, job: Job, **values: Any) -> bool:
    return (
        session.scalar(update(JobRow).where(_claimed(job)).values(**values).returning(JobRow.id))
        is not None
    )
