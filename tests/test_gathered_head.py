"""Logits over a union of tokens: every way against the plain formula, the kernel in Triton's
interpreter and compiled."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from spectune.runtime.cuda import kernel as kernels
from spectune.runtime.cuda.kernel import (
    STAGES,
    WARPS,
    gathered_kernel,
    gathered_logits,
    kernel_runs,
    tile_for,
)
from spectune.runtime.gathered_head import GatheredHead, Way
from spectune.traces.errors import PolicyError

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
WAYS = [
    (dtype, way)
    for dtype in TOLERANCE
    for way in ("compiled", "gather", "full")
    if way != "compiled" or dtype == torch.float32
]
with_triton = pytest.mark.skipif(
    sys.platform != "linux", reason="triton is published for Linux only"
)
"""On Linux these tests fail where triton is missing: it is among the test dependencies."""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def draw(
    seed: int, n: int, vocab: int, d: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights and biases."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=g).to(dtype) for shape in ((n, d), (vocab, d), (vocab,))
    )
    return hidden, weight, bias


def forced(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, way: Way | None
) -> GatheredHead:
    """A head that goes one way; None: as it chooses."""
    head = GatheredHead(weight, bias)
    if way is not None:
        head.way = lambda count: way
    return head


def some(seed: int, vocab: int, count: int) -> torch.Tensor:
    """``count`` different token ids, ascending."""
    return (
        torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    )


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The formula, in float64 on the numbers as they are rounded."""
    out = (hidden.double()[:, None] * weight[ids].double()).sum(-1)
    return out if bias is None else out + bias[ids].double()


def assert_close(
    got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype = torch.float32
) -> None:
    assert (got.dtype, got.shape) == (torch.float32, wanted.shape)
    error = (got.double() - wanted).norm() / wanted.norm().clamp_min(1e-9)
    assert error <= TOLERANCE[dtype]  # also false for NaN


@pytest.mark.parametrize("shape", [(1, 7, 1, 3), (2, 301, 96, 133), (33, 40, 24, 13)], ids=str)
@pytest.mark.parametrize(("dtype", "way"), WAYS)
def test_unions_agree_with_the_plain_formula_and_read_nothing_else(
    dtype: torch.dtype, way: str, shape: tuple[int, int, int, int]
) -> None:
    n, vocab, d, count = shape
    hidden, weight, bias = draw(sum(shape), n, vocab, d, dtype)
    ids = some(n, vocab, count)
    weight[~torch.isin(torch.arange(vocab), ids)] = torch.nan
    for b in (None, bias):
        got = forced(weight, b, way=way).over(hidden, ids)
        assert_close(got, plain(hidden, weight, ids, b), dtype)


@pytest.mark.parametrize("way", ["compiled", "gather", "full", None])
def test_unions_of_any_size_and_order(way: str | None) -> None:
    hidden, weight, bias = draw(3, 2, 90, 32)
    head = forced(weight, bias, way=way)
    every = torch.arange(90)
    unions = [every[:0], every[89:], every, every[::3], every[:60], every[:5], every.flip(0)]
    found = [head.over(hidden, ids) for ids in unions]  # a later call overwrites no earlier result
    for got, ids in zip(found, unions, strict=True):
        assert_close(got, plain(hidden, weight, ids, bias))


def test_ways_and_tokens_that_are_not_there() -> None:
    hidden, weight, _ = draw(21, 2, 30, 8)
    low, head = GatheredHead(weight.bfloat16()), GatheredHead(weight)
    assert [low.way(14), low.way(16), head.way(14)] == ["gather", "full", "compiled"]
    for ids in ([3, 30], [-1, 3], [-(2**62)]):
        with pytest.raises(PolicyError, match=r"outside 0 \.\. 29"):
            forced(weight, way="compiled").over(hidden, torch.tensor(ids))
        for way in ("gather", "full"):
            with pytest.raises((IndexError, RuntimeError)):
                forced(weight, way=way).over(hidden, torch.tensor(ids))


# -- the kernel ------------------------------------------------------------------------------------


@with_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_agrees_with_the_plain_formula(dtype: torch.dtype) -> None:
    for n, vocab, d, count in ((1, 50, 16, 20), (17, 91, 48, 70), (3, 40, 64, 1), (70, 30, 16, 16)):
        hidden, weight, bias = draw(n, n, vocab, d, dtype)
        ids = some(n, vocab, count)
        weight[~torch.isin(torch.arange(vocab), ids)] = torch.nan
        for b in (None, bias):
            got = gathered_logits(hidden, weight, ids, bias=b)
            assert_close(got, plain(hidden, weight, ids, b), dtype)


@with_triton
@pytest.mark.usefixtures("interpreted")
def test_a_head_runs_its_kernel() -> None:
    hidden, weight, bias = draw(17, 2, 70, 32)
    head = forced(weight, bias, way="kernel")
    ids = torch.arange(70)[::4]
    assert_close(head.over(hidden, ids), plain(hidden, weight, ids, bias))
    assert_close(head.over(hidden.double()[:0], ids), torch.zeros(0, 18))
    assert_close(head.over(hidden, ids[:0]), torch.zeros(2, 0))
    low = weight.bfloat16()
    assert GatheredHead(low).way(20) == "kernel"
    assert GatheredHead(low[:, :24]).way(20) == "gather"  # no multiple of 16


@with_triton
@pytest.mark.parametrize(
    ("dtype", "hidden_size", "capability"), [("bf16", 2048, 90), ("fp32", 160, 80)]
)
def test_the_kernel_compiles_for_gpus(
    dtype: str, hidden_size: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's compiler needs no GPU. Rows are copied 16 bytes at a time and ahead of their use;
    low precision runs on tensor cores."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = gathered_kernel(False)
    tile = tile_for(10, 20000, hidden_size, 4 if dtype == "fp32" else 2, 132)
    fixed = {"HAS_BIAS": True, "ROWS": tile.rows, "IDS": tile.ids, "D": tile.d}
    kinds = dict.fromkeys(("hidden", "weight", "bias"), f"*{dtype}")
    kinds |= {"ids": "*i64", "out": "*fp32", "n": "i32", "count": "i32", "hidden_size": "i32"}
    kinds |= dict.fromkeys(fixed, "constexpr")
    names = kernel.arg_names
    of_16 = [name for name in names if kinds[name][0] == "*" or name in ("count", "hidden_size")]
    source = ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in of_16},
    )
    made = compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": WARPS, "num_stages": STAGES},
    )
    # What a block may have on every GPU from compute capability 8.0 on.
    assert made.metadata.shared <= 99 * 1024
    ptx = made.asm["ptx"]
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", ptx)
    assert ("mma.sync" in ptx) == (dtype != "fp32")
    assert ".local" not in ptx


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernel_runs(CPU, 64)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert not kernel_runs(torch.device("cuda"), 64)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    assert kernel_runs(torch.device("cuda"), 64)
