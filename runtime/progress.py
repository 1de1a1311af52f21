"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (phase, completed, total)."""


def silent(phase: str, completed: int, total: int) -> None:
    """A :data:`Progress` that shows nothing."""
