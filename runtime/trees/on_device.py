"""Growing draft trees in tensors: the arithmetic of :mod:`runtime.trees.grow`, in shapes that a
rule and a depth fix, so that a whole draft phase is captured as one graph and nothing waits for the
device.

Every choice is of whole numbers: with ``key * n + index`` as keys of n nodes, which are distinct,
``topk`` chooses what :func:`runtime.policies.eagle2.cheapest` does. The coupled score takes
logarithms from tables alone. Where growth ends is a mask: levels behind the end may be grown all
the same, and nothing is chosen from them. Places without a node read token 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from spectune.runtime.distributions import DeviceCodes
from spectune.runtime.policies.c2t import CONFIDENCE_SCALE, STEP
from spectune.runtime.policies.eagle2 import INFINITE
from spectune.runtime.trees.draft import GrownTree
from spectune.runtime.trees.grow import GAP_CODES, NONE, ROOT, SUM_SHIFT, TreeRule
from spectune.traces.schema import NAT_SCALE, NO_BIN


class GrowingTree:
    """One tree while it grows on a device, of ``depth`` levels at most. Its memory is fixed:
    :meth:`begin` starts the next tree in it."""

    def __init__(self, rule: TreeRule, depth: int, device: torch.device) -> None:
        depth = min(depth, len(rule.static)) if rule.static else depth
        self.rule, self.depth, self.device = rule, depth, device
        tables = rule.compiled.weights, rule.compiled.logs, rule.compiled.log_sums
        self._weights, self._logs, self._log_sums = (torch.from_numpy(x).to(device) for x in tables)
        self._confidence = torch.from_numpy(rule.compiled.confidence).to(device)
        bins = range(len(rule.thresholds) + 1)
        top_n = [(1 << 40) if n is None else n for n in map(rule.top_n_of, bins)]
        self._thresholds, self._top_n = self._numbers(rule.thresholds), self._numbers(top_n)
        self._extensions = self._numbers([rule.extension(b) for b in bins])
        k, self.sizes = rule.width, [1]
        """Places of each level's frontier, the root's in front."""
        self.ends = [0]
        """Where each level's candidates end."""
        self._rows, self._listed, self._expanded = list[Tensor](), list[Tensor](), list[Tensor]()
        for level in range(1, depth + 1):
            places = range(self.sizes[-1] * k)
            listed: Sequence[int] = rule.static[level - 1].places if rule.static else places
            self._listed.append(self._numbers(listed))
            self._rows.append(self._numbers([place // k for place in listed]))
            expanded = rule.static[level - 1].expanded if rule.static else ()
            self._expanded.append(self._numbers(expanded))
            self.ends.append(self.ends[-1] + len(listed))
            self.sizes.append(len(expanded) if rule.static else min(rule.frontier, len(places)))
        pool, most = self.ends[-1], max(self.sizes)
        self._level_of = self._numbers(
            [level for level in range(1, depth + 1) for _ in self._listed[level - 1]]
        )
        self.token, self.cost, self.q_cost, self.parent = self._zeros(4, pool)
        self.place, self.above, self.phi = self._zeros(3, depth + 1, most)
        self.limit, self.goal, self.levels, self.steps, self.bin, self.bin_phi = self._zeros(6, 1)
        self.alive = self._zeros(1).bool()
        """Whether growth goes on after the levels so far."""
        self._order = torch.arange(max(pool, most, k), device=device)
        self._nowhere = torch.full((pool + 1,), -1, device=device)
        self._places = torch.arange(sum(self.sizes), device=device)
        counts = [n for n in (rule.top_n, *rule.bin_top_n) if n is not None]
        self.most = pool if rule.top_n is None else min(pool, max(counts))
        """Nodes that are chosen at most."""

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor([*values], dtype=torch.int64, device=self.device)

    def _zeros(self, *shape: Any) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=self.device)

    @property
    def early(self) -> bool:
        """Whether growth may end before the depth is reached."""
        return self.rule.stop.active or self.rule.confidence is not None

    def begin(self, depth: Tensor, limit: Tensor) -> None:
        """Starts a tree of ``depth`` levels, which HeteroSpec may extend up to ``limit``, both
        int64 [1]."""
        self.limit.copy_(limit)
        self.place[0, :1], self.phi[0, :1] = ROOT, 0  # slices are filled; an element is copied to
        for count in (self.levels, self.steps, self.bin_phi):
            count.zero_()
        self.bin.fill_(NO_BIN)
        self.goal.copy_(depth.clamp_max(self.depth))
        self.alive.fill_(True)

    def frontier(self, level: int) -> tuple[Tensor, Tensor]:
        """What the pass after a level reads, [n] each: tokens, and which of the places read before
        is above each."""
        size = self.sizes[level]
        place = self.place[level, :size]
        tokens = self.token[place.clamp_min(0)].masked_fill(place == NONE, 0)
        return tokens, self.above[level, :size]

    def add(self, codes: DeviceCodes, level: int, depth: int) -> None:
        """Makes a level, counted from 1, of a tree that was begun with ``depth``, from the
        distributions after the frontier above."""
        rule, k, size = self.rule, self.rule.width, self.sizes[level - 1]
        tokens, logp, gap = (_wide(x, k) for x in codes[:3])
        place, rows = self.place[level - 1, :size], self._rows[level - 1]
        inside, outside = place.clamp_min(0), place < 0
        cost_above, q_above = (x[inside].masked_fill(outside, 0) for x in (self.cost, self.q_cost))
        there = codes.count.clamp_max(k).masked_fill(place == NONE, 0)
        missing = self._order[:k] >= there[:, None]
        local = self._coupled_costs(gap, missing) if rule.coupled else logp
        cost = (cost_above[:, None] + local).masked_fill(missing, INFINITE)
        q_cost = (q_above[:, None] + logp).masked_fill(missing, INFINITE)
        begin, end = self.ends[level - 1 : level + 1]
        listed = self._listed[level - 1]
        tokens = tokens.masked_fill(missing, 0)
        cost, q_cost, token = (x.flatten()[listed] for x in (cost, q_cost, tokens))
        order = self._order[: end - begin]
        count = self.sizes[level]
        if rule.confidence is not None:
            entropy = codes.entropy[rows]
            chosen, exist = self._confident(cost, q_cost, entropy, level, count)
            passed = torch.zeros_like(cost, dtype=torch.bool).index_put((chosen,), exist)
            cost = cost.masked_fill(~passed, INFINITE)
        elif rule.static:
            chosen = self._expanded[level - 1]
            exist = cost[chosen] < INFINITE
        else:
            chosen, exist = _cheapest(cost, count, self._order)
        self.token[begin:end], self.cost[begin:end], self.q_cost[begin:end] = token, cost, q_cost
        self.parent[begin:end] = place[rows]
        above = rows[chosen]
        if not rule.static:
            above = torch.where(exist, above, 0)
        self.place[level, :count] = torch.where(exist, begin + chosen, NONE)
        self.above[level, :count] = above
        self.steps += self.alive
        if self.early:
            stops, empty = torch.zeros_like(self.alive), torch.zeros_like(self.alive)
            if rule.stop.active:
                key = order.masked_fill(cost >= INFINITE, INFINITE) if rule.static else cost
                first = (key * len(order) + order).amin(0, keepdim=True) % len(order)
                joint, row = q_cost[first], rows[first]
                stops = (
                    (joint - q_above[row] > rule.stop.max_logp_code)
                    | (joint > rule.stop.max_joint_code)
                    | (codes.entropy[row] > rule.stop.max_entropy_code)
                ) & (cost[first] < INFINITE)
            if rule.confidence is not None:
                empty = ~exist.any(0, keepdim=True)
            undone = empty if rule.stop.keep_last else empty | stops
            self.levels += self.alive & ~undone
            self.alive &= ~(empty | stops)
        else:
            self.levels += self.alive
        if rule.stratified:
            phis = self.phi[level - 1, :size] + codes.top_entropy
            self.phi[level, :count] = torch.where(exist, phis[above], 0)
            if level == depth:
                self._stratify(logp.masked_fill(missing, INFINITE), phis, depth)
        self.alive &= self.goal > level

    def _coupled_costs(self, gap: Tensor, missing: Tensor) -> Tensor:
        """-log of the siblings' shares, [n, k]; ``missing``: those that do not exist."""
        gap = gap.clamp_max(GAP_CODES - 1)
        total = self._weights[gap].masked_fill(missing, 0).sum(1)
        logs = self._log_sums[total >> SUM_SHIFT][:, None] - self._logs[gap]
        return (logs * NAT_SCALE + 0.5).floor().long()

    def _confident(
        self, cost: Tensor, q_cost: Tensor, entropy: Tensor, level: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """C2T's nodes of a level, the most confident first."""
        table = self._confidence
        depths, entropies, joints = table.shape
        row = (entropy // STEP).clamp_max(entropies - 1)
        column = (q_cost // STEP).clamp_max(joints - 1)
        confidence = table[min(level, depths) - 1][row, column].long()
        fails = (confidence <= self.rule.beta_code) | (cost >= INFINITE)
        costs = (CONFIDENCE_SCALE - confidence).masked_fill(fails, INFINITE)
        return _cheapest(costs, count, self._order)

    def _stratify(self, logp: Tensor, phis: Tensor, depth: int) -> None:
        """HeteroSpec's Phi and bin after the level ``depth``, and how deep the tree grows. ``logp``
        [n, k] of the children and ``phis`` [n] of the distributions that they come from."""
        best = logp.amin(1)
        order = self._order[: len(best)]
        first = (best * len(best) + order).amin(0, keepdim=True) % len(best)
        phi = phis[first].masked_fill(best[first] >= INFINITE, 0)
        bin_ = (phi * self.rule.fitted_depth > self._thresholds * depth).sum(0, keepdim=True)
        goal = torch.minimum(self.limit, depth + self._extensions[bin_])
        for number, value in ((self.bin_phi, phi), (self.bin, bin_), (self.goal, goal)):
            number.copy_(value.where(self.alive, number))

    def choose(self) -> Tensor:
        """The nodes that are verified, and what was grown, as one tensor for :func:`grown_tree`."""
        pool, most, order = self.ends[-1], self.most, self._order
        cost = self.cost.masked_fill(self._level_of > self.levels, INFINITE)
        chosen, exist = _cheapest(cost, most, order)
        if self.rule.top_n is not None:
            top_n = self._top_n[self.bin.clamp_max(len(self._top_n) - 1)]
            if self.rule.stratified:
                top_n = top_n.masked_fill(self.bin == NO_BIN, self.rule.top_n)
            exist &= order[:most] < top_n
        nodes = torch.where(exist, chosen, pool).sort().values
        number = self._nowhere.index_put((nodes,), order[:most])
        # The place of each candidate among the nodes that passes read, from the second pass on.
        read = self._nowhere.clone()
        begin = 0
        for level, size in enumerate(self.sizes[1:-1], 1):
            place = self.place[level, :size]
            place = place.masked_fill((place < 0) | (self.steps <= level), pool)
            read.index_put_((place,), self._places[begin : begin + size])
            begin += size
        read[pool:] = -1
        inside = nodes.clamp_max(pool - 1)
        parent = self.parent[inside]
        parent = number[parent.clamp_min(0)].masked_fill(parent < 0, ROOT)
        more = self.goal.masked_fill(~self.alive, 0)
        counts = more, self.levels, self.steps, self.bin, self.bin_phi, exist.sum(0, keepdim=True)
        return torch.cat([*counts, self.token[inside], parent, self._level_of[inside], read[nodes]])


def grown_tree(numbers: list[int], sizes: Sequence[int]) -> tuple[GrownTree, int]:
    """The tree in what :meth:`GrowingTree.choose` gave for levels of ``sizes``, and up to which
    level growth goes on (0: it has ended). A pass reads all places of a level."""
    more, levels, steps, bin_, phi, count = numbers[:6]
    nodes = numbers[6:]
    most = len(nodes) // 4
    tokens, parents, depths, read = (nodes[i * most : i * most + count] for i in range(4))
    widths = [*sizes[:steps]]
    return GrownTree(tokens, parents, depths, read, levels, steps, widths, phi, bin_), more


def _wide(codes: Tensor, k: int) -> Tensor:
    """Codes of children with a column for each of k."""
    return codes if codes.shape[1] == k else pad(codes, (0, k - codes.shape[1]))


def _cheapest(keys: Tensor, count: int, order: Tensor) -> tuple[Tensor, Tensor]:
    """The ``count`` lowest of ``keys`` int64 [n], ties by ``order``, whole numbers from 0 on: their
    indices, and which of them are below INFINITE."""
    n = len(keys)
    lowest = (keys * n + order[:n]).topk(count, largest=False).values
    return lowest % n, lowest // n < INFINITE


def grow_on_device(
    growing: GrowingTree, depth: int, levels: Callable[[int, int], Tensor]
) -> GrownTree:
    """The tree that was begun with ``depth``. ``levels`` makes the levels from one to another and
    gives what :meth:`GrowingTree.choose` does; the host looks at that after each level where growth
    may end early, and before HeteroSpec's extension."""
    first, more = 1, min(depth, growing.depth)
    while True:
        last = first if growing.early else more
        tree, more = grown_tree(levels(first, last).tolist(), growing.sizes)
        if more <= last:
            return tree
        first = last + 1
