"""What only a GPU shows, in parts that end within 100 s each.

    python bench/run.py gpu [PART ...] [--seconds 90] [--out FILE.json]
    python bench/run.py gpu [PART ...] --device cpu --tiny

``ballast`` writes a pair at the cost of large models (:mod:`gpu.ballast`), which the others use.
``passes``: the target's captured passes beside the time to read its weights, and a draft's step.
``rounds``: policies executed, and decoding while a policy is published. ``generate``: transformers
on the same models and prompts. ``texts``: how many differ from autoregression's, in float64 and in
bfloat16, as many as ``--seconds`` allow. ``tune``: a whole tuning; stopped after ``--seconds``, it
goes on where it was when it is called again. ``attention`` and ``kernels``: ours beside torch's.

A part's figures are written as soon as it ends, to ``bench/results/gpu-DEVICE.json`` or ``--out``,
and printed as a table; one that breaks off leaves the others alone. ``--tiny`` proves that a part
runs, and stores nothing without ``--out``. What a bare machine lacks: ``bench/gpu/wheels.txt``.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pairs import fixed, top_k
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

from bench import ROOT
from bench.checks.rounding import plain_policies, texts_that_differ
from bench.gpu.ballast import LARGE, TINY, build
from bench.harness import keep, parser_of, result_file, say, timed
from bench.lab import GREEDY, requests
from bench.markdown import table_of
from spectune.optimizer.execute import DecodeOptions, Encoded, encode
from spectune.runtime.decoder import Decoded, Decoder, prepare_for
from spectune.runtime.hardware import hardware
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import PolicySource, StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.reload import Published, WatchedSource

Figures = dict[str, Any]
POLICIES: dict[str, Figures] = {
    "autoregression": {},
    "draft, gamma 4": {"draft": "small", "window": fixed(4)},
    "head, gamma 4": {"draft": "head", "window": fixed(4)},
    "prompt lookup, 8": {"draft": "ngram", "window": fixed(8)},
    "head, tree 8 wide, 4 levels, N 60": top_k("head", 8, 4, 60),
    "draft, the same tree": top_k("small", 8, 4, 60),
}


@dataclass(frozen=True)
class Bench:
    """Where parts run: the device, how large, how long, the folder of the ballasted pair, and the
    drafts that are loaded (None: all)."""

    device: str
    tiny: bool
    seconds: float
    folder: Path
    drafts: tuple[str, ...] | None = None

    @property
    def file(self) -> Path:
        """The ballasted pair's file, which is written unless it is there."""
        file = self.folder / "pair.json"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
            build(self.folder, TINY if self.tiny else LARGE, self.device, dtype)
            if self.device == "cuda":
                torch.cuda.empty_cache()
        return file

    @cached_property
    def pair(self) -> LoadedPair:
        return load_pair(read_pair(str(self.file)), device=self.device, drafts=self.drafts)

    @cached_property
    def encoded(self) -> Encoded:
        """The requests that policies and transformers decode, greedily."""
        count, tokens = (1, 4) if self.tiny else (6, 48)
        return encode(self.pair, requests(count, skip=60), DecodeOptions(GREEDY, tokens))

    def milliseconds(self, call: Callable[..., object], *args: Any) -> float:
        """Of a call with ``args``, launches included: the median of five means."""
        means, repeats = [], 1 if self.tiny else 20
        for n in range(2 if self.tiny else 6):
            self.wait()
            began = time.perf_counter()
            for _ in range(repeats):
                call(*args)
            self.wait()
            if n:  # the first warms up
                means.append(1e3 * (time.perf_counter() - began) / repeats)
        return statistics.median(means)

    def microseconds(self, call: Callable[..., object], *args: Any) -> float:
        """Of a call with ``args`` on the device alone, as in a captured pass and with what it reads
        in the device's cache: the median of many."""
        if self.device == "cpu":
            return 1e3 * self.milliseconds(call, *args)
        from triton.testing import do_bench_cudagraph

        return 1e3 * float(do_bench_cudagraph(lambda: call(*args), rep=20, return_mode="median"))

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def random(self, *shape: int) -> torch.Tensor:
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        return torch.randn(shape, device=self.device, dtype=dtype)


# ---------------------------------------------- what reaches inside the runtime: all of it is here


def captured_pass(
    bench: Bench, model: Any, tokens: int, cached: int, capacity: int
) -> Callable[[], object]:
    """A pass of ``tokens`` that follow ``cached`` ones in a cache of at least ``capacity`` slots,
    with the best token after each: captured where the device lets it."""
    from spectune.runtime.models import PassKind

    model.reserve(capacity)
    if model.graphs is not None:
        model.graphs.capture(tokens, PassKind("ids"))
    ids = torch.arange(cached + tokens, device=bench.device) % model.vocab_size
    model.read(ids[:cached], 0)
    return lambda: model.chain(ids[cached:], cached, logits=tokens, greedy=True)


def random_target(bench: Bench) -> Any:
    """A random Llama 3.1 8B, whose passes can be captured."""
    from spectune.runtime.cuda.graphs import CudaRecorder, use_graphs
    from spectune.runtime.models import CausalModel

    hidden, middle, vocab, layers, heads, groups = (
        (64, 128, 640, 2, 4, 2) if bench.tiny else (4096, 14336, 128256, 32, 32, 8)
    )
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=middle,
        vocab_size=vocab,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=1 << 17,
        dtype=bench.random(0).dtype,
    )
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = CausalModel(AutoModelForCausalLM.from_config(config, dtype=config.dtype), "random")
    if bench.device == "cuda":
        use_graphs([model], CudaRecorder())
    return model


def attention_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> Callable[[], object]:
    """The runtime's attention of ``query`` [1, heads, n, dim] over ``key``, ``value`` [1, groups,
    slots, dim] under ``mask`` bool [n, slots], which a pass makes ready once for all layers."""
    from spectune.runtime.attention import attend, layer_mask

    ready = layer_mask(mask, query.shape[1] // key.shape[1], key[0], value[0])
    return lambda: attend(query, key, value, ready)


def gathered_head(bench: Bench) -> Iterator[Figures]:
    """Logits of some tokens of the vocabulary, beside those of all."""
    from spectune.runtime.shortlists import OutputHead

    hidden, vocab = (64, 640) if bench.tiny else (4096, 128256)
    layer = torch.nn.Linear(hidden, vocab, False, bench.device, bench.random(0).dtype)
    head = OutputHead(layer)

    def in_torch(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(states, head.weight[ids])

    for count in (64,) if bench.tiny else (1024, 4096, 32768):
        ids = torch.randperm(vocab, device=bench.device)[:count].sort().values
        for n in (1,) if bench.tiny else (1, 8, 60):
            states = bench.random(n, hidden)
            exact = states.double() @ head.weight[ids].double().T
            yield {
                "kernel": f"gathered head, {count} of {vocab} tokens, {n} states",
                "ours us": bench.microseconds(head.logits, states, ids),
                "torch us": bench.microseconds(in_torch, states, ids),
                "error": float((head.logits(states, ids) - exact).norm() / exact.norm()),
            }


def noise(bench: Bench) -> Iterator[Figures]:
    """The best token under Gumbel noise, beside noise that is stored and added."""
    from spectune.runtime.cuda import launch
    from spectune.runtime.cuda.noise import best
    from spectune.runtime.sampling import Noise, gumbel, keys_tensor

    vocab, device = 640 if bench.tiny else 128256, torch.device(bench.device)
    tokens = torch.arange(vocab, device=device)

    def in_torch(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (scores + gumbel(keys, tokens)).argmax(-1)

    kernel = best if launch.kernels_run(device) else in_torch
    for n in (1,) if bench.tiny else (1, 8, 61):
        scores = torch.randn(n, vocab, device=device)
        keys = keys_tensor(Noise(1, vocab, device).keys(range(n)), device)
        ours, theirs = kernel(scores, keys), in_torch(scores, keys)
        yield {
            "kernel": f"best of {vocab} tokens under noise, {n} states",
            "ours us": bench.microseconds(kernel, scores, keys),
            "torch us": bench.microseconds(in_torch, scores, keys),
            "error": float((ours != theirs).double().mean()),
        }


def between_products(bench: Bench) -> Iterator[Figures]:
    """What a fused layer does between products, beside plain torch: rotary and the write to the
    cache, residual and norm."""
    from spectune.runtime import fused
    from spectune.runtime.cuda import launch, layers

    kernels: Any = layers if launch.kernels_run(torch.device(bench.device)) else fused
    heads, groups, dim = (4, 2, 16) if bench.tiny else (32, 8, 128)
    cache, norm = bench.random(2, groups, 1024, dim), (bench.random(heads * dim), 1e-5)
    for n in (1,) if bench.tiny else (1, 8, 61):
        states, rotary = bench.random(n, (heads + 2 * groups) * dim), bench.random(2, n, dim)
        x, residual = bench.random(2, n, heads * dim)
        slots = torch.arange(n, device=bench.device)
        for name, given in (
            ("rotate_and_write", (states, tuple(rotary), slots, *cache, heads)),
            ("add_norm", (x, residual, norm)),
        ):
            ours, plain = getattr(kernels, name), getattr(fused, name)
            one, other = (f(*given) for f in (ours, plain))
            one, other = (x[0] if isinstance(x, tuple) else x for x in (one, other))
            yield {
                "kernel": f"{name}, {n} tokens",
                "ours us": bench.microseconds(ours, *given),
                "torch us": bench.microseconds(plain, *given),
                "error": float((one - other).double().norm() / other.double().norm()),
            }


def products(bench: Bench) -> Iterator[Figures]:
    """Products of few rows, alone and with a norm taken in, beside the library's: what
    ``SPECTUNE_SKINNY`` turns on is to take 3% longer at most."""
    from spectune.runtime import fused
    from spectune.runtime.cuda import launch, layers
    from spectune.runtime.cuda.skinny import skinny

    runs = launch.kernels_run(torch.device(bench.device))
    add_norm = layers.add_norm if runs else fused.add_norm

    def library(x: torch.Tensor, weight: torch.Tensor, norm: Any) -> torch.Tensor:
        return F.linear(x if norm is None else add_norm(x, None, norm)[0], weight)

    def skinny_product(x: torch.Tensor, weight: torch.Tensor, norm: Any) -> torch.Tensor:
        return skinny(x, (weight, None), norm=norm)

    ours = skinny_product if runs else library
    for columns, size in ((640, 64),) if bench.tiny else ((28672, 4096), (4096, 14336)):
        weight, norm = bench.random(columns, size), (bench.random(size), 1e-5)
        for n in (1,) if bench.tiny else (1, 8, 61):
            x = bench.random(n, size)
            for name, by in (("product", None), ("product of a norm", norm)):
                wide = x.double() if by is None else fused.rms_norm(x, norm).double()
                exact = wide @ weight.double().T
                yield {
                    "kernel": f"{name}, {size} to {columns}, {n} tokens",
                    "ours us": bench.microseconds(ours, x, weight, by),
                    "torch us": bench.microseconds(library, x, weight, by),
                    "error": float((ours(x, weight, by) - exact).norm() / exact.norm()),
                }


KERNELS = (gathered_head, noise, between_products, products)


# ------------------------------------------------------------------------------------------- parts


def ballast(bench: Bench) -> Figures:
    """The pair on disk, and in memory."""
    began = time.perf_counter()
    size = sum(part.stat().st_size for part in bench.file.parent.rglob("*.safetensors"))
    built_s = time.perf_counter() - began
    drafts = ", ".join(bench.pair.models)
    loaded_s = time.perf_counter() - began - built_s
    row = {"GB": size / 1e9, "drafts": drafts, "built s": built_s, "loaded s": loaded_s}
    return {"rows": [row]}


def passes(bench: Bench) -> Figures:
    """Milliseconds of a captured pass of a random Llama 3.1 8B with 512 tokens in the cache, and
    the part of it that copying as many bytes as its weights have takes; a step of the 0.1B draft
    and a level of the head's tree, by what a longer window adds to a round."""
    size = 1 << (20 if bench.tiny else 30)
    buffer = torch.zeros(2, size, dtype=torch.uint8, device=bench.device)
    gb_per_s = 2 * size / bench.milliseconds(buffer[0].copy_, buffer[1]) / 1e6
    del buffer
    model = random_target(bench)
    embedding = model.model.get_input_embeddings().weight
    read = sum(p.nbytes for p in model.model.parameters()) - embedding.nbytes
    limit_ms, cached = read / gb_per_s / 1e6, 64 if bench.tiny else 512
    rows = []
    for n in (1, 8) if bench.tiny else (1, 8, 32, 64):
        ms = bench.milliseconds(captured_pass(bench, model, n, cached, 2 * cached))
        rows.append({"what": f"pass, tokens: {n}", "ms": ms, "of the limit": limit_ms / ms})
    del model
    for what, policy in (
        ("draft's step", lambda g: {"draft": "small", "window": fixed(g)}),
        ("level of the head's tree", lambda g: top_k("head", 8, g, 60)),
    ):
        few, many = (1, 2) if bench.tiny else (2, 6)
        short, long = (executed(bench, policy(g))["draft ms"] for g in (few, many))
        rows.append({"what": what, "ms": (long - short) / (many - few), "of the limit": None})
    return {"copy_gb_per_s": gb_per_s, "read_gb": read / 1e9, "limit_ms": limit_ms, "rows": rows}


def rounds(bench: Bench) -> Figures:
    """Rounds of the ballasted pair's policies in the median, what of them is neither draft nor
    verification, and tokens a second, prompts included; and decoding while a tree is published."""
    rows = []
    for name, document in POLICIES.items():
        rows.append({"policy": name, **executed(bench, document)})
        say(rows[-1])
    return {"rows": rows, "publication": published(bench)}


def executed(bench: Bench, document: Figures) -> Figures:
    """A policy's rounds on all requests."""
    source = StaticSource(prepare_for(bench.pair, parse_policy(document)))
    decoded = decode(bench, source)
    steps = [step for d in decoded for step in d.steps]

    def median_ms(of: Callable[[Any], float]) -> float:
        return 1e3 * statistics.median(map(of, steps))

    return {
        "draft ms": median_ms(lambda s: s.draft_s),
        "verify ms": median_ms(lambda s: s.verify_s),
        "rest ms": median_ms(lambda s: s.round_s - s.draft_s - s.verify_s),
        "round ms": median_ms(lambda s: s.round_s),
        "tau": sum(s.emitted for s in steps) / len(steps),
        "tokens/s": sum(s.emitted for s in steps) / sum(d.seconds for d in decoded),
    }


def decode(bench: Bench, source: PolicySource) -> list[Decoded]:
    """The requests under a policy, the first of them once before, to warm up."""
    bench.pair.reserve(bench.encoded.longest)
    decoder = Decoder(bench.pair, source)
    first, *_ = items = [request for _, request in bench.encoded.items]
    decoder.decode(first)
    return [decoder.decode(request) for request in items]


def published(bench: Bench) -> Figures:
    """What a publication costs a decoder: rounds of autoregression that were decoded while a tree
    was prepared aside, and how many rounds' time was lost among them."""
    pair, seconds = bench.pair, list[float]()
    plain, tree = prepare_for(pair, parse_policy({})), parse_policy(top_k("head", 8, 6, 120))
    decode(bench, StaticSource(plain))  # warms up

    def prepare(policy: Any, version: int) -> Any:
        return prepare_for(pair, policy, version=version)

    def fetch() -> Published | None:
        return Published(1, tree) if len(seconds) > 3 else None

    source = WatchedSource(plain, fetch, prepare, lambda *_: None, interval_s=0.05)
    decoder = Decoder(pair, source)
    with source:
        while source.current() is plain:
            for _, request in bench.encoded.items:
                seconds += (
                    item.step.round_s
                    for item in decoder.rounds(request)
                    if item.step.policy == plain.policy_id
                )
    median = statistics.median(seconds)
    lost = sum(s / median - 1 for s in seconds if s > 1.5 * median)
    row = {"rounds": len(seconds), "median ms": 1e3 * median, "slowest ms": 1e3 * max(seconds)}
    return {**row, "rounds lost": lost}


STATIC = {"cache_implementation": "static"}
"""How transformers compiles its passes."""


def in_transformers(bench: Bench, path: str) -> Any:
    dtype = bench.pair.target.dtype
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(bench.device)


def generated(bench: Bench, target: Any, texts: Sequence[list[int]], **how: Any) -> Figures:
    """Tokens a second of transformers' ``generate`` on the first of the bench's requests, whose
    ``texts`` are ours, and how many differ from these; the first request is decoded once before, as
    that compiles."""
    differ, tokens, seconds = 0, 0, list[float]()
    items = bench.encoded.items[: len(texts)]
    for _, request in (items[0], *items):
        ids = torch.tensor([request.prompt_ids], device=bench.device)
        bench.wait()
        began = time.perf_counter()
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            pad_token_id=0,
            **how,
        )[0, ids.shape[1] :].tolist()
        seconds.append(time.perf_counter() - began)
        if len(seconds) > 1:
            tokens, differ = tokens + len(out), differ + (out != texts[len(seconds) - 2])
    return {"tokens/s": tokens / sum(seconds[1:]), "first s": seconds[0], "differ": differ}


def generate(bench: Bench) -> Figures:
    """Tokens a second of transformers on the ballasted target and draft and the same prompts, and
    the texts that differ from our autoregression's (in bfloat16 some may)."""
    pair = bench.pair
    ours = decode(bench, StaticSource(prepare_for(pair, parse_policy({}))))
    texts = [d.trajectory.output_ids.tolist() for d in ours]
    speed = sum(map(len, texts)) / sum(d.seconds for d in ours)
    rows = [{"what": "autoregression, ours", "tokens/s": speed, "first s": None, "differ": 0}]
    target, draft = (
        in_transformers(bench, path) for path in (pair.spec.target, dict(pair.spec.drafts)["small"])
    )
    for what, count, how in (
        ("transformers, eager", 2, {}),
        ("transformers, assisted by the draft", 2, {"assistant_model": draft}),
        ("transformers, static cache, compiled", 6, STATIC),
    ):
        rows.append({"what": what, **generated(bench, target, texts[:count], **how)})
        say(rows[-1])
    return {"rows": rows, "ours_over_compiled": speed / float(rows[-1]["tokens/s"])}


def texts(bench: Bench) -> Figures:
    """Texts of the demo pair in float64, of which none may differ, and of the ballasted pair in
    bfloat16, as many as there was time for: two requests under chains and trees of every draft in
    turn, at three temperatures."""
    rows = []
    exact = load_pair(read_pair("demo"), device=bench.device, dtype="float64")
    for pair, dtype in ((exact, "float64"), (bench.pair, str(bench.pair.target.dtype)[6:])):
        workload = requests(1 if bench.tiny else 2, skip=60)
        policies = plain_policies(pair, 1 if bench.tiny else 8)
        policies = policies[:1] if bench.tiny else policies[::3] + policies[1::3] + policies[2::3]
        how = {"seconds": 0.4 * bench.seconds}
        found = list(texts_that_differ(pair, policies, workload, 4 if bench.tiny else 24, **how))
        row = {"dtype": dtype, "policies": len({row["policy"] for row in found})}
        rows.append(row | {k: sum(r[k] for r in found) for k in ("texts", "differ", "again")})
        say(rows[-1])
    return {"rows": rows, "holds": rows[0]["differ"] == 0}


KEPT = (
    *("winner", "ratio_to_incumbent", "confirmed", "confirm_requests", "search_requests"),
    *("test_requests", "trials", "texts", "prediction", "reason", "seconds"),
)
CANDIDATE = (
    *("role", "label", "predicted_tokens_per_s", "predicted_after_factor_tokens_per_s"),
    *("measured_tokens_per_s", "measured_interval", "mean_accepted_length"),
    *("ratio_to_autoregressive", "ratio_to_autoregressive_interval", "executed_requests"),
)
"""Of a tuning's results, and of its candidates."""


def tune(bench: Bench) -> Figures:
    """A whole tuning as a user types it, and how far its predictions were off."""
    database = bench.folder / "tune.db"
    wall_s, tuned = tuning(bench, database, bench.seconds)
    if tuned is None:
        return {"rows": [{"wall s": wall_s, "ended": "call again to go on"}]}
    for file in database.parent.glob(f"{database.name}*"):
        file.unlink()
    return {
        "models": "tiny models" if bench.tiny else "8B, with a draft of 0.1B and an EAGLE-3 head",
        "command": asked_tuning(bench).replace(str(bench.file), "ballast/pair.json"),
        "wall_s": wall_s,
        **tuned_figures(tuned),
    }


def asked_tuning(bench: Bench) -> str:
    """The tuning's command line."""
    size = "--limit 36 --max-new-tokens 48 --budget 60s --set search.trials=200"
    if bench.tiny:
        size = "--limit 18 --max-new-tokens 12 --budget 4s --set search.trials=50"
    return f"tune --pair {bench.file} --set device={bench.device} {size}"


def tuning(bench: Bench, database: Path, limit_s: float) -> tuple[float, Figures | None]:
    """A tuning's seconds and its JSON; None where it was stopped after ``limit_s``: what is in the
    database stays, and the next one goes on with it."""
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "cli.py"), "--db", str(database)]
    command += [*asked_tuning(bench).split(), "--json", "--set", "report=none"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        out, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        child.communicate()
        return time.perf_counter() - began, None
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return time.perf_counter() - began, json.loads(out)


def tuned_figures(tuned: Figures) -> Figures:
    """What is kept of a tuning's JSON, and its candidates as rows."""
    unique = {c["id"]: c for c in tuned["candidates"]}
    candidates = [{key: c[key] for key in CANDIDATE} for c in unique.values()]
    shown = ("role", "label", *CANDIDATE[2:5], "mean_accepted_length", "ratio_to_autoregressive")
    return {
        "tuned": {**{key: tuned[key] for key in KEPT}, "candidates": candidates},
        "rows": [{key: c[key] for key in shown} for c in candidates],
    }


def attention(bench: Bench) -> Figures:
    """Microseconds of attention with a mask, 32 heads of 128 over 8 key-value heads, ours beside
    torch's kernels; and a pass with 512 cached tokens in a cache of 32k slots beside 1k."""
    heads, groups, dim = (4, 2, 16) if bench.tiny else (32, 8, 128)
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    if bench.device == "cpu":
        backends = {"math": SDPBackend.MATH}
    rows, sdpa = [], F.scaled_dot_product_attention
    for slots in (64,) if bench.tiny else (512, 1024, 4096):
        key, value = (bench.random(1, groups, slots, dim) for _ in "kv")
        for n in (1,) if bench.tiny else (1, 8, 61):
            query = bench.random(1, heads, n, dim)
            mask = torch.ones(n, slots, dtype=torch.bool, device=bench.device).tril(slots - n)
            q, folded = query.reshape(1, groups, -1, dim), mask.repeat(heads // groups, 1)
            row: Figures = {"cached tokens": slots, "queries": n}
            row["ours us"] = bench.microseconds(attention_of(query, key, value, mask))
            for name, backend in backends.items():
                row[f"{name} us"] = None
                with sdpa_kernel(backend), suppress(RuntimeError):  # not of these shapes
                    row[f"{name} us"] = bench.microseconds(sdpa, q, key, value, folded)
            rows.append(row)
    cached, large = (16, 512) if bench.tiny else (512, 32768)
    model = random_target(bench)
    small_ms, large_ms = (
        bench.milliseconds(captured_pass(bench, model, 1, cached, capacity))
        for capacity in (2 * cached, large)
    )
    sizes = {f"pass in {2 * cached} slots ms": small_ms, f"pass in {large} slots ms": large_ms}
    return {"rows": rows, "cache": {**sizes, "ratio": large_ms / small_ms}}


@torch.no_grad()
def kernels(bench: Bench) -> Figures:
    """Microseconds of kernels of ours beside torch's way to do it, and how far they are from
    float64's as a part of the result's length."""
    return {"rows": [row for kernel in KERNELS for row in kernel(bench)]}


PARTS = (ballast, passes, rounds, generate, texts, tune, attention, kernels)


def rows_table(figures: Figures) -> list[str]:
    """Lines of a part: its rows, and what it says beside them."""
    beside, rows = [], figures["rows"]
    for name, value in figures.items():
        if isinstance(value, float):
            beside.append(f"{name.replace('_', ' ')} {value:.4g}")
        elif name in ("publication", "cache"):
            beside += [f"{key} {each:.4g}" for key, each in value.items()]
    return [figures["about"], "", *table_of(rows), *(["; ".join(beside), ""] if beside else [])]


def main(arguments: Sequence[str]) -> int:
    parts = {part.__name__: part for part in PARTS}
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)} (default: all)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true")
    add("--seconds", type=float, default=90.0, help="that texts and tune may take")
    add("--folder", type=Path, help="of the ballasted pair", metavar="FOLDER")
    add("--out", type=Path, metavar="FILE.json")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.parts) - parts.keys():
        parser.error(f"no part {min(unknown)}; there are {', '.join(parts)}")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch sees no CUDA device; --device cpu --tiny proves that parts run")
    torch.set_num_threads(1)
    folder = asked.folder or ROOT / ".acceptance" / ("ballast-tiny" if asked.tiny else "ballast")
    bench, on = Bench(asked.device, asked.tiny, asked.seconds, folder), hardware(asked.device)
    file = asked.out
    if file is None and not asked.tiny:
        slug = re.sub("[^a-z0-9]+", "-", on.lower()).strip("-")
        file = result_file(f"gpu-{slug}")
    failed = 0
    for part in asked.parts or parts:
        try:
            measured, made = timed(lambda part=part: parts[part](bench))
        except Exception:  # the other parts may still be had
            traceback.print_exc()
            failed = 1
            continue
        about = " ".join((parts[part].__doc__ or "").split())
        figures = {"on": on, "about": about, **measured, **made}
        print(f"\n{part}: {figures['seconds']:.0f} s\n", *rows_table(figures), sep="\n", flush=True)
        if file is not None:
            keep(file, (json.loads(file.read_text()) if file.exists() else {}) | {part: figures})
    return failed
