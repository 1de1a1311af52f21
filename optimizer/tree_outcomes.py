"""What every start of a trace would grow under one growth, tabulated once and shared by every window, selection and stratification.

The laws come from tree panoramas, the growing from the very functions that decode (:class:`runtime.policies.trees.Growing`), all starts at
once. What is kept of a grown tree is what any policy asks of it: for each depth gamma and each node on the text its *rank*
among the candidates
of gamma levels. Under a selection of N a node is kept iff its rank is below N, so one table answers every N, every fraction
and every window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from optimizer.tree_tabulation import ABSENT, NEVER, scratch, tabulate_plainly
from runtime.policies.trees import ORDER_BITS, Growing, Laws, TreeRule, gap_weights
from traces.errors import TraceError
from traces.schema import Trajectory, TreePanorama

CHUNK: Final = 512
"""Starts grown together."""
OFF_TEXT: Final = 255
NO_RANKS: Final = np.zeros((0, 1), np.int32)
NO_BUDGETS: Final = np.zeros(0, np.int64)


class ClusterUnion(NamedTuple):
    """What nodes of one level add to each other's routed shortlists: ``cluster`` uint16 [nodes, K] of every child, ``order`` uint16
    [nodes, C], each node's first clusters, and ``sizes`` int64 [M + 1], their tokens; cluster M holds none and is never in."""

    cluster: npt.NDArray[np.uint16]
    order: npt.NDArray[np.uint16]
    sizes: npt.NDArray[np.int64]


NO_UNION: Final = ClusterUnion(np.zeros((0, 1), np.uint16), np.zeros((0, 0), np.uint16), np.zeros(0, np.int64))


class ShortlistRanks(NamedTuple):
    """A shortlist over a forest: a child is in it at level l where its ``ranks`` int32 [nodes, K] lies below ``budgets`` int64 [depth]
    [l - 1], or, with a ``union``, where the level's other nodes add its cluster."""

    ranks: npt.NDArray[np.int32]
    budgets: npt.NDArray[np.int64]
    union: ClusterUnion = NO_UNION

    def kept(self, nodes: npt.NDArray[np.int64], level: int, count: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], ...]:
        """Of nodes [B, F], -1 where there is none: the slots of their children, those in the shortlist first and in order, int64
        [B, F, K], and how many these are, int64 [B, F]."""
        safe = np.maximum(nodes, 0)
        inside = self.ranks[safe] < self.budgets[level - 1]
        if len(self.union.order):
            added = self.added(nodes, level)
            inside |= np.take_along_axis(added[:, None], self.union.cluster[safe].astype(np.int64), -1)
        inside &= np.arange(inside.shape[-1]) < count[safe][..., None]
        return np.argsort(~inside, axis=-1, kind="stable"), inside.sum(-1)

    def added(self, nodes: npt.NDArray[np.int64], level: int) -> npt.NDArray[np.bool_]:
        """The clusters in the union over nodes [B, F] (-1: none), as far as their orders go, bool [B, M + 1]."""
        last = len(self.union.sizes) - 1
        first = self.union.order[np.maximum(nodes, 0), : self.budgets[level - 1]].astype(np.int64)
        first[nodes < 0] = last
        found = np.zeros((len(nodes), last + 1), np.bool_)
        np.put_along_axis(found, first.reshape(len(nodes), -1), True, 1)
        found[:, last] = False
        return found

    def size(self, nodes: npt.NDArray[np.int64], level: int) -> npt.NDArray[np.int64]:
        """Tokens of :meth:`added`, int64 [B]; of a budget beyond the orders as many more as it exceeds them."""
        tokens: npt.NDArray[np.int64] = self.added(nodes, level) @ self.union.sizes
        reach = self.union.order.shape[1]
        return np.asarray(np.minimum(tokens * max(self.budgets[level - 1], reach) // reach, self.union.sizes.sum()))


@dataclass(frozen=True, eq=False)
class Forest:
    """One draft's tree panoramas over a trace, joined: nodes of all trajectories follow one another.

    ``root`` int64 [positions]: the node of each start. ``child`` int32 [nodes, K] (-1: not recorded), ``text_slot`` uint8
    [nodes], and the laws'
    codes: ``logp``, ``gap`` uint8 [nodes, K]; ``entropy``, ``top_entropy``, ``count`` uint8 [nodes]; ``tokens`` int32 [nodes, K] their ids.
    ``limit`` int64
    [positions]: the deepest
    level the token budget allows. ``full``: no filter of the sampling can leave a law with fewer children than are read.
    """

    draft: str
    width: int
    depth: int
    shared: bool
    covers: frozenset[str]
    full: bool
    root: npt.NDArray[np.int64]
    limit: npt.NDArray[np.int64]
    child: npt.NDArray[np.int32]
    text_slot: npt.NDArray[np.uint8]
    logp: npt.NDArray[np.uint8]
    gap: npt.NDArray[np.uint8]
    count: npt.NDArray[np.uint8]
    entropy: npt.NDArray[np.uint8]
    top_entropy: npt.NDArray[np.uint8]
    tokens: npt.NDArray[np.int32]

    def laws(self, nodes: npt.NDArray[np.int64], kept: tuple[npt.NDArray[np.int64], ...] | None = None) -> Laws:
        """The laws of nodes [B, F]; -1 is a node that does not exist. Tokens are left 0: replay does not look at them. ``kept``: the
        children that a shortlist leaves (:meth:`ShortlistRanks.kept`)."""
        gone = nodes < 0
        safe = np.where(gone, 0, nodes)

        def whole(column: npt.NDArray[Any]) -> torch.Tensor:
            found = column[safe].astype(np.int64)
            if kept is not None and found.ndim == 3:
                found = np.take_along_axis(found, kept[0], -1)
                if column is self.gap:
                    found = np.maximum(0, found - found[..., :1])
            return torch.from_numpy(found)

        count = whole(self.count) if kept is None else torch.from_numpy(kept[1])
        if gone.any():
            count[torch.from_numpy(gone)] = 0
        logp = whole(self.logp)
        return Laws(torch.zeros_like(logp), logp, whole(self.gap), whole(self.entropy), whole(self.top_entropy), count)


def join_trees(trajectories: Sequence[Trajectory], panoramas: Sequence[TreePanorama]) -> Forest:
    """Joins one draft's tree panoramas, one per trajectory in the same order. Raises TraceError where they do not match.

    Where they were recorded to different limits the smallest count, and a growth counts as covered where all cover it.
    """
    if not panoramas or len(panoramas) != len(trajectories):
        raise TraceError(f"tree panoramas for {len(panoramas)} of {len(trajectories)} requests; retrace the recording")
    first = panoramas[0]
    width = min(p.width for p in panoramas)
    roots, limits, children, offset = [], [], [], 0
    for t, p in zip(trajectories, panoramas, strict=True):
        if p.draft != first.draft or p.shared != first.shared or p.proposals != first.proposals:
            raise TraceError(f"request {t.request_id!r}: a tree panorama of another draft or kind among those of {first.draft!r}")
        length = len(t.output_ids)
        if p.positions != length:
            raise TraceError(
                f"request {t.request_id!r}: the tree panorama of {p.draft!r} covers {p.positions} positions, the text has {length}"
            )
        nodes = len(p.text_slot)
        child = np.full((nodes, p.width), -1, np.int32)
        child[p.parent, p.slot] = np.arange(length + 1, nodes, dtype=np.int32) + offset
        if p.shared:
            on = np.flatnonzero(p.text_slot[:length] < p.width)
            child[on, p.text_slot[on]] = on + 1 + offset
        children.append(child[:, :width])
        roots.append(np.arange(length, dtype=np.int64) + offset)
        limits.append(t.max_new_tokens - np.arange(length, dtype=np.int64) - 1)
        offset += nodes

    def joined(name: str) -> npt.NDArray[np.uint8]:
        parts = [getattr(p, name) for p in panoramas]
        return np.ascontiguousarray(np.concatenate([x[:, :width] if x.ndim == 2 else x for x in parts]))

    return Forest(
        draft=first.draft,
        width=width,
        depth=min(p.depth for p in panoramas),
        shared=first.shared,
        covers=frozenset.intersection(*(frozenset(p.covers) for p in panoramas)),
        full=all(t.sampling.greedy or (t.sampling.top_k == 0 and t.sampling.top_p >= 1.0) for t in trajectories),
        root=np.concatenate(roots),
        limit=np.concatenate(limits),
        child=np.concatenate(children),
        text_slot=joined("text_slot"),
        logp=joined("logp"),
        gap=joined("gap"),
        count=np.minimum(joined("count"), width),
        entropy=joined("entropy"),
        top_entropy=joined("top_entropy"),
        tokens=np.ascontiguousarray(np.concatenate([p.tokens[:, :width] for p in panoramas])),
    )


@dataclass(frozen=True, eq=False)
class GrowthTable:
    """What each start grows under one growth, D levels deep.

    With P starts: ``rank`` uint16 [P, D, D]: entry (gamma - 1, l - 1) is the rank, among the candidates of gamma levels, of the node on the
    text at level l (ABSENT: not a candidate). ``pool`` uint16 [P, D]: candidates of gamma levels. ``width`` uint8 [P, D]: nodes of
    level l that the next pass reads; ``read`` bool [P, D]: the node on the text is among them. ``phi`` uint16 [P, D]:
    HeteroSpec's Phi after
    level l. ``best`` uint16 [P, D, 3]: what a stop reads of level l's cheapest node: -log q, -log of the product of q, entropy, in 1/16
    nat. ``end`` uint8 [P]: the level at which no node passes the classifier; ``missing``: the first level that needs a law which was not
    recorded (NEVER for none). ``size`` int32 [P, D]: tokens of a routed shortlist at level l, as far as they are known; [0, D] without one.
    """

    depth: int
    rank: npt.NDArray[np.uint16]
    pool: npt.NDArray[np.uint16]
    width: npt.NDArray[np.uint8]
    read: npt.NDArray[np.bool_]
    phi: npt.NDArray[np.uint16]
    best: npt.NDArray[np.uint16]
    end: npt.NDArray[np.uint8]
    missing: npt.NDArray[np.uint8]
    size: npt.NDArray[np.int32]

    @classmethod
    def empty(cls, starts: int, depth: int, *, routed: bool = False) -> GrowthTable:
        """A table of starts that grow nothing."""

        def zeros(*size: int) -> npt.NDArray[np.uint16]:
            return np.zeros((starts, depth, *size), np.uint16)

        never = np.full(starts, NEVER, np.uint8)
        return cls(
            depth,
            rank=np.full((starts, depth, depth), ABSENT, np.uint16),
            pool=zeros(),
            width=np.zeros((starts, depth), np.uint8),
            read=np.zeros((starts, depth), np.bool_),
            phi=zeros(),
            best=zeros(3),
            end=never,
            missing=never.copy(),
            size=np.zeros((starts if routed else 0, depth), np.int32),
        )

    def stops(self, rule: TreeRule) -> npt.NDArray[np.uint8]:
        """The level at which a rule's stop triggers at each start, uint8 [P]; NEVER where it does not."""
        if not rule.reads_stop:
            return np.full(len(self.end), NEVER, np.uint8)
        limits = np.array([rule.max_logp, rule.max_joint, rule.max_entropy])
        triggered: npt.NDArray[np.bool_] = np.any(self.best > limits, axis=-1)
        return np.where(triggered.any(1), triggered.argmax(1) + 1, NEVER).astype(np.uint8)


def tabulate_growth(
    forest: Forest,
    rules: Sequence[tuple[TreeRule, npt.NDArray[np.int64]]],
    depth: int,
    shortlist: ShortlistRanks | None = None,
) -> GrowthTable:
    """Grows the trees of starts ``depth`` levels deep and keeps what policies ask of them.

    ``rules``: each rule with the starts (positions of the trace) that it grows; one per temperature class. Selection, stop and bins of the
    rules are ignored. ``shortlist`` leaves out the children beyond it; those that stay keep their codes, and a law has no more of them than
    were recorded, so trees under a shortlist are approximate (docs/shortlists.md). Raises TraceError when a rule reads more children than
    were recorded.
    """
    rule = rules[0][0]
    if rule.width > forest.width:
        raise TraceError(
            f"the policy reads {rule.width} children of a node of draft {forest.draft!r}, the recording holds {forest.width}: "
            f"`record --resume ID --tree-width {rule.width}` widens it"
        )
    count = len(forest.root)
    depth = min(depth, len(rule.static)) if rule.static else depth
    table = GrowthTable.empty(count, depth, routed=shortlist is not None and len(shortlist.union.order) > 0)
    if rule.static and forest.shared and forest.full and not rule.reads_stop and shortlist is None:
        _tabulate_static(forest, rule, table)
        return table
    for one, chosen in rules:
        if not one.static and one.confidence is None:
            _tabulate_plain(forest, one, table, chosen, shortlist)
            continue
        plain = replace(one, top_n=None, reads_stop=False, kept=(0,), thresholds=(), alpha=0)  # `kept` asks for phi
        for at in range(0, len(chosen), CHUNK):
            _tabulate_chunk(forest, plain, table, chosen[at : at + CHUNK], shortlist)
    return table


def _tabulate_plain(
    forest: Forest, rule: TreeRule, table: GrowthTable, starts: npt.NDArray[np.int64], shortlist: ShortlistRanks | None
) -> None:
    weights, logs = gap_weights(rule.sharpness, torch.device("cpu"))
    union = NO_UNION if shortlist is None else shortlist.union
    tabulate_plainly(
        starts.astype(np.int64), forest.root, forest.limit, forest.child, forest.text_slot, forest.gap if rule.coupled else forest.logp,
        forest.logp, forest.entropy, forest.top_entropy, forest.count, rule.width, rule.frontier, table.depth, rule.coupled,
        weights.numpy(), logs.numpy(), *((NO_RANKS, NO_BUDGETS) if shortlist is None else (shortlist.ranks, shortlist.budgets)),
        union.cluster, union.order, union.sizes, np.zeros(len(union.sizes), np.int64),
        *scratch(rule.width, rule.frontier, table.depth), table.rank, table.pool, table.width, table.read, table.phi, table.best,
        table.missing, table.size,
    )  # fmt: skip


def _tabulate_chunk(
    forest: Forest,
    rule: TreeRule,
    table: GrowthTable,
    starts: npt.NDArray[np.int64],
    shortlist: ShortlistRanks | None = None,
) -> None:
    batch, depth = len(starts), table.depth
    growing = Growing(rule, batch, torch.device("cpu"))
    front = forest.root[starts][:, None]  # nodes of the frontier, -1 where there is none
    on = forest.root[starts].copy()  # the node on the text, -1 once it is lost
    on_key = np.full((batch, depth), -1, np.int64)
    below = np.zeros((batch, depth, depth), np.int64)  # [start, on-text level, level]: candidates cheaper than the on-text node
    sizes = np.zeros((batch, depth), np.int64)
    keys: list[npt.NDArray[np.int64]] = []
    rows = np.arange(batch)
    offset = 0
    missing, end = (np.full(batch, NEVER, np.uint8) for _ in range(2))
    limit = forest.limit[starts]
    for level in range(1, depth + 1):
        kept = None if shortlist is None else shortlist.kept(front, level, forest.count)
        if shortlist is not None and len(table.size):
            table.size[starts, level - 1] = shortlist.size(front, level)
        laws = forest.laws(front, kept)
        added = growing.add(laws)
        cost, eligible = added.cost.numpy(), added.eligible.numpy()
        places = cost.shape[1]
        key = np.where(eligible, (cost << ORDER_BITS) + (offset + np.arange(places)), np.int64(1) << 62)
        keys.append(key)
        sizes[:, level - 1] = eligible.sum(1)
        # Where the node on the text stands among this level's places.
        alive = on >= 0
        hit = (front == on[:, None]) & alive[:, None]
        slot = forest.text_slot[np.maximum(on, 0)].astype(np.int64)
        if kept is not None:  # its slot among those that the shortlist leaves
            at = kept[0][rows, hit.argmax(1)]
            left = (at == slot[:, None]) & (np.arange(at.shape[1]) < kept[1][rows, hit.argmax(1)][:, None])
            slot = np.where(left.any(1), left.argmax(1), OFF_TEXT)
        found = hit.any(1) & (slot < rule.width)
        place = hit.argmax(1) * rule.width + np.minimum(slot, rule.width - 1)
        if rule.static:
            full = np.full(max(1, front.shape[1]) * rule.width, -1)
            full[list(rule.static[level - 1].places)] = np.arange(places)
            place = full[np.minimum(place, len(full) - 1)]
            found &= place >= 0
            place = np.maximum(place, 0)
        found &= eligible[rows, np.minimum(place, places - 1)]
        on_key[found, level - 1] = key[rows, np.minimum(place, places - 1)][found]
        following = np.where(found, forest.child[np.maximum(on, 0), np.minimum(forest.text_slot[np.maximum(on, 0)], forest.width - 1)], -1)
        # The next frontier as nodes.
        index, exists = added.frontier.index.numpy(), added.frontier.exists.numpy()
        parents = np.take_along_axis(front, np.take_along_axis(added.parent.numpy(), index, 1), 1)
        slots = np.take_along_axis(np.broadcast_to(added.rank.numpy(), cost.shape), index, 1)
        if kept is not None:
            slots = kept[0][rows[:, None], np.take_along_axis(np.broadcast_to(added.parent.numpy(), cost.shape), index, 1), slots]
        nodes = np.where(exists & (parents >= 0), forest.child[np.maximum(parents, 0), slots], -1).astype(np.int64)
        table.width[starts, level - 1] = exists.sum(1)
        table.read[starts, level - 1] = found & ((index == place[:, None]) & exists).any(1)
        table.phi[starts, level - 1] = np.minimum(added.phi.numpy(), 65535)
        first = eligible.argmax(1) if rule.static else key.argmin(1)
        of, rank = (np.broadcast_to(x.numpy(), cost.shape)[rows, first] for x in (added.parent, added.rank))
        codes = (laws.logp.numpy()[rows, of, rank], added.q_cost.numpy()[rows, first], laws.entropy.numpy()[rows, of])
        some = np.any(eligible, axis=1)[:, None]
        table.best[starts, level - 1] = np.where(some, np.minimum(np.stack(codes, 1), 65535), 0)
        if rule.confidence is not None:
            end[~exists.any(1) & (end == NEVER)] = level
        lost = (exists & (nodes < 0)).any(1) & (missing == NEVER) & (limit > level)
        missing[lost] = level + 1
        front, on = nodes, following.astype(np.int64)
        offset += places
    for level in range(depth):
        at = on_key[:, level]
        there = at >= 0
        if not there.any():
            continue
        for other in range(depth):
            below[:, level, other] = (keys[other] < at[:, None]).sum(1)
        total = below[:, level].cumsum(1)
        for gamma in range(level, depth):
            table.rank[starts[there], gamma, level] = np.minimum(total[there, gamma], ABSENT - 1)
    table.pool[starts] = np.minimum(sizes.cumsum(1), 65535)
    table.end[starts], table.missing[starts] = end, missing


def _tabulate_static(forest: Forest, rule: TreeRule, table: GrowthTable) -> None:
    """Static trees on a draft that is a function of its prefix: the ranks of the text's own tokens say everything, at any depth."""
    count = len(forest.root)
    sizes = []
    frontier = [0]  # numbers of the expanded nodes above
    children: list[dict[int, int]] = [{}]
    for level in rule.static:
        numbers = []
        for place in level.places:
            parent, rank = frontier[place // rule.width], place % rule.width
            children.append({})
            children[parent][rank] = len(children) - 1
            numbers.append(len(children) - 1)
        sizes.append(len(numbers))
        frontier = [numbers[i] for i in level.expanded]
    step = np.full((len(children), 256), -1, np.int64)
    for node, found in enumerate(children):
        for rank, number in found.items():
            step[node, rank] = number
    expanded = np.array([bool(c) for c in children])
    last = len(forest.text_slot) - 1
    at = np.zeros(count, np.int64)
    nodes = 0
    for depth in range(table.depth):
        # The node of the text's own prefix at this depth; the last prefix of a text has no following token, which ends the walk.
        prefix = np.minimum(forest.root + depth, last)
        at = np.where(at >= 0, step[np.maximum(at, 0), forest.text_slot[prefix]], -1)
        table.rank[:, depth:, depth] = np.where(at >= 0, 0, ABSENT)[:, None]
        table.read[:, depth] = (at >= 0) & expanded[np.maximum(at, 0)]
        nodes += sizes[depth]
        table.pool[:, depth] = nodes
        table.width[:, depth] = len(rule.static[depth].expanded)
