"""Waiting for what another thread or process is to bring about."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 240.0
"""Far more than anything takes on a busy machine: who takes longer hangs."""


def eventually(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Returns once it holds; a test that waits in vain fails."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
