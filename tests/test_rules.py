"""bench/checks/rules.py: the loop that asks a rule before each step is replay's, and the rules are
those of the engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench import lab
from bench.checks import load_native, rules
from spectune.engines.engine import Load


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lab.halves(tmp_path_factory.mktemp("rules"), 0.0, quick=True)


@pytest.mark.parametrize("draft", ["small", "head"])
@pytest.mark.parametrize("clients", [1, 5])
def test_a_constant_takes_the_seconds_of_the_policy_that_it_is(
    trace: Any, draft: str, clients: int
) -> None:
    hardware, order = load_native.HARDWARE["H100, 8B, sloped"], list(range(12))
    play = load_native.Played(trace.trace, trace.pair, hardware, None)
    costs = load_native.costs_at(hardware, 1, 1, prompts=False)
    chain = rules.Chain.of(trace.trace, draft)
    bench = rules.Bench(chain, play, costs, [clients], load_native.TURNS)
    for gamma in (1, 6):
        told = play(rules.chain_of(draft, gamma), order, Load(clients))
        assert bench(rules.Constant(gamma), order, clients) == pytest.approx(told, rel=1e-12)


def test_an_average_of_accepted_lengths_moves_K_after_its_warm_up() -> None:
    rule, accepted = rules.Average(rules.SHIPPED), np.array([3, 3, 3])
    for step in range(15):
        assert rule.ask(accepted) == 3, step
        rule.tell(accepted, accepted, accepted)
    # 3 - 0.8 ** 15 is above 2.5, and below 4.5
    assert rule.ask(accepted) == 5
    for _ in range(30):
        rule.tell(accepted, accepted, np.zeros(3, int))
    assert rule.ask(accepted) == 1
    assert rule.ask(np.zeros(64, int)) == 0
    window: Any = rule.table("small").window
    assert window.gamma == {1: 1, 8: 3, 32: 1, 64: 0}


def test_what_is_verified_is_what_is_worth_its_time() -> None:
    logits = np.array([[4.0, 4.0, 4.0], [4.0, -4.0, 4.0]])
    requests = starts = np.array([0, 1])
    drafted = np.array([3, 3])
    free, dear = np.full(16, 1.0), np.where(np.arange(16) > 2, 1e3, 1.0)
    keen, stingy = (rules.Verification(3, logits, s, 0.0, slope=2.0) for s in (free, dear))
    assert keen.trim(requests, starts, drafted).tolist() == [3, 3]
    stingy.trim(requests, starts, drafted)  # nothing is known of the requests yet
    assert stingy.trim(requests, starts, drafted).tolist() == [0, 0]
    # Three of the six are worth half a row each: those that survive.
    half = rules.Verification(3, logits, 1.0 + 0.1 * np.arange(16), 0.0, slope=2.0)
    half.trim(requests, starts, drafted)
    kept = half.trim(requests, starts, drafted)
    assert kept[0] == 3
    assert kept[1] < 3
