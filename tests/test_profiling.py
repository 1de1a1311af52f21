"""Latency profiles: what the fit recovers, what the experiment measures, and which profile a tuning
uses."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from synthetic import flat_profile
from trace_values import a_trajectory

import spectune.runtime.profiling.measure
from spectune.optimizer.profiles import (
    common_factor,
    doubts,
    prediction_spread,
    profile_for,
    served_contexts,
    stored_profile,
)
from spectune.optimizer.tuning.sources import texts_to_profile
from spectune.optimizer.tuning.timings import Timings
from spectune.runtime.costs import MeasuredRound, RoundKind, predicted_seconds
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.profiling.measure import (
    ACCEPTED_ERROR,
    measure_profile,
)
from spectune.runtime.profiling.regression import Prefill, fit_profile, shapes_of
from spectune.traces.cost_table import terms_from_json
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling, Tokens
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import LatencyProfile, Trajectory

TRUE = flat_profile("p", ["near"])


def drawn_rounds(
    count: int, seed: int, *, noise: float = 0.03, slow: float = 0.1
) -> list[MeasuredRound]:
    """Rounds of many kinds as :data:`TRUE` has them, with noise, a share of them up to three times
    slower."""
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(count):
        gamma, sampled = int(rng.integers(0, 9)), bool(rng.random() < 0.5)
        kind, rows, drafted = RoundKind(sampled=sampled), (), 0
        if gamma:
            tree = rng.random() < 0.5
            kind = RoundKind("near", "top_k" if tree else "", sampled)
            width = int(rng.choice([1, 2, 4, 9])) if tree else 1
            rows, drafted = (int(rng.choice([1, 2, 4])), *[width] * (gamma - 1)), gamma * width
        context = int(rng.integers(32, 512))
        rounds.append(MeasuredRound(kind, context, rows, drafted, 2, 0.0, 0.0, 0.0))
    seconds = predicted_seconds(TRUE, [(r,) for r in rounds]) * rng.normal(1.0, noise, (count, 3))
    seconds *= np.where(rng.random((count, 1)) < slow, 3.0, 1.0)
    return [
        r._replace(draft_s=d, verify_s=v, round_s=d + v + 1e-4 * rng.normal(1.0, noise))
        for r, (d, v, _) in zip(rounds, seconds.tolist(), strict=True)
    ]


def fitted_to(rounds: list[MeasuredRound]) -> LatencyProfile:
    prefills = [Prefill("", n, 5e-3 + 9e-5 * (n - 8)) for n in (8, 64, 300)] * 3
    steps = [(r,) for r in rounds]
    shapes = shapes_of(["near"], (32, 272, 512), steps, prefills)
    return fit_profile(LatencyProfile("p", "cpu", "float32", {}), shapes, steps, prefills)


def test_the_fit_recovers_rounds_through_noise_and_slow_moments() -> None:
    """A tenth of the rounds take three times as long; the others' costs are found, also of rounds
    that were not fitted."""
    profile = fitted_to(drawn_rounds(1200, 0))
    assert all(s >= 0 for table in profile.terms.values() for s in table.seconds)
    fresh = drawn_rounds(300, 1)
    steps = [(r,) for r in fresh]
    apart = predicted_seconds(profile, steps)[:, 2] / predicted_seconds(TRUE, steps)[:, 2] - 1
    assert np.median(np.abs(apart)) < 0.015
    assert np.quantile(np.abs(apart), 0.9) < 0.04
    assert abs(np.median(apart)) < 0.01


def test_one_common_factor_brings_predictions_to_the_executions() -> None:
    """It is robust: one execution that was interrupted does not move it."""
    timings = Timings(
        {"a": np.array([[2.2, np.nan], [4.0, 4.8]]), "b": np.array([[1.1, 1.1], [500.0, np.nan]])},
        {"a": np.array([2.0, 4.0]), "b": np.array([1.0, 3.0])},
    )
    assert common_factor(timings) == pytest.approx(1 / 1.1)
    assert common_factor(Timings({})) == 1.0


@pytest.fixture(scope="module")
def profile(pair: LoadedPair) -> LatencyProfile:
    calls: list[tuple[int, int]] = []
    measured = measure_profile(
        pair,
        gamma_max=4,
        contexts=(16, 64, 5000),
        repeats=1,
        progress=lambda what, done, total: calls.append((done, total)),
        clock=time.thread_time,  # so that a busy machine fails no test
    )
    total = calls[-1][1]
    assert calls == [(done, total) for done in range(1, total + 1)]
    return measured


def test_every_cost_is_there(pair: LoadedPair, profile: LatencyProfile) -> None:
    """Chains, trees, stops and shortlists of every draft; contexts that the models cannot hold are
    left out."""
    assert (profile.pair_id, profile.terms["target"].knots[1]) == (pair.id, (16.0, 64.0))
    assert set(profile.chain_drafts) == {"near", "far", "ngram"}
    assert set(profile.tree_drafts) == {"near", "far"}
    terms = profile.terms
    for name in ("target", "prefill/target", "prefill/near", "round"):
        assert max(terms[name].seconds) > 0, name
    for draft in ("near", "far"):
        # On a busy machine a tiny draft's passes may all be called its phase.
        assert max(*terms[f"pass/{draft}"].seconds, *terms[f"phase/{draft}"].seconds) > 0
    assert {"stop max_prob", "stop joint_prob", "stop entropy", "sampled target", "noise"} <= {
        *terms
    }
    for kind in ("top_k", "static", "classifier", "stratify", "tree stop"):
        assert f"{kind}/near" in terms
    routed, trimmed = (profile.shortlist_sizes("near", routed=routed) for routed in (True, False))
    assert routed == trimmed
    assert {"device", "torch", "threads", "dtype", "python"} <= set(profile.environment)
    assert profile.environment["gamma_max"] == 4
    assert (
        LatencyProfile(
            **{
                **(data := json.loads(json.dumps(profile.to_json()))),
                "terms": terms_from_json(data["terms"]),
            }
        )
        == profile
    )


def test_predicted_rounds_are_checked_against_executed_ones(profile: LatencyProfile) -> None:
    for check in (profile.check, profile.check["trees"]):
        assert check["rounds"] > 20
        assert 0 <= check["median_error"] <= check["p90_error"]
        assert check["accepted"] == (check["policy_error"] <= ACCEPTED_ERROR)
        assert check["policy_spread"] >= 0
    assert 0 <= profile.check["overhead_share"] < 1


@pytest.mark.parametrize(
    ("errors", "trees", "sweeps"),
    [
        ([(0.02, 0.3), (0.03, 0.2)], True, 2),  # trees are never right
        ([(0.3, 0.02), (0.02, 0.02)], True, 2),
        ([(0.02, 0.03)], True, 1),
        ([(0.02, 0.3)], False, 1),  # nobody asks what trees cost
    ],
)
def test_a_profile_whose_check_fails_is_measured_on(
    pair: LoadedPair,
    profile: LatencyProfile,
    store: TraceStore,
    monkeypatch: pytest.MonkeyPatch,
    errors: list[tuple[float, float]],
    trees: bool,
    sweeps: int,
) -> None:
    """A second sweep where chains or trees failed; used again by the next tuning only where both
    were right, and said to have failed where they were not."""

    def checked(error: float) -> dict[str, Any]:
        passed = error <= ACCEPTED_ERROR
        return {"policy_error": error, "policy_spread": error / 2, "accepted": passed}

    checks = [{**checked(chains), "trees": checked(of_trees)} for chains, of_trees in errors]
    ahead = iter([replace(profile, check=check) for check in checks])
    measure = spectune.runtime.profiling.measure
    swept: list[int] = []
    monkeypatch.setattr(measure.Experiment, "sweep", lambda self, *a, **_: swept.append(len(a)))
    monkeypatch.setattr(measure, "fit_profile", lambda *args: profile)
    monkeypatch.setattr(measure, "_check", lambda *args: next(ahead))
    stored = profile_for(store, pair, pair.draft_names, gamma_max=4, trees=trees)
    assert swept == [1] + [2] * sweeps  # the first warms up
    assert stored.check == checks[-1]
    recent = datetime.now(UTC) - timedelta(hours=1)
    again = partial(stored_profile, store, pair, pair.draft_names, recent, trees=trees)
    assert again(gamma_max=4) == stored
    assert again(gamma_max=5) is None, "longer windows were not measured"
    worst = max(errors[-1][: 2 if trees else 1])
    assert ("failed its check" in doubts(stored, trees=trees)) == (worst > ACCEPTED_ERROR)
    assert prediction_spread(stored, trees=trees) == max(0.01, worst / 2)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_profile_is_measured_on_the_newest_recording_with_texts(store: TraceStore) -> None:
    pair, other = (cast(PairSpec, SimpleNamespace(id=name, name=name)) for name in ("p", "other"))
    store.put_pair(pair.id, pair.name, {})
    made = []
    for texts in ([a_trajectory(0)], []):
        info = store.create_recording(Asked(pair.id, None, Sampling(), 64))
        store.append_trajectories(info.id, [(i, text, ()) for i, text in enumerate(texts)])
        store.finish_recording(info.id)
        made.append(info.id)
    assert texts_to_profile(store, pair, None)[0] == made[0]
    assert texts_to_profile(store, other, None) == (None, ())
    with pytest.raises(TraceError, match="holds no text"):
        texts_to_profile(store, pair, made[1])


def test_shortlists_are_measured_where_no_tree_is() -> None:
    """Chains alone, as `tune --quick` without a head: the demo's draft has tokens enough."""
    pair = load_pair(read_pair("demo"), device="cpu", drafts=["small"])
    profile = measure_profile(pair, gamma_max=2, contexts=(32,), trees=False)
    for routed in (False, True):
        size, *_ = profile.shortlist_sizes("small", routed=routed)
        assert np.isfinite(profile.shortlist_seconds("small", size, routed=routed))


def test_contexts_are_quantiles_of_what_is_served() -> None:
    def text(prompt: int, output: int) -> Trajectory:
        ids = np.zeros(prompt, np.int32), np.zeros(output, np.int32)
        return Trajectory("r", "c", Tokens(*ids), Sampling(), output, "length")

    assert served_contexts([text(100, 101)]) == (105, 150, 195)
    assert served_contexts([text(9, 1)]) == (9,)
    assert served_contexts([]) == ()
