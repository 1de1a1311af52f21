"""A pair in memory: target, drafts, tokenizer, and what they agree on."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import AutoTokenizer

from spectune.runtime.cuda.graphs import CudaRecorder, use_graphs, wanted
from spectune.runtime.drafts.eagle_formats import load_head
from spectune.runtime.drafts.eagle_head import EagleHead
from spectune.runtime.generation_settings import Process, Settings, processor
from spectune.runtime.models import CausalModel, load_model, pick_device, pick_dtype
from spectune.runtime.pair import PairSpec, check_threads, expanded, is_head, is_local, translated
from spectune.traces.errors import PairError, WorkloadError
from spectune.traces.schema import Request


@dataclass
class LoadedPair:
    """Models and tokenizer. ``exact`` says that near ties are decided canonically (float32).

    ``drafts`` are language models, ``heads`` EAGLE heads on the target; where there are heads, the target's ``taps`` are what they read.
    ``settings``: what the target's generation_config asks of its texts.
    """

    spec: PairSpec
    target: CausalModel
    drafts: dict[str, CausalModel]
    tokenizer: Any
    eos_ids: frozenset[int]
    heads: dict[str, EagleHead] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)

    @cached_property
    def id(self) -> str:
        """The pair's id when it was loaded: files that change later are another pair's."""
        return self.spec.id

    def processor(self, prompt_tokens: int) -> Process | None:
        """What changes the target's logits for a request whose prompt has ``prompt_tokens`` tokens; None: nothing."""
        return processor(self.settings, prompt_tokens, self.eos_ids, self.device) if self.settings else None

    @property
    def exact(self) -> bool:
        return bool(self.target.dtype == torch.float32)

    @property
    def models(self) -> dict[str, CausalModel | EagleHead]:
        """The drafts that are models, language models first: those that may grow trees and have an output head."""
        return {**self.drafts, **self.heads}

    @property
    def chain_drafts(self) -> tuple[str, ...]:
        """Drafts whose proposals follow from the text alone: a chain panorama tells them, and they may be drawn independently of the
        target. A head's depend on where its round began; its chains are recorded as trees of width 1."""
        return (*self.drafts, "ngram")

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Drafts that policies may name."""
        return (*self.models, "ngram")

    @property
    def max_positions(self) -> int:
        """Longest sequence that every model of the pair can hold."""
        return min(model.max_positions for model in (self.target, *self.models.values()))

    @property
    def device(self) -> torch.device:
        where: torch.device = self.target.device
        return where

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt as the target sees it (with the tokenizer's own special tokens)."""
        return list(self.tokenizer(text)["input_ids"])

    def encode_request(self, request: Request, *, chat: bool) -> list[int]:
        """Token ids of a request's first turn or conversation, in the chat template when the tokenizer has one and ``chat`` is set.

        Without ``chat`` a conversation's texts stand one after the other, a blank line between them. Raises WorkloadError for one
        where ``chat`` is set and there is no template.
        """
        texts, roles = (request.turns, request.roles) if request.roles else (request.turns[:1], ("user",))
        if chat and getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            with translated(f"request {request.id}: the target's chat template (--no-chat leaves it out)"):
                out = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            return list(out["input_ids"])
        if chat and len(texts) > 1:
            raise WorkloadError(
                f"request {request.id}: a conversation of {len(texts)} messages needs a chat template, and the target's tokenizer "
                "has none; --no-chat puts a blank line between its messages instead"
            )
        return self.encode("\n\n".join(texts))

    def text(self, ids: Collection[int]) -> str:
        """Decoded text, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def stopper(self, strings: tuple[str, ...]) -> Callable[[list[int], list[int]], int | None]:
        """Finds the first new token at which one of ``strings`` has appeared in the decoded output."""
        longest = max(len(s) for s in strings)

        def ends_at(output: list[int], new: list[int]) -> int | None:
            tail = output[-(longest + 8) :]
            for i in range(1, len(new) + 1):
                text = self.text(tail + new[:i])
                if any(s in text for s in strings):
                    return i
            return None

        return ends_at


SMALL = 32_000_000
"""Parameters below which one CPU thread decodes as fast as several (measured, docs/log.md): passes are too short to be shared, and
threads that wait for each other slow down whatever else runs on the machine."""


def load_pair(
    spec: PairSpec,
    *,
    device: str = "auto",
    dtype: str = "auto",
    drafts: Collection[str] | None = None,
    threads: int | None = None,
) -> LoadedPair:
    """Loads target, tokenizer and drafts (all, or those named), each a language model or an EAGLE head.

    ``threads`` are torch's on a CPU; by default one for a small target, else torch's own choice (or ``OMP_NUM_THREADS``).
    Raises PairError on a missing model, a vocabulary that differs, a head of another target, or files that change meanwhile.
    """
    check_threads(threads)
    content = spec.id
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    target = load_model(spec.target, name="target", device=where, dtype=kind)
    if not is_local(spec.target):
        content = spec.id  # what was fetched of a hub name is known now
    tokenizer = _tokenizer(spec.target)
    if tokenizer is None:
        raise PairError(f"target: no tokenizer at {spec.target} (tokenizer.json or the like is expected beside the weights)")
    loaded: dict[str, CausalModel] = {}
    heads: dict[str, EagleHead] = {}
    for name, path in spec.drafts:
        if drafts is not None and name not in drafts:
            continue
        if is_head(path):
            heads[name] = load_head(path, name=name, target=target, device=where, dtype=kind)
            continue
        model = load_model(path, name=name, device=where, dtype=kind)
        if model.vocab_size != target.vocab_size:
            raise PairError(
                f"draft {name!r} has a vocabulary of {model.vocab_size} tokens, the target one of {target.vocab_size}; "
                "a draft must share the target's tokenizer"
            )
        _same_tokenizer(name, _tokenizer(path), tokenizer)
        loaded[name] = model
    if threads is not None:
        torch.set_num_threads(threads)
    elif where.type == "cpu" and "OMP_NUM_THREADS" not in os.environ and target.num_parameters < SMALL:
        torch.set_num_threads(1)
    target.taps = tuple(sorted({tap for head in heads.values() for tap in head.taps}))
    with translated(f"target: eos_token_id of {spec.target}"):
        eos = _eos(target, tokenizer)
    pair = LoadedPair(spec, target, loaded, tokenizer, eos, heads, spec.settings)
    with translated(f"target: generation_config of {spec.target}"):
        if (process := pair.processor(1)) is not None:  # values that it does not take are told here
            process(torch.zeros(target.vocab_size, device=where), [0])
    if pair.id != content:
        raise PairError(f"pair {spec.name}: its files changed while they were loaded; load it again")
    if wanted(where):
        use_graphs((target, *pair.models.values()), CudaRecorder())
    return pair


def _tokenizer(path: str) -> Any:
    folder = expanded(path)
    if is_local(path) and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    with translated(f"tokenizer of {path}"):
        return AutoTokenizer.from_pretrained(folder if is_local(path) else path, trust_remote_code=False)


def _same_tokenizer(name: str, own: Any, target: Any) -> None:
    if own is None:
        return
    mine, theirs = own.get_vocab(), target.get_vocab()
    if mine != theirs:
        token = next(t for t in {**theirs, **mine} if mine.get(t) != theirs.get(t))
        raise PairError(
            f"draft {name!r} has another vocabulary than the target: {token!r} is {mine.get(token)} there and {theirs.get(token)} "
            "in the target's; a draft must share the target's tokenizer"
        )


def _eos(target: CausalModel, tokenizer: Any) -> frozenset[int]:
    eos = getattr(target.model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(int(token) for token in (eos if isinstance(eos, list) else [eos]))
