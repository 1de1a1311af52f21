"""Opening, upgrading and checking databases, and what happens when processes meet or die in one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from databases import migrating, run_sql
from doors import Door

from spectune.db import (
    Database,
    DatabaseError,
    SchemaError,
    UnavailableError,
    check,
    database,
    migrate,
    open_database,
    sqlite,
    upgrade,
)
from spectune.db.urls import masked, parse_url, shown
from spectune.traces.schema import policy_id
from spectune.traces.store import TraceStore
from spectune.traces.tables import StoredPolicy


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """A function of migrations becomes another, for those too who import it by name."""
    monkeypatch.setattr(migrate, name, value)
    monkeypatch.setattr(database, name, value)


def tables_of(url: str) -> list[str]:
    with migrating(url) as connection:
        return sorted(sa.inspect(connection).get_table_names())


# --- names and errors


@pytest.mark.parametrize(
    ("text", "driver", "database"),
    [
        ("foo.db", "sqlite", "foo.db"),
        ("sqlite:///rel/b.db", "sqlite", "rel/b.db"),
        ("sqlite:////abs/b.db", "sqlite", "/abs/b.db"),
        ("postgres://u@h/d", "postgresql+psycopg", "d"),
        ("postgresql+psycopg://u@h:5433/d", "postgresql+psycopg", "d"),
    ],
)
def test_urls_are_read_as_people_write_them(text: str, driver: str, database: str) -> None:
    url = parse_url(text)
    assert (url.drivername, url.database) == (driver, database)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:hunter2xyz@127.0.0.1:1/d",
        "postgresql://u@127.0.0.1:1/d?sslpassword=hunter2xyz&application_name=a%20b",
        "postgresql://u@127.0.0.1:1/d?password=a&password=hunter2xyz",
        "postgresql://u:hunter2%40%2Fxyz@127.0.0.1:1/d?passfile=/home/u/.pgpass",
    ],
)
def test_a_password_is_never_shown(text: str) -> None:
    with pytest.raises(DatabaseError) as caught:
        open_database(text)
    name = shown(parse_url(text))
    assert ".pgpass" in name or "passfile" not in text
    for said in (name, str(caught.value), repr(Database(parse_url(text)))):
        assert "postgresql://u" in said
        assert "hunter2" not in said
        assert "***" in said


def test_a_password_that_the_driver_repeats_is_hidden() -> None:
    url = parse_url("postgresql://u:hunt%2Fer2@h/d?sslpassword=e")
    assert masked(url, 'bad value "hunt/er2" in postgresql://u:hunt%2Fer2@h/d, e. g.') == (
        'bad value "***" in postgresql://u:***@h/d, ***. g.'
    )


def test_a_check_tells_no_password(postgresql_url: str) -> None:
    given = f"{postgresql_url}?password=hunter2xyz"
    assert "hunter2" not in json.dumps(check(given).to_json())
    upgrade(given)
    report = check(given).to_json()
    assert report["ok"]
    assert "hunter2" not in json.dumps(report)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("postgresql:/u:hunter2@h/d", "not understood"),
        ("u:hunter2@h/d", "not understood"),
        ('"postgresql://u:hunter2@h/d"', "not understood"),
        ("sqlite://hunter2.db", "not understood"),
        ("sqlite://u:hunter2@h/d", "not understood"),
        ("sqlite:///a.db?password=hunter2", "takes no options"),
        ("mysql://u:hunter2@h/d", "unknown kind of database 'mysql'"),
        ("postgresql://u:hunt@er2@h/d", "%40"),
        ("postgresql://u:hunt/er2@h/d", "%40"),
        ("postgresql://u:hunter2/d", "cannot read"),
        ("postgresql://u@h/d?pasword=hunter2", "unknown option 'pasword'"),
        ("", "empty"),
        (":memory:", "in-memory"),
        ("sqlite:///:memory:", "in-memory"),
        ("postgresql://u@h:port/d", "cannot read"),
        ("postgresql://nobody@127.0.0.1:1/x", "cannot reach database postgresql"),
    ],
)
def test_an_url_that_cannot_be_used_is_one_line_without_its_password(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatabaseError, match=message) as caught:
        open_database(text)
    assert not any(part in str(caught.value) for part in ("hunt", "er2", "\n"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_may_have_a_colon_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    open_database("./a:b.db").close()
    assert [path.name for path in tmp_path.iterdir()] == ["a:b.db"]


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, and long enough to have no header of one\n" * 40)
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=r"notes\.txt is not a SQLite database"):
        open_database(str(path))
    assert path.read_bytes() == before


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    run_sql(path, "CREATE TABLE customers (id INTEGER)")
    with pytest.raises(SchemaError, match=r"not a spectune database .*'customers'"):
        open_database(str(path))
    assert tables_of(str(path)) == ["customers"]


def test_a_missing_database_is_only_created_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "new.db"
    with pytest.raises(DatabaseError, match="there is no database at"):
        open_database(str(path), create=False)
    with pytest.raises(DatabaseError, match="there is no database at"):
        check(str(path))
    with pytest.raises(DatabaseError, match=r"there is no folder .*; create it, or"):
        open_database(str(path))
    assert not path.parent.exists()
    path.parent.mkdir()
    with open_database(str(path)):
        assert path.is_file()
    with open_database(str(path), create=False):
        pass


def test_an_empty_database_is_only_filled_when_asked(postgresql_url: str) -> None:
    with pytest.raises(DatabaseError, match=r"is empty; `db upgrade`"):
        open_database(postgresql_url, create=False)
    assert upgrade(postgresql_url) == (None, migrate.head())
    assert upgrade(postgresql_url) == (migrate.head(), migrate.head())


# --- the schema


@pytest.mark.parametrize("revision", ["0001", "9999"])
def test_a_schema_of_another_version_is_refused_in_one_line(url: str, revision: str) -> None:
    with migrating(url) as connection:
        connection.exec_driver_sql(f"UPDATE {migrate.VERSION_TABLE} SET version_num = '{revision}'")
    says = f"was made by another version of spectune (schema {revision}, this program's is "
    for command in (["traces", "list"], ["db", "upgrade"]):
        assert says in Door(url).refused(*command)
    assert says in check(url).problems[0]
    assert Door(url).call("db", "check").exit_code == 1


# --- processes that meet, and one that is killed


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


def open_by_several(url: str, count: int) -> None:
    """Opens a database in so many processes at once, which leaves it well."""

    def act() -> None:
        with open_database(url) as database, database.read() as session:
            session.execute(sa.select(sa.func.count()).select_from(StoredPolicy)).scalar_one()

    at_once(count, act)
    assert check(url).ok


def test_a_new_database_opened_by_several_processes_at_once(new_url: str) -> None:
    open_by_several(new_url, 3)


@pytest.fixture
def overtaken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str | None]]:
    """Makes another process upgrade a database right after this one first looked at it; what the
    looks found."""

    def arrange(url: str) -> list[str | None]:
        looked, current = list[str | None](), migrate.current

        def other_is_faster(connection: sa.Connection) -> str | None:
            looked.append(current(connection))
            if len(looked) == 1:
                upgrade(url)
            return looked[-1]

        replaced(monkeypatch, "current", other_is_faster)
        return looked

    return arrange


def test_a_database_created_while_it_is_looked_at_is_no_foreign_one(
    postgresql_url: str, overtaken: Callable[[str], list[str | None]]
) -> None:
    looked = overtaken(postgresql_url)
    with open_database(postgresql_url) as database:
        assert TraceStore(database).list_policies() == ()
    assert looked[0] is None


def _upgrade_until(url: str, moment: int) -> None:
    """Upgrades, and is killed before its ``moment``-th statement."""
    passed = 0

    def one_more(*_: Any) -> None:
        nonlocal passed
        passed += 1
        if passed > moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sa.event.listen(sa.Engine, "before_cursor_execute", one_more)
    upgrade(url)


def test_a_database_whose_making_was_killed_at_any_moment_can_be_opened(tmp_path: Path) -> None:
    killed = 0
    for moment in range(0, 200, 3):
        path = tmp_path / f"{moment}.db"
        child = multiprocessing.get_context("fork").Process(
            target=_upgrade_until, args=(str(path), moment)
        )
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        killed += 1
        with open_database(str(path)) as database:
            assert TraceStore(database).list_policies() == ()
        assert check(str(path)).ok
    assert killed > 6


COUNTER = policy_id({})
"""The id of a row that is counted up in its label."""


def test_writers_of_several_processes_take_turns(url: str) -> None:
    def count_up() -> None:
        with open_database(url) as database:
            for _ in range(60):
                # Read, then write what was read plus one: loses counts or fails unless writers take
                # turns.
                with database.write() as session:
                    row = session.get_one(StoredPolicy, COUNTER, with_for_update=True)
                    row.label = str(int(row.label) + 1)

    with open_database(url) as database:
        TraceStore(database).put_policy(COUNTER, {}, "0")
    at_once(3, count_up)
    with open_database(url) as database:
        assert TraceStore(database).get_policy(COUNTER).label == "180"


def test_a_nested_write_is_a_mistake_and_not_a_deadlock(tmp_path: Path) -> None:
    with open_database(str(tmp_path / "a.db")) as database:
        with database.write(), pytest.raises(RuntimeError, match="do not nest"), database.write():
            pass
        with database.write():
            pass


def test_a_failed_write_leaves_nothing(database: Database) -> None:
    def fail() -> None:
        with database.write() as session:
            session.execute(
                sa.text("INSERT INTO policy VALUES ('p', 'l', '{}', '2026-01-01 00:00:00')")
            )
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert TraceStore(database).list_policies() == ()


@pytest.mark.parametrize("error", [KeyError, TypeError, ValueError, AttributeError])
@pytest.mark.parametrize("transaction", [Database.read, Database.snapshot, Database.write])
def test_an_error_of_the_program_in_a_transaction_is_told_as_it_is(
    database: Database, transaction: Callable[[Database], Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="ours"), transaction(database):
        raise error("ours")


def test_database_time_is_utc_and_moves(database: Database) -> None:
    with database.read() as session:
        first = database.now(session)
        time.sleep(0.01)
        second = database.now(session)
    assert first.utcoffset() == second.utcoffset() is not None
    assert 0 < (second - first).total_seconds() < 60
    assert abs(first.timestamp() - time.time()) < 60


def test_a_damaged_file_is_one_clear_line(tmp_path: Path) -> None:
    url = str(tmp_path / "a.db")
    with open_database(url) as database:
        TraceStore(database).put_policy("p", {"x": "y" * 5000}, "l")
    run_sql(url, "PRAGMA wal_checkpoint(TRUNCATE)")
    ((page,),) = run_sql(url, "SELECT rootpage FROM sqlite_master WHERE name = 'policy'")
    ((size,),) = run_sql(url, "PRAGMA page_size")
    with open(url, "r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * 64)
    with (
        open_database(url) as database,
        pytest.raises(DatabaseError, match=r"is damaged .*`db check`"),
    ):
        TraceStore(database).list_policies()
    report = check(url)
    assert not report.ok
    assert report.integrity
    assert not any("db check" in line for line in report.problems)
    with open(url, "r+b") as file:  # the schema's own page
        file.seek(100)
        file.write(bytes(3000))
    with pytest.raises(DatabaseError, match=r"is damaged .*restore a copy, or save") as refused:
        check(url)
    assert "db check" not in str(refused.value)


# --- a database that goes away


def test_a_table_that_is_gone_is_said_and_may_come_back(database: Database) -> None:
    with database.write() as session:
        session.execute(sa.text("ALTER TABLE policy RENAME TO elsewhere"))
    with pytest.raises(UnavailableError, match=r"has no table 'policy'; .*`db upgrade`"):
        TraceStore(database).list_policies()
    with pytest.raises(UnavailableError, match="has no table 'policy'"):
        TraceStore(database).put_policy("p", {}, "l")
    with database.write() as session:
        session.execute(sa.text("ALTER TABLE elsewhere RENAME TO policy"))
    assert TraceStore(database).list_policies() == ()


def test_a_connection_cut_in_a_transaction_is_one_line(postgresql_url: str) -> None:
    upgrade(postgresql_url)
    with open_database(postgresql_url) as database, open_database(postgresql_url) as other:

        def cut() -> None:
            with database.read() as session:
                own = session.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
                with other.write() as killer:
                    killer.execute(sa.text("SELECT pg_terminate_backend(:own)"), {"own": own})
                session.execute(sa.text("SELECT 1")).scalar_one()

        with pytest.raises(UnavailableError, match="terminating connection") as caught:
            cut()
        assert "\n" not in str(caught.value)
        assert TraceStore(database).list_policies() == ()


def test_a_server_that_is_failing_over_is_unavailable(postgresql_url: str) -> None:
    """A standby takes no writes until it is promoted, and a server may end a transaction that stood
    idle meanwhile."""
    upgrade(postgresql_url)
    standby = f"{postgresql_url}?options=-c%20default_transaction_read_only=on"
    with (
        open_database(standby) as database,
        pytest.raises(UnavailableError, match="read-only transaction"),
    ):
        TraceStore(database).put_policy("p", {}, "l")

    def stand_idle(database: Database) -> None:
        with database.read() as session:
            session.execute(sa.text("SET idle_in_transaction_session_timeout = 20"))
            time.sleep(0.2)
            session.execute(sa.text("SELECT 1"))

    with (
        open_database(postgresql_url) as database,
        pytest.raises(UnavailableError, match="idle-in-transaction"),
    ):
        stand_idle(database)


def test_what_the_driver_refuses_is_one_line(database: Database) -> None:
    for statement in ("SELEC 1", "SELECT no_such_column FROM policy"):
        with pytest.raises(DatabaseError) as caught, database.read() as session:
            session.execute(sa.text(statement))
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, UnavailableError)


def test_a_locked_file_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0)
    with (
        open_database(str(tmp_path / "a.db")) as database,
        sqlite3.connect(tmp_path / "a.db") as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match="is busy: another process"):
            TraceStore(database).put_policy("p", {}, "l")
