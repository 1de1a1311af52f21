"""When schedules fire: the hours around daylight saving by table, cadence, durations, and what is
refused."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice, pairwise

import pytest

from spectune.optimizer.schedule import ScheduleError, Timing, format_duration, parse_duration
from spectune.optimizer.schedule.times import MAX_BACKLOG, utc


def instant(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def shown(slots: Sequence[int]) -> list[str]:
    return [f"{utc(s):%m-%dT%H:%M}" for s in slots]


def cron(expression: str, tz: str = "UTC") -> Timing:
    return Timing.parse(cron=expression, every=None, tz=tz, anchor=instant("2026-01-01"))


# Each row: zone, expression, UTC instant to start after, and the next slots in UTC, worked out by
# hand from the zone's rules: Berlin goes from +1 to +2 on 2026-03-29 at 01:00 UTC (02:00 -> 03:00)
# and back on 2026-10-25 at 01:00 UTC (03:00 -> 02:00); New York from -5 to -4 on 2026-03-08 at
# 07:00 UTC (02:00 -> 03:00) and back on 2026-11-01 at 06:00 UTC (02:00 -> 01:00); Lord Howe by half
# an hour, from +11 to +10:30 on 2026-04-04 at 15:00 UTC (02:00 -> 01:30).
DAYLIGHT_SAVING = """
# A fixed time that is skipped runs once at the end of the gap; the days around are ordinary.
Europe/Berlin | 30 2 * * * | 2026-03-27T12:00 | 03-28T01:30 03-29T01:00 03-30T00:30
America/New_York | 30 2 * * * | 2026-03-07T00:00 | 03-07T07:30 03-08T07:00 03-09T06:30
# A fixed time that is repeated runs the first time only.
Europe/Berlin | 30 2 * * * | 2026-10-24T12:00 | 10-25T00:30 10-26T01:30
America/New_York | 30 1 * * * | 2026-10-31T12:00 | 11-01T05:30 11-02T06:30
America/New_York | 30 2 * * * | 2026-10-31T12:00 | 11-01T07:30 11-02T07:30
# Also for who begins to look in between the two (a bare CronSim answers 00:30, in the past).
Europe/Berlin | 30 2 * * * | 2026-10-25T00:45 | 10-26T01:30
Europe/Berlin | 30 2 * * * | 2026-10-25T01:10 | 10-26T01:30
# Every hour means every 3600 seconds: the skipped hour has no slot, the repeated one two.
Europe/Berlin | 0 * * * * | 2026-03-28T23:30 | 03-29T00:00 03-29T01:00 03-29T02:00
Europe/Berlin | 0 * * * * | 2026-10-24T23:30 | 10-25T00:00 10-25T01:00 10-25T02:00
America/New_York | 0 * * * * | 2026-11-01T04:30 | 11-01T05:00 11-01T06:00 11-01T07:00
# Several fixed times in the gap are one run at its end, which may be a slot of its own.
Europe/Berlin | 0,15,30 2-3 * * * | 2026-03-28T12:00 | 03-29T01:00 03-29T01:15 03-29T01:30
Europe/Berlin | 15 1-3 * * * | 2026-10-24T12:00 | 10-24T23:15 10-25T00:15 10-25T02:15 10-26T00:15
Australia/Lord_Howe | 45 1 * * * | 2026-04-04T00:00 | 04-04T14:45 04-05T15:15
# Zones without daylight saving, and the calendar.
Asia/Kolkata | 0 3 * * * | 2026-03-28T00:00 | 03-28T21:30 03-29T21:30
UTC | @daily | 2026-02-27T12:00 | 02-28T00:00 03-01T00:00
Europe/Berlin | 0 9 * * MON-FRI | 2026-03-27T12:00 | 03-30T07:00 03-31T07:00
"""


ROWS = [row.split(" | ") for row in DAYLIGHT_SAVING.splitlines() if row and row[0] != "#"]


def stepped(day: str, hours: Sequence[int], step: int = 15) -> str:
    return " ".join(f"{day}T{h:02}:{m:02}" for h in hours for m in range(0, 60, step))


# A stepped minute in a range of hours: local 1 and 3 o'clock when 2 is skipped, and 1, 2, 2, 3 when
# it is repeated.
BERLIN, NEW_YORK = ("Europe/Berlin", "*/15 1-3 * * *"), ("America/New_York", "*/30 1-3 * * *")
SKIPPED = f"{stepped('03-29', (0, 1))} 03-29T23:00"
REPEATED = f"{stepped('10-24', (23,))} {stepped('10-25', (0, 1, 2))} 10-26T00:00"
ROWS += [
    [*BERLIN, "2026-03-28T12:00", SKIPPED],
    [*BERLIN, "2026-10-24T12:00", REPEATED],
    [*NEW_YORK, "2026-11-01T00:00", f"{stepped('11-01', (5, 6, 7, 8), 30)} 11-02T06:00"],
]


@pytest.mark.parametrize(("tz", "expression", "after", "slots"), ROWS)
def test_cron_slots_by_table(tz: str, expression: str, after: str, slots: str) -> None:
    timing, now, found, expected = cron(expression, tz), instant(after), [], slots.split()
    assert shown(list(islice(timing.slots(now), len(expected)))) == expected
    for _ in expected:  # a worker asks for one slot at a time, starting anew from the last
        now = timing.next(now)
        found.append(now)
    assert shown(found) == expected
    assert timing.due(found[0], found[-1] - 0.001)[0] == tuple(found[:-1])


def test_slots_always_increase_over_years_of_changes() -> None:
    for tz in ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe"):
        for expression in ("30 2 * * *", "0,30 1-3 * * *", "5 */2 * * *"):
            slots = list(islice(cron(expression, tz).slots(instant("2026-01-01")), 2_000))
            assert all(a < b for a, b in pairwise(slots)), (tz, expression)


def test_interval_keeps_its_cadence_from_its_anchor() -> None:
    anchor = instant("2026-03-28T22:10")
    timing = Timing.parse(cron=None, every="6h", tz="Europe/Berlin", anchor=anchor)
    assert timing.next(anchor) == anchor + 6 * 3600, "the first slot is one interval after creation"
    assert timing.next(anchor - 999) == anchor, "a clock that was ahead has set the anchor"
    # However late somebody looks, and over a change of the clock, slots stay multiples of 6 h of
    # elapsed time.
    assert timing.next(anchor + 13 * 3600) == anchor + 18 * 3600
    assert timing.due(anchor + 6 * 3600, anchor + 18 * 3600 + 0.5) == (
        (anchor + 6 * 3600, anchor + 12 * 3600, anchor + 18 * 3600),
        anchor + 24 * 3600,
    )


@pytest.mark.parametrize(
    "timing", [cron("* * * * *"), Timing.parse(cron=None, every="1m", tz="UTC", anchor=0)]
)
def test_of_a_long_backlog_the_latest_slots_are_kept(timing: Timing) -> None:
    first = instant("2026-05-01T10:00")
    now = first + 60 * 5 * MAX_BACKLOG + 30
    slots, following = timing.due(first, now)
    assert slots == tuple(range(now - 30 - 60 * (MAX_BACKLOG - 1), now, 60))
    assert following == now + 30


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1d12h", 129600), ("2w", 1209600), (" 1H30M ", 5400)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    "text", ["", "6", "h", "6x", "-6h", "12h1d", "1h1h", "0m", "99999w", "1.5h", "6 hours"]
)
def test_bad_durations_are_refused_by_name(text: str) -> None:
    with pytest.raises(ScheduleError, match="duration") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ({"cron": "61 * * * *"}, "bad minute in cron expression '61 \\* \\* \\* \\*'"),
        ({"cron": "0 0 30 2 *"}, "bad day-of-month"),
        ({"cron": "* * * *"}, "must have five fields"),
        ({"every": "0h"}, "more than 0"),
        ({"every": "soon"}, "'soon' is not a duration; write for example 30m, 6h or 1d12h"),
        ({}, "either a cron expression"),
        ({"cron": "0 3 * * *", "every": "6h"}, "and not both"),
        (
            {"every": "6h", "tz": "Europe/Berln"},
            "unknown time zone 'Europe/Berln'; did you mean Europe/Berlin\\?",
        ),
    ],
)
def test_bad_timings_are_refused_with_one_line(when: dict[str, str | int], message: str) -> None:
    arguments: dict[str, object] = {"cron": None, "every": None, "tz": "UTC", "anchor": 0, **when}
    with pytest.raises(ScheduleError, match=message):
        Timing.parse(**arguments)  # type: ignore[arg-type]  # assembled from the table
