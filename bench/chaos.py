"""Everything at once on one PostgreSQL while it is spoilt: watchers, publishers, workers and tuners under kills, stops and outages.

Processes of the product's own functions (``chaos_roles.py``) work on a server of the run's own. One fault after another, in an order that
its seed decides, each with some calm behind it: a process is killed and started again, or stopped for longer than its lease; the server
is shut down, dropped as in a crash, frozen, its connections cut, its tables renamed; rows are put into it that nobody should have put
there. In the end (``chaos_judge.py``): every good publication was in force within 2 s of its commit or of the last fault's end, none was
lost, none doubled, no stale worker published, every job was done once, no process ended by itself, no log holds a traceback, and every
text that was decoded meanwhile is autoregression's. Notes and logs of the last run stay in ``.acceptance/chaos``. Linux.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import chaos_roles as roles
import chaos_spoil as spoil
from chaos_judge import BOUND_S, Fault, History, Job, Publication, Said, Watched, judge
from chaos_server import Server

from spectune.db import open_database
from spectune.optimizer.schedule import add_schedule, pause_schedule
from spectune.traces.store import TraceStore

LONGEST_S = 590.0
READY_S, DRAIN_S, END_S = 120.0, 90.0, 20.0
LAPSES = 5
"""So often is a process started again that went by itself."""
CALM_S = (BOUND_S + 0.5, BOUND_S + 2.0)
WATCHED, TUNED, UNWATCHED = "watched", "tuned", "unwatched"
CREW = {"watcher": 3, "publisher": 2, "worker": 3, "tuner": 1}
PRELOAD = (
    "spectune.optimizer.tune",
    "spectune.optimizer.jobs",
    "spectune.optimizer.serving",
    "spectune.optimizer.schedule",
    "psycopg",
    "doors",
    "pairs",
    "chaos_roles",
)

processes = multiprocessing.get_context("forkserver")


@dataclass
class Member:
    """A process of the run: what starts it, whether it is known to be gone, how often it was started, and how often it went by itself."""

    name: str
    kind: str
    begin: Callable[[], BaseProcess]
    process: BaseProcess
    is_away: bool = False
    starts: int = 1
    lapses: int = 0


@dataclass
class Run:
    """One run on a server of its own; ``folder`` gets notes and logs. Use it as a context: it leaves no process behind."""

    folder: Path
    seed: int
    crew: Mapping[str, int] = field(default_factory=lambda: dict(CREW))
    gap_s: tuple[float, float] = (5.0, 10.0)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.faults: list[Fault] = []
        self.problems: list[tuple[str, str]] = []
        self.members: list[Member] = []
        self.bad: set[int] = set()
        self.told: list[tuple[str, int]] = []
        self.pairs: dict[str, dict[str, Any]] = {}
        self._home = Path(tempfile.mkdtemp(prefix="spectune-chaos-", dir="/tmp"))
        self._home.chmod(0o755)
        self.server = Server(self._home / "server")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.join()
        self.server.close()
        shutil.rmtree(self._home, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------ the crew

    def begin(self) -> None:
        """Starts the server and everybody, and waits until all are ready."""
        self.server.start()
        self.database = open_database(self.server.url)
        self.store = TraceStore(self.database)
        if self.crew.get("watcher") or self.crew.get("tuner"):
            maker = self._hire("pairs", "maker", roles.prepare_pairs, (WATCHED, TUNED))
            self._ready(maker)
            maker.process.join()
            self.members.remove(maker)
            self.pairs = {n["name"]: n for n in self.notes("pairs") if n["event"] == "pair"}
        for name in (WATCHED, TUNED, UNWATCHED):
            if name not in self.pairs:
                self.pairs[name] = {"id": name}
                self.store.put_pair(name, name, {"name": name})
        for n in range(self.crew.get("watcher", 0)):
            self._hire(f"w{n}", "watcher", roles.watcher, self.pairs[WATCHED]["file"])
        workload = self.folder / "work.jsonl"
        prompts = ("def add(a, b):", "The quick brown fox")
        requests = [{"id": f"r{i}", "category": "ab"[i % 2], "turns": [f"{prompts[i % 2]} {i}"]} for i in range(24)]
        workload.write_text("".join(json.dumps(request) + "\n" for request in requests))
        for n in range(self.crew.get("tuner", 0)):
            self._hire(f"wt{n}", "watcher", roles.watcher, self.pairs[TUNED]["file"])
            self._hire(f"t{n}", "tuner", roles.tuner, self.pairs[TUNED]["file"], workload)
        for n in range(self.crew.get("publisher", 0)):
            self._hire(f"p{n}", "publisher", roles.publisher, self.pairs[WATCHED]["id"], self.gap_s)
        every = {"coalesce": False, "misfire_grace": None, "max_instances": None, "max_attempts": 1000}
        add_schedule(self.database, "often", every=1, payload={"publishes": self.pairs[UNWATCHED]["id"]}, **every)
        add_schedule(self.database, "serve", every=7, payload={"publishes": self.pairs[WATCHED]["id"]}, **every)
        if self.crew.get("tuner"):
            payload = {"pair": self.pairs[TUNED]["spec"], "workload": [str(workload)], "device": "cpu", **roles.TUNED}
            add_schedule(self.database, "tune", every=40, payload=payload, budget="15s", max_attempts=1000)
        for n in range(self.crew.get("worker", 0)):
            self._hire(f"j{n}", "worker", roles.worker)
        for member in self.members:
            self._ready(member)

    def _hire(self, name: str, kind: str, role: Callable[..., None], *arguments: Any) -> Member:
        place = roles.Place(self.server.url, self.folder, name, self.seed)

        def begin() -> BaseProcess:
            process = processes.Process(target=roles.play, args=(place, role, *arguments), name=name, daemon=True)
            process.start()
            return process

        self.members.append(Member(name, kind, begin, begin()))
        return self.members[-1]

    def notes(self, name: str) -> list[dict[str, Any]]:
        return roles.read_notes(self.folder / f"{name}.jsonl")

    def _ready(self, member: Member) -> None:
        """Waits until a member that was started says so, or is gone."""
        until = time.monotonic() + READY_S
        while sum(n["event"] == "ready" for n in self.notes(member.name)) < member.starts:
            if member.process.exitcode is not None or time.monotonic() > until:
                self.problems.append(("not ready", f"{member.name}: {self._last_line(member)}"))
                return
            time.sleep(0.05)

    def _last_line(self, member: Member) -> str:
        lines = (self.folder / f"{member.name}.log").read_text(errors="replace").strip().splitlines()
        return f"exit code {member.process.exitcode}; {lines[-1][:200] if lines else 'nothing in its log'}"

    def _again(self, member: Member) -> None:
        member.process.join()
        member.process, member.is_away, member.starts = member.begin(), False, member.starts + 1
        self._ready(member)

    def hold(self, seconds: float) -> None:
        """Lets time pass, and notices who is gone."""
        until = time.monotonic() + seconds
        while True:
            for member in self.members:
                if member.process.exitcode is not None and not member.is_away:
                    self.problems.append(("process gone", f"{member.name}: {self._last_line(member)}"))
                    member.is_away, member.lapses = True, member.lapses + 1
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.1, left))

    def calm(self, seconds: float | None = None) -> None:
        """A time without a fault. Who went away by itself is started again, so that the rest of the run is worth something."""
        for member in self.members:
            if member.is_away and member.lapses < LAPSES:
                self._again(member)
        self.hold(self.chance.uniform(*CALM_S) if seconds is None else seconds)

    # ------------------------------------------------------------------------------------------------ faults

    @contextmanager
    def fault(self, kind: str, what: str = "", *, keeps: tuple[str, ...] | None = ()) -> Iterator[None]:
        begin = time.time()
        try:
            yield
        finally:
            self.faults.append(Fault(kind, what, begin, time.time(), keeps))
            print(f"  {kind} {what}: {self.faults[-1].end - begin:.1f} s", flush=True)

    def one(self, kind: str) -> Member | None:
        there = [m for m in self.members if m.kind == kind and not m.is_away]
        return self.chance.choice(there) if there else None

    def kill(self, kind: str) -> None:
        """kill -9; the process is started again after a while."""
        member = self.one(kind)
        if member is None:
            return
        with self.fault(f"kill {kind}", member.name):
            member.is_away = True
            member.process.kill()
            self.hold(self.chance.uniform(0.0, 1.5))
            self._again(member)

    def stop(self, kind: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after ``seconds``."""
        member = self.one(kind)
        if member is None:
            return
        pid = member.process.pid or 0
        with self.fault(f"stop {kind}", member.name, keeps=(member.name,)):
            os.kill(pid, signal.SIGSTOP)
            self.hold(seconds)
            os.kill(pid, signal.SIGCONT)

    def restart(self, *, immediately: bool) -> None:
        with self.fault("server crash" if immediately else "server restart", keeps=None):
            self.server.stop(immediately=immediately)
            self._meanwhile()
            self.hold(self.chance.uniform(0.3, 2.5))
            self.server.start()

    def freeze(self) -> None:
        with self.fault("server frozen", keeps=None), self.server.frozen():
            self.hold(self.chance.uniform(2.0, roles.LEASE_S + 1.5))

    def rename(self, table: str) -> None:
        with self.fault("table renamed", table, keeps=None):
            self.server.sql(f"ALTER TABLE {table} RENAME TO {table}_away")
            try:
                self._meanwhile()
                self.hold(2.5)
            finally:
                self.server.sql(f"ALTER TABLE {table}_away RENAME TO {table}")

    def cut(self) -> None:
        with self.fault("connections cut", keeps=None):
            for _ in range(3):
                self.server.sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"
                )
                self.hold(0.4)

    def _meanwhile(self) -> None:
        """Now and then a process dies while the database is away; it is started again when the calm comes."""
        member = self.one(self.chance.choice(("worker", "publisher")))
        if member is not None and self.chance.random() < 0.3:
            with self.fault(f"kill {member.kind}", f"{member.name}, meanwhile"):
                member.is_away = True
                member.process.kill()

    def garbage(self, name: str) -> None:
        """A publication that nobody can run, and after it a good one that everybody must still take up."""
        pair = self.chance.choice((WATCHED, TUNED))
        with self.fault("bad publication", f"{name} ({pair})"):
            self.bad.add(spoil.publish(self.server, self.store, self.pairs[pair]["id"], name))
            self.hold(BOUND_S + 0.5)
        self.publish(pair, f"after {name}")

    def publish(self, pair: str, what: str) -> None:
        """A good publication of the run's own, when no fault is on."""
        from spectune.runtime.policies.document import parse_policy

        key = f"run:{pair}:{what}:{len(self.told)}"
        policy = parse_policy(roles.SLOW if pair == TUNED else self.chance.choice(roles.GOOD))
        self.store.put_policy(policy.id, policy.spelled_out(), policy.label())
        made = self.store.publish(
            self.pairs[pair]["id"], "cpu", policy.id, actor="run", evidence={"key": key}, idempotency_key=key
        )
        self.told.append((key, made.version))

    def schedule_garbage(self, name: str) -> None:
        with self.fault("bad schedule row", name):
            spoil.schedule(self.server, name, self.pairs[UNWATCHED]["id"])

    def kinds(self) -> list[Callable[[], None]]:
        """Every kind of fault once."""
        found: list[Callable[[], None]] = []
        found += [lambda k=k: self.kill(k) for k in ("worker", "worker", "publisher", "tuner")]
        found += [
            lambda k=k, s=s: self.stop(k, s)
            for k, s in (
                ("worker", roles.LEASE_S + 2),
                ("worker", roles.LEASE_S + 2),
                ("publisher", 2),
                ("tuner", 3),
                ("watcher", 3),
            )
        ]
        found += [lambda: self.restart(immediately=True), lambda: self.restart(immediately=False), self.freeze, self.cut]
        found += [lambda t=t: self.rename(t) for t in ("publication", "policy", "schedule_job")]
        if self.crew.get("watcher"):
            found += [lambda n=n: self.garbage(n) for n in spoil.DOCUMENTS]
        found += [lambda n=n: self.schedule_garbage(n) for n in spoil.SCHEDULES]
        return found

    def spoil(self, seconds: float, kinds: Sequence[Callable[[], None]]) -> None:
        """Faults for so many seconds: each once while time lasts, then again in another order."""
        until = time.monotonic() + seconds
        left: list[Callable[[], None]] = []
        while time.monotonic() < until:
            left = left or self.chance.sample(kinds, len(kinds))
            left.pop()()
            self.calm()

    # ------------------------------------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Ends everybody but the watchers in good order, publishes once more, and waits until what is queued is done."""
        watchers = [m for m in self.members if m.kind == "watcher"]
        self.calm(CALM_S[1] if watchers else 0.0)
        self._end([m for m in self.members if m.kind in ("publisher", "tuner")], 3 * END_S)
        for name in ("often", "serve", *(["tune"] if self.crew.get("tuner") else [])):
            pause_schedule(self.database, name)
        for pair in (WATCHED, TUNED):
            self.publish(pair, "last")
        until = time.monotonic() + DRAIN_S
        while self.server.sql("SELECT 1 FROM schedule_job WHERE state IN ('queued', 'running')") and time.monotonic() < until:
            self.hold(0.5)
        self.hold(2 * BOUND_S if watchers else 0.0)
        self.until = time.time()
        self._end([m for m in self.members if m.kind == "worker"], END_S)
        if watchers:
            with self.fault("server frozen", "at a watcher's end", keeps=None), self.server.frozen():
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
            if member.process.exitcode is None:
                self.problems.append(("does not end", f"{member.name} is there {seconds:.0f} s after SIGTERM"))
                member.process.kill()
                member.process.join()
            elif member.process.exitcode:
                self.problems.append(("process gone", f"{member.name} at its end: {self._last_line(member)}"))

    def history(self) -> History:
        """What is in the database and in the notes."""
        sql, stamp = self.server.sql, "extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8"
        publications = [
            Publication(
                row["id"], row["pair_id"], row["idempotency_key"], row["actor"], row["at"],
                (row["evidence"] or {}).get("attempt"), row["id"] not in self.bad,
            )
            for row in sql(f"SELECT id, pair_id, idempotency_key, actor, evidence, {stamp} AS at FROM publication")
        ]  # fmt: skip
        said = [
            Said(row["publication_id"], row["node"], row["status"], row["reason"], row["at"])
            for row in sql(f"SELECT publication_id, node, status, reason, {stamp} AS at FROM acknowledgement ORDER BY id")
        ]
        jobs = [
            Job(row["idempotency_key"], row["name"], row["state"], (row["result"] or {}).get("published"), row["error"])
            for row in sql("SELECT j.*, s.name FROM schedule_job j JOIN schedule s ON s.id = j.schedule_id ORDER BY j.id")
        ]
        fires = sql("SELECT s.name, s.interval_s, f.fire_at FROM schedule_fire f JOIN schedule s ON s.id = f.schedule_id")
        slots = {
            name: (every, [f["fire_at"] for f in fires if f["name"] == name]) for name, every in (("often", 1), ("serve", 7))
        }
        notes = {m.name: self.notes(m.name) for m in self.members}
        watched = []
        for member in self.members:
            if member.kind == "watcher":
                ready = [n for n in notes[member.name] if n["event"] == "ready"]
                came = [(n["at"], n["version"]) for n in notes[member.name] if n["event"] == "in force"]
                watched += [Watched(member.name, ready[0]["pair"], ready[0]["at"], came)] if ready else []
        every = [(name, note) for name, found in notes.items() for note in found]
        told = [(n["key"], n["version"]) for _, n in every if n["event"] in ("published", "tuned") and n["version"] is not None]
        attempts = [(n["key"], n["attempt"], n["at"]) for _, n in every if n["event"] == "attempt"]
        problems = [*self.problems, *spoil.unmended(self.server)]
        problems += [("text", f"{name} at {n['version']}") for name, n in every if n["event"] == "text" and not n["same"]]
        for path in sorted(self.folder.glob("*.log")):
            found = path.read_text(errors="replace").split("Traceback (most recent call last)")[1:]
            problems += [("traceback", f"{path.name}: {_error_of(text)}") for text in found]
        return History(publications, said, self.faults, watched, [*self.told, *told], attempts, jobs, slots, problems, self.until)


def _error_of(traceback: str) -> str:
    """The error's line of a traceback's text."""
    lines = [line for line in traceback.splitlines()[1:] if line and not line.startswith(" ")]
    return lines[0][:200] if lines else ""


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """Kills, stops, outages and garbage rows under watchers, publishers, workers and tuners: publications applied within 2 s, none lost."""
    folder, seconds, seed = state / "chaos", 3.0 if quick else 220.0, 0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # For the processes: they come from a server process that has imported everything once.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes.set_forkserver_preload(list(PRELOAD))
    signal.alarm(int(LONGEST_S))  # ends this process, and with it the server and all members
    with Run(folder, seed) as run:
        run.begin()
        run.spoil(seconds, run.kinds())
        run.finish()
        history = run.history()
        verdict = judge(history)
        texts = sum(n["event"] == "text" for m in run.members for n in run.notes(m.name))
    signal.alarm(0)
    figures = verdict.to_json()
    late = figures["latency_s"] or {"median": None, "worst": None}
    return {
        "holds": not verdict.failures,
        "summary": f"{len(run.faults)} faults, {len(history.publications)} publications, {verdict.judged['good']} times one was due: "
        f"median {late['median']} s, worst {late['worst']} s; {len(verdict.failures)} failures",
        "faults": dict(sorted(Counter(f.kind for f in run.faults).items())),
        "texts": texts,
        "jobs": dict(Counter(f"{j.schedule} {j.state}" for j in history.jobs)),
        "attempts": len(history.attempts),
        **figures,
    }
