"""What holds a job while it runs: the heartbeat that renews its lease, and what the job function
may ask about it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from types import TracebackType

from sqlalchemy.orm import Session

from spectune.db.database import Database
from spectune.optimizer.schedule.claims import owns, renew
from spectune.optimizer.schedule.values import Job
from spectune.traces.errors import SpectuneError

BEATS_PER_LEASE = 3
"""A worker survives two lost heartbeats in a row."""

Clock = Callable[[], datetime]

log = logging.getLogger("spectune.schedule")


class LeaseLostError(SpectuneError):
    """The job is another worker's by now; stop, and publish nothing."""


class Heartbeat:
    """Renews a lease from a background thread while its ``with`` block runs."""

    def __init__(self, database: Database, job: Job, lease_s: float) -> None:
        self._database, self._job, self._lease_s = database, job, lease_s
        self._renewed = time.monotonic()
        self._lost, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{job.id}", daemon=True)

    @property
    def is_lost(self) -> bool:
        """Whether the database has said that the claim is no longer ours."""
        return self._lost.is_set()

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
                    self._lost.set()
                    return
                self._renewed = asked
            # a thread that ends here would lose the job, whatever the database's driver raised
            except Exception as error:
                log.warning("job %d: heartbeat failed, trying again: %s", self._job.id, error)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        # A database that hangs must not hang the worker: a beat that comes later than the job's end
        # changes nothing.
        self._thread.join(self._lease_s / BEATS_PER_LEASE)


class JobContext:
    """What a job function may ask while it runs. Safe to use from its threads."""

    def __init__(
        self, database: Database, job: Job, beat: Heartbeat, stop: threading.Event, clock: Clock
    ) -> None:
        self.idempotency_key = job.idempotency_key
        self.attempt = job.attempt
        self.deadline = None if job.budget_s is None else clock() + timedelta(seconds=job.budget_s)
        self._database, self._job, self._beat, self._stop, self._clock = (
            database,
            job,
            beat,
            stop,
            clock,
        )

    @property
    def is_stopping(self) -> bool:
        """Whether the worker was asked to stop. A job may go on to its end, or raise
        :class:`HandBack`."""
        return self._stop.is_set()

    def remaining_s(self) -> float:
        """Seconds to the deadline, not below 0; infinite without a budget."""
        return (
            float("inf")
            if self.deadline is None
            else max(0.0, (self.deadline - self._clock()).total_seconds())
        )

    def still_owner(self, session: Session | None = None) -> bool:
        """Asks the database whether this worker still holds the job.

        Give the session of the write transaction that publishes: then the answer holds until it
        commits (``claims.owns``).
        """
        return owns(self._database, self._job, session)

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
