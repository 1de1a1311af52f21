"""The latency profile: what is measured, how it is checked, how it survives storage."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from pairs import make_pair

from runtime.loading import LoadedPair, load_pair
from runtime.pair import read_pair
from runtime.policies.document import parse_policy
from runtime.policies.prepared import window_costs
from runtime.profiler import center, measure_profile, merge_profiles
from traces.errors import PolicyError
from traces.schema import CostCurve, LatencyProfile


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedPair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_pair(read_pair(str(make_pair(tmp_path_factory.mktemp("pair")))), device="cpu")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def profile(pair: LoadedPair) -> LatencyProfile:
    calls: list[tuple[int, int]] = []
    measured = measure_profile(
        pair, gamma_max=4, contexts=(16, 64, 5000), repeats=3, progress=lambda what, done, total: calls.append((done, total))
    )
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == list(range(1, len(calls) + 1))
    return measured


def test_every_cost_is_there_and_positive(pair: LoadedPair, profile: LatencyProfile) -> None:
    """Every width and draft has a cost, contexts the models cannot hold are left out, the environment is told."""
    assert profile.pair_id == pair.id
    assert profile.verify.widths == (1, 2, 3, 4, 5)
    assert profile.verify.contexts == (16, 64)
    assert set(profile.draft_step) == {"near", "far", "ngram"}
    for curve in (profile.verify, profile.prefill, *profile.draft_step.values()):
        assert all(x > 0 for row in curve.median_s for x in row)
        assert all(x > 0 for row in curve.cost_s for x in row)
    assert profile.draft_step["ngram"].at(1, 50) < profile.draft_step["near"].at(1, 50)
    assert {"device", "torch", "threads", "dtype", "python"} <= set(profile.environment)
    assert set(profile.stop_step_s) == {"none", "max_prob", "joint_prob", "entropy"}
    assert profile.noise_s > 0


def test_composed_rounds_are_checked_against_executed_ones(profile: LatencyProfile) -> None:
    """The check says how far composition was from execution, and whether that is accepted."""
    assert profile.check["rounds"] > 20
    assert 0 <= profile.check["median_error"] <= profile.check["p90_error"]
    assert isinstance(profile.check["accepted"], bool)


def test_json_round_trip(profile: LatencyProfile) -> None:
    """Through JSON and back nothing changes; documents from before means were kept still load."""
    document = json.loads(json.dumps(profile.to_json()))
    assert LatencyProfile.from_json(document) == profile
    for curve in (document["verify"], document["prefill"]):
        del curve["mean_s"]
    old = LatencyProfile.from_json(document)
    assert old.verify.cost_s == profile.verify.median_s


def test_window_costs_come_from_the_profile(profile: LatencyProfile) -> None:
    """a_q and b_p(gamma) for every gamma of the window; a draft that was not profiled is refused."""
    costs = window_costs(profile, parse_policy({"draft": "near", "window": {"kind": "analytic", "gamma_max": 4}}))
    assert costs is not None
    assert len(costs.verify_s) == 5
    assert costs.draft_step_s == pytest.approx(profile.draft_step["near"].at(1, 256))
    with pytest.raises(PolicyError, match="run `profile` again"):
        window_costs(profile, parse_policy({"draft": "other", "window": {"kind": "analytic"}}))


def test_curves_interpolate_and_extrapolate() -> None:
    """Bilinear inside the grid, the last slope beyond it, never negative."""
    curve = CostCurve((1, 3), (0, 100), ((1.0, 2.0), (3.0, 4.0)), ((0.0, 0.0), (0.0, 0.0)))
    assert curve.at(2, 50) == pytest.approx(2.5)
    assert curve.at(5, 0) == pytest.approx(5.0)
    assert curve.at(1, 300) == pytest.approx(4.0)
    assert curve.at(-9, 0) == 0.0
    means = CostCurve((1,), (0,), ((1.0,),), ((0.0,),), ((1.5,),))
    assert means.at(1, 0) == 1.5


def test_merging_averages_moments(profile: LatencyProfile) -> None:
    """The merge of equal profiles is that profile; means are averaged; nothing cannot be merged."""
    same = merge_profiles([profile, profile])
    assert same.verify.at(3, 40) == pytest.approx(profile.verify.at(3, 40))
    assert same.draft_phase_s == pytest.approx(dict(profile.draft_phase_s))
    with pytest.raises(ValueError, match="no profile"):
        merge_profiles([])


def test_center_bounds_what_one_lost_second_counts() -> None:
    """Slow moments count, an outlier counts as three medians."""
    assert center([1.0, 1.0, 2.0]) == pytest.approx(4 / 3)
    assert center([1.0, 1.0, 100.0]) == pytest.approx(5 / 3)
