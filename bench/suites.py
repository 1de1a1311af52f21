"""Checks that are tests, run at full size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def tests(files: Sequence[str], **env: str) -> dict[str, Any]:
    """Runs test files; the summary is pytest's own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    counted = re.search(r"(\d+) passed", last)
    return {"holds": done.returncode == 0, "summary": last, "passed": int(counted[1]) if counted else 0}
