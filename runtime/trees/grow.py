"""Growing draft trees on whole numbers: one level at a time, and the choice of what is verified.

:func:`grow_level` is the one place where candidates are made: while decoding, while recording
panoramas and in replay. Its rules are the papers': EAGLE-2's expansion and rerank
(:mod:`runtime.policies.eagle2`), C2T's classifier (:mod:`runtime.policies.c2t`), static trees
(:mod:`runtime.policies.sequoia`), HeteroSpec's Phi (:mod:`runtime.policies.heterospec`).
docs/simulator.md defines codes and costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.blocks import WIDTH_LIMIT
from spectune.runtime.policies.c2t import CONFIDENCE_SCALE, confidence_code
from spectune.runtime.policies.eagle2 import INFINITE, cheapest
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.sequoia import StaticLevel
from spectune.runtime.policies.stops import NEVER, UNSTOPPED, CompiledStop
from spectune.traces.schema import NAT_SCALE

Index = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

ROOT: Final = -1
"""The parent of a candidate of the first level."""
NONE: Final = -2
"""A place of a frontier without a node."""
GAP_CODES: Final = 4096
"""Gaps told apart: up to 16 nat."""


CODE_DTYPES: Final = (np.int32, np.uint16, np.uint16, np.uint16, np.uint16, np.uint8)
"""Of recorded :class:`Codes`, by field."""


class Codes(NamedTuple):
    """What a draft says after n prefixes, as whole numbers of any dtype (docs/simulator.md):
    ``tokens``, ``logp`` and ``gap`` of the children [n, k], best first; ``entropy``,
    ``top_entropy`` and ``count`` (children that exist) [n]."""

    tokens: npt.NDArray[Any]
    logp: npt.NDArray[Any]
    gap: npt.NDArray[Any]
    entropy: npt.NDArray[Any]
    top_entropy: npt.NDArray[Any]
    count: npt.NDArray[Any]  # type: ignore[assignment]  # hides tuple.count

    @classmethod
    def of(cls, *columns: npt.ArrayLike) -> Codes:
        """In the dtypes of a recording, for which functions are compiled then already."""
        return cls(*(np.array(x, d) for x, d in zip(columns, CODE_DTYPES, strict=True)))


class Reads(NamedTuple):
    """What is read of a draft's distributions: the ``width`` best children, their -log q, gaps to
    the best, entropies, and entropies of the most probable tokens."""

    width: int
    logp: bool = True
    gap: bool = True
    entropy: bool = True
    top_entropy: bool = True


class LevelRule(NamedTuple):
    """What compiled code reads of a :class:`TreeRule`. ``weights`` int64 and ``logs`` float64
    [GAP_CODES]: :func:`gap_weights`; ``log_sums``: :func:`logs_of_sums`. ``confidence`` int32
    [depth, entropy, joint]: C2T's table, else empty. ``listed`` and ``expanded`` int64 [levels,
    most]: a static tree's places, filled up with -1, else empty."""

    width: int
    frontier: int
    coupled: bool
    weights: Index
    logs: FloatArray
    log_sums: FloatArray
    confidence: npt.NDArray[np.int32]
    beta_code: int
    listed: Index
    expanded: Index


@dataclass(frozen=True, eq=False)
class TreeRule:
    """A policy's growth, stop, selection and bins, compiled for one sampling temperature
    (``coupled``: above 0).

    ``width``: children read of a distribution (k); ``frontier``: nodes expanded per level at most
    (F). ``confidence`` int32 [depth, entropy, joint] codes of 1/65535 and ``beta_code`` make it
    C2T's. ``static`` levels make it static. ``thresholds``, ``fitted_depth``, ``alpha`` and
    ``bin_top_n`` (N' of each low bin) are HeteroSpec's."""

    width: int
    frontier: int
    coupled: bool = False
    sharpness: float = 1.5
    top_n: int | None = None
    confidence: npt.NDArray[np.int32] | None = None
    beta_code: int = 0
    static: tuple[StaticLevel, ...] = ()
    stop: CompiledStop = UNSTOPPED
    thresholds: tuple[int, ...] = ()
    fitted_depth: int = 1
    alpha: int = 0
    bin_top_n: tuple[int, ...] = ()

    @property
    def stratified(self) -> bool:
        return bool(self.bin_top_n)

    @cached_property
    def reads(self) -> Reads:
        """What growing reads of distributions."""
        c2t, stop = self.confidence is not None, self.stop
        logp = not self.coupled or c2t or stop.active or self.stratified
        entropy = c2t or stop.max_entropy_code < NEVER
        return Reads(self.width, logp, self.coupled, entropy, self.stratified)

    @cached_property
    def compiled(self) -> LevelRule:
        table = np.zeros((0, 0, 0)) if self.confidence is None else self.confidence
        return LevelRule(
            self.width,
            self.frontier,
            self.coupled,
            *gap_weights(self.sharpness),
            logs_of_sums(),
            np.ascontiguousarray(table, np.int32),
            self.beta_code,
            _padded([x.places for x in self.static]),
            _padded([x.expanded for x in self.static]),
        )

    def levels(self, depth: int) -> int:
        """Levels of a tree that may have ``depth``: a static one has no more than it lists."""
        return min(depth, len(self.static)) if self.static else depth

    def places(self, level: int) -> int:
        """Candidates of a level, counted from 1."""
        if self.static:
            return len(self.static[level - 1].places) if level <= len(self.static) else 0
        return self.step_width(level) * self.width

    def pool(self, depth: int) -> int:
        """Candidates of all levels up to ``depth``."""
        return sum(self.places(level) for level in range(1, depth + 1))

    def verified(self, depth: int) -> int:
        """Nodes of ``depth`` levels that are verified where all of them exist and N leaves none
        out; of a classifier those expanded."""
        if self.confidence is None:
            return self.pool(depth)
        return sum(min(self.places(level), self.frontier) for level in range(1, depth + 1))

    def step_width(self, level: int) -> int:
        """Nodes that the pass for a level reads (beside the lag for level 1, where it is 1)."""
        if level == 1:
            return 1
        if self.static:
            return len(self.static[level - 2].expanded) if level - 1 <= len(self.static) else 0
        return min(self.frontier, int(self.width ** (level - 1)))

    def stops(self, read: npt.NDArray[Any]) -> Any:
        """Whether the stop triggers where it reads these codes int [..., 3] (:attr:`Tree.stop`),
        bool [...]."""
        return (read > np.array(self.stop[1:4])).any(-1)

    def extension(self, bin_: int) -> int:
        """HeteroSpec's alpha - i, 0 outside the low bins."""
        return max(0, self.alpha - bin_) if bin_ < len(self.bin_top_n) else 0

    def top_n_of(self, bin_: int) -> int | None:
        """N or, in a low bin, N' (equation in section 4.3)."""
        return self.bin_top_n[bin_] if 0 <= bin_ < len(self.bin_top_n) else self.top_n


def _padded(rows: list[tuple[int, ...]]) -> Index:
    table = np.full((len(rows), 1 + max(map(len, rows), default=0)), -1, dtype=np.int64)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


@lru_cache(maxsize=64)
def gap_weights(sharpness: float) -> tuple[Index, FloatArray]:
    """Whole weights 2**24 exp(-sharpness gap) of each gap code, int64 [GAP_CODES], and their
    logarithms, float64 [GAP_CODES]; wider gaps take the last."""
    shares = [math.exp(-sharpness * gap / NAT_SCALE) for gap in range(GAP_CODES)]
    weights = [max(1, math.floor(2**24 * share + 0.5)) for share in shares]
    return np.array(weights), np.array([math.log(w) for w in weights])


SUM_SHIFT: Final = 14
"""Bits of a sum of weights that its logarithm does not tell apart."""


@lru_cache(maxsize=1)
def logs_of_sums() -> FloatArray:
    """Logarithms of sums of up to WIDTH_LIMIT weights, rounded up to the next multiple of 2 **
    SUM_SHIFT, by their upper bits, float64. A table, so that devices decide alike to the last bit:
    the best child alone weighs 2 ** 24, which makes that at most 1e-3 nat."""
    return np.array([math.log((i + 1) << SUM_SHIFT) for i in range((WIDTH_LIMIT << 10) + 1)])


class Tree(NamedTuple):
    """One tree while it grows, or B of them with an axis more in front; int64, levels counted from
    1.

    Of each candidate, in creation order [P]: its ``token``, joint ``cost`` (INFINITE: it may not be
    chosen), ``q_cost`` (-log of the product of q), ``parent`` (a candidate or ROOT) and ``key``, by
    which a classifier orders. Of each place of the frontiers [D + 1, F], the root's in row 0: its
    candidate (``place``, or NONE), the place ``above`` it in the frontier before, its ``rank``
    among siblings, and ``phi``, the sum of top entropies above it. Of each level [D + 1]: where its
    candidates end (``size``), places of its ``frontier``, how many the next pass reads (``width``),
    and HeteroSpec's ``level_phi``; [D + 1, 3]: what a ``stop`` reads of the cheapest candidate (of
    a static tree the first): -log q, -log of the product of q, entropy of the distribution it comes
    from."""

    token: Index
    cost: Index
    q_cost: Index
    parent: Index
    key: Index
    place: Index
    above: Index
    rank: Index
    phi: Index
    size: Index
    frontier: Index
    width: Index
    level_phi: Index
    stop: Index

    @classmethod
    def empty(cls, rule: TreeRule, depth: int, batch: int) -> Tree:
        """``batch`` trees of no level, with room for ``depth``."""
        levels, places = (depth + 1,), (depth + 1, max(1, rule.frontier))
        shapes = [(rule.pool(depth),)] * 5 + [places] * 4 + [levels] * 4 + [(*levels, 3)]
        trees = cls(*(np.empty((batch, *shape), np.int64) for shape in shapes))
        trees.place[:, 0, 0] = ROOT
        trees.phi[:, 0, 0] = trees.size[:, 0] = 0
        trees.frontier[:, 0] = trees.width[:, 0] = 1
        return trees


@compiled(inline=True)
def grow_level(rule: LevelRule, codes: Codes, front: Index, level: int, tree: Tree) -> None:
    """Makes a level of one tree: its candidates, the frontier that is expanded next, and what a
    stop and HeteroSpec read of it.

    ``front`` [frontier]: the rows of ``codes`` that the nodes of the frontier above have; a row
    that is not there has no children."""
    k, begin, listed = rule.width, tree.size[level - 1], rule.listed
    candidate = begin
    static, most_confident = listed.shape[0] > 0, np.int64(INFINITE)
    tree.level_phi[level] = 0
    for f in range(tree.frontier[level - 1]):
        above, row, there = tree.place[level - 1, f], front[f], 0
        cost = q_cost = np.int64(0)
        if above != NONE and 0 <= row < codes.count.shape[0]:
            there = min(int(codes.count[row]), k)
            if above != ROOT:
                cost, q_cost = tree.cost[above], tree.q_cost[above]
        log_total = _log_of_weights(rule, codes.gap, row, there) if rule.coupled else 0.0
        for rank in range(there):
            local = np.int64(codes.logp[row, rank])
            if local < most_confident:
                most_confident = local
                tree.level_phi[level] = tree.phi[level - 1, f] + codes.top_entropy[row]
            if static and listed[level - 1, candidate - begin] != f * k + rank:
                continue
            tree.parent[candidate] = above
            tree.token[candidate] = codes.tokens[row, rank]
            tree.q_cost[candidate] = q_cost + local
            if rule.coupled:
                log_weight = rule.logs[min(codes.gap[row, rank], GAP_CODES - 1)]
                local = np.int64(math.floor((log_total - log_weight) * NAT_SCALE + 0.5))
            tree.cost[candidate] = cost + local
            candidate += 1
        for rank in range(there, k):
            if not static or listed[level - 1, candidate - begin] == f * k + rank:
                tree.token[candidate], tree.parent[candidate] = 0, above
                tree.cost[candidate] = tree.q_cost[candidate] = INFINITE
                candidate += 1
    tree.size[level] = candidate
    _expand(rule, codes, front, level, tree)
    _read_stop(rule, codes, front, level, tree)


@compiled(inline=True)
def _log_of_weights(rule: LevelRule, gap: npt.NDArray[Any], row: int, there: int) -> float:
    """log of the siblings' sum of weights, the normaliser of the coupled score."""
    total = np.int64(0)
    for rank in range(there):
        total += rule.weights[min(gap[row, rank], GAP_CODES - 1)]
    return float(rule.log_sums[total >> SUM_SHIFT])


@compiled(inline=True)
def _expand(rule: LevelRule, codes: Codes, front: Index, level: int, tree: Tree) -> None:
    """Writes the frontier of a level."""
    k, begin, end = rule.width, tree.size[level - 1], tree.size[level]
    place, static = tree.place[level], rule.listed.shape[0] > 0
    if static:
        count = 0
        while rule.expanded[level - 1, count] >= 0:
            place[count] = begin + rule.expanded[level - 1, count]
            count += 1
        tree.width[level] = tree.frontier[level] = count
    else:
        tree.frontier[level] = min(rule.frontier, end - begin)
        if rule.confidence.size > 0:
            count = _classify(rule, codes, front, level, tree)
        else:
            count = cheapest(tree.cost, begin, end, place[: tree.frontier[level]])
        tree.width[level] = count
    for j in range(tree.frontier[level]):
        if j >= count:
            place[j] = NONE
            tree.above[level, j] = tree.rank[level, j] = tree.phi[level, j] = 0
            continue
        index = rule.listed[level - 1, place[j] - begin] if static else place[j] - begin
        above = index // k
        tree.above[level, j], tree.rank[level, j] = above, index - above * k
        if tree.cost[place[j]] >= INFINITE:
            place[j] = NONE
        else:
            tree.phi[level, j] = tree.phi[level - 1, above] + codes.top_entropy[front[above]]


@compiled(inline=True)
def _classify(rule: LevelRule, codes: Codes, front: Index, level: int, tree: Tree) -> int:
    """C2T, section 4.2: of a level's candidates leaves those above beta, the most confident first
    and at most F; how many."""
    begin, end = tree.size[level - 1], tree.size[level]
    for candidate in range(begin, end):
        tree.key[candidate] = INFINITE
        if tree.cost[candidate] < INFINITE:
            entropy = codes.entropy[front[(candidate - begin) // rule.width]]
            confidence = confidence_code(rule.confidence, level, entropy, tree.q_cost[candidate])
            if confidence > rule.beta_code:
                tree.key[candidate] = CONFIDENCE_SCALE - confidence
    place = tree.place[level, : tree.frontier[level]]
    count = cheapest(tree.key, begin, end, place)
    for j in range(count):
        tree.key[place[j]] = -1
    for candidate in range(begin, end):
        if tree.key[candidate] != -1:
            tree.cost[candidate] = INFINITE
    return count


@compiled(inline=True)
def _read_stop(rule: LevelRule, codes: Codes, front: Index, level: int, tree: Tree) -> None:
    """Writes what a stop reads of a level; zeros where it has no node, which trigger none."""
    begin, static = tree.size[level - 1], rule.listed.shape[0] > 0
    first = np.int64(NONE)
    for candidate in range(begin, tree.size[level]):
        if tree.cost[candidate] < INFINITE and (
            first == NONE or (not static and tree.cost[candidate] < tree.cost[first])
        ):
            first = np.int64(candidate)
    tree.stop[level, 0] = tree.stop[level, 1] = tree.stop[level, 2] = 0
    if first != NONE:
        above = tree.parent[first]
        index = rule.listed[level - 1, first - begin] if static else first - begin
        tree.stop[level, 0] = tree.q_cost[first] - (0 if above == ROOT else tree.q_cost[above])
        tree.stop[level, 1] = tree.q_cost[first]
        tree.stop[level, 2] = codes.entropy[front[index // rule.width]]


@compiled()
def _grow_levels(rule: LevelRule, codes: Codes, front: Index, level: int, trees: Tree) -> None:
    """:func:`grow_level` of each tree of a batch; ``front`` [B, at least their frontier]."""
    for b in range(front.shape[0]):
        tree = Tree(
            trees.token[b], trees.cost[b], trees.q_cost[b], trees.parent[b], trees.key[b],
            trees.place[b], trees.above[b], trees.rank[b], trees.phi[b],
            trees.size[b], trees.frontier[b], trees.width[b], trees.level_phi[b], trees.stop[b],
        )  # fmt: skip
        grow_level(rule, codes, front[b], level, tree)


class Growing:
    """Trees while they grow, level by level, of ``depth`` levels at most. The other members are for
    one tree alone."""

    def __init__(self, rule: TreeRule, depth: int, batch: int = 1) -> None:
        self.rule, self.trees = rule, Tree.empty(rule, depth, batch)
        self.tree = Tree(*(array[0] for array in self.trees))
        """The first, as it stands, levels forgotten last included."""
        self.depth = 0
        """Levels so far."""

    def add_from(self, codes: Codes, front: Index) -> None:
        """Makes the next level of each tree; ``front`` int64 [B, F]: the row of ``codes`` of each
        place of the frontier, -1: none."""
        self.depth += 1
        _grow_levels(self.rule.compiled, codes, front, self.depth, self.trees)

    def add(self, codes: Codes) -> None:
        """Makes the next level from the distributions after the frontier's first nodes, in
        order."""
        self.add_from(codes, np.arange(max(1, self.rule.frontier), dtype=np.int64)[None])

    def undo(self) -> None:
        """Forgets the last level."""
        self.depth -= 1

    @property
    def width(self) -> int:
        """Nodes that the next pass reads; a static tree reads its places, whether or not there is a
        node."""
        return int(self.tree.width[self.depth])

    @property
    def stops(self) -> bool:
        """Whether the last level triggers the rule's stop."""
        return bool(self.rule.stops(self.tree.stop[self.depth]))

    @property
    def phi(self) -> int:
        """Phi of the path with the highest final-token confidence after the last level (HeteroSpec,
        section 4.1), in 1/256 nat."""
        return int(self.tree.level_phi[self.depth])


def select(
    tree: Tree, levels: int, passes: int, top_n: int | None
) -> tuple[list[int], list[int], list[int], list[int]]:
    """The ``top_n`` cheapest candidates of the first ``levels`` (EAGLE-2, section 4.2; None: all),
    after so many passes.

    Lists in creation order: tokens, parents (among the chosen, -1: the root), depths (from 1),
    and which of the nodes that the passes read each is (-1: none)."""
    size = int(tree.size[levels])
    chosen = np.empty(size if top_n is None else min(size, top_n), dtype=np.int64)
    number, columns = np.empty(size + 1, np.int64), np.empty((4, len(chosen)), np.int64)
    count = _select(tree, levels, passes, chosen, number, columns)
    tokens, parents, depths, read = columns[:, :count].tolist()
    return tokens, parents, depths, read


@compiled()
def _select(
    tree: Tree, levels: int, passes: int, chosen: Index, number: Index, columns: Index
) -> int:
    """Writes what :func:`select` lists into ``columns`` [4, n]; how many nodes. Scratch: ``chosen``
    [n], ``number`` [size + 1]."""
    size, count = tree.size[levels], chosen.shape[0]
    if count < size:
        number[:] = -1
        for i in range(cheapest(tree.cost, 0, size, chosen)):
            number[chosen[i]] = 0
    else:
        for candidate in range(size):
            number[candidate] = 0 if tree.cost[candidate] < INFINITE else -1
    number[size] = ROOT  # what ROOT, -1, indexes
    count, level = 0, 1
    for candidate in range(size):
        while candidate >= tree.size[level]:
            level += 1
        if number[candidate] < 0:
            continue
        number[candidate] = count
        columns[0, count] = tree.token[candidate]
        columns[1, count] = number[tree.parent[candidate]]
        columns[2, count], columns[3, count] = level, -1
        count += 1
    read = 0
    for above in range(1, min(levels, passes - 1) + 1):
        for j in range(tree.width[above]):
            candidate = tree.place[above, j]
            if candidate != NONE and number[candidate] >= 0:
                columns[3, number[candidate]] = read + j
        read += tree.width[above]
    return count
