"""Two recordings, runs or policies side by side, on the requests that both decoded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import stdtrit
from sqlalchemy import func, or_, select

from spectune.db import NotFoundError
from spectune.traces.conversations import conversations, summed, variance_of_mean
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore
from spectune.traces.store.query import EVERYTHING, SUMS, TraceFilter, conditions_of, rates
from spectune.traces.tables import Run
from spectune.traces.views import REQUESTS


def compare(
    store: TraceStore, left: str, right: str, only: TraceFilter = EVERYTHING
) -> dict[str, Any]:
    """Two recordings, runs or policies (ids, beginnings of one, or a policy's label), on the
    requests that both decoded, by request id: how many there are, the sums of each side (``rows``),
    and how many times as fast ``left`` is in tokens/s (``ratio``), with a 95% interval: Student's,
    of the logarithm of the ratio of sums, linearised; None of fewer than two samples.

    Turns of a conversation, by their ids, are one sample. A request weighs alike on both sides:
    with the fewer of the tokens that each decoded of it.
    Raises NotFoundError where a side decoded nothing, TraceError where they share no request.
    """
    sides = [_decoded(store, name, only) for name in (left, right)]
    shared = sorted(sides[0].keys() & sides[1].keys())
    if not shared:
        raise TraceError(f"{left} and {right} share no request that was decoded in rounds")
    both = np.array([[side[name] for name in shared] for side in sides])  # [2, requests, SUMS]
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            **{k: v if k == "seconds" else int(v) for k, v in zip(SUMS, sums, strict=True)},
            **rates(*sums),
        }
        for name, sums in zip((left, right), both.sum(1).tolist(), strict=True)
    ]
    emitted, seconds = both[:, :, 3], both[:, :, 4]
    took = emitted.min(0) * seconds / emitted  # [2, requests]
    ratio, interval = float(took[1].sum() / took[0].sum()), None
    took = summed(took.T, conversations(shared)).T
    if took.shape[1] > 1:
        one, other = took / took.mean(1, keepdims=True)
        variance, freedom = variance_of_mean(float((one - other).var(ddof=1)), (one + other) / 2)
        error = np.sqrt(variance) * stdtrit(freedom, 0.975)
        interval = [float(ratio * np.exp(-error)), float(ratio * np.exp(error))]
    return {"requests": len(shared), "ratio": ratio, "interval": interval, "rows": rows}


def _decoded(store: TraceStore, name: str, only: TraceFilter) -> dict[str, list[float]]:
    """Sums of executed rounds, in the order of :data:`SUMS`, by the id of the request: recorded
    ones, or where there are none those of runs, whose seconds include prefill."""
    c, found = REQUESTS.c, dict[str, list[float]]()
    try:
        chosen = replace(only, recordings=(store.resolve_recording(name),))
    except NotFoundError:
        chosen = replace(only, policy=name)
    query = (
        select(c.request_id, *(func.sum(c[column]) for column in SUMS))
        .where(*conditions_of(store, REQUESTS, chosen), c.rounds > 0)
        .group_by(c.request_id)
    )
    of_run = [of.startswith(name, autoescape=True) for of in (Run.id, Run.policy_id)]
    with store.database.read() as session:
        for request, *sums in session.execute(query):
            found[request] = [float(value) for value in sums]
        runs = session.scalars(select(Run.id).where(or_(*of_run), Run.kind == "executed")).all()
    for run in map(store.get_run, () if found else runs):
        for of in run.outcome.per_request:
            n, before = of.counts, found.get(of.request_id, [0.0] * len(SUMS))
            tokens = n.drafted_tokens, n.accepted_tokens, n.emitted_tokens
            sums = [n.rounds, *tokens, n.seconds, n.prompt_steps]
            found[of.request_id] = [a + b for a, b in zip(before, sums, strict=True)]
    found = {request: sums for request, sums in found.items() if sums[0] and sums[4]}
    if not found:
        raise NotFoundError(
            f"{name}: no recording, policy or run of that name decoded anything that is asked for; "
            "`traces list`, `db show policies` and `db show runs` show those there are"
        )
    return found
