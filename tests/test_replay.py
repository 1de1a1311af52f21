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
from typing import Any, NamedTuple

import numpy as np
import pytest
from synthetic import flat_profile, with_terms

from spectune.optimizer.simulate.replay import run_replay
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


class Proposal(NamedTuple):
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
        if self._uniform("end", prefix) < 0.01:
            return EOS
        return 1 + int(self._uniform("target", prefix) * (VOCABULARY - 1))

    def propose(self, prefix: list[int]) -> Proposal | None:
        return proposed(self, tuple(prefix))

    def proposal(self, prefix: list[int]) -> Proposal | None:
        if self._uniform("silent", prefix) < self.silence:
            return None
        token, doubt = self.target(prefix), 1.0
        if self._uniform("follow", prefix) >= self.agreement:
            other, doubt = int(self._uniform("other", prefix) * (VOCABULARY - 2)), 2.5
            token = 1 + (token + other) % (VOCABULARY - 1)
        logp, entropy = self._uniform("p", prefix) * 200, self._uniform("h", prefix) * 500
        return Proposal(token, int(logp * doubt), int(entropy * doubt))

    def trajectory(self, name: str, budget: int, temperature: float = 0.0) -> Trajectory:
        length = 1 + int(self._uniform(name, []) * 20)
        prompt = [1 + int(self._uniform(f"{name}-prompt-{i}", []) * 9) for i in range(length)]
        output: list[int] = []
        while len(output) < budget and (not output or output[-1] != EOS):
            output.append(self.target([*prompt, *output]))
        finish: Any = "eos" if output[-1] == EOS else "length"
        ids = np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32)
        return Trajectory(name, name[:1], *ids, Sampling(temperature), budget, finish)

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
            logp.append(proposal.logp if proposal else 0)
            entropy.append(proposal.entropy if proposal else 0)
            if proposal is None:
                agree.append(AGREE_NONE)
            elif proposal.token == token:
                agree.append(AGREE_YES)
            else:
                agree.append(AGREE_NO)
                rows.append(continuation([*prefix, proposal.token], gamma_max - 1))
        rows.append(continuation([*prompt, *output], gamma_max))
        branches = np.zeros((2, len(rows), gamma_max), dtype=np.uint16)
        for r, row in enumerate(rows):
            branches[0, r, : len(row)] = [p.logp for p in row]
            branches[1, r, : len(row)] = [p.entropy for p in row]
        kinds = np.array(agree, dtype=np.uint8)
        accept = np.where(kinds == AGREE_YES, PROB_SCALE, 0)
        codes = (np.array(column, dtype=np.uint16) for column in (logp, entropy, accept))
        lengths = np.array([len(row) for row in rows], dtype=np.uint8)
        return ChainPanorama("toy", gamma_max, kinds, *codes, *branches, lengths)


@lru_cache(maxsize=1 << 14)
def proposed(toy: Toy, prefix: tuple[int, ...]) -> Proposal | None:
    """Many policies ask a toy for the same."""
    return toy.proposal(list(prefix))


PROFILE = flat_profile("toy", ["toy"])
Seconds = tuple[float, float, float]


def literal_request(
    toy: Toy,
    t: Trajectory,
    policy: Policy,
    session: Session,
    timer: Callable[[int, Step], Seconds],
) -> list[Step]:
    """Decodes one request with the toy draft really running."""
    prompt, text = t.prompt_ids.tolist(), t.output_ids.tolist()
    stop: Any = policy.stop
    if stop.kind == "entropy":
        most = math.floor(256 * (1 - stop.threshold) ** 2 / stop.scale)
    elif stop.kind != "none":
        most = math.floor(-256 * math.log(stop.threshold))
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
            read = {"max_prob": proposal.logp, "joint_prob": joint, "entropy": proposal.entropy}
            triggered = stop.kind != "none" and read[stop.kind] > most
            if not triggered or stop.keep_last:
                chain.append(proposal.token)
            if triggered:
                break
        agrees = [a == b for a, b in zip(chain, text[start:], strict=False)]
        accepted = [*agrees, False].index(False)
        emitted = text[start : start + accepted + 1]
        accepted = min(accepted, len(emitted))
        counts = (len(chain), len(chain) + 1, accepted, len(emitted), passes, lag)
        step = Step(start, *counts, policy.draft, policy.id, depth=len(chain))
        draft_s, verify_s, round_s = timer(len(prompt) + start - 1, step)
        steps_done.append(step._replace(draft_s=draft_s, verify_s=verify_s, round_s=round_s))
        session.observe(len(chain), accepted, emitted, draft_s, verify_s)
        lag = len(emitted) - min(accepted, passes - 1) if passes else lag + len(emitted)
        output += emitted
    return steps_done


def costs_of(
    profile: LatencyProfile | None, policy: Policy, trace: ReplayTrace, *, sampled: bool
) -> Callable[[int, Step], Seconds]:
    """Seconds of one round at a time, from the tables that the replay looks into."""
    if profile is None:
        return lambda context, step: (0.0, 0.0, 0.0)
    kind = RoundKind.of(policy, tree=False)
    costs = round_costs(profile, kind, middles(trace.max_context))

    def seconds(context: int, step: Step) -> Seconds:
        counts = step.lag, step.draft_steps, step.drafted, step.emitted
        return round_seconds(costs, int(sampled), context, 0, *counts)

    return seconds


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
    for estimator in ("ratio", "exact", "table"):
        for costs in ("profile", "recent"):
            weighed = {"estimator": estimator, "costs": costs, "history": int(rng.integers(1, 12))}
            windows.append({**wide, "kind": "analytic", **weighed})
    thresholds = {"max_prob": 0.2, "joint_prob": 0.05, "entropy": 0.05}
    stops: list[dict[str, Any]] = [{"kind": "none"}]
    stops += [{"kind": k, "threshold": float(rng.uniform(t, 1))} for k, t in thresholds.items()]
    stops[-1]["scale"] = float(rng.uniform(0.1, 0.5))
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
        timer = costs_of(profile, policy, trace, sampled=not t.sampling.greedy)
        out.append(literal_request(toy, t, policy, session, timer))
    return out


def without_times(steps: list[list[Step]]) -> list[list[Step]]:
    return [
        [s._replace(draft_s=0.0, verify_s=0.0, round_s=0.0) for s in request] for request in steps
    ]


@pytest.mark.parametrize("seed", range(25))
def test_every_round_equals_the_literal_one(seed: int) -> None:
    """25 toys x 12 random policies: equal rounds, and seconds equal to rounding."""
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


@pytest.mark.parametrize(
    "window",
    [
        {"kind": "fixed", "gamma": 30},
        {"kind": "heuristic", "gamma_max": 64},
        {"kind": "fsm", "gamma_max": 25},
    ],
)
def test_windows_beyond_the_recording_replay_exactly_without_a_stop(window: Any) -> None:
    toy, policy = Toy(0, 0.9), parse_policy({"draft": "toy", "window": window})
    trace = toy_trace(toy)
    expected = literal(toy, trace, policy, None)
    assert run_replay(trace, policy, per_round=True).steps() == expected


def test_autoregressive_makes_one_token_a_round_and_needs_no_panorama() -> None:
    trajectories = [Toy(1, 0.5).trajectory("a", 20)]
    trace = ReplayTrace(trajectories, {})
    result = run_replay(trace, AUTOREGRESSIVE, PROFILE, per_round=True)
    assert result.total.rounds == result.total.verified_tokens == trace.tokens
    assert result.total.drafted_tokens == result.total.draft_steps == 0
    assert [s.lag for s in result.steps()[0]] == list(range(1, trace.tokens + 1))
    seconds = costs_of(PROFILE, AUTOREGRESSIVE, trace, sampled=False)
    context = int(trace.prompts[0]) - 1
    expected = sum(seconds(context + s.start, s)[2] for s in result.steps()[0])
    before = PROFILE.request_seconds(None, trace.prompts)[0]
    assert result.seconds[0] == pytest.approx(expected + before)
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


DEEP = {"draft": "toy", "window": {"kind": "fixed", "gamma": 12}, "stop": {"kind": "max_prob"}}
WEIGHED = {"draft": "toy", "window": {"kind": "analytic", "gamma_max": 5}}
RECENT = {"draft": "toy", "window": {"kind": "analytic", "costs": "recent"}}


@pytest.mark.parametrize(
    ("policy", "silence", "error", "message"),
    [
        (DEEP, 0.0, TraceError, r"up to 12 tokens.*chains of 7.*--gamma-max 12"),
        ({**DEEP, "stop": {"kind": "none"}}, 0.2, TraceError, "--gamma-max 12"),
        ({"draft": "small"}, 0.0, TraceError, r"no panorama of draft 'small' .it has: toy"),
        (RECENT, 0.0, PolicyError, "latency profile"),
        (WEIGHED, 0.0, PolicyError, "run `profile`"),
    ],
)
def test_what_was_not_recorded_is_refused_with_the_remedy(
    policy: dict[str, Any], silence: float, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_replay(toy_trace(Toy(2, 0.8, silence)), parse_policy(policy))


def test_panoramas_and_profiles_that_do_not_fit_are_refused() -> None:
    toy = Toy(2, 0.8)
    trace = toy_trace(toy)
    with pytest.raises(TraceError, match="positions"):
        ReplayTrace(trace.trajectories[:1], {"toy": [toy.panorama(toy.trajectory("other", 61))]})
    with pytest.raises(PolicyError, match="no costs for draft 'toy'"):
        run_replay(trace, parse_policy({"draft": "toy"}), with_terms(PROFILE, {"pass/toy": None}))


def test_empty_traces_and_texts_replay_to_nothing() -> None:
    policy = parse_policy({"draft": "toy"})
    assert run_replay(ReplayTrace([], {"toy": []}), policy, PROFILE).total == Counts()
    ids = np.array([1], np.int32), np.zeros(0, np.int32)
    empty = Trajectory("e", "c", *ids, Sampling(), 8, "stop")
    zero, rows = np.zeros(0, np.uint16), np.zeros((1, 3), np.uint16)
    columns = (zero.astype(np.uint8), zero, zero, zero, rows, rows, np.array([3], np.uint8))
    trace = ReplayTrace([empty], {"toy": [ChainPanorama("toy", 3, *columns)]})
    total = run_replay(trace, policy).total
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
    codes, rows = np.zeros(length, np.uint16), np.zeros((1, GAMMA_MAX), np.uint16)
    agree = np.full(length, AGREE_YES, np.uint8)
    accept = np.full(length, round(chance * PROB_SCALE), np.uint16)
    columns = agree, codes, codes, accept, rows, rows, np.array([GAMMA_MAX], np.uint8)
    return ReplayTrace([t], {"toy": [ChainPanorama("toy", GAMMA_MAX, *columns)]}, seed=seed)


FOUR = parse_policy({"draft": "toy", "window": {"kind": "fixed", "gamma": 4}})


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
