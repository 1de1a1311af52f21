"""The Triton kernel of the gathered head (DynaSpec, algorithm 1, line 13: FUSED_INDEX_GEMM):
selects rows of an output matrix and multiplies at once, so that no sub-matrix is written. It runs
on CUDA, and anywhere under Triton's interpreter; no GPU has run it yet.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectune.traces.errors import PairError


def power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``, and 1."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True)
class Tile:
    """What one program of the kernel multiplies: ``rows`` hidden states with ``ids`` tokens, ``d``
    numbers of each at a time (powers of two, 16 or more); ``stages`` of loads in flight, ``warps``.
    """

    rows: int
    ids: int
    d: int
    stages: int = 4
    warps: int = 4


def tile_for(rows: int, count: int, hidden_size: int, itemsize: int, processors: int) -> Tile:
    """A tile for ``rows`` hidden states and ``count`` tokens of ``itemsize`` bytes a number on
    ``processors`` multiprocessors.

    All hidden states (up to 64) in one program, so that each row of the matrix is read once; 256
    contiguous bytes of a row at a time, fewer where those divide d; tokens few enough a program
    that every multiprocessor has two, where the union is large enough for that.
    """
    block = min(64, max(16, power_of_two(rows)))
    ids = 64
    while ids > 16 and -(-count // ids) * -(-rows // block) < 2 * processors:
        ids //= 2
    d = 256 // itemsize
    while d > 32 and hidden_size % d:
        d //= 2
    return Tile(block, ids, d)


def kernel_runs(device: torch.device) -> bool:
    """Whether the Triton kernel can run there: where triton is installed, on CUDA (or ROCm), or
    anywhere with ``TRITON_INTERPRET=1``."""
    return (device.type == "cuda" or _interpreted()) and importlib.util.find_spec(
        "triton"
    ) is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def gathered_logits(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Selects and multiplies in one Triton kernel: float32 logits [n, len(ids)] of ``hidden`` [n,
    d] and ``weight`` [vocab, d], both contiguous and of one dtype, ``ids`` int64, ``bias`` [vocab];
    sums are float32. Nothing is checked.

    Tensors lie on CUDA, or on the CPU under Triton's interpreter (``TRITON_INTERPRET=1``). ``tile``
    overrides :func:`tile_for`.
    """
    (n, hidden_size), count = hidden.shape, len(ids)
    out = torch.empty(n, count, dtype=torch.float32, device=weight.device)
    if not n or not count:
        return out
    if tile is None:
        tile = tile_for(n, count, hidden_size, weight.element_size(), _processors(weight.device))
    kernel = gathered_kernel(_interpreted())
    grid = (-(-count // tile.ids), -(-n // tile.rows))
    with (
        torch.cuda.device(weight.device)
        if weight.device.type == "cuda"
        else contextlib.nullcontext()
    ):
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
            RAGGED=hidden_size % tile.d != 0,
            WIDEN=_interpreted()
            and weight.dtype == torch.bfloat16,  # the interpreter has no bfloat16 arithmetic
            ROWS=tile.rows,
            IDS=tile.ids,
            D=tile.d,
            num_stages=tile.stages,
            num_warps=tile.warps,
        )
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    return (
        int(torch.cuda.get_device_properties(device).multi_processor_count)
        if device.type == "cuda"
        else 1
    )


@functools.cache
def gathered_kernel(interpreted: bool) -> Any:
    """The kernel of :func:`gathered_logits`, which Triton compiles when it is first launched.
    ``interpreted`` only keeps the interpreter's kernel apart: Triton reads ``TRITON_INTERPRET``
    when a kernel is declared."""
    try:
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise PairError(
            "the gathered head's kernel needs triton, which is not installed; install it or choose "
            "another way"
        ) from error

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
        RAGGED: tl.constexpr,
        WIDEN: tl.constexpr,
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
        for at in range(0, hidden_size, D):
            if RAGGED:
                within = inner < hidden_size - at
                x = tl.load(left, mask=real[:, None] & within[None, :], other=0.0)
                w = tl.load(right, mask=wanted[None, :] & within[:, None], other=0.0)
            else:
                x = tl.load(left, mask=real[:, None], other=0.0)
                w = tl.load(right, mask=wanted[None, :], other=0.0)
            if WIDEN:
                x, w = x.to(tl.float32), w.to(tl.float32)
            total = tl.dot(x, w, total, input_precision="ieee")
            left += D
            right += D
        if HAS_BIAS:
            total += tl.load(bias + token, mask=wanted, other=0.0).to(tl.float32)[None, :]
        place = out + rows[:, None].to(tl.int64) * count + columns[None, :]
        tl.store(place, total, mask=real[:, None] & wanted[None, :])

    return triton.jit(gathered)
