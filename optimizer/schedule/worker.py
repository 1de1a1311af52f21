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
from typing import Any, Literal, get_args

from spectune.db.database import Database
from spectune.db.errors import DatabaseError, UnavailableError
from spectune.optimizer.schedule.claims import (
    Clock,
    Heartbeat,
    JobContext,
    LeaseLostError,
    claim,
    complete,
    fail,
    release,
    retry,
)
from spectune.optimizer.schedule.tick import tick
from spectune.optimizer.schedule.values import Fire, Job
from spectune.traces.errors import SpectuneError

POLL_S = 5.0
LEASE_S = 60.0
AWAY_S = 1.0
"""A database that is away is looked for so often."""
PATIENCE_S = 30.0
"""For so long it is tried to write how a job ended: the work of hours hangs on it."""

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
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(Ending), 0))

    def to_json(self) -> dict[str, int]:
        return {"noticed": self.noticed, **self.ended}


class HandBack(KeyboardInterrupt):
    """Raised in a job function to end it at once and queue the job again. Not an Exception, so that
    no handler swallows it."""


def run_worker(
    database: Database,
    execute: Execute,
    *,
    owner: str | None = None,
    poll_s: float = POLL_S,
    lease_s: float = LEASE_S,
    clock: Clock | None = None,
    stop: threading.Event | None = None,
    watch: Watch = lambda event: None,
) -> WorkReport:
    """Ticks and runs jobs until SIGINT, SIGTERM or ``stop``; then finishes the job at hand and
    returns.

    Slots are due by ``clock``, the database's by default; ``owner`` must differ between workers and
    is made up by default. A database that goes away later is waited for; if it cannot be used at
    the start, DatabaseError is raised.
    """
    stop = stop or threading.Event()
    worker = _Worker(database, execute, owner or _made_up(), lease_s, clock, watch, stop)
    with worker.listening():
        failures = 0
        while not stop.is_set():
            try:
                worker.notice()
                is_idle = not worker.run_next()
            except DatabaseError as error:
                if not worker.has_begun:
                    raise
                if not failures:
                    log.warning("%s; trying again until it can be used", error)
                failures += 1
                stop.wait(min(AWAY_S, poll_s))
                continue
            if failures:
                log.warning("the database is back after %d failures", failures)
            failures = 0
            if is_idle:
                stop.wait(poll_s)
    return worker.report


def run_once(
    database: Database,
    execute: Execute,
    *,
    owner: str | None = None,
    lease_s: float = LEASE_S,
    clock: Clock | None = None,
    watch: Watch = lambda event: None,
) -> WorkReport:
    """Ticks once, runs jobs until none is left to claim, and returns: for cron and systemd timers.

    SIGINT and SIGTERM end it early, as they do :func:`run_worker`.
    """
    stop = threading.Event()
    worker = _Worker(database, execute, owner or _made_up(), lease_s, clock, watch, stop)
    with worker.listening():
        worker.notice()
        while not stop.is_set() and worker.run_next():
            pass
    return worker.report


def _made_up() -> str:
    """A worker's name. The random part: process ids come back, and two containers may share a host
    name."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


@dataclass
class _Worker:
    database: Database
    execute: Execute
    owner: str
    lease_s: float
    clock: Clock | None
    watch: Watch
    stop: threading.Event
    has_begun: bool = False
    """Whether the database could be used so far as to look for a job."""
    is_busy: bool = False
    """Whether a job function runs, which a second signal may interrupt."""
    report: WorkReport = field(default_factory=WorkReport)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turns SIGINT and SIGTERM into a clean stop, if in the main thread: the first lets the job
        at hand finish, the next hands it back at once. Handlers are put back at the end."""
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.is_busy and self.stop.is_set():
            raise HandBack
        self.stop.set()
        if self.is_busy:
            name = signal.Signals(number).name
            log.warning("%s: finishing the job at hand; once more to hand it back", name)

    def notice(self) -> None:
        for fire in tick(self.database, self.clock() if self.clock else None):
            self.report.noticed += 1
            self.watch(fire)

    def run_next(self) -> bool:
        """Claims and runs one job. False if there was none."""
        job = claim(self.database, self.owner, lease_s=self.lease_s)
        self.has_begun = True
        if job is None:
            return False
        ended = self._run(job)
        self.report.ended[ended.ending] += 1
        self.watch(ended)
        return True

    def _run(self, job: Job) -> Ended:
        with Heartbeat(self.database, job, self.lease_s) as beat:
            try:
                result = self._result(job, beat)
            except LeaseLostError:
                return Ended(job, "lost")
            except (SpectuneError, DatabaseError) as error:
                is_away = isinstance(error, UnavailableError)
                if is_away and job.attempt < job.max_attempts:
                    return self._recorded(Ended(job, "released", error=str(error)))
                return self._recorded(Ended(job, "failed", error=str(error)))
            except Exception as error:
                said = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
                return self._recorded(Ended(job, "failed", error=said))
            except BaseException as error:
                ended = self._recorded(Ended(job, "released"))
                if not isinstance(error, HandBack):
                    raise
                self.stop.set()
                return ended
            return self._recorded(Ended(job, "done", result=result))

    def _result(self, job: Job, beat: Heartbeat) -> Mapping[str, Any]:
        """What the job function returns, as it will be read back."""
        clock = self.clock or (lambda: datetime.now(UTC))
        context = JobContext(self.database, job, beat, self.stop, clock)
        self.is_busy = True
        try:
            returned = dict(self.execute(job, context))
        finally:
            self.is_busy = False
        found: Mapping[str, Any] = json.loads(json.dumps(returned, allow_nan=False))
        return found

    def _recorded(self, ended: Ended) -> Ended:
        """How a job ended, once that is written; lost where the job is another's by now. Outlives a
        short absence of the database: the heartbeat goes on meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return ended if _write_end(self.database, ended) else Ended(ended.job, "lost")
            except DatabaseError as error:
                if time.monotonic() > deadline:
                    raise
                log.warning("cannot record how the job ended, trying again: %s", error)
                time.sleep(AWAY_S)


def _write_end(database: Database, ended: Ended) -> bool:
    job, error = ended.job, ended.error
    if ended.result is not None:
        return complete(database, job, ended.result)
    if error is None:
        return release(database, job)
    return (retry if ended.ending == "released" else fail)(database, job, error)
