"""Several requests on the native decoder: predicted against executed, and what pays by replay.

    python bench/run.py load_native [--only executed|hardware] [--quick]

``executed``: on this machine, policies take turns at several numbers of clients, pass after pass in
another order, after one profile of steps of several requests. ``hardware``: at the costs of an
H100, of two kinds, by replay of the demo pair's head: no draft, the best chain, chains that stop,
the best tree, the best that C2T's classifier grows and cuts (a calibrated probability that a node
is accepted, fitted to other requests), and a table by load of all these; each chosen on one half of
the requests and played on the other, both ways. For clients reading prompts is left out, as it is
one pass a request whatever is drafted; requests that arrive pay for it. Ratios with 95% intervals,
by drawing the requests that are played again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.harness import say, state_folder
from bench.lab import demo, recorded, replayable, requests, stored
from bench.verdicts import of_draws, prediction_errors
from spectune.engines.engine import Load, Prompt, numbered
from spectune.optimizer.decoder_engine import DecoderEngine
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.fit.c2t import fit_c2t
from spectune.optimizer.fit.recorded_trees import RecordedTrees, TreeSource
from spectune.optimizer.profiles import served_contexts
from spectune.optimizer.recording.record import whole_texts
from spectune.optimizer.replay.batch_costs import ROWS, BatchCosts
from spectune.optimizer.replay.batches import Seating, serve_decoder
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.stored_artifacts import fitted
from spectune.optimizer.tuning.load_search import policies_by_load
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import PROMPT_TOKENS
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    GAMMA_LIMIT,
    LoadPolicy,
    Policy,
    parse_policy,
)
from spectune.runtime.policies.plan import prepare
from spectune.runtime.profiling.measure import measure_profile
from spectune.traces.cost_table import FloatArray
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Trajectory

RESULT = "load-native"
FIXED = {"kind": "fixed", "gamma": 4}
TREE = {"growth": {"kind": "top_k", "width": 4}, "select": {"top_n": 12}}
EXECUTED: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram 3": {"draft": "ngram", "window": {"kind": "fixed", "gamma": 3}},
    "small 2": {"draft": "small", "window": {"kind": "fixed", "gamma": 2}},
    "small 5": {"draft": "small", "window": {"kind": "fixed", "gamma": 5}},
    "small fsm, stop": {
        "draft": "small",
        "window": {"kind": "fsm", "gamma_max": 8},
        "stop": {"kind": "max_prob", "threshold": 0.4},
    },
    "small tree": {"draft": "small", "window": FIXED, **TREE},
    "head tree": {"draft": "head", "window": FIXED, **TREE},
}
EXECUTED["by load"] = {
    "by_load": {"1": EXECUTED["head tree"], "4": EXECUTED["small 2"], "12": EXECUTED["ngram 3"]}
}


LOOK = 12, 8, 6
"""Of what is recorded: tokens of chains, children and levels of trees."""


class Size(NamedTuple):
    """Texts, their tokens, clients, and passes of the executions; draws of the intervals."""

    texts: int
    tokens: int
    clients: tuple[int, ...]
    passes: int
    draws: int


FULL = Size(32, 48, (1, 4, 8, 16), 4, 40)
QUICK = Size(12, 12, (1, 4), 2, 4)


class Opened(NamedTuple):
    """The demo pair, and a recording of it with wide trees of every draft."""

    store: TraceStore
    pair: LoadedPair
    trace: ReplayTrace


def opened(size: Size, sampling: Sampling, name: str, quick: bool, skip: int = 0) -> Opened:
    """Of the requests after the first ``skip``."""
    pair = demo()
    store = stored(state_folder(quick) / "load-native.db")
    options, wanted = DecodeOptions(sampling, size.tokens), requests(size.texts, skip=skip)
    recording = recorded(store, pair, wanted, options, pair.draft_names, *LOOK)
    say(f"{name}: recording {recording}")
    return Opened(store, pair, replayable(store, pair, recording))


def classifier_of(size: Size, sampling: Sampling, draft: str, quick: bool) -> str:
    """The classifier of a draft's trees over other requests than are played."""
    store, pair, trace = opened(size, sampling, "classifier", quick, size.texts)
    info = max(store.list_recordings(pair.id), key=lambda info: info.created_at)
    found = RecordedTrees.of(trace, draft)
    return fit_c2t(TreeSource(store, info, trace, found)).artifact


# ---------------------------------------------------------------------------------------- executed


def steps_profile(
    pair: LoadedPair,
    trace: ReplayTrace,
    seats: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    gamma_max: int = 8,
    most: int = 2,
) -> LatencyProfile:
    """What steps of up to so many requests cost here, measured on a trace's texts in up to ``most``
    sweeps."""
    texts = trace.trajectories
    how: dict[str, Any] = {"texts": whole_texts(texts), "contexts": served_contexts(texts)}
    return measure_profile(pair, gamma_max=gamma_max, requests=seats, most=most, clock=clock, **how)


class Execution(NamedTuple):
    """Texts in the order in which they were sent, and tokens/s until the last ended."""

    texts: list[list[int]]
    tokens_per_s: float


def prompts_again(texts: Iterable[Trajectory]) -> list[Prompt]:
    """The requests of recorded texts, to be decoded anew."""
    return [
        Prompt("", t.category, tuple(t.prompt_ids.tolist()), seeded_as=t.request_id) for t in texts
    ]


def execute(
    engine: DecoderEngine,
    prompts: Sequence[Prompt],
    policy: Policy,
    clients: int,
    options: DecodeOptions,
    count: int,
) -> Execution:
    """So many requests of these prompts in turn, each client sending its next as one ends."""
    how: dict[str, Any] = {"sampling": options.sampling, "max_new_tokens": options.max_new_tokens}
    answers = list(engine.execute(numbered(prompts, count), policy, Load(clients), **how))
    seconds = max(answer.finished_s for answer in answers)
    in_order = sorted((answer.trajectory for answer in answers), key=lambda t: int(t.request_id))
    texts = [t.output_ids.tolist() for t in in_order]
    return Execution(texts, sum(map(len, texts)) / seconds)


def replayed_speed(
    trace: ReplayTrace,
    policy: Policy,
    clients: int,
    profile: LatencyProfile,
    seats: int,
    count: int,
) -> float:
    """Tokens/s of such an execution of a trace's requests, by replay."""
    plan = prepare(policy, list(trace.panoramas), profile=profile)
    found = serve_decoder(trace, plan, Load(clients), Seating(seats), profile, count=count)
    return found.served.tokens_per_s


def executed(quick: bool) -> dict[str, Any]:
    """Tokens/s as predicted and as executed, by policy and clients."""
    size = QUICK if quick else FULL
    _, pair, trace = opened(size, Sampling(), "executed", quick)
    texts = trace.trajectories
    seats = max(size.clients)
    profile = steps_profile(pair, trace, seats)
    engine = DecoderEngine(pair, seats, profile=profile)
    prompts, options = prompts_again(texts), DecodeOptions(Sampling(), size.tokens)
    policies = {name: parse_policy(document) for name, document in EXECUTED.items()}
    cells = [(clients, name) for clients in size.clients for name in policies]
    each: dict[tuple[int, str], list[float]] = {cell: [] for cell in cells}
    differ = 0
    rng = np.random.default_rng(0)
    for turn in range(size.passes):
        say(f"pass {turn + 1} of {size.passes}")
        for at in rng.permutation(len(cells)):
            clients, name = cells[at]
            count = max(8, 2 * clients)
            got = execute(engine, prompts, policies[name], clients, options, count)
            each[clients, name].append(got.tokens_per_s)
            differ += sum(
                text != texts[n % len(texts)].output_ids.tolist()
                for n, text in enumerate(got.texts)
            )
    rows: list[dict[str, Any]] = []
    for (clients, name), speeds in each.items():
        count = max(8, 2 * clients)
        told = replayed_speed(trace, policies[name], clients, profile, seats, count)
        rows.append({
            "clients": clients, "policy": name, "tokens_per_s": speeds,
            "predicted_tokens_per_s": told,
        })  # fmt: skip
    figures = {**errors_of(rows), "texts_differ": differ}
    say(str(figures))
    return {**figures, "check": profile.check, "rows": rows}


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How far tokens/s are predicted off the median execution, as predicted and after one common
    factor, beside how far an execution is off the others."""
    ratios = [row["predicted_tokens_per_s"] / float(np.median(row["tokens_per_s"])) for row in rows]
    factor = float(np.median(ratios))
    plain, again = prediction_errors(rows, "tokens_per_s")
    scaled = [abs(ratio / factor - 1) for ratio in ratios]
    return {
        "common_factor": factor,
        "median_error": float(np.median(scaled)),
        "p90_error": float(np.quantile(scaled, 0.9)),
        "median_error_as_predicted": float(np.median(plain)),
        "p90_error_as_predicted": float(np.quantile(plain, 0.9)),
        "median_repeat_error": float(np.median(again)) if again else 0.0,
    }


# ---------------------------------------------------------------------------------------- hardware


class Hardware(NamedTuple):
    """Milliseconds: of the target's pass by rows (``target``), of a level of the draft, of a
    request beside its rows, and of a step beside all."""

    target: Callable[[FloatArray], FloatArray]
    level: Callable[[FloatArray], FloatArray]
    request: float
    step: float


def _flat(rows: FloatArray) -> FloatArray:
    return np.maximum(4.98, 0.023 * rows) + 0.65 * np.minimum(1.0, rows / 64)


def _sloped(rows: FloatArray) -> FloatArray:
    """A third of a percent more for each row, as was measured."""
    return np.maximum(4.98 + 0.0164 * rows, 1 + 0.023 * rows) + 0.65 * np.minimum(1.0, rows / 64)


def _level(rows: FloatArray) -> FloatArray:
    return np.maximum(0.36, 0.00115 * rows)


HARDWARE = {
    "H100, 8B": Hardware(_flat, _level, 0.059, 1.13),
    "H100, 8B, sloped": Hardware(_sloped, _level, 0.059, 1.13),
}
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
TURNS = 4
"""Requests of each client."""
BUSY = 0.7
"""Requests arrive at so much of what a server without a draft serves at the most clients."""


def costs_at(hardware: Hardware, policies: int, drafts: int, *, prompts: bool) -> BatchCosts:
    """The costs of steps at so many policies of a table, and of ``prompts`` or not."""
    rows, seats = np.arange(ROWS + 1.0), max(CLIENTS)

    def over(table: Callable[[FloatArray], FloatArray]) -> FloatArray:
        seconds = 1e-3 * table(rows)
        seconds[0] = 0.0
        return seconds

    target, level = over(hardware.target), over(hardware.level)
    chunk = np.arange(PROMPT_TOKENS + 1.0)
    reading = 1e-3 * (hardware.target(chunk) + hardware.step)
    prompt = np.where((chunk > 0) & prompts, reading, 0.0)
    none = np.zeros((policies, ROWS + 1))
    return BatchCosts(
        contexts=np.array([0.0, 1.0]),
        once=np.zeros((policies, GAMMA_LIMIT + 1)),
        level=np.broadcast_to(level, (policies, 2, ROWS + 1)).copy(),
        level_sampled=none,
        further_pass=np.zeros((policies, seats + 1)),
        target=np.stack([target, target]),
        target_sampled=np.zeros(ROWS + 1),
        tree=none,
        drafted=np.zeros(policies),
        emitted=0.0,
        round=np.full((policies, 2), 1e-3 * hardware.step),
        further=1e-3 * hardware.request * np.arange(seats + 1.0),
        prompt=np.stack([prompt, *[np.zeros_like(prompt)] * drafts]),
    )


def kinds(draft: str, classifier: str = "none") -> dict[str, list[Policy]]:
    """What is chosen among, by kind."""
    chains = [{"draft": draft, "window": {"kind": "fixed", "gamma": n}} for n in range(1, 9)]
    stops = [
        {**chains[7], "stop": {"kind": "joint_prob", "threshold": threshold}}
        for threshold in (0.05, 0.15, 0.3, 0.5, 0.7)
    ]
    trees = [
        {
            "draft": draft,
            "window": {"kind": "fixed", "gamma": depth},
            "growth": {"kind": "top_k", "width": width},
            "select": {"top_n": nodes},
        }
        for depth in (2, 3, 4, 6)
        for width in (2, 4, 8)
        for nodes in (2, 3, 4, 6, 8, 12, 20, 32, 60)
        if nodes <= width * (1 + width * (depth - 1)) and nodes >= depth
    ]
    calibrated = [
        {
            "draft": draft,
            "window": {"kind": "fixed", "gamma": depth},
            "growth": {
                "kind": "classifier", "artifact": classifier,
                "width": width, "cap": width, "beta": beta,
            },
        }
        for depth in (2, 3, 4, 6)
        for width in (1, 2, 4, 8)
        for beta in (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
    ]  # fmt: skip
    documents = {"chain": chains, "stops": stops, "tree": trees, "calibrated": calibrated}
    return {name: [parse_policy(d) for d in found] for name, found in documents.items()}


class Played(NamedTuple):
    """Tokens/s of a policy on some requests under a load."""

    trace: ReplayTrace
    pair: LoadedPair
    hardware: Hardware
    artifacts: Artifacts | None

    def __call__(self, policy: Policy, texts: Sequence[int], load: Load) -> float:
        plan = prepare(policy, self.pair.draft_names, artifacts=self.artifacts)
        drafts = {p.draft for p in policy.candidates if p.speculates}
        arrive = len(load.arrivals)
        costs = costs_at(self.hardware, len(plan.plans), len(drafts), prompts=arrive > 0)
        count = arrive or max(len(texts), TURNS * load.clients)
        trace, seating = self.trace.select(texts), Seating(max(CLIENTS))
        found = serve_decoder(trace, plan, load, seating, None, count=count, costs=costs)
        return found.served.tokens_per_s


def hardware(quick: bool) -> dict[str, Any]:
    """Tokens/s of what is best of each kind by clients, over no draft, over the best chain, and of
    a table by load over the best of all that are alike at every load."""
    size, rows = QUICK if quick else FULL, []
    for sampling in (Sampling(), Sampling(1.0, seed=5)):
        store, pair, trace = opened(size, sampling, "hardware", quick)
        each = kinds("head", classifier_of(size, sampling, "head", quick))
        artifacts = fitted(store, pair.id)
        for name, costs in list(HARDWARE.items())[: 1 if quick else None]:
            for row in by_clients(Played(trace, pair, costs, artifacts), each, size):
                rows.append({"hardware": name, "temperature": sampling.temperature, **row})
                say(f"{name}, T={sampling.temperature:g}: {row}")
    return {"texts": size.texts, "tokens": size.tokens, "rows": rows}


def halves_of(trace: ReplayTrace) -> list[list[int]]:
    """Every other request of a trace, and the rest."""
    return [list(range(n, len(trace.trajectories), 2)) for n in (0, 1)]


def by_clients(
    play: Played, each: Mapping[str, list[Policy]], size: Size
) -> Iterator[dict[str, Any]]:
    """A row for each number of clients, and for requests that arrive."""
    halves = halves_of(play.trace)
    rng = np.random.default_rng(0)
    chosen: list[dict[str, dict[int, Policy]]] = []
    for fit in halves:
        chosen.append(best_of_kinds(play, each, fit))
    tables = [table_of(play, best, fit) for best, fit in zip(chosen, halves, strict=True)]
    most = play(AUTOREGRESSIVE, halves[0], Load(max(CLIENTS)))
    mean = np.mean([len(t.output_ids) for t in play.trace.trajectories])
    loads: dict[str, tuple[int, Load]] = {f"clients:{n}": (n, Load(n)) for n in CLIENTS}
    for share, like in ((0.1, 4), (0.4, 16), (BUSY, 32)):
        gaps = rng.exponential(mean / (share * most), 4 * size.texts)
        name = f"poisson at {share:.0%} of what no draft serves"
        loads[name] = like, Load(arrivals=tuple(np.cumsum(gaps).tolist()))
    for name, (like, load) in loads.items():
        speeds: dict[str, list[list[float]]] = {}
        for half, best, table in zip(halves[::-1], chosen, tables, strict=True):
            played = {"none": AUTOREGRESSIVE, **{k: of[like] for k, of in best.items()}}
            played["by load"] = table
            drawn = [half, *(rng.choice(half, len(half)).tolist() for _ in range(size.draws))]
            for key, policy in played.items():
                speeds.setdefault(key, []).append([play(policy, texts, load) for texts in drawn])
        yield {"load": name, **figures_of(speeds)}


Play = Callable[[Policy, Sequence[int], Load], float]
"""Tokens/s of a policy on some requests under a load."""


def best_of_kinds(
    play: Play,
    each: Mapping[str, Sequence[Policy]],
    texts: Sequence[int],
    every: Iterable[int] = CLIENTS,
) -> dict[str, dict[int, Policy]]:
    """By kind and clients the policy that is fastest on some requests."""
    best: dict[str, dict[int, Policy]] = {name: {} for name in each}
    for clients in every:
        for name, policies in each.items():
            tried = [play(policy, texts, Load(clients)) for policy in policies]
            best[name][clients] = policies[int(np.argmax(tried))]
    return best


def table_of(
    play: Play,
    best: Mapping[str, Mapping[int, Policy]],
    texts: Sequence[int],
    every: Iterable[int] = CLIENTS,
) -> Policy:
    """The best of all kinds at each number of requests, in as few entries as say it."""
    entries = {}
    for clients in every:
        among = [AUTOREGRESSIVE, *(of[clients] for of in best.values())]
        speeds = [play(policy, texts, Load(clients)) for policy in among]
        entries[clients] = among[int(np.argmax(speeds))]
    table = policies_by_load(entries)
    assert isinstance(table, LoadPolicy) or len({p.id for p in entries.values()}) == 1
    return table


def figures_of(speeds: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Tokens/s of both halves, and ratios with intervals."""
    both = {name: np.exp(np.mean(np.log(np.array(of)), axis=0)) for name, of in speeds.items()}

    def ratio(one: str, other: str) -> list[float]:
        return of_draws(both[one] / both[other])

    speed = {name: float(np.median(of)) for name, of in both.items()}
    alike = max((name for name in both if name != "by load"), key=lambda name: speed[name])
    return {
        "tokens_per_s": speed,
        "best_alike": alike,
        "tree_over_chain": ratio("tree", "chain"),
        "calibrated_over_tree": ratio("calibrated", "tree"),
        "by_load_over_best": ratio("by load", alike),
        "best_over_none": ratio(alike, "none"),
    }


PARTS = {"executed": executed, "hardware": hardware}
