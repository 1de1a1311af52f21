"""Runs the jobs that are due, one at a time, under a lease that a heartbeat extends.

A job whose worker dies is run again by another. So a job may *run* more than once, and must
*publish* under its idempotency key, in a transaction that calls :meth:`Job.check` first.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from spectune.db.database import Database
from spectune.db.database_errors import DatabaseError, UnavailableError
from spectune.optimizer.schedule.store import MAX_ATTEMPTS, Job, LeaseLostError, claim
from spectune.optimizer.signals import stop_on_signals
from spectune.traces.errors import SpectuneError

POLL_S = 5.0
LEASE_S = 60.0
BEATS_PER_LEASE = 3
"""A worker survives two lost heartbeats in a row."""
AWAY_S = 1.0
"""A database that is away is looked for so often."""
PATIENCE_S = 30.0
"""For so long it is tried to write how a job ended: the work of hours hangs on it."""

Run = Callable[[Job], Mapping[str, Any]]
"""A job function. Its result must be JSON. An exception fails the job, whose next slot is its next
try; only where the database is away is the job handed back for another attempt."""
Tell = Callable[[str], None]
"""Called with a line on how an attempt ended."""

log = logging.getLogger("spectune.schedule")


def run_worker(
    database: Database,
    run: Run,
    *,
    once: bool = False,
    name: str | None = None,
    owner: str | None = None,
    poll_s: float = POLL_S,
    lease_s: float = LEASE_S,
    beat_s: float | None = None,
    clock: Callable[[], datetime] | None = None,
    stop: threading.Event | None = None,
    nice: int = 0,
    tell: Tell = lambda line: None,
) -> dict[str, int]:
    """Runs what is due (of the schedule of this ``name``, where one is given) until SIGINT, SIGTERM
    or ``stop``, or ``once`` until nothing is due; returns how many attempts were done, failed, lost
    and released.

    The first signal lets the job at hand finish, the second hands it back and raises
    KeyboardInterrupt. Slots are due by ``clock``, the database's by default; the lease is extended
    every ``beat_s`` seconds, by default a third of ``lease_s``. A database that goes
    away later is waited for; one that cannot be used at the start raises DatabaseError.
    This thread and what it starts leave processors to others by ``nice`` (0 to 19), for good.
    """
    if nice:
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    # Process ids come back, and two containers may share a host name.
    owner = owner or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
    stop, has_begun, is_away = stop or threading.Event(), False, False
    beat_s = beat_s or lease_s / BEATS_PER_LEASE
    outcomes = Counter[str](done=0, failed=0, lost=0, released=0)
    with stop_on_signals(stop):
        while not stop.is_set():
            try:
                now = clock() if clock else None
                job = claim(database, owner, lease_s=lease_s, now=now, name=name)
                if is_away:
                    log.warning("the database is back")
                has_begun, is_away = True, False
                if job is not None:
                    outcomes[_attempt(job, run, lease_s, beat_s, tell)] += 1
                elif once:
                    break
                else:
                    stop.wait(poll_s)
            except DatabaseError as error:
                if not has_begun:
                    raise
                if not is_away:
                    log.warning("%s; trying again until it can be used", error)
                is_away = True
                stop.wait(min(AWAY_S, poll_s))
    return dict(outcomes)


def _attempt(job: Job, run: Run, lease_s: float, beat_s: float, tell: Tell) -> str:
    """Runs a job and writes how it ended, which is returned."""
    result: Mapping[str, Any] | None = None
    error: str | None = None
    with _heartbeat(job, lease_s, beat_s):
        try:
            result, outcome = run(job), "done"
        except LeaseLostError:
            outcome = "lost"
        except Exception as failure:
            is_expected = isinstance(failure, (SpectuneError, DatabaseError))
            error = str(failure) if is_expected else f"{type(failure).__name__}: {failure}"
            if not is_expected:
                log.exception("schedule %s failed", job.name)
            is_away = isinstance(failure, UnavailableError) and job.attempt < MAX_ATTEMPTS
            outcome = "released" if is_away else "failed"
        except BaseException:
            _end(job, "released")
            raise
        if outcome != "lost":
            outcome = _end(job, outcome, result, error)
    report = (result or {}).get("report")
    about = f": {error}" if error else f", its page is {report}" if report else ""
    tell(f"{job.name}: slot of {job.slot:%Y-%m-%d %H:%M:%S} UTC: {outcome}{about}")
    return outcome


def _end(job: Job, outcome: str, *about: Any) -> str:
    """Outlives a short absence of the database: the heartbeat goes on meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return outcome if job.end(outcome, *about) else "lost"
        except DatabaseError as error:
            if time.monotonic() > deadline:
                raise
            log.warning("cannot record how the job ended, trying again: %s", error)
            time.sleep(AWAY_S)


@contextmanager
def _heartbeat(job: Job, lease_s: float, beat_s: float) -> Iterator[None]:
    """Extends the lease from a thread, until the block ends or the job is lost."""
    end = threading.Event()

    def beat() -> None:
        while not end.wait(beat_s):
            try:
                if not job.extend(lease_s):
                    job.lost.set()
                    return
            # A thread that ends here would lose the job, whatever the database's driver raised.
            except Exception as error:
                log.warning("%s: heartbeat failed, trying again: %s", job.name, error)

    thread = threading.Thread(target=beat, name=f"heartbeat-{job.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        # A database that hangs must not hang the worker: a late beat changes nothing.
        thread.join(beat_s)
