"""A sample lists requests of other recordings: what is made of them is stored with themselves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from databases import opened
from trace_values import PAIR, POLICY, POLICY_ID, a_panorama, a_trajectory, steps_of

from spectune.traces.recording import Asked
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore, inventory, query
from spectune.traces.store.confirmations import count_confirmation
from spectune.traces.store.export import export_recordings, import_recordings
from spectune.traces.store.followed import Arrivals, Arrived, FilePlace
from spectune.traces.store.query import TraceFilter
from spectune.traces.store.recordings import Listed
from spectune.traces.tables import SAMPLE, Recording

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
ASKED = Asked(PAIR, None, Sampling(), 64, source="serve")
STEPS = steps_of(a_trajectory(0), POLICY_ID)


@pytest.fixture
def served(store: TraceStore) -> list[str]:
    """Two recordings of four requests each: what is served is recorded by sampling."""
    store.put_pair(PAIR, "demo", {"target": "x"})
    store.put_policy(POLICY_ID, POLICY, "small")
    names = []
    for first in (0, 4):
        names.append(store.create_recording(ASKED).id)
        requests = [(n, a_trajectory(first + n), STEPS) for n in range(4)]
        store.append_trajectories(names[-1], requests)
        store.finish_recording(names[-1])
    return names


def sample_of(store: TraceStore, served: Sequence[str]) -> Recording:
    """Texts 1 and 3 of the first and 0 of the second; the load is the first's requests 2 and 3."""
    first, second = served
    listed = [
        Listed(first, 1, is_text=True, is_load=False),
        Listed(first, 2, is_text=False, is_load=True),
        Listed(first, 3, is_text=True, is_load=True),
        Listed(second, 0, is_text=True, is_load=False),
    ]
    return store.create_sample(Asked(PAIR, None, Sampling(), 64, source=SAMPLE), listed)


def names_of(store: TraceStore, recording: str) -> list[str]:
    return [request.trajectory.request_id for request in store.iterate(recording)]


def test_a_sample_reads_the_requests_of_others(store: TraceStore, served: list[str]) -> None:
    sample = sample_of(store, served)
    assert (sample.state, sample.n_requests, sample.n_texts) == ("complete", 4, 3)
    assert store.text_ordinals(sample.id) == (0, 2, 3)
    assert names_of(store, sample.id) == ["r1", "r3", "r4"]
    (third,) = store.iterate(sample.id, ordinals=[2, 1], steps=True)
    assert (third.ordinal, len(third.steps)) == (2, len(STEPS))
    load = [(r.recording, r.ordinal) for r in store.served_requests([sample.id])]
    assert load == [(sample.id, 1), (sample.id, 2)]
    assert len(store.served_requests([sample.id, served[1]])) == 2 + 4
    assert store.list_recordings()[0].id == sample.id
    assert store.resolve_recording("latest") in served


def test_panoramas_and_parts_are_the_requests_own(store: TraceStore, served: list[str]) -> None:
    sample = sample_of(store, served)
    assert store.missing_panoramas(sample.id, "small", 4) == (0, 2, 3)
    made = [(n, a_panorama(a_trajectory(seed), "small")) for n, seed in ((2, 3), (3, 4))]
    assert store.put_panoramas(sample.id, made) == 2
    assert store.missing_panoramas(sample.id, "small", 4) == (0,)
    assert store.missing_panoramas(served[0], "small", 4) == (0, 1, 2)
    extent = store.get_recording(sample.id).drafts["small"]
    assert (extent.count, extent.gamma_max) == (2, made[0][1].gamma_max)
    assert store.load(served[1], ordinals=[0]).panoramas("small") == (made[1][1],)
    parts = store.request_parts(sample.id, lambda requests: ["s", "r", "c"][: len(requests)])
    assert parts == {0: "s", 2: "r", 3: "c"}
    had: list[str | None] = []

    def rest(requests: Sequence[tuple[str, int, str | None]]) -> list[str]:
        had.extend(part for *_, part in requests)
        return [part or "f" for *_, part in requests]

    assert store.request_parts(served[0], rest) == {0: "f", 1: "s", 2: "f", 3: "r"}
    assert had == [None, "s", None, "r"]


def test_confirmations_on_a_sample_are_counted_for_its_requests(
    store: TraceStore, served: list[str]
) -> None:
    sample = sample_of(store, served)
    assert [count_confirmation(store, sample.id, held) for held in ([0, 2], [3])] == [0, 0]
    assert count_confirmation(store, sample_of(store, served).id, [0, 3]) == 1
    assert [count_confirmation(store, name, [0]) for name in served] == [0, 2]


def test_questions_on_a_sample_are_answered_by_its_requests(
    store: TraceStore, served: list[str]
) -> None:
    every = query.requests(store)
    sample = sample_of(store, served)
    assert query.requests(store) == every
    of = TraceFilter(recordings=(sample.id,))
    found = [(row["recording_id"], row["ordinal"]) for row in query.requests(store, of)]
    first, second = served
    assert sorted(found) == sorted([(first, 1), (first, 2), (first, 3), (second, 0)])
    assert {info.id for info in query.list_recordings(store, TraceFilter(request="r4"))} == {
        second,
        sample.id,
    }
    assert query.list_recordings(store, TraceFilter((sample.id,), request="r5")) == ()


def test_what_is_removed_is_in_no_sample(store: TraceStore) -> None:
    """Retention counts from when a request ended, whoever lists it; a tuning that still runs goes
    on with the others."""
    store.put_pair(PAIR, "demo", {"target": "x"})
    how = {"deployment": "d", "node": "n", "place": "p", "models": {}}
    server = store.follow_server("boot", PAIR, {}, **how)
    arrived = [
        Arrived("asked", a_trajectory(n), (), NOW + n * timedelta(hours=1)) for n in range(4)
    ]
    store.bring_in(server, FilePlace(0, 9), Arrivals(arrived, {"asked": ASKED}))
    (info,) = store.list_recordings()
    listed = [Listed(info.id, n, is_text=True, is_load=True) for n in range(4)]
    sample = store.create_sample(Asked(PAIR, None, Sampling(), 64, source=SAMPLE), listed)
    whole = store.stored_bytes([PAIR])
    assert store.forget([PAIR], before=NOW + timedelta(hours=2)) == 2
    assert store.stored_bytes([PAIR]) < whole
    assert names_of(store, sample.id) == ["r2", "r3"]
    assert store.get_recording(sample.id).n_requests == 2
    panoramas = [(n, a_panorama(a_trajectory(n), "small")) for n in (1, 2)]
    assert store.put_panoramas(sample.id, panoramas) == 1
    again = store.create_sample(Asked(PAIR, None, Sampling(), 64, source=SAMPLE), listed)
    assert store.text_ordinals(again.id) == (2, 3)


def test_what_a_published_sample_lists_is_not_pruned(store: TraceStore, served: list[str]) -> None:
    sample = sample_of(store, served)
    evidence = {"recording": sample.id}
    store.publish(PAIR, "cpu", POLICY_ID, actor="tune", evidence=evidence)
    spare = store.create_recording(ASKED).id
    store.append_trajectory(spare, 0, a_trajectory(9))
    later = store.clock() + timedelta(days=1)
    pruned = inventory.prune(store, ["recordings"], before=later)["recordings"]
    assert set(pruned["spared"]) == {sample.id, *served}
    assert names_of(store, sample.id) == ["r1", "r3", "r4"]
    inventory.prune(store, ["recordings"], named=[served[0]], force=True)
    assert names_of(store, sample.id) == ["r4"]


def test_a_sample_is_exported_as_what_it_lists(
    store: TraceStore, served: list[str], tmp_path: Path
) -> None:
    sample = sample_of(store, served)
    store.put_panoramas(served[0], [(n, a_panorama(a_trajectory(n), "small")) for n in (1, 2)])
    file = tmp_path / "sample.parquet"
    export_recordings(store, [sample.id], file)
    with opened(str(tmp_path / "there.db")) as there:
        assert import_recordings(there, file) == ([sample.id], [])
        info = there.get_recording(sample.id)
        assert (info.n_requests, info.n_texts) == (4, 3)
        assert info.drafts == store.get_recording(sample.id).drafts
        assert names_of(there, sample.id) == ["r1", "r3", "r4"]
        for requests in (there.served_requests, store.served_requests):
            assert [r.ordinal for r in requests([sample.id])] == [1, 2]
        assert there.get_policy(POLICY_ID).label == "small"
