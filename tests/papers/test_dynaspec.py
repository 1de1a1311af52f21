"""DynaSpec, section 5: the bounds on random distributions, and the runtime's two verifiers against
their closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from papers.dynaspec import (
    BoolArray,
    FloatArray,
    coupled_acceptance,
    effective_proposal,
    expected_accepted,
    kept_mass,
    overlap,
    overlap_bounds,
    restricted,
    routing_regret,
)

from spectune.runtime.policies.dynaspec import Clusters
from spectune.runtime.sampling import gumbel_row, stream_key
from spectune.runtime.verification import verify_rejection
from spectune.traces.schema import Sampling

SLACK = 1e-12
Cases = tuple[FloatArray, FloatArray, BoolArray]


@pytest.fixture(scope="module", params=[2, 7, 64])
def cases(request: pytest.FixtureRequest) -> Cases:
    """Pairs from flat to nearly one token, from unrelated to nearly equal; shortlists of one token
    to all."""
    vocab, n = request.param, 2000
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(n, vocab)) * rng.choice([0.3, 2.0, 8.0], (n, 1))
    other = logits + rng.normal(size=(n, vocab)) * rng.choice([0.05, 1.0, 10.0], (n, 1))
    p, q = (np.exp(x - x.max(1, keepdims=True)) for x in (logits, other))
    order = np.argsort(np.argsort(rng.random((n, vocab)), axis=1), axis=1)
    return (
        p / p.sum(1, keepdims=True),
        q / q.sum(1, keepdims=True),
        order < rng.integers(1, vocab + 1, (n, 1)),
    )


@pytest.mark.parametrize("beta", [0.0, 0.02, 0.7])
def test_theorem_5_1(cases: Cases, beta: float) -> None:
    p, q, shortlist = cases
    bound, sharp = overlap_bounds(p, q, shortlist, beta)
    found = overlap(p, effective_proposal(q, shortlist, beta))
    assert (found >= sharp - SLACK).all()
    assert (sharp >= bound - SLACK).all()
    # It is attained where the distributions agree on the shortlist, and not idle: p(S) alone is
    # above the overlap somewhere.
    np.testing.assert_allclose(
        overlap_bounds(p, p, shortlist, beta)[0], (1 - beta) * kept_mass(p, shortlist), atol=1e-12
    )
    assert (found < kept_mass(p, shortlist) - 0.1).any()


def test_corollary_5_2(cases: Cases) -> None:
    """Unions of k clusters have regret at least 0, and one of them none; other shortlists can have
    less."""
    p = cases[0][:50]
    clusters = Clusters(np.arange(p.shape[1]) % 2, 2)
    regrets = [
        routing_regret(p, np.broadcast_to(clusters.of == c, p.shape), clusters, 1) for c in range(2)
    ]
    np.testing.assert_allclose(np.min(regrets, axis=0), 0.0, atol=SLACK)
    two = Clusters(np.array([0, 0, 1, 1]), 2)
    assert routing_regret(
        np.array([0.4, 0.1, 0.4, 0.1]), np.array([True, False, True, False]), two, 1
    ) == pytest.approx(-0.3)


def test_theorem_5_3_is_the_mean_of_simulated_rounds() -> None:
    chances = np.array([0.9, 0.6, 0.7, 0.2])
    accepted = np.cumprod(np.random.default_rng(0).random((200_000, 4)) < chances, axis=1).sum(1)
    assert expected_accepted(chances) == pytest.approx(
        accepted.mean(), abs=5 * accepted.std() / 200_000**0.5
    )


def test_coupled_acceptance_by_the_double_sum_and_its_bounds(cases: Cases) -> None:
    p, q, shortlist = cases
    for row in range(0, len(p), 17):
        inner = np.maximum(p[row] / p[row][:, None], q[row] / q[row][:, None]).sum(1)
        assert coupled_acceptance(p[row], q[row]) == pytest.approx((1 / inner).sum(), abs=1e-11)
    for proposal in (q, restricted(q, shortlist)):
        found, tv = coupled_acceptance(p, proposal), 1 - overlap(p, proposal)
        assert (found <= 1 - tv + SLACK).all()
        assert (found >= (1 - tv) / (1 + tv) - SLACK).all()


def test_the_runtime_accepts_as_often_as_the_closed_forms_say(cases: Cases) -> None:
    """One proposal from each of 1,000 contexts by both verifiers of the runtime; sums within 4
    standard errors."""
    p, q, _ = (each[:1000] for each in cases)
    cpu, plain = torch.device("cpu"), Sampling(1.0)
    kept = {"coupled": 0, "rejection": 0}
    for i in range(len(p)):
        log_p, log_q = (
            torch.from_numpy(np.log(p[i] + 1e-300)),
            torch.from_numpy(np.log(q[i] + 1e-300)),
        )
        noise = gumbel_row(stream_key(0, i, "target", 0), p.shape[1], cpu)
        kept["coupled"] += int((log_p + noise).argmax() == (log_q + noise).argmax())
        token = int((log_q + gumbel_row(stream_key(0, i, "draft", 1), p.shape[1], cpu)).argmax())
        logits = log_p.float()[None].repeat(2, 1)
        kept["rejection"] += verify_rejection(logits, i, [token], [log_q], plain, 0, 1).accepted
    for name, chance in (("coupled", coupled_acceptance(p, q)), ("rejection", overlap(p, q))):
        assert abs(kept[name] - chance.sum()) <= 4 * np.sqrt((chance * (1 - chance)).sum()), name
