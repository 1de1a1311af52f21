"""Finds, proves and keeps the best speculative-decoding policy for a target, its drafts, a device
and its traffic.

The folders of the repository are this package's: ``spectune.runtime`` is ``runtime/``. Importing it
imports nothing else; its calls are :mod:`spectune.optimizer.python`'s, imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectune.optimizer.python import Result, open, record, run, simulate, tune

__all__ = ["Result", "open", "record", "run", "simulate", "tune"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'spectune' has no attribute {name!r}")
    from spectune.optimizer import python

    return getattr(python, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
