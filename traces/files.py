"""Files that users name: read as text or JSON, with one line for every mistake; written whole or
not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from spectune.traces.errors import SpectuneError
from spectune.traces.text import shortened, unstorable

SIZE_LIMIT = 1 << 30
"""Bytes of a file that is read at once."""
_DEPTH_LIMIT = 64
"""Levels of JSON: many times what any of our documents has, and few enough for everything that
walks one."""


def read_text(
    path: str | Path, where: str, error: type[SpectuneError], *, missing: str = "no such file"
) -> str:
    """A file's text, UTF-8 with or without a byte-order mark.

    Raises ``error``, its line beginning with ``where``: ``missing`` where no regular file is, or
    why it cannot be read.
    """
    file, where = Path(path), shortened(where)
    try:
        if not file.is_file():
            raise error(f"{where}: {missing}")
        if file.stat().st_size > SIZE_LIMIT:
            raise error(f"{where}: larger than {SIZE_LIMIT >> 30} GiB")
        return file.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise error(f"{where}: cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError as problem:
        raise error(f"{where}: not UTF-8 text (byte {problem.start})") from None


def parse_json(text: str, where: str, error: type[SpectuneError], *, storable: bool = True) -> Any:
    """A JSON document from a user. Raises ``error``, its line beginning with ``where``, for what is
    none, and unless it need not be ``storable`` as :func:`check_storable` does."""
    where = shortened(where)
    try:
        data = json.loads(text)
    except RecursionError:
        raise error(f"{where}: not JSON (nested too deeply)") from None
    except ValueError as problem:
        raise error(f"{where}: not JSON ({problem})") from None
    if storable:
        check_storable(data, where, error)
    return data


def check_storable(data: Any, where: str, error: type[SpectuneError]) -> None:
    """Raises ``error``, its line beginning with ``where``, for JSON that is nested beyond reason,
    or holds text that no database keeps."""
    level = [data]
    for _ in range(_DEPTH_LIMIT):
        for entry in level:
            if isinstance(entry, str) and (found := unstorable(entry)):
                raise error(f"{where}: {found}")
        level = [inner for entry in level for inner in _inside(entry)]
        if not level:
            return
    raise error(f"{where}: not JSON of ours (nested more than {_DEPTH_LIMIT} deep)")


def read_json(
    path: str | Path, where: str, error: type[SpectuneError], *, missing: str = "no such file"
) -> Any:
    """:func:`parse_json` of :func:`read_text`."""
    return parse_json(read_text(path, where, error, missing=missing), where, error)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else []


def why_not_writable(path: str | Path) -> str | None:
    """Why no file can be put at ``path`` and what to do about it, or None, as far as that can be
    told beforehand."""
    target = Path(path)
    try:
        there = target.stat() if target.exists() else None
        target.resolve()
        folder = target.absolute().parent
        if not folder.is_dir():
            return f"there is no folder {shortened(str(folder))}; make it, or name another file"
    except RuntimeError:  # as Path.resolve has it
        return "cannot be written (a link to itself); name another file"
    except (OSError, ValueError) as error:
        return f"cannot be written ({getattr(error, 'strerror', None) or error}); name another file"
    if there is not None and not target.is_file():
        return "no regular file, so that it cannot be replaced; name another file"
    if not os.access(folder, os.W_OK):
        return f"folder {folder} is not writable; name another file"
    return None


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends; when it raises, ``path`` is
    as it was and nothing is left beside it.

    It is made under a name that nobody can foresee and never through a link, with the permissions
    of any new file; a link at ``path`` is replaced, not followed. Raises OSError.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "no regular file", str(target))
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    never_followed = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | never_followed, 0o666)
    try:
        with open(handle, "wb") as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
