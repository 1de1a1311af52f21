"""Frequency orders over recorded texts: chains whose shortlist holds no recorded child replay as
executed, and how such ranks are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from pairs import chain
from recorded_texts import (
    by_frequency,
    executed,
    keep,
    plain_texts,
    store_of,
    trace_of,
    under_windows,
)
from test_lossless import PROMPTS
from test_store import damage
from test_tree_parity import shape

import spectune.optimizer.fit.ranks as ranking
from spectune.db import CorruptedChunkError
from spectune.db.models import ArtifactRow
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.fit.dynaspec import fit_ranks
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.shortlist_ranks import FrequencyRanks, stored_ranks
from spectune.runtime import near_ties
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import FREQUENCIES, ROUTER
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.recording.trees import OFF_TEXT
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

TOKENS = 16
SIZE = (8, 2, 2)
"""Of chains and trees: gamma, width, depth."""
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=4)]
DRAFT = "far"


def frequency_ranks(
    store: TraceStore, pair: LoadedPair, recording: str, draft: str, order: str
) -> FrequencyRanks:
    (made,) = ranking.recorded_ranks(store, pair, recording, draft, [order])
    assert isinstance(made, FrequencyRanks)
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pair: LoadedPair) -> Iterator[TraceStore]:
    with store_of(pair, tmp_path_factory.mktemp("ranks")) as found:
        yield found


def keep_texts(
    store: TraceStore, pair: LoadedPair, recording: str, sampling: Sampling, first: int
) -> None:
    ids = (f"{n} {sampling.temperature} {sampling.top_p}" for n in range(3))
    prompts = dict(zip(ids, PROMPTS, strict=False))
    keep(store, pair, recording, plain_texts(pair, prompts, sampling, TOKENS), first, SIZE, DRAFT)


@pytest.fixture(scope="module")
def recording(store: TraceStore, pair: LoadedPair) -> str:
    """Texts at temperature 0 and 1 with few recorded children of a weak draft."""
    info = store.create_recording(pair.id, None, SAMPLINGS[0], max_new_tokens=TOKENS)
    for n, sampling in enumerate(SAMPLINGS):
        keep_texts(store, pair, info.id, sampling, first=3 * n)
    return info.id


@pytest.fixture(scope="module")
def order(store: TraceStore, pair: LoadedPair, recording: str) -> str:
    """The vocabulary by its frequency in half of the texts."""
    texts = store.load(recording, []).trajectories
    made = by_frequency(texts, pair.target.vocab_size).to_document()
    return store.put_artifact(FREQUENCIES, *made, pair_id=pair.id, provenance={})


@pytest.fixture(scope="module")
def traces(
    store: TraceStore, pair: LoadedPair, recording: str, order: str
) -> tuple[ReplayTrace, ReplayTrace]:
    """With ranks, and from recorded children alone."""
    ranks = frequency_ranks(store, pair, recording, DRAFT, order)
    return traced(store, recording, ranks), traced(store, recording, None)


def traced(store: TraceStore, recording: str, ranks: FrequencyRanks | None) -> ReplayTrace:
    held = None if ranks is None else {(DRAFT, ranks.fitted): ranks}
    return trace_of(store, recording, [DRAFT], held)


def policies(order: str, vocab: int) -> list[Policy]:
    windows = [*({"kind": "fixed", "gamma": g} for g in (1, 5)), {"kind": "fsm", "gamma_max": 8}]
    sizes = [("frequency", "size", size) for size in (3, 12, vocab // 4, vocab // 2)]
    sizes += [("position_frequency", "k_max", size) for size in (16, vocab // 2)]
    shortlists = [
        {"kind": kind, name: size, "artifact": order if name == "size" else order[:8]}
        for kind, name, size in sizes
    ]
    return under_windows(DRAFT, windows, shortlists, every=3)


def test_chains_replay_exactly_where_no_child_is_in_the_shortlist(
    store: TraceStore, pair: LoadedPair, traces: tuple[ReplayTrace, ReplayTrace], order: str
) -> None:
    """Every round as executed, none in doubt; from recorded children alone many are, and some are
    wrong."""
    find, doubts, unlike = fitted(store), 0, 0
    for policy in policies(order, pair.target.vocab_size):
        replayed, without = (
            run_replay(trace, policy, artifacts=find, per_round=True) for trace in traces
        )
        assert replayed.missing == 0
        doubts += without.missing
        runs = executed(pair, policy, traces[0].trajectories, find)
        for run, rounds, guessed in zip(runs, replayed.steps(), without.steps(), strict=True):
            done = [shape(s) for s in run.steps]
            assert done == [shape(s) for s in rounds], (policy.label(), run.trajectory.request_id)
            unlike += done != [shape(s) for s in guessed]
    assert min(doubts, unlike) > 0


def test_ranks_are_those_of_canonical_laws(
    store: TraceStore, pair: LoadedPair, recording: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a margin so wide that every law is settled, or so narrow that none is, ranks are the
    same; most of the text is no child."""
    found = []
    monkeypatch.setattr(ranking, "keep_ranks", lambda store, pair_id, recording, made: made)
    monkeypatch.setattr(ranking, "stored_ranks", lambda *a: None)
    for margin in (0.0, 1e9):
        monkeypatch.setattr(near_ties, "CHOICE", margin)
        found.append(frequency_ranks(store, pair, recording, DRAFT, order))
    for name in FrequencyRanks.TEXTS:
        np.testing.assert_array_equal(*(getattr(ranks, name) for ranks in found))
    trees = store.load(recording, trees=True).trees(DRAFT)
    slots = np.concatenate([p.text_slot[: p.positions] for p in trees])
    assert (slots == OFF_TEXT).sum() > 10
    few, more, every = found[0].kept([1, 16, pair.target.vocab_size])
    assert few["true_tokens"] < more["true_tokens"] < every["true_tokens"] == 1.0


STOPS = [
    {"kind": "max_prob", "threshold": 0.2},
    {"kind": "joint_prob", "threshold": 0.05, "keep_last": False},
    {"kind": "entropy", "threshold": 0.3},
]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop["kind"])
def test_stops_read_the_restricted_law(
    store: TraceStore,
    pair: LoadedPair,
    traces: tuple[ReplayTrace, ReplayTrace],
    order: str,
    stop: dict[str, object],
) -> None:
    """At sizes whose mass is kept, rounds begin and accept as executed, but for codes that rounding
    moves; by whole laws many do not."""
    find, unlike, rounds = fitted(store), np.zeros(2), 0
    for size in (4, 16):
        shortlist = {"kind": "frequency", "size": size, "artifact": order}
        policy = parse_policy(chain(DRAFT, 6, shortlist=shortlist, stop=stop))
        replayed = (run_replay(t, policy, artifacts=find, per_round=True).steps() for t in traces)
        runs = executed(pair, policy, traces[0].trajectories, find)
        for run, *both in zip(runs, *replayed, strict=True):
            done = {(s.start, s.accepted) for s in run.steps}
            rounds += len(done)
            unlike += [len(done - {(s.start, s.accepted) for s in steps}) for steps in both]
    assert unlike[0] <= 0.01 * rounds
    assert unlike[1] > 0.03 * rounds


def test_filters_leave_what_is_no_child_unsaid(
    store: TraceStore, pair: LoadedPair, order: str
) -> None:
    """Under top-p the draft's order beyond its recorded children depends on the shortlist: such
    rounds are counted, as without ranks."""
    sampling = Sampling(1.0, top_p=0.5, seed=1)
    name = store.create_recording(pair.id, None, sampling, max_new_tokens=TOKENS).id
    keep_texts(store, pair, name, sampling, 0)
    ranks = frequency_ranks(store, pair, name, DRAFT, order)
    assert ranks.open.any()
    for policy in policies(order, pair.target.vocab_size):
        one, other = (
            run_replay(traced(store, name, r), policy, artifacts=fitted(store))
            for r in (ranks, None)
        )
        np.testing.assert_array_equal(one.counts, other.counts)
        assert one.missing == other.missing


def test_stored_ranks_are_found_and_mended(
    store: TraceStore, pair: LoadedPair, recording: str, order: str
) -> None:
    """Made once, and again when they are damaged or the recording has grown; a trace refuses those
    that lack a request."""
    name = store.create_recording(pair.id, None, SAMPLINGS[0], max_new_tokens=TOKENS).id
    with pytest.raises(TraceError, match=rf"no trees of draft '{DRAFT}'.*record --resume"):
        frequency_ranks(store, pair, name, DRAFT, order)
    keep_texts(store, pair, name, SAMPLINGS[0], 0)
    assert stored_ranks(store, name, DRAFT, order) is None
    first = frequency_ranks(store, pair, name, DRAFT, order[:8])
    assert first.fitted == order
    assert frequency_ranks(store, pair, name, DRAFT, order).artifact == first.artifact
    keep_texts(store, pair, name, SAMPLINGS[1], 3)
    with pytest.raises(
        TraceError, match=r"no frequency ranks of it.*`fit ranks --recording ID --fr"
    ):
        traced(store, name, first)
    grown = frequency_ranks(store, pair, name, DRAFT, order)
    assert grown.digests[:3] == first.digests
    np.testing.assert_array_equal(grown.better[: len(first.better)], first.better)
    for damaged in (first, grown):
        damage(store, ArtifactRow, damaged.artifact)
    with pytest.raises(CorruptedChunkError, match=r"cannot be used.*`fit ranks .* --frequencies"):
        stored_ranks(store, name, DRAFT, order)
    mended = frequency_ranks(store, pair, name, DRAFT, order)
    found = stored_ranks(store, name, DRAFT, order)
    assert isinstance(found, FrequencyRanks)
    assert found.artifact == mended.artifact == grown.artifact
    np.testing.assert_array_equal(found.own, grown.own)


def test_what_is_no_order_is_refused(store: TraceStore, pair: LoadedPair, recording: str) -> None:
    """Another kind of artifact; an order of another vocabulary; arrays that do not fit one
    another."""
    other = store.put_artifact(ROUTER, {"x": 1}, {"y": np.zeros(1)}, pair_id=pair.id, provenance={})
    with pytest.raises(PolicyError, match=r"--frequencies .* is a router, not a frequencies"):
        fit_ranks(store, recording, pair, DRAFT, frequencies=other)
    document, arrays = Frequencies(np.arange(3), 0).to_document()
    short = store.put_artifact(FREQUENCIES, document, arrays, pair_id=pair.id, provenance={})
    with pytest.raises(PolicyError, match="orders a vocabulary of 3 tokens"):
        frequency_ranks(store, pair, recording, DRAFT, short)
    for words, held in (
        ("it lacks 'always'", ({"vocab": 3}, arrays)),
        ("it lacks order", (document, {})),
        ("must hold every token id once", (document, {"order": np.zeros(3, np.int64)})),
    ):
        malformed = store.put_artifact(FREQUENCIES, *held, pair_id=pair.id, provenance={})
        with pytest.raises(PolicyError, match=f"{malformed}: .*{words}"):
            frequency_ranks(store, pair, recording, DRAFT, malformed)
    two, codes = np.zeros(2), np.zeros((2, 1), np.uint16)
    ranks = FrequencyRanks(
        draft=DRAFT, fitted="a", proposals="coupled", vocab=9, budgets=(1,), digests=("x",),
        text_offsets=np.array([0, 2]),
        own=two, better=two, text_code=codes[0], mass_code=codes, entropy_code=codes,
        open=np.zeros(2, np.bool_),
    )  # fmt: skip
    with pytest.raises(ValueError, match="text_code has 1 rows, not 2"):
        FrequencyRanks.from_document(*ranks.to_document())
    document, arrays = replace(ranks, text_code=codes[:, 0]).to_document()
    kept = FrequencyRanks.from_document(document, arrays).kept([1])
    assert kept == [{"tokens": 1, "true_tokens": 1.0, "mass": 1.0}]
    with pytest.raises(ValueError, match="own is missing"):
        FrequencyRanks.from_document(document, {k: v for k, v in arrays.items() if k != "own"})
