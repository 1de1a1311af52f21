"""The processes of the chaos run: each does one thing with the product's functions and notes it.

A role returns at SIGTERM. It waits out what the product says may be waited out, a
:class:`db.DatabaseError`; anything else ends the process, and the run has failed. A role that is
started again reads its own notes and goes on with what it had begun, as a client does that never
heard whether its publication was made.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectune.db import DatabaseError, open_database
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.jobs import tuning_job
from spectune.optimizer.schedule import Ended, Job, JobContext, run_worker
from spectune.optimizer.serving import watch
from spectune.optimizer.tune import TuneOptions, tune
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import load_pair
from spectune.runtime.loop import PolicySource, StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.prepare import prepare
from spectune.traces.schema import Request, Sampling
from spectune.traces.store import TraceStore

LEASE_S, POLL_S, RETRY_S, LOOK_S, TEXT_EVERY_S = 3.0, 0.5, 0.2, 0.02, 1.0
TEXT_TOKENS = 12
STOPS = {"kind": "max_prob", "threshold": 0.3}
GOOD: tuple[dict[str, Any], ...] = (
    *({"draft": "near", "window": {"kind": "fixed", "gamma": g}} for g in (1, 2, 3, 5, 8)),
    {"draft": "far", "window": {"kind": "fixed", "gamma": 2}},
    {"draft": "ngram", "window": {"kind": "fixed", "gamma": 4}},
    {"draft": "near", "window": {"kind": "cache_fsm", "gamma_max": 5}},
    {"draft": "near", "window": {"kind": "analytic", "gamma_max": 4}},
    {"draft": "far", "window": {"kind": "heuristic"}, "stop": STOPS},
    {},
)
"""What is published: every one can run on the tiny pairs. The last is autoregression."""
SLOW = {"draft": "far", "window": {"kind": "fixed", "gamma": 12}}
"""Good, but slower than anything a search finds, so that a tuner has something to publish."""
SEARCH: dict[str, int] = {"gamma_max": 6, "trials": 20, "finalists": 2, "tree_width": 0}
TUNE_TOKENS = 24
STOP = threading.Event()


@dataclass(frozen=True)
class Place:
    """Where a role works: the database, the folder of notes and logs, its name and its seed."""

    url: str
    folder: Path
    name: str
    seed: int

    def note(self, event: str, **values: Any) -> None:
        """Adds an event to the notes, in one write that survives kill -9."""
        line = json.dumps({"at": time.time(), "event": event, **values}) + "\n"
        with open(self.folder / f"{self.name}.jsonl", "ab", buffering=0) as file:
            file.write(line.encode())


def read_notes(folder: Path, name: str, event: str) -> list[dict[str, Any]]:
    """A role's events of one kind so far, oldest first."""
    path = folder / f"{name}.jsonl"
    notes = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [note for note in notes if note["event"] == event]


def play(place: Place, role: Callable[..., None], *arguments: Any) -> None:
    """Runs a role in this process, its output in ``NAME.log``. It does not outlive the run."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    log = os.open(place.folder / f"{place.name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for output in (1, 2):
        os.dup2(log, output)
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: STOP.set())
    with open_database(place.url) as database:
        role(place, TraceStore(database), *arguments)


def watcher(place: Place, store: TraceStore, pair_file: Path) -> None:
    """A decoder that follows publications and decodes: its text is always autoregression's."""
    pair = load_pair(read_pair(str(pair_file)), device="cpu")
    seen = -1

    def look(source: PolicySource) -> None:
        nonlocal seen
        if source.current().version != seen:
            seen = source.current().version
            place.note("in force", version=seen)

    def text(source: PolicySource) -> list[int]:
        decoder, tokens = Decoder(pair, source), []
        prompt = Request("r", "a", ("x",)), pair.encode("def add(a, b):")
        for item in decoder.rounds(decoder.request(*prompt, Sampling(), TEXT_TOKENS)):
            tokens += item.tokens
            if not isinstance(source, StaticSource):
                look(source)
        return tokens

    costs = store.latest_profile(pair.id, "cpu")
    # Each kind is decoded with once, so that no compiler is at work later.
    profile = costs and costs.profile
    ready = [prepare(parse_policy(d), pair.draft_names, profile=profile) for d in GOOD]
    expected = [text(StaticSource(policy)) for policy in ready][-1]
    with watch(store, pair, None, None, node=place.name) as source:
        place.note("ready", pair=pair.id)
        decode_at = 0.0
        while not STOP.wait(LOOK_S):
            look(source)
            if time.monotonic() >= decode_at:
                place.note("text", version=seen, same=text(source) == expected)
                decode_at = time.monotonic() + TEXT_EVERY_S


def put(store: TraceStore, pair_id: str, document: Mapping[str, Any], key: str, **said: Any) -> int:
    """Publishes a policy under a key; the version."""
    policy = parse_policy(dict(document))
    store.put_policy(policy.id, policy.spelled_out(), policy.label())
    return store.publish(
        pair_id, "cpu", policy.id, reason="chaos", idempotency_key=key, **said
    ).version


def again_and_again(
    place: Place,
    gap_s: tuple[float, float],
    times: Sequence[int],
    call: Callable[[str], int | None],
) -> None:
    """Calls with one key after another, each until it is answered.

    SIGTERM does not end what was begun. A call is made ``times`` (one of them, by chance), as if
    its answer had not been heard.
    """
    done, begun = (
        {note["key"] for note in read_notes(place.folder, place.name, event)}
        for event in ("answered", "begin")
    )
    place.note("ready")
    for key in (f"{place.name}:{number}" for number in itertools.count()):
        chance = random.Random(f"{place.seed} {key}")
        if key in done:
            continue
        if key not in begun:
            if STOP.wait(chance.uniform(*gap_s)):
                return
            place.note("begin", key=key)
        left = chance.choice(times)
        while left:
            try:
                place.note("answered", key=key, version=call(key))
                left -= 1
            except DatabaseError:
                time.sleep(RETRY_S)


def publisher(place: Place, store: TraceStore, pair_id: str) -> None:
    """Publishes good policies, one under each key; now and then it asks twice."""

    def publish(key: str) -> int:
        return put(store, pair_id, random.Random(key).choice(GOOD), key, actor=place.name)

    again_and_again(place, (5.0, 10.0), (1, 1, 1, 2), publish)


def tuner(place: Place, store: TraceStore, pair_file: Path, workload: Path) -> None:
    """Tunes again and again: record, search, execute, publish."""
    pair = load_pair(read_pair(str(pair_file)), device="cpu")
    requests = load_workload([str(workload)])

    def once(key: str) -> int | None:
        options = DecodeOptions(Sampling(seed=int(key.split(":")[1])), TUNE_TOKENS)
        more: dict[str, Any] = {"actor": place.name, "idempotency_key": key, **SEARCH}
        wanted = TuneOptions(options=options, budget_s=3.0, **more)
        published = tune(store, pair, requests, wanted).published
        return published.version if published else None

    again_and_again(place, (4.0, 4.0), (1,), once)


def worker(place: Place, store: TraceStore) -> None:
    """A worker as `schedule run` is one: it tunes what names a pair, and else does a short job."""
    tunes = tuning_job(store)
    ended: list[Any] = []

    def execute(job: Job, context: JobContext) -> Mapping[str, Any]:
        place.note("attempt", key=job.idempotency_key, attempt=job.attempt)
        return (tunes if "pair" in job.payload else short_job)(job, context)

    def short_job(job: Job, context: JobContext) -> dict[str, Any]:
        """A few steps, then one publication under the job's key, fenced by the claim."""
        key = job.idempotency_key
        chance = random.Random(key)
        for _ in range(chance.randint(1, 8)):
            time.sleep(0.1)
            context.check()
        said = {"actor": place.name, "evidence": {"attempt": job.attempt}, "guard": context.check}
        return {"published": put(store, job.payload["publishes"], chance.choice(GOOD), key, **said)}

    place.note("ready")
    owner = f"{place.name}:{os.getpid()}"
    how: dict[str, Any] = {"poll_s": POLL_S, "lease_s": LEASE_S, "watch": ended.append}
    while not STOP.is_set():
        try:
            run_worker(store.database, execute, owner=owner, stop=STOP, **how)
        except DatabaseError:
            if any(isinstance(event, Ended) for event in ended):
                raise
            time.sleep(RETRY_S)  # a worker may refuse to begin without a database
