"""Files that a command writes: judged before the work, put in place whole, and results that no
database takes kept all the same."""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from spectune.optimizer.commands.config import PAIR_FOUND, RECORDINGS, RUNNING, config_of

# Options that say on what a command works.
SAME = {
    "pair": "--pair",
    "target": "--target",
    "drafts": "--draft",
    "device": "--device",
    "deployment": "--deployment",
}


DECODED = {"workloads": "--workload", "stop_strings": "--stop"} | {
    key: "--" + key.replace("_", "-")
    for key in (
        "column", "all_turns", "first_turn", "overlong", "max_new_tokens", "temperature", "top_k",
        "top_p", "seed",
        "verifier", "no_chat",
    )
}  # fmt: skip
"""What says how and what a command decodes, by parameter."""


_QUOTED = re.compile("`([^`]+)`")


def whole(ctx: click.Context, text: str) -> str:
    """A message whose quoted commands (`` `record --resume ID` ``) can be pasted
    (:func:`to_type`)."""

    def command(quoted: re.Match[str]) -> str:
        known = _command(ctx, quoted[1]) is not None
        return f"`{to_type(ctx, quoted[1])}`" if known else quoted[0]

    return _QUOTED.sub(command, text)


def _command(ctx: click.Context, words: str) -> click.Command | None:
    """The command that words begin with; None where there is none, or a group of them."""
    found: click.Command | None = ctx.find_root().command
    for word in words.split():
        if not isinstance(found, click.Group):
            break
        found = found.commands.get(word)
    return None if isinstance(found, click.Group) else found


def to_type(ctx: click.Context, words: str) -> str:
    """A command with its words, to be pasted: on the database, pair, device and deployment that the
    command line of this one named, and where it decodes, on the workload. ``ID`` stands for the
    recording of this one, ``POLICY`` for its policy."""
    from spectune.db.urls import parse_url, shown

    ctx = ctx.meta.get(RUNNING, ctx)
    takes = {flag for param in getattr(_command(ctx, words), "params", ()) for flag in param.opts}
    if "--target" not in takes:
        takes.discard("--draft")  # where it is no part of a pair
    names = {
        "ID": next((n for key in RECORDINGS if (n := ctx.params.get(key))), "latest"),
        "POLICY": ctx.params.get("policy_name", "active"),
    }
    root = ctx.find_root()
    name = root.info_name or "spectune"
    parts = ["python", sys.argv[0]] if name.endswith(".py") else [name]
    if root.get_parameter_source("db_url") is ParameterSource.COMMANDLINE:
        url = str(root.params["db_url"])
        parts += ["--db", shown(parse_url(url)) if "://" in url else url]
    parts += [str(names.get(word, word)) for word in shlex.split(words)]
    for key, flag in {**SAME, **(DECODED if words.startswith("run ") else {})}.items():
        typed = ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE
        if typed and flag in takes and flag not in parts:
            value = ctx.params[key]
            many = value if isinstance(value, tuple) else (value,)
            parts += (
                [flag] if value is True else [word for one in many for word in (flag, str(one))]
            )
    if "--target" in takes and (pair := ctx.meta.get(PAIR_FOUND)) is not None:
        parts += [
            "--target",
            pair.target,
            *(word for n, path in pair.drafts for word in ("--draft", f"{n}={path}")),
        ]
    return shlex.join(parts)


def write_rounds(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """Writes JSON lines (:func:`write_text`)."""
    write_text(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_text(path: str, parts: Iterable[str]) -> None:
    """Writes beside the target and puts it in place at the end, so that a failure leaves nothing
    half-written. Raises OutputError."""
    from spectune.traces.errors import OutputError
    from spectune.traces.files import replacing

    try:
        with replacing(path) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
            text.writelines(parts)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from None


@contextmanager
def kept_unless_stored(
    ctx: click.Context, command: str, results: Callable[[], Any], *, stores: bool = True
) -> Iterator[None]:
    """Around the storing of what a command has worked for: if it fails, ``results()`` are written
    to a new JSON file in the working folder (where that cannot be, in the one for temporary files),
    and the error says where they are. ``stores``: something was stored."""
    from spectune.db.errors import DatabaseError
    from spectune.traces.errors import OutputError, SpectuneError

    try:
        yield
        for file in database_files(ctx)[:1]:
            if (
                stores and not file.exists()
            ):  # SQLite goes on writing to a file that has no name any more
                raise DatabaseError(
                    f"database {file} was removed meanwhile, and what was stored with it"
                )
    except (DatabaseError, OutputError) as error:
        error.args = (f"{error}; {_keep(command, results())}",)
        raise
    except SpectuneError:
        raise
    # an interrupt while a database is waited for, an error of ours: the results are the user's all
    # the same
    except BaseException:
        click.echo(_keep(command, results()), err=True)
        raise


def _keep(command: str, results: Any) -> str:
    """Writes a new file, and says which."""
    text = json.dumps(results, ensure_ascii=False) + "\n"
    for folder in (Path(), Path(tempfile.gettempdir())):
        for count in itertools.count():
            nth = f"-{count}" if count else ""
            path = folder / f"spectune-{command}-{datetime.now():%Y%m%d-%H%M%S}{nth}.json"
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                continue
            except OSError:
                with suppress(OSError):
                    path.unlink()
                break
            return f"the results are kept in {path}"
    return "the results could not be kept in a file either"


def check_writable(ctx: click.Context, *options: tuple[str, str | None]) -> None:
    """Raises OutputError for an (option, path) that cannot be written or is needed otherwise,
    before the work is done whose result would go there: databases, the files that this command
    reads, and those of any model."""
    from spectune.runtime.pair import is_content
    from spectune.traces.errors import OutputError
    from spectune.traces.files import is_file, why_not_writable
    from spectune.traces.text import shortened

    taken = {path.resolve(): "the database in use" for path in database_files(ctx)}
    taken |= {
        Path(path).resolve(): "read by this command" for path in _read_by(ctx) if is_file(path)
    }
    for option, path in options:
        if path is None:
            continue
        if problem := why_not_writable(path):
            raise OutputError(f"{option} {shortened(path)}: {problem}")
        target = Path(path).resolve()
        problem = taken.get(target)
        # A model's file may be a link to another place, where nothing shows whose it is.
        if problem is None and (
            is_content(target) or is_content(Path(path).parent.resolve() / Path(path).name)
        ):
            problem = "a file of a model"
        if problem is None and _is_database(target):
            problem = "a SQLite database"
        if problem is not None:
            raise OutputError(f"{option} {shortened(path)}: that is {problem}; name another file")
        taken[target] = f"{option}, too"


def _read_by(ctx: click.Context) -> Iterator[str]:
    """What a command's options and spectune.toml name, the file itself too; some are no files."""
    if (config := config_of(ctx)) is not None:
        yield str(config.file)
    if (pair := ctx.params.get("pair")) is not None:
        yield from (pair, f"{pair}/pair.json")
    for key in ("workloads", "covers"):
        yield from ctx.params.get(key) or ()
    if (policy := ctx.params.get("policy_name")) is not None:
        yield policy


def _is_database(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return content.read(16) == b"SQLite format 3\0"
    except OSError:
        return False


def database_files(ctx: click.Context) -> list[Path]:
    """The files of a SQLite database, its own first; none of one on a server."""
    from spectune.db.urls import parse_url

    url = parse_url(ctx.find_root().obj)
    if url.get_backend_name() != "sqlite":
        return []
    return [Path(f"{url.database}{ending}") for ending in ("", "-wal", "-shm", "-journal")]
