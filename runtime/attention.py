"""Attention over a slot cache, registered with transformers as ``spectune``.

Query heads of one key-value group are folded into the query axis, so that grouped keys are never
repeated over the whole cache. A mask is the caller's, four-dimensional and boolean (True: attend);
a pass without a cache is causal and needs none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

NAME = "spectune"
MASK_ENTRIES = 1 << 24
"""Entries that a mask has at most where it is folded and turned into floats; wider passes attend by
blocks of queries."""
APPLIED_ELSEWHERE = (
    *("dropout", "position_ids", "sliding_window", "use_cache"),
    *("vision_feature_layer", "vision_feature_select_strategy"),
)
"""What models say to any attention and is not its part here: nothing is dropped, positions are in
queries and keys already, texts end before a window slides, and there are no pictures."""


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` [B, H, Q, D], ``key`` and ``value`` [B, Hkv, S, D], ``attention_mask`` bool [B or
    1, 1, Q, S].

    Without a mask attention is causal, and keys and queries must be of the same tokens (Q = S).
    Returns the output ``[B, Q, H, D]``, contiguous. Raises ValueError where Q != S without a mask:
    it would attend to rejected tokens in silence; and for what else a model asks of its attention
    (sinks, capped or biased scores).
    """
    asked = (n for n, v in kwargs.items() if n not in APPLIED_ELSEWHERE and v is not None)
    if (other := next((n for n in asked if kwargs[n] is not False), None)) is not None:
        raise ValueError(f"its attention is not reproduced here: it uses {other}")
    batch, heads, width, dim = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None:
        if width != key.shape[2]:
            raise ValueError("slot attention over a cache needs an explicit mask")
        key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    rows = max(1, MASK_ENTRIES // (groups * key.shape[2]))
    if width > rows:
        blocks = zip(torch.split(query, rows, 2), torch.split(attention_mask, rows, 2), strict=True)
        parts = [slot_attention(module, q, key, value, mask, scaling)[0] for q, mask in blocks]
        return torch.cat(parts, 1), None
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * width, dim)
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    # Some kernels lay the output out by rows, not by heads.
    out = out.reshape(batch, heads, width, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def causal_mask(start: int, stop: int, view: int, device: torch.device) -> torch.Tensor:
    """The rows ``start .. stop - 1`` of a causal mask over ``view`` slots, bool [stop - start,
    view]."""
    return torch.ones(stop - start, view, dtype=torch.bool, device=device).tril_(start)


def register() -> None:
    """Makes ``attn_implementation="spectune"`` known. Calling it again is harmless."""
    AttentionInterface.register(NAME, slot_attention)
    # Without a mask of ours attention is causal.
    AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)


_switching = threading.Lock()
_blocks = 0
"""How many blocks of :func:`cudnn_attention` are open."""
_before = True
"""The process's own choice, while any is."""


@contextmanager
def cudnn_attention(enabled: bool) -> Iterator[None]:
    """Lets attention on CUDA use cuDNN's kernels inside the block, or keeps it from them. Behind
    the last block, of whatever thread, the process has its own choice again."""
    global _blocks, _before
    with _switching:
        if not _blocks:
            _before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        _blocks += 1
        torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        with _switching:
            _blocks -= 1
            if not _blocks:
                torch.backends.cuda.enable_cudnn_sdp(_before)


def eager_kernels(device: torch.device) -> AbstractContextManager[None]:
    """The kernels of eager passes on a device: all but cuDNN's, which are planned for each shape,
    in 0.1 s or more, and eager passes are of many shapes."""
    return cudnn_attention(False) if device.type == "cuda" else nullcontext()
