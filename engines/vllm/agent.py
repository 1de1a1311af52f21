"""vLLM's scheduler, which also notes each round in files and drafts by a table from a file.

One file of the standard library: copied beside vLLM it is `--scheduler-cls agent.Scheduler`. The
environment names the folder (``SPECTUNE_FOLDER``) and whose tokens may be noted
(``SPECTUNE_TEXTS``: ``all``, ``none`` or a share of requests, of which ``policy.json`` may only
take less). Until a table is published vLLM's behaviour is its own, and whatever of ours fails, vLLM
goes on as without us, and its log and ``status.json`` say so once.

Beside the table in force ``policy.json`` may have a **trial**, a second table that takes turns with
it. A trial is over when it has not been renewed for its ``ttl_s``, by this process's monotonic
clock from when the renewal was read first: whoever stops renewing it has ended it.

Files are its user's alone. ``status.json`` holds a key, which is new with each start: a request
that carries it is retraced, so that only who may read the folder can ask for that.

The methods of :class:`Agent` that are named ``on_`` run in vLLM's thread and touch no file; a
thread of its own reads ``policy.json`` and writes ``rounds-*.jsonl`` and ``status.json``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import sys
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

LOG = logging.getLogger("vllm.spectune")
VERSIONS = ("0.32", "0.33")  # run in a capture; others check themselves first (compat.toml)
SELF_CHECK_ROUNDS = 256
POLL_S, RETRY_S, STATUS_S, PAUSE_S = 0.25, 1.0, 1.0, 0.0005
FILE_BYTES, MAX_FILES = 8 << 20, 64  # of all starts of the server together
MAX_LABELS, LABEL_CHARACTERS = 64, 100  # of a start; further labels are counted as one
OTHER_LABEL = "other"
IDS_AT_ONCE = 8192  # the most that are encoded while vLLM's thread waits
ROUNDS_FILE = re.compile(r"rounds-[0-9a-z]+-[0-9]+\.jsonl")
MAX_WAITING = 256  # finished requests that wait for the disk; more are dropped and counted
MAX_IN_FLIGHT = 64  # scheduled steps whose results are waited for
MAX_TTL_S = 600.0  # a trial is renewed more often


class GammaTable(NamedTuple):
    """Draft tokens by batch size from a context length on (the mean of the running requests'),
    longest first; None: vLLM's own choice."""

    version: int
    policy: str
    lookups: list[tuple[int, list[int] | None]]


class TableTrial(NamedTuple):
    """A table that drafts beside the one in force, in one block of each pair (``block_s`` 0:
    always), until ``ends_s``. Moments are of ``perf_counter``, but ``since``, in seconds since
    1970, when the first block began."""

    table: GammaTable
    seed: int
    block_s: float
    began_s: float
    ends_s: float
    since: float

    def drafts_at(self, now_s: float) -> bool:
        """Whether it drafts now; which block of a pair is its own is a hash of the pair's
        number."""
        if now_s >= self.ends_s or not self.block_s:
            return now_s < self.ends_s
        pair, block = divmod(int((now_s - self.began_s) / self.block_s), 2)
        return block == hashlib.sha256(f"{self.seed} {pair}".encode()).digest()[0] % 2


class Decoding:
    """A request while it is decoded: its rounds, and seconds that yielded no token yet. Of one that
    is retraced the ids that were drafted after each token are noted instead."""

    __slots__ = ("num_tokens", "proposals", "request", "rounds", "unspent_s")

    def __init__(self, request: Any, is_retraced: bool) -> None:
        self.request, self.num_tokens, self.unspent_s = request, 0, 0.0
        self.rounds: list[tuple[Any, ...]] = []
        self.proposals: list[Any] | None = [] if is_retraced else None


class Agent:
    """Notes what a scheduler decodes and sets its table; off until its thread has looked at it."""

    def __init__(self, scheduler: Any, folder: str) -> None:
        self.scheduler, self.folder, self.boot = scheduler, folder, os.urandom(6).hex()
        self.initial = self.table = self.applied = GammaTable(
            0, "", [(0, scheduler.dynamic_sd_lookup)]
        )
        self.trial: TableTrial | None = None
        self.renewal = 0  # the highest that was read
        self.active, self.refusal, self.unchecked = False, "", 0
        self.key, self.labels = f"retrace {os.urandom(16).hex()}", set[str]()
        self.allowed, self.wanted = 0.0, 0.0  # until the environment and policy.json are read
        self.decoding: dict[str, Decoding] = {}
        self.retraced: set[str] = set()
        self.draft_limit: int | None = None  # of others, beside requests that are retraced
        self.scheduled: deque[tuple[int, float, int]] = deque(maxlen=MAX_IN_FLIGHT)
        self.began_s, self.updated_s, self.num_sampled = 0.0, 0.0, list[int]()
        self.waiting: deque[Decoding] = deque()
        self.noted, self.dropped, self.fault, self.logged = 0, 0, "", set[str]()
        self.refused: dict[str, Any] | None = None
        self.engine, self.since = dict[str, Any](), time.time()
        self.policy_seen: Any = ()  # of policy.json: as it was read last, None where there is none
        self.path, self.size, self.number = "", 0, 0
        self.retry_at, self.status_at, self.status = 0.0, 0.0, dict[str, Any]()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, name="spectune", daemon=True)
        self.thread.start()

    # In vLLM's thread

    def on_schedule(self) -> None:
        table, trial, scheduler = self.table, self.trial, self.scheduler
        now_s = time.perf_counter()
        if trial is not None and trial.drafts_at(now_s):
            table = trial.table
        lookup, running = table.lookups[-1][1], scheduler.running
        if len(table.lookups) > 1:
            context = sum(r.num_computed_tokens for r in running) / max(1, len(running))
            lookup = next(each for least, each in table.lookups if context >= least)
        if scheduler.dynamic_sd_lookup is not lookup:
            scheduler.dynamic_sd_lookup = lookup
        if self.draft_limit is not None:
            for request in running:
                if request.request_id not in self.retraced:
                    request.spec_token_ids = request.spec_token_ids[: self.draft_limit]
            self.draft_limit = None
        self.applied, self.began_s = table, now_s

    def on_scheduled(self, output: Any) -> None:
        scheduler, batch = self.scheduler, len(output.num_scheduled_tokens)
        drafts, lookup = output.num_spec_tokens_to_schedule, scheduler.dynamic_sd_lookup
        if self.applied.version and lookup is not None and batch and drafts != lookup[batch]:
            raise RuntimeError(f"vLLM drafts {drafts} tokens where its table has {lookup[batch]}")
        self.scheduled.append((id(output), self.began_s, self.applied.version))
        for new in output.scheduled_new_reqs:
            request = scheduler.requests[new.req_id]
            if self.active and is_noted(request):
                is_retraced = self.share > 0 and extra(request, "spectune") == self.key
                text = self.decoding[new.req_id] = Decoding(request, is_retraced)
                if text.proposals is not None:
                    self.retraced.add(new.req_id)
        if len(self.decoding) > 2 * len(scheduler.requests) + 64:  # some ended where we do not look
            self.decoding = {n: d for n, d in self.decoding.items() if n in scheduler.requests}
        if self.retraced:
            self.on_retraced(output)

    def on_retraced(self, output: Any) -> None:
        """Has vLLM draft the most tokens for the requests that are retraced, and tell which."""
        requests, most = self.scheduler.requests, self.scheduler.num_spec_tokens
        self.retraced &= requests.keys()
        scheduled = [requests[n] for n in self.retraced & output.num_scheduled_tokens.keys()]
        decoded = [request for request in scheduled if not request.is_prefill_chunk]
        if not decoded:
            return
        drafts, drafted = output.scheduled_spec_decode_tokens, output.num_spec_tokens_to_schedule
        ahead = [r.num_output_placeholders - 1 - len(drafts.get(r.request_id, ())) for r in decoded]
        if drafted < most:
            self.draft_limit, output.num_spec_tokens_to_schedule = drafted, most
        # As for a grammar: vLLM's worker hands on the ids that it drafted, which it keeps to itself
        # where it schedules ahead, and samples when the scheduler has them.
        output.has_structured_output_requests = True
        output.pending_structured_output_tokens |= any(number > 0 for number in ahead)
        for request in decoded:
            request.spec_token_ids = [-1] * most

    def on_output(self, result: Any) -> None:
        self.num_sampled = [len(tokens) for tokens in result.sampled_token_ids]  # vLLM cuts them

    def on_updated(self, output: Any, result: Any) -> None:
        now_s, ended, step = time.perf_counter(), time.time(), (0, 0.0, 0)
        while self.scheduled and step[0] != id(output):
            step = self.scheduled.popleft()
        seconds, self.updated_s = now_s - max(step[1], self.updated_s), now_s
        names, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        invalid = output.num_invalid_spec_tokens or {}
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for name in names:
            text = self.decoding.get(name)
            if text is None:
                continue
            text.unspent_s += seconds
            request, start = text.request, text.num_tokens
            emitted = request.num_output_tokens - start
            if emitted <= 0:
                continue
            is_padded = not start or name in resumed  # of what vLLM has not drafted
            ids = [] if is_padded else drafts.get(name, [])
            drafted = len(ids) - invalid.get(name, 0) if ids else 0
            accepted = self.num_sampled[result.req_id_to_index[name]] - 1
            if accepted > drafted or (emitted != accepted + 1 and not request.is_finished()):
                self.on_odd_round(name, (start, drafted, accepted, emitted))
                continue
            self.unchecked -= self.unchecked > 0
            if start and text.proposals is not None:
                ids = [token for token in ids if token >= 0]
                text.proposals.append(None if is_padded else ids)
            counts = start, drafted, accepted, emitted
            text.rounds.append((*counts, step[2], text.unspent_s, len(names), ended))
            text.num_tokens, text.unspent_s = start + emitted, 0.0
            if request.is_finished():
                self.on_finished(name)

    def on_odd_round(self, name: str, counts: tuple[int, ...]) -> None:
        if self.unchecked:
            raise RuntimeError(f"its self-check fails: start, drafted, accepted, emitted {counts}")
        del self.decoding[name]
        self.dropped += 1

    def on_aborted(self) -> None:
        """Hands on what vLLM ended otherwise than by a step."""
        for name in [n for n, text in self.decoding.items() if text.request.is_finished()]:
            self.on_finished(name)

    def on_finished(self, name: str) -> None:
        """Hands on what ended; what vLLM aborted before its first token is no round."""
        text = self.decoding.pop(name)
        if text.rounds and not self.unchecked:
            if len(self.waiting) < MAX_WAITING:
                self.waiting.append(text)
            else:
                self.dropped += 1

    def on_fault(self, error: Exception) -> None:
        """Ends all that we do: vLLM's own table is in force again, and nothing is noted."""
        self.active, self.decoding = False, {}
        self.table, self.trial, self.applied = self.initial, None, self.initial
        if self.scheduler.dynamic_sd_lookup is not self.initial.lookups[0][1]:
            self.scheduler.dynamic_sd_lookup = self.initial.lookups[0][1]
        self.refusal = self.fault = f"off, and vLLM goes on without it: {error!r}"[:500]
        self.tell(self.fault)

    # In a thread of its own

    @property
    def share(self) -> float:
        """The share of requests whose tokens are noted: what ``policy.json`` wants of what the
        environment allows. It holds whatever else is refused or fails."""
        return min(self.allowed, self.wanted)

    def run(self) -> None:
        try:
            self.engine, self.refusal = description(self.scheduler), refusal(self.scheduler)
            if not self.refusal:
                self.allowed = share_of(os.environ.get("SPECTUNE_TEXTS", "all"))
            listed = any(vllm.__version__.startswith(f"{version}.") for version in VERSIONS)
            self.unchecked = 0 if listed else SELF_CHECK_ROUNDS
            self.active = not self.refusal
            if self.active:
                LOG.info("spectune: requests are noted in %s; its policy.json is read", self.folder)
        except Exception as error:
            self.refusal = self.fault = f"off, vLLM {vllm.__version__} is not known: {error!r}"
        while not self.stop.wait(POLL_S):
            self.turn()
        self.status_at = 0.0  # the last counts are not to wait
        self.turn()

    def turn(self) -> None:
        """One look at the policy, the requests that ended and the status."""
        for part in (self.read_policy, self.write_rounds, self.write_status):
            try:
                part()
            except Exception as error:
                self.fault = f"{self.folder}: {part.__name__}: {error!r}"[:500]
        self.tell(self.refusal or self.fault)
        if self.refused is not None and not self.refusal:
            self.tell(self.refused["reason"])

    def tell(self, line: str) -> None:
        """Writes a line to vLLM's log, once."""
        if line and line not in self.logged and len(self.logged) < 100:
            self.logged.add(line)
            LOG.warning("spectune: %s", line)

    def read_policy(self) -> None:
        """Puts in force what ``policy.json`` says; what it says wrongly leaves the last table."""
        path, table, trial = os.path.join(self.folder, "policy.json"), self.initial, None
        refused, document = None, None
        try:
            stat = os.stat(path)
            is_checked = not self.unchecked
            seen: Any = stat.st_mtime_ns, stat.st_size, stat.st_ino, self.refusal, is_checked
        except FileNotFoundError:
            seen = None
        if seen == self.policy_seen:
            return
        if seen is not None:
            table, trial = self.table, self.trial
            try:
                with open(path, "rb") as file:
                    document = json.load(file)
                self.wanted = share_of(document.get("texts", "all"))
                if document["format"] != 1:
                    raise ValueError("its format is not 1")
                table = self.table_of(document)
                trial, document = None, document.get("trial")
                if document is not None:
                    trial = self.trial_of(document)
            except Exception as error:  # of any shape, or half-written
                version = document.get("version") if isinstance(document, dict) else None
                refused = {"version": version, "reason": f"policy.json: {error}"}
        else:
            self.wanted = 1.0
        if table != self.table:
            self.since = time.time()
        self.table, self.trial, self.refused, self.policy_seen = table, trial, refused, seen

    def table_of(self, document: Any) -> GammaTable:
        """Raises ValueError for what is no policy, or none for this server."""
        version = document["version"]
        if type(version) is not int:
            raise ValueError("its version is no whole number")
        if not version:
            return self.initial
        if self.refusal or self.unchecked:
            raise ValueError(self.refusal or f"{SELF_CHECK_ROUNDS} rounds are checked first")
        by_context = {"0": document["gammas"], **document.get("contexts", {})}
        lookups = [(int(least), self.lookup_of(gammas)) for least, gammas in by_context.items()]
        lookups.sort(key=lambda pair: -pair[0])
        return GammaTable(version, str(document["policy"]), lookups)

    def trial_of(self, document: Any) -> TableTrial | None:
        """The trial of a renewal, which counts where it is for this start of the server and higher
        than those that were read: an old file prolongs nothing. Raises ValueError."""
        last, seed, renewal = self.trial, document["seed"], document["renewal"]
        block_s, ttl_s = float(document["block_s"]), float(document["ttl_s"])
        if not (type(seed) is type(renewal) is int and 0 < ttl_s <= MAX_TTL_S):
            raise ValueError(f"a trial's ttl_s is at most {MAX_TTL_S:g}, its numbers are whole")
        if block_s and not 1 <= block_s <= MAX_TTL_S:
            raise ValueError(f"a trial's block_s is 0, or 1 to {MAX_TTL_S:g}")
        if last is not None and last.table.version != document["version"]:
            last = None
        if document["boot"] != self.boot or renewal <= self.renewal:
            return last
        self.renewal, now_s = renewal, time.perf_counter()
        began_s, since = (now_s, time.time()) if last is None else (last.began_s, last.since)
        table = self.table_of(document)
        return TableTrial(table, seed, block_s, began_s, now_s + ttl_s, since)

    def lookup_of(self, gammas: dict[str, int]) -> list[int] | None:
        scheduler, limit = self.scheduler, self.scheduler.num_spec_tokens
        sizes = {int(size): tokens for size, tokens in gammas.items()}
        for tokens in sizes.values():
            if type(tokens) is not int or not 0 <= tokens <= limit:
                raise ValueError(f"this server drafts 0 to {limit} tokens, not {tokens!r}")
        lookup, tokens = [0], sizes[1]
        for size in range(1, scheduler.scheduler_config.max_num_seqs + 1):
            tokens = sizes.get(size, tokens)
            lookup.append(tokens)
        is_own = self.initial.lookups[0][1] is None and set(lookup[1:]) == {limit}
        return None if is_own else lookup  # vLLM's padding stays

    def write_rounds(self) -> None:
        """Appends a line for each request that ended. What cannot be written waits."""
        while self.waiting and time.monotonic() >= self.retry_at:
            try:
                text = self.waiting[0]
                line = line_of(text, self.share, self.label_of(text.request))
            except Exception:
                self.waiting.popleft()
                self.dropped += 1
                raise
            try:
                self.append(line)
            except OSError:
                self.retry_at = time.monotonic() + RETRY_S
                raise
            self.waiting.popleft()
            self.noted += 1
            time.sleep(PAUSE_S)  # vLLM's thread goes first
        if self.active and not self.waiting:
            self.fault = ""

    def label_of(self, request: Any) -> str | None:
        """A request's label as it is noted: clients choose it, so it and their number are
        bounded."""
        label = extra(request, "spectune_label")
        if label is None:
            return None
        name = "".join(c if c.isprintable() else " " for c in str(label)[:LABEL_CHARACTERS])
        if name not in self.labels and len(self.labels) >= MAX_LABELS:
            return OTHER_LABEL
        self.labels.add(name)
        return name

    def append(self, line: bytes) -> None:
        """Adds a line to the newest file, or a new one: all of it or, with an OSError, nothing."""
        if self.size >= FILE_BYTES or not os.path.exists(self.path):
            self.rotate()
        with open(self.path, "ab", buffering=0, opener=private) as file:
            if file.write(line) != len(line):
                file.truncate(self.size)
                raise OSError(f"no space for {self.path}")
        self.size += len(line)

    def rotate(self) -> None:
        path = os.path.join(self.folder, f"rounds-{self.boot}-{self.number + 1:06d}.jsonl")
        first = json.dumps({"engine": self.engine}).encode() + b"\n"
        with open(path, "wb", opener=private) as file:
            file.write(first)
        self.path, self.size, self.number, self.status = path, len(first), self.number + 1, {}
        self.bound_files()

    def bound_files(self) -> None:
        """Removes the oldest files of all starts beyond the limit, and counts what was in them;
        those that were brought in are gone already."""
        paths = [os.path.join(self.folder, name) for name in os.listdir(self.folder)]
        files = [path for path in paths if ROUNDS_FILE.fullmatch(os.path.basename(path))]
        try:
            files.sort(key=lambda path: (path == self.path, os.stat(path).st_mtime_ns, path))
            for path in files[:-MAX_FILES]:
                with open(path, "rb") as file:
                    lines = sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 16), b""))
                os.unlink(path)
                self.dropped += max(0, lines - 1)  # but the first, which tells the engine
        except FileNotFoundError:
            pass  # brought in meanwhile: the next file is bounded again

    def write_status(self) -> None:
        """Writes ``status.json`` where more than counts changed, else once a second: who reads it
        knows by ``at`` that vLLM still runs."""
        refused = {"version": 0, "reason": self.refusal} if self.refusal else None
        in_force = {"version": self.table.version, "policy": self.table.policy}
        counts = {"noted": self.noted, "dropped": self.dropped}
        trial = None if self.trial is None else described(self.trial)
        document = {
            "format": 1, "boot": self.boot, "pid": os.getpid(), "engine": self.engine,
            "in_force": {**in_force, "since": self.since}, "refused": self.refused or refused,
            "trial": trial, "renewal": self.renewal,
            "fault": self.fault or None, "retrace": self.key if self.share > 0 else None, **counts,
        }  # fmt: skip
        now, is_soon = time.time(), time.time() < self.status_at + STATUS_S
        if is_soon and document == {**self.status, **counts}:
            return
        path = os.path.join(self.folder, "status.json")
        new = f"{path}.{self.boot}"  # whole, even where two servers were given one folder
        with open(new, "w", opener=private) as file:
            json.dump({**document, "at": now}, file)
        os.replace(new, path)
        self.status, self.status_at = document, now

    def close(self) -> None:
        self.stop.set()
        self.thread.join(1.0)


def described(trial: TableTrial) -> dict[str, Any]:
    """What ``status.json`` says of a trial."""
    about = {"version": trial.table.version, "policy": trial.table.policy, "since": trial.since}
    return {**about, "is_over": time.perf_counter() >= trial.ends_s}


def private(path: str, flags: int) -> int:
    """Opens a file; a new one is its user's alone."""
    return os.open(path, flags, 0o600)


def share_of(texts: Any) -> float:
    """``all``, ``none`` or a share as a number. Raises ValueError."""
    try:
        share = float({"all": 1.0, "none": 0.0}.get(texts, texts))
        if 0 <= share <= 1:
            return share
    except (TypeError, ValueError):
        pass
    raise ValueError(f"texts {texts!r}: all, none or a share of requests is expected")


def encoded(ids: Sequence[int]) -> str:
    """Token ids as base64 of 32-bit whole numbers, lowest byte first. A part at a time, so that a
    long prompt does not hold the interpreter."""
    parts = bytearray()
    for start in range(0, len(ids), IDS_AT_ONCE):
        part = array("i", ids[start : start + IDS_AT_ONCE])
        if sys.byteorder == "big":
            part.byteswap()
        parts += part.tobytes()
        time.sleep(0)  # vLLM's thread goes first
    return base64.b64encode(parts).decode()


def extra(request: Any, key: str) -> Any:
    """What a client says of a request by vLLM's ``vllm_xargs``; None: nothing."""
    params = request.sampling_params
    return None if params is None else (params.extra_args or {}).get(key)


def is_noted(request: Any) -> bool:
    """Whether a request is text alone, of the served model, and was not opted out."""
    if request.sampling_params is None or not request.prompt_token_ids:
        return False
    other = request.lora_request is not None or request.mm_features or request.resumable
    return not other and extra(request, "spectune") != "off"


def line_of(text: Decoding, share: float, label: str | None) -> bytes:
    """A request as a line of JSON. ``share``: of the requests whose tokens are noted."""
    request, params, name = text.request, text.request.sampling_params, text.request.request_id
    prompt, output = request.prompt_token_ids, request.output_token_ids
    if text.proposals is not None and share > 0:
        line = {"id": name, "output": encoded(output), "proposals": text.proposals}
        return json.dumps(line).encode() + b"\n"
    stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    finish = {"FINISHED_LENGTH_CAPPED": "length", "FINISHED_STOPPED": "stop"}.get(
        request.status.name, "stop" if stop else "abort"  # vLLM aborts at a stop string
    )  # fmt: skip
    if request.status.name == "FINISHED_STOPPED" and not request.stop_reason:
        finish = "eos"
    tokens: dict[str, Any]
    if zlib.crc32(name.encode()) / 2**32 < share:
        tokens = {"prompt": encoded(prompt), "output": encoded(output)}
    else:
        tokens = {"prompt": None, "output": None, "n_prompt": len(prompt), "n_output": len(output)}
        stop = []
    line = {
        **tokens, "id": name, "arrived": request.arrival_time, "ended": text.rounds[-1][-1],
        "temperature": params.temperature, "top_k": max(0, params.top_k), "top_p": params.top_p,
        "seed": params.seed, "max_tokens": request.max_tokens, "stop": stop, "finish": finish,
        "label": label, "rounds": [(*r[:5], round(r[5], 7), *r[6:]) for r in text.rounds],
    }  # fmt: skip
    return json.dumps(line).encode() + b"\n"


def refusal(scheduler: Any) -> str:
    """Why nothing is noted or followed in this server; empty where it is."""
    config = scheduler.vllm_config
    parallel, speculative = config.parallel_config, config.speculative_config
    try:
        share_of(os.environ.get("SPECTUNE_TEXTS", "all"))
    except ValueError as error:
        return f"SPECTUNE_TEXTS: {error}"
    for name in ("data_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name) > 1:
            return f"{name} {getattr(parallel, name)}: only 1 is followed"
    if getattr(speculative, "enable_adaptive_verification", False):
        return "adaptive verification chooses how many tokens are verified"
    seats, lookup = scheduler.scheduler_config.max_num_seqs, scheduler.dynamic_sd_lookup
    flat = isinstance(lookup, list) and all(type(tokens) is int for tokens in lookup)
    if lookup is not None and not (flat and len(lookup) == seats + 1):
        return f"dynamic_sd_lookup of vLLM {vllm.__version__} has an unknown shape"
    return ""


def description(scheduler: Any) -> dict[str, Any]:
    """What ``status.json`` says of the engine."""
    config = scheduler.vllm_config
    draft, cache, method = config.speculative_config, config.cache_config, None
    if draft is not None:
        method = draft.method
    ngram = str(method).startswith("ngram")
    sampled = getattr(draft, "draft_sample_method", "greedy") != "greedy"
    rates = getattr(draft, "synthetic_acceptance_rates", None)
    return {
        "engine": "vllm",
        "engine_version": vllm.__version__,
        **hardware(config),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "method": method,
        "model": config.model_config.model,
        "draft_model": None if draft is None or ngram else draft.model,
        "prompt_lookup": [draft.prompt_lookup_min, draft.prompt_lookup_max] if ngram else None,
        "num_speculative_tokens": scheduler.num_spec_tokens,
        "gammas": gammas_of(scheduler),
        "above_zero": "rejection" if sampled else "greedy",
        "accepts_none": not any(rates or (1,)),
        "by_priority": getattr(scheduler.scheduler_config, "policy", "fcfs") == "priority",
        "serving": {
            "max_num_seqs": scheduler.scheduler_config.max_num_seqs,
            "max_batched_tokens": scheduler.scheduler_config.max_num_batched_tokens,
            "draft_slots": 0 if draft is None else draft.max_num_new_slots_for_drafting,
            "max_len": config.model_config.max_model_len,
            "drafts_up_to": drafts_up_to(scheduler),
            "cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
            "ahead": config.max_concurrent_batches - 1,
        },
    }


def hardware(config: Any) -> dict[str, Any]:
    """The device, and by name what ranks of the model run on; None: it has none."""
    device, ranks = str(config.device_config.device_type), config.parallel_config.world_size
    platforms = None if device == "cpu" else sys.modules.get("vllm.platforms")
    name = None
    try:
        if platforms is not None:
            name = str(platforms.current_platform.get_device_name())
    except Exception as error:  # of a platform that names none
        LOG.warning("spectune: the device has no name: %r", error)
    return {"device": device, "hardware": f"{ranks} x {name}" if name and ranks > 1 else name}


def gammas_of(scheduler: Any) -> dict[str, int] | None:
    """By the batch size from which on it holds, what the server drafts by itself where it was
    started with a table."""
    lookup = scheduler.dynamic_sd_lookup
    if not isinstance(lookup, list):
        return None
    sizes = range(1, len(lookup))
    return {str(n): lookup[n] for n in sizes if n == 1 or lookup[n] != lookup[n - 1]}


def drafts_up_to(scheduler: Any) -> int:
    """Tokens of the longest text of a step up to which vLLM drafts, as its first model runner has
    it: beyond its draft's own length no request of the step gets a draft. 0: of any length."""
    config, draft = scheduler.vllm_config, scheduler.vllm_config.speculative_config
    if draft is None or getattr(config, "use_v2_model_runner", False):
        return 0
    own = getattr(getattr(draft, "draft_model_config", None), "max_model_len", None)
    longest = own or config.model_config.max_model_len
    return int(max(1, longest - scheduler.num_spec_tokens - (draft.method == "dflash")))


def start(scheduler: Any) -> None:
    try:
        scheduler._spectune = Agent(scheduler, os.environ["SPECTUNE_FOLDER"])
    except KeyError:
        LOG.warning("spectune: off: SPECTUNE_FOLDER is not set")
    except Exception as error:
        LOG.warning("spectune: off, and vLLM goes on without it: %r", error)


def guarded(scheduler: Scheduler, hook: str, *args: Any) -> None:
    """Calls a method of the agent, where there is one, and ends all that we do where it fails."""
    try:
        if scheduler._spectune is not None:
            getattr(scheduler._spectune, hook)(*args)
    except Exception as error:
        try:
            agent, scheduler._spectune = scheduler._spectune, None
            if agent is not None:
                agent.on_fault(error)
        except Exception:
            pass


class Scheduler(AsyncScheduler):
    """vLLM's own scheduler: each method is vLLM's, with ours in a guard before or after it."""

    _spectune: Agent | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            start(self)
        except Exception:
            pass

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        guarded(self, "on_schedule")
        output = super().schedule(*args, **kwargs)
        guarded(self, "on_scheduled", output)
        return output

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        guarded(self, "on_output", model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        guarded(self, "on_updated", scheduler_output, model_runner_output)
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        ended = super().finish_requests(*args, **kwargs)
        guarded(self, "on_aborted")
        return ended

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        guarded(self, "close")
        return super().shutdown(*args, **kwargs)
