"""Speed and size of what trees are replayed from: recording panoramas, tabulating growths, replaying rounds.

    python bench/tree_replay_speed.py [--requests 12] [--out bench/results/tree_replay_speed.json]

Panoramas are of k 10, d 8 with every score that recordings cover, bytes as they lie in SQLite. Tabulating grows the tree of every start;
replay runs policies over a growth that is tabulated. Then what a search waits for before it can ask such a growth: a classifier's
table of confidences, and the optimal static trees of up to 64 nodes. One thread; seconds are the process's own (CPU).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from spectune.db.database import open_database
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.fit.sequoia import best_static_tree
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.record import RecordRequest, record, retrace_trees
from spectune.optimizer.simulate.forest import tabulate_growth
from spectune.optimizer.simulate.replay import ReplayTrace, run_replay
from spectune.runtime.loading import load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.c2t import read_weights
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

ROOT = Path(__file__).resolve().parent.parent
WIDTH, DEPTH = 10, 8


def measure(requests: int) -> dict[str, Any]:
    pair = load_pair(read_pair("demo"), device="cpu")
    rows = []
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        for draft in ("small", "medium", "head"):
            with tempfile.TemporaryDirectory() as folder, open_database(f"{folder}/a.db") as database:
                store = TraceStore(database)
                plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
                workload = load_workload(["demo"], limit=requests)
                info = record(store, pair, RecordRequest(workload, DecodeOptions(sampling, 64), ()), plain)
                database.vacuum()
                before = sum(p.stat().st_size for p in Path(folder).glob("a.db*"))
                began = time.process_time()
                retrace_trees(store, pair, info.id, [draft], WIDTH, DEPTH)
                seconds = time.process_time() - began
                database.vacuum()
                size = sum(p.stat().st_size for p in Path(folder).glob("a.db*")) - before
                loaded = store.load(info.id, trees=True)
                trees = loaded.trees(draft)
            starts = sum(p.positions for p in trees)
            repeat = max(1, 4000 // starts)
            trace = ReplayTrace(
                [replace(t, request_id=f"{i} {t.request_id}") for i in range(repeat) for t in loaded.trajectories],
                {},
                trees={(draft, "coupled"): list(trees) * repeat},
            )
            forest = trace.forests[draft, "coupled"]
            rates = {}
            for width, depth in ((10, 6), (10, 8), (6, 6)):
                document = {
                    "draft": draft,
                    "growth": {"kind": "top_k", "width": width},
                    "window": {"kind": "fixed", "gamma": depth},
                    "select": {"top_n": 60},
                }
                policy = parse_policy(document)
                rules = prepare(policy, [draft]).rules
                assert rules is not None
                every, hot = np.arange(len(forest.root)), int(not sampling.greedy)
                tabulate_growth(forest, [(rules[hot], every[:512])], depth)
                best = 0.0
                for _ in range(3):
                    began = time.process_time()
                    tabulate_growth(forest, [(rules[hot], every)], depth)
                    best = max(best, len(every) / (time.process_time() - began))
                rates[f"k {width}, d {depth}"] = best
            run_replay(trace, policy)
            began = time.process_time()
            rounds = sum(run_replay(trace, policy).total.rounds for _ in range(40))
            replayed = rounds / (time.process_time() - began)
            rows.append(
                {
                    "draft": draft,
                    "temperature": sampling.temperature,
                    "starts": starts,
                    "recorded_starts_per_s": starts / seconds,
                    "bytes_per_start": size / starts,
                    "nodes_per_start": sum(len(p.parent) for p in trees) / starts,
                    "tabulated_trees_per_s": rates,
                    "replayed_million_rounds_per_s": replayed / 1e6,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return {"width": WIDTH, "depth": DEPTH, "rows": rows, "prepared_s": prepared()}


def prepared() -> dict[str, float]:
    """Seconds to prepare the growths that are more than parameters, best of three; their values make no difference to it."""
    chance = np.random.default_rng(0)
    sizes = {"w1": (48, 3), "b1": 48, "w2": 48, "b2": 1}
    weights = read_weights({name: chance.normal(size=size).astype(np.float32) for name, size in sizes.items()})
    acceptance = 0.7 * 0.3 ** np.arange(WIDTH)
    tasks: dict[str, Callable[[], object]] = {
        "classifier's table": weights.table,
        "static trees": lambda: best_static_tree(acceptance, max_nodes=64, max_depth=16),
    }
    found = {}
    for name, task in tasks.items():
        took = []
        for _ in range(3):
            began = time.process_time()
            task()
            took.append(time.process_time() - began)
        found[name] = min(took)
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--out", default=str(ROOT / "bench" / "results" / "tree_replay_speed.json"))
    wanted = parser.parse_args()
    Path(wanted.out).write_text(json.dumps(measure(wanted.requests), indent=1) + "\n")


if __name__ == "__main__":
    main()
