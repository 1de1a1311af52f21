"""What is fitted to recorded rounds, on synthetic rounds whose answer is known."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

from optimizer.fit.c2t import (
    FEATURES,
    Classifier,
    Examples,
    evaluate,
    fine_tune,
    train,
)
from optimizer.fit.heterospec import LAYERS, Bins, fit_bins, overlaps
from optimizer.fit.sequoia import BestTrees, best_static_tree, choose, frontier_widths
from runtime.policies.c2t import CONFIDENCE_SCALE, DEPTHS, ENTROPY_CODES, JOINT_CODES, confidence_table, look_up

# -- bins ------------------------------------------------------------------------------------------------------------------------

PLANTED = (10, 21, 40, 64, 90, 130, 171)


def planted_rounds(n: int = 6000, seed: int = 0, noise: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds whose rank is a step function of Phi with eight steps, all fully accepted."""
    rng = np.random.default_rng(seed)
    phi = rng.integers(0, 240, n).astype(np.int32)
    steps = np.array([1, 3, 8, 12, 30, 36, 50, 60])
    rank = steps[np.searchsorted(PLANTED, phi, side="left")] + rng.integers(0, noise + 1, n)
    return phi, rank.astype(np.int32), np.ones(n, dtype=bool)


def test_cart_finds_the_planted_thresholds() -> None:
    phi, tcr, full = planted_rounds()
    bins = fit_bins(phi, tcr, full, depth=5)
    assert bins.thresholds == PLANTED
    assert not bins.fallback
    assert bins.rounds == len(phi)
    assert bins.within_variance == pytest.approx(0.0, abs=1e-9)
    assert bins.explained == pytest.approx(1.0)
    assert sum(b.count for b in bins.statistics) == len(phi)
    assert sum(b.share for b in bins.statistics) == pytest.approx(1.0)
    assert [b.mean_tcr for b in bins.statistics] == [1, 3, 8, 12, 30, 36, 50, 60]
    assert bins.jaccard == (1.0, 1.0, 1.0)


def test_bins_are_the_leaves_of_the_tree() -> None:
    """Floor of the splits: every whole Phi falls where scikit-learn puts it."""
    from sklearn.tree import DecisionTreeRegressor

    phi, tcr, full = planted_rounds(noise=25, seed=3)
    bins = fit_bins(phi, tcr, full, depth=4, min_share=0.0)
    model = DecisionTreeRegressor(max_depth=3, random_state=0).fit(phi[:, None], tcr)
    every = np.arange(300)
    leaves = model.apply(every[:, None])
    ours = bins.bin_of(every, 4)
    assert len(set(zip(leaves, ours, strict=True))) == len(set(leaves)) == len(set(ours)) == len(bins.thresholds) + 1
    assert bins.within_variance == pytest.approx(np.mean((tcr - model.predict(phi[:, None])) ** 2))


def test_bin_of_scales_phi_to_the_depth_it_was_fitted_at() -> None:
    bins = fit_bins(*planted_rounds(), depth=6)
    phi, gamma = np.arange(400)[:, None], np.arange(1, 13)[None]
    got = bins.bin_of(phi, gamma)
    assert got.shape == (400, 12)
    for p, g in itertools.product((0, 5, 10, 11, 42, 43, 130, 399), range(1, 13)):
        assert got[p, g - 1] == sum(p * 6 > t * g for t in bins.thresholds)
    assert int(bins.bin_of(10, 6)) == 0
    assert int(bins.bin_of(11, 6)) == 1


def test_only_fully_accepted_rounds_are_fitted_where_there_are_enough() -> None:
    phi, tcr, full = planted_rounds()
    misleading = np.full(3000, 100, dtype=np.int32)
    mixed = (np.concatenate([phi, misleading]), np.concatenate([tcr, misleading * 0]), np.repeat([True, False], [6000, 3000]))
    bins = fit_bins(*mixed, depth=5)
    assert bins.thresholds == PLANTED
    assert bins.rounds == 6000
    assert bins.statistics[5].fully_accepted == pytest.approx((bins.statistics[5].count) / (bins.statistics[5].count + 3000))
    assert bins.statistics[5].share > 1 / 3

    few = full & (np.arange(len(phi)) < 49)
    assert fit_bins(phi, tcr, few, depth=5).fallback
    assert fit_bins(phi, tcr, few, depth=5).rounds == len(phi)
    assert not fit_bins(phi, tcr, few, depth=5, min_full=49).fallback


def test_constant_ranks_make_one_bin() -> None:
    bins = fit_bins(np.arange(100), np.ones(100, dtype=int), np.ones(100, dtype=bool), depth=3)
    assert bins.thresholds == ()
    assert bins.explained == 0.0
    assert bins.jaccard == (1.0, 1.0, 1.0)
    assert bins.bin_of([1, 1000], 3).tolist() == [0, 0]


def test_overlaps_are_those_of_the_sets_themselves() -> None:
    phi, tcr, full = planted_rounds(noise=40, seed=5)
    got = overlaps(phi, tcr)
    low = set(np.flatnonzero(fit_bins(phi, tcr, full, depth=1).bin_of(phi, 1) < 3))
    for layers, jaccard in zip(LAYERS, got, strict=True):
        deeper = fit_bins(phi, tcr, full, depth=1, tree_depth=layers).bin_of(phi, 1)
        sets = [set(np.flatnonzero(deeper <= b)) for b in range(deeper.max() + 1)]
        nearest = min(sets, key=lambda s: (abs(len(s) - len(low)), len(s)))
        assert jaccard == pytest.approx(len(low & nearest) / len(low | nearest))
    assert min(got) > 0.7


def test_bins_survive_json() -> None:
    bins = fit_bins(*planted_rounds(noise=9), depth=5)
    assert Bins.from_json(json.loads(json.dumps(bins.to_json(), allow_nan=False))) == bins


@pytest.mark.parametrize(
    ("phi", "tcr", "full", "depth", "message"),
    [
        ([], [], [], 3, "no rounds"),
        ([1, 2], [1], [True, True], 3, "differ in length"),
        ([1, 2], [1, 1], [True], 3, "differ in length"),
        ([1, 2], [1, 1], [True, True], 0, "at least 1"),
        ([1, 2], [1, -1], [True, False], 3, "negative"),
        ([1, 2], [1, 0], [True, True], 3, "cannot be 0"),
        ([0.5, 2.0], [1, 1], [True, True], 3, "whole numbers"),
    ],
)
def test_bins_say_what_is_wrong(phi: list, tcr: list, full: list, depth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_bins(phi, tcr, full, depth=depth)


def test_overlaps_need_rounds() -> None:
    with pytest.raises(ValueError, match="at least one"):
        overlaps([], [])


# -- classifier ------------------------------------------------------------------------------------------------------------------


def planted_trees(trees: int = 400, size: int = 60, seed: int = 0) -> Examples:
    """Nodes accepted exactly where joint probability is above a bound that rises with depth and falls with entropy."""
    rng = np.random.default_rng(seed)
    n = trees * size
    joint = rng.integers(0, 120, n).astype(np.int32)
    entropy = rng.integers(0, 120, n).astype(np.int32)
    depth = rng.integers(1, 9, n).astype(np.int32)
    accepted = np.exp(-joint / 16) > 0.35 + 0.05 * depth - 0.03 * entropy / 16
    return Examples(joint, entropy, depth, accepted, np.repeat(np.arange(trees), size))


@pytest.fixture(scope="module")
def examples() -> Examples:
    return planted_trees()


@pytest.fixture(scope="module")
def trained(examples: Examples) -> Classifier:
    return train(examples, learning_rate=1e-2, batch=256)


def test_a_planted_rule_is_learned(trained: Classifier) -> None:
    fresh = planted_trees(seed=1)
    figures = evaluate(trained, fresh)
    assert figures["recall"] is not None
    assert figures["recall"] > 0.95
    assert figures["positive_rate"] == pytest.approx(fresh.accepted.mean(), abs=0.05)


def test_metrics(trained: Classifier, examples: Examples) -> None:
    metrics = json.loads(json.dumps(trained.metrics, allow_nan=False))
    assert metrics["recall"] > 0.9
    assert [point["epoch"] for point in metrics["curve"]] == list(range(11))
    assert metrics["curve"][-1]["loss"] < metrics["curve"][1]["loss"] / 1.5
    assert (metrics["curve"][-1]["recall"], metrics["curve"][-1]["positive_rate"]) == (
        metrics["recall"],
        metrics["positive_rate"],
    )
    assert metrics["held_out"] == 20 * 60, "a twentieth, by whole trees"
    assert metrics["positives"] == metrics["negatives"], "one rejected node for each accepted one"
    assert metrics["positives"] + metrics["held_out_accepted"] == examples.accepted.sum()


@pytest.mark.parametrize(("ratio", "expected"), [(0.5, 0.5), (2.0, 2.0), (1e9, None)])
def test_negative_sampling(examples: Examples, ratio: float, expected: float | None) -> None:
    metrics = train(examples, epochs=0, negatives=ratio).metrics
    everything = len(examples) - metrics["held_out"] - metrics["positives"]
    assert metrics["negatives"] == (everything if expected is None else round(expected * metrics["positives"]))


def test_stored_weights_act_on_raw_features(trained: Classifier) -> None:
    """Against the network written out with torch, on probability, nats and depth."""
    import torch

    joint, entropy, depth = np.array([0, 5, 40, 900]), np.array([0, 33, 100, 159]), np.array([1, 2, 8, 16])
    raw = torch.tensor(np.stack([np.exp(-joint / 16), entropy / 16, depth], axis=1), dtype=torch.float64)
    w1, b1, w2, b2 = (torch.tensor(w, dtype=torch.float64) for w in (trained.w1, trained.b1, trained.w2, trained.b2))
    expected = torch.sigmoid(torch.relu(raw @ w1.T + b1) @ w2 + b2)
    np.testing.assert_allclose(trained.confidence(joint, entropy, depth), expected.numpy(), rtol=1e-12)
    assert {w.dtype for w in (trained.w1, trained.b1, trained.w2, trained.b2)} == {np.dtype(np.float32)}


def test_the_table_is_the_confidence(trained: Classifier) -> None:
    table = trained.table()
    assert table.shape == (DEPTHS, ENTROPY_CODES, JOINT_CODES)
    assert table.dtype == np.uint16
    joint, entropy = np.arange(JOINT_CODES)[None, None], np.arange(ENTROPY_CODES)[None, :, None]
    depth = np.arange(1, DEPTHS + 1)[:, None, None]
    np.testing.assert_array_equal(table, np.floor(trained.confidence(joint, entropy, depth) * CONFIDENCE_SCALE))
    np.testing.assert_array_equal(confidence_table(trained), table)
    one = trained.confidence(7, 30, 2)
    assert one.shape == ()
    assert look_up(table, 7, 30, 2) == math.floor(one * CONFIDENCE_SCALE)
    np.testing.assert_array_equal(
        look_up(table, [5, JOINT_CODES, 9999, 5], [3, ENTROPY_CODES, 9999, 3], [1, DEPTHS + 1, 99, DEPTHS + 4]),
        [table[0, 3, 5], table[-1, -1, -1], table[-1, -1, -1], table[-1, 3, 5]],
    )
    assert trained.table(3, 21, 11).shape == (3, 21, 11)


def test_saturated_confidences_stay_finite() -> None:
    for bias in (-1e6, 1e6):
        flat = Classifier(
            np.zeros((2, 3), np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32), np.array([bias], np.float32)
        )
        with np.errstate(all="raise"):
            assert flat.confidence(0, 0, 1) == pytest.approx(float(bias > 0))
            assert (flat.table(2, 3, 3) == (CONFIDENCE_SCALE if bias > 0 else 0)).all()


def test_the_same_seed_trains_the_same(examples: Examples) -> None:
    a, b, c = (train(examples, epochs=1, seed=s) for s in (4, 4, 5))
    np.testing.assert_array_equal(a.w1, b.w1)
    assert not np.array_equal(a.w1, c.w1)


@pytest.mark.parametrize("used", [("probability", "depth"), ("probability", "entropy"), ("entropy", "depth")])
def test_ablation(examples: Examples, used: tuple[str, ...]) -> None:
    ablated = train(examples, features=used, epochs=2, hidden=12)
    tuned = fine_tune(ablated, examples, epochs=1)
    for made in (ablated, tuned):
        assert [n for n, column in zip(FEATURES, made.w1.T, strict=True) if column.any()] == list(used)
        assert made.metrics["features"] == list(used)
    varied = {"probability": ([0, 50], 3, 2), "entropy": (3, [0, 50], 2), "depth": (3, 3, [1, 8])}
    for name, codes in varied.items():
        assert (np.ptp(ablated.confidence(*codes)) == 0) == (name not in used)


def test_fine_tuning_moves_towards_other_trees(trained: Classifier, examples: Examples) -> None:
    rng = np.random.default_rng(9)
    other = Examples(
        examples.joint_code, examples.entropy_code, examples.depth, examples.joint_code > 40, rng.permutation(examples.tree)
    )
    tuned = fine_tune(trained, other, learning_rate=1e-2, batch=64)
    assert (tuned.w1.shape, tuned.b1.shape, tuned.w2.shape, tuned.b2.shape) == ((48, 3), (48,), (48,), (1,))
    curve = tuned.metrics["curve"]
    assert curve[0]["recall"] == pytest.approx(evaluate(trained, other)["recall"], abs=0.05)
    assert curve[-1]["recall"] > 0.9 > curve[0]["recall"]
    assert tuned.metrics["fine_tuned"]
    assert tuned.metrics["positives"] == pytest.approx(0.1 * other.accepted.sum(), rel=0.15)
    for unmoved in (fine_tune(trained, other, epochs=0), fine_tune(trained, other, 0.0)):
        for name in ("w1", "b1", "w2", "b2"):
            np.testing.assert_array_equal(getattr(unmoved, name), getattr(trained, name))
    assert not unmoved.metrics["fine_tuned"]
    assert (unmoved.metrics["positives"], unmoved.metrics["recall"]) == (0, evaluate(trained, other)["recall"])


def test_a_classifier_survives_its_document(trained: Classifier) -> None:
    document, arrays = trained.to_document()
    again = Classifier.from_document(json.loads(json.dumps(document, allow_nan=False)), arrays)
    np.testing.assert_array_equal(again.table(4, 50, 50), trained.table(4, 50, 50))
    assert again.metrics == trained.metrics
    with pytest.raises(ValueError, match="lacks w2"):
        Classifier.from_document(document, {n: a for n, a in arrays.items() if n != "w2"})
    with pytest.raises(ValueError, match="lacks the features"):
        Classifier.from_document({}, arrays)
    with pytest.raises(ValueError, match="weights must be"):
        Classifier.from_document(document, {**arrays, "w2": arrays["w2"][:-1]})


def test_examples_say_what_is_wrong(examples: Examples) -> None:
    ints, flags = np.ones(3, np.int32), np.ones(3, bool)
    with pytest.raises(ValueError, match="no examples"):
        examples.take(np.zeros(0, dtype=int))
    with pytest.raises(ValueError, match="differ in length"):
        Examples(ints, ints, ints[:2], flags, ints)
    with pytest.raises(ValueError, match="depth counts from 1"):
        Examples(ints, ints, ints * 0, flags, ints)
    with pytest.raises(ValueError, match="at least two trees"):
        train(Examples(ints, ints, ints, flags, ints))
    with pytest.raises(ValueError, match="2 accepted and 0 rejected"):
        train(Examples(ints, ints, ints, flags, np.arange(3, dtype=np.int32)))
    with pytest.raises(ValueError, match="hidden"):
        train(examples, hidden=1)
    with pytest.raises(ValueError, match="features must be"):
        train(examples, features=("rank",))
    with pytest.raises(ValueError, match="negatives"):
        train(examples, negatives=0)
    with pytest.raises(ValueError, match="fraction"):
        fine_tune(train(examples, epochs=0), examples, 1.5)


# -- static trees ----------------------------------------------------------------------------------------------------------------


def value(paths: tuple[tuple[int, ...], ...], p: np.ndarray) -> float:
    """Expected accepted length of a tree: the sum over nodes of the product along the path."""
    return sum(math.prod(p[min(level, len(p) - 1), rank] for level, rank in enumerate(path)) for path in paths)


def greedy(p: np.ndarray, nodes: int, depth: int) -> float:
    """The most probable nodes of the whole tree."""
    k = p.shape[1]
    everything = [path for d in range(1, depth + 1) for path in itertools.product(range(k), repeat=d)]
    return sum(sorted((value((path,), p) for path in everything), reverse=True)[:nodes])


def every_tree(nodes: int, depth: int, k: int) -> Iterator[frozenset[tuple[int, ...]]]:
    """All trees with so many nodes."""
    grown: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(nodes):
        grown = {
            tree | {(*parent, rank)}
            for tree in grown
            for parent in [(), *tree]
            for rank in range(k)
            if len(parent) < depth and (*parent, rank) not in tree
        }
    yield from grown


def check_paths(trees: BestTrees, p: np.ndarray, nodes: int, depth: int) -> None:
    paths = trees.paths(nodes, depth)
    assert len(set(paths)) == len(paths) == nodes
    assert all(len(path) <= depth and (len(path) == 1 or path[:-1] in paths) for path in paths)
    assert list(paths) == sorted(paths, key=lambda q: (len(q), q))
    assert value(paths, p) == pytest.approx(trees.accepted[nodes, depth])


RANDOM = [np.random.default_rng(s).dirichlet(np.ones(4) * 0.8, size=3)[:, :3] for s in range(4)]  # ranks in no order


@pytest.mark.parametrize("p", [np.array([[0.6, 0.2, 0.1]]), np.array([[0.5, 0.3, 0.1], [0.8, 0.05, 0.0]]), *RANDOM])
def test_the_program_is_brute_force_on_small_trees(p: np.ndarray) -> None:
    trees = best_static_tree(p if len(p) > 1 else p[0], max_nodes=5, max_depth=3)
    for nodes, depth in itertools.product(range(1, 6), range(1, 4)):
        candidates = [value(tuple(t), p) for t in every_tree(nodes, depth, 3)]
        if not candidates:
            assert trees.accepted[nodes, depth] == -np.inf
            with pytest.raises(ValueError, match="no tree"):
                trees.paths(nodes, depth)
            continue
        assert trees.accepted[nodes, depth] == pytest.approx(max(candidates))
        check_paths(trees, p, nodes, depth)
    assert (trees.accepted[0] == 0).all()
    assert trees.paths(0, 2) == ()


@pytest.mark.parametrize("p", RANDOM)
def test_the_program_is_greedy(p: np.ndarray) -> None:
    trees = best_static_tree(p, max_nodes=30, max_depth=5)
    for nodes, depth in itertools.product((1, 2, 7, 19, 30), (3, 4, 5)):
        assert trees.accepted[nodes, depth] == pytest.approx(greedy(p, nodes, depth))
        check_paths(trees, p, nodes, depth)


def test_the_program_takes_the_largest_trees_of_a_search() -> None:
    p = 0.7 * 0.3 ** np.arange(10)
    trees = best_static_tree(p, max_nodes=64, max_depth=16)
    assert trees.accepted.shape == (65, 17)
    assert (np.diff(trees.accepted[:, 16]) > 0).all()
    check_paths(trees, p[None], 64, 16)
    assert trees.paths(3, 16) == ((0,), (0, 0), (0, 0, 0))
    assert trees.paths(3, 1) == ((0,), (1,), (2,))


def test_equal_ranks_keep_the_lower() -> None:
    assert best_static_tree([0.25] * 4, max_nodes=3, max_depth=1).paths(2, 1) == ((0,), (1,))
    assert best_static_tree([0.1, 0.6], max_nodes=3, max_depth=1).paths(1, 1) == ((1,),)


@pytest.mark.parametrize(("width_s", "node_s"), [(0.0, 0.02), (0.05, 0.02), (0.0, 0.3), (0.3, 0.0)])
def test_choose_takes_the_fastest(width_s: float, node_s: float) -> None:
    p = np.array([0.6, 0.2, 0.1])

    def draft_level_s(level: int, width: int) -> float:
        return 0.1 + width_s * width

    def verify_s(tokens: int) -> float:
        return 1.0 + node_s * tokens

    chosen = choose(p, draft_level_s, verify_s, 0.05, max_nodes=12, max_depth=4)
    trees = best_static_tree(p, max_nodes=12, max_depth=4)
    rates = []
    for nodes, depth in itertools.product(range(1, 13), range(1, 5)):
        if np.isfinite(trees.accepted[nodes, depth]):
            paths = trees.paths(nodes, depth)
            widths = [len({q[:-1] for q in paths if len(q) == level}) for level in range(1, max(map(len, paths)) + 1)]
            assert frontier_widths(paths) == widths
            seconds = 0.05 + verify_s(nodes + 1) + sum(draft_level_s(i, w) for i, w in enumerate(widths, 1))
            rates.append((1 + value(paths, p[None])) / seconds)
    assert chosen.expected_tokens_per_s == pytest.approx(max(rates))
    assert chosen.expected_emitted == pytest.approx(1 + value(chosen.paths, p[None]))
    assert chosen.as_lists() == [list(q) for q in chosen.paths]


def test_dear_drafting_makes_the_smallest_tree() -> None:
    tree = choose([0.5, 0.1], lambda level, width: 10.0 * level, lambda tokens: 1.0 + tokens, 0.0, max_nodes=8, max_depth=3)
    assert tree.as_lists() == [[0]]
    free = choose([0.5, 0.1], lambda level, width: 0.0, lambda tokens: 1.0, 0.0, max_nodes=8, max_depth=3)
    assert len(free.paths) == 8


@pytest.mark.parametrize(
    ("p", "nodes", "depth", "message"),
    [
        ([], 4, 2, "at least one rank"),
        (np.zeros((2, 0)), 4, 2, "at least one rank"),
        (0.5, 4, 2, "at least one rank"),
        ([0.5, -0.1], 4, 2, "probabilities"),
        ([0.8, 0.4], 4, 2, "probabilities"),
        ([0.5, math.nan], 4, 2, "probabilities"),
        ([0.5], 0, 2, "at least 1"),
        ([0.5], 4, 0, "at least 1"),
    ],
)
def test_static_trees_say_what_is_wrong(p: object, nodes: int, depth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        best_static_tree(p, max_nodes=nodes, max_depth=depth)  # type: ignore[arg-type]


def test_a_round_takes_time() -> None:
    with pytest.raises(ValueError, match="must take time"):
        choose([0.5], lambda level, width: 0.0, lambda tokens: 0.0, 0.0, max_nodes=2, max_depth=1)
