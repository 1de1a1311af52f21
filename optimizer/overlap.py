"""How often a draft's proposal is accepted, from the laws alone (DynaSpec, section 5 and appendix A.2).

p is the target's law of the next token in one context, q the draft's over the whole vocabulary, S the shortlist that the draft is
restricted to. Laws are float64 [..., vocab], shortlists bool [..., vocab]; leading axes are contexts and broadcast, results have
their shape. Everything raises ValueError for laws that are negative, not finite, or do not sum to 1 within 1e-6.

Two verifiers (:mod:`runtime.verification`) accept by different chances. ``rejection`` accepts with the overlap of p and the proposal's
law; ``coupled`` with :func:`coupled_acceptance`, which is at most the overlap A = 1 - TV and at least (1 - TV) / (1 + TV) = A / (2 - A).
Theorem 5.3 reads "the standard accept/reject", ``rejection``: with A_i the overlaps it does not bound the coupled verifier from below,
with A_i the coupled chances it holds for it too.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from runtime.policies.dynaspec import Clusters
from traces.schema import Verifier

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

SUM_SLACK: Final = 1e-6
"""How far a law's sum may be from 1, as those of float32 are; laws are divided by their sums."""


def total_variation(p: npt.ArrayLike, q: npt.ArrayLike) -> FloatArray:
    """TV(p, q) = sum |p - q| / 2 (equation 5)."""
    a, b = _laws(p=p, q=q)
    return np.asarray(np.abs(a - b).sum(-1) / 2)


def overlap(p: npt.ArrayLike, q: npt.ArrayLike) -> FloatArray:
    """A = sum min(p, q) = 1 - TV(p, q) (equation 4): the chance that rejection sampling accepts a token drawn from q."""
    a, b = _laws(p=p, q=q)
    return np.asarray(np.minimum(a, b).sum(-1))


def kept_mass(law: npt.ArrayLike, shortlist: npt.ArrayLike) -> FloatArray:
    """law(S), the mass that a shortlist keeps."""
    (a,) = _laws(law=law)
    return np.asarray(np.where(_shortlist(shortlist, a), a, 0.0).sum(-1))


def restricted(law: npt.ArrayLike, shortlist: npt.ArrayLike) -> FloatArray:
    """law(. | S): 0 outside of S and renormalised inside (section 5); of q it is q_S, what a draft proposes by that evaluates S alone.

    Raises ValueError where the law gives S no mass, for which it is undefined.
    """
    (a,) = _laws(law=law)
    inside = np.where(_shortlist(shortlist, a), a, 0.0)
    mass = inside.sum(-1, keepdims=True)
    if not (mass > 0).all():
        raise ValueError("a law that gives the shortlist no mass has no restriction to it")
    return np.asarray(inside / mass)


def effective_proposal(
    q: npt.ArrayLike, shortlist: npt.ArrayLike, beta: float = 0.0, tail: npt.ArrayLike | None = None
) -> FloatArray:
    """q~ = (1 - beta) q_S + beta omega (section 5), omega being ``tail``, by default uniform over the complement of S.

    ``beta`` is within 0..1, 1 excluded. A shortlist of the whole vocabulary leaves no complement, and q~ = q_S there. Raises ValueError for
    another beta, for a tail with mass inside of S, and as :func:`restricted`.
    """
    inside = restricted(q, shortlist)
    _check_beta(beta)
    complement = ~_shortlist(shortlist, inside)
    left = complement.sum(-1, keepdims=True)
    if tail is None:
        omega = np.where(complement, 1.0 / np.maximum(left, 1), 0.0)
    else:
        (omega,) = _laws(tail=tail)
        if np.where(complement | (left == 0), 0.0, omega).any():
            raise ValueError("the tail law must have all its mass outside of the shortlist")
    escape = np.where(left > 0, beta, 0.0)
    return np.asarray((1.0 - escape) * inside + escape * omega)


def overlap_bound(p: npt.ArrayLike, q: npt.ArrayLike, shortlist: npt.ArrayLike, beta: float = 0.0) -> FloatArray:
    """Theorem 5.1: A = overlap(p, q~) >= (1 - beta) (p(S) - TV(p(. | S), q(. | S))), whatever the tail.

    It can be negative, and then says nothing: table 3's are about 0 on both shortlists. :func:`sharp_overlap_bound` is what the proof has
    one line before. Where p(S) = 0 the conditional law is undefined; TV counts as 1. Raises ValueError as :func:`effective_proposal`.
    """
    mass, tv = _mass_and_tv(p, q, shortlist)
    return np.asarray((1.0 - _check_beta(beta)) * (mass - tv))


def sharp_overlap_bound(p: npt.ArrayLike, q: npt.ArrayLike, shortlist: npt.ArrayLike, beta: float = 0.0) -> FloatArray:
    """A >= (1 - beta) p(S) (1 - TV(p(. | S), q(. | S))), from theorem 5.1's proof (appendix A.2): never negative, and never below the
    theorem's bound. Arguments and errors as :func:`overlap_bound`."""
    mass, tv = _mass_and_tv(p, q, shortlist)
    return np.asarray((1.0 - _check_beta(beta)) * mass * (1.0 - tv))


def cluster_masses(law: npt.ArrayLike, clusters: Clusters) -> FloatArray:
    """The mass of every cluster, float64 [..., M]. Raises ValueError where law and clusters differ in vocabulary."""
    (a,) = _laws(law=law)
    if a.shape[-1] != clusters.vocab:
        raise ValueError(f"a law over {a.shape[-1]} tokens has no masses in clusters of {clusters.vocab} tokens")
    before = np.zeros((*a.shape[:-1], clusters.vocab + 1))
    np.cumsum(a[..., clusters.members], axis=-1, out=before[..., 1:])
    return np.asarray(np.diff(before[..., clusters.offsets], axis=-1))


def oracle_clusters(p: npt.ArrayLike, clusters: Clusters, k: int) -> IntArray:
    """S*'s clusters (corollary 5.2): the best union of k clusters under p, int64 [..., min(k, M)], best first, ties by lower number.

    Clusters are disjoint, so these are the k of most target mass.
    """
    order = np.argsort(-cluster_masses(p, clusters), axis=-1, kind="stable")
    return np.asarray(order[..., :k], dtype=np.int64)


def union(clusters: Clusters, chosen: npt.ArrayLike) -> BoolArray:
    """The shortlist of ``chosen`` clusters, whole numbers [..., k] within 0..M - 1: bool [..., vocab]."""
    numbers = np.asarray(chosen, dtype=np.int64)
    kept = np.zeros((*numbers.shape[:-1], clusters.count), dtype=np.bool_)
    np.put_along_axis(kept, numbers, True, axis=-1)
    return np.asarray(kept[..., clusters.of])


def routing_regret(p: npt.ArrayLike, shortlist: npt.ArrayLike, clusters: Clusters, k: int) -> FloatArray:
    """epsilon = p(S*) - p(S) (corollary 5.2), S* being the best union of k clusters under p.

    At least 0 where S is a union of at most k clusters; a frequency shortlist is none, and its regret can be negative.
    """
    return np.asarray(_oracle_mass(p, clusters, k) - kept_mass(p, shortlist))


def regret_bound(
    p: npt.ArrayLike, q: npt.ArrayLike, shortlist: npt.ArrayLike, clusters: Clusters, k: int, beta: float = 0.0
) -> FloatArray:
    """Corollary 5.2: A >= (1 - beta) (p(S*) - epsilon - TV(p(. | S), q(. | S))).

    With epsilon the regret itself this equals :func:`overlap_bound`; it says how much of that bound routing costs: (1 - beta) epsilon.
    """
    _, tv = _mass_and_tv(p, q, shortlist)
    kept = _oracle_mass(p, clusters, k) - routing_regret(p, shortlist, clusters, k)
    return np.asarray((1.0 - _check_beta(beta)) * (kept - tv))


def expected_accepted(acceptance: npt.ArrayLike) -> FloatArray:
    """Theorem 5.3: sum over i of prod_{j <= i} A_j, the expected number of drafted tokens accepted in a round of b tokens.

    ``acceptance`` [..., b]: A_j is the chance that token j is accepted *given that those before it were*. Then the sum is exact, not only
    a bound: P(L >= i) is the product. The theorem takes the A_j as given numbers; where contexts are random, A_j must be averaged
    over the contexts that rounds reach with all tokens accepted. Averaging over what the draft proposes is another number, and the sum
    is then no bound. Raises ValueError for chances outside 0..1.
    """
    chance = np.asarray(acceptance, dtype=np.float64)
    if chance.ndim < 1 or not ((chance >= 0) & (chance <= 1 + SUM_SLACK)).all():
        raise ValueError("chances of acceptance must be numbers [..., b] within 0..1")
    return np.asarray(np.cumprod(chance, axis=-1).sum(-1))


def coupled_acceptance(p: npt.ArrayLike, q: npt.ArrayLike) -> FloatArray:
    """P(argmax(log p + g) = argmax(log q + g)) for the same Gumbel noise g: the chance that the coupled verifier keeps a proposal.

    E_y = exp(-g_y) are independent Exp(1), and the argmax is the y of smallest E_y / p_y. Both laws choose x where
    E_y >= E_x max(p_y / p_x, q_y / q_x) for all other y; given E_x = e that has the chance prod_y exp(-e r_xy), and integrating over e
    gives 1 / (1 + sum_{y != x} r_xy). So the result is sum_x 1 / sum_y max(p_y / p_x, q_y / q_x), over the x that both can choose.

    It is at most the overlap 1 - TV, as any coupling's, and at least (1 - TV) / (1 + TV): the inner sum is at most
    sum_y max(p_y, q_y) / min(p_x, q_x) = (1 + TV) / min(p_x, q_x). The maximum is p_y / p_x exactly where p_y / q_y >= p_x / q_x, so
    sorting by that ratio gives all inner sums in O(vocab log vocab).
    """
    a, b = np.broadcast_arrays(*_laws(p=p, q=q))
    order = np.argsort(_log(a) - np.maximum(_log(b), np.finfo(np.float64).min), axis=-1, kind="stable")
    a, b = np.take_along_axis(a, order, -1), np.take_along_axis(b, order, -1)
    above = np.cumsum(a[..., ::-1], axis=-1)[..., ::-1]  # sum of p over the ratios from x's on, x included
    below = np.cumsum(b, axis=-1) - b  # sum of q over the ratios before x's
    both = np.minimum(a, b) > 0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        chance = 1.0 / (above / a + below / b)
    return np.asarray(np.where(both, chance, 0.0).sum(-1))


def acceptance(p: npt.ArrayLike, q: npt.ArrayLike, verifier: Verifier) -> FloatArray:
    """The chance that the verifier accepts a proposal made by the law q (a shortlisted draft's: :func:`restricted` or
    :func:`effective_proposal`): :func:`coupled_acceptance` or :func:`overlap`."""
    return coupled_acceptance(p, q) if verifier == "coupled" else overlap(p, q)


def _oracle_mass(p: npt.ArrayLike, clusters: Clusters, k: int) -> FloatArray:
    """p(S*)."""
    return np.asarray(np.sort(cluster_masses(p, clusters), axis=-1)[..., ::-1][..., :k].sum(-1))


def _mass_and_tv(p: npt.ArrayLike, q: npt.ArrayLike, shortlist: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """(p(S), TV(p(. | S), q(. | S))), the latter 1 where p(S) is 0."""
    a, b = np.broadcast_arrays(*_laws(p=p, q=q))
    kept = restricted(b, shortlist)
    mass = kept_mass(a, shortlist)
    inside = np.where(_shortlist(shortlist, a), a, 0.0) / np.where(mass > 0, mass, 1.0)[..., None]
    return mass, np.where(mass > 0, np.minimum(np.abs(inside - kept).sum(-1) / 2, 1.0), 1.0)


def _log(law: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(law))


def _laws(**named: npt.ArrayLike) -> list[FloatArray]:
    out = []
    for name, values in named.items():
        law = np.asarray(values, dtype=np.float64)
        if law.ndim < 1 or not law.shape[-1]:
            raise ValueError(f"{name} must be a law [..., vocab], not {list(law.shape)}")
        total = law.sum(-1, keepdims=True)
        if not ((law >= 0).all() and (np.abs(total - 1.0) <= SUM_SLACK).all()):
            raise ValueError(f"{name} must be probabilities that sum to 1 over the last axis")
        out.append(law / total)
    return out


def _shortlist(shortlist: npt.ArrayLike, law: npt.NDArray[Any]) -> BoolArray:
    mask = np.asarray(shortlist)
    if mask.dtype != np.bool_ or mask.ndim < 1 or mask.shape[-1] != law.shape[-1]:
        raise ValueError(f"a shortlist must be bool [..., {law.shape[-1]}], not {mask.dtype} {list(mask.shape)}")
    return mask


def _check_beta(beta: float) -> float:
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta, the tail's share of the proposal, must be at least 0 and below 1, not {beta}")
    return beta
