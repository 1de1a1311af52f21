"""What the storage modules share: new ids, inserts that tolerate their twin, and chunks to and from rows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import literal, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute, Session

from spectune.db import Database, NotFoundError
from spectune.db.models import Packed
from spectune.db.types import Unreadable
from spectune.traces.codec import Chunk
from spectune.traces.schema import Sampling

Clock = Callable[[], datetime]
_TRIES = 20
_HINTS = {"recording": "; `traces list` shows those there are", "latency profile": "; `profile` measures one and prints its id"}
_MAKERS = {"recording": "; `record` makes one", "latency profile": "; `profile` measures one", "study": "; `tune` makes one"}
"""What to do, for messages, when nothing is found."""


def utc_now() -> datetime:
    """The system's clock, aware UTC."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class Storage:
    """A database with the clock and the chance that new rows are stamped and named by."""

    database: Database
    clock: Clock = utc_now
    token: Callable[[], str] = lambda: secrets.token_hex(3)

    def insert_new(self, session: Session, row: type[DeclarativeBase], prefix: str, values: Mapping[str, Any]) -> str:
        """Inserts under a fresh id ``prefix-xxxxxx`` and returns it."""
        for _ in range(_TRIES):
            name = f"{prefix}-{self.token()}"
            if insert_absent(session, row, {"id": name, **values}):
                return name
        raise RuntimeError(f"no free id {prefix}-... in {_TRIES} tries")


def insert_absent(session: Session, row: type[DeclarativeBase], values: Mapping[str, Any]) -> bool:
    """INSERT ... ON CONFLICT DO NOTHING; whether a row was inserted."""
    # RETURNING and not the row count, which drivers do not promise for an INSERT.
    return session.execute(_insert(session, row).values(**values).on_conflict_do_nothing().returning(literal(1))).first() is not None


def insert_all_absent(session: Session, row: type[DeclarativeBase], values: Sequence[Mapping[str, Any]], key: str) -> set[Any]:
    """:func:`insert_absent` of several rows in one statement; the ``key`` column of those that were inserted."""
    table = row.__table__
    statement = _insert(session, table).on_conflict_do_nothing().returning(table.c[key])
    return set(session.execute(statement, list(values)).scalars()) if values else set()


def _insert(session: Session, row: Any) -> Any:
    if session.get_bind().dialect.name == "sqlite":
        return sqlite.insert(row)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(row)


def resolve(
    session: Session, column: InstrumentedAttribute[str], text: str, what: str, *, newest: InstrumentedAttribute[Any]
) -> str:
    """The one id that ``text`` is, or begins, or ``latest``. Raises NotFoundError when there is none or more than one."""
    if text == "latest":
        found = session.execute(select(column).order_by(newest.desc(), column).limit(1)).scalar()
        if found is None:
            raise NotFoundError(f"there is no {what} yet{_MAKERS.get(what, '')}")
        return found
    exact = session.execute(select(column).where(column == text)).scalar()
    if exact is not None:
        return exact
    near = session.execute(select(column).where(column.startswith(text, autoescape=True)).limit(3)).scalars().all()
    if len(near) == 1 and text:
        return near[0]
    if near and text:
        raise NotFoundError(f"{what} {text!r} is ambiguous: {', '.join(sorted(near))}...")
    raise NotFoundError(f"there is no {what} {text!r}{_HINTS.get(what, '')}")


def is_stored(session: Session, column: InstrumentedAttribute[Any], value: Any) -> bool:
    """Whether a row has this key; what else stands in it is not read."""
    return session.scalar(select(column).where(column == value)) is not None


def readable(document: Any) -> tuple[Any, str]:
    """(document, "") as it was stored, or (None, why it cannot be read)."""
    return (None, document.problem) if isinstance(document, Unreadable) else (document, "")


def chunk_values(chunk: Chunk) -> dict[str, Any]:
    """A chunk as column values of a packed row."""
    return {"schema_version": chunk.schema_version, "codec": chunk.codec, "sha256": chunk.sha256, "data": chunk.data}


def chunk_of(row: Packed) -> Chunk:
    """The chunk that a row holds."""
    return Chunk(row.schema_version, row.codec, row.sha256, row.data)


def sampling_json(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters as stored."""
    return asdict(sampling)
