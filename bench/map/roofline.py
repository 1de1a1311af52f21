"""Costs that nobody measured: a pass takes the larger of the time to read its weights and cache and
that to compute its products, by a device's data sheet and the models' shapes (the roofline model,
Williams et al. 2009). What is left out: products of attention, links between GPUs, launches, and
that kernels reach 55-80% of either limit. It ranks policies; it promises no tokens/s."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from spectune.runtime.checkpoints import checkpoint, is_head, read_config
from spectune.runtime.pair import PairSpec
from spectune.traces.cost_table import CostTable, FloatArray
from spectune.traces.tables import LatencyProfile

DEVICES: Final[Mapping[str, tuple[float, float]]] = {
    "h100": (3350, 989), "h200": (4800, 989), "l4": (300, 121), "rtx4090": (1008, 165),
}  # fmt: skip
"""GB/s of memory and TFLOP/s of dense bfloat16 products, by the makers' data sheets (H100: SXM)."""
BYTES: Final = 2
"""Of a weight and of a cached number (bfloat16)."""
ROWS: Final = tuple(float(2**n) for n in range(13))
CONTEXTS: Final = (0.0, 2048.0, 131072.0)
BATCHES: Final = (1.0, 64.0, 512.0)


class Shape(NamedTuple):
    """Sizes of a Llama-like model. ``inputs``: hidden states that attention's projections read
    together, as an EAGLE-3 head's do; ``fused``: states that are joined into one before."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    inputs: int = 1
    fused: int = 0

    @property
    def layer_weights(self) -> int:
        """Weights that a pass reads beside the output head; embeddings are looked up."""
        read = self.inputs * self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        written = self.heads * self.head_dim * self.hidden
        each = read + written + 3 * self.hidden * self.intermediate
        return self.layers * each + self.fused * self.hidden**2

    @property
    def cache_bytes(self) -> int:
        """Of a token's keys and values."""
        return 2 * BYTES * self.layers * self.kv_heads * self.head_dim


SHAPES: Final[Mapping[str, Shape]] = {
    "1b": Shape(2048, 16, 8192, 32, 8, 64, 128256),
    "3b": Shape(3072, 28, 8192, 24, 8, 128, 128256),
    "8b": Shape(4096, 32, 14336, 32, 8, 128, 128256),
    "70b": Shape(8192, 80, 28672, 64, 8, 128, 128256),
}
"""Llama 3.1 and 3.2."""


def shape_of(name: str, target: Shape | None = None) -> Shape:
    """A shape of :data:`SHAPES`, or that of an ``eagle`` or ``eagle3`` head for a target."""
    if target is None or name in SHAPES:
        return SHAPES[name]
    if name == "eagle":
        return target._replace(layers=1, fused=2)
    return target._replace(layers=1, inputs=2, fused=3, vocab=min(32000, target.vocab))


def device_of(name: str) -> tuple[float, float]:
    """(bytes/s, FLOP/s) of ``h200``, or of several such: ``2xh200``."""
    kind = re.sub(r"^\d+x", "", name)
    count = int(name.removesuffix(kind).rstrip("x") or 1)
    memory, compute = (count * limit for limit in DEVICES[kind])
    return memory * 1e9, compute * 1e12


def roofline(spec: PairSpec, device: str, target: str, draft: str) -> LatencyProfile:
    """A profile of the pair's rounds, and of an engine's steps, on a device whose models would have
    these shapes (:func:`shape_of`), every draft the same."""
    limits = device_of(device)
    of_target = shape_of(target)
    of_draft = shape_of(draft, of_target)
    model = Passes(of_target, *limits)
    terms = {
        "target": model.table(with_head=True),
        "prefill/target": model.prompt(),
        "step": CostTable((0.0,)),
        "step target": model.table(with_head=True),
        "step prompts": model.prompt(extra=True),
        "pass/ngram": CostTable((0.0,)),
        "phase/ngram": CostTable((0.0,)),
    }
    model = Passes(of_draft, *limits)
    for name, path in spec.drafts.items():
        config = read_config(checkpoint(path))
        vocab = int(config.get("draft_vocab_size") or config.get("vocab_size") or of_draft.vocab)
        terms |= model.draft_terms(name, vocab, is_head=is_head(path))
    where = {"device": f"roofline {device}", "target": target, "draft": draft, "dtype": "bfloat16"}
    return LatencyProfile(spec.id, where["device"], "bfloat16", terms, environment=where)


class Passes(NamedTuple):
    """A model's passes on a device of ``memory`` bytes/s and ``compute`` FLOP/s."""

    shape: Shape
    memory: float
    compute: float

    def seconds(self, weights: float, rows: Any, context: Any = 0.0) -> FloatArray:
        read = (BYTES * weights + self.shape.cache_bytes * np.asarray(context)) / self.memory
        return np.maximum(read, 2 * weights * np.asarray(rows) / self.compute)

    @property
    def head_weights(self) -> int:
        return self.shape.vocab * self.shape.hidden

    def table(self, *, with_head: bool) -> CostTable:
        """Seconds of a pass by rows and context."""
        weights = self.shape.layer_weights + with_head * self.head_weights
        ridge = BYTES * self.compute / (2 * self.memory)  # rows from which products take longer
        rows = sorted({*ROWS, ridge})
        seconds = self.seconds(weights, np.array(rows)[:, None], np.array(CONTEXTS))
        return CostTable(tuple(seconds.ravel()), ("rows", "context"), (tuple(rows), CONTEXTS))

    def prompt(self, *, extra: bool = False) -> CostTable:
        """Seconds in which a prompt is read; ``extra``: in a step that reads the weights anyway."""
        weights = self.shape.layer_weights
        seconds = [2 * weights * rows / self.compute for rows in ROWS]
        if not extra:
            seconds = self.seconds(weights, ROWS).tolist()
        return CostTable((0.0, *seconds), ("rows",), ((0.0, *ROWS),))

    def draft_terms(self, name: str, vocab: int, *, is_head: bool) -> dict[str, CostTable]:
        """The terms of a draft of this shape, of its trees, and of its shortlists: a part of the
        pair's ``vocab`` tokens costs that part of the shape's output head."""
        head_s = float(self.seconds(self.head_weights, 1.0))
        head = CostTable((0.0, head_s), ("rows",), ((0.0, float(vocab)),))
        weights = self.shape.layer_weights + self.head_weights
        per_pass = self.seconds(weights, BATCHES)
        engine = CostTable((0.0,) * len(BATCHES) + tuple(per_pass), ("passes", "batch"),
                           ((0.0, 1.0), BATCHES))  # fmt: skip
        grown = dict.fromkeys(("top_k", "static", "classifier"), CostTable((0.0,)))
        return {
            f"pass/{name}": self.table(with_head=False),
            f"prefill/{name}": self.prompt(),
            f"head/{name}": head,
            f"gathered/{name}": head,
            f"step draft/{name}": engine,
            f"step draft prompts/{name}": self.prompt(extra=True),
            **{f"{kind}/{name}": table for kind, table in grown.items()},
            **({} if is_head else {f"phase/{name}": CostTable((0.0,))}),
        }
