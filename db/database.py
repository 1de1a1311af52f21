"""An open database: read and write transactions, and its tables made before anybody sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, StaticPool, create_engine, text
from sqlalchemy.orm import Session

from spectune.db.base import metadata
from spectune.db.engine import NO_BEGIN, WRITES, make_engine
from spectune.db.errors import DatabaseError, SchemaError
from spectune.db.failures import translated
from spectune.db.migrate import current, foreign_tables, head, migrate
from spectune.db.sqlite import is_read_only, real_path
from spectune.db.urls import parse_url, shown

_MIGRATION_LOCK = 7_310_021
"""Key of the PostgreSQL advisory lock that upgrades take."""


class Database:
    """A database at our schema. Safe to share between threads; every process opens its own (engines
    do not survive a fork).

    On SQLite the writers of one process take turns, because SQLite's own waiting is a poll that
    starves.
    """

    def __init__(self, url: URL, *, is_missing: bool = False) -> None:
        self.url = url
        self._missing = is_missing
        self._stand_in: Engine | None = None
        """Is read in place of a SQLite file that nobody has made yet."""
        self.dialect = url.get_backend_name()
        self._engine = make_engine(url)
        self._writing = self._engine.execution_options(**WRITES)
        self._turn = threading.Lock()
        self._turn_of: int | None = None

    @property
    def name(self) -> str:
        """The database for messages, without its password."""
        return shown(self.url)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A read transaction: one snapshot on SQLite, read committed on PostgreSQL. Raises
        :class:`DatabaseError`; what the block itself raises is passed on."""
        with self._transaction(self._to_read()) as session:
            yield session

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """A read transaction that sees one moment, on PostgreSQL too. Raises
        :class:`DatabaseError`."""
        engine = self._to_read().execution_options(**_one_moment(self.url))
        with self._transaction(engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A write transaction, committed when the block ends and rolled back if it raises. Does not
        nest. Raises :class:`DatabaseError` when the database is unreachable or stays locked."""
        if self._missing:
            self._make()
        with self._alone(), self._transaction(self._writing) as session:
            yield session

    @contextmanager
    def _transaction(self, engine: Engine) -> Iterator[Session]:
        with (
            translated(self.url),
            Session(engine, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    def _to_read(self) -> Engine:
        if self._missing and Path(str(self.url.database)).is_file():
            self._make()  # another process did
        if not self._missing:
            return self._engine
        if self._stand_in is None:
            self._stand_in = create_engine(
                "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
            )
            metadata.create_all(self._stand_in)
        return self._stand_in

    def _make(self) -> None:
        _prepare(self.url, create=True)
        self._missing = False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self.dialect != "sqlite":
            yield
            return
        if self._turn_of == threading.get_ident():
            raise RuntimeError("write transactions do not nest")
        with self._turn:
            self._turn_of = threading.get_ident()
            try:
                yield
            finally:
                self._turn_of = None

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
        """Gives the room of removed rows back to the file system (SQLite; PostgreSQL does it by
        itself)."""
        if self.dialect == "sqlite":
            with (
                self._alone(),
                translated(self.url),
                self._engine.connect().execution_options(**NO_BEGIN) as connection,
            ):
                connection.exec_driver_sql("VACUUM")
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Closes every idle connection; the object can still be used and reconnects."""
        self._engine.dispose()
        if self._stand_in is not None:
            self._stand_in.dispose()
            self._stand_in = None

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Database({self.name!r})"


def open_database(url: str, *, create: bool = True, lazily: bool = False) -> Database:
    """Opens a database at this program's schema.

    A new one is created if ``create``, with ``lazily`` a file by the first write, until which it
    reads as empty. Raises :class:`SchemaError` for another version's schema and for a database that
    is not ours, and :class:`DatabaseError` when it, or the folder of a file, is missing or cannot
    be reached.
    """
    parsed = parse_url(url)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    if is_sqlite and create and lazily and not Path(str(parsed.database)).exists():
        _folder_exists(parsed)
        return Database(parsed, is_missing=True)
    _prepare(parsed, create=create)
    return Database(parsed)


def open_file(path: Path) -> Database:
    """Opens a SQLite file at this program's schema to be read; opening changes nothing in it.

    Raises :class:`SchemaError` for another schema and for a file that is no database of ours,
    :class:`DatabaseError` for one that cannot be read.
    """
    url = URL.create("sqlite", database=str(path))
    found = _schema_of(url)
    if found is None:
        raise SchemaError(f"{path} is not a spectune database")
    if found != head():
        raise _of_another_version(url, found)
    return Database(url)


def upgrade(url: str) -> tuple[str | None, str]:
    """Gives a new database its tables: (revision before, revision now).

    Raises :class:`SchemaError` or :class:`DatabaseError` as :func:`open_database` does.
    """
    return _prepare(parse_url(url), create=True)


def schema_of(url: str) -> str | None:
    """The revision a database has, None if it has none. Changes nothing. Raises
    :class:`DatabaseError`."""
    return _schema_of(parse_url(url))


def _schema_of(url: URL) -> str | None:
    _file_exists(url)
    engine = make_engine(url)
    try:
        with translated(url), engine.connect() as connection:
            return current(connection)
    finally:
        engine.dispose()


def _of_another_version(url: URL, found: str) -> SchemaError:
    return SchemaError(
        f"{shown(url)} was made by another version of spectune (schema {found}, this program's is "
        f"{head()}); open it with that version, or name another database"
    )


def _one_moment(url: URL) -> dict[str, Any]:
    """Execution options of transactions that see one snapshot. SQLite's always do."""
    return {} if url.get_backend_name() == "sqlite" else {"isolation_level": "REPEATABLE READ"}


def _file_exists(url: URL) -> None:
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).is_file():
        raise DatabaseError(
            f"there is no database at {shown(url)}; `tune` makes one there, --db names another"
        )


def _prepare(url: URL, *, create: bool) -> tuple[str | None, str]:
    """Makes the tables where there are none and that is asked for: (revision before, revision
    now)."""
    is_sqlite, path = url.get_backend_name() == "sqlite", Path(str(url.database))
    if is_sqlite:
        (_folder_exists if create else _file_exists)(url)
    engine = make_engine(url, migrating=True)
    try:
        with translated(url):
            # One snapshot: tables that another process is just creating must not pass for somebody
            # else's.
            with engine.connect().execution_options(**_one_moment(url)) as connection:
                before = _revision(connection, url, create=create)
            if before is not None:
                return before, before
            if is_sqlite and is_read_only(path):
                raise SchemaError(
                    f"database {shown(url)} is empty and is read-only; copy it to a folder that "
                    "can be written, and open it there"
                )
            with engine.execution_options(**WRITES).connect() as connection, connection.begin():
                if not is_sqlite:
                    connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
                # Another process may have done it while this one waited for the lock.
                before = _revision(connection, url, create=create)
                if before is None:
                    migrate(connection)
            return before, head()
    finally:
        engine.dispose()


def _revision(connection: Connection, url: URL, *, create: bool) -> str | None:
    """This program's revision, or None for a database that may become ours; otherwise raises what
    the user must know."""
    found = current(connection)
    if found is None:
        others = foreign_tables(connection)
        if others:
            raise SchemaError(
                f"{shown(url)} is not a spectune database (it holds table {others[0]!r}); give "
                "another one to --db"
            )
        if not create:
            raise DatabaseError(f"database {shown(url)} is empty; `db upgrade` creates its tables")
    elif found != head():
        raise _of_another_version(url, found)
    return found


def _folder_exists(url: URL) -> None:
    """No folder is made: of a path that is mistyped it would be a second place for results."""
    folder = real_path(Path(str(url.database))).parent
    if not folder.is_dir():
        raise DatabaseError(
            f"there is no folder {folder} for the database {shown(url)}; create it, or give "
            "another file to --db"
        )
