"""The fast replay against the plain loop over the same recording: random texts, chains, policies
and stops, and every round must be equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from oracle import RoundSeconds, replay_rounds
from synthetic import chain_panorama, flat_profile, policy, with_terms
from trace_values import a_panorama, a_trajectory

from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.costs import RoundKind, middles, round_costs, round_seconds
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.session import Sessions
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import PROB_SCALE, Sampling, Step, Tokens
from spectune.traces.tables import LatencyProfile, Panorama, Trajectory

VOCABULARY, GAMMA_MAX = 23, 7
SIX = (9, 58, 31, 47, 2, 40)
PROFILE = flat_profile("toy", ["toy"])
toy = partial(policy, "toy")


def costs_of(
    profile: LatencyProfile | None, policy: Policy, trace: ReplayTrace, *, sampled: bool
) -> RoundSeconds:
    """Seconds of one round at a time, from the tables that the replay looks into."""
    if profile is None:
        return lambda context, *counts: (0.0, 0.0, 0.0)
    kind = RoundKind.of(policy, tree=False)
    costs = round_costs(profile, kind, middles(trace.max_context))
    return lambda context, *counts: round_seconds(costs, int(sampled), context, 0, *counts)


def random_policy(rng: np.random.Generator) -> Policy:
    reach = int(rng.integers(1, GAMMA_MAX + 1))
    low = int(rng.integers(0, reach + 1))
    first = int(rng.integers(max(1, low), reach + 1))
    deep = {"gamma_max": reach}
    wide = {**deep, "gamma_min": low}
    learning = {**deep, "kind": "q_learning"}
    windows: list[dict[str, Any]] = [
        {"kind": "fixed", "gamma": int(rng.integers(0, GAMMA_MAX + 1))},
        {**wide, "kind": "fsm", "gamma_initial": first},
        {**wide, "kind": "cache_fsm"},
        {**deep, "kind": "heuristic", "gamma_initial": first, "transient": rng.random() < 0.5},
        {**learning, "gamma_min": min(1, low), "epsilon": float(rng.random()), "memory": 2},
        {**learning, "reward": "speed", "seed": int(rng.integers(99))},
    ]
    for estimator in ("ratio", "exact"):
        weighed = {"estimator": estimator, "history": int(rng.integers(1, 12))}
        windows.append({**wide, "kind": "analytic", **weighed})
    thresholds = {"max_prob": 0.2, "joint_prob": 0.05, "entropy": 0.05}
    stops: list[dict[str, Any]] = [{"kind": "none"}]
    stops += [{"kind": k, "threshold": float(rng.uniform(t, 1))} for k, t in thresholds.items()]
    stops[-1]["scale"] = float(rng.uniform(0.1, 0.5))
    stop = stops[int(rng.integers(len(stops)))]
    if stop["kind"] != "none":
        stop["keep_last"] = bool(rng.random() < 0.5)
    return toy(windows[int(rng.integers(len(windows)))], stop=stop)


class Recorded:
    """Texts of few different tokens, a half of which end before their budget, and chains of a draft
    ``toy``. ``agreement`` and ``silence``: chances that it follows the text, or proposes
    nothing."""

    def __init__(
        self,
        seed: int,
        agreement: float = 0.85,
        silence: float = 0.0,
        *,
        lengths: Sequence[int] | None = None,
        temperature: float = 0.0,
    ) -> None:
        self.rng, self.chances = np.random.default_rng(seed), (agreement * (1 - silence), silence)
        self.texts = [
            self.text(n, Sampling(temperature))
            for n in lengths or self.rng.integers(1, 60, 5).tolist()
        ]
        self.chains = [self.panorama(text) for text in self.texts]
        self.trace = ReplayTrace(self.texts, {"toy": self.chains})

    def text(self, n: int, sampling: Sampling) -> Trajectory:
        made = a_trajectory(int(self.rng.integers(2**32)), n=n, sampling=sampling)
        tokens = Tokens(made.prompt_ids % VOCABULARY, made.output_ids % VOCABULARY)
        return replace(made, tokens=tokens, max_new_tokens=n + int(self.rng.choice([0, 9])))

    def panorama(self, text: Trajectory) -> Panorama:
        agreement, silence = self.chances
        how = {"gamma_max": GAMMA_MAX, "agreement": agreement, "none": silence, "silence": silence}
        return a_panorama(text, "toy", seed=int(self.rng.integers(2**32)), **how)

    def rounds(
        self, policy: Policy, profile: LatencyProfile | None, part: ReplayTrace | None = None
    ) -> list[list[Step]]:
        """Every round by the plain loop."""
        trace, found = part or self.trace, []
        plan, sessions = prepare(policy, ["toy"], profile=profile), Sessions()
        for r in trace.order.tolist():
            text = self.texts[r]
            seconds = costs_of(profile, policy, trace, sampled=not text.sampling.greedy)
            rounds = replay_rounds(text, self.chains[r], plan, sessions, seconds=seconds)
            found.append([r.step for r in rounds])
        return found


def without_times(steps: list[list[Step]]) -> list[list[Step]]:
    return [
        [s._replace(draft_s=0.0, verify_s=0.0, round_s=0.0) for s in request] for request in steps
    ]


@pytest.mark.parametrize("seed", range(12))
def test_every_round_equals_the_plain_loops(seed: int) -> None:
    """12 recordings x 12 random policies: equal rounds, and seconds equal to rounding."""
    rng = np.random.default_rng(seed)
    chances = float(rng.uniform(0.3, 0.97)), float(rng.choice([0.0, 0.0, 0.1]))
    recorded = Recorded(seed, *chances, temperature=float(rng.choice([0.0, 1.0])))
    trace = recorded.trace
    for _ in range(12):
        policy = random_policy(rng)
        expected = recorded.rounds(policy, PROFILE)
        got = run_replay(trace, policy, PROFILE, per_round=True)
        assert without_times(got.steps()) == without_times(expected), policy.label()
        flat = [s for request in expected for s in request]
        times = np.array([[s.draft_s, s.verify_s, s.round_s] for s in flat])
        assert got.round_s is not None
        np.testing.assert_allclose(got.round_s, times, rtol=1e-12)
        before = PROFILE.request_seconds("toy" if policy.speculates else None, trace.prompts)
        np.testing.assert_allclose(
            got.seconds,
            before + np.array([sum(s.round_s for s in request) for request in expected]),
            rtol=1e-12,
        )


@pytest.mark.parametrize(
    "window",
    [
        {"kind": "fixed", "gamma": 30},
        {"kind": "heuristic", "gamma_max": 64},
        {"kind": "fsm", "gamma_max": 25},
    ],
)
def test_windows_beyond_the_recording_replay_exactly_without_a_stop(window: Any) -> None:
    recorded, policy = Recorded(0, 0.9), toy(window)
    got = run_replay(recorded.trace, policy, per_round=True).steps()
    assert got == recorded.rounds(policy, None)


def test_autoregressive_makes_one_token_a_round_and_needs_no_panorama() -> None:
    trace = ReplayTrace([a_trajectory(1, n=20)], {})
    result = run_replay(trace, AUTOREGRESSIVE, PROFILE, per_round=True)
    assert result.total.rounds == result.total.verified_tokens == trace.tokens
    assert result.total.drafted_tokens == result.total.draft_steps == 0
    assert [s.lag for s in result.steps()[0]] == list(range(1, trace.tokens + 1))
    seconds = costs_of(PROFILE, AUTOREGRESSIVE, trace, sampled=False)
    context = int(trace.prompts[0]) - 1
    expected = sum(seconds(context + s.start, s.lag, 0, 0, 1)[2] for s in result.steps()[0])
    before = PROFILE.request_seconds(None, trace.prompts)[0]
    assert result.seconds[0] == pytest.approx(expected + before)
    assert run_replay(trace, AUTOREGRESSIVE).total.seconds == 0.0


def test_a_draft_that_rested_for_long_pays_for_what_it_missed() -> None:
    """Nothing is ever accepted: the window rests at 0 for a history of 90 rounds, then the draft
    has 91 tokens to read."""
    recorded = Recorded(0, 0.0, lengths=[200])
    policy = toy({"kind": "analytic", "gamma_max": 7, "history": 90})
    expected = recorded.rounds(policy, PROFILE)[0]
    got = run_replay(recorded.trace, policy, PROFILE, per_round=True).steps()[0]
    assert max(s.lag for s in got if s.draft_steps) == 91
    assert [s.draft_s for s in got] == pytest.approx([s.draft_s for s in expected], rel=1e-12)


def test_selected_requests_replay_as_alone_unless_the_window_carries() -> None:
    recorded = Recorded(5, lengths=SIX)
    trace = recorded.trace
    part = trace.select([4, 1])
    assert part.request_ids == (trace.request_ids[4], trace.request_ids[1])
    fsm = toy({"kind": "fsm"})
    assert np.array_equal(run_replay(part, fsm).counts, run_replay(trace, fsm).counts[[4, 1]])
    heuristic = toy({"kind": "heuristic", "gamma_max": 7})
    got = run_replay(part, heuristic, per_round=True).steps()
    assert got == recorded.rounds(heuristic, None, part)


def test_sessions_continue_from_a_state() -> None:
    trace = Recorded(6, lengths=SIX).trace
    policy = toy({"kind": "q_learning", "gamma_max": 5, "epsilon": 0.4})
    whole = run_replay(trace, policy)
    first = run_replay(trace.select([0, 1, 2]), policy)
    before = first.state.learner.q.copy()
    second = run_replay(trace.select([3, 4, 5]), policy, state=first.state)
    assert np.array_equal(np.concatenate([first.counts, second.counts]), whole.counts)
    assert np.array_equal(second.state.learner.q, whole.state.learner.q)
    assert np.array_equal(first.state.learner.q, before)
    assert whole.state.learner.q.any()


DEEP = {"draft": "toy", "window": {"kind": "fixed", "gamma": 12}, "stop": {"kind": "max_prob"}}
WEIGHED = {"draft": "toy", "window": {"kind": "analytic", "gamma_max": 5}}


@pytest.mark.parametrize(
    ("policy", "silence", "error", "message"),
    [
        (DEEP, 0.0, TraceError, r"up to 12 tokens.*chains of 7.*--gamma-max 12"),
        ({**DEEP, "stop": {"kind": "none"}}, 0.2, TraceError, "--gamma-max 12"),
        ({"draft": "small"}, 0.0, TraceError, r"no panorama of draft 'small' .it has: toy"),
        (WEIGHED, 0.0, PolicyError, "run `profile`"),
    ],
)
def test_what_was_not_recorded_is_refused_with_the_remedy(
    policy: dict[str, Any], silence: float, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_replay(Recorded(2, 0.8, silence).trace, parse_policy(policy))


def test_panoramas_and_profiles_that_do_not_fit_are_refused() -> None:
    trace, longer = Recorded(2).trace, a_panorama(a_trajectory(0, n=61), "toy")
    with pytest.raises(TraceError, match="positions"):
        ReplayTrace(trace.trajectories[:1], {"toy": [longer]})
    with pytest.raises(PolicyError, match="no costs for draft 'toy'"):
        run_replay(trace, parse_policy({"draft": "toy"}), with_terms(PROFILE, {"pass/toy": None}))


def test_empty_texts_replay_to_nothing() -> None:
    policy = parse_policy({"draft": "toy"})
    ids = np.array([1], np.int32), np.zeros(0, np.int32)
    empty = Trajectory("e", "c", Tokens(*ids), Sampling(), 8, "stop")
    trace = ReplayTrace([empty], {"toy": [chain_panorama("toy", 3, [], [], [[[0, 0]] * 2], [2])]})
    total = run_replay(trace, policy).total
    assert (total.requests, total.rounds, total.emitted_tokens) == (1, 0, 0)


def rejection_trace(chance: float, seed: int = 0, temperature: float = 1.0) -> ReplayTrace:
    """One long text whose every proposal is kept with probability ``chance``; the recorded
    agreement says otherwise."""
    length = 6000
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 99, length).astype(np.int32)
    t = Trajectory(
        "r", "c", Tokens(tokens[:3], tokens), Sampling(temperature), length, "length", "rejection"
    )
    ends, codes = np.zeros((1, GAMMA_MAX - 1, 2)), np.zeros((length, 2))
    agree, accept = [True] * length, np.full(length, round(chance * PROB_SCALE))
    made = chain_panorama("toy", GAMMA_MAX, agree, codes, ends, [GAMMA_MAX - 1], accept)
    return ReplayTrace([t], {"toy": [made]}, seed=seed)


FOUR = toy(4)


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_rejection_draws_agreement_with_the_recorded_chance(chance: float) -> None:
    totals = [run_replay(rejection_trace(chance, seed), FOUR).total for seed in range(60)]
    tau = np.array([total.mean_accepted_length for total in totals])
    expected = sum(chance**i for i in range(5))
    assert abs(tau.mean() - expected) < 5 * tau.std() / math.sqrt(len(tau)) + 1e-3
    assert len(set(tau.tolist())) > 30
    assert run_replay(rejection_trace(chance, 7), FOUR).total == totals[7]


@pytest.mark.parametrize(
    ("chance", "temperature", "tau"), [(1.0, 1.0, 5.0), (0.0, 1.0, 1.0), (0.0, 0.0, 5.0)]
)
def test_rejection_is_certain_at_the_ends_and_at_temperature_0(
    chance: float, temperature: float, tau: float
) -> None:
    trace = rejection_trace(chance, temperature=temperature)
    assert run_replay(trace, FOUR).total.mean_accepted_length == tau
