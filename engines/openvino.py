"""OpenVINO GenAI: a batched engine in this process, driven a step at a time.

A request's number of draft tokens is fixed when it is sent (the engine keeps a copy of its
settings); requests with different numbers share steps. In a step the draft proposes for each
request, then the target verifies all of them in one pass. Without a draft token the engine runs
without the draft: it has no other way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from spectune.engines.abilities import OPENVINO
from spectune.engines.openvino_model import folder_of, model_folder
from spectune.engines.protocol import (
    Answered,
    Execution,
    Prompt,
    Running,
    Wanted,
    chain_round,
    draft_of,
)
from spectune.runtime.checkpoints import translated
from spectune.runtime.pair import PairSpec
from spectune.runtime.text_codec import end_tokens
from spectune.traces.errors import EngineError, PolicyError
from spectune.traces.schema import Finish, Step
from spectune.traces.text import one_line

PRECISION: Final = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Its defaults (bfloat16 where the processor has it, a cache of 8 bits) change texts."""
STEP_TOKENS: Final = 2048
"""Least tokens that a step may hold, so that a prompt of ordinary length is read in one."""


@dataclass
class _Request:
    """A request while it is served: where it is read from, and its rounds so far."""

    prompt: Prompt
    handle: Any
    arrived_s: float
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class OpenVino(Running):
    """A pair in OpenVINO GenAI. Moments leave out what the caller does between two answers."""

    engine = OPENVINO

    def __init__(self, spec: PairSpec, wanted: Wanted) -> None:
        self.version, self.wanted = OPENVINO.require(), wanted
        draft = draft_of(OPENVINO, spec, wanted)
        self._target = model_folder(spec.target, self.version)
        self._draft = None if draft is None else model_folder(draft, self.version)
        self._eos = set(end_tokens(spec.target))
        self._cache_gb = _cache_gb([spec.target, *([draft] if draft else [])], wanted)
        self._pipelines: dict[bool, Any] = {}
        self._sent = 0

    @property
    def serving(self) -> dict[str, Any]:
        return {
            "max_num_seqs": self.wanted.max_num_seqs,
            "max_batched_tokens": self._scheduler().max_num_batched_tokens,
            "max_len": self.wanted.max_len,
            "drafts_after": False,
        }

    def close(self) -> None:
        self._pipelines.clear()

    def _pipeline(self, *, drafts: bool) -> Any:
        if drafts not in self._pipelines:
            import openvino_genai as genai

            how: dict[str, Any] = dict(PRECISION)
            if self.wanted.threads is not None:
                how["INFERENCE_NUM_THREADS"] = self.wanted.threads
            loaded = dict(how)
            if drafts:
                loaded["draft_model"] = genai.draft_model(str(self._draft), "CPU", **how)
            with _translated("the pair cannot be loaded"):
                self._pipelines[drafts] = genai.ContinuousBatchingPipeline(
                    str(self._target), self._scheduler(), "CPU", loaded
                )
        return self._pipelines[drafts]

    def _scheduler(self) -> Any:
        import openvino_genai as genai

        config = genai.SchedulerConfig()
        config.cache_size = self._cache_gb
        config.max_num_seqs = self.wanted.max_num_seqs
        config.max_num_batched_tokens = max(self.wanted.max_len, STEP_TOKENS)
        config.enable_prefix_caching = False
        return config

    def _serve(self, asked: Execution) -> Generator[Answered, None, None]:
        if not asked.sampling.greedy:
            raise PolicyError(
                f"{OPENVINO.title} is run at temperature 0 alone: above, its way of keeping "
                "drafted tokens was not tested"
            )
        return self._answers(self._pipeline(drafts=asked.gamma > 0), asked)

    def _answers(self, pipeline: Any, asked: Execution) -> Generator[Answered, None, None]:
        waiting, running = deque(asked.prompts), dict[int, _Request]()
        load = asked.load
        began, sent = time.perf_counter(), 0
        try:
            while waiting or running:
                now = time.perf_counter() - began
                for _ in range(min(len(waiting), load.due(now, sent, len(running)))):
                    arrived = load.arrivals[sent] if load.arrivals else now
                    self._sent, sent = self._sent + 1, sent + 1
                    running[self._sent] = self._send(pipeline, waiting.popleft(), asked, arrived)
                if not running:
                    time.sleep(max(0.0, load.arrivals[sent] - now))
                    continue
                ended = self._step(pipeline, running, asked, began)
                paused = time.perf_counter()
                for number, finish in ended.items():
                    request = running.pop(number)
                    yield asked.answered(request.prompt, request.tokens, finish, request.steps)
                began += time.perf_counter() - paused
        finally:
            for request in running.values():
                request.handle.stop()
            with suppress(RuntimeError):
                while running and pipeline.has_non_finished_requests():
                    pipeline.step()

    def _send(self, pipeline: Any, prompt: Prompt, asked: Execution, arrived_s: float) -> _Request:
        import openvino as ov

        config = self._config(asked, prompt)
        with _translated(f"request {prompt.id}"):
            handle = pipeline.add_request(
                self._sent, ov.Tensor(np.array([prompt.ids], dtype=np.int64)), config
            )
        return _Request(prompt, handle, arrived_s)

    def _config(self, asked: Execution, prompt: Prompt) -> Any:
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = asked.most_tokens(prompt)
        config.do_sample = False
        config.apply_chat_template = False
        config.stop_token_ids = self._eos
        if self._eos:  # else the tokenizer's is taken
            config.set_eos_token_id(min(self._eos))
        if asked.gamma:
            config.num_assistant_tokens = asked.gamma
        return config

    def _step(
        self, pipeline: Any, running: dict[int, _Request], asked: Execution, began: float
    ) -> dict[int, Finish]:
        """One step of the engine, noted in each request that it gave tokens to; how those ended
        that did."""
        start = time.perf_counter()
        with _translated("it failed while it served"):
            pipeline.step()
        now, seconds = time.perf_counter() - began, time.perf_counter() - start
        batch, ended = pipeline.get_metrics().scheduled_requests, dict[int, Finish]()
        draft, policy = self.wanted.draft, asked.policy.id
        for number, request in running.items():
            if request.handle.get_status().name == "IGNORED":
                raise EngineError(
                    f"{OPENVINO.title}: request {request.prompt.id}: its tokens do not fit in the "
                    "engine's cache"
                )
            if not request.handle.can_read():
                continue
            (output,) = request.handle.read().values()
            new, before = list(output.generated_ids), len(request.tokens)
            # The prompt's pass drafts nothing, and no round drafts what could not be kept.
            most = asked.most_tokens(request.prompt)
            drafted = min(asked.gamma, most - before - 1) if before else 0
            accepted, emitted = min(drafted, len(new) - 1), len(new)
            request.tokens += new
            request.steps.append(
                chain_round(
                    before,
                    drafted,
                    accepted,
                    emitted,
                    draft=draft,
                    policy=policy,
                    batch=batch,
                    round_s=seconds,
                    arrived_s=request.arrived_s,
                    ended_s=now,
                )
            )
            if (why := output.finish_reason.name) != "NONE":
                ended[number] = "length" if why == "LENGTH" else "eos"
        return ended


def _cache_gb(models: Sequence[str], wanted: Wanted) -> int:
    """GB of cache in which every request of a step has room for its longest text, in float32; one
    more for each model, as the engine deals them out by whole ones."""
    from transformers import AutoConfig

    values = 0
    for path in models:
        with translated(f"{path}: its config.json cannot be read"):
            config = AutoConfig.from_pretrained(folder_of(path)).get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        values += (
            config.num_hidden_layers
            * size
            * (getattr(config, "num_key_value_heads", None) or heads)
        )
    tokens = wanted.max_num_seqs * (wanted.max_len + wanted.most)
    return len(models) + int(tokens * values * 2 * 4 / 1e9)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """What OpenVINO raises, in one line: its reason without the places in its sources."""
    try:
        yield
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip() and "/src/" not in line]
        raise EngineError(
            f"{OPENVINO.title}: {what}: {one_line(lines[-1] if lines else str(error))}"
        ) from None
