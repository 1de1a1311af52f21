"""One decorator for everything that numba compiles: typed, cached on disk, never stale, free of
reference counts.

numba keys its disk cache on the file that holds the function, so a kernel that inlines a function
of another module would outlive an edit there. :func:`compiled` adds what the function uses to the
key. numba itself is imported by the first call: reading a policy document takes none."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def compiled(*, inline: bool = False) -> Callable[[F], F]:
    """Compiles a function to machine code that releases the GIL and allocates nothing.

    ``inline`` puts its code into every compiled caller. Division follows IEEE rules (no
    ZeroDivisionError) and indices are not checked. Where no cache folder is writable, or this numba
    keeps its cache otherwise than known, the function is compiled anew in every process instead."""
    return cast(Callable[[F], F], functools.partial(Compiled, inline=inline))


class Compiled:
    """A function that numba takes over at its first call, from Python or from compiled code."""

    def __init__(self, function: Callable[..., Any], inline: bool) -> None:
        functools.update_wrapper(self, function)
        self._function, self._inline = function, inline
        path = function.__code__.co_filename
        stat = os.stat(path) if os.path.exists(path) else None
        # As it was imported: what is edited before the first call is not taken for it.
        self._source = (path, stat.st_mtime, stat.st_size) if stat else (path, 0.0, 0)

    def __call__(self, *arguments: Any) -> Any:
        return self.dispatcher(*arguments)

    @property
    def _numba_type_(self) -> Any:
        """What numba asks of a value that compiled code refers to."""
        return self.dispatcher._numba_type_

    def stamps(self) -> set[str]:
        """What the machine code depends on: its source file, the constants that it reads, and the
        same of every compiled function that it calls."""
        stamps = {repr(self._source)}
        names, scope = {*_names(self._function.__code__)}, self._function.__globals__
        modules = (vars(scope[n]) for n in names if isinstance(scope.get(n), ModuleType))
        for name, value in ((n, s[n]) for s in (scope, *modules) for n in names if n in s):
            if isinstance(value, Compiled) and value is not self:
                stamps |= value.stamps()
            elif isinstance(value, (int, float, str, tuple)):
                stamps.add(f"{name} {value!r}")
        return stamps

    @functools.cached_property
    def dispatcher(self) -> Any:
        """numba's own object."""
        import numba

        options = {"nogil": True, "error_model": "numpy", "forceinline": self._inline}
        try:
            # Counting references to arrays passed between functions takes longer than a whole
            # round; nothing here allocates. numba has no public way to say what a function
            # depends on. Of an index of another version it reads nothing, and so trips over no
            # type that is there no more.
            dispatcher = numba.njit(cache=True, _nrt=False, **options)(self._function)
            index = dispatcher._cache._cache_file
            index._version = repr((index._version, sorted(self.stamps())))
        except (RuntimeError, AttributeError, KeyError):
            dispatcher = numba.njit(**options)(self._function)
        return dispatcher


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function, and those within it, look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
