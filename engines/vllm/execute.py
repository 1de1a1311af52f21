"""A vLLM server that runs, as an engine that executes for us: requests go to it over HTTP, policies
by ``policy.json`` of its agent's folder, and rounds are read from the files there.

It is neither started nor stopped here, and others may use it meanwhile.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from spectune.engines.abilities import VLLM
from spectune.engines.protocol import Answered, Execution, Load, Prompt, Swapping, Wanted
from spectune.engines.vllm.command import SCHEDULER
from spectune.engines.vllm.folder import (
    SENT,
    Line,
    Status,
    Tail,
    parse_line,
    read_policy,
    read_status,
    table_of,
    write_policy,
)
from spectune.engines.vllm.follow_policy import served_pair
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import ByLoadWindow, FixedWindow, Policy
from spectune.traces.errors import EngineError, PolicyError
from spectune.traces.schema import Sampling
from spectune.traces.text import one_line

ANSWER_S: Final = 600.0
"""Seconds that a request may take."""
NOTED_S: Final = 15.0
"""Seconds from an answer until the agent has noted the request."""
IN_FORCE_S: Final = 30.0
"""Seconds until a policy is in force."""
MOST_SENDERS: Final = 512
"""Requests that are on their way at one time."""
LOOK_S: Final = 0.02
"""Seconds between two looks into the folder."""


class RunningServer(Swapping):
    """The server at ``url``, whose agent writes into ``folder``: ``spec`` and ``draft`` are its
    pair (of ``pair``, where one is named) and what drafts in it. :meth:`close` puts the policy back
    that was in force before.

    Raises EngineError where no such server answers, or its agent does not work, and PairError where
    it serves other models than ``pair`` has.
    """

    engine = VLLM

    def __init__(self, url: str, folder: Path, pair: PairSpec | None = None) -> None:
        self.address, self.folder = Address.of(url), folder
        status = self._status()
        self._described = status.described
        self._about = self._described.about
        if status.refused is not None and not status.refused.version:
            raise EngineError(f"{folder}: the agent is off: {status.refused.reason}")
        self.model = self._served_model()
        self.version = self._described.engine_version
        self.spec, self.draft = served_pair(self._described, pair)
        most, seats = self._described.num_speculative_tokens or 0, self._described.max_num_seqs
        self.wanted = Wanted(self.draft, most, seats, self._described.max_len)
        self._before = read_policy(folder)
        if self._before.get("version", 0) < 0:  # of a tuning that was killed
            self._before = {"version": 0, **self._texts}
        self._version, self._policies = 0, {0: ""}
        self._token, self._executions = f"{SENT}{secrets.token_hex(4)}", 0
        self._tail, self._lock = Tail(folder, status.boot), threading.Lock()
        self._warm()

    @property
    def serving(self) -> Mapping[str, Any]:
        return self._described.serving

    @property
    def runs_on(self) -> Mapping[str, Any]:
        """All that the agent says of the server but how it fills its steps."""
        named = ("engine", "engine_version", "serving")
        return {key: value for key, value in self._about.items() if key not in named}

    @property
    def policy(self) -> Policy:
        """What is in force: the table of ``policy.json``, else the server's own number of draft
        tokens."""
        gammas = self._before.get("gammas")
        if self.draft == "none":
            return Policy()
        if not self._before.get("version") or not isinstance(gammas, Mapping):
            return Policy(draft=self.draft, window=FixedWindow(gamma=self.wanted.most))
        contexts = self._before.get("contexts") or {}
        if len(gammas) == 1 and not contexts:
            return Policy(draft=self.draft, window=FixedWindow(gamma=gammas["1"]))
        table = {"kind": "by_load", "gamma": gammas, "contexts": contexts}
        window = ByLoadWindow.model_validate(table)
        return Policy(draft=self.draft, window=window)

    def close(self) -> None:
        """Puts back what was in force, unless somebody else has put something there since."""
        with self._lock:
            if read_policy(self.folder).get("version") != self._version or self._version >= 0:
                return
            if self._before:
                write_policy(self.folder, self._before)
            else:
                (self.folder / "policy.json").unlink(missing_ok=True)
            self._version = self._before.get("version", 0)

    def put_in_force(self, policy: Policy) -> None:
        if self._policies.get(self._version) == policy.id:
            return
        table = table_of(policy, self._described, self.draft)
        with self._lock:
            version = min(-int(time.time()), *(n - 1 for n in self._policies))  # of no publication
            write_policy(self.folder, {"version": version, **table, **self._texts})
            self._version, self._policies[version] = version, policy.id
        deadline = time.monotonic() + IN_FORCE_S
        while (status := self._status()).in_force.version != version:
            if status.refused is not None and status.refused.version == version:
                raise PolicyError(f"vLLM refuses {policy.label()}: {status.refused.reason}")
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM took no policy from {self.folder}: {self._reason()}")
            time.sleep(LOOK_S)

    @property
    def _texts(self) -> dict[str, Any]:
        """Whose tokens the agent notes, as ``policy.json`` said before."""
        return {key: value for key, value in self._before.items() if key == "texts"}

    def _status(self) -> Status:
        status = read_status(self.folder)
        if status is None:
            raise EngineError(
                f"{self.folder}: no agent has written status.json there; start vLLM with "
                f"SPECTUNE_FOLDER={self.folder} and --scheduler-cls {SCHEDULER}"
            )
        return status

    def _served_model(self) -> str:
        """The name that requests go to. Raises EngineError where the server has other models than
        the folder's."""
        url, model = self.address.url, self._described.model
        try:
            code, text = self.address.call("GET", "/v1/models", timeout=30)
        except (OSError, HTTPException) as error:
            raise EngineError(f"{url}: no server answers ({error})") from None
        try:
            cards = [(str(card["id"]), card.get("root")) for card in json.loads(text)["data"]]
        except (ValueError, LookupError, TypeError, AttributeError):
            cards = []
        if not cards:
            raise EngineError(f"{url}/v1/models: no models ({code}: {one_line(text, 100)})")
        for name, root in cards:
            if model in (name, root):
                return name
        if any(root for _, root in cards):
            served = ", ".join(root or name for name, root in cards)
            raise EngineError(f"{url} serves {served}, but {self.folder} is of a server of {model}")
        return cards[0][0]

    def _reason(self) -> str:
        """Why it does not go on, as far as the folder tells."""
        status = read_status(self.folder)
        return (status and status.fault) or "its agent is off, or the folder is another server's"

    def _warm(self) -> None:
        """One request, so that the first that counts is not the first of all; and the folder is
        this server's if it is noted."""
        prompts = [Prompt("warm", "", (0, 0))]
        execution = Execution(prompts, Policy(), 0, Load(), Sampling(), 2)
        for _ in self._answers(execution):
            pass

    def _serve(self, asked: Execution) -> Generator[Answered, None, None]:
        self.put_in_force(asked.policy)
        return self._undisturbed(asked)

    def _undisturbed(self, asked: Execution) -> Generator[Answered, None, None]:
        """Raises EngineError where somebody else changed the policy meanwhile."""
        yield from self._answers(asked)
        with self._lock:
            if read_policy(self.folder).get("version") != self._version:
                raise EngineError(f"{self.folder}/policy.json was changed by another meanwhile")

    def _answers(self, asked: Execution) -> Generator[Answered, None, None]:
        self._executions += 1
        prefix, began = f"{self._token}.{self._executions}.", time.time()
        bodies = [
            self._body(f"{prefix}{n}", prompt, asked) for n, prompt in enumerate(asked.prompts)
        ]
        noted: dict[int, Line] = {}
        answered: dict[int, list[int]] = {}
        rest, progressed = len(bodies), time.monotonic()
        with Sending(self.address, bodies, asked.load) as sending:
            while rest:
                noted |= self._noted(prefix)
                while not sending.answers.empty():
                    number, tokens = sending.answers.get()
                    answered[number], progressed = tokens, time.monotonic()
                for number in [number for number in answered if number in noted]:
                    rest, progressed = rest - 1, time.monotonic()
                    line, tokens = noted.pop(number), answered.pop(number)
                    yield self._answer(asked, asked.prompts[number], line, tokens, began)
                if sending.problem:
                    raise EngineError(f"{self.address.url}: {self._died() or sending.problem}")
                if answered and time.monotonic() > progressed + NOTED_S:
                    raise EngineError(
                        f"{self.address.url} answers, but {self.folder} notes nothing of it: "
                        f"{self._reason()}"
                    )
                time.sleep(LOOK_S)

    def _died(self) -> str:
        """Why the server ended, where that is known."""
        return ""

    def _noted(self, prefix: str) -> dict[int, Line]:
        """The requests of an execution that the agent has noted since the last look."""
        lines = {}
        for text in self._tail.lines():
            if prefix.encode() in text and isinstance(line := parse_line(text), Line):
                number = line.id.partition(prefix)[2].partition("-")[0]
                lines[int(number)] = line
        return lines

    def _answer(
        self, asked: Execution, prompt: Prompt, line: Line, tokens: list[int], began: float
    ) -> Answered:
        steps = line.steps(self.draft, lambda version: self._policies.get(version, ""))
        shifted = [
            s._replace(arrived_s=s.arrived_s - began, ended_s=s.ended_s - began) for s in steps
        ]
        finish = "stop" if line.finish == "abort" else line.finish
        return asked.answered(
            prompt, tokens, finish, shifted, above_zero=self._described.above_zero
        )

    def _body(self, name: str, prompt: Prompt, asked: Execution) -> str:
        sampling = asked.sampling
        return json.dumps(
            {
                "model": self.model,
                "request_id": name,
                "prompt": list(prompt.ids),
                "max_tokens": asked.most_tokens(prompt),
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "return_token_ids": True,
            }
        )


@dataclass(frozen=True)
class Address:
    """Where a server listens: its URL without ``/v1``."""

    url: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Raises EngineError for what is no URL."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise EngineError(f"--url {url}: a server's URL is expected, as http://localhost:8000")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(f"{parts.scheme}://{parts.netloc}{path}")

    def connect(self, timeout: float) -> HTTPConnection:
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=timeout)

    def call(
        self,
        method: str,
        path: str,
        body: str | None = None,
        *,
        timeout: float = ANSWER_S,
        connection: HTTPConnection | None = None,
    ) -> tuple[int, str]:
        """The status and text of an answer. ``OPENAI_API_KEY``, or ``VLLM_API_KEY``, is sent where
        it is set. Raises OSError and HTTPException."""
        connection = connection or self.connect(timeout)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, urlsplit(self.url).path + path, body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()


class Sending:
    """Sends requests as a load says, from threads of its own: ``clients`` at a time, or each at its
    arrival. ``answers``: the number and the tokens of each that was answered; ``problem``: why one
    was not. Leaving it drops what is on its way."""

    def __init__(self, address: Address, bodies: list[str], load: Load) -> None:
        self.answers: queue.SimpleQueue[tuple[int, list[int]]] = queue.SimpleQueue()
        self.problem = ""
        self._address, self._stop = address, threading.Event()
        self._waiting: queue.SimpleQueue[tuple[int, str, float]] = queue.SimpleQueue()
        moments = load.arrivals or (0.0,) * len(bodies)
        for number, (body, moment) in enumerate(zip(bodies, moments, strict=True)):
            self._waiting.put((number, body, moment))
        self._open: set[HTTPConnection] = set()
        count = min(len(bodies), MOST_SENDERS if load.arrivals else load.clients)
        self._threads = [threading.Thread(target=self._send, daemon=True) for _ in range(count)]
        self._began = 0.0

    def __enter__(self) -> Sending:
        self._began = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for connection in tuple(self._open):
            with suppress(OSError, AttributeError):  # it ended meanwhile
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _send(self) -> None:
        """A thread: sends the next that waits, at its moment, until none does."""
        with suppress(queue.Empty):
            while True:
                number, body, moment = self._waiting.get_nowait()
                if self._stop.wait(max(0.0, self._began + moment - time.perf_counter())):
                    return
                connection = self._address.connect(ANSWER_S)
                self._open.add(connection)
                try:
                    code, text = self._address.call(
                        "POST", "/v1/completions", body, connection=connection
                    )
                    if code != 200:
                        self.problem = f"a request was refused ({code}): {one_line(text, 300)}"
                        return
                    self.answers.put((number, json.loads(text)["choices"][0]["token_ids"]))
                except (OSError, HTTPException) as error:
                    self.problem = f"it does not answer: {type(error).__name__}: {error}"
                    return
                except (ValueError, LookupError, TypeError):
                    self.problem = f"its answer has no token ids: {one_line(text, 100)}"
                    return
                finally:
                    self._open.discard(connection)
