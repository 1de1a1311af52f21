"""The sharpness of the coupled score, on laws whose answer is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tree_reference import Law
from tree_reference import local_costs as reference_costs

from spectune.optimizer.fit.score import (
    DEFAULT,
    LEAST,
    MOST,
    ScoreExamples,
    coupled_loss,
    estimates,
    fit_sharpness,
    probability_loss,
)
from spectune.runtime.trees.grow import Codes, Growing, TreeRule


def laws_of(gap: Any, taken: Any, *, count: Any = None, q: Any = None) -> ScoreExamples:
    gap = np.asarray(gap, np.int64)
    n, k = gap.shape
    there = np.full(n, k) if count is None else np.asarray(count)
    guess = np.full(gap.shape, 1.0 / k) if q is None else np.asarray(q, np.float64)
    return ScoreExamples(
        gap, guess, there.astype(np.int64), np.asarray(taken, np.int64), np.arange(n)
    )


def planted(
    sharpness: float, n: int = 20000, k: int = 6, *, seed: int = 0, missed: float = 0.0
) -> ScoreExamples:
    """Laws whose children are taken as exp(-sharpness * gap) says, some of fewer than k children;
    in a share ``missed`` none is."""
    rng = np.random.default_rng(seed)
    gap = np.sort(rng.integers(0, 960, (n, k)), axis=1)
    gap -= gap[:, :1]
    count = rng.integers(1, k + 1, n)
    weight = np.where(np.arange(k) < count[:, None], np.exp(-sharpness * gap / 256), 0.0)
    taken = (rng.random((n, 1)) > (weight / weight.sum(1, keepdims=True)).cumsum(1)).sum(1)
    taken = np.where(rng.random(n) < missed, -1, np.minimum(taken, count - 1))
    return laws_of(gap, taken, count=count)


def groups(laws: ScoreExamples, of: int = 40) -> np.ndarray:
    return np.arange(len(laws)) // of


@pytest.mark.parametrize("sharpness", [0.4, 1.0, 1.5, 2.6, 5.0])
def test_a_planted_sharpness_is_found(sharpness: float) -> None:
    laws = planted(sharpness)
    found = fit_sharpness(laws, groups(laws))
    assert found.sharpness == pytest.approx(sharpness, rel=0.06)
    assert found.sharpness == round(found.sharpness, 2)
    assert found.loss["fitted"] <= found.loss["default"] + 1e-4
    assert not found.at_border
    for rank in found.ranks:
        margin = 4 * math.sqrt(0.25 / rank["laws"])
        assert rank["predicted"] == pytest.approx(rank["observed"], abs=margin)


def test_what_no_child_covers_makes_it_flatter() -> None:
    """Binary loss counts laws without a taken child: a sure estimate is wrong there."""
    whole, missed = planted(2.0), planted(2.0, missed=0.3)
    found = fit_sharpness(missed, groups(missed))
    assert found.covered == pytest.approx(0.7, abs=0.03)
    assert found.sharpness < fit_sharpness(whole, groups(whole)).sharpness - 0.2


def test_estimates_are_the_costs_before_rounding() -> None:
    laws = planted(1.0, n=300)
    none, gap = np.zeros_like(laws.gap, np.uint16), laws.gap.astype(np.uint16)
    flat = none[:, 0].copy()
    count = laws.count.astype(np.uint8)  # a recording's dtypes, as compiled
    codes = Codes(none.astype(np.int32), none, gap, flat, flat, count)
    for sharpness in (0.25, 1.5, 2.37, 8.0):
        chance, there = estimates(laws, sharpness), laws.exists
        rule = TreeRule(width=6, frontier=6, coupled=True, sharpness=sharpness)
        growing = Growing(rule, 1, batch=300)
        growing.add_from(codes, np.arange(300)[:, None])
        cost = growing.trees.cost
        # The sum of weights is looked up, at most 1e-3 nat above what it is.
        above = cost[there] + 256 * np.log(chance[there])
        assert -0.5 - 1e-9 <= above.min() <= above.max() <= 0.5 + 0.256
        assert not chance[~there].any()
        np.testing.assert_allclose(chance.sum(1), 1.0)
        for i in range(0, 300, 29):
            n = int(laws.count[i])
            law = Law(list(range(n)), [0] * n, laws.gap[i, :n].tolist(), 0, 0)
            assert reference_costs(law, 6, "coupled", sharpness) == cost[i, :n].tolist()


def test_losses_are_those_of_each_child() -> None:
    q = [[0.6, 0.3, 0.1], [0.5, 0.2, 0.0], [0.9, 0.0, 0.0]]
    laws = laws_of([[0, 256, 512], [0, 0, 4095], [0, 4095, 4095]], [1, -1, 0], count=[3, 2, 1], q=q)
    e = [math.exp(-1.5 * g) for g in (0, 1, 2)]
    p = [*(x / sum(e) for x in e), 0.5, 0.5]  # the law of one child says nothing of sharpness
    taken = [False, True, False, False, False]
    for chances, loss in (
        (p, coupled_loss(laws, 1.5)),
        ([0.6, 0.3, 0.1, 0.5, 0.2], probability_loss(laws)),
    ):
        right = (x if y else 1 - x for x, y in zip(chances, taken, strict=True))
        assert loss == pytest.approx(-sum(map(math.log, right)) / 5, rel=1e-6)
    sure = laws_of([[0, 65535]] * 2, [1, -1], q=[[1.0, 0.0]] * 2)
    assert math.isfinite(coupled_loss(sure, MOST))
    assert math.isfinite(probability_loss(sure))


def test_ties_keep_the_default() -> None:
    """Equal gaps say nothing of sharpness."""
    laws = laws_of(np.zeros((40, 3)), np.arange(40) % 3)
    found = fit_sharpness(laws, groups(laws, 4))
    assert found.sharpness == DEFAULT
    even = -(math.log(1 / 3) + 2 * math.log(2 / 3)) / 3
    assert found.loss["fitted"] == found.loss["default"] == pytest.approx(even)


@pytest.mark.parametrize(("taken", "border"), [(0, MOST), (2, LEAST)])
def test_what_lies_beyond_is_told(taken: int, border: float) -> None:
    laws = laws_of([[0, 128, 256]] * 50, [taken] * 50)
    found = fit_sharpness(laws, groups(laws, 5))
    assert (found.sharpness, found.at_border) == (border, True)


@pytest.mark.parametrize(
    ("laws", "group", "message"),
    [
        (laws_of(np.zeros((0, 3)), []), [], "two groups or more"),
        (laws_of([[0, 3]] * 3, [0] * 3), [7, 7, 7], "two groups or more"),
        (laws_of([[0, 3]] * 3, [0] * 3, count=[1] * 3), [1, 2, 3], "two or more children"),
        (laws_of([[0, 3]] * 3, [-1] * 3), [1, 2, 3], "is the text's token"),
    ],
)
def test_what_cannot_be_fitted(laws: ScoreExamples, group: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_sharpness(laws, np.array(group, dtype=np.int64))
