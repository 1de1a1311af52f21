"""llama.cpp, one request at a time: its own HTTP server in this process, through xllamacpp.

Its server knows one number of draft tokens, given at its start, so a policy with another starts it
anew. Rounds are told by the stream's timings: each change of ``draft_n`` or ``predicted_ms`` is
one. The cache is float32 and attention is not fused: fused, its sums are coarser, and near ties of
a draft fall differently than its float32 weights say.

Its rules: the prompt's pass yields the first token and drafts nothing; a round drafts at most one
token less than are left to ``max_new_tokens``; above temperature 0 drafts propose their likeliest
token, kept iff the target draws it; a drafted end of the text is not counted as accepted.
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from spectune.engines.abilities import FLOAT32_ON_CPU, LLAMACPP
from spectune.engines.gguf import gguf_file
from spectune.engines.protocol import Answered, Load, Prompt, Wanted, check_fits, draft_of
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import AnyPolicy
from spectune.traces.errors import EngineError
from spectune.traces.schema import Finish, Sampling, Step, Trajectory, request_seed

ANSWER_S = 600.0
"""Longest silence of a server that is decoding."""
SLACK = 8
"""Tokens of context beyond the longest text, so that no draft is cut for want of room."""


class LlamaCpp:
    """A pair on llama.cpp (:class:`engines.protocol.Running`). Raises EngineError where it is not
    installed or cannot load a checkpoint, PairError for a draft that the pair has not."""

    engine, runs_on = LLAMACPP, FLOAT32_ON_CPU

    def __init__(self, spec: PairSpec, wanted: Wanted) -> None:
        self.version = LLAMACPP.require()
        self._wanted = wanted
        draft = draft_of(LLAMACPP, spec, wanted)
        self._target = gguf_file(spec.target)
        self._draft = None if draft is None else gguf_file(draft)
        self._server: Any = None
        self._gamma = -1
        self._start(0 if self._draft is None else wanted.most)

    @property
    def serving(self) -> Mapping[str, Any]:
        """How it fills its steps, by the names of :class:`engines.rules.ServingRules`."""
        seats = {"max_num_seqs": 1, "max_batched_tokens": self._batch_tokens}
        return {**seats, "max_len": self._wanted.max_len, "drafts_after": False}

    def execute(
        self,
        prompts: Sequence[Prompt],
        policy: AnyPolicy,
        load: Load,
        *,
        sampling: Sampling,
        max_new_tokens: int,
    ) -> Generator[Answered, None, None]:
        """As :meth:`engines.protocol.Running.execute`. Starts the server anew where the number of
        draft tokens changes. Moments leave out what the caller does between two answers."""
        wanted = self._wanted
        most = wanted.most if self._draft is not None else 0
        _, gamma = LLAMACPP.gammas(policy, draft=wanted.draft, most=most, max_num_seqs=1)
        if load.clients > 1:
            raise EngineError("llama.cpp is driven one request at a time; use --concurrency 1")
        check_fits(prompts, max_new_tokens, wanted.max_len)
        if gamma != self._gamma:
            self._start(gamma)
        return self._serve(prompts, policy, load, sampling, max_new_tokens)

    def close(self) -> None:
        self._server = None
        gc.collect()

    def _start(self, gamma: int) -> None:
        """Starts a server that drafts ``gamma`` tokens, with no draft loaded where that is 0."""
        import xllamacpp

        self.close()
        said, exact = xllamacpp.CommonParams(), xllamacpp.ggml_type.GGML_TYPE_F32
        said.model.path = str(self._target)
        self._batch_tokens = int(said.n_batch)
        said.n_ctx = self._wanted.max_len + self._wanted.most + SLACK
        said.n_gpu_layers = said.speculative.draft.n_gpu_layers = 0
        said.n_parallel, said.warmup, said.ui, said.verbosity = 1, False, False, -1
        said.cache_type_k = said.cache_type_v = exact
        said.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        draft, cpus = (
            said.speculative.draft,
            int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
        )
        for cpu in (said.cpuparams, said.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
            cpu.n_threads = self._wanted.threads or cpus
        if gamma:
            kinds = xllamacpp.common_speculative_type
            said.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            draft.mparams.path = str(self._draft)
            draft.n_max, draft.n_min, draft.p_min = gamma, 0, 0.0
            draft.cache_type_k = draft.cache_type_v = exact
        try:
            self._server = xllamacpp.Server(said)
        except RuntimeError as error:
            models = f"{self._target}, {self._draft}" if gamma else str(self._target)
            raise EngineError(f"llama.cpp {self.version} cannot load {models}: {error}") from None
        self._await()
        self._gamma = gamma

    def _await(self) -> None:
        """Until the server answers. One that is stopped before its thread accepts connections does
        not hear of it, and its end is waited for in vain. Raises EngineError where it is dead."""
        at = self._connection()
        try:
            at.request("GET", "/health")
            at.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"llama.cpp died at its start: {error!r}") from None
        finally:
            at.close()

    def _connection(self) -> http.client.HTTPConnection:
        address = urlsplit(self._server.listening_address).netloc
        return http.client.HTTPConnection(address, timeout=ANSWER_S)

    def _serve(
        self,
        prompts: Sequence[Prompt],
        policy: AnyPolicy,
        load: Load,
        sampling: Sampling,
        max_new_tokens: int,
    ) -> Generator[Answered, None, None]:
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            arrived = load.arrivals[i] if load.arrivals else time.perf_counter() - began
            time.sleep(max(0.0, arrived - (time.perf_counter() - began)))
            told = self._stream(prompt, sampling, max_new_tokens)
            rounds, finish = _rounds(told, began)
            tokens = [token for r in rounds for token in r.tokens]
            trajectory = Trajectory(
                prompt.id,
                prompt.category,
                np.array(prompt.ids, dtype=np.int32),
                np.array(tokens, dtype=np.int32),
                sampling,
                max_new_tokens,
                finish,
                "coupled" if sampling.greedy else "greedy",
            )
            steps = _steps(rounds, self._wanted.draft, policy.id, arrived)
            paused = time.perf_counter()
            yield Answered(trajectory, steps)
            began += time.perf_counter() - paused

    def _stream(
        self, prompt: Prompt, sampling: Sampling, max_new_tokens: int
    ) -> Iterator[dict[str, Any]]:
        """What the server says of a request, event by event. Raises EngineError where it fails."""
        asked = {
            "prompt": list(prompt.ids),
            "n_predict": max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "samplers": ["temperature", "top_k", "top_p"],
            "seed": request_seed(sampling.seed, prompt.id) % (1 << 31),
            "stream": True,
            "timings_per_token": True,
            "return_tokens": True,
            "cache_prompt": False,
        }
        at = self._connection()
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


class _Round:
    """Tokens that came together. ``drafted`` and ``accepted`` are sums over the request so far."""

    def __init__(self, timings: dict[str, Any], ended_s: float) -> None:
        self.drafted = int(timings.get("draft_n") or 0)
        self.accepted = int(timings.get("draft_n_accepted") or 0)
        self.prompt_ms, self.decoded_ms = (
            float(timings["prompt_ms"]),
            float(timings["predicted_ms"]),
        )
        self.ended_s = ended_s
        self.tokens: list[int] = []

    def told_by(self, timings: dict[str, Any]) -> bool:
        """Whether these timings are of the same round."""
        return (self.drafted, self.decoded_ms) == (
            timings.get("draft_n") or 0,
            timings["predicted_ms"],
        )


def _rounds(told: Iterator[dict[str, Any]], began: float) -> tuple[list[_Round], Finish]:
    """A request's rounds, and how its text ended. Raises EngineError for one that was cut off."""
    rounds: list[_Round] = []
    for event in told:
        if event["tokens"]:
            if not rounds or not rounds[-1].told_by(event["timings"]):
                rounds.append(_Round(event["timings"], time.perf_counter() - began))
            rounds[-1].tokens += event["tokens"]
        if event["stop"]:
            return rounds, "eos" if event["stop_type"] == "eos" else "length"
    raise EngineError("llama.cpp ended a request before its text was complete")


def _steps(rounds: Sequence[_Round], draft: str, policy: str, arrived_s: float) -> tuple[Step, ...]:
    """Rounds as they are recorded."""
    steps: list[Step] = []
    before, start = None, 0
    for r in rounds:
        drafted, accepted, ms = r.drafted, r.accepted, r.prompt_ms
        if before is not None:
            drafted, accepted = r.drafted - before.drafted, r.accepted - before.accepted
            ms = r.decoded_ms - before.decoded_ms
        emitted = len(r.tokens)
        steps.append(
            Step(
                start,
                drafted,
                drafted + 1,
                min(accepted, emitted - 1),
                emitted,
                drafted,
                draft=draft if drafted else "",
                policy=policy,
                round_s=ms / 1e3,
                depth=drafted,
                arrived_s=arrived_s,
                ended_s=r.ended_s,
            )
        )
        before, start = r, start + emitted
    return tuple(steps)
