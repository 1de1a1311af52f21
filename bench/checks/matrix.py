"""One recording, a whole matrix: what is accepted by draft, K and category, which others sweep with
a run of a server for each cell.

    python bench/run.py matrix [--quick]

A recording is made anew: texts decoded once, and what each draft proposes from every start; chains
of K = 1 to 8 are replayed on it. Some of the cells are executed, to count the rounds that differ
and what a cell of a sweep takes. Seconds are of the processor, so a busy machine does not count.
"""

from __future__ import annotations

import time
from typing import Any

from bench.harness import say, state_folder
from bench.lab import CATEGORIES, chain, demo, recorded, replayable, requests, stored, unlike
from spectune.optimizer.execute import DecodeOptions, encode_recorded, run
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.plan import prepare
from spectune.traces.schema import Sampling

RESULT = "matrix"
MOST = 8
EXECUTED = (("small", 3), ("medium", 8), ("head", 5))
"""Drafts and K of the cells that are executed, on all requests."""


def matrix(quick: bool) -> dict[str, Any]:
    """Mean accepted lengths by draft, category and K, what they took, and cells executed."""
    count, tokens = (9, 12) if quick else (60, 48)
    pair, store = demo(), stored(state_folder(quick) / "matrix.db", fresh=True)
    options, began = DecodeOptions(Sampling(), tokens), time.process_time()
    recording = recorded(store, pair, requests(count), options, list(pair.models), MOST, 1, MOST)
    recording_s, began = time.process_time() - began, time.process_time()
    trace = replayable(store, pair, recording)
    texts, rows = trace.trajectories, []
    steps = {}
    for draft in pair.models:
        of: dict[str, list[dict[str, float]]] = {name: [] for name in (*CATEGORIES, "all")}
        for k in range(1, MOST + 1):
            per_round = (draft, k) in EXECUTED
            replay = run_replay(trace, chain(draft, k), per_round=per_round)
            if per_round:
                steps[draft, k] = replay.steps()
            for name, cells in of.items():
                among = [i for i, t in enumerate(texts) if name in (t.category, "all")]
                rounds, emitted = replay.counts[among, :2].sum(0)
                cells.append({"K": k, "tau": float(emitted / rounds), "rounds": int(rounds)})
        rows += [{"draft": draft, "category": name, "cells": cells} for name, cells in of.items()]
    replay_s, encoded = time.process_time() - began, encode_recorded(pair, texts)
    executed = []
    for (draft, k), told in steps.items():
        began = time.process_time()
        plan = prepare(chain(draft, k), pair.draft_names)
        decoded = list(run(pair, StaticSource(plan), encoded))
        seconds = time.process_time() - began
        differ, total = unlike(decoded, told)
        executed.append({"draft": draft, "K": k, "rounds": total, "differ": differ, "s": seconds})
        say(str(executed[-1]))
    about = {"requests": len(texts), "tokens": sum(len(t.output_ids) for t in texts)}
    seconds_of = {"recording_s": recording_s, "replay_s": replay_s}
    return {**about, **seconds_of, "executed": executed, "rows": rows}


PARTS = {"matrix": matrix}
