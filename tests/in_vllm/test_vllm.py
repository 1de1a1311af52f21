"""The circle on a real vLLM: what it recorded says what it does under every other policy, and a policy comes into force while it serves."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from served import MOST, Engine, engine, eventually

from spectune.demo.prompts import demo_workload
from spectune.engines.vllm.tables import table_of
from spectune.optimizer.record import Look, look_around
from spectune.optimizer.simulate.replay_trace import Replay
from spectune.optimizer.simulate.trace import simulate
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.recording.chains import record_panorama
from spectune.traces.recording import RecordedRequest
from spectune.traces.schema import AGREE_YES
from spectune.traces.store import TraceStore

PROMPTS = [line["turns"][0] for line in demo_workload()][::4][:32]
SERVED: dict[str, list[list[int]]] = {}
WINDOWS = [{"kind": "fixed", "gamma": g} for g in (0, 1, 2, 3, 4, 5, 6, 7)] + [
    {"kind": "by_batch", "gamma": {"1": 8, "2": 5, "4": 3, "7": 1}},
    {"kind": "by_batch", "gamma": {"1": 4, "3": 0, "6": 2}},
]


@pytest.fixture(scope="module", params=["small", "medium"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Engine]]:
    with engine(tmp_path_factory.mktemp("vllm"), request.param) as found:
        yield request.param, found


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return load_pair(read_pair("demo"), device="cpu")


def capacities(pair: LoadedPair, request: RecordedRequest, draft: str) -> list[int]:
    """By output position how many of a long draft from there would be accepted; the first is the prefill's."""
    agree = record_panorama(pair, request.trajectory, draft, MOST).agree.tolist()
    found = [0] * (len(agree) + 1)
    for i in reversed(range(len(agree))):
        found[i] = found[i + 1] + 1 if agree[i] == AGREE_YES else 0
    return found


def check_rounds(request: RecordedRequest, capacity: list[int]) -> int:
    """Holds each round against what the draft alone says; how many there were. The last round of a text may draft and accept beyond it."""
    first, *rounds = request.steps
    assert (first.start, first.drafted, first.emitted) == (0, 0, 1)
    assert all(a.start + a.emitted == b.start for a, b in pairwise(request.steps))
    for step in rounds:
        left = len(request.trajectory.output_ids) - step.start
        expected = min(step.drafted, capacity[step.start])
        if step is rounds[-1]:
            assert min(step.accepted, left) == min(expected, left), (request.trajectory.request_id, step)
        else:
            assert step.accepted == expected, (request.trajectory.request_id, step)
    return len(rounds)


def test_a_text_and_its_drafts_predict_every_round_of_every_policy(served: tuple[str, Engine], pair: LoadedPair) -> None:
    draft, running = served
    # Every server serves the same texts, so a draft that one has never run is predicted from another's traffic.
    _, texts = running.run(PROMPTS, 8)
    assert texts == SERVED.setdefault("texts", texts)
    known: dict[tuple[int, ...], list[int]] = {}
    rounds = 0
    for window in WINDOWS:
        assert running.answered(running.publish(window, draft)) == ("applied", "")
        policy = parse_policy({"draft": draft, "window": window})
        table = table_of(policy, 1, draft=draft, most=MOST, max_num_seqs=8)
        for clients in (1, 8):
            prompts = PROMPTS if clients == 8 else PROMPTS[:8]
            name, found = running.run(prompts, clients)
            # The text never depends on the policy, nor on who else is served.
            assert found == texts[: len(prompts)]
            for request in running.recorded(name, len(prompts)).requests:
                key = tuple(request.trajectory.prompt_ids.tolist())
                if key not in known:
                    known[key] = capacities(pair, request, draft)
                rounds += check_rounds(request, known[key])
                # What is drafted in a step was decided in the one before, by the requests that it had.
                for before, step in pairwise(request.steps):
                    assert step.drafted == table.gammas[before.batch], (before, step)
    print(f"{draft}: {rounds} rounds")
    assert rounds > 2000
    look_around(running.store, pair, running.store.resolve_recording("latest"), Look((draft,), MOST))
    assert sum(replayed_alike(running.store, draft, g) for g in (1, 3, 7)) > 300


def replayed_alike(store: TraceStore, draft: str, gamma: int) -> int:
    """Replays the whole recording under a window, and holds the rounds of those requests that ran under it against that."""
    policy = parse_policy({"draft": draft, "window": {"kind": "fixed", "gamma": gamma}})
    found = simulate(store, "latest", policy, None, per_round=True).replay
    assert isinstance(found, Replay)
    count = 0
    for request, steps in zip(store.load("latest", steps=True).requests, found.steps(), strict=True):
        executed = request.steps[1:]
        if {s.policy for s in executed} == {policy.id}:
            assert [(s.start, s.accepted) for s in executed[:-1]] == [(s.start + 1, s.accepted) for s in steps[:-1]]
            assert len(executed) == len(steps)
            count += len(executed)
    return count


only_small = pytest.mark.parametrize("served", ["small"], indirect=True)


@only_small
def test_what_it_cannot_run_is_refused_and_the_last_policy_stays(served: tuple[str, Engine]) -> None:
    draft, running = served
    assert running.answered(running.publish({"kind": "fixed", "gamma": 2}, draft)) == ("applied", "")
    status, reason = running.answered(running.publish({"kind": "fsm"}, draft))
    assert status == "refused"
    assert "window of kind 'fsm'" in reason
    name, _ = running.run(PROMPTS[:4], 4)
    assert {s.drafted for r in running.recorded(name, 4).requests for s in r.steps} <= {0, 1, 2}


@only_small
def test_200_publications_while_8_clients_are_served_change_no_text(served: tuple[str, Engine]) -> None:
    draft, running = served
    _, expected = running.run(PROMPTS, 8)
    stop = threading.Event()
    published: list[int] = []

    def publish() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set() and len(published) < 200:
            published.append(running.publish({"kind": "fixed", "gamma": int(rng.integers(0, MOST + 1))}, draft))
            time.sleep(0.02)

    thread = threading.Thread(target=publish)
    thread.start()
    runs = 0
    while len(published) < 200:
        assert running.run(PROMPTS, 8)[1] == expected
        runs += 1
    stop.set()
    thread.join()
    assert runs > 1
    assert running.answered(published[-1]) == ("applied", "")
    assert len({a.version for a in running.store.acknowledgements()} & set(published)) > 1


@only_small
def test_a_database_that_is_locked_stops_no_request(served: tuple[str, Engine]) -> None:
    draft, running = served
    running.answered(running.publish({"kind": "fixed", "gamma": 3}, draft))
    _, expected = running.run(PROMPTS[:8], 8)
    lock = sqlite3.connect(running.store.database.name, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    try:
        name, found = running.run(PROMPTS[:8], 8)
        while time.monotonic() - began < 3.0:
            assert running.run(PROMPTS[:8], 8)[1] == expected
    finally:
        lock.execute("ROLLBACK")
        lock.close()
    assert found == expected
    eventually(lambda: len(running.recorded(name, 8).requests) == 8)

