"""Which near ties of a draft's distributions could change its tree.

Rounding leaves some codes of a pass open (a *near tie*: a value next to the border between two
codes, two siblings of nearly one score). Each open code is an interval here, and so is each
candidate's place in the order by which the tree chooses. A distribution has to be decided by the
canonical pass iff the tree may read something open of it: a candidate that may be chosen, whose
token, cost or place in the order is open; what a stop reads; what HeteroSpec's Phi reads.
Everything else may stay open: whichever codes are the true ones, the tree is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.c2t import CONFIDENCE_SCALE
from spectune.runtime.policies.eagle2 import INFINITE
from spectune.runtime.trees.grow import NONE, DistributionRows, Tree, TreeRule
from spectune.traces.schema import TREE_CODE_MAX, TREE_SCALE

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_ORDER = 14
"""Bits of a key below the cost, for the order of creation."""


class Interval(NamedTuple):
    """The least and the most that whole numbers may turn out to be."""

    low: IntArray
    high: IntArray

    @property
    def open(self) -> BoolArray:
        return np.asarray(self.low < self.high)


class OpenCodes(NamedTuple):
    """What is known of a level's n distributions: intervals of ``logp`` and ``gap`` [n, k],
    ``entropy`` and ``top_entropy`` [n]; of children, bool [n, k], which exist, which are ``near``
    (a code or the token is open), and which may be another token (``swapped``).
    """

    logp: Interval
    gap: Interval
    entropy: Interval
    top_entropy: Interval
    exists: BoolArray
    near: BoolArray
    swapped: BoolArray


def open_codes(rows: DistributionRows, *, perturbed: bool) -> OpenCodes:
    """What :func:`runtime.distributions.read_distributions` leaves open of the codes it marks.

    A marked code may be one unit off. A marked child beside another one, or last, may change places
    with a neighbour of nearly its score; then q may be any where the score holds noise
    (``perturbed``).
    """
    logp, gap, entropy, top_entropy, count = (x.astype(np.int64) for x in rows.codes[1:])
    n, k = logp.shape
    near, near_entropy = (
        np.zeros(shape, dtype=np.bool_) if marks is None else marks
        for marks, shape in ((rows.unsure, (n, k)), (rows.unsure_entropy, n))
    )
    close = [np.abs(np.diff(code)) <= 1 for code in (gap, logp)]
    tied = near[:, :-1] & near[:, 1:] & close[0] & (perturbed | close[1])
    beside = np.pad(tied, ((0, 0), (1, 1)), constant_values=((False, False), (False, True)))
    swapped = near & (beside[:, :-1] | beside[:, 1:])

    def by_one(code: IntArray, near: BoolArray) -> Interval:
        return Interval(np.maximum(code - near, 0), np.minimum(code + near, TREE_CODE_MAX))

    low, high = by_one(logp, near)
    anything = swapped & perturbed
    return OpenCodes(
        Interval(np.where(anything, 0, low), np.where(anything, TREE_CODE_MAX, high)),
        by_one(gap, near & (np.arange(k) > 0)),
        by_one(entropy, near_entropy),
        by_one(top_entropy, near_entropy),
        np.arange(k) < count[:, None],
        near,
        swapped,
    )


def undecided_nodes(
    rule: TreeRule,
    tree: Tree,
    rows: Sequence[DistributionRows],
    *,
    perturbed: bool,
    filtered: bool,
    reads_phi: bool,
) -> list[tuple[int, int]]:
    """The distributions, each as (level from 0, place in the frontier) and the upper levels first,
    that have to be decided before the tree may go on; ``rows``: of each level so far.
    ``reads_phi``: Phi is read now.

    It named none for the levels above, so what is open there can be read by Phi or by a static
    tree's stop alone. Where the border of a filter is open (``filtered``: the sampling leaves
    tokens out), all children of a distribution are marked: it may have others, and any codes.
    """
    level = len(rows)
    if not any(x.has_near_tie for x in (rows if reads_phi or rule.static else rows[-1:])):
        return []
    codes = [open_codes(x, perturbed=perturbed) for x in rows]
    near, exists = codes[-1].near, codes[-1].exists
    nodes = tree.place[level - 1, : len(near)] != NONE
    border = filtered & nodes & near.any(1) & (near | ~exists).all(1)
    chosen = border | _open_choices(rule, tree, level, codes[-1])
    if chosen.any():
        return [(level - 1, int(node)) for node in chosen.nonzero()[0]]
    found = _open_stop(rule, tree, level, codes) if rule.reads_stop else set()
    if reads_phi and not rule.stops(tree.stop[level]):
        found |= _open_phi(tree, level, codes)
    return sorted(found)


def _open_choices(rule: TreeRule, tree: Tree, level: int, codes: OpenCodes) -> BoolArray:
    """The last level's distributions of which a candidate may be expanded or verified and is open,
    bool [n]."""
    n, k = codes.near.shape
    above = tree.place[level - 1, :n]
    if rule.static:
        listed = np.zeros((n, k), dtype=np.bool_)
        listed.ravel()[list(rule.static[level - 1].places)] = True
        return np.asarray((codes.swapped & listed).any(1) & (above != NONE))
    cost = _costs(rule, codes, np.where(above < 0, 0, tree.cost[above])[:, None])
    if rule.confidence is None:
        keys, is_open = _keys(cost, codes), cost.open
        size = int(tree.size[level - 1])
        pool = (tree.cost[:size] << _ORDER) + np.arange(size)
        every = Interval(*(np.concatenate([pool, (x + size).ravel()]) for x in keys))
        most = every.low.size if rule.top_n is None else max(rule.top_n, *rule.kept, 0)
        chosen = _may_be_chosen(keys, rule.frontier)
        chosen |= _may_be_chosen(every, most)[size:].reshape(n, k)
    else:
        q_cost = np.where(above < 0, 0, tree.q_cost[above])[:, None]
        keys = _keys(_unconfident(rule, codes, level, q_cost), codes)
        chosen = _may_be_chosen(keys, rule.frontier)
        is_open = keys.open | (cost.open & rule.coupled)
    found = (chosen & (codes.near | is_open) & (keys.low < INFINITE << _ORDER)).any(1)
    return np.asarray(found & (codes.near.any(1) | codes.entropy.open))


def _keys(cost: Interval, codes: OpenCodes) -> Interval:
    """Sort keys of the last level's candidates, ties by place: INFINITE where one does not
    exist."""
    place = np.arange(cost.low.size).reshape(cost.low.shape)
    return Interval(*((np.where(codes.exists, end, INFINITE) << _ORDER) + place for end in cost))


def _may_be_chosen(keys: Interval, count: int) -> BoolArray:
    """Which can be among the ``count`` smallest; bool of the keys' shape."""
    if count >= keys.high.size:
        return np.ones(keys.high.shape, dtype=np.bool_)
    return np.asarray(keys.low <= np.partition(keys.high, count - 1, axis=None)[count - 1])


def _costs(rule: TreeRule, codes: OpenCodes, above: IntArray) -> Interval:
    """Joint costs of the last level's candidates [n, k]; ``above`` [n, 1]: their parents'."""
    if not rule.coupled:
        return Interval(above + codes.logp.low, above + codes.logp.high)
    # A cost rises with its own gap and falls with the siblings'. The last bit of a logarithm may
    # differ from the builder's.
    weights, logs = rule.compiled.weights, rule.compiled.logs
    heavy, light = (np.where(codes.exists, weights[gap], 0) for gap in codes.gap)

    def cost(own: IntArray, siblings: IntArray, gap: IntArray, slack: float) -> IntArray:
        total = siblings.sum(1, keepdims=True) - siblings + own
        nats = np.log(np.maximum(total, 1)) - logs[gap]
        found = np.floor(nats * TREE_SCALE + 0.5 + slack).astype(np.int64)
        return np.asarray(above + np.maximum(found, 0))

    return Interval(
        cost(heavy, light, codes.gap.low, -1e-9), cost(light, heavy, codes.gap.high, 1e-9)
    )


def _unconfident(rule: TreeRule, codes: OpenCodes, level: int, above: IntArray) -> Interval:
    """65535 less the confidence of the last level's candidates [n, k], INFINITE of one that does
    not pass; ``above`` [n, 1]: their parents' q_cost. The table knows no order, so all that is near
    is looked up."""
    table = rule.compiled.confidence
    depths, entropies, joints = table.shape

    def key(entropy: IntArray, logp: IntArray) -> IntArray:
        rows = table[min(level, depths) - 1]
        row, column = np.minimum(entropy, entropies - 1), np.minimum(above + logp, joints - 1)
        found = rows[row[:, None], column].astype(np.int64)
        return np.where(found > rule.beta_code, CONFIDENCE_SCALE - found, INFINITE)

    of_entropy, of_logp = (
        (x.low, (x.low + x.high) // 2, x.high) for x in (codes.entropy, codes.logp)
    )
    tried = [key(entropy, logp) for entropy in of_entropy for logp in of_logp]
    anything = codes.logp.high - codes.logp.low > 2
    return Interval(
        np.where(anything, 0, np.min(tried, axis=0)),
        np.where(anything, INFINITE, np.max(tried, axis=0)),
    )


def _path(tree: Tree, level: int, place: int) -> list[tuple[int, int, int]]:
    """The distributions on the way to a frontier ``place`` of ``level``, last first: (level from 0,
    place, the rank that leads on)."""
    found = []
    while level > 0:
        rank, place = int(tree.rank[level, place]), int(tree.above[level, place])
        level -= 1
        found.append((level, place, rank))
    return found


def _open_stop(
    rule: TreeRule, tree: Tree, level: int, codes: Sequence[OpenCodes]
) -> set[tuple[int, int]]:
    """The distributions of which the stop reads an open code at the last level's first
    candidate."""
    begin, end = int(tree.size[level - 1]), int(tree.size[level])
    cost = tree.cost[begin:end]
    if not (cost < INFINITE).any():
        return set()
    first = int((cost < INFINITE).argmax() if rule.static else cost.argmin())
    own = rule.static[level - 1].places[first] if rule.static else first
    node, rank = divmod(own, rule.width)
    path = [(level - 1, node, rank)]
    if rule.max_joint < INFINITE:
        path += _path(tree, level - 1, node)
    reads_q = min(rule.max_logp, rule.max_joint) < INFINITE
    found = {(i, at) for i, at, r in path if reads_q and codes[i].near[at, r]}
    if rule.max_entropy < INFINITE and codes[-1].entropy.open[node]:
        found.add((level - 1, node))
    return found


def _open_phi(tree: Tree, level: int, codes: Sequence[OpenCodes]) -> set[tuple[int, int]]:
    """The distributions of which Phi reads an open code: those that may have the most confident
    child, while it is open which has, then those on its path."""
    last, n = codes[-1], len(codes[-1].near)
    nodes = (tree.place[level - 1, :n] != NONE)[:, None] & last.exists
    best = (np.where(nodes, end, INFINITE).min(1) for end in last.logp)
    keys = Interval(*((end << _ORDER) + np.arange(n) for end in best))
    nearest = _may_be_chosen(keys, 1).nonzero()[0].tolist()
    if len(nearest) > 1:
        return {(level - 1, i) for i in nearest if keys.open[i]}
    path = [(level - 1, nearest[0], 0), *_path(tree, level - 1, nearest[0])]
    return {(i, at) for i, at, _ in path if codes[i].top_entropy.open[at]}
