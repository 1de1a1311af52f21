"""kill -9 of record and tune."""

from __future__ import annotations

import json
import shutil
from typing import Any

from kill_driver import run_kills
from pairs import make_pair

from bench.harness import state_folder


def check(quick: bool) -> dict[str, Any]:
    """kill -9 at 50 random moments of record and tune: the database stays sound, both resume,
    nothing is lost."""
    state = state_folder(quick)
    folder = state / "kills"
    shutil.rmtree(folder, ignore_errors=True)  # databases of before are not today's
    folder.mkdir()
    count = 2 if quick else 50
    figures = run_kills(make_pair(folder, "llama"), folder, count=count, seed=0)
    problems = figures["problems"]
    phases = json.dumps(figures["kills"])
    summary = f"{count} kill -9 of record and tune ({phases}): {len(problems)} problems"
    return {**figures, "count": count, "holds": not problems, "summary": summary}
