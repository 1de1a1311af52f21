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
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np

from spectune.engines.abilities import engine_named
from spectune.engines.vllm.folder import (
    Proposals,
    parse_line,
    read_chunk,
    read_status,
    rounds_files,
)
from spectune.runtime.checkpoints import identity
from spectune.runtime.pair import PairSpec
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import EngineError, PairError, TraceError
from spectune.traces.schema import OFF_TEXT, Trie
from spectune.traces.store import TraceStore
from spectune.traces.tables import Panorama, Recording, Trajectory

ANSWER_S: Final = 600.0
"""Seconds that a request may take."""
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


class Server:
    """A running vLLM with our agent: its base URL and the agent's folder. Raises TraceError and
    EngineError where it drafts nothing, or not as can be replayed."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url.rstrip("/").removesuffix("/v1"), folder
        status = read_status(folder)
        if status is None:
            raise TraceError(
                f"{folder}: no status.json; start vLLM with spectune's agent and "
                f"SPECTUNE_FOLDER={folder}"
            )
        self.boot, self.engine = status.boot, status.described
        if not self.engine.method or not self.engine.num_speculative_tokens:
            raise EngineError(
                "this server drafts nothing; start it with --speculative-config, whose "
                "num_speculative_tokens is the most that is replayed"
            )
        if self.engine.above_zero != "greedy":
            raise EngineError(
                "this server samples its drafts (draft_sample_method), which cannot be replayed; "
                "start it with greedy drafts, vLLM's default"
            )
        self.gamma_max = self.engine.num_speculative_tokens
        self.accepts_none = bool(self.engine.about.get("accepts_none"))
        self._offsets = {path: path.stat().st_size for path in self._files()}

    def draft_of(self, spec: PairSpec) -> str:
        """The draft's name: that of its checkpoint in the pair, else vLLM's of its method. Raises
        PairError for a server of another target."""
        model, loaded = self.engine.model, self.engine.draft_model
        if not is_same(spec.target, model):
            raise PairError(f"the recording is of {spec.target}, but this server serves {model}")
        if loaded and loaded != model:
            for name, path in spec.drafts.items():
                if is_same(path, loaded):
                    return name
        method = str(self.engine.method)
        return "ngram" if method.startswith("ngram") else method

    def complete(self, body: Mapping[str, Any]) -> None:
        """Sends a request of token ids and waits for its end. Raises EngineError."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        if self.engine.about.get("by_priority"):
            body = {**body, "priority": LAST}
        data = json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode()
        try:
            with urlopen(Request(f"{self.url}/v1/completions", data, headers), timeout=ANSWER_S):
                pass
        except HTTPError as error:
            reason = " ".join(error.read().decode(errors="replace").split())[:300]
            raise EngineError(f"{self.url} refused a request: {reason}") from None
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "reason", error))
            raise EngineError(f"{self.url}: the server does not answer ({reason})") from None

    def proposals(self) -> Iterator[Proposals]:
        """What the agent has noted since the last call."""
        for path in self._files():
            with suppress(FileNotFoundError):  # `follow` has removed it
                for text, end in read_lines(path, self._offsets.get(path, 0)):
                    self._offsets[path] = end
                    with suppress(TraceError):
                        if isinstance(line := parse_line(text), Proposals):
                            yield line

    def trouble(self) -> str:
        """Why the agent notes nothing, as far as it tells."""
        status = read_status(self.folder)
        if status is not None and (status.fault or status.refused):
            return status.fault or status.refused.reason  # type: ignore[union-attr]
        return f"is {self.url} the server that writes into {self.folder}?"

    def _files(self) -> list[Path]:
        return list(rounds_files(self.folder).get(self.boot, {}).values())


def read_lines(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """The whole lines of a file from an offset on, each with the offset after it."""
    while (chunk := read_chunk(path, offset, is_closed=False)).lines:
        yield from chunk.lines
        offset = chunk.lines[-1][1]


def is_same(path: str, other: str) -> bool:
    """Whether two checkpoints are the same. Raises PairError where one cannot be read."""
    return path == other or identity(path) == identity(other)


@dataclass
class Question:
    """A request to the server: its text, the start whose proposals come first in its answer, and
    its body."""

    ordinal: int
    start: int
    body: Mapping[str, Any]
    attempts: int = 0
    answered_at: float = 0.0


class Retracer:
    """Asks a server about the texts of a recording, and stores each text's panorama when all of
    its positions are known: what is stored is not asked again."""

    def __init__(
        self,
        store: TraceStore,
        recording: Recording,
        server: Server,
        *,
        outstanding: int = 4,
        share: float = 1.0,
        progress: Progress = silent,
    ) -> None:
        if not engine_named(recording.engine).prefill_emits:
            raise TraceError(
                f"recording {recording.id} was decoded by {recording.engine}; retrace one that was "
                "followed from a vLLM server (`spectune follow`)"
            )
        self.store, self.recording, self.server = store, recording, server
        self.outstanding, self.share, self._progress = outstanding, share, progress
        document = store.get_pair(recording.pair_id).document
        self.draft = server.draft_of(PairSpec.from_json(document, where=recording.pair_id))
        self._run = os.urandom(4).hex()
        self._texts: dict[int, Trajectory] = {}
        self._chains: dict[int, dict[int, Sequence[int]]] = {}
        self._requests, self._positions, self._stored = 0, 0, 0

    def run(self) -> Retraced:
        """Raises EngineError where the server does not answer, or decodes another text."""
        began, gamma_max = time.monotonic(), self.server.gamma_max
        lacking = self.store.missing_panoramas(self.recording.id, self.draft, gamma_max)
        texts = self.store.iterate(self.recording.id, drafts=(), ordinals=lacking)
        self._texts = {request.ordinal: request.trajectory for request in texts}
        if self.server.accepts_none and any(not t.sampling.greedy for t in self._texts.values()):
            raise EngineError(
                "this server accepts no drafts, which is exact at temperature 0 alone; retrace "
                f"recording {self.recording.id} on a server with standard acceptance"
            )
        self._chains = {ordinal: {} for ordinal in self._texts}
        for ordinal, text in self._texts.items():
            if len(text.output_ids) < 2:  # no round begins in it
                self._store_text(ordinal)
        busy_s = self._ask(sum(max(0, len(t.output_ids) - 1) for t in self._texts.values()))
        seconds = time.monotonic() - began
        return Retraced(
            self.draft, gamma_max, self._stored, self._positions, self._requests, seconds, busy_s
        )

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
                        sent[pool.submit(self.server.complete, question.body)] = question
                        self._requests += 1
                    before, is_busy = now, bool(sent)
                    for future in wait(sent, LOOK_S, FIRST_COMPLETED).done:
                        future.result()
                        sent.pop(future).answered_at = time.monotonic()
                    if not is_busy:
                        time.sleep(LOOK_S)
                    now = time.monotonic()
                    busy_s += (now - before) * is_busy
                    for line in self.server.proposals():
                        self._take(line, unnoted)
                    again += self._lost(unnoted, now)
                    self._progress(f"positions of {self.draft}", self._positions, total)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return busy_s

    def _questions(self, ordinal: int) -> Iterator[Question]:
        """Those of one text: of every start after its first token."""
        text = self._texts[ordinal]
        prompt, output = text.prompt_ids.tolist(), text.output_ids.tolist()
        if self.server.accepts_none:
            yield self._question(ordinal, 1, prompt, max_tokens=len(output))
            return
        for start in range(1, len(output)):
            # a second token, so that vLLM verifies, and hence hands on, what was drafted
            forced = {"max_tokens": 2, "allowed_token_ids": output[start - 1 : start]}
            yield self._question(ordinal, start, prompt + output[: start - 1], **forced)

    def _question(self, ordinal: int, start: int, prompt: list[int], **more: Any) -> Question:
        name = f"retrace-{self._run}-{ordinal}-{start}"
        marks = {"request_id": name, "vllm_xargs": {"spectune": "retrace"}}
        return Question(ordinal, start, {"prompt": prompt, **marks, **more})

    def _take(self, line: Proposals, unnoted: dict[tuple[int, int], Question]) -> None:
        """Takes the proposals of a line that answers one of ours."""
        match = re.search(rf"retrace-{self._run}-(\d+)-(\d+)-", line.id)
        if match is None:
            return
        ordinal, start = int(match[1]), int(match[2])
        text = self._texts[ordinal]
        count = len(text.output_ids) - 1 if self.server.accepts_none else 1
        expected = text.output_ids[start - 1 : start - 1 + count + 1].tolist()
        if line.output[:count] != expected[:count]:
            raise EngineError(
                f"request {text.request_id}: this server decodes another text than the one "
                "recorded; is it of the same model and precision?"
            )
        if (ordinal, start) not in unnoted or len(line.proposals) < count:
            return  # asked again already, or to be
        del unnoted[ordinal, start]
        chains = self._chains[ordinal]
        chains.update(enumerate(line.proposals[:count], start))
        self._positions += count
        if len(chains) == len(text.output_ids) - 1:
            self._store_text(ordinal)

    def _store_text(self, ordinal: int) -> None:
        text, chains = self._texts[ordinal], self._chains.pop(ordinal)
        panorama = panorama_of(text, chains, self.draft, self.server.gamma_max)
        self._stored += self.store.put_panoramas(self.recording.id, [(ordinal, panorama)])

    def _lost(self, unnoted: Mapping[tuple[int, int], Question], now: float) -> list[Question]:
        """Questions that were answered and not noted in time. Raises EngineError for one that was
        asked too often."""
        lost = [q for q in unnoted.values() if q.answered_at and now - q.answered_at > NOTED_S]
        for question in lost:
            question.answered_at, question.attempts = 0.0, question.attempts + 1
            if question.attempts == ATTEMPTS:
                raise EngineError(f"the agent notes no proposals: {self.server.trouble()}")
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
