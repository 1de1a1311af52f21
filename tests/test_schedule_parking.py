"""A schedule that cannot be read, or a clock that went back, stops nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
from doors import Door, one_object
from sqlalchemy import make_url, text
from sqlalchemy.orm import Session
from test_schedule_store import HOUR, T0

from spectune.db.database import Database, open_database
from spectune.optimizer import schedule as schedules
from spectune.optimizer.schedule import Job, JobContext, ScheduleError, Timing

DAY = timedelta(days=1)

Cases = list[tuple[dict[str, Any], str]]
ANYWHERE: Cases = [
    ({"tz": "Mars/Olympus"}, "unknown time zone 'Mars/Olympus'"),
    ({"cron": "99 * * * *"}, "bad minute in cron expression '99 * * * *'"),
    ({"cron": "whenever"}, "cron expression 'whenever' must have five fields"),
    ({"cron": "0 0 30 2 *"}, "cron expression '0 0 30 2 *'"),
    ({"cron": None, "interval_s": 10**15}, "is not a duration"),
    ({"anchor_at": 10**17}, "anchor_at is 100000000000000000"),
    ({"anchor_at": 253_402_300_799}, "its timing cannot be used (date value out of range)"),
    ({"max_attempts": 0}, "max_attempts is 0"),
    ({"max_instances": -1}, "max_instances is -1"),
    ({"misfire_grace_s": -1}, "misfire_grace_s is -1"),
    ({"budget_s": 1e300}, "budget_s is 1e+300"),
    ({"payload": "[1]"}, "the payload is no JSON object"),
]
"""What a hand may have written into a row, or what a machine no longer knows, and the reason that
is given."""
SQLITE_ALONE: Cases = [
    ({"misfire_grace_s": "long"}, "misfire_grace_s is 'long'"),
    ({"budget_s": "much"}, "budget_s is 'much'"),
    ({"cron": None, "interval_s": "often"}, "'often' is not a duration"),
    ({"cron": b"0 13 * * *"}, "its timing cannot be used ("),
    ({"tz": b"UTC"}, "its timing cannot be used ("),
]
"""SQLite keeps anything in any column."""


def daily(database: Database, *names: str) -> None:
    how = {"misfire_grace": None, "max_instances": None, "payload": {"pair": "demo"}}
    for name in names:
        schedules.add_schedule(database, name, cron="0 13 * * *", now=T0, **how)


def spoil(
    database: Database, name: str, columns: Mapping[str, Any], job: int | None = None
) -> None:
    """Writes into the row of a schedule, or of a job."""
    is_typed = database.dialect != "sqlite"
    sets = ", ".join(
        f"{c} = CAST(:{c} AS JSON)" if c in ("payload", "result") and is_typed else f"{c} = :{c}"
        for c in columns
    )
    table, where = ("schedule", "name = :name") if job is None else ("schedule_job", "id = :job")
    with database.write() as session:
        values = {**columns, "name": name, "job": job}
        session.execute(text(f"UPDATE {table} SET {sets} WHERE {where}"), values)


def named(database: Database, anywhere: Cases, sqlite: Cases) -> dict[str, Any]:
    cases = anywhere + (sqlite if database.dialect == "sqlite" else [])
    return {f"bad-{i:02}": case for i, case in enumerate(cases)}


def answer(job: Job, _context: JobContext) -> Mapping[str, Any]:
    return {"of": job.schedule}


def test_a_schedule_that_cannot_be_read_is_parked_with_its_reason_and_the_others_run(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    poison = named(database, ANYWHERE, SQLITE_ALONE)
    daily(database, "a", *poison, "z")
    for name, (columns, _reason) in poison.items():
        spoil(database, name, columns)
    if database.dialect == "sqlite":
        spoil(database, "z", {"created_at": "then"})
    for listed in schedules.list_schedules(database):
        assert listed.when
        json.dumps(listed.to_json(), allow_nan=False)
    for slots in (1, 2):
        report = schedules.run_once(database, answer, clock=lambda hour=slots: T0 + hour * DAY)
        assert report.ended == {"done": 2, "failed": 0, "lost": 0, "released": 0}
    found = {s.name: s for s in schedules.list_schedules(database)}
    assert found.keys() == {"a", "z", *poison}
    assert (found["a"].enabled, found["a"].parked) == (True, None)
    for name, (_columns, reason) in poison.items():
        assert not found[name].enabled, name
        assert reason in (found[name].parked or ""), name
        assert caplog.text.count(f"schedule {name} is parked: ") == 1
        json.dumps(schedules.get_schedule(database, name).to_json(), allow_nan=False)
        with pytest.raises(ScheduleError, match=f"schedule '{name}' cannot be resumed"):
            schedules.resume_schedule(database, name)
    assert {f.schedule for f in schedules.history(database)} == {"a", "z"}
    for name in poison:
        schedules.remove_schedule(database, name)


def test_a_schedule_that_never_fires_again_is_parked_and_the_others_run(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def due(timing: Timing, first: int, now: float) -> tuple[tuple[int, ...], int]:
        if timing.tz == "Asia/Tokyo":
            raise ScheduleError("it never fires again")
        return later(timing, first, now)

    later = Timing.due
    monkeypatch.setattr(Timing, "due", due)
    daily(database, "a", "x", "z")
    spoil(database, "x", {"tz": "Asia/Tokyo"})
    assert [f.schedule for f in schedules.tick(database, T0 + DAY)] == ["a", "z"]
    assert schedules.get_schedule(database, "x").parked == "it never fires again"


def test_a_mended_schedule_is_resumed(database: Database) -> None:
    daily(database, "x")
    spoil(database, "x", {"tz": "Mars/Olympus"})
    assert schedules.tick(database, T0 + DAY) == ()
    spoil(database, "x", {"tz": "Europe/Berlin"})
    assert schedules.tick(database, T0 + DAY) == (), "it stays parked until somebody resumes it"
    resumed = schedules.resume_schedule(database, "x", now=T0 + DAY)
    assert (resumed.enabled, resumed.parked) == (True, None)
    assert len(schedules.tick(database, resumed.next_fire_at)) == 1


def test_the_job_of_what_was_spoilt_after_it_was_queued_fails_and_the_others_run(
    database: Database,
) -> None:
    daily(database, "x", "y", "z")
    schedules.tick(database, T0 + DAY)
    spoil(database, "x", {"payload": "[1]"})
    spoil(database, "y", {"budget_s": 1e300})  # which is no time that could be
    report = schedules.run_once(database, answer, clock=lambda: T0 + DAY)
    assert (report.ended["done"], report.ended["lost"]) == (1, 0)
    jobs = {f.schedule: f.job for f in schedules.history(database)}
    assert (jobs["x"].state, jobs["x"].error) == ("failed", "the payload is no JSON object")
    assert jobs["y"].state == "failed"
    assert jobs["y"].error.startswith("OverflowError: ")


JOBS: Cases = [
    ({"lease_until": float("inf")}, "done"),
    ({"lease_until": 1e300}, "done"),
    ({"fire_at": 10**15}, "done"),
    ({"queued_at": 1e15, "started_at": -1e300, "finished_at": float("nan")}, "done"),
    ({"result": "[1]"}, "done"),
    ({"attempt": 7}, "worker None went silent in attempt 7 of 3"),
]
"""What a hand may have written into a job's row, and how the job ends."""
JOBS_OF_SQLITE: Cases = [
    ({"lease_until": "soon"}, "done"),
    ({"fire_at": "then", "queued_at": b"then"}, "done"),
    ({"attempt": "many"}, "'>=' not supported between instances of 'str' and 'int'"),
    ({"max_attempts": 2.5}, "done"),
]


def test_a_job_that_cannot_be_read_ends_alone(database: Database) -> None:
    poison = named(database, JOBS, JOBS_OF_SQLITE)
    daily(database, "a", *poison, "z")
    schedules.tick(database, T0 + DAY)
    ids = {f.schedule: f.job.id for f in schedules.history(database) if f.job}
    for name, (columns, _end) in poison.items():
        spoil(database, name, columns, ids[name])
    listed = schedules.history(database)
    assert {f.schedule for f in listed} == {"a", "z", *poison}
    json.dumps([f.to_json() for f in listed], allow_nan=False)
    schedules.run_once(database, answer, clock=lambda: T0 + DAY)
    with database.read() as session:
        jobs = session.execute(text("SELECT id, state, error FROM schedule_job")).all()
    ends = {number: (state, error) for number, state, error in jobs}
    for name, job_id in ids.items():
        _columns, end = poison.get(name, ({}, "done"))
        assert ends[job_id] == (("done", None) if end == "done" else ("failed", end)), name


def test_the_commands_say_why_a_schedule_is_parked(tmp_path: Any, tiny_pair: Any) -> None:
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    door.json("schedule", "add", "x", "--cron", "0 3 * * *", "--pair", door.pair)
    with open_database(door.db) as database:
        spoil(database, "x", {"tz": "Mars/Olympus", "next_fire_at": 0})
    ran = door.call("schedule", "run-once", "--json")
    assert ran.exit_code == 0
    assert one_object(ran.stdout)["noticed"] == 0
    (listed,) = door.json("schedule", "list")["schedules"]
    assert "unknown time zone 'Mars/Olympus'" in listed["parked"]
    shown = door.call("schedule", "list", env={"COLUMNS": "200"}).stdout
    assert "Mars/Olympus" in shown.split("parked", 1)[1]
    assert door.json("schedule", "show", "x")["parked"] == listed["parked"]
    again = door.call("schedule", "resume", "x")
    assert again.exit_code == 2
    assert "cannot be resumed: unknown time zone" in again.stderr


# --- the clock


class Clocked(Database):
    """A database whose clock is set."""

    moment = T0

    def now(self, session: Session) -> datetime:
        return self.moment

    def tick(self, moment: datetime) -> list[tuple[datetime, str]]:
        self.moment = moment
        return [(f.fire_at, f.outcome) for f in schedules.tick(self)]


@pytest.fixture
def clocked(url: str) -> Iterator[Clocked]:
    with Clocked(make_url(url)) as database:
        yield database


def test_a_clock_set_forward_and_back_silences_nothing(
    clocked: Clocked, caplog: pytest.LogCaptureFixture
) -> None:
    """Four hundred days ahead it fired; back again, it goes on with the first slot after now, and
    what has fired fires no more."""
    schedules.add_schedule(clocked, "x", every="6h", max_instances=None)
    ahead = T0 + 400 * DAY
    assert [slot for slot, outcome in clocked.tick(ahead) if outcome == "enqueued"] == [ahead]
    assert clocked.tick(T0 + HOUR) == []
    assert schedules.get_schedule(clocked, "x").next_fire_at == T0 + 6 * HOUR
    assert caplog.text.count("schedule x: the clock was set back") == 1
    for i in range(1, 9):
        assert clocked.tick(T0 + i * 6 * HOUR) == [(T0 + i * 6 * HOUR, "enqueued")]
    # Noticed before its time, but no job: judged when it is due.
    assert (ahead - 6 * HOUR, "enqueued") in clocked.tick(ahead - 6 * HOUR)
    assert clocked.tick(ahead) == [], "that slot has fired"
    assert clocked.tick(ahead + 6 * HOUR) == [(ahead + 6 * HOUR, "enqueued")]


def test_a_small_step_of_the_clock_leaves_the_slots_alone(clocked: Clocked) -> None:
    schedules.add_schedule(clocked, "x", every="1m")
    clocked.tick(T0 + timedelta(seconds=61))
    assert clocked.tick(T0 + timedelta(seconds=59)) == []
    assert schedules.get_schedule(clocked, "x").next_fire_at == T0 + timedelta(seconds=120)


def test_a_schedule_added_while_the_clock_was_ahead_does_not_wait_for_it(clocked: Clocked) -> None:
    clocked.moment = T0 + 400 * DAY
    schedules.add_schedule(clocked, "x", every="6h")
    assert clocked.tick(T0 + HOUR) == []
    assert clocked.tick(T0 + 6 * HOUR) == [(T0 + 6 * HOUR, "enqueued")]
    unfinished = [(T0 + 12 * HOUR, "skipped")]
    assert clocked.tick(T0 + 12 * HOUR) == unfinished


def test_workers_with_clocks_of_their_own_leave_each_others_slots_alone(database: Database) -> None:
    schedules.add_schedule(database, "x", every="1m", now=T0)
    schedules.tick(database, T0 + 10 * HOUR)
    after = schedules.get_schedule(database, "x").next_fire_at
    assert schedules.tick(database, T0) == ()
    assert schedules.get_schedule(database, "x").next_fire_at == after


def test_a_next_slot_that_is_no_moment_is_found_anew(database: Database) -> None:
    schedules.add_schedule(database, "x", cron="0 */6 * * *", now=T0)
    for nonsense in (10**17, -(10**15), *(["soon"] if database.dialect == "sqlite" else [])):
        spoil(database, "x", {"next_fire_at": nonsense})
        assert schedules.list_schedules(database)[0].name == "x"
        assert schedules.tick(database, T0 + HOUR) == ()
        assert schedules.get_schedule(database, "x").next_fire_at == T0 + 6 * HOUR
    assert [f.fire_at for f in schedules.tick(database, T0 + 6 * HOUR)] == [T0 + 6 * HOUR]
