"""Every window of the policy document as a small state machine, compiled once and called by both worlds.

A :class:`CompiledWindow` is a frozen value; its state is one flat float64 array that the loop carries (copy it to fork).
``state[0]`` is the window of the next round: choosing reads it, observing a round replaces it. The machines themselves are in
:mod:`runtime.policies.machines`.

A round, as the runtime, the oracle and the replay kernel share it (s: 0-based position of the next output token; L: tokens
of the text):

- gamma = min(choose, max_new_tokens - s - 1). With gamma = 0 nothing is drafted; else :mod:`runtime.policies.stops` says how
  the chain ends, how many tokens are *drafted* and how many *draft steps* that took.
- verified = drafted + 1. accepted = leading drafted tokens equal to the text's continuation; emitted = min(accepted + 1, L - s);
  accepted = min(accepted, emitted). The next start is s + emitted.
- lag, the tokens the draft reads before its first proposal, is 1 in a request's first round; after a round with draft steps it is
  emitted - min(accepted, draft_steps - 1), after one without it grows by emitted.
- cached = accepted tokens that occur in the prompt or in the output before s.
- observe(drafted, accepted, cached, draft seconds, verify seconds) after *every* round, a request's last included.

Whenever accepted == drafted the round counts as fully accepted, also when nothing was drafted; that is how a machine leaves
window 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import runtime.policies.estimators as estimators
from runtime.policies.document import (
    AnalyticWindow,
    CacheFsmWindow,
    FixedWindow,
    FsmWindow,
    HeuristicWindow,
    QLearningWindow,
    Window,
)
from runtime.policies.machines import (
    ANALYTIC,
    CACHE_FSM,
    EVIDENCE_SCALE,
    EXACT,
    FIRST,
    FIXED,
    FSM,
    GAMMA_MAX,
    GAMMA_MIN,
    HEURISTIC,
    PS,
    Q_LEARNING,
    Q_START,
    RATIO,
    RING,
    TABLE,
    advance,
    mix64,
    reset,
)
from traces.errors import PolicyError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WindowCosts:
    """Definition 1 of the on-the-fly paper: ``draft_step_s`` is a_q, ``verify_s[g]`` is b_p(g) for g = 0..gamma_max, in
    seconds."""

    draft_step_s: float
    verify_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (self.draft_step_s >= 0 and all(v > 0 for v in self.verify_s)):
            raise PolicyError("the latency profile holds a verification of no duration; run `profile` again")


@dataclass(frozen=True, eq=False)
class CompiledWindow:
    """A window as plain arrays, for compiled code.

    ``ints`` int64, ``floats`` float64, ``table`` float64 [rows, columns] mean what ``kind`` says. ``state_size`` is the
    length of its state. ``carries``: the state outlives a request (only then does the order of requests matter).
    ``reads_cache``: it wants ``cached`` (others may be given 0; only whether it is above 0 counts). ``reads_clock``: it
    wants the two durations.
    """

    kind: int
    ints: IntArray
    floats: FloatArray
    table: FloatArray
    state_size: int
    carries: bool = False
    reads_cache: bool = False
    reads_clock: bool = False
    gamma_max: int = 0


def compile_window(window: Window, costs: WindowCosts | None = None, *, q_table: FloatArray | None = None) -> CompiledWindow:
    """Resolves a window's parameters, costs and stored table into arrays.

    ``costs`` must cover gamma = 0..gamma_max. Raises PolicyError if the window needs costs, or names an artifact, and they
    are not given. ``q_table`` (see :func:`export_q_table`) is what a ``q_learning`` window starts from.
    """
    if isinstance(window, FixedWindow):
        return _plain(FIXED, window.gamma, window.gamma, window.gamma)
    if isinstance(window, FsmWindow):
        return _plain(FSM, window.gamma_max, window.gamma_min, window.first)
    if isinstance(window, CacheFsmWindow):
        return _plain(CACHE_FSM, window.gamma_max, window.gamma_min, window.first, reads_cache=True)
    if isinstance(window, HeuristicWindow):
        return _plain(HEURISTIC, window.gamma_max, 1, window.first, carries=not window.transient)
    if isinstance(window, AnalyticWindow):
        return _compile_analytic(window, costs)
    return _compile_q_learning(window, costs, q_table)


def _plain(
    kind: int, gamma_max: int, gamma_min: int, first: int, *, carries: bool = False, reads_cache: bool = False
) -> CompiledWindow:
    ints = np.array([gamma_max, min(gamma_min, gamma_max), first, int(carries)], dtype=np.int64)
    return CompiledWindow(kind, ints, np.zeros(1), np.zeros((1, 1)), 1, carries, reads_cache, gamma_max=gamma_max)


def _need_costs(costs: WindowCosts | None, kind: str, gamma_max: int) -> WindowCosts:
    if costs is None:
        raise PolicyError(f"window.{kind} needs measured costs: run `profile` for this pair and device first")
    if len(costs.verify_s) <= gamma_max:
        raise PolicyError(f"window.{kind} needs verification costs up to gamma {gamma_max}, got up to {len(costs.verify_s) - 1}")
    return costs


def _compile_analytic(window: AnalyticWindow, costs: WindowCosts | None) -> CompiledWindow:
    size, recent = window.gamma_max + 1, window.costs == "recent"
    estimator = {"ratio": RATIO, "exact": EXACT, "table": TABLE}[window.estimator]
    table = np.zeros((1, 1))
    if recent:
        # Without a profile b_p is taken to be the same for every window, as recent rounds alone cannot tell.
        shape = np.ones(size)
        if costs is not None:
            shape = np.round(np.array(_need_costs(costs, "analytic", window.gamma_max).verify_s[:size]) * PS)
        if estimator == TABLE:
            table = estimators.truncated_excess(window.gamma_max, np.linspace(0.0, 1.0, estimators.TABLE_KNOTS))
        numbers, count = shape, size
    else:
        known = _need_costs(costs, "analytic", window.gamma_max)
        round_s = np.arange(size) * known.draft_step_s + np.array(known.verify_s[:size])
        betas = estimators.window_thresholds(round_s, window.gamma_min, window.acc_max)
        count = len(betas)
        numbers = betas / (1.0 - betas)
        # beta-hat > beta_k iff more was accepted than the estimator's law expects at beta_k, for it rises with beta.
        if estimator != RATIO:
            excess = estimators.truncated_excess if estimator == EXACT else estimators.tabulated_excess
            table = np.round(excess(window.gamma_max, betas) * EVIDENCE_SCALE)
    ints = [window.gamma_max, window.gamma_min, window.first, window.history, estimator, int(recent), count]
    return CompiledWindow(
        ANALYTIC,
        np.array(ints, dtype=np.int64),
        np.append(numbers, window.acc_max),
        np.ascontiguousarray(table),
        RING + 4 * window.history + count,
        reads_clock=recent,
        gamma_max=window.gamma_max,
    )


def _compile_q_learning(window: QLearningWindow, costs: WindowCosts | None, q_table: FloatArray | None) -> CompiledWindow:
    if window.gamma_min > window.gamma_max:
        raise PolicyError(f"window.gamma_min {window.gamma_min} exceeds gamma_max {window.gamma_max}")
    if window.artifact is not None and q_table is None:
        raise PolicyError(f"window.artifact {window.artifact!r}: no such Q-table is stored here")
    size, actions = window.gamma_max + 1, window.gamma_max - window.gamma_min + 1
    shape = (size**window.memory, actions)
    start = np.zeros(shape) if q_table is None else _fitting(q_table, shape, f"window.artifact: the Q-table {window.artifact or 'given'}")
    table = np.zeros((shape[0] + 1, max(actions, size)))
    table[:-1, :actions] = start
    if window.reward == "speed":
        known = _need_costs(costs, "q_learning", window.gamma_max)
        verify = np.array(known.verify_s[:size])
        table[-1, :size] = verify[0] / (np.arange(size) * known.draft_step_s + verify)
    key = int(np.uint64(mix64(np.uint64(window.seed % 2**64))).astype(np.int64))
    ints = [
        window.gamma_max,
        window.gamma_min,
        window.first,
        window.memory,
        int(window.learn),
        int(window.reward == "speed"),
        key,
    ]
    return CompiledWindow(
        Q_LEARNING,
        np.array(ints, dtype=np.int64),
        np.array([window.learning_rate, window.discount, window.epsilon]),
        table,
        Q_START + shape[0] * actions,
        carries=True,
        gamma_max=window.gamma_max,
    )


def init_state(w: CompiledWindow) -> FloatArray:
    """A new session's state, float64 [state_size], ready for its first request."""
    state = np.zeros(w.state_size)
    state[0] = w.ints[FIRST]
    if w.kind == Q_LEARNING:
        load_q_table(w, state, w.table[:-1, : _actions(w)])
    reset(w.kind, w.ints, state)
    return state


def start_request(w: CompiledWindow, state: FloatArray) -> None:
    """Resets, in place, what does not carry over from request to request."""
    reset(w.kind, w.ints, state)


def choose(w: CompiledWindow, state: FloatArray) -> int:
    """The window of the next round, 0..gamma_max. Asking does not change the state."""
    return int(state[0])


def observe(
    w: CompiledWindow,
    state: FloatArray,
    drafted: int,
    accepted: int,
    cached: int = 0,
    draft_s: float = 0.0,
    verify_s: float = 0.0,
) -> None:
    """Tells the window, in place, what the round did. 0 <= accepted <= drafted <= gamma_max."""
    advance(w.kind, w.ints, w.floats, w.table, state, drafted, accepted, cached, draft_s, verify_s)


class WindowController:
    """A compiled window and its state, for one decoding session."""

    def __init__(self, window: CompiledWindow, state: FloatArray | None = None) -> None:
        self.window = window
        self.state = init_state(window) if state is None else state

    def start_request(self) -> None:
        """Resets what does not carry over from request to request."""
        reset(self.window.kind, self.window.ints, self.state)

    def choose(self) -> int:
        """The window of the next round, 0..gamma_max."""
        return int(self.state[0])

    def observe(self, drafted: int, accepted: int, cached: int = 0, draft_s: float = 0.0, verify_s: float = 0.0) -> None:
        """Learns from a round. 0 <= accepted <= drafted <= gamma_max; seconds as measured (read only by ``recent`` costs)."""
        w = self.window
        advance(w.kind, w.ints, w.floats, w.table, self.state, drafted, accepted, cached, draft_s, verify_s)

    def fork(self) -> WindowController:
        """An independent copy: same future if it sees the same rounds."""
        return WindowController(self.window, self.state.copy())


def _actions(w: CompiledWindow) -> int:
    return int(w.ints[GAMMA_MAX] - w.ints[GAMMA_MIN] + 1)


def export_q_table(w: CompiledWindow, state: FloatArray) -> FloatArray:
    """The learned table, a copy, float64 [(gamma_max + 1) ** memory, gamma_max - gamma_min + 1].

    Row: the last windows as digits in base gamma_max + 1, latest last. Column a: window gamma_min + a. PolicyError if w does
    not learn one.
    """
    if w.kind != Q_LEARNING:
        raise PolicyError("only a q_learning window has a Q-table")
    return state[Q_START:].reshape(-1, _actions(w)).copy()


def load_q_table(w: CompiledWindow, state: FloatArray, q_table: FloatArray | Sequence[Sequence[float]]) -> None:
    """Puts a table of :func:`export_q_table`'s shape into a state, in place; it governs from the next observation on."""
    if w.kind != Q_LEARNING:
        raise PolicyError("only a q_learning window takes a Q-table")
    state[Q_START:] = _fitting(q_table, ((len(state) - Q_START) // _actions(w), _actions(w)), "the Q-table").ravel()


def _fitting(q_table: npt.ArrayLike, shape: tuple[int, int], what: str) -> FloatArray:
    """A Q-table as float64 [states, actions]. Raises PolicyError where it has another shape than ``shape``, or entries that are no finite
    numbers, of which the largest could not be told."""
    table = np.asarray(q_table)
    if table.shape != shape:
        raise PolicyError(f"{what} has shape {table.shape}, this window needs {shape}")
    if table.dtype.kind not in "fiu" or not np.isfinite(table).all():
        raise PolicyError(f"{what} must hold finite numbers; learn another (`simulate --keep-q-table`)")
    return table.astype(np.float64)
