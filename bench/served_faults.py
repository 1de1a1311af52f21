"""The agent in a real vLLM: every step is vLLM's own while nothing is published, and no fault of
the agent, nor of its folder, fails a request or changes a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab import say
from vllm_engine import Replaceable, Steps, engine, engine_ahead
from vllm_faults import break_folder, compare_steps, raise_faults, texts_of_vllm

from spectune.engines.vllm.agent import Scheduler

ENGINES: dict[str, Callable[..., AbstractContextManager[Steps]]] = {
    "draft_model": engine,
    "ngram": partial(engine, method="ngram"),
    "ahead": engine_ahead,
}
"""With a draft model, with prompt lookup, and with a draft model in the code for GPUs, which
schedules a step ahead."""


def measure(quick: bool) -> dict[str, Any]:
    """Steps compared, and faults raised, by engine; and what a folder that fails does."""
    figures: dict[str, Any] = {"steps": {}, "faults": {}}
    with TemporaryDirectory() as folder:
        for name, start in ENGINES.items():
            with start(None, Replaceable) as steps:
                count = 100 if quick else 2000
                figures["steps"][name] = compare_steps(steps, Path(folder), Scheduler, count)
                say(f"{name}: {figures['steps'][name]}")
                if name == "ngram":
                    continue
                texts, every = texts_of_vllm(steps), 60 if quick else 1
                figures["faults"][name] = raise_faults(steps, texts, every, tell=say)
                say(f"{name}: {figures['faults'][name]}")
                if name == "draft_model":
                    figures["folder"] = break_folder(steps, texts, Path(folder))
    return {**figures, "summary": _summary(figures)}


def _summary(figures: dict[str, Any]) -> str:
    steps, faults, folder = (Counter[str]() for _ in range(3))
    for total, part in ((steps, "steps"), (faults, "faults"), (folder, "folder")):
        for counts in figures[part].values():
            total.update({k: n for k, n in counts.items() if isinstance(n, int)})
    skipped = [name for name, counts in figures["folder"].items() if "skipped" in counts]
    lines = max(len(counts.get("log", ())) for counts in figures["folder"].values())
    return (
        f"{steps['steps_differ']} of {steps['steps']} steps differ from vLLM's own; "
        f"{faults['raised']} faults before {faults['faults']} statements of the agent: "
        f"{faults['failed']} of {faults['requests']} requests failed, "
        f"{faults['texts_differ']} texts differ; {len(figures['folder']) - len(skipped)} troubles "
        f"of its folder: {folder['failed']} of {folder['requests']} requests failed, "
        f"{folder['texts_differ']} texts differ, at most {lines} line in the log each"
        + (f"; not tried: {', '.join(skipped)}" if skipped else "")
    )
