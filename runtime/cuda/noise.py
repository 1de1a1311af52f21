"""The Triton kernels that add Gumbel noise to scores (:mod:`runtime.sampling`) without ever storing
it: one gives the perturbed scores, one the best column of each row. They run on CUDA, and anywhere
under Triton's interpreter.

The hash is :mod:`runtime.sampling`'s, and the noise is float64 until it is rounded to float32, so
that results are those of plain torch."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from spectune.runtime.cuda.launch import interpreted, on
from spectune.runtime.policies.splitmix import MULTIPLIERS, as_int64

BLOCK: Final = 2048
"""Columns that a program looks at at a time."""
WARPS: Final = 8


def perturbed(scores: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """``scores`` [n, size] plus noise, by ``keys`` int64 [n, 1] or [1, 1] of the rows' positions.
    ``ids`` int64 [size]: the tokens of the columns; None: all."""
    return _launch(scores, keys, ids, torch.empty_like(scores), choose=False)


def best(scores: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """The first of the best columns of :func:`perturbed`, int64 [n]."""
    out = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    return _launch(scores, keys, ids, out, choose=True)


def _launch(scores: Tensor, keys: Tensor, ids: Tensor | None, out: Tensor, choose: bool) -> Tensor:
    n, size = scores.shape
    if not n or not size:
        return out
    scores = scores.contiguous()
    with on(scores.device):
        fixed = constants(choose=choose, one_key=len(keys) == 1, listed=ids is not None)
        noise_kernel(interpreted())[n, 1 if choose else -(-size // BLOCK)](
            scores, keys, keys if ids is None else ids, out, size, **fixed, num_warps=WARPS
        )
    return out


def constants(*, choose: bool, one_key: bool, listed: bool) -> dict[str, int]:
    """What the kernel is compiled for."""
    c1, c2, c3 = map(as_int64, MULTIPLIERS)
    kind = {"CHOOSE": choose, "ONE_KEY": one_key, "LISTED": listed}
    return {**kind, "BLOCK": BLOCK, "C1": c1, "C2": c2, "C3": c3}


@functools.cache
def noise_kernel(interpreted: bool) -> Any:
    """The kernel; ``interpreted`` keeps the interpreter's apart."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # fmt: off
    def noisy(  # type: ignore[no-untyped-def]
        scores, keys, ids, out, size, CHOOSE: tl.constexpr, ONE_KEY: tl.constexpr,
        LISTED: tl.constexpr, BLOCK: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
        C3: tl.constexpr,
    ):
        # fmt: on
        row = tl.program_id(0)
        key = tl.load(keys + (0 if ONE_KEY else row))
        begin = row.to(tl.int64) * size
        highest = tl.full((), float("-inf"), scores.dtype.element_ty)
        place = tl.full((), 0, tl.int32)
        for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = column < size
            token = tl.load(ids + column, mask=there, other=0) if LISTED else column.to(tl.int64)
            x = token * C1 + key
            x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * C2
            x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * C3
            upper = ((x >> 32) & 0xFFFFFFFF).to(tl.float64)
            uniform = 1.0 - (upper + 0.5) * 2.3283064365386963e-10  # 2 ** -32
            noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
            score = tl.load(scores + begin + column, mask=there, other=float("-inf"))
            score += noise.to(score.dtype)
            if CHOOSE:
                top = tl.max(score, 0)
                place = tl.where(top > highest, start + tl.argmax(score, 0), place)
                highest = tl.maximum(top, highest)
            else:
                tl.store(out + begin + column, score, mask=there)
        if CHOOSE:
            tl.store(out + row, place.to(tl.int64))

    return triton.jit(noisy)
