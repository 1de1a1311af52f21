"""Schedules on both databases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suites import tests


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """8 workers x 200 due slots on SQLite and PostgreSQL, takeover of a dead worker, daylight saving by table."""
    times = "tests/test_schedule_times.py"
    return tests([times] if quick else [times, "tests/test_schedule_store.py", "tests/test_schedule_workers.py"])
