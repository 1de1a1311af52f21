"""What a user writes after ``--db``: read, and shown without its passwords."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from spectune.db.database_errors import DatabaseError

_REMEDY = (
    "write a file name (./NAME if it has a colon), sqlite:///FILE or postgresql://USER@HOST/NAME"
)
_LIKE_URL = re.compile(r"\w[\w+.-]+:|.*://|.*:.*@", re.DOTALL)
"""A scheme, also without its slashes, or a user with a password: no file name."""
_SECRET = re.compile("pas|pw|secret|scram", re.IGNORECASE)
"""Options of a URL whose values may be secret, also misspelled."""


def parse_url(text: str) -> URL:
    """Returns the SQLAlchemy URL of a file name, ``sqlite:///FILE`` or ``postgresql://...``.

    Raises :class:`DatabaseError`, which never repeats what was given: it may hold a password.
    """
    text = text.strip()
    if not text:
        raise DatabaseError(f"the database URL is empty; {_REMEDY}")
    if not _LIKE_URL.match(text):
        return _file(text)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # ValueError: the port is no number
        raise DatabaseError(f"the database URL is not understood; {_REMEDY}") from None
    if url.drivername == "sqlite" and url.database and not (url.host or url.username or url.query):
        return _file(url.database)
    if url.drivername not in ("postgres", "postgresql", "postgresql+psycopg"):
        raise DatabaseError(f"the database URL is not understood; {_REMEDY}")
    if re.search(r"[@/?#]", text.partition("://")[2].rpartition("@")[0]):
        # Otherwise a part of the password would be the host's name, and named in errors.
        raise DatabaseError(
            "the database URL is not understood: write @ / ? # within a user's name or password, "
            "and @ within an option, as %40 %2F %3F %23"
        )
    if find_spec("psycopg") is None:
        raise DatabaseError("PostgreSQL needs psycopg: `pip install 'psycopg[binary]'`")
    threshold = url.query.get("prepare_threshold", "0")
    if str(threshold).lower() not in ("0", "none"):
        raise DatabaseError(
            f"prepare_threshold={threshold} of the database URL: statements are never prepared, so "
            "that poolers work; leave it out"
        )
    url = url.difference_update_query(["prepare_threshold"])
    return url.set(drivername="postgresql+psycopg")


def _file(path: str) -> URL:
    if path == ":memory:":
        raise DatabaseError(f"an in-memory database keeps nothing; {_REMEDY}")
    return URL.create("sqlite", database=os.path.expanduser(path))


def shown(url: URL) -> str:
    """Returns the URL for messages, as people type it, without its passwords; of a file its
    name."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    hidden = url.update_query_dict({name: "***" for name in url.query if _SECRET.search(name)})
    text = hidden.set(drivername="postgresql").render_as_string(hide_password=True)
    return text.replace("%2A%2A%2A", "***")
