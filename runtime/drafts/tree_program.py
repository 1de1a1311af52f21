"""EAGLE-2's trees by one Triton program a level and one at the end, in place of the operations of
:mod:`runtime.trees.on_device`: the same whole numbers, and ties in the same order.

Of several requests, a tree each, by as many programs at once. For one request off unless
``SPECTUNE_SKINNY=1``: no GPU has shown yet what it saves."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from spectune.runtime.cache import PassTokens, Seats
from spectune.runtime.cuda.growth import growth_kernels
from spectune.runtime.cuda.launch import interpreted, kernels_run, on, power_of_two
from spectune.runtime.cuda.seat_attention import tile_rows
from spectune.runtime.cuda.skinny import skinny_on
from spectune.runtime.distributions import Children
from spectune.runtime.policies.eagle2 import INFINITE
from spectune.runtime.trees.grow import GAP_CODES, ROOT, SUM_SHIFT, TreeRule
from spectune.runtime.trees.on_device import GrowingTree
from spectune.traces.schema import NAT_CODE_MAX, NAT_SCALE, NO_BIN


def can_grow(rule: TreeRule, device: torch.device) -> bool:
    """Whether a rule's trees can be grown like this: where kernels run, trees that their depth
    alone ends and whose nodes are expanded by score."""
    ends = rule.stop.active or rule.confidence is not None or rule.stratified
    return kernels_run(device) and not ends and not rule.static


def grows_by_program(rule: TreeRule, device: torch.device) -> bool:
    """Whether a tree of one request is grown like this: where it can be, and that is asked for."""
    return skinny_on() and can_grow(rule, device)


def level_constants(rows: int, width: int, nodes: int, *, coupled: bool) -> dict[str, Any]:
    """What a level of ``nodes`` below ``rows`` of ``width`` children each is compiled for."""
    sizes = {"ROWS": rows, "WIDE": width, "NODES": nodes}
    codes = {"SCALE": NAT_SCALE, "MOST": GAP_CODES - 1 if coupled else NAT_CODE_MAX}
    shape = {name: power_of_two(size) for name, size in sizes.items()}
    return {**shape, **codes, "COUPLED": coupled, "SHIFT": SUM_SHIFT, "INFINITE": INFINITE}


def choice_constants(candidates: int) -> dict[str, Any]:
    """What a choice among so many is compiled for."""
    size = power_of_two(candidates)
    return {"SIZE": size, "BITS": (INFINITE * size).bit_length() - 1, "INFINITE": INFINITE}


def warps_for(numbers: int) -> int:
    """The warps of a program over so many numbers: one, which waits for no other, has 256."""
    return min(16, max(1, numbers // 256))


def _multiple(number: int, of: int) -> int:
    """The least multiple that is at least ``number``."""
    return -(-number // of) * of


class TreeProgram:
    """The trees of a :class:`GrowingTree`, whose sizes these are, ``trees`` of them at once.
    ``numbers`` int64 [trees, any] are read on the device: of each a text's length as slot and as
    position, the depth, the limit, and (of several) the slot from which on the text is seen; of
    one it is ``first_slot``. ``slots`` of the cache; ``positions`` that there are."""

    def __init__(
        self,
        growing: GrowingTree,
        numbers: Tensor,
        slots: int,
        first_slot: int,
        positions: int,
        trees: int = 1,
    ) -> None:
        rule, device = growing.rule.compiled, growing.device
        self.growing, self._numbers, self._reach = growing, numbers, (slots, positions)
        self.trees = trees
        tables = rule.weights, rule.logs, rule.log_sums
        self._tables = [torch.from_numpy(table).to(device) for table in tables]
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self._pool = torch.zeros(trees, growing.ends[-1], 5, **whole)
        """Of each candidate its token, cost, parent, place among the nodes that passes read (-1:
        none), and level."""
        # Kernels read rows that begin at multiples of 16 bytes faster.
        most = _multiple(max(growing.sizes), 2)
        self._front = torch.zeros(trees, growing.depth + 1, 6, most, **whole)
        """Of each level's frontier: candidates, the places of the nodes above among those that the
        pass before read, tokens, slots, positions, and where the slots end that are seen."""
        self._front[:, 0, 0, :1] = ROOT
        self._result = torch.zeros(trees, 6 + 4 * growing.most, **whole)
        self._result[:, 3] = NO_BIN
        self._read = [0, 0, *accumulate(growing.sizes[1:])]
        """By level, how many nodes were read before."""
        columns = _multiple(slots + 1 if trees == 1 else max(1, sum(growing.sizes[1:])), 16)
        self._columns = torch.arange(columns, **whole)
        if trees == 1:
            self._columns[:first_slot] = columns
        self._seen = torch.zeros(2, trees * most, columns, dtype=torch.bool, device=device)
        """What the nodes of the last two levels see: of all slots, of several trees of the nodes'
        own."""

    def add(self, children: Children, level: int) -> None:
        """Makes a level, counted from 1, from the distributions after the frontier above."""
        growing, rule = self.growing, self.growing.rule
        rows, nodes = growing.sizes[level - 1 : level + 1]
        scores = children.gaps if rule.coupled else children.nats
        assert scores is not None
        given = children.tokens.contiguous(), scores.contiguous(), children.count, self._numbers
        at = level, growing.ends[level - 1], self._read[level]
        sizes = rows, rule.width, nodes, scores.shape[1], self._front.shape[3]
        strides = self._numbers.stride(0), self._pool.shape[1], self._front.shape[1]
        fixed = level_constants(rows, rule.width, nodes, coupled=rule.coupled)
        tensors = *given, *self._tables, self._pool, self._front
        with on(growing.device):
            growth_kernels(interpreted())[0][self.trees,](
                *tensors, *at, *sizes, *self._reach, *strides, **fixed,
                num_warps=warps_for(fixed["ROWS"] * fixed["WIDE"]),
            )  # fmt: skip

    def read(self, level: int) -> tuple[PassTokens, Tensor]:
        """What the pass after a level reads, and which of the places read before is above each."""
        n, slots = self.growing.sizes[level], self._reach[0]
        _, above, tokens, places, positions, ends = self._front[0, level, :, :n]
        before, seen = self._seen[(level - 1) % 2], self._seen[level % 2, :n]
        if level == 1:
            torch.lt(self._columns, self._numbers[0, :1], out=before[0])
        torch.index_select(before, 0, above, out=seen).scatter_(1, places[:, None], True)
        return PassTokens(tokens, positions, places, seen[:, :slots], slots, length=ends[:1]), above

    def read_together(self, level: int, groups: int) -> tuple[PassTokens, Tensor]:
        """:meth:`read` of several trees, whose nodes are one pass's; ``groups``: query heads that
        share a key-value head."""
        n, trees, slots = self.growing.sizes[level], self.trees, self._reach[0]
        above, tokens, places, positions = self._front[:, level, 1:5, :n].unbind(1)
        tree = torch.arange(trees, device=self._front.device)[:, None]
        # Of the first level the root is above, which is row 0 of what a tree's text gave.
        above = (above + tree * self.growing.sizes[level - 1]).flatten()
        seen, own = self._seen[level % 2, : trees * n], self._columns - self._read[level]
        torch.index_select(self._seen[(level - 1) % 2], 0, above, out=seen)
        if level == 1:
            seen.zero_()
        seen.view(trees, n, -1).logical_or_(own == torch.arange(n, device=own.device)[:, None])
        rows = tile_rows(groups)
        begin = torch.arange(0, n, rows, device=own.device)
        first = (tree * n + begin).flatten()
        count = (n - begin).clamp_max(rows).expand(trees, -1).flatten()
        told = self._numbers[:, 0]
        stop = (told + self._read[level] + n).clamp_max(slots)
        of_text = torch.stack([self._numbers[:, 4], told, stop], 1)
        tiles = torch.cat(
            [torch.stack([first, count], 1), of_text.repeat_interleave(len(begin), 0)], 1
        )
        ids, places, positions = (x.flatten() for x in (tokens, places, positions))
        seats = Seats(tiles, seen)
        return PassTokens(ids, positions, places, None, slots, seats=seats), above

    def choose(self, last: int) -> Tensor:
        """What :meth:`GrowingTree.choose` gives of each tree after the levels up to ``last``.
        Behind the nodes of a tree its numbers mean nothing."""
        candidates, most = self._pool.shape[1], self.growing.most
        sizes, fixed = (candidates, most, last), choice_constants(candidates)
        with on(self.growing.device):
            growth_kernels(interpreted())[1][self.trees,](
                self._pool, self._numbers, self._result, *sizes, self._numbers.stride(0), **fixed,
                num_warps=warps_for(fixed["SIZE"]),
            )  # fmt: skip
        return self._result if self.trees > 1 else self._result[0]


def try_program(device: torch.device) -> None:
    """Launches what grows a tree, for both scores, on zeros."""
    for coupled in (False, True):
        growing = GrowingTree(TreeRule(2, 2, coupled), 1, device)
        zeros = torch.zeros(1, 3, dtype=torch.int64, device=device)
        program, nats = TreeProgram(growing, zeros, 1, 0, 1), torch.zeros(1, 2, device=device)
        none = zeros[0, :1]
        program.add(Children(zeros[:, :2], nats, nats, none, none, none), 1)
        program.choose(1)
