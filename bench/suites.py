"""Checks that are tests run at full size: borders and kills."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from kill_driver import run_kills
from pairs import make_pair

ROOT = Path(__file__).resolve().parent.parent


def borders(state: Path, quick: bool = False) -> dict[str, Any]:
    """20,000 malformed policies, artifacts, chunks, rows, workloads, command lines: our errors
    alone, within 5 s."""
    report = state / "borders.json"
    report.unlink(missing_ok=True)
    size = {"SPECTUNE_BORDERS": "" if quick else "full", "SPECTUNE_BORDERS_REPORT": str(report)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    how: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*command, "tests/test_borders.py"], env={**os.environ, **size}, **how)
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]  # pytest's own summary
    cases = json.loads(report.read_text()) if report.exists() else {}
    count = sum(cases.values())
    holds = done.returncode == 0 and (quick or count >= 20_000)
    return {"holds": holds, "summary": f"{count} cases; {said}", "cases": cases}


def kills(state: Path, quick: bool = False) -> dict[str, Any]:
    """kill -9 at 50 random moments of record and tune: the database stays sound, both resume,
    nothing is lost."""
    folder = state / "kills"
    shutil.rmtree(folder, ignore_errors=True)  # databases of before are not today's
    folder.mkdir()
    count = 2 if quick else 50
    figures = run_kills(make_pair(folder, "llama"), folder, count=count, seed=0)
    problems = figures["problems"]
    phases = json.dumps(figures["kills"])
    summary = f"{count} kill -9 of record and tune ({phases}): {len(problems)} problems"
    return {**figures, "count": count, "holds": not problems, "summary": summary}
