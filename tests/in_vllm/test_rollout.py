"""Rollouts on a real vLLM server amid traffic that does not stop: one promotes a policy that is
faster there, one ends a slower one; no request fails, and no text depends on whose turn it is."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from databases import opened, put_in_force
from doors import Door
from synthetic import policy
from waiting import PATIENCE_S, eventually

from spectune.demo.prompts import demo_workload
from spectune.engines.engine import Answered, Load, Prompt, Wanted
from spectune.engines.vllm.folder import (
    NotedRequest,
    Tried,
    parse_line,
    read_policy,
    read_status,
    rounds_files,
)
from spectune.engines.vllm.follow import Follower
from spectune.engines.vllm.running import RunningServer
from spectune.engines.vllm.server import OwnServer
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import Policy
from spectune.runtime.text_codec import load_codec
from spectune.traces.errors import EngineError
from spectune.traces.schema import Sampling

CLIENTS, TOKENS = 4, 32
PAIR = read_pair("demo")
TRIED = [
    *(policy("small", gamma) for gamma in (24, 2)),
    policy("small", {"kind": "by_load", "gamma": {"1": 0}}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[OwnServer]:
    running = OwnServer(PAIR, Wanted("small", 24, 8, 400))
    yield running
    running.close()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    codec, texts = load_codec(PAIR), [line["turns"][0] for line in demo_workload()][:16]
    return [Prompt(f"p{n}", "demo", tuple(codec.encode(text))) for n, text in enumerate(texts)]


class Traffic:
    """Clients that send prompts without a pause; ``texts``: each text that a prompt had."""

    def __init__(self, server: RunningServer, prompts: list[Prompt]) -> None:
        self.server, self.prompts = server, prompts
        self.texts: dict[int, set[tuple[int, ...]]] = {n: set() for n in range(len(prompts))}
        self.failures: list[str] = []
        self.over = threading.Event()

    def _send(self, first: int) -> None:
        number = first
        while not self.over.is_set():
            request = {"prompt": list(self.prompts[number].ids), "max_tokens": TOKENS}
            try:
                text = self.server.complete(**request, temperature=0)
                self.texts[number].add(tuple(text))
            except EngineError as error:
                self.failures.append(str(error))
            number = (number + CLIENTS) % len(self.prompts)

    @contextmanager
    def flowing(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._send, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in threads:
                thread.join()


def seconds_per_token(answers: list[Answered]) -> float:
    steps = [step for answer in answers for step in answer.steps if not step.reads_prompt]
    return sum(step.round_s for step in steps) / sum(step.emitted for step in steps)


def slower_and_faster(server: OwnServer, prompts: list[Prompt]) -> tuple[Policy, Policy]:
    """The slowest and the fastest of some numbers of draft tokens on this machine."""
    speeds = {}
    for chosen in TRIED:
        how = {"sampling": Sampling(), "max_new_tokens": TOKENS}
        answers = [list(server.execute(prompts, chosen, Load(CLIENTS), **how)) for _ in range(2)]
        speeds[seconds_per_token(answers[-1])] = chosen
    print({chosen.label(): f"{1e3 * s:.2f} ms a token" for s, chosen in speeds.items()})
    RunningServer.close(server)  # what was tried ends; it goes on
    return speeds[max(speeds)], speeds[min(speeds)]


def test_a_faster_policy_is_promoted_and_a_slower_one_ended(
    server: OwnServer, prompts: list[Prompt], tmp_path: Path
) -> None:
    slow, fast = slower_and_faster(server, prompts)
    door, told, stop = Door(str(tmp_path / "traffic.db")), list[str](), threading.Event()
    traffic = Traffic(server, prompts)
    with opened(str(door.db)) as store:
        store.put_pair(PAIR.id, PAIR.name, PAIR.to_json(), PAIR.models)
        first = put_in_force(store, PAIR.id, slow, deployment="vllm")
        follower = Follower(store, server.folder, "vllm", told.append, pair=PAIR)
        thread = threading.Thread(target=follower.run, args=(stop,))
        thread.start()
        try:
            with traffic.flowing():
                eventually(lambda: follower.policy.is_in_force and store.followed_servers())
                how = ("--pair", "demo", "--device", "cpu", "--deployment", "vllm")
                how += ("--set", "block=3s", "--json")
                up = door.call("policies rollout", json.dumps(fast.spelled_out()), *how)
                print(up.stdout, up.stderr)
                promoted = store.active_publication(PAIR.id, "cpu", "vllm")
                assert promoted is not None
                assert (up.exit_code, promoted.policy_id) == (0, fast.id)
                assert promoted.supersedes == first
                eventually(lambda: follower.policy.is_in_force)
                down = door.call("policies rollout", json.dumps(slow.spelled_out()), *how)
                print(down.stdout, down.stderr)
                assert down.exit_code == 1
                assert store.rollouts("vllm")[0].verdict in ("reverted", "inconclusive")
                assert store.active_version(PAIR.id, "cpu", "vllm") == promoted.version
                eventually(lambda: "trial" not in read_policy(server.folder))
        finally:
            stop.set()
            thread.join()
        verdicts = [rollout.verdict for rollout in store.rollouts("vllm")]
        steps = [
            s
            for info in store.list_recordings()
            for r in store.iterate(info.id, steps=True)
            for s in r.steps
        ]
    status = read_status(server.folder)
    assert status is not None
    assert status.in_force.version == promoted.version
    assert traffic.failures == []
    assert all(len(texts) == 1 for texts in traffic.texts.values()), "a text depends on the policy"
    assert {step.policy for step in steps} >= {slow.id, fast.id}
    assert verdicts == ["reverted", "promoted"]


def test_no_trial_outlives_who_conducts_and_who_follows(
    server: OwnServer, prompts: list[Prompt], tmp_path: Path
) -> None:
    """Both are killed; what they wrote stays in the folder, and nobody renews it."""
    (server.folder / "policy.json").unlink(missing_ok=True)
    door = Door(str(tmp_path / "killed.db"))
    follow = door.start("follow", server.folder, "--pair", "demo")
    how = ("--pair", "demo", "--device", "cpu", "--deployment", "vllm", "--set", "block=3s")

    def is_followed() -> bool:
        found = door.call("status", json=True)
        return found.exit_code == 0 and bool(json.loads(found.stdout)["deployments"])

    eventually(is_followed)
    worker = door.start("policies", "rollout", json.dumps(TRIED[1].spelled_out()), *how)

    def tried() -> Tried | None:
        status = read_status(server.folder)
        return None if status is None else status.trial

    eventually(lambda: (found := tried()) is not None and found.version == -1)
    for process in (worker, follow):
        process.kill()
        process.wait(PATIENCE_S)
    eventually(lambda: (found := tried()) is not None and found.is_over)
    assert read_policy(server.folder)["trial"]["version"] == -1
    noted = len(rounds_versions(server.folder))
    for prompt in prompts[:4]:
        server.complete(prompt=list(prompt.ids), max_tokens=TOKENS, temperature=0)
    eventually(lambda: len(rounds_versions(server.folder)) >= noted + 4)
    assert set().union(*rounds_versions(server.folder)[-4:]) == {0}


def rounds_versions(folder: Path) -> list[set[int]]:
    """Of each request that the agent noted the versions that drafted it, by when they ended."""
    files = [path for numbers in rounds_files(folder).values() for path in numbers.values()]
    parsed = (parse_line(text) for path in files for text in path.read_bytes().splitlines())
    noted = sorted(
        (line for line in parsed if isinstance(line, NotedRequest)), key=lambda line: line.ended
    )
    return [{r.version for r in line.rounds} for line in noted]
