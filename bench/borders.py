"""Malformed input of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from suites import tests


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """20,000 policies, artifacts, chunks, rows, workloads and command lines of all kinds: our errors alone, in a line, within 5 s."""
    report = state / "borders.json"
    report.unlink(missing_ok=True)
    found = tests(["tests/test_borders.py"], SPECTUNE_BORDERS="" if quick else "full", SPECTUNE_BORDERS_REPORT=str(report))
    cases = json.loads(report.read_text()) if report.exists() else {}
    count = sum(cases.values())
    holds = found["holds"] and (quick or count >= 20_000)
    return {**found, "holds": holds, "summary": f"{count} cases; {found['summary']}", "cases": cases}
