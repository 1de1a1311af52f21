"""`serve` in rollouts: the candidate takes turns with what is published, amid texts, while somebody
conducts it; no text depends on it."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from databases import opened, put_in_force
from doors import Door, write_workload
from pairs import fixed
from serve_process import answer, follows, process
from synthetic import policy
from waiting import PATIENCE_S, eventually

from spectune.db import UnavailableError
from spectune.engines.vllm.folder import is_candidates, seed_for
from spectune.engines.vllm.follow_policy import TTL_S
from spectune.optimizer.commands.tune import Account
from spectune.optimizer.in_force import watch
from spectune.optimizer.rollout.decision import BLOCK_S
from spectune.optimizer.rollout.own_turns import TakesTurns
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.service.recorder import Recorder
from spectune.traces.store import TraceStore
from spectune.traces.tables import Rollout

OLD, NEW = policy("near", fixed(2)), policy("near", fixed(4))
LEARNS = policy("near", {"kind": "q_learning"})
"""Of one request at a time."""


@pytest.fixture
def door(tiny_pair: Path, tmp_path: Path) -> Door:
    return Door(str(tmp_path / "spectune.db"), str(tiny_pair))


@pytest.fixture(scope="module")
def pair(tiny_pair: Path) -> LoadedPair:
    return load_pair(read_pair(str(tiny_pair)), device="cpu", dtype="float64")


@contextmanager
def traffic(url: str) -> Iterator[set[str]]:
    """Two clients that ask without an end; the texts that they got."""
    texts, is_over = set[str](), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            texts.add(answer(url)["choices"][0]["text"])

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        yield texts
    finally:
        is_over.set()
        for client in clients:
            client.join()


def drafted_by(store: TraceStore) -> set[str]:
    """The policies of all rounds of the one server."""
    (server,) = store.followed_servers()
    served = store.served_by(server.boot, datetime.fromtimestamp(0, UTC))
    return {step.policy for _, steps in served for step in steps}


def rolled_out(door: Door, candidate: Policy) -> tuple[str, ...]:
    document = json.dumps(candidate.spelled_out())
    how = "--device", "cpu", "--pair", str(door.pair), "--set", "block=3s"
    return ("policies", "rollout", document, *how)


def test_a_candidate_takes_turns_with_what_is_published(door: Door, pair: LoadedPair) -> None:
    with process(door) as (started, url), opened(str(door.db)) as store:
        alone = answer(url)["choices"][0]["text"]
        version = put_in_force(store, pair.id, OLD)
        eventually(lambda: follows(url, version))
        eventually(store.followed_servers)
        (server,) = store.followed_servers()
        assert server.engine["engine"] == "native"
        with traffic(url) as texts:
            conductor = door.start(*rolled_out(door, NEW))
            eventually(lambda: {OLD.id, NEW.id} <= drafted_by(store))
            eventually(lambda: store.rollouts()[0].standing.get("pairs", 0) > 0)
            assert store.rollouts()[0].standing["taking_turns"] == [server.node]
            ended = door.json("policies", "abort", "--pair", door.pair, "--device", "cpu")
            assert ended["verdict"] == "aborted"
            assert conductor.wait(PATIENCE_S) == 1
            eventually(lambda: follows(url, version))
        assert texts == {alone}
        shown = door.json("status")["deployments"]
        assert server.node in shown[0]["servers"]
        started.send_signal(signal.SIGTERM)
        assert started.wait(PATIENCE_S) == 0
        assert store.followed_servers() == ()


def test_without_a_publication_it_takes_turns_with_autoregression(
    door: Door, pair: LoadedPair
) -> None:
    with process(door) as (_, url), opened(str(door.db)) as store:
        eventually(store.followed_servers)
        with traffic(url):
            conductor = door.start(*rolled_out(door, NEW))
            eventually(lambda: store.rollouts() and store.rollouts()[0].standing.get("pairs"))
            assert drafted_by(store) == {AUTOREGRESSIVE.id, NEW.id}
            conductor.kill()


def test_what_it_cannot_run_ends_the_rollout(door: Door, pair: LoadedPair) -> None:
    with process(door), opened(str(door.db)) as store:
        eventually(store.followed_servers)
        said = door.call(*rolled_out(door, LEARNS))
        (ended,) = store.rollouts()
        assert (said.exit_code, ended.verdict) == (1, "refused"), said.stderr
        assert "one request at a time" in ended.why


def test_what_a_tuning_chose_is_rolled_out(
    door: Door, pair: LoadedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of an incumbent that drafts far too much; by the time of its own thread."""
    account = partial(Account, clock=time.thread_time)
    monkeypatch.setattr("spectune.optimizer.commands.tune.Account", account)
    write_workload(tmp_path / "work.jsonl", 24)
    how = {"pair": door.pair, "device": "cpu", "workload": tmp_path / "work.jsonl"}
    how |= {"max_new_tokens": 24, "trials": 8, "finalists": 2, "budget": "4s", "tree_width": 0}
    with opened(str(door.db)) as store:
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
        put_in_force(store, pair.id, policy("far", fixed(12)))
        at = {"deployment": "default", "node": "node", "place": "here"}
        about = {"engine": "native", "model": "target", "device_name": "cpu", "own_policy": ""}
        store.follow_server("b000", pair.id, about, models=pair.spec.models, **at)
        store.hear("b000", "default", store.clock())
        told = door.json("tune", "--rollout", "--report", "none", **how)
        (begun,) = store.rollouts(is_open=True)
    assert told["published"] is None
    assert (begun.policy_id, begun.id) == (told["winner"]["id"], told["rollout"]["id"])


@dataclass(frozen=True)
class Leaving(TraceStore):
    """A database that is away while ``is_away`` is set."""

    is_away: threading.Event = field(default_factory=threading.Event)

    def conducted_rollouts(self, deployment: str) -> tuple[Rollout, ...]:
        if self.is_away.is_set():
            raise UnavailableError("away")
        return super().conducted_rollouts(deployment)


class Taking:
    """A server that takes turns in the rollout of NEW over OLD, by a clock that is set here."""

    def __init__(self, store: TraceStore, pair: LoadedPair, stack: ExitStack) -> None:
        self.store, self.now = Leaving(store.database, store.clock), time.time()
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
        version = put_in_force(store, pair.id, OLD)
        published = stack.enter_context(
            watch(store, pair, None, together=True, interval_s=PATIENCE_S)
        )
        recorder = Recorder(store, pair, published, 1.0)
        stack.callback(recorder.close)
        at = {"deployment": "default", "address": "here"}
        self.turns = TakesTurns(self.store, pair, published, recorder, **at)
        self.turns.begin(lambda: self.now)
        self.turns.look()
        store.put_policy(NEW.id, NEW.spelled_out(), NEW.label())
        of = {"deployment": "default", "pair_id": pair.id, "device": "cpu", "policy_id": NEW.id}
        wanted = Rollout(**of, seed=3, block_s=BLOCK_S, actor="test")
        rollout = store.begin_rollout(wanted, expected=version)
        lease = store.conduct("test", 600.0, rollout.id)
        assert lease is not None
        self.lease, self.rollout = lease, rollout
        self.seed, self.began = seed_for(3, recorder.boot), self.now

    def all_take_turns(self) -> None:
        assert self.store.extend_rollout(self.lease, 600.0, {"servers": None})
        self.turns.look()

    def at(self, block: int, *, look: bool = True) -> Policy:
        """What drafts in the middle of a block."""
        self.now = self.began + (block + 0.5) * BLOCK_S
        if look:
            self.turns.look()
        return self.turns.current().policy

    def turn_of(self, block: int) -> Policy:
        return NEW if is_candidates(self.seed, block) else OLD


@pytest.fixture
def taking(store: TraceStore, pair: LoadedPair) -> Iterator[Taking]:
    with ExitStack() as stack:
        yield Taking(store, pair, stack)


def test_it_begins_when_it_is_told_and_goes_on_block_by_block(taking: Taking) -> None:
    taking.turns.look()
    assert {taking.at(block).id for block in range(4)} == {OLD.id}, "not yet told to"
    taking.now = taking.began
    taking.all_take_turns()
    (turn,) = taking.store.turns(taking.rollout.id)
    assert turn.since == taking.began
    assert [taking.at(block) for block in range(12)] == [taking.turn_of(n) for n in range(12)]


def test_a_database_that_is_away_prolongs_nothing(taking: Taking) -> None:
    """It goes on where the database is back: by the blocks of before."""
    taking.all_take_turns()
    last = next(block for block in range(2) if taking.turn_of(block) == NEW)
    assert taking.at(last) == NEW
    taking.store.is_away.set()
    with pytest.raises(UnavailableError):
        taking.turns.look()
    assert taking.at(last, look=False) == NEW
    first = last + 1 + int(TTL_S // BLOCK_S)
    assert {taking.at(block, look=False).id for block in range(first, first + 8)} == {OLD.id}
    taking.store.is_away.clear()
    assert [taking.at(block) for block in range(20, 28)] == [
        taking.turn_of(n) for n in range(20, 28)
    ]
    assert len(taking.store.turns(taking.rollout.id)) == 1


def test_it_ends_with_who_conducts_it_and_with_what_is_published(taking: Taking) -> None:
    taking.all_take_turns()
    assert taking.store.extend_rollout(taking.lease, -1.0, {"servers": None})
    assert {taking.at(block).id for block in range(4)} == {OLD.id}
    assert taking.store.conduct("another", 600.0) is not None
    assert {taking.at(block).id for block in range(4)} == {OLD.id, NEW.id}
    put_in_force(taking.store, taking.rollout.pair_id, AUTOREGRESSIVE)
    taking.turns.published.poll()
    assert {taking.at(block).id for block in range(4)} == {AUTOREGRESSIVE.id}
