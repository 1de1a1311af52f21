"""Logits over a union of tokens: every way against the plain formula, the kernel in Triton's interpreter and compiled, two streams."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime import gathered_head
from runtime import gathered_kernel as kernels
from runtime.gathered_head import GatheredHead, quickest
from runtime.gathered_kernel import Tile, gathered_kernel, gathered_logits, kernel_runs, tile_for
from runtime.streams import forked
from traces.errors import PairError, PolicyError

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
WAYS = [
    (dtype, way) for dtype in TOLERANCE for way in ("compiled", "gather", "full") if way != "compiled" or dtype == torch.float32
]
with_triton = pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
"""On Linux these tests fail where triton is missing: it is among the test dependencies."""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing measured by one test decides another's way."""
    monkeypatch.setattr(gathered_head, "_measured", {})
    monkeypatch.setattr(gathered_head, "MEASURED_CALLS", 3)


def draw(
    seed: int, n: int, vocab: int, d: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights and biases."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = torch.randn(n, d, generator=g), torch.randn(vocab, d, generator=g), torch.randn(vocab, generator=g)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype)


def some(seed: int, vocab: int, count: int) -> torch.Tensor:
    """``count`` different token ids, ascending."""
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def plain(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The formula, in float64 on the numbers as they are rounded."""
    out = (
        torch.stack([(hidden.double() * weight[int(j)].double()).sum(-1) for j in ids], -1)
        if len(ids)
        else torch.zeros(len(hidden), 0)
    )
    return out if bias is None else out + bias[ids].double()


def assert_close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert got.dtype == torch.float32
    assert got.shape == wanted.shape
    finite = torch.isfinite(wanted)
    assert torch.equal(got[~finite].double(), wanted[~finite].double())
    if finite.any():
        error = (got[finite].double() - wanted[finite]).norm() / wanted[finite].norm()
        assert error <= TOLERANCE[dtype]  # also false for NaN


def clustered(seed: int, vocab: int, clusters: int, empty: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Members and offsets of a random partition; ``empty`` holds no token."""
    rng = np.random.default_rng(seed)
    of = rng.integers(1, clusters, vocab)
    of[of == empty] = clusters - 1 if empty != clusters - 1 else 1
    members = np.argsort(of, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(of, minlength=clusters))])
    return torch.from_numpy(members), torch.from_numpy(offsets)


# -- unions --------------------------------------------------------------------------------------------------------------------------

SHAPES = [(1, 50, 8, 20), (1, 7, 1, 3), (2, 301, 96, 133), (3, 64, 33, 64), (5, 500, 40, 1), (10, 129, 160, 66), (33, 40, 24, 13)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "way"), WAYS)
def test_unions_agree_with_the_plain_formula(dtype: torch.dtype, way: str, shape: tuple[int, int, int, int]) -> None:
    n, vocab, d, count = shape
    hidden, weight, bias = draw(sum(shape), n, vocab, d, dtype)
    ids = some(n, vocab, count)
    assert_close(GatheredHead(weight, way=way).over(hidden, ids), plain(hidden, weight, ids), dtype)
    assert_close(GatheredHead(weight, bias, way=way).over(hidden, ids), plain(hidden, weight, ids, bias), dtype)


@pytest.mark.parametrize(("dtype", "way"), WAYS)
def test_only_the_union_is_read(dtype: torch.dtype, way: str) -> None:
    hidden, weight, _ = draw(1, 3, 200, 48, dtype)
    ids = some(2, 200, 77)
    weight[~torch.isin(torch.arange(200), ids)] = torch.nan
    assert_close(GatheredHead(weight, way=way).over(hidden, ids), plain(hidden, weight, ids), dtype)


@pytest.mark.filterwarnings("error")  # torch warns of a buffer that is too short
@pytest.mark.parametrize("way", ["compiled", "gather", "full", None])
def test_unions_of_any_size_and_order(way: str | None) -> None:
    hidden, weight, bias = draw(3, 2, 90, 32)
    head = GatheredHead(weight, bias, way=way)
    for ids in (
        torch.zeros(0, dtype=torch.int64),
        torch.tensor([89]),
        torch.arange(90),
        torch.randperm(90, generator=torch.Generator().manual_seed(0)),
        torch.arange(90)[::3],  # a view that is not contiguous
        torch.arange(60),
        torch.arange(5),  # the buffer is longer
        torch.arange(90).flip(0),
    ):
        assert_close(head.over(hidden, ids), plain(hidden, weight, ids, bias))


def test_results_are_not_overwritten_by_the_next_call() -> None:
    hidden, weight, _ = draw(4, 2, 60, 16)
    for way in ("compiled", "gather", "full"):
        head = GatheredHead(weight, way=way)
        first = head.over(hidden, torch.arange(30))
        kept = first.clone()
        head.over(hidden + 1, torch.arange(30, 60))
        assert torch.equal(first, kept)


def test_infinities_and_nans_survive_the_compiled_sums() -> None:
    hidden, weight, _ = draw(5, 3, 20, 16)
    weight[3, 0], weight[4, 1], hidden[2] = torch.inf, torch.nan, torch.nan
    hidden[:2, 0] = 1.0
    got = GatheredHead(weight, way="compiled").over(hidden, torch.arange(20))
    assert torch.isinf(got[:2, 3]).all()
    assert torch.isnan(got[:2, 4]).all()
    assert torch.isnan(got[2]).all()
    others = [j for j in range(20) if j not in (3, 4)]
    assert torch.isfinite(got[:2, others]).all()


def test_hidden_states_are_cast_and_may_be_views_that_require_gradients() -> None:
    hidden, weight, _ = draw(6, 8, 40, 32)
    ids = some(1, 40, 9)
    view = torch.nn.Parameter(hidden.double())[::2]
    for way in ("compiled", "gather", "full"):
        got = GatheredHead(torch.nn.Parameter(weight), way=way).over(view, ids)
        assert_close(got, plain(hidden[::2], weight, ids))
        assert not got.requires_grad
    columns = torch.nn.Linear(40, 32, bias=False).weight  # [32, 40]: its transpose is a matrix whose rows are not contiguous
    assert_close(GatheredHead(columns.T, way="compiled").over(hidden, ids), plain(hidden, columns.detach().T, ids))


def test_weights_are_shared_with_the_model() -> None:
    hidden, weight, _ = draw(7, 1, 40, 32)
    ids = some(1, 40, 9)
    for way in ("compiled", "gather", "full"):
        head = GatheredHead(weight, way=way)
        head.over(hidden, ids)
        weight.mul_(-2.0)
        assert_close(head.over(hidden, ids), plain(hidden, weight, ids))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_full_head(dtype: torch.dtype) -> None:
    hidden, weight, bias = draw(8, 4, 70, 40, dtype)
    assert_close(GatheredHead(weight, bias).full(hidden), plain(hidden, weight, torch.arange(70), bias), dtype)
    every = gathered_head._Matrix(weight, bias)
    for way in every.all_ways:
        assert_close(every.all(hidden, way), plain(hidden, weight, torch.arange(70), bias), dtype)


# -- fixed shortlists ----------------------------------------------------------------------------------------------------------------


def test_a_fixed_shortlist_is_trimmed_once() -> None:
    hidden, weight, bias = draw(9, 3, 80, 24)
    ranking = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    head = GatheredHead(weight, bias)
    wanted = {size: plain(hidden, weight, ranking[:size], bias) for size in (40, 13, 1, 80)}
    for size in (40, 13, 40, 1, 80, 13):
        assert_close(head.trimmed(hidden, size, ranking[:size]), wanted[size])
    weight.zero_()  # the copies stay what they were
    assert_close(head.trimmed(hidden, 40, ranking[:40]), wanted[40])
    assert_close(head.trimmed(hidden, "again", ranking[:40]), bias[ranking[:40]].double().expand(3, 40))
    assert_close(
        head.trimmed(hidden, 1000, ranking[:1000]), bias[ranking].double().expand(3, 80)
    )  # a budget beyond the vocabulary


def test_a_key_stands_for_one_shortlist() -> None:
    hidden, weight, _ = draw(10, 1, 30, 8)
    head = GatheredHead(weight)
    ids = torch.arange(10)
    head.trimmed(hidden, 10, ids)
    for other in (torch.arange(1, 11), torch.arange(9)):
        with pytest.raises(PolicyError, match="10 was trimmed to other ids"):
            head.trimmed(hidden, 10, other)
    ids.add_(1)
    with pytest.raises(PolicyError, match="other ids"):
        head.trimmed(hidden, 10, ids)


# -- clusters ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("way", ["products", "compiled", "gather", "full", None])
def test_blocks_of_clusters(way: str | None, n: int) -> None:
    hidden, weight, bias = draw(11, n, 150, 24)
    members, offsets = clustered(3, 150, 9, empty=4)
    head = GatheredHead(weight, bias, members=members, offsets=offsets, way=way)
    for clusters in ([0], [4], [], [2, 4, 7], [8, 1, 3], list(range(9))):
        ids = torch.cat([members[offsets[c] : offsets[c + 1]] for c in clusters]) if clusters else members[:0]
        assert torch.equal(head.block_ids(clusters), ids)
        assert_close(head.blocks(hidden, clusters), plain(hidden, weight, ids, bias))
    ids = head.block_ids(range(9))
    assert len(set(ids.tolist())) == len(ids) == 150
    ascending = head.block_ids([2, 7]).sort()
    assert_close(head.over(hidden, ascending.values), head.blocks(hidden, [2, 7])[:, ascending.indices].double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_in_low_precision(dtype: torch.dtype) -> None:
    hidden, weight, bias = draw(12, 3, 90, 48, dtype)
    members, offsets = clustered(4, 90, 6)
    for way in ("products", "gather", "full"):
        head = GatheredHead(weight, bias, members=members, offsets=offsets, way=way)
        assert_close(head.blocks(hidden, [1, 5, 2]), plain(hidden, weight, head.block_ids([1, 5, 2]), bias), dtype)


def test_clusters_need_not_cover_the_vocabulary() -> None:
    hidden, weight, _ = draw(13, 2, 50, 8)
    head = GatheredHead(weight, members=torch.tensor([7, 3, 40]), offsets=torch.tensor([0, 2, 3]))
    assert_close(head.blocks(hidden, [1, 0]), plain(hidden, weight, torch.tensor([40, 7, 3])))


# -- padded shortlists ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["compiled", "gather", "full"])
@pytest.mark.parametrize("count", [0, 1, 17, 40, 41, -1])
def test_padded_shortlists(way: str, count: int) -> None:
    hidden, weight, bias = draw(14, 3, 60, 16)
    ids = some(5, 60, 40)
    used = min(max(count, 0), 40)
    wanted = torch.full((3, 40), -torch.inf, dtype=torch.float64)
    wanted[:, :used] = plain(hidden, weight, ids[:used], bias)
    ids[used:] = 10**12  # whatever is left there
    head = GatheredHead(weight, bias, way=way)
    for kind in (torch.int32, torch.int64):
        assert_close(head.padded(hidden, ids, torch.tensor([count], dtype=kind)), wanted)
        # what a GPU without triton runs
        assert_close(head._every.padded(hidden, ids, torch.tensor(count, dtype=kind)), wanted)


def test_a_buffer_longer_than_the_vocabulary() -> None:
    hidden, weight, _ = draw(15, 2, 20, 8)
    ids = torch.zeros(50, dtype=torch.int64)
    ids[:20] = torch.arange(20)
    got = GatheredHead(weight).padded(hidden, ids, torch.tensor([20]))
    assert_close(got[:, :20], plain(hidden, weight, torch.arange(20)))
    assert torch.isneginf(got[:, 20:]).all()


# -- the kernel ----------------------------------------------------------------------------------------------------------------------


@with_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tile", [None, Tile(16, 16, 16), Tile(32, 16, 32)], ids=str)
def test_the_kernel_agrees_with_the_plain_formula(dtype: torch.dtype, tile: Tile | None) -> None:
    for n, vocab, d, count in ((1, 50, 8, 20), (17, 61, 40, 33), (3, 40, 64, 1), (2, 20, 32, 20), (33, 30, 16, 16)):
        hidden, weight, bias = draw(n, n, vocab, d, dtype)
        ids = some(n, vocab, count)
        weight[~torch.isin(torch.arange(vocab), ids)] = torch.nan
        assert_close(gathered_logits(hidden, weight, ids, tile=tile), plain(hidden, weight, ids), dtype)
        assert_close(gathered_logits(hidden, weight, ids, bias=bias, tile=tile), plain(hidden, weight, ids, bias), dtype)


@with_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 40, 99])
def test_the_kernel_fills_the_padding(count: int) -> None:
    hidden, weight, bias = draw(16, 3, 60, 24)
    ids = some(6, 60, 40)
    used = min(count, 40)
    wanted = torch.full((3, 40), -torch.inf, dtype=torch.float64)
    wanted[:, :used] = plain(hidden, weight, ids[:used], bias)
    ids[used:] = 10**12
    for kind in (torch.int32, torch.int64):
        got = gathered_logits(hidden, weight, ids, bias=bias, count=torch.tensor([count], dtype=kind), tile=Tile(16, 16, 16))
        assert_close(got, wanted)


@with_triton
@pytest.mark.usefixtures("interpreted")
def test_a_head_runs_its_kernel() -> None:
    hidden, weight, bias = draw(17, 2, 70, 32)
    members, offsets = clustered(5, 70, 5, empty=2)
    head = GatheredHead(weight, bias, members=members, offsets=offsets, way="kernel")
    ids = torch.arange(70)[::4]
    assert_close(head.over(hidden, ids), plain(hidden, weight, ids, bias))
    assert_close(head.over(hidden.double()[:0], ids), torch.zeros(0, 18))
    assert_close(head.over(hidden, ids[:0]), torch.zeros(2, 0))
    assert_close(head.blocks(hidden, [3, 2, 1]), plain(hidden, weight, head.block_ids([3, 2, 1]), bias))
    got = head.padded(hidden, torch.arange(64), torch.tensor([5]))
    assert_close(got[:, :5], plain(hidden, weight, torch.arange(5), bias))
    assert torch.isneginf(got[:, 5:]).all()


@with_triton
@pytest.mark.parametrize(
    ("dtype", "rows", "hidden_size", "capability"), [("bf16", 10, 4096, 90), ("fp16", 1, 2880, 80), ("fp32", 10, 160, 90)]
)
def test_the_kernel_compiles_for_gpus(
    dtype: str, rows: int, hidden_size: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's compiler needs no GPU. Rows are copied 16 bytes at a time and ahead of their use; low precision runs on tensor cores."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = gathered_kernel(False)
    tile = tile_for(rows, 20000, hidden_size, 4 if dtype == "fp32" else 2, 132)
    fixed = {"HAS_BIAS": True, "HAS_COUNT": True, "RAGGED": hidden_size % tile.d != 0, "WIDEN": False}
    fixed |= {"ROWS": tile.rows, "IDS": tile.ids, "D": tile.d}
    kinds = dict.fromkeys(("hidden", "weight", "bias"), "*" + dtype) | dict.fromkeys(("ids", "count"), "*i64") | {"out": "*fp32"}
    kinds |= dict.fromkeys(("n", "capacity", "hidden_size"), "i32") | dict.fromkeys(fixed, "constexpr")
    names = kernel.arg_names
    aligned = [i for i, name in enumerate(names) if kinds[name].startswith("*") or name in ("capacity", "hidden_size")]
    source = ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": tile.warps, "num_stages": tile.stages})
    assert made.metadata.shared <= 99 * 1024  # what a block may have on every GPU from compute capability 8.0 on
    ptx = made.asm["ptx"]
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", ptx)
    assert ("mma.sync" in ptx) == (dtype != "fp32")
    assert ".local" not in ptx


def test_tiles() -> None:
    assert tile_for(1, 30000, 4096, 2, 132) == Tile(16, 64, 128)
    assert tile_for(60, 30000, 4096, 2, 132) == Tile(64, 64, 128)
    assert tile_for(10, 1300, 4096, 2, 132) == Tile(16, 16, 128)  # a small union: more programs
    assert tile_for(10, 5000, 4096, 2, 132) == Tile(16, 16, 128)
    assert tile_for(10, 9000, 4096, 2, 132) == Tile(16, 32, 128)
    assert tile_for(10, 30000, 160, 4, 132).d == 32
    assert tile_for(10, 30000, 2880, 2, 132).d == 64
    assert tile_for(10, 30000, 50, 4, 132).d == 32
    for rows in (1, 16, 17, 100):
        assert tile_for(rows, 10**6, 64, 2, 8).rows == min(64, max(16, 1 << (rows - 1).bit_length()))


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernel_runs(CPU)
    gathered_kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(PairError, match="needs triton"):
        gathered_kernel(False)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert not kernel_runs(torch.device("cuda"))
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    assert kernel_runs(torch.device("cuda"))


# -- choosing a way ------------------------------------------------------------------------------------------------------------------


def test_the_quickest_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_head, "MEASURED_CALLS", 15)
    calls: dict[str, int] = dict.fromkeys("abc", 0)

    def way(name: str, seconds: float, first: float = 0.0) -> Any:
        def run() -> None:
            calls[name] += 1
            time.sleep(seconds + (first if calls[name] == 1 else 0.0))

        return run

    ways = {"a": way("a", 0.01), "b": way("b", 0.002, first=0.05), "c": way("c", 0.03)}
    assert quickest(ways, CPU) == "b"
    assert calls["c"] == 4  # hopeless after a first call and three that count
    assert 4 < calls["b"] <= 1 + 10  # 20 ms are ten calls of 2 ms


def test_ways_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def watched(ways: dict[str, Any], device: torch.device) -> str:
        for run in ways.values():
            run()
        asked.append(tuple(ways))
        return list(ways)[-1]

    monkeypatch.setattr(gathered_head, "quickest", watched)
    hidden, weight, _ = draw(18, 3, 64, 16)
    members, offsets = clustered(6, 64, 5)
    state = torch.get_rng_state()
    head = GatheredHead(weight, members=members, offsets=offsets)
    assert head.fastest(3, 20) == "full"
    head.over(hidden, torch.arange(17))  # the same powers of two: 4 and 32
    head.over(hidden, torch.arange(32))
    assert asked == [("compiled", "gather", "full")]
    head.over(hidden, torch.arange(33))
    head.over(hidden[:1], torch.arange(32))
    assert len(asked) == 3
    assert head.fastest(3, 10, "blocks") == "products"
    assert head.fastest(3, 64, "all") == "linear"
    head.full(hidden)
    assert asked[3:] == [("compiled", "gather", "full", "products"), ("compiled", "linear")]
    again = GatheredHead(weight + 1, members=members, offsets=offsets)
    again.over(hidden, torch.arange(20))
    assert again.fastest(3, 16, "blocks") == "products"
    GatheredHead(weight).over(hidden, torch.arange(20))
    assert len(asked) == 5
    GatheredHead(weight[:, :8]).over(hidden[:, :8], torch.arange(20))  # another shape
    GatheredHead(weight[:40]).over(hidden, torch.arange(20))
    assert len(asked) == 7
    GatheredHead(weight, members=members, offsets=torch.tensor([0, 64])).fastest(3, 16, "blocks")  # other clusters
    assert len(asked) == 8
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("least", [1, 17, 40])
def test_a_warm_head_measures_nothing_more(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows and tokens come within what was announced, on another head of the same shape too."""
    asked = []

    def counted(ways: dict[str, Any], device: torch.device) -> str:
        asked.append(tuple(ways))
        return "gather" if "gather" in ways else "linear"

    monkeypatch.setattr(gathered_head, "quickest", counted)
    hidden, weight, _ = draw(30, 6, 40, 8)
    GatheredHead(weight).warm(5, (least, 40))
    GatheredHead(weight).warm(5, (40, 40), "all")
    measured = len(asked)
    head = GatheredHead(weight)
    for n in range(1, 6):
        for count in range(least, 41):
            head.over(hidden[:n], torch.arange(count))
        head.full(hidden[:n])
    assert len(asked) == measured > 0
    head.over(hidden[:1], torch.arange(8))
    assert len(asked) == measured + (least > 8)


@with_triton
@pytest.mark.usefixtures("interpreted")
def test_warming_launches_every_kind_of_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles apart for sizes that are 1, multiples of 16, and others."""
    launched = set()
    monkeypatch.setattr(
        gathered_head, "gathered_logits", lambda hidden, weight, ids, **_: launched.add((len(hidden), len(ids))) or torch.zeros(0)
    )
    monkeypatch.setattr(gathered_head, "quickest", lambda ways, device: "kernel")
    GatheredHead(torch.randn(64, 16)).warm(32, (16, 64))
    assert {(m, count) for m in (1, 3, 16, 31, 32) for count in (16, 15, 64, 63)} <= launched


def test_a_way_may_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_head, "quickest", None)  # nothing is measured
    hidden, weight, _ = draw(19, 3, 64, 16)
    for way in ("compiled", "gather", "full"):
        head = GatheredHead(weight, way=way)
        with monkeypatch.context() as patch:
            used: list[str] = []
            patch.setattr(head._every, "over", lambda hidden, ids, way, used=used: used.append(way))
            head.over(hidden, torch.arange(9))
        assert used == [way]
    with pytest.raises(PairError, match="no way 'products'"):
        GatheredHead(weight, way="products")
    with pytest.raises(PairError, match="no way 'compiled'; it has gather, full"):
        GatheredHead(weight.bfloat16(), way="compiled")


# -- wrong input ---------------------------------------------------------------------------------------------------------------------


def test_weights_and_hidden_states_that_do_not_fit() -> None:
    hidden, weight, bias = draw(20, 2, 30, 8)
    with pytest.raises(PairError, match=r"\[vocab, d\]"):
        GatheredHead(weight[0])
    with pytest.raises(PairError, match="float64"):
        GatheredHead(weight.double())
    with pytest.raises(PairError, match=r"bias .* must be \[30\]"):
        GatheredHead(weight, bias[:9])
    head = GatheredHead(weight)
    for wrong in (hidden[:, :5], hidden[0], hidden[None]):
        for call in (
            lambda h: head.over(h, torch.arange(3)),
            head.full,
            lambda h: head.trimmed(h, 3, torch.arange(3)),
            lambda h: head.padded(h, torch.arange(3), torch.tensor([1])),
        ):
            with pytest.raises(PairError, match="width 8"):
                call(wrong)


@pytest.mark.parametrize("way", ["compiled", "gather", "full"])
def test_tokens_that_are_not_there(way: str) -> None:
    hidden, weight, _ = draw(21, 2, 30, 8)
    head = GatheredHead(weight, way=way)
    for ids in ([3, 30], [-1, 3], [0, 1, 2, 3, 2**40], [-(2**62)]):
        with pytest.raises(PolicyError, match=r"outside 0 \.\. 29"):
            head.over(hidden, torch.tensor(ids))
        with pytest.raises(PolicyError, match=r"outside 0 \.\. 29"):
            head.trimmed(hidden, "wrong", torch.tensor(ids))
    for wrong in (torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1], dtype=torch.int32), torch.tensor(1)):
        with pytest.raises(PolicyError, match="one-dimensional int64"):
            head.over(hidden, wrong)
    for count in (torch.tensor([1, 2]), torch.tensor([1.0])):
        with pytest.raises(PolicyError, match="one int32 or int64 element"):
            head.padded(hidden, torch.arange(3), count)


def test_partitions_and_clusters_that_are_wrong() -> None:
    hidden, weight, _ = draw(22, 2, 10, 8)
    members, offsets = torch.arange(10), torch.tensor([0, 4, 4, 10])

    def built(members: torch.Tensor | None, offsets: torch.Tensor | None) -> GatheredHead:
        return GatheredHead(weight, members=members, offsets=offsets)

    for wrong, message in (
        ((members, None), "both"),
        ((None, offsets), "both"),
        ((members, offsets[:-1]), "ascend from 0 to the 10 members"),
        ((members, torch.tensor([0, 5, 4, 10])), "ascend"),
        ((members, torch.tensor([1, 10])), "ascend"),
        ((members, torch.zeros(0, dtype=torch.int64)), "ascend"),
        ((members.int(), offsets), "int64"),
        ((members + 1, offsets), "outside the vocabulary of 10"),
        ((members - 1, offsets), "outside the vocabulary of 10"),
        ((members // 2, offsets), "two clusters"),
    ):
        with pytest.raises(PolicyError, match=message):
            built(*wrong)
    head = built(members, offsets)
    for clusters in ([3], [-1], [0, 0]):
        with pytest.raises(PolicyError, match="of the 3 there are"):
            head.blocks(hidden, clusters)
        with pytest.raises(PolicyError, match="of the 3 there are"):
            head.block_ids(clusters)
    plain_head = GatheredHead(weight)
    with pytest.raises(PolicyError, match="without clusters"):
        plain_head.blocks(hidden, [0])
    with pytest.raises(PolicyError, match="'blocks'"):
        plain_head.fastest(1, 1, "blocks")


# -- two streams ---------------------------------------------------------------------------------------------------------------------


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.done: set[str] = set()

    def wait_event(self, event: FakeEvent) -> None:
        assert event.holds is not None, "an event is waited for that was not recorded"
        self.done |= event.holds
        self.cuda.log.append(f"{self.name} waits")


class FakeEvent:
    holds: set[str] | None = None

    def record(self, stream: FakeStream) -> None:
        self.holds = set(stream.done)
        stream.cuda.log.append(f"{stream.name} records")


class FakeCuda:
    """Streams that know which work is sure to be done where they stand."""

    Event = FakeEvent

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main = self.current = FakeStream(self, "main")
        self.made: list[Any] = []
        self.devices: list[Any] = []

    def Stream(self, device: torch.device) -> FakeStream:
        self.made.append(device)
        return FakeStream(self, "side")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def work(self, name: str, needs: set[str], not_after: set[str] | None = None) -> str:
        """Something issued on the current stream, which must come after ``needs`` and need not wait for ``not_after``."""
        stream = self.current
        assert needs <= stream.done, f"{name} may run before {needs - stream.done}"
        assert not (not_after or set()) & stream.done, f"{name} waits for {not_after}"
        stream.done.add(name)
        self.log.append(f"{stream.name} runs {name}")
        return name


CUDA = torch.device("cuda", 0)


def test_core_and_router_run_on_two_streams() -> None:
    cuda = FakeCuda()
    for step in range(3):
        before = cuda.work(f"embed {step}", {f"head {step - 1}"} if step else set())
        core = functools.partial(cuda.work, f"core {step}", {before}, {f"router {step}"})
        router = functools.partial(cuda.work, f"router {step}", {before}, {f"core {step}"})
        got = forked(core, router, CUDA, cuda=cuda)
        assert got == (f"core {step}", f"router {step}")
        assert cuda.current is cuda.main
        cuda.work(f"head {step}", {f"core {step}", f"router {step}"})
    round_of = ["main records", "side waits", "side runs router 0", "main runs core 0", "side records", "main waits"]
    assert cuda.log[:8] == ["main runs embed 0", *round_of, "main runs head 0"]
    assert cuda.made == [CUDA]  # one side stream for all
    assert cuda.devices == [CUDA] * 3


@pytest.mark.parametrize("failing", ["core", "router"])
def test_a_failure_leaves_the_streams_joined(failing: str) -> None:
    cuda = FakeCuda()

    def run(name: str) -> None:
        if name == failing:
            raise RuntimeError(name)
        cuda.work(name, set())

    with pytest.raises(RuntimeError, match=failing):
        forked(lambda: run("core"), lambda: run("router"), CUDA, cuda=cuda)
    assert cuda.log[-2:] == ["side records", "main waits"]
    assert cuda.current is cuda.main
    if failing == "core":
        cuda.work("next", {"router"})


def test_on_the_cpu_the_router_runs_first() -> None:
    log: list[str] = []
    got = forked(lambda: log.append("core") or 1, lambda: log.append("router") or 2, CPU, cuda=None)
    assert got == (1, 2)
    assert log == ["router", "core"]
