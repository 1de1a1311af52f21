"""Work on requests that are independent of each other, on every core: a process for each, with the pair loaded once more.

Threads would not do: passes of a small model are so short that Python between them, one thread at a time, is most of it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from spectune.runtime.loading import SMALL, LoadedPair, load_pair
from spectune.runtime.pair import PairSpec

Item = TypeVar("Item")
Result = TypeVar("Result")

PATIENCE_S = 20.0
"""Work of so many seconds is begun in processes: to start one takes several, most of it imports."""

_pair: LoadedPair | None = None
"""The pair of a process of the pool."""


def on_every_core(pair: LoadedPair, work: Callable[[LoadedPair, Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """``work(pair, item)`` of every item, in order; ``work`` is a function of a module, and depends on its arguments alone.

    A small pair on a CPU computes on one thread. Where other cores would be idle, and what is left after an item would take more than
    ``PATIENCE_S``, each core gets a process. Results are the same: each is computed by one thread either way.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    spent, rest = 0.0, list(items)
    while rest:
        if done := len(items) - len(rest):
            worth = spent / done * len(rest) > PATIENCE_S
            if worth and cores > 1 and pair.device.type == "cpu" and pair.target.num_parameters < SMALL:
                break
        began = time.perf_counter()
        result = work(pair, rest.pop(0))
        spent += time.perf_counter() - began
        yield result
    if rest:
        dtype = str(pair.target.dtype).removeprefix("torch.")
        with ProcessPoolExecutor(min(cores, len(rest)), get_context("spawn"), _begin, (pair.spec, dtype)) as pool:
            yield from pool.map(partial(_apply, work), rest)


def _begin(spec: PairSpec, dtype: str) -> None:
    """Loads the pair. Ctrl-C is the parent's to handle; without a parent the process ends."""
    global _pair
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _pair = load_pair(spec, device="cpu", dtype=dtype, threads=1)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _apply(work: Callable[[LoadedPair, Any], Result], item: Any) -> Result:
    assert _pair is not None
    return work(_pair, item)
