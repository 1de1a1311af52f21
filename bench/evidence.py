"""Measures again what is not of today's code, part by part, and says how long each part took last.

    python bench/run.py evidence [--list] [NAME ...]

A part is measured where a file of the code that it is of has changed since, or where it never was.
What is broken off goes on with the next part when it is typed again. What needs more than this
environment (a served vLLM, Gemma, a GPU, a file of GSM8K) is left to its own command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench import RESULTS, ROOT, harness
from bench.measured_page import changed_since, folders_of, parts_of

APART = {
    "papers": ("dynaspec", "dynaspec_sampled"),
    "papers_executed": ("dynaspec_executed",),
    "map_executed": ("executed",),
}
"""Parts that need what may not be here: a file of GSM8K, figures of a GPU."""
ELSEWHERE = {"served", "serve_clients"}
"""Measurements in environments of their own."""


class Due(NamedTuple):
    """A part that can be measured here: its command's name, the part (empty where it is all of
    it), whether it ever was measured, the seconds that it took then, and how many files have
    changed since."""

    name: str
    part: str
    was_measured: bool = False
    seconds: float | None = None
    changed: str = ""

    @property
    def is_due(self) -> bool:
        return self.changed != "0"

    def told(self) -> str:
        took = "time unknown" if self.seconds is None else f"{self.seconds / 60:.0f} minutes"
        state = f"{self.changed or '?'} files changed since" if self.was_measured else "new"
        return f"{f'{self.name} {self.part}'.rstrip():32} {took:16} {state}"


def parts() -> Iterator[Due]:
    """All that can be measured here."""
    for name in harness.CHECKS:
        yield _due(f"acceptance-{name}", name, "")
    for name in harness.MEASUREMENTS:
        if name in ELSEWHERE:
            continue
        module = harness.module_of(name)
        if result := getattr(module, "RESULT", ""):
            for part in module.PARTS:
                if part not in APART.get(name, ()):
                    yield _due(result, name, part)


def _due(result: str, name: str, part: str) -> Due:
    file = RESULTS / f"{result}.json"
    made = dict(parts_of(json.loads(file.read_text()))).get(part) if file.exists() else None
    if made is None:
        return Due(name, part)
    changed = changed_since(made["code"], folders_of(result))
    return Due(name, part, True, made.get("seconds"), changed)


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these alone")
    parser.add_argument("--list", action="store_true", help="say what is due, and measure nothing")
    options = parser.parse_args(arguments)
    found = [due for due in parts() if not options.names or due.name in options.names]
    for due in found:
        print(due.told())
    due_now = [due for due in found if due.is_due]
    known = sum(due.seconds or 0.0 for due in due_now) / 60
    unknown = sum(due.seconds is None for due in due_now)
    print(f"{len(due_now)} of {len(found)} parts are due: {known:.0f} minutes, {unknown} unknown")
    if options.list:
        return 0
    failed = []
    for n, due in enumerate(due_now):
        left = sum(later.seconds or 0.0 for later in due_now[n:]) / 60
        print(f"{n + 1} of {len(due_now)}: {due.name} {due.part} ({left:.0f} minutes left)")
        only = ("--only", due.part) if due.part else ()
        command = [sys.executable, str(ROOT / "bench/run.py"), due.name, *only]
        if subprocess.run(command, check=False).returncode:
            failed.append(f"{due.name} {due.part}".rstrip())
    print(f"does not hold, or failed: {', '.join(failed) or 'nothing'}")
    return int(bool(failed))
