"""One decorator for everything that numba compiles: typed, cached on disk, never stale, free of reference counts.

numba keys its disk cache on the file that holds the function, so a kernel that inlines a function of another module would
outlive an edit there. :func:`compiled` adds the other files' stamps to the key.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


_depends: dict[str, set[str]] = {__file__: set()}
"""Source files that each source file's compiled functions depend on."""


def compiled(*depends_on: ModuleType, inline: bool = False) -> Callable[[F], F]:
    """Compiles a function to machine code that releases the GIL and allocates nothing.

    ``depends_on``: modules whose compiled functions or constants it uses (what those use in turn need not be named).
    ``inline`` puts its code into every compiled caller. Division follows IEEE rules (no ZeroDivisionError) and indices are not
    checked. Where no cache folder is writable, or this numba keeps its cache otherwise than known, the function is compiled anew
    in every process instead.
    """

    def decorate(function: F) -> F:
        source = function.__code__.co_filename
        _depends.setdefault(source, {__file__}).update(m.__file__ for m in depends_on if m.__file__ is not None)
        options = {"nogil": True, "error_model": "numpy", "forceinline": inline}
        try:
            # Counting references to arrays passed between functions takes longer than a whole round; nothing here allocates.
            dispatcher = numba.njit(cache=True, _nrt=False, **options)(function)
            index = dispatcher._cache._cache_file  # numba has no public way to say what a function depends on
            index._source_stamp = (index._source_stamp, *(_stamp(path) for path in sorted(_closure(source))))
        except (RuntimeError, AttributeError, KeyError):
            dispatcher = numba.njit(**options)(function)
        return cast(F, dispatcher)

    return decorate


def _closure(source: str) -> set[str]:
    found: set[str] = set()
    waiting = {source}
    while waiting:
        path = waiting.pop()
        found.add(path)
        waiting |= _depends.get(path, set()) - found
    return found - {source}


def _stamp(path: str) -> tuple[str, float, int]:
    if not os.path.exists(path):
        return (path, 0.0, 0)
    found = os.stat(path)
    return (path, found.st_mtime, found.st_size)
