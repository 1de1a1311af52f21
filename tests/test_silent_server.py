"""A PostgreSQL server that is there and does not answer: nothing waits for ever, and what is only
slow is not cut."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from spectune.db import DatabaseError, UnavailableError, open_database, upgrade
from spectune.db import postgresql as limits

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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRACE_S", 0.3)
    monkeypatch.setattr(limits, "PING_S", 0.3)


@contextmanager
def no_hang() -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < HANGS_S


def ask(database: Any, statement: str = "SELECT 1", *, then: Any = None, **how: Any) -> Any:
    """What a transaction is answered; ``then`` is done in it, and it asks once more."""
    with database.write(**how) as session:
        answer = session.execute(sa.text(statement)).scalar_one()
        if then is not None:
            then()
            session.execute(sa.text(statement)).scalar_one()
        return answer


def test_a_port_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, no_hang():
        port = listener.getsockname()[1]
        with pytest.raises(UnavailableError, match="cannot reach database"):
            open_database(f"postgresql://u@127.0.0.1:{port}/d?connect_timeout=2")


@pytest.mark.usefixtures("impatient")
def test_a_server_that_falls_silent_in_a_statement_is_given_up_and_found_again(
    wire: Wire, through: str
) -> None:
    given = f"{through}?connect_timeout=2&options=-c%20statement_timeout=300ms"
    with open_database(given) as database, no_hang():
        says = "no answer for 1 s; the server is stopped or cut off"
        with pytest.raises(UnavailableError, match=says):
            ask(database, then=wire.freeze)
        # An idle connection of the pool is not trusted, and a new one is not had.
        with pytest.raises(UnavailableError, match="cannot reach database"):
            ask(database)
        wire.thaw()
        assert ask(database) == 1


@pytest.mark.usefixtures("impatient")
def test_a_long_statement_is_cut_only_where_it_was_not_announced(postgresql_url: str) -> None:
    upgrade(postgresql_url)
    with open_database(f"{postgresql_url}?options=-c%20statement_timeout=200ms") as database:
        sleep = "SELECT 1 FROM pg_sleep(0.8)"
        says = r"statement timeout; add \?options=-c%20statement_timeout"
        with pytest.raises(UnavailableError, match=says):
            ask(database, sleep)
        assert ask(database, sleep, is_long=True) == 1
        assert ask(database, "SHOW statement_timeout") == "200ms"


@pytest.mark.usefixtures("impatient")
def test_what_may_take_long_may_not_take_for_ever(
    wire: Wire, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LONG_S", 0.4, raising=False)
    given = f"{through}?connect_timeout=2&options=-c%20statement_timeout=100ms"
    with open_database(given) as database, no_hang():
        with pytest.raises(UnavailableError, match="statement timeout"):
            ask(database, "SELECT 1 FROM pg_sleep(5)", is_long=True)
        with pytest.raises(UnavailableError, match="the server is stopped or cut off"):
            ask(database, then=wire.freeze, is_long=True)
    # Whoever allows ordinary statements more, or everything, allows it to these.
    wire.thaw()
    for allowed in ("0", "2h"):
        with open_database(f"{through}?options=-c%20statement_timeout={allowed}") as database:
            assert ask(database, "SHOW statement_timeout", is_long=True) == allowed


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


DEFAULT = ("2min", "1min", "10", "30", "60000")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", DEFAULT),
        (
            "connect_timeout=3&keepalives_idle=7&tcp_user_timeout=9000",
            (*DEFAULT[:2], *"37", "9000"),
        ),
        ("options=-c%20statement_timeout=0%20-c%20lock_timeout=5s", ("0", "5s", *DEFAULT[2:])),
        ("options=-c%20work_mem=8MB", DEFAULT),
    ],
)
def test_a_url_has_the_last_word_on_the_limits(
    query: str, expected: tuple[str, ...], postgresql_url: str
) -> None:
    upgrade(postgresql_url)
    with open_database(f"{postgresql_url}?{query}") as database, database.read() as session:
        shows = [f"SHOW {name}" for name in ("statement_timeout", "lock_timeout")]
        shown = [session.execute(sa.text(show)).scalar_one() for show in shows]
        connection: Any = session.connection().connection.driver_connection
        given = connection.info.get_parameters()
        names = ("connect_timeout", "keepalives_idle", "tcp_user_timeout")
        assert (*shown, *(given[name] for name in names)) == expected


def test_a_limit_of_the_database_itself_is_kept(postgresql_url: str) -> None:
    upgrade(postgresql_url)
    with open_database(postgresql_url) as database, database.write() as session:
        name = session.execute(sa.text("SELECT current_database()")).scalar_one()
        session.execute(sa.text(f"ALTER DATABASE {name} SET statement_timeout = '7s'"))
    with open_database(postgresql_url) as database:
        assert ask(database, "SHOW statement_timeout") == "7s"


def test_a_limit_that_is_no_number_is_one_line(postgresql_url: str) -> None:
    for query in ("?connect_timeout=soon", "?options=-c%20statement_timeout=soon"):
        with pytest.raises(DatabaseError) as caught:
            open_database(postgresql_url + query)
        assert "\n" not in str(caught.value)
