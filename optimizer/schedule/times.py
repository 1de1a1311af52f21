"""The moments at which a cron expression fires."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from difflib import get_close_matches
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from spectune.traces.errors import SpectuneError

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
