"""`follow`, beside folders as vLLM's agent writes them."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_folder import BEGAN, PAIR, Agent
from databases import Server, opened, put_in_force
from doors import Door, Started
from sqlalchemy import select
from synthetic import policy
from token_ids import encoded
from waiting import PATIENCE_S, eventually

from spectune.db import UnavailableError, open_database
from spectune.engines.vllm.folder import CHUNK
from spectune.engines.vllm.follow import Follower, Limits
from spectune.engines.vllm.locks import FolderLock
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.errors import PairError, TraceError
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore
from spectune.traces.store.export import import_recordings
from spectune.traces.tables import Trajectory

TABLE = parse_policy(
    {"draft": "small", "window": {"kind": "by_load", "gamma": {"1": 5, "3": 2, "9": 0}}}
)
KILLS = 3
"""On each of the two databases."""


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path / "folder")


@pytest.fixture
def door(url: str) -> Door:
    return Door(url, "")


def follower(store: TraceStore, agent: Agent, told: list[str], **how: Any) -> Follower:
    return Follower(store, agent.folder, "vllm", told.append, pair=PAIR, **how)


def request_ids(store: TraceStore) -> list[str]:
    return [
        request.trajectory.request_id
        for info in store.list_recordings()
        for request in store.iterate(info.id)
    ]


def num_requests(store: TraceStore) -> int:
    return sum(info.n_requests for info in store.list_recordings())


def test_requests_are_stored_as_they_were_served(door: Door, agent: Agent) -> None:
    agent.write(3)
    agent.write(1, label="tenant-a", temperature=0.7, top_p=0.9, finish="abort", stop=["\n\n"])
    result = door.json("follow", agent.folder, pair="demo", once=True)
    assert (result["requests"], result["without_text"], result["skipped"]) == (4, 0, 0)
    with opened(str(door.db)) as store:
        greedy, warm = sorted(store.list_recordings(), key=lambda info: info.sampling.temperature)
        assert (greedy.source, greedy.engine, greedy.pair_id) == ("serve", "vllm", PAIR.id)
        assert (greedy.n_requests, greedy.verifier, greedy.state) == (3, "coupled", "recording")
        assert greedy.options["serving"] == agent.engine["serving"]
        assert warm.sampling == Sampling(0.7, 0, 0.9)
        assert warm.verifier == "greedy"
        (request,) = store.load(warm.id, steps=True).requests
        text, steps = request.trajectory, request.steps
        assert (text.request_id, text.category, text.finish) == ("r3", "tenant-a", "stop")
        assert text.prompt_ids.tolist() == [3, 5, 6, 7, 8]
        assert text.output_ids.tolist() == [3, 1, 2, 3, 4, 5, 6]
        assert (text.max_new_tokens, text.stop_strings) == (7, ("\n\n",))
        assert [(s.drafted, s.accepted, s.emitted, s.batch) for s in steps] == [
            (0, 0, 1, 2),
            (3, 2, 3, 2),
            (3, 3, 3, 1),
        ]
        assert [s.draft for s in steps] == ["", "small", "small"]
        assert steps[1].ended_s - steps[0].ended_s == pytest.approx(0.01, abs=1e-6)
        assert abs(text.created_at.timestamp() - (BEGAN + 3.04)) < 1e-3
    again = door.json("follow", agent.folder, pair="demo", once=True)
    assert again["requests"] == 0
    agent.write()
    assert door.json("follow", agent.folder, pair="demo", once=True)["requests"] == 1
    for asked in (
        {"speed": True, "by": "category"},
        {"by": "category"},
        {"by": "draft,category"},
        {},
    ):
        shown = door.json("traces stats", **asked)
        (rows,) = (value for value in shown.values() if isinstance(value, list))
        assert {row["category"] for row in rows} == {"serve", "tenant-a"}


def test_what_takes_long_to_bring_in_says_how_much_is_left(
    store: TraceStore, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    agent.write(3)
    follower(store, agent, told).once()
    assert not [line for line in told if "left" in line]
    monkeypatch.setattr("spectune.engines.vllm.follow.LEFT_S", 0.0)
    agent.write(2)
    follower(store, agent, told).once()
    assert told[-1] == "2 requests are in; 0 MB left"
    (tmp_path / "empty").mkdir()
    Follower(store, tmp_path / "empty", "vllm", told.append, pair=PAIR).once()
    assert "no status.json yet" in told[-1]


def test_files_that_are_in_are_removed_or_compressed(store: TraceStore, agent: Agent) -> None:
    told: list[str] = []
    one = follower(store, agent, told)
    for agent.number in (0, 1, 2):
        agent.write(20)
    with agent.file.open("a") as file:
        half = json.dumps(agent.line())
        file.write(half[:100])
    one.once()
    assert sorted(path.name for path in agent.folder.glob("rounds-*")) == [agent.file.name]
    assert len(request_ids(store)) == 60
    with agent.file.open("a") as file:
        file.write(half[100:] + "\n")
    two = follower(store, agent, told, limits=Limits(file_bytes=10_000))
    for agent.number in (3, 4, 5, 6):
        agent.write(300)
    two.once()
    kept = sorted(agent.folder.glob("*.zst"))
    assert kept
    assert sum(path.stat().st_size for path in kept) <= 10_000
    assert kept[-1].name == f"rounds-{agent.boot}-000005.jsonl.zst"
    assert len(set(request_ids(store))) == 60 + 1 + 4 * 300
    (agent.folder / f"rounds-{agent.boot}-000006.jsonl").unlink()
    agent.number = 9
    agent.write()
    two.once()
    assert "files 6 to 8 were removed before they were in" in told[-1]
    assert len(request_ids(store)) == 1262


def test_broken_lines_are_named_and_skipped(door: Door, agent: Agent) -> None:
    agent.write(2)
    start = agent.file.stat().st_size
    wrong = [
        "{half",
        "\u00ff",
        json.dumps({**agent.line(), "finish": "never"}),
        json.dumps({**agent.line(), "output": encoded([1, -1])}),
        json.dumps({**agent.line(), "output": encoded([1])}),
        json.dumps({**agent.line(), "id": "a\0b"}),
    ]
    with agent.file.open("a", encoding="latin-1") as file:
        file.write("\n".join(wrong) + "\n\n")
    agent.write(2)
    found = door.call("follow", agent.folder, pair="demo", once=True, json=True)
    result = json.loads(found.stdout)
    assert (result["requests"], result["skipped"]) == (4, 6)
    assert f"{agent.file.name}, byte {start}: not JSON; this line is skipped" in found.stderr
    assert "finish: Input should be 'length'" in found.stderr
    assert "its rounds have 7 tokens, its output 1" in found.stderr
    assert found.stderr.count("is skipped") == 5  # the sixth is counted alone


def test_a_request_that_the_database_refuses_costs_no_other(
    store: TraceStore, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    agent.write(9)
    real = TraceStore.bring_in

    def refusing(self: TraceStore, server: Any, end: Any, arrivals: Any) -> Any:
        if any(r.trajectory.request_id == "r4" for r in arrivals.requests):
            raise ValueError("no such text")
        return real(self, server, end, arrivals)

    monkeypatch.setattr(TraceStore, "bring_in", refusing)
    one = follower(store, agent, told)
    one.once()
    assert request_ids(store) == [f"r{n}" for n in range(9) if n != 4]
    assert (one.totals.requests, one.totals.skipped) == (8, 1)
    assert "no such text" in told[-1]


def test_a_request_without_its_text_is_a_row_without_tokens(
    door: Door, agent: Agent, tmp_path: Path
) -> None:
    """Of those that the agent noted without a text, and those whose text is not to be stored."""
    agent.write(2, tokens=False, label="b")
    agent.write(3)
    told = door.json("follow", agent.folder, pair="demo", once=True)
    assert (told["requests"], told["without_text"]) == (5, 2)
    agent.write(4, stop=["secret"])
    told = door.json("follow", agent.folder, pair="demo", once=True, texts="none")
    assert (told["requests"], told["without_text"]) == (4, 4)
    assert agent.policy() == {"format": 1, "version": 0, "texts": "none"}
    (listed,) = door.json("traces list")["recordings"]
    assert (listed["n_requests"], listed["n_texts"]) == (9, 3)
    rows = {r["category"]: r for r in door.json("traces stats", speed=True, by="category")["stats"]}
    assert (rows["b"]["requests"], rows["b"]["rounds"], rows["b"]["emitted"]) == (2, 6, 14)
    assert (rows["serve"]["requests"], rows["serve"]["accepted"]) == (7, 35)
    assert rows["serve"]["seconds"] == pytest.approx(7 * 0.025), "steps of two are shared"
    shown = door.json("traces show", listed["id"])["requests"]
    assert [(r["n_prompt"], r["n_output"]) for r in shown] == [(5, 7)] * 9
    assert "the text of request 'r5' of recording" in door.refused(
        "traces show", listed["id"], request="r5"
    )
    assert door.json("traces export", tmp_path / "rows.parquet")["rows"] == 9
    door.json("traces export", tmp_path / "whole.parquet", whole=True)
    with opened(str(door.db)) as store, opened(tmp_path / "other.db") as copy:
        assert request_ids(store) == ["r2", "r3", "r4"]
        assert store.missing_panoramas(listed["id"], "small", 4) == (2, 3, 4)
        with store.database.read() as session:
            stops = session.scalars(select(Trajectory.stop_strings)).all()
        assert stops == [()] * 9
        import_recordings(copy, tmp_path / "whole.parquet")
        assert copy.get_recording(listed["id"]) == store.get_recording(listed["id"])
        later = replace(store, clock=lambda: datetime.fromtimestamp(BEGAN + 8, UTC))
        follower(later, agent, [], limits=Limits(seconds=6.5)).once()
        assert (num_requests(store), len(request_ids(store))) == (7, 3)
        by_size = store.stored_bytes([PAIR.id]) // 2
        follower(store, agent, [], limits=Limits(stored_bytes=by_size)).once()
        assert 0 < store.stored_bytes([PAIR.id]) <= by_size
    agent.write(100)  # a share of them, whatever the agent noted before it read of it
    told = door.json("follow", agent.folder, pair="demo", once=True, texts=0.3)
    assert told["requests"] == 100
    assert 15 <= told["without_text"] - 40 <= 45


def test_more_samplings_than_recordings_are_together_without_texts(
    store: TraceStore, agent: Agent
) -> None:
    for n in range(70):
        agent.write(1, temperature=1 + n / 100)
    one = follower(store, agent, [])
    one.once()
    assert (one.totals.requests, one.totals.without_text) == (70, 6)
    infos = store.list_recordings()
    assert len(infos) == 65
    (rest,) = [info for info in infos if not info.n_texts]
    assert (rest.n_requests, rest.sampling) == (6, Sampling())


def test_a_publication_reaches_the_server_and_its_answer_the_database(
    store: TraceStore, agent: Agent
) -> None:
    told: list[str] = []
    stop = threading.Event()
    one = follower(store, agent, told, texts="all")
    thread = threading.Thread(target=one.run, args=(stop,))
    thread.start()
    try:
        eventually(lambda: agent.policy() == {"format": 1, "version": 0, "texts": "all"})
        for published in (TABLE, AUTOREGRESSIVE, policy("small", 4)):
            version = put_in_force(store, PAIR.id, published, deployment="vllm")
            eventually(lambda version=version: agent.policy()["version"] == version)
            agent.status(version, published.id)
            agent.write(1, version=version)
            eventually(lambda version=version: store.acknowledgements(version))
        assert agent.policy()["gammas"] == {"1": 4}
        for refused, reason in (
            (policy("medium", 3), "this server loaded the draft 'small', not 'medium'"),
            (policy("small", 7), "this server drafts at most 6 tokens, not 7"),
            (Policy.model_validate({"draft": "small", "window": {"kind": "fsm"}}), "cannot run"),
        ):
            number = put_in_force(store, PAIR.id, refused, deployment="vllm")
            eventually(lambda number=number: store.acknowledgements(number))
            (answer,) = store.acknowledgements(number)
            assert answer.status == "refused"
            assert reason in answer.reason
            assert agent.policy()["version"] == version  # the last good one stays
        agent.status(version, policy("small", 4).id, refused={"version": number, "reason": "no"})
        eventually(lambda: len(store.acknowledgements(number)) == 2)
        eventually(lambda: len(request_ids(store)) == 3)
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    (info,) = store.list_recordings()
    used = [step.policy for r in store.iterate(info.id, steps=True) for step in r.steps]
    assert used == [p.id for p in (TABLE, AUTOREGRESSIVE, policy("small", 4)) for _ in range(3)]
    nodes = {a.node for a in store.acknowledgements()}
    assert nodes == {f"vllm:{os.uname().nodename}:a1b2c3d4"}
    # another process says nothing again; a boot gets the newest that runs with its draft
    answers = len(store.acknowledgements())
    follower(store, agent, told).once()
    assert len(store.acknowledgements()) == answers
    Agent(agent.folder, "bbbb", draft="medium")
    Follower(store, agent.folder, "vllm", told.append).once()
    assert agent.policy()["gammas"] == {"1": 3}
    # or none, where none is for its models
    other = Agent(agent.folder, "cccc", draft=None)
    other.engine["model"] = PAIR.drafts["small"]
    other.status()
    Follower(store, agent.folder, "vllm", told.append).once()
    assert agent.policy() == {"format": 1, "version": 0}
    assert f"version {number} of deployment vllm is not for this server" in told[-2]


def test_what_was_published_for_batches_is_written_by_batch(
    store: TraceStore, agent: Agent
) -> None:
    store.put_pair(PAIR.id, PAIR.name, PAIR.to_json(), PAIR.models)
    version = put_in_force(store, PAIR.id, TABLE, deployment="vllm")
    follower(store, agent, []).once()
    document = agent.policy()
    assert document.pop("database")["id"] == store.database.id
    assert document == {
        "format": 1, "version": version, "policy": TABLE.id, "gammas": {"1": 5, "3": 2, "9": 0},
    }  # fmt: skip
    window = {"kind": "by_load", "gamma": {"1": 5}, "contexts": {"4096": {"1": 2, "3": 0}}}
    put_in_force(store, PAIR.id, policy("small", window), deployment="vllm")
    follower(store, agent, []).once()
    assert agent.policy()["gammas"] == {"1": 5}
    assert agent.policy()["contexts"] == {"4096": {"1": 2, "3": 0}}


def test_a_policy_that_another_put_there_stays(store: TraceStore, agent: Agent) -> None:
    """Who measures policies in turns writes a trial there, too: until it ends, whatever ends it, or
    something is published."""
    by_hand = {"format": 1, "version": 4, "policy": "mine", "gammas": {"1": 1}}
    trial = {**by_hand, "trial": {"version": -3, "gammas": {"1": 2}}}
    tried = {"version": -3, "policy": "trial", "since": 1.0, "is_over": False}
    one = follower(store, agent, [])
    with FolderLock(agent.folder, "tune", "tuned"):
        (agent.folder / "policy.json").write_text(json.dumps(trial))
        agent.status(4, "mine", trial=tried)
        agent.write(1, version=-3)
        one.once()
        follower(store, agent, []).once()
        assert agent.policy() == trial
    one.once()
    assert agent.policy() == by_hand
    assert store.acknowledgements() == ()
    (info,) = store.list_recordings()
    assert {s.policy for r in store.iterate(info.id, steps=True) for s in r.steps} == {"trial"}
    with FolderLock(agent.folder, "tune", "tuned"):
        (agent.folder / "policy.json").write_text(json.dumps(trial))
        version = put_in_force(store, PAIR.id, TABLE, deployment="vllm")
        one.once()
        assert agent.policy()["version"] == version
        assert "trial" not in agent.policy()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_folder_has_one_follower(door: Door, agent: Agent, tmp_path: Path) -> None:
    """A mistyped database takes nothing out of the server, and is not made."""
    other, stop = Door(str(tmp_path / "mistyped.db")), threading.Event()
    with opened(str(door.db)) as store:
        one = follower(store, agent, told := [])
        thread = threading.Thread(target=one.run, args=(stop,))
        thread.start()
        try:
            eventually(lambda: one.policy.pair_id)
            version = put_in_force(store, PAIR.id, TABLE, deployment="vllm")
            eventually(lambda: agent.policy().get("version") == version)
            before = agent.policy()
            for mistyped in (other, door):
                line = mistyped.refused("follow", agent.folder, pair="demo", once=True)
                assert f"{agent.folder} is followed into {told[0].split()[3][:-1]} already" in line
                assert f"(process {os.getpid()} on " in line
            assert not Path(str(other.db)).exists()
        finally:
            stop.set()
            thread.join(PATIENCE_S)
    found = other.call("follow", agent.folder, pair="demo", once=True)
    assert found.exit_code == 0
    assert f"policy.json holds version {version} of {told[0].split()[3][:-1]}" in found.stderr
    assert agent.policy() == before


def test_what_should_be_in_force_is_put_back(store: TraceStore, agent: Agent) -> None:
    """And the answer is withdrawn while the server runs something else."""
    one = follower(store, agent, [])
    one.once()
    version = put_in_force(store, PAIR.id, TABLE, deployment="vllm")
    one.once()
    agent.status(version, TABLE.id)
    one.once()
    before = agent.policy()
    for lost in ('{"format": 1, "version": 0}', "{half"):
        (agent.folder / "policy.json").write_text(lost)
        one.once()
        assert agent.policy() == before
    agent.status(0)
    one.once()
    agent.status(version, TABLE.id)
    one.once()
    answers = store.acknowledgements(version)
    assert [a.status for a in answers] == ["applied", "withdrawn", "applied"]
    assert answers[1].reason == "the server runs its own number of draft tokens"
    agent.status(version, "of another database")
    Agent(agent.folder, "bbbb").status(version, "of another database")
    one.once()
    assert len(store.acknowledgements(version)) == 3


@pytest.mark.parametrize("owner", ["theirs", ["x"], 7])
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_database_in_the_policy_that_is_no_object_is_told(
    store: TraceStore, agent: Agent, owner: object
) -> None:
    """It stays until something is published, as what a person wrote does."""
    by_hand = {"format": 1, "version": 4, "policy": "x", "gammas": {"1": 2}, "database": owner}
    for trial in ({}, {"version": -3, "before": owner}):
        (agent.folder / "policy.json").write_text(json.dumps({**by_hand, **trial}))
        told: list[str] = []
        one = follower(store, agent, told)
        one.once()
        assert trial or agent.policy() == by_hand
        assert any("`database` is no object" in line for line in told) or trial
    version = put_in_force(store, PAIR.id, policy("small", 2), deployment="vllm")
    one.once()
    assert agent.policy()["version"] == version


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_the_database_does_not_say_takes_nothing_out(
    store: TraceStore, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that fails is repeated; what is known stays, and a killed tuning is undone."""

    def failing(*_: Any, **__: Any) -> Any:
        raise UnavailableError("the database is away")

    def look(one: Follower, broken: str) -> None:
        with monkeypatch.context() as away:
            away.setattr(TraceStore, broken, failing)
            with pytest.raises(UnavailableError):
                one.once()

    told: list[str] = []
    running = follower(store, agent, told)
    running.once()
    first = put_in_force(store, PAIR.id, policy("small", 2), deployment="vllm")
    running.once()
    live = agent.policy()
    assert live["version"] == first
    fresh = follower(store, agent, told)
    for broken in ("followed_server", "newest_publications", "list_publications"):
        look(fresh, broken)
        assert agent.policy() == live
    second = put_in_force(store, PAIR.id, policy("small", 3), deployment="vllm")
    look(running, "list_publications")
    assert agent.policy() == live
    for one in (running, follower(store, agent, told)):
        trial = {**live, "trial": {"version": -3, "gammas": {"1": 2}}}
        (agent.folder / "policy.json").write_text(json.dumps(trial))
        look(one, "newest_publications")
        assert agent.policy() == live
    assert told.count("a trial that is over, or that nobody renews, is taken out") == 2
    running.once()
    assert agent.policy()["version"] == second


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_pair_by_another_name_is_followed_on(
    store: TraceStore, agent: Agent, tmp_path: Path
) -> None:
    told: list[str] = []
    follower(store, agent, told).once()
    version = put_in_force(store, PAIR.id, TABLE, deployment="vllm")
    follower(store, agent, told).once()
    before = agent.policy()
    file = tmp_path / "p2.json"
    drafts = {"s2": PAIR.drafts["small"]}
    file.write_text(json.dumps({"name": "p2", "target": PAIR.target, "drafts": drafts}))
    agent.write(1, version=version)
    Follower(store, agent.folder, "vllm", told.append, pair=read_pair(str(file))).once()
    assert agent.policy() == before
    (info,) = store.list_recordings()
    steps = [step for r in store.iterate(info.id, steps=True) for step in r.steps]
    assert {step.draft for step in steps} == {"", "small"}


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_was_published_for_other_models_is_taken_out_and_told(
    store: TraceStore, agent: Agent, tmp_path: Path
) -> None:
    told: list[str] = []
    one = follower(store, agent, told)
    one.once()
    version = put_in_force(store, PAIR.id, TABLE, deployment="vllm")
    one.once()
    before = agent.policy()
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"target": PAIR.drafts["small"], "drafts": {}}))
    mistyped = Follower(store, agent.folder, "vllm", told.append, pair=read_pair(str(file)))
    with pytest.raises(PairError, match="the pair's target is"):
        mistyped.once()
    assert agent.policy() == before, "the server is the one that it was published for"
    Follower(store, agent.folder, "vlm", told.append, pair=PAIR).once()
    assert agent.policy() == {"format": 1, "version": 0}
    line = f"version {version} is taken out of policy.json: nothing in deployment vlm is for this"
    assert line in told[-1]
    one.once()
    assert agent.policy() == before
    other = Agent(agent.folder, "bbbb", draft=None)
    other.engine["model"] = PAIR.drafts["small"]
    other.status(version, TABLE.id)
    for _ in range(2):
        with pytest.raises(PairError, match="the pair's target is"):
            one.once()
        assert agent.policy() == {"format": 1, "version": 0}
    assert sum(line.replace("vlm", "vllm") in said for said in told) == 1


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_a_server_refuses_of_another_database_is_no_answer(
    store: TraceStore, agent: Agent
) -> None:
    store.put_pair("other", "other", {}, {"target": "t", "drafts": {}, "methods": []})
    version = put_in_force(store, "other", TABLE, deployment="vllm")
    theirs = {"format": 1, "version": version, "policy": "p", "gammas": {"1": 9}}
    theirs["database"] = {"id": "0123", "name": "other.db"}
    (agent.folder / "policy.json").write_text(json.dumps(theirs))
    agent.status(refused={"version": version, "reason": "no"})
    follower(store, agent, []).once()
    assert store.acknowledgements() == ()
    assert agent.policy() == theirs


def test_a_file_system_without_locks_is_told(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", failing)
    with pytest.raises(TraceError, match=r"file system has no locks \(No locks available\)"):
        FolderLock(agent.folder, "follow", "followed")


def fixed(draft: str, gamma: int) -> str:
    return json.dumps({"draft": draft, "window": {"kind": "fixed", "gamma": gamma}})


def test_a_publication_is_for_the_servers_that_loaded_its_models(
    agent: Agent, tmp_path: Path
) -> None:
    """Whatever the pair and its drafts are called; and who is not meant is told at once."""
    door, file = Door(str(tmp_path / "x.db")), tmp_path / "pair.json"
    drafts = {"tiny": PAIR.drafts["small"], "other": PAIR.drafts["medium"]}
    file.write_text(json.dumps({"name": "chat", "target": PAIR.target, "drafts": drafts}))
    door.json("follow", agent.folder, once=True)
    of = {"pair": file, "device": "cpu", "deployment": "vllm"}
    told = door.json("policies activate", fixed("tiny", 3), **of)
    door.json("follow", agent.folder, once=True)
    assert (agent.policy()["version"], agent.policy()["gammas"]) == (told["version"], {"1": 3})
    cuda = {**of, "device": "cuda"}
    backwards = tmp_path / "backwards.json"
    backwards.write_text(
        json.dumps({"target": PAIR.drafts["small"], "drafts": {"tiny": PAIR.target}})
    )
    for policy_, how, why in (
        (fixed("other", 3), of, "this server loaded the draft 'tiny', not 'other'"),
        (fixed("tiny", 7), of, "this server drafts at most 6 tokens, not 7"),
        (fixed("tiny", 2), cuda, "it runs on cpu, and this is for cuda: say --device cpu"),
        (fixed("tiny", 2), {**of, "pair": backwards}, "which are not of pair"),
    ):
        line = door.refused("policies activate", policy_, **how)
        assert "no server of deployment vllm can run it: vllm:" in line
        assert why in line
    wrong = door.call("policies activate", fixed("tiny", 2), **{**of, "deployment": "vlm"})
    assert wrong.exit_code == 0
    said = " ".join(wrong.stdout.split())
    assert "no server follows deployment vlm; these do: vllm" in said
    found = door.call("follow", agent.folder, deployment="nobody", once=True)
    assert "nothing is published in deployment nobody; for this server's models there is: " in (
        found.stderr
    )
    assert f"vllm (version {told['version']})" in found.stderr


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_silent_server_is_told(
    store: TraceStore, door: Door, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spectune.engines.vllm.follow.REPORT_S", 0.1)
    told, stop = list[str](), threading.Event()
    follower(store, agent, told).once()
    version = put_in_force(store, PAIR.id, TABLE, deployment="vllm")
    an_hour_ago = time.time() - 3600

    def state() -> str:
        (row,) = door.json("policies list", in_force=True)["publications"]
        (server,) = row["servers"]
        return f"{server['status']}, {server['silent']}"

    agent.status(version, TABLE.id)
    follower(store, agent, told).once()
    assert state() == "applied, "
    agent.status(version, TABLE.id, at=an_hour_ago)
    one = follower(store, agent, told)
    thread = threading.Thread(target=one.run, args=(stop,))
    thread.start()
    since = f"silent since {datetime.fromtimestamp(an_hour_ago, UTC):%Y-%m-%d %H:%M}"
    eventually(lambda: any(f"policy version {version}; server {since}" in line for line in told))
    assert sum(line.startswith(f"server {agent.boot}: {since}") for line in told) == 1
    tried = {"version": -1795825699, "policy": "trial", "since": 1.0, "is_over": False}
    agent.status(version, TABLE.id, trial=tried)
    eventually(lambda: told[-1].endswith("another policy is tried"))
    stop.set()
    thread.join(PATIENCE_S)
    assert not [line for line in told if "-1795825699" in line]
    agent.status(version, TABLE.id, at=an_hour_ago)
    follower(store, agent, told).once()
    assert state() == f"applied, server {since} UTC"
    earlier = replace(store, clock=lambda: datetime.fromtimestamp(an_hour_ago, UTC))
    follower(earlier, agent, told).once()
    assert state() == f"applied, not followed {since.partition(' ')[2]} UTC"


def test_boots_are_recordings_of_their_own(store: TraceStore, agent: Agent) -> None:
    """Also one that began and ended while nobody followed, as its file says how it served."""
    told: list[str] = []
    agent.write(2)
    follower(store, agent, told).once()
    between = Agent(agent.folder, "bbbb", draft="medium")
    between.write(3)
    last = Agent(agent.folder, "dddd")
    last.write(4)
    for file in agent.folder.glob("rounds-a*"):
        os.utime(file, (BEGAN, BEGAN - 90_000))
    one = follower(store, agent, told)
    one.once()
    infos = {info.options["boot"]: info for info in store.list_recordings()}
    assert {boot: info.n_requests for boot, info in infos.items()} == {
        agent.boot: 2, "bbbb": 3, "dddd": 4,
    }  # fmt: skip
    ended = {boot for boot, info in infos.items() if info.state == "complete"}
    assert ended == {agent.boot, "bbbb"}
    steps = next(store.iterate(infos["bbbb"].id, steps=True)).steps
    assert [step.draft for step in steps] == ["", "medium", "medium"]
    assert not agent.file.exists()  # it ended more than a day ago
    assert between.file.exists()


def test_requests_are_forgotten_by_age_and_by_size(store: TraceStore, agent: Agent) -> None:
    agent.write(700)  # a second each, from an hour ago on
    follower(store, agent, []).once()
    info = store.list_recordings()[0]
    before = store.stored_bytes([PAIR.id])
    later = replace(store, clock=lambda: datetime.fromtimestamp(BEGAN + 700, UTC))
    by_age = follower(later, agent, [], limits=Limits(seconds=100))
    by_age.once()
    assert request_ids(store) == [f"r{n}" for n in range(600, 700)]
    assert by_age.totals.forgotten == 600
    limit = before // 70
    by_size = follower(store, agent, [], limits=Limits(stored_bytes=limit))
    by_size.once()
    assert limit * 0.5 < store.stored_bytes([PAIR.id]) <= limit
    assert request_ids(store)[-1] == "r699"
    agent.write()
    by_size.once()
    assert request_ids(store)[-1] == "r700"
    assert [i.id for i in store.list_recordings()] == [info.id]


def test_kills_lose_and_double_nothing(door: Door, agent: Agent, tmp_path: Path) -> None:
    """``kill -9`` amid reading and writing. No more is written than a follower has to read."""
    end, limit = threading.Event(), [0]
    agent.write(0)

    def serve() -> None:
        while not end.is_set():
            if agent.count < limit[0]:
                agent.write(20)
                if agent.file.stat().st_size > 2 * CHUNK:
                    agent.number += 1
            time.sleep(0.1)

    writer = threading.Thread(target=serve)
    writer.start()
    chance = np.random.default_rng(0)
    with opened(str(door.db)) as store:
        try:
            for _ in range(KILLS):
                before = num_requests(store)
                limit[0] = before + 400
                process: Started = door.start("follow", agent.folder, pair="demo")
                eventually(lambda before=before: num_requests(store) > before)
                time.sleep(float(chance.uniform(0, 0.3)))
                process.kill()
                assert process.wait(PATIENCE_S) == -signal.SIGKILL
        finally:
            end.set()
            writer.join()
    door.json("follow", agent.folder, pair="demo", once=True)
    with opened(str(door.db)) as store:
        ids = request_ids(store)
    assert sorted(ids) == sorted(f"r{n}" for n in range(agent.count))
    assert len(list(agent.folder.glob("rounds-*"))) == 1
    assert not list(agent.folder.glob(".*.part"))


def test_ctrl_c_ends_it_cleanly(door: Door, agent: Agent) -> None:
    agent.write(5)
    process = door.start("follow", agent.folder, pair="demo", json=True)
    process.stderr.readline()
    with opened(str(door.db)) as store:
        eventually(lambda: len(request_ids(store)) == 5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(PATIENCE_S)
    assert process.wait(PATIENCE_S) == 0
    assert json.loads(out)["requests"] == 5


def test_a_database_file_that_is_gone_is_waited_for(tmp_path: Path, agent: Agent) -> None:
    told: list[str] = []
    file, stop = tmp_path / "traffic.db", threading.Event()
    with open_database(str(file)) as database:
        store = TraceStore(database)
        one = follower(store, agent, told)
        thread = threading.Thread(target=one.run, args=(stop,))
        thread.start()
        try:
            agent.write(10)
            eventually(lambda: one.totals.requests == 10)
            aside = tmp_path / "aside"
            aside.mkdir()
            for part in tmp_path.glob("traffic.db*"):
                part.rename(aside / part.name)
            eventually(lambda: any("trying again" in line for line in told))
            agent.write(10)
            time.sleep(1)
            assert not file.exists()  # none is made in its place
            for part in aside.glob("traffic.db*"):
                part.rename(tmp_path / part.name)
            version = put_in_force(store, PAIR.id, TABLE, deployment="vllm")
            eventually(lambda: agent.policy().get("version") == version)
            eventually(lambda: one.totals.requests == 20)
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        assert sorted(request_ids(store)) == sorted(f"r{n}" for n in range(20))
    assert "requests: it works again" in told


def test_a_server_that_restarts_is_waited_for(server: Server, agent: Agent) -> None:
    told: list[str] = []
    stop = threading.Event()
    with opened(server.url) as store:
        one = follower(store, agent, told)
        thread = threading.Thread(target=one.run, args=(stop,))
        thread.start()
        try:
            agent.write(10)
            eventually(lambda: one.totals.requests == 10)
            server.stop()
            agent.write(10)
            agent.number += 1
            agent.write(10)
            eventually(lambda: any(re.match("requests: .*trying again", line) for line in told))
            server.start()
            eventually(lambda: one.totals.requests == 30)
            eventually(lambda: "requests: it works again" in told)
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        assert sorted(request_ids(store)) == sorted(f"r{n}" for n in range(30))


def test_what_is_wrong_is_one_line(door: Door, agent: Agent, tmp_path: Path) -> None:
    assert "no such folder" in door.refused("follow", tmp_path / "none", once=True)
    assert "a size is expected, such as" in door.refused("follow", agent.folder, keep_size="2 cows")
    assert "all, none or a share" in door.refused("follow", agent.folder, texts="some")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"target": PAIR.drafts["small"], "drafts": {}}))
    line = door.refused("follow", agent.folder, pair=other, once=True)
    assert "the pair's target is" in line
    (agent.folder / "status.json").write_text('{"boot": "x"}')
    line = door.refused("follow", agent.folder, pair="demo", once=True)
    assert "status.json: engine: Field required" in line
    off = {"engine": {}, "fault": "off, vLLM 0.40 is not known: no scheduler_config"}
    (agent.folder / "status.json").write_text(json.dumps(off))
    line = door.refused("follow", agent.folder, pair="demo", once=True)
    assert "status.json: the agent is off, vLLM 0.40 is not known: no scheduler_config" in line


def test_files_with_texts_are_their_users_alone(tmp_path: Path, agent: Agent) -> None:
    """Whatever the umask; a file that others may read stays so where it is written anew."""
    agent.write(2, label="=HYPERLINK('http://x')")
    door, before = Door(str(tmp_path / "traffic.db")), os.umask(0)
    try:
        door.json("follow", agent.folder, pair="demo", texts="all", once=True)
        with open_database(str(tmp_path / "traffic.db")) as database, database.write() as session:
            session.connection().exec_driver_sql("CREATE TABLE kept (n INTEGER)")
            log = (tmp_path / "traffic.db-wal").stat().st_mode
        shared = tmp_path / "shared.csv"
        shared.touch(0o664)
        for name in ("rows.csv", "rows.json", "shared.csv"):
            door.json("traces export", tmp_path / name)
    finally:
        os.umask(before)
    names = ("traffic.db", "rows.csv", "rows.json", "shared.csv")
    names += ("folder/policy.json", "folder/follow.lock")
    modes = [oct((tmp_path / name).stat().st_mode & 0o777) for name in names]
    assert modes == ["0o600", "0o600", "0o600", "0o664", "0o600", "0o600"]
    assert log & 0o777 == 0o600
    with (tmp_path / "rows.csv").open(newline="") as file:
        categories = [row["category"] for row in csv.DictReader(file)]
    assert set(categories) == {"'=HYPERLINK('http://x')"}


def test_cards_of_one_deployment_follow_policies_of_their_own(
    door: Door, store: TraceStore, tmp_path: Path
) -> None:
    """What is published for every card holds until something newer is published for one."""
    cards = {}
    for card in ("NVIDIA L4", "NVIDIA H100 80GB HBM3"):
        cards[card] = Agent(tmp_path / card, boot=f"b{len(cards)}")
        cards[card].engine |= {"device": "cuda", "hardware": card}
        cards[card].status()

    def in_force() -> list[Any]:
        for one in cards.values():
            door.json("follow", one.folder, pair="demo", once=True)
        return [one.policy().get("gammas") for one in cards.values()]

    def publish(gamma: int, device: str) -> None:
        named = json.dumps({"draft": "small", "window": {"kind": "fixed", "gamma": gamma}})
        where = {"pair": "demo", "deployment": "vllm", "device": device}
        assert door.json("policies activate", named, **where)["version"]

    publish(2, "cuda:NVIDIA L4")
    assert in_force() == [{"1": 2}, None]
    publish(3, "cuda")
    assert in_force() == [{"1": 3}, {"1": 3}]
    publish(4, "cuda:NVIDIA H100 80GB HBM3")
    assert in_force() == [{"1": 3}, {"1": 4}]
    rows = door.json("policies list", in_force=True)["publications"]
    assert {row["device"] for row in rows} == {"cuda", "cuda:NVIDIA H100 80GB HBM3"}
    where = {"pair": "demo", "deployment": "vllm"}
    shown = door.json("policies show active", device="cuda:NVIDIA L4", **where)
    assert shown["policy"]["window"]["gamma"] == 3
    assert "cuda:NAME is expected" in door.refused("policies list", device="gpu")
