"""A vLLM server that runs, as an engine that executes for us: requests go to it over HTTP, policies
by trials in ``policy.json`` of its agent's folder, and rounds are read from the files there.

It is neither started nor stopped here, and others may use it meanwhile. What is in force is not
changed: a trial ends when this process no longer renews it.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx2

from spectune.engines.abilities import VLLM
from spectune.engines.engine import Answered, ExecutionPlan, Load, Prompt, Running, Wanted
from spectune.engines.vllm.command import SCHEDULER
from spectune.engines.vllm.folder import (
    FORMAT,
    SENT,
    NotedRequest,
    Status,
    Tail,
    own_policy,
    policy_by,
    read_policy,
    read_status,
    renewed,
    table_of,
    trial_of,
    version_of,
    without_trial,
    write_policy,
)
from spectune.engines.vllm.follow_policy import served_pair
from spectune.engines.vllm.locks import FolderLock
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import EngineError, PolicyError, TraceError
from spectune.traces.schema import Sampling
from spectune.traces.text import one_line, without_credentials

ANSWER_S: Final = 600.0
"""Seconds that a request may take."""
NOTED_S: Final = 15.0
"""Seconds from an answer until the agent has noted the request."""
IN_FORCE_S: Final = 30.0
"""Seconds until a policy is in force."""
MOST_SENDERS: Final = 512
"""Requests that are on their way at one time."""
TTL_S: Final = 30.0
"""Seconds until a trial ends that is not renewed."""
RENEW_S: Final = 5.0
"""Seconds between two renewals."""
NOTHING: Final = {"format": FORMAT, "version": 0}
"""A ``policy.json`` that puts nothing in force."""
LOOK_S: Final = 0.02
"""Seconds between two looks into the folder."""


class RunningServer(Running):
    """The server at ``url``, whose agent writes into ``folder``: ``spec`` and ``draft`` are its
    pair (of ``pair``, where one is named) and what drafts in it. :meth:`close` ends what is tried.

    Raises EngineError where no such server answers, or its agent does not work, and PairError where
    it serves other models than ``pair`` has.
    """

    engine = VLLM

    def __init__(self, url: str, folder: Path, pair: PairSpec | None = None) -> None:
        address = server_url(url)
        self.url, self.folder = without_credentials(address), folder
        status = self.status()
        if status.refused is not None and not status.refused.version:
            raise EngineError(f"{folder}: the agent is off: {status.refused.reason}")
        self._described, self.boot = status.engine, status.boot
        self.device_name = status.engine.device_name
        self._client = client_of(address)
        self.model = self._served_model()
        self.version, self.serving = status.engine.engine_version, status.engine.serving
        self.runs_on = status.engine.about
        self.spec, self.draft = served_pair(status.engine, pair)
        most, seats = status.engine.num_speculative_tokens or 0, status.engine.max_num_seqs
        self.wanted = Wanted(self.draft, most, seats, status.engine.max_len)
        self._tuning: FolderLock | None = None
        self._is_reserved = False
        self._version, self._policies = 0, {0: ""}
        self._trial: Mapping[str, Any] | None = None
        """What is tried now; ``_version``: the last that was."""
        self._renewal, self._renewed_s = 0, 0.0
        self._renewing: threading.Thread | None = None
        self._token, self._executions = f"{SENT}{secrets.token_hex(4)}", 0
        self._tail, self._lock = Tail(folder, status.boot), threading.Lock()
        # A warm-up request; that it is noted in the folder proves that the folder is this server's.
        warm = ExecutionPlan([Prompt("warm", "", (0, 0))], Policy(), Load(), Sampling(), 2)
        for _ in self._answers(warm):
            pass

    @property
    def policy(self) -> Policy:
        """What is in force: the table of ``policy.json``, else the server's own."""
        document = read_policy(self.folder)
        gammas = document.get("gammas")
        if self.draft == "none" or not version_of(document) or not gammas:
            return own_policy(self.runs_on, self.draft)
        return policy_by(self.draft, gammas, document.get("contexts", {}))

    def close(self) -> None:
        """Ends what is tried, unless somebody else has ended it since. Policies can be put in force
        again afterwards."""
        with self._lock, ExitStack() as after:
            if self._tuning is not None and not self._is_reserved:
                after.callback(self._tuning.release)
                self._tuning = None
            document, self._trial = read_policy(self.folder), None
            if trial_of(document).get("version") != self._version:
                return
            if without_trial(document) == NOTHING:
                (self.folder / "policy.json").unlink(missing_ok=True)
            else:
                write_policy(self.folder, without_trial(document))

    @contextmanager
    def reserved(self) -> Iterator[RunningServer]:
        """While the block runs nobody else puts trials into the folder, also where none is tried
        here; what is tried ends with it. Raises TraceError where another does."""
        with self._lock:
            self._reserve()
            self._is_reserved = True
        try:
            yield self
        finally:
            self._is_reserved = False
            self.close()

    def _reserve(self) -> None:
        if self._tuning is None:
            self._tuning = FolderLock(self.folder, "tune", f"tuned through {self.url}")

    def put_in_force(self, policy: Policy) -> None:
        """Tries a policy for all that the server decodes, until the next, :meth:`close`, or the end
        of this process: renewed by a thread, it is over :data:`TTL_S` after the last renewal."""
        table = table_of(policy, self._described, self.draft)
        with self._lock:
            found = read_policy(self.folder)
            if self._is_tried(found) and self._policies[self._version] == policy.id:
                return
            self._reserve()
            version = min(-int(time.time()), *(n - 1 for n in self._policies))  # of no publication
            # First, so that whatever interrupts the writing is ended.
            self._version, self._policies[version] = version, policy.id
            self._trial = {"version": version, **table, "seed": 0, "block_s": 0}
            self._renew(found)
            if self._renewing is None:
                self._renewing = threading.Thread(target=self._renew_on, daemon=True)
                self._renewing.start()
        try:
            self._wait_until_in_force(version, policy)
        except BaseException:
            self._policies[version] = ""  # it is not in force
            raise

    def _is_tried(self, document: Mapping[str, Any]) -> bool:
        """Whether ``policy.json`` says what is tried here, and that was renewed in time."""
        is_there = trial_of(document).get("version") == self._version
        return is_there and self._trial is not None and time.monotonic() < self._renewed_s + TTL_S

    def _renew(self, document: Mapping[str, Any]) -> None:
        assert self._trial is not None
        trial = renewed(self._trial, self.status(), self._renewal, TTL_S)
        base = without_trial(document)
        base = base if type(base.get("version")) is int else NOTHING
        write_policy(self.folder, {**base, "trial": trial})
        self._renewal, self._renewed_s = trial["renewal"], time.monotonic()

    def _renew_on(self) -> None:
        """Renews what is tried, until nothing is, another has ended it, or it was over."""
        while True:
            time.sleep(RENEW_S)
            with self._lock, suppress(EngineError, TraceError):  # tried again until it is over
                document = read_policy(self.folder)
                if not self._is_tried(document):
                    self._renewing = None
                    return
                self._renew(document)

    def _wait_until_in_force(self, version: int, policy: Policy) -> None:
        deadline = time.monotonic() + IN_FORCE_S
        while (status := self.status()).trial is None or status.trial.version != version:
            if status.refused is not None and status.refused.version == version:
                raise PolicyError(f"vLLM refuses {policy.label()}: {status.refused.reason}")
            if time.monotonic() > deadline:
                fault = f"vLLM took no policy from {self.folder}: {self.agent_fault()}"
                raise EngineError(self._died() or fault)
            time.sleep(LOOK_S)

    def status(self) -> Status:
        """What the agent says now. Raises EngineError where it has written nothing."""
        status = read_status(self.folder)
        if status is None:
            raise EngineError(
                f"{self.folder}: no agent has written status.json there; start vLLM with "
                f"SPECTUNE_FOLDER={self.folder} and --scheduler-cls {SCHEDULER}"
            )
        return status

    def agent_fault(self) -> str:
        """Why the agent does not go on, as far as its status tells."""
        return self.status().fault or "its agent is off, or the folder is another server's"

    def _served_model(self) -> str:
        """The name that requests go to: the model's of the folder, not an adapter's."""
        try:
            answer = self._client.get("v1/models", timeout=30)
            if answer.status_code == 401:
                raise EngineError(f"{self.url}: it asks for a key (401); VLLM_API_KEY names it")
            names = {card.get("root"): card["id"] for card in answer.json()["data"]}
            return str(names.get(self._described.model) or next(iter(names.values())))
        except httpx2.HTTPError as error:
            raise EngineError(f"{self.url}: no server answers ({error})") from None
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
            text = f"{answer.status_code}: {one_line(answer.text, 100)}"
            raise EngineError(f"{self.url}/v1/models: no models ({text})") from None

    def complete(self, **request: Any) -> list[int]:
        """The tokens that the server adds to a prompt (vLLM's ``/v1/completions``). Raises
        EngineError where it refuses the request or does not answer."""
        body = {"model": self.model, "return_token_ids": True, **request}
        try:
            answer = self._client.post("v1/completions", json=body)
        except httpx2.HTTPError as error:
            problem = f"it does not answer: {type(error).__name__}: {error}"
            raise EngineError(f"{self.url}: {problem}") from None
        if answer.status_code != 200:
            reason = f"({answer.status_code}): {one_line(answer.text, 300)}"
            raise EngineError(f"{self.url}: a request was refused {reason}")
        try:
            return list(answer.json()["choices"][0]["token_ids"])
        except (ValueError, LookupError, TypeError):
            text = one_line(answer.text, 100)
            raise EngineError(f"{self.url}: its answer has no token ids: {text}") from None

    def _serve(self, asked: ExecutionPlan) -> Generator[Answered, None, None]:
        """Raises EngineError where somebody else changed the policy meanwhile."""
        self.put_in_force(asked.policy)
        yield from self._answers(asked)
        with self._lock:
            if not self._is_tried(read_policy(self.folder)):
                place = f"{self.folder}/policy.json"
                raise EngineError(f"{place}: its trial ended, or was changed by another meanwhile")

    def _answers(self, asked: ExecutionPlan) -> Generator[Answered, None, None]:
        self._executions += 1
        prefix, began = f"{self._token}.{self._executions}.", time.time()
        requests = [
            {
                "request_id": f"{prefix}{n}",
                "prompt": list(prompt.ids),
                "max_tokens": asked.most_tokens(prompt),
                "temperature": asked.sampling.temperature,
                "top_k": asked.sampling.top_k,
                "top_p": asked.sampling.top_p,
            }
            for n, prompt in enumerate(asked.prompts)
        ]
        lines, answers = dict[int, NotedRequest](), dict[int, list[int]]()
        num_open, progressed = len(requests), time.monotonic()
        with sending(self.complete, requests, asked.load) as sent:
            while num_open:
                lines |= {n: line for (n,), line in self._tail.noted(prefix, NotedRequest)}
                while not sent.empty():
                    number, answer = sent.get()
                    if isinstance(answer, EngineError):
                        raise EngineError(self._died() or str(answer))
                    answers[number] = answer
                both = lines.keys() & answers.keys()
                for number in sorted(both):
                    num_open -= 1
                    prompt, tokens = asked.prompts[number], answers.pop(number)
                    yield self._answer(asked, prompt, tokens, lines.pop(number), began)
                if both or not answers:
                    progressed = time.monotonic()
                elif time.monotonic() > progressed + NOTED_S:
                    fault = f"{self.folder} notes nothing of it: {self.agent_fault()}"
                    raise EngineError(f"{self.url} answers, but {fault}")
                time.sleep(LOOK_S)

    def _died(self) -> str:
        """Why the server ended, where that is known."""
        return ""

    def _answer(
        self,
        asked: ExecutionPlan,
        prompt: Prompt,
        tokens: Sequence[int],
        line: NotedRequest,
        began: float,
    ) -> Answered:
        steps = line.steps(self.draft, lambda version: self._policies.get(version, ""))
        shifted = [
            s._replace(arrived_s=s.arrived_s - began, ended_s=s.ended_s - began) for s in steps
        ]
        finish = "stop" if line.finish == "abort" else line.finish
        return asked.answered(prompt, tokens, finish, shifted, self._described.above_zero)


def server_url(url: str) -> str:
    """A server's URL without ``/v1``. Raises EngineError for what is no URL."""
    try:
        parsed = httpx2.URL(url if "://" in url else f"http://{url}")
        is_url = parsed.scheme in ("http", "https") and parsed.host and parsed.port != 0
    except httpx2.InvalidURL:
        is_url = False
    if not is_url:
        given = without_credentials(url)
        raise EngineError(f"--url {given}: a server's URL is expected, as http://localhost:8000")
    return str(parsed).rstrip("/").removesuffix("/v1")


def client_of(url: str) -> httpx2.Client:
    """What sends to a server, a connection a request, as idle ones end unannounced, with the name
    and the password of its URL, else the key of ``VLLM_API_KEY``, as the server itself reads it.
    Other variables hold keys of other hosts."""
    key = None if httpx2.URL(url).userinfo else os.environ.get("VLLM_API_KEY")
    return httpx2.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=ANSWER_S,
        limits=httpx2.Limits(max_keepalive_connections=0),
        trust_env=False,  # no proxy stands between us and a server whose speed is measured
    )


@contextmanager
def sending(
    complete: Callable[..., list[int]], requests: Sequence[Mapping[str, Any]], load: Load
) -> Iterator[queue.SimpleQueue[tuple[int, list[int] | EngineError]]]:
    """Sends requests as a load says, from threads of its own: ``clients`` at a time, or each at its
    arrival. Gives a queue of the number and the answer of each, or why there is none; a thread ends
    then. Leaving it sends no further ones."""
    answers: queue.SimpleQueue[tuple[int, list[int] | EngineError]] = queue.SimpleQueue()
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(requests)):
        waiting.put(number)
    ended, began = threading.Event(), time.perf_counter()

    def send() -> None:
        with suppress(queue.Empty):
            while not ended.is_set():
                number = waiting.get_nowait()
                moment = load.arrivals[number] if load.arrivals else 0.0
                if ended.wait(max(0.0, began + moment - time.perf_counter())):
                    return
                try:
                    answers.put((number, complete(**requests[number])))
                except EngineError as error:
                    answers.put((number, error))
                    return

    for _ in range(min(len(requests), MOST_SENDERS if load.arrivals else load.clients)):
        threading.Thread(target=send, daemon=True).start()
    try:
        yield answers
    finally:
        ended.set()
