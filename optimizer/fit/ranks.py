"""Where orders of tokens or clusters put what was recorded of a draft: read once for all orders, and kept.

Orders are frequency orders (:mod:`optimizer.fit.frequency_ranks`) and routers (:mod:`optimizer.fit.cluster_ranks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch

from spectune.optimizer.artifacts import fitted
from spectune.optimizer.fit.cluster_ranks import RouterOrder
from spectune.optimizer.fit.draft_distributions import Columns, ReadText, WholeDistributions
from spectune.optimizer.fit.frequency_ranks import FrequencyOrder
from spectune.optimizer.fit.shared import Progress, silent
from spectune.optimizer.processes import on_every_core
from spectune.optimizer.simulate.shortlist_ranks import (
    UNKNOWN_CODE,
    Ranks,
    Wanted,
    keep_ranks,
    wanted_ranks,
)
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import FREQUENCIES, Fitted
from spectune.runtime.recording.trees import OFF_TEXT, ROWS
from spectune.traces.schema import Proposals, Trajectory, TreePanorama
from spectune.traces.store import TraceStore

Order = FrequencyOrder | RouterOrder


def recorded_ranks(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    draft: str,
    orders: Sequence[str],
    *,
    proposals: Proposals = "coupled",
    progress: Progress = silent,
) -> list[Ranks]:
    """The ranks of a recording's distributions of a draft under stored routers and frequency orders,
    for ``ranks`` of a :class:`optimizer.simulate.replay_trace.ReplayTrace`: stored ones where they
    hold every request, else made, of the new requests alone, and stored.

    Nothing is fitted, so all requests are ranked. The draft reads a request once for all orders.
    Raises TraceError for a recording of another pair or without trees of the draft, PolicyError
    where one of ``orders`` is none of this draft, head and vocabulary.
    """
    ids = [store.get_artifact(name).id for name in orders]
    wanted = wanted_ranks(store, pair.id, recording, draft, ids, proposals)
    find = fitted(store, pair.id)
    made_by = {name: order_of(pair, draft, name, find(name)) for name in ids}
    lacking = {name: find(name) for name in ids if not wanted.complete(name)}
    whole = dict(wanted.there)
    if lacking:
        for name, parts in _parts(pair, draft, lacking, wanted, progress).items():
            made = made_by[name].joined(name, proposals, wanted.digests, parts)
            whole[name] = keep_ranks(store, pair.id, wanted.recording, made)
    return [whole[name] for name in ids]


def order_of(pair: LoadedPair, draft: str, name: str, held: Fitted) -> Order:
    """The order of an artifact. Raises PolicyError where it is none of this draft, head and vocabulary."""
    return (FrequencyOrder if held.kind == FREQUENCIES else RouterOrder)(pair, draft, name, held)


def _parts(
    pair: LoadedPair,
    draft: str,
    orders: Mapping[str, Fitted],
    wanted: Wanted,
    progress: Progress,
) -> dict[str, list[Columns]]:
    """By order, the rows of every request: those stored, or made on every core."""
    there = {name: wanted.there[name] for name in orders if name in wanted.there}
    known = {name: {d: n for n, d in enumerate(ranks.digests)} for name, ranks in there.items()}
    new = [any(request not in known.get(name, ()) for name in orders) for request in wanted.digests]
    items = [one for *one, asked in zip(wanted.texts, wanted.trees, new, strict=True) if asked]
    parts: dict[str, list[Columns]] = {name: [] for name in orders}
    with closing(on_every_core(pair, partial(_rank, draft=draft, artifacts=orders), items, len(items))) as made:
        for n, (request, asked) in enumerate(zip(wanted.digests, new, strict=True)):
            fresh = dict(zip(orders, next(made), strict=True)) if asked else {}
            for name, rows in parts.items():
                held = known.get(name, {}).get(request)
                rows.append(fresh[name] if held is None else there[name].rows_of(held))
            progress("ranks", n + 1, len(new))
    return parts


@torch.no_grad()
def _rank(
    pair: LoadedPair,
    item: tuple[Trajectory, TreePanorama],
    draft: str,
    artifacts: Mapping[str, Fitted],
) -> list[Columns]:
    """The rows of one request under the orders of each of ``artifacts``."""
    trajectory, panorama = item
    orders = [order_of(pair, draft, *one) for one in artifacts.items()]
    distributions = WholeDistributions(pair, draft)
    read = ReadText(pair, draft, trajectory, panorama)
    placed = [order.place(read) for order in orders]
    codes: list[list[Any]] = [[] for _ in orders]
    opened = np.zeros(read.roots, np.bool_)
    slot = panorama.text_slot[: read.roots]
    for begin in range(0, read.roots, ROWS):
        rows = slice(begin, min(begin + ROWS, read.roots))
        logits = distributions.logits(read.states[rows])
        following = read.following[rows]
        for order, one, found in zip(orders, placed, codes, strict=True):
            by_order = partial(one.by_order, rows)
            found.append(distributions.codes(logits, trajectory.sampling, following, order.columns, by_order))
        for i in (begin + np.flatnonzero(slot[rows] == OFF_TEXT)).tolist():
            if i < read.roots - 1:
                better = distributions.better(read.reader, logits[i - begin], i, trajectory, panorama)
                opened[i] = better is None
                for one in placed:
                    one.better[i] = one.least(i, better)
    made: list[Columns] = []
    for order, one, found in zip(orders, placed, codes, strict=True):
        text, mass, entropy = (np.concatenate(parts) for parts in zip(*found, strict=True))
        mass[:, order.none] = UNKNOWN_CODE
        said = {"text_code": text, "mass_code": mass, "entropy_code": entropy}
        made.append({**one.finished(opened), **said})
    return made
