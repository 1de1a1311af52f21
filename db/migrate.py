"""The schema's history: which revision a database has, how to bring it to ours, and the copy of a
SQLite file that is left beside it then."""

from __future__ import annotations

import filecmp
import glob
import itertools
import os
import secrets
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from spectune.db.errors import DatabaseError, SchemaError
from spectune.db.models import metadata
from spectune.db.sqlite import real_path

VERSION_TABLE = "spectune_schema"
_FOLDER = Path(__file__).with_name("migrations")
# Alembic keeps the running migration in module globals.
_ALEMBIC = threading.Lock()


def revisions() -> tuple[str, ...]:
    """Every revision this program knows, oldest first: what the names of their files begin with."""
    files = (_FOLDER / "versions").glob("[0-9]*_*.py")
    return tuple(sorted(file.name.partition("_")[0] for file in files))


def head() -> str:
    """The revision this program works with."""
    return revisions()[-1]


def current(connection: Connection) -> str | None:
    """The revision a database has, or None if it never had one. Raises :class:`SchemaError` for
    more than one."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()
    if len(found) > 1:
        raise SchemaError(
            f"table {VERSION_TABLE} names {len(found)} schemas, not one; restore the database from "
            "a backup"
        )
    return str(found[0]) if found else None


def foreign_tables(connection: Connection) -> list[str]:
    """Tables that keep a database without a revision from becoming ours: any on SQLite, those with
    our names elsewhere."""
    names = set(inspect(connection).get_table_names()) - {VERSION_TABLE}
    return sorted(names if connection.dialect.name == "sqlite" else names & set(metadata.tables))


def migrate(connection: Connection, to: str = "head") -> None:
    """Upgrades inside the caller's transaction, so that a crash leaves the old schema whole."""
    from alembic import command  # imported by what migrates alone
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _ALEMBIC:
        command.upgrade(config, to)


def keep_copy(path: Path, revision: str) -> Path:
    """Puts a copy of the file at ``revision`` beside it and returns its name,
    ``NAME.before-REVISION`` or with ``-2``, ``-3``, ...

    Of a link it lies beside what that points to. Call it while this process holds the file's write
    lock: then it copies what is about to be upgraded, and nobody else copies. A copy that is there
    is never replaced; an equal one, of an upgrade that was killed, is the copy. It appears under
    its name whole and on the disk. Raises :class:`DatabaseError` when it cannot be made, and leaves
    nothing then.
    """
    path = real_path(path)
    name = f"{path.name}.before-{revision}"
    partial = path.with_name(f"{name}.{secrets.token_hex(4)}.part")
    try:
        # Those of processes that were killed: we hold the lock.
        for left in path.parent.glob(f"{glob.escape(name)}.*.part*"):
            left.unlink()
        try:
            # The backup API, not a file copy: committed pages may still be in the write-ahead log.
            with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as to:
                source.backup(to)
            return _put_in_place(partial, name)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise DatabaseError(
            f"cannot put a copy of {path} beside it before upgrading it: {error}; nothing was "
            "changed"
        ) from error


def _put_in_place(partial: Path, name: str) -> Path:
    for number in itertools.count(1):
        target = partial.with_name(name if number == 1 else f"{name}-{number}")
        if not target.exists():
            break
        if filecmp.cmp(partial, target, shallow=False):
            return target
    partial.replace(target)
    if os.name == "posix":
        # A new name survives a power cut only once its folder is on the disk.
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return target
