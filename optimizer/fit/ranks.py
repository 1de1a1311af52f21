"""Where orders of tokens or clusters put what was recorded of a draft: read once for all orders,
and kept. Policies with shortlists of these orders replay from it.

A frequency order (FR-Spec, PA-FR) is one for all contexts. A router's (DynaSpec, section 4.2)
follows the draft's hidden states: here the draft reads recorded texts, and the nodes of their tree
panoramas, as it does while decoding; at each node the router orders the clusters, and of that order
is kept what replays ask (:class:`optimizer.simulate.shortlist_ranks.ClusterRanks`). At prefixes of
the text near ties are decided by canonical states, as in :mod:`runtime.shortlists`: the first k
clusters of a canonical order are what the runtime selects at every k. Nodes off the text serve
trees, whose replay under shortlists is approximate; their near ties stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from spectune.optimizer.artifacts import fitted
from spectune.optimizer.fit.draft_distributions import Columns, ReadText, WholeDistributions
from spectune.optimizer.processes import on_every_core
from spectune.optimizer.simulate.shortlist_ranks import (
    UNKNOWN_CODE,
    ClusterRanks,
    FrequencyRanks,
    Ranks,
    Wanted,
    budget_grid,
    keep_ranks,
    wanted_ranks,
)
from spectune.runtime.loading import LoadedPair
from spectune.runtime.near_ties import near_cluster_places
from spectune.runtime.policies.artifacts import FREQUENCIES, Fitted
from spectune.runtime.policies.document import ClustersShortlist, Policy
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.router import top_clusters
from spectune.runtime.policies.shortlist_rule import compile_shortlist
from spectune.runtime.progress import Progress, silent
from spectune.runtime.recording.trees import OFF_TEXT, ROWS
from spectune.runtime.shortlists import Shortlists
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Proposals, Trajectory, TreePanorama
from spectune.traces.store import TraceStore

KEPT: Final = 16
"""First clusters of a router's order at every node that are kept: what other nodes of a tree's
level add to its shortlist."""


class FrequencyOrder:
    """The frequency order of an artifact over one draft of a pair. Only chains of language models
    ask for its ranks. Raises PolicyError for one of another vocabulary."""

    def __init__(self, pair: LoadedPair, draft: str, name: str, held: Fitted) -> None:
        order = Frequencies.from_document(held.document, held.arrays)
        if order.vocab != pair.target.vocab_size:
            raise PolicyError(
                f"frequencies {name}: orders a vocabulary of {order.vocab} tokens, pair "
                f"{pair.spec.name} has {pair.target.vocab_size}; "
                "`fit frequencies` on a recording of this pair makes one"
            )
        distributions = WholeDistributions(pair, draft)
        self.draft, self.vocab = draft, order.vocab
        self.rank_of = np.where(distributions.row >= 0, order.rank, order.vocab)
        self.of_rows = order.rank[distributions.ids]
        self.budgets = budget_grid(order.vocab)
        # Rows of the head by rank, and how many of them the first k tokens are.
        by_rank = np.argsort(self.of_rows, kind="stable")
        self.by_rank = torch.from_numpy(by_rank).to(pair.device)
        inside = np.searchsorted(self.of_rows[by_rank], self.budgets)
        self.columns, self.none = np.maximum(inside - 1, 0).tolist(), inside == 0

    def place(self, read: ReadText) -> _FrequencyPlaces:
        """Where the order puts what a request's texts go on with and the recorded children before
        that."""
        panorama = read.panorama
        slot = panorama.text_slot[: read.roots]
        before = np.where(slot < panorama.width, slot, 0)[:, None]
        children = self.ranks(panorama.tokens[: read.roots])
        better = np.where(np.arange(panorama.width) < before, children, self.vocab).min(axis=1)
        own = np.append(self.ranks(read.trajectory.output_ids), self.vocab).astype(np.uint32)
        return _FrequencyPlaces(self, read, own, better)

    def ranks(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Ranks of the target's tokens; of those that the draft's head lacks the vocabulary's
        size."""
        found: npt.NDArray[np.int64] = self.rank_of[tokens.astype(np.int64)]
        return found

    def joined(
        self, name: str, proposals: Proposals, digests: Sequence[str], parts: Sequence[Columns]
    ) -> FrequencyRanks:
        """The rows of all requests as one value."""
        columns: dict[str, Any] = {
            column: np.concatenate([p[column] for p in parts]) for column in parts[0]
        }
        return FrequencyRanks(
            draft=self.draft,
            fitted=name,
            proposals=proposals,
            vocab=self.vocab,
            budgets=self.budgets,
            digests=tuple(digests),
            text_offsets=np.cumsum([0, *(len(p["own"]) for p in parts)]),
            **columns,
        )


@dataclass(eq=False)
class _FrequencyPlaces:
    """A frequency order over one request."""

    order: FrequencyOrder
    read: ReadText
    own: npt.NDArray[np.uint32]
    better: npt.NDArray[np.int64]

    def by_order(self, rows: slice, values: Tensor) -> Tensor:
        """``values`` of the head's rows, best token first."""
        return values.index_select(1, self.order.by_rank)

    def least(self, start: int, better: npt.NDArray[np.bool_] | None) -> int:
        """The least rank of the rows that are ``better`` than the text's token; of the recorded
        children where that is not known."""
        panorama = self.read.panorama
        if better is None:
            ranks = self.order.ranks(panorama.tokens[start, : panorama.count[start]])
        else:
            ranks = self.order.of_rows[better]
        return int(ranks.min(initial=self.order.vocab))

    def finished(self, unsaid: npt.NDArray[np.bool_]) -> Columns:
        """The columns; ``unsaid``: starts where nothing is known beyond the children."""
        return {"own": self.own, "better": self.better.astype(np.uint32), "open": unsaid}


class RouterOrder:
    """The router of an artifact over one draft of a pair, as the runtime uses it. Raises
    PolicyError where it is of another draft or head."""

    def __init__(self, pair: LoadedPair, draft: str, name: str, held: Fitted) -> None:
        policy = Policy(
            draft=draft, shortlist=ClustersShortlist(k0=1, k1=1, k_min=1, artifact=name)
        )
        rule = compile_shortlist(policy, lambda _: held)
        assert rule is not None
        shortlists = Shortlists(rule, pair.models[draft], pair.exact)
        self.pair, self.shortlists, self.draft = pair, shortlists, draft
        self.model, self.output, self.clusters = (
            shortlists.model,
            shortlists.output,
            shortlists.clusters,
        )
        self.count = self.clusters.count
        self.budgets = budget_grid(self.count)
        self.columns, self.none = (
            (np.array(self.budgets) - 1).tolist(),
            np.zeros(len(self.budgets), np.bool_),
        )
        self.of = np.full(pair.target.vocab_size, self.count, np.int64)
        self.of[self.output.ids] = self.clusters.of
        self.of_rows = torch.from_numpy(self.clusters.of).to(self.model.device)

    def place(self, read: ReadText) -> _RouterPlaces:
        """Where the router puts the clusters of what a request's texts go on with, and of the
        recorded children."""
        panorama, roots = read.panorama, read.roots
        rows = [slice(at, at + ROWS) for at in range(0, len(read.tokens), ROWS)]
        scores = torch.cat(
            [
                self.shortlists.scores(self.model.embedded(read.tokens[at]), read.before[at])
                for at in rows
            ]
        )
        following = np.append(self.of[read.following[:-1]], self.count)
        exists = np.arange(panorama.width) < panorama.count[:, None]
        children = np.where(exists, self.of[panorama.tokens], self.count)
        if self.pair.exact:
            self._decide(read, scores, np.concatenate([children[:roots], following[:, None]], 1))
        order = top_clusters(scores, self.count)
        place = functional.pad(order.argsort(-1), (0, 1), value=self.count).cpu().numpy()
        ranks = np.take_along_axis(place, children, 1)
        slot = np.where(panorama.text_slot[:roots] < panorama.width, panorama.text_slot[:roots], 0)[
            :, None
        ]
        better = np.where(np.arange(panorama.width) < slot, ranks[:roots], self.count).min(1)
        better[-1] = 0
        return _RouterPlaces(
            self, read, place[np.arange(roots), following], better, ranks, order, place
        )

    def _decide(self, read: ReadText, scores: Tensor, watched: npt.NDArray[np.int64]) -> None:
        """Replaces, in place, scores [N, M] of those text prefixes at which rounding could move one
        of the clusters ``watched`` int64 [T, K + 1] (M: none) in the order: by scores from
        canonical states, as the runtime does."""
        by_cluster = functional.pad(
            near_cluster_places(scores[: len(watched)], self.shortlists.margin), (0, 1)
        )
        near = by_cluster.gather(1, torch.from_numpy(watched).to(scores.device)).any(1)
        for i in near.nonzero()[:, 0].tolist():
            state = read.reader.canonical_before(read.prompt + i)
            scores[i] = self.shortlists.scores(self.model.embedded(read.tokens[i : i + 1]), state)[
                0
            ]

    def joined(
        self, name: str, proposals: Proposals, digests: Sequence[str], parts: Sequence[Columns]
    ) -> ClusterRanks:
        """The rows of all requests as one value."""
        widest = max(p["ranks"].shape[1] for p in parts)
        ranks = [
            np.pad(
                p["ranks"], ((0, 0), (0, widest - p["ranks"].shape[1])), constant_values=self.count
            )
            for p in parts
        ]
        columns: dict[str, Any] = {
            column: np.concatenate([p[column] for p in parts])
            for column in parts[0]
            if column != "ranks"
        }
        return ClusterRanks(
            draft=self.draft,
            fitted=name,
            proposals=proposals,
            clusters=self.count,
            budgets=self.budgets,
            digests=tuple(digests),
            node_offsets=np.cumsum([0, *(len(p["ranks"]) for p in parts)]),
            text_offsets=np.cumsum([0, *(len(p["own"]) for p in parts)]),
            of=self.of.astype(np.min_scalar_type(self.count)),
            ranks=np.concatenate(ranks),
            **columns,
        )


@dataclass(eq=False)
class _RouterPlaces:
    """A router's order over one request."""

    router: RouterOrder
    read: ReadText
    own: npt.NDArray[np.int64]
    better: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int64]
    order: Tensor
    place: npt.NDArray[np.int64]

    def by_order(self, rows: slice, values: Tensor) -> Tensor:
        """``values`` of the head's rows summed by cluster, best cluster first."""
        sums = values.new_zeros(len(values), self.router.count).index_add_(
            1, self.router.of_rows, values
        )
        return sums.gather(1, self.order[rows])

    def least(self, start: int, better: npt.NDArray[np.bool_] | None) -> int:
        """The least place of the clusters of rows that are ``better`` than the text's token; 0
        where that is not known."""
        if better is None:
            return 0
        return int(
            self.place[start][self.router.clusters.of[better]].min(initial=self.router.count)
        )

    def finished(self, _: npt.NDArray[np.bool_]) -> Columns:
        """The columns."""
        router, first = self.router, self.order[: self.read.roots].cpu().numpy()
        small, wide = np.min_scalar_type(router.count), np.min_scalar_type(router.output.rows)
        return {
            "ranks": self.ranks.astype(small),
            "order": self.order[:, :KEPT].cpu().numpy().astype(small),
            "own": self.own.astype(small),
            "better": self.better.astype(small),
            "sizes": router.clusters.sizes[first].cumsum(1)[:, router.columns].astype(wide),
        }


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
    """The ranks of a recording's distributions of a draft under stored routers and frequency
    orders, for ``ranks`` of a :class:`optimizer.simulate.replay_trace.ReplayTrace`: stored ones
    where they hold every request, else made, of the new requests alone, and stored.

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
    """The order of an artifact. Raises PolicyError where it is none of this draft, head and
    vocabulary."""
    if held.kind == FREQUENCIES:
        return FrequencyOrder(pair, draft, name, held)
    return RouterOrder(pair, draft, name, held)


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
    items = [
        (text, panorama)
        for text, panorama, asked in zip(wanted.texts, wanted.trees, new, strict=True)
        if asked
    ]
    parts: dict[str, list[Columns]] = {name: [] for name in orders}
    with closing(
        on_every_core(pair, partial(_rank, draft=draft, artifacts=orders), items, len(items))
    ) as made:
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
            found.append(
                distributions.codes(logits, trajectory.sampling, following, order.columns, by_order)
            )
        for i in (begin + np.flatnonzero(slot[rows] == OFF_TEXT)).tolist():
            if i < read.roots - 1:
                better = distributions.better(
                    read.reader, logits[i - begin], i, trajectory, panorama
                )
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
