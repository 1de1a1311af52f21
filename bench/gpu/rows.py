"""Figures of parts that end one after the other, amid a time that may end before them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import RESULTS
from bench.harness import keep, say
from spectune.traces.text import one_line

Figures = dict[str, Any]


class OutOfTimeError(Exception):
    """Its time is over while a part runs."""


class Rows:
    """``rows.jsonl``: of each part that ended its figures, or why it failed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "rows.jsonl"

    def read(self) -> list[Figures]:
        if not self._file.exists():
            return []
        return [json.loads(line) for line in self._file.read_text().splitlines()]

    def done(self) -> set[str]:
        """The parts that have figures."""
        return {row["part"] for row in self.read() if "failed" not in row}

    def add(self, part: str, figures: Figures) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"part": part, **figures}) + "\n")
        tell({"part": part, **figures})


def tell(row: Figures) -> None:
    """Prints a row."""
    say({name: value for name, value in row.items() if name not in LONG})


LONG = ("texts", "tables", "plan", "prompt", "profile", "passes", "executed", "lines")
"""Figures that are not printed."""


def failed(error: Exception, death: str = "") -> Figures:
    """The cause of a failure in one line: of the server's end where that is known."""
    return {"failed": one_line(death or f"{type(error).__name__}: {error}", 250)}


def shown(row: Mapping[str, Any]) -> Figures:
    """A row with its intervals as text."""
    found: Figures = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= {f"{name} {side}": each for side, each in shown(value).items()}
        else:
            is_interval = isinstance(value, list)
            found[name] = "{:.3g} ({:.3g} to {:.3g})".format(*value) if is_interval else value
    return found


def result_of(name: str, folder: Path, figures: Figures, results: Path | None) -> Path:
    """The file to which figures are written: ``NAME-DEVICE.json`` in the results, or in the folder
    itself where they were measured at the tiny size."""
    slug = re.sub("[^a-z0-9]+", "-", figures["on"].lower()).strip("-")
    file = (results or (folder if figures["is_tiny"] else RESULTS)) / f"{name}-{slug}.json"
    keep(file, figures)
    return file
