"""Noise, filters, near ties: what makes a text a function of model, prompt, sampling and seed alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import gumbel_r, kstest

from runtime.sampling import (
    CHOICE_MARGIN,
    Noise,
    _best,
    _gumbel_anywhere,
    choose,
    entropy_of,
    gumbel_row,
    kept,
    log_law,
    nat_code,
    settle,
    stream_key,
    undecided,
    uniform,
)
from traces.schema import NAT_CODE_MAX, Sampling, request_seed

CPU = torch.device("cpu")


def test_noise_is_gumbel_and_independent_between_positions() -> None:
    """Kolmogorov-Smirnov against the Gumbel law; neighbouring positions and streams are uncorrelated."""
    rows = torch.stack([gumbel_row(stream_key(5, p), 4096, CPU) for p in range(20)]).double().numpy()
    assert kstest(rows.ravel(), gumbel_r.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(rows[0], rows[1])[0, 1]) < 0.06
    other = gumbel_row(stream_key(5, 0, "draft"), 4096, CPU).double().numpy()
    assert abs(np.corrcoef(rows[0], other)[0, 1]) < 0.06
    assert np.isfinite(rows).all()


def test_noise_is_a_pure_function() -> None:
    """Equal (seed, position) give equal bits, whatever was asked before."""
    one, two = Noise(7, 512, CPU), Noise(7, 512, CPU)
    late = one.row(40)
    assert torch.equal(one.rows(38, 3)[2], late)
    two.forget_before(99)
    assert torch.equal(two.row(40), late)
    assert not torch.equal(Noise(8, 512, CPU).row(40), late)


@pytest.mark.parametrize("vocab_size", [7, 333, 4096, 4099])
def test_the_compiled_noise_is_the_same_noise(vocab_size: int) -> None:
    """The compiled loop and torch's operations give the same bits."""
    for position in range(50):
        key = stream_key(11, position)
        assert torch.equal(gumbel_row(key, vocab_size, CPU), _gumbel_anywhere(key, vocab_size, CPU))


def test_the_best_and_whether_it_leads() -> None:
    """As topk(2) tells; of equal entries the first is taken, and a row with one entry left leads without bound."""
    x = torch.randn(9, 501, generator=torch.Generator().manual_seed(0))
    best = x.topk(2, dim=-1)
    leads = best.values[:, 0] - best.values[:, 1]
    for margin in (0.0, 0.1, float(leads.median()), 9.0):
        tokens, unsure = _best(x, margin)
        assert torch.equal(tokens, best.indices[:, 0])
        assert torch.equal(unsure, leads < margin)
    odd = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -torch.inf, 0.0], [2.0, 1.0, 1.5]])
    tokens, unsure = _best(odd, 0.4)
    assert tokens.tolist() == [1, 2, 0]
    assert unsure.tolist() == [True, False, False]


def test_uniform_and_request_seeds() -> None:
    """Uniforms fill (0, 1); a request's seed depends on its id and the run's seed alone."""
    drawn = [uniform(k) for k in range(5000)]
    assert kstest(drawn, "uniform").pvalue > 1e-3
    assert request_seed(1, "a") == request_seed(1, "a") != request_seed(1, "b")
    assert 0 <= request_seed(0, "x") < 1 << 63


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (4, 0.7)])
def test_filters_keep_what_they_say(top_k: int, top_p: float) -> None:
    """Against a plain sort: top-k keeps the k largest, top-p the shortest prefix whose mass reaches p, of what top-k left."""
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
        law = log_law(torch.tensor(logits)[None], sampling)[0].exp()
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-6)
        assert {int(i) for i in law.nonzero()[:, 0]} == expected


def test_choice_follows_the_law() -> None:
    """argmax(log p + g) draws from p: frequencies over many keys."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sampling = Sampling(temperature=1.0)
    counts = np.zeros(4)
    for key in range(4000):
        counts[int(choose(logits, sampling, gumbel_row(stream_key(3, key), 4, CPU)[None], exact=False).tokens)] += 1
    expected = logits.softmax(-1)[0].numpy() * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees of freedom, 1 in 1000


def test_near_ties_are_told_and_settled() -> None:
    """A gap under the margin is unsure whichever side it is on, and the canonical answer replaces it; a clear one is left."""
    logits = torch.tensor([[1.0, 1.0 + CHOICE_MARGIN / 2, 0.0], [1.0, 1.0 + 10 * CHOICE_MARGIN, 0.0]])
    choice = choose(logits, Sampling(), None, exact=True)
    assert choice.unsure is not None
    assert choice.unsure.tolist() == [True, False]
    assert settle(choice, lambda row: 0 if row == 0 else 99).tolist() == [0, 1]
    filtered = choose(logits, Sampling(temperature=1.0, top_k=1), torch.zeros(2, 3), exact=True)
    assert filtered.unsure is not None
    assert filtered.unsure[0]


def test_a_token_on_the_border_of_the_nucleus_is_unsure() -> None:
    """If rounding could let the winner in or out of the top-p set, the choice is not made here."""
    logits = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]])
    noise = torch.tensor([[0.0, 0.0, 5.0]])
    border = choose(logits, Sampling(temperature=1.0, top_p=0.8), noise, exact=True)
    assert border.unsure is not None
    assert bool(border.unsure[0])
    clear = choose(logits, Sampling(temperature=1.0, top_p=0.7), noise, exact=True)
    assert clear.unsure is not None
    assert not bool(clear.unsure[0])
    assert int(clear.tokens[0]) in (0, 1)


def test_an_undecided_top_k_is_told_even_before_a_nucleus() -> None:
    """Two tokens that rounding could exchange at the border of top-k: unsure, with and without top-p behind it."""
    logits = torch.tensor([[2.0, 1.0, 1.0 - 1e-5, -3.0]])
    noise = torch.tensor([[0.0, 0.0, 5.0, 0.0]])
    for top_p in (1.0, 0.99):
        choice = choose(logits, Sampling(temperature=1.0, top_k=2, top_p=top_p), noise, exact=True)
        assert choice.unsure is not None
        assert bool(choice.unsure[0])


def test_margins_grow_as_the_temperature_falls() -> None:
    """At temperature 0.01 a rounding error is a hundred times as large."""
    logits = torch.tensor([[1.0, 1.0 + CHOICE_MARGIN / 2, 0.0]])
    cold = choose(logits, Sampling(temperature=0.01), torch.zeros(1, 3), exact=True)
    assert cold.unsure is not None
    assert bool(cold.unsure[0])


def test_codes() -> None:
    """Codes count 1/256 nat downwards and saturate; borders are told."""
    assert nat_code(0.0) == 0
    assert nat_code(1.0) == 256
    assert nat_code(1.0 - 1e-6) == 255
    assert nat_code(1e9) == NAT_CODE_MAX
    assert undecided(torch.tensor([1.0 + 1e-6, 1.0 + 1e-3]), Sampling()).tolist() == [True, False]
    uniform_law = torch.full((8,), -math.log(8.0))
    assert float(entropy_of(uniform_law)) == pytest.approx(math.log(8.0))
    assert float(entropy_of(torch.tensor([0.0, -math.inf]))) == 0.0
