"""The schema's history: which revision a database has, and how to bring it to ours."""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from spectune.db.tables import metadata

VERSION_TABLE = "spectune_schema"
_FOLDER = Path(__file__).with_name("migrations")
# Alembic keeps the running migration in module globals.
_ALEMBIC = threading.Lock()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def revisions() -> tuple[str, ...]:
    """Every revision this program knows, oldest first."""
    script = ScriptDirectory.from_config(_config())
    return tuple(reversed([r.revision for r in script.walk_revisions()]))


def head() -> str:
    """The revision this program works with."""
    return revisions()[-1]


def current(connection: Connection) -> str | None:
    """The revision a database has, or None if it never had one."""
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def foreign_tables(connection: Connection) -> list[str]:
    """Tables that keep a database without a revision from becoming ours: any on SQLite, those with our names elsewhere."""
    names = set(inspect(connection).get_table_names()) - {VERSION_TABLE}
    return sorted(names if connection.dialect.name == "sqlite" else names & set(metadata.tables))


def migrate(connection: Connection, to: str = "head") -> None:
    """Upgrades inside the caller's transaction, so that a crash leaves the old schema whole."""
    config = _config()
    config.attributes["connection"] = connection
    with _ALEMBIC:
        command.upgrade(config, to)


def new_revision(connection: Connection, message: str, revision_id: str) -> None:
    """Writes a migration from the difference between ``connection`` and the tables (a developer's tool)."""
    config = _config()
    config.attributes["connection"] = connection
    with _ALEMBIC:
        command.revision(config, message=message, autogenerate=True, rev_id=revision_id)
