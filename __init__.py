"""Finds, proves and keeps the best speculative-decoding policy for a target, its drafts, a device
and its traffic.

The folders of the repository are this package's: ``spectune.runtime`` is ``runtime/``. Importing it
imports nothing else; its calls are :mod:`spectune.api`'s, imported at first use.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'spectune' has no attribute {name!r}")
    return getattr(importlib.import_module("spectune.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("spectune.api").__all__})
