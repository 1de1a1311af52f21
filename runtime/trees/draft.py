"""Drafting trees with models: distributions come from a draft's passes, everything else from
:mod:`runtime.trees.grow`.

:func:`grow` is the one driver of a tree, level by level: it asks a :class:`DistributionSource` for
distributions and applies stop, early end and HeteroSpec's extension. A model's passes stand behind
it when decoding, a recorded panorama in the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from spectune.runtime.distributions import best_children, codes_on_host
from spectune.runtime.policies.heterospec import bin_of
from spectune.runtime.trees.grow import Codes, Growing, TreeRule, select
from spectune.traces.schema import NO_BIN

if TYPE_CHECKING:
    from spectune.runtime.drafts.protocol import DraftContext
    from spectune.runtime.drafts.tree_reader import TreeReader


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


def grow(rule: TreeRule, depth: int, limit: int, source: DistributionSource) -> GrownTree:
    """Grows one tree of at most ``depth`` levels (the window's; HeteroSpec may extend it up to
    ``limit``) and selects its nodes."""
    growing = Growing(rule, min(limit, depth + rule.alpha) if rule.stratified else depth)
    grown = GrownTree()
    goal = min(depth, len(rule.static)) if rule.static else depth
    width = 1
    while growing.depth < goal:
        codes = source.expand(growing, width) if growing.depth else source.root()
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


class ModelDistributions:
    """Distributions from a draft's passes. ``log_q``: of each, [vocab], where the rejection
    verifier reads it."""

    def __init__(self, rule: TreeRule, reader: TreeReader, context: DraftContext) -> None:
        self.rule, self.reader, self.context = rule, reader, context
        self.log_q: list[torch.Tensor] = []
        reader.ids = None  # no pass was made

    def root(self) -> Codes:
        return self._codes(self.reader.root(), 1)

    def expand(self, growing: Growing, width: int) -> Codes:
        tree, level, device = growing.tree, growing.depth, self.reader.device
        place = tree.place[level, :width]
        tokens = torch.from_numpy(tree.token[np.maximum(place, 0)]).to(device)
        above = None if level == 1 else torch.from_numpy(tree.above[level, :width]).to(device)
        return self._codes(self.reader.level(tokens, above, level), level + 1)

    def _codes(self, logits: torch.Tensor, depth: int) -> Codes:
        """Codes of distributions whose children stand at ``depth``."""
        reader, context = self.reader, self.context
        sampling, noise, perturb = context.sampling, context.noise, None
        if noise is not None:
            perturb = partial(noise.add, positions=[reader.length + depth - 1])
        if context.rejects:
            self.log_q.append(context.log_q(logits, reader.ids))
        return codes_on_host(best_children(logits, sampling, perturb, self.rule.reads, reader.ids))
