"""Is speculation lossless on Gemma 3 270M, whose sliding layers see 512 tokens.

    python bench/run.py real [--dtype float64] [--texts 12] [--tokens 64] [--pair FILE]

`make real` leaves the pair in build/real. Texts under prompt lookup (or under chains and trees of
the drafts that a pair names), one at a time and four at once, beside `generate` of transformers
(above temperature 0 beside autoregression); rounds beside their replay. In float64 none may differ;
in other types they are counted. Every second prompt is longer than the window. Every policy is
stored as it ends, and is not run again.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from pairs import top_k
from recorded_texts import shape
from synthetic import flat_profile

from bench import ROOT
from bench.harness import Figures, keep, parser_of, result_file, say, state_folder, timed
from bench.lab import chain
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime import attention
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import DecodeRequest, Round, StaticSource, Waiting
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.schema import Request, Sampling, Tokens
from spectune.traces.tables import Trajectory

PAIR = ROOT / "build" / "real"
SAMPLINGS = Sampling(), Sampling(temperature=1.0, seed=5)
GAMMA = 10
POLICIES: tuple[tuple[Policy, int], ...] = (
    (chain("ngram", 4), 1),
    (chain("ngram", GAMMA), 4),
    (parse_policy({"draft": "ngram", "window": {"kind": "analytic", "gamma_max": 8}}), 4),
    (parse_policy({"draft": "ngram", "window": {"kind": "cache_fsm", "gamma_max": 8}}), 1),
    (chain("ngram", 2), 4),
    (AUTOREGRESSIVE, 4),
)
"""And how many requests run at once."""
DEPTH, WIDTH, NODES = 4, 4, 12
"""Of chains and trees of models."""


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--pair", type=Path, default=PAIR / "pair.json")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    options = parser.parse_args(arguments)
    if not options.pair.exists():
        parser.error(f"no pair at {options.pair}: `make real` makes one")
    size = (2, 8) if options.quick else (options.texts, options.tokens)
    file = result_file("real", options.quick)
    figures = measure(file, options.pair, options.dtype, *size)
    print(figures["summary"])
    return int(not figures["holds"])


def measure(file: Path, of: Path, dtype: str, count: int, tokens: int) -> Figures:
    """The figures of a dtype and a pair; those of another size are forgotten."""
    pair = load_pair(read_pair(str(of)), device="cpu", dtype=dtype)
    torch.set_num_threads(pair.threads)
    name = ", ".join((dtype, *pair.models))
    size, rows = {"texts": count, "tokens": tokens}, list[Figures]()
    if (before := _stored(file).get(name, {})).get("size") == size:
        rows = before["rows"]
    for sampling in SAMPLINGS:
        texts = references(pair, dtype, sampling, count, tokens)
        look = {"ngram": (GAMMA,)} | dict.fromkeys(pair.models, (DEPTH, WIDTH, DEPTH))
        panoramas = {
            draft: [record_panorama(pair, text, draft, *sizes) for text in texts]
            for draft, sizes in look.items()
        }
        trace = ReplayTrace(texts, panoramas)
        for policy, seats in policies_of(pair):
            key = {"temperature": sampling.temperature, "policy": policy.label(), "seats": seats}
            if any(key.items() <= row.items() for row in rows):
                continue
            figures, made = timed(lambda p=policy, s=seats, t=trace: compared(pair, t, p, s))
            rows.append({**key, **figures, "seconds": made.pop("seconds")})
            say(rows[-1])
            found = {**verdict(name, rows), "size": size, "rows": rows, **made}
            keep(file, _stored(file) | {name: found})
    return verdict(name, rows)


def policies_of(pair: LoadedPair) -> tuple[tuple[Policy, int], ...]:
    """Policies by how many requests run at once: of prompt lookup, or of a pair's models."""
    found = []
    for draft in pair.models:
        found += [(chain(draft, DEPTH), 1), (chain(draft, 2), 4)]
        found += [(parse_policy(top_k(draft, WIDTH, DEPTH, NODES)), seats) for seats in (1, 4)]
    return tuple(found) or POLICIES


def _stored(file: Path) -> Figures:
    """The figures of each dtype; another may be measured meanwhile."""
    return json.loads(file.read_text()) if file.exists() else {}


def verdict(name: str, rows: list[Figures]) -> Figures:
    """What the rows of a dtype and a pair come to."""
    texts, differ, rounds, wrong, beyond = (
        sum(row[key] for row in rows)
        for key in ("texts", "texts_differ", "rounds", "rounds_differ", "beyond_window")
    )
    return {
        "holds": not name.startswith("float64") or differ == wrong == 0,
        "summary": f"{name}: {differ} of {texts} texts ({beyond} of them longer than the window) "
        f"and {wrong} of {rounds} rounds differ",
    }


def references(
    pair: LoadedPair, dtype: str, sampling: Sampling, count: int, tokens: int
) -> list[Trajectory]:
    """The target's own texts: greedy ones of transformers, others of autoregression."""
    name = f"real-{dtype}-{sampling.temperature}-{count}-{tokens}.pickle"
    file = state_folder() / name
    if file.exists():
        texts: list[Trajectory] = pickle.loads(file.read_bytes())
        return texts
    decoder, made = Decoder(pair, StaticSource(prepare_for(pair, AUTOREGRESSIVE))), []
    for request in requests(decoder, sampling, count, tokens):
        if sampling.greedy:
            made.append(generated(pair, request))
        else:
            made.append(decoder.decode(request).trajectory)
        say(f"{len(made)} of {count} texts of the target's own at {sampling.temperature}")
    file.write_bytes(pickle.dumps(made))
    return made


def requests(
    decoder: Decoder, sampling: Sampling, count: int, tokens: int
) -> Iterator[DecodeRequest]:
    """Prompts of all categories in turn, of which every second is a module's beginning."""
    rows = [json.loads(line) for line in (PAIR / "texts.jsonl").read_text().splitlines()]
    long = [row for row in rows if row["category"] == "module"]
    short = [row for row in rows if row["category"] != "module"]
    for n in range(count):
        row = (long if n % 2 == 0 else short)[n // 2]
        ids = decoder.pair.encode(row["prompt"])
        yield decoder.request(Request(row["id"], row["category"], ""), ids, sampling, tokens)


def generated(pair: LoadedPair, request: DecodeRequest, **more: int) -> Trajectory:
    """What ``generate`` makes of a prompt, by transformers' own attention and cache; ``more``: of
    its arguments."""
    model, ids = pair.target.model, torch.tensor([request.prompt_ids])
    how = {"do_sample": False, "max_new_tokens": request.max_new_tokens, **more}
    model.set_attn_implementation("sdpa")
    try:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, ids.shape[1] :]
    finally:
        model.set_attn_implementation(attention.NAME)
    ended = int(out[-1]) in pair.eos_ids
    return Trajectory(
        request_id=request.id,
        category="",
        tokens=Tokens(np.asarray(request.prompt_ids, np.int32), out.numpy().astype(np.int32)),
        sampling=request.sampling,
        max_new_tokens=request.max_new_tokens,
        finish="eos" if ended else "length",
        verifier=request.verifier,
    )


def compared(pair: LoadedPair, trace: ReplayTrace, policy: Policy, seats: int) -> Figures:
    """A policy executed: texts that differ, and rounds of the others that replay had otherwise."""
    profile = flat_profile(pair.id, pair.drafts, pair.heads)
    replayed = run_replay(trace, policy, profile, per_round=True)
    plan = prepare_for(pair, policy, profile=profile)
    decoder = Decoder(pair, StaticSource(plan), seats=seats)
    asked = [
        decoder.request(
            Request(text.request_id, "", ""),
            text.prompt_ids.tolist(),
            text.sampling,
            text.max_new_tokens,
        )
        for text in trace.trajectories
    ]
    executed = {request.id: list[Round]() for request in asked}
    for rounds in decoder.steps(Waiting(asked)):
        for one in rounds:
            executed[one.request.id].append(one)
    window = pair.target.cache.window or 0
    figures = dict.fromkeys(
        ("texts", "texts_differ", "beyond_window", "rounds", "rounds_differ"), 0
    )
    for text, steps in zip(trace.trajectories, replayed.steps(), strict=True):
        own = executed[text.request_id]
        tokens = [token for one in own for token in one.tokens]
        differs = tokens != text.output_ids.tolist()
        figures["texts"] += 1
        figures["texts_differ"] += differs
        figures["beyond_window"] += len(text.prompt_ids) + len(tokens) > window
        if not differs:
            pairs = zip_longest((shape(one.step) for one in own), map(shape, steps))
            figures["rounds"] += len(steps)
            figures["rounds_differ"] += sum(ours != theirs for ours, theirs in pairs)
    return figures
