"""spectune.toml and the pair that is meant: what is typed wins over the environment, which wins
over the file; nothing is guessed."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from databases import opened
from doors import Door, commands, write_workload
from test_docs import PAGES, blocks

from spectune.optimizer.commands.config import KEYS, SAMPLING, Configured, read_config

FIXED = '{"draft": "near", "window": {"kind": "fixed", "gamma": 2}}'
EVERY = [*KEYS, *(f"sampling.{key}" for key in SAMPLING)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_pair: Path) -> Path:
    """The working folder: a pair file and a workload."""
    target, near = (str(tiny_pair.parent / name) for name in ("target", "near"))
    spec = {"name": "tiny", "target": target, "drafts": {"near": near}}
    (tmp_path / "pair.json").write_text(json.dumps(spec))
    write_workload(tmp_path / "chats.jsonl", 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


DOOR = Door(None)


def defaults(*command: object) -> dict[str, str]:
    """option -> default, as --help shows it."""
    shown = DOOR.call(*command, help=True).stdout
    return dict(
        re.findall(r"--([\w-]+) .*?\[default: ([^;\]]+)", shown.replace("\n                 ", " "))
    )


def test_every_key_is_an_options_and_documented() -> None:
    used = {
        option.key
        for _, command in commands()
        for option in command.params
        if isinstance(option, Configured)
    }
    assert used | {"database"} == {*KEYS, *SAMPLING}
    page = "docs/configuration.md"
    (example,) = blocks(page, "toml")
    told = tomllib.loads(example)
    assert {*told, *told["sampling"]} - {"sampling"} <= {*KEYS, *SAMPLING}
    assert re.findall(r"^\| `([\w.]+)` \|", PAGES[page], re.MULTILINE) == EVERY


def test_what_is_typed_wins_over_the_environment_over_the_file(folder: Path) -> None:
    Path("spectune.toml").write_text(
        'deployment = "file"\nbudget = "5m"\nthreads = 1\n[sampling]\ntemperature = 0.7\n'
    )
    found = defaults("tune")
    assert (found["deployment"], found["budget"], found["temperature"]) == ("file", "5m", "0.7")
    activate = f"policies activate '{FIXED}' --pair pair.json --device cpu"
    env = {"SPECTUNE_DEPLOYMENT": "env"}
    made = [
        DOOR.call(activate, json=True),
        DOOR.call(activate, json=True, env=env),
        DOOR.call(activate, json=True, env=env, deployment="typed"),
    ]
    assert [json.loads(m.stdout)["deployment"] for m in made] == ["file", "env", "typed"]


def test_paths_are_relative_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("spectune.toml").write_text(
        'pair = "pair.json"\nworkload = "chats.jsonl"\ndatabase = '
        '"kept.db"\n[sampling]\nmax_new_tokens = 3\n'
    )
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    made = DOOR.json("--config", folder / "spectune.toml", "run", "--policy", FIXED)
    assert (made["requests"], made["emitted_tokens"]) == (2, 6)
    with opened(folder / "kept.db") as store:
        assert store.get_run("latest").outcome.total.emitted_tokens == 6
    env = {"SPECTUNE_CONFIG": "../spectune.toml", "SPECTUNE_DB": "env.db"}
    assert DOOR.call("policies activate", FIXED, device="cpu", env=env).exit_code == 0
    assert Path("env.db").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('pairs = "x"', "spectune.toml: unknown key 'pairs'; did you mean 'pair'?"),
        ("temperature = 0.7", "unknown key 'temperature'; did you mean 'sampling.temperature'?"),
        (
            "[sampling]\ntemprature = 1",
            "'sampling.temprature'; did you mean 'sampling.temperature'?",
        ),
        ("[sampling]\nzzz = 1", "known keys: pair, workload"),
        ('[sampling]\ntemperature = "hot"', "sampling.temperature: 'hot' is not a valid float"),
        ("[sampling]\nseed = 1.5", "spectune.toml: sampling.seed: '1.5' is not a valid integer"),
        ("[sampling]\ntop_p = nan", "spectune.toml: sampling.top_p: "),
        ("threads = 0", "spectune.toml: threads: 0 is not in the range"),
        ('device = "tpu"', "spectune.toml: device: 'tpu' is not one of"),
        ('budget = "soon"', "spectune.toml: budget: 'soon' is not a duration"),
        ('deployment = "a b"', "spectune.toml: deployment: 'a b' cannot name a deployment"),
        ('pair = "nope.json"', "spectune.toml: pair: --pair nope.json: no such pair file"),
        ('pair = ["a"]', "spectune.toml: pair: a text or a number is expected"),
        ("workload = 1979-05-27", "spectune.toml: workload: a text or a list of texts is expected"),
        ("sampling = 3", "spectune.toml: sampling: a table is expected"),
        ("pair = ", "spectune.toml: not TOML: "),
        ("x = " + "[" * 5000, "spectune.toml: not TOML: "),
        ("[sampling]\ndeployment = 1", "'sampling.deployment'; did you mean 'deployment'?"),
    ],
)
def test_a_file_that_cannot_be_used(folder: Path, text: str, says: str) -> None:
    Path("spectune.toml").write_text(text)
    assert says in DOOR.refused("tune")
    assert not Path("spectune.db").exists()


def test_a_file_that_is_not_there(folder: Path) -> None:
    assert "none.toml: no such file" in DOOR.refused("--config", "none.toml", "db", "check")


def test_init_writes_a_file_that_says_every_key(folder: Path) -> None:
    assert DOOR.json("init")["config"] == "spectune.toml"
    text = Path("spectune.toml").read_text()
    assert read_config(Path("spectune.toml")).values == {}
    spelled = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert [*spelled, *spelled["sampling"]] == [*KEYS, "sampling", *SAMPLING]
    assert "spectune.toml exists already; --force replaces it" in DOOR.refused("init")
    assert "no such pair file" in DOOR.refused("init", force=True, pair="none.json")
    assert Path("spectune.toml").read_text() == text
    Path("spectune.toml").write_text("broken")
    assert DOOR.call("init", force=True, pair="pair.json").exit_code == 0
    assert read_config(Path("spectune.toml")).values == {"pair": "pair.json"}


# ------------------------------------------------------------------------------ which pair is meant


@pytest.mark.parametrize(
    "command",
    [
        *("tune", "record", "run", "generate x", "profile", f"policies activate '{FIXED}'"),
        *("policies rollback", "policies show", "schedule add n --cron @daily"),
        "fit frequencies --corpus notes.txt",
    ],
)
def test_no_pair_is_taken_in_silence(folder: Path, command: str) -> None:
    line = DOOR.refused(command)
    assert (
        "no pair is named; say --pair FILE (or --pair demo), set SPECTUNE_PAIR, or put pair = ... "
        "in spectune.toml" in line
    )
    assert not Path("spectune.db").exists()


def test_a_recording_that_is_named_says_which_pair(folder: Path, tiny_pair: Path) -> None:
    """Also against the environment; what is typed is believed, and compared."""
    short = {"workload": "chats.jsonl", "max_new_tokens": 4}
    made = DOOR.json("record", pair="pair.json", **short)
    other = {"SPECTUNE_PAIR": str(tiny_pair)}
    Path("spectune.toml").write_text("[sampling]\ntemperature = 0.7\n")  # refused where typed
    again = DOOR.call("record", resume=made["recording"], json=True, env=other)
    Path("spectune.toml").unlink()
    assert json.loads(again.stdout)["pair"] == made["pair"]
    assert "was made with pair" in DOOR.refused("record", resume="latest", pair=tiny_pair)
    assert f"profile of pair {made['pair']} " in DOOR.call("fit chooser").stderr
    assert f"made with pair {made['pair']}, not" in DOOR.call("fit chooser", env=other).stderr
    with_env = DOOR.call("policies list", json=True, env=other)
    assert json.loads(with_env.stdout)["pair"] != made["pair"]
    target = tiny_pair.parent / "target"
    assert DOOR.call("run", **short, target=target, no_store=True, env=other).exit_code == 0
