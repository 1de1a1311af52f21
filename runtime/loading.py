"""A pair in memory: target, drafts, tokenizer, and what they agree on."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from spectune.runtime.checkpoints import ignored_settings, is_head
from spectune.runtime.cuda.graphs import CudaRecorder, graphs_enabled, use_graphs
from spectune.runtime.drafts.eagle_formats import load_head
from spectune.runtime.drafts.eagle_head import EagleHead
from spectune.runtime.fused import UNLIKE
from spectune.runtime.hardware import cpu_name
from spectune.runtime.load_model import load_model, pick_device, pick_dtype
from spectune.runtime.models import FINAL, CausalModel
from spectune.runtime.pair import PairSpec, check_threads
from spectune.runtime.policies.document import EXPANDED_LIMIT, NODE_LIMIT
from spectune.runtime.text_codec import (
    TextCodec,
    ordinary_tokens,
    shared_tokens,
    target_tokenizer,
    tokenizer_of,
)
from spectune.runtime.text_ends import end_notes, end_tokens
from spectune.traces.errors import PairError
from spectune.traces.schema import device_name


@dataclass
class LoadedPair(TextCodec):
    """Models and tokenizer.

    ``id``: the pair's when it was loaded; files that change later are another pair's. ``drafts``
    are language models, ``heads`` EAGLE heads on the target, whose ``taps`` are what they read.
    ``notes``: lines on how the models were read. ``threads``: torch's on a CPU for its passes
    (:meth:`torch_threads`)."""

    spec: PairSpec
    id: str
    target: CausalModel
    drafts: dict[str, CausalModel]
    heads: dict[str, EagleHead] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    threads: int = 1

    @contextmanager
    def torch_threads(self) -> Iterator[None]:
        """Torch computes with the pair's ``threads`` inside the block, and as before behind it."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @property
    def place(self) -> dict[str, str]:
        """``device``, ``dtype`` and the name of the ``hardware``: what its costs are of."""
        cuda = self.device.type == "cuda"
        return {
            "device": self.device.type,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "hardware": torch.cuda.get_device_name() if cuda else cpu_name(),
        }

    @property
    def device_name(self) -> str:
        """What policies are published for that it decodes by."""
        return device_name(self.place["device"], self.place["hardware"])

    @property
    def models(self) -> dict[str, CausalModel | EagleHead]:
        """The drafts that are models, language models first: those that may grow trees and have an
        output head."""
        return {**self.drafts, **self.heads}

    def reserve(self, tokens: int) -> None:
        """Makes room for texts of ``tokens`` and the largest tree behind them. Caches that grow
        forget what they hold, and captured passes are forgotten: say the longest text first."""
        self.target.reserve(tokens + NODE_LIMIT)
        for model in self.models.values():
            model.reserve(tokens + EXPANDED_LIMIT)

    @property
    def chain_drafts(self) -> tuple[str, ...]:
        """Drafts whose proposals follow from the text alone, and may be drawn independently of the
        target. A head's depend on where its round began."""
        return (*self.drafts, "ngram")

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Drafts that policies may name."""
        return (*self.models, "ngram")

    @property
    def hidden_states(self) -> dict[str, dict[str, Any]]:
        """By head, the ``states`` of the target that it reads (as ``CausalModel.taps`` counts them,
        or ``last``) and the ``convention`` by which its configuration names them."""
        return {
            name: {
                "states": ["last" if tap == FINAL else tap for tap in head.taps],
                "convention": head.convention,
            }
            for name, head in self.heads.items()
        }

    @property
    def device(self) -> torch.device:
        return self.target.device


SMALL = 32_000_000
"""Parameters below which one CPU thread decodes as fast as several (measured): passes are too short
to be shared, and threads that wait for each other slow down whatever else runs on the machine."""
SAMPLE = "It was the best of times, it was the worst of times, it was the age of wisdom."
"""A text on which models are compared with their own code."""


def load_pair(
    spec: PairSpec,
    *,
    device: str = "auto",
    dtype: str = "auto",
    drafts: Collection[str] | None = None,
    threads: int | None = None,
) -> LoadedPair:
    """Loads target, tokenizer and drafts (all, or those named), each a language model or an EAGLE
    head.

    ``threads`` are torch's on a CPU; by default one for a small target, else those it has. Nothing
    is set here: :meth:`LoadedPair.torch_threads` does, or whoever owns the process.

    Raises PairError on a missing model, a vocabulary that differs, or a head of another target."""
    check_threads(threads)
    pair_id = spec.id
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    read_tokenizer = cache(target_tokenizer)  # after the target, whose errors say more

    def sample() -> list[int]:
        return list(read_tokenizer(spec)(SAMPLE)["input_ids"])

    target = load_model(spec.target, name="target", device=place, dtype=kind, sample=sample)
    tokenizer = read_tokenizer(spec)
    loaded: dict[str, CausalModel] = {}
    heads: dict[str, EagleHead] = {}
    notes = [*target.notes, *ignored_settings(spec.target), *end_notes(spec.target, tokenizer)]
    for name, path in spec.drafts.items():
        if drafts is not None and name not in drafts:
            continue
        if is_head(path):
            heads[name] = load_head(
                path,
                name=name,
                target=target,
                device=place,
                dtype=kind,
                ordinary=ordinary_tokens(tokenizer),
            )
            notes.append(heads[name].reads())
            continue
        loaded[name] = load_model(path, name=name, device=place, dtype=kind, sample=sample)
        notes += loaded[name].notes
        notes += _share(loaded[name], target, tokenizer_of(path), tokenizer)
    notes += [
        f"{model.name} runs the code of transformers instead of fused passes: {why}"
        for model in (target, *loaded.values())
        if (why := model.unfused) and (place.type == "cuda" or why != UNLIKE)
    ]
    if threads is None:
        small = place.type == "cpu" and target.num_parameters < SMALL
        threads = 1 if small and "OMP_NUM_THREADS" not in os.environ else torch.get_num_threads()
    target.taps = tuple(sorted({tap for head in heads.values() for tap in head.taps}))
    pair = LoadedPair(
        tokenizer=tokenizer,
        eos_ids=end_tokens(spec.target, tokenizer),
        positions=(target.max_positions, {n: m.max_positions for n, m in loaded.items()}),
        num_embeddings=int(target.model.get_input_embeddings().weight.shape[0]),
        spec=spec,
        id=pair_id,
        target=target,
        drafts=loaded,
        heads=heads,
        notes=tuple(notes),
        threads=threads,
    )
    if graphs_enabled(place):
        use_graphs((target, *pair.models.values()), CudaRecorder())
    return pair


def _share(
    model: CausalModel, target: CausalModel, draft_tokenizer: Any, tokenizer: Any
) -> list[str]:
    """Makes a model a draft for the target, by its tokenizer (None: the target's). Returns lines on
    tokens that it never proposes. Raises PairError for another vocabulary."""
    if draft_tokenizer is None and model.vocab_size != target.vocab_size:
        raise PairError(
            f"draft {model.name!r} has a vocabulary of {model.vocab_size} tokens, the target one "
            f"of {target.vocab_size}, and no tokenizer that says which they share; put the "
            "target's beside it, if it is the same"
        )
    shared, note = None, ""
    if draft_tokenizer is not None:
        shared, note = shared_tokens(model.name, draft_tokenizer, tokenizer)
    model.share(target.vocab_size, shared)
    return [note] if note else []
