"""On-the-fly adaptation of speculative decoding, section 4: windows that follow what was accepted.
How likely the next drafted token is to be accepted, and which window that speaks for (methods 1 to
4; equations 1, 2 and 9 to 12; appendix B).

Two estimates of beta = Acc(x_t | X_<t) from rounds that drafted g_i tokens and had V_i accepted:
equation 2, sum V / (sum V + rejections); and equation 11, where equation 10's likelihood of y = V +
1 is largest (1 where it has no root below; callers cap it). Equation 12, which the paper tabulates,
is equation 11 solved for mean(y). docs/papers.md, item 5, has their biases and what is misprinted.
Where windows differ within the history, equation 11 becomes sum_i y_i = sum_i mean(g_i, beta), the
same likelihood pooled. Sums are whole numbers, so that nothing drifts."""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from spectune.runtime.policies.blocks import (
    GAMMA_LIMIT,
    AdaptiveWindow,
    Gamma,
    Probability,
    Search,
)
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.splitmix import hash_uniform

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]

EVIDENCE_SCALE: Final = 2**32
"""Expected acceptances are summed as whole multiples of 2^-32."""


class AnalyticWindow(AdaptiveWindow):
    """The window that maximises equation 1 of the on-the-fly paper, beta estimated over the last
    ``history`` rounds.

    ``estimator``: ``ratio`` is equation 2, ``exact`` the maximum-likelihood root of equation 11.
    a_q and b_p(gamma) come from the latency profile, so that a window replays exactly. After a
    history of windows 0 ``gamma_initial`` is tried anew."""

    kind: Literal["analytic"] = "analytic"
    history: Annotated[int, Field(ge=1, le=256), Search(2, 64, log=True)] = 6
    acc_max: Annotated[float, Field(gt=0.0, lt=1.0), Search(0.8, 0.995)] = 0.98
    gamma_min: Annotated[Gamma, Search(0, 2)] = 0
    estimator: Annotated[Literal["ratio", "exact"], Search(choices=("ratio", "exact"))] = "ratio"

    @model_validator(mode="after")
    def _can_begin(self) -> Self:
        if self.gamma_initial == 0:
            raise ValueError(
                "gamma_initial 0 would never draft, and so never learn how much is accepted; use "
                "at least 1"
            )
        return self


class FsmWindow(AdaptiveWindow):
    """A saturating counter (on-the-fly paper, method 2): gamma + 1 if every drafted token was
    accepted, else gamma - 1."""

    kind: Literal["fsm"] = "fsm"
    gamma_min: Annotated[Gamma, Search(0, 2)] = 0


class CacheFsmWindow(AdaptiveWindow):
    """The cache-enabled state machine (method 3): gamma + 1 if an accepted token is in the token
    cache (prompt and text before the round), else gamma - 1; and 1 more if all drafted tokens were
    accepted."""

    kind: Literal["cache_fsm"] = "cache_fsm"
    gamma_min: Annotated[Gamma, Search(0, 2)] = 0


class QLearningWindow(AdaptiveWindow):
    """Tabular Q-learning over windows (method 4, appendix B.4).

    State: the last ``memory`` windows; action: the next window; reward: the share of drafted tokens
    accepted (``accepted``) or the expected speed-up of what was emitted over its cost by the
    profile (``speed``). Epsilon-greedy with a counter-based generator seeded by ``seed``; the table
    is carried from request to request within a session."""

    kind: Literal["q_learning"] = "q_learning"
    seed: Annotated[int, Field(ge=0)] = 0
    memory: Annotated[Literal[1, 2], Search(choices=(1, 2))] = 1
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0), Search(0.02, 0.5, log=True)] = 0.1
    discount: Annotated[float, Field(ge=0.0, lt=1.0), Search(0.0, 0.95)] = 0.9
    epsilon: Annotated[Probability, Search(0.005, 0.2, log=True)] = 0.1
    reward: Annotated[Literal["accepted", "speed"], Search(choices=("accepted", "speed"))] = (
        "accepted"
    )
    gamma_min: Gamma = 1


class WindowLimits(NamedTuple):
    """The windows that may be chosen, and the one of a request's first round."""

    gamma_min: int
    gamma_max: int
    first: int


# ---------------------------------------------------------------------------------- methods 2 and 3


@compiled(inline=True)
def fsm(gamma: int, num_drafted: int, num_accepted: int) -> int:
    """Method 2: :class:`FsmWindow`'s next window, before its limits."""
    return gamma + 1 if num_accepted == num_drafted else gamma - 1


@compiled(inline=True)
def cache_fsm(gamma: int, num_drafted: int, num_accepted: int, num_cached: int) -> int:
    """Method 3: :class:`CacheFsmWindow`'s next window, before its limits. With nothing drafted
    there is no accepted token to look up: one more, or window 0 would be final."""
    if num_drafted == 0:
        return gamma + 1
    gamma += 1 if num_cached > 0 else -1
    return gamma + 1 if num_accepted == num_drafted else gamma


# ----------------------------------------------------------------------------------------- method 1


class History(NamedTuple):
    """The last rounds and what is summed over them. ``rows`` and ``accepted`` int64 [history] are a
    ring: each round's row of :func:`expected_acceptances` and its accepted tokens, in which an
    empty slot reads as a round that drafted nothing. ``sums`` int64 [3]: the slot of the next
    round; accepted tokens; rounds that drafted anything. ``evidence`` int64 [n] sums the rows."""

    rows: IntArray
    accepted: IntArray
    sums: IntArray
    evidence: IntArray


@compiled(inline=True)
def forget(history: History) -> None:
    """Empties a history, in place."""
    history.rows[:] = 0
    history.accepted[:] = 0
    history.sums[:] = 0
    history.evidence[:] = 0


@compiled(inline=True)
def analytic(
    expected: IntArray, limits: WindowLimits, history: History, num_drafted: int, num_accepted: int
) -> int:
    """Method 1: equation 1 at the beta of the last rounds; ``expected`` is
    :func:`expected_acceptances`.

    Beta-hat itself is not computed. It exceeds a beta iff more tokens were accepted than the
    estimator expects there, and at given costs the argmax is a staircase in beta: the window is the
    number of steps exceeded."""
    sums, evidence, slot = history.sums, history.evidence, history.sums[0]
    row = num_drafted if num_accepted == num_drafted else num_drafted + GAMMA_LIMIT
    gone_row, gone_accepted = history.rows[slot], history.accepted[slot]
    history.rows[slot], history.accepted[slot] = row, num_accepted
    sums[0] = 0 if slot + 1 == len(history.rows) else slot + 1
    sums[1] += num_accepted - gone_accepted
    sums[2] += int(row > 0) - int(gone_row > 0)
    accepted, above = sums[1] * EVIDENCE_SCALE, 0  # read once: evidence is written below
    for k in range(len(evidence)):
        evidence[k] += expected[row, k] - expected[gone_row, k]
        above += int(accepted > evidence[k])
    return limits.gamma_min + above if sums[2] > 0 else limits.first


def expected_acceptances(window: AnalyticWindow, round_s: FloatArray) -> IntArray:
    """What a round adds to the accepted tokens expected at each of the n betas of
    :func:`window_thresholds`, in units of 1 / :data:`EVIDENCE_SCALE`: int64 [1 + 2 * GAMMA_LIMIT,
    n]. Row g is of g drafted tokens (HeteroSpec drafts beyond the window), all accepted, row
    GAMMA_LIMIT + g of g of which one was rejected. By equation 2, beta-hat exceeds beta where sum V
    exceeds beta / (1 - beta) for each rejection; by equation 11 where it exceeds the mean of
    equation 10."""
    betas = window_thresholds(round_s, window.gamma_min, window.acc_max)
    expected = np.zeros((1 + 2 * GAMMA_LIMIT, len(betas)))
    if window.estimator == "ratio":
        expected[1 + GAMMA_LIMIT :] = betas / (1.0 - betas)
    else:
        excess = truncated_excess(GAMMA_LIMIT, betas).T
        expected[:] = np.concatenate((excess, excess[1:]))
    return np.round(expected * EVIDENCE_SCALE).astype(np.int64)


def truncated_excess(gamma_max: int, betas: FloatArray) -> FloatArray:
    """mean(g, beta) - 1, the expected accepted tokens under equation 10 (equation 12 less 1),
    float64 [len(betas), gamma_max + 1].

    Column g is sum_i i beta^i / sum_i beta^i over i = 0..g: equation 12 without its cancellation
    near 1. Rises strictly with beta for g > 0."""
    tokens = np.arange(gamma_max + 1)
    powers = betas[:, None] ** tokens
    excess: FloatArray = np.cumsum(powers * tokens, axis=1) / np.cumsum(powers, axis=1)
    return excess


def window_thresholds(round_s: FloatArray, gamma_min: int, acc_max: float) -> FloatArray:
    """Betas at which equation 1's argmax moves up: it exceeds ``gamma_min + k`` iff beta >
    thresholds[k].

    ``round_s[g]`` = g a_q + b_p(g) for g = 0..gamma_max. For windows g < g' the ratio of expected
    emitted tokens Omega(beta, g') / Omega(beta, g) rises with beta, so each pair crosses once and
    the argmax (ties to the smaller window) is a staircase in beta. Only the steps reached at beta
    <= ``acc_max`` are returned, ascending."""
    windows = gamma_min + np.arange(len(round_s) - 1 - gamma_min)
    high = np.full(len(windows), float(acc_max))
    reached = best_window(high, round_s, gamma_min) > windows
    windows, high = windows[: reached.sum()], high[reached]
    low = np.zeros_like(high)
    for _ in range(60):
        middle = 0.5 * (low + high)
        above = best_window(middle, round_s, gamma_min) > windows
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return low


def best_window(betas: FloatArray, round_s: FloatArray, gamma_min: int = 0) -> IntArray:
    """Equation 1: the window in gamma_min..gamma_max with the most expected tokens a second at each
    beta (ties: the smallest)."""
    omega = np.cumsum(betas[:, None] ** np.arange(len(round_s)), axis=1)
    best: IntArray = gamma_min + (omega / round_s)[:, gamma_min:].argmax(axis=1)
    return best


# ----------------------------------------------------------------------------------------- method 4

LEARNED: Final = np.dtype([("draws", "i8"), ("state", "i8"), ("chosen_in", "i8")])
"""``draws`` of the generator so far; ``state``: the last windows as digits in base gamma_max + 1,
latest last; ``chosen_in``: the state in which the window now running was chosen, -1 where it was
given."""


class QLearningRule(NamedTuple):
    """Method 4. ``rewards`` float64 [gamma_max + 1]: the speed reward per emitted token by drafted
    ones."""

    memory: int
    rewards_speed: bool
    key: int
    rate: float
    discount: float
    epsilon: float
    rewards: FloatArray


class Learner(NamedTuple):
    """``now`` (:data:`LEARNED`) and ``q`` float64 [states, actions]; action a is the window
    gamma_min + a."""

    now: Records
    q: FloatArray


@compiled(inline=True)
def begin_learning(rule: QLearningRule, limits: WindowLimits, learner: Learner) -> None:
    """Starts a request, in place. Its first window is given, not chosen, so nothing is learned of
    it."""
    now = learner.now[0]
    now.chosen_in = -1
    now.state = limits.first if rule.memory == 1 else limits.first * (limits.gamma_max + 2)


@compiled(inline=True)
def q_learning(
    rule: QLearningRule,
    limits: WindowLimits,
    learner: Learner,
    gamma: int,
    num_drafted: int,
    num_accepted: int,
) -> int:
    """Algorithm 2: the reward of the window just run, then the next action. Q(s, a) += rate (r +
    discount max Q(s', .) - Q(s, a)).

    Greedy ties go to the smallest window; with probability epsilon the action is drawn evenly."""
    now, q = learner.now[0], learner.q
    size, actions = limits.gamma_max + 1, q.shape[1]
    before = int(now.chosen_in)
    state = gamma if rule.memory == 1 else (int(now.state) % size) * size + gamma
    best = _best_action(q, state)
    if before >= 0:
        if rule.rewards_speed:
            reward = (num_accepted + 1) * rule.rewards[min(num_drafted, limits.gamma_max)]
        else:
            reward = num_accepted / num_drafted if num_drafted > 0 else 0.0
        action = gamma - limits.gamma_min
        q[before, action] += rule.rate * (
            reward + rule.discount * q[state, best] - q[before, action]
        )
        if before == state:
            best = _best_action(q, state)
    if hash_uniform(rule.key, 2 * now.draws) < rule.epsilon:
        best = int(hash_uniform(rule.key, 2 * now.draws + 1) * actions)
    now.draws += 1
    now.state = now.chosen_in = state
    return limits.gamma_min + best


@compiled(inline=True)
def _best_action(q: FloatArray, state: int) -> int:
    best = 0
    for a in range(1, q.shape[1]):
        if q[state, a] > q[state, best]:
            best = a
    return best
