"""Run by Alembic for every command; the connection comes from :mod:`db.migrate`."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from sqlalchemy import DateTime

from spectune.db.migrate import VERSION_TABLE
from spectune.db.tables import metadata
from spectune.db.types import UtcDateTime


def render_item(kind: str, item: Any, _autogen: Any) -> str | Literal[False]:
    """Migrations must not change when our column types do, so they name SQLAlchemy's."""
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(item, UtcDateTime) else False


def compare_type(_context: Any, _inspected: Any, _meta: Any, inspected_type: Any, metadata_type: Any) -> bool | None:
    """UtcDateTime is a DateTime in every database."""
    return False if isinstance(metadata_type, UtcDateTime) and isinstance(inspected_type, DateTime) else None


def run() -> None:
    """Applies or compares, inside the transaction that the connection already has."""
    connection = context.config.attributes["connection"]
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        render_as_batch=connection.dialect.name == "sqlite",
        render_item=render_item,
        compare_type=compare_type,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
