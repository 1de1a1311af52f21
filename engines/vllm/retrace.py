"""`retrace`: what the draft of a running vLLM server proposes at every position of recorded texts.

The server drafts by any method that vLLM has; nothing of it is loaded here. For each position a
request is sent whose prompt ends before the position's last token and which may emit that token
alone: what vLLM drafts next is what it proposes there, at any temperature of the text. The agent
notes it in its folder. With prefix caching a position costs about one token of the target, those
that are drafted, and their verification.

A server that accepts no draft (vLLM's synthetic acceptance rates of 0) drafts at every position of
a greedy text while it decodes it: one request a text.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final

import numpy as np

from spectune.engines.abilities import engine_named
from spectune.engines.vllm.execute import RunningServer
from spectune.engines.vllm.folder import SENT, Proposals, Tail, parse_line, read_status
from spectune.runtime.checkpoints import identity
from spectune.runtime.pair import PairSpec
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import EngineError, PairError, TraceError
from spectune.traces.schema import OFF_TEXT, Trie
from spectune.traces.store import TraceStore
from spectune.traces.tables import Panorama, Recording, Trajectory
from spectune.traces.text import one_line

NOTED_S: Final = 10.0
"""Seconds after which what the agent has not noted is asked again."""
ATTEMPTS: Final = 3
LOOK_S: Final = 0.05
LAST: Final = 1_000_000
"""The priority of requests where the server schedules by it: after all others."""


@dataclass(frozen=True)
class Retraced:
    """The draft by its name in policies and its most tokens; texts stored, positions known and
    requests sent; seconds, and those of them during which requests of ours were in the server."""

    draft: str
    gamma_max: int
    texts: int
    positions: int
    requests: int
    seconds: float
    busy_s: float


def draft_name(server: RunningServer, spec: PairSpec) -> str:
    """The name of a server's draft in a pair: that of its checkpoint, where the pair has it. Raises
    PairError for a server of another target."""
    if not is_same(spec.target, server.spec.target):
        raise PairError(
            f"the recording is of {spec.target}, but this server serves {server.spec.target}"
        )
    loaded = server.spec.drafts.get(server.draft)
    for name, path in spec.drafts.items():
        if loaded is not None and is_same(path, loaded):
            return name
    return server.draft


def is_same(path: str, other: str) -> bool:
    """Whether two checkpoints are the same. Raises PairError where one cannot be read."""
    return path == other or identity(path) == identity(other)


@dataclass
class Question:
    """A request to the server: its text, the start whose proposals come first in its answer, and
    its body."""

    ordinal: int
    start: int
    body: str
    attempts: int = 0
    answered_at: float = 0.0


class Retracer:
    """Asks a server about the texts of a recording, and stores each text's panorama when all of
    its positions are known: what is stored is not asked again."""

    def __init__(
        self,
        store: TraceStore,
        recording: Recording,
        server: RunningServer,
        *,
        outstanding: int = 4,
        share: float = 1.0,
        progress: Progress = silent,
    ) -> None:
        about = server.runs_on
        if not engine_named(recording.engine).prefill_emits:
            raise TraceError(
                f"recording {recording.id} was decoded by {recording.engine}; retrace one that was "
                "followed from a vLLM server (`follow`)"
            )
        if server.draft == "none":
            raise EngineError(
                "this server drafts nothing; start it with --speculative-config, whose "
                "num_speculative_tokens is the most that is replayed"
            )
        if about.get("above_zero") != "greedy":
            raise EngineError(
                "this server samples its drafts (draft_sample_method), which cannot be replayed; "
                "start it with greedy drafts, vLLM's default"
            )
        self.store, self.recording, self.server = store, recording, server
        self.outstanding, self.share, self._progress = outstanding, share, progress
        self.gamma_max = server.wanted.most
        self.accepts_none = bool(about.get("accepts_none"))
        document = store.get_pair(recording.pair_id).document
        self.draft = draft_name(server, PairSpec.from_json(document, where=recording.pair_id))
        status = read_status(server.folder)
        self._tail = Tail(server.folder, status.boot if status else "")
        self._more = {"priority": LAST} if about.get("by_priority") else {}
        self._token = f"{SENT}{secrets.token_hex(4)}"
        self._texts: dict[int, Trajectory] = {}
        self._chains: dict[int, dict[int, Sequence[int]]] = {}
        self._requests, self._positions, self._stored = 0, 0, 0

    def run(self) -> Retraced:
        """Raises EngineError where the server does not answer, or decodes another text."""
        began = time.monotonic()
        lacking = self.store.missing_panoramas(self.recording.id, self.draft, self.gamma_max)
        texts = self.store.iterate(self.recording.id, drafts=(), ordinals=lacking)
        self._texts = {request.ordinal: request.trajectory for request in texts}
        if self.accepts_none and any(not t.sampling.greedy for t in self._texts.values()):
            raise EngineError(
                "this server accepts no drafts, which is exact at temperature 0 alone; retrace "
                f"recording {self.recording.id} on a server with standard acceptance"
            )
        self._chains = {ordinal: {} for ordinal in self._texts}
        for ordinal, text in self._texts.items():
            if len(text.output_ids) < 2:  # no round begins in it
                self._know(ordinal, {})
        busy_s = self._ask(sum(max(0, len(t.output_ids) - 1) for t in self._texts.values()))
        seconds, counts = time.monotonic() - began, (self._stored, self._positions, self._requests)
        return Retraced(self.draft, self.gamma_max, *counts, seconds, busy_s)

    def _ask(self, total: int) -> float:
        """Asks about every position of ``total``; the seconds during which any request of ours was
        in the server."""
        questions = (q for ordinal in self._texts for q in self._questions(ordinal))
        sent: dict[Future[None], Question] = {}
        unnoted: dict[tuple[int, int], Question] = {}
        again: list[Question] = []
        busy_s, began = 0.0, time.monotonic()
        now = began
        with ThreadPoolExecutor(self.outstanding) as pool:
            try:
                while sent or self._positions < total:
                    while len(sent) < self.outstanding and busy_s <= self.share * (now - began):
                        question = again.pop() if again else next(questions, None)
                        if question is None:
                            break
                        unnoted[question.ordinal, question.start] = question
                        sent[pool.submit(self._complete, question.body)] = question
                        self._requests += 1
                    before, is_busy = now, bool(sent)
                    for future in wait(sent, LOOK_S, FIRST_COMPLETED).done:
                        future.result()
                        sent.pop(future).answered_at = time.monotonic()
                    if not is_busy:
                        time.sleep(LOOK_S)
                    now = time.monotonic()
                    busy_s += (now - before) * is_busy
                    for line in self._proposals():
                        self._take(line, unnoted)
                    again += self._lost(unnoted, now)
                    self._progress(f"positions of {self.draft}", self._positions, total)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return busy_s

    def _complete(self, body: str) -> None:
        """Sends a request and waits for its end. Raises EngineError."""
        url = self.server.address.url
        try:
            code, text = self.server.address.call("POST", "/v1/completions", body)
        except (OSError, HTTPException) as error:
            raise EngineError(f"{url}: the server does not answer ({error})") from None
        if code != 200:
            raise EngineError(f"{url} refused a request ({code}): {one_line(text, 300)}")

    def _proposals(self) -> Iterator[Proposals]:
        """What the agent has noted of our requests since the last call."""
        for text in self._tail.lines():
            with suppress(TraceError):
                line = parse_line(text) if self._token.encode() in text else None
                if isinstance(line, Proposals):
                    yield line

    def _questions(self, ordinal: int) -> Iterator[Question]:
        """Those of one text: of every start after its first token."""
        text = self._texts[ordinal]
        prompt, output = text.prompt_ids.tolist(), text.output_ids.tolist()
        if self.accepts_none:
            yield self._question(ordinal, 1, prompt, max_tokens=len(output))
            return
        for start in range(1, len(output)):
            if len(prompt) + start + 1 > self.server.wanted.max_len:  # nothing is drafted there
                self._know(ordinal, {start: []})
                continue
            # a second token, so that vLLM verifies, and hence hands on, what was drafted
            forced = {"max_tokens": 2, "allowed_token_ids": output[start - 1 : start]}
            yield self._question(ordinal, start, prompt + output[: start - 1], **forced)

    def _question(self, ordinal: int, start: int, prompt: list[int], **more: Any) -> Question:
        body = {
            "model": self.server.model,
            "request_id": f"{self._token}.{ordinal}.{start}",
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "vllm_xargs": {"spectune": "retrace"},
        }
        return Question(ordinal, start, json.dumps({**body, **more, **self._more}))

    def _take(self, line: Proposals, unnoted: dict[tuple[int, int], Question]) -> None:
        """Takes the proposals of a line that answers one of ours."""
        match = re.search(rf"{self._token}\.(\d+)\.(\d+)-", line.id)
        if match is None:
            return
        ordinal, start = int(match[1]), int(match[2])
        text = self._texts[ordinal]
        count = len(text.output_ids) - 1 if self.accepts_none else 1
        expected = text.output_ids[start - 1 : start - 1 + count + 1].tolist()
        if line.output[:count] != expected[:count]:
            raise EngineError(
                f"request {text.request_id}: this server decodes another text than the one "
                "recorded; is it of the same model and precision?"
            )
        if (ordinal, start) not in unnoted or len(line.proposals) < count:
            return  # asked again already, or to be
        del unnoted[ordinal, start]
        self._know(ordinal, dict(enumerate(line.proposals[:count], start)))

    def _know(self, ordinal: int, chains: Mapping[int, Sequence[int]]) -> None:
        """Takes the proposals of some starts of a text, which is stored with those of the last."""
        text = self._texts[ordinal]
        self._positions += len(chains)
        self._chains[ordinal].update(chains)
        if len(self._chains[ordinal]) < len(text.output_ids) - 1:
            return
        chains = self._chains.pop(ordinal)
        panorama = panorama_of(text, chains, self.draft, self.gamma_max)
        self._stored += self.store.put_panoramas(self.recording.id, [(ordinal, panorama)])

    def _lost(self, unnoted: Mapping[tuple[int, int], Question], now: float) -> list[Question]:
        """Questions that were answered and not noted in time. Raises EngineError for one that was
        asked too often."""
        lost = [q for q in unnoted.values() if q.answered_at and now - q.answered_at > NOTED_S]
        for question in lost:
            question.answered_at, question.attempts = 0.0, question.attempts + 1
            if question.attempts == ATTEMPTS:
                status = read_status(self.server.folder)
                fault = (status and status.fault) or "it is off, or the server started again"
                raise EngineError(f"{self.server.folder}: the agent notes no proposals: {fault}")
        return lost


def panorama_of(
    text: Trajectory, chains: Mapping[int, Sequence[int]], draft: str, gamma_max: int
) -> Panorama:
    """The chains proposed from the starts of a text, as a panorama in which every start has nodes
    of its own: a chain of an engine may depend on where it begins. Starts without one propose
    nothing; distributions are not known, and their codes 0."""
    output = text.output_ids.tolist()
    roots = len(output) + 1
    count, tokens, text_slot = [0] * roots, [0] * roots, [OFF_TEXT] * roots
    parent: list[int] = []
    for start, chain in sorted(chains.items()):
        node, on_text = start, True
        for place, token in enumerate(chain[:gamma_max]):
            if place:
                parent.append(node)
                node = len(count)
                for column, value in ((count, 0), (tokens, 0), (text_slot, OFF_TEXT)):
                    column.append(value)
            following = output[start + place] if start + place < len(output) else None
            on_text = on_text and token == following
            count[node], tokens[node] = 1, token
            text_slot[node] = 0 if on_text else OFF_TEXT
    unknown = np.zeros(len(count), np.uint16)
    trie = Trie(
        parent=np.array(parent, np.int32),
        slot=np.zeros(len(parent), np.uint8),
        tokens=np.array(tokens, np.int32)[:, None],
        logp=unknown[:, None],
        gap=unknown[:, None],
        count=np.array(count, np.uint8),
        entropy=unknown,
        top_entropy=unknown,
        text_slot=np.array(text_slot, np.uint8),
        accept=unknown[:0],
    )
    return Panorama(draft=draft, gamma_max=gamma_max, width=1, depth=1, shared=False, trie=trie)
