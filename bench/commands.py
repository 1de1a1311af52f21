"""How long commands that load no model take, each in a process of its own: seconds, and how many
modules it imports.

    python bench/commands.py

Figures go to ``bench/results/commands.json``. Exits with 1 where a command ends otherwise than it
should, or takes more processor time than its limit.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from trace_values import a_recording

from spectune.db import open_database
from spectune.traces.store import TraceStore

FIXED = '{"draft": "small", "window": {"kind": "fixed", "gamma": 4}}'
COMMANDS: dict[str, tuple[str, ...]] = {
    "--help": ("--help",),
    "db list": ("db", "list"),
    "db check": ("db", "check"),
    "traces list": ("traces", "list"),
    "traces show": ("traces", "show"),
    "traces stats": ("traces", "stats"),
    "policies list": ("policies", "list", "--pair", "demo"),
    "policies diff": ("policies", "diff", FIXED, "autoregressive", "--pair", "demo"),
    "policies export": ("policies", "export", FIXED, "--pair", "demo", "--for", "vllm"),
    "schedule list": ("schedule", "list"),
    "run, mistyped pair": ("run", "--pair", "nope.json"),
    "tune, mistyped workload": ("tune", "--pair", "demo", "--workload", "nope.jsonl"),
    "run, mistyped policy": ("run", "--pair", "demo", "--policy", "nope"),
    "simulate": ("simulate", "--policy", FIXED, "--device", "cuda"),
}
LIMITS_S = {"simulate": 2.0}
"""Processor time that a command may take; others 1 s."""
SCRIPT = """
import atexit, sys
count = sys.argv.pop(1)
atexit.register(lambda: open(count, "w").write(str(len(sys.modules))))
from spectune.cli import main
main(sys.argv[1:])
"""


def measure(command: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Median seconds of a command, of the clock and of the processor (which others' work hardly
    changes), the first run left out, and the modules imported by its end. Raises RuntimeError for
    another exit status than 0, or 2 of what is mistyped."""
    status = 2 if any("nope" in word for word in command) else 0
    count, times, busy = folder / "modules", [], []
    for _ in range(4):
        count.unlink(missing_ok=True)
        begun, before = time.perf_counter(), os.times()
        asked = [sys.executable, "-c", SCRIPT, str(count), *command]
        done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False)
        times.append(time.perf_counter() - begun)
        busy.append(sum(os.times()[2:4]) - sum(before[2:4]))
        if done.returncode != status or not count.exists():
            said = f"ended with {done.returncode}, not {status}: {done.stderr[-500:]}"
            raise RuntimeError(f"{' '.join(command)}: {said}")
    return {
        "seconds": statistics.median(times[1:]),
        "cpu_s": statistics.median(busy[1:]),
        "modules": int(count.read_text()),
    }


def main() -> int:
    found, over = {}, []
    with tempfile.TemporaryDirectory() as folder:
        with open_database(f"{folder}/spectune.db") as database:
            a_recording(TraceStore(database))
        for name, command in COMMANDS.items():
            limit_s = LIMITS_S.get(name, 1.0)
            one = found[name] = {**measure(command, Path(folder)), "limit_s": limit_s}
            over += [name] if one["cpu_s"] > limit_s else []
            seconds = f"{one['seconds']:6.2f} s{one['cpu_s']:6.2f} s CPU"
            print(f"{name:<26}{seconds}{one['modules']:7} modules", flush=True)
    data = {"python": platform.python_version(), "cores": os.cpu_count(), "commands": found}
    path = Path(__file__).resolve().parent / "results" / "commands.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    if over:
        print(f"over the limit of processor time: {', '.join(over)}", file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    raise SystemExit(main())
