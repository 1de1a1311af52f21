"""What :mod:`map.cells` found, as a figure and as a page: called by `python bench/report.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from bench.labels import short
from bench.markdown import table

Cell = dict[str, Any]
COLOURS = {
    "nothing": "#d9d9d9", "chain": "#9ecae1", "window": "#6baed6", "shortlist": "#bcbddc",
    "tree": "#a1d99b", "own score": "#41ab5d", "bins": "#fdae6b", "classifier": "#f768a1",
    "two": "#d94801",
}  # fmt: skip
NAMES = {
    "nothing": "no speculation", "chain": "chain", "window": "adaptive window or depth",
    "shortlist": "shortlist", "tree": "tree (EAGLE-2, static)", "own score": "tree, coupled score",
    "bins": "bins (HeteroSpec)", "classifier": "classifier (C2T)", "two": "two papers together",
}  # fmt: skip
ABOUT = (
    "Times as fast as no speculation. Up: what a further token costs in the target's pass; right:",
    "what a pass of the draft costs, in passes of the target. Several requests: chains only.",
)
WIDTH, HEIGHT, LEFT, TOP, GAP = 46, 24, 46, 52, 22
"""Of a cell, of the margins, and between panels, in pixels."""


def percent(value: float) -> str:
    return f"{100 * value:.2g}%"


def ratio(interval: Sequence[float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*interval)


def figure(figures: dict[str, Any], draft: str = "head") -> str:
    """The map of a draft over all categories as SVG: a panel for each temperature and batch, a
    square for each draft cost and slope, coloured by what pays and with the speed over none."""
    cells, hardware = figures["cells"], figures["replay"]["hardware"]
    grid = [c for c in cells if c["draft"] == draft and c["category"] == "all" and "slope" in c]
    axes = (
        sorted({c[key] for c in grid}) for key in ("draft_cost", "slope", "batch", "temperature")
    )
    costs, slopes, batches, temperatures = axes
    wide, high = len(costs) * WIDTH, len(slopes) * HEIGHT
    across = LEFT + len(batches) * (wide + GAP)
    legend = TOP + len(temperatures) * (high + GAP + 20)
    parts: list[str] = []

    def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 11) -> None:
        parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">'
            f"{escape(words)}</text>"
        )

    for y, line in zip((14, 27), ABOUT, strict=True):
        text(LEFT, y, line, "start")
    for c in grid:
        x = LEFT + batches.index(c["batch"]) * (wide + GAP) + costs.index(c["draft_cost"]) * WIDTH
        row = len(slopes) - 1 - slopes.index(c["slope"])
        y = TOP + temperatures.index(c["temperature"]) * (high + GAP + 20) + row * HEIGHT
        parts.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" '
            f'fill="{COLOURS[c["verdict"]]}" stroke="white"/>'
        )
        text(x + WIDTH / 2, y + HEIGHT / 2 + 4, f"{c['speed'][0]:.1f}")
    for i, temperature in enumerate(temperatures):
        y = TOP + i * (high + GAP + 20)
        for j, batch in enumerate(batches):
            x = LEFT + j * (wide + GAP)
            title = f"temperature {temperature:g}, {batch} request{'s' * (batch > 1)}"
            text(x + wide / 2, y - 6, title, size=12)
            for k, cost in enumerate(costs):
                text(x + (k + 0.5) * WIDTH, y + high + 13, percent(cost))
        for k, slope in enumerate(reversed(slopes)):
            text(LEFT - 6, y + k * HEIGHT + HEIGHT / 2 + 4, percent(slope), "end")
    shown = [name for name in COLOURS if any(c["verdict"] == name for c in grid)]
    for n, name in enumerate(shown):
        x, y = LEFT + n % 4 * 155, legend + n // 4 * 18
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[name]}"/>')
        text(x + 17, y, NAMES[name], "start")
    bottom = legend + (len(shown) + 3) // 4 * 18
    for name, about in hardware.items():
        if about["label"] != "roofline" and draft in about["place"]:
            cost, slope = map(percent, about["place"][draft])
            line = f"{name}: right {cost}, up {slope} ({about['label']})"
            text(LEFT, bottom, line, "start", 10)
            bottom += 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{bottom}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def page(figures: dict[str, Any]) -> list[str]:
    """The generated lines of docs/map.md."""
    cells: list[Cell] = figures["cells"]
    grid = [c for c in cells if "slope" in c]
    single = [c for c in grid if c["batch"] == 1]
    wins = Counter(NAMES[c["verdict"]] for c in single)
    shares = ", ".join(f"{name} {count}" for name, count in wins.most_common())
    together = [c["two"] for c in single if c.get("two") and c["two"][2] > 1]
    lines = [
        f"{len(cells)} cells, {len(grid)} of the grid, in {figures['replay']['core_seconds']:.0f} "
        f"s of one core. What pays with one request at a time ({len(single)} cells): {shares}.",
        "",
        _together(single, together),
        "",
        "What each mechanism gains over the best tuned chain where it is the verdict:",
        "",
    ]
    rows = []
    for name in COLOURS:
        gains = sorted(c["gain"][0] for c in single if c["verdict"] == name)
        if gains and name not in ("nothing", "chain"):
            middle = gains[len(gains) // 2]
            rows.append(
                (NAMES[name], len(gains), f"{middle:.2f}", f"{gains[0]:.2f} to {gains[-1]:.2f}")
            )
    lines += table(("mechanism", "cells", "median", "range"), rows)
    several = [c for c in grid if c["batch"] > 1]
    for batch in sorted({c["batch"] for c in several}):
        of = [c for c in several if c["batch"] == batch]
        pays = [c for c in of if c["verdict"] != "nothing"]
        slope = max((c["slope"] for c in pays), default=0.0)
        lines.append(
            f"- {batch} requests at once: a chain pays in {len(pays)} of {len(of)} cells, "
            f"at slopes up to {percent(slope)}"
        )
    executed = figures.get("executed", {}).get("rows", ())
    inside = sum(r["inside"] for r in executed)
    return [*lines, f"- executed: {inside} of {len(executed)} policies inside their intervals"]


def tables(figures: dict[str, Any]) -> list[str]:
    """What docs/hardware.md shows of the map: known hardware, and executed policies."""
    return [*_hardware(figures), *_executed(figures)]


def _together(single: Sequence[Cell], together: Sequence[Sequence[Any]]) -> str:
    tried = sum("two" in c for c in single)
    if not together:
        return f"Two papers together beat the best of one beyond noise in none of {tried} cells."
    best = max(together, key=lambda two: two[2])
    return (
        f"Two papers together beat the best of one beyond noise in {len(together)} of {tried} "
        f"cells (uncorrected: were all alike, chance would give about {tried / 40:.0f}); the "
        f"surest: `{short(best[0])}`, {ratio(best[1:])} times as fast."
    )


def _hardware(figures: dict[str, Any]) -> list[str]:
    """A row for each named costs and draft, over all categories."""
    rows, hardware = [], figures["replay"]["hardware"]
    for name, about in hardware.items():
        for draft, place in about["place"].items():
            key = {"hardware": name, "category": "all", "draft": draft, "batch": 1}
            of = [c for c in figures["cells"] if key.items() <= c.items()]
            advice = [f"{NAMES[c['verdict']]}, {ratio(c['speed'])}" for c in of]
            rows.append((name, draft, about["label"], *map(percent, place), *advice))
    names = ("costs", "draft", "label", "draft cost", "slope", "temperature 0", "temperature 1")
    published = (
        f"- {name}: {about['source']}"
        for name, about in hardware.items()
        if about["label"] == "published"
    )
    return [*table(names, rows), "Published:", "", *published, ""]


def _executed(figures: dict[str, Any]) -> list[str]:
    """Executed policies beside what the map says of them."""
    rows = figures.get("executed", {}).get("rows", ())
    shown = [
        (r["cell"], f"`{short(r['policy'])}`", ratio(r["predicted"]), f"{r['executed']:.2f}",
         "met" if r["inside"] else "**not met**")
        for r in rows
    ]  # fmt: skip
    inside = sum(r["inside"] for r in rows)
    about = f"Executed, times as fast as no speculation; {inside} of {len(rows)} lie inside:"
    names = ("cell", "policy", "predicted", "executed", "verdict")
    return [about, "", *table(names, shown)] if rows else []
