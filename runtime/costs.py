"""What a round costs: the one place where the terms of a profile make up a round's seconds.

:class:`RoundKind` says which terms a round consists of: the fit solves for them,
:func:`predicted_seconds` sums them up for a profile's check, and :func:`round_costs` tabulates them
for :func:`round_seconds`, which replay and windows that weigh costs call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.document import GAMMA_LIMIT, NODE_LIMIT, Policy
from spectune.runtime.policies.jit import compiled
from spectune.traces.cost_table import AXES, FloatArray
from spectune.traces.latency import check_draft
from spectune.traces.tables import LatencyProfile

if TYPE_CHECKING:
    from spectune.runtime.policies.rules import ShortlistRule
    from spectune.runtime.trees.grow import TreeRule

BUCKET: Final = 32
"""Context tokens that share one cost: that of their middle."""
LAG_LIMIT: Final = 64
"""Longest lag with a table entry; longer ones cost by the table's last slope."""
ONE_ROW: Final = np.ones(1)
FURTHER_TARGET: Final = "further target"
FURTHER_ROUND: Final = "further round"
"""What each request beyond one takes of the target's pass, and of a step beside its phases."""
LEAST: Final = 1e-9
"""Seconds that a round counts at least where a window weighs them."""


class RoundTerms(NamedTuple):
    """Names of terms: ``once`` (passes) a round that drafts; ``per_pass`` (rows, context) of the
    draft, and ``head`` (rows: tokens evaluated); ``verification`` (rows, context); ``per_token``
    (context) emitted; ``rest``, constants, a round beside its phases; ``further_pass``
    (batch) a draft's pass, by the requests beyond one."""

    once: tuple[str, ...]
    per_pass: tuple[str, ...]
    head: str
    verification: tuple[str, ...]
    per_token: tuple[str, ...]
    rest: tuple[str, ...]
    further_pass: str = ""


class RoundKind(NamedTuple):
    """What decides which terms a round consists of. ``draft`` is empty where nothing is drafted,
    ``growth`` for chains; ``blocks`` are further terms of a draft pass; ``routed``: the output head
    gathers the rows of a routed shortlist."""

    draft: str = ""
    growth: str = ""
    sampled: bool = False
    blocks: tuple[str, ...] = ()
    routed: bool = False

    @classmethod
    def of(cls, policy: Policy, *, tree: bool) -> RoundKind:
        """The kind of a policy's rounds at temperature 0. ``tree``: it drafts trees, or chains of a
        head, which are trees of width 1."""
        if not policy.speculates:
            return cls()
        draft, stop = policy.draft, policy.stop.kind
        routed = policy.shortlist.kind == "clusters"
        if not tree:
            free = stop == "none" or draft == "ngram"
            return cls(draft, blocks=() if free else (f"stop {stop}",), routed=routed)
        growth = policy.growth.kind if policy.growth.kind in ("static", "classifier") else "top_k"
        blocks = [f"stratify/{draft}"] * (policy.stratify is not None)
        blocks += [f"tree stop/{draft}"] * (stop != "none")
        return cls(draft, growth, blocks=tuple(blocks), routed=routed)

    @property
    def terms(self) -> RoundTerms:
        """The terms that these rounds consist of."""
        draft, tree = self.draft, bool(self.growth)
        return RoundTerms(
            once=(*[f"tree phase/{draft}"] * tree, f"phase/{draft}"),
            per_pass=(
                f"pass/{draft}",
                *[f"{self.growth}/{draft}"] * tree,
                *[f"sampled pass/{draft}"] * self.sampled,
                *self.blocks,
            ),
            head=f"{'gathered' if self.routed else 'head'}/{draft}",
            verification=(
                "target",
                *["tree target"] * tree,
                *["sampled target"] * self.sampled,
                *[f"after/{draft}"] * bool(draft),
            ),
            per_token=("noise",) * self.sampled,
            rest=("round", *[f"tree round/{draft}"] * tree),
            further_pass=f"further pass/{draft}",
        )


class Share(NamedTuple):
    """A term of a round or step, how often it is charged, and where on its axes."""

    term: str
    times: float = 1.0
    rows: float = 0.0
    context: float = 0.0
    passes: float = 0.0
    batch: float = 1.0


class MeasuredRound(NamedTuple):
    """An executed round: its kind, what it read, and its seconds. ``rows``: what each pass of the
    draft read, the lag first. ``head``: tokens that the draft's output head evaluated per pass, 0
    where that is not priced apart."""

    kind: RoundKind
    context: int
    rows: tuple[int, ...]
    drafted: int
    emitted: int
    draft_s: float
    verify_s: float
    round_s: float
    head: int = 0


MeasuredStep = Sequence[MeasuredRound]
"""The rounds of the requests of a step, under one policy; their seconds are the step's."""


def step_shares(step: MeasuredStep) -> tuple[list[Share], list[Share], list[Share]]:
    """What drafting, verification and the rest of a step consist of.

    The models read the rows of all requests in one pass, and the terms of a pass are charged at
    their sum, beside the sum of their contexts. What each further request takes beside its rows are
    terms of their own, over the number of further requests (``batch``): a step of one has none."""
    kinds = [r.kind.terms for r in step]
    members = [*zip(step, kinds, strict=True)]

    def over(part: str, rows: Sequence[int]) -> list[Share]:
        """The terms of a part of the kinds, at the sums of the requests that have each."""
        shares = []
        for term in dict.fromkeys(term for terms in kinds for term in getattr(terms, part)):
            own = [n for n, terms in enumerate(kinds) if term in getattr(terms, part) and rows[n]]
            if own:
                context = sum(step[n].context for n in own)
                shares.append(Share(term, rows=sum(rows[n] for n in own), context=context))
        return shares

    def further(term: str, requests: int) -> list[Share]:
        return [Share(term, batch=requests - 1)] if requests > 1 else []

    drafting, drafted = [], [(r, terms) for r, terms in members if r.rows]
    if drafted:
        (first, terms), passes = drafted[0], max(len(r.rows) for r, _ in drafted)
        drafting = [Share(term, passes=passes) for term in terms.once]
        for level in range(passes):
            rows = [r.rows[level] if level < len(r.rows) else 0 for r in step]
            drafting += over("per_pass", rows)
            drafting += further(terms.further_pass, sum(n > 0 for n in rows))
        if first.head:
            drafting.append(Share(terms.head, passes, rows=first.head))
    verification = over("verification", [r.drafted + 1 for r in step])
    emitted = sum(r.emitted for r, terms in members if terms.per_token)
    verification += [Share(term, emitted) for term in ("noise",) if emitted]
    verification += further(FURTHER_TARGET, len(step))
    rest = [Share(term) for term in dict.fromkeys(t for terms in kinds for t in terms.rest)]
    return drafting, verification, rest + further(FURTHER_ROUND, len(step))


def by_term(loads: Iterable[Sequence[Share]]) -> dict[str, FloatArray]:
    """The shares of loads, by term: float64 [1 + numbers of a :class:`Share`, n], the load's number
    first."""
    shares: dict[str, list[tuple[float, ...]]] = {}
    for i, load in enumerate(loads):
        for term, *numbers in load:
            shares.setdefault(term, []).append((i, *numbers))
    return {term: np.array(rows).T for term, rows in shares.items()}


def predicted_seconds(profile: LatencyProfile, steps: Iterable[MeasuredStep]) -> FloatArray:
    """(drafting, verification, whole step) of steps by a profile, in seconds, float64 [steps,
    3]."""
    loads = [load for step in steps for load in step_shares(step)]
    seconds = np.zeros(len(loads))
    for term, (i, times, *places) in by_term(loads).items():
        at = dict(zip(AXES, places, strict=True))
        np.add.at(seconds, i.astype(np.int64), times * profile.seconds(term, **at))
    parts = seconds.reshape(-1, 3)
    parts[:, 2] += parts[:, 0] + parts[:, 1]
    return parts


class RoundCosts(NamedTuple):
    """Seconds by place: 2 * bucket of the context + 1 where the text is sampled.

    ``first_s`` [places, LAG_LIMIT + 2]: the pass that reads a lag. ``later_s`` [places, passes + 1]
    or, ``by_position``, [positions, passes + 1] by where the round begins: what so many passes take
    beyond the first. ``verify_s`` [places, NODE_LIMIT + 1]: the target's pass by drafted tokens.
    ``emitted_s`` [places]: per emitted token. ``rest_s``: per round."""

    first_s: FloatArray
    later_s: FloatArray
    verify_s: FloatArray
    emitted_s: FloatArray
    rest_s: float
    by_position: bool


class LaterPasses(NamedTuple):
    """What the passes after the first read, where it is not one row each: ``rows`` [positions,
    passes - 1] at the positions where rounds begin, whose contexts and temperatures (0: greedy, 1:
    sampled) are ``contexts`` and ``sampled``, int64 [positions]."""

    rows: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int64]
    sampled: npt.NDArray[np.int64]


@compiled(inline=True)
def round_seconds(
    costs: RoundCosts,
    sampled: int,
    context: int,
    position: int,
    lag: int,
    passes: int,
    drafted: int,
    emitted: int,
) -> tuple[float, float, float]:
    """(drafting, verification, the whole round) in seconds. ``context``: tokens in the target's
    cache when the round begins."""
    last = (costs.emitted_s.shape[0] >> 1) - 1
    # Unsigned: compiled code then does not ask whether an index counts from the end.
    place = np.uint64(2 * min(context // BUCKET, last) + sampled)
    draft_s = 0.0
    if passes > 0:
        draft_s = costs.first_s[place, np.uint64(min(lag, LAG_LIMIT))]
        if lag > LAG_LIMIT:
            slope = costs.first_s[place, LAG_LIMIT + 1] - costs.first_s[place, LAG_LIMIT]
            draft_s += (lag - LAG_LIMIT) * slope
        row = np.uint64(position) if costs.by_position else place
        draft_s += costs.later_s[row, np.uint64(min(passes, costs.later_s.shape[1] - 1))]
    verify_s = costs.verify_s[place, np.uint64(drafted)] + costs.emitted_s[place] * emitted
    return draft_s, verify_s, draft_s + verify_s + costs.rest_s


def middles(max_context: int) -> FloatArray:
    """The contexts at which buckets up to ``max_context`` are priced, float64 [buckets]."""
    return np.arange(0.0, max(0, max_context) + 1, BUCKET) + (BUCKET - 1) / 2


def round_costs(
    profile: LatencyProfile,
    kind: RoundKind,
    contexts: FloatArray,
    *,
    passes: LaterPasses | None = None,
    shortlist_s: FloatArray | None = None,
) -> RoundCosts:
    """The tables of a kind of rounds, greedy and sampled, with buckets priced at ``contexts``.

    ``passes``: what they read, where it is not one row each. ``shortlist_s`` [passes + 1] or, with
    ``passes``, [positions, passes + 1]: what so many passes take more because of a shortlist.
    Raises PolicyError where the profile has no costs of the draft, or of its trees."""
    if kind.draft:
        priced = (profile.tree_drafts, " of trees") if kind.growth else (profile.drafts, "")
        check_draft(kind.draft, *priced)
    kinds = [kind._replace(sampled=sampled) for sampled in (False, True)]
    nodes, rows = np.arange(1.0, NODE_LIMIT + 2), np.arange(LAG_LIMIT + 2.0)
    verify = _by_place(_total(profile, k.terms.verification, contexts, nodes) for k in kinds)
    emitted = _by_place(_total(profile, k.terms.per_token, contexts) for k in kinds)[:, 0].copy()
    rest_s = float(sum(profile.seconds(term) for term in kind.terms.rest))
    later = _by_place(pass_seconds(profile, k, contexts, rows) for k in kinds)
    counts = np.arange(1.0, GAMMA_LIMIT + 1)
    per_phase = [profile.seconds(term, passes=counts) for term in kind.terms.once]
    once = np.append(0.0, np.sum(per_phase, axis=0))
    if passes is None:
        beyond = once + np.maximum(0.0, np.append(0.0, counts) - 1) * later[:, 1:2]
    else:
        place = 2 * np.minimum(passes.contexts // BUCKET, len(contexts) - 1) + passes.sampled
        read = later[place[:, None], np.minimum(passes.rows, LAG_LIMIT)] * (passes.rows > 0)
        beyond = np.zeros((len(read), read.shape[1] + 2))
        np.cumsum(read, axis=1, out=beyond[:, 2:])
        beyond += once[np.minimum(np.arange(beyond.shape[1]), GAMMA_LIMIT)]
    if shortlist_s is not None:
        count = min(beyond.shape[1], shortlist_s.shape[-1])
        beyond = beyond[:, :count] + shortlist_s[..., :count]
    beyond = np.ascontiguousarray(beyond)
    return RoundCosts(later, beyond, verify, emitted, rest_s, passes is not None)


def _by_place(tables: Iterable[FloatArray]) -> FloatArray:
    """Tables [contexts, n], greedy and sampled, as one of [places, n]."""
    both = np.stack(list(tables), axis=1)
    return both.reshape(-1, both.shape[2])


def pass_seconds(
    profile: LatencyProfile, kind: RoundKind, contexts: FloatArray, rows: FloatArray
) -> FloatArray:
    """What a pass of a draft takes, float64 [contexts, rows]."""
    sizes = profile.shortlist_sizes(kind.draft, routed=False)  # where the head is priced apart
    head_s = float(profile.seconds(f"head/{kind.draft}", rows=sizes[-1])) if sizes else 0.0
    return _total(profile, kind.terms.per_pass, contexts, rows) + head_s


def _total(
    profile: LatencyProfile,
    terms: tuple[str, ...],
    contexts: FloatArray,
    rows: FloatArray = ONE_ROW,
) -> FloatArray:
    tables = (profile.terms[term].grid(rows, contexts) for term in terms if term in profile.terms)
    return sum(tables, np.zeros((len(contexts), len(rows))))


FREE: Final = round_costs(LatencyProfile("", "", "", {}), RoundKind(), middles(0))
"""Where there is no profile: everything takes 0 seconds."""


def shortlist_seconds(
    profile: LatencyProfile, rule: ShortlistRule, nodes: npt.NDArray[Any] | None = None
) -> FloatArray:
    """What the first 0 .. n passes over a shortlist take more than with the whole head, usually
    less (DynaSpec, section 4.3): float64 [..., n + 1]. ``nodes`` [..., n]: what each pass reads, by
    default one node in each of GAMMA_LIMIT passes. A routed shortlist is charged for clusters of
    the mean size. Raises PolicyError where the profile has no costs of the draft's shortlists."""
    nodes = np.ones(GAMMA_LIMIT) if nodes is None else nodes
    sizes = np.stack([rule.sizes(nodes[..., t], t) for t in range(nodes.shape[-1])], axis=-1)
    more = profile.shortlist_seconds(rule.draft, sizes, routed=rule.routed)
    total = np.zeros((*nodes.shape[:-1], nodes.shape[-1] + 1))
    np.cumsum(more, axis=-1, out=total[..., 1:])
    return total


def window_costs(
    profile: LatencyProfile, policy: Policy, rule: TreeRule, shortlist: ShortlistRule | None = None
) -> FloatArray:
    """gamma a_q + b_p(gamma), above 0, for gamma = 0..gamma_max (on-the-fly paper, definition 1):
    what a round of gamma levels takes that verifies all they can keep, but for what is charged per
    emitted token, at temperature 0, in seconds, float64 [gamma_max + 1].

    ``rule`` says how the policy's trees grow at temperature 0, ``shortlist`` what its draft's head
    evaluates (None: all). Raises PolicyError where the profile has no costs for the policy's draft,
    or none of its trees."""
    draft, drafted, passes = policy.draft, list(range(policy.gamma_max + 1)), None
    head = draft not in profile.chain_drafts and draft in profile.tree_drafts
    kind = RoundKind.of(policy, tree=policy.is_tree or head)
    if kind.growth:
        most = NODE_LIMIT if rule.top_n is None else min(rule.top_n, NODE_LIMIT)
        rows = np.array([[rule.step_width(g) for g in drafted[2:]]], dtype=np.int64)
        passes = LaterPasses(rows, np.zeros(1, np.int64), np.zeros(1, np.int64))
        drafted = [min(rule.verified(g), most) for g in drafted]
    more = None if shortlist is None else shortlist_seconds(profile, shortlist)
    usual = np.array([profile.usual_context])
    costs = round_costs(profile, kind, usual, passes=passes, shortlist_s=more)
    rounds = [round_seconds(costs, 0, 0, 0, 1, g, n, 0)[2] for g, n in enumerate(drafted)]
    return np.maximum(LEAST, rounds)
