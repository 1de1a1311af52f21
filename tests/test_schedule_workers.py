"""Many worker processes on one database: each slot once, also when workers are killed, paused or
told to stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from test_schedule_store import T0
from waiting import PATIENCE_S, eventually

from spectune.db.database import Database, open_database
from spectune.optimizer import schedule as schedules
from spectune.optimizer.schedule import Job, JobContext

WORKERS, SLOTS = 8, 100
LATER = T0 + timedelta(hours=1)

# Workers come from a fork server that has imported what they need, so that eight of them cost no
# more than one.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["spectune.optimizer.schedule", "psycopg", "pytest"])

# --- what the worker processes run


def note(session: Session, table: str, job: Job) -> None:
    """Adds a row; on a key that is there already, ``published`` keeps what it has."""
    once = "ON CONFLICT DO NOTHING" if table == "published" else ""
    values = {"key": job.idempotency_key, "owner": job.lease_owner}
    session.execute(text(f"INSERT INTO {table} (key, owner) VALUES (:key, :owner) {once}"), values)


class Script:
    """A job function in a worker process. Each step leaves a row, so that the test knows how far it
    came."""

    def __init__(self, database: Database, folder: Path, steps: str) -> None:
        self.database, self.folder, self.steps = database, folder, steps

    def __call__(self, job: Job, context: JobContext) -> Mapping[str, Any]:
        for step in self.steps.split():
            match step:
                case "run":
                    with self.database.write() as session:
                        note(session, "executed", job)
                case "publish":
                    with self.database.write() as session:
                        note(session, "published", job)
                case "publish-if-owner":
                    with self.database.write() as session:
                        if context.still_owner(session):
                            note(session, "published", job)
                case "wait" | "wait-longer":
                    while not (self.folder / step).exists():
                        time.sleep(0.01)
                case "wait-for-stop":
                    while not context.is_stopping:
                        time.sleep(0.01)
        return {"from": job.lease_owner}


def serve(
    url: str,
    folder: Path,
    owner: str,
    steps: str,
    lease_s: float,
    started: float,
    reports: Queue[tuple[str, dict[str, int]]],
) -> None:
    """A worker process. Its clock stands at LATER, or with ``started`` it passes SLOTS minutes from
    there on, one in 10 ms."""

    def clock() -> datetime:
        (folder / owner).touch()  # it is at work, and signals are heard
        passed = timedelta(minutes=min(SLOTS, (time.time() - started) * 100))
        return T0 + passed if started else LATER

    how = {"owner": owner, "poll_s": 0.02, "lease_s": lease_s, "clock": clock}
    with open_database(url) as database:
        report = schedules.run_worker(database, Script(database, folder, steps), **how)
    reports.put((owner, report.to_json()))


# --- the tests' side


class Crew:
    """Worker processes on one database, and what they left in it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.database = url, folder, open_database(url)
        self.members: list[BaseProcess] = []
        self._reports: Queue[tuple[str, dict[str, int]]] = processes.Queue()
        with self.database.write() as session:
            session.execute(text("CREATE TABLE executed (key TEXT, owner TEXT)"))
            session.execute(text("CREATE TABLE published (key TEXT PRIMARY KEY, owner TEXT)"))

    def hire(
        self, owner: str, steps: str, *, lease_s: float = 30.0, started: float = 0.0
    ) -> BaseProcess:
        arguments = (self.url, self.folder, owner, steps, lease_s, started, self._reports)
        member = processes.Process(target=serve, args=arguments, name=owner, daemon=True)
        self.members.append(member)
        member.start()
        return member

    def rows(self, query: str) -> list[Any]:
        with self.database.read() as session:
            return [tuple(row) for row in session.execute(text(query))]

    def dismiss(self, *members: BaseProcess) -> dict[str, dict[str, int]]:
        """Stops workers with SIGTERM, once they are at work, and returns their reports by owner."""
        eventually(lambda: all((self.folder / member.name).exists() for member in members))
        for member in members:
            os.kill(member.pid or 0, signal.SIGTERM)
        reports = dict(self._reports.get(timeout=PATIENCE_S) for _ in members)
        for member in members:
            member.join(PATIENCE_S)
            assert member.exitcode == 0
        return reports

    def pause(self, member: BaseProcess) -> None:
        """SIGSTOP, but not in the middle of a heartbeat's transaction, which would hold SQLite's
        one write lock."""
        for _ in range(100):
            os.kill(member.pid or 0, signal.SIGSTOP)
            if self.database.dialect != "sqlite":
                return
            file = self.database.url.database or ""
            probe = sqlite3.connect(file, timeout=0.2, isolation_level=None)
            try:
                probe.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError:
                os.kill(member.pid or 0, signal.SIGCONT)
            finally:
                probe.close()
        raise AssertionError("the worker could not be paused outside a transaction")

    def job(self) -> Job:
        (fire,) = schedules.history(self.database)
        assert fire.job is not None
        return fire.job


@pytest.fixture
def crew(url: str, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(url, tmp_path)
    yield crew
    for member in crew.members:
        if member.is_alive():
            member.kill()
            member.join()
    crew.database.close()


def test_each_of_100_slots_fires_once_and_runs_once_under_8_workers(crew: Crew) -> None:
    """The slots fall due while the workers look, 100 a second, so that they race for every one."""
    every = {"coalesce": False, "misfire_grace": None, "max_instances": None}
    schedules.add_schedule(crew.database, "often", every="1m", now=T0, **every)
    started = time.time() + 1.0
    members = [crew.hire(f"w{i}", "run publish", started=started) for i in range(WORKERS)]
    eventually(lambda: len(crew.rows("SELECT 1 FROM schedule_job WHERE state = 'done'")) == SLOTS)
    reports = crew.dismiss(*members)

    fires = list(reversed(schedules.history(crew.database, limit=10_000)))
    assert [f.fire_at for f in fires] == [T0 + timedelta(minutes=i + 1) for i in range(SLOTS)]
    assert sum(r["noticed"] for r in reports.values()) == SLOTS, "each was noticed by one worker"
    jobs = [f.job for f in fires if f.job]
    assert [(j.state, j.attempt) for j in jobs] == [("done", 1)] * SLOTS
    executed = crew.rows("SELECT key, owner FROM executed")
    # Each job ran once, by its claimer.
    assert sorted(executed) == sorted((j.idempotency_key, j.lease_owner) for j in jobs)
    assert sum(r["done"] for r in reports.values()) == SLOTS
    assert len(crew.rows("SELECT 1 FROM published")) == SLOTS
    assert len({owner for _key, owner in executed}) > 1


@pytest.mark.parametrize(
    ("url", "steps"),
    [("sqlite", "run wait publish"), ("postgresql", "run publish wait")],
    indirect=["url"],
)
def test_the_job_of_a_killed_worker_is_finished_by_another_and_published_once(
    crew: Crew, steps: str
) -> None:
    """Killed before it published, or after and before it could say so."""
    schedules.add_schedule(crew.database, "hourly", every="1h", now=T0)
    victim = crew.hire("victim", steps, lease_s=2)
    last = "published" if steps.endswith("publish wait") else "executed"
    eventually(lambda: crew.rows(f"SELECT 1 FROM {last}"))
    heir = crew.hire("heir", "run publish", lease_s=2)
    time.sleep(2.2)
    assert crew.job().lease_owner == "victim", "while the victim's heart beats, its lease holds"
    os.kill(victim.pid or 0, signal.SIGKILL)
    eventually(lambda: crew.job().state == "done")
    job = crew.job()
    assert (job.attempt, job.lease_owner, job.result) == (2, "heir", {"from": "heir"})
    publisher = "victim" if last == "published" else "heir"
    assert crew.rows("SELECT key, owner FROM published") == [(job.idempotency_key, publisher)]
    assert sorted(crew.rows("SELECT owner FROM executed")) == [("heir",), ("victim",)]
    assert crew.dismiss(heir)["heir"]["done"] == 1


def test_a_worker_that_slept_through_its_lease_can_neither_publish_nor_complete(crew: Crew) -> None:
    schedules.add_schedule(crew.database, "hourly", every="1h", now=T0)
    sleeper = crew.hire("sleeper", "run wait publish-if-owner", lease_s=1.5)
    eventually(lambda: crew.rows("SELECT 1 FROM executed"))
    crew.pause(sleeper)
    heir = crew.hire("heir", "run wait-longer publish", lease_s=1.5)
    eventually(lambda: len(crew.rows("SELECT 1 FROM executed")) == 2)
    # The heir is still at it when the sleeper wakes and wants to publish and complete.
    (crew.folder / "wait").touch()
    os.kill(sleeper.pid or 0, signal.SIGCONT)
    ended = {"noticed": 1, "done": 0, "failed": 0, "lost": 1, "released": 0}
    assert crew.dismiss(sleeper) == {"sleeper": ended}
    assert (crew.job().state, crew.job().attempt) == ("running", 2)
    assert not crew.rows("SELECT 1 FROM published")
    (crew.folder / "wait-longer").touch()
    assert crew.dismiss(heir)["heir"]["done"] == 1
    assert (crew.job().state, crew.job().result) == ("done", {"from": "heir"})
    assert crew.rows("SELECT owner FROM published") == [("heir",)]


def test_sigterm_lets_the_job_at_hand_finish(crew: Crew) -> None:
    schedules.add_schedule(crew.database, "hourly", every="1h", now=T0)
    worker = crew.hire("w", "run wait-for-stop publish")
    eventually(lambda: crew.rows("SELECT 1 FROM executed"))
    assert crew.dismiss(worker)["w"]["done"] == 1
    assert (crew.job().state, len(crew.rows("SELECT 1 FROM published"))) == ("done", 1)


def test_a_second_sigterm_hands_the_job_back_at_once(crew: Crew) -> None:
    schedules.add_schedule(crew.database, "hourly", every="1h", now=T0, max_attempts=1)
    worker = crew.hire("w", "run wait")
    eventually(lambda: crew.rows("SELECT 1 FROM executed"))
    os.kill(worker.pid or 0, signal.SIGTERM)
    time.sleep(0.3)
    assert worker.is_alive()
    assert crew.dismiss(worker)["w"]["released"] == 1
    assert (crew.job().state, crew.job().lease_until) == ("queued", None)
    heir = crew.hire("heir", "run publish")
    eventually(lambda: crew.job().state == "done")
    assert crew.dismiss(heir)["heir"]["done"] == 1
