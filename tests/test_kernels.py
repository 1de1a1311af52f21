"""Triton kernels of attention and of a layer's element-wise work: under Triton's interpreter
against the formulas in float64, and compiled for GPUs."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import tiny_model
from torch import Tensor

from spectune.runtime import fused
from spectune.runtime.attention import seat_mask, slot_attention
from spectune.runtime.cache import PassTokens, Seats
from spectune.runtime.cuda import layers
from spectune.runtime.cuda.growth import growth_kernels
from spectune.runtime.cuda.seat_attention import seat_attention, seat_kernel, tile_rows
from spectune.runtime.cuda.skinny import LAUNCH as LAUNCH_SKINNY
from spectune.runtime.cuda.skinny import skinny, skinny_kernel, tile_for
from spectune.runtime.cuda.split_attention import (
    LAUNCH,
    attention_kernels,
    attention_runs,
    blocks_for,
    split_attention,
)
from spectune.runtime.drafts.tree_program import choice_constants, level_constants, warps_for
from spectune.runtime.models import CausalModel

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="triton is published for Linux only"
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3}
SLOTS = 320


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close(ours: Tensor, exact: Tensor) -> None:
    assert ours.shape == exact.shape
    error = (ours.double() - exact.double()).abs().max() / exact.abs().max().clamp_min(1e-9)
    assert error <= TOLERANCE[ours.dtype]  # also false for NaN


def tree_mask(n: int, start: int) -> Tensor:
    """A random tree of n nodes in the slots behind ``start`` tokens: each sees the tokens, its
    ancestors and itself. Bool [n, SLOTS]."""
    generator = torch.Generator().manual_seed(n)
    mask = torch.zeros(n, SLOTS, dtype=torch.bool)
    mask[:, :start] = True
    for node in range(n):
        if node:
            parent = int(torch.randint(node, (), generator=generator))
            mask[node] = mask[parent]
        mask[node, start + node] = True
    return mask


def exact_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[n, H, D] in float64."""
    groups = query.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(groups, 0) for x in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values).transpose(0, 1)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 1, 64), (2, 2, 128), (6, 2, 80)], ids=str
)
@pytest.mark.parametrize(
    ("n", "start", "dtype"),
    [
        (1, 0, torch.float32),  # the first token of all
        (1, 255, torch.float16),  # all blocks are full
        (8, 66, torch.float32),  # the last block is nearly empty
        (61, 131, torch.float32),
    ],
    ids=str,
)
def test_attention_over_a_tree_reads_what_it_sees_and_no_slot_beyond_the_length(
    n: int, start: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    """Slots behind the tree hold NaN, and the mask says that they are seen."""
    query, cache = draw(heads, n, dim, dtype=dtype), draw(2, kv_heads, SLOTS, dim, dtype=dtype)
    mask, stop = tree_mask(n, start), start + n
    exact = exact_attention(query, *cache[:, :, :stop], mask[:, :stop])
    cache[:, :, stop:], mask[:, stop:] = torch.nan, True
    assert attention_runs(n, *cache)
    ours = split_attention(query, *cache, mask, torch.tensor([stop]), dim**-0.5)
    assert_close(ours, exact)


@pytest.mark.usefixtures("interpreted")
def test_queries_and_caches_may_be_views_and_a_query_that_sees_nothing_gets_zeros() -> None:
    query, cache = draw(3, 4, 64).transpose(0, 1), draw(2, 96, 2, 64).transpose(1, 2)
    mask = torch.zeros(3, 128, dtype=torch.bool)[:, :96]
    mask[:2, 17:40] = True
    ours = split_attention(query, *cache, mask, torch.tensor([96]), 64**-0.5)
    assert_close(ours[:2], exact_attention(query[:, :2], *cache, mask[:2]))
    assert not ours[2].any()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 1, 64), (6, 2, 80)], ids=str)
def test_rows_of_several_requests_read_their_own_slots(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """A chain, a tree of several tiles, a first token and one behind 200: all else holds NaN."""
    rows, of_tile = list[tuple[int, int, int]](), tile_rows(heads // kv_heads)
    cache = torch.full((2, kv_heads, SLOTS, dim), torch.nan, dtype=dtype)
    n, tiles, mask = 0, list[list[int]](), torch.zeros(80, 61, dtype=torch.bool)
    for count, start, told in ((3, 0, 0), (37, 3, 20), (1, 61, 61), (1, 70, 270)):
        cache[:, :, start : told + count] = draw(2, kv_heads, told + count - start, dim).to(dtype)
        tree = tree_mask(count, 0) if count > 3 else torch.ones(count, SLOTS).tril().bool()
        mask[n : n + count, :count] = tree[:, :count]
        for first in range(0, count, of_tile):
            size = min(of_tile, count - first)
            tiles.append([n + first, size, start, told, told + count])
        rows += [(start, told, count)] * count
        n += count
    seats = Seats(torch.tensor([*tiles, [0] * 5]), mask)
    query, real = draw(heads, n + 3, dim, dtype=dtype), torch.nan_to_num(cache)
    seen = seat_mask(seats, n + 3, SLOTS)
    for row, (start, told, count) in enumerate(rows):
        expected = torch.zeros(SLOTS, dtype=torch.bool)
        expected[start:told] = True
        expected[told : told + count] = mask[row, :count]
        assert torch.equal(seen[row], expected)
    ours = seat_attention(query, *cache, seats, dim**-0.5)
    assert_close(ours[:n], exact_attention(query[:, :n], *real, seen[:n]))
    assert not ours[n:].any()


@pytest.mark.usefixtures("interpreted")
def test_the_length_of_a_pass_is_of_no_other() -> None:
    """Of one by the code of transformers, as GPT-2's are, even if it fails."""
    model = CausalModel(tiny_model("gpt2", 60), "target")
    model.reserve(16)
    ids, mask = torch.arange(2), torch.ones(2, 8, dtype=torch.bool)
    tokens = PassTokens(ids, ids, ids, mask, 8, length=torch.tensor([2]))
    query, keys, all_seen = draw(1, 2, 3, 16), draw(1, 2, 8, 16), mask[:1].expand(3, -1)
    exact = exact_attention(query[0], keys[0], keys[0], all_seen)
    for ids_of_pass in (ids, ids + 10**6):
        with nullcontext() if ids_of_pass is ids else pytest.raises(IndexError):
            model.forward(tokens._replace(ids=ids_of_pass))
        seen, _ = slot_attention(model.model, query, keys, keys, all_seen[None, None])
        assert_close(seen[0], exact)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "dim", "normed"), [(1, 64, True), (9, 80, True), (8, 128, False)])
def test_heads_are_turned_and_keys_and_values_written(
    n: int, dim: int, normed: bool, dtype: torch.dtype
) -> None:
    """As plain torch does it in float64; other slots stay as they are."""
    heads, kv_heads = 4, 2
    states, (cos, sin) = draw(n, 8 * dim, dtype=dtype), draw(2, n, dim, dtype=dtype)
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:n]
    cache = draw(2, kv_heads, 50, dim, dtype=dtype)
    exact = cache.double()
    norms = [(draw(dim + i, dtype=dtype)[:dim], 1e-6) for i in (0, 1)] if normed else None
    wide = [(weight.double(), eps) for weight, eps in norms] if norms else None
    query = layers.rotate_and_write(states, (cos, sin), slots, *cache, heads, norms)
    expected = fused.rotate_and_write(
        states.double(), (cos.double(), sin.double()), slots, *exact, heads, wide
    )
    assert_close(query, expected)
    assert_close(cache, exact)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [48, 1024, 1200])
def test_norms_of_sums_and_gated_activations(size: int, dtype: torch.dtype) -> None:
    x, residual, gate_up = draw(3, size, dtype=dtype), draw(3, size + 1), draw(3, 2 * size)
    residual, gate_up = residual[:, 1:].to(dtype).contiguous(), gate_up.to(dtype)
    norm = draw(size, dtype=dtype), 1e-5
    for before in (None, residual, residual[:1].expand(3, -1)):
        ours, exact = layers.add_norm(x, before, norm), fused.add_norm(x, before, norm)
        assert_close(ours[0], exact[0])
        assert torch.equal(ours[1], exact[1])
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(layers.swiglu(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "columns", "size"), [(1, 40, 48), (9, 70, 256), (64, 33, 160)])
def test_a_product_takes_in_what_stands_around_it(
    n: int, columns: int, size: int, dtype: torch.dtype
) -> None:
    """As plain torch does it in float64."""
    x, wide = draw(n, size, dtype=dtype), draw(n, 2 * size, dtype=dtype)
    weight, bias = draw(columns, size, dtype=dtype), draw(columns, dtype=dtype)
    residual, norm = draw(n, columns, dtype=dtype), (draw(size + 1, dtype=dtype)[1:], 1e-5)
    exact = weight.double().T
    normed = fused.rms_norm(x.double(), (norm[0].double(), norm[1]))
    assert_close(skinny(x, (weight, bias), norm=norm), normed @ exact + bias.double())
    gate, up = wide.double().chunk(2, -1)
    product = (torch.nn.functional.silu(gate) * up) @ exact
    ours = skinny(wide, (weight, None), gated=True, residual=residual)
    assert_close(ours, residual.double() + product)
    assert_close(skinny(x, (weight, None)), x.double() @ exact)


# -- compiled for GPUs -----------------------------------------------------------------------------


def compiled(
    kernel: Any, capability: int, kinds: dict[str, str], fixed: dict[str, Any], **options: int
) -> Any:
    """A kernel compiled for a GPU, which Triton's compiler needs none for. Pointers and sizes are
    multiples of 16, numbers of tokens and heads are not."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    kinds = dict.fromkeys(names, "i32") | kinds | dict.fromkeys(fixed, "constexpr")
    counts = ["n", "groups", "heads", "kv_heads"]
    counts += [each.name for each in kernel.params if each.do_not_specialize]
    of_16 = [x for x in names if kinds[x][0] == "*" or (kinds[x] == "i32" and x not in counts)]
    source = ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in of_16},
    )
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(
    ("dtype", "dim", "rows", "capability"),
    [
        ("bf16", 128, 4, 90),
        ("bf16", 128, 244, 90),
        ("fp16", 64, 32, 80),
        ("bf16", 256, 244, 90),
        ("fp32", 128, 244, 90),
    ],
)
def test_attention_compiles_for_gpus(dtype: str, dim: int, rows: int, capability: int) -> None:
    """Low precision runs on tensor cores, keys are copied 16 bytes at a time ahead of their use,
    and nothing spills."""
    split, join = attention_kernels(False)
    blocks = blocks_for(rows, 8, dim * (4 if dtype == "fp32" else 2), 132)
    sizes = {"SIZE": dim, "DIM": dim, "SPLITS": blocks["SPLITS"]}
    kinds = dict.fromkeys(("query", "keys", "values"), f"*{dtype}") | {"scale": "fp32"}
    kinds |= {"mask": "*u8", "length": "*i64", "partial": "*fp32", "weight": "*fp32"}
    made = compiled(split, capability, kinds, blocks | sizes, **LAUNCH)
    # What a block may have on every GPU from compute capability 8.0 on.
    assert made.metadata.shared <= 99 * 1024
    ptx = made.asm["ptx"]
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", ptx)
    assert ("mma" in ptx) == (dtype != "fp32")
    assert ".local" not in ptx
    kinds = {"partial": "*fp32", "weight": "*fp32", "out": f"*{dtype}"}
    for pairs in (1, 8):
        made = compiled(join, capability, kinds, sizes | {"PAIRS": pairs}, **LAUNCH)
        assert ".local" not in made.asm["ptx"]


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(
    ("dtype", "dim", "groups"), [("bf16", 128, 4), ("fp16", 64, 8), ("bf16", 256, 1)]
)
def test_attention_of_several_requests_compiles_for_gpus(dtype: str, dim: int, groups: int) -> None:
    """On tensor cores, keys copied ahead; nothing spills."""
    sizes = {"SIZE": dim, "DIM": dim, "SPLITS": 4}
    tile = {"TILE": tile_rows(groups), "ROWS": 64, "KEYS": 64 if dim <= 128 else 32}
    kinds = dict.fromkeys(("query", "keys", "values"), f"*{dtype}") | {"scale": "fp32"}
    kinds |= {"mask": "*u8", "tiles": "*i64", "partial": "*fp32", "weight": "*fp32"}
    made = compiled(seat_kernel(False), 90, kinds, tile | sizes, **LAUNCH)
    ptx = made.asm["ptx"]
    assert made.metadata.shared <= 99 * 1024
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", ptx)
    assert "mma" in ptx
    assert ".local" not in ptx


@pytest.mark.usefixtures("compiling")
def test_the_work_between_products_compiles_for_gpus() -> None:
    """For the sizes of Llama 3.1 8B; rows are read 16 bytes at a time."""
    kernels = layers.kernels(False)
    kinds = dict.fromkeys(("x", "residual", "weight", "normed", "total"), "*bf16")
    fixed = {"HAS_RESIDUAL": True, "BLOCK": 4096}
    made = compiled(kernels.add_norm, 90, kinds | {"eps": "fp32"}, fixed, num_warps=8)
    assert "ld.global.v4.b32" in made.asm["ptx"]
    names = ("states", "cos", "sin", "query_norm", "key_norm", "query", "keys", "values")
    kinds = dict.fromkeys(names, "*bf16") | {"slots": "*i64", "eps": "fp32"}
    compiled(kernels.rotate_and_write, 90, kinds, {"HAS_NORMS": True, "DIM": 128}, num_warps=1)
    kinds = dict.fromkeys(("gate_up", "out"), "*bf16")
    made = compiled(kernels.swiglu, 90, kinds, {"BLOCK": layers.BLOCK}, num_warps=4)
    assert "ld.global.v4.b32" in made.asm["ptx"]


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(("rows", "columns"), [(1, 4096), (64, 28672)])
def test_products_of_few_rows_compile_for_gpus(rows: int, columns: int) -> None:
    """For the sizes of Llama 3.1 8B, on tensor cores; nothing spills."""
    tensors = ("x", "weight", "bias", "scale", "residual", "out")
    kinds = dict.fromkeys(tensors, "*bf16") | {"eps": "fp32"}
    for gated in (False, True):
        fixed = {"HAS_NORM": not gated, "GATED": gated, "HAS_RESIDUAL": gated, "HAS_BIAS": False}
        fixed |= {"D": 128, **tile_for(rows, columns, 132)}
        made = compiled(skinny_kernel(False), 90, kinds, fixed, **LAUNCH_SKINNY)
        ptx = made.asm["ptx"]
        assert made.metadata.shared <= 227 * 1024
        assert "mma" in ptx
        assert ".local" not in ptx


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(("width", "coupled"), [(1, True), (10, False), (32, True)])
def test_the_growth_of_a_tree_compiles_for_gpus(width: int, coupled: bool) -> None:
    """Of eight levels, up to the widest; nothing spills."""
    sizes = level_constants(width, width, width, coupled=coupled)
    choice = choice_constants(width + 7 * width**2)
    of_choice, of_level = warps_for(choice["SIZE"]), warps_for(sizes["ROWS"] * sizes["WIDE"])
    for kernel, fixed, warps in zip(
        growth_kernels(False), (sizes, choice), (of_level, of_choice), strict=True
    ):
        tables = {"scores": "*fp32", "logs": "*fp64", "log_sums": "*fp64"}
        names = ("tokens", "there", "numbers", "weights", "pool", "front", "out", *tables)
        kinds = {n: tables.get(n, "*i64") for n in names if n in kernel.arg_names}
        assert ".local" not in compiled(kernel, 90, kinds, fixed, num_warps=warps).asm["ptx"]
