"""What :mod:`gpu.many` brought back, read on a CPU: what was executed beside what replay predicts
at the profile that was measured, verdicts, and vLLM's tokens/s on that device where there are
results of it.

Where the recording holds too little of a request, the head is read here, in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from bench import RESULTS
from bench.checks.load_native import errors_of, halves_of, replayed_speed
from bench.gpu.many import DATABASE, DRAFT
from bench.gpu.rows import Figures, Rows, judged, unfinished
from bench.gpu.stream import profile_from
from bench.lab import demo, replayable, stored
from bench.load_page import GATE, GATE_CLIENTS
from bench.served.live import ratio, temporary_folder
from bench.verdicts import (
    NOT_SHOWN,
    at_least,
    at_most,
    best,
    exactly,
    prediction_errors,
    quantile_interval,
    worst,
)
from spectune.runtime.policies.document import parse_policy

ERROR, NO_LESS, EXACT = 0.08, 0.98, 50
"""Targets: how far predictions are off in the median, the table by load over the best single
policy, and texts that are compared in float64."""


def executed(folder: Path, done: Mapping[str, Figures]) -> list[Figures]:
    """Of each policy at each number of clients its tokens/s, pass by pass, and as predicted."""
    cells = [row for part, row in done.items() if part.startswith("clients ")]
    if not cells:
        return []
    profile, pair, found = profile_from(done["profile"]["profile"]), demo((DRAFT,)), []
    with temporary_folder() as copy:
        for file in folder.glob(f"{DATABASE}*"):
            shutil.copyfile(file, copy / file.name)
        store, traces = stored(copy / DATABASE), {}
        for cell in cells:
            at, clients = f"temperature {cell['temperature']:g}", cell["clients"]
            if at not in traces:
                trace = replayable(store, pair, done[f"record, {at}"]["recording"])
                traces[at] = trace.select(halves_of(trace)[1])
            policies = done[f"choose, {at}"]["policies"][f"{clients}"]
            for name, speeds in cell["tokens_per_s"].items():
                if not speeds:
                    continue
                policy, seats = parse_policy(policies[name]), done["profile"]["seats"]
                where = clients, profile, seats, cell["requests"]
                found.append({
                    "clients": clients, "temperature": cell["temperature"], "policy": name,
                    "label": policy.label(), "tokens_per_s": speeds,
                    "predicted_tokens_per_s": replayed_speed(traces[at], policy, *where),
                })  # fmt: skip
    return found


def by_clients(rows: list[Figures], done: Mapping[str, Figures]) -> list[Figures]:
    """A row for each number of clients and temperature: tokens/s, and ratios of policies that took
    turns with 95% intervals."""
    found = []
    for key in sorted({(row["clients"], row["temperature"]) for row in rows}):
        here = [row for row in rows if (row["clients"], row["temperature"]) == key]
        each = {row["policy"]: row["tokens_per_s"] for row in here}
        cell = done[f"clients {key[0]}, temperature {key[1]:g}"]

        def over(one: str, other: str, each: Mapping[str, list[float]] = each) -> object:
            return ratio(each[one], each[other]) if {one, other} <= each.keys() else None

        single = max((name for name in each if name != "by load"), key=lambda k: median(each[k]))
        found.append({
            "clients": key[0],
            "temperature": key[1],
            **{f"{name}, tokens/s": median(speeds) for name, speeds in each.items()},
            "tree over chain": over("tree", "chain"),
            "best single": single,
            "by load over it": over("by load", single),
            "it over none": over(single, "none"),
            "texts": cell["requests"],
            "differ, at most": max(cell["differ"].values(), default=None),
        })  # fmt: skip
    return found


def beside_vllm(on: str, results: Path) -> list[Figures]:
    """vLLM's tokens/s by clients on the same device: without draft tokens, and the best number of
    them."""
    found = []
    for file in sorted(results.glob("gpu-vllm-*.json")):
        told = json.loads(file.read_text())
        speeds = told.get("speed", []) if told.get("on") == on else []
        for clients in sorted({row["clients"] for row in speeds}):
            by_gamma = {row["K"]: row["tokens/s"] for row in speeds if row["clients"] == clients}
            most = max(by_gamma, key=lambda gamma: by_gamma[gamma])
            row = {"draft": told.get("draft"), "clients": clients, "K=0": by_gamma.get(0)}
            found.append({**row, "best K": most, "tokens/s": by_gamma[most]})
    return found


def verdicts(figures: Figures) -> dict[str, str]:
    rows, texts, cells = (figures[name] for name in ("executed", "texts", "clients"))
    errors, _ = prediction_errors(rows, "tokens_per_s")
    trees = [
        row["tree over chain"]
        for row in cells
        if row["clients"] in GATE_CLIENTS and row["tree over chain"]
    ]
    tables = [row["by load over it"] for row in cells]
    clients = ", ".join(map(str, GATE_CLIENTS[:-1])) + f" or {GATE_CLIENTS[-1]}"
    differ = sum(row["differ"] for row in texts)
    enough = sum(row["texts"] for row in texts) >= EXACT
    return {
        "every part ran": exactly(not figures["failed"] and not figures["not_run"]),
        "no request fails": exactly(not figures["failures"]) if rows else NOT_SHOWN,
        f"predicted within {100 * ERROR:.0f}% in the median": (
            at_most(quantile_interval(errors, 0.5), ERROR) if errors else NOT_SHOWN
        ),
        f"the best tree over the best chain at least {GATE} at {clients} clients": best(
            at_least(each[1:], GATE) for each in trees
        ),
        f"by load at least {NO_LESS} of the best single policy at each number of clients": worst(
            at_least(each[1:], NO_LESS) if each else NOT_SHOWN for each in tables or [None]
        ),
        f"0 of {EXACT} or more float64 texts differ": (
            exactly(not differ) if differ or enough else NOT_SHOWN
        ),
    }


def collect(folder: Path, results: Path | None) -> int:
    """Prints what is in a folder and writes it into the results, or into the folder itself where it
    was measured at the tiny size. 1 where a verdict is not met."""
    rows = {row["part"]: row for row in Rows(folder).read()}
    last = rows["plan"]
    done = {part: row for part, row in rows.items() if "failed" not in row}
    ran = executed(folder, done)
    figures: Figures = {
        **{name: last[name] for name in last if name not in ("plan", "part")},
        "check": done.get("profile", {}).get("check"),
        "clients": by_clients(ran, done),
        "executed": ran,
        "errors": errors_of(ran) if ran else {},
        "vllm": beside_vllm(last["on"], results or RESULTS),
        "texts": done.get("texts", {}).get("rows", []),
        "static": {k: v for k, v in done.get("static", {}).items() if k != "part"},
        "failures": {
            f"{part}, {name}": cause
            for part, row in done.items()
            for name, cause in row.get("failures", {}).items()
        },
        **unfinished(rows),
    }
    figures["verdicts"] = verdicts(figures)
    for name in ("errors", "static", "failures"):
        print(f"{name}: {json.dumps(figures[name])}")
    return judged("gpu-many", folder, figures, results, ("clients", "vllm", "texts"))
