"""Work on requests that are independent of each other, on every core: this process and one more for
each other core, with the pair loaded once more; or this process and the workers of a Dask cluster.

Threads would not do: passes of a small model are so short that Python between them, one thread at a
time, is most of it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from transformers.utils import logging as transformers_logging

from spectune.runtime.loading import SMALL, LoadedPair, load_pair
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import PairError, SpectuneError

if TYPE_CHECKING:
    from distributed import Client

Item = TypeVar("Item")
Result = TypeVar("Result")

PATIENCE_S = 20.0
"""Work of so many seconds is shared with other processes: to start one takes several, most of it
imports."""


class _Wanted(NamedTuple):
    """A pair as helpers load it."""

    spec: PairSpec
    id: str
    device: str
    dtype: str

    @classmethod
    def like(cls, pair: LoadedPair) -> _Wanted:
        dtype = str(pair.target.dtype).removeprefix("torch.")
        return cls(pair.spec, pair.id, pair.device.type, dtype)


class _Helpers:
    """Processes that share this one's work, ``count`` of them, by the pair they have loaded; each
    begins when it is first asked for."""

    def __init__(self) -> None:
        counted = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if counted else os.cpu_count() or 1
        self.count = cores - 1
        self._pools: dict[_Wanted, Executor] = {}

    def of(self, pair: LoadedPair, wait_s: float) -> Executor | None:
        """Those who have a pair loaded; None where they could not help, or are not there and would
        not be worth it for so long a wait."""
        wanted = _Wanted.like(pair)
        pool = self._pools.get(wanted)
        if pool is not None and _works(pool):
            return pool
        # A small pair on a CPU computes on one thread; others use every core as they are.
        small = pair.device.type == "cpu" and pair.target.num_parameters < SMALL
        if not (small and self.count and wait_s > PATIENCE_S):
            return None
        # Those of the standard library run the user's script once more, which fails without a
        # guard for `__main__`.
        from joblib.externals.loky import ProcessPoolExecutor

        begin = {"initializer": _begin, "initargs": (wanted, os.getpid())}
        new: Executor = ProcessPoolExecutor(self.count, **begin)
        self._pools[wanted] = new
        return new

    def end(self) -> None:
        """Ends them, once each is done with what it is at."""
        for pool in self._pools.values():
            pool.shutdown()


def _works(pool: Executor) -> bool:
    """Whether a pool takes work: not once one of its processes was killed, idle or not."""
    try:
        _submitted(pool, os.getpid)
    except RuntimeError:
        return False
    return True


class _Workers:
    """The workers of a Dask cluster, in their place: they help from the first item on. What a
    killed one was at is done by another."""

    def __init__(self, client: Client) -> None:
        self.count = 2 * sum(client.nthreads().values())  # the next is there when one is done
        self._executor: Executor = client.get_executor(pure=False)

    def of(self, pair: LoadedPair, wait_s: float) -> Executor | None:
        return self._executor

    def end(self) -> None:
        self._executor.shutdown(wait=False)


_kept: ContextVar[_Helpers | _Workers | None] = ContextVar("_kept", default=None)


@contextmanager
def _keeping(helpers: _Helpers | _Workers) -> Iterator[None]:
    token = _kept.set(helpers)
    try:
        yield
    finally:
        _kept.reset(token)
        helpers.end()


@contextmanager
def kept_helpers() -> Iterator[None]:
    """Within it, the processes that :func:`on_every_core` began stay for its next call."""
    if _kept.get() is not None:
        yield
        return
    with _keeping(_Helpers()):
        yield


@contextmanager
def helped_by(client: Client) -> Iterator[None]:
    """Within it, :func:`on_every_core` shares its work with the workers of a Dask cluster, which
    load the pair from where it lies here, instead of with processes of this machine."""
    with _keeping(_Workers(client)):
        yield


def on_every_core(
    pair: LoadedPair, work: Callable[[LoadedPair, Item], Result], items: Iterable[Item], count: int
) -> Generator[Result, None, None]:
    """``work(pair, item)`` of every item, in order; ``work`` is a function of a module, and depends
    on its arguments alone.

    ``items``, ``count`` of them, may be made while they are drawn: other cores work on those there
    are. They do where they would be idle, and what is left after an item would take more than
    ``PATIENCE_S``; what they have no room for, or have not begun at the end, is done here. Results
    are the same: each is computed by one thread either way. Close the iterator where it is left
    early.
    """
    kept = _kept.get()
    helpers = _Helpers() if kept is None else kept
    wanted, spent_s, done = _Wanted.like(pair), 0.0, 0
    pool: Executor | None = None
    # A thread hands over one item at a time: what still waits for a thread can be taken back, which
    # a pool of processes grants of none that it was given.
    hands = ThreadPoolExecutor(max(1, helpers.count))
    elsewhere: list[Future[Result]] = []
    waiting: deque[tuple[Item, Future[Result]]] = deque()

    def here(item: Item) -> Future[Result]:
        made = Future[Result]()
        made.set_result(work(pair, item))
        return made

    try:
        for item in items:
            if pool is None:
                pool = helpers.of(pair, spent_s / max(1, done) * (count - done))
            elsewhere = [one for one in elsewhere if not one.done()]
            if pool and len(elsewhere) < 2 * helpers.count:  # the next is there when one is done
                elsewhere.append(hands.submit(_hand_over, pool, wanted, work, item))
                waiting.append((item, elsewhere[-1]))
            else:
                began = time.perf_counter()
                waiting.append((item, here(item)))
                spent_s, done = spent_s + time.perf_counter() - began, done + 1
            while waiting and waiting[0][1].done():
                yield waiting.popleft()[1].result()
        while waiting:
            if not waiting[0][1].done():
                newest_first = reversed(range(len(waiting)))
                n = next((n for n in newest_first if waiting[n][1].cancel()), None)
                if n is not None:
                    item, _ = waiting[n]
                    waiting[n] = item, here(item)
                    continue
            yield waiting.popleft()[1].result()
    except BrokenExecutor as error:
        raise SpectuneError(
            "a helper process was killed (is memory short?); what was stored is kept, run the "
            "command again"
        ) from error
    finally:
        hands.shutdown(wait=False, cancel_futures=True)
        if kept is None:
            helpers.end()


_loaded: tuple[_Wanted, LoadedPair] | None = None
"""The pair of a helper."""
_turn = threading.Lock()
"""Of a helper's threads: one works at a time, as a pair's passes are made for one."""


def _begin(wanted: _Wanted, parent: int) -> None:
    """Loads the pair. Ctrl-C is the parent's to handle, and stderr its to write to; without a
    parent the process ends."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _pair(wanted)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _hand_over(
    pool: Executor, wanted: _Wanted, work: Callable[[LoadedPair, Item], Result], item: Item
) -> Result:
    """Has an item done by a helper, and waits for it."""
    done: Future[Result] = _submitted(pool, _apply, wanted, work, item)
    return done.result()


def _submitted(pool: Executor, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Ctrl-C reaches every process of a terminal, and one that a pool begins here would say so
    while it still loads: it inherits that the signal is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(call, *arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _apply(wanted: _Wanted, work: Callable[[LoadedPair, Any], Result], item: Any) -> Result:
    with _turn, _pair(wanted).torch_threads():
        return work(_pair(wanted), item)


def _pair(wanted: _Wanted) -> LoadedPair:
    """The pair, loaded where another was. Raises PairError where it is not the same here."""
    global _loaded
    if _loaded is None or _loaded[0] != wanted:
        _loaded = None
        made = load_pair(wanted.spec, device=wanted.device, dtype=wanted.dtype, threads=1)
        if made.id != wanted.id:
            raise PairError(
                f"a worker has other weights at {wanted.spec.target} or its drafts: pair "
                f"{made.id}, not {wanted.id}"
            )
        _loaded = wanted, made
    return _loaded[1]
