"""The store's contract, on every database: values in, equal values out."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import add
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sqlalchemy import URL, func, select
from sqlalchemy.orm import Session
from trace_values import (
    PAIR,
    a_panorama,
    a_profile,
    a_recording,
    a_trajectory,
    a_tree,
    an_outcome,
    damage,
    steps_of,
)
from waiting import PATIENCE_S

from spectune.db import CorruptedChunkError, Database, NotFoundError, StaleVersionError, check
from spectune.db.urls import parse_url
from spectune.traces.blobs import (
    BlobError,
    pack,
    pack_steps,
    pack_trie,
    unpack,
    unpack_steps,
    unpack_trie,
)
from spectune.traces.errors import TraceError
from spectune.traces.schema import Extent, Request, Sampling, Step, Workload, policy_id
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.confirmations import count_confirmation
from spectune.traces.store.inventory import list_kind, prune
from spectune.traces.tables import DESIGNED, Artifact, Panorama, Recording, Trajectory

WORKLOAD = Workload("w", (Request("a", "code", "x"), Request("b", "prose", 'žluťoučký \\ " kůň')))
GREEDY = Sampling()
POLICY = {"draft": "small", "window": {"kind": "fixed", "gamma": 4}}
POLICY_ID = policy_id(POLICY)


@pytest.fixture
def begun(store: TraceStore) -> Recording:
    store.put_pair(PAIR, "demo", {"target": "x"})
    return store.create_recording(Asked(PAIR, store.put_workload(WORKLOAD), GREEDY, 64))


def test_confirmations_of_a_request_are_counted_wherever_it_is_recorded(
    store: TraceStore, begun: Recording
) -> None:
    """Of the same pair and workload; of those that were held out, the most of any."""
    asked = Asked(PAIR, begun.workload_id, GREEDY, 32)
    alone = Asked(PAIR, None, GREEDY, 32)
    again, other = (store.create_recording(of).id for of in (asked, alone))
    for recording in (begun.id, again, other):
        store.append_trajectories(recording, [(n, a_trajectory(n), ()) for n in range(4)])
    first = [count_confirmation(store, begun.id, held) for held in ([0, 1], [1, 2], [3])]
    then = [count_confirmation(store, again, held) for held in ([1], [0, 3], [1])]
    assert (first, then) == ([0, 1, 0], [2, 1, 3])
    assert count_confirmation(store, other, range(4)) == 0


def test_pairs_are_kept_and_found_by_id_prefix_and_name(store: TraceStore) -> None:
    store.put_pair(PAIR, "demo", {"target": "t", "drafts": {"small": "s"}})
    store.put_pair(PAIR, "other name", {"target": "ignored"})
    assert [p.name for p in store.list_pairs()] == ["demo"]
    for text in (PAIR, PAIR[:5], "demo", "latest"):
        assert store.get_pair(text).document == {"target": "t", "drafts": {"small": "s"}}
    for models in ({"target": "first"}, {"target": "second"}):  # known only later
        store.put_pair(PAIR, "demo", {}, models)
        assert store.get_pair(PAIR).models == {"target": "first"}
    with pytest.raises(NotFoundError, match="no pair 'nobody'"):
        store.get_pair("nobody")


def test_workloads_come_back_equal_and_are_stored_once(store: TraceStore) -> None:
    digest = store.put_workload(WORKLOAD)
    assert store.put_workload(WORKLOAD) == digest == WORKLOAD.digest()
    assert store.get_workload(digest[:8]) == WORKLOAD
    (row,) = list_kind(store, "workloads")
    assert (row["id"], row["name"], row["n_requests"]) == (digest, "w", 2)


def test_a_trajectory_comes_back_equal_with_its_steps(store: TraceStore, begun: Recording) -> None:
    trajectory = a_trajectory(3, stop_strings=("\n\n",), sampling=Sampling(0.7, 40, 0.9, 2**62))
    steps = steps_of(trajectory)
    assert store.append_trajectory(begun.id, 3, trajectory, steps)
    loaded = store.load(begun.id, steps=True)
    assert loaded.trajectories == (trajectory,)
    assert loaded.requests[0].ordinal == 3
    assert loaded.requests[0].steps == steps
    assert loaded.info.n_requests == 1
    assert loaded.info.n_output_tokens == len(trajectory.output_ids)
    assert store.recorded_ordinals(begun.id) == {3}


def test_appending_again_changes_nothing_and_another_text_is_refused(
    store: TraceStore, begun: Recording
) -> None:
    assert store.append_trajectory(begun.id, 0, a_trajectory(0))
    assert not store.append_trajectory(begun.id, 0, a_trajectory(0), steps_of(a_trajectory(0)))
    assert next(store.iterate(begun.id, steps=True)).steps == ()
    with pytest.raises(TraceError, match="already holds another trajectory at 0"):
        store.append_trajectory(begun.id, 0, a_trajectory(1))
    with pytest.raises(NotFoundError, match="no recording 'rec-0'"):
        store.append_trajectory("rec-0", 0, a_trajectory(0))
    with pytest.raises(TraceError, match="already holds another trajectory at 1"):
        store.append_trajectories(begun.id, [(1, a_trajectory(1), ()), (1, a_trajectory(2), ())])
    assert store.recorded_ordinals(begun.id) == {0}
    assert store.recorded_ordinals(begun.id, after=0) == frozenset()


def test_an_unfinished_recording_is_found_by_what_was_asked(
    store: TraceStore, begun: Recording
) -> None:

    def find(
        sampling: Sampling = GREEDY, max_new_tokens: int = 64, state: Any = "recording"
    ) -> Recording | None:
        asked = Asked(PAIR, begun.workload_id, sampling, max_new_tokens)
        return store.find_recording(asked, state=state)

    assert find() == begun
    assert find(max_new_tokens=65) is find(Sampling(0.5)) is None
    store.finish_recording(begun.id)
    assert find() is None
    found = find(state="complete")
    assert (found.id, found.state) == (begun.id, "complete")
    assert found.finished_at is not None


def test_ids_may_be_shortened_and_latest_is_the_newest(store: TraceStore, begun: Recording) -> None:
    assert begun.id.startswith("rec-")
    assert len(begun.id) == 10
    assert store.resolve_recording(begun.id[:9]) == begun.id
    newer = TraceStore(store.database, clock=lambda: datetime.now(UTC) + timedelta(days=1))
    second = newer.create_recording(Asked(PAIR, None, GREEDY, 8, source="serve"))
    assert store.resolve_recording("latest") == second.id
    for bad, says in {"rec-": "ambiguous", "": "no recording ''", "rec-z": "no recording"}.items():
        with pytest.raises(NotFoundError, match=says):
            store.resolve_recording(bad)


def test_panoramas_come_back_equal_by_draft(store: TraceStore, begun: Recording) -> None:
    made = {}
    for i in range(5):
        store.append_trajectory(begun.id, i, a_trajectory(i))
        for draft in ("small", "ngram"):
            made[draft, i] = a_panorama(a_trajectory(i), draft, seed=i)
            assert store.put_panoramas(begun.id, [(i, made[draft, i])])
    loaded = store.load(begun.id)
    assert loaded.drafts == ("ngram", "small")
    for draft in loaded.drafts:
        assert loaded.panoramas(draft) == tuple(made[draft, i] for i in range(5))
    assert store.load(begun.id, ["small"]).drafts == ("small",)
    assert store.load(begun.id, []).drafts == ()
    held = store.get_recording(begun.id).drafts
    assert held == {"ngram": Extent(5, 16, 1, 1), "small": Extent(5, 16, 1, 1)}


def test_a_longer_panorama_serves_a_shorter_window(store: TraceStore, begun: Recording) -> None:
    trajectory = a_trajectory(0)
    store.append_trajectory(begun.id, 0, trajectory)
    store.append_trajectory(begun.id, 1, a_trajectory(1))
    short, long = (a_panorama(trajectory, "small", gamma_max=g) for g in (4, 16))
    assert store.missing_panoramas(begun.id, "small", 4) == (0, 1)
    assert store.put_panoramas(begun.id, [(0, short)])
    assert store.missing_panoramas(begun.id, "small", 4) == (1,)
    assert store.missing_panoramas(begun.id, "small", 5) == (0, 1)
    assert store.put_panoramas(begun.id, [(0, long)])
    assert store.put_panoramas(begun.id, [(0, short)]) == 0  # of a recorder that began before
    assert store.missing_panoramas(begun.id, "small", 16) == (1,)
    assert store.load(begun.id).requests[0].panoramas["small"] == long


def test_a_panorama_must_fit_its_trajectory(store: TraceStore, begun: Recording) -> None:
    store.append_trajectory(begun.id, 0, a_trajectory(0, n=20))
    with pytest.raises(TraceError, match="21 positions does not fit trajectory 0"):
        store.put_panoramas(begun.id, [(0, a_panorama(a_trajectory(0, n=21), "small"))])
    with pytest.raises(NotFoundError, match="no trajectory 7"):
        store.put_panoramas(begun.id, [(7, a_panorama(a_trajectory(0), "small"))])


def test_profiles_come_back_equal_and_the_latest_is_found(store: TraceStore) -> None:
    store.put_pair(PAIR, "demo", {})
    first, second, cuda = a_profile(0.001), a_profile(0.002), a_profile(0.003, device="cuda")
    ids = [store.put_profile(p) for p in (first, second, cuda)]
    assert store.get_profile(ids[0]) == first
    newest = store.profile_of(PAIR, device="cpu", dtype="float32")
    assert (newest, newest.id) == (second, ids[1])
    assert store.profile_of(PAIR, device="cpu", hardware="an Abacus") is None
    assert store.profile_of(PAIR, device="cpu", dtype="bfloat16") is None
    assert store.profile_of(PAIR, device="tpu") is None
    assert store.profile_of(PAIR, device="cuda:NVIDIA L4") == cuda
    of_abacus = replace(first, environment={"device": "an Abacus"})
    ids.append(store.put_profile(of_abacus))
    assert store.profile_of(PAIR, device="cpu", hardware="an Abacus") == of_abacus
    assert [p.id for p in store.profiles()] == ids[::-1]


def test_policies_artifacts_and_studies(store: TraceStore) -> None:
    store.put_pair(PAIR, "demo", {})
    store.put_policy(POLICY_ID, POLICY, "small fixed")
    store.put_policy(POLICY_ID, POLICY, "small fixed")
    assert store.get_policy(POLICY_ID[:6]).document == POLICY
    assert len(store.list_policies()) == 1
    table = np.arange(12, dtype=np.float64).reshape(3, 4) / 7
    art = store.put_artifact(
        "bins", {"gamma_max": 3}, {"q": table}, pair_id=PAIR, provenance={"from": "rec-1"}
    )
    damage(store, Artifact.content, id=art)
    with pytest.raises(CorruptedChunkError, match=f"artifact {art} cannot be used"):
        store.get_artifact(art)
    assert art == store.put_artifact("bins", {"gamma_max": 3}, {"q": table})
    assert art != store.put_artifact("bins", {"gamma_max": 4}, {"q": table})
    got = store.get_artifact(art)
    assert (got.kind, got.document) == ("bins", {"gamma_max": 3})
    assert got.provenance == {"from": "rec-1"}
    assert np.array_equal(got.arrays["q"], table)
    trials = [{"number": i, "value": i / 3, "params": {"gamma": i}} for i in range(50)]
    study = store.put_study(
        PAIR, sampler="tpe", seed=2**62, document={"best": 3}, trials=trials, recording_id="rec-1"
    )
    assert store.get_study(study).trials == trials
    assert store.get_study("latest").seed == 2**62
    assert [s.id for s in store.list_studies(PAIR)] == [study]
    assert [a.id for a in store.list_artifacts("bins", PAIR)] == [art]


def test_runs_keep_their_outcome(store: TraceStore) -> None:
    store.put_pair(PAIR, "demo", {})
    how: dict[str, Any] = {"device": "cpu", "dtype": "float32", "purpose": "validate"}
    with pytest.raises(NotFoundError, match="no policy"):
        store.put_run(PAIR, POLICY_ID, an_outcome(), **how)
    store.put_policy(POLICY_ID, POLICY, "small fixed")
    run = store.put_run(PAIR, POLICY_ID, an_outcome(), **how)
    assert store.get_run(run).outcome == an_outcome()


def published(store: TraceStore) -> Callable[..., int]:
    store.put_pair(PAIR, "demo", {})
    for name in ("a" * 12, "b" * 12):
        store.put_policy(name, POLICY, name[:1])
    return lambda policy, **kw: (
        store.publish(PAIR, kw.pop("device", "cpu"), policy * 12, actor="test", **kw).version
    )


def test_the_newest_publication_of_a_device_is_in_force(store: TraceStore) -> None:
    assert store.active_publication(PAIR, "cpu") is None
    publish = published(store)
    first = publish("a", evidence={"gain": 1.2}, reason="better")
    second, other = publish("b"), publish("a", device="cuda")
    assert first < second < other
    active = store.active_publication(PAIR, "cpu")
    assert (active.version, active.supersedes) == (second, first)
    assert (active.policy_id, active.document) == ("b" * 12, POLICY)
    assert store.active_version(PAIR, "cuda") == other
    assert store.active_version(PAIR, "tpu") == 0
    assert [p.version for p in store.list_publications(PAIR)] == [other, second, first]
    assert store.list_publications(PAIR)[-1].evidence == {"gain": 1.2}


def test_each_deployment_has_a_policy_of_its_own_in_force(store: TraceStore) -> None:
    publish = published(store)
    hot = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "verifier": "coupled"}
    first, tried = publish("a"), publish("b", deployment="canary", sampling=hot, expected=0)
    assert store.active_version(PAIR, "cpu") == first
    assert store.active_version(PAIR, "cpu", "canary") == tried
    assert store.active_version(PAIR, "cpu", "nobody") == 0
    canary = store.active_publication(PAIR, "cpu", "canary")
    assert canary is not None
    assert (canary.deployment, canary.sampling, canary.supersedes) == ("canary", hot, None)
    assert [p.sampling for p in store.list_publications(PAIR, deployment="default")] == [None]
    assert [p.version for p in store.list_publications(PAIR)] == [tried, first]
    with pytest.raises(StaleVersionError, match=f"publication {tried} is in force"):
        publish("a", deployment="canary", expected=first)


def test_publishing_compares_and_swaps_and_happens_once_under_a_key(store: TraceStore) -> None:
    publish = published(store)
    first = publish("a", expected=0, idempotency_key="job-1")
    assert publish("b", idempotency_key="job-1") == first
    assert len(store.list_publications(PAIR)) == 1
    with pytest.raises(StaleVersionError, match=f"publication {first} is in force, not 0"):
        publish("b", expected=0)
    publish("b", expected=first)
    with pytest.raises(NotFoundError, match="no policy"):
        publish("c")


def test_publishing_for_a_gpu_and_for_all_of_them_is_one_after_the_other(
    store: TraceStore,
) -> None:
    """What is in force there is one thing: who expected it to be another is told."""
    publish, refused = published(store), list[str]()

    def at_once() -> None:
        try:
            publish("b", device="cuda:NVIDIA L4", expected=0)
        except StaleVersionError as error:
            refused.append(str(error))

    second = threading.Thread(target=at_once)

    def meanwhile(_: Session) -> None:
        second.start()
        second.join(0.3)

    version = publish("a", device="cuda", expected=0, guard=meanwhile)
    second.join(PATIENCE_S)
    assert len(refused) == 1
    assert f"publication {version} is in force, not 0" in refused[0]


def test_acknowledgements_are_kept_in_order(store: TraceStore) -> None:
    version = published(store)("a")
    store.acknowledge(version, "node-1", "refused", "no such draft")
    store.acknowledge(version, "node-1", "applied")
    store.acknowledge(version, "node-2", "applied")
    got = [(a.node, a.status, a.reason) for a in store.acknowledgements(version)]
    first, *others = got
    assert first == ("node-1", "refused", "no such draft")
    assert others == [("node-1", "applied", ""), ("node-2", "applied", "")]
    with pytest.raises(NotFoundError, match="no publication 99"):
        store.acknowledge(99, "node-1", "applied")


def test_requests_are_found_by_when_they_were_stored(store: TraceStore, begun: Recording) -> None:
    start = datetime(2026, 5, 4, tzinfo=UTC)
    for i in range(4):
        then = TraceStore(store.database, clock=partial(add, start, timedelta(hours=i)))
        then.append_trajectory(begun.id, i, a_trajectory(i))
    since = start + timedelta(hours=2)
    (late,) = store.traffic_since(PAIR, since)
    assert (late.recording.id, late.requests, late.texts) == (begun.id, 2, 2)
    assert late.ended_at == start + timedelta(hours=3)
    keys = [key[:2] for key in store.request_keys([begun.id], since)]
    assert keys == [(begun.id, 3), (begun.id, 2)]
    assert [*store.request_keys([begun.id], start, last=1)] == [(begun.id, 3, late.ended_at, None)]
    assert store.traffic_since("nobody", start) == ()
    assert [r.id for r in store.list_recordings(PAIR, state="recording")] == [begun.id]
    profiled = store.create_recording(Asked(PAIR, None, GREEDY, 8, source=DESIGNED))
    store.append_trajectory(profiled.id, 0, a_trajectory(0))
    # What a profile served is no traffic.
    assert store.traffic_since(PAIR, since) == (late,)
    assert store.resolve_recording("latest") == begun.id
    assert store.list_recordings(state="complete") == ()


# --- blobs


DTYPES = [np.uint8, np.uint16, np.int32, np.int64, np.float32, np.float64, np.bool_]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))


@settings(max_examples=30)
@given(
    st.dictionaries(st.text("abcxyz_", min_size=1, max_size=8), ARRAYS, max_size=4),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=3),
)
def test_any_arrays_come_back_equal(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    back, got = unpack(pack(arrays, meta))
    assert got == meta
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(back[name], array, equal_nan=array.dtype.kind == "f")


COUNTS = st.integers(0, 2**31 - 1)
TIMES = st.integers(0, 10**13).map(lambda ns: ns / 1e9)
STEPS = st.tuples(*[COUNTS] * 7, st.text(max_size=5), st.text(max_size=5), *[TIMES] * 3).map(
    lambda fields: Step(*fields)
)


@settings(max_examples=30)
@given(st.lists(STEPS, max_size=30))
def test_any_steps_come_back_equal(steps: list[Step]) -> None:
    assert unpack_steps(pack_steps(steps)) == tuple(steps)
    timed = [s._replace(batch=3, arrived_s=1.5, ended_s=2.0 + n) for n, s in enumerate(steps)]
    assert unpack_steps(pack_steps(timed)) == tuple(timed)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("n", "vocab", "width"), [(0, 300, 5), (1, 65536, 1), (70, 150_000, 10)])
def test_any_trie_comes_back_equal(n: int, vocab: int, width: int, greedy: bool) -> None:
    how: dict[str, Any] = {"width": width, "greedy": greedy, "vocab": vocab}
    trie = a_tree(a_trajectory(1, n=n), "small", depth=7, **how).trie
    assert unpack_trie(pack_trie(trie)) == trie
    rng = np.random.default_rng(5)  # differences are modulo 65536: no order of codes is special
    some = {name: rng.integers(0, 65536, trie.logp.shape, np.uint16) for name in ("logp", "gap")}
    assert unpack_trie(pack_trie(replace(trie, **some))) == replace(trie, **some)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_flipped_bit_of_a_blob_is_noticed(where: int, bit: int) -> None:
    trie = a_panorama(a_trajectory(0), "small").trie
    data = bytearray(pack_trie(trie))
    data[where % len(data)] ^= 1 << bit
    with suppress(BlobError):
        assert unpack_trie(bytes(data)) == trie  # a bit that says nothing


def test_a_damaged_blob_costs_itself_alone(store: TraceStore, url: str) -> None:
    recording = a_recording(store, n=5, trees=True)
    damaged: list[tuple[Any, str]] = [
        (Trajectory.tokens, "its token ids"),
        (Panorama.trie, "panorama of draft 'small'"),
        (Trajectory.steps, "its steps"),
    ]
    for n, (column, what) in enumerate(damaged):
        damage(store, column, recording_id=recording, ordinal=n)
        line = f"recording {recording}, request {n}: {what} cannot be used .*; the others still can"
        with pytest.raises(CorruptedChunkError, match=line):
            list(store.iterate(recording, steps=True, ordinals=[n]))
    with pytest.raises(CorruptedChunkError, match="request 0: its token ids cannot be used"):
        store.append_trajectory(recording, 0, a_trajectory(0))
    loaded = store.load(recording, steps=True, skip_corrupted=True)
    assert [(s.ordinal, s.draft) for s in loaded.skipped] == [(0, None), (1, "small"), (2, None)]
    (last,) = store.iterate(recording, steps=True, ordinals=[4])
    assert loaded.having(["small"]).requests[-1] == last
    problems = "\n".join(check(url).problems)
    for table, n, column in (("panorama", 1, "trie"), ("trajectory", 0, "tokens")):
        assert re.search(
            rf"^{table} \(.*ordinal {n}\b.*: {column} is damaged", problems, re.MULTILINE
        )
    assert "steps is damaged" in problems


# --- trees


def test_trees_come_back_by_draft_and_go_with_their_recording(store: TraceStore) -> None:
    recording = a_recording(store, n=3, drafts=("ngram",))
    made = [a_tree(a_trajectory(i), "small", seed=i) for i in range(3)]
    assert store.put_panoramas(recording, list(enumerate(made))) == 3
    assert store.load(recording, ["small"]).panoramas("small") == tuple(made)
    with pytest.raises(TraceError, match=r"0 panoramas of draft 'large' for 3 requests .*--resume"):
        store.load(recording).panoramas("large")
    info = store.get_recording(recording)
    assert info.drafts == {"ngram": Extent(3, 16, 1, 1), "small": Extent(3, 16, 4, 3)}
    assert (info.with_trees, info.shown()) == (("small",), "ngram 16, small 16 and trees 4x3")
    prune(store, ["recordings"], named=[recording])
    with store.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Panorama)) == 0


def test_missing_are_those_too_short_too_narrow_or_too_flat(store: TraceStore) -> None:
    recording = a_recording(store, n=4, drafts=())

    def missing(*least: Any) -> list[int]:
        return [*store.missing_panoramas(recording, "small", *least)]

    assert missing(1) == [0, 1, 2, 3]
    for ordinal, (gamma, width, depth) in enumerate([(4, 4, 3), (8, 6, 3), (5, 4, 5)]):
        how: dict[str, Any] = {"gamma_max": gamma, "width": width, "depth": depth}
        tree = a_tree(a_trajectory(ordinal), "small", **how)
        assert store.put_panoramas(recording, [(ordinal, tree)]) == 1
    assert missing(4) == missing(4, 4, 3) == [3]
    assert missing(5) == [0, 3]
    assert missing(4, 5) == [0, 2, 3]
    assert missing(4, 4, 4) == [0, 1, 3]
    assert [*store.missing_panoramas(recording, "other", 1)] == [0, 1, 2, 3]
    assert store.get_recording(recording).shown() == "small 4 and trees 4x3 (3 of 4)"


# --- two that store the same thing at once


class Pausing(Database):
    """A database whose write transactions end only when another one has come as far, or has had
    half a second to do so."""

    def __init__(self, url: URL) -> None:
        super().__init__(url)
        self.met, self.has_written = threading.Barrier(2), threading.Event()

    @contextmanager
    def write(self) -> Iterator[Session]:
        with super().write() as session:
            yield session
            session.flush()
            self.has_written.set()
            with suppress(threading.BrokenBarrierError):
                self.met.wait(0.5)


@pytest.fixture
def pausing(url: str) -> Iterator[Pausing]:
    with Pausing(parse_url(url)) as database:
        yield database


def at_once(*acts: Callable[[], object]) -> list[object]:
    """What each returned, or the error it raised."""
    with ThreadPoolExecutor(len(acts)) as pool:
        made = [pool.submit(act) for act in acts]
        return [m.exception() or m.result() for m in made]


def test_two_that_store_the_same_panorama_at_once(
    begun: Recording, store: TraceStore, pausing: Pausing
) -> None:
    racing = TraceStore(pausing)
    for i in range(3):
        store.append_trajectory(begun.id, i, a_trajectory(i))
    made = [a_panorama(a_trajectory(i), "small", seed=i) for i in range(3)]
    items = list(enumerate(made))
    assert at_once(*[lambda: racing.put_panoramas(begun.id, items)] * 2) == [3, 3]
    assert store.load(begun.id).panoramas("small") == tuple(made)


@pytest.mark.parametrize("first", ["append", "prune"])
def test_appending_while_the_recording_is_pruned(
    first: str, begun: Recording, store: TraceStore, pausing: Pausing
) -> None:
    store.append_trajectory(begun.id, 0, a_trajectory(0), steps_of(a_trajectory(0)))
    items = [(i, a_trajectory(i), steps_of(a_trajectory(i))) for i in range(2)]

    def append() -> int:
        if first == "prune":
            pausing.has_written.wait(PATIENCE_S)
        return TraceStore(pausing).append_trajectories(begun.id, items)

    def remove() -> int:
        if first == "append":
            pausing.has_written.wait(PATIENCE_S)
        found = prune(TraceStore(pausing), ["recordings"], named=[begun.id])
        return len(found["recordings"]["removed"])

    appended, removed = at_once(append, remove)
    assert removed == 1
    assert appended == 1 if first == "append" else isinstance(appended, NotFoundError)
    assert store.list_recordings() == ()


@pytest.mark.parametrize("by", ["resumed", "cited"])
def test_what_is_resumed_or_cited_while_prune_waits_for_it_is_spared(
    by: str, begun: Recording, store: TraceStore, pausing: Pausing
) -> None:
    """Its first text is old; while prune waits for the recording a second comes, or a publication
    that names it."""
    old = TraceStore(store.database, clock=lambda: datetime.now(UTC) - timedelta(days=40))
    old.append_trajectory(begun.id, 0, a_trajectory(0))
    store.put_policy(POLICY_ID, POLICY, "l")

    def hold(session: Session) -> None:
        session.get(Recording, begun.id, with_for_update={"key_share": True})

    def go_on() -> object:
        if by == "resumed":
            return TraceStore(pausing).append_trajectory(begun.id, 1, a_trajectory(1))
        return TraceStore(pausing).publish(
            PAIR, "cpu", POLICY_ID, actor="t", evidence={"recording": begun.id}, guard=hold
        )

    def remove() -> object:
        pausing.has_written.wait(PATIENCE_S)
        before = datetime.now(UTC) - timedelta(days=30)
        return prune(TraceStore(pausing), ["recordings"], before=before)["recordings"]

    _, report = at_once(go_on, remove)
    assert report == {"removed": [], "spared": [begun.id] if by == "cited" else []}
    assert [r.id for r in store.list_recordings()] == [begun.id]
