"""When a schedule fires: cron expressions in a time zone, or a fixed cadence, as a sequence of UTC
instants.

An instant is whole seconds since 1970, UTC. Around daylight saving a cron expression behaves as
Debian's cron does (cronsim): one whose minute and hour are both fixed runs once, moved to the end
of the hour that is skipped, and only the first time in the hour that is repeated; one whose minute
or hour begins with ``*`` follows elapsed time, so a skipped hour has no slots and a repeated one
twice as many.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from spectune.traces.errors import SpectuneError

UNITS_S = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
LONGEST_S = 3_660 * 86_400
"""Longest duration accepted, ten years."""
MAX_BACKLOG = 1_000
"""Most slots of one schedule that a tick records; of a longer backlog the latest ones."""
ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}

_DURATION = re.compile("".join(rf"(?:(?P<{unit}>[0-9]{{1,12}}){unit})?" for unit in UNITS_S))


class ScheduleError(SpectuneError):
    """A schedule is malformed, unknown, or exists already."""


def parse_duration(text: str) -> int:
    """Seconds of ``"90s"``, ``"30m"``, ``"6h"``, ``"1d12h"``, ``"2w"``: units from large to small,
    each at most once.

    Raises ScheduleError for anything else, for zero and for more than ten years.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    if not found or not any(found.groups()):
        raise ScheduleError(f"{text!r} is not a duration; write for example 30m, 6h or 1d12h")
    seconds = sum(int(found[unit] or 0) * size for unit, size in UNITS_S.items())
    if not 0 < seconds <= LONGEST_S:
        raise ScheduleError(f"the duration {text!r} must be more than 0 and at most ten years")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest text that :func:`parse_duration` reads back as these seconds, rounded to whole
    ones."""
    rest, out = round(seconds), ""
    for unit, size in UNITS_S.items():
        count, rest = divmod(rest, size)
        out += f"{count}{unit}" if count else ""
    return out or "0s"


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def utc(instant: float) -> datetime:
    """An instant as an aware datetime in UTC. Raises OverflowError for one that no calendar has."""
    return _EPOCH + timedelta(seconds=instant)


@dataclass(frozen=True)
class Timing:
    """Either ``cron`` in zone ``tz``, or every ``interval_s`` seconds counted from the instant
    ``anchor``.

    Make one with :meth:`parse`, which refuses what can never fire.
    """

    cron: str | None
    interval_s: int | None
    tz: str
    anchor: int

    @classmethod
    def parse(cls, *, cron: str | None, every: str | int | None, tz: str, anchor: int) -> Timing:
        """Reads what a user wrote: exactly one of ``cron`` (five fields or an alias such as
        ``@daily``) and ``every`` (a duration or seconds), and an IANA zone. Raises ScheduleError
        with what is wrong and what to write instead."""
        if (cron is None) == (every is None):
            raise ScheduleError(
                'give either a cron expression (--cron "0 3 * * *") or an interval (--every 6h), '
                "and not both"
            )
        _zone(tz)
        if every is not None:
            seconds = parse_duration(every if isinstance(every, str) else f"{every}s")
            return cls(None, seconds, tz, anchor)
        assert cron is not None
        expression = " ".join(cron.split())
        timing = cls(ALIASES.get(expression.lower(), expression), None, tz, anchor)
        fields = "minute hour day month weekday"
        if len(expression.split()) != 5 and expression.lower() not in ALIASES:
            raise ScheduleError(
                f'cron expression {cron!r} must have five fields: {fields}, as in "0 3 * * 1-5"'
            )
        try:
            timing.next(anchor)
        except CronSimError as error:
            bad = str(error).removeprefix("Bad ")
            raise ScheduleError(
                f"bad {bad} in cron expression {cron!r}; the fields are {fields}"
            ) from None
        return timing

    def next(self, after: int) -> int:
        """The first slot later than ``after``. Raises ScheduleError if there is none in 50
        years."""
        for slot in self.slots(after):
            return slot
        raise ScheduleError(f"cron expression {self.cron!r} never fires")

    def slots(self, after: int) -> Iterator[int]:
        """All slots later than ``after``, strictly increasing."""
        if self.interval_s is not None:
            slot = self.anchor + (after - self.anchor) // self.interval_s * self.interval_s
            while True:
                slot += self.interval_s
                yield slot
        assert self.cron is not None
        for fire in CronSim(self.cron, datetime.fromtimestamp(after, _zone(self.tz))):
            slot = int(fire.timestamp())
            # CronSim works on wall-clock time: started in a repeated hour it looks back an hour,
            # and several times of a skipped hour all move to its end.
            if slot > after:
                yield slot
                after = slot

    def due(self, first: int, now: float) -> tuple[tuple[int, ...], int]:
        """The slots from ``first`` (itself one) to ``now`` inclusive, and the slot after them.

        No more than the latest :data:`MAX_BACKLOG` are given, as the schedule may have slept for
        months.
        """
        if first > now:
            return (), first
        past: deque[int] = deque([first], maxlen=MAX_BACKLOG)
        if self.interval_s is not None:
            behind = int((now - first) // self.interval_s)
            first += max(0, behind - MAX_BACKLOG) * self.interval_s
        for slot in self.slots(first):
            if slot > now:
                return tuple(past), slot
            past.append(slot)
        raise ScheduleError(f"cron expression {self.cron!r} never fires again")


def _zone(name: str) -> tzinfo:
    if name.upper() == "UTC":
        return UTC  # needs no zone database
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        pass
    zones = available_timezones()
    if not zones:
        raise ScheduleError(
            f"time zone {name!r} cannot be looked up: this system has no zone database; run: pip "
            "install tzdata"
        )
    near = get_close_matches(name, zones, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "; write for example Europe/Berlin or UTC"
    raise ScheduleError(f"unknown time zone {name!r}{hint}")
