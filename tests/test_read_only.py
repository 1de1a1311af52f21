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
from pathlib import Path
from typing import Any

import pytest
from databases import opened
from doors import Door
from trace_values import a_recording
from waiting import PATIENCE_S

NOBODY = 65534
READS = (
    "traces list",
    "traces show latest",
    "policies list --pair demo",
    "schedule list",
    'simulate --policy \'{"draft":"small","window":{"kind":"fixed","gamma":4}}\'',
    "db check",
)
WRITE = "db prune --keep-last 1"


@pytest.fixture
def path() -> Iterator[Path]:
    """A database in a folder that everybody may enter, with a space and signs of a URI in its
    name."""
    folder = Path(tempfile.mkdtemp(prefix="spectune a%20?b#-"))
    made = folder / "a.db"
    with opened(made) as store:
        a_recording(store, n=2)
        store.put_policy("p", {}, "first")
    yield made
    folder.chmod(0o755)
    shutil.rmtree(folder)


def as_reader(folder: Path, act: Callable[[], Any]) -> Any:
    """What ``act`` returns in a process that may not write to the folder. It changes nothing
    there."""

    def content() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.endswith("-shm")}

    def as_nobody() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        results.put(act())

    before = content()
    for entry in folder.iterdir():
        entry.chmod(0o444)
    folder.chmod(0o555)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=as_nobody)
    child.start()
    answer = results.get(timeout=PATIENCE_S)
    child.join()
    assert content() == before
    return answer


def test_a_file_that_was_closed_is_read_and_a_write_is_refused(path: Path) -> None:
    door = Door(str(path))

    def outputs() -> list[dict[str, Any]]:
        return [door.json(command) for command in READS]

    expected = outputs()
    assert json.loads(json.dumps(as_reader(path.parent, outputs))) == expected
    line = as_reader(path.parent, lambda: door.refused(WRITE))
    assert "a.db is read-only; check its permissions and its folder's" in line


def test_what_a_writer_has_in_its_log_is_read_or_said(path: Path) -> None:
    door = Door(str(path))

    def labels() -> Any:
        return door.call("db show policies --json").stdout

    with opened(path) as store:
        store.put_policy("q", {}, "newest")
        log = path.with_name("a.db-wal").read_bytes()
        assert log
        assert "newest" in as_reader(path.parent, labels)
    path.parent.chmod(0o755)
    path.chmod(0o644)
    writer = sqlite3.connect(path)
    writer.execute("UPDATE policy SET label = 'latest'")
    writer.commit()
    log = path.with_name("a.db-wal").read_bytes()
    writer.close()
    path.with_name("a.db-wal").write_bytes(log)  # as a killed writer leaves it
    for command in ("traces list", "db check"):
        line = as_reader(path.parent, lambda asked=command: door.refused(asked))
        assert "is read-only and its last changes are in" in line
        assert "copy both" in line


def test_an_empty_file_that_cannot_be_filled_is_one_line(path: Path) -> None:
    empty = path.with_name("empty.db")
    empty.touch()
    line = as_reader(path.parent, lambda: Door(str(empty)).refused("db check --upgrade"))
    assert "empty.db is read-only" in line
