"""Writes the measured table of README.md from bench/results.

python bench/readme.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
COMPARED = ("acceptance-trees-papers",)
"""Results that have no target of their own."""
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def load(name: str) -> dict[str, Any] | None:
    """A result, or None where it was not measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table() -> str:
    """Markdown: what was executed per workload, then what was checked."""
    lines = [
        "Two CPU cores shared with others, float32, the demo pair (7 M target, 1.9 M and 0.6 M drafts), greedy, batch size 1. Tokens/s.",
        "",
    ]
    regret = load("acceptance-regret")
    if regret:
        lines += [
            "| workload | autoregressive | best fixed length of any draft, all 36 executed | published winner (chains alone) "
            "| winner / best fixed | winner / autoregressive |",
            "|---|---|---|---|---|---|",
        ]
        for row in regret["rows"]:
            speed, low, high = row["tokens_per_s"], *row["share_interval"]
            lines.append(
                f"| {row['workload']} | {speed['autoregressive']:.0f} | {row['best_fixed']}: {speed[row['best_fixed']]:.0f} "
                f"| {row['winner']}: {speed[row['winner']]:.0f} | {row['share_of_best']:.3f} ({low:.3f}-{high:.3f}) "
                f"| {row['speedup'][0]:.2f} |"
            )
        none = regret["no_gain"]
        lines += ["", f"Where speculation cannot pay (a draft as large as the target) `tune` published: {none['published']}.", ""]
    checked = [
        ("prediction against execution", "acceptance-fidelity"),
        ("published winner against exhaustive execution", "acceptance-regret"),
        ("replay against execution, round by round", "acceptance-parity"),
        ("text against autoregression and transformers", "acceptance-lossless"),
        ("`kill -9`", "acceptance-kills"),
        ("schedules", "acceptance-schedules"),
        ("malformed input of every kind", "acceptance-borders"),
        ("kills, outages and garbage, everything at once", "acceptance-chaos"),
        ("verifiers' laws", "acceptance-verifiers"),
        ("trees: text against autoregression", "acceptance-trees-lossless"),
        ("trees: replay against execution, round by round", "acceptance-trees-parity"),
        ("trees: prediction against execution", "acceptance-trees-fidelity"),
        ("trees: temperature above 0", "acceptance-trees-sampled"),
        ("trees: the papers' methods", "acceptance-trees-papers"),
        ("shortlists: text against autoregression", "acceptance-shortlists-lossless"),
        ("shortlists: replay against execution, round by round", "acceptance-shortlists-parity"),
        ("shortlists: prediction against execution", "acceptance-shortlists-fidelity"),
        ("shortlists: tau recovered", "acceptance-shortlist-recovered"),
        ("shortlists: DynaSpec's theorems", "acceptance-shortlist-theory"),
        ("shortlists on a vocabulary of 32768", "acceptance-shortlist-speed"),
        ("a draft for each prompt", "acceptance-draft-choice"),
        ("each paper alone, pairs, all together", "acceptance-ablation"),
        ("all together against each paper alone, on other requests", "acceptance-joint"),
    ]
    lines += ["| check (`make acceptance`) | result | holds |", "|---|---|---|"]
    for title, name in checked:
        found = load(name)
        if found:
            holds = "compared" if name in COMPARED else "yes" if found["holds"] else "**no**"
            lines.append(f"| {title} | {found['summary']} | {holds} |")
    speed, loop = load("replay_speed"), load("loop_overhead")
    if speed:
        exact = {k: v for k, v in speed["million_rounds_per_s"].items() if "recent" not in k}
        lines.append(
            f"| replay speed | {min(exact.values()):.0f} to {max(exact.values()):.0f} million rounds/s on one core by window; "
            f"{speed['trials']} trials over {speed['tokens']} tokens in {speed['trials_s']:.0f} s | yes |"
        )
    if loop:
        shares = [r["loop_share"] for r in loop["rounds"]]
        chosen = [r["sampling_share"] for r in loop["rounds"]]
        sizes = ", ".join(f"{k} {v:.0f}" for k, v in loop["panorama_bytes_per_position"].items())
        largest = max(loop["panorama_bytes_per_position"].values())
        within = max(shares) <= 0.05 and loop["recording_share"] <= 0.02 and largest <= 32
        lines.append(
            f"| overheads | loop, controller and bookkeeping {100 * min(shares):.1f} to {100 * max(shares):.1f}% of a round, choosing "
            f"tokens {100 * min(chosen):.1f} to {100 * max(chosen):.1f}%; "
            f"recording {100 * loop['recording_share']:.1f}% of a decode; "
            f"panorama bytes per position: {sizes} | {'yes' if within else '**no**'} |"
        )
    trees = load("tree_speed")
    if trees:
        shown = "; ".join(
            f"{r['building_ms']:.2f} of {r['round_ms']:.1f} ms at temperature {r['temperature']:g} "
            f"(all that is not the models: {r['not_models_ms']:.2f} ms)"
            for r in trees["rounds"]
        )
        lines.append(f"| building and selecting a tree, a round of {trees['rounds'][0]['policy']} | {shown} | measured |")
    replayed = load("tree_replay_speed")
    if replayed:
        rows = replayed["rows"]
        rounds = [r["replayed_million_rounds_per_s"] for r in rows]
        grown = [n for r in rows for n in r["tabulated_trees_per_s"].values()]
        sizes = [r["bytes_per_start"] for r in rows]
        lines.append(
            f"| trees: speed of replay | {min(rounds):.0f} to {max(rounds):.0f} million rounds/s; {min(grown):.0f} to {max(grown):.0f} "
            f"trees/s tabulated once per growth; {min(sizes):.0f} to {max(sizes):.0f} bytes recorded per start (width {replayed['width']}, "
            f"depth {replayed['depth']}) | measured |"
        )
    lines += _sampled() + _papers()
    lines += _predictions("acceptance-fidelity", "every policy of the fidelity run")
    lines += _predictions("acceptance-trees-fidelity", "every tree policy of the trees' fidelity run")
    return "\n".join(lines)


def _predictions(name: str, what: str) -> list[str]:
    """Predicted and executed speed, policy by policy."""
    fidelity = load(name)
    if not fidelity:
        return []
    lines = [
        "",
        f"<details><summary>Predicted and executed speed of {what}</summary>",
        "",
        "| policy | tau | predicted tokens/s | executed tokens/s | error |",
        "|---|---|---|---|---|",
    ]
    for row in fidelity["rows"]:
        lines.append(
            f"| {row['policy']} | {row['tau']:.2f} | {row['predicted_tokens_per_s']:.0f} "
            f"| {row['measured_tokens_per_s']:.0f} | {100 * row['error']:+.1f}% |"
        )
    return [*lines, "", "</details>"]


def _grouped(rows: list[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by the values of some of their keys, in order of appearance."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[k] for k in keys), []).append(row)
    return found


def _range(values: list[float]) -> str:
    """The smallest and the largest, over workloads."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _sampled() -> list[str]:
    """Temperatures above 0, executed."""
    found = load("acceptance-trees-sampled")
    if not found:
        return []
    lines = [
        "",
        "<details><summary>Trees and chains at temperatures above 0, executed, by workload the smallest to the largest</summary>",
        "",
        "| temperature | draft | method | tau | target passes per 100 tokens | speed-up over autoregression |",
        "|---|---|---|---|---|---|",
    ]
    for (temperature, draft, method), rows in _grouped(found["rows"], "temperature", "draft", "method").items():
        tau, calls, speed = (_range([r[k] for r in rows]) for k in ("tau", "calls_per_100_tokens", "speedup"))
        lines.append(f"| {temperature:g} | {draft} | {method} | {tau} | {calls} | {speed} |")
    return [*lines, "", "</details>"]


def _papers() -> list[str]:
    """HeteroSpec, C2T, adaptive depth and AdaEDL beside EAGLE-2; tokens and passes are replayed, speed is executed."""
    found = load("acceptance-trees-papers")
    if not found:
        return []
    lines = [
        "",
        "<details><summary>The tree papers' methods, greedy, by workload the smallest to the largest</summary>",
        "",
        "| draft | method | tau | verified tokens / EAGLE-2's | speed-up over autoregression | rounds beyond the recording |",
        "|---|---|---|---|---|---|",
    ]
    base = {(r["draft"], r["workload"]): r["verified_tokens"] for r in found["rows"] if r["method"] == "EAGLE-2"}
    for (draft, method), rows in _grouped(found["rows"], "draft", "method").items():
        tau, speed = (_range([r[k] for r in rows]) for k in ("tau", "speedup"))
        tokens = _range([r["verified_tokens"] / base[draft, r["workload"]] for r in rows])
        beyond = sum(r["approximate_rounds"] for r in rows) / max(1, sum(r["calls"] for r in rows))
        lines.append(f"| {draft} | {method} | {tau} | {tokens} | {speed} | {100 * beyond:.1f}% |")
    return [*lines, "", "</details>"]


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    readme.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}")
    print(table())


if __name__ == "__main__":
    main()
