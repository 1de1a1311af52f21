"""kill -9 of `record` and `tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kill_driver import run_kills
from pairs import make_pair


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """kill -9 at 50 random moments of record and tune: the database stays sound, both resume, nothing committed is lost."""
    folder = state / "kills"
    folder.mkdir(exist_ok=True)
    count = 2 if quick else 50
    figures = run_kills(make_pair(folder, "llama"), folder, count=count, seed=0)
    problems = figures["problems"]
    summary = f"{count} kill -9 of record and tune ({json.dumps(figures['kills'])}): {len(problems)} problems"
    return {**figures, "holds": not problems, "summary": summary}
