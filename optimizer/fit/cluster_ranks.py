"""What a router decides over a recording: the places of clusters at every start and drafted node (DynaSpec, section 4.2).

A routed shortlist follows the draft's hidden states. Here the draft reads recorded texts, and the nodes of their tree panoramas, as
it does while decoding; at each node the router orders the clusters, and of that order is kept what replays ask
(:class:`optimizer.simulate.shortlist_ranks.ClusterRanks`). At prefixes of the text near ties are decided by canonical states, as in
:mod:`runtime.shortlists`: the first k clusters of a canonical order are what the runtime selects at every k. Nodes off the text serve
trees, whose replay under shortlists is approximate; their near ties stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from spectune.optimizer.fit.draft_distributions import Columns, ReadText
from spectune.optimizer.simulate.shortlist_ranks import ClusterRanks, budget_grid
from spectune.runtime.loading import LoadedPair
from spectune.runtime.near_ties import near_cluster_places
from spectune.runtime.policies.artifacts import Fitted
from spectune.runtime.policies.document import ClustersShortlist, Policy
from spectune.runtime.policies.router import top_clusters
from spectune.runtime.policies.shortlist_rule import compile_shortlist
from spectune.runtime.recording.trees import ROWS
from spectune.runtime.shortlists import Shortlists
from spectune.traces.schema import Proposals

KEPT: Final = 16
"""First clusters of the order at every node that are kept: what other nodes of a tree's level add to its shortlist."""


class RouterOrder:
    """The router of an artifact over one draft of a pair, as the runtime uses it. Raises PolicyError where it is of another draft or
    head."""

    def __init__(self, pair: LoadedPair, draft: str, name: str, held: Fitted) -> None:
        policy = Policy(draft=draft, shortlist=ClustersShortlist(k0=1, k1=1, k_min=1, artifact=name))
        shortlists = Shortlists(compile_shortlist(policy, lambda _: held), pair.models[draft], pair.exact)
        self.pair, self.shortlists, self.draft = pair, shortlists, draft
        self.model, self.output, self.clusters = shortlists.model, shortlists.output, shortlists.clusters
        self.count = self.clusters.count
        self.budgets = budget_grid(self.count)
        self.columns, self.none = (np.array(self.budgets) - 1).tolist(), np.zeros(len(self.budgets), np.bool_)
        self.of = np.full(pair.target.vocab_size, self.count, np.int64)
        self.of[self.output.ids] = self.clusters.of
        self.of_rows = torch.from_numpy(self.clusters.of).to(self.model.device)

    def place(self, read: ReadText) -> _Placed:
        """Where the router puts the clusters of what a request's texts go on with, and of the recorded children."""
        panorama, roots = read.panorama, read.roots
        rows = [slice(at, at + ROWS) for at in range(0, len(read.tokens), ROWS)]
        scores = torch.cat([self.shortlists.scores(self.model.embedded(read.tokens[at]), read.before[at]) for at in rows])
        following = np.append(self.of[read.following[:-1]], self.count)
        exists = np.arange(panorama.width) < panorama.count[:, None]
        children = np.where(exists, self.of[panorama.tokens], self.count)
        if self.pair.exact:
            self._decide(read, scores, np.concatenate([children[:roots], following[:, None]], 1))
        order = top_clusters(scores, self.count)
        place = functional.pad(order.argsort(-1), (0, 1), value=self.count).cpu().numpy()
        ranks = np.take_along_axis(place, children, 1)
        slot = np.where(panorama.text_slot[:roots] < panorama.width, panorama.text_slot[:roots], 0)[:, None]
        better = np.where(np.arange(panorama.width) < slot, ranks[:roots], self.count).min(1)
        better[-1] = 0
        return _Placed(self, read, place[np.arange(roots), following], better, ranks, order, place)

    def _decide(self, read: ReadText, scores: Tensor, watched: npt.NDArray[np.int64]) -> None:
        """Replaces, in place, scores [N, M] of those text prefixes at which rounding could move one of the clusters ``watched`` int64
        [T, K + 1] (M: none) in the order: by scores from canonical states, as the runtime does."""
        by_cluster = functional.pad(near_cluster_places(scores[: len(watched)], self.shortlists.margin), (0, 1))
        near = by_cluster.gather(1, torch.from_numpy(watched).to(scores.device)).any(1)
        for i in near.nonzero()[:, 0].tolist():
            state = read.reader.canonical_before(read.prompt + i)
            scores[i] = self.shortlists.scores(self.model.embedded(read.tokens[i : i + 1]), state)[0]

    def joined(self, name: str, proposals: Proposals, digests: Sequence[str], parts: Sequence[Columns]) -> ClusterRanks:
        """The rows of all requests as one value."""
        widest = max(p["ranks"].shape[1] for p in parts)
        ranks = [np.pad(p["ranks"], ((0, 0), (0, widest - p["ranks"].shape[1])), constant_values=self.count) for p in parts]
        columns: dict[str, Any] = {column: np.concatenate([p[column] for p in parts]) for column in parts[0] if column != "ranks"}
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
class _Placed:
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
        sums = values.new_zeros(len(values), self.router.count).index_add_(1, self.router.of_rows, values)
        return sums.gather(1, self.order[rows])

    def least(self, start: int, better: npt.NDArray[np.bool_] | None) -> int:
        """The least place of the clusters of rows that are ``better`` than the text's token; 0 where that is not known."""
        if better is None:
            return 0
        return int(self.place[start][self.router.clusters.of[better]].min(initial=self.router.count))

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

