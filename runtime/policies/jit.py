"""One decorator for everything that numba compiles: typed, cached on disk, and never stale.

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


def compiled(*depends_on: ModuleType) -> Callable[[F], F]:
    """Compiles a function to machine code that releases the GIL. ``depends_on``: modules whose compiled functions it calls.

    Division follows IEEE rules (no ZeroDivisionError) and indices are not checked. Where no cache folder is writable, or this
    numba keeps its cache otherwise than known, the function is compiled anew in every process instead.
    """

    def decorate(function: F) -> F:
        try:
            dispatcher = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
            if depends_on:
                index = dispatcher._cache._cache_file  # numba has no public way to say what a function depends on
                index._source_stamp = (index._source_stamp, *(_stamp(m) for m in depends_on))
        except (RuntimeError, AttributeError):
            dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
        return cast(F, dispatcher)

    return decorate


def _stamp(module: ModuleType) -> tuple[float, int]:
    if module.__file__ is None or not os.path.exists(module.__file__):
        return (0.0, 0)
    found = os.stat(module.__file__)
    return (found.st_mtime, found.st_size)
