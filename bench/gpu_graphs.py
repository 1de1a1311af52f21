"""What captured passes save: verification by number of tokens, and whole rounds, with CUDA graphs and without.

    python bench/gpu_graphs.py [--layers 16] [--hidden 2048] [--context 512] [--repeats 30] [--json]
    [--out bench/results/gpu_graphs.json]
    python bench/gpu_graphs.py --device cpu --fake    (its logic alone, at a tiny size: no figure of it means anything)

A random target of Llama's architecture and a draft of a few of such layers, in bfloat16 on CUDA. Eager and replayed calls take turns, so
that slow moments hit both alike.

- verify: milliseconds (medians) of a chain of n tokens with logits behind ``--context`` tokens, for every rung of
  ``runtime.cuda.graphs.RUNGS``, host and device together; ``apart`` is the largest difference of the logits, ``argmax`` the share of rows
  with the same best token.
- rounds: milliseconds of a decoding round (medians over requests) under policies of each kind, and what capturing their passes took.
  Texts are compared token by token. In bfloat16 shapes differ in their last bits, so the first difference may be a near tie; ``gap`` is
  how far apart the target's two best tokens were there (nats, by the canonical pass), and must be small.

Exit code 1 if a difference is more than rounding explains.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from spectune.runtime.cuda.graphs import RUNGS, CudaRecorder, Kind, use_graphs
from spectune.runtime.cuda.pass_sizes import prepare_graphs
from spectune.runtime.decoder import Decoded, Decoder, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, StaticSource
from spectune.runtime.models import DTYPES, CausalModel, pick_device, pick_dtype
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.artifacts import Fitted
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.sampling import Noise, scaled
from spectune.traces.errors import SpectuneError
from spectune.traces.schema import Sampling
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
TINY = {"layers": 2, "draft_layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 320, "context": 48}
TREE = {"draft": "draft", "growth": {"kind": "top_k", "width": 8}, "window": {"kind": "fixed", "gamma": 5}, "select": {"top_n": 60}}
POLICIES: dict[str, dict[str, Any]] = {
    "autoregressive": {"draft": "none"},
    "chain, gamma 4": {"draft": "draft", "window": {"kind": "fixed", "gamma": 4}},
    "EAGLE-2, N 60": TREE,
    "HeteroSpec, N 60": {**TREE, "stratify": {"artifact": "bins", "alpha": 3, "fractions": [0.3, 0.6, 1.0]}},
}
TOLERANCE = {torch.float32: 2e-4, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Nats by which rounding may part passes of different shapes."""


class Repeating:
    """In a recorder's place where there is no CUDA: a replay runs the pass again."""

    def capture(self, run: Callable[[], None], rehearse: Callable[[], None]) -> Callable[[], None]:
        rehearse()
        return run


@contextmanager
def eagerly(pair: LoadedPair, replayed: bool) -> Iterator[None]:
    """Takes the graphs away meanwhile, unless ``replayed``."""
    models = [pair.target, *pair.drafts.values()]
    kept = [model.graphs for model in models]
    if not replayed:
        for model in models:
            model.graphs = None
    yield
    for model, graphs in zip(models, kept, strict=True):
        model.graphs = graphs


@dataclass
class Bench:
    """The pair under the clock."""

    wanted: argparse.Namespace
    device: torch.device
    dtype: torch.dtype
    pair: LoadedPair = field(init=False)

    def __post_init__(self) -> None:
        target, draft = (self._model(layers, seed) for seed, layers in enumerate((self.wanted.layers, self.wanted.draft_layers)))
        spec = PairSpec("gpu_graphs", "random", (("draft", "random"),))
        self.pair = LoadedPair(spec, target, {"draft": draft}, None, frozenset())
        draft.name = "draft"
        use_graphs((self.pair.target, *self.pair.models.values()), Repeating() if self.wanted.fake else CudaRecorder())
        text = self.wanted.context + max(self.wanted.new_tokens, self.wanted.most) + 1
        prepare_graphs(self.pair, prepare(AUTOREGRESSIVE, self.pair.draft_names), Sampling(), text)

    def _model(self, layers: int, seed: int) -> CausalModel:
        w = self.wanted
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=w.vocab,
            hidden_size=w.hidden,
            intermediate_size=w.intermediate or 4 * w.hidden,
            num_hidden_layers=layers,
            num_attention_heads=w.heads,
            num_key_value_heads=w.kv_heads,
            max_position_embeddings=w.context + 1024,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        with self.device:
            model = LlamaForCausalLM(config)
        torch.set_default_dtype(before)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(8.0)  # so that laws are neither flat nor certain
        return CausalModel(model, "target", f"random {seed}")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        self.wait()
        began = time.perf_counter()
        out = call()
        self.wait()
        return time.perf_counter() - began, out

    def tokens(self, count: int, seed: int) -> torch.Tensor:
        return torch.randint(self.wanted.vocab, (count,), generator=torch.Generator().manual_seed(seed)).to(self.device)

    def verification(self) -> list[dict[str, Any]]:
        """A row for every rung."""
        target, context = self.pair.target, self.wanted.context
        rungs = [r for r in RUNGS if r <= self.wanted.most]
        assert target.graphs is not None
        seconds, _ = self.timed(lambda: target.graphs.capture({Kind(): rungs}, 0))  # type: ignore[union-attr]
        print(f"{len(target.graphs.shapes)} passes captured in {seconds:.2f} s", file=sys.stderr)
        if target.graphs.problem:
            raise SystemExit(f"error: nothing could be captured: {target.graphs.problem}")
        target.read(self.tokens(context, 0), 0)
        rows = []
        for n in rungs:
            ids = self.tokens(n, n)
            taken: dict[bool, list[float]] = {False: [], True: []}
            logits: dict[bool, torch.Tensor] = {}
            for repeat in range(self.wanted.repeats + 2):
                for replayed in (False, True):
                    with eagerly(self.pair, replayed):
                        s, logits[replayed] = self.timed(lambda ids=ids, n=n: target.chain(ids, context, logits=n))
                    if repeat > 1:
                        taken[replayed].append(s)
            rows.append(
                {
                    "tokens": n,
                    **both(taken),
                    "apart": float((logits[True] - logits[False]).abs().max()),
                    "argmax": float((logits[True].argmax(-1) == logits[False].argmax(-1)).float().mean()),
                }
            )
        if target.graphs.replayed.total() != len(rungs) * (self.wanted.repeats + 2):
            raise SystemExit("error: a pass that should have been replayed ran eagerly")
        return rows

    def rounds(self, name: str, sampling: Sampling) -> dict[str, Any]:
        """A row for one policy."""
        bins = Fitted("bins", {"thresholds": [60, 120, 180, 240, 300], "depth": 5, "draft": "draft"}, {})
        policy, had = parse_policy(POLICIES[name]), self._captured()
        seconds, prepared = self.timed(lambda: prepare_for(self.pair, policy, artifacts=lambda _: bins, sampling=sampling))
        captured = self._captured() - had
        decoder = Decoder(self.pair, StaticSource(prepared))
        models = [self.pair.target, *self.pair.drafts.values()]
        taken: dict[bool, list[float]] = {False: [], True: []}
        same, eager = 0, 0
        gaps: list[float] = []
        for n in range(self.wanted.requests + 1):
            prompt = self.tokens(self.wanted.context, 1000 + n).tolist()
            request = DecodeRequest(str(n), prompt, sampling, n + 1, self.wanted.new_tokens)
            texts: dict[bool, Decoded] = {}
            for model in models:
                assert model.graphs is not None
                model.graphs.eager.clear()
            for replayed in (False, True):
                with eagerly(self.pair, replayed):
                    texts[replayed] = decoder.decode(request)
            if n:  # the first request warms up
                for replayed, text in texts.items():
                    taken[replayed] += [step.round_s for step in text.steps]
                eager += sum(model.graphs.eager.total() for model in models if model.graphs is not None)
                gap = self._gap(request, *(texts[r].trajectory.output_ids.tolist() for r in (False, True)))
                same += gap is None
                gaps += [] if gap is None else [gap]
        return {
            "policy": name,
            "temperature": sampling.temperature,
            **both(taken),
            "captured": captured,
            "capture_s": seconds,
            "eager_passes": eager,
            "texts": self.wanted.requests,
            "same": same,
            "gap": max(gaps, default=0.0),
        }

    def _captured(self) -> int:
        return sum(len(model.graphs.shapes) for model in (self.pair.target, *self.pair.drafts.values()) if model.graphs is not None)

    def _gap(self, request: DecodeRequest, one: list[int], other: list[int]) -> float | None:
        """Nats between the scores of the two tokens where two texts part; None where they do not."""
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if at is None:
            return None
        target, prefix = self.pair.target, request.prompt_ids + one[:at]
        scores = scaled(target.canonical(prefix), request.sampling)
        if not request.sampling.greedy:
            scores = scores + Noise(request.seed, target.vocab_size, target.device).row(len(prefix))
        return float((scores[one[at]] - scores[other[at]]).abs())


def both(taken: dict[bool, list[float]]) -> dict[str, float]:
    """Medians in milliseconds, eager and replayed, their interquartile ranges, and how much faster the latter is."""
    found: dict[str, float] = {}
    for replayed, name in ((False, "eager"), (True, "graph")):
        low, _, high = statistics.quantiles(taken[replayed], n=4)
        found |= {f"{name}_ms": 1e3 * statistics.median(taken[replayed]), f"{name}_iqr_ms": 1e3 * (high - low)}
    return found | {"speedup": found["eager_ms"] / found["graph_ms"]}


def shown(title: str, rows: list[dict[str, Any]]) -> Table:
    """Rows as a table."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    return table


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "dtype": str(dtype), "torch": torch.__version__, "python": platform.python_version()}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--fake", action="store_true", help="no CUDA graphs: replays run the pass again, at a tiny size")
    sizes = {"layers": 16, "draft-layers": 2, "hidden": 2048, "heads": 32, "kv-heads": 8, "vocab": 128256, "context": 512}
    for name, size in {**sizes, "intermediate": 0, "most": 128, "repeats": 30, "requests": 4, "new-tokens": 96}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--out", default=str(ROOT / "bench" / "results" / "gpu_graphs.json"))
    wanted = parser.parse_args()
    if wanted.fake:
        for name, size in TINY.items():
            setattr(wanted, name, size)
        wanted.repeats, wanted.requests, wanted.new_tokens = 3, 1, 24
    if min(wanted.repeats, wanted.requests) < 1:
        parser.error("--repeats and --requests must be at least 1")
    if not wanted.fake and wanted.device != "cuda":
        parser.error("CUDA graphs need --device cuda; --fake runs this script's logic without")
    return wanted


def main() -> None:
    wanted = options()
    try:
        device = pick_device(wanted.device)
    except SpectuneError as error:
        raise SystemExit(f"error: {error}") from None
    dtype = pick_dtype(wanted.dtype, device)
    bench = Bench(wanted, device, dtype)
    with torch.no_grad():
        verify = bench.verification()
        rounds = []
        for name in POLICIES:
            for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
                print(f"{name}, temperature {sampling.temperature:g}", file=sys.stderr)
                rounds.append(bench.rounds(name, sampling))
    limit = TOLERANCE[dtype]
    agrees = all(row["apart"] <= limit for row in verify) and all(row["gap"] <= 2 * limit for row in rounds)
    config = {k: v for k, v in vars(wanted).items() if k not in ("json", "out")}
    result = {
        "environment": environment(device, dtype), "config": config, "agrees": agrees, "verify": verify, "rounds": rounds,
    }  # fmt: skip
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    if not wanted.fake:
        Path(wanted.out).parent.mkdir(parents=True, exist_ok=True)
        Path(wanted.out).write_text(json.dumps(result, indent=1) + "\n")
    if wanted.json:
        print(json.dumps(result))
    else:
        console = Console(width=None if sys.stdout.isatty() else 200)
        console.print(shown("verification", verify), shown("rounds", rounds))
        console.print("outputs agree" if agrees else f"outputs differ by more than {limit} nats", style=None if agrees else "red")
    sys.exit(not agrees)


if __name__ == "__main__":
    main()
