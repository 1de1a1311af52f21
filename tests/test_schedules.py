"""Any number of workers on one database: each slot runs once, what a killed worker was at is
finished by another, and nothing is published twice. Bad input costs one line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import datetime, timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from doors import Door
from schedule_worker import HOUR as HOUR
from schedule_worker import T0 as T0
from schedule_worker import serve
from sqlalchemy import text, update
from waiting import PATIENCE_S, eventually

from spectune.db.database import Database, open_database
from spectune.db.database_errors import UnavailableError
from spectune.optimizer import schedule as schedules
from spectune.optimizer.schedule import Job, ScheduleError, next_slot, run_worker
from spectune.optimizer.schedule.store import MAX_ATTEMPTS
from spectune.options import from_document
from spectune.settings import Tune
from spectune.traces.errors import ConfigError

WORKERS, SCHEDULES, SLOTS = 4, 10, 2

# Workers come from a fork server that has imported what they need, so that eight of them cost no
# more than one.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["schedule_worker", "psycopg"])


def add(database: Database, name: str = "nightly", **how: Any) -> schedules.Schedule:
    return schedules.add_schedule(database, name, "@hourly", {}, **{"now": T0, **how})


class Crew:
    """Worker processes on one database, and what they left in it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.database = url, folder, open_database(url)
        self.workers: list[BaseProcess] = []
        self.go_to(1)
        with self.database.write() as session:
            session.execute(text("CREATE TABLE executed (key TEXT, owner TEXT)"))
            session.execute(text("CREATE TABLE published (key TEXT PRIMARY KEY, owner TEXT)"))

    def go_to(self, hour: int) -> None:
        (self.folder / "new").write_text(str(hour))
        (self.folder / "new").rename(self.folder / "hour")

    def start(self, owner: str, steps: str, lease_s: float = PATIENCE_S) -> BaseProcess:
        how: dict[str, Any] = {"args": (self.url, self.folder, owner, steps), "daemon": True}
        leased = {"lease_s": lease_s, "beat_s": 0.2}
        self.workers.append(processes.Process(target=serve, kwargs=leased, **how))
        self.workers[-1].start()
        return self.workers[-1]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self.database.read() as session:
            return [tuple(row) for row in session.execute(text(query))]

    def count(self, table: str) -> int:
        return int(self.rows(f"SELECT count(*) FROM {table}")[0][0])

    def outcomes(self) -> list[tuple[str, str]]:
        """Of the one schedule, oldest first."""
        attempts = schedules.history(self.database, "nightly")
        return [(a.worker, a.outcome) for a in reversed(attempts)]

    def pause(self, worker: BaseProcess) -> None:
        """Stops a worker, but not in the middle of a heartbeat's transaction, whose locks it would
        keep."""

        def stopped() -> bool:
            os.kill(worker.pid or 0, signal.SIGSTOP)
            if not self.is_locked():
                return True
            os.kill(worker.pid or 0, signal.SIGCONT)
            return False

        eventually(stopped)

    def is_locked(self) -> bool:
        """Whether a transaction is under way."""
        if self.database.dialect != "sqlite":
            others = "datname = current_database() AND pid <> pg_backend_pid()"
            states = self.rows(f"SELECT state FROM pg_stat_activity WHERE {others}")
            return any(state != "idle" for (state,) in states)
        file = self.database.url.database or ""
        with closing(sqlite3.connect(file, timeout=0.2, isolation_level=None)) as probe:
            try:
                probe.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
        return False


@pytest.fixture
def crew(url: str, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(url, tmp_path)
    yield crew
    for worker in crew.workers:
        if worker.is_alive():
            worker.kill()
            worker.join()
    crew.database.close()


def test_each_due_slot_runs_once_under_many_workers(crew: Crew) -> None:
    """Each of which has a slot before the first one ends."""
    for n in range(SCHEDULES):
        add(crew.database, f"s{n}")
    for n in range(WORKERS):
        crew.start(f"w{n}", "run wait publish")
    eventually(lambda: crew.count("executed") == WORKERS)
    (crew.folder / "wait").touch()
    for hour in range(1, SLOTS + 1):
        crew.go_to(hour)
        eventually(lambda hour=hour: crew.count("schedule_attempt") == hour * SCHEDULES)
    attempts = crew.rows(
        "SELECT DISTINCT schedule_id, slot, attempt, outcome FROM schedule_attempt"
    )
    assert len(attempts) == SCHEDULES * SLOTS
    assert {(attempt, outcome) for *_, attempt, outcome in attempts} == {(1, "done")}
    executed = crew.rows("SELECT key, owner FROM executed")
    assert len({key for key, _ in executed}) == len(executed) == SCHEDULES * SLOTS
    assert sorted(crew.rows("SELECT key, owner FROM published")) == sorted(executed)
    assert len({owner for _, owner in executed}) == WORKERS
    assert crew.count("schedule_attempt") == SCHEDULES * SLOTS


@pytest.mark.parametrize("steps", ["run die publish", "run publish die"])
def test_the_job_of_a_killed_worker_is_finished_by_another_and_published_once(
    crew: Crew, steps: str
) -> None:
    """Killed between claim and publication, or after it and before it could say so."""
    add(crew.database)
    victim = crew.start("victim", steps, lease_s=1.0)
    victim.join(PATIENCE_S)
    assert victim.exitcode == -signal.SIGKILL
    crew.start("heir", "run publish")
    eventually(lambda: crew.outcomes() == [("victim", "lost"), ("heir", "done")])
    (published,) = crew.rows("SELECT owner FROM published")
    assert published == (("heir" if steps.endswith("publish") else "victim"),)
    assert sorted(crew.rows("SELECT owner FROM executed")) == [("heir",), ("victim",)]
    time.sleep(0.2)
    assert crew.count("executed") == 2


def test_a_beating_heart_holds_the_lease_and_a_worker_that_slept_publishes_nothing(
    crew: Crew,
) -> None:
    def lease() -> Any:
        return schedules.list_schedules(crew.database, "nightly")[0].lease_until

    add(crew.database)
    sleeper = crew.start("sleeper", "run wait publish")
    eventually(lambda: crew.count("executed") == 1)
    first = lease()
    crew.start("heir", "run wait-longer publish")
    eventually(lambda: lease() > first)
    assert crew.count("executed") == 1
    crew.pause(sleeper)
    with crew.database.write() as session:  # as if it had slept for long
        session.execute(update(schedules.Schedule).values(lease_until=T0 - 9999 * HOUR))
    eventually(lambda: crew.count("executed") == 2)
    (crew.folder / "wait").touch()
    os.kill(sleeper.pid or 0, signal.SIGCONT)
    os.kill(sleeper.pid or 0, signal.SIGTERM)  # it ends once it has noticed
    sleeper.join(PATIENCE_S)
    assert sleeper.exitcode == 0
    assert crew.count("published") == 0
    (crew.folder / "wait-longer").touch()
    eventually(lambda: crew.outcomes() == [("sleeper", "lost"), ("heir", "done")])
    assert crew.rows("SELECT owner FROM published") == [("heir",)]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_signal_lets_the_job_finish_and_a_second_hands_it_back(crew: Crew) -> None:
    add(crew.database)
    worker = crew.start("w", "run wait publish")
    eventually(lambda: crew.count("executed") == 1)
    os.kill(worker.pid or 0, signal.SIGTERM)
    time.sleep(0.3)
    assert worker.is_alive()
    os.kill(worker.pid or 0, signal.SIGINT)
    worker.join(PATIENCE_S)
    assert (worker.exitcode, crew.outcomes()) == (1, [("w", "released")])
    (crew.folder / "wait").touch()
    heir = crew.start("heir", "run wait publish")
    eventually(lambda: crew.outcomes() == [("w", "released"), ("heir", "done")])
    os.kill(heir.pid or 0, signal.SIGTERM)
    heir.join(PATIENCE_S)
    assert heir.exitcode == 0


# --- one worker, in this process


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with open_database(url) as database:
        yield database


def work(
    database: Database, run: Callable[[Job], Mapping[str, Any]], hour: float
) -> dict[str, int]:
    return run_worker(database, run, once=True, clock=lambda: T0 + hour * HOUR)


def test_jobs_leave_processors_to_others(database: Database) -> None:
    add(database)
    found, before = list[int](), os.getpriority(os.PRIO_PROCESS, 0)
    nicer = min(19, before + 3)

    def run(job: Job) -> dict[str, Any]:
        inner = threading.Thread(target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, 0)))
        inner.start()
        inner.join()
        return {"label": "a"}

    how: dict[str, Any] = {"once": True, "clock": lambda: T0 + 2 * HOUR, "nice": nicer}
    # On Linux a thread has its own.
    worker = threading.Thread(target=run_worker, args=(database, run), kwargs=how)
    worker.start()
    worker.join()
    assert found == [nicer]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_slots_that_passed_are_one_run_and_its_end_is_shown(database: Database) -> None:
    added = add(database)
    assert added.next_at == T0 + HOUR
    slots: list[datetime] = []

    def run(job: Job) -> dict[str, Any]:
        assert schedules.claim(database, "other", lease_s=9, now=T0 + 9 * HOUR) is None
        slots.append(job.slot)
        return {"label": "a"}

    assert work(database, run, 0.9)["done"] == 0
    assert work(database, run, 3.5)["done"] == 1
    assert slots == [T0 + HOUR]
    (row,) = schedules.list_schedules(database, "nightly")
    assert (row.next_at, row.slot, row.lease_owner) == (T0 + 4 * HOUR, None, None)
    assert row.last is not None
    assert (row.last["outcome"], row.last["result"]) == ("done", {"label": "a"})
    (attempt,) = schedules.history(database, "nightly")
    assert attempt.to_json().items() >= row.last.items()


def test_a_failure_waits_for_the_next_slot_and_an_outage_is_tried_again(database: Database) -> None:
    add(database)

    def fail(job: Job) -> dict[str, Any]:
        raise ValueError("no luck")

    def away(job: Job) -> dict[str, Any]:
        raise UnavailableError("the database is away")

    assert work(database, fail, 1)["failed"] == 1
    assert work(database, fail, 1)["failed"] == 0
    ended = work(database, away, 2)
    assert (ended["released"], ended["failed"]) == (MAX_ATTEMPTS - 1, 1)
    errors = [a.error for a in schedules.history(database, "nightly")]
    assert errors == ["the database is away"] * MAX_ATTEMPTS + ["ValueError: no luck"]


def test_a_slot_whose_workers_all_went_silent_is_given_up(database: Database) -> None:
    add(database)
    for _ in range(MAX_ATTEMPTS):
        assert schedules.claim(database, "w", lease_s=0.001, now=T0 + HOUR)
        time.sleep(0.02)
    assert schedules.claim(database, "w", lease_s=9, now=T0 + HOUR) is None
    assert [a.outcome for a in schedules.history(database, "nightly")] == ["lost"] * MAX_ATTEMPTS
    job = schedules.claim(database, "w", lease_s=9, now=T0 + 2 * HOUR)
    assert job is not None
    assert (job.slot, job.attempt) == (T0 + 2 * HOUR, 1)


def test_a_schedule_removed_and_added_again_is_another(database: Database) -> None:
    add(database)
    job = schedules.claim(database, "w", lease_s=60, now=T0 + HOUR)
    assert job is not None
    schedules.remove_schedule(database, "nightly")
    assert not job.extend(60)
    with pytest.raises(schedules.LeaseLostError), database.write() as session:
        job.check(session)
    assert not job.end("done", {})
    assert add(database).id > job.schedule_id
    again = schedules.claim(database, "w", lease_s=60, now=T0 + HOUR)
    assert again is not None
    assert again.idempotency_key != job.idempotency_key


# --- times and bad input


@pytest.mark.parametrize(
    ("cron", "tz", "after", "expected"),
    [
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", "2026-03-29T01:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:30", "2026-10-26T01:30"),
        ("0 * * * *", "Europe/Berlin", "2026-10-25T00:00", "2026-10-25T01:00"),
        ("@daily", "utc", "2026-05-04T00:00", "2026-05-05T00:00"),
        ("0 9 * * 1-5", "America/New_York", "2026-05-01T13:00", "2026-05-04T13:00"),
    ],
)
def test_a_cron_expression_fires_by_the_clock_of_its_zone(
    cron: str, tz: str, after: str, expected: str
) -> None:
    begin, slot = (datetime.fromisoformat(f"{moment}+00:00") for moment in (after, expected))
    assert next_slot(cron, tz, begin) == slot


BAD: list[tuple[str, str, str, str]] = [
    ("nightly", "@daily", "UTC", "there is a schedule 'nightly' already"),
    ("a b", "@daily", "UTC", "'a b' cannot name a schedule"),
    ("x", "0 3 * *", "UTC", "must have five fields: minute hour day month weekday"),
    ("x", "99 * * * *", "UTC", "bad minute in cron expression '99"),
    ("x", "0 0 30 2 *", "UTC", "bad day-of-month"),
    ("x", "@daily", "Europe/Berlim", "did you mean Europe/Berlin"),
]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_bad_schedules_are_refused_and_leave_nothing(database: Database) -> None:
    add(database)
    for name, cron, tz, message in BAD:
        with pytest.raises(ScheduleError, match=message):
            schedules.add_schedule(database, name, cron, {}, tz=tz)
    with pytest.raises(ScheduleError, match="no schedule 'nightli'; did you mean 'nightly'"):
        schedules.history(database, "nightli")
    assert [s.name for s in schedules.list_schedules(database)] == ["nightly"]


def test_settings_that_a_run_reads_are_checked() -> None:
    """By the same list as what is typed."""
    about = {"pair": {"target": "t", "drafts": {}}, "since": "24h"}
    read = from_document(Tune, about, "x")
    assert (read.search.trials, read.since) == (400, timedelta(days=1))
    for bad, message in (
        ({"search": {"trails": 4}}, "unknown key 'search.trails'; did you mean 'search.trials'"),
        ({"requests": {"turns": "some"}}, "requests.turns: 'some': it should be 'first' or 'all'"),
        ({"race": {"budget": "5x"}}, "race.budget: '5x': a time is expected"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_document(Tune, about | bad, "x")


def test_commands_refuse_in_one_line(tmp_path: Path, tiny_pair: Path) -> None:
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    added = ("--pair", tiny_pair, "--workload", "demo")
    assert door.json("schedule add n --cron", "0 3 * * *", *added)["cron"] == "0 3 * * *"
    assert "must have five fields" in door.refused("schedule", "add", "x", "--cron", "3", *added)
    assert "did you mean 'n'" in door.refused("schedule", "remove", "nn")
    loaded = ("schedule", "add", "x", "--cron", "@daily", *added, "--arrivals")
    assert "name whose traffic is meant" in door.refused(*loaded, "recorded")
    told = door.call(*loaded, "clients:4").stdout
    assert "under clients:4" in told, "a load without an engine is one of the native decoder"
    assert "--since: '1y': a time is expected" in door.refused(
        "schedule", "add", "x", "--cron", "@daily", "--since", "1y", "--pair", tiny_pair
    )
    for name in ("n", "x"):
        assert door.json("schedule remove", name)["name"] == name
    assert door.json("schedule list")["schedules"] == []
