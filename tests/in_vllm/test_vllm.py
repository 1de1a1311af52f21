"""The circle on a real vLLM: what it recorded says what it does under every other policy, and a
policy comes into force while it serves."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from served import MOST, Engine, engine
from vllm.v1.spec_decode.ngram_proposer import (
    _find_longest_matched_ngram_and_propose_tokens as vllm_lookup,
)

from spectune.demo.prompts import demo_workload
from spectune.engines.abilities import VLLM
from spectune.engines.vllm.command import initial_config
from spectune.engines.vllm.prompt_lookup import LEAST
from spectune.engines.vllm.prompt_lookup import MOST as LONGEST
from spectune.engines.vllm.scheduler import Scheduler, _Served
from spectune.optimizer.record import PanoramaSpec, record_panoramas
from spectune.optimizer.simulate.replay_trace import Replay
from spectune.optimizer.simulate.trace import simulate
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.errors import PairError
from spectune.traces.recording import RecordedRequest
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore
from spectune.traces.tables import Panorama, Trajectory

PROMPTS = [line["turns"][0] for line in demo_workload()][::4][:32]
SERVED: dict[str, list[list[int]]] = {}
WINDOWS = [{"kind": "fixed", "gamma": g} for g in (1, 4, 2, 3, 5, 7)] + [
    {"kind": "by_batch", "gamma": {"1": 8, "2": 5, "4": 3, "7": 1}},
    {"kind": "by_batch", "gamma": {"1": 6, "3": 0, "6": 2}},
]
ENDLESS = 64


@pytest.fixture(scope="module", params=["small", "medium", "head", "ngram"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Engine]]:
    with engine(tmp_path_factory.mktemp("vllm"), request.param) as found:
        yield request.param, found


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return load_pair(read_pair("demo"), device="cpu")


@dataclass(frozen=True)
class Ahead:
    """From an output position on: how many tokens the draft proposes at most, and how many of them
    the text goes on with."""

    length: int
    accepted: int


def ahead(pair: LoadedPair, trajectory: Trajectory, draft: str) -> list[Ahead]:
    """By output position; found by the draft alone over the text."""
    places = range(len(trajectory.output_ids))
    if draft == "ngram":
        return [_copied(trajectory, at) for at in places]
    if draft == "head":
        grown = record_panorama(pair, trajectory, draft, MOST)
        return [Ahead(ENDLESS, _grown(grown, at)) for at in places]
    slots = record_panorama(pair, trajectory, draft, MOST).trie.text_slot.tolist()[: len(places)]
    return [Ahead(ENDLESS, [*(s == 0 for s in slots[at:]), False].index(False)) for at in places]


def _copied(trajectory: Trajectory, at: int) -> Ahead:
    output = trajectory.output_ids.tolist()
    known = np.array([*trajectory.prompt_ids.tolist(), *output[:at]], dtype=np.int32)
    found = vllm_lookup(known, LEAST, LONGEST, 4096, MOST).tolist()
    same = [a == b for a, b in zip(found, output[at:], strict=False)]
    return Ahead(len(found), [*same, False].index(False))


def _grown(grown: Panorama, at: int) -> int:
    child = {int(p): grown.positions + 1 + i for i, p in enumerate(grown.trie.parent)}
    node, found = at, 0
    while node >= 0 and grown.trie.text_slot[node] == 0:
        node, found = child.get(node, -1), found + 1
    return found


def check_rounds(request: RecordedRequest, known: list[Ahead], gammas: tuple[int, ...]) -> int:
    """Holds each round against what the draft alone says; how many there were.

    What a step drafts was decided in the one before, by the requests that it had. The last round of
    a text may draft and accept beyond it: its end is reached or not.
    """
    first, *rounds = request.steps
    assert (first.start, first.drafted, first.emitted) == (0, 0, 1)
    for before, step in pairwise(request.steps):
        where, there = (request.trajectory.request_id, before, step), known[step.start]
        left = len(request.trajectory.output_ids) - step.start
        assert before.start + before.emitted == step.start
        assert step.drafted == min(gammas[before.batch], there.length), where
        expected = min(step.drafted, there.accepted)
        within = left - 1 if step is rounds[-1] else ENDLESS
        assert min(step.accepted, within) == min(expected, within), where
    return len(rounds)


def test_a_text_and_its_drafts_predict_every_round_of_every_policy(
    served: tuple[str, Engine], pair: LoadedPair
) -> None:
    draft, running = served
    # Every server serves the same texts, so a draft that one has never run is predicted from
    # another's traffic.
    name, texts = running.run(PROMPTS, 8)
    assert texts == SERVED.setdefault("texts", texts)
    first = [request.trajectory for request in running.recorded(name, len(PROMPTS)).requests]
    known = {tuple(t.prompt_ids.tolist()): ahead(pair, t, draft) for t in first}
    rounds = 0
    for n, window in enumerate(WINDOWS if draft != "medium" else [*WINDOWS[:2], WINDOWS[6]]):
        policy = parse_policy({"draft": draft, "window": window})
        gammas = VLLM.gammas(policy, draft=draft, most=MOST, max_num_seqs=8)
        assert running.answered(running.publish(window, draft)) == ("applied", "")
        for clients in (1, 8):
            name, found = running.run(PROMPTS, clients)
            # The text never depends on the policy, nor on who else is served.
            assert found == texts
            for request in running.recorded(name, len(PROMPTS)).requests:
                ids = tuple(request.trajectory.prompt_ids.tolist())
                rounds += check_rounds(request, known[ids], gammas)
        if n == 1:  # before the same texts are recorded once more
            latest = running.store.resolve_recording("latest")
            record_panoramas(running.store, pair, latest, PanoramaSpec((draft,), MOST))
            assert sum(replayed_alike(running.store, draft, g) for g in (1, 4)) > 300
    print(f"{draft}: {rounds} rounds")
    assert rounds > 900


@pytest.mark.parametrize("served", ["small", "head", "ngram"], indirect=True)
def test_above_temperature_0_a_token_is_kept_iff_it_is_the_drafts_likeliest(
    served: tuple[str, Engine], pair: LoadedPair
) -> None:
    draft, running = served
    window = {"kind": "fixed", "gamma": 4}
    policy = parse_policy({"draft": draft, "window": window})
    gammas = VLLM.gammas(policy, draft=draft, most=MOST, max_num_seqs=8)
    assert running.answered(running.publish(window, draft)) == ("applied", "")
    name, _ = running.run(PROMPTS, 8, temperature=0.8, top_p=0.9)
    requests = running.recorded(name, len(PROMPTS)).requests
    how = {(r.trajectory.sampling, r.trajectory.verifier) for r in requests}
    assert how == {(Sampling(0.8, 0, 0.9), "greedy")}
    rounds = sum(check_rounds(r, ahead(pair, r.trajectory, draft), gammas) for r in requests)
    assert rounds > 100
    assert sum(s.accepted for r in requests for s in r.steps) > 20


def replayed_alike(store: TraceStore, draft: str, gamma: int) -> int:
    """Replays the whole recording under a window, and holds the rounds of those requests that ran
    under it against that."""
    policy = parse_policy({"draft": draft, "window": {"kind": "fixed", "gamma": gamma}})
    found = simulate(store, "latest", policy, None, per_round=True).replay
    assert isinstance(found, Replay)
    count, kept = 0, store.load("latest", steps=True).requests
    for request, steps in zip(kept, found.steps(), strict=True):
        executed = request.steps[1:]
        if {s.policy for s in executed} == {policy.id}:
            # The first token is the prefill's: replay counts from the second on.
            rounds = [(s.start - 1, s.drafted, s.accepted) for s in executed[:-1]]
            assert rounds == [(s.start, s.drafted, s.accepted) for s in steps[:-1]]
            last = executed[-1].start - 1, executed[-1].drafted
            assert last == (steps[-1].start, steps[-1].drafted)
            count += len(executed)
    return count


only_small = pytest.mark.parametrize("served", ["small"], indirect=True)


@only_small
def test_200_publications_while_8_clients_are_served_change_no_text(
    served: tuple[str, Engine],
) -> None:
    draft, running = served
    _, expected = running.run(PROMPTS, 8)
    stop = threading.Event()
    published: list[int] = []

    def publish() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set() and len(published) < 200:
            gamma = int(rng.integers(0, MOST + 1))
            published.append(running.publish({"kind": "fixed", "gamma": gamma}, draft))
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


def test_a_server_of_a_printed_command_starts_at_its_number_and_takes_a_policy(
    tmp_path: Path,
) -> None:
    config = initial_config(dict(read_pair("demo").drafts)["small"], 4, 4)
    with engine(tmp_path, "small", config) as running:
        name, texts = running.run(PROMPTS[:8], 4)
        assert drafted(running, name) == {4}
        window = {"kind": "by_batch", "gamma": {"1": 3, "2": 1}}
        assert running.answered(running.publish(window, "small")) == ("applied", "")
        name, same = running.run(PROMPTS[:8], 4)
        assert same == texts
        assert drafted(running, name) == {1, 3}
        status, reason = running.answered(running.publish({"kind": "fixed", "gamma": 5}, "small"))
        assert (status, "at most 4 tokens, not 5" in reason) == ("refused", True)


def drafted(running: Engine, name: str) -> set[int]:
    """How many tokens the rounds of a run drafted, the prompts' left out."""
    found = running.recorded(name, 8).requests
    return {step.drafted for request in found for step in request.steps[1:]}


def test_drafts_that_no_pair_names_are_not_recorded() -> None:
    config = SimpleNamespace(method="mtp", model="target")
    made = Scheduler.__new__(Scheduler)
    made.vllm_config = SimpleNamespace(
        speculative_config=config, model_config=SimpleNamespace(model="target")
    )
    with pytest.raises(PairError, match="drafts by 'mtp', which cannot be replayed"):
        made._pair()


def test_what_goes_wrong_while_rounds_are_noted_stops_no_server() -> None:
    made = Scheduler.__new__(Scheduler)
    made._failed, made._decoding = set(), {"r": _Served()}
    with made._guarded():
        raise AttributeError("a vLLM that changed")
    assert made._failed == {AttributeError}
    assert not made._decoding


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
    assert running.recorded(name, 8).requests
