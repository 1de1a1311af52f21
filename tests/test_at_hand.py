"""Commands that load no model: what they import, what they leave behind, how they print, and
everything that has an id."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from sqlalchemy import update
from trace_values import PAIR, POLICY, POLICY_ID, a_profile, a_recording, an_outcome

from spectune.cli import main
from spectune.db import Database, NotFoundError, open_database
from spectune.db.models import ArtifactRow
from spectune.optimizer.commands import database as commands
from spectune.optimizer.commands.outputs import to_type
from spectune.optimizer.report.fitting import cell, when
from spectune.optimizer.report.tables import rows_table
from spectune.traces.store import TraceStore
from spectune.traces.store.kinds import KINDS, counts, find, list_kind, prune_kinds

MODELS = ("torch", "transformers", "scipy", "sklearn", "optuna", "pandas", "pyarrow", "alembic")
FIXED = '{"draft": "small", "window": {"kind": "fixed", "gamma": 4}}'
NOW = datetime(2026, 11, 22, 14, 3, tzinfo=UTC)

QUICK: tuple[tuple[tuple[str, ...], tuple[str, ...], int], ...] = (
    *(((*command,), (*MODELS, "numba"), 800) for command in (
        ("db", "check"), ("db", "list"), ("db", "list", "runs"), ("db", "show", "rec"),
        ("traces", "list"), ("traces", "show"), ("traces", "stats"), ("traces", "query"),
        ("schedule", "list"), ("schedule", "history"),
        ("policies", "list", "--pair", "demo"), ("policies", "show", POLICY_ID, "--pair", "demo"),
        ("policies", "diff", FIXED, POLICY_ID, "--pair", "demo"),
        ("policies", "export", FIXED, "--pair", "demo", "--for", "vllm"),
        ("run", "--pair", "nope.json"), ("tune", "--pair", "demo", "--workload", "nope.jsonl"),
        ("run", "--pair", "demo", "--policy", "nope.json"),
        ("record", "--pair", "demo", "--policy", "nope"),
        ("generate", "hi", "--pair", "nope.json"),
        ("schedule", "add", "x", "--pair", "demo", "--every", "6h"),
        ("schedule", "show", "x"),
    )),
    # numba looks for scipy's BLAS
    (
        ("simulate", "--policy", FIXED, "--device", "cuda"),
        tuple(m for m in MODELS if m != "scipy"), 1500,
    ),
)  # fmt: skip
"""(command, modules that it may not import, how many may be imported by then), in one process, the
lightest first."""

SCRIPT = """
import json, sys
from click.testing import CliRunner
from spectune.cli import main
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
    run = store.put_run(
        PAIR, POLICY_ID, an_outcome(), device="cpu", dtype="float32", recording_id=recording
    )
    study = store.put_study(PAIR, sampler="TPE", seed=0, document={}, recording_id=recording)
    artifact = store.put_artifact("bins", {"thresholds": [1]}, pair_id=PAIR)
    found = {
        "recordings": recording,
        "runs": run,
        "studies": study,
        "artifacts": artifact,
        "policies": POLICY_ID,
    }
    return {
        **found,
        "profiles": store.put_profile(a_profile(1e-4)),
        "pairs": PAIR,
        "workloads": store.get_workload("latest").digest(),
    }


def test_whatever_loads_no_model_imports_no_model_library(folder: Path) -> None:
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
        "traces list", "traces stats", "schedule list", "schedule show x", "db list", "db show x",
        "db check",
        "db prune --keep-last 1",
        "policies list", "policies export --pair demo",
        "policies rollback --pair demo", "simulate --policy nope",
        "--db a/b/c.db record --pair demo",
        "--db a/b/c.db schedule add x --pair demo --every 6h", "record --resume latest",
        "run --pair nope.json",
        "run --pair demo --policy nope", "tune --pair demo --workload nope.jsonl",
        "traces import nope.db",
        "schedule add x --pair demo --cron 99",
        "fit chooser --pair demo", "policies activate nope --pair demo",
    ],
)  # fmt: skip
def test_a_command_that_fails_says_so_in_one_line_and_leaves_nothing_behind(
    folder: Path, command: str
) -> None:
    done = CliRunner().invoke(main, command.split())
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1), done.output
    assert not list(folder.iterdir())
    if (
        command.split()[0] in ("traces", "schedule", "db")
        and "nope" not in command
        and "99" not in command
    ):
        assert "--db" in done.stderr


def test_every_advice_can_be_pasted(folder: Path) -> None:
    """Each command that a refusal names is whole: the command line's own parser takes it, on this
    database and pair."""
    with open_database("my own.db") as database:
        filled(database)
    trees = '{"draft": "small", "growth": {"kind": "top_k", "width": 2}}'
    unknown = '{"draft": "small", "window": {"kind": "analytic"}}'
    refused = (
        f"simulate --device cuda --policy {shlex.quote(FIXED)}",
        f"simulate --policy {shlex.quote(trees)}", "simulate --policy nope",
        f"simulate --device cuda --policy {shlex.quote(unknown)}",
        "fit chooser --pair demo --recording latest",
        "traces show --request nope", "db show nope",
        "policies rollback --pair demo --device cpu --deployment canary",
        "tune --pair demo --recording nope", "run --pair demo --policy nope",
    )  # fmt: skip
    for command in refused:
        done = CliRunner().invoke(
            main, ["--db", "my own.db", *shlex.split(command)], prog_name="spectune"
        )
        advice = [
            shlex.split(quoted)[1:] for quoted in re.findall("`(spectune [^`]+)`", done.stderr)
        ]
        assert advice, (command, done.stderr)
        for words in advice:
            assert words[:2] == ["--db", "my own.db"]
            said: click.Command = main
            rest = words[2:]
            while isinstance(said, click.Group):
                said, rest = said.commands[rest[0]], rest[1:]
            parsed = said.make_context(said.name, list(rest))
            assert not {"ID", "POLICY", "FILE", "..."} & set(rest)
            for flag in {f for param in said.params for f in param.opts} & {
                "--pair",
                "--device",
                "--deployment",
            }:
                typed = re.search(f"{flag} (\\S+)", command)
                assert typed is None or parsed.params[flag[2:]] == typed[1], (command, words)


def test_advice_decodes_as_the_command_did() -> None:
    """What is proposed to run after a tuning reads and samples the same workload in the same
    way."""
    asked = shlex.split(
        "--pair demo --workload w.jsonl --top-p 0.9 --stop END --stop 'x y' --no-chat "
        "--overlong skip"
    )
    root = click.Context(main, info_name="spectune")
    said = to_type(
        main.commands["tune"].make_context("tune", asked, parent=root), "run --policy active"
    )
    assert shlex.split(said)[:4] == ["spectune", "run", "--policy", "active"]
    parsed = main.commands["run"].make_context("run", shlex.split(said)[2:], parent=root).params
    keys = ("pair", "workloads", "top_p", "stop_strings", "no_chat", "overlong")
    assert [parsed[key] for key in keys] == [
        "demo",
        ("w.jsonl",),
        0.9,
        ("END", "x y"),
        True,
        "skip",
    ]


def test_publications_are_listed_with_and_without_a_pair(folder: Path) -> None:
    with open_database("spectune.db") as database:
        store, ids = TraceStore(database), filled(database)
        for pair, device in ((ids["pairs"], "cpu"), (ids["pairs"], "cuda"), ("other", "cpu")):
            store.put_pair(pair, "another" if pair == "other" else "pair", {})
            store.publish(pair, device, POLICY_ID, actor="test")
    rows = json.loads(at_80(folder, "policies", "list", "--json").stdout)["publications"]
    assert {(row["pair_id"], row["device"]) for row in rows if row["active"]} == {
        (PAIR, "cpu"),
        (PAIR, "cuda"),
        ("other", "cpu"),
    }
    assert "another" in at_80(folder, "policies", "list").stdout
    on_cuda = json.loads(at_80(folder, "policies", "list", "--device", "cuda", "--json").stdout)[
        "publications"
    ]
    assert [row["device"] for row in on_cuda] == ["cuda"]
    assert (
        json.loads(at_80(folder, "policies", "list", "--pair", "demo", "--json").stdout)[
            "publications"
        ]
        == []
    )


def test_tables_in_a_pipe_have_at_most_100_columns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with open_database("spectune.db") as database:
        name = filled(database)["recordings"]
    shown = CliRunner().invoke(main, ["traces", "query"]).stdout
    assert max(map(len, shown.splitlines())) <= 100
    assert name in shown


def test_a_database_is_made_by_what_is_stored_first(folder: Path) -> None:
    path = str(folder / "new.db")
    with open_database(path, lazily=True) as mine:
        assert TraceStore(mine).list_pairs() == ()
        assert not Path(path).exists()
        with open_database(path) as another:
            TraceStore(another).put_pair("p", "pair", {})
        assert [p.id for p in TraceStore(mine).list_pairs()] == ["p"]
        TraceStore(mine).put_pair("q", "pair", {})
    with open_database(path, create=False) as later:
        assert {p.id for p in TraceStore(later).list_pairs()} == {"p", "q"}


@pytest.mark.parametrize("width", [60, 80])
def test_no_id_is_cut_and_no_value_is_pythons(width: int) -> None:
    names = [f"{'a1b2c3d4' * size}" for size in (2, 5)]
    row = {
        "id": names[0],
        "pair_id": names[1],
        "is_active": True,
        "error": None,
        "drafts": {"small": 4},
        "refused": ["a: b c"],
    }
    row |= {f"n_column_{i}": 12345 for i in range(8)} | {
        "created_at": NOW.isoformat(),
        "reason": "it was the fastest " * 9,
    }
    for columns in (("id", "reason"), ("id", "pair_id", "is_active"), tuple(row)):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(rows_table([row, row], columns, "a title " * 20))
        shown = console.export_text()
        assert all(len(line) <= width for line in shown.splitlines())
        assert all(
            name in shown
            for name, column in zip(names, ("id", "pair_id"), strict=True)
            if column in columns
        )
        assert not any(word in shown for word in ("…", "None", "True", "{", "['", "+00:00"))


def test_moments_and_values_are_peoples() -> None:
    def ago(**since: float) -> str:
        return when(NOW - timedelta(**since), NOW)

    assert [ago(seconds=5), ago(minutes=3), ago(hours=5), ago(days=2)] == [
        "just now",
        "3 min ago",
        "5 h ago",
        "2026-11-20 14:03",
    ]
    assert when(NOW + timedelta(minutes=9), NOW) == "2026-11-22 14:12"
    assert [cell(v) for v in (None, False, True, {"a": 1}, [1.23456, "b"])] == [
        "",
        "",
        "yes",
        "a 1",
        "1.235, b",
    ]


def at_80(folder: Path, *command: str) -> Result:
    return CliRunner().invoke(main, command, env={"COLUMNS": "80"})


def test_everything_that_has_an_id_is_listed_and_shown(folder: Path) -> None:
    with open_database("spectune.db") as database:
        ids = filled(database)
    assert set(commands.KINDS) == set(KINDS) == set(ids)
    assert json.loads(at_80(folder, "db", "list", "--json").stdout) == dict.fromkeys(KINDS, 1)
    for kind, name in ids.items():
        listed = at_80(folder, "db", "list", kind).stdout
        assert name in listed
        assert not any(word in listed for word in ("…", "None"))
        shown = json.loads(
            at_80(folder, "db", "show", name[: max(8, len(name) - 1)], "--json").stdout
        )
        assert (shown["kind"], shown["id"]) == (kind, name)
    for command in (("traces", "list"), ("traces", "show"), ("traces", "query")):
        shown = at_80(folder, *command).stdout
        assert "…" not in shown
        assert max(map(len, shown.splitlines())) <= 80


def test_what_anything_that_stays_names_is_never_pruned(database: Database) -> None:
    store, old = TraceStore(database), filled(database)
    kept = store.put_artifact("static", {"a": 1}, pair_id=PAIR)
    under = store.put_artifact("clusters", {"b": 2}, pair_id=PAIR)
    router = store.put_artifact("router", {"c": 3}, pair_id=PAIR, provenance={"clusters": under})
    store.put_policy(
        "by-artifact",
        {"draft": "small", "growth": {"artifact": kept}, "shortlist": {"artifact": router}},
        "x",
    )
    run = store.put_run(PAIR, POLICY_ID, an_outcome(), device="cpu", dtype="float32")
    store.publish(PAIR, "cpu", POLICY_ID, actor="test", evidence={"runs": [run]})
    first, newest = old["profiles"], store.put_profile(a_profile(2e-4))
    before = counts(database)

    would, _ = prune_kinds(database, keep_last=0, dry_run=True)
    assert counts(database) == before
    removed, spared = prune_kinds(database, keep_last=0)
    assert would == removed
    assert removed == {
        "runs": [old["runs"]],
        "studies": [old["studies"]],
        "profiles": [first],
        "artifacts": [old["artifacts"]],
    }
    assert (spared["runs"], spared["profiles"], set(spared["artifacts"])) == (
        [run],
        [newest],
        {kept, under, router},
    )
    assert [row["id"] for row in list_kind(database, "runs")] == [run]
    with pytest.raises(NotFoundError, match="nothing has the id"):
        find(database, old["runs"])


def test_artifacts_that_a_policy_names_by_a_beginning_or_as_the_latest_are_spared(
    database: Database,
) -> None:
    store, old = TraceStore(database), filled(database)
    begun, latest = (
        store.put_artifact(kind, {"a": 1}, pair_id=PAIR) for kind in ("static", "router")
    )
    far = datetime(2099, 1, 1, tzinfo=UTC)
    with database.write() as session:
        session.execute(update(ArtifactRow).where(ArtifactRow.id == latest).values(created_at=far))
    store.put_policy(
        "by-artifact", {"growth": {"artifact": begun[:7]}, "shortlist": {"artifact": "latest"}}, "x"
    )
    removed, spared = prune_kinds(database, ["artifacts"], keep_last=0)
    assert removed == {"artifacts": [old["artifacts"]]}
    assert set(spared["artifacts"]) == {begun, latest}


def test_what_a_tuning_draws_goes_with_its_study_and_not_before(database: Database) -> None:
    store, old = TraceStore(database), filled(database)
    page = store.put_artifact(
        "tuning", {"a": 1}, pair_id=PAIR, provenance={"study": old["studies"]}
    )
    assert prune_kinds(database, ["artifacts"], keep_last=0)[1] == {"artifacts": [page]}
    removed, spared = prune_kinds(database, ["runs", "studies"], keep_last=0)
    assert removed == {"runs": [old["runs"]], "studies": [old["studies"]], "artifacts": [page]}
    assert not any(spared.values())
    assert not store.list_artifacts()


def test_db_prune_asks_what_to_keep_and_tells_what_it_removed(folder: Path) -> None:
    with open_database("spectune.db") as database:
        ids = filled(database)
    assert "--older-than AGE" in at_80(folder, "db", "prune").stderr
    assert (
        json.loads(at_80(folder, "db", "prune", "--older-than", "30d", "--json").stdout)["removed"][
            "runs"
        ]
        == []
    )
    told: Any = json.loads(
        at_80(folder, "db", "prune", "runs", "recordings", "--keep-last", "0", "--json").stdout
    )
    assert told["removed"] == {"runs": [ids["runs"]], "recordings": [ids["recordings"]]}
    assert json.loads(at_80(folder, "db", "list", "--json").stdout)["studies"] == 1
