"""Which revision of the schema a database has, and how a new one gets its tables."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from spectune.db.base import metadata

VERSION_TABLE = "spectune_schema"
_FOLDER = Path(__file__).with_name("migrations")
# Alembic keeps the running migration in module globals.
_ALEMBIC = threading.Lock()


def head() -> str:
    """The revision this program works with: what the name of the last file begins with."""
    return max(p.name.partition("_")[0] for p in (_FOLDER / "versions").glob("[0-9]*_*.py"))


def current(connection: Connection) -> str | None:
    """The revision a database has, or None if it never had one."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    return found


def foreign_tables(connection: Connection) -> list[str]:
    """Tables that keep a database without a revision from becoming ours: any on SQLite, those with
    our names elsewhere."""
    names = set(inspect(connection).get_table_names()) - {VERSION_TABLE}
    return sorted(names if connection.dialect.name == "sqlite" else names & set(metadata.tables))


def migrate(connection: Connection) -> None:
    """Makes the tables inside the caller's transaction: a crash leaves nothing half done."""
    from alembic import command  # imported by what migrates alone
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _ALEMBIC:
        command.upgrade(config, "head")
