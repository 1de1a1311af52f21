"""Drafting trees with models: the laws come from a draft's passes, everything else from :mod:`runtime.policies.trees`.

:func:`grow` is the one driver of a tree, level by level: it asks a :class:`LawSource` for laws and applies stop, early end and HeteroSpec's
extension. A model's passes stand behind it when decoding, a recorded panorama in the oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from runtime.laws import LawRows, read_laws
from runtime.policies.heterospec import bin_of
from runtime.policies.trees import INFINITE, Growing, Laws, Level, StaticLevel, TreeRule, select
from runtime.sampling import Noise
from traces.schema import NO_BIN, Sampling


class LawSource(Protocol):
    """Where the laws of one tree come from."""

    def root(self) -> Laws:
        """The law after the text, [1, 1, k]."""

    def expand(self, growing: Growing, width: int) -> Laws:
        """The laws of the last level's frontier, [1, F, k]; only its first ``width`` nodes exist."""

    def settled(self, growing: Growing, laws: Laws) -> Level:
        """The level just added, with what rounding could have changed decided (docs/trees.md)."""


@dataclass
class GrownTree:
    """What one drafting phase grew and chose.

    ``tokens``, ``parents`` (index among the kept nodes, -1: the root), ``depths`` (from 1) of the kept nodes in creation order; ``place``:
    their places in the pool; ``slots``: where the draft cached them, -1 if it did not read them. ``levels`` kept of the growth, ``steps``
    passes made, ``widths`` the nodes each pass read (1 for the first). ``bin`` is HeteroSpec's, ``phi`` in 1/16 nat.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)
    levels: int = 0
    steps: int = 0
    widths: list[int] = field(default_factory=list)
    phi: int = 0
    bin: int = NO_BIN
    pool: int = 0


def grow(rule: TreeRule, depth: int, limit: int, source: LawSource, device: torch.device, *, whole: bool = False) -> GrownTree:
    """Grows one tree of at most ``depth`` levels (the window's; HeteroSpec may extend it up to ``limit``) and selects its nodes.

    ``whole`` promises that every law has ``rule.width`` children (nothing is filtered): then nothing is looked at to find out.
    """
    growing = Growing(rule, 1, device, whole, lean=True)
    wanted = min(depth, len(rule.static)) if rule.static else depth
    tree = GrownTree()
    width, level = 1, 0
    while level < wanted:
        laws = source.root() if level == 0 else source.expand(growing, width)
        tree.steps += 1
        tree.widths.append(width)
        growing.add(laws)
        added = source.settled(growing, laws)
        level += 1
        existing = added.frontier.exists
        width = existing.shape[1] if rule.static or added.whole else int(existing.sum())
        if rule.confidence is not None and width == 0:
            growing.undo()
            break
        if rule.reads_stop and bool(added.stops[0]):
            if not rule.keep_last:
                growing.undo()
            break
        if level == depth and rule.stratified:
            tree.phi = int(added.phi[0])
            tree.bin = int(bin_of(np.array([tree.phi]), depth, rule.thresholds, rule.fitted_depth)[0])
            wanted = min(limit, depth + rule.extension(tree.bin))
    tree.levels = len(growing.levels)
    _keep(rule, growing, tree)
    return tree


class _Outline(NamedTuple):
    """What is known of a pool before it grows, int64: of each place its ``depth`` and its ``parent`` among the frontiers (all levels'
    joined, counted from 1; 0: the root) [pool]; and for each frontier place where its level ``begins`` in the pool [frontiers]."""

    depth: npt.NDArray[np.int64]
    parent: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]


@lru_cache(maxsize=256)
def _outline(k: int, static: tuple[StaticLevel, ...], sizes: tuple[int, ...], frontiers: tuple[int, ...]) -> _Outline:
    """The outline of a pool whose levels have ``sizes`` places and ``frontiers`` expanded ones; ``k`` children of each law."""
    depth, parent, begins = [], [], []
    above = place = 0
    for level, (size, frontier) in enumerate(zip(sizes, frontiers, strict=True)):
        ranks = np.array(static[level].places, dtype=np.int64) if static else np.arange(size)
        depth.append(np.full(size, level + 1))
        parent.append(np.zeros(size, dtype=np.int64) if level == 0 else 1 + above + ranks // k)
        begins.append(np.full(frontier, place))
        if level:
            above += frontiers[level - 1]
        place += size
    return _Outline(np.concatenate(depth), np.concatenate(parent), np.concatenate(begins))


def _keep(rule: TreeRule, growing: Growing, tree: GrownTree) -> None:
    """Selects, and reads the kept nodes out in creation order, with one transfer from the device."""
    levels = growing.levels
    if not levels:
        return
    chosen = select(levels, rule.top_n_of(tree.bin) if tree.bin != NO_BIN else rule.top_n)
    pool = chosen.shape[1]
    parts = [chosen, *(level.tokens for level in levels), *(level.frontier.index for level in levels)]
    found = torch.cat(parts, 1)[0].cpu().numpy()
    frontiers = tuple(level.frontier.index.shape[1] for level in levels)
    outline = _outline(rule.width, rule.static, tuple(level.cost.shape[1] for level in levels), frontiers)
    kept = found[:pool].nonzero()[0]
    expanded = outline.begins + found[2 * pool :]
    number = np.full(pool + 1, -1)
    number[kept] = np.arange(len(kept))
    read = np.full(pool, -1)
    at = count = 0
    for width, frontier in zip(tree.widths[1:], frontiers, strict=False):  # the passes after the first read the frontiers
        read[expanded[at : at + width]] = np.arange(count, count + width)
        at, count = at + frontier, count + width
    tree.tokens = found[pool : 2 * pool][kept].tolist()
    tree.parents = number[np.concatenate(([pool], expanded))[outline.parent[kept]]].tolist()
    tree.depths = outline.depth[kept].tolist()
    tree.place = kept.tolist()
    tree.expanded = read[kept].tolist()
    tree.pool = pool


def ancestors(tree: GrownTree) -> npt.NDArray[np.bool_]:
    """Which of the root (0) and the kept nodes (from 1) are each one's ancestors, itself included: bool [1 + nodes, 1 + nodes]."""
    n = len(tree.tokens)
    found = np.eye(n + 1, dtype=np.bool_)
    found[:, 0] = True
    parents = np.array(tree.parents, dtype=np.int64) + 1
    begin = 0
    for width in np.bincount(tree.depths)[1:].tolist() if n else []:  # creation order is level by level
        level = slice(begin, begin + width)
        found[begin + 1 : begin + width + 1] |= found[parents[level]]
        begin += width
    return found


@dataclass(frozen=True)
class TreeContext:
    """What drafting a tree may read of the request."""

    sampling: Sampling
    noise: Noise | None
    exact: bool


class Reader(Protocol):
    """A draft's passes over a tree, for :class:`ModelLaws`."""

    device: torch.device
    length: int

    def root(self) -> torch.Tensor:
        """Float32 logits [1, vocab] after the text; reads what the draft has not read of it."""

    def level(self, tokens: torch.Tensor, parents: torch.Tensor | None, depth: int) -> torch.Tensor:
        """Float32 logits [n, vocab] after n tokens at ``depth``, children of the nodes that pass depth - 1 read in these places
        (None: of the root)."""

    def canonical(self, path: list[int]) -> torch.Tensor:
        """Float32 logits [vocab] after the text and ``path``: one answer whatever the batch."""


class ModelLaws:
    """Laws from a draft's passes, codes settled where rounding could change what is drafted."""

    def __init__(self, rule: TreeRule, reader: Reader, context: TreeContext) -> None:
        self.rule, self.reader, self.context = rule, reader, context
        self.rows: list[LawRows] = []

    def _laws(self, logits: torch.Tensor, depth: int, exact: bool) -> LawRows:
        """Codes of laws whose children stand at ``depth``."""
        context, rule = self.context, self.rule
        noise = None if context.noise is None else context.noise.row(self.reader.length + depth - 1)
        return read_laws(
            logits,
            context.sampling,
            noise,
            rule.width,
            by_probability=rule.by_probability,
            entropy=rule.reads_entropy,
            top_entropy=rule.stratified,
            exact=exact,
            reads_logp=not rule.coupled or rule.reads_q,
            reads_gap=rule.coupled,
        )

    def root(self) -> Laws:
        self.rows = [self._laws(self.reader.root(), 1, self.context.exact)]
        return self.rows[0].laws(1)

    def expand(self, growing: Growing, width: int) -> Laws:
        level = growing.levels[-1]
        depth = len(growing.levels)
        index = level.frontier.index[0]
        places = index.shape[0]
        if width < places:
            index = index[:width]
        tokens = level.tokens[0].take(index)
        parents = None if depth == 1 else level.parent[0].take(index)
        self.rows.append(self._laws(self.reader.level(tokens, parents, depth), depth + 1, self.context.exact))
        return self.rows[-1].laws(places)

    def settled(self, growing: Growing, laws: Laws) -> Level:
        added, rows = growing.levels[-1], self.rows[-1]
        if rows.unsure is None:
            return added
        while True:
            doubtful = self._doubtful(growing, rows)
            if not doubtful:
                return growing.levels[-1]
            for node in doubtful:
                rows = self._replaced(growing, rows, node)
            self.rows[-1] = rows
            growing.undo()
            growing.add(rows.laws(laws.count.shape[1]))

    def _doubtful(self, growing: Growing, rows: LawRows) -> list[int]:
        """The frontier nodes whose law must be settled: an undecided code could change what is expanded, kept or read."""
        rule = self.rule
        if rows.unsure is None or rows.unsure_entropy is None:
            return []
        of_law = rule.reads_entropy or rule.stratified
        if not bool(rows.unsure.any()) and not (of_law and bool(rows.unsure_entropy.any())):
            return []
        by_node = rows.unsure.any(1)
        if of_law:
            by_node = by_node | rows.unsure_entropy
        if rule.static or rule.confidence is not None or rule.stratified or rule.reads_stop:
            return [int(i) for i in by_node.nonzero()[:, 0].tolist()]
        level = growing.levels[-1]
        n, k = rows.unsure.shape
        cost = level.cost[0, : n * k]
        # A child matters if it, or one unit cheaper, could be expanded or be among the top N so far.
        frontier = level.cost[0][level.frontier.index[0]]
        bound = int(frontier.max()) if level.frontier.index.shape[1] < level.cost.shape[1] else INFINITE
        pool = torch.cat([x.cost[0] for x in growing.levels])
        if rule.top_n is None or rule.top_n > len(pool):
            bound = INFINITE
        elif bound < INFINITE:
            bound = max(bound, int(pool.kthvalue(rule.top_n).values))
        # By how much one code more or less, of a child and of all its siblings, can move a cost.
        slack = 2 if not rule.coupled else 1 + math.ceil(2 * rule.sharpness)
        near = cost.view(n, k) <= bound + slack
        # A coupled cost reads the gaps of all siblings.
        matters = rows.unsure.any(1) & near.any(1) if rule.coupled else (rows.unsure & near).any(1)
        return [int(i) for i in matters.nonzero()[:, 0].tolist()]

    def _replaced(self, growing: Growing, rows: LawRows, node: int) -> LawRows:
        """The rows with one node's law taken from the canonical pass."""
        depth = len(growing.levels)
        path: list[int] = []
        place = node
        for level in reversed(growing.levels[:-1]):
            at = int(level.frontier.index[0, place])
            path.append(int(level.tokens[0, at]))
            place = int(level.parent[0, at])
        path.reverse()
        one = self._laws(self.reader.canonical(path)[None], depth, False)
        fields = []
        for name, old in rows._asdict().items():
            if name in ("unsure", "unsure_entropy"):
                new = old.clone()
                new[node] = False
            else:
                new = old.clone()
                new[node] = getattr(one, name)[0]
            fields.append(new)
        return LawRows(*fields)
