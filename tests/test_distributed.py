"""Replay by workers: what one process counts, from local processes and over TCP, also where a
worker is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import sqlalchemy as sa
from databases import opened
from doors import Door, lines, write_workload
from pairs import chain, top_k
from synthetic import flat_profile
from trace_values import PAIR, a_panorama, a_recording, a_tree

from spectune.optimizer.artifacts import fitted
from spectune.optimizer.search import search
from spectune.optimizer.simulate import distributed
from spectune.optimizer.simulate.distributed import Shards, connected, stored_shards
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.trace import open_trace
from spectune.optimizer.spaces import ShortlistLimit, TreeLimit
from spectune.optimizer.tune import TuneOptions, Tuning
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.store import TraceStore
from spectune.traces.tables import Panorama

REQUESTS = 23
PROFILE = flat_profile(PAIR, ["small", "other"])
Q_LEARNING = {
    "draft": "other",
    "window": {"kind": "q_learning", "gamma_max": 6, "seed": 1, "epsilon": 0.3},
}
TREE = top_k("small", 4, 3, 8)
FIXED = chain("small", 5)
STOPPED = {
    "window": {"kind": "fsm", "gamma_max": 8},
    "stop": {"kind": "max_prob", "threshold": 0.4},
}
DOCUMENTS: tuple[dict[str, Any], ...] = (
    FIXED,
    {"draft": "other", "window": {"kind": "analytic", "gamma_max": 8, "estimator": "exact"}},
    {"draft": "small", **STOPPED},
    {"draft": "small", "window": {"kind": "heuristic", "gamma_max": 12}},
    Q_LEARNING,
    TREE,
    {**TREE, "window": {"kind": "q_learning", "gamma_max": 3, "reward": "speed"}},
)
COVERS = ("acceptance", "a")
POLICIES: list[Policy] = [AUTOREGRESSIVE, *map(parse_policy, DOCUMENTS)]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Door:
    """A database with a recording of chains of two drafts and trees of one, and a profile."""
    path = tmp_path_factory.mktemp("shards") / "spectune.db"
    with opened(path) as store:
        recording = a_recording(store, n=REQUESTS)
        store.put_profile(PROFILE)
        for n, text in enumerate(store.load(recording).trajectories):
            other = a_panorama(text, "other", seed=100 + n, agreement=0.8, none=0.0)
            store.put_panoramas(recording, [(n, other)])
            store.put_panoramas(recording, [(n, a_tree(text, "small", seed=n, covers=COVERS))])
    return Door(str(path))


@pytest.fixture
def store(door: Door) -> Iterator[TraceStore]:
    with opened(door.db) as store:
        yield store


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Two processes of this machine, their scheduler on loopback."""
    with connected("2") as client:
        yield client


def test_shards_come_to_what_one_process_does(client: Any, store: TraceStore) -> None:
    """Counts, seconds, learned tables and rounds are equal to the last bit, for windows that carry
    their state too, and after one of the two workers was killed with all it had read."""
    info = store.get_recording("latest")
    trace = open_trace(store, info.id, POLICIES).trace
    sources = stored_shards(store, info, POLICIES, 3)
    shards = Shards(client, sources, PROFILE)
    assert [name for name, _ in shards.names] == list(trace.request_ids)
    killed = 0
    found = shards.replay([*POLICIES, *POLICIES], per_round=True, approximate=True)
    for policy, replayed in zip([*POLICIES, *POLICIES], found, strict=True):
        alone = run_replay(trace, policy, PROFILE, per_round=True, approximate=True)
        assert np.array_equal(replayed.counts, alone.counts[:, :6]), policy.label()
        assert np.array_equal(replayed.seconds, alone.seconds), policy.label()
        assert (replayed.outcome(), replayed.total) == (alone.outcome(), alone.total)
        assert replayed.steps() == alone.steps(), policy.label()
        assert replayed.missed == ((policy, alone.missing),)
        assert np.array_equal(replayed.state.learner.q, alone.state.learner.q)
        if not killed:
            killed = next(iter(client.run(os.getpid).values()))
            os.kill(killed, signal.SIGKILL)
    assert killed not in client.run(os.getpid).values()
    with pytest.raises(ValueError, match="folds"):
        search(shards, PROFILE, ["small"], shortlists={"small": ShortlistLimit(4096)})


def test_a_tuning_searches_its_part_by_workers(client: Any, store: TraceStore) -> None:
    """Every trial has the value and the digest that it has in one process: of the search's requests
    alone."""
    pair = SimpleNamespace(id=PAIR, chain_drafts=("small", "other"), draft_names=("small", "other"))
    found = []
    for workers in (None, client.scheduler.address):
        wanted = TuneOptions(drafts=("small", "other"), gamma_max=3, seed=1, workers=workers)
        where = store, cast(Any, pair), "latest", wanted, lambda *_: None, time.perf_counter, {}
        tuning = Tuning(*where, grown=("small",))
        tuning.trees, tuning.artifacts = {"small": TreeLimit(2, 2)}, fitted(store, PAIR)
        tuning.incumbent = AUTOREGRESSIVE
        tuning.profile = cast(Any, PROFILE)
        tuning.open()
        tuning.search(0)
        tuning.search(10, tuning.study)
        found.append(tuning.study)
        assert len(found[0].requests) == len(tuning.parts.search) < REQUESTS
    assert found[0] == found[1]
    assert len(found[0].trials) > 20


def both(door: Door, folder: Path, address: str, *options: object) -> dict[str, Any]:
    """What `simulate` says, which is the same in one process and by workers, round by round."""
    assert address.startswith("tcp://127.0.0.1:")
    found, rounds = [], []
    for name, more in (("alone", ()), ("shared", ("--workers", address))):
        out = folder / f"{name}.jsonl"
        found.append(door.json("simulate", "--per-round", out, *options, *more))
        rounds.append(lines(out))
    assert found[0] == found[1]
    assert rounds[0] == rounds[1]
    return found[0]


def test_simulate_says_the_same_with_workers(client: Any, door: Door, tmp_path: Path) -> None:
    """Over TCP, of the first requests alone too; what one process refuses is refused with the same
    line."""
    address = client.scheduler.address
    for document, more, requests in (
        (FIXED, (), REQUESTS),
        (Q_LEARNING, (), REQUESTS),
        (Q_LEARNING, ("--limit", 15), 15),
    ):
        said = both(door, tmp_path, address, "--policy", json.dumps(document), *more)
        assert said["requests"] == requests
    wide = ("simulate", "--policy", json.dumps({**TREE, "growth": {"kind": "top_k", "width": 6}}))
    assert door.refused(*wide) == door.error(*wide, "--workers", address) + "\n"


def test_retraced_by_workers(tiny_pair: Path, tmp_path: Path) -> None:
    """What workers make of the drafts is what one process makes. (They are threads here: processes
    would import torch for it.)"""
    from distributed import LocalCluster

    made: list[Any] = []
    workload = write_workload(tmp_path / "w.jsonl", 3)
    options = ("--workload", workload, "--max-new-tokens", 12, "--tree-width", 2, "--tree-depth", 3)
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


def test_what_cannot_be_reached_is_said(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "PATIENCE_S", 0.5)
    asked = ("simulate", "--policy", "autoregressive", "--workers")
    assert "no Dask scheduler answers there" in door.refused(*asked, "tcp://127.0.0.1:9")
    assert "neither a number of processes" in door.call(*asked, "two").output
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    assert "`pip install distributed`" in door.refused(*asked, "2")


def test_damaged_chunks_are_left_out(
    client: Any, door: Door, store: TraceStore, tmp_path: Path
) -> None:
    """Of a whole shard, too. (The last test: it damages them.)"""
    address, asked = client.scheduler.address, ("--policy", json.dumps(Q_LEARNING))
    with store.database.write() as session:
        most = Panorama.draft == "other", Panorama.ordinal.between(0, 14)
        session.execute(
            sa.update(Panorama).where(*most).values(trie=sa.literal(b"x", sa.LargeBinary))
        )
    assert both(door, tmp_path, address, *asked, "--skip-corrupted")["requests"] == REQUESTS - 15
    line = door.error("simulate", *asked, "--workers", address)
    assert "request 0: panorama of draft 'other'" in line
