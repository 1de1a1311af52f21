"""Remembers: tables, sessions and migrations on SQLite and PostgreSQL. Imports nothing of ours."""

from spectune.db.database import Database, open_database, upgrade
from spectune.db.database_errors import (
    CorruptedChunkError,
    DatabaseError,
    NotFoundError,
    SchemaError,
    StaleVersionError,
    UnavailableError,
)
from spectune.db.integrity import check

__all__ = [
    "CorruptedChunkError",
    "Database",
    "DatabaseError",
    "NotFoundError",
    "SchemaError",
    "StaleVersionError",
    "UnavailableError",
    "check",
    "open_database",
    "upgrade",
]
