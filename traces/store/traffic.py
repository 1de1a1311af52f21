"""Recording of served traffic beside the decode: a bounded queue, one thread, a transaction at most
a second apart.

Serving must never wait for a disk, so :meth:`TrafficWriter.put` only enqueues; packing, compression
(which releases the interpreter) and the commit happen in the writer's thread. When the database
cannot keep up, requests are dropped and counted; so are those that the database refuses for another
reason than that it is away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from spectune.db import DatabaseError, NotFoundError, UnavailableError
from spectune.traces.errors import TraceError
from spectune.traces.schema import Step
from spectune.traces.store.recordings import Recordings
from spectune.traces.store.rows import put_apart
from spectune.traces.tables import Trajectory

Item = tuple[Trajectory, tuple[Step, ...]]
CAPACITY = 1024
FLUSH_S = 1.0
_RETRY_S = 0.5


@dataclass(frozen=True)
class WriterStatus:
    """Requests handed over, by what became of them; ``pending`` are still queued. ``error`` is the
    last failure to write."""

    written: int
    dropped: int
    pending: int
    error: str | None


class TrafficWriter:
    """Appends requests to one recording from a thread of its own. A recording has one writer, which
    numbers the requests.

    What is in the queue when the process is killed is lost, at most ``flush_s`` seconds of traffic;
    what is written is safe. ``gone``: whether somebody deleted the recording.
    """

    def __init__(
        self,
        store: Recordings,
        recording: str,
        *,
        capacity: int = CAPACITY,
        flush_s: float = FLUSH_S,
    ) -> None:
        self.recording, self.gone = recording, False
        self._store, self._flush_s, self._capacity = store, flush_s, capacity
        self._lock = threading.Lock()  # of what follows; held for no transaction
        self._queue: list[Item] = []
        self._written = self._dropped = 0
        self._error: str | None = None
        self._is_closed = False
        self._next = max(store.recorded_ordinals(recording), default=-1) + 1
        self._ending, self._hurry = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"traffic {recording}", daemon=True)
        self._thread.start()

    def put(self, trajectory: Trajectory, steps: Sequence[Step] = ()) -> bool:
        """Hands over one request without waiting; False, and counted, when the queue is full or
        closed."""
        with self._lock:
            if is_taken := not self._is_closed and len(self._queue) < self._capacity:
                self._queue.append((trajectory, tuple(steps)))
            else:
                self._dropped += 1
            return is_taken

    @property
    def status(self) -> WriterStatus:
        """What has been written, dropped and is pending."""
        with self._lock:
            return WriterStatus(self._written, self._dropped, len(self._queue), self._error)

    def check(self) -> None:
        """Raises UnavailableError where requests were dropped."""
        if self._dropped:
            why = self._error or "they came faster than the database takes them"
            raise UnavailableError(
                f"recording {self.recording} lacks {self._dropped} of the requests served: {why}"
            )

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Writes what is pending now; whether all of it was written in time."""
        deadline = time.monotonic() + timeout_s
        self._hurry.set()
        while self.status.pending and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        return not self.status.pending

    def close(self, timeout_s: float = 10.0) -> WriterStatus:
        """Takes no more, writes what is pending, ends the thread, and drops what could not be
        written in time."""
        with self._lock:
            self._is_closed = True
        self.flush(timeout_s)
        self._ending.set()
        self._hurry.set()
        self._thread.join(max(1.0, timeout_s))
        with self._lock:
            self._dropped += len(self._queue)
            self._queue = []
        return self.status

    def __enter__(self) -> TrafficWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._hurry.wait(self._flush_s)
            self._hurry.clear()
            try:
                if items := self._queue[:]:
                    put_apart(items, self._append, self._drop)
            except UnavailableError as error:
                self._error = str(error)
                self._ending.wait(_RETRY_S)
                self._hurry.set()

    def _append(self, items: Sequence[Item]) -> bool:
        numbered = [(n, *item) for n, item in enumerate(items, self._next)]
        self._store.append_trajectories(self.recording, numbered)
        self._next += len(items)
        self._count(written=len(items), dropped=0)
        return True

    def _drop(self, _: Item, error: Exception) -> bool:
        is_told = isinstance(error, (DatabaseError, TraceError))
        self._error = str(error) if is_told else f"{type(error).__name__}: {error}"
        self.gone = isinstance(error, NotFoundError)
        self._count(written=0, dropped=1)
        return True

    def _count(self, written: int, dropped: int) -> None:
        with self._lock:
            if self._queue:  # else it is closed, and they count as dropped
                self._queue = self._queue[written + dropped :]
                self._written += written
                self._dropped += dropped
