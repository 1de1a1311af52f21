"""Parts of :mod:`gpu.vllm` with ``--tune``: `tune --url` of a server that runs, to its end; what it
published beside no draft and the server's own table, in turns on other prompts; and what a retrace
costs the traffic beside it. Read on a CPU, they are a table and verdicts.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.gpu.rows import Figures, OutOfTimeError, Rows, judged, unfinished
from bench.gpu.vllm import Bench, Part
from bench.harness import say
from bench.lab import requests, stored
from bench.served import retrace_cost
from bench.served.live import PAIR, demo_prompts, ratio, temporary_folder
from bench.served.load import take_turns
from bench.served.retrace_cost import SHARE, Beside
from bench.served.tune_url import tune
from bench.verdicts import NOT_SHOWN, at_least, exactly
from spectune.engines.engine import Load, Prompt, numbered
from spectune.engines.vllm.folder import own_policy
from spectune.engines.vllm.running import RunningServer
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.on_engine import prompts_of
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.text_codec import load_codec

LIMIT_ERROR = 0.08
"""How far predicted tokens/s may be off in the median, as on a CPU."""


class Tuning(NamedTuple):
    """How much is tuned and executed: the command's size and clients; prompts that it has not seen,
    their new tokens, and turns of each policy at a number of clients; texts that are retraced, the
    clients beside, and the share of the time that a retrace may take."""

    size: tuple[object, ...]
    tuned_on: int
    clients: tuple[int, ...]
    tokens: int
    turns: int
    retraced: int
    beside: tuple[int, ...]
    share: float = SHARE


NO_PAGE = ("--set", "report=none")
FULL = Tuning(
    ("--limit", 96, "--max-new-tokens", 64, "--budget", "40s", *NO_PAGE),
    tuned_on=96,
    clients=(1, 4, 8),
    tokens=64,
    turns=12,
    retraced=4,
    beside=(4, 8),
)
TINY = Tuning(
    ("--limit", 24, "--max-new-tokens", 8, "--budget", "1s", "--set", "search.trials=12", *NO_PAGE),
    tuned_on=24,
    clients=(2,),
    tokens=8,
    turns=1,
    retraced=1,
    beside=(2,),
    share=0.5,
)


def parts(bench: Bench) -> dict[str, list[Part]]:
    """The parts by the server that they run on."""
    size = tuning_of(bench)
    return {
        "tuned": [
            Part("tune", partial(tuned, bench)),
            *(Part(f"in turns, {n} clients", partial(in_turns, bench, n)) for n in size.clients),
        ],
        "retraced": [
            Part(f"retraces, {n} clients", partial(retraces, bench, n)) for n in size.beside
        ],
    }


def tuning_of(bench: Bench) -> Tuning:
    return TINY if bench.is_tiny else FULL


def tuned(bench: Bench, server: RunningServer) -> Figures:
    """A tuning as a user types it. One that has no time left goes on in the next call."""
    size = tuning_of(bench)
    how: dict[str, Any] = {"clients": size.clients, "limit_s": max(1.0, bench.seconds_left)}
    try:
        ended = tune(server, bench.out / "tune.db", size.size, pair=bench.pair, **how)
    except subprocess.TimeoutExpired:
        raise OutOfTimeError from None
    kept = ("winner", "reason", "confirmed", "texts", "executed")
    return {
        "version": ended.version,
        **{name: ended.tuned[name] for name in kept},
        "own": own_policy(server.runs_on, server.draft).spelled_out(),
        "lines": ended.lines,
    }


def in_turns(bench: Bench, clients: int, server: RunningServer) -> Figures:
    """Tokens/s of what was published (of what won, where nothing was), of no draft and of the
    server's own table, in turns of a second, on prompts that no tuning has seen."""
    size, rows = tuning_of(bench), {row["part"]: row for row in Rows(bench.out).read()}
    row = rows.get("tune", {})
    if "winner" not in row:
        raise ValueError("nothing is tuned yet")
    policies = {
        "published": parse_policy(row["winner"]["policy"]),
        "none": AUTOREGRESSIVE,
        "own": parse_policy(row["own"]),
    }
    unlike: dict[str, Policy] = {policy.id: policy for policy in policies.values()}
    rate = _measured(row, policies["none"].id, clients)
    number = int(size.turns * 1.3 * len(unlike) * rate / size.tokens) + 2 * clients
    prompts = numbered(_held_out(size), number)
    options = DecodeOptions(max_new_tokens=size.tokens)
    found = take_turns(server, prompts, list(unlike.values()), Load(clients), options, part=1)
    speeds = {name: found[policy.id] for name, policy in policies.items()}
    return {"clients": clients, "requests": number, "tokens_per_s": speeds}


def _measured(row: Figures, policy_id: str, clients: int) -> float:
    """Tokens/s of a policy in the tuning; of the slowest, where it was not executed there."""
    measured = {
        policy["policy_id"]: load["measured"]["tokens_per_s"]
        for policy in row["executed"]
        for load in policy["loads"]
        if load["load"] == f"clients:{clients}"
    }
    return float(measured.get(policy_id, min(measured.values())))


def _held_out(size: Tuning) -> list[Prompt]:
    workload = requests(1_000, skip=size.tuned_on)
    options = DecodeOptions(max_new_tokens=size.tokens)
    return list(prompts_of(load_codec(PAIR), workload, options))


def retraces(bench: Bench, clients: int, server: RunningServer) -> Figures:
    """Traffic beside retraces as a part of traffic alone (:mod:`served.retrace_cost`)."""
    size = tuning_of(bench)
    with temporary_folder() as folder:
        prompts = demo_prompts(48, retrace_cost.TOKENS)
        beside = Beside(stored(folder / "x.db"), server, bench.policy(3), prompts, size.share)
        return beside.traffic(beside.full_length()[: size.retraced], clients)


# ------------------------------------------------------------------------------------ on a CPU


def predictions(row: Figures) -> list[Figures]:
    """Predicted beside measured tokens/s of all that the tuning executed."""
    rows = []
    for policy in row.get("executed", []):
        for load in policy["loads"]:
            measured, predicted = load["measured"]["tokens_per_s"], load["predicted"]
            rows.append({
                "policy": policy["label"],
                "load": load["load"],
                "predicted": predicted and predicted["tokens_per_s"],
                "measured": measured,
                "off": predicted and predicted["tokens_per_s"] / measured - 1,
            })  # fmt: skip
    return rows


def beside_others(rows: Mapping[str, Figures]) -> list[Figures]:
    """What was published as a part of the others, with 95% intervals over turns."""
    found = []
    for part, row in rows.items():
        if part.startswith("in turns") and "failed" not in row:
            speeds = row["tokens_per_s"]
            figures = {"clients": row["clients"], "tokens/s": float(np.median(speeds["published"]))}
            for other in ("none", "own"):
                figures[f"over {other}"] = ratio(speeds["published"], speeds[other])
            found.append(figures | {"turns": len(speeds["published"])})
    return found


def verdicts(figures: Figures) -> dict[str, str]:
    errors = [abs(row["off"]) for row in figures["predictions"] if row["off"] is not None]
    spent = [1 - row["tokens_per_s"]["ratio"][1] for row in figures["retraces"]]
    beside: dict[str, str] = {}
    for row in figures["in_turns"]:
        for other in ("none", "own"):
            name = f"{row['clients']} clients: at least as fast as {other}"
            beside[name] = at_least(row[f"over {other}"][1:], 1.0)
    return {
        "every part ran": exactly(not figures["failed"] and not figures["not_run"]),
        f"predicted tokens/s are off {100 * LIMIT_ERROR:.0f}% in the median at most": (
            exactly(float(np.median(errors)) <= LIMIT_ERROR) if errors else NOT_SHOWN
        ),
        **beside,
        f"a retrace costs {100 * SHARE:.0f}% of the traffic at most": (
            exactly(max(spent) <= SHARE) if spent else NOT_SHOWN
        ),
    }


def collect_tuned(folder: Path, results: Path | None) -> int:
    """Prints what is in a folder and writes it into the results, or into the folder itself where it
    was measured at the tiny size. 1 where a verdict is not met."""
    rows = {row["part"]: row for row in Rows(folder).read()}
    last, row = rows["plan"], rows.get("tune", {})
    kept = ("version", "winner", "reason", "confirmed", "texts", "own", "lines", "seconds")
    figures: Figures = {
        **{name: last[name] for name in last if name not in ("plan", "part")},
        "tuned": {name: row[name] for name in kept if name in row},
        "predictions": predictions(row),
        "in_turns": beside_others(rows),
        "retraces": [row for part, row in rows.items() if "busy_share" in row],
        **unfinished(rows),
    }
    figures["verdicts"] = verdicts(figures)
    for retraced in figures["retraces"]:
        say(retraced)
    say(row.get("reason", "not tuned"))
    return judged("gpu-vllm-tuned", folder, figures, results, ("predictions", "in_turns"))
