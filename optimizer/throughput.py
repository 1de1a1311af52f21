"""The papers' analytic models as code: what speculation should yield if acceptance were a coin.

"OTF" is the on-the-fly adaptation paper, "DynaSpec" the dynamic-shortlist paper. Everywhere beta (alpha in DynaSpec) is the
probability that one drafted token is accepted given that those before it were, gamma the window, a_q the seconds of a draft step
and b_p(gamma) those of verifying gamma tokens. They seed the search and stand beside every simulated figure; replay needs none
of them.

Where the papers' equations do not hold as printed, the functions say so and do what follows from the definitions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.policies.estimators import (
    TABLE_KNOTS,
    best_window,
    equation_11_root,
    equation_12_inverse,
    truncated_excess,
)
from runtime.policies.windows import WindowCosts

FloatArray = npt.NDArray[np.float64]


def expected_emitted(beta: float, gamma: int) -> float:
    """Omega(beta, gamma) = (1 - beta^(gamma+1)) / (1 - beta) (OTF equation 9, DynaSpec equation 1): tokens a round adds, the
    target's own included. At beta = 1 it is gamma + 1."""
    return float(np.sum(beta ** np.arange(gamma + 1.0)))


def round_seconds(gamma: int, costs: WindowCosts) -> float:
    """gamma a_q + b_p(gamma) (OTF definition 1)."""
    return gamma * costs.draft_step_s + costs.verify_s[gamma]


def tokens_per_second(beta: float, gamma: int, costs: WindowCosts) -> float:
    """OTF equation 1's objective: expected tokens per second with window gamma."""
    return expected_emitted(beta, gamma) / round_seconds(gamma, costs)


def optimal_window(beta: float, costs: WindowCosts, *, gamma_min: int = 0, gamma_max: int | None = None) -> int:
    """OTF equation 1: the window with the most expected tokens per second; the smallest where several tie."""
    size = len(costs.verify_s) if gamma_max is None else gamma_max + 1
    seconds = np.array([round_seconds(g, costs) for g in range(size)])
    return int(best_window(np.array([beta]), seconds, gamma_min)[0])


def token_seconds(beta: float, gamma: int, costs: WindowCosts) -> float:
    """tau_SD = (gamma tau_D + tau_V(gamma)) / Omega (DynaSpec, between equations 1 and 2): seconds per token."""
    return round_seconds(gamma, costs) / expected_emitted(beta, gamma)


def speedup(beta: float, gamma: int, costs: WindowCosts, target_s: float | None = None) -> float:
    """DynaSpec equation 2: tau_T Omega / (gamma tau_D + tau_V(gamma)). tau_T is ``target_s``, by default verification at
    window 0."""
    return (costs.verify_s[0] if target_s is None else target_s) / token_seconds(beta, gamma, costs)


def estimate_ratio(accepted: Sequence[int], drafted: Sequence[int]) -> float:
    """OTF equation 2: beta from rounds that drafted and accepted so many tokens; NaN without evidence.

    It is the exact maximum-likelihood estimate for what a round observes, a geometric variable censored at its window.
    """
    v, g = np.asarray(accepted), np.asarray(drafted)
    evidence = v.sum() + (v < g).sum()
    return float(v.sum() / evidence) if evidence else float("nan")


def estimate_exact(accepted: Sequence[int], drafted: Sequence[int]) -> float:
    """OTF equation 11, pooled over windows: the root in beta of the likelihood under equation 10; NaN without evidence.

    Equation 10 conditions on y = accepted + 1 <= gamma + 1 instead of censoring there, so for real rounds it overestimates.
    Where the mean of y reaches (gamma + 2) / 2 there is no root below 1 (the paper says there always is one) and 1 is returned.
    """
    counts, total = _histogram(accepted, drafted)
    return equation_11_root(counts, total, len(counts) - 1) if counts[1:].any() else float("nan")


def estimate_table(accepted: Sequence[int], drafted: Sequence[int], knots: int = TABLE_KNOTS) -> float:
    """:func:`estimate_exact` by OTF equation 12, tabulated at ``knots`` even betas and inverted by linear interpolation."""
    counts, total = _histogram(accepted, drafted)
    table = truncated_excess(len(counts) - 1, np.linspace(0.0, 1.0, knots))
    return equation_12_inverse(counts, total, table, len(counts) - 1) if counts[1:].any() else float("nan")


def truncated_mean(beta: float, gamma: int) -> float:
    """OTF equation 12: the mean of y = 1..gamma+1 under equation 10,
    ((gamma+1) beta^(gamma+2) - (gamma+2) beta^(gamma+1) + 1) / (beta^(gamma+2) - beta^(gamma+1) - beta + 1).

    The paper prints gamma beta^(gamma+2) for the first term, which contradicts its equation 11 and diverges at beta = 1,
    where the mean is (gamma + 2) / 2.
    """
    return 1.0 + float(truncated_excess(gamma, np.array([beta]))[0, gamma])


def acceptance_rate(beta: float, gamma: int) -> float:
    """rho = Omega / gamma (OTF section 5): tokens *emitted* per token drafted.

    The text defines rho as accepted / drafted, but L = d n rho (equation 8), and with it equation 3, only holds when the target's
    own token of each round is counted, as the formula does; rho may exceed 1.
    """
    return expected_emitted(beta, gamma) / gamma


def throughput(tokens: float, rounds: float, rho: float, draft_s: float, verify_s: float) -> float:
    """OTF equation 3: R = L / (b_p(gamma) n + a_q L / rho), tokens per second; rho as in :func:`acceptance_rate`."""
    return tokens / (verify_s * rounds + draft_s * tokens / rho)


def larger_draft_condition(rounds_saved: float, cost_ratio_gain: float, rho_gain: float, tokens: float) -> bool:
    """OTF equation 4 (theorem 3) as printed: delta n > (delta c / delta rho) L. ``rounds_saved`` = n_small - n_large, the others
    large - small; c = a_q / b_p.

    Sufficient, not necessary: equation 3 gives delta n > L (c_large / rho_large - c_small / rho_small), and that bracket is
    at most delta c / rho_large <= delta c / delta rho. :func:`larger_draft_pays` is the exact condition.
    """
    return rho_gain > 0 and rounds_saved > cost_ratio_gain / rho_gain * tokens


def larger_draft_pays(small: tuple[float, float, float], large: tuple[float, float, float], tokens: float) -> bool:
    """Whether the larger draft has the higher throughput by OTF equation 3, at equal b_p. Each draft: (rounds n, c = a_q /
    b_p, rho)."""
    (n_small, c_small, rho_small), (n_large, c_large, rho_large) = small, large
    return n_small - n_large > tokens * (c_large / rho_large - c_small / rho_small)


def _histogram(accepted: Sequence[int], drafted: Sequence[int]) -> tuple[FloatArray, float]:
    g = np.asarray(drafted, dtype=np.int64)
    return np.bincount(g, minlength=2).astype(np.float64), float(np.sum(accepted))
