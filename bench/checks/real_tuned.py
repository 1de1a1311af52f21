"""What a tuning of Gemma 3 270M comes to, by workload and temperature; beside transformers.

    python bench/run.py real_tuned --workload code=FILE --workload maths=FILE --workload chat=FILE

`make real` leaves the pair in build/real, and prompts that are taken where no workload is named.
Each workload and temperature is checked, recorded and tuned as a user types it. Then greedy texts
by prompt lookup: transformers' (``prompt_lookup_num_tokens``) beside ours, of the fastest constant
length and of theirs, in turns; texts are compared. What ended is stored, and is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.checks.real import PAIR, generated
from bench.harness import Figures, keep, parser_of, result_file, say, state_folder, timed
from bench.lab import chain
from bench.served.live import run_json
from spectune.optimizer.execute import DecodeOptions, encode
from spectune.optimizer.inputs import read_files
from spectune.optimizer.tuning.confirmation import finite
from spectune.optimizer.tuning.timings import Timings
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.settings import RequestsSettings
from spectune.traces.cost_table import FloatArray

LOOKED_UP, PASSES = 10, 2
"""Tokens that transformers' documentation has prompt lookup draft; executions of each prompt."""
THEIRS, ASSISTED, PLAIN = "transformers", "transformers, prompt lookup", "ours"
KEPT = ("shown", "draft", "K", "speedup", "interval", "conversations")
CANDIDATE = (
    *("role", "label", "predicted_tokens_per_s", "measured_tokens_per_s", "mean_accepted_length"),
    *("ratio_to_autoregressive", "ratio_to_autoregressive_interval"),
)
TUNED = ("reason", "trials", "search_requests", "test_requests", "confirm_requests", "texts")


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--pair", type=Path, default=PAIR / "pair.json")
    add("--workload", action="append", default=[], metavar="NAME=FILE")
    add("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    add("--limit", type=int, default=24, help="requests of a tuning")
    add("--tokens", type=int, default=48)
    add("--budget", default="60s", help="for executing policies")
    add("--beside", type=int, default=6, help="prompts of each workload that transformers decodes")
    add("--quick", action="store_true", help="a tiny size")
    options = parser.parse_args(arguments)
    if not options.pair.exists():
        parser.error(f"no pair at {options.pair}: `make real` makes one")
    if options.quick:
        options.limit, options.tokens, options.budget, options.beside = 16, 8, "5s", 2
    names = [f"prompts={PAIR / 'texts.jsonl'}"] if not options.workload else options.workload
    workloads = dict(named.split("=", 1) for named in names)
    drafts = "+".join(sorted(read_pair(str(options.pair)).drafts)) or "ngram"
    file = result_file("real-tuned", options.quick)
    done = _stored(file)
    for name, path in workloads.items():
        for temperature in options.temperature:
            key = f"{name}, temperature {temperature:g}, {drafts}"
            if key not in done:
                figures, made = timed(lambda p=path, t=temperature: tuned(options, p, t))
                about = {"workload": name, "temperature": temperature, "drafts": drafts}
                done = _stored(file) | {key: {**about, **figures, **made}}
                keep(file, done)
            say(f"{key}: {done[key]['reason']}")
        key = f"{name}, beside transformers"
        if key not in done and options.beside and drafts == "ngram":
            fastest = done[f"{name}, temperature 0, {drafts}"]["fixed"]
            figures, made = timed(lambda p=path, f=fastest: beside(options, p, f))
            keep(file, done := _stored(file) | {key: {"workload": name, **figures, **made}})
            say(f"{key}: {done[key]['rows']}")
    return 0


def _stored(file: Path) -> Figures:
    return json.loads(file.read_text()) if file.exists() else {}


def database(options: argparse.Namespace, path: str, temperature: float) -> Path:
    """A database of one workload, temperature and pair."""
    name = f"real-tuned-{Path(path).stem}-{temperature:g}-{options.pair.parent.name}.db"
    return state_folder(options.quick) / name


def tuned(options: argparse.Namespace, path: str, temperature: float) -> Figures:
    """What `check` says, and what `tune` finds on a database of its own."""
    how = ("--temperature", temperature, "--limit", options.limit, "--max-new-tokens")
    how = (*how, options.tokens, "--set", "requests.turns=first")
    checked = run_json("check", options.pair, path, "--budget", "20s", *how)
    db = database(options, path, temperature)
    where = ("--pair", options.pair, "--workload", path, "--budget", options.budget)
    began = time.monotonic()
    result = run_json("--db", db, "tune", *where, *how, "--set", "report=none")
    candidates = {c["id"]: {key: c[key] for key in CANDIDATE} for c in result["candidates"]}
    roles, confirmed = {c["role"]: c for c in result["candidates"]}, result["confirmed"]
    worth = checked["worth"] and {key: checked["worth"][key] for key in KEPT}
    return {
        "limit": options.limit,
        "tokens": options.tokens,
        "check": worth,
        "winner": result["winner"]["label"],
        "fixed": roles["best fixed gamma"]["policy"]["window"]["gamma"],
        "published": bool(result["published"]),
        "confirmed": confirmed,
        "found": confirmed and candidates[confirmed["id"]]["label"],
        **{key: result[key] for key in TUNED},
        "prediction": result["prediction"],
        "stages_s": result["seconds"],
        "tune_s": round(time.monotonic() - began, 1),
        "candidates": [*candidates.values()],
    }


def beside(options: argparse.Namespace, path: str, fixed: int) -> Figures:
    """Seconds of each prompt by us and by transformers, in turns, and texts that differ. ``fixed``:
    the fastest constant length of prompt lookup."""
    pair = load_pair(read_pair(str(options.pair)), device="cpu")
    with pair.torch_threads():
        workload = read_files([path], RequestsSettings(limit=options.beside))
        encoded = encode(pair, workload, DecodeOptions(max_new_tokens=options.tokens))
        requests = [request for _, request in encoded.items]
        texts: dict[tuple[str, int], list[int]] = {}

        def theirs(name: str, n: int, **how: int) -> float:
            began = time.perf_counter()
            text = generated(pair, requests[n], **how)
            seconds = time.perf_counter() - began
            texts[name, n] = text.output_ids.tolist()
            return seconds

        def ours(name: str, n: int, decoder: Decoder) -> float:
            decoded = decoder.decode(requests[n])
            texts[name, n] = decoded.trajectory.output_ids.tolist()
            return decoded.seconds

        looked_up = {"prompt_lookup_num_tokens": LOOKED_UP}
        ways: dict[str, Callable[[str, int], float]] = {
            THEIRS: theirs,
            ASSISTED: partial(theirs, **looked_up),
        }
        for gamma in sorted({0, fixed, LOOKED_UP}):
            name = f"ours, prompt lookup of {gamma}" if gamma else PLAIN
            plan = prepare_for(pair, chain("ngram", gamma))
            ways[name] = partial(ours, decoder=Decoder(pair, StaticSource(plan)))
        seconds = _in_turns(ways, len(requests))
    timings, rows = Timings(seconds), []
    counts = [len(texts[PLAIN, n]) for n in range(len(requests))]
    for name in ways:
        differ = sum(texts[name, n] != texts[PLAIN, n] for n in range(len(requests)))
        speed = sum(counts) / float(seconds[name].mean(1).sum())
        ratios = {base: finite(timings.ratio(name, base)) for base in (THEIRS, ASSISTED, PLAIN)}
        rows.append({"what": name, "tokens_per_s": speed, "texts_differ": differ, "over": ratios})
    return {"prompts": len(counts), "new_tokens": sum(counts), "rows": rows}


def _in_turns(ways: dict[str, Callable[[str, int], float]], count: int) -> dict[str, FloatArray]:
    """Seconds [prompts, passes] of each way, in another random order for each prompt."""
    rng = np.random.default_rng(0)
    seconds = {name: np.zeros((count, PASSES)) for name in ways}
    for name, way in ways.items():
        way(name, 0)  # warms up
    for repeat in range(PASSES):
        for n in range(count):
            for name in rng.permutation([*ways]).tolist():
                seconds[name][n, repeat] = ways[name](name, n)
    return seconds
