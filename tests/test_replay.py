"""The fast replay against a literal one: a toy draft, a function of its prefix, is really run,
token by token.

Panoramas are derived from the toy by brute force, policies and stops are random, and every round
must be equal. The literal replay below is written from the semantics of a round
(runtime/policies/windows.py and stops.py), not from the kernel.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from synthetic import flat_profile, with_terms

from spectune.optimizer.simulate.replay import replay, run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.runtime.costs import RoundKind, middles, round_costs, round_seconds
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.session import Session
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import (
    AGREE_NO,
    AGREE_NONE,
    AGREE_YES,
    PROB_SCALE,
    ChainPanorama,
    Counts,
    LatencyProfile,
    Sampling,
    Step,
    Trajectory,
)

VOCABULARY, EOS, GAMMA_MAX = 23, 0, 7


@dataclass(frozen=True)
class Proposal:
    token: int
    logp: int
    entropy: int


@dataclass(frozen=True)
class Toy:
    """A target and a draft as hashes of the whole prefix. ``agreement`` and ``silence``: chances
    that the draft follows the target, or proposes nothing."""

    seed: int
    agreement: float
    silence: float = 0.0

    def _uniform(self, what: str, prefix: list[int]) -> float:
        digest = hashlib.blake2b(f"{self.seed}/{what}/{prefix}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    def target(self, prefix: list[int]) -> int:
        return (
            EOS
            if self._uniform("end", prefix) < 0.01
            else 1 + int(self._uniform("target", prefix) * (VOCABULARY - 1))
        )

    def propose(self, prefix: list[int]) -> Proposal | None:
        return proposed(self, tuple(prefix))

    def proposal(self, prefix: list[int]) -> Proposal | None:
        if self._uniform("silent", prefix) < self.silence:
            return None
        token = self.target(prefix)
        follows = self._uniform("follow", prefix) < self.agreement
        if not follows:
            token = 1 + (token + int(self._uniform("other", prefix) * (VOCABULARY - 2))) % (
                VOCABULARY - 1
            )
        doubt = 1.0 if follows else 2.5
        return Proposal(
            token,
            int(self._uniform("p", prefix) * 200 * doubt),
            int(self._uniform("h", prefix) * 500 * doubt),
        )

    def trajectory(self, name: str, budget: int, temperature: float = 0.0) -> Trajectory:
        prompt = [
            1 + int(self._uniform(f"{name}-prompt-{i}", []) * 9)
            for i in range(1 + int(self._uniform(name, []) * 20))
        ]
        output: list[int] = []
        while len(output) < budget and (not output or output[-1] != EOS):
            output.append(self.target([*prompt, *output]))
        finish = "eos" if output[-1] == EOS else "length"
        ids = np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32)
        return Trajectory(name, name[:1], *ids, Sampling(temperature), budget, finish)  # type: ignore[arg-type]

    def panorama(self, t: Trajectory, gamma_max: int = GAMMA_MAX) -> ChainPanorama:
        """By brute force, from what the columns are said to mean."""
        prompt, output = t.prompt_ids.tolist(), t.output_ids.tolist()
        agree, logp, entropy, rows = [], [], [], []

        def continuation(prefix: list[int], count: int) -> list[Proposal]:
            found: list[Proposal] = []
            while len(found) < count:
                proposal = self.propose([*prefix, *(p.token for p in found)])
                if proposal is None:
                    break
                found.append(proposal)
            return found

        for i, token in enumerate(output):
            prefix = [*prompt, *output[:i]]
            proposal = self.propose(prefix)
            agree.append(
                AGREE_NONE
                if proposal is None
                else AGREE_YES
                if proposal.token == token
                else AGREE_NO
            )
            logp.append(proposal.logp if proposal else 0)
            entropy.append(proposal.entropy if proposal else 0)
            if proposal is not None and proposal.token != token:
                rows.append(continuation([*prefix, proposal.token], gamma_max - 1))
        rows.append(continuation([*prompt, *output], gamma_max))
        shape = (len(rows), gamma_max)
        branch_logp, branch_entropy = (
            np.zeros(shape, dtype=np.uint16),
            np.zeros(shape, dtype=np.uint16),
        )
        for r, row in enumerate(rows):
            branch_logp[r, : len(row)] = [p.logp for p in row]
            branch_entropy[r, : len(row)] = [p.entropy for p in row]
        return ChainPanorama(
            "toy",
            gamma_max,
            np.array(agree, dtype=np.uint8),
            np.array(logp, dtype=np.uint16),
            np.array(entropy, dtype=np.uint16),
            np.where(np.array(agree) == AGREE_YES, PROB_SCALE, 0).astype(np.uint16),
            branch_logp,
            branch_entropy,
            np.array([len(row) for row in rows], dtype=np.uint8),
        )


@lru_cache(maxsize=1 << 14)
def proposed(toy: Toy, prefix: tuple[int, ...]) -> Proposal | None:
    """Many policies ask a toy for the same."""
    return toy.proposal(list(prefix))


Timer = Callable[[int, Step], tuple[float, float, float]]


def literal_request(
    toy: Toy, t: Trajectory, policy: Policy, session: Session, timer: Timer
) -> list[Step]:
    """Decodes one request with the toy draft really running."""
    prompt, text = t.prompt_ids.tolist(), t.output_ids.tolist()
    stop: Any = policy.stop
    output: list[int] = []
    lag, steps_done = 1, []
    session.start(prompt)
    while len(output) < len(text):
        start = len(output)
        gamma = min(session.gamma, t.max_new_tokens - start - 1)
        chain: list[int] = []
        passes, joint = 0, 0
        for _ in range(gamma):
            passes += 1
            proposal = toy.propose([*prompt, *output, *chain])
            if proposal is None:
                break
            joint += proposal.logp
            if stop.kind == "max_prob":
                triggered = proposal.logp > math.floor(-256 * math.log(stop.threshold))
            elif stop.kind == "joint_prob":
                triggered = joint > math.floor(-256 * math.log(stop.threshold))
            elif stop.kind == "entropy":
                triggered = proposal.entropy > math.floor(
                    256 * (1 - stop.threshold) ** 2 / stop.scale
                )
            else:
                triggered = False
            if not triggered or stop.keep_last:
                chain.append(proposal.token)
            if triggered:
                break
        accepted = 0
        while (
            accepted < len(chain)
            and start + accepted < len(text)
            and chain[accepted] == text[start + accepted]
        ):
            accepted += 1
        emitted = text[start : start + accepted + 1]
        accepted = min(accepted, len(emitted))
        step = Step(
            start, len(chain), len(chain) + 1, accepted, len(emitted), passes, lag, policy.draft,
            policy.id, depth=len(chain)
        )  # fmt: skip
        draft_s, verify_s, round_s = timer(len(prompt) + start - 1, step)
        steps_done.append(step._replace(draft_s=draft_s, verify_s=verify_s, round_s=round_s))
        session.observe(len(chain), accepted, emitted, draft_s, verify_s)
        lag = len(emitted) - min(accepted, passes - 1) if passes else lag + len(emitted)
        output += emitted
    return steps_done


PROFILE = flat_profile("toy", ["toy"])


class Costs:
    """Seconds of one round at a time, from the tables that the replay looks into."""

    def __init__(self, profile: LatencyProfile, policy: Policy, max_context: int) -> None:
        self.costs = round_costs(profile, RoundKind.of(policy, tree=False), middles(max_context))

    def round_seconds(
        self, step: Step, context: int, *, sampled: bool
    ) -> tuple[float, float, float]:
        return round_seconds(
            self.costs,
            int(sampled),
            context,
            0,
            step.lag,
            step.draft_steps,
            step.drafted,
            step.emitted,
        )


def random_policy(rng: np.random.Generator) -> Policy:
    reach = int(rng.integers(1, GAMMA_MAX + 1))
    low = int(rng.integers(0, reach + 1))
    first = int(rng.integers(max(1, low), reach + 1))
    windows: list[dict[str, Any]] = [
        {"kind": "fixed", "gamma": int(rng.integers(0, GAMMA_MAX + 1))},
        {"kind": "fsm", "gamma_max": reach, "gamma_min": low, "gamma_initial": first},
        {"kind": "cache_fsm", "gamma_max": reach, "gamma_min": low},
        {
            "kind": "heuristic",
            "gamma_max": reach,
            "gamma_initial": first,
            "transient": bool(rng.random() < 0.5),
        },
        {
            "kind": "q_learning",
            "gamma_max": reach,
            "gamma_min": min(1, low),
            "epsilon": float(rng.random()),
            "memory": 2,
        },
        {
            "kind": "q_learning",
            "gamma_max": reach,
            "reward": "speed",
            "seed": int(rng.integers(99)),
        },
        *(
            {
                "kind": "analytic",
                "gamma_max": reach,
                "gamma_min": low,
                "estimator": estimator,
                "costs": costs,
                "history": int(rng.integers(1, 12)),
            }
            for estimator in ("ratio", "exact", "table")
            for costs in ("profile", "recent")
        ),
    ]
    stops: list[dict[str, Any]] = [
        {"kind": "none"},
        {"kind": "max_prob", "threshold": float(rng.uniform(0.2, 1.0))},
        {"kind": "joint_prob", "threshold": float(rng.uniform(0.05, 1.0))},
        {
            "kind": "entropy",
            "threshold": float(rng.uniform(0.05, 1.0)),
            "scale": float(rng.uniform(0.1, 0.5)),
        },
    ]
    stop = stops[int(rng.integers(len(stops)))]
    if stop["kind"] != "none":
        stop["keep_last"] = bool(rng.random() < 0.5)
    return parse_policy(
        {"draft": "toy", "window": windows[int(rng.integers(len(windows)))], "stop": stop}
    )


def toy_trace(toy: Toy, requests: int = 5, temperature: float = 0.0) -> ReplayTrace:
    rng = np.random.default_rng(toy.seed)
    trajectories = [
        toy.trajectory(f"{'ab'[i % 2]}{i}", int(rng.integers(1, 60)), temperature)
        for i in range(requests)
    ]
    return ReplayTrace(trajectories, {"toy": [toy.panorama(t) for t in trajectories]})


def literal(
    toy: Toy, trace: ReplayTrace, policy: Policy, profile: LatencyProfile | None
) -> list[list[Step]]:
    session = Session(prepare(policy, ["toy"], profile=profile).window)
    out = []
    for r in trace.order.tolist():
        t = trace.trajectories[r]
        model = Costs(profile, policy, trace.max_context) if profile else None

        def timer(
            context: int, step: Step, m: Costs | None = model, sampled: bool = not t.sampling.greedy
        ) -> tuple[float, float, float]:
            return (0.0, 0.0, 0.0) if m is None else m.round_seconds(step, context, sampled=sampled)

        out.append(literal_request(toy, t, policy, session, timer))
    return out


def without_times(steps: list[list[Step]]) -> list[list[Step]]:
    return [
        [s._replace(draft_s=0.0, verify_s=0.0, round_s=0.0) for s in request] for request in steps
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_round_equals_the_literal_one(seed: int) -> None:
    """40 toys x 12 random policies: equal rounds, and seconds equal to rounding."""
    rng = np.random.default_rng(seed)
    toy = Toy(seed, float(rng.uniform(0.3, 0.97)), silence=float(rng.choice([0.0, 0.0, 0.1])))
    trace = toy_trace(toy, temperature=float(rng.choice([0.0, 1.0])))
    for _ in range(12):
        policy = random_policy(rng)
        expected = literal(toy, trace, policy, PROFILE)
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


@pytest.mark.parametrize("seed", range(4))
def test_windows_beyond_the_recording_replay_exactly_without_a_stop(seed: int) -> None:
    toy = Toy(seed, 0.9)
    trace = toy_trace(toy)
    for window in (
        {"kind": "fixed", "gamma": 30},
        {"kind": "heuristic", "gamma_max": 64},
        {"kind": "fsm", "gamma_max": 25},
    ):
        policy = parse_policy({"draft": "toy", "window": window})
        assert run_replay(trace, policy, per_round=True).steps() == literal(
            toy, trace, policy, None
        )


def test_autoregressive_makes_one_token_a_round_and_needs_no_panorama() -> None:
    trajectories = [Toy(1, 0.5).trajectory("a", 20)]
    trace = ReplayTrace(trajectories, {})
    result = run_replay(trace, AUTOREGRESSIVE, PROFILE, per_round=True)
    assert result.total.rounds == result.total.verified_tokens == trace.tokens
    assert result.total.drafted_tokens == result.total.draft_steps == 0
    assert [s.lag for s in result.steps()[0]] == list(range(1, trace.tokens + 1))
    model = Costs(PROFILE, AUTOREGRESSIVE, trace.max_context)
    context = int(trace.prompts[0]) - 1
    expected = sum(
        model.round_seconds(s, context + s.start, sampled=False)[2] for s in result.steps()[0]
    )
    assert result.seconds[0] == pytest.approx(
        expected + PROFILE.request_seconds(None, trace.prompts)[0]
    )
    assert run_replay(trace, AUTOREGRESSIVE).total.seconds == 0.0


def test_a_draft_that_rested_for_long_pays_for_what_it_missed() -> None:
    """Nothing is ever accepted: the window rests at 0 for a history of 90 rounds, then the draft
    has 91 tokens to read."""
    toy = Toy(0, 0.0)
    long = next(
        t for t in (toy.trajectory(f"a{i}", 250) for i in range(99)) if len(t.output_ids) > 100
    )
    trace = ReplayTrace([long], {"toy": [toy.panorama(long)]})
    policy = parse_policy(
        {"draft": "toy", "window": {"kind": "analytic", "gamma_max": 7, "history": 90}}
    )
    expected = literal(toy, trace, policy, PROFILE)[0]
    got = run_replay(trace, policy, PROFILE, per_round=True).steps()[0]
    assert max(s.lag for s in got if s.draft_steps) == 91
    assert [s.draft_s for s in got] == pytest.approx([s.draft_s for s in expected], rel=1e-12)


def test_selected_requests_replay_as_alone_unless_the_window_carries() -> None:
    toy = Toy(5, 0.85)
    trace = toy_trace(toy, requests=6)
    part = trace.select([4, 1])
    assert part.request_ids == (trace.request_ids[4], trace.request_ids[1])
    fsm = parse_policy({"draft": "toy", "window": {"kind": "fsm"}})
    assert np.array_equal(run_replay(part, fsm).counts, run_replay(trace, fsm).counts[[4, 1]])
    heuristic = parse_policy({"draft": "toy", "window": {"kind": "heuristic", "gamma_max": 7}})
    assert run_replay(part, heuristic, per_round=True).steps() == literal(
        toy, part, heuristic, None
    )


def test_sessions_continue_from_a_state() -> None:
    toy = Toy(6, 0.85)
    trace = toy_trace(toy, requests=6)
    policy = parse_policy(
        {"draft": "toy", "window": {"kind": "q_learning", "gamma_max": 5, "epsilon": 0.4}}
    )
    whole = run_replay(trace, policy)
    first = run_replay(trace.select([0, 1, 2]), policy)
    before = first.state.learner.q.copy()
    second = run_replay(trace.select([3, 4, 5]), policy, state=first.state)
    assert np.array_equal(np.concatenate([first.counts, second.counts]), whole.counts)
    assert np.array_equal(second.state.learner.q, whole.state.learner.q)
    assert np.array_equal(first.state.learner.q, before)
    assert whole.state.learner.q.any()


def test_what_was_not_recorded_is_refused_with_the_remedy() -> None:
    toy = Toy(2, 0.8)
    trace = toy_trace(toy)
    deep: dict[str, Any] = {
        "draft": "toy",
        "window": {"kind": "fixed", "gamma": 12},
        "stop": {"kind": "max_prob"},
    }
    with pytest.raises(TraceError, match=r"up to 12 tokens.*chains of 7.*--gamma-max 12"):
        run_replay(trace, parse_policy(deep))
    with pytest.raises(TraceError, match=r"no panorama of draft 'small' .it has: toy"):
        run_replay(trace, parse_policy({"draft": "small"}))
    silent = toy_trace(Toy(2, 0.8, silence=0.2))
    with pytest.raises(TraceError, match="--gamma-max 12"):
        run_replay(silent, parse_policy({**deep, "stop": {"kind": "none"}}))
    recent = parse_policy({"draft": "toy", "window": {"kind": "analytic", "costs": "recent"}})
    with pytest.raises(PolicyError, match="latency profile"):
        run_replay(trace, recent)
    with pytest.raises(PolicyError, match="run `profile`"):
        run_replay(
            trace, parse_policy({"draft": "toy", "window": {"kind": "analytic", "gamma_max": 5}})
        )
    with pytest.raises(TraceError, match="panoramas for 1 of 5"):
        ReplayTrace(trace.trajectories, {"toy": [toy.panorama(trace.trajectories[0])]})
    with pytest.raises(TraceError, match="positions"):
        ReplayTrace(trace.trajectories[:1], {"toy": [toy.panorama(toy.trajectory("other", 61))]})
    with pytest.raises(PolicyError, match="no costs for draft 'toy'"):
        run_replay(trace, parse_policy({"draft": "toy"}), with_terms(PROFILE, {"pass/toy": None}))


def test_empty_traces_and_texts_replay_to_nothing() -> None:
    assert (
        replay(ReplayTrace([], {"toy": []}), parse_policy({"draft": "toy"}), PROFILE).total
        == Counts()
    )
    empty = Trajectory(
        "e", "c", np.array([1], np.int32), np.zeros(0, np.int32), Sampling(), 8, "stop"
    )
    zero = np.zeros(0, np.uint16)
    panorama = ChainPanorama(
        "toy",
        3,
        np.zeros(0, np.uint8),
        zero,
        zero,
        zero,
        np.zeros((1, 3), np.uint16),
        np.zeros((1, 3), np.uint16),
        np.array([3], np.uint8),
    )
    total = run_replay(
        ReplayTrace([empty], {"toy": [panorama]}), parse_policy({"draft": "toy"})
    ).total
    assert (total.requests, total.rounds, total.emitted_tokens) == (1, 0, 0)


def rejection_trace(chance: float, seed: int = 0, temperature: float = 1.0) -> ReplayTrace:
    """One long text whose every proposal is kept with probability ``chance``; the recorded
    agreement says otherwise."""
    length = 6000
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 99, length).astype(np.int32)
    t = Trajectory(
        "r", "c", tokens[:3], tokens, Sampling(temperature), length, "length", verifier="rejection"
    )
    codes = np.zeros(length, np.uint16)
    rows = np.zeros((1, GAMMA_MAX), np.uint16)
    agree = np.full(length, AGREE_YES, np.uint8)
    accept = np.full(length, round(chance * PROB_SCALE), np.uint16)
    p = ChainPanorama(
        "toy", GAMMA_MAX, agree, codes, codes, accept, rows, rows, np.array([GAMMA_MAX], np.uint8)
    )
    return ReplayTrace([t], {"toy": [p]}, seed=seed)


def test_rejection_draws_agreement_with_the_recorded_chance() -> None:
    policy = parse_policy({"draft": "toy", "window": {"kind": "fixed", "gamma": 4}})
    for chance in (0.3, 0.8):
        tau = np.array(
            [
                run_replay(rejection_trace(chance, seed), policy).total.mean_accepted_length
                for seed in range(60)
            ]
        )
        expected = sum(chance**i for i in range(5))
        assert abs(tau.mean() - expected) < 5 * tau.std() / math.sqrt(len(tau)) + 1e-3
        assert len(set(tau.tolist())) > 30
        assert (
            run_replay(rejection_trace(chance, 7), policy).total
            == run_replay(rejection_trace(chance, 7), policy).total
        )


def test_rejection_is_certain_at_the_ends_and_at_temperature_0() -> None:
    policy = parse_policy({"draft": "toy", "window": {"kind": "fixed", "gamma": 4}})
    assert run_replay(rejection_trace(1.0), policy).total.mean_accepted_length == 5.0
    assert run_replay(rejection_trace(0.0), policy).total.mean_accepted_length == 1.0
    assert (
        run_replay(rejection_trace(0.0, temperature=0.0), policy).total.mean_accepted_length == 5.0
    )
