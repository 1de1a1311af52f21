"""A PostgreSQL server that is there and does not answer: connecting gives up, no decode waits."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa
from databases import put_in_force
from recorded_texts import asked
from sqlalchemy.engine import make_url
from synthetic import policy

from spectune.db import UnavailableError, open_database, upgrade
from spectune.optimizer.serving import watch
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.reload import WatchedSource
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

HANGS_S = 30.0
"""Far more than any limit here: who takes longer hangs."""


class Wire:
    """A port that passes everything on to a server, until it is frozen: then it takes connections
    and bytes, and passes nothing."""

    def __init__(self, host: str, port: int) -> None:
        self._server, self._flows, self._end = (host, port), threading.Event(), threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def freeze(self) -> None:
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        peers: dict[socket.socket, socket.socket] = {}
        with closing(self._listener):
            while not self._end.is_set():
                if not self._flows.wait(0.02):
                    continue
                for ready in select.select([self._listener, *peers], [], [], 0.02)[0]:
                    if ready is self._listener:
                        client, _ = self._listener.accept()
                        server = socket.create_connection(self._server)
                        peers |= {client: server, server: client}
                    elif ready in peers:
                        self._pass_on(ready, peers)
        for peer in peers:
            peer.close()

    def _pass_on(self, sender: socket.socket, peers: dict[socket.socket, socket.socket]) -> None:
        try:
            data = sender.recv(65536)
            peers[sender].sendall(data)
        except OSError:
            data = b""
        if not data:
            other = peers.pop(sender)
            peers.pop(other)
            sender.close()
            other.close()


@pytest.fixture
def wire(postgresql_url: str) -> Iterator[Wire]:
    upgrade(postgresql_url)
    url = make_url(postgresql_url)
    made = Wire(url.host or "127.0.0.1", url.port or 5432)
    yield made
    made.close()


@pytest.fixture
def through(wire: Wire, postgresql_url: str) -> str:
    """The database's URL through the wire."""
    url = make_url(postgresql_url).set(host="127.0.0.1", port=wire.port)
    return url.render_as_string(hide_password=False).replace("+psycopg", "")


def test_a_port_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, begun = listener.getsockname()[1], time.monotonic()
        with pytest.raises(UnavailableError, match="cannot reach database"):
            open_database(f"postgresql://u@127.0.0.1:{port}/d?connect_timeout=2")
        assert time.monotonic() - begun < HANGS_S


def test_a_server_that_hangs_stops_no_decode(
    wire: Wire, through: str, pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy watcher and the writer of traffic have threads of their own, and leaving them
    takes their patience and no longer."""
    monkeypatch.setattr(WatchedSource, "patience_s", 0.5)
    with open_database(through) as database:
        store = TraceStore(database)
        store.put_pair(pair.id, "tiny", pair.spec.to_json())
        put_in_force(store, pair.id, policy("near", 3))
        begun = time.monotonic()
        with watch(store, pair, None, None, interval_s=0.05) as source:
            wire.freeze()
            time.sleep(0.5)  # the watcher asks meanwhile, and is not answered
            decoder = Decoder(pair, source)
            rounds = [*decoder.rounds(asked(decoder, "def add(a, b):", Sampling(), 20))]
            assert rounds[-1].step.policy == policy("near", 3).id
        assert time.monotonic() - begun < HANGS_S
        assert "was given up" in source.unfinished
        wire.close()


def test_who_waits_for_a_lock_is_told_so(postgresql_url: str) -> None:
    upgrade(postgresql_url)
    given = f"{postgresql_url}?options=-c%20lock_timeout=100ms"
    with open_database(given) as database, open_database(given) as other, other.write() as holder:
        other.lock(holder, "name")
        with (
            pytest.raises(UnavailableError, match="is busy: another process holds"),
            database.write() as session,
        ):
            database.lock(session, "name")


@pytest.mark.parametrize(
    ("query", "lock_timeout", "idle"),
    [("", "1min", "30"), ("keepalives_idle=7&options=-c%20lock_timeout=5s", "5s", "7")],
)
def test_a_url_has_the_last_word_on_the_limits(
    query: str, lock_timeout: str, idle: str, postgresql_url: str
) -> None:
    upgrade(postgresql_url)
    with open_database(f"{postgresql_url}?{query}") as database, database.read() as session:
        assert session.scalar(sa.text("SHOW lock_timeout")) == lock_timeout
        connection: Any = session.connection().connection.driver_connection
        given = connection.info.get_parameters()
        assert (given["keepalives_idle"], given["connect_timeout"]) == (idle, "10")
