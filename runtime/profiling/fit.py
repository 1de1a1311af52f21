"""Terms fitted to measured rounds: robust non-negative least squares over the hat functions of
their knots.

Drafting, verification, the rest of a round and what precedes the rounds of a request are measured
apart and fitted apart. Errors are relative. Seconds that a busy machine stretches are weighed down
by Huber's weights (iteratively reweighted). A term never falls from one knot to the next, and a
weak penalty on changes of slope (a P-spline's, Eilers and Marx 1996) carries it over knots that few
rounds touch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from scipy.linalg import block_diag
from scipy.optimize import nnls

from spectune.runtime.costs import (
    MeasuredRound,
    Share,
    StepLoad,
    drafting_terms,
    rest_terms,
    step_terms,
    verification_terms,
)
from spectune.traces.cost_table import AXES, CostTable, FloatArray
from spectune.traces.latency import LatencyProfile

HUBER: Final = 1.345
"""Huber's constant: residuals beyond so many standard deviations count less (95% efficient where
noise is normal)."""
ITERATIONS: Final = 12
SMOOTH: Final = 0.02
"""Weight of the penalty on changes of slope, beside rounds of weight 1."""


class Prefill(NamedTuple):
    """Seconds before a request's first round; ``draft`` is empty where none read the prompt, of
    which ``rows`` tokens were read."""

    draft: str
    rows: int
    seconds: float


Shapes = Mapping[str, CostTable]
"""Tables by term, of which the knots count and the seconds are to be found."""

TARGET_ROWS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128)
FEW: Final = (1, 4, 16, 64)
"""Rows that a draft's pass reads, and passes of a round: every knot costs certainty, so there are
few."""
PROMPTS: Final = (0, 16, 64, 128, 256, 512, 1024)
"""Prompt tokens of an engine's step: of one request, or of a whole batch that was admitted at once.
"""


def _over(**knots: Iterable[float]) -> CostTable:
    """A table over these axes, without axes a constant."""
    places = tuple(tuple(dict.fromkeys(float(k) for k in own)) for own in knots.values())
    return CostTable((0.0,) * math.prod(map(len, places)), tuple(knots), places)


def _between(grid: Sequence[int], places: Iterable[float]) -> list[float]:
    """The least place, the knots of a grid above it, and the largest."""
    found = sorted(map(float, places))
    return [found[0], *(float(k) for k in grid if found[0] < k < found[-1]), found[-1]]


def shapes_of(
    drafts: Iterable[str],
    contexts: Sequence[int],
    rounds: Sequence[MeasuredRound],
    prefills: Sequence[Prefill],
) -> Shapes:
    """The tables of a profile: ``contexts`` are the context's knots; the others end at the largest
    that was measured."""
    read = sorted({1, *(p.rows for p in prefills)})
    prompts = read[0], read[len(read) // 2], read[-1]
    at = sorted(set(contexts))
    wide = _between(TARGET_ROWS, [1, *(r.drafted + 1 for r in rounds)])
    nodes = _over(rows=(1, min(16.0, wide[-1]), wide[-1]))
    found = {
        "target": _over(rows=wide, context=at),
        "tree target": nodes,
        "sampled target": nodes,
        "prefill/target": _over(rows=prompts),
    }
    for draft in drafts:
        own = [r for r in rounds if r.kind.draft == draft and r.rows]
        reads = _between(FEW, [1, *(max(r.rows) for r in own)])
        passes = _between(FEW, [1, *(len(r.rows) for r in own)])
        line = _over(rows=(1, reads[-1]))
        found |= {
            f"pass/{draft}": _over(rows=reads, context=(at[0], at[-1])),
            f"prefill/{draft}": _over(rows=prompts),
            f"sampled pass/{draft}": line,
        }
        if any(not r.kind.growth for r in own):
            found[f"phase/{draft}"] = _over(passes=passes)
            passes = [passes[0], passes[-1]]
        found[f"tree phase/{draft}"] = _over(passes=passes)
        found |= {f"{growth}/{draft}": line for growth in ("top_k", "static", "classifier")}
        for head, routed in (("head", False), ("gathered", True)):
            sizes = sorted({r.head for r in own if r.head and r.kind.routed is routed})
            found |= {f"{head}/{draft}": _over(rows=sizes)} if sizes else {}
    # The other terms are constants.
    kinds = {r.kind for r in rounds}
    others = {"noise"}.union(*((*k.verification, *k.per_pass, *k.rest) for k in kinds))
    return {**{name: _over() for name in sorted(others - found.keys())}, **found}


def step_shapes(loads: Sequence[StepLoad]) -> Shapes:
    """The tables of an engine's steps: few knots, between the least and the largest that were
    served."""

    def between(grid: Sequence[int], name: str, of: Sequence[StepLoad] = loads) -> list[float]:
        return _between(grid, [getattr(load, name) for load in of])

    step, target, read = (share.term for share in step_terms(loads[0]._replace(draft="")))
    prompts = between(PROMPTS, "prompts")
    rows, context = between(TARGET_ROWS, "rows"), between((), "context")
    found = {
        step: _over(batch=between(FEW, "batch")),
        target: _over(rows=rows, context=context),
        read: _over(rows=prompts),
    }
    for draft in sorted({load.draft for load in loads if load.draft}):
        own = [load for load in loads if load.draft == draft]
        *_, drafting, reading = (share.term for share in step_terms(own[0]))
        passes, batch = between((0, *FEW), "passes", own), between(FEW, "batch", own)
        found[drafting] = _over(passes=passes, batch=batch)
        # A third knot: a line through three is not rough, the slope between two is.
        found[reading] = _over(rows=_between((256,), prompts))
    return found


def fit_terms(
    shapes: Shapes, loads: Sequence[Sequence[Share]], seconds: Sequence[float]
) -> dict[str, CostTable]:
    """The tables of ``shapes`` whose sums over each load come nearest to ``seconds`` > 0. Terms
    that no load holds are left out."""
    shares: dict[str, list[tuple[float, ...]]] = {}
    for i, load in enumerate(loads):
        for name, *where in load:
            shares.setdefault(name, []).append((i, *where))
    used = {name: table for name, table in shapes.items() if name in shares}
    if not used:
        return {}
    blocks = []
    for name, table in used.items():
        i, count, *places = np.array(shares[name]).T
        weights = table.weights(dict(zip(AXES, places, strict=True)))
        blocks.append(np.zeros((len(loads), len(table.seconds))))
        np.add.at(blocks[-1], i.astype(np.int64), count[:, None] * weights)
    rises = block_diag(*(_rises([len(k) for k in table.knots]) for table in used.values()))
    rough = block_diag(*(_roughness(table.knots) for table in used.values()))
    design = np.concatenate(blocks, axis=1)
    found = rises @ _huber(design @ rises, np.array(seconds), rough @ rises)
    ends = np.cumsum([len(table.seconds) for table in used.values()])[:-1]
    return {
        name: replace(table, seconds=tuple(own.tolist()))
        for (name, table), own in zip(used.items(), np.split(found, ends), strict=True)
    }


def _huber(design: FloatArray, y: FloatArray, rough: FloatArray) -> FloatArray:
    """x >= 0 that brings ``design`` @ x nearest to ``y`` by Huber's loss of errors relative to it,
    and ``rough`` @ x nearest to 0."""
    # Columns of one size: seconds per row and per round differ a thousandfold.
    unit = np.maximum(1e-12, design.max(0))
    matrix, penalty = design / unit, SMOOTH * np.sqrt(len(y)) * rough / unit
    weights, predicted = np.ones(len(y)), y
    x = np.zeros(design.shape[1])
    for _ in range(ITERATIONS):
        scale = np.sqrt(weights) / predicted
        rows = np.concatenate([matrix * scale[:, None], penalty / np.median(y)])
        x = nnls(rows, np.concatenate([y * scale, np.zeros(len(rough))]), maxiter=30 * len(x))[0]
        predicted = np.maximum(matrix @ x, 0.1 * y)
        residual = np.abs(y / predicted - 1.0)
        spread = max(1e-9, 1.4826 * float(np.median(residual)))
        weights = np.minimum(1.0, HUBER * spread / np.maximum(residual, 1e-12))
    return np.asarray(x / unit)


def _rises(shape: Sequence[int]) -> FloatArray:
    """What makes a table of its first value and its rises from knot to knot, [size, size]: as none
    is negative, more rows, passes or context never take less."""
    table: FloatArray = np.ones((1, 1))
    for n in shape:
        table = np.asarray(np.kron(table, np.tri(n)), np.float64)
    return table


def _roughness(knots: Sequence[Sequence[float]]) -> FloatArray:
    """Second differences of a table along each of its axes (first ones where it has two knots),
    [differences, size]. They are differences of slopes: a line is not rough however its knots lie.
    """
    shape = [len(k) for k in knots]
    size = int(np.prod(shape, initial=1))
    index, rows = np.arange(size).reshape(shape), [np.zeros((0, size))]
    for axis, places in enumerate(knots):
        lines = np.moveaxis(index, axis, 0)
        for first, stencil in enumerate(_differences(places)):
            block = np.zeros((lines[0].size, size))
            for k, value in enumerate(stencil):
                block[np.arange(lines[0].size), lines[first + k].ravel()] = value
            rows.append(block)
    return np.concatenate(rows)


def _differences(places: Sequence[float]) -> list[tuple[float, ...]]:
    """Of each three knots the weights whose sum is the difference of two slopes times their mean
    distance: 1, -2, 1 where that is one; of two knots their difference."""
    if len(places) == 2:
        return [(1.0, -1.0)]
    gaps = [b - a for a, b in pairwise(places)]
    means = [(a + b) / 2 for a, b in pairwise(gaps)]
    return [(m / a, -m / a - m / b, m / b) for m, (a, b) in zip(means, pairwise(gaps), strict=True)]


def fit_profile(
    profile: LatencyProfile,
    shapes: Shapes,
    rounds: Sequence[MeasuredRound],
    prefills: Sequence[Prefill],
) -> LatencyProfile:
    """``profile`` with terms fitted to rounds and prefills."""
    drafting = [r for r in rounds if r.rows]
    rest = [max(1e-7, r.round_s - r.draft_s - r.verify_s) for r in rounds]
    terms = fit_terms(shapes, [_prefill_load(p) for p in prefills], [p.seconds for p in prefills])
    for found, of, seconds in (
        (drafting, drafting_terms, [r.draft_s for r in drafting]),
        (rounds, verification_terms, [r.verify_s for r in rounds]),
        (rounds, rest_terms, rest),
    ):
        terms |= fit_terms(shapes, [list(of(r)) for r in found], seconds)
    return replace(profile, terms=terms)


def fit_steps(
    profile: LatencyProfile, shapes: Shapes, loads: Sequence[StepLoad], seconds: Sequence[float]
) -> LatencyProfile:
    """``profile`` with the terms of an engine's steps, fitted to steps that it served."""
    terms = fit_terms(shapes, [list(step_terms(load)) for load in loads], seconds)
    return replace(profile, terms={**profile.terms, **terms})


def _prefill_load(prefill: Prefill) -> list[Share]:
    models = filter(None, ("target", prefill.draft))
    return [Share(f"prefill/{name}", 1.0, float(prefill.rows), 0.0, 0.0) for name in models]
