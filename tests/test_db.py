"""Databases that are absent, not ours, damaged, full, locked or written by several: each costs one
line and no result."""

from __future__ import annotations

import multiprocessing
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from databases import migrating, opened, run_sql
from doors import Door
from trace_values import a_recording

from spectune.db import Database, DatabaseError, UnavailableError, check, open_database, upgrade
from spectune.db.migrate import HEAD, VERSION_TABLE
from spectune.db.urls import parse_url, shown
from spectune.traces.schema import policy_id
from spectune.traces.store import TraceStore

COMMANDS = ("traces list", "db check", "db check --upgrade", "schedule list")


def put(database: Database, name: str = "p") -> None:
    TraceStore(database).put_policy(name, {}, name)


# --- URLs and passwords


@pytest.mark.parametrize(
    ("text", "driver", "name"),
    [
        ("foo.db", "sqlite", "foo.db"),
        ("./a:b.db", "sqlite", "./a:b.db"),
        ("sqlite:////abs/b.db", "sqlite", "/abs/b.db"),
        ("postgres://u@h/d", "postgresql+psycopg", "d"),
        ("postgresql+psycopg://u@h:5433/d", "postgresql+psycopg", "d"),
    ],
)
def test_urls_are_read_as_people_write_them(text: str, driver: str, name: str) -> None:
    url = parse_url(text)
    assert (url.drivername, url.database) == (driver, name)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:hunter2@127.0.0.1:1/d",
        "postgresql://u@127.0.0.1:1/d?sslpassword=hunter2&application_name=a%20b",
        "postgresql://u@127.0.0.1:1/d?password=a&password=hunter2",
    ],
)
def test_a_password_is_never_shown(text: str) -> None:
    name = shown(parse_url(text))
    for said in (*map(Door(text).refused, COMMANDS), name, repr(Database(parse_url(text)))):
        assert "postgresql://u" in said
        assert "***" in said
        assert "hunter2" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("postgresql:/u:hunter2@h/d", "not understood"),
        ("u:hunter2@h/d", "not understood"),
        ('"postgresql://u:hunter2@h/d"', "not understood"),
        ("sqlite://u:hunter2@h/d", "not understood"),
        ("sqlite:///a.db?password=hunter2", "not understood"),
        ("mysql://u:hunter2@h/d", "not understood"),
        ("postgresql://u:hunt@er2@h/d", "%40"),
        ("postgresql://u:hunt/er2@h/d", "%40"),
        ("postgresql://u:hunter2/d", "not understood"),
        ("postgresql://u@h/d?pasword=hunter2", "pasword"),
        ("postgresql://u@h/d?connect_timeout=soon", "connect_timeout"),
        ("postgresql://u@h/d?prepare_threshold=5", "statements are never prepared"),
        ("", "empty"),
        (".", "cannot open database file"),
        (":memory:", "in-memory"),
        ("sqlite:///:memory:", "in-memory"),
        ("postgresql://nobody@127.0.0.1:1/x", "cannot reach database postgresql://nobody@"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_line_without_its_password(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = Door(text).refused("traces", "list")
    assert message in said
    assert not any(part in said for part in ("hunt", "er2"))
    assert list(tmp_path.iterdir()) == []


# --- absent, empty, another's


def test_a_missing_file_is_made_by_what_writes(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "new.db"
    for command in COMMANDS:
        line = Door(str(path)).refused(command)
        assert ("cannot make" if "upgrade" in command else "there is no database at") in line
    with pytest.raises(DatabaseError, match="cannot make database"):
        open_database(str(path))
    assert not path.parent.exists()
    path.parent.mkdir()
    with open_database(str(path)) as database:
        assert not path.exists()
        put(database)
    assert [p.id for p in TraceStore(open_database(str(path), create=False)).list_policies()] == [
        "p"
    ]


def test_an_empty_database_gets_its_tables_when_asked(new_url: str) -> None:
    if "://" not in new_url:
        Path(new_url).touch()
    for command in ("traces list", "db check"):
        assert "db check --upgrade` makes its tables" in Door(new_url).refused(command)
    assert upgrade(new_url) == (None, HEAD)
    assert upgrade(new_url) == (HEAD, HEAD)
    assert check(new_url).ok


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_ours_is_left_alone(command: str, tmp_path: Path) -> None:
    text, other = tmp_path / "notes.txt", tmp_path / "other.db"
    text.write_text("not a database, and long enough to have no header of one\n" * 40)
    run_sql(other, "CREATE TABLE customers (id INTEGER)")
    before = text.read_bytes(), other.read_bytes()
    assert "notes.txt is not a SQLite database" in Door(str(text)).refused(command)
    assert "is not a spectune database (it holds table 'customers')" in Door(str(other)).refused(
        command
    )
    assert (text.read_bytes(), other.read_bytes()) == before


def test_another_schema_is_refused_in_one_line(url: str) -> None:
    with migrating(url) as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    for command in COMMANDS:
        line = Door(url).refused(command)
        assert f"another version of spectune (schema 9999, this program's is {HEAD})" in line


# --- several processes, and transactions


def at_once(count: int, act: Callable[[], None]) -> None:
    """Does it in so many processes at once; each must succeed."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)

    def one() -> None:
        barrier.wait()
        act()

    members = [context.Process(target=one) for _ in range(count)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert [member.exitcode for member in members] == [0] * count


def test_a_new_database_made_by_several_processes_at_once(new_url: str) -> None:
    def act() -> None:
        with open_database(new_url) as database:
            put(database)

    at_once(4, act)
    assert check(new_url).ok
    if "://" not in new_url:
        open_database(new_url).close()
        assert run_sql(new_url, "PRAGMA journal_mode") == [("wal",)]


def test_writers_of_several_processes_take_turns(url: str) -> None:
    counter = policy_id({})

    def count_up() -> None:
        with open_database(url) as database:
            for _ in range(40):
                # Loses counts, or fails, unless writers take turns.
                with database.write() as session:
                    database.lock(session, "counter")
                    count = session.scalar(sa.text("SELECT label FROM policy"))
                    session.execute(sa.text("UPDATE policy SET label = :n"), {"n": int(count) + 1})

    with opened(url) as store:
        store.put_policy(counter, {}, "0")
    at_once(3, count_up)
    with opened(url) as store:
        assert store.get_policy(counter).label == "120"


@pytest.mark.parametrize("transaction", [Database.read, Database.snapshot, Database.write])
def test_what_fails_leaves_nothing_and_an_error_of_ours_is_told_as_it_is(
    database: Database, transaction: Callable[[Database], Any]
) -> None:
    insert = "INSERT INTO policy VALUES ('p', 'l', '{}', '2026-01-01 00:00:00')"

    def fail(error: Exception) -> None:
        with transaction(database) as session:
            session.execute(sa.text(insert))
            raise error

    for kind in (KeyError, TypeError, ValueError):
        with pytest.raises(kind, match="ours"):
            fail(kind("ours"))
    assert TraceStore(database).list_policies() == ()


def test_database_time_is_utc(database: Database) -> None:
    with database.read() as session:
        assert abs(database.now(session).timestamp() - time.time()) < 60


# --- what a database or its driver refuses


def test_what_the_driver_refuses_is_one_line(database: Database) -> None:
    for statement in ("SELEC 1", "SELECT no_such_column FROM policy"):
        with pytest.raises(DatabaseError) as caught, database.read() as session:
            session.execute(sa.text(statement))
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, UnavailableError)


def test_a_locked_file_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectune.db.database.BUSY_TIMEOUT_S", 0)
    url = str(tmp_path / "a.db")
    upgrade(url)
    with open_database(url) as database, sqlite3.connect(url) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match="is busy: another process"):
            put(database)
        assert "is busy" in Door(url).refused("schedule add n --cron @daily --pair demo")


def test_a_full_disk_is_unavailable_and_costs_one_line(tmp_path: Path) -> None:
    url = str(tmp_path / "a.db")

    def fill(store: TraceStore) -> None:
        with store.database.write() as session:
            session.execute(sa.text("PRAGMA max_page_count = 1"))  # as many as there are
            session.execute(sa.text("CREATE TABLE filling AS SELECT zeroblob(1000000)"))

    with opened(url) as store:
        with pytest.raises(UnavailableError, match="no room is left for database"):
            fill(store)
        assert store.list_policies() == ()
    assert check(url).ok


def test_a_connection_cut_in_a_transaction_is_one_line(
    postgresql: Any, postgresql_url: str
) -> None:
    upgrade(postgresql_url)
    with open_database(postgresql_url) as database, open_database(postgresql_url) as other:

        def cut() -> None:
            with database.read() as session, other.write() as killer:
                own = session.scalar(sa.text("SELECT pg_backend_pid()"))
                killer.execute(sa.text("SELECT pg_terminate_backend(:own)"), {"own": own})
                session.execute(sa.text("SELECT 1"))

        with pytest.raises(UnavailableError, match="terminating connection") as caught:
            cut()
        assert "\n" not in str(caught.value)
        assert TraceStore(database).list_policies() == ()


def test_a_server_that_takes_no_writes_now_is_unavailable(postgresql_url: str) -> None:
    """As a standby does until it is promoted."""
    upgrade(postgresql_url)
    standby = f"{postgresql_url}?options=-c%20default_transaction_read_only=on"
    with (
        open_database(standby) as database,
        pytest.raises(UnavailableError, match="read-only transaction"),
    ):
        put(database)


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


def test_a_port_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"postgresql://u@127.0.0.1:{listener.getsockname()[1]}/d?connect_timeout=2"
        with pytest.raises(UnavailableError, match="cannot reach database"):
            open_database(url)


@pytest.mark.parametrize(
    ("query", "lock_timeout", "idle"),
    [("", "1min", "30"), ("?keepalives_idle=7&options=-c%20lock_timeout=5s", "5s", "7")],
)
def test_a_url_has_the_last_word_on_the_limits(
    query: str, lock_timeout: str, idle: str, postgresql_url: str
) -> None:
    upgrade(postgresql_url)
    with open_database(f"{postgresql_url}{query}") as database, database.read() as session:
        assert session.scalar(sa.text("SHOW lock_timeout")) == lock_timeout
        connection: Any = session.connection().connection.driver_connection
        given = connection.info.get_parameters()
        assert (given["keepalives_idle"], given["connect_timeout"]) == (idle, "10")


# --- poolers and encodings


def test_a_transaction_leaves_nothing_with_its_session(postgresql_url: str) -> None:
    """Behind a pooler in transaction mode the next transaction is another session's."""
    url = f"{postgresql_url}?prepare_threshold=0&client_encoding=latin1"
    upgrade(url)
    with open_database(url) as database:
        for _ in range(8):  # psycopg would prepare a statement that is executed so often
            put(database)
        with database.read() as session:
            driver: Any = session.connection().connection.driver_connection
            names = session.scalars(sa.text("SELECT name FROM pg_prepared_statements")).all()
        assert "options" not in driver.info.get_parameters()
        assert (names, driver.info.encoding) == ([], "utf-8")
        assert driver.execute("SHOW lock_timeout").fetchone() == ("0",)


def refusing_pooler(parameter: str) -> tuple[socket.socket, threading.Thread]:
    """A listener that answers one connection as PgBouncer answers what it does not pass on."""
    listener = socket.create_server(("127.0.0.1", 0))
    line = f"SFATAL\0C08P01\0Munsupported startup parameter: {parameter}\0\0".encode()

    def answer() -> None:
        with listener.accept()[0] as client:
            while (length := int.from_bytes(client.recv(4))) == 8:  # asks for encryption
                client.recv(4)
                client.sendall(b"N")
            assert parameter.encode() in client.recv(length - 4)
            client.sendall(b"E" + (len(line) + 4).to_bytes(4) + line)

    thread = threading.Thread(target=answer)
    thread.start()
    return listener, thread


def test_what_a_pooler_refuses_is_named() -> None:
    listener, answering = refusing_pooler("options")
    with listener:
        url = f"postgresql://u@127.0.0.1:{listener.getsockname()[1]}/d?options=-c%20work_mem=1MB"
        with pytest.raises(DatabaseError, match="its pooler refuses 'options'; leave it") as caught:
            open_database(url)
        answering.join()
    assert not isinstance(caught.value, UnavailableError)


@pytest.mark.parametrize(
    ("encoding", "refused"), [("SQL_ASCII", ""), ("LATIN1", "LATIN1, which cannot hold every text")]
)
def test_a_database_of_any_encoding_works_or_is_refused(
    postgresql: Any, encoding: str, refused: str
) -> None:
    name = f"t_{encoding.lower()}"
    url = postgresql.create(name, empty=True, more=f"ENCODING '{encoding}' LOCALE 'C'")
    try:
        if refused:
            assert refused in Door(url).refused("db check --upgrade")
            return
        with opened(url) as store:
            store.put_policy("p", {"draft": "Schnee \u2603"}, "\u2603")
            assert store.get_policy("p").document == {"draft": "Schnee \u2603"}
            assert [policy.label for policy in store.list_policies()] == ["\u2603"]
    finally:
        postgresql.drop(name)


# --- damage


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    url = str(tmp_path / "a.db")
    with opened(url) as store:
        store.put_policy("p", {"x": "y" * 5000}, "l")
    ((page,),) = run_sql(url, "SELECT rootpage FROM sqlite_master WHERE name = 'policy'")
    ((size,),) = run_sql(url, "PRAGMA page_size")
    with open(url, "r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * 64)
    assert "is damaged" in Door(url).refused("policies list")
    found = Door(url).call("db", "check")
    assert (found.exit_code, found.stderr) == (1, "")
    assert "is damaged" in found.stdout
    with open(url, "r+b") as file:  # the schema's own page
        file.seek(100)
        file.write(bytes(3000))
    for command in ("traces list", "db check"):
        assert "is damaged" in Door(url).refused(command)


def test_a_check_names_each_damaged_blob_and_missing_reference(url: str) -> None:
    with opened(url) as store:
        recording = a_recording(store, n=5)
    sound = check(url)
    assert sound.ok
    assert sound.blobs >= 10
    with migrating(url) as connection:
        for value, ordinal in ((b"\0", 2), (b"", 3)):
            row = {"value": value, "ordinal": ordinal}
            damage = sa.text("UPDATE trajectory SET tokens = :value WHERE ordinal = :ordinal")
            connection.execute(damage, row)
    damaged = check(url)
    assert len(damaged.problems) == 2
    for ordinal, line in zip((2, 3), damaged.problems, strict=True):
        assert line.startswith(f"trajectory (recording_id {recording}, ordinal {ordinal}): tokens ")
    assert damaged.blobs == sound.blobs - 2
    if not url.startswith("sqlite"):
        return
    run_sql(parse_url(url).database or "", "DELETE FROM pair")
    assert any("refers to a missing row of pair" in line for line in check(url).problems)
