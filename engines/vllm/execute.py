"""vLLM as an engine that executes for us: requests are sent to a server of its own as token ids
over HTTP, and their rounds read back from what its scheduler records.

Nothing of it is the user's: policies are published to a database in a temporary folder, which goes
with the server.
"""

from __future__ import annotations

import json
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from spectune.db.database import open_database
from spectune.engines.abilities import VLLM
from spectune.engines.protocol import Answered, Execution, Load, Prompt, Swapping, Wanted
from spectune.engines.vllm.server import DEPLOYMENT, Server, installed
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import EngineError, PairError, PolicyError
from spectune.traces.recording import RecordedRequest
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore
from spectune.traces.text import printable

ANSWER_S: Final = 600.0
"""Seconds that a request may take, and a policy to come into force."""
MOST_SENDERS: Final = 512
"""Requests that are on their way at one time."""
LOOK_S: Final = 0.05
"""Seconds between two looks at what was recorded."""
DYING_S: Final = 15.0
"""Seconds from a broken connection to the end of a server that dies."""
NAME: Final = re.compile(r"cmpl-(\d+)\.(\d+)-")
"""Of a request in vLLM: the execution that it belongs to, and its number there."""


def _to_stderr(line: str) -> None:
    print(printable(line), file=sys.stderr)


class Vllm(Swapping):
    """A pair in vLLM, by the Python that ``SPECTUNE_VLLM_PYTHON`` names, by default this one. A
    server that dies is started again once, and asked again what it had not answered; what it had
    recorded is kept. ``say`` gets a line then, and for a version that was not tested."""

    engine = VLLM

    def __init__(
        self, spec: PairSpec, wanted: Wanted, say: Callable[[str], None] = _to_stderr
    ) -> None:
        if wanted.draft not in ("none", *spec.draft_names):
            has = ", ".join(spec.draft_names)
            raise PairError(f"pair {spec.name} has no draft {wanted.draft!r}; it has: {has}")
        found = installed()
        if not VLLM.tested(found.version):
            say(f"vLLM {found.version} was not tested; tested: {', '.join(VLLM.versions)}")
        self.version, self.wanted = found.version, wanted
        self._say, self._pair_id = say, spec.id
        self._executions, self._restarts, self._in_force = 0, 1, ""
        self._read: dict[str, int] = {}
        self._folder = TemporaryDirectory(prefix="spectune-vllm-")
        self.server = Server(found, Path(self._folder.name), spec, wanted)
        self._database = open_database(self.server.database)
        self._store = TraceStore(self._database)
        try:
            self._store.put_pair(self._pair_id, spec.name, spec.to_json())
            self.server.start()
            self._warm()
        except BaseException:
            self.close()
            raise

    @property
    def _options(self) -> Mapping[str, Any]:
        """What its recordings say of it."""
        return self._store.list_recordings()[0].options

    @property
    def serving(self) -> dict[str, Any]:
        return dict(self._options["serving"])

    @property
    def runs_on(self) -> dict[str, str]:
        return {name: str(self._options[name]) for name in ("device", "dtype", "hardware")}

    def close(self) -> None:
        self.server.close()
        self._database.close()
        self._folder.cleanup()

    def put_in_force(self, policy: Policy) -> None:
        """Publishes it to the server, which looks once a second."""
        if policy.id == self._in_force:
            return
        store, deadline = self._store, time.monotonic() + ANSWER_S
        store.put_policy(policy.id, policy.spelled_out(), policy.label())
        version = store.publish(
            self._pair_id, self.server.device, policy.id, actor="execute", deployment=DEPLOYMENT
        ).version
        while not (answers := store.acknowledgements(version)):
            if not self.server.alive or time.monotonic() > deadline:
                raise EngineError(f"vLLM took no policy: {self.server.reason()}")
            time.sleep(LOOK_S)
        if answers[0].status != "applied":
            raise PolicyError(answers[0].reason)
        self._in_force = policy.id

    def _warm(self) -> None:
        """One request, so that the first that counts is not the first of all."""
        body = body_of("0.0", Prompt("", "", (0, 0)), Sampling(), 2)
        with Sending(self.server.address, {0: body}, Load(), time.perf_counter()) as sending:
            if not next(self._answers(sending), None):
                raise EngineError(f"vLLM died at its first request: {self.server.reason()}")

    def _serve(self, asked: Execution) -> Generator[Answered, None, None]:
        self.put_in_force(asked.policy)
        self._executions += 1
        waiting, load = dict(enumerate(asked.prompts)), asked.load
        began = time.perf_counter()
        while waiting:
            bodies = {
                i: body_of(f"{self._executions}.{i}", p, asked.sampling, asked.most_tokens(p))
                for i, p in waiting.items()
            }
            moments = tuple(load.arrivals[i] for i in waiting) if load.arrivals else ()
            rest = replace(load, arrivals=moments)
            with Sending(self.server.address, bodies, rest, began) as sending:
                for i, request in self._answers(sending):
                    yield _answered(request, waiting.pop(i), asked, began)
                    if not waiting:
                        return
            self._start_again()
            self.put_in_force(asked.policy)

    def _answers(self, sending: Sending) -> Iterator[tuple[int, RecordedRequest]]:
        """Requests of this execution that were answered and recorded, each with its number, until
        the server is dead. (What was recorded and not answered was cut off.)"""
        recorded: dict[int, RecordedRequest] = {}
        while True:
            alive = self.server.alive  # what it wrote before it died is read
            recorded.update(self._new())
            for i in [i for i in recorded if i in sending.answered]:
                sending.answered.remove(i)
                yield i, recorded.pop(i)
            if not alive:
                return
            sending.check(self.server)
            time.sleep(LOOK_S)

    def _new(self) -> Iterator[tuple[int, RecordedRequest]]:
        """What was recorded of this execution since the last look."""
        for info in self._store.list_recordings():
            last = self._read.get(info.id, -1)
            new = sorted(self._store.recorded_ordinals(info.id, after=last))
            self._read[info.id] = max(new, default=last)  # numbered by one writer, in order
            for request in self._store.iterate(info.id, (), steps=True, ordinals=new):
                run, number = NAME.findall(request.trajectory.request_id)[0]
                if int(run) == self._executions:
                    yield int(number), request

    def _start_again(self) -> None:
        reason = self.server.reason()
        self.server.close()
        if not self._restarts:
            raise EngineError(f"vLLM died again: {reason}")
        self._restarts, self._in_force = self._restarts - 1, ""
        self._say(f"vLLM died ({reason}); it is started again, and what it recorded is kept")
        self.server.start()


class Sending:
    """Sends requests as a load says, from threads of its own: ``clients`` at a time, or each at its
    arrival, seconds after ``began``. ``answered``: the numbers of those that were. Leaving it drops
    what is on its way."""

    def __init__(
        self, address: tuple[str, int], bodies: Mapping[int, str], load: Load, began: float
    ) -> None:
        self.answered: set[int] = set()
        self._address, self._began, self._stop = address, began, threading.Event()
        self._waiting: queue.SimpleQueue[tuple[int, str, float]] = queue.SimpleQueue()
        moments = load.arrivals or (0.0,) * len(bodies)
        for (number, body), moment in zip(bodies.items(), moments, strict=True):
            self._waiting.put((number, body, moment))
        self._refused, self._broken = "", ""
        self._open: set[HTTPConnection] = set()
        count = min(len(bodies), MOST_SENDERS if load.arrivals else load.clients)
        self._threads = [threading.Thread(target=self._send, daemon=True) for _ in range(count)]

    def __enter__(self) -> Sending:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for connection in tuple(self._open):
            with suppress(OSError, AttributeError):  # it ended meanwhile
                connection.sock.shutdown(socket.SHUT_RDWR)

    def check(self, server: Server) -> None:
        """Raises EngineError for a request that the server refused, and where it lives and does not
        answer."""
        if self._refused:
            raise EngineError(f"vLLM refused a request: {self._refused}")
        if self._broken and not server.ended(DYING_S):
            raise EngineError(f"vLLM does not answer: {self._broken}")

    def _send(self) -> None:
        """A thread: sends the next that waits, at its moment, until none does."""
        with suppress(queue.Empty):
            while True:
                number, body, moment = self._waiting.get_nowait()
                if self._stop.wait(max(0.0, self._began + moment - time.perf_counter())):
                    return
                try:
                    status, said = self._post(body)
                except (OSError, HTTPException) as error:
                    self._broken = f"{type(error).__name__}: {error}"
                    return
                if status >= 500:
                    self._broken = f"status {status}"
                elif status >= 400:
                    self._refused = " ".join(said.split())[:300]
                else:
                    self.answered.add(number)

    def _post(self, body: str) -> tuple[int, str]:
        """The status and text of an answer."""
        connection = HTTPConnection(*self._address, timeout=ANSWER_S)
        self._open.add(connection)
        try:
            kind = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, kind)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            self._open.discard(connection)
            connection.close()


def body_of(name: str, prompt: Prompt, sampling: Sampling, max_new_tokens: int) -> str:
    chosen = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return json.dumps(
        {"prompt": list(prompt.ids), "request_id": name, "max_tokens": max_new_tokens, **chosen}
    )


def _answered(request: RecordedRequest, prompt: Prompt, of: Execution, began: float) -> Answered:
    named = replace(request.trajectory, request_id=prompt.id, category=prompt.category)
    text = replace(named, sampling=of.sampling, max_new_tokens=of.most_tokens(prompt))
    moments = ((s, s.arrived_s - began, s.ended_s - began) for s in request.steps)
    return Answered(text, tuple(s._replace(arrived_s=a, ended_s=e) for s, a, e in moments))
