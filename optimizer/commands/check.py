"""`check`: whether a draft is worth tuning, before any server runs."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spectune.optimizer.check import Check, Memory, check_pair, device_bytes
from spectune.optimizer.commands.decoding import fit_to, load, read_workload
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.commands.session import Talk, next_command, open_store, pair_of
from spectune.optimizer.commands.tune import QUICK
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.report.words import interval
from spectune.options import options_of
from spectune.runtime.loading import LoadedPair
from spectune.runtime.pair import PairSpec, read_pair
from spectune.settings import Check as Settings
from spectune.settings import Race, Sampling, Tune
from spectune.traces.acceptance import FirstPosition, hardly_accepted
from spectune.traces.sanity import checked as texts_checked
from spectune.traces.store import TraceStore
from spectune.traces.workloads import take

COLUMNS = {
    "K": "K",
    "conditional": "conditional",
    "cumulative": "cumulative",
    "tau": "tau",
    "tau_interval": "tau (95%)",
    "draft_step": "draft step",
    "break_even": "gains below",
    "speedup": "times as fast",
    "speedup_interval": "times (95%)",
}
"""Printed columns, by the key of ``--json``."""
FEW = 5
"""Prompts below which nothing is advised."""


def check(s: Settings, talk: Talk) -> Result:
    began = time.perf_counter()
    spec = _pair(s)
    unlimited = s.requests.model_copy(update={"limit": None})
    tuned = read_workload(s.model_copy(update={"requests": unlimited}), spec, talk)
    workload = take(tuned, s.requests.limit, seed=s.requests.seed)
    options = DecodeOptions.of(s.sampling)
    pair = load(s, spec, talk)
    workload = fit_to(pair, workload, options, s, talk)
    with _store(s) as store, pair.torch_threads():
        left_s = s.budget - (time.perf_counter() - began)
        checked = check_pair(
            store, pair, workload, options, s.search.gamma_max,
            budget_s=left_s, clock=time.perf_counter, progress=talk.progress,
        )  # fmt: skip
    _warn(checked, pair, talk)
    limited = "requests.limit" in s.sources
    minutes = _minutes(checked, s, len((workload if limited else tuned).requests))
    speed = 1 / checked.token_s if checked.token_s else None
    memory, advice, command = _memory(pair), _advice(checked), _tune(s, spec)
    data = {
        "pair": spec.id,
        "heads": pair.hidden_states,
        "notes": list(pair.notes),
        **pair.place,
        "prompts": len(checked.texts),
        "tokens": checked.tokens,
        "seconds": time.perf_counter() - began,
        "without_draft_tokens_per_s": speed,
        "lengths": checked.rows,
        "memory": memory,
        "tune_minutes": minutes,
        "advice": advice,
        "next": command,
    }
    lines = [
        f"{len(checked.texts)} of {len(workload.requests)} prompts, {checked.tokens} tokens"
        + (f"; {speed:.1f} tokens/s without a draft" if speed else ""),
        "draft step, gains below: parts of a target pass for one token; K tokens gain where a step "
        "of the draft costs less",
        advice,
        f"{command}  # {_about(minutes['full'])}; with --quick {_about(minutes['quick'])}",
    ]
    tables = [*_tables(checked.rows), _memory_table(memory)]
    return Result("\n".join(lines), data, checked.rows, tables)


def _warn(checked: Check, pair: LoadedPair, talk: Talk) -> None:
    """Tells what is odd about the texts, and which drafts are next to never right."""
    first = {
        row["draft"]: FirstPosition(row["cumulative"], checked.tokens)
        for row in checked.rows
        if row["K"] == 1
    }
    for line in (*texts_checked(checked.texts).lines(), *hardly_accepted(first, pair.heads)):
        talk.tell(line)


def _minutes(checked: Check, s: Settings, requests: int) -> dict[str, float]:
    """About how long `tune` takes, and with ``--quick``."""
    most = (s.sampling if "sampling.max_new_tokens" in s.sources else Sampling()).max_new_tokens
    fewer = QUICK["requests"]["limit"], QUICK["sampling"]["max_new_tokens"]
    seconds = {
        "full": checked.tune_seconds(requests, most, Race().budget, trees=True),
        "quick": checked.tune_seconds(
            min(requests, fewer[0]), min(most, fewer[1]), QUICK["race"]["budget"], trees=False
        ),
    }
    return {name: value / 60 for name, value in seconds.items()}


def _pair(s: Settings) -> PairSpec:
    """The pair meant: TARGET may be a pair itself. Raises PairError."""
    path = s.target
    if path is None or s.drafts or not s.typed("target"):
        return pair_of(s)
    if path == "demo" or os.path.isfile(path) or os.path.isfile(Path(path, "pair.json")):
        spec = read_pair(path)
        spec.check()
        return spec
    return pair_of(s)


@contextmanager
def _store(s: Settings) -> Iterator[TraceStore]:
    """The database that is typed, else one that is removed at the end."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        db = s.db if s.typed("db") else os.path.join(folder, "check.db")
        with open_store(s.model_copy(update={"db": db}), create=True) as store:
            yield store


def _tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """A table per draft."""
    tables = []
    for draft in dict.fromkeys(row["draft"] for row in rows):
        printed = [
            {name: _printed(row[key]) for key, name in COLUMNS.items() if row.get(key) is not None}
            for row in rows
            if row["draft"] == draft
        ]
        speedups = [row.get("speedup", 0.0) for row in rows if row["draft"] == draft]
        tables.append(Table(printed, title=draft, best=speedups.index(max(speedups))))
    return tables


def _printed(value: Any) -> Any:
    if isinstance(value, tuple):
        return "-".join(f"{end:.2f}" for end in value)
    return round(value, 3) if isinstance(value, float) else value


def _memory(pair: LoadedPair) -> dict[str, Any]:
    """Bytes of the device, of every model's weights, and of its cache for each token of a text;
    and how many tokens the device has room for beside the weights of the target and that draft."""
    total, target = device_bytes(pair.device), Memory.of(pair.target)
    models = {"target": (target, target)}
    for name, model in pair.models.items():
        draft = Memory.of(model)
        both = Memory(
            target.weights + draft.weights, target.cache_per_token + draft.cache_per_token
        )
        models[name] = draft, both
    return {
        "device": total,
        "models": {
            name: {
                **asdict(alone),
                "room": total and max(0, total - used.weights) // used.cache_per_token,
            }
            for name, (alone, used) in models.items()
        },
    }


def _memory_table(memory: Mapping[str, Any]) -> Table:
    rows = [
        {
            "model": name,
            "weights (MB)": round(one["weights"] / 1e6, 1),
            "cache (kB a token)": one["cache_per_token"] / 1e3,
            "tokens that fit": one["room"],
        }
        for name, one in memory["models"].items()
    ]
    size = f" ({memory['device'] / 1e9:.1f} GB)" if memory["device"] else ""
    return Table(rows, title=f"memory of the device{size}")


def _advice(checked: Check) -> str:
    """Whether to tune, in a sentence."""
    hint = "more prompts or a larger --budget would tell"
    measured = [row for row in checked.rows if "speedup" in row]
    if not measured:
        return f"Open: too few rounds were measured; {hint}."
    best = max(measured, key=lambda row: row["speedup"])
    low, high = best["speedup_interval"] or (None, None)
    prediction = (
        f"{best['draft']} at K={best['K']} is predicted {best['speedup']:.2f} times as fast as no "
        f"draft{interval((low, high))}"
    )
    if best["draft_step"] is not None:
        prediction += (
            f"; its step costs {best['draft_step']:.2f} of a target pass, and gains below "
            f"{best['break_even']:.2f}"
        )
    if low is None or high is None or len(checked.texts) < FEW:
        return f"Open on {len(checked.texts)} prompts: {prediction}; {hint}."
    if low > 1:
        return f"Worth tuning: {prediction}."
    if high > 1:
        return f"Open: {prediction}; {hint}."
    return f"Not worth tuning on this device: at best {prediction}."


def _about(minutes: float) -> str:
    return f"about {minutes:.0f} minutes" if minutes < 100 else f"about {minutes / 60:.0f} hours"


def _tune(s: Settings, spec: PairSpec) -> str:
    """The command that tunes this pair on this workload, with what was typed."""
    words = ["tune"]
    if s.typed("drafts") or spec.target == s.target:
        words += ["--set", f"target={spec.target}"]
        words += [
            w for name, path in spec.drafts.items() for w in ("--set", f"drafts.{name}={path}")
        ]
    elif s.typed("pair", "target") and isinstance(path := s.target or s.pair, (str, os.PathLike)):
        words += ["--pair", os.fspath(path)]
    for key, option in options_of(Tune).items():
        if key not in ("pair", "target", "drafts", "db") and s.typed(key):
            value = reduce(getattr, key.split("."), s)
            for one in value if isinstance(value, tuple) else (value,):
                words += ["--set", f"{key}={one}"] if option.hidden else [option.spelled, str(one)]
    return next_command(s, shlex.join(words))
