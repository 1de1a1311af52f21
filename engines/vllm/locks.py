"""Locks on the folder between a server and what is beside it: one `follow`, and one tuning, at a
time. The system takes a lock away when the process that holds it ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, Literal

from spectune.traces.errors import TraceError
from spectune.traces.files import private
from spectune.traces.text import one_line

Use = Literal["follow", "tune"]
PROBED_S: Final = 0.5
"""Seconds that a lock is waited for: :func:`is_locked` holds it for a moment."""


class FolderLock:
    """Held until :meth:`release`, or the end of the process. ``how`` says in what way the folder is
    used (``followed into traffic.db``): who comes later is refused with it, by TraceError."""

    def __init__(self, folder: Path, use: Use, how: str) -> None:
        path = _path(folder, use)
        try:
            self._file = open(path, "a+b", opener=private)  # noqa: SIM115  (:meth:`release`)
        except OSError as error:
            raise TraceError(f"{path}: cannot be written ({error.strerror})") from None
        deadline = time.monotonic() + PROBED_S
        while not _is_taken(self._file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                holder = _text(self._file)[0]
                self._file.close()
                raise TraceError(
                    f"{folder} is {holder or 'used by another process'}; end that `{use}` first"
                )
            time.sleep(0.05)
        text = f"{how} already (process {os.getpid()} on {socket.gethostname()})"
        with suppress(OSError):  # a full disk: the lock holds without a name
            self._file.truncate(0)
            self._file.write(text.encode())
            self._file.flush()

    def name_database(self, name: str) -> None:
        """Says with which database the folder is used, by its id (:func:`database_of`)."""
        with suppress(OSError):
            self._file.write(f"\n{name}".encode())
            self._file.flush()

    def release(self) -> None:
        self._file.close()

    def __enter__(self) -> None:
        """Nothing more: it is held."""

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(folder: Path, use: Use) -> bool:
    """Whether a process uses the folder in this way now."""
    return _holder(folder, use) is not None


def database_of(folder: Path, use: Use) -> tuple[str, str]:
    """How a process uses the folder now, and the id of the database that it does so with; both
    empty where none does, or that is not known."""
    return _holder(folder, use) or ("", "")


def _holder(folder: Path, use: Use) -> tuple[str, str] | None:
    """What who holds a lock wrote into it; None where nobody does. Raises TraceError."""
    try:
        file = _path(folder, use).open("rb")
    except OSError:  # nobody ever has
        return None
    with file:
        return None if _is_taken(file.fileno(), fcntl.LOCK_SH) else _text(file)


def _text(file: BinaryIO) -> tuple[str, str]:
    """What stands in a lock: how the folder is used, and the id of a database."""
    file.seek(0)
    how, _, database = file.read().decode(errors="replace").partition("\n")
    return one_line(how, 300), database


def _path(folder: Path, use: Use) -> Path:
    return folder / f"{use}.lock"


def _is_taken(file: int, kind: int) -> bool:
    """Takes a lock where it is free. Raises TraceError where there are no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise TraceError(
            f"the folder's file system has no locks ({error.strerror}); keep it on another one"
        ) from None
    return True
