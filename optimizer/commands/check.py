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

from spectune.optimizer.check import Memory, check_pair, device_bytes
from spectune.optimizer.commands.decoding import fit_to, load, read_workload
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.commands.session import Talk, next_command, open_store, pair_of
from spectune.optimizer.from_settings import decode_options
from spectune.optimizer.report.words import interval
from spectune.options import options_of
from spectune.runtime.loading import LoadedPair
from spectune.runtime.pair import PairSpec, read_pair
from spectune.settings import Check as Settings
from spectune.settings import Race, Sampling, Tune
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


def check(s: Settings, talk: Talk) -> Result:
    began = time.perf_counter()
    spec = _pair(s)
    whole = s.model_copy(update={"requests": s.requests.model_copy(update={"limit": None})})
    workload = read_workload(whole, spec, talk)
    num_requests = len(workload.requests)
    workload = take(workload, s.requests.limit, seed=s.requests.seed)
    options = decode_options(s.sampling)
    pair = load(s, spec, talk)
    workload = fit_to(pair, workload, options, s, talk)
    with _store(s) as store, pair.torch_threads():
        left_s = s.budget - (time.perf_counter() - began)
        checked = check_pair(
            store, pair, workload, options, s.search.gamma_max,
            budget_s=left_s, clock=time.perf_counter, progress=talk.progress,
        )  # fmt: skip
    memory = _memory(pair)
    if "requests.limit" in s.sources:
        num_requests = len(workload.requests)
    most = (s.sampling if "sampling.max_new_tokens" in s.sources else Sampling()).max_new_tokens
    minutes = checked.tune_seconds(num_requests, most, Race().budget) / 60
    advice, command = _advice(checked.rows), _tune(s, spec)
    data = {
        "pair": spec.id,
        "heads": pair.hidden_states,
        "notes": list(pair.notes),
        **pair.place,
        "prompts": len(checked.texts),
        "tokens": checked.tokens,
        "seconds": time.perf_counter() - began,
        "without_draft_tokens_per_s": 1 / checked.token_s,
        "lengths": checked.rows,
        "memory": memory,
        "tune_minutes": minutes,
        "advice": advice,
        "next": command,
    }
    tables = [*_tables(checked.rows), _memory_table(memory)]
    lines = [
        f"{len(checked.texts)} of {len(workload.requests)} prompts, {checked.tokens} tokens; "
        f"{1 / checked.token_s:.1f} tokens/s without a draft on {pair.place['hardware']}",
        "draft step, gains below: parts of a target pass for one token; K tokens gain where a step "
        "of the draft costs less",
        advice,
        f"about {minutes:.0f} minutes: {command}",
    ]
    return Result("\n".join(lines), data, checked.rows, tables)


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
            {name: _printed(row[key]) for key, name in COLUMNS.items() if row.get(key)}
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
                "room": total and (total - used.weights) // used.cache_per_token,
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


def _advice(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whether to tune, in a sentence."""
    priced = [row for row in rows if "speedup" in row]
    if not priced:
        return "Open: too few rounds were measured; more prompts or a larger --budget would tell."
    best = max(priced, key=lambda row: row["speedup"])
    low, high = best["speedup_interval"]
    what = (
        f"{best['draft']} at K={best['K']} is predicted {best['speedup']:.2f} times as fast as no "
        f"draft{interval((low, high))}"
    )
    if low > 1:
        return f"Worth tuning: {what}."
    if high > 1:
        return f"Open: {what}; more prompts or a larger --budget would tell."
    return f"Not worth tuning on this device: at best {what}."


def _tune(s: Settings, spec: PairSpec) -> str:
    """The command that tunes this pair on this workload, with what was typed."""
    words = ["tune"]
    if s.typed("drafts") or spec.target == s.target:
        words += ["--set", f"target={spec.target}"]
        words += [
            w for name, path in spec.drafts.items() for w in ("--set", f"drafts.{name}={path}")
        ]
    elif s.typed("pair", "target"):
        words += ["--pair", str(s.target or s.pair)]
    for key, option in options_of(Tune).items():
        if key not in ("pair", "target", "drafts", "db") and s.typed(key):
            value = reduce(getattr, key.split("."), s)
            for one in value if isinstance(value, tuple) else (value,):
                words += ["--set", f"{key}={one}"] if option.hidden else [option.spelled, str(one)]
    return next_command(s, shlex.join(words))
