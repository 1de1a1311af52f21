"""Locks on the folder between a server and what is beside it: one `follow`, and one tuning, at a
time. The system takes a lock away when the process that holds it ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from spectune.traces.errors import TraceError
from spectune.traces.text import one_line

Use = Literal["follow", "tune"]
PROBED_S: Final = 1.0
"""Seconds that a tuning waits for its lock: :func:`is_locked` holds it for a moment."""


class FolderLock:
    """Held until :meth:`release`, or the end of the process. ``how`` says in what way the folder is
    used (``followed into traffic.db``): who comes later is refused with it, by TraceError."""

    def __init__(self, folder: Path, use: Use, how: str) -> None:
        path = _path(folder, use)
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise TraceError(f"{path}: cannot be written ({error.strerror})") from None
        deadline = time.monotonic() + (PROBED_S if use == "tune" else 0)
        while not _is_taken(self._file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                self._file.seek(0)
                holder = one_line(self._file.read().decode(errors="replace"), 300)
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

    def release(self) -> None:
        self._file.close()

    def __enter__(self) -> None:
        """Nothing more: it is held."""

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(folder: Path, use: Use) -> bool:
    """Whether a process uses the folder in this way now."""
    try:
        with _path(folder, use).open("rb") as file:
            return not _is_taken(file.fileno(), fcntl.LOCK_SH)
    except OSError:  # nobody ever has
        return False


def _path(folder: Path, use: Use) -> Path:
    return folder / f"{use}.lock"


def _is_taken(file: int, kind: int) -> bool:
    """Takes a lock where it is free."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
