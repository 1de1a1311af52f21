"""A server that speaks HTTP and the folder as vLLM with the agent does, without vLLM."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from token_ids import encoded

from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.schema import Request, Sampling

MOST, SEATS, MAX_LEN = 4, 4, 400
REFUSED = 299
"""A prompt that begins with this token is refused."""


@dataclass(eq=False)
class Served:
    """A request: its tokens, and by position how many of the draft's agree from there on."""

    name: str
    ids: list[int]
    text: list[int]
    agreeing: list[int]
    arrived: float = field(default_factory=time.time)
    drafted: int = 0
    rounds: list[list[Any]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def num_tokens(self) -> int:
        return sum(r[3] for r in self.rounds)


class FakeVllm(ThreadingHTTPServer):
    """Serves texts of a pair's target, whose rounds keep what its draft agrees to. A step sleeps
    for what its rows and passes (``pass_s``) cost. ``most_at_once``: requests that were on their
    way at one time."""

    daemon_threads = True
    request_queue_size = 128  # as many connections may come at once

    def __init__(
        self,
        folder: Path,
        pair: LoadedPair,
        draft: str | None = "near",
        method: str = "draft_model",
    ) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        folder.mkdir(exist_ok=True)
        self.folder, self.pair, self.draft = folder, pair, draft
        self.most = MOST if draft else 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.key, self.path, self.noting = "", "", True
        self.authorization: str | None = None
        """What the last request said."""
        self.boot, self.version, self.policy, self.noted = "f00d", 0, "", 0
        self.in_force: tuple[int, str] = (0, "")
        self.tried: dict[str, Any] | None = None
        self.renewal, self.ends_s, self.since = 0, 0.0, 0.0
        self.table: dict[int, int] = {1: self.most}
        self.taken: list[tuple[int, str]] = []
        """Every version and policy that came into force, in order."""
        self.refused: dict[str, Any] | None = None
        self.most_at_once, self.arrived, self.pass_s = 0, list[float](), 2e-4
        self._texts: dict[tuple[tuple[int, ...], int], tuple[list[int], list[int]]] = {}
        self._lock, self._stop = threading.Condition(), threading.Event()
        self._waiting: list[Served] = []
        self._running: list[Served] = []
        self.engine = {
            "engine": "vllm", "engine_version": "0.32.0", "device": "cpu", "dtype": "float32",
            "method": method if draft else None, "model": pair.spec.target,
            "draft_model": pair.spec.drafts[draft] if draft and method == "draft_model" else None,
            "prompt_lookup": None,
            "num_speculative_tokens": self.most, "above_zero": "greedy",
            "serving": {
                "max_num_seqs": SEATS, "max_batched_tokens": 2048, "max_len": MAX_LEN,
                "draft_slots": 1, "ahead": 0,
            },
        }  # fmt: skip
        self.rounds = folder / f"rounds-{self.boot}-000001.jsonl"
        self.rounds.write_text(json.dumps({"engine": self.engine}) + "\n")
        self.write_status()

    def complete(self, body: dict[str, Any]) -> Served:
        """Waits until a request is served."""
        key = (*body["prompt"],), body["max_tokens"]
        with self._lock:
            if key not in self._texts:
                self._texts[key] = self._decode(*key)
        name = f"cmpl-{body.get('request_id', 'x')}-0-x"
        request = Served(name, body["prompt"], *self._texts[key])
        with self._lock:
            self._waiting.append(request)
            self.arrived.append(request.arrived)
            at_once = len(self._waiting) + len(self._running)
            self.most_at_once = max(self.most_at_once, at_once)
            self._lock.notify_all()
        request.ended.wait()
        return request

    def retrace(self, body: dict[str, Any]) -> None:
        """Notes what is proposed after the one token that a request may emit."""
        ids, token = body["prompt"], body["allowed_token_ids"][0]
        for (prompt, _), (text, agreeing) in self._texts.items():
            start = len(ids) - len(prompt) + 1
            if [*prompt, *text[: start - 1]] == ids and text[start - 1 : start] == [token]:
                right = text[start : start + agreeing[start]] if start < len(text) else []
                line = {"output": encoded([token, token]), "proposals": [[*right, REFUSED][:MOST]]}
                self._append({"id": f"cmpl-{body['request_id']}-0-x", **line})
                return

    def _append(self, line: dict[str, Any]) -> None:
        with self._lock, self.rounds.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _decode(self, ids: tuple[int, ...], most: int) -> tuple[list[int], list[int]]:
        decoder = Decoder(self.pair, StaticSource(prepare_for(self.pair, AUTOREGRESSIVE)))
        text = decoder.decode(
            decoder.request(Request("r", "x", ""), list(ids), Sampling(), most)
        ).trajectory
        output = text.output_ids.tolist()
        if self.draft is None:
            return output, [0] * len(output)
        slots = record_panorama(self.pair, text, self.draft, MOST).trie.text_slot.tolist()
        ahead = [[slot == 0 for slot in slots[at : len(output)]] for at in range(len(output))]
        return output, [[*agree, False].index(False) for agree in ahead]

    def run(self) -> None:
        """The engine's core: a step after the other."""
        while not self._stop.is_set():
            self.read_policy()
            with self._lock:
                while self._waiting and len(self._running) < SEATS:
                    self._running.append(self._waiting.pop(0))
                if not self._running:
                    self._lock.wait(0.01)
                    continue
            self.step()

    def step(self) -> None:
        began, batch = time.time(), len(self._running)
        drafts = self.table[max(size for size in self.table if size <= batch)]
        rows = sum(1 + request.drafted for request in self._running)
        time.sleep(1e-3 + 5e-5 * rows + self.pass_s * drafts)
        now = time.time()
        for request in tuple(self._running):
            start, drafted = request.num_tokens, request.drafted
            accepted = min(drafted, request.agreeing[start]) if start else 0
            emitted = min(accepted + 1, len(request.text) - start)
            request.rounds.append(
                [start, drafted, accepted, emitted, self.version, now - began, batch, now]
            )
            request.drafted = drafts
            if start + emitted == len(request.text):
                self._running.remove(request)
                self.note(request, now)
                request.ended.set()

    def note(self, request: Served, now: float) -> None:
        if not self.noting:
            return
        line = {
            "id": request.name, "arrived": request.arrived, "ended": now,
            "prompt": encoded(request.ids), "output": encoded(request.text),
            "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": None,
            "max_tokens": len(request.text), "stop": [], "finish": "length", "label": None,
            "rounds": request.rounds,
        }  # fmt: skip
        self.noted += 1
        self._append(line)

    def read_policy(self) -> None:
        """Takes up what stands in ``policy.json``: a trial while it is renewed, else what is in
        force."""
        try:
            document = json.loads((self.folder / "policy.json").read_text())
        except FileNotFoundError:
            document = {"version": 0}
        except ValueError:  # half-written
            return
        if not isinstance(document["version"], int):  # the agent keeps its table
            return
        before, trial = (self.in_force, self.tried is None), None
        self.in_force = document["version"], document.get("policy", "")
        if tried := document.get("trial"):
            if tried["boot"] == self.boot and tried["renewal"] > self.renewal:
                self.renewal, self.ends_s = tried["renewal"], time.monotonic() + tried["ttl_s"]
            trial = tried if time.monotonic() < self.ends_s else None
        self.tried = trial
        is_new = before != (self.in_force, trial is None)
        document = document if trial is None else trial
        version, drafts_by = document["version"], (self.version, self.policy)
        is_refused = version == (self.refused or {}).get("version")
        if is_refused or (version, document.get("policy", "")) == drafts_by:
            if is_new:
                self.write_status()
            return
        gammas = {int(n): tokens for n, tokens in document.get("gammas", {"1": self.most}).items()}
        if max(gammas.values()) > self.most or min(gammas.values()) < 0:
            self.refused = {"version": version, "reason": f"drafts 0 to {self.most} tokens"}
        else:
            self.version, self.policy = version, document.get("policy", "")
            self.table, self.refused, self.since = gammas, None, time.time()
            self.taken.append((self.version, self.policy))
        self.write_status()

    def write_status(self) -> None:
        document = {
            "format": 1, "boot": self.boot, "pid": 7, "at": time.time(), "engine": self.engine,
            "in_force": {
                "version": self.in_force[0], "policy": self.in_force[1], "since": time.time(),
            },
            "trial": self.tried and {
                "version": self.version, "policy": self.policy, "since": self.since,
                "is_over": False,
            },
            "renewal": self.renewal, "refused": self.refused, "fault": None,
            "noted": self.noted, "dropped": 0,
            "retrace": "retrace 0123abcd",
        }  # fmt: skip
        part = self.folder / "status.json.part"
        part.write_text(json.dumps(document))
        part.replace(self.folder / "status.json")

    def stop(self) -> None:
        self._stop.set()


class Answer(BaseHTTPRequestHandler):
    server: FakeVllm

    def do_GET(self) -> None:
        model = {"id": "chat", "root": self.server.pair.spec.target}
        self.answer(200, {"data": [model]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"][0] == REFUSED:
            self.answer(400, {"message": "the prompt\n is too long"})
            return
        if "allowed_token_ids" in body:
            self.server.retrace(body)
            self.answer(200, {"choices": [{"token_ids": 2 * body["allowed_token_ids"]}]})
            return
        served = self.server.complete(body)
        self.answer(200, {"choices": [{"token_ids": served.text, "finish_reason": "length"}]})

    def answer(self, code: int, document: Any) -> None:
        fake = self.server
        fake.authorization = self.headers["Authorization"]
        if fake.key and self.headers["Authorization"] != f"Bearer {fake.key}":
            code, document = 401, {"error": "Unauthorized"}
        if not self.path.startswith(f"{fake.path}/v1/"):
            code, document = 404, {"detail": "Not Found"}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@contextmanager
def served(
    folder: Path, pair: LoadedPair, draft: str | None = "near", method: str = "draft_model"
) -> Iterator[FakeVllm]:
    """A server of this pair for as long as the context lasts."""
    with FakeVllm(folder, pair, draft, method) as fake:
        threads = [threading.Thread(target=act) for act in (fake.serve_forever, fake.run)]
        for thread in threads:
            thread.start()
        try:
            yield fake
        finally:
            fake.stop()
            fake.shutdown()
            for thread in threads:
                thread.join()
