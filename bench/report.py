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

import numpy as np
from verdicts import (
    NOT_COMPARABLE,
    NOT_MET,
    NOT_SHOWN,
    at_least,
    at_most,
    exactly,
    joint_over_best,
    quantile_interval,
    worst,
)

from spectune.engines.abilities import VLLM
from spectune.optimizer.report.charts import STYLE, WIDTH, Dot, Plot, curves, cut, dot_rows, short
from spectune.optimizer.report.words import policy_in_words
from spectune.runtime.policies.document import parse_policy

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
    "after one common factor: median 3%, 90th percentile 6%, or half of what measuring again "
    "differs by; tables of `tune` 5%"
)
PACE = "two shared cores; the factor is fitted to the executions that predictions are held against"
REGRET_TARGET = "98% of the best"
SERVERS = {
    "vllm": {"K=0": "draft loaded, 0 tokens", "off": "off: no draft loaded"},
    "openvino": {"K=0": "0 tokens: without its draft, as if off"},
}
"""Of constants that do not speculate, what a server has loaded."""
PAPERS = ("on-the-fly", "HeteroSpec", "C2T", "DynaSpec")
LITTLE = "prompt lookup is best nearly everywhere here: there is little to choose"
ENGINES = "other engines against one recording of theirs, round by round"
CHECKS = {
    "lossless": (
        "texts against autoregression and transformers, rounds against replay",
        "0 differences in float64",
        "on a CPU; rounds of policies that the recording covers",
    ),
    "rounding": (
        "texts that differ from autoregression's in float32 and bfloat16",
        "counted; none where autoregression is executed again",
        "on a CPU",
    ),
    "fidelity": ("predicted against executed speed", SPEED_TARGET, PACE),
    "regret": (
        "published winner against all fixed windows, executed",
        REGRET_TARGET,
        "chains alone; a winner compared with itself shows no regret",
    ),
    "combination": (
        "each paper alone and all together",
        "as fast as the best single paper",
        "three workloads; the row of EAGLE-2 is of trees by any score, ours included",
    ),
    "sampled": (
        "trees above temperature 0",
        "more tau than any chain at temperature 1",
        "tau, not speed",
    ),
    "shortlists": (
        "tau recovered by shortlists",
        "0 differences",
        "2% of the demo's 4,096 tokens; the papers keep more of 128,000",
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


def rows_table(figures: Figures) -> list[str]:
    """Lines of a part of :mod:`gpu`: its rows, and what it says beside them."""
    beside, rows = [], figures["rows"]
    for name, value in figures.items():
        if isinstance(value, float):
            beside.append(f"{name.replace('_', ' ')} {value:.4g}")
        elif name in ("publication", "cache"):
            beside += [f"{key} {each:.4g}" for key, each in value.items()]
    lines = table(list(rows[0]), [[_shown(x) for x in row.values()] for row in rows])
    return [figures["about"], "", *lines, *(["; ".join(beside), ""] if beside else [])]


def _shown(value: object) -> object:
    """A cell: nothing where a figure is missing."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else value


def plot_predictions() -> Plot:
    """Predicted against executed tokens/s."""
    kinds = _grouped(load("acceptance-fidelity")["rows"], "kind")
    speeds = ("measured_tokens_per_s", "predicted_after_factor_tokens_per_s")
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
    "Predicted (after one factor) and executed speed, a point a policy; equal on the line.": (
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
            "tau": "tau, of texts that fits have seen as well",
            "verified_over_eagle2": "verified tokens over EAGLE-2's",
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
    """The table of checks that were run, each with its verdict."""
    rows = [
        (title, target, figure(name), verdict(name), leaves_out)
        for name, (title, target, leaves_out) in CHECKS.items()
        if (RESULTS / f"acceptance-{name}.json").exists()
    ]
    return table(("check", "target", "figure", "verdict", "what it leaves out"), rows)


def verdict(name: str) -> str:
    """What a check shows of its target."""
    d = load(f"acceptance-{name}")
    if name == "fidelity":
        rows = [r for r in d["rows"] if r["kind"] != "shortlists"]
        errors = [abs(r["error_after_factor"]) for r in rows]
        again = [abs(r["repeat_error"]) for r in rows]
        tables = max(t["median_error_after_factor"] for t in d["tables"])
        return worst((_near(errors, again, (0.03, 0.06), 0.5), exactly(tables <= 0.05)))
    if name == "regret":
        return worst(at_least(row["share_interval"], 0.98) for row in d["rows"])
    if name == "combination":
        return at_least(joint_over_best(d["rows"], PAPERS)[1:], 1.0)
    if name == "sampled":  # of a few requests, without an interval
        return NOT_SHOWN if d["holds"] else NOT_MET
    if name == "shortlists":
        return f"texts: {exactly(d['holds'])}; tau: {NOT_COMPARABLE}"
    return exactly(bool(d["holds"] and d.get("reaches_share", True)))


def _near(
    errors: Sequence[float], again: Sequence[float], bars: tuple[float, float], share: float = 1.0
) -> str:
    """Whether the median and the 90th percentile of relative errors are within bars, or within a
    share of what executing again differs by, where that is more."""
    verdicts = []
    for quantile, bar in zip((0.5, 0.9), bars, strict=True):
        least = max(bar, share * float(np.quantile(again, quantile)))
        verdicts.append(at_most(quantile_interval(errors, quantile), least))
    return worst(verdicts)


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
    """Replay: measured, without a target of its own."""
    found = load("speed")
    replay, trees = found["replay"], found["trees"]
    speeds = replay["million_rounds_per_s"].values()
    rounds = [r["replayed_million_rounds_per_s"] for r in trees]
    grown = [n / 1000 for r in trees for n in r["tabulated_trees_per_s"].values()]
    search = f"{replay['trials']} trials over {replay['tokens']} tokens in "
    rows = {
        "replay of chains, one core": f"{min(speeds):.0f} to {max(speeds):.0f} million rounds/s by "
        "window",
        "a search": f"{search}{replay['trials_s']:.0f} s",
        "replay of trees, one core": f"{min(rounds):.1f} to {max(rounds):.1f} million rounds/s",
        "tabulating trees, once per growth": f"{min(grown):.0f} to {max(grown):.0f} thousand "
        "trees/s",
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
        (title, *(f"{100 * d[name][key]:.1f}%" for key in names), _within(d, name))
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
    cells, servers = {}, SERVERS[d["engine"]]
    for r in d["rows"]:
        speeds = f"{r['predicted_tokens_per_s']:.0f} / {median(r['tokens_per_s']):.0f}"
        cells[r["policy"], r["load"]] = speeds
    grid = [
        (servers.get(policy, policy), *(cells.get((policy, one), "") for one in loads))
        for policy in policies
    ]
    if d["engine"] == "vllm":
        about += " Worker and engine share a process (`bench/load.py` says why)."
    lines = [about, "", *table(columns, errors)]
    lines += table(("tokens/s, predicted / executed", *loads), grid)
    if d["engine"] == "vllm":  # whose tokens can follow the batch
        regret = d["regret"]
        lines += [
            f"The table that was found: {d['table']}. Its tokens/s, executed, as parts of those "
            "of every constant, of the draft loaded with 0 tokens, and of no draft loaded (95% "
            "intervals). The constants took turns with it in the running server, which alone "
            f"compares them: {d['turns'] // 4} of a second each, then {d['turns']} in all for "
            "those not behind it by then; a server without a draft is another server, executed "
            f"{d['passes']} times:",
            "",
        ]
        by_load, own = regret["by_load"], []
        clients = [int(r["load"].removeprefix("clients:")) for r in by_load]
        policy, most = parse_policy(d["table_policy"]), max(clients)
        gammas = VLLM.gammas(policy, draft=policy.draft, most=policy.gamma_max, max_num_seqs=most)
        for r, n in zip(by_load, clients, strict=True):
            said = f"{r['best_constant']}, the best executed (the table drafts {gammas[n]} there)"
            own.append((r["load"], said, r["share"]))
        own += [(r["load"], servers["off"], r["share"]) for r in regret["off"]]
        own += [
            ("all three", servers.get(r["constant"], r["constant"]), r["share"])
            for r in regret["together"]
        ]
        own = [(*said, _share(share)) for *said, share in own]
        lines += table(("load", "beside", "the table's tokens/s"), own)
    return lines


def _share(share: Sequence[float]) -> str:
    """A ratio with its interval; one that says nothing is no figure."""
    ratio, low, high = share
    if high > 4 * low:
        return "too few executions"
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def _within(d: Figures, name: str) -> str:
    """Whether what was predicted under load is within 5% and 10%, or what executing again differs
    by."""
    off, again = [], []
    for row in d["rows"]:
        each = row[name]
        off.append(abs(row[f"predicted_{name}"] / median(each) - 1))
        if len(each) > 1:
            again += [abs(x / median([*each[:i], *each[i + 1 :]]) - 1) for i, x in enumerate(each)]
    return _near(off, again, (0.05, 0.10))


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
    lines += ["## On a GPU", "", *_on_gpu(), *_gpu_parts()]
    lines += _loads() + _nulls() + _speeds() + _ranges()
    return "\n".join(lines).rstrip() + "\n"


def _on_gpu() -> list[str]:
    """The tunings that a GPU has run, and what they leave out."""
    runs = load("gpu")["tune"]
    first, again = runs[0], [_tuned_on_gpu(run) for run in runs[1:]]
    return [
        f"**{first['on']}**, a pair ballasted to {first['models']}: a whole `tune` took "
        f"{_tuned_on_gpu(first)}.{''.join(f' Tuned once more: {run}.' for run in again)} What this "
        "leaves out: ballast has the demo pair's texts and acceptance at the cost of large models; "
        f"one request at a time; {first['tuned']['confirmed']['requests']} requests held out. "
        f"(`python bench/gpu.py tune`; `{first['command']}`)",
        "",
    ]


def _gpu_parts() -> list[str]:
    """What parts of :mod:`gpu` have measured, by GPU."""
    lines = []
    for file in sorted(RESULTS.glob("gpu-*.json")):
        for name, part in load(file.stem).items():
            about = f"{part['on']}, {part['measured']}, torch {part['environment']['torch']}"
            about += f"; code of {part['code']}" if "code" in part else ""
            lines += [f"### {name} ({about})", "", *rows_table(part)]
    return lines


def _tuned_on_gpu(found: Figures) -> str:
    """What one tuning took and found, and how far its predictions were off."""
    tuned = found["tuned"]
    confirmed, prediction = tuned["confirmed"], tuned["prediction"]
    low, high = confirmed["interval"]
    after = f"{100 * prediction['median_error_after_factor']:.1f}% off in the median"
    if prediction["median_error"] is None:
        off = f"{after} after one common factor (it and the error before it were not kept)"
    else:
        off = (
            f"{100 * prediction['median_error']:.1f}% off in the median as made, {after} after one "
            f"common factor ({prediction['common_factor']:.3f})"
        )
    return (
        f"{found['wall_s']:.0f} s and published {policy_in_words(tuned['winner']['policy'])}, "
        f"**{confirmed['ratio']:.2f} times autoregression** (99% interval {low:.2f} to "
        f"{high:.2f}); speeds of its {prediction['policies']} executed policies were predicted "
        f"{off}"
    )


def highlights() -> str:
    """README's results: speed on a GPU and per workload, and what makes them worth believing."""
    rows = []
    for r in load("acceptance-regret")["rows"]:
        plain, best = (f"{r['tokens_per_s'][name]:.0f}" for name in ("autoregressive", r["winner"]))
        speedup = "{:.2f} ({:.2f} to {:.2f})".format(*r["speedup"])
        rows.append((r["workload"], plain, f"{r['winner']}: {best}", speedup))
    speeds = "speed-up (95% interval)"
    names = ("workload", "autoregressive, tokens/s", "published policy, tokens/s", speeds)
    lines = _on_gpu()
    lines += ["Two shared CPU cores, the demo pair (`make acceptance` measures again):", ""]
    lines += table(names, rows)
    lines += [
        f"- {CHECKS[name][0]}: {figure(name)} ({verdict(name)})"
        for name in ("lossless", "fidelity", "combination")
    ]
    low, high = coupled_costs_chains()
    lines.append(
        f"- at temperature 1 the default verifier, `coupled`, costs a chain {low} to {high}% of "
        "its speed against `--verifier rejection` (8 requests a workload, without an interval: "
        f"{NOT_SHOWN}); trees and heads need `coupled`"
    )
    found = load("load-vllm")
    shares = {r["constant"]: r["share"] for r in found["regret"]["together"]}
    off = _share(shares.pop("off"))
    ratios = [share[0] for share in shares.values()]
    errors = found["tokens_per_s"]
    lines.append(
        f"- vLLM under load, 1 to 32 clients together: tokens/s predicted "
        f"{100 * errors['median_error']:.1f}% off in the median (executing again differs by "
        f"{100 * errors['median_repeat_error']:.1f}%). A table of draft tokens by batch size, "
        f"found by simulation, reaches **{off} of the tokens/s of a server without a draft**: not "
        "to speculate was faster there. Of servers with the draft loaded it reaches "
        f"{min(ratios):.2f} to {max(ratios):.2f} times every constant number of tokens, 0 included"
    )
    return "\n".join(lines)


def coupled_costs_chains() -> tuple[int, int]:
    """Percent of a chain's speed that the verifier `coupled` costs against `rejection` at
    temperature 1: smallest and largest over workloads."""
    speeds: dict[str, dict[str, float]] = {}
    for r in load("acceptance-sampled")["rows"]:
        if r["temperature"] == 1.0 and r["draft"] == "medium":
            speeds.setdefault(r["method"], {})[r["workload"]] = r["speedup"]
    coupled, rejection = speeds["coupled chain"], speeds["rejection chain"]
    costs = [round(100 * (1 - coupled[name] / rejection[name])) for name in coupled]
    return min(costs), max(costs)


def main() -> None:
    (DOCS / "results.md").write_text(results())
    readme = ROOT / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n{highlights()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
