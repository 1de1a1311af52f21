"""From recorded trees to what is fitted: rounds for the entropy bins, nodes for the classifier, laws for the score, acceptance by rank for
static trees.

Every start of a text that was recorded is a round that might have begun there, so a recording holds as many rounds as tokens, whatever
policy decoded it. Their trees are grown by the functions that decode with them (:mod:`optimizer.tree_outcomes`), EAGLE-2's growth with its
default score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from optimizer.fit.c2t import Examples
from optimizer.fit.score import ScoreLaws
from optimizer.replay import ReplayTrace
from optimizer.tree_outcomes import Forest, tabulate_growth
from optimizer.tree_tabulation import ABSENT, NEVER
from runtime.policies.document import parse_policy
from runtime.policies.tree_rules import compile_tree
from runtime.policies.trees import Growing, TreeRule
from traces.errors import TraceError
from traces.schema import TREE_SCALE, Proposals

Index = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Called with (starts grown, of how many)."""

CHUNK: Final = 512
"""Starts grown together."""
MIN_PARENTS: Final = 200
"""Nodes on the text that a level needs for figures of its own; deeper levels are taken to be like the last that has them."""


@dataclass(frozen=True, eq=False)
class RecordedTrees:
    """One draft's trees over the requests replayed in a trace. ``starts`` int64 [n]: the positions that begin a round there;
    ``left`` int64 [positions]: levels that a tree could have and whose text is known: tokens to the end of the text, and to that of
    the budget."""

    forest: Forest
    proposals: Proposals
    starts: Index
    left: Index
    sampled: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, trace: ReplayTrace, draft: str, proposals: Proposals = "coupled") -> RecordedTrees:
        """Those of a trace's requests. Raises TraceError when it has no trees of the draft."""
        forest = trace.forests.get((draft, proposals))
        if forest is None:
            known = ", ".join(sorted(d for d, p in trace.forests if p == proposals)) or "none"
            raise TraceError(f"the recording has no trees of draft {draft!r} (it has: {known})")
        lengths = np.diff(trace.offsets)
        ends = np.repeat(trace.offsets[1:], lengths)
        left = np.minimum(ends - np.arange(len(ends)), forest.limit)
        starts = np.concatenate([np.arange(trace.offsets[r], trace.offsets[r + 1]) for r in sorted(trace.order.tolist())])
        return cls(forest, proposals, starts.astype(np.int64), left, np.repeat(trace.sampled > 0, lengths))

    def pick(self, least: int, count: int, seed: int) -> Index:
        """At most ``count`` starts with at least ``least`` levels, chosen by ``seed``, ascending. Raises TraceError when there is none."""
        fitting = self.starts[self.left[self.starts] >= least]
        if not len(fitting):
            raise TraceError(f"no text of the recording goes on for {least} tokens; record longer ones, or fit a smaller depth")
        if len(fitting) > count:
            fitting = np.sort(np.random.default_rng(seed).choice(fitting, count, replace=False))
        return fitting

    def rules(self, width: int, depth: int) -> tuple[TreeRule, TreeRule]:
        """EAGLE-2's growth at temperature 0 and above. Raises TraceError when wider or deeper trees than recorded are asked for."""
        for what, flag, asked, held in (
            ("children of a node", "--tree-width", width, self.forest.width),
            ("levels", "--tree-depth", depth, self.forest.depth),
        ):
            if not 1 <= asked <= held:
                raise TraceError(
                    f"{asked} {what} are asked for, the recording holds {held}: `record --resume ID {flag} {asked}` makes more"
                )
        growth = {"kind": "top_k", "width": width, "proposals": self.proposals}
        policy = parse_policy({"draft": self.forest.draft, "growth": growth, "window": {"kind": "fixed", "gamma": depth}})
        return compile_tree(policy, sampled=False), compile_tree(policy, sampled=True)


@dataclass(frozen=True, eq=False)
class Rounds:
    """What rounds of one depth and one N did, [n] each: ``phi`` int64 in 1/16 nat (HeteroSpec, equation 1); ``tcr`` int64, the Terminal
    Confidence Rank: the rank from 1, among the N nodes kept, of the deepest one accepted, 0 where none was; ``fully_accepted`` bool."""

    phi: Index
    tcr: Index
    fully_accepted: npt.NDArray[np.bool_]


def bin_rounds(
    trees: RecordedTrees,
    *,
    width: int,
    depth: int,
    top_n: int,
    count: int,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> Rounds:
    """The rounds of at most ``count`` starts under EAGLE-2's growth. Starts whose text ends within ``depth`` tokens are left out: what
    they would have accepted is not known. Raises TraceError when too little was recorded."""
    rules = trees.rules(width, depth)
    starts = trees.pick(depth, count, seed)
    found: list[tuple[npt.NDArray[np.generic], ...]] = []
    for at in range(0, len(starts), CHUNK):
        some = starts[at : at + CHUNK]
        part = replace(trees.forest, root=trees.forest.root[some], limit=trees.forest.limit[some])
        hot = trees.sampled[some]
        table = tabulate_growth(part, [(rules[0], np.flatnonzero(~hot)), (rules[1], np.flatnonzero(hot))], depth)
        ranks = table.rank[:, depth - 1, :].astype(np.int64)
        kept = np.logical_and.accumulate((ranks != ABSENT) & (ranks < top_n), axis=1)
        accepted = kept.sum(1)
        deepest = np.take_along_axis(ranks, np.maximum(accepted - 1, 0)[:, None], 1)[:, 0]
        known = (table.missing == NEVER) | (table.missing > depth)
        columns = (table.phi[:, depth - 1].astype(np.int64), np.where(accepted > 0, deepest + 1, 0), accepted == depth)
        found.append(tuple(c[known] for c in columns))
        progress(at + len(some), len(starts))
    phi, tcr, full = (np.concatenate(column) for column in zip(*found, strict=True))
    return Rounds(phi.astype(np.int64), tcr.astype(np.int64), full.astype(np.bool_))


def classifier_examples(
    trees: RecordedTrees,
    *,
    width: int,
    depth: int,
    count: int,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> Examples:
    """C2T's training data (section 4.2) of at most ``count`` starts: every node of their EAGLE-2 trees, all children of expanded nodes,
    as far as the text goes on. A node is accepted if it lies on the text; ``tree`` is its start. Raises TraceError when too little
    was recorded."""
    rules = trees.rules(width, depth)
    starts = trees.pick(1, count, seed)
    found: list[tuple[npt.NDArray[np.generic], ...]] = []
    done = 0
    for hot, rule in enumerate(rules):
        chosen = starts[trees.sampled[starts] == bool(hot)]
        for at in range(0, len(chosen), CHUNK):
            some = chosen[at : at + CHUNK]
            for level, exists, joint, entropy, accepted in _grown(trees.forest, rule, some, depth):
                take = exists & (trees.left[some] >= level)[:, None]
                tree = np.broadcast_to(some[:, None], take.shape)[take]
                found.append((joint[take], entropy[take], np.full(len(tree), level), accepted[take], tree))
            done += len(some)
            progress(done, len(starts))
    joint, entropy, levels, accepted, tree = (np.concatenate(column) for column in zip(*found, strict=True))
    return Examples(
        joint.astype(np.int32),
        entropy.astype(np.int32),
        levels.astype(np.int32),
        accepted.astype(np.bool_),
        tree.astype(np.int64),
    )


_Grown = tuple[int, npt.NDArray[np.bool_], Index, Index, npt.NDArray[np.bool_]]


def _grown(forest: Forest, rule: TreeRule, starts: Index, depth: int) -> Iterator[_Grown]:
    """Of each level and its places, arrays [starts, places]: (level, exists, -log of the product of q, entropy of the law it was drawn
    from, is on the text); codes in 1/16 nat."""
    growing = Growing(rule, len(starts), torch.device("cpu"))
    front = forest.root[starts][:, None]
    on = forest.root[starts].copy()  # the node on the text, -1 once it is lost
    rows = np.arange(len(starts))
    for level in range(1, depth + 1):
        laws = forest.laws(front)
        added = growing.add(laws)
        shape = added.cost.shape
        parent = np.broadcast_to(added.parent.numpy(), shape)
        hit = (front == on[:, None]) & (on >= 0)[:, None]
        slot = forest.text_slot[np.maximum(on, 0)]
        found = hit.any(1) & (slot < rule.width)
        accepted = np.zeros(shape, dtype=np.bool_)
        accepted[rows[found], (hit.argmax(1) * rule.width + slot)[found]] = True
        exists = np.broadcast_to(added.eligible.numpy(), shape)
        yield level, exists, added.q_cost.numpy(), np.take_along_axis(laws.entropy.numpy(), parent, 1), accepted & exists
        on = np.where(found, forest.child[np.maximum(on, 0), np.minimum(slot, forest.width - 1)], -1).astype(np.int64)
        index, there = added.frontier.index.numpy(), added.frontier.exists.numpy()
        above = np.take_along_axis(front, np.take_along_axis(parent, index, 1), 1)
        rank = np.take_along_axis(np.broadcast_to(added.rank.numpy(), shape), index, 1)
        front = np.where(there & (above >= 0), forest.child[np.maximum(above, 0), rank], -1).astype(np.int64)


def child_probabilities(logp: npt.NDArray[np.uint8], count: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """q of each child [n, k] from codes that were rounded down: the middle of the code's interval, 0 for children that do not exist.

    A code of 0 says only that q is above exp(-1/16) = 0.94; there it is what the other recorded children leave, at least that.
    """
    exists = np.arange(logp.shape[1]) < count[:, None]
    q: npt.NDArray[np.float64] = np.where(exists & (logp > 0), np.exp(-(logp + 0.5) / TREE_SCALE), 0.0)
    first = exists & (logp == 0)
    return np.where(first, np.maximum(1.0 - q.sum(1, keepdims=True), np.exp(-1 / TREE_SCALE)), q)


def score_laws(trees: RecordedTrees, *, width: int, depth: int, count: int, seed: int = 0) -> ScoreLaws:
    """The laws whose parent is on the text, so that the child to be taken is known, of at most ``count`` starts: of a draft model one a
    start, since what it reads deeper is what later starts begin with; of a head those of ``depth`` levels, as far as the recorded children
    led along the text. Raises TraceError when too little was recorded."""
    trees.rules(width, depth)
    forest, starts = trees.forest, trees.pick(1, count, seed)
    on, begun = forest.root[starts], starts
    nodes, begins = [], []
    for level in range(1, 2 if forest.shared else depth + 1):
        alive = (on >= 0) & (trees.left[begun] >= level)
        on, begun = on[alive], begun[alive]
        nodes.append(on)
        begins.append(begun)
        slot = forest.text_slot[on].astype(np.int64)
        on = np.where(slot < forest.width, forest.child[on, np.minimum(slot, forest.width - 1)], -1).astype(np.int64)
    at = np.concatenate(nodes)
    there = np.minimum(forest.count[at], width).astype(np.int64)
    slot = forest.text_slot[at].astype(np.int64)
    return ScoreLaws(
        gap=forest.gap[at, :width].astype(np.int64),
        q=child_probabilities(forest.logp[at], forest.count[at])[:, :width],
        count=there,
        taken=np.where(slot < there, slot, -1),
        start=np.concatenate(begins),
    )


@dataclass(frozen=True, eq=False)
class RankAcceptance:
    """``chance`` float64 [levels, k]: P(the child of a rank is the text's token | its parent, at that level, is on the text), the root's
    level first. ``parents`` int64 [levels]: how many nodes each row counts."""

    chance: FloatArray
    parents: Index


def rank_acceptance(trees: RecordedTrees, depth: int, *, least: int = MIN_PARENTS) -> RankAcceptance:
    """Acceptance by level and rank over all starts (Sequoia, section 3.1, there by rank alone), for at most ``depth`` levels and only as
    deep as ``least`` parents go. A row is of the parents that the recorded children led to: those that a wide enough tree would have
    accepted."""
    forest = trees.forest
    on, left = forest.root[trees.starts], trees.left[trees.starts]
    chance: list[FloatArray] = []
    parents: list[int] = []
    for level in range(1, depth + 1):
        alive = (on >= 0) & (left >= level)
        on, left = on[alive], left[alive]
        if len(on) < (least if chance else 1):
            break
        slot = forest.text_slot[on].astype(np.int64)
        chance.append(np.bincount(slot, minlength=256)[: forest.width] / len(on))
        parents.append(len(on))
        on = np.where(slot < forest.width, forest.child[on, np.minimum(slot, forest.width - 1)], -1).astype(np.int64)
    if not chance:
        raise TraceError("no text of the recording goes on for a token under a budget that allows drafting; record longer ones")
    return RankAcceptance(np.stack(chance), np.array(parents, dtype=np.int64))
