"""Faults of the agent in a real vLLM, of any number: for tests and ``bench/served/faults.py``.

One engine serves them all: each fault has a scheduler of its own, built as vLLM builds it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import ModuleType
from typing import Any
from unittest.mock import patch

from agent_stub import SOURCE, Faults, lines, module_of, publish, put, status
from disks import full, mounts, unmount
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm_engine import PROMPTS, Steps
from waiting import eventually

Texts = list[list[int]]
SERVED = PROMPTS[:4]
TOKENS = 12
TABLE = {"1": 5, "3": 2}
DISK = "96k"
"""The size of the file system that is filled."""


def compare_steps(steps: Steps, folder: Path, scheduler_class: type, count: int) -> dict[str, int]:
    """How many of at least ``count`` steps of the agent's scheduler, while nothing is published,
    differ from those of the class that it extends, vLLM's ``AsyncScheduler``, in anything; how many
    from those of the class that vLLM takes by itself, in anything but the numbers of cache blocks
    (``in_other_blocks``: in these alone), and how many texts."""
    os.environ["SPECTUNE_FOLDER"] = str(folder)
    decisions, texts = dict[type, list[str]](), dict[type, Texts]()
    for each in dict.fromkeys((steps.vllms_class, AsyncScheduler, scheduler_class)):
        decisions[each], texts[each] = decide(steps, each, count)
    assert steps.scheduler._spectune.active
    steps.scheduler.shutdown()
    ours, base, other = (decisions[c] for c in (scheduler_class, AsyncScheduler, steps.vllms_class))
    masked = num_differing(list(map(_mask_blocks, other)), list(map(_mask_blocks, ours)))
    return {
        "steps": len(ours),
        "steps_differ": num_differing(base, ours),
        "steps_of_its_own_class_differ": masked,
        "in_other_blocks": num_differing(other, ours) - masked,
        "texts": len(texts[scheduler_class]),
        "texts_differ": num_differing(texts[steps.vllms_class], texts[scheduler_class]),
    }


def decide(steps: Steps, scheduler_class: type, count: int) -> tuple[list[str], Texts]:
    """At least ``count`` decisions of a scheduler of a class, and the texts that it served."""
    steps.schedule_by(scheduler_class)
    texts: Texts = []
    while len(steps.decisions) < count:
        texts += steps.serve(PROMPTS)
    steps.finish()
    return steps.decisions, texts


def _mask_blocks(decision: str) -> str:
    """A step without the numbers of blocks, but how many each request has."""
    return re.sub(
        r"block_ids=.*?,\s?num_computed_tokens", lambda m: re.sub(r"\d+", "#", m[0]), decision
    )


def num_differing(some: Sequence[Any], others: Sequence[Any]) -> int:
    pairs = zip(some, others, strict=False)
    return sum(a != b for a, b in pairs) + abs(len(some) - len(others))


class Tally(Counter[str]):
    """Requests that were served, those that failed, and those whose text is not vLLM's own."""

    def serve(self, steps: Steps, expected: Texts, *, abort: int | None = None, **how: Any) -> None:
        self["requests"] += len(expected)
        try:
            params = {"max_tokens": TOKENS, **how}
            texts = steps.serve(SERVED[: len(expected)], abort=abort, **params)
        except Exception:
            logging.getLogger(__name__).exception("a step failed")
            self["failed"] += len(expected)
            return
        if abort is not None:
            expected = list(expected)
            expected[abort] = expected[abort][: max(1, len(texts[abort]))]
        self["texts_differ"] += num_differing(expected, texts)


def texts_of_vllm(steps: Steps) -> Texts:
    """What its own scheduler makes of :data:`SERVED`."""
    steps.schedule_by(steps.vllms_class)
    return steps.serve(SERVED, max_tokens=TOKENS)


def raise_faults(
    steps: Steps, expected: Texts, every: int = 1, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Serves requests once for each (or each ``every``th) statement of the agent, before which a
    fault is raised. ``not_reached``: lines of ``agent.py`` that nothing here runs."""
    faults, tally, raised = Faults(), Tally(), 0
    module = faults.module
    module.FILE_BYTES, module.MAX_FILES, module.MAX_IN_FLIGHT, module.MAX_WAITING = 600, 2, 1, 2
    with (
        patch.object(threading, "excepthook", lambda _: None),
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # threads still write
    ):
        for _ in range(3):  # threads reach some statements in some runs alone
            _serve_scenes(steps, module, folder, expected, healthy := Tally())
        statements = sorted(faults.reached)[::every]
        reached = {faults.lines[n] for n in faults.reached}
        for number in statements:
            faults.target, faults.reached = number, set()
            failures = tally["failed"] + tally["texts_differ"]
            _serve_scenes(steps, module, folder, expected, tally)
            raised += number in faults.reached
            if tally["failed"] + tally["texts_differ"] > failures:
                tell(f"line {faults.lines[number]}: {dict(tally)}")
    return {
        "statements": len(faults.lines),
        "faults": len(statements),
        "raised": raised,
        "not_reached": sorted(set(faults.lines) - reached),
        **{name: tally[name] for name in ("requests", "failed", "texts_differ")},
        "without_fault": {name: healthy[name] for name in ("requests", "failed", "texts_differ")},
    }


def _serve_scenes(
    steps: Steps, module: ModuleType, parent: str, expected: Texts, tally: Tally
) -> None:
    """Requests without and with a table, retraced, aborted, under a ``policy.json`` that is wrong,
    while the folder is gone, after a fault, and beside an agent that refuses the server or has no
    folder."""
    folder = Path(mkdtemp(dir=parent))
    os.environ["SPECTUNE_FOLDER"] = str(folder)
    scheduler = steps.schedule_by(module.Scheduler)
    agent = scheduler._spectune
    tally.serve(steps, expected[:2])
    publish(folder, 1, TABLE, contexts={"40": {"1": 1}})
    deadline = time.monotonic() + 0.1
    while agent is not None and agent.table.version != 1 and time.monotonic() < deadline:
        time.sleep(0.002)
    tally.serve(steps, expected, abort=1)
    tally.serve(steps, expected[:2], retrace=0)
    of = {"version": -5, "policy": "t", "gammas": {"1": 3}, "seed": 1, "ttl_s": 60, "block_s": 1}
    boot = agent.boot if agent is not None else ""
    publish(folder, 1, TABLE, trial={**of, "renewal": 1, "boot": boot})
    time.sleep(0.01)
    tally.serve(steps, expected[:2])
    for document in ('{"format": 2, "version": 2}', '{"format": 1, "version": 0, "texts": "none"}'):
        put(folder, document)
        time.sleep(0.01)
    tally.serve(steps, expected[:1])
    publish(folder, 3, {"1": 99})
    time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)
    tally.serve(steps, expected[:3])
    if scheduler._spectune is not None:
        scheduler._spectune.decoding = None
    tally.serve(steps, expected[:2])
    scheduler.shutdown()
    if agent is not None:
        agent.stop.set()  # its thread is a daemon's: one that was not ended polls on
    config = copy(scheduler.vllm_config)
    config.parallel_config = copy(config.parallel_config)
    config.parallel_config.data_parallel_size = 2
    refused = steps.schedule_by(module.Scheduler, vllm_config=config)
    tally.serve(steps, expected[:1])
    refused.shutdown()
    del os.environ["SPECTUNE_FOLDER"]
    steps.schedule_by(module.Scheduler)
    tally.serve(steps, expected[:1])


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    folder.rename(folder.with_name(f"{folder.name}-aside"))
    yield
    folder.mkdir()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    eventually(lambda: mounts("-o", "remount,ro", folder))  # refused while a file is being written
    yield
    mounts("-o", "remount,rw", folder)


def wrong(text: str) -> Callable[[Path], AbstractContextManager[None]]:
    """``policy.json`` has this text."""

    @contextmanager
    def trouble(folder: Path) -> Iterator[None]:
        put(folder, text)
        yield

    return trouble


POLICY = json.dumps({"format": 1, "version": 2, "policy": "p", "gammas": {"1": 4}})
TROUBLES = {
    "full": full,
    "removed": removed,
    "read-only": read_only,
    "policy.json is no JSON": wrong("\0{]"),
    "policy.json is half-written": wrong(POLICY[: len(POLICY) // 2]),
    "policy.json is a list": wrong("[]"),
    "policy.json has other keys": wrong('{"format": 1, "version": 2, "windows": [3]}'),
}


def break_folder(steps: Steps, expected: Texts, parent: Path) -> dict[str, Any]:
    """What happens while the agent's folder is full, removed, read-only, or its ``policy.json`` is
    no policy: by trouble requests that failed, texts that differ from vLLM's own, the lines in the
    log, and requests that were noted and dropped. Where nothing may be mounted, full and read-only
    are left out."""
    figures = {}
    for name, trouble in TROUBLES.items():
        (folder := parent / name.replace(" ", "-")).mkdir()
        on_disk = trouble in (full, read_only)
        if on_disk and not mounts("-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder):
            figures[name] = {"skipped": "no file system may be mounted here"}
            continue
        try:
            figures[name] = _serve_amid(steps, expected, folder, trouble)
        finally:
            if on_disk:
                unmount(folder)
    return figures


def _serve_amid(
    steps: Steps,
    expected: Texts,
    folder: Path,
    trouble: Callable[[Path], AbstractContextManager[None]],
) -> dict[str, Any]:
    os.environ["SPECTUNE_FOLDER"] = str(folder)
    module, log, tally = module_of(compile(SOURCE.read_text(), "agent.py", "exec")), Log(), Tally()
    module.LOG = logging.Logger("agent")
    module.LOG.addHandler(log)
    scheduler = steps.schedule_by(module.Scheduler)
    agent = scheduler._spectune
    publish(folder, 1, TABLE)
    eventually(lambda: agent.table.version == 1)
    tally.serve(steps, expected)
    eventually(lambda: agent.noted == len(expected))
    with trouble(folder):
        for _ in range(8):
            tally.serve(steps, expected)
        eventually(lambda: log.lines)
    publish(folder, 3, TABLE)
    eventually(lambda: agent.table.version == 3)
    tally.serve(steps, expected)
    eventually(lambda: agent.noted + agent.dropped == tally["requests"])
    stored = lines(folder) + lines(folder.with_name(f"{folder.name}-aside"))
    assert len({line["id"] for line in stored}) == agent.noted
    eventually(lambda: status(folder)["fault"] is None)
    scheduler.shutdown()
    counts = {name: tally[name] for name in ("requests", "failed", "texts_differ")}
    return {**counts, "log": log.lines, "noted": agent.noted, "dropped": agent.dropped}


class Log(logging.Handler):
    """A log's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
