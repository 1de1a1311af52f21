"""The command line as the tests use it: in this process where that is enough, as a real process
where it is not."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result
from databases import opened
from synthetic import flat_profile

from spectune import api
from spectune.cli import Command, main
from spectune.options import options_of
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.profiling.measure import environment
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile

ROOT = Path(__file__).resolve().parent.parent
FIXED = '{"draft": "near", "window": {"kind": "fixed", "gamma": 3}}'
"""A policy as it is typed."""
USAGE = frozenset(
    (
        *("policy", "requests", "rounds", "emitted_tokens", "accepted_tokens", "drafted_tokens"),
        *("draft_steps", "verified_tokens", "mean_accepted_length", "seconds", "tokens_per_s"),
        "by_category",
    )
)
"""What ``run`` and ``simulate`` print: the contract's keys."""


_processes = multiprocessing.get_context("forkserver")
IMPORTED = (
    *("spectune.cli", "spectune.optimizer.tuning.native", "spectune.optimizer.in_force"),
    *("spectune.optimizer.commands.tune", "spectune.runtime.profiling"),
    *("transformers.models.llama.modeling_llama", "numba", "sklearn.linear_model"),
    *("sklearn.tree", "sklearn.feature_extraction.text"),
)


def forked(target: Callable[..., None], *arguments: Any, daemon: bool = False) -> BaseProcess:
    """A process, not begun, that is forked from one that has imported torch: to import it anew
    would take each of them seconds."""
    # Said here: of all modules that ask for another server the last one before its start is heard.
    _processes.set_forkserver_preload([*IMPORTED])
    return _processes.Process(target=target, args=arguments, daemon=daemon)


def _main(arguments: list[str], folder: str, out: Connection, err: Connection) -> None:
    """A process that the command line is run in."""
    # A shell that runs the tests in the background ignores SIGINT, and children inherit that;
    # Python then has no Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    for pipe, number in ((out, 1), (err, 2)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)
    )
    main(arguments, prog_name="cli.py")


class Started:
    """A command in a process of its own (:func:`forked`), as far as tests need subprocess.Popen."""

    def __init__(self, arguments: list[str]) -> None:
        (out, out_end), (err, err_end) = (
            multiprocessing.Pipe(duplex=False),
            multiprocessing.Pipe(duplex=False),
        )
        self._process = forked(_main, arguments, os.getcwd(), out_end, err_end, daemon=True)
        self._process.start()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(pipe.fileno()), encoding="utf-8") for pipe in (out, err)
        )
        for pipe in (out, err, out_end, err_end):
            pipe.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of its outputs, once it has ended; both are small."""
        said = self.stdout.read(), self.stderr.read()
        self.wait(timeout)
        return said


@dataclass(frozen=True)
class Door:
    """One database and pair behind the command line. Every argument may be a path; the words of the
    command may stand in one text (``"traces list"``), options as keywords: ``tree_width=2`` is
    ``--tree-width 2``, True a flag, a list an option that is repeated, ``for_`` ``--for``."""

    db: str | None
    pair: str = ""

    def call(
        self, *arguments: object, env: Mapping[str, str] | None = None, **options: object
    ) -> Result:
        """Runs a command in this process. Asserts that nothing unexpected is raised."""
        found = CliRunner(env=dict(env or {})).invoke(main, self.arguments(*arguments, **options))
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        _, unexpected, path = found.stderr.partition("unexpected: the traceback is in ")
        assert not unexpected, Path(path.strip()).read_text(encoding="utf-8")
        return found

    def json(self, *arguments: object, **options: Any) -> dict[str, Any]:
        """The object that a command prints with ``--json``; asserts that it succeeds and prints
        nothing else."""
        found = self.call(*arguments, **options, json=True)
        assert found.exit_code == 0, found.output
        return one_object(found.stdout)

    def refused(self, *arguments: object, **options: Any) -> str:
        """The line that a command is refused with; asserts exit code 2, that line on stderr, and
        nothing else."""
        found = self.call(*arguments, **options)
        assert (found.exit_code, found.stdout, found.stderr.count("\n")) == (2, "", 1), found.output
        assert found.stderr.startswith("error: ")
        return found.stderr

    def error(self, *arguments: object, **options: Any) -> str:
        """The one line that says why a command fails with exit code 2, among lines on what it did
        before."""
        found = self.call(*arguments, **options)
        assert (found.exit_code, found.stdout) == (2, ""), found.output
        (line,) = [x for x in found.stderr.splitlines() if x.lower().startswith("error: ")]
        return line

    def start(self, *arguments: object, **options: Any) -> Started:
        """The command as a process of its own, its outputs as pipes."""
        return Started(self.arguments(*arguments, **options))

    def arguments(self, *arguments: object, **options: object) -> list[str]:
        words: list[str] = []
        for n, argument in enumerate(arguments):
            is_command = n == 0 and isinstance(argument, str)
            words += shlex.split(str(argument)) if is_command else [str(argument)]
        for name, value in options.items():
            flag = "--" + name.rstrip("_").replace("_", "-")
            for one in value if isinstance(value, list) else [value]:
                words += [flag] if one is True else [flag, str(one)]
        return said(words) if self.db is None else ["--db", self.db, *said(words)]


def said(words: list[str]) -> list[str]:
    """A command line in which options that the command does not show are said by ``--set``."""
    path = next((c for c in (" ".join(words[:2]), *words[:1]) if c in api.COMMANDS), None)
    if path is None:
        return words
    options = options_of(api.COMMANDS[path][0]).values()
    hidden = {option.name: option for option in options if option.hidden}
    result: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        option = hidden.get(name) or hidden.get(name.removeprefix("no-"))
        if not word.startswith("--") or option is None:
            result.append(word)
        elif option.field.annotation is bool:
            result += ["--set", f"{option.key}={'true' if name in hidden else 'false'}"]
        else:
            result += ["--set", f"{option.key}={value if equals else next(rest)}"]
    return result


def put_made_up_profile(
    store: TraceStore,
    pair: LoadedPair,
    profile: LatencyProfile | None = None,
) -> str:
    """Stores a latency profile, by default a made-up one, as that of a pair on this machine,
    accepted and fresh, so that `tune` uses it; its id.

    Measuring takes half a minute on a busy machine, and what is measured is not what these tests
    are about.
    """
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    made = profile or flat_profile(pair.id, pair.drafts)
    covers = {"gamma_max": 64, "requests": made.environment.get("requests", 1)}
    return store.put_profile(replace(made, environment={**environment(pair), **covers}))


def put_profile(url: str, pair_file: Path | str) -> str:
    """:func:`put_made_up_profile` on a CPU, for the pair of a file."""
    pair = load_pair(read_pair(str(pair_file)), device="cpu")
    with opened(url) as store:
        return put_made_up_profile(store, pair)


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


def commands(
    group: click.Group = main, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and group of the command line with the words that name it, the whole first."""
    yield path, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def parsed(words: Sequence[str]) -> click.Context:
    """A command line as click would parse it, without running it. Raises click.UsageError or
    ConfigError for what does not exist."""
    command: click.Command = main
    context, rest = None, list(words)
    while isinstance(command, click.Group):
        context = click.Context(command, info_name=command.name, parent=context)
        _, rest, _ = command.make_parser(context).parse_args(rest)
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command = found
    context = command.make_context(command.name, rest, parent=context)
    if isinstance(command, Command):
        command.settings(context.params, None, None)
    return context


def write_lines(path: Path | str, rows: Iterable[Mapping[str, Any]]) -> None:
    """A file of JSON lines."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_workload(
    path: Path, count: int, prompts: Sequence[str] = ("def add(a, b):", "The quick brown fox")
) -> Path:
    """A workload of ``count`` requests in two categories."""
    write_lines(
        path,
        (
            {"id": f"r{i}", "category": "ab"[i % 2], "turns": [f"{prompts[i % len(prompts)]} {i}"]}
            for i in range(count)
        ),
    )
    return path
