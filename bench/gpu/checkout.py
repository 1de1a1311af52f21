"""Another tree of this package in one process with this one, so that their speeds are compared in
turns: by the same models, device, clock and minutes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "spectune"


class Checkout:
    """The package in ``folder/spectune`` (None: the one that runs). What it imports, also while it
    decodes, is its own inside :meth:`active`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._modules: dict[str, ModuleType] = {}

    @property
    def is_own(self) -> bool:
        return self._folder is None

    @contextmanager
    def active(self) -> Iterator[None]:
        if self._folder is None:
            yield
            return
        others = _taken()
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self._folder))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(str(self._folder))
            self._modules = _taken()
            sys.modules.update(others)

    def module(self, name: str) -> Any:
        """A module of the package, to be used inside :meth:`active` alone."""
        return importlib.import_module(f"{PACKAGE}.{name}")


def _taken() -> dict[str, ModuleType]:
    """The package's modules, which are not imported any more."""
    names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}
