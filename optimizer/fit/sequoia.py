"""Sequoia's static tree (section 3.1): the best fixed tree for acceptance by rank, and of those of
all sizes the one that is fastest by measured costs.

p[l, r] is the probability that the target takes the child of rank r of a node at level l (the
root's is 0), given that it took the node. Children of one node exclude each other, so a row sums to
at most 1, and a tree's expected accepted length is the sum over its nodes of the product of p along
the path.
"""

from __future__ import annotations

import heapq
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit.recorded_trees import RecordedTrees, TreeSource
from spectune.optimizer.fit.shared import StoredFit, profile_of
from spectune.optimizer.simulate.replay import run_replay
from spectune.runtime.policies.artifacts import STATIC_TREE
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import TraceError
from spectune.traces.tables import LatencyProfile

FloatArray = npt.NDArray[np.float64]

Path = tuple[int, ...]
"""Ranks from the root down to a node."""

NODES: Final = 64
DEPTH: Final = 16
"""Limits of a tree where nobody says."""
SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Nodes of the trees among which costs choose."""
MIN_PARENTS: Final = 200
"""Nodes on the text that a level needs for figures of its own; deeper levels are taken to be like
the last that has them."""


def fit_sequoia(
    source: TreeSource,
    *,
    nodes: int | None = None,
    depth: int | None = None,
    profile: str | None = None,
    progress: Progress = silent,
) -> StoredFit:
    """Finds and stores the best fixed tree for the acceptance by level and rank that was recorded.

    With ``nodes`` and ``depth`` and no ``profile``: the tree of so many nodes and at most so many
    levels that accepts most. Else the tree within these limits that replay with the costs of a
    profile (the latest of the recording's pair and device by default) finds fastest. Raises
    TraceError when the profile has no costs of trees or too little was recorded.
    """
    forest = source.trees.forest
    # Where a distribution is a function of the prefix, the text's own ranks say all, at any depth.
    deepest = depth or (DEPTH if forest.shared and forest.full else forest.depth)
    most = nodes or NODES
    by_acceptance = profile is None and nodes is not None and depth is not None
    costs = None if by_acceptance else _costs(source, profile)
    chance, parents = rank_acceptance(source.trees, deepest)
    speed = None
    try:
        if costs is None:
            paths = best_static_tree(chance, most, deepest)
        else:
            paths, speed = _fastest(source, chance, most, deepest, costs, progress)
    except ValueError as error:
        raise TraceError(f"no static tree: {error}") from None
    levels = max(map(len, paths))
    fitted = {
        "paths": [list(path) for path in paths],
        "nodes": len(paths),
        "depth": levels,
        "expected_tokens": 1.0 + expected_accepted(chance, paths),
        "expected_tokens_per_s": speed,
        "limits": {"nodes": most, "depth": deepest},
        "profile": None if costs is None else costs.id,
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


def _fastest(
    source: TreeSource,
    chance: FloatArray,
    nodes: int,
    depth: int,
    costs: LatencyProfile,
    progress: Progress,
) -> tuple[tuple[Path, ...], float]:
    """The fastest tree within limits on the texts that are fitted to, and its tokens/s. Raises
    ValueError where there is none."""
    trees: dict[tuple[Path, ...], None] = {}
    for levels in range(1, depth + 1):
        for size in (*(n for n in SIZES if n < nodes), nodes):
            try:
                trees[best_static_tree(chance, size, levels)] = None
            except ValueError:
                break
    if not trees:
        raise ValueError("there is no tree within these limits")
    speeds = {}
    for n, paths in enumerate(trees):
        growth = {"kind": "static", "paths": paths}
        policy = parse_policy({"draft": source.trees.forest.draft, "growth": growth})
        replay = run_replay(source.trace, policy, costs, approximate=True)
        speeds[paths] = replay.total.tokens_per_s
        progress("static trees", n + 1, len(trees))
    best = max(speeds, key=lambda paths: speeds[paths])
    return best, speeds[best]


def _costs(source: TreeSource, profile: str | None) -> LatencyProfile:
    otherwise = "or give --set fit.nodes=N --set fit.depth=D to choose by acceptance alone"
    about, draft = source.info.options, source.trees.forest.draft
    place: dict[str, Any] = {"device": str(about.get("device", "cpu")), "dtype": about.get("dtype")}
    pair_id, hint = source.info.pair_id, f", {otherwise}"
    measured = profile_of(source.store, pair_id, profile, hint, **place)
    if draft not in measured.tree_drafts:
        raise TraceError(
            f"profile {measured.id} has no costs of trees for draft {draft!r}: run `profile` "
            f"again, name another with --profile ID, {otherwise}"
        )
    return measured
