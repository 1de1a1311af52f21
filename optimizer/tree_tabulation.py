"""Top-k trees and chains of every start in one compiled loop: what :func:`optimizer.tree_outcomes.tabulate_growth` keeps of them.

A level is grown by the function that grows it in the runtime on a CPU (``grow_plainly`` in :mod:`runtime.policies.trees`); what is read off
a level is what :class:`runtime.policies.trees.Growing` says of it, without tensors in between.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

import runtime.policies.trees as trees
from runtime.policies.jit import compiled
from runtime.policies.trees import INFINITE, grow_plainly

Index = npt.NDArray[np.int64]

ABSENT: Final = 65535
"""Rank of a node that is not among the candidates."""
NEVER: Final = 255
"""Level of something that does not happen."""


@compiled(trees)
def tabulate_plainly(
    starts: Index,
    root: Index,
    limit: Index,
    child: npt.NDArray[np.int32],
    text_slot: npt.NDArray[np.uint8],
    codes: npt.NDArray[np.uint8],
    logp: npt.NDArray[np.uint8],
    entropy: npt.NDArray[np.uint8],
    top_entropy: npt.NDArray[np.uint8],
    count: npt.NDArray[np.uint8],
    k: int,
    frontier: int,
    depth: int,
    coupled: bool,
    weights: Index,
    logs: npt.NDArray[np.float64],
    ranks: npt.NDArray[np.int32],
    budgets: Index,
    cluster: npt.NDArray[np.uint16],
    order: npt.NDArray[np.uint16],
    sizes: Index,
    added: Index,
    law: Index,
    slots: Index,
    lines: Index,
    cost: Index,
    q_cost: Index,
    of_level: Index,
    rank: npt.NDArray[np.uint16],
    pool: npt.NDArray[np.uint16],
    width: npt.NDArray[np.uint8],
    read: npt.NDArray[np.bool_],
    phi: npt.NDArray[np.uint16],
    best: npt.NDArray[np.uint16],
    missing: npt.NDArray[np.uint8],
    size: npt.NDArray[np.int32],
) -> None:
    """Fills the rows ``starts`` of a growth table (:class:`optimizer.tree_outcomes.GrowthTable`) from a forest's columns.

    ``codes``: the children's gaps if ``coupled``, else their logp. Under a shortlist a level's laws hold those children alone whose
    ``ranks`` int32 [nodes, K] lie below the level's of ``budgets`` [depth] (else ``budgets`` is empty), or whose cluster the level's nodes
    add (:class:`optimizer.tree_outcomes.ClusterUnion`; else ``order`` is empty). Scratch int64: ``added`` [M + 1], zeros, ``law`` and
    ``slots`` [1, F, k], ``lines`` [8, F], ``cost`` [depth, F * k], ``q_cost`` [F * k], ``of_level`` [3, depth].
    """
    there, above, index, costs = lines[0:1], lines[1:2], lines[2:3], lines[3:4]
    front, above_q, above_phi, law_phi = lines[4], lines[5], lines[6], lines[7]
    places_of, on_place, on_cost = of_level[0], of_level[1], of_level[2]
    shortlist, reach = len(budgets), order.shape[1]
    whole = sizes.sum()
    for i in range(starts.shape[0]):
        s = starts[i]
        front[0], above[0, 0], above_q[0], above_phi[0] = root[s], 0, 0, 0
        on, n, candidates, miss = root[s], 1, 0, NEVER
        for level in range(depth):
            likeliest, chosen = np.int64(INFINITE), np.int64(0)
            hit = -1
            stamp, tokens = i * depth + level + 1, np.int64(0)  # marks the clusters in this level's union
            if reach > 0:
                for f in range(n):
                    for c in range(min(budgets[level], reach) if front[f] >= 0 else 0):
                        if added[order[front[f], c]] != stamp:
                            added[order[front[f], c]] = stamp
                            tokens += sizes[order[front[f], c]]
                size[s, level] = min(tokens * max(budgets[level], reach) // reach, whole)
            for f in range(n):
                node = max(front[f], 0)
                exists = above[0, f] < INFINITE
                there[0, f] = 0
                law_phi[f] = above_phi[f] + top_entropy[node]
                if front[f] >= 0:
                    for j in range(min(count[node], k) if shortlist == 0 else count[node]):
                        if shortlist > 0 and ranks[node, j] >= budgets[level] and (reach == 0 or added[cluster[node, j]] != stamp):
                            continue
                        m = there[0, f]
                        slots[0, f, m] = j
                        law[0, f, m] = codes[node, j]
                        if coupled and shortlist > 0:
                            law[0, f, m] -= codes[node, slots[0, f, 0]]
                        if exists and logp[node, j] < likeliest:
                            likeliest, chosen = np.int64(logp[node, j]), np.int64(f)
                        there[0, f] = m + 1
                        if m + 1 == k:
                            break
                if hit < 0 and on >= 0 and front[f] == on:
                    hit = f
            phi[s, level] = min(law_phi[chosen], 65535)
            places, kept = n * k, min(frontier, n * k)
            grow_plainly(
                law[:, :n],
                there[:, :n],
                coupled,
                weights,
                logs,
                above[:, :n],
                cost[level : level + 1, :places],
                index[:, :kept],
                costs[:, :kept],
            )
            for place in range(places):
                candidates += cost[level, place] < INFINITE
            places_of[level] = places
            pool[s, level] = min(candidates, 65535)
            for f in range(n):
                node = max(front[f], 0)
                for j in range(k):
                    if j >= there[0, f]:
                        q_cost[f * k + j] = INFINITE
                    elif coupled:
                        q_cost[f * k + j] = above_q[f] + logp[node, slots[0, f, j]]
                    else:
                        q_cost[f * k + j] = cost[level, f * k + j]
            slot = np.int64(text_slot[max(on, 0)])
            on_place[level] = -1
            if hit >= 0:
                for j in range(there[0, hit]):
                    if slots[0, hit, j] == slot and cost[level, hit * k + j] < INFINITE:
                        on_place[level] = hit * k + j
                        on_cost[level] = cost[level, hit * k + j]
            on = np.int64(child[on, slot]) if on_place[level] >= 0 else np.int64(-1)
            if costs[0, 0] < INFINITE:
                node = max(front[index[0, 0] // k], 0)
                best[s, level, 0] = logp[node, slots[0, index[0, 0] // k, index[0, 0] % k]]
                best[s, level, 1] = min(q_cost[index[0, 0]], 65535)
                best[s, level, 2] = entropy[node]
            else:
                best[s, level, 0] = best[s, level, 1] = best[s, level, 2] = 0
            # The next frontier, its numbers in the places of the laws that are done with.
            found, lost, on_text = 0, False, False
            for f in range(kept):
                parent, j = index[0, f] // k, index[0, f] % k
                law[0, f, 0] = -1
                if costs[0, f] < INFINITE:
                    found += 1
                    on_text |= index[0, f] == on_place[level]
                    if front[parent] >= 0:
                        law[0, f, 0] = child[front[parent], slots[0, parent, j]]
                    lost |= law[0, f, 0] < 0
                there[0, f] = law_phi[parent]
            for f in range(kept):
                front[f], above[0, f] = law[0, f, 0], costs[0, f]
                above_q[f], above_phi[f] = q_cost[index[0, f]], there[0, f]
            width[s, level], read[s, level] = found, on_text
            if lost and miss == NEVER and limit[s] > level + 1:
                miss = level + 2
            n = kept
        missing[s] = miss
        for level in range(depth):
            if on_place[level] < 0:
                continue
            before = 0
            for other in range(depth):
                # Equally cheap ones go by creation order.
                ties = places_of[other] if other < level else (on_place[level] if other == level else 0)
                for place in range(places_of[other]):
                    c = cost[other, place]
                    before += c < on_cost[level] or (c == on_cost[level] and place < ties)
                if other >= level:
                    rank[s, other, level] = min(before, ABSENT - 1)


def scratch(k: int, frontier: int, depth: int) -> tuple[Index, Index, Index, Index, Index, Index]:
    """Working memory for :func:`tabulate_plainly`: ``law``, ``slots``, ``lines``, ``cost``, ``q_cost``, ``of_level``."""
    widest = max(1, frontier)

    def zeros(*size: int) -> Index:
        return np.zeros(size, dtype=np.int64)

    return (
        zeros(1, widest, k),
        zeros(1, widest, k),
        zeros(8, widest),
        zeros(depth, widest * k),
        zeros(widest * k),
        zeros(3, depth),
    )
