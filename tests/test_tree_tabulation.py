"""The compiled tabulation of top-k trees against the tensor path that the other growths take, on random tries of laws."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.tree_outcomes import Forest, GrowthTable, ShortlistRanks, _tabulate_chunk, tabulate_growth
from runtime.policies.trees import TreeRule

COLUMNS = ("rank", "pool", "width", "read", "phi", "best", "end", "missing")


def random_forest(seed: int, *, width: int = 7, starts: int = 200, extra: int = 900) -> Forest:
    """A trie of random laws with holes: children that were not recorded, laws with few children, many equal codes."""
    rng = np.random.default_rng(seed)
    nodes = starts + extra
    high = int(rng.choice([3, 40, 250]))
    child = rng.integers(0, nodes, (nodes, width)).astype(np.int32)
    child[rng.random((nodes, width)) < 0.15] = -1
    count = np.where(rng.random(nodes) < 0.3, rng.integers(0, width + 1, nodes), width)
    gap = np.sort(rng.integers(0, high, (nodes, width)), axis=1)
    text_slot = np.where(rng.random(nodes) < 0.2, 255, np.minimum(rng.geometric(0.5, nodes) - 1, width))
    limit = rng.integers(0, 12, starts)
    return Forest(
        "near", width, 8, False, frozenset(), True, np.arange(starts, dtype=np.int64), limit.astype(np.int64), child,
        text_slot.astype(np.uint8), rng.integers(0, high, (nodes, width)).astype(np.uint8), (gap - gap[:, :1]).astype(np.uint8),
        count.astype(np.uint8), rng.integers(0, 256, nodes).astype(np.uint8), rng.integers(0, 256, nodes).astype(np.uint8),
        rng.integers(0, 50, (nodes, width)).astype(np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("shortlisted", [False, True])
def test_compiled_and_tensor_tables_are_equal(seed: int, coupled: bool, shortlisted: bool) -> None:
    """Every column, for chains, narrow and wide trees, shallow and deep, some starts only, with a shortlist that shrinks and without."""
    forest = random_forest(seed)
    ranks = np.random.default_rng(9).permutation(50).astype(np.int32)[forest.tokens]
    shortlist = ShortlistRanks(ranks, np.array([45, 45, 30, 22, 18, 15, 12, 11])) if shortlisted else None
    starts = np.sort(np.random.default_rng(seed).permutation(len(forest.root))[:150])
    ends = set()
    for width, depth in ((1, 5), (2, 1), (3, 4), (7, 3), (5, 8)):
        rule = TreeRule(width=width, frontier=width, coupled=coupled, sharpness=1.5 + seed % 2)
        made = tabulate_growth(forest, [(rule, starts)], depth, shortlist)
        expected = GrowthTable.empty(len(forest.root), depth)
        asking = TreeRule(width=width, frontier=width, coupled=coupled, sharpness=rule.sharpness, kept=(0,))
        _tabulate_chunk(forest, asking, expected, starts, shortlist)
        for name in COLUMNS:
            found, right = getattr(made, name), getattr(expected, name)
            assert found.dtype == right.dtype
            np.testing.assert_array_equal(found[starts], right[starts], err_msg=f"{name}, width {width}, depth {depth}")
        ends |= set(made.missing[starts].tolist())
    assert len(ends) > 2, "no hole of the trie was met"
