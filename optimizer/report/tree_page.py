"""The tree report: the figures of the tree papers, of a recording's draft trees. Numbers come from
:mod:`optimizer.report.trees`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import Final

from spectune.optimizer.report.charts import (
    Cell,
    Curve,
    Dot,
    Figure,
    Plot,
    bars,
    curves,
    document,
    dot_rows,
    folded,
    section,
    table,
)
from spectune.optimizer.report.trees import FAMILIES, SHARES, Point, TreeReport

PROMINENT: Final = 0.05
"""Share of the starts from which a rank's bar is drawn in the second colour."""
SKIPPED_SHOWN: Final = 20
MOST_LABELLED: Final = 8
"""Columns of a heat map whose cells have their numbers written in them."""


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    text: int = 0,
    summary: str = "Numbers",
) -> str:
    return folded(table(columns, rows, text=text), summary)


def _ranks(r: TreeReport) -> Iterator[Figure]:
    """The distribution of the Terminal Confidence Rank, and what goes with it."""
    profile, n = r.ranks, r.top_n
    some = profile.starts - profile.count[0]
    shares = [None, *(c / max(1, some) for c in profile.count[1:])]
    low, middle, high = profile.quartiles
    rank_name = "Terminal Confidence Rank"

    def by_rank(values: Sequence[float | None], y_name: str, unit: str) -> Plot:
        given = []
        for rank, (value, count, share) in enumerate(
            zip(values, profile.count, shares, strict=True)
        ):
            if rank and value is not None:
                class_ = "f2" if (share or 0.0) >= PROMINENT else "f1"
                given.append((rank, value, class_, f"rank {rank}: {value:{unit}} ({count} starts)"))
        return bars(rank_name, y_name, given, n)

    yield Figure(
        "ranks",
        f"Terminal Confidence Rank among the N = {n} kept nodes",
        f"Of {profile.starts} starts {some} had a drafted token accepted; the deepest accepted "
        f"node was in the cheapest quarter of N in {profile.top_quarter:.1%} of them. Quartiles of "
        f"the rank: {low}, {middle}, {high}. Ranks of at least {PROMINENT:.0%} of the starts in "
        "the second colour (HeteroSpec, figure 1c).",
        by_rank(shares, "share of starts", ".1%"),
        _table(("rank", "starts", "share"), zip(range(n + 1), profile.count, shares, strict=True)),
    )
    within = [
        (share, y, f"{y:.1%} within {share:.0%} of N")
        for share, y in zip(SHARES, profile.within, strict=True)
    ]
    yield Figure(
        "within",
        "Starts within the best share of N",
        "Share of the starts with a drafted token accepted whose rank is within each share of N "
        "(HeteroSpec, figure 1e).",
        curves("share of N", "share of starts", [("", "1", within, True)]),
    )

    def mean(
        name: str, values: Sequence[float | None], y_name: str, title: str, caption: str
    ) -> Figure:
        rows = zip(range(n + 1), profile.count, values, strict=True)
        plot = by_rank(values, y_name, ".2f")
        return Figure(name, title, caption, plot, _table(("rank", "starts", y_name), rows))

    said = (
        "Mean drafted tokens accepted of the starts with each rank (HeteroSpec, figures 1d, 3); "
        "frequent ranks in the second colour."
    )
    yield mean("accepted", profile.accepted, "accepted tokens", "Accepted length by rank", said)
    said = (
        "Mean of the summed top-10 entropies along the most confident path (HeteroSpec, equation 1 "
        "and figure 4)."
    )
    yield mean("phi", profile.phi, "Phi (nat)", "Phi by rank", said)


def _heat(r: TreeReport) -> Iterator[Figure]:
    """C2T's heat maps: probability, acceptance, and their difference by entropy and rank."""
    heat = r.heat
    spans = [
        f"{low:.2f} to {high:.2f}" for low, high in zip(heat.edges, heat.edges[1:], strict=False)
    ]
    spans[-1] = f"{heat.edges[-2]:.2f} and more"
    kinds = {
        "probability": (
            "Probability by entropy and rank",
            "Mean of the draft's probability of each child; rows: entropy of the distribution in "
            "nat (starts) (C2T, figure 2a).",
        ),
        "acceptance": (
            "Acceptance by entropy and rank",
            "Share of starts whose next token is that child (C2T, figure 2b).",
        ),
        "difference": (
            "Acceptance minus probability",
            "First colour: accepted more often than its probability says; second colour: less "
            "often (C2T, figure 2c).",
        ),
    }
    for name, (title, caption) in kinds.items():
        values = getattr(heat, name)
        columns = len(values[0])
        largest = max((abs(v) for row in values for v in row if v is not None), default=1.0) or 1.0
        plot = Plot((0, columns), (0, len(values)), height=58 + 24.0 * len(values), left=56)
        plot.text(
            0,
            0,
            "entropy (nat), from",
            transform=f"translate(13 {(plot.height - 30) / 2:.0f}) rotate(-90)",
        )
        for i, (span, row) in enumerate(zip(spans, values, strict=True)):
            middle = plot.at(0, i + 0.5)[1] + 4
            plot.text(50, middle, f"{heat.edges[i]:.2f}", "end")
            for k, value in enumerate(row):
                if value is not None:
                    look = {
                        "class_": "f2" if value < 0 else "f1",
                        "fill_opacity": 0.6 * abs(value) / largest,
                    }
                    plot.box(k, i, 1, 1, f"entropy {span} nat, rank {k + 1}: {value:.3f}", **look)
                    if columns <= MOST_LABELLED:
                        plot.text(
                            plot.at(k + 0.5, 0)[0],
                            middle,
                            f"{value:.2f}".replace("0.", "."),
                            class_="strong",
                        )
        for k in range(columns):
            plot.text(plot.at(k + 0.5, 0)[0], plot.height - 28, str(k + 1))
        plot.text(plot.at(columns / 2, 0)[0], plot.height - 6, "rank of the child")
        numbers = [(s, c, *row) for s, c, row in zip(spans, heat.count, values, strict=True)]
        names = ("entropy (nat)", "starts", *(str(k + 1) for k in range(columns)))
        yield Figure(name, title, caption, plot, _table(names, numbers, text=1))


def _gamma(r: TreeReport) -> Figure:
    def points(taus: Iterable[float]) -> list[tuple[float, float, str]]:
        return [
            (float(g.gamma), tau, f"gamma {g.gamma}: tau {tau:.3f}")
            for g, tau in zip(r.gammas, taus, strict=True)
        ]

    chain, tree = points(g.chain for g in r.gammas), points(g.tree for g in r.gammas)
    named = f"tree, width {r.width}, N = {r.top_n}"
    given: list[Curve] = [("chain", "1", chain, True), (named, "2", tree, True)]
    plot = curves("window gamma (levels)", "tokens a round (tau)", given)
    names = [(name, colour) for name, colour, _, _ in given]
    return Figure(
        "gamma",
        "Acceptance by window, as replay predicts it",
        "Tokens a round (the target's own included) of fixed windows over the recorded texts.",
        plot,
        _table(("gamma", "chain tau", "tree tau"), [(g.gamma, g.chain, g.tree) for g in r.gammas]),
        names,
    )


def _of_point(p: Point) -> str:
    said = (
        f"{p.label}: tau {p.tau:.3f}, {p.per_token:.2f} verified per token, {p.per_round:.1f} a "
        f"round ({p.origin})"
    )
    return said + (f", {p.missing:.1%} of its rounds approximate" if p.missing else "")


def _verified(r: TreeReport) -> Figure:
    points = sorted(r.points, key=lambda p: (FAMILIES.index(p.family), p.per_token))
    given: list[Curve] = []
    for family in dict.fromkeys(p.family for p in points):
        for tried in (False, True):
            own = [p for p in points if p.family == family and (p.origin != "grid") == tried]
            if own:
                series = [(p.per_token, p.tau, _of_point(p), p.missing > 0) for p in own]
                name, joined = (
                    (f"{family}, tried", False)
                    if tried
                    else (family, family in ("chain", "EAGLE-2", "static"))
                )
                given.append((name, str(FAMILIES.index(family) + 1), series, joined))
    low = max(0.0, 0.95 * min((p.tau for p in points), default=1.0))
    plot = curves(
        "verified tokens per token of text", "tokens a round (tau)", given, low, height=320
    )
    rows: list[tuple[Cell, ...]] = [
        (p.family, p.label, p.origin, p.tau, p.per_token, p.per_round, p.missing) for p in points
    ]
    names = (
        "family",
        "policy",
        "origin",
        "tau",
        "verified per token",
        "verified per round",
        "approximate",
    )
    numbers = _table(names, rows, text=3, summary=f"{len(rows)} policies")
    if r.skipped:
        more = len(r.skipped) - SKIPPED_SHOWN
        listed = [
            (s,) for s in [*r.skipped[:SKIPPED_SHOWN], *([f"… {more} more"] if more > 0 else [])]
        ]
        numbers += _table(
            ("policy and reason",), listed, text=1, summary=f"{len(r.skipped)} policies left out"
        )
    return Figure(
        "verified",
        "Tokens a round against verified tokens",
        "Every policy replayed here or tried before: higher and further left is better (C2T, "
        "figure 4, over the texts' length). Static trees are the best for these very texts. Hollow "
        "marks: a few of the policy's rounds read distributions that were not recorded.",
        plot,
        numbers,
        [(name, colour) for name, colour, _, _ in given],
    )


def _bins(r: TreeReport) -> Figure:
    grid, bins = r.grid, r.bins
    right = max(len(grid.count[0]) * grid.width, *(t * 1.05 for t in bins.thresholds), grid.width)
    plot = Plot((0.0, right), (0.5, len(grid.count) * grid.height + 0.5), height=340)
    plot.axes("Phi (nat)", "Terminal Confidence Rank")
    most = max((c for row in grid.count for c in row), default=1) or 1
    for i, row in enumerate(grid.count):
        for j, count in enumerate(row):
            if count:
                first, phi = i * grid.height + 1, j * grid.width
                ranks = f"ranks {first} to {first + grid.height - 1}"
                said = f"Phi {phi:.2f} to {phi + grid.width:.2f} nat, {ranks}: {count} starts"
                look = {"class_": "f1", "fill_opacity": 0.12 + 0.68 * math.sqrt(count / most)}
                plot.box(phi, first - 0.5, grid.width, grid.height, said, **look)
    top = plot.y[1]
    for t in bins.thresholds:
        plot.line([(t, 0.5), (t, top)], "s2 dash")
    edges = [0.0, *bins.thresholds, right]
    for low, high, tcr in zip(edges, edges[1:], bins.mean_tcr, strict=False):
        if tcr is not None and high > low:
            plot.line([(low, tcr), (high, tcr)], "s2")
    caption = "Starts with a drafted token accepted, darker where there are more. " + (
        f"Dashed: the thresholds of bins {bins.artifact}; solid: the mean rank in each bin, over "
        "these starts (the bins are fitted to fully accepted rounds)."
        if bins.artifact
        else "There are no fitted bins of this draft in the database; `fit bins` makes them."
    )
    title = "Phi and rank" + (", with the entropy bins" if bins.artifact else "")
    rows = [
        (i, edges[i], c, m) for i, (c, m) in enumerate(zip(bins.starts, bins.mean_tcr, strict=True))
    ]
    numbers = _table(("bin", "Phi from (nat)", "starts", "mean rank"), rows) if rows else ""
    return Figure("bins", title, caption, plot, numbers)


def _categories(r: TreeReport) -> Figure:
    rows: list[tuple[str, list[Dot]]] = []
    for c in r.categories:
        kinds = (
            ("chain", "1", c.chain_tau, c.chain_acceptance),
            ("tree", "2", c.tree_tau, c.tree_acceptance),
        )
        said = f"drafted tokens accepted ({c.requests} requests)"
        rows.append(
            (
                c.category or "(none)",
                [
                    (t, (None, None), n, f"{k}: tau {t:.3f}, {a:.1%} of its {said}")
                    for k, n, t, a in kinds
                ],
            )
        )
    names = (
        "category",
        "requests",
        "chain tau",
        "tree tau",
        "chain accepted/drafted",
        "tree accepted/drafted",
    )
    return Figure(
        "categories",
        "Acceptance by category",
        f"Windows of {r.depth} levels; the tree has width {r.width} and keeps {r.top_n} nodes.",
        dot_rows("tokens a round (tau)", rows),
        _table(names, [astuple(c) for c in r.categories], text=1),
        [("chain", "1"), ("tree", "2")],
    )


def figures(r: TreeReport) -> list[Figure]:
    """The page's figures, in its order."""
    return [*_ranks(r), *_heat(r), _gamma(r), _verified(r), _bins(r), _categories(r)]


def lead(r: TreeReport) -> str:
    """What the figures are of."""
    children = "by probability"
    if r.proposals == "coupled":
        children += ", with the target's noise above temperature 0"
    return (
        f"Trees of draft {r.draft}: width {r.width}, {r.depth} levels, N = {r.top_n} kept; "
        f"children ranked {children}. Counted over {r.tokens} tokens; nothing here is timed."
    )


def page(r: TreeReport) -> str:
    """The figures as a page of their own."""
    body = section("Figures", *figures(r))
    return document(f"Draft trees of {r.draft}", [lead(r)], r.about, body, "traces report")
