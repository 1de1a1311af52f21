"""One decorator for everything that numba compiles: typed, cached on disk, never stale, free of
reference counts.

numba keys its disk cache on the file that holds the function, so a kernel that inlines a function
of another module would outlive an edit there. :func:`compiled` adds the other files' stamps to the
key. numba itself is imported by the first call: reading a policy document takes none.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


_depends: dict[str, set[str]] = {__file__: set()}
"""Source files that each source file's compiled functions depend on."""


def compiled(*depends_on: ModuleType, inline: bool = False) -> Callable[[F], F]:
    """Compiles a function to machine code that releases the GIL and allocates nothing.

    ``depends_on``: modules whose compiled functions or constants it uses (what those use in turn
    need not be named). ``inline`` puts its code into every compiled caller. Division follows IEEE
    rules (no ZeroDivisionError) and indices are not checked. Where no cache folder is writable, or
    this numba keeps its cache otherwise than known, the function is compiled anew in every process
    instead.
    """

    def decorate(function: F) -> F:
        source = function.__code__.co_filename
        used = {m.__file__ for m in depends_on if m.__file__ is not None}
        _depends.setdefault(source, {__file__}).update(used)
        stamps = tuple(_stamp(path) for path in (source, *sorted(_closure(source) - {source})))
        return cast(F, Compiled(function, stamps, inline))

    return decorate


class Compiled:
    """A function that numba takes over at its first call, from Python or from compiled code.

    ``stamps`` are of the sources as they were imported: what is edited before that call is not
    taken for it.
    """

    _making = threading.Lock()  # two threads must not make two of one function

    def __init__(self, function: Callable[..., Any], stamps: tuple[Any, ...], inline: bool) -> None:
        functools.update_wrapper(self, function)
        self._function, self._stamps, self._inline = function, stamps, inline
        self._made: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._made or self.dispatcher)(*arguments)

    @property
    def _numba_type_(self) -> Any:
        """What numba asks of a value that compiled code refers to."""
        return self.dispatcher._numba_type_

    @property
    def dispatcher(self) -> Any:
        """numba's own object."""
        with self._making:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> Any:
        import numba

        options = {"nogil": True, "error_model": "numpy", "forceinline": self._inline}
        try:
            # Counting references to arrays passed between functions takes longer than a whole
            # round; nothing here allocates. numba has no public way to say what a function
            # depends on.
            made = numba.njit(cache=True, _nrt=False, **options)(self._function)
            index = made._cache._cache_file
            index._source_stamp = (index._source_stamp, *self._stamps)
        except (RuntimeError, AttributeError, KeyError):
            made = numba.njit(**options)(self._function)
        return made


def _closure(source: str) -> set[str]:
    sources, waiting = set[str](), {source}
    while waiting:
        sources |= waiting
        waiting = {used for path in waiting for used in _depends.get(path, ())} - sources
    return sources


def _stamp(path: str) -> tuple[str, float, int]:
    stat = os.stat(path) if os.path.exists(path) else None
    return (path, stat.st_mtime, stat.st_size) if stat else (path, 0.0, 0)
