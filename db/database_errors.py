"""What can go wrong between the program and its database, each with a line for the user."""

from __future__ import annotations


class DatabaseError(Exception):
    """The database cannot be reached, opened or used; the message says which and what to do."""


class UnavailableError(DatabaseError):
    """The database cannot answer now and may later, so that trying again is right: it is away,
    silent, busy, full, or a table is gone."""


class SchemaError(DatabaseError):
    """The database was made by another version of this program, or by another program."""


class NotFoundError(DatabaseError):
    """No row with that id or name."""


class CorruptedChunkError(DatabaseError):
    """A stored chunk fails its checksum or cannot be decoded; others are still usable."""


class StaleVersionError(DatabaseError):
    """Somebody else published in the meantime; the message names both versions."""
