"""The Triton kernel of the gathered head (DynaSpec, algorithm 1, line 13: FUSED_INDEX_GEMM):
selects rows of an output matrix and multiplies at once, so that no sub-matrix is written. It runs
on CUDA, and anywhere under Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor


def power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``, and 1."""
    return 1 << max(0, number - 1).bit_length()


class Tile(NamedTuple):
    """What one program of the kernel multiplies: ``rows`` hidden states with ``ids`` tokens, ``d``
    numbers of each at a time, which divide them (powers of two, 16 or more)."""

    rows: int
    ids: int
    d: int


STAGES: Final = 4
"""Loads in flight."""
WARPS: Final = 4


def tile_for(rows: int, count: int, hidden_size: int, itemsize: int, processors: int) -> Tile:
    """A tile for ``rows`` hidden states and ``count`` tokens of ``itemsize`` bytes a number on
    ``processors`` multiprocessors.

    All hidden states (up to 64) in one program, so that each row of the matrix is read once; up to
    256 contiguous bytes of a row at a time; tokens few enough a program that every multiprocessor
    has two, where the union is large enough for that.
    """
    block = min(64, max(16, power_of_two(rows)))
    ids = 64
    while ids > 16 and -(-count // ids) * -(-rows // block) < 2 * processors:
        ids //= 2
    return Tile(block, ids, math.gcd(hidden_size, 256 // itemsize))


def kernel_runs(device: torch.device, hidden_size: int) -> bool:
    """Whether the Triton kernel can run there: where triton is installed, on CUDA (or ROCm), or
    anywhere with ``TRITON_INTERPRET=1``; for multiples of 16 numbers."""
    runs = hidden_size % 16 == 0 and (device.type == "cuda" or _interpreted())
    return runs and importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def gathered_logits(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Selects and multiplies in one Triton kernel: float32 logits [n, len(ids)] of ``hidden`` [n,
    d] and ``weight`` [vocab, d], both contiguous and of one dtype, ``ids`` int64, ``bias`` [vocab];
    sums are float32. Nothing is checked.

    Tensors lie on CUDA, or on the CPU under Triton's interpreter (``TRITON_INTERPRET=1``), which
    has no bfloat16 arithmetic.
    """
    (n, hidden_size), count, device = hidden.shape, len(ids), weight.device
    out = torch.empty(n, count, dtype=torch.float32, device=device)
    if not n or not count:
        return out
    on_cuda = device.type == "cuda"
    processors = _processors(device) if on_cuda else 1
    tile = tile_for(n, count, hidden_size, weight.element_size(), processors)
    kernel = gathered_kernel(_interpreted())
    grid = (-(-count // tile.ids), -(-n // tile.rows))
    with torch.cuda.device(device) if on_cuda else contextlib.nullcontext():
        kernel[grid](
            hidden,
            weight,
            ids.contiguous(),
            ids if bias is None else bias,
            out,
            n,
            count,
            hidden_size,
            HAS_BIAS=bias is not None,
            ROWS=tile.rows,
            IDS=tile.ids,
            D=tile.d,
            num_stages=STAGES,
            num_warps=WARPS,
        )
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def gathered_kernel(interpreted: bool) -> Any:
    """The kernel of :func:`gathered_logits`, which Triton compiles when it is first launched.
    ``interpreted`` only keeps the interpreter's kernel apart: Triton reads ``TRITON_INTERPRET``
    when a kernel is declared."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def gathered(  # type: ignore[no-untyped-def]
        hidden,
        weight,
        ids,
        bias,
        out,
        n,
        count,
        hidden_size,
        HAS_BIAS: tl.constexpr,
        ROWS: tl.constexpr,
        IDS: tl.constexpr,
        D: tl.constexpr,
    ):
        columns = tl.program_id(0) * IDS + tl.arange(0, IDS)
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        wanted = columns < count
        real = rows < n
        token = tl.load(ids + columns, mask=wanted, other=0)
        inner = tl.arange(0, D)
        left = hidden + rows[:, None] * hidden_size + inner[None, :]
        right = weight + token[None, :] * hidden_size + inner[:, None]
        total = tl.full((ROWS, IDS), 0.0, tl.float32)
        for _ in range(0, hidden_size, D):
            x = tl.load(left, mask=real[:, None], other=0.0)
            w = tl.load(right, mask=wanted[None, :], other=0.0)
            total = tl.dot(x, w, total, input_precision="ieee")
            left += D
            right += D
        if HAS_BIAS:
            total += tl.load(bias + token, mask=wanted, other=0.0).to(tl.float32)[None, :]
        place = out + rows[:, None].to(tl.int64) * count + columns[None, :]
        tl.store(place, total, mask=real[:, None] & wanted[None, :])

    return triton.jit(gathered)
