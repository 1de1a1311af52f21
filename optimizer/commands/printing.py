"""What commands print: results as tables or as JSON, lines for people, progress, and commands to
paste."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from rich.console import Console

PAIR_FOUND: Final = "spectune.pair"
"""Where a context keeps the pair that a recording named."""
RECORDINGS: Final = ("recording", "recording_id", "resumed_id")
"""Options that name a recording."""
_RUNNING: Final = "spectune.running"
_JSON: Final = "spectune.json"


def _keep_json(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    ctx.meta[_JSON] = wanted


json_option = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=_keep_json,
    help="Print one JSON object on stdout; all else goes to stderr.",
)


class Command(click.Command):
    """A command with ``--json``, which :func:`emit` obeys."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        json_option(self)

    def invoke(self, ctx: click.Context) -> Any:
        ctx.meta[_RUNNING] = ctx
        return super().invoke(ctx)


class Group(click.Group):
    """Several of them."""

    command_class = Command


def running() -> click.Context:
    """The context of the command that runs, or ran, also where its errors are told."""
    ctx = click.get_current_context()
    found: click.Context = ctx.meta.get(_RUNNING, ctx)
    return found


def as_json() -> bool:
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(_JSON))


def console_for(stderr: bool = False) -> Console:
    """Rich's console, which reads no markup and no names of emoji in what it prints; 100 columns
    wide where there is no terminal."""
    from rich.console import Console

    is_known = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    width = None if is_known else 100
    return Console(
        stderr=stderr, width=width, soft_wrap=False, highlight=False, markup=False, emoji=False
    )


def emit(data: Any, view: Any = None) -> None:
    """Prints ``data`` as one line where ``--json`` asks for it, else ``view``: a text or
    what builds a table (:func:`table`). Without a view, ``data`` indented."""
    from rich.text import Text

    from spectune.traces.text import printable

    if as_json():
        click.echo(json.dumps(data, ensure_ascii=False))
        return
    if view is None:
        click.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    built = view() if callable(view) else view
    console = console_for()
    if isinstance(built, str):
        console.print(Text(printable(built)), soft_wrap=not console.is_terminal)
    else:
        console.print(built)


def table(
    rows: Sequence[dict[str, Any]], columns: Sequence[str] = (), title: str = ""
) -> Callable[[], Any]:
    """A view of rows for :func:`emit`; ``columns``: all that the first has, where none is named."""

    def build() -> Any:
        from spectune.optimizer.report.tables import rows_table

        return rows_table(rows, columns or list(rows[0]), title)

    return build


def say(text: str, *, err: bool = False) -> None:
    """Prints lines that may hold what others wrote (:func:`traces.text.printable`), their commands
    whole."""
    from spectune.traces.text import printable

    in_command = click.get_current_context(silent=True) is not None
    click.echo(printable(whole(text) if in_command else text), err=err)


def note(text: str) -> None:
    """:func:`say` on stderr."""
    say(text, err=True)


class Meter:
    """Progress on stderr: a bar for each phase, with the time it still takes, on a terminal; a line
    per phase otherwise."""

    def __init__(self) -> None:
        from rich import progress

        self._live = (console := console_for(stderr=True)).is_terminal
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not self._live,
        )
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> Meter:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        from spectune.traces.text import one_line

        phase = one_line(phase)
        key = phase.split(",")[0]
        if key not in self._bars:
            self._bars[key] = self._progress.add_task(phase, total=total)
            if not self._live:
                click.echo(f"{key}: {total}", err=True)
        self._progress.update(self._bars[key], completed=done, total=total, description=phase)


SAME: Final = {"pair", "target", "drafts", "device", "dtype", "threads", "deployment"}
"""Options that say on what a command works."""
DECODED: Final = {
    *("workloads", "column", "all_turns", "first_turn", "overlong", "bad_rows"),
    *("temperature", "top_k", "top_p", "seed", "verifier", "stop_strings", "no_chat"),
    "max_new_tokens",
}
"""Options that say how and what it decodes."""
_QUOTED = re.compile("`([^`]+)`")


def whole(text: str) -> str:
    """A message whose quoted commands (`` `record --resume ID` ``) can be pasted
    (:func:`to_type`)."""

    def quoted(found: re.Match[str]) -> str:
        return found[0] if _command(found[1]) is None else f"`{to_type(found[1])}`"

    return _QUOTED.sub(quoted, text)


def _command(words: str) -> click.Command | None:
    """The command that words begin with; None where there is none, or a group of them, or that no
    shell reads."""
    found: click.Command | None = running().find_root().command
    try:
        split = shlex.split(words)
    except ValueError:  # a user's own text, quoted in a message
        return None
    for word in split:
        if not isinstance(found, click.Group):
            break
        found = found.commands.get(word)
    return None if isinstance(found, click.Group) else found


def to_type(words: str) -> str:
    """A command with its words, to be pasted: on the database, pair, device and deployment that the
    command line of this one named, and where it decodes, on the workload. ``ID`` stands for the
    recording of this one, ``POLICY`` for its policy."""
    from spectune.db.urls import parse_url, shown
    from spectune.runtime.pair import read_pair

    ctx = running()
    takes = {flag for param in getattr(_command(words), "params", ()) for flag in param.opts}
    if "--target" not in takes:
        takes.discard("--draft")  # where it is no part of a pair
    names = {
        "ID": next((n for key in RECORDINGS if (n := ctx.params.get(key))), "latest"),
        "POLICY": ctx.params.get("policy_name", "active"),
    }
    root = ctx.find_root()
    program = root.info_name or "spectune"
    parts = ["python", sys.argv[0]] if program.endswith(".py") else [program]
    if root.get_parameter_source("db_url") is ParameterSource.COMMANDLINE:
        url = str(root.params["db_url"])
        parts += ["--db", shown(parse_url(url)) if "://" in url else url]
    parts += [str(names.get(word, word)) for word in shlex.split(words)]
    carried = SAME | (DECODED if words.startswith("run ") else set())
    for param in ctx.command.params:
        name, flag = param.name or "", param.opts[0]
        typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if name in carried and typed and flag in takes and flag not in parts:
            value = ctx.params[name]
            if value is True:
                parts.append(flag)
            else:
                for one in value if isinstance(value, tuple) else (value,):
                    parts += [flag, str(one)]
    if "--target" in takes and (pair := ctx.meta.get(PAIR_FOUND)) is not None:
        if pair == read_pair("demo"):
            return shlex.join([*parts, "--pair", "demo"])
        parts += ["--target", pair.target]
        for draft, path in pair.drafts.items():
            parts += ["--draft", f"{draft}={path}"]
    return shlex.join(parts)
