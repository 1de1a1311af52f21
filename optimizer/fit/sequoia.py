"""Sequoia's static tree (section 3.1): the best fixed tree of a size for acceptance by rank. Which
size is fastest on a device (section 3.3) a tuning's replays of all sizes tell.

p[l, r] is the probability that the target takes the child of rank r of a node at level l (the
root's is 0), given that it took the node. Children of one node exclude each other, so a row sums to
at most 1, and a tree's expected accepted length is the sum over its nodes of the product of p along
the path.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit.recorded_trees import RecordedTrees, TreeSource
from spectune.optimizer.fit.shared import StoredFit
from spectune.runtime.policies.artifacts import STATIC_TREE
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import TraceError

FloatArray = npt.NDArray[np.float64]

Path = tuple[int, ...]
"""Ranks from the root down to a node."""

NODES: Final = 16
DEPTH: Final = 16
"""Limits of a tree where nobody says."""
MIN_PARENTS: Final = 200
"""Nodes on the text that a level needs for figures of its own; deeper levels are taken to be like
the last that has them."""


def fit_sequoia(
    source: TreeSource, *, nodes: int = NODES, depth: int | None = None, progress: Progress = silent
) -> StoredFit:
    """Finds and stores the tree of ``nodes`` nodes and at most ``depth`` levels that accepts most,
    for the acceptance by level and rank that was recorded. Raises TraceError where there is none,
    or too little was recorded."""
    forest = source.trees.forest
    # Where a distribution is a function of the prefix, the text's own ranks say all, at any depth.
    deepest = depth or (DEPTH if forest.shared and forest.full else forest.depth)
    progress("static tree", 0, 1)
    chance, parents = rank_acceptance(source.trees, deepest)
    try:
        paths = best_static_tree(chance, nodes, deepest)
    except ValueError as error:
        raise TraceError(f"no static tree: {error}") from None
    progress("static tree", 1, 1)
    levels = max(map(len, paths))
    fitted = {
        "paths": [list(path) for path in paths],
        "nodes": len(paths),
        "depth": levels,
        "expected_tokens": 1.0 + expected_accepted(chance, paths),
        "acceptance": np.round(chance, 6).tolist(),
        "parents": parents.tolist(),
    }
    growth = {"kind": "static"}
    return source.keep(
        STATIC_TREE, fitted, levels, lambda artifact: {"growth": {**growth, "artifact": artifact}}
    )


def rank_acceptance(
    trees: RecordedTrees, depth: int, *, least: int = MIN_PARENTS
) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Acceptance by level and rank over all starts (Sequoia has it by rank alone), for at most
    ``depth`` levels and only as deep as ``least`` parents go: P(the child of a rank is the text's
    token | its parent, at that level, is on the text), float64 [levels, k], the root's level first;
    and how many parents each level counts, int64 [levels]. A level is of the parents that the
    recorded children led to: those that a wide enough tree would have accepted."""
    forest = trees.forest
    node, levels = forest.root[trees.starts], trees.levels[trees.starts]
    chance: list[FloatArray] = []
    parents: list[int] = []
    for level in range(1, depth + 1):
        alive = (node >= 0) & (levels >= level)
        node, levels = node[alive], levels[alive]
        if len(node) < (least if chance else 1):
            break
        taken = np.bincount(forest.text_slot[node], minlength=256)[: forest.width]
        chance.append(taken / len(node))
        parents.append(len(node))
        node = trees.along_text(node)
    if not chance:
        raise TraceError(
            "no text of the recording goes on for a token under a budget that allows drafting; "
            "record longer ones"
        )
    return np.stack(chance), np.array(parents, dtype=np.int64)


def best_static_tree(chance: FloatArray, nodes: int, depth: int) -> tuple[Path, ...]:
    """The tree of ``nodes`` nodes and at most ``depth`` levels that accepts most, as Sequoia's
    dynamic program finds it: level by level, parents before children, siblings by rank.

    ``chance``: p [levels, k] by the parent's level, the last row holding below. As no node is worth
    more than its parent, these are the most probable nodes of all, and taking the best next one
    never lacks a parent. Ties go to fewer levels, then lower ranks. Raises ValueError where there
    are not so many nodes.
    """
    tree: list[Path] = []
    best = [(-1.0, 0, Path())]
    while best and len(tree) <= nodes:
        value, level, path = heapq.heappop(best)
        tree.append(path)
        if level < depth:
            for rank, p in enumerate(chance[min(level, len(chance) - 1)].tolist()):
                heapq.heappush(best, (value * p, level + 1, (*path, rank)))
    if len(tree) <= nodes:
        raise ValueError(f"there is no tree of {nodes} nodes and at most {depth} levels here")
    return tuple(sorted(tree[1:], key=lambda p: (len(p), p)))


def expected_accepted(chance: FloatArray, paths: tuple[Path, ...]) -> float:
    """Accepted tokens to expect of a round of a tree."""
    last = len(chance) - 1
    return float(
        sum(np.prod([chance[min(n, last), rank] for n, rank in enumerate(path)]) for path in paths)
    )
