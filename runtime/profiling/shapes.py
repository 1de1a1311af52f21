"""The axes and knots of every term of a profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from spectune.runtime.costs import MeasuredRound, StepLoad, step_terms
from spectune.runtime.profiling.fit import Prefill, Shapes

TARGET_ROWS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128)
FEW: Final = (1, 4, 16, 64)
"""Rows that a draft's pass reads, and passes of a round: every knot costs certainty, so there are
few."""
PROMPTS: Final = (0, 16, 64, 128, 256, 512, 1024)
"""Prompt tokens of an engine's step: of one request, or of a whole batch that was admitted at once.
"""


def shapes_of(
    drafts: Iterable[str],
    contexts: Sequence[int],
    rounds: Sequence[MeasuredRound],
    prefills: Sequence[Prefill],
) -> Shapes:
    """Axes and knots by term: ``contexts`` are the context's knots; the others end at the largest
    that was measured."""
    read = tuple(sorted({1.0, *(float(p.rows) for p in prefills)}))
    prompts = tuple(dict.fromkeys((read[0], read[len(read) // 2], read[-1])))
    rows = ("rows",)
    at = tuple(float(c) for c in sorted(set(contexts)))
    ends = tuple(dict.fromkeys((at[0], at[-1])))
    wide = _knots(TARGET_ROWS, max((r.drafted + 1 for r in rounds), default=1))
    nodes = tuple(dict.fromkeys((1.0, min(16.0, wide[-1]), wide[-1])))
    found: dict[str, tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]] = {
        "target": (("rows", "context"), (wide, at)),
        "tree target": (rows, (nodes,)),
        "sampled target": (rows, (nodes,)),
        "prefill/target": (rows, (prompts,)),
    }
    for draft in drafts:
        own = [r for r in rounds if r.kind.draft == draft and r.rows]
        reads = _knots(FEW, max((max(r.rows) for r in own), default=1))
        passes = _knots(FEW, max((len(r.rows) for r in own), default=1))
        line = (rows, (tuple(dict.fromkeys((1.0, reads[-1]))),))
        found |= {
            f"pass/{draft}": (("rows", "context"), (reads, ends)),
            f"prefill/{draft}": (rows, (prompts,)),
            f"sampled pass/{draft}": line,
        }
        if any(not r.kind.growth for r in own):
            found[f"phase/{draft}"] = (("passes",), (passes,))
            passes = tuple(dict.fromkeys((passes[0], passes[-1])))
        found[f"tree phase/{draft}"] = (("passes",), (passes,))
        found |= {f"{growth}/{draft}": line for growth in ("top_k", "static", "classifier")}
        for head, routed in (("head", False), ("gathered", True)):
            sizes = sorted({float(r.head) for r in own if r.head and r.kind.routed is routed})
            found |= {f"{head}/{draft}": (rows, (tuple(sizes),))} if sizes else {}
    # The other terms are constants, but for those of near ties, which are counted and not fitted.
    others = {
        "noise",
        *(t for r in rounds for t in (*r.kind.verification, *r.kind.per_pass, *r.kind.rest)),
    }
    return {**{name: ((), ()) for name in sorted(others) if name not in found}, **found}


def step_shapes(loads: Sequence[StepLoad]) -> Shapes:
    """Axes and knots of the terms of an engine's steps: few, between the least and the largest that
    were served."""
    places = {
        "rows": [load.rows for load in loads],
        "context": [load.context for load in loads],
        "prompts": [load.prompts for load in loads],
        "batch": [load.batch for load in loads],
    }
    rows, batch = _between(TARGET_ROWS, places["rows"]), _between(FEW, places["batch"])
    context, prompts = _between((), places["context"]), _between(PROMPTS, places["prompts"])
    step, target, read = (share.term for share in step_terms(loads[0]._replace(draft="")))
    found: dict[str, tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]] = {
        step: (("batch",), (batch,)),
        target: (("rows", "context"), (rows, context)),
        read: (("rows",), (prompts,)),
    }
    for draft in sorted({load.draft for load in loads if load.draft}):
        own = [load for load in loads if load.draft == draft]
        passes = _between((0, *FEW), [load.passes for load in own])
        seats = _between(FEW, [load.batch for load in own])
        found[[share.term for share in step_terms(own[0])][-1]] = (
            ("passes", "batch"),
            (passes, seats),
        )
    return found


def _between(grid: Sequence[int], places: Sequence[float]) -> tuple[float, ...]:
    """The least place, the knots of a grid above it, and the largest."""
    least, most = float(min(places)), float(max(places))
    return tuple(dict.fromkeys((least, *(float(k) for k in grid if least < k < most), most)))


def _knots(grid: Sequence[int], most: float) -> tuple[float, ...]:
    """The knots of a grid up to the largest place measured, which ends them."""
    return (*(float(k) for k in grid if k < most), float(most))
