"""Faults amid trials: worker, `follow` or server killed, the folder gone, the database down, the
clock stepped by an hour; in a real vLLM, and with the agent beside stand-ins for vLLM."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from agent_stub import TOKENS, read, serve_until
from databases import Server, opened, server_binaries
from doors import Door, forked
from waiting import PATIENCE_S, eventually

from bench.harness import say
from bench.served.live import (
    MAX_LEN,
    PAIR,
    demo_prompts,
    publish,
    temporary_folder,
    windowed,
)
from bench.served.publications import Clients
from spectune.engines.engine import Wanted
from spectune.engines.vllm import follow_policy
from spectune.engines.vllm.folder import Status, read_status
from spectune.engines.vllm.follow import Follower
from spectune.engines.vllm.running import RunningServer
from spectune.engines.vllm.server import ServerProcess
from spectune.optimizer.commands.rollouts import begin
from spectune.optimizer.deployment import Place
from spectune.optimizer.rollout import conductor
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.traces.errors import EngineError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Acknowledgement, Publication, Rollout, RolloutTurn, Trajectory

FAULTS = ("worker", "follow", "server", "folder", "database", "clock")
WORDS = ("kill -9 of the worker", "of follow", "of the server", "its folder gone for seconds")
WORDS += ("its database down", "its clock stepped by an hour")
STEP_S = 3600
INCUMBENT, CANDIDATE = windowed(3), windowed(4)
CLIENTS, PROMPTS, LENGTH = 3, 12, 32
STUBS, STUB_REQUESTS_S = 4, 10.0
SHIM = Path(__file__).with_name("stepped_clock.c")
Key = tuple[str, int]
"""A trial: the boot of its server, and its version."""


class Durations(NamedTuple):
    """Seconds: of a block, of the folder's and the database's absence, of the conductor's lease,
    until a trial ends and between two renewals of it."""

    block: float
    gone: float
    down: float
    lease: float = conductor.LEASE_S
    ttl: float = follow_policy.TTL_S
    renew: float = follow_policy.RENEW_S


@dataclass
class Renewal:
    """A renewal of a trial: when it was first seen in ``policy.json``, and when the agent first
    said that it had read it."""

    key: Key
    number: int
    ttl_s: float
    written: float
    was_read: float = 0.0


class Clock:
    """The wall clock of every process that is started from now on (``CLOCK_REALTIME``, as libc
    tells it, by a library that is loaded before), which steps with a file. The clock of this
    process does not, nor do the times of files."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "step", folder / "stepped_clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, SHIM, "-ldl"], check=True)
        self.seconds = STEP_S
        self._file.write_bytes(struct.pack("q", self.seconds))
        os.environ |= {"LD_PRELOAD": str(library), "CLOCK_STEP": str(self._file)}

    def step(self) -> None:
        """An hour back, and the next time ahead."""
        self.seconds = STEP_S - self.seconds
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", self.seconds))

    def close(self) -> None:
        for name in ("LD_PRELOAD", "CLOCK_STEP"):
            del os.environ[name]


class Watch:
    """Looks into folders all the time: at renewals, and at rounds files, each of which stays under
    a second name in ``kept`` whatever becomes of the folder."""

    def __init__(self, folders: Sequence[Path], kept: Path) -> None:
        self.renewals: list[Renewal] = []
        self._folders, self._kept, self._stop = folders, kept, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            for folder in self._folders:
                with suppress(OSError, ValueError):
                    self._see(folder)

    def _see(self, folder: Path) -> None:
        for path in folder.glob("rounds-*.jsonl"):
            if not (self._kept / path.name).exists():
                os.link(path, self._kept / path.name)
        told = json.loads((folder / "status.json").read_bytes())
        for renewal in reversed(self.renewals[-100:]):
            is_told = renewal.key[0] == told["boot"] and renewal.number <= told["renewal"]
            if is_told and not renewal.was_read:
                renewal.was_read = time.time()
        trial = json.loads((folder / "policy.json").read_bytes()).get("trial")
        if trial and trial["boot"] == told["boot"]:
            key, number = (trial["boot"], trial["version"]), trial["renewal"]
            if not any((r.key, r.number) == (key, number) for r in self.renewals[-100:]):
                self.renewals.append(Renewal(key, number, trial["ttl_s"], time.time()))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What the agents noted, each with the boot that did."""
        for path in self._kept.iterdir():
            whole = path.read_text().split("\n")[1:-1]  # the first says how the server serves
            yield from ((path.name.split("-")[1], read(text)) for text in whole)

    def noted(self) -> int:
        return sum(path.read_bytes().count(b"\n") - 1 for path in self._kept.iterdir())


class Site(ABC):
    """Servers with a `follow` each, one worker, and their database."""

    def __init__(self, database: Server, folders: Sequence[Path], lasts: Durations) -> None:
        self.database, self.folders, self.lasts = database, folders, lasts
        self.door, self.follows, self.worker = Door(database.url), list[Any](), None
        (kept := folders[0].parent / "kept").mkdir()
        self.watch = Watch(folders, kept)

    @abstractmethod
    def start_server(self, number: int) -> None: ...

    @abstractmethod
    def kill_server(self, number: int) -> None: ...

    @abstractmethod
    def start_follow(self, folder: Path) -> Any: ...

    @abstractmethod
    def start_worker(self, store: TraceStore) -> Any: ...

    def start_follows(self) -> None:
        self.follows = [self.start_follow(folder) for folder in self.folders]

    def end_follows(self) -> None:
        for process in self.follows:
            _kill(process)

    def close(self) -> None:
        self.end_follows()
        if self.worker is not None:
            _kill(self.worker)
        self.watch.close()

    def is_tried(self, version: int) -> bool:
        """Whether every server takes turns."""
        tried = [_status(folder).trial for folder in self.folders]
        return all(t is not None and t.version == version and not t.is_over for t in tried)

    def is_over(self) -> bool:
        """Whether no server takes turns."""
        tried = [_status(folder).trial for folder in self.folders]
        return all(t is None or t.is_over for t in tried)

    def suffer(self, fault: str, clock: Clock) -> None:
        """Does harm amid a trial, waits for what follows, and repairs it."""
        if fault == "worker":
            _kill(self.worker)
            eventually(self.is_over)
        elif fault in ("follow", "clock"):
            if fault == "clock":
                clock.step()
                time.sleep(self.lasts.gone)
            self.end_follows()
            eventually(self.is_over)
            self.start_follows()
        elif fault == "server":
            boots = {status.boot for status in map(_status, self.folders)}
            for number in range(len(self.folders)):
                self.kill_server(number)
            for number in range(len(self.folders)):
                self.start_server(number)
            eventually(lambda: not boots & {s.boot for s in map(_status, self.folders)}, 900)
            time.sleep(self.lasts.block)
        elif fault == "folder":
            for folder in self.folders:
                folder.rename(folder.with_name(f"{folder.name}-gone"))
            time.sleep(self.lasts.gone)
            for folder in self.folders:
                folder.with_name(f"{folder.name}-gone").rename(folder)
            time.sleep(self.lasts.block)
        else:
            self.database.stop()
            time.sleep(self.lasts.down)
            self.database.start()


def _status(folder: Path) -> Status:
    found: list[Status] = []
    eventually(lambda: found.extend(filter(None, (read_status(folder),))) or found)
    return found[0]


def _kill(process: Any) -> None:
    process.kill()
    (process.join if hasattr(process, "join") else process.wait)(PATIENCE_S)


class VllmSite(Site):
    """One vLLM server, with the command line's `follow` and `policies rollout`."""

    def __init__(self, database: Server, parent: Path, lasts: Durations) -> None:
        wanted = Wanted("small", 8, 8, MAX_LEN)
        self.process = ServerProcess(PAIR, wanted, parent)
        self.process.wait_until_ready()
        environment = Path(f"/proc/{self.process.process.pid}/environ").read_bytes().split(b"\0")
        self._environment = dict(entry.split(b"=", 1) for entry in environment if entry)
        self.is_down, self.starts = False, 1
        super().__init__(database, [self.process.rounds], lasts)

    def kill_server(self, number: int) -> None:
        self.is_down = True
        os.killpg(self.process.process.pid, signal.SIGKILL)
        self.process.process.wait(PATIENCE_S)

    def start_server(self, number: int) -> None:
        with self.process.log.open("ab") as log:
            self.process.process = subprocess.Popen(
                self.process.process.args,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.process.wait_until_ready()
        self.is_down, self.starts = False, self.starts + 1

    def start_follow(self, folder: Path) -> Any:
        return self.door.start("follow", folder, pair="demo")

    def start_worker(self, store: TraceStore) -> Any:
        words = "policies", "rollout", json.dumps(CANDIDATE.spelled_out()), "--pair", "demo"
        of = "--device", "cpu", "--deployment", "vllm", "--set", f"block={self.lasts.block:g}s"
        return self.door.start(*words, *of)

    def close(self) -> None:
        super().close()
        self.process.close()


class Traffic(Clients):
    """Clients of a server that is killed: ``cut`` counts what was sent to it, or failed, while it
    was down."""

    cut = 0
    site: VllmSite

    def send(self, number: int) -> None:
        request = {"prompt": list(self._prompts[number].ids), "max_tokens": self._tokens}
        was_down, starts = self.site.is_down, self.site.starts
        try:
            self.texts.append((number, self._server.complete(**request, temperature=0)))
        except EngineError as error:
            if was_down or self.site.is_down or self.site.starts != starts:
                self.cut += 1
                time.sleep(0.5)
            else:
                self.failures.append(str(error))


class StubSite(Site):
    """Stand-ins for vLLM with the agent as it ships; `follow` and worker by shorter times."""

    def __init__(self, database: Server, parent: Path, lasts: Durations) -> None:
        folders = [parent / f"rounds{n}" for n in range(STUBS)]
        for folder in folders:
            folder.mkdir()
        self.servers: list[Any] = [None] * STUBS
        self.told: list[Any] = [None] * STUBS
        super().__init__(database, folders, lasts)
        for number in range(STUBS):
            self.start_server(number)

    def start_server(self, number: int) -> None:
        context = multiprocessing.get_context("forkserver")
        stop, totals = context.Event(), context.Queue()
        models = PAIR.target, PAIR.drafts["small"]
        what = stop, totals, str(self.folders[number]), STUB_REQUESTS_S, *models
        process = forked(serve_until, *what, daemon=True)
        process.start()
        self.servers[number], self.told[number] = process, (stop, totals)

    def kill_server(self, number: int) -> None:
        _kill(self.servers[number])

    def start_follow(self, folder: Path) -> Any:
        process = forked(_follow, self.database.url, folder, self.lasts, daemon=True)
        process.start()
        return process

    def start_worker(self, store: TraceStore) -> Any:
        place = Place("cpu", "vllm", store.active_publication(PAIR.id, "cpu", "vllm"))
        how = {"block_s": self.lasts.block, "actor": "bench"}
        begun = begin(store, CANDIDATE, PAIR.id, place, say, **how)
        process = forked(_conduct, self.database.url, begun.id, self.lasts, daemon=True)
        process.start()
        return process

    def end_servers(self) -> list[dict[str, int]]:
        """What each says to have served, noted and dropped since it was started last."""
        for stop, _ in self.told:
            stop.set()
        return [totals.get(timeout=PATIENCE_S) for _, totals in self.told]

    def close(self) -> None:
        super().close()
        for process in self.servers:
            _kill(process)


def _follow(url: str, folder: Path, lasts: Durations) -> None:
    follow_policy.TTL_S, follow_policy.RENEW_S = lasts.ttl, lasts.renew  # type: ignore[misc]
    with opened(url) as store:
        Follower(store, folder, "vllm", lambda _: None, pair=PAIR).run(threading.Event())


def _conduct(url: str, number: int, lasts: Durations) -> None:
    conductor.FIRST_PAIRS = 0  # type: ignore[misc]
    with opened(url) as store:
        how = {"look_s": lasts.lease / 5, "lease_s": lasts.lease}
        conductor.conduct(store, threading.Event(), lambda _: None, number=number, **how)


def _stored(store: TraceStore) -> dict[str, list[Any]]:
    """What the database has acknowledged: keys by table."""
    keys = {
        "publications": (Publication.version,),
        "acknowledgements": (Acknowledgement.id,),
        "rollouts": (Rollout.id,),
        "turns": (RolloutTurn.rollout_id, RolloutTurn.boot, RolloutTurn.since),
        "requests": (Trajectory.recording_id, Trajectory.request_id),
    }
    with store.database.read() as session:
        return {
            table: [tuple(row) for row in session.execute(sa.select(*columns))]
            for table, columns in keys.items()
        }


class Harm:
    """Faults of a site, one after the other, each amid a trial of its own."""

    def __init__(self, site: Site, store: TraceStore, clock: Clock) -> None:
        self.site, self.store, self.clock = site, store, clock
        self.faults: dict[int, str] = {}
        """By the version of the trial."""
        self.acknowledged: dict[str, set[Any]] = {}

    def do(self, fault: str) -> None:
        site, store = self.site, self.store
        publish(store, INCUMBENT)
        version = self._begin()
        time.sleep(2 * site.lasts.block)
        for table, keys in _stored(store).items():
            self.acknowledged.setdefault(table, set()).update(keys)
        self.faults[version], began = fault, time.monotonic()
        site.suffer(fault, self.clock)
        for rollout in store.rollouts("vllm", is_open=True):
            store.abort_rollout(rollout.id, "the next fault")
        _kill(site.worker)
        self.await_stored()
        say(f"{fault}: {time.monotonic() - began:.0f} s")

    def _begin(self) -> int:
        """The version of a trial that every server has begun."""
        site, store, found = self.site, self.store, [0]

        def is_tried() -> bool:
            for rollout in store.rollouts("vllm", is_open=True):
                found[0] = rollout.trial_version
                return site.is_tried(found[0])
            store.thaw("vllm")
            if site.worker is None or not _runs(site.worker):
                site.worker = site.start_worker(store)
            time.sleep(0.2)
            return False

        eventually(is_tried)
        return found[0]

    def await_stored(self) -> None:
        """Returns once all is stored that is noted by now."""
        noted = self.site.watch.noted()
        count = sa.select(sa.func.count()).select_from(Trajectory)

        def is_stored() -> bool:
            time.sleep(0.2)
            with self.store.database.read() as session:
                return (session.scalar(count) or 0) >= noted

        eventually(is_stored)

    def figures(self) -> dict[str, Any]:
        """What came of all faults."""
        noted, rounds = set[tuple[str, str]](), dict[Key, list[float]]()
        for boot, line in self.site.watch.lines():
            noted.add((boot, line["id"]))
            for start, _, _, _, version, seconds, _, ended in line["rounds"]:
                if version < 0 and start:
                    real = ended - STEP_S * round((ended - time.time()) / STEP_S)
                    rounds.setdefault((boot, version), []).append(real - seconds)
        stored = _stored(self.store)
        servers = self.store.followed_servers()
        boots = {name: server.boot for server in servers for name in server.recordings.values()}
        requests = [(boots[recording], name) for recording, name in stored["requests"]]
        kept = {name: keys - set(stored[name]) for name, keys in self.acknowledged.items()}
        return {
            "faults": {fault: self._by_fault(fault, rounds) for fault in FAULTS},
            "acknowledged": {name: len(keys) for name, keys in self.acknowledged.items()},
            "acknowledged_lost": sum(map(len, kept.values())),
            "noted": len(noted),
            "lost": len(noted - set(requests)),
            "doubled": len(requests) - len(set(requests)),
        }

    def _by_fault(self, fault: str, rounds: dict[Key, list[float]]) -> dict[str, Any]:
        """The trials that suffered a fault, and rounds of their candidates: how many of them no
        renewal asked for, and the most seconds after one (``longest_s``)."""
        versions = {version for version, name in self.faults.items() if name == fault}
        renewals = [r for r in self.site.watch.renewals if r.key[1] in versions]
        longest_s, late, unasked, total = 0.0, set[Key](), 0, 0
        for key in (key for key in rounds if key[1] in versions):
            own = [r for r in renewals if r.key == key]
            for at in rounds[key]:
                before = [r for r in own if r.written - 1 <= at]
                total += 1
                if not before:
                    unasked += 1
                    continue
                last = before[-1]
                longest_s = max(longest_s, at - last.written)
                if at > (last.was_read or last.written) + last.ttl_s:
                    late.add(key)
        return {
            "times": len(versions),
            "trials": len({r.key for r in renewals}),
            "outlived": len(late),
            "candidate_rounds": total,
            "unasked_rounds": unasked,
            "longest_s": longest_s,
        }


def _runs(process: Any) -> bool:
    is_alive = getattr(process, "is_alive", None)
    return bool(is_alive()) if is_alive else process.poll() is None


@contextmanager
def _database(folder: Path) -> Iterator[tuple[Server, Clock]]:
    """PostgreSQL, whose clock steps too."""
    binaries = server_binaries()
    if binaries is None:
        raise RuntimeError("PostgreSQL's programs are needed: a database is stopped")
    folder.chmod(0o755)  # for its user
    with closing(Clock(folder)) as clock, closing(Server(binaries)) as server:
        server.start()
        yield server, clock


def _told(figures: dict[str, Any], where: str) -> dict[str, Any]:
    parts = figures["faults"].values()
    names = "trials", "outlived", "unasked_rounds"
    trials, late, unasked = (sum(part[name] for part in parts) for name in names)
    times = "; ".join(f"{p['times']} {word}" for p, word in zip(parts, WORDS, strict=True))
    lost = figures["lost"] + figures["acknowledged_lost"]
    rows = sum(figures["acknowledged"].values()) + figures["noted"]
    summary = (
        f"{where}: {times}: {late} of {trials} trials outlived their end; {lost} of {rows} "
        f"acknowledged rows and noted requests lost, {figures['doubled']} stored twice; "
        f"{figures['failed']} of {figures['requests']} requests failed"
    )
    if "cut" in figures:
        summary += f" ({figures['cut']} more of servers that were killed)"
    summary += f", {figures['differ']} texts differ"
    harm = late + unasked + lost + sum(figures[n] for n in ("doubled", "failed", "differ"))
    return {**figures, "summary": summary, "holds": not harm}


def measure(quick: bool) -> dict[str, Any]:
    """In a real vLLM amid traffic, by the times that ship."""
    lasts = Durations(3.0, 5.0, 5.0 if quick else 60.0)
    prompts = demo_prompts(PROMPTS, LENGTH)
    with temporary_folder() as folder, _database(folder) as (database, clock), ExitStack() as stack:
        store = stack.enter_context(opened(database.url))
        site = stack.enter_context(closing(VllmSite(database, folder, lasts)))
        server = RunningServer(site.process.url, site.process.rounds, PAIR)
        traffic = Traffic(server, prompts, CLIENTS, LENGTH)
        traffic.site = site
        site.start_follows()
        eventually(lambda: PAIR.id in {known.id for known in store.list_pairs()})
        version = publish(store, AUTOREGRESSIVE)
        eventually(lambda: _status(site.folders[0]).in_force.version == version)
        traffic.send_once()
        plain = dict(traffic.texts)
        harm = Harm(site, store, clock)
        with traffic.sending():
            for fault in itertools.chain(*[FAULTS] * (1 if quick else 3)):
                harm.do(fault)
        harm.await_stored()
        figures = harm.figures()
    differ = sum(text != plain[number] for number, text in traffic.texts)
    failed, answered = len(traffic.failures), len(traffic.texts)
    more = {"requests": failed + answered, "failed": failed, "failures": traffic.failures[:3]}
    return _told({**figures, **more, "cut": traffic.cut, "differ": differ}, "vLLM")


def measure_stub(quick: bool) -> dict[str, Any]:
    """With several stand-ins and one database, by shorter times."""
    lasts = Durations(1.0, 1.5, 4.0, lease=1.5, ttl=2.5, renew=0.5)
    with temporary_folder() as folder, _database(folder) as (database, clock), ExitStack() as stack:
        store = stack.enter_context(opened(database.url))
        site = stack.enter_context(closing(StubSite(database, folder, lasts)))
        site.start_follows()
        eventually(lambda: len(store.followed_servers()) == STUBS)
        harm = Harm(site, store, clock)
        for fault in itertools.chain(*[FAULTS] * (1 if quick else 20 // STUBS)):
            harm.do(fault)
        totals = site.end_servers()
        harm.await_stored()
        figures = harm.figures()
        outputs = [line["output"] for _, line in site.watch.lines()]
    differ = sum(output != [*range(TOKENS)] for output in outputs)
    failed = sum(t["served"] - t["noted"] - t["dropped"] for t in totals)
    dropped = sum(t["dropped"] for t in totals)
    more = {"requests": len(outputs), "failed": failed, "dropped": dropped, "differ": differ}
    return _told({**figures, **more}, f"{STUBS} stand-ins for it")
