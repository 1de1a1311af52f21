"""vLLM's own scheduler, which also records each round and drafts what the policy in force says.

It runs in the process of the engine's core. Two environment variables say where: ``SPECTUNE_DB``,
the database, and ``SPECTUNE_PAIR``, the pair as ``--pair`` takes it (without it the pair is what
the server loaded). ``SPECTUNE_DEPLOYMENT`` names what it follows, ``vllm`` where it is not set.
Without ``SPECTUNE_DB`` it is vLLM's scheduler and nothing more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from spectune.engines.abilities import VLLM
from spectune.engines.serving import Place, Served, served_pair
from spectune.engines.vllm.tables import Table, table_of
from spectune.runtime.pair import PairSpec
from spectune.traces.schema import Finish, Sampling, Step, Trajectory, Verifier

logger = init_logger(f"vllm.{__name__}")  # below "vllm" it has vLLM's handlers and format

IN_FLIGHT: Final = 64
"""Most scheduled steps whose results are waited for; older ones never ran."""


@dataclass
class _Served:
    """A request while it is decoded: its rounds as :class:`Step` takes them, and the seconds of its
    prefill so far."""

    steps: list[Step] = field(default_factory=list)
    unspent_s: float = 0.0


class _Scheduled(NamedTuple):
    """A step that was scheduled: when, and by whose policy."""

    at: float
    policy: str


class _Before(NamedTuple):
    """A request of a step before its result is known to it: its output tokens, the tokens drafted
    and those accepted."""

    request: Request
    start: int
    drafted: int
    accepted: int


class Scheduler(AsyncScheduler):
    """Records rounds and texts, and puts the published number of draft tokens in force at the next
    ``schedule()``.

    Raises RuntimeError at the start of a server whose vLLM lacks what is used here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dynamic_sd_lookup: list[int] | None
        self._spectune: Served[Table] | None = None
        self._scheduled: dict[int, _Scheduled] = {}
        self._decoding: dict[str, _Served] = {}
        self._updated_at = 0.0
        self._clock = time.perf_counter() - time.time()  # arrivals are told by the other one
        self._sampling: dict[tuple[float, int, float], Sampling] = {}
        url = os.environ.get("SPECTUNE_DB", "")
        if not url:
            logger.warning(
                "spectune: SPECTUNE_DB is not set, so nothing is recorded and no policy followed"
            )
            return
        if not VLLM.tested(vllm.__version__):
            logger.warning(
                "spectune: vLLM %s was not tested; tested: %s",
                vllm.__version__,
                ", ".join(VLLM.versions),
            )
        if not hasattr(self, "dynamic_sd_lookup"):
            raise RuntimeError(
                f"spectune cannot set the draft tokens of vLLM {vllm.__version__}; tested: "
                f"{', '.join(VLLM.versions)}"
            )
        config = self.vllm_config
        speculative = config.speculative_config
        self._draft = ""
        table = self._own_table()
        self._in_force = table
        if speculative is not None and self.dynamic_sd_lookup is None:
            self.dynamic_sd_lookup = list(table.gammas)
        about: dict[str, Any] = {
            "engine": "vllm",
            "engine_version": vllm.__version__,
            "device": str(config.device_config.device_type),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "serving": self._rules(),
        }
        if getattr(speculative, "method", None) == "ngram":
            about["prompt_lookup"] = [speculative.prompt_lookup_min, speculative.prompt_lookup_max]
        probabilistic = getattr(speculative, "draft_sample_method", "greedy") != "greedy"
        self._above_zero: Verifier = "rejection" if probabilistic else "greedy"
        place = Place(
            url,
            str(about["device"]),
            f"vllm:{os.uname().nodename}:{os.getpid()}",
            about,
            config.model_config.max_model_len,
            os.environ.get("SPECTUNE_DEPLOYMENT") or "vllm",
        )
        self._spectune = Served(
            place, self._pair, table, self._ready, lambda line: logger.info("spectune: %s", line)
        )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's own, under the table in force."""
        if self._spectune is None:
            return super().schedule(*args, **kwargs)
        table = self._spectune.current()
        if table is not self._in_force:
            self.dynamic_sd_lookup = list(table.gammas)
            self._in_force = table
        began = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        self._scheduled[id(output)] = _Scheduled(began, table.policy)
        if len(self._scheduled) > IN_FLIGHT:
            del self._scheduled[next(iter(self._scheduled))]
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """vLLM's own, with each request's round noted."""
        if self._spectune is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        before = self._before(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._note(scheduler_output, before)
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        """vLLM's own; what was decoded of an aborted request (a stop string found outside, a client
        that left) is kept."""
        ended: list[Request] = super().finish_requests(*args, **kwargs)
        for request in ended:
            self._ended(request)
        return ended

    def shutdown(self) -> None:
        """vLLM's own, after what is pending was written."""
        if self._spectune is not None:
            done = self._spectune.close()
            logger.info("spectune: %d requests recorded, %d dropped", done.written, done.dropped)
        super().shutdown()

    def _rules(self) -> dict[str, Any]:
        """What of this server's configuration decides what a step holds, by the names of
        :class:`engines.rules.ServingRules`."""
        config = self.vllm_config
        speculative, cache = config.speculative_config, config.cache_config
        return {
            "max_num_seqs": self.scheduler_config.max_num_seqs,
            "max_batched_tokens": self.scheduler_config.max_num_batched_tokens,
            "draft_slots": 0 if speculative is None else speculative.max_num_new_slots_for_drafting,
            "max_len": config.model_config.max_model_len,
            "cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
            "ahead": config.max_concurrent_batches - 1,
        }

    def _own_table(self) -> Table:
        """What the server was started with."""
        found = self.dynamic_sd_lookup
        return Table(
            tuple(found)
            if found
            else (0, *[self.num_spec_tokens] * self.scheduler_config.max_num_seqs)
        )

    def _pair(self) -> PairSpec:
        """The pair that is served. Raises PairError where ``SPECTUNE_PAIR`` is another."""
        config, speculative = self.vllm_config, self.vllm_config.speculative_config
        target = config.model_config.model
        method = None if speculative is None else speculative.method
        loaded = None if method is None or method.startswith("ngram") else speculative.model
        spec, self._draft = served_pair(target, loaded, "none" if method is None else "ngram")
        return spec

    def _ready(self, policy: Any, version: int) -> Table:
        return table_of(
            policy,
            version,
            draft=self._draft,
            most=self.num_spec_tokens,
            max_num_seqs=self.scheduler_config.max_num_seqs,
        )

    def _before(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> list[_Before]:
        """The step's requests; vLLM cuts the lists of sampled tokens while it reads them."""
        sampled, index, invalid = (
            result.sampled_token_ids,
            result.req_id_to_index,
            scheduled.num_invalid_spec_tokens or {},
        )
        found = []
        for name in scheduled.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request.is_finished():
                continue
            tokens = len(sampled[index[name]]) if sampled and name in index else 0
            drafted = len(scheduled.scheduled_spec_decode_tokens.get(name) or ()) - invalid.get(
                name, 0
            )
            found.append(_Before(request, request.num_output_tokens, drafted, max(0, tokens - 1)))
        return found

    def _note(self, scheduled: SchedulerOutput, before: list[_Before]) -> None:
        now, by = time.perf_counter(), self._scheduled.pop(id(scheduled), None)
        seconds = 0.0 if by is None else now - max(by.at, self._updated_at)
        self._updated_at = now
        batch, policy = len(scheduled.num_scheduled_tokens), "" if by is None else by.policy
        for was in before:
            request = was.request
            served = self._decoding.get(request.request_id)
            if served is None:
                served = self._decoding[request.request_id] = _Served()
            emitted = request.num_output_tokens - was.start
            if not emitted:  # a part of its prompt was read
                served.unspent_s += seconds
                continue
            served.steps.append(
                Step(
                    was.start, was.drafted, was.drafted + 1, was.accepted, emitted, was.drafted,
                    draft=self._draft if was.drafted else "", policy=policy,
                    round_s=seconds + served.unspent_s, depth=was.drafted, batch=batch,
                    arrived_s=self._clock + request.arrival_time, ended_s=now,
                )
            )  # fmt: skip
            served.unspent_s = 0.0
            if request.is_finished():
                self._ended(request)

    def _ended(self, request: Request) -> None:
        served = self._decoding.pop(request.request_id, None)
        params, prompt = request.sampling_params, request.prompt_token_ids
        if self._spectune is None or served is None or not served.steps or params is None:
            return
        if (
            not prompt or request.lora_request is not None
        ):  # embeddings in the place of tokens; another model
            return
        self._spectune.put(
            Trajectory(
                request.request_id,
                "serve",
                np.array(prompt, dtype=np.int32),
                np.array(list(request.output_token_ids), dtype=np.int32),
                (sampling := self._sampling_of(params)),
                request.max_tokens,
                _finish(request),
                "coupled" if sampling.greedy else self._above_zero,
                _texts(params.stop),
            ),
            served.steps,
        )

    def _sampling_of(self, params: Any) -> Sampling:
        key = float(params.temperature), max(0, int(params.top_k)), float(params.top_p)
        if key[0] == 0:
            key = 0.0, 0, 1.0
        if key not in self._sampling and len(self._sampling) < 1024:
            self._sampling[key] = Sampling(*key)
        return self._sampling.get(key) or Sampling(*key)


def _finish(request: Request) -> Finish:
    if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
        return "length"
    return (
        "eos"
        if request.status == RequestStatus.FINISHED_STOPPED and request.stop_reason is None
        else "stop"
    )


def _texts(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
