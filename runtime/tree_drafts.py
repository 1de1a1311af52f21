"""Drafting trees with models: the laws come from a draft's passes, everything else from :mod:`runtime.policies.trees`.

:func:`grow` is the one driver of a tree, level by level: it asks a :class:`LawSource` for laws and applies stop, early end and HeteroSpec's
extension. A model's passes stand behind it when decoding, a recorded panorama in the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from runtime.distributions import read_distributions
from runtime.policies.c2t import CONFIDENCE_SCALE, look_up
from runtime.policies.heterospec import bin_of
from runtime.policies.lean_trees import LeanGrowing, grows_lean
from runtime.policies.trees import (
    INFINITE,
    ORDER_BITS,
    Growing,
    LawRows,
    Laws,
    Level,
    StaticLevel,
    TreeRule,
    gap_weights,
    select,
)
from runtime.sampling import Noise
from traces.schema import NO_BIN, TREE_CODE_MAX, TREE_SCALE, Sampling

AnyGrowing = Growing | LeanGrowing
"""A tree while it grows, by tensor operations or, where its rule allows it, without them."""


class LawSource(Protocol):
    """Where the laws of one tree come from."""

    def root(self) -> Laws | LawRows:
        """The law after the text, [1, 1, k] or one row."""

    def expand(self, growing: AnyGrowing, width: int) -> Laws | LawRows:
        """The laws of the last level's frontier, [1, F, k], or of its first ``width`` nodes, [width, k]: only these exist."""

    def settle(self, growing: AnyGrowing) -> None:
        """Decides what rounding could have changed of the level just added (docs/trees.md)."""


class Pruned(NamedTuple):
    """What one drafting phase drafted and did not send to verification: the candidates that selection left and those of a level that the
    stop dropped, in creation order.

    ``tokens``, ``depths`` (from 1) and ``parents`` (-1: the root; numbers count the kept nodes first, then these).
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]


@dataclass
class GrownTree:
    """What one drafting phase grew and chose.

    ``tokens``, ``parents`` (index among the kept nodes, -1: the root), ``depths`` (from 1) of the kept nodes in creation order; ``place``:
    their places in the pool; ``slots``: where the draft cached them, -1 if it did not read them. ``levels`` kept of the growth, ``steps``
    passes made, ``widths`` the nodes each pass read (1 for the first). ``bin`` is HeteroSpec's, ``phi`` in 1/16 nat. ``pruned`` is None
    unless it was asked for.
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
    pruned: Pruned | None = None


def grow(
    rule: TreeRule,
    depth: int,
    limit: int,
    source: LawSource,
    device: torch.device,
    *,
    whole: bool = False,
    keep_pruned: bool = False,
) -> GrownTree:
    """Grows one tree of at most ``depth`` levels (the window's; HeteroSpec may extend it up to ``limit``) and selects its nodes.

    ``whole`` promises that every law has ``rule.width`` children (nothing is filtered): then nothing is looked at to find out.
    ``keep_pruned``: what was drafted and not selected is read out too, with a second transfer from the device.
    """
    growing: AnyGrowing
    if grows_lean(rule, device):
        growing = LeanGrowing(rule, limit if rule.stratified else depth)
    else:
        growing = Growing(rule, 1, device, whole, lean=True)
    wanted = min(depth, len(rule.static)) if rule.static else depth
    tree = GrownTree()
    dropped: list[Level] = []
    if isinstance(source, ModelLaws):
        source.phi_level = depth
    width, level = 1, 0
    while level < wanted:
        laws = source.root() if level == 0 else source.expand(growing, width)
        tree.steps += 1
        tree.widths.append(width)
        growing.add(laws)
        source.settle(growing)
        level += 1
        width = growing.expandable
        if rule.confidence is not None and width == 0:
            growing.undo()
            break
        if rule.reads_stop and growing.stops:
            if not rule.keep_last:
                dropped = [growing.levels[-1]]
                growing.undo()
            break
        if level == depth and rule.stratified:
            tree.phi = growing.phi
            tree.bin = int(bin_of(np.array([tree.phi]), depth, rule.thresholds, rule.fitted_depth)[0])
            wanted = min(limit, depth + rule.extension(tree.bin))
    tree.levels = growing.depth
    if isinstance(growing, LeanGrowing):
        _keep_lean(rule, growing, tree)
    else:
        _keep(rule, growing, tree)
    if keep_pruned:
        tree.pruned = _pruned(rule, [*growing.levels, *dropped], tree.place)
    return tree


def _keep_lean(rule: TreeRule, growing: LeanGrowing, tree: GrownTree) -> None:
    """:func:`_keep` without tensors."""
    if not growing.depth:
        return
    top_n = rule.top_n_of(tree.bin) if tree.bin != NO_BIN else rule.top_n
    tree.tokens, tree.parents, tree.depths, tree.place, tree.expanded = growing.kept(top_n, tree.widths)
    tree.pool = growing.pool


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


def _pruned(rule: TreeRule, levels: list[Level], kept: list[int]) -> Pruned:
    """The eligible nodes of ``levels`` beside those in the places ``kept``."""
    if not levels:
        return Pruned([], [], [])
    parts = [*(level.eligible for level in levels), *(level.tokens for level in levels), *(level.frontier.index for level in levels)]
    found = torch.cat(parts, 1)[0].cpu().numpy()
    sizes = tuple(level.cost.shape[1] for level in levels)
    outline = _outline(rule.width, rule.static, sizes, tuple(level.frontier.index.shape[1] for level in levels))
    pool, chosen = sum(sizes), np.array(kept, dtype=np.int64)
    left = found[:pool] != 0
    left[chosen] = False
    places = left.nonzero()[0]
    number = np.full(pool + 1, -1)
    number[np.concatenate((chosen, places))] = np.arange(len(chosen) + len(places))
    above = np.concatenate(([pool], outline.begins + found[2 * pool :]))
    return Pruned(
        found[pool : 2 * pool][places].tolist(), number[above[outline.parent[places]]].tolist(), outline.depth[places].tolist()
    )


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
    ids: torch.Tensor | None
    """The tokens that the last pass's logits are of, int64 [size], where the draft has a shortlist; None: all, [vocab]."""

    def root(self) -> torch.Tensor:
        """Float32 logits [1, vocab or size] after the text; reads what the draft has not read of it."""

    def level(
        self, tokens: torch.Tensor, parents: torch.Tensor | None, depth: int, exists: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Float32 logits [n, vocab or size] after n tokens at ``depth``, children of the nodes that pass depth - 1 read in these places
        (None: of the root). ``exists`` bool [n]: the tokens that are nodes of the tree; None: all."""

    def canonical(self, path: list[int]) -> torch.Tensor:
        """Float32 logits [vocab or size] after the text and ``path``: one answer whatever the batch."""


class ModelLaws:
    """Laws from a draft's passes, codes settled where rounding could change what is drafted.

    ``phi_level``: the level, from 1, after which Phi is read; None: any. :func:`grow` says it.
    """

    def __init__(self, rule: TreeRule, reader: Reader, context: TreeContext) -> None:
        self.rule, self.reader, self.context = rule, reader, context
        self.rows: list[LawRows] = []
        self.phi_level: int | None = None
        self._ids: list[torch.Tensor | None] = []
        reader.ids = None  # no pass was made
        self._reading = {
            "by_probability": rule.by_probability,
            "entropy": rule.reads_entropy,
            "top_entropy": rule.stratified,
            "reads_logp": not rule.coupled or rule.reads_q,
            "reads_gap": rule.coupled,
        }

    def _laws(self, logits: torch.Tensor, depth: int, exact: bool) -> LawRows:
        """Codes of laws whose children stand at ``depth``."""
        context = self.context
        noise = None if context.noise is None else context.noise.row(self.reader.length + depth - 1)
        return read_distributions(logits, context.sampling, noise, self.rule.width, exact=exact, ids=self.reader.ids, **self._reading)

    def root(self) -> LawRows:
        self.rows = [self._laws(self.reader.root(), 1, self.context.exact)]
        self._ids = [self.reader.ids]
        return self.rows[0]

    def expand(self, growing: AnyGrowing, width: int) -> LawRows:
        depth = growing.depth
        tokens, parents = growing.following(width)
        if self.reader.ids is not None and self.rule.static and not growing.levels[-1].whole:
            # A static tree reads its places whether or not there is a node, others read nodes alone; shortlists are for nodes.
            logits = self.reader.level(tokens, parents, depth, growing.levels[-1].frontier.exists[0])
        else:
            logits = self.reader.level(tokens, parents, depth)
        self.rows.append(self._laws(logits, depth + 1, self.context.exact))
        self._ids.append(self.reader.ids)
        return self.rows[-1]

    def settle(self, growing: AnyGrowing) -> None:
        while doubtful := self._doubtful(growing):
            for at, node in doubtful:
                self.rows[at] = self._replaced(growing, at, node)
            first = min(at for at, _ in doubtful)
            while growing.depth > first:
                growing.undo()
            for rows in self.rows[first:]:
                growing.add(rows)

    def _doubtful(self, growing: AnyGrowing) -> list[tuple[int, int]]:
        """The laws (level from 0, frontier node) that must be settled: an undecided code could change what is expanded, kept or read."""
        rule, sampling = self.rule, self.context.sampling
        reads_phi = rule.stratified and self.phi_level in (None, growing.depth)
        # Codes of laws above are left undecided only where Phi or a static tree's stop reads them.
        if not (any(map(_undecided, self.rows)) if reads_phi or rule.static else _undecided(self.rows[-1])):
            return []
        perturbed = self.context.noise is not None and not rule.by_probability
        filtered = not sampling.greedy and (sampling.top_p < 1.0 or sampling.top_k > 0)
        read = self.rows if reads_phi or rule.reads_stop else self.rows[-1:]
        return _doubtful_laws(rule, growing.levels, [_bounds(r, perturbed, filtered) for r in read], reads_phi=reads_phi)

    def _replaced(self, growing: AnyGrowing, at: int, node: int) -> LawRows:
        """The rows of level ``at`` (from 0) with one node's law taken from the canonical pass."""
        path: list[int] = []
        place = node
        for level in reversed(growing.levels[:at]):
            index = int(level.frontier.index[0, place])
            path.append(int(level.tokens[0, index]))
            place = int(level.parent[0, index])
        path.reverse()
        one = self._canonical(path)
        fields: list[torch.Tensor | None] = []
        for name, old in self.rows[at]._asdict().items():
            if old is None:
                fields.append(None)
                continue
            new = old.clone()
            new[node] = False if name in ("unsure", "unsure_entropy") else getattr(one, name)[0]
            fields.append(new)
        return LawRows(*fields)  # type: ignore[arg-type]  # None only where the field may be

    def _canonical(self, path: list[int]) -> LawRows:
        """The law after a drafted ``path`` by the canonical pass."""
        reader, last = self.reader, self.reader.ids
        reader.ids = self._ids[len(path)]
        logits = reader.canonical(path)[None]
        rows = self._laws(logits, len(path) + 1, False)
        reader.ids = last
        return rows


def _undecided(rows: LawRows) -> bool:
    """Whether rounding could change anything of these laws."""
    marks, of_laws = rows.unsure, rows.unsure_entropy
    return (marks is not None and bool(marks.any())) or (of_laws is not None and bool(of_laws.any()))


IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class _Bounds(NamedTuple):
    """The least and the most that the codes of a level's n laws may turn out to be, as pairs of int64 arrays: ``logp`` and ``gap``
    [n, k], ``entropy`` and ``top_entropy`` [n]. Bool: ``marked`` [n, k], the children whose codes or token are undecided; ``swapped``
    [n, k], those whose token may be; ``exists`` [n, k], those that certainly exist; ``torn`` [n], laws of which nothing is certain."""

    logp: tuple[IntArray, IntArray]
    gap: tuple[IntArray, IntArray]
    entropy: tuple[IntArray, IntArray]
    top_entropy: tuple[IntArray, IntArray]
    marked: BoolArray
    swapped: BoolArray
    exists: BoolArray
    torn: BoolArray


def _bounds(rows: LawRows, perturbed: bool, filtered: bool) -> _Bounds:
    """What :func:`runtime.distributions.read_distributions` leaves open of the codes it marks.

    A marked code may be one unit off, or the child may change places with a neighbour of nearly its score: then codes of the score are
    one unit off at most, but where the score holds noise (``perturbed``) q may be any. The last child's neighbour is not known. A law
    whose children are all marked may, if the sampling leaves tokens out (``filtered``), be torn: children may come or go, and any code
    change.
    """
    logp, gap, entropy, top_entropy, count = (
        x.cpu().numpy() for x in (rows.logp, rows.gap, rows.entropy, rows.top_entropy, rows.count)
    )
    n, k = logp.shape
    marked = np.zeros((n, k), dtype=np.bool_) if rows.unsure is None else rows.unsure.cpu().numpy()
    law = np.zeros(n, dtype=np.bool_) if rows.unsure_entropy is None else rows.unsure_entropy.cpu().numpy()
    exists = np.arange(k) < count[:, None]
    torn: BoolArray = np.asarray(filtered & marked.any(1) & (marked | ~exists).all(1))
    marked, exists = marked | torn[:, None], exists & ~torn[:, None]
    tied = marked[:, :-1] & marked[:, 1:] & (np.abs(np.diff(gap)) <= 1) & (perturbed | (np.abs(np.diff(logp)) <= 1))
    swapped = np.zeros_like(marked)
    swapped[:, :-1] |= tied
    swapped[:, 1:] |= tied
    swapped[:, -1] |= marked[:, -1]
    swapped |= torn[:, None]

    def moved(code: IntArray, by_one: BoolArray, anyhow: BoolArray) -> tuple[IntArray, IntArray]:
        least, most = np.maximum(code - by_one, 0), np.minimum(code + by_one, TREE_CODE_MAX)
        return np.where(anyhow, 0, least), np.where(anyhow, TREE_CODE_MAX, most)

    return _Bounds(
        moved(logp, marked, swapped & (perturbed | torn[:, None])),
        moved(gap, marked & (np.arange(k) > 0), torn[:, None]),
        moved(entropy, law, torn),
        moved(top_entropy, law, torn),
        marked,
        swapped,
        exists,
        torn,
    )


def _doubtful_laws(rule: TreeRule, levels: list[Level], bounds: list[_Bounds], *, reads_phi: bool) -> list[tuple[int, int]]:
    """The laws, each as (level from 0, frontier node), to settle for the last of ``levels`` of one tree; ``bounds`` of each level's laws,
    where neither a stop nor Phi is read of the last level's alone.

    When it names none, then whichever codes within the bounds are the true ones, the tree has the same frontier, in the same order, the
    same tokens, costs and q_costs of all places that may be verified, the same stop and, where it is read now, the same Phi. It named
    none for the levels above, so what is undecided there can be read by Phi alone or, in a static tree, by a stop.
    """
    at, last = len(levels) - 1, bounds[-1]
    if (last.marked.any(1) | (last.entropy[0] < last.entropy[1])).any():
        if rule.static:
            found = _swapped_places(rule.static[at], levels, last)
        elif rule.confidence is not None:
            found = _doubtful_confidence(rule, rule.confidence, levels, last)
        else:
            found = _doubtful_costs(rule, levels, last)
        if found.any():
            return [(at, int(i)) for i in found.nonzero()[0]]
    if rule.reads_stop:
        doubtful = _doubtful_stop(rule, levels, bounds)
        if doubtful or bool(levels[-1].stops[0]):
            return doubtful
    return _doubtful_phi(levels, bounds) if reads_phi else []


def _above(levels: list[Level], name: str, n: int) -> IntArray:
    """A column of the nodes that the last level's n laws follow, int64 [n]; 0 for the root."""
    if len(levels) == 1:
        return np.zeros(n, dtype=np.int64)
    level = levels[-2]
    found: IntArray = getattr(level, name)[0].take(level.frontier.index[0, :n]).cpu().numpy()
    return found


def _read_nodes(levels: list[Level], n: int) -> BoolArray:
    """Which of the last level's n laws are a node's, bool [n]; a static tree also reads places without one."""
    if len(levels) == 1:
        return np.ones(n, dtype=np.bool_)
    exists: BoolArray = levels[-2].frontier.exists[0, :n].cpu().numpy()
    return exists


def _swapped_places(level: StaticLevel, levels: list[Level], last: _Bounds) -> BoolArray:
    """The laws of which a child that the static tree lists may be another token, bool [n]: codes decide nothing in it."""
    n, k = last.swapped.shape
    listed = np.zeros(n * k, dtype=np.bool_)
    listed[list(level.places)] = True
    found: BoolArray = np.any(last.swapped & listed.reshape(n, k), axis=1) & _read_nodes(levels, n)
    return found


def _cost_bounds(rule: TreeRule, levels: list[Level], last: _Bounds) -> tuple[IntArray, IntArray]:
    """The least and the most joint cost of each child of the last level's laws, int64 [n, k]; INFINITE: it does not, or may not, exist."""
    n, k = last.marked.shape
    least, most = last.logp
    if rule.coupled:
        weights, logs = (x.numpy() for x in gap_weights(rule.sharpness, torch.device("cpu")))
        present = last.exists | last.torn[:, None]
        # A cost rises with its own gap and falls with the siblings'.
        heavy, light = (np.where(present, weights[gap], 0) for gap in last.gap)
        least = _coupled(light.sum(1, keepdims=True) - light + heavy, logs[last.gap[0]], -1e-9)
        most = _coupled(heavy.sum(1, keepdims=True) - heavy + light, logs[last.gap[1]], 1e-9)
        decided: BoolArray = ~np.any(last.marked, axis=1)
        given = levels[-1].cost[0, : n * k].cpu().numpy().reshape(n, k) - _above(levels, "cost", n)[:, None]
        least, most = np.where(decided[:, None], given, least), np.where(decided[:, None], given, most)
    above = _above(levels, "cost", n)[:, None]
    least, most = above + np.where(last.torn[:, None], 0, least), above + most
    return np.where(last.exists | last.torn[:, None], least, INFINITE), np.where(last.exists, most, INFINITE)


def _coupled(total: IntArray, log: npt.NDArray[np.float64], slack: float) -> IntArray:
    """Coupled costs of children with weights' sums and logarithms of their own, as :func:`local_costs` rounds them, but for ``slack``."""
    found: IntArray = np.floor((np.log(np.maximum(total, 1)) - log) * TREE_SCALE + 0.5 + slack).astype(np.int64)
    return found


def _reaching(least: IntArray, most: IntArray, count: int) -> BoolArray:
    """Which of keys, each somewhere from ``least`` to ``most``, can be among the ``count`` smallest; bool of the same shape."""
    if count >= most.size:
        return np.ones(most.shape, dtype=np.bool_)
    found: BoolArray = least <= np.partition(most, count - 1, axis=None)[count - 1]
    return found


def _doubtful_costs(rule: TreeRule, levels: list[Level], last: _Bounds) -> BoolArray:
    """The laws with an undecided child that may be expanded or be among the N cheapest so far, bool [n]."""
    least, most = _cost_bounds(rule, levels, last)
    n, k = least.shape
    before = [level.cost[0].cpu().numpy() for level in levels[:-1]]
    pool = np.concatenate([*before, np.zeros(0, dtype=np.int64)])
    place = np.arange(n * k).reshape(n, k) + len(pool)
    low, high = (least << ORDER_BITS) + place, (most << ORDER_BITS) + place
    reaching = _reaching(low, high, rule.frontier)
    if rule.top_n is None:
        reaching |= True
    else:
        earlier = (pool << ORDER_BITS) + np.arange(len(pool))
        every = np.concatenate([earlier, high.reshape(-1)])
        bound = _reaching(np.concatenate([earlier, low.reshape(-1)]), every, max(rule.top_n, *rule.kept, 0))
        reaching |= bound[len(pool) :].reshape(n, k)
    reaching &= least < INFINITE
    found: BoolArray = np.any(reaching & (last.marked | (least < most)), axis=1)
    return found


_TRIED: Final = 3
"""Laws of undecided entropy whose combinations are tried; more are settled."""


def _doubtful_confidence(rule: TreeRule, table: torch.Tensor, levels: list[Level], last: _Bounds) -> BoolArray:
    """The laws of which an undecided code could change what passes the classifier, in which order, or what a node that may pass costs."""
    n, k = last.marked.shape
    place = np.arange(n * k).reshape(n, k)
    q_cost = _above(levels, "q_cost", n)[:, None]
    known = table.cpu().numpy()

    def confidence(entropy: IntArray, logp: IntArray) -> IntArray:
        return look_up(known, q_cost + logp, entropy[:, None], len(levels)).astype(np.int64)

    def keys(sure: IntArray, there: BoolArray) -> IntArray:
        return (np.where(there & (sure > rule.beta_code), CONFIDENCE_SCALE - sure, INFINITE) << ORDER_BITS) + place

    middle = [(low + high) // 2 for low, high in (last.entropy, last.logp)]
    tried = [
        confidence(e, q) for e in (last.entropy[0], middle[0], last.entropy[1]) for q in (last.logp[0], middle[1], last.logp[1])
    ]
    anything = last.logp[1] - last.logp[0] > 2
    low = np.where(anything, 0, np.min(tried, axis=0))
    high = np.where(anything, CONFIDENCE_SCALE, np.max(tried, axis=0))
    present = last.exists | last.torn[:, None]
    best = keys(high, present)
    passing = _reaching(best, keys(low, last.exists), rule.frontier) & (best < INFINITE << ORDER_BITS)
    undecided = last.marked
    if rule.coupled and (rule.top_n is not None or rule.reads_stop):
        least, most = _cost_bounds(rule, levels, last)
        undecided = undecided | (least < most)
    found: BoolArray = np.any(passing & undecided, axis=1)
    if found.any():
        return found
    open_entropy = (last.entropy[0] < last.entropy[1]) & passing.any(1)
    laws = open_entropy.nonzero()[0]
    if not len(laws):
        return found
    frontiers = set()
    for combination in product(range(3), repeat=len(laws)) if len(laws) <= _TRIED else ():
        entropy = middle[0].copy()
        for law, value in zip(laws, combination, strict=True):
            entropy[law] = (last.entropy[0][law], middle[0][law], last.entropy[1][law])[value]
        key = np.sort(keys(confidence(entropy, middle[1]), passing), axis=None)[: rule.frontier]
        frontiers.add(tuple((key[key < INFINITE << ORDER_BITS] & ((1 << ORDER_BITS) - 1)).tolist()))
    return found if len(frontiers) == 1 else open_entropy


def _path(levels: list[Level], at: int, node: int) -> list[tuple[int, int, int]]:
    """The laws above frontier node ``node`` of level ``at`` (from 0), last first: (level, node, the child that leads on)."""
    path = []
    for level in range(at - 1, -1, -1):
        place = int(levels[level].frontier.index[0, node])
        node = int(levels[level].parent[0, place])
        path.append((level, node, int(levels[level].rank[0, place])))
    return path


def _doubtful_stop(rule: TreeRule, levels: list[Level], bounds: list[_Bounds]) -> list[tuple[int, int]]:
    """The laws of which an undecided code could change whether the last level's first node triggers the stop."""
    at, level = len(levels) - 1, levels[-1]
    eligible = level.eligible[0].cpu().numpy()
    if not eligible.any():
        return []
    first = int(eligible.argmax() if rule.static else np.where(eligible, level.cost[0].cpu().numpy(), INFINITE).argmin())
    node, rank = int(level.parent[0, first]), int(level.rank[0, first])
    path = [(at, node, rank), *_path(levels, at, node)]
    logp = [[int(side[n, r]) for side in bounds[i].logp] for i, n, r in path]
    joint = [sum(pair[side] for pair in logp) for side in (0, 1)]
    entropy = [int(side[node]) for side in bounds[-1].entropy]
    triggers = [
        logp[0][side] > rule.max_logp or joint[side] > rule.max_joint or entropy[side] > rule.max_entropy for side in (0, 1)
    ]
    if triggers[0] == triggers[1]:
        return []
    own = (logp[0][0] < logp[0][1] and rule.max_logp < INFINITE) or (entropy[0] < entropy[1] and rule.max_entropy < INFINITE)
    joined = [(i, n) for (i, n, _), (low, high) in zip(path, logp, strict=True) if low < high and rule.max_joint < INFINITE]
    return list(dict.fromkeys([(at, node), *joined] if own else joined))


def _doubtful_phi(levels: list[Level], bounds: list[_Bounds]) -> list[tuple[int, int]]:
    """The laws of which an undecided code could change Phi after the last level: those that may have the most confident child while that is
    open, then those on the path."""
    at, last = len(levels) - 1, bounds[-1]
    n = len(last.torn)
    there = _read_nodes(levels, n)
    if not there.any():
        return []
    present = last.exists | last.torn[:, None]
    low, high = (np.where(present, code, INFINITE).min(1) for code in last.logp)
    keys = [(np.where(there, code, INFINITE) << ORDER_BITS) + np.arange(n) for code in (low, high)]
    nearest = _reaching(keys[0], keys[1], 1).nonzero()[0]
    if len(nearest) > 1:
        return [(at, int(i)) for i in nearest if low[i] < high[i]]
    path = [(at, int(nearest[0])), *((i, node) for i, node, _ in _path(levels, at, int(nearest[0])))]
    return [(i, node) for i, node in path if bounds[i].top_entropy[0][node] < bounds[i].top_entropy[1][node]]
