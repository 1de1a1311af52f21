"""Acceptance from laws (DynaSpec, section 5): the bounds on thousands of random laws, and the chances against the verifiers simulated."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chi2

from optimizer.overlap import (
    acceptance,
    cluster_masses,
    coupled_acceptance,
    effective_proposal,
    expected_accepted,
    kept_mass,
    oracle_clusters,
    overlap,
    overlap_bound,
    regret_bound,
    restricted,
    routing_regret,
    sharp_overlap_bound,
    total_variation,
    union,
)
from runtime.policies.dynaspec import Clusters

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
SLACK = 1e-12


def random_laws(n: int, vocab: int, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Pairs of laws, from flat to nearly one token, from unrelated to nearly equal, a third of them with zeros."""
    spread = rng.choice([0.3, 2.0, 8.0], (n, 1))
    logits = rng.normal(size=(n, vocab)) * spread
    other = logits + rng.normal(size=(n, vocab)) * rng.choice([0.05, 1.0, 10.0], (n, 1))

    def law(x: FloatArray) -> FloatArray:
        zero = (rng.random((n, vocab)) < 0.4) & (rng.random((n, 1)) < 1 / 3)
        zero[np.arange(n), rng.integers(vocab, size=n)] = False
        w = np.where(zero, 0.0, np.exp(x - x.max(1, keepdims=True)) + 1e-300)
        return w / w.sum(1, keepdims=True)

    return law(logits), law(other)


def random_shortlists(n: int, vocab: int, rng: np.random.Generator, q: FloatArray) -> BoolArray:
    """One token, the whole vocabulary, the tokens of least mass, or any; always with some of q's mass."""
    kind, size = rng.integers(4, size=(n, 1)), rng.integers(1, vocab, (n, 1))
    rank = np.argsort(np.argsort(q, axis=1), axis=1)
    order = np.argsort(np.argsort(rng.random((n, vocab)), axis=1), axis=1)
    chosen = np.select([kind == 0, kind == 1, kind == 2], [order < 1, order < vocab, rank < size], order < size)
    return chosen | ((np.where(chosen, q, 0).sum(1, keepdims=True) == 0) & (q == q.max(1, keepdims=True)))


@pytest.fixture(scope="module", params=[2, 7, 64])
def cases(request: pytest.FixtureRequest) -> tuple[FloatArray, FloatArray, BoolArray]:
    rng = np.random.default_rng(request.param)
    p, q = random_laws(3000, request.param, rng)
    return p, q, random_shortlists(3000, request.param, rng, q)


Cases = tuple[FloatArray, FloatArray, BoolArray]


def test_overlap_is_one_minus_total_variation(cases: Cases) -> None:
    p, q, _ = cases
    np.testing.assert_allclose(overlap(p, q), 1 - total_variation(p, q), atol=1e-14)
    np.testing.assert_allclose(overlap(p, p), 1.0, atol=1e-14)
    assert overlap([0.5, 0.5, 0, 0], [0, 0, 0.25, 0.75]) == 0
    assert overlap([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]) == pytest.approx(0.6)


def test_the_restricted_law_is_the_softmax_over_the_shortlist(cases: Cases) -> None:
    _, q, shortlist = cases
    found = restricted(q, shortlist)
    for row in range(0, len(q), 37):
        s = np.flatnonzero(shortlist[row])
        with np.errstate(divide="ignore"):
            logits = np.log(q[row, s])
        e = np.exp(logits - logits.max())
        np.testing.assert_allclose(found[row, s], e / e.sum(), rtol=1e-9)
    assert not found[~shortlist].any()
    np.testing.assert_allclose(kept_mass(q, shortlist), 1 - kept_mass(q, ~shortlist), atol=1e-14)


@pytest.mark.parametrize("beta", [0.0, 0.02, 0.7])
def test_the_effective_proposal(cases: Cases, beta: float) -> None:
    _, q, shortlist = cases
    proposal = effective_proposal(q, shortlist, beta)
    np.testing.assert_allclose(proposal.sum(1), 1.0, atol=1e-13)
    whole = shortlist.all(1)
    np.testing.assert_allclose(proposal[whole], q[whole], atol=1e-13)
    np.testing.assert_allclose(kept_mass(proposal, shortlist)[~whole], 1 - beta, atol=1e-13)
    row = int(np.argmin(whole))
    outside = proposal[row][~shortlist[row]]
    np.testing.assert_allclose(outside, beta / len(outside), atol=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.02, 0.7])
def test_theorem_5_1(cases: Cases, beta: float) -> None:
    p, q, shortlist = cases
    rng = np.random.default_rng(1)
    bound, sharp = overlap_bound(p, q, shortlist, beta), sharp_overlap_bound(p, q, shortlist, beta)
    weights = np.where(shortlist, 0, rng.random(p.shape) ** 8)
    tail = np.where(shortlist.all(1, keepdims=True), q, weights / np.maximum(weights.sum(1, keepdims=True), 1e-300))
    for proposal in (effective_proposal(q, shortlist, beta), effective_proposal(q, shortlist, beta, tail)):
        found = overlap(p, proposal)
        assert (found >= sharp - SLACK).all()
        assert (sharp >= bound - SLACK).all()
    assert (sharp >= 0).all()
    # by the definitions, row by row
    for row in range(0, len(p), 61):
        s = shortlist[row]
        mass = p[row, s].sum()
        if mass > 0:
            tv = np.abs(p[row, s] / mass - q[row, s] / q[row, s].sum()).sum() / 2
            assert bound[row] == pytest.approx((1 - beta) * (mass - tv), abs=1e-12)
            assert sharp[row] == pytest.approx((1 - beta) * mass * (1 - tv), abs=1e-12)
        else:
            assert bound[row] <= 0


def test_theorem_5_1_is_attained() -> None:
    """Where target and draft agree on the shortlist, both bounds are the kept mass, and so is the overlap without a tail."""
    p, _ = random_laws(500, 30, np.random.default_rng(3))
    shortlist = random_shortlists(500, 30, np.random.default_rng(4), p)
    mass = kept_mass(p, shortlist)
    for found in (
        overlap(p, effective_proposal(p, shortlist)),
        overlap_bound(p, p, shortlist),
        sharp_overlap_bound(p, p, shortlist),
    ):
        np.testing.assert_allclose(found, mass, atol=1e-12)


def test_a_smaller_beta_or_a_wrong_sign_would_break_the_bound(cases: Cases) -> None:
    """The bounds are not idle: p(S) alone, without TV, is above the overlap somewhere, and so is a bound that forgets beta."""
    p, q, shortlist = cases
    found = overlap(p, effective_proposal(q, shortlist, 0.3))
    assert (found < kept_mass(p, shortlist) - 0.1).any()
    assert (found < sharp_overlap_bound(p, q, shortlist) - 0.1).any()


def test_the_oracle_is_the_best_union_of_clusters() -> None:
    rng = np.random.default_rng(5)
    p, _ = random_laws(60, 24, rng)
    for k in range(1, 8):
        clusters = Clusters.of_assignment(rng.integers(0, 6, 24), 7)  # the last one is empty
        np.testing.assert_allclose(cluster_masses(p, clusters).sum(1), 1.0, atol=1e-12)
        best = kept_mass(p, union(clusters, oracle_clusters(p, clusters, k)))
        every = [kept_mass(p, union(clusters, np.tile(some, (60, 1)))) for some in itertools.combinations(range(7), k)]
        np.testing.assert_allclose(best, np.max(every, axis=0), atol=1e-12)
        regrets = [
            routing_regret(p, union(clusters, np.tile(some, (60, 1))), clusters, k)
            for some in itertools.combinations(range(7), k)
        ]
        assert np.min(regrets) >= -SLACK
        np.testing.assert_allclose(np.min(regrets, axis=0), 0.0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_corollary_5_2(beta: float) -> None:
    rng = np.random.default_rng(6)
    p, q = random_laws(3000, 48, rng)
    clusters = Clusters.of_assignment(rng.integers(0, 12, 48), 12)
    chosen = np.argsort(rng.random((3000, 12)), axis=1)[:, :4]
    shortlist = union(clusters, chosen)
    for row in range(0, 3000, 97):
        np.testing.assert_array_equal(np.flatnonzero(shortlist[row]), clusters.ids(chosen[row]))
    kept = kept_mass(q, shortlist) > 0
    p, q, shortlist = p[kept], q[kept], shortlist[kept]
    bound = regret_bound(p, q, shortlist, clusters, 4, beta)
    np.testing.assert_allclose(bound, overlap_bound(p, q, shortlist, beta), atol=1e-12)
    assert (overlap(p, effective_proposal(q, shortlist, beta)) >= bound - SLACK).all()
    regret = routing_regret(p, shortlist, clusters, 4)
    oracle = union(clusters, oracle_clusters(p, clusters, 4))
    np.testing.assert_allclose(kept_mass(p, oracle) - regret, kept_mass(p, shortlist), atol=1e-12)


def test_a_shortlist_that_is_no_union_can_have_negative_regret() -> None:
    clusters = Clusters.of_assignment([0, 0, 1, 1], 2)
    assert routing_regret([0.4, 0.1, 0.4, 0.1], [True, False, True, False], clusters, 1) == pytest.approx(-0.3)


# -- theorem 5.3 -------------------------------------------------------------------------------------------------------------------


def test_expected_accepted_is_the_sum_over_prefixes() -> None:
    chances = np.random.default_rng(7).random((50, 6))
    by_length = np.zeros(50)
    for row, a in enumerate(chances):
        lengths = [np.prod(a[:i]) * (1 - a[i]) for i in range(6)] + [np.prod(a)]
        by_length[row] = np.dot(range(7), lengths)
    np.testing.assert_allclose(expected_accepted(chances), by_length, rtol=1e-12)
    np.testing.assert_allclose(expected_accepted(chances[0]), by_length[0], rtol=1e-12)
    assert expected_accepted([1.0, 1.0, 0.0, 1.0]) == 2


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_theorem_5_3_over_random_contexts(verifier: str) -> None:
    """Two steps whose second laws depend on the first token: exact with A_2 over the contexts that are reached, a bound with the least A_2,
    and wrong either way with A_2 averaged over what the draft proposes."""
    rng = np.random.default_rng(8)
    vocab, over, under = 4, False, False
    for _ in range(200):
        p, q = random_laws(1 + vocab, vocab, rng)
        first = float(acceptance(p[0], q[0], verifier))  # type: ignore[arg-type]
        second = acceptance(p[1:], q[1:], verifier)  # type: ignore[arg-type]
        if verifier == "rejection":
            accepted = np.minimum(p[0], q[0])  # of token x: proposed with q, kept with min(1, p / q)
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                rate = np.maximum(p[0] / p[0][:, None], q[0] / q[0][:, None]).sum(1)
            accepted = np.where(np.minimum(p[0], q[0]) > 0, 1 / rate, 0.0)
        assert accepted.sum() == pytest.approx(first, abs=1e-12)
        expected = first + float((accepted * second).sum())  # P(L >= 1) + P(L >= 2)
        if first > 0:
            reached = float((accepted * second).sum()) / first
            assert expected_accepted([first, reached]) == pytest.approx(expected, rel=1e-12)
        assert expected >= float(expected_accepted([first, second.min()])) - SLACK
        drafted = float(expected_accepted([first, float((q[0] * second).sum())]))
        over, under = over or drafted > expected + 0.01, under or drafted < expected - 0.01
    assert over
    assert under


# -- verifiers ---------------------------------------------------------------------------------------------------------------------


def test_coupled_acceptance_by_the_double_sum(cases: Cases) -> None:
    p, q, _ = cases
    with np.errstate(divide="ignore", invalid="ignore"):
        for row in range(0, len(p), 17):
            inner = np.maximum(p[row] / p[row][:, None], q[row] / q[row][:, None]).sum(1)
            both = np.minimum(p[row], q[row]) > 0
            assert coupled_acceptance(p[row], q[row]) == pytest.approx((1 / inner[both]).sum(), abs=1e-11)


def test_coupled_acceptance_lies_between_its_bounds(cases: Cases) -> None:
    p, q, shortlist = cases
    for proposal in (q, restricted(q, shortlist), effective_proposal(q, shortlist, 0.1)):
        found, tv = coupled_acceptance(p, proposal), total_variation(p, proposal)
        assert (found <= 1 - tv + SLACK).all()
        assert (found >= (1 - tv) / (1 + tv) - SLACK).all()
    np.testing.assert_allclose(coupled_acceptance(p, p), 1.0, atol=1e-12)
    np.testing.assert_allclose(coupled_acceptance(p, q), coupled_acceptance(q, p), atol=1e-12)
    if p.shape[1] == 2:
        np.testing.assert_allclose(
            coupled_acceptance(p, q), overlap(p, q), atol=1e-12, err_msg="of two tokens: the best coupling"
        )
    else:
        assert (overlap(p, q) - coupled_acceptance(p, q) > 0.05).any(), "else it is not: theorem 5.3's A is not its chance"


def test_coupled_acceptance_of_laws_without_a_common_token() -> None:
    assert coupled_acceptance([0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]) == 0
    assert coupled_acceptance([1.0, 0.0], [1.0, 0.0]) == 1
    assert coupled_acceptance([1.0, 0.0], [0.25, 0.75]) == pytest.approx(0.25), (
        "one law certain: the other's chance of that token"
    )


def test_a_restricted_draft_loses_at_most_what_the_theory_says(cases: Cases) -> None:
    """For a draft equal to the target, a shortlist costs the coupled verifier nothing beside the mass it drops."""
    p, _, shortlist = cases
    has = kept_mass(p, shortlist) > 0
    law = restricted(p[has], shortlist[has])
    np.testing.assert_allclose(coupled_acceptance(p[has], law), kept_mass(p[has], shortlist[has]), atol=1e-12)


@pytest.mark.parametrize("shortlisted", [False, True])
def test_both_verifiers_simulated(shortlisted: bool) -> None:
    """Proposals drawn and verified 40,000 times in each of 24 contexts: shares of accepted ones within 4 sigma, together by chi-square,
    and what is emitted follows p."""
    rng = np.random.default_rng(11 + shortlisted)
    contexts, vocab, draws = 24, 9, 40_000
    p, q = random_laws(contexts, vocab, rng)
    law = restricted(q, random_shortlists(contexts, vocab, rng, q)) if shortlisted else q
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p), np.log(law)
    shares = {"coupled": np.zeros(contexts), "rejection": np.zeros(contexts)}
    for c in range(contexts):
        noise = rng.gumbel(size=(draws, vocab))
        token = (log_p[c] + noise).argmax(1)
        shares["coupled"][c] = (token == (log_q[c] + noise).argmax(1)).mean()
        emitted = np.bincount(token, minlength=vocab)
        fits(emitted, p[c] * draws)

        drawn = rng.choice(vocab, draws, p=law[c])
        kept = rng.random(draws) * law[c][drawn] < p[c][drawn]
        shares["rejection"][c] = kept.mean()
        residual = np.maximum(p[c] - law[c], 0)
        if residual.sum() > 1e-12:
            drawn = np.where(kept, drawn, rng.choice(vocab, draws, p=residual / residual.sum()))
        fits(np.bincount(drawn, minlength=vocab), p[c] * draws)
    for verifier, share in shares.items():
        expected = acceptance(p, law, verifier)  # type: ignore[arg-type]
        sigma = np.sqrt(expected * (1 - expected) / draws)
        assert (np.abs(share - expected) <= 4 * sigma + 1e-9).all(), verifier
        varies = sigma > 1e-4
        assert varies.sum() >= 10
        z = (share - expected)[varies] / sigma[varies]
        assert float((z**2).sum()) < chi2.ppf(0.9999, varies.sum()), verifier


def fits(counts: npt.NDArray[np.int64], expected: FloatArray) -> None:
    """Chi-square of counts against expected ones; tokens expected less than 5 times are counted together."""
    often = expected >= 5
    assert not counts[expected == 0].any()
    found = np.append(counts[often], counts[~often].sum()).astype(np.float64)
    wanted = np.append(expected[often], expected[~often].sum())
    if wanted[-1] < 5:
        found, wanted = found[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert float(((found - wanted) ** 2 / wanted).sum()) < chi2.ppf(0.99999, len(wanted) - 1)


# -- shapes and bad input ----------------------------------------------------------------------------------------------------------


def test_contexts_broadcast() -> None:
    rng = np.random.default_rng(12)
    p, q = random_laws(6, 10, rng)
    laws, shortlist = p.reshape(2, 3, 10), np.arange(10) != 4
    clusters = Clusters.of_assignment(rng.integers(0, 4, 10), 4)
    for f in (overlap, coupled_acceptance, total_variation):
        np.testing.assert_allclose(f(laws, q[0]), [[f(laws[i, j], q[0]) for j in range(3)] for i in range(2)], atol=1e-14)
    assert overlap_bound(laws, q[0], shortlist).shape == (2, 3)
    assert effective_proposal(q, shortlist, 0.1).shape == (6, 10)
    assert routing_regret(laws, shortlist, clusters, 2).shape == (2, 3)
    assert oracle_clusters(laws, clusters, 9).shape == (2, 3, 4)


def test_laws_of_float32_softmax_are_taken() -> None:
    x = np.random.default_rng(13).normal(size=(4, 100_000)).astype(np.float32)
    e = np.exp(x)
    law = e / e.sum(1, keepdims=True)
    assert law.dtype == np.float32
    np.testing.assert_allclose(overlap(law, law), 1.0, atol=1e-12)


def test_bad_input_is_named() -> None:
    law, mask = np.array([0.5, 0.5]), np.array([True, False])
    with pytest.raises(ValueError, match="p must be probabilities"):
        overlap([0.5, 0.6], law)
    with pytest.raises(ValueError, match="q must be probabilities"):
        overlap(law, [1.5, -0.5])
    with pytest.raises(ValueError, match="q must be probabilities"):
        coupled_acceptance(law, [np.nan, 1.0])
    with pytest.raises(ValueError, match=r"bool \[..., 2\]"):
        restricted(law, [1, 0])
    with pytest.raises(ValueError, match=r"bool \[..., 2\]"):
        kept_mass(law, [True, False, True])
    with pytest.raises(ValueError, match="no mass"):
        restricted(law, [False, False])
    with pytest.raises(ValueError, match="no mass"):
        overlap_bound(law, [0.0, 1.0], mask)
    for beta in (-0.1, 1.0):
        with pytest.raises(ValueError, match="beta"):
            effective_proposal(law, mask, beta)
        with pytest.raises(ValueError, match="beta"):
            overlap_bound(law, law, mask, beta)
    with pytest.raises(ValueError, match="outside of the shortlist"):
        effective_proposal(law, mask, 0.1, [0.5, 0.5])
    with pytest.raises(ValueError, match="within 0"):
        expected_accepted([0.5, 1.2])
    with pytest.raises(ValueError, match="clusters of 3 tokens"):
        cluster_masses(law, Clusters.of_assignment([0, 0, 1], 2))
