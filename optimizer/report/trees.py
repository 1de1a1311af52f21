"""The figures of the tree papers for one recording and draft, as numbers: HeteroSpec's figures 1, 3
and 4, C2T's 2 and 4.

Everything is counted over recorded starts or replayed, so nothing is sampled or executed here.
:mod:`optimizer.report.tree_page` draws it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit.heterospec import terminal_ranks
from spectune.optimizer.fit.recorded_trees import child_probabilities
from spectune.optimizer.fit.sequoia import best_static_tree
from spectune.optimizer.simulate.forest import Forest
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import Replay, ReplayTrace
from spectune.optimizer.simulate.tree_tables import GrowthTable
from spectune.runtime.policies.artifacts import BINS, CLASSIFIER, STATIC_TREE, Artifacts
from spectune.runtime.policies.document import (
    NODE_LIMIT,
    ClassifierGrowth,
    FixedWindow,
    Policy,
    Select,
    StaticGrowth,
    Stratify,
    TopKGrowth,
    parse_plain_policy,
)
from spectune.runtime.policies.plan import compile_plan
from spectune.traces.errors import SpectuneError
from spectune.traces.schema import TREE_SCALE, Counts, LatencyProfile, Proposals

INTERVALS: Final = 7
"""Entropy intervals of the heat maps (C2T, section 3)."""
TOP_NS: Final = (4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 60)
"""Selections of EAGLE-2's curve, and nodes of the static trees."""
BETAS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Thresholds of a stored classifier's curve."""
EXTENSION: Final = 3
"""HeteroSpec's alpha."""
MISSING_MAX: Final = 0.05
"""Largest share of rounds that may read a distribution which was not recorded; such points are
marked."""
SHARES: Final = tuple(round(0.05 * i, 2) for i in range(1, 21))
"""Percentiles of the N kept nodes that the inset of the rank distribution shows."""

FAMILIES: Final = ("chain", "EAGLE-2", "static", "C2T", "HeteroSpec")
"""The curves that policies belong to."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Starts:
    """What one tree does from every start whose budget allows its whole depth; int64 [n] each.

    ``accepted`` drafted tokens; ``tcr``: HeteroSpec's Terminal Confidence Rank, the place from 1 of
    the deepest accepted node among the N kept ones by joint cost, 0 where nothing was accepted;
    ``phi`` in 1/16 nat.
    """

    tcr: Ints
    accepted: Ints
    phi: Ints


def starts_of(table: GrowthTable, limit: Ints, top_n: int) -> Starts:
    """The starts of a growth table under a selection of ``top_n``; ``limit`` int64 [positions]: the
    deepest level each may draft."""
    known = limit >= table.depth
    accepted, tcr = terminal_ranks(table, top_n)
    return Starts(tcr[known], accepted[known], table.phi[known, table.depth - 1].astype(np.int64))


@dataclass(frozen=True)
class RankProfile:
    """Starts by Terminal Confidence Rank; entry r of each list belongs to rank r = 0..N (0: nothing
    accepted).

    ``accepted``: mean drafted tokens accepted, ``phi``: mean Phi in nat; None where no start has
    that rank. ``within``: the share of starts with something accepted whose rank is at most each
    share of N in ``SHARES``; ``top_quarter``: at most a quarter of N. ``quartiles``: the ranks
    below which a quarter, half, and three quarters of these starts lie.
    """

    starts: int
    count: tuple[int, ...]
    accepted: tuple[float | None, ...]
    phi: tuple[float | None, ...]
    within: tuple[float, ...]
    top_quarter: float
    quartiles: tuple[int, int, int]


def rank_profile(starts: Starts, top_n: int) -> RankProfile:
    """The distribution of ranks, and what goes with them."""
    count = np.bincount(starts.tcr, minlength=top_n + 1)

    def mean(values: npt.NDArray[Any]) -> tuple[float | None, ...]:
        sums = np.bincount(starts.tcr, weights=values, minlength=top_n + 1)
        return tuple(float(s / c) if c else None for s, c in zip(sums, count, strict=True))

    some = np.sort(starts.tcr[starts.tcr > 0])

    def share(most: float) -> float:
        return float((some <= most).mean()) if len(some) else 0.0

    quartiles = [
        int(some[min(len(some) - 1, int(q * len(some)))]) if len(some) else 0
        for q in (0.25, 0.5, 0.75)
    ]
    return RankProfile(
        starts=len(starts.tcr),
        count=tuple(int(c) for c in count),
        accepted=mean(starts.accepted),
        phi=mean(starts.phi / TREE_SCALE),
        within=tuple(share(s * top_n) for s in SHARES),
        top_quarter=share(0.25 * top_n),
        quartiles=(quartiles[0], quartiles[1], quartiles[2]),
    )


@dataclass(frozen=True)
class Heat:
    """C2T's figure 2 from the distributions at the recorded texts' own prefixes: rows are entropy
    intervals, columns child ranks.

    Interval i holds entropies from ``edges[i]`` to below ``edges[i + 1]`` nat, the last one
    everything above. ``count`` starts each; ``probability``: mean q of the child; ``acceptance``:
    share of starts whose next token it is; None in an empty interval.
    """

    edges: tuple[float, ...]
    count: tuple[int, ...]
    probability: tuple[tuple[float | None, ...], ...]
    acceptance: tuple[tuple[float | None, ...], ...]

    @property
    def difference(self) -> tuple[tuple[float | None, ...], ...]:
        """Acceptance minus probability: positive where q underestimates."""
        rows = zip(self.acceptance, self.probability, strict=True)
        return tuple(
            tuple(None if a is None or p is None else a - p for a, p in zip(x, y, strict=True))
            for x, y in rows
        )


def heat(forest: Forest, ranks: int, intervals: int = INTERVALS) -> Heat:
    """The heat maps: ``intervals`` of equal width up to the 99th percentile of the entropies."""
    entropy = forest.entropy[forest.root].astype(np.int64)
    ranks = min(ranks, forest.width)
    q = child_probabilities(forest.logp[forest.root], forest.count[forest.root])[:, :ranks]
    hit = forest.text_slot[forest.root][:, None] == np.arange(ranks)
    top = max(intervals, int(np.percentile(entropy, 99)) + 1 if len(entropy) else 0)
    edges = np.round(np.linspace(0, top, intervals + 1)).astype(np.int64)
    row = np.searchsorted(edges[1:-1], entropy, side="right")
    count = np.bincount(row, minlength=intervals)

    def means(values: npt.NDArray[Any]) -> tuple[tuple[float | None, ...], ...]:
        found = (values[row == i] for i in range(intervals))
        return tuple(
            tuple(float(v) for v in part.mean(0)) if len(part) else (None,) * ranks
            for part in found
        )

    return Heat(
        tuple(float(e) / TREE_SCALE for e in edges),
        tuple(int(c) for c in count),
        means(q),
        means(hit),
    )


@dataclass(frozen=True)
class BinLines:
    """Entropy bins over the (Phi, rank) data of starts with something accepted.

    ``thresholds`` of the artifact in nat, scaled from the depth it was fitted at to that of the
    report; ``starts`` and ``mean_tcr`` by bin (None in an empty one). Empty without an
    ``artifact``.
    """

    artifact: str
    thresholds: tuple[float, ...]
    starts: tuple[int, ...]
    mean_tcr: tuple[float | None, ...]


def bin_lines(
    starts: Starts, depth: int, thresholds: Sequence[int], fitted_depth: int, artifact: str
) -> BinLines:
    """Where the bins fall; a start's bin is decided as decoding decides it."""
    some = starts.tcr > 0
    phi, tcr = starts.phi[some], starts.tcr[some]
    place = (phi[:, None] * fitted_depth > np.asarray(thresholds, dtype=np.int64) * depth).sum(1)
    rows = [tcr[place == b] for b in range(len(thresholds) + 1)]
    return BinLines(
        artifact,
        tuple(t * depth / fitted_depth / TREE_SCALE for t in thresholds),
        tuple(len(r) for r in rows),
        tuple(float(r.mean()) if len(r) else None for r in rows),
    )


@dataclass(frozen=True)
class PhiGrid:
    """Starts with something accepted by Phi (columns of ``width`` nat from 0) and rank (rows of
    ``height`` ranks from 1)."""

    width: float
    height: int
    count: tuple[tuple[int, ...], ...]


def phi_grid(starts: Starts, top_n: int, columns: int = 40, rows: int = 24) -> PhiGrid:
    """The joint distribution of Phi and rank."""
    some = starts.tcr > 0
    phi, tcr = starts.phi[some], starts.tcr[some]
    width = max(1, -(-(int(phi.max(initial=0)) + 1) // columns))
    height = max(1, -(-top_n // rows))
    shape = (-(-top_n // height), int(phi.max(initial=0)) // width + 1)
    flat = (tcr - 1) // height * shape[1] + phi // width
    count = np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape)
    return PhiGrid(width / TREE_SCALE, height, tuple(tuple(int(c) for c in row) for row in count))


@dataclass(frozen=True)
class ByGamma:
    """tau at one window: of the chain, and of the tree."""

    gamma: int
    chain: float
    tree: float


@dataclass(frozen=True)
class ByCategory:
    """One category under the chain and the tree at full depth: tau, and accepted over drafted
    tokens."""

    category: str
    requests: int
    chain_tau: float
    tree_tau: float
    chain_acceptance: float
    tree_acceptance: float


@dataclass(frozen=True)
class Point:
    """One policy: ``tau``, and verified tokens (roots included) per token of text (C2T's gamma over
    the texts' length) and per round.

    ``origin``: ``grid``, ``study``, or ``run`` (replayed or executed before). ``missing``: the
    share of its rounds that read a distribution which was not recorded, taken as one without
    children.
    """

    family: str
    label: str
    policy: str
    tau: float
    per_token: float
    per_round: float
    origin: str = "grid"
    missing: float = 0.0


@dataclass(frozen=True)
class TreeReport:
    """All figures. ``skipped``: what could not be replayed, and why; ``about``: what the page's
    head says."""

    draft: str
    proposals: Proposals
    top_n: int
    width: int
    depth: int
    tokens: int
    ranks: RankProfile
    heat: Heat
    grid: PhiGrid
    bins: BinLines
    gammas: tuple[ByGamma, ...]
    categories: tuple[ByCategory, ...]
    points: tuple[Point, ...]
    skipped: tuple[str, ...] = ()
    about: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "about": dict(self.about)}


@dataclass(frozen=True)
class Stored:
    """Something fitted, as it is stored: ``id``, ``kind``, and for bins their thresholds and fitted
    depth."""

    id: str
    kind: str
    thresholds: tuple[int, ...] = ()
    depth: int = 1


@dataclass(frozen=True)
class TreeShape:
    """EAGLE-2's tree of a draft with a fixed depth, of which ``top_n`` nodes are kept."""

    draft: str
    width: int
    depth: int
    top_n: int
    proposals: Proposals = "coupled"

    @property
    def policy(self) -> Policy:
        return self.with_top_n(self.top_n)

    def with_top_n(self, top_n: int, bins: Stratify | None = None) -> Policy:
        """The policy of a tree that keeps another number of nodes, and of other trees by
        ``bins``."""
        growth = TopKGrowth(width=self.width, proposals=self.proposals)
        window, select = FixedWindow(gamma=self.depth), Select(top_n=min(top_n, NODE_LIMIT))
        blocks = {"growth": growth, "window": window, "select": select, "stratify": bins}
        return parse_plain_policy({"draft": self.draft, **blocks})


def family(policy: Policy) -> str:
    """The curve a policy belongs to."""
    growth = policy.growth
    if policy.stratify is not None:
        return "HeteroSpec"
    if isinstance(growth, TopKGrowth) and growth.width > 1:
        return "EAGLE-2"
    if isinstance(growth, (ClassifierGrowth, StaticGrowth)):
        return "C2T" if isinstance(growth, ClassifierGrowth) else "static"
    return "chain"


def point_of(
    policy: Policy, counts: Counts, origin: str = "grid", missing: float = 0.0, *, label: str = ""
) -> Point:
    """The point of what a policy did."""
    verified = counts.verified_tokens
    return Point(
        family(policy),
        label or policy.label(),
        policy.id,
        counts.mean_accepted_length,
        verified / max(1, counts.emitted_tokens),
        verified / max(1, counts.rounds),
        origin,
        missing,
    )


def grid_policies(forest: Forest, shape: TreeShape, stored: Sequence[Stored]) -> list[Policy]:
    """What is replayed on the spot: EAGLE-2 at every N, the best static trees of these sizes, and
    whatever was fitted."""
    depth, width, proposals = shape.depth, shape.width, shape.proposals
    found = [shape.with_top_n(n) for n in sorted({*TOP_NS, shape.top_n})]

    def add(growth: StaticGrowth | ClassifierGrowth, gamma: int) -> None:
        found.append(
            parse_plain_policy(
                {"draft": shape.draft, "window": FixedWindow(gamma=gamma), "growth": growth}
            )
        )

    chances = (forest.text_slot[forest.root][:, None] == np.arange(width)).mean(0)
    trees = best_static_tree(chances, max_nodes=max(TOP_NS), max_depth=depth)
    for n in TOP_NS:
        deepest = min(depth, n)
        if np.isfinite(trees.accepted[n, deepest]) and (paths := trees.paths(n, deepest)):
            add(StaticGrowth(paths=paths, proposals=proposals), max(len(path) for path in paths))
    for one in stored:
        if one.kind == STATIC_TREE:
            add(StaticGrowth(artifact=one.id, proposals=proposals), depth)
        elif one.kind == CLASSIFIER:
            for beta in BETAS:
                add(
                    ClassifierGrowth(
                        artifact=one.id, width=width, cap=width, beta=beta, proposals=proposals
                    ),
                    depth,
                )
        elif one.kind == BINS:
            # The extended trees end at the report's depth: deeper distributions may not have been
            # recorded.
            plain = replace(shape, depth=max(1, depth - EXTENSION))
            bins = Stratify(artifact=one.id, alpha=depth - plain.depth)
            found += [plain.with_top_n(n, bins) for n in TOP_NS if n >= 8]
    return list({p.id: p for p in found}.values())


def replay_points(
    trace: ReplayTrace,
    wanted: Iterable[tuple[Policy, str]],
    artifacts: Artifacts | None,
    profile: LatencyProfile | None,
    progress: Callable[[], None],
) -> tuple[list[Point], list[str]]:
    """The points of policies, each given with its origin, and what could not be replayed for want
    of distributions or artifacts, and why."""
    found: list[Point] = []
    skipped: list[str] = []
    for policy, origin in wanted:
        try:
            priced = profile if policy.needs_profile else None
            ran = run_replay(trace, policy, priced, artifacts=artifacts, approximate=True)
        except SpectuneError as error:
            skipped.append(f"{policy.label()}: {error}")
        else:
            missing = ran.missing / max(1, ran.total.rounds)
            if missing > MISSING_MAX:
                skipped.append(
                    f"{policy.label()}: {missing:.0%} of its rounds read distributions that were "
                    "not recorded (record them with --cover)"
                )
            else:
                found.append(point_of(policy, ran.total, origin, missing))
        progress()
    return found, skipped


def _replayed(
    trace: ReplayTrace, shapes: Iterable[TreeShape], progress: Callable[[], None]
) -> list[Replay]:
    """Trees that must replay, one by one."""
    found = []
    for shape in shapes:
        found.append(run_replay(trace, shape.policy))
        progress()
    return found


def tree_report(
    trace: ReplayTrace,
    shape: TreeShape,
    *,
    stored: Sequence[Stored] = (),
    tried: Iterable[tuple[Policy, str]] = (),
    points: Sequence[Point] = (),
    artifacts: Artifacts | None = None,
    profile: LatencyProfile | None = None,
    about: Sequence[tuple[str, str]] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TreeReport:
    """The figures of a trace that holds the trees of a draft, for a tree of this shape.

    ``stored``: what was fitted to this draft, newest first (the bins drawn are the first ones);
    ``tried``: further policies to replay, each with its origin; ``points``: some that are known
    already. Raises TraceError if the trees are not wide or deep enough.
    """
    draft, depth, top_n = shape.draft, shape.depth, shape.top_n
    rules = compile_plan(shape.policy, [draft]).rules
    assert rules is not None
    table, forest = trace.growth(shape.policy, rules), trace.forests[draft, shape.proposals]
    starts = starts_of(table, forest.limit, top_n)
    bins = next((s for s in stored if s.kind == BINS), None)
    wanted = {p.id: (p, "grid") for p in grid_policies(forest, shape, stored)}
    for policy, origin in tried:
        wanted.setdefault(policy.id, (policy, origin))
    total = 2 * depth + len(wanted)
    done = itertools.count(1)

    def step() -> None:
        progress(next(done), total)

    gammas = range(1, depth + 1)
    narrow = [replace(shape, width=1, depth=gamma, top_n=gamma) for gamma in gammas]
    chains = _replayed(trace, narrow, step)
    trees = _replayed(trace, [replace(shape, depth=gamma) for gamma in gammas], step)
    replayed, skipped = replay_points(trace, wanted.values(), artifacts, profile, step)
    of_chains = [
        point_of(one.policy, ran.total, label=f"{draft} chain(gamma={one.depth})")
        for one, ran in zip(narrow, chains, strict=True)
    ]
    taus = (
        (c.total.mean_accepted_length, t.total.mean_accepted_length)
        for c, t in zip(chains, trees, strict=True)
    )
    return TreeReport(
        **asdict(shape),
        tokens=trace.tokens,
        ranks=rank_profile(starts, top_n),
        heat=heat(forest, shape.width),
        grid=phi_grid(starts, top_n),
        bins=BinLines("", (), (), ())
        if bins is None
        else bin_lines(starts, depth, bins.thresholds, bins.depth, bins.id),
        gammas=tuple(ByGamma(gamma, *tau) for gamma, tau in enumerate(taus, start=1)),
        categories=_by_category(chains[-1], trees[-1]),
        points=(*points, *of_chains, *replayed),
        skipped=tuple(skipped),
        about=tuple(about),
    )


def _by_category(chain: Replay, tree: Replay) -> tuple[ByCategory, ...]:
    of_chain = chain.outcome().by_category
    return tuple(
        ByCategory(
            name,
            counts.requests,
            of_chain[name].mean_accepted_length,
            counts.mean_accepted_length,
            of_chain[name].accepted_tokens / max(1, of_chain[name].drafted_tokens),
            counts.accepted_tokens / max(1, counts.drafted_tokens),
        )
        for name, counts in tree.outcome().by_category.items()
    )
