"""Recording of what is served: one recording for each sampling, written beside the decoding."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, replace

from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.record import put_policies, record_served, recording_options
from spectune.runtime.decoder import trajectory_of
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import PolicySource
from spectune.service.decode_thread import TextJob
from spectune.traces.schema import Finish, Sampling
from spectune.traces.store import TraceStore
from spectune.traces.store.traffic import CAPACITY, TrafficWriter, WriterStatus

log = logging.getLogger(__name__)
RECORDINGS_LIMIT = 64
"""Samplings that have a recording of their own; further ones are together in one, without their
texts."""
LABELS_LIMIT = 64
"""Labels that are kept; texts of further ones are of ``other``."""
UNLABELLED = "serve"


@dataclass(frozen=True)
class ServedText:
    """A text that has ended, with its job."""

    job: TextJob
    finish: Finish


class Recorder:
    """Hands texts to the writers of their recordings, in a thread of its own, since to begin a
    recording may wait for the database. ``share``: of the texts whose tokens are stored; of the
    others rounds alone are. ``boot`` names this start of the server."""

    def __init__(
        self, store: TraceStore, pair: LoadedPair, source: PolicySource, share: float
    ) -> None:
        self._store, self._pair, self._source, self._share = store, pair, source, share
        self.boot = secrets.token_hex(6)
        self._about = {"boot": self.boot}
        self._queue = queue.Queue[ServedText | None](CAPACITY)
        self._writers: dict[Sampling, TrafficWriter] = {}
        self._labels, self._policies = set[str](), set[str]()
        self._dropped = 0
        self.error = ""
        self._stack = ExitStack()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def put(self, job: TextJob, finish: Finish) -> None:
        """Takes a text without waiting; where that cannot be it is counted."""
        try:
            if job.is_recorded:
                self._queue.put_nowait(ServedText(job, finish))
        except queue.Full:
            self._dropped += 1

    @property
    def status(self) -> WriterStatus:
        """What became of the texts."""
        found = [writer.status for writer in [*self._writers.values()]]
        return WriterStatus(
            sum(each.written for each in found),
            sum(each.dropped for each in found) + self._dropped,
            sum(each.pending for each in found) + self._queue.qsize(),
            next((each.error for each in found if each.error), self.error or None),
        )

    @property
    def recordings(self) -> dict[str, str]:
        """Where its requests are, by number."""
        return {str(n): writer.recording for n, writer in enumerate([*self._writers.values()])}

    def close(self) -> WriterStatus:
        """Writes what there is, and ends the recordings."""
        self._queue.put(None)
        self._thread.join()
        self._stack.close()
        return self.status

    def _run(self) -> None:
        while (text := self._queue.get()) is not None:
            try:
                self._write(text)
            except Exception as error:  # the texts behind it are written all the same
                log.exception("a text is not recorded")
                self.error, self._dropped = str(error), self._dropped + 1

    def _write(self, text: ServedText) -> None:
        job, request = text.job, text.job.request
        law = replace(request.sampling, seed=0)
        is_further = law not in self._writers and len(self._writers) >= RECORDINGS_LIMIT
        trajectory = trajectory_of(request, job.output, text.finish, self._label(job.label))
        # Whoever decodes it again would end it at such a token.
        goes_on = not request.eos_ids and bool(self._pair.eos_ids & {*job.output[:-1]})
        kept = zlib.crc32(job.name.encode()) / 2**32 < self._share
        if is_further or goes_on or not kept:
            trajectory.tokens = None
            trajectory.n_prompt, trajectory.n_output = len(request.prompt_ids), len(job.output)
        policy = self._source.current().policy
        if policy.id not in self._policies:
            put_policies(self._store, [policy])
            self._policies.add(policy.id)
        self._writer(Sampling() if is_further else law).put(trajectory, job.steps)

    def _writer(self, law: Sampling) -> TrafficWriter:
        writer = self._writers.get(law)
        if writer is None or writer.gone:
            options = DecodeOptions(law, self._pair.context(()).positions)
            about = recording_options(self._pair, options) | self._about
            pair, policies = self._pair, [self._source.current().policy]
            begun = record_served(self._store, pair.id, pair.spec, options, about, policies)
            writer = self._writers[law] = self._stack.enter_context(begun)
        return writer

    def _label(self, label: str) -> str:
        if not label:
            return UNLABELLED
        if label not in self._labels and len(self._labels) >= LABELS_LIMIT:
            return "other"
        self._labels.add(label)
        return label
