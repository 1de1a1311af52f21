"""Run the jobs that are due: one at a time, under a lease that a heartbeat renews, until told to
stop.

A job is leased to one worker at a time, and one whose worker dies is run again by another. So a job
may *run* more than once, and must *publish* under its idempotency key, in a transaction that asks
:meth:`JobContext.still_owner` first.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Literal

from spectune.db.database import Database
from spectune.db.errors import DatabaseError, UnavailableError
from spectune.optimizer.schedule.claims import claim, complete, fail, release, retry
from spectune.optimizer.schedule.lease import Clock, Heartbeat, JobContext, LeaseLostError
from spectune.optimizer.schedule.tick import tick
from spectune.optimizer.schedule.values import Fire, Job
from spectune.traces.errors import SpectuneError

POLL_S = 5.0
LEASE_S = 60.0
LONGEST_PAUSE_S = 60.0
"""A database that is away is looked for at least so often."""

Execute = Callable[[Job, JobContext], Mapping[str, Any]]
"""A job function. Its result must be JSON. An exception fails the job, and its next slot is its
next try; only an UnavailableError hands it back for another attempt, while it has any left."""
Ending = Literal["done", "failed", "lost", "released"]
"""How a job ended here. ``lost``: another worker took it over, or its schedule was removed.
``released``: it is queued again."""

log = logging.getLogger("spectune.schedule")


@dataclass(frozen=True)
class Ended:
    """A job as it was claimed, how it ended, and its result if it is done or its error if it failed
    or is tried again."""

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
    ended: dict[str, int] = field(
        default_factory=lambda: {"done": 0, "failed": 0, "lost": 0, "released": 0}
    )

    def to_json(self) -> dict[str, int]:
        return {"noticed": self.noticed, **self.ended}


class HandBack(KeyboardInterrupt):
    """Raised in a job function to end it at once and queue the job again. Not an Exception, so that
    no handler swallows it."""


class Stopper:
    """Turns SIGINT and SIGTERM into a clean stop: the first lets the job at hand finish, the next
    hands it back at once."""

    def __init__(self, event: threading.Event | None = None) -> None:
        self.event = event or threading.Event()
        self._is_busy = False

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Marks the part that a second signal may interrupt."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    @contextmanager
    def listening(self) -> Iterator[Stopper]:
        """Listens to signals, if in the main thread; handlers are put back at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._is_busy and self.event.is_set():
            raise HandBack
        self.event.set()
        if self._is_busy:
            log.warning(
                "%s: finishing the job at hand; once more to hand it back",
                signal.Signals(number).name,
            )


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
    """Ticks and runs jobs until SIGINT, SIGTERM or ``stop``; then finishes the job at hand and
    returns.

    Slots are due by ``clock``, the database's by default; ``owner`` must differ between workers and
    is made up by default. A database that goes away later is waited for, a little longer each time;
    if it cannot be used at the start, DatabaseError is raised.
    """
    shift = _Shift(database, execute, owner or _made_up(), lease_s, clock, watch, Stopper(stop))
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
    shift = _Shift(database, execute, owner or _made_up(), lease_s, clock, watch, Stopper())
    with shift.stopper.listening():
        shift.notice()
        while not shift.stopper.event.is_set() and shift.run_next():
            pass
    return shift.report


def _made_up() -> str:
    """A worker's name. The random part: process ids come back, and two containers may share a host
    name."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


@dataclass
class _Shift:
    database: Database
    execute: Execute
    owner: str
    lease_s: float
    clock: Clock | None
    watch: Watch | None
    stopper: Stopper
    report: WorkReport = field(default_factory=WorkReport)

    def notice(self) -> None:
        for fire in tick(self.database, self.clock() if self.clock else None):
            self.report.noticed += 1
            self._tell(fire)

    def run_next(self) -> bool:
        """Claims and runs one job. False if there was none."""
        job = claim(self.database, self.owner, lease_s=self.lease_s)
        if job is None:
            return False
        ended = self._run(job)
        self.report.ended[ended.ending] += 1
        self._tell(ended)
        return True

    def _tell(self, event: Fire | Ended) -> None:
        if self.watch is not None:
            self.watch(event)

    def _run(self, job: Job) -> Ended:
        with Heartbeat(self.database, job, self.lease_s) as beat:
            clock = self.clock or (lambda: datetime.now(UTC))
            try:
                context = JobContext(self.database, job, beat, self.stopper.event, clock)
                with self.stopper.busy():
                    result = json.loads(
                        json.dumps(dict(self.execute(job, context)), allow_nan=False)
                    )
            except LeaseLostError:
                return Ended(job, "lost")
            except UnavailableError as error:
                message = str(error)
                if job.attempt < job.max_attempts:
                    return _recorded(
                        Ended(job, "released", error=message),
                        lambda: retry(self.database, job, message),
                    )
            except (SpectuneError, DatabaseError) as error:
                message = str(error)
            except Exception as error:
                message = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            except BaseException as error:
                ended = _recorded(Ended(job, "released"), lambda: release(self.database, job))
                if not isinstance(error, HandBack):
                    raise
                self.stopper.event.set()
                return ended
            else:
                return _recorded(
                    Ended(job, "done", result=result), lambda: complete(self.database, job, result)
                )
            return _recorded(
                Ended(job, "failed", error=message), lambda: fail(self.database, job, message)
            )


def _recorded(ended: Ended, write: Callable[[], bool]) -> Ended:
    """How a job ended, once that is written; lost where the job is another's by now."""
    return ended if _persisted(write) else Ended(ended.job, "lost")


def _persisted(write: Callable[[], bool]) -> bool:
    # The work of hours hangs on this write: outlive a short absence of the database (the heartbeat
    # goes on meanwhile).
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 15.0):
        try:
            return write()
        except DatabaseError as error:
            log.warning("cannot record how the job ended, trying again: %s", error)
            time.sleep(pause_s)
    return write()
