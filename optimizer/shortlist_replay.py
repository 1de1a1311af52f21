"""Replaying shortlisted drafts from full recordings: which children of a law a shortlist leaves, and how far a chain then agrees with
the text.

The proposal of a restricted draft is the best token of its law that the shortlist holds, whatever the renormalised probabilities are. So
a chain's agreement is exact at every budget: the text's token is proposed iff it is in the shortlist and nothing better is. Stops read
renormalised probabilities, which were not recorded; they are taken from the full law. Trees rank nodes of different laws against each
other by such probabilities, so they are approximate, too (docs/shortlists.md).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from optimizer.tree_outcomes import OFF_TEXT, Forest, ShortlistRanks
from runtime.policies.document import GAMMA_LIMIT
from runtime.shortlists import ShortlistRule
from traces.errors import TraceError

Index = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

NEVER_IN: Final = np.iinfo(np.int32).max
"""Rank of a token that no budget holds."""


def shortlist_ranks(forest: Forest, rule: ShortlistRule, depth: int) -> ShortlistRanks:
    """The ranks of a forest's children and the budgets of ``depth`` draft steps.

    Raises TraceError for a routed shortlist, whose clusters depend on hidden states that a recording does not hold.
    """
    if rule.frequencies is None:
        raise TraceError(
            f"shortlist {rule.block.kind!r} of draft {forest.draft!r} follows the draft's hidden states, which recordings do not hold: "
            "execute such policies (`run`); frequency shortlists replay"
        )
    frequencies = rule.frequencies
    if forest.tokens.size and int(forest.tokens.max()) >= frequencies.vocab:
        raise TraceError(
            f"shortlist.artifact: {rule.block.artifact} orders a vocabulary of {frequencies.vocab} tokens, the recording has token "
            f"{int(forest.tokens.max())}; `fit frequencies` on a recording of this pair makes one"
        )
    ranks = frequencies.rank[forest.tokens].astype(np.int32)
    budgets = np.array([frequencies.size(rule.budget(step)) for step in range(depth)], dtype=np.int64)
    return ShortlistRanks(ranks, budgets)


def agreeing_steps(forest: Forest, shortlist: ShortlistRanks) -> tuple[Index, Index]:
    """For every start, how many steps of a chain with a shortlist agree with the text, int64 [positions] (at most the budgets'
    length); and which starts come by a law none of whose recorded children is in the shortlist while the text's token may be (bool
    [positions]): those count as disagreeing there.

    The forest's laws must be functions of the prefix (``shared``).
    """
    slot = forest.text_slot.astype(np.int64)
    known = slot < forest.width
    rows = np.arange(len(slot))
    there = np.arange(forest.width) < forest.count[:, None]
    ranks = np.where(there, shortlist.ranks, NEVER_IN).astype(np.int64)
    own = np.where(known, ranks[rows, np.minimum(slot, forest.width - 1)], NEVER_IN)
    better = np.where(np.arange(forest.width) < np.where(known, slot, forest.width)[:, None], ranks, NEVER_IN).min(axis=1)
    on_text = slot != OFF_TEXT
    last = len(slot) - 1
    steps = np.zeros(len(forest.root), dtype=np.int64)
    doubtful = np.zeros(len(forest.root), dtype=np.bool_)
    alive = np.ones(len(forest.root), dtype=np.bool_)
    for step, budget in enumerate(shortlist.budgets.tolist()):
        node = np.minimum(forest.root + step, last)
        agrees = on_text[node] & (own[node] < budget) & (better[node] >= budget)
        doubtful |= alive & ~known[node] & (better[node] >= budget) & (node < last)
        alive &= agrees
        if not alive.any():
            break
        steps += alive
    return steps, doubtful.astype(np.int64)


def restricted(words: Words, forest: Forest, shortlist: ShortlistRanks) -> Words:
    """The packed outcomes of a full draft's chains (:func:`optimizer.outcomes.tabulate`) with what a shortlist leaves of their
    agreement. Raises TraceError for a draft whose laws depend on where a round began."""
    if not forest.shared:
        raise TraceError(f"chains of draft {forest.draft!r} are replayed as trees")
    steps, _ = agreeing_steps(forest, shortlist)
    made: Words = (words & np.uint32(0xFFFFFF00)) | np.minimum(steps, GAMMA_LIMIT).astype(np.uint32)
    return made
