"""What the storage modules share: rows put, found by their ids and listed, and the values and
chunks that they hold."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, inspect, literal, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute, Session

from spectune.db import CorruptedChunkError, Database, NotFoundError
from spectune.db.models import Packed, PairRow, RecordingRow
from spectune.traces.codec import CodecError
from spectune.traces.recording import DESIGNED

R = TypeVar("R", bound=DeclarativeBase)
V = TypeVar("V")
_TRIES = 20
_HINTS = {
    "recording": "; `traces list` shows those there are",
    "latency profile": "; `profile` measures one and prints its id",
}
_MAKERS = {
    "recording": "; `record` makes one",
    "latency profile": "; `profile` measures one",
    "study": "; `tune` makes one",
}
"""What to do, for messages, when nothing is found."""


@dataclass(frozen=True)
class Storage:
    """A database with the clock and the chance that new rows are stamped and named by."""

    database: Database
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    token: Callable[[], str] = lambda: secrets.token_hex(3)

    def _put(self, row: type[DeclarativeBase], **values: Any) -> bool:
        """Stores a row in a transaction of its own unless one of its id is there; whether it was
        stored. Raises NotFoundError where its pair is not."""
        with self.database.write() as session:
            require_pair(session, values)
            return insert_absent(session, row, {**values, "created_at": self.clock()})

    def _put_new(self, row: type[DeclarativeBase], prefix: str, **values: Any) -> str:
        """Stores a row under a fresh id ``prefix-xxxxxx`` in a transaction of its own; the id.
        Raises NotFoundError where its pair is not stored."""
        with self.database.write() as session:
            return self._insert_new(session, row, prefix, **values)

    def _insert_new(
        self, session: Session, row: type[DeclarativeBase], prefix: str, **values: Any
    ) -> str:
        require_pair(session, values)
        values["created_at"] = self.clock()
        for _ in range(_TRIES):
            name = f"{prefix}-{self.token()}"
            if insert_absent(session, row, {"id": name, **values}):
                return name
        raise RuntimeError(f"no free id {prefix}-... in {_TRIES} tries")

    def _get(self, row: type[R], text: str, of: Callable[[R], V]) -> V:
        """What a row holds that is named by its id, an unambiguous beginning of it, or ``latest``.
        Raises NotFoundError."""
        with self.database.read() as session:
            return of(named_row(session, row, text))

    def _list(self, row: type[R], of: Callable[[R], V]) -> tuple[V, ...]:
        """What all rows hold, newest first."""
        with self.database.read() as session:
            return tuple(of(found) for found in session.scalars(newest(row)))

    def _columns(self, row: type[Any], *columns: Any, **wanted: Any) -> tuple[Any, ...]:
        """Columns of the rows with these values (None: any), newest first."""
        with self.database.read() as session:
            return tuple(map(tuple, session.execute(newest(row, *columns, **wanted))))


def newest(row: type[Any], *columns: Any, **wanted: Any) -> Any:
    """Selects the rows with these values (None: any), or columns of them, newest first."""
    given = {name: value for name, value in wanted.items() if value is not None}
    return select(*(columns or (row,))).filter_by(**given).order_by(row.created_at.desc(), row.id)


def insert_absent(session: Session, row: type[DeclarativeBase], values: Mapping[str, Any]) -> bool:
    """INSERT ... ON CONFLICT DO NOTHING; whether a row was inserted."""
    # RETURNING and not the row count, which drivers do not promise for an INSERT.
    statement = _insert(session, row).values(**values).on_conflict_do_nothing()
    return session.execute(statement.returning(literal(1))).first() is not None


def insert_all_absent(
    session: Session, row: type[DeclarativeBase], values: Sequence[Mapping[str, Any]], key: str
) -> set[Any]:
    """:func:`insert_absent` of several rows in one statement; the ``key`` column of those that were
    inserted."""
    table = row.__table__
    statement = _insert(session, table).on_conflict_do_nothing().returning(table.c[key])
    return set(session.execute(statement, list(values)).scalars()) if values else set()


def _insert(session: Session, row: Any) -> Any:
    if session.get_bind().dialect.name == "sqlite":
        return sqlite.insert(row)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(row)


def resolve(session: Session, row: type[Any], text: str) -> str:
    """The one id of a kind of row that ``text`` is, or begins, or ``latest`` (of recordings those
    of traffic). Raises NotFoundError when there is none or more than one."""
    column: InstrumentedAttribute[str] = row.id
    what = row.__tablename__.replace("_", " ")
    if text == "latest":
        rows = newest(row, column)
        if row is RecordingRow:
            rows = rows.where(RecordingRow.source != DESIGNED)
        found: str | None = session.scalar(rows.limit(1))
        if found is None:
            raise NotFoundError(f"there is no {what} yet{_MAKERS.get(what, '')}")
        return found
    near = meant(session, column, text)
    if len(near) == 1:
        return near[0]
    if near:
        raise NotFoundError(f"{what} {text!r} is ambiguous: {', '.join(near)}...")
    raise NotFoundError(f"there is no {what} {text!r}{_HINTS.get(what, '')}")


def meant(session: Session, column: InstrumentedAttribute[str], text: str) -> list[str]:
    """The one id that ``text`` is, or up to three that it begins."""
    if is_stored(session, column, text):
        return [text]
    begun = select(column).where(column.startswith(text, autoescape=True))
    return [*session.scalars(begun.order_by(column).limit(3))] if text else []


def resolve_all(session: Session, row: type[Any], texts: Sequence[str]) -> list[str]:
    """:func:`resolve` of several; each id once."""
    return list(dict.fromkeys(resolve(session, row, text) for text in texts))


def named_row(session: Session, row: type[R], text: str) -> R:
    """The row that :func:`resolve` means. Raises NotFoundError."""
    return session.get_one(row, resolve(session, row, text))


def equal(wanted: Mapping[InstrumentedAttribute[Any], Any]) -> list[ColumnElement[bool]]:
    """Conditions that columns have these values; None: any."""
    return [column == value for column, value in wanted.items() if value is not None]


def is_stored(session: Session, column: InstrumentedAttribute[Any], value: Any) -> bool:
    """Whether a row has this key; what else stands in it is not read."""
    return session.scalar(select(column).where(column == value)) is not None


def require(session: Session, row: type[Any], name: str | None) -> None:
    """Raises NotFoundError unless a row of that id is there; None needs none."""
    if name is not None and not is_stored(session, row.id, name):
        raise NotFoundError(f"there is no {row.__tablename__} {name!r}; store it first")


def require_pair(session: Session, values: Mapping[str, Any]) -> None:
    """Raises NotFoundError unless the pair that a row names, if any, is stored."""
    require(session, PairRow, values.get("pair_id"))


def value_of(kind: type[V], row: DeclarativeBase, **others: Any) -> V:
    """A dataclass whose fields are the row's columns of the same names, but for ``others``."""
    names = [field.name for field in fields(kind) if field.name not in others]  # type: ignore[arg-type]
    return kind(**{name: getattr(row, name) for name in names}, **others)


def values_of(row: DeclarativeBase) -> dict[str, Any]:
    """A row's values by column."""
    return {column.key: getattr(row, column.key) for column in inspect(row).mapper.column_attrs}


def unpacked(row: Packed, unpack: Callable[[Any], V], what: str) -> V:
    """What a packed row holds, which has the fields of a chunk and is unpacked as one. Raises
    CorruptedChunkError: ``what`` cannot be used."""
    try:
        return unpack(row)
    except CodecError as error:
        raise CorruptedChunkError(f"{what} cannot be used ({error})") from error
