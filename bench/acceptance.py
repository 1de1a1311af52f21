"""The full-size checks: what is done is not done again unless --fresh. Exact checks run two at a
time, timed ones alone.

    python bench/acceptance.py [--only NAME ...] [--fresh] [--quick] [--list]

A check is a function ``(state, quick)`` that returns figures: a one-line ``summary``, whether it
``holds``, and more. They are written to ``bench/results/acceptance-NAME.json``. What checks share
(:mod:`lab`) and which of them ended is kept in ``.acceptance/``. ``--quick`` runs them at a size
that proves nothing but that they run, in ``.acceptance/quick``, and leaves the results alone. Exit
code 1 if any does not hold.
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
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

SUITES = ("kills", "borders")
"""Functions of :mod:`suites`; the others are ``check`` in the module of their name."""
EXACT = ("lossless", "rounding", "engines", *SUITES)
"""Checks that do not read the clock, the longest first."""
TIMED = ("fidelity", "combination", "regret", "draft_choice", "sampled", "shortlists")
CHECKS = (*EXACT, *TIMED)


def main() -> int:
    """Runs the checks that are asked for, prints a table, returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch is not imported yet
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="*", metavar="NAME", choices=CHECKS, help="run these checks alone")
    add("--fresh", action="store_true", help="forget what earlier runs did")
    add("--quick", action="store_true", help="a tiny size, which proves that a check runs")
    add("--list", action="store_true", help="list the checks")
    wanted = parser.parse_args()
    if wanted.list:
        print("\n".join(f"{name:14} {_about(name)}" for name in CHECKS))
        return 0
    names = wanted.only or CHECKS
    state = ROOT / ".acceptance" / "quick" if wanted.quick else ROOT / ".acceptance"
    state.mkdir(parents=True, exist_ok=True)
    if wanted.fresh:
        for file in [*(state / f"{name}.done" for name in names), *state.glob("lab*")]:
            file.unlink(missing_ok=True)
    left = [name for name in names if not (state / f"{name}.done").exists()]
    if len(names) > 1:
        _run_apart(left, state, wanted.quick)
    elif left:
        _run(names[0], state, wanted.quick)
    return _report(names, state)


def _check(name: str) -> Any:
    """The function of a check."""
    is_suite = name in SUITES
    module = importlib.import_module("suites" if is_suite else name)
    return getattr(module, name if is_suite else "check")


def _about(name: str) -> str:
    return (_check(name).__doc__ or "").splitlines()[0]


def _run(name: str, state: Path, quick: bool) -> None:
    """Runs a check and stores its figures."""
    from lab import environment, keep

    print(f"{name}: {_about(name)}", flush=True)
    began, before = time.time(), environment()
    figures = _check(name)(state, quick)
    figures |= {"seconds": round(time.time() - began, 1), "environment": before}
    path = _results(name, state)
    keep(path.stem, figures, path.parent)
    (state / f"{name}.done").write_text("ok" if figures["holds"] else "failed")


def _run_apart(names: Sequence[str], state: Path, quick: bool) -> None:
    """Runs each check in a process of its own; one that breaks off leaves the others alone."""

    def apart(name: str) -> None:
        how = ["--quick"] if quick else []
        subprocess.run([sys.executable, __file__, *how, "--only", name], check=False)

    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(apart, [n for n in EXACT if n in names]))
    for name in TIMED:
        if name in names:
            apart(name)


def _report(names: Sequence[str], state: Path) -> int:
    failed = 0
    for name in names:
        mark = state / f"{name}.done"
        holds = mark.exists() and mark.read_text() == "ok"
        failed += not holds
        figures: dict[str, Any] = {"seconds": 0, "summary": "broke off"}
        if mark.exists():
            figures = json.loads(_results(name, state).read_text())
        said = f"{'holds' if holds else 'DOES NOT HOLD':14} {figures['seconds']:7.0f} s"
        print(f"{name:14} {said}  {figures['summary']}", flush=True)
    return int(failed > 0)


def _results(name: str, state: Path) -> Path:
    folder = state if state.name == "quick" else ROOT / "bench" / "results"
    return folder / f"acceptance-{name.replace('_', '-')}.json"


if __name__ == "__main__":
    sys.exit(main())
