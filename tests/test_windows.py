"""Windows: the contract all of them keep, and each against a plain reference written from the
paper.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import minimize_scalar

from spectune.runtime.policies.document import Window, parse_policy
from spectune.runtime.policies.windows import (
    WindowState,
    advance,
    compile_window,
    init_state,
    reset,
)
from spectune.traces.errors import PolicyError

DRAFT_S, VERIFY_S = 0.31, [1.0 + 0.043 * g + 0.0007 * g * g for g in range(65)]
ROUND_S = np.array([g * DRAFT_S + verify_s for g, verify_s in enumerate(VERIFY_S)])

DOCUMENTS: list[dict[str, Any]] = [
    {"kind": "fixed", "gamma": 0},
    {"kind": "fixed", "gamma": 5},
    {"kind": "fsm"},
    {"kind": "fsm", "gamma_max": 1, "gamma_min": 1},
    {"kind": "fsm", "gamma_max": 6, "gamma_initial": 2, "gamma_min": 2},
    {"kind": "cache_fsm"},
    {"kind": "cache_fsm", "gamma_max": 12, "gamma_min": 1, "gamma_initial": 12},
    {"kind": "heuristic"},
    {"kind": "heuristic", "gamma_max": 7, "transient": True},
    {"kind": "heuristic", "gamma_max": 1, "gamma_initial": 0},
    {"kind": "q_learning"},
    {
        "kind": "q_learning",
        "gamma_max": 5,
        "memory": 2,
        "epsilon": 0.5,
        "learning_rate": 0.3,
        "seed": 7,
        "gamma_min": 0,
    },
    {"kind": "q_learning", "gamma_max": 3, "reward": "speed", "epsilon": 0.2, "seed": 2**70 + 5},
    {"kind": "q_learning", "gamma_max": 4, "epsilon": 1.0},
    *(
        {
            "kind": "analytic",
            "estimator": e,
            "history": h,
            "gamma_max": g,
            "gamma_min": m,
            "acc_max": a,
        }
        for e, (h, g, m, a) in itertools.product(
            ("ratio", "exact"),
            ((6, 8, 0, 0.98), (1, 4, 0, 0.9), (40, 20, 2, 0.99), (3, 1, 1, 0.5)),
        )
    ),
]


def window_of(document: dict[str, Any]) -> Window:
    return parse_policy({"draft": "small", "window": document}).window


def name_of(document: dict[str, Any]) -> str:
    return "-".join(str(v) for v in document.values())


every_window = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


class Machine:
    """A window and its state."""

    def __init__(
        self,
        document: dict[str, Any],
        state: WindowState | None = None,
        *,
        round_s: npt.NDArray[np.float64] | None = ROUND_S,
    ) -> None:
        self.window = compile_window(window_of(document), round_s)
        self.state = init_state(self.window) if state is None else state

    @property
    def gamma(self) -> int:
        return int(self.state.gamma[0])

    def reset(self) -> None:
        reset(self.window, self.state)

    def advance(self, *round_: Any) -> None:
        advance(self.window, self.state, *round_)


def content(state: WindowState) -> list[Any]:
    return [
        state.gamma.tolist(),
        *(a.tolist() for a in state.history),
        *(a.tolist() for a in state.learner),
    ]


def random_rounds(
    seed: int, count: int = 120
) -> Iterator[tuple[bool, float, float, float, float, float]]:
    """(new request?, four uniforms, acceptance) of each round: acceptance drifts, so that windows
    go up and down.
    """
    rng = np.random.default_rng(seed)
    for i in range(count):
        yield (
            i > 0 and rng.random() < 0.06,
            *rng.random(4).tolist(),
            float(0.55 + 0.44 * math.sin(i / 9)),
        )


def outcome_of(
    gamma: int, round_: tuple[bool, float, float, float, float, float]
) -> tuple[int, int, int]:
    """(drafted, accepted, cached) of a round with window ``gamma``: sometimes a stop or a budget
    cut it short."""
    _, a, b, c, d, beta = round_
    drafted = gamma if a < 0.7 else int(gamma * b)
    accepted = min(drafted, int(math.log(max(c, 1e-9)) / math.log(beta)))
    cached = int((accepted + 1) * d) if d < 0.6 else 0
    return drafted, accepted, min(cached, accepted)


# -- the contract ----------------------------------------------------------------------------------


def started(document: dict[str, Any]) -> Machine:
    """A window after fifty rounds."""
    m = Machine(document)
    for r in random_rounds(2, 50):
        m.advance(*outcome_of(m.gamma, r))
    return m


@every_window
def test_a_fork_has_the_same_future_and_leaves_the_original_alone(document: dict[str, Any]) -> None:
    m = started(document)
    before = content(m.state)
    one, two = (Machine(document, m.state.fork()) for _ in range(2))
    for r in random_rounds(3, 40):
        assert one.gamma == two.gamma
        step = outcome_of(one.gamma, r)
        one.advance(*step)
        two.advance(*step)
    assert content(one.state) == content(two.state)
    assert content(m.state) == before


@every_window
def test_a_new_request_forgets_all_but_what_carries(document: dict[str, Any]) -> None:
    m = started(document)
    learned = m.state.fork()
    m.reset()
    assert m.window.carries == (
        document["kind"] == "q_learning"
        or (document["kind"] == "heuristic" and "transient" not in document)
    )
    if not m.window.carries:
        assert content(m.state) == content(init_state(m.window))
    elif document["kind"] == "heuristic":
        assert content(m.state) == content(learned)
    else:
        assert np.array_equal(m.state.learner.q, learned.learner.q)
        assert m.gamma == window_of(document).first  # type: ignore[union-attr]


# -- references written from the paper -------------------------------------------------------------


class Reference(Protocol):
    def start(self) -> None: ...
    def allowed(self) -> set[int]:
        """Windows that are right now; more than one only where rounding may decide a tie."""

    def observe(self, drafted: int, accepted: int, cached: int) -> None: ...


class Stepper:
    """Methods 2 and 3, and transformers' schedule: gamma moves by a rule."""

    def __init__(self, window: Any) -> None:
        self.w = window
        self.gamma = window.gamma if window.kind == "fixed" else window.first

    def start(self) -> None:
        if self.w.kind != "fixed" and not (self.w.kind == "heuristic" and not self.w.transient):
            self.gamma = self.w.first

    def allowed(self) -> set[int]:
        return {self.gamma}

    def observe(self, drafted: int, accepted: int, cached: int) -> None:
        everything = accepted == drafted
        if self.w.kind == "fixed":
            return
        if self.w.kind == "heuristic":
            self.gamma = self.gamma + 2 if everything else max(1, self.gamma - 1)
        elif self.w.kind == "fsm":
            self.gamma += 1 if everything else -1
        elif drafted == 0:
            self.gamma += 1
        else:
            self.gamma += 1 if cached else -1
            if everything:
                self.gamma += 1
        low = 0 if self.w.kind == "heuristic" else self.w.gamma_min
        self.gamma = min(max(self.gamma, low), self.w.gamma_max)


class Analytic:
    """Method 1, step by step: estimate beta, evaluate equation 1 for every window, take the
    best.
    """

    def __init__(self, window: Any) -> None:
        self.w = window
        self.start()

    def start(self) -> None:
        self.rounds: deque[tuple[int, int]] = deque(maxlen=self.w.history)

    def observe(self, drafted: int, accepted: int, cached: int) -> None:
        self.rounds.append((drafted, accepted))

    def allowed(self) -> set[int]:
        pairs = [(g, v) for g, v in self.rounds if g > 0]
        if not pairs:
            return {self.w.first}
        beta = {"ratio": self.ratio, "exact": self.exact}[self.w.estimator](pairs)
        return self.best(min(self.w.acc_max, beta), DRAFT_S, VERIFY_S)

    def best(self, beta: float, a: float, b: list[float]) -> set[int]:
        """Equation 1's windows."""
        value = {
            g: sum(beta**i for i in range(g + 1)) / (g * a + b[g])
            for g in range(self.w.gamma_min, self.w.gamma_max + 1)
        }
        best = max(value.values())
        tolerance = (
            1e-6 if self.w.estimator == "exact" else 1e-9
        )  # the reference maximises a likelihood numerically
        return {g for g, v in value.items() if v >= best * (1 - tolerance)}

    @staticmethod
    def ratio(pairs: list[tuple[int, int]]) -> float:
        accepted = sum(v for _, v in pairs)
        return accepted / (accepted + sum(v < g for g, v in pairs))

    @staticmethod
    def exact(pairs: list[tuple[int, int]]) -> float:
        """Maximises the likelihood of equation 10 over beta, with y = accepted + 1."""

        def loss(beta: float) -> float:
            return -sum(
                math.log1p(-beta)
                + v * math.log(beta)
                - math.log(-math.expm1((g + 1) * math.log(beta)))
                for g, v in pairs
            )

        if not any(v for _, v in pairs):
            return 0.0
        return float(
            minimize_scalar(
                loss, bounds=(1e-12, 1 - 1e-9), method="bounded", options={"xatol": 1e-12}
            ).x
        )


class QLearner:
    """Method 4 with a dictionary for its table and Python's integers for its generator."""

    MASK = 2**64 - 1

    def __init__(self, window: Any) -> None:
        self.w = window
        self.q: dict[tuple[tuple[int, ...], int], float] = {}
        self.draws = 0
        self.start()

    def start(self) -> None:
        self.past = (self.w.first,) * self.w.memory
        self.chosen_in: tuple[int, ...] | None = None
        self.gamma = self.w.first

    def mix(self, z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & self.MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & self.MASK
        return z ^ (z >> 31)

    def uniform(self, counter: int) -> float:
        key = self.mix(self.w.seed & self.MASK)
        return (self.mix((key + (counter + 1) * 0x9E3779B97F4A7C15) & self.MASK) >> 11) / 2**53

    def allowed(self) -> set[int]:
        return {self.gamma}

    def value(self, state: tuple[int, ...], action: int) -> float:
        return self.q.get((state, action), 0.0)

    def observe(self, drafted: int, accepted: int, cached: int) -> None:
        actions = range(self.w.gamma_min, self.w.gamma_max + 1)
        now = (*self.past, self.gamma)[1:]
        if self.chosen_in is not None:
            if self.w.reward == "accepted":
                reward = accepted / drafted if drafted else 0.0
            else:
                round_s = drafted * DRAFT_S + VERIFY_S[drafted]
                reward = (accepted + 1) * (VERIFY_S[0] / round_s)
            old = self.value(self.chosen_in, self.gamma)
            target = reward + self.w.discount * max(self.value(now, a) for a in actions)
            self.q[self.chosen_in, self.gamma] = old + self.w.learning_rate * (target - old)
        if self.uniform(2 * self.draws) < self.w.epsilon:
            self.gamma = actions[int(self.uniform(2 * self.draws + 1) * len(actions))]
        else:
            self.gamma = max(actions, key=lambda a: (self.value(now, a), -a))
        self.draws += 1
        self.past, self.chosen_in = now, now


def reference(window: Any) -> Reference:
    return {"analytic": Analytic, "q_learning": QLearner}.get(window.kind, Stepper)(window)  # type: ignore[no-any-return]


@every_window
@pytest.mark.parametrize("seed", range(2))
def test_agrees_with_the_reference(document: dict[str, Any], seed: int) -> None:
    m = Machine(document)
    expected = reference(window_of(document))
    for r in random_rounds(100 + seed, 250):
        if r[0]:
            m.reset()
            expected.start()
        assert m.gamma in expected.allowed()
        step = outcome_of(m.gamma, r)
        m.advance(*step)
        expected.observe(*step)


# -- particulars -----------------------------------------------------------------------------------


def test_windows_that_weigh_costs_say_how_to_get_them() -> None:
    for document in ({"kind": "analytic"}, {"kind": "q_learning", "reward": "speed"}):
        with pytest.raises(PolicyError, match="run `profile`"):
            compile_window(window_of(document))


def test_running_sums_do_not_drift() -> None:
    """After any past, a history's worth of equal rounds leaves the state of a fresh session that
    saw only those.
    """
    document = {
        "kind": "analytic",
        "estimator": "exact",
        "history": 5,
        "gamma_max": 9,
    }
    long, short = Machine(document), Machine(document)
    for r in random_rounds(8, 5000):
        long.advance(*outcome_of(long.gamma, r))
    while long.state.history.sums[0]:
        long.advance(0, 0)
    for step in [(3, 1), (0, 0), (9, 9), (4, 0), (1, 1)]:
        long.advance(*step)
        short.advance(*step)
    assert content(long.state) == content(short.state)


@pytest.mark.parametrize("estimator", ["ratio", "exact"])
def test_levels_that_heterospec_adds_are_evidence_like_any_other(estimator: str) -> None:
    document = {"kind": "analytic", "estimator": estimator, "gamma_max": 4}
    machine, plain = Machine(document), Analytic(window_of(document))
    for drafted, accepted in ((7, 2), (7, 0), (4, 4), (64, 9), (7, 7), (3, 1), (7, 5), (7, 6)):
        machine.advance(drafted, accepted, 0)
        plain.observe(drafted, accepted, 0)
        assert machine.gamma in plain.allowed()


def test_a_speed_of_an_extended_tree_is_that_of_the_longest_window() -> None:
    document = {"kind": "q_learning", "reward": "speed", "gamma_max": 4}
    extended, longest = Machine(document), Machine(document)
    for accepted in (2, 0, 4, 1, 4, 0, 3):
        extended.advance(7, accepted, 0)
        longest.advance(4, accepted, 0)
        assert content(extended.state) == content(longest.state)
