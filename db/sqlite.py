"""SQLite connections: what each begins with, WAL, and files that can be read and not written."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

from spectune.db.errors import DatabaseError

BUSY_TIMEOUT_S = 60
PAGE_SIZE_BYTES = 1024
"""SQLite's page. Panorama chunks are 1-10 kB: larger pages leave more room unused (measured in
``docs/log.md``)."""
_CACHE_KIB = 20_000


def real_path(path: Path) -> Path:
    """The file itself where ``path`` is a link: SQLite keeps its log beside that. A link that leads
    nowhere is no error here."""
    return Path(os.path.realpath(path))


def is_read_only(path: Path) -> bool:
    """Whether the file is there and cannot be written, or its folder, where SQLite keeps its log,
    cannot."""
    path = real_path(path)
    return path.exists() and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))


def connect(path: Path, *, migrating: bool) -> sqlite3.Connection:
    """A connection in autocommit mode; transactions begin by hand.

    While ``migrating`` a new file is made, and one that is there is switched to WAL. Otherwise a
    file that is missing is an error, and nothing but a write transaction writes to it. One that is
    read-only is read as it is. Raises sqlite3.Error, and :class:`DatabaseError` for a read-only
    file whose last changes cannot be read.
    """
    path = real_path(path)
    read_only = is_read_only(path)
    connection = (
        _open_read_only(path) if read_only else _open(path, "mode=rwc" if migrating else "mode=rw")
    )
    try:
        if migrating and not read_only:
            connection.execute(f"PRAGMA page_size={PAGE_SIZE_BYTES}")
            _use_wal(connection)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    except BaseException:
        connection.close()
        raise
    return connection


def _open(path: Path, how: str) -> sqlite3.Connection:
    # The timeout is the busy timeout: it makes a writer wait for another one.
    connection = sqlite3.connect(
        f"{path.as_uri()}?{how}", uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False
    )
    connection.isolation_level = None
    return connection


def _open_read_only(path: Path) -> sqlite3.Connection:
    connection = _open(path, "mode=ro")
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        # A file in WAL mode has no log after its last writer left, and where none can be made
        # SQLite reads it only as immutable.
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
        for log in (path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-journal")):
            if log.exists() and log.stat().st_size:
                raise DatabaseError(
                    f"database file {path} is read-only and its last changes are in {log.name}, "
                    "which cannot be read there; copy both to a folder that can be written"
                ) from error
        return _open(path, "mode=ro&immutable=1")
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    # Switching to WAL ignores the busy timeout when two processes create the file at once.
    for attempt in range(50):
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or attempt == 49:
                raise
            time.sleep(0.02 * (1 + attempt))
