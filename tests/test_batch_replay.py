"""Many requests on the native decoder, replayed: step by step what the loop does over a recorded
trace by a simulated clock, and what models do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from batch_oracle import by_the_loop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import chain, top_k
from recorded_texts import plain_texts
from synthetic import flat_profile, with_heads, with_terms
from test_batches import TEXTS, pair  # noqa: F401
from test_shortlists import artifacts

from spectune.engines.engine import Load, Prompt, numbered
from spectune.optimizer.decoder_engine import DecoderEngine
from spectune.optimizer.replay.batches import Seating, serve_decoder
from spectune.optimizer.replay.replay_trace import Nodes, ReplayTrace
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import EXPANDED_LIMIT, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.recording.panoramas import extend_panorama, record_panorama
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Sampling
from spectune.traces.tables import LatencyProfile, Panorama

TOKENS = 24
DRAFTS = ("near", "far", "ngram", "head")
SAMPLED = Sampling(temperature=1.0, seed=4)


def window(draft: str, kind: str, most: int, **more: Any) -> dict[str, Any]:
    return {"draft": draft, "window": {"kind": kind, "gamma_max": most, **more}}


POLICIES: list[dict[str, Any]] = [
    {},
    chain("near", 4),
    chain("far", 6, stop={"kind": "max_prob", "threshold": 0.3}),
    chain("ngram", 5),
    chain("head", 3),
    window("near", "cache_fsm", 5),
    window("far", "fsm", 6),
    window("near", "analytic", 6),
    window("near", "heuristic", 5, transient=True),
    top_k("near", 4, 3, 9),
    top_k("far", 3, 4, 8, stratify={"artifact": "bins", "alpha": 3, "fractions": [0.3, 0.6, 1.0]}),
    top_k("head", 4, 4, 12),
    {**top_k("head", 3, 3, 6), "window": {"kind": "fsm", "gamma_max": 4}},
]


@pytest.fixture(scope="module")
def trace(pair: LoadedPair) -> ReplayTrace:  # noqa: F811
    """Texts of two temperatures with the panoramas of every draft, wide and deep enough for all."""
    prompts = dict(enumerate(TEXTS))
    texts = [
        text
        for n, sampling in enumerate((Sampling(), SAMPLED))
        for text in plain_texts(
            pair, {f"{n}.{i}": prompt for i, prompt in prompts.items()}, sampling, TOKENS
        )
    ]
    size: dict[str, Any] = {"gamma_max": 8, "width": 5, "depth": 8}
    panoramas = {d: [record_panorama(pair, text, d, **size) for text in texts] for d in DRAFTS}
    recorded = ReplayTrace(texts, panoramas)

    def read(draft: str, nodes: Mapping[int, Nodes]) -> dict[int, Panorama]:
        held = recorded.panoramas[draft]
        return {i: extend_panorama(pair, texts[i], held[i], *nodes[i]) for i in nodes}

    return recorded.reading(read)


@pytest.fixture(scope="module")
def profile(pair: LoadedPair) -> LatencyProfile:  # noqa: F811
    """Every term of a step, those of further requests among them."""
    flat = with_heads(flat_profile(pair.id, ("near", "far"), ("head",)), ("near", "head"), 300)
    by_batch = CostTable((1e-4, 7e-4, 2e-3), ("batch",), ((1.0, 3.0, 9.0),))
    terms: dict[str, CostTable | None] = {
        "further target": by_batch,
        "further round": by_batch,
        **{f"further pass/{draft}": by_batch for draft in DRAFTS},
    }
    return with_terms(flat, terms)


BY_TOKENS = {"draft": "near", "window": {"kind": "by_load", "gamma": {"1": 5, "2": 3, "4": 0}}}
"""A table of draft tokens alone."""


def a_table(numbers: Sequence[int], loads: Sequence[int]) -> dict[str, Any]:
    """A policy, or a table by load of several."""
    if len(numbers) == 1:
        return POLICIES[numbers[0]]
    return {"by_load": {str(n): POLICIES[i] for n, i in zip((1, *loads), numbers, strict=False)}}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    numbers=st.lists(st.integers(0, len(POLICIES) - 1), min_size=1, max_size=3, unique=True),
    loads=st.sampled_from([(2, 3), (2, 5), (3, 4)]),
    arrivals=st.one_of(
        st.integers(1, 7).map(Load),
        st.lists(st.floats(0.0, 0.03), min_size=4, max_size=14).map(
            lambda gaps: Load(arrivals=tuple(np.cumsum(gaps).tolist()))
        ),
    ),
    seats=st.integers(1, 6),
    few=st.booleans(),
    texts=st.lists(st.integers(0, 11), min_size=2, max_size=9),
)
def test_steps_are_those_of_the_loop_over_a_trace(
    trace: ReplayTrace,
    profile: LatencyProfile,
    pair: LoadedPair,  # noqa: F811
    numbers: list[int],
    loads: tuple[int, int],
    arrivals: Load,
    seats: int,
    few: bool,
    texts: list[int],
) -> None:
    """Members, policies, drafted and accepted tokens of every step, and when it ends: under chains,
    trees, heads, stateful windows, tables by load, arrivals and clients, also where slots are what
    requests wait for."""
    part = trace.select(texts)
    slots = 2 * int((trace.prompts + trace.budgets).max() + 1 + EXPANDED_LIMIT) if few else 0
    seating = Seating(seats, slots)
    policy = parse_policy(a_table(numbers, loads))
    plan = prepare(policy, DRAFTS, profile=profile, artifacts=artifacts(pair))
    count = len(arrivals.arrivals) or 2 * len(texts)
    found = serve_decoder(part, plan, arrivals, seating, profile, count=count, members=True)
    members, ends = by_the_loop(part, plan, arrivals, seating, profile, count)
    assert [tuple(row) for row in found.members.tolist()] == members
    np.testing.assert_allclose(found.ends_s, ends, rtol=1e-9)
    assert found.served.tokens.tolist() == [
        len(trace.trajectories[texts[n % len(texts)]].output_ids) for n in range(count)
    ]


@pytest.mark.parametrize(
    "document",
    [
        POLICIES[6],
        POLICIES[9],
        a_table((11, 2, 0), (3, 5)),
        a_table((10, 12, 5), (2, 4)),
        a_table((3, 8), (3,)),
        BY_TOKENS,
    ],
    ids=["fsm", "tree", "head, chain, none", "bins, head, cache", "ngram, heuristic", "tokens"],
)
@pytest.mark.parametrize("clients", [1, 3, 6])
def test_steps_are_those_of_models(
    trace: ReplayTrace,
    profile: LatencyProfile,
    pair: LoadedPair,  # noqa: F811
    document: dict[str, Any],
    clients: int,
) -> None:
    """By clients, whose next requests come as their last are answered, whatever the clock says."""
    find, policy = artifacts(pair), parse_policy(document)
    for first in (0, len(TEXTS)):  # greedy, then sampled
        part = trace.select(range(first, first + len(TEXTS)))
        plan = prepare(policy, DRAFTS, profile=profile, artifacts=find)
        count, load = 2 * len(TEXTS), Load(clients)
        found = serve_decoder(part, plan, load, Seating(4), profile, count=count, members=True)
        engine = DecoderEngine(pair, 4, profile=profile, artifacts=find)
        texts = [trace.trajectories[r] for r in part.order]
        prompts = numbered(
            (Prompt("", "x", tuple(t.prompt_ids.tolist()), seeded_as=t.request_id) for t in texts),
            count,
        )
        how: dict[str, Any] = {"sampling": texts[0].sampling, "max_new_tokens": TOKENS}
        answers = {
            int(a.trajectory.request_id): a for a in engine.execute(prompts, policy, load, **how)
        }
        batches = np.bincount(found.members[:, 0])
        for n in range(count):
            text = texts[n % len(texts)]
            assert answers[n].trajectory.output_ids.tolist() == text.output_ids.tolist()
            own = found.members[found.members[:, 1] == n]
            assert [(s.batch, s.policy, s.drafted, s.accepted) for s in answers[n].steps] == [
                (batches[step], plan.plans[p].policy_id, drafted, accepted)
                for step, _, p, drafted, accepted in own.tolist()
            ]


def test_a_request_that_fits_no_extent_is_refused(trace: ReplayTrace) -> None:
    plan = prepare(parse_policy({}), DRAFTS)
    with pytest.raises(TraceError, match=r"needs \d+ slots, \d+ of them for trees; there are 99"):
        serve_decoder(trace, plan, Load(2), Seating(2, 99), None)


def test_costs_of_several_requests_are_measured_first(
    trace: ReplayTrace,
    pair: LoadedPair,  # noqa: F811
) -> None:
    plan, profile = prepare(parse_policy({}), DRAFTS), flat_profile(pair.id, DRAFTS)
    serve_decoder(trace, plan, Load(1), Seating(1), profile)
    with pytest.raises(PolicyError, match="profile --concurrency N"):
        serve_decoder(trace, plan, Load(2), Seating(2), profile)
