"""What the storage modules share: rows put, found by their ids and listed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import literal, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session, undefer

from spectune.db import CorruptedChunkError, Database, NotFoundError, UnavailableError
from spectune.traces.blobs import Damaged
from spectune.traces.tables import NO_TRAFFIC, Pair, Recording, Value

T = TypeVar("T")
V = TypeVar("V", bound=Value)
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

    def _put(self, table: type[Value], **values: Any) -> None:
        """Stores a row in a transaction of its own unless one of its id is there."""
        with self.database.write() as session:
            insert_absent(session, table, {**values, "created_at": self.clock()})

    def _put_new(self, session: Session, table: type[Value], prefix: str, **values: Any) -> str:
        """Stores a row under a fresh id ``prefix-xxxxxx``, which is returned. Raises NotFoundError
        where its pair is not stored."""
        require(session, Pair, values.get("pair_id"))
        values["created_at"] = self.clock()
        for _ in range(_TRIES):
            name = f"{prefix}-{self.token()}"
            if insert_absent(session, table, {"id": name, **values}):
                return name
        raise RuntimeError(f"no free id {prefix}-... in {_TRIES} tries")

    def _get(self, table: type[V], text: str, blob: str | None = None) -> V:
        """The row named by its id, an unambiguous beginning of it, or ``latest``, with its deferred
        ``blob``. Raises NotFoundError, and CorruptedChunkError where the blob is damaged."""
        with self.database.read() as session:
            column: Any = table.id  # type: ignore[attr-defined]
            query = select(table).where(column == resolve(session, table, text))
            if blob is not None:
                query = query.options(undefer(getattr(table, blob)))
            row = session.scalars(query).one()
        what = table.__tablename__.replace("_", " ")
        if blob is not None and isinstance(damaged := getattr(row, blob), Damaged):
            raise CorruptedChunkError(f"{what} {text} cannot be used ({damaged.problem})")
        return row

    def _list(self, table: type[V], **values: Any) -> tuple[V, ...]:
        """All rows with these values (None: any), newest first, without what is deferred."""
        with self.database.read() as session:
            return tuple(session.scalars(newest(table, **values)))


def newest(table: type[Any], *columns: Any, **values: Any) -> Any:
    """Selects the rows with these values (None: any), or columns of them, newest first."""
    query = select(*(columns or (table,))).filter_by(**given(**values))
    return query.order_by(table.created_at.desc(), table.id)


def insert(session: Session, table: Any) -> Any:
    """The dialect's INSERT, which knows ON CONFLICT."""
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    return dialect.insert(table)


def insert_absent(session: Session, table: type[Value], values: Mapping[str, Any]) -> bool:
    """INSERT ... ON CONFLICT DO NOTHING; whether a row was inserted."""
    # RETURNING and not the row count, which drivers do not promise for an INSERT.
    statement = insert(session, table).values(**values).on_conflict_do_nothing()
    return session.execute(statement.returning(literal(1))).first() is not None


def resolve(session: Session, table: type[Any], text: str) -> str:
    """The one id of a table that ``text`` is, or begins, or ``latest`` (of recordings those of
    traffic). Raises NotFoundError when there is none or more than one."""
    what = table.__tablename__.replace("_", " ")
    if text == "latest":
        rows = newest(table, table.id)
        if table is Recording:
            rows = rows.where(Recording.source.not_in(NO_TRAFFIC))
        latest: str | None = session.scalar(rows.limit(1))
        if latest is None:
            raise NotFoundError(f"there is no {what} yet{_MAKERS.get(what, '')}")
        return latest
    if is_stored(session, table.id, text):
        return text
    begun = select(table.id).where(table.id.startswith(text, autoescape=True))
    ids = session.scalars(begun.order_by(table.id).limit(3)).all() if text else []
    if len(ids) == 1:
        return str(ids[0])
    if ids:
        raise NotFoundError(f"{what} {text!r} is ambiguous: {', '.join(ids)}...")
    raise NotFoundError(f"there is no {what} {text!r}{_HINTS.get(what, '')}")


def put_apart(
    items: Sequence[T],
    put: Callable[[Sequence[T]], bool],
    refuse: Callable[[T, Exception], bool],
    passed_on: tuple[type[Exception], ...] = (UnavailableError,),
) -> bool:
    """Puts items in one transaction, or where the database refuses what is in them each in one of
    its own; of an item that is refused then ``refuse`` disposes. Ends where one of the two returns
    False, which is returned. Raises what is ``passed_on``."""
    try:
        return put(items)
    except passed_on:
        raise
    # What an item holds decides what is raised, and those around it are to be stored.
    except Exception as error:
        if len(items) == 1:
            return refuse(items[0], error)
    return all(put_apart([item], put, refuse, passed_on) for item in items)


def given(**values: Any) -> dict[str, Any]:
    """Those that are not None, for ``filter_by``."""
    return {name: value for name, value in values.items() if value is not None}


def is_stored(session: Session, column: InstrumentedAttribute[Any], value: Any) -> bool:
    """Whether a row has this key; what else stands in it is not read."""
    return session.scalar(select(column).where(column == value)) is not None


def require(session: Session, table: type[Any], name: str | None) -> None:
    """Raises NotFoundError unless a row of that id is there; None needs none."""
    if name is not None and not is_stored(session, table.id, name):
        raise NotFoundError(f"there is no {table.__tablename__} {name!r}; store it first")
