"""Files that users name and text from elsewhere: one line for every mistake, written whole or
not at all, shown as no command."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path

import pytest
from databases import opened
from doors import Door
from trace_values import PAIR, a_trajectory

from spectune.optimizer.commands.outputs import write_text
from spectune.runtime.checkpoints import identity
from spectune.traces.errors import PairError, SpectuneError, WorkloadError
from spectune.traces.files import why_not_writable
from spectune.traces.schema import Sampling
from spectune.traces.store import Asked, TraceStore
from spectune.traces.workload_files import read_workload

LONG = "x" * 5_000
ESCAPE = "\x1b]\x07\x9b31m"


@pytest.fixture
def door(tmp_path: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"id": "a", "turns": ["x"]}\n')
    return Door("spectune.db", str(tiny_pair))


@pytest.mark.parametrize("text", ["[" * 50_000, '{"draft": ' * 50_000], ids=["lists", "objects"])
def test_nested_json_is_one_line_wherever_it_is_read(door: Door, text: str) -> None:
    Path("bad.json").write_text(text)
    show = ("policies", "show")
    assert "--policy bad.json: not JSON" in door.refused(*show, "bad.json", "--pair", door.pair)
    if text.startswith("{"):
        assert "--policy: not JSON" in door.refused(*show, text, "--pair", door.pair)
    assert "bad.json: not JSON" in door.refused(*show, "--pair", "bad.json")
    run = ("run", "--pair", door.pair, "--workload", "bad.json")
    assert "bad.json:1: not JSON" in door.refused(*run)
    Path("model").mkdir()
    Path("model/config.json").write_text(text)
    with pytest.raises(PairError, match=r"config\.json: not JSON"):
        identity("model")


def test_a_workload_keeps_what_every_database_keeps(store: TraceStore, tmp_path: Path) -> None:
    """The longest names, of the characters that take most room, in columns that PostgreSQL
    indexes."""
    names = [chr(0x1F300 + i) for i in range(500)]
    line = {"id": "".join(names), "category": "".join(reversed(names)), "turns": ["x"]}
    file = tmp_path / ("y" * 240 + ".jsonl")
    file.write_text(json.dumps(line))
    workload = read_workload([str(file)])
    store.put_pair(PAIR, "demo", {})
    recording = store.create_recording(Asked(PAIR, store.put_workload(workload), Sampling(), 8)).id
    kept = a_trajectory(0, category=workload.requests[0].category)
    store.append_trajectory(recording, 0, kept)
    assert store.load(recording).trajectories == (kept,)
    for key in ("id", "category"):
        file.write_text(json.dumps(line | {key: "z" * 501}))
        with pytest.raises(WorkloadError, match=f"'{key}' must be a text of at most 500"):
            read_workload([str(file)])


def test_names_that_no_file_can_have_are_one_line(door: Door) -> None:
    show, run = ("policies", "show"), ("run", "--pair", door.pair, "--workload")
    for arguments in (
        (*show, f"{LONG}.json", "--pair", door.pair),
        (*show, "--pair", LONG),
        (*show, "--target", LONG),
        (*run, LONG),
        (*run, "good.jsonl", "--per-round", LONG),
    ):
        assert len(door.refused(*arguments)) < 600


def test_a_drafts_name_fits_its_column(door: Door) -> None:
    line = door.refused("policies", "show", "--target", "t", "--draft", f"{'d' * 129}=d")
    assert "a draft's name has 129 characters, more than 128" in line


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    def parts() -> io.StringIO:
        yield "half"  # type: ignore[misc]
        raise RuntimeError("stop")

    (tmp_path / "out").write_text("before")
    with pytest.raises(RuntimeError):
        write_text(str(tmp_path / "out"), parts())
    assert (tmp_path / "out").read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_link_is_judged_where_it_lies_as_it_is_replaced(tmp_path: Path) -> None:
    link = tmp_path / "out.jsonl"
    link.symlink_to(tmp_path / "gone" / "out.jsonl")
    assert why_not_writable(link) is None
    write_text(str(link), ["x"])
    assert (link.is_symlink(), link.read_text()) == (False, "x")


def test_what_is_no_regular_file_is_not_replaced(door: Door) -> None:
    os.mkfifo("pipe")
    run = ("run", "--pair", door.pair, "--workload", "good.jsonl", "--per-round", "pipe")
    assert "no regular file" in door.refused(*run)
    with pytest.raises(SpectuneError, match="no regular file"):
        write_text("pipe", ["x"])
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)


def test_commands_steer_no_terminal_and_take_no_markup(door: Door) -> None:
    category = f"č[/red]{ESCAPE}[bold]"
    with opened(door.db) as store:
        store.put_pair(PAIR, "demo", {})
        recording = store.create_recording(Asked(PAIR, None, Sampling(), 8)).id
        store.append_trajectory(recording, 0, a_trajectory(0, category=category))
    for asked in ("show", "query", "stats --by category --executed", "query --json"):
        found = door.call("traces", *asked.split())
        assert found.exit_code == 0, found.output
        assert "\x1b" not in found.output
        assert "č[/red]" in found.output or asked.startswith(("show", "stats"))
    assert json.loads(found.output)["requests"][0]["category"] == category
    Path("bad.jsonl").write_text(json.dumps({"id": "a", "category": ESCAPE, "turns": ["x"]}))
    line = door.refused("run", "--pair", door.pair, "--workload", "bad.jsonl", "--category", "none")
    assert not set("\x1b\x07\x9b") & set(line)
