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

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.optimizer.simulate.chain_tables import ENDLESS, Words
from spectune.optimizer.simulate.forest import Forest
from spectune.optimizer.simulate.shortlist_ranks import (
    ClusterRanks,
    FrequencyRanks,
    Index,
    Ranks,
    digest,
    how_to_rank,
)
from spectune.optimizer.simulate.tree_tables import ClusterUnion, GrowthTable, ShortlistRanks
from spectune.runtime.policies.document import GAMMA_LIMIT
from spectune.runtime.policies.rules import ShortlistRule
from spectune.runtime.policies.stops import CompiledStop
from spectune.traces.errors import TraceError
from spectune.traces.tables import LatencyProfile, Panorama, Trajectory

FloatArray = npt.NDArray[np.float64]

NEVER_IN: Final = np.iinfo(np.int32).max
"""Rank of a token that no budget holds."""


class RankedForest(NamedTuple):
    """Ranks over a forest: ``row`` int64 [positions] is the text prefix of each start among those
    of ``source``, ``children`` its nodes' where a router ranks them (at all budgets)."""

    source: Ranks
    row: Index
    children: ShortlistRanks | None


def join_ranks(
    forest: Forest,
    trajectories: Sequence[Trajectory],
    panoramas: Sequence[Panorama],
    source: Ranks,
) -> RankedForest:
    """The ranks of a forest's nodes; ``forest`` is :func:`optimizer.simulate.forest.join_trees` of
    the same arguments. Raises TraceError where they lack a request."""
    what, key = source.KIND.replace("_", " "), source.KEY
    known, places = {name: n for n, name in enumerate(source.digests)}, []
    for t, p in zip(trajectories, panoramas, strict=True):
        place = known.get(digest(t, p))
        if place is None:
            raise TraceError(
                f"request {t.request_id!r}: there are no {what} of it under {key} {source.fitted} "
                "(the recording has grown since); "
                + how_to_rank("ID", source.fitted, source.draft, key)
            )
        places.append(place)
    begins = source.text_offsets[places]
    row = _runs(begins, begins + np.array([len(t.output_ids) for t in trajectories], np.int64))
    if not isinstance(source, ClusterRanks):
        return RankedForest(source, row, None)
    at = _runs(source.node_offsets[places], source.node_offsets[np.array(places, np.int64) + 1])
    union = ClusterUnion(
        source.of[forest.tokens].astype(np.uint16),
        np.ascontiguousarray(source.order[at].astype(np.uint16)),
        np.append(np.bincount(source.of, minlength=source.clusters)[: source.clusters], 0),
    )
    ranks = np.ascontiguousarray(source.ranks[at, : forest.width].astype(np.int32))
    return RankedForest(source, row, ShortlistRanks(ranks, np.array([source.clusters]), union))


def _runs(begins: Index, ends: Index) -> Index:
    """The numbers from each begin up to its end, after one another."""
    runs = (np.arange(begin, end) for begin, end in zip(begins, ends, strict=True))
    return np.concatenate([np.zeros(0, np.int64), *runs])


def shortlist_ranks(
    forest: Forest, rule: ShortlistRule, depth: int, ranked: RankedForest | None = None
) -> ShortlistRanks:
    """The ranks of a forest's children and the budgets of ``depth`` draft steps; ``ranked``: where
    a router puts them.

    Raises TraceError for an order of another vocabulary, and for a routed shortlist without ranks.
    """
    budgets = [rule.budget(step) for step in range(depth)]
    if rule.frequencies is None:
        if ranked is None or ranked.children is None:
            raise TraceError(
                f"shortlist {rule.block.kind!r} of draft {forest.draft!r} follows the draft's "
                f"hidden states, and there are no cluster ranks of router {rule.block.artifact} "
                f"over these texts; {how_to_rank('ID', rule.block.artifact, forest.draft)}"
            )
        every = ranked.children.budgets[0]
        return ranked.children._replace(budgets=np.minimum(budgets, every).astype(np.int64))
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
    if ranked is not None:
        source, first = ranked.source, ranked.row
        own, better = source.own.astype(np.int64), source.better.astype(np.int64)
        known = ~source.open if isinstance(source, FrequencyRanks) else np.ones(len(own), np.bool_)
    else:
        first, slot = forest.root, forest.text_slot.astype(np.int64)
        known, column = slot < forest.width, np.arange(forest.width)
        there = column < forest.count[:, None]
        ranks = np.where(there, shortlist.ranks, NEVER_IN).astype(np.int64)
        at = np.minimum(slot, forest.width - 1)
        own = np.where(known, np.take_along_axis(ranks, at[:, None], 1)[:, 0], NEVER_IN)
        before = column < np.where(known, slot, forest.width)[:, None]
        better = np.where(before, ranks, NEVER_IN).min(axis=1)
    last = len(own) - 1
    steps = np.zeros(len(first), dtype=np.int64)
    doubtful = np.full(len(first), len(shortlist.budgets), dtype=np.int64)
    alive = np.ones(len(first), dtype=np.bool_)
    for step, budget in enumerate(shortlist.budgets.tolist()):
        at = np.minimum(first + step, last)
        unbeaten = better[at] >= budget
        doubtful[alive & ~known[at] & unbeaten & (at < last)] = step
        alive &= known[at] & (own[at] < budget) & unbeaten
        if not alive.any():
            break
        steps += alive
    return steps, doubtful


def chain_seconds(
    forest: Forest, ranked: RankedForest, rule: ShortlistRule, profile: LatencyProfile, gamma: int
) -> FloatArray:
    """What the first 0 .. ``gamma`` passes of chains over a routed shortlist take more than with
    the whole head, seconds float64 [positions, gamma + 1].

    While a chain is on the text its nodes are recorded, and so are their shortlists' sizes; a pass
    after it left the text is charged the mean over all texts that were ranked. Raises PolicyError
    when the profile has no costs of the draft's shortlists.
    """
    assert isinstance(ranked.source, ClusterRanks)
    steps, _ = agreeing_steps(forest, shortlist_ranks(forest, rule, gamma, ranked), ranked)
    by_budget = {
        k: _pass_seconds(profile, rule, ranked.source.tokens(k))
        for k in {rule.budget(t) for t in range(gamma)}
    }
    more, last = np.zeros((len(steps), gamma + 1)), len(ranked.source.sizes) - 1
    for t in range(gamma):
        seconds = by_budget[rule.budget(t)]
        on_text = seconds[np.minimum(ranked.row + t, last)]
        more[:, t + 1] = more[:, t] + np.where(t <= steps, on_text, seconds.mean())
    return more


def tree_seconds(growth: GrowthTable, rule: ShortlistRule, profile: LatencyProfile) -> FloatArray:
    """:func:`chain_seconds` of trees, by the sizes of each level's union, [positions, depth +
    1]."""
    seconds = _pass_seconds(profile, rule, growth.size.astype(np.float64))
    return np.pad(np.cumsum(seconds, axis=1), ((0, 0), (1, 0)))


def _pass_seconds(profile: LatencyProfile, rule: ShortlistRule, tokens: FloatArray) -> FloatArray:
    """Seconds of a pass over routed shortlists of so many tokens more than with the whole head (a
    line between measured sizes)."""
    return profile.shortlist_seconds(rule.draft, tokens, routed=True)


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
    if ranked is not None and stop.active:
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
    source, last = ranked.source, len(ranked.source.text_code) - 1
    joint, open_ = np.zeros(len(steps)), np.ones(len(steps), np.bool_)
    codes: dict[int, tuple[FloatArray, FloatArray]] = {}
    for step, budget in enumerate(shortlist.budgets.tolist()):
        open_ &= step < steps
        if not open_.any():
            break
        if budget not in codes:
            own = np.rint(source.text_code - source.at_budget(source.mass_code, budget))
            entropy = np.rint(source.at_budget(source.entropy_code, budget))
            codes[budget] = np.maximum(0.0, own), entropy
        row = np.minimum(ranked.row + step, last)
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
