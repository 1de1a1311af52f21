"""What a user writes after ``--db``: read, refused when it is almost right, and shown without its
secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import quote, quote_plus

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from spectune.db.errors import DatabaseError

_POSTGRES = ("postgres", "postgresql", "postgresql+psycopg")
_SQLITE = ("sqlite", "sqlite+pysqlite")
_REMEDY = (
    "write a file name (./NAME if it has a colon), sqlite:///FILE or postgresql://USER@HOST/NAME"
)
_MEMORY = f"an in-memory database keeps nothing; {_REMEDY}"
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_LIKE_URL = re.compile(r"[A-Za-z][\w+.-]*:|.*://|.*:[^/]*@", re.DOTALL)
"""A scheme, also one that lacks its slashes, or a user with a password: no file name, or a password
would become one."""
_SECRET = re.compile(r"pass(?!file)|secret|token|scram_.*_key", re.IGNORECASE)
"""Options of a URL whose values are secret."""
_STARS = "***"


def parse_url(text: str) -> URL:
    """The SQLAlchemy URL meant by ``text``: a file name, ``sqlite:///FILE``, or
    ``postgres[ql][+psycopg]://...``.

    Raises :class:`DatabaseError` with the forms that are understood; it never repeats what was
    given, which may hold a password.
    """
    text = text.strip()
    if not text:
        raise DatabaseError(f"the database URL is empty; {_REMEDY}")
    if text in (":memory:", "sqlite::memory:"):
        raise DatabaseError(_MEMORY)
    if _DRIVE.match(text) or not _LIKE_URL.match(text):
        return _file(text)
    try:
        url = make_url(text)
    except ArgumentError:
        raise DatabaseError(f"the database URL is not understood; {_REMEDY}") from None
    except ValueError:
        raise DatabaseError(
            f"cannot read the database URL: its port is no number; {_REMEDY}"
        ) from None
    if url.drivername in _POSTGRES:
        return _postgresql(text, url)
    if url.drivername in _SQLITE:
        return _sqlite(url)
    raise DatabaseError(f"unknown kind of database {url.drivername!r}; {_REMEDY}")


def _file(path: str) -> URL:
    return URL.create(
        "sqlite", database=os.path.expanduser(path)
    )  # Path.expanduser raises for an unknown user


def _sqlite(url: URL) -> URL:
    if url.host or url.username or url.password:
        raise DatabaseError(
            "the database URL is not understood: sqlite takes three slashes before the file's "
            f"name; {_REMEDY}"
        )
    if not url.database or url.database == ":memory:":
        raise DatabaseError(_MEMORY)
    if url.query:
        raise DatabaseError(f"a sqlite URL takes no options after its file name; {_REMEDY}")
    return _file(url.database)


def _postgresql(text: str, url: URL) -> URL:
    account = text.partition("://")[2].rpartition("@")[0]
    if re.search(r"[@/?#]", account):
        # Read on, a part of the password would be the host's name, and named in errors.
        raise DatabaseError(
            "cannot read the database URL: write @ / ? # within a user's name or password, and @ "
            "within an option, as %40 %2F %3F %23"
        )
    if find_spec("psycopg") is None:
        raise DatabaseError("PostgreSQL needs psycopg: `pip install 'psycopg[binary]'`")
    from psycopg import pq

    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    for name in url.query:
        if name not in known:
            raise DatabaseError(
                f"the database URL has an unknown option {name!r}; libpq's connection parameters "
                "are understood"
            )
    return url.set(drivername="postgresql+psycopg")


def shown(url: URL) -> str:
    """The URL for messages, as people type it, without its secrets; a file is shown by its name."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    hidden = url.update_query_dict({name: _STARS for name in url.query if _SECRET.search(name)})
    hidden = hidden.set(drivername=url.get_backend_name())  # without the driver's name
    return hidden.render_as_string(hide_password=True).replace(quote_plus(_STARS), _STARS)


def has_secret(url: URL) -> bool:
    """Whether it holds a password, or another option that is secret."""
    return any(True for _ in _secrets(url))


def masked(url: URL, text: str) -> str:
    """``text`` without the secrets of ``url``, as they are and as a URL writes them."""
    forms = {
        form
        for secret in _secrets(url)
        for form in (secret, quote(secret, safe=""), quote_plus(secret))
    }
    for form in sorted(forms, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", _STARS, text)
    return text


def _secrets(url: URL) -> Iterator[str]:
    if url.password:
        yield str(url.password)
    for name, value in url.query.items():
        if _SECRET.search(name):
            yield from (part for part in ((value,) if isinstance(value, str) else value) if part)
