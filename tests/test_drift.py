"""Drift: what servers stored is watched for changes, and a change that a tuning would gain by makes
that due. Traffic is stood in for, with a clock of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_folder import BEGAN, PAIR, Agent
from databases import put_in_force
from doors import Door
from served_traces import SERVING, recorded, simulated, trace_of, window
from synthetic import flat_profile, policy
from test_recorded_loads import propose
from trace_values import a_panorama, a_trajectory
from waiting import eventually

from spectune.db import UnavailableError
from spectune.engines.engine import Load, chain_round
from spectune.engines.vllm.folder import ServerDescription
from spectune.engines.vllm.follow import Follower
from spectune.engines.vllm.servers import models_of
from spectune.optimizer import schedule
from spectune.optimizer.drift.watch import Watch, watch
from spectune.optimizer.drift.what_if import Gain, what_if
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.policies.document import parse_policy
from spectune.traces.schema import Sampling, Step
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.followed import Arrivals, Arrived, FilePlace
from spectune.traces.tables import Alarm, Trajectory

FIVE, ONE = policy("small", 5), policy("small", 1)
CODE, PROSE = 0.77, 0.585
"""Chances of a token's acceptance: rounds of 5 accept 2.4 and 1.3."""
OPTIONS = {"engine": "vllm", "device": "cpu", "boot": "b1", "serving": SERVING}
ASKED = Asked(PAIR.id, None, Sampling(), 400, options=OPTIONS, source="serve")


class Deployment:
    """One followed server, what it serves, and its clock."""

    def __init__(self, store: TraceStore, engine: Mapping[str, Any] = {}) -> None:
        self.now, self.rng, self.told = datetime.now(UTC), np.random.default_rng(0), list[str]()
        self.store = replace(store, clock=lambda: self.now)
        store.put_pair(PAIR.id, PAIR.name, PAIR.to_json(), PAIR.models)
        how: dict[str, Any] = {"deployment": "vllm", "node": "n", "place": "p", "models": {}}
        if engine:
            how["models"] = models_of(ServerDescription.model_validate(engine))._asdict()
        self.store.follow_server("b1", PAIR.id, engine, **how)
        self.gain = Gain(1.2, "simulated: small 2 is 1.20 times as fast")
        self.publish(FIVE)

    def publish(self, chosen: Any) -> None:
        self.now += timedelta(minutes=1)
        put_in_force(self.store, PAIR.id, chosen, deployment="vllm")
        self.policy, self.drafted = chosen, chosen.gamma_max

    def bring_in(self, requests: Sequence[tuple[Trajectory, Sequence[Step]]]) -> None:
        """What is followed of requests, each of which ended with its last round."""
        at = [datetime.fromtimestamp(steps[-1].ended_s, UTC) for _, steps in requests]
        arrived = [Arrived("all", *r, moment) for r, moment in zip(requests, at, strict=True)]
        server = self.store.followed_server("b1")
        assert server is not None
        end = FilePlace(0, server.bytes + len(arrived))
        assert self.store.bring_in(server, end, Arrivals(arrived, {"all": ASKED}))
        self.store.hear("b1", "vllm", self.now)

    def serve(
        self, count: int, chance: float, category: str = "serve", step_s: float = 0.02
    ) -> None:
        """So many requests of 10 to 40 rounds, one in 5 seconds."""
        requests = []
        for _ in range(count):
            self.now += timedelta(seconds=5)
            steps = [*self._rounds(chance, step_s)]
            text = Trajectory("r", category, None, Sampling(), 400, "length")
            text.n_prompt, text.n_output = 5, sum(s.emitted for s in steps)
            requests.append((text, steps))
        self.bring_in(requests)

    def _rounds(self, chance: float, step_s: float) -> Iterator[Step]:
        start, drafted = 1, self.drafted
        at = self.now.timestamp() - 5
        for _ in range(int(self.rng.integers(10, 40))):
            kept = min(int(self.rng.geometric(1 - chance)) - 1, drafted)
            at += step_s * float(np.exp(0.05 * self.rng.standard_normal()))
            of: dict[str, Any] = {"draft": "small", "policy": self.policy.id, "round_s": step_s}
            yield chain_round(start, drafted, kept, kept + 1, ended_s=at, arrived_s=at, **of)
            start += kept + 1

    def watch(self) -> Watch:
        return Watch(self.store, self.told.append, lambda *_: self.gain)

    def look(self) -> tuple[Alarm, ...]:
        self.now += timedelta(minutes=10)
        return self.watch().look()

    def turn_to_prose(self) -> Alarm:
        """The alarm that code gives that turns into prose, as it is settled."""
        self.serve(400, CODE)
        assert self.look() == ()
        self.serve(200, PROSE)
        assert [a.what for a in self.look()] == ["acceptance"]
        (alarm, *_) = self.store.alarms("vllm")
        return alarm


@pytest.fixture
def served(store: TraceStore) -> Deployment:
    pytest.importorskip("river")
    return Deployment(store)


def add_schedule(served: Deployment, **settings: Any) -> None:
    of = {"deployment": "vllm", "since": "1h", **settings}
    schedule.add_schedule(served.store.database, "nightly", "@yearly", of)


def is_due(served: Deployment) -> bool:
    job = schedule.claim(served.store.database, "worker", lease_s=60)
    return job is not None and job.end("done")


def test_a_change_is_alarmed_about_once_and_makes_a_tuning_due(served: Deployment) -> None:
    add_schedule(served)
    alarm = served.turn_to_prose()
    assert (alarm.outcome, alarm.gain, alarm.schedule) == ("tuning due", 1.2, "nightly")
    assert alarm.before == pytest.approx(2.4, abs=0.2)
    assert alarm.after == pytest.approx(1.3, abs=0.2)
    assert alarm.evidence["drafted"] == 5
    assert is_due(served)
    served.serve(200, PROSE)
    assert served.look() == ()
    assert len(served.store.alarms()) == 1
    assert any("accepted tokens of serve at 5 drafted went from 2." in line for line in served.told)


def test_a_tuning_waits_for_the_changed_traffic_and_is_of_it_alone(served: Deployment) -> None:
    add_schedule(served)
    served.serve(400, CODE)
    assert served.look() == ()
    turned = served.now
    served.serve(80, 0.3)
    assert served.look()
    assert served.store.alarms()[0].outcome == "pending"
    assert not is_due(served)
    served.serve(80, 0.3)
    assert served.look() == ()
    assert served.store.alarms()[0].outcome == "tuning due"
    job = schedule.claim(served.store.database, "worker", lease_s=60)
    assert job is not None
    since = datetime.fromisoformat(job.settings["since"])
    assert turned <= since <= turned + timedelta(minutes=5)
    # Only this run is of the changed traffic.
    assert job.end("done")
    schedule.make_due(served.store.database, "nightly")
    job = schedule.claim(served.store.database, "worker", lease_s=60)
    assert job is not None
    assert job.settings["since"] == "1h"


def test_a_schedule_that_is_edited_forgets_since_when_it_was_to_tune(served: Deployment) -> None:
    add_schedule(served)
    served.turn_to_prose()
    settings = {"deployment": "vllm", "since": "2h"}
    schedule.edit_schedule(served.store.database, "nightly", "@yearly", settings, at_once=True)
    job = schedule.claim(served.store.database, "worker", lease_s=60)
    assert job is not None
    assert job.settings["since"] == "2h"


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_stationary_traffic_of_mixed_difficulty_gives_no_alarm(served: Deployment) -> None:
    for n in range(30):
        for category, chance in (("code", CODE), ("prose", PROSE), ("math", 0.7)):
            served.serve(25 + 5 * (n % 3), chance - 0.05 * (n % 2), category)
        assert served.look() == ()
    (seen,) = served.store.watched_deployments()
    assert seen.figures["requests"] == 30 * 3 * 30
    assert 0.9 < seen.figures["seconds"] < 1.1
    assert set(seen.figures["categories"]) == {"code", "prose", "math"}


def test_other_numbers_of_drafted_tokens_are_no_change(served: Deployment) -> None:
    """Rounds of 5 accept 2.4 tokens in the mean, which are a half; rounds of 1 three in four."""
    served.publish(policy("small", {"kind": "by_load", "gamma": {"1": 5, "4": 1}}))
    for drafted in (5, 1):
        served.drafted = drafted
        served.serve(400, CODE)
        assert served.look() == ()
    served.serve(200, PROSE)
    assert [(a.what, a.evidence["drafted"]) for a in served.look()] == [("acceptance", 1)]


def test_a_publication_begins_anew(served: Deployment) -> None:
    served.serve(400, CODE)
    assert served.look() == ()
    served.publish(ONE)
    served.serve(300, PROSE)
    assert served.look() == ()
    (seen,) = served.store.watched_deployments()
    assert seen.figures["requests"] == 300


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("what", ["mix", "seconds"])
def test_other_categories_and_slower_steps_are_changes(served: Deployment, what: str) -> None:
    found = list[str]()
    for n in range(100):
        turned = n >= 40
        if what == "mix":
            served.serve(10, CODE, "code" if n % 4 or turned else "chat")
            served.serve(10, CODE, "code" if not turned else "chat")
        else:
            served.serve(20, CODE, step_s=0.04 if turned else 0.02)
        served.now += timedelta(minutes=10 if what == "seconds" else 0)
        alarms = served.watch().look()
        assert turned or not alarms
        found += [a.what for a in alarms]
    assert set(found) == {what}


OUTCOMES = {
    "nothing to gain": Gain(1.02, "simulated"),
    "no schedule": Gain(1.5, "simulated"),
    "tuning due": Gain(None, "not simulated: no recording can be replayed"),
    "held back": Gain(1.5, "simulated"),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_what_comes_of_an_alarm(served: Deployment, outcome: str) -> None:
    served.gain = OUTCOMES[outcome]
    if outcome != "no schedule":
        add_schedule(served)
    if outcome == "held back":
        assert schedule.make_due(served.store.database, "nightly") is None
        assert schedule.claim(served.store.database, "worker", lease_s=600)
    alarm = served.turn_to_prose()
    assert (alarm.outcome, alarm.gain) == (outcome, served.gain.ratio)
    assert served.gain.why in alarm.why
    assert is_due(served) == (alarm.schedule is not None) == (outcome == "tuning due")


def test_at_most_one_tuning_is_due_in_six_hours(served: Deployment) -> None:
    add_schedule(served)
    assert served.turn_to_prose().schedule == "nightly"
    assert is_due(served)
    for chance in (CODE, PROSE):
        served.serve(400, chance)
        served.now += timedelta(hours=1)
        assert served.look()
        assert served.store.alarms(newest=1)[0].outcome == "held back"
        assert not is_due(served)
    served.now += timedelta(hours=6)
    assert served.look() == ()
    assert {alarm.outcome for alarm in served.store.alarms()} == {"tuning due"}
    assert is_due(served)
    assert not is_due(served)


def test_of_two_that_look_at_once_one_does(served: Deployment) -> None:
    add_schedule(served)
    served.serve(400, CODE)
    served.look()
    served.serve(200, PROSE)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: served.watch().look(), range(8))]
    assert len([a for alarms in found for a in alarms]) == 1
    (alarm,) = served.store.alarms()
    assert alarm.outcome == "tuning due"
    assert is_due(served)
    assert not is_due(served)


def test_one_that_dies_before_it_settles_an_alarm_leaves_it_to_another(served: Deployment) -> None:
    class Killed(BaseException):
        pass

    def die(*_: Any) -> Gain:
        raise Killed

    served.serve(400, CODE)
    served.look()
    served.serve(200, PROSE)
    with pytest.raises(Killed):
        Watch(served.store, ask=die).look()
    (alarm,) = served.store.alarms()
    assert alarm.outcome == "pending"
    assert served.look() == ()
    (alarm,) = served.store.alarms()
    assert alarm.outcome == "no schedule"


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_hostile_labels_are_harmless(served: Deployment) -> None:
    """Each request has another, or all the same."""
    for n in range(200):
        served.serve(1, CODE, f"{n}{'x' * 50_000}")
    served.serve(400, CODE, bad := "\x1b[31m<script>" + "x" * 50_000)
    served.look()
    served.serve(200, PROSE, bad)
    assert served.look()
    seen = served.store.begin_look(served.store.in_force()[0], "test", 0.0)
    assert seen is not None
    assert len(json.dumps([seen.state, seen.figures])) < 100_000
    for alarm in served.store.alarms():
        assert len(alarm.category or "") <= 100
    assert all(line.isprintable() and len(line) < 1000 for line in served.told)


def test_a_database_that_is_away_is_waited_for(
    served: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, calls = threading.Event(), list[bool]()
    in_force = TraceStore.in_force

    def away(store: TraceStore) -> Any:
        calls.append(True)
        if len(calls) < 3:
            raise UnavailableError("the database is away")
        return in_force(store)

    monkeypatch.setattr(TraceStore, "in_force", away)
    thread = threading.Thread(target=watch, args=(served.store, stop, print, 0.01))
    thread.start()
    eventually(lambda: served.store.watched_deployments())
    stop.set()
    thread.join()


def test_the_simulator_is_asked_about_the_last_hour(store: TraceStore, tmp_path: Path) -> None:
    """Where it is known what the draft proposes and what steps cost; else it says what is not."""
    later = datetime.fromtimestamp(BEGAN, UTC) + timedelta(minutes=30)
    store = replace(store, clock=lambda: later)
    store.put_pair(PAIR.id, PAIR.name, PAIR.to_json(), PAIR.models)
    agent, trace = Agent(tmp_path / "folder"), trace_of(40, budget=70)
    follower = Follower(store, agent.folder, "vllm", print, pair=PAIR)
    at = BEGAN + 900

    def served(gamma: int) -> None:
        found = simulated(trace, window(gamma), Load(4))
        agent.write_requests(recorded(trace, found, window(gamma), at), f"{gamma}-")
        follower.once()

    served(3)
    published, _ = put_in_force(store, PAIR.id, window(3), deployment="vllm"), follower.once()
    (p,), (info,) = store.in_force(), store.list_recordings()
    assert published == p.version
    clients = {"load": {"arrivals": "clients:4"}}
    no_proposals = what_if(store, p, info, clients)
    propose(store)
    store = replace(store, clock=lambda: later + timedelta(minutes=1))
    no_costs = what_if(store, p, info, clients)
    for gain, why in ((no_proposals, "; `retrace rec-"), (no_costs, "what steps cost")):
        assert gain.ratio is None
        assert why in gain.why
    for gamma in (0, 1, 6):
        at += 100
        served(gamma)
    propose(store)
    store = replace(store, clock=lambda: later + timedelta(minutes=2))
    for settings in ({}, clients):
        gain = what_if(store, p, info, settings)
        assert gain.ratio is not None, gain.why
        assert gain.ratio >= 1.0
        assert "times as fast" in gain.why


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_code_that_turns_into_prose_is_tuned_for(
    url: str, store: TraceStore, tmp_path: Path
) -> None:
    """Unattended: an alarm, what it would gain, a tuning, and a rollout of what is best there."""
    pytest.importorskip("river")
    served = Deployment(store, Agent(tmp_path / "folder").engine)
    door, now = Door(url, ""), datetime.now(UTC)
    door.json(
        "schedule add nightly", engine="vllm", rollout=True, since="1h", pair="demo",
        arrivals="clients:4", cron="@yearly", deployment="vllm",
    )  # fmt: skip

    def serve(agreement: float, gamma: int, minutes: int, policy_id: str = "") -> None:
        texts = [replace(t, category="serve") for t in trace_of(160, budget=70).trajectories]
        proposed = [a_panorama(t, "small", none=0.0, agreement=agreement) for t in texts]
        trace, began = ReplayTrace(texts, {"small": proposed}), now - timedelta(minutes=minutes)
        found = simulated(trace, window(gamma), Load(4))
        requests = recorded(trace, found, window(gamma), began.timestamp())
        served.bring_in([
            (r.trajectory, [s._replace(policy=policy_id) for s in r.steps]) for r in requests
        ])  # fmt: skip
        (info,) = (i for i in store.list_recordings() if i.source == "serve")
        lacking = store.missing_panoramas(info.id, "small", 16)
        for request in store.iterate(info.id, ordinals=lacking):
            panorama = a_panorama(request.trajectory, "small", none=0.0, agreement=agreement)
            store.put_panoramas(info.id, [(request.ordinal, panorama)])

    for gamma in (0, 1, 3):
        serve(0.9, gamma, 240)
    served.now = now - timedelta(minutes=130)
    served.publish(policy("small", 6))
    serve(0.9, 6, 120, served.policy.id)
    served.now = now
    assert Watch(served.store).look() == ()
    serve(0.2, 6, 30, served.policy.id)
    assert Watch(served.store).look()
    (alarm, *_) = store.alarms()
    assert alarm.outcome == "tuning due", alarm.why
    assert alarm.gain is not None
    assert alarm.gain > 1.03
    door.call("schedule run", once=True)
    (rollout,) = store.rollouts("vllm", is_open=True)
    assert rollout.incumbent == alarm.version
    # In force, it would leave a tuning nothing to gain.
    (info,) = (i for i in store.list_recordings() if i.source == "serve")
    served.publish(parse_policy(rollout.policy.document, where="it"))
    (p,) = store.in_force()
    gain = what_if(store, p, info, {"load": {"arrivals": "clients:4"}})
    assert gain.ratio is not None, gain.why
    assert gain.ratio < 1.03


def test_what_the_native_decoder_served_is_watched_too(store: TraceStore) -> None:
    pytest.importorskip("river")
    store.put_pair(PAIR.id, PAIR.name, PAIR.to_json(), PAIR.models)
    store.put_profile(flat_profile(PAIR.id, ["small"]))
    put_in_force(store, PAIR.id, window(3))
    about: dict[str, Any] = {"options": {"device": "cpu", "dtype": "float32"}, "source": "serve"}
    info = store.create_recording(Asked(PAIR.id, None, Sampling(), 64, **about))
    for n in range(40):
        steps, times = [], {"draft_s": 1e-3, "verify_s": 1e-3, "round_s": 2e-3, "ended_s": 1.0}
        for start in range(0, 60, 2):
            how = {"draft": "small", "policy": window(3).id, **times}
            steps.append(chain_round(start, 3, 1, 2, **how))  # type: ignore[arg-type]
        store.append_trajectory(info.id, n, a_trajectory(n), steps)
    assert Watch(store).look() == ()
    (seen,) = store.watched_deployments()
    assert (seen.figures["requests"], seen.figures["seconds"] > 0) == (40, True)
    ((p,), info) = store.in_force(), store.get_recording(info.id)
    assert "has no panorama of draft 'small'" in what_if(store, p, info, {}).why
    propose(store)
    gain = what_if(store, p, info, {})
    assert gain.ratio is not None, gain.why
    assert gain.ratio >= 1.0


def test_status_tells_of_alarms(served: Deployment, url: str) -> None:
    served.turn_to_prose()
    door = Door(url, "")
    (row,) = door.json("status")["deployments"]
    (alarm,) = row["alarms"]
    assert (alarm["what"], alarm["outcome"]) == ("acceptance", "no schedule")
    assert alarm["text"] in door.call("status").stdout.replace("\n", " ")
