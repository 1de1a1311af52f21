"""The jump loop for trees: a round is a few look-ups in a growth table
(:mod:`optimizer.replay.forest`), whatever the window, the selection and the bins are. It shares
rounds, lags and clipping with :mod:`optimizer.replay.chains`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.optimizer.replay.chains import (
    NOTHING,
    KernelTrace,
    ReplayedRound,
    Sums,
    add_request,
    add_round,
)
from spectune.optimizer.replay.tree_tables import ABSENT, NEVER, GrowthTable
from spectune.runtime.costs import RoundCosts, round_seconds
from spectune.runtime.policies.heterospec import bin_of
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.windows import CompiledWindow, WindowState, advance, reset
from spectune.runtime.trees.grow import TreeRule
from spectune.traces.schema import NO_BIN

Index = npt.NDArray[np.int64]

ALL = 1 << 30
"""A selection that keeps everything."""


class TreeLimits(NamedTuple):
    """A rule as a kernel reads it: N, whether a stopped level is kept, HeteroSpec's fitted depth
    and alpha, the levels of a static tree; whether there are bins, their ``thresholds``, and N' of
    each low one (``low`` of them). ``rereads``: the draft reads all emitted tokens again, as a head
    does."""

    top_n: int
    keep_last: bool
    fitted_depth: int
    alpha: int
    static: int
    stratified: bool
    thresholds: Index
    low: int
    low_top_n: Index
    rereads: bool

    @classmethod
    def of(cls, rule: TreeRule, *, rereads: bool) -> TreeLimits:
        return cls(
            top_n=ALL if rule.top_n is None or rule.static else rule.top_n,
            keep_last=rule.stop.keep_last,
            fitted_depth=rule.fitted_depth,
            alpha=rule.alpha,
            static=len(rule.static) if rule.static else ALL,
            stratified=rule.stratified,
            thresholds=np.array(rule.thresholds, dtype=np.int64),
            low=len(rule.bin_top_n),
            low_top_n=np.array([*rule.bin_top_n, 0], dtype=np.int64),
            rereads=rereads,
        )


@compiled(inline=True)
def _levels(target: int, stop: int, end: int, keep_last: bool) -> tuple[int, int]:
    """(levels drafted, passes made) of ``target`` levels, by the level at which the stop triggers
    and that at which nothing passes."""
    if end <= target and end <= stop:
        return end - 1, end
    if stop <= target:
        return (stop if keep_last else stop - 1), stop
    return target, target


@compiled(inline=True)
def tree_round(
    growth: GrowthTable, stop: int, limits: TreeLimits, s: int, gamma: int, limit: int, left: int
) -> tuple[int, int, int, int, int, int]:
    """What a tree does that grows from start ``s`` under a window of ``gamma`` levels, which
    HeteroSpec may extend up to ``limit``, and whose stop triggers at level ``stop``, ``left``
    tokens before the end of the text: (levels, passes, drafted, accepted, emitted, bin)."""
    levels, passes, bin_, keep = 0, 0, NO_BIN, limits.top_n
    if gamma > 0:
        end, target = int(growth.end[s]), min(gamma, limits.static)
        levels, passes = _levels(target, stop, end, limits.keep_last)
        if limits.stratified and target == gamma and min(stop, end) > target:
            phi, extra = int(growth.phi[s, gamma - 1]), 0
            bin_ = bin_of(phi, gamma, limits.thresholds, limits.fitted_depth)
            if bin_ < limits.low:
                keep, extra = limits.low_top_n[bin_], max(0, limits.alpha - bin_)
            levels, passes = _levels(min(limit, gamma + extra), stop, end, limits.keep_last)
    accepted, drafted = 0, 0
    if levels > 0:
        at = min(levels, growth.rank.shape[1]) - 1
        drafted = min(int(growth.pool[s, at]), keep)
        while (
            accepted <= at
            and int(growth.rank[s, at, accepted]) != ABSENT
            and int(growth.rank[s, at, accepted]) < keep
        ):
            accepted += 1
    emitted = min(accepted + 1, left)
    return levels, passes, drafted, min(accepted, emitted), emitted, bin_


@compiled(inline=True)
def tokens_read(growth: GrowthTable, s: int, accepted: int, passes: int) -> int:
    """How many of the accepted tokens the passes of a tree from start ``s`` have read."""
    reads = 0
    while reads < min(accepted, passes - 1) and growth.read[s, reads]:
        reads += 1
    return reads


@compiled()
def replay_trees(
    window: CompiledWindow,
    state: WindowState,
    texts: KernelTrace,
    growth: GrowthTable,
    stops: npt.NDArray[np.uint8],
    cached_from: npt.NDArray[np.uint8],
    limits: TreeLimits,
    costs: RoundCosts,
    sums: Sums,
) -> int:
    """Replays every request of ``texts.order``; adds to ``sums`` in place and returns how many
    rounds were written. ``stops`` uint8 [positions]: the level at which the stop triggers;
    ``cached_from``: :func:`optimizer.replay.chain_tables.cached_from`."""
    used = 0
    for i in range(len(texts.order)):
        r = texts.order[i]
        begin, sampled = texts.offsets[r], texts.sampled[r]
        length, budget = texts.offsets[r + 1] - begin, texts.budgets[r]
        context = texts.prompts[r] - 1
        reset(window, state)
        # A head reads from the second token on: after a prompt of one there is nothing to read.
        start, lag, total = 0, (0 if limits.rereads and context == 0 else 1), NOTHING
        while start < length:
            s, limit = begin + start, budget - start - 1
            gamma = max(0, min(int(state.gamma[0]), limit)) if lag > 0 else 0
            levels, passes, drafted, accepted, emitted, bin_ = tree_round(
                growth, int(stops[s]), limits, s, gamma, limit, length - start
            )
            if passes > growth.missing[s] - 1 and growth.missing[s] != NEVER:
                sums.counts[i, 6] += 1
            cached = 1 if cached_from[s] < accepted else 0
            seconds = round_seconds(
                costs, sampled, context + start, s, lag, passes, drafted, emitted
            )
            advance(window, state, levels, accepted, cached)
            round_ = ReplayedRound(start, drafted, accepted, emitted, passes, lag, levels, bin_)
            used, total = add_round(sums, used, i, round_, seconds, total)
            if passes > 0:
                reads = 0 if limits.rereads else tokens_read(growth, s, accepted, passes)
                lag = emitted - reads
            else:
                lag += emitted
            start += emitted
        add_request(sums, i, length, total)
    return used
