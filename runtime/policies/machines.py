"""The windows' state machines on plain arrays: the one implementation, compiled, that the runtime and the replay kernel call.

What the arrays hold is decided by :func:`runtime.policies.windows.compile_window`; by kind:

- all: ``ints[0:3]`` = gamma_max, gamma_min, first window. ``state[0]`` = the window of the next round.
- heuristic: ``ints[3]`` = whether it carries over requests.
- analytic: ``ints[3:7]`` = history, estimator, costs are recent, count. ``floats`` = count numbers, then acc_max. Numbers
  are the betas at which equation 1's argmax moves up (as odds), or, with recent costs, b_p(g) by g, known up to scale.
  ``table`` = [number, g] accepted tokens that equation 10 expects at those betas of a round that drafted g (or, with recent
  costs, equation 12 at its knots [knot, g]). ``state`` = [gamma, slot, accepted, rejections, rounds with drafts, draft ps,
  drafted, verify ps, numbers at drafted, rounds seen], the ring history x (drafted, accepted, draft ps, verify ps), then
  count sums of ``table`` (or, with recent costs, rounds by drafted).
- q_learning: ``ints[3:7]`` = memory, learns, rewards speed, generator key. ``floats`` = rate, discount, epsilon. ``table``'s
  last row = speed reward per emitted token by drafted. ``state`` = [gamma, draws, state its window was chosen in (-1: none),
  last windows], then Q.

Whole numbers, and times in picoseconds, are float64 integers below 2^53: running sums are exact and never drift.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

import runtime.policies.estimators as estimators
from runtime.policies.estimators import best_window_scalar, equation_11_root, equation_12_inverse
from runtime.policies.jit import compiled

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FIXED: Final = 0
ANALYTIC: Final = 1
FSM: Final = 2
CACHE_FSM: Final = 3
Q_LEARNING: Final = 4
HEURISTIC: Final = 5

RATIO: Final = 0
EXACT: Final = 1
TABLE: Final = 2

PS: Final = 1e12
"""Picoseconds in a second."""
EVIDENCE_SCALE: Final = 2.0**32
"""Expected acceptances are summed as whole multiples of 2^-32."""

GAMMA_MAX: Final = 0
GAMMA_MIN: Final = 1
FIRST: Final = 2
CARRIES: Final = 3
HISTORY: Final = 3
ESTIMATOR: Final = 4
RECENT: Final = 5
COUNT: Final = 6
RING: Final = 10
MEMORY: Final = 3
LEARNS: Final = 4
SPEED: Final = 5
KEY: Final = 6
Q_START: Final = 4


@compiled(inline=True)
def mix64(x: np.uint64) -> np.uint64:
    """splitmix64's finaliser: a bijection of 64-bit words whose every output bit depends on every input bit."""
    z = np.uint64(x)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled(inline=True)
def hash_uniform(key: int, counter: int) -> float:
    """A number in [0, 1) that is a pure function of both arguments: splitmix64's ``counter``-th output from ``key``."""
    z = np.uint64(key) + np.uint64(counter + 1) * np.uint64(0x9E3779B97F4A7C15)
    return np.float64(mix64(z) >> np.uint64(11)) * 1.1102230246251565e-16


@compiled(inline=True)
def reset(kind: int, ints: IntArray, state: FloatArray) -> None:
    """Starts a request: resets, in place, what does not carry over."""
    if kind == ANALYTIC:
        state[1:] = 0.0
    elif kind == Q_LEARNING:
        state[2] = -1.0  # the first window is given, not chosen, so nothing is learned of it
        last = 0
        for _ in range(ints[MEMORY]):
            last = last * (ints[GAMMA_MAX] + 1) + ints[FIRST]
        state[3] = last
    elif kind == HEURISTIC and ints[CARRIES] == 1:
        return
    state[0] = ints[FIRST]


@compiled(estimators, inline=True)
def advance(
    kind: int,
    ints: IntArray,
    floats: FloatArray,
    table: FloatArray,
    state: FloatArray,
    drafted: int,
    accepted: int,
    cached: int,
    draft_s: float,
    verify_s: float,
) -> None:
    """Learns, in place, from one round, and puts the next round's window into ``state[0]``."""
    if kind == FSM:
        step = 1 if accepted == drafted else -1
        state[0] = min(max(int(state[0]) + step, ints[GAMMA_MIN]), ints[GAMMA_MAX])
    elif kind == HEURISTIC:
        gamma = int(state[0])
        state[0] = min(gamma + 2 if accepted == drafted else max(1, gamma - 1), ints[GAMMA_MAX])
    elif kind == CACHE_FSM:
        # With nothing drafted there is no accepted token to look up; up by one, or window 0 would be final.
        step = 1 if drafted == 0 else (1 if cached > 0 else -1) + (1 if accepted == drafted else 0)
        state[0] = min(max(int(state[0]) + step, ints[GAMMA_MIN]), ints[GAMMA_MAX])
    elif kind == ANALYTIC:
        _advance_analytic(ints, floats, table, state, drafted, accepted, draft_s, verify_s)
    elif kind == Q_LEARNING:
        _advance_q_learning(ints, floats, table, state, drafted, accepted)


@compiled(estimators, inline=True)
def _advance_analytic(
    ints: IntArray,
    floats: FloatArray,
    table: FloatArray,
    state: FloatArray,
    drafted: int,
    accepted: int,
    draft_s: float,
    verify_s: float,
) -> None:
    """Equation 1 at the beta of the last rounds, without computing either: the argmax is a staircase in beta, and beta-hat
    exceeds a step iff more tokens were accepted than the estimator's law expects at that step, so counting the steps
    exceeded gives the window."""
    history, estimator, recent, count = ints[HISTORY], ints[ESTIMATOR], ints[RECENT] == 1, ints[COUNT]
    slot = int(state[1])
    state[1] = 0 if slot + 1 == history else slot + 1
    at, sums = RING + 4 * slot, RING + 4 * history
    gone_drafted, gone_accepted = int(state[at]), int(state[at + 1])  # an empty slot reads as a round that drafted nothing
    state[at] = drafted
    state[at + 1] = accepted
    total = state[2] + (accepted - gone_accepted)
    rejections = state[3] + ((1 if accepted < drafted else 0) - (1 if gone_accepted < gone_drafted else 0))
    evidence = state[4] + ((1 if drafted > 0 else 0) - (1 if gone_drafted > 0 else 0))
    state[2], state[3], state[4] = total, rejections, evidence
    if recent:
        _advance_clock(history, floats, state, at, drafted, gone_drafted, draft_s, verify_s)
        state[sums + drafted] += 1.0
        state[sums + gone_drafted] -= 1.0  # may leave entry 0 too low, which nothing reads
        state[0] = ints[FIRST] if evidence == 0.0 else _recent_window(ints, floats, table, state)
        return
    above = 0
    if estimator == RATIO:
        for k in range(count):
            above += 1 if total > floats[k] * rejections else 0
    else:
        for k in range(count):
            expected = state[sums + k] + (table[k, drafted] - table[k, gone_drafted])
            state[sums + k] = expected
            above += 1 if total * EVIDENCE_SCALE > expected else 0
    state[0] = ints[FIRST] if evidence == 0.0 else ints[GAMMA_MIN] + above


@compiled(inline=True)
def _advance_clock(
    history: int,
    floats: FloatArray,
    state: FloatArray,
    at: int,
    drafted: int,
    gone_drafted: int,
    draft_s: float,
    verify_s: float,
) -> None:
    draft_ps = np.rint(draft_s * PS) if drafted > 0 else 0.0
    verify_ps = np.rint(verify_s * PS)
    state[5] += draft_ps - state[at + 2]
    state[6] += drafted - gone_drafted
    state[7] += verify_ps - state[at + 3]
    state[8] += floats[drafted]
    if state[9] == history:
        state[8] -= floats[gone_drafted]
    else:
        state[9] += 1.0
    state[at + 2] = draft_ps
    state[at + 3] = verify_ps


@compiled(estimators)
def _recent_window(ints: IntArray, floats: FloatArray, table: FloatArray, state: FloatArray) -> int:
    """Equation 1 with a_q = mean draft time per drafted token and b_p(g) = known shape x its mean ratio to the clock,
    recently."""
    gamma_max, estimator = ints[GAMMA_MAX], ints[ESTIMATOR]
    if state[7] <= 0.0:
        return int(ints[FIRST])  # no clock ran: nothing to weigh
    if estimator == RATIO:
        beta = state[2] / (state[2] + state[3])
    else:
        counts = state[RING + 4 * ints[HISTORY] :]
        if estimator == EXACT:
            beta = equation_11_root(counts, state[2], gamma_max)
        else:
            beta = equation_12_inverse(counts, state[2], table, gamma_max)
    beta = min(beta, floats[ints[COUNT]])
    return best_window_scalar(beta, state[5] / state[6], floats, state[7] / state[8], ints[GAMMA_MIN], gamma_max)


@compiled(inline=True)
def _advance_q_learning(
    ints: IntArray, floats: FloatArray, table: FloatArray, state: FloatArray, drafted: int, accepted: int
) -> None:
    """Algorithm 2: the reward of the window just run, then the next action. Q(s,a) += rate (r + discount max Q(s',.) - Q(s,a)).

    Greedy ties go to the smallest window; with probability epsilon, while learning, the action is drawn evenly.
    """
    size, actions = ints[GAMMA_MAX] + 1, ints[GAMMA_MAX] - ints[GAMMA_MIN] + 1
    gamma, before, last = int(state[0]), int(state[2]), int(state[3])
    now = gamma if ints[MEMORY] == 1 else (last % size) * size + gamma
    row = Q_START + now * actions
    best = _best_action(state, row, actions)
    if ints[LEARNS] == 1 and before >= 0:
        if ints[SPEED] == 1:
            reward = (accepted + 1) * table[len(table) - 1, drafted]
        else:
            reward = accepted / drafted if drafted > 0 else 0.0
        cell = Q_START + before * actions + gamma - ints[GAMMA_MIN]
        state[cell] += floats[0] * (reward + floats[1] * state[row + best] - state[cell])
        if before == now:
            best = _best_action(state, row, actions)
    draws = int(state[1])
    if ints[LEARNS] == 1 and hash_uniform(ints[KEY], 2 * draws) < floats[2]:
        best = int(hash_uniform(ints[KEY], 2 * draws + 1) * actions)
    state[0] = ints[GAMMA_MIN] + best
    state[1] = draws + 1
    state[2] = now
    state[3] = now


@compiled(inline=True)
def _best_action(state: FloatArray, row: int, actions: int) -> int:
    best, value = 0, state[row]
    for a in range(1, actions):
        if state[row + a] > value:
            best, value = a, state[row + a]
    return best
