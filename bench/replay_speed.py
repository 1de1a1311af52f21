"""How fast the replay is: rounds a second of every window, and the time of 2,000 random trials over 100,000 recorded tokens.

    python bench/replay_speed.py [--tokens 100000] [--trials 2000] [--workers 2] [--seed 0] [--out
    bench/results/replay_speed.json]

The trace is synthetic (acceptance drifts between 0.3 and 0.95 along each text), so no model is needed; both figures depend on it
only through the number of rounds. Rounds a second are :func:`run_replay`'s, costs included, in CPU seconds of one thread (other
work on the machine then hardly counts), the best of several. Trials are wall-clock and include everything: compilation of
the window, tabulation of the stop, the loop, totals.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
from spectune.optimizer.simulate.replay import ReplayTrace, replay_many, run_replay
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.traces.cost_table import CostTable
from spectune.traces.latency import LatencyProfile
from spectune.traces.schema import AGREE_NO, AGREE_YES, ChainPanorama, Sampling, Trajectory

GAMMA_MAX = 16


def synthetic_trace(tokens: int, *, length: int = 500, seed: int = 0) -> ReplayTrace:
    """Texts of ``length`` tokens and one draft, ``small``, whose confidence tells something about its acceptance."""
    rng = np.random.default_rng(seed)
    trajectories, panoramas = [], []
    for i in range(max(1, tokens // length)):
        wave = 0.62 + 0.3 * np.sin(np.arange(length) / rng.uniform(15, 60) + rng.uniform(0, 6))
        agree = rng.random(length) < wave
        logp = np.clip(rng.gamma(1.5, 60, length) * np.where(agree, 0.6, 2.0), 0, 4000).astype(np.uint16)
        branches = int((~agree).sum()) + 1
        trajectories.append(
            Trajectory(
                f"r{i}",
                "synthetic",
                rng.integers(0, 4000, int(rng.integers(20, 200))).astype(np.int32),
                rng.integers(0, 4000, length).astype(np.int32),
                Sampling(),
                length,
                "length",
            )
        )
        rows = rng.gamma(1.5, 120, (branches, GAMMA_MAX)).astype(np.uint16)
        panoramas.append(
            ChainPanorama(
                "small",
                GAMMA_MAX,
                np.where(agree, AGREE_YES, AGREE_NO).astype(np.uint8),
                logp,
                logp.copy(),
                np.where(agree, 65535, 0).astype(np.uint16),
                rows,
                rows.copy(),
                np.full(branches, GAMMA_MAX - 1, dtype=np.uint8),
            )
        )
    return ReplayTrace(trajectories, {"small": panoramas})


def synthetic_profile() -> LatencyProfile:
    """A 4 ms target beside a 0.5 ms draft."""

    def table(base: float, slope: float) -> CostTable:
        rows, contexts = (1.0, 4.0, 8.0, 17.0), (32.0, 160.0, 384.0)
        return CostTable(tuple(base + slope * r + 1e-7 * c for r in rows for c in contexts), ("rows", "context"), (rows, contexts))

    target, draft = table(4e-3, 1.2e-4), table(4.5e-4, 2e-5)
    terms = {"target": target, "pass/small": draft, "phase/small": CostTable((0.0,)), "round": CostTable((1e-4,))}
    return LatencyProfile("demo", "cpu", "float32", terms)


WINDOWS: dict[str, dict[str, Any]] = {
    "fixed": {"kind": "fixed", "gamma": 4},
    "analytic ratio": {"kind": "analytic"},
    "analytic exact": {"kind": "analytic", "estimator": "exact"},
    "analytic table": {"kind": "analytic", "estimator": "table"},
    "analytic ratio, gamma_max 16, history 32": {"kind": "analytic", "gamma_max": 16, "history": 32},
    "analytic exact, gamma_max 16, history 32": {"kind": "analytic", "gamma_max": 16, "history": 32, "estimator": "exact"},
    "analytic recent costs": {"kind": "analytic", "costs": "recent"},
    "analytic table, recent costs": {"kind": "analytic", "costs": "recent", "estimator": "table"},
    "analytic exact, recent costs": {"kind": "analytic", "costs": "recent", "estimator": "exact"},
    "fsm": {"kind": "fsm"},
    "cache_fsm": {"kind": "cache_fsm"},
    "q_learning": {"kind": "q_learning"},
    "q_learning speed, memory 2": {"kind": "q_learning", "reward": "speed", "memory": 2},
    "heuristic": {"kind": "heuristic"},
}


def measure_windows(trace: ReplayTrace, profile: LatencyProfile, repeats: int) -> dict[str, float]:
    """Million rounds a second of every window on one core, the best of ``repeats`` calls of :func:`run_replay`."""
    rates = {}
    for name, window in WINDOWS.items():
        policy = parse_policy({"draft": "small", "window": window})
        rounds = run_replay(trace, policy, profile).total.rounds
        best = min(_timed(trace, policy, profile) for _ in range(repeats))
        rates[name] = rounds / best / 1e6
    return rates


def _timed(trace: ReplayTrace, policy: Policy, profile: LatencyProfile) -> float:
    began = time.thread_time()
    run_replay(trace, policy, profile)
    return time.thread_time() - began


def random_policies(count: int, seed: int) -> list[Policy]:
    """Policies of all windows and stops, most with a stop of their own threshold."""
    rng = np.random.default_rng(seed)
    windows = list(WINDOWS.values())
    out = []
    for _ in range(count):
        window = dict(windows[int(rng.integers(len(windows)))])
        key = "gamma" if window["kind"] == "fixed" else "gamma_max"
        window[key] = int(rng.integers(1, GAMMA_MAX + 1))
        window.pop("gamma_initial", None)
        kind = ("none", "max_prob", "joint_prob", "entropy")[int(rng.integers(4))]
        stop = {"kind": kind} if kind == "none" else {"kind": kind, "threshold": float(rng.uniform(0.05, 0.9))}
        out.append(parse_policy({"draft": "small", "window": window, "stop": stop}))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of the trials' trace")
    parser.add_argument("--loop-tokens", type=int, default=1_000_000, help="tokens of the trace on which the loop is timed")
    parser.add_argument("--trials", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("bench/results/replay_speed.json"))
    args = parser.parse_args()
    trace, profile = synthetic_trace(args.tokens, seed=args.seed), synthetic_profile()
    rates = measure_windows(synthetic_trace(args.loop_tokens, seed=args.seed), profile, args.repeats)
    began = time.perf_counter()
    done = replay_many(trace, random_policies(args.trials, args.seed), profile, workers=args.workers)
    trials_s = time.perf_counter() - began
    result = {
        "million_rounds_per_s": {k: round(v, 1) for k, v in rates.items()},
        "loop_tokens": args.loop_tokens,
        "trials": args.trials,
        "tokens": trace.tokens,
        "workers": args.workers,
        "trials_s": round(trials_s, 2),
        "trial_rounds": sum(r.total.rounds for r in done),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    print(f"| {'window':42} | million rounds/s, one core |")
    print(f"|{'-' * 44}|{'-' * 28}|")
    for name, rate in rates.items():
        print(f"| {name:42} | {rate:26.1f} |")
    print(f"{args.trials} random trials over {trace.tokens} tokens on {args.workers} threads: {trials_s:.1f} s")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
