"""The background writer of traffic: nothing stored is lost, decoding never waits for it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from trace_values import PAIR, a_trajectory, steps_of
from waiting import PATIENCE_S, eventually

from spectune.db import UnavailableError
from spectune.traces.schema import Sampling
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.traffic import TrafficWriter, WriterStatus


@pytest.fixture
def served(store: TraceStore) -> str:
    store.put_pair(PAIR, "demo", {})
    return store.create_recording(Asked(PAIR, None, Sampling(), 64, source="serve")).id


def test_the_writer_stores_everything_in_order(store: TraceStore, served: str) -> None:
    with TrafficWriter(store, served) as writer:
        for i in range(50):
            assert writer.put(a_trajectory(i), steps_of(a_trajectory(i)))
        assert writer.flush()
        assert writer.status.written == 50
    assert not writer.put(a_trajectory(50))
    assert writer.status.dropped == 1
    loaded = store.load(served, steps=True)
    assert loaded.trajectories == tuple(a_trajectory(i) for i in range(50))
    assert loaded.requests[7].steps == steps_of(a_trajectory(7))
    with TrafficWriter(store, served) as again:
        again.put(a_trajectory(50))
    assert max(store.recorded_ordinals(served)) == 50


@dataclass(frozen=True)
class Gate(TraceStore):
    """A store whose appends wait until it is open, or raise the ``failure`` there is."""

    open: threading.Event = field(default_factory=threading.Event)
    failure: list[Exception] = field(default_factory=list)

    def append_trajectories(self, recording: str, items: Any) -> int:
        for error in self.failure:
            raise error
        self.open.wait(PATIENCE_S)
        return super().append_trajectories(recording, items)


def test_a_slow_database_drops_and_never_blocks(store: TraceStore, served: str) -> None:
    gate = Gate(store.database)
    writer = TrafficWriter(gate, served, capacity=8, flush_s=0.01)
    begun = time.monotonic()
    taken = sum(writer.put(a_trajectory(i)) for i in range(100))
    assert time.monotonic() - begun < PATIENCE_S / 2, "the gate holds an insertion for longer"
    assert 8 <= taken <= 16
    assert writer.status.dropped == 100 - taken
    gate.open.set()
    assert writer.close().written == taken
    assert len(store.recorded_ordinals(served)) == taken


def test_what_comes_while_it_closes_is_refused_and_nothing_before_is_lost(
    store: TraceStore, served: str
) -> None:
    gate = Gate(store.database)
    writer = TrafficWriter(gate, served, flush_s=0.01)
    closing, taken = threading.Thread(target=writer.close), 1
    writer.put(a_trajectory(0))
    closing.start()
    while writer.put(a_trajectory(taken)):
        taken += 1
        time.sleep(0.001)
    gate.open.set()
    closing.join()
    assert writer.status == WriterStatus(written=taken, dropped=1, pending=0, error=None)
    assert len(store.recorded_ordinals(served)) == taken


def test_a_request_that_the_database_refuses_costs_no_other(store: TraceStore, served: str) -> None:
    odd = replace(a_trajectory(1), request_id="a\0b")
    incomplete = replace(a_trajectory(2), category=None)  # type: ignore[arg-type]  # a column needs one
    with TrafficWriter(store, served, flush_s=60) as writer:
        for trajectory in (a_trajectory(0), odd, incomplete, a_trajectory(3)):
            writer.put(trajectory)
        assert writer.flush()
        refused = 2 if store.database.dialect == "postgresql" else 1
        assert (writer.status.written, writer.status.dropped) == (4 - refused, refused)
        assert "category" in str(writer.status.error)
        writer.put(a_trajectory(4))
        assert writer.flush()
    kept = [r.trajectory.request_id for r in store.iterate(served)]
    assert [name for name in kept if name != "a\0b"] == ["r0", "r3", "r4"]
    assert store.recorded_ordinals(served) == set(range(5 - refused))


def test_a_database_that_goes_away_is_tried_again(store: TraceStore, served: str) -> None:
    gate = Gate(store.database, failure=[UnavailableError("cannot reach database x")])
    gate.open.set()
    with TrafficWriter(gate, served, flush_s=0.01) as writer:
        writer.put(a_trajectory(0))
        eventually(lambda: writer.status.error == "cannot reach database x")
        assert writer.status.pending == 1
        gate.failure.clear()
        eventually(lambda: writer.status.written)
    assert (writer.status.written, writer.status.dropped) == (1, 0)
    assert store.recorded_ordinals(served) == {0}
