"""One tree while it grows on a CPU: a level in one compiled step, and the selection in another.

A round builds its tree between passes of models, which leave nothing of this code in the processor's caches: dozens of small tensor
operations take longer than the work. The rules are those of :mod:`runtime.policies.trees`, whose functions are compiled in: EAGLE-2's
expansion and rerank, C2T's classifier, stops, HeteroSpec's Phi. Static trees and other devices have
:class:`runtime.policies.trees.Growing`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import runtime.policies.trees as trees
from runtime.policies.jit import compiled
from runtime.policies.trees import (
    INFINITE,
    ORDER_BITS,
    Cheapest,
    LawRows,
    Laws,
    Level,
    TreeRule,
    gap_weights,
    grow_one,
    keep_smallest,
)

Index = npt.NDArray[np.int64]
_CPU = torch.device("cpu")
# Rows of a pool: of every place its cost, -log q of its path, token, and whether it may be verified.
_COST, _Q_COST, _TOKEN, _ELIGIBLE = 0, 1, 2, 3
# Rows of the frontiers, beside _COST (INFINITE: no node), _Q_COST and _TOKEN: place within the level, the parent's place in the frontier
# above, Phi, and what a classifier orders by.
_INDEX, _PARENT, _PHI, _KEY = 3, 4, 5, 6
# Columns of what is said of a level: nodes that may be expanded, whether the stop is triggered, Phi.
_EXIST, _STOPS, _LEVEL_PHI = 0, 1, 2
# Of a rule's numbers.
_COUPLED, _APART, _STRATIFIED, _READS_STOP, _MAX_LOGP, _MAX_JOINT, _MAX_ENTROPY, _CLASSIFIES, _BETA = range(9)


class KeptNodes(NamedTuple):
    """The selected nodes in creation order: ``tokens``, ``parents`` (among the kept, -1: the root), ``depths`` (from 1), ``place`` in the
    pool, and ``read``: which of the nodes that the draft's passes read it is, -1: none read it."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    place: list[int]
    read: list[int]


class _Compiled(NamedTuple):
    """A rule as the compiled steps read it: its numbers int64 [9], weights of gaps int64 [256] and their logarithms, C2T's table."""

    numbers: Index
    weights: Index
    logs: npt.NDArray[np.float64]
    table: npt.NDArray[np.int32]


@lru_cache(maxsize=256)
def _compiled(rule: TreeRule) -> _Compiled:
    weights, logs = (x.numpy() for x in gap_weights(rule.sharpness, _CPU))
    classifies = rule.confidence is not None
    numbers = (rule.coupled, rule.coupled and rule.reads_q, rule.stratified, rule.reads_stop, rule.max_logp, rule.max_joint)
    return _Compiled(
        np.array([*numbers, rule.max_entropy, classifies, rule.beta_code], dtype=np.int64),
        weights,
        logs,
        np.zeros((1, 1, 1), dtype=np.int32) if rule.confidence is None else np.ascontiguousarray(rule.confidence.numpy(), np.int32),
    )


def grows_lean(rule: TreeRule, device: torch.device) -> bool:
    """Whether a rule's trees are a :class:`LeanGrowing`'s."""
    return trees.fused(device) and not rule.static


class LeanGrowing:
    """What :class:`runtime.policies.trees.Growing` is for one tree of a rule that :func:`grows_lean`, of ``depth`` levels at most."""

    def __init__(self, rule: TreeRule, depth: int) -> None:
        self.rule = rule
        self.pool = 0
        """Places of all levels."""
        self.expandable = 1
        """Nodes of the last level that may be expanded."""
        self._rule = _compiled(rule)
        self._apart, self._reads_entropy = rule.coupled and rule.reads_q, rule.reads_entropy
        self._places: list[int] = []
        self._frontiers = [1]
        self._pool = np.empty((4, rule.pool(depth)), dtype=np.int64)
        self._front = np.empty((7, depth + 1, max(rule.frontier, 1)), dtype=np.int64)  # from the root on
        self._front[:, 0, 0] = 0
        self._said = np.empty((depth + 1, 3), dtype=np.int64)
        self._said[0, _EXIST] = 1

    @property
    def depth(self) -> int:
        """Levels so far."""
        return len(self._places)

    @property
    def stops(self) -> bool:
        """Whether the last level triggers the stop."""
        return bool(self._said[self.depth, _STOPS])

    @property
    def phi(self) -> int:
        """Phi of the path with the highest final-token confidence (HeteroSpec, section 4.1), in 1/16 nat; 0 where the rule has no bins."""
        return int(self._said[self.depth, _LEVEL_PHI])

    def add(self, laws: Laws | LawRows) -> None:
        """Makes the next level from the laws of the frontier, or of those of its first nodes that exist (k at least the rule's width)."""
        if isinstance(laws, Laws):
            laws = LawRows._make([*(x[0] for x in laws), None, None])
        rule = self.rule
        # What a rule does not read is not fetched; something of the same shape stands for it.
        tokens, count = np.ascontiguousarray(laws.tokens.numpy()), laws.count.numpy()
        codes = (laws.gap if rule.coupled else laws.logp).numpy()
        logp = laws.logp.numpy() if self._apart else codes
        entropy = laws.entropy.numpy() if self._reads_entropy else count
        top_entropy = laws.top_entropy.numpy() if rule.kept else count
        if tokens.shape[1] != rule.width:
            tokens, codes, logp = (np.ascontiguousarray(x[:, : rule.width]) for x in (tokens, codes, logp))
        places, begin = self._frontiers[-1] * rule.width, self.pool
        frontier = min(rule.frontier, places)
        self._places.append(places)
        self._frontiers.append(frontier)
        at, end = len(self._places), begin + places
        self.pool = end
        self.expandable = _add_level(
            tokens, codes, logp, entropy, top_entropy, count, *self._rule, self._pool, begin, end, self._front, at, frontier, self._said
        )

    def undo(self) -> None:
        """Forgets the last level."""
        self.pool -= self._places.pop()
        self._frontiers.pop()
        self.expandable = int(self._said[len(self._places), _EXIST])

    def following(self, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens of the first ``width`` nodes to expand and the frontier places of the level above that are their parents (None: the
        root), int64 [width]."""
        tokens = torch.from_numpy(self._front[_TOKEN, self.depth, :width])
        return tokens, None if self.depth == 1 else torch.from_numpy(self._front[_PARENT, self.depth, :width])

    @property
    def levels(self) -> list[Level]:
        """The levels as :class:`runtime.policies.trees.Growing` has them; made anew, and valid until the next is added or forgotten."""
        found = []
        ends = np.cumsum([0, *self._places])
        for at, (places, frontier) in enumerate(zip(self._places, self._frontiers[1:], strict=True)):
            cost, q_cost, tokens, eligible = (torch.from_numpy(x[None, ends[at] : ends[at + 1]]) for x in self._pool)
            index, costs = (torch.from_numpy(self._front[x, at + 1, :frontier][None]) for x in (_INDEX, _COST))
            parent, rank = trees.siblings(1, places, self.rule.width, _CPU)
            phi, stops = (torch.from_numpy(self._said[at + 1, x : x + 1]) for x in (_LEVEL_PHI, _STOPS))
            there, expanded = eligible != 0, Cheapest(index, costs < INFINITE)
            found.append(Level(tokens, cost, q_cost, parent, rank, there, expanded, phi, stops != 0, bool(there.all())))
        return found

    def kept(self, top_n: int | None, widths: list[int]) -> KeptNodes:
        """Selects as :func:`runtime.policies.trees.select`; ``widths``: nodes that each pass read, the root's first."""
        size, levels = self.pool, self.depth
        n = size if top_n is None else min(top_n, size)
        scratch, out = np.empty((2, max(n, size)), dtype=np.int64), np.empty((5, n), dtype=np.int64)
        shape = np.array([self._places, self._frontiers[1:], [*widths[1:], 0][:levels]], dtype=np.int64)
        count = _keep_cheapest(self._pool, self._front, shape, self.rule.width, scratch, out)
        return KeptNodes(*out[:, :count].tolist())


@compiled(trees)
def _add_level(
    tokens: Index,
    codes: Index,
    logp: Index,
    entropy: Index,
    top_entropy: Index,
    count: Index,
    numbers: Index,
    weights: Index,
    logs: npt.NDArray[np.float64],
    table: npt.NDArray[np.int32],
    pool: Index,
    begin: int,
    end: int,
    front: Index,
    at: int,
    frontier: int,
    said: Index,
) -> int:
    """Writes level ``at``: its places into ``pool`` from ``begin`` to ``end``, the ``frontier`` best of them into ``front``, and what is
    ``said`` of it; how many nodes may be expanded.

    ``tokens``, ``codes`` (of gap or logp, whichever costs are made of) and ``logp`` [n, k], ``entropy``, ``top_entropy`` and ``count`` [n]:
    the laws of the n nodes of level ``at`` - 1 that were read; ``table`` [depth, entropy, joint].
    """
    n, k = tokens.shape
    read = begin + n * k
    index, costs, q_costs = front[_INDEX, at], front[_COST, at], front[_Q_COST, at]
    above, cost = front[_COST, at - 1], pool[_COST, begin:read]
    grow_one(codes, count, numbers[_COUPLED] != 0, weights, logs, above, cost, index[:frontier], costs[:frontier])
    for f in range(n):
        for j in range(k):
            place = begin + f * k + j
            pool[_TOKEN, place] = tokens[f, j]
            pool[_Q_COST, place] = front[_Q_COST, at - 1, f] + logp[f, j] if numbers[_APART] else pool[_COST, place]
            pool[_ELIGIBLE, place] = pool[_COST, place] < INFINITE
    for place in range(read, end):
        pool[_COST, place] = pool[_Q_COST, place] = INFINITE
        pool[_TOKEN, place] = pool[_ELIGIBLE, place] = 0
    for j in range(n * k, frontier):
        index[j] = j
        costs[j] = INFINITE
    if numbers[_CLASSIFIES]:
        _classify(entropy, k, table, numbers[_BETA], pool, begin, read, front, at, frontier)
    exist = 0
    for j in range(frontier):
        place = begin + index[j]
        exist += costs[j] < INFINITE
        q_costs[j] = pool[_Q_COST, place]
        front[_TOKEN, at, j] = pool[_TOKEN, place]
        front[_PARENT, at, j] = index[j] // k
    said[at, _EXIST] = exist
    said[at, _STOPS] = said[at, _LEVEL_PHI] = 0
    if numbers[_READS_STOP]:
        first, best = -1, INFINITE
        for place in range(begin, read):
            if pool[_ELIGIBLE, place] and pool[_COST, place] < best:
                first, best = place, pool[_COST, place]
        if first >= 0:
            f, j = (first - begin) // k, (first - begin) % k
            said[at, _STOPS] = (
                logp[f, j] > numbers[_MAX_LOGP] or pool[_Q_COST, first] > numbers[_MAX_JOINT] or entropy[f] > numbers[_MAX_ENTROPY]
            )
    if numbers[_STRATIFIED]:
        nearest, best = 0, INFINITE
        for f in range(n):
            if above[f] < INFINITE:
                for j in range(min(count[f], k)):
                    if logp[f, j] < best:
                        nearest, best = f, logp[f, j]
        said[at, _LEVEL_PHI] = front[_PHI, at - 1, nearest] + top_entropy[nearest]
        for j in range(exist):
            f = index[j] // k
            front[_PHI, at, j] = front[_PHI, at - 1, f] + top_entropy[f]
    return exist


@compiled(trees, inline=True)
def _classify(
    entropy: Index,
    k: int,
    table: npt.NDArray[np.int32],
    beta: int,
    pool: Index,
    begin: int,
    read: int,
    front: Index,
    at: int,
    frontier: int,
) -> None:
    """Leaves of a level those that pass C2T's classifier, at most ``frontier``, the most confident first."""
    index, costs, keys = front[_INDEX, at], front[_COST, at], front[_KEY, at, :frontier]
    depths, entropies, joints = table.shape
    depth = min(at, depths) - 1
    found = 0
    for place in range(begin, read):
        if not pool[_ELIGIBLE, place]:
            continue
        pool[_ELIGIBLE, place] = 0
        confidence = table[depth, min(entropy[(place - begin) // k], entropies - 1), min(pool[_Q_COST, place], joints - 1)]
        if confidence > beta:
            found = keep_smallest(keys, index, found, -confidence, place - begin)
    for j in range(found):
        pool[_ELIGIBLE, begin + index[j]] = 1
        costs[j] = pool[_COST, begin + index[j]]
    for j in range(found, frontier):
        index[j] = 0
        costs[j] = INFINITE


@compiled(trees)
def _keep_cheapest(pool: Index, front: Index, shape: Index, k: int, scratch: Index, out: Index) -> int:
    """Writes the cheapest eligible places of a pool, as many as ``out`` [5, n] has room for, in creation order: token, parent, depth,
    place, read (:class:`KeptNodes`); how many they are.

    ``shape`` [3, levels]: each level's places, frontier and nodes read by the pass after it. ``scratch`` [2, the larger of n and the pool].
    """
    levels, most = shape.shape[1], out.shape[1]
    size = 0
    for level in range(levels):
        size += shape[0, level]
    number, best = scratch[0], scratch[1, :most]
    found = 0
    for place in range(size):
        number[place] = -1
        if most < size and pool[_ELIGIBLE, place]:
            key = (pool[_COST, place] << ORDER_BITS) + place
            found = keep_smallest(best, best, found, key, key)
    last = INFINITE << ORDER_BITS if most >= size else best[found - 1] if found else -1
    count = begin = above = read = 0
    for level in range(levels):
        for own in range(shape[0, level]):
            place = begin + own
            if not pool[_ELIGIBLE, place] or (pool[_COST, place] << ORDER_BITS) + place > last:
                continue
            number[place] = count
            out[0, count] = pool[_TOKEN, place]
            out[1, count] = -1 if level == 0 else number[above + front[_INDEX, level, own // k]]
            out[2, count] = level + 1
            out[3, count] = place
            out[4, count] = -1
            count += 1
        for j in range(shape[2, level]):
            place = begin + front[_INDEX, level + 1, j]
            if number[place] >= 0:
                out[4, number[place]] = read + j
        read += shape[2, level]
        above = begin
        begin += shape[0, level]
    return count
