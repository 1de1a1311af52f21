"""Charts as SVG texts, drawn by matplotlib. Only what draws imports this: matplotlib takes a second
to import."""

from __future__ import annotations

import io
import logging
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spectune.traces.text import printable

COLOURS = ("#2566ae", "#c2560c", "#2a7d48", "#7a45ad", "#a8326a")
GREY = "#8b949e"
WIDTH_IN = 4.2
LABEL_WIDTH = 62
"""Characters of a label on one line of a chart."""

Estimate = tuple[float, float | None, float | None]
"""A value and the ends of its interval, None where they are not known."""

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells when it looks for fonts


def palette(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


class Chart:
    """A chart that is being drawn: its ``axes``, and ``svg`` once it is done."""

    axes: Axes
    svg: str = ""


@contextmanager
def chart(name: str, x_label: str, y_label: str = "", *, height_in: float = 3.2) -> Iterator[Chart]:
    """An empty chart; what is drawn within the context becomes its SVG. ``name`` is unique on a
    page: ids within the SVG are made from it."""
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.parse_math": False,
        "font.size": 9.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e9ecf0",
        "legend.frameon": False,
    }
    drawn = Chart()
    with matplotlib.rc_context(settings), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.simplefilter("ignore")  # letters that its font lacks; a browser has them
        figure = Figure((WIDTH_IN, height_in), layout="constrained")
        drawn.axes = figure.add_subplot()
        drawn.axes.set(xlabel=x_label, ylabel=y_label)
        yield drawn
        handles, labels = drawn.axes.get_legend_handles_labels()
        if labels:
            wrapped = ["\n".join(textwrap.wrap(label, LABEL_WIDTH)) for label in labels]
            figure.legend(handles, wrapped, loc="outside upper left", borderaxespad=0.0)
        figure.savefig(file := io.StringIO(), format="svg")
    text = printable(file.getvalue())
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    drawn.svg = re.sub(r'<g id="[^"]*">', "<g>", text[text.index("<svg") :])


def agreement(
    name: str,
    groups: Mapping[str, Sequence[tuple[float, Estimate]]],
    colours: Mapping[str, str] | None = None,
) -> str:
    """Predicted over measured speeds in tokens/s: ``(predicted, measured)`` by series. On the
    dashed line both are equal."""
    colours = colours or palette([*groups])
    with chart(name, "measured (tokens/s)", "predicted (tokens/s)", height_in=4.0) as drawn:
        axes = drawn.axes
        for group, points in groups.items():
            for predicted, (_, low, high) in points:
                if low is not None and high is not None:
                    axes.plot((low, high), (predicted, predicted), c=colours[group], lw=1.5)
            xs, ys = [measured[0] for _, measured in points], [predicted for predicted, _ in points]
            axes.plot(xs, ys, "o", c=colours[group], ms=4, label=group)
        end = max(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot((0, end), (0, end), "--", c=GREY, lw=1)
        axes.set(xlim=(0, end), ylim=(0, end))
    return drawn.svg


def curves(
    name: str,
    x_label: str,
    y_label: str,
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    colours: Mapping[str, str] | None = None,
    ends: Sequence[str] = (),
) -> str:
    """Lines through ``(x, y)``, a series each; ``ends``: the marks at their last points (none: a
    mark at every point, and axes from 0)."""
    colours = colours or palette([series for series, _ in lines])
    with chart(name, x_label, y_label, height_in=3.6) as drawn:
        labels: set[str] = set()
        for i, (series, points) in enumerate(lines):
            xs, ys = zip(*points, strict=True)
            mark, every = (ends[i], [len(xs) - 1]) if ends else (".", None)
            label = series if series not in labels else None
            line = drawn.axes.plot(xs, ys, c=colours[series], label=label, marker=mark, lw=1.5)
            line[0].set(markevery=every, zorder=len(lines) + 2 - i, ms=5)
            labels.add(series)
        drawn.axes.xaxis.get_major_locator().set_params(integer=True)
        if not ends:
            drawn.axes.set(xlim=(0, None), ylim=(0, None))
    return drawn.svg


def rows(
    name: str,
    x_label: str,
    lines: Sequence[tuple[str, Sequence[tuple[str, Estimate]]]],
    *,
    colours: Mapping[str, str] | None = None,
    legend: bool = True,
    from_zero: bool = False,
) -> str:
    """Marks with their intervals, a row for each label, the first on top: ``(series, estimate)``
    each."""
    colours = colours or palette(list(dict.fromkeys(s for _, marks in lines for s, _ in marks)))
    labels = [textwrap.wrap(label, LABEL_WIDTH) for label, _ in lines]
    tall = [1.0 + 0.4 * len(label) for label in labels]
    with chart(name, x_label, height_in=1.0 + 0.22 * sum(tall)) as drawn:
        axes, y, in_legend = drawn.axes, 0.0, set[str]()
        for label, (_, marks), height in zip(labels, lines, tall, strict=True):
            axes.text(
                0.0, y, "\n".join(label), transform=axes.get_yaxis_transform(), va="top", fontsize=8
            )
            y += height
            for series, (value, low, high) in marks:
                if low is not None and high is not None:
                    axes.plot((low, high), (y - 0.45,) * 2, c=colours[series], lw=1.5)
                shown = series if legend and series not in in_legend else None
                axes.plot([value], [y - 0.45], "o", c=colours[series], ms=5, label=shown)
                in_legend.add(series)
        axes.set(ylim=(y, -0.3), yticks=[], xlim=(0, None) if from_zero else None)
    return drawn.svg


def rounds(name: str, counts: Sequence[tuple[int, int, int]]) -> str:
    """A bar per round of ``(drafted, accepted, emitted)`` tokens: accepted ones, the target's own,
    rejected ones."""
    with chart(
        name, "tokens of a round", "round", height_in=0.9 + 0.13 * max(4, len(counts))
    ) as drawn:
        numbers = range(1, len(counts) + 1)
        accepted = [accepted for _, accepted, _ in counts]
        own = [emitted - accepted for _, accepted, emitted in counts]
        rejected = [drafted - accepted for drafted, accepted, _ in counts]
        left = [0] * len(counts)
        for label, widths, colour in (
            ("accepted", accepted, COLOURS[2]),
            ("the target's own", own, COLOURS[1]),
            ("rejected", rejected, "#d3d8de"),
        ):
            drawn.axes.barh(
                numbers, widths, left=left, color=colour, label=label, height=0.75, lw=0.5, ec="w"
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
        drawn.axes.set(ylim=(len(counts) + 0.6, 0.4))
        drawn.axes.yaxis.get_major_locator().set_params(integer=True)
        drawn.axes.xaxis.get_major_locator().set_params(integer=True)
    return drawn.svg
