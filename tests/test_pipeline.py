"""The pipeline over a bench of made-up costs: proposals are raced, the winner confirmed, published
and reported, whatever executes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from synthetic import policy
from trace_values import a_trajectory

from spectune.optimizer.deployment import Place
from spectune.optimizer.report.tuning_page import page, report_on
from spectune.optimizer.tuning.bench import (
    PartName,
    Prediction,
    Proposals,
    RecordedTexts,
    Tunable,
)
from spectune.optimizer.tuning.parts import recorded_parts
from spectune.optimizer.tuning.pipeline import ProveOptions, tune
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Counts, Outcome, RequestOutcome, Sampling
from spectune.traces.store import Asked, TraceStore

FAST, SLOW = policy("near", 3), policy("near", 9)
SECONDS = {FAST.id: 1.0, SLOW.id: 1.9, AUTOREGRESSIVE.id: 1.6}


class MadeUp(Tunable):
    """Costs of requests that are settled beforehand, with a little noise."""

    def __init__(self, store: TraceStore, recording: str, slower: float = 1.0) -> None:
        self.store, self.recording, self.slower = store, recording, slower
        self.noise, self.now = np.random.default_rng(0), 0.0
        self.clock = lambda: self.now
        loaded = store.load(recording, ()).requests
        ordinals = [request.ordinal for request in loaded]
        texts, parts = [r.trajectory for r in loaded], recorded_parts(store, recording, ordinals)
        info, each = store.get_recording(recording), np.arange(len(loaded))
        self._texts = RecordedTexts(info, texts, ordinals, each, parts)

    @property
    def texts(self) -> RecordedTexts:
        return self._texts

    def units(self, part: PartName) -> int:
        return len(getattr(self.texts.parts, part))

    def groups(self, part: PartName) -> npt.NDArray[np.int64]:
        return np.arange(self.units(part))

    def check(self, policy: Policy) -> None:
        if policy.id not in SECONDS:
            raise PolicyError("its costs are not made up")

    def propose(self, incumbent: Policy) -> Proposals:
        about: dict[str, Any] = {"sampler": "none", "seed": 0, "document": {}}
        name = self.store.put_study(
            self.texts.recording.pair_id, recording_id=self.recording, **about
        )
        return Proposals([FAST, SLOW], {"autoregressive": AUTOREGRESSIVE}, name, 2)

    def predict(self, policy: Policy, part: PartName) -> Prediction:
        costs = np.full(self.units(part), self.cost(policy.id))
        return Prediction(
            costs, 8 / costs[0], SimpleNamespace(outcome=lambda: outcome(policy.id, costs))
        )

    @contextmanager
    def execute(self, policies: Sequence[Policy], part: PartName) -> Iterator[MadeUpExecution]:
        yield MadeUpExecution(self, ComparedTexts(0, self.units(part), "float64"))

    def cost(self, name: str) -> float:
        return SECONDS[name] * (self.slower if name == FAST.id else 1.0)


@dataclass
class MadeUpExecution:
    """What :class:`MadeUp` executes with."""

    bench: MadeUp
    texts: ComparedTexts

    def __call__(self, policy_id: str, unit: int) -> float:
        self.bench.now += self.bench.cost(policy_id)
        return self.bench.cost(policy_id) * float(np.exp(self.bench.noise.normal(0, 0.01)))

    def outcome(self, policy_id: str, costs: npt.NDArray[np.float64]) -> Outcome:
        executed = ~np.isnan(costs).all(1)
        return outcome(policy_id, np.nanmean(costs[executed], 1))


def outcome(name: str, costs: npt.NDArray[np.float64]) -> Outcome:
    """What a policy did, eight tokens a request."""
    counts = [Counts(1, 4, 8, 4, 12, 12, 16, float(s)) for s in costs if not np.isnan(s)]
    return Outcome(
        name, "executed", tuple(RequestOutcome(f"r{n}", "a", c) for n, c in enumerate(counts))
    )


@pytest.fixture
def recording(store: TraceStore) -> str:
    store.put_pair("p", "made up", {"target": "t", "drafts": {}})
    made = store.create_recording(Asked("p", None, Sampling(), 64)).id
    store.append_trajectories(made, [(i, a_trajectory(i), ()) for i in range(40)])
    store.finish_recording(made)
    return made


def test_a_new_bench_tunes_to_a_publication(store: TraceStore, recording: str) -> None:
    """And what is in force is then what is to be beaten."""
    lines: list[str] = []
    options = ProveOptions(100.0, tell=lines.append)
    tuned = tune(store, MadeUp(store, recording), Place("cpu", "here", None), options)
    assert tuned.published is not None, tuned.reason
    assert (tuned.winner.policy, tuned.incumbent.policy) == (FAST, AUTOREGRESSIVE)
    assert tuned.confirmed is not None
    assert 1.55 < tuned.confirmed.ratio < 1.65
    active = store.active_publication("p", "cpu", "here")
    assert active is not None
    assert (active.policy_id, active.evidence["study"]) == (FAST.id, tuned.study)
    assert "times as fast as" in page(report_on(store, tuned.study))
    again = tune(store, MadeUp(store, recording), Place("cpu", "here", active), options)
    assert (again.incumbent.policy, again.published) == (FAST, None)
    assert "the incumbent stays" in again.reason


@pytest.mark.parametrize("budget_s", [20.0, 100.0])
def test_how_rare_a_slowdown_may_go_unseen_is_told_of_what_is_executed(
    store: TraceStore, recording: str, budget_s: float
) -> None:
    """On any bench; of what is held out there may be time for a part alone."""
    lines, bench = list[str](), MadeUp(store, recording)
    options = ProveOptions(budget_s, tell=lines.append)
    confirmed = tune(store, bench, Place("cpu", "here", None), options).confirmed
    assert confirmed is not None
    assert (confirmed.requests < bench.units("confirm")) == (budget_s == 20.0)
    (line,) = [line for line in lines if line.startswith("confirming ")]
    assert f" on {confirmed.requests} requests: a gain of 5% is published with" in line
    rare = f"; a slowdown on fewer than {100 * confirmed.missed:.0f}% of requests can be missed"
    assert line.endswith(rare)


def test_what_is_not_proved_changes_nothing(store: TraceStore, recording: str) -> None:
    place = Place("cpu", "here", None)
    tuned = tune(store, MadeUp(store, recording, slower=1.6), place, ProveOptions(100.0))
    assert tuned.published is None
    assert tuned.winner.policy == AUTOREGRESSIVE
    unknown = policy("near", 5)
    store.put_policy(unknown.id, unknown.spelled_out(), unknown.label())
    version = store.publish("p", "cpu", unknown.id, actor="test", deployment="here").version
    over = store.active_publication("p", "cpu", "here")
    tuned = tune(store, MadeUp(store, recording), Place("cpu", "here", over), ProveOptions(100.0))
    assert f"publication {version} cannot run (its costs are not made up)" in tuned.reason
    few = store.create_recording(Asked("p", None, Sampling(), 64)).id
    store.append_trajectories(few, [(i, a_trajectory(i), ()) for i in range(3)])
    with pytest.raises(TraceError, match="too few requests"):
        tune(store, MadeUp(store, few), place, ProveOptions())
