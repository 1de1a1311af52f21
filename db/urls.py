"""What a user writes after ``--db``, read and shown."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from db.errors import DatabaseError

_POSTGRES = ("postgres", "postgresql", "postgresql+psycopg")
_REMEDY = "write a file name, sqlite:///FILE or postgresql://USER@HOST/NAME"


def parse_url(text: str) -> URL:
    """The SQLAlchemy URL meant by ``text``: a file name, ``sqlite:///FILE``, or ``postgres[ql][+psycopg]://...``.

    Raises :class:`DatabaseError` with the forms that are understood.
    """
    if not text.strip():
        raise DatabaseError(f"the database URL is empty; {_REMEDY}")
    if "://" not in text:
        path = text.removeprefix("sqlite:")
        if path == ":memory:":
            raise DatabaseError(f"an in-memory database keeps nothing; {_REMEDY}")
        return URL.create("sqlite", database=str(Path(path).expanduser()))
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise DatabaseError(f"cannot read the database URL; {_REMEDY}") from None
    if url.drivername in _POSTGRES:
        if find_spec("psycopg") is None:
            raise DatabaseError("PostgreSQL needs psycopg: pip install 'spectune[postgresql]'")
        return url.set(drivername="postgresql+psycopg")
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        if not url.database or url.database == ":memory:":
            raise DatabaseError(f"an in-memory database keeps nothing; {_REMEDY}")
        return URL.create("sqlite", database=str(Path(url.database).expanduser()))
    raise DatabaseError(f"unknown kind of database {url.drivername!r}; {_REMEDY}")


def shown(url: URL) -> str:
    """The URL for messages, without its password; a file is shown by its name."""
    return str(url.database) if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)
