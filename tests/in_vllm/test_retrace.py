"""What a vLLM server's draft proposes, retraced over HTTP, tells every round that it serves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from databases import opened
from waiting import eventually

from spectune.api import follow, retrace
from spectune.demo.prompts import demo_workload
from spectune.engines.vllm.command import speculative_config
from spectune.optimizer.simulate.trace import simulate
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.store import TraceStore
from spectune.traces.tables import Panorama, Recording

MOST, TOKENS = 6, 20
PROMPTS = [line["turns"][0] for line in demo_workload()][::12][:4]


@contextmanager
def serving(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """A vLLM server of the demo target whose agent writes into a folder; its URL."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        *("--model", read_pair("demo").target, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "8", "--generation-config", "vllm"),
        *("--scheduler-cls", "spectune.engines.vllm.agent.Scheduler"),
        *("--speculative-config", json.dumps(config), "--host", "127.0.0.1", "--port", str(port)),
    ]
    about = {"SPECTUNE_FOLDER": str(folder), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    url, log = f"http://127.0.0.1:{port}", folder.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env={**os.environ, **about}, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        with suppress(OSError):
            return urlopen(f"{url}/health", timeout=5).status == 200
        return False

    try:
        eventually(answers, within_s=300)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def send(url: str, temperature: float = 0.0, clients: int = 4) -> None:
    def one(number: int) -> None:
        body = {"prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": temperature}
        body |= {"seed": number, "request_id": f"{number}"}
        data = json.dumps(body).encode()
        urlopen(Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})).read()

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(len(PROMPTS))))


def send_noted(url: str, folder: Path, **how: Any) -> list[dict[str, Any]]:
    """Sends the prompts; what the agent noted of them."""
    before = len(served_lines(folder))
    send(url, **how)
    eventually(lambda: len(served_lines(folder)) == before + len(PROMPTS))
    return served_lines(folder)[before:]


def put(folder: Path, version: int, gammas: dict[str, int]) -> None:
    document = {"format": 1, "version": version, "policy": "p", "gammas": gammas}
    (folder / "new").write_text(json.dumps(document))
    os.replace(folder / "new", folder / "policy.json")
    eventually(lambda: status(folder)["in_force"]["version"] == version)


def status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


def served_lines(folder: Path) -> list[dict[str, Any]]:
    """What the agent noted of our prompts."""
    files = sorted(folder.glob("rounds-*.jsonl"))
    noted = [json.loads(text) for file in files for text in file.read_text().splitlines()]
    return [line for line in noted if "rounds" in line and "spectune-" not in line["id"]]


def followed(folder: Path, database: Path, temperature: float) -> str:
    """The recording of what was served at a temperature."""
    follow(folder, once=True, db=database)
    with opened(str(database)) as store:
        return next(r.id for r in store.list_recordings() if is_at(r, temperature))


def is_at(recording: Recording, temperature: float) -> bool:
    return bool(recording.sampling.temperature == temperature)


def compare(
    store: TraceStore, recording: str, draft: str, gamma: int, served: list[dict[str, Any]]
) -> int:
    """Rounds served with ``gamma`` tokens that are those of the replay; each must be."""
    policy = parse_policy({"draft": draft, "window": {"kind": "fixed", "gamma": gamma}})
    texts = store.load(recording, ()).trajectories
    replay = simulate(store, recording, policy, None, per_round=True).replay
    replayed = {
        (tuple(text.prompt_ids.tolist()), tuple(text.output_ids.tolist())): steps
        for text, steps in zip(texts, replay.steps(), strict=True)
    }
    count = 0
    for line in served:
        # replay counts from the prefill's token on, and clips what the last round accepts
        steps = replayed[tuple(line["prompt"]), tuple(line["output"])]
        executed = [(r[0] - 1, r[1], r[2]) for r in line["rounds"][1:]]
        assert executed[:-1] == [(s.start, s.drafted, s.accepted) for s in steps][:-1]
        assert executed[-1][:2] == (steps[-1].start, steps[-1].drafted)
        count += len(executed)
    return count


def panoramas(database: Path, recording: str, draft: str) -> dict[tuple[int, ...], Panorama]:
    """Panoramas by their texts' tokens."""
    with opened(str(database)) as store:
        requests = store.load(recording, [draft]).requests
    return {
        (*r.trajectory.prompt_ids.tolist(), *r.trajectory.output_ids.tolist()): r.panoramas[draft]
        for r in requests
        if draft in r.panoramas
    }


METHODS = {"draft_model": ("small", "small"), "ngram": ("", "ngram"), "eagle3": ("head", "head")}


@pytest.mark.parametrize("method", METHODS)
def test_every_round_follows_from_what_was_retraced(method: str, tmp_path: Path) -> None:
    checkpoint, draft = METHODS[method]
    path = read_pair("demo").drafts.get(checkpoint)
    config = {**speculative_config(path, MOST, 8)}
    del config["num_speculative_tokens_per_batch_size"]
    assert config["method"] == method
    folder, database = tmp_path / "folder", tmp_path / "db"
    count = 0
    with serving(folder, config) as url:
        send_noted(url, folder)
        greedy = followed(folder, database, 0.0)
        put(folder, -1, {"1": 1})
        beside = threading.Thread(target=send, args=(url,), kwargs={"clients": 1})
        beside.start()
        result = retrace(greedy, url=url, folder=folder, db=database)
        beside.join()
        assert result.data["positions"] == len(PROMPTS) * (TOKENS - 1)
        eventually(lambda: len(served_lines(folder)) == 2 * len(PROMPTS))
        with opened(str(database)) as store:
            served = served_lines(folder)
            count += compare(store, greedy, draft, MOST, served[: len(PROMPTS)])
            count += compare(store, greedy, draft, 1, served[len(PROMPTS) :])
            for gamma in (2, 3, 4):
                put(folder, -gamma, {"1": gamma})
                served = send_noted(url, folder, clients=1 + gamma % 3)
                count += compare(store, greedy, draft, gamma, served)
        served = send_noted(url, folder, temperature=0.8)
        sampled = followed(folder, database, 0.8)  # which ends the table that was put
        retrace(sampled, url=url, folder=folder, db=database)
        with opened(str(database)) as store:
            sampled_count = compare(store, sampled, draft, 4, served)
            assert retrace(sampled, url=url, folder=folder, db=database).data["positions"] == 0
        if method == "draft_model":
            forced = panoramas(database, greedy, draft)
    if method == "draft_model":  # a server that accepts none of its drafts
        zero = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0] * MOST}
        again = tmp_path / "again"
        recording = followed(folder, again, 0.0)
        with serving(tmp_path / "zero", {**config, **zero}) as url:
            result = retrace(recording, url=url, folder=tmp_path / "zero", db=again)
        assert result.data["requests"] == result.data["texts"] > len(forced)
        assert panoramas(again, recording, draft) == forced
    print(f"{method}: {count} greedy rounds and {sampled_count} at temperature 0.8 as retraced")
    assert count > 100
    assert sampled_count > 20
