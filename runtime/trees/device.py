"""One tree growing by tensor operations, for devices that compiled loops do not reach: what
:mod:`runtime.trees.grow` does on a CPU, field by field, without waiting for the device between two
passes unless the rule has to look (a stop, a classifier, missing children).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from spectune.runtime.policies.c2t import CONFIDENCE_SCALE
from spectune.runtime.policies.eagle2 import INFINITE
from spectune.runtime.trees.grow import (
    NONE,
    ROOT,
    DistributionRows,
    Growing,
    Tree,
    TreeMemory,
    TreeRule,
    gap_weights,
)
from spectune.traces.schema import TREE_SCALE

_ORDER_BITS = 14
"""Bits of a sort key that hold the creation order; a tree has fewer candidates (``POOL_LIMIT``)."""


class _Level(NamedTuple):
    """A level's fields of :class:`runtime.trees.grow.Tree`, int64 tensors: of its P candidates, of
    its F frontier places, of itself."""

    token: torch.Tensor
    cost: torch.Tensor
    q_cost: torch.Tensor
    parent: torch.Tensor
    place: torch.Tensor
    above: torch.Tensor
    rank: torch.Tensor
    phi: torch.Tensor
    level_phi: torch.Tensor
    stop: torch.Tensor


class DeviceGrowing:
    """What :class:`runtime.trees.grow.Growing` is, member by member, for one tree on any device.
    ``complete`` promises that every distribution has ``rule.width`` children, which saves waiting
    to find out."""

    def __init__(self, rule: TreeRule, device: torch.device, complete: bool) -> None:
        self.rule, self.device, self.complete = rule, device, complete
        self.depth = 0
        self._levels: list[_Level] = []

    def add(self, rows: DistributionRows) -> None:
        rule, k = self.rule, self.rule.width
        del self._levels[self.depth :]
        cost, q_cost, phi, places = self._frontier()
        tokens, logp, gap, entropy, top_entropy, count = (
            _filled(x, len(cost), k) for x in rows[:6] if x is not None
        )
        exists = (_arange(k, self.device) < count[:, None]) & (cost < INFINITE)[:, None]
        local = logp
        if rule.coupled:
            weights, logs = _weights(rule.sharpness, self.device)
            total = (
                weights[gap]
                .masked_fill(~exists, 0)
                .sum(-1, keepdim=True)
                .clamp_min(1)
                .double()
                .log()
            )
            local = ((total - logs[gap]) * TREE_SCALE + 0.5).floor().long()
        cost = (cost[:, None] + local).masked_fill(~exists, INFINITE).flatten()
        q_cost = (q_cost[:, None] + logp).masked_fill(~exists, INFINITE).flatten()
        token = tokens.masked_fill(~exists, 0).flatten()
        own = _arange(len(cost), self.device)
        if rule.static:
            own = torch.tensor(
                rule.static[self.depth].places, dtype=torch.int64, device=self.device
            )
            token, cost, q_cost = token[own], cost[own], q_cost[own]
        if rule.confidence is not None:
            key = self._keys(entropy.repeat_interleave(k), cost, q_cost)
            index = _cheapest(key, rule.frontier)
            chosen = torch.zeros_like(cost, dtype=torch.bool).scatter_(
                0, index, key[index] < INFINITE
            )
            cost = cost.masked_fill(~chosen, INFINITE)
        elif rule.static:
            index = torch.tensor(
                rule.static[self.depth].expanded, dtype=torch.int64, device=self.device
            )
        else:
            index = _cheapest(cost, rule.frontier)
        above, there = own[index] // k, cost[index] < INFINITE
        begin = sum(len(x.cost) for x in self._levels)
        best = logp.masked_fill(~exists, INFINITE).amin(-1)
        nearest = _cheapest(best, 1)
        level_phi = torch.where(best[nearest] < INFINITE, (phi + top_entropy)[nearest], 0)
        first = _cheapest(torch.where(cost < INFINITE, 0, INFINITE) if rule.static else cost, 1)
        read = torch.cat([logp.flatten()[own[first]], q_cost[first], entropy[own[first] // k]])
        self._levels.append(
            _Level(
                token,
                cost,
                q_cost,
                parent=places[own // k],
                place=torch.where(there, begin + index, NONE),
                above=above,
                rank=own[index] % k,
                phi=(phi + top_entropy)[above].masked_fill(~there, 0),
                level_phi=level_phi,
                stop=read.masked_fill(cost[first] >= INFINITE, 0),
            )
        )
        self.depth += 1

    def _frontier(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cost (INFINITE: no node), q_cost, phi and place of the nodes whose distributions come
        next."""
        if not self.depth:
            zero = torch.zeros(1, dtype=torch.int64, device=self.device)
            return zero, zero, zero, zero + ROOT
        last = self._levels[-1]
        begin = sum(len(x.cost) for x in self._levels[:-1])
        own = (last.place - begin).clamp_min(0)
        return (
            last.cost[own].masked_fill(last.place == NONE, INFINITE),
            last.q_cost[own],
            last.phi,
            last.place,
        )

    def _keys(
        self, entropy: torch.Tensor, cost: torch.Tensor, q_cost: torch.Tensor
    ) -> torch.Tensor:
        """C2T, section 4.2: 65535 less the confidence of each candidate, INFINITE of those that do
        not pass."""
        table = _table(self.rule, self.device)
        depths, entropies, joints = table.shape
        rows = table[min(self.depth, depths - 1)]
        confidence = rows[entropy.clamp_max(entropies - 1), q_cost.clamp_max(joints - 1)].long()
        return (CONFIDENCE_SCALE - confidence).masked_fill(
            (confidence <= self.rule.beta_code) | (cost >= INFINITE), INFINITE
        )

    def undo(self) -> None:
        self.depth -= 1

    @property
    def width(self) -> int:
        place = self._levels[self.depth - 1].place
        if self.rule.static or (self.complete and self.rule.confidence is None):
            return len(place)
        return int((place != NONE).sum())

    @property
    def stops(self) -> bool:
        return bool(self.rule.stops(self._levels[self.depth - 1].stop.cpu().numpy()))

    @property
    def phi(self) -> int:
        return int(self._levels[self.depth - 1].level_phi)

    def following(self, width: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        last = self._levels[self.depth - 1]
        place = last.place[:width]
        begin = sum(len(x.cost) for x in self._levels[: self.depth - 1])
        return (
            last.token[(place - begin).clamp_min(0)],
            None if self.depth == 1 else last.above[:width],
            place != NONE,
        )

    def tree(self) -> Tree:
        """The tree as it stands, levels forgotten last included, on the host: one transfer."""
        whole = torch.cat([x for level in self._levels for x in level]).cpu().numpy()
        found = TreeMemory.empty(self.rule, len(self._levels), 1).trees.one(0)
        found.size[0] = at = 0
        for number, level in enumerate(self._levels, 1):
            parts = []
            for x in level:
                parts.append(whole[at : at + len(x)])
                at += len(x)
            made = _Level._make(parts)
            begin, places = found.size[number - 1], len(made.place)
            end = found.size[number] = begin + len(made.cost)
            found.frontier[number], found.level_phi[number] = places, made.level_phi[0]
            found.width[number] = places if self.rule.static else (made.place != NONE).sum()
            found.stop[number] = made.stop
            for name in ("token", "cost", "q_cost", "parent"):
                getattr(found, name)[begin:end] = getattr(made, name)
            for name in ("place", "above", "rank", "phi"):
                getattr(found, name)[number, :places] = getattr(made, name)
        return found


def growing_on(
    device: torch.device, rule: TreeRule, depth: int, complete: bool
) -> Growing | DeviceGrowing:
    """A tree about to grow to ``depth`` levels at most."""
    return Growing(rule, depth) if device.type == "cpu" else DeviceGrowing(rule, device, complete)


def _filled(x: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """A column of :class:`DistributionRows` with that many rows and, if it is of children, k of
    them; zeros where there are fewer."""
    below = (0, rows - x.shape[0])
    return torch.nn.functional.pad(x, (0, k - x.shape[1], *below) if x.dim() == 2 else below)


def _cheapest(cost: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the ``count`` cheapest, best first, ties by place: int64 [at most count]."""
    keys = (cost << _ORDER_BITS) + _arange(len(cost), cost.device)
    return keys.topk(min(count, len(cost)), largest=False, sorted=True).values & (
        (1 << _ORDER_BITS) - 1
    )


@lru_cache(maxsize=512)
def _arange(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, device=device)


@lru_cache(maxsize=64)
def _weights(sharpness: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weights, logs = gap_weights(sharpness)
    return torch.from_numpy(weights).to(device), torch.from_numpy(logs).to(device)


@lru_cache(maxsize=64)
def _table(rule: TreeRule, device: torch.device) -> torch.Tensor:
    assert rule.confidence is not None
    return torch.from_numpy(np.asarray(rule.confidence)).to(device)
