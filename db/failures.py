"""Driver errors as one line for the user: which database, what happened, what to do, and whether
trying again is right."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from spectune.db.database_errors import DatabaseError, UnavailableError
from spectune.db.urls import shown

BUSY_TIMEOUT_S = 60
_PLAIN = "database {name}: {cause}"
_SAID = {
    sqlite3.SQLITE_NOTADB: "{name} is not a SQLite database; name another file",
    sqlite3.SQLITE_CANTOPEN: "cannot open database file {name}: check that it exists and that it "
    "and its folder can be read",
    sqlite3.SQLITE_READONLY: "database file {name} is read-only; check its permissions and its "
    "folder's",
    sqlite3.SQLITE_BUSY: "database {name} is busy: another process has held its write lock for "
    f"{BUSY_TIMEOUT_S} s",
    sqlite3.SQLITE_FULL: "no room is left for database {name} on its disk; make some",
    sqlite3.SQLITE_CORRUPT: "database {name} is damaged ({cause}); restore a copy, or "
    "save what is left by `sqlite3 {name} .recover | sqlite3 rescued.db`",
    "55P03": "database {name} is busy: another process holds what is needed ({cause})",
    "57014": "database {name}: {cause}; ALTER ROLE ... SET statement_timeout = '2h' allows more",
}
"""What is said of SQLite's primary result codes and PostgreSQL's SQLSTATEs."""
_LATER = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL),
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN),
    *("08", "25", "3D", "3F", "40", "53", "55", "57", "58"),
)
"""Result codes of SQLite and classes of SQLSTATE that may be gone next time: locked, full, away,
failing over, rolled back for another transaction."""
_REFUSED = re.compile(r"unsupported startup parameter: (\w+)")
"""What PgBouncer says of a parameter that it does not pass on."""


@contextmanager
def translated(url: URL) -> Iterator[None]:
    """Turns the driver's errors into one-line :class:`DatabaseError`, :class:`UnavailableError`
    where trying again is right.

    Integrity errors pass: who inserts knows what they mean.
    """
    try:
        yield
    except IntegrityError:
        raise
    except PoolTimeoutError as error:
        raise UnavailableError(
            f"database {shown(url)}: all its connections are in use; try again"
        ) from error
    except DBAPIError as error:
        raise _explained(url, error) from error


def _explained(url: URL, error: DBAPIError) -> DatabaseError:
    cause, code = error.orig, getattr(error.orig, "sqlstate", None)
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    # The server's own sentence if there is one: the driver adds the statement, over several lines.
    said = getattr(getattr(cause, "diag", None), "message_primary", None) or cause
    # The server's errors carry a code: without one there is no connection.
    is_away = code is None and isinstance(error, OperationalError)
    if is_away and (refused := _REFUSED.search(str(said))):
        return DatabaseError(
            f"database {shown(url)}: its pooler refuses {refused[1]!r}; leave it out of the URL, "
            "or let the pooler ignore it (ignore_startup_parameters)"
        )
    line = "cannot reach " + _PLAIN if is_away else _SAID.get(code, _PLAIN)
    may_pass = is_away or (code[:2] if isinstance(code, str) else code) in _LATER
    kind = UnavailableError if may_pass else DatabaseError
    return kind(line.format(name=shown(url), cause=" ".join(str(said).split())))
