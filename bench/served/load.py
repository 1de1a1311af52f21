"""Predicted against executed tokens/s under load, on vLLM servers; and what the table that a search
finds loses to the best constant number of draft tokens.

    .venv-vllm/bin/python bench/run.py served --only predictions [--quick]
    SPECTUNE_VLLM_PYTHON=.venv-vllm/bin/python python bench/run.py load [--trace FILE.csv]
        [--passes 4] [--turns 120] [--quick]

Texts are recorded once. Then every policy is executed under every load, pass after pass in another
order, and what steps cost is recorded again before each pass, as the pace of a shared machine
changes: what is predicted is held against executions of the same minutes, none of which it was
fitted to. Loads are clients, and requests that arrive on their own, at :data:`BUSY` of what the
most clients get without draft tokens: Poisson arrivals, and the first of a file (a column
TIMESTAMP: the Azure LLM inference traces).

The part ``predictions`` has a few constants and one table. ``load`` has every constant, no draft
loaded, and the table that a search finds for low, middle and high load together. Then, in one
running server, the table and the constants take turns of a second, and are compared by that alone:
passes take minutes, in which the pace changes by more than the constants differ. A quarter of
``--turns`` goes to all, the rest to those that this does not put behind the table. Its figures go
to ``bench/results/load-vllm.json``.

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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from bench.harness import Figures, keep, parser_of, result_file, say, state_folder, timed
from bench.lab import chain, demo, interval_of, record_engine, requests, stored
from bench.served.live import DRAFT, MOST, OFF, demo_prompts, serving, temporary_folder, windowed
from bench.verdicts import prediction_errors
from spectune.engines.engine import Answered, Load, Prompt, Running, numbered
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.engine_profile import Design, serve_design
from spectune.optimizer.recording.on_engine import Turns, execute
from spectune.optimizer.recording.record import PanoramaSpec
from spectune.optimizer.replay.loads import Objective, Served, loads_of
from spectune.optimizer.replay.served_costs import costs_of_engine
from spectune.optimizer.tuning.engine_bench import EngineBench, engine_bench
from spectune.optimizer.tuning.load_search import TokenStudy
from spectune.optimizer.tuning.under_load import served_of
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording

BUSY = 0.7
LIMIT = 0.08
"""How far predicted tokens/s may be off in the median."""
OPEN_GAMMAS = (1, 2, 4, 8)
"""The constants of a search that serve requests which arrive on their own."""
PAUSE_S = 1.0
"""What another server does after its last answer is over by then."""
IN_TURNS = "in_turns_tokens_per_s"
PART = 5
"""Turns of a policy that give one figure."""
BETWEEN = 2
"""Steps after a turn begins that are left out: what they verify another policy drafted."""


class Size(NamedTuple):
    """How much is executed: requests by the clients that send them, about as long a time each,
    requests that arrive on their own, new tokens of a text, seats of a server, clients by which
    costs are recorded and how often before all else."""

    requests: Mapping[int, int]
    arriving: int
    tokens: int
    seats: int
    clients: int
    designs: int

    def count(self, load: Load) -> int:
        return self.arriving if load.arrivals else self.requests[load.clients]


PREDICTIONS = Size({1: 8, 4: 24, 8: 40}, 40, 48, 16, 8, 1), Size({1: 2, 2: 4}, 4, 12, 16, 2, 1)
SEARCH = (
    Size({1: 16, 8: 72, 32: 144}, 96, 48, 32, 32, 3),
    Size({1: 4, 8: 9, 32: 18}, 12, 12, 32, 4, 3),
)
"""Full and ``--quick``."""
SERVED = {f"K={gamma}": (DRAFT, chain(DRAFT, gamma)) for gamma in (0, 1, 2, 4, 8)}
SERVED["table"] = DRAFT, windowed({"1": 4, "3": 2, "6": 1})
"""Policies of the part ``predictions``, each with the draft that its server has loaded."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Servers:
    """Servers that run, by the draft that they have loaded; the requests, where they are recorded,
    and how many each load sends."""

    pair: LoadedPair
    store: TraceStore
    running: Mapping[str, Running]
    size: Size

    @property
    def options(self) -> DecodeOptions:
        return DecodeOptions(max_new_tokens=self.size.tokens)

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(demo_prompts(max(self.size.requests.values()), self.size.tokens))

    def record(self) -> Recording:
        """The recording whose texts are replayed, which has them all."""
        most = Load(max(self.size.requests))
        request = requests(len(self.prompts)), self.prompts, chain(DRAFT, MOST), most, self.options
        look, server = PanoramaSpec((DRAFT,), MOST), self.running[DRAFT]
        info = record_engine(self.store, self.pair, server, *request, look, fresh=True)
        for _ in range(self.size.designs):
            self.record_costs()
        return info

    def record_costs(self) -> None:
        """Records what steps cost at this time."""
        design = Design(self.prompts, MOST, self.size.clients, self.size.tokens)
        for draft, running in self.running.items():
            time.sleep(PAUSE_S)
            serve_design(self.store, self.pair.spec, running, draft, design)

    def lab(self, info: Recording) -> EngineBench:
        """The simulator of the recording, by what steps cost so far."""
        clients = "clients:" + ",".join(map(str, self.size.requests))
        return engine_bench(self.store, info, [], clients, Objective())

    def loads(self, lab: EngineBench, *files: str) -> tuple[float, dict[str, Load]]:
        """Requests that arrive in a second, and loads by name: clients, Poisson arrivals and those
        of files."""
        most = Load(max(self.size.requests))
        plain = simulated(lab, DRAFT, AUTOREGRESSIVE, most, self.size.count(most))
        rate, count = BUSY * len(plain.tokens) / plain.seconds, self.size.arriving
        loads = {f"clients:{n}": Load(n) for n in self.size.requests}
        for kind, asked in [
            ("poisson", f"poisson:{rate}"),
            *(("file", f"{f}@{rate}") for f in files),
        ]:
            loads[f"{kind} {rate:.2g}/s"], *_ = loads_of(asked, (), count, count).values()
        return rate, loads

    def execute(
        self,
        rows: Sequence[Row],
        policies: Mapping[str, tuple[str, Policy]],
        loads: Mapping[str, Load],
        passes: int,
    ) -> None:
        """Executes each row's policy under its load ``passes`` times; adds what they reached."""
        rng = np.random.default_rng(0)
        for n in range(passes):
            self.record_costs()
            # Those under one load are compared: they are executed within minutes.
            turn = {load: rng.random() for load in loads}
            for i in sorted(rng.permutation(len(rows)), key=lambda i: turn[rows[i]["load"]]):
                row = rows[i]
                (draft, policy), load = policies[row["policy"]], loads[row["load"]]
                prompts = self.prompts[: self.size.count(load)]
                time.sleep(PAUSE_S)
                served = served_of(
                    list(execute(self.running[draft], prompts, policy, load, self.options))
                )
                row.setdefault("tokens_per_s", []).append(served.tokens_per_s)
                row.setdefault("tpot_s", []).append(served.mean_tpot_s)
            say(f"{time.strftime('%H:%M:%S')} pass {n + 1} of {passes}")

    def predict(
        self,
        lab: EngineBench,
        rows: Sequence[Row],
        policies: Mapping[str, tuple[str, Policy]],
        loads: Mapping[str, Load],
    ) -> Figures:
        """What is predicted of executed rows, which is added to them, and how it compares."""
        for row in rows:
            load = loads[row["load"]]
            served = simulated(lab, *policies[row["policy"]], load, self.size.count(load))
            row["predicted_tokens_per_s"] = served.tokens_per_s
            row["predicted_tpot_s"] = served.mean_tpot_s
        by_load = {
            name: errors([row for row in rows if row["load"] == name], "tokens_per_s")
            for name in loads
        }
        of_rows = {name: errors(rows, name) for name in ("tokens_per_s", "tpot_s")}
        return {**of_rows, "tokens_per_s_by_load": by_load, "rows": list(rows)}


def simulated(lab: EngineBench, draft: str, policy: Policy, load: Load, count: int) -> Served:
    """What a policy is predicted to serve on a server whose draft stays loaded, and is paid for."""
    loaded = "" if draft == OFF else draft
    costs = replace(lab.costs, passes={loaded: lab.costs.passes[loaded]})
    return replace(lab, costs=costs, loaded=draft, count=count).simulate(policy, load).served


def measure(quick: bool) -> Figures:
    """The part ``predictions`` of :mod:`served`."""
    size, passes = PREDICTIONS[quick], 1 if quick else 2
    names = list(SERVED)[: 3 if quick else None]
    with temporary_folder() as folder, serving(seats=size.seats) as server:
        servers = Servers(demo((DRAFT,)), stored(folder / "x.db"), {DRAFT: server}, size)
        info = servers.record()
        rate, loads = servers.loads(servers.lab(info))
        rows = [{"load": load, "policy": name} for load in loads for name in names]
        servers.execute(rows, SERVED, loads, passes)
        figures = servers.predict(servers.lab(info), rows, SERVED, loads)
    speed, tpot = figures["tokens_per_s"], figures["tpot_s"]
    again = speed["median_repeat_error"]
    repeated = "" if again is None else f" (executing again: {100 * again:.1f}%)"
    return {
        "summary": f"{len(rows)} policies and loads, predicted tokens/s "
        f"{100 * speed['median_error']:.1f}% off in the median{repeated}; time per token "
        f"{100 * tpot['median_error']:.1f}%",
        "holds": speed["median_error"] <= LIMIT,
        **figures,
        "passes": passes,
        "rate": rate,
    }


def search(trace: str | None, passes: int, turns: int, quick: bool) -> Figures:
    """Records, searches, executes; the figures."""
    size, store = SEARCH[quick], stored(state_folder(quick) / "load-vllm.db", fresh=True)
    with ExitStack() as stack:
        running = {
            draft: stack.enter_context(serving(draft=draft, seats=size.seats))
            for draft in (DRAFT, OFF)
        }
        servers = Servers(demo((DRAFT,)), store, running, size)
        info = servers.record()
        lab = servers.lab(info)
        # The table is of a server that keeps its draft.
        costs = replace(lab.costs, passes={DRAFT: lab.costs.passes[DRAFT]})
        table = TokenStudy(replace(lab, costs=costs)).run().policy
        rate, loads = servers.loads(lab, *([trace] if trace else []))
        about = {
            "engine": "vllm",
            "version": info.options["engine_version"],
            "tokens": size.tokens,
            "passes": passes,
            "turns": turns,
            "table": table.label(),
            "table_policy": table.spelled_out(),
            "rate": rate,
        }
        say(about)
        policies = {f"K={g}": (DRAFT, chain(DRAFT, g)) for g in range(MOST + 1)}
        policies |= {"table": (DRAFT, table), "off": (OFF, AUTOREGRESSIVE)}
        some = {*(f"K={g}" for g in OPEN_GAMMAS), "table", "off"}
        rows = [
            {"load": load, "policy": name}
            for load in loads
            for name in policies
            if not loads[load].arrivals or name in some
        ]
        servers.execute(rows, policies, loads, passes)
        closed = {name: load for name, load in loads.items() if not load.arrivals}
        _in_turns(servers, rows, closed, policies, turns)
        told = replace(lab, costs=costs_of_engine(store, info))
        figures = servers.predict(told, rows, policies, loads)
    return {**about, **figures, "kendall_tau": _tau(rows), "regret": _regret(rows)}


# ------------------------------------------------------------------------------------------- turns


def _in_turns(
    servers: Servers,
    rows: Sequence[Row],
    loads: Mapping[str, Load],
    policies: Mapping[str, tuple[str, Policy]],
    turns: int,
) -> None:
    """Executes the table and the constants in turns, in one running server; their tokens/s are
    added to their rows (:data:`IN_TURNS`)."""
    running = servers.running[DRAFT]
    everyone = {row["policy"] for row in rows} - {"off"}
    names = dict.fromkeys(loads, everyone)
    few = max(1, turns // 4)
    for count in (few, turns - few):
        for load, those in names.items():
            among = [row for row in rows if row["policy"] in those and row["load"] == load]
            rate = np.median([row["tokens_per_s"] for row in among])
            number = math.ceil(count * len(among) * rate / servers.size.tokens)
            own = [policies[row["policy"]][1] for row in among]
            prompts = numbered(servers.prompts, number)
            found = take_turns(running, prompts, own, loads[load], servers.options)
            for row, policy in zip(among, own, strict=True):
                row.setdefault(IN_TURNS, []).extend(found[policy.id])
            say(f"{time.strftime('%H:%M:%S')} {load}: {', '.join(r['policy'] for r in among)}")
        names = {load: {"table", *_contenders(rows, load)} for load in names}


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
    part: int = PART,
) -> dict[str, list[float]]:
    """The tokens/s of policies that take turns under a load, by policy: one for every ``part``
    turns, in order."""
    turns = turns_of(list(Turns(running, policies).serve(prompts, load, options)), load.clients)
    own = [[turn[1:] for turn in turns if turn[0] == policy.id] for policy in policies]
    common = min(map(len, own))
    found = {}
    for policy, mine in zip(policies, own, strict=True):
        turns_taken = np.array(mine[:common]).reshape(common, 2)
        parts = np.array_split(turns_taken, max(1, common // part)) if common else []
        found[policy.id] = [float(np.divide(*part.sum(0))) for part in parts]
    return found


# ---------------------------------------------------------------------------------------- verdicts


def errors(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """How far predictions are off the median execution, and each execution off the median of the
    others."""
    off, again = prediction_errors(rows, name)
    return {
        "median_error": float(np.median(off)),
        "p90_error": float(np.quantile(off, 0.9)),
        "median_repeat_error": float(np.median(again)) if again else None,
        "p90_repeat_error": float(np.quantile(again, 0.9)) if again else None,
    }


def _took_turns(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(row.get(IN_TURNS) and other.get(IN_TURNS))


def _beside(row: dict[str, Any], other: dict[str, Any]) -> np.ndarray:
    """Logarithms of a row's tokens/s as parts of another's: in turns where both took them."""
    kind = IN_TURNS if _took_turns(row, other) else "tokens_per_s"
    return np.array([math.log(a / b) for a, b in zip(row[kind], other[kind], strict=False)])


def _tau(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Kendall's tau of predicted tokens/s with executed, over the pairs of policies under one load
    that differ beyond noise: of those that took turns by the 95% interval of their ratio, of others
    where no execution of one is within those of the other."""
    signs = []
    for one, other in combinations(rows, 2):
        if one["load"] != other["load"]:
            continue
        if _took_turns(one, other):
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
    loads = list(dict.fromkeys(row["load"] for row in rows if row["load"].startswith("clients:")))
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


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", metavar="FILE.csv", help="arrivals: the first are used")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument(
        "--turns", type=int, default=120, help="of the table and the best constants"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    typed = parser.parse_args(arguments)
    passes, turns = (1, 24) if typed.quick else (typed.passes, typed.turns)
    figures, made = timed(lambda: search(typed.trace, passes, turns, typed.quick))
    print(json.dumps({k: v for k, v in figures.items() if k != "rows"}, indent=1))
    keep(result_file("load-vllm", typed.quick), figures | made)
    return 0
