"""Sequoia's static tree (section 3.1): the best fixed tree for acceptance by rank, by a dynamic
program over nodes and depth; of its trees the one that measured costs make fastest.

p[l, r] is the probability that the target takes the child of rank r of a node at level l (the
root's is 0), given that it took the node. Children of one node exclude each other, so a row sums to
at most 1, and a tree's expected accepted length is the sum over its nodes of the product of p along
the path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit.recorded_trees import RecordedTrees, TreeSource
from spectune.optimizer.fit.shared import StoredFit, profile_of
from spectune.runtime.costs import RoundKind, pass_seconds, round_costs
from spectune.runtime.policies.artifacts import STATIC_TREE
from spectune.runtime.policies.document import WIDTH_LIMIT
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import TraceError

FloatArray = npt.NDArray[np.float64]

Path = tuple[int, ...]
"""Ranks from the root down to a node."""

NODES: Final = 64
DEPTH: Final = 16
"""Limits of a tree where nobody says."""
MIN_PARENTS: Final = 200
"""Nodes on the text that a level needs for figures of its own; deeper levels are taken to be like
the last that has them."""
LAG: Final = 2
"""Tokens that the draft's first pass of a round reads, where one number has to do: the bonus token,
and often the last accepted one."""


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
    levels that accepts most. Else the tree that is fastest by the costs of a profile (the latest of
    the recording's pair and device by default) within these limits. Raises TraceError when the
    profile has no costs of trees or too little was recorded.
    """
    forest = source.trees.forest
    by_acceptance = profile is None and nodes is not None and depth is not None
    costs = None if by_acceptance else _costs(source, profile)
    # Where a distribution is a function of the prefix, the text's own ranks say all, at any depth.
    deepest = depth or (DEPTH if forest.shared and forest.full else forest.depth)
    most = nodes or NODES
    progress("acceptance", 0, 1)
    acceptance = rank_acceptance(source.trees, deepest)
    tree = _tree(acceptance, most, deepest, costs)
    progress("acceptance", 1, 1)
    levels = max(len(p) for p in tree.paths)
    fitted = {
        "paths": [list(path) for path in tree.paths],
        "nodes": len(tree.paths),
        "depth": levels,
        "expected_tokens": tree.expected_emitted,
        "expected_tokens_per_s": None if costs is None else tree.expected_tokens_per_s,
        "limits": {"nodes": most, "depth": deepest},
        "profile": None if costs is None else costs.profile_id,
        "acceptance": [[round(float(p), 6) for p in row] for row in acceptance.chance],
        "parents": acceptance.parents.tolist(),
    }
    evidence = acceptance.chance, acceptance.parents
    return source.keep(
        STATIC_TREE,
        fitted,
        {},
        evidence,
        levels,
        lambda artifact: {"growth": {"kind": "static", "artifact": artifact}},
    )


@dataclass(frozen=True, eq=False)
class RankAcceptance:
    """``chance`` float64 [levels, k]: P(the child of a rank is the text's token | its parent, at
    that level, is on the text), the root's level first. ``parents`` int64 [levels]: how many nodes
    each row counts."""

    chance: FloatArray
    parents: npt.NDArray[np.int64]


def rank_acceptance(
    trees: RecordedTrees, depth: int, *, least: int = MIN_PARENTS
) -> RankAcceptance:
    """Acceptance by level and rank over all starts (Sequoia has it by rank alone), for at most
    ``depth`` levels and only as deep as ``least`` parents go. A row is of the parents that the
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
    return RankAcceptance(np.stack(chance), np.array(parents, dtype=np.int64))


@dataclass(frozen=True)
class StaticTree:
    """A tree's ``paths``, one per node: level by level, parents before children, siblings by rank.
    ``expected_emitted`` tokens a round, the target's own included, at ``expected_tokens_per_s``."""

    paths: tuple[Path, ...]
    expected_emitted: float
    expected_tokens_per_s: float


@dataclass(frozen=True, eq=False)
class BestTrees:
    """``accepted`` float64 [max_nodes + 1, max_depth + 1]: the most accepted tokens to expect of a
    tree of exactly n nodes beside the root and at most d levels; -inf where there is no such tree,
    0 without nodes."""

    accepted: FloatArray
    _choice: tuple[npt.NDArray[np.int16], ...] = field(repr=False)

    def paths(self, nodes: int, depth: int) -> tuple[Path, ...]:
        """A tree that reaches ``accepted[nodes, depth]``. Raises ValueError where there is none."""
        rows, columns = self.accepted.shape
        if not (0 <= nodes < rows and 0 <= depth < columns) or not np.isfinite(
            self.accepted[nodes, depth]
        ):
            raise ValueError(f"there is no tree of {nodes} nodes and at most {depth} levels here")
        found: list[Path] = []
        below: list[tuple[Path, int]] = [((), nodes)]
        while below:
            path, left = below.pop()
            choice = self._choice[depth]
            for rank in range(choice.shape[1] - 1, -1, -1):
                if not left:
                    break
                size = int(choice[len(path), rank, left])
                if size:
                    child = (*path, rank)
                    found.append(child)
                    below.append((child, size - 1))
                    left -= size
        return tuple(sorted(found, key=lambda p: (len(p), p)))


def best_static_tree(
    rank_acceptance: npt.ArrayLike, *, max_nodes: int, max_depth: int
) -> BestTrees:
    """Sequoia's program for every number of nodes up to ``max_nodes`` and every depth up to
    ``max_depth``.

    ``rank_acceptance``: p [k], or [levels, k] by the parent's level, the last row holding below.
    With G_l[n] the most to expect below a node at level l from n descendants, and H_{l,b} the same
    from its first b ranks,

    H_{l,b}[n] = max(H_{l,b-1}[n], max_s H_{l,b-1}[n - s] + p[l, b-1] (1 + G_{l+1}[s - 1])),   G_l =
    H_{l,k}

    Sequoia's T has no first term, as its acceptance never grows with rank; measured acceptance may,
    and then a rank is left out. A node never is worth more than its parent, so with d >= n this is
    the n most probable nodes of all. Ties keep lower ranks.
    """
    p = np.atleast_2d(np.asarray(rank_acceptance, dtype=np.float64))
    p = p[np.minimum(np.arange(max_depth), len(p) - 1)]
    ranks = p.shape[1]
    accepted = np.full((max_nodes + 1, max_depth + 1), -np.inf)
    accepted[0] = 0.0
    # [n, s] -> where H[n - s] stands in H with one -inf before it
    counts = np.arange(max_nodes + 1)
    behind = np.maximum(0, counts[:, None] - counts[None, 1:] + 1)
    choices = [np.zeros((0, ranks, max_nodes + 1), dtype=np.int16)]
    for depth in range(1, max_depth + 1):
        choice = np.zeros((depth, ranks, max_nodes + 1), dtype=np.int16)
        g = accepted[:, 0].copy()  # below the deepest level: nothing
        for level in range(depth - 1, -1, -1):
            h = accepted[:, 0].copy()
            possible = np.isfinite(g[:-1])
            value = 1.0 + np.where(possible, g[:-1], 0.0)
            for rank in range(ranks):
                subtree = np.where(possible, p[level, rank] * value, -np.inf)
                sums = np.concatenate([[-np.inf], h])[behind] + subtree
                size = np.argmax(sums, axis=1)
                best = sums[counts, size]
                taken = best > h
                choice[level, rank] = np.where(taken, size + 1, 0)
                h = np.where(taken, best, h)
            g = h
        accepted[:, depth] = g
        choices.append(choice)
    return BestTrees(accepted, tuple(choices))


def choose(
    rank_acceptance: npt.ArrayLike,
    draft_level_s: Callable[[int, int], float],
    verify_s: Callable[[int], float],
    overhead_s: float,
    *,
    max_nodes: int,
    max_depth: int,
) -> StaticTree:
    """Of :func:`best_static_tree`'s trees with at least one node, that with the fewest seconds per
    token. As Sequoia, with costs as measured: a token takes

    (overhead_s + verify_s(nodes + 1) + sum over levels l of draft_level_s(l, width_l)) / (1 +
    accepted)

    where width_l counts the nodes that are expanded to make level l = 1..depth: 1 (the root) at
    first, then those of level l - 1 that have children. Ties go to fewer nodes, then fewer levels.
    Raises ValueError where a round takes no time, or there is no tree within the limits.
    """
    trees = best_static_tree(rank_acceptance, max_nodes=max_nodes, max_depth=max_depth)
    level_s: dict[tuple[int, int], float] = {}
    best: StaticTree | None = None
    for nodes in range(1, max_nodes + 1):
        beside_s = overhead_s + verify_s(nodes + 1)
        for depth in range(1, max_depth + 1):
            accepted = float(trees.accepted[nodes, depth])
            if not accepted > trees.accepted[nodes, depth - 1]:
                continue  # no such tree, or no better than the shallower one
            paths = trees.paths(nodes, depth)
            seconds = beside_s
            for step in enumerate(frontier_widths(paths), start=1):
                if step not in level_s:
                    level_s[step] = draft_level_s(*step)
                seconds += level_s[step]
            if not seconds > 0:
                raise ValueError(f"a round of {nodes} nodes must take time, not {seconds} s")
            rate = (1.0 + accepted) / seconds
            if best is None or rate > best.expected_tokens_per_s:
                best = StaticTree(paths, 1.0 + accepted, rate)
    if best is None:
        raise ValueError("there is no tree within these limits")
    return best


def frontier_widths(paths: Sequence[Path]) -> list[int]:
    """Nodes expanded to make each level, from level 1: the distinct parents of its nodes."""
    parents = Counter(len(parent) for parent in {path[:-1] for path in paths})
    return [parents[level] for level in range(len(parents))]


class _Costs(NamedTuple):
    """A profile's costs of trees with one draft, in the middle of the recording's contexts, as
    :func:`choose` takes them; ``token_s`` is an emitted one's."""

    draft_level_s: Callable[[int, int], float]
    verify_s: Callable[[int], float]
    overhead_s: float
    token_s: float
    profile_id: str


def _costs(source: TreeSource, profile: str | None) -> _Costs:
    otherwise = "or give --set fit.nodes=N --set fit.depth=D to choose by acceptance alone"
    about, draft = source.info.options, source.trees.forest.draft
    device, dtype = str(about.get("device", "cpu")), about.get("dtype")
    pair_id, hint = source.info.pair_id, f", {otherwise}"
    measured, profile_id = profile_of(
        source.store, pair_id, profile, hint, device=device, dtype=dtype
    )
    if draft not in measured.tree_drafts:
        raise TraceError(
            f"profile {profile_id} has no costs of trees for draft {draft!r}: run `profile` again, "
            f"name another with --profile ID, {otherwise}"
        )
    trace = source.trace
    lengths = np.diff(trace.offsets)[trace.order]
    context = np.array([float((trace.prompts[trace.order] + lengths / 2).mean())])
    kind, sampled = RoundKind(draft, "static", sampled=source.sampled), int(source.sampled)
    costs = round_costs(measured, kind, context)
    first_s = float(costs.first_s[sampled, LAG] + costs.later_s[sampled, 1])
    level_s = pass_seconds(measured, kind, context, np.arange(WIDTH_LIMIT + 1.0))[0]
    more_s = max(0.0, level_s[WIDTH_LIMIT] - level_s[WIDTH_LIMIT - 1])

    def draft_level_s(level: int, width: int) -> float:
        """Of the pass that makes a level, from ``width`` nodes; beyond the widths measured as the
        last ones go on."""
        if level == 1:
            return first_s
        beyond = max(0, width - WIDTH_LIMIT)
        return float(level_s[min(width, WIDTH_LIMIT)] + beyond * more_s)

    def verify_s(tokens: int) -> float:
        return float(costs.verify_s[sampled][tokens - 1])

    token_s = float(costs.emitted_s[sampled])
    return _Costs(draft_level_s, verify_s, costs.rest_s, token_s, profile_id)


def _tree(acceptance: RankAcceptance, nodes: int, depth: int, costs: _Costs | None) -> StaticTree:
    try:
        if costs is None:
            best = best_static_tree(acceptance.chance, max_nodes=nodes, max_depth=depth)
            expected = 1.0 + float(best.accepted[nodes, depth])
            return StaticTree(best.paths(nodes, depth), expected, 0.0)
        chosen = choose(acceptance.chance, *costs[:3], max_nodes=nodes, max_depth=depth)
    except ValueError as error:
        raise TraceError(f"no static tree: {error}") from None
    # Noise is paid for each token emitted, whatever the tree.
    rate = 1.0 / (1.0 / chosen.expected_tokens_per_s + costs.token_s)
    return StaticTree(chosen.paths, chosen.expected_emitted, rate)
