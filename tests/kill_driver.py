"""`kill -9` of `record` and `tune` at random moments, and what must hold after each: nothing
committed is lost or changed.

:func:`run_kills` is for tests and ``bench/checks/kills.py``. The commands run as children of one
warm process that forks (itself from the fork server of :mod:`doors`), so that a kill costs no
second import of torch; they are real processes and die by a real SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from databases import run_sql
from doors import forked, put_profile, write_workload

from spectune import cli
from spectune.db import DatabaseError, check

TIMEOUT_S = 300.0
Facts = dict[tuple[Any, ...], Any]
KEPT = {
    "trajectory": "recording_id, ordinal, tokens",
    "panorama": "recording_id, ordinal, draft, acceptance",
    "study": "id, trials",
    "latency_profile": "id, terms",
    "publication": "version, policy_id",
}
"""Of each table the columns of a key, and last the content that stands for the row: of a panorama,
which a tuning replaces by a wider one, what no width changes."""


def run_kills(
    pair_file: Path | str, workdir: Path | str, count: int, seed: int, *, requests: int = 18
) -> dict[str, Any]:
    """Kills `record` and `tune` ``count`` times in all, half each, on databases in ``workdir``.

    After every kill the database passes its check and holds everything it held before; in the end
    both commands finish, and every finished recording has the content of one that was never
    interrupted. Returns ``kills`` (how many, by command and phase), ``finished`` (runs that ended
    before their kill came), ``problems`` (empty when all is well) and ``seconds``.
    """
    receiving, sending = multiprocessing.Pipe(duplex=False)
    driver = forked(_drive, sending, str(pair_file), Path(workdir), count, seed, requests)
    driver.start()
    sending.close()
    try:
        found: dict[str, Any] | str = receiving.recv()
    except EOFError:
        found = "it was killed"
    driver.join()
    if isinstance(found, str):
        raise RuntimeError(f"the kill driver failed: {found}")
    return found


@dataclass
class Ended:
    """How a child ended: its exit code (None: killed by us), and when each of its phases began, in
    seconds from its start."""

    code: int | None
    phases: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    stderr: str = ""


def child(work: Callable[[], None], kill_in: str | None = None, delay_s: float = 0.0) -> Ended:
    """Runs ``work`` in a forked process; kills it ``delay_s`` after the phase ``kill_in`` begins
    (``start``: at once)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.dup2(writing, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
        try:
            work()
            code = 0
        except SystemExit as done:
            code = int(done.code or 0)
        finally:
            os._exit(code)
    os.close(writing)
    began = time.monotonic()
    ended = Ended(None, {"start": 0.0})
    text = b""
    try:
        while True:
            kill_at = ended.phases[kill_in] + delay_s if kill_in in ended.phases else TIMEOUT_S
            left = kill_at - (time.monotonic() - began)
            ready = select.select([reading], [], [], max(0.0, left))[0] if left > 0 else []
            if not ready:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                if kill_at >= TIMEOUT_S:
                    raise TimeoutError(f"still running after {TIMEOUT_S:.0f} s: {text.decode()}")
                break
            part = os.read(reading, 65536)
            if not part:
                ended.code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                break
            text += part
            for line in text.decode(errors="replace").split("\n")[:-1]:
                ended.phases.setdefault(line.split(":")[0].split(" ")[0], time.monotonic() - began)
    finally:
        os.close(reading)
    ended.seconds, ended.stderr = time.monotonic() - began, text.decode(errors="replace")
    return ended


class Driver:
    """One series of kills; see :func:`run_kills`."""

    def __init__(self, pair: str, folder: Path, seed: int, requests: int) -> None:
        self.pair, self.folder, self.chance = pair, folder, random.Random(seed)
        self.requests, self.problems = requests, list[str]()
        self.kills: Counter[str] = Counter()
        self.finished = 0
        folder.mkdir(parents=True, exist_ok=True)
        self.workload = write_workload(folder / "work.jsonl", requests)

    def run_command(self, name: str, database: str, seed: int, *kill: Any) -> Ended:
        quick = ""
        if name == "tune":
            quick = "--set search.trials=4 --set race.finalists=1 --budget 1s"
            trees = "--set trees.width=2 --set trees.depth=2"
            if self.requests < 18:  # which could not be confirmed
                trees = "--set trees.width=0 --no-publish"
            quick = f"{quick} {trees}"
        arguments = (
            f"--db {self.folder / database} {name} --pair {self.pair} --workload {self.workload} "
            f"--max-new-tokens 16 --set search.gamma_max=4 {quick} --set device=cpu "
            f"--set sampling.seed={seed}"
        ).split()
        return child(lambda: cli.main(arguments), *kill)

    def put_profile(self, database: str) -> None:
        child(lambda: put_profile(str(self.folder / database), self.pair) and None)

    def facts(self, database: str) -> Facts:
        """Everything committed, by key: contents that must never change again."""
        return {
            (table, *row[:-1]): row[-1]
            for table, columns in KEPT.items()
            for row in run_sql(self.folder / database, f"SELECT {columns} FROM {table}")
        }

    def complete(self, database: str) -> list[Facts]:
        """The texts of every complete recording, by ordinal."""
        asked = "SELECT id FROM recording WHERE state = 'complete'"
        texts = {k: v for k, v in self.facts(database).items() if k[0] == "trajectory"}
        return [
            {k[2:]: v for k, v in texts.items() if k[1] == name}
            for (name,) in run_sql(self.folder / database, asked)
        ]

    def verify(self, database: str, before: Facts, what: str) -> Facts:
        try:
            report = check(str(self.folder / database))
        except DatabaseError:
            if before:
                raise
            return before  # killed before the tables were committed
        self.problems += [f"{what}: {problem}" for problem in report.problems]
        now = self.facts(database)
        changed = [key for key, value in before.items() if now.get(key) != value]
        self.problems += [f"{what}: {key} is lost or changed" for key in changed]
        return now

    def series(
        self, name: str, database: str, count: int, phases: dict[str, float], expected: Facts
    ) -> None:
        """``count`` kills of one command, spread over its phases (name to length in seconds), then
        a run to the end."""
        known: Facts = {}
        seed = attempts = killed = 0
        todo: list[str] = []
        profiled = name == "record"
        while killed < count and attempts < 4 * count + 4:
            attempts += 1
            if not todo:
                todo = list(phases)
                self.chance.shuffle(todo)
            phase = todo.pop() if profiled else "profile"
            length = 0.5 if phase == "profile" else phases[phase]
            ended = self.run_command(
                name, database, seed, phase, self.chance.uniform(0.0, 1.1 * length)
            )
            what = f"{name}, attempt {attempts}, in {phase}"
            if ended.code is None:
                self.kills[f"{name} {phase}"] += 1
                killed += 1
            elif ended.code == 0:
                self.finished += 1
                seed += 1
            else:
                self.problems.append(f"{what}: exit code {ended.code}: {ended.stderr}")
            known = self.verify(database, known, what)
            if not profiled:
                self.put_profile(database)
                profiled = True
        last = self.run_command(name, database, seed)
        if last.code != 0:
            self.problems.append(f"{name} did not finish: exit code {last.code}: {last.stderr}")
        self.verify(database, known, f"{name}, at the end")
        made = self.complete(database)
        if not made:
            self.problems.append(f"{name} left no complete recording")
        differs = f"{name}: a resumed recording differs from an uninterrupted one"
        self.problems += [differs for recording in made if recording != expected]

    def run(self, count: int) -> dict[str, Any]:
        began = time.monotonic()
        self.put_profile("whole.db")
        # One kill of `tune` falls into its profile: how long its phases last is not asked.
        name = "tune" if count > 3 else "record"
        whole = self.run_command(name, "whole.db", 0)
        if whole.code != 0:
            raise RuntimeError(f"{name} does not even run undisturbed: {whole.stderr}")
        expected = self.complete("whole.db")[0]
        order = sorted(whole.phases.items(), key=lambda item: item[1])
        ends = [at for _, at in order[1:]] + [whole.seconds]
        lengths = {phase: end - at for (phase, at), end in zip(order, ends, strict=True)}
        recording = {p: lengths[p] for p in ("start", "decode", "panorama") if p in lengths}
        self.series("record", "record.db", (count + 1) // 2, recording, expected)
        self.series("tune", "tune.db", count // 2, lengths, expected)
        return {
            "kills": dict(sorted(self.kills.items())),
            "count": self.kills.total(),
            "finished": self.finished,
            "phases_s": {k: round(v, 3) for k, v in lengths.items()},
            "problems": self.problems,
            "seconds": round(time.monotonic() - began, 1),
        }


def _drive(
    sending: Connection, pair: str, folder: Path, count: int, seed: int, requests: int
) -> None:
    """The driver's process, which computes nothing itself: its children fork from a process without
    threads."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    try:
        sending.send(Driver(pair, folder, seed, requests).run(count))
    except Exception:
        sending.send(traceback.format_exc())
