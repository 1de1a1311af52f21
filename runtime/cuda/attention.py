"""Attention of a few queries over a slot cache, in Triton: keys are split among programs, each of
which serves one key-value head, and a second kernel joins what the splits found.

The number of cached tokens is read on the device, so one captured pass serves every length and
costs what the length costs, not what the cache could hold. The mask is read as it is, a byte a
pair; nothing of it is repeated for heads or turned into floats.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from spectune.runtime.cuda.launch import interpreted, kernels_run, on, power_of_two, processors

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
"""What is computed in float32 without a loss; float64 is left to torch."""
MOST_QUERIES: Final = 256
"""Wider passes, those over prompts, are better served by the libraries' kernels."""
MOST_ROW_BYTES: Final = 512
"""Of one key."""
MOST_SPLITS: Final = 64
WARPS: Final = 4
STAGES: Final = 2


class Blocks(NamedTuple):
    """How attention is cut: a program takes ``rows`` (query, query head) pairs of one key-value
    head and, one after another, blocks of ``keys`` of one of ``splits`` parts of the cache. Powers
    of two; rows and keys 16 or more."""

    rows: int
    keys: int
    splits: int


def blocks_for(rows: int, kv_heads: int, row_bytes: int, multiprocessors: int) -> Blocks:
    """Blocks for ``rows`` pairs a key-value head, so that a long cache gives every multiprocessor
    two programs and, with keys of ``row_bytes`` each, none needs more than 99 KiB of its memory,
    which all GPUs have from compute capability 8.0 on."""
    block = min(64 if row_bytes <= 256 else 32, max(16, power_of_two(rows)))
    programs = kv_heads * -(-rows // block)
    splits = max(1, min(MOST_SPLITS, 2 * multiprocessors // programs))
    return Blocks(block, 64 if block == 64 else 32, 1 << (splits.bit_length() - 1))


def attention_runs(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether :func:`split_attention` covers ``query`` [H, n, D] over ``keys`` and ``values``
    [Hkv, slots, D]."""
    heads, n, dim = query.shape
    return (
        n <= MOST_QUERIES
        and dim * query.element_size() <= MOST_ROW_BYTES
        and keys.shape == values.shape
        and heads % keys.shape[0] == 0
        and query.dtype == keys.dtype == values.dtype
        and query.dtype in DTYPES
        and kernels_run(query.device)
    )


def split_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, length: Tensor, scale: float
) -> Tensor:
    """Attention of ``query`` [H, n, D] over ``keys`` and ``values`` [Hkv, slots, D] under ``mask``
    bool [n, view], contiguous: [n, H, D], contiguous.

    ``length``: one integer on the device, at most ``view``. Slots from there on are not read,
    whatever the mask says. A query that sees nothing gets zeros. Sums are float32.
    """
    (heads, n, dim), kv_heads = query.shape, keys.shape[0]
    groups = heads // kv_heads
    width = max(16, power_of_two(dim))
    rows, block_keys, splits = blocks_for(
        n * groups, kv_heads, width * query.element_size(), processors(query.device)
    )
    partial = query.new_empty(heads, n, splits, dim, dtype=torch.float32)
    weight = query.new_empty(heads, n, splits, dtype=torch.float32)
    out = query.new_empty(n, heads, dim)
    split, join = attention_kernels(interpreted())
    with on(query.device):
        split[(splits, -(-n * groups // rows), kv_heads)](
            query,
            keys,
            values,
            mask.view(torch.uint8),
            length,
            partial,
            weight,
            n,
            groups,
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            mask.stride(0),
            scale * LOG2_E,
            ROWS=rows,
            KEYS=block_keys,
            SIZE=dim,
            DIM=width,
            SPLITS=splits,
            num_warps=WARPS,
            num_stages=STAGES,
        )
        join[(heads * n,)](
            partial, weight, out, n, heads, SIZE=dim, DIM=width, SPLITS=splits, num_warps=WARPS
        )
    return out


LOG2_E: Final = 1.4426950408889634


@functools.cache
def attention_kernels(interpreted: bool) -> tuple[Any, Any]:
    """The kernels of :func:`split_attention`: the one over splits, and the one that joins them.
    ``interpreted`` only keeps the interpreter's apart: Triton reads ``TRITON_INTERPRET`` when a
    kernel is declared."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def split(  # type: ignore[no-untyped-def]
        query,
        keys,
        values,
        mask,
        length,
        partial,
        weight,
        n,
        groups,
        query_head,
        query_row,
        key_head,
        key_slot,
        value_head,
        value_slot,
        mask_row,
        scale,
        ROWS: tl.constexpr,
        KEYS: tl.constexpr,
        SIZE: tl.constexpr,
        DIM: tl.constexpr,
        SPLITS: tl.constexpr,
    ):
        part, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
        stop = tl.load(length).to(tl.int32)
        share = tl.cdiv(tl.cdiv(stop, SPLITS), KEYS) * KEYS
        first = part * share
        last = tl.minimum(first + share, stop)
        pairs = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        real = pairs < n * groups
        row = pairs % n
        dims = tl.arange(0, DIM)
        inside = dims < SIZE
        of_query = (head * groups + pairs // n) * query_head + row * query_row
        q = tl.load(
            query + of_query[:, None] + dims[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.full((ROWS,), 0.0, tl.float32)
        out = tl.full((ROWS, DIM), 0.0, tl.float32)
        for start in range(first, last, KEYS):
            slots = start + tl.arange(0, KEYS)
            cached = slots < last
            k = tl.load(
                keys + head * key_head + slots[None, :] * key_slot + dims[:, None],
                mask=cached[None, :] & inside[:, None],
                other=0.0,
            )
            seen = tl.load(
                mask + row[:, None] * mask_row + slots[None, :],
                mask=real[:, None] & cached[None, :],
                other=0,
            )
            scores = tl.dot(q, k, input_precision="ieee") * scale
            scores = tl.where(seen != 0, scores, float("-inf"))
            highest = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            shares = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            v = tl.load(
                values + head * value_head + slots[:, None] * value_slot + dims[None, :],
                mask=cached[:, None] & inside[None, :],
                other=0.0,
            )
            total = total * shrink + tl.sum(shares, 1)
            out = tl.dot(shares.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
            top = highest
        any_seen = total > 0.0
        out = out / tl.where(any_seen, total, 1.0)[:, None]
        total = tl.where(any_seen, top + tl.log2(tl.where(any_seen, total, 1.0)), float("-inf"))
        place = (head * groups * n + pairs) * SPLITS + part
        tl.store(weight + place, total, mask=real)
        tl.store(
            partial + place[:, None] * SIZE + dims[None, :],
            out,
            mask=(real & any_seen)[:, None] & inside[None, :],
        )

    def join(  # type: ignore[no-untyped-def]
        partial, weight, out, n, heads, SIZE: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr
    ):
        pair = tl.program_id(0)
        parts, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
        weights = tl.load(weight + pair * SPLITS + parts)
        top = tl.max(weights, 0)
        weights = tl.exp2(weights - tl.where(top == float("-inf"), 0.0, top))
        found = tl.load(
            partial + (pair * SPLITS + parts)[:, None] * SIZE + dims[None, :],
            mask=(weights > 0.0)[:, None] & (dims < SIZE)[None, :],
            other=0.0,
        )
        total = tl.sum(weights, 0)
        joined = tl.sum(weights[:, None] * found, 0) / tl.where(total > 0.0, total, 1.0)
        place = out + (pair % n * heads + pair // n) * SIZE + dims
        tl.store(place, joined, mask=dims < SIZE)

    free = ["n", "groups", "heads"]  # compiled once for all numbers of tokens
    return triton.jit(split, do_not_specialize=free), triton.jit(join, do_not_specialize=free)
