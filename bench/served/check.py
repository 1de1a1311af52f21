"""`check` on two pairs: its seconds, its acceptance beside a recording's, and the minutes that it
foretells of a tuning beside a tuning's own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from doors import Door
from pairs import chain, make_pair

from bench.harness import say
from bench.served.live import run_json, temporary_folder
from spectune.demo.prompts import demo_workload

LIMIT_S, FACTOR = 60.0, 1.5
PROMPTS, LETTERS = 48, 200
"""Prompts of the tuning; the start of each, as one pair's models have short contexts."""
QUICK = ("--quick", "--budget", "10s", "--limit", 16, "--max-new-tokens", 12)


def measure(quick: bool) -> dict[str, Any]:
    limit, tokens, most = (4, 12, 2) if quick else (16, 32, 8)
    with temporary_folder() as folder:
        work = folder / "prompts.jsonl"
        lines = [json.dumps({"prompt": line["turns"][0][:LETTERS]}) for line in demo_workload()]
        work.write_text("\n".join(lines[:: len(lines) // PROMPTS][:PROMPTS]) + "\n")
        (folder / "gpt2").mkdir()
        pairs = {"demo": "demo", "gpt2": str(make_pair(folder / "gpt2", "gpt2"))}
        size = ("--limit", limit, "--max-new-tokens", tokens, "--gamma-max", most)
        rows = [_row(folder, name, pair, work, size) for name, pair in pairs.items()]
        minutes = _minutes(folder, work, rows[0]["tune_minutes"], quick)
    holds = all(row["seconds"] <= LIMIT_S and row["unequal"] == 0 for row in rows)
    return {
        "summary": "; ".join(
            f"{row['pair']}: {row['seconds']:.0f} s, {row['unequal']} of {row['compared']} figures "
            "unlike a recording's"
            for row in rows
        )
        + "; a tuning of the demo pair took {took:.1f} minutes, foretold {foretold:.1f}".format(
            **minutes
        ),
        "holds": holds and 1 / FACTOR <= minutes["foretold"] / minutes["took"] <= FACTOR,
        "rows": rows,
        "tuning": minutes,
    }


def _row(folder: Path, name: str, pair: str, work: Path, size: tuple[object, ...]) -> Any:
    """Seconds of `check` as it is typed; and, of one that takes its time, how many of its figures
    are not those of a recording of the same prompts."""
    began = time.monotonic()
    typed = run_json("check", pair, work)
    seconds = time.monotonic() - began
    checked = run_json("check", pair, work, "--budget", "10m", *size)
    door = Door(str(folder / f"{name}.db"))
    door.json("record", "--pair", pair, "--workload", work, *size)
    by_draft = {row["draft"]: row for row in door.json("traces", "stats", by="draft")["stats"]}
    compared = unequal = 0
    for row in checked["lengths"]:
        recorded, place = by_draft[row["draft"]], row["K"] - 1
        replayed = door.json("simulate", policy=json.dumps(chain(row["draft"], row["K"])))
        figures = (
            (row["conditional"], recorded["conditional"][place]),
            (row["cumulative"], recorded["marginal"][place]),
            (row["tau"], replayed["mean_accepted_length"]),
            (checked["tokens"], replayed["emitted_tokens"]),
        )
        compared += len(figures)
        unequal += sum(one != other for one, other in figures)
    row = {"pair": name, "seconds": seconds, "prompts": typed["prompts"], "advice": typed["advice"]}
    say(row)
    return {**row, "compared": compared, "unequal": unequal, "tune_minutes": typed["tune_minutes"]}


def _minutes(folder: Path, work: Path, foretold: float, quick: bool) -> dict[str, Any]:
    """Minutes of the tuning that `check` names, and the seconds of its stages."""
    began = time.monotonic()
    size = QUICK if quick else ()
    words = "tune", "--pair", "demo", "--workload", work, *size
    stages = run_json("--db", folder / "tuned.db", *words)["seconds"]
    return {"foretold": foretold, "took": (time.monotonic() - began) / 60, "stages_s": stages}
