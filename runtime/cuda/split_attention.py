"""Attention of a few queries over a slot cache, in Triton: keys are split among programs, each of
which serves one key-value head, and a second kernel joins what the splits give.

The number of cached tokens is read on the device, so one captured pass serves every length and
costs what the length costs, not what the cache could hold. The mask is read as it is, a byte a
pair; nothing of it is repeated for heads or turned into floats."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from spectune.runtime.cuda.launch import interpreted, kernels_run, on, power_of_two, processors
from spectune.runtime.policies.document import NODE_LIMIT

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
"""What is computed in float32 without a loss; float64 is left to torch."""
MOST_QUERIES: Final = NODE_LIMIT + 1
"""Of the largest tree with its root. Wider passes, those over prompts, are better served by the
libraries' kernels."""
MOST_ROW_BYTES: Final = 512
"""Of one key."""
MOST_PARTIAL_ROWS: Final = 8192
"""Rows of partial results, 4 MiB of 128 numbers each, which are written and read again."""
LAUNCH: Final = {"num_stages": 2, "num_warps": 4}
LOG2_E: Final = 1.4426950408889634


def blocks_for(rows: int, kv_heads: int, row_bytes: int, multiprocessors: int) -> Any:
    """How attention is cut: a program takes ROWS of the ``rows`` (query, query head) pairs of one
    key-value head and, KEYS at a time, one of SPLITS parts of the cache. A long cache gives every
    multiprocessor up to two programs, as many as partial results stay few; none needs more than 99
    KiB of shared memory, which all GPUs have from compute capability 8.0 on."""
    block = min(64 if row_bytes <= 256 else 32, max(16, power_of_two(rows)))
    programs = kv_heads * -(-rows // block)
    few = MOST_PARTIAL_ROWS // (rows * kv_heads)
    splits = max(1, min(64, few, 2 * multiprocessors // programs))
    keys = 64 if block == 64 else 32
    return {"ROWS": block, "KEYS": keys, "SPLITS": 1 << (splits.bit_length() - 1)}


def attention_runs(queries: int, keys: Tensor, values: Tensor) -> bool:
    """Whether :func:`split_attention` covers so many queries over ``keys`` and ``values``
    [Hkv, slots, D], laid out alike; queries are of the dtype of keys."""
    return (
        kernels_run(keys.device)
        and queries <= MOST_QUERIES
        and keys.shape[2] * keys.element_size() <= MOST_ROW_BYTES
        and (keys.shape, keys.stride()) == (values.shape, values.stride())
        and keys.dtype == values.dtype
        and keys.dtype in DTYPES
    )


def split_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, length: Tensor, scale: float
) -> Tensor:
    """Attention of ``query`` [H, n, D] over ``keys`` and ``values`` [Hkv, slots, D] under ``mask``
    bool [n, view]: [n, H, D], contiguous.

    ``length``: one integer on the device, at most ``view``. Slots from there on are not read,
    whatever the mask says. A query that sees nothing gets zeros. Sums are float32."""
    (heads, n, dim), kv_heads = query.shape, keys.shape[0]
    pairs, width = n * heads // kv_heads, max(16, power_of_two(dim))
    blocks = blocks_for(pairs, kv_heads, width * query.element_size(), processors(query.device))
    sizes = {"SIZE": dim, "DIM": width, "SPLITS": blocks["SPLITS"]}
    partial = query.new_empty(heads, n, blocks["SPLITS"], dim, dtype=torch.float32)
    weight = query.new_empty(heads, n, blocks["SPLITS"], dtype=torch.float32)
    out = query.new_empty(n, heads, dim)
    tensors = (query, keys, values, mask.view(torch.uint8), length, partial, weight)
    strides = (*query.stride()[:2], *keys.stride()[:2], mask.stride(0))
    split, join = attention_kernels(interpreted())
    with on(query.device):
        split[blocks["SPLITS"], -(-pairs // blocks["ROWS"]), kv_heads](
            *tensors, n, heads // kv_heads, *strides, scale * LOG2_E, **blocks | sizes, **LAUNCH
        )
        each = min(8, power_of_two(1 + heads * n // 512))
        join[-(-heads * n // each),](partial, weight, out, n, heads, PAIRS=each, **sizes, **LAUNCH)
    return out


@functools.cache
def attention_kernels(interpreted: bool) -> tuple[Any, Any]:
    """The kernels of :func:`split_attention`: the one over splits, and the one that joins them;
    ``interpreted`` keeps the interpreter's apart."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # fmt: off
    def split(  # type: ignore[no-untyped-def]
        query, keys, values, mask, length, partial, weight, n, groups, query_head, query_row,
        kv_head, kv_slot, mask_row, scale, ROWS: tl.constexpr, KEYS: tl.constexpr,
        SIZE: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    ):
        # fmt: on
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
        of_row = (head * groups + pairs // n) * query_head + row * query_row
        of_query = query + of_row[:, None] + dims[None, :]
        q = tl.load(of_query, mask=real[:, None] & inside[None, :], other=0.0)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.full((ROWS,), 0.0, tl.float32)
        out = tl.full((ROWS, DIM), 0.0, tl.float32)
        for start in range(first, last, KEYS):
            slots = start + tl.arange(0, KEYS)
            cached = slots < last
            of_keys = keys + head * kv_head + slots[None, :] * kv_slot + dims[:, None]
            k = tl.load(of_keys, mask=cached[None, :] & inside[:, None], other=0.0)
            of_mask = mask + row[:, None] * mask_row + slots[None, :]
            allowed = tl.load(of_mask, mask=real[:, None] & cached[None, :], other=0)
            scores = tl.dot(q, k, input_precision="ieee") * scale
            scores = tl.where(allowed != 0, scores, float("-inf"))
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
        place = (head * groups * n + pairs) * SPLITS + part
        tl.store(weight + place, tl.where(some, top + tl.log2(total), float("-inf")), mask=real)
        of_partial = partial + place[:, None] * SIZE + dims[None, :]
        tl.store(of_partial, out / total[:, None], mask=(real & some)[:, None] & inside[None, :])

    # fmt: off
    def join(  # type: ignore[no-untyped-def]
        partial, weight, out, n, heads, PAIRS: tl.constexpr, SIZE: tl.constexpr,
        DIM: tl.constexpr, SPLITS: tl.constexpr,
    ):
        # fmt: on
        pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
        parts, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
        real, inside = pairs < heads * n, dims < SIZE
        place = pairs[:, None] * SPLITS + parts[None, :]
        weights = tl.load(weight + place, mask=real[:, None], other=float("-inf"))
        top = tl.max(weights, 1)
        weights = tl.exp2(weights - tl.where(top == float("-inf"), 0.0, top)[:, None])
        of_partial = partial + place[:, :, None] * SIZE + dims[None, None, :]
        written = (weights > 0.0)[:, :, None] & inside[None, None, :]
        outputs = tl.load(of_partial, mask=written, other=0.0)
        total = tl.sum(weights, 1)
        total = tl.where(total > 0.0, total, 1.0)
        joined = tl.sum(weights[:, :, None] * outputs, 1) / total[:, None]
        row = pairs % n * heads + pairs // n
        of_out = out + row[:, None] * SIZE + dims[None, :]
        tl.store(of_out, joined, mask=real[:, None] & inside[None, :])

    counts = ["n", "groups", "heads"]  # compiled once for all numbers of tokens
    return triton.jit(split, do_not_specialize=counts), triton.jit(join, do_not_specialize=counts)
