"""DynaSpec's closed forms (section 5, appendix A.2): how often a proposal is accepted, from the
distributions alone.

p is the target's distribution of the next token in a context, q the draft's over the whole
vocabulary, float64 [..., vocab]; S is the shortlist that the draft is restricted to, bool [...,
vocab]. Leading axes are contexts; results have their shape.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.dynaspec import Clusters

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def overlap(p: FloatArray, q: FloatArray) -> FloatArray:
    """A = sum min(p, q) = 1 - TV(p, q) (equation 4): the chance that rejection sampling accepts a
    token drawn from q."""
    return np.asarray(np.minimum(p, q).sum(-1))


def kept_mass(p: FloatArray, shortlist: BoolArray) -> FloatArray:
    """p(S)."""
    return np.asarray(np.where(shortlist, p, 0.0).sum(-1))


def restricted(q: FloatArray, shortlist: BoolArray) -> FloatArray:
    """q(. | S): what a draft proposes by that evaluates S alone. q(S) must be above 0."""
    inside = np.where(shortlist, q, 0.0)
    return np.asarray(inside / inside.sum(-1, keepdims=True))


def effective_proposal(q: FloatArray, shortlist: BoolArray, beta: float) -> FloatArray:
    """(1 - beta) q(. | S) + beta omega, omega uniform over the complement of S; q(. | S) where
    there is none."""
    outside = (~shortlist).sum(-1, keepdims=True)
    escape = np.where(outside > 0, beta, 0.0)
    return np.asarray(
        (1 - escape) * restricted(q, shortlist) + escape * ~shortlist / np.maximum(outside, 1)
    )


def overlap_bounds(
    p: FloatArray, q: FloatArray, shortlist: BoolArray, beta: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """Theorem 5.1, (1 - beta) (p(S) - TV), and from its proof the sharper (1 - beta) p(S) (1 - TV),
    TV between p(. | S) and q(. | S).

    The overlap of p and the effective proposal is at least either. Where p(S) = 0, TV counts as 1.
    """
    mass = kept_mass(p, shortlist)
    inside = np.where(shortlist, p, 0.0) / np.where(mass > 0, mass, 1.0)[..., None]
    tv = np.where(mass > 0, np.abs(inside - restricted(q, shortlist)).sum(-1) / 2, 1.0)
    return np.asarray((1 - beta) * (mass - tv)), np.asarray((1 - beta) * mass * (1 - tv))


def routing_regret(p: FloatArray, shortlist: BoolArray, clusters: Clusters, k: int) -> FloatArray:
    """p(S*) - p(S) (corollary 5.2), S* the k clusters of most target mass. Theorem 5.1's bound is
    p(S*) - regret - TV at beta = 0."""
    masses = np.stack([p[..., clusters.of == c].sum(-1) for c in range(clusters.count)], axis=-1)
    return np.asarray(
        np.sort(masses, axis=-1)[..., ::-1][..., :k].sum(-1) - kept_mass(p, shortlist)
    )


def expected_accepted(acceptance: npt.ArrayLike) -> float:
    """Theorem 5.3: sum over i of prod_{j <= i} A_j, A_j the chance that token j is accepted given
    that those before it were. Where contexts are random, A_j is averaged over the contexts that
    rounds reach with all tokens accepted."""
    return float(np.cumprod(acceptance).sum())


def coupled_acceptance(p: FloatArray, q: FloatArray) -> FloatArray:
    """P(argmax(log p + g) = argmax(log q + g)) for the same Gumbel noise g: the chance that the
    coupled verifier keeps a proposal.

    E_y = exp(-g_y) are independent Exp(1). Both choose x where E_y >= E_x max(p_y / p_x, q_y / q_x)
    for all other y, which has the chance 1 / sum_y max(p_y / p_x, q_y / q_x). The maximum is p_y /
    p_x exactly where p_y / q_y >= p_x / q_x, so sorting by that ratio gives all sums in O(vocab log
    vocab). The result lies between (1 - TV) / (1 + TV) and the overlap 1 - TV.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        order = np.argsort(
            np.log(p) - np.maximum(np.log(q), np.finfo(np.float64).min), axis=-1, kind="stable"
        )
        a, b = np.take_along_axis(p, order, -1), np.take_along_axis(q, order, -1)
        above = np.cumsum(a[..., ::-1], axis=-1)[
            ..., ::-1
        ]  # sum of p over the ratios from x's on, x included
        below = np.cumsum(b, axis=-1) - b  # sum of q over the ratios before x's
        return np.asarray(
            np.where(np.minimum(a, b) > 0, 1.0 / (above / a + below / b), 0.0).sum(-1)
        )
