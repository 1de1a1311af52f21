"""On-the-fly adaptation's closed forms: what speculation yields if acceptance is a coin that falls
with probability beta.

gamma is the window, a_q the seconds of a draft step, b_p(gamma) those of verifying gamma tokens,
rho tokens emitted per token drafted.
"""

from __future__ import annotations

import numpy as np


def expected_emitted(beta: float, gamma: int) -> float:
    """Equation 9, Omega = (1 - beta^(gamma+1)) / (1 - beta): tokens a round emits, the target's own
    included; gamma + 1 at beta = 1."""
    return float(np.sum(beta ** np.arange(gamma + 1.0)))


def acceptance_rate(beta: float, gamma: int) -> float:
    """rho = Omega / gamma (section 5). The text says accepted per drafted; equations 3 and 8 hold
    for emitted per drafted."""
    return expected_emitted(beta, gamma) / gamma


def throughput(tokens: float, rounds: float, rho: float, draft_s: float, verify_s: float) -> float:
    """Equation 3: R = L / (b_p(gamma) n + a_q L / rho), tokens per second."""
    return tokens / (verify_s * rounds + draft_s * tokens / rho)


def larger_draft_condition(
    rounds_saved: float, cost_ratio_gain: float, rho_gain: float, tokens: float
) -> bool:
    """Equation 4 (theorem 3): delta n > (delta c / delta rho) L, c = a_q / b_p. Sufficient, not
    necessary: equation 3 gives delta n > L (c_large / rho_large - c_small / rho_small)."""
    return rho_gain > 0 and rounds_saved > cost_ratio_gain / rho_gain * tokens
