"""Predicted against executed tokens/s on a running server: constant numbers of draft tokens and a
table, by 1, 4 and 8 clients and under recorded arrivals.

Texts are recorded once. Then every policy is executed under every load, pass after pass in another
order, and what steps cost is noted anew before each pass, as the pace of a shared machine changes:
what is predicted is held against executions of the same minutes, none of which it was fitted to.
The arrivals are a file, of Poisson moments, which come at :data:`BUSY` of what 8 clients get
without draft tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab import demo, record_engine, requests, say, stored
from bench.served.live import DRAFT, MOST, PAIR, demo_prompts, serving, temporary_folder, windowed
from bench.served.load import errors
from spectune.engines.engine import Load
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.engine_profile import Design, serve_design
from spectune.optimizer.recording.on_engine import execute
from spectune.optimizer.recording.record import PanoramaSpec
from spectune.optimizer.replay.loads import Objective, Served, loads_of
from spectune.optimizer.replay.served_costs import costs_of_engine
from spectune.optimizer.tuning.engine_bench import EngineBench, engine_bench, served_of
from spectune.runtime.policies.document import Policy

TOKENS, PASSES, BUSY, LIMIT = 48, 2, 0.7, 0.08
REQUESTS, FEW = {1: 8, 4: 24, 8: 40}, {1: 2, 2: 4}
"""Requests that are sent by so many clients: about as long a time each."""
ARRIVALS = "recorded arrivals"
POLICIES = {f"K={gamma}": windowed(gamma) for gamma in (0, 1, 2, 4, 8)}
POLICIES["table"] = windowed({"1": 4, "3": 2, "6": 1})


def measure(quick: bool) -> dict[str, Any]:
    pair, options = demo((DRAFT,)), DecodeOptions(max_new_tokens=12 if quick else TOKENS)
    counts, passes = (FEW, 1) if quick else (REQUESTS, PASSES)
    names = list(POLICIES)[: 3 if quick else None]
    most, gamma = max(counts), max(POLICIES[name].gamma_max for name in names)
    prompts = demo_prompts(counts[most], options.max_new_tokens)
    with temporary_folder() as folder, serving() as server:
        store = stored(folder / "x.db")
        request = (requests(len(prompts)), tuple(prompts), windowed(gamma), Load(most), options)
        info = record_engine(store, pair, server, *request, PanoramaSpec((DRAFT,), MOST))
        design = Design(prompts, gamma, most, options.max_new_tokens)
        serve_design(store, PAIR, server, DRAFT, design)
        bench = engine_bench(store, info, [], f"clients:{most}", Objective())
        plain = _simulate(bench, POLICIES["K=0"], Load(most), counts[most])
        rate = BUSY * len(plain.tokens) / plain.seconds
        loads = {f"{clients} clients": (Load(clients), count) for clients, count in counts.items()}
        loads[ARRIVALS] = _arrivals(folder / "arrivals.csv", rate, counts[most]), counts[most]
        rows = [{"load": load, "policy": name} for load in loads for name in names]
        rng = np.random.default_rng(0)
        for n in range(passes):
            serve_design(store, PAIR, server, DRAFT, design)
            for row in rng.permutation(rows):
                load, count = loads[row["load"]]
                policy = POLICIES[row["policy"]]
                answers = list(execute(server, prompts[:count], policy, load, options))
                served = served_of(answers)
                row.setdefault("tokens_per_s", []).append(served.tokens_per_s)
                row.setdefault("tpot_s", []).append(served.mean_tpot_s)
            say(f"{time.strftime('%H:%M:%S')} pass {n + 1} of {passes}")
        bench = replace(bench, costs=costs_of_engine(store, info))
    for row in rows:
        served = _simulate(bench, POLICIES[row["policy"]], *loads[row["load"]])
        row["predicted_tokens_per_s"] = served.tokens_per_s
        row["predicted_tpot_s"] = served.mean_tpot_s
    return _figures(rows) | {"passes": passes, "rate": rate, "rows": rows}


def _simulate(bench: EngineBench, policy: Policy, load: Load, count: int) -> Served:
    """What a policy is predicted to serve, on a server whose draft stays loaded."""
    costs = replace(bench.costs, passes={DRAFT: bench.costs.passes[DRAFT]})
    return replace(bench, costs=costs, loaded=DRAFT, count=count).simulate(policy, load).served


def _arrivals(path: Path, rate: float, count: int) -> Load:
    """A load of so many requests a second, by way of a file as traces have it."""
    moments = np.random.default_rng(1).exponential(1.0, count).cumsum()
    path.write_text("\n".join(["TIMESTAMP", *map(str, moments)]) + "\n")
    (load,) = loads_of(f"{path}@{rate}", (), count, count).values()
    return load


def _figures(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    by_load = {
        load: errors([row for row in rows if row["load"] == load], "tokens_per_s")
        for load in dict.fromkeys(row["load"] for row in rows)
    }
    speed, tpot = (errors(rows, name) for name in ("tokens_per_s", "tpot_s"))
    again = speed["median_repeat_error"]
    repeated = "" if again is None else f" (executing again: {100 * again:.1f}%)"
    return {
        "summary": f"{len(rows)} policies and loads, predicted tokens/s "
        f"{100 * speed['median_error']:.1f}% off in the median{repeated}; time per token "
        f"{100 * tpot['median_error']:.1f}%",
        "holds": speed["median_error"] <= LIMIT,
        "tokens_per_s": speed,
        "tpot_s": tpot,
        "tokens_per_s_by_load": by_load,
    }
