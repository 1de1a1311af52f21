"""Whether a rollout promotes, reverts or does neither, by pairs of blocks; and those by rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.checks import rollouts
from spectune.engines.engine import chain_round
from spectune.engines.vllm.folder import is_candidates
from spectune.optimizer.rollout.decision import (
    BLOCK_S,
    DROPPED_S,
    LOOKS,
    BlockPair,
    MeasuredBlock,
    judge,
    looks_of,
    mixture_bound,
)
from spectune.optimizer.rollout.round_blocks import SETTLED_S, BlockTurns, Tally
from spectune.traces.schema import Step

CONFSEQ = {
    (0.16, 0.008, 0.16): 1.45547288263235,
    (0.04, 0.008, 0.16): 0.767302048324879,
    (2.5, 0.008, 0.16): 6.11901086914102,
    (1, 0.05, 10): 3.85505463353031,
    (100, 0.05, 10): 32.4172314540544,
    (7.5, 0.01, 3): 9.89059696471422,
}
"""Of (v, alpha, v_opt) what ``TwoSidedNormalMixture`` of confseq 0.0.11 has, alpha_opt = alpha: its
own C++, as its Python does not build on Python 3.11."""


@pytest.mark.parametrize(("of", "bound"), CONFSEQ.items())
def test_the_bound_is_that_of_confseq(of: tuple[float, float, float], bound: float) -> None:
    assert mixture_bound(*of) == pytest.approx(bound, rel=1e-9)


def pairs(
    count: int, gain: float, noise: float = 0.05, servers: int = 1, seed: int = 0
) -> list[BlockPair]:
    """Pairs of blocks of servers whose candidate is so many times as fast."""
    rng, found = np.random.default_rng(seed), list[BlockPair]()
    for n in range(count):
        seconds = 10.0 * np.exp(noise * rng.standard_normal(2))
        blocks = (
            MeasuredBlock(float(seconds[0]), 500, 9),
            MeasuredBlock(float(seconds[1] / gain), 500, 9),
        )
        found.append(BlockPair(f"s{n % servers}", n // servers, *blocks))
    return found


def test_a_faster_policy_is_promoted_at_a_look_and_only_there() -> None:
    several = pairs(96, 1.2)
    assert judge(several[: LOOKS[0] - 1]).verdict == "go on"
    found = judge(several[: LOOKS[0]])
    assert (found.verdict, found.looks[-1].pairs) == ("promote", LOOKS[0])
    ratio, low, high = found.looks[-1].ratio
    assert 1.0 < low < ratio < high
    assert ratio == pytest.approx(1.2, abs=0.06)


def test_what_was_looked_at_is_not_looked_at_again() -> None:
    slow, fast = pairs(LOOKS[0], 1.0), pairs(LOOKS[1] - LOOKS[0], 1.3)
    first = judge(slow)
    assert (first.verdict, len(first.looks)) == ("go on", 1)
    later = judge(pairs(LOOKS[0], 1.3) + fast, taken=first.looks)
    assert (later.verdict, later.looks[0]) == ("promote", first.looks[0])


@pytest.mark.parametrize(("gain", "noise"), [(1.0, 0.02), (1.004, 0.001), (1.04, 0.4)])
def test_what_is_not_worth_it_or_not_shown_is_inconclusive(gain: float, noise: float) -> None:
    every = pairs(LOOKS[-1], gain, noise)
    assert judge(every[:-1]).verdict == "go on"
    assert judge(every).verdict == "inconclusive"


def test_half_the_speed_is_reverted_within_four_pairs() -> None:
    for seed in range(20):
        found = judge(pairs(4, 0.5, 0.1, seed=seed))
        assert found.verdict == "revert"
        assert "times as fast by" in found.reason


def test_a_small_harm_is_reverted_when_it_is_shown() -> None:
    several = pairs(60, 0.95, 0.03)
    verdicts = [judge(several[:n]).verdict for n in range(len(several))]
    assert verdicts.index("revert") > 4
    assert "promote" not in verdicts


def test_a_wait_for_the_first_token_beyond_the_limit_is_reverted() -> None:
    def waiting(seconds: float) -> list[BlockPair]:
        waits = (*19 * (0.1,), seconds)
        return [replace(p, candidate=replace(p.candidate, first_tokens_s=waits)) for p in fast]

    fast = pairs(3, 1.2)
    assert judge(waiting(9.0), first_token_limit_s=1.0).verdict == "go on", "5% may"
    slower = [replace(p, candidate=replace(p.candidate, first_tokens_s=20 * (2.0,))) for p in fast]
    found = judge(slower, first_token_limit_s=1.0)
    assert found.verdict == "revert"
    assert "beyond the limit of 1 s" in found.reason
    assert judge(slower).verdict == "go on"
    assert judge(slower[:1], first_token_limit_s=1.0).verdict == "go on", "too few requests"


def test_many_servers_are_units_and_each_has_its_pairs() -> None:
    """One server of eight that gains a lot proves nothing of the others."""
    assert looks_of(1) == LOOKS
    assert looks_of(8) == tuple(8 * count for count in LOOKS)
    lucky = [
        replace(p, candidate=replace(p.candidate, seconds=5.0)) if p.server == "s0" else p
        for p in pairs(looks_of(8)[0], 1.0, 0.01, servers=8)
    ]
    (look,) = judge(lucky, servers=8).looks
    assert look.ratio[0] > 1.05
    assert look.ratio[1] < 1.0


def test_a_burst_in_one_block_is_no_gain_of_the_other_policy() -> None:
    rng, found = np.random.default_rng(3), list[BlockPair]()
    for n in range(LOOKS[1]):
        arrivals = rng.poisson(9, 2)
        seconds = 10.0 * ((1 + arrivals) / 10) ** 0.5 * np.exp(0.02 * rng.standard_normal(2))
        blocks = (
            MeasuredBlock(float(s), 500, int(a)) for s, a in zip(seconds, arrivals, strict=True)
        )
        found.append(BlockPair("s0", n, *blocks))
    ratio, low, high = judge(found).looks[-1].ratio
    raw = np.array([p.log_ratio for p in found])
    assert high / low < math.exp(4 * raw.std() / math.sqrt(len(found)))
    assert abs(math.log(ratio)) < abs(raw.mean()) / 3


TURNS = BlockTurns("s0", 1000.0, 7, "old", "new")


def request(at: float, count: int = 8, every_s: float = 2.0) -> tuple[Step, ...]:
    """A request that arrives at a moment of the trial: its prompt takes 0.5 s, then it has so many
    rounds of two tokens, each by the policy whose turn it is."""
    arrived = TURNS.since + at

    def decoded(start: int, emitted: int, seconds: float, ended: float) -> Step:
        policy = TURNS.policy_of(int((ended - TURNS.since) // BLOCK_S))
        counts = start, int(start > 0), emitted - 1, emitted
        about = {"policy": policy, "round_s": seconds, "arrived_s": arrived, "ended_s": ended}
        return chain_round(*counts, **about)

    ends = [arrived + 0.5 + (n + 1) * every_s for n in range(count)]
    rounds = (decoded(2 * n + 1, 2, every_s, ended) for n, ended in enumerate(ends))
    return (decoded(0, 1, 0.5, arrived + 0.5), *rounds)


def found(requests: Sequence[Sequence[Step]], now: float = 1e6) -> list[BlockPair]:
    tally = Tally(TURNS)
    for steps in requests:
        tally.add(steps)
    return tally.pairs(TURNS.since + now)


def test_rounds_are_summed_by_blocks_their_beginnings_dropped() -> None:
    requests = [request(at) for at in np.arange(1.0, 4 * BLOCK_S, 1.5)]
    both = found(requests, 4 * BLOCK_S + SETTLED_S + 1)
    assert [pair.number for pair in both] == [0, 1]
    steps = [step for steps in requests for step in steps if not step.reads_prompt]
    for pair in both:
        for block, is_candidate in ((pair.incumbent, False), (pair.candidate, True)):
            first = is_candidates(TURNS.seed, 2 * pair.number)
            number = 2 * pair.number + (first != is_candidate)
            low = TURNS.since + number * BLOCK_S
            within = [s for s in steps if low + DROPPED_S <= s.ended_s < low + BLOCK_S]
            assert block.tokens == sum(s.emitted for s in within) > 0
            assert block.seconds == pytest.approx(sum(s.round_s for s in within))
            arrived = [r for r in requests if low <= r[0].arrived_s < low + BLOCK_S]
            assert block.arrivals == len(arrived)
            assert all(wait == pytest.approx(0.5) for wait in block.first_tokens_s)
    assert len(found(requests, 4 * BLOCK_S + SETTLED_S - 1)) == 1, "requests may still run"


def test_rounds_of_another_policy_than_the_blocks_make_no_pair() -> None:
    """A trial that was over, or a clock that was stepped."""
    requests = [request(at) for at in np.arange(1.0, 4 * BLOCK_S, 1.5)]
    assert len(found(requests)) == 2
    ended = [
        tuple(s._replace(policy="old") if s.ended_s > TURNS.since + 90 else s for s in steps)
        for steps in requests
    ]
    assert [pair.number for pair in found(ended)] == [0]
    stepped = [tuple(s._replace(ended_s=s.ended_s + 3600) for s in steps) for steps in requests]
    assert all(s.tokens < 600 for pair in found(stepped) for s in (pair.incumbent, pair.candidate))


def test_simulated_rollouts_end_as_the_bench_counts_them() -> None:
    half, alike, faster = (rollouts.series(30, 1, 1.0, gain) for gain in (0.5, 1.0, 1.3))
    assert half["reverted_within_four_pairs"] >= 28
    assert alike["promote"] + alike["revert"] <= 2
    assert faster["promote"] == 30
