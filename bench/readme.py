"""Writes the measured table of README.md from bench/results.

python bench/readme.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
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
            "| workload | autoregressive | best fixed length of any draft, all 36 executed | published winner | winner / best fixed "
            "| winner / autoregressive |",
            "|---|---|---|---|---|---|",
        ]
        for row in regret["rows"]:
            lines.append(
                f"| {row['workload']} | {row['autoregressive_tokens_per_s']:.0f} "
                f"| {row['best_fixed']}: {row['best_fixed_tokens_per_s']:.0f} "
                f"| {row['winner']}: {row['winner_tokens_per_s']:.0f} | {row['share_of_best']:.3f} | {row['speedup']:.2f} |"
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
        ("verifiers' laws", "acceptance-verifiers"),
    ]
    lines += ["| check (`make acceptance`) | result | holds |", "|---|---|---|"]
    for title, name in checked:
        found = load(name)
        if found:
            lines.append(f"| {title} | {found['summary']} | {'yes' if found['holds'] else '**no**'} |")
    speed, loop = load("replay_speed"), load("loop_overhead")
    if speed:
        exact = {k: v for k, v in speed["million_rounds_per_s"].items() if "recent" not in k}
        lines.append(
            f"| replay speed | {min(exact.values()):.0f} to {max(exact.values()):.0f} million rounds/s on one core by window; "
            f"{speed['trials']} trials over {speed['tokens']} tokens in {speed['trials_s']:.0f} s | yes |"
        )
    if loop:
        shares = [r["not_model_share"] for r in loop["rounds"] if r["temperature"] == 0]
        warm = [r["not_model_share"] for r in loop["rounds"] if r["temperature"] > 0]
        sizes = ", ".join(f"{k} {v:.0f}" for k, v in loop["panorama_bytes_per_position"].items())
        largest = max(loop["panorama_bytes_per_position"].values())
        within = max(shares) <= 0.05 and loop["recording_share"] <= 0.02 and largest <= 32
        lines.append(
            f"| overheads | not model time: {100 * min(shares):.1f} to {100 * max(shares):.1f}% of a greedy round, "
            f"{100 * min(warm):.1f} to {100 * max(warm):.1f}% at temperature 1; "
            f"recording {100 * loop['recording_share']:.1f}% of a decode; "
            f"panorama bytes per position: {sizes} | {'yes' if within else '**no**'} |"
        )
    fidelity = load("acceptance-fidelity")
    if fidelity:
        lines += [
            "",
            "<details><summary>Predicted and executed speed of every policy of the fidelity run</summary>",
            "",
            "| policy | tau | predicted tokens/s | executed tokens/s | error |",
            "|---|---|---|---|---|",
        ]
        for row in fidelity["rows"]:
            lines.append(
                f"| {row['policy']} | {row['tau']:.2f} | {row['predicted_tokens_per_s']:.0f} "
                f"| {row['measured_tokens_per_s']:.0f} | {100 * row['error']:+.1f}% |"
            )
        lines += ["", "</details>"]
    return "\n".join(lines)


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    readme.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}")
    print(table())


if __name__ == "__main__":
    main()
