"""Figures of parts that end one after the other, amid a time that may end before them: the command
line of such a measurement, its rows, and what is read of them afterwards."""

from __future__ import annotations

import gc
import json
import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import RESULTS
from bench.harness import keep, origin, parser_of, say
from bench.markdown import table, table_of
from bench.verdicts import MET, NOT_MET
from spectune.runtime.hardware import hardware
from spectune.traces.text import one_line

Figures = dict[str, Any]
NAMED = 12
"""Most parts that are named as not run."""


def command_line(about: str | None) -> ArgumentParser:
    """What every measurement takes."""
    parser = parser_of(about)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help="names as they are printed (default: all)")
    add("--out", type=Path, metavar="DIR")
    add("--collect", type=Path, metavar="DIR")
    add("--results", type=Path, metavar="DIR", help="where --collect writes")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="a tiny size")
    add("--seconds", type=float, default=440.0, help="after which no part is begun")
    add("--folder", type=Path, metavar="DIR", help="of the ballasted pair")
    return parser


def begin(parser: ArgumentParser, asked: Namespace) -> None:
    """Makes the folder of figures, for which torch has one thread; ends with a line where nothing
    can be measured."""
    if asked.out is None:
        parser.error("--out DIR or --collect DIR is expected")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch sees no CUDA device; --device cpu --tiny proves that parts run")
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)


class OutOfTimeError(Exception):
    """Its time is over while a part runs."""


def run_parts(
    parser: ArgumentParser,
    asked: Namespace,
    parts: Mapping[str, Callable[[], Figures]],
    names: str,
    until: float,
    ended: Callable[[str], None] = lambda part: None,
    **more: Any,
) -> int:
    """Runs the parts that are asked for and have no figures yet, until a moment of the monotonic
    clock, and prints which failed and which were not run; 1 where one failed. ``names``: of all
    parts, as they are told where one is unknown; ``ended`` is called after each; ``more`` is noted
    of the call. Ends with a line for unknown parts and a folder with figures of another machine."""
    rows, on, made = Rows(asked.out), hardware(asked.device), origin()
    if unknown := set(asked.parts) - set(parts):
        parser.error(f"no part {min(unknown)!r}; there are {names}")
    if others := {row["on"] for row in rows.read() if row["part"] == "plan"} - {on}:
        parser.error(f"{asked.out} has figures of {min(others)}; name another folder")
    chosen, before = asked.parts or [*parts], len(rows.read())
    plan = {"plan": [*parts], "on": on, "is_tiny": asked.tiny, **more}
    rows.add("plan", plan | {name: made[name] for name in ("measured", "code", "environment")})
    done = rows.done()
    for name, part in parts.items():
        if name not in chosen or name in done:
            continue
        if time.monotonic() >= until:
            break
        began = time.monotonic()
        try:
            figures = part()
        except OutOfTimeError:
            break
        except Exception as error:  # the other parts may still be had
            figures = failed(error)
        rows.add(name, {**figures, "seconds": time.monotonic() - began})
        ended(name)
        gc.collect()  # models hold the graphs that hold them
        if asked.device == "cuda":
            torch.cuda.empty_cache()
    return rows.outcome(chosen, before)


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

    def outcome(self, chosen: Sequence[str], before: int) -> int:
        """Prints which of the chosen parts failed since there were so many rows, and which were
        not run; 1 where one failed."""
        causes = {row["part"]: row["failed"] for row in self.read()[before:] if "failed" in row}
        for name, cause in causes.items():
            print(f"failed: {name}: {cause}")
        if not_run := [name for name in chosen if name not in self.done() | causes.keys()]:
            more = f"; ... {not_run[-1]}" * (len(not_run) > NAMED)
            print(f"not run: {'; '.join(not_run[:NAMED])}{more}. Call again to go on")
        print(f"{len(self.done() & {*chosen})} of {len(chosen)} parts done", flush=True)
        return int(bool(causes))

    def add(self, part: str, figures: Figures) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"part": part, **figures}) + "\n")
        tell({"part": part, **figures})


def tell(row: Figures) -> None:
    """Prints a row."""
    say({name: value for name, value in row.items() if name not in LONG})


LONG = (
    *("texts", "tables", "plan", "prompt", "profile", "passes", "executed", "lines"),
    "policies",
)
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


def unfinished(rows: Mapping[str, Figures]) -> Figures:
    """What failed, and what of the last plan was not run."""
    return {
        "failed": {part: row["failed"] for part, row in rows.items() if "failed" in row},
        "not_run": [part for part in rows["plan"]["plan"] if part not in rows],
    }


def judged(
    name: str,
    folder: Path,
    figures: Figures,
    results: Path | None,
    tables: Collection[str],
) -> int:
    """Writes figures with their ``verdicts``, prints these and the named tables; 1 where one is not
    met."""
    verdicts = figures["verdicts"]
    figures["holds"] = NOT_MET not in verdicts.values()
    file = result_of(name, folder, figures, results)
    for rows in filter(None, (figures[name] for name in tables)):
        print("", *table_of([shown(row) for row in rows]), sep="\n")
    print("", *table(["promise", "verdict"], verdicts.items()), sep="\n")
    met = sum(verdict == MET for verdict in verdicts.values())
    print(f"{met} of {len(verdicts)} met\n{file}", flush=True)
    return int(not figures["holds"])


def result_of(name: str, folder: Path, figures: Figures, results: Path | None) -> Path:
    """The file to which figures are written: ``NAME-DEVICE.json`` in the results, or in the folder
    itself where they were measured at the tiny size."""
    slug = re.sub("[^a-z0-9]+", "-", figures["on"].lower()).strip("-")
    file = (results or (folder if figures["is_tiny"] else RESULTS)) / f"{name}-{slug}.json"
    keep(file, figures)
    return file
