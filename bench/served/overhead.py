"""What the agent costs a vLLM: microseconds of its calls in a step of 8 requests, and tokens/s with
it as a part of those without.

One engine in this process serves the same prompts again and again, in turns by vLLM's own scheduler
class and by the agent's, whose agent notes each request; nothing is published. An alternation is
two turns of each, the one's around the other's. As each turn decodes the same texts in the same
steps, tokens/s are compared by seconds alone.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from bench.served.live import DRAFT, MAX_LEN, PAIR, demo_prompts, ratio, temporary_folder
from spectune.engines.engine import Wanted
from spectune.engines.vllm import agent
from spectune.engines.vllm.server import installed, server_arguments
from spectune.runtime.pair import PairSpec

SEATS, GAMMA, PROMPTS, TOKENS = 8, 3, 24, 48
ALTERNATIONS, LIMIT_US, LEAST_RATIO = 40, 40.0, 0.985
HOOKS = ("on_schedule", "on_scheduled", "on_output", "on_updated")


def in_process(spec: PairSpec, wanted: Wanted, scheduler: type) -> LLMEngine:
    """vLLM's engine in this process, with the arguments of a server of ours and a scheduler."""
    _, on_cpu = installed()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    words = server_arguments(spec, wanted, cpu=on_cpu, has_agent=False)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    known, _ = parser.parse_known_args(words)  # those of the HTTP server are unknown
    arguments = EngineArgs.from_cli_args(known)
    arguments.scheduler_cls = scheduler
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over its wrapper
    try:
        return LLMEngine.from_engine_args(arguments)
    finally:
        sys.modules |= {} if hidden is None else {"llvmlite.binding.ffi": hidden}


class Engine:
    """vLLM's engine in this process, whose scheduler takes the agent's class and puts it off."""

    def __init__(self, llm: LLMEngine) -> None:
        self.llm = llm
        self.scheduler: Any = llm.engine_core.engine_core.scheduler
        is_ahead = llm.vllm_config.scheduler_config.async_scheduling
        self.plain, self.runs = AsyncScheduler if is_ahead else Scheduler, 0

    def put_agent(self, *, on: bool) -> None:
        """Between two runs: the agent's class with a new agent, or vLLM's class without one."""
        if getattr(self.scheduler, "_spectune", None) is not None:
            self.scheduler._spectune.close()
            self.scheduler._spectune = None
        self.scheduler.__class__ = agent.Scheduler if on else self.plain
        if on:
            agent.start(self.scheduler)
            new: Any = self.scheduler._spectune
            while not new.active:
                time.sleep(0.01)

    def serve(self, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        """Seconds, and the texts; 8 requests at a time."""
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        texts, sent, ended = [list[int]() for _ in prompts], 0, 0
        self.runs, began = self.runs + 1, time.perf_counter()
        while ended < len(prompts):
            while sent < len(prompts) and sent - ended < SEATS:
                prompt = {"prompt_token_ids": prompts[sent]}
                self.llm.add_request(f"{self.runs}.{sent}", prompt, sampling)
                sent += 1
            for output in self.llm.step():
                number = int(output.request_id.partition("-")[0].partition(".")[2])
                texts[number] = list(output.outputs[0].token_ids)
                ended += output.finished
        return time.perf_counter() - began, texts


def measure(quick: bool) -> dict[str, Any]:
    with temporary_folder() as folder:
        os.environ["SPECTUNE_FOLDER"] = str(folder)
        wanted = Wanted(DRAFT, GAMMA, SEATS, MAX_LEN)
        engine = Engine(in_process(PAIR, wanted, agent.Scheduler))
        figures = cost(engine, 2 if quick else ALTERNATIONS)
        engine.llm.engine_core.shutdown()
    if figures["texts_differ"]:
        raise ValueError("a text differs")
    return figures


def cost(engine: Engine, alternations: int) -> dict[str, Any]:
    """What the agent costs an engine, by so many alternations; ``texts_differ``: runs of which a
    text is not as in the first."""
    prompts = [list(prompt.ids) for prompt in demo_prompts(PROMPTS, TOKENS)]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    _, texts = engine.serve(prompts)  # and what the first run pays for
    differ = 0
    for n in range(alternations):
        both = {True: 0.0, False: 0.0}
        for on in (True, False, False, True) if n % 2 else (False, True, True, False):
            engine.put_agent(on=on)
            spent, served = engine.serve(prompts)
            both[on] += spent
            differ += served != texts
        for on, spent in both.items():
            seconds[on].append(spent)
    engine.put_agent(on=True)
    each_us = _microseconds(engine, prompts)
    relative = ratio(seconds[False], seconds[True])
    median_us = float(np.median(each_us))
    return {
        "summary": f"the agent takes {median_us:.0f} us of a step of {SEATS} requests in the "
        f"median of {len(each_us)}; with it {relative[0]:.4f} ({relative[1]:.4f} to "
        f"{relative[2]:.4f}) of "
        f"the tokens/s without, {alternations} alternations",
        "holds": median_us <= LIMIT_US and relative[1] >= LEAST_RATIO,
        "steps": len(each_us),
        "us_a_step": {"median": median_us, "mean": float(np.mean(each_us))},
        "tokens_per_s_ratio": relative,
        "tokens_per_s": 2 * PROMPTS * TOKENS / float(np.median(seconds[False])),
        "alternations": alternations,
        "noted": engine.scheduler._spectune.noted,
        "texts_differ": differ,
        "vllm_class": engine.plain.__name__,
    }


def _microseconds(engine: Engine, prompts: list[list[int]]) -> list[float]:
    """What the agent's calls take in vLLM's thread, of each step of 8 requests."""
    hooks, steps, spent = engine.scheduler._spectune, list[float](), [0.0]

    def timed(name: str, hook: Any) -> Any:
        def call(*arguments: Any) -> None:
            began = time.perf_counter()
            hook(*arguments)
            spent[0] += time.perf_counter() - began
            if name == HOOKS[-1]:
                if len(arguments[0].num_scheduled_tokens) == SEATS:
                    steps.append(1e6 * spent[0])
                spent[0] = 0.0

        return call

    for name in HOOKS:
        setattr(hooks, name, timed(name, getattr(hooks, name)))
    for _ in range(3):
        engine.serve(prompts)
    return steps
