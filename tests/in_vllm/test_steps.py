"""The serving simulator's steps against vLLM's own: who is in each, what each drafts, and how many
tokens are drafted next."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import ModelRunnerOutput

from spectune.demo.prompts import demo_workload
from spectune.engines.abilities import ServingRules, rules_of
from spectune.engines.engine import Load
from spectune.engines.vllm.agent import description
from spectune.engines.vllm.command import SCHEDULER, speculative_config
from spectune.optimizer.replay.chain_tables import AGREE_YES
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.serving import Simulated, serve
from spectune.optimizer.replay.step_costs import StepCosts, Surface
from spectune.runtime.loading import load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.recording import RecordedRequest
from spectune.traces.schema import Sampling, Tokens
from spectune.traces.tables import Trajectory

SEATS, MOST, MAX_LEN, TOKENS = 8, 6, 512, 40
COUNT = 48
NOTHING = Surface(np.zeros(1), np.zeros(1), np.zeros((1, 1)))
ONE_SECOND = StepCosts(Surface(np.zeros(1), np.zeros(1), np.ones((1, 1))), *[NOTHING] * 4)
"""Every step takes a second, so that what arrives before which step is known."""
TABLES = [(0, *gammas) for gammas in ([6, 6, 5, 5, 3, 3, 1, 0], [0, 4, 4, 4, 2, 2, 2, 6], [3] * 8)]


class Stepped:
    """vLLM's engine in this process, a step at a time; ``steps`` [[request, drafted (-1: a part of
    its prompt)], ...] of each step and ``nexts``, how many tokens it drafts for the next."""

    steps: list[list[list[int]]]
    nexts: list[int]
    outputs: list[SchedulerOutput]

    def __init__(self, budget: int) -> None:
        spec = read_pair("demo")
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        os.environ.pop("SPECTUNE_FOLDER", None)
        self.llm = LLMEngine.from_engine_args(
            EngineArgs(
                model=spec.target, dtype="float32", max_model_len=MAX_LEN, max_num_seqs=SEATS,
                enforce_eager=True,
                enable_prefix_caching=False, max_num_batched_tokens=budget, scheduler_cls=SCHEDULER,
                speculative_config=speculative_config(dict(spec.drafts)["small"], MOST, SEATS),
            )
        )  # fmt: skip
        self.scheduler: Any = self.llm.engine_core.engine_core.scheduler
        self.begin(TABLES[0])
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self.schedule

    def schedule(self, *args: Any) -> SchedulerOutput:
        before = {name: r.num_computed_tokens for name, r in self.scheduler.requests.items()}
        output: SchedulerOutput = self._schedule(*args)
        if output.num_scheduled_tokens:
            step = []
            for name, new in output.num_scheduled_tokens.items():
                drafted = len(output.scheduled_spec_decode_tokens.get(name) or ())
                partly = before[name] + new < self.scheduler.requests[name].num_prompt_tokens
                step.append([number(name), -1 if partly else drafted])
            self.steps.append(step)
            self.nexts.append(output.num_spec_tokens_to_schedule)
            self.outputs.append(output)
        return output

    @property
    def rules(self) -> ServingRules:
        """What a recording of this server would say of it."""
        return rules_of("vllm", description(self.scheduler)["serving"])._replace(reply_s=0.0)

    def begin(self, gammas: Sequence[int]) -> None:
        self.steps, self.nexts, self.outputs = [], [], []
        self.scheduler.dynamic_sd_lookup = list(gammas)

    def send(self, name: str, prompt: Any, **more: Any) -> None:
        self.llm.add_request(
            name, prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS, **more)
        )

    def serve(self, prompts: Sequence[Any], gammas: Sequence[int], load: Load) -> list[list[int]]:
        """Serves the prompts by a clock that a step moves on by a second; their tokens."""
        self.begin(gammas)
        now, sent, ended, texts = 0.0, 0, 0, [list[int]() for _ in prompts]
        while ended < len(prompts):
            for _ in range(min(load.due(now, sent, sent - ended), len(prompts) - sent)):
                self.send(str(sent), prompts[sent])
                sent += 1
            if sent == ended:
                now = load.arrivals[sent]
                continue
            for out in self.llm.step():
                texts[number(out.request_id)] = list(out.outputs[0].token_ids)
                ended += out.finished
            now += 1.0
        return texts


def number(name: str) -> int:
    """Of a request: vLLM adds letters to its name."""
    return int(name.partition("-")[0])


@contextmanager
def stepped(budget: int) -> Iterator[Stepped]:
    # vLLM looks into every module, and stumbles over this one's wrapper.
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        made = Stepped(budget)
    finally:
        sys.modules |= {} if hidden is None else {"llvmlite.binding.ffi": hidden}
    try:
        yield made
    finally:
        made.llm.engine_core.shutdown()


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [line["turns"][0] for line in demo_workload()][::3][:COUNT]


def trace_of(of: Stepped, prompts: Sequence[str], texts: Sequence[Sequence[int]]) -> ReplayTrace:
    pair = load_pair(read_pair("demo"), device="cpu")
    tokenizer, requests = of.llm.get_tokenizer(), []
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids, out = np.array(tokenizer.encode(prompt), np.int32), np.array(text, np.int32)
        finish = "length" if len(out) == TOKENS else "eos"
        t = Trajectory(str(i), "", Tokens(ids, out), Sampling(), TOKENS, finish)
        panoramas = {"small": record_panorama(pair, t, "small", MOST)}
        requests.append(RecordedRequest(i, t, panoramas).after_first())
    panoramas = {"small": [r.panoramas["small"] for r in requests]}
    return ReplayTrace([r.trajectory for r in requests], panoramas)


def by_step(found: Simulated) -> list[list[list[int]]]:
    steps: list[list[list[int]]] = [[] for _ in found.steps]
    for step, request, drafted in found.members.tolist():
        steps[step].append([request, drafted])
    return steps


def test_every_step_of_vllm_is_foretold(prompts: list[str]) -> None:
    rng, count, reading = np.random.default_rng(0), 0, 0
    slow, fast = (
        Load(arrivals=tuple(np.cumsum(rng.exponential(1 / rate, COUNT)).tolist()))
        for rate in (0.15, 0.6)
    )
    trace = None
    for budget, loads in ((2048, [Load(8), slow, Load(11)]), (96, [Load(8), fast])):
        with stepped(budget) as of:
            for load in loads:
                for gammas in TABLES if (budget, load.clients) == (2048, 8) else TABLES[:2]:
                    texts = of.serve(prompts, gammas, load)
                    trace = trace or trace_of(of, prompts, texts)
                    found = serve(
                        trace, "small", {0: gammas}, load, of.rules, ONE_SECOND, members=True
                    )
                    assert by_step(found) == of.steps
                    assert found.steps[:, 4].tolist() == of.nexts
                    count += len(of.steps)
                    reading += sum(drafted < 0 for step in of.steps for _, drafted in step)
    print(f"{count} steps, {reading} chunks of prompts")
    assert count >= 2000
    assert reading > 20


def test_steps_scheduled_ahead_are_foretold(prompts: list[str]) -> None:
    """Where a step is scheduled before the results of the last are known, as on a GPU: vLLM's own
    scheduler, its model replaced by what it would have sampled."""
    with stepped(96) as of:
        texts = of.serve(prompts, TABLES[2], Load(8))
        trace = trace_of(of, prompts, texts)
        lengths, chains = [len(text) for text in texts], trace.chains["small"].agree == AGREE_YES
        agree = [
            [False, *chains[b:e].tolist()]
            for b, e in zip(trace.offsets[:-1], trace.offsets[1:], strict=True)
        ]
        rules, count = of.rules._replace(ahead=1), 0
        for run, gammas in enumerate(TABLES):
            of.begin(gammas)
            serve_ahead(of, prompts, lengths, agree, run)
            found = serve(trace, "small", {0: gammas}, Load(8), rules, ONE_SECOND, members=True)
            assert by_step(found) == of.steps
            assert found.steps[:, 4].tolist() == of.nexts
            count += len(of.steps)
        print(f"{count} steps")
        assert count > 400


def serve_ahead(
    of: Stepped,
    prompts: Sequence[str],
    lengths: Sequence[int],
    agree: Sequence[Sequence[bool]],
    run: int,
) -> None:
    """Serves 8 clients with one step in execution while the next is scheduled. A text's tokens are
    its positions; the last ends it."""
    flying: list[SchedulerOutput] = []
    sent, coming, left = SEATS, list(range(SEATS)), len(prompts)
    while left:
        for i in coming:
            ends = {"stop_token_ids": [lengths[i] - 1]} if lengths[i] < TOKENS else {}
            of.send(f"{i}-{run}", prompts[i], ignore_eos=True, **ends)
        output = of.schedule()
        flying.append(output)
        if output.num_scheduled_tokens and len(flying) < 2:
            coming = []
            continue
        before = len(of.scheduler.requests)
        done = flying.pop(0)
        of.scheduler.update_from_output(done, sampled(of, done, agree))
        ended = before - len(of.scheduler.requests)
        left -= ended
        coming = list(range(sent, min(sent + ended, len(prompts))))
        sent += len(coming)


def sampled(
    of: Stepped, done: SchedulerOutput, agree: Sequence[Sequence[bool]]
) -> ModelRunnerOutput:
    """What the model would have said of a step."""
    names = list(done.num_scheduled_tokens)
    tokens = []
    for name in names:
        request = of.scheduler.requests.get(name)
        drafted = len(done.scheduled_spec_decode_tokens.get(name) or ())
        partly = [number(name), -1] in of.steps[of.outputs.index(done)]
        out = 0 if request is None else request.num_output_tokens
        kept = [*agree[number(name)][out : out + drafted], False].index(False)
        tokens.append([] if partly else list(range(out, out + kept + 1)))
    return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
