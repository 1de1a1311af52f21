"""Simulated against executed under load, and what the table that a search finds loses to the best
constant number of tokens.

    SPECTUNE_VLLM_PYTHON=.venv-vllm/bin/python python bench/run.py load --trace FILE.csv
        [--passes 4] [--turns 120] [--quick]

vLLM's texts are recorded once, and its costs as ``profile --engine`` does. Then are executed
in turn, ``--passes`` times, all in another order each time: 0 to 8 tokens, no draft loaded, and the
table found for low, middle and high load together, under these loads; some of them also under
Poisson arrivals and the first arrivals of a file (a column TIMESTAMP: the Azure LLM inference
traces), both scaled to a part of what vLLM can do. Costs are recorded again before each pass,
as the pace of a shared machine changes: what is predicted is held against executions of the same
hour, none of which it was fitted to. Then, in one running server, the table and the constants take
turns of a second, and are compared by that alone: passes take minutes, in which the pace changes by
more than the constants differ. A quarter of ``--turns`` goes to all, the rest to those that this
does not put behind the table. Figures go to ``bench/results/load-vllm.json``.

On two cores a vLLM's arithmetic and all else are steadier apart: ``OMP_NUM_THREADS=1
VLLM_CPU_OMP_THREADS_BIND=0 taskset -c 1``. Its engine then waits for its worker in a loop that
keeps the other core busy, and answers are up to 0.7 s late; one process for both, as where there is
one GPU, does not: ``VLLM_ENABLE_V1_MULTIPROCESSING=0
SPECTUNE_VLLM_ARGS="--distributed-executor-backend uni"``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import combinations, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab import (
    ROOT,
    chain,
    demo,
    interval_of,
    keep,
    origin,
    parser_of,
    record_engine,
    requests,
    say,
    stored,
)
from spectune.engines.engine import Answered, Load, Prompt, Running, Wanted, numbered
from spectune.engines.start import start
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.engine_profile import Design, serve_design
from spectune.optimizer.recording.on_engine import Turns, execute, prompts_of
from spectune.optimizer.recording.record import PanoramaSpec
from spectune.optimizer.replay.loads import Objective, Served, loads_of
from spectune.optimizer.replay.served_costs import costs_of_engine
from spectune.optimizer.tuning.engine_bench import EngineBench, engine_bench, served_of
from spectune.optimizer.tuning.load_search import LoadStudy
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording

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
PAUSE_S = 1.0
"""What another server does after its last answer is over by then."""
IN_TURNS = "in_turns_tokens_per_s"
DESIGNS = 3
"""Times that costs are recorded before the search."""
PART = 5
"""Turns of a policy that give one figure."""
BETWEEN = 2
"""Steps after a turn begins that are left out: what they verify another policy drafted."""


@dataclass(frozen=True)
class Bench:
    """Servers that run, by the draft that they have loaded; the requests, and where they are
    recorded."""

    pair: LoadedPair
    store: TraceStore
    engines: dict[str, Running]
    prompts: tuple[Prompt, ...]
    options: DecodeOptions
    part: int

    def record(self) -> Recording:
        """The recording whose texts are replayed, which has them all."""
        asked = (requests(len(self.prompts)), self.prompts, chain(DRAFT, MOST), Load(SEATS))
        look, running = PanoramaSpec((DRAFT,), MOST), self.engines[DRAFT]
        return record_engine(self.store, self.pair, running, *asked, self.options, look, fresh=True)

    def record_costs(self) -> None:
        """What steps cost at this time."""
        design = Design(self.prompts, MOST, SEATS // self.part, self.options.max_new_tokens)
        for draft, running in self.engines.items():
            time.sleep(PAUSE_S)
            serve_design(self.store, self.pair.spec, running, draft, design)

    def run(self, draft: str, policy: Policy, load: Load) -> Served:
        """Executes a policy under a load."""
        asked = self.prompts[: _count(load, self.part)]
        time.sleep(PAUSE_S)
        return served_of(list(execute(self.engines[draft], asked, policy, load, self.options)))


def turns_of(served: Sequence[Answered], clients: int) -> list[tuple[str, int, float]]:
    """Policy, tokens and seconds of each turn, until the first client had nothing more to send."""
    steps: dict[float, tuple[str, int]] = {}
    for step in (step for answered in served for step in answered.steps):
        emitted = steps.get(step.ended_s, ("", 0))[1] + step.emitted
        steps[step.ended_s] = step.policy, emitted
    full = sorted(answered.finished_s for answered in served)[-clients]
    rows = [(*steps[now], now - before) for before, now in pairwise(sorted(steps)) if now < full]
    turns = []
    for policy, members in groupby(rows, key=lambda row: row[0]):
        own = list(members)[BETWEEN:]
        if own:
            turns.append((policy, sum(row[1] for row in own), sum(row[2] for row in own)))
    return turns


def take_turns(
    running: Running,
    prompts: Sequence[Prompt],
    policies: Sequence[Policy],
    load: Load,
    options: DecodeOptions,
) -> dict[str, list[float]]:
    """The tokens/s of policies that take turns under a load, by policy: one for every few turns, in
    order."""
    turns = turns_of(list(Turns(running, policies).serve(prompts, load, options)), load.clients)
    own = [[turn[1:] for turn in turns if turn[0] == policy.id] for policy in policies]
    common = min(map(len, own))
    found = {}
    for policy, mine in zip(policies, own, strict=True):
        parts = np.array_split(np.array(mine[:common]), max(1, common // PART))
        found[policy.id] = [float(np.divide(*part.sum(0))) for part in parts]
    return found


def measured(state: Path, trace: str, passes: int, turns: int, *, quick: bool) -> dict[str, Any]:
    """Records, searches, executes; the figures."""
    pair, options = demo((DRAFT,)), DecodeOptions(Sampling(), 12 if quick else TOKENS)
    prompts = prompts_of(pair, requests(max(CLIENTS.values()) // (8 if quick else 1)), options)
    longest = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens
    store = stored(state / "load-vllm.db", fresh=True)
    with ExitStack() as stack:
        engines = {}
        for draft in (DRAFT, OFF):
            running = start("vllm", pair.spec, Wanted(draft, MOST, SEATS, longest))
            engines[draft] = stack.enter_context(closing(running))
        bench = Bench(pair, store, engines, prompts, options, 8 if quick else 1)
        info = bench.record()
        for _ in range(DESIGNS):
            bench.record_costs()
        return {"engine": "vllm", **_held(bench, info, trace, passes, turns)}


def _held(bench: Bench, info: Recording, trace: str, passes: int, turns: int) -> dict[str, Any]:
    clients = "clients:" + ",".join(map(str, CLIENTS))
    lab = engine_bench(bench.store, info, [], clients, Objective())
    # The table is of a server that keeps its draft.
    costs = replace(lab.costs, passes={DRAFT: lab.costs.passes[DRAFT]})
    table = LoadStudy(replace(lab, costs=costs)).run().policy
    plain = lab.simulate(AUTOREGRESSIVE, Load(SEATS)).served
    about = {
        "version": info.options["engine_version"],
        "tokens": bench.options.max_new_tokens,
        "passes": passes,
        "turns": turns,
        "part": bench.part,
        "table": table.label(),
        "table_policy": table.spelled_out(),
        "rate": BUSY * len(plain.tokens) / plain.seconds,
    }
    say(about)
    loads, policies = _loads(about["rate"], trace, bench.part), _policies(table)
    some = {*(f"K={g}" for g in OPEN_GAMMAS), "table", "off"}
    rows = [
        {"load": load, "policy": name}
        for load in loads
        for name in policies
        if not loads[load].arrivals or name in some
    ]
    runs: dict[tuple[str, str], list[Served]] = {}
    rng = np.random.default_rng(0)
    for n in range(passes):
        bench.record_costs()
        # Those under one load are compared: they are executed within minutes.
        turn = {load: rng.random() for load in loads}
        for i in sorted(rng.permutation(len(rows)), key=lambda i: turn[rows[i]["load"]]):
            row = rows[i]
            served = bench.run(*policies[row["policy"]], loads[row["load"]])
            runs.setdefault((row["policy"], row["load"]), []).append(served)
        say(f"{time.strftime('%H:%M:%S')} pass {n + 1} of {passes}")
    for row in rows:
        served_ = runs[row["policy"], row["load"]]
        row["tokens_per_s"] = [s.tokens_per_s for s in served_]
        row["tpot_s"] = [s.mean_tpot_s for s in served_]
    _in_turns(bench, rows, loads, policies, turns)
    told = replace(lab, costs=costs_of_engine(bench.store, info))
    return {**about, **predicted(told, trace, about, rows)}


def _in_turns(
    bench: Bench,
    rows: Sequence[dict[str, Any]],
    loads: dict[str, Load],
    policies: dict[str, tuple[str, Policy]],
    turns: int,
) -> None:
    """Executes the table and the constants in turns, in one running server; their tokens/s are
    added to their rows (:data:`IN_TURNS`)."""
    running = bench.engines[DRAFT]
    everyone = {row["policy"] for row in rows} - {"off"}
    names = dict.fromkeys((f"clients:{n}" for n in CLIENTS), everyone)
    few = max(1, turns // 4)
    for count in (few, turns - few):
        for load, those in names.items():
            among = [row for row in rows if row["policy"] in those and row["load"] == load]
            rate = np.median([row["tokens_per_s"] for row in among])
            asked = math.ceil(count * len(among) * rate / bench.options.max_new_tokens)
            own = [policies[row["policy"]][1] for row in among]
            prompts = numbered(bench.prompts, asked)
            found = take_turns(running, prompts, own, loads[load], bench.options)
            for row, policy in zip(among, own, strict=True):
                row.setdefault(IN_TURNS, []).extend(found[policy.id])
            say(f"{time.strftime('%H:%M:%S')} {load}: {', '.join(r['policy'] for r in among)}")
        names = {load: {"table", *_contenders(rows, load)} for load in names}


def predicted(
    lab: EngineBench, trace: str, about: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What is predicted of the executed rows, and how it compares."""
    loads = _loads(about["rate"], trace, about["part"])
    policies = _policies(parse_policy(about["table_policy"]))
    for row in rows:
        (draft, policy), load = policies[row["policy"]], loads[row["load"]]
        # A loaded draft is paid for.
        own = "" if draft == OFF else draft
        passes = lab.costs.passes if policy.gamma_max else {own: lab.costs.passes[own]}
        costs = replace(lab.costs, passes=passes)
        loaded = None if draft == OFF else draft
        asked = replace(lab, costs=costs, loaded=loaded, count=_count(load, about["part"]))
        served = asked.simulate(policy, load).served
        row["predicted_tokens_per_s"] = served.tokens_per_s
        row["predicted_tpot_s"] = served.mean_tpot_s
    return {
        **{name: errors(rows, name) for name in ("tokens_per_s", "tpot_s")},
        "kendall_tau": _tau(rows),
        "regret": _regret(rows),
        "rows": list(rows),
    }


def _policies(table: Policy) -> dict[str, tuple[str, Policy]]:
    """Policies by name, each with the draft that its server has loaded."""
    constants = {f"K={g}": (DRAFT, chain(DRAFT, g)) for g in range(MOST + 1)}
    return constants | {"table": (DRAFT, table), "off": (OFF, AUTOREGRESSIVE)}


def _loads(rate: float, trace: str, part: int) -> dict[str, Load]:
    found = {f"clients:{n}": Load(n) for n in CLIENTS}
    count = OPEN // part
    for kind, asked in (("poisson", f"poisson:{rate}"), ("azure", f"{trace}@{rate}")):
        found[f"{kind} {rate:.2g}/s"] = next(iter(loads_of(asked, (), count, count).values()))
    return found


def _count(load: Load, part: int) -> int:
    return max(4, (OPEN if load.arrivals else CLIENTS[load.clients]) // part)


def errors(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """How far predictions are off the median execution, and each execution off the median of the
    others."""
    off = [abs(row[f"predicted_{name}"] / np.median(row[name]) - 1) for row in rows]
    again = [
        abs(x / np.median([*row[name][:i], *row[name][i + 1 :]]) - 1)
        for row in rows
        for i, x in enumerate(row[name])
        if len(row[name]) > 1
    ]
    return {
        "median_error": float(np.median(off)),
        "p90_error": float(np.quantile(off, 0.9)),
        "median_repeat_error": float(np.median(again)) if again else None,
        "p90_repeat_error": float(np.quantile(again, 0.9)) if again else None,
    }


def _beside(row: dict[str, Any], other: dict[str, Any]) -> np.ndarray:
    """Logarithms of a row's tokens/s as parts of another's: in turns where both took them."""
    kind = IN_TURNS if IN_TURNS in row and IN_TURNS in other else "tokens_per_s"
    return np.array([math.log(a / b) for a, b in zip(row[kind], other[kind], strict=False)])


def _tau(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Kendall's tau of predicted tokens/s with executed, over the pairs of policies under one load
    that differ beyond noise: of those that took turns by the 95% interval of their ratio, of others
    where no execution of one is within those of the other."""
    signs = []
    for one, other in combinations(rows, 2):
        if one["load"] != other["load"]:
            continue
        if IN_TURNS in one and IN_TURNS in other:
            _, low, high = interval_of(_beside(one, other))
        else:
            own, its = one["tokens_per_s"], other["tokens_per_s"]
            low, high = min(own) / max(its), max(own) / min(its)
        if low > 1 or high < 1:
            is_above = one["predicted_tokens_per_s"] > other["predicted_tokens_per_s"]
            signs.append(1 if is_above == (low > 1) else -1)
    return {"tau": float(np.mean(signs)) if signs else None, "pairs": len(signs)}


def _contenders(rows: Sequence[dict[str, Any]], load: str) -> set[str]:
    """The constants that are not behind the table beyond noise, at a load or at all together."""
    here = [row for row in rows if row["load"] == load]
    table = next(row for row in here if row["policy"] == "table")
    near = {row["policy"] for row in here if interval_of(_beside(table, row))[1] < 1}
    near |= {r["constant"] for r in _regret(rows)["together"] if r["share"][1] < 1}
    return near - {"off"}


def _regret(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The table's tokens/s as parts of each constant's, by load and over all together (geometric
    means), with 95% intervals (Student's t of logarithms). The best constant of a load is the best
    as executed: its luck counts against the table."""
    loads = [f"clients:{n}" for n in CLIENTS]
    by_name = {(row["policy"], row["load"]): row for row in rows}
    others = [name for name in dict.fromkeys(row["policy"] for row in rows) if name != "table"]
    constants = [name for name in others if name != "off"]

    def beside(name: str, load: str) -> np.ndarray:
        return _beside(by_name["table", load], by_name[name, load])

    by_load = []
    for load in loads:
        shares = {name: beside(name, load) for name in constants}
        best = min(shares, key=lambda name: float(shares[name].mean()))
        by_load.append({"load": load, "best_constant": best, "share": interval_of(shares[best])})
    together = []
    for name in others:
        logs_by_load = [beside(name, load) for load in loads]
        count = min(map(len, logs_by_load))
        share = interval_of(np.mean([own[:count] for own in logs_by_load], axis=0))
        together.append({"constant": name, "share": share})
    off = [{"load": load, "share": interval_of(beside("off", load))} for load in loads]
    return {"by_load": by_load, "together": together, "off": off}


def main(arguments: Sequence[str]) -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--trace", required=True, metavar="FILE.csv", help="arrivals: the first of them are used")
    add("--passes", type=int, default=4)
    add("--turns", type=int, default=120, help="of the table and the best constants each")
    add("--quick", action="store_true", help="a tiny size, which proves that it runs; no result")
    wanted = parser.parse_args(arguments)
    state = ROOT / ".acceptance"
    state.mkdir(exist_ok=True)
    before, began = origin(), time.time()
    times = (1, 24) if wanted.quick else (wanted.passes, wanted.turns)
    found = measured(state, wanted.trace, *times, quick=wanted.quick)
    found |= {"seconds": round(time.time() - began, 1), **before}
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}, indent=1))
    if not wanted.quick:
        keep("load-vllm", found)
