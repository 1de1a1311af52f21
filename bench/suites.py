"""Checks that are tests run at full size: borders, kills, schedules, verifiers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from kill_driver import run_kills
from pairs import make_pair

ROOT = Path(__file__).resolve().parent.parent
SCHEDULES = ("times", "store", "workers", "retries", "parking")


def borders(state: Path, quick: bool = False) -> dict[str, Any]:
    """20,000 malformed policies, artifacts, chunks, rows, workloads, command lines: our errors
    alone, within 5 s."""
    report = state / "borders.json"
    report.unlink(missing_ok=True)
    size = "" if quick else "full"
    found = _tests("borders", SPECTUNE_BORDERS=size, SPECTUNE_BORDERS_REPORT=str(report))
    cases = json.loads(report.read_text()) if report.exists() else {}
    count = sum(cases.values())
    holds = found["holds"] and (quick or count >= 20_000)
    return {"holds": holds, "summary": f"{count} cases; {found['summary']}", "cases": cases}


def kills(state: Path, quick: bool = False) -> dict[str, Any]:
    """kill -9 at 50 random moments of record and tune: the database stays sound, both resume,
    nothing is lost."""
    folder = state / "kills"
    folder.mkdir(exist_ok=True)
    count = 2 if quick else 50
    figures = run_kills(make_pair(folder, "llama"), folder, count=count, seed=0)
    problems = figures["problems"]
    phases = json.dumps(figures["kills"])
    summary = f"{count} kill -9 of record and tune ({phases}): {len(problems)} problems"
    return {**figures, "count": count, "holds": not problems, "summary": summary}


def schedules(state: Path, quick: bool = False) -> dict[str, Any]:
    """8 workers x 200 due slots on SQLite and PostgreSQL, takeover of a dead worker, daylight
    saving by table."""
    return _tests(*(f"schedule_{part}" for part in SCHEDULES[: 1 if quick else None]))


def verifiers(state: Path, quick: bool = False) -> dict[str, Any]:
    """Both verifiers' distributions against the exact one by chi-square; a biased verifier fails
    the same test."""
    return _tests("verifiers")


def _tests(*names: str, **env: str) -> dict[str, Any]:
    """Runs test files; the summary is pytest's own."""
    files = [f"tests/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    how: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, env={**os.environ, **env}, **how)
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    counted = re.search(r"(\d+) passed", last)
    passed = int(counted[1]) if counted else 0
    return {"holds": done.returncode == 0, "summary": last, "passed": passed}
