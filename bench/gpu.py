"""What captured passes save on a GPU.

    python bench/gpu.py [--device cuda] [--layers 16] [--hidden 2048] [--context 512]
    python bench/gpu.py --device cpu --quick    (the logic alone: no figure of it means anything)

A random target of Llama's architecture and a draft of a few such layers; eager and replayed
requests take turns. ``rounds`` has milliseconds of a round under each kind of policy. Texts are
compared: shapes differ in their last bits, so the first difference may be a near tie; ``gap`` is
how far apart the target's two best tokens were there (nats, by the canonical pass), and must be
small.

Figures go to ``bench/results/gpu-DEVICE.json``. Exit code 1 if a difference is more than rounding
explains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lab import fixed, keep, parser_of, top_k
from transformers import LlamaConfig, LlamaForCausalLM

from spectune.runtime.cuda.graphs import CudaRecorder, prepare_graphs, use_graphs
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, StaticSource
from spectune.runtime.models import CausalModel, pick_device, pick_dtype
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.artifacts import Fitted
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.sampling import Noise, scaled
from spectune.traces.errors import SpectuneError
from spectune.traces.schema import Sampling

SIZES = {
    "layers": 16, "draft_layers": 2, "hidden": 2048, "heads": 32, "kv_heads": 8, "vocab": 128256,
    "context": 512, "requests": 4, "new_tokens": 96,
}  # fmt: skip
TINY = {
    "layers": 2, "draft_layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 320,
    "context": 48, "requests": 1, "new_tokens": 24,
}  # fmt: skip
TREE = top_k("draft", 8, 5, 60)
POLICIES: dict[str, dict[str, Any]] = {
    "autoregressive": {"draft": "none"},
    "chain, gamma 4": {"draft": "draft", "window": fixed(4)},
    "EAGLE-2, N 60": TREE,
    "HeteroSpec, N 60": {
        **TREE,
        "stratify": {"artifact": "bins", "alpha": 3, "fractions": [0.3, 0.6, 1.0]},
    },
}
BINS = Fitted("bins", {"thresholds": [60, 120, 180, 240, 300], "depth": 5, "draft": "draft"}, {})
TOLERANCE = {torch.float32: 4e-4, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Nats by which rounding may part passes of different shapes."""


class Repeating:
    """In a recorder's place where there is no CUDA: a replay runs the pass again."""

    def capture(self, run: Callable[[], None], rehearse: Callable[[], None]) -> Callable[[], None]:
        rehearse()
        return run


@contextmanager
def replaying(pair: LoadedPair, replayed: bool) -> Iterator[None]:
    """Takes the graphs away meanwhile, unless ``replayed``."""
    models = [pair.target, *pair.drafts.values()]
    kept = [model.graphs for model in models]
    for model in models if not replayed else ():
        model.graphs = None
    yield
    for model, graphs in zip(models, kept, strict=True):
        model.graphs = graphs


def random_model(
    wanted: argparse.Namespace, device: torch.device, dtype: torch.dtype, layers: int, seed: int
) -> CausalModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=wanted.vocab,
        hidden_size=wanted.hidden,
        intermediate_size=4 * wanted.hidden,
        num_hidden_layers=layers,
        num_attention_heads=wanted.heads,
        num_key_value_heads=wanted.kv_heads,
        max_position_embeddings=wanted.context + 1024,
    )
    with device:
        model = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():  # so that distributions are neither flat nor certain
        model.get_output_embeddings().weight.mul_(8.0)
    return CausalModel(model, "target")


class Graphs:
    """A random pair whose passes can be captured, under the clock."""

    def __init__(
        self, wanted: argparse.Namespace, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.wanted, self.device = wanted, device
        target, draft = (
            random_model(wanted, device, dtype, n, i)
            for i, n in enumerate((wanted.layers, wanted.draft_layers))
        )
        spec = PairSpec("gpu", "random", (("draft", "random"),))
        self.pair = LoadedPair(spec, target, {"draft": draft}, None, frozenset())
        draft.name = "draft"
        use_graphs((target, draft), CudaRecorder() if device.type == "cuda" else Repeating())
        plain = prepare(AUTOREGRESSIVE, self.pair.draft_names)
        prepare_graphs(self.pair, plain, wanted.context + 256)
        if target.graphs is not None and target.graphs.problem:
            raise SystemExit(f"error: nothing could be captured: {target.graphs.problem}")

    def tokens(self, count: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.wanted.vocab, (count,), generator=generator).to(self.device)

    def rounds(self, name: str, sampling: Sampling) -> dict[str, Any]:
        """A row for one policy."""
        policy = parse_policy(POLICIES[name])
        began = time.perf_counter()
        prepared = prepare_for(self.pair, policy, artifacts=lambda _: BINS)
        capture_s = time.perf_counter() - began
        decoder = Decoder(self.pair, StaticSource(prepared))
        taken: dict[bool, list[float]] = {False: [], True: []}
        gaps: list[float | None] = []
        for n in range(self.wanted.requests + 1):
            prompt = self.tokens(self.wanted.context, 1000 + n).tolist()
            request = DecodeRequest(str(n), prompt, sampling, n + 1, self.wanted.new_tokens)
            texts = {}
            for replayed in (False, True):
                with replaying(self.pair, replayed):
                    texts[replayed] = decoder.decode(request)
            if n:  # the first request warms up
                for replayed, text in texts.items():
                    taken[replayed] += [step.round_s for step in text.steps]
                ids = (texts[r].trajectory.output_ids.tolist() for r in (False, True))
                gaps.append(self._gap(request, *ids))
        apart = [gap for gap in gaps if gap is not None]
        eager, graph = (1e3 * statistics.median(taken[replayed]) for replayed in (False, True))
        row = {"policy": name, "temperature": sampling.temperature, "texts": len(gaps)}
        row |= {"eager_ms": eager, "graph_ms": graph, "speedup": eager / graph}
        same, gap = len(gaps) - len(apart), max(apart, default=0.0)
        return {**row, "capture_s": capture_s, "same": same, "gap": gap}

    def _gap(self, request: DecodeRequest, one: list[int], other: list[int]) -> float | None:
        """Nats between the scores of the two tokens where two texts part; None where they do
        not."""
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if at is None:
            return None
        target, prefix = self.pair.target, request.prompt_ids + one[:at]
        scores = scaled(target.canonical(prefix), request.sampling)
        if not request.sampling.greedy:
            scores = scores + Noise(request.seed, target.vocab_size, target.device).row(len(prefix))
        return float((scores[one[at]] - scores[other[at]]).abs())


def measured(wanted: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    dtype = pick_dtype("auto", device)
    graphs = Graphs(wanted, device, dtype)
    kinds = (Sampling(), Sampling(temperature=1.0, seed=1))
    rounds = [graphs.rounds(name, sampling) for name in POLICIES for sampling in kinds]
    agrees = all(row["gap"] <= TOLERANCE[dtype] for row in rounds)
    return {"dtype": str(dtype), "agrees": agrees, "rounds": rounds}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    wanted = parser.parse_args()
    if wanted.quick:
        vars(wanted).update(TINY)
    try:
        device = pick_device(wanted.device)
    except SpectuneError as error:
        raise SystemExit(f"error: {error}") from None
    if device.type != "cuda" and not wanted.quick:
        raise SystemExit("error: there are no CUDA graphs to time: try --quick")
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__}
    with torch.no_grad():
        found |= measured(wanted, device)
    print(json.dumps(found, indent=1))
    if not wanted.quick:
        keep(f"gpu-{device.type}", found)
    sys.exit(not found["agrees"])


if __name__ == "__main__":
    main()
