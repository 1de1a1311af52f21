"""The tree report: the figures of the tree papers, of a recording's draft trees. Numbers come from
:mod:`optimizer.report.trees`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from spectune.optimizer.report.charts import (
    Cell,
    Curve,
    Dot,
    Plot,
    curves,
    document,
    dot_rows,
    figure,
    numbers,
    section,
    ticks,
    top,
)
from spectune.optimizer.report.trees import FAMILIES, SHARES, Point, TreeReport

PROMINENT: Final = 0.05
"""Share of the starts from which a rank's bar is drawn in the second colour."""
SKIPPED_SHOWN: Final = 20
MOST_LABELLED: Final = 8
"""Columns of a heat map whose cells have their numbers written in them."""


def _ranks(r: TreeReport) -> Iterator[str]:
    """The distribution of the Terminal Confidence Rank, and what goes with it."""
    counts, n = r.ranks["count"], r.top_n
    starts, some = r.ranks["starts"], r.ranks["starts"] - counts[0]
    shares = [None, *(c / max(1, some) for c in counts[1:])]

    def by_rank(
        name: str,
        values: Sequence[float | None],
        y_name: str,
        unit: str,
        title: str,
        caption: str,
        column: str = "",
    ) -> str:
        plot = Plot((0.5, n + 0.5), (0.0, top(values[1:])))
        plot.axes("Terminal Confidence Rank", y_name, ticks(1, n, 8))
        for rank, value in enumerate(values):
            if rank and value is not None:
                class_ = "f2" if (shares[rank] or 0.0) >= PROMINENT else "f1"
                said = f"rank {rank}: {value:{unit}} ({counts[rank]} starts)"
                plot.box(rank - 0.4, 0.0, 0.8, value, said, class_=class_)
        rows = zip(range(n + 1), counts, values, strict=True)
        return figure(
            name, title, caption, plot, numbers(("rank", "starts", column or y_name), rows)
        )

    low, middle, high = r.ranks["quartiles"]
    yield by_rank(
        "ranks",
        shares,
        "share of starts",
        ".1%",
        f"Terminal Confidence Rank among the N = {n} kept nodes",
        f"Of {starts} starts {some} had a drafted token accepted; the deepest accepted "
        f"node was in the cheapest quarter of N in {r.ranks['top_quarter']:.1%} of them. Quartiles "
        f"of the rank: {low}, {middle}, {high}. Ranks of at least {PROMINENT:.0%} of the starts in "
        "the second colour (HeteroSpec, figure 1c).",
        "share",
    )
    within = [
        (share, y, f"{y:.1%} within {share:.0%} of N")
        for share, y in zip(SHARES, r.ranks["within"], strict=True)
    ]
    yield figure(
        "within",
        "Starts within the best share of N",
        "Share of the starts with a drafted token accepted whose rank is within each share of N "
        "(HeteroSpec, figure 1e).",
        curves("share of N", "share of starts", [("", "1", within, True)]),
    )
    yield by_rank(
        "accepted",
        r.ranks["accepted"],
        "accepted tokens",
        ".2f",
        "Accepted length by rank",
        "Mean drafted tokens accepted of the starts with each rank (HeteroSpec, figures 1d, 3); "
        "frequent ranks in the second colour.",
    )
    yield by_rank(
        "phi",
        r.ranks["phi"],
        "Phi (nat)",
        ".2f",
        "Phi by rank",
        "Mean of the summed top-10 entropies along the most confident path (HeteroSpec, equation 1 "
        "and figure 4).",
    )


def _heat(r: TreeReport) -> Iterator[str]:
    """C2T's heat maps: probability, acceptance, and their difference by entropy and rank."""
    edges = r.heat["edges"]
    spans = [f"{low:.2f} to {high:.2f}" for low, high in pairwise(edges)]
    spans[-1] = f"{edges[-2]:.2f} and more"
    probability, acceptance = r.heat["probability"], r.heat["acceptance"]
    columns = len(probability[0])
    difference = [
        [None if q is None else a - q for a, q in zip(*rows, strict=True)]
        for rows in zip(acceptance, probability, strict=True)
    ]
    for name, values, title, caption in (
        (
            "probability",
            probability,
            "Probability by entropy and rank",
            "Mean of the draft's probability of each child; rows: entropy of the distribution in "
            "nat (starts) (C2T, figure 2a).",
        ),
        (
            "acceptance",
            acceptance,
            "Acceptance by entropy and rank",
            "Share of starts whose next token is that child (C2T, figure 2b).",
        ),
        (
            "difference",
            difference,
            "Acceptance minus probability",
            "First colour: accepted more often than its probability says; second colour: less "
            "often (C2T, figure 2c).",
        ),
    ):
        largest = max((abs(v) for row in values for v in row if v is not None), default=1.0) or 1.0
        plot = Plot((0, columns), (0, len(values)), height=58 + 24.0 * len(values), left=56)
        plot.upright("entropy (nat), from", round((plot.height - 30) / 2))
        for i, (span, row) in enumerate(zip(spans, values, strict=True)):
            middle = plot.at(0, i + 0.5)[1] + 4
            plot.text(50, middle, f"{edges[i]:.2f}", "end")
            for k, value in enumerate(row):
                if value is None:
                    continue
                said = f"entropy {span} nat, rank {k + 1}: {value:.3f}"
                class_, opacity = "f2" if value < 0 else "f1", 0.6 * abs(value) / largest
                plot.box(k, i, 1, 1, said, class_=class_, fill_opacity=opacity)
                if columns <= MOST_LABELLED:
                    label = f"{value:.2f}".replace("0.", ".")
                    plot.text(plot.at(k + 0.5, 0)[0], middle, label, class_="strong")
        for k in range(columns):
            plot.text(plot.at(k + 0.5, 0)[0], plot.height - 28, str(k + 1))
        plot.text(plot.at(columns / 2, 0)[0], plot.height - 6, "rank of the child")
        rows = [(s, c, *row) for s, c, row in zip(spans, r.heat["count"], values, strict=True)]
        names = ("entropy (nat)", "starts", *(str(k + 1) for k in range(columns)))
        yield figure(name, title, caption, plot, numbers(names, rows, text=1))


def _gamma(r: TreeReport) -> str:
    def curve(name: str, colour: str, kind: str) -> Curve:
        points = [
            (float(g["gamma"]), g[kind], f"gamma {g['gamma']}: tau {g[kind]:.3f}") for g in r.gammas
        ]
        return name, colour, points, True

    tree = curve(f"tree, width {r.width}, N = {r.top_n}", "2", "tree")
    given = [curve("chain", "1", "chain"), tree]
    return figure(
        "gamma",
        "Acceptance by window, as replay predicts it",
        "Tokens a round (the target's own included) of fixed windows over the recorded texts.",
        curves("window gamma (levels)", "tokens a round (tau)", given),
        numbers(("gamma", "chain tau", "tree tau"), [tuple(g.values()) for g in r.gammas]),
    )


def _of_point(p: Point) -> str:
    said = (
        f"{p.label}: tau {p.tau:.3f}, {p.per_token:.2f} verified per token, {p.per_round:.1f} a "
        f"round ({p.origin})"
    )
    return said + (f", {p.missing:.1%} of its rounds approximate" if p.missing else "")


def _verified(r: TreeReport) -> str:
    points = sorted(r.points, key=lambda p: (FAMILIES.index(p.family), p.per_token))
    groups: dict[tuple[str, bool], list[Any]] = {}
    for p in sorted(points, key=lambda p: (FAMILIES.index(p.family), p.origin != "grid")):
        mark = (p.per_token, p.tau, _of_point(p), p.missing > 0)
        groups.setdefault((p.family, p.origin != "grid"), []).append(mark)
    given: list[Curve] = [
        (
            f"{family}, tried" if tried else family,
            str(FAMILIES.index(family) + 1),
            series,
            not tried and family in ("chain", "EAGLE-2", "static"),
        )
        for (family, tried), series in groups.items()
    ]
    low = max(0.0, 0.95 * min((p.tau for p in points), default=1.0))
    names = ("family", "policy", "origin", "tau", "verified per token", "verified per round")
    rows = [
        (p.family, p.label, p.origin, p.tau, p.per_token, p.per_round, p.missing) for p in points
    ]
    table = numbers((*names, "approximate"), rows, text=3, summary=f"{len(rows)} policies")
    if r.skipped:
        more = len(r.skipped) - SKIPPED_SHOWN
        listed = [*r.skipped[:SKIPPED_SHOWN], *([f"… {more} more"] if more > 0 else [])]
        summary = f"{len(r.skipped)} policies left out"
        table += numbers(("policy and reason",), zip(listed), text=1, summary=summary)
    return figure(
        "verified",
        "Tokens a round against verified tokens",
        "Every policy replayed here or tried before: higher and further left is better (C2T, "
        "figure 4, over the texts' length). Static trees are the best for these very texts. Hollow "
        "marks: a few of the policy's rounds read distributions that were not recorded.",
        curves("verified tokens per token of text", "tokens a round (tau)", given, low, height=320),
        table,
    )


def _bins(r: TreeReport) -> str:
    width, height, counts, bins = r.grid["width"], r.grid["height"], r.grid["count"], r.bins
    thresholds = bins["thresholds"]
    right = max(len(counts[0]) * width, *(t * 1.05 for t in thresholds), width)
    plot = Plot((0.0, right), (0.5, len(counts) * height + 0.5), height=340)
    plot.axes("Phi (nat)", "Terminal Confidence Rank")
    most = max((c for row in counts for c in row), default=1) or 1
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            if count:
                first, phi = i * height + 1, j * width
                said = (
                    f"Phi {phi:.2f} to {phi + width:.2f} nat, ranks {first} to "
                    f"{first + height - 1}: {count} starts"
                )
                opacity = 0.12 + 0.68 * math.sqrt(count / most)
                plot.box(phi, first - 0.5, width, height, said, class_="f1", fill_opacity=opacity)
    for t in thresholds:
        plot.line([(t, 0.5), (t, plot.y[1])], "s2 dash")
    edges = [0.0, *thresholds, right]
    for low, high, tcr in zip(edges, edges[1:], bins["mean_tcr"], strict=False):
        if tcr is not None and high > low:
            plot.line([(low, tcr), (high, tcr)], "s2")
    title = "Phi and rank"
    said = "There are no fitted bins of this draft in the database; `fit bins` makes them."
    if bins["artifact"]:
        title += ", with the entropy bins"
        said = (
            f"Dashed: the thresholds of bins {bins['artifact']}; solid: the mean rank in each bin, "
            "over these starts (the bins are fitted to fully accepted rounds)."
        )
    rows: list[Sequence[Cell]] = [
        (i, *row)
        for i, row in enumerate(zip(edges, bins["starts"], bins["mean_tcr"], strict=False))
    ]
    names = ("bin", "Phi from (nat)", "starts", "mean rank")
    return figure(
        "bins",
        title,
        f"Starts with a drafted token accepted, darker where there are more. {said}",
        plot,
        numbers(names, rows) if rows else "",
    )


def _categories(r: TreeReport) -> str:
    def dot(c: Any, kind: str, colour: str) -> Dot:
        tau, share = c[f"{kind}_tau"], c[f"{kind}_acceptance"]
        said = f"{kind}: tau {tau:.3f}, {share:.1%} of its drafted tokens accepted"
        return tau, (None, None), colour, f"{said} ({c['requests']} requests)"

    plot = dot_rows(
        "tokens a round (tau)",
        [
            (c["category"] or "(none)", [dot(c, "chain", "1"), dot(c, "tree", "2")])
            for c in r.categories
        ],
    )
    plot.legend = [("chain", "1"), ("tree", "2")]
    names = ("category", "requests", "chain tau", "tree tau")
    shares = ("chain accepted/drafted", "tree accepted/drafted")
    rows = [tuple(c.values()) for c in r.categories]
    return figure(
        "categories",
        "Acceptance by category",
        f"Windows of {r.depth} levels; the tree has width {r.width} and keeps {r.top_n} nodes.",
        plot,
        numbers((*names, *shares), rows, text=1),
    )


def figures(r: TreeReport) -> list[str]:
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
