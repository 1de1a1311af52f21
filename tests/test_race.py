"""Racing policies on a clock that only moves when something is executed: who is dropped, when it
ends, who wins."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from recorded_texts import plain_texts
from synthetic import policy

from spectune.optimizer.execute import DecodeOptions, Executor, encode
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.search import PREDICTION_ERROR, SearchStudy, Trial, rivals
from spectune.optimizer.tuning.bench import Bench, Prediction
from spectune.optimizer.tuning.confirmation import finite
from spectune.optimizer.tuning.pipeline import ProveOptions, confirm_winner, run_race
from spectune.optimizer.tuning.race import BLOCK, eliminate, fastest_of
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.optimizer.tuning.timings import TIE, Timings
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.errors import TraceError
from spectune.traces.schema import Outcome, Request, Sampling, Workload


class Machine:
    """Executes policies by id: seconds are cost x size of the request x the machine's mood x noise;
    its clock adds them up."""

    def __init__(
        self,
        cost: dict[str, float],
        noise: float = 0.0,
        mood: Callable[[float], float] = lambda now: 1.0,
    ) -> None:
        self.cost, self.noise, self.mood, self.now = cost, noise, mood, 0.0
        self.calls: list[tuple[str, int]] = []
        self._rng = np.random.default_rng(0)

    def race(self, requests: int = 20, **how: Any) -> tuple[Timings, tuple[str, ...]]:
        return eliminate(list(self.cost), requests, self.execute, clock=lambda: self.now, **how)

    def execute(self, policy: str, request: int) -> float:
        self.calls.append((policy, request))
        noise = float(np.exp(self.noise * self._rng.standard_normal()))
        seconds = self.cost[policy] * (1 + request % 5) * self.mood(self.now) * noise
        self.now += seconds
        return seconds


def executions(timings: Timings, policy: str) -> int:
    return int((~np.isnan(timings.seconds[policy])).sum())


def test_the_clearly_slower_are_dropped_and_the_rest_goes_to_the_near() -> None:
    """After one block the slow one is out, a baseline is executed to the end of the first pass."""
    cost = {"a": 1.0, "b": 1.005, "slow": 2.5, "baseline": 2.0}
    timings, left = Machine(cost, 0.08).race(baselines=["baseline"], passes=6)
    assert executions(timings, "slow") == BLOCK  # the first look
    assert executions(timings, "baseline") == 20
    assert executions(timings, "a") > 20
    assert set(left) <= {"a", "b"}
    assert timings.leader(left) in ("a", "b")


@pytest.mark.parametrize("lead", [0.02, 0.05])
def test_the_fastest_wins_whatever_mood_the_machine_is_in(lead: float) -> None:
    """A machine that is 1.7 times slower for minutes at a time changes nothing: the blocks are
    short, and ratios are within them."""
    cost = {str(i): 1.0 + lead * i for i in reversed(range(6))}
    machine = Machine(cost, 0.03, lambda now: 1.7 if int(now / 60) % 3 == 0 else 1.0)
    timings, left = machine.race(passes=8)
    assert timings.leader(left) == "0"
    assert "5" not in left
    ratio, low, high = timings.ratio("0", "5")
    assert low <= ratio <= high
    assert ratio == pytest.approx(cost["5"], rel=0.05)


def test_it_ends_when_nothing_is_left_to_gain_or_the_time_is_used() -> None:
    """Equals without noise take one pass; a budget ends a race in the middle of a pass, never
    before the first request is done."""
    timings, left = Machine({"a": 1.0, "b": 1.0 + TIE / 2}).race(passes=8)
    assert executions(timings, "a") == 20
    assert "a" in left
    machine = Machine({"a": 1.0, "b": 1.001}, 0.1)
    timings, left = machine.race(passes=8, budget_s=30.0)
    assert set(left) == {"a", "b"}
    assert executions(timings, "a") == executions(timings, "b") < 20
    timings, _ = machine.race(passes=8, budget_s=0.0)
    assert executions(timings, "a") == executions(timings, "b") == 1


def test_every_policy_goes_first_equally_often() -> None:
    """The order rotates from request to request."""
    machine = Machine({"a": 1.0, "b": 1.001, "c": 1.002}, 0.2)
    machine.race(6, passes=1)
    assert "".join(policy for policy, _ in machine.calls[::3]) == "abcabc"
    assert [n for _, n in machine.calls] == [n for n in range(6) for _ in range(3)]


def test_projection_undoes_the_luck_of_which_requests_were_executed() -> None:
    """Executed requests favour b, those of the race together a; prediction knows, though it takes
    every b for 10% too slow."""
    rng = np.random.default_rng(0)
    a, b = rng.uniform(1.0, 3.0, 50), rng.uniform(1.0, 3.0, 50)
    done = np.isin(np.arange(50), np.argsort(b - a)[:20])
    measured = {p: np.where(done, seconds, np.nan)[:, None] for p, seconds in (("a", a), ("b", b))}
    timings = Timings(measured, {"a": a, "b": 1.1 * b})
    truth = b.sum() / a.sum()
    assert timings.ratio("a", "b")[0] < 0.9 * truth
    projected = timings.ratio("a", "b", projected=True)
    assert projected == pytest.approx((truth, truth, truth))
    plain = timings.ratio("a", "b")
    assert plain[2] - plain[1] > 0.05


def test_ratios_are_over_shared_executions() -> None:
    """What only one was executed on counts for neither; nothing shared is no evidence."""
    nan = np.nan
    seconds = {"a": [[1.0, 9.0, 9.0], [9.0, nan, nan]], "b": [[2.0, nan, nan], [nan] * 3]}
    timings = Timings({p: np.array(s) for p, s in seconds.items()} | {"c": np.full((2, 3), nan)})
    assert timings.ratio("a", "b") == (2.0, 0.0, float("inf"))
    assert timings.ratio("a", "c") == (1.0, 0.0, float("inf"))
    assert finite(timings.ratio("a", "c")) == [1.0, 0.0, None]


fixed = partial(policy, "near")
BASE = np.linspace(1.0, 2.0, 20)
NOISY = BASE * np.where(np.arange(20) % 2, 1.05, 0.95)
PLAIN = fixed(3)


def won(
    seconds: list[tuple[Policy, np.ndarray]], predicted: dict[str, float] | None = None
) -> Policy:
    """The winner among policies with these seconds by request, predicted at these tokens/s, by
    default as executed."""
    timings = Timings({p.id: took[:, None] for p, took in seconds})
    speeds = predicted or {p.id: 1.0 / took.sum() for p, took in seconds}
    return fastest_of([p for p, _ in seconds], timings, speeds, 0.02)


def test_of_equals_the_simplest_wins() -> None:
    """Equals are those that the measured interval cannot tell apart and prediction puts within 1%:
    of them a plain window wins over one with a stop, and a shorter over a longer. Half a percent
    beyond noise, or 2% by prediction, is a difference."""
    stopped, longer = fixed(3, stop={"kind": "max_prob", "threshold": 0.4}), fixed(6)
    assert won([(PLAIN, BASE), (stopped, BASE)]) == PLAIN
    assert won([(PLAIN, NOISY * 1.003), (stopped, BASE)]) == PLAIN
    assert won([(longer, BASE), (PLAIN, NOISY * 1.003)]) == PLAIN
    assert won([(PLAIN, BASE * 1.02), (stopped, BASE)]) == stopped
    assert won([(PLAIN, BASE * 1.003), (longer, BASE)]) == longer
    speeds = {PLAIN.id: 1.0, stopped.id: 1.03}
    assert won([(PLAIN, NOISY * 1.01), (stopped, BASE)], speeds) == stopped
    assert won([(AUTOREGRESSIVE, BASE), (PLAIN, BASE)]) == AUTOREGRESSIVE


def test_one_execution_does_not_outvote_prediction() -> None:
    """Of a single unit nobody knows the noise: 5% faster once is nothing beside 30% slower as
    predicted."""
    speeds = {PLAIN.id: 1.0, fixed(6).id: 0.7}
    assert won([(PLAIN, np.array([1.05])), (fixed(6), np.array([1.0]))], speeds) == PLAIN
    speeds = {PLAIN.id: 1.0, fixed(6).id: 1.3}
    assert won([(PLAIN, np.array([1.0])), (fixed(6), np.array([1.05]))], speeds) == fixed(6)


def test_rivals_are_the_fixed_windows_that_prediction_cannot_tell_apart() -> None:
    """Within the prediction's error of the best fixed window, fastest first, none twice; other
    kinds are not counted."""
    heuristic = fixed({"kind": "fsm", "gamma_max": 4})
    values = {5: 100.0, 4: 99.0, 6: 97.0, 2: 100 * (1 - PREDICTION_ERROR) - 1}
    trials = [Trial(heuristic, 120.0, ""), *(Trial(fixed(g), v, "") for g, v in values.items())]
    study = SearchStudy(tuple(trials), 0, "")
    assert [t.policy for t in rivals(study, [heuristic])] == [fixed(5), fixed(4), fixed(6)]
    assert [t.policy for t in rivals(study, [heuristic, fixed(5)], 1)] == [fixed(4)]
    assert rivals(SearchStudy((Trial(AUTOREGRESSIVE, 1.0, ""),), 0, ""), []) == []


def test_executed_texts_are_counted_beside_autoregression_repeated(pair: LoadedPair) -> None:
    requests = tuple(Request(f"r{i}", "code", f"def f{i}(") for i in range(3))
    encoded = encode(pair, Workload("w", requests), DecodeOptions(max_new_tokens=8))
    executor = Executor(pair, [AUTOREGRESSIVE, policy("near", 2)], encoded)
    for name, request in (("near", 0), ("none", 0), ("none", 1), ("none", 1), ("near", 2)):
        executor(AUTOREGRESSIVE.id if name == "none" else policy("near", 2).id, request)
    assert str(executor.texts) == (
        "0 of 2 texts differ (float32; autoregression repeated at the same batch: 0 of 1)"
    )


def test_a_window_that_learns_begins_each_pass_as_it_began_the_first(pair: LoadedPair) -> None:
    """What it learned of these very requests would not help it on others. Within a pass it goes on
    from request to request, as its replay does."""
    learns = {"kind": "q_learning", "gamma_max": 6, "epsilon": 0.2, "learning_rate": 0.5}
    learner = policy("ngram", learns)
    prompts = ("a b a b a b a b", "x = 1; x = 1; x =", "0 1 2 0 1 2 0 1 2")
    asked = Workload("w", tuple(Request(f"r{i}", "", p) for i, p in enumerate(prompts)))
    encoded = encode(pair, asked, DecodeOptions(max_new_tokens=40))
    ticks = count()
    executor = Executor(pair, [learner], encoded, clock=lambda: float(next(ticks)))
    numbers = range(len(prompts))
    passes = [[executor(learner.id, n) for n in numbers] for _ in range(3)]
    assert passes[0] == passes[1] == passes[2], "as many rounds, which is what this clock counts"
    texts = plain_texts(pair, {f"r{i}": p for i, p in enumerate(prompts)}, Sampling(), 40)
    trace = ReplayTrace(texts, {"ngram": [record_panorama(pair, t, "ngram", 6) for t in texts]})
    executed = executor.outcome(learner.id, np.array(passes).T)
    replayed = run_replay(trace, learner).outcome()
    for done, told in zip(executed.per_request, replayed.per_request, strict=True):
        assert replace(done.counts, seconds=0.0) == replace(told.counts, seconds=0.0)
    alone = [run_replay(trace.select([n]), learner).counts[0, 0] for n in numbers]
    together = [r.counts.rounds for r in replayed.per_request]
    assert alone != together, "the state that is carried shows"


class Loads(Bench):
    """A bench of an engine: a unit is a run of its loads, which weigh alike; a policy with another
    draft takes another server."""

    by_size, block, unit = False, 1, "runs"
    gain = "times the goodput of"

    def __init__(self, cost: dict[str, float]) -> None:
        self.cost, self.servers = cost, list[str]()
        self._rng = np.random.default_rng(0)

    def units(self, part: str) -> int:
        return {"race": 4, "confirm": 8}[part]

    def groups(self, part: str) -> np.ndarray:
        return np.arange(self.units(part))

    def group(self, policy: Policy) -> str:
        return policy.draft

    def predict(self, policy: Policy, part: str) -> Prediction:
        if policy == AUTOREGRESSIVE:
            raise TraceError("nothing was recorded without a draft")
        costs = self.cost[policy.id] * np.array([1.0, 30.0] * (self.units(part) // 2))
        replayed = SimpleNamespace(outcome=lambda: Outcome(policy.label(), "replayed", ()))
        return Prediction(costs, 1.0 / self.cost[policy.id], replayed)

    @contextmanager
    def execute(self, policies: Sequence[Policy], part: str) -> Iterator[Any]:
        drafts = {policy.id: policy.draft for policy in policies}

        def run(name: str, unit: int) -> float:
            self.servers += [] if self.servers[-1:] == [drafts[name]] else [drafts[name]]
            noise = np.exp(0.01 * self._rng.standard_normal())
            return float(self.cost[name] * (1.0, 30.0)[unit % 2] * noise)

        run.texts = ComparedTexts(0, 4, "float32")  # type: ignore[attr-defined]
        run.outcome = lambda name, costs: Outcome(name, "executed", ())  # type: ignore[attr-defined]
        yield run


def test_race_and_confirmation_go_over_any_bench() -> None:
    policies = [policy("near", 3), policy("far", 3), policy("near", 5)]
    cost = {p.id: c for p, c in zip(policies, (1.0, 1.02, 1.2), strict=True)}
    bench, told = Loads({**cost, AUTOREGRESSIVE.id: 1.3}), list[str]()
    roles = {f"finalist {n}": p for n, p in enumerate(policies)}
    roles |= {"incumbent": AUTOREGRESSIVE}
    options = ProveOptions(60.0, tell=told.append)
    raced = run_race(bench, roles, AUTOREGRESSIVE, options, passes=2)
    assert raced.winner.policy == policies[0]
    assert raced.incumbent.predicted is None
    assert "is raced without a prediction: nothing was recorded" in told[0]
    first = bench.servers[:3]
    assert sorted(first) == ["far", "near", "none"], "each server is started once a unit"
    confirmed, texts = confirm_winner(bench, raced, options, passes=2)
    assert confirmed is not None
    assert not confirmed.against
    assert (confirmed.interval[0] or 0.0) < 1.3 < (confirmed.interval[1] or 9.0)
    assert (confirmed.requests, texts.compared) == (8, 8)
    assert confirmed.unit == "runs"
    assert re.search(r"on 8 runs: a gain of 5% is published with a chance of \d+%", told[-1])
