"""The folder between vLLM's agent and `follow`: what the agent notes is read here, and
``policy.json``, which the agent obeys, is written."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from spectune.engines.abilities import VLLM
from spectune.engines.engine import chain_round
from spectune.runtime.policies.document import ByLoadWindow, FixedWindow, Policy
from spectune.traces.errors import TraceError
from spectune.traces.files import replacing
from spectune.traces.schema import Sampling, Step, Tokens, Verifier, device_name
from spectune.traces.tables import Trajectory
from spectune.traces.text import one_line

FORMAT = 1
CHUNK = 1 << 17
"""Bytes of a file that are read, and brought into the database, at a time: other writers wait for
no more."""
LABEL_LIMIT = 100
UNLABELLED = "serve"
"""The category of requests without a label."""
SENT = "spectune-"
"""Id prefix of requests sent by a tuning, which are no traffic."""
_ROUNDS = re.compile(r"rounds-([0-9A-Za-z]{1,64})-(\d{6})\.jsonl")

Whole = Annotated[int, Field(ge=0, lt=2**31)]
Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]


def _decoded(text: Any) -> npt.NDArray[np.int32]:
    """Token ids from base64 of 32-bit whole numbers, lowest byte first. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError("token ids are expected as base64")
    ids = np.frombuffer(base64.b64decode(text, validate=True), "<i4").astype(np.int32)
    if ids.min(initial=0) < 0:
        raise ValueError("a token id below 0")
    return ids


TokenIds = Annotated[npt.NDArray[np.int32], PlainValidator(_decoded)]


class _Noted(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", allow_inf_nan=False, arbitrary_types_allowed=True
    )


class ServerDescription(_Noted):
    """A server as its agent describes it. ``gammas``: what it drafts by itself, by the batch size
    from which on it holds (None: always the most)."""

    model_config = ConfigDict(extra="allow")

    engine: Literal["vllm"]
    engine_version: str
    device: str
    model: str
    method: str | None = None
    draft_model: str | None = None
    num_speculative_tokens: Whole | None = None
    gammas: dict[str, Whole] | None = None
    hardware: str | None = None
    above_zero: Verifier = "greedy"
    serving: dict[str, Any]

    @property
    def about(self) -> dict[str, Any]:
        """All that the agent says."""
        return self.model_dump(exclude_unset=True, exclude_none=True)

    @property
    def max_num_seqs(self) -> int:
        return int(self.serving.get("max_num_seqs", 256))

    @property
    def max_len(self) -> int:
        return int(self.serving.get("max_len", 2**31 - 1))

    @property
    def device_name(self) -> str:
        """What policies are published for that it follows."""
        return device_name(self.device, self.hardware)


def _reason(error: ValidationError) -> str:
    """The first thing that is wrong, with its key."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


class InForce(_Noted):
    version: int = 0
    policy: str | None = None


class Tried(InForce):
    """A trial that the agent knows: ``since`` its first block began, in seconds since 1970, and
    whether it ``is_over``, as nobody renewed it."""

    since: Moment = 0.0
    is_over: bool = False


class Refused(_Noted):
    """``version`` is None or 0 where the agent refuses whatever is in ``policy.json``."""

    version: int | None = None
    reason: str = ""


class Status(_Noted):
    """``status.json``: which boot of the server writes, what is in force there, what is tried
    beside it and the last ``renewal`` of a trial that was read, what its agent refused, why it
    failed, how many requests it dropped, when it said so, and what a request says in ``spectune``
    of ``vllm_xargs`` to be retraced (None: no texts are noted, and none is)."""

    boot: str = Field(pattern=r"^[0-9A-Za-z]{1,64}$")
    engine: ServerDescription
    in_force: Annotated[InForce, BeforeValidator(lambda value: value or {})] = InForce()
    trial: Tried | None = None
    renewal: int = 0
    refused: Refused | None = None
    fault: str | None = None
    retrace: str | None = None
    dropped: int = 0
    at: Moment = 0.0


class Off(_Noted):
    """``status.json`` of an agent that could not tell how its server serves."""

    engine: dict[str, Any] = Field(max_length=0)
    fault: str


class NotedRound(NamedTuple):
    """``version``: of the table that the round was drafted by: of a publication, below 0 of a
    trial, 0 for the server's own."""

    start: Whole
    drafted: Whole
    accepted: Whole
    emitted: Whole
    version: int
    seconds: float
    batch: Whole
    ended: Moment


class NotedRequest(_Noted):
    """A finished request. ``prompt`` and ``output`` are None where its tokens are not noted."""

    id: str
    arrived: Moment
    ended: Moment
    prompt: TokenIds | None = None
    output: TokenIds | None = None
    n_prompt: Whole = 0
    n_output: Whole = 0
    temperature: float = Field(0.0, ge=0)
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: Whole | None = None
    stop: list[str] = []
    finish: Literal["length", "eos", "stop", "abort"]
    label: str | None = None
    rounds: list[NotedRound]

    @property
    def category(self) -> str:
        return one_line(self.label or "", LABEL_LIMIT) or UNLABELLED

    @property
    def is_sent(self) -> bool:
        """Whether a tuning sent it (:data:`SENT`)."""
        return self.id.startswith(f"cmpl-{SENT}")

    @property
    def sampling(self) -> Sampling:
        if self.temperature == 0:
            return Sampling()
        return Sampling(self.temperature, max(0, self.top_k), self.top_p)

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the prompt and of the output."""
        if self.prompt is None or self.output is None:
            return self.n_prompt, self.n_output
        return len(self.prompt), len(self.output)

    def is_within(self, share: float) -> bool:
        """Whether it is among this share of requests, as the agent chooses them by their ids."""
        return zlib.crc32(self.id.encode()) / 2**32 < share

    def trajectory(self, engine: ServerDescription, *, with_text: bool = True) -> Trajectory:
        """The request; without its text where that was not noted, too."""
        tokens = None
        if with_text and self.prompt is not None and self.output is not None and len(self.prompt):
            tokens = Tokens(self.prompt, self.output)
        request = Trajectory(
            self.id,
            self.category,
            tokens,
            self.sampling,
            engine.max_len if self.max_tokens is None else self.max_tokens,
            "stop" if self.finish == "abort" else self.finish,
            "coupled" if self.sampling.greedy else engine.above_zero,
            () if tokens is None else tuple(self.stop),
        )
        request.n_prompt, request.n_output = self.lengths
        return request

    def steps(self, draft: str, policy_of: Callable[[int], str]) -> tuple[Step, ...]:
        """The rounds, their times in seconds since 1970; ``policy_of`` names a table's policy."""
        return tuple(
            chain_round(
                *r[:4],
                draft=draft,
                policy=policy_of(r.version),
                round_s=r.seconds,
                batch=r.batch,
                arrived_s=self.arrived,
                ended_s=r.ended,
            )
            for r in self.rounds
        )


class RetracedRequest(_Noted):
    """A request that was retraced: its tokens, and those that were drafted after each of them but
    the last."""

    id: str
    output: TokenIds
    proposals: list[list[Whole] | None]


N = TypeVar("N", NotedRequest, RetracedRequest)


def parse_line(text: bytes) -> NotedRequest | ServerDescription | RetracedRequest:
    """A line of a rounds file: a request, the engine that served those which follow, or what was
    drafted for one that was retraced. Raises TraceError with what is wrong in it."""
    try:
        document = json.loads(text)
        if isinstance(document, dict) and "engine" in document:
            return ServerDescription.model_validate(document["engine"])
        if isinstance(document, dict) and "proposals" in document:
            return RetracedRequest.model_validate(document)
        line = NotedRequest.model_validate(document)
    except ValidationError as error:
        raise TraceError(_reason(error)) from None
    except (ValueError, RecursionError):  # among them bytes that are no UTF-8
        raise TraceError("not JSON") from None
    if "\0" in line.id or "\0" in line.category or any("\0" in stop for stop in line.stop):
        raise TraceError("a NUL character")
    start = 0
    for n, r in enumerate(line.rounds):
        if r.start != start or r.accepted > r.drafted or r.emitted > r.accepted + 1:
            raise TraceError(f"round {n} does not follow from those before it")
        start += r.emitted
    if line.rounds and start != line.lengths[1]:
        raise TraceError(f"its rounds have {start} tokens, its output {line.lengths[1]}")
    return line


def rounds_files(folder: Path) -> dict[str, dict[int, Path]]:
    """The rounds files by boot and number, in order. Raises OSError."""
    boots: dict[str, dict[int, Path]] = {}
    for name in sorted(os.listdir(folder)):
        if match := _ROUNDS.fullmatch(name):
            boots.setdefault(match[1], {})[int(match[2])] = folder / name
    return boots


class Line(NamedTuple):
    """A line of a file, and the bytes of it that it begins and ends at."""

    text: bytes
    start: int
    end: int


def read_lines(path: Path, offset: int) -> list[Line]:
    """The lines from ``offset`` on that are ended, about :data:`CHUNK` bytes. Raises OSError."""
    with path.open("rb") as file:
        file.seek(offset)
        texts = [text for text in file.readlines(CHUNK) if text.endswith(b"\n")]
    places = pairwise(accumulate(map(len, texts), initial=offset))
    return [Line(text, *place) for text, place in zip(texts, places, strict=True)]


class Tail:
    """The lines that the agent of a boot appends from now on."""

    def __init__(self, folder: Path, boot: str) -> None:
        self._folder, self._boot = folder, boot
        self._number, self._rest = 0, b""
        self._file: BinaryIO | None = None
        if files := self._later_files():
            self._open(max(files), files).seek(0, os.SEEK_END)

    def lines(self) -> Iterator[bytes]:
        """Those since the last call. Raises OSError."""
        while True:
            files = self._later_files()
            if self._file is not None:  # also where `follow` has removed it
                *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
                yield from lines
            if not files:
                return
            self._open(min(files), files)

    def noted(self, prefix: str, kind: type[N]) -> Iterator[tuple[list[int], N]]:
        """Lines of a ``kind`` since the last call, of requests whose ids begin with ``prefix``,
        each with the numbers that follow in its id, points between them. Raises OSError, and
        TraceError for a line that cannot be read."""
        for text in self.lines():
            if prefix.encode() in text and isinstance(line := parse_line(text), kind):
                numbers = line.id.partition(prefix)[2].partition("-")[0]
                yield [int(number) for number in numbers.split(".")], line

    def _later_files(self) -> dict[int, Path]:
        files = rounds_files(self._folder).get(self._boot, {})
        return {number: path for number, path in files.items() if number > self._number}

    def _open(self, number: int, files: Mapping[int, Path]) -> BinaryIO:
        if self._file is not None:
            self._file.close()
        self._number, self._file = number, files[number].open("rb")
        return self._file


def read_status(folder: Path) -> Status | None:
    """What ``status.json`` says; None where no agent has written it yet. Raises TraceError."""
    file = folder / "status.json"
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TraceError(f"{file}: cannot be read ({error.strerror})") from None
    with suppress(ValidationError):
        raise TraceError(f"{file}: the agent is {Off.model_validate_json(text).fault}")
    try:
        return Status.model_validate_json(text)
    except ValidationError as error:
        raise TraceError(f"{file}: {_reason(error)}") from None


def write_policy(folder: Path, document: Mapping[str, Any]) -> None:
    """Replaces ``policy.json`` in one step. Raises TraceError."""
    try:
        with replacing(folder / "policy.json") as file:
            file.write(json.dumps({"format": FORMAT, **document}).encode())
    except OSError as error:
        raise TraceError(f"{folder}/policy.json: cannot be written ({error.strerror})") from None


def read_policy(folder: Path) -> Mapping[str, Any]:
    """What ``policy.json`` says; empty where there is none, or nothing that can be read."""
    try:
        document = json.loads((folder / "policy.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def version_of(document: Mapping[str, Any]) -> int:
    """The version that ``policy.json`` names: of a publication, 0 for the server's own number of
    draft tokens, or nothing that can be read."""
    version = document.get("version")
    return version if type(version) is int else 0


def object_in(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key; empty where there is none."""
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def trial_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``policy.json`` says of a trial; empty where there is none."""
    return object_in(document, "trial")


def without_trial(document: Mapping[str, Any]) -> dict[str, Any]:
    """What ``policy.json`` says of the policy in force."""
    return {key: value for key, value in document.items() if key != "trial"}


def renewed(trial: Mapping[str, Any], status: Status, last: int, ttl_s: float) -> dict[str, Any]:
    """A trial (its version, table, ``seed`` and ``block_s``) for ``ttl_s`` seconds from when the
    agent that wrote a status reads it. ``last``: the renewal that was written last, 0 for none."""
    renewal = max(int(time.time()), status.renewal + 1, last + 1)
    return {**trial, "boot": status.boot, "ttl_s": ttl_s, "renewal": renewal}


def is_candidates(seed: int, block: int) -> bool:
    """Whether a block of a trial is the candidate's, as the agent has it
    (``TableTrial.drafts_at``)."""
    pair, place = divmod(block, 2)
    return place == hashlib.sha256(f"{seed} {pair}".encode()).digest()[0] % 2


def seed_for(seed: int, boot: str) -> int:
    """The seed by which a boot of a server takes turns in a rollout: each in an order of its own,
    so that what all servers see at once is not the candidate's everywhere."""
    return (seed + zlib.crc32(boot.encode())) % 2**31


def own_policy(about: Mapping[str, Any], draft: str) -> Policy:
    """What a server of an agent's description drafts by itself, with its ``draft``."""
    if draft == "none":
        return Policy()
    gammas = about.get("gammas") or {"1": about.get("num_speculative_tokens") or 0}
    return policy_by(draft, gammas, {})


def policy_by(draft: str, gammas: Mapping[str, int], contexts: Mapping[str, Any]) -> Policy:
    """A table of ``policy.json`` as a policy."""
    window: FixedWindow | ByLoadWindow = FixedWindow(gamma=gammas["1"])
    if len(gammas) > 1 or contexts:
        table = {"kind": "by_load", "gamma": gammas, "contexts": contexts}
        window = ByLoadWindow.model_validate(table)
    return Policy(draft=draft, window=window)


def table_of(policy: Policy, engine: ServerDescription, draft: str) -> dict[str, Any]:
    """What ``policy.json`` says of a policy beside its version: draft tokens by the batch size from
    which they hold, on a server that has loaded ``draft``. Raises PolicyError for what it cannot
    run."""
    VLLM.runs_with(policy, draft=draft, most=engine.num_speculative_tokens or 0)
    window = policy.window
    if not isinstance(window, ByLoadWindow):
        return {"policy": policy.id, "gammas": {"1": policy.gamma_max}}
    contexts = {"contexts": window.contexts} if window.contexts else {}
    return {"policy": policy.id, "gammas": window.gamma, **contexts}
