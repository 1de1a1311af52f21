"""Of every part of `results/` when, by which code and on what it was measured, and how much of that
code has changed since. Called by `python bench/report.py`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from typing import Any

from bench import RESULTS, ROOT
from bench.markdown import table

Figures = dict[str, Any]
DECODING = "runtime", "optimizer", "traces"
FOLDERS = {
    "gpu-": ("runtime", "bench/gpu"),
    "load-vllm": (*DECODING, "engines", "bench/served"),
    "map": (*DECODING, "bench/map"),
    "papers": (*DECODING, "bench/papers"),
    "serve-": (*DECODING, "service", "bench/checks"),
    "served": (*DECODING, "engines", "bench/served"),
    "vocabulary": (*DECODING, "bench/papers"),
}
"""What a result is of, by how its name begins; of others :data:`DECODING` and the checks."""


def parts_of(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """The parts of a result that were measured by themselves, by what they were measured; one
    without a name where it has no parts."""
    if "measured" in figures:
        yield "", figures
    yield from figures.get("made", {}).items()
    for name, part in figures.items():
        if name != "made" and isinstance(part, dict) and "measured" in part:
            yield name, part


def folders_of(result: str) -> tuple[str, ...]:
    begun = next((name for name in FOLDERS if result.startswith(name)), None)
    return FOLDERS[begun] if begun else (*DECODING, "bench/checks")


@cache
def changed_since(code: str, folders: tuple[str, ...]) -> str:
    """How many files of some folders are not as at a commit; empty where that is not known."""
    commit = re.match(r"[0-9a-f]{7,}", code)
    if commit is None:
        return ""
    git = ("git", "-C", str(ROOT), "diff", "--name-only", commit[0], "--", *folders)
    try:
        done = subprocess.run(git, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return "" if done.returncode else str(len(done.stdout.splitlines()))


def machine_of(made: Figures) -> str:
    """What something was measured on."""
    about = made.get("environment")
    if about is None:
        return "not noted"
    said = [made.get("on", f"{about['cpus']} CPUs")]
    if "torch" in about:
        said.append(f"torch {about['torch']}")
    if about.get("load_before") is not None:
        said.append(f"load {about['load_before']:.1f}")
    return ", ".join(said)


def without_changes(page: str) -> str:
    """The page but for its column of changed files, which every commit changes."""
    return re.sub(r" \|[ \d]*\|$", " |", page, flags=re.MULTILINE)


def page() -> str:
    """docs/measured.md."""
    rows = []
    for file in sorted(RESULTS.glob("*.json")):
        folders = folders_of(file.stem)
        parts = list(parts_of(json.loads(file.read_text())))

        def made_by(part: tuple[str, Figures]) -> tuple[str, str, str]:
            made = part[1]
            return made["measured"], made["code"], machine_of(made)

        for (day, code, machine), alike in groupby(sorted(parts, key=made_by), made_by):
            names = ", ".join(sorted(filter(None, (name for name, _ in alike))))
            result = f"[{file.stem}](../bench/results/{file.name})"
            rows.append((result, names, day, machine, code, changed_since(code, folders)))
    about = (
        "Every result, when it was measured, on what (and the machine's load before), by which "
        "commit (`+`: with changes that were not committed), and how many files of the code that "
        "it is of have changed since. Profiles of costs are measured within each part, unless its "
        "page names another. Written by `python bench/report.py`."
    )
    heads = ("result", "parts", "measured", "on", "as of", "files changed since")
    lines = ["# What was measured when", "", about, "", *table(heads, rows)]
    return "\n".join(lines).rstrip() + "\n"
