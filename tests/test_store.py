"""The store's contract, on every database: values in, equal values out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import add
from typing import Any

import numpy as np
import pytest
from sqlalchemy import URL, select
from sqlalchemy.orm import Session
from trace_values import (
    PAIR,
    a_panorama,
    a_profile,
    a_trajectory,
    an_outcome,
    steps_of,
)

from spectune.db import Database, NotFoundError, StaleVersionError
from spectune.db.models import ArtifactRow, RecordingRow, StepChunkRow
from spectune.db.urls import parse_url
from spectune.traces.errors import TraceError
from spectune.traces.packing import unpack_steps
from spectune.traces.recording import DESIGNED, Extent, RecordingInfo
from spectune.traces.schema import Request, Sampling, Workload, policy_id
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.kinds import list_kind
from spectune.traces.store.prune import PruneReport, prune

WORKLOAD = Workload(
    "w", (Request("a", "code", ("x", "y")), Request("b", "prose", ('žluťoučký \\ " kůň',)))
)
GREEDY = Sampling()
POLICY = {"draft": "small", "window": {"kind": "fixed", "gamma": 4}}
POLICY_ID = policy_id(POLICY)


@pytest.fixture
def begun(store: TraceStore) -> RecordingInfo:
    store.put_pair(PAIR, "demo", {"target": "x"})
    return store.create_recording(Asked(PAIR, store.put_workload(WORKLOAD), GREEDY, 64))


def damage(store: TraceStore, row: type, *key: object) -> None:
    with store.database.write() as session:
        found = session.get_one(row, key)
        flipped = bytearray(found.data)
        flipped[len(flipped) // 2] ^= 1
        found.data = bytes(flipped)


def test_pairs_are_kept_and_found_by_id_prefix_and_name(store: TraceStore) -> None:
    store.put_pair(PAIR, "demo", {"target": "t", "drafts": {"small": "s"}})
    store.put_pair(PAIR, "other name", {"target": "ignored"})
    assert [p.name for p in store.list_pairs()] == ["demo"]
    for text in (PAIR, PAIR[:5], "demo", "latest"):
        assert store.get_pair(text).document == {"target": "t", "drafts": {"small": "s"}}
    with pytest.raises(NotFoundError, match="no pair 'nobody'"):
        store.get_pair("nobody")


def test_workloads_come_back_equal_and_are_stored_once(store: TraceStore) -> None:
    digest = store.put_workload(WORKLOAD)
    assert store.put_workload(WORKLOAD) == digest == WORKLOAD.digest()
    assert store.get_workload(digest[:8]) == WORKLOAD
    (row,) = list_kind(store.database, "workloads")
    assert (row["id"], row["name"], row["n_requests"]) == (digest, "w", 2)


def test_a_recording_needs_its_pair_and_workload(store: TraceStore) -> None:
    with pytest.raises(NotFoundError, match="no pair"):
        store.create_recording(Asked("nothing", None, GREEDY, 8))
    store.put_pair(PAIR, "demo", {})
    with pytest.raises(NotFoundError, match="no workload"):
        store.create_recording(Asked(PAIR, "nothing", GREEDY, 8))


def test_a_trajectory_comes_back_equal_with_its_steps(
    store: TraceStore, begun: RecordingInfo
) -> None:
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
    store: TraceStore, begun: RecordingInfo
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
    store: TraceStore, begun: RecordingInfo
) -> None:

    def find(
        sampling: Sampling = GREEDY, max_new_tokens: int = 64, state: Any = "recording"
    ) -> RecordingInfo | None:
        asked = Asked(PAIR, begun.workload_id, sampling, max_new_tokens)
        return store.find_recording(asked, state=state)

    assert find() == begun
    assert find(max_new_tokens=65) is find(Sampling(0.5)) is None
    store.finish_recording(begun.id)
    assert find() is None
    found = find(state="complete")
    assert (found.id, found.state) == (begun.id, "complete")
    assert found.finished_at is not None


def test_ids_may_be_shortened_and_latest_is_the_newest(
    store: TraceStore, begun: RecordingInfo
) -> None:
    assert begun.id.startswith("rec-")
    assert len(begun.id) == 10
    assert store.resolve_recording(begun.id[:9]) == begun.id
    newer = TraceStore(store.database, clock=lambda: datetime.now(UTC) + timedelta(days=1))
    second = newer.create_recording(Asked(PAIR, None, GREEDY, 8, source="serve"))
    assert store.resolve_recording("latest") == second.id
    for bad, says in {"rec-": "ambiguous", "": "no recording ''", "rec-z": "no recording"}.items():
        with pytest.raises(NotFoundError, match=says):
            store.resolve_recording(bad)


def test_a_taken_id_is_not_given_twice(store: TraceStore) -> None:
    store.put_pair(PAIR, "demo", {})
    tokens = iter(["aaaaaa", "aaaaaa", "bbbbbb"])
    fixed = TraceStore(store.database, token=lambda: next(tokens))
    ids = [fixed.create_recording(Asked(PAIR, None, GREEDY, 8)).id for _ in range(2)]
    assert ids == ["rec-aaaaaa", "rec-bbbbbb"]


def test_panoramas_come_back_equal_by_draft(store: TraceStore, begun: RecordingInfo) -> None:
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


def test_a_longer_panorama_serves_a_shorter_window(store: TraceStore, begun: RecordingInfo) -> None:
    trajectory = a_trajectory(0)
    store.append_trajectory(begun.id, 0, trajectory)
    store.append_trajectory(begun.id, 1, a_trajectory(1))
    short, long = (a_panorama(trajectory, "small", gamma_max=g) for g in (4, 16))
    assert store.missing_panoramas(begun.id, "small", 4) == (0, 1)
    assert store.put_panoramas(begun.id, [(0, short)])
    assert store.missing_panoramas(begun.id, "small", 4) == (1,)
    assert store.missing_panoramas(begun.id, "small", 5) == (0, 1)
    assert store.put_panoramas(begun.id, [(0, long)])
    assert not store.put_panoramas(begun.id, [(0, short)])
    assert store.load(begun.id).requests[0].panoramas["small"] == long


def test_a_panorama_must_fit_its_trajectory(store: TraceStore, begun: RecordingInfo) -> None:
    store.append_trajectory(begun.id, 0, a_trajectory(0, n=20))
    with pytest.raises(TraceError, match="21 positions does not fit trajectory 0"):
        store.put_panoramas(begun.id, [(0, a_panorama(a_trajectory(0, n=21), "small"))])
    with pytest.raises(NotFoundError, match="no trajectory 7"):
        store.put_panoramas(begun.id, [(7, a_panorama(a_trajectory(0), "small"))])


def test_profiles_come_back_equal_and_the_latest_is_found(store: TraceStore) -> None:
    store.put_pair(PAIR, "demo", {})
    first, second, cuda = a_profile(0.001), a_profile(0.002), a_profile(0.003, device="cuda")
    ids = [store.put_profile(p) for p in (first, second, cuda)]
    assert store.get_profile(ids[0]).profile == first
    found = store.latest_profile(PAIR, "cpu")
    assert found.profile == second
    assert found.id == ids[1]
    assert store.latest_profile(PAIR, "tpu") is None
    assert [p.id for p in store.profiles()] == ids[::-1]


def test_policies_artifacts_and_studies(store: TraceStore) -> None:
    store.put_pair(PAIR, "demo", {})
    store.put_policy(POLICY_ID, POLICY, "small fixed")
    store.put_policy(POLICY_ID, POLICY, "small fixed")
    assert store.get_policy(POLICY_ID[:6]).document == POLICY
    assert len(store.list_policies()) == 1
    table = np.arange(12, dtype=np.float64).reshape(3, 4) / 7
    art = store.put_artifact(
        "q_table", {"gamma_max": 3}, {"q": table}, pair_id=PAIR, provenance={"from": "rec-1"}
    )
    damage(store, ArtifactRow, art)
    assert art == store.put_artifact("q_table", {"gamma_max": 3}, {"q": table})
    assert art != store.put_artifact("q_table", {"gamma_max": 4}, {"q": table})
    got = store.get_artifact(art)
    assert (got.kind, got.document) == ("q_table", {"gamma_max": 3})
    assert got.provenance == {"from": "rec-1"}
    assert np.array_equal(got.arrays["q"], table)
    trials = [{"number": i, "value": i / 3, "params": {"gamma": i}} for i in range(50)]
    study = store.put_study(
        PAIR, sampler="tpe", seed=2**62, document={"best": 3}, trials=trials, recording_id="rec-1"
    )
    assert store.get_study(study).trials == tuple(trials)
    assert store.get_study("latest").seed == 2**62
    assert [s[0] for s in store.list_studies(PAIR)] == [study]


def test_runs_keep_their_outcome_and_rounds(store: TraceStore) -> None:
    store.put_pair(PAIR, "demo", {})
    outcome = an_outcome()
    steps = {r.request_id: steps_of(a_trajectory(i)) for i, r in enumerate(outcome.per_request)}
    with pytest.raises(NotFoundError, match="no policy"):
        store.put_run(PAIR, POLICY_ID, outcome, device="cpu", dtype="float32")
    store.put_policy(POLICY_ID, POLICY, "small fixed")
    run = store.put_run(
        PAIR, POLICY_ID, outcome, device="cpu", dtype="float32", purpose="validate", steps=steps
    )
    assert store.get_run(run).outcome == outcome
    with store.database.read() as session:
        rows = session.scalars(select(StepChunkRow).where(StepChunkRow.run_id == run))
        assert {row.request_id: unpack_steps(row) for row in rows} == steps


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


def test_publishing_with_a_key_happens_once(store: TraceStore) -> None:
    publish = published(store)
    first = publish("a", idempotency_key="job-1")
    assert publish("b", idempotency_key="job-1") == first
    assert len(store.list_publications(PAIR)) == 1


def test_publishing_compares_and_swaps(store: TraceStore) -> None:
    publish = published(store)
    first = publish("a", expected=0)
    with pytest.raises(StaleVersionError, match=f"publication {first} is in force, not 0"):
        publish("b", expected=0)
    publish("b", expected=first)
    with pytest.raises(NotFoundError, match="no policy"):
        publish("c")


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


def test_requests_are_found_by_when_they_were_stored(
    store: TraceStore, begun: RecordingInfo
) -> None:
    start = datetime(2026, 5, 4, tzinfo=UTC)
    for i in range(4):
        then = TraceStore(store.database, clock=partial(add, start, timedelta(hours=i)))
        then.append_trajectory(begun.id, i, a_trajectory(i))
    late = store.recorded_since(PAIR, start + timedelta(hours=2))
    assert [r[:2] for r in late] == [(begun.id, 2), (begun.id, 3)]
    assert store.recorded_since("nobody", start) == ()
    assert [r.id for r in store.list_recordings(PAIR, state="recording")] == [begun.id]
    profiled = store.create_recording(Asked(PAIR, None, GREEDY, 8, source=DESIGNED))
    store.append_trajectory(profiled.id, 0, a_trajectory(0))
    # What a profile served is no traffic.
    assert store.recorded_since(PAIR, start + timedelta(hours=2)) == late
    assert store.resolve_recording("latest") == begun.id
    assert store.list_recordings(state="complete") == ()


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
    begun: RecordingInfo, store: TraceStore, pausing: Pausing
) -> None:
    racing = TraceStore(pausing)
    for i in range(3):
        store.append_trajectory(begun.id, i, a_trajectory(i))
    shorter = [(i, a_panorama(a_trajectory(i), "small", gamma_max=8, seed=i)) for i in range(3)]
    longer = [(i, a_panorama(a_trajectory(i), "small", gamma_max=16, seed=i)) for i in range(3)]
    results = at_once(
        lambda: racing.put_panoramas(begun.id, shorter),
        lambda: racing.put_panoramas(begun.id, longer),
    )
    assert results[1] == 3
    assert results[0] in (0, 3)
    assert store.load(begun.id).panoramas("small") == tuple(panorama for _, panorama in longer)


def test_two_that_append_the_same_request_at_once(
    begun: RecordingInfo, store: TraceStore, pausing: Pausing
) -> None:
    racing = TraceStore(pausing)
    items = [(i, a_trajectory(i), steps_of(a_trajectory(i))) for i in range(3)]
    results = at_once(
        lambda: racing.append_trajectories(begun.id, items),
        lambda: racing.append_trajectories(begun.id, items[::-1]),
    )
    assert sorted(map(str, results)) == ["0", "3"]
    assert store.load(begun.id).trajectories == tuple(trajectory for _, trajectory, _ in items)


@pytest.mark.parametrize("first", ["append", "prune"])
def test_appending_while_the_recording_is_pruned(
    first: str, begun: RecordingInfo, store: TraceStore, pausing: Pausing
) -> None:
    store.append_trajectory(begun.id, 0, a_trajectory(0), steps_of(a_trajectory(0)))
    items = [(i, a_trajectory(i), steps_of(a_trajectory(i))) for i in range(2)]

    def append() -> int:
        if first == "prune":
            pausing.has_written.wait(20)
        return TraceStore(pausing).append_trajectories(begun.id, items)

    def remove() -> int:
        if first == "append":
            pausing.has_written.wait(20)
        return len(prune(pausing, recordings=[begun.id]).removed)

    appended, removed = at_once(append, remove)
    assert removed == 1
    assert appended == 1 if first == "append" else isinstance(appended, NotFoundError)
    assert store.list_recordings() == ()


@pytest.mark.parametrize("by", ["resumed", "cited"])
def test_what_is_resumed_or_cited_while_prune_waits_for_it_is_spared(
    by: str, begun: RecordingInfo, store: TraceStore, pausing: Pausing
) -> None:
    """Its first text is old; while prune waits for the recording a second comes, or a publication
    that names it."""
    old = TraceStore(store.database, clock=lambda: datetime.now(UTC) - timedelta(days=40))
    old.append_trajectory(begun.id, 0, a_trajectory(0))
    store.put_policy(POLICY_ID, POLICY, "l")

    def hold(session: Session) -> None:
        session.get(RecordingRow, begun.id, with_for_update={"key_share": True})

    def go_on() -> object:
        if by == "resumed":
            return TraceStore(pausing).append_trajectory(begun.id, 1, a_trajectory(1))
        return TraceStore(pausing).publish(
            PAIR, "cpu", POLICY_ID, actor="t", evidence={"recording": begun.id}, guard=hold
        )

    def remove() -> PruneReport:
        pausing.has_written.wait(20)
        return prune(pausing, before=datetime.now(UTC) - timedelta(days=30))

    _, report = at_once(go_on, remove)
    assert isinstance(report, PruneReport), report
    assert report.removed == ()
    assert report.kept == ((begun.id,) if by == "cited" else ())
    assert [r.id for r in store.list_recordings()] == [begun.id]
