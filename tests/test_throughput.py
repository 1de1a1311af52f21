"""The papers' equations against simulated coin tosses, direct maximisation, and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optimizer.throughput import (
    acceptance_rate,
    estimate_exact,
    estimate_ratio,
    estimate_table,
    expected_emitted,
    larger_draft_condition,
    larger_draft_pays,
    optimal_window,
    speedup,
    throughput,
    token_seconds,
    tokens_per_second,
    truncated_mean,
)
from runtime.policies.estimators import window_thresholds
from runtime.policies.windows import WindowCosts

COSTS = WindowCosts(0.12, tuple(1.0 + 0.03 * g for g in range(17)))
BETAS = [0.05, 0.3, 0.5, 0.7, 0.9, 0.97]


def accepted_in_rounds(beta: float, gamma: int, rounds: int, seed: int = 0) -> np.ndarray:
    """Accepted tokens of rounds whose every token is accepted with probability beta: censored at gamma."""
    return np.minimum(np.random.default_rng(seed).geometric(1 - beta, rounds) - 1, gamma)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("gamma", [1, 4, 12])
def test_expected_emitted_is_the_mean_of_simulated_rounds(beta: float, gamma: int) -> None:
    emitted = accepted_in_rounds(beta, gamma, 200_000) + 1
    error = 5 * emitted.std() / math.sqrt(len(emitted))  # five standard errors: one false alarm in 1.7 million
    assert abs(expected_emitted(beta, gamma) - emitted.mean()) < error
    assert expected_emitted(beta, gamma) == pytest.approx((1 - beta ** (gamma + 1)) / (1 - beta))


def test_limits_of_expected_emitted() -> None:
    assert expected_emitted(1.0, 7) == 8.0
    assert expected_emitted(0.0, 7) == 1.0
    assert expected_emitted(0.6, 0) == 1.0


@pytest.mark.parametrize("beta", BETAS)
def test_optimal_window_is_the_fastest_in_simulation(beta: float) -> None:
    """Tokens per simulated second: no window beats the chosen one by more than noise."""

    def simulated(gamma: int) -> float:
        emitted = accepted_in_rounds(beta, gamma, 100_000, seed=gamma) + 1
        return float(emitted.sum() / (len(emitted) * (gamma * COSTS.draft_step_s + COSTS.verify_s[gamma])))

    best = optimal_window(beta, COSTS)
    assert simulated(best) > 0.99 * max(simulated(g) for g in range(17))
    assert tokens_per_second(beta, best, COSTS) == pytest.approx(simulated(best), rel=0.02)
    assert token_seconds(beta, best, COSTS) == pytest.approx(1 / tokens_per_second(beta, best, COSTS))


def test_thresholds_are_where_the_optimal_window_moves() -> None:
    seconds = np.array([g * COSTS.draft_step_s + COSTS.verify_s[g] for g in range(17)])
    for gamma_min in (0, 2):
        steps = window_thresholds(seconds, gamma_min, 0.98)
        assert (np.diff(steps) >= 0).all()
        for beta in np.linspace(0.001, 0.98, 300).tolist():
            chosen = gamma_min + int((beta > steps).sum())
            best = optimal_window(beta, COSTS, gamma_min=gamma_min)
            assert tokens_per_second(beta, chosen, COSTS) == pytest.approx(tokens_per_second(beta, best, COSTS), rel=1e-12)


@pytest.mark.parametrize("beta", [0.5, 0.7, 0.9])
def test_ratio_is_consistent_and_exact_is_biased_upwards(beta: float) -> None:
    """Rounds are censored at their window: equation 2 finds beta, equation 11 (conditioned instead) does not."""
    accepted = accepted_in_rounds(beta, 4, 200_000).tolist()
    drafted = [4] * len(accepted)
    assert estimate_ratio(accepted, drafted) == pytest.approx(beta, abs=0.005)
    assert estimate_exact(accepted, drafted) > beta + 0.005


@pytest.mark.parametrize("beta", [0.2, 0.5, 0.8])
def test_exact_is_consistent_for_its_own_law(beta: float) -> None:
    """Rounds thrown away unless something was rejected within the window plus one obey equation 10."""
    raw = np.random.default_rng(1).geometric(1 - beta, 300_000)
    kept = (raw[raw <= 5] - 1).tolist()
    assert estimate_exact(kept, [4] * len(kept)) == pytest.approx(beta, abs=0.01)
    assert estimate_table(kept, [4] * len(kept)) == pytest.approx(beta, abs=0.01)
    assert truncated_mean(beta, 4) == pytest.approx(np.mean(kept) + 1, abs=0.02)


def test_exact_maximises_the_likelihood_over_mixed_windows() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        drafted = rng.integers(0, 9, 12)
        accepted = [int(v) for v in np.minimum(rng.geometric(0.45, 12) - 1, drafted)]
        pairs = [(g, v) for g, v in zip(drafted.tolist(), accepted, strict=True) if g]
        found = estimate_exact(accepted, drafted.tolist())
        grid = np.linspace(1e-4, 1 - 1e-4, 4000)
        likelihood = sum(v * np.log(grid) + np.log1p(-grid) - np.log1p(-(grid ** (g + 1))) for g, v in pairs)
        assert found == pytest.approx(grid[int(np.argmax(likelihood))], abs=4e-4)


def test_equations_11_and_12_are_one() -> None:
    """Equation 11 as printed vanishes where equation 12, with its first coefficient mended, gives mean(y); as printed it
    does not."""
    n, gamma = 10, 5
    for beta in (0.2, 0.5, 0.75):
        y = n * truncated_mean(beta, gamma)
        equation_11 = (
            (y - n * (gamma + 2) + n) * beta ** (gamma + 2) + (n * (gamma + 2) - y) * beta ** (gamma + 1) - y * beta + y - n
        )
        assert equation_11 == pytest.approx(0.0, abs=1e-12)
        denominator = beta ** (gamma + 2) - beta ** (gamma + 1) - beta + 1
        mended = ((gamma + 1) * beta ** (gamma + 2) - (gamma + 2) * beta ** (gamma + 1) + 1) / denominator
        printed = (gamma * beta ** (gamma + 2) - (gamma + 2) * beta ** (gamma + 1) + 1) / denominator
        assert truncated_mean(beta, gamma) == pytest.approx(mended)
        assert abs(printed - mended) > 1e-5
    assert truncated_mean(1.0, gamma) == (gamma + 2) / 2


def test_estimates_at_the_edges() -> None:
    for estimate in (estimate_ratio, estimate_exact, estimate_table):
        assert math.isnan(estimate([], []))
        assert math.isnan(estimate([0, 0], [0, 0]))
        assert estimate([0, 0], [4, 0]) == pytest.approx(0.0, abs=1e-9)
        assert estimate([4, 4], [4, 4]) == pytest.approx(1.0)
    # A mean of y at or past (gamma + 2) / 2 has no root below 1, against the paper's claim of exactly one.
    assert estimate_exact([2, 3], [4, 4]) == pytest.approx(1.0)


def test_table_follows_exact_closely() -> None:
    for accepted in range(1, 16):
        split = [accepted // 8 + (i < accepted % 8) for i in range(8)]
        exact, table = estimate_exact(split, [4] * 8), estimate_table(split, [4] * 8)
        assert table == pytest.approx(exact, abs=0.002)


def test_equation_3_is_the_throughput_of_simulated_rounds() -> None:
    gamma, a, b = 5, 0.1, 1.2
    accepted = accepted_in_rounds(0.8, gamma, 50_000)
    tokens, rounds = float((accepted + 1).sum()), len(accepted)
    seconds = rounds * (gamma * a + b)
    assert throughput(tokens, rounds, tokens / (rounds * gamma), a, b) == pytest.approx(tokens / seconds)
    assert tokens / (rounds * gamma) == pytest.approx(acceptance_rate(0.8, gamma), rel=0.01)


def test_equation_4_is_sufficient_but_not_necessary() -> None:
    rng = np.random.default_rng(3)
    printed = exact = 0
    for _ in range(20_000):
        tokens = 1000.0
        beta_small, gain = rng.uniform(0.2, 0.9), rng.uniform(0, 0.3)
        beta_large = min(0.98, beta_small + gain)
        c_small = rng.uniform(0.01, 0.3)
        c_large = c_small + rng.uniform(0, 0.2)
        drafts = []
        for beta, c in ((beta_small, c_small), (beta_large, c_large)):
            gamma = int(rng.integers(1, 9))
            rho = acceptance_rate(beta, gamma)
            drafts.append((tokens / (gamma * rho), c, rho))
        (n1, c1, r1), (n2, c2, r2) = drafts
        pays = larger_draft_pays(drafts[0], drafts[1], tokens)
        assert pays == (throughput(tokens, n2, r2, c2, 1.0) > throughput(tokens, n1, r1, c1, 1.0))
        holds = larger_draft_condition(n1 - n2, c2 - c1, r2 - r1, tokens)
        assert pays or not holds
        printed, exact = printed + holds, exact + pays
    assert printed < exact


def test_speedup_of_the_optimal_window_is_at_least_one() -> None:
    for beta in BETAS:
        assert speedup(beta, optimal_window(beta, COSTS), COSTS) >= 1.0
        assert speedup(beta, 0, COSTS) == 1.0
    assert speedup(0.8, 4, COSTS, target_s=2.0) == pytest.approx(2.0 * expected_emitted(0.8, 4) / (4 * 0.12 + 1.12))
