"""Everything at once on one PostgreSQL while it is spoilt: kills, stops, outages, garbage rows.

Watchers, publishers, workers and a tuner (``chaos_roles.py``) work on a server of the run's own
while one fault after another of :data:`FAULTS` is done to them, in an order that the seed decides,
each with some calm behind it. ``chaos_judge.py`` says what must hold in the end. Notes and logs of
the last run stay in ``.acceptance/chaos``. Linux.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import chaos_roles as roles
import chaos_spoil as spoil
from chaos_judge import BOUND_S, Delayed, Fault, History, Job, Publication, Said, Watched, judge
from doors import put_profile, write_workload
from pairs import make_pair

from spectune.db import open_database
from spectune.optimizer.schedule import add_schedule, pause_schedule
from spectune.runtime.pair import read_pair
from spectune.traces.store import TraceStore

LONGEST_S, READY_S, DRAIN_S, END_S = 590, 120.0, 90.0, 20.0
CALM_S = (BOUND_S + 0.5, BOUND_S + 2.0)
WATCHED, TUNED, UNWATCHED = "watched", "tuned", "unwatched"
EVERY = {"often": 1, "serve": 7}
"""Seconds of the schedules that must miss no slot."""
FAULTS: list[tuple[Any, ...]] = [
    *[("kill", kind) for kind in ("worker", "worker", "publisher", "tuner")],
    *[("stop", "worker", roles.LEASE_S + 2)] * 2,
    *[("stop", kind, 3) for kind in ("publisher", "tuner", "watcher")],
    ("restart", "server crash", "immediate"),
    ("restart", "server restart", "fast"),
    ("freeze",),
    ("cut",),
    *[("rename", table) for table in ("publication", "policy", "schedule_job")],
    *[("garbage", name) for name in (*spoil.DOCUMENTS, *spoil.FORGED)],
    *[("garbage_schedule", name) for name in spoil.SCHEDULES],
]
"""Methods of :class:`Run` with their arguments."""
CUT = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND "
    "datname IS NOT NULL"
)

processes = multiprocessing.get_context("forkserver")


@dataclass
class Member:
    """A process of the run: its role with what it is given, whether it is known to be gone."""

    name: str
    play: tuple[Any, ...]
    is_away: bool = True
    starts: int = 0
    process: Any = None

    @property
    def kind(self) -> str:
        return str(self.play[1].__name__)

    def begin(self) -> None:
        self.process = processes.Process(target=roles.play, args=self.play, daemon=True)
        self.process.start()
        self.is_away, self.starts = False, self.starts + 1


class Run:
    """One run; ``folder`` gets notes and logs."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.chance, self.server = random.Random(seed), spoil.Server()
        self.faults: list[Fault] = []
        self.problems: list[tuple[str, str]] = []
        self.members: list[Member] = []
        self.bad: set[int] = set()
        self.told: list[tuple[str, int]] = []
        self.pairs = {UNWATCHED: UNWATCHED}

    def close(self) -> None:
        """Leaves no process behind."""
        for member in self.members:
            member.process.kill()
            member.process.join()
        self.server.close()

    # -------------------------------------------------------------------------------- the crew

    def begin(self) -> None:
        """Starts the server and everybody, and waits until all are ready."""
        # Processes come from a server process that has imported everything once.
        own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with mock.patch.dict(os.environ, own, PYTHONPATH=os.pathsep.join(sys.path)):
            processes.set_forkserver_preload(["chaos_roles"])
            forkserver.ensure_running()
        self.server.start()
        self.database = open_database(self.server.url)
        self.store = TraceStore(self.database)
        self.store.put_pair(UNWATCHED, UNWATCHED, {"name": UNWATCHED})
        watched, tuned = self._pair(WATCHED, 0), self._pair(TUNED, 10)
        workload = write_workload(self.folder / "work.jsonl", 24)
        self._hire("w", 3, roles.watcher, watched)
        self._hire("wt", 1, roles.watcher, tuned)
        self._hire("t", 1, roles.tuner, tuned, workload)
        self._hire("p", 2, roles.publisher, self.pairs[WATCHED])
        every: dict[str, Any] = {"coalesce": False, "misfire_grace": None, "max_instances": None}
        add = partial(add_schedule, self.database, max_attempts=1000)
        for name, pair in (("often", UNWATCHED), ("serve", WATCHED)):
            add(name, every=EVERY[name], payload={"publishes": self.pairs[pair]}, **every)
        payload = {
            "pair": read_pair(str(tuned)).to_json(),
            "workload": [str(workload)],
            "max_new_tokens": roles.TUNE_TOKENS,
        }
        add("tune", every=40, payload={**payload, "device": "cpu", **roles.SEARCH}, budget="15s")
        self._hire("j", 3, roles.worker)
        for member in self.members:
            self._ready(member)

    def _pair(self, name: str, seed: int) -> Path:
        """A tiny pair of weights of its own, stored with a made-up profile; its file."""
        (self.folder / name).mkdir()
        file = make_pair(self.folder / name, seed=seed)
        put_profile(self.server.url, file, threads=1)
        self.pairs[name] = read_pair(str(file)).id
        return file

    def _hire(self, letter: str, count: int, role: Callable[..., None], *arguments: Any) -> None:
        for n in range(count):
            place = roles.Place(self.server.url, self.folder, f"{letter}{n}", self.seed)
            self.members.append(Member(place.name, (place, role, *arguments)))
            self.members[-1].begin()

    def notes(self, event: str) -> list[tuple[Member, dict[str, Any]]]:
        """What members noted of one kind, oldest first of each."""
        return [
            (member, note)
            for member in self.members
            for note in roles.read_notes(self.folder, member.name, event)
        ]

    def _ready(self, member: Member) -> None:
        """Waits until a member that was started says so, or is gone."""
        until = time.monotonic() + READY_S
        while len(roles.read_notes(self.folder, member.name, "ready")) < member.starts:
            if member.process.exitcode is not None or time.monotonic() > until:
                self._problem("not ready", member)
                return
            time.sleep(0.05)

    def _problem(self, kind: str, member: Member) -> None:
        """Notes what is wrong with a member, with the last line of its log."""
        log = (self.folder / f"{member.name}.log").read_text(errors="replace")
        said = f"exit code {member.process.exitcode}; {log.strip().splitlines()[-1:]}"
        self.problems.append((kind, f"{member.name}: {said}"))

    def _again(self, member: Member) -> None:
        member.process.join()
        member.begin()
        self._ready(member)

    def hold(self, seconds: float) -> None:
        """Lets time pass, and notices who is gone."""
        until = time.monotonic() + seconds
        while True:
            for member in self.members:
                if member.process.exitcode is not None and not member.is_away:
                    self._problem("process gone", member)
                    member.is_away = True
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.1, left))

    def calm(self, seconds: float) -> None:
        """A time without a fault. Who is gone is started again."""
        for member in self.members:
            if member.is_away:
                self._again(member)
        self.hold(seconds)

    # -------------------------------------------------------------------------------- faults

    @contextmanager
    def fault(self, kind: str, what: str = "", keeps: Delayed = ()) -> Iterator[None]:
        begin = time.time()
        try:
            yield
        finally:
            self.faults.append(Fault(kind, what, begin, time.time(), keeps))
            print(f"  {kind} {what}: {self.faults[-1].end - begin:.1f} s", flush=True)

    def one(self, *kinds: str) -> Member | None:
        there = [m for m in self.members if m.kind in kinds and not m.is_away]
        return self.chance.choice(there) if there else None

    def kill(self, *kinds: str, returns: bool = True) -> None:
        """kill -9; the process is started again after a while, or when the calm comes."""
        if member := self.one(*kinds):
            with self.fault(f"kill {member.kind}", member.name):
                member.is_away = True
                member.process.kill()
                if returns:
                    self.hold(self.chance.uniform(0.0, 1.5))
                    self._again(member)

    def stop(self, kind: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after ``seconds``."""
        if member := self.one(kind):
            with self.fault(f"stop {kind}", member.name, keeps=(member.name,)):
                os.kill(member.process.pid, signal.SIGSTOP)
                self.hold(seconds)
                os.kill(member.process.pid, signal.SIGCONT)

    def _away(self, seconds: float) -> None:
        """The database is away; now and then a process dies meanwhile."""
        if self.chance.random() < 0.3:
            self.kill("worker", "publisher", returns=False)
        self.hold(seconds)

    def restart(self, kind: str, mode: str) -> None:
        with self.fault(kind, keeps=None):
            self.server.stop(mode)
            self._away(self.chance.uniform(0.3, 2.5))
            self.server.start()

    def freeze(self) -> None:
        with self.fault("server frozen", keeps=None), self.server.frozen():
            self.hold(self.chance.uniform(2.0, roles.LEASE_S + 1.5))

    def rename(self, table: str) -> None:
        with self.fault("table renamed", table, keeps=None):
            self.server.sql(f"ALTER TABLE {table} RENAME TO {table}_away")
            try:
                self._away(2.5)
            finally:
                self.server.sql(f"ALTER TABLE {table}_away RENAME TO {table}")

    def cut(self) -> None:
        with self.fault("connections cut", keeps=None):
            for _ in range(3):
                self.server.sql(CUT)
                self.hold(0.4)

    def garbage(self, name: str) -> None:
        """A publication that nobody can run; after it a good one, which everybody must take up."""
        pair = self.chance.choice((WATCHED, TUNED))
        with self.fault("bad publication", f"{name} ({pair})"):
            self.bad.add(spoil.publish(self.server, self.store, self.pairs[pair], name))
            self.hold(BOUND_S + 0.5)
        self.publish(pair, f"after {name}")

    def garbage_schedule(self, name: str) -> None:
        with self.fault("bad schedule row", name):
            spoil.schedule(self.server, name, self.pairs[UNWATCHED])

    def publish(self, pair: str, what: str) -> None:
        """A good publication of the run's own, when no fault is on."""
        key = f"run:{pair}:{what}:{len(self.told)}"
        document = roles.SLOW if pair == TUNED else self.chance.choice(roles.GOOD)
        self.told.append((key, roles.put(self.store, self.pairs[pair], document, key, actor="run")))

    def spoil(self, seconds: float) -> None:
        """Faults for so many seconds: each once while time lasts, then again in another order."""
        until = time.monotonic() + seconds
        left: list[tuple[Any, ...]] = []
        while time.monotonic() < until:
            left = left or self.chance.sample(FAULTS, len(FAULTS))
            name, *arguments = left.pop()
            getattr(self, name)(*arguments)
            self.calm(self.chance.uniform(*CALM_S))

    # -------------------------------------------------------------------------------- the end

    def finish(self) -> None:
        """Ends all but watchers, publishes once more, and waits for what is queued."""
        self.calm(CALM_S[1])
        self._end([m for m in self.members if m.kind in ("publisher", "tuner")], 3 * END_S)
        for name in (*EVERY, "tune"):
            pause_schedule(self.database, name)
        for pair in (WATCHED, TUNED):
            self.publish(pair, "last")
        until = time.monotonic() + DRAIN_S
        waiting = "SELECT 1 FROM schedule_job WHERE state IN ('queued', 'running')"
        while self.server.sql(waiting) and time.monotonic() < until:
            self.hold(0.5)
        self.hold(2 * BOUND_S)
        self.until = time.time()
        self._end([m for m in self.members if m.kind == "worker"], END_S)
        watchers = [m for m in self.members if m.kind == "watcher"]
        with self.fault("server frozen", "at the end", keeps=None), self.server.frozen():
            self.hold(1.5)  # it is amid a question to the server
            self._end(watchers[:1], END_S)
        self._end(watchers[1:], END_S)

    def _end(self, members: Sequence[Member], seconds: float) -> None:
        """SIGTERM, and exit code 0 within ``seconds``."""
        for member in members:
            member.is_away = True
            member.process.terminate()
        until = time.monotonic() + seconds
        for member in members:
            member.process.join(max(0.0, until - time.monotonic()))
            if member.process.exitcode != 0:
                self._problem("does not end", member)

    def history(self) -> History:
        """What is in the database and in the notes."""
        sql = self.server.sql
        stamp = "extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 AS committed"
        publications = sql(
            f"SELECT id AS version, pair_id AS pair, idempotency_key AS key, actor, {stamp}, "
            "(evidence->>'attempt')::int AS attempt FROM publication"
        )
        said = sql(
            f"SELECT publication_id AS version, node, status, reason, {stamp} FROM acknowledgement "
            "ORDER BY id"
        )
        jobs = sql(
            "SELECT idempotency_key AS key, s.name AS schedule, state, error, "
            "(result->>'published')::int AS published "
            "FROM schedule_job j JOIN schedule s ON s.id = j.schedule_id ORDER BY j.id"
        )
        fired = sql("SELECT name, fire_at FROM schedule_fire JOIN schedule s ON s.id = schedule_id")
        slots = {
            name: (seconds, [row["fire_at"] for row in fired if row["name"] == name])
            for name, seconds in EVERY.items()
        }
        answered = (n for _, n in self.notes("answered") if n["version"] is not None)
        texts = [("text", f"{m.name}: {n}") for m, n in self.notes("text") if not n["same"]]
        return History(
            [Publication(**row, is_good=row["version"] not in self.bad) for row in publications],
            [Said(**row) for row in said],
            self.faults,
            list(self._watched()),
            [*self.told, *((n["key"], n["version"]) for n in answered)],
            [(n["key"], n["attempt"], n["at"]) for _, n in self.notes("attempt")],
            [Job(**row) for row in jobs],
            slots,
            [*self.problems, *spoil.unmended(self.server), *texts, *self._tracebacks()],
            self.until,
        )

    def _watched(self) -> Iterator[Watched]:
        for member in (m for m in self.members if m.kind == "watcher"):
            ready, came = (
                roles.read_notes(self.folder, member.name, event) for event in ("ready", "in force")
            )
            if ready:
                moments = [(n["at"], n["version"]) for n in came]
                yield Watched(member.name, ready[0]["pair"], ready[0]["at"], moments)

    def _tracebacks(self) -> Iterator[tuple[str, str]]:
        for path in sorted(self.folder.glob("*.log")):
            for text in path.read_text(errors="replace").split("Traceback (most recent call")[1:]:
                errors = [line for line in text.splitlines()[1:] if line.strip() == line != ""]
                yield "traceback", f"{path.name}: {errors[:1]}"


def _too_long(*_: object) -> None:
    raise TimeoutError(f"the run takes longer than {LONGEST_S} s")


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """Kills, outages and garbage under everybody: publications in force within 2 s, none lost."""
    folder = state / "chaos"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LONGEST_S)
    with closing(Run(folder, 0)) as run:
        run.begin()
        run.spoil(3.0 if quick else 220.0)
        run.finish()
        history = run.history()
    signal.alarm(0)
    verdict = judge(history)
    late = verdict.latencies_s or [0.0]
    return {
        "holds": not verdict.failures,
        "summary": f"{len(run.faults)} faults, {len(history.publications)} publications, "
        f"{verdict.judged['good']} times one was due: median {statistics.median(late):.3f} s, "
        f"worst {max(late):.3f} s; {len(verdict.failures)} failures",
        "faults": dict(sorted(Counter(f.kind for f in run.faults).items())),
        "texts": len(run.notes("text")),
        "jobs": dict(Counter(f"{j.schedule} {j.state}" for j in history.jobs)),
        "attempts": len(history.attempts),
        "judged": dict(verdict.judged),
        "failures": [f"{kind}: {what}" for kind, what in verdict.failures],
    }
