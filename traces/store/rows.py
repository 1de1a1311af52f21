"""What the storage modules share: new ids, inserts that tolerate their twin, and chunks to and from
rows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, literal, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute, Session

from spectune.db import Database, NotFoundError
from spectune.db.models import Packed
from spectune.db.types import Unreadable
from spectune.traces.codec import Chunk

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

    def insert_new(
        self, session: Session, row: type[DeclarativeBase], prefix: str, values: Mapping[str, Any]
    ) -> str:
        """Inserts under a fresh id ``prefix-xxxxxx`` and returns it."""
        for _ in range(_TRIES):
            name = f"{prefix}-{self.token()}"
            if insert_absent(session, row, {"id": name, **values}):
                return name
        raise RuntimeError(f"no free id {prefix}-... in {_TRIES} tries")


def insert_absent(session: Session, row: type[DeclarativeBase], values: Mapping[str, Any]) -> bool:
    """INSERT ... ON CONFLICT DO NOTHING; whether a row was inserted."""
    # RETURNING and not the row count, which drivers do not promise for an INSERT.
    return (
        session.execute(
            _insert(session, row).values(**values).on_conflict_do_nothing().returning(literal(1))
        ).first()
        is not None
    )


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
    """The one id of a kind of row that ``text`` is, or begins, or ``latest``. Raises NotFoundError
    when there is none or more than one."""
    column: InstrumentedAttribute[str] = row.id
    what = row.__tablename__.replace("_", " ")
    if text == "latest":
        found = session.scalar(select(column).order_by(*newest_first(row)).limit(1))
        if found is None:
            raise NotFoundError(f"there is no {what} yet{_MAKERS.get(what, '')}")
        return found
    if is_stored(session, column, text):
        return text
    near = session.scalars(
        select(column).where(column.startswith(text, autoescape=True)).limit(3)
    ).all()
    if len(near) == 1 and text:
        return near[0]
    if near and text:
        raise NotFoundError(f"{what} {text!r} is ambiguous: {', '.join(sorted(near))}...")
    raise NotFoundError(f"there is no {what} {text!r}{_HINTS.get(what, '')}")


def resolve_all(session: Session, row: type[Any], texts: Sequence[str]) -> list[str]:
    """:func:`resolve` of several; each id once."""
    return list(dict.fromkeys(resolve(session, row, text) for text in texts))


def named_row(session: Session, row: type[R], text: str) -> R:
    """The row that :func:`resolve` means. Raises NotFoundError."""
    return session.get_one(row, resolve(session, row, text))


def newest_first(row: type[Any]) -> tuple[Any, Any]:
    """What rows are ordered by."""
    return row.created_at.desc(), row.id


def equal(wanted: Mapping[InstrumentedAttribute[Any], Any]) -> list[ColumnElement[bool]]:
    """Conditions that columns have these values; None: any."""
    return [column == value for column, value in wanted.items() if value is not None]


def value_of(kind: type[V], row: DeclarativeBase, **others: Any) -> V:
    """A dataclass whose fields are the row's columns of the same names, but for ``others``."""
    names = [field.name for field in fields(kind) if field.name not in others]  # type: ignore[arg-type]
    return kind(**{name: getattr(row, name) for name in names}, **others)


def is_stored(session: Session, column: InstrumentedAttribute[Any], value: Any) -> bool:
    """Whether a row has this key; what else stands in it is not read."""
    return session.scalar(select(column).where(column == value)) is not None


def require(session: Session, row: type[Any], name: str, when: str) -> None:
    """Raises NotFoundError unless a row of that id is there."""
    if not is_stored(session, row.id, name):
        raise NotFoundError(f"there is no {row.__tablename__} {name!r}; store it {when}")


def readable(document: Any) -> tuple[Any, str]:
    """(document, "") as it was stored, or (None, why it cannot be read)."""
    return (None, document.problem) if isinstance(document, Unreadable) else (document, "")


def chunk_values(chunk: Chunk) -> dict[str, Any]:
    """A chunk as column values of a packed row."""
    return {
        "schema_version": chunk.schema_version,
        "codec": chunk.codec,
        "sha256": chunk.sha256,
        "data": chunk.data,
    }


def chunk_of(row: Packed) -> Chunk:
    """The chunk that a row holds."""
    return Chunk(row.schema_version, row.codec, row.sha256, row.data)
