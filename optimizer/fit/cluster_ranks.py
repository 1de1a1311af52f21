"""What a router decides over a recording: hidden states are read once, and the places of clusters kept (DynaSpec, section 4.2).

A routed shortlist follows the draft's hidden states. Here the draft reads recorded texts, and the nodes of their tree panoramas, as
it does while decoding; at each node the router orders the clusters, and of that order is kept what replays ask
(:class:`optimizer.simulate.shortlist_ranks.ClusterRanks`). At prefixes of the text near ties are decided by canonical states, as in
:mod:`runtime.shortlists`: the first k clusters of a canonical order are what the runtime selects at every k. Nodes off the text serve
trees, whose replay under shortlists is approximate; their near ties stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from spectune.optimizer.artifacts import fitted
from spectune.optimizer.fit.draft_distributions import States, WholeDistributions, states_over
from spectune.optimizer.fit.shared import Progress
from spectune.optimizer.simulate.shortlist_ranks import ClusterRanks, budget_grid, keep_ranks, wanted_ranks
from spectune.runtime.loading import LoadedPair
from spectune.runtime.near_ties import near_cluster_places
from spectune.runtime.policies.document import ClustersShortlist, Policy
from spectune.runtime.policies.router import top_clusters
from spectune.runtime.recording.trees import OFF_TEXT, ROWS
from spectune.runtime.shortlists import Shortlists, compile_shortlist
from spectune.traces.schema import Proposals, Trajectory, TreePanorama
from spectune.traces.store import TraceStore

KEPT: Final = 16
"""First clusters of the order at every node that are kept: what other nodes of a tree's level add to its shortlist."""
GROUP: Final = 16
"""Starts whose drafted nodes are read together, so that what a pass sees stays short."""


def cluster_ranks(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    draft: str,
    router: str,
    *,
    proposals: Proposals = "coupled",
    progress: Progress = lambda *_: None,
) -> ClusterRanks:
    """The cluster ranks of all of a recording's distributions of a draft under a stored router, for ``ranks`` of a
    :class:`optimizer.simulate.replay_trace.ReplayTrace`: stored ones where they hold every request, else made, the new
    requests alone, and stored.

    Nothing is fitted, so all requests are ranked. Raises TraceError for a recording of another pair or without trees of the draft,
    PolicyError where ``router`` is no router of this draft and head.
    """
    router = store.get_artifact(router).id
    wanted = wanted_ranks(store, pair.id, recording, draft, router, proposals)
    shortlists = _shortlists(store, pair, draft, router)
    there = wanted.there if isinstance(wanted.there, ClusterRanks) else None
    if there is not None and wanted.complete:
        return there
    known = {} if there is None else {name: n for n, name in enumerate(there.digests)}
    ranker = _Ranker(pair, shortlists)
    parts: list[_Part] = []
    for n, (name, text, panorama) in enumerate(zip(wanted.digests, wanted.texts, wanted.trees, strict=True)):
        parts.append(_part(there, known[name]) if there is not None and name in known else ranker.rank(text, panorama))
        progress("ranks", n + 1, len(wanted.digests))
    return keep_ranks(store, pair.id, wanted.recording, ranker.joined(router, proposals, wanted.digests, parts))


def _shortlists(store: TraceStore, pair: LoadedPair, draft: str, router: str) -> Shortlists:
    """The router as the runtime uses it. Raises PolicyError where it is of another draft or head."""
    policy = Policy(draft=draft, shortlist=ClustersShortlist(k0=1, k1=1, k_min=1, artifact=router))
    rule = compile_shortlist(policy, fitted(store, pair.id))
    assert rule is not None
    return Shortlists(rule, pair.models[draft], pair.exact)


class _Part(NamedTuple):
    """The rows of one request: columns of :class:`ClusterRanks`."""

    ranks: npt.NDArray[Any]
    order: npt.NDArray[Any]
    own: npt.NDArray[Any]
    better: npt.NDArray[Any]
    sizes: npt.NDArray[Any]
    text_code: npt.NDArray[np.uint16]
    mass_code: npt.NDArray[np.uint16]
    entropy_code: npt.NDArray[np.uint16]


def _part(source: ClusterRanks, place: int) -> _Part:
    nodes, texts = (slice(*offsets[place : place + 2]) for offsets in (source.node_offsets, source.text_offsets))
    return _Part(*(getattr(source, name)[nodes if name in ("ranks", "order") else texts] for name in _Part._fields))


class _Ranker:
    """One router over one draft of a pair, request by request."""

    def __init__(self, pair: LoadedPair, shortlists: Shortlists) -> None:
        self.pair, self.shortlists, self.draft = pair, shortlists, shortlists.rule.draft
        self.model, self.output, self.clusters = shortlists.model, shortlists.output, shortlists.clusters
        self.count = self.clusters.count
        self.budgets = budget_grid(self.count)
        self.of = np.full(pair.target.vocab_size, self.count, np.int64)
        self.of[self.output.ids] = self.clusters.of
        self.distributions = WholeDistributions(pair, self.draft)
        self.of_rows = torch.from_numpy(self.clusters.of).to(self.model.device)

    @torch.no_grad()
    def rank(self, trajectory: Trajectory, panorama: TreePanorama) -> _Part:
        """The rows of one request."""
        output, prompt = trajectory.output_ids.tolist(), len(trajectory.prompt_ids)
        text, roots = [*trajectory.prompt_ids.tolist(), *output], len(output) + 1
        reader = states_over(self.pair, self.draft, text, prompt)
        states = reader.text_states()
        after = functional.pad(states, (0, 0, 1, 0))  # row p: after the first p tokens
        off = panorama.tokens[panorama.parent, panorama.slot].astype(np.int64)
        tokens = torch.from_numpy(np.concatenate([np.array(text[prompt - 1 :], np.int64), off])).to(self.model.device)
        before = torch.cat([after[prompt - 1 : -1], self._before_drafted(reader, after[prompt:], panorama, off, prompt)])
        rows = [slice(at, at + ROWS) for at in range(0, len(tokens), ROWS)]
        scores = torch.cat([self.shortlists.scores(self.model.embedded(tokens[at]), before[at]) for at in rows])
        following, next_tokens = np.array([self.of[t] for t in output] + [self.count]), np.array([*output, -1], np.int64)
        exists = np.arange(panorama.width) < panorama.count[:, None]
        children = np.where(exists, self.of[panorama.tokens], self.count)
        if self.pair.exact:
            self._decide(reader, scores, tokens, np.concatenate([children[:roots], following[:, None]], 1), prompt)
        order = top_clusters(scores, self.count)
        place = functional.pad(order.argsort(-1), (0, 1), value=self.count).cpu().numpy()
        ranks = np.take_along_axis(place, children, 1)
        own = place[np.arange(roots), following]
        slot = np.where(panorama.text_slot[:roots] < panorama.width, panorama.text_slot[:roots], 0)[:, None]
        better = np.where(np.arange(panorama.width) < slot, ranks[:roots], self.count).min(1)
        at = order[:roots].cpu().numpy()
        columns = np.array(self.budgets) - 1
        codes = []
        for begin in range(0, roots, ROWS):
            logits = self.distributions.logits(states[prompt - 1 + begin : prompt - 1 + begin + ROWS])
            placed = order[begin : begin + len(logits)]

            def by_order(values: Tensor, placed: Tensor = placed) -> Tensor:
                return values.new_zeros(len(values), self.count).index_add_(1, self.of_rows, values).gather(1, placed)

            following_here = next_tokens[begin : begin + ROWS]
            codes.append(self.distributions.codes(logits, trajectory.sampling, following_here, columns.tolist(), by_order))
            for i in range(begin, min(begin + ROWS, roots - 1)):
                if panorama.text_slot[i] == OFF_TEXT:
                    found = self.distributions.better(reader, logits[i - begin], i, trajectory, panorama)
                    better[i] = 0 if found is None else place[i][self.clusters.of[found]].min(initial=self.count)
        better[-1] = 0
        small, wide = _unsigned(self.count), _unsigned(self.output.rows)
        return _Part(
            ranks.astype(small),
            order[:, :KEPT].cpu().numpy().astype(small),
            own.astype(small),
            better.astype(small),
            self.clusters.sizes[at].cumsum(1)[:, columns].astype(wide),
            *(np.concatenate(parts) for parts in zip(*codes, strict=True)),
        )

    def _before_drafted(
        self, reader: States, roots: Tensor, panorama: TreePanorama, tokens: npt.NDArray[np.int64], prompt: int
    ) -> Tensor:
        """The states before drafted nodes, that is after their parents, [M, d]; ``roots`` [L + 1, d] are those after the text's prefixes
        and ``tokens`` int64 [M] the nodes'. Nodes without children are not read."""
        first, parent = len(roots), panorama.parent.astype(np.int64)
        inner = np.unique(parent[parent >= first]) - first
        start, depth = np.zeros((2, len(parent)), np.int64)
        for i, p in enumerate(parent.tolist()):
            start[i], depth[i] = (p, 1) if p < first else (start[p - first], depth[p - first] + 1)
        row = np.full(first + len(parent), -1, np.int64)
        row[:first] = np.arange(first)
        parts, known = [roots], first
        for group in range(0, first, GROUP):
            mine = inner[(start[inner] >= group) & (start[inner] < group + GROUP)]
            mine = mine[np.argsort(depth[mine], kind="stable")]
            number = {int(node): n for n, node in enumerate(mine)}
            for level in np.unique(depth[mine]).tolist():
                level_nodes = mine[depth[mine] == level]
                for at in range(0, len(level_nodes), ROWS):
                    nodes = level_nodes[at : at + ROWS]
                    above = [[number[a] for a in self._above(int(n), parent, first)] for n in nodes]
                    where = torch.from_numpy(prompt - 1 + start[nodes] + depth[nodes]).to(roots.device)
                    ids = torch.from_numpy(tokens[nodes]).to(roots.device)
                    parts.append(reader.node_states(ids, where, [number[int(n)] for n in nodes], above, start[nodes].tolist()))
                    row[first + nodes] = known + np.arange(len(nodes))
                    known += len(nodes)
        return torch.cat(parts)[torch.from_numpy(row[parent]).to(roots.device)]

    @staticmethod
    def _above(node: int, parent: npt.NDArray[np.int64], first: int) -> list[int]:
        """The drafted ancestors of a drafted node, nearest last; all counted from the first drafted one."""
        found = []
        while (node := int(parent[node]) - first) >= 0:
            found.append(node)
        return found[::-1]

    def _decide(
        self, reader: States, scores: Tensor, tokens: Tensor, watched: npt.NDArray[np.int64], prompt: int
    ) -> None:
        """Replaces, in place, scores [N, M] of those text prefixes at which rounding could move one of the clusters ``watched`` int64
        [T, K + 1] (M: none) in the order: by scores from canonical states, as the runtime does."""
        count = len(watched)
        by_cluster = functional.pad(near_cluster_places(scores[:count], self.shortlists.margin), (0, 1))
        near = by_cluster.gather(1, torch.from_numpy(watched).to(scores.device)).any(1)
        for i in near.nonzero()[:, 0].tolist():
            state = reader.canonical_before(prompt + i)
            scores[i] = self.shortlists.scores(self.model.embedded(tokens[i : i + 1]), state)[0]

    def joined(self, router: str, proposals: Proposals, names: Sequence[str], parts: Sequence[_Part]) -> ClusterRanks:
        """The rows of all requests as one value."""
        widest = max(p.ranks.shape[1] for p in parts)
        ranks = [np.pad(p.ranks, ((0, 0), (0, widest - p.ranks.shape[1])), constant_values=self.count) for p in parts]
        columns: dict[str, Any] = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _Part._fields if name != "ranks"}
        return ClusterRanks(
            draft=self.draft,
            fitted=router,
            proposals=proposals,
            clusters=self.count,
            budgets=self.budgets,
            digests=tuple(names),
            node_offsets=np.cumsum([0, *(len(p.ranks) for p in parts)]),
            text_offsets=np.cumsum([0, *(len(p.own) for p in parts)]),
            of=self.of.astype(_unsigned(self.count)),
            ranks=np.concatenate(ranks),
            **columns,
        )


def _unsigned(most: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned dtype that holds ``most``."""
    return next(t for t in (np.uint8, np.uint16, np.uint32) if most <= np.iinfo(t).max)
