"""Every round that a policy could have on a trace, tabulated: by where it begins and by its window.

The rounds are those of :func:`optimizer.replay.chains.chain_round` and
:func:`optimizer.replay.trees.tree_round`, so chains and trees are one to whatever reads the table
(:mod:`optimizer.replay.batches`): windows decide which of them come to be."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.optimizer.replay.chain_tables import Words
from spectune.optimizer.replay.chains import KernelTrace, chain_round
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.tree_tables import NEVER, GrowthTable
from spectune.optimizer.replay.trees import TreeLimits, tokens_read, tree_round
from spectune.runtime.policies.document import FixedWindow
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.plan import Plan

DRAFTED: Final = 0
PASSES: Final = 1
LEVELS: Final = 2
ACCEPTED: Final = 3
READ: Final = 4
CACHED: Final = 5
MISSING: Final = 6
COLUMNS: Final = 7
"""Of a round: drafted tokens, passes of the draft, levels drafted, accepted tokens, how many of
them its passes read, whether accepted tokens are in prompt or output already, and whether it reads
a distribution that was not recorded."""


class RoundTable(NamedTuple):
    """``rounds`` uint16 [positions, 1 + largest window, COLUMNS]; ``rows`` uint8 [positions,
    passes]: what each pass reads, of the first one 0, as it reads what the draft has not read
    yet."""

    rounds: npt.NDArray[np.uint16]
    rows: npt.NDArray[np.uint8]


def tabulate_rounds(trace: ReplayTrace, plan: Plan) -> RoundTable:
    """The rounds of a policy, remembered by all but its window's kind. Distributions that trees
    lack are read by the trace's reader, where there is one. Raises TraceError where too little was
    recorded."""
    policy = plan.policy
    window = FixedWindow(gamma=policy.gamma_max)
    key = policy.model_copy(update={"window": window}).model_dump_json(), id(trace.reader)
    if not trace.uses_trees(policy):
        return trace.remember(key, lambda: _of_chains(trace, plan))
    assert plan.rules is not None
    growth = trace.growth(policy, plan.rules)
    for _ in range(policy.depth_max):
        if not trace.read_lacking(policy, plan.rules, growth):
            break
        growth = trace.growth(policy, plan.rules)
    whole = growth
    return trace.remember((*key, id(whole)), lambda: (whole, _of_trees(trace, plan, whole)))[1]


def _of_chains(trace: ReplayTrace, plan: Plan) -> RoundTable:
    words, most = trace.outcomes(plan.policy, plan.stop), plan.policy.gamma_max
    rounds = np.zeros((len(words), most + 1, COLUMNS), np.uint16)
    fill_chains(trace.texts, words, trace.cached_from, rounds)
    rows = np.ones((len(words), most), np.uint8)
    rows[:, :1] = 0
    return RoundTable(rounds, rows)


def _of_trees(trace: ReplayTrace, plan: Plan, growth: GrowthTable) -> RoundTable:
    assert plan.rules is not None
    policy, rereads = plan.policy, trace.is_head(plan.policy.draft)
    limits, stops = TreeLimits.of(plan.rules[0], rereads=rereads), trace.stops(growth, plan.rules)
    rounds = np.zeros((len(stops), policy.gamma_max + 1, COLUMNS), np.uint16)
    fill_trees(trace.texts, growth, stops, trace.cached_from, limits, rounds)
    first = np.zeros((len(stops), 1), np.uint8)
    rows = np.concatenate([first, growth.width[:, : policy.depth_max]], axis=1)
    return RoundTable(rounds, np.ascontiguousarray(rows))


@compiled()
def fill_chains(
    texts: KernelTrace,
    words: Words,
    cached_from: npt.NDArray[np.uint8],
    rounds: npt.NDArray[np.uint16],
) -> None:
    """Fills the rows of the texts that are replayed."""
    for r in texts.order:
        end = texts.offsets[r + 1]
        for s in range(texts.offsets[r], end):
            for gamma in range(rounds.shape[1]):
                drafted, passes, accepted, _ = chain_round(int(words[s]), gamma, end - s)
                row = rounds[s, gamma]
                row[DRAFTED], row[PASSES], row[LEVELS] = drafted, passes, drafted
                row[ACCEPTED], row[READ] = accepted, max(0, min(accepted, passes - 1))
                row[CACHED] = 1 if cached_from[s] < accepted else 0


@compiled()
def fill_trees(
    texts: KernelTrace,
    growth: GrowthTable,
    stops: npt.NDArray[np.uint8],
    cached_from: npt.NDArray[np.uint8],
    limits: TreeLimits,
    rounds: npt.NDArray[np.uint16],
) -> None:
    """Fills the rows of the texts that are replayed."""
    for r in texts.order:
        begin, end = texts.offsets[r], texts.offsets[r + 1]
        for s in range(begin, end):
            limit = texts.budgets[r] - (s - begin) - 1
            for gamma in range(rounds.shape[1]):
                levels, passes, drafted, accepted, _, _ = tree_round(
                    growth, int(stops[s]), limits, s, min(gamma, limit), limit, end - s
                )
                row = rounds[s, gamma]
                row[DRAFTED], row[PASSES], row[LEVELS] = drafted, passes, levels
                row[ACCEPTED] = accepted
                row[READ] = (
                    0 if limits.rereads else max(0, tokens_read(growth, s, accepted, passes))
                )
                row[CACHED] = 1 if cached_from[s] < accepted else 0
                lacks = growth.missing[s] != NEVER and passes > growth.missing[s] - 1
                row[MISSING] = 1 if lacks else 0
