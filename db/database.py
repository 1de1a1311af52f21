"""Opens SQLite files and PostgreSQL databases, and reads and writes them in transactions."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from spectune.db.base import Identity
from spectune.db.database_errors import DatabaseError
from spectune.db.failures import BUSY_TIMEOUT_S, translated
from spectune.db.migrate import HEAD, migrate, revision
from spectune.db.urls import parse_url, shown

_MIGRATION_LOCK = 7_310_021
"""Key of the PostgreSQL advisory lock that is held while tables are made."""
_CONNECT_ARGS = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""libpq's parameters unless the URL gives them: seconds, ``tcp_user_timeout`` in milliseconds."""
_POOLED = {"client_encoding": "utf8", "prepare_threshold": None}
"""Parameters whatever the URL gives: of a database in SQL_ASCII text would be bytes, and behind a
pooler the next transaction's server may not know a statement that was prepared."""
_ENCODINGS = ("UTF8", "SQL_ASCII")
"""Encodings of databases that hold every text."""
_LOCK_TIMEOUT = (
    "SELECT set_config('lock_timeout', '60s', true) WHERE current_setting('lock_timeout') = '0'"
)
"""Of one transaction, unless a role, a database or the URL sets one: poolers refuse ``options``,
and would hand a session's setting to others."""
_PRAGMAS = (
    *("synchronous=NORMAL", "foreign_keys=ON", "cache_size=-20000"),
    "page_size=1024",  # of a new file; panoramas are 1-10 kB: larger pages leave more room unused
    "schema_version",  # reads the file
)


class Database:
    """A database at this program's schema. Threads may share it; every process opens its own."""

    def __init__(self, url: URL) -> None:
        self.url = url
        self.dialect = url.get_backend_name()
        self._engine = _engine(url)
        # SQLite's writers wait by polling, which starves: those of one process take turns here.
        self._write_lock = threading.RLock() if self.dialect == "sqlite" else nullcontext()
        self._is_absent = False
        """Whether the first transaction makes the file."""

    @property
    def name(self) -> str:
        """The database for messages, without its password."""
        return shown(self.url)

    @cached_property
    def id(self) -> str:
        """What tells this database from others, wherever it lies: 16 hex digits, which a copy of it
        shares. Raises :class:`DatabaseError`."""
        with self.write() as session:
            self.lock(session, "identity")
            found = session.scalar(select(Identity.id))
            if found is None:
                found = secrets.token_hex(8)
                session.add(Identity(id=found))
            return found

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A read transaction: one snapshot on SQLite, read committed on PostgreSQL. Raises
        :class:`DatabaseError`; what the block itself raises is passed on."""
        with self._transaction() as session:
            yield session

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """A read transaction that sees one moment, on PostgreSQL too. Raises
        :class:`DatabaseError`."""
        level = {} if self.dialect == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        with self._transaction(**level) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A write transaction, committed when the block ends and rolled back if it raises. Does not
        nest. Raises :class:`DatabaseError` when the database is unreachable or stays locked."""
        with self._write_lock, self._transaction(begin="BEGIN IMMEDIATE") as session:
            yield session

    @contextmanager
    def _transaction(self, **options: Any) -> Iterator[Session]:
        if self._is_absent:
            self.prepare(create=True)
        engine = self._engine.execution_options(**options)
        with (
            translated(self.url),
            Session(engine, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    def prepare(self, *, create: bool) -> str | None:
        """Returns the schema found, None where there was none; its tables are then made if
        ``create``. Raises as :func:`open_database` does."""
        if self.dialect == "sqlite" and not os.path.exists(self.name):
            _make_file(self.name, create)
        with translated(self.url):
            with self._engine.connect() as connection:
                if self.dialect != "sqlite":
                    _check_encoding(connection, self.name)
                before = revision(connection)
            if before is None and not create:
                raise DatabaseError(
                    f"database {self.name} is empty; `db check --upgrade` makes its tables"
                )
            if before is None:
                engine = self._engine.execution_options(begin="BEGIN IMMEDIATE")
                with engine.begin() as connection:
                    if self.dialect != "sqlite":
                        connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
                    if revision(connection) is None:  # else another process was faster
                        migrate(connection)
            if create and self.dialect == "sqlite":
                engine = self._engine.execution_options(begin="")
                # Fails where another process is just opening the file: a later opening does it.
                with engine.connect() as connection, suppress(OperationalError):
                    connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        self._is_absent = False
        return before

    def now(self, session: Session) -> datetime:
        """The database's clock, aware UTC: what leases are measured by (resolution 1 ms on
        SQLite)."""
        if self.dialect == "sqlite":
            moment = session.execute(
                text("SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')")
            ).scalar_one()
            return datetime.fromisoformat(moment).replace(tzinfo=UTC)
        stamp: datetime = session.execute(text("SELECT clock_timestamp()")).scalar_one()
        return stamp.astimezone(UTC)

    def lock(self, session: Session, name: str) -> None:
        """Serialises writers that agree on ``name`` until the transaction ends. SQLite's writers
        are serial already."""
        if self.dialect != "sqlite":
            session.execute(
                text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": name}
            )

    def vacuum(self) -> None:
        """Returns the room of removed rows to the file system (SQLite; PostgreSQL does it by
        itself)."""
        if self.dialect == "sqlite":
            with self._write_lock, self._transaction(begin="") as session:
                for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
                    session.connection().exec_driver_sql(statement)

    def close(self) -> None:
        """Closes every idle connection; the object can still be used and reconnects."""
        self._engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Database({self.name!r})"


def open_database(url: str, *, create: bool = True) -> Database:
    """Opens a database at this program's schema. If ``create``, an empty one gets its tables, and a
    file that does not exist is made by the first transaction.

    Raises :class:`SchemaError` for another version's schema and for a database that is not ours,
    and :class:`DatabaseError` when it is missing, cannot be made or cannot be reached.
    """
    database = Database(parse_url(url))
    if create and database.dialect == "sqlite" and not os.path.lexists(database.name):
        database._is_absent = os.access(os.path.dirname(database.name) or ".", os.W_OK)
    try:
        if not database._is_absent:
            database.prepare(create=create)
    except BaseException:
        database.close()
        raise
    return database


def upgrade(url: str) -> tuple[str | None, str]:
    """Gives an empty database its tables: (schema before, schema now). Raises as
    :func:`open_database` does."""
    with Database(parse_url(url)) as database:
        return database.prepare(create=True), HEAD


def _check_encoding(connection: Connection, name: str) -> None:
    """Raises :class:`DatabaseError` for a PostgreSQL database that cannot hold every text."""
    driver: Any = connection.connection.driver_connection
    encoding = driver.info.parameter_status("server_encoding")
    if encoding not in _ENCODINGS:
        raise DatabaseError(
            f"database {name} has the encoding {encoding}, which cannot hold every text; make one "
            "by CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
        )


def _make_file(path: str, create: bool) -> None:
    if not create:
        raise DatabaseError(
            f"there is no database at {path}; `tune` makes one there, --db names another"
        )
    try:  # its user's alone: prompts will be in it; SQLite gives its log the same mode
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        raise DatabaseError(
            f"cannot make database {path}: {error.strerror}; give another file to --db"
        ) from None


def _engine(url: URL) -> Engine:
    to_json = partial(
        json.dumps, ensure_ascii=False, allow_nan=False, default=methodcaller("item")
    )  # ``item``: numpy's numbers
    if url.get_backend_name() != "sqlite":
        defaults = {name: value for name, value in _CONNECT_ARGS.items() if name not in url.query}
        engine = create_engine(
            url, connect_args=defaults | _POOLED, pool_pre_ping=True, json_serializer=to_json
        )

        @event.listens_for(engine, "begin")
        def limit_waiting(connection: Connection) -> None:
            connection.exec_driver_sql(_LOCK_TIMEOUT)

        return engine
    path = os.path.realpath(str(url.database))  # the log lies beside the file, not beside a link
    engine = create_engine(url, creator=partial(_connect, path), json_serializer=to_json)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # What reads and then writes fails where another one wrote meanwhile, unless it began
        # IMMEDIATE.
        if statement := connection.get_execution_options().get("begin", "BEGIN"):
            connection.exec_driver_sql(statement)

    return engine


def _connect(path: str) -> sqlite3.Connection:
    """A connection in autocommit mode; a file that cannot be written is read as it is. Raises
    sqlite3.Error, and :class:`DatabaseError` where the log of such a file cannot be read."""
    if os.access(path, os.W_OK) and os.access(os.path.dirname(path), os.W_OK):
        return _connect_as(path, "rw")
    try:
        return _connect_as(path, "ro")
    except sqlite3.OperationalError as error:
        # A file in WAL mode has no log after its last writer left; where none can be made, SQLite
        # reads the file only as immutable.
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
    if os.path.exists(f"{path}-wal") and os.path.getsize(f"{path}-wal"):
        raise DatabaseError(
            f"database file {path} is read-only and its last changes are in {path}-wal, which "
            "cannot be read there; copy both to a folder that can be written"
        )
    return _connect_as(path, "ro&immutable=1")


def _connect_as(path: str, mode: str) -> sqlite3.Connection:
    uri = f"{Path(path).as_uri()}?mode={mode}"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection
