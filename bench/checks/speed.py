"""How fast the tool is: replay of chains and trees, tabulation, a search.

    python bench/run.py speed [--only replay trees] [--quick]

Figures are added to ``bench/results/speed.json`` (``--quick``: a tiny size, printed alone). Replay
and tabulation are in CPU seconds of one thread, which other work on the machine hardly touches, the
best of several; trials are wall-clock.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from pairs import fixed, top_k
from synthetic import drifting_text, flat_profile

from bench.lab import GREEDY, SAMPLED, demo, recorded, requests
from spectune.db.database import open_database
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.forest import tabulate_growth
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.traces.recording import LoadedRecording
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

GAMMA_MAX = 16
STOPS = ("none", "max_prob", "joint_prob", "entropy")
LONG = {"gamma_max": 16, "history": 32}
WINDOWS: dict[str, dict[str, Any]] = {
    "fixed": fixed(4),
    **{f"analytic {e}": {"kind": "analytic", "estimator": e} for e in ("ratio", "exact")},
    **{
        f"analytic {e}, gamma_max 16, history 32": {"kind": "analytic", **LONG, "estimator": e}
        for e in ("ratio", "exact")
    },
    **{kind: {"kind": kind} for kind in ("fsm", "cache_fsm", "q_learning", "heuristic")},
    "q_learning speed, memory 2": {"kind": "q_learning", "reward": "speed", "memory": 2},
}


# ------------------------------------------------------------------------------------------- chains


def synthetic_trace(tokens: int) -> ReplayTrace:
    """Texts of 500 tokens and one draft."""
    texts, panoramas = zip(*map(drifting_text, range(tokens // 500)), strict=True)
    return ReplayTrace(texts, {"small": panoramas})


def random_policies(count: int) -> list[Policy]:
    """Policies of all windows and stops, most with a stop of their own threshold."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        window, longest = dict(rng.choice(list(WINDOWS.values()))), rng.integers(1, GAMMA_MAX + 1)
        window["gamma" if window["kind"] == "fixed" else "gamma_max"] = int(longest)
        stop: dict[str, Any] = {"kind": str(rng.choice(STOPS))}
        if stop["kind"] != "none":
            stop["threshold"] = float(rng.uniform(0.05, 0.9))
        found.append(parse_policy({"draft": "small", "window": window, "stop": stop}))
    return found


def best_cpu_s(call: Callable[[], object], repeats: int) -> float:
    """The least CPU seconds of this thread that a call took."""
    taken = []
    for _ in range(repeats):
        began = time.thread_time()
        call()
        taken.append(time.thread_time() - began)
    return min(taken)


def replay(quick: bool) -> dict[str, Any]:
    """Million rounds a second of every window on one core, and the time of 2,000 random trials over
    100,000 tokens."""
    profile = flat_profile("demo", ["small"])
    trace = synthetic_trace(20_000 if quick else 1_000_000)
    rates = {}
    for name, window in WINDOWS.items():
        policy = parse_policy({"draft": "small", "window": window})
        rounds = run_replay(trace, policy, profile).total.rounds
        taken = best_cpu_s(lambda p=policy: run_replay(trace, p, profile), 3 if quick else 15)
        rates[name] = rounds / taken / 1e6
        print(f"{name:42} {rates[name]:8.1f} million rounds/s", flush=True)
    smaller, trials = synthetic_trace(10_000 if quick else 100_000), 20 if quick else 2_000
    began = time.perf_counter()
    for policy in random_policies(trials):
        run_replay(smaller, policy, profile)
    trials_s = time.perf_counter() - began
    about = {"trials": trials, "tokens": smaller.tokens, "trials_s": trials_s}
    return {"million_rounds_per_s": rates, **about}


# -------------------------------------------------------------------------------------------- trees


def trees(quick: bool) -> list[dict[str, Any]]:
    """Trees tabulated and rounds replayed a second, by draft and temperature."""
    pair, rows = demo(), []
    for sampling in (GREEDY, SAMPLED):
        for draft in ("small",) if quick else pair.models:
            figures = _rates(_recorded(pair, draft, sampling, quick), draft, sampling)
            rows.append({"draft": draft, "temperature": sampling.temperature, **figures})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _recorded(pair: LoadedPair, draft: str, sampling: Sampling, quick: bool) -> LoadedRecording:
    """A recording with its trees."""
    with tempfile.TemporaryDirectory() as folder, open_database(f"{folder}/a.db") as database:
        store, options = TraceStore(database), DecodeOptions(sampling, 16 if quick else 64)
        look = [draft], 0, 10, 8
        recording = recorded(store, pair, requests(2 if quick else 12), options, *look)
        return store.load(recording)


def _rates(loaded: LoadedRecording, draft: str, sampling: Sampling) -> dict[str, Any]:
    """Trees tabulated and rounds replayed a second, over the recording repeated to 4,000 starts."""
    grown = loaded.panoramas(draft)
    repeat = max(1, 4000 // sum(p.positions for p in grown))
    own = loaded.trajectories
    texts = [replace(t, request_id=f"{i} {t.request_id}") for i in range(repeat) for t in own]
    trace = ReplayTrace(texts, {draft: list(grown) * repeat})
    forest, rates = trace.forest(draft), {}
    every = np.arange(len(forest.root))
    for width, depth in ((10, 6), (10, 8), (6, 6)):
        policy = parse_policy(top_k(draft, width, depth, 60))
        rules = prepare(policy, [draft]).rules
        assert rules is not None
        rule = rules[int(not sampling.greedy)]
        tabulate_growth(forest, [(rule, every[:512])], depth)  # compiles
        taken = best_cpu_s(lambda r=rule, d=depth: tabulate_growth(forest, [(r, every)], d), 3)
        rates[f"k {width}, d {depth}"] = len(every) / taken
    # What narrower trees read beyond the recorded growth takes no other time.
    rounds = run_replay(trace, policy, approximate=True).total.rounds
    taken = best_cpu_s(lambda: run_replay(trace, policy, approximate=True), 40)
    replayed = rounds / taken / 1e6
    return {"tabulated_trees_per_s": rates, "replayed_million_rounds_per_s": replayed}


RESULT, PARTS = "speed", {"replay": replay, "trees": trees}
