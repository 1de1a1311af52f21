"""File systems of a few megabytes that fill up, where one may be mounted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Its file system has no byte left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    ballast.unlink()


def mounts(*arguments: str | Path) -> bool:
    """Whether the system mounts that for us."""
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", folder], check=True)
