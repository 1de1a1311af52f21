"""SHA-256 of whole files. Those of large ones are remembered in the user's cache folder, so that a
checkpoint is read once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from spectune.traces.files import replacing

RACY_NS = 2 * 10**9
"""A file modified this shortly before it was read may change once more and keep its time stamps:
its hash is not remembered."""
LARGE_BYTES = 1 << 24
"""Files from this size on are remembered beyond the process; smaller ones take less time to read
than to look up."""

State = tuple[int, int, int, int]
"""Size in bytes, time of modification and of change in ns, inode."""


class FileHashes:
    """Hashes by path, remembered while the file system says that the file is the same.

    ``cache`` is the file that outlasts the process (None: none does). A damaged, missing or
    unwritable one costs time and nothing else.
    """

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._known: dict[str, tuple[State, str]] = {}

    def of(self, path: Path) -> str:
        """64 hex digits over a file's content. Raises OSError."""
        file = path.resolve(strict=True)
        key, state, large = str(file), _state(file), file.stat().st_size >= LARGE_BYTES
        if key not in self._known and large:
            self._known = self._read() | self._known
        known = self._known.get(key)
        if known is not None and known[0] == state:
            return known[1]
        began = time.time_ns()
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if _state(file) == state and max(state[1:3]) + RACY_NS < began:
            self._known[key] = state, digest
            if large:
                self._write(key)
        return digest

    def _read(self) -> dict[str, tuple[State, str]]:
        if self._cache is not None:
            # A damaged one fails in more ways than can be listed.
            with contextlib.suppress(Exception):
                found = json.loads(self._cache.read_text(encoding="utf-8"))["files"]
                return {
                    key: ((int(size), int(mtime), int(ctime), int(inode)), str(digest))
                    for key, (size, mtime, ctime, inode, digest) in found.items()
                }
        return {}

    def _write(self, key: str) -> None:
        if self._cache is None:
            return
        known = (self._read() | {key: self._known[key]}).items()
        files = {name: [*state, digest] for name, (state, digest) in known if os.path.isfile(name)}
        with contextlib.suppress(OSError):
            self._cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self._cache) as file:
                file.write(json.dumps({"files": files}).encode())


def _state(file: Path) -> State:
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def cache_folder() -> Path | None:
    """Where what can be made again is kept: ``$XDG_CACHE_HOME/spectune`` or ``~/.cache/spectune``;
    None without a home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "spectune"


_FOLDER = cache_folder()
FILES = FileHashes(_FOLDER and _FOLDER / "file-hashes.json")
"""The hashes of this process."""
