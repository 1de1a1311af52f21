"""What is fitted to recorded rounds, on synthetic rounds whose answer is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from spectune.optimizer.fit.c2t import Examples, train
from spectune.optimizer.fit.heterospec import MIN_FULL, Rounds, fit_bins
from spectune.optimizer.fit.sequoia import best_static_tree, expected_accepted
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
from spectune.traces.errors import PolicyError, TraceError

# -- HeteroSpec: bins

PLANTED = (10, 21, 40, 64, 90, 130, 171)


def planted_rounds(n: int = 6000, seed: int = 0, noise: int = 0) -> Rounds:
    """Rounds whose rank is a step function of Phi with eight steps, all fully accepted."""
    rng = np.random.default_rng(seed)
    phi = rng.integers(0, 240, n)
    steps = np.array([1, 3, 8, 12, 30, 36, 50, 60])
    tcr = steps[np.searchsorted(PLANTED, phi)] + rng.integers(0, noise + 1, n)
    return Rounds(phi, tcr, np.ones(n, dtype=bool))


def test_cart_finds_the_planted_thresholds() -> None:
    rounds = planted_rounds()
    bins = fit_bins(rounds)
    expected = (list(PLANTED), False, len(rounds.phi))
    assert (bins["thresholds"], bins["fallback"], bins["rounds"]) == expected
    assert bins["explained"] == pytest.approx(1.0)
    assert sum(b["count"] for b in bins["statistics"]) == len(rounds.phi)
    assert sum(b["share"] for b in bins["statistics"]) == pytest.approx(1.0)
    assert [b["mean_tcr"] for b in bins["statistics"]] == [1, 3, 8, 12, 30, 36, 50, 60]


def test_bins_explain_noisy_ranks_as_their_means_do() -> None:
    rounds = planted_rounds(noise=25, seed=3)
    bins = fit_bins(rounds)
    of = np.searchsorted(bins["thresholds"], rounds.phi)
    means = np.array([b["mean_tcr"] for b in bins["statistics"]])
    within = ((rounds.tcr - means[of]) ** 2).mean()
    assert bins["explained"] == pytest.approx(1 - within / rounds.tcr.var())
    assert 0.5 < bins["explained"] < 1


def test_only_fully_accepted_rounds_are_fitted_where_there_are_enough() -> None:
    rounds, full = planted_rounds(), np.repeat([True, False], [6000, 3000])
    misleading = np.full(3000, 100)
    every = Rounds(np.append(rounds.phi, misleading), np.append(rounds.tcr, misleading * 0), full)
    bins = fit_bins(every)
    assert (bins["thresholds"], bins["rounds"]) == (list(PLANTED), 6000)
    fifth = bins["statistics"][5]
    accepted = fifth["count"] / (fifth["count"] + 3000)
    assert fifth["fully_accepted"] == pytest.approx(accepted)
    assert fifth["share"] > 1 / 3
    for enough in (0, 1):
        few = fit_bins(Rounds(rounds.phi, rounds.tcr, np.arange(6000) < MIN_FULL - 1 + enough))
        expected = (False, MIN_FULL) if enough else (True, 6000)
        assert (few["fallback"], few["rounds"]) == expected


def test_constant_ranks_make_one_bin_and_no_rounds_none() -> None:
    bins = fit_bins(Rounds(np.arange(100), np.ones(100, dtype=int), np.ones(100, dtype=bool)))
    assert (bins["thresholds"], bins["explained"]) == ([], 0.0)
    none = np.zeros(0, dtype=int)
    with pytest.raises(TraceError, match="no rounds"):
        fit_bins(Rounds(none, none, none > 0))


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
    weights, again = (train(examples, epochs=60) for _ in range(2))
    assert all(np.array_equal(getattr(weights, n), getattr(again, n)) for n in WEIGHTS)
    return weights


def test_a_planted_rule_is_learned(trained: ClassifierWeights) -> None:
    fresh = planted_trees(seed=1)
    positive = trained.confidence(fresh.joint_code, fresh.entropy_code, fresh.depth) > 0.5
    assert positive[fresh.accepted].mean() > 0.95
    assert positive.mean() == pytest.approx(fresh.accepted.mean(), abs=0.05)


def test_stored_weights_act_on_raw_features(trained: ClassifierWeights) -> None:
    """Against the network written out with torch, on probability and nats by 1/16, and depth."""
    import torch

    codes = np.array([[0, 95, 640, 14407], [0, 543, 1601, 2559], [1, 2, 8, 16]])
    joint, entropy, depth = codes
    nats = np.exp(-(joint // 16) / 16), -(joint // 16) / 16, entropy // 16 / 16
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
    with pytest.raises(PolicyError, match="earlier version"):
        read_weights(arrays | {"w1": np.delete(trained.w1, 1, axis=1)})


def test_small_probabilities_are_told_apart() -> None:
    """Acceptance that depends on the logarithm alone, of nodes that are all unlikely."""
    rng = np.random.default_rng(2)
    joint = rng.integers(1200, 2600, 20000).astype(np.int32)
    accepted = rng.random(len(joint)) < 1 / (1 + np.exp((joint - 1900) / 100))
    same = np.ones_like(joint)
    weights = train(Examples(joint, same, same, accepted, same.astype(np.int64)), epochs=20)
    confidence = weights.confidence(joint, same, same)
    order = np.argsort(confidence)
    assert accepted[order[-2000:]].mean() > 0.97
    assert accepted[order[:2000]].mean() < 0.03


# -- Sequoia: static trees


def value(paths: tuple[tuple[int, ...], ...], p: np.ndarray) -> float:
    """Expected accepted length of a tree: the sum over nodes of the product along the path."""
    return sum(
        math.prod(p[min(level, len(p) - 1), rank] for level, rank in enumerate(path))
        for path in paths
    )


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


RANDOM = [
    np.random.default_rng(s).dirichlet(np.ones(4) * 0.8, size=3)[:, :3] for s in range(4)
]  # ranks in no order


@pytest.mark.parametrize(
    "p", [np.array([[0.6, 0.2, 0.1]]), np.array([[0.5, 0.3, 0.1], [0.8, 0.05, 0.0]]), *RANDOM]
)
def test_the_best_tree_is_that_of_brute_force(p: np.ndarray) -> None:
    for nodes, depth in itertools.product(range(1, 6), range(1, 4)):
        candidates = [value(tuple(t), p) for t in every_tree(nodes, depth, 3)]
        if not candidates:
            with pytest.raises(ValueError, match="no tree"):
                best_static_tree(p, nodes, depth)
            continue
        paths = best_static_tree(p, nodes, depth)
        assert len(set(paths)) == len(paths) == nodes
        assert all(len(path) <= depth and (len(path) == 1 or path[:-1] in paths) for path in paths)
        assert list(paths) == sorted(paths, key=lambda q: (len(q), q))
        assert value(paths, p) == pytest.approx(max(candidates))
        assert expected_accepted(p, paths) == pytest.approx(max(candidates))


def test_ties_keep_fewer_levels_and_lower_ranks() -> None:
    for chances, depth, paths in (
        (0.7 * 0.3 ** np.arange(10), 16, ((0,), (0, 0), (0, 0, 0))),
        (0.7 * 0.3 ** np.arange(10), 1, ((0,), (1,), (2,))),
        (np.full(4, 0.25), 1, ((0,), (1,))),
        (np.array([0.1, 0.6]), 1, ((1,),)),
    ):
        assert best_static_tree(chances[None], len(paths), depth) == paths
