"""Work on every core: the same results in order, whoever made them; what was not begun is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from databases import opened
from distributed import LocalCluster
from doors import Door, write_workload

from spectune.optimizer.recording import processes
from spectune.optimizer.recording.processes import on_every_core
from spectune.runtime.loading import LoadedPair
from spectune.traces.errors import SpectuneError
from spectune.traces.tables import Panorama

TREES = ("--tree-width", 2, "--tree-depth", 2)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Door:
    """A database with one recording of three requests and their trees, made by this process
    alone."""
    folder = tmp_path_factory.mktemp("recorded")
    door = Door(str(folder / "spectune.db"), str(tiny_pair))
    workload = write_workload(folder / "w.jsonl", 3)
    short = ("--max-new-tokens", 8, "--gamma-max", 4, *TREES)
    door.json("record", "--pair", tiny_pair, "--workload", workload, *short)
    return door


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One helper beside this process, whatever machine this is; it stays from test to test."""
    monkeypatch.setattr(processes, "cpu_count", lambda: 2)


def squared(pair: LoadedPair, item: int) -> tuple[int, int]:
    if item < 0:
        raise ValueError("below zero")
    time.sleep(0.02)
    return item * item, os.getpid()


def test_results_come_in_order_from_this_process_and_others(
    pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little work stays here. Much is shared, also while items are still made, and helpers stay
    where they are kept."""
    assert {who for _, who in on_every_core(pair, squared, range(4), 4)} == {os.getpid()}
    monkeypatch.setattr(processes, "PATIENCE_S", 0.01)
    drawn: list[int] = []

    def made(count: int) -> Iterator[int]:
        for item in range(count):
            drawn.append(item)
            yield item

    first = list(on_every_core(pair, squared, made(100), 100))
    second = list(on_every_core(pair, squared, made(40), 40))
    for found in (first, second):
        assert [value for value, _ in found] == [n * n for n in range(len(found))]
    assert drawn == [*range(100), *range(40)]
    others = {who for _, who in first} - {os.getpid()}
    assert len(others) == 1
    assert {who for _, who in second} == {os.getpid(), *others}, "the helper is still there"


def test_errors_arrive_and_what_is_left_early_is_dropped(
    pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PATIENCE_S", 0.0)
    with pytest.raises(ValueError, match="below zero"):
        list(on_every_core(pair, squared, [1, 2, -1, 3, 4], 5))
    drawn = iter(range(100_000))
    with closing(on_every_core(pair, squared, drawn, 100_000)) as results:
        assert [next(results)[0] for _ in range(3)] == [0, 1, 4]
    assert next(drawn) < 50_000, "they were not all begun"


def test_what_a_kill_left_out_is_made_by_the_same_command_on_any_core(
    recorded: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two missing panoramas this process makes one, and the helper the other: byte for byte what
    was there."""
    resumed = ("record", "--pair", recorded.pair, "--resume", "latest", "--gamma-max", 4)
    part, whole = ({"count": n, "gamma_max": 4, "width": 2, "depth": 2} for n in (2, 3))
    monkeypatch.setattr(processes, "PATIENCE_S", 0.0)
    with opened(recorded.db) as store:
        before = store.load("latest")
        with store.database.write() as session:
            ours = (Panorama.draft != "ngram", Panorama.ordinal == 1)
            session.execute(sa.delete(Panorama).where(*ours))
        made = store.get_recording("latest").to_json()["drafts"]
        assert [made[draft] for draft in ("near", "far")] == [part] * 2
        made = recorded.json(*resumed, *TREES)["drafts"]
        assert [made[draft] for draft in ("near", "far")] == [whole] * 2
        assert store.load("latest").requests == before.requests


def killed(pair: LoadedPair, item: int) -> int:
    """Ends a helper that works on it, as a lack of memory does."""
    if parent_process() is not None:
        os._exit(1)
    time.sleep(0.02)
    return item


def test_a_killed_helper_is_said(pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE_S", 0.0)
    with pytest.raises(SpectuneError, match="a helper process was killed"):
        list(on_every_core(pair, killed, range(2000), 2000))


# --- a Dask cluster


def test_two_dask_workers_record_what_one_process_does(tiny_pair: Path, tmp_path: Path) -> None:
    """Over TCP. They are threads here: processes would import torch for it."""
    made: list[Any] = []
    workload = write_workload(tmp_path / "w.jsonl", 3)
    options = ("--workload", workload, "--max-new-tokens", 12, *TREES)
    threads = {"processes": False, "protocol": "tcp://", "threads_per_worker": 1}
    with LocalCluster(n_workers=2, dashboard_address="127.0.0.1:0", **threads) as cluster:
        for name, more in (("alone", ()), ("shared", ("--workers", cluster.scheduler_address))):
            door = Door(str(tmp_path / f"{name}.db"))
            recording = door.json("record", "--pair", tiny_pair, *options, *more)["recording"]
            with opened(door.db) as store:
                requests = store.load(recording).requests
            made.append([(r.trajectory, r.panoramas) for r in requests])
    assert made[0] == made[1]
    assert {draft for _, panoramas in made[0] for draft in panoramas} == {"near", "far", "ngram"}


def test_a_cluster_that_cannot_be_used_is_said(
    recorded: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CONNECT_S", 0.5)
    command = ("record", "--pair", recorded.pair, "--resume", "latest", *TREES, "--workers")
    assert "no Dask scheduler" in recorded.refused(*command, "tcp://127.0.0.1:9")
    assert "missing port number in address 'two'" in recorded.call(*command, "two").output
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "`pip install distributed`" in recorded.refused(*command, "tcp://127.0.0.1:9")
