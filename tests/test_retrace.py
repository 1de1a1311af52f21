"""`retrace` against a server that answers as vLLM does and notes as its agent does."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from databases import opened
from doors import Door
from token_ids import encoded

from spectune import api
from spectune.engines.vllm import retrace as module
from spectune.optimizer.replay.trace import simulate
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.errors import EngineError

MOST, LENGTH, TEXTS = 5, 24, 3
WORD = "retrace 0123abcd"
ENGINE = {
    "engine": "vllm", "engine_version": "0.32.0", "device": "cpu", "dtype": "float32",
    "method": "mtp", "model": read_pair("demo").target, "draft_model": read_pair("demo").target,
    "num_speculative_tokens": MOST, "above_zero": "greedy",
    "serving": {"max_num_seqs": 8, "max_batched_tokens": 256, "max_len": 512},
}  # fmt: skip


class Server:
    """A server with a draft that is a function of where its round begins; ``faults``: what happens
    to the next requests instead (``unnoted`` or a status)."""

    def __init__(self, folder: Path, **engine: Any) -> None:
        folder.mkdir(exist_ok=True)
        draw = random.Random(0)
        self.folder, self.engine = folder, {**ENGINE, **engine}
        self.texts = [
            ([n + 1, 2, 3], [draw.randrange(50) for _ in range(LENGTH)]) for n in range(TEXTS)
        ]
        self.bodies: list[dict[str, Any]] = []
        self.faults: list[Any] = []
        self._file = folder / "rounds-00aa-000001.jsonl"
        self._lock = threading.Lock()
        self._note({"engine": self.engine})
        self.put_status(WORD)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                card = {"id": "chat", "root": server.engine["model"]}
                self._answer(200, json.dumps({"data": [card]}))

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                self._answer(*server.complete(json.loads(self.rfile.read(length))))

            def _answer(self, code: int, answer: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def put_status(self, retrace: str | None) -> None:
        status = {
            "format": 1, "boot": "00aa", "at": 1.0, "engine": self.engine, "retrace": retrace,
        }  # fmt: skip
        (self.folder / "status.json").write_text(json.dumps(status))

    def chain(self, text: int, start: int) -> list[int]:
        """What is proposed after the first ``start`` tokens of a text: up to MOST tokens."""
        draw, output = random.Random(100 * text + start), self.texts[text][1]
        right = [output[i] if i < LENGTH else 7 for i in range(start, start + MOST)]
        return [t if draw.random() < 0.7 else 60 for t in right[: draw.randrange(MOST + 1)]]

    def rounds(self, text: int, gamma: int) -> list[tuple[int, int, int]]:
        """Start, drafted and accepted tokens of the rounds after the first token."""
        start, rounds = 1, []
        while start < LENGTH:
            chain = self.chain(text, start)[:gamma]
            pairs = zip(chain, self.texts[text][1][start:], strict=False)
            accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            accepted = min(len(chain), LENGTH - start) if accepted is None else accepted
            rounds.append((start, len(chain), accepted))
            start += accepted + 1
        return rounds

    def serve(self) -> None:
        """Notes its texts as served without drafts."""
        for n, (prompt, output) in enumerate(self.texts):
            self._note_request(f"r{n}", prompt, output)

    def kept(self, text: int, start: int, gamma: int) -> int:
        """Tokens of a chain that the text goes on with."""
        pairs = zip(self.chain(text, start)[:gamma], self.texts[text][1][start:], strict=False)
        return [*(a == b for a, b in pairs), False].index(False)

    def serve_drafting(self, gamma: int, up_to: int) -> list[list[tuple[int, int, int]]]:
        """Notes its texts as served one at a time with so many tokens of a draft that ends: a step
        with a text of more than ``up_to`` tokens has dummies verified by the next. Start, drafted
        and accepted tokens of the rounds after the first token."""
        served = []
        for n, (prompt, output) in enumerate(self.texts):
            rounds, start, longest = [(0, 0, 0, 1)], 1, len(prompt)
            while start < LENGTH:
                drafted, kept = gamma, 0
                if longest <= up_to:
                    drafted = len(self.chain(n, start)[:gamma])
                    kept = self.kept(n, start, gamma)
                longest = len(prompt) + start + drafted
                rounds.append((start, drafted, kept, min(kept + 1, LENGTH - start)))
                start += rounds[-1][3]
            self._note_request(f"r{n}", prompt, output, rounds)
            served.append([r[:3] for r in rounds[1:]])
        return served

    def complete(self, body: dict[str, Any]) -> tuple[int, str]:
        name = f"cmpl-{body['request_id']}-0-ab12"
        with self._lock:
            if "vllm_xargs" not in body:
                self._note_request(name, body["prompt"], [9, 9])
                return 200, json.dumps({"choices": [{"token_ids": [9, 9]}]})
            self.bodies.append(body)
            fault = self.faults.pop(0) if self.faults else None
            if isinstance(fault, int):
                return fault, '{"message": "no such model"}'
            prompt = body["prompt"]
            text, (start, output) = prompt[0] - 1, (len(prompt) - 3, self.texts[prompt[0] - 1][1])
            tokens, count = output[start : start + body["max_tokens"]], body["max_tokens"] - 1
            if allowed := body.get("allowed_token_ids"):
                tokens, count = 2 * allowed, 1
            proposals = [self.chain(text, start + 1 + i) for i in range(count)]
            if fault != "unnoted":
                self._note({"id": name, "output": encoded(tokens), "proposals": proposals})
            return 200, json.dumps({"choices": [{"token_ids": tokens}]})

    def _note_request(
        self, name: str, prompt: list[int], output: list[int], rounds: list[Any] | None = None
    ) -> None:
        plain = [(i, 0, 0, 1) for i in range(len(output))]
        rounds = [[*r, 0, 0.01, 1, 10.0 + r[0]] for r in rounds or plain]
        self._note({
            "id": name, "arrived": 10.0, "ended": 40.0, "prompt": encoded(prompt),
            "output": encoded(output), "finish": "length", "rounds": rounds,
            "max_tokens": len(output),
        })  # fmt: skip

    def _note(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def starting(**engine: Any) -> Server:
        servers.append(Server(tmp_path / f"folder{len(servers)}", **engine))
        return servers[-1]

    yield starting
    for server in servers:
        server.http.shutdown()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "db"


def followed(server: Server, database: Path) -> str:
    """The recording of what was served."""
    server.serve()
    (boot,) = api.follow(server.folder, once=True, db=database).data["servers"]
    return str(boot["recordings"][0])


def check(server: Server, database: Path, recording: str) -> None:
    """Every round of every fixed window is the server's."""
    with opened(str(database)) as store:
        for gamma in range(1, MOST + 1):
            policy = {"draft": "mtp", "window": {"kind": "fixed", "gamma": gamma}}
            replay = simulate(store, recording, parse_policy(policy), None, per_round=True).replay
            rounds = [[(s.start + 1, s.drafted, s.accepted) for s in r] for r in replay.steps()]
            assert rounds == [server.rounds(n, gamma) for n in range(TEXTS)]


@pytest.mark.parametrize("accepts_none", [False, True])
def test_every_position_is_asked_once_and_every_window_replayed(
    start: Start, database: Path, accepts_none: bool
) -> None:
    server = start(accepts_none=accepts_none)
    recording = followed(server, database)
    result = api.retrace(recording, url=server.url, folder=server.folder, db=database)
    positions = TEXTS * (LENGTH - 1)
    assert (result.data["positions"], result.data["draft"]) == (positions, "mtp")
    assert len(server.bodies) == (TEXTS if accepts_none else positions)
    assert all(body["vllm_xargs"] == {"spectune": WORD} for body in server.bodies)
    check(server, database, recording)
    rounds = [r for n in range(TEXTS) for r in server.rounds(n, 3)]
    row = result.data["by_gamma"][2]
    drafted = [r for r in rounds if r[1]]
    assert row["first_position"] == sum(a > 0 for _, _, a in drafted) / len(drafted)
    adaptive = {"draft": "mtp", "window": {"kind": "heuristic", "gamma_max": 4}}
    assert api.simulate(adaptive, recording=recording, db=database).data["rounds"] > 0
    again = api.retrace(recording, url=server.url, folder=server.folder, db=database)
    assert (again.data["positions"], again.data["by_gamma"]) == (0, result.data["by_gamma"])


@pytest.mark.parametrize("is_told", [True, False])
def test_a_draft_that_ends_before_its_target_is_replayed_so_or_said_first(
    start: Start, database: Path, tmp_path: Path, is_told: bool
) -> None:
    up_to = 14
    told = {"drafts_up_to": up_to} if is_told else {}
    server, door = start(serving={**ENGINE["serving"], **told}), Door(str(database))
    served = server.serve_drafting(3, up_to)
    (boot,) = api.follow(server.folder, once=True, db=database).data["servers"]
    (recording,) = boot["recordings"]
    api.retrace(recording, url=server.url, folder=server.folder, db=database)
    policy = json.dumps({"draft": "mtp", "window": {"kind": "fixed", "gamma": 3}})
    found = door.call("simulate", policy=policy, recording=recording, per_round=tmp_path / "rows")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    replayed = [(row["start"] + 1, row["drafted"], row["accepted"]) for row in rows]
    warning = found.stderr.splitlines()[0]
    if is_told:
        assert replayed == [r for rounds in served for r in rounds]
        assert "differ from their replay" not in found.stderr
        return
    every = [(n, *r) for n, rounds in enumerate(served) for r in rounds if r[1]]
    differ = [
        (n, s)
        for n, s, _, kept in every
        if min(kept, LENGTH - s - 1) != min(server.kept(n, s, 3), LENGTH - s - 1)
    ]
    assert differ
    assert warning.startswith(
        f"warning: {len(differ)} of {len(every)} rounds that were served with draft 'mtp' differ"
    )
    shortest = min(len(server.texts[n][0]) + s for n, s in differ)
    assert f"kept nothing, from texts of {shortest} tokens on" in warning


def test_what_was_asked_before_a_failure_is_not_asked_again(
    start: Start, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NOTED_S", 0.1)
    monkeypatch.setattr(module, "TOGETHER", 1)  # a text at a time
    server = start()
    recording = followed(server, database)
    how = {"url": server.url, "folder": server.folder, "db": database, "outstanding": 1}
    server.faults = [None] * (LENGTH + 3) + [404]
    with pytest.raises(EngineError, match="no such model"):
        api.retrace(recording, **how)
    before = len(server.bodies)
    server.faults = [None, "unnoted", None]
    result = api.retrace(recording, **how)
    assert len(server.bodies) - before == (TEXTS - 1) * (LENGTH - 1) + 1
    assert result.data["texts"] == TEXTS - 1
    check(server, database, recording)


def test_what_cannot_be_retraced_is_refused_in_one_line(
    start: Start, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NOTED_S", 0.05)
    server = start()
    recording = followed(server, database)
    door = Door(str(database))

    def error(server: Server, url: str = "") -> str:
        return door.error(
            "retrace", recording, "--url", url or server.url, "--folder", str(server.folder)
        )

    assert "drafts nothing" in error(start(method=None, draft_model=None))
    assert "samples its drafts" in error(start(above_zero="rejection"))
    small = read_pair("demo").drafts["small"]
    assert "but this server serves" in error(start(model=small, draft_model=small))
    assert "no server answers" in error(server, "http://127.0.0.1:9")
    textless = start()
    textless.put_status(None)
    assert "notes no texts" in error(textless)
    server.faults = ["unnoted"] * 1000
    assert "the agent notes no proposals" in error(server)
    other = start(accepts_none=True)
    other.texts = [(prompt, output[::-1]) for prompt, output in other.texts]
    assert "decodes another text" in error(other)
