"""A PostgreSQL server that crashes and comes back: decoders and workers go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest
from databases import Server, opened, put_in_force, server_binaries
from recorded_texts import asked, plain_texts
from synthetic import policy
from waiting import eventually

from spectune.db import UnavailableError
from spectune.optimizer.schedule import Job, JobContext, add_schedule, history, run_worker
from spectune.optimizer.serving import watch
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.traces.schema import Sampling

PROMPT, TOKENS = "def add(a, b):", 24


@pytest.fixture
def server() -> Iterator[Server]:
    binaries = server_binaries()
    if binaries is None:
        pytest.skip("a server that can be stopped needs PostgreSQL's own programs")
    with closing(Server(binaries)) as server:
        server.start()
        yield server


def test_decoders_and_workers_outlive_a_server_that_crashes(
    server: Server, pair: LoadedPair, caplog: pytest.LogCaptureFixture
) -> None:
    working, crashed, end = threading.Event(), threading.Event(), threading.Event()

    with opened(server.url) as store:

        def execute(job: Job, context: JobContext) -> Mapping[str, Any]:
            """Publishes, and is still at work when the server crashes."""
            key = {"idempotency_key": job.idempotency_key, "guard": context.check}
            version = put_in_force(store, "another pair", policy("near", 3), **key)
            working.set()
            crashed.wait(60)
            return {"version": version}

        def done() -> list[Job]:
            found = [fire.job for fire in history(store.database, "often") if fire.job is not None]
            return [job for job in found if job.state == "done"]

        def in_force() -> bool:
            return source.current().version == version

        for name in (pair.id, "another pair"):
            store.put_pair(name, name, {"name": name})
        version = put_in_force(store, pair.id, policy("near", 2))
        add_schedule(store.database, "often", every=1)
        how = {"poll_s": 0.05, "stop": end}
        worker = threading.Thread(target=run_worker, args=(store.database, execute), kwargs=how)
        with watch(store, pair, None, None, interval_s=0.05) as source:
            worker.start()
            try:
                assert working.wait(60)
                assert in_force()
                server.stop()
                crashed.set()
                eventually(lambda: "cannot record how the job ended" in caplog.text)
                eventually(lambda: source.last_error)
                with pytest.raises(UnavailableError):
                    store.active_version(pair.id, "cpu")
                decoder = Decoder(pair, source)
                rounds = list(decoder.rounds(asked(decoder, PROMPT, Sampling(), TOKENS)))
                server.start()
                version = put_in_force(store, pair.id, policy("near", 4))
                eventually(in_force)
                eventually(lambda: len(done()) > 1)
            finally:
                end.set()
                worker.join(60)
        (plain,) = plain_texts(pair, {"r": PROMPT}, Sampling(), TOKENS)
        assert [t for item in rounds for t in item.tokens] == plain.output_ids.tolist()
        assert {item.step.policy for item in rounds} == {policy("near", 2).id}
        assert (version, "applied") in [(a.version, a.status) for a in store.acknowledgements()]
        # Each job was done once, at its first attempt, and published once.
        published = {p.version for p in store.list_publications("another pair", "cpu")}
        assert {job.result["version"] for job in done() if job.result} == published
        assert {job.attempt for job in done()} == {1}
        assert len(done()) == len(published)
