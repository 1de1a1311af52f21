"""Where orders of tokens or clusters put what was recorded of a draft: read once for all orders,
and kept. Policies with shortlists of these orders replay from it.

A frequency order (FR-Spec, PA-FR) is one for all contexts. A router's (DynaSpec, section 4.2)
follows the draft's hidden states: here the draft reads recorded texts, and the nodes of their tree
panoramas, as it does while decoding; at each node the router orders the clusters, and of that order
is kept what replays ask (:class:`optimizer.simulate.shortlist_ranks.ClusterRanks`). At prefixes of
the text the first k clusters of that order are what the runtime selects at every k. Nodes off the
text serve trees, whose replay under shortlists is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from spectune.db.errors import CorruptedChunkError
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.fit.draft_distributions import ReadText, WholeDistributions
from spectune.optimizer.inputs import recording_of
from spectune.optimizer.processes import on_every_core
from spectune.optimizer.simulate.shortlist_ranks import (
    RANKS_OF,
    UNKNOWN_CODE,
    Columns,
    Ranks,
    budget_grid,
    digest,
    stored_ranks,
)
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import FREQUENCIES, Fitted, read_artifact
from spectune.runtime.policies.document import ClustersShortlist, Policy
from spectune.runtime.policies.fr_spec import Frequencies, FrequencyShortlist
from spectune.runtime.policies.rules import compile_shortlist
from spectune.runtime.progress import Progress, silent
from spectune.runtime.recording.panoramas import ROWS
from spectune.runtime.shortlists import Shortlists, top_clusters
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.recording import how_to_record_trees
from spectune.traces.schema import OFF_TEXT
from spectune.traces.store import TraceStore
from spectune.traces.tables import Panorama, Trajectory

KEPT: Final = 16
"""First clusters of a router's order at every node that are kept: what other nodes of a tree's
level add to its shortlist."""


def _least_before(read: ReadText, ranks: npt.NDArray[np.int64], none: int) -> npt.NDArray[np.int64]:
    """The least of the children's ``ranks`` [roots, k] before the text's own, where it is one of
    them; else ``none``."""
    slot, width = read.panorama.trie.text_slot[: read.roots], read.panorama.width
    before = np.where(slot < width, slot, 0)[:, None]
    return np.asarray(np.where(np.arange(width) < before, ranks, none).min(axis=1))


class FrequencyOrder:
    """The frequency order of an artifact over one draft of a pair, and where it puts one request's
    texts (:meth:`place`). Only chains of language models ask for its ranks. Raises PolicyError for
    one that is malformed or of another vocabulary."""

    def __init__(self, pair: LoadedPair, draft: str, name: str, held: Fitted) -> None:
        policy = Policy(draft=draft, shortlist=FrequencyShortlist(size=1, artifact=name))
        order = read_artifact(
            policy, "shortlist", FREQUENCIES, lambda _: held, Frequencies.from_document
        )
        if order.vocab != pair.target.vocab_size:
            raise PolicyError(
                f"frequencies {name}: orders a vocabulary of {order.vocab} tokens, pair "
                f"{pair.spec.name} has {pair.target.vocab_size}; "
                "`fit frequencies` on a recording of this pair makes one"
            )
        distributions = WholeDistributions(pair, draft)
        self.vocab = order.vocab
        self.budgets = budget_grid(order.vocab)
        self.about: dict[str, Any] = {"vocab": order.vocab}
        # Of the target's tokens; of those that the draft's head lacks the vocabulary's size.
        self.ranks = np.where(distributions.row >= 0, order.rank, order.vocab)
        self.of_rows = order.rank[distributions.ids]
        # Rows of the head by rank, and how many of them the first k tokens are.
        by_rank = np.argsort(self.of_rows, kind="stable")
        self.by_rank = torch.from_numpy(by_rank).to(pair.device)
        inside = np.searchsorted(self.of_rows[by_rank], self.budgets)
        self.columns, self.none = np.maximum(inside - 1, 0).tolist(), inside == 0

    def place(self, read: ReadText) -> None:
        """Ranks what a request's texts go on with and the recorded children before that."""
        self.panorama = read.panorama
        children = self.ranks[self.panorama.trie.tokens[: read.roots]]
        self.better = _least_before(read, children, self.vocab)
        self.own = np.append(self.ranks[read.trajectory.output_ids], self.vocab)

    def by_order(self, rows: slice, values: Tensor) -> Tensor:
        """``values`` of the head's rows, best token first."""
        return values.index_select(1, self.by_rank)

    def least(self, start: int, better: npt.NDArray[np.bool_] | None) -> int:
        """The least rank of the rows that are ``better`` than the text's token; of the recorded
        children where that is not known."""
        if better is None:
            ranks = self.ranks[self.panorama.trie.tokens[start, : self.panorama.trie.count[start]]]
        else:
            ranks = self.of_rows[better]
        return int(ranks.min(initial=self.vocab))

    def placed(self, unsaid: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
        """The request's columns; ``unsaid``: starts where nothing is known beyond the children."""
        own, better = self.own.astype(np.uint32), self.better.astype(np.uint32)
        return {"own": own, "better": better, "open": unsaid}


class RouterOrder:
    """The router of an artifact over one draft of a pair, as the runtime uses it, and where it puts
    one request's clusters (:meth:`place`). Raises PolicyError where it is of another draft or
    head."""

    def __init__(self, pair: LoadedPair, draft: str, name: str, held: Fitted) -> None:
        policy = Policy(
            draft=draft, shortlist=ClustersShortlist(k0=1, k1=1, k_min=1, artifact=name)
        )
        rule = compile_shortlist(policy, lambda _: held)
        assert rule is not None
        self.shortlists = Shortlists(rule, pair.models[draft])
        self.clusters, self.model = self.shortlists.clusters, self.shortlists.model
        self.count = self.clusters.count
        self.budgets = budget_grid(self.count)
        self.columns = (np.array(self.budgets) - 1).tolist()
        self.none = np.zeros(len(self.budgets), np.bool_)
        self.of = np.full(pair.target.vocab_size, self.count, np.int64)
        self.of[self.shortlists.output.ids] = self.clusters.of
        self.of_rows = torch.from_numpy(self.clusters.of).to(self.model.device)
        of = self.of.astype(np.min_scalar_type(self.count))
        self.about: dict[str, Any] = {"clusters": self.count, "of": of}

    def place(self, read: ReadText) -> None:
        """Ranks the clusters of what a request's texts go on with, and of the recorded children."""
        panorama, roots = read.panorama, read.roots
        rows = [slice(at, at + ROWS) for at in range(0, len(read.tokens), ROWS)]
        embedded = (self.model.embedded(read.tokens[at]) for at in rows)
        scores = torch.cat(
            [
                self.shortlists.scores(x, read.before[at])
                for x, at in zip(embedded, rows, strict=True)
            ]
        )
        following = np.append(self.of[read.following[:-1]], self.count)
        exists = np.arange(panorama.width) < panorama.trie.count[:, None]
        children = np.where(exists, self.of[panorama.trie.tokens], self.count)
        self.order = top_clusters(scores, self.count)
        places = functional.pad(self.order.argsort(-1), (0, 1), value=self.count)
        self.place_of = places.cpu().numpy()
        self.own = self.place_of[np.arange(roots), following]
        self.ranks = np.take_along_axis(self.place_of, children, 1)
        self.better = _least_before(read, self.ranks[:roots], self.count)
        self.better[-1] = 0
        self.first = self.order[:roots].cpu().numpy()

    def by_order(self, rows: slice, values: Tensor) -> Tensor:
        """``values`` of the head's rows summed by cluster, best cluster first."""
        sums = values.new_zeros(len(values), self.count).index_add_(1, self.of_rows, values)
        return sums.gather(1, self.order[rows])

    def least(self, start: int, better: npt.NDArray[np.bool_] | None) -> int:
        """The least place of the clusters of rows that are ``better`` than the text's token; 0
        where that is not known."""
        if better is None:
            return 0
        return int(self.place_of[start][self.clusters.of[better]].min(initial=self.count))

    def placed(self, _: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
        """The request's columns."""
        small = np.min_scalar_type(self.count)
        sizes = self.clusters.sizes[self.first].cumsum(1)[:, self.columns]
        return {
            "ranks": self.ranks.astype(small),
            "order": self.order[:, :KEPT].cpu().numpy().astype(small),
            "own": self.own.astype(small),
            "better": self.better.astype(small),
            "sizes": sizes.astype(np.min_scalar_type(self.shortlists.output.rows)),
        }


def _order(pair: LoadedPair, draft: str, name: str, held: Fitted) -> FrequencyOrder | RouterOrder:
    """The order of an artifact. Raises PolicyError where it is none of this draft, head and
    vocabulary."""
    made_by = FrequencyOrder if held.kind == FREQUENCIES else RouterOrder
    return made_by(pair, draft, name, held)


def recorded_ranks(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    draft: str,
    orders: Sequence[str],
    *,
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
    info = recording_of(store, recording, pair.spec)
    loaded = store.load(info.id, [draft], skip_corrupted=True).having([draft])
    if draft not in info.with_trees or not loaded.requests:
        raise TraceError(
            f"recording {info.id} has no trees of draft {draft!r}, whose distributions a "
            f"shortlist's ranks are of; {how_to_record_trees(info.id)}"
        )
    items = list(zip(loaded.trajectories, loaded.panoramas(draft), strict=True))
    digests = tuple(digest(*item) for item in items)
    find = fitted(store, pair.id)
    whole: dict[str, Ranks] = {}
    made_by = {name: _order(pair, draft, name, find(name)) for name in ids}
    for name in ids:
        with suppress(CorruptedChunkError):
            if (found := stored_ranks(store, info.id, draft, name)) is not None:
                whole[name] = found
    lacking = {
        name: find(name)
        for name in ids
        if name not in whole or not set(digests) <= set(whole[name].digests)
    }
    if lacking:
        parts = _parts(pair, draft, lacking, items, digests, whole, progress)
        for name, columns in parts.items():
            made = RANKS_OF[lacking[name].kind].of_requests(
                columns,
                draft=draft,
                fitted=name,
                digests=digests,
                budgets=made_by[name].budgets,
                **made_by[name].about,
            )
            whole[name] = keep_ranks(store, pair.id, info.id, made)
    return [whole[name] for name in ids]


def keep_ranks(store: TraceStore, pair_id: str, recording: str, made: Ranks) -> Ranks:
    """Stores ranks of a recording; the same with the artifact's id."""
    document, arrays = made.to_document()
    origin = {key: document[key] for key in ("draft", made.KEY)}
    origin["recording"] = recording
    document |= {**origin, "pair": pair_id}
    name = store.put_artifact(made.KIND, document, arrays, pair_id=pair_id, provenance=origin)
    return replace(made, artifact=name)


def _parts(
    pair: LoadedPair,
    draft: str,
    orders: Mapping[str, Fitted],
    items: Sequence[tuple[Trajectory, Panorama]],
    digests: Sequence[str],
    there: Mapping[str, Ranks],
    progress: Progress,
) -> dict[str, list[Columns]]:
    """By order, the columns of every request: those stored, or made on every core."""
    known = {
        name: {d: n for n, d in enumerate(ranks.digests)}
        for name, ranks in there.items()
        if name in orders
    }
    asked = [any(request not in known.get(name, ()) for name in orders) for request in digests]
    new = [item for item, is_new in zip(items, asked, strict=True) if is_new]
    parts: dict[str, list[Columns]] = {name: [] for name in orders}
    rank = partial(_rank, draft=draft, artifacts=orders)
    with closing(on_every_core(pair, rank, new, len(new))) as made:
        for n, (request, is_new) in enumerate(zip(digests, asked, strict=True), 1):
            fresh = dict(zip(orders, next(made), strict=True)) if is_new else {}
            for name, columns in parts.items():
                held = known.get(name, {}).get(request)
                columns.append(fresh[name] if held is None else there[name].rows_of(held))
            progress("ranks", n, len(digests))
    return parts


@torch.no_grad()
def _rank(
    pair: LoadedPair,
    item: tuple[Trajectory, Panorama],
    draft: str,
    artifacts: Mapping[str, Fitted],
) -> list[Columns]:
    """The columns of one request under the orders of each of ``artifacts``."""
    trajectory, panorama = item
    orders = [_order(pair, draft, *one) for one in artifacts.items()]
    distributions = WholeDistributions(pair, draft)
    read = ReadText(pair, draft, trajectory, panorama)
    for order in orders:
        order.place(read)
    codes: list[list[Any]] = [[] for _ in orders]
    unsaid = np.zeros(read.roots, np.bool_)
    slot = panorama.trie.text_slot[: read.roots]
    for begin in range(0, read.roots, ROWS):
        rows = slice(begin, min(begin + ROWS, read.roots))
        logits, following = distributions.logits(read.states[rows]), read.following[rows]
        for order, found in zip(orders, codes, strict=True):
            by_order = partial(order.by_order, rows)
            found.append(
                distributions.codes(logits, trajectory.sampling, following, order.columns, by_order)
            )
        for i in (begin + np.flatnonzero(slot[rows] == OFF_TEXT)).tolist():
            if i < read.roots - 1:
                better = distributions.better(read, logits[i - begin], i)
                unsaid[i] = better is None
                for order in orders:
                    order.better[i] = order.least(i, better)
    made: list[Columns] = []
    for order, found in zip(orders, codes, strict=True):
        text, mass, entropy = (np.concatenate(parts) for parts in zip(*found, strict=True))
        mass[:, order.none] = UNKNOWN_CODE
        said = {"text_code": text, "mass_code": mass, "entropy_code": entropy}
        made.append({**order.placed(unsaid), **said})
    return made
