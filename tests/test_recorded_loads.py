"""The load that is replayed from followed traffic: that of one server, of all its requests."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_folder import BEGAN, PAIR, Agent
from databases import opened
from doors import Door
from served_traces import recorded, simulated, trace_of, window
from trace_values import a_panorama

from spectune.engines.engine import Load
from spectune.optimizer.tuning.sources import ServerTuned, sample_since
from spectune.traces.recording import RecordedRequest
from spectune.traces.store import TraceStore

RATE, REQUESTS = 4.0, 150
"""Requests a second of a server, and how many."""
TUNE = "tune --engine vllm --arrivals recorded --since 1d"


def served() -> list[RecordedRequest]:
    """Requests that one server was sent at :data:`RATE`, and what it noted."""
    trace = trace_of(40, budget=70)
    gaps = np.random.default_rng(0).exponential(1 / RATE, REQUESTS)
    load = Load(arrivals=tuple(np.cumsum(gaps).tolist()))
    return recorded(trace, simulated(trace, window(3), load), window(3), BEGAN)


def follow(door: Door, folder: Path, **how: Any) -> None:
    door.json("follow", folder, pair="demo", once=True, **how)


def propose(store: TraceStore) -> None:
    """Stores what the draft proposes for every text that lacks it."""
    for info in store.list_recordings():
        lacking = store.missing_panoramas(info.id, "small", 16)
        for request in store.iterate(info.id, ordinals=lacking):
            panorama = a_panorama(request.trajectory, "small", none=0.0)
            store.put_panoramas(info.id, [(request.ordinal, panorama)])


def tuned(door: Door, *more: Any) -> Any:
    """What a tuning of what was recorded in the last day finds."""
    with opened(door.db) as store:
        propose(store)
    result = door.call(*TUNE.split(), *more, json=True)
    return json.loads(result.stdout), result.stderr


def rate_of(told: Any) -> float:
    (load,) = told["loads"]
    return float(load["best_constant"]["requests_per_s"])


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(str(tmp_path / "traffic.db"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What is found where there is one server, whose texts are all stored."""
    folder = tmp_path_factory.mktemp("alone")
    agent, door = Agent(folder / "folder"), Door(str(folder / "traffic.db"))
    agent.write_requests(served())
    follow(door, agent.folder)
    return tuned(door, "--limit", REQUESTS)[0]


def test_replicas_in_one_database_are_not_one_server_with_their_sum(
    door: Door, tmp_path: Path, alone: Any
) -> None:
    """Nor are their batches, also where their steps end at the same moments; and steps on other
    machines tell nothing of what they cost."""
    for n in range(4):
        agent = Agent(tmp_path / f"replica{n}", boot=f"b{n}")
        agent.engine["hardware"] = "another machine" if n == 3 else "this machine"
        agent.status()
        agent.write_requests(served()[: REQUESTS - (n != 2)], f"{n}-")
        follow(door, agent.folder)
    told, said = tuned(door, "--limit", 4 * REQUESTS)
    assert rate_of(told) == pytest.approx(rate_of(alone)) == pytest.approx(RATE, rel=0.15)
    node = f"vllm:{os.uname().nodename}:b2"
    total = 4 * REQUESTS - 3
    assert f"is of 4 servers: this takes that of the busiest, {node}: 150 of {total}" in said
    assert told["costs"]["steps"] == pytest.approx(3 * alone["costs"]["steps"], rel=0.02)
    with opened(door.db) as store:
        assert store.get_recording(told["recording"]).options["boot"] == "b2"
        how: dict[str, Any] = {"key": "own", "engine": "vllm", "server": ServerTuned("b1", "cpu")}
        own = sample_since(store, PAIR.id, timedelta(days=1), REQUESTS, **how)
        assert own.options["boot"] == "b1"


def test_what_the_draft_proposes_is_read_by_the_pair(door: Door, tmp_path: Path) -> None:
    agent = Agent(tmp_path / "folder")
    agent.write_requests(served())
    follow(door, agent.folder)
    result = door.call(*TUNE.split(), "--limit", 12, json=True)
    told = json.loads(result.stdout)
    assert "panorama small: 12" in result.stderr
    with opened(door.db) as store:
        assert not store.missing_panoramas(told["recording"], "small", 3)
    again = TUNE.replace("--since 1d", f"--recording {told['recording']} --limit 12")
    assert json.loads(door.call(*again.split(), json=True).stdout)["loads"] == told["loads"]
    shown = door.call(*again.split(), env={"COLUMNS": "250"}).stdout
    assert "small, 1 to 2 tokens: not searched, as all that was served drafted 3" in shown


def test_a_share_of_texts_is_not_a_share_of_the_load(
    door: Door, tmp_path: Path, alone: Any
) -> None:
    """And what steps cost is known from all requests that shared them."""
    agent = Agent(tmp_path / "folder")
    agent.write_requests(served())
    follow(door, agent.folder, texts=0.1)
    told, said = tuned(door, "--limit", REQUESTS)
    with opened(door.db) as store:
        info = store.get_recording(told["recording"])
    assert (info.source, info.n_requests) == ("sample", REQUESTS)
    assert 5 <= info.n_texts <= 30
    assert f"{REQUESTS - info.n_texts} of the {REQUESTS} requests that arrived have no text" in said
    assert rate_of(told) == pytest.approx(rate_of(alone), rel=0.05)
    assert told["costs"] == alone["costs"]
    told, _ = tuned(door, "--limit", 5)  # the last five texts, and all that arrived since
    with opened(door.db) as store:
        info = store.get_recording(told["recording"])
    assert info.n_texts == 5
    assert info.n_requests > 15


def test_of_very_many_requests_the_last_alone_arrive(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts from before keep what they are, and tell nothing of the load."""
    door, agent = Door(url), Agent(tmp_path / "folder")
    agent.write_requests(served())
    follow(door, agent.folder, texts=0.1)
    monkeypatch.setattr("spectune.optimizer.tuning.sources.MOST_ARRIVALS", 20)
    with opened(door.db) as store:
        info = sample_since(store, PAIR.id, timedelta(days=1), key="few", engine="vllm")
        arrived = store.served_requests([info.id])
        (recorded_,) = (i for i in store.list_recordings() if i.source == "serve")
        last = store.served_requests([recorded_.id])[-20:]
    assert [r.steps for r in arrived] == [r.steps for r in last]
    assert info.n_texts == recorded_.n_texts
    assert 20 < info.n_requests < 20 + info.n_texts


def test_requests_of_other_samplings_are_part_of_the_load(
    door: Door, tmp_path: Path, alone: Any
) -> None:
    agent, requests = Agent(tmp_path / "folder"), served()
    agent.write_requests([r for r in requests if r.ordinal % 3])
    agent.write_requests([r for r in requests if r.ordinal % 3 == 0], temperature=0.7)
    follow(door, agent.folder)
    told, said = tuned(door, "--limit", REQUESTS)
    assert "2 samplings; this takes the most common, temperature 0.0" in said
    assert "100 of 150 requests" in said
    assert rate_of(told) == pytest.approx(rate_of(alone), rel=0.05)
    assert told["costs"] == alone["costs"]
    asked = ("simulate", "--policy", window(3).model_dump_json(), "--arrivals", "recorded")
    with opened(door.db) as store:
        served_ = [info for info in store.list_recordings() if info.source == "serve"]
    assert sorted(info.n_requests for info in served_) == [50, 100]
    for info in served_:
        (load,) = door.json(*asked, "--recording", info.id)["loads"]
        assert load["requests"] == REQUESTS
