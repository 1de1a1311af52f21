"""Writes docs/results.md, its plots and README's three results from bench/results.

python bench/report.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
COLOURS = ("#3b6fb6", "#c8552b", "#3f8f5f", "#8a5bb0", "#9a8a1f", "#666666")
Figures = dict[str, Any]


class Check(NamedTuple):
    """A row of the table: a function of the check's figures may say more than its summary, another whether the target is met."""

    name: str
    title: str
    target: str
    leaves_out: str
    figure: Callable[[Figures], str] = lambda d: str(d["summary"])
    met: Callable[[Figures], bool] = lambda d: bool(d["holds"])


def _regret(d: Figures) -> str:
    shares = (
        f"{r['workload']} {r['share_of_best']:.3f}" + (" (the winner is that window)" if r["winner"] == r["best_fixed"] else "")
        for r in d["rows"]
    )
    return f"{'; '.join(shares)}; without a gain `tune` published {d['no_gain']['published']}"


SPEED_TARGET = "median 3%, 90th percentile 6%, or what measuring again differs by; tables of `tune` 5%"
PACE = "two shared cores; one factor brings the profile to the pace of the executions, as in `tune`"
LITTLE = "prompt lookup is best nearly everywhere here: there is little to choose"
CHECKS = (
    Check("lossless", "text against autoregression and transformers", "0 differences", "float32 on a CPU"),
    Check("parity", "replay against execution, round by round", "0 mismatches", "policies that the recording covers"),
    Check("fidelity", "predicted against executed speed", SPEED_TARGET, PACE),
    Check(
        "regret", "published winner against all fixed windows, executed", "98% of the best, or not behind beyond noise",
        "chains alone; a winner compared with itself shows no regret", _regret,
    ),
    Check("combination", "each paper alone and all together", "0.99 of the best single paper", "three workloads"),
    Check("sampled", "trees above temperature 0", "1.4 of EAGLE's tau at temperature 1", "tau, not speed"),
    Check(
        "shortlists", "tau recovered by shortlists, DynaSpec's theorems, 32768 tokens", "0 differences, 0 violations",
        "the wide vocabulary is padded with tokens that never occur",
    ),
    Check(
        "draft-choice", "a draft for each prompt", "0.97 of the oracle's gain", LITTLE,
        met=lambda d: bool(d["holds"] and d["reaches_share"]),
    ),
    Check("verifiers", "distributions of the verifiers", "all tests pass", ""),
    Check(
        "kills", "kill -9 of record and tune", "0 problems", "SQLite on one disk",
        lambda d: f"{d['count']} kills in {len(d['kills'])} phases, {len(d['problems'])} problems",
    ),
    Check("schedules", "schedules", "all tests pass", ""),
    Check("borders", "malformed input of every kind", "our errors alone", ""),
    Check("chaos", "kills, outages and garbage at once", "0 failures", "databases are not recreated"),
)  # fmt: skip


def load(name: str) -> Figures | None:
    """A result, or None where it was not measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), ""]


class Plot:
    """A scatter or line plot as SVG, readable on light and dark ground; ``x`` and ``y`` are the labels of its ticks."""

    WIDTH, HEIGHT, BOTTOM = 640, 400, 50

    def __init__(self, x: dict[float, str], y: dict[float, str], names: tuple[str, str], left: int = 60) -> None:
        self.x, self.y, self.left, self.parts = ((min(x), max(x)), (min(y), max(y)), left, list[str]())
        self.names: list[tuple[str, str]] = []
        for value, label in x.items():
            across, bottom = self.at(value, self.y[0])
            self.parts.append(f'<path d="M{across:.1f} {bottom:.1f}V20" stroke="#888" stroke-opacity=".3"/>')
            self.text(across, bottom + 18, label)
        for value, label in y.items():
            _, up = self.at(self.x[0], value)
            self.parts.append(f'<path d="M{left} {up:.1f}H{self.WIDTH - 20}" stroke="#888" stroke-opacity=".3"/>')
            self.text(left - 8, up + 4, label, "end")
        self.text(self.WIDTH / 2, self.HEIGHT - 8, names[0])
        self.text(left, 13, names[1], "start")

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return (
            self.left + across * (self.WIDTH - self.left - 20),
            self.HEIGHT - self.BOTTOM - up * (self.HEIGHT - self.BOTTOM - 20),
        )

    def text(self, x: float, y: float, words: str, anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    def series(self, name: str, points: Sequence[tuple[float, float]], *, joined: bool = False, named: bool = True) -> None:
        """Points of one colour, with a name in the legend."""
        colour = COLOURS[len(self.names) % len(COLOURS)] if named else "#888"
        found = [self.at(*point) for point in points]
        if joined:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in found)
            self.parts.append(f'<path d="{path}" stroke="{colour}" stroke-width="1.5" fill="none"/>')
        if named:
            self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in found]
            self.names.append((name, colour))

    def write(self, path: Path) -> None:
        for i, (name, colour) in enumerate(self.names):
            x, y = self.WIDTH - 100, 36 + 18 * i
            self.parts.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{colour}"/>')
            self.text(x + 12, y, name, "start")
        style = "text{font:12px sans-serif;fill:#555}@media(prefers-color-scheme:dark){text{fill:#bbb}}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.WIDTH} {self.HEIGHT}"><style>{style}</style>'
        path.parent.mkdir(exist_ok=True)
        path.write_text(head + "\n" + "\n".join(self.parts) + "\n</svg>\n")


def plot_predictions() -> Plot | None:
    """Predicted against executed tokens/s."""
    found = load("acceptance-fidelity")
    if found is None:
        return None
    rows, step = _grouped(found["rows"], "kind"), 50
    names = ("measured_tokens_per_s", "predicted_tokens_per_s")
    top = step * math.ceil(max(r[name] for r in found["rows"] for name in names) / step)
    axis = {float(v): str(v) for v in range(0, top + 1, step)}
    plot = Plot(axis, axis, ("executed, tokens/s", "predicted, tokens/s"))
    plot.series("", [(0, 0), (top, top)], joined=True, named=False)
    for (kind,), own in rows.items():
        plot.series(kind or "", [(r[names[0]], r[names[1]]) for r in own])
    return plot


def plot_acceptance() -> Plot | None:
    """Share of rounds whose chain's i-th token is accepted: what one more drafted token adds to the mean accepted length."""
    found = load("acceptance-fidelity")
    if found is None or "tau_by_gamma" not in found:
        return None
    most = max(len(taus) for taus in found["tau_by_gamma"].values())
    ticks = {float(g): str(g) for g in range(0, most, 2)}, {i / 5: f"{i / 5:g}" for i in range(6)}
    plot = Plot(*ticks, ("position in the draft", "share of rounds that accept it"))
    for draft, taus in found["tau_by_gamma"].items():
        plot.series(draft, [(g + 1, high - low) for g, (low, high) in enumerate(pairwise(taus))], joined=True)
    return plot


def plot_methods() -> Plot | None:
    """Speed over autoregression by method and workload."""
    found = load("acceptance-combination")
    if found is None:
        return None
    rows = found["rows"]
    spaces = list(dict.fromkeys(r["space"] for r in rows))[::-1]
    low, high = (end(10 * of(r["speedup"] for r in rows)) for end, of in ((math.floor, min), (math.ceil, max)))
    labels = {float(i): "all together" if "+" in space else space for i, space in enumerate(spaces)}
    ticks = {t / 10: f"{t / 10:g}" for t in range(low, high + 2)}
    plot = Plot(ticks, {-0.5: "", **labels, len(spaces) - 0.5: ""}, ("speed over autoregression", ""), left=120)
    for (workload,), own in _grouped(rows, "workload").items():
        plot.series(workload, [(r["speedup"], spaces.index(r["space"])) for r in own])
    return plot


PLOTS = {
    "Predicted against executed speed, a point a policy; on the line they are equal.": ("predictions", plot_predictions),
    "Speed over autoregression by method and workload, executed on unseen requests.": ("methods", plot_methods),
    "Acceptance by position: greedy chains, all workloads.": ("acceptance", plot_acceptance),
}


def _range(values: Iterable[float]) -> str:
    """The smallest and the largest, over workloads."""
    low, *_, high = (f"{v:.2f}" for v in sorted([*values] * 2))
    return low if low == high else f"{low} to {high}"


def _grouped(rows: list[Figures], *keys: str) -> dict[tuple[Any, ...], list[Figures]]:
    groups: dict[tuple[Any, ...], list[Figures]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(k) for k in keys), []).append(row)
    return groups


RANGES = {
    "The tree papers' methods, greedy": (
        ("acceptance-combination", "methods"),
        ("draft", "method"),
        {"tau": "tau", "verified_over_eagle2": "verified tokens over EAGLE-2's", "speedup": "speed over autoregression"},
    ),
    "Temperatures above 0": (
        ("acceptance-sampled", "rows"),
        ("temperature", "draft", "method"),
        {"tau": "tau", "calls_per_100_tokens": "target passes per 100 tokens", "speedup": "speed over autoregression"},
    ),
}


def _ranges() -> list[str]:
    """Tables of figures, smallest to largest over workloads."""
    lines = []
    for title, ((name, part), keys, columns) in RANGES.items():
        if found := load(name):
            rows = [
                (*key, *(_range(r[column] for r in own) for column in columns)) for key, own in _grouped(found[part], *keys).items()
            ]
            lines += [f"### {title}, smallest to largest over workloads", "", *table((*keys, *columns.values()), rows)]
    return lines


def checks() -> list[str]:
    """The table of checks, each said met or not met."""
    found = ((check, load(f"acceptance-{check.name}")) for check in CHECKS)
    rows = [
        (check.title, check.target, check.figure(d), "met" if check.met(d) else "**not met**", check.leaves_out)
        for check, d in found
        if d is not None
    ]
    return table(("check", "target", "figure", "verdict", "what it leaves out"), rows)


def _speeds() -> list[str]:
    """Replay and the loop: measured, without a target of their own."""
    rows: list[tuple[str, str]] = []
    found = load("speed") or {}
    if replay := found.get("replay"):
        speeds = replay["million_rounds_per_s"].values()
        rows.append(("replay of chains, one core", f"{min(speeds):.0f} to {max(speeds):.0f} million rounds/s by window"))
        rows.append(("a search", f"{replay['trials']} trials over {replay['tokens']} tokens in {replay['trials_s']:.0f} s"))
    if trees := found.get("trees"):
        rounds = [r["replayed_million_rounds_per_s"] for r in trees]
        grown = [n / 1000 for r in trees for n in r["tabulated_trees_per_s"].values()]
        rows.append(("replay of trees, one core", f"{min(rounds):.1f} to {max(rounds):.1f} million rounds/s"))
        rows.append(("tabulating trees, once per growth", f"{min(grown):.0f} to {max(grown):.0f} thousand trees/s"))
    if loop := found.get("loop"):
        shares = [100 * r["loop_share"] for r in loop["rounds"]]
        rows.append(("sampling, windows, tensors, bookkeeping: of a round", f"{min(shares):.1f} to {max(shares):.1f}%"))
    return ["## Speed of the tool", "", *table(("what", "figure"), rows)] if rows else []


def results() -> str:
    """docs/results.md."""
    lines = [
        "# Results",
        "",
        "Written by `python bench/report.py` from `bench/results/` (`make acceptance`, `make bench`). Two CPU cores shared with others,",
        "float32, the demo pair (7 M target, 1.9 M and 0.6 M drafts, an EAGLE-3 head), one request at a time.",
        "",
        *checks(),
    ]
    for caption, (name, drawn) in PLOTS.items():
        if plot := drawn():
            plot.write(DOCS / "results" / f"{name}.svg")
            lines += [f"![{caption}](results/{name}.svg)", "", f"*{caption}*", ""]
    lines += _speeds() + _ranges()
    return "\n".join(lines).rstrip() + "\n"


def highlights() -> str:
    """README's results: speed per workload, and what makes them worth believing."""
    lines: list[str] = []
    if regret := load("acceptance-regret"):
        rows = []
        for r in regret["rows"]:
            speed = r["tokens_per_s"]
            published = f"{r['winner']}: {speed[r['winner']]:.0f}"
            rows.append((r["workload"], f"{speed['autoregressive']:.0f}", published, f"{r['speedup'][0]:.2f}"))
        lines += table(("workload", "autoregressive, tokens/s", "published policy, tokens/s", "speed-up"), rows)
    names = ("lossless", "fidelity", "chaos")
    lines += [f"- {c.title}: {c.figure(d)}" for c in CHECKS if c.name in names and (d := load(f"acceptance-{c.name}"))]
    return "\n".join(lines)


def main() -> None:
    (DOCS / "results.md").write_text(results())
    readme = ROOT / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n{highlights()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
