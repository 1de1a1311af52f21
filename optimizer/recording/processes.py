"""Work on requests that are independent of each other, on every core: this process and one more for
each other core, with the pair loaded once more; or this process and the workers of a Dask cluster.

Threads would not do: passes of a small model are so short that Python between them, one thread at a
time, is most of it. Replays are not shared: all of a tuning take less than a process does to start,
and both grow with the requests that are recorded.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from joblib import cpu_count
from joblib.externals.loky import get_reusable_executor
from transformers.utils import logging as transformers_logging

from spectune.runtime.loading import SMALL, LoadedPair, load_pair
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import PairError, SpectuneError

Item = TypeVar("Item")
Result = TypeVar("Result")

PATIENCE_S = 20.0
"""Work of so many seconds is shared: to start a process takes several, most of it imports."""
IDLE_S = 60
"""After so many seconds without work another process ends."""
CONNECT_S = 10
"""How long a Dask scheduler is waited for, and its first worker."""

_cluster: ContextVar[tuple[Executor, int] | None] = ContextVar("_cluster", default=None)


@contextmanager
def dask_workers(address: str | None) -> Iterator[None]:
    """Within it, :func:`on_every_core` shares its work with the workers of the Dask scheduler at an
    address (None: with processes of this machine), which load the pair from where it lies here.
    Raises SpectuneError where Dask is not installed, nobody answers, or it goes away."""
    if address is None:
        yield
        return
    try:
        from distributed import Client, KilledWorker
        from distributed.client import FutureCancelledError
        from distributed.comm import CommClosedError
    except ImportError:
        raise SpectuneError("workers need Dask: `pip install distributed`") from None
    where = f"workers {address}"
    try:
        client = Client(address, timeout=CONNECT_S)
        client.wait_for_workers(1, timeout=CONNECT_S)
    except (OSError, ValueError) as error:
        raise SpectuneError(
            f"{where}: no Dask scheduler with workers answers there ({error}); `dask scheduler` "
            "and `dask worker` start them"
        ) from None
    try:
        with client:
            token = _cluster.set((client.get_executor(pure=False), sum(client.nthreads().values())))
            try:
                yield
            finally:
                _cluster.reset(token)
    except (KilledWorker, FutureCancelledError, CommClosedError) as error:
        raise SpectuneError(f"{where}: lost while at work ({error}); run it again") from None


class _PairKey(NamedTuple):
    """A pair as another process loads it."""

    spec: PairSpec
    id: str
    device: str
    dtype: str


_loaded: dict[_PairKey, LoadedPair] = {}
"""A worker's pair."""
_lock = threading.Lock()
"""Of a worker's threads one works at a time, as a pair's passes are made for one."""


def on_every_core(
    pair: LoadedPair, work: Callable[[LoadedPair, Item], Result], items: Iterable[Item], count: int
) -> Generator[Result, None, None]:
    """Yields ``work(pair, item)`` of every item, in order; ``work`` is a function of a module, and
    depends on its arguments alone.

    ``items``, ``count`` of them, may be made while they are drawn. Processes of this machine help
    where cores would be idle and what remains would take more than ``PATIENCE_S``. Results are the
    same: each is computed by one thread either way. Raises SpectuneError where one is killed.
    """
    dtype = str(pair.target.dtype).removeprefix("torch.")
    key = _PairKey(pair.spec, pair.id, pair.device.type, dtype)
    executor, helpers = _cluster.get() or (None, cpu_count() - 1)
    # A small pair on a CPU computes on one thread; others use every core as they are.
    is_small = pair.device.type == "cpu" and pair.target.num_parameters < SMALL
    waiting: deque[Future[Result]] = deque()
    seconds, done = 0.0, 0
    try:
        for item in items:
            remaining_s = seconds / max(1, done) * (count - done)
            if executor is None and is_small and helpers and remaining_s > PATIENCE_S:
                start = {"initializer": _begin, "initargs": (key,), "timeout": IDLE_S}
                executor = get_reusable_executor(helpers, **start)
            # The next item is there when one is done.
            if executor and sum(not future.done() for future in waiting) < 2 * helpers:
                waiting.append(executor.submit(_apply, key, work, item))
            else:
                began = time.perf_counter()
                waiting.append(Future())
                waiting[-1].set_result(work(pair, item))
                seconds, done = seconds + time.perf_counter() - began, done + 1
            while waiting and waiting[0].done():
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenExecutor as error:
        raise SpectuneError(
            "a helper process was killed (is memory short?); what was stored is safe, run the "
            "command again"
        ) from error
    finally:
        for future in waiting:
            future.cancel()


def _begin(key: _PairKey) -> None:
    """Ctrl-C is the parent's to handle, and stderr its to write to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    _pair(key)


def _apply(key: _PairKey, work: Callable[[LoadedPair, Item], Result], item: Item) -> Result:
    with _lock:
        pair = _pair(key)
        with pair.torch_threads():
            return work(pair, item)


def _pair(key: _PairKey) -> LoadedPair:
    """The pair, loaded in this process. Raises PairError where it is not the same here."""
    if key not in _loaded:
        _loaded.clear()
        pair = load_pair(key.spec, device=key.device, dtype=key.dtype, threads=1)
        if pair.id != key.id:
            raise PairError(
                f"a worker has other weights at {key.spec.target}: not those of {key.id}"
            )
        _loaded[key] = pair
    return _loaded[key]
