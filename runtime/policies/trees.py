"""Growing and selecting draft trees: pure functions on batches of trees, the same in the runtime and in replay.

A batch holds B trees. Level l of a tree has a fixed number of places (``k`` for the first, ``F * k`` for later ones), so shapes depend
on the policy alone and never on the data: a place whose node does not exist costs :data:`INFINITE`. All arithmetic is on whole numbers
(docs/trees.md, "laws and codes"), so that a batch of thousands of recorded starts and a batch of one live request decide alike, on any
device.

EAGLE-2's expansion and rerank are :meth:`Growing.add` and :func:`select`; C2T's classifier is a table that the expansion looks up
(:mod:`runtime.policies.c2t`); HeteroSpec's bins read ``Growing.phi`` (:mod:`runtime.policies.heterospec`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from runtime.policies.jit import compiled
from traces.schema import TREE_CODE_MAX, TREE_SCALE

INFINITE: Final = 1 << 20
"""Cost of a node that does not exist; more than any path can sum to (64 levels of 255)."""
ORDER_BITS: Final = 14
"""Bits of a sort key that hold the creation order; POOL_LIMIT stays below 2 ** ORDER_BITS."""
_PLACE: Final = (1 << ORDER_BITS) - 1
_WEIGHT_BITS = 24


class Laws(NamedTuple):
    """What a draft says after each of F nodes of B trees, as codes of 1/16 nat (docs/trees.md).

    ``tokens``, ``logp``, ``gap`` int64 [B, F, k], children best first; ``entropy``, ``top_entropy`` and ``count`` (children that exist, at
    most k) int64 [B, F].
    """

    tokens: torch.Tensor
    logp: torch.Tensor
    gap: torch.Tensor
    entropy: torch.Tensor
    top_entropy: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # hides tuple.count


class LawRows(NamedTuple):
    """Laws of n nodes of one tree: the fields of :class:`Laws` without the batch axis (int64 [n, k] and [n]), and what rounding could
    change: ``unsure`` bool [n, k] by child, ``unsure_entropy`` bool [n]; None: not asked for, or nothing."""

    tokens: torch.Tensor
    logp: torch.Tensor
    gap: torch.Tensor
    entropy: torch.Tensor
    top_entropy: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # hides tuple.count
    unsure: torch.Tensor | None
    unsure_entropy: torch.Tensor | None

    def laws(self, places: int) -> Laws:
        """As the laws of one tree whose frontier has ``places`` places; those beyond the n rows have no children."""
        parts = [self.tokens, self.logp, self.gap, self.entropy, self.top_entropy, self.count]
        missing = places - len(self.count)
        if missing:
            parts = [torch.cat([p, p.new_zeros(missing, *p.shape[1:])]) for p in parts]
        tokens, logp, gap, entropy, top_entropy, count = parts
        return Laws(tokens[None], logp[None], gap[None], entropy[None], top_entropy[None], count[None])


@dataclass(frozen=True, eq=False)
class StaticLevel:
    """One level of a static tree: for each node its place among the level's candidates (parent's frontier index * k + rank), and which
    of them are expanded, as indices into ``places``."""

    places: tuple[int, ...]
    expanded: tuple[int, ...]


NO_LEVEL: Final = StaticLevel((), ())
"""Beyond the deepest level of a static tree."""


@dataclass(frozen=True, eq=False)
class TreeRule:
    """A policy's growth, stop, selection and bins, compiled for one sampling temperature (``coupled``: above 0).

    ``width``: children read of a law (k); ``frontier``: nodes expanded per level at most (F). ``confidence`` int64 [depth, entropy,
    joint] codes of 1/65535 and ``beta_code`` make it C2T's. ``static`` levels make it static. Limits of the stop are those of
    :class:`runtime.policies.stops.CompiledStop`, in 1/16 nat. ``thresholds``, ``fitted_depth``, ``alpha`` and ``kept`` (N' of each low bin)
    are HeteroSpec's.
    """

    width: int
    frontier: int
    coupled: bool = False
    sharpness: float = 1.5
    by_probability: bool = False
    top_n: int | None = None
    confidence: torch.Tensor | None = None
    beta_code: int = 0
    static: tuple[StaticLevel, ...] = ()
    reads_stop: bool = False
    max_logp: int = 0
    max_joint: int = 0
    max_entropy: int = 0
    keep_last: bool = True
    thresholds: tuple[int, ...] = ()
    fitted_depth: int = 1
    alpha: int = 0
    kept: tuple[int, ...] = ()
    key: tuple[object, ...] = field(default=(), compare=False)

    @property
    def stratified(self) -> bool:
        return bool(self.kept)

    @property
    def reads_entropy(self) -> bool:
        """Whether a law's entropy is looked at."""
        return self.confidence is not None or (self.reads_stop and self.max_entropy < INFINITE)

    @property
    def reads_q(self) -> bool:
        """Whether q itself is looked at beside the score."""
        return self.confidence is not None or self.reads_stop or self.stratified

    def places(self, level: int) -> int:
        """Candidates of a level, counted from 1."""
        if self.static:
            return len(self.static[level - 1].places) if level <= len(self.static) else 0
        return self.step_width(level) * self.width

    def pool(self, depth: int) -> int:
        """Candidates of all levels up to ``depth``."""
        return sum(self.places(level) for level in range(1, depth + 1))

    def step_width(self, level: int) -> int:
        """Nodes that the pass for a level reads (beside the lag for level 1, where it is 1)."""
        if level == 1:
            return 1
        if self.static:
            return len(self.static[level - 2].expanded) if level - 1 <= len(self.static) else 0
        return min(self.frontier, int(self.width ** (level - 1)))

    def extension(self, bin_: int) -> int:
        """HeteroSpec's alpha - i, 0 outside the low bins."""
        return max(0, self.alpha - bin_) if bin_ < len(self.kept) else 0

    def top_n_of(self, bin_: int) -> int | None:
        """N or, in a low bin, N' (equation in section 4.3)."""
        return self.kept[bin_] if bin_ < len(self.kept) else self.top_n


@lru_cache(maxsize=64)
def gap_weights(sharpness: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole weights 2**24 exp(-sharpness gap) of each gap code, int64 [256], and their logarithms, float64 [256]."""
    whole = [max(1, math.floor(2**_WEIGHT_BITS * math.exp(-sharpness * g / TREE_SCALE) + 0.5)) for g in range(TREE_CODE_MAX + 1)]
    return torch.tensor(whole, device=device), torch.tensor([math.log(w) for w in whole], dtype=torch.float64, device=device)


def local_costs(laws: Laws, rule: TreeRule, whole: bool = False) -> torch.Tensor:
    """Cost of each child given its parent, int64 [B, F, k]; INFINITE for children that do not exist (``whole``: all do)."""
    if rule.coupled:
        weights, logs = gap_weights(rule.sharpness, laws.gap.device)
        if fused(laws.gap.device):
            cost = torch.empty(laws.gap.shape, dtype=torch.int64)
            _coupled_costs(laws.gap.numpy(), laws.count.numpy(), weights.numpy(), logs.numpy(), cost.numpy())
            return cost
        absent = None if whole else _absent(laws.count, laws.logp.shape[-1])
        w = weights[laws.gap]
        if absent is not None:
            w = w.masked_fill(absent, 0)
        total = w.sum(-1, keepdim=True).double().log_()
        cost = (total - logs[laws.gap]).mul_(TREE_SCALE).add_(0.5).floor_().long()
    else:
        cost, absent = laws.logp, None if whole else _absent(laws.count, laws.logp.shape[-1])
    return cost if absent is None else cost.masked_fill(absent, INFINITE)


@compiled(inline=True)
def _coupled_row(
    gap: npt.NDArray[np.int64],
    there: int,
    weights: npt.NDArray[np.int64],
    logs: npt.NDArray[np.float64],
    cost: npt.NDArray[np.int64],
) -> None:
    """Writes the coupled costs [k] of siblings with these gaps, of which ``there`` exist."""
    total = 0
    for j in range(there):
        total += weights[gap[j]]
    log = math.log(total) if there else 0.0
    for j in range(gap.shape[0]):
        cost[j] = math.floor((log - logs[gap[j]]) * TREE_SCALE + 0.5) if j < there else INFINITE


@compiled()
def _coupled_costs(
    gap: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    weights: npt.NDArray[np.int64],
    logs: npt.NDArray[np.float64],
    cost: npt.NDArray[np.int64],
) -> None:
    """On a CPU: writes the coupled costs int64 [B, F, k] of children with these gaps [B, F, k]; ``count`` [B, F] of them exist."""
    for b in range(gap.shape[0]):
        for f in range(gap.shape[1]):
            _coupled_row(gap[b, f], min(count[b, f], gap.shape[2]), weights, logs, cost[b, f])


@compiled(inline=True)
def keep_smallest(keys: npt.NDArray[np.int64], places: npt.NDArray[np.int64], found: int, key: int, place: int) -> int:
    """Puts a place among those of the smallest keys so far (the first ``found`` of ``keys`` and ``places`` [n], ascending), after equal
    keys; where there are n already, the last gives way. How many there are then."""
    n = keys.shape[0]
    if found < n:
        at = found
        found += 1
    elif key < keys[n - 1]:
        at = n - 1
    else:
        return found
    while at > 0 and keys[at - 1] > key:
        keys[at] = keys[at - 1]
        places[at] = places[at - 1]
        at -= 1
    keys[at] = key
    places[at] = place
    return found


@compiled(inline=True)
def grow_one(
    codes: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    coupled: bool,
    weights: npt.NDArray[np.int64],
    logs: npt.NDArray[np.float64],
    above: npt.NDArray[np.int64],
    cost: npt.NDArray[np.int64],
    index: npt.NDArray[np.int64],
    costs: npt.NDArray[np.int64],
) -> bool:
    """On a CPU, a level of one chain or EAGLE-2 tree at once; whether all its nodes exist.

    ``codes`` [F, k] are the children's gaps if ``coupled``, else their logp; ``above`` [F] what their parents cost. Writes ``cost`` [F * k]
    of the children, and the cheapest of them: ``index`` and ``costs`` [n], of which the first F * k are written if they are fewer.
    """
    frontier, k = codes.shape
    whole = True
    found = 0
    for f in range(frontier):
        own = cost[f * k : (f + 1) * k]
        there = min(count[f], k) if above[f] < INFINITE else 0
        whole &= there == k
        if coupled:
            _coupled_row(codes[f], there, weights, logs, own)
        for j in range(k):
            if j >= there:
                c = INFINITE
            else:
                c = above[f] + (own[j] if coupled else codes[f, j])
            own[j] = c
            found = keep_smallest(costs, index, found, c, f * k + j)
    return whole


@compiled()
def grow_plainly(
    codes: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    coupled: bool,
    weights: npt.NDArray[np.int64],
    logs: npt.NDArray[np.float64],
    above: npt.NDArray[np.int64],
    cost: npt.NDArray[np.int64],
    index: npt.NDArray[np.int64],
    costs: npt.NDArray[np.int64],
) -> bool:
    """:func:`grow_one` for each tree of a batch, the first axis of all arrays; whether all nodes of all trees exist."""
    whole = True
    for b in range(codes.shape[0]):
        whole &= grow_one(codes[b], count[b], coupled, weights, logs, above[b], cost[b], index[b], costs[b])
    return whole


def _absent(count: torch.Tensor, k: int) -> torch.Tensor | None:
    if bool((count >= k).all()):
        return None
    return _arange(k, count.device) >= count[..., None]


def fused(device: torch.device) -> bool:
    """Whether a device runs the compiled loops, which spare a CPU dozens of tensor operations a level."""
    return device.type == "cpu"


class Cheapest(NamedTuple):
    """The cheapest places of each row, best first: ``index`` int64 [B, n]; ``exists`` bool [B, n]."""

    index: torch.Tensor  # type: ignore[assignment]  # hides tuple.index
    exists: torch.Tensor


def cheapest(cost: torch.Tensor, count: int) -> Cheapest:
    """The ``count`` cheapest of ``cost`` int64 [B, places], ties by place."""
    best = _cheapest_keys(cost, count)
    return Cheapest(best & _PLACE, best < (INFINITE << ORDER_BITS))


def _cheapest_keys(cost: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` smallest cost << ORDER_BITS | place of each row, int64 [B, count], ascending."""
    keys = (cost << ORDER_BITS).add_(_arange(cost.shape[-1], cost.device))
    return keys.topk(min(count, cost.shape[-1]), dim=-1, largest=False, sorted=True).values


@lru_cache(maxsize=512)
def _arange(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, device=device)


@lru_cache(maxsize=512)
def siblings(batch: int, places: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Parent and rank of each place of a level that has all its places, int64 [B, places]."""
    order = torch.arange(places, device=device)
    return (order // k).expand(batch, -1), (order % k).expand(batch, -1)


@lru_cache(maxsize=512)
def _listed(level: StaticLevel, batch: int, k: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """A static level's places [n]; parent and rank of each [B, n]; the expanded ones [B, F]."""
    places = torch.tensor(level.places, dtype=torch.int64, device=device)
    expanded = torch.tensor(level.expanded, dtype=torch.int64, device=device)
    return places, (places // k).expand(batch, -1), (places % k).expand(batch, -1), expanded.expand(batch, -1)


@lru_cache(maxsize=512)
def _all(value: bool, batch: int, places: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([[value]], device=device).expand(batch, places)


@dataclass
class Level:
    """What one level added. ``cost`` and ``q_cost`` (-log of the product of q) int64 [B, places]; ``parent``: the frontier index of the
    level above of each place, int64 [B, places]; ``rank`` among siblings [B, places]; ``tokens`` int64 [B, places].
    ``eligible``: the places that may be verified, bool [B, places]. ``frontier``: the places to expand, best first [B, F]. ``phi`` int64
    [B]; ``stops`` bool [B]. ``whole``: all places are known to be eligible."""

    tokens: torch.Tensor
    cost: torch.Tensor
    q_cost: torch.Tensor
    parent: torch.Tensor
    rank: torch.Tensor
    eligible: torch.Tensor
    frontier: Cheapest
    phi: torch.Tensor
    stops: torch.Tensor
    whole: bool = False


class _Frontier(NamedTuple):
    """Cost, q_cost and Phi of the nodes that are expanded next, int64 [B, F]; ``exists`` bool [B, F], None: all do."""

    cost: torch.Tensor
    q_cost: torch.Tensor
    phi: torch.Tensor
    exists: torch.Tensor | None


class Growing:
    """Trees while they grow, all B at once, level by level.

    ``add`` takes the laws of the frontier (for the first level of the root) and makes the next level and its frontier. Trees that ended
    earlier grow along; the caller knows from ``stops`` and ``frontier.exists`` which levels count. ``whole`` promises that every law has
    ``rule.width`` children, which saves looking. ``lean`` leaves out what the rule does not read: a level's ``q_cost`` is then its cost,
    its ``phi`` 0.
    """

    def __init__(self, rule: TreeRule, batch: int, device: torch.device, whole: bool = False, lean: bool = False) -> None:
        self.rule, self.batch, self.device, self.whole = rule, batch, device, whole
        self._apart = rule.coupled and (rule.reads_q or not lean)
        self._sums_phi = rule.stratified or not lean
        self.levels: list[Level] = []
        zero = _zeros(batch, 1, device)
        self._frontiers = [_Frontier(zero, zero, zero, None)]

    @property
    def depth(self) -> int:
        """Levels so far."""
        return len(self.levels)

    @property
    def expandable(self) -> int:
        """Nodes of the last level to expand, where one tree grows; a static tree reads its places, whether or not there is a node."""
        last = self.levels[-1]
        return last.frontier.exists.shape[1] if self.rule.static or last.whole else int(last.frontier.exists.sum())

    @property
    def stops(self) -> bool:
        """Whether the last level triggers the stop, where one tree grows."""
        return bool(self.levels[-1].stops[0])

    @property
    def phi(self) -> int:
        """Phi after the last level, where one tree grows."""
        return int(self.levels[-1].phi[0])

    def following(self, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where one tree grows, tokens of the first ``width`` places to expand and the frontier places of the level above that are their
        parents (None: the root), int64 [width]."""
        last = self.levels[-1]
        index = last.frontier.index[0]
        if width < index.shape[0]:
            index = index[:width]
        return last.tokens[0].take(index), None if len(self.levels) == 1 else last.parent[0].take(index)

    def add(self, laws: Laws | LawRows) -> Level:
        """Makes the next level from the laws of the frontier [B, F, k] (k at least the rule's width); of one tree, from those of its first
        nodes."""
        if isinstance(laws, LawRows):
            laws = laws.laws(self.levels[-1].frontier.index.shape[1] if self.levels else 1)
        rule, k, device, batch = self.rule, self.rule.width, self.device, self.batch
        if laws.logp.shape[-1] > k:
            tokens, logp, gap, entropy, top_entropy, count = laws
            laws = Laws(tokens[..., :k], logp[..., :k], gap[..., :k], entropy, top_entropy, count.clamp_max(k))
        above = self._frontiers[-1]
        whole = self.whole and above.exists is None
        plain = fused(device) and not rule.static and rule.confidence is None
        if plain:
            cost, index, costs, whole = self._grow_plainly(laws, above)
        else:
            local = local_costs(laws, rule, whole)
            cost = (above.cost[..., None] + local).flatten(1) if self.levels else local.flatten(1)
            if above.exists is not None:
                cost = cost.masked_fill(~above.exists.repeat_interleave(k, -1), INFINITE)
            if not whole:
                cost = cost.clamp_max(INFINITE)
        q_cost = (above.q_cost[..., None] + laws.logp).flatten(1) if self._apart else cost
        phi = above.phi + laws.top_entropy if self._sums_phi else None
        tokens = laws.tokens.flatten(1)
        depth = len(self.levels) + 1
        if rule.static:
            place, parent, rank, index = _listed(
                rule.static[depth - 1] if depth <= len(rule.static) else NO_LEVEL, batch, k, device
            )
            cost, q_cost, tokens = cost[:, place], q_cost[:, place], tokens[:, place]
            eligible = _all(True, batch, cost.shape[1], device) if whole else cost < INFINITE
            frontier = Cheapest(index, eligible.gather(1, index))
            costs = cost.gather(1, index)
        else:
            parent, rank = siblings(batch, cost.shape[1], k, device)
            if rule.confidence is not None:
                confidence = _look_up(rule.confidence, depth, laws.entropy, q_cost, k)
                passed = (confidence > rule.beta_code) & (cost < INFINITE)
                frontier = cheapest((65535 - confidence).masked_fill(~passed, INFINITE), rule.frontier)
                eligible = torch.zeros_like(passed).scatter_(1, frontier.index, frontier.exists)
                costs, whole = cost.gather(1, frontier.index), False
            else:
                if not plain:
                    keys = _cheapest_keys(cost, rule.frontier)
                    index, costs = keys & _PLACE, keys >> ORDER_BITS
                if whole:
                    eligible, exists = _all(True, batch, cost.shape[1], device), _all(True, batch, costs.shape[1], device)
                else:
                    eligible, exists = cost < INFINITE, costs < INFINITE
                frontier = Cheapest(index, exists)
        index = frontier.index
        stops = self._stops(cost, q_cost, laws, parent, rank, eligible) if rule.reads_stop else _never(batch, device)
        level_phi = _nothing(batch, device) if phi is None else self._phi(phi, laws, above.exists)
        added = Level(tokens, cost, q_cost, parent, rank, eligible, frontier, level_phi, stops, whole)
        self.levels.append(added)
        self._frontiers.append(
            _Frontier(
                costs,
                q_cost.gather(1, index) if self._apart or rule.confidence is not None else costs,
                above.phi if phi is None else phi.gather(1, parent.gather(1, index)),
                None if whole or bool(frontier.exists.all()) else frontier.exists,
            )
        )
        return added

    def _grow_plainly(self, laws: Laws, above: _Frontier) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """On a CPU: cost of the next level's places; index and cost of its frontier; whether all places exist."""
        rule = self.rule
        weights, logs = gap_weights(rule.sharpness, self.device)
        codes = laws.gap if rule.coupled else laws.logp
        places = codes.shape[1] * codes.shape[2]
        cost = torch.empty(self.batch, places, dtype=torch.int64)
        best = torch.empty(2, self.batch, min(rule.frontier, places), dtype=torch.int64)
        index, costs = best[0], best[1]
        whole = grow_plainly(
            codes.numpy(),
            laws.count.numpy(),
            rule.coupled,
            weights.numpy(),
            logs.numpy(),
            above.cost.numpy(),
            cost.numpy(),
            index.numpy(),
            costs.numpy(),
        )
        return cost, index, costs, whole

    def undo(self) -> None:
        """Forgets the last level."""
        self.levels.pop()
        self._frontiers.pop()

    def _phi(self, phi: torch.Tensor, laws: Laws, exists: torch.Tensor | None) -> torch.Tensor:
        """Phi of the path with the highest final-token confidence, int64 [B] (HeteroSpec, section 4.1)."""
        if not self.rule.stratified:
            return phi[:, 0]
        best = laws.logp.masked_fill(_arange(laws.logp.shape[-1], self.device) >= laws.count[..., None], INFINITE).amin(-1)
        if exists is not None:
            best = best.masked_fill(~exists, INFINITE)
        return phi.gather(1, cheapest(best, 1).index)[:, 0]

    def _stops(
        self,
        cost: torch.Tensor,
        q_cost: torch.Tensor,
        laws: Laws,
        parent: torch.Tensor,
        rank: torch.Tensor,
        eligible: torch.Tensor,
    ) -> torch.Tensor:
        """Whether the cheapest eligible node (of a static tree the first) triggers the stop, bool [B]; false where there is none."""
        rule = self.rule
        if cost.shape[-1] == 0:
            return _never(self.batch, self.device)
        order = torch.where(eligible, 0, INFINITE) if rule.static else cost.masked_fill(~eligible, INFINITE)
        first, exists = cheapest(order, 1)
        of = parent.gather(1, first)
        place = of * laws.logp.shape[-1] + rank.gather(1, first)
        logp = laws.logp.flatten(1).gather(1, place)
        triggers = (
            (logp > rule.max_logp) | (q_cost.gather(1, first) > rule.max_joint) | (laws.entropy.gather(1, of) > rule.max_entropy)
        )
        return (triggers & exists)[:, 0]


@lru_cache(maxsize=64)
def _never(batch: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(batch, dtype=torch.bool, device=device)


@lru_cache(maxsize=64)
def _nothing(batch: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(batch, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _zeros(batch: int, places: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(batch, places, dtype=torch.int64, device=device)


def _look_up(table: torch.Tensor, depth: int, entropy: torch.Tensor, q_cost: torch.Tensor, k: int) -> torch.Tensor:
    """Confidence codes int64 [B, places] of C2T's classifier; arguments beyond the table take its last entry."""
    depths, entropies, joints = table.shape
    rows = table[min(depth, depths) - 1]
    of = entropy.clamp_max(entropies - 1).repeat_interleave(k, -1)
    return rows[of, q_cost.clamp_max(joints - 1)].long()


def select(levels: Sequence[Level], top_n: int | None) -> torch.Tensor:
    """Which places of the pool (all levels joined) are verified: bool [B, pool]. The ``top_n`` cheapest eligible ones, ties by creation
    order; every ancestor is among them, since a child costs no less than its parent and comes later."""
    whole = all(level.whole for level in levels)
    pool = sum(level.cost.shape[1] for level in levels)
    batch, device = levels[0].cost.shape[0], levels[0].cost.device
    if whole and (top_n is None or top_n >= pool):
        return _all(True, batch, pool, device)
    eligible = _all(True, batch, pool, device) if whole else torch.cat([level.eligible for level in levels], 1)
    if top_n is None or top_n >= pool:
        return eligible
    cost = torch.cat([level.cost for level in levels], 1)
    if not whole:
        cost = cost.masked_fill(~eligible, INFINITE)
    keys = _cheapest_keys(cost, top_n)
    chosen = torch.zeros_like(eligible)
    if whole:
        return chosen.scatter_(1, keys & _PLACE, True)
    return chosen.scatter_(1, keys & _PLACE, keys < (INFINITE << ORDER_BITS))
