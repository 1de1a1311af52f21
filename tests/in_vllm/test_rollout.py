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
from pairs import tiny_model
from synthetic import policy
from transformers import AutoTokenizer
from waiting import PATIENCE_S, eventually

from spectune.demo.prompts import demo_workload
from spectune.engines.engine import Wanted
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
from spectune.runtime.text_codec import load_codec
from spectune.traces.errors import EngineError

CLIENTS, TOKENS = 4, 32
FAST, SLOW = policy("heavy", {"kind": "by_load", "gamma": {"1": 0}}), policy("heavy", 8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair's target with a draft that costs more than it and agrees with nothing: to draft
    is slower however busy the machine is."""
    folder, target = tmp_path_factory.mktemp("pair"), read_pair("demo").target
    words = AutoTokenizer.from_pretrained(target)
    tiny_model("llama", len(words), hidden=512, layers=8).save_pretrained(folder / "heavy")
    words.save_pretrained(folder / "heavy")
    document = {"name": "heavy", "target": target, "drafts": {"heavy": "heavy"}}
    (folder / "pair.json").write_text(json.dumps(document))
    return folder / "pair.json"


@pytest.fixture(scope="module")
def server(pair: Path) -> Iterator[OwnServer]:
    running = OwnServer(read_pair(str(pair)), Wanted("heavy", 8, 8, 400))
    yield running
    running.close()


@pytest.fixture(scope="module")
def prompts(pair: Path) -> list[list[int]]:
    codec = load_codec(read_pair(str(pair)))
    return [codec.encode(line["turns"][0]) for line in demo_workload()[:16]]


class Traffic:
    """Clients that send prompts without a pause; ``texts``: each text that a prompt had."""

    def __init__(self, server: RunningServer, prompts: list[list[int]]) -> None:
        self.server, self.prompts = server, prompts
        self.texts: dict[int, set[tuple[int, ...]]] = {n: set() for n in range(len(prompts))}
        self.failures: list[str] = []
        self.over = threading.Event()

    def _send(self, first: int) -> None:
        number = first
        while not self.over.is_set():
            request = {"prompt": self.prompts[number], "max_tokens": TOKENS}
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


def test_a_faster_policy_is_promoted_and_a_slower_one_ended(
    pair: Path, server: OwnServer, prompts: list[list[int]], tmp_path: Path
) -> None:
    spec = read_pair(str(pair))
    door, told, stop = Door(str(tmp_path / "traffic.db")), list[str](), threading.Event()
    traffic = Traffic(server, prompts)
    with opened(str(door.db)) as store:
        store.put_pair(spec.id, spec.name, spec.to_json(), spec.models)
        first = put_in_force(store, spec.id, SLOW, deployment="vllm")
        follower = Follower(store, server.folder, "vllm", told.append, pair=spec)
        thread = threading.Thread(target=follower.run, args=(stop,))
        thread.start()
        try:
            with traffic.flowing():
                eventually(lambda: follower.policy.is_in_force and store.followed_servers())
                how = ("--pair", pair, "--device", "cpu", "--deployment", "vllm")
                how += ("--set", "block=3s", "--json")
                up = door.call("policies rollout", json.dumps(FAST.spelled_out()), *how)
                print(up.stdout, up.stderr)
                promoted = store.active_publication(spec.id, "cpu", "vllm")
                assert promoted is not None
                assert (up.exit_code, promoted.policy_id) == (0, FAST.id)
                assert promoted.supersedes == first
                eventually(lambda: follower.policy.is_in_force)
                down = door.call("policies rollout", json.dumps(SLOW.spelled_out()), *how)
                print(down.stdout, down.stderr)
                assert down.exit_code == 1
                assert store.rollouts("vllm")[0].verdict in ("reverted", "inconclusive")
                assert store.active_version(spec.id, "cpu", "vllm") == promoted.version
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
    assert {step.policy for step in steps} >= {SLOW.id, FAST.id}
    assert verdicts == ["reverted", "promoted"]


def test_no_trial_outlives_who_conducts_and_who_follows(
    pair: Path, server: OwnServer, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Both are killed; what they wrote stays in the folder, and nobody renews it."""
    (server.folder / "policy.json").unlink(missing_ok=True)
    door = Door(str(tmp_path / "killed.db"))
    follow = door.start("follow", server.folder, "--pair", pair)
    how = ("--pair", pair, "--device", "cpu", "--deployment", "vllm", "--set", "block=3s")

    def is_followed() -> bool:
        found = door.call("status", json=True)
        return found.exit_code == 0 and bool(json.loads(found.stdout)["deployments"])

    eventually(is_followed)
    worker = door.start("policies", "rollout", json.dumps(SLOW.spelled_out()), *how)

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
        server.complete(prompt=prompt, max_tokens=TOKENS, temperature=0)
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
