"""The full-size checks, resumable: what is done is not done again unless --fresh. Exact comparisons run two at a time, timed ones alone.

    python bench/acceptance.py [--only NAME ...] [--fresh] [--list]

Every check writes its figures to ``bench/results/acceptance-NAME.json`` and says whether it holds. Progress is kept in
``.acceptance/``; a check that was interrupted is begun again, those that ended are not. Exit code 1 if any fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]
STATE = ROOT / ".acceptance"
RESULTS = ROOT / "bench" / "results"
EXACT = (
    *("trees-lossless", "lossless", "shortlists-lossless", "shortlist-recovered", "shortlists-parity", "trees-parity", "parity"),
    *("kills", "schedules", "borders", "shortlist-theory", "verifiers"),
)
"""Checks that do not read the clock, the longest first."""


def main() -> int:
    """Runs the checks that are asked for, prints a table, returns the exit code."""
    import chaos
    import checks
    import choice_checks
    import joint_checks
    import large_vocab
    import shortlist_checks
    import shortlist_tables
    import shortlist_theory
    import tree_checks

    CHECKS = {**checks.CHECKS, **tree_checks.CHECKS, **shortlist_checks.CHECKS, **shortlist_tables.CHECKS}
    CHECKS |= {**shortlist_theory.CHECKS, **choice_checks.CHECKS, **joint_checks.CHECKS, **large_vocab.CHECKS, **chaos.CHECKS}

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=list(CHECKS), help="run these checks alone")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs did")
    parser.add_argument("--list", action="store_true", help="list the checks")
    wanted = parser.parse_args()
    if wanted.list:
        for name, check in CHECKS.items():
            print(f"{name:16} {(check.__doc__ or '').splitlines()[0]}")
        return 0
    names = wanted.only or list(CHECKS)
    STATE.mkdir(exist_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if wanted.fresh:
        for name in names:
            (STATE / f"{name}.done").unlink(missing_ok=True)
    if len(names) == 1:
        _run(names[0], CHECKS[names[0]])
    else:
        # Exact comparisons bear company; what reads the clock runs alone.
        with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            list(pool.map(_apart, [n for n in names if n in EXACT]))
        for name in names:
            if name not in EXACT:
                _apart(name)
    failed = []
    for name in names:
        mark = STATE / f"{name}.done"
        ok = mark.exists() and mark.read_text() == "ok"
        failed += [] if ok else [name]
        figures = json.loads((RESULTS / f"acceptance-{name}.json").read_text()) if mark.exists() else {"seconds": 0, "summary": "broke off"}
        print(f"{name:16} {'holds' if ok else 'DOES NOT HOLD':14} {figures['seconds']:7.0f} s  {figures['summary']}", flush=True)
    return 1 if failed else 0


def _run(name: str, check: Callable[[Path], dict[str, Any]]) -> None:
    """Runs a check unless it is done, and stores its figures."""
    mark = STATE / f"{name}.done"
    if mark.exists():
        return
    print(f"{name}: {(check.__doc__ or '').splitlines()[0]}", flush=True)
    began = time.time()
    figures = check(STATE)
    figures["seconds"] = round(time.time() - began, 1)
    figures["environment"] = environment()
    (RESULTS / f"acceptance-{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    mark.write_text("ok" if figures["holds"] else "failed")


def _apart(name: str) -> None:
    """Runs a check in a process of its own; one that breaks off leaves the others alone."""
    if not (STATE / f"{name}.done").exists():
        subprocess.run([sys.executable, __file__, "--only", name], check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})


def environment() -> dict[str, Any]:
    """What the figures were measured in."""
    import torch
    import transformers

    return {
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_before": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
