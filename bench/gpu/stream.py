"""One request at a time on a GPU: how near a pass is to the bandwidth of copies, the code before
beside the code now, and what a tuning publishes beside what a user would take.

    git archive --prefix=spectune/ REF __init__.py runtime traces | tar -x -C build/before
    python bench/run.py gpu_stream --out DIR [--before build/before] [--seconds 440]
    python bench/run.py gpu_stream --out DIR --device cpu --tiny
    python bench/run.py gpu_stream --collect DIR

The pair is the ballasted one (:mod:`gpu.ballast`). ``rows.jsonl`` in ``DIR`` gets a line for each
part as it ends; after ``--seconds`` no part is begun, and what is done is not done again by the
next call with the same ``DIR``. The parts, in this order:

``passes``: captured passes of a random Llama 3.1 8B as a share of the copy bandwidth. ``drafting``:
a step of the draft and a level of the head's tree. ``tree``: tokens/s of a wide tree of the head.
All three of the code before and of the code now, in one process, in turns. ``tune``: a tuning as a
user types it. ``prompt N``: what it published, EAGLE-3's default tree, an untuned chain and none,
in turns on prompts that no tuning has seen. ``costs``: a profile at 1 to 256 rows and contexts of
512 to 8,192 tokens, which replay reads.

``--collect`` reads on a CPU what came back, predicts the executed policies by replay of their texts
at the costs that the tuning measured, and writes ``bench/results/gpu-stream-DEVICE.json``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pairs import chain, top_k

from bench import ROOT
from bench.gpu.checkout import Checkout
from bench.gpu.native import Bench, captured_pass, random_target, tuning
from bench.gpu.rows import Figures, OutOfTimeError, Rows, begin, command_line, run_parts
from bench.lab import GREEDY, interval_of, requests, stored
from spectune.optimizer.execute import DecodeOptions, encode
from spectune.optimizer.stored_artifacts import fitted
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loop import DecodeRequest, StaticSource
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.profiling.measure import measure_profile
from spectune.traces.cost_table import CostTable, terms_from_json
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile

TUNED_ON = 36
"""Requests of the tuning."""
WIDE = top_k("head", 8, 6, 60)
"""What was published on an H200."""
OTHERS: dict[str, Figures] = {
    "EAGLE-3's default tree": top_k("head", 10, 7, 60),
    "chain of 3": chain("head", 3),
    "none": {},
}
"""What a user would take, beside what is published."""


class Size(NamedTuple):
    """How much is measured: turns of a part that compares, repetitions of a pass, tokens of passes,
    tokens before them; lengths of windows whose difference is a step, tokens of a text; prompts
    that nothing was tuned on and their new tokens; rows and contexts of costs."""

    turns: int
    repeats: int
    passes: tuple[int, ...]
    cached: int
    windows: tuple[int, int]
    prompts: int
    tokens: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    gamma_max: int


ROWS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256)
FULL = Size(7, 20, (1, 8, 32, 64), 512, (2, 6), 60, 128, ROWS, (512, 2048, 8192), 8)
TINY = Size(2, 1, (1,), 16, (1, 2), 2, 6, (1, 8, 64), (16, 48), 2)


@dataclass(frozen=True)
class Measurement:
    """Where is measured, how much, until when (seconds of the monotonic clock), into which folder,
    and the folder of the code before (None: there is none)."""

    bench: Bench
    size: Size
    until: float
    out: Path
    before: Path | None

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    @cached_property
    def rows(self) -> Rows:
        return Rows(self.out)

    @cached_property
    def tuned(self) -> Figures:
        """The tuning's figures."""
        rows = [row for row in self.rows.read() if "winner" in row]
        if not rows:
            raise ValueError("nothing is tuned yet")
        return rows[-1]

    @property
    def policies(self) -> dict[str, Figures]:
        """What takes turns on prompts that nothing was tuned on."""
        return {"published": self.tuned["winner"]["policy"], **OTHERS}

    @cached_property
    def held_out(self) -> list[DecodeRequest]:
        workload = requests(self.size.prompts, skip=100)
        encoded = encode(self.bench.pair, workload, DecodeOptions(GREEDY, self.size.tokens))
        self.bench.pair.reserve(encoded.longest)
        return [request for _, request in encoded.items]

    @cached_property
    def decoders(self) -> dict[str, Decoder]:
        """By policy, warmed up: each has captured what its rounds need."""
        found, first = {}, replace(self.held_out[0], max_new_tokens=min(16, self.size.tokens))
        pair, profile = self.bench.pair, profile_from(self.tuned["profile"])
        how: dict[str, Any] = {"profile": profile, "artifacts": fitted(self.store, pair.id)}
        for name, document in self.policies.items():
            plan = prepare_for(pair, parse_policy(document), **how)
            found[name] = Decoder(pair, StaticSource(plan))
            found[name].decode(first)
        return found

    @property
    def store(self) -> TraceStore:
        """The tuning's."""
        return stored(self.out / "tune.db")

    @cached_property
    def sides(self) -> dict[str, Side]:
        """The code before, where there is one, and the code now."""
        folders = {"now": None} if self.before is None else {"before": self.before, "now": None}
        return {name: Side(self.bench, Checkout(folder)) for name, folder in folders.items()}

    def in_turns(self, measure: Callable[[Side], float]) -> dict[str, list[float]]:
        """What is measured of each side, once before, to warm up, then turn after turn, in another
        order each time. Raises OutOfTimeError where time ends before there are two turns."""
        found: dict[str, list[float]] = {name: [] for name in self.sides}
        for turn in range(-1, self.size.turns):
            names = list(self.sides)
            for name in names if turn % 2 else names[::-1]:
                figure = measure(self.sides[name])
                if turn >= 0:
                    found[name].append(figure)
            if self.seconds_left < 0:
                if turn < 1:
                    raise OutOfTimeError
                break
        return found


class Side:
    """One of two trees of the package, with the ballasted pair loaded by it."""

    def __init__(self, bench: Bench, checkout: Checkout) -> None:
        self.bench, self.checkout = bench, checkout
        self._decoders: dict[str, Any] = {}

    @cached_property
    def _pair(self) -> Any:
        if self.checkout.is_own:
            return self.bench.pair
        spec = self.checkout.module("runtime.pair").read_pair(str(self.bench.file))
        return self.checkout.module("runtime.loading").load_pair(spec, device=self.bench.device)

    def forget(self) -> None:
        """Frees what only comparisons need."""
        self._decoders.clear()
        self.__dict__.pop("_pair", None)

    def decoded(self, document: Figures) -> list[Any]:
        """The bench's requests under a policy."""
        with self.checkout.active():
            decoder, schema = self._decoder(document), self.checkout.module("traces.schema")
            return [
                decoder.decode(
                    decoder.request(
                        schema.Request(request.id, ""),
                        list(request.prompt_ids),
                        schema.Sampling(),
                        request.max_new_tokens,
                    )
                )
                for _, request in self.bench.encoded.items
            ]

    def _decoder(self, document: Figures) -> Any:
        """One for each policy, as each captures what its rounds need."""
        key, module = json.dumps(document), self.checkout.module
        if key not in self._decoders:
            self._pair.reserve(self.bench.encoded.longest)
            policy = module("runtime.policies.document").parse_policy(document)
            plan = module("runtime.decoder").prepare_for(self._pair, policy)
            source = module("runtime.loop").StaticSource(plan)
            self._decoders[key] = module("runtime.decoder").Decoder(self._pair, source)
        return self._decoders[key]

    def draft_ms(self, document: Figures) -> float:
        """Milliseconds in which a round of a policy drafts, the median."""
        return 1e3 * statistics.median(s.draft_s for d in self.decoded(document) for s in d.steps)

    def tokens_per_s(self, document: Figures) -> float:
        decoded = self.decoded(document)
        emitted = sum(step.emitted for d in decoded for step in d.steps)
        return emitted / sum(d.seconds for d in decoded)


# ------------------------------------------------------------------------------------------- parts


def passes(of: Measurement) -> Figures:
    """Milliseconds of captured passes with tokens in the cache, and the share of them that copying
    as many bytes as their weights have takes, turn by turn."""
    bench, size = of.bench, of.size
    buffer = torch.zeros(2, 1 << (20 if bench.tiny else 30), dtype=torch.uint8, device=bench.device)
    models: dict[str, Any] = {}
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for name, side in of.sides.items():
        with side.checkout.active():
            model = models[name] = random_target(bench)
            for n in size.passes:
                calls[name, n] = captured_pass(bench, model, n, size.cached, 2 * size.cached)
    model = models["now"].model
    read = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    copies = list[float]()

    def mean_ms(call: Callable[..., object], *given: Any) -> float:
        call(*given)
        bench.wait()
        began = time.perf_counter()
        for _ in range(size.repeats):
            call(*given)
        bench.wait()
        return 1e3 * (time.perf_counter() - began) / size.repeats

    def pass_ms(tokens: int, side: Side) -> float:
        name = next(name for name, other in of.sides.items() if other is side)
        copied_ms = mean_ms(buffer[0].copy_, buffer[1])
        copies.append(2 * buffer[0].numel() / copied_ms / 1e6)
        with side.checkout.active():
            return mean_ms(calls[name, tokens])

    rows: list[Figures] = [
        {"tokens": n, "ms": of.in_turns(partial(pass_ms, n))} for n in size.passes
    ]
    gb_per_s = statistics.median(copies)
    limit_ms = read / gb_per_s / 1e6
    for row in rows:
        each = row["ms"].items()
        row["share"] = {name: interval_of(np.log(limit_ms / np.array(ms))) for name, ms in each}
    return {"copy_gb_per_s": gb_per_s, "read_gb": read / 1e9, "limit_ms": limit_ms, "rows": rows}


def drafting(of: Measurement) -> Figures:
    """Milliseconds of a step of the draft, and of a level of the head's tree: what a longer window
    adds to a round, turn by turn."""
    short, long = of.size.windows

    def added(policy: Callable[[int], Figures], side: Side) -> float:
        few, many = (side.draft_ms(policy(gamma)) for gamma in (short, long))
        return (many - few) / (long - short)

    steps, levels = partial(chain, "small"), lambda gamma: top_k("head", 8, gamma, 60)
    return {
        "draft step ms": of.in_turns(partial(added, steps)),
        "head level ms": of.in_turns(partial(added, levels)),
    }


def tree(of: Measurement) -> Figures:
    """Tokens/s of a wide tree, turn by turn; and how many texts differ between the sides."""
    texts = [
        [d.trajectory.output_ids.tolist() for d in side.decoded(WIDE)] for side in of.sides.values()
    ]
    differ = sum(a != b for a, b in zip(texts[0], texts[-1], strict=True))
    speeds = of.in_turns(lambda side: side.tokens_per_s(WIDE))
    return {"tokens_per_s": speeds, "texts": len(texts[0]), "differ": differ}


def tune(of: Measurement) -> Figures:
    """A tuning, its candidates, and the profile that it measured."""
    wall_s, tuned = tuning(of.bench, of.out / "tune.db", of.seconds_left)
    if tuned is None:
        raise OutOfTimeError
    pair, dtype = of.bench.pair, str(of.bench.pair.target.dtype).removeprefix("torch.")
    profile = next(iter(of.store.profiles(pair.id, pair.device.type, dtype)))
    kept = ("winner", "confirmed", "reason", "prediction", "texts")
    return {
        "wall_s": wall_s,
        **{name: tuned[name] for name in kept},
        "published": tuned["published"] and tuned["published"]["version"],
        "profile": profile.to_json(),
    }


def prompt(of: Measurement, number: int) -> Figures:
    """A prompt that nothing was tuned on, decoded under each policy in random order."""
    texts, seconds = dict[str, list[int]](), dict[str, float]()
    names, decoders = list(of.policies), of.decoders
    for place in np.random.default_rng(number).permutation(len(names)):
        name, began = names[place], time.perf_counter()
        decoded = decoders[name].decode(of.held_out[number])
        seconds[name] = time.perf_counter() - began
        texts[name] = decoded.trajectory.output_ids.tolist()
    return {"prompt": list(of.held_out[number].prompt_ids), "policy_s": seconds, "texts": texts}


def costs(of: Measurement) -> Figures:
    """A profile whose target's pass goes up to the most rows and the longest context: fitted to
    rounds as far as trees go, beyond as captured passes are longer."""
    bench, size = of.bench, of.size
    how: dict[str, Any] = {"trees": not bench.tiny, "contexts": size.contexts}
    profile = measure_profile(bench.pair, gamma_max=size.gamma_max, **how)
    target, capacity = bench.pair.target, max(size.contexts) + max(size.rows)
    passed = []
    for context, n in product(size.contexts, size.rows):
        ms = bench.milliseconds(captured_pass(bench, target, n, context, capacity))
        passed.append({"rows": n, "context": context, "ms": ms})
    return {"passes": passed, "profile": widened(profile, passed).to_json()}


def widened(profile: LatencyProfile, passed: Sequence[Figures]) -> LatencyProfile:
    """A profile whose target's pass has the rows of ``passed`` that are beyond its own: it takes as
    much longer there as the captured pass does."""
    table = profile.terms["target"]
    rows, contexts = table.knots
    knots = tuple(sorted({float(row["context"]) for row in passed}))
    sizes = tuple(sorted({float(row["rows"]) for row in passed}))
    by_place = {(row["rows"], row["context"]): row["ms"] / 1e3 for row in passed}
    grid = tuple(by_place[n, context] for n in sizes for context in knots)
    captured = CostTable(grid, ("rows", "context"), (sizes, knots))
    seconds = np.array(table.seconds).reshape(len(rows), -1)
    more = [n for n in sizes if n > rows[-1]]
    at = np.array(contexts)
    for n in more:
        longer = captured.at(rows=n, context=at) - captured.at(rows=rows[-1], context=at)
        seconds = np.vstack([seconds, np.maximum(seconds[-1], seconds[len(rows) - 1] + longer)])
    wide = CostTable(tuple(seconds.ravel().tolist()), table.axes, ((*rows, *more), contexts))
    return replace(profile, terms={**profile.terms, "target": wide})


def profile_from(document: Mapping[str, Any]) -> LatencyProfile:
    """A profile as replay takes it."""
    return LatencyProfile(**{**document, "terms": terms_from_json(document["terms"])})


def parts(of: Measurement) -> dict[str, Callable[[], Figures]]:
    """By name, in their order."""
    found: dict[str, Callable[[], Figures]] = {
        part.__name__: partial(part, of) for part in (passes, drafting, tree, tune)
    }
    found |= {f"prompt {n}": partial(prompt, of, n) for n in range(of.size.prompts)}
    return found | {"costs": partial(costs, of)}


def main(arguments: Sequence[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="a folder with another tree named spectune"
    )
    asked = parser.parse_args(arguments)
    if asked.collect is not None:
        from bench.gpu.stream_collect import collect

        return collect(asked.collect, asked.results)
    begin(parser, asked)
    if asked.before is not None and not (asked.before / "spectune" / "runtime").is_dir():
        parser.error(f"--before {asked.before}: it has no folder spectune with a runtime")
    folder = asked.folder or ROOT / ".acceptance" / ("ballast-tiny" if asked.tiny else "ballast")
    of = Measurement(
        Bench(asked.device, asked.tiny, asked.seconds, folder.resolve()),
        TINY if asked.tiny else FULL,
        time.monotonic() + asked.seconds,
        asked.out.resolve(),
        asked.before and asked.before.resolve(),
    )

    def ended(part: str) -> None:
        for side in of.sides.values() if part == "tree" else ():
            side.forget()

    names = "passes, drafting, tree, tune, prompt N, costs"
    has_before = asked.before is not None
    return run_parts(parser, asked, parts(of), names, of.until, ended, has_before=has_before)
