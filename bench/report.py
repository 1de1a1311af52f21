"""Writes docs/results.md, its plots and README's results from bench/results.

python bench/report.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from spectune.engines.abilities import VLLM
from spectune.optimizer.report.charts import STYLE, WIDTH, Dot, Plot, curves, cut, dot_rows, short
from spectune.runtime.policies.document import parse_plain_policy

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
COLOURS = ("1", "2", "3", "4", "5", "6")
Figures = dict[str, Any]


def standalone(plot: Plot) -> str:
    """A chart as a file of its own, its legend below."""
    for i, (name, colour) in enumerate(plot.legend):
        x, y = 20.0 + WIDTH / 2 * (i % 2), plot.height + 12 + 18 * (i // 2)
        plot.add("circle", class_=f"f{colour}", cx=x, cy=y - 4, r=4.5)
        plot.text(x + 10, y, cut(name, 22), "start", class_="strong")
    tall = short(plot.height + 18 * math.ceil(len(plot.legend) / 2))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="480" viewBox="0 0 {WIDTH} {tall}">'
    return f"{head}<style>{STYLE}</style>\n" + "\n".join(plot.parts) + "\n</svg>\n"


SPEED_TARGET = (
    "median 3%, 90th percentile 6%, or half of what measuring again differs by; tables of `tune` 5%"
)
PACE = "two shared cores; one factor brings the profile to the pace of the executions, as in `tune`"
REGRET_TARGET = "98% of the best, or not behind beyond noise"
LITTLE = "prompt lookup is best nearly everywhere here: there is little to choose"
ENGINES = "other engines against one recording of theirs, round by round"
CHECKS = {
    "lossless": (
        "text against autoregression and transformers",
        "0 differences",
        "float32 on a CPU",
    ),
    "parity": (
        "replay against execution, round by round",
        "0 mismatches",
        "policies that the recording covers",
    ),
    "fidelity": ("predicted against executed speed", SPEED_TARGET, PACE),
    "regret": (
        "published winner against all fixed windows, executed",
        REGRET_TARGET,
        "chains alone; a winner compared with itself shows no regret",
    ),
    "combination": (
        "each paper alone and all together",
        "0.99 of the best single paper, or not behind beyond noise",
        "three workloads",
    ),
    "sampled": (
        "trees above temperature 0",
        "1.4 of EAGLE's tau at temperature 1",
        "tau, not speed",
    ),
    "shortlists": (
        "tau recovered by shortlists",
        "0 differences",
        "large vocabularies: the demo's has 4096 tokens",
    ),
    "draft-choice": ("a draft for each prompt", "0.97 of the oracle's gain", LITTLE),
    "kills": ("kill -9 of record and tune", "0 problems", "SQLite on one disk"),
    "borders": ("malformed input of every kind", "our errors alone", ""),
    "engines": (ENGINES, "0 mismatches", "greedy, on a CPU; vLLM is held by `make test-vllm`"),
}
"""Title, target, and what it leaves out of each check."""


def figure(name: str) -> str:
    """What a check found: its summary, or more where that says less than there is."""
    d = load(f"acceptance-{name}")
    if name == "kills":
        return f"{d['count']} kills in {len(d['kills'])} phases, {len(d['problems'])} problems"
    if name != "regret":
        return str(d["summary"])
    shares = []
    for r in d["rows"]:
        if r["winner"] == r["best_fixed"]:
            beside = "(the winner is that window)"
        else:  # an end that is not known is null
            beside = "({}-{})".format(*(f"{e:.3f}" if e else "?" for e in r["share_interval"]))
        shares.append(f"{r['workload']} {r['share_of_best']:.3f} {beside}")
    return f"{'; '.join(shares)}; without a gain `tune` published {d['no_gain']['published']}"


def load(name: str) -> Figures:
    """A result."""
    found: Figures = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), ""]


def plot_predictions() -> Plot:
    """Predicted against executed tokens/s."""
    kinds = _grouped(load("acceptance-fidelity")["rows"], "kind")
    speeds = ("measured_tokens_per_s", "predicted_tokens_per_s")
    end = 1.05 * max(r[speed] for own in kinds.values() for r in own for speed in speeds)
    plot = Plot((0.0, end), (0.0, end), height=260)
    plot.axes("executed, tokens/s", "predicted, tokens/s")
    plot.line([(0, 0), (end, end)], "s6 dash")
    plot.legend = [(kind, colour) for (kind,), colour in zip(kinds, COLOURS, strict=False)]
    for colour, own in zip(COLOURS, kinds.values(), strict=False):
        for r in own:
            measured, predicted = (r[speed] for speed in speeds)
            plot.dot(measured, predicted, colour, "", r=2.5)
    return plot


def plot_acceptance() -> Plot:
    """Share of rounds whose chain's i-th token is accepted: what one more drafted token adds to the
    mean accepted length."""
    given = []
    taus = load("acceptance-fidelity")["tau_by_gamma"]
    for (draft, own), colour in zip(taus.items(), COLOURS, strict=False):
        points = [(g, high - low, "") for g, (low, high) in enumerate(pairwise(own), 1)]
        given.append((draft, colour, points, True))
    return curves("position in the draft", "share of rounds that accept it", given)


def plot_methods() -> Plot:
    """Speed over autoregression by method and workload."""
    found = load("acceptance-combination")["rows"]
    workloads = dict(zip(dict.fromkeys(r["workload"] for r in found), COLOURS, strict=False))
    rows: list[tuple[str, list[Dot]]] = []
    for (space,), own in _grouped(found, "space").items():
        dots: list[Dot] = [(r["speedup"], (None, None), workloads[r["workload"]], "") for r in own]
        rows.append(("all together" if "+" in space else space, dots))
    plot = dot_rows("speed over autoregression", rows)
    plot.legend = list(workloads.items())
    return plot


PLOTS = {
    "Predicted against executed speed, a point a policy; on the line they are equal.": (
        "predictions",
        plot_predictions,
    ),
    "Speed over autoregression by method and workload, executed on unseen requests.": (
        "methods",
        plot_methods,
    ),
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
        {
            "tau": "tau",
            "verified_over_eagle2": "verified tokens over EAGLE-2's",
            "speedup": "speed over autoregression",
        },
    ),
    "Temperatures above 0": (
        ("acceptance-sampled", "rows"),
        ("temperature", "draft", "method"),
        {
            "tau": "tau",
            "calls_per_100_tokens": "target passes per 100 tokens",
            "speedup": "speed over autoregression",
        },
    ),
}


def _ranges() -> list[str]:
    """Tables of figures, smallest to largest over workloads."""
    lines = []
    for title, ((name, part), keys, columns) in RANGES.items():
        rows = [
            (*key, *(_range(r[column] for r in own) for column in columns))
            for key, own in _grouped(load(name)[part], *keys).items()
        ]
        lines += [f"### {title}, smallest to largest over workloads", ""]
        lines += table((*keys, *columns.values()), rows)
    return lines


def checks() -> list[str]:
    """The table of checks, each said met or not met."""
    rows = []
    for name, (title, target, leaves_out) in CHECKS.items():
        d = load(f"acceptance-{name}")
        met = _met(bool(d["holds"] and d.get("reaches_share", True)))
        rows.append((title, target, figure(name), met, leaves_out))
    return table(("check", "target", "figure", "verdict", "what it leaves out"), rows)


def _met(holds: bool) -> str:
    return "met" if holds else "**not met**"


def _nulls() -> list[str]:
    """False publications and power of `tune`'s race and confirmation, simulated with the code that
    ships."""
    found, rows = load("nulls"), []
    for null, gain in zip(found["nulls"], found["power"], strict=True):
        published = f"{null['published']} of {null['tunings']}"
        rows.append((null["candidates"], null["requests"], published, f"{100 * gain['rate']:.0f}%"))
    names = ("published without a gain", "published at a true gain of 5%")
    said = (
        f"Executed, six names of one behaviour: {found['real']['published']} of "
        f"{found['real']['tunings']} published."
    )
    lines = table(("candidates", "requests", *names), rows)
    return ["## What is published without a gain", "", *lines, said, ""]


def _speeds() -> list[str]:
    """Replay and the loop: measured, without a target of their own."""
    found = load("speed")
    replay, trees = found["replay"], found["trees"]
    speeds = replay["million_rounds_per_s"].values()
    rounds = [r["replayed_million_rounds_per_s"] for r in trees]
    grown = [n / 1000 for r in trees for n in r["tabulated_trees_per_s"].values()]
    shares = [100 * r["loop_share"] for r in found["loop"]["rounds"]]
    search = f"{replay['trials']} trials over {replay['tokens']} tokens in "
    rows = {
        "replay of chains, one core": f"{min(speeds):.0f} to {max(speeds):.0f} million rounds/s by "
        "window",
        "a search": f"{search}{replay['trials_s']:.0f} s",
        "replay of trees, one core": f"{min(rounds):.1f} to {max(rounds):.1f} million rounds/s",
        "tabulating trees, once per growth": f"{min(grown):.0f} to {max(grown):.0f} thousand "
        "trees/s",
        "sampling, windows, tensors, bookkeeping: of a round": f"{min(shares):.1f} to "
        f"{max(shares):.1f}%",
    }
    return ["## Speed of the tool", "", *table(("what", "figure"), rows.items())]


def _loads() -> list[str]:
    """Engines under load: simulated beside executed, and what the tables that were found lose to
    constants."""
    lines = ["## Under load, on other engines", ""]
    for engine in ("vllm", "openvino"):
        found = load(f"load-{engine}")
        lines += [f"### {engine} {found['version']}", "", *_load(found)]
    return lines


def _load(d: Figures) -> list[str]:
    """The tables of one engine."""
    names = ("median_error", "p90_error", "median_repeat_error", "p90_repeat_error")
    errors = [
        (title, *(f"{100 * d[name][key]:.1f}%" for key in names), _met(_within(d[name])))
        for name, title in (
            ("tokens_per_s", "tokens/s"),
            ("tpot_s", "mean time per output token"),
        )
    ]
    again = ("executed again, median", "90th percentile", "5% and 10%, or again")
    columns = ("predicted", "off, median", "90th percentile", *again)
    apart = "their executions do not overlap"
    if any("in_turns_tokens_per_s" in r for r in d["rows"]):
        apart = (
            f"where they took turns, the 95% interval of their ratio is clear of 1; else {apart}"
        )
    about = (
        f"Each policy executed {d['passes']} times in turn; predicted from steps recorded in "
        f"between, in runs of their own. Kendall's tau {d['kendall_tau']['tau']:.2f} over the "
        f"{d['kendall_tau']['pairs']} pairs of policies under one load that differ beyond noise "
        f"({apart})."
    )
    loads, policies = (dict.fromkeys(r[key] for r in d["rows"]) for key in ("load", "policy"))
    cells = {}
    for r in d["rows"]:
        speeds = f"{r['predicted_tokens_per_s']:.0f} / {median(r['tokens_per_s']):.0f}"
        cells[r["policy"], r["load"]] = speeds
    grid = [(policy, *(cells.get((policy, one), "") for one in loads)) for policy in policies]
    if d["engine"] == "vllm":
        about += " Worker and engine share a process (`bench/load.py` says why)."
    lines = [about, "", *table(columns, errors)]
    lines += table(("tokens/s, predicted / executed", *loads), grid)
    if d["engine"] == "vllm":  # whose tokens can follow the batch
        regret = d["regret"]
        lines += [
            f"The table that was found: {d['table']}. Its tokens/s, executed, as parts of the "
            "constants' (95% intervals). All took turns with it in the running server, which alone "
            f"compares them: {d['turns'] // 4} of a second each, then {d['turns']} in all for "
            "those not behind it by then:",
            "",
        ]
        by_load, own = regret["by_load"], []
        clients = [int(r["load"].removeprefix("clients:")) for r in by_load]
        policy, most = parse_plain_policy(d["table_policy"]), max(clients)
        gammas = VLLM.gammas(policy, draft=policy.draft, most=policy.gamma_max, max_num_seqs=most)
        for r, n in zip(by_load, clients, strict=True):
            said = f"{r['best_constant']}, the best executed (the table drafts {gammas[n]} there)"
            own.append((r["load"], said, r["share"]))
        own += [(r["load"], "off: no draft loaded", r["share"]) for r in regret["off"]]
        own += [("all three", r["constant"], r["share"]) for r in regret["together"]]
        own = [(*said, "{:.3f} ({:.3f} to {:.3f})".format(*share)) for *said, share in own]
        lines += table(("load", "constant", "the table beside it"), own)
    return lines


def _within(errors: Figures) -> bool:
    bars = max(0.05, errors["median_repeat_error"]), max(0.10, errors["p90_repeat_error"])
    return bool(errors["median_error"] <= bars[0] and errors["p90_error"] <= bars[1])


def results() -> str:
    """docs/results.md."""
    lines = [
        "# Results",
        "",
        "Written by `python bench/report.py` from `bench/results/` (`make acceptance`, `make "
        "bench`). Two CPU cores shared with others,",
        "float32, the demo pair (7 M target, 1.9 M and 0.6 M drafts, an EAGLE-3 head), one request "
        "at a time.",
        "",
        *checks(),
    ]
    for caption, (name, drawn) in PLOTS.items():
        (DOCS / "results" / f"{name}.svg").write_text(standalone(drawn()))
        lines += [f"![{caption}](results/{name}.svg)", "", f"*{caption}*", ""]
    lines += _loads() + _nulls() + _speeds() + _ranges()
    return "\n".join(lines).rstrip() + "\n"


def highlights() -> str:
    """README's results: speed per workload, and what makes them worth believing."""
    rows = []
    for r in load("acceptance-regret")["rows"]:
        plain, best = (f"{r['tokens_per_s'][name]:.0f}" for name in ("autoregressive", r["winner"]))
        rows.append((r["workload"], plain, f"{r['winner']}: {best}", f"{r['speedup'][0]:.2f}"))
    names = ("workload", "autoregressive, tokens/s", "published policy, tokens/s", "speed-up")
    lines = table(names, rows)
    lines += [f"- {CHECKS[name][0]}: {figure(name)}" for name in ("lossless", "fidelity")]
    found = load("load-vllm")
    shares = [r["share"][0] for r in found["regret"]["together"] if r["constant"] != "off"]
    errors = found["tokens_per_s"]
    lines.append(
        f"- vLLM under load: tokens/s predicted {100 * errors['median_error']:.1f}% off in the "
        f"median (executing again differs by {100 * errors['median_repeat_error']:.1f}%); draft "
        f"tokens by batch size, found by simulation, reach {min(shares):.2f} to {max(shares):.2f} "
        "times the tokens/s of every constant over 1 to 32 clients together"
    )
    return "\n".join(lines)


def main() -> None:
    (DOCS / "results.md").write_text(results())
    readme = ROOT / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n{highlights()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
