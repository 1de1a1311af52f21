"""The figures of the tree papers for one recording and draft, as numbers: HeteroSpec's figures 1, 3
and 4, C2T's 2 and 4.

Everything is counted over recorded starts or replayed, so nothing is sampled or executed here.
:mod:`optimizer.report.tree_page` draws it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

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
Json = Mapping[str, Any]


class Starts(NamedTuple):
    """What one tree does from every start whose budget allows its whole depth; int64 [n] each.

    ``accepted`` drafted tokens; ``tcr``: HeteroSpec's Terminal Confidence Rank, the place from 1 of
    the deepest accepted node among the N kept ones by joint cost, 0 where nothing was accepted;
    ``phi`` in 1/16 nat.
    """

    tcr: Ints
    accepted: Ints
    phi: Ints

    def some(self) -> Starts:
        """Those with something accepted."""
        return Starts(*(column[self.tcr > 0] for column in self))


def starts_of(table: GrowthTable, limit: Ints, top_n: int) -> Starts:
    """The starts of a growth table under a selection of ``top_n``; ``limit`` int64 [positions]: the
    deepest level each may draft."""
    known = limit >= table.depth
    accepted, tcr = terminal_ranks(table, top_n)
    return Starts(tcr[known], accepted[known], table.phi[known, table.depth - 1].astype(np.int64))


def _means(values: npt.NDArray[Any], group: Ints, groups: int) -> list[Any]:
    """The mean of the values [n] or [n, k] in each group, None in an empty one."""
    parts = (values[group == i] for i in range(groups))
    return [part.mean(0).tolist() if len(part) else None for part in parts]


def rank_profile(starts: Starts, top_n: int) -> Json:
    """Starts by Terminal Confidence Rank 0..N (0: nothing accepted): their ``count``, mean drafted
    tokens ``accepted``, mean ``phi`` in nat (None: no start has that rank).

    Of starts with something accepted: the share ``within`` each share of N in ``SHARES``; within
    the ``top_quarter`` of N; ``quartiles``: the ranks below which 1/4, 1/2, 3/4 of them lie.
    """
    some = np.sort(starts.some().tcr)

    def share(most: float) -> float:
        return float((some <= most).mean()) if len(some) else 0.0

    return {
        "starts": len(starts.tcr),
        "count": np.bincount(starts.tcr, minlength=top_n + 1).tolist(),
        "accepted": _means(starts.accepted, starts.tcr, top_n + 1),
        "phi": _means(starts.phi / TREE_SCALE, starts.tcr, top_n + 1),
        "within": [share(s * top_n) for s in SHARES],
        "top_quarter": share(0.25 * top_n),
        "quartiles": [int(some[int(q * len(some))]) if len(some) else 0 for q in (0.25, 0.5, 0.75)],
    }


def heat(forest: Forest, ranks: int) -> Json:
    """C2T's figure 2 from the distributions at the recorded texts' own prefixes: rows are
    :data:`INTERVALS` of entropy, of equal width up to the 99th percentile, columns child ranks.

    Interval i holds entropies from ``edges[i]`` to below ``edges[i + 1]`` nat, the last one
    everything above. ``count`` starts each; ``probability``: mean q of the child; ``acceptance``:
    share of starts whose next token it is; None in an empty interval.
    """
    entropy = forest.entropy[forest.root].astype(np.int64)
    ranks = min(ranks, forest.width)
    q = child_probabilities(forest.logp[forest.root], forest.count[forest.root])[:, :ranks]
    hit = forest.text_slot[forest.root][:, None] == np.arange(ranks)
    top = max(INTERVALS, int(np.percentile(entropy, 99)) + 1 if len(entropy) else 0)
    edges = np.round(np.linspace(0, top, INTERVALS + 1)).astype(np.int64)
    row = np.searchsorted(edges[1:-1], entropy, side="right")
    probability, acceptance = (
        [means or [None] * ranks for means in _means(values, row, INTERVALS)] for values in (q, hit)
    )
    return {
        "edges": (edges / TREE_SCALE).tolist(),
        "count": np.bincount(row, minlength=INTERVALS).tolist(),
        "probability": probability,
        "acceptance": acceptance,
    }


def phi_grid(starts: Starts, top_n: int, columns: int = 40, rows: int = 24) -> Json:
    """Starts with something accepted by Phi (columns of ``width`` nat from 0) and rank (rows of
    ``height`` ranks from 1)."""
    tcr, _, phi = starts.some()
    width = max(1, -(-(int(phi.max(initial=0)) + 1) // columns))
    height = max(1, -(-top_n // rows))
    shape = (-(-top_n // height), int(phi.max(initial=0)) // width + 1)
    flat = (tcr - 1) // height * shape[1] + phi // width
    count = np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape)
    return {"width": width / TREE_SCALE, "height": height, "count": count.tolist()}


@dataclass(frozen=True)
class Stored:
    """Something fitted, as it is stored: ``id``, ``kind``, and for bins their thresholds and fitted
    depth."""

    id: str
    kind: str
    thresholds: tuple[int, ...] = ()
    depth: int = 1


def bin_lines(starts: Starts, depth: int, bins: Stored | None) -> Json:
    """Where entropy bins fall in the (Phi, rank) data of starts with something accepted; a start's
    bin is decided as decoding decides it.

    ``thresholds`` in nat, scaled from the depth they were fitted at to the report's; ``starts`` and
    ``mean_tcr`` by bin (None in an empty one). All are empty without bins.
    """
    if bins is None:
        return {"artifact": "", "thresholds": [], "starts": [], "mean_tcr": []}
    tcr, _, phi = starts.some()
    place = (phi[:, None] * bins.depth > np.array(bins.thresholds, dtype=np.int64) * depth).sum(1)
    count = len(bins.thresholds) + 1
    return {
        "artifact": bins.id,
        "thresholds": [t * depth / bins.depth / TREE_SCALE for t in bins.thresholds],
        "starts": np.bincount(place, minlength=count).tolist(),
        "mean_tcr": _means(tcr, place, count),
    }


@dataclass(frozen=True)
class Point:
    """One policy: ``tau``, and verified tokens (roots included) per token of text (C2T's gamma over
    the texts' length) and per round.

    ``origin``: ``grid`` or ``study``. ``missing``: the share of its rounds that read a distribution
    which was not recorded, taken as one without children.
    """

    family: str
    label: str
    policy: str
    tau: float
    per_token: float
    per_round: float
    origin: str = "grid"
    missing: float = 0.0


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


@dataclass(frozen=True)
class TreeReport:
    """All figures, JSON-ready: ``ranks`` (:func:`rank_profile`), ``heat`` (:func:`heat`), ``grid``
    (:func:`phi_grid`), ``bins`` (:func:`bin_lines`); by window the ``chain``'s and the ``tree``'s
    tau (``gammas``); at full depth tau and the accepted share of drafted tokens of both, by
    category; ``points``; ``skipped``: what could not be replayed, and why; ``about``: what the
    page's head says."""

    draft: str
    proposals: Proposals
    top_n: int
    width: int
    depth: int
    tokens: int
    ranks: Json
    heat: Json
    grid: Json
    bins: Json
    gammas: Sequence[Json]
    categories: Sequence[Json]
    points: Sequence[Point]
    skipped: Sequence[str] = ()
    about: Sequence[tuple[str, str]] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "about": dict(self.about)}


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
        select = Select(top_n=min(top_n, NODE_LIMIT))
        return self.grown(growth, self.depth, select=select, stratify=bins)

    def grown(
        self, growth: TopKGrowth | StaticGrowth | ClassifierGrowth, gamma: int, **blocks: Any
    ) -> Policy:
        """The draft with another growth under a fixed window."""
        window = FixedWindow(gamma=gamma)
        return parse_plain_policy(
            {"draft": self.draft, "growth": growth, "window": window, **blocks}
        )


def grid_policies(forest: Forest, shape: TreeShape, stored: Sequence[Stored]) -> list[Policy]:
    """What is replayed on the spot: EAGLE-2 at every N, the best static trees of these sizes, and
    whatever was fitted."""
    depth, width, proposals = shape.depth, shape.width, shape.proposals
    found = [shape.with_top_n(n) for n in sorted({*TOP_NS, shape.top_n})]
    chances = (forest.text_slot[forest.root][:, None] == np.arange(width)).mean(0)
    trees = best_static_tree(chances, max_nodes=max(TOP_NS), max_depth=depth)
    for n in TOP_NS:
        deepest = min(depth, n)
        if np.isfinite(trees.accepted[n, deepest]) and (paths := trees.paths(n, deepest)):
            static = StaticGrowth(paths=paths, proposals=proposals)
            found.append(shape.grown(static, max(map(len, paths))))
    for one in stored:
        if one.kind == STATIC_TREE:
            static = StaticGrowth(artifact=one.id, proposals=proposals)
            found.append(shape.grown(static, depth))
        elif one.kind == CLASSIFIER:
            how: dict[str, Any] = {"width": width, "cap": width, "proposals": proposals}
            growths = (ClassifierGrowth(artifact=one.id, beta=beta, **how) for beta in BETAS)
            found += [shape.grown(growth, depth) for growth in growths]
        elif one.kind == BINS:
            # The extended trees end at the report's depth: deeper distributions may not have been
            # recorded.
            plain = replace(shape, depth=max(1, depth - EXTENSION))
            bins = Stratify(artifact=one.id, alpha=depth - plain.depth)
            found += [plain.with_top_n(n, bins) for n in TOP_NS if n >= 8]
    return list({p.id: p for p in found}.values())


def tree_report(
    trace: ReplayTrace,
    shape: TreeShape,
    *,
    stored: Sequence[Stored] = (),
    tried: Iterable[tuple[Policy, str]] = (),
    artifacts: Artifacts | None = None,
    profile: LatencyProfile | None = None,
    about: Sequence[tuple[str, str]] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TreeReport:
    """The figures of a trace that holds the trees of a draft, for a tree of this shape.

    ``stored``: what was fitted to this draft, newest first (the bins drawn are the first ones);
    ``tried``: further policies to replay, each with its origin. Raises TraceError if the trees are
    not wide or deep enough.
    """
    draft, depth, top_n = shape.draft, shape.depth, shape.top_n
    rules = compile_plan(shape.policy, [draft]).rules
    assert rules is not None
    table, forest = trace.growth(shape.policy, rules), trace.forests[draft, shape.proposals]
    starts = starts_of(table, forest.limit, top_n)
    wanted = {p.id: (p, "grid") for p in grid_policies(forest, shape, stored)}
    for policy, origin in tried:
        wanted.setdefault(policy.id, (policy, origin))
    done, total = itertools.count(1), 2 * depth + len(wanted)

    def replayed(policy: Policy, **how: Any) -> Replay:
        try:
            return run_replay(trace, policy, **how)
        finally:
            progress(next(done), total)

    gammas = range(1, depth + 1)
    narrow = [replace(shape, width=1, depth=g, top_n=g).policy for g in gammas]
    chains = [replayed(policy) for policy in narrow]
    trees = [replayed(replace(shape, depth=g).policy) for g in gammas]
    found: list[Point] = []
    for gamma, policy, chain in zip(gammas, narrow, chains, strict=True):
        found.append(point_of(policy, chain.total, label=f"{draft} chain(gamma={gamma})"))
    skipped: list[str] = []
    for policy, origin in wanted.values():
        how = {"profile": profile if policy.needs_profile else None, "artifacts": artifacts}
        try:
            ran = replayed(policy, approximate=True, **how)
        except SpectuneError as error:
            skipped.append(f"{policy.label()}: {error}")
            continue
        missing = ran.missing / max(1, ran.total.rounds)
        if missing > MISSING_MAX:
            skipped.append(
                f"{policy.label()}: {missing:.0%} of its rounds read distributions that were "
                "not recorded (record them with --cover)"
            )
        else:
            found.append(point_of(policy, ran.total, origin, missing))
    return TreeReport(
        **asdict(shape),
        tokens=trace.tokens,
        ranks=rank_profile(starts, top_n),
        heat=heat(forest, shape.width),
        grid=phi_grid(starts, top_n),
        bins=bin_lines(starts, depth, next((s for s in stored if s.kind == BINS), None)),
        gammas=[
            {"gamma": g, "chain": chain, "tree": tree}
            for g, (chain, tree) in enumerate(zip(_taus(chains), _taus(trees), strict=True), 1)
        ],
        categories=_by_category(chains[-1], trees[-1]),
        points=found,
        skipped=skipped,
        about=about,
    )


def _taus(replays: Iterable[Replay]) -> list[float]:
    return [replay.total.mean_accepted_length for replay in replays]


def _by_category(chain: Replay, tree: Replay) -> list[Json]:
    both = {"chain": chain.outcome().by_category, "tree": tree.outcome().by_category}
    rows: list[Json] = []
    for name, counts in both["tree"].items():
        row: dict[str, Any] = {"category": name, "requests": counts.requests}
        row |= {f"{kind}_tau": of[name].mean_accepted_length for kind, of in both.items()}
        for kind, of in both.items():
            accepted, drafted = of[name].accepted_tokens, of[name].drafted_tokens
            row[f"{kind}_acceptance"] = accepted / max(1, drafted)
        rows.append(row)
    return rows
