"""What :mod:`map.cells` found, as a figure and as a page: called by `python bench/report.py`."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from math import log
from operator import itemgetter
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from bench.labels import short
from bench.markdown import table
from bench.verdicts import outcome

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
    "Speed over no speculation, and by what: K tokens, or a tree's width x depth and N nodes.",
    "Up: what a further token costs in the target's pass; right: what a pass of the draft costs;",
    "both in rounds without a draft.",
    "Several requests: chains, and of the head trees. Circles: named costs, below.",
)
WIDTH, HEIGHT, LEFT, TOP, GAP = 54, 30, 46, 80, 22
"""Of a cell, of the margins, and between panels, in pixels."""
COLOURED = re.compile(r"\b(tree|coupled|bins( \d+)?|(position )?frequency \S+|clusters \S+) ?")
LETTERS = 12
"""Of a policy's name that fit a cell; longer ones are squeezed."""


def percent(value: float) -> str:
    return f"{100 * value:.2g}%"


def ratio(interval: Sequence[float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*interval)


def tiny(label: str) -> str:
    """A policy without its draft and what the colour says, as a cell of the figure has it: ``K=3``,
    ``8x4 N=24``, ``K=8 p<0.3`` of one that stops."""
    words = short(label).split(" ", 1)[1:]
    shown = COLOURED.sub("", words[0]) if words else ""
    return re.sub(r"(max|joint) prob ", "p<", shown).strip()


def between(value: float, ticks: Sequence[float]) -> float:
    """Where a value lies among an axis' ticks, in ticks: by logarithms, or from 0 on by itself."""
    if value >= ticks[-1]:
        return len(ticks) - 1.0
    n = max(0, bisect_right(ticks, value) - 1)
    low, high = ticks[n : n + 2]
    share = (value - low) / (high - low) if low == 0 else log(value / low) / log(high / low)
    return n + max(0.0, share)


class Row(NamedTuple):
    """Panels side by side, one for each number of requests: a draft, a kind of text, a temperature,
    and what they are called."""

    draft: str
    category: str
    temperature: float
    name: str


def of_head(figures: dict[str, Any]) -> list[Row]:
    """An EAGLE-like head on all texts, a row for each temperature."""
    temperatures = sorted({c["temperature"] for c in figures["cells"]})
    return [Row("head", "all", t, f"temperature {t:g}") for t in temperatures]


def by_acceptance(figures: dict[str, Any]) -> list[Row]:
    """The pairs of a draft and a kind of text whose first tokens are accepted least often, about as
    often as the others', and most often, greedy."""
    pairs = sorted(
        (share, first["draft"], category)
        for first in figures["replay"]["first_token"]
        for category, share in first["share"].items()
        if first["draft"] != "ngram" and first["temperature"] == 0 and category != "all"
    )
    return [
        Row(draft, category, 0.0, f"{draft}, {category}, {share:.0%}")
        for share, draft, category in (pairs[0], pairs[len(pairs) // 2], pairs[-1])
    ]


def figure(figures: dict[str, Any], shown: Sequence[Row], marked: bool = False) -> str:
    """The map as SVG: of each row a panel for each number of requests, a square for each draft cost
    and slope, coloured by what pays and with the speed over none; ``marked``: with circles where
    known hardware is."""
    cells, hardware = figures["cells"], figures["replay"]["hardware"]
    grid = [c for c in cells if "slope" in c]
    draft = shown[0].draft
    costs, slopes, batches = (
        sorted({c[key] for c in grid if c["draft"] == draft})
        for key in ("draft_cost", "slope", "batch")
    )
    wide, high = len(costs) * WIDTH, len(slopes) * HEIGHT
    across = LEFT + len(batches) * (wide + GAP)
    legend = TOP + len(shown) * (high + GAP + 20)
    parts: list[str] = []

    def text(
        x: float, y: float, words: str, anchor: str = "middle", size: int = 11, more: str = ""
    ) -> None:
        parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{more}>'
            f"{escape(words)}</text>"
        )

    for y, line in zip((14, 27, 40, 53), ABOUT if marked else ABOUT[:-1], strict=False):
        text(LEFT, y, line, "start")
    used = set()
    for i, row in enumerate(shown):
        top = TOP + i * (high + GAP + 20)
        for j, batch in enumerate(batches):
            x = LEFT + j * (wide + GAP)
            title = f"{row.name}: {batch} request{'s' * (batch > 1)}"
            text(x + wide / 2, top - 6, title, size=12)
            for k, cost in enumerate(costs):
                text(x + (k + 0.5) * WIDTH, top + high + 13, percent(cost))
        for k, slope in enumerate(reversed(slopes)):
            text(LEFT - 6, top + k * HEIGHT + HEIGHT / 2 + 4, percent(slope), "end")
        key = dict(zip(("draft", "category", "temperature"), row[:3], strict=True))
        for c in (c for c in grid if key.items() <= c.items()):
            x = LEFT + batches.index(c["batch"]) * (wide + GAP)
            x += costs.index(c["draft_cost"]) * WIDTH
            y = top + (len(slopes) - 1 - slopes.index(c["slope"])) * HEIGHT
            used.add(c["verdict"])
            parts.append(
                f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" '
                f'fill="{COLOURS[c["verdict"]]}" stroke="white"/>'
            )
            text(x + WIDTH / 2, y + 13, f"{c['speed'][0]:.1f}")
            name = tiny(c["best"])
            squeezed = f' textLength="{WIDTH - 4}" lengthAdjust="spacingAndGlyphs"'
            text(x + WIDTH / 2, y + 24, name, size=8, more=squeezed * (len(name) > LETTERS))
    named = [name for name in COLOURS if name in used]
    for n, name in enumerate(named):
        x, y = LEFT + n % 4 * 155, legend + n // 4 * 18
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[name]}"/>')
        text(x + 17, y, NAMES[name], "start")
    bottom = legend + (len(named) + 3) // 4 * 18
    places = {name: about["place"][draft] for name, about in hardware.items()
              if marked and draft in about["place"]}  # fmt: skip
    marks = list[tuple[float, float]]()
    for n, (name, (cost, slope)) in enumerate(places.items(), 1):
        x = LEFT + (between(cost, costs) + 0.5) * WIDTH
        y = TOP + (len(slopes) - 1 - between(slope, slopes)) * HEIGHT  # above the words
        while any(abs(x - a) < 11 and abs(y - b) < 11 for a, b in marks):
            x += 11
        marks.append((x, y))
        for i in range(len(shown)):
            at = y + i * (high + GAP + 20)
            parts.append(f'<circle cx="{x:g}" cy="{at:g}" r="5" fill="white" stroke="black"/>')
            text(x, at + 3, str(n), size=8)
        line = f"{n}: {name}: right {percent(cost)}, up {percent(slope)} "
        text(LEFT, bottom, f"{line}({hardware[name]['label']})", "start", 10)
        bottom += 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{bottom}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def figures_of(figures: dict[str, Any]) -> dict[str, str]:
    """The two figures of docs/map.md, by file."""
    return {
        "docs/map.svg": figure(figures, of_head(figures), marked=True),
        "docs/map-acceptance.svg": figure(figures, by_acceptance(figures)),
    }


def page(figures: dict[str, Any]) -> list[str]:
    """The generated lines of docs/map.md."""
    cells: list[Cell] = figures["cells"]
    grid = [c for c in cells if "slope" in c]
    single = [c for c in grid if c["batch"] == 1]
    wins = Counter(NAMES[c["verdict"]] for c in single)
    shares = ", ".join(f"{name} {count}" for name, count in wins.most_common())
    together = [c["two"] for c in single if c.get("two") and c["two"][2] > 1]
    lines = [
        f"What pays with one request at a time ({len(single)} of {len(cells)} cells): {shares}. "
        f"{figures['replay']['measured']}, code of {figures['replay']['code']}.",
        "",
        _together(single, together),
        "",
        "Gains where it is the verdict, in the median (smallest to largest); *beyond noise*: cells "
        "where it beats the best plain tree, of either score:",
        "",
    ]
    rows = []
    for name in COLOURS:
        won = [c for c in single if c["verdict"] == name]
        if won and name not in ("nothing", "chain"):
            over = (_spread([c[key][0] for c in won if key in c]) for key in ("gain", "gain_tree"))
            beyond = sum(c["gain_tree"][1] > 1 for c in won if "gain_tree" in c)
            rows.append((NAMES[name], len(won), *over, beyond))
    heads = ("over the best chain", "over the best plain tree", "beyond noise")
    lines += table(("mechanism", "cells", *heads), rows)
    several = [c for c in grid if c["batch"] > 1]
    for batch in sorted({c["batch"] for c in several}):
        of = [c for c in several if c["batch"] == batch]
        slopes = Counter(c["slope"] for c in of)
        pays = Counter(c["slope"] for c in of if c["verdict"] != "nothing")
        most = max((slope for slope in pays if 2 * pays[slope] > slopes[slope]), default=0.0)
        grown = [c for c in of if "tree" in c]
        beaten = [c for c in grown if c["verdict"] in ("tree", "own score")]
        lines.append(
            f"- {batch} at once: speculation pays in {pays.total()} of {len(of)} cells, in most up "
            f"to a slope of {percent(most)}; trees, of a head, in {len(beaten)} of {len(grown)}"
            f"{_at_most(beaten)}"
        )
    loaded = _spread([c["loaded"] for c in several])
    lines.append(
        f"- a draft that is loaded, reads along and proposes nothing: {loaded} of no draft's speed"
    )
    executed = figures.get("executed", {}).get("rows", ())
    inside = sum(r["inside"] for r in executed)
    lines.append(f"- shortlists, {shortlists(figures)}")
    below = sum(r["executed"] < r["predicted"][0] for r in executed)
    return [
        *lines,
        f"- executed on GPUs: {inside} of {len(executed)} policies inside their intervals, {below} "
        "slower than predicted",
    ]


def _at_most(cells: Sequence[Cell]) -> str:
    """The greatest slope among cells."""
    return f", up to {percent(max(c['slope'] for c in cells))}" if cells else ""


def wins(figures: dict[str, Any], verdict: str) -> str:
    """In how many cells of one request a mechanism is the fastest, and over any plain tree."""
    single = [c for c in figures["cells"] if "slope" in c and c["batch"] == 1]
    won = [c for c in single if c["verdict"] == verdict]
    beyond = sum(c["gain_tree"][1] > 1 for c in won if "gain_tree" in c)
    return (
        f"On [the map](../map.md): fastest in {len(won)} of {len(single)} cells, {beyond} over "
        "any plain tree."
    )


def shortlists(figures: dict[str, Any]) -> str:
    """Whose shortlists are verdicts, and at which price of an output head."""
    single = [c for c in figures["cells"] if "slope" in c and c["batch"] == 1]
    best = [c["best"] for c in single if c["verdict"] == "shortlist"]
    routed = sum("clusters" in policy for policy in best)
    return (
        "priced as an 8B's EAGLE head, most of which is its vocabulary, with the acceptance of "
        f"4,096 tokens: FR-Spec's list in {len(best) - routed} of {len(single)} cells, DynaSpec's "
        f"router in {routed}"
    )


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    if not ordered:
        return ""
    return f"{ordered[len(ordered) // 2]:.2f} ({ordered[0]:.2f} to {ordered[-1]:.2f})"


def tables(figures: dict[str, Any]) -> list[str]:
    """What docs/hardware.md shows of the map: executed policies, and known hardware."""
    return [*_executed(figures), *_hardware(figures)]


def _together(single: Sequence[Cell], together: Sequence[Sequence[Any]]) -> str:
    tried = sum("two" in c for c in single)
    if not together:
        return f"Two papers together beat the best of one beyond noise in none of {tried} cells."
    return (
        f"Two papers together beat the best of one beyond noise in {len(together)} of {tried} "
        f"cells; were all alike, chance would give about {tried / 40:.0f}."
    )


def _hardware(figures: dict[str, Any]) -> list[str]:
    """A row for each named costs and draft, over all categories."""
    rows, hardware = [], figures["replay"]["hardware"]
    for name, about in hardware.items():
        for draft, place in about["place"].items():
            key = {"hardware": name, "category": "all", "draft": draft, "batch": 1}
            of = [c for c in figures["cells"] if key.items() <= c.items()]
            advice = [
                f"{NAMES[c['verdict']]}, `{short(c['best'])}`, {ratio(c['speed'])}" for c in of
            ]
            rows.append((name, draft, about["label"], *map(percent, place), *advice))
    names = ("costs", "draft", "label", "draft cost", "slope", "temperature 0", "temperature 1")
    published = (
        f"- {name}: {about['source']}"
        for name, about in hardware.items()
        if about["label"] == "published"
    )
    return [*table(names, rows), "Published:", "", *published, "", *_under_load(figures)]


def _under_load(figures: dict[str, Any]) -> list[str]:
    """The best chain of named costs by requests at once, and its speed over none."""
    cells = [c for c in figures["cells"] if "hardware" in c and c["batch"] > 1]
    of = {(c["hardware"], c["draft"], c["temperature"], c["batch"]): c for c in cells}
    loads = sorted({key[2:] for key in of})
    rows = [
        (*who, *(f"`{tiny(of[*who, *load]['best'])}` {ratio(of[*who, *load]['speed'])}".replace(
            "`` 1.00 (1.00 to 1.00)", "none") for load in loads))
        for who in dict.fromkeys(key[:2] for key in of)
    ]  # fmt: skip
    heads = (f"{batch} at once, temperature {temperature:g}" for temperature, batch in loads)
    about = "Several requests at once, the best chain over no draft, of costs that have steps:"
    return [about, "", *table(("costs", "draft", *heads), rows)]


def _executed(figures: dict[str, Any]) -> list[str]:
    """Executed policies beside what the map says of them."""
    rows = figures.get("executed", {}).get("rows", ())
    shown = [
        (r["cell"], f"`{short(r['policy'])}`", ratio(r["predicted"]), f"{r['executed']:.2f}",
         "met" if r["inside"] else "**not met**")
        for r in rows
    ]  # fmt: skip
    inside = sum(r["inside"] for r in rows)
    shares = sorted(r["executed"] / r["predicted"][0] for r in rows)
    below, middle = sum(share < 1 for share in shares), shares[len(shares) // 2]
    about = (
        f"Executed by tunings on GPUs, times as fast as no speculation: {inside} of {len(rows)} "
        f"inside what was predicted, {below} below it, in the median at {middle:.3f} of it. The "
        "requests are others, and reading their prompts is in what was executed alone:"
    )
    names = ("cell", "policy", "predicted", "executed", "verdict")
    blind = _blind(figures["blind"], figures.get("acceptance")) if "blind" in figures else []
    return [about, "", *table(names, shown), *blind]


def outcomes(d: dict[str, Any]) -> list[str]:
    """Of every executed cell."""
    return [outcome(r["verdict"], r["executed"], r["following_executed"]) for r in d["rows"]]


def _blind(d: dict[str, Any], acceptance: dict[str, Any] | None) -> list[str]:
    """Cells that were drawn before anything was run; and how their requests were accepted."""
    rows = [
        (
            f"{r['draft']}, {r['category']}, temperature {r['temperature']:g}, "
            f"{r['clients']} client{'s' * (r['clients'] > 1)}",
            f"{NAMES[r['verdict']]}, `{short(r['policy'])}`",
            ratio(r["predicted"]),
            ratio(r["executed"]),
            f"`{short(r['following'])}`",
            ratio(r["following_predicted"]),
            ratio(r["following_executed"]),
            told,
        )
        for r, told in zip(d["rows"], outcomes(d), strict=True)
    ]
    counts = Counter(outcomes(d))
    spoken = [r for r in d["rows"] if r["verdict"] != "nothing"]
    off = sorted(r["executed"][0] / r["predicted"][0] for r in spoken)
    others = ""
    if acceptance is not None:
        cell = itemgetter("temperature", "draft", "category")
        taus = {cell(r): r["tau_over"][0] for r in acceptance["rows"]}
        each = sorted(taus[cell(r)] for r in spoken)
        rest = sorted(r["executed"][0] / r["predicted"][0] / taus[cell(r)] for r in spoken)
        others = (
            f" These 40 requests have {each[len(each) // 2]:.3f} ({each[0]:.3f} to {each[-1]:.3f}) "
            "of the map's tokens a round by the same policy; without that, executed over "
            f"predicted is {rest[len(rest) // 2]:.3f} ({rest[0]:.3f} to {rest[-1]:.3f})."
        )
    again = sorted(abs(x - 1) for r in d["rows"] for x in r.get("again", ()))
    about = (
        f"**Blind**: {len(rows)} cells of this machine, drawn by seed {d['seed']} before anything "
        f"was run, executed on 40 requests that the map has not read: {counts['right']} right, "
        f"{counts['a tie']} ties (what is next is neither faster nor slower beyond noise), "
        f"{counts['wrong']} wrong. Executed over predicted, where the verdict is to "
        f"draft: {off[len(off) // 2]:.3f} in the median ({off[0]:.3f} to "
        f"{off[-1]:.3f}).{others} Executing several clients again differs by "
        f"{again[len(again) // 2]:.1%} in the median. By the processor's clock, in one thread. "
        f"`python bench/run.py map_executed --only blind`, {d['measured']}, code of {d['code']}."
    )
    heads = (
        "cell", "verdict", "predicted over none", "executed over none", "next",
        "next over it, predicted", "executed", "is",
    )  # fmt: skip
    return [about, "", *table(heads, rows)]
