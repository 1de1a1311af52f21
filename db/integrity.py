"""Checks that a database is whole: its file, its references, its schema, and every stored blob."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Column, LargeBinary, Table, select, type_coerce

from spectune.db.compression import zstd
from spectune.db.database import Database, open_database
from spectune.db.database_errors import DatabaseError
from spectune.db.migrate import HEAD, all_tables


@dataclass(frozen=True)
class CheckReport:
    """What :func:`check` found: how many blobs are sound, and one line for each problem."""

    database: str
    schema: str
    blobs: int
    problems: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def check(url: str) -> CheckReport:
    """Reads everything and changes nothing. Raises :class:`DatabaseError` where the database cannot
    be opened, and :class:`SchemaError` where it is not at this program's schema."""
    found: list[str] = []
    with open_database(url, create=False) as database:
        parts = [_blobs(database, table) for table in all_tables().sorted_tables]
        for part in (_file_problems(database), *parts):
            try:
                found += part
            except DatabaseError as error:
                found.append(str(error))
    problems = [line for line in found if line]
    return CheckReport(database.name, HEAD, found.count(""), problems)


def _file_problems(database: Database) -> Iterator[str]:
    if database.dialect == "sqlite":
        with database.read() as session:
            ask = session.connection().exec_driver_sql
            yield from (line for (line,) in ask("PRAGMA integrity_check(20)") if line != "ok")
            for table, row, parent, _ in ask("PRAGMA foreign_key_check"):
                yield f"{table} (row {row}): refers to a missing row of {parent}"


def _blobs(database: Database, table: Table) -> Iterator[str]:
    """What is wrong with each blob of a table, "" where nothing is."""
    key, columns = list(table.primary_key), [c for c in table.columns if _is_blob(c)]
    blobs = (type_coerce(column, LargeBinary) for column in columns)
    rows = select(*key, *blobs).order_by(*key).execution_options(yield_per=64)
    with database.read() as session:
        for row in session.execute(rows) if columns else ():
            for column, data in zip(columns, row[len(key) :], strict=True):
                try:
                    if data is not None:
                        zstd.decompress(data)  # verifies the frame's checksum
                    yield ""
                except (zstd.ZstdError, MemoryError) as error:
                    where = ", ".join(f"{c.name} {v}" for c, v in zip(key, row, strict=False))
                    yield f"{table.name} ({where}): {column.name} is damaged ({error})"


def _is_blob(column: Column[Any]) -> bool:
    return isinstance(getattr(column.type, "impl", column.type), LargeBinary)
