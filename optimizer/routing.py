"""What a router decides over a recording: hidden states are read once, and the places of clusters kept (DynaSpec, section 4.2).

A routed shortlist follows the draft's hidden states. Here the draft reads recorded texts, and the nodes of their tree panoramas, as
it does while decoding; at each node the router orders the clusters, and of that order is kept what replays ask
(:class:`optimizer.shortlist_replay.ClusterRanks`). At prefixes of the text near ties are settled by canonical states, as in
:mod:`runtime.shortlists`: the first k clusters of a canonical order are what the runtime selects at every k. Nodes off the text serve
trees, whose replay under shortlists is approximate; they are not settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from db.errors import CorruptedChunkError
from optimizer.artifacts import fitted
from optimizer.fit import Progress
from optimizer.shortlist_replay import CLUSTER_RANKS, MASS_SCALE, ClusterRanks, digest, stored_ranks
from runtime.decoder import shortlisted_model
from runtime.head_drafts import canonical_output, columns
from runtime.loading import LoadedPair
from runtime.models import CHUNK
from runtime.policies.document import ClustersShortlist, Policy
from runtime.policies.dynaspec import top_clusters
from runtime.sampling import CHOICE_MARGIN, Noise, filters, log_law, scaled
from runtime.shortlists import Shortlists, compile_shortlist
from runtime.tree_panorama import OFF_TEXT, ROWS, HeadPasses, LanguageModelPasses
from traces.errors import TraceError
from traces.recording import TREE_DEPTH, TREE_WIDTH
from traces.schema import Proposals, Trajectory, TreePanorama, request_seed
from traces.store import TraceStore

KEPT: Final = 16
"""First clusters of the order at every node that are kept: what other nodes of a tree's level add to its shortlist."""
GROUP: Final = 16
"""Starts whose drafted nodes are read together, so that what a pass sees stays short."""


class _States(Protocol):
    """A draft's states over one text and drafted nodes: what its output matrix reads."""

    def text_states(self) -> Tensor:
        """After every token of the text, [tokens, d]; zeros where the draft reads nothing."""

    def node_states(
        self, ids: Tensor, positions: Tensor, numbers: list[int], above: list[list[int]], starts: list[int]
    ) -> Tensor:
        """After drafted nodes, [n, d]; arguments as of the passes of :mod:`runtime.tree_panorama`."""

    def canonical_before(self, length: int) -> Tensor | None:
        """After the first ``length`` - 1 tokens of the text, by a canonical pass, [1, d]; None where the draft reads nothing there."""

    def canonical(self, start: int, path: list[int]) -> Tensor:
        """Float32 logits [vocab] after the first ``start`` output tokens and a drafted ``path``."""


class _LanguageModelStates(LanguageModelPasses):
    def text_states(self) -> Tensor:
        self._reserve(ROWS)
        ids = torch.tensor(self.text, device=self.device)
        return torch.cat([self.model.chain_states(ids[at : at + CHUNK], at) for at in range(0, len(ids), CHUNK)])

    def node_states(
        self, ids: Tensor, positions: Tensor, numbers: list[int], above: list[list[int]], starts: list[int]
    ) -> Tensor:
        slots, mask = self._place(numbers, above, starts)
        return self.model.scattered_states(ids, positions.clamp_max(self.model.max_positions - 1), slots, mask)

    def canonical_before(self, length: int) -> Tensor | None:
        return self.model.canonical_state(self.text[: length - 1]) if length > 1 else None


class _HeadStates(HeadPasses):
    def text_states(self) -> Tensor:
        head, ids = self.head, torch.tensor(self.text, device=self.device)
        self.target.reserve(len(ids))
        self._reserve(ROWS)
        out = torch.zeros(1, head.hidden_size, device=self.device, dtype=head.dtype)
        if len(ids) > 1:
            self.target.read(ids[:-1], 0)
            features = self.target.tapped[:, columns(self.target, head)]
            parts = [head.chain(ids[at : at + CHUNK], features[at - 1 : at + CHUNK - 1], at)[1] for at in range(1, len(ids), CHUNK)]
            out = torch.cat([out, *parts])
        self._root_hidden, self._hidden = out[self.prompt - 1 :], out.new_zeros(0, out.shape[1])
        return torch.cat([out[:1], head.state(out[1:])])

    def node_states(
        self, ids: Tensor, positions: Tensor, numbers: list[int], above: list[list[int]], starts: list[int]
    ) -> Tensor:
        slots, mask = self._place(numbers, above, starts)
        hidden = torch.stack([self._hidden[a[-1]] if a else self._root_hidden[s] for a, s in zip(above, starts, strict=True)])
        out = self.head.scattered_outputs(ids, hidden, positions.clamp_max(self.head.max_positions - 1), slots, mask)
        self._hidden = torch.cat([self._hidden[: numbers[0]], out])
        return self.head.state(out)

    def canonical_before(self, length: int) -> Tensor | None:
        return self.head.state(canonical_output(self.target, self.head, self.text[: length - 1], [])) if length > 2 else None


def _states_over(pair: LoadedPair, draft: str, text: list[int], prompt: int) -> _States:
    if draft in pair.heads:
        return _HeadStates(pair.target, pair.heads[draft], text, prompt)
    return _LanguageModelStates(pair.drafts[draft], text, prompt)


def text_states(pair: LoadedPair, draft: str, text: list[int]) -> Tensor:
    """What the draft's output matrix reads after each token of a text, [tokens, d]. A head reads the target's features; its first row is
    zeros."""
    return _states_over(pair, draft, text, 1).text_states()


def budget_grid(clusters: int) -> tuple[int, ...]:
    """The numbers of clusters whose tokens and mass are kept: 1 to 8, then by steps of sqrt(2), and all."""
    found = {*range(1, 9), *(round(2 ** (i / 2)) for i in range(6, 64))}
    return (*sorted(k for k in found if k < clusters), clusters)


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
    """The cluster ranks of all of a recording's laws of a draft under a stored router, for ``routed`` of a
    :class:`optimizer.replay.ReplayTrace`: stored ones where they hold every request, else made, the new requests alone, and stored.

    Nothing is fitted, so all requests are ranked. Raises TraceError for a recording of another pair or without trees of the draft,
    PolicyError where ``router`` is no router of this draft and head.
    """
    info = store.get_recording(recording)
    if info.pair_id != pair.id:
        raise TraceError(f"recording {info.id} is of pair {info.pair_id}, this is pair {pair.id}; name one of this pair")
    router = store.get_artifact(router).id
    shortlists = _shortlists(store, pair, draft, router)
    loaded = store.load(info.id, [draft], trees=True, skip_corrupted=True).having(trees=[draft], proposals=proposals)
    if not loaded.requests:
        flag = "" if proposals == "coupled" else f" --tree-proposals {proposals}"
        raise TraceError(
            f"recording {info.id} has no trees of draft {draft!r}, whose laws a router's ranks are of; `record --resume {info.id} "
            f"--tree-width {TREE_WIDTH} --tree-depth {TREE_DEPTH}{flag}` makes them"
        )
    try:
        there = stored_ranks(store, info.id, draft, router, proposals)
    except CorruptedChunkError:
        there = None
    texts, trees = loaded.trajectories, loaded.trees(draft, proposals)
    names = [digest(t, p) for t, p in zip(texts, trees, strict=True)]
    known = {} if there is None else there.requests
    if there is not None and known.keys() >= set(names):
        return there
    ranker = _Ranker(pair, shortlists)
    parts: list[_Part] = []
    for n, (name, text, panorama) in enumerate(zip(names, texts, trees, strict=True)):
        parts.append(_part(there, known[name]) if there is not None and name in known else ranker.rank(text, panorama))
        progress("ranks", n + 1, len(names))
    made = ranker.joined(router, proposals, names, parts)
    document, arrays = made.to_document()
    origin = {"recording": info.id, "draft": draft, "router": router, "proposals": proposals}
    document |= {**origin, "pair": pair.id}
    while True:
        name = store.put_artifact(CLUSTER_RANKS, document, arrays, pair_id=pair.id, provenance=origin)
        try:
            store.get_artifact(name)
        except CorruptedChunkError:  # this very content was there, damaged; ids are hashes of contents, so a new one needs another
            document["instead_of"] = name
        else:
            return replace(made, artifact=name)


def _shortlists(store: TraceStore, pair: LoadedPair, draft: str, router: str) -> Shortlists:
    """The router as the runtime uses it. Raises PolicyError where it is of another draft or head."""
    policy = Policy(draft=draft, shortlist=ClustersShortlist(k0=1, k1=1, k_min=1, artifact=router))
    rule = compile_shortlist(policy, fitted(store, pair.id))
    assert rule is not None
    return Shortlists(rule, shortlisted_model(pair, draft), pair.exact)


class _Part(NamedTuple):
    """The rows of one request: columns of :class:`ClusterRanks`."""

    ranks: npt.NDArray[Any]
    order: npt.NDArray[Any]
    own: npt.NDArray[Any]
    better: npt.NDArray[Any]
    sizes: npt.NDArray[Any]
    mass: npt.NDArray[Any]


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
        self.row = np.full(pair.target.vocab_size, -1, np.int64)
        self.row[self.output.ids] = np.arange(self.output.rows)
        self.of_rows = torch.from_numpy(self.clusters.of).to(self.model.device)

    @torch.no_grad()
    def rank(self, trajectory: Trajectory, panorama: TreePanorama) -> _Part:
        """The rows of one request."""
        output, prompt = trajectory.output_ids.tolist(), len(trajectory.prompt_ids)
        text, roots = [*trajectory.prompt_ids.tolist(), *output], len(output) + 1
        reader = _states_over(self.pair, self.draft, text, prompt)
        states = reader.text_states()
        after = functional.pad(states, (0, 0, 1, 0))  # row p: after the first p tokens
        off = panorama.tokens[panorama.parent, panorama.slot].astype(np.int64)
        tokens = torch.from_numpy(np.concatenate([np.array(text[prompt - 1 :], np.int64), off])).to(self.model.device)
        before = torch.cat([after[prompt - 1 : -1], self._before_drafted(reader, after[prompt:], panorama, off, prompt)])
        rows = [slice(at, at + ROWS) for at in range(0, len(tokens), ROWS)]
        scores = torch.cat([self.shortlists.scores(self.model.embedded(tokens[at]), before[at]) for at in rows])
        following = np.array([self.of[t] for t in output] + [self.count])
        exists = np.arange(panorama.width) < panorama.count[:, None]
        children = np.where(exists, self.of[panorama.tokens], self.count)
        if self.pair.exact:
            self._settle(reader, scores, tokens, np.concatenate([children[:roots], following[:, None]], 1), prompt)
        order = top_clusters(scores, self.count)
        place = functional.pad(order.argsort(-1), (0, 1), value=self.count).cpu().numpy()
        ranks = np.take_along_axis(place, children, 1)
        own = place[np.arange(roots), following]
        slot = np.where(panorama.text_slot[:roots] < panorama.width, panorama.text_slot[:roots], 0)[:, None]
        better = np.where(np.arange(panorama.width) < slot, ranks[:roots], self.count).min(1)
        at = order[:roots].cpu().numpy()
        columns = np.array(self.budgets) - 1
        mass = []
        for begin in range(0, roots, ROWS):
            part = states[prompt - 1 + begin : prompt - 1 + begin + ROWS]
            logits = functional.linear(part, self.output.weight, self.output.bias).float()
            q = log_law(logits, trajectory.sampling).exp()
            held = q.new_zeros(len(q), self.count).index_add_(1, self.of_rows, q)
            kept = held.gather(1, order[begin : begin + len(q)]).cumsum(1).cpu().numpy()[:, columns]
            mass.append(np.rint(kept.clip(0.0, 1.0) * MASS_SCALE).astype(np.uint8))
            for i in range(begin, min(begin + ROWS, roots - 1)):
                if panorama.text_slot[i] == OFF_TEXT:
                    found = self._better(reader, logits[i - begin], i, trajectory, panorama)
                    better[i] = place[i][found].min(initial=self.count)
        better[-1] = 0
        small, wide = _unsigned(self.count), _unsigned(self.output.rows)
        return _Part(
            ranks.astype(small),
            order[:, :KEPT].cpu().numpy().astype(small),
            own.astype(small),
            better.astype(small),
            self.clusters.sizes[at].cumsum(1)[:, columns].astype(wide),
            np.concatenate(mass),
        )

    def _before_drafted(
        self, reader: _States, roots: Tensor, panorama: TreePanorama, tokens: npt.NDArray[np.int64], prompt: int
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

    def _settle(
        self, reader: _States, scores: Tensor, tokens: Tensor, watched: npt.NDArray[np.int64], prompt: int
    ) -> None:
        """Replaces, in place, scores [N, M] of those text prefixes at which rounding could move one of the clusters ``watched`` int64
        [T, K + 1] (M: none) in the order: by scores from canonical states, as the runtime does."""
        count = len(watched)
        values, order = scores[:count].sort(dim=-1, descending=True, stable=True)
        near = values[:, :-1] - values[:, 1:] <= self.shortlists.margin
        touched = functional.pad(near, (1, 0)) | functional.pad(near, (0, 1))
        by_cluster = functional.pad(torch.zeros_like(touched).scatter_(1, order, touched), (0, 1))
        unsure = by_cluster.gather(1, torch.from_numpy(watched).to(scores.device)).any(1)
        for i in unsure.nonzero()[:, 0].tolist():
            state = reader.canonical_before(prompt + i)
            scores[i] = self.shortlists.scores(self.model.embedded(tokens[i : i + 1]), state)[0]

    def _better(
        self, reader: _States, logits: Tensor, start: int, trajectory: Trajectory, panorama: TreePanorama
    ) -> npt.NDArray[np.int64]:
        """Clusters that hold a token better than the text's next one after ``start`` output tokens, where that is none of the recorded
        children; ``logits`` [rows]. All, where filters or proposals by probability leave unsaid what the draft would propose."""
        sampling, token = trajectory.sampling, int(trajectory.output_ids[start])
        row, everything = int(self.row[token]), np.arange(self.count)
        if row < 0 or panorama.proposals != "coupled" or filters(sampling, self.pair.target.vocab_size):
            return everything
        x = self._perturbed(logits, start, trajectory)
        others = (x - x[row]).abs()
        others[row] = torch.inf
        if self.pair.exact and float(others.min()) < CHOICE_MARGIN / (1.0 if sampling.greedy else min(1.0, sampling.temperature)):
            ids = torch.from_numpy(self.output.ids).to(logits.device)
            x = self._perturbed(reader.canonical(start, []).index_select(0, ids), start, trajectory)
        above = x > x[row]
        above[:row] |= x[:row] == x[row]
        return np.unique(self.clusters.of[above.cpu().numpy()])

    def _perturbed(self, logits: Tensor, start: int, trajectory: Trajectory) -> Tensor:
        """What proposals are ranked by, [rows]: log q + g but for a constant."""
        x = scaled(logits, trajectory.sampling)
        if trajectory.sampling.greedy:
            return x
        seed = request_seed(trajectory.sampling.seed, trajectory.request_id)
        noise = Noise(seed, self.pair.target.vocab_size, logits.device).row(len(trajectory.prompt_ids) + start)
        return x + noise.index_select(0, torch.from_numpy(self.output.ids).to(logits.device))

    def joined(self, router: str, proposals: Proposals, names: Sequence[str], parts: Sequence[_Part]) -> ClusterRanks:
        """The rows of all requests as one value."""
        widest = max(p.ranks.shape[1] for p in parts)
        ranks = [np.pad(p.ranks, ((0, 0), (0, widest - p.ranks.shape[1])), constant_values=self.count) for p in parts]
        return ClusterRanks(
            self.draft,
            router,
            proposals,
            self.count,
            self.budgets,
            tuple(names),
            node_offsets=np.cumsum([0, *(len(p.ranks) for p in parts)]),
            text_offsets=np.cumsum([0, *(len(p.own) for p in parts)]),
            of=self.of.astype(_unsigned(self.count)),
            ranks=np.concatenate(ranks),
            order=np.concatenate([p.order for p in parts]),
            own=np.concatenate([p.own for p in parts]),
            better=np.concatenate([p.better for p in parts]),
            sizes=np.concatenate([p.sizes for p in parts]),
            mass=np.concatenate([p.mass for p in parts]),
        )


def _unsigned(most: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned dtype that holds ``most``."""
    return next(t for t in (np.uint8, np.uint16, np.uint32) if most <= np.iinfo(t).max)
