"""Exponential weights over drafts: bounds, replay of drafts that change between rounds, and the runtime's rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pairs import TEXT
from test_draft_choice import CANDIDATES, PROFILE, pair, planted_trace  # noqa: F401

from optimizer.cost import CostModel
from optimizer.fit.on_the_fly import Measured
from optimizer.hedge import (
    Hedge,
    follow_leader,
    hedge_bound,
    hedge_eta,
    hedge_requests,
    loss_range,
    position_seconds,
    replay_switched,
    run_hedge,
)
from optimizer.replay import ReplayTrace, run_replay
from runtime.policies.document import Policy, parse_policy
from runtime.policies.draft_choice import Option
from traces.errors import TraceError
from traces.schema import Sampling, Step, Trajectory


def sequences() -> list[np.ndarray]:
    """Losses [t, K]: random ones, drifting ones, and adversaries that read the weights or the leader before they speak."""
    rng = np.random.default_rng(0)
    found = [rng.uniform(size=(t, k)) for t in (1, 7, 300) for k in (2, 5)]
    found += [(rng.uniform(size=(400, 4)) < [0.5, 0.45, 0.5, 0.55]).astype(float), np.repeat(np.eye(3), 100, axis=0)]
    for k, eta in ((2, None), (4, None), (3, 0.1)):
        for what in ("weights", "leader"):
            state, rows = Hedge.over(k, eta), []
            for _ in range(300):
                row = np.zeros(k)
                row[int(np.argmax(state.weights)) if what == "weights" else state.leader] = 1.0
                rows.append(row)
                state = state.observed(row)
            found.append(np.array(rows))
    return found


@pytest.mark.parametrize("losses", sequences(), ids=lambda x: f"{x.shape[0]}x{x.shape[1]}")
def test_regret_is_within_its_bound(losses: np.ndarray) -> None:
    t, k = losses.shape
    for eta in (None, hedge_eta(k, t), 0.05, 2.0):
        done = run_hedge(losses, eta=eta)
        assert done.regret == pytest.approx((done.weights * losses).sum() - losses.sum(0).min())
        assert done.regret <= hedge_bound(k, t, eta) + 1e-9
        assert done.bound == hedge_bound(k, t, eta)
        np.testing.assert_allclose(done.weights.sum(1), 1.0)
        for n in range(1, t + 1, 37):  # with the rate that knows no horizon the bound holds at every time
            if eta is None:
                part = (done.weights[:n] * losses[:n]).sum() - losses[:n].sum(0).min()
                assert part <= hedge_bound(k, n) + 1e-9
    assert hedge_bound(k, t, hedge_eta(k, t)) == pytest.approx(math.sqrt(t * math.log(k) / 2))


def test_an_adversary_ruins_the_leader_but_not_the_weights() -> None:
    (losses,) = [x for x in sequences() if x.shape == (300, 4) and len(np.unique(x.sum(0))) == 1][:1]
    done = run_hedge(losses)
    assert losses[np.arange(300), done.leaders].sum() == 300  # the leader loses every time; the best draft 75 times
    assert done.regret < 0.15 * 300


def test_weights_are_exponential_and_picks_follow_them() -> None:
    state = Hedge.over(3, 0.7).observed([0.0, 1.0, 0.5]).observed([0.2, 0.0, 0.5])
    raw = np.exp(-0.7 * np.array([0.2, 1.0, 1.0]))
    np.testing.assert_allclose(state.weights, raw / raw.sum())
    assert state.leader == 0
    picks = np.bincount([state.pick((i + 0.5) / 10_000) for i in range(10_000)], minlength=3) / 10_000
    np.testing.assert_allclose(picks, state.weights, atol=1e-4)
    assert Hedge.over(1).observed([1.0]).weights.tolist() == [1.0]
    for bad in ([0.1, 0.2], [0.1, 0.2, 1.1], [0.1, 0.2, math.nan]):
        with pytest.raises(ValueError, match="hedge needs 3 losses from 0 to 1"):
            state.observed(bad)
    for arguments in ((0, None), (2, 0.0)):
        with pytest.raises(ValueError, match="at least one draft and a rate above 0"):
            Hedge.over(*arguments)


def test_hedge_across_requests_finds_the_best_single_draft() -> None:
    trace, _ = planted_trace(90)
    same = trace.select([i for i in range(90) if i % 3 == 1])  # prose alone: "far" is best
    measured, options = Measured.of(same, CANDIDATES, PROFILE), tuple(Option.of(d, p, PROFILE) for d, p in CANDIDATES.items())
    done, expected, led = hedge_requests(measured, options)
    best = int(measured.seconds.sum(0).argmin())
    assert done.leaders[3:].tolist() == [best] * 27
    assert done.weights[-1, best] == done.weights[-1].max()
    assert done.regret <= done.bound
    assert led.sum() < 1.1 * measured.seconds[:, best].sum()
    assert measured.seconds.min() <= expected.min()
    least, most = loss_range(options)
    each = (measured.seconds - measured.before) / 64
    assert 0 < least < each.min() < each.max() < 1.2 * most


def test_seconds_by_position_sum_to_the_request() -> None:
    part = planted_trace(9)[0].select([7, 1, 4])
    measured = Measured.of(part, CANDIDATES, PROFILE)
    scores = position_seconds(part, CANDIDATES, PROFILE).reshape(3, 64, 4).sum(1)
    np.testing.assert_allclose(scores, measured.seconds - measured.before, rtol=1e-12)


def shape(s: Step) -> tuple[Any, ...]:
    """What of a round must be equal; the lag where a model read it."""
    return s.start, s.drafted, s.verified, s.accepted, s.emitted, s.draft_steps, s.draft, s.policy, s.lag * (s.draft_steps > 0)


def test_switching_never_is_plain_replay() -> None:
    for temperature in (0.0, 1.0):
        trace, _ = planted_trace(6, temperature=temperature)
        profile = replace(PROFILE, noise_s=3e-4, sample_s=2e-4, draft_sample_s=1e-4)
        for k, policy in enumerate(CANDIDATES.values()):
            seconds, steps = replay_switched(trace, CANDIDATES, profile, lambda i, at, k=k: k)
            plain = run_replay(trace, policy, profile, per_round=True)
            np.testing.assert_allclose(seconds, plain.seconds, rtol=1e-12)
            assert [[shape(s) for s in r] for r in steps] == [[shape(s) for s in r] for r in plain.steps()]
            np.testing.assert_allclose([s.round_s for r in steps for s in r], [s.round_s for r in plain.steps() for s in r])


def test_following_the_leader_within_a_request() -> None:
    trace, _ = planted_trace(30)
    measured = Measured.of(trace, CANDIDATES, PROFILE)
    far = list(CANDIDATES).index("far")
    np.testing.assert_allclose(
        follow_leader(trace, CANDIDATES, PROFILE, block=64, first=far), measured.seconds[:, far], rtol=1e-12
    )
    led = follow_leader(trace, CANDIDATES, PROFILE, block=8, first=far)
    paid = follow_leader(trace, CANDIDATES, PROFILE, block=8, first=far, charged=True)
    assert led.sum() < measured.seconds.sum(0).min()  # each request finds its own draft in eight tokens
    assert measured.seconds.min(1).sum() < led.sum()
    assert (paid > led).all()
    same = follow_leader(trace.select(range(1, 30, 3)), CANDIDATES, PROFILE, block=8, carry=True)
    assert same.sum() < 1.1 * measured.seconds[1::3, far].sum()
    tree = parse_policy({"draft": "near", "growth": {"kind": "top_k"}, "window": {"kind": "fixed", "gamma": 3}})
    with pytest.raises(TraceError, match="switched in replay between chains only"):
        replay_switched(trace, {"near": tree}, PROFILE, lambda i, at: 0)
    with pytest.raises(ValueError, match="at least one token, not 0"):
        follow_leader(trace, CANDIDATES, PROFILE, block=0)


# -- with real models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_switched_rounds_are_the_runtimes(pair: Any, temperature: float) -> None:  # noqa: F811
    """Drafts that change every few tokens, decoded and replayed: the same rounds, lags included."""
    from runtime.decoder import Decoder
    from runtime.loop import StaticSource
    from runtime.panorama import record_panorama
    from runtime.policies.plan import prepare
    from traces.schema import Request

    sampling = Sampling(temperature, seed=3)
    plan = [2, 1, 2, 3, 0, 1, 3, 2]  # numbers of CANDIDATES, by fives of tokens

    def switch(i: int, at: int) -> int:
        return plan[(i + at // 5) % len(plan)]

    ready = [prepare(p, pair.draft_names, profile=PROFILE) for p in CANDIDATES.values()]

    class Source:
        number = 0

        def current(self) -> Any:
            return ready[self.number]

    source = Source()
    decoder = Decoder(pair, source)
    trajectories: list[Trajectory] = []
    executed: list[list[Step]] = []
    for i, text in enumerate(TEXT):
        plain = Decoder(pair, StaticSource(prepare(Policy(), pair.draft_names)))
        request = plain.request(Request(str(i), "c", (text,)), pair.encode(text), sampling, 40)
        trajectories.append(plain.decode(request).trajectory)
        steps, at = [], 0
        source.number = switch(i, 0)
        rounds = decoder.rounds(request)
        for item in rounds:
            steps.append(item.step)
            at += item.step.emitted
            source.number = switch(i, at)
        executed.append(steps)
    trace = ReplayTrace(trajectories, {d: [record_panorama(pair, t, d, 8) for t in trajectories] for d in pair.draft_names})
    seconds, replayed = replay_switched(trace, CANDIDATES, PROFILE, switch)

    assert [[shape(s) for s in steps] for steps in replayed] == [[shape(s) for s in steps] for steps in executed]
    assert len({s.draft for steps in replayed for s in steps if s.draft_steps}) == 3
    assert max(s.lag for steps in replayed for s in steps) > 4
    for i, steps in enumerate(replayed):
        models = {d: CostModel.of(PROFILE, d if d != "none" else None, trace.max_context) for d in CANDIDATES}
        prompt, total = len(trajectories[i].prompt_ids), 0.0
        total += sum(models[s.draft].round_seconds(s, prompt + s.start - 1, sampled=temperature > 0).round_s for s in steps)
        first_use = {s.draft: s.start for s in reversed(steps) if s.draft_steps}
        total += PROFILE.request_s + PROFILE.prefill.at(prompt - 1, 0)
        total += sum(PROFILE.draft_prefill[d].at(prompt + at - 1, 0) for d, at in first_use.items())
        assert seconds[i] == pytest.approx(total)
