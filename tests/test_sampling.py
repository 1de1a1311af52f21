"""Noise and filters: what makes a text a function of model, prompt, sampling and seed alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import gumbel_r, kstest

from spectune.runtime.sampling import (
    Noise,
    _gumbel_anywhere,
    choose,
    entropy_of,
    gumbel_row,
    kept,
    log_distribution,
    nat_code,
    stream_key,
    uniform,
)
from spectune.traces.schema import NAT_CODE_MAX, Sampling, request_seed

CPU = torch.device("cpu")


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
    two.forget_before(99)
    assert torch.equal(two.row(40), late)
    assert not torch.equal(Noise(8, 512, CPU).row(40), late)


@pytest.mark.parametrize("vocab_size", [7, 333, 4096, 4099])
def test_the_compiled_noise_is_the_same_noise(vocab_size: int) -> None:
    """The compiled loop and torch's operations give the same bits."""
    for position in range(50):
        key = stream_key(11, position)
        assert torch.equal(gumbel_row(key, vocab_size, CPU), _gumbel_anywhere(key, vocab_size, CPU))


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
        mask = kept(torch.tensor(scaled)[None], sampling)
        found = set(range(12)) if mask is None else set(mask[0].nonzero()[:, 0].tolist())
        assert found == expected
        law = log_distribution(torch.tensor(logits)[None], sampling)[0].exp()
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-6)
        assert {int(i) for i in law.nonzero()[:, 0]} == expected


def test_choice_follows_the_law() -> None:
    """argmax(log p + g) draws from p: frequencies over many keys."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sampling = Sampling(temperature=1.0)
    counts = np.zeros(4)
    for key in range(4000):
        counts[int(choose(logits, sampling, gumbel_row(stream_key(3, key), 4, CPU)[None]))] += 1
    expected = logits.softmax(-1)[0].numpy() * 4000
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 16.3  # chi-square, 3 degrees of freedom, 1 in 1000


def test_codes() -> None:
    """Codes count 1/256 nat downwards and saturate."""
    assert nat_code(0.0) == 0
    assert nat_code(1.0) == 256
    assert nat_code(1.0 - 1e-6) == 255
    assert nat_code(1e9) == NAT_CODE_MAX
    uniform_law = torch.full((8,), -math.log(8.0))
    assert float(entropy_of(uniform_law)) == pytest.approx(math.log(8.0))
    assert float(entropy_of(torch.tensor([0.0, -math.inf]))) == 0.0
