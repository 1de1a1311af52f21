"""Whether a database is whole: its file, its references, its schema, and the checksum of every
packed chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import zstandard
from sqlalchemy import Column, LargeBinary, select, type_coerce
from sqlalchemy.dialects import sqlite

from spectune.db.base import metadata
from spectune.db.database import Database, schema_of
from spectune.db.errors import DatabaseError
from spectune.db.failures import CHECK_IT
from spectune.db.migrate import head
from spectune.db.urls import parse_url, shown

_SIZE_BYTES = {
    "sqlite": "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()",
    "postgresql": "SELECT pg_database_size(current_database())",
}


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
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """One line each, for people."""
        schema: tuple[str, ...] = ()
        if self.schema is None:
            schema = ("it has no tables; `db upgrade` creates them",)
        elif self.schema != self.head:
            schema = (
                f"it was made by another version of spectune (schema {self.schema}, this program's "
                f"is {self.head}); open it with that version",
            )
        return (*schema, *self.integrity, *self.foreign_keys, *(str(c) for c in self.bad_chunks))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "problems": list(self.problems)}


def check(url: str) -> CheckReport:
    """Reads everything and changes nothing. Raises :class:`DatabaseError` only when the database
    cannot be opened at all."""
    parsed, newest = parse_url(url), head()
    try:
        schema = schema_of(url)
    except DatabaseError as error:
        damaged = _cause(error)
        if damaged == str(error):
            raise
        raise DatabaseError(
            f"{damaged}: not even its schema can be read; restore a copy, or save what is left by "
            f"`sqlite3 {shown(parsed)} .recover | sqlite3 rescued.db`"
        ) from None
    if schema != newest:
        return CheckReport(shown(parsed), schema, newest)
    with Database(parsed) as database:
        integrity: tuple[str, ...] = ()
        broken: tuple[str, ...] = ()
        if database.dialect == "sqlite":
            lines = _ask(database, "PRAGMA integrity_check(20)")
            integrity = () if lines == ("ok",) else lines
            # A damaged file answers no further questions about itself, but its chunks may still be
            # readable.
            ask = (
                "SELECT printf('table %s row %s refers to a missing row of %s', "
                '"table", rowid, parent) FROM pragma_foreign_key_check'
            )
            broken = () if integrity else _ask(database, ask)
        with database.read() as session:
            size = session.connection().exec_driver_sql(_SIZE_BYTES[database.dialect]).scalar_one()
        blobs = [c for t in metadata.tables.values() for c in t.columns if _is_blob(c)]
        problems = [found for column in blobs for found in _chunks(database, column)]
    bad = tuple(found for found in problems if found is not None)
    chunks = len(problems) - sum(not found.key for found in bad)
    return CheckReport(shown(parsed), schema, newest, chunks, int(size), integrity, broken, bad)


def _cause(error: DatabaseError) -> str:
    """An error without the advice to run this check."""
    return str(error).removesuffix(CHECK_IT)


def _ask(database: Database, question: str) -> tuple[str, ...]:
    """The first column of the answer, or why there is none."""
    try:
        with database.read() as session:
            return tuple(str(row[0]) for row in session.connection().exec_driver_sql(question))
    except DatabaseError as error:
        return (_cause(error),)


def _is_blob(column: Column[Any]) -> bool:
    return isinstance(column.type.dialect_impl(sqlite.dialect()), LargeBinary) or isinstance(
        getattr(column.type, "impl", None), LargeBinary
    )


def _chunks(database: Database, column: Column[Any]) -> Iterator[BadChunk | None]:
    """What is wrong with each blob of a column, None where nothing is; or with the table, without
    a key."""
    table = column.table
    columns = list(table.primary_key.columns)
    try:
        with database.read() as session:
            keys = session.execute(select(*columns).order_by(*columns)).all()
    except DatabaseError as error:
        yield BadChunk(table.name, {}, _cause(error))
        return
    left, key = iter([key._asdict() for key in keys]), dict[str, Any]()
    while True:
        try:  # after an error a new transaction goes on, so that it costs one chunk
            with database.read() as session:
                for key in left:
                    stored = select(type_coerce(column, LargeBinary)).filter_by(**key)
                    data = session.scalar(stored)  # None: it was removed meanwhile
                    try:
                        if data is not None:
                            zstandard.ZstdDecompressor().decompress(data)
                    except (zstandard.ZstdError, MemoryError):
                        yield BadChunk(table.name, key, f"{column.name}: its bytes are damaged")
                    else:
                        yield None
            return
        except DatabaseError as error:
            yield BadChunk(table.name, key, f"cannot be read: {_cause(error)}")
