"""Logits over some rows of an output head: against the plain formula, by index_select and by the
kernel, in Triton's interpreter and compiled."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from spectune.runtime.cuda.gathered import LAUNCH, gathered_kernel, kernel_runs, tile_for
from spectune.runtime.shortlists import OutputHead

TOLERANCE = {
    torch.float64: 1e-7,  # logits are float32
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}
with_triton = pytest.mark.skipif(
    sys.platform != "linux", reason="triton is published for Linux only"
)
"""On Linux these tests fail where triton is missing: it is among the test dependencies."""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def layer(seed: int, vocab: int, d: int, dtype: torch.dtype, *, bias: bool) -> torch.nn.Linear:
    """An output layer of normal weights."""
    rng = torch.Generator().manual_seed(seed)
    made = torch.nn.Linear(d, vocab, bias=bias, dtype=dtype)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=rng).to(dtype)
    return made


def check(shape: tuple[int, int, int, int], dtype: torch.dtype, *, fused: bool) -> None:
    """Logits of some rows are the formula's, in float64 on the numbers as they are rounded; no
    other row is read."""
    n, vocab, d, count = shape
    rng = torch.Generator().manual_seed(sum(shape))
    rows = torch.randperm(vocab, generator=rng)[:count].sort().values
    states = torch.randn(n, d, generator=rng).to(dtype)
    for bias in (False, True):
        linear = layer(n, vocab, d, dtype, bias=bias)
        linear.weight.data[~torch.isin(torch.arange(vocab), rows)] = torch.nan
        head = OutputHead(linear)
        assert head.fused == fused
        for order in (rows, rows.flip(0)):
            exact = states.double() @ head.weight[order].double().T
            exact += 0 if head.bias is None else head.bias[order].double()
            found = head.logits(states, order)
            assert (found.dtype, found.shape) == (torch.float32, (n, count))
            error = (found.double() - exact).norm() / exact.norm().clamp_min(1e-9)
            assert error <= TOLERANCE[dtype]  # also false for NaN
            if dtype == torch.float64:
                assert torch.equal(found, linear(states).float()[:, order])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape", [(1, 7, 1, 3), (2, 301, 96, 133), (33, 40, 24, 13), (2, 9, 4, 9), (2, 9, 4, 0)]
)
def test_logits_of_some_rows_are_the_plain_formulas(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    check(shape, dtype, fused=False)


@with_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(1, 50, 16, 20), (17, 91, 48, 70), (3, 40, 64, 1), (70, 30, 16, 16), (2, 5, 16, 0)],
)
def test_the_kernel_agrees_with_the_plain_formula(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    check(shape, dtype, fused=True)


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
    fixed = {"HAS_BIAS": True, **tile}
    kinds = dict.fromkeys(("hidden", "weight", "bias"), f"*{dtype}")
    kinds |= {"ids": "*i64", "out": "*fp32", "n": "i32", "count": "i32", "hidden_size": "i32"}
    kinds |= dict.fromkeys(fixed, "constexpr")
    names = kernel.arg_names
    of_16 = [name for name in names if kinds[name][0] == "*" or name == "hidden_size"]
    source = ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in of_16},
    )
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=dict(LAUNCH))
    # What a block may have on every GPU from compute capability 8.0 on.
    assert made.metadata.shared <= 99 * 1024
    ptx = made.asm["ptx"]
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", ptx)
    assert ("mma.sync" in ptx) == (dtype != "fp32")
    assert ".local" not in ptx


@with_triton
@pytest.mark.usefixtures("interpreted")
def test_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in float64, nor for odd widths, nor where kernels are switched off."""
    weight = torch.zeros(4, 64)
    assert kernel_runs(weight)
    assert not kernel_runs(weight.double())
    assert not kernel_runs(torch.zeros(4, 24))
    monkeypatch.setenv("SPECTUNE_KERNELS", "0")
    assert not kernel_runs(weight)
