"""What the measurements on `spectune serve` share: the server as a process, and clients of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from bench.served.live import command
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import EngineError
from spectune.traces.store import TraceStore

GIVE_UP_S = 300.0
DEPLOYMENT = "default"


@dataclass(frozen=True)
class Serving:
    """A server that runs: its URL and its process."""

    url: str
    process: subprocess.Popen[str]

    def memory(self) -> int:
        """Bytes that the process holds in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        if found is None:
            raise EngineError(f"the server has ended ({self.process.poll()})")
        return int(found[1]) * 1024

    def metric(self, name: str) -> float:
        """The first of a metric's values; 0 where it has none."""
        lines = httpx2.get(f"{self.url}/metrics", timeout=GIVE_UP_S).text.splitlines()
        return next((float(x.split()[-1]) for x in lines if x.startswith(name)), 0.0)

    def await_version(self, version: int) -> None:
        """Returns when a publication is in force."""
        deadline = time.monotonic() + GIVE_UP_S
        while self.metric("spectune_policy_version") != version:
            if time.monotonic() > deadline:
                raise EngineError(f"publication {version} is not in force after {GIVE_UP_S:.0f} s")
            time.sleep(0.05)


@contextmanager
def serve(database: Path, *options: object) -> Iterator[Serving]:
    """`serve` of the demo pair, as a user starts it; it is drained at the end."""
    words = command("--db", database, "serve", "--pair", "demo", "--port", 0, *options)
    with database.with_suffix(".serve.log").open("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, text=True)
        try:
            deadline = time.monotonic() + GIVE_UP_S
            while not (found := re.search(r" on (http://\S+)/v1 ", Path(log.name).read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise EngineError(Path(log.name).read_text().strip()[-300:])
                time.sleep(0.2)
            yield Serving(found[1], process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(GIVE_UP_S)


def publish(store: TraceStore, policy: Policy, pair_id: str) -> int:
    """Publishes a policy for servers of a pair; the version."""
    store.put_policy(policy.id, policy.spelled_out(), policy.label())
    return store.publish(pair_id, "cpu", policy.id, deployment=DEPLOYMENT, actor="bench").version


class Answer(NamedTuple):
    """What a request came to: its number, its HTTP status, text, tokens, seconds until the first
    token, and between one event of its stream and the next; when it ended (monotonic); why it
    failed."""

    number: int
    status: int
    text: str = ""
    tokens: int = 0
    first_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    at: float = 0.0
    problem: str = ""


def ask(url: str, number: int, body: Mapping[str, Any]) -> Answer:
    """Streams one completion."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    began, moments, text, tokens, ended = time.monotonic(), list[float](), "", 0, False
    try:
        with httpx2.stream(
            "POST", f"{url}/v1/completions", json=asked, timeout=GIVE_UP_S
        ) as response:
            if response.status_code != 200:
                response.read()
                return Answer(number, response.status_code, problem=response.text[:200])
            for line in response.iter_lines():
                said = line.removeprefix("data: ")
                if said in ("", "[DONE]"):
                    ended |= said == "[DONE]"
                    continue
                document = json.loads(said)
                if "error" in document:
                    return Answer(number, 500, problem=said[:200])
                if document["choices"]:
                    moments.append(time.monotonic())
                    text += document["choices"][0]["text"]
                if document.get("usage"):
                    tokens = document["usage"]["completion_tokens"]
    except httpx2.HTTPError as error:
        return Answer(number, 0, problem=f"{type(error).__name__}: {error}")
    if not ended or not moments:
        return Answer(number, 0, problem="the stream ended early")
    gaps = tuple(b - a for a, b in pairwise(moments))
    return Answer(number, 200, text, tokens, moments[0] - began, gaps, moments[-1])


@dataclass
class Clients:
    """``clients`` that stream completions of ``bodies`` in turn without a pause; ``answers``
    as they end. Who is refused with 429 waits for a second, as it is told."""

    url: str
    bodies: Sequence[Mapping[str, Any]]
    """May be others from any moment on."""
    clients: int
    answers: list[Answer] = field(default_factory=list)

    def send_once(self) -> list[Answer]:
        """Each body once, one after the other."""
        return [ask(self.url, n, body) for n, body in enumerate(self.bodies)]

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Sends until it is left, and then waits for the last answers."""
        over, lock, numbers = threading.Event(), threading.Lock(), count(0)

        def client() -> None:
            while not over.is_set():
                with lock:
                    number = next(numbers) % len(self.bodies)
                    body = self.bodies[number]
                answer = ask(self.url, number, body)
                self.answers.append(answer)
                if answer.status == 429:
                    over.wait(1.0)

        with ThreadPoolExecutor(self.clients) as pool:
            sent = [pool.submit(client) for _ in range(self.clients)]
            try:
                yield
            finally:
                over.set()
        for one in sent:
            one.result()
