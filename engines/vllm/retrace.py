"""`retrace`: what the draft of a running vLLM server proposes at every position of recorded texts.

The server drafts by any method that vLLM has; nothing of it is loaded here. For each position a
request is sent whose prompt ends before the position's last token and which may emit that token
alone: what vLLM drafts next is what it proposes there, at any temperature of the text. The agent
notes it in its folder, for requests that carry the key that stands there. With prefix caching a
position costs about one token of the target, those that are drafted, and their verification.

A server that accepts no draft (vLLM's synthetic acceptance rates of 0) drafts at every position of
a greedy text while it decodes it: one request a text.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from spectune.engines.abilities import engine_named
from spectune.engines.vllm.folder import SENT, RetracedRequest, Tail
from spectune.engines.vllm.follow_policy import is_same
from spectune.engines.vllm.running import RunningServer
from spectune.runtime.pair import PairSpec
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import EngineError, PairError, TraceError
from spectune.traces.schema import OFF_TEXT, Trie
from spectune.traces.store import TraceStore
from spectune.traces.tables import Panorama, Recording, Trajectory

TOGETHER: Final = 8
"""Texts that are asked about before their panoramas are stored."""
NOTED_S: Final = 10.0
"""Seconds after which what the agent has not noted is asked again."""
ATTEMPTS: Final = 3
LOOK_S: Final = 0.05
"""Seconds between two looks into the folder."""
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


class Retracer:
    """Asks a server about the texts of a recording, some at a time, and stores their panoramas:
    what is stored is not asked again. At most ``outstanding`` requests are in the server at a time,
    and any of them for at most this ``share`` of the time.

    Raises TraceError for a recording of another engine, EngineError for a server whose drafts
    cannot be replayed, and PairError for one of another target.
    """

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
        self.draft = _draft_name(server, PairSpec.from_json(document, where=recording.pair_id))
        self._tail = Tail(server.folder, server.status().boot)
        self._more = {"priority": LAST} if about.get("by_priority") else {}
        self._word = server.status().retrace
        if self._word is None:
            raise EngineError(
                "this server's agent notes no texts, hence none that is retraced; start it with "
                "SPECTUNE_TEXTS=all or a share, and `follow` without --texts none"
            )
        self._token = f"{SENT}{secrets.token_hex(4)}"
        self._texts: Mapping[int, Trajectory] = {}
        """Those that are asked about."""
        self._chains: dict[int, dict[int, Sequence[int]]] = {}
        """By text, the proposals by start."""
        self._total = self._requests = self._positions = 0
        self._began, self._busy_s = time.monotonic(), 0.0

    def run(self) -> Retraced:
        """Raises EngineError where the server does not answer, or decodes another text."""
        lacking = self.store.missing_panoramas(self.recording.id, self.draft, self.gamma_max)
        requests = [*self.store.iterate(self.recording.id, drafts=(), ordinals=lacking)]
        texts = {request.ordinal: request.trajectory for request in requests}
        if self.accepts_none and any(not text.sampling.greedy for text in texts.values()):
            raise EngineError(
                "this server accepts no drafts, which is exact at temperature 0 alone; retrace "
                f"recording {self.recording.id} on a server with standard acceptance"
            )
        self._total = sum(len(text.output_ids) - 1 for text in texts.values())
        self._began, ordinals = time.monotonic(), list(texts)
        for n in range(0, len(ordinals), TOGETHER):
            self._record({ordinal: texts[ordinal] for ordinal in ordinals[n : n + TOGETHER]})
        counts = len(texts), self._positions, self._requests
        seconds = time.monotonic() - self._began
        return Retraced(self.draft, self.gamma_max, *counts, seconds, self._busy_s)

    def _record(self, texts: Mapping[int, Trajectory]) -> None:
        """Asks about texts and stores their panoramas. Raises EngineError where the agent notes
        nothing."""
        self._texts, self._chains = texts, {ordinal: {} for ordinal in texts}
        for _ in range(ATTEMPTS):
            if questions := [*self._questions()]:
                self._ask(questions)
        if any(self._questions()):
            fault = self.server.agent_fault()
            raise EngineError(f"{self.server.folder}: the agent notes no proposals: {fault}")
        panoramas = [
            (ordinal, panorama_of(text, self._chains[ordinal], self.draft, self.gamma_max))
            for ordinal, text in self._texts.items()
        ]
        self.store.put_panoramas(self.recording.id, panoramas)

    def _questions(self) -> Iterator[tuple[int, int]]:
        """Texts and starts of which no proposals are known; the first start of a text where a
        request tells all of them. Where vLLM has no room to draft, it proposes nothing."""
        for ordinal, text in self._texts.items():
            for start in range(1, len(text.output_ids)):
                if len(text.prompt_ids) + start >= self.server.wanted.max_len:
                    self._chains[ordinal].setdefault(start, ())
                elif start not in self._chains[ordinal]:
                    yield ordinal, start
                    if self.accepts_none:
                        break

    def _ask(self, questions: Sequence[tuple[int, int]]) -> None:
        """Asks each question once, and waits until the answers are noted."""
        rest, now, deadline = list(questions)[::-1], time.monotonic(), 0.0
        sent: set[Future[None]] = set()
        with ThreadPoolExecutor(self.outstanding) as pool:
            try:
                while rest or sent or (any(self._questions()) and now < deadline):
                    allowed_s = self.share * (now - self._began)
                    while rest and len(sent) < self.outstanding and self._busy_s <= allowed_s:
                        sent.add(pool.submit(self._complete, *rest.pop()))
                        self._requests += 1
                    if sent:
                        ended, sent = wait(sent, LOOK_S, FIRST_COMPLETED)
                        for future in ended:
                            future.result()
                        self._busy_s += time.monotonic() - now
                        deadline = time.monotonic() + NOTED_S
                    else:
                        time.sleep(LOOK_S)
                    now = time.monotonic()
                    self._read()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, ordinal: int, start: int) -> None:
        """Sends a request and waits for its end. Raises EngineError."""
        text = self._texts[ordinal]
        output = text.output_ids.tolist()
        body: dict[str, Any] = {
            "request_id": f"{self._token}.{ordinal}.{start}",
            "prompt": text.prompt_ids.tolist() + output[: start - 1],
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": len(output),
            "vllm_xargs": {"spectune": self._word},
            **self._more,
        }
        if not self.accepts_none:
            # a second token, so that vLLM verifies, and hence hands on, what was drafted
            body |= {"max_tokens": 2, "allowed_token_ids": output[start - 1 : start]}
        self.server.complete(**body)

    def _read(self) -> None:
        """Takes what the agent has noted of our requests since the last call. Raises EngineError
        where the server decodes another text."""
        for (ordinal, start), noted in self._tail.noted(f"{self._token}.", RetracedRequest):
            if ordinal not in self._texts:  # asked twice, and noted before
                continue
            text, chains = self._texts[ordinal], self._chains[ordinal]
            count = len(text.output_ids) - 1 if self.accepts_none else 1
            if not np.array_equal(noted.output[:count], text.output_ids[start - 1 :][:count]):
                raise EngineError(
                    f"request {text.request_id}: this server decodes another text than the one "
                    "recorded; is it of the same model and precision?"
                )
            for place, chain in enumerate(noted.proposals[:count], start):
                if chain is not None:  # else vLLM preempted the request
                    self._positions += place not in chains
                    chains[place] = chain
        self._progress(f"positions of {self.draft}", self._positions, self._total)


def _draft_name(server: RunningServer, spec: PairSpec) -> str:
    """The name of a server's draft in a pair: that of its checkpoint, where the pair has it. Raises
    PairError for a server of another target."""
    target, path = server.spec.target, server.spec.drafts.get(server.draft)
    if not is_same(spec.target, target):
        raise PairError(f"the recording is of {spec.target}, but this server serves {target}")
    names = (name for name in spec.drafts if path and is_same(spec.drafts[name], path))
    return next(names, server.draft)


def panorama_of(
    text: Trajectory, chains: Mapping[int, Sequence[int]], draft: str, gamma_max: int
) -> Panorama:
    """The chains proposed from the starts of a text, as a panorama in which every start has nodes
    of its own: a chain of an engine may depend on where it begins. Starts without one propose
    nothing; distributions are not known, and their codes 0."""
    output = text.output_ids.tolist()
    nodes = [(0, 0, OFF_TEXT)] * (len(output) + 1)  # number of proposals, token, slot of the text
    parents: list[int] = []
    for start, chain in sorted(chains.items()):
        node, on_text = start, True
        for place, token in enumerate(chain[:gamma_max], start):
            if place > start:
                parents.append(node)
                node = len(nodes)
                nodes.append(nodes[-1])
            on_text = on_text and output[place : place + 1] == [token]
            nodes[node] = 1, token, 0 if on_text else OFF_TEXT
    count, tokens, text_slot = np.array(nodes, np.int32).T
    unknown = np.zeros(len(nodes), np.uint16)
    trie = Trie(
        parent=np.array(parents, np.int32),
        slot=np.zeros(len(parents), np.uint8),
        tokens=tokens[:, None],
        logp=unknown[:, None],
        gap=unknown[:, None],
        count=count.astype(np.uint8),
        entropy=unknown,
        top_entropy=unknown,
        text_slot=text_slot.astype(np.uint8),
        accept=unknown[:0],
    )
    return Panorama(draft=draft, gamma_max=gamma_max, width=1, depth=1, shared=False, trie=trie)
