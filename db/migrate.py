"""The schema of a database, and how an empty one gets its tables."""

from __future__ import annotations

import threading
from importlib import import_module
from pathlib import Path

from sqlalchemy import Connection, MetaData, inspect, text

from spectune.db.base import Base
from spectune.db.database_errors import SchemaError
from spectune.db.urls import shown

HEAD = "0001"
"""The last revision in ``migrations/versions``."""
VERSION_TABLE = "spectune_schema"
_ALEMBIC = threading.Lock()
"""Alembic keeps the running migration in module globals."""


def all_tables() -> MetaData:
    """Returns every table, once the modules that declare them are imported."""
    for module in ("spectune.db.schedules", "spectune.traces.tables", "spectune.traces.views"):
        import_module(module)
    return Base.metadata


def revision(connection: Connection) -> str | None:
    """Returns this program's revision, or None for an empty database. Raises
    :class:`SchemaError` for any other."""
    names, url = set(inspect(connection).get_table_names()), connection.engine.url
    if VERSION_TABLE in names:
        found: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
        if found == HEAD:
            return found
        raise SchemaError(
            f"{shown(url)} was made by another version of spectune (schema {found}, this program's "
            f"is {HEAD}); open it with that version, or name another database"
        )
    # A database on a server may be shared with other programs.
    if others := names if url.get_backend_name() == "sqlite" else names & {*all_tables().tables}:
        raise SchemaError(
            f"{shown(url)} is not a spectune database (it holds table {min(others)!r}); give "
            "another one to --db"
        )
    return None


def migrate(connection: Connection) -> None:
    """Makes the tables inside the caller's transaction: a crash leaves nothing half done."""
    from alembic import command  # only new databases need it
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    folder = str(Path(__file__).with_name("migrations"))
    config.set_main_option("script_location", folder.replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _ALEMBIC:
        command.upgrade(config, "head")
