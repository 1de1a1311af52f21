"""Terms fitted to measured rounds: robust non-negative least squares over the hat functions of
their knots.

Drafting, verification, the rest of a round and what precedes the rounds of a request are measured
apart and fitted apart. Errors are relative. Seconds that a busy machine stretches are weighed down
by Huber's weights (iteratively reweighted). A term never falls from one knot to the next, and a
weak penalty on changes of slope (a P-spline's, Eilers and Marx 1996) carries it over knots that few
rounds touch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from scipy.linalg import block_diag
from scipy.optimize import nnls

from spectune.runtime.costs import (
    FURTHER_ROUND,
    FURTHER_TARGET,
    MeasuredRound,
    MeasuredStep,
    RoundKind,
    Share,
    by_term,
    step_shares,
)
from spectune.traces.cost_table import AXES, CostTable, FloatArray
from spectune.traces.tables import LatencyProfile

HUBER: Final = 1.345
"""Huber's constant: residuals beyond so many standard deviations count less (95% efficient where
noise is normal)."""
ITERATIONS: Final = 12
SMOOTH: Final = 0.02
"""Weight of the penalty on changes of slope, beside rounds of weight 1."""


class Prefill(NamedTuple):
    """Seconds in which the target, and ``draft`` unless it is empty, read ``rows`` prompt tokens
    before the first round."""

    draft: str
    rows: int
    seconds: float

    def shares(self) -> list[Share]:
        """The terms that a prefill consists of."""
        models = filter(None, ("target", self.draft))
        return [Share(f"prefill/{name}", rows=self.rows) for name in models]


Shapes = Mapping[str, CostTable]
"""Tables by term whose knots count; their seconds are to be fitted."""

TARGET_ROWS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
FEW: Final = (1, 4, 16, 64, 256)
"""Rows that a draft's pass reads, and passes of a round: every knot costs certainty, so there are
few."""


def table_over(**knots: Iterable[float]) -> CostTable:
    """A table to be fitted over these axes, a constant without axes; knots may repeat."""
    places = tuple(tuple(dict.fromkeys(map(float, axis))) for axis in knots.values())
    return CostTable((0.0,) * math.prod(map(len, places)), tuple(knots), places)


def knots_between(grid: Iterable[int], places: Iterable[float]) -> list[float]:
    """The least place, the knots of a grid above it, and the largest."""
    ordered = sorted(map(float, places))
    inner = (float(knot) for knot in grid if ordered[0] < knot < ordered[-1])
    return [ordered[0], *inner, ordered[-1]]


def shapes_of(
    drafts: Iterable[str],
    contexts: Sequence[int],
    steps: Sequence[MeasuredStep],
    prefills: Sequence[Prefill],
) -> Shapes:
    """The tables of a profile: ``contexts`` are the context's knots, beside the largest of several
    requests together; the others end at the largest that was measured."""
    lengths = sorted({1, *(p.rows for p in prefills)})
    prompts = table_over(rows=(lengths[0], lengths[len(lengths) // 2], lengths[-1]))
    contexts = sorted(contexts)
    most = max((sum(r.context for r in step) for step in steps if len(step) > 1), default=0)
    contexts += [most] if most > contexts[-1] else []
    verified = knots_between(TARGET_ROWS, [1, *(sum(r.drafted + 1 for r in s) for s in steps)])
    nodes = table_over(rows=(1, min(16.0, verified[-1]), verified[-1]))
    shapes = {
        "target": table_over(rows=verified, context=contexts),
        "tree target": nodes,
        "sampled target": nodes,
        "prefill/target": prompts,
    }
    for draft in drafts:
        drafting = [
            [r for r in step if r.rows]
            for step in steps
            if any(r.kind.draft == draft and r.rows for r in step)
        ]
        drafted = [r for step in drafting for r in step]
        longest = [max(len(r.rows) for r in step) for step in drafting]
        passes_rows = [
            sum(r.rows[level] for r in step if len(r.rows) > level)
            for step, levels in zip(drafting, longest, strict=True)
            for level in range(levels)
        ]
        rows = knots_between(FEW, [1, max(passes_rows, default=1)])
        passes = knots_between(FEW, [1, max(longest, default=1)])
        line = table_over(rows=(1, rows[-1]))
        shapes[f"pass/{draft}"] = table_over(rows=rows, context=(contexts[0], contexts[-1]))
        shapes[f"prefill/{draft}"] = prompts
        shapes[f"sampled pass/{draft}"] = line
        if any(not r.kind.growth for r in drafted):
            shapes[f"phase/{draft}"] = table_over(passes=passes)
            passes = [passes[0], passes[-1]]
        shapes[f"tree phase/{draft}"] = table_over(passes=passes)
        shapes |= {f"{growth}/{draft}": line for growth in ("top_k", "static", "classifier")}
        for routed in (False, True):
            if sizes := {r.head for r in drafted if r.head and r.kind.routed is routed}:
                head = RoundKind(draft, routed=routed).terms.head
                shapes[head] = table_over(rows=sorted(sizes))
    # Of the requests beyond one, and the other terms, which are constants.
    charged = {r.kind.terms for step in steps for r in step}
    further = {t.further_pass for t in charged if t.further_pass} | {FURTHER_TARGET, FURTHER_ROUND}
    beyond = sorted({1, *(len(step) - 1 for step in steps if len(step) > 1)})
    shapes |= {name: table_over(batch=knots_between(FEW, beyond)) for name in sorted(further)}
    names = {"noise"}.union(*(t.verification + t.per_pass + t.rest for t in charged))
    return {**{name: table_over() for name in sorted(names - shapes.keys())}, **shapes}


def fit_terms(
    shapes: Shapes, loads: Sequence[Sequence[Share]], seconds: Sequence[float]
) -> dict[str, CostTable]:
    """The tables of ``shapes`` whose sums over each load come nearest to ``seconds`` > 0. Terms
    that no load holds are left out."""
    shares = by_term(loads)
    used = {name: table for name, table in shapes.items() if name in shares}
    if not used:
        return {}
    blocks = []
    for name, table in used.items():
        i, times, *places = shares[name]
        weights = table.weights(dict(zip(AXES, places, strict=True)))
        blocks.append(np.zeros((len(loads), len(table.seconds))))
        np.add.at(blocks[-1], i.astype(np.int64), times[:, None] * weights)
    rises = block_diag(*(_rises([len(k) for k in table.knots]) for table in used.values()))
    rough = block_diag(*(_roughness(table.knots) for table in used.values()))
    design = np.concatenate(blocks, axis=1)
    fitted = rises @ _huber(design @ rises, np.array(seconds), rough @ rises)
    ends = np.cumsum([len(table.seconds) for table in used.values()])[:-1]
    return {
        name: replace(table, seconds=tuple(part.tolist()))
        for (name, table), part in zip(used.items(), np.split(fitted, ends), strict=True)
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
        table = np.kron(table, np.tri(n)).astype(np.float64)
    return table


def _roughness(knots: Sequence[Sequence[float]]) -> FloatArray:
    """Second differences of a table along each of its axes (first ones where it has two knots),
    [differences, size]. They are differences of slopes: a line is not rough however its knots lie.
    """
    shape = [len(places) for places in knots]
    size = math.prod(shape)
    unit = np.eye(size).reshape(*shape, size)
    blocks = [np.tensordot(_differences(p), unit, (1, axis)) for axis, p in enumerate(knots)]
    return np.concatenate([np.zeros((0, size)), *(block.reshape(-1, size) for block in blocks)])


def _differences(places: Sequence[float]) -> FloatArray:
    """Rows of weights of which each makes of three knots the difference of two slopes times their
    mean distance (1, -2, 1 where that is one), and of two knots their difference: float64
    [differences, knots]."""
    rises = np.diff(np.eye(len(places)), axis=0)
    if len(places) == 2:
        return rises
    gaps = np.diff(places)[:, None]
    differences: FloatArray = np.diff(rises / gaps, axis=0) * (gaps[:-1] + gaps[1:]) / 2
    return differences


def fit_profile(
    profile: LatencyProfile,
    shapes: Shapes,
    steps: Sequence[MeasuredStep],
    prefills: Sequence[Prefill],
) -> LatencyProfile:
    """``profile`` with terms fitted to steps and prefills."""
    drafting, verification, rest = zip(*map(step_shares, steps), strict=True)
    first: list[MeasuredRound] = [step[0] for step in steps]
    # A round whose text is about to end drafts nothing beside others that do.
    longest = [max(r.draft_s for r in step) for step in steps]
    drafted_s = [seconds for load, seconds in zip(drafting, longest, strict=True) if load]
    rest_s = [
        max(1e-7, r.round_s - draft_s - r.verify_s)
        for r, draft_s in zip(first, longest, strict=True)
    ]
    terms: dict[str, CostTable] = {}
    for loads, seconds in (
        ([p.shares() for p in prefills], [p.seconds for p in prefills]),
        ([load for load in drafting if load], drafted_s),
        (verification, [r.verify_s for r in first]),
        (rest, rest_s),
    ):
        terms |= fit_terms(shapes, loads, seconds)
    return replace(profile, terms=terms)
