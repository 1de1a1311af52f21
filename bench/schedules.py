"""Schedules on both databases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suites import tests


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """8 workers x 200 due slots on SQLite and PostgreSQL, takeover of a dead worker, daylight saving by table."""
    parts = ("times",) if quick else ("times", "store", "workers", "retries", "parking")
    return tests([f"tests/test_schedule_{part}.py" for part in parts])
