"""From a URL to an engine that behaves the same on SQLite and PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event

from spectune.db.sqlite import connect as connect_sqlite

WRITES = {"spectune_write": True}
"""Execution option of connections that write: on SQLite they begin IMMEDIATE."""
NO_BEGIN = {"spectune_no_begin": True}
"""Execution option of connections for statements that no transaction may hold."""
CONNECT_ARGS: Mapping[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "options": "-c lock_timeout=60s",
}
"""libpq's parameters, unless the URL has its own: seconds, ``tcp_user_timeout`` in milliseconds."""


def make_engine(url: URL, *, migrating: bool = False) -> Engine:
    """An engine for a parsed URL; ``migrating`` prepares the database for it, and may create it.

    SQLite: the connections of :mod:`db.sqlite`, and BEGIN under our control, because a transaction
    that reads before it writes fails under contention unless it began IMMEDIATE.
    PostgreSQL: :data:`CONNECT_ARGS`.
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
    defaults = {name: value for name, value in CONNECT_ARGS.items() if name not in url.query}
    return create_engine(url, connect_args=defaults, pool_pre_ping=True, json_serializer=serializer)


def _plain(value: Any) -> Any:
    """Array libraries' scalars as numbers; anything else is no JSON."""
    if callable(getattr(value, "item", None)):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r} is not JSON")
