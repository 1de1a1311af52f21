"""Remembers: tables, sessions and migrations on SQLite and PostgreSQL. Imports nothing of ours."""

from spectune.db.check import check
from spectune.db.database import Database, open_database, upgrade
from spectune.db.errors import (
    CorruptedChunkError,
    DatabaseError,
    NotFoundError,
    SchemaError,
    StaleVersionError,
    UnavailableError,
)

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
