"""Drafting trees: distributions come from a draft's passes, everything else from
:mod:`runtime.trees.grow`.

:func:`growth` is the one driver of a tree, level by level: it asks for distributions and applies
stop, early end and HeteroSpec's extension. A model's passes stand behind it when decoding, for the
trees of all requests at once, a recorded panorama in the oracle."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.heterospec import bin_of
from spectune.runtime.trees.grow import Codes, Growing, TreeRule, select
from spectune.traces.schema import NO_BIN


class DistributionSource(Protocol):
    """Where the distributions of one tree come from."""

    def root(self) -> Codes:
        """The distribution after the text, one row."""

    def expand(self, growing: Growing, width: int) -> Codes:
        """The distributions after the last frontier's first ``width`` nodes, [width, k]."""


@dataclass
class GrownTree:
    """What one drafting phase grew and chose.

    ``tokens``, ``parents`` (index among the kept nodes, -1: the root), ``depths`` (from 1) of the
    kept nodes in creation order; ``expanded``: which of the nodes that the draft read each is, -1
    if none. ``levels`` kept of the growth, ``steps`` passes made, ``widths`` the rows of each pass
    (1 for the first): nodes, or on a device all places of a level. ``bin`` is HeteroSpec's, ``phi``
    in 1/256 nat."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)
    levels: int = 0
    steps: int = 0
    widths: list[int] = field(default_factory=list)
    phi: int = 0
    bin: int = NO_BIN


Growth = Generator[tuple[Growing, int], Codes, GrownTree]
"""A tree while it grows: gives what has grown and how many nodes of the last frontier are read next
(of no level: the text), takes their distributions, and returns the tree."""


def grow(rule: TreeRule, depth: int, limit: int, source: DistributionSource) -> GrownTree:
    """Grows one tree of at most ``depth`` levels (the window's; HeteroSpec may extend it up to
    ``limit``) and selects its nodes."""

    def read(asked: dict[int, tuple[Growing, int]]) -> list[Codes]:
        growing, width = asked[0]
        return [source.expand(growing, width) if growing.depth else source.root()]

    return grow_together([growth(rule, depth, limit)], read)[0]


def grow_together(
    growths: Sequence[Growth], read: Callable[[dict[int, tuple[Growing, int]]], Sequence[Codes]]
) -> list[GrownTree]:
    """Grows trees level by level, all at once: ``read`` gives the distributions that each of those
    that still grow asks for, by number."""
    trees = dict[int, GrownTree]()
    answers: list[tuple[int, Any]] = [(n, None) for n in range(len(growths))]
    while answers:
        asked = dict[int, tuple[Growing, int]]()
        for n, codes in answers:
            try:
                asked[n] = growths[n].send(codes)
            except StopIteration as grown:
                trees[n] = grown.value
        answers = list(zip(asked, read(asked), strict=True)) if asked else []
    return [trees[n] for n in range(len(growths))]


def growth(rule: TreeRule, depth: int, limit: int) -> Growth:
    """:func:`grow`, for whoever reads the distributions."""
    growing = Growing(rule, min(limit, depth + rule.alpha) if rule.stratified else depth)
    grown = GrownTree()
    goal = min(depth, len(rule.static)) if rule.static else depth
    width = 1
    while growing.depth < goal:
        codes = yield growing, width
        grown.widths.append(width)
        growing.add(codes)
        width = growing.width
        if rule.confidence is not None and width == 0:
            growing.undo()
            break
        if rule.stop.active and growing.stops:
            if not rule.stop.keep_last:
                growing.undo()
            break
        if rule.stratified and growing.depth == depth:
            thresholds = np.array(rule.thresholds, dtype=np.int64)
            grown.phi = growing.phi
            grown.bin = bin_of(grown.phi, depth, thresholds, rule.fitted_depth)
            goal = min(limit, depth + rule.extension(grown.bin))
    tree, grown.levels, grown.steps = growing.tree, growing.depth, len(grown.widths)
    top_n = rule.top_n_of(grown.bin)
    chosen = select(tree, grown.levels, grown.steps, top_n)
    grown.tokens, grown.parents, grown.depths, grown.expanded = chosen
    return grown


def ancestors(tree: GrownTree) -> npt.NDArray[np.bool_]:
    """Which of the root (0) and the kept nodes (from 1) are each one's ancestors, itself included:
    bool [1 + nodes, 1 + nodes]."""
    n, begin = len(tree.tokens), 0
    mask = np.eye(n + 1, dtype=np.bool_)
    mask[:, 0] = True
    parents = np.array(tree.parents, dtype=np.int64) + 1
    for width in np.bincount(tree.depths)[1:].tolist() if n else []:  # nodes come level by level
        mask[begin + 1 : begin + width + 1] |= mask[parents[begin : begin + width]]
        begin += width
    return mask
