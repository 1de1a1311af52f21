"""What SIGINT and SIGTERM do to a command that runs until it is ended."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("spectune.signals")


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Turns the first SIGINT or SIGTERM into ``stop``, in the main thread; the next one raises
    KeyboardInterrupt."""

    is_second = False

    def ends(name: str) -> None:
        nonlocal is_second
        if is_second:
            raise KeyboardInterrupt
        is_second = True
        stop.set()
        log.warning("%s: finishing what is at hand, if anything; once more to end now", name)

    with on_signals(ends):
        yield


@contextmanager
def on_signals(ends: Callable[[str], None]) -> Iterator[None]:
    """Calls ``ends`` with the name of each SIGINT and SIGTERM, in the main thread; elsewhere none
    comes."""

    def on_signal(number: int, frame: object) -> None:
        ends(signal.Signals(number).name)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
