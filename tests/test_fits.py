"""What is fitted to recorded rounds, on synthetic rounds whose answer is known."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

from spectune.optimizer.fit.c2t import Examples, evaluate, train
from spectune.optimizer.fit.heterospec import (
    MIN_FULL,
    Bins,
    Rounds,
    fit_bins,
)
from spectune.optimizer.fit.sequoia import BestTrees, best_static_tree, choose, frontier_widths
from spectune.runtime.policies.c2t import (
    CONFIDENCE_SCALE,
    DEPTHS,
    ENTROPIES,
    JOINTS,
    STEP,
    WEIGHTS,
    ClassifierWeights,
    confidence_code,
    confidence_table,
    read_weights,
)
from spectune.traces.errors import TraceError

# -- HeteroSpec: bins

PLANTED = (10, 21, 40, 64, 90, 130, 171)


def planted_rounds(n: int = 6000, seed: int = 0, noise: int = 0) -> Rounds:
    """Rounds whose rank is a step function of Phi with eight steps, all fully accepted."""
    rng = np.random.default_rng(seed)
    phi = rng.integers(0, 240, n)
    steps = np.array([1, 3, 8, 12, 30, 36, 50, 60])
    tcr = steps[np.searchsorted(PLANTED, phi)] + rng.integers(0, noise + 1, n)
    return Rounds(phi, tcr, np.ones(n, dtype=bool))


def bin_of(bins: Bins, phi: np.ndarray) -> np.ndarray:
    return np.searchsorted(bins.thresholds, phi)


def test_cart_finds_the_planted_thresholds() -> None:
    rounds = planted_rounds()
    bins = fit_bins(rounds, 5)
    assert (bins.thresholds, bins.fallback, bins.rounds) == (PLANTED, False, len(rounds.phi))
    assert bins.within_variance == pytest.approx(0.0, abs=1e-9)
    assert bins.explained == pytest.approx(1.0)
    assert sum(b["count"] for b in bins.statistics) == len(rounds.phi)
    assert sum(b["share"] for b in bins.statistics) == pytest.approx(1.0)
    assert [b["mean_tcr"] for b in bins.statistics] == [1, 3, 8, 12, 30, 36, 50, 60]


def test_bins_are_the_leaves_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floor of the splits: every whole Phi falls where scikit-learn puts it."""
    from sklearn.tree import DecisionTreeRegressor

    monkeypatch.setattr("spectune.optimizer.fit.heterospec.MIN_SHARE", 0.0)
    rounds = planted_rounds(noise=25, seed=3)
    bins = fit_bins(rounds, 4)
    model = DecisionTreeRegressor(max_depth=3, random_state=0).fit(rounds.phi[:, None], rounds.tcr)
    every = np.arange(300)
    leaves, ours = model.apply(every[:, None]), bin_of(bins, every)
    pairs = set(zip(leaves, ours, strict=True))
    assert len(pairs) == len(set(leaves)) == len(set(ours)) == len(bins.thresholds) + 1
    left = rounds.tcr - model.predict(rounds.phi[:, None])
    assert bins.within_variance == pytest.approx(np.mean(left**2))


def test_only_fully_accepted_rounds_are_fitted_where_there_are_enough() -> None:
    rounds, full = planted_rounds(), np.repeat([True, False], [6000, 3000])
    misleading = np.full(3000, 100)
    every = Rounds(np.append(rounds.phi, misleading), np.append(rounds.tcr, misleading * 0), full)
    bins = fit_bins(every, 5)
    assert (bins.thresholds, bins.rounds) == (PLANTED, 6000)
    fifth = bins.statistics[5]
    accepted = fifth["count"] / (fifth["count"] + 3000)
    assert fifth["fully_accepted"] == pytest.approx(accepted)
    assert fifth["share"] > 1 / 3
    for enough in (0, 1):
        few = fit_bins(Rounds(rounds.phi, rounds.tcr, np.arange(6000) < MIN_FULL - 1 + enough), 5)
        assert (few.fallback, few.rounds) == ((False, MIN_FULL) if enough else (True, 6000))


def test_constant_ranks_make_one_bin_and_no_rounds_none() -> None:
    bins = fit_bins(Rounds(np.arange(100), np.ones(100, dtype=int), np.ones(100, dtype=bool)), 3)
    assert (bins.thresholds, bins.explained) == ((), 0.0)
    none = np.zeros(0, dtype=int)
    with pytest.raises(TraceError, match="no rounds"):
        fit_bins(Rounds(none, none, none > 0), 3)


# -- C2T: the classifier


def planted_trees(trees: int = 400, size: int = 60, seed: int = 0) -> Examples:
    """Nodes accepted exactly where joint probability is above a bound that rises with depth and
    falls with entropy."""
    rng = np.random.default_rng(seed)
    n = trees * size
    joint, entropy = rng.integers(0, 1920, (2, n)).astype(np.int32)
    depth = rng.integers(1, 9, n).astype(np.int32)
    accepted = np.exp(-joint / 256) > 0.35 + 0.05 * depth - 0.03 * entropy / 256
    return Examples(joint, entropy, depth, accepted, np.repeat(np.arange(trees), size))


@pytest.fixture(scope="module")
def trained() -> ClassifierWeights:
    examples = planted_trees()
    weights, metrics = train(examples, learning_rate=1e-2, batch=256)
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert metrics["held_out"] == 20 * 60, "a twentieth, by whole trees"
    assert metrics["positives"] == metrics["negatives"], "one rejected node for each accepted one"
    again, _ = train(examples, learning_rate=1e-2, batch=256)
    assert all(np.array_equal(getattr(weights, n), getattr(again, n)) for n in WEIGHTS)
    return weights


def test_a_planted_rule_is_learned(trained: ClassifierWeights) -> None:
    fresh = planted_trees(seed=1)
    figures = evaluate(trained, fresh)
    assert figures["recall"] is not None
    assert figures["recall"] > 0.95
    assert figures["positive_rate"] == pytest.approx(fresh.accepted.mean(), abs=0.05)


def test_stored_weights_act_on_raw_features(trained: ClassifierWeights) -> None:
    """Against the network written out with torch, on probability and nats by 1/16, and depth."""
    import torch

    codes = np.array([[0, 95, 640, 14407], [0, 543, 1601, 2559], [1, 2, 8, 16]])
    joint, entropy, depth = codes
    nats = np.exp(-(joint // 16) / 16), entropy // 16 / 16
    raw = torch.from_numpy(np.stack([*nats, depth], axis=1))
    weights = [getattr(trained, name) for name in WEIGHTS]
    assert {w.dtype for w in weights} == {np.dtype(np.float32)}
    w1, b1, w2, b2 = (torch.tensor(w, dtype=torch.float64) for w in weights)
    expected = torch.sigmoid(torch.relu(raw @ w1.T + b1) @ w2 + b2)
    np.testing.assert_allclose(trained.confidence(*codes), expected.numpy(), rtol=1e-12)


def test_the_table_is_the_confidence(trained: ClassifierWeights) -> None:
    table = trained.table()
    assert (table.shape, table.dtype) == ((DEPTHS, ENTROPIES, JOINTS), np.uint16)
    joint, entropy = np.arange(JOINTS)[None, None], np.arange(ENTROPIES)[None, :, None]
    depth = np.arange(1, DEPTHS + 1)[:, None, None]
    confidence = trained.confidence(joint * STEP, entropy * STEP + STEP - 1, depth)
    np.testing.assert_array_equal(table, np.floor(confidence * CONFIDENCE_SCALE))
    np.testing.assert_array_equal(confidence_table(trained), table)
    one = trained.confidence(7 * STEP, 30 * STEP, 2)
    assert one.shape == ()
    codes = table.astype(np.int32)
    found = confidence_code(codes, 2, 30 * STEP + 3, 8 * STEP - 1)
    assert found == math.floor(one * CONFIDENCE_SCALE)
    assert confidence_code(codes, 99, 99999, 99999) == table[-1, -1, -1]
    assert confidence_code(codes, DEPTHS + 4, 3 * STEP, 5 * STEP) == table[-1, 3, 5]
    assert trained.table(3, 21, 11).shape == (3, 21, 11)


def test_weights_are_read_as_they_were_stored(trained: ClassifierWeights) -> None:
    arrays = {name: getattr(trained, name) for name in WEIGHTS}
    np.testing.assert_array_equal(read_weights(arrays).table(4, 50, 50), trained.table(4, 50, 50))


# -- Sequoia: static trees


def value(paths: tuple[tuple[int, ...], ...], p: np.ndarray) -> float:
    """Expected accepted length of a tree: the sum over nodes of the product along the path."""
    return sum(
        math.prod(p[min(level, len(p) - 1), rank] for level, rank in enumerate(path))
        for path in paths
    )


def greedy(p: np.ndarray, nodes: int, depth: int) -> float:
    """The most probable nodes of the whole tree."""
    ranks = range(p.shape[1])
    everything = [path for d in range(depth) for path in itertools.product(ranks, repeat=d + 1)]
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


RANDOM = [
    np.random.default_rng(s).dirichlet(np.ones(4) * 0.8, size=3)[:, :3] for s in range(4)
]  # ranks in no order


@pytest.mark.parametrize(
    "p", [np.array([[0.6, 0.2, 0.1]]), np.array([[0.5, 0.3, 0.1], [0.8, 0.05, 0.0]]), *RANDOM]
)
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
    for nodes, depth in itertools.product((1, 7, 30), (3, 5)):
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
    for chances, paths in (([0.25] * 4, ((0,), (1,))), ([0.1, 0.6], ((1,),))):
        found = best_static_tree(chances, max_nodes=3, max_depth=1)
        assert found.paths(len(paths), 1) == paths, "equal ranks keep the lower"


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
            levels = range(1, max(map(len, paths)) + 1)
            widths = [len({q[:-1] for q in paths if len(q) == level}) for level in levels]
            assert frontier_widths(paths) == widths
            drafting = sum(draft_level_s(i, w) for i, w in enumerate(widths, 1))
            rates.append((1 + value(paths, p[None])) / (0.05 + verify_s(nodes + 1) + drafting))
    assert chosen.expected_tokens_per_s == pytest.approx(max(rates))
    assert chosen.expected_emitted == pytest.approx(1 + value(chosen.paths, p[None]))
