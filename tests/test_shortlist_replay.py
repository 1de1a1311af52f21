"""Shortlisted drafts replayed from recordings: chains round by round as executed, trees nearly;
what passes cost, and how ranks by routers and frequency orders are made and kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pairs import chain, fixed, top_k
from recorded_texts import (
    SAMPLINGS,
    by_frequency,
    executed,
    keep,
    plain_texts,
    request_of,
    same_rounds,
    shape,
    store_of,
    trace_of,
    under_windows,
)
from synthetic import flat_profile, over_rows, with_heads, with_terms
from test_lossless import PROMPTS
from test_shortlists import M, routing
from test_tree_parity import plain_rounds
from trace_values import damage

import spectune.optimizer.fit.ranks as ranking
from spectune.db import CorruptedChunkError
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.fit.dynaspec import fit_ranks
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.shortlist_ranks import (
    ClusterRanks,
    FrequencyRanks,
    budget_grid,
    stored_ranks,
)
from spectune.optimizer.simulate.shortlists import shortlist_ranks
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.artifacts import FREQUENCIES, ROUTER, Artifacts, Fitted
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.plan import prepare
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import OFF_TEXT, Sampling
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import Artifact, LatencyProfile

TOKENS = 16
DRAFTS = ("near", "far")
SOME, WIDE, FEW = (10, 3, 4), (12, 8, 5), (8, 2, 2)
"""What is recorded of a draft: gamma of its chains, width and depth of its trees."""
WINDOWS: list[dict[str, Any]] = [
    *(fixed(1), fixed(6)),
    {"kind": "fsm", "gamma_max": 8},
    {"kind": "cache_fsm", "gamma_max": 6},
    {"kind": "heuristic", "gamma_max": 10},
    {"kind": "q_learning", "gamma_max": 6, "seed": 2},
    {"kind": "analytic", "gamma_max": 8, "history": 3},
]
BUDGETS = [(1, 1, 1), (3, 2, 1), (5, 3, 3), (M, M, M)]


@pytest.fixture(scope="module")
def pair(llama_pair: LoadedPair) -> LoadedPair:
    return llama_pair


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pair: LoadedPair) -> Iterator[TraceStore]:
    with store_of(pair, tmp_path_factory.mktemp("shortlists")) as found:
        yield found


def keep_texts(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    sampling: Sampling,
    first: int,
    size: tuple[int, int, int],
    *drafts: str,
) -> None:
    """Three texts, one of a prompt of one token."""
    ids = (f"{n} {sampling.temperature} {sampling.top_p}" for n in range(3))
    texts = plain_texts(pair, dict(zip(ids, PROMPTS[2:], strict=True)), sampling, TOKENS)
    keep(store, pair, recording, texts, first, size, *drafts)


def recorded(store: TraceStore, pair: LoadedPair, size: tuple[int, int, int], *drafts: str) -> str:
    """A recording of texts at temperature 0 and 1."""
    info = store.create_recording(Asked(pair.id, None, SAMPLINGS[0], TOKENS))
    for n, sampling in enumerate(SAMPLINGS):
        keep_texts(store, pair, info.id, sampling, 3 * n, size, *drafts)
    return info.id


def ranks_of(store: TraceStore, pair: LoadedPair, recording: str, draft: str, fitted: str) -> Any:
    """The ranks of a recording by one router or frequency order."""
    (made,) = ranking.recorded_ranks(store, pair, recording, draft, [fitted])
    return made


def policies_by(
    order: str, draft: str, windows: list[Any], sizes: list[int], by_position: list[int], every: int
) -> list[Policy]:
    """Shortlists of these sizes under :func:`recorded_texts.under_windows`."""
    shortlists = [{"kind": "frequency", "size": n, "artifact": order} for n in sizes]
    shortlists += [
        {"kind": "position_frequency", "k_max": n, "artifact": order[:8]} for n in by_position
    ]
    return under_windows(draft, windows, shortlists, every)


@pytest.fixture(scope="module")
def find(store: TraceStore) -> Artifacts:
    return fitted(store)


@pytest.fixture(scope="module")
def recording(store: TraceStore, pair: LoadedPair) -> str:
    return recorded(store, pair, SOME, *DRAFTS)


@pytest.fixture(scope="module")
def order(store: TraceStore, pair: LoadedPair, recording: str) -> str:
    """The vocabulary by its frequency in half of the texts."""
    texts = store.load(recording, []).trajectories
    made = by_frequency(texts, pair.target.vocab_size).to_document()
    return store.put_artifact(FREQUENCIES, *made, pair_id=pair.id, provenance={})


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
def trace(
    store: TraceStore, pair: LoadedPair, recording: str, routers: dict[str, str]
) -> ReplayTrace:
    ranks = {(d, r): ranks_of(store, pair, recording, d, r) for d, r in routers.items()}
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
    find: Artifacts,
    pair: LoadedPair,
    trace: ReplayTrace,
    routers: dict[str, str],
    profile: LatencyProfile,
    draft: str,
) -> None:
    """Every round of windows at every budget, at temperatures 0 and 1; routed shortlists do
    cost acceptance here."""
    differ = set()
    mine = [(WINDOWS[1], BUDGETS[3])]
    windows = WINDOWS[: None if draft == "near" else 3]
    for (n, window), (m, budgets) in itertools.product(enumerate(windows), enumerate(BUDGETS[:3])):
        if (n + m) % 3 == (draft == "near"):
            mine.append((window, budgets))
    policies = [policy_of(draft, routers[draft], b, window=w) for w, b in mine]
    for policy in policies:
        replayed = run_replay(trace, policy, profile, artifacts=find, per_round=True)
        same_rounds(pair, policy, replayed, trace.trajectories, find, profile)
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
        forest, ranks, row = trace.forest(draft), ranked.source, ranked.row
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


@pytest.mark.parametrize(
    ("block", "gamma", "term"),
    [
        ({"kind": "clusters", "k0": 7, "k1": 5, "k_min": 3}, 2, "gathered/near"),
        ({"kind": "frequency", "size": 36}, 6, "head/near"),
        ({"kind": "position_frequency", "k_max": 36}, 6, "head/near"),
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else "",
)
def test_passes_are_charged_by_the_sizes_of_their_shortlists(
    find: Artifacts,
    pair: LoadedPair,
    trace: ReplayTrace,
    routers: dict[str, str],
    order: str,
    profile: LatencyProfile,
    block: dict[str, Any],
    gamma: int,
    term: str,
) -> None:
    """What passes save is the tokens that the runtime's shortlists of that round left out; those of
    a router are known while the chain is on the text."""
    vocab = pair.target.vocab_size
    artifact = routers["near"] if block["kind"] == "clusters" else order
    policy = parse_policy(chain("near", gamma, shortlist={**block, "artifact": artifact}))
    whole = profile.terms["head/near"].seconds[-1]
    flat = with_terms(profile, {term: over_rows((0, vocab), (whole, whole))})
    cheap, dear = (
        run_replay(trace, policy, p, artifacts=find, per_round=True).steps()
        for p in (profile, flat)
    )
    prepared = prepare_for(pair, policy, artifacts=find)
    checked = 0
    for text, ours, full in zip(trace.trajectories, cheap, dear, strict=True):
        decoder = Decoder(pair, StaticSource(prepared))
        rounds = decoder.rounds(request_of(decoder, text))
        for item, here, most in zip(rounds, ours, full, strict=True):
            shortlists = prepared.shortlists
            steps, accepted = item.step.draft_steps, item.step.accepted
            if steps and (accepted >= steps - 1 or not shortlists.routed):
                used = shortlists.chosen[:steps]
                saved = sum(vocab - len(s.ids) for s in used)
                assert most.draft_s - here.draft_s == pytest.approx(1e-6 * saved)
                checked += 1
    assert checked > 20
    none = with_terms(profile, {"gathered/near": None})
    with pytest.raises(PolicyError, match="no costs of shortlists for draft 'near'"):
        run_replay(trace, policy, none, artifacts=find)


@pytest.fixture(scope="module")
def wide(store: TraceStore, pair: LoadedPair) -> ReplayTrace:
    """Many recorded children of a good draft, and no ranks."""
    return trace_of(store, recorded(store, pair, WIDE, "near"), ["near"])


def test_chains_under_shortlists_replay_exactly(
    pair: LoadedPair, wide: ReplayTrace, order: str, find: Artifacts
) -> None:
    """Every round of windows at every budget, at temperatures 0 and 1; and shortlists do cost
    acceptance here."""
    differ, vocab = set(), pair.target.vocab_size
    sizes = [1, vocab // 4, vocab], [16, vocab // 2]
    for policy in policies_by(order, "near", WINDOWS[:3], *sizes, every=5):
        replayed = run_replay(wide, policy, artifacts=find, per_round=True)
        full = run_replay(wide, policy.model_copy(update={"shortlist": Policy().shortlist}))
        same_rounds(pair, policy, replayed, wide.trajectories, find)
        differ.add(replayed.total.rounds != full.total.rounds)
        if getattr(policy.shortlist, "size", 0) >= vocab:
            assert replayed.total == full.total
    assert differ == {True, False}


def test_trees_under_shortlists_replay_nearly(
    pair: LoadedPair, wide: ReplayTrace, order: str, find: Artifacts
) -> None:
    """Tokens a round within a few percent of what is executed; exactly, where the shortlist holds
    everything."""
    vocab = pair.target.vocab_size
    for size in (vocab // 2, vocab):
        shortlist = {"kind": "frequency", "size": size, "artifact": order}
        policy = parse_policy(top_k("near", 3, 4, 10, shortlist=shortlist))
        plan = prepare(policy, pair.draft_names, artifacts=find)
        runs = executed(pair, policy, wide.trajectories, find)
        rounds = sum(len(done.steps) for done in runs)
        fast = run_replay(wide, policy, artifacts=find, per_round=True)
        replayed = fast.total.rounds
        assert replayed == rounds if size == vocab else replayed == pytest.approx(rounds, rel=0.05)
        assert plan.shortlist is not None
        held = shortlist_ranks(wide.forest("near"), plan.shortlist, WIDE[2])
        plain = plain_rounds(wide, policy, find, held)
        assert [[shape(s) for s in steps] for steps in fast.steps()] == plain


@pytest.fixture(scope="module")
def few(store: TraceStore, pair: LoadedPair) -> str:
    """Few recorded children of a weak draft."""
    return recorded(store, pair, FEW, "far")


@pytest.fixture(scope="module")
def traces(
    store: TraceStore, pair: LoadedPair, few: str, order: str
) -> tuple[ReplayTrace, ReplayTrace]:
    """With ranks, and from recorded children alone."""
    ranks = ranks_of(store, pair, few, "far", order)
    return traced(store, few, ranks), traced(store, few, None)


def traced(store: TraceStore, recording: str, ranks: FrequencyRanks | None) -> ReplayTrace:
    held = None if ranks is None else {("far", ranks.fitted): ranks}
    return trace_of(store, recording, ["far"], held)


def policies(order: str, vocab: int) -> list[Policy]:
    windows = [fixed(1), fixed(5), {"kind": "fsm", "gamma_max": 8}]
    sizes = [3, 12, vocab // 4, vocab // 2], [16, vocab // 2]
    return policies_by(order, "far", windows, *sizes, every=3)


def test_chains_replay_exactly_where_no_child_is_in_the_shortlist(
    find: Artifacts, pair: LoadedPair, traces: tuple[ReplayTrace, ReplayTrace], order: str
) -> None:
    """Every round as executed, none in doubt; from recorded children alone many are, and some are
    wrong."""
    doubts = unlike = 0
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


def test_ranks_say_how_much_of_the_text_a_shortlist_holds(
    store: TraceStore, pair: LoadedPair, few: str, order: str
) -> None:
    """The larger, the more of it, also where most of the text is no recorded child."""
    ranks = ranks_of(store, pair, few, "far", order)
    trees = store.load(few).panoramas("far")
    slots = np.concatenate([p.trie.text_slot[: p.positions] for p in trees])
    assert (slots == OFF_TEXT).sum() > 10
    least, more, every = ranks.kept([1, 16, pair.target.vocab_size])
    assert least["true_tokens"] < more["true_tokens"] < every["true_tokens"] == 1.0


STOPS = [
    {"kind": "max_prob", "threshold": 0.2},
    {"kind": "joint_prob", "threshold": 0.05, "keep_last": False},
    {"kind": "entropy", "threshold": 0.3},
]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop["kind"])
def test_stops_read_the_restricted_law(
    find: Artifacts,
    pair: LoadedPair,
    traces: tuple[ReplayTrace, ReplayTrace],
    order: str,
    stop: dict[str, object],
) -> None:
    """At sizes whose mass is kept, rounds begin and accept as executed, but for codes that rounding
    moves; by whole laws many do not."""
    unlike, rounds = np.zeros(2), 0
    for size in (4, 16):
        shortlist = {"kind": "frequency", "size": size, "artifact": order}
        policy = parse_policy(chain("far", 6, shortlist=shortlist, stop=stop))
        replayed = (run_replay(t, policy, artifacts=find, per_round=True).steps() for t in traces)
        runs = executed(pair, policy, traces[0].trajectories, find)
        for run, *both in zip(runs, *replayed, strict=True):
            done = {(s.start, s.accepted) for s in run.steps}
            rounds += len(done)
            unlike += [len(done - {(s.start, s.accepted) for s in steps}) for steps in both]
    assert unlike[0] <= 0.01 * rounds
    assert unlike[1] > 0.03 * rounds


def test_filters_leave_what_is_no_child_unsaid(
    store: TraceStore, find: Artifacts, pair: LoadedPair, order: str
) -> None:
    """Under top-p the draft's order beyond its recorded children depends on the shortlist: such
    rounds are counted, as without ranks."""
    sampling = Sampling(1.0, top_p=0.5, seed=1)
    name = store.create_recording(Asked(pair.id, None, sampling, TOKENS)).id
    keep_texts(store, pair, name, sampling, 0, FEW, "far")
    ranks = ranks_of(store, pair, name, "far", order)
    assert ranks.open.any()
    for policy in policies(order, pair.target.vocab_size):
        one, other = (
            run_replay(traced(store, name, r), policy, artifacts=find) for r in (ranks, None)
        )
        np.testing.assert_array_equal(one.counts, other.counts)
        assert one.missing == other.missing


def test_stored_ranks_are_found_and_mended(store: TraceStore, pair: LoadedPair, order: str) -> None:
    """Made once, and again when they are damaged or the recording has grown; a trace refuses those
    that lack a request."""
    name = store.create_recording(Asked(pair.id, None, SAMPLINGS[0], TOKENS)).id
    with pytest.raises(TraceError, match=r"no trees of draft 'far'.*record --resume"):
        ranks_of(store, pair, name, "far", order)
    keep_texts(store, pair, name, SAMPLINGS[0], 0, FEW, "far")
    assert stored_ranks(store, name, "far", order) is None
    first = ranks_of(store, pair, name, "far", order[:8])
    assert first.fitted == order
    assert ranks_of(store, pair, name, "far", order).artifact == first.artifact
    keep_texts(store, pair, name, SAMPLINGS[1], 3, FEW, "far")
    with pytest.raises(
        TraceError, match=r"no frequency ranks of it.*`fit ranks --recording ID --fr"
    ):
        traced(store, name, first)
    grown = ranks_of(store, pair, name, "far", order)
    assert grown.digests[:3] == first.digests
    np.testing.assert_array_equal(grown.better[: len(first.better)], first.better)
    for damaged in (first, grown):
        damage(store, Artifact.content, id=damaged.artifact)
    with pytest.raises(CorruptedChunkError, match=r"cannot be used.*`fit ranks .* --frequencies"):
        stored_ranks(store, name, "far", order)
    mended = ranks_of(store, pair, name, "far", order)
    found = stored_ranks(store, name, "far", order)
    assert isinstance(found, FrequencyRanks)
    assert found.artifact == mended.artifact == grown.artifact
    np.testing.assert_array_equal(found.own, grown.own)


def test_what_cannot_be_ranked_or_replayed_is_said(
    store: TraceStore,
    find: Artifacts,
    pair: LoadedPair,
    recording: str,
    trace: ReplayTrace,
    routers: dict[str, str],
    order: str,
) -> None:
    """No ranks of the router; a router of another draft; texts of the other verifier; an order of
    another vocabulary. A selection keeps in step."""
    bare = trace_of(store, recording, DRAFTS)
    policy = policy_of("near", routers["near"], (3, 2, 1))
    said = rf"hidden states.*no cluster ranks of router {routers['near']}.*`fit ranks"
    with pytest.raises(TraceError, match=said):
        run_replay(bare, policy, artifacts=find)
    with pytest.raises(PolicyError, match="was fitted on draft 'far'"):
        ranks_of(store, pair, recording, "near", routers["far"])
    (key, routed), *_ = trace.ranked.items()
    loaded = store.load(recording, ["near"])
    drawn = [replace(t, verifier="rejection") for t in loaded.trajectories]
    panoramas = {"near": loaded.panoramas("near")}
    other = ReplayTrace(drawn, panoramas, ranks={key: routed.source})
    with pytest.raises(TraceError, match="rejection verifier"):
        run_replay(other, policy, artifacts=find)
    shortlist = {"kind": "frequency", "size": 4, "artifact": order}
    frequent = parse_policy({"draft": "near", "shortlist": shortlist})
    short = Fitted(FREQUENCIES, *Frequencies(np.arange(3), 0).to_document())
    with pytest.raises(TraceError, match="orders a vocabulary of 3 tokens"):
        run_replay(trace, frequent, artifacts=lambda name: short)
    whole = run_replay(trace, policy, artifacts=find)
    part = run_replay(trace.select([4, 1]), policy, artifacts=find)
    np.testing.assert_array_equal(part.counts, whole.counts[[4, 1]])


def test_what_is_no_order_is_refused(store: TraceStore, pair: LoadedPair, recording: str) -> None:
    """Another kind of artifact; an order of another vocabulary; arrays that do not fit one
    another."""
    other = store.put_artifact(ROUTER, {"x": 1}, {"y": np.zeros(1)}, pair_id=pair.id, provenance={})
    with pytest.raises(PolicyError, match=r"--frequencies .* is a router, not a frequencies"):
        fit_ranks(store, recording, pair, "far", frequencies=other)
    document, arrays = Frequencies(np.arange(3), 0).to_document()
    short = store.put_artifact(FREQUENCIES, document, arrays, pair_id=pair.id, provenance={})
    with pytest.raises(PolicyError, match="orders a vocabulary of 3 tokens"):
        ranks_of(store, pair, recording, "far", short)
    malformed = store.put_artifact(FREQUENCIES, document, {}, pair_id=pair.id, provenance={})
    with pytest.raises(PolicyError, match=f"{malformed}: .*it lacks 'order'"):
        ranks_of(store, pair, recording, "far", malformed)
    two, codes = np.zeros(2), np.zeros((2, 1), np.uint16)
    ranks = FrequencyRanks(
        draft="far", fitted="a", vocab=9, budgets=(1,), digests=("x",),
        text_offsets=np.array([0, 2]),
        own=two, better=two, text_code=codes[0], mass_code=codes, entropy_code=codes,
        open=np.zeros(2, np.bool_),
    )  # fmt: skip
    with pytest.raises(ValueError, match="text_code has 1 rows, not those"):
        FrequencyRanks.from_document(*ranks.to_document())
    document, arrays = replace(ranks, text_code=codes[:, 0]).to_document()
    kept = FrequencyRanks.from_document(document, arrays).kept([1])
    assert kept == [{"tokens": 1, "true_tokens": 1.0, "mass": 1.0}]
    with pytest.raises(KeyError, match="own"):
        FrequencyRanks.from_document(document, {k: v for k, v in arrays.items() if k != "own"})
