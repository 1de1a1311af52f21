"""Routed shortlists in replay: chains round by round as executed, trees nearly, what passes cost,
and how cluster ranks are kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from recorded_texts import executed, keep, plain_texts, request_of, store_of, trace_of
from synthetic import flat_profile, with_heads, with_terms
from test_lossless import PROMPTS
from test_shortlists import M, routing
from test_tree_parity import shape

import spectune.optimizer.fit.ranks as ranking
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.shortlist_ranks import ClusterRanks, budget_grid
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.artifacts import ROUTER
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import LatencyProfile, Sampling
from spectune.traces.store import TraceStore

TOKENS = 16
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=4)]
DRAFTS = ("near", "far")
WINDOWS: list[dict[str, Any]] = [
    {"kind": "fixed", "gamma": 1},
    {"kind": "fixed", "gamma": 6},
    {"kind": "fsm", "gamma_max": 8},
    {"kind": "cache_fsm", "gamma_max": 6},
    {"kind": "heuristic", "gamma_max": 10},
    {"kind": "q_learning", "gamma_max": 6, "seed": 2},
    {"kind": "analytic", "gamma_max": 8, "history": 3},
]
BUDGETS = [(1, 1, 1), (3, 2, 1), (5, 3, 3), (M, M, M)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pair: LoadedPair) -> Iterator[TraceStore]:
    with store_of(pair, tmp_path_factory.mktemp("routing")) as found:
        yield found


@pytest.fixture(scope="module")
def routers(store: TraceStore, pair: LoadedPair) -> dict[str, str]:
    """A router of random clusters for each draft, one of which is empty."""
    made = {}
    for draft in DRAFTS:
        document, arrays = routing(pair, draft).to_document()
        made[draft] = store.put_artifact(
            ROUTER, {**document, "draft": draft}, arrays, pair_id=pair.id, provenance={}
        )
    return made


@pytest.fixture(scope="module")
def recording(store: TraceStore, pair: LoadedPair) -> str:
    """Texts at temperature 0 and 1, prompts of one token among them, with chain and tree panoramas
    of both drafts."""
    info = store.create_recording(pair.id, None, SAMPLINGS[0], max_new_tokens=TOKENS)
    for n, sampling in enumerate(SAMPLINGS):
        prompts = {f"{i} {sampling.temperature}": prompt for i, prompt in enumerate(PROMPTS[2:5])}
        texts = plain_texts(pair, prompts, sampling, TOKENS)
        keep(store, pair, info.id, texts, 3 * n, (10, 4, 4), *DRAFTS)
    return info.id


def cluster_ranks(
    store: TraceStore, pair: LoadedPair, recording: str, draft: str, router: str
) -> ClusterRanks:
    (made,) = ranking.recorded_ranks(store, pair, recording, draft, [router])
    assert isinstance(made, ClusterRanks)
    return made


@pytest.fixture(scope="module")
def trace(
    store: TraceStore, pair: LoadedPair, recording: str, routers: dict[str, str]
) -> ReplayTrace:
    ranks = {(d, r): cluster_ranks(store, pair, recording, d, r) for d, r in routers.items()}
    return trace_of(store, recording, DRAFTS, ranks)


@pytest.fixture(scope="module")
def profile(pair: LoadedPair) -> LatencyProfile:
    """A pass takes 1 us a token of its head."""
    return with_heads(flat_profile("p", DRAFTS), DRAFTS, pair.target.vocab_size)


def policy_of(draft: str, router: str, budgets: tuple[int, int, int], **blocks: Any) -> Policy:
    k0, k1, k_min = budgets
    shortlist = {"kind": "clusters", "k0": k0, "k1": k1, "k_min": k_min, "artifact": router}
    return parse_policy({"draft": draft, "shortlist": shortlist, **blocks})


@pytest.mark.parametrize("draft", DRAFTS)
def test_routed_chains_replay_exactly(
    store: TraceStore,
    pair: LoadedPair,
    trace: ReplayTrace,
    routers: dict[str, str],
    profile: LatencyProfile,
    draft: str,
) -> None:
    """Every round of every window at every budget, at temperatures 0 and 1; routed shortlists do
    cost acceptance here."""
    differ = set()
    mine = [(WINDOWS[1], BUDGETS[3])]
    for (n, window), (m, budgets) in itertools.product(enumerate(WINDOWS), enumerate(BUDGETS[:3])):
        if (n + m) % 3 == (draft == "near"):
            mine.append((window, budgets))
    policies = [policy_of(draft, routers[draft], b, window=w) for w, b in mine]
    for policy in policies:
        replayed = run_replay(trace, policy, profile, artifacts=fitted(store), per_round=True)
        runs = executed(pair, policy, trace.trajectories, fitted(store), profile)
        for done, rounds in zip(runs, replayed.steps(), strict=True):
            assert [shape(s) for s in done.steps] == [shape(s) for s in rounds], (
                policy.label(),
                done.trajectory.request_id,
            )
        whole = policy.model_copy(update={"shortlist": Policy().shortlist})
        full = run_replay(trace, whole, profile)
        if policy is policies[0]:  # all clusters
            assert replayed.total == full.total
        differ.add(replayed.total.rounds != full.total.rounds)
    assert differ == {True, False}


def test_a_text_beyond_the_recorded_children_is_known(trace: ReplayTrace) -> None:
    """Where the text's token is none of the children, a shortlist may still propose it: ranks come
    from whole laws."""
    found = 0
    for (draft, _), ranked in trace.ranked.items():
        forest, ranks, row = trace.forests[draft, "coupled"], ranked.source, ranked.row
        beyond = (forest.text_slot[forest.root] == 255) & (ranks.better[row] > ranks.own[row])
        assert (ranks.better[row][beyond] < M).all(), "a token that is best of all is a child"
        found += int(beyond.sum())
    assert found > 0


def test_what_is_kept_of_a_budget(pair: LoadedPair, trace: ReplayTrace) -> None:
    """All clusters keep all of the head and every token it has; fewer keep less; sizes between the
    kept budgets lie between theirs."""
    assert budget_grid(M) == (*range(1, 9), M)
    assert budget_grid(64)[-3:] == (32, 45, 64)
    for ranked in trace.ranked.values():
        routed = ranked.source
        assert isinstance(routed, ClusterRanks)
        kept = routed.kept(routed.budgets)
        for name in ("true_tokens", "mass", "tokens"):
            values = [k[name] for k in kept]
            assert values == sorted(values)
        assert kept[-1]["true_tokens"] == 1.0
        assert kept[-1]["mass"] == pytest.approx(1.0)
        assert (routed.tokens(M) == pair.target.vocab_size).all()
        assert (routed.tokens(1) < routed.tokens(2)).all()


def test_passes_are_charged_by_the_sizes_of_their_shortlists(
    store: TraceStore,
    pair: LoadedPair,
    trace: ReplayTrace,
    routers: dict[str, str],
    profile: LatencyProfile,
) -> None:
    """While a chain is on the text, what its passes save is the tokens that the runtime's
    shortlists of that round left out."""
    policy = policy_of("near", routers["near"], (7, 5, 3), window={"kind": "fixed", "gamma": 2})
    per_row = profile.terms["head/near"].seconds[-1:] * 2
    flat = with_terms(profile, {"gathered/near": CostTable(per_row, ("rows",), ((0.0, 1.0),))})
    find = fitted(store)
    cheap, dear = (
        run_replay(trace, policy, p, artifacts=find, per_round=True).steps()
        for p in (profile, flat)
    )
    prepared = prepare_for(pair, policy, artifacts=fitted(store))
    checked = 0
    for text, ours, full in zip(trace.trajectories, cheap, dear, strict=True):
        decoder = Decoder(pair, StaticSource(prepared))
        rounds = decoder.rounds(request_of(decoder, text))
        for item, here, whole in zip(rounds, ours, full, strict=True):
            if item.step.draft_steps and item.step.accepted >= item.step.draft_steps - 1:
                used = prepared.shortlists.chosen[: item.step.draft_steps]
                saved = sum(pair.target.vocab_size - len(s.ids) for s in used)
                assert whole.draft_s - here.draft_s == pytest.approx(1e-6 * saved)
                checked += 1
    assert checked > 20
    none = with_terms(profile, {"gathered/near": None})
    with pytest.raises(PolicyError, match="no costs of shortlists for draft 'near'"):
        run_replay(trace, policy, none, artifacts=find)


def test_what_cannot_be_ranked_or_replayed_is_said(
    store: TraceStore, pair: LoadedPair, recording: str, trace: ReplayTrace, routers: dict[str, str]
) -> None:
    """No ranks of the router; a router of another draft; texts of the other verifier. A selection
    keeps in step."""
    bare = trace_of(store, recording, DRAFTS)
    policy = policy_of("near", routers["near"], (3, 2, 1))
    said = rf"hidden states.*no cluster ranks of router {routers['near']}.*`fit ranks"
    with pytest.raises(TraceError, match=said):
        run_replay(bare, policy, artifacts=fitted(store))
    with pytest.raises(PolicyError, match="was fitted on draft 'far'"):
        cluster_ranks(store, pair, recording, "near", routers["far"])
    (key, routed), *_ = trace.ranked.items()
    loaded = store.load(recording, ["near"], trees=True)
    drawn = [replace(t, verifier="rejection") for t in loaded.trajectories]
    chains, trees = {"near": loaded.panoramas("near")}, {("near", "coupled"): loaded.trees("near")}
    other = ReplayTrace(drawn, chains, trees=trees, ranks={key: routed.source})
    with pytest.raises(TraceError, match="rejection verifier"):
        run_replay(other, policy, artifacts=fitted(store))
    whole = run_replay(trace, policy, artifacts=fitted(store))
    part = run_replay(trace.select([4, 1]), policy, artifacts=fitted(store))
    np.testing.assert_array_equal(part.counts, whole.counts[[4, 1]])
