"""The element-wise work of a Llama layer in Triton, one launch each: a residual added and normed,
heads turned by rotary embedding with keys and values written into the slot cache, a gated
activation. The same functions in torch are :mod:`runtime.fused`'s.

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
    weight, eps = norm
    n, size = x.shape
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = power_of_two(size)
    with on(x.device):
        kernels(interpreted()).add_norm[(n,)](
            x,
            x if residual is None else residual,
            weight,
            normed,
            total,
            size,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
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
    ``values`` [Hkv, slots, D]. ``norms``: of queries and keys, a head at a time, before they are
    turned."""
    (n, row), (kv_heads, _, dim), (cos, sin) = states.shape, keys.shape, rotary
    query = states.new_empty(heads, n, dim)
    (query_norm, eps), (key_norm, _) = norms or ((cos, 0.0), (cos, 0.0))
    with on(states.device):
        kernels(interpreted()).rotate_and_write[(n, heads + 2 * kv_heads)](
            states,
            cos,
            sin,
            slots,
            query_norm,
            key_norm,
            query,
            keys,
            values,
            n,
            heads,
            kv_heads,
            dim,
            row,
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            eps,
            HAS_NORMS=norms is not None,
            DIM=power_of_two(dim),
            num_warps=1,
        )
    return query


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [n, d] of ``gate_up`` [n, 2 d]."""
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n, size)
    with on(gate_up.device):
        kernels(interpreted()).swiglu[(n, -(-size // BLOCK))](gate_up, out, size, BLOCK=BLOCK)
    return out


@functools.cache
def kernels(interpreted: bool) -> Kernels:
    """The kernels. ``interpreted`` only keeps the interpreter's apart: Triton reads
    ``TRITON_INTERPRET`` when a kernel is declared."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def add_norm(  # type: ignore[no-untyped-def]
        x,
        residual,
        weight,
        normed,
        total,
        size,
        eps,
        HAS_RESIDUAL: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        columns = tl.arange(0, BLOCK)
        inside = columns < size
        place = tl.program_id(0) * size + columns
        row = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            row += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            # The norm is of the sum as it is kept.
            kept = row.to(total.dtype.element_ty)
            tl.store(total + place, kept, mask=inside)
            row = kept.to(tl.float32)
        row = row * tl.rsqrt(tl.sum(row * row, 0) / size + eps)
        row = row.to(normed.dtype.element_ty).to(tl.float32)
        row *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + place, row, mask=inside)

    def rotate_and_write(  # type: ignore[no-untyped-def]
        states,
        cos,
        sin,
        slots,
        query_norm,
        key_norm,
        query,
        keys,
        values,
        n,
        heads,
        kv_heads,
        dim,
        row,
        key_head,
        key_slot,
        value_head,
        value_slot,
        eps,
        HAS_NORMS: tl.constexpr,
        DIM: tl.constexpr,
    ):
        token, head = tl.program_id(0), tl.program_id(1)
        slot = tl.load(slots + token)
        dims = tl.arange(0, DIM)
        inside = dims < dim
        half = dim // 2
        start = states + token * row + head * dim
        if head >= heads + kv_heads:
            value = tl.load(start + dims, mask=inside, other=0.0)
            place = (head - heads - kv_heads).to(tl.int64) * value_head + slot * value_slot
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
                place = (head - heads).to(tl.int64) * key_head + slot * key_slot
                tl.store(keys + place + dims, x, mask=inside)

    def swiglu(gate_up, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < size
        gate = gate_up + tl.program_id(0) * 2 * size + columns
        x = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(gate + size, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + tl.program_id(0) * size + columns, x / (1.0 + tl.exp(-x)) * y, mask=inside)

    free = ["n", "heads", "kv_heads"]
    return Kernels(
        triton.jit(add_norm),
        triton.jit(rotate_and_write, do_not_specialize=free),
        triton.jit(swiglu),
    )
