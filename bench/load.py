"""Simulated against executed under load, and what the table that a search finds loses to the best constant number of tokens.

    [SPECTUNE_VLLM_PYTHON=.venv-vllm/bin/python] python bench/load.py openvino|vllm --trace FILE.csv [--passes 4] [--quick]

An engine is recorded under a few policies and loads. From that is predicted, then executed in turn, ``--passes`` times: no
speculation, 1 to 8 tokens, and the table found for 1, 4 and 16 clients together, each under those loads, Poisson arrivals, and the
first arrivals of a file (a column TIMESTAMP: the Azure LLM inference traces), both scaled to a part of what the engine can do.
Figures go to ``bench/results/load-ENGINE.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import scipy.stats
from lab import demo, environment, fixed, requests, stored

from spectune.engines.protocol import Load, Wanted
from spectune.engines.start import start
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.executed_load import Executed, Execution
from spectune.optimizer.on_engine import prompts_of, record_on
from spectune.optimizer.record import Look, look_around
from spectune.optimizer.simulate.load import Objective, Served, loads_of
from spectune.optimizer.under_load import Search, under_load
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

ROOT = Path(__file__).resolve().parent.parent
DRAFT, MOST, SEATS = "small", 8, 16
CLIENTS = (1, 4, SEATS)
"""Low, middle and high load."""
BUSY = 0.7
"""Requests that arrive, as a part of those that the engine answers at high load without a draft."""
SIZES = {"openvino": (64, 64), "vllm": (32, 48)}
"""Requests, and tokens of each."""


def recorded(engine: str, pair: LoadedPair, store: TraceStore, count: int, tokens: int) -> str:
    """Records the engine with the draft and without it at each load; the recording whose texts are replayed."""
    options, workload = DecodeOptions(Sampling(), tokens), requests(count)
    prompts = prompts_of(pair.words, workload, options)
    longest = max(len(prompt.ids) for prompt in prompts) + tokens
    windows = [fixed(MOST), fixed(3), fixed(1)]
    if engine == "vllm":  # also no tokens with the draft loaded
        windows.append({"kind": "by_batch", "gamma": {"1": 2, "2": 0}})
    by_draft = {DRAFT: [parse_policy({"draft": DRAFT, "window": window}) for window in windows], "none": [AUTOREGRESSIVE]}
    found = ""
    for draft, policies in by_draft.items():
        with closing(start(engine, pair.spec, Wanted(draft, MOST, SEATS, longest))) as running:
            for clients in CLIENTS:
                for policy in policies:
                    load = Load(clients)
                    info = record_on(store, pair.spec, running, workload, prompts, policy, load, options, fresh=True)
                    if not found:
                        found = info.id
                        look_around(store, pair, found, Look((DRAFT,), MOST))
                    store.finish_recording(info.id)
    return found


def measured(state: Path, engine: str, trace: str, passes: int, *, quick: bool) -> dict[str, Any]:
    """Records, searches, executes; the figures."""
    pair, (count, tokens) = demo((DRAFT,)), (8, 12) if quick else SIZES[engine]
    store = stored(state / f"load-{engine}.db", fresh=True)
    info = store.get_recording(recorded(engine, pair, store, count, tokens))
    closed = "clients:" + ",".join(map(str, CLIENTS))
    lab = under_load(store, info, [], closed, Objective())
    found = Search(lab, lambda *_: None).run()
    plain = found.nothing
    assert plain is not None
    rate = BUSY * _requests_per_s(plain.served[f"clients:{SEATS}"])
    opened = {f"{kind} at {rate:.2g}/s": load for kind, load in _open(rate, trace, count)}
    full = replace(lab, loads={**lab.loads, **opened})
    search = Search(full, lambda *_: None)
    constants = [AUTOREGRESSIVE, *(parse_policy({"draft": DRAFT, "window": fixed(g)}) for g in range(1, MOST + 1))]
    table = found.table.policy
    policies = list({p.id: p for p in (*constants, table)}.values())
    print(f"  costs: {dict(lab.costs.check)}; table: {table.label()}; {rate:.2f} requests/s", flush=True)
    executed = Execution(full, pair.spec, _said).run([search.scored(p) for p in policies], passes)
    rows = [row for one in executed for row in _rows(one)]
    return {
        "engine": engine,
        "version": info.options["engine_version"],
        "requests": count,
        "tokens": tokens,
        "passes": passes,
        "costs": dict(lab.costs.check),
        "table": table.label(),
        "texts_differ": sum(one.differ for one in executed),
        **{name: _errors(rows, name) for name in ("tokens_per_s", "tpot_s")},
        "kendall_tau": _agreement(rows),
        "regret": _regret(executed, table, [f"clients:{n}" for n in CLIENTS]),
        "rows": rows,
    }


def _open(rate: float, trace: str, count: int) -> Iterator[tuple[str, Load]]:
    for kind, asked in (("poisson", f"poisson:{rate}"), ("azure", f"{trace}@{rate}")):
        yield kind, next(iter(loads_of(asked, (), count, count).values()))


def _requests_per_s(served: Served) -> float:
    return len(served.tokens) / served.seconds


def _said(phase: str, done: int, total: int) -> None:
    if done % 10 == 0 or done == total:
        print(f"  {time.strftime('%H:%M:%S')} {phase} {done} of {total}", flush=True)


def _rows(one: Executed) -> list[dict[str, Any]]:
    """A policy under each load: predicted, and each execution."""
    return [
        {
            "load": load,
            "policy": one.policy.label(),
            "predicted_tokens_per_s": one.predicted[load].tokens_per_s,
            "tokens_per_s": [s.tokens_per_s for s in served],
            "predicted_tpot_s": one.predicted[load].mean_tpot_s,
            "tpot_s": [s.mean_tpot_s for s in served],
        }
        for load, served in one.served.items()
    ]


def _errors(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """How far predictions are off the median execution, and each execution off the median of the others."""
    off = [row[f"predicted_{name}"] / np.median(row[name]) - 1 for row in rows]
    again = [
        abs(x / np.median([*row[name][:i], *row[name][i + 1 :]]) - 1)
        for row in rows
        for i, x in enumerate(row[name])
        if len(row[name]) > 1
    ]
    return {
        "median_error": float(np.median(np.abs(off))),
        "p90_error": float(np.quantile(np.abs(off), 0.9)),
        "bias": float(np.median(off)),
        "median_repeat_error": float(np.median(again)) if again else None,
        "p90_repeat_error": float(np.quantile(again, 0.9)) if again else None,
        "by_load": {
            load: float(np.median([abs(o) for o, r in zip(off, rows, strict=True) if r["load"] == load]))
            for load in dict.fromkeys(r["load"] for r in rows)
        },
    }


def _agreement(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Kendall's tau over pairs of policies under one load whose executions do not overlap."""
    signs = []
    for a, b in combinations(rows, 2):
        apart = max(a["tokens_per_s"]) < min(b["tokens_per_s"]) or max(b["tokens_per_s"]) < min(a["tokens_per_s"])
        if a["load"] == b["load"] and apart:
            predicted = a["predicted_tokens_per_s"] - b["predicted_tokens_per_s"]
            signs.append(np.sign(predicted * (np.median(a["tokens_per_s"]) - np.median(b["tokens_per_s"]))))
    return {"tau": float(np.mean(signs)) if signs else None, "pairs": len(signs)}


def _regret(executed: Sequence[Executed], table: Policy, loads: Sequence[str]) -> dict[str, Any]:
    """The table's tokens/s as parts of each constant's, by load and over all together (geometric means), with 95% intervals of the
    passes (Student's t of logarithms)."""
    logs = {one.policy.id: np.log([[s.tokens_per_s for s in one.served[load]] for load in loads]) for one in executed}
    own = logs[table.id]
    labels = {one.policy.id: one.policy.label() for one in executed}
    others = {one.policy.id: logs[one.policy.id] for one in executed if one.policy.window.kind != "by_batch"}
    best = [max(others, key=lambda p: float(np.median(others[p][n]))) for n in range(len(loads))]
    return {
        "by_load": [
            {"load": load, "best_constant": labels[best[n]], "share": _share(own[n] - logs[best[n]][n])}
            for n, load in enumerate(loads)
        ],
        "together": [{"constant": labels[p], "share": _share((own - log).mean(0))} for p, log in others.items()],
    }


def _share(logs: np.ndarray) -> list[float]:
    """The geometric mean, and the ends of its interval."""
    half = float(scipy.stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))) if len(logs) > 1 else 0.0
    mean = float(logs.mean())
    return np.exp([mean, mean - half, mean + half]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("openvino", "vllm"))
    parser.add_argument("--trace", required=True, metavar="FILE.csv", help="arrivals, of which the first are used")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a tiny size, which proves that it runs; writes no result")
    wanted = parser.parse_args()
    state = ROOT / ".acceptance"
    state.mkdir(exist_ok=True)
    before, began = environment(), time.time()
    found = measured(state, wanted.engine, wanted.trace, 1 if wanted.quick else wanted.passes, quick=wanted.quick)
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}, indent=1))
    if not wanted.quick:
        found |= {"seconds": round(time.time() - began, 1), "environment": before}
        (ROOT / "bench" / "results" / f"load-{wanted.engine}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
