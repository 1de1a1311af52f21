"""From a URL to an engine that behaves the same on SQLite and PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event

from spectune.db.sqlite import connect as connect_sqlite

WRITES = {"spectune_write": True}
"""Execution option of connections that write: on SQLite they begin IMMEDIATE."""
LONG = {"spectune_long": True}
"""Execution option of transactions whose statements may take an hour (PostgreSQL)."""
NO_BEGIN = {"spectune_no_begin": True}
"""Execution option of connections for statements that no transaction may hold."""


def make_engine(url: URL, *, migrating: bool = False) -> Engine:
    """An engine for a parsed URL; ``migrating`` prepares the database for it, and may create it.

    SQLite: the connections of :mod:`db.sqlite`, and BEGIN under our control, because a transaction
    that reads before it writes fails under contention unless it began IMMEDIATE.
    PostgreSQL: the limits of :mod:`db.postgresql`.
    """
    serializer = partial(
        json.dumps, ensure_ascii=False, allow_nan=False, default=_plain, separators=(",", ":")
    )
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url, serializer, migrating)
    return _postgresql_engine(url, serializer)


def _sqlite_engine(url: URL, serializer: Callable[[Any], str], migrating: bool) -> Engine:
    pool: dict[str, Any] = {"poolclass": NullPool} if migrating else {}
    path = Path(str(url.database))
    engine = create_engine(
        url,
        json_serializer=serializer,
        creator=lambda: connect_sqlite(path, migrating=migrating),
        **pool,
    )

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if not options.get("spectune_no_begin", False):
            how = " IMMEDIATE" if options.get("spectune_write", False) else ""
            connection.exec_driver_sql(f"BEGIN{how}")

    return engine


def _postgresql_engine(url: URL, serializer: Callable[[Any], str]) -> Engine:
    from spectune.db.postgresql import CONNECTING
    from spectune.db.postgresql import Connection as Driver

    defaults = {name: value for name, value in CONNECTING.items() if name not in url.query}
    engine = create_engine(
        url, connect_args=defaults, pool_pre_ping=True, json_serializer=serializer
    )

    @event.listens_for(engine, "do_connect")
    def do_connect(_dialect: object, _record: object, given: list[Any], named: Any) -> Driver:
        return Driver.connect(*given, **named)

    @event.listens_for(engine, "connect")
    def on_connect(connection: Driver, _record: object) -> None:
        connection.limit(str(url.query.get("options", "")))

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        driver.begin(is_long=connection.get_execution_options().get("spectune_long", False))

    @event.listens_for(engine, "checkin")
    def on_checkin(connection: Driver | None, _record: object) -> None:
        if connection is not None:
            connection.rest()

    return engine


def _plain(value: Any) -> Any:
    """Array libraries' scalars as numbers; anything else is no JSON."""
    if callable(getattr(value, "item", None)):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r} is not JSON")
