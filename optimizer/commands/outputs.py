"""Files that a command writes: judged before the work, put in place whole, and results that no
database takes kept all the same."""

from __future__ import annotations

import io
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from spectune.optimizer.commands.config import config_of
from spectune.optimizer.commands.printing import running
from spectune.optimizer.commands.shared import database_url


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
def kept_unless_stored(results: Callable[[], Any], *, stores: bool = True) -> Iterator[None]:
    """Around the storing of what a command has worked for: if it fails, ``results()`` are written
    to a new JSON file in the working folder (where that cannot be, in the one for temporary files),
    and the error says where they are. ``stores``: something was stored."""
    from spectune.db.errors import DatabaseError
    from spectune.traces.errors import OutputError, SpectuneError

    try:
        yield
        for file in database_files()[:1]:
            # SQLite goes on writing to a file that has no name any more
            if stores and not file.exists():
                raise DatabaseError(
                    f"database {file} was removed meanwhile, and what was stored with it"
                )
    except (DatabaseError, OutputError) as error:
        error.args = (f"{error}; {_keep(results())}",)
        raise
    except SpectuneError:
        raise
    # an interrupt while a database is waited for, an error of ours: the results are the user's all
    # the same
    except BaseException:
        click.echo(_keep(results()), err=True)
        raise


def _keep(results: Any) -> str:
    """Writes a new file, and says which."""
    command = running().info_name
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


def check_writable(*options: tuple[str, str | None]) -> None:
    """Raises OutputError for an (option, path) that cannot be written or is needed otherwise,
    before the work is done whose result would go there: databases, the files that this command
    reads, and those of any model."""
    from spectune.runtime.checkpoints import is_checkpoint_file
    from spectune.traces.errors import OutputError
    from spectune.traces.files import why_not_writable
    from spectune.traces.text import shortened

    read = filter(os.path.isfile, _read_by())
    taken = {Path(path).resolve(): "read by this command" for path in read}
    taken |= {path.resolve(): "the database in use" for path in database_files()}
    for option, path in options:
        if path is None:
            continue
        if problem := why_not_writable(path):
            raise OutputError(f"{option} {shortened(path)}: {problem}")
        target = Path(path).resolve()
        # A model's file may be a link to another place, where nothing shows whose it is.
        beside = Path(path).parent.resolve() / Path(path).name
        problem = taken.get(target)
        if problem is None and (is_checkpoint_file(target) or is_checkpoint_file(beside)):
            problem = "a file of a model"
        if problem is None and _is_database(target):
            problem = "a SQLite database"
        if problem is not None:
            raise OutputError(f"{option} {shortened(path)}: that is {problem}; name another file")
        taken[target] = f"{option}, too"


def _read_by() -> Iterator[str]:
    """What a command's options and spectune.toml name, the file itself too; some are no files."""
    ctx = running()
    if (config := config_of(ctx)) is not None:
        yield str(config.file)
    if (pair := ctx.params.get("pair")) is not None:
        yield from (pair, f"{pair}/pair.json")
    for key in ("workloads", "covers"):
        yield from ctx.params.get(key) or ()
    for key in ("policy_name", "recording"):
        if isinstance(name := ctx.params.get(key), str):
            yield name


def _is_database(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return content.read(16) == b"SQLite format 3\0"
    except OSError:
        return False


def database_files() -> list[Path]:
    """The files of a SQLite database, its own first; none of one on a server."""
    from spectune.db.urls import parse_url

    url = parse_url(database_url())
    if url.get_backend_name() != "sqlite":
        return []
    return [Path(f"{url.database}{ending}") for ending in ("", "-wal", "-shm", "-journal")]
