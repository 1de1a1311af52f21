"""Whether a database is whole: its file, its references, its schema, and the checksum of every
packed chunk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import inspect, select
from sqlalchemy.orm import Session

from spectune.db.database import Database, schema_of
from spectune.db.errors import DatabaseError
from spectune.db.migrate import head
from spectune.db.models import Packed
from spectune.db.tables import PACKED
from spectune.db.urls import parse_url, shown

_BATCH = 256


@dataclass(frozen=True)
class BadChunk:
    """One packed row that fails its checksum or cannot be read; ``key`` is its primary key by
    column name."""

    table: str
    key: dict[str, Any]
    problem: str

    def __str__(self) -> str:
        where = ", ".join(f"{name} {value}" for name, value in self.key.items())
        return f"{self.table} ({where}): {self.problem}"


@dataclass(frozen=True)
class CheckReport:
    """What :func:`check` found; ``ok`` when nothing is wrong."""

    database: str
    schema: str | None
    head: str
    chunks: int = 0
    size_bytes: int = 0
    integrity: tuple[str, ...] = ()
    foreign_keys: tuple[str, ...] = ()
    bad_chunks: tuple[BadChunk, ...] = ()

    @property
    def ok(self) -> bool:
        return self.schema == self.head and not (
            self.integrity or self.foreign_keys or self.bad_chunks
        )

    @property
    def problems(self) -> tuple[str, ...]:
        """One line each, for people."""
        older = f"schema is {self.schema}, this program's is {self.head}; run `db upgrade`"
        schema = () if self.schema == self.head else (older,)
        return (*schema, *self.integrity, *self.foreign_keys, *(str(c) for c in self.bad_chunks))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "problems": list(self.problems)}


def check(url: str) -> CheckReport:
    """Reads everything and changes nothing. Raises :class:`DatabaseError` only when the database
    cannot be opened at all."""
    parsed = parse_url(url)
    schema, newest = schema_of(url), head()
    if schema != newest:
        return CheckReport(shown(parsed), schema, newest)
    with Database(parsed) as database:
        sqlite = database.dialect == "sqlite"
        integrity = _ask(database, _integrity) if sqlite else ()
        # A damaged file answers no further questions about itself, but its chunks may still be
        # readable.
        broken = _ask(database, _foreign_keys) if sqlite and not integrity else ()
        with database.read() as session:
            size = _size_bytes(session, database.dialect)
        total, bad = 0, list[BadChunk]()
        for row in PACKED:
            count, found = _chunks(database, row)
            total += count
            bad.extend(found)
    return CheckReport(shown(parsed), schema, newest, total, size, integrity, broken, tuple(bad))


def _ask(database: Database, question: Callable[[Session], tuple[str, ...]]) -> tuple[str, ...]:
    try:
        with database.read() as session:
            return question(session)
    except DatabaseError as error:
        return (str(error),)


def _integrity(session: Session) -> tuple[str, ...]:
    lines = [
        str(line) for (line,) in session.connection().exec_driver_sql("PRAGMA integrity_check(20)")
    ]
    return () if lines == ["ok"] else tuple(lines)


def _foreign_keys(session: Session) -> tuple[str, ...]:
    rows = session.connection().exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    return tuple(
        f"table {table} row {rowid} refers to a missing row of {parent}"
        for table, rowid, parent, _ in rows
    )


def _size_bytes(session: Session, dialect: str) -> int:
    ask = "SELECT pg_database_size(current_database())"
    if dialect == "sqlite":
        ask = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    return int(session.connection().exec_driver_sql(ask).scalar_one())


def _chunks(database: Database, row: type[Packed]) -> tuple[int, list[BadChunk]]:
    """How many chunks there are, and the bad ones."""
    table = inspect(row).local_table
    columns = list(table.primary_key.columns)
    try:
        with database.read() as session:
            keys = session.execute(select(*columns).order_by(*columns)).all()
    except DatabaseError as error:
        return 0, [BadChunk(str(table.name), {}, str(error))]
    named = [dict(zip((c.name for c in columns), key, strict=True)) for key in keys]
    bad: list[BadChunk] = []
    for i in range(0, len(named), _BATCH):
        part = named[i : i + _BATCH]
        try:
            bad.extend(_differing(database, table, part))
        except DatabaseError:
            # Something in there cannot be read; one by one, so that it costs one chunk.
            for key in part:
                try:
                    bad.extend(_differing(database, table, [key]))
                except DatabaseError as error:
                    bad.append(BadChunk(str(table.name), key, f"cannot be read: {error}"))
    return len(named), bad


def _differing(database: Database, table: Any, keys: list[dict[str, Any]]) -> list[BadChunk]:
    bad = []
    with database.read() as session:
        for key in keys:
            where = [table.c[name] == value for name, value in key.items()]
            digest, data = session.execute(select(table.c.sha256, table.c.data).where(*where)).one()
            if hashlib.sha256(data).digest() != digest:
                bad.append(BadChunk(str(table.name), key, "checksum differs"))
    return bad
