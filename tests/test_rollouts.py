"""Rollouts through a database: servers that are followed take turns, a conductor judges; each
server and its traffic are stood in for, with a clock of their own."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_folder import BEGAN, PAIR, Agent
from databases import opened, put_in_force
from doors import Door
from synthetic import policy
from waiting import PATIENCE_S, eventually

from spectune.db import StaleVersionError, UnavailableError
from spectune.engines.vllm.folder import is_candidates
from spectune.engines.vllm.follow import Follower
from spectune.engines.vllm.locks import FolderLock
from spectune.optimizer.rollout.conductor import FIRST_PAIRS, Conductor
from spectune.optimizer.rollout.decision import BLOCK_S, LOOKS
from spectune.runtime.policies.document import Policy
from spectune.traces.store import TraceStore
from spectune.traces.store.rollouts import RolloutError
from spectune.traces.tables import Rollout

OLD, NEW = policy("small", 2), policy("small", 4)
PAIR_S = 2 * BLOCK_S


class Replica:
    """A server whose agent obeys a trial, and `follow` beside it. ``seconds``: of a round of two
    tokens, by the version that drafts it; of others 0.5."""

    def __init__(self, store: TraceStore, folder: Path, boot: str, card: str | None = None) -> None:
        self.agent, self.told = Agent(folder, boot), list[str]()
        if card is not None:
            self.agent.engine |= {"device": "cuda", "hardware": card}
        self.follower = Follower(store, folder, "vllm", self.told.append, pair=PAIR)
        self.seconds: dict[int, float] = {}
        self.now, self.tried, self.extra = BEGAN, dict[str, Any](), dict[str, Any]()
        self.is_idle, self.served, self.version = False, 0, 0

    @property
    def trial(self) -> dict[str, Any]:
        trial = self.agent.policy().get("trial")
        return trial if trial and trial["boot"] == self.agent.boot else {}

    def turn(self, now: float) -> None:
        """Serves up to a moment, tells how it is, and is followed."""
        while self.now < now and not self.is_idle:
            self.serve()
        self.now, policy, trial = now, self.agent.policy(), self.trial
        since = self.tried.get("since", now)
        if trial and trial["version"] != self.tried.get("version"):
            since = now
        self.version, self.tried = policy.get("version", 0), {**trial, "since": since}
        told = {**self.tried, "is_over": False} if trial else None
        self.agent.status(self.version, policy.get("policy", ""), at=now, trial=told, **self.extra)
        self.follower.once()

    def serve(self) -> None:
        """A request every 3 seconds, of ten rounds."""
        at, rounds = self.now, [[0, 0, 0, 1, 0, 0.2, 1, self.now + 0.2]]
        ended = at + 0.2
        for n in range(10):
            version = self.version
            if "version" in self.tried:
                block = int((ended - self.tried["since"]) // self.tried["block_s"])
                if block >= 0 and is_candidates(self.tried["seed"], block):
                    version = self.tried["version"]
            seconds = self.seconds.get(version, 0.5) * (1 + 0.03 * (self.served % 5))
            ended += seconds
            rounds.append([1 + 2 * n, 1, 1, 2, version, seconds, 1, ended])
        tokens = {"prompt": None, "output": None, "n_prompt": 5, "n_output": 21}
        line = self.agent.line(arrived=at, ended=ended, rounds=rounds, **tokens)
        self.agent.write(0)
        with self.agent.file.open("a") as file:
            file.write(json.dumps({**line, "id": f"{self.agent.boot}{self.served}"}) + "\n")
        self.served, self.now = self.served + 1, self.now + 3.0


def a_rollout(candidate: Policy, **how: Any) -> Rollout:
    """One of a policy that nobody has begun."""
    of = {"deployment": "vllm", "pair_id": PAIR.id, "device": "cpu", "policy_id": candidate.id}
    return Rollout(**{**of, "seed": 3, "block_s": BLOCK_S, "actor": "test", **how})


class Fleet:
    """Replicas, one conductor, and the clock of both."""

    def __init__(self, store: TraceStore, tmp_path: Path, *cards: str | None) -> None:
        self.now = BEGAN
        self.store = replace(store, clock=lambda: datetime.fromtimestamp(self.now, UTC))
        self.told: list[str] = []
        self.replicas = [
            Replica(self.store, tmp_path / f"f{n}", f"b00{n}", card)
            for n, card in enumerate(cards or (None,))
        ]
        self.conductors: dict[int, Conductor] = {}
        store.put_pair(PAIR.id, PAIR.name, PAIR.to_json(), PAIR.models)
        for chosen in (OLD, NEW):
            store.put_policy(chosen.id, chosen.spelled_out(), chosen.label())
        self.turn()

    def turn(self, seconds: float = 15.0) -> None:
        self.now += seconds
        for replica in self.replicas:
            replica.turn(self.now)

    def begin(self, candidate: Policy = NEW, device: str = "cpu", **how: Any) -> Rollout:
        over = self.store.active_version(PAIR.id, device, "vllm")
        expected = how.pop("expected", over)
        wanted = a_rollout(candidate, device=device, **how)
        rollout = self.store.begin_rollout(wanted, expected=expected)
        for replica in self.replicas:
            replica.seconds.setdefault(rollout.trial_version, 0.4)
        lease = self.store.conduct("test", 600.0, rollout.id)
        assert lease is not None
        self.conductors[rollout.id] = Conductor(self.store, lease, self.told.append, 600.0)
        return rollout

    def conduct(self, seconds: float, *, most: bool = False) -> None:
        """Until every rollout has ended (within ``most``), or so long."""
        until = self.now + seconds
        while self.now < until and self.conductors:
            for number, conductor in tuple(self.conductors.items()):
                if not conductor.look():
                    del self.conductors[number]
            self.turn()
        assert not (most and self.conductors), self.told

    def ended(self, rollout: Rollout) -> Rollout:
        found = self.store.rollout(rollout.id)
        assert found is not None
        return found


@pytest.fixture
def fleet(store: TraceStore, tmp_path: Path) -> Fleet:
    return Fleet(store, tmp_path)


def test_a_faster_policy_is_promoted_and_in_force(fleet: Fleet) -> None:
    over = put_in_force(fleet.store, PAIR.id, OLD, deployment="vllm")
    fleet.turn()
    rollout = fleet.begin()
    fleet.conduct(PAIR_S * (LOOKS[0] + 4), most=True)
    found = fleet.ended(rollout)
    assert found.verdict == "promoted", found.why
    assert fleet.store.rollouts("vllm", is_open=True) == ()
    (published, _) = fleet.store.list_publications(PAIR.id, "cpu", "vllm")
    assert (published.policy_id, published.supersedes) == (NEW.id, over)
    (look,) = published.evidence["rollout"]["looks"]
    assert look["pairs"] == LOOKS[0]
    assert look["ratio"] == pytest.approx(1.25, abs=0.03)
    assert f"rollout {rollout.id}: 1.2" in published.reason
    document = fleet.replicas[0].agent.policy()
    assert (document["version"], document["policy"]) == (published.version, NEW.id)
    assert "trial" not in document
    fleet.turn()
    (info,) = fleet.store.list_recordings()
    names = {name for steps in _steps(fleet.store) for name in steps}
    assert {OLD.id, NEW.id} <= names <= {OLD.id, NEW.id, ""}, info.id


def _steps(store: TraceStore) -> list[set[str]]:
    since = datetime.fromtimestamp(0, UTC)
    found = store.served_by("b000", since)
    return [{step.policy for step in steps} for _, steps in found]


def test_half_the_speed_is_reverted_within_four_pairs_and_three_freeze(fleet: Fleet) -> None:
    """The incumbent, which is the server's own number of draft tokens, stays."""
    for _ in range(3):
        fleet.replicas[0].seconds = dict.fromkeys((-1, -2, -3), 1.0)
        rollout = fleet.begin()
        began = fleet.now
        fleet.conduct(PAIR_S * 8, most=True)
        found = fleet.ended(rollout)
        assert (found.verdict, found.standing["pairs"] <= 4) == ("reverted", True), found.why
        assert fleet.now - began < 4 * PAIR_S + 120
        assert fleet.store.active_version(PAIR.id, "cpu", "vllm") == 0
        assert fleet.replicas[0].agent.policy() == {"format": 1, "version": 0}
    with pytest.raises(RolloutError, match="deployment vllm is frozen: 3 rollouts did harm"):
        fleet.begin()
    assert fleet.store.thaw("vllm") == 3
    fleet.begin()


def test_servers_begin_one_after_the_other(store: TraceStore, tmp_path: Path) -> None:
    """One first, which may show harm; each in an order of its own."""
    fleet = Fleet(store, tmp_path, None, None, None)
    rollout = fleet.begin()
    fleet.conduct(PAIR_S * 3)
    assert [bool(r.trial) for r in fleet.replicas].count(True) == 1
    fleet.conduct(PAIR_S * FIRST_PAIRS)
    assert all(replica.trial for replica in fleet.replicas)
    seeds = {replica.trial["seed"] for replica in fleet.replicas}
    assert len(seeds) == 3
    fleet.conduct(PAIR_S * LOOKS[0], most=True)
    assert fleet.ended(rollout).verdict == "promoted"
    assert len(fleet.ended(rollout).standing["taking_turns"]) == 3


def test_two_cards_have_a_rollout_each(store: TraceStore, tmp_path: Path) -> None:
    cards = ("NVIDIA L4", "NVIDIA L4", "NVIDIA H100", "NVIDIA H100")
    fleet = Fleet(store, tmp_path, *cards)
    good, bad = (fleet.begin(device=f"cuda:{card}") for card in ("NVIDIA L4", "NVIDIA H100"))
    for replica in fleet.replicas[2:]:
        replica.seconds[bad.trial_version] = 1.0
    fleet.conduct(PAIR_S)
    tried = [replica.trial.get("version") for replica in fleet.replicas]
    assert sorted(filter(None, tried)) == [bad.trial_version, good.trial_version]
    fleet.conduct(PAIR_S * (LOOKS[0] + FIRST_PAIRS), most=True)
    assert (fleet.ended(good).verdict, fleet.ended(bad).verdict) == ("promoted", "reverted")
    assert [r.agent.policy().get("policy") for r in fleet.replicas] == [NEW.id, NEW.id, None, None]


def test_servers_try_it_while_somebody_conducts_it(fleet: Fleet) -> None:
    fleet.begin()
    fleet.conduct(30.0)
    first = fleet.replicas[0].trial
    assert first["ttl_s"] <= 60
    (conductor,) = fleet.conductors.values()
    assert fleet.store.extend_rollout(conductor.lease, -1.0, {"servers": None})
    fleet.turn()
    assert not fleet.replicas[0].trial
    lease = fleet.store.conduct("another", 600.0)
    assert lease is not None
    assert not conductor.look(), "it is another's"
    Conductor(fleet.store, lease, fleet.told.append, 600.0).look()
    fleet.turn()
    again = fleet.replicas[0].trial
    assert again["version"] == first["version"]
    assert again["renewal"] > first["renewal"]


def test_a_database_that_is_away_renews_nothing_and_takes_nothing_out(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise UnavailableError("the database is away")

    fleet.begin()
    fleet.conduct(30.0)
    before = fleet.replicas[0].trial
    monkeypatch.setattr("spectune.engines.vllm.follow_policy.RENEW_S", 0.0)
    for broken in ("newest_publications", "conducted_rollouts"):
        with monkeypatch.context() as away:
            away.setattr(TraceStore, broken, failing)
            with pytest.raises(UnavailableError):
                fleet.turn()
        assert fleet.replicas[0].trial == before
    fleet.turn()
    assert fleet.replicas[0].trial["renewal"] > before["renewal"]


def test_a_pair_counts_once_whoever_conducts(fleet: Fleet) -> None:
    """Who takes over begins other blocks: what is served then is of those alone."""
    fleet.replicas[0].seconds = {-1: 0.5}  # it goes on: neither is faster
    rollout, began = fleet.begin(), fleet.now
    for handover in range(6):
        fleet.conduct(4 * PAIR_S)
        conductor = fleet.conductors[rollout.id]
        assert fleet.store.extend_rollout(conductor.lease, -1.0, conductor.rollout.standing)
        fleet.turn()
        lease = fleet.store.conduct(f"number {handover}", 600.0, rollout.id)
        assert lease is not None
        fleet.conductors[rollout.id] = Conductor(fleet.store, lease, fleet.told.append, 600.0)
        fleet.turn()
    fleet.conduct(2 * PAIR_S)
    assert len(fleet.store.turns(rollout.id)) > 4
    standing = fleet.ended(rollout).standing
    assert 8 <= standing["pairs"] <= (fleet.now - began) // PAIR_S


def test_a_tuning_of_a_server_is_left_alone(fleet: Fleet) -> None:
    fleet.begin()
    fleet.conduct(30.0)
    folder = fleet.replicas[0].agent.folder
    tuned = {"format": 1, "version": 0, "trial": {"version": -1_700_000_000, "boot": "b000"}}
    with FolderLock(folder, "tune", "tuned"):
        fleet.turn()
        assert not fleet.replicas[0].trial, "while it searches nothing is tried"
        (folder / "policy.json").write_text(json.dumps(tuned))
        fleet.replicas[0].follower.once()
        assert fleet.replicas[0].agent.policy() == tuned
    fleet.replicas[0].follower.once()
    assert fleet.replicas[0].trial["version"] == -1


def test_a_rollout_begins_against_what_is_in_force_and_one_at_a_time(fleet: Fleet) -> None:
    version = put_in_force(fleet.store, PAIR.id, OLD, deployment="vllm")
    with pytest.raises(StaleVersionError, match=f"publication {version} is in force, not 0"):
        fleet.begin(expected=0)
    rollout = fleet.begin(idempotency_key="nightly")
    with pytest.raises(RolloutError, match="rollout 1 is open in deployment vllm on cpu"):
        fleet.begin()
    again = fleet.store.begin_rollout(
        a_rollout(NEW, seed=1, idempotency_key="nightly"), expected=version
    )
    assert again.id == rollout.id


def test_what_is_published_meanwhile_ends_it(fleet: Fleet) -> None:
    rollout = fleet.begin()
    fleet.conduct(60.0)
    assert fleet.replicas[0].trial
    put_in_force(fleet.store, PAIR.id, OLD, deployment="vllm")
    fleet.turn()
    assert not fleet.replicas[0].trial
    fleet.conduct(60.0, most=True)
    assert fleet.ended(rollout).verdict == "overtaken"


TROUBLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "a refusal": ("refused", {"refused": {"version": -1, "reason": "drafts 0 to 3 tokens"}}),
    "a fault": ("refused", {"fault": "off, and vLLM goes on without it"}),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_refusal_or_a_fault_ends_it(fleet: Fleet, trouble: str) -> None:
    verdict, fleet.replicas[0].extra = TROUBLES[trouble][0], dict(TROUBLES[trouble][1])
    rollout = fleet.begin()
    fleet.conduct(120.0, most=True)
    found = fleet.ended(rollout)
    assert found.verdict == verdict
    assert any(word in found.why for word in ("drafts 0 to 3", "goes on without it"))


def test_silence_ends_it_without_a_verdict(fleet: Fleet) -> None:
    rollout = fleet.begin()
    fleet.conduct(60.0)
    fleet.replicas.clear()
    fleet.conduct(300.0, most=True)
    assert fleet.ended(rollout).verdict == "silent"


def test_without_traffic_nothing_is_shown(fleet: Fleet) -> None:
    rollout = fleet.begin()
    fleet.replicas[0].is_idle = True
    fleet.conduct(3600.0)
    assert fleet.ended(rollout).standing["pairs"] == 0
    fleet.now += timedelta(days=1).total_seconds()
    fleet.turn()
    fleet.conduct(60.0, most=True)
    assert fleet.ended(rollout).verdict == "inconclusive"


def test_by_hand(store: TraceStore, url: str, tmp_path: Path) -> None:
    door, of = Door(url, ""), {"pair": "demo", "device": "cpu", "deployment": "vllm"}
    new = json.dumps({"draft": "small", "window": {"kind": "fixed", "gamma": 4}})
    line = door.refused("policies rollout", new, **of)
    assert "no server follows deployment vllm" in line
    agent = Agent(tmp_path / "folder")
    with opened(url) as shared:
        follower = Follower(shared, agent.folder, "vllm", print, pair=PAIR)
        follower.once()
        begun = door.json("policies rollout", new, "--no-conduct", **of)
        assert (begun["verdict"], begun["policy"], begun["incumbent"]) == (None, NEW.id, None)
        assert door.json("policies rollout", new, "--no-conduct", **of)["id"] == begun["id"]
        other = json.dumps({"draft": "small", "window": {"kind": "fixed", "gamma": 3}})
        assert "is open in deployment vllm" in door.refused(
            "policies rollout", other, "--no-conduct", **of
        )
        (row,) = door.json("status")["deployments"]
        (told,) = row["rollouts"]
        assert "it waits for a worker" in told["text"]
        shown = door.json("policies show", new, **of)
        assert [one["id"] for one in shown["rollouts"]] == [begun["id"]]
    ended = door.json("policies abort", reason="not today", **of)
    assert (ended["verdict"], ended["why"]) == ("aborted", "not today")
    assert "no rollout is open in deployment vllm" in door.refused("policies abort", **of)
    assert door.json("policies thaw", deployment="vllm")["forgiven"] == 0
    assert "3 s to 10 minutes" in door.refused("policies rollout", new, "--set", "block=1s", **of)
    assert store.active_version(PAIR.id, "cpu", "vllm") == 0


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_worker_that_is_killed_leaves_no_trial_and_another_goes_on(
    url: str, tmp_path: Path
) -> None:
    """Its lease runs out, `follow` takes the trial out, and `schedule run` conducts on."""
    door, agent = Door(url, ""), Agent(tmp_path / "folder")
    new = json.dumps({"draft": "small", "window": {"kind": "fixed", "gamma": 4}})
    of = ("--pair", "demo", "--device", "cpu", "--deployment", "vllm")

    def is_tried() -> bool:
        agent.status(0, "")
        follower.once()
        return "trial" in agent.policy()

    with opened(url) as store:
        follower = Follower(store, agent.folder, "vllm", print, pair=PAIR)
        follower.once()
        worker = door.start("policies", "rollout", new, *of)
        eventually(is_tried)
        worker.kill()
        worker.wait(PATIENCE_S)
        eventually(lambda: not is_tried())
        (rollout,) = store.rollouts(is_open=True)
        another = door.start("schedule", "run", "--poll", "1s")
        eventually(is_tried)
        door.json("policies abort", **{of[n][2:]: of[n + 1] for n in (0, 2, 4)})
        eventually(lambda: not is_tried())
        another.send_signal(signal.SIGTERM)
        another.wait(PATIENCE_S)
        found = store.rollout(rollout.id)
        assert found is not None
        assert (found.verdict, found.claims) == ("aborted", 2)
