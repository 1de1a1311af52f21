"""Cells of the map executed: of this machine, of this machine under a pair with ballast, and what
tunings executed on GPUs.

    python bench/run.py map_executed [--quick]
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pairs import fixed, top_k

from bench import RESULTS
from bench.gpu.ballast import TINY, Shape, build
from bench.harness import state_folder
from bench.lab import Halves, compare, measured
from bench.map.cells import (
    Drafted,
    best_of_each,
    categories,
    recording,
    store,
    times_as_fast,
)
from bench.map.costs import Named, named
from spectune.optimizer.execute import encode_recorded
from spectune.optimizer.fit.for_tuning import fit_drafts
from spectune.optimizer.profiles import prediction_spread, profile_for
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.traces.tables import LatencyProfile

EXECUTED = (
    *((0.0, "medium", "code"), (0.0, "head", "math"), (0.0, "small", "prose")),
    *((1.0, "medium", "math"), (1.0, "head", "code")),
)
"""Temperature, draft and category of the cells of this machine that are executed."""


def executed(quick: bool) -> dict[str, Any]:
    """Cells of this machine executed, after its costs are measured, on requests that chose nothing,
    and what tunings executed on GPUs. What is predicted is of the very requests that are executed,
    and its interval what the profile's check says of a ratio; on GPUs they were others, and
    intervals are of draws of as many requests."""
    state = state_folder(quick)
    rows, greedy = [], recording(state, 0.0, quick)
    profile = measured(greedy.store, greedy.pair, greedy.recording)
    for temperature, draft, category in EXECUTED[: 1 if quick else None]:
        h = recording(state, temperature, quick)
        rows += _executed("demo", h, h.pair, profile, draft, category, quick)
    rows += _under_ballast(greedy, state / "ballast-cpu", quick)
    return {"rows": rows + _on_gpus(greedy)}


BALLAST = {
    "target": Shape(768, 8, 2048, 24, 6),
    "head": Shape(768, 1, 2048, 24, 6),
}
"""A target of 50 million weights and a head: rounds that cost otherwise than the demo's."""


def _under_ballast(h: Halves, folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Cells of the demo's texts at this machine's cost of a larger pair."""
    file = folder / "pair.json"
    if not file.exists():
        folder.mkdir()
        shapes = {name: TINY[name] for name in BALLAST} if quick else BALLAST
        build(folder, shapes, "cpu", torch.float32)
    pair = load_pair(read_pair(str(file)), device="cpu")
    texts = h.trace.trajectories
    profile = profile_for(h.store, pair, ("head",), gamma_max=8, trajectories=texts)
    profile = replace(profile, pair_id=h.pair.id)  # replayed on the demo's recording
    cost, slope = Named("", "", "", ("head",), profile).place("head")
    title = f"ballast, draft cost {cost:.1%}, slope {slope:.2%}"
    return _executed(title, h, pair, profile, "head", "code", quick)


def _row(cell: str, policy: str, predicted: list[float], share: float) -> dict[str, Any]:
    """A policy's speed over no speculation."""
    inside = predicted[1] <= share <= predicted[2]
    executed = {"executed": round(share, 4), "inside": inside}
    return {"cell": cell, "policy": policy, "predicted": predicted, **executed}


def _executed(
    name: str,
    h: Halves,
    pair: LoadedPair,
    profile: LatencyProfile,
    draft: str,
    category: str,
    quick: bool,
) -> list[dict[str, Any]]:
    """The best chain, tree and classifier of a cell beside no speculation, executed in turns by a
    pair of the recording's texts, prompts included."""
    limits = fit_drafts(h.store, h.pair, h.recording, [draft], fixed=(), routed=())[draft]
    drafted, requests = Drafted.of(h, draft, limits), categories(h)[category]
    fit, test = ([i for i in half if i in requests] for half in (h.fit, h.test))
    seconds = drafted.seconds(profile)
    best = best_of_each(seconds[:, fit], drafted.tried)
    places = test[: 2 if quick else 10]
    text = h.trace.trajectories[places[0]]
    encoded = encode_recorded(pair, [h.trace.trajectories[i] for i in places])
    policies = {kind: drafted.tried[best[kind]].policy for kind in ("nothing", *SHOWN)}
    every = [*policies.values()]
    timings = compare(pair, every, encoded, passes=2, profile=profile, artifacts=h.find).timings
    totals = {
        kind: float(np.nanmedian(timings.seconds[policy.id], axis=1).sum())
        for kind, policy in policies.items()
    }
    title = f"{name}, {draft}, {category}, temperature {text.sampling.temperature:g}"
    rows, off = [], np.exp(1.96 * prediction_spread(profile, trees=True))
    for kind in SHOWN:
        one, other = (seconds[best[m], places].sum() for m in (kind, "nothing"))
        predicted = np.round(other / one * np.array([1.0, 1 / off, off]), 4).tolist()
        share = totals["nothing"] / totals[kind]
        rows.append(_row(title, policies[kind].label(), predicted, share))
    return rows


SHOWN = ("chain", "tree", "classifier")


def _on_gpus(h: Halves) -> list[dict[str, Any]]:
    """What `tune` executed of the ballasted pair on GPUs, where the recording holds the policy."""
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
            rows.append(_row(title, tried["label"], predicted, tried["ratio_to_autoregressive"]))
    return rows


ON_GPUS = {
    "head fixed(gamma=4) top_k(k=8) N=60": top_k("head", 8, 4, 60),
    "head fixed(gamma=6) top_k(width=8) select(top_n=60)": top_k("head", 8, 6, 60),
    "ngram fixed(gamma=10)": {"draft": "ngram", "window": fixed(10)},
    "ngram fixed(gamma=12)": {"draft": "ngram", "window": fixed(12)},
}
"""Policies by the labels of the tunings' results."""


RESULT, PARTS = "map", {"executed": executed}
__all__ = ["PARTS", "RESULT", "store"]
