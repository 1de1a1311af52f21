"""Whether vLLM's libraries compute on this GPU beside this torch: a line for each, ``ok`` or
``FAIL`` with the reason. About 30 s, most of it imports."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import torch

BEGAN = time.monotonic()
HEADS, GROUPS, DIM, BLOCK = 128, 32, 32, 16
"""Attention heads of the ballasted pair, and tokens of a block of the cache."""


def check(name: str, call: Callable[[], str]) -> None:
    """Prints what a check returns, or why it fails."""
    try:
        line = f"ok    {name}: {call()}"
    except BaseException as error:
        traceback.print_exc(limit=-4)
        line = f"FAIL  {name}: {error!r}"[:500]
    print(f"{time.monotonic() - BEGAN:6.1f} s  {line}", flush=True)


def near(ours: torch.Tensor, exact: torch.Tensor) -> str:
    error = float((ours.float() - exact.float()).abs().max() / exact.float().abs().max())
    if not error < 0.02:
        raise ValueError(f"relative error {error:.4f}")
    return f"relative error {error:.4f}"


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def platform() -> str:
    from vllm.platforms import current_platform

    name, capability = current_platform.get_device_name(), current_platform.get_device_capability()
    return f"{name} {capability}, torch {torch.__version__}"


def rms_norm() -> str:
    from vllm import _custom_ops

    x, weight = random(7, 4096), random(4096)
    out = torch.empty_like(x)
    _custom_ops.rms_norm(out, x, weight, 1e-6)
    return near(out, torch.nn.functional.rms_norm(x.float(), (4096,), weight.float(), 1e-6))


def silu_and_mul() -> str:
    x = random(7, 8192)
    out = torch.empty(7, 4096, device="cuda", dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(out, x)
    gate, up = x.float().chunk(2, -1)
    return near(out, torch.nn.functional.silu(gate) * up)


def rotary() -> str:
    from vllm import _custom_ops

    count = 5
    query, key = random(count, HEADS * DIM), random(count, GROUPS * DIM)
    before = query.view(count, HEADS, DIM).float().clone()
    steps = 1 / 10000 ** (torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(64.0), steps)
    cache = torch.cat((angles.cos(), angles.sin()), -1).cuda().bfloat16()
    positions = torch.arange(count, device="cuda")
    _custom_ops.rotary_embedding(positions, query, key, DIM, cache, True)
    cos, sin = cache[:count].float()[:, None].chunk(2, -1)
    a, b = before.chunk(2, -1)
    return near(query, torch.cat((a * cos - b * sin, b * cos + a * sin), -1).view(count, -1))


def attention() -> str:
    """A paged cache written by vLLM and read by FlashAttention 3, with several query tokens a
    request, as in a verification."""
    from vllm import _custom_ops
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    lengths, queries = [37, 5, 64], [9, 1, 4]
    torch.manual_seed(0)
    cache = torch.zeros(2, 32, BLOCK, GROUPS, DIM, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(12, device="cuda", dtype=torch.int32).view(3, 4) + 3
    scale, asked, exact = torch.ones((), device="cuda"), [], []
    for blocks, length, count in zip(table, lengths, queries, strict=True):
        key, value = random(2, length, GROUPS, DIM)
        at = torch.arange(length, device="cuda")
        slots = blocks[at // BLOCK].long() * BLOCK + at % BLOCK
        _custom_ops.reshape_and_cache_flash(
            key, value, cache[0], cache[1], slots, "auto", scale, scale
        )
        query = random(count, HEADS, DIM)
        mask = at[None] <= torch.arange(length - count, length, device="cuda")[:, None]
        keys, values = (
            x.transpose(0, 1).repeat_interleave(HEADS // GROUPS, 0).float() for x in (key, value)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1).float(), keys, values, mask
        )
        asked.append(query)
        exact.append(out.transpose(0, 1))
    query = torch.cat(asked)
    ends = torch.tensor([0, 9, 10, 14], device="cuda", dtype=torch.int32)
    out = torch.empty_like(query)
    flash_attn_varlen_func(
        query, cache[0], cache[1], max(queries), ends, max(lengths),
        seqused_k=torch.tensor(lengths, device="cuda", dtype=torch.int32),
        softmax_scale=DIM**-0.5, causal=True, block_table=table, out=out, fa_version=3,
    )  # fmt: skip
    return near(out, torch.cat(exact))


def imported(module: str) -> str:
    __import__(module)
    return module


check("platform", platform)
check("rms_norm", rms_norm)
check("silu_and_mul", silu_and_mul)
check("rotary", rotary)
check("the cache's writer and FlashAttention 3", attention)
check("server", lambda: imported("vllm.entrypoints.openai.api_server"))
check("runner", lambda: imported("vllm.v1.worker.gpu.model_runner"))
