"""Replaying shortlisted drafts from full recordings: which children of a distribution a shortlist
leaves, and how far a chain then agrees with the text.

The proposal of a restricted draft is the best token of its distribution that the shortlist holds,
whatever the renormalised probabilities are. So a chain's agreement is exact at every budget: the
text's token is proposed iff it is in the shortlist and nothing better is. Stops read renormalised
probabilities; on the texts those follow from the mass that an order's budgets keep, to a rounding
and an interpolation. Filters are taken from the full distribution. Trees rank nodes of different
distributions against each other by such probabilities; they are approximate, too
(docs/shortlists.md).

What of an order (of tokens by frequency, of clusters by a router) this asks at each prefix of the
texts is read once from whole distributions and kept (:mod:`optimizer.simulate.shortlist_ranks`):
with these every budget of the order replays. Chains under a frequency order replay from the
recorded children alone, too; then a round is not known where the shortlist holds none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spectune.optimizer.simulate.chain_tables import ENDLESS
from spectune.optimizer.simulate.forest import OFF_TEXT, Forest
from spectune.optimizer.simulate.shortlist_ranks import (
    ClusterRanks,
    FrequencyRanks,
    Index,
    Ranks,
    digest,
    how_to_rank,
)
from spectune.optimizer.simulate.tree_tables import ClusterUnion, GrowthTable, ShortlistRanks
from spectune.runtime.costs import check_shortlists
from spectune.runtime.policies.document import GAMMA_LIMIT
from spectune.runtime.policies.shortlist_rule import ShortlistRule
from spectune.runtime.policies.stops import STOP_NONE, CompiledStop
from spectune.traces.errors import TraceError
from spectune.traces.schema import LatencyProfile, Trajectory, TreePanorama

Words = npt.NDArray[np.uint32]
FloatArray = npt.NDArray[np.float64]

NEVER_IN: Final = np.iinfo(np.int32).max
"""Rank of a token that no budget holds."""


@dataclass(frozen=True, eq=False)
class RankedForest:
    """The ranks of texts' prefixes over a forest, row for row: ``own`` and ``better`` int32 [nodes]
    (0 off the texts), ``open`` bool [nodes] where ``better`` is of the recorded children alone, and
    the places of prefixes among all, ``text_row`` int64 [nodes] (-1 off the texts). Of the prefixes
    ``text_code`` [T], ``mass_code`` and ``entropy_code`` [T, B]."""

    source: Ranks
    own: npt.NDArray[np.int32]
    better: npt.NDArray[np.int32]
    open: npt.NDArray[np.bool_]
    text_row: Index
    text_code: npt.NDArray[np.uint16]
    mass_code: npt.NDArray[np.uint16]
    entropy_code: npt.NDArray[np.uint16]

    def at_budget(self, codes: npt.NDArray[np.uint16], budget: int) -> FloatArray:
        """Codes [T, B] at a budget, float64 [T]: as kept, between the budgets kept linear in their
        logarithm."""
        return _between(np.log(self.source.budgets), codes, np.log(budget))


@dataclass(frozen=True, eq=False)
class RoutedForest(RankedForest):
    """:class:`ClusterRanks` over a forest: of every node ``ranks`` int32 [nodes, K], and ``union``
    for levels of trees; ``sizes`` [T, B] of the texts' prefixes."""

    source: ClusterRanks
    ranks: npt.NDArray[np.int32]
    union: ClusterUnion
    sizes: npt.NDArray[Any]

    def tokens(self, budget: int) -> FloatArray:
        """Tokens of the first ``budget`` clusters at every text prefix, float64 [T]: exact at the
        budgets kept, linear between them."""
        return _between(np.array(self.source.budgets), self.sizes, budget)


def _between(budgets: npt.NDArray[Any], columns: npt.NDArray[Any], budget: float) -> FloatArray:
    """Columns [T, B] kept at ``budgets`` [B], ascending, at another one, float64 [T]: linear
    between its neighbours, the last one's beyond it."""
    above = min(int(np.searchsorted(budgets, budget)), len(budgets) - 1)
    found = columns[:, above].astype(np.float64)
    if budget < budgets[above]:
        share = (budgets[above] - budget) / (budgets[above] - budgets[above - 1])
        found += share * (columns[:, above - 1] - found)
    return found


def join_ranks(
    forest: Forest,
    trajectories: Sequence[Trajectory],
    panoramas: Sequence[TreePanorama],
    source: Ranks,
) -> RankedForest:
    """The ranks of a forest's nodes; ``forest`` is :func:`optimizer.simulate.forest.join_trees` of
    the same arguments. Raises TraceError where they are another draft's or lack a request."""
    what, key = source.KIND.replace("_", " "), source.KEY
    if source.draft != forest.draft:
        raise TraceError(f"{what} of draft {source.draft!r} given for draft {forest.draft!r}")
    known, places, rows, offset = {name: n for n, name in enumerate(source.digests)}, [], [], 0
    for t, p in zip(trajectories, panoramas, strict=True):
        place = known.get(digest(t, p))
        if place is None:
            raise TraceError(
                f"request {t.request_id!r}: there are no {what} of it under {key} {source.fitted} "
                "(the recording has grown since); "
                + how_to_rank("ID", source.fitted, source.draft, key=key)
            )
        places.append(place)
        count = int(np.diff(source.text_offsets[place : place + 2])[0])
        row = np.full(len(p.text_slot), -1, np.int64)
        row[:count] = np.arange(count) + offset
        rows.append(row)
        offset += count
    text, text_row = (
        _rows_of(source.text_offsets, places),
        np.concatenate([np.zeros(0, np.int64), *rows]),
    )
    on = text_row >= 0
    own, better = np.zeros((2, len(text_row)), np.int32)
    own[on], better[on] = source.own[text], source.better[text]
    unsaid = np.zeros(len(text_row), np.bool_)
    shared = (
        own,
        better,
        unsaid,
        text_row,
        source.text_code[text],
        source.mass_code[text],
        source.entropy_code[text],
    )
    if isinstance(source, FrequencyRanks):
        unsaid[on] = source.open[text]
        return RankedForest(source, *shared)
    at = _rows_of(source.node_offsets, places)
    union = ClusterUnion(
        source.of[forest.tokens].astype(np.uint16),
        np.ascontiguousarray(source.order[at].astype(np.uint16)),
        np.append(np.bincount(source.of, minlength=source.clusters)[: source.clusters], 0),
    )
    ranks = np.ascontiguousarray(source.ranks[at, : forest.width].astype(np.int32))
    return RoutedForest(source, *shared, ranks, union, source.sizes[text])


def _rows_of(offsets: Index, places: Sequence[int]) -> Index:
    """The rows of requests by their places."""
    return np.concatenate(
        [np.zeros(0, np.int64), *(np.arange(*offsets[place : place + 2]) for place in places)]
    )


def shortlist_ranks(
    forest: Forest, rule: ShortlistRule, depth: int, ranked: RankedForest | None = None
) -> ShortlistRanks:
    """The ranks of a forest's children and the budgets of ``depth`` draft steps; ``ranked``: where
    a router puts them.

    Raises TraceError for an order of another vocabulary, and for a routed shortlist without ranks.
    """
    budgets = [rule.budget(step) for step in range(depth)]
    if rule.frequencies is None:
        if not isinstance(ranked, RoutedForest):
            raise TraceError(
                f"shortlist {rule.block.kind!r} of draft {forest.draft!r} follows the draft's "
                "hidden states, and there are no cluster "
                f"ranks of router {rule.block.artifact} over these texts; "
                + how_to_rank("ID", rule.block.artifact, forest.draft)
            )
        within = np.minimum(budgets, ranked.source.clusters).astype(np.int64)
        return ShortlistRanks(ranked.ranks, within, ranked.union)
    frequencies = rule.frequencies
    if forest.tokens.size and int(forest.tokens.max()) >= frequencies.vocab:
        raise TraceError(
            f"shortlist.artifact: {rule.block.artifact} orders a vocabulary of {frequencies.vocab} "
            "tokens, the recording has token "
            f"{int(forest.tokens.max())}; `fit frequencies` on a recording of this pair makes one"
        )
    ranks = frequencies.rank[forest.tokens].astype(np.int32)
    return ShortlistRanks(
        ranks, np.array([frequencies.size(budget) for budget in budgets], dtype=np.int64)
    )


def agreeing_steps(
    forest: Forest, shortlist: ShortlistRanks, ranked: RankedForest | None = None
) -> tuple[Index, Index]:
    """For every start, how many steps of a chain with a shortlist agree with the text, int64
    [positions] (at most the budgets' length); and the step, int64 [positions], at which it comes by
    a distribution of which too little is known: none of the recorded children is in the shortlist
    while the text's token may be. It counts as disagreeing there (the budgets' length: it comes by
    none). ``ranked`` were computed from whole distributions; with them there are none such, but for
    ``open`` ones.

    The forest's distributions must be functions of the prefix (``shared``).
    """
    slot = forest.text_slot.astype(np.int64)
    last = len(slot) - 1
    if ranked is not None:
        own, better = ranked.own.astype(np.int64), ranked.better.astype(np.int64)
        on_text = ranked.text_row >= 0
        known = on_text & ~ranked.open
    else:
        known = slot < forest.width
        rows = np.arange(len(slot))
        there = np.arange(forest.width) < forest.count[:, None]
        ranks = np.where(there, shortlist.ranks, NEVER_IN).astype(np.int64)
        own = np.where(known, ranks[rows, np.minimum(slot, forest.width - 1)], NEVER_IN)
        better = np.where(
            np.arange(forest.width) < np.where(known, slot, forest.width)[:, None], ranks, NEVER_IN
        ).min(axis=1)
        on_text = slot != OFF_TEXT
    steps = np.zeros(len(forest.root), dtype=np.int64)
    doubtful = np.full(len(forest.root), len(shortlist.budgets), dtype=np.int64)
    alive = np.ones(len(forest.root), dtype=np.bool_)
    for step, budget in enumerate(shortlist.budgets.tolist()):
        node = np.minimum(forest.root + step, last)
        agrees = on_text[node] & known[node] & (own[node] < budget) & (better[node] >= budget)
        doubtful[alive & ~known[node] & (better[node] >= budget) & (node < last)] = step
        alive &= agrees
        if not alive.any():
            break
        steps += alive
    return steps, doubtful


def chain_seconds(
    forest: Forest, routed: RoutedForest, rule: ShortlistRule, profile: LatencyProfile, gamma: int
) -> FloatArray:
    """What the first 0 .. ``gamma`` passes of chains over a routed shortlist take more than with
    the whole head, seconds float64 [positions, gamma + 1].

    While a chain is on the text its nodes are recorded, and so are their shortlists' sizes; a pass
    after it left the text is charged the mean over the text. Raises PolicyError when the profile
    has no costs of the draft's shortlists.
    """
    steps, _ = agreeing_steps(forest, shortlist_ranks(forest, rule, gamma, routed), routed)
    row, last = routed.text_row[forest.root], len(routed.sizes) - 1
    priced = _prices(profile, rule, routed)
    by_budget = {k: priced(routed.tokens(k)) for k in {rule.budget(t) for t in range(gamma)}}
    more = np.zeros((len(row), gamma + 1))
    for t in range(gamma):
        seconds = by_budget[rule.budget(t)]
        more[:, t + 1] = more[:, t] + np.where(
            t <= steps, seconds[np.minimum(row + t, last)], seconds.mean()
        )
    return more


def tree_seconds(
    growth: GrowthTable, routed: RoutedForest, rule: ShortlistRule, profile: LatencyProfile
) -> FloatArray:
    """:func:`chain_seconds` of trees, by the sizes of each level's union, [positions, depth +
    1]."""
    more = np.zeros((len(growth.size), growth.depth + 1))
    np.cumsum(
        _prices(profile, rule, routed)(growth.size.astype(np.float64)), axis=1, out=more[:, 1:]
    )
    return more


def _prices(
    profile: LatencyProfile, rule: ShortlistRule, routed: RoutedForest
) -> Callable[[FloatArray], FloatArray]:
    """Seconds of a pass over routed shortlists of so many tokens more than with the whole head (a
    line between measured sizes)."""
    check_shortlists(profile, rule.draft)
    return lambda tokens: profile.shortlist_seconds(rule.draft, tokens, routed=True)


def restricted(
    words: Words,
    forest: Forest,
    shortlist: ShortlistRanks,
    stop: CompiledStop,
    ranked: RankedForest | None = None,
) -> tuple[Words, Index]:
    """The packed outcomes of a full draft's chains
    (:func:`optimizer.simulate.chain_tables.tabulate`) with what a shortlist leaves of their
    agreement, and the step from which that is not known (:func:`agreeing_steps`). With ``ranked``,
    chains that a stop ends on the text end where the restricted distributions say; what the stop
    reads off the text is the whole draft's. Raises TraceError for a draft whose distributions
    depend on where a round began."""
    if not forest.shared:
        raise TraceError(f"chains of draft {forest.draft!r} are replayed as trees")
    steps, doubtful = agreeing_steps(forest, shortlist, ranked)
    made: Words = (words & np.uint32(0xFFFFFF00)) | np.minimum(steps, GAMMA_LIMIT).astype(np.uint32)
    if ranked is not None and stop.kind != STOP_NONE:
        made = _stopped(made, forest, shortlist, stop, ranked, steps)
    return made, doubtful


def _stopped(
    words: Words,
    forest: Forest,
    shortlist: ShortlistRanks,
    stop: CompiledStop,
    ranked: RankedForest,
    steps: Index,
) -> Words:
    """Outcomes with the ends of chains (``cap`` and passes) as a stop sets them that reads the
    restricted distributions, for the first ``steps`` of each start, which are on the text: there
    the proposal is the text's token, and -log q_S is its -log q less that of the mass kept. A chain
    that no stop ended by then goes on for a token at least."""
    cap, passes = ((words >> np.uint32(shift)) & np.uint32(255) for shift in (8, 16))
    cap, passes = np.maximum(cap, steps + 1), np.maximum(passes, steps + 1)
    last = len(ranked.text_code) - 1
    joint, open_ = np.zeros(len(steps)), np.ones(len(steps), np.bool_)
    codes: dict[int, tuple[FloatArray, FloatArray]] = {}
    for step, budget in enumerate(shortlist.budgets.tolist()):
        open_ &= step < steps
        if not open_.any():
            break
        if budget not in codes:
            own = np.maximum(
                0.0, np.rint(ranked.text_code - ranked.at_budget(ranked.mass_code, budget))
            )
            codes[budget] = own, np.rint(ranked.at_budget(ranked.entropy_code, budget))
        row = np.minimum(ranked.text_row[forest.root] + step, last)
        own, entropy = (found[row] for found in codes[budget])
        joint += own
        ends = open_ & (
            (own > stop.max_logp_code)
            | (joint > stop.max_joint_code)
            | (entropy > stop.max_entropy_code)
        )
        cap[ends], passes[ends] = step + stop.keep_last, step + 1
        open_ &= ~ends
    cap, passes = (np.minimum(found, ENDLESS).astype(np.uint32) for found in (cap, passes))
    made: Words = (
        (words & np.uint32(0xFF0000FF)) | (cap << np.uint32(8)) | (passes << np.uint32(16))
    )
    return made
