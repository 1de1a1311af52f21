"""Parts of :mod:`gpu.vllm` in an engine in this process: steps that differ from vLLM's own while
nothing is published, and what the agent costs a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm_engine import Replaceable, Steps
from vllm_faults import compare_steps, decide, num_differing

from bench.gpu.rows import Figures, Rows, failed
from bench.gpu.vllm import Bench
from bench.served.live import MAX_LEN, temporary_folder
from bench.served.overhead import SEATS, Engine, cost, in_process
from spectune.engines.engine import Wanted
from spectune.engines.vllm.agent import Scheduler


def measure_inside(bench: Bench, rows: Rows, names: Sequence[str]) -> None:
    """Adds a row for each named part of this module."""
    parts: dict[str, Callable[[Bench, LLMEngine], Figures]] = {"steps": steps, "cost": agent_cost}
    wanted = Wanted(bench.draft, max(bench.size.gammas), SEATS, MAX_LEN)
    llm = in_process(bench.spec, wanted, Replaceable)
    for name in names:
        began = time.monotonic()
        try:
            figures = parts[name](bench, llm)
        except Exception as error:  # the other part may still be had
            figures = failed(error)
        rows.add(name, {**figures, "seconds": time.monotonic() - began})
    llm.engine_core.shutdown()


def steps(bench: Bench, llm: LLMEngine) -> Figures:
    """Steps and texts that differ, and how many differ where vLLM's own class decides once more:
    what is timing or rounding differs there too."""
    config = llm.vllm_config
    looked_at = Steps(llm)
    with temporary_folder() as folder:
        figures: Figures = compare_steps(looked_at, folder, Scheduler, bench.size.steps)
    once, again = (decide(looked_at, AsyncScheduler, bench.size.steps) for _ in range(2))
    figures["steps_of_vllm_differ_again"] = num_differing(once[0], again[0])
    figures["texts_of_vllm_differ_again"] = num_differing(once[1], again[1])
    vars(looked_at.scheduler).pop("schedule")  # is not looked at any more
    compilation = config.compilation_config
    figures["engine"] = {
        "runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
        "schedules_ahead": bool(config.scheduler_config.async_scheduling),
        "graphs": str(compilation.cudagraph_mode),
        "compiled": str(compilation.mode),
        "dtype": str(config.model_config.dtype),
    }
    return figures


def agent_cost(bench: Bench, llm: LLMEngine) -> Figures:
    with temporary_folder() as folder:
        os.environ["SPECTUNE_FOLDER"] = str(folder)
        return cost(Engine(llm), bench.size.alternations)
