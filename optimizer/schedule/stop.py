"""A clean stop on SIGINT and SIGTERM, with a way to hurry it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger("spectune.schedule")


class HandBack(KeyboardInterrupt):
    """Raised in a job function to end it at once and queue the job again. Not an Exception, so that no handler swallows it."""


class Stopper:
    """Turns SIGINT and SIGTERM into a clean stop: the first lets the job at hand finish, the next hands it back at once."""

    def __init__(self, event: threading.Event | None = None) -> None:
        self.event = event or threading.Event()
        self._is_busy = False

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Marks the part that a second signal may interrupt."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    @contextmanager
    def listening(self) -> Iterator[Stopper]:
        """Listens to signals, if in the main thread; handlers are put back at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._is_busy and self.event.is_set():
            raise HandBack
        self.event.set()
        if self._is_busy:
            log.warning("%s: finishing the job at hand; once more to hand it back", signal.Signals(number).name)
