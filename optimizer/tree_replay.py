"""The jump loop for trees: a round is a few look-ups in a growth table (:mod:`optimizer.tree_outcomes`), whatever the
window, the selection and
the bins are. Compiled like :mod:`optimizer.replay`, whose semantics of rounds, lags and clipping it shares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import optimizer.cost as cost
import optimizer.tree_tabulation as tree_tabulation
import runtime.policies.heterospec as heterospec
import runtime.policies.windows as windows
import traces.schema as schema
from optimizer.cost import BUCKET, LAG_LIMIT
from optimizer.tree_tabulation import ABSENT, NEVER, GrowthTable
from runtime.policies.heterospec import bin_of
from runtime.policies.jit import compiled
from runtime.policies.trees import TreeRule
from runtime.policies.windows import CompiledWindow, WindowState, advance, reset
from traces.schema import NO_BIN

FloatArray = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

ALL = 1 << 30
"""A selection that keeps everything."""


@dataclass(frozen=True, eq=False)
class TreeLimits:
    """A rule as the kernel reads it: ``numbers`` int64 [7] (N, keep_last, fitted depth, alpha, low bins, static levels, bins
    on), thresholds and N' of each low bin."""

    numbers: Index
    thresholds: Index
    kept: Index

    @classmethod
    def of(cls, rule: TreeRule) -> TreeLimits:
        static = len(rule.static) if rule.static else ALL
        top_n = ALL if rule.top_n is None or rule.static else rule.top_n
        numbers = [top_n, int(rule.keep_last), rule.fitted_depth, rule.alpha, len(rule.kept), static, int(rule.stratified)]
        kept = np.array([*rule.kept, 0], dtype=np.int64)
        return cls(np.array(numbers, dtype=np.int64), np.array([*rule.thresholds, 0], dtype=np.int64)[: len(rule.thresholds)], kept)


@compiled(windows, cost, heterospec, tree_tabulation, schema)
def replay_trees(
    window: CompiledWindow,
    state: WindowState,
    order: Index,
    offsets: Index,
    prompts: Index,
    budgets: Index,
    sampled: FloatArray,
    first_seen: npt.NDArray[np.int32],
    rank: npt.NDArray[np.uint16],
    pool: npt.NDArray[np.uint16],
    width: npt.NDArray[np.uint8],
    read: npt.NDArray[np.bool_],
    phi: npt.NDArray[np.uint16],
    stop: npt.NDArray[np.uint8],
    end: npt.NDArray[np.uint8],
    missing: npt.NDArray[np.uint8],
    numbers: Index,
    thresholds: Index,
    kept_of: Index,
    rereads: bool,
    verify_table: FloatArray,
    first_table: FloatArray,
    level_table: FloatArray,
    bend_table: FloatArray,
    routed_s: FloatArray,
    overhead_s: float,
    token_s: FloatArray,
    per_round: bool,
    counts: Index,
    seconds: FloatArray,
    rounds: npt.NDArray[np.int32],
    round_s: FloatArray,
) -> int:
    """Replays every request of ``order``; adds to ``counts`` int64 [requests, 7] (the last: rounds that read a law which was not recorded)
    and ``seconds`` in place, and returns how many rounds were written.

    ``verify_table`` [2, buckets, nodes + 1], ``first_table`` [2, buckets, LAG_LIMIT + 2], ``level_table`` [2, buckets, widths] and
    ``token_s`` [2] are seconds, greedy and sampled, ``bend_table`` by passes; ``routed_s`` [positions or 0, passes + 1]: what passes over
    routed shortlists take more. ``rereads``: the draft reads all emitted tokens again (a head).
    """
    used = 0
    last_bucket = level_table.shape[1] - 1
    last_width = level_table.shape[2] - 1
    last_nodes = verify_table.shape[2] - 1
    top_n, keep_last, fitted, alpha, low, static = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    deepest = rank.shape[1]
    for i in range(len(order)):
        r = order[i]
        begin, length, budget, context = offsets[r], offsets[r + 1] - offsets[r], budgets[r], prompts[r] - 1
        hot = 1 if sampled[r] > 0 else 0
        per_token = token_s[hot]
        reset(window, state)
        start, lag = 0, 1
        n_rounds, n_accepted, n_drafted, n_steps, n_missing, total_s = 0, 0, 0, 0, 0, 0.0
        while start < length:
            s = begin + start
            limit = budget - start - 1
            gamma = max(0, min(int(state.gamma[0]), limit))
            levels, steps, bin_, keep = 0, 0, NO_BIN, top_n
            if gamma > 0:
                wanted = min(gamma, static)
                first_stop, first_end = int(stop[s]), int(end[s])
                if first_end <= wanted and first_end <= first_stop:
                    levels, steps = first_end - 1, first_end
                elif first_stop <= wanted:
                    levels, steps = (first_stop if keep_last else first_stop - 1), first_stop
                else:
                    levels, steps = wanted, wanted
                    if numbers[6] and wanted == gamma:
                        bin_ = bin_of(int(phi[s, gamma - 1]), gamma, thresholds, fitted)
                        extra = 0
                        if bin_ < low:
                            keep = kept_of[bin_]
                            extra = max(0, alpha - bin_)
                        wanted = min(limit, gamma + extra)
                        if first_end <= wanted and first_end <= first_stop:
                            levels, steps = first_end - 1, first_end
                        elif first_stop <= wanted:
                            levels, steps = (first_stop if keep_last else first_stop - 1), first_stop
                        else:
                            levels, steps = wanted, wanted
            accepted, kept, reads = 0, 0, 0
            if levels > 0:
                at = min(levels, deepest) - 1
                kept = min(int(pool[s, at]), keep)
                for level in range(at + 1):
                    if int(rank[s, at, level]) != ABSENT and int(rank[s, at, level]) < keep:
                        accepted += 1
                    else:
                        break
            if steps > missing[s] - 1 and missing[s] != NEVER:
                n_missing += 1
            emitted = min(accepted + 1, length - start)
            accepted = min(accepted, emitted)
            for level in range(min(accepted, steps - 1)):
                if not read[s, level]:
                    break
                reads += 1
            bucket = min((context + start) // BUCKET, last_bucket)
            draft_s = 0.0
            if steps > 0:
                draft_s = first_table[hot, bucket, min(lag, LAG_LIMIT)] + bend_table[min(steps, len(bend_table) - 1)]
                if lag > LAG_LIMIT:
                    slope = first_table[hot, bucket, LAG_LIMIT + 1] - first_table[hot, bucket, LAG_LIMIT]
                    draft_s += (lag - LAG_LIMIT) * slope
                if len(routed_s) > 0:
                    draft_s += routed_s[s, min(steps, routed_s.shape[1] - 1)]
                for level in range(steps - 1):
                    draft_s += level_table[hot, bucket, min(last_width, int(width[s, min(level, deepest - 1)]))]
            verify_s = verify_table[hot, bucket, min(last_nodes, kept)] + per_token * emitted
            near = 0
            for level in range(accepted):
                if first_seen[s + level] < start:
                    near = 1
                    break
            advance(window, state, levels, accepted, near, draft_s, verify_s)
            if per_round:
                rounds[used, 0] = i
                rounds[used, 1] = start
                rounds[used, 2] = kept
                rounds[used, 3] = kept + 1
                rounds[used, 4] = accepted
                rounds[used, 5] = emitted
                rounds[used, 6] = steps
                rounds[used, 7] = lag
                rounds[used, 8] = levels
                rounds[used, 9] = bin_
                round_s[used, 0] = draft_s
                round_s[used, 1] = verify_s
                round_s[used, 2] = draft_s + verify_s + overhead_s
                used += 1
            total_s += draft_s + verify_s
            n_rounds += 1
            n_accepted += accepted
            n_drafted += kept
            n_steps += steps
            if steps > 0:
                lag = emitted if rereads else emitted - reads
            else:
                lag += emitted
            start += emitted
        counts[i, 0] += n_rounds
        counts[i, 1] += length
        counts[i, 2] += n_accepted
        counts[i, 3] += n_drafted
        counts[i, 4] += n_steps
        counts[i, 5] += n_drafted + n_rounds
        counts[i, 6] += n_missing
        seconds[i] += total_s + n_rounds * overhead_s
    return used


def stop_levels(growth: GrowthTable, rules: tuple[TreeRule, TreeRule], sampled: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """The level at which the stop triggers, uint8 [positions]; ``sampled`` bool [positions]."""
    cold, hot = (growth.stops(rule) for rule in rules)
    return np.where(sampled, hot, cold).astype(np.uint8)
