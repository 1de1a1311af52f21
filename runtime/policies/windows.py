"""Every window of the policy document as a small state machine, compiled once and called by the
runtime and by replay alike.

A :class:`CompiledWindow` is a frozen value; a :class:`WindowState` is what changes: :func:`reset`
starts a request, :func:`advance` learns from a round and leaves the next round's window in
``state.gamma``.

A round, as the runtime, the oracle and the replay kernel share it (s: 0-based position of the next
output token; L: tokens of the text):

- gamma = min(state.gamma, max_new_tokens - s - 1). With gamma = 0 nothing is drafted; else
  :mod:`runtime.policies.stops` says how the chain ends, how many tokens are *drafted* and how many
  *draft steps* that took.
- verified = drafted + 1. accepted = leading drafted tokens equal to the text's continuation;
  emitted = min(accepted + 1, L - s); accepted = min(accepted, emitted). The next start is s +
  emitted.
- lag, the tokens the draft reads before its first proposal, is 1 in a request's first round; after
  a round with draft steps it is emitted - min(accepted, draft_steps - 1), after one without it
  grows by emitted.
- cached = accepted tokens that occur in the prompt or in the output before s.
- advance is called after *every* round, a request's last included.

Whenever accepted == drafted the round counts as fully accepted, also when nothing was drafted; that
is how a machine leaves window 0."""

from __future__ import annotations

import copy
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies import on_the_fly
from spectune.runtime.policies.document import (
    AnalyticWindow,
    ByLoadWindow,
    CacheFsmWindow,
    FixedWindow,
    HeuristicWindow,
    QLearningWindow,
    Window,
)
from spectune.runtime.policies.heuristic import heuristic
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.on_the_fly import FloatArray, IntArray, WindowLimits
from spectune.runtime.policies.splitmix import mix64
from spectune.traces.errors import PolicyError

FIXED: Final = 0
ANALYTIC: Final = 1
FSM: Final = 2
CACHE_FSM: Final = 3
Q_LEARNING: Final = 4
HEURISTIC: Final = 5


_NO_LEARNING: Final = on_the_fly.QLearningRule(1, False, 0, 0.0, 0.0, 0.0, np.zeros(1))


class CompiledWindow(NamedTuple):
    """A window's parameters, alike in Python and compiled code.

    ``carries``: the state outlives a request (only then does the order of requests matter).
    ``reads_cache``: it wants to know how many accepted tokens are cached (others may be given 0;
    only whether it is above 0 counts). Method 1 has ``history``, the rounds that are remembered,
    and ``expected`` (:func:`expected_acceptances`); method 4 ``q_learning`` and ``q`` float64
    [states, actions], the Q-table that a session starts from: zeros."""

    kind: int
    limits: WindowLimits
    carries: bool = False
    reads_cache: bool = False
    history: int = 0
    expected: npt.NDArray[np.int64] = np.zeros((1, 0), np.int64)
    q_learning: on_the_fly.QLearningRule = _NO_LEARNING
    q: FloatArray = np.zeros((0, 1))


class WindowState(NamedTuple):
    """What a window has learned: ``gamma`` int64 [1], the window of the next round, and what its
    kind needs beside."""

    gamma: IntArray
    history: on_the_fly.History
    learner: on_the_fly.Learner

    def fork(self) -> WindowState:
        """An independent copy: the same future if it sees the same rounds."""
        return copy.deepcopy(self)


@compiled(inline=True)
def reset(window: CompiledWindow, state: WindowState) -> None:
    """Starts a request: forgets, in place, what does not carry over from the one before."""
    if window.kind == HEURISTIC and window.carries:
        return
    state.gamma[0] = window.limits.first
    if window.kind == ANALYTIC:
        on_the_fly.forget(state.history)
    elif window.kind == Q_LEARNING:
        on_the_fly.begin_learning(window.q_learning, window.limits, state.learner)


@compiled(inline=True)
def advance(
    window: CompiledWindow,
    state: WindowState,
    num_drafted: int,
    num_accepted: int,
    num_cached: int = 0,
) -> None:
    """Learns, in place, from one round with 0 <= num_accepted <= num_drafted <= GAMMA_LIMIT (as
    HeteroSpec drafts beyond the window)."""
    kind, limits, gamma = window.kind, window.limits, int(state.gamma[0])
    if kind == FIXED:
        return
    if kind == FSM:
        gamma = on_the_fly.fsm(gamma, num_drafted, num_accepted)
    elif kind == CACHE_FSM:
        gamma = on_the_fly.cache_fsm(gamma, num_drafted, num_accepted, num_cached)
    elif kind == HEURISTIC:
        gamma = heuristic(gamma, num_drafted, num_accepted)
    elif kind == ANALYTIC:
        gamma = on_the_fly.analytic(
            window.expected, limits, state.history, num_drafted, num_accepted
        )
    elif kind == Q_LEARNING:
        gamma = on_the_fly.q_learning(
            window.q_learning, limits, state.learner, gamma, num_drafted, num_accepted
        )
    state.gamma[0] = min(max(gamma, limits.gamma_min), limits.gamma_max)


def init_state(window: CompiledWindow) -> WindowState:
    """A new session's state, ready for its first request."""
    sizes = window.history, window.history, 3, window.expected.shape[1]
    history = on_the_fly.History(*(np.zeros(size, np.int64) for size in sizes))
    learner = on_the_fly.Learner(np.zeros(1, on_the_fly.LEARNED), window.q.copy())
    state = WindowState(np.array([window.limits.first]), history, learner)
    if window.kind == Q_LEARNING:
        on_the_fly.begin_learning(window.q_learning, window.limits, state.learner)
    return state


def compile_window(window: Window, round_s: FloatArray | None = None) -> CompiledWindow:
    """Resolves a window's parameters and costs.

    ``round_s``: seconds of a round by its window, at least for 0..gamma_max
    (:func:`runtime.costs.window_costs`). Raises PolicyError where the window needs costs and there
    are none."""
    assert not isinstance(window, ByLoadWindow)  # a table of constants, each compiled by itself
    if isinstance(window, FixedWindow):
        return CompiledWindow(FIXED, WindowLimits(window.gamma, window.gamma, window.gamma))
    if isinstance(window, HeuristicWindow):
        limits = WindowLimits(1, window.gamma_max, window.first)
        return CompiledWindow(HEURISTIC, limits, carries=not window.transient)
    limits = WindowLimits(window.gamma_min, window.gamma_max, window.first)
    if isinstance(window, AnalyticWindow):
        expected = on_the_fly.expected_acceptances(window, _weighed(window, round_s))
        return CompiledWindow(ANALYTIC, limits, history=window.history, expected=expected)
    if isinstance(window, QLearningWindow):
        rewards, by_speed = np.zeros(1), window.reward == "speed"
        if by_speed:
            round_s = _weighed(window, round_s)
            rewards = round_s[0] / round_s
        key = int(np.uint64(mix64(np.uint64(window.seed % 2**64))).astype(np.int64))
        weights = window.learning_rate, window.discount, window.epsilon
        rule = on_the_fly.QLearningRule(window.memory, by_speed, key, *weights, rewards)
        # A row for the last windows as digits in base gamma_max + 1, latest last.
        states = (window.gamma_max + 1) ** window.memory
        table = np.zeros((states, window.gamma_max - window.gamma_min + 1))
        return CompiledWindow(Q_LEARNING, limits, q_learning=rule, q=table, carries=True)
    if isinstance(window, CacheFsmWindow):
        return CompiledWindow(CACHE_FSM, limits, reads_cache=True)
    return CompiledWindow(FSM, limits)


def _weighed(window: AnalyticWindow | QLearningWindow, round_s: FloatArray | None) -> FloatArray:
    """The seconds of rounds that a window weighs. Raises PolicyError where they are not known."""
    if round_s is None:
        raise PolicyError(
            f"window.{window.kind} needs a latency profile of this pair on this hardware and in "
            "this dtype: run `profile` here first, with the same device and dtype"
        )
    return round_s[: window.gamma_max + 1]
