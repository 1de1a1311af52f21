"""How likely the next drafted token is to be accepted, and the window that follows from it (on-the-fly paper, section 4.1
and B.2).

Three estimates of beta = Acc(x_t | X_<t) from rounds that drafted g_i tokens and had V_i accepted:

- Equation 2, sum V / (sum V + rejections). A round observes a geometric variable *censored* at its window (P(V = g) =
  beta^g), and for that law equation 2 is the exact maximum-likelihood estimate, not an approximation.
- Equation 11, the maximum-likelihood root under equation 10, which is a geometric law *truncated* (conditioned) to y = V + 1
  <= g + 1. The printed polynomial is the right stationary condition of equation 10, but "only one root in 0 < beta < 1"
  holds only while mean(y) < (g + 2) / 2; from there on the likelihood grows up to beta = 1, and the estimate is 1 (callers
  cap it). As rounds are censored, not truncated, this estimate is biased upwards (mean 1.9375 at g = 4, beta = 0.5 reads as
  0.54).
- Equation 12, equation 11 solved for mean(y). Its printed numerator begins with gamma beta^(gamma+2); expanding equation 11 gives
  (gamma + 1) beta^(gamma+2), the only reading that stays finite as beta -> 1. That one is used.

Where windows differ within the history, equations 11 and 12 become sum_i y_i = sum_i mean(g_i, beta), the same likelihood pooled.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from runtime.policies.jit import compiled

FloatArray = npt.NDArray[np.float64]

TABLE_KNOTS: Final = 33
"""Knots of the tabulated equation 12, evenly spaced over beta in [0, 1]."""
NEWTON_STEPS: Final = 60
"""Most steps of a bracketed Newton search; it takes about six."""


def truncated_excess(gamma_max: int, betas: FloatArray) -> FloatArray:
    """mean(g, beta) - 1, the expected accepted tokens under equation 10 (equation 12 less 1), float64 [len(betas), gamma_max
    + 1].

    Column g is sum_i i beta^i / sum_i beta^i over i = 0..g: equation 12 without its cancellation near 1. Rises strictly with
    beta for g > 0.
    """
    powers = betas[:, None] ** np.arange(gamma_max + 1)
    return np.asarray(np.cumsum(powers * np.arange(gamma_max + 1), axis=1) / np.cumsum(powers, axis=1), dtype=np.float64)


def tabulated_excess(gamma_max: int, betas: FloatArray) -> FloatArray:
    """:func:`truncated_excess` read from its table by linear interpolation in beta; same shape."""
    knots = np.linspace(0.0, 1.0, TABLE_KNOTS)
    table = truncated_excess(gamma_max, knots)
    return np.stack([np.interp(betas, knots, table[:, g]) for g in range(gamma_max + 1)], axis=1)


def window_thresholds(round_s: FloatArray, gamma_min: int, acc_max: float) -> FloatArray:
    """Betas at which equation 1's argmax moves up: it exceeds ``gamma_min + k`` iff beta > thresholds[k].

    ``round_s[g]`` = g a_q + b_p(g) for g = 0..gamma_max. For windows g < g' the ratio of expected emitted tokens
    Omega(beta, g') / Omega(beta, g) rises with beta, so each pair crosses once and the argmax (ties to the smaller window) is a
    staircase in beta. Only the steps reached at beta <= ``acc_max`` are returned, ascending.
    """
    high = np.full(len(round_s) - 1 - gamma_min, float(acc_max))
    reached = best_window(high, round_s, gamma_min) > gamma_min + np.arange(len(high))
    high = high[reached]
    low, wanted = np.zeros_like(high), gamma_min + np.arange(len(high))
    for _ in range(60):
        middle = 0.5 * (low + high)
        above = best_window(middle, round_s, gamma_min) > wanted
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return low


def best_window(betas: FloatArray, round_s: FloatArray, gamma_min: int = 0) -> npt.NDArray[np.int64]:
    """Equation 1: the window in gamma_min..gamma_max with the most expected tokens a second at each beta (ties: the smallest)."""
    omega = np.cumsum(betas[:, None] ** np.arange(len(round_s)), axis=1)
    return np.asarray(gamma_min + np.argmax((omega / round_s)[:, gamma_min:], axis=1), dtype=np.int64)


@compiled()
def best_window_scalar(beta: float, draft_s: float, verify_s: FloatArray, scale: float, gamma_min: int, gamma_max: int) -> int:
    """Equation 1 for one beta: a_q = ``draft_s``, b_p(g) = ``scale * verify_s[g]``. Ties go to the smallest window."""
    omega, power = 0.0, 1.0
    best, best_omega, best_cost = gamma_min, -1.0, 1.0
    for g in range(gamma_max + 1):
        omega += power
        power *= beta
        if g >= gamma_min:
            cost = g * draft_s + scale * verify_s[g]
            if omega * best_cost > best_omega * cost:
                best, best_omega, best_cost = g, omega, cost
    return best


@compiled()
def equation_11_root(counts: FloatArray, accepted: float, gamma_max: int) -> float:
    """beta in [0, 1] with sum_g counts[g] (mean(g, beta) - 1) = ``accepted``; 1 if there is none below.

    ``counts[g]`` rounds drafted g tokens, g = 0..gamma_max, and had ``accepted`` tokens accepted in all.
    """
    most = 0.0
    for g in range(1, gamma_max + 1):
        most += 0.5 * counts[g] * g
    if accepted >= most:
        return 1.0
    if accepted == 0.0:
        return 0.0
    low, high, beta = 0.0, 1.0, 0.5
    for _ in range(NEWTON_STEPS):
        # d mean / d beta = variance / beta, as in every law proportional to beta^i.
        expected, variance, total, first, second, power = 0.0, 0.0, 0.0, 0.0, 0.0, 1.0
        for g in range(gamma_max + 1):
            total += power
            first += g * power
            second += g * g * power
            power *= beta
            mean = first / total
            expected += counts[g] * mean
            variance += counts[g] * (second / total - mean * mean)
        if expected < accepted:
            low = beta
        else:
            high = beta
        step = beta - (expected - accepted) * beta / variance
        if not low < step < high:
            step = 0.5 * (low + high)
        if abs(step - beta) < 1e-13:
            return step
        beta = step
    return beta


@compiled()
def equation_12_inverse(counts: FloatArray, accepted: float, table: FloatArray, gamma_max: int) -> float:
    """The same root from the tabulated equation 12: ``table`` is :func:`truncated_excess` at :data:`TABLE_KNOTS` even knots.

    The knots' sums are searched and the beta between two of them is interpolated linearly.
    """
    low, high = 0, len(table) - 1
    low_sum, high_sum = 0.0, 0.0
    for g in range(gamma_max + 1):
        high_sum += counts[g] * table[high, g]
    if accepted >= high_sum:
        return 1.0
    while high - low > 1:
        middle = (low + high) // 2
        middle_sum = 0.0
        for g in range(gamma_max + 1):
            middle_sum += counts[g] * table[middle, g]
        if middle_sum < accepted:
            low, low_sum = middle, middle_sum
        else:
            high, high_sum = middle, middle_sum
    return (low + (accepted - low_sum) / (high_sum - low_sum)) / (len(table) - 1)
