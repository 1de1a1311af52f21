"""Commands that load no model: what they import, what they leave behind, how they print, and
everything that has an id."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from doors import Door
from doors import commands as every_command
from rich.console import Console
from trace_values import PAIR, POLICY, POLICY_ID, a_profile, a_recording, an_outcome

from spectune.db import Database, open_database
from spectune.optimizer.commands.results import Table
from spectune.traces.store import TraceStore
from spectune.traces.store.inventory import KINDS

MODELS = ("torch", "transformers", "scipy", "sklearn", "optuna", "pandas", "pyarrow", "alembic")
FIXED = '{"draft": "small", "window": {"kind": "fixed", "gamma": 4}}'
DOOR = Door(None)
NOW = datetime(2026, 11, 22, 14, 3, tzinfo=UTC)

LIGHT = (
    *("db check", "db show", "db show runs", "db show rec", "traces list", "traces show"),
    *("traces stats", "traces show all", "schedule list"),
    *("policies list --pair demo", f"policies show {POLICY_ID} --pair demo"),
    *(f"policies show '{FIXED}' {POLICY_ID} --pair demo", "schedule list"),
    *(
        f"policies export '{FIXED}' --pair demo --for vllm",
        "schedule add x --pair demo --cron @daily",
    ),
    *("schedule list", "status", "check par.json nope", "tune --pair demo --workload nope.jsonl"),
)
QUICK = (
    *(([*path, "--help"], (*MODELS, "numba"), 800) for path, _ in every_command()),
    *((shlex.split(command), (*MODELS, "numba"), 800) for command in LIGHT),
    # numba looks for scipy's BLAS
    (
        ["simulate", "--policy", FIXED, "--set", "device=cuda"],
        tuple(m for m in MODELS if m != "scipy"),
        1500,
    ),
)
"""(command, modules that it may not import, how many may be imported by then), in one process, the
lightest first."""

SCRIPT = """
import json, sys
from click.testing import CliRunner
from spectune.cli import main
assert not {"numba", "scipy", "sklearn", "sqlalchemy"} & set(sys.modules)
found = []
for command, modules, most in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, command)
    line = (done.stderr or done.output).strip().splitlines()[-1:]
    seen = [m for m in modules if m in sys.modules]
    found.append([done.exit_code, line, seen, len(sys.modules) > most])
print(json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled(database: Database) -> dict[str, str]:
    """Something of every kind in a database; ids by kind."""
    store = TraceStore(database)
    recording = a_recording(store)
    store.put_policy(POLICY_ID, POLICY, "small")
    run = store.put_run(PAIR, POLICY_ID, an_outcome(), device="cpu", dtype="float32")
    study = store.put_study(PAIR, sampler="TPE", seed=0, document={}, recording_id=recording)
    artifact = store.put_artifact("bins", {"thresholds": [1]}, pair_id=PAIR)
    return {
        "recordings": recording,
        "runs": run,
        "studies": study,
        "artifacts": artifact,
        "policies": POLICY_ID,
        "profiles": store.put_profile(a_profile(1e-4)),
        "pairs": PAIR,
        "workloads": store.get_workload("latest").digest(),
    }


def test_whatever_loads_no_model_imports_no_model_library(folder: Path) -> None:
    """A pair file that is not there, and a conversation without its chat template, are told as
    soon."""
    talk = [{"role": role, "content": "x"} for role in ("system", "user")]
    Path("nope.jsonl").write_text(json.dumps({"messages": talk}))
    with open_database("spectune.db") as database:
        filled(database)
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(QUICK)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for (command, _, most), (code, line, imported, too_many) in zip(
        QUICK, json.loads(done.stdout), strict=True
    ):
        said = " ".join(command)
        assert code == (2 if "nope" in said else 0), (said, line)
        assert not imported, (said, imported)
        assert not too_many, f"{said}: more than {most} modules"


@pytest.mark.parametrize(
    "command",
    [
        *("traces list", "traces show all", "schedule list", "db show", "db show x", "db check"),
        *("db prune --keep-last 1", "policies list", "policies rollback --pair demo"),
        *("--db a/b/c.db record --pair demo", "record --resume latest"),
        *("run --pair demo --policy nope", "schedule add x --pair demo --cron 99"),
    ],
)
def test_without_a_database_a_command_says_so_in_one_line(folder: Path, command: str) -> None:
    done = DOOR.call(command)
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1), done.output
    assert {path.name for path in folder.iterdir()} <= {"spectune.db"}
    if command.split()[0] in ("traces", "schedule", "db") and "99" not in command:
        assert "--db" in done.stderr


def test_publications_are_listed_with_and_without_a_pair(folder: Path) -> None:
    with open_database("spectune.db") as database:
        store, ids = TraceStore(database), filled(database)
        for pair, device in ((ids["pairs"], "cpu"), (ids["pairs"], "cuda"), ("other", "cpu")):
            store.put_pair(pair, "another" if pair == "other" else "pair", {})
            store.publish(pair, device, POLICY_ID, actor="test")
    rows = DOOR.json("policies list")["publications"]
    active = {(row["pair_id"], row["device"]) for row in rows if row["active"]}
    assert active == {(PAIR, "cpu"), (PAIR, "cuda"), ("other", "cpu")}
    assert "another" in at_80("policies list")
    on_cuda = DOOR.json("policies list --device cuda")["publications"]
    assert [row["device"] for row in on_cuda] == ["cuda"]
    assert DOOR.json("policies list --pair demo")["publications"] == []


def test_tables_in_a_pipe_have_at_most_100_columns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with open_database("spectune.db") as database:
        name = filled(database)["recordings"]
    shown = DOOR.call("traces show all").stdout
    assert max(map(len, shown.splitlines())) <= 100
    assert name in shown


@pytest.mark.parametrize("width", [60, 80])
def test_no_id_is_cut_and_no_value_is_pythons(width: int) -> None:
    names = [f"{'a1b2c3d4' * size}" for size in (2, 5)]
    row = {"id": names[0], "pair_id": names[1], "is_active": True, "error": None}
    row |= {"drafts": {"small": 4}, "refused": ["a: b c"]}
    row |= {f"n_column_{i}": 12345 for i in range(8)}
    row |= {"created_at": NOW.isoformat(), "reason": "it was the fastest " * 9}
    for columns in (("id", "reason"), ("id", "pair_id", "is_active"), tuple(row)):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(Table([row, row], columns, "a title " * 20))
        shown = console.export_text()
        assert all(len(line) <= width for line in shown.splitlines())
        for name, column in zip(names, ("id", "pair_id"), strict=True):
            assert name in shown or column not in columns
        assert not any(word in shown for word in ("…", "None", "True", "{", "['", "+00:00"))


def at_80(command: str) -> str:
    return DOOR.call(command, env={"COLUMNS": "80"}).stdout


def test_everything_that_has_an_id_is_listed_and_shown(folder: Path) -> None:
    with open_database("spectune.db") as database:
        ids = filled(database)
    assert set(KINDS) == set(ids)
    assert DOOR.json("db show") == dict.fromkeys(KINDS, 1)
    for kind, name in ids.items():
        listed = at_80(f"db show {kind}")
        assert name in listed
        assert not any(word in listed for word in ("…", "None"))
        shown = DOOR.json("db show", name[: max(8, len(name) - 1)])
        assert (shown["of"], shown["id"]) == (kind, name)
    assert "nothing has the id nope" in DOOR.refused("db show nope")
    for command in ("traces list", "traces show", "traces show all"):
        text = at_80(command)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 80
