"""Checks that a database is whole: its file, its references, its schema, and every stored blob."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import zstandard
from sqlalchemy import Column, LargeBinary, Table, select, type_coerce

from spectune.db.database import Database, open_database
from spectune.db.errors import DatabaseError
from spectune.db.migrate import HEAD, all_tables

EMPTY = zstandard.compress(b"")


@dataclass(frozen=True)
class CheckReport:
    """What :func:`check` found: how many blobs it read, and one line for each problem."""

    database: str
    schema: str
    blobs: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "problems": list(self.problems)}


def check(url: str) -> CheckReport:
    """Reads everything and changes nothing. Raises :class:`DatabaseError` where the database cannot
    be opened, and :class:`SchemaError` where it is not at this program's schema."""
    problems: list[str] = []
    blobs = 0
    with open_database(url, create=False) as database:
        try:
            if database.dialect == "sqlite":
                problems += _file_problems(database)
        except DatabaseError as error:
            problems.append(str(error))
        for table in all_tables().sorted_tables:
            columns = [column for column in table.columns if _is_blob(column)]
            try:
                for problem in _blobs(database, table, columns) if columns else ():
                    blobs += 1
                    problems += [problem] if problem else []
            except DatabaseError as error:
                problems.append(f"{table.name}: {error}")
        return CheckReport(database.name, HEAD, blobs, tuple(problems))


def _file_problems(database: Database) -> Iterator[str]:
    with database.read() as session:
        ask = session.connection().exec_driver_sql
        yield from (line for (line,) in ask("PRAGMA integrity_check(20)") if line != "ok")
        for table, row, parent, _ in ask("PRAGMA foreign_key_check"):
            yield f"{table} (row {row}): refers to a missing row of {parent}"


def _is_blob(column: Column[Any]) -> bool:
    return isinstance(getattr(column.type, "impl", column.type), LargeBinary)


def _blobs(database: Database, table: Table, columns: list[Column[Any]]) -> Iterator[str]:
    """What is wrong with each blob of a table, "" where nothing is."""
    key = list(table.primary_key)
    data = (type_coerce(column, LargeBinary) for column in columns)
    rows = select(*key, *data).order_by(*key).execution_options(yield_per=64)
    decompress = zstandard.ZstdDecompressor().decompress  # verifies the frame's checksum
    with database.read() as session:
        for row in session.execute(rows):
            for column, blob in zip(columns, row[len(key) :], strict=True):
                try:
                    decompress(EMPTY if blob is None else blob)
                    yield ""
                except (zstandard.ZstdError, MemoryError) as error:
                    where = ", ".join(f"{c.name} {v}" for c, v in zip(key, row, strict=False))
                    yield f"{table.name} ({where}): {column.name} is damaged ({error})"
