"""EAGLE-2's trees by one Triton program a level and one at the end, in place of the operations of
:mod:`runtime.trees.on_device`: the same whole numbers, and ties in the same order.

Off unless ``SPECTUNE_SKINNY=1``: no GPU has shown yet what it saves."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from spectune.runtime.cache import PassTokens
from spectune.runtime.cuda.growth import growth_kernels
from spectune.runtime.cuda.launch import interpreted, kernels_run, on, power_of_two
from spectune.runtime.cuda.skinny import skinny_on
from spectune.runtime.distributions import Children
from spectune.runtime.policies.eagle2 import INFINITE
from spectune.runtime.trees.grow import GAP_CODES, ROOT, SUM_SHIFT, TreeRule
from spectune.runtime.trees.on_device import GrowingTree
from spectune.traces.schema import NAT_CODE_MAX, NAT_SCALE, NO_BIN


def grows_by_program(rule: TreeRule, device: torch.device) -> bool:
    """Whether a rule's trees are grown like this: where that is asked for and kernels run, for
    trees that their depth alone ends and whose nodes are expanded by score."""
    ends = rule.stop.active or rule.confidence is not None or rule.stratified
    return skinny_on() and kernels_run(device) and not ends and not rule.static


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
    """The trees of a :class:`GrowingTree`, whose sizes these are. ``numbers`` int64 [3] are read on
    the device: a text's length as slot and as position, and the depth. ``slots`` of the cache, of
    which those from ``first_slot`` on are seen; ``positions`` that there are."""

    def __init__(
        self, growing: GrowingTree, numbers: Tensor, slots: int, first_slot: int, positions: int
    ) -> None:
        rule, device = growing.rule.compiled, growing.device
        # Kernels read rows that begin at multiples of 16 bytes faster.
        most, columns = _multiple(max(growing.sizes), 2), _multiple(slots + 1, 16)
        self.growing, self._numbers, self._reach = growing, numbers, (slots, positions)
        tables = rule.weights, rule.logs, rule.log_sums
        self._tables = [torch.from_numpy(table).to(device) for table in tables]
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self._pool = torch.zeros(growing.ends[-1], 5, **whole)
        """Of each candidate its token, cost, parent, place among the nodes that passes read (-1:
        none), and level."""
        self._front = torch.zeros(growing.depth + 1, 6, most, **whole)
        """Of each level's frontier: candidates, the places of the nodes above among those that the
        pass before read, tokens, slots, positions, and where the slots end that are seen."""
        self._front[0, 0, :1] = ROOT
        self._columns = torch.arange(columns, **whole)
        self._columns[:first_slot] = columns
        self._seen = torch.zeros(2, most, columns, dtype=torch.bool, device=device)
        """What the nodes of the last two levels see."""
        self._result = torch.zeros(6 + 4 * growing.most, **whole)
        self._result[3] = NO_BIN
        self._read = [0, 0, *accumulate(growing.sizes[1:])]
        """By level, how many nodes were read before."""

    def add(self, children: Children, level: int) -> None:
        """Makes a level, counted from 1, from the distributions after the frontier above."""
        growing, rule = self.growing, self.growing.rule
        rows, nodes = growing.sizes[level - 1 : level + 1]
        scores = children.gaps if rule.coupled else children.nats
        assert scores is not None
        given = children.tokens.contiguous(), scores.contiguous(), children.count, self._numbers
        at = level, growing.ends[level - 1], self._read[level]
        sizes = rows, rule.width, nodes, scores.shape[1], self._front.shape[2]
        fixed = level_constants(rows, rule.width, nodes, coupled=rule.coupled)
        tensors = *given, *self._tables, self._pool, self._front
        with on(growing.device):
            growth_kernels(interpreted())[0][1,](
                *tensors, *at, *sizes, *self._reach, **fixed,
                num_warps=warps_for(fixed["ROWS"] * fixed["WIDE"]),
            )  # fmt: skip

    def read(self, level: int) -> tuple[PassTokens, Tensor]:
        """What the pass after a level reads, and which of the places read before is above each."""
        n, slots = self.growing.sizes[level], self._reach[0]
        _, above, tokens, places, positions, ends = self._front[level, :, :n]
        before, seen = self._seen[(level - 1) % 2], self._seen[level % 2, :n]
        if level == 1:
            torch.lt(self._columns, self._numbers[:1], out=before[0])
        torch.index_select(before, 0, above, out=seen).scatter_(1, places[:, None], True)
        return PassTokens(tokens, positions, places, seen[:, :slots], slots, length=ends[:1]), above

    def choose(self, last: int) -> Tensor:
        """What :meth:`GrowingTree.choose` gives after the levels up to ``last``. Behind the nodes
        of the tree its numbers mean nothing."""
        candidates, most = len(self._pool), self.growing.most
        sizes, fixed = (candidates, most, last), choice_constants(candidates)
        with on(self.growing.device):
            growth_kernels(interpreted())[1][1,](
                self._pool, self._numbers, self._result, *sizes, **fixed,
                num_warps=warps_for(fixed["SIZE"]),
            )  # fmt: skip
        return self._result


def try_program(device: torch.device) -> None:
    """Launches what grows a tree, for both scores, on zeros."""
    for coupled in (False, True):
        growing = GrowingTree(TreeRule(2, 2, coupled), 1, device)
        zeros = torch.zeros(3, dtype=torch.int64, device=device)
        program, nats = TreeProgram(growing, zeros, 1, 0, 1), torch.zeros(1, 2, device=device)
        none = zeros[:1]
        program.add(Children(zeros[None, :2], nats, nats, none, none, none), 1)
        program.choose(1)
