"""What the scheduler knows, as plain values: schedules, fired slots and jobs. Rows never leave this
package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, Literal

from spectune.db.schedules import FireRow, JobRow, ScheduleRow
from spectune.optimizer.schedule.times import LONGEST_S, ScheduleError, Timing, format_duration, utc

Outcome = Literal["enqueued", "misfired", "coalesced", "skipped"]
State = Literal["queued", "running", "done", "failed"]

LATEST = 253_402_300_799
"""The last instant of the calendar, the end of the year 9999."""


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json(inner) for key, inner in value.items()}
    if isinstance(value, datetime):
        return value.isoformat()
    return repr(value) if isinstance(value, bytes) else value  # SQLite keeps bytes in any column


@dataclass(frozen=True)
class _Value:
    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict, moments in ISO 8601."""
        found: dict[str, Any] = _json(asdict(self))
        return found


@dataclass(frozen=True)
class Schedule(_Value):
    """What is to be done when. Moments are aware UTC; ``misfire_grace_s`` and ``max_instances``
    None mean no limit.

    ``payload`` belongs to the job function; the scheduler only carries it. So does ``budget_s``: an
    attempt may ask how much of it is left (:meth:`JobContext.remaining_s`), nothing ends it then.
    ``parked`` says why the scheduler itself disabled it: something in it cannot be read (a payload
    is then shown as empty, a moment as 1970).
    """

    id: int
    name: str
    cron: str | None
    interval_s: int | None
    tz: str
    next_fire_at: datetime
    misfire_grace_s: int | None
    coalesce: bool
    max_instances: int | None
    max_attempts: int
    budget_s: float | None
    enabled: bool
    parked: str | None
    payload: Mapping[str, Any]
    created_at: datetime

    @property
    def when(self) -> str:
        """The timing for a person: ``0 3 * * * (Europe/Berlin)`` or ``every 6h``."""
        given = self.interval_s
        if self.cron is not None:
            return f"{self.cron} ({self.tz})"
        return f"every {format_duration(given) if isinstance(given, int) else given}"


@dataclass(frozen=True)
class Job(_Value):
    """One job with what it needs of its schedule. ``attempt`` counts claims: 0 until the first.

    ``fire_at`` is the slot it stands for, ``idempotency_key`` names that slot for ever: what a job
    publishes under it must be published once. ``error`` begins with one line for the user; a
    traceback may follow. A moment that cannot be read is shown as 1970, a result as None.
    """

    id: int
    schedule: str
    fire_at: datetime
    state: State
    attempt: int
    max_attempts: int
    idempotency_key: str
    payload: Mapping[str, Any]
    budget_s: float | None
    lease_owner: str | None
    lease_until: datetime | None
    result: Mapping[str, Any] | None
    error: str | None
    queued_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True)
class Fire(_Value):
    """One slot, what became of it, and its job if it has one."""

    schedule: str
    fire_at: datetime
    outcome: Outcome
    noticed_at: datetime
    job: Job | None = None


_WITHIN = {
    "anchor_at": (0, LATEST),
    "max_attempts": (1, 2**31),
    "max_instances": (1, 2**31),
    "misfire_grace_s": (0, 2**63),
    "budget_s": (1e-9, LONGEST_S),
}
"""The least and the most of a schedule's columns of numbers; whole ones but for the budget."""


def timing_of(row: ScheduleRow) -> Timing:
    """Raises ScheduleError, saying what it is, where something in the row cannot be used: a hand
    was there, or a zone is gone."""
    for column, (least, most) in _WITHIN.items():
        value, kinds = getattr(row, column), (int, float) if column == "budget_s" else (int,)
        if value is not None and not (isinstance(value, kinds) and least <= value <= most):
            raise ScheduleError(f"{column} is {value!r}, not from {least:g} to {most:g}")
    try:
        return Timing.parse(cron=row.cron, every=row.interval_s, tz=row.tz, anchor=row.anchor_at)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ScheduleError(f"its timing cannot be used ({error})") from error


def payload_of(row: ScheduleRow) -> Mapping[str, Any]:
    """Raises ScheduleError for what is no JSON object."""
    if not isinstance(row.payload, dict):
        raise ScheduleError("the payload is no JSON object")
    return row.payload


def shown_moment(instant: Any) -> datetime:
    """A moment of a row to be shown, 1970 for what is none: no hand in a row stops who reads it."""
    try:
        return utc(instant)
    except (TypeError, ValueError, OverflowError):
        return utc(0)


def _columns(row: ScheduleRow | JobRow | FireRow, value: type[_Value]) -> dict[str, Any]:
    """What a value takes of a row, by name, as far as it can be shown."""
    found = {}
    for name in (field.name for field in fields(value) if hasattr(row, field.name)):
        held = getattr(row, name)
        if name.endswith(("_at", "_until")) and held is not None:
            held = shown_moment(held)
        elif name in ("payload", "result") and not isinstance(held, dict):
            held = {} if name == "payload" else None
        found[name] = held
    return found


def schedule_of(row: ScheduleRow) -> Schedule:
    return Schedule(**_columns(row, Schedule))


def job_of(row: JobRow, schedule: ScheduleRow) -> Job:
    of, own = schedule_of(schedule), _columns(row, Job)
    return Job(schedule=of.name, payload=of.payload, budget_s=of.budget_s, **own)


def fire_of(row: FireRow, schedule: ScheduleRow, job: JobRow | None) -> Fire:
    made = job_of(job, schedule) if job else None
    return Fire(schedule=schedule.name, job=made, **_columns(row, Fire))
