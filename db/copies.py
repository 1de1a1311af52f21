"""The copy of a SQLite file that an upgrade leaves beside it."""

from __future__ import annotations

import filecmp
import glob
import itertools
import os
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

from spectune.db.errors import DatabaseError
from spectune.db.migrate import VERSION_TABLE
from spectune.db.sqlite import real_path


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
        for left in path.parent.glob(
            f"{glob.escape(name)}.*.part*"
        ):  # of processes that were killed: we hold the lock
            left.unlink()
        try:
            _back_up(path, partial, revision)
            return _put_in_place(partial, name)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise DatabaseError(
            f"cannot put a copy of {path} beside it before upgrading it: {error}; nothing was "
            "changed"
        ) from error


def _back_up(path: Path, partial: Path, revision: str) -> None:
    # The backup API and not a file copy: committed pages may still be in the write-ahead log.
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as copy:
        source.backup(copy)
        found = copy.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall()
    if found != [(revision,)]:
        raise DatabaseError(
            f"the copy of {path} is at schema {found}, not at {revision}; nothing was changed"
        )


def _put_in_place(partial: Path, name: str) -> Path:
    for number in itertools.count(1):
        target = partial.with_name(name if number == 1 else f"{name}-{number}")
        if not target.exists():
            break
        if filecmp.cmp(partial, target, shallow=False):
            return target
    partial.replace(target)
    _persist(target.parent)
    return target


def _persist(folder: Path) -> None:
    """A new name survives a power cut only once its folder is on the disk. Windows cannot say so,
    and need not."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
