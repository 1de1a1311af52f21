"""Writes docs/results.md and README's results from bench/results: `python bench/report.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import map_page
import numpy as np
from claims import CLAIMS, verdict
from verdicts import (
    MET,
    NOT_MET,
    NOT_SHOWN,
    at_least,
    at_most,
    exactly,
    quantile_interval,
    worst,
)

from spectune.optimizer.report.words import policy_in_words

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
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


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), ""]


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def ratio(interval: Sequence[float | None]) -> str:
    """A ratio with its interval; one that is too wide says nothing."""
    value, low, high = interval
    if low is None or high is None or high > 4 * low:
        return "too few executions"
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


# ------------------------------------------------------------------------------------------ checks


def lossless(d: Figures) -> tuple[str, str]:
    return d["summary"], exactly(d["holds"])


def fidelity(d: Figures) -> tuple[str, str]:
    rows = [r for r in d["rows"] if r["kind"] != "shortlists"]
    errors, again = ([abs(r[key]) for r in rows] for key in ("error_after_factor", "repeat_error"))
    tables = max(t["error"] for t in d["tables"])
    near = within(errors, again, (0.03, 0.06), 0.5)
    return d["summary"], worst((near, exactly(tables <= 0.05)))


def regret(d: Figures) -> tuple[str, str]:
    shares = []
    for r in d["rows"]:
        same = r["winner"] == r["best_fixed"]
        share = (r["share_of_best"], *r["share_interval"])
        shown = f"{share[0]:.3f} (the winner is that window)" if same else ratio(share)
        shares.append(f"{r['workload']} {shown}")
    summary = f"{'; '.join(shares)}; without a gain `tune` published {d['no_gain']['published']}"
    return summary, worst(at_least(r["share_interval"], 0.98) for r in d["rows"])


def sampled(d: Figures) -> tuple[str, str]:
    return d["summary"], NOT_SHOWN if d["holds"] else NOT_MET  # of a few requests, no interval


def kills(d: Figures) -> tuple[str, str]:
    phases, problems = len(d["kills"]), len(d["problems"])
    return f"{d['count']} kills in {phases} phases, {problems} problems", exactly(d["holds"])


FIDELITY = (
    "after one common factor: median 3%, 90th percentile 6%, or half of what measuring again "
    "differs by; tables of `tune` 5%"
)
CHECKS = {
    "lossless": (
        "texts against autoregression and transformers, rounds against replay",
        "0 differences in float64",
        "on a CPU; rounds of policies that the recording covers",
        lossless,
    ),
    "rounding": (
        "texts that differ from autoregression's in float32 and bfloat16",
        "counted; none where autoregression is executed again",
        "on a CPU",
        lossless,
    ),
    "fidelity": (
        "predicted against executed speed",
        FIDELITY,
        "two shared cores; the factor is fitted to the executions it is held against",
        fidelity,
    ),
    "regret": (
        "published winner against all fixed windows, executed",
        "98% of the best",
        "chains alone; a winner compared with itself shows no regret",
        regret,
    ),
    "sampled": (
        "trees above temperature 0",
        "more tau than any chain at temperature 1",
        "tau, not speed",
        sampled,
    ),
    "kills": ("kill -9 of record and tune", "0 problems", "SQLite on one disk", kills),
}
"""Of each check: title, target, what it leaves out, and what gives its figure and verdict."""


def checks() -> list[str]:
    """The table of checks that were run, each with its verdict."""
    rows = []
    for name, (title, target, leaves_out, judge) in CHECKS.items():
        if (RESULTS / f"acceptance-{name}.json").exists():
            rows.append((title, target, *judge(load(f"acceptance-{name}")), leaves_out))
    return table(("check", "target", "figure", "verdict", "what it leaves out"), rows)


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


# ------------------------------------------------------------------------------------- other parts


def nulls() -> list[str]:
    """False publications and power of `tune`'s race and confirmation, simulated with the code that
    ships."""
    figures, rows = load("nulls"), []
    for null, gain in zip(figures["nulls"], figures["power"], strict=True):
        published = f"{null['published']} of {null['tunings']}"
        rows.append((null["candidates"], null["requests"], published, f"{100 * gain['rate']:.0f}%"))
    names = ("published without a gain", "published at a true gain of 5%")
    tails = [
        (
            f"{100 * row['tail']:.0f}%",
            row["requests"],
            f"{row['published']} of {row['tunings']}",
            row["slower_held_out"],
            row["slower_unseen"],
        )
        for row in figures["tails"]
    ]
    of_tails = (
        "Some requests cost all candidates 1.5 to 3 times what is predicted, the others so much "
        "less that a policy is about as fast as the incumbent in sum. Published, and of these "
        "slower in sum on the requests held out, or on all where none that was held out is slowed:"
    )
    heads = ("requests slowed", "requests", "published", "slower on those held out", "unseen")
    executed = (
        f"Executed, six names of one behaviour: {figures['real']['published']} of "
        f"{figures['real']['tunings']} published."
    )
    lines = table(("candidates", "requests", *names), rows)
    lines += [of_tails, "", *table(heads, tails)]
    return ["## What is published without a gain", "", *lines, executed, ""]


def speeds() -> list[str]:
    """Replay: measured, without a target of its own."""
    figures = load("speed")
    replay, trees = figures["replay"], figures["trees"]
    chains = replay["million_rounds_per_s"].values()
    rounds = [r["replayed_million_rounds_per_s"] for r in trees]
    grown = [n / 1000 for r in trees for n in r["tabulated_trees_per_s"].values()]
    rows = {
        "replay of chains, million rounds/s": f"{min(chains):.0f} to {max(chains):.0f} by window",
        "replay of trees, million rounds/s": f"{min(rounds):.1f} to {max(rounds):.1f}",
        "tabulating trees, thousand/s": f"{min(grown):.0f} to {max(grown):.0f}",
        f"{replay['trials']} trials over {replay['tokens']} tokens": f"{replay['trials_s']:.0f} s",
    }
    return ["## Speed of the tool, one core", "", *table(("what", "figure"), rows.items())]


def searches() -> list[str]:
    """What the search chooses against enumerating grids before TPE, by replay."""
    figures, rows = load("search"), []
    for case in figures["cases"]:
        grid, tpe = (np.array(case[name]) for name in ("enumeration", "tpe"))
        shares = tpe[:, 1] / grid[:, 1]
        seeds = ", ".join(f"{share:.3f}" for share in shares)
        policies = [int(np.median(tried[:, 2])) for tried in (grid, tpe)]
        workload = f"{case['workload']}, temperature {case['temperature']:g}"
        mean = np.exp(np.log(shares).mean())
        rows.append((workload, f"{mean:.3f}", seeds, *policies))
    about = (
        f"{figures['trials']} trials of TPE after a screen, against as many after grids and seeded "
        "with the best of these: speed of what each chooses, replayed on requests that it has not "
        "seen. Policies within 1% on the requests seen count as equal, and the simplest is chosen, "
        "so a single seed says less than 1%."
    )
    names = ("TPE over enumeration, mean", "seeds", "policies tried: enumeration", "TPE")
    return ["## Search", "", about, "", *table(("workload", *names), rows)]


def loads() -> list[str]:
    """vLLM under load: simulated beside executed, and the table that was found beside constants and
    no draft."""
    columns = ("predicted", "off, median", "90th percentile", "executed again", "90th percentile")
    rows, d = [], load("load-vllm")
    for name, title in (("tokens_per_s", "tokens/s"), ("tpot_s", "time per output token")):
        keys = ("median_error", "p90_error", "median_repeat_error", "p90_repeat_error")
        errors = (percent(d[name][key]) for key in keys)
        rows.append((f"vllm {d['version']}, {title}", *errors, under_load(d, name)))
    lines = ["## Under load", "", *table((*columns, "5% and 10%, or again"), rows)]
    lines += [
        f"vLLM's table {d['table']}, executed, tokens/s as parts of those of every constant, in "
        "turns of a second in one running server, and of a server without a draft, over 1, 8 and "
        "32 clients (95% intervals):",
        "",
    ]
    names = {"K=0": "draft loaded, 0 tokens", "off": "no draft loaded"}
    shares = [(r["constant"], r["share"]) for r in d["regret"]["together"]]
    return lines + table(
        ("beside", "the table's tokens/s"),
        [(names.get(name, name), ratio(share)) for name, share in shares],
    )


def served() -> list[str]:
    """What is promised of a vLLM that serves; nothing before it was measured."""
    if not (RESULTS / "served.json").exists():
        return []
    parts = {name: part for name, part in load("served").items() if "summary" in part}
    rows = []
    for name, part in parts.items():
        beside = _beside_others(part["loads"], part["winner"]) if name == "tune_url" else ""
        rows.append((name, part["summary"] + beside, exactly(part["holds"])))
    title = "## A vLLM that serves (`make acceptance-vllm`)"
    return [title, "", *table(("part", "measured", "verdict"), rows)]


def _beside_others(executed: Sequence[Figures], winner: str) -> str:
    """Tokens/s of a tuning's winner over those of the others that it executed, in the geometric
    mean of the loads."""
    speeds = {
        policy["label"]: [load["measured"]["tokens_per_s"] for load in policy["loads"]]
        for policy in executed
    }
    ours = np.log(speeds.pop(winner))
    shares = (f"{name} {np.exp((ours - np.log(of)).mean()):.2f}" for name, of in speeds.items())
    return f"; its tokens/s in the race over those of: {', '.join(shares)}"


def under_load(d: Figures, name: str) -> str:
    """Whether what was predicted under load is within 5% and 10%, or what executing again differs
    by."""
    errors, again = [], []
    for row in d["rows"]:
        each = row[name]
        errors.append(abs(row[f"predicted_{name}"] / median(each) - 1))
        if len(each) > 1:
            again += [abs(x / median([*each[:i], *each[i + 1 :]]) - 1) for i, x in enumerate(each)]
    return within(errors, again, (0.05, 0.10))


def served_rounds() -> list[str]:
    """Rounds of a vLLM server beside what one recording of its draft predicts."""
    if not (RESULTS / "served.json").exists() or "rounds" not in load("served"):
        return []
    figures, rows, taus = load("served")["rounds"], [], []
    for method, d in figures["drafters"].items():
        positions, sampled = d["positions"], d["sampled"]
        shown = (positions["zero"], positions["forced"], d["proposals_differ"])
        first, differ = f"{d['first_position']:.2f}", f"{d['rounds']}, {d['differ']}"
        rows.append((method, *shown, first, differ, f"{sampled['rounds']}, {sampled['differ']}"))
        for row in sampled["tau"]:
            lengths = [
                f"{row[by]['tau']:.3f} ({percent(row[by]['half_width'])})"
                for by in ("predicted", "executed")
            ]
            error = row["predicted"]["tau"] / row["executed"]["tau"] - 1
            taus.append((method, row["gamma"], *lengths, f"{100 * error:+.1f}%"))
    about = (
        "Greedy texts of the demo target, served with 0 to 8 draft tokens and by two tables, one "
        "request at a time and eight, float32 on a CPU. Each round is held against two recordings: "
        "of a server that accepts no drafts, and of forced requests; at temperature 0.8 against "
        'the text that was served (`make acceptance-vllm ARGS="--only rounds"`).'
    )
    columns = ("positions, no acceptance", "forced", "proposals that differ", "first position")
    names = ("draft", *columns, "rounds, differ", "at 0.8: rounds, differ")
    lines = ["## Rounds of vLLM, predicted", "", about, "", *table(names, rows)]
    if taus:
        names = ("draft", "tokens", "predicted (half-width)", "executed (half-width)", "error")
        lines += ["Mean accepted lengths of other texts at temperature 0.8:", ""]
        lines += table(names, taus)
    return lines


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


# ------------------------------------------------------------------------------------------ papers

PAPERS = {
    "heterospec": "HeteroSpec",
    "c2t": "C2T",
    "dynaspec": "DynaSpec",
    "on_the_fly": "On-the-fly adaptation",
    "verifier": "The verifier, and our own score",
    "joint": "All of them together",
}
DRAFTS = ("small", "medium", "head")
PAPERS_ABOUT = (
    "By replay of requests that no fit and no choice of a baseline has seen: rounds are exact, "
    "intervals (95%) are over requests and do not hold the error of costs. Costs: `cpu`, this "
    "machine's measured profile; `h100`, measured rounds of a pair ballasted to 8B; `70b`, a 70B "
    "target as HeteroSpec's table 6 publishes it. The verdict holds the unfavourable end of ours "
    "against the smallest gain that the paper's table has; what is executed is held against "
    "replay. Ratios; below 1 is a loss, of verified tokens and seconds a gain."
)


def papers() -> list[str]:
    """A table for each paper: its figure, ours by draft with interval and verdict, and a cause."""
    figures = load("papers")
    made = figures.pop("made")
    claims = [CLAIMS[r["claim"]] for part in figures.values() for r in part["rows"]]
    held = sum(claim.least is not None or claim.most is not None for claim in claims)
    many = (
        f"The {held} verdicts are not corrected for their number: if every truth lay just at its "
        f"bar, chance would make about {held / 40:.0f} met and as many not met."
    )
    lines = ["## The papers", "", PAPERS_ABOUT, "", many, ""]
    for part, title in PAPERS.items():
        names = [name for name in figures if name == part or name.startswith(f"{part}_")]
        if names:
            parts = [_made(figures[name], made[name]) for name in names]
            rows = [r for name in names for r in figures[name]["rows"]]
            lines += [f"### {title}", "", "; ".join(parts) + ".", "", *_paper(rows)]
    return [*lines, _together(figures["joint"]["rows"]), ""]


def _made(part: Figures, made: Figures) -> str:
    """A part's command, date, code and measured costs."""
    said = f"`python {part['command']}` ({made['measured']}, code of {made['code']}"
    return said + (f", cpu's costs {part['costs']['cpu']})" if part["costs"] else ")")


def _together(rows: Sequence[Figures]) -> str:
    """Whether any combination beats the best of one mechanism."""
    rows = [r for r in rows if r["claim"] == "together"]
    shown = [f"{r['cell']}: {ratio(r['ours'])}" for r in rows if verdict(r) == MET]
    wins = "; ".join(shown) or "none"
    return (
        f"Of {len(rows)} costs and temperatures, where mechanisms together (our coupled score is "
        f"one) beat the best of one: {wins}."
    )


def _paper(rows: Sequence[Figures]) -> list[str]:
    """The table of a paper, its rows of one claim and place side by side by draft."""
    groups: dict[tuple[str, str, str], dict[str, Figures]] = {}
    for r in rows:
        draft, _, place = r["cell"].partition(", ")
        if draft not in DRAFTS:
            draft, place = "", r["cell"]
        claim = CLAIMS[r["claim"]]
        groups.setdefault((claim.title, claim.figure, place), {})[draft] = r
    drafts = [d for d in ("", *DRAFTS) if any(d in group for group in groups.values())]
    body = []
    for key, group in groups.items():
        cells = [_beside(group[d]) if d in group else "" for d in drafts]
        body.append((*key, *cells, "; ".join(dict.fromkeys(_causes(group)))))
    names = [d or "all drafts" for d in drafts]
    return table(("claim", "paper", "where", *names, "cause"), body)


def _beside(r: Figures) -> str:
    """Ours, and its verdict."""
    value, *ends = r["ours"]
    if value is None:
        return "beyond the baseline's curve"
    shown = f"{value:.3f}"
    shown += f" ({ends[0]:.3f} to {ends[1]:.3f})" if None not in ends else ""
    return f"{shown}, {verdict(r)}"


def _causes(group: dict[str, Figures]) -> Iterable[str]:
    same = len({r["why"] for r in group.values()}) == 1
    for draft, r in group.items():
        if r["why"] and verdict(r) != MET:
            yield r["why"] if same or not draft else f"{draft}: {r['why']}"


# --------------------------------------------------------------------------------------------- GPU


def newest_gpu() -> list[Figures]:
    """What every GPU has measured, the newest tuning first."""
    files = [load(file.stem) for file in RESULTS.glob("gpu-*.json")]
    return sorted(files, key=lambda parts: str(parts["tune"]["measured"]), reverse=True)


def on_gpu() -> tuple[list[str], list[str]]:
    """The newest tuning that a GPU has run, and what it leaves out; and those before it."""
    newest, *before = newest_gpu()
    lines = [
        f"Before, **{parts['tune']['on']}**: {_tuned_on_gpu(parts['tune'])}." for parts in before
    ]
    speeds = {r["what"].split(", ")[-1]: r["tokens/s"] for r in newest["generate"]["rows"]}
    best = max(newest["rounds"]["rows"], key=lambda row: float(row["tokens/s"]))
    tuned = newest["tune"]["tuned"]
    texts = tuned["texts"]
    first = (
        f"**{newest['tune']['on']}**, a pair ballasted to {newest['tune']['models']}: "
        f"{_tuned_on_gpu(newest['tune'])}. Its {best['policy']} decodes "
        f"{best['tokens/s']:.0f} tokens/s, our autoregression {speeds['ours']:.0f}, transformers "
        f"with a static cache and compiled {speeds['compiled']:.0f}, assisted by the draft "
        f"{speeds['assisted by the draft']:.0f}. Left out: ballast has the demo pair's texts and "
        "acceptance at the cost of large models; one request at a time; "
        f"{tuned['confirmed']['requests']} requests held out. Of its executed texts, in "
        f"{texts['dtype']}, {texts['differ']} of {texts['compared']} differ from autoregression's; "
        "in float64 none may (`python bench/run.py gpu`)"
    )
    return [first, ""], lines


def _tuned_on_gpu(run: Figures) -> str:
    """How long a tuning took, what it published, and how far its predictions were off."""
    tuned = run["tuned"]
    confirmed, prediction = tuned["confirmed"], tuned["prediction"]
    low, high = confirmed["interval"]
    off, nearer = prediction["median_error"], prediction["median_error_after_factor"]
    told = [f"{percent(off)} off in the median as made"] * (off is not None)
    if nearer is not None and (off is None or nearer < off):
        told.append(f"{percent(nearer)} off after one common factor")
    after = ", ".join(told)
    if "heads_profiled" in run:
        rows = [row for row in run["rows"] if str(row["label"]).startswith("head ")]
        slow = [1 - row["predicted_tokens_per_s"] / row["measured_tokens_per_s"] for row in rows]
        after += (
            f"; those of the head were profiled {run['heads_profiled']}, and so predicted "
            f"{percent(min(slow))} to {percent(max(slow))} too slow"
        )
    winner = policy_in_words(tuned["winner"]["policy"])
    return (
        f"`tune` took {run['wall_s']:.0f} s and published {winner}, "
        f"**{confirmed['ratio']:.2f} times autoregression** "
        f"({100 * confirmed['level']:.0f}% interval {low:.2f} to "
        f"{high:.2f}); its {prediction['policies']} executed policies were predicted {after}"
    )


def rows_table(figures: Figures) -> list[str]:
    """Lines of a part of :mod:`gpu`: its rows, and what it says beside them."""
    beside, rows = [], figures["rows"]
    for name, value in figures.items():
        if isinstance(value, float):
            beside.append(f"{name.replace('_', ' ')} {value:.4g}")
        elif name in ("publication", "cache"):
            beside += [f"{key} {each:.4g}" for key, each in value.items()]
    lines = table(list(rows[0]), [[_cell(x) for x in row.values()] for row in rows])
    return [figures["about"], "", *lines, *(["; ".join(beside), ""] if beside else [])]


def _cell(value: object) -> object:
    """Nothing where a figure is missing."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else value


def gpu_parts() -> list[str]:
    """What parts of :mod:`gpu` have measured, by GPU."""
    lines = []
    for file in sorted(RESULTS.glob("gpu-*.json")):
        for name, part in load(file.stem).items():
            about = f"{part['on']}, {part['measured']}, torch {part['environment']['torch']}"
            about += f"; code of {part['code']}" if "code" in part else ""
            lines += [f"### {name} ({about})", "", *rows_table(part)]
    return lines


# ------------------------------------------------------------------------------------------- pages


def results() -> str:
    """docs/results.md."""
    about = (
        "Written by `python bench/report.py` from `bench/results/` (`make acceptance`). Two CPU "
        "cores shared with others, float32, the demo pair (7 M target, 1.9 M and 0.6 M drafts, an "
        "EAGLE-3 head), one request at a time."
    )
    lines = ["# Results", "", about, "", *checks(), *closed_forms()]
    newest, before = on_gpu()
    lines += [
        *map_page.tables(load("map")),
        *papers(),
        "## On a GPU",
        "",
        *newest,
        *before,
        "",
        *gpu_parts(),
    ]
    lines += [*served(), *served_rounds(), *loads(), *nulls(), *searches(), *speeds()]
    lines += temperatures()
    return "\n".join(lines).rstrip() + "\n"


def headline() -> str:
    """The speed-up of the newest tuning on a GPU."""
    run = newest_gpu()[0]["tune"]
    confirmed, (low, high) = run["tuned"]["confirmed"], run["tuned"]["confirmed"]["interval"]
    return (
        f"On an {run['on']}, a pair at the cost of an 8B model: **{confirmed['ratio']:.2f} times "
        f"autoregression** ({100 * confirmed['level']:.0f}% interval {low:.2f} to {high:.2f}), "
        f"found in {run['wall_s']:.0f} s; see [results](#results) for what that leaves out."
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
    exact, predicted = (load(f"acceptance-{name}") for name in ("lossless", "fidelity"))
    low, high = coupled_costs_chains()
    vllm = load("load-vllm")
    shares = {r["constant"]: r["share"] for r in vllm["regret"]["together"]}
    off, constants = ratio(shares.pop("off")), [share[0] for share in shares.values()]
    errors = vllm["tokens_per_s"]
    regret = load("acceptance-regret")
    cpu = f"Two shared CPU cores, the demo pair ({regret['measured']}, code of {regret['code']}):"
    lines = [*on_gpu()[0], cpu, "", *table(names, rows)]
    lines += [
        f"- texts and rounds: {exact['summary'].split(' (')[0]} in float64 ({lossless(exact)[1]})",
        f"- predicted against executed speed: {predicted['summary'].split(', Kendall')[0]} "
        f"({fidelity(predicted)[1]})",
        f"- at temperature 1 the default verifier, `coupled`, costs a chain {low} to {high}% of "
        f"its speed against `sampling.verifier=rejection` ({NOT_SHOWN}: no interval); trees and "
        "heads need `coupled`",
        "- vLLM under load, 1 to 32 clients: tokens/s predicted "
        f"{percent(errors['median_error'])} off in the median (executing again: "
        f"{percent(errors['median_repeat_error'])}). The table that was found reaches **{off} of "
        "the tokens/s of a server without a draft**: not to speculate was faster there. It is "
        f"{min(constants):.2f} to {max(constants):.2f} times constant numbers of tokens with the "
        "draft loaded",
    ]
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
    (ROOT / "docs" / "results.md").write_text(results())
    figures = load("map")
    (ROOT / "docs" / "map.svg").write_text(map_page.figure(figures))
    for page, name, lines in (
        ("docs/map.md", "map", map_page.page(figures)),
        ("README.md", "headline", [headline()]),
        ("README.md", "results", [highlights()]),
    ):
        file = ROOT / page
        file.write_text(between(file.read_text(), name, lines))


if __name__ == "__main__":
    main()
