"""Recording of served traffic beside the decode: a bounded queue, one thread, a transaction at most
a second apart.

Serving must never wait for a disk, so :meth:`TrafficWriter.put` only enqueues; packing, compression
(which releases the interpreter) and the commit happen in the writer's thread. When the database
cannot keep up, requests are dropped and counted; so are those that the database refuses for another
reason than that it is away.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from spectune.db import DatabaseError, NotFoundError, UnavailableError
from spectune.traces.errors import TraceError
from spectune.traces.schema import Step
from spectune.traces.store.recordings import Recordings
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
    what is written is safe.
    """

    def __init__(
        self,
        store: Recordings,
        recording: str,
        *,
        capacity: int = CAPACITY,
        flush_s: float = FLUSH_S,
    ) -> None:
        self.recording = recording
        self._store, self._flush_s = store, flush_s
        self._queue: queue.Queue[Item] = queue.Queue(capacity)
        self._next = max(store.recorded_ordinals(recording), default=-1) + 1
        self._written = self._dropped = self._in_hand = 0
        self._error: str | None = None
        self.gone = False
        """Whether somebody deleted the recording."""
        self._closing = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"traffic {recording}", daemon=True)
        self._thread.start()

    def put(self, trajectory: Trajectory, steps: Sequence[Step] = ()) -> bool:
        """Hands over one request without waiting; False, and counted, when the queue is full or
        closed."""
        try:
            if self._closing.is_set():
                raise queue.Full
            self._queue.put_nowait((trajectory, tuple(steps)))
        except queue.Full:
            self._dropped += 1
            return False
        return True

    @property
    def status(self) -> WriterStatus:
        """What has been written, dropped and is pending."""
        return WriterStatus(
            self._written, self._dropped, self._queue.qsize() + self._in_hand, self._error
        )

    def check(self) -> None:
        """Raises UnavailableError where requests were dropped."""
        if self._dropped:
            why = self._error or "they came faster than the database takes them"
            raise UnavailableError(
                f"recording {self.recording} lacks {self._dropped} of the requests served: {why}"
            )

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Writes what is pending now; whether all of it was written in time."""
        self._hurry.set()
        deadline = time.monotonic() + timeout_s
        while self.status.pending and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        return not self.status.pending

    def close(self, timeout_s: float = 10.0) -> WriterStatus:
        """Writes what is pending, ends the thread, and drops what could not be written in time."""
        self.flush(timeout_s)
        self._closing.set()
        self._hurry.set()
        self._thread.join(max(1.0, timeout_s))
        left = self.status
        self._dropped += left.pending
        self._in_hand = 0
        while not self._queue.empty():
            self._queue.get_nowait()
        return self.status

    def __enter__(self) -> TrafficWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        batch: list[Item] = []
        while not self._closing.is_set():
            self._hurry.wait(self._flush_s)
            self._hurry.clear()
            while len(batch) < self._queue.maxsize and not self._queue.empty():
                self._in_hand += 1
                batch.append(self._queue.get_nowait())
            batch = self._write(batch)
            if batch:
                self._closing.wait(_RETRY_S)
                self._hurry.set()

    def _write(self, batch: list[Item]) -> list[Item]:
        """Appends the batch in one transaction, or if that is refused each request in its own,
        dropping what is refused again.

        Returns what is left to try again, once the database is back.
        """
        size = len(batch)
        while batch:
            try:
                self._append(batch[:size])
            except UnavailableError as error:
                self._error = str(error)
                break
            # what a request holds decides what is raised, and the traffic around it is to be kept
            except Exception as error:
                ours = isinstance(error, (DatabaseError, TraceError))
                self._error = str(error) if ours else f"{type(error).__name__}: {error}"
                self.gone = isinstance(error, NotFoundError)
                if size > 1:
                    size = 1
                    continue
                self._dropped += 1
            batch = batch[size:]
            self._in_hand = len(batch)
            if self._closing.is_set():
                break
        return batch

    def _append(self, items: Sequence[Item]) -> None:
        """Raises whatever the store does; a single request never because somebody else appended to
        this recording."""
        numbered = [(self._next + i, *item) for i, item in enumerate(items)]
        try:
            self._store.append_trajectories(self.recording, numbered)
        except TraceError:
            here = max(self._store.recorded_ordinals(self.recording), default=-1) + 1
            if len(items) > 1 or here == self._next:
                raise
            self._next = here
            self._append(items)
        else:
            self._next += len(items)
            self._written += len(items)
