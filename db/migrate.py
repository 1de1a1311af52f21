"""The schema's history: which revision a database has, and how to bring it to ours."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from spectune.db.errors import SchemaError
from spectune.db.models import metadata

VERSION_TABLE = "spectune_schema"
_FOLDER = Path(__file__).with_name("migrations")
# Alembic keeps the running migration in module globals.
_ALEMBIC = threading.Lock()


def revisions() -> tuple[str, ...]:
    """Every revision this program knows, oldest first: what the names of their files begin with."""
    files = (_FOLDER / "versions").glob("[0-9]*_*.py")
    return tuple(sorted(file.name.partition("_")[0] for file in files))


def head() -> str:
    """The revision this program works with."""
    return revisions()[-1]


def current(connection: Connection) -> str | None:
    """The revision a database has, or None if it never had one. Raises :class:`SchemaError` for
    more than one."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()
    if len(found) > 1:
        raise SchemaError(
            f"table {VERSION_TABLE} names {len(found)} schemas, not one; restore the database from "
            "a backup"
        )
    return str(found[0]) if found else None


def foreign_tables(connection: Connection) -> list[str]:
    """Tables that keep a database without a revision from becoming ours: any on SQLite, those with
    our names elsewhere."""
    names = set(inspect(connection).get_table_names()) - {VERSION_TABLE}
    return sorted(names if connection.dialect.name == "sqlite" else names & set(metadata.tables))


def migrate(connection: Connection, to: str = "head") -> None:
    """Upgrades inside the caller's transaction, so that a crash leaves the old schema whole."""
    from alembic import command  # imported by what migrates alone
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _ALEMBIC:
        command.upgrade(config, to)
