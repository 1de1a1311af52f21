"""What a vLLM server's draft proposes, retraced over HTTP, tells every round that it serves."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from agent_stub import read
from databases import opened
from safetensors.torch import load_file
from waiting import eventually

from spectune.api import follow, retrace
from spectune.demo.prompts import demo_workload
from spectune.engines.engine import Wanted
from spectune.engines.vllm.command import speculative_config
from spectune.engines.vllm.server import OwnServer
from spectune.optimizer.replay.trace import simulate
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.store import TraceStore
from spectune.traces.tables import Panorama
from train_demo import mtp

MOST, TOKENS = 6, 20
PROMPTS = [line["turns"][0] for line in demo_workload()][::12][:4]
METHODS = {"draft_model": "small", "ngram": "ngram", "mtp": "mtp"}
SMALL = "--distributed-executor-backend uni --kv-cache-memory-bytes 268435456"
NONE = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0] * MOST}


@contextmanager
def serving(spec: PairSpec, method: str, **more: Any) -> Iterator[OwnServer]:
    """A server of one process, which drafts MOST tokens until it is told otherwise."""
    draft = METHODS[method]
    config = speculative_config(spec.drafts.get(draft), MOST, 8, method) | more
    del config["num_speculative_tokens_per_batch_size"]
    arguments = f"--speculative-config '{json.dumps(config)}' --enable-prefix-caching"
    about = {
        "SPECTUNE_VLLM_ARGS": f"{SMALL} {arguments}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in about.items():
            patch.setenv(name, value)
        server = OwnServer(spec, Wanted(draft, MOST, 8, 512))
    try:
        yield server
    finally:
        server.close()


def send(url: str, temperature: float = 0.0, clients: int = 4) -> None:
    def one(number: int) -> None:
        body = {"prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": temperature}
        body |= {"seed": number, "request_id": f"{number}"}
        data = json.dumps(body).encode()
        urlopen(Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})).read()

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(len(PROMPTS))))


def send_noted(server: OwnServer, **how: Any) -> list[dict[str, Any]]:
    """Sends the prompts; what the agent noted of them."""
    before = len(served_lines(server.folder))
    send(server.url, **how)
    eventually(lambda: len(served_lines(server.folder)) == before + len(PROMPTS))
    return served_lines(server.folder)[before:]


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
    noted = [read(text) for file in files for text in file.read_text().splitlines()]
    return [line for line in noted if "rounds" in line and "spectune-" not in line["id"]]


def followed(folder: Path, database: Path, temperature: float) -> str:
    """The recording of what was served at a temperature."""
    follow(folder, once=True, db=database)
    with opened(str(database)) as store:
        recordings = store.list_recordings()
        return next(r.id for r in recordings if r.sampling.temperature == temperature)


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


@torch.no_grad()
def check_layer(checkpoint: Path, of_texts: Mapping[tuple[int, ...], Panorama]) -> None:
    """What vLLM proposes first is what the MTP layer says as it is trained."""
    teacher, prefix = mtp.Teacher(read_pair("demo").target), "model.mtp_layers.0."
    layer, weights = mtp.MtpLayer(teacher.config), load_file(checkpoint / "model.safetensors")
    layer.load_state_dict({
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix) and not name.endswith(".bias")
    })  # fmt: skip
    for text, panorama in of_texts.items():
        ids = torch.tensor([text])
        (output,) = teacher.unroll(layer, ids, teacher.hidden(ids), 1)
        tokens = teacher.logits(output)[0].argmax(-1).tolist()
        first = panorama.trie.tokens[1:TOKENS, 0].tolist()
        assert first == tokens[-TOKENS:-1]


@pytest.mark.parametrize("method", METHODS)
def test_every_round_follows_from_what_was_retraced(method: str, tmp_path: Path) -> None:
    draft, spec, database = METHODS[method], read_pair("demo"), tmp_path / "db"
    if method == "mtp":
        target = mtp.checkpoint(tmp_path / "mtp", steps=10, rows=16)
        spec = PairSpec(target=str(target), methods=("mtp",))
    with serving(spec, method) as server:
        url, folder = server.url, server.folder
        where: dict[str, Any] = {"url": url, "folder": folder, "db": database}
        served = {MOST: send_noted(server)}
        greedy = followed(folder, database, 0.0)
        put(folder, 7, {"1": 1})
        beside = threading.Thread(target=send, args=(url,), kwargs={"clients": 1})
        beside.start()
        result = retrace(greedy, **where)
        beside.join()
        assert result.data["positions"] == len(PROMPTS) * (TOKENS - 1)
        eventually(lambda: len(served_lines(folder)) == 2 * len(PROMPTS))
        served[1] = served_lines(folder)[len(PROMPTS) :]
        put(folder, 8, {"1": 3})
        served[3] = send_noted(server, clients=3)
        with opened(str(database)) as store:
            count = sum(compare(store, greedy, draft, g, lines) for g, lines in served.items())
        sampled = send_noted(server, temperature=0.8)
        recording = followed(folder, database, 0.8)
        retrace(recording, **where)
        with opened(str(database)) as store:
            sampled_count = compare(store, recording, draft, 3, sampled)
        assert retrace(recording, **where).data["positions"] == 0
    print(f"{method}: {count} greedy rounds and {sampled_count} at temperature 0.8 as retraced")
    assert count > 60
    assert sampled_count > 20
    if method == "mtp":
        check_layer(target, panoramas(database, greedy, draft))
    if method == "draft_model":  # a server that accepts none of its drafts
        again, forced = tmp_path / "again", panoramas(database, greedy, draft)
        with serving(spec, method, **NONE) as server:
            send_noted(server)
            recording = followed(server.folder, again, 0.0)
            where = {"url": server.url, "folder": server.folder, "db": again}
            result = retrace(recording, **where)
        assert result.data["requests"] == result.data["texts"] == len(forced)
        assert panoramas(again, recording, draft) == forced
