"""Files that a command writes: they take no place that is needed, and what a command found is
printed also where the database takes nothing."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from databases import run_sql
from doors import FIXED, Door, lines, write_workload
from sqlalchemy import event
from sqlalchemy.engine import Engine

from spectune.db.urls import parse_url
from spectune.traces.text import shortened

LEARNING = '{"draft": "near", "window": {"kind": "q_learning"}}'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a workload of three requests."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_workload(folder / "three.jsonl", 3)
    return folder


@pytest.fixture
def door(url: str, tiny_pair: Path, here: Path) -> Door:
    """The command line on both databases."""
    return Door(url, str(tiny_pair))


FEW = ("--workload", "three.jsonl", "--max-new-tokens", 8)


def run(door: Door, *more: object) -> tuple[object, ...]:
    return ("run", "--pair", door.pair, *FEW, "--policy", FIXED, *more)


def record(door: Door) -> None:
    door.json("record", "--pair", door.pair, *FEW, "--gamma-max", 4)


def forbid_writing(url: str, table: str) -> None:
    """From now on nothing can be added to a table (PostgreSQL: nothing anywhere)."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        run_sql(str(parsed.database), f"ALTER TABLE {table} RENAME TO gone")
        return
    engine = sa.create_engine(parsed)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as server:
        server.exec_driver_sql(
            f'ALTER DATABASE "{parsed.database}" SET default_transaction_read_only = on'
        )
    engine.dispose()


@contextmanager
def before(statement: str, act: Callable[[], object]) -> Iterator[None]:
    """Acts before each statement of any database that begins so."""

    def listener(_conn: Any, _cursor: Any, executed: str, *_: Any) -> None:
        if executed.startswith(statement):
            act()

    event.listen(Engine, "before_cursor_execute", listener)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", listener)


def test_what_was_executed_is_printed_though_the_database_takes_nothing(
    door: Door, here: Path
) -> None:
    whole = door.json(*run(door, "--no-store"))
    forbid_writing(door.db, "run")
    files = ("--outputs", "texts.jsonl", "--per-round", "rounds.jsonl", "--json")
    done = door.call(*run(door, *files))
    assert done.exit_code == 2
    assert done.stderr.count("error: ") == 1
    data = json.loads(done.stdout)
    for key in ("requests", "emitted_tokens", "policy_id"):
        assert data[key] == whole[key]
    texts = lines(here / "texts.jsonl")
    assert [row["id"] for row in texts] == ["r0", "r1", "r2"]
    assert {row["request"] for row in lines(here / "rounds.jsonl")} == {"r0", "r1", "r2"}


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_file_that_cannot_be_written_after_all_costs_nothing_stored(
    door: Door, here: Path
) -> None:
    """The folder is removed while the run decodes: known only when the file is written."""
    (here / "out").mkdir()
    with before("", lambda: shutil.rmtree(here / "out", ignore_errors=True)):
        done = door.call(*run(door, "--outputs", "out/texts.jsonl", "--record"))
    assert done.exit_code == 2
    assert "near fixed(gamma=3)" in done.stdout
    assert "texts.jsonl: cannot be written" in done.stderr.splitlines()[-1]
    assert [r["n_requests"] for r in door.json("traces", "list")["recordings"]] == [3]


# ------------------------------------------------------------------------------ files that are ours


@pytest.fixture
def sqlite_door(tiny_pair: Path, here: Path) -> Door:
    """The command line on a SQLite database here, and a copy of the pair beside it."""
    shutil.copytree(tiny_pair.parent, here / "pair")
    door = Door("spectune.db", "pair/pair.json")
    record(door)
    os.symlink("spectune.db", "soft.jsonl")
    os.symlink("loop.jsonl", "loop.jsonl")
    os.mkfifo("pipe")
    (here / "policy.json").write_text(FIXED)
    return door


def state(here: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(f): (f.stat().st_ino, f.read_bytes())
        for f in here.rglob("*")
        if f.is_file() and not f.name.endswith(("-wal", "-shm"))
    }


NEEDED = "this command needs that file; name another"


def test_no_output_takes_the_place_of_what_a_command_needs(sqlite_door: Door, here: Path) -> None:
    unchanged = state(here)
    options = itertools.cycle(("--outputs", "--per-round"))
    for path, says in (
        ("spectune.db", NEEDED),
        ("./pair/../spectune.db", NEEDED),
        (here / "spectune.db", NEEDED),
        ("spectune.db-wal", NEEDED),
        ("soft.jsonl", NEEDED),
        ("three.jsonl", NEEDED),
        ("policy.json", NEEDED),
        ("pair/pair.json", NEEDED),
        ("pipe", "no regular file"),
        ("loop.jsonl", "cannot be written"),
        ("x" * 300, "cannot be written"),
    ):
        option = next(options)
        line = sqlite_door.refused(*run(sqlite_door, option, path), "--policy", "policy.json")
        assert line.startswith(f"error: {option} {shortened(str(path))}: ")
        assert says in line
        assert state(here) == unchanged
        assert (here / "pipe").is_fifo()


def test_other_commands_spare_the_database_too(sqlite_door: Door, here: Path) -> None:
    os.symlink("spectune.db", "rows.csv")

    def refuses(says: str, *command: object) -> None:
        unchanged = state(here)
        assert says in sqlite_door.refused(*command)
        assert state(here) == unchanged

    refuses("", "simulate", "--policy", FIXED, "--per-round", "spectune.db")
    refuses("", "simulate", "--policy", "policy.json", "--per-round", "policy.json")
    (here / "rec.parquet").write_bytes(b"of a recording")
    recorded = ("--recording", "rec.parquet", "--per-round", "./rec.parquet")
    refuses(NEEDED, "simulate", "--policy", FIXED, *recorded)
    refuses("", "report", "--out", "spectune.db")
    refuses("", "traces", "export", "rows.csv")
    (here / "spectune.toml").write_text('pair = "pair"\nworkload = "three.jsonl"\n')
    for path in ("three.jsonl", "pair/pair.json", "spectune.toml"):
        refuses(NEEDED, "tune", "--report", path)
    for command in (("report", "--out"), ("traces", "export")):
        refuses(NEEDED, *command, "./spectune.toml")
    assert run_sql("spectune.db", "SELECT count(*) FROM recording") == [(1,)]


def test_results_may_lie_beside_a_model(
    sqlite_door: Door, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here / "pair/target")
    door = Door("spectune.db", "")
    few = ("--workload", "../../three.jsonl", "--max-new-tokens", 2, "--policy", "autoregressive")
    door.json("run", "--set", "target=.", *few, "--outputs", "out.jsonl", "--no-store")
    assert len(lines(here / "pair/target/out.jsonl")) == 3


def test_a_database_that_does_not_exist_yet_is_no_output_either(
    here: Path, tiny_pair: Path
) -> None:
    door = Door("new.db", str(tiny_pair))
    door.refused(*run(door, "--outputs", "new.db"))
    assert not (here / "new.db").exists()
