"""Run the jobs that are due: one at a time, under a lease that a heartbeat renews, until told to stop.

A job is leased to one worker at a time, and one whose worker dies is run again by another. So a job may *run* more than once, and
must *publish* under its idempotency key, in a transaction that asks :meth:`JobContext.still_owner` first.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from spectune.db.database import Database
from spectune.db.errors import DatabaseError, UnavailableError
from spectune.optimizer.schedule.claims import claim, complete, fail, release, retry
from spectune.optimizer.schedule.lease import Clock, Heartbeat, JobContext, LeaseLostError
from spectune.optimizer.schedule.stop import HandBack, Stopper
from spectune.optimizer.schedule.tick import tick
from spectune.optimizer.schedule.values import Fire, Job
from spectune.traces.errors import SpectuneError

POLL_S = 5.0
LEASE_S = 60.0
LONGEST_PAUSE_S = 60.0
"""A database that is away is looked for at least so often."""

Execute = Callable[[Job, JobContext], Mapping[str, Any]]
"""A job function. Its result must be JSON. An exception fails the job, and its next slot is its next try; only an UnavailableError hands
it back for another attempt, while it has any left."""
Ending = Literal["done", "failed", "lost", "released"]
"""How a job ended here. ``lost``: another worker took it over, or its schedule was removed. ``released``: it is queued again."""

log = logging.getLogger("spectune.schedule")


@dataclass(frozen=True)
class Ended:
    """A job as it was claimed, how it ended, and its result if it is done or its error if it failed or is tried again."""

    job: Job
    ending: Ending
    result: Mapping[str, Any] | None = None
    error: str | None = None


Watch = Callable[[Fire | Ended], None]
"""Told of every slot noticed and every job ended, as it happens."""


@dataclass
class WorkReport:
    """What a worker did, by counts: slots it noticed, jobs by how they ended."""

    noticed: int = 0
    ended: dict[str, int] = field(default_factory=lambda: {"done": 0, "failed": 0, "lost": 0, "released": 0})

    def to_json(self) -> dict[str, int]:
        return {"noticed": self.noticed, **self.ended}


def run_worker(
    database: Database,
    execute: Execute,
    *,
    owner: str | None = None,
    poll_s: float = POLL_S,
    lease_s: float = LEASE_S,
    clock: Clock | None = None,
    stop: threading.Event | None = None,
    watch: Watch | None = None,
) -> WorkReport:
    """Ticks and runs jobs until SIGINT, SIGTERM or ``stop``; then finishes the job at hand and returns.

    Slots are due by ``clock``, the database's by default; ``owner`` must differ between workers and is made up by default. A
    database that goes away later is waited for, a little longer each time; if it cannot be used at the start, DatabaseError is raised.
    """
    shift = _Shift(database, execute, owner, lease_s, clock, Stopper(stop), watch)
    with shift.stopper.listening():
        has_begun, failures = False, 0
        while not shift.stopper.event.is_set():
            try:
                shift.notice()
                is_idle = not shift.run_next()
            except DatabaseError as error:
                if not has_begun:
                    raise
                if not failures:
                    log.warning("%s; trying again until it can be used", error)
                failures += 1
                shift.stopper.event.wait(min(LONGEST_PAUSE_S, poll_s * 2 ** min(failures - 1, 10)))
                continue
            if failures:
                log.warning("the database is back after %d failures", failures)
            has_begun, failures = True, 0
            if is_idle:
                shift.stopper.event.wait(poll_s)
    return shift.report


def run_once(
    database: Database,
    execute: Execute,
    *,
    owner: str | None = None,
    lease_s: float = LEASE_S,
    clock: Clock | None = None,
    watch: Watch | None = None,
) -> WorkReport:
    """Ticks once, runs jobs until none is left to claim, and returns: for cron and systemd timers.

    SIGINT and SIGTERM end it early, as they do :func:`run_worker`.
    """
    shift = _Shift(database, execute, owner, lease_s, clock, Stopper(), watch)
    with shift.stopper.listening():
        shift.notice()
        while not shift.stopper.event.is_set() and shift.run_next():
            pass
    return shift.report


class _Shift:
    def __init__(
        self,
        database: Database,
        execute: Execute,
        owner: str | None,
        lease_s: float,
        clock: Clock | None,
        stopper: Stopper,
        watch: Watch | None,
    ) -> None:
        self.stopper, self.report = stopper, WorkReport()
        self._database, self._execute, self._lease_s, self._clock = database, execute, lease_s, clock
        # The random part: process ids come back, and two containers may share a host name.
        self._owner = owner or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._watch: Watch = watch or (lambda _event: None)

    def notice(self) -> None:
        for fire in tick(self._database, self._clock() if self._clock else None):
            self.report.noticed += 1
            self._watch(fire)

    def run_next(self) -> bool:
        """Claims and runs one job. False if there was none."""
        job = claim(self._database, self._owner, lease_s=self._lease_s)
        if job is None:
            return False
        ended = self._run(job)
        self.report.ended[ended.ending] += 1
        self._watch(ended)
        return True

    def _run(self, job: Job) -> Ended:
        with Heartbeat(self._database, job, self._lease_s) as beat:
            clock = self._clock or (lambda: datetime.now(UTC))
            try:
                context = JobContext(self._database, job, beat, self.stopper.event, clock)
                with self.stopper.busy():
                    result = json.loads(json.dumps(dict(self._execute(job, context)), allow_nan=False))
            except LeaseLostError:
                return Ended(job, "lost")
            except UnavailableError as error:
                message = str(error)
                if job.attempt < job.max_attempts:
                    is_ours = _persisted(lambda: retry(self._database, job, message))
                    return Ended(job, "released", error=message) if is_ours else Ended(job, "lost")
            except (SpectuneError, DatabaseError) as error:
                message = str(error)
            except Exception as error:
                message = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            except BaseException as error:
                is_ours = _persisted(lambda: release(self._database, job))
                if not isinstance(error, HandBack):
                    raise
                self.stopper.event.set()
                return Ended(job, "released" if is_ours else "lost")
            else:
                is_ours = _persisted(lambda: complete(self._database, job, result))
                return Ended(job, "done", result=result) if is_ours else Ended(job, "lost")
            is_ours = _persisted(lambda: fail(self._database, job, message))
            return Ended(job, "failed", error=message) if is_ours else Ended(job, "lost")


def _persisted(write: Callable[[], bool]) -> bool:
    # The work of hours hangs on this write: outlive a short absence of the database (the heartbeat goes on meanwhile).
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 15.0):
        try:
            return write()
        except DatabaseError as error:
            log.warning("cannot record how the job ended, trying again: %s", error)
            time.sleep(pause_s)
    return write()
