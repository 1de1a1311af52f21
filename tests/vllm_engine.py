"""A real vLLM in this process, a step at a time: every decision of its scheduler, and its texts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.llm_engine import LLMEngine

from spectune.demo.prompts import demo_workload
from spectune.runtime.pair import read_pair

SEATS, MOST, TOKENS = 8, 6, 40
PROMPTS = [line["turns"][0] for line in demo_workload()][::3]
SCHEDULER = "spectune.engines.vllm.agent.Scheduler"
DRAFTING: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": dict(read_pair("demo").drafts)["small"]},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}


class Replaceable(AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler, which remembers its arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.arguments = arguments


class Steps:
    """vLLM's engine. ``outputs``: of each step names and token counts, drafts, the number of tokens
    to draft and of tokens so far; ``decisions``: all of the scheduler's output, as text."""

    def __init__(self, llm: LLMEngine) -> None:
        self.llm = llm
        self.core: Any = self.llm.engine_core.engine_core
        self.arguments = getattr(self.core.scheduler, "arguments", {})
        self._watch(self.core.scheduler)

    def _watch(self, scheduler: Any) -> None:
        self.scheduler, self._schedule, self.runs = scheduler, scheduler.schedule, 0
        self.outputs: list[tuple[Any, ...]] = []
        self.decisions: list[str] = []
        scheduler.schedule = self._noted

    def _noted(self, *args: Any) -> Any:
        output = self._schedule(*args)
        self.outputs.append((
            [(name.partition("-")[0], n) for name, n in output.num_scheduled_tokens.items()],
            [(name.partition("-")[0], list(ids))
             for name, ids in output.scheduled_spec_decode_tokens.items()],
            output.num_spec_tokens_to_schedule,
            sorted(output.scheduled_cached_reqs.num_output_tokens),
        ))  # fmt: skip
        fields = vars(output).items()
        text = repr({name: sorted(v) if isinstance(v, set) else v for name, v in fields})
        self.decisions.append(re.sub(r"-[0-9a-f]{8}\b", "", text))  # vLLM's part of the names
        return output

    @property
    def vllms_class(self) -> type:
        """The scheduler that this engine has where none is named."""
        config = copy(self.llm.vllm_config.scheduler_config)
        config.scheduler_cls = None
        return config.get_scheduler_cls()  # type: ignore[no-any-return]

    def schedule_by(self, scheduler_class: Any, **arguments: Any) -> Any:
        """Goes on with a new scheduler, built with the arguments of the engine's first, which was a
        :class:`Replaceable`; the scheduler."""
        self.finish()
        scheduler = scheduler_class(**self.arguments | arguments)
        self._watch(scheduler)
        self.core.scheduler = scheduler
        return scheduler

    def finish(self) -> None:
        """Has the worker hear what has ended."""
        while self.core.scheduler.has_requests():
            self.llm.step()

    def serve(
        self,
        prompts: Sequence[str],
        *,
        abort: int | None = None,
        retrace: int | None = None,
        **params: Any,
    ) -> list[list[int]]:
        """Decodes the prompts, 8 at a time; their tokens. ``abort``: the index of one that is
        aborted with its first tokens; ``retrace``: of one that is marked as retraced."""
        texts, sent, ended = [list[int]() for _ in prompts], 0, 0
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, **params})
        watched = getattr(self.core.scheduler, "_spectune", None)
        self.runs += 1
        while ended < len(prompts):
            while sent < len(prompts) and sent - ended < SEATS:
                word = getattr(watched, "key", "retrace")
                sampling.extra_args = {"spectune": word} if sent == retrace else None
                self.llm.add_request(f"{self.runs}.{sent}", prompts[sent], sampling.clone())
                sent += 1
            for out in self.llm.step():
                number = int(out.request_id.partition("-")[0].partition(".")[2])
                texts[number] = list(out.outputs[0].token_ids)
                ended += out.finished
                if number == abort and not out.finished:
                    self.llm.abort_request([out.request_id])
                    ended, abort = ended + 1, None
        return texts


@contextmanager
def engine(
    folder: Path | None,
    scheduler: str | type | None = SCHEDULER,
    *,
    method: str = "draft_model",
    backend: str | None = None,
) -> Iterator[Steps]:
    """vLLM with the demo pair for as long as the context lasts."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1", "SPECTUNE_FOLDER": str(folder or ""),
    }  # fmt: skip
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over its wrapper
    try:
        arguments = EngineArgs(
            model=read_pair("demo").target, dtype="float32", max_model_len=512,
            max_num_seqs=SEATS, max_num_batched_tokens=160, enforce_eager=True,
            speculative_config={**DRAFTING[method], "num_speculative_tokens": MOST},
            distributed_executor_backend=backend, scheduler_cls=scheduler,
        )  # fmt: skip
        steps = Steps(LLMEngine.from_engine_args(arguments))
    finally:
        sys.modules |= {} if hidden is None else {"llvmlite.binding.ffi": hidden}
    try:
        yield steps
    finally:
        steps.llm.engine_core.shutdown()


class Placeholder:
    """A stream or an event of a CPU, where nothing runs beside."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@contextmanager
def engine_ahead(folder: Path | None, scheduler: str | type | None = SCHEDULER) -> Iterator[Steps]:
    """As :func:`engine`, one that schedules a step ahead. vLLM refuses that on CPUs; its code for
    GPUs runs here with streams that do nothing."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def schedule_ahead(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    streams = dict.fromkeys(("Stream", "Event", "current_stream"), Placeholder)
    with (
        patch.multiple(torch.cuda, **streams, stream=lambda _: nullcontext()),
        patch.object(torch, "Event", Placeholder),
        patch.object(CpuPlatform, "check_and_update_config", staticmethod(schedule_ahead)),
        engine(folder, scheduler, backend="uni") as steps,
    ):
        assert steps.core.batch_queue is not None
        yield steps
