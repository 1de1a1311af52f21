"""Latency profiles as they were stored before they consisted of terms: curves over (width, context)
of every part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spectune.traces.cost_table import CostTable, FloatArray


def terms_of_curves(data: Mapping[str, Any]) -> dict[str, CostTable]:
    """The terms of an old document. Differences that were negative (what a tree's pass took less
    than a chain's) become 0."""
    terms: dict[str, CostTable] = {}

    def put(name: str, seconds: float) -> None:
        terms[name] = CostTable((max(0.0, float(seconds)),))

    verify, trees = _curve(data["verify"]), data.get("trees")
    terms["target"], terms["prefill/target"] = verify, _over_rows(_curve(data["prefill"]))
    for name, key in (("round", "overhead_s"), ("noise", "noise_s"), ("request", "request_s")):
        put(name, data.get(key, 0.0))
    terms["sampled target"] = CostTable(
        (0.0, float(data.get("sample_s", 0.0))), ("rows",), ((0.0, 1.0),)
    )
    for kind, seconds in data.get("stop_step_s", {}).items():
        put(f"stop {kind}", seconds)
    for draft, curve in data["draft_step"].items():
        steps, bends = _curve(curve), data.get("draft_bend_s", {}).get(draft) or (0.0, 0.0)
        once = np.array(bends[1:]) + data.get("draft_phase_s", {}).get(draft, 0.0)
        # Passes that got quicker within a round had a negative bend: here every pass is as quick as
        # in the round of the quickest.
        line = float(steps.at(rows=1.0, context=np.median(steps.knots[1]))) * np.arange(
            1, len(bends)
        )
        quickest = min(1.0, float(((once + line) / line).min()))
        terms[f"pass/{draft}"] = CostTable(
            tuple(quickest * s for s in steps.seconds), steps.axes, steps.knots
        )
        terms[f"phase/{draft}"] = _over_passes(once + (1.0 - quickest) * line)
        put(f"sampled pass/{draft}", data.get("draft_sample_s", 0.0))
    for draft, curve in data["draft_prefill"].items():
        terms[f"prefill/{draft}"] = _over_rows(_curve(curve))
    for draft, curves in data.get("shortlist_s", {}).items():
        # Curves of whole passes: the head's own share is what they differ by.
        tables = {kind: _over_rows(_curve(curves[kind])) for kind in ("full", "fixed", "routed")}
        least = min(s for t in tables.values() for s in t.seconds)
        sizes = dict(zip(tables["fixed"].knots[0], tables["fixed"].seconds, strict=True))
        sizes |= dict(zip(tables["full"].knots[0], tables["full"].seconds, strict=True))
        head = CostTable(tuple(sizes[k] for k in sorted(sizes)), ("rows",), (tuple(sorted(sizes)),))
        terms[f"head/{draft}"], terms[f"gathered/{draft}"] = (
            _less(head, least),
            _less(tables["routed"], least),
        )
        if f"pass/{draft}" in terms:  # which held the whole head
            terms[f"pass/{draft}"] = _less(
                terms[f"pass/{draft}"], terms[f"head/{draft}"].seconds[-1]
            )
    if trees is not None:
        _add_trees(terms, trees)
    return terms


def _add_trees(terms: dict[str, CostTable], trees: Mapping[str, Any]) -> None:
    verify = _curve(trees["verify"])
    terms["tree target"] = _beyond(verify, terms["target"])
    for draft in trees["level"]:
        first, level = _curve(trees["first"][draft]), _curve(trees["level"][draft])
        head = terms[f"head/{draft}"].seconds[-1] if f"head/{draft}" in terms else 0.0
        if f"pass/{draft}" not in terms:  # a head, whose chains are trees
            terms[f"pass/{draft}"] = _less(level, head)
            terms[f"sampled pass/{draft}"] = _beyond(_curve(trees["sampled_level"][draft]), level)
        own = _beyond(level, terms[f"pass/{draft}"], head)
        context = float(np.median(level.knots[1]))
        for growth in ("top_k", "static", "classifier"):
            more = float(trees.get("kind_s", {}).get(draft, {}).get(growth, (0.0, 0.0))[0])
            terms[f"{growth}/{draft}"] = CostTable(
                tuple(max(0.0, s + more) for s in own.seconds), own.axes, own.knots
            )
        for name, block in ((f"stratify/{draft}", "stratify"), (f"tree stop/{draft}", "stop")):
            terms[name] = CostTable(
                (max(0.0, float(trees.get("kind_s", {}).get(draft, {}).get(block, (0.0, 0.0))[0])),)
            )
        phase = terms[f"phase/{draft}"].at(passes=1.0) if f"phase/{draft}" in terms else 0.0
        once = first.at(rows=1.0, context=context) - level.at(rows=1.0, context=context) - phase
        terms[f"tree phase/{draft}"] = CostTable((max(0.0, float(once)),))
        for prefix, seconds in zip(
            ("", "sampled "), trees.get("node_s", {}).get(draft, (0.0, 0.0)), strict=True
        ):
            terms[f"{prefix}tree near ties/{draft}"] = CostTable((float(seconds),))


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
    return CostTable(tuple(max(0.0, s - seconds) for s in table.seconds), table.axes, table.knots)


def _beyond(table: CostTable, other: CostTable, more: float = 0.0) -> CostTable:
    """What a table over (rows, context) takes more than another, and ``more``, at its own knots."""
    rows, contexts = np.meshgrid(*table.knots, indexing="ij")
    apart = np.array(table.seconds) - other.at(rows=rows, context=contexts).ravel() - more
    return CostTable(tuple(np.maximum(0.0, apart).tolist()), table.axes, table.knots)
