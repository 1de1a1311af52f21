"""What a round costs: the one place where the terms of a profile make up a round's seconds.

:class:`RoundKind` says which terms a round consists of: the fit solves for them,
:func:`round_costs` tabulates them, and :func:`round_seconds` looks a round up. Replay, windows that
weigh costs and a profile's check call that function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.document import GAMMA_LIMIT, NODE_LIMIT, Policy
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.windows import WindowCosts
from spectune.traces.cost_table import CostTable, FloatArray
from spectune.traces.errors import PolicyError
from spectune.traces.latency import LatencyProfile

if TYPE_CHECKING:
    from spectune.runtime.policies.shortlist_rule import ShortlistRule
    from spectune.runtime.trees.grow import TreeRule

BUCKET: Final = 32
"""Context tokens that share one cost: that of their middle."""
LAG_LIMIT: Final = 64
"""Longest lag with a table entry; longer ones cost by the table's last slope."""
ONE_ROW: Final = np.ones(1)
LEAST: Final = 1e-9
"""Seconds that a pass or a verification counts at least where a window weighs them."""


class RoundKind(NamedTuple):
    """What decides which terms a round consists of. ``draft`` is empty where nothing is drafted;
    ``growth`` is empty for chains; ``blocks`` are terms charged per draft pass, beside those of the
    pass itself; ``routed``: the output head gathers the rows of a routed shortlist."""

    draft: str = ""
    growth: str = ""
    sampled: bool = False
    blocks: tuple[str, ...] = ()
    routed: bool = False

    @classmethod
    def of(cls, policy: Policy, *, tree: bool, sampled: bool = False) -> RoundKind:
        """The kind of a policy's rounds. ``tree``: it drafts trees, or chains of a head, which are
        trees of width 1."""
        if not policy.speculates:
            return cls(sampled=sampled)
        draft, stop = policy.draft, policy.stop.kind
        routed = policy.shortlist.kind == "clusters"
        if not tree:
            free = stop == "none" or draft == "ngram"
            return cls(draft, "", sampled, () if free else (f"stop {stop}",), routed)
        growth = policy.growth.kind if policy.growth.kind in ("static", "classifier") else "top_k"
        blocks = [f"stratify/{draft}"] * (policy.stratify is not None)
        blocks += [f"tree stop/{draft}"] * (stop != "none")
        return cls(draft, growth, sampled, tuple(blocks), routed)

    @property
    def once(self) -> tuple[str, ...]:
        """Terms over (passes), charged once per round that drafts."""
        return (*self._of_trees("tree phase"), f"phase/{self.draft}")

    @property
    def per_pass(self) -> tuple[str, ...]:
        """Terms over (rows, context), charged per pass of the draft."""
        sampled = (f"sampled pass/{self.draft}",) if self.sampled else ()
        return (f"pass/{self.draft}", *self._of_trees(self.growth), *sampled, *self.blocks)

    @property
    def head(self) -> str:
        """The term over (rows: tokens evaluated) of the draft's output head, charged per pass."""
        return f"{'gathered' if self.routed else 'head'}/{self.draft}"

    @property
    def verification(self) -> tuple[str, ...]:
        """Terms over (rows, context) of the target's pass."""
        when = {
            "target": True,
            "tree target": self.growth,
            "sampled target": self.sampled,
            f"after/{self.draft}": self.draft,
        }
        return tuple(term for term, charged in when.items() if charged)

    @property
    def per_token(self) -> tuple[str, ...]:
        """Terms over (context), charged per emitted token."""
        return ("noise",) if self.sampled else ()

    @property
    def rest(self) -> tuple[str, ...]:
        """Constants of a round beside its phases."""
        return ("round", *self._of_trees("tree round"))

    def _of_trees(self, term: str) -> tuple[str, ...]:
        return (f"{term}/{self.draft}",) if self.growth else ()


class Share(NamedTuple):
    """A term of a round, how often it is charged, and where."""

    term: str
    times: float
    rows: float
    context: float
    passes: float
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


def drafting_terms(r: MeasuredRound) -> Iterator[Share]:
    """What drafting consists of."""
    for term in r.kind.once:
        yield Share(term, 1.0, 0.0, r.context, len(r.rows))
    for rows in r.rows:
        for term in r.kind.per_pass:
            yield Share(term, 1.0, rows, r.context, 0.0)
    if r.head:
        yield Share(r.kind.head, len(r.rows), r.head, r.context, 0.0)


def verification_terms(r: MeasuredRound) -> Iterator[Share]:
    """What verification consists of."""
    for term in r.kind.verification:
        yield Share(term, 1.0, r.drafted + 1, r.context, 0.0)
    for term in r.kind.per_token:
        yield Share(term, r.emitted, 0.0, r.context, 0.0)


def rest_terms(r: MeasuredRound) -> Iterator[Share]:
    """What a round consists of beside its phases."""
    for term in r.kind.rest:
        yield Share(term, 1.0, 0.0, r.context, 0.0)


class RoundCosts(NamedTuple):
    """Seconds by place: 2 * bucket of the context + 1 where the text is sampled.

    ``first_s`` [places, LAG_LIMIT + 2]: the pass that reads a lag. ``later_s`` [places, passes + 1]
    or, ``by_position``, [positions, passes + 1] by where the round begins: what so many passes take
    beyond the first. ``verify_s`` [places, NODE_LIMIT + 1]: the target's pass by drafted tokens.
    ``emitted_s`` [places]: per emitted token. ``rest_s``: per round.
    """

    first_s: FloatArray
    later_s: FloatArray
    verify_s: FloatArray
    emitted_s: FloatArray
    rest_s: float
    by_position: bool


class Passes(NamedTuple):
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
    return np.asarray(
        np.arange(max(0, max_context) // BUCKET + 1) * float(BUCKET) + (BUCKET - 1) / 2, np.float64
    )


def round_costs(
    profile: LatencyProfile,
    kind: RoundKind,
    contexts: FloatArray,
    *,
    passes: Passes | None = None,
    shortlist_s: FloatArray | None = None,
) -> RoundCosts:
    """The tables of a kind of rounds, greedy and sampled, with buckets priced at ``contexts``.

    ``passes``: what they read, where it is not one row each. ``shortlist_s`` [passes + 1] or, with
    ``passes``, [positions, passes + 1]: what so many passes take more because of a shortlist.
    Raises PolicyError where the profile has no costs of the draft, or of its trees.
    """
    check_priced(profile, kind)
    kinds = [kind._replace(sampled=sampled) for sampled in (False, True)]
    nodes, rows = np.arange(1.0, NODE_LIMIT + 2), np.arange(LAG_LIMIT + 2.0)
    verify = _by_place(_total(profile, k.verification, contexts, nodes) for k in kinds)
    emitted = _by_place(_total(profile, k.per_token, contexts) for k in kinds)[:, 0].copy()
    rest_s = float(sum(profile.seconds(term) for term in kind.rest))
    if not kind.draft:
        first = np.zeros((len(verify), len(rows)))
        return RoundCosts(first, np.zeros((len(verify), 1)), verify, emitted, rest_s, False)
    later = _by_place(pass_seconds(profile, k, contexts, rows) for k in kinds)
    counts = np.arange(1.0, GAMMA_LIMIT + 1)
    per_phase = [profile.seconds(term, passes=counts) for term in kind.once]
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
    return _total(profile, kind.per_pass, contexts, rows) + head_s


def _total(
    profile: LatencyProfile,
    terms: tuple[str, ...],
    contexts: FloatArray,
    rows: FloatArray = ONE_ROW,
) -> FloatArray:
    tables = (profile.terms[term].grid(rows, contexts) for term in terms if term in profile.terms)
    return sum(tables, np.zeros((len(contexts), len(rows))))


FREE: Final = RoundCosts(
    np.zeros((2, LAG_LIMIT + 2)),
    np.zeros((2, GAMMA_LIMIT + 1)),
    np.zeros((2, NODE_LIMIT + 1)),
    np.zeros(2),
    0.0,
    False,
)
"""Where there is no profile: everything takes 0 seconds."""


def shortlist_seconds(profile: LatencyProfile, rule: ShortlistRule) -> FloatArray:
    """What the first 0 .. GAMMA_LIMIT passes over a shortlist take more than with the whole head,
    usually less (DynaSpec, section 4.3): float64 [GAMMA_LIMIT + 1]. A routed shortlist is charged
    for clusters of the mean size. Raises PolicyError where the profile has no costs of the draft's
    shortlists."""
    check_shortlists(profile, rule.draft)
    budgets = [rule.budget(t) for t in range(GAMMA_LIMIT)]
    if rule.routing is not None:
        clusters = rule.routing.clusters
        mean = clusters.vocab / clusters.count
        sizes = [mean * min(budget, clusters.count) for budget in budgets]
    else:
        assert rule.frequencies is not None
        sizes = [float(rule.frequencies.size(budget)) for budget in budgets]
    more = profile.shortlist_seconds(rule.draft, sizes, routed=rule.routing is not None)
    return np.append(0.0, np.cumsum(more))


def window_costs(
    profile: LatencyProfile,
    policy: Policy,
    rules: tuple[TreeRule, TreeRule] | None = None,
    shortlist: ShortlistRule | None = None,
) -> WindowCosts:
    """a_q and b_p(gamma) for gamma = 0..gamma_max (on-the-fly paper, definition 1): a_q is the mean
    pass after the first, and gamma a_q + b_p(gamma) is what a round of gamma levels costs that
    verifies all they can keep, but for what is charged per emitted token, at temperature 0.

    ``rules`` are the policy's compiled trees and ``shortlist`` its compiled shortlist, where it has
    them. Raises PolicyError where the profile has no costs for the policy's draft, or none of its
    trees.
    """
    gammas, draft = range(policy.gamma_max + 1), policy.draft
    head = draft not in profile.chain_drafts and draft in profile.tree_drafts
    kind = RoundKind.of(policy, tree=policy.is_tree or head)
    drafted, passes = list(gammas), None
    if kind.growth:
        from spectune.runtime.trees.rules import compile_tree  # torch is imported here alone

        rule = compile_tree(policy, sampled=False) if rules is None else rules[0]
        most = NODE_LIMIT if rule.top_n is None else min(rule.top_n, NODE_LIMIT)
        drafted = [min(rule.verified(g), most) for g in gammas]
        rows = np.array([[rule.step_width(g) for g in gammas[2:]]], dtype=np.int64)
        passes = Passes(rows, np.zeros(1, np.int64), np.zeros(1, np.int64))
    more = None if shortlist is None else shortlist_seconds(profile, shortlist)
    usual = np.array([profile.usual_context])
    costs = round_costs(profile, kind, usual, passes=passes, shortlist_s=more)
    rounds = [round_seconds(costs, 0, 0, 0, 1, g, drafted[g], 0)[2] for g in gammas]
    last = policy.gamma_max
    if not last:
        return WindowCosts(0.0, (max(LEAST, rounds[0]),))
    later = costs.later_s[0]
    mean_s = (later[last] - later[1]) / (last - 1) if last > 1 else costs.first_s[0, 1]
    step_s = max(LEAST, float(mean_s))
    return WindowCosts(step_s, tuple(max(LEAST, s - g * step_s) for g, s in enumerate(rounds)))


class StepLoad(NamedTuple):
    """What a step of an engine reads, which is a round of every request that it holds: ``rows``
    tokens verified, ``prompts`` tokens of prompts, of ``batch`` requests whose caches hold
    ``context`` tokens together, and ``passes`` of the draft that the engine has loaded (none:
    ``draft`` is empty). 0 passes of a loaded draft are not free: it reads what the target reads."""

    draft: str
    rows: float
    prompts: float
    batch: float
    context: float
    passes: float


def step_terms(load: StepLoad) -> Iterator[Share]:
    """What a step of an engine consists of."""
    yield Share("step", 1.0, 0.0, 0.0, 0.0, load.batch)
    yield Share("step target", 1.0, load.rows, load.context, 0.0)
    yield Share("step prompts", 1.0, load.prompts, 0.0, 0.0)
    if load.draft:
        yield Share(f"step draft/{load.draft}", 1.0, 0.0, 0.0, load.passes, load.batch)
        yield Share(f"step draft prompts/{load.draft}", 1.0, load.prompts, 0.0, 0.0)


class Surface(NamedTuple):
    """A term of a step as compiled code reads it: ``seconds`` [x, y] at knots."""

    x: FloatArray
    y: FloatArray
    seconds: FloatArray


class StepCosts(NamedTuple):
    """The terms of :func:`step_terms` over (batch), (rows, context), (tokens of prompts), (passes,
    batch) and again (tokens of prompts)."""

    step: Surface
    target: Surface
    prompts: Surface
    draft: Surface
    draft_prompts: Surface


@compiled(inline=True)
def _segment(knots: FloatArray, at: float) -> tuple[int, float]:
    """The knot before a place, or the last but one, and how far the place is on the way to the
    next."""
    last, n = len(knots) - 2, 0
    if last < 0:
        return 0, 0.0
    while n < last and at >= knots[n + 1]:
        n += 1
    return n, (at - knots[n]) / (knots[n + 1] - knots[n])


@compiled(inline=True)
def _surface_seconds(surface: Surface, x: float, y: float) -> float:
    i, right = _segment(surface.x, x)
    j, up = _segment(surface.y, y)
    k, m = min(i + 1, len(surface.x) - 1), min(j + 1, len(surface.y) - 1)
    low = surface.seconds[i, j] * (1.0 - up) + surface.seconds[i, m] * up
    high = surface.seconds[k, j] * (1.0 - up) + surface.seconds[k, m] * up
    return float(max(0.0, low * (1.0 - right) + high * right))


@compiled(inline=True)
def step_seconds(
    costs: StepCosts, rows: float, prompts: float, batch: float, context: float, passes: float
) -> float:
    """Seconds of a step; its arguments are :class:`StepLoad`'s."""
    return (
        _surface_seconds(costs.step, batch, 0.0)
        + _surface_seconds(costs.target, rows, context)
        + _surface_seconds(costs.prompts, prompts, 0.0)
        + _surface_seconds(costs.draft, passes, batch)
        + _surface_seconds(costs.draft_prompts, prompts, 0.0)
    )


def step_costs(profile: LatencyProfile, draft: str) -> StepCosts:
    """The costs of the steps of an engine that has loaded ``draft`` (empty: none). Raises
    PolicyError where the profile has none."""
    terms = [term for term, *_ in step_terms(StepLoad(draft, 0, 0, 1, 0, 0))]
    missing = [term for term in terms if term not in profile.terms]
    if missing:
        raise PolicyError(
            f"no steps of an engine that drafts with {draft or 'nothing'} were recorded, so what "
            "they cost is not known"
        )
    none = [CostTable((0.0,))] * (0 if draft else 2)
    return StepCosts(*map(_surface, [*(profile.terms[term] for term in terms), *none]))


def _surface(table: CostTable) -> Surface:
    x, y, *_ = (*table.knots, (0.0,), (0.0,))
    return Surface(np.array(x), np.array(y), np.array(table.seconds).reshape(len(x), len(y)))


def check_priced(profile: LatencyProfile, kind: RoundKind) -> None:
    """Raises PolicyError where a profile has no costs of a draft, or of its trees."""
    priced, of = (profile.tree_drafts, " of trees") if kind.growth else (profile.drafts, "")
    if kind.draft and kind.draft not in priced:
        known = ", ".join(sorted(priced)) or "none"
        raise PolicyError(
            f"the latency profile has no costs{of} for draft {kind.draft!r} (it has: {known}); run "
            "`profile` again"
        )


def check_shortlists(profile: LatencyProfile, draft: str) -> None:
    """Raises PolicyError where a profile has no costs of a draft's shortlists."""
    priced = [d for d in profile.drafts if profile.shortlist_sizes(d, routed=True)]
    if draft not in priced:
        raise PolicyError(
            f"the latency profile has no costs of shortlists for draft {draft!r} (it has: "
            f"{', '.join(priced) or 'none'}); run `profile` again"
        )
