"""The latency profile: what is measured, how it is checked, how it survives storage."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch
from pairs import make_pair
from synthetic import flat_profile

import optimizer.tune
from optimizer.cost import TreeCosts
from optimizer.tune import TuneOptions, profile_for, usable_profile
from runtime.decoder import Decoder
from runtime.loading import LoadedPair, load_pair
from runtime.loop import DecodeRequest, StaticSource, decode_rounds
from runtime.measuring import ACCEPTED_ERROR, Bench
from runtime.pair import read_pair
from runtime.policies.document import GAMMA_LIMIT, Policy, parse_policy
from runtime.policies.plan import prepare, window_costs
from runtime.profiler import (
    _bends,
    _Cells,
    _draft_costs,
    _verify_costs,
    center,
    measure_profile,
    measured_gammas,
    merge_profiles,
)
from runtime.tree_profiler import (
    DEPTHS,
    KIND_WIDTH,
    KINDS,
    NODES,
    SAMPLINGS,
    TREE_LAGS,
    WIDTHS,
    KindRound,
    NearTies,
    TreeCells,
    TreeMeasurement,
    compose_tree_round,
    levelled,
    tree_costs,
    typical,
)
from traces.errors import PolicyError
from traces.schema import CostCurve, LatencyProfile, Sampling, Step
from traces.store import TraceStore


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
        pair,
        gamma_max=4,
        contexts=(16, 64, 5000),
        repeats=3,
        progress=lambda what, done, total: calls.append((done, total)),
        clock=time.thread_time,  # so that a busy machine fails no test
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
    trees = profile.check["trees"]
    assert trees["rounds"] > 20
    assert 0 <= trees["median_error"] <= trees["p90_error"]
    assert isinstance(trees["accepted"], bool)


@pytest.mark.parametrize(
    ("errors", "width", "measured", "kept"),
    [
        ([(0.02, 0.3), (0.03, 0.04)], 8, 2, 1),  # trees are off: measured again, and kept
        ([(0.02, 0.3), (0.03, 0.2)], 8, 2, 1),
        ([(0.02, 0.2), (0.03, 0.3)], 8, 2, 0),  # never right: the better of two
        ([(0.3, 0.02), (0.02, 0.02)], 8, 2, 1),
        ([(0.02, 0.03)], 8, 1, 0),
        ([(0.02, 0.3)], 0, 1, 0),  # nobody asks what trees cost
    ],
)
def test_a_profile_whose_check_fails_is_measured_again(
    pair: LoadedPair,
    profile: LatencyProfile,
    store: TraceStore,
    monkeypatch: pytest.MonkeyPatch,
    errors: list[tuple[float, float]],
    width: int,
    measured: int,
    kept: int,
) -> None:
    """Of chains or of trees, and used again by the next tuning only where both were right."""

    def checked(error: float) -> dict[str, Any]:
        return {"median_error": error, "accepted": error <= ACCEPTED_ERROR}

    made = [replace(profile, check={**checked(chains), "trees": checked(trees)}) for chains, trees in errors]
    left = iter(made)
    monkeypatch.setattr(optimizer.tune, "measure_profile", lambda *args, **kwargs: next(left))
    wanted = TuneOptions(gamma_max=4, tree_width=width)
    stored = profile_for(store, pair, pair.draft_names, wanted)
    assert stored.profile.check == made[kept].check
    assert len(list(left)) == len(made) - measured
    usable = usable_profile(store, pair, pair.draft_names, datetime.now(UTC), trees=width > 0)
    right = max(errors[kept][: 2 if width else 1]) <= ACCEPTED_ERROR
    assert (usable.id if usable else None) == (stored.id if right else None)


def test_every_cost_of_trees_is_there(pair: LoadedPair, profile: LatencyProfile) -> None:
    """Greedy and sampled, over nodes, lags and widths, at the first and last context; a wider level and more nodes cost more."""
    trees = profile.trees
    assert trees is not None
    for verify in (trees.verify, trees.sampled_verify):
        assert verify.widths == tuple(n + 1 for n in NODES)
        assert verify.contexts == (16, 64)
        assert verify.at(97, 40) > verify.at(2, 40)
    for by_draft, widths in (
        (trees.first, TREE_LAGS),
        (trees.sampled_first, TREE_LAGS),
        (trees.level, WIDTHS),
        (trees.sampled_level, WIDTHS),
    ):
        assert set(by_draft) == {"near", "far"}
        for curve in by_draft.values():
            assert curve.widths == widths
            assert all(x > 0 for row in curve.cost_s for x in row)
    for name in ("near", "far"):
        assert set(trees.bend_s[name]) == set(WIDTHS)
        assert all(len(bend) == GAMMA_LIMIT + 1 for bend in trees.bend_s[name].values())
        assert set(trees.kind_s[name]) == set(KINDS)


def test_windows_weigh_whole_rounds_of_trees() -> None:
    """gamma a_q + b_p(gamma) is a round of gamma levels: first pass, later levels, verification of what is kept, overhead."""
    profile = flat_profile("p", ["near"])
    trees = profile.trees
    assert trees is not None
    policy = parse_policy(
        {
            "draft": "near",
            "growth": {"kind": "top_k", "width": 4},
            "window": {"kind": "analytic", "gamma_max": 5},
            "select": {"top_n": 30},
        }
    )
    costs = window_costs(profile, policy)
    assert costs is not None
    assert costs.draft_step_s == pytest.approx(trees.level["near"].at(4, 256))
    for gamma, pool in ((1, 4), (3, 30), (5, 30)):
        drafting = trees.first["near"].at(1, 256) + (gamma - 1) * costs.draft_step_s
        whole = drafting + trees.verify.at(pool + 1, 256) + profile.overhead_s
        assert gamma * costs.draft_step_s + costs.verify_s[gamma] == pytest.approx(whole)
    with pytest.raises(PolicyError, match="no costs of trees"):
        window_costs(replace(profile, trees=None), policy)


def test_what_trees_cost_is_taken_apart() -> None:
    """The first pass takes 2, a lag of 4 one more, a level 3 + w / 2, verification 10 + n, and one more after ``far``; near ties
    take 0.01 for a law read or a node drafted, 0.1 for a token."""""
    cells, contexts = TreeCells(), (16, 64)
    for name in ("near", "far"):
        for hot in (False, True):
            for c in contexts:
                cells.near[name, hot, c] = NearTies(draft_s=2.0, verify_s=1.0, nodes=200, tokens=10)
                for n in NODES:
                    cells.verify[name, hot, n, c] = [10.0 + n + (name == "far")] * 3
                for lag in TREE_LAGS:
                    cells.first[name, hot, lag, c] = [2.0 + (lag == 4)] * 3
                for w in WIDTHS:
                    for depth in DEPTHS:
                        cells.draft[depth][name, hot, w, c] = [2.0 + (depth - 1) * (3 + w / 2)] * 3
    trees = tree_costs(cells, ["near", "far"], contexts)
    assert trees.verify.at(17, 20) == pytest.approx(26.5)
    assert trees.token_s == pytest.approx((0.1, 0.1))
    assert trees.node_s == {name: pytest.approx((0.01, 0.01)) for name in ("near", "far")}
    assert (trees.first["near"].at(1, 20), trees.first["far"].at(1, 20)) == pytest.approx((1.5, 2.5))
    assert trees.sampled_first["near"].at(4, 64) == pytest.approx(2.5)
    assert trees.level["far"].at(8, 16) == pytest.approx(7.0)
    assert [trees.bend("near", passes, 4) for passes in range(12)] == pytest.approx([0.0] * 12, abs=1e-9)
    assert trees.kind_s == {"near": {}, "far": {}}


def test_near_ties_of_one_context_are_charged_at_all() -> None:
    """They are too rare to say anything of a context: 6 seconds more, all at one of two contexts."""
    places = [(hot, c) for _ in range(2) for c in (16, 64) for hot in (False, True)]
    cells = levelled([group(name, hot, c) for hot, c in places for name in ("near", "far")], 2)
    plain = tree_costs(cells, ["near", "far"], (16, 64))
    cells.near["near", False, 64].draft_s += 6.0
    trees = tree_costs(cells, ["near", "far"], (16, 64))
    more = 6.0 / sum(cells.near["near", False, c].nodes for c in (16, 64))
    assert trees.node_s["near"][0] - plain.node_s["near"][0] == pytest.approx(more)
    assert trees.node_s["near"][1] == plain.node_s["near"][1]
    assert trees.node_s["far"] == plain.node_s["far"]
    assert trees.level == plain.level


def test_near_ties_are_charged_by_what_is_read_and_drafted() -> None:
    """Tables, rounds and windows say the same: 5 seconds for each of 1 + 4 + 4 laws and 30 nodes, 2 more beside a stop."""
    plain = flat_profile("p", ["near"])
    assert plain.trees is not None
    trees = replace(plain.trees, node_s={"near": (5.0, 7.0)}, kind_s={"near": {"stop": (0.0, 2.0)}})
    dear = replace(plain, trees=trees)
    step = Step(start=1, drafted=30, verified=31, accepted=1, emitted=2, draft_steps=3, draft="near")
    for hot, each in ((False, 5.0), (True, 7.0)):
        apart = [compose_tree_round(p, step, (1, 4, 4), 20, sampled=hot) for p in (dear, plain)]
        assert apart[0] - apart[1] == pytest.approx(39 * each)
    for kinds, each in (((), 5.0), (("stop",), 7.0)):
        costs, free = (TreeCosts.of(p, "near", 64, width=4, kinds=kinds) for p in (dear, plain))
        tables = [(t.first_s[0, 0, 1], t.level_s[0, 0, 4], t.verify_s[0, 0, 30]) for t in (costs, free)]
        assert np.subtract(*tables) == pytest.approx([each, 4 * each, 30 * each])
    document = {"draft": "near", "growth": {"kind": "top_k", "width": 4}, "window": {"kind": "analytic", "gamma_max": 3}}
    policy = parse_policy({**document, "select": {"top_n": 30}})
    rounds = [w.draft_step_s * 3 + w.verify_s[3] for p in (dear, plain) if (w := window_costs(p, policy))]
    assert rounds[0] - rounds[1] == pytest.approx(39 * 5.0)


def test_other_trees_are_charged_for_what_they_draft_longer() -> None:
    """Two levels take 0.6 less than the line, and one level of a narrow tree 0.3 less. A classified tree of widths 1, 4, 2 takes 0.5 a pass
    longer, one time in five thrice as long, and settles 0.14 in 7 laws and 7 nodes."""
    cells, contexts = TreeCells(), (16, 64)
    for name in ("near", "far"):
        for hot in (False, True):
            for c in contexts:
                for n in NODES:
                    cells.verify[name, hot, n, c] = [10.0 + n + (name == "far")] * 3
                cells.first[name, hot, 1, c] = [2.0] * 3
                for w in WIDTHS:
                    for depth in DEPTHS:
                        less = 0.6 * (depth == 2) + 0.3 * (depth == 1 and w < 4)
                        cells.draft[depth][name, hot, w, c] = [2.0 + (depth - 1) * (3 + w / 2) - less] * 3
                lines = tree_costs(cells, ["near", "far"], contexts) if (name, hot, c) == ("far", True, 64) else None
    assert lines is not None
    base, bend = lines.first["near"].at(1, 16) + 0.5, [lines.bend("near", passes, KIND_WIDTH) for passes in range(5)]
    assert bend[2] - (bend[1] + bend[4]) / 2 < -0.5
    assert lines.bend("near", 1, 2) < lines.bend("near", 1, 3) < bend[1] - 0.1
    assert lines.bend("near", 1, 1) == pytest.approx(lines.bend("near", 1, 0))
    for w in (2, 8):
        for depth in (1, 2, 8):
            seconds = base + (depth - 1) * lines.level["near"].at(w, 16) + lines.bend("near", depth, w)
            assert seconds == pytest.approx(cells.draft[depth]["near", False, w, 16][0])
    drafted = base + lines.level["near"].at(4, 16) + lines.level["near"].at(2, 16) + bend[3] + 1.5
    cells.kinds["near", "classifier"] = [KindRound(x * drafted, 0.14, (1, 4, 2), 7, False, 16) for x in (1, 1, 3, 1, 1)]
    trees = tree_costs(cells, ["near", "far"], contexts)
    assert trees.kind_s["near"]["classifier"] == pytest.approx((0.5, 0.01))
    assert trees.more("near", ("classifier", "stop")) == pytest.approx((0.5, 0.01))
    assert trees.more("far", ("classifier",)) == (0.0, 0.0)


def group(name: str, hot: bool, context: int, pace: float = 1.0, longer: float = 1.0) -> TreeCells:
    """A turn of one draft: verification of n takes 10 + n, ``longer`` times that after this draft; a level 3 + w / 2; all at a pace."""
    cells, key = TreeCells(), (name, hot, context)
    cells.near[key] = NearTies(draft_s=2.0, verify_s=0.5, nodes=200, tokens=10)
    cells.kinds[name, "stop"] = [KindRound(pace * 7.0, 0.14, (1, 4, 2), 7, hot, context)]
    for n in NODES:
        cells.verify[name, hot, n, context] = [pace * longer * (10.0 + n)]
    cells.first[name, hot, 1, context] = [pace * 2.0]
    for w in WIDTHS:
        for depth in DEPTHS:
            cells.draft[depth][name, hot, w, context] = [pace * (2.0 + (depth - 1) * (3 + w / 2))]
    return cells


def turns(paces: dict[str, list[float]], longer: float) -> list[TreeCells]:
    """Groups as they are measured, two repeats of two contexts and temperatures; verification takes ``longer`` after ``far``."""
    places = [(hot, c) for _ in range(2) for c in (16, 64) for hot in (False, True)]
    return [
        group(name, hot, c, paces[name][i], longer if name == "far" else 1.0)
        for i, (hot, c) in enumerate(places)
        for name in ("near", "far")
    ]


def test_groups_are_brought_to_one_pace() -> None:
    """Turns at paces of their own cost what turns at one pace do, at every context and temperature but for one factor; near ties and nodes
    are summed, not stretched."""
    even = levelled(turns({"near": [1.0] * 8, "far": [1.0] * 8}, 1.0), 2)
    drifting = {"near": [1.0, 1.3, 0.9, 1.1, 1.0, 1.0, 1.2, 0.8], "far": [1.1, 1.2, 1.0, 0.9, 1.3, 0.9, 1.0, 1.0]}
    whole = levelled(turns(drifting, 1.0), 2)
    for hot in (False, True):
        for context in (16, 64):
            factor = whole.verify["near", hot, 1, context][0] / even.verify["near", hot, 1, context][0]
            assert 0.8 < factor < 1.2
            levels = zip(whole.draft.values(), even.draft.values(), strict=True)
            for mine, plain in ((whole.verify, even.verify), (whole.first, even.first), *levels):
                for key, samples in mine.items():
                    if (key[1], key[3]) == (hot, context):
                        assert samples == pytest.approx([factor * s for s in plain[key]], rel=0.02), key
            for name in ("near", "far"):
                stopped = [r.draft_s for r in whole.kinds[name, "stop"] if (r.hot, r.context) == (hot, context)]
                assert stopped == pytest.approx([factor * 7.0] * 2, rel=0.02)
    assert {r.settled_s for r in whole.kinds["far", "stop"]} == {0.14}
    assert whole.near["far", True, 64] == NearTies(draft_s=4.0, verify_s=1.0, nodes=400, tokens=20)


def test_what_a_draft_costs_the_target_at_every_turn_is_kept() -> None:
    """Verification takes 20% longer after one draft whatever the pace: that is no drift. Once in eight turns is."""
    steady = levelled(turns({"near": [1.0, 1.1] * 4, "far": [1.1, 1.0] * 4}, 1.2), 2)
    after, before = (np.mean([steady.verify[name, False, n, 16] for n in NODES]) for name in ("far", "near"))
    assert after / before == pytest.approx(1.2, rel=0.03)
    assert steady.first["far", False, 1, 16] == pytest.approx(steady.first["near", False, 1, 16], rel=0.03)
    once = levelled(turns({"near": [1.0] * 8, "far": [2.0, *[1.0] * 7]}, 1.0), 2)
    after, before = (np.mean([once.verify[name, False, n, 16] for n in NODES]) for name in ("far", "near"))
    assert after / before == pytest.approx(1.0, abs=0.01)


def test_a_slow_round_makes_no_cell_dear() -> None:
    """One sample of a cell takes five times as long: what it adds is spread over all cells, a percent at most."""
    cells = levelled(turns({"near": [1.0] * 8, "far": [1.0] * 8}, 1.0), 2)
    whole = typical(cells)
    assert whole.draft[8]["far", False, 4, 16] == pytest.approx(cells.draft[8]["far", False, 4, 16])
    cells.draft[8]["far", False, 4, 16][0] *= 5.0
    spoiled = typical(cells)
    assert center(spoiled.draft[8]["far", False, 4, 16]) == pytest.approx(center(whole.draft[8]["far", False, 4, 16]), rel=0.02)
    assert center(spoiled.verify["near", True, 7, 64]) == pytest.approx(center(whole.verify["near", True, 7, 64]), rel=0.02)
    total, before = (sum(center(s) for s in c.verify.values()) for c in (spoiled, whole))
    assert total > before


def test_bends_survive_storing_and_those_without_widths_are_read(profile: LatencyProfile) -> None:
    """JSON names widths by strings; profiles once kept one bend for all of them."""
    again = LatencyProfile.from_json(json.loads(json.dumps(profile.to_json())))
    assert again == profile
    old = profile.to_json()
    old["trees"]["bend_s"] = {"near": [0.0, 0.5, 0.25]}
    trees = LatencyProfile.from_json(json.loads(json.dumps(old))).trees
    assert trees is not None
    assert [trees.bend("near", passes, 7) for passes in (0, 1, 2, 9)] == [0.0, 0.5, 0.25, 0.25]
    assert profile.trees is not None
    assert trees.token_s == profile.trees.token_s
    assert trees.node_s == profile.trees.node_s
    del old["trees"]["token_s"], old["trees"]["node_s"]
    older = LatencyProfile.from_json(json.loads(json.dumps(old))).trees
    assert older is not None
    assert older.token_s == older.per_node("near") == (0.0, 0.0)
    assert trees.bend("far", 3, 7) == 0.0


def test_a_profile_without_trees(pair: LoadedPair) -> None:
    """Left out on demand; merged with one that has them, those remain."""
    plain = measure_profile(pair, gamma_max=2, contexts=(16,), repeats=3, trees=False)
    assert plain.trees is None
    assert "trees" not in plain.check


def test_trees_are_measured_at_the_end_of_a_text_that_is_served(pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near ties are as frequent as its laws make them. Where the context is longer than the text, other tokens come before it."""
    prompts: list[list[int]] = []

    def seen(backend: object, request: DecodeRequest, *rest: Any) -> Iterator[Any]:
        prompts.append(list(request.prompt_ids))
        return decode_rounds(backend, request, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("runtime.tree_profiler.decode_rounds", seen)
    text = list(range(20, 60))
    measurement = TreeMeasurement(Bench(pair, 2, 1, lambda *_: None), (16, 64))
    measurement.turn(samplings=SAMPLINGS[:1], texts=[text])
    assert [len(p) for p in prompts] == [17] * len(measurement.drafts) + [65] * len(measurement.drafts)
    assert all(p[-40:] == text[-len(p) :] for p in prompts)


def test_what_is_done_after_rounds_is_in_no_seconds(pair: LoadedPair) -> None:
    now, calls = [0.0], []

    def clock() -> float:
        now[0] += 1e-3
        return now[0]

    def pause() -> None:
        calls.append(now[0])
        now[0] += 100.0

    decoder = Decoder(pair, StaticSource(prepare(Policy(), pair.draft_names)), clock=clock, after_round=pause)
    decoded = decoder.decode(DecodeRequest("r", [20, 21, 22], Sampling(), 1, 6))
    assert len(calls) == len(decoded.steps) == 6
    assert 0.0 < decoded.prefill_s < decoded.seconds < 1.0


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
    assert same.draft_bend_s["near"] == pytest.approx(profile.draft_bend_s["near"])
    assert same.trees is not None
    assert profile.trees is not None
    assert same.trees.level["far"].at(5, 40) == pytest.approx(profile.trees.level["far"].at(5, 40))
    assert merge_profiles([profile, replace(profile, trees=None)]).trees == same.trees
    with pytest.raises(ValueError, match="no profile"):
        merge_profiles([])


def test_center_bounds_what_one_lost_second_counts() -> None:
    """Slow moments count, an outlier counts as three medians."""
    assert center([1.0, 1.0, 2.0]) == pytest.approx(4 / 3)
    assert center([1.0, 1.0, 100.0]) == pytest.approx(5 / 3)


def test_which_gammas_are_measured() -> None:
    """Small ones all, large ones thinned, the largest always."""
    assert measured_gammas(4) == (0, 1, 2, 3, 4)
    assert measured_gammas(24) == (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24)
    assert measured_gammas(13)[-3:] == (10, 12, 13)


def test_a_draft_is_charged_for_what_it_costs_the_target() -> None:
    """Verification is 5 + g alone, 1 + g / 10 more after the draft; drafting is 2 + 3 g; a lag of 3 costs 0.5 more."""
    cells, gammas, contexts = _Cells(), (0, 1, 2, 3, 4), (16, 64)
    for context in contexts:
        for gamma in gammas:
            cells.verify["ngram", gamma, context] = [5.0 + gamma] * 3
            cells.verify["near", gamma, context] = [5.0 + gamma + (1 + gamma / 10 if gamma else 0)] * 3
            cells.draft["near", gamma, context] = [3.0 * gamma + 2 if gamma else 0.0] * 3
            cells.draft["ngram", gamma, context] = [0.1 + 0.1 * gamma if gamma else 0.0] * 3
        cells.lag["near", 1, context], cells.lag["near", 3, context] = [5.0], [5.5]
    verify, evicted = _verify_costs(cells, ("near", "ngram"), contexts, gammas)
    assert evicted["near"] == pytest.approx((0.1, 1.0))
    assert all(samples == pytest.approx([5.0 + width - 1] * 6) for (width, _), samples in verify.items())
    phase, steps = _draft_costs(cells, ("near", "ngram"), contexts, evicted)
    assert phase["near"] == pytest.approx(3.0)
    assert center(steps["near"][1, 16]) == pytest.approx(3.1)
    assert center(steps["near"][3, 16]) == pytest.approx(3.6)
    bend = _bends(cells, ("near",), contexts, evicted, phase, steps)["near"]
    assert bend == pytest.approx([0.0] * (GAMMA_LIMIT + 1), abs=1e-9)
    for context in contexts:
        cells.draft["near", 2, context] = [9.0] * 3
    bend = _bends(cells, ("near",), contexts, evicted, phase, steps)["near"]
    assert bend[:4] == pytest.approx((0.0, 0.0, 1.0, 0.0), abs=1e-9)
