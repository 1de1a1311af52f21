"""Cells of the map executed: of this machine, blind, and what tunings executed on GPUs.

    python bench/run.py map_executed [--only blind|acceptance|executed] [--quick]

``blind``: twelve cells, drawn by a seed before anything was run, on requests that the map has not
read. Eight cells are of one request at a time: a draft, a temperature, a category; four of 8 to 32
clients, of all categories. Costs are a profile that is measured just before, all by the processor's
clock. The verdict is the map's (of several clients: of chains and trees, served by replay); it,
what would be next and no draft are executed in turns on 40 requests. It is right where it is faster
than no draft, or than what is next, beyond noise; wrong where one of these is faster than it.
``acceptance``: what of a cell's error is that these 40 requests are others: tokens a round of its
policy on them over those of the half that the map compares; nothing of it is timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt
from pairs import fixed, top_k

from bench import RESULTS
from bench.checks.load_native import kinds, replayed_speed, steps_profile
from bench.checks.rules import CLOCK, decode
from bench.harness import say, state_folder
from bench.lab import CATEGORIES, Halves, interval_of, requests
from bench.map.cells import (
    REQUESTS,
    RESAMPLES,
    TEMPERATURES,
    Drafted,
    best_of_each,
    categories,
    judged,
    recording,
    store,
    times_as_fast,
)
from bench.map.costs import named
from bench.papers.evidence import EMITTED, ROUNDS
from bench.verdicts import of_draws, outcome
from spectune.optimizer.execute import DecodeOptions, Executor, encode, run, warm
from spectune.optimizer.fit.for_tuning import fit_drafts
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.runtime.decoder import prepare_for
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.tables import LatencyProfile

SEED = 6820261128
DRAFTS, CLIENTS = ("small", "medium", "head"), (8, 16, 32)
ALONE, TOGETHER, EXECUTED = 8, 4, 40
"""Cells of one request at a time and of several, and requests that each executes."""
PASSES = 3
"""Executions of a cell of several clients, whose interval is over these."""
DRAWS = 40

Cell = tuple[float, str, str, int]
Counted = npt.NDArray[np.int64]


def drawn() -> list[Cell]:
    """(temperature, draft, category, clients) of the twelve cells."""
    rng = np.random.default_rng(SEED)
    alone = list(product(TEMPERATURES, DRAFTS, CATEGORIES, (1,)))
    together = list(product(TEMPERATURES, DRAFTS, ("all",), CLIENTS))
    return [
        of[i]
        for of, count in ((alone, ALONE), (together, TOGETHER))
        for i in rng.choice(len(of), count, replace=False).tolist()
    ]


def blind(quick: bool) -> dict[str, Any]:
    """A row of each cell."""
    state, cells = state_folder(quick), drawn()
    recordings = {t: recording(state, t, quick) for t in TEMPERATURES}
    h = recordings[0.0]
    profile = steps_profile(h.pair, h.trace, 4 if quick else max(CLIENTS), CLOCK)
    rows = []
    for cell in [cells[0], cells[-1]] if quick else cells:
        temperature, draft, category, clients = cell
        of = _alone if clients == 1 else _together
        row = of(recordings[temperature], cell, profile, quick)
        key = {"temperature": temperature, "draft": draft, "category": category, "clients": clients}
        rows.append({**key, **row})
        say(str(rows[-1]))
    return {"seed": SEED, "check": profile.check, "rows": rows}


def _alone(h: Halves, cell: Cell, profile: LatencyProfile, quick: bool) -> dict[str, Any]:
    """A cell of one request at a time."""
    _, draft, category, _ = cell
    limits = fit_drafts(h.store, h.pair, h.recording, [draft], fixed=(), routed=())[draft]
    drafted = Drafted.of(h, draft, limits)
    seconds, among = drafted.seconds(profile), categories(h)[category]
    verdict = judged(seconds, h, drafted.tried, among)["verdict"]
    fit, test = ([i for i in half if i in among] for half in (h.fit, h.test))
    best = best_of_each(seconds[:, fit], drafted.tried)
    following = next(name for name in best if name != verdict)  # from the fastest on
    count = 2 if quick else EXECUTED
    places = {name: best[name] for name in (verdict, following, "nothing")}
    policies = {name: drafted.tried[n].policy for name, n in places.items()}
    workload = requests(count, skip=REQUESTS // len(CATEGORIES), category=category)
    text = h.trace.trajectories[0]
    encoded = encode(h.pair, workload, DecodeOptions(text.sampling, text.max_new_tokens))
    how: dict[str, Any] = {"profile": profile, "artifacts": h.find, "clock": CLOCK}
    executor, rng = Executor(h.pair, policies.values(), encoded, **how), np.random.default_rng(0)
    took = {name: np.zeros(count) for name in policies}
    for n in range(count):
        for name in rng.permutation(list(policies)):
            took[name][n] = executor(policies[name].id, n)

    def told(one: str, other: str) -> list[float]:
        return times_as_fast(seconds[places[one], test], seconds[places[other], test], count)

    def executed(one: str, other: str) -> list[float]:
        return times_as_fast(took[one], took[other])

    return _row(verdict, following, policies, told, executed)


def _together(h: Halves, cell: Cell, profile: LatencyProfile, quick: bool) -> dict[str, Any]:
    """A cell of several clients."""
    _, draft, _, clients = cell
    seats = clients = 4 if quick else clients
    count = max(EXECUTED, 2 * clients)
    chains = [parse_policy({"draft": draft, "window": fixed(k)}) for k in range(1, 9)]
    of = {"nothing": [AUTOREGRESSIVE], "chain": chains, "tree": kinds(draft)["tree"]}

    def play(policy: Policy, texts: Sequence[int]) -> float:
        trace = h.trace.select(texts)
        return replayed_speed(trace, policy, clients, profile, seats, count)

    best = {name: max(some, key=lambda p: play(p, h.fit)) for name, some in of.items()}
    speeds = {name: play(policy, h.fit) for name, policy in best.items()}
    rng = np.random.default_rng(0)
    orders = [h.test, *(rng.choice(h.test, len(h.test)).tolist() for _ in range(DRAWS))]
    drawn_speeds = {n: np.array([play(p, texts) for texts in orders]) for n, p in best.items()}

    def told(one: str, other: str) -> list[float]:
        return of_draws(drawn_speeds[one] / drawn_speeds[other])

    verdict = "nothing"
    for step in ("chain", "tree"):
        if told(step, verdict)[1] > 1:
            verdict = step
    following = max((name for name in speeds if name != verdict), key=lambda name: speeds[name])
    text = h.trace.trajectories[0]
    options = DecodeOptions(text.sampling, text.max_new_tokens)
    encoded = encode(h.pair, requests(count, skip=REQUESTS), options)
    warm(h.pair, encoded)
    names, each = list(dict.fromkeys((verdict, following, "nothing"))), dict[str, list[float]]()
    for turn in range(2 if quick else PASSES):
        for n in np.random.default_rng(turn).permutation(len(names)):
            speed = decode(h.pair, best[names[n]], encoded, clients, seats)
            each.setdefault(names[n], []).append(speed)

    def executed(one: str, other: str) -> list[float]:
        return interval_of(np.log(np.array(each[one]) / np.array(each[other])))

    again = [b / a for of in each.values() for a, b in pairwise(of)]
    return {**_row(verdict, following, best, told, executed), "again": again}


def acceptance(quick: bool) -> dict[str, Any]:
    """Of each cell of one request at a time the policy that was executed beside no draft."""
    state, rows = state_folder(quick), []
    drawn_cells = json.loads((RESULTS / "map.json").read_text())["blind"]["rows"]
    for cell in [r for r in drawn_cells if r["clients"] == 1][: 1 if quick else None]:
        h, draft = recording(state, cell["temperature"], quick), cell["draft"]
        limits = fit_drafts(h.store, h.pair, h.recording, [draft], fixed=(), routed=())[draft]
        label = cell["following" if cell["verdict"] == "nothing" else "policy"]
        policies = (one.policy for one in Drafted.of(h, draft, limits).tried)
        policy = next(policy for policy in policies if quick or policy.label() == label)
        among = categories(h)[cell["category"]]
        replay = run_replay(h.trace, policy, artifacts=h.find)
        here = replay.counts[[i for i in h.test if i in among]][:, [EMITTED, ROUNDS]]
        count = 2 if quick else EXECUTED
        workload = requests(count, skip=REQUESTS // len(CATEGORIES), category=cell["category"])
        text = h.trace.trajectories[0]
        encoded = encode(h.pair, workload, DecodeOptions(text.sampling, text.max_new_tokens))
        source = StaticSource(prepare_for(h.pair, policy, artifacts=h.find))
        steps = (decoded.steps for decoded in run(h.pair, source, encoded))
        there = np.array([[sum(s.emitted for s in of), len(of)] for of in steps])
        key = {name: cell[name] for name in ("temperature", "draft", "category")}
        rows.append({**key, "policy": label, "tau_over": _tau_over(there, here)})
        say(str(rows[-1]))
    return {"rows": rows}


def _tau_over(there: Counted, here: Counted) -> list[float]:
    """Tokens a round of some requests over those of others, [requests, 2] tokens and rounds, and
    its 95% interval over draws of both."""
    rng, drawn_taus, taus = np.random.default_rng(0), [], []
    for of in (there, here):
        draws = rng.multinomial(len(of), np.full(len(of), 1 / len(of)), RESAMPLES) @ of
        drawn_taus.append(draws[:, 0] / draws[:, 1])
        taus.append(of.sum(0)[0] / of.sum(0)[1])
    ends = np.quantile(drawn_taus[0] / drawn_taus[1], (0.025, 0.975))
    return [round(float(x), 4) for x in (taus[0] / taus[1], *ends)]


Ratio = Callable[[str, str], list[float]]


def _row(
    verdict: str,
    following: str,
    policies: Mapping[str, Policy],
    told: Ratio,
    executed: Ratio,
) -> dict[str, Any]:
    over, following_over = executed(verdict, "nothing"), executed(following, verdict)
    return {
        "verdict": verdict,
        "policy": policies[verdict].label(),
        "following": policies[following].label(),
        "predicted": told(verdict, "nothing"),
        "executed": over,
        "following_predicted": told(following, verdict),
        "following_executed": following_over,
        "is": outcome(verdict, over, following_over),
    }


def on_gpus(quick: bool) -> dict[str, Any]:
    """What `tune` executed of the ballasted pair on GPUs, where the recording holds the policy;
    predicted intervals are of draws of as many requests."""
    h = recording(state_folder(quick), 0.0, quick)
    profiles = {one.name: one.profile for one in named(h)}
    rows = []
    for file in sorted(RESULTS.glob("gpu-nvidia-*.json")):
        run = json.loads(file.read_text())["tune"]
        for tried in run["tuned"]["candidates"]:
            if (document := ON_GPUS.get(tried["label"])) is None:
                continue
            title = f"8B of ballast, {document['draft']}, {run['on'].split()[1]}"
            policies = parse_policy(document), AUTOREGRESSIVE
            replays = (run_replay(h.trace, p, profiles[title], approximate=True) for p in policies)
            one, other = (replay.seconds[h.test] for replay in replays)
            predicted = times_as_fast(one, other, tried["executed_requests"])
            share = round(tried["ratio_to_autoregressive"], 4)
            inside = predicted[1] <= share <= predicted[2]
            row = {"cell": title, "policy": tried["label"], "predicted": predicted}
            rows.append({**row, "executed": share, "inside": inside})
    return {"rows": rows}


ON_GPUS = {
    "head fixed(gamma=4) top_k(k=8) N=60": top_k("head", 8, 4, 60),
    "head fixed(gamma=6) top_k(width=8) select(top_n=60)": top_k("head", 8, 6, 60),
    "ngram fixed(gamma=10)": {"draft": "ngram", "window": fixed(10)},
    "ngram fixed(gamma=12)": {"draft": "ngram", "window": fixed(12)},
}
"""Policies by the labels of the tunings' results."""


RESULT, PARTS = "map", {"blind": blind, "acceptance": acceptance, "executed": on_gpus}
__all__ = ["PARTS", "RESULT", "store"]
