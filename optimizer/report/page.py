"""The tree report as one page: HTML with inline SVG, no script, no font and no file beside it. Numbers
come from :mod:`optimizer.report.trees`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from html import escape
from typing import Any, Final

from spectune.optimizer.report.trees import FAMILIES, SHARES, TreeReport

WIDE: Final = 960
"""Width of a figure that takes the page's."""
PROMINENT: Final = 0.05
"""Share of the starts from which a rank's bar is drawn in the second colour."""
SKIPPED_SHOWN: Final = 20

STYLE: Final = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2024; --soft: #5c6570; --line: #d5dae0; --grid: #e9ecf0;
  --c1: #2566ae; --c2: #c2560c; --c3: #2a7d48; --c4: #7a45ad; --c5: #a8326a; --panel: #f7f8fa; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e8eaed; --soft: #a3acb6; --line: #3b434c; --grid: #262c32;
  --c1: #6facea; --c2: #f0974e; --c3: #67c78b; --c4: #b897ea; --c5: #ee86b4; --panel: #1b1f24; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.02rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .5rem; } .lead, figcaption p, summary, footer { color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .5rem 1.25rem; margin: 1rem 0 1.5rem;
  padding: .9rem 1rem; background: var(--panel); border: 1px solid var(--line); border-radius: 6px; }
dt { color: var(--soft); font-size: .82rem; } dd { margin: 0; overflow-wrap: anywhere; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.25rem; }
figure { margin: 0; padding: .9rem 1rem; border: 1px solid var(--line); border-radius: 6px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .strong { fill: var(--ink); } svg .axis { stroke: var(--line); } svg .grid { stroke: var(--grid); }
.f1 { fill: var(--c1); } .f2 { fill: var(--c2); } .f3 { fill: var(--c3); } .f4 { fill: var(--c4); } .f5 { fill: var(--c5); }
.s1, .s2, .s3, .s4, .s5 { fill: none; stroke-width: 2; } .s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); } .s3 { stroke: var(--c3); }
.s4 { stroke: var(--c4); } .s5 { stroke: var(--c5); } .dash { stroke-dasharray: 5 4; }
.hollow { fill: var(--page); stroke-width: 1.5; }
details { margin-top: .5rem; overflow-x: auto; font-size: .85rem; } table { border-collapse: collapse; margin-top: .4rem; }
th, td { text-align: right; padding: .1rem .6rem; border-bottom: 1px solid var(--grid);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th.text, td.text { text-align: left; white-space: normal; }
@media print { details { display: none; } figure { break-inside: avoid; } }
"""

Cell = str | int | float | None
Bar = tuple[float, float | None, str, str]
"""(x, height, class, what a browser says of it); no height: no bar."""
Curve = tuple[str, str, Sequence[tuple[float, float, str]], bool]
"""(name, number of its colour, points (x, y, what a browser says of it), whether a line joins them)."""


class Plot:
    """A picture with axes: two linear scales onto a box, and the SVG drawn so far."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], *, width: float = 640, height: float = 300, left: float = 52
    ) -> None:
        self.x, self.y, self.width, self.height, self.left = x, y, width, height, left
        self.parts: list[str] = []

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point of the data lies."""
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        across *= self.width - self.left - 14
        return self.left + across, 14 + (1 - up) * (self.height - 58)

    def add(self, tag: str, content: str = "", title: str = "", **attributes: Any) -> None:
        """One element; ``class_`` is its class, underscores become hyphens, ``title`` what a
        browser shows on it."""
        shown = "".join(
            f' {k.rstrip("_").replace("_", "-")}="{escape(_short(v) if isinstance(v, float) else str(v))}"'
            for k, v in attributes.items()
        )
        inside = (f"<title>{escape(title)}</title>" if title else "") + content
        self.parts.append(f"<{tag}{shown}>{inside}</{tag}>")

    def text(self, x: float, y: float, content: str, anchor: str = "middle", **more: Any) -> None:
        """Text at a place of the picture."""
        self.add("text", escape(content), x=x, y=y, text_anchor=anchor, **more)

    def axes(self, x_name: str, y_name: str, x_ticks: Sequence[float] | None = None) -> None:
        """Ticks, grid lines and the axes' names."""
        (x0, base), (x1, _) = self.at(self.x[0], self.y[0]), self.at(self.x[1], self.y[0])
        for y in ticks(*self.y):
            _, at = self.at(0, y)
            self.add("line", class_="grid", x1=x0, x2=x1, y1=at, y2=at)
            self.text(x0 - 6, at + 4, _short(y), "end")
        for x in ticks(*self.x) if x_ticks is None else x_ticks:
            self.text(self.at(x, 0)[0], base + 16, _short(x))
        self.add("line", class_="axis", x1=x0, x2=x1, y1=base, y2=base)
        self.text((x0 + x1) / 2, self.height - 8, x_name)
        turned = f"translate(13 {_short(base / 2)}) rotate(-90)"
        self.text(0, 0, y_name, transform=turned)

    def box(self, x: float, y: float, width: float, height: float, title: str, **look: Any) -> None:
        """A rectangle between (x, y) and (x + width, y + height) of the data."""
        (x0, y0), (x1, y1) = self.at(x, y + height), self.at(x + width, y)
        wide, high = max(0.5, x1 - x0 - 0.5), max(0.0, y1 - y0)
        self.add("rect", title=title, x=x0, y=y0, width=wide, height=high, **look)

    def line(self, points: Sequence[tuple[float, float]], class_: str) -> None:
        """A broken line through points of the data."""
        places = " ".join(f"{_short(x)},{_short(y)}" for x, y in (self.at(*p) for p in points))
        self.add("polyline", class_=class_, points=places)

    def legend(self, names: Sequence[tuple[str, str]], x: float, y: float) -> None:
        """(name, number of its colour) of each, one below the other from a place of the picture."""
        for i, (name, colour) in enumerate(names):
            self.add("circle", class_=f"f{colour}", cx=x, cy=y + 16 * i, r=4.5)
            self.text(x + 11, y + 4 + 16 * i, name, "start", class_="strong")

    def svg(self, name: str, title: str, description: str) -> str:
        """The picture, named and described for those who do not see it."""
        return (
            f'<svg role="img" viewBox="0 0 {_short(self.width)} {_short(self.height)}" '
            f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(title)}</title>'
            f'<desc id="{name}-d">{escape(description)}</desc>{"".join(self.parts)}</svg>'
        )


@dataclass
class Figure:
    """A picture with its title, caption and numbers."""

    name: str
    title: str
    caption: str
    plot: Plot
    table: str = ""

    def html(self) -> str:
        return (
            f'<figure id="{self.name}"{" class=wide" if self.plot.width > 640 else ""}><figcaption>'
            f"<h2>{escape(self.title)}</h2><p>{escape(self.caption)}</p></figcaption>"
            f"{self.plot.svg(self.name, self.title, self.caption)}{self.table}</figure>"
        )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers in a range, about so many."""
    span = (high - low) or 1.0
    unit: float = 10.0 ** math.floor(math.log10(span / about))
    step = next(m for m in (1, 2, 5, 10) if m * unit >= span / about * 0.999) * unit
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    text = f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "0" if text == "-0" else text


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, text: int = 0, summary: str = "Numbers"
) -> str:
    """A table folded away below a figure; the first ``text`` columns are words."""

    def cell(tag: str, i: int, value: Cell) -> str:
        shown = f"{value:.3f}" if isinstance(value, float) else "–" if value is None else str(value)
        return f"<{tag}{' class=text' if i < text else ''}>{escape(shown)}</{tag}>"

    def line(tag: str, cells: Sequence[Cell]) -> str:
        return f"<tr>{''.join(cell(tag, i, value) for i, value in enumerate(cells))}</tr>"

    return (
        f"<details><summary>{escape(summary)}</summary><table><thead>{line('th', columns)}</thead>"
        f"<tbody>{''.join(line('td', row) for row in rows)}</tbody></table></details>"
    )


def _top(values: Iterable[float | None]) -> float:
    return 1.08 * max((v for v in values if v is not None), default=1.0) or 1.0


def bars(
    x_name: str, y_name: str, given: Sequence[Bar], end: float, *, thick: float = 0.8, **size: float
) -> Plot:
    """Bars around whole numbers from 1 to ``end``."""
    plot = Plot((0.5, end + 0.5), (0.0, _top(y for _, y, _, _ in given)), **size)
    plot.axes(x_name, y_name, ticks(1, end, 8) if thick == 0.8 else [])
    for x, y, class_, said in given:
        if y is not None:
            plot.box(x - thick / 2, 0.0, thick, y, said, class_=class_)
    return plot


def curves(x_name: str, y_name: str, given: Sequence[Curve], low: float = 0.0, **size: float) -> Plot:
    """Series of points, some joined by lines."""
    points = [p for _, _, series, _ in given for p in series]
    plot = Plot((0.0, _top(x for x, _, _ in points)), (low, _top(y for _, y, _ in points)), **size)
    plot.axes(x_name, y_name)
    for _, colour, series, joined in given:
        if joined:
            plot.line([(x, y) for x, y, _ in series], f"s{colour} dash")
        for x, y, said in series:
            at_x, at_y = plot.at(x, y)
            look = f"hollow s{colour}" if said.endswith("approximate") else f"f{colour}"
            plot.add("circle", title=said, class_=look, cx=at_x, cy=at_y, r=4.5)
    if len(given) > 1:
        names = [(name, colour) for name, colour, _, _ in given]
        plot.legend(names, plot.width - 170, plot.height - 50 - 16 * len(names))
    return plot


def _ranks(r: TreeReport) -> Iterator[Figure]:
    """The distribution of the Terminal Confidence Rank, and what goes with it."""
    profile, n = r.ranks, r.top_n
    some = profile.starts - profile.count[0]
    shares = [None, *(c / max(1, some) for c in profile.count[1:])]
    low, middle, high = profile.quartiles
    rank_name = "Terminal Confidence Rank"

    def by_rank(values: Sequence[float | None], y_name: str, unit: str, **size: float) -> Plot:
        given = []
        for rank, (value, count, share) in enumerate(zip(values, profile.count, shares, strict=True)):
            if rank and value is not None:
                class_ = "f2" if (share or 0.0) >= PROMINENT else "f1"
                given.append((rank, value, class_, f"rank {rank}: {value:{unit}} ({count} starts)"))
        return bars(rank_name, y_name, given, n, **size)

    yield Figure(
        "ranks",
        f"Terminal Confidence Rank among the N = {n} kept nodes",
        f"Of {profile.starts} starts {some} had a drafted token accepted; the deepest accepted node was in the "
        f"cheapest quarter of N in {profile.top_quarter:.1%} of them. Quartiles of the rank: {low}, {middle}, "
        f"{high}. Ranks of at least {PROMINENT:.0%} of the starts in the second colour (HeteroSpec, figure 1c).",
        by_rank(shares, "share of starts", ".1%", width=WIDE),
        _table(("rank", "starts", "share"), zip(range(n + 1), profile.count, shares, strict=True)),
    )
    within = [
        (share, y, f"{y:.1%} within {share:.0%} of N")
        for share, y in zip(SHARES, profile.within, strict=True)
    ]
    yield Figure(
        "within",
        "Starts within the best share of N",
        "Share of the starts with a drafted token accepted whose rank is within each share of N (HeteroSpec, figure 1e).",
        curves("share of N", "share of starts", [("", "1", within, True)]),
    )

    def mean(name: str, values: Sequence[float | None], y_name: str, title: str, caption: str) -> Figure:
        rows = zip(range(n + 1), profile.count, values, strict=True)
        plot = by_rank(values, y_name, ".2f")
        return Figure(name, title, caption, plot, _table(("rank", "starts", y_name), rows))

    said = "Mean drafted tokens accepted of the starts with each rank (HeteroSpec, figures 1d, 3); frequent ranks in the second colour."
    yield mean("accepted", profile.accepted, "accepted tokens", "Accepted length by rank", said)
    said = "Mean of the summed top-10 entropies along the most confident path (HeteroSpec, equation 1 and figure 4)."
    yield mean("phi", profile.phi, "Phi (nat)", "Phi by rank", said)


def _heat(r: TreeReport) -> Iterator[Figure]:
    """C2T's heat maps: probability, acceptance, and their difference by entropy and rank."""
    heat = r.heat
    spans = [f"{low:.2f} to {high:.2f}" for low, high in zip(heat.edges, heat.edges[1:], strict=False)]
    spans[-1] = f"{heat.edges[-2]:.2f} and more"
    for name, values, title, caption in (
        (
            "probability",
            heat.probability,
            "Probability by entropy and rank",
            "Mean of the draft's probability of each child; rows: entropy of the distribution in nat "
            "(starts) (C2T, figure 2a).",
        ),
        (
            "acceptance",
            heat.acceptance,
            "Acceptance by entropy and rank",
            "Share of starts whose next token is that child (C2T, figure 2b).",
        ),
        (
            "difference",
            heat.difference,
            "Acceptance minus probability",
            "First colour: accepted more often than its probability says; second colour: less often "
            "(C2T, figure 2c).",
        ),
    ):
        columns = len(values[0])
        largest = max((abs(v) for row in values for v in row if v is not None), default=1.0) or 1.0
        plot = Plot((0, columns), (0, len(values)), height=58 + 34.0 * len(values), left=132)
        for i, (span, row) in enumerate(zip(spans, values, strict=True)):
            middle = plot.at(0, i + 0.5)[1] + 4
            plot.text(124, middle, f"{span} ({heat.count[i]})", "end")
            for k, value in enumerate(row):
                if value is not None:
                    look = {"class_": "f2" if value < 0 else "f1", "fill_opacity": 0.6 * abs(value) / largest}
                    plot.box(k, i, 1, 1, f"entropy {span} nat, rank {k + 1}: {value:.3f}", **look)
                    if columns <= 16:
                        plot.text(plot.at(k + 0.5, 0)[0], middle, f"{value:.2f}", class_="strong")
        for k in range(columns):
            plot.text(plot.at(k + 0.5, 0)[0], plot.height - 28, str(k + 1))
        plot.text(plot.at(columns / 2, 0)[0], plot.height - 6, "rank of the child")
        numbers = [(s, c, *row) for s, c, row in zip(spans, heat.count, values, strict=True)]
        names = ("entropy (nat)", "starts", *(str(k + 1) for k in range(columns)))
        yield Figure(name, title, caption, plot, _table(names, numbers, text=1))


def _gamma(r: TreeReport) -> Figure:
    def points(taus: Iterable[float]) -> list[tuple[float, float, str]]:
        return [(float(g.gamma), tau, f"gamma {g.gamma}: tau {tau:.3f}") for g, tau in zip(r.gammas, taus, strict=True)]

    chain, tree = points(g.chain for g in r.gammas), points(g.tree for g in r.gammas)
    named = f"tree, width {r.width}, N = {r.top_n}"
    given: list[Curve] = [("chain", "1", chain, True), (named, "2", tree, True)]
    plot = curves("window gamma (levels)", "tokens a round (tau)", given)
    return Figure(
        "gamma",
        "Acceptance by window, as replay predicts it",
        "Tokens a round (the target's own included) of fixed windows over the recorded texts.",
        plot,
        _table(("gamma", "chain tau", "tree tau"), [(g.gamma, g.chain, g.tree) for g in r.gammas]),
    )


def _verified(r: TreeReport) -> Figure:
    points = sorted(r.points, key=lambda p: (FAMILIES.index(p.family), p.per_token))
    given: list[Curve] = []
    for family in dict.fromkeys(p.family for p in points):
        for origins, joined in (
            (("grid",), family in ("chain", "EAGLE-2", "static")),
            (("study", "run"), False),
        ):
            series = [
                (
                    p.per_token,
                    p.tau,
                    f"{p.label}: tau {p.tau:.3f}, {p.per_token:.2f} verified per token, {p.per_round:.1f} a round "
                    f"({p.origin})"
                    + (f", {p.missing:.1%} of its rounds approximate" if p.missing else ""),
                )
                for p in points
                if p.family == family and p.origin in origins
            ]
            if series:
                name = family if joined or "grid" in origins else f"{family}, tried"
                given.append((name, str(FAMILIES.index(family) + 1), series, joined))
    low = max(0.0, 0.95 * min((p.tau for p in points), default=1.0))
    size = {"width": WIDE, "height": 380}
    plot = curves("verified tokens per token of text", "tokens a round (tau)", given, low, **size)
    rows: list[tuple[Cell, ...]] = [
        (p.family, p.label, p.origin, p.tau, p.per_token, p.per_round, p.missing) for p in points
    ]
    names = ("family", "policy", "origin", "tau", "verified per token", "verified per round", "approximate")
    table = _table(names, rows, text=3, summary=f"{len(rows)} policies")
    if r.skipped:
        more = len(r.skipped) - SKIPPED_SHOWN
        listed = [(s,) for s in [*r.skipped[:SKIPPED_SHOWN], *([f"… {more} more"] if more > 0 else [])]]
        table += _table(("policy and reason",), listed, text=1, summary=f"{len(r.skipped)} policies left out")
    return Figure(
        "verified",
        "Tokens a round against verified tokens",
        "Every policy replayed here or tried before: higher and further left is better (C2T, figure 4, over the "
        "texts' length). Static trees are the best for these very texts. Hollow marks: a few of the policy's "
        "rounds read distributions that were not recorded.",
        plot,
        table,
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
        f"Dashed: the thresholds of bins {bins.artifact}; solid: the mean rank in each bin, over these starts "
        "(the bins are fitted to fully accepted rounds)."
        if bins.artifact
        else "There are no fitted bins of this draft in the database; `fit bins` makes them."
    )
    title = "Phi and rank" + (", with the entropy bins" if bins.artifact else "")
    rows = [(i, edges[i], c, m) for i, (c, m) in enumerate(zip(bins.starts, bins.mean_tcr, strict=True))]
    table = _table(("bin", "Phi from (nat)", "starts", "mean rank"), rows) if rows else ""
    return Figure("bins", title, caption, plot, table)


def _categories(r: TreeReport) -> Figure:
    given: list[Bar] = []
    for i, c in enumerate(r.categories, start=1):
        for kind, class_, offset, tau, acceptance in (
            ("chain", "f1", -0.17, c.chain_tau, c.chain_acceptance),
            ("tree", "f2", 0.17, c.tree_tau, c.tree_acceptance),
        ):
            said = f"{c.category}, {kind}: tau {tau:.3f}, {acceptance:.1%} of its drafted tokens accepted"
            given.append((i + offset, tau, class_, f"{said} ({c.requests} requests)"))
    plot = bars("category", "tokens a round (tau)", given, max(1, len(r.categories)), thick=0.3)
    for i, c in enumerate(r.categories, start=1):
        plot.text(plot.at(i, 0)[0], plot.height - 28, c.category or "(none)")
    plot.legend([("chain", "1"), ("tree", "2")], plot.left + 14, 26)
    names = ("category", "requests", "chain tau", "tree tau", "chain accepted/drafted", "tree accepted/drafted")
    return Figure(
        "categories",
        "Acceptance by category",
        f"Windows of {r.depth} levels; the tree has width {r.width} and keeps {r.top_n} nodes.",
        plot,
        _table(names, [astuple(c) for c in r.categories], text=1),
    )


def figures(r: TreeReport) -> list[Figure]:
    """The page's figures, in its order."""
    return [*_ranks(r), *_heat(r), _gamma(r), _verified(r), _bins(r), _categories(r)]


def page(r: TreeReport) -> str:
    """The whole page."""
    about = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in r.about
    )
    children = "by probability"
    if r.proposals == "coupled":
        children += ", with the target's noise above temperature 0"
    lead = (
        f"Trees of draft {r.draft}: width {r.width}, {r.depth} levels, N = {r.top_n} kept; children ranked {children}. "
        f"Counted over {r.tokens} tokens; nothing here is timed."
    )
    title = escape(f"Draft trees of {r.draft}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><header><h1>{title}</h1>"
        f'<p class="lead">{escape(lead)}</p><dl>{about}</dl></header>\n<main>'
        + "\n".join(figure.html() for figure in figures(r))
        + "</main>\n<footer><p>Made by spectune's <code>traces report</code>. Point at a mark for its numbers.</p>"
        "</footer></body></html>\n"
    )
