"""Charts and pages: hand-written SVG and HTML, no script, no font and no file beside them.

A chart is 320 units wide and its text 12.5 units, so that on a telephone of 360 pixels nothing is
smaller than 12 pixels and nothing has to be scrolled. What came from outside is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

from spectune.traces.text import one_line

WIDTH: Final = 320
ROW: Final = 36
"""Height of a row of :func:`dot_rows`: its label, and the marks below."""
LABEL_LIMIT: Final = 38
"""Characters of a label within a chart; the rest is in its title."""

STYLE: Final = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2024; --soft: #5c6570;
  --line: #b9c0c8; --grid: #e9ecf0;
  --c1: #2566ae; --c2: #c2560c; --c3: #2a7d48; --c4: #7a45ad; --c5: #a8326a; --panel: #f7f8fa; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e8eaed; --soft: #a3acb6;
  --line: #4b555f; --grid: #262c32;
  --c1: #6facea; --c2: #f0974e; --c3: #67c78b; --c4: #b897ea; --c5: #ee86b4; --panel: #1b1f24; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem .5rem 3rem; max-width: 80rem; background: var(--page);
  color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.45rem; line-height: 1.3; margin: .25rem 0 .5rem; max-width: 60rem; }
h2 { font-size: 1.2rem; margin: 1.75rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .25rem; line-height: 1.35; } p,
ul { margin: .25rem 0 .5rem; max-width: 60rem; }
header p { font-size: 1.05rem; } figcaption p, summary, footer,
.soft { color: var(--soft); font-size: .88rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 13rem), 1fr));
  gap: .5rem 1.25rem; margin: 1rem 0;
  padding: .75rem; background: var(--panel); border: 1px solid var(--line); border-radius: 6px; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr));
  gap: 1rem; align-items: start; }
figure { margin: 0; padding: .5rem; border: 1px solid var(--line); border-radius: 6px;
  min-width: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12.5px system-ui, sans-serif; }
svg .strong { fill: var(--ink); } svg .axis { stroke: var(--line); }
svg .grid { stroke: var(--grid); }
.f1 { fill: var(--c1); } .f2 { fill: var(--c2); } .f3 { fill: var(--c3); } .f4 { fill: var(--c4); }
.f5 { fill: var(--c5); }
.f6 { fill: var(--soft); } .s1, .s2, .s3, .s4, .s5,
.s6 { fill: none; stroke-width: 2; } .s1 { stroke: var(--c1); }
.s2 { stroke: var(--c2); } .s3 { stroke: var(--c3); } .s4 { stroke: var(--c4); }
.s5 { stroke: var(--c5); }
.s6 { stroke: var(--soft); stroke-width: 1; } .dash { stroke-dasharray: 5 4; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; list-style: none; margin: .25rem 0;
  padding: 0; font-size: .88rem; }
.legend i { display: inline-block; width: .7rem; height: .7rem; margin-right: .35rem;
  border-radius: 50%; }
.b1 { background: var(--c1); } .b2 { background: var(--c2); } .b3 { background: var(--c3); }
.b4 { background: var(--c4); }
.b5 { background: var(--c5); } .b6 { background: var(--soft); }
.scroll { overflow-x: auto; font-size: .88rem; } details { margin-top: .4rem; }
table { border-collapse: collapse; margin: .4rem 0; } th,
td { text-align: right; padding: .15rem .5rem;
  border-bottom: 1px solid var(--grid); font-variant-numeric: tabular-nums; vertical-align: top; }
th, td { overflow-wrap: normal; }
th { color: var(--soft); font-weight: 600; } th.text,
td.text { text-align: left; overflow-wrap: anywhere; min-width: 6.5rem; }
@media print { details { display: none; } figure { break-inside: avoid; } }
"""

Cell = str | int | float | None
Point = tuple[float, float, str]
"""(x, y, what a browser says of it)."""
Curve = tuple[str, str, Sequence[Point], bool]
"""(name, number of its colour, points, whether a line joins them)."""
Dot = tuple[float, tuple[float | None, float | None], str, str]
"""(x, its interval, number of its colour, what a browser says of it)."""


def safe(text: object) -> str:
    """Text from anywhere as HTML, on one line without control characters."""
    return escape(one_line(str(text)))


@dataclass
class Plot:
    """A picture with axes: two linear scales onto a box, and the SVG drawn so far."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: float = 230
    left: float = 50
    parts: list[str] = field(default_factory=list)
    legend: Sequence[tuple[str, str]] = ()
    """(name, number of its colour) of each series."""

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point of the data lies."""
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        return self.left + across * (WIDTH - self.left - 14), 14 + (1 - up) * (self.height - 58)

    def add(self, tag: str, content: str = "", title: str = "", **attributes: Any) -> None:
        """One element; ``class_`` is its class, underscores become hyphens, ``title`` what a
        browser shows on it."""
        said = {k: short(v) if isinstance(v, float) else str(v) for k, v in attributes.items()}
        shown = "".join(
            f' {k.rstrip("_").replace("_", "-")}="{escape(v)}"' for k, v in said.items()
        )
        inside = (f"<title>{safe(title)}</title>" if title else "") + content
        self.parts.append(f"<{tag}{shown}>{inside}</{tag}>")

    def text(self, x: float, y: float, content: str, anchor: str = "middle", **more: Any) -> None:
        """Text at a place of the picture."""
        self.add("text", safe(content), x=x, y=y, text_anchor=anchor, **more)

    def upright(self, content: str, y: float) -> None:
        """The vertical axis' name, its middle at ``y``."""
        self.text(0, 0, content, transform=f"translate(13 {short(y)}) rotate(-90)")

    def axes(
        self, x_name: str, y_name: str, x_ticks: Sequence[float] | None = None, y_ticks: bool = True
    ) -> None:
        """Ticks, grid lines and the axes' names."""
        (x0, base), (x1, _) = self.at(self.x[0], self.y[0]), self.at(self.x[1], self.y[0])
        for y in ticks(*self.y) if y_ticks else ():
            _, at = self.at(0, y)
            self.add("line", class_="grid", x1=x0, x2=x1, y1=at, y2=at)
            self.text(x0 - 5, at + 4, short(y), "end")
        for x in ticks(*self.x) if x_ticks is None else x_ticks:
            here = self.at(x, 0)[0]
            if not y_ticks:
                self.add("line", class_="grid", x1=here, x2=here, y1=14, y2=base)
            inside = "end" if here > WIDTH - 18 else "start" if here < 14 else "middle"
            self.text(here, base + 16, short(x), inside)
        self.add("line", class_="axis", x1=x0, x2=x1, y1=base, y2=base)
        self.text((x0 + x1) / 2, self.height - 8, x_name)
        if y_name:
            self.upright(y_name, (14 + base) / 2)

    def box(self, x: float, y: float, width: float, height: float, title: str, **look: Any) -> None:
        """A rectangle between (x, y) and (x + width, y + height) of the data."""
        (x0, y0), (x1, y1) = self.at(x, y + height), self.at(x + width, y)
        wide, high = max(0.5, x1 - x0 - 0.5), max(0.0, y1 - y0)
        self.add("rect", title=title, x=x0, y=y0, width=wide, height=high, **look)

    def line(self, points: Sequence[tuple[float, float]], class_: str, title: str = "") -> None:
        """A broken line through points of the data."""
        places = " ".join(f"{short(x)},{short(y)}" for x, y in (self.at(*p) for p in points))
        self.add("polyline", class_=class_, points=places, title=title)

    def dot(self, x: float, y: float, colour: str, title: str, r: float = 4.5) -> None:
        """A mark at a point of the data."""
        at_x, at_y = self.at(x, y)
        self.add("circle", title=title, class_=f"f{colour}", cx=at_x, cy=at_y, r=r)


def figure(name: str, title: str, caption: str, plot: Plot, table: str = "") -> str:
    """A picture with its title, which says what is seen, its caption, legend and numbers; named and
    described for those who do not see it."""
    items = "".join(
        f'<li><i class="b{colour}"></i>{safe(series)}</li>' for series, colour in plot.legend
    )
    return (
        f'<figure id="{name}"><figcaption><h3>{safe(title)}</h3><p>{safe(caption)}</p></figcaption>'
        f"{f'<ul class=legend>{items}</ul>' if items else ''}"
        f'<svg role="img" viewBox="0 0 {WIDTH} {short(plot.height)}" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{safe(title)}</title>'
        f'<desc id="{name}-d">{safe(caption)}</desc>{"".join(plot.parts)}</svg>{table}</figure>'
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers in a range, about so many."""
    span = (high - low) or 1.0
    unit: float = 10.0 ** math.floor(math.log10(span / about))
    step = next(m for m in (1, 2, 5, 10) if m * unit >= span / about * 0.999) * unit
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number in few characters."""
    text = f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "0" if text == "-0" else text


def cut(text: str, limit: int = LABEL_LIMIT) -> str:
    """The beginning of a label that is too long for a chart."""
    line = one_line(text)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, text: int = 0) -> str:
    """A table that scrolls by itself where it is too wide; the first ``text`` columns are words."""

    def cell(tag: str, i: int, value: Cell) -> str:
        shown = f"{value:.3f}" if isinstance(value, float) else "–" if value is None else str(value)
        return f"<{tag}{' class=text' if i < text else ''}>{safe(shown)}</{tag}>"

    def line(tag: str, cells: Sequence[Cell]) -> str:
        return f"<tr>{''.join(cell(tag, i, value) for i, value in enumerate(cells))}</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f'<div class="scroll"><table><thead>{line("th", columns)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def numbers(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    text: int = 0,
    summary: str = "Numbers",
) -> str:
    """A table folded away below a figure."""
    content = table(columns, rows, text=text)
    return f"<details><summary>{safe(summary)}</summary>{content}</details>"


def top(values: Iterable[float | None]) -> float:
    """Where an axis from 0 ends."""
    return 1.08 * max((v for v in values if v is not None), default=1.0) or 1.0


def curves(x_name: str, y_name: str, given: Sequence[Curve]) -> Plot:
    """Series of points, some joined by lines; those with a name are the legend."""
    points = [p for _, _, series, _ in given for p in series]
    plot = Plot((0.0, top(p[0] for p in points)), (0.0, top(p[1] for p in points)))
    plot.axes(x_name, y_name)
    for _, colour, series, joined in given:
        if joined:
            plot.line([(x, y) for x, y, _ in series], f"s{colour} dash")
        for x, y, said in series:
            plot.dot(x, y, colour, said)
    plot.legend = [(name, colour) for name, colour, _, _ in given if name]
    return plot


def dot_rows(
    x_name: str, rows: Sequence[tuple[str, Sequence[Dot]]], *, low: float | None = None
) -> Plot:
    """Marks with their intervals on a row for each label, from the first on top; the axis begins at
    ``low`` (None: before the smallest)."""
    marks = [v for _, dots in rows for x, ends, _, _ in dots for v in (x, *ends) if v is not None]
    least, most = min(marks, default=0.0), max(marks, default=1.0)
    margin = 0.06 * ((most - least) or abs(most) or 1.0)
    count = max(1, len(rows))
    x_axis = (least - margin if low is None else low, most + margin)
    plot = Plot(x_axis, (0.0, count), height=58 + ROW * count, left=10)
    plot.axes(x_name, "", y_ticks=False)
    for i, (label, dots) in enumerate(rows):
        y = len(rows) - i - 0.68
        plot.text(10, plot.at(0, y)[1] - 11, cut(label), "start", class_="strong")
        for x, (start, end), colour, said in dots:
            if start is not None and end is not None and end > start:
                plot.line([(start, y), (end, y)], f"s{colour}")
            plot.dot(x, y, colour, f"{label}: {said}")
    return plot


def section(title: str, *parts: str) -> str:
    """A part of a page: figures side by side, other HTML as it is."""
    return f'<section><h2>{safe(title)}</h2><div class="charts">{"".join(parts)}</div></section>'


def document(title: str, lead: Sequence[str], about: Iterable[tuple[str, str]], body: str) -> str:
    """A whole page: its title is what is to be said first."""
    facts = "".join(
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>" for name, value in about
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta '
        'name="color-scheme" content="light dark">'
        f"<title>{safe(title)}</title><style>{STYLE}</style></head>\n<body><header><h1>{safe(title)}</h1>"
        + "".join(f"<p>{safe(line)}</p>" for line in lead)
        + f"<dl>{facts}</dl></header>\n<main>{body}</main>\n"
        "<footer><p>Made by spectune's <code>report</code>. Point at a mark for its "
        "numbers.</p></footer></body></html>\n"
    )
