"""Files that users name: read as text or JSON, with one line for every mistake; written whole or
not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from spectune.traces.errors import SpectuneError
from spectune.traces.text import shortened


def read_text(
    path: str | Path, where: str, error: type[SpectuneError], *, missing: str = "no such file"
) -> str:
    """A file's text, UTF-8 with or without a byte-order mark.

    Raises ``error``, its line beginning with ``where``: ``missing`` where no file is, or why it
    cannot be read.
    """
    where = shortened(where)
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (FileNotFoundError, IsADirectoryError):
        raise error(f"{where}: {missing}") from None
    except OSError as problem:
        raise error(f"{where}: cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError as problem:
        raise error(f"{where}: not UTF-8 text (byte {problem.start})") from None


def private(path: str | Path, flags: int) -> int:
    """Opens a file (an ``opener`` of :func:`open`); a new one is its user's alone, whatever the
    umask, as texts of users may be in it. Raises OSError."""
    return os.open(path, flags, 0o600)


def parse_json(text: str, where: str, error: type[SpectuneError]) -> Any:
    """A JSON document from a user. Raises ``error``, its line beginning with ``where``, for what is
    none."""
    try:
        return json.loads(text)
    except ValueError as problem:
        raise error(f"{shortened(where)}: not JSON ({problem})") from None
    except RecursionError:
        raise error(f"{shortened(where)}: not JSON (nested too deeply)") from None


def json_lines(text: str, where: str, error: type[SpectuneError]) -> Iterator[tuple[int, str, Any]]:
    """Each line of JSON lines that is not blank: its number, where it stands, and what it says, or
    the ``error`` that says why it is no JSON. Lines end at a line feed alone: strings of JSON may
    hold other separators, such as U+2028."""
    for n, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place, value = f"{where}:{n}", None
            try:
                value = parse_json(line, place, error)
            except error as problem:
                value = problem
            yield n, place, value


def read_json(
    path: str | Path, where: str, error: type[SpectuneError], *, missing: str = "no such file"
) -> Any:
    """:func:`parse_json` of :func:`read_text`."""
    return parse_json(read_text(path, where, error, missing=missing), where, error)


def why_not_writable(path: str | Path) -> str | None:
    """Why no file can be put at ``path`` and what to do about it, or None, as far as that can be
    told beforehand."""
    target = Path(path)
    folder = target.absolute().parent
    try:
        target.resolve()
        if not folder.is_dir():
            return f"there is no folder {shortened(str(folder))}; make it, or name another file"
        if target.exists() and not target.is_file():
            return "no regular file, so that it cannot be replaced; name another file"
    except (OSError, ValueError, RuntimeError) as error:  # a link to itself
        return f"cannot be written ({getattr(error, 'strerror', None) or error}); name another file"
    if not os.access(folder, os.W_OK):
        return f"folder {folder} is not writable; name another file"
    return None


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends; when it raises, ``path`` is
    as it was and nothing is left beside it. It is its user's alone (:func:`private`), but for what
    the file in whose place it comes allowed others. A link at ``path`` is replaced, not followed.
    Raises OSError."""
    target = Path(path)
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "no regular file", str(target))
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb", opener=private) as file:
            if target.exists() and not target.is_symlink():
                part.chmod(target.stat().st_mode & 0o777)
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
