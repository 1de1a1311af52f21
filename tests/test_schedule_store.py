"""The scheduler's contract on both databases: the book, ticking, misfires and coalescing, claims,
leases and workers."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session
from waiting import eventually

from spectune.db.database import Database
from spectune.db.errors import DatabaseError, UnavailableError
from spectune.db.schedules import FireRow, JobRow, ScheduleRow
from spectune.optimizer import schedule as schedules
from spectune.optimizer.schedule import Fire, Job, JobContext, ScheduleError, claims
from spectune.optimizer.schedule.claims import LONGEST_LEASE_S, Heartbeat
from spectune.optimizer.schedule.worker import Ended

T0 = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
EVERY_SLOT: dict[str, Any] = {"coalesce": False, "misfire_grace": None, "max_instances": None}


def hourly(database: Database, name: str = "nightly", **options: Any) -> schedules.Schedule:
    return schedules.add_schedule(database, name, every="1h", now=T0, **options)


def expire(database: Database, job: Job) -> None:
    """Makes the lease of a job run out."""
    with database.write() as session:
        session.execute(update(JobRow).where(JobRow.id == job.id).values(lease_until=1.0))


def count(database: Database, table: type[Any]) -> int:
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def latest(database: Database, schedule: str) -> Job:
    """The job of a schedule's latest slot."""
    job = schedules.history(database, schedule)[0].job
    assert job is not None
    return job


def owns(database: Database, job: Job, session: Session | None = None) -> bool:
    """What a job function is told of its claim."""
    beat, stop = Heartbeat(database, job, 60), threading.Event()
    return JobContext(database, job, beat, stop, lambda: T0).still_owner(session)


def answer(job: Job, _context: JobContext) -> Mapping[str, Any]:
    return {"slot": job.fire_at.isoformat()}


# --- the book


def test_added_schedules_are_shown_as_they_were_given(database: Database) -> None:
    payload = {"pair": "demo", "workload": {"recorded_in_last": "24h"}, "trials": 200}
    asked = {"payload": payload, "budget": "10m", "misfire_grace": "2h", "tz": "Europe/Berlin"}
    added = schedules.add_schedule(database, "nightly", cron="0  3 * * *", now=T0, **asked)
    assert schedules.get_schedule(database, "nightly") == added
    assert added.next_fire_at == datetime(2026, 5, 5, 1, 0, tzinfo=UTC)
    assert (added.cron, added.tz) == ("0 3 * * *", "Europe/Berlin")
    assert (added.budget_s, added.misfire_grace_s) == (600.0, 7200)
    assert (added.coalesce, added.max_instances, added.enabled) == (True, 1, True)
    assert added.payload == payload
    assert added.when == "0 3 * * * (Europe/Berlin)"
    every = hourly(database, "a-first-one")
    assert (every.when, every.next_fire_at) == ("every 1h", T0 + HOUR)
    assert [s.name for s in schedules.list_schedules(database)] == ["a-first-one", "nightly"]
    assert json.loads(json.dumps(added.to_json()))["next_fire_at"] == "2026-05-05T01:00:00+00:00"


def test_time_is_the_databases_unless_given(database: Database) -> None:
    added = schedules.add_schedule(database, "soon", every="1h")
    assert abs(added.created_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert schedules.tick(database) == ()


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("nightly", {}, "there is a schedule 'nightly' already"),
    ("a b", {}, "'a b' cannot name a schedule"),
    ("x" * 101, {}, "cannot name a schedule"),
    ("x", {"max_instances": 0}, "schedule 'x' cannot be added: max_instances is 0"),
    ("x", {"max_attempts": 0}, "max_attempts is 0"),
    ("x", {"budget": -5}, "budget_s is -5"),
    ("x", {"budget": 1e300}, r"budget_s is 1e\+300"),
    ("x", {"budget": "lots"}, "'lots' is not a duration"),
    ("x", {"misfire_grace": -1}, "misfire_grace_s is -1"),
    ("x", {"payload": {"a": {1, 2}}}, "payload of schedule 'x' is not JSON"),
    ("x", {"payload": {"a": float("nan")}}, "payload of schedule 'x' is not JSON"),
]


def test_bad_schedules_are_refused_and_leave_nothing(database: Database) -> None:
    hourly(database)
    for name, options, message in BAD:
        with pytest.raises(ScheduleError, match=message):
            schedules.add_schedule(database, name, **{"every": "1h", **options})
    assert [s.name for s in schedules.list_schedules(database)] == ["nightly"]


def test_unknown_names_are_refused_with_the_nearest(database: Database) -> None:
    hourly(database)
    for verb in ("get", "pause", "resume", "remove"):
        with pytest.raises(ScheduleError, match="no schedule 'nightli'; did you mean 'nightly'"):
            getattr(schedules, f"{verb}_schedule")(database, "nightli")
    with pytest.raises(ScheduleError, match="no schedule 'zzz'; `schedule list`"):
        schedules.history(database, "zzz")


def test_slots_that_pass_while_paused_are_not_made_up_for(database: Database) -> None:
    hourly(database, **EVERY_SLOT)
    assert not schedules.pause_schedule(database, "nightly").enabled
    assert schedules.tick(database, T0 + 3 * HOUR) == ()
    resumed = schedules.resume_schedule(database, "nightly", now=T0 + 3.5 * HOUR)
    assert (resumed.enabled, resumed.next_fire_at) == (True, T0 + 4 * HOUR)
    # Resuming what runs changes nothing.
    assert schedules.resume_schedule(database, "nightly", now=T0 + 9 * HOUR) == resumed
    fires = schedules.tick(database, T0 + 5 * HOUR)
    assert [f.fire_at for f in fires] == [T0 + 4 * HOUR, T0 + 5 * HOUR]


def test_removal_takes_jobs_and_history_along_and_its_worker_notices(database: Database) -> None:
    hourly(database)
    hourly(database, "other")
    schedules.tick(database, T0 + HOUR)
    job = claims.claim(database, "a", lease_s=60)
    assert job.schedule == "nightly"
    schedules.remove_schedule(database, "nightly")
    assert [count(database, table) for table in (FireRow, JobRow, ScheduleRow)] == [1, 1, 1]
    assert not claims.renew(database, job, lease_s=60)
    assert not owns(database, job)
    assert not claims.complete(database, job, {})
    # The name is free again, but ids and keys of the old one never come back.
    again = hourly(database)
    assert again.id > job.id
    (fire,) = (f for f in schedules.tick(database, T0 + HOUR) if f.schedule == "nightly")
    assert fire.outcome == "enqueued"
    other, new = claims.claim(database, "a", lease_s=60), claims.claim(database, "a", lease_s=60)
    assert other is not None
    assert (new.fire_at, new.id > job.id) == (job.fire_at, True)
    assert new.idempotency_key != job.idempotency_key


def test_history_shows_slots_newest_first_with_their_jobs(database: Database) -> None:
    hourly(database, coalesce=True)
    schedules.tick(database, T0 + 2 * HOUR)
    schedules.run_once(database, answer, clock=lambda: T0 + 2 * HOUR)
    schedules.tick(database, T0 + 3 * HOUR)
    fires = schedules.history(database, "nightly")
    assert [(f.fire_at, f.outcome, f.job and f.job.state) for f in fires] == [
        (T0 + 3 * HOUR, "enqueued", "queued"),
        (T0 + 2 * HOUR, "enqueued", "done"),
        (T0 + HOUR, "coalesced", None),
    ]
    done = fires[1].job
    assert done.result == {"slot": (T0 + 2 * HOUR).isoformat()}
    assert json.loads(json.dumps(fires[1].to_json()))["job"]["result"] == done.result
    assert schedules.history(database, limit=1) == fires[:1]


# --- ticking: APScheduler 3's decisions, by table

LATE: list[tuple[int | None, bool, int, str]] = [
    # grace, coalesce, now in minutes after the first of four hourly slots, outcome of each due
    # slot, oldest first: e(nqueued), m(isfired) or c(oalesced)
    (None, False, 180, "eeee"),
    (None, True, 180, "ccce"),
    (3600, False, 180, "mmee"),  # exactly the grace late is in time
    (3600, False, 181, "mmme"),
    (3600, True, 181, "ccce"),
    (30, False, 181, "mmmm"),
    (30, True, 181, "cccm"),  # only the latest is kept, and it is too late
    (0, False, 0, "e"),
    (0, False, 60, "me"),
    (30, True, 0, "e"),
    (30, True, 1, "m"),
]


def test_misfires_and_coalescing_by_table(database: Database) -> None:
    for grace_s, coalesce, minutes, expected in LATE:
        hourly(database, misfire_grace=grace_s, coalesce=coalesce, max_instances=None)
        now, due = T0 + HOUR + timedelta(minutes=minutes), len(expected)
        fires = schedules.tick(database, now)
        assert "".join(f.outcome[0] for f in fires) == expected
        assert [f.fire_at for f in fires] == [T0 + HOUR * (i + 1) for i in range(due)]
        assert count(database, JobRow) == expected.count("e")
        assert schedules.get_schedule(database, "nightly").next_fire_at == T0 + HOUR * (due + 1)
        assert schedules.tick(database, now) == (), "a slot is noticed once"
        schedules.remove_schedule(database, "nightly")


def test_slots_are_skipped_while_max_instances_are_unfinished(database: Database) -> None:
    """Skipped before they are too late, and coalesced before they are skipped, as APScheduler
    does."""
    hourly(database, "x", max_instances=1, misfire_grace=0, coalesce=False)
    hourly(database, "y", max_instances=1, misfire_grace=0)

    def outcomes(hours: float) -> dict[str, list[str]]:
        fires = schedules.tick(database, T0 + hours * HOUR)
        return {name: [f.outcome for f in fires if f.schedule == name] for name in "xy"}

    assert outcomes(1) == {"x": ["enqueued"], "y": ["enqueued"]}
    assert outcomes(3.5) == {"x": ["skipped", "skipped"], "y": ["coalesced", "skipped"]}
    assert schedules.run_once(database, answer, clock=lambda: T0 + 3 * HOUR).ended["done"] == 2
    assert outcomes(4) == {"x": ["enqueued"], "y": ["enqueued"]}


def test_a_slot_that_has_a_row_never_fires_again(database: Database) -> None:
    """Whatever happens to next_fire_at: two locks guard a slot, and the row alone must do."""
    added = hourly(database, max_instances=None)
    schedules.tick(database, T0 + HOUR)
    with database.write() as session:
        back = update(ScheduleRow).values(next_fire_at=int(added.next_fire_at.timestamp()))
        session.execute(back)
    assert schedules.tick(database, T0 + HOUR) == ()
    assert (count(database, FireRow), count(database, JobRow)) == (1, 1)
    assert schedules.get_schedule(database, "nightly").next_fire_at == T0 + 2 * HOUR


def test_a_long_sleep_is_a_bounded_backlog(database: Database) -> None:
    schedules.add_schedule(database, "busy", every="1s", now=T0)
    fires = schedules.tick(database, T0 + timedelta(days=30))
    assert len(fires) == 1_000
    assert [f.outcome for f in fires].count("enqueued") == 1
    assert fires[-1].fire_at == T0 + timedelta(days=30)


# --- claims and leases


def test_a_job_is_one_workers_until_its_lease_runs_out(database: Database) -> None:
    hourly(database, max_attempts=2)
    schedules.tick(database, T0 + HOUR)
    first = claims.claim(database, "a", lease_s=60)
    assert (first.state, first.attempt, first.lease_owner) == ("running", 1, "a")
    assert claims.claim(database, "b", lease_s=60) is None
    assert owns(database, first)
    expire(database, first)
    # An expired lease is no claim, even before somebody takes it.
    assert not owns(database, first)
    assert claims.renew(database, first, lease_s=60), "but its worker may renew it until then"
    expire(database, first)
    second = claims.claim(database, "b", lease_s=60)
    assert (second.id, second.attempt) == (first.id, 2)
    assert second.idempotency_key == first.idempotency_key
    # The first worker wakes: whatever it writes, nothing changes.
    assert not claims.renew(database, first, lease_s=60)
    assert not claims.complete(database, first, {"from": "a"})
    assert not claims.fail(database, first, "late")
    assert not claims.release(database, first)
    with database.write() as session:
        assert not owns(database, first, session)
        assert owns(database, second, session)
    assert claims.complete(database, second, {"from": "b"})
    assert not claims.complete(database, second, {"from": "b again"})
    assert latest(database, "nightly").result == {"from": "b"}


def test_a_job_whose_last_worker_vanished_fails(database: Database) -> None:
    hourly(database, max_attempts=2)
    hourly(database, "other")
    schedules.tick(database, T0 + HOUR)
    for _ in range(2):
        first = claims.claim(database, "a", lease_s=60)
        expire(database, first)
    following = claims.claim(database, "b", lease_s=60)
    assert following.schedule == "other", "the claim goes on to the next job"
    failed = latest(database, "nightly")
    assert (failed.state, failed.error) == ("failed", "worker a went silent in attempt 2 of 2")


# --- workers


def test_run_once_runs_all_that_is_due_and_tells_of_it(database: Database) -> None:
    hourly(database, budget="10m", payload={"pair": "demo"}, **EVERY_SLOT)
    seen: list[Fire | Ended] = []
    told: list[tuple[Any, ...]] = []

    def execute(job: Job, context: JobContext) -> Mapping[str, Any]:
        context.check()
        times = context.deadline, context.remaining_s()
        told.append((context.idempotency_key, *times, context.still_owner(), job.payload["pair"]))
        return {"n": len(told)}

    now = T0 + 3 * HOUR
    report = schedules.run_once(database, execute, owner="me", clock=lambda: now, watch=seen.append)
    assert report.to_json() == {"noticed": 3, "done": 3, "failed": 0, "lost": 0, "released": 0}
    number = schedules.get_schedule(database, "nightly").id
    keys = [f"nightly#{number}@2026-05-04T{h}:00:00Z" for h in (13, 14, 15)]  # the oldest first
    assert told == [(key, now + timedelta(minutes=10), 600.0, True, "demo") for key in keys]
    assert [type(event) for event in seen] == [Fire] * 3 + [Ended] * 3
    assert [f.job and f.job.lease_owner for f in schedules.history(database)] == ["me"] * 3
    assert schedules.run_once(database, execute, clock=lambda: now).to_json()["done"] == 0


def test_a_job_that_raises_fails_with_its_reason_and_the_next_goes_on(database: Database) -> None:
    hourly(database, **EVERY_SLOT)

    def execute(job: Job, _context: JobContext) -> Mapping[str, Any]:
        match job.fire_at.hour:
            case 13:
                raise ScheduleError("no recordings in the last 24h")
            case 14:
                raise ZeroDivisionError("a bug")
            case 15:
                return {"tokens_per_s": float("nan")}
            case 16:
                return None  # type: ignore[return-value]  # a bug of the caller's
        return {"ok": True}

    report = schedules.run_once(database, execute, clock=lambda: T0 + 5 * HOUR)
    assert (report.ended["failed"], report.ended["done"]) == (4, 1)
    errors = [f.job.error or "" for f in reversed(schedules.history(database)) if f.job]
    assert errors[0] == "no recordings in the last 24h"
    assert errors[1].startswith("ZeroDivisionError: a bug\nTraceback")
    assert errors[2].startswith("ValueError: Out of range float")
    assert errors[3].startswith("TypeError")
    assert errors[4] == ""


def test_the_heartbeat_keeps_a_lease_alive_and_notices_its_loss(database: Database) -> None:
    hourly(database)
    waited = threading.Event()

    def slow(job: Job, context: JobContext) -> Mapping[str, Any]:
        waited.wait(1.5)  # longer than two leases
        assert claims.claim(database, "other", lease_s=60) is None
        context.check()
        with database.write() as session:
            session.execute(update(JobRow).values(attempt=JobRow.attempt + 1))
        for _ in range(200):
            context.check()
            waited.wait(0.01)
        return {}

    report = schedules.run_once(database, slow, lease_s=0.6, clock=lambda: T0 + HOUR)
    assert report.ended["lost"] == 1


def test_an_interrupt_that_is_not_ours_hands_back_and_goes_on(database: Database) -> None:
    hourly(database)

    def execute(_job: Job, _context: JobContext) -> Mapping[str, Any]:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        schedules.run_once(database, execute, clock=lambda: T0 + HOUR)
    assert schedules.history(database)[0].job.state == "queued"  # type: ignore[union-attr]


def test_a_database_that_is_away_for_a_moment_fails_no_job(database: Database) -> None:
    """The attempt is handed back with its error and claimed again, as often as attempts go."""
    hourly(database, max_attempts=3)

    def work(hour: int, absences: int) -> tuple[dict[str, int], Job]:
        def execute(job: Job, _context: JobContext) -> Mapping[str, Any]:
            if job.attempt <= absences:
                raise UnavailableError("cannot reach database")
            return {"ok": True}

        report = schedules.run_once(database, execute, clock=lambda: T0 + hour * HOUR)
        found = schedules.history(database)[0].job
        assert found is not None
        return report.ended, found

    ended, job = work(1, 2)
    assert ended == {"done": 1, "failed": 0, "lost": 0, "released": 2}
    assert (job.state, job.attempt, job.error, job.result) == ("done", 3, None, {"ok": True})
    ended, job = work(2, 3)
    assert ended == {"done": 0, "failed": 1, "lost": 0, "released": 2}
    assert (job.state, job.attempt, job.error) == ("failed", 3, "cannot reach database")


class Flaky(Database):
    """A database whose write transactions fail as often as ``absences`` says, one word each."""

    absences: ClassVar[list[bool]] = []
    error: ClassVar[Callable[[], Exception]] = lambda: UnavailableError("cannot reach database")

    @contextmanager
    def write(self) -> Iterator[Session]:
        if self.absences and self.absences.pop(0):
            raise type(self).error()
        with super().write() as session:
            yield session


def test_a_worker_waits_for_a_database_that_goes_away(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    hourly(database)
    stop, moments = threading.Event(), iter([T0])
    flaky = Flaky(database.url)
    with flaky:
        flaky.absences[:] = [False, True, True]  # nothing is due at first; then two writes fail
        report = schedules.run_worker(
            flaky,
            answer,
            poll_s=0.01,
            clock=lambda: next(moments, T0 + HOUR),
            stop=stop,
            watch=lambda event: stop.set() if isinstance(event, Ended) else None,
        )
        assert report.ended["done"] == 1
        assert caplog.text.count("cannot reach database; trying again") == 1
        assert caplog.text.count("the database is back") == 1
        flaky.absences[:] = [True]
        with pytest.raises(DatabaseError):  # one that was never there is not waited for
            schedules.run_worker(flaky, answer, stop=threading.Event(), clock=lambda: T0)


class Broken(Flaky):
    """One that fails in ways that nobody translated."""

    error = staticmethod(lambda: OSError("connection reset by peer"))


def test_a_heartbeat_goes_on_after_any_error_of_the_database(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    hourly(database)
    with Broken(database.url) as broken:

        def execute(job: Job, context: JobContext) -> Mapping[str, Any]:
            before = latest(database, job.schedule).lease_until
            broken.absences[:] = [True, True]
            eventually(lambda: latest(database, job.schedule).lease_until != before)
            assert not broken.absences, "it tried again, and again"
            context.check()
            return {}

        report = schedules.run_once(broken, execute, lease_s=0.6, clock=lambda: T0 + HOUR)
    assert report.ended["done"] == 1
    assert caplog.text.count("heartbeat failed") == 2


class Hanging(Database):
    """A database whose write transactions hang until told to go on."""

    go_on = threading.Event()

    @contextmanager
    def write(self) -> Iterator[Session]:
        self.go_on.wait(60)
        raise UnavailableError("cannot reach database")
        yield


def test_a_heartbeat_that_hangs_does_not_keep_the_worker(database: Database) -> None:
    hourly(database)
    schedules.tick(database, T0 + HOUR)
    job = claims.claim(database, "a", lease_s=60)
    assert job is not None
    with Hanging(database.url) as hanging:
        began = time.monotonic()
        with Heartbeat(hanging, job, 0.3):
            time.sleep(0.2)  # it hangs by now
        assert time.monotonic() - began < 30
        hanging.go_on.set()


def test_a_lease_further_than_any_could_be_is_no_lease(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The database's clock was set forward when it was given, and back since."""
    hourly(database)
    schedules.tick(database, T0 + HOUR)
    first = claims.claim(database, "a", lease_s=60)

    def lease(seconds: float) -> None:
        with database.write() as session:
            until = database.now(session).timestamp() + seconds
            session.execute(update(JobRow).where(JobRow.id == first.id).values(lease_until=until))

    lease(LONGEST_LEASE_S - 5)
    assert claims.claim(database, "b", lease_s=60) is None
    lease(400 * 86_400)
    second = claims.claim(database, "b", lease_s=60)
    assert (second.id, second.attempt) == (first.id, 2)
    assert f"job {first.id}: leased until" in caplog.text
    assert "clock" in caplog.text
    with pytest.raises(ScheduleError, match="a lease of 601 s cannot be given"):
        claims.claim(database, "c", lease_s=LONGEST_LEASE_S + 1)


def test_the_end_of_a_job_outlives_a_short_absence(database: Database) -> None:
    hourly(database)
    flaky = Flaky(database.url)
    with flaky:

        def execute(_job: Job, _context: JobContext) -> Mapping[str, Any]:
            flaky.absences[:] = [True]
            return {"ok": True}

        assert schedules.run_once(flaky, execute, clock=lambda: T0 + HOUR).ended["done"] == 1


def test_the_example_in_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "schedules.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    # At its first slot, so that the job is run and not only defined.
    first = 'clock=lambda: schedule.get_schedule(database, "nightly").next_fire_at'
    example = example.replace("run_once(database, job)", f"run_once(database, job, {first})")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/schedules.md", "exec"), {})
    assert "'done': 1" in capsys.readouterr().out
