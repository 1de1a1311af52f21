"""Confirming a winner: what is executed, what holds, what is said before; and how often the
evidence as a whole is wrong."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtrit

from bench.checks import nulls
from spectune.optimizer.tuning.confirm import (
    Spread,
    check_sample_size,
    confirm,
    planned,
    power_in_words,
)
from spectune.optimizer.tuning.confirmation import LEAST, LEVEL, Confirmation
from spectune.traces.errors import TraceError


def ends(confirmed: Confirmation) -> tuple[float, float]:
    """The interval's, where both are known."""
    low, high = confirmed.interval
    assert low is not None
    assert high is not None
    return low, high


def test_both_are_executed_alternately_and_the_ratio_is_of_total_speed() -> None:
    """The winner begins; a stall of one execution is outvoted by two others."""
    size, calls = np.arange(1.0, 9.0), []

    def execute(policy: str, n: int) -> float:
        calls.append((policy, n))
        stall = 50.0 if calls.count((policy, n)) == 2 and n == 3 and policy == "new" else 1.0
        return float(size[n] * stall * ((1.0 if n % 2 else 0.9) if policy == "new" else 1.2))

    found = confirm("new", "old", execute, units=8, executions=24)
    assert calls[:4] == [("new", 0), ("old", 0), ("old", 1), ("new", 1)]
    assert calls[16:18] == [("old", 0), ("new", 0)], "the second pass is in the other order"
    assert (found.requests, found.passes, len(calls)) == (8, 3, 2 * 8 * 3)
    assert found.ratio == pytest.approx(
        1.2 * size.sum() / (size * np.where(np.arange(8) % 2, 1.0, 0.9)).sum()
    )
    assert not found.against
    unknown = Confirmation.of("p", (1.2, 0.0, float("inf")), 1, 1)
    assert unknown.interval == (0.0, None)


def test_what_prediction_knows_of_requests_narrows_an_interval_but_not_below_their_own() -> None:
    """Of 40 requests 20 are executed. What suits which is predicted, so the others count as well;
    where an execution stalled both are executed again; and how requests differ stays in the
    interval."""
    rng = np.random.default_rng(0)
    old = rng.uniform(1.0, 3.0, 40)
    new = old / 1.1 * np.exp(0.1 * rng.standard_normal(40))
    noise, stalls = iter(np.exp(0.02 * rng.standard_normal(200))), set[tuple[str, int]]()

    def execute(policy: str, n: int) -> float:
        seconds = (new if policy == "new" else old)[n] * next(noise)
        stalled = (policy, n) in stalls
        stalls.discard((policy, n))
        return float(seconds * (5.0 if stalled else 1.0))

    def confirmed(**how: Any) -> Confirmation:
        stalls.update({("new", 7), ("old", 11)})
        return confirm("new", "old", execute, units=40, executions=20, **how)

    told = confirmed(expected={"new": 1.3 * new, "old": old})
    plain = confirmed()
    truth = old.sum() / new.sum()
    assert told.ratio == pytest.approx(truth, rel=0.02)
    low, high = ends(told)
    assert np.log(high / low) < 0.8 * np.log(np.divide(*ends(plain)[::-1]))
    assert np.log(high / low) > 2 * 2.3 * 0.1 / np.sqrt(40)


@pytest.mark.parametrize("executions", [36, 144])
def test_a_slowdown_on_a_few_requests_counts_in_full(executions: int) -> None:
    """Of 36 requests 33 are 6% faster and 3, against prediction, three times slower: in sum 0.90
    times as fast, however often all are executed."""
    rng, size = np.random.default_rng(0), np.ones(36)
    slow = np.where(np.arange(36) % 12 == 5, 3.0, 1 / 1.06)

    def execute(policy: str, n: int) -> float:
        noise = np.exp(0.05 * rng.standard_normal())
        return float((slow[n] if policy == "new" else 1.0) * noise)

    how: dict[str, Any] = {"units": 36, "executions": executions}
    found = confirm("new", "old", execute, **how, expected={"new": size / 1.06, "old": size})
    assert found.ratio == pytest.approx(36 / slow.sum(), rel=0.03)
    assert found.against == "the gain is not beyond noise"


def test_turns_of_a_conversation_are_no_independent_requests() -> None:
    """Four turns that behave as one tell as much as one: the interval is that of the
    conversations."""
    rng = np.random.default_rng(1)
    suits = np.exp(0.1 * rng.standard_normal(10)) / 1.2

    def execute(policy: str, n: int) -> float:
        return float(suits[n % 10]) if policy == "new" else 1.0

    one = confirm("new", "old", execute, units=10, executions=10)
    conversations = np.arange(40) % 10
    four = confirm("new", "old", execute, units=40, executions=40, groups=conversations)
    alone = confirm("new", "old", execute, units=40, executions=40)
    assert four.ratio == pytest.approx(one.ratio)
    assert ends(alone)[0] > ends(four)[0]


def test_how_rare_a_slowdown_may_go_unseen_is_told() -> None:
    """With 14 requests held out, one on 19% of all requests has a chance of 5% to meet none."""
    assert (1 - Confirmation.of("p", (1.2, 1.1, 1.3), 14, 1).missed) ** 14 == pytest.approx(0.05)
    said = check_sample_size(["a"] * 48, publish=True)
    assert said.endswith("a slowdown on fewer than 19% of requests can be missed")


def test_where_a_few_requests_cost_most_the_interval_rests_on_them() -> None:
    """Nothing gains, and sizes differ by a factor of e: at 98%, one in 100 is told as a gain, and
    of 400 nobody expects more than ten."""
    told = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        size = np.exp(rng.standard_normal(10))
        costs = {name: size * np.exp(0.1 * rng.standard_normal(10)) for name in ("new", "old")}
        found = confirm("new", "old", lambda p, n, c=costs: float(c[p][n]), units=10, executions=10)
        told += ends(found)[0] > 1.0
    assert told <= 10


def test_the_size_of_a_sample_is_counted_in_conversations() -> None:
    """Twenty conversations of four turns each leave six to confirm on, not 24."""
    of = np.repeat(np.arange(20), 4)
    said = check_sample_size(["a"] * 80, publish=True, of=of)
    assert said.startswith("6 of 20 conversations are held out to confirm the winner")
    with pytest.raises(TraceError, match="10 conversations leave 3 to confirm a winner on"):
        check_sample_size(["a"] * 40, publish=True, of=np.repeat(np.arange(10), 4))
    few = Confirmation.of("p", (1.5, 1.3, 1.7), 16, 1, conversations=4)
    assert few.against == "4 conversations are too few, 5 are needed"


def test_executions_are_planned_by_the_time_that_is_left() -> None:
    """All requests once before any twice, at least as many as a publication needs."""
    for asked, executions in (
        ((20, 1.0, 10.0, 8), 10),
        ((20, 1.0, 45.0, 8), 45),
        ((20, 0.01, 45.0, 8), 160),
        ((20, 60.0, 10.0, 8), LEAST),
        ((3, 1.0, 10.0, 8), 10),
    ):
        assert planned(*asked) == executions


def test_executions_end_where_requests_differ_more_than_executions_do() -> None:
    """One pass where an interval would be as wide after eight; all eight where noise decides."""
    assert Spread(0.2, 0.03).enough(14, 112) == 14
    assert Spread(0.01, 0.3).enough(14, 112) > 95
    assert Spread(0.08, 0.15).enough(14, LEAST) == LEAST, "there is no time for more"
    executions = Spread(0.08, 0.15).enough(14, 112)
    assert 14 < executions < 112


def test_the_chance_of_a_gain_is_as_often_as_it_is_found() -> None:
    """By the noncentral t, beside 4,000 drawn confirmations; that of no gain is the level's."""
    rng, spread = np.random.default_rng(0), Spread(0.04, 0.06)
    for gain in (0.0, 0.05):
        drawn = np.log1p(gain) + rng.normal(0, np.hypot(0.04, 0.06 / np.sqrt(2)), (4000, 24))
        t = drawn.mean(1) / (drawn.std(axis=1, ddof=1) / np.sqrt(24))
        published = float((t > stdtrit(23, (1 + LEVEL) / 2)).mean())
        assert spread.chance(24, 48, gain) == pytest.approx(published, abs=0.02)
    assert spread.chance(LEAST - 1, 99) == 0.0


def test_the_power_of_a_confirmation_is_said_with_what_would_raise_it() -> None:
    """A wide spread over requests needs more of them; noise needs time."""
    said = check_sample_size(["a"] * 40, publish=True)
    chance, more = map(int, re.findall(r"chance of (\d+)%; about (\d+) requests", said)[0])
    assert said.startswith("12 of 40 requests are held out to confirm the winner: a gain of 5%")
    assert chance < 30
    assert "give" not in check_sample_size(["a"] * int(more * 1.1), publish=True)
    noisy = power_in_words(Spread(0.01, 0.3), 50, 50, seconds=1.0, budget_s=80.0)
    seconds = int(re.findall(r"--budget (\d+)s gives about 30%", noisy)[0])
    assert 100 < seconds < 2000
    assert re.search(
        r"about \d+ requests give", power_in_words(Spread(0.3, 0.0), 50, 50, seconds=1.0)
    )


def test_too_few_requests_are_refused_with_how_many_would_do() -> None:
    with pytest.raises(
        TraceError,
        match="10 requests leave 3 to confirm a winner on, and 5 are needed to publish it: give 16",
    ):
        check_sample_size(["a"] * 10, publish=True)
    assert check_sample_size(["a"] * 16, publish=True)
    assert "3 of 10 requests are held out" in check_sample_size(["a"] * 10, publish=False)


@pytest.mark.parametrize("categories", ["aaa", "aaabbc", "abc", ""])
@pytest.mark.parametrize("publish", [False, True])
def test_the_number_said_to_suffice_suffices_and_one_fewer_does_not(
    categories: str, publish: bool
) -> None:
    """Six requests of three categories leave nothing to race on; of one category four are
    enough."""
    with pytest.raises(
        TraceError, match="too few requests to search, race and confirm on different ones"
    ) as raised:
        check_sample_size(categories, publish=publish)
    least = int(str(raised.value).partition("give ")[2].split()[0])
    more = [(categories or "a")[i % max(1, len(categories))] for i in range(least)]
    assert check_sample_size(more, publish=publish)
    with pytest.raises(TraceError, match="give "):
        check_sample_size(more[:-1], publish=publish)


def test_the_best_of_twelve_equals_is_seldom_published_and_a_gain_is() -> None:
    """100 tunings whose candidates are as fast as the incumbent: of series with a rate of 1%, one
    in 50 has four or more. Nor is what 15% of the requests make slower. Of 20 with a gain of 30%
    nearly all are published."""
    found = nulls.series(100, 12, 80, 1.0, 1)
    assert found["confirmed"] > 50
    assert found["published"] <= 3
    assert nulls.series(40, 6, 80, 1.19, 1, tail=0.15)["slower_held_out"] == 0
    assert nulls.series(20, 12, 80, 1.3, 1)["published"] >= 17
