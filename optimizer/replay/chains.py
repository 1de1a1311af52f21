"""The jump loop for chains: a round is a look-up in a packed outcome
(:mod:`optimizer.replay.chain_tables`) and one in a table of costs."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.optimizer.replay.chain_tables import Index, Words
from spectune.runtime.costs import RoundCosts, round_seconds
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.windows import CompiledWindow, WindowState, advance, reset
from spectune.traces.cost_table import FloatArray
from spectune.traces.schema import NO_BIN

ROUND_COLUMNS: Final = (
    "request",
    "start",
    "drafted",
    "verified",
    "accepted",
    "emitted",
    "draft_steps",
    "lag",
    "depth",
    "bin",
)
"""Columns of :attr:`Sums.rounds`; ``request`` is the place in the replayed order."""


class KernelTrace(NamedTuple):
    """What a kernel reads of a trace: the requests in replayed ``order``, and by request where it
    begins among all positions, its prompt's tokens, its budget, and whether it is sampled (1) or
    greedy (0). ``up_to``: tokens of a text up to which an engine drafts, 0: any."""

    order: Index
    offsets: Index
    prompts: Index
    budgets: Index
    sampled: Index
    up_to: int


class Sums(NamedTuple):
    """What a kernel adds to, by replayed request: ``counts`` int64 [requests, 7] (rounds, emitted,
    accepted, drafted, draft steps, verified, and rounds that read a distribution which was not
    recorded) and ``seconds``; and, if ``per_round``, rows of :data:`ROUND_COLUMNS` and three kinds
    of seconds."""

    counts: npt.NDArray[np.int64]
    seconds: FloatArray
    per_round: bool
    rounds: npt.NDArray[np.int32]
    round_s: FloatArray


class ReplayedRound(NamedTuple):
    """A replayed round, by the columns of :data:`ROUND_COLUMNS`."""

    start: int
    drafted: int
    accepted: int
    emitted: int
    passes: int
    lag: int
    depth: int
    bin: int


Total = tuple[int, int, int, int, float]
"""Rounds of a request, accepted tokens, drafted ones, passes of the draft, seconds. (A tuple:
compiled code keeps it in registers.)"""
NOTHING: Final = (0, 0, 0, 0, 0.0)


@compiled(inline=True)
def add_request(sums: Sums, i: int, length: int, total: Total) -> None:
    """Adds the i-th request, of ``length`` tokens."""
    rounds, accepted, drafted, passes, seconds = total
    sums.counts[i, 0] += rounds
    sums.counts[i, 1] += length
    sums.counts[i, 2] += accepted
    sums.counts[i, 3] += drafted
    sums.counts[i, 4] += passes
    sums.counts[i, 5] += drafted + rounds
    sums.seconds[i] += seconds


@compiled(inline=True)
def add_round(
    sums: Sums,
    used: int,
    i: int,
    r: ReplayedRound,
    seconds: tuple[float, float, float],
    total: Total,
) -> tuple[int, Total]:
    """Adds a round to its request's total, and writes it, where rounds are asked for, after
    ``used`` others: how many there are now, and the total."""
    if sums.per_round:
        row = sums.rounds[used]
        row[0], row[1], row[2], row[3] = i, r.start, r.drafted, r.drafted + 1
        row[4], row[5], row[6], row[7] = r.accepted, r.emitted, r.passes, r.lag
        row[8], row[9] = r.depth, r.bin
        sums.round_s[used, 0], sums.round_s[used, 1], sums.round_s[used, 2] = seconds
        used += 1
    rounds, accepted, drafted, passes, before_s = total
    return used, (
        rounds + 1,
        accepted + r.accepted,
        drafted + r.drafted,
        passes + r.passes,
        before_s + seconds[2],
    )


@compiled(inline=True)
def chain_round(word: int, gamma: int, left: int) -> tuple[int, int, int, int]:
    """What a chain does whose start's packed outcome is ``word`` and whose window is ``gamma``,
    ``left`` tokens before the end of the text: (drafted, passes, accepted, emitted)."""
    drafted, passes = min(gamma, (word >> 8) & 255), min(gamma, (word >> 16) & 255)
    accepted = min(word & 255, drafted)
    emitted = min(accepted + 1, left)
    return drafted, passes, min(accepted, emitted), emitted


@compiled()
def replay_chains(
    window: CompiledWindow,
    state: WindowState,
    texts: KernelTrace,
    words: Words,
    costs: RoundCosts,
    sums: Sums,
) -> int:
    """Replays every request of ``texts.order``; adds to ``sums`` in place and returns how many
    rounds were written."""
    used = 0
    for i in range(len(texts.order)):
        r = texts.order[i]
        begin, sampled = texts.offsets[r], texts.sampled[r]
        length, budget = texts.offsets[r + 1] - begin, texts.budgets[r]
        context = texts.prompts[r] - 1
        reset(window, state)
        start, lag, total, longest = 0, 1, NOTHING, context
        while start < length:
            word = int(words[begin + start])
            gamma = max(0, min(int(state.gamma[0]), budget - start - 1))
            drafted, passes, accepted, emitted = chain_round(word, gamma, length - start)
            if 0 < texts.up_to < longest:  # dummies
                drafted, passes, accepted, emitted = gamma, 0, 0, 1
            longest = context + start + 1 + drafted  # of this step, which drafts for the next
            seconds = round_seconds(
                costs, sampled, context + start, begin + start, lag, passes, drafted, emitted
            )
            cached = 1 if (word >> 24) < accepted else 0
            advance(window, state, drafted, accepted, cached)
            round_ = ReplayedRound(start, drafted, accepted, emitted, passes, lag, drafted, NO_BIN)
            used, total = add_round(sums, used, i, round_, seconds, total)
            lag = emitted - min(accepted, passes - 1) if passes > 0 else lag + emitted
            start += emitted
        add_request(sums, i, length, total)
    return used
