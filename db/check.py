"""Whether a database is whole: its file, its references, its schema, and the checksum of every packed chunk."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import inspect, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from db import migrate
from db.database import Database, schema_of
from db.engine import explain, parse_url, shown
from db.errors import DatabaseError
from db.models import Packed
from db.tables import PACKED


@dataclass(frozen=True)
class BadChunk:
    """One packed row that fails its checksum or cannot be read; ``key`` is its primary key by column name."""

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
    bad_chunks: tuple[BadChunk, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return self.schema == self.head and not (self.integrity or self.foreign_keys or self.bad_chunks)

    @property
    def problems(self) -> tuple[str, ...]:
        """One line each, for people."""
        schema = (
            ()
            if self.schema == self.head
            else (f"schema is {self.schema}, this program's is {self.head}; run `cli.py db upgrade`",)
        )
        return (*schema, *self.integrity, *self.foreign_keys, *(str(c) for c in self.bad_chunks))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "problems": list(self.problems)}


def check(url: str) -> CheckReport:
    """Reads everything and changes nothing. Raises :class:`DatabaseError` only when the database cannot be opened at all."""
    parsed = parse_url(url)
    schema, head = schema_of(url), migrate.head()
    if schema != head:
        return CheckReport(shown(parsed), schema, head)
    with Database(parsed) as database, database.read() as session:
        integrity = _integrity(session) if database.dialect == "sqlite" else ()
        broken = _foreign_keys(session) if database.dialect == "sqlite" else ()
        size = _size_bytes(session, database.dialect)
        total, bad = 0, []
        for row in PACKED:
            count, found = _chunks(session, database, row)
            total += count
            bad.extend(found)
    return CheckReport(shown(parsed), schema, head, total, size, integrity, broken, tuple(bad))


def _integrity(session: Session) -> tuple[str, ...]:
    lines = [str(line) for (line,) in session.connection().exec_driver_sql("PRAGMA integrity_check(20)")]
    return () if lines == ["ok"] else tuple(lines)


def _foreign_keys(session: Session) -> tuple[str, ...]:
    rows = session.connection().exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    return tuple(f"table {table} row {rowid} refers to a missing row of {parent}" for table, rowid, parent, _ in rows)


def _size_bytes(session: Session, dialect: str) -> int:
    ask = (
        "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
        if dialect == "sqlite"
        else "SELECT pg_database_size(current_database())"
    )
    return int(session.connection().exec_driver_sql(ask).scalar_one())


def _chunks(session: Session, database: Database, row: type[Packed]) -> tuple[int, list[BadChunk]]:
    """Keys first and blobs one by one, so that one unreadable page costs one chunk and not the table."""
    table = inspect(row).local_table
    columns = list(table.primary_key.columns)
    bad: list[BadChunk] = []
    try:
        keys = session.execute(select(*columns).order_by(*columns)).all()
    except DBAPIError as error:
        return 0, [BadChunk(str(table.name), {}, explain(database.url, error))]
    for key in keys:
        named = {column.name: value for column, value in zip(columns, key, strict=True)}
        where = [column == value for column, value in zip(columns, key, strict=True)]
        try:
            digest, data = session.execute(select(table.c.sha256, table.c.data).where(*where)).one()
        except (DBAPIError, DatabaseError) as error:
            bad.append(BadChunk(str(table.name), named, f"cannot be read: {error}"))
            continue
        if hashlib.sha256(data).digest() != digest:
            bad.append(BadChunk(str(table.name), named, "checksum differs"))
    return len(keys), bad
