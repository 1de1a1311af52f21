"""The charts of a tuning's page as SVG texts, drawn by matplotlib. Only what draws imports this:
matplotlib takes a second to import.

``series`` names the winner, the incumbent and autoregression by policy id; the rest are "others".
"""

from __future__ import annotations

import io
import logging
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spectune.optimizer.tuning.tuned import RacedPolicy
from spectune.traces.text import printable

COLOURS = ("#2566ae", "#c2560c", "#2a7d48", "#7a45ad", "#a8326a")
GREY, PALE = "#8b949e", "#d3d8de"
WIDTH_IN = 4.2
LABEL_WIDTH = 48
"""Characters of a label on one line of a chart."""
LINE_IN, MARK_IN, LEGEND_LINE_IN, AXIS_IN = 0.15, 0.2, 0.19, 0.65
"""Heights: of a line of a row's label, of its marks, of a line of the legend, of the axis below."""
SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e9ecf0",
    "legend.frameon": False,
    "lines.markersize": 5.0,
}
Series = Mapping[str, str]
Mark = tuple[str, float, float | None, float | None]
"""Policy, value, and the ends of its interval, None where they are not known."""

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells when it looks for fonts


def chart(
    name: str,
    x_label: str,
    y_label: str,
    draw: Callable[[Axes], None],
    height_in: float = 3.6,
    *,
    has_legend: bool = True,
) -> str:
    """The SVG of what ``draw`` draws, a legend above where it ``has_legend``. ``name`` is unique on
    a page: it keeps ids apart."""
    settings = {**SETTINGS, "svg.hashsalt": name}
    with matplotlib.rc_context(settings), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.simplefilter("ignore")  # letters that its font lacks; a browser has them
        figure = Figure((WIDTH_IN, height_in), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set(xlabel=x_label, ylabel=y_label)
        handles, labels = axes.get_legend_handles_labels()
        legend = dict(zip(map(_wrapped, labels), handles, strict=True))
        ordered = sorted(legend, key=lambda label: label == "others")
        if ordered and has_legend:
            lines = [legend[label] for label in ordered]
            figure.legend(lines, ordered, loc="outside upper left", borderaxespad=0)
        figure.savefig(file := io.StringIO(), format="svg")
    svg = printable(file.getvalue())
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    return re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])


def _wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(label, LABEL_WIDTH))


def _lines(label: str) -> int:
    return 1 + label.count("\n")


def _mark(axes: Axes, mark: Mark, y: float, series: Series) -> None:
    policy, value, low, high = mark
    label = series.get(policy, "others")
    colour = COLOURS[[*series].index(policy)] if policy in series else GREY
    if low is not None and high is not None:
        axes.plot((low, high), (y, y), color=colour, lw=1.5)
    on_top = 4 if policy == next(iter(series)) else 3
    axes.plot([value], [y], "o", color=colour, label=label, zorder=on_top)


def prediction(candidates: Sequence[RacedPolicy], series: Series) -> str:
    """Predicted over measured speed of each candidate that was predicted; on the dashed line both
    are equal."""

    def draw(axes: Axes) -> None:
        for c in candidates:
            if c.predicted_tokens_per_s is not None:
                mark = (c.id, c.measured_tokens_per_s, *c.measured_interval)
                _mark(axes, mark, c.predicted_tokens_per_s, series)
        end = max(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot((0, end), (0, end), "--", color=GREY, lw=1)
        axes.set(xlim=(0, end), ylim=(0, end))

    return chart("prediction", "measured (tokens/s)", "predicted (tokens/s)", draw, 4.0)


def rows(
    name: str,
    x_label: str,
    labelled: Sequence[tuple[str, Sequence[Mark]]],
    series: Series,
    start: float | None = None,
    *,
    has_legend: bool = True,
) -> str:
    """Marks with their intervals, a row for each label, the first on top, the label above its
    marks; the axis begins at ``start``, or near the smallest. Without a legend where labels say
    whose marks they are."""
    labels = [_wrapped(label) for label, _ in labelled]
    tops = [LINE_IN * _lines(label) for label in labels]
    shown = {series.get(mark[0], "others") for _, marks in labelled for mark in marks}
    legend_in = sum(LEGEND_LINE_IN * _lines(_wrapped(label)) for label in shown) * has_legend

    def draw(axes: Axes) -> None:
        y, edge = 0.0, axes.get_yaxis_transform()
        for label, top, (_, marks) in zip(labels, tops, labelled, strict=True):
            axes.text(0, y, label, transform=edge, va="top", fontsize=8)
            for mark in marks:
                _mark(axes, mark, y + top + 0.4 * MARK_IN, series)
            y += top + MARK_IN
        axes.set(ylim=(y, -0.05), yticks=[], xlim=(start, None))

    height = AXIS_IN + legend_in + sum(tops) + MARK_IN * len(tops)
    return chart(name, x_label, "", draw, height, has_legend=has_legend)


def rounds(counts: Sequence[tuple[int, int, int]]) -> str:
    """A bar per round of ``(drafted, accepted, emitted)`` tokens."""

    def draw(axes: Axes) -> None:
        starts = [0] * len(counts)
        for label, color, tokens in (
            ("accepted", COLOURS[2], [accepted for _, accepted, _ in counts]),
            ("the target's own", COLOURS[1], [emitted - a for _, a, emitted in counts]),
            ("rejected", PALE, [drafted - a for drafted, a, _ in counts]),
        ):
            numbers = range(1, len(counts) + 1)
            axes.barh(numbers, tokens, 0.75, starts, color=color, label=label, ec="w", lw=0.5)
            starts = [a + b for a, b in zip(starts, tokens, strict=True)]
        axes.set(ylim=(len(counts) + 0.6, 0.4))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))

    return chart("rounds", "tokens of a round", "round", draw, 1.5 + 0.13 * len(counts))


def positions(acceptance: Mapping[str, Sequence[float]]) -> str:
    """By draft the share of starts whose first 1, 2, ... proposals are all accepted."""

    def draw(axes: Axes) -> None:
        for i, (draft, shares) in enumerate(acceptance.items()):
            color = COLOURS[i % len(COLOURS)]
            axes.plot(range(1, len(shares) + 1), shares, ".-", color=color, label=draft)
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return chart("positions", "position in the draft (tokens)", "share accepted", draw)


def pairs(
    name: str, ratios: Sequence[float], total: int, looks: Sequence[Mapping[str, Any]]
) -> str:
    """The newest of ``total`` pairs of blocks of a rollout, each by the candidate's speed over the
    incumbent's, and the looks that were taken, with their intervals."""

    def draw(axes: Axes) -> None:
        axes.axhline(1.0, color=GREY, lw=1, ls="--")
        numbers = range(total - len(ratios) + 1, total + 1)
        axes.plot(numbers, ratios, ".", color=GREY, label="a pair of blocks")
        for look in looks:
            if None not in look["interval"]:
                axes.plot([look["pairs"]] * 2, look["interval"], color=COLOURS[0], lw=1.5)
            at, label = [look["pairs"]], "all pairs until then"
            axes.plot(at, [look["ratio"]], "o", color=COLOURS[0], label=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return chart(name, "pairs of blocks", "speed over the incumbent's", draw)
