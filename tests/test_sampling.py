"""Noise and filters: what makes a text a function of model, prompt, sampling and seed alone."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import gumbel_r, kstest

import spectune.runtime.cuda.noise as kernels
from spectune.runtime.policies.splitmix import as_int64
from spectune.runtime.sampling import (
    NUCLEUS,
    Noise,
    gumbel,
    gumbel_row,
    keys_tensor,
    least_kept,
    log_distribution,
    processed,
    sample,
    stream_key,
    uniform,
)
from spectune.traces.schema import Sampling, request_seed

CPU = torch.device("cpu")
with_triton = pytest.mark.skipif(
    sys.platform != "linux", reason="triton is published for Linux only"
)


def test_noise_is_gumbel_and_independent_between_positions() -> None:
    """Kolmogorov-Smirnov against the Gumbel law; neighbouring positions and streams are
    uncorrelated."""
    rows = (
        torch.stack([gumbel_row(stream_key(5, p), 4096, CPU) for p in range(20)]).double().numpy()
    )
    assert kstest(rows.ravel(), gumbel_r.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(rows[0], rows[1])[0, 1]) < 0.06
    other = gumbel_row(stream_key(5, 0, "draft"), 4096, CPU).double().numpy()
    assert abs(np.corrcoef(rows[0], other)[0, 1]) < 0.06
    assert np.isfinite(rows).all()


def test_noise_is_a_pure_function() -> None:
    """Equal (seed, position) give equal bits, whatever was asked before."""
    one, two = Noise(7, 512, CPU), Noise(7, 512, CPU)
    late = one.row(40)
    two.row(38)
    assert torch.equal(two.row(40), late)
    assert not torch.equal(Noise(8, 512, CPU).row(40), late)


def test_a_request_leaves_no_noise_behind() -> None:
    noise = Noise(7, 512, CPU)
    noise.row(40)
    gone = weakref.ref(noise)
    gc.disable()
    try:
        del noise
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("vocab_size", [7, 333, 4096, 4099])
def test_the_compiled_noise_is_the_same_noise(vocab_size: int) -> None:
    """The compiled loop and torch's operations give the same bits."""
    keys = [stream_key(11, position) for position in range(50)]
    rows = gumbel(keys_tensor([as_int64(k) for k in keys], CPU), torch.arange(vocab_size))
    assert all(
        torch.equal(gumbel_row(k, vocab_size, CPU), r) for k, r in zip(keys, rows, strict=True)
    )


@with_triton
@pytest.mark.parametrize("vocab_size", [7, 333, 5000])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0), Sampling(temperature=0.7), Sampling(temperature=0.7, top_p=0.9)],
)
def test_the_kernel_chooses_as_plain_torch(
    vocab_size: int, sampling: Sampling, request: pytest.FixtureRequest
) -> None:
    """Scores, the tokens chosen from them, and those of a shortlist: the same bits."""
    rng = torch.Generator().manual_seed(vocab_size)
    plain = Noise(5, vocab_size, CPU)
    request.getfixturevalue("interpreted")
    fused = Noise(5, vocab_size, CPU)
    assert fused.fused
    assert not plain.fused
    for trial in range(6):
        positions = [trial, *sorted(torch.randint(0, 5, (5,), generator=rng).tolist())]
        logits = torch.randn(len(positions), vocab_size, generator=rng) * 3
        ids = torch.arange(trial, vocab_size, 3)
        for row in (positions, positions[:1]):
            assert torch.equal(*(noise.add(logits, None, row) for noise in (plain, fused)))
        for columns in (None, ids):
            some = logits if columns is None else logits[:, columns]
            assert torch.equal(
                *(sample(some, sampling, noise, positions, ids=columns) for noise in (plain, fused))
            )


@with_triton
@pytest.mark.usefixtures("interpreted")
def test_the_kernel_takes_the_first_of_equal_columns() -> None:
    """Across blocks of columns, and where nothing is kept."""
    scores = torch.full((2, 2 * kernels.BLOCK), -torch.inf)
    keys = keys_tensor([1, 2], CPU)
    assert kernels.best(scores, keys).tolist() == [0, 0]
    scores[0, [3, kernels.BLOCK + 1]] = torch.inf
    scores[1, [kernels.BLOCK + 1, kernels.BLOCK + 7]] = torch.inf
    assert kernels.best(scores, keys).tolist() == [3, kernels.BLOCK + 1]


@with_triton
@pytest.mark.parametrize("choose", [False, True])
def test_the_kernel_compiles_for_gpus(
    choose: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's compiler needs no GPU. Logarithms are of float64."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = kernels.noise_kernel(False)
    constants = kernels.constants(choose=choose, one_key=False, listed=True)
    kinds = {"scores": "*fp32", "keys": "*i64", "ids": "*i64", "size": "i32"}
    kinds |= {"out": "*i64" if choose else "*fp32"} | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS})
    ptx = made.asm["ptx"]
    assert "fma.rn.f64" in ptx
    assert ".local" not in ptx


def test_uniform_and_request_seeds() -> None:
    """Uniforms fill (0, 1); a request's seed depends on its id and the run's seed alone."""
    drawn = [uniform(k) for k in range(5000)]
    assert kstest(drawn, "uniform").pvalue > 1e-3
    assert request_seed(1, "a") == request_seed(1, "a") != request_seed(1, "b")
    assert 0 <= request_seed(0, "x") < 1 << 63


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (4, 0.7)])
def test_filters_keep_what_they_say(top_k: int, top_p: float) -> None:
    """Against a plain sort: top-k keeps the k largest, top-p the shortest prefix whose mass reaches
    p, of what top-k left."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        logits = rng.normal(size=12).astype(np.float32)
        sampling = Sampling(temperature=0.8, top_k=top_k, top_p=top_p)
        scaled = logits / np.float32(0.8)
        order = np.argsort(-scaled)
        alive = list(order[: top_k or 12])
        weights = np.exp(scaled[alive] - scaled.max())
        weights /= weights.sum()
        count = 1 + int((np.cumsum(weights) < top_p - 1e-9).sum()) if top_p < 1 else len(alive)
        expected = set(alive[:count])
        scores = processed(torch.tensor(logits)[None], sampling)
        assert set(scores[0].isfinite().nonzero()[:, 0].tolist()) == expected
        law = log_distribution(torch.tensor(logits)[None], sampling)[0].exp()
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-6)
        assert {int(i) for i in law.nonzero()[:, 0]} == expected


def by_a_full_sort(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """What is kept of scores [n, vocab], as the filters are defined."""
    if top_k:
        scores = scores.masked_fill(scores < scores.sort().values[:, -top_k:][:, :1], -torch.inf)
    ordered = scores.sort(descending=True).values
    mass = ordered.double().softmax(-1)
    keep = mass.cumsum(-1) - mass < top_p
    keep[:, 0] = True
    return scores >= ordered.masked_fill(~keep, torch.inf).amin(-1, keepdim=True)


@pytest.mark.parametrize("vocab_size", [3, 60, 1500, 20_000])
@pytest.mark.parametrize("top_k", [0, 1, 40])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95, 0.9999])
def test_filters_are_those_of_a_full_sort(vocab_size: int, top_k: int, top_p: float) -> None:
    """In float64, from certain rows to flat ones, of which more than the first candidates are
    looked at; with equal logits at the border, all of which are kept."""
    if not top_k < vocab_size:
        return
    rng = torch.Generator().manual_seed(vocab_size)
    spread = torch.tensor([0.01, 0.3, 1.0, 3.0, 10.0, 30.0], dtype=torch.float64)[:, None]
    scores = torch.randn(6, vocab_size, generator=rng, dtype=torch.float64) * spread
    tied = (scores * 4).round() / 4
    for rows in (scores, tied, scores[:1], scores[-1:]):
        least = least_kept(rows, Sampling(temperature=1.0, top_k=top_k, top_p=top_p))
        assert least is not None
        assert torch.equal(rows >= least, by_a_full_sort(rows, top_k, top_p))
        drafts = least_kept(rows, Sampling(temperature=1.0, top_k=top_k, top_p=top_p), draft=True)
        assert drafts is not None
        bound = rows.topk(min(NUCLEUS, vocab_size)).values[:, -1:]
        assert torch.equal(drafts, torch.maximum(least, bound))


def test_choice_follows_the_law() -> None:
    """argmax(log p + g) draws from p: frequencies over many keys."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sampling = Sampling(temperature=1.0)
    counts, noise = np.zeros(4), Noise(3, 4, CPU)
    for key in range(4000):
        counts[int(sample(logits, sampling, noise, [key]))] += 1
    expected = logits.softmax(-1)[0].numpy() * 4000
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 16.3  # chi-square, 3 degrees of freedom, 1 in 1000
