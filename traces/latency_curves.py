"""Latency profiles as they were stored before they consisted of terms: curves over (width, context)
of every part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from spectune.traces.cost_table import CostTable, FloatArray


def terms_of_curves(data: Mapping[str, Any]) -> dict[str, CostTable]:
    """The terms of an old document. Differences that were negative (what a tree's pass took less
    than a chain's) become 0."""
    sample_s = float(data.get("sample_s", 0.0))
    terms = {
        "target": _curve(data["verify"]),
        "prefill/target": _over_rows(_curve(data["prefill"])),
        "round": _constant(data.get("overhead_s", 0.0)),
        "noise": _constant(data.get("noise_s", 0.0)),
        "request": _constant(data.get("request_s", 0.0)),
        "sampled target": CostTable((0.0, sample_s), ("rows",), ((0.0, 1.0),)),
    }
    for kind, seconds in data.get("stop_step_s", {}).items():
        terms[f"stop {kind}"] = _constant(seconds)
    for draft, curve in data["draft_step"].items():
        steps, bends = _curve(curve), data.get("draft_bend_s", {}).get(draft) or (0.0, 0.0)
        once = np.array(bends[1:]) + data.get("draft_phase_s", {}).get(draft, 0.0)
        # Passes that got quicker within a round had a negative bend: here every pass is as quick as
        # in the round of the quickest.
        line = float(steps.at(rows=1.0, context=np.median(steps.knots[1]))) * np.arange(
            1, len(bends)
        )
        quickest = min(1.0, float(((once + line) / line).min()))
        terms[f"pass/{draft}"] = replace(steps, seconds=tuple(quickest * s for s in steps.seconds))
        terms[f"phase/{draft}"] = _over_passes(once + (1.0 - quickest) * line)
        terms[f"sampled pass/{draft}"] = _constant(data.get("draft_sample_s", 0.0))
    for draft, curve in data["draft_prefill"].items():
        terms[f"prefill/{draft}"] = _over_rows(_curve(curve))
    for draft, curves in data.get("shortlist_s", {}).items():
        # Curves of whole passes: the head's own share is what they differ by.
        tables = {kind: _over_rows(_curve(curves[kind])) for kind in ("full", "fixed", "routed")}
        least = min(s for t in tables.values() for s in t.seconds)
        sizes: dict[float, float] = {}
        for table in (tables["fixed"], tables["full"]):
            sizes |= dict(zip(table.knots[0], table.seconds, strict=True))
        head = CostTable(tuple(sizes[k] for k in sorted(sizes)), ("rows",), (tuple(sorted(sizes)),))
        terms[f"head/{draft}"] = _less(head, least)
        terms[f"gathered/{draft}"] = _less(tables["routed"], least)
        if f"pass/{draft}" in terms:  # which held the whole head
            own = terms[f"head/{draft}"].seconds[-1]
            terms[f"pass/{draft}"] = _less(terms[f"pass/{draft}"], own)
    if data.get("trees") is not None:
        _add_trees(terms, data["trees"])
    return terms


def _add_trees(terms: dict[str, CostTable], trees: Mapping[str, Any]) -> None:
    terms["tree target"] = _beyond(_curve(trees["verify"]), terms["target"])
    for draft in trees["level"]:
        kinds = trees.get("kind_s", {}).get(draft, {})
        first, level = _curve(trees["first"][draft]), _curve(trees["level"][draft])
        head = terms[f"head/{draft}"].seconds[-1] if f"head/{draft}" in terms else 0.0
        if f"pass/{draft}" not in terms:  # a head, whose chains are trees
            terms[f"pass/{draft}"] = _less(level, head)
            terms[f"sampled pass/{draft}"] = _beyond(_curve(trees["sampled_level"][draft]), level)
        own = _beyond(level, terms[f"pass/{draft}"], head)
        context = float(np.median(level.knots[1]))
        for growth in ("top_k", "static", "classifier"):
            terms[f"{growth}/{draft}"] = _less(own, -float(kinds.get(growth, (0.0, 0.0))[0]))
        for name, block in (("stratify", "stratify"), ("tree stop", "stop")):
            terms[f"{name}/{draft}"] = _constant(kinds.get(block, (0.0, 0.0))[0])
        phase = terms[f"phase/{draft}"].at(passes=1.0) if f"phase/{draft}" in terms else 0.0
        once = first.at(rows=1.0, context=context) - level.at(rows=1.0, context=context) - phase
        terms[f"tree phase/{draft}"] = _constant(once)
        plain, sampled = trees.get("node_s", {}).get(draft, (0.0, 0.0))
        terms[f"tree near ties/{draft}"] = CostTable((float(plain),))
        terms[f"sampled tree near ties/{draft}"] = CostTable((float(sampled),))


def _constant(seconds: Any) -> CostTable:
    return CostTable((max(0.0, float(seconds)),))


def _curve(data: Mapping[str, Any]) -> CostTable:
    seconds = np.array(data.get("mean_s") or data["median_s"], dtype=np.float64)
    knots = tuple(float(w) for w in data["widths"]), tuple(float(c) for c in data["contexts"])
    return CostTable(tuple(np.maximum(0.0, seconds).ravel().tolist()), ("rows", "context"), knots)


def _over_rows(table: CostTable) -> CostTable:
    """A curve of one context."""
    return CostTable(table.seconds[:: len(table.knots[1])], ("rows",), table.knots[:1])


def _over_passes(seconds: FloatArray) -> CostTable:
    return CostTable(
        tuple(np.maximum(0.0, seconds).tolist()),
        ("passes",),
        (tuple(float(n) for n in range(1, len(seconds) + 1)),),
    )


def _less(table: CostTable, seconds: float) -> CostTable:
    return replace(table, seconds=tuple(max(0.0, s - seconds) for s in table.seconds))


def _beyond(table: CostTable, other: CostTable, more: float = 0.0) -> CostTable:
    """What a table over (rows, context) takes more than another, and ``more``, at its own knots."""
    rows, contexts = np.meshgrid(*table.knots, indexing="ij")
    apart = np.array(table.seconds) - other.at(rows=rows, context=contexts).ravel() - more
    return replace(table, seconds=tuple(np.maximum(0.0, apart).tolist()))
