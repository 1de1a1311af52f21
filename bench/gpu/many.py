"""Many requests at once on a GPU: chains, trees and a table by load, chosen by replay of what steps
cost there, then executed in turns.

    python bench/run.py gpu_many --out DIR [--seconds 440]
    python bench/run.py gpu_many --out DIR --device cpu --tiny
    python bench/run.py gpu_many --collect DIR

The pair is the ballasted one (:mod:`gpu.ballast`) with its EAGLE-3 head. ``rows.jsonl`` in ``DIR``
gets a line for each part as it ends; after ``--seconds`` no part is begun, and what is done is not
done again by the next call with the same ``DIR``. The parts, in this order:

``record``: the workload with wide trees of the head, at temperatures 0 and 1, into ``many.db``.
``profile``: what steps of 1 to 64 requests cost. ``choose``: by replay at that profile, on one half
of the requests, the best chain and the best tree of the head at each number of clients, and a table
by load of these and no draft. ``clients N``: no draft, that chain, that tree and the table in
turns, on the other half; each once before, as that captures passes. ``texts``: how many texts of 4
and 8 requests at once differ in float64 from those of one at a time without a draft. ``static``:
transformers' ``generate`` with a static cache, compiled, one request.

``--collect`` reads on a CPU what came back, predicts what was executed by replay at the profile,
and writes ``bench/results/gpu-many-DEVICE.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pairs import chain, top_k

from bench import ROOT
from bench.checks.load_native import (
    LOOK,
    best_of_kinds,
    execute,
    halves_of,
    kinds,
    prompts_again,
    replayed_speed,
    steps_profile,
    table_of,
)
from bench.gpu.native import STATIC, Bench, decode, generated, in_transformers
from bench.gpu.rows import Figures, OutOfTimeError, Rows, begin, command_line, failed, run_parts
from bench.gpu.stream import profile_from
from bench.lab import GREEDY, SAMPLED, recorded, replayable, requests, stored
from spectune.engines.engine import Load
from spectune.optimizer.decoder_engine import DecoderEngine
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.on_engine import prompts_of
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.decoder import prepare_for
from spectune.runtime.loading import load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile

DRAFT, DATABASE = "head", "many.db"
TOGETHER = (4, 8)
"""Requests at once whose float64 texts are compared."""
POLICIES: list[Figures] = [chain("small", 4), chain("head", 4), top_k("head", 4, 4, 12)]
"""Under which they are decoded."""


class Size(NamedTuple):
    """How much is measured: requests, half of which is executed, and their new tokens; numbers of
    clients in the order in which they are measured; counted passes of each policy there; the
    sampling of texts; the longest chain and the most sweeps of the profile."""

    requests: int
    tokens: int
    clients: tuple[int, ...]
    passes: int
    samplings: tuple[Sampling, ...]
    gamma_max: int
    sweeps: int


FULL = Size(48, 48, (1, 4, 16, 64, 2, 8, 32), 5, (GREEDY, SAMPLED), 8, 2)
TINY = Size(4, 6, (1, 2), 2, (GREEDY,), 2, 1)


@dataclass(frozen=True)
class Measurement:
    """Where is measured, how much, until when (seconds of the monotonic clock), and into which
    folder."""

    bench: Bench
    size: Size
    until: float
    out: Path

    @cached_property
    def store(self) -> TraceStore:
        return stored(self.out / DATABASE)

    @cached_property
    def traces(self) -> dict[str, ReplayTrace]:
        """What was recorded, by temperature as parts name it; filled as it is needed."""
        return {}

    def row(self, part: str) -> Figures:
        """The figures of a part that others need."""
        for row in Rows(self.out).read():
            if row["part"] == part and "failed" not in row:
                return row
        raise ValueError(f"{part!r} has not run yet")

    def trace(self, sampling: Sampling) -> ReplayTrace:
        name = named("record", sampling)
        if name not in self.traces:
            recording = self.row(name)["recording"]
            self.traces[name] = replayable(self.store, self.bench.pair, recording)
        return self.traces[name]

    @property
    def seats(self) -> int:
        return max(self.size.clients)

    @cached_property
    def profile(self) -> LatencyProfile:
        return profile_from(self.row("profile")["profile"])

    @cached_property
    def engine(self) -> DecoderEngine:
        return DecoderEngine(self.bench.pair, self.seats, profile=self.profile)

    def forget(self) -> None:
        """Lets go of an engine that failed amid requests."""
        self.__dict__.pop("engine", None)


def named(part: str, sampling: Sampling) -> str:
    return f"{part}, temperature {sampling.temperature:g}"


def sent(texts: Sequence[object], clients: int) -> int:
    """Requests of an execution: each text once, two a client at least."""
    return max(len(texts), 2 * clients)


# ------------------------------------------------------------------------------------------- parts


def record(of: Measurement, sampling: Sampling) -> Figures:
    """Texts without a draft, and wide trees of the head along them."""
    options, workload = DecodeOptions(sampling, of.size.tokens), requests(of.size.requests)
    recording = recorded(of.store, of.bench.pair, workload, options, (DRAFT,), *LOOK)
    return {"recording": recording, "requests": of.size.requests, "tokens": of.size.tokens}


def profile(of: Measurement) -> Figures:
    """What steps of one request and of several cost, and how well that predicts rounds."""
    trace, size = of.trace(of.size.samplings[0]), of.size
    how: dict[str, Any] = {"gamma_max": size.gamma_max, "most": size.sweeps}
    found = steps_profile(of.bench.pair, trace, of.seats, **how)
    return {"seats": of.seats, "check": found.check, "profile": found.to_json()}


def choose(of: Measurement, sampling: Sampling) -> Figures:
    """By clients the policies that are executed, as they are best by replay of one half of the
    requests."""
    trace, every = of.trace(sampling), sorted(of.size.clients)

    def play(policy: Policy, texts: Sequence[int], load: Load) -> float:
        where = load.clients, of.profile, of.seats, sent(texts, load.clients)
        return replayed_speed(trace.select(texts), policy, *where)

    fit, among = halves_of(trace)[0], kinds(DRAFT)
    best = best_of_kinds(play, {kind: among[kind] for kind in ("chain", "tree")}, fit, every)
    table = table_of(play, best, fit, every)
    chosen: dict[int, dict[str, Policy]] = {
        n: {"none": AUTOREGRESSIVE, **{kind: by[n] for kind, by in best.items()}, "by load": table}
        for n in every
    }
    return {
        "policies": {n: {k: p.spelled_out() for k, p in by.items()} for n, by in chosen.items()},
        "labels": {n: [by[kind].label() for kind in best] for n, by in chosen.items()},
        "by load": table.label(),
    }


def clients(of: Measurement, count: int, sampling: Sampling) -> Figures:
    """Tokens/s of no draft, the best chain, the best tree and the table, pass after pass in another
    order; texts of the last pass that differ from the first ones without a draft; what failed."""
    documents = of.row(named("choose", sampling))["policies"][f"{count}"]
    policies = {name: parse_policy(document) for name, document in documents.items()}
    trace, rng = of.trace(sampling), np.random.default_rng(count)
    prompts = prompts_again(trace.trajectories[n] for n in halves_of(trace)[1])
    options = DecodeOptions(sampling, of.size.tokens)
    speeds: dict[str, list[float]] = {name: [] for name in policies}
    texts, failures = dict[str, list[list[int]]](), dict[str, str]()
    plain = list[list[int]]()
    for turn in range(-1, of.size.passes):
        for place in rng.permutation(len(policies)):
            name = [*policies][place]
            if name in failures:
                continue
            how = policies[name], count, options, sent(prompts, count)
            try:
                found = execute(of.engine, prompts, *how)
            except Exception as error:  # the other policies may still be had
                failures[name] = failed(error)["failed"]
                speeds[name].clear()
                of.forget()
                continue
            texts[name] = found.texts
            if turn >= 0:
                speeds[name].append(found.tokens_per_s)
        if turn < 0:
            plain = texts.get("none", [])
        if time.monotonic() > of.until:
            if turn < 1:
                raise OutOfTimeError
            break
    return {
        "clients": count,
        "temperature": sampling.temperature,
        "requests": sent(prompts, count),
        "tokens_per_s": speeds,
        "differ": {name: sum(map(ne, plain, each)) for name, each in texts.items() if plain},
        "failures": failures,
    }


def texts(of: Measurement) -> Figures:
    """Texts of the demo pair in float64, of several requests at once under chains and trees, that
    differ from those of one at a time without a draft."""
    drafts = ("small", DRAFT)
    pair = load_pair(read_pair("demo"), device=of.bench.device, dtype="float64", drafts=drafts)
    count, rows = max(TOGETHER), []
    alone, together = (DecoderEngine(pair, seats) for seats in (1, count))
    prompts = prompts_of(pair, requests(count, skip=60), DecodeOptions(GREEDY, 1))
    for sampling in of.size.samplings:
        options = DecodeOptions(sampling, min(24, of.size.tokens))
        expected = execute(alone, prompts, AUTOREGRESSIVE, 1, options, count).texts
        for document, at_once in product(POLICIES, TOGETHER):
            policy = parse_policy(document)
            found = execute(together, prompts, policy, at_once, options, count).texts
            rows.append({
                "policy": policy.label(), "temperature": sampling.temperature,
                "at once": at_once, "texts": count, "differ": sum(map(ne, found, expected)),
            })  # fmt: skip
    return {"count": sum(row["texts"] for row in rows), "rows": rows}


def static(of: Measurement) -> Figures:
    """One request in transformers, compiled, beside ours without a draft; texts that differ."""
    bench = of.bench
    ours = decode(bench, StaticSource(prepare_for(bench.pair, AUTOREGRESSIVE)))
    tokens = [d.trajectory.output_ids.tolist() for d in ours]
    speed = sum(map(len, tokens)) / sum(d.seconds for d in ours)
    target = in_transformers(bench, bench.pair.spec.target)
    return {"ours, tokens/s": speed, **generated(bench, target, tokens, **STATIC)}


def parts(of: Measurement) -> Mapping[str, Callable[[], Figures]]:
    """By name, in their order: numbers of clients at every temperature, the first ones first."""
    samplings = of.size.samplings

    def each(part: Callable[[Measurement, Sampling], Figures]) -> Iterable[Any]:
        return ((named(part.__name__, s), partial(part, of, s)) for s in samplings)

    return {
        **dict(each(record)),
        "profile": partial(profile, of),
        **dict(each(choose)),
        **{
            named(f"clients {n}", s): partial(clients, of, n, s)
            for n, s in product(of.size.clients, samplings)
        },
        "texts": partial(texts, of),
        "static": partial(static, of),
    }


def main(arguments: Sequence[str]) -> int:
    parser = command_line(__doc__)
    asked = parser.parse_args(arguments)
    if asked.collect is not None:
        from bench.gpu.many_collect import collect

        return collect(asked.collect, asked.results)
    begin(parser, asked)
    folder = asked.folder or ROOT / ".acceptance" / ("ballast-tiny" if asked.tiny else "ballast")
    bench = Bench(asked.device, asked.tiny, asked.seconds, folder.resolve(), (DRAFT,))
    until = time.monotonic() + asked.seconds
    of = Measurement(bench, TINY if asked.tiny else FULL, until, asked.out.resolve())
    named_parts = parts(of)
    return run_parts(parser, asked, named_parts, "; ".join(named_parts), until)
