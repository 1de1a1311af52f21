"""What a step of an engine costs that serves many requests at once: its terms, their fit to steps
that were served, and their sum in compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from spectune.runtime.costs import Share
from spectune.runtime.policies.jit import compiled
from spectune.runtime.profiling.regression import (
    FEW,
    TARGET_ROWS,
    Shapes,
    fit_terms,
    knots_between,
    table_over,
)
from spectune.traces.cost_table import CostTable, FloatArray
from spectune.traces.errors import PolicyError
from spectune.traces.tables import LatencyProfile

PROMPTS: Final = (0, 16, 64, 128, 256, 512, 1024)
"""Knots of prompt tokens in a step: of one request, or of a whole batch admitted at once."""


class StepLoad(NamedTuple):
    """What a step of an engine reads, which is a round of every request that it holds: ``rows``
    tokens verified, ``prompts`` tokens of prompts, of ``batch`` requests whose caches hold
    ``context`` tokens together, and ``passes`` of the draft that the engine has loaded (none:
    ``draft`` is empty). 0 passes of a loaded draft are not free: it reads what the target reads."""

    draft: str
    rows: float
    prompts: float
    batch: float
    context: float
    passes: float


def step_terms(load: StepLoad) -> list[Share]:
    """The terms of a step, in the order of :class:`StepCosts`."""
    shares = [
        Share("step", batch=load.batch),
        Share("step target", rows=load.rows, context=load.context),
        Share("step prompts", rows=load.prompts),
    ]
    if load.draft:
        shares.append(Share(f"step draft/{load.draft}", passes=load.passes, batch=load.batch))
        shares.append(Share(f"step draft prompts/{load.draft}", rows=load.prompts))
    return shares


def step_shapes(loads: Sequence[StepLoad]) -> Shapes:
    """The tables to fit to steps: few knots, between the least and the largest that were served."""

    def between(grid: Sequence[int], name: str, served: Sequence[StepLoad] = loads) -> list[float]:
        return knots_between(grid, [getattr(load, name) for load in served])

    step, target, prompts = (share.term for share in step_terms(loads[0]._replace(draft="")))
    shapes = {
        step: table_over(batch=between(FEW, "batch")),
        target: table_over(rows=between(TARGET_ROWS, "rows"), context=between((), "context")),
        prompts: table_over(rows=between(PROMPTS, "prompts")),
    }
    for draft in sorted({load.draft for load in loads if load.draft}):
        served = [load for load in loads if load.draft == draft]
        *_, drafting, reading = (share.term for share in step_terms(served[0]))
        passes, batch = between((0, *FEW), "passes", served), between(FEW, "batch", served)
        shapes[drafting] = table_over(passes=passes, batch=batch)
        # A third knot: a line through three is not rough, the slope between two is.
        shapes[reading] = table_over(rows=between((256,), "prompts"))
    return shapes


def fit_steps(
    profile: LatencyProfile, loads: Sequence[StepLoad], seconds: Sequence[float]
) -> LatencyProfile:
    """``profile`` with the terms of an engine's steps, fitted to steps that it served."""
    terms = fit_terms(step_shapes(loads), [step_terms(load) for load in loads], seconds)
    return replace(profile, terms={**profile.terms, **terms})


class Surface(NamedTuple):
    """A table as compiled code reads it: ``seconds`` [x, y] at knots of its two axes, of which one
    that it does not have is [0]."""

    x: FloatArray
    y: FloatArray
    seconds: FloatArray


class StepCosts(NamedTuple):
    """The terms of :func:`step_terms` over (batch), (rows, context), (tokens of prompts), (passes,
    batch) and again (tokens of prompts)."""

    step: Surface
    target: Surface
    prompts: Surface
    draft: Surface
    draft_prompts: Surface


def step_costs(profile: LatencyProfile, draft: str) -> StepCosts:
    """The costs of the steps of an engine that has loaded ``draft`` (empty: none). Raises
    PolicyError where the profile has none."""
    terms = [share.term for share in step_terms(StepLoad(draft, 0, 0, 1, 0, 0))]
    if not profile.terms.keys() >= set(terms):
        raise PolicyError(
            f"no steps of an engine that drafts with {draft or 'nothing'} were recorded, so what "
            "they cost is not known"
        )
    free = [CostTable((0.0,))] * (0 if draft else 2)
    return StepCosts(*map(_surface, [*(profile.terms[term] for term in terms), *free]))


def _surface(table: CostTable) -> Surface:
    x, y, *_ = (*table.knots, (0.0,), (0.0,))
    return Surface(np.array(x), np.array(y), np.array(table.seconds).reshape(len(x), len(y)))


@compiled(inline=True)
def _segment(knots: FloatArray, place: float) -> tuple[int, float]:
    """The knot before a place, or the last but one, and how far the place is on the way to the
    next."""
    last, n = len(knots) - 2, 0
    if last < 0:
        return 0, 0.0
    while n < last and place >= knots[n + 1]:
        n += 1
    return n, (place - knots[n]) / (knots[n + 1] - knots[n])


@compiled(inline=True)
def _surface_seconds(surface: Surface, x: float, y: float) -> float:
    i, right = _segment(surface.x, x)
    j, up = _segment(surface.y, y)
    k, m = min(i + 1, len(surface.x) - 1), min(j + 1, len(surface.y) - 1)
    low = surface.seconds[i, j] * (1.0 - up) + surface.seconds[i, m] * up
    high = surface.seconds[k, j] * (1.0 - up) + surface.seconds[k, m] * up
    return float(max(0.0, low * (1.0 - right) + high * right))


@compiled(inline=True)
def step_seconds(
    costs: StepCosts, rows: float, prompts: float, batch: float, context: float, passes: float
) -> float:
    """Seconds of a step; its arguments are :class:`StepLoad`'s."""
    return (
        _surface_seconds(costs.step, batch, 0.0)
        + _surface_seconds(costs.target, rows, context)
        + _surface_seconds(costs.prompts, prompts, 0.0)
        + _surface_seconds(costs.draft, passes, batch)
        + _surface_seconds(costs.draft_prompts, prompts, 0.0)
    )
