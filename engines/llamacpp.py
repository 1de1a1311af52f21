"""llama.cpp, one request at a time: its own HTTP server in a process beside, through xllamacpp.

Its server knows one number of draft tokens, given at its start, so a policy with another starts it
anew. Rounds are told by the stream's timings: each change of ``draft_n`` or ``predicted_ms`` is
one. The cache is float32 and attention is not fused: fused, its sums are coarser, and near ties of
a draft fall differently than its float32 weights say.

Its rules: the prompt's pass yields the first token and drafts nothing; a round drafts at most one
token less than are left to ``max_new_tokens``; above temperature 0 drafts propose their likeliest
token, kept iff the target draws it; a drafted end of the text is not counted as accepted.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spectune.engines.abilities import LLAMACPP
from spectune.engines.gguf import gguf_file
from spectune.engines.protocol import (
    Answered,
    Execution,
    Prompt,
    Running,
    Wanted,
    chain_round,
    draft_of,
)
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import EngineError
from spectune.traces.schema import Finish, Step, request_seed

SERVER = Path(__file__).with_name("llamacpp_server.py")
ANSWER_S = 600.0
"""Longest silence of a server that is decoding."""
SLACK = 8
"""Tokens of context beyond the longest text, so that no draft is cut for want of room."""

Round = tuple[dict[str, Any], float, list[int]]
"""Timings of a request up to a round, when the round was told, and its tokens."""


class LlamaCpp(Running):
    """A pair on llama.cpp. The server starts anew where the number of draft tokens changes. Moments
    leave out what the caller does between two answers."""

    engine = LLAMACPP

    def __init__(self, spec: PairSpec, wanted: Wanted) -> None:
        self.version, self.wanted = LLAMACPP.require(), wanted
        draft = draft_of(LLAMACPP, spec, wanted)
        self._target = gguf_file(spec.target)
        self._draft = None if draft is None else gguf_file(draft)
        self._server: subprocess.Popen[str] | None = None
        self._start(0 if self._draft is None else wanted.most)

    @property
    def serving(self) -> Mapping[str, Any]:
        seats = {"max_num_seqs": 1, "max_batched_tokens": self._batch_tokens}
        return {**seats, "max_len": self.wanted.max_len, "drafts_after": False}

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
        self._server = None

    def _start(self, gamma: int) -> None:
        """Starts a server that drafts ``gamma`` tokens, with no draft loaded where that is 0."""
        self.close()
        asked = {
            "model": str(self._target),
            "draft": None if self._draft is None else str(self._draft),
            "gamma": gamma,
            "n_ctx": self.wanted.max_len + self.wanted.most + SLACK,
            "threads": self.wanted.threads or _threads(),
        }
        self._server = subprocess.Popen(
            # -P: modules of engines/ have names of packages.
            [sys.executable, "-P", str(SERVER), json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that
            text=True,
        )
        assert self._server.stdout is not None
        try:
            line = self._server.stdout.readline()
        except BaseException:  # Ctrl-C while it loads
            self.close()
            raise
        told = json.loads(line) if line.startswith("{") else {"error": "it died at its start"}
        if "error" in told:
            models = f"{self._target}, {self._draft}" if gamma else str(self._target)
            self.close()
            raise EngineError(f"llama.cpp {self.version} cannot load {models}: {told['error']}")
        self._address = urlsplit(told["address"]).netloc
        self._batch_tokens, self._gamma = told["max_batched_tokens"], gamma

    def _serve(self, asked: Execution) -> Generator[Answered, None, None]:
        if asked.load.clients > 1:
            raise EngineError("llama.cpp is driven one request at a time; use --concurrency 1")
        if asked.gamma != self._gamma:
            self._start(asked.gamma)
        return self._answers(asked)

    def _answers(self, asked: Execution) -> Generator[Answered, None, None]:
        began, arrivals, policy = time.perf_counter(), asked.load.arrivals, asked.policy.id
        for i, prompt in enumerate(asked.prompts):
            arrived = arrivals[i] if arrivals else time.perf_counter() - began
            time.sleep(max(0.0, arrived - (time.perf_counter() - began)))
            rounds, finish = _rounds(self._stream(asked, prompt), began)
            tokens = [token for *_, own in rounds for token in own]
            steps = _steps(rounds, self.wanted.draft, policy, arrived)
            paused = time.perf_counter()
            yield asked.answered(prompt, tokens, finish, steps)
            began += time.perf_counter() - paused

    def _stream(self, of: Execution, prompt: Prompt) -> Iterator[dict[str, Any]]:
        """What the server says of a request, event by event. Raises EngineError where it fails."""
        asked = {
            "prompt": list(prompt.ids),
            "n_predict": of.most_tokens(prompt),
            "temperature": of.sampling.temperature,
            "top_k": of.sampling.top_k,
            "top_p": of.sampling.top_p,
            "samplers": ["temperature", "top_k", "top_p"],
            "seed": request_seed(of.sampling.seed, prompt.id) % (1 << 31),
            "stream": True,
            "timings_per_token": True,
            "return_tokens": True,
            "cache_prompt": False,
        }
        at = http.client.HTTPConnection(self._address, timeout=ANSWER_S)
        try:
            kind = {"Content-Type": "application/json"}
            at.request("POST", "/completion", json.dumps(asked), kind)
            answer = at.getresponse()
            if answer.status != 200:
                said = json.loads(answer.read()).get("error", {}).get("message", answer.reason)
                raise EngineError(f"llama.cpp refuses request {prompt.id!r}: {said}")
            yield from (json.loads(line[5:]) for line in answer if line.startswith(b"data:"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineError(f"llama.cpp died at request {prompt.id!r}: {error!r}") from None
        finally:
            at.close()


def _threads() -> int:
    """What ``OMP_NUM_THREADS`` says (of ``4,2`` the first), else every core."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(said) if said.isdigit() and int(said) else os.cpu_count() or 1


def _rounds(told: Iterable[dict[str, Any]], began: float) -> tuple[list[Round], Finish]:
    """A request's rounds, and how its text ended. Raises EngineError for one that was cut off."""
    rounds: list[Round] = []
    for event in told:
        if "error" in event:
            raise EngineError(f"llama.cpp failed: {str(event['error'])[:200]}")
        if event["tokens"]:
            timings = event["timings"]
            if not rounds or _sums(timings) != _sums(rounds[-1][0]):
                rounds.append((timings, time.perf_counter() - began, []))
            rounds[-1][2].extend(event["tokens"])
        if event["stop"]:
            return rounds, "eos" if event["stop_type"] == "eos" else "length"
    raise EngineError("llama.cpp ended a request before its text was complete")


def _sums(timings: Mapping[str, Any]) -> tuple[int, float]:
    """Tokens drafted and milliseconds decoded so far: they change with each round."""
    return timings.get("draft_n") or 0, timings["predicted_ms"]


def _steps(rounds: Iterable[Round], draft: str, policy: str, arrived_s: float) -> list[Step]:
    """Rounds as they are recorded."""
    steps: list[Step] = []
    start, before, decoded_ms = 0, (0, 0), 0.0
    for timings, ended_s, tokens in rounds:
        now = timings.get("draft_n") or 0, timings.get("draft_n_accepted") or 0
        drafted, accepted = now[0] - before[0], now[1] - before[1]
        ms = timings["predicted_ms"] - decoded_ms if steps else timings["prompt_ms"]
        kept = min(accepted, len(tokens) - 1)
        steps.append(
            chain_round(
                start,
                drafted,
                kept,
                len(tokens),
                draft=draft,
                policy=policy,
                round_s=ms / 1e3,
                arrived_s=arrived_s,
                ended_s=ended_s,
            )
        )
        start, before, decoded_ms = start + len(tokens), now, timings["predicted_ms"]
    return steps
