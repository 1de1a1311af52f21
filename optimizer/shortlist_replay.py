"""Replaying shortlisted drafts from full recordings: which children of a law a shortlist leaves, and how far a chain then agrees with
the text.

The proposal of a restricted draft is the best token of its law that the shortlist holds, whatever the renormalised probabilities are. So
a chain's agreement is exact at every budget: the text's token is proposed iff it is in the shortlist and nothing better is. Stops and
filters read renormalised probabilities, which were not recorded; they are taken from the full law. Trees rank nodes of different laws
against each other by such probabilities, so they are approximate, too (docs/shortlists.md).

Which clusters a router selects is a function of hidden states, which recordings do not hold. :mod:`optimizer.routing` reads them once and
keeps what they decide, :class:`ClusterRanks`: with these every budget of that router replays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt

from db.errors import CorruptedChunkError
from optimizer.tree_outcomes import OFF_TEXT, ClusterUnion, Forest, GrowthTable, ShortlistRanks
from runtime.policies.document import GAMMA_LIMIT
from runtime.policies.shortlist_costs import shortlist_seconds
from runtime.shortlists import ShortlistRule
from traces.errors import TraceError
from traces.schema import LatencyProfile, Proposals, Trajectory, TreePanorama

if TYPE_CHECKING:
    from traces.store import TraceStore

Index = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
FloatArray = npt.NDArray[np.float64]

NEVER_IN: Final = np.iinfo(np.int32).max
"""Rank of a token that no budget holds."""
CLUSTER_RANKS: Final = "cluster_ranks"
"""Kind of the artifact that holds :class:`ClusterRanks`."""
MASS_SCALE: Final = 255
"""What a kept mass of 1 is stored as."""


@dataclass(frozen=True, eq=False)
class ClusterRanks:
    """Where a router puts the clusters of what was recorded of one draft: all that a replay under any of its budgets asks.

    R requests follow one another, N nodes in all (those of their tree panoramas, in order), T of them prefixes of the texts (a text of L
    tokens has L + 1, the last with nothing after it). A *rank* is a cluster's place in the router's order at a node, from 0;
    M = ``clusters`` stands for none.

    - ``of`` [vocab]: the cluster of every token of the target's vocabulary, M where the draft's head lacks it.
    - ``ranks`` [N, K]: the rank of each recorded child's cluster (M beyond the children that exist); ``order`` [N, C]: the first clusters.
    - Of each text prefix: ``own`` [T], the rank of the true next token's cluster, and ``better`` [T], the least rank of a cluster with a
      token better than it in the draft's order: it is proposed at budget k iff own < k <= better. ``sizes`` [T, B] and ``mass`` uint8
      [T, B]: tokens of the first k clusters, and the mass of the draft's law that they keep (x 255), for the k of ``budgets``.

    Arrays are unsigned integers of the smallest fitting size. ``digests`` names what each request's rows were computed from
    (:func:`digest`), ``node_offsets`` and ``text_offsets`` int64 [R + 1] delimit them.
    """

    draft: str
    router: str
    proposals: Proposals
    clusters: int
    budgets: tuple[int, ...]
    digests: tuple[str, ...]
    node_offsets: Index
    text_offsets: Index
    of: npt.NDArray[Any]
    ranks: npt.NDArray[Any]
    order: npt.NDArray[Any]
    own: npt.NDArray[Any]
    better: npt.NDArray[Any]
    sizes: npt.NDArray[Any]
    mass: npt.NDArray[np.uint8]
    artifact: str = field(default="", compare=False)

    @property
    def requests(self) -> Mapping[str, int]:
        """The place of each request by its digest."""
        return {name: place for place, name in enumerate(self.digests)}

    def kept(self, budgets: Sequence[int]) -> list[dict[str, float]]:
        """For k clusters: the share of true tokens in them, the mass of the draft's law kept, and their tokens, means over the texts."""
        last = self.text_offsets[1:] - 1
        some = np.ones(len(self.own), np.bool_)
        some[last] = False
        if not some.any():
            return []
        columns = [self.budgets.index(k) for k in budgets]
        return [
            {
                "clusters": k,
                "true_tokens": float((self.own[some] < k).mean()),
                "mass": float(self.mass[some, c].mean()) / MASS_SCALE,
                "tokens": float(self.sizes[some, c].mean()),
            }
            for k, c in zip(budgets, columns, strict=True)
        ]

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays) for an artifact of kind :data:`CLUSTER_RANKS`; :meth:`from_document` reads them."""
        document = {name: getattr(self, name) for name in ("draft", "router", "proposals", "clusters")}
        document |= {"budgets": list(self.budgets), "requests": list(self.digests)}
        return document, {name: getattr(self, name) for name in ARRAYS}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], artifact: str = "") -> ClusterRanks:
        """The ranks of :meth:`to_document`. Raises ValueError for anything else."""
        missing = [n for n in ("draft", "router", "proposals", "clusters", "budgets", "requests") if n not in document]
        missing += [n for n in ARRAYS if n not in arrays]
        if missing:
            raise ValueError(f"not cluster ranks: {missing[0]} is missing")
        made = cls(
            document["draft"],
            document["router"],
            cast(Proposals, document["proposals"]),
            document["clusters"],
            tuple(document["budgets"]),
            tuple(document["requests"]),
            **{name: arrays[name] for name in ARRAYS},
            artifact=artifact,
        )
        nodes, texts, count = int(made.node_offsets[-1]), int(made.text_offsets[-1]), len(made.digests) + 1
        lengths = {"node_offsets": count, "text_offsets": count, "ranks": nodes, "order": nodes}
        lengths |= dict.fromkeys(("own", "better", "sizes", "mass"), texts)
        for name, wanted in lengths.items():
            if len(getattr(made, name)) != wanted:
                raise ValueError(f"not cluster ranks: {name} has {len(getattr(made, name))} rows, not {wanted}")
        return made


ARRAYS: Final = ("node_offsets", "text_offsets", "of", "ranks", "order", "own", "better", "sizes", "mass")


def digest(trajectory: Trajectory, panorama: TreePanorama) -> str:
    """16 hexadecimal digits of all that a request's rows of :class:`ClusterRanks` depend on beside draft and router."""
    h = hashlib.sha256(f"{trajectory.request_id}\0{trajectory.sampling}\0{panorama.proposals}\0{panorama.shared}".encode())
    for array in (trajectory.prompt_ids, trajectory.output_ids, panorama.parent, panorama.slot, panorama.tokens, panorama.count):
        h.update(f"{array.shape}".encode())
        h.update(np.ascontiguousarray(array).tobytes())
    return h.hexdigest()[:16]


def stored_ranks(
    store: TraceStore, recording: str, draft: str, router: str, proposals: Proposals = "coupled"
) -> ClusterRanks | None:
    """The newest stored cluster ranks of a recording under a router, None where there are none. Ids may be abbreviated.

    They may lack requests that were recorded since, which a :class:`optimizer.replay.ReplayTrace` refuses. Raises CorruptedChunkError when
    all that are there are damaged, NotFoundError for an unknown recording or router.
    """
    info = store.get_recording(recording)
    wanted = {"recording": info.id, "draft": draft, "router": store.get_artifact(router).id, "proposals": proposals}
    damaged: CorruptedChunkError | None = None
    for name, origin in store.artifact_origins(CLUSTER_RANKS, info.pair_id):
        if wanted.items() <= origin.items():
            try:
                found = store.get_artifact(name)
                return ClusterRanks.from_document(found.document, found.arrays, name)
            except CorruptedChunkError as error:
                damaged = error
            except ValueError as error:
                damaged = CorruptedChunkError(f"artifact {name} ({CLUSTER_RANKS}) cannot be used ({error})")
    if damaged is not None:
        raise CorruptedChunkError(f"{damaged}; {how_to_rank(info.id, wanted['router'], draft, proposals)}") from damaged
    return None


def how_to_rank(recording: str, router: str, draft: str, proposals: Proposals = "coupled") -> str:
    """The command that makes cluster ranks, for messages."""
    flag = "" if proposals == "coupled" else f" --proposals {proposals}"
    return f"`fit ranks --recording {recording} --router {router} --draft {draft}{flag}` makes them"


@dataclass(frozen=True, eq=False)
class RoutedForest:
    """:class:`ClusterRanks` over a forest, row for row: ``ranks`` int32 [nodes, K], ``union`` for levels of trees, ``own`` and ``better``
    int32 [nodes] (of text prefixes; 0 elsewhere), and the places of text prefixes, ``text_row`` int64 [nodes] (-1 elsewhere), among
    ``sizes`` [T, B]."""

    source: ClusterRanks
    ranks: npt.NDArray[np.int32]
    union: ClusterUnion
    own: npt.NDArray[np.int32]
    better: npt.NDArray[np.int32]
    text_row: Index
    sizes: npt.NDArray[Any]

    def tokens(self, budget: int) -> FloatArray:
        """Tokens of the first ``budget`` clusters at every text prefix, float64 [T]: exact at the budgets kept, linear between them."""
        budgets = self.source.budgets
        k = min(budget, budgets[-1])
        above = int(np.searchsorted(budgets, k))
        found = self.sizes[:, above].astype(np.float64)
        if budgets[above] != k:
            share = (budgets[above] - k) / (budgets[above] - budgets[above - 1])
            found -= share * (found - self.sizes[:, above - 1])
        return found


def join_ranks(
    forest: Forest, trajectories: Sequence[Trajectory], panoramas: Sequence[TreePanorama], source: ClusterRanks
) -> RoutedForest:
    """The ranks of a forest's nodes; ``forest`` is :func:`optimizer.tree_outcomes.join_trees` of the same arguments. Raises TraceError
    where they are another draft's or lack a request."""
    if source.draft != forest.draft:
        raise TraceError(f"cluster ranks of draft {source.draft!r} given for draft {forest.draft!r}")
    known, nodes, texts, rows, offset = source.requests, [], [], [], 0
    for t, p in zip(trajectories, panoramas, strict=True):
        place = known.get(digest(t, p))
        if place is None:
            raise TraceError(
                f"request {t.request_id!r}: there are no cluster ranks of it under router {source.router} (the recording has grown since); "
                + how_to_rank("ID", source.router, source.draft)
            )
        nodes.append(np.arange(*source.node_offsets[place : place + 2]))
        texts.append(np.arange(*source.text_offsets[place : place + 2]))
        row = np.full(len(p.text_slot), -1, np.int64)
        row[: len(texts[-1])] = np.arange(len(texts[-1])) + offset
        rows.append(row)
        offset += len(texts[-1])
    at, text, text_row = (np.concatenate([np.zeros(0, np.int64), *x]) for x in (nodes, texts, rows))
    on = text_row >= 0
    own, better = np.zeros((2, len(text_row)), np.int32)
    own[on], better[on] = source.own[text], source.better[text]
    return RoutedForest(
        source,
        np.ascontiguousarray(source.ranks[at, : forest.width].astype(np.int32)),
        ClusterUnion(
            source.of[forest.tokens].astype(np.uint16),
            np.ascontiguousarray(source.order[at].astype(np.uint16)),
            np.append(np.bincount(source.of, minlength=source.clusters)[: source.clusters], 0),
        ),
        own,
        better,
        text_row,
        source.sizes[text],
    )


def shortlist_ranks(forest: Forest, rule: ShortlistRule, depth: int, routed: RoutedForest | None = None) -> ShortlistRanks:
    """The ranks of a forest's children and the budgets of ``depth`` draft steps; ``routed``: where a router puts them.

    Raises TraceError for an order of another vocabulary, and for a routed shortlist without ranks.
    """
    budgets = [rule.budget(step) for step in range(depth)]
    if rule.frequencies is None:
        if routed is None:
            raise TraceError(
                f"shortlist {rule.block.kind!r} of draft {forest.draft!r} follows the draft's hidden states, and there are no cluster "
                f"ranks of router {rule.block.artifact} over these texts; " + how_to_rank("ID", rule.block.artifact, forest.draft)
            )
        within = np.minimum(budgets, routed.source.clusters).astype(np.int64)
        return ShortlistRanks(routed.ranks, within, routed.union)
    frequencies = rule.frequencies
    if forest.tokens.size and int(forest.tokens.max()) >= frequencies.vocab:
        raise TraceError(
            f"shortlist.artifact: {rule.block.artifact} orders a vocabulary of {frequencies.vocab} tokens, the recording has token "
            f"{int(forest.tokens.max())}; `fit frequencies` on a recording of this pair makes one"
        )
    ranks = frequencies.rank[forest.tokens].astype(np.int32)
    return ShortlistRanks(ranks, np.array([frequencies.size(budget) for budget in budgets], dtype=np.int64))


def agreeing_steps(
    forest: Forest, shortlist: ShortlistRanks, routed: RoutedForest | None = None
) -> tuple[Index, Index]:
    """For every start, how many steps of a chain with a shortlist agree with the text, int64 [positions] (at most the budgets'
    length); and the step, int64 [positions], at which it comes by a law none of whose recorded children is in the shortlist while the
    text's token may be: it counts as disagreeing there (the budgets' length: it comes by none). With ``routed`` there are none such: its
    ranks were computed from whole laws.

    The forest's laws must be functions of the prefix (``shared``).
    """
    slot = forest.text_slot.astype(np.int64)
    last = len(slot) - 1
    if routed is not None:
        own, better = routed.own.astype(np.int64), routed.better.astype(np.int64)
        on_text = known = routed.text_row >= 0
    else:
        known = slot < forest.width
        rows = np.arange(len(slot))
        there = np.arange(forest.width) < forest.count[:, None]
        ranks = np.where(there, shortlist.ranks, NEVER_IN).astype(np.int64)
        own = np.where(known, ranks[rows, np.minimum(slot, forest.width - 1)], NEVER_IN)
        better = np.where(np.arange(forest.width) < np.where(known, slot, forest.width)[:, None], ranks, NEVER_IN).min(axis=1)
        on_text = slot != OFF_TEXT
    steps = np.zeros(len(forest.root), dtype=np.int64)
    doubtful = np.full(len(forest.root), len(shortlist.budgets), dtype=np.int64)
    alive = np.ones(len(forest.root), dtype=np.bool_)
    for step, budget in enumerate(shortlist.budgets.tolist()):
        node = np.minimum(forest.root + step, last)
        agrees = on_text[node] & (own[node] < budget) & (better[node] >= budget)
        doubtful[alive & ~known[node] & (better[node] >= budget) & (node < last)] = step
        alive &= agrees
        if not alive.any():
            break
        steps += alive
    return steps, doubtful


def chain_seconds(
    forest: Forest, routed: RoutedForest, rule: ShortlistRule, profile: LatencyProfile, gamma: int
) -> FloatArray:
    """What the first 0 .. ``gamma`` passes of chains over a routed shortlist take more than with the whole head, seconds float64
    [positions, gamma + 1].

    While a chain is on the text its nodes are recorded, and so are their shortlists' sizes; a pass after it left the text is charged the
    mean over the text. Raises PolicyError when the profile has no costs of the draft's shortlists.
    """
    steps, _ = agreeing_steps(forest, shortlist_ranks(forest, rule, gamma, routed), routed)
    row, last = routed.text_row[forest.root], len(routed.sizes) - 1
    priced = _prices(profile, rule, routed)
    by_budget = {k: priced(routed.tokens(k)) for k in {rule.budget(t) for t in range(gamma)}}
    more = np.zeros((len(row), gamma + 1))
    for t in range(gamma):
        seconds = by_budget[rule.budget(t)]
        more[:, t + 1] = more[:, t] + np.where(t <= steps, seconds[np.minimum(row + t, last)], seconds.mean())
    return more


def tree_seconds(growth: GrowthTable, routed: RoutedForest, rule: ShortlistRule, profile: LatencyProfile) -> FloatArray:
    """:func:`chain_seconds` of trees, by the sizes of each level's union, [positions, depth + 1]."""
    more = np.zeros((len(growth.size), growth.depth + 1))
    np.cumsum(_prices(profile, rule, routed)(growth.size.astype(np.float64)), axis=1, out=more[:, 1:])
    return more


def _prices(profile: LatencyProfile, rule: ShortlistRule, routed: RoutedForest) -> Callable[[FloatArray], FloatArray]:
    """Seconds of a pass over routed shortlists of so many tokens more than with the whole head (a line between measured sizes)."""
    shortlist_seconds(profile, rule)  # refuses a profile without such costs
    sizes = sorted({0, *profile.shortlist_s[rule.draft]["routed"].widths, int(routed.union.sizes.sum())})
    seconds = [profile.shortlist_pass_s(rule.draft, "routed", size) for size in sizes]
    return lambda tokens: np.asarray(np.interp(tokens, sizes, seconds))


def restricted(
    words: Words, forest: Forest, shortlist: ShortlistRanks, routed: RoutedForest | None = None
) -> tuple[Words, Index]:
    """The packed outcomes of a full draft's chains (:func:`optimizer.outcomes.tabulate`) with what a shortlist leaves of their
    agreement, and the step from which that is not known (:func:`agreeing_steps`). Raises TraceError for a draft whose laws depend on where
    a round began."""
    if not forest.shared:
        raise TraceError(f"chains of draft {forest.draft!r} are replayed as trees")
    steps, doubtful = agreeing_steps(forest, shortlist, routed)
    made: Words = (words & np.uint32(0xFFFFFF00)) | np.minimum(steps, GAMMA_LIMIT).astype(np.uint32)
    return made, doubtful
