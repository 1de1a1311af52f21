"""`tune --url` end to end on a server that runs, as a user types it: seconds, stage by stage, what
won and by how much."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import ROOT
from bench.harness import say
from bench.served.live import (
    NAMES,
    REAL,
    await_version,
    command,
    drafting,
    methods_of,
    serving,
    temporary_folder,
)
from spectune.engines.vllm.running import RunningServer
from spectune.runtime.pair import read_pair
from spectune.traces.errors import EngineError

LIMIT_S = 600.0
SIZE = ("--limit", 96, "--max-new-tokens", 64)
REAL_SIZE = ("--limit", 32, "--max-new-tokens", 32, "--budget", "2m")
QUICK = ("--limit", 32, "--max-new-tokens", 12, "--budget", "10s")
INTERRUPTED = 130
"""A command's exit code after Ctrl-C."""


class Ended(NamedTuple):
    """A tuning's seconds, the lines that it told with the seconds at which they came, and its
    ``--json``."""

    seconds: float
    lines: list[tuple[float, str]]
    tuned: dict[str, Any]

    @property
    def version(self) -> int:
        """Of what it published; 0 where it published nothing."""
        published = self.tuned["published"]
        return int(published["version"]) if published else 0


def tune(
    server: RunningServer,
    database: Path,
    size: Sequence[object],
    *,
    pair: str = "demo",
    clients: Sequence[int] = (1, 4, 8),
    limit_s: float = LIMIT_S,
) -> Ended:
    """`tune --url` as a user types it, until what it published is in force.

    Raises TimeoutExpired where it takes longer than ``limit_s``: it is interrupted as by Ctrl-C,
    and goes on where it was when it is called again; EngineError where it fails.
    """
    where = ("--url", server.url, "--folder", server.folder, "--pair", pair)
    arrivals = f"clients:{','.join(map(str, clients))}"
    words = command("--db", database, "tune", *where, "--workload", "demo", *size)
    words += ["--arrivals", arrivals, "--json"]
    began, result = time.monotonic(), database.with_suffix(".json")
    lines = list[tuple[float, str]]()
    with result.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.PIPE, text=True)
        limit = threading.Timer(limit_s, lambda: process.send_signal(signal.SIGINT))
        limit.start()
        try:
            assert process.stderr is not None
            for line in process.stderr:
                line = line.strip().replace(f"{ROOT}/", "")
                lines.append((round(time.monotonic() - began, 1), line))
                say(f"{lines[-1][0]:4.0f} s {line}")
            code = process.wait()
        finally:
            limit.cancel()
    if code == INTERRUPTED:
        raise subprocess.TimeoutExpired(words, limit_s)
    if code:
        raise EngineError(lines[-1][1] if lines else f"tune: exit code {code}")
    ended = Ended(time.monotonic() - began, lines, json.loads(result.read_text()))
    await_version(server, ended.version)
    return ended


def measure(quick: bool) -> dict[str, Any]:
    with temporary_folder() as folder, serving() as server:
        return _figures(tune(server, folder / "x.db", QUICK if quick else SIZE))


def measure_real(quick: bool) -> dict[str, Any]:
    """The same of Gemma 3 270M, by each way of drafting that it has."""
    drafters, size = dict[str, dict[str, Any]](), QUICK if quick else REAL_SIZE
    how: dict[str, Any] = {"pair": str(REAL), "clients": (1, 4), "limit_s": 2 * LIMIT_S}
    for method in methods_of(spec := read_pair(str(REAL))):
        with temporary_folder() as folder, drafting(spec, method) as server:
            drafters[method] = _figures(tune(server, folder / "x.db", size, **how))
    return {
        "summary": "; ".join(
            f"by {NAMES[method]}, {of['summary']}" for method, of in drafters.items()
        ),
        "holds": not any(of["texts_differ"] for of in drafters.values()),
        "drafters": drafters,
    }


def _figures(ended: Ended) -> dict[str, Any]:
    tuned, seconds = ended.tuned, ended.seconds
    confirmed, differ = tuned["confirmed"], tuned["texts"]["differ"]
    return {
        "summary": f"{seconds:.0f} s: {tuned['reason']}",
        "holds": seconds <= LIMIT_S and not differ,
        "seconds": seconds,
        "lines": ended.lines,
        "winner": tuned["winner"]["label"],
        "ratio": confirmed["ratio"] if confirmed else None,
        "confirmed": confirmed,
        "published": ended.version or None,
        "texts_differ": differ,
        "loads": tuned["executed"],
    }
