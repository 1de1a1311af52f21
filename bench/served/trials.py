"""Faults amid trials: worker, `follow` or server killed, the folder gone, the database down, the
clock stepped by an hour; in a real vLLM, and with the agent beside stand-ins for vLLM."""

from __future__ import annotations

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
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from agent_stub import TOKENS, serve_until
from databases import Server, opened, server_binaries
from doors import Door, forked
from waiting import PATIENCE_S, eventually

from bench.harness import say
from bench.served.live import MAX_LEN, PAIR, demo_prompts, publish, temporary_folder, windowed
from bench.served.publications import Clients
from bench.served.trial_watch import STEP_S, Kept, Watch
from spectune.engines.engine import Wanted
from spectune.engines.vllm import follow_policy
from spectune.engines.vllm.folder import Status, read_status
from spectune.engines.vllm.follow import Follower
from spectune.engines.vllm.running import RunningServer
from spectune.engines.vllm.server import START_S, ServerProcess
from spectune.optimizer.commands.rollouts import begin
from spectune.optimizer.deployment import Place
from spectune.optimizer.rollout import conductor
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.traces.errors import EngineError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Rollout

FAULTS = {
    "worker": "kill -9 of the worker",
    "follow": "of follow",
    "server": "of the server",
    "folder": "its folder away",
    "database": "its database down",
    "clock": "its clock stepped by an hour",
}
INCUMBENT, CANDIDATE = windowed(3), windowed(4)
CLIENTS, PROMPTS, LENGTH = 3, 12, 32
STUBS, STUB_REQUESTS_S = 4, 10.0
VLLM_TIMES, STUB_TIMES = 3, 5
"""How often each fault is; each harms all servers."""
NOTED_S = 5.0
"""Until an agent has noted what ended, and more."""
SHIM = Path(__file__).with_name("stepped_clock.c")


class Durations(NamedTuple):
    """Seconds: of a block, of the folder's and the database's absence, of the conductor's lease,
    until a trial ends and between two renewals of it."""

    block: float
    away: float
    down: float
    lease: float = conductor.LEASE_S
    ttl: float = follow_policy.TTL_S
    renew: float = follow_policy.RENEW_S


class Clock:
    """The wall clock of every process that is started from now on (``CLOCK_REALTIME``, as libc
    tells it, by a library that is loaded before), which steps with a file. The clock of this
    process does not, nor do the times of files."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "step", folder / "stepped_clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, SHIM, "-ldl"], check=True)
        self._seconds = STEP_S
        self._file.write_bytes(struct.pack("q", self._seconds))
        os.environ |= {"LD_PRELOAD": str(library), "CLOCK_STEP": str(self._file)}

    def step(self) -> None:
        """An hour back, and the next time ahead."""
        self._seconds = STEP_S - self._seconds
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", self._seconds))

    def close(self) -> None:
        for name in ("LD_PRELOAD", "CLOCK_STEP"):
            del os.environ[name]


class Setup(NamedTuple):
    """A folder, a database and its store, and the clock of all."""

    folder: Path
    database: Server
    store: TraceStore
    clock: Clock


class Site(ABC):
    """Servers with a `follow` each, and one worker; faults amid trials there."""

    def __init__(self, setup: Setup, folders: Sequence[Path], lasts: Durations) -> None:
        self.setup, self.store, self.folders, self.lasts = setup, setup.store, folders, lasts
        self.follows, self.worker, self.faults = list[Any](), None, dict[int, str]()
        """``faults``: by the version of the trial."""
        (kept := setup.folder / "kept").mkdir()
        self.watch, self.kept = Watch(folders, kept), Kept(setup.store)

    @abstractmethod
    def restart_servers(self) -> None:
        """Kills those that run."""

    @abstractmethod
    def start_follow(self, folder: Path) -> Any: ...

    @abstractmethod
    def start_worker(self) -> Any: ...

    def start_follows(self) -> None:
        self.follows = [self.start_follow(folder) for folder in self.folders]

    def end_follows(self) -> None:
        for process in self.follows:
            _kill(process)

    def close(self) -> None:
        self.end_follows()
        self.watch.close()

    def statuses(self) -> list[Status]:
        eventually(lambda: all(map(read_status, self.folders)))
        return [status for folder in self.folders if (status := read_status(folder))]

    def tried(self) -> list[int]:
        """The version of each trial that goes on."""
        trials = [status.trial for status in self.statuses()]
        return [trial.version for trial in trials if trial and not trial.is_over]

    def suffer(self, fault: str) -> None:
        """Begins a trial, does harm amid it, and waits for what follows; repairs it, and returns
        once all is stored that was noted until then."""
        rollout = self.begin()
        while self.tried() != [rollout.trial_version] * len(self.folders):
            rollout = self.begin()  # it has ended already, with a verdict
        time.sleep(2 * self.lasts.block)
        self.kept.note()
        self.faults[rollout.trial_version], began = fault, time.monotonic()
        {
            "worker": self.kill_worker,
            "follow": self.kill_follows,
            "server": self.kill_servers,
            "folder": self.take_folders,
            "database": self.stop_database,
            "clock": self.step_clock,
        }[fault]()
        for left in self.store.rollouts("vllm", is_open=True):
            self.store.abort_rollout(left.id, "the next fault")
        _kill(self.worker)
        self.await_stored()
        say(f"{fault}: {time.monotonic() - began:.0f} s")

    def begin(self) -> Rollout:
        """A rollout that every server takes part in, unless it has ended meanwhile."""
        before = len(self.store.rollouts("vllm"))
        publish(self.store, INCUMBENT)
        self.store.thaw("vllm")
        self.worker = self.start_worker()
        eventually(lambda: len(self.store.rollouts("vllm")) > before)
        rollout = self.store.rollouts("vllm", limit=1)[0]
        eventually(
            lambda: (
                self.tried() == [rollout.trial_version] * len(self.folders)
                or not self.store.rollouts("vllm", is_open=True)
            )
        )
        return rollout

    def kill_worker(self) -> None:
        _kill(self.worker)
        eventually(lambda: not self.tried())

    def kill_follows(self) -> None:
        self.end_follows()
        eventually(lambda: not self.tried())
        self.start_follows()

    def kill_servers(self) -> None:
        boots = {status.boot for status in self.statuses()}
        self.restart_servers()
        eventually(lambda: not boots & {status.boot for status in self.statuses()}, START_S)
        time.sleep(self.lasts.block)

    def take_folders(self) -> None:
        places = {folder: folder.with_name(f"{folder.name}-away") for folder in self.folders}
        for folder, away in places.items():
            folder.rename(away)
        time.sleep(self.lasts.away)
        for folder, away in places.items():
            away.rename(folder)
        time.sleep(self.lasts.block)

    def stop_database(self) -> None:
        self.setup.database.stop()
        time.sleep(self.lasts.down)
        self.setup.database.start()

    def step_clock(self) -> None:
        """All live through it for a while; what is tried then has to end by itself."""
        self.setup.clock.step()
        time.sleep(self.lasts.away)
        self.kill_follows()

    def await_stored(self) -> None:
        """Returns once all is stored that is noted by now."""
        noted = self.watch.num_noted()
        eventually(lambda: self.kept.num_requests() >= noted)

    def figures(self) -> dict[str, Any]:
        """What came of all faults, once no request runs any more, and all is stored that was
        noted."""
        time.sleep(NOTED_S)
        self.await_stored()
        faults = {}
        for fault in FAULTS:
            versions = {version for version, name in self.faults.items() if name == fault}
            faults[fault] = {"times": len(versions), **self.watch.of_trials(versions)}
        return {"faults": faults, **self.kept.lost(self.watch)}


def _kill(process: Any) -> None:
    process.kill()
    (process.join if hasattr(process, "join") else process.wait)(PATIENCE_S)


class VllmSite(Site):
    """One vLLM server, with the command line's `follow` and `policies rollout`."""

    def __init__(self, setup: Setup, lasts: Durations) -> None:
        self.server = ServerProcess(PAIR, Wanted("small", 8, 8, MAX_LEN), setup.folder)
        self.server.wait_until_ready()
        environment = Path(f"/proc/{self.server.process.pid}/environ").read_bytes().split(b"\0")
        self._environment = dict(entry.split(b"=", 1) for entry in environment if entry)
        self.is_down, self.starts, self._door = False, 1, Door(setup.database.url)
        super().__init__(setup, [self.server.rounds], lasts)

    def restart_servers(self) -> None:
        self.is_down, died = True, self.server.process
        os.killpg(died.pid, signal.SIGKILL)
        died.wait(PATIENCE_S)
        with self.server.log.open("ab") as log:
            started = subprocess.Popen(
                died.args,
                env=self._environment,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        self.server.process = started
        self.server.wait_until_ready()
        self.is_down, self.starts = False, self.starts + 1

    def start_follow(self, folder: Path) -> Any:
        return self._door.start("follow", folder, pair="demo")

    def start_worker(self) -> Any:
        of = "--pair", "demo", "--device", "cpu", "--deployment", "vllm"
        policy, how = json.dumps(CANDIDATE.spelled_out()), f"block={self.lasts.block:g}s"
        return self._door.start("policies rollout", policy, *of, "--set", how)

    def close(self) -> None:
        super().close()
        self.server.close()


class Traffic(Clients):
    """Clients of a server that is killed: ``cut`` counts what was sent to it, or failed, while it
    was down."""

    def __init__(self, site: VllmSite) -> None:
        server = RunningServer(site.server.url, site.server.rounds, PAIR)
        super().__init__(server, demo_prompts(PROMPTS, LENGTH), CLIENTS, LENGTH)
        self.site, self.cut = site, 0

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

    def __init__(self, setup: Setup, lasts: Durations) -> None:
        folders = [setup.folder / f"rounds{n}" for n in range(STUBS)]
        for folder in folders:
            folder.mkdir()
        super().__init__(setup, folders, lasts)
        self._servers = list[Any]()
        self.restart_servers()

    def restart_servers(self) -> None:
        for process in self._servers:
            _kill(process)
        context = multiprocessing.get_context("forkserver")
        models = PAIR.target, PAIR.drafts["small"]
        self._told = [(context.Event(), context.Queue()) for _ in self.folders]
        self._servers = [
            _begun(serve_until, *told, str(folder), STUB_REQUESTS_S, *models)
            for told, folder in zip(self._told, self.folders, strict=True)
        ]

    def start_follow(self, folder: Path) -> Any:
        return _begun(_follow, self.setup.database.url, folder, self.lasts)

    def start_worker(self) -> Any:
        return _begun(_conduct, self.setup.database.url, self.lasts)

    def end_servers(self) -> list[dict[str, int]]:
        """What each says to have served, noted and dropped since it was started last."""
        for stop, _ in self._told:
            stop.set()
        return [totals.get(timeout=PATIENCE_S) for _, totals in self._told]

    def close(self) -> None:
        super().close()
        for process in self._servers:
            _kill(process)


def _begun(target: Any, *arguments: Any) -> Any:
    process = forked(target, *arguments, daemon=True)
    process.start()
    return process


def _follow(url: str, folder: Path, lasts: Durations) -> None:
    """`follow`, in whose process trials end sooner than they do as it ships."""
    follow_policy.TTL_S, follow_policy.RENEW_S = lasts.ttl, lasts.renew  # type: ignore[misc]
    with opened(url) as store:
        Follower(store, folder, "vllm", lambda _: None, pair=PAIR).run(threading.Event())


def _conduct(url: str, lasts: Durations) -> None:
    """Begins a rollout, by the clock that steps, and conducts it; all servers take part at once."""
    conductor.FIRST_PAIRS = 0  # type: ignore[misc]
    with opened(url) as store:
        place = Place("cpu", "vllm", store.active_publication(PAIR.id, "cpu", "vllm"))
        of = {"block_s": lasts.block, "actor": "bench"}
        number = begin(store, CANDIDATE, PAIR.id, place, say, **of).id
        how = {"number": number, "look_s": lasts.lease / 5, "lease_s": lasts.lease}
        conductor.conduct(store, threading.Event(), lambda _: None, **how)


@contextmanager
def _setup() -> Iterator[Setup]:
    """A folder, and PostgreSQL, whose clock steps too. Raises RuntimeError without its programs."""
    if (binaries := server_binaries()) is None:
        raise RuntimeError("PostgreSQL's programs are needed: a database is stopped")
    with temporary_folder() as folder:
        folder.chmod(0o755)  # for its user
        with closing(Clock(folder)) as clock, closing(Server(binaries)) as server:
            server.start()
            with opened(server.url) as store:
                yield Setup(folder, server, store, clock)


def _told(where: str, figures: dict[str, Any], **counts: Any) -> dict[str, Any]:
    figures, faults = figures | counts, figures["faults"]
    trials, late = (sum(f[name] for f in faults.values()) for name in ("trials", "outlived"))
    times = ", ".join(f"{faults[fault]['times']} {words}" for fault, words in FAULTS.items())
    lost = figures["lost"] + figures["acknowledged_lost"]
    rows = sum(figures["acknowledged"].values()) + figures["noted"]
    cut = f" and {figures['cut']} of killed servers" if "cut" in figures else ""
    summary = (
        f"{where}: {times}: {late} of {trials} trials outlived their end; {lost} of {rows} "
        f"acknowledged rows and noted requests lost, {figures['doubled']} stored twice; "
        f"{figures['failed']} of {figures['requests']} requests failed{cut}, "
        f"{figures['differ']} texts differ"
    )
    harm = late + lost + sum(figures[name] for name in ("doubled", "failed", "differ"))
    return {**figures, "summary": summary, "holds": not harm}


def measure(quick: bool) -> dict[str, Any]:
    """In a real vLLM amid traffic, by the times that ship."""
    lasts = Durations(3.0, 5.0, 5.0 if quick else 60.0)
    with _setup() as setup, closing(VllmSite(setup, lasts)) as site:
        traffic = Traffic(site)
        site.start_follows()
        eventually(lambda: PAIR.id in {known.id for known in setup.store.list_pairs()})
        version = publish(setup.store, AUTOREGRESSIVE)
        eventually(lambda: site.statuses()[0].in_force.version == version)
        traffic.send_once()
        plain = dict(traffic.texts)
        with traffic.sending():
            for fault in [*FAULTS] * (1 if quick else VLLM_TIMES):
                site.suffer(fault)
        figures = site.figures()
    failed, answered = len(traffic.failures), len(traffic.texts)
    differ = sum(text != plain[number] for number, text in traffic.texts)
    counts = {"requests": failed + answered, "failed": failed, "cut": traffic.cut, "differ": differ}
    return _told("vLLM", figures, failures=traffic.failures[:3], **counts)


def measure_stub(quick: bool) -> dict[str, Any]:
    """With several stand-ins and one database, by shorter times."""
    lasts = Durations(2.0, 1.5, 4.0, lease=1.5, ttl=2.5, renew=0.5)
    with _setup() as setup, closing(StubSite(setup, lasts)) as site:
        site.start_follows()
        eventually(lambda: len(setup.store.followed_servers()) == STUBS)
        for fault in [*FAULTS] * (1 if quick else STUB_TIMES):
            site.suffer(fault)
        totals = site.end_servers()
        figures = site.figures()
        outputs = [line["output"] for _, line in site.watch.lines()]
    failed = sum(told["served"] - told["noted"] - told["dropped"] for told in totals)
    counts = {"requests": len(outputs), "failed": failed}
    counts["differ"] = sum(output != [*range(TOKENS)] for output in outputs)
    dropped = sum(told["dropped"] for told in totals)
    return _told(f"{STUBS} stand-ins for it", figures, dropped=dropped, **counts)
