"""Work on every core: the same results in order, whoever made them; what was not begun is left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import parent_process

import pytest

from spectune.optimizer import processes
from spectune.optimizer.processes import kept_helpers, on_every_core
from spectune.runtime.loading import LoadedPair
from spectune.traces.errors import SpectuneError


@pytest.fixture(scope="module", autouse=True)
def two_cores() -> Iterator[None]:
    """One helper beside this process, kept for all tests: to start one takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
        with kept_helpers():
            yield


def squared(pair: LoadedPair, item: int) -> tuple[int, int]:
    if item < 0:
        raise ValueError("below zero")
    time.sleep(0.02)
    return item * item, os.getpid()


def test_results_come_in_order_from_this_process_and_others(pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little work stays here. Much is shared, also while items are still made, and helpers stay where they are kept."""
    assert {who for _, who in on_every_core(pair, squared, range(4), 4)} == {os.getpid()}
    monkeypatch.setattr(processes, "PATIENCE_S", 0.01)
    drawn: list[int] = []

    def made(count: int) -> Iterator[int]:
        for item in range(count):
            drawn.append(item)
            yield item

    first = list(on_every_core(pair, squared, made(400), 400))
    second = list(on_every_core(pair, squared, made(40), 40))
    for found in (first, second):
        assert [value for value, _ in found] == [n * n for n in range(len(found))]
    assert drawn == [*range(400), *range(40)]
    others = {who for _, who in first} - {os.getpid()}
    assert len(others) == 1
    assert {who for _, who in second} == {os.getpid(), *others}, "the helper is still there"


def test_errors_arrive_and_what_is_left_early_is_dropped(pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE_S", 0.0)
    with pytest.raises(ValueError, match="below zero"):
        list(on_every_core(pair, squared, [1, 2, -1, 3, 4], 5))
    began = time.monotonic()
    with closing(on_every_core(pair, squared, range(10_000), 10_000)) as results:
        assert [next(results)[0] for _ in range(3)] == [0, 1, 4]
    assert time.monotonic() - began < 100, "ten thousand take 100 s on two cores"


def killed(pair: LoadedPair, item: int) -> int:
    """Ends a helper that works on it, as a lack of memory does."""
    if parent_process() is not None:
        os._exit(1)
    time.sleep(0.02)
    return item


def test_a_killed_helper_is_said_and_replaced(pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line while it worked; one that was idle is no loss."""
    monkeypatch.setattr(processes, "PATIENCE_S", 0.0)
    with pytest.raises(SpectuneError, match="a helper process was killed"):
        list(on_every_core(pair, killed, range(2000), 2000))
    again = list(on_every_core(pair, squared, range(300), 300))
    assert [value for value, _ in again] == [n * n for n in range(300)]
