"""Attention over a slot cache, registered with transformers as ``spectune``.

Query heads of one key-value group are folded into the query axis, so that grouped keys are never repeated over the whole
cache. The mask is always the caller's, four-dimensional and boolean (True: attend).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "spectune"


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` [B, H, Q, D], ``key`` and ``value`` [B, Hkv, S, D], ``attention_mask`` bool [B or 1, 1, Q, S].

    Returns the output ``[B, Q, H, D]``, contiguous. Raises ValueError without a mask: a mask that went missing would attend to
    rejected tokens in silence.
    """
    if attention_mask is None:
        raise ValueError("slot attention needs an explicit mask")
    batch, heads, width, dim = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * width, dim)
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.view(batch, heads, width, value.shape[-1]).transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes ``attn_implementation="spectune"`` known; calling it again is harmless."""
    AttentionInterface.register(NAME, slot_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
