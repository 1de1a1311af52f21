"""The checks and measurements of this project, by name.

    python bench/run.py [NAME ...] [--quick] [--fresh] [--list]
    python bench/run.py NAME --help

Without names it runs those of ``make acceptance``: exact checks two at a time, then timed ones
alone; what is done is not done again unless ``--fresh``. A check is a function ``check(state,
quick)`` of the module of its name. It returns figures: a one-line ``summary``, whether it
``holds``, and more, which are written to ``bench/results/acceptance-NAME.json``. What checks share
(:mod:`lab`) and which of them ended is kept in ``.acceptance/``. Other measurements are functions
``main(arguments)`` with options and results of their own. ``--quick`` proves that a check runs, in
``.acceptance/quick``, and leaves the results alone. Exit code 1 if any does not hold.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

EXACT = ("lossless", "rounding", "kills")
"""Checks that do not read the clock, the longest first."""
TIMED = ("fidelity", "regret", "sampled")
CHECKS = (*EXACT, *TIMED)
MEASUREMENTS = {
    "gpu": "gpu.native",
    "gpu_vllm": "gpu.vllm",
    "load": "served.load",
    "map": "map.cells",
    "map_executed": "map.executed",
    "nulls": "checks.nulls",
    "papers": "papers.replayed",
    "papers_executed": "papers.executed",
    "served": "served.parts",
    "speed": "checks.speed",
}
"""Measurements with options of their own, and the module of each."""


def main(arguments: Sequence[str]) -> int:
    """Runs what is named, prints a table, returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch is not imported yet
    if arguments and arguments[0] in MEASUREMENTS:
        result = _module(arguments[0]).main(arguments[1:])
        return int(result or 0)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="checks to run")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs did")
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    parser.add_argument("--list", action="store_true", help="list what there is")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in CHECKS]:
        parser.error(f"no check {unknown[0]}; there are {', '.join((*CHECKS, *MEASUREMENTS))}")
    if options.list:
        print("\n".join(f"{name:14} {_about(name)}" for name in (*CHECKS, *MEASUREMENTS)))
        return 0
    state = ROOT / ".acceptance" / "quick" if options.quick else ROOT / ".acceptance"
    state.mkdir(parents=True, exist_ok=True)
    names = options.names or CHECKS
    if options.fresh:
        for file in [*(state / f"{name}.done" for name in names), *state.glob("lab*")]:
            file.unlink(missing_ok=True)
    missing = [name for name in names if not (state / f"{name}.done").exists()]
    if len(names) > 1:
        _run_in_processes(missing, state, quick=options.quick)
    elif missing:
        _run(names[0], state, quick=options.quick)
    return _report(names, state)


def _module(name: str) -> Any:
    return importlib.import_module(f"bench.{MEASUREMENTS.get(name, f'checks.{name}')}")


def _about(name: str) -> str:
    module = _module(name)
    check = getattr(module, "check", None)
    return ((check or module).__doc__ or "").splitlines()[0]


def _run(name: str, state: Path, *, quick: bool) -> None:
    """Runs a check and stores its figures."""
    from bench.lab import keep, origin

    print(f"{name}: {_about(name)}", flush=True)
    began, before = time.time(), origin()
    figures = _module(name).check(state, quick)
    figures |= {"seconds": round(time.time() - began, 1), **before}
    path = _results(name, state)
    keep(path.stem, figures, path.parent)
    (state / f"{name}.done").write_text("ok" if figures["holds"] else "failed")


def _run_in_processes(names: Sequence[str], state: Path, *, quick: bool) -> None:
    """Runs each check in a process of its own, so that one that breaks off leaves the others."""

    def run(name: str) -> None:
        size = ["--quick"] if quick else []
        subprocess.run([sys.executable, __file__, name, *size], check=False)

    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(run, [n for n in EXACT if n in names]))
    for name in TIMED:
        if name in names:
            run(name)


def _report(names: Sequence[str], state: Path) -> int:
    failed = 0
    for name in names:
        mark = state / f"{name}.done"
        holds = mark.exists() and mark.read_text() == "ok"
        failed += not holds
        figures: dict[str, Any] = {"seconds": 0, "summary": "broke off"}
        if mark.exists():
            figures = json.loads(_results(name, state).read_text())
        verdict = "holds" if holds else "DOES NOT HOLD"
        print(f"{name:10} {verdict:14} {figures['seconds']:6.0f} s  {figures['summary']}")
    return int(failed > 0)


def _results(name: str, state: Path) -> Path:
    folder = state if state.name == "quick" else ROOT / "bench" / "results"
    return folder / f"acceptance-{name.replace('_', '-')}.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
