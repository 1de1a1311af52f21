"""Simulated against executed under load, and what the table that a search finds loses to the best
constant number of tokens.

    python bench/load.py openvino --trace FILE.csv [--passes 4] [--quick]
    SPECTUNE_VLLM_PYTHON=.venv-vllm/bin/python python bench/load.py vllm --trace FILE.csv

An engine's texts are recorded once, and its costs as ``profile --engine`` does. Then are executed
in turn, ``--passes`` times, in another order each time: 0 to 8 tokens, no draft loaded, and the
table found for low, middle and high load together, under these loads; some of them also under
Poisson arrivals and the first arrivals of a file (a column TIMESTAMP: the Azure LLM inference
traces), both scaled to a part of what the engine can do. Costs are recorded again before each pass,
as the pace of a shared machine changes: what is predicted is held against executions of the same
hour, none of which it was fitted to. Figures go to ``bench/results/load-ENGINE.json``.

On two cores a vLLM's arithmetic and all else are steadier apart: ``OMP_NUM_THREADS=1
VLLM_CPU_OMP_THREADS_BIND=0 taskset -c 1``. Its engine then waits for its worker in a loop that
keeps the other core busy, and answers are up to 0.7 s late; one process for both, as where there is
one GPU, does not: ``VLLM_ENABLE_V1_MULTIPROCESSING=0
SPECTUNE_VLLM_ARGS="--distributed-executor-backend uni"``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import scipy.stats
from lab import demo, environment, fixed, requests, stored

from spectune.engines.protocol import Load, Prompt, Running, Wanted
from spectune.engines.start import start
from spectune.optimizer.engine_profile import Design, serve_design
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.executed_load import served_of
from spectune.optimizer.on_engine import execute, prompts_of, record_on
from spectune.optimizer.record import Look, look_around
from spectune.optimizer.simulate.load import Objective, Served, loads_of
from spectune.optimizer.simulate.served_costs import costs_of_engine
from spectune.optimizer.under_load import Search, UnderLoad, under_load
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.recording import RecordingInfo
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

ROOT = Path(__file__).resolve().parent.parent
DRAFT, MOST, SEATS, TOKENS = "small", 8, 32, 48
OFF = "none"
"""A server without a draft."""
CLIENTS = {1: 16, 8: 72, SEATS: 144}
"""Clients at low, middle and high load, and the requests that they send: about as long a time each.
"""
OPEN, OPEN_GAMMAS = 96, (1, 2, 4, 8)
"""Requests that arrive on their own, and the constants that serve them."""
BUSY = 0.7
"""Requests that arrive, as a part of those that the engine answers at high load without a draft."""


@dataclass(frozen=True)
class Bench:
    """An engine that is running, by the draft that it has loaded; the requests, and where they are
    recorded."""

    pair: LoadedPair
    store: TraceStore
    engines: dict[str, Running]
    prompts: tuple[Prompt, ...]
    options: DecodeOptions
    part: int

    def record(self) -> RecordingInfo:
        """The recording whose texts are replayed, which has them all."""
        policy = parse_policy({"draft": DRAFT, "window": fixed(MOST)})
        info = record_on(
            self.store, self.pair.spec, self.engines[DRAFT], requests(len(self.prompts)),
            self.prompts, policy, Load(SEATS), self.options,
            fresh=True,
        )  # fmt: skip
        look_around(self.store, self.pair, info.id, Look((DRAFT,), MOST))
        self.store.finish_recording(info.id)
        return info

    def record_costs(self) -> None:
        """What steps cost at this time."""
        design = Design(self.prompts, MOST, SEATS // self.part, self.options.max_new_tokens)
        for draft, running in self.engines.items():
            serve_design(self.store, self.pair.spec, running, draft, design)
        if OFF not in self.engines:  # an engine that goes without its draft at 0 tokens
            serve_design(self.store, self.pair.spec, self.engines[DRAFT], OFF, design)

    def run(self, draft: str, policy: Policy, load: Load) -> Served:
        """Executes a policy under a load."""
        asked = self.prompts[: _count(load, self.part)]
        return served_of(list(execute(self.engines[draft], asked, policy, load, self.options)))


def measured(state: Path, engine: str, trace: str, passes: int, *, quick: bool) -> dict[str, Any]:
    """Records, searches, executes; the figures."""
    pair, options = demo((DRAFT,)), DecodeOptions(Sampling(), 12 if quick else TOKENS)
    prompts = prompts_of(pair, requests(max(CLIENTS.values()) // (8 if quick else 1)), options)
    longest = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens
    store = stored(state / f"load-{engine}.db", fresh=True)
    with ExitStack() as stack:
        engines = {
            draft: stack.enter_context(
                closing(start(engine, pair.spec, Wanted(draft, MOST, SEATS, longest)))
            )
            for draft in ((DRAFT, OFF) if engine == "vllm" else (DRAFT,))
        }
        bench = Bench(pair, store, engines, prompts, options, 8 if quick else 1)
        info = bench.record()
        bench.record_costs()
        return {"engine": engine, **_held(bench, info, trace, passes)}


def _held(bench: Bench, info: RecordingInfo, trace: str, passes: int) -> dict[str, Any]:
    lab = under_load(bench.store, info, [], "clients:" + ",".join(map(str, CLIENTS)), Objective())
    off = OFF in bench.engines
    loaded = (
        replace(lab, costs=replace(lab.costs, passes={DRAFT: lab.costs.passes[DRAFT]}))
        if off
        else lab
    )
    table = Search(loaded, lambda *_: None).run().table.policy  # of a server that keeps its draft
    plain = lab.simulate(AUTOREGRESSIVE, Load(SEATS)).served
    about = {
        "version": info.options["engine_version"],
        "tokens": bench.options.max_new_tokens,
        "passes": passes,
        "part": bench.part,
        "table": table.label(),
        "table_policy": table.spelled_out(),
        "rate": BUSY * len(plain.tokens) / plain.seconds,
    }
    print(f"  {about}", flush=True)
    loads, policies = _loads(about["rate"], trace, bench.part), _policies(table, off=off)
    some = {*(f"K={g}" for g in OPEN_GAMMAS), "table", "off" if off else "K=0"}
    rows = [
        {"load": load, "policy": name}
        for load in loads
        for name in policies
        if not loads[load].arrivals or name in some
    ]
    runs: dict[str, list[Served]] = {}
    rng = np.random.default_rng(0)
    for n in range(passes):
        bench.record_costs()
        for load in loads:
            own = [row["policy"] for row in rows if row["load"] == load]
            for i in rng.permutation(len(own)):
                runs.setdefault(f"{own[i]} {load}", []).append(
                    bench.run(*policies[own[i]], loads[load])
                )
        print(f"  {time.strftime('%H:%M:%S')} pass {n + 1} of {passes}", flush=True)
    for row in rows:
        served = runs[f"{row['policy']} {row['load']}"]
        row |= {
            "tokens_per_s": [s.tokens_per_s for s in served],
            "tpot_s": [s.mean_tpot_s for s in served],
        }
    told = replace(lab, costs=costs_of_engine(bench.store, info))
    return {**about, **predicted(told, trace, about, rows)}


def predicted(
    lab: UnderLoad, trace: str, about: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What is predicted of the executed rows, and how it compares."""
    off = any(row["policy"] == "off" for row in rows)
    loads, policies = (
        _loads(about["rate"], trace, about["part"]),
        _policies(parse_policy(about["table_policy"]), off=off),
    )
    for row in rows:
        draft, policy = policies[row["policy"]]
        own = (
            "" if draft == OFF or not lab.rules.drafts_after else draft
        )  # a loaded draft is paid for
        passes = lab.costs.passes if policy.gamma_max else {own: lab.costs.passes[own]}
        load = loads[row["load"]]
        asked = replace(
            lab, costs=replace(lab.costs, passes=passes), count=_count(load, about["part"])
        )
        served = asked.simulate(policy, load).served
        row |= {
            "predicted_tokens_per_s": served.tokens_per_s,
            "predicted_tpot_s": served.mean_tpot_s,
        }
    return {
        "costs": dict(lab.costs.check),
        **{name: _errors(rows, name) for name in ("tokens_per_s", "tpot_s")},
        "kendall_tau": _agreement(rows),
        "regret": _regret(rows),
        "rows": list(rows),
    }


def _policies(table: Policy, *, off: bool) -> dict[str, tuple[str, Policy]]:
    """Policies by name, each with the draft that its server has loaded."""
    constants = [
        AUTOREGRESSIVE,
        *(parse_policy({"draft": DRAFT, "window": fixed(g)}) for g in range(1, MOST + 1)),
    ]
    found = {f"K={g}": (DRAFT, policy) for g, policy in enumerate(constants)} | {
        "table": (DRAFT, table)
    }
    return found | ({"off": (OFF, AUTOREGRESSIVE)} if off else {})


def _loads(rate: float, trace: str, part: int) -> dict[str, Load]:
    found = {f"clients:{n}": Load(n) for n in CLIENTS}
    count = OPEN // part
    for kind, asked in (("poisson", f"poisson:{rate}"), ("azure", f"{trace}@{rate}")):
        found[f"{kind} {rate:.2g}/s"] = next(iter(loads_of(asked, (), count, count).values()))
    return found


def _count(load: Load, part: int) -> int:
    return max(4, (OPEN if load.arrivals else CLIENTS[load.clients]) // part)


def again(state: Path, engine: str, trace: str, found: dict[str, Any]) -> dict[str, Any]:
    """What is predicted today of what was executed then."""
    store = stored(state / f"load-{engine}.db")
    first = min(store.list_recordings(), key=lambda info: info.created_at)
    lab = under_load(store, first, [], "clients:1", Objective())
    return {**found, **predicted(lab, trace, found, found["rows"])}


def _errors(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """How far predictions are off the median execution, and each execution off the median of the
    others."""
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
            load: float(
                np.median([abs(o) for o, r in zip(off, rows, strict=True) if r["load"] == load])
            )
            for load in dict.fromkeys(r["load"] for r in rows)
        },
    }


def _agreement(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Kendall's tau over pairs of policies under one load whose executions do not overlap."""
    signs = []
    for a, b in combinations(rows, 2):
        apart = max(a["tokens_per_s"]) < min(b["tokens_per_s"]) or max(b["tokens_per_s"]) < min(
            a["tokens_per_s"]
        )
        if a["load"] == b["load"] and apart:
            predicted = a["predicted_tokens_per_s"] - b["predicted_tokens_per_s"]
            signs.append(
                np.sign(predicted * (np.median(a["tokens_per_s"]) - np.median(b["tokens_per_s"])))
            )
    return {"tau": float(np.mean(signs)) if signs else None, "pairs": len(signs)}


def _regret(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The table's tokens/s as parts of each constant's, by load and over all together (geometric
    means), with 95% intervals of the passes (Student's t of logarithms). The best constant is that
    of the executions themselves, whose luck speaks against the table; ``apart``: beside the one
    that was the best in all other passes."""
    loads = [f"clients:{n}" for n in CLIENTS]
    logs = {(row["policy"], row["load"]): np.log(row["tokens_per_s"]) for row in rows}
    others = [name for name in dict.fromkeys(row["policy"] for row in rows) if name != "table"]
    constants = [name for name in others if name != "off"]
    best = {load: max(constants, key=lambda name: float(logs[name, load].mean())) for load in loads}
    beside = {name: [logs["table", load] - logs[name, load] for load in loads] for name in others}

    def apart(n: int) -> np.ndarray:
        passes = range(len(logs["table", loads[n]]))
        chosen = [
            max(constants, key=lambda name, i=i: float(np.delete(logs[name, loads[n]], i).sum()))
            for i in passes
        ]
        return np.array([beside[name][n][i] for i, name in enumerate(chosen)])

    return {
        "by_load": [
            {
                "load": load,
                "best_constant": best[load],
                "share": _share(beside[best[load]][n]),
                "apart": _share(apart(n)),
            }
            for n, load in enumerate(loads)
        ],
        "together": [
            {"constant": name, "share": _share(np.mean(beside[name], axis=0))} for name in others
        ],
        "off": [
            {"load": load, "share": _share(logs_)}
            for load, logs_ in zip(loads, beside.get("off", ()), strict=False)
        ],
    }


def _share(logs: np.ndarray) -> list[float]:
    """The geometric mean, and the ends of its interval."""
    half = (
        float(scipy.stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
        if len(logs) > 1
        else 0.0
    )
    mean = float(logs.mean())
    return np.exp([mean, mean - half, mean + half]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=("openvino", "vllm"))
    parser.add_argument(
        "--trace", required=True, metavar="FILE.csv", help="arrivals, of which the first are used"
    )
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument(
        "--again",
        action="store_true",
        help="predict again what was executed before, and execute nothing",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny size, which proves that it runs; writes no result",
    )
    wanted = parser.parse_args()
    state = ROOT / ".acceptance"
    state.mkdir(exist_ok=True)
    before, began = environment(), time.time()
    results = ROOT / "bench" / "results" / f"load-{wanted.engine}.json"
    if wanted.again:
        found = again(state, wanted.engine, wanted.trace, json.loads(results.read_text()))
    else:
        found = measured(
            state,
            wanted.engine,
            wanted.trace,
            1 if wanted.quick else wanted.passes,
            quick=wanted.quick,
        )
        found |= {"seconds": round(time.time() - began, 1), "environment": before}
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}, indent=1))
    if not wanted.quick:
        results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
