"""A PostgreSQL server that crashes and comes back, or that is there and does not answer."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from databases import Server, opened, put_in_force
from doors import put_made_up_profile, write_workload
from recorded_texts import asked, plain_texts
from synthetic import policy
from test_publishing import settings
from test_schedules import HOUR, T0
from waiting import PATIENCE_S, eventually

from spectune.db import UnavailableError
from spectune.db.schedules import Schedule
from spectune.optimizer.commands.work import tuning_job
from spectune.optimizer.in_force import watch
from spectune.optimizer.schedule import add_schedule, list_schedules, run_worker
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

PROMPT, TOKENS = "def add(a, b):", 24


def test_a_worker_a_tuning_and_a_watcher_go_on_after_an_outage(
    server: Server,
    pair: LoadedPair,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The server may take so long to come back; the attempt is handed back, and not lost.
    monkeypatch.setattr("spectune.optimizer.schedule.worker.PATIENCE_S", PATIENCE_S)
    crashed, end = threading.Event(), threading.Event()

    def crash_amid(phase: str, done: int, _total: int) -> None:
        if phase.endswith("decode") and done == 9 and not crashed.is_set():
            server.stop()
            crashed.set()

    with opened(server.url) as store:

        def row() -> Schedule:
            return list_schedules(store.database, "nightly")[0]

        put_made_up_profile(store, pair)
        served = {"deployment": "served"}
        first = put_in_force(store, pair.id, policy("near", 2), **served)
        work = settings(pair, write_workload(tmp_path / "w.jsonl", 18))
        add_schedule(store.database, "nightly", "@hourly", work, now=T0)
        execute = tuning_job(store, load=lambda *_, **__: pair, progress=crash_amid)
        how = {"poll_s": 0.05, "stop": end, "clock": lambda: T0 + HOUR}
        worker = threading.Thread(target=run_worker, args=(store.database, execute), kwargs=how)
        with watch(store, pair, None, interval_s=0.05, **served) as source:
            assert source.current().version == first
            worker.start()
            try:
                assert crashed.wait(PATIENCE_S)
                eventually(lambda: "cannot record how the job ended" in caplog.text)
                eventually(lambda: source.last_error)
                with pytest.raises(UnavailableError):
                    store.active_version(pair.id, "cpu")
                decoder = Decoder(pair, source)
                rounds = list(decoder.rounds(asked(decoder, PROMPT, Sampling(), TOKENS)))
                server.start()
                second = put_in_force(store, pair.id, policy("near", 4), **served)
                eventually(lambda: source.current().version == second)
                eventually(lambda: row().attempt == 2)  # the worker runs the tuning again
                eventually(lambda: (row().last or {}).get("outcome") == "done")
            finally:
                end.set()
                worker.join(PATIENCE_S)
        (plain,) = plain_texts(pair, {"r": PROMPT}, Sampling(), TOKENS)
        assert [t for item in rounds for t in item.tokens] == plain.output_ids.tolist()
        assert {item.step.policy for item in rounds} == {policy("near", 2).id}
        assert (second, "applied") in [(a.version, a.status) for a in store.acknowledgements()]
        (recording,) = store.list_recordings()  # the second attempt finished the first one's
        assert (recording.state, recording.n_requests) == ("complete", 18)
        assert len(store.list_publications(pair.id, "cpu", "default")) <= 1


@dataclass(frozen=True)
class Asking(TraceStore):
    """Says when it is asked for the version in force."""

    asked: threading.Event = field(default_factory=threading.Event)

    def active_version(self, *where: Any) -> int:
        self.asked.set()
        return super().active_version(*where)


def test_a_server_that_hangs_stops_no_decode(server: Server, pair: LoadedPair) -> None:
    """The watcher has a thread of its own, and leaving it takes its patience and no longer."""
    with opened(server.url) as store:
        store.put_pair(pair.id, "tiny", pair.spec.to_json())
        put_in_force(store, pair.id, policy("near", 3))
        asking = Asking(store.database)
        with watch(asking, pair, None, interval_s=0.05, patience_s=0.5) as source:
            server.signal(signal.SIGSTOP)
            asking.asked.clear()
            assert asking.asked.wait(PATIENCE_S)  # and is not answered
            decoder = Decoder(pair, source)
            rounds = [*decoder.rounds(asked(decoder, PROMPT, Sampling(), TOKENS))]
            assert rounds[-1].step.policy == policy("near", 3).id
        assert "was given up" in source.unfinished
        server.signal(signal.SIGCONT)
