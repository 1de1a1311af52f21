"""Shortlisted drafts replayed from full recordings: chains round by round as executed, trees
nearly; and what their passes cost."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from pairs import top_k
from recorded_texts import by_frequency, executed, plain_texts, under_windows
from synthetic import flat_profile, over_rows, with_heads, with_terms
from test_lossless import PROMPTS
from test_routing import WINDOWS
from test_tree_parity import plain_rounds, shape

from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.shortlists import shortlist_ranks
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import FREQUENCIES, Artifacts, Fitted
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.recording.chains import record_panorama
from spectune.runtime.recording.trees import record_tree_panorama
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Sampling, Trajectory

TOKENS, WIDTH, DEPTH, GAMMA = 20, 8, 5, 12
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=4)]


@pytest.fixture(scope="module")
def recorded(pair: LoadedPair) -> list[tuple[Trajectory, Any, Any]]:
    """Texts at temperature 0 and 1 with chain and tree panoramas of draft ``near``."""
    found = []
    for sampling in SAMPLINGS:
        prompts = {f"{n} {sampling.temperature}": p for n, p in enumerate(PROMPTS[:3])}
        for t in plain_texts(pair, prompts, sampling, TOKENS):
            trees = record_tree_panorama(pair, t, "near", WIDTH, DEPTH)
            found.append((t, record_panorama(pair, t, "near", GAMMA), trees))
    return found


@pytest.fixture(scope="module")
def trace(recorded: list[tuple[Trajectory, Any, Any]]) -> ReplayTrace:
    texts, chains, trees = zip(*recorded, strict=True)
    return ReplayTrace(texts, {"near": chains}, trees={("near", "coupled"): trees})


@pytest.fixture(scope="module")
def artifacts(pair: LoadedPair, recorded: list[tuple[Trajectory, Any, Any]]) -> Artifacts:
    """The vocabulary by its frequency in the first half of the texts, so that the others hold
    tokens beyond a shortlist."""
    order = by_frequency([t for t, _, _ in recorded], pair.target.vocab_size)
    found = Fitted(FREQUENCIES, *order.to_document())
    return lambda name: found


def test_chains_under_shortlists_replay_exactly(
    pair: LoadedPair, trace: ReplayTrace, artifacts: Artifacts
) -> None:
    """Every round of every window at every budget, at temperatures 0 and 1; and shortlists do cost
    acceptance here."""
    differ, vocab = set(), pair.target.vocab_size
    sizes = [("frequency", "size", size) for size in (1, vocab // 4, vocab)]
    sizes += [("position_frequency", "k_max", size) for size in (16, vocab // 2)]
    shortlists = [{"kind": kind, name: size, "artifact": "a"} for kind, name, size in sizes]
    for policy in under_windows("near", WINDOWS[:6], shortlists, every=5):
        replayed = run_replay(trace, policy, artifacts=artifacts, per_round=True)
        full = run_replay(trace, policy.model_copy(update={"shortlist": Policy().shortlist}))
        runs = executed(pair, policy, trace.trajectories, artifacts)
        for done, rounds in zip(runs, replayed.steps(), strict=True):
            assert [shape(s) for s in done.steps] == [shape(s) for s in rounds], policy.label()
        differ.add(replayed.total.rounds != full.total.rounds)
        if getattr(policy.shortlist, "size", 0) >= vocab:
            assert replayed.total == full.total
    assert differ == {True, False}


def test_trees_under_shortlists_replay_nearly(
    pair: LoadedPair, trace: ReplayTrace, artifacts: Artifacts
) -> None:
    """Tokens a round within a few percent of what is executed; exactly, where the shortlist holds
    everything."""
    vocab = pair.target.vocab_size
    for size in (vocab // 2, vocab):
        shortlist = {"kind": "frequency", "size": size, "artifact": "a"}
        policy = parse_policy(top_k("near", 3, 4, 10, shortlist=shortlist))
        plan = prepare(policy, pair.draft_names, artifacts=artifacts)
        runs = executed(pair, policy, trace.trajectories, artifacts)
        rounds = sum(len(done.steps) for done in runs)
        fast = run_replay(trace, policy, artifacts=artifacts, per_round=True)
        replayed = fast.total.rounds
        assert replayed == rounds if size == vocab else replayed == pytest.approx(rounds, rel=0.05)
        assert plan.shortlist is not None
        held = shortlist_ranks(trace.forests["near", "coupled"], plan.shortlist, DEPTH)
        plain = plain_rounds(trace, policy, artifacts, held)
        assert [[shape(s) for s in steps] for steps in fast.steps()] == plain


def test_what_cannot_be_replayed_is_said(trace: ReplayTrace, artifacts: Artifacts) -> None:
    """No trees recorded; a frequency order of another vocabulary."""
    policy = parse_policy(
        {"draft": "near", "shortlist": {"kind": "frequency", "size": 4, "artifact": "a"}}
    )
    bare = ReplayTrace(trace.trajectories, {}, trees={})
    bare.chains = trace.chains
    with pytest.raises(TraceError, match=r"no trees of draft 'near'.*record --resume"):
        run_replay(bare, policy, artifacts=artifacts)
    document, arrays = Frequencies(np.arange(3), 0).to_document()
    with pytest.raises(TraceError, match="orders a vocabulary of 3 tokens"):
        run_replay(trace, policy, artifacts=lambda name: Fitted(FREQUENCIES, document, arrays))


def test_passes_are_charged_by_the_size_of_the_shortlist(
    trace: ReplayTrace, artifacts: Artifacts
) -> None:
    """A pass takes 1 us a token of its head: a shortlist saves that, step by step, and a profile
    without such costs is refused."""
    vocab = 96
    plain = flat_profile("p", ["near"])
    profile = with_heads(plain, ["near"], vocab)
    window = {"kind": "fixed", "gamma": 6}
    for block, saved in (
        ({"kind": "frequency", "size": 36}, [60] * 6),
        ({"kind": "position_frequency", "k_max": 36}, [60, 60, 84, 87, 89, 90]),
    ):
        policy = parse_policy(
            {"draft": "near", "window": window, "shortlist": {**block, "artifact": "a"}}
        )
        whole = profile.terms["head/near"].seconds[-1]
        dear = with_terms(profile, {"head/near": over_rows((0, vocab), (whole, whole))})
        cheap, full = (
            chain(*run_replay(trace, policy, p, artifacts=artifacts, per_round=True).steps())
            for p in (profile, dear)
        )
        for less, more in zip(cheap, full, strict=True):
            expected = 1e-6 * sum(saved[: less.draft_steps])
            assert more.draft_s - less.draft_s == pytest.approx(expected)
    with pytest.raises(PolicyError, match="no costs of shortlists for draft 'near'"):
        run_replay(trace, policy, plain, artifacts=artifacts)
