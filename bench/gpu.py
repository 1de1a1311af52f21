"""What only a GPU shows.

    python bench/gpu.py [--only texts passes shortlists tune] [--quick]

``texts``: texts and replayed rounds of the demo pair, which in float64 must not depend on the
policy, and how often bfloat16 parts them. ``passes``: milliseconds of a round, eager and by
captured passes in turn. ``shortlists``: the Triton kernel beside a library's products. ``tune``: a
whole tuning of a pair at the cost of large models (:mod:`ballast`).

``--quick`` is a tiny size that proves that it runs, also without a GPU. Figures go to
``bench/results/gpu.json``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lab
import numpy as np
import torch
from ballast import LARGE, TINY, build
from lab import GREEDY, ROOT, SAMPLED, fixed, laboratory, requests, run_parts, say, top_k
from lossless import texts_differ
from parity import claimed, compared
from transformers import LlamaConfig, LlamaForCausalLM

from spectune.optimizer.execute import DecodeOptions, encode
from spectune.runtime.cuda.graphs import CudaRecorder, prepare_graphs, use_graphs
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.hardware import hardware, sees_cuda
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, StaticSource
from spectune.runtime.models import CausalModel, Outputs
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.artifacts import Fitted
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.shortlists import OutputHead
from spectune.traces.schema import Sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
CONTEXT, NEW_TOKENS, REQUESTS = 512, 64, 3
VOCAB = 128256
BINS = Fitted("bins", {"thresholds": [60, 120, 180, 240, 300], "depth": 5, "draft": "draft"}, {})
TREE = top_k("draft", 8, 5, 60)
STRATIFIED = {"artifact": "bins", "alpha": 3, "fractions": [0.3, 0.6, 1.0]}
POLICIES: dict[str, dict[str, Any]] = {
    "autoregressive": {"draft": "none"},
    "chain, gamma 4": {"draft": "draft", "window": fixed(4)},
    "EAGLE-2, N 60": TREE,
    "HeteroSpec, N 60": {**TREE, "stratify": STRATIFIED},
}


# ------------------------------------------------------------------------------------------ texts


def texts(quick: bool = False) -> dict[str, Any]:
    """Rounds that differ from replay, and texts from autoregression's: in float64 none may.
    ``largest_gap``: how far apart the two tokens were, in nats, where a text parts first."""
    dtypes = ("float64",) if DEVICE.type == "cpu" else ("float64", "bfloat16")
    cases = [(dtype, turn) for dtype in dtypes for turn in range(2)]
    with ProcessPoolExecutor(min(len(cases), os.cpu_count() or 1), get_context("spawn")) as pool:
        made = list(pool.map(partial(_texts, quick), *zip(*cases, strict=True)))
    return {
        "found_without_torch": sees_cuda() == torch.cuda.is_available(),
        "runs": made,
        "holds": not any(m["texts_differ"] + m["rounds_differ"] for m in made[:2]),
    }


def _texts(quick: bool, dtype: str, turn: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    lab.ON.update(device=DEVICE.type)
    sampling, each = (GREEDY, SAMPLED)[turn], 1 if quick else 2
    with tempfile.TemporaryDirectory() as folder:
        one = laboratory(Path(folder), "demo", sampling, True, dtype)
        options = DecodeOptions(sampling, 8 if quick else 24)
        asked = encode(one.pair, requests(2 if quick else 6, skip=60), options)
        rows, trace = texts_differ(one, asked, turn, each), one.trace()
        rounds = [compared(one, trace, p, 6, exact=True) for p in claimed(one, turn, each)]
    graphs = [m.graphs for m in (one.pair.target, *one.pair.models.values()) if m.graphs]
    return {
        "dtype": dtype,
        "temperature": sampling.temperature,
        "policies": len(rows),
        "texts": sum(r["prompts"] for r in rows),
        "texts_differ": sum(r["differ"] for r in rows),
        "largest_gap": max(r["gap"] for r in rows),
        "rounds": sum(r["rounds"] for r in rounds),
        "rounds_differ": sum(r["mismatches"] for r in rounds),
        "passes_replayed": sum(sum(g.replayed.values()) for g in graphs),
        "passes_eager": sum(sum(g.eager.values()) for g in graphs),
        "problems": [g.problem for g in graphs if g.problem],
    }


# ----------------------------------------------------------------------------------------- passes


class Repeating:
    """In a recorder's place where there is no CUDA: a replay runs the pass again."""

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        outputs = compute()

        def replay() -> None:
            for old, new in zip(outputs, compute(), strict=True):
                old.copy_(new)

        return replay, outputs


@contextmanager
def replaying(models: Sequence[CausalModel], replayed: bool) -> Iterator[None]:
    """Takes the graphs away meanwhile, unless ``replayed``."""
    kept = [model.graphs for model in models]
    for model in models if not replayed else ():
        model.graphs = None
    yield
    for model, graphs in zip(models, kept, strict=True):
        model.graphs = graphs


def random_model(name: str, hidden: int, layers: int, vocab: int) -> CausalModel:
    """Of Llama's architecture, whose passes can be captured."""
    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=CONTEXT + 1024,
    )
    with DEVICE:
        model = LlamaForCausalLM(config).to(DTYPE)
    with torch.no_grad():  # so that distributions are neither flat nor certain
        model.get_output_embeddings().weight.mul_(8.0)
    made = CausalModel(model, name)
    use_graphs([made], CudaRecorder() if DEVICE.type == "cuda" else Repeating())
    return made


@torch.no_grad()
def passes(quick: bool = False) -> list[dict[str, Any]]:
    """A row for each policy and temperature, by a target of a billion random parameters or so and
    a draft of a few layers; ``largest_gap``: how far apart the target's two best were, in nats,
    where a text parts first; ``problem``: why a pass could not be captured."""
    hidden, layers, few, vocab = (64, 2, 1, 320) if quick else (2048, 16, 2, VOCAB)
    target = random_model("target", hidden, layers, vocab)
    drafts = {"draft": random_model("draft", hidden, few, vocab)}
    spec = PairSpec("gpu", "random", (("draft", "random"),))
    pair = LoadedPair(spec, target, drafts, None, frozenset())
    pair.reserve(CONTEXT + NEW_TOKENS + 1)
    rows = []
    for name, document in POLICIES.items():
        began = time.perf_counter()
        prepared = prepare_for(pair, parse_policy(document), artifacts=lambda _: BINS)
        for greedy in (True, False):
            prepare_graphs(pair, prepared, greedy=greedy)
        row = {"policy": name, "capture_s": time.perf_counter() - began}
        decoder = Decoder(pair, StaticSource(prepared))
        for sampling in (GREEDY, Sampling(1.0, seed=1)):
            rows.append(row | _rounds(decoder, sampling, vocab))
            say(rows[-1])
    return rows


def _rounds(decoder: Decoder, sampling: Sampling, vocab: int) -> dict[str, Any]:
    pair, taken = decoder.pair, dict[bool, list[float]]({False: [], True: []})
    gaps: list[float] = []
    for n in range(REQUESTS + 1):
        prompt = np.random.default_rng(n).integers(vocab, size=CONTEXT).tolist()
        request = DecodeRequest(str(n), prompt, sampling, n + 1, NEW_TOKENS)
        made = {}
        for replayed in (False, True):
            with replaying([pair.target, pair.drafts["draft"]], replayed):
                made[replayed] = decoder.decode(request)
            if n:  # the first request warms up
                taken[replayed] += [step.round_s for step in made[replayed].steps]
        ids = (made[r].trajectory.output_ids.tolist() for r in (False, True))
        gaps += [gap] if (gap := lab.gap_of(pair, request, *ids)) is not None else []
    eager, graph = (1e3 * statistics.median(taken[replayed]) for replayed in (False, True))
    row = {"temperature": sampling.temperature, "eager_ms": eager, "graph_ms": graph}
    row |= {"speedup": eager / graph, "texts": REQUESTS + 1, "differ": len(gaps)}
    problem = pair.target.graphs.problem if pair.target.graphs else ""
    return {**row, "largest_gap": max(gaps, default=0.0), "problem": problem}


# ------------------------------------------------------------------------------------- shortlists


def milliseconds(run: Callable[[], object]) -> float:
    """The median of many launches."""
    if DEVICE.type == "cpu":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    from triton.testing import do_bench

    return float(do_bench(run, warmup=10, rep=50, return_mode="median"))


@torch.no_grad()
def shortlists(quick: bool = False) -> list[dict[str, Any]]:
    """Milliseconds of a gathered head's products; ``away``: the kernel's distance from float64's as
    a part of its length."""
    rows = []
    for hidden in (64,) if quick else (2048, 4096):
        vocab = 640 if quick else VOCAB
        layer = torch.nn.Linear(hidden, vocab, bias=False, device=DEVICE, dtype=DTYPE)
        for count in (64, 128) if quick else (1024, 4096, 16384, 32768, 60000):
            for n in (1, 8) if quick else (1, 8, 60):
                rows.append(_products(OutputHead(layer), count, n))
                say(rows[-1])
    return rows


def _products(head: OutputHead, count: int, n: int) -> dict[str, Any]:
    """Of ``n`` hidden states with ``count`` tokens, spread over the vocabulary."""
    weight, linear = head.weight, torch.nn.functional.linear
    vocab, hidden = weight.shape
    ids = torch.randperm(vocab, device=DEVICE)[:count].sort().values
    states = torch.randn(n, hidden, device=DEVICE, dtype=DTYPE)
    exact = states.double() @ weight[ids].double().T
    return {
        "hidden": hidden,
        "tokens": count,
        "states": n,
        "kernel": head.fused,
        "away": float((head.logits(states, ids) - exact).norm() / exact.norm()),
        "over_ms": milliseconds(lambda: head.logits(states, ids)),
        "gather_ms": milliseconds(lambda: linear(states, weight.index_select(0, ids))),
        "full_ms": milliseconds(lambda: linear(states, weight)),
    }


# ------------------------------------------------------------------------------------------- tune


KEPT = (
    "winner",
    "ratio_to_incumbent",
    "confirmed",
    "confirm_requests",
    "search_requests",
    "test_requests",
    "trials",
    "texts",
    "prediction",
    "reason",
    "seconds",
)
"""Of a tuning's results."""


def tune(quick: bool = False) -> dict[str, Any]:
    """A whole tuning as a user types it, and how far its predictions were off."""
    folder = Path(os.environ.get("SPECTUNE_BALLAST") or tempfile.mkdtemp(prefix="ballast-"))
    file, began = folder / "pair.json", time.perf_counter()
    if not file.exists():
        build(folder, TINY if quick else LARGE, DEVICE.type, DTYPE)
    say(f"built in {time.perf_counter() - began:.0f} s")
    torch.cuda.empty_cache()
    size = "--limit 36 --max-new-tokens 48 --budget 60s --trials 200"
    if quick:
        size = "--limit 18 --max-new-tokens 12 --budget 4s --trials 50"
    asked = f"tune --pair {file} --device {DEVICE.type} {size}"
    where = [str(ROOT / "cli.py"), "--db", str(folder / "gpu.db")]
    more = ["--json", "--fresh", "--report", "none"]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *where, *asked.split(), *more],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    wall_s, tuned = time.perf_counter() - began, json.loads(done.stdout)
    unique = {c["id"]: c for c in tuned["candidates"]}
    kept = ("role", "label", "predicted_tokens_per_s", "predicted_after_factor_tokens_per_s",
            "measured_tokens_per_s", "measured_interval", "mean_accepted_length",
            "ratio_to_autoregressive", "ratio_to_autoregressive_interval",
            "executed_requests")  # fmt: skip
    candidates = [{key: c[key] for key in kept} for c in unique.values()]
    return {
        "on": hardware(DEVICE.type),
        "models": "tiny models" if quick else "8B, with a draft of 0.1B and an EAGLE-3 head",
        "command": asked.replace(str(file), "ballast/pair.json"),
        "wall_s": wall_s,
        "tuned": {**{key: tuned[key] for key in KEPT}, "candidates": candidates},
    }


PARTS = {"texts": texts, "passes": passes, "shortlists": shortlists, "tune": tune}

if __name__ == "__main__":
    torch.set_num_threads(1)
    run_parts(__doc__, "gpu", PARTS, lambda: {"device": hardware(DEVICE.type)}, quick=False)
