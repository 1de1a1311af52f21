"""Writes the pages of docs that hold measurements alone, and the marked parts of others and of
README, from bench/results: `python bench/report.py`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import RESULTS, ROOT, load_page, measured_page, questions_page, real_page
from bench.labels import short
from bench.map import page as map_page
from bench.markdown import percent, ratio, table
from bench.papers import pages as paper_pages
from bench.papers.claims import CERTAIN, verdict
from bench.verdicts import (
    NOT_MET,
    NOT_SHOWN,
    at_least,
    at_most,
    exactly,
    prediction_errors,
    quantile_interval,
    worst,
)

Figures = dict[str, Any]


def load(name: str) -> Figures:
    """A result."""
    figures: Figures = json.loads((RESULTS / f"{name}.json").read_text())
    return figures


def between(text: str, name: str, lines: Iterable[str]) -> str:
    """A page with what stands between the markers of a name made anew."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = text.split(begin)
    return "\n".join((head + begin, *lines, end + rest.split(end)[1]))


# ------------------------------------------------------------------------------------------ checks


def lossless(d: Figures) -> tuple[str, str]:
    texts, rounds = (sum(row[name] for row in d["rows"]) for name in ("texts", "rounds"))
    differ, unlike = (
        sum(row[name] for row in d["rows"]) for name in ("texts_differ", "rounds_differ")
    )
    compared = re.search(r"\d+ of \d+ greedy texts", d["summary"])
    figure = f"{differ} of {texts} texts, {unlike} of {rounds} rounds"
    figure += f"; {compared[0]} beside transformers" if compared else ""
    return figure, exactly(d["holds"])


def rounding(d: Figures) -> tuple[str, str]:
    said = []
    for dtype in ("float32", "bfloat16"):
        rows = [row for row in d["rows"] if row["dtype"] == dtype]
        said.append(f"{dtype} {sum(r['differ'] for r in rows)} of {sum(r['texts'] for r in rows)}")
    again = sum(row["again"] for row in d["rows"])
    return f"{', '.join(said)}; again {again}", exactly(d["holds"])


def fidelity(d: Figures) -> tuple[str, str]:
    rows = [r for r in d["rows"] if r["kind"] != "shortlists"]
    errors, again = ([abs(r[key]) for r in rows] for key in ("error_after_factor", "repeat_error"))
    tables, plain = (max(t[key] for t in d["tables"]) for key in ("error", "median_error"))
    near = within(errors, again, (0.03, 0.06), 0.5)
    made, after, repeat = (
        " and ".join(percent(float(np.quantile(each, q))) for q in (0.5, 0.9))
        for each in ([abs(r["error"]) for r in rows], errors, again)
    )
    figure = (
        f"{after} of {len(rows)} policies (without the factor {made}; measuring again {repeat}); "
        f"tables {percent(tables)} (without {percent(plain)})"
    )
    return figure, worst((near, exactly(tables <= 0.05)))


def regret(d: Figures) -> tuple[str, str]:
    shares = []
    for r in d["rows"]:
        same = r["winner"] == r["best_fixed"]
        share = (r["share_of_best"], *r["share_interval"])
        shown = f"{share[0]:.3f} (it is that window)" if same else ratio(share)
        shares.append(f"{r['workload']} {shown}")
    return "; ".join(shares), worst(at_least(r["share_interval"], 0.98) for r in d["rows"])


def rollouts(d: Figures) -> tuple[str, str]:
    wrong, half = d["null"]["largest_share"], d["harm"]["half_within_four_pairs"]
    count = sum(row["rollouts"] for row in d["null"]["rows"])
    alone = [r for r in d["power"]["rows"] if r["servers"] == 1]
    found = ", ".join(
        f"{percent(r['gain'], 0)} in {percent(r['promote'] / r['rollouts'], 0)}" for r in alone
    )
    figure = (
        f"{percent(wrong['promote'], 2)}, {percent(wrong['revert'], 2)} at most, of {count}; "
        f"{percent(half)}; one server promotes {found}"
    )
    return figure, exactly(d["null"]["holds"] and d["harm"]["holds"])


def drift(d: Figures) -> tuple[str, str]:
    alarmed, series = d["stationary"]["alarmed"], d["stationary"]["series"]
    prose = next(row for row in d["change"]["rows"] if row["change"].endswith("2.4 to 1.3"))
    median, (low, high) = prose["requests"]["median"], prose["requests"]["interval"]
    seen = f"{prose['seen']} of {prose['series']}, after {median:.0f} requests ({low}-{high})"
    return f"{alarmed} of {series}; {seen}", exactly(d["stationary"]["holds"])


def false_publications(d: Figures) -> tuple[str, str]:
    published, tunings = (sum(row[name] for row in d["nulls"]) for name in ("published", "tunings"))
    share = published / tunings
    width = 1.96 * (share * (1 - share) / tunings) ** 0.5
    low, high = share - width, share + width
    gains = [row["rate"] for row in d["power"]]
    figure = (
        f"{percent(share, 2)} ({percent(low, 2)} to {percent(high, 2)}) of {tunings} simulated; a "
        f"gain of 5% in {100 * min(gains):.0f} to {100 * max(gains):.0f}%"
    )
    return figure, at_most((low, high), 0.01)


def sampled(d: Figures) -> tuple[str, str]:
    figure = d["summary"].split(" reach ")[1].split(" times")[0]
    return f"{figure} times", NOT_SHOWN if d["holds"] else NOT_MET  # of a few requests, no interval


def search(d: Figures) -> tuple[str, str]:
    means = []
    for case in d["cases"]:
        grid, tpe = (np.array(case[name])[:, 1] for name in ("enumeration", "tpe"))
        means.append(float(np.exp(np.log(tpe / grid).mean())))
    tried = [np.array(case[name])[:, 2].mean() for name in ("tpe", "enumeration")
             for case in d["cases"]]  # fmt: skip
    half = len(tried) // 2
    few, many = sum(tried[:half]) / half, sum(tried[half:]) / half
    figure = f"{min(means):.3f} to {max(means):.3f}, by {few:.0f} policies for {many:.0f}"
    return figure, NO_TARGET


def speed(d: Figures) -> tuple[str, str]:
    replay = d["replay"]
    chains = replay["million_rounds_per_s"].values()
    trees = [row["replayed_million_rounds_per_s"] for row in d["trees"]]
    figure = (
        f"chains {min(chains):.0f} to {max(chains):.0f}, trees {min(trees):.1f} to "
        f"{max(trees):.1f} million rounds/s"
    )
    return figure, NO_TARGET


def kills(d: Figures) -> tuple[str, str]:
    return f"{len(d['problems'])} problems in {d['count']} kills", exactly(d["holds"])


def real(d: Figures) -> tuple[str, str]:
    first, *others = (part["summary"] for part in d.values())
    told = [re.sub(r" \(.*?\) and", ",", first).removesuffix(" differ")]
    told += [re.sub(r" \(.*", "", other) for other in others]
    return "; ".join(told), exactly(all(part["holds"] for part in d.values()))


NO_TARGET = "no target"
CHECKS = {
    "acceptance-lossless": (
        "texts against autoregression, rounds against replay, in float64",
        "none differs",
        "a CPU; rounds of policies that the recording covers",
        lossless,
    ),
    "real": (
        "Gemma 3 270M: what differs",
        "none in float64",
        "texts of 24 to 64 tokens",
        real,
    ),
    "acceptance-rounding": (
        "texts that differ in other types",
        "counted; none of autoregression again",
        "a CPU",
        rounding,
    ),
    "acceptance-fidelity": (
        "predicted against executed speed, off in the median and the 90th percentile",
        "after one common factor 3% and 6%, or half of measuring again; tables of `tune` 5%",
        "the factor is fitted to the same executions",
        fidelity,
    ),
    "acceptance-regret": (
        "published winner over the best of all fixed windows, executed",
        "0.98",
        "chains alone, of a race's survivors",
        regret,
    ),
    "nulls": (
        "published without a gain",
        "1% of tunings",
        "requests that all policies are slowed on alike",
        false_publications,
    ),
    "rollouts": (
        "rollouts of equals: promoted, reverted; half the speed reverted",
        "1%, 1%; 99%",
        "simulated",
        rollouts,
    ),
    "drift": (
        "series of 3,000 stationary requests with an alarm; code turned into prose",
        "1%; none",
        "simulated",
        drift,
    ),
    "search": (
        "speed of TPE's choice over enumerated grids",
        "none",
        "replay, three workloads, two temperatures",
        search,
    ),
    "speed": ("speed of replay, one core", "none", "", speed),
    "acceptance-sampled": (
        "tau of trees over chains at temperature 1",
        "more",
        "tau, not speed; no interval",
        sampled,
    ),
    "acceptance-kills": ("`kill -9` of record and tune", "0 problems", "SQLite on one disk", kills),
}
"""Of each result: what was checked, its target, what it leaves out, and what gives its figure and
verdict."""


def checks() -> list[str]:
    """The table of checks that were run, each with its verdict."""
    rows = [
        (title, target, *judge(load(name)), leaves_out)
        for name, (title, target, leaves_out, judge) in CHECKS.items()
        if (RESULTS / f"{name}.json").exists()
    ]
    return table(("check", "target", "figure", "verdict", "left out"), rows)


def within(
    errors: Sequence[float], again: Sequence[float], bars: tuple[float, float], share: float = 1.0
) -> str:
    """Whether the median and the 90th percentile of relative errors are within bars, or within a
    share of what executing again differs by, where that is more."""
    verdicts = []
    for quantile, bar in zip((0.5, 0.9), bars, strict=True):
        limit = max(bar, share * float(np.quantile(again, quantile)))
        verdicts.append(at_most(quantile_interval(errors, quantile), limit))
    return worst(verdicts)


# -------------------------------------------------------------------------------------------- vLLM


def loads() -> list[str]:
    """vLLM under load: simulated beside executed, and the table that was found beside constants and
    no draft."""
    rows, d = [], load("load-vllm")
    for name, title in (("tokens_per_s", "tokens/s"), ("tpot_s", "time per token")):
        off, most, again, most_again = off_by_clients(d, name)
        figures = (f"{off} and {most}", f"{again} and {most_again}")
        rows.append((f"{title}, predicted", *figures, under_load(d, name)))
    names = {"K=0": "draft loaded, 0 tokens", "off": "no draft loaded"}
    shares = [
        (names.get(r["constant"], r["constant"]), ratio(r["share"]), at_least(r["share"][1:], 1.0))
        for r in d["regret"]["together"]
    ]
    return [
        "## vLLM under load",
        "",
        f"vLLM {d['version']}, 1, 8 and 32 clients. Off in the median and the 90th percentile; the "
        "bar is 5% and 10%, or what executing again is off by:",
        "",
        *table(("what", "off", "executed again", "verdict"), rows),
        f"`{short(d['table'])}`, the table that was found: its tokens/s over those of every "
        "constant, in turns of a second in one server, and of a server without a draft (95% "
        "interval). The verdict is whether it is faster:",
        "",
        *table(("beside", "the table's tokens/s", "verdict"), shares),
    ]


def served() -> list[str]:
    """What is promised of a vLLM that serves; nothing before it was measured."""
    if not (RESULTS / "served.json").exists():
        return []
    parts = {name: part for name, part in load("served").items() if "summary" in part}
    parts.pop("tune_url_real", None)  # docs/gemma.md has it
    rows = []
    for name, part in parts.items():
        if (kind := name.partition("_")[0]) not in TOLD_TOGETHER:
            rows.append((name.replace("_", " "), served_figure(name, part), exactly(part["holds"])))
        elif name == kind:
            alike = [of for other, of in parts.items() if other.startswith(kind)]
            holds = exactly(all(of["holds"] for of in alike))
            rows.append((kind, TOLD_TOGETHER[kind](alike), holds))
    about = (
        "On CPUs (`make acceptance-vllm`), under a draft model, prompt lookup, an EAGLE-3 head and "
        "an MTP layer:"
    )
    return ["## vLLM", "", about, "", *table(("part", "figure", "verdict"), rows)]


def _faults(parts: Sequence[Figures]) -> str:
    """With a draft model, with prompt lookup, and a step ahead."""
    steps, differ = (sum(p["steps"][k] for p in parts) for k in ("steps", "steps_differ"))
    raised = [p["faults"] for p in parts if "faults" in p]
    faults, *harm = (
        sum(of[k] for of in raised) for k in ("raised", "failed", "requests", "texts_differ")
    )
    return (
        f"{differ} of {steps} steps differ; {faults} faults: {harm[0]} of {harm[1]} requests "
        f"failed, {harm[2]} texts differ"
    )


def _trials(parts: Sequence[Figures]) -> str:
    """In a real vLLM, and beside stand-ins for it."""
    faults = [fault for part in parts for fault in part["faults"].values()]
    times, begun, late = (sum(f[k] for f in faults) for k in ("times", "trials", "outlived"))
    lost = sum(p["lost"] + p["acknowledged_lost"] for p in parts)
    noted, failed, differ = (sum(p[k] for p in parts) for k in ("noted", "failed", "differ"))
    return (
        f"{times} kills, outages, stepped clocks: {late} of {begun} outlived their end; {lost} of "
        f"{noted} requests lost, {failed} failed, {differ} texts differ"
    )


TOLD_TOGETHER = {"faults": _faults, "trials": _trials}
"""Parts whose names begin alike, in one row."""


def served_figure(name: str, part: Figures) -> str:
    """What a part of the checks of vLLM has measured."""
    if name == "tune_url":
        low, high = part["confirmed"]["interval"]
        least = min(of for of in _beside_others(part["loads"], part["winner"]).values())
        return (
            f"`{short(part['winner'])}` {part['ratio']:.2f} ({low:.2f} to {high:.2f}) times as "
            f"fast as what the server drafted, in {part['seconds']:.0f} s; {least:.2f} times the "
            "fastest constant that it executed (bar: time and texts)"
        )
    if name == "predictions":
        return _predicted_by_clients(part["tokens_per_s_by_load"])
    figure = short(str(part["summary"]))
    if name == "rounds":
        errors = [
            abs(row["predicted"]["tau"] / row["executed"]["tau"] - 1)
            for of_draft in part["drafters"].values()
            for row in of_draft["sampled"]["tau"]
        ]
        figure += f"; tau at temperature 0.8 at most {percent(max(errors))} off"
    return figure


def _predicted_by_clients(loads: Figures) -> str:
    """Predicted tokens/s of a tuning by clients, apart from what comes as it was recorded."""
    closed = [of for load, of in loads.items() if load.endswith("clients")]
    off, again = (
        f"{percent(min(of[key] for of in closed))} to {percent(max(of[key] for of in closed))}"
        for key in ("median_error", "median_repeat_error")
    )
    return (
        f"tokens/s by 1 to 8 clients predicted {off} off in the median (executing again: {again})"
    )


def _beside_others(executed: Sequence[Figures], winner: str) -> dict[str, float]:
    """Tokens/s of a tuning's winner over those of each of the others that it executed, in the
    geometric mean of the loads."""
    speeds = {
        policy["label"]: [load["measured"]["tokens_per_s"] for load in policy["loads"]]
        for policy in executed
    }
    ours = np.log(speeds.pop(winner))
    return {name: float(np.exp((ours - np.log(of)).mean())) for name, of in speeds.items()}


def by_clients(d: Figures, name: str) -> tuple[list[float], list[float]]:
    """Errors of predictions by a number of clients, and of executing again. What arrives at a rate
    is served at that rate, which is no prediction."""
    closed = [row for row in d["rows"] if row["load"].startswith("clients:")]
    return prediction_errors(closed, name)


def off_by_clients(d: Figures, name: str) -> list[str]:
    """Their medians and 90th percentiles: of predictions, then of executing again."""
    return [
        percent(float(np.quantile(errors, q))) for errors in by_clients(d, name) for q in (0.5, 0.9)
    ]


def under_load(d: Figures, name: str) -> str:
    """Whether what was predicted under load is within 5% and 10%, or what executing again differs
    by."""
    return within(*by_clients(d, name), (0.05, 0.10))


# --------------------------------------------------------------------------------------------- GPU


def newest_gpu() -> list[Figures]:
    """What every GPU has measured, the newest tuning first."""
    files = [load(file.stem) for file in RESULTS.glob("gpu-nvidia-*.json")]
    return sorted(files, key=lambda parts: str(parts["tune"]["measured"]), reverse=True)


def gpus() -> list[str]:
    """What GPUs have measured, side by side, the newest first, each figure with its verdict."""
    every = newest_gpu()
    names = ("what", *(parts["tune"]["on"] for parts in every), "verdict")
    columns = [gpu_figures(parts) for parts in every]
    rows = []
    for what in columns[0]:
        cells = [column.get(what, ("", "")) for column in columns]
        judged = dict.fromkeys(verdict for _, verdict in cells if verdict)
        rows.append((what, *(figure for figure, _ in cells), ", ".join(judged)))
    models = every[0]["tune"]["models"]
    about = (
        f"The demo pair's texts and acceptance, ballasted to {models}, one request at a time "
        "(`python bench/run.py gpu`). The speed-up is met where its interval lies above 1."
    )
    return ["## A GPU", "", about, "", *table(names, rows), *_heads(every)]


def _heads(every: Iterable[Figures]) -> list[str]:
    """How far predictions of heads were off where their profile was not as it should be."""
    lines = []
    for run in (parts["tune"] for parts in every):
        if "heads_profiled" in run:
            rows = [row for row in run["rows"] if str(row["label"]).startswith("head ")]
            slow = [1 - r["predicted_tokens_per_s"] / r["measured_tokens_per_s"] for r in rows]
            lines += [
                f"On the {run['on']} heads were profiled {run['heads_profiled']}, and so predicted "
                f"{percent(min(slow))} to {percent(max(slow))} too slow.",
                "",
            ]
    return lines


def gpu_figures(parts: Figures) -> dict[str, tuple[str, str]]:
    """Figures and verdicts of a GPU, by what they are of."""
    speeds = {r["what"].split(", ")[-1]: r["tokens/s"] for r in parts["generate"]["rows"]}
    best, run = max(float(row["tokens/s"]) for row in parts["rounds"]["rows"]), parts["tune"]
    tuned, confirmed = run["tuned"], run["tuned"]["confirmed"]
    low, high = confirmed["interval"]
    level = f"{100 * confirmed['level']:.0f}%"
    figures = {
        "measured": (f"{run['measured']}, code of {run['code']}", ""),
        "autoregression, tokens/s": (f"{speeds['ours']:.0f}", ""),
        "transformers, compiled": (f"{speeds['compiled']:.0f}", ""),
        "fastest set by hand, other requests": (f"{by_hand(parts)}, {best:.0f}", ""),
        "published by `tune`": (f"`{short(tuned['winner']['label'])}`", ""),
        f"times autoregression ({level} interval)": (
            f"{confirmed['ratio']:.2f} ({low:.2f} to {high:.2f})",
            at_least((low, high), 1.0),
        ),
        "requests held out": (str(confirmed["requests"]), ""),
        "found in": (f"{run['wall_s']:.0f} s", ""),
        "predicted speeds, off in the median": (prediction_figure(run), ""),
    }
    for row in parts.get("texts", {"rows": ()})["rows"]:
        exact = exactly(row["differ"] == 0) if row["dtype"] == "float64" else ""
        figures[f"texts that differ, {row['dtype']}"] = (
            f"{row['differ']} of {row['texts']}",
            exact,
        )
    return figures


def by_hand(parts: Figures) -> str:
    """The fastest of the policies that nobody tuned, and its speed over autoregression's, over the
    same rounds."""
    rows = parts["rounds"]["rows"]
    plain = next(row["tokens/s"] for row in rows if row["policy"] == "autoregression")
    best = max(rows, key=lambda row: float(row["tokens/s"]))
    return f"`{short(best['policy'])}` {best['tokens/s'] / plain:.2f} times autoregression"


def prediction_figure(run: Figures) -> str:
    """How far a tuning's predictions were off, after its factor where that helps, and what the
    profile of heads did to theirs."""
    prediction = run["tuned"]["prediction"]
    off, nearer = prediction["median_error"], prediction["median_error_after_factor"]
    said = percent(off)
    if nearer is not None and nearer < off:
        said += f", after one factor {percent(nearer)}"
    return f"{said} ({prediction['policies']} policies)"


# ------------------------------------------------------------------------------------------- pages


def believed() -> list[str]:
    """The first lines of docs/simulator.md: what was foretold, beside what was executed."""
    own, vllm = load("acceptance-lossless"), load("served")["rounds"]
    differ, rounds = (sum(row[name] for row in own["rows"]) for name in ("rounds_differ", "rounds"))
    d = load("acceptance-fidelity")
    rows = [r for r in d["rows"] if r["kind"] != "shortlists"]
    made, after, again = (
        percent(median(abs(r[key]) for r in rows))
        for key in ("error", "error_after_factor", "repeat_error")
    )
    fast = sum(r["error"] > 0 for r in rows)
    runs = [parts["tune"] for parts in newest_gpu()]
    gpus = ", ".join(
        f"{run['on']} {percent(run['tuned']['prediction']['median_error'])}" for run in runs
    )
    mapped = load("map")["executed"]["rows"]
    below = sum(r["executed"] < r["predicted"][0] for r in mapped)
    native = load("load-native")["executed"]
    served, _, served_again, _ = off_by_clients(load("load-vllm"), "tokens_per_s")
    every = [t for t in real_page.by_lookup() if t["check"]]
    public, none = ([t for t in every if bool(t["confirmed"]) == has] for has in (True, False))
    slower = ", ".join(f"{t['check']['speedup']:.2f}" for t in none)
    told, found = (
        ", ".join(f"{t[part][key]:.2f}" for t in public)
        for part, key in (("check", "speedup"), ("confirmed", "ratio"))
    )
    return [
        f"- **Rounds are exact**: {differ} of {rounds} differ on our decoder, {vllm['differ']} of "
        f"{vllm['rounds']} in vLLM on CPUs.",
        f"- **Seconds on shared CPU cores**: {fast} of {len(rows)} policies were predicted too "
        f"fast, by {made} in the median; {after} off after one factor (measuring again {again}). "
        f"Their order: Kendall's tau {d['kendall_tau']:.2f}, measuring again "
        f"{d['kendall_tau_measured_again']:.2f}.",
        f"- **GPUs, one request**: {gpus} off in the median. Over no draft, {below} of "
        f"{len(mapped)} were [slower than the map says](hardware.md).",
        f"- **Under load**: our decoder {percent(native['median_error'])} off (executing again "
        f"{percent(native['median_repeat_error'])}), vLLM on CPUs {served} ({served_again}). vLLM "
        "on a GPU: not executed.",
        f"- **Gemma 3 270M**: `check` foretold {told} times autoregression, `tune` reached "
        f"{found}; {sum(t['published'] for t in public)} of {len(public)} beyond noise. Where it "
        f"foretold {slower} (temperature 1), nothing was faster.",
    ]


def papers_figures() -> tuple[Figures, Figures]:
    """The parts of results on papers, and how each was made."""
    figures = load("papers")
    return figures, figures.pop("made")


def results() -> str:
    """docs/results.md."""
    about = (
        "Written by `python bench/report.py`. Unless it says otherwise: two shared CPU cores, "
        "float32, the demo pair (7 M target, 1.9 M and 0.6 M drafts, an EAGLE-3 head), one request "
        "at a time. A target is met by the unfavourable end of an interval alone. Policies are in "
        "short form: `ngram K=7` drafts 7 tokens, `head tree 8x4 N=60` trees 8 wide and 4 deep, "
        "cut to 60 nodes."
    )
    figures, _ = papers_figures()
    rows = [row for part in figures.values() for row in part["rows"]]
    held = sum(paper_pages.is_claimed(row) and verdict(row) != CERTAIN for row in rows)
    of_papers = (
        f"Not corrected for their number: of {held} truths at their bars, chance makes about "
        f"{held / 40:.0f} met."
    )
    columns = ("paper", *(paper_pages.KINDS[kind] for kind in paper_pages.JUDGED))
    lines = ["# Results", "", about, "", "## What was checked", "", *checks(), *gpus()]
    lines += [*served(), *loads(), "## The papers", "", of_papers, ""]
    lines += table(columns, paper_pages.summary(figures))
    lines += [
        "Known hardware: [hardware](hardware.md). [When, by what code](measured.md).",
        "",
    ]
    return "\n".join(lines).rstrip() + "\n"


def paper_page(name: str) -> str:
    """docs/papers/NAME.md."""
    figures, made = papers_figures()
    more = {"on_the_fly": closed_forms, "verifier": temperatures}
    lines = more[name]() if name in more else []
    first = []
    if name == "dynaspec":
        verdicts = f"The fastest on [the map](../map.md), {map_page.shortlists(load('map'))}."
        first = [verdicts, "", *real_page.large_vocabulary()]
    if name == "heterospec":
        first = [*real_page.trees("tau", "tokens"), *paper_pages.by_saturation(figures)]
    if name == "c2t":
        first = real_page.trees("nodes")
    mechanism = {"heterospec": "bins", "c2t": "classifier", "on_the_fly": "window"}.get(name)
    on_map = map_page.wins(load("map"), mechanism) if mechanism else ""
    whole = [paper_pages.page(figures, made, name, first, on_map), *lines]
    return "\n".join(whole).rstrip() + "\n"


def closed_forms() -> list[str]:
    """What equations 1 and 2 of the on-the-fly paper (1 of DynaSpec) make of every fixed window's
    mean accepted length, from the acceptance that one window observed, beside what replay counts:
    the rounds that were executed."""
    replayed = [r["tau_error"] for r in load("acceptance-lossless")["rows"] if r.get("exact", True)]
    of_replay, rows = percent(max(map(abs, replayed))), []
    for draft, taus in load("acceptance-fidelity")["tau_by_gamma"].items():
        for observed in (1, 4):
            accepted, rejected = taus[observed] - 1, 1 - (taus[observed] - taus[observed - 1])
            beta = accepted / (accepted + rejected)
            errors = {
                gamma: sum(beta**i for i in range(gamma + 1)) / tau - 1
                for gamma, tau in enumerate(taus)
                if gamma
            }
            worst_at = max(errors, key=lambda gamma, of=errors: abs(of[gamma]))
            middle = percent(median(map(abs, errors.values())))
            largest = f"{100 * errors[worst_at]:+.1f}% at gamma {worst_at}"
            rows.append((draft, observed, f"{beta:.3f}", middle, largest, of_replay))
    columns = (
        "draft",
        "observed gamma",
        "beta",
        "error of tau, median",
        "largest",
        "of replay, at most",
    )
    about = "Tau of greedy chains of 1 to 12 tokens by the closed forms, beside replay's:"
    return ["## Closed forms beside replay", "", about, "", *table(columns, rows)]


def temperatures() -> list[str]:
    """Trees and chains above temperature 0, smallest to largest over workloads."""
    groups: dict[tuple[Any, ...], list[Figures]] = {}
    for row in load("acceptance-sampled")["rows"]:
        groups.setdefault((row["temperature"], row["draft"], row["method"]), []).append(row)
    rows = []
    for key, group in groups.items():
        spans = []
        for column in ("tau", "speedup"):
            values = [r[column] for r in group]
            spans.append(f"{min(values):.2f} to {max(values):.2f}")
        rows.append((*key, *spans))
    columns = ("temperature", "draft", "method", "tau", "speed over autoregression")
    return ["## Temperatures above 0, over three workloads", "", *table(columns, rows)]


def hardware() -> str:
    """docs/hardware.md."""
    about = "What [the map](map.md) says of known hardware; generated."
    lines = ["# What pays on known hardware", "", about, "", *map_page.tables(load("map"))]
    return "\n".join(lines).rstrip() + "\n"


def acceptance() -> str:
    """docs/acceptance.md."""
    found = load("matrix")
    d, made = found["matrix"], found["made"]["matrix"]
    lengths = [cell["K"] for cell in d["rows"][0]["cells"]]
    cells = sum(len(row["cells"]) for row in d["rows"] if row["category"] == "all")
    took = sum(row["s"] for row in d["executed"]) / len(d["executed"])
    differ, rounds = (sum(row[name] for row in d["executed"]) for name in ("differ", "rounds"))
    ours = (d["recording_s"] + d["replay_s"]) / 60
    about = (
        "Tokens a round (accepted ones and the target's own) by draft, kind of text and K, which "
        "others sweep with a run of a server for each cell. Here one recording holds what every "
        f"draft proposes from every start, and each K is replayed on it: {ours:.1f} minutes of a "
        f"processor for {d['requests']} requests of the demo, {d['tokens']} tokens, of which "
        f"{d['replay_s']:.1f} seconds are all of the replays. A sweep of the {cells} cells would "
        f"take {cells * took / 60:.0f} minutes at what the {len(d['executed'])} cells took that "
        f"were executed, without the starts of servers. Of these {rounds} executed rounds {differ} "
        f"differ from replay's. Temperature 0. `python bench/run.py matrix`, {made['measured']}, "
        f"code of {made['code']}."
    )
    rows = [
        (row["draft"], row["category"], *(f"{cell['tau']:.2f}" for cell in row["cells"]))
        for row in d["rows"]
    ]
    heads = ("draft", "text", *(f"K={k}" for k in lengths))
    lines = ["# Acceptance by K, from one recording", "", about, "", *table(heads, rows)]
    return "\n".join([*lines, *cells_in_vllm()]).rstrip() + "\n"


def cells_in_vllm() -> list[str]:
    """Cells of such a matrix of vLLM above temperature 0, where texts are others each time."""
    sampled = load("served")["rounds"]["drafters"]["draft_model"]["sampled"]
    rows, inside = [], 0
    for row in sampled["tau"]:
        told, ran = row["predicted"], row["executed"]
        low, high = (told["tau"] * (1 + sign * told["half_width"]) for sign in (-1, 1))
        inside += low <= ran["tau"] <= high
        within = f"{told['tau']:.3f} ({low:.3f} to {high:.3f})"
        rows.append((row["gamma"], within, f"{ran['tau']:.3f}"))
    about = (
        "Cells of vLLM on a CPU at temperature 0.8, draft `small`, foretold by texts that it "
        f"served at K=4 (95% interval over requests): {inside} of {len(rows)} executed ones are "
        "inside. At temperature 0 every round is as foretold ([results](results.md#vllm))."
    )
    return [about, "", *table(("K", "foretold", "executed, on other texts"), rows)]


def headline() -> str:
    """What holds and needs the least said beside it comes first: rounds that one recording foretold
    in an engine that is not ours, speeds under load, a public model, the newest GPU."""
    rounds = load("served")["rounds"]
    off, _, again, _ = off_by_clients(load("load-vllm"), "tokens_per_s")
    newest = newest_gpu()[0]
    run, speeds = newest["tune"], {r["what"]: r["tokens/s"] for r in newest["generate"]["rows"]}
    confirmed, (low, high) = run["tuned"]["confirmed"], run["tuned"]["confirmed"]["interval"]
    return (
        f"One recording foretells every greedy round of vLLM on CPUs: **{rounds['differ']} "
        f"of {rounds['rounds']:,} differ**, of {len(rounds['drafters'])} drafters. Its "
        f"tokens/s under load are predicted {off} off in the median (executing again: {again}). "
        f"{real_page.headline()} On an {run['on']}, a pair at the cost of an 8B model: "
        f"**{confirmed['ratio']:.2f} times** ({100 * confirmed['level']:.0f}% interval {low:.2f} "
        f"to {high:.2f}) our autoregression, which is "
        f"{speeds['autoregression, ours'] / speeds['transformers, static cache, compiled']:.1f} "
        "times compiled transformers'. [Results](#results) say what is left out."
    )


def on_gpu() -> str:
    """The newest tuning that a GPU has run, and what it leaves out."""
    newest = newest_gpu()[0]
    run = newest["tune"]
    tuned, texts = run["tuned"], run["tuned"]["texts"]
    confirmed, (low, high) = tuned["confirmed"], tuned["confirmed"]["interval"]
    return (
        f"**{run['on']}**, a pair ballasted to {run['models']}: `tune` published "
        f"`{short(tuned['winner']['label'])}`, **{confirmed['ratio']:.2f} times autoregression** "
        f"({100 * confirmed['level']:.0f}% interval {low:.2f} to {high:.2f}, "
        f"{confirmed['requests']} requests held out). "
        f"Set by hand, {by_hand(newest)}, on other requests: that `tune` beats it is not shown. "
        "Left out: texts and acceptance are the demo pair's; autoregression is ours; one request "
        f"at a time; in {texts['dtype']} {texts['differ']} of {texts['compared']} texts differ "
        "from autoregression's, in float64 none may"
    )


def highlights() -> str:
    """README's results: what is foretold, what is exact, then speeds."""
    low, high, beyond = coupled_costs_chains()
    vllm = load("load-vllm")
    shares = {r["constant"]: r["share"] for r in vllm["regret"]["together"]}
    off = shares.pop("off")
    constants = [share[0] for share in shares.values()]
    rounds = load("served")["rounds"]
    lines = [
        "- greedy rounds in vLLM on CPUs, foretold: "
        f"{rounds['differ']} of {rounds['rounds']} differ ({exactly(rounds['holds'])})",
        "- vLLM under load, 1 to 32 clients: the tuned table reaches "
        f"**{ratio(off)} of the tokens/s of a server without a draft** ({at_least(off[1:], 1.0)}), "
        f"and {min(constants):.2f} to {max(constants):.2f} times constants with the draft loaded",
    ]
    for name, (figure, judged) in {
        "what differs in float64, our decoder": lossless(load("acceptance-lossless")),
        "error of predicted speeds after one factor, median and 90th percentile": fidelity(
            load("acceptance-fidelity")
        ),
    }.items():
        lines.append(f"- {name}: {figure.split('; tables')[0]} ({judged})")
    lines += [
        f"- at temperature 1 the default verifier, `coupled`, costs chains {low} to {high}% of "
        f"`rejection`'s tokens a round ({beyond}, by replay); trees and heads need it",
        "",
        real_page.summary(),
        "",
        on_gpu(),
        "",
        on_cpu(),
    ]
    return "\n".join(lines)


def on_cpu() -> str:
    """What tunings published on this machine, as they proved it."""
    d, told, levels = load("acceptance-regret"), [], set()
    for r in d["rows"]:
        proved = re.search(
            r"was ([\d.]+) times .*?(\d+%) interval ([\d.]+) to ([\d.]+)\) on (\d+)", r["reason"]
        )
        assert proved
        value, low, high = (float(proved[n]) for n in (1, 3, 4))
        said = f"{r['workload']} `{short(r['winner'])}` {value:.2f} ({low:.2f} to {high:.2f})"
        if off := re.search(r"failed its check: .* is (\d+%)", r["reason"]):
            said += f", profile {off[1]} off"
        told.append(said)
        levels.add(f"{proved[2]} interval, {proved[5]} requests held out")
    return (
        "**Two shared CPU cores**, the demo pair, published, times autoregression "
        f"({' and '.join(sorted(levels))}): {'; '.join(told)} ({d['measured']}, code of "
        f"{d['code']})"
    )


def coupled_costs_chains() -> tuple[int, int, str]:
    """Percent of a chain's tokens a round that the verifier `coupled` costs against `rejection` at
    temperature 1, smallest and largest over drafts and lengths, and how many are beyond noise."""
    rows = paper_pages.of_claim(paper_pages.rows_of(papers_figures()[0], "verifier"), "coupled")
    costs = [round(100 * (1 - row["ours"][0])) for row in rows]
    beyond = sum(row["ours"][2] < 1 for row in rows)
    return min(costs), max(costs), f"{beyond} of {len(rows)} beyond noise"


def pages() -> dict[str, str]:
    """Every page that is generated whole, by its path."""
    whole = {"docs/results.md": results(), "docs/hardware.md": hardware()}
    whole |= {f"docs/papers/{name}.md": paper_page(name) for name in paper_pages.PAPERS}
    whole["docs/acceptance.md"] = acceptance()
    whole["docs/gemma.md"] = real_page.page()
    whole["docs/under_load.md"] = load_page.page()
    off, _, again, _ = off_by_clients(load("load-vllm"), "tokens_per_s")
    off = f"predicted {off} off in the median (executing again: {again})"
    whole["docs/questions.md"] = questions_page.page(load, off)
    whole["docs/measured.md"] = measured_page.page()
    return whole | map_page.figures_of(load("map"))


def serving() -> list[str]:
    """What `serve` does under clients; nothing before it was measured."""
    rows = [
        ("in vLLM: " * (key == "vllm") + short(part["summary"]), exactly(part["holds"]))
        for name in ("serve-load", "serve-clients", "serve-circle")
        if (RESULTS / f"{name}.json").exists()
        for key, part in load(name).items()
        if "summary" in part
    ]
    return table(("measured", "verdict"), rows) if rows else []


def main() -> None:
    for page, text in pages().items():
        (ROOT / page).write_text(text)
    for page, name, lines in (
        ("docs/map.md", "map", map_page.page(load("map"))),
        ("docs/simulator.md", "believed", believed()),
        ("docs/reliability.md", "serving", serving()),
        ("README.md", "headline", [headline()]),
        ("README.md", "results", [highlights()]),
    ):
        file = ROOT / page
        file.write_text(between(file.read_text(), name, lines))


if __name__ == "__main__":
    main()
