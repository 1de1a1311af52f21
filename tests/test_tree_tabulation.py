"""The tabulation of trees against the plain-Python builder of :mod:`tree_reference`, on random
tries of distributions."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tree_reference as reference
from test_trees import random_growth

from spectune.optimizer.replay.forest import Forest, tabulate_growth
from spectune.optimizer.replay.tree_tables import ABSENT, GrowthTable
from spectune.runtime.trees.grow import TreeRule

STARTS = 60


def random_forest(seed: int, *, width: int = 6, extra: int = 900) -> Forest:
    """A trie of random distributions with holes: children that were not recorded, some with few
    children, many equal codes."""
    rng = np.random.default_rng(seed)
    nodes, high = STARTS + extra, int(rng.choice([3, 600, 4000]))
    order = np.argsort(
        np.arange(width) + rng.random((nodes, width)) * 4 + np.arange(nodes)[:, None] / 40,
        axis=None,
    )
    child = np.full(nodes * width, -1, np.int32)
    child[order[:extra]] = np.arange(STARTS, nodes)
    gap = np.sort(rng.integers(0, high, (nodes, width)), axis=1)
    codes = (rng.integers(0, high, (nodes, width)), gap - gap[:, :1])
    return Forest(
        "near", width, 8, False, True, np.arange(STARTS), rng.integers(0, 9, STARTS),
        child.reshape(nodes, width),
        np.where(
            rng.random(nodes) < 0.2, 255, np.minimum(rng.geometric(0.5, nodes) - 1, width)
        ).astype(np.uint8),
        *(x.astype(np.uint16) for x in codes),
        np.where(
            rng.random(nodes) < 0.3, rng.integers(1, width + 1, nodes), width
        ).astype(np.uint8),
        *(rng.integers(0, 4096, nodes).astype(np.uint16) for _ in range(2)),
        rng.integers(0, 50, (nodes, width)).astype(np.int32),
    )  # fmt: skip


class Recorded:
    """A forest as the reference reads it: a path is that of the children's slots."""

    def __init__(self, forest: Forest, start: int) -> None:
        self.forest, self.start = forest, start

    def node(self, path: tuple[int, ...]) -> int:
        node = int(self.forest.root[self.start])
        for slot in path:
            node = int(self.forest.child[node, slot]) if node >= 0 else -1
        return node

    def __call__(self, path: tuple[int, ...]) -> reference.Law:
        f, node = self.forest, self.node(path)
        if node < 0:
            return reference.Law([], [], [], 0, 0)
        slots = list(range(int(f.count[node])))
        logp, gap = f.logp[node, slots].tolist(), f.gap[node, slots].astype(int)
        gap = (gap - gap[:1]).tolist()
        return reference.Law(slots, logp, gap, int(f.entropy[node]), int(f.top_entropy[node]))


def check(
    made: GrowthTable,
    forest: Forest,
    rule: TreeRule,
    growth: reference.Growth,
    start: int,
) -> None:
    """One start of a table against the reference's trees of every depth."""
    for gamma in range(1, made.depth + 1):
        draft = Recorded(forest, start)
        tree = reference.build(draft, growth, gamma=gamma)
        text: list[int] = []
        for _ in range(gamma):
            node = draft.node(tuple(text))
            if node < 0 or forest.text_slot[node] >= forest.width:
                break
            text.append(int(forest.text_slot[node]))
        ranks = [ABSENT] * gamma
        for rank, one in enumerate(reference.cheapest_first(tree.candidates)):
            if one.path == tuple(text[: one.depth]):
                ranks[one.depth - 1] = rank
                grows = one in growing_next(tree, one.depth, growth, rule)
                assert made.read[start, one.depth - 1] == grows
        found = made.rank[start, gamma - 1, :gamma].tolist()
        if rule.static:  # whose nodes have no order
            found, ranks = ([rank == ABSENT for rank in x] for x in (found, ranks))
        assert found == ranks
        assert made.pool[start, gamma - 1] == len(tree.candidates)
        if tree.ended == "classifier":
            assert made.end[start] == tree.depth + 1
        else:
            assert made.end[start] > gamma
        last = [node for node in tree.candidates if node.depth == gamma]
        if last:
            first = last[0] if rule.static else reference.cheapest_first(last)[0]
            best = [first.logp, first.q_joint, first.entropy]
            assert made.best[start, gamma - 1].tolist() == best
        following = growing_next(tree, gamma, growth, rule)
        if not rule.static:
            assert made.width[start, gamma - 1] == len(following)


def growing_next(
    tree: reference.Tree, depth: int, growth: reference.Growth, rule: TreeRule
) -> list[reference.Node]:
    """The nodes of a level that the next pass would read."""
    level = [node for node in tree.candidates if node.depth == depth]
    if isinstance(growth, reference.Static):
        inner = {path[:depth] for path in growth.paths if len(path) > depth}
        return [node for node in level if node.ranks in inner]
    if isinstance(growth, reference.Classifier):
        return level
    return reference.cheapest_first(level)[: rule.frontier]


@pytest.mark.parametrize("kind", ["top_k", "classifier", "static"])
def test_a_table_holds_what_each_start_grows(kind: str) -> None:
    """Ranks, candidates, passes' widths, ends, what a stop reads: of every depth."""
    missing, on_text = set(), 0
    for seed in range(4):
        forest, drawn = random_forest(seed), random.Random(f"{kind} {seed}")
        width = 4 if kind == "static" else drawn.randint(1, 6)
        growth, rule = random_growth(drawn, kind, width)
        depth = min(5, len(rule.static)) if rule.static else 5
        made = tabulate_growth(forest, [(rule, np.arange(STARTS))], depth)
        for start in range(0, STARTS, 3):
            check(made, forest, rule, growth, start)
        missing |= set(made.missing.tolist())
        on_text += int((made.rank != ABSENT).sum())
    assert len(missing) > 2, "no hole of the trie was met"
    assert on_text > 100
