"""The element-wise work of a Llama layer in Triton, one launch each: a residual added and normed,
heads turned by rotary embedding with keys and values written into the slot cache, a gated
activation. :mod:`runtime.fused` has the same in torch.

Weights and sizes are arguments, so nothing is compiled anew for another layer or number of tokens.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from spectune.runtime.cuda.launch import interpreted, on, power_of_two

BLOCK: Final = 1024
"""Numbers that a program of the activation takes."""
Norm = tuple[Tensor, float]
"""The weight of an RMS norm and its epsilon."""


class Kernels(NamedTuple):
    add_norm: Any
    rotate_and_write: Any
    swiglu: Any


def add_norm(x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """``residual + x`` (``x`` without one) normed, and as it is; [n, d] each."""
    x, (n, size) = x.contiguous(), x.shape
    normed, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    added = x if residual is None else residual.contiguous()
    tensors = (x, added, norm[0], normed, total)
    fixed = {"HAS_RESIDUAL": residual is not None, "BLOCK": power_of_two(size)}
    warps = min(16, max(1, fixed["BLOCK"] // 512))
    with on(x.device):
        kernels(interpreted()).add_norm[n,](*tensors, size, norm[1], **fixed, num_warps=warps)
    return normed, total


def rotate_and_write(
    states: Tensor,
    rotary: tuple[Tensor, Tensor],
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Queries [H, n, D] of ``states`` [n, (H + 2 Hkv) * D], turned by ``rotary``, cosines and sines
    [n, D] each; keys, turned, and values are written to ``slots`` (int64 [n]) of ``keys`` and
    ``values`` [Hkv, slots, D], laid out alike. ``norms``: of queries and keys, a head at a time,
    before they are turned."""
    n, (kv_heads, _, dim) = len(states), keys.shape
    query = states.new_empty(heads, n, dim)
    (query_norm, eps), (key_norm, _) = norms or ((states, 0.0), (states, 0.0))
    tensors = (states, *rotary, slots, query_norm, key_norm, query, keys, values)
    sizes = (n, heads, kv_heads, dim, *keys.stride()[:2], eps)
    fixed = {"HAS_NORMS": norms is not None, "DIM": power_of_two(dim)}
    with on(states.device):
        kernels(interpreted()).rotate_and_write[n, heads + 2 * kv_heads](
            *tensors, *sizes, **fixed, num_warps=1
        )
    return query


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [n, d] of ``gate_up`` [n, 2 d]."""
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n, size)
    with on(gate_up.device):
        kernels(interpreted()).swiglu[n, -(-size // BLOCK)](gate_up, out, size, BLOCK=BLOCK)
    return out


@functools.cache
def kernels(interpreted: bool) -> Kernels:
    """The kernels; ``interpreted`` keeps the interpreter's apart."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # fmt: off
    def add_norm(  # type: ignore[no-untyped-def]
        x, residual, weight, normed, total, size, eps, HAS_RESIDUAL: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        # fmt: on
        columns = tl.arange(0, BLOCK)
        inside = columns < size
        place = tl.program_id(0) * size + columns
        row = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            row += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            rounded = row.to(total.dtype.element_ty)
            tl.store(total + place, rounded, mask=inside)
            row = rounded.to(tl.float32)  # the norm is of the sum as it is stored
        row = row * tl.rsqrt(tl.sum(row * row, 0) / size + eps)
        row = row.to(normed.dtype.element_ty).to(tl.float32)
        row *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + place, row, mask=inside)

    # fmt: off
    def rotate_and_write(  # type: ignore[no-untyped-def]
        states, cos, sin, slots, query_norm, key_norm, query, keys, values, n, heads, kv_heads,
        dim, kv_head, kv_slot, eps, HAS_NORMS: tl.constexpr, DIM: tl.constexpr,
    ):
        # fmt: on
        token, head = tl.program_id(0), tl.program_id(1)
        slot = tl.load(slots + token) * kv_slot
        dims = tl.arange(0, DIM)
        inside = dims < dim
        half = dim // 2
        start = states + (token * (heads + 2 * kv_heads) + head) * dim
        if head >= heads + kv_heads:
            value = tl.load(start + dims, mask=inside, other=0.0)
            place = (head - heads - kv_heads).to(tl.int64) * kv_head + slot
            tl.store(values + place + dims, value, mask=inside)
        else:
            other = tl.where(dims < half, dims + half, dims - half)
            x = tl.load(start + dims, mask=inside, other=0.0).to(tl.float32)
            y = tl.load(start + other, mask=inside, other=0.0).to(tl.float32)
            if HAS_NORMS:
                norm = query_norm if head < heads else key_norm
                scale = tl.rsqrt(tl.sum(x * x, 0) / dim + eps)
                x *= scale * tl.load(norm + dims, mask=inside, other=0.0).to(tl.float32)
                y *= scale * tl.load(norm + other, mask=inside, other=0.0).to(tl.float32)
            y = tl.where(dims < half, -y, y)
            x *= tl.load(cos + token * dim + dims, mask=inside, other=0.0).to(tl.float32)
            x += y * tl.load(sin + token * dim + dims, mask=inside, other=0.0).to(tl.float32)
            if head < heads:
                tl.store(query + (head * n + token) * dim + dims, x, mask=inside)
            else:
                place = (head - heads).to(tl.int64) * kv_head + slot
                tl.store(keys + place + dims, x, mask=inside)

    def swiglu(gate_up, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < size
        gate = gate_up + tl.program_id(0) * 2 * size + columns
        x = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(gate + size, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + tl.program_id(0) * size + columns, x / (1.0 + tl.exp(-x)) * y, mask=inside)

    counts = ["n", "heads", "kv_heads"]
    rotate = triton.jit(rotate_and_write, do_not_specialize=counts)
    return Kernels(triton.jit(add_norm), rotate, triton.jit(swiglu))
