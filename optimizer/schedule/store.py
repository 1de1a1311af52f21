"""Schedules in the database: add, list, remove; and one run of one of them at a time, claimed,
extended and ended by compare-and-swap on its token. Leases follow the database's clock alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError
from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from spectune.db.database import Database
from spectune.db.schedules import Attempt, Schedule
from spectune.optimizer.deployment import deployment_of
from spectune.traces.errors import SpectuneError
from spectune.traces.text import check_name

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}


class ScheduleError(SpectuneError):
    """A schedule is malformed, unknown, or exists already."""


def next_slot(cron: str, tz: str, after: datetime) -> datetime:
    """Returns the first moment later than ``after``, in UTC, at which five cron fields or an alias
    such as ``@daily`` fire in an IANA zone; around daylight saving as Debian's cron does.

    Raises ScheduleError for a malformed expression, one that never fires, and an unknown zone.
    """
    fields = ALIASES.get(cron.strip().lower(), cron)
    if len(fields.split()) != 5:
        raise ScheduleError(
            f"cron expression {cron!r} must have five fields: minute hour day month weekday, as in "
            '"0 3 * * 1-5", or be @hourly, @daily, @weekly, @monthly or @yearly'
        )
    try:
        fires: Iterator[datetime] = CronSim(fields, after.astimezone(_zone(tz)))
        for fire in fires:
            if fire > after:  # in an hour that comes twice it looks back an hour
                return fire.astimezone(UTC)
    except CronSimError as error:
        problem = str(error).removeprefix("Bad ")
        raise ScheduleError(f"bad {problem} in cron expression {cron!r}") from None
    raise ScheduleError(f"cron expression {cron!r} never fires")


def _zone(name: str) -> tzinfo:
    if name.upper() == "UTC":
        return UTC  # needs no zone database
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        near = get_close_matches(name, available_timezones(), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "write for example Europe/Berlin or UTC"
        raise ScheduleError(f"unknown time zone {name!r}; {hint}") from None


MAX_ATTEMPTS = 3
"""Claims of one slot after which it is given up: its worker may die of it each time."""


class LeaseLostError(SpectuneError):
    """The job is another worker's by now; stop, and publish nothing."""


def add_schedule(
    database: Database,
    name: str,
    cron: str,
    settings: Mapping[str, Any],
    *,
    tz: str = "UTC",
    at_once: bool = False,
    now: datetime | None = None,
) -> Schedule:
    """Adds a schedule whose first slot is the first after ``now`` (database time by default), or
    ``at_once`` that moment itself. Raises ScheduleError for a name that is taken or unfit, and for
    a time that cannot be read."""
    check_name(name, "schedule", ScheduleError)
    with database.write() as session:
        row = Schedule(name=name, cron=cron, tz=tz, settings=dict(settings))
        row.next_at = _first_slot(cron, tz, now or database.now(session), at_once)
        session.add(row)
        try:
            session.flush()
        except IntegrityError:
            raise ScheduleError(
                f"there is a schedule {name!r} already; `schedule edit {name}` changes it"
            ) from None
        return row


def edit_schedule(
    database: Database,
    name: str,
    cron: str,
    settings: Mapping[str, Any],
    *,
    tz: str = "UTC",
    at_once: bool = False,
) -> Schedule:
    """Gives a schedule another time and other settings, as :func:`add_schedule` takes them; its
    history stays, and a run at hand goes on as it began. Raises ScheduleError for an unknown name,
    and for a time that cannot be read."""
    with database.write() as session:
        row = _get(session, name)
        row.cron, row.tz, row.settings, row.since = cron, tz, dict(settings), None
        row.next_at = _first_slot(cron, tz, database.now(session), at_once)
        return row


def _first_slot(cron: str, tz: str, now: datetime, at_once: bool) -> datetime:
    """The first slot after ``now``, or ``now`` itself; a time that cannot be read is refused."""
    first = next_slot(cron, tz, now)
    return now if at_once else first


def make_due(database: Database, name: str) -> None:
    """Makes a schedule due at this moment. Raises ScheduleError for an unknown name, and while a
    worker runs it."""
    with database.write() as session:
        row = _get(session, name)
        if not make_due_in(database, session, name):
            raise ScheduleError(f"schedule {name} is run by {row.lease_owner} now")


def make_due_in(
    database: Database, session: Session, name: str, since: datetime | None = None
) -> bool:
    """Makes a schedule due in a transaction, of one that tunes on recent traffic to tune on nothing
    older than ``since``; False while a worker runs it. Raises ScheduleError for an unknown name."""
    row, now = _get(session, name), database.now(session)
    is_run = row.slot is not None and row.lease_until is not None and row.lease_until > now
    if not is_run:
        row.next_at, row.since = now, since
    return not is_run


def tuned_deployment(schedule: Schedule) -> str:
    """The deployment that a schedule publishes in."""
    return str(schedule.settings.get("deployment", deployment_of("native")))


def schedule_of(database: Database, deployment: str) -> Schedule | None:
    """The schedule that tunes a deployment, of several the first by name of those that tune on
    recent traffic; None where there is none."""
    found = [row for row in list_schedules(database) if tuned_deployment(row) == deployment]
    return min(found, key=lambda row: not row.settings.get("since"), default=None)


def list_schedules(database: Database, name: str | None = None) -> list[Schedule]:
    """Returns all schedules by name, or the one of that name. Raises ScheduleError if there is
    none."""
    with database.read() as session:
        if name is not None:
            return [_get(session, name)]
        return list(session.scalars(select(Schedule).order_by(Schedule.name)))


def history(database: Database, name: str, *, limit: int = 50) -> list[Attempt]:
    """Returns the latest attempts of a schedule that ended, newest first. Raises ScheduleError for
    an unknown name."""
    with database.read() as session:
        of_schedule = Attempt.schedule_id == _get(session, name).id
        query = select(Attempt).where(of_schedule).order_by(Attempt.id.desc()).limit(limit)
        return list(session.scalars(query))


def remove_schedule(database: Database, name: str) -> Schedule:
    """Removes a schedule with its history, and returns it. A worker that is busy with it can no
    longer publish. Raises ScheduleError for an unknown name."""
    with database.write() as session:
        row = _get(session, name)
        session.execute(delete(Schedule).where(Schedule.id == row.id))
        return row


def _get(session: Session, name: str) -> Schedule:
    row = session.scalars(select(Schedule).where(Schedule.name == name)).first()
    if row is None:
        near = get_close_matches(name, session.scalars(select(Schedule.name)).all(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`schedule list` shows what there is"
        raise ScheduleError(f"there is no schedule {name!r}; {hint}")
    return row


@dataclass(frozen=True)
class Job:
    """A claimed run of a schedule: ``slot`` is the moment it stands for, ``claims`` its token.
    ``lost`` is set once the database has said that the claim is no longer this worker's."""

    database: Database
    schedule_id: int
    name: str
    settings: Mapping[str, Any]
    slot: datetime
    attempt: int
    claims: int
    worker: str
    lost: threading.Event = field(default_factory=threading.Event)

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at a slot, and no other's: what is published once is published
        under it."""
        # The id as well as the name: a schedule removed and added again is another one.
        return f"{self.name}#{self.schedule_id}@{self.slot:%Y-%m-%dT%H:%M:%SZ}"

    def _is_held(self) -> ColumnElement[bool]:
        mine = Schedule.id == self.schedule_id, Schedule.claims == self.claims
        return and_(*mine, Schedule.slot == self.slot, Schedule.lease_owner == self.worker)

    def _swap(self, session: Session, **values: Any) -> bool:
        swap = update(Schedule).where(self._is_held()).values(**values).returning(Schedule.id)
        return session.scalar(swap) is not None

    def extend(self, lease_s: float) -> bool:
        """Makes the lease end ``lease_s`` seconds from now. Returns False where the job is no
        longer this claim's."""
        with self.database.write() as session:
            until = self.database.now(session) + timedelta(seconds=lease_s)
            return self._swap(session, lease_until=until)

    def check(self, session: Session | None = None) -> None:
        """Raises LeaseLostError once the lease is known to be lost; cheap: call it between steps.

        With the session of a write transaction the database is asked, and nobody can claim the job
        until that transaction ends: what is written in it is written by the owner.
        """
        lost = self.lost.is_set()
        if session is not None:
            query = select(Schedule.lease_until).where(self._is_held()).with_for_update()
            until = session.scalar(query)
            lost = until is None or until < self.database.now(session)
        if lost:
            raise LeaseLostError(
                f"the run of {self.name} is no longer this worker's: its lease ran out and another "
                "took it over, or the schedule was removed"
            )

    def end(
        self, outcome: str, result: Mapping[str, Any] | None = None, error: str | None = None
    ) -> bool:
        """Appends to the history how the attempt ended. A ``released`` one may be claimed again at
        once. Returns False, and nothing changes, where the job is no longer this claim's."""
        with self.database.write() as session:
            now = self.database.now(session)
            values: dict[str, Any] = dict.fromkeys(("slot", "since", "lease_owner", "lease_until"))
            if outcome == "released":
                values = {"lease_owner": None, "lease_until": now}
            attempt = self._ended(now, outcome, result, error)
            if not self._swap(session, last=_last(attempt), **values):
                return False
            session.add(attempt)
            return True

    def _ended(
        self, at: datetime, outcome: str, result: Mapping[str, Any] | None, error: str | None
    ) -> Attempt:
        return Attempt(
            schedule_id=self.schedule_id,
            slot=self.slot,
            attempt=self.attempt,
            worker=self.worker,
            ended_at=at,
            outcome=outcome,
            result=None if result is None else dict(result),
            error=error,
        )


def claim(
    database: Database,
    worker: str,
    *,
    lease_s: float,
    now: datetime | None = None,
    name: str | None = None,
) -> Job | None:
    """Returns the run that has been due for longest (of the schedule of this ``name``, where one is
    given), leased to ``worker`` for ``lease_s`` seconds; None where none is. All slots of a
    schedule that passed meanwhile are one run.

    A slot is due by ``now`` (database time by default). A run whose worker went silent is claimed
    again, at most MAX_ATTEMPTS times, and its lost attempt appended to the history.
    """
    due = func.coalesce(Schedule.slot, Schedule.next_at)
    with database.write() as session:
        while True:
            clock = database.now(session)
            is_free = and_(Schedule.slot.is_(None), Schedule.next_at <= (now or clock))
            is_claimable = or_(is_free, Schedule.lease_until <= clock)
            query = select(Schedule).where(is_claimable).order_by(due, Schedule.id).limit(1)
            if name is not None:
                query = query.where(Schedule.name == name)
            # On PostgreSQL claimers pass each other by; SQLite's write transactions are serial.
            row = session.scalars(query.with_for_update(skip_locked=True)).first()
            if row is None:
                return None
            if row.slot is None:
                row.slot, row.attempt = row.next_at, 0
                row.next_at = next_slot(row.cron, row.tz, now or clock)
            elif row.lease_owner is not None:
                error = f"worker {row.lease_owner} went silent"
                lost = _job(database, row)._ended(clock, "lost", None, error)
                session.add(lost)
                row.last = _last(lost)
            if row.attempt >= MAX_ATTEMPTS:
                row.slot = row.since = row.lease_owner = row.lease_until = None
                session.flush()
                continue
            row.attempt, row.claims, row.lease_owner = row.attempt + 1, row.claims + 1, worker
            row.lease_until = clock + timedelta(seconds=lease_s)
            session.flush()
            return _job(database, row)


def _last(attempt: Attempt) -> dict[str, Any]:
    """What a schedule shows of its newest attempt."""
    return {k: v for k, v in attempt.to_json().items() if k not in ("id", "schedule_id")}


def _job(database: Database, row: Schedule) -> Job:
    assert row.slot is not None
    assert row.lease_owner is not None
    settings = dict(row.settings)
    if row.since is not None and "since" in settings:
        settings["since"] = row.since.isoformat()
    about = row.id, row.name, settings, row.slot, row.attempt, row.claims, row.lease_owner
    return Job(database, *about)
