"""vLLM's own scheduler, which also records each round and drafts what the policy in force says.

It runs in the process of the engine's core. Two environment variables say where: ``SPECTUNE_DB``,
the database, and ``SPECTUNE_PAIR``, the pair as ``--pair`` takes it (without it the pair is what
the server loaded). ``SPECTUNE_DEPLOYMENT`` names what it follows, ``vllm`` where it is not set.
Without ``SPECTUNE_DB`` it is vLLM's scheduler and nothing more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from spectune.engines.abilities import VLLM
from spectune.engines.protocol import chain_round, text_of
from spectune.engines.serving import Place, Served, Table, served_pair
from spectune.runtime.hardware import hardware
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import PairError, PolicyError
from spectune.traces.schema import Finish, Sampling, Step, Verifier

logger = init_logger(f"vllm.{__name__}")  # below "vllm" it has vLLM's handlers and format

IN_FLIGHT: Final = 64
"""Most scheduled steps whose results are waited for; older ones never ran."""
METHODS: Final = ("draft_model", "eagle", "eagle3", "ngram", "ngram_gpu")
"""Ways to draft that a pair has a name for. Of others (a target's own heads, say) nothing is
recorded."""


@dataclass
class _Served:
    """A request while it is decoded: its rounds as :class:`Step` takes them, and the seconds of its
    prefill so far."""

    steps: list[Step] = field(default_factory=list)
    unspent_s: float = 0.0


class _Before(NamedTuple):
    """A request of a step before its result is known to it: its output tokens, the tokens drafted
    and those accepted."""

    request: Request
    start: int
    drafted: int
    accepted: int


class Scheduler(AsyncScheduler):
    """Records rounds and texts, and drafts by the published table from the next ``schedule()`` on.

    Until a table is published vLLM's own choice of draft tokens stays. Whatever of ours fails,
    vLLM goes on as without us, and one line of its log says so.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spectune: Served | None = None
        self._scheduled: dict[int, tuple[float, str]] = {}  # when it was, and by whose policy
        self._decoding: dict[str, _Served] = {}
        self._updated_at, self._failed = 0.0, set[type[Exception]]()
        self._clock = time.perf_counter() - time.time()  # arrivals are told by the other one
        if not os.environ.get("SPECTUNE_DB"):
            logger.warning(
                "spectune: SPECTUNE_DB is not set, so nothing is recorded and no policy followed"
            )
            return
        try:
            self._start()
        except Exception as error:  # whatever a new version changed
            logger.warning("spectune: nothing is recorded or followed: %r", error)

    def _start(self) -> None:
        found = vllm.__version__
        if not VLLM.tested(found):
            tested = ", ".join(VLLM.versions)
            logger.warning("spectune: vLLM %s was not tested; tested: %s", found, tested)
        config = self.vllm_config
        speculative = config.speculative_config
        self._in_force = initial = Table(())  # until something is published
        self._vllms_lookup = getattr(self, "dynamic_sd_lookup", None)
        if speculative is not None and (why := self._unsafe()):
            logger.warning("spectune: every policy is refused here: %s", why)
        device, ranks = str(config.device_config.device_type), config.parallel_config.world_size
        about: dict[str, Any] = {
            "engine": "vllm",
            "engine_version": found,
            "device": device,
            "hardware": hardware(device, torch.get_num_threads(), count=ranks),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "serving": self._rules(),
        }
        if getattr(speculative, "method", None) == "ngram":
            about["prompt_lookup"] = [speculative.prompt_lookup_min, speculative.prompt_lookup_max]
        probabilistic = getattr(speculative, "draft_sample_method", "greedy") != "greedy"
        self._above_zero: Verifier = "rejection" if probabilistic else "greedy"
        place = Place.here(device, about, config.model_config.max_model_len)
        self._spectune = Served(
            place, self._pair, initial, self._gammas, lambda line: logger.info("spectune: %s", line)
        )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's own, under the table in force."""
        if self._spectune is None:
            return super().schedule(*args, **kwargs)
        policy = ""
        with self._guarded():
            policy = self._take_table(self._spectune)
        began = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        with self._guarded():
            self._scheduled[id(output)] = began, policy
            if len(self._scheduled) > IN_FLIGHT:
                del self._scheduled[next(iter(self._scheduled))]
        return output

    def _take_table(self, served: Served) -> str:
        """Puts the newest table in force; its policy. vLLM's own choice stays where none is
        published, and returns where something fails."""
        try:
            table = served.current()
            if table is not self._in_force and self.vllm_config.speculative_config is not None:
                lookup = list(table.gammas) if table.version else self._vllms_lookup
                self.dynamic_sd_lookup: Any = lookup
            self._in_force = table
        except Exception:
            self.dynamic_sd_lookup, self._in_force = self._vllms_lookup, Table(())
            raise
        return table.policy

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """vLLM's own, with each request's round noted."""
        if self._spectune is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        before: list[_Before] = []
        with self._guarded():
            before = self._before(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        with self._guarded():
            self._note(scheduler_output, before)
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        """vLLM's own; what was decoded of an aborted request (a stop string found outside, a client
        that left) is kept."""
        ended: list[Request] = super().finish_requests(*args, **kwargs)
        with self._guarded():
            for request in ended:
                self._ended(request)
        return ended

    def shutdown(self) -> None:
        """vLLM's own, after what is pending was written."""
        with self._guarded():
            if self._spectune is not None:
                done = self._spectune.close()
                logger.info(
                    "spectune: %d requests recorded, %d dropped", done.written, done.dropped
                )
        super().shutdown()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever goes wrong inside, in a vLLM that changed, is said once for each kind of error;
        serving goes on. The requests that are being decoded are left out then, as they may lack a
        round."""
        try:
            yield
        except Exception as error:
            if type(error) not in self._failed:
                logger.warning("spectune: rounds are lost, and vLLM goes on: %r", error)
            self._failed.add(type(error))
            self._decoding.clear()

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

    def _unsafe(self) -> str:
        """Why no table may be put in force in this server; empty where one may."""
        ranks = self.vllm_config.parallel_config.data_parallel_size
        if ranks > 1:
            return (
                f"vLLM with data parallelism (data_parallel_size {ranks}) cannot follow a policy: "
                "its ranks would draft different numbers of tokens and wait for each other for "
                "ever"
            )
        seats, most = self.scheduler_config.max_num_seqs, self.num_spec_tokens
        try:
            from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

            built = build_dynamic_sd_schedule_lookup(
                [(1, seats, most)],
                vllm_max_batch_size=seats,
                vllm_num_speculative_tokens=most,
            )
            forms = [built, self.dynamic_sd_lookup]
        except Exception as error:  # whatever a new version changed
            return f"vLLM {vllm.__version__} lacks what sets its draft tokens: {error!r}"
        if built is None or not all(form is None or _is_flat(form, seats) for form in forms):
            return (
                f"vLLM {vllm.__version__} keeps its draft tokens in another form than one number "
                f"for each batch size; tested: {', '.join(VLLM.versions)}"
            )
        return ""

    def _pair(self) -> tuple[PairSpec, str]:
        """The pair that is served, and the draft that is loaded. Raises PairError where
        ``SPECTUNE_PAIR`` is another."""
        config, speculative = self.vllm_config, self.vllm_config.speculative_config
        target = config.model_config.model
        method = None if speculative is None else speculative.method
        if method not in (None, *METHODS):
            raise PairError(f"this server drafts by {method!r}, which cannot be replayed")
        loaded = None if method is None or method.startswith("ngram") else speculative.model
        return served_pair(target, loaded, "none" if method is None else "ngram")

    def _gammas(self, policy: Policy, draft: str) -> tuple[int, ...]:
        """Tokens by batch size. Raises PolicyError for what this server cannot follow."""
        if self.vllm_config.speculative_config is not None and (why := self._unsafe()):
            raise PolicyError(why)
        most, seats = self.num_spec_tokens, self.scheduler_config.max_num_seqs
        return VLLM.gammas(policy, draft=draft, most=most, max_num_seqs=seats)

    def _before(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> list[_Before]:
        """The step's requests; vLLM cuts the lists of sampled tokens while it reads them."""
        sampled, index = result.sampled_token_ids, result.req_id_to_index
        invalid = scheduled.num_invalid_spec_tokens or {}
        found = []
        for name in scheduled.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request.is_finished():
                continue
            tokens = len(sampled[index[name]]) if sampled and name in index else 0
            drafted = len(scheduled.scheduled_spec_decode_tokens.get(name) or ())
            drafted -= invalid.get(name, 0)
            found.append(_Before(request, request.num_output_tokens, drafted, max(0, tokens - 1)))
        return found

    def _note(self, scheduled: SchedulerOutput, before: list[_Before]) -> None:
        now = time.perf_counter()
        at, policy = self._scheduled.pop(id(scheduled), (now, ""))
        seconds = now - max(at, self._updated_at)
        self._updated_at = now
        for request, start, drafted, accepted in before:
            served = self._decoding.get(request.request_id)
            if served is None:
                if start:
                    continue
                served = self._decoding[request.request_id] = _Served()
            emitted = request.num_output_tokens - start
            served.unspent_s += seconds  # no token: a part of its prompt was read
            if emitted > 0:
                served.steps.append(
                    chain_round(
                        start,
                        drafted,
                        accepted,
                        emitted,
                        policy=policy,
                        round_s=served.unspent_s,
                        batch=len(scheduled.num_scheduled_tokens),
                        arrived_s=self._clock + request.arrival_time,
                        ended_s=now,
                    )
                )
                served.unspent_s = 0.0
            if request.is_finished():
                self._ended(request)

    def _ended(self, request: Request) -> None:
        served = self._decoding.pop(request.request_id, None)
        params, prompt = request.sampling_params, request.prompt_token_ids
        if self._spectune is None or served is None or not served.steps or params is None:
            return
        if not prompt or request.lora_request is not None:  # embeddings for tokens; another model
            return
        if request.mm_features or request.resumable:  # images; a text that begins anew
            return
        sampling = Sampling()
        if params.temperature != 0:
            top_k = max(0, int(params.top_k))
            sampling = Sampling(float(params.temperature), top_k, float(params.top_p))
        text = text_of(
            request.request_id,
            "serve",
            prompt,
            list(request.output_token_ids),
            sampling=sampling,
            max_new_tokens=request.max_tokens,
            finish=_finish(request),
            above_zero=self._above_zero,
            stop=(params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ()),
        )
        self._spectune.put(text, served.steps)


def _is_flat(lookup: Any, seats: int) -> bool:
    """Whether it has one whole number for each batch size, and one for 0."""
    return (
        isinstance(lookup, list)
        and len(lookup) == seats + 1
        and all(type(tokens) is int for tokens in lookup)
    )


def _finish(request: Request) -> Finish:
    if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
        return "length"
    is_end = request.status == RequestStatus.FINISHED_STOPPED and request.stop_reason is None
    return "eos" if is_end else "stop"
