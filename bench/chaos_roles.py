"""The processes of the chaos run: each does one thing with the product's own functions and notes what it did, a JSON line an event.

A role returns when it is told to stop (SIGTERM). It waits out what the product says may be waited out, a
:class:`db.DatabaseError`; anything else ends the process, and the run has failed. A restarted role reads its own notes and goes on
with what it had begun, as a client does that never heard whether its publication was made.
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
from spectune.optimizer.schedule import Ended, Job, JobContext, run_worker
from spectune.traces.store import TraceStore

LEASE_S = 3.0
WORKER_POLL_S = 0.5
RETRY_S = 0.2
LOOK_S = 0.02
TEXT_EVERY_S = 1.0
BETWEEN_TUNINGS_S = 4.0
TEXT_TOKENS = 12
GOOD: tuple[dict[str, Any], ...] = (
    *({"draft": "near", "window": {"kind": "fixed", "gamma": g}} for g in (1, 2, 3, 5, 8)),
    {"draft": "far", "window": {"kind": "fixed", "gamma": 2}},
    {"draft": "ngram", "window": {"kind": "fixed", "gamma": 4}},
    {"draft": "near", "window": {"kind": "cache_fsm", "gamma_max": 5}},
    {"draft": "near", "window": {"kind": "analytic", "gamma_max": 4}},
    {"draft": "far", "window": {"kind": "heuristic", "gamma_max": 6}, "stop": {"kind": "max_prob", "threshold": 0.3}},
    {},
)
"""What is published: every one can run on the tiny pairs. The last is autoregression."""
SLOW = {"draft": "far", "window": {"kind": "fixed", "gamma": 12}}
"""Good, but slower than anything a search finds, so that a tuner has something to publish."""
TUNED: dict[str, int] = {"max_new_tokens": 24, "gamma_max": 6, "trials": 20, "finalists": 2, "tree_width": 0}
"""How tuning is kept short."""


@dataclass(frozen=True)
class Place:
    """Where a role works: the database, the folder of notes and logs, its own name, and the seed of its choices."""

    url: str
    folder: Path
    name: str
    seed: int


class Notes:
    """A role's events in a file that survives kill -9: an event is one write. Times are seconds of ``time.time``."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.jsonl"
        self.before = read_notes(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self, event: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"at": time.time(), "event": event, **values}) + "\n").encode())


def read_notes(path: Path) -> list[dict[str, Any]]:
    """A role's events so far, oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def play(place: Place, role: Callable[..., None], *arguments: Any) -> None:
    """Runs a role in this process, its outputs in ``NAME.log``, until SIGTERM; the process does not outlive the run's."""
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    log = os.open(place.folder / f"{place.name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    role(place, Notes(place.folder, place.name), stop, *arguments)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def watcher(place: Place, note: Notes, stop: threading.Event, pair_file: Path) -> None:
    """A decoder that follows the publications, and decodes: whatever is in force, its text is autoregression's."""
    from spectune.optimizer.serving import watch
    from spectune.runtime.decoder import Decoder
    from spectune.runtime.loading import load_pair
    from spectune.runtime.loop import PolicySource, StaticSource
    from spectune.runtime.pair import read_pair
    from spectune.runtime.policies.document import parse_policy
    from spectune.runtime.policies.prepare import prepare
    from spectune.traces.schema import Request, Sampling

    pair = load_pair(read_pair(str(pair_file)), device="cpu")
    seen = -1

    def look(source: PolicySource) -> None:
        nonlocal seen
        if source.current().version != seen:
            seen = source.current().version
            note("in force", version=seen)

    def text(source: PolicySource, after_round: Callable[[PolicySource], None] = lambda _: None) -> list[int]:
        decoder = Decoder(pair, source)
        tokens: list[int] = []
        request = decoder.request(Request("r", "a", ("x",)), pair.encode("def add(a, b):"), Sampling(), TEXT_TOKENS)
        for item in decoder.rounds(request):
            tokens += item.tokens
            after_round(source)
        return tokens

    with open_database(place.url) as database:
        store = TraceStore(database)
        costs = store.latest_profile(pair.id, "cpu")
        # Each kind is decoded with once, so that no compiler is at work later.
        ready = [prepare(parse_policy(d), pair.draft_names, profile=costs and costs.profile) for d in GOOD]
        expected = [text(StaticSource(policy)) for policy in ready][-1]
        with watch(store, pair, None, None, node=place.name) as source:
            note("ready", pair=pair.id)
            decode_at = 0.0
            while not stop.wait(LOOK_S):
                look(source)
                if time.monotonic() >= decode_at:
                    note("text", version=seen, same=text(source, look) == expected)
                    decode_at = time.monotonic() + TEXT_EVERY_S
    note("stopped")


def publisher(place: Place, note: Notes, stop: threading.Event, pair_id: str, gap_s: tuple[float, float]) -> None:
    """Publishes good policies, one under each key, through whatever happens; now and then it asks twice, as if it had not heard."""
    from spectune.runtime.policies.document import parse_policy

    done = {n["key"] for n in note.before if n["event"] == "published"}
    begun = {n["key"] for n in note.before if n["event"] == "begin"}
    with open_database(place.url) as database:
        store = TraceStore(database)
        note("ready")
        for number in itertools.count():
            key = f"{place.name}:{number}"
            if key in done:
                continue
            chance = random.Random(f"{place.seed} {key}")
            policy = parse_policy(chance.choice(GOOD))
            if key not in begun:
                if stop.wait(chance.uniform(*gap_s)):
                    break
                note("begin", key=key)

            def publish(policy: Any = policy, key: str = key) -> int:
                store.put_policy(policy.id, policy.spelled_out(), policy.label())
                made = store.publish(
                    pair_id, "cpu", policy.id, actor=place.name, evidence={"key": key}, reason="chaos", idempotency_key=key
                )
                return made.version

            for _ in range(chance.choice((1, 1, 1, 2))):
                note("published", key=key, version=until_answered(publish, note))
    note("stopped")


def until_answered(call: Callable[[], int], note: Notes) -> int:
    """What the call returns, tried again while the database is away. SIGTERM does not end it: what was begun is finished."""
    while True:
        try:
            return call()
        except DatabaseError as error:
            note("again", error=str(error), kind=type(error).__name__)
            time.sleep(RETRY_S)


def worker(place: Place, note: Notes, stop: threading.Event) -> None:
    """A worker as `schedule run` is one: it tunes what names a pair, and else does a job of a few steps that publishes."""
    with open_database(place.url) as database:
        store = TraceStore(database)
        tuning: list[Callable[[Job, JobContext], Mapping[str, Any]]] = []

        def execute(job: Job, context: JobContext) -> Mapping[str, Any]:
            note("attempt", key=job.idempotency_key, attempt=job.attempt)
            if "pair" not in job.payload:
                return short_job(store, job, context, place.name)
            if not tuning:
                from spectune.optimizer.jobs import tuning_job

                tuning.append(tuning_job(store))
            return tuning[0](job, context)

        has_ended = False

        def ended(event: Any) -> None:
            nonlocal has_ended
            if isinstance(event, Ended):
                has_ended = True
                note("ended", key=event.job.idempotency_key, attempt=event.job.attempt, ending=event.ending, error=event.error)

        note("ready")
        owner = f"{place.name}:{os.getpid()}"
        while not stop.is_set():
            try:
                run_worker(database, execute, owner=owner, poll_s=WORKER_POLL_S, lease_s=LEASE_S, stop=stop, watch=ended)
            except DatabaseError as error:
                if has_ended:
                    raise
                note("again", error=str(error), kind=type(error).__name__)  # a worker may refuse to begin without a database
                time.sleep(RETRY_S)
    note("stopped")


def short_job(store: TraceStore, job: Job, context: JobContext, name: str) -> dict[str, Any]:
    """A few steps, then one publication under the job's key, fenced by the claim as tuning's is."""
    from spectune.runtime.policies.document import parse_policy

    chance = random.Random(job.idempotency_key)
    for _ in range(chance.randint(1, 8)):
        time.sleep(0.1)
        context.check()
    policy = parse_policy(chance.choice(GOOD))
    store.put_policy(policy.id, policy.spelled_out(), policy.label())
    key = job.idempotency_key
    said = {"actor": name, "evidence": {"key": key, "attempt": job.attempt}, "reason": "chaos", "idempotency_key": key}
    made = store.publish(job.payload["publishes"], "cpu", policy.id, **said, guard=context.check)
    return {"published": made.version}


def tuner(place: Place, note: Notes, stop: threading.Event, pair_file: Path, workload: Path) -> None:
    """Tunes again and again: record, search, execute, publish. What an outage interrupts is gone on with under the same key."""
    from spectune.optimizer.execute import DecodeOptions
    from spectune.optimizer.inputs import load_workload
    from spectune.optimizer.tune import TuneOptions, tune
    from spectune.runtime.loading import load_pair
    from spectune.runtime.pair import read_pair
    from spectune.traces.schema import Sampling

    pair = load_pair(read_pair(str(pair_file)), device="cpu")
    requests = load_workload([str(workload)])
    done = {n["key"] for n in note.before if n["event"] == "tuned"}
    with open_database(place.url) as database:
        store = TraceStore(database)
        note("ready")
        for number in itertools.count():
            key = f"{place.name}:{number}"
            if key in done:
                continue
            if stop.wait(BETWEEN_TUNINGS_S):
                break
            options = DecodeOptions(Sampling(seed=number), TUNED["max_new_tokens"])
            searched = {name: TUNED[name] for name in ("gamma_max", "trials", "finalists", "tree_width")}
            wanted = TuneOptions(options=options, budget_s=3.0, actor=place.name, idempotency_key=key, **searched)

            def once(wanted: TuneOptions = wanted) -> Any:
                return tune(store, pair, requests, wanted)

            tuned = until_answered(once, note)
            note("tuned", key=key, version=tuned.published.version if tuned.published else None, reason=tuned.reason)
    note("stopped")


def prepare_pairs(place: Place, note: Notes, stop: threading.Event, names: Sequence[str]) -> None:
    """Makes a tiny pair for each name, each of other weights, stores it with a made-up profile, and notes its id."""
    from doors import put_profile
    from pairs import make_pair

    from spectune.runtime.pair import read_pair

    for seed, name in enumerate(names):
        (place.folder / name).mkdir()
        file = make_pair(place.folder / name, seed=10 * seed)
        put_profile(place.url, file)
        spec = read_pair(str(file))
        note("pair", name=name, file=str(file), id=spec.id, spec=spec.to_json())
    note("ready")
