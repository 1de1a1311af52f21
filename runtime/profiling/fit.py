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
from collections.abc import Mapping, Sequence
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
from spectune.traces.cost_table import CostTable, FloatArray
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


Shapes = Mapping[str, tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]]
"""Axes and knots by term."""


def fit_terms(
    shapes: Shapes, loads: Sequence[Sequence[Share]], seconds: Sequence[float]
) -> dict[str, CostTable]:
    """The tables of ``shapes`` whose sums over each load come nearest to ``seconds`` > 0. Terms
    that no load holds are left out."""
    named = {name for load in loads for name, *_ in load}
    used = {name: shape for name, shape in shapes.items() if name in named}
    if not used:
        return {}
    empty: dict[str, CostTable] = {}
    places: dict[str, slice] = {}
    size = 0
    for name, (axes, knots) in used.items():
        values = math.prod(len(k) for k in knots)
        empty[name] = CostTable((0.0,) * values, axes, knots)
        places[name] = slice(size, size + values)
        size += values
    design = np.zeros((len(loads), size))
    shares: dict[str, list[tuple[float, ...]]] = {name: [] for name in used}
    for i, load in enumerate(loads):
        for name, *where in load:
            if name in used:
                shares[name].append((i, *where))
    rough = []
    for name, table in empty.items():
        i, count, rows, context, passes, batch = np.array(shares[name]).T
        weights = table.weights(
            {"rows": rows, "context": context, "passes": passes, "batch": batch}
        )
        np.add.at(design[:, places[name]], i.astype(np.int64), count[:, None] * weights)
        block = _roughness(table.knots)
        rough.append(np.zeros((len(block), size)))
        rough[-1][:, places[name]] = block
    rises = block_diag(*(_rises([len(k) for k in table.knots]) for table in empty.values()))
    found = rises @ _huber(design @ rises, np.array(seconds), np.concatenate(rough) @ rises)
    return {
        name: replace(table, seconds=tuple(found[places[name]].tolist()))
        for name, table in empty.items()
    }


def _huber(design: FloatArray, y: FloatArray, rough: FloatArray) -> FloatArray:
    """x >= 0 that brings ``design`` @ x nearest to ``y`` by Huber's loss of errors relative to it,
    and ``rough`` @ x nearest to 0."""
    unit = np.maximum(
        1e-12, design.max(0)
    )  # columns of one size: seconds per row and per round differ a thousandfold
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
    """``profile`` with terms fitted to rounds and prefills. Rounds with canonical passes tell how
    often near ties come, and nothing else."""
    plain = [r for r in rounds if r.canonical == (0, 0)]
    drafting = [r for r in plain if r.rows]
    terms = fit_terms(shapes, [_prefill_load(p) for p in prefills], [p.seconds for p in prefills])
    terms |= fit_terms(
        shapes, [list(drafting_terms(r)) for r in drafting], [r.draft_s for r in drafting]
    )
    terms |= fit_terms(
        shapes, [list(verification_terms(r)) for r in plain], [r.verify_s for r in plain]
    )
    terms |= fit_terms(
        shapes,
        [list(rest_terms(r)) for r in plain],
        [max(1e-7, r.round_s - r.draft_s - r.verify_s) for r in plain],
    )
    terms |= _near_ties(terms, rounds, shapes["target"][1][1])
    return replace(profile, terms=terms)


def fit_steps(
    profile: LatencyProfile, shapes: Shapes, loads: Sequence[StepLoad], seconds: Sequence[float]
) -> LatencyProfile:
    """``profile`` with the terms of an engine's steps, fitted to steps that it served."""
    terms = fit_terms(shapes, [list(step_terms(load)) for load in loads], seconds)
    return replace(profile, terms={**profile.terms, **terms})


def _prefill_load(prefill: Prefill) -> list[Share]:
    models = ["target", *([prefill.draft] if prefill.draft else [])]
    return [Share(f"prefill/{name}", 1.0, float(prefill.rows), 0.0, 0.0) for name in models]


def _near_ties(
    terms: Mapping[str, CostTable], rounds: Sequence[MeasuredRound], contexts: Sequence[float]
) -> dict[str, CostTable]:
    """What near ties cost per emitted token and per distribution of a draft: how often they came,
    times a canonical pass, which reads the whole prefix as a prefill does. A head's are mostly the
    target's passes."""
    language_models = {r.kind.draft for r in rounds if not r.kind.growth}
    counts: dict[str, tuple[str, list[tuple[int, int]]]] = {}
    for r in rounds:
        counts.setdefault(r.kind.per_token[0], ("target", []))[1].append(
            (r.canonical[1], r.emitted)
        )
        if r.rows:
            reader = r.kind.draft if r.kind.draft in language_models else "target"
            counts.setdefault(r.kind.per_distribution, (reader, []))[1].append(
                (r.canonical[0], 1 + sum(r.rows[1:]))
            )
    made = {}
    for name, (reader, found) in counts.items():
        table = terms.get(f"prefill/{reader}")
        if table is not None:
            passes, distributions = np.sum(found, axis=0).tolist()
            seconds = passes / distributions * table.at(rows=np.array(contexts))
            made[name] = CostTable(tuple(seconds.tolist()), ("context",), (tuple(contexts),))
    return made


def refit_scale(
    profile: LatencyProfile, predicted: Sequence[float], executed: Sequence[float]
) -> LatencyProfile:
    """The profile at the pace of other executions: scaled by the median ratio of executed seconds
    to those predicted."""
    ratios = [e / p for p, e in zip(predicted, executed, strict=True) if p > 0 and e > 0]
    return profile.scaled(float(np.median(ratios))) if ratios else profile
