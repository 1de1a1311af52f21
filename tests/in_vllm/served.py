"""A vLLM engine with our scheduler, driven from a test."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from databases import opened, put_in_force
from synthetic import policy
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from waiting import eventually

from spectune.engines.vllm.command import SCHEDULER, speculative_config
from spectune.runtime.pair import PairSpec, read_pair
from spectune.traces.recording import LoadedRecording, RecordedRequest
from spectune.traces.store import TraceStore

MOST = 8
SEATS = 8


class Engine:
    """The demo pair in vLLM, with a database beside it. ``steps_at`` of a request's name tells the
    runs of a test apart."""

    def __init__(self, llm: AsyncLLM, store: TraceStore, spec: PairSpec) -> None:
        self.store, self.spec = store, spec
        self._llm, self._runs = llm, 0
        self._read: dict[str, dict[int, RecordedRequest]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(
        self, prompts: Sequence[str], clients: int, **sampling: Any
    ) -> tuple[str, list[list[int]]]:
        """Decodes the prompts, so many at a time. The beginning of their requests' names, and their
        tokens."""
        self._runs += 1
        name = f"run{self._runs}-"
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})

        async def one(i: int, prompt: str, gate: asyncio.Semaphore) -> list[int]:
            tokens: list[int] = []
            async with gate:
                async for out in self._llm.generate(prompt, params, request_id=f"{name}{i}"):
                    tokens = list(out.outputs[0].token_ids)
            return tokens

        async def every() -> list[list[int]]:
            gate = asyncio.Semaphore(clients)
            return await asyncio.gather(*(one(i, p, gate) for i, p in enumerate(prompts)))

        return name, asyncio.run_coroutine_threadsafe(every(), self._loop).result(300)

    def publish(self, window: dict[str, Any], draft: str, **blocks: Any) -> int:
        """Publishes a policy; its version."""
        wanted = policy(draft, window, **blocks)
        return put_in_force(self.store, self.spec.id, wanted, deployment="vllm")

    def answered(self, version: int) -> tuple[str, str]:
        """Status and reason of the server's answer to a publication."""
        eventually(lambda: bool(self.store.acknowledgements(version)))
        (answer,) = self.store.acknowledgements(version)
        return answer.status, answer.reason

    def recorded(self, name: str, count: int) -> LoadedRecording:
        """The recording, of the requests of a run alone; what was read before is not read again."""

        def found() -> list[RecordedRequest]:
            for info in self.store.list_recordings():
                read = self._read.setdefault(info.id, {})
                new = sorted(self.store.recorded_ordinals(info.id) - read.keys())
                loaded = self.store.iterate(info.id, drafts=(), steps=True, ordinals=new)
                read.update((r.ordinal, r) for r in loaded)
            every = (r for read in self._read.values() for r in read.values())
            return [r for r in every if name in r.trajectory.request_id]

        eventually(lambda: len(found()) == count)
        requests = sorted(found(), key=lambda r: r.ordinal)
        return LoadedRecording(self.store.list_recordings()[0], tuple(requests))

    def close(self) -> None:
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)


def tokens_of(texts: Sequence[str]) -> list[list[int]]:
    """The texts in the demo pair's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(read_pair("demo").target)
    return [tokenizer(text)["input_ids"] for text in texts]


@contextmanager
def engine(
    folder: Path, draft: str, config: Mapping[str, object] | None = None
) -> Iterator[Engine]:
    """An engine that loaded a draft of the demo pair, or looks up (``ngram``), recording into a new
    database in ``folder``; without a speculative ``config`` that of our own servers."""
    spec, url = read_pair("demo"), str(folder / "vllm.db")
    os.environ |= {
        **{"SPECTUNE_DB": url, "SPECTUNE_PAIR": "demo", "SPECTUNE_DEPLOYMENT": "vllm"},
        **{"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    }
    arguments = AsyncEngineArgs(
        model=spec.target,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=SEATS,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config=dict(
            config or speculative_config(dict(spec.drafts).get(draft), MOST, SEATS)
        ),
        scheduler_cls=SCHEDULER,
        distributed_executor_backend="uni",  # vLLM's choice where there is one GPU
    )
    with opened(url) as store:
        made = Engine(AsyncLLM.from_engine_args(arguments), store, spec)
        try:
            yield made
        finally:
            made.close()
