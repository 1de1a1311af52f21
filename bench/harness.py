"""How everything here is measured.

A module of :data:`CHECKS` has a function ``check(quick)``: it returns figures with a one-line
``summary`` and whether it ``holds``, which go to ``bench/results/acceptance-NAME.json``. One of
:data:`MEASUREMENTS` has ``PARTS``, functions ``part(quick)`` by name, whose figures are added to
those of ``bench/results/RESULT.json`` as each ends (by ``store`` where it has one); or
``main(arguments)``, where it needs options of its own. With all figures goes by what they were
measured (:func:`origin`). With ``--quick`` everything is tiny and goes to ``.acceptance/quick``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import RESULTS, ROOT

Figures = dict[str, Any]
Part = Callable[[bool], Any]

EXACT = ("lossless", "rounding", "together", "kills")
"""Checks that do not read the clock, the longest first."""
TIMED = ("fidelity", "regret", "sampled")
CHECKS = {name: f"checks.{name}" for name in (*EXACT, *TIMED)}
MEASUREMENTS = {
    "evidence": "evidence",
    "nulls": "checks.nulls",
    "rollouts": "checks.rollouts",
    "drift": "checks.drift",
    "speed": "checks.speed",
    "batches": "checks.batches",
    "load_native": "checks.load_native",
    "rules": "checks.rules",
    "matrix": "checks.matrix",
    "real": "checks.real",
    "real_tuned": "checks.real_tuned",
    "papers": "papers.replayed",
    "vocabulary": "papers.vocabulary",
    "real_drafts": "papers.real_drafts",
    "papers_executed": "papers.executed",
    "map": "map.cells",
    "map_executed": "map.executed",
    "served": "served",
    "load": "served.load",
    "serve_load": "checks.serve_load",
    "serve_clients": "checks.serve_clients",
    "serve_circle": "checks.serve_circle",
    "gpu": "gpu.native",
    "gpu_vllm": "gpu.vllm",
    "gpu_stream": "gpu.stream",
    "gpu_many": "gpu.many",
}


def main(arguments: Sequence[str], about: str | None) -> int:
    """Runs what is named, or all checks; the exit code is 1 where something does not hold."""
    if arguments and arguments[0] in MEASUREMENTS:
        return run_measurement(arguments[0], arguments[1:])
    parser = parser_of(about)
    parser.add_argument("name", nargs="?", choices=[*CHECKS, *MEASUREMENTS], metavar="NAME")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs did")
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    parser.add_argument("--list", action="store_true", help="list what there is")
    options = parser.parse_args(arguments)
    if options.list:
        for name in (*CHECKS, *MEASUREMENTS):
            print(f"{name:16} {str(module_of(name).__doc__).splitlines()[0]}")
        return 0
    if options.fresh:
        for file in (*state_folder(options.quick).glob("lab*"), *marks(options.quick).values()):
            file.unlink(missing_ok=True)
    if options.name is not None:
        return run_check(options.name, options.quick)
    return run_checks(options.quick)


def module_of(name: str) -> Any:
    return importlib.import_module(f"bench.{(CHECKS | MEASUREMENTS)[name]}")


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """A command line whose help is a module's docstring."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def say(what: object) -> None:
    """Prints a line on how far a measurement is."""
    print(f"  {what}", flush=True)


# ----------------------------------------------------------------------------------------- results


def state_folder(quick: bool = False) -> Path:
    """Where recordings and fits are kept between runs."""
    state = ROOT / ".acceptance" / ("quick" if quick else "")
    state.mkdir(parents=True, exist_ok=True)
    return state


def result_file(name: str, quick: bool = False) -> Path:
    return (state_folder(quick) if quick else RESULTS) / f"{name}.json"


def keep(file: Path, figures: Figures) -> None:
    file.write_text(json.dumps(figures, indent=1) + "\n")


def origin() -> Figures:
    """When, by which code (the commit; ``+`` where files differ from it) and in what figures are
    measured."""
    git = ("git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*")
    try:
        code = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        code = ""
    environment = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "load_before": os.getloadavg()[0],
    }
    today = datetime.now(UTC).date().isoformat()
    return {"measured": today, "code": code or "unknown", "environment": environment}


def timed(measure: Callable[[], Any]) -> tuple[Any, Figures]:
    """What is measured, and its origin with its seconds."""
    made, began = origin(), time.monotonic()
    figures = measure()
    return figures, {**made, "seconds": round(time.monotonic() - began, 1)}


def run_measurement(name: str, arguments: Sequence[str]) -> int:
    """Runs a module of :data:`MEASUREMENTS`."""
    module = module_of(name)
    if hasattr(module, "main"):
        return int(module.main(arguments))
    store = getattr(module, "store", add_part)
    return run_parts(module.__doc__, module.RESULT, module.PARTS, arguments, store)


def add_part(file: Path, part: str, figures: Any, made: Figures) -> None:
    """Adds a part's figures to a file of parts, and by what they were measured to its ``made``."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    keep(file, {**kept, part: figures, "made": {**kept.get("made", {}), part: made}})


def run_parts(
    about: str | None,
    result: str,
    parts: Mapping[str, Part],
    arguments: Sequence[str],
    store: Callable[[Path, str, Any, Figures], None] = add_part,
) -> int:
    """Runs parts, ``--only`` some of them, and stores their figures in ``RESULT.json``. 1 where a
    part does not hold."""
    parser, failed = parser_of(about), False
    parser.add_argument("--only", nargs="*", choices=list(parts), default=list(parts))
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    options = parser.parse_args(arguments)
    for part in options.only:
        figures, made = timed(lambda part=part: parts[part](options.quick))
        print(json.dumps(figures), flush=True)
        is_judged = isinstance(figures, dict) and not options.quick
        failed |= is_judged and not figures.get("holds", True)
        store(result_file(result, options.quick), part, figures, made)
    return int(failed)


# ------------------------------------------------------------------------------------------ checks


def marks(quick: bool) -> dict[str, Path]:
    """A file of each check, which is there once it was run by :func:`run_checks`."""
    return {name: state_folder(quick) / f"{name}.done" for name in CHECKS}


def run_check(name: str, quick: bool) -> int:
    """Runs a check and stores its figures. 1 where it does not hold."""
    module = module_of(name)
    print(f"{name}: {module.__doc__}", flush=True)
    figures, made = timed(lambda: module.check(quick))
    keep(result_file(f"acceptance-{name}", quick), figures | made)
    marks(quick)[name].touch()
    return show(name, quick)


def run_checks(quick: bool) -> int:
    """Runs all checks that were not run before, each in a process, so that one that breaks off
    leaves the others: exact ones two at a time, then timed ones alone."""
    lacking = [name for name, mark in marks(quick).items() if not mark.exists()]

    def run(name: str) -> None:
        command = [sys.executable, ROOT / "bench" / "run.py", name, *["--quick"] * quick]
        subprocess.run(command, check=False)

    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(run, [name for name in EXACT if name in lacking]))
    for name in TIMED:
        if name in lacking:
            run(name)
    return max([show(name, quick) for name in CHECKS])


def show(name: str, quick: bool) -> int:
    """Prints what a check came to. 1 where it does not hold, or broke off."""
    figures: Figures = {"holds": False, "seconds": 0, "summary": "broke off"}
    if marks(quick)[name].exists():
        figures = json.loads(result_file(f"acceptance-{name}", quick).read_text())
    verdict = "holds" if figures["holds"] else "DOES NOT HOLD"
    print(f"{name:10} {verdict:14} {figures['seconds']:6.0f} s  {figures['summary']}", flush=True)
    return int(not figures["holds"])
