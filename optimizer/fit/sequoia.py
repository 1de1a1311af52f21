"""The best fixed tree for acceptance by rank, as Sequoia finds it: a dynamic program over nodes and depth, and of its trees the
one that measured costs make fastest.

p[l, r] is the probability that the target takes the child of rank r of a node at level l (the root's is 0), given that it took
the node. Children of one node exclude each other, so a row sums to at most 1, and a tree's expected accepted length is the sum
over its nodes of the product of p along the path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

Path = tuple[int, ...]
"""Ranks from the root down to a node."""


@dataclass(frozen=True)
class StaticTree:
    """A tree's ``paths``, one per node: level by level, parents before children, siblings by rank. ``expected_emitted`` tokens
    a round, the target's own included, at ``expected_tokens_per_s``."""

    paths: tuple[Path, ...]
    expected_emitted: float
    expected_tokens_per_s: float

    def as_lists(self) -> list[list[int]]:
        """The paths as a policy document has them."""
        return [list(path) for path in self.paths]


@dataclass(frozen=True, eq=False)
class BestTrees:
    """``accepted`` float64 [max_nodes + 1, max_depth + 1]: the most accepted tokens to expect of a tree of exactly n nodes beside
    the root and at most d levels; -inf where there is no such tree, 0 without nodes."""

    accepted: FloatArray
    _choice: tuple[npt.NDArray[np.int16], ...] = field(repr=False)

    def paths(self, nodes: int, depth: int) -> tuple[Path, ...]:
        """A tree that reaches ``accepted[nodes, depth]``. Raises ValueError where there is none."""
        rows, columns = self.accepted.shape
        if not (0 <= nodes < rows and 0 <= depth < columns) or not np.isfinite(self.accepted[nodes, depth]):
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


def best_static_tree(rank_acceptance: npt.ArrayLike, *, max_nodes: int, max_depth: int) -> BestTrees:
    """Sequoia's program for every number of nodes up to ``max_nodes`` and every depth up to ``max_depth``.

    ``rank_acceptance``: p [k], or [levels, k] by the parent's level, the last row holding below. With G_l[n] the most to expect
    below a node at level l from n descendants, and H_{l,b} the same from its first b ranks,

        H_{l,b}[n] = max(H_{l,b-1}[n], max_s H_{l,b-1}[n - s] + p[l, b-1] (1 + G_{l+1}[s - 1])),   G_l = H_{l,k}

    Sequoia's T has no first term, as its acceptance never grows with rank; measured acceptance may, and then a rank is left out.
    A node never is worth more than its parent, so with d >= n this is the n most probable nodes of all. Ties keep lower ranks.

    Raises ValueError for no ranks, numbers that are no probabilities, and limits below 1.
    """
    p = _acceptance(rank_acceptance, max_nodes, max_depth)
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
    """Of :func:`best_static_tree`'s trees with at least one node, that with the fewest seconds per token. As Sequoia, with costs
    as measured: a token takes

        (overhead_s + verify_s(nodes + 1) + sum over levels l of draft_level_s(l, width_l)) / (1 + accepted)

    where width_l counts the nodes that are expanded to make level l = 1..depth: 1 (the root) at first, then those of level l - 1
    that have children. Ties go to fewer nodes, then fewer levels. Raises ValueError as :func:`best_static_tree` does, and for
    costs that are not positive.
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


def _acceptance(rank_acceptance: npt.ArrayLike, max_nodes: int, max_depth: int) -> FloatArray:
    """p [max_depth, k], checked."""
    p = np.asarray(rank_acceptance, dtype=np.float64)
    if p.ndim not in (1, 2) or not p.size:
        raise ValueError(f"rank acceptance must be [k] or [levels, k] with at least one rank, not {list(p.shape)}")
    if not (np.isfinite(p).all() and (p >= 0).all() and (p.sum(axis=-1) <= 1 + 1e-6).all()):
        raise ValueError(
            "rank acceptance must be probabilities of children that exclude each other: at least 0, at most 1 in sum"
        )
    if max_nodes < 1 or max_depth < 1:
        raise ValueError(f"max_nodes and max_depth must be at least 1, not {max_nodes} and {max_depth}")
    p = np.atleast_2d(p)
    return p[np.minimum(np.arange(max_depth), len(p) - 1)]
