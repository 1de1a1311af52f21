"""Who may work on a job: claim, renew, complete, fail, retry, hand back; and what holds it while it
runs. Leases are measured by the database's clock alone.

``attempt`` counts the claims of a job and is its fencing token. Everything a worker writes about a
job names the attempt it claimed, so a worker that slept through its lease changes nothing once
another has claimed the job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select, update
from sqlalchemy.orm import Session

from spectune.db.database import Database
from spectune.db.schedules import JobRow, ScheduleRow
from spectune.optimizer.schedule.times import ScheduleError
from spectune.optimizer.schedule.values import Job, job_of, payload_of, shown_moment
from spectune.traces.errors import SpectuneError

LONGEST_LEASE_S = 600.0
"""No lease is longer, so one that ends later than this from now was given before the database's
clock was set back, and is none."""
BEATS_PER_LEASE = 3
"""A worker survives two lost heartbeats in a row."""

Clock = Callable[[], datetime]

log = logging.getLogger("spectune.schedule")


class LeaseLostError(SpectuneError):
    """The job is another worker's by now; stop, and publish nothing."""


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
            # Compared by the database alone: SQLite also keeps text there, which Python compares
            # with no number.
            until = JobRow.lease_until
            is_ahead = until > now + LONGEST_LEASE_S
            # SKIP LOCKED: on PostgreSQL claimers pass each other by; on SQLite write transactions
            # are serial, and it is left out.
            query = (
                select(JobRow, ScheduleRow, is_ahead)
                .join(ScheduleRow, ScheduleRow.id == JobRow.schedule_id)
                .where(JobRow.state.in_(("queued", "running")))
                .where(or_(until.is_(None), until < now, is_ahead))
                .order_by(JobRow.fire_at, JobRow.id)
                .limit(1)
                .with_for_update(skip_locked=True, of=JobRow)
            )
            found = session.execute(query).first()
            if found is None:
                return None
            row, schedule, was_ahead = found
            if was_ahead:
                log.warning(
                    "job %d: leased until %s: the database's clock was set back; claiming it",
                    row.id,
                    shown_moment(row.lease_until),
                )
            try:
                if row.attempt >= row.max_attempts:
                    silent = f"in attempt {row.attempt} of {row.max_attempts}"
                    raise ScheduleError(f"worker {row.lease_owner} went silent {silent}")
                payload_of(schedule)
            except (ScheduleError, TypeError) as error:  # a hand may have written what is no number
                row.state, row.error = "failed", str(error)
                row.finished_at, row.lease_until = now, None
                session.flush()
                continue
            row.state, row.attempt, row.started_at = "running", row.attempt + 1, now
            row.lease_owner, row.lease_until = owner, now + lease_s
            session.flush()
            return job_of(row, schedule)


def renew(database: Database, job: Job, *, lease_s: float) -> bool:
    """Extends the lease to ``lease_s`` seconds from now. False if the job is no longer this
    claim's."""
    return _write(database, job, lease_s=lease_s)


def complete(database: Database, job: Job, result: Mapping[str, Any]) -> bool:
    """Marks the job done with its result. False, and nothing changes, if the job is no longer this
    claim's."""
    return _write(database, job, ends=True, state="done", result=dict(result), error=None)


def fail(database: Database, job: Job, error: str) -> bool:
    """Marks the job failed. False, and nothing changes, if the job is no longer this claim's."""
    return _write(database, job, ends=True, state="failed", error=error)


def retry(database: Database, job: Job, error: str) -> bool:
    """Hands the job back to the queue with its error, for the next attempt. False if it is no
    longer this claim's."""
    return _write(database, job, state="queued", error=error, started_at=None)


def release(database: Database, job: Job) -> bool:
    """Hands the job back to the queue, at no cost to its attempts. False if it is no longer this
    claim's."""
    # The token must never go back, so it is the limit that moves.
    more = JobRow.max_attempts + 1
    return _write(database, job, state="queued", max_attempts=more, started_at=None)


def _claimed(job: Job) -> ColumnElement[bool]:
    return and_(
        JobRow.id == job.id,
        JobRow.attempt == job.attempt,
        JobRow.lease_owner == job.lease_owner,
        JobRow.state == "running",
    )


def _write(
    database: Database,
    job: Job,
    *,
    lease_s: float | None = None,
    ends: bool = False,
    **values: Any,
) -> bool:
    """Sets columns of a job, and that it is leased for so long from now, or not any more."""
    with database.write() as session:
        now = database.now(session).timestamp()
        values["lease_until"] = None if lease_s is None else now + lease_s
        if ends:
            values["finished_at"] = now
        written = update(JobRow).where(_claimed(job)).values(**values).returning(JobRow.id)
        return session.scalar(written) is not None


class Heartbeat:
    """Renews a lease from a background thread while its ``with`` block runs."""

    def __init__(self, database: Database, job: Job, lease_s: float) -> None:
        self._database, self._job, self._lease_s = database, job, lease_s
        self._renewed, self._end = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{job.id}", daemon=True)
        self.is_lost = False
        """Whether the database has said that the claim is no longer ours."""

    @property
    def is_late(self) -> bool:
        """Whether the lease may have run out: the database was away, or this process was
        stopped."""
        return time.monotonic() - self._renewed > self._lease_s

    def _run(self) -> None:
        while not self._end.wait(self._lease_s / BEATS_PER_LEASE):
            asked = time.monotonic()
            try:
                if not renew(self._database, self._job, lease_s=self._lease_s):
                    self.is_lost = True
                    return
                self._renewed = asked
            # a thread that ends here would lose the job, whatever the database's driver raised
            except Exception as error:
                log.warning("job %d: heartbeat failed, trying again: %s", self._job.id, error)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        # A database that hangs must not hang the worker: a beat that comes later than the job's end
        # changes nothing.
        self._thread.join(self._lease_s / BEATS_PER_LEASE)


class JobContext:
    """What a job function may ask while it runs. Safe to use from its threads."""

    def __init__(
        self, database: Database, job: Job, beat: Heartbeat, stop: threading.Event, clock: Clock
    ) -> None:
        self.idempotency_key, self.attempt = job.idempotency_key, job.attempt
        self.deadline = None if job.budget_s is None else clock() + timedelta(seconds=job.budget_s)
        self._database, self._job, self._beat = database, job, beat
        self._stop, self._clock = stop, clock

    @property
    def is_stopping(self) -> bool:
        """Whether the worker was asked to stop. A job may go on to its end, or raise
        :class:`HandBack`."""
        return self._stop.is_set()

    def remaining_s(self) -> float:
        """Seconds to the deadline, not below 0; infinite without a budget."""
        if self.deadline is None:
            return float("inf")
        return max(0.0, (self.deadline - self._clock()).total_seconds())

    def still_owner(self, session: Session | None = None) -> bool:
        """Asks the database whether this worker still holds the job, and its lease has not run out.

        With the ``session`` of a write transaction the answer stays true until that transaction
        ends: nobody can claim the job in between, so what is written in it is written by the owner.
        """
        database, query = self._database, select(JobRow.lease_until).where(_claimed(self._job))
        with database.read() if session is None else nullcontext(session) as asked:
            lease_until = asked.scalar(query if session is None else query.with_for_update())
            return lease_until is not None and lease_until > database.now(asked).timestamp()

    def check(self, session: Session | None = None) -> None:
        """Raises :class:`LeaseLostError` once the lease is known to be lost. Cheap: call it between
        steps.

        With the session of a write transaction the database is asked, so that what is written in it
        is the owner's.
        """
        is_in_doubt = session is not None or self._beat.is_late
        if self._beat.is_lost or (is_in_doubt and not self.still_owner(session)):
            raise LeaseLostError(
                f"job {self._job.id} is no longer this worker's: its lease ran out, another took "
                "it over, or its schedule was removed"
            )
