"""The runtime's windows and estimators against the paper's equations."""

from __future__ import annotations

import numpy as np
import pytest
from papers.on_the_fly import expected_emitted, optimal_window, truncated_mean

from spectune.runtime.policies.on_the_fly import (
    even_betas,
    tabulated_windows,
    truncated_excess,
    window_thresholds,
)
from spectune.runtime.policies.windows import WindowCosts

COSTS = WindowCosts(0.12, tuple(1.0 + 0.03 * g for g in range(17)))


@pytest.mark.parametrize("gamma_min", [0, 2])
def test_thresholds_are_where_the_optimal_window_moves(gamma_min: int) -> None:
    seconds = np.array([g * COSTS.draft_step_s + COSTS.verify_s[g] for g in range(17)])
    steps = window_thresholds(seconds, gamma_min, 0.98)
    assert (np.diff(steps) >= 0).all()
    for beta in np.linspace(0.001, 0.98, 300).tolist():
        chosen, best = gamma_min + int((beta > steps).sum()), optimal_window(beta, COSTS, gamma_min)
        assert expected_emitted(beta, chosen) / seconds[chosen] == pytest.approx(
            expected_emitted(beta, best) / seconds[best]
        )


@pytest.mark.parametrize("gamma_max", [4, 8, 16])
def test_windows_looked_up_are_as_fast_as_equation_1s(gamma_max: int) -> None:
    """Over betas and shares of a drafted token's seconds: 0.02% slower in the mean, 4% at worst."""
    rng, betas = np.random.default_rng(5), even_betas(0.98)
    b = 1.0 + 0.043 * np.arange(gamma_max + 1)
    table, lost = tabulated_windows(betas, np.round(b * 1e9).astype(np.int64), 0), []
    for beta, share in rng.uniform((0.0, 0.001), (0.98, 0.999), (2_000, 2)).tolist():
        costs = WindowCosts(share, tuple(((1 - share) * b).tolist()))
        speeds = [
            expected_emitted(beta, g) / (g * costs.draft_step_s + costs.verify_s[g])
            for g in range(gamma_max + 1)
        ]
        chosen = table[int(share * len(table)), int((beta > betas).sum())]
        lost.append(1 - speeds[chosen] / max(speeds))
    assert np.mean(lost) < 2e-4
    assert max(lost) < 0.04


@pytest.mark.parametrize("beta", [0.2, 0.5, 0.8])
def test_the_excess_is_equation_12s(beta: float) -> None:
    assert 1 + truncated_excess(4, np.array([beta]))[0, 4] == pytest.approx(truncated_mean(beta, 4))
