"""A product of few rows in Triton, with what stands before and behind it in a Llama layer: an RMS
norm or a gated activation of what is multiplied, a residual added to what comes out. So a layer is
four products, one rotation and one attention, and nothing is launched between them.

Off unless ``SPECTUNE_SKINNY=1``: no GPU has shown yet that it keeps up with the libraries.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any, Final

from torch import Tensor

from spectune.runtime.cuda.launch import interpreted, on, power_of_two, processors
from spectune.runtime.cuda.layers import Norm

SWITCH: Final = "SPECTUNE_SKINNY"
"""Environment variable; 1 lets fused passes of few tokens multiply by this kernel."""
MOST_ROWS: Final = 64
"""Of what is multiplied: more are better served by the libraries' kernels."""
LAUNCH: Final = {"num_stages": 4, "num_warps": 4}


def skinny_on() -> bool:
    """Whether the kernel is asked for."""
    return os.environ.get(SWITCH, "0") == "1"


def skinny_runs(weight: Tensor) -> bool:
    """Whether the kernel can multiply by ``weight`` [m, k]: it reads whole blocks of k numbers."""
    return _block(weight.shape[1], weight.element_size()) >= 16 and weight.is_contiguous()


def _block(size: int, itemsize: int) -> int:
    """Numbers of a row that are read at once: 256 bytes, or what divides the row."""
    return math.gcd(size, 256 // itemsize)


def tile_for(rows: int, columns: int, multiprocessors: int) -> dict[str, int]:
    """What a program computes: ROWS rows, all there are, of COLUMNS columns, few enough that every
    multiprocessor has two programs."""
    wide = next((c for c in (64, 32) if -(-columns // c) >= 2 * multiprocessors), 16)
    return {"ROWS": max(16, power_of_two(rows)), "COLUMNS": wide}


def skinny(
    x: Tensor,
    product: tuple[Tensor, Tensor | None],
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """``residual + f(x) @ weight.T + bias`` [n, m] of n rows, at most :data:`MOST_ROWS`, and a
    ``product``'s weight [m, k] and bias [m]. f is the RMS norm by ``norm`` of ``x`` [n, k], or
    where it is ``gated`` ``silu(x[:, :k]) * x[:, k:]`` of ``x`` [n, 2 k], or nothing.

    Sums are float32; f(x) and the product are rounded to the dtype of ``x``, as they are where each
    is a kernel of its own. Nothing is checked."""
    weight, bias = product
    (columns, size), n = weight.shape, len(x)
    x, out = x.contiguous(), x.new_empty(n, columns)
    tile = tile_for(n, columns, processors(x.device))
    scale, eps = norm or (weight, 0.0)
    added = out if residual is None else residual.contiguous()
    tensors = (x, weight, weight if bias is None else bias, scale, added, out)
    block = _block(size, weight.element_size())
    fixed = {"HAS_BIAS": bias is not None, "HAS_NORM": norm is not None, "GATED": gated}
    fixed["HAS_RESIDUAL"] = residual is not None
    with on(x.device):
        skinny_kernel(interpreted())[-(-columns // tile["COLUMNS"]),](
            *tensors, n, columns, size, eps, D=block, **fixed, **tile, **LAUNCH
        )
    return out


@functools.cache
def skinny_kernel(in_interpreter: bool) -> Any:
    """The kernel of :func:`skinny`; ``in_interpreter`` keeps the interpreter's apart."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # fmt: off
    def kernel(  # type: ignore[no-untyped-def]
        x, weight, bias, scale, residual, out, n, columns, size, eps, HAS_BIAS: tl.constexpr,
        HAS_NORM: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, D: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):
        # fmt: on
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        row, inner = tl.arange(0, ROWS), tl.arange(0, D)
        is_column, is_row = column < columns, row < n
        dtype = out.dtype.element_ty
        wide = 2 * size if GATED else size
        of_x = x + row[:, None] * wide + inner[None, :]
        factor = tl.full((ROWS,), 1.0, tl.float32)
        if HAS_NORM:
            squares = tl.full((ROWS,), 0.0, tl.float32)
            for k in range(0, size, D):
                part = tl.load(of_x + k, mask=is_row[:, None], other=0.0).to(tl.float32)
                squares += tl.sum(part * part, 1)
            factor = tl.rsqrt(squares / size + eps)
        of_weight = weight + column[None, :].to(tl.int64) * size + inner[:, None]
        total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for k in range(0, size, D):
            w = tl.load(of_weight + k, mask=is_column[None, :], other=0.0)
            part = tl.load(of_x + k, mask=is_row[:, None], other=0.0)
            if HAS_NORM:
                by = tl.load(scale + k + inner).to(tl.float32)
                part = (part.to(tl.float32) * factor[:, None]).to(dtype).to(tl.float32)
                part = (part * by[None, :]).to(dtype)
            if GATED:
                up = tl.load(of_x + size + k, mask=is_row[:, None], other=0.0).to(tl.float32)
                gate = part.to(tl.float32)
                part = (gate / (1.0 + tl.exp(-gate)) * up).to(dtype)
            total = tl.dot(part, w, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        inside = is_row[:, None] & is_column[None, :]
        if HAS_RESIDUAL:
            total = total.to(dtype).to(tl.float32)
            total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, total, mask=inside)

    return triton.jit(kernel, do_not_specialize=["n"])
