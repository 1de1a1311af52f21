"""Attention of a pass over a slot cache: :func:`attend`, which transformers' models reach as
``spectune``. Query heads of one key-value group are folded into the query axis, so that grouped
keys are never repeated."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from spectune.runtime.cache import CacheView, Seats, Span
from spectune.runtime.cuda.seat_attention import seat_attention
from spectune.runtime.cuda.split_attention import attention_runs, split_attention

NAME = "spectune"
MASKED_ROWS = 128
"""Queries up to which a causal pass over earlier tokens is cheaper under a mask than in two parts.
"""
APPLIED_ELSEWHERE = (
    *("dropout", "position_ids", "use_cache", "output_hidden_states"),
    *("vision_feature_layer", "vision_feature_select_strategy"),
)
"""What models say to any attention and is not its part here: nothing is dropped, positions are in
queries and keys already, and there are no pictures."""
BACKENDS: Final = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Of torch's attention on CUDA all but cuDNN's, which plans each shape in 0.1 s or more: passes are
of many shapes."""
_switching = threading.Lock()
"""Held while the process's choice of backends is ours: passes are captured aside while another
thread decodes."""


class _Pass(threading.local):
    """What a model's own code does not hand on to the attention of the pass in hand."""

    view: CacheView | None = None
    windows: list[int | None] | None = None
    """Where they are asked for: what each layer's attention says of its window."""


PASS = _Pass()


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    length: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Returns attention's output [B, H, n, Dv] of ``query`` [B, H, n, D] over ``keys`` [B, Hkv, S,
    D] and ``values`` [B, Hkv, S, Dv].

    ``mask``: bool [n, S] (True: attend), or what :func:`layer_mask` made of it. Without one the
    queries are those of the last n keys, and each sees the keys up to its own. ``length``, int64
    [1]: no query sees a key from this one on; a Triton kernel stops there, torch's read all S."""
    batch, heads, width, size = query.shape
    key_heads, groups = keys.shape[1], heads // keys.shape[1]
    if mask is None and width > 1:
        return _causal(query, keys, values, scale)
    if (
        mask is not None
        and mask.dtype == torch.bool
        and batch == 1
        and query.dtype == keys.dtype
        and attention_runs(width, keys[0], values[0])
    ):
        pairs, scale = mask.view(mask.shape[-2:]), size**-0.5 if scale is None else scale
        if length is None:
            length = torch.full((1,), keys.shape[2], device=query.device)
        by_token = split_attention(query[0], keys[0], values[0], pairs, length, scale)
        return by_token.transpose(0, 1)[None]
    if mask is not None and (mask.dtype == torch.bool or mask.shape[-2] != groups * width):
        mask = _folded(mask, groups, query.dtype)
    query = query.reshape(batch, key_heads, groups * width, size)
    out = _torch_attention(query, keys, values, attn_mask=mask, scale=scale)
    # Some kernels lay the output out by rows, not by heads.
    return out.reshape(batch, heads, width, values.shape[-1])


def attend_slots(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: CacheView,
    scale: float | None = None,
    *,
    slides: bool = False,
) -> Tensor:
    """:func:`attend` of the tokens of a pass, each request's over its own of all slots: no mask is
    as wide as the cache. ``slides``: in a layer of a window."""
    if view.seats is not None:
        return _attend_seats(query, keys, values, view.seats, scale)
    parts, spans = [], view.sliding if slides else view.full
    for first, last, start, stop, mask, _ in spans:
        own = keys[:, :, start:stop], values[:, :, start:stop]
        rows = query if len(spans) == 1 else query[:, :, first:last]  # a slice takes microseconds
        parts.append(attend(rows, *own, mask, view.length, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _attend_seats(
    query: Tensor, keys: Tensor, values: Tensor, seats: Seats, scale: float | None
) -> Tensor:
    """:func:`attend` of the tokens of several requests, told on the device."""
    if attention_runs(1, keys[0], values[0]) and query.dtype == keys.dtype:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        by_token = seat_attention(query[0], keys[0], values[0], seats, scale)
        return by_token.transpose(0, 1)[None]
    slots = keys.shape[2] - 1  # the last is no request's
    mask = seat_mask(seats, query.shape[2], slots)
    return attend(query, keys[:, :, :slots], values[:, :, :slots], mask, None, scale)


def seat_mask(seats: Seats, rows: int, slots: int) -> Tensor:
    """What so many rows see of so many slots, bool [rows, slots]; rows that are no request's see
    the first, for nothing reads what they become."""
    tiles, mask = seats
    row, column = (torch.arange(n, device=mask.device) for n in (rows, slots))
    first, count, start, told, stop = tiles.T[:, :, None]
    within = (row >= first) & (row < first + count)
    start, told, stop = ((x * within).sum(0)[:, None] for x in (start, told, stop))
    place = (column - told).clamp(0, mask.shape[1] - 1)
    seen: Tensor = (column < told) | mask.gather(1, place)
    seen = seen & (column >= start) & (column < stop)
    return seen.logical_or(~within.any(0)[:, None] & (column == 0))


def _torch_attention(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """torch's own attention by one of :data:`BACKENDS`; behind it the process has its own choice
    again."""
    if query.device.type != "cuda":
        return F.scaled_dot_product_attention(query, keys, values, **options)
    with _switching, sdpa_kernel(BACKENDS):
        return F.scaled_dot_product_attention(query, keys, values, **options)


def layer_mask(mask: Tensor, groups: int, keys: Tensor, values: Tensor) -> Tensor:
    """Returns a boolean mask [n, S] as :func:`attend` reads it in every layer: for Triton [1, 1, n,
    S], else numbers to add to scores, [1, 1, groups * n, S]. ``groups``: query heads for each of
    the ``keys`` and ``values`` [Hkv, slots, D] of the first layer."""
    if attention_runs(len(mask), keys, values):
        return mask[None, None]
    return _folded(mask, groups, keys.dtype)


def prepare_masks(view: CacheView, groups: int) -> None:
    """Makes of a pass's masks what :func:`layer_mask` does, and what layers of a window read."""

    def ready(spans: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple(
            s if s.mask is None else s._replace(mask=layer_mask(s.mask, groups, *view.layer(0)))
            for s in spans
        )

    full = view.full
    view.full = view.sliding = ready(full)
    if (window := view.cache.window) is not None:
        sliding = tuple(_slid(view, span, window) for span in full)
        if any(one is not other for one, other in zip(sliding, full, strict=True)):
            view.sliding = ready(sliding)


def _slid(view: CacheView, span: Span, window: int) -> Span:
    """What a request's tokens read in layers of a window: of what they see, the slots of tokens
    less than a window before them."""
    first, last, start, stop, mask, earliest = span
    if stop - start <= window:  # no more positions are read than slots
        return span
    begin = start + max(0, earliest - window + 1)
    if mask is None and last - first == 1:
        return span._replace(start=begin)
    if mask is None:
        mask = causal_mask(view.slots[first:last] - begin, stop - begin)
    else:
        mask = mask[:, begin - start :]
    near = view.cache.positions[begin:stop] > view.positions[first:last, None] - window
    return span._replace(start=begin, mask=mask & near)


def _folded(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.view(1, 1, *mask.shape[-2:]).repeat(1, 1, groups, 1)


def _causal(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Attention of the last n tokens, each of which sees the tokens up to its own, by kernels that
    need no mask."""
    width, stop = query.shape[2], keys.shape[2]
    start, grouped = stop - width, query.shape[1] != keys.shape[1]
    if start == 0:
        return _torch_attention(
            query, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
        )
    if query.device.type == "cpu" and query.shape[-1] == values.shape[-1]:
        # Over earlier tokens and over these, joined by the sums of their exponentials.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        past, past_sum = flash(query, keys[:, :, :start], values[:, :, :start], scale=scale)
        new, new_sum = flash(
            query, keys[:, :, start:], values[:, :, start:], is_causal=True, scale=scale
        )
        share = (past_sum - new_sum).sigmoid().unsqueeze(-1)
        return torch.lerp(new, past, share.to(new.dtype))
    if grouped:
        groups = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    mask = causal_lower_right(width, stop)
    return _torch_attention(query, keys, values, attn_mask=mask, scale=scale)


def causal_mask(slots: Tensor, stop: int, start: int = 0) -> Tensor:
    """Returns a mask bool [n, stop] under which the tokens in ``slots`` (int64 [n]) see the slots
    from ``start`` up to their own."""
    columns = torch.arange(stop, device=slots.device)
    mask = columns <= slots[:, None]
    return mask & (columns >= start) if start else mask


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """:func:`attend` as transformers' models call it; the output is [B, n, H, Dv], contiguous.

    Raises ValueError for what else a model asks of its attention (sinks, capped or biased scores).
    """
    window = kwargs.pop("sliding_window", None)
    used = (n for n, v in kwargs.items() if n not in APPLIED_ELSEWHERE and v is not None)
    if (other := next((n for n in used if kwargs[n] is not False), None)) is not None:
        raise ValueError(f"its attention is not reproduced here: it uses {other}")
    if PASS.windows is not None:
        PASS.windows.append(window)
    if (view := PASS.view) is not None:
        out = attend_slots(query, key, value, view, scaling, slides=window is not None)
    else:
        out = attend(query, key, value, attention_mask, None, scaling)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes ``attn_implementation="spectune"`` known. Calling it again is harmless."""
    AttentionInterface.register(NAME, slot_attention)
    # Without a mask of ours attention is causal.
    AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)
