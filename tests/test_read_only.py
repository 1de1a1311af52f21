"""SQLite files that can be read and not written: on a medium that is read-only, or in a folder of
somebody else."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from databases import opened
from trace_values import a_recording

from spectune.cli import main
from spectune.db import DatabaseError, SchemaError, check, open_database, schema_of
from spectune.traces.store import TraceStore
from spectune.traces.store.transfer import export_recordings

NOBODY = 65534
READS = (
    "traces list",
    "traces show latest",
    "policies list --pair demo",
    "schedule list",
    'simulate --policy {"draft":"small","window":{"kind":"fixed","gamma":4}}',
    "db check",
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may enter and only its owner may write to, with a space and signs of
    a URI in its name."""
    made = Path(tempfile.mkdtemp(prefix="spectune a%20?b#-"))
    made.chmod(0o755)
    yield made
    made.chmod(0o755)
    shutil.rmtree(made)


elsewhere = folder
"""Another one."""


@pytest.fixture
def path(folder: Path) -> Path:
    made = folder / "a.db"
    with opened(made) as store:
        a_recording(store, n=2)
        store.put_policy("p", {}, "first")
    return made


def as_reader(folder: Path, act: Callable[[], Any]) -> Any:
    """What ``act`` returns, or (kind, message) of its error, in a process that may not write to the
    folder. It changes nothing there."""

    def content() -> dict[str, bytes]:
        kept = [p for p in folder.iterdir() if not (p.is_symlink() or p.name.endswith("-shm"))]
        return {p.name: p.read_bytes() for p in kept}

    def as_nobody() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        try:
            results.put(act())
        except (DatabaseError, sqlite3.Error) as error:
            results.put((type(error).__name__, str(error)))

    before = content()
    for entry in folder.iterdir():
        if not entry.is_symlink():
            entry.chmod(0o444)
    folder.chmod(0o555)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=as_nobody)
    child.start()
    answer = results.get(timeout=60)
    child.join()
    assert content() == before
    return answer


def outputs(url: str) -> list[tuple[int, Any]]:
    asked = [["--db", url, *command.split(), "--json"] for command in READS]
    run = [CliRunner().invoke(main, command) for command in asked]
    return [(r.exit_code, json.loads(r.stdout) if r.exit_code == 0 else r.output) for r in run]


def test_pure_reads_need_no_place_to_write(path: Path, folder: Path) -> None:
    expected = outputs(str(path))
    assert [code for code, _ in expected] == [0] * len(READS)
    assert as_reader(folder, lambda: outputs(str(path))) == expected


def test_a_write_to_a_read_only_file_is_one_line(path: Path, folder: Path) -> None:
    def write() -> None:
        with opened(path) as store:
            store.put_policy("q", {}, "l")

    kind, message = as_reader(folder, write)
    assert kind == "DatabaseError"
    assert "a.db is read-only; check its permissions and its folder's" in message


def labels(url: str) -> list[str]:
    with open_database(url, create=False) as database:
        return [policy.label for policy in TraceStore(database).list_policies()]


def test_what_a_live_writer_has_in_its_log_is_read(path: Path, folder: Path) -> None:
    with opened(path) as store:
        store.put_policy("q", {}, "newest")
        assert (folder / "a.db-wal").stat().st_size > 0
        assert as_reader(folder, lambda: labels(str(path))) == ["newest", "first"]


def test_a_log_that_cannot_be_read_is_not_left_out_silently(
    path: Path, folder: Path, elsewhere: Path
) -> None:
    writer = sqlite3.connect(path)
    writer.execute("UPDATE policy SET label = 'newest'")
    writer.commit()
    log = (folder / "a.db-wal").read_bytes()
    writer.close()
    (folder / "a.db-wal").write_bytes(log)
    link = elsewhere / "link.db"
    link.symlink_to(path)
    for act in (partial(labels, str(path)), partial(check, str(path)), partial(labels, str(link))):
        kind, message = as_reader(folder, act)
        assert kind == "DatabaseError"
        assert "a.db is read-only and its last changes are in a.db-wal" in message
        assert "copy both" in message
    (folder / "a.db").chmod(0o644)
    folder.chmod(0o755)
    assert labels(str(path)) == ["newest"]


def test_a_link_is_as_writable_as_what_it_points_to(
    path: Path, folder: Path, elsewhere: Path
) -> None:
    folder.chmod(0o777)
    for entry in folder.iterdir():
        entry.chmod(0o666)
    link = elsewhere / "link.db"
    link.symlink_to(path)

    def write() -> None:
        with opened(link) as store:
            store.put_policy("q", {}, "second")

    assert as_reader(elsewhere, write) is None
    assert labels(str(path)) == ["second", "first"]


def test_a_link_to_itself_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.db").symlink_to("a.db")
    with pytest.raises(DatabaseError, match="cannot open database file"):
        open_database(str(tmp_path / "a.db"))


def test_an_empty_file_that_cannot_be_filled_is_one_line(folder: Path) -> None:
    path = folder / "empty.db"
    path.touch()
    kind, message = as_reader(folder, lambda: open_database(str(path)).close())
    assert kind == SchemaError.__name__
    assert "is empty and is read-only; copy it" in message
    assert as_reader(folder, lambda: schema_of(str(path))) is None


def test_a_check_changes_no_file(path: Path, tmp_path: Path) -> None:
    exported = tmp_path / "export.db"
    with open_database(str(path)) as database:
        export_recordings(database, ["latest"], exported)
    before = exported.read_bytes()
    assert check(str(exported)).ok
    assert exported.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["export.db"]
