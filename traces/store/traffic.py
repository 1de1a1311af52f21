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

from spectune.db import NotFoundError, UnavailableError
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
        self._queue: queue.Queue[Item] = queue.Queue(capacity)
        self._batch: list[Item] = []
        self._next = max(store.recorded_ordinals(recording), default=-1) + 1
        self._written = self._dropped = 0
        self._error: str | None = None
        self._closing, self._hurry = threading.Event(), threading.Event()
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
        pending = self._queue.qsize() + len(self._batch)
        return WriterStatus(self._written, self._dropped, pending, self._error)

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
        """Writes what is pending, ends the thread, and drops what could not be written in time."""
        self.flush(timeout_s)
        self._closing.set()
        self._hurry.set()
        self._thread.join(max(1.0, timeout_s))
        self._dropped += self.status.pending
        self._batch, self._queue = [], queue.Queue(self._capacity)
        return self.status

    def __enter__(self) -> TrafficWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._hurry.wait(self._flush_s)
            self._hurry.clear()
            while len(self._batch) < self._capacity and not self._queue.empty():
                self._batch.append(self._queue.get_nowait())
            if not self._write(len(self._batch)):
                self._closing.wait(_RETRY_S)
                self._hurry.set()

    def _write(self, count: int) -> bool:
        """Appends the batch in transactions of ``count`` requests, or if that is refused each
        request in its own, dropping what is refused again; False where the database is away."""
        while self._batch:
            some = self._batch[:count]
            try:
                numbered = [(self._next + i, *item) for i, item in enumerate(some)]
                self._store.append_trajectories(self.recording, numbered)
            except UnavailableError as error:
                self._error = str(error)
                return False
            # what a request holds decides what is raised, and the traffic around it is to be kept
            except Exception as error:
                self._error, self.gone = str(error), isinstance(error, NotFoundError)
                if count > 1:
                    count = 1
                    continue
                self._dropped += 1
            else:
                self._next += len(some)
                self._written += len(some)
            self._batch = self._batch[len(some) :]
        return True
