"""Loading causal language models and running passes over their slot caches.

A :class:`CausalModel` is a transformers model with our attention, one slot cache, and three kinds of pass: ``chain`` (tokens that
follow each other), ``scattered`` (tokens anywhere, under the caller's mask) and ``canonical`` (a whole prefix without cache, the
arbiter of near ties: a function of the prefix alone, whatever shapes decoding has used).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from runtime import attention
from runtime.cache import VIEW_STEP, SlotCache
from runtime.pair import identity, is_local
from traces.errors import PairError

CHUNK = 512
"""Longest pass over a prompt; longer ones are cut so that masks stay small."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is one. Raises PairError when CUDA is asked for and absent."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise PairError("--device cuda: this torch sees no CUDA device; use --device cpu or auto")
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU (where parity is exact) and bfloat16 on CUDA."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[dtype]


class CausalModel:
    """One loaded model. Logits are float32 whatever the weights' dtype."""

    def __init__(self, model: Any, name: str, fingerprint: str) -> None:
        attention.register()
        config = model.config.get_text_config()
        windows = getattr(config, "layer_types", None) or []
        if any("sliding" in str(kind) for kind in windows) or getattr(config, "attn_logit_softcapping", None):
            raise PairError(f"{name}: models with sliding-window or soft-capped attention are not supported yet")
        model.set_attn_implementation(attention.NAME)
        self.model = model.eval()
        self.name = name
        self.fingerprint = fingerprint
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.max_positions = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.cache = SlotCache(config.num_hidden_layers)
        self._decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        self._positions = torch.zeros(1, 0, dtype=torch.long, device=self.device)
        self._causal = torch.zeros(0, 0, dtype=torch.bool, device=self.device)

    def reserve(self, tokens: int) -> None:
        """Makes room for sequences of ``tokens``; forgets the cache if it must grow."""
        self.cache.reserve(tokens)
        if self._causal.shape[1] < self.cache.capacity:
            size = self.cache.capacity
            self._positions = torch.arange(size, device=self.device)[None]
            self._causal = torch.ones(size, size, dtype=torch.bool, device=self.device).tril()

    def chain(self, ids: torch.Tensor, start: int, *, logits: int = 0) -> torch.Tensor:
        """Runs ``ids`` (int64 [width]) at slots and positions ``start ..``; every token sees all slots up to its own.

        Returns float32 logits of the last ``logits`` tokens, ``[logits, vocab]`` (0: none, the head is not run).
        """
        width = ids.shape[0]
        view = self.cache.place(start, width)
        mask = self._causal[start : start + width, :view][None, None]
        hidden = self._hidden(ids[None], self._positions[:, start : start + width], mask)
        return self._head(hidden[0, width - logits :]) if logits else hidden.new_zeros(0)

    def read(self, ids: torch.Tensor, start: int) -> None:
        """Fills the cache with ``ids`` at ``start ..`` in chunks, without logits."""
        for at in range(0, ids.shape[0], CHUNK):
            self.chain(ids[at : at + CHUNK], start + at)

    def scattered(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Runs ``ids`` (int64 [width]) at given positions and slots under ``mask`` (bool [width, view]).

        ``view`` must be a multiple of 64 or the cache's capacity. Returns float32 logits ``[width, vocab]``.
        """
        self.cache.place_at(slots, mask.shape[1])
        return self._head(self._hidden(ids[None], positions[None], mask[None, None])[0])

    def canonical(self, prefix: list[int]) -> torch.Tensor:
        """Float32 logits ``[vocab]`` after ``prefix``, computed in one pass without cache: the same bits for the same prefix."""
        ids = torch.tensor([prefix], device=self.device)
        n = ids.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool, device=self.device).tril()[None, None]
        positions = torch.arange(n, device=self.device)[None]
        with torch.no_grad():
            hidden = self._decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state
            return self._head(hidden[0, -1:])[0]

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = self._decoder(
                input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self.cache.cache, use_cache=True
            ).last_hidden_state
            return out

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = self.model.get_output_embeddings()(hidden)
            return out.float()


def view_of(tokens: int) -> int:
    """Slots a pass over ``tokens`` cached tokens reads: rounded up so that few shapes occur."""
    return (tokens + VIEW_STEP - 1) // VIEW_STEP * VIEW_STEP


def load_model(path: str, *, name: str, device: torch.device, dtype: torch.dtype) -> CausalModel:
    """Loads a checkpoint folder or hub name. Raises PairError, in one line, when there is none or it is not a causal LM."""
    content = identity(path)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        model = AutoModelForCausalLM.from_pretrained(Path(path).expanduser() if is_local(path) else path, dtype=dtype)
    except Exception as error:  # the border: safetensors, transformers and torch each have errors of their own
        raise PairError(f"{name}: cannot load {path}: {(str(error).splitlines() or [type(error).__name__])[0]}") from None
    return CausalModel(model.to(device), name, content)
