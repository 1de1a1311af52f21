"""Drafts under shortlists replay as they are executed: chains and trees, with stops, bins and
adaptive windows, of models and of heads; and they are recorded when a replay asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from databases import opened
from pairs import top_k
from recorded_texts import keep, plain_texts, same_rounds
from synthetic import flat_profile, over_rows, with_heads, with_terms
from test_shortlists import make_shortlisted_pair, order, routing

from spectune.optimizer.recording.shortlisted import ShortlistedDrafts, record_setting
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import Replay, ReplayTrace
from spectune.optimizer.replay.trace import open_trace
from spectune.optimizer.stored_artifacts import fitted
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import BINS, FREQUENCIES, ROUTER
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.rules import compile_shortlist, compile_tree
from spectune.runtime.recording.panoramas import RecordedGrowth, record_shortlisted
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import LatencyProfile

TOKENS, DRAFTS = 16, ("near", "head", "own")
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=4), Sampling(0.8, top_p=0.9, seed=3)]
PROMPTS = {"a": "def add(a, b):", "b": "The quick brown", "c": "xy"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    return make_shortlisted_pair(tmp_path_factory.mktemp("shortlists"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pair: LoadedPair) -> Iterator[TraceStore]:
    with opened(tmp_path_factory.mktemp("shortlists") / "spectune.db") as found:
        found.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
        yield found


@pytest.fixture(scope="module")
def recordings(store: TraceStore, pair: LoadedPair) -> list[str]:
    """Texts at temperature 0 and 1 and with top-p, and what each draft proposes by chains."""
    ids = []
    for sampling in SAMPLINGS:
        info = store.create_recording(Asked(pair.id, None, sampling, TOKENS))
        texts = plain_texts(pair, PROMPTS, sampling, TOKENS)
        keep(store, pair, info.id, texts, 0, (8, 1, 1), *DRAFTS)
        ids.append(info.id)
    return ids


@pytest.fixture(scope="module")
def artifacts(store: TraceStore, pair: LoadedPair) -> dict[str, str]:
    """Ids of an order, of bins, and of a router for each draft, one of whose clusters is empty."""

    def put(kind: str, document: dict[str, Any], arrays: dict[str, Any]) -> str:
        return store.put_artifact(kind, document, arrays, pair_id=pair.id, provenance={})

    frequencies = Frequencies(np.array(order(pair.target.vocab_size)), always=1)
    bins = {"thresholds": [480, 1120, 1600, 2240, 3200], "depth": 3}
    made = {"order": put(FREQUENCIES, *frequencies.to_document()), "bins": put(BINS, bins, {})}
    for draft in DRAFTS:
        document, arrays = routing(pair, draft).to_document()
        made[draft] = put(ROUTER, {**document, "draft": draft}, arrays)
    return made


def shortlist(kind: str, artifacts: dict[str, str], draft: str) -> dict[str, Any]:
    if kind == "clusters":
        return {"kind": kind, "k0": 4, "k1": 3, "k_min": 1, "artifact": artifacts[draft]}
    if kind == "constant":
        return {"kind": "clusters", "k0": 3, "k1": 3, "k_min": 3, "artifact": artifacts[draft][:9]}
    name = "size" if kind == "frequency" else "k_max"
    return {"kind": kind, name: 48, "artifact": artifacts["order"]}


def policies(artifacts: dict[str, str], draft: str) -> list[Policy]:
    """Chains and trees of a draft under every kind of shortlist."""
    fixed = {"window": {"kind": "fixed", "gamma": 5}}
    fsm = {"window": {"kind": "fsm", "gamma_max": 6}}
    tree, bins = top_k(draft, 3, 4, 9), {"artifact": artifacts["bins"], "alpha": 2}
    static = {"growth": {"kind": "static", "paths": [[0], [1], [2], [0, 0], [1, 0], [0, 0, 1]]}}

    def stop(kind: str, threshold: float, **more: Any) -> dict[str, Any]:
        return {"stop": {"kind": kind, "threshold": threshold, **more}}

    bodies = [
        ("frequency", fixed | stop("max_prob", 0.2)),
        ("frequency", tree | fsm),
        ("frequency", static),
        ("position_frequency", fsm),
        ("position_frequency", tree | {"stratify": bins}),
        ("position_frequency", fixed | stop("joint_prob", 0.05, keep_last=False)),
        ("clusters", fixed),
        ("clusters", {"window": {"kind": "cache_fsm", "gamma_max": 6}} | stop("entropy", 0.3)),
        ("clusters", tree | stop("entropy", 0.2)),
        ("clusters", static),
        ("constant", fsm | stop("joint_prob", 0.1)),
        ("constant", tree),
    ]
    return [
        parse_policy({**body, "draft": draft, "shortlist": shortlist(kind, artifacts, draft)})
        for kind, body in bodies
    ]


def opened_for(store: TraceStore, pair: LoadedPair, recording: str, policy: Policy) -> ReplayTrace:
    """A trace that records the policy's shortlist, of every request."""
    found = open_trace(store, recording, [policy])
    here = store, pair, recording, found.ordinals, fitted(store, pair.id)
    return found.trace.reading(None, ShortlistedDrafts(*here, few=0))


@pytest.mark.parametrize("draft", DRAFTS)
def test_replay_is_what_is_executed(
    store: TraceStore,
    pair: LoadedPair,
    recordings: list[str],
    artifacts: dict[str, str],
    draft: str,
) -> None:
    """36 policies, every round of every text of a recording: what was drafted, verified, accepted,
    and where a round began. Shortlists do cost acceptance here."""
    find, differ = fitted(store, pair.id), 0
    for n, policy in enumerate(policies(artifacts, draft), DRAFTS.index(draft)):
        trace = opened_for(store, pair, recordings[n % len(recordings)], policy)
        replayed = run_replay(trace, policy, artifacts=find, per_round=True)
        same_rounds(pair, policy, replayed, trace.trajectories, find)
        whole = policy.model_copy(update={"shortlist": Policy().shortlist})
        if not whole.is_tree:
            differ += run_replay(trace, whole, artifacts=find).total != replayed.total
    assert differ > 0


def test_a_static_tree_is_recorded_no_deeper_than_its_levels(
    store: TraceStore, pair: LoadedPair, recordings: list[str], artifacts: dict[str, str]
) -> None:
    text = store.load(recordings[0], ()).trajectories[0]
    growth = {"kind": "static", "paths": [[0], [1], [0, 0], [0, 0, 1]]}
    block = shortlist("frequency", artifacts, "near")
    policy = parse_policy({"draft": "near", "growth": growth, "shortlist": block})
    find = fitted(store, pair.id)
    rule = compile_shortlist(policy, find)
    tree = compile_tree(policy, sampled=False, artifacts=find)
    assert rule is not None
    exact, deeper = (
        record_shortlisted(pair, text, rule, "near/x", 1, 2, RecordedGrowth(tree, depth)).trie
        for depth in (3, 8)
    )
    assert len(exact.parent) > 0
    assert np.array_equal(exact.parent, deeper.parent)
    assert np.array_equal(exact.tokens, deeper.tokens)


def test_what_was_not_recorded_is_said(
    store: TraceStore, pair: LoadedPair, recordings: list[str], artifacts: dict[str, str]
) -> None:
    """A shortlist where no models are at hand; one that falls by step on texts of the rejection
    verifier."""
    block = shortlist("frequency", artifacts, "near") | {"size": 7}
    policy = parse_policy({"draft": "near", "shortlist": block})
    with pytest.raises(TraceError, match="no panorama of draft 'near/fr-7@"):
        run_replay(
            open_trace(store, recordings[0], [policy]).trace, policy, artifacts=fitted(store)
        )
    texts = plain_texts(pair, {"r": "x y"}, SAMPLINGS[1], 8)
    info = store.create_recording(Asked(pair.id, None, SAMPLINGS[1], 8, "rejection"))
    keep(store, pair, info.id, [replace(texts[0], verifier="rejection")], 0, (8, 1, 1), "near")
    falling = {"draft": "near", "shortlist": shortlist("position_frequency", artifacts, "near")}
    with pytest.raises(TraceError, match="budget that depends on the draft step"):
        record_setting(store, pair, info.id, parse_policy(falling), [0], fitted(store, pair.id))


def test_a_shortlist_is_recorded_on_a_few_requests_first(
    store: TraceStore, pair: LoadedPair, recordings: list[str], artifacts: dict[str, str]
) -> None:
    """Where it is slower there than the whole head it is recorded on no more, and the others count
    by the ratio; where it is faster all are exact. Beyond so many settings none is recorded."""
    recording, find = recordings[1], fitted(store, pair.id)
    vocab = pair.target.vocab_size
    trace = open_trace(store, recording, [Policy(draft="near")]).trace
    drafts = ShortlistedDrafts(store, pair, recording, range(3), find, few=1, most=2)
    trace = trace.reading(None, drafts)
    cheap = with_heads(flat_profile("p", DRAFTS), DRAFTS, vocab)
    sizes = (1, vocab)
    dear = with_terms(cheap, {"head/near": over_rows(sizes, (1e-2, 1e-3))})

    def run(size: int, profile: LatencyProfile) -> tuple[Replay, int]:
        block = shortlist("frequency", artifacts, "near") | {"size": size}
        policy = parse_policy({"draft": "near", "shortlist": block})
        made = run_replay(trace, policy, profile, artifacts=find)
        missing = store.missing_panoramas(recording, policy.recorded_draft, 1)
        return made, len(missing)

    slow, missing = run(40, dear)
    assert missing == 2
    whole = run_replay(trace, parse_policy({"draft": "near"}), dear)
    ratio = slow.seconds / whole.seconds
    assert ratio[1] == pytest.approx(ratio[2])
    assert ratio[1] > 1
    fast, missing = run(vocab - 3, cheap)
    assert missing == 0
    opened_again = opened_for(store, pair, recording, fast.policy)
    exact = run_replay(opened_again, fast.policy, cheap, artifacts=find)
    np.testing.assert_array_equal(exact.counts, fast.counts)
    np.testing.assert_allclose(exact.seconds, fast.seconds)
    beyond, missing = run(50, cheap)
    assert missing == 3
    assert beyond.missing == beyond.total.rounds
