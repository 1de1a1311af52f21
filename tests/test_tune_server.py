"""`tune --url`: a vLLM server that runs is recorded, raced on and put back, beside a server that
speaks HTTP and the agent's folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from databases import opened, put_in_force
from doors import Door, write_lines
from doubles import MOST, FakeVllm, served
from synthetic import policy
from trace_values import a_trajectory
from waiting import PATIENCE_S, eventually

from spectune.engines.vllm.follow import Follower
from spectune.engines.vllm.locks import FolderLock
from spectune.optimizer.replay.trace import simulate
from spectune.optimizer.tuning.server_bench import connect, put_published
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling
from spectune.traces.store import Asked

WORDS = ["def add(a, b):", "The quick brown fox", "Question: Ann has", "for i in range(10):"]
FEW, NO_PAGE = ("--trials", 12), ("--set", "report=none")


@pytest.fixture
def fake(tmp_path: Path, pair: LoadedPair) -> Iterator[FakeVllm]:
    with served(tmp_path / "folder", pair) as running:
        yield running


@pytest.fixture
def door(tmp_path: Path, tiny_pair: Path) -> Door:
    return Door(str(tmp_path / "traffic.db"), str(tiny_pair))


def tune_words(fake: FakeVllm, tmp_path: Path) -> tuple[object, ...]:
    file = tmp_path / "prompts.jsonl"
    write_lines(file, [{"prompt": f"{WORDS[n % 4]} {n}"} for n in range(24)])
    where = ("tune", "--url", fake.url, "--folder", fake.folder, "--workload", file)
    return *where, "--max-new-tokens", 8, "--budget", "1s", "--arrivals", "clients:1,2", *FEW


def test_a_server_that_runs_is_tuned(door: Door, fake: FakeVllm, tmp_path: Path) -> None:
    fake.pass_s = 6e-3  # so that the most tokens are too many
    told = door.json(*tune_words(fake, tmp_path))
    assert told["texts"]["differ"] == 0
    labels = {one["label"] for one in told["executed"]}
    assert {"autoregressive", f"near fixed(gamma={MOST})"} <= labels  # off, and the server's own
    assert [load["load"] for load in told["loads"]] == ["clients:1", "clients:2"]
    assert all(load["off"] is None for load in told["loads"])
    assert told["published"] is not None, told["reason"]
    version = told["published"]["version"]
    # While it searches, what the server drafts is its own again.
    noted = fake.taken[: [number for number, _ in fake.taken].index(0)]
    assert len(noted) > 3
    assert AUTOREGRESSIVE.id not in {name for _, name in noted}, "which is raced"
    assert (fake.version, fake.policy) == (version, told["winner"]["id"])
    assert Path(told["report"]).exists()
    with opened(door.db) as store:
        (answer,) = store.acknowledgements(version)
        assert answer.status == "applied"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_was_in_force_is_put_back(
    door: Door, fake: FakeVllm, pair: LoadedPair, tmp_path: Path, how: signal.Signals
) -> None:
    """After Ctrl-C by the tuning; of one that was killed by `follow`, which leaves one that runs
    alone."""
    policy = {"format": 1, "version": 3, "policy": "by hand", "gammas": {"1": 4, "3": 2}}
    (fake.folder / "policy.json").write_text(json.dumps(policy))
    process = door.start(*tune_words(fake, tmp_path))
    eventually(lambda: fake.version < 0)
    with opened(door.db) as store:
        follower = Follower(store, fake.folder, "vllm", print, pair=pair.spec)
        follower.once()
        document = json.loads((fake.folder / "policy.json").read_text())
        assert document.pop("trial")["version"] == fake.version
        assert document == policy
        process.send_signal(how)
        assert process.wait(PATIENCE_S) == (130 if how == signal.SIGINT else -how)
        if how == signal.SIGKILL:
            follower.once()
    eventually(lambda: fake.version == 3)
    assert json.loads((fake.folder / "policy.json").read_text()) == policy
    assert "Traceback" not in process.communicate()[1]


def test_a_server_is_tuned_by_one_at_a_time(door: Door, fake: FakeVllm, pair: LoadedPair) -> None:
    """Also while it tries nothing; what it publishes leaves whose texts are noted."""
    file, spec, two = fake.folder / "policy.json", pair.spec, policy("near", 2)
    with opened(door.db) as store:
        where = (store, fake.url, str(fake.folder), spec)
        with connect(*where) as server:
            server.put_in_force(policy("near", 1))
            server.close()
            with (
                pytest.raises(TraceError, match=r"is tuned through .*; end that `tune` first"),
                connect(*where),
            ):
                pass
            store.put_pair(spec.id, spec.name, spec.to_json(), spec.models)
            version = put_in_force(store, spec.id, two, deployment="vllm")
            theirs = {"version": version, "policy": "another's", "gammas": {"1": 1}}
            file.write_text(json.dumps({"format": 1, **theirs, "texts": "none"}))
            eventually(lambda: fake.policy == "another's")
            put_published(store, server, "vllm", print)
            assert (fake.version, fake.policy) == (version, two.id)
            assert json.loads(file.read_text())["texts"] == "none"
        with connect(*where) as server:
            assert server.policy == two


def test_followed_traffic_is_tuned_on_by_hand_and_when_it_is_due(
    door: Door, fake: FakeVllm, pair: LoadedPair, tiny_pair: Path
) -> None:
    """Arrivals as they were, and no request that a tuning sent is traffic."""
    fake.pass_s = 6e-3
    bodies = [{"prompt": [7 + n, 8, 9], "max_tokens": 12, "request_id": f"u{n}"} for n in range(24)]
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(fake.complete, bodies))
    server = ("--url", fake.url, "--folder", fake.folder, "--budget", "1s", *FEW)
    with opened(door.db) as store:
        follower = Follower(store, fake.folder, "vllm", print, pair=pair.spec)
        follower.once()
        (recording,) = store.list_recordings()
        told = door.json("tune", *server, *NO_PAGE, "--recording", recording.id, "--no-publish")
        assert [load["load"] for load in told["loads"]] == ["recorded"]
        assert told["texts"]["differ"] == 0
        assert fake.version == 0
        follower.once()
        assert store.get_recording(recording.id).n_requests == 24
        at = ("schedule", "add", "hourly", "--cron", "@hourly", "--now", "--since", "1h")
        door.json(*at, *server, "--pair", tiny_pair, "--arrivals", "clients:1,2")
        door.call("schedule", "run", "--once")
        (row,) = door.json("schedule", "list", "hourly")["schedules"]
        result = row["attempts"][0]["result"]
        assert result is not None, row["attempts"][0]["error"]
        version = result["published"]
        assert version, result["reason"]
        assert fake.version == version
        assert [answer.status for answer in store.acknowledgements(version)] == ["applied"]


def test_a_draft_that_only_vllm_has_is_asked_for_its_proposals(
    door: Door, pair: LoadedPair, tmp_path: Path
) -> None:
    with served(tmp_path / "folder", pair, method="mtp") as fake:
        told = Door(door.db).json(*tune_words(fake, tmp_path), *NO_PAGE, "--no-publish")
        assert told["texts"]["differ"] == 0
        labels = {one["label"] for one in told["executed"]}
        assert {"autoregressive", f"mtp fixed(gamma={MOST})"} <= labels
        assert fake.version == 0
    with opened(door.db) as store:
        replay = simulate(store, told["recording"], policy("mtp", MOST), None).replay
        requests = store.load(told["recording"], (), steps=True).requests
    # The first round is the prompt's, of which a replay knows nothing.
    assert replay.total.rounds == sum(len(request.steps) - 1 for request in requests) > 24


def test_what_is_wrong_is_one_line(
    door: Door, fake: FakeVllm, pair: LoadedPair, tmp_path: Path
) -> None:
    url, folder = ("--url", fake.url), ("--folder", fake.folder)
    words = ("--workload", tmp_path / "w.jsonl")
    for given, line in (
        (url, "--url and --folder go together"),
        (
            (*url, "--folder", tmp_path, *words),
            "no agent has written status.json there; start vLLM with",
        ),
        (("--url", "http://127.0.0.1:9", *folder, *words), "http://127.0.0.1:9: no server answers"),
        ((*url, *folder, *words, "--arrivals", "clients:many"), "is no number above 0"),
        ((*url, *folder, "--pair", "demo", *words), "but this server serves"),
        ((*url, *folder), "say which by --workload FILE, or take what it served by --recording"),
    ):
        assert line in door.refused("tune", *given)
    with opened(door.db) as store:
        spec, card = pair.spec, {"engine": "vllm", "device": "cuda", "hardware": "NVIDIA L4"}
        store.put_pair(spec.id, spec.name, spec.to_json(), spec.models)
        info = store.create_recording(Asked(spec.id, None, Sampling(), 64, options=card))
        store.append_trajectory(info.id, 0, a_trajectory(0))
    line = door.error("tune", *url, *folder, "--recording", info.id)
    assert f"{info.id} was served on cuda:NVIDIA L4, and this server runs on cpu" in line
    assert "nothing was recorded" in door.error("tune", *url, *folder, "--since", "1h")
    lock = FolderLock(fake.folder, "follow", "followed into other.db")
    lock.name_database("of another")
    refused = door.refused("tune", *url, *folder, *words)
    assert f"{fake.folder} is followed into other.db already (process " in refused
    assert "; tune into that database (--db), not " in refused
    lock.release()
    with served(tmp_path / "other", pair, None) as plain:
        where = ("--url", plain.url, "--folder", plain.folder, *words)
        assert "drafts nothing; start it with --speculative-config" in door.refused("tune", *where)
