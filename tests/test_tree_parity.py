"""Trees change no text, and replay of tree policies is the runtime round by round: two
architectures in float64, three temperatures, every growth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from oracle import RecordedTrees, replay_rounds
from pairs import fixed
from recorded_texts import plain_texts, same_rounds, shape
from synthetic import flat_profile, with_terms
from test_lossless import PROMPTS

from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import Nodes, ReplayTrace
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import Artifacts, FittedArtifact
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.recording.panoramas import extend_panorama, record_panorama
from spectune.runtime.session import Sessions
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Sampling, Step
from spectune.traces.tables import Panorama, Trajectory

TOKENS = 20
WIDTH, DEPTH = 6, 7
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=20, top_p=0.95, seed=3),
    Sampling(temperature=1.0, seed=4),
]
CASES = [
    ("llama", SAMPLINGS[0]),
    ("gpt2", SAMPLINGS[0]),
    ("llama", SAMPLINGS[1]),
    ("gpt2", SAMPLINGS[2]),
]
"""`make acceptance` has every sampling of both."""
STATIC = [[0], [1], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 2], [0, 0, 0, 0]]


def artifacts(draft: str) -> Artifacts:
    """A planted classifier and planted bins."""
    weights = {
        "w1": np.array([[6.0, 0.05, 0, 0], [0, 0, 0.3, -0.5]], np.float32),
        "b1": np.array([0.0, 1.0], np.float32),
        "w2": np.array([1.2, 0.8], np.float32),
        "b2": np.array([-2.0], np.float32),
    }
    bins = {"thresholds": [480, 1120, 1600, 2240, 3200], "depth": 4, "draft": draft}
    found = {
        "bins": FittedArtifact("bins", bins, {}),
        "grower": FittedArtifact("classifier", {"draft": draft}, weights),
    }
    return lambda name: found[name]


def top_k(width: int) -> dict[str, Any]:
    return {"kind": "top_k", "width": width}


def grower(width: int, cap: int, beta: float) -> dict[str, Any]:
    return {"kind": "classifier", "width": width, "cap": cap, "beta": beta, "artifact": "grower"}


def tree_policies(draft: str, count: int, seed: int) -> list[Policy]:
    """Policies of every growth, then random compositions of growth, window, stop, selection and
    bins."""
    static, bins = {"kind": "static", "paths": STATIC}, {"artifact": "bins", "alpha": 3}
    found: list[dict[str, Any]] = [
        {"growth": top_k(6), "window": fixed(5), "select": {"top_n": 20}},
        {"growth": top_k(1), "window": fixed(6), "select": {"top_n": 6}},
        {"growth": static},
        {"growth": static, "window": {"kind": "fsm", "gamma_max": 4}},
        {"growth": top_k(4), "window": fixed(4), "select": {"top_n": 12}, "stratify": bins},
        {"growth": grower(5, 5, 0.5), "window": fixed(6)},
        {"growth": grower(1, 1, 0.6), "window": fixed(6)},
    ]
    rng = np.random.default_rng(seed)
    while len(found) < count:
        kind = str(rng.choice(["fixed", "fsm", "cache_fsm", "q_learning", "heuristic"]))
        gamma, width = (int(rng.integers(1, most)) for most in (DEPTH - 2, WIDTH + 1))
        window = fixed(gamma) if kind == "fixed" else {"kind": kind, "gamma_max": gamma}
        document: dict[str, Any] = {"growth": static, "window": window}
        growth = str(rng.choice(["top_k", "top_k", "classifier", "static"]))
        if growth == "top_k":
            document["growth"] = top_k(width)
        elif growth == "classifier":
            beta = round(float(rng.uniform(0.2, 0.8)), 2)
            document["growth"] = grower(width, int(rng.integers(1, WIDTH + 1)), beta)
        if growth == "top_k" or (growth == "classifier" and rng.integers(2)):
            document["select"] = {"top_n": int(rng.integers(1, 40))}
            if rng.integers(2):
                alpha, fractions = int(rng.integers(0, 3)), [0.4, 0.7]
                document["stratify"] = {"artifact": "bins", "alpha": alpha, "fractions": fractions}
        stop = str(rng.choice(["none", "none", "max_prob", "joint_prob", "entropy"]))
        if stop != "none":
            document["stop"] = {
                "kind": stop,
                "threshold": round(float(rng.uniform(0.01, 0.6)), 3),
                "keep_last": bool(rng.integers(2)),
            }
        found.append(document)
    return [parse_policy({"draft": draft, **d}) for d in found[:count]]


@pytest.fixture(scope="module")
def pair(either_pair: LoadedPair) -> LoadedPair:
    return either_pair


def two_texts(pair: LoadedPair, sampling: Sampling) -> list[Trajectory]:
    return plain_texts(pair, {"0": PROMPTS[1], "1": PROMPTS[2]}, sampling, TOKENS)


def readable(
    pair: LoadedPair, texts: list[Trajectory], draft: str, panoramas: list[Panorama]
) -> ReplayTrace:
    """A trace that reads what replays lack."""
    trace = ReplayTrace(texts, {draft: panoramas})

    def read(name: str, nodes: Mapping[int, Nodes]) -> dict[int, Panorama]:
        held = trace.panoramas[name]
        return {i: extend_panorama(pair, texts[i], held[i], *nodes[i]) for i in nodes}

    return trace.reading(read)


def replayed_exactly(
    pair: LoadedPair,
    policies: list[Policy],
    sampling: Sampling,
    width: int,
    depth: int,
    gamma_max: int = 1,
) -> tuple[list[Panorama], list[Step]]:
    """The trees of two texts, and their rounds under policies of one draft: alike in replay, in the
    plain loop over the trees and decoded again, with the same texts."""
    draft = policies[0].draft
    find, plain = artifacts(draft), two_texts(pair, sampling)
    trees = [record_panorama(pair, t, draft, gamma_max, width, depth) for t in plain]
    trace, rounds = readable(pair, plain, draft, trees), []
    for policy in policies:
        replayed = run_replay(trace, policy, per_round=True, artifacts=find)
        assert replayed.missing == 0
        assert [[shape(s) for s in steps] for steps in replayed.steps()] == plain_rounds(
            trace, policy, find
        ), policy.label()
        rounds += same_rounds(pair, policy, replayed, plain, find)
    return trees, rounds


@pytest.mark.parametrize(("either_pair", "sampling"), CASES, indirect=["either_pair"], ids=str)
def test_trees_change_no_text_and_replay_exactly(pair: LoadedPair, sampling: Sampling) -> None:
    """A case has every second policy: the first seven, of every growth, are held greedily and above
    temperature 0, and on both architectures."""
    policies = tree_policies(next(iter(pair.drafts)), 12, seed=int(10 * sampling.temperature))
    policies = policies[sampling.greedy == (pair.spec.name == "tiny-llama") :: 2]
    _, rounds = replayed_exactly(pair, policies, sampling, WIDTH, DEPTH)
    assert len(rounds) > 50


def plain_rounds(
    trace: ReplayTrace, policy: Policy, find: Artifacts
) -> list[list[tuple[int, ...]]]:
    """Every round by the plain loop over the recorded trees."""
    assert policy.draft is not None
    plan, sessions = prepare(policy, [policy.draft], artifacts=find), Sessions()
    forest, found = trace.forest(policy.draft), []
    for text, offset in zip(trace.trajectories, trace.offsets.tolist(), strict=False):
        trees = RecordedTrees(forest, offset)
        rounds = replay_rounds(text, None, plan, sessions, trees)
        found.append([shape(r.step) for r in rounds])
    return found


ANALYTIC: list[dict[str, Any]] = [
    {
        "growth": top_k(5),
        "window": {"kind": "analytic", "gamma_max": 6, "gamma_min": 1, "history": 4},
        "select": {"top_n": 15},
    },
    {
        "growth": top_k(3),
        "window": {"kind": "analytic", "gamma_max": 5, "estimator": "exact"},
        "select": {"top_n": 8},
    },
    *(
        {"growth": growth, "window": {"kind": "analytic", "gamma_max": 6, "history": 3}}
        for growth in ({"kind": "static", "paths": STATIC}, grower(5, 3, 0.3))
    ),
    {
        "growth": top_k(4),
        "window": {"kind": "q_learning", "gamma_max": 4, "reward": "speed", "epsilon": 0.3},
        "select": {"top_n": 12},
    },
]
"""Windows that weigh what trees cost."""


@pytest.mark.parametrize("either_pair", ["llama"], indirect=True)
@pytest.mark.parametrize("sampling", SAMPLINGS[::2], ids=lambda s: f"T{s.temperature}")
def test_windows_that_weigh_costs_replay_exactly(pair: LoadedPair, sampling: Sampling) -> None:
    draft = next(iter(pair.drafts))
    find, profile = artifacts(draft), flat_profile(pair.id, pair.drafts)
    policies = [parse_policy({"draft": draft, **d}) for d in ANALYTIC]
    plain = two_texts(pair, sampling)
    trees = [record_panorama(pair, t, draft, DEPTH, WIDTH, DEPTH) for t in plain]
    trace = readable(pair, plain, draft, trees)
    depths = set()
    for policy in policies:
        replayed = run_replay(trace, policy, profile, per_round=True, artifacts=find)
        assert replayed.total.seconds > 0
        depths |= {s.depth for s in same_rounds(pair, policy, replayed, plain, find, profile)}
    assert len(depths) > 3
    none = with_terms(profile, {"top_k/near": None, "top_k/head": None})
    with pytest.raises(PolicyError, match="no costs of trees for draft"):
        run_replay(trace, policies[0], none, artifacts=find)


@pytest.mark.parametrize("either_pair", ["llama"], indirect=True)
def test_what_was_not_recorded_is_refused(pair: LoadedPair) -> None:
    draft, sampling = next(iter(pair.drafts)), Sampling()
    plain = two_texts(pair, sampling)
    trees = [record_panorama(pair, t, draft, 3, 3, 3) for t in plain]
    trace = ReplayTrace(plain, {draft: trees})

    def policy(width: int, gamma: int) -> Policy:
        blocks = {"growth": top_k(width), "window": fixed(gamma), "select": {"top_n": 9}}
        return parse_policy({"draft": draft, **blocks})

    assert run_replay(trace, policy(3, 3)).missing == 0
    with pytest.raises(TraceError, match="--tree-width 4"):
        run_replay(trace, policy(4, 3))
    with pytest.raises(TraceError, match="does not hold"):
        run_replay(trace, policy(3, 5))
    assert run_replay(trace, policy(3, 5), approximate=True).missing > 0
    with pytest.raises(TraceError, match="no panorama of draft"):
        run_replay(ReplayTrace(plain, {}), policy(3, 3))
