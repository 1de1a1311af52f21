"""The tree report as one page: HTML with inline SVG, no script, no font and no file beside it. Numbers come from
:mod:`optimizer.tree_report`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

from optimizer.tree_report import SHARES, Heat, Point, TreeReport

FIGURES: Final = (
    "ranks",
    "accepted",
    "phi",
    "probability",
    "acceptance",
    "difference",
    "gamma",
    "verified",
    "bins",
    "categories",
)
"""Ids of the figures, in the page's order."""
FAMILIES: Final = ("chain", "EAGLE-2", "static", "C2T", "HeteroSpec")
"""Policies' families in the order of their colours and shapes."""
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
.s4 { stroke: var(--c4); } .s5 { stroke: var(--c5); } .panel { fill: var(--page); stroke: var(--line); } .dash { stroke-dasharray: 5 4; }
.hollow { fill: var(--page); stroke-width: 1.5; }
details { margin-top: .5rem; overflow-x: auto; font-size: .85rem; } table { border-collapse: collapse; margin-top: .4rem; }
th, td { text-align: right; padding: .1rem .6rem; border-bottom: 1px solid var(--grid);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th.text, td.text { text-align: left; white-space: normal; }
@media print { details { display: none; } figure { break-inside: avoid; } }
"""

Cell = str | int | float | None


@dataclass
class Plot:
    """A picture with axes: two linear scales onto a box, and the SVG drawn so far."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = 640
    height: float = 300
    left: float = 52
    right: float = 14
    top: float = 14
    bottom: float = 44
    parts: list[str] = field(default_factory=list)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point of the data lies."""
        (x0, x1), (y0, y1) = self.x, self.y
        across = (x - x0) / ((x1 - x0) or 1.0)
        up = (y - y0) / ((y1 - y0) or 1.0)
        inner = self.height - self.top - self.bottom
        return self.left + across * (self.width - self.left - self.right), self.top + (1 - up) * inner

    def add(self, tag: str, content: str = "", title: str = "", **attributes: object) -> None:
        """One element; ``class_`` is its class, underscores become hyphens, ``title`` what a browser shows on it."""
        shown = "".join(
            f' {k.rstrip("_").replace("_", "-")}="{escape(_short(v) if isinstance(v, float) else str(v))}"'
            for k, v in attributes.items()
        )
        inside = (f"<title>{escape(title)}</title>" if title else "") + content
        self.parts.append(f"<{tag}{shown}>{inside}</{tag}>")

    def text(self, x: float, y: float, content: str, anchor: str = "middle", class_: str = "") -> None:
        """Text at a place of the picture."""
        named = {"class_": class_} if class_ else {}
        self.add("text", escape(content), x=x, y=y, text_anchor=anchor, **named)

    def axes(
        self, x_name: str, y_name: str, x_ticks: Sequence[float] | None = None, y_ticks: Sequence[float] | None = None
    ) -> None:
        """Ticks, grid lines and the axes' names."""
        for y in ticks(*self.y) if y_ticks is None else y_ticks:
            (x0, at), (x1, _) = self.at(self.x[0], y), self.at(self.x[1], y)
            self.add("line", class_="grid", x1=x0, x2=x1, y1=at, y2=at)
            self.text(x0 - 6, at + 4, _short(y), "end")
        for x in ticks(*self.x) if x_ticks is None else x_ticks:
            at, bottom = self.at(x, self.y[0])
            self.text(at, bottom + 16, _short(x))
        (x0, base), (x1, _) = self.at(self.x[0], self.y[0]), self.at(self.x[1], self.y[0])
        self.add("line", class_="axis", x1=x0, x2=x1, y1=base, y2=base)
        self.text((x0 + x1) / 2, self.height - 8, x_name)
        self.add(
            "text", escape(y_name), x=0, y=0, text_anchor="middle",
            transform=f"translate(13 {_short((self.top + base) / 2)}) rotate(-90)",
        )  # fmt: skip

    def line(self, points: Sequence[tuple[float, float]], class_: str) -> None:
        """A broken line through points of the data."""
        places = " ".join(f"{_short(x)},{_short(y)}" for x, y in (self.at(*p) for p in points))
        self.add("polyline", class_=class_, points=places)

    def bar(self, x: float, width: float, y: float, class_: str, title: str, base: float = 0.0) -> None:
        """A bar from ``base`` to ``y`` around ``x``, ``width`` wide in the data's units."""
        (x0, y0), (x1, y1) = self.at(x - width / 2, y), self.at(x + width / 2, base)
        self.add("rect", title=title, class_=class_, x=x0, y=y0, width=max(0.5, x1 - x0), height=max(0.0, y1 - y0))

    def mark(self, shape: int, x: float, y: float, class_: str, title: str, size: float = 4.5) -> None:
        """A marker in one of five shapes at a point of the data."""
        at_x, at_y = self.at(x, y)
        if shape == 0:
            self.add("circle", title=title, class_=class_, cx=at_x, cy=at_y, r=size)
            return
        corners = {
            1: ((-1, -1), (1, -1), (1, 1), (-1, 1)),
            2: ((0, -1.2), (1.1, 0.9), (-1.1, 0.9)),
            3: ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
            4: ((0, 1.2), (1.1, -0.9), (-1.1, -0.9)),
        }[shape]
        places = " ".join(f"{_short(at_x + size * 0.9 * dx)},{_short(at_y + size * 0.9 * dy)}" for dx, dy in corners)
        self.add("polygon", title=title, class_=class_, points=places)

    def svg(self, name: str, title: str, description: str) -> str:
        """The picture, named and described for those who do not see it."""
        return (
            f'<svg role="img" viewBox="0 0 {_short(self.width)} {_short(self.height)}" aria-labelledby="{name}-t {name}-d">'
            f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>{"".join(self.parts)}</svg>'
        )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers in a range, about so many."""
    span = (high - low) or 1.0
    raw = span / about
    unit: float = 10.0 ** math.floor(math.log10(raw))
    step = next(m for m in (1, 2, 5, 10) if m * unit >= raw * 0.999) * unit
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    text = f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "0" if text == "-0" else text


def _table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, text: int = 0, summary: str = "Numbers") -> str:
    """A table folded away below a figure; the first ``text`` columns are words."""

    def cell(tag: str, i: int, value: Cell) -> str:
        shown = f"{value:.3f}" if isinstance(value, float) else "–" if value is None else str(value)
        return f"<{tag}{' class=text' if i < text else ''}>{escape(shown)}</{tag}>"

    head = "".join(cell("th", i, c) for i, c in enumerate(columns))
    body = "".join("<tr>" + "".join(cell("td", i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    return f"<details><summary>{escape(summary)}</summary><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"


def _figure(name: str, title: str, caption: str, svg: str, table: str = "", *, wide: bool = False) -> str:
    return (
        f'<figure id="{name}"{" class=wide" if wide else ""}><figcaption><h2>{escape(title)}</h2><p>{escape(caption)}</p></figcaption>'
        f"{svg}{table}</figure>"
    )


def _top(values: Iterable[float | None]) -> float:
    return 1.08 * max((v for v in values if v is not None), default=1.0) or 1.0


def _ranks(r: TreeReport) -> str:
    profile, n = r.ranks, r.top_n
    some = max(1, profile.starts - profile.count[0])
    plot = Plot((0.5, n + 0.5), (0.0, _top(c / some for c in profile.count[1:])), width=WIDE, right=350)
    plot.axes("Terminal Confidence Rank (1: the cheapest node)", "share of starts", x_ticks=ticks(1, n, 8))
    for rank, count in enumerate(profile.count[1:], start=1):
        share = count / some
        plot.bar(rank, 0.8, share, "f2" if share >= PROMINENT else "f1", f"rank {rank}: {count} starts, {share:.1%}")
    inset = Plot((0.0, 1.0), (0.0, 1.0), width=WIDE, left=WIDE - 270, top=46, right=40, bottom=62)
    (x0, y0), (x1, y1) = inset.at(0, 1), inset.at(1, 0)
    inset.add("rect", class_="panel", x=x0 - 52, y=y0 - 32, width=x1 - x0 + 82, height=y1 - y0 + 80)
    inset.text((x0 + x1) / 2, y0 - 14, "starts within the best share of N", class_="strong")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        (gx, gy), (left, gh) = inset.at(share, 0), inset.at(0, share)
        inset.add("line", class_="grid", x1=left, x2=x1, y1=gh, y2=gh)
        inset.text(gx, gy + 14, f"{share:.0%}")
        inset.text(left - 5, gh + 4, f"{share:.0%}", "end")
    inset.text((x0 + x1) / 2, y1 + 31, "share of N")
    inset.line([(0.0, 0.0), *zip(SHARES, profile.within, strict=True)], "s1")
    inset.mark(0, 0.25, profile.top_quarter, "f2", f"{profile.top_quarter:.1%} within a quarter of N")
    low, middle, high = profile.quartiles
    caption = (
        f"Of {profile.starts} starts {some if profile.count[0] < profile.starts else 0} had a drafted token accepted; the deepest accepted "
        f"node was in the cheapest quarter of N in {profile.top_quarter:.1%} of them. Quartiles of the rank: {low}, {middle}, {high}. "
        f"Ranks of at least {PROMINENT:.0%} of the starts in the second colour (HeteroSpec, figures 1c and 1e)."
    )
    plot.parts += inset.parts
    rows = [(i, c, c / some if i else None) for i, c in enumerate(profile.count)]
    title = f"Terminal Confidence Rank among the N = {n} kept nodes"
    return _figure(
        "ranks", title, caption, plot.svg("ranks", title, caption), _table(("rank", "starts", "share"), rows), wide=True
    )


def _by_rank(r: TreeReport, name: str, values: Sequence[float | None], y_name: str, title: str, caption: str, class_: str) -> str:
    plot = Plot((0.5, r.top_n + 0.5), (0.0, _top(values[1:])))
    plot.axes("Terminal Confidence Rank", y_name, x_ticks=ticks(1, r.top_n, 8))
    some = max(1, r.ranks.starts - r.ranks.count[0])
    if name == "phi":
        plot.line([(i, v) for i, v in enumerate(values) if i and v is not None], "s4")
    for rank, value in enumerate(values):
        if rank and value is not None:
            said = f"rank {rank}: {value:.2f} ({r.ranks.count[rank]} starts)"
            if name == "phi":
                plot.mark(0, rank, value, class_, said, 2.5)
            else:
                plot.bar(rank, 0.8, value, "f2" if r.ranks.count[rank] / some >= PROMINENT else class_, said)
    rows = [(i, c, v) for i, (c, v) in enumerate(zip(r.ranks.count, values, strict=True))]
    return _figure(name, title, caption, plot.svg(name, title, caption), _table(("rank", "starts", y_name), rows))


def _heat(
    name: str, heat: Heat, values: Sequence[Sequence[float | None]], title: str, caption: str, diverging: bool = False
) -> str:
    rows, columns = len(values), max(1, len(values[0]) if values else 1)
    plot = Plot((0, columns), (0, rows), height=52 + 34.0 * rows, left=132, top=8)
    largest = max((abs(v) for row in values for v in row if v is not None), default=1.0) or 1.0 if diverging else 1.0
    for i, row in enumerate(values):
        low, high, last = heat.edges[i], heat.edges[i + 1], i == rows - 1
        span = f"{low:.2f} and more" if last else f"{low:.2f} to {high:.2f}"
        _, middle = plot.at(0, i + 0.5)
        plot.text(124, middle + 4, f"{span} ({heat.count[i]})", "end")
        for k, value in enumerate(row):
            (x0, y0), (x1, y1) = plot.at(k, i + 1), plot.at(k + 1, i)
            if value is None:
                continue
            said = f"entropy {span} nat, rank {k + 1}: {value:{'+' if diverging else ''}.3f}"
            colour = "f2" if diverging and value < 0 else "f1"
            opacity = round(0.6 * abs(value) / largest, 3)
            plot.add(
                "rect", title=said, class_=colour, fill_opacity=opacity, x=x0 + 1, y=y0 + 1, width=x1 - x0 - 2, height=y1 - y0 - 2
            )
            if columns <= 16:
                shown = f"{value:+.2f}" if diverging and abs(value) >= 0.005 else f"{abs(value):.2f}"
                plot.text((x0 + x1) / 2, middle + 4, shown.replace("0.", ".", 1), class_="strong")
    for k in range(columns):
        at, bottom = plot.at(k + 0.5, 0)
        plot.text(at, bottom + 16, str(k + 1))
    plot.text(plot.left + (plot.width - plot.left - plot.right) / 2, plot.height - 6, "rank of the child")
    spans = [f"{low:.2f}-" + ("" if i == rows - 1 else f"{heat.edges[i + 1]:.2f}") for i, low in enumerate(heat.edges[:-1])]
    numbers = [(s, c, *row) for s, c, row in zip(spans, heat.count, values, strict=True)]
    names = ("entropy (nat)", "starts", *(str(k + 1) for k in range(columns)))
    return _figure(name, title, caption, plot.svg(name, title, caption), _table(names, numbers, text=1))


def _legend(plot: Plot, entries: Sequence[tuple[str, int, str]], y: float = 26) -> None:
    """(name, shape, class) of each, in the picture's upper left, one below the other."""
    for i, (name, shape, class_) in enumerate(entries):
        at = Plot((0, 640), (300, 0), left=0, right=0, top=0, bottom=0)
        at.mark(shape, plot.left + 14, y + 16 * i, class_, name)
        plot.parts += at.parts
        plot.text(plot.left + 25, y + 4 + 16 * i, name, "start", "strong")


def _gamma(r: TreeReport) -> str:
    plot = Plot((0.6, r.depth + 0.4), (0.0, _top(g.tree for g in r.gammas) * 1.12))
    plot.axes("window gamma (levels)", "tokens a round (tau)", x_ticks=range(1, r.depth + 1))
    for class_, shape, values in ((1, 0, [g.chain for g in r.gammas]), (2, 1, [g.tree for g in r.gammas])):
        points = [(float(g.gamma), v) for g, v in zip(r.gammas, values, strict=True)]
        plot.line(points, f"s{class_}")
        for x, y in points:
            plot.mark(shape, x, y, f"f{class_}", f"gamma {x:.0f}: tau {y:.3f}")
    _legend(plot, [("chain", 0, "f1"), (f"tree, width {r.width}, N = {r.top_n}", 1, "f2")])
    title = "Acceptance by window, as replay predicts it"
    caption = "Tokens a round (the target's own included) of fixed windows over the recorded texts."
    rows = [(g.gamma, g.chain, g.tree) for g in r.gammas]
    return _figure("gamma", title, caption, plot.svg("gamma", title, caption), _table(("gamma", "chain tau", "tree tau"), rows))


def _verified(r: TreeReport) -> str:
    high = _top(p.per_token for p in r.points)
    low_tau = min((p.tau for p in r.points), default=1.0)
    plot = Plot((0.0, high), (max(0.0, 0.95 * low_tau), _top(p.tau for p in r.points)), width=WIDE, height=380)
    plot.axes("verified tokens per token of text", "tokens a round (tau)")
    shown = [f for f in FAMILIES if any(p.family == f for p in r.points)]
    for name in shown:
        number = FAMILIES.index(name)
        mine = sorted((p for p in r.points if p.family == name), key=lambda p: p.per_token)
        grid = [(p.per_token, p.tau) for p in mine if p.origin == "grid"]
        if name in ("chain", "EAGLE-2", "static") and len(grid) > 1:
            plot.line(grid, f"s{number + 1} dash")
        for p in mine:
            exact = "" if not p.missing else f", {p.missing:.1%} of its rounds approximate"
            said = (
                f"{p.label}: tau {p.tau:.3f}, {p.per_token:.2f} verified per token, {p.per_round:.1f} a round ({p.origin}{exact})"
            )
            class_ = f"hollow s{number + 1}" if p.missing else f"f{number + 1}"
            plot.mark(number, p.per_token, p.tau, class_, said)
    # The upper left of a curve of diminishing returns is empty but for its steepest part; the lower right always is.
    legend = Plot((0, 1), (0, 1), left=plot.width - 150)
    _legend(legend, [(f, FAMILIES.index(f), f"f{FAMILIES.index(f) + 1}") for f in shown], plot.height - 66 - 16 * len(shown))
    plot.parts += legend.parts
    title = "Tokens a round against verified tokens"
    caption = (
        "Every policy replayed here or tried before: higher and further left is better (C2T, figure 4, over the texts' length). "
        "Static trees are the best for these very texts. Hollow marks: a few of the policy's rounds read laws that were not recorded."
    )
    rows: list[tuple[Cell, ...]] = [
        (p.family, p.label, p.origin, p.tau, p.per_token, p.per_round, p.missing) for p in _ordered(r.points)
    ]
    names = ("family", "policy", "origin", "tau", "verified per token", "verified per round", "approximate")
    table = _table(names, rows, text=3, summary=f"{len(rows)} policies")
    if r.skipped:
        more = [] if len(r.skipped) <= SKIPPED_SHOWN else [(f"… {len(r.skipped) - SKIPPED_SHOWN} more",)]
        listed = [*((s,) for s in r.skipped[:SKIPPED_SHOWN]), *more]
        table += _table(("policy and reason",), listed, text=1, summary=f"{len(r.skipped)} policies left out")
    return _figure("verified", title, caption, plot.svg("verified", title, caption), table, wide=True)


def _ordered(points: Sequence[Point]) -> list[Point]:
    return sorted(points, key=lambda p: (FAMILIES.index(p.family) if p.family in FAMILIES else len(FAMILIES), p.per_token))


def _bins(r: TreeReport) -> str:
    grid, bins = r.grid, r.bins
    columns = len(grid.count[0]) if grid.count else 1
    right = max(columns * grid.width, *(t * 1.05 for t in bins.thresholds), grid.width)
    plot = Plot((0.0, right), (0.5, len(grid.count) * grid.height + 0.5), height=340)
    plot.axes("Phi (nat)", "Terminal Confidence Rank", y_ticks=ticks(1, r.top_n))
    most = max((c for row in grid.count for c in row), default=1) or 1
    for i, row in enumerate(grid.count):
        for j, count in enumerate(row):
            if count:
                (x0, y0) = plot.at(j * grid.width, (i + 1) * grid.height + 0.5)
                (x1, y1) = plot.at((j + 1) * grid.width, i * grid.height + 0.5)
                first = i * grid.height + 1
                ranks = f"rank {first}" if grid.height == 1 else f"ranks {first} to {first + grid.height - 1}"
                said = f"Phi {j * grid.width:.2f} to {(j + 1) * grid.width:.2f} nat, {ranks}: {count} starts"
                opacity = round(0.12 + 0.68 * math.sqrt(count / most), 3)
                plot.add(
                    "rect", title=said, class_="f1", fill_opacity=opacity, x=x0, y=y0,
                    width=max(0.5, x1 - x0 - 0.5), height=max(0.5, y1 - y0 - 0.5),
                )  # fmt: skip
    for i, t in enumerate(bins.thresholds):
        at, bottom = plot.at(t, 0.5)
        plot.add("line", title=f"threshold {i + 1}: {t:.2f} nat", class_="s2 dash", x1=at, x2=at, y1=plot.top, y2=bottom)
    edges = [0.0, *bins.thresholds, right]
    for i, tcr in enumerate(bins.mean_tcr):
        if tcr is not None and edges[i + 1] > edges[i]:
            plot.line([(edges[i], tcr), (edges[i + 1], tcr)], "s2")
    title = "Phi and rank" + (", with the entropy bins" if bins.artifact else "")
    caption = "Starts with a drafted token accepted, darker where there are more. "
    if bins.artifact:
        caption += (
            f"Dashed: the thresholds of bins {bins.artifact}; solid: the mean rank in each bin, over these starts (the bins are fitted to "
            "fully accepted rounds)."
        )
    else:
        caption += "There are no fitted bins of this draft in the database; `fit bins` makes them."
    names = ("bin", "Phi from (nat)", "starts", "mean rank")
    rows = [(i, edges[i], c, m) for i, (c, m) in enumerate(zip(bins.starts, bins.mean_tcr, strict=True))]
    table = _table(names, rows) if rows else ""
    return _figure("bins", title, caption, plot.svg("bins", title, caption), table)


def _categories(r: TreeReport) -> str:
    n = len(r.categories)
    plot = Plot((0.0, float(max(1, n))), (0.0, _top(c.tree_tau for c in r.categories) * 1.15))
    plot.axes("category", "tokens a round (tau)", x_ticks=[])
    for i, c in enumerate(r.categories):
        at, bottom = plot.at(i + 0.5, 0)
        plot.text(at, bottom + 16, c.category or "(none)")
        values = (("chain", "f1", -0.17, c.chain_tau, c.chain_acceptance), ("tree", "f2", 0.17, c.tree_tau, c.tree_acceptance))
        for name, class_, offset, tau, acceptance in values:
            said = f"{c.category}, {name}: tau {tau:.3f}, {acceptance:.1%} of its drafted tokens accepted ({c.requests} requests)"
            plot.bar(i + 0.5 + offset, 0.3, tau, class_, said)
            x, y = plot.at(i + 0.5 + offset, tau)
            plot.text(x, y - 4, f"{tau:.2f}", class_="strong")
    _legend(plot, [("chain", 1, "f1"), ("tree", 1, "f2")])
    title = "Acceptance by category"
    caption = f"Windows of {r.depth} levels; the tree has width {r.width} and keeps {r.top_n} nodes."
    names = ("category", "requests", "chain tau", "tree tau", "chain accepted/drafted", "tree accepted/drafted")
    rows: list[tuple[Cell, ...]] = [
        (c.category, c.requests, c.chain_tau, c.tree_tau, c.chain_acceptance, c.tree_acceptance) for c in r.categories
    ]
    return _figure("categories", title, caption, plot.svg("categories", title, caption), _table(names, rows, text=1))


def page(r: TreeReport) -> str:
    """The whole page."""
    heat = r.heat
    drawn: dict[str, Callable[[], str]] = {
        "ranks": lambda: _ranks(r),
        "accepted": lambda: _by_rank(
            r, "accepted", r.ranks.accepted, "accepted tokens", "Accepted length by rank",
            "Mean drafted tokens accepted of the starts with each rank (HeteroSpec, figures 1d, 3); frequent ranks in the second colour.",
            "f1",
        ),
        "phi": lambda: _by_rank(
            r, "phi", r.ranks.phi, "Phi (nat)", "Phi by rank",
            "Mean of the summed top-10 entropies along the most confident path (HeteroSpec, equation 1 and figure 4).", "f4",
        ),
        "probability": lambda: _heat(
            "probability", heat, heat.probability, "Probability by entropy and rank",
            "Mean of the draft's probability of each child; rows: entropy of the law in nat (starts) (C2T, figure 2a).",
        ),
        "acceptance": lambda: _heat(
            "acceptance", heat, heat.acceptance, "Acceptance by entropy and rank",
            "Share of starts whose next token is that child (C2T, figure 2b).",
        ),
        "difference": lambda: _heat(
            "difference", heat, heat.difference, "Acceptance minus probability",
            "First colour: accepted more often than its probability says; second colour: less often (C2T, figure 2c).", True,
        ),
        "gamma": lambda: _gamma(r),
        "verified": lambda: _verified(r),
        "bins": lambda: _bins(r),
        "categories": lambda: _categories(r),
    }  # fmt: skip
    about = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in r.about)
    children = "by probability" + (", with the target's noise above temperature 0" if r.proposals == "coupled" else "")
    lead = (
        f"Trees of draft {r.draft}: width {r.width}, {r.depth} levels, N = {r.top_n} kept; children ranked {children}. "
        f"Counted over {r.tokens} tokens; nothing here is timed."
    )
    title = f"Draft trees of {r.draft}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><header><h1>{escape(title)}</h1>"
        f'<p class="lead">{escape(lead)}</p><dl>{about}</dl></header>\n<main>'
        + "\n".join(drawn[name]() for name in FIGURES)
        + "</main>\n<footer><p>Made by spectune's <code>traces report</code>. Point at a mark for its numbers.</p></footer></body></html>\n"
    )
