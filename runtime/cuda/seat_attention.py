"""Attention of the tokens of several requests, each over its own slots of one cache, in Triton:
:mod:`runtime.cuda.split_attention` by tiles of rows.

Whose the rows are, where their texts lie and how long they are is read on the device, so one
captured pass serves every number of requests and all their lengths. Of a mask there are only the
slots behind a text's end: what comes before is seen."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from spectune.runtime.cuda.launch import interpreted, on, power_of_two, processors
from spectune.runtime.cuda.split_attention import (
    LAUNCH,
    LOG2_E,
    MOST_PARTIAL_ROWS,
    attention_kernels,
)

if TYPE_CHECKING:
    from spectune.runtime.cache import Seats

PAIRS: Final = 64
"""Pairs of a row and a query head that a tile has at most."""


def tile_rows(groups: int) -> int:
    """Rows of a tile where ``groups`` query heads share a key-value head."""
    return max(1, PAIRS // groups)


def splits_for(rows: int, kv_heads: int, tiles: int, multiprocessors: int) -> int:
    """Parts that each tile's slots are cut into: every multiprocessor gets up to two programs, as
    many as partial results stay few. Half of the tiles that there may be are taken to be there."""
    few = MOST_PARTIAL_ROWS // (rows * kv_heads)
    programs = kv_heads * -(-tiles // 2)
    splits = max(1, min(64, few, 2 * multiprocessors // programs))
    return 1 << (splits.bit_length() - 1)


def seat_attention(
    query: Tensor, keys: Tensor, values: Tensor, seats: Seats, scale: float
) -> Tensor:
    """Attention of ``query`` [H, n, D] over ``keys`` and ``values`` [Hkv, slots, D], laid out
    alike: [n, H, D], contiguous. A tile has at most :func:`tile_rows` rows. A row that sees
    nothing, or is of no tile, gets zeros. Sums are float32."""
    (heads, n, dim), kv_heads, (tiles, mask) = query.shape, keys.shape[0], seats
    groups, width = heads // kv_heads, max(16, power_of_two(dim))
    rows = tile_rows(groups)
    splits = splits_for(n * groups, kv_heads, len(tiles), processors(query.device))
    sizes = {"SIZE": dim, "DIM": width, "SPLITS": splits}
    keys_at_once = 64 if width * query.element_size() <= 256 else 32
    tile = {"TILE": rows, "ROWS": max(16, power_of_two(rows * groups)), "KEYS": keys_at_once}
    partial = query.new_empty(heads, n, splits, dim, dtype=torch.float32)
    weight = query.new_full((heads, n, splits), -torch.inf, dtype=torch.float32)
    out = query.new_empty(n, heads, dim)
    tensors = (query, keys, values, mask.view(torch.uint8), tiles, partial, weight)
    strides = (*query.stride()[:2], *keys.stride()[:2], mask.stride(0))
    split, join = seat_kernel(interpreted()), attention_kernels(interpreted())[1]
    with on(query.device):
        split[splits, len(tiles), kv_heads](
            *tensors, n, groups, *strides, scale * LOG2_E, **tile | sizes, **LAUNCH
        )
        each = min(8, power_of_two(1 + heads * n // 512))
        join[-(-heads * n // each),](partial, weight, out, n, heads, PAIRS=each, **sizes, **LAUNCH)
    return out


@functools.cache
def seat_kernel(interpreted: bool) -> Any:
    """The kernel of :func:`seat_attention` over splits; ``interpreted`` keeps the interpreter's
    apart."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # fmt: off
    def split(  # type: ignore[no-untyped-def]
        query, keys, values, mask, tiles, partial, weight, n, groups, query_head, query_row,
        kv_head, kv_slot, mask_row, scale, TILE: tl.constexpr, ROWS: tl.constexpr,
        KEYS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    ):
        # fmt: on
        part, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
        tile = tiles + 5 * tl.program_id(1)
        begins, count = tl.load(tile).to(tl.int32), tl.load(tile + 1).to(tl.int32)
        start, told = tl.load(tile + 2).to(tl.int32), tl.load(tile + 3).to(tl.int32)
        stop = tl.load(tile + 4).to(tl.int32)
        share = tl.cdiv(tl.cdiv(stop - start, SPLITS), KEYS) * KEYS
        first = start + part * share
        last = tl.minimum(first + share, stop)
        if first < last:
            pair = tl.arange(0, ROWS)
            real = (pair % TILE < count) & (pair // TILE < groups)
            row = begins + pair % TILE
            dims = tl.arange(0, DIM)
            inside = dims < SIZE
            of_row = (head * groups + pair // TILE) * query_head + row * query_row
            of_query = query + of_row[:, None] + dims[None, :]
            q = tl.load(of_query, mask=real[:, None] & inside[None, :], other=0.0)
            top = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.full((ROWS,), 0.0, tl.float32)
            out = tl.full((ROWS, DIM), 0.0, tl.float32)
            for begin in range(first, last, KEYS):
                slots = begin + tl.arange(0, KEYS)
                cached = slots < last
                of_keys = keys + head * kv_head + slots[None, :] * kv_slot + dims[:, None]
                k = tl.load(of_keys, mask=cached[None, :] & inside[:, None], other=0.0)
                is_told = cached & (slots >= told)
                of_mask = mask + row[:, None] * mask_row + (slots - told)[None, :]
                allowed = tl.load(of_mask, mask=real[:, None] & is_told[None, :], other=0)
                seen = (allowed != 0) | (cached & (slots < told))[None, :]
                scores = tl.dot(q, k, input_precision="ieee") * scale
                scores = tl.where(seen, scores, float("-inf"))
                highest = tl.maximum(top, tl.max(scores, 1))
                base = tl.where(highest == float("-inf"), 0.0, highest)
                shares = tl.exp2(scores - base[:, None])
                shrink = tl.exp2(top - base)
                of_values = values + head * kv_head + slots[:, None] * kv_slot + dims[None, :]
                v = tl.load(of_values, mask=cached[:, None] & inside[None, :], other=0.0)
                total = total * shrink + tl.sum(shares, 1)
                out = tl.dot(shares.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
                top = highest
            some = total > 0.0
            total = tl.where(some, total, 1.0)
            place = ((head * groups + pair // TILE) * n + row) * SPLITS + part
            tl.store(weight + place, tl.where(some, top + tl.log2(total), float("-inf")), mask=real)
            of_partial = partial + place[:, None] * SIZE + dims[None, :]
            written = (real & some)[:, None] & inside[None, :]
            tl.store(of_partial, out / total[:, None], mask=written)

    return triton.jit(split, do_not_specialize=["n", "groups"])
