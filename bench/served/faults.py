"""The agent in a real vLLM: every step is vLLM's own while nothing is published, and no fault of
the agent, nor of its folder, fails a request or changes a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm_engine import Replaceable, Steps, engine, engine_ahead
from vllm_faults import break_folder, compare_steps, raise_faults, texts_of_vllm

from bench.harness import say
from spectune.engines.vllm.agent import Scheduler

ENGINES: dict[str, Callable[..., AbstractContextManager[Steps]]] = {
    "draft_model": engine,
    "ngram": partial(engine, method="ngram"),
    "ahead": engine_ahead,
}
"""With a draft model, with prompt lookup, and with a draft model in the code for GPUs, which
schedules a step ahead."""


def measure(quick: bool, name: str) -> dict[str, Any]:
    """An engine's steps compared and, but for prompt lookup, faults raised; with a draft model also
    what a folder that fails does."""
    with TemporaryDirectory() as folder, ENGINES[name](None, Replaceable) as steps:
        compared = compare_steps(steps, Path(folder), Scheduler, 100 if quick else 2000)
        say(compared)
        summary = f"{name}: {compared['steps_differ']} of {compared['steps']} steps differ"
        if name == "ngram":
            return {"steps": compared, "summary": summary, "holds": not compared["steps_differ"]}
        texts = texts_of_vllm(steps)
        faults = raise_faults(steps, texts, 60 if quick else 1, tell=say)
        say(faults)
        figures = {"steps": compared, "faults": faults}
        summary += (
            f"; {faults['raised']} faults before {faults['faults']} statements, {_harm(faults)}"
        )
        if name == "draft_model":
            figures["folder"] = break_folder(steps, texts, Path(folder))
            for counts in figures["folder"].values():
                counts["log"] = [line.replace(folder, "") for line in counts.get("log", ())]
    if "folder" in figures:
        summary += _folder(figures["folder"])
    harm = [faults, *(f for f in figures.get("folder", {}).values() if "skipped" not in f)]
    holds = not any(f["failed"] or f["texts_differ"] for f in harm)
    return {**figures, "summary": summary, "holds": holds and not compared["steps_differ"]}


def _harm(counts: Mapping[str, int]) -> str:
    failed = f"{counts['failed']} of {counts['requests']} requests failed"
    return f"{failed}, {counts['texts_differ']} texts differ"


def _folder(troubles: dict[str, Any]) -> str:
    tried = [counts for counts in troubles.values() if "skipped" not in counts]
    total = Counter[str]()
    for counts in tried:
        total.update({k: n for k, n in counts.items() if isinstance(n, int)})
    skipped = [name for name, counts in troubles.items() if "skipped" in counts]
    lines = max(len(counts["log"]) for counts in tried)
    return (
        f"; {len(tried)} troubles of its folder, {_harm(total)}, at most {lines} line in the log"
        + (f"; not tried: {', '.join(skipped)}" if skipped else "")
    )
