"""Driver errors as one line for the user: which database, what happened, what to do, and whether
trying again is right."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from spectune.db.errors import DatabaseError, UnavailableError
from spectune.db.sqlite import BUSY_TIMEOUT_S
from spectune.db.urls import masked, shown

_LATER = frozenset(
    {"55P03", "57014", "40001", "40P01", "25006", "25P03", "42P01", "3D000", "3F000"}
)
"""SQLSTATEs that may be gone next time: locked, out of time, serialization, deadlock; a standby's
refusal to write, a transaction that stood idle; no such table, database, schema."""
_LATER_CLASSES = frozenset({"08", "53", "57", "58"})
"""Connection, resources, an operator's doing, the system around it."""
_LATER_SQLITE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
    }
)
_NO_TABLE = re.compile(r'no such table: (?:main\.)?(\S+)|relation "(\S+)" does not exist')


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
    except DBAPIError as error:
        kind = UnavailableError if _may_pass(error) else DatabaseError
        raise kind(_explain(url, error)) from error
    except PoolTimeoutError as error:
        raise UnavailableError(
            f"database {shown(url)}: all its connections are in use; try again"
        ) from error


CHECK_IT = "; run `db check` to see what is still usable"
"""What is said of a damaged database, but by that command."""
_SQLITE_SAYS = {
    "not a database": "{name} is not a SQLite database; name another file",
    "unable to open": "cannot open database file {name}: check that it exists and that its folder "
    "can be written",
    "readonly": "database file {name} is read-only; check its permissions and its folder's",
    "locked": "database {name} is busy: another process has held its write lock for "
    f"{BUSY_TIMEOUT_S} s",
    "malformed": "database {name} is damaged ({cause})" + CHECK_IT,
}
"""What the user reads where SQLite's message has these words."""
_POSTGRESQL_SAYS = {
    "57014": "database {name}: {cause}; add ?options=-c%20statement_timeout=2h to its URL to allow "
    "more",
    "55P03": "database {name} is busy: another process holds what is needed ({cause})",
}
"""The same by SQLSTATE."""


def _explain(url: URL, error: DBAPIError) -> str:
    """One line for a user: which database, what happened, what to do."""
    name, cause, code = shown(url), masked(url, _cause(error)), _code(error)
    if missing := _NO_TABLE.search(cause):
        return (
            f"database {name} has no table {missing[1] or missing[2]!r}; if it was made anew run "
            "`db upgrade`, else restore a copy of it"
        )
    said = "database {name}: {cause}"
    if url.get_backend_name() == "sqlite":
        said = next((line for words, line in _SQLITE_SAYS.items() if words in cause), said)
    elif code is None and ("connect" in cause or "resolve" in cause):
        # Errors of a server carry a code; without one the connection was not made or was lost.
        said = "cannot reach database {name}: {cause}"
    else:
        said = _POSTGRESQL_SAYS.get(code, said)
    return said.format(name=name, cause=cause)


def _cause(error: DBAPIError) -> str:
    # The server's own sentence if there is one: the driver adds the statement, over several lines.
    said = getattr(getattr(error.orig, "diag", None), "message_primary", None)
    return " ".join(str(said or error.orig).split())


def _code(error: DBAPIError) -> Any:
    """PostgreSQL's SQLSTATE or SQLite's primary result code; None for what the driver says by
    itself."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    return getattr(error.orig, "sqlstate", None) if code is None else code & 0xFF


def _may_pass(error: DBAPIError) -> bool:
    code = _code(error)
    if isinstance(code, int):
        return code in _LATER_SQLITE or _NO_TABLE.search(_cause(error)) is not None
    if isinstance(code, str):
        return code in _LATER or code[:2] in _LATER_CLASSES
    # Without a code: SQLite's bindings cannot read a value, or psycopg has no connection.
    return isinstance(error, OperationalError) and not isinstance(error.orig, sqlite3.Error)
