"""The Triton kernel of the gathered head (DynaSpec, algorithm 1, line 13: FUSED_INDEX_GEMM):
selects rows of an output matrix and multiplies at once, so that no sub-matrix is written. It runs
on CUDA, and anywhere under Triton's interpreter."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import torch
from torch import Tensor

from spectune.runtime.cuda.launch import interpreted, kernels_run, on, power_of_two, processors

LAUNCH: Final = {"num_stages": 4, "num_warps": 4}


def tile_for(rows: int, count: int, hidden_size: int, itemsize: int, num_processors: int) -> Any:
    """What one program multiplies of ``rows`` hidden states and ``count`` tokens of ``itemsize``
    bytes a number: ROWS hidden states (up to 64, so that each row of the matrix is read once) with
    IDS tokens, few enough that every multiprocessor has two programs, D numbers (256 contiguous
    bytes) at a time."""
    block, programs = min(64, max(16, power_of_two(rows))), 2 * num_processors
    ids = next((i for i in (64, 32) if -(-count // i) * -(-rows // block) >= programs), 16)
    return {"ROWS": block, "IDS": ids, "D": math.gcd(hidden_size, 256 // itemsize)}


def kernel_runs(weight: Tensor) -> bool:
    """Whether the kernel can evaluate an output matrix [vocab, d] where it lies: d is a multiple of
    16, and not in float64, for it sums in float32."""
    fits = weight.shape[1] % 16 == 0 and weight.dtype != torch.float64
    return fits and kernels_run(weight.device)


def gathered_logits(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """Selects and multiplies in one Triton kernel: float32 logits [n, len(ids)] of ``hidden`` [n,
    d] and ``weight`` [vocab, d], both contiguous and of one dtype, ``ids`` int64, ``bias`` [vocab];
    sums are float32. Nothing is checked.

    Tensors lie on CUDA, or on the CPU under Triton's interpreter (``TRITON_INTERPRET=1``), which
    has no bfloat16 arithmetic."""
    (n, hidden_size), count, device = hidden.shape, len(ids), weight.device
    out = torch.empty(n, count, dtype=torch.float32, device=device)
    if not n or not count:
        return out
    tile = tile_for(n, count, hidden_size, weight.element_size(), processors(device))
    grid = (-(-count // tile["IDS"]), -(-n // tile["ROWS"]))
    tensors = (hidden, weight, ids.contiguous(), ids if bias is None else bias, out)
    with on(device):
        gathered_kernel(interpreted())[grid](
            *tensors, n, count, hidden_size, HAS_BIAS=bias is not None, **tile, **LAUNCH
        )
    return out


@functools.cache
def gathered_kernel(in_interpreter: bool) -> Any:
    """The kernel of :func:`gathered_logits`, compiled once for any ``n`` and ``count``;
    ``in_interpreter`` keeps the interpreter's apart."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # fmt: off
    def gathered(  # type: ignore[no-untyped-def]
        hidden, weight, ids, bias, out, n, count, hidden_size, HAS_BIAS: tl.constexpr,
        ROWS: tl.constexpr, IDS: tl.constexpr, D: tl.constexpr,
    ):
        # fmt: on
        columns = tl.program_id(0) * IDS + tl.arange(0, IDS)
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_token = columns < count
        is_row = rows < n
        token = tl.load(ids + columns, mask=is_token, other=0)
        inner = tl.arange(0, D)
        of_hidden = hidden + rows[:, None] * hidden_size + inner[None, :]
        of_weight = weight + token[None, :] * hidden_size + inner[:, None]
        total = tl.full((ROWS, IDS), 0.0, tl.float32)
        for _ in range(0, hidden_size, D):
            x = tl.load(of_hidden, mask=is_row[:, None], other=0.0)
            w = tl.load(of_weight, mask=is_token[None, :], other=0.0)
            total = tl.dot(x, w, total, input_precision="ieee")
            of_hidden += D
            of_weight += D
        if HAS_BIAS:
            total += tl.load(bias + token, mask=is_token, other=0.0).to(tl.float32)[None, :]
        place = out + rows[:, None].to(tl.int64) * count + columns[None, :]
        tl.store(place, total, mask=is_row[:, None] & is_token[None, :])

    return triton.jit(gathered, do_not_specialize=["n", "count"])
