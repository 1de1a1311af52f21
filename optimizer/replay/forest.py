"""What every start of a trace would grow under one growth, tabulated once and shared by every
window, selection and stratification.

What is kept of a grown tree is what any policy asks of it: for each depth gamma and each node on
the text its *rank* among the candidates of gamma levels. Under a selection of N a node is kept iff
its rank is below N, so one table answers every N, every fraction and every window. The trees grow
by the function that decodes (:mod:`optimizer.replay.tree_tables`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spectune.optimizer.replay.tree_tables import (
    GrowthTable,
    NodeLinks,
    Scratch,
    tabulate,
)
from spectune.runtime.trees.grow import NONE, Codes, Growing, TreeRule
from spectune.traces.errors import TraceError
from spectune.traces.schema import SHORTLIST_MARK
from spectune.traces.tables import Panorama, Trajectory

GROWN_TOGETHER: Final = 1024
"""Starts whose trees are grown together when looking for what they lack."""


@dataclass(frozen=True, eq=False)
class Forest:
    """One draft's panoramas over a trace, joined: nodes of all trajectories follow one another.

    ``root`` int64 [positions]: the node of each start. ``child`` int32 [nodes, K] (-1: not
    recorded), ``text_slot`` uint8 [nodes], and the distributions: ``tokens`` int32, ``logp`` and
    ``gap`` uint16 [nodes, K], ``entropy`` and ``top_entropy`` uint16, ``count`` uint8 [nodes].
    ``limit`` int64 [positions]: the deepest level the token budget allows. ``full``: neither a
    filter of the sampling nor a shortlist can leave a distribution with fewer children than are
    read.
    """

    draft: str
    width: int
    depth: int
    shared: bool
    full: bool
    root: npt.NDArray[np.int64]
    limit: npt.NDArray[np.int64]
    child: npt.NDArray[np.int32]
    text_slot: npt.NDArray[np.uint8]
    logp: npt.NDArray[np.uint16]
    gap: npt.NDArray[np.uint16]
    count: npt.NDArray[np.uint8]
    entropy: npt.NDArray[np.uint16]
    top_entropy: npt.NDArray[np.uint16]
    tokens: npt.NDArray[np.int32]

    @property
    def codes(self) -> Codes:
        """The distributions of all nodes."""
        return Codes(self.tokens, self.logp, self.gap, self.entropy, self.top_entropy, self.count)

    @property
    def trie(self) -> NodeLinks:
        return NodeLinks(self.root, self.limit, self.child, self.text_slot)


def join_trees(
    trajectories: Sequence[Trajectory], panoramas: Sequence[Panorama], past: int = 0
) -> Forest:
    """Joins one draft's panoramas, one per trajectory in the same order.

    Where they were recorded to different limits the smallest count. ``past`` tokens may be drafted
    beyond those that were asked for.
    """
    first = panoramas[0]
    full = SHORTLIST_MARK not in first.draft
    full &= not any(t.sampling.filtered for t in trajectories)
    width = min(p.width for p in panoramas)
    roots, limits, children, offset = [], [], [], 0
    for t, p in zip(trajectories, panoramas, strict=True):
        starts, child = np.arange(p.positions, dtype=np.int64), p.children[:, :width]
        children.append(np.where(child < 0, -1, child + offset).astype(np.int32))
        roots.append(starts + offset)
        limits.append(t.max_new_tokens + past - starts - 1)
        offset += len(p.trie.text_slot)

    def joined(name: str) -> npt.NDArray[Any]:
        parts = [getattr(p.trie, name) for p in panoramas]
        cut = [x[:, :width] if x.ndim == 2 else x for x in parts]
        return np.ascontiguousarray(np.concatenate(cut))

    return Forest(
        draft=first.draft,
        width=width,
        depth=min(p.gamma_max if width == 1 else p.depth for p in panoramas),
        shared=first.shared,
        full=full,
        root=np.concatenate(roots),
        limit=np.concatenate(limits),
        child=np.concatenate(children),
        text_slot=joined("text_slot"),
        logp=joined("logp"),
        gap=joined("gap"),
        count=np.minimum(joined("count"), width),
        entropy=joined("entropy"),
        top_entropy=joined("top_entropy"),
        tokens=joined("tokens"),
    )


def tabulate_growth(
    forest: Forest,
    rules: Sequence[tuple[TreeRule, npt.NDArray[np.int64]]],
    depth: int,
) -> GrowthTable:
    """Grows the trees of starts ``depth`` levels deep and keeps what policies ask of them.

    ``rules``: each rule with the starts (positions of the trace) that it grows; one per temperature
    class. Selection, stop and bins of the rules are ignored. Raises TraceError when a rule reads
    more children than were recorded.
    """
    rule = rules[0][0]
    if rule.width > forest.width:
        raise TraceError(
            f"the policy reads {rule.width} children of a node of draft {forest.draft!r}, the "
            f"recording holds {forest.width}: "
            f"`record --resume ID --tree-width {rule.width}` widens it"
        )
    depth = rule.levels(depth)
    table = GrowthTable.empty(len(forest.root), depth)
    for one, starts in rules:
        tree, scratch = Growing(one, depth).tree, Scratch.of(one, depth)
        at = starts.astype(np.int64)
        tabulate(at, one.compiled, forest.codes, forest.trie, tree, scratch, table)
    return table


def lacking_nodes(
    forest: Forest, rules: Sequence[tuple[TreeRule, npt.NDArray[np.int64]]], depth: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns (parents, slots) int64 [n]: the children of recorded nodes that trees ``depth``
    levels deep expand and whose distributions were not recorded. Below them nothing is known, so
    that there may be more once they are.

    ``rules`` as of :func:`tabulate_growth`.
    """
    lacking = [np.zeros((2, 0), np.int64)]
    for rule, starts in rules:
        levels = rule.levels(depth)
        for at in range(0, len(starts), GROWN_TOGETHER):
            some = starts[at : at + GROWN_TOGETHER]
            growing, front = Growing(rule, levels, len(some)), forest.root[some][:, None]
            trees = growing.trees
            for level in range(1, levels):
                growing.add_from(forest.codes, front)
                places = slice(0, trees.frontier[0, level])
                above, slot = trees.above[:, level, places], trees.rank[:, level, places]
                parent = np.take_along_axis(front, above, 1)
                expanded = (trees.place[:, level, places] != NONE) & (parent >= 0)
                front = np.where(expanded, forest.child[parent, slot], -1).astype(np.int64)
                lost = expanded & (front < 0) & (forest.limit[some] > level)[:, None]
                lacking.append(np.stack([parent[lost], slot[lost]]))
    parents, slots = np.unique(np.concatenate(lacking, axis=1), axis=1)
    return parents, slots
