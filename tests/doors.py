"""The command line as the tests use it: in this process where that is enough, as a real process where it is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from synthetic import flat_profile

from spectune.cli import main
from spectune.db import open_database
from spectune.runtime.loading import load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.profiling import environment
from spectune.traces.store import TraceStore

ROOT = Path(__file__).resolve().parent.parent
CLI = [sys.executable, str(ROOT / "cli.py")]
USAGE = frozenset({"policy", "requests", "rounds", "emitted_tokens", "accepted_tokens", "drafted_tokens", "draft_steps"}) | {
    "verified_tokens",
    "mean_accepted_length",
    "seconds",
    "tokens_per_s",
    "by_category",
}
"""What ``run`` and ``simulate`` print: the contract's keys."""


@dataclass(frozen=True)
class Door:
    """One database and pair behind the command line; every argument may be a path."""

    db: str
    pair: str = ""

    def call(self, *arguments: object, env: Mapping[str, str] | None = None) -> Result:
        """Runs a command in this process. An exception that is no exit is raised: a user would have seen a traceback."""
        found = CliRunner(env=dict(env or {})).invoke(main, self.arguments(*arguments))
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found

    def json(self, *arguments: object) -> dict[str, Any]:
        """The object that a command prints with ``--json``; asserts that it succeeds and prints nothing else."""
        found = self.call(*arguments, "--json")
        assert found.exit_code == 0, found.output
        return one_object(found.stdout)

    def refused(self, *arguments: object) -> str:
        """The line that a command is refused with; asserts exit code 2, that line on stderr, and nothing else."""
        found = self.call(*arguments)
        assert (found.exit_code, found.stdout, found.stderr.count("\n")) == (2, "", 1), found.output
        assert found.stderr.startswith("error: ")
        return found.stderr

    def error(self, *arguments: object) -> str:
        """The one line that says why a command fails with exit code 2, among lines on what it did before."""
        found = self.call(*arguments)
        assert (found.exit_code, found.stdout) == (2, ""), found.output
        (line,) = [x for x in found.stderr.splitlines() if x.lower().startswith("error: ")]
        return line

    def start(self, *arguments: object, **how: Any) -> subprocess.Popen[str]:
        """The command as a process of its own, its outputs as pipes."""
        return subprocess.Popen(
            [*CLI, *self.arguments(*arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # A shell that runs the tests in the background ignores SIGINT, and children inherit that; Python then has no Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **how,
        )

    def arguments(self, *arguments: object) -> list[str]:
        return ["--db", self.db, *(str(a) for a in arguments)]


def put_profile(url: str, pair_file: Path | str, *, threads: int | None = None) -> str:
    """Stores a made-up latency profile of a tiny pair on this machine's CPU, accepted and fresh, so that `tune` uses it; its id.

    Measuring takes half a minute on a busy machine, and what is measured is not what these tests are about. ``threads`` is what
    the processes that are to find it run with (default: as this one).
    """
    pair = load_pair(read_pair(str(pair_file)), device="cpu")

    here = environment(pair) | ({} if threads is None else {"threads": threads})
    made = replace(flat_profile(pair.id, pair.drafts), environment=here)
    with open_database(url) as database:
        store = TraceStore(database)
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
        return store.put_profile(made)


def one_object(text: str) -> dict[str, Any]:
    """The one JSON object in ``text``; NaN and infinities are no JSON."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    assert text.count("\n") == 1, text
    found = json.loads(text, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_workload(path: Path, count: int, prompts: Sequence[str] = ("def add(a, b):", "The quick brown fox")) -> Path:
    """A workload of ``count`` requests in two categories."""
    rows = [
        {"id": f"r{i}", "category": "ab"[i % 2], "turns": [f"{prompts[i % len(prompts)]} {i}"]} for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
