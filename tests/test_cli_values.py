"""Values of options: numbers that are none, counts and seeds without bound, names that no file can
have, several turns of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from doors import FIXED, Door, commands, write_lines, write_workload

from spectune.optimizer.inputs import load_workload
from spectune.optimizer.schedule.settings import TuneSettings
from spectune.traces.errors import WorkloadError


def parameters(kind: type[click.ParamType]) -> list[tuple[tuple[str, ...], str]]:
    """(command, option) of every parameter of that type."""
    return [
        (path, p.opts[0])
        for path, command in commands()
        if path
        for p in command.params
        if isinstance(p.type, kind)
    ]


NUMBERS = parameters(click.types.FloatParamType)
WHOLE = parameters(click.types.IntParamType)


@pytest.fixture
def door(tmp_path: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    """The command line in an empty folder but for a workload."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECTUNE_PAIR", str(tiny_pair))
    write_workload(tmp_path / "good.jsonl", 2)
    return Door("spectune.db", str(tiny_pair))


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("value", ["nan", "-inf", "1e999"])
def test_what_is_no_number_is_refused_by_every_option_that_takes_one(
    door: Door, value: str
) -> None:
    for command, option in NUMBERS:
        assert option in door.error(*command, f"{option}={value}")


@pytest.mark.parametrize("value", [-(10**30), "9" * 5000])
def test_numbers_without_bound_are_refused_by_every_option_that_counts(
    door: Door, value: object
) -> None:
    for command, option in WHOLE:
        if option != "--threads":
            assert option in door.error(*command, f"{option}={value}")


def test_seeds_are_what_every_generator_takes(door: Door) -> None:
    for command, option in WHOLE:
        if option.endswith("seed"):
            for value in (-1, 2**32):
                assert "0<=x<=4294967295" in door.error(*command, option, value)


# -------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("bad", ["a\0b", "a\udcffb"])
def test_arguments_that_are_no_text_cost_one_line(door: Door, bad: str) -> None:
    for command in ("run --pair", "policies show", "traces list --category", "generate"):
        assert "no text" in door.error(command, bad)
    assert "no text" in door.error("policies activate", FIXED, reason=bad)
    assert "no text" in door.error("schedule add", bad, cron="@daily")


def test_an_error_is_one_line_of_bounded_length_whatever_it_quotes() -> None:
    error = WorkloadError(f"{'x' * 9000}: first\nsecond\u2028third; write less")
    assert len(str(error)) <= 2000
    assert len(str(error).splitlines()) == 1
    assert str(error).startswith("xxx")
    assert str(error).endswith("first second third; write less")


# -------------------------------------------------------------------------------------------- turns


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A workload whose second request has three turns."""
    rows = [{"id": "a", "turns": ["one"]}, {"id": "b", "turns": ["first", "second", "third"]}]
    write_lines(tmp_path / "chats.jsonl", rows)
    return tmp_path / "chats.jsonl"


def prompts(path: Path, **how: Any) -> list[tuple[str, str]]:
    return [(r.id, r.prompt) for r in load_workload([str(path)], **how).requests]


def test_several_turns_are_a_choice_and_never_dropped_in_silence(chats: Path) -> None:
    with pytest.raises(WorkloadError, match=r"chats\.jsonl:2: 3 turns.*--all-turns.*--first-turn"):
        load_workload([str(chats)])
    assert prompts(chats, turns="first") == [("a", "one"), ("b", "first")]
    more = [("b/1", "second"), ("b/2", "third")]
    assert prompts(chats, turns="all") == [("a", "one"), ("b", "first"), *more]


@pytest.mark.parametrize("command", ["record", "run", "tune", "schedule add nightly --cron @daily"])
def test_every_command_that_reads_a_workload_asks_for_the_choice(
    door: Door, chats: Path, command: str
) -> None:
    assert "chats.jsonl:2: 3 turns" in door.error(command, workload=chats)
    both = {"all_turns": True, "first_turn": True}
    assert "--first-turn" in door.error(command, workload=chats, **both)


@pytest.mark.parametrize(("turns", "count"), [("all", 4), ("first", 2)])
def test_the_choice_of_turns_is_kept_by_a_schedule(
    door: Door, chats: Path, turns: str, count: int
) -> None:
    choice = {f"{turns}_turn{'s' if turns == 'all' else ''}": True}
    added = door.json("schedule add n --cron @daily", workload=chats, **choice)
    assert added["settings"]["turns"] == turns
    assert len(TuneSettings.read(added["settings"]).load_workload().requests) == count


def test_a_schedules_files_are_found_from_any_folder(
    door: Door, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(chats.parent)
    cron = "schedule add n --cron @daily --first-turn"
    assert door.json(cron, workload=chats.name)["settings"]["workload"] == [str(chats)]
