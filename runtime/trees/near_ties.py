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
    ``entropy`` and ``top_entropy`` [n]; which children may and which certainly exist, bool [n, k];
    which are ``near``: a code or the token is open; and which may be another token (``swapped``).
    """

    logp: Interval
    gap: Interval
    entropy: Interval
    top_entropy: Interval
    possible: BoolArray
    certain: BoolArray
    near: BoolArray
    swapped: BoolArray


def open_codes(rows: DistributionRows, *, perturbed: bool, filtered: bool) -> OpenCodes:
    """What :func:`runtime.distributions.read_distributions` leaves open of the codes it marks.

    A marked code may be one unit off. A marked child beside another one, or last, may change places
    with a neighbour of nearly its score; then q may be any where the score holds noise
    (``perturbed``). A distribution whose children are all marked may, if the sampling leaves tokens
    out (``filtered``), have other children, and any codes.
    """
    logp, gap, entropy, top_entropy, count = (x.astype(np.int64) for x in rows.codes[1:])
    n, k = logp.shape
    near, near_entropy = (
        np.zeros(shape, dtype=np.bool_) if marks is None else marks
        for marks, shape in ((rows.unsure, (n, k)), (rows.unsure_entropy, n))
    )
    exists = np.arange(k) < count[:, None]
    anything = np.asarray(near.any(1) & (near | ~exists).all(1) & filtered)[:, None]
    near = near | anything
    tied = (
        near[:, :-1]
        & near[:, 1:]
        & (np.abs(np.diff(gap)) <= 1)
        & (perturbed | (np.abs(np.diff(logp)) <= 1))
    )
    beside = np.pad(tied, ((0, 0), (1, 1)), constant_values=((False, False), (False, True)))
    swapped = anything | (near & (beside[:, :-1] | beside[:, 1:]))

    def interval(code: IntArray, by_one: BoolArray, any_: BoolArray) -> Interval:
        low, high = np.maximum(code - by_one, 0), np.minimum(code + by_one, TREE_CODE_MAX)
        return Interval(np.where(any_, 0, low), np.where(any_, TREE_CODE_MAX, high))

    return OpenCodes(
        interval(logp, near, swapped & (perturbed | anything)),
        interval(gap, near & (np.arange(k) > 0), anything),
        interval(entropy, near_entropy, anything[:, 0]),
        interval(top_entropy, near_entropy, anything[:, 0]),
        exists | anything,
        exists & ~anything,
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
    tree's stop alone.
    """
    level = len(rows)
    if not any(x.has_near_tie for x in (rows if reads_phi or rule.static else rows[-1:])):
        return []
    codes = [open_codes(x, perturbed=perturbed, filtered=filtered) for x in rows]
    chosen = _open_choices(rule, tree, level, codes[-1])
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
        keys = _keys(cost, codes)
        chosen = _may_be_chosen(keys, rule.frontier)
        pool = tree.cost[: tree.size[level - 1]]
        pool = (pool << _ORDER) + np.arange(len(pool))
        every = Interval(*(np.concatenate([pool, (x + len(pool)).ravel()]) for x in keys))
        chosen |= _may_be_chosen(every, _verified(rule, every.low.size))[len(pool) :].reshape(n, k)
        is_open = codes.near | cost.open
    else:
        keys = _keys(
            _unconfident(rule, codes, level, np.where(above < 0, 0, tree.q_cost[above])[:, None]),
            codes,
        )
        chosen = _may_be_chosen(keys, rule.frontier)
        is_open = codes.near | keys.open | (cost.open if rule.coupled else False)
    found = (chosen & is_open & (keys.low < INFINITE << _ORDER)).any(1)
    return np.asarray(found & (codes.near.any(1) | codes.entropy.open))


def _verified(rule: TreeRule, size: int) -> int:
    return size if rule.top_n is None else max(rule.top_n, *rule.kept, 0)


def _keys(cost: Interval, codes: OpenCodes) -> Interval:
    """Sort keys of the last level's candidates, ties by place: INFINITE where one may not, or does
    not, exist."""
    low, high = (
        np.where(codes.possible, cost.low, INFINITE),
        np.where(codes.certain, cost.high, INFINITE),
    )
    place = np.arange(low.size).reshape(low.shape)
    return Interval((low << _ORDER) + place, (high << _ORDER) + place)


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
    heavy, light = (np.where(codes.possible, weights[gap], 0) for gap in codes.gap)
    light = np.where(codes.certain, light, 0)

    def cost(total: IntArray, gap: IntArray, slack: float) -> IntArray:
        found = np.floor(
            (np.log(np.maximum(total, 1)) - logs[gap]) * TREE_SCALE + 0.5 + slack
        ).astype(np.int64)
        return np.asarray(above + np.maximum(found, 0))

    own_heavy, own_light = weights[codes.gap.low], weights[codes.gap.high]
    low = cost(light.sum(1, keepdims=True) - light + own_heavy, codes.gap.low, -1e-9)
    return Interval(
        low, cost(heavy.sum(1, keepdims=True) - heavy + own_light, codes.gap.high, 1e-9)
    )


def _unconfident(rule: TreeRule, codes: OpenCodes, level: int, above: IntArray) -> Interval:
    """65535 less the confidence of the last level's candidates [n, k], INFINITE of one that does
    not pass; ``above`` [n, 1]: their parents' q_cost. The table knows no order, so all that is near
    is looked up."""
    table = rule.compiled.confidence
    depths, entropies, joints = table.shape

    def key(entropy: IntArray, logp: IntArray) -> IntArray:
        rows = table[min(level, depths) - 1]
        found = rows[
            np.minimum(entropy, entropies - 1)[:, None], np.minimum(above + logp, joints - 1)
        ].astype(np.int64)
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
    path = [
        (level - 1, node, rank),
        *(_path(tree, level - 1, node) if rule.max_joint < INFINITE else []),
    ]
    found = (
        {(i, at) for i, at, r in path if codes[i].near[at, r]}
        if min(rule.max_logp, rule.max_joint) < INFINITE
        else set()
    )
    if rule.max_entropy < INFINITE and codes[-1].entropy.open[node]:
        found.add((level - 1, node))
    return found


def _open_phi(tree: Tree, level: int, codes: Sequence[OpenCodes]) -> set[tuple[int, int]]:
    """The distributions of which Phi reads an open code: those that may have the most confident
    child, while it is open which has, then those on its path."""
    last = codes[-1]
    n = len(last.near)
    nodes = tree.place[level - 1, :n] != NONE
    keys = Interval(
        *(
            (np.where(nodes, np.where(there, logp, INFINITE).min(1), INFINITE) << _ORDER)
            + np.arange(n)
            for there, logp in ((last.possible, last.logp.low), (last.certain, last.logp.high))
        )
    )
    nearest = _may_be_chosen(keys, 1).nonzero()[0]
    if len(nearest) > 1:
        return {(level - 1, int(i)) for i in nearest if keys.open[i]}
    path = [
        (level - 1, int(nearest[0])),
        *((i, at) for i, at, _ in _path(tree, level - 1, int(nearest[0]))),
    ]
    return {(i, at) for i, at in path if codes[i].top_entropy.open[at]}
