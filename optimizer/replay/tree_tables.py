"""What every start of a trace grows, in one compiled loop: its tree grows by the function that
decodes (:func:`grow_level` of :mod:`runtime.trees.grow`), then the ranks of the text's nodes are
read off."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.eagle2 import INFINITE
from spectune.runtime.policies.jit import compiled
from spectune.runtime.trees.grow import NONE, Codes, Index, LevelRule, Tree, TreeRule, grow_level

ABSENT: Final = 65535
"""Rank of a node that is not among the candidates."""
NEVER: Final = 255
"""Level of something that does not happen."""


class NodeLinks(NamedTuple):
    """How recorded nodes hang together: ``root`` and ``limit`` int64 [positions], ``child`` int32
    [nodes, K] and ``text_slot`` uint8 [nodes], as in :class:`optimizer.replay.forest.Forest`."""

    root: Index
    limit: Index
    child: npt.NDArray[np.int32]
    text_slot: npt.NDArray[np.uint8]


class GrowthTable(NamedTuple):
    """What each start grows under one growth, D levels deep.

    With P starts: ``rank`` uint16 [P, D, D]: entry (gamma - 1, l - 1) is the rank, among the
    candidates of gamma levels, of the node on the text at level l (ABSENT: not a candidate).
    ``pool`` uint16 [P, D]: candidates of gamma levels. ``width`` uint8 [P, D]: nodes of level l
    that the next pass reads; ``read`` bool [P, D]: the node on the text is among them. ``phi``
    uint16 [P, D]: HeteroSpec's Phi after level l. ``best`` uint16 [P, D, 3]: what a stop reads of
    level l (``Tree.stop``). ``end`` uint8 [P]: the level at which no node passes the classifier;
    ``missing``: the first level that needs a distribution which was not recorded (NEVER for none).
    """

    rank: npt.NDArray[np.uint16]
    pool: npt.NDArray[np.uint16]
    width: npt.NDArray[np.uint8]
    read: npt.NDArray[np.bool_]
    phi: npt.NDArray[np.uint16]
    best: npt.NDArray[np.uint16]
    end: npt.NDArray[np.uint8]
    missing: npt.NDArray[np.uint8]

    @property
    def depth(self) -> int:
        return int(self.rank.shape[1])

    @classmethod
    def empty(cls, starts: int, depth: int) -> GrowthTable:
        """A table of starts that grow nothing."""
        per_level = (starts, depth)
        return cls(
            rank=np.full((*per_level, depth), ABSENT, np.uint16),
            pool=np.zeros(per_level, np.uint16),
            width=np.zeros(per_level, np.uint8),
            read=np.zeros(per_level, np.bool_),
            phi=np.zeros(per_level, np.uint16),
            best=np.zeros((*per_level, 3), np.uint16),
            end=np.full(starts, NEVER, np.uint8),
            missing=np.full(starts, NEVER, np.uint8),
        )

    def stops(self, rule: TreeRule) -> npt.NDArray[np.uint8]:
        """The level at which a rule's stop triggers at each start, uint8 [P]; NEVER where it does
        not."""
        triggered: npt.NDArray[np.bool_] = rule.stops(self.best)
        return np.where(triggered.any(1), triggered.argmax(1) + 1, NEVER).astype(np.uint8)


class Scratch(NamedTuple):
    """Working memory for one start: ``front`` and ``following`` int64 [F], the nodes of this
    frontier and the next (-1: not recorded); ``text`` int64 [D]: the candidate on the text."""

    front: Index
    following: Index
    text: Index

    @classmethod
    def of(cls, rule: TreeRule, depth: int) -> Scratch:
        widest = max(1, rule.frontier)
        return cls(*(np.zeros(size, np.int64) for size in (widest, widest, depth)))


@compiled()
def tabulate(
    starts: Index,
    rule: LevelRule,
    codes: Codes,
    trie: NodeLinks,
    tree: Tree,
    scratch: Scratch,
    table: GrowthTable,
) -> None:
    """Fills the rows ``starts`` of an empty table; ``tree`` has room for its depth."""
    depth = table.rank.shape[1]
    for i in range(starts.shape[0]):
        s = starts[i]
        front = scratch.front
        # The text's node, its place in the frontier (NONE: it is lost), and the candidates so far.
        front[0], node, on, candidates = trie.root[s], int(trie.root[s]), 0, 0
        for level in range(1, depth + 1):
            grow_level(rule, codes, front, level, tree)
            at = NONE
            if on != NONE and node >= 0:
                slot = int(trie.text_slot[node])
                at = _candidate(rule, level, tree, on, slot)
                node = int(trie.child[node, slot]) if at != NONE else -1
            scratch.text[level - 1] = at
            begin, end = tree.size[level - 1], tree.size[level]
            candidates += count_below(tree.cost[begin:end], INFINITE)
            table.pool[s, level - 1] = min(candidates, 65535)
            table.width[s, level - 1] = tree.width[level]
            table.phi[s, level - 1] = min(tree.level_phi[level], 65535)
            for j in range(3):
                table.best[s, level - 1, j] = min(tree.stop[level, j], 65535)
            if rule.confidence.size > 0 and tree.width[level] == 0 and table.end[s] == NEVER:
                table.end[s] = level
            lost, on = _follow(trie, level, tree, scratch, at)
            table.read[s, level - 1] = on != NONE
            if lost and table.missing[s] == NEVER and trie.limit[s] > level:
                table.missing[s] = level + 1
        _rank(depth, tree, scratch.text, s, table)


@compiled(inline=True)
def count_below(costs: Index, bound: int) -> int:
    """How many of the costs are below a bound."""
    count = 0
    for cost in costs:
        count += cost < bound
    return count


@compiled(inline=True)
def _candidate(rule: LevelRule, level: int, tree: Tree, place: int, rank: int) -> int:
    """The candidate of a level that is the child of a ``rank`` of a place of the frontier above;
    NONE: there is none."""
    if rank >= rule.width:
        return NONE
    at, end = tree.size[level - 1] + place * rule.width + rank, tree.size[level]
    if rule.listed.shape[0] > 0:
        at = begin = tree.size[level - 1]
        while at < end and rule.listed[level - 1, at - begin] != place * rule.width + rank:
            at += 1
    return at if at < end and tree.cost[at] < INFINITE else NONE


@compiled(inline=True)
def _follow(
    trie: NodeLinks, level: int, tree: Tree, scratch: Scratch, text: int
) -> tuple[bool, int]:
    """Goes down to the nodes of a level's frontier: whether one of them was not recorded, and the
    place of the candidate ``text`` (NONE: it has none)."""
    lost, on = False, NONE
    for j in range(tree.frontier[level]):
        scratch.following[j] = -1
        if tree.place[level, j] == NONE:
            continue
        above, rank = tree.above[level, j], tree.rank[level, j]
        scratch.following[j] = trie.child[scratch.front[above], rank]
        lost |= scratch.following[j] < 0
        if tree.place[level, j] == text:
            on = j
    for j in range(tree.frontier[level]):
        scratch.front[j] = scratch.following[j]
    return lost, on


@compiled(inline=True)
def _rank(depth: int, tree: Tree, text: Index, s: int, table: GrowthTable) -> None:
    """Writes the ranks of the text's candidates: how many are cheaper, or as cheap and earlier,
    among those of each depth."""
    for level in range(depth):
        at = text[level]
        if at == NONE:
            continue
        cost = tree.cost[at]
        before = count_below(tree.cost[:at], cost + 1)
        before += count_below(tree.cost[at : tree.size[level + 1]], cost)
        table.rank[s, level, level] = min(before, ABSENT - 1)
        for deepest in range(level + 1, depth):
            before += count_below(tree.cost[tree.size[deepest] : tree.size[deepest + 1]], cost)
            table.rank[s, deepest, level] = min(before, ABSENT - 1)
