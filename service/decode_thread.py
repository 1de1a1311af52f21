"""The thread that owns the models: requests come in by a bounded queue, and what each step gives
them goes out to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from spectune.runtime.decoder import Decoder
from spectune.runtime.loop import DecodeRequest, Round, TokenLogprobs
from spectune.traces.schema import Finish, Step

log = logging.getLogger(__name__)


class QueueFullError(Exception):
    """As many requests wait as may."""


@dataclass(frozen=True)
class Burst:
    """What a step gave a request: tokens, how probable they are where it asks, and how the text
    ended, if it did. ``error``: why it will get no more."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish: Finish | None = None
    error: Exception | None = None


@dataclass(eq=False)
class TextJob:
    """A text that is asked for. ``receive`` is called in the event loop with each burst; ``name``
    is the response's, ``label`` the client's for it. ``prompt_logprobs`` are filled where the
    request ``echoes_logprobs``."""

    request: DecodeRequest
    receive: Callable[[Burst], None]
    name: str = ""
    label: str = ""
    echoes_logprobs: bool = False
    is_recorded: bool = True
    is_cancelled: bool = False
    arrived_s: float = 0.0
    output: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request = replace(self.request, is_cancelled=lambda: self.is_cancelled)
        if self.echoes_logprobs:
            self.request = replace(self.request, scores_prompt=self.prompt_logprobs.extend)


class DecodeThread:
    """Decodes jobs with ``decoder``, which nothing else uses. At most ``limit`` wait for a seat.

    ``observe`` is called in the thread after each step with its rounds, and ``finished`` with each
    job whose text has ended; neither may wait. What a step raises ends the jobs that ran, and the
    next ones are decoded."""

    def __init__(
        self,
        decoder: Decoder,
        limit: int,
        *,
        observe: Callable[[Sequence[Round]], None] = lambda rounds: None,
        finished: Callable[[TextJob, Finish], None] = lambda job, finish: None,
    ) -> None:
        self.decoder, self.limit = decoder, limit
        self._observe, self._finished = observe, finished
        self._waiting, self._running = deque[TextJob](), dict[int, TextJob]()
        self._changed, self._closing = threading.Condition(), False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._origin_s = time.time() - decoder.clock()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins; bursts are handed out in ``loop``."""
        self._loop = loop
        self._thread.start()

    def now_s(self) -> float:
        """Seconds since 1970 by the clock that stamps rounds, which nobody sets back."""
        return self.decoder.clock() + self._origin_s

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        with self._changed:
            return sum(not job.is_cancelled for job in self._waiting)

    def submit(self, jobs: Sequence[TextJob]) -> None:
        """Queues all of them. Raises QueueFullError, and then none waits."""
        with self._changed:
            waiting = sum(not job.is_cancelled for job in self._waiting)
            # What can be seated at once need not wait.
            free = max(0, self.decoder.seats - len(self._running))
            if self._closing or waiting + len(jobs) > self.limit + free:
                raise QueueFullError
            for job in jobs:
                job.arrived_s = self.now_s()
            self._waiting.extend(jobs)
            self._changed.notify()

    def close(self) -> None:
        """Takes no more, drops what there is, and returns when the thread has ended."""
        with self._changed:
            self._closing = True
            for job in (*self._waiting, *self._running.values()):
                job.is_cancelled = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    # ------------------------------------------------------------------------- the loop's queue

    def wait(self) -> bool:
        with self._changed:
            self._running = {}  # it waits where nothing runs: what was left was cancelled
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return bool(self._waiting)

    def first(self) -> DecodeRequest | None:
        with self._changed:
            while self._waiting and self._waiting[0].is_cancelled:
                self._waiting.popleft()
            return self._waiting[0].request if self._waiting else None

    def take(self) -> DecodeRequest:
        with self._changed:
            job = self._waiting.popleft()
            self._running[id(job.request)] = job
            return job.request

    # ------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            try:
                for rounds in self.decoder.steps(self):
                    self._hand_out(rounds)
                return
            except Exception as error:
                log.exception("a step of the decoder failed")
                self._fail(error)

    def _hand_out(self, rounds: Sequence[Round]) -> None:
        self._observe(rounds)
        ended_s = self.now_s()
        bursts = []
        for one in rounds:
            job = self._running.get(id(one.request))
            if job is None:  # cancelled in the step before
                continue
            step = one.step._replace(batch=len(rounds), arrived_s=job.arrived_s, ended_s=ended_s)
            job.steps.append(step)
            job.output += one.tokens
            bursts.append((job, Burst(one.tokens, one.logprobs, one.finish)))
            if one.finish is not None:
                del self._running[id(one.request)]
                self._finished(job, one.finish)
        self._running = {key: job for key, job in self._running.items() if not job.is_cancelled}
        self._send(bursts)

    def _fail(self, error: Exception) -> None:
        """Ends the jobs that ran; where none did, the one that could not be admitted."""
        with self._changed:
            failed = [*self._running.values()]
            if not failed and self._waiting:
                failed = [self._waiting.popleft()]
            self._running = {}
        self._send([(job, Burst(error=error)) for job in failed])

    def _send(self, bursts: Sequence[tuple[TextJob, Burst]]) -> None:
        def receive() -> None:
            for job, burst in bursts:
                job.receive(burst)

        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(receive)
