"""`follow` beside an agent that notes rounds, through outages: the database gone for a minute, the
folder's disk full, `follow` killed, with either database; and once in a real vLLM."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import sqlalchemy as sa
from agent_stub import publish, serve_until, status
from databases import Server, opened, server_binaries
from disks import full, mounts, unmount
from doors import Door
from vllm_engine import PROMPTS, SCHEDULER, engine
from waiting import eventually

from bench.harness import say
from spectune.runtime.pair import read_pair
from spectune.traces.tables import Trajectory

REQUESTS_S = 100
DISK = "64m"
FLAT = 1.05
"""Memory in the last quarter over that in the first."""
Totals = dict[str, Any]


def measure(quick: bool) -> dict[str, Any]:
    """Requests that were served, noted, dropped, lost and stored twice, and memory, by database and
    in a real vLLM."""
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "followed.db"
        figures["sqlite"] = _follow_through(file, Path(folder), lambda: _locked(file), quick)
        if (binaries := server_binaries()) is not None:
            with closing(Server(binaries)) as server:
                server.start()
                away = partial(_stopped, server)
                (place := Path(folder) / "postgresql").mkdir()
                figures["postgresql"] = _follow_through(server.url, place, away, quick)
        (place := Path(folder) / "vllm").mkdir()
        figures["vllm"] = _in_vllm(place, quick)
    counts = Counter[str]()
    for part in figures.values():
        counts.update({name: n for name, n in part.items() if isinstance(n, int)})
    growth = max(ratio for part in figures.values() for ratio in part["memory"].values())
    summary = (
        f"{counts['kills']} kill -9 of follow, {counts['outages']} outages of its database, "
        f"{counts['full_disks']} full disks: {counts['lost']} of {counts['noted']} noted requests "
        f"lost, {counts['doubled']} stored twice; {counts['dropped']} dropped and counted; memory "
        f"in the last quarter at most {growth:.3f} of the first's"
    )
    harm = counts["lost"] or counts["doubled"] or counts["unaccounted"]
    return {**figures, "summary": summary, "holds": not harm and growth < FLAT}


class Memory:
    """Resident bytes of processes, every half a second."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids, self._stop = pids, threading.Event()
        self._sizes: dict[str, list[int]] = {name: [] for name in pids}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            for name, pid in self._pids.items():
                pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
                self._sizes[name].append(int(pages) * os.sysconf("SC_PAGE_SIZE"))

    def growth(self) -> dict[str, float]:
        """The mean of the last quarter by that of the first, by process."""
        self._stop.set()
        self._thread.join()
        means = {
            name: [float(np.mean(quarter)) for quarter in np.array_split(sizes, 4)]
            for name, sizes in self._sizes.items()
        }
        return {name: quarters[-1] / quarters[0] for name, quarters in means.items()}


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Another process writes to the database."""
    with closing(sqlite3.connect(file, isolation_level=None, timeout=60)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def _stopped(server: Server) -> Iterator[None]:
    server.stop()
    yield
    server.start()


def _follow_through(
    database: Path | str,
    parent: Path,
    away: Callable[[], AbstractContextManager[None]],
    quick: bool,
) -> Totals:
    """Serves while the database is away, the disk is full and `follow` is killed, in that order;
    `follow` runs through the first two."""
    seconds, kills = (5.0, 2) if quick else (60.0, 20)
    (folder := parent / "rounds").mkdir()
    door, spawn = Door(str(database)), multiprocessing.get_context("spawn")
    stop, queue = spawn.Event(), spawn.Queue()
    pair = read_pair("demo")
    models = pair.target, pair.drafts["small"]
    writer = spawn.Process(
        target=serve_until, args=(stop, queue, str(folder), REQUESTS_S, *models), daemon=True
    )
    with ExitStack() as stack:
        is_mounted = mounts("-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder)
        if is_mounted:
            stack.callback(unmount, folder)
        with opened(database):
            writer.start()
            stack.callback(stop.set)
        follow = door.start("follow", folder, pair="demo")
        _await_stored(database, folder)
        memory = Memory({"follow": follow.pid, "agent": writer.pid or 0})
        time.sleep(seconds / 2)
        with away():
            time.sleep(seconds)
        _await_stored(database, folder)
        if is_mounted:
            with full(folder):
                time.sleep(seconds / 3)
        _await_stored(database, folder)
        time.sleep(seconds / 2)
        growth, chance = memory.growth(), np.random.default_rng(0)
        for _ in range(kills):
            _await_stored(database, folder)  # it has begun
            time.sleep(float(chance.uniform(0, 1)))
            follow.kill()
            follow.wait(60)
            follow = door.start("follow", folder, pair="demo")
        _await_stored(database, folder)
        stop.set()
        totals: Totals = queue.get(timeout=300)
        follow.kill()
        follow.wait(60)
        door.json("follow", folder, pair="demo", once=True)
    outages = {"outages": 1, "full_disks": int(is_mounted), "kills": kills, "memory": growth}
    unaccounted = totals["served"] - totals["noted"] - totals["dropped"]
    stored = _compare(totals["noted"], _ids(database))
    figures = {**totals, **stored, "unaccounted": unaccounted, **outages}
    say(figures)
    return figures


def _ids(database: Path | str) -> list[str]:
    with opened(database) as store, store.database.read() as session:
        return list(session.scalars(sa.select(Trajectory.request_id)))


def _compare(noted: int, stored: list[str]) -> Totals:
    distinct = len(set(stored))
    return {"stored": len(stored), "lost": noted - distinct, "doubled": len(stored) - distinct}


def _await_stored(database: Path | str, folder: Path) -> None:
    """Returns once all is stored that the agent says now to have noted."""
    noted = status(folder)["noted"] + 1
    eventually(lambda: len(_ids(database)) >= noted, 600)


def _in_vllm(parent: Path, quick: bool) -> Totals:
    """Serves in a real vLLM while another writes to the database and `follow` is killed."""
    seconds, kills = (4.0, 1) if quick else (30.0, 3)
    (folder := parent / "rounds").mkdir()
    file = parent / "followed.db"
    door, ended = Door(str(file)), threading.Event()

    def disturb() -> None:
        try:
            follow = door.start("follow", folder, pair="demo")
            _await_stored(file, folder)
            with _locked(file):
                time.sleep(seconds)
            for _ in range(kills):
                time.sleep(1)
                follow.kill()
                follow.wait(60)
                follow = door.start("follow", folder, pair="demo")
            time.sleep(seconds)
            follow.kill()
            follow.wait(60)
        finally:
            ended.set()

    with opened(file), engine(folder, SCHEDULER) as steps:
        steps.serve(PROMPTS)
        publish(folder, 1, {"1": 3})
        memory = Memory({"vllm": os.getpid()})
        thread = threading.Thread(target=disturb)
        thread.start()
        served = len(PROMPTS)
        while not ended.is_set():
            served += len(steps.serve(PROMPTS))
        thread.join()
        growth, agent = memory.growth(), steps.scheduler._spectune
        eventually(lambda: agent.noted + agent.dropped == served)
        noted, dropped = agent.noted, agent.dropped
    door.json("follow", folder, pair="demo", once=True)
    totals = {"served": served, "noted": noted, "dropped": dropped}
    compared = _compare(noted, _ids(file))
    return {**totals, **compared, "outages": 1, "kills": kills, "memory": growth}
