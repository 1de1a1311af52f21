"""Files of recordings that somebody else may have made or may still be writing: whole or not at
all, and nothing of it believed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import opened, run_sql
from doors import ROOT, Door
from test_traces_codec import FORGED
from trace_values import POLICY, POLICY_ID, a_recording, a_trajectory, steps_of

from spectune.db import CorruptedChunkError, Database, DatabaseError, open_database
from spectune.db.models import PolicyRow, TrajectoryRow, WorkloadRow
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.errors import TraceError
from spectune.traces.schema import policy_id
from spectune.traces.store import TraceStore, transfer
from spectune.traces.store.foreign import check_trajectory
from spectune.traces.store.query import list_recordings
from spectune.traces.store.transfer import export_recordings, import_recordings


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported recording of three requests with chains, trees, rounds, a workload and a
    policy."""
    folder = tmp_path_factory.mktemp("exported")
    with opened(folder / "a.db") as store:
        store.put_policy(POLICY_ID, POLICY, "small")
        recording = a_recording(store, n=3, trees=True)
        export_recordings(store.database, [recording], folder / "moved.db")
    return folder / "moved.db"


@pytest.fixture
def file(exported: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copyfile(exported, tmp_path / "moved.db")


@pytest.fixture
def empty(sqlite_template: Path, tmp_path: Path) -> Iterator[Database]:
    """An empty database to import into."""
    with open_database(str(shutil.copyfile(sqlite_template, tmp_path / "empty.db"))) as database:
        yield database


def in_process(code: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program of its own: a read that does not end would end no test."""
    program = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(program, cwd=ROOT, stdout=-1, text=True, timeout=60, check=False, **how)


def nothing_of(database: Database) -> bool:
    store = TraceStore(database)
    with database.read() as session:
        rows = session.query(PolicyRow).count() + session.query(WorkloadRow).count()
    return not list_recordings(database) and not store.list_pairs() and not rows


# --- ids that claim to be hashes

OTHER = parse_policy({"draft": "ngram", "window": {"kind": "fixed", "gamma": 64}})


UNLIKE = "has another content than its id says"


@pytest.mark.parametrize(
    ("table", "change", "says"),
    [
        ("policy", f"document = '{json.dumps(OTHER.spelled_out())}'", f"'{POLICY_ID}' {UNLIKE}"),
        (
            "policy",
            """document = '{"draft": "a", "select": {"top_n": null, "x": 1}}'""",
            UNLIKE,
        ),
        ("policy", "document = '[]'", UNLIKE),
        ("workload", "content = json_set(content, '$[0][2][0]', 'other')", UNLIKE),
        ("workload", "n_requests = 1", UNLIKE),
        ("workload", "content = '7'", UNLIKE),
        ("workload", 'content = \'[["a\\ud800", "b", ["c"]]]\'', "has a content that is none"),
        ("recording", "max_new_tokens = 9999", r"is not what its hash \(spec_sha256\) says"),
        ("recording", "spec_sha256 = replace(spec_sha256, '0', '1')", "is not what its hash"),
    ],
)
def test_a_hash_that_does_not_fit_its_content_is_refused(
    file: Path, empty: Database, table: str, change: str, says: str
) -> None:
    run_sql(file, f"UPDATE {table} SET {change}")
    with pytest.raises(TraceError, match=f"{table} .*{says}.*nothing of it was taken over"):
        import_recordings(empty, file)
    assert nothing_of(empty)


def test_no_policy_takes_the_place_of_another(
    store: TraceStore, url: str, tmp_path: Path, tiny_pair: Path
) -> None:
    """A row that came before ids were looked at: the wrong policy is neither run nor published
    under this id."""
    wanted = parse_policy({"draft": "near", "window": {"kind": "fixed", "gamma": 5}})
    forged = Policy.model_validate({"draft": "ngram", "window": {"kind": "fixed", "gamma": 64}})
    store.put_policy(wanted.id, forged.spelled_out(), "looks well")
    for act in (
        lambda: store.put_policy(wanted.id, wanted.spelled_out(), wanted.label()),
        lambda: store.get_policy(wanted.id),
    ):
        with pytest.raises(CorruptedChunkError, match=f"policy {wanted.id} {UNLIKE}"):
            act()
    (tmp_path / "wanted.json").write_text(json.dumps(wanted.spelled_out()))
    door = Door(url, str(tiny_pair))
    for name in (wanted.id, tmp_path / "wanted.json"):
        assert wanted.id in door.refused("policies", "activate", name, "--pair", door.pair)
    assert store.list_publications() == ()


def test_no_workload_takes_the_place_of_another(store: TraceStore) -> None:
    recording = store.get_recording(a_recording(store, n=2))
    with store.database.write() as session:
        row = session.get_one(WorkloadRow, recording.workload_id)
        row.content = [["r0", "code", ["something else"]], ["r1", "prose", ["x"]]]
    with pytest.raises(CorruptedChunkError, match=f"workload {recording.workload_id} {UNLIKE}"):
        store.get_workload(str(recording.workload_id))


def test_the_hash_of_a_policy_is_of_its_document_as_stored() -> None:
    for policy in (
        AUTOREGRESSIVE,
        OTHER,
        parse_policy({"draft": "a", "growth": {"kind": "top_k", "width": 3}}),
    ):
        stored = json.loads(json.dumps(policy.spelled_out()))
        assert policy_id(stored) == policy.id
        unused = (None, {"top_n": None}, {"kind": "full"})
        without = {k: v for k, v in stored.items() if v not in unused}
        assert policy_id(without) == policy.id
        assert policy_id(stored | {"stratify": {}}) != policy.id


# --- rows that are none of ours


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE recording SET sampling = '{\"temperature\": []}'",
        "UPDATE recording SET options = '" + "[" * 50_000 + "'",
        "UPDATE recording SET created_at = 'yesterday'",
        "UPDATE recording SET state = 'other'",
        "UPDATE recording SET pair_id = 'none'",
        "UPDATE pair SET document = '7'",
        "UPDATE pair SET name = CAST(x'610062' AS TEXT)",
        "UPDATE trajectory SET finish = 'never'",
        "UPDATE trajectory SET n_output = 7",
        "UPDATE trajectory SET seconds = 9e999",
        "UPDATE trajectory SET category = hex(zeroblob(5000))",
        "DELETE FROM trajectory WHERE ordinal = 1",
        "UPDATE step_chunk SET policies = '[{}]'",
        "UPDATE step_chunk SET at_risk = '[[]]'",
        "UPDATE panorama_chunk SET draft = 'other'",
        "UPDATE panorama_chunk SET gamma_max = 99",
        "UPDATE panorama_chunk SET covers = '[\"everything\"]' WHERE kind = 'tree'",
        "UPDATE panorama_chunk SET survived = 'null'",
        "DELETE FROM pair",
        "DROP TABLE workload",
        "ALTER TABLE trajectory DROP COLUMN finish",
        "DELETE FROM spectune_schema",
        "INSERT INTO spectune_schema VALUES ('0001')",
    ],
)
def test_rows_that_we_do_not_write_are_one_line(
    file: Path, empty: Database, statement: str
) -> None:
    run_sql(file, "PRAGMA ignore_check_constraints=ON", statement)
    with pytest.raises((TraceError, DatabaseError)) as refusal:
        import_recordings(empty, file)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600
    assert nothing_of(empty)


@pytest.mark.parametrize("table", ["trajectory", "panorama_chunk", "step_chunk"])
def test_forged_chunks_are_not_imported(file: Path, empty: Database, table: str) -> None:
    chunk = FORGED["nested"]
    data, digest = chunk.data.hex(), chunk.sha256.hex()
    run_sql(file, f"UPDATE {table} SET data = x'{data}', sha256 = x'{digest}' WHERE ordinal = 1")
    says = f"request 1: its {table.replace('_', ' ')} is damaged"
    with pytest.raises(CorruptedChunkError, match=says):
        import_recordings(empty, file)
    assert nothing_of(empty)


# --- files that would run something


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


RUNNING = {
    "view": (
        "DROP TABLE step_chunk",
        f"CREATE VIEW step_chunk AS {ENDLESS} SELECT i AS id, 'rec' AS recording_id, i AS "
        "ordinal FROM n",
    ),
    "another view": (f"CREATE VIEW elsewhere AS {ENDLESS} SELECT i FROM n",),
    "virtual table": (
        "DROP TABLE step_chunk",
        "CREATE VIRTUAL TABLE step_chunk USING fts5(recording_id, ordinal)",
    ),
    "trigger": ("CREATE TRIGGER t AFTER INSERT ON pair BEGIN DELETE FROM pair; END",),
    "computed column": ("ALTER TABLE pair ADD COLUMN more BLOB AS (zeroblob(1000000000))",),
    "forged": (
        f"UPDATE sqlite_master SET sql = 'CREATE VIEW step_chunk AS {ENDLESS} SELECT i FROM n' "
        "WHERE name = 'step_chunk'",
    ),
}


def test_a_file_that_would_run_something_is_refused(exported: Path, tmp_path: Path) -> None:
    files = [shutil.copyfile(exported, tmp_path / f"{name}.db") for name in RUNNING]
    for file, statements in zip(files, RUNNING.values(), strict=True):
        run_sql(file, *statements)
    done = in_process(f"""
        from spectune.db import open_database
        from spectune.traces.errors import TraceError
        from spectune.traces.store.transfer import import_recordings
        with open_database({str(tmp_path / "receiver")!r}) as database:
            for file in {[str(file) for file in files]}:
                try:
                    import_recordings(database, file)
                except TraceError as error:
                    print(error)
    """)
    said = done.stdout.splitlines()
    for line, file in zip(said, files, strict=True):
        assert line.startswith(f"cannot import {file}: ")


def test_a_file_whose_pages_are_shared_is_refused(file: Path, empty: Database) -> None:
    of_texts = "SELECT rootpage FROM sqlite_master WHERE name = 'trajectory'"
    run_sql(file, f"UPDATE sqlite_master SET rootpage = ({of_texts}) WHERE name = 'panorama_chunk'")
    with pytest.raises(TraceError, match="the file is damaged"):
        import_recordings(empty, file)
    assert nothing_of(empty)


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + b"\xff" * 2000])
def test_a_file_that_is_no_database_is_one_line(
    empty: Database, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "bad.db").write_bytes(content)
    with pytest.raises((TraceError, DatabaseError)) as refusal:
        import_recordings(empty, tmp_path / "bad.db")
    assert "bad.db" in str(refusal.value)
    assert "\n" not in str(refusal.value)


# --- a database in use, and processes that are killed


def test_a_database_in_use_is_imported_whole(tmp_path: Path, empty: Database) -> None:
    used = tmp_path / "used.db"
    with opened(used) as store:
        first = a_recording(store, n=2)
        run_sql(used, "PRAGMA wal_checkpoint(TRUNCATE)")
        second = a_recording(store, n=2)
        assert (tmp_path / "used.db-wal").stat().st_size
        assert set(import_recordings(empty, used).added) == {first, second}
    # And what a kill left: the log alone holds the second one.
    with opened(used) as store:
        third = a_recording(store, n=1)
        for ending in ("", "-wal"):
            shutil.copyfile(f"{used}{ending}", f"{tmp_path / 'killed.db'}{ending}")
    assert third in import_recordings(empty, tmp_path / "killed.db").added


def test_an_export_sees_one_moment_of_a_recording_that_is_written_to(
    store: TraceStore, empty: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = a_recording(store, n=2)
    later = iter([a_trajectory(5)])

    def check_while_one_is_appended(row: TrajectoryRow) -> None:
        check_trajectory(row)
        for trajectory in later:
            store.append_trajectory(recording, 5, trajectory, steps_of(trajectory))

    monkeypatch.setattr(transfer, "check_trajectory", check_while_one_is_appended)
    export_recordings(store.database, [recording], tmp_path / "a.db")
    assert import_recordings(empty, tmp_path / "a.db").added == (recording,)
    assert TraceStore(empty).recorded_ordinals(recording) == {0, 1}
    assert store.recorded_ordinals(recording) == {0, 1, 5}


def test_an_import_leaves_the_file_and_its_folder_as_they_are(
    exported: Path, tmp_path: Path, empty: Database
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name, mode in (("export.db", "delete"), ("database.db", "wal")):
        shutil.copyfile(exported, here / name)
        run_sql(here / name, f"PRAGMA journal_mode={mode}")

    def content() -> dict[str, tuple[bytes, int]]:
        return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in here.iterdir()}

    before = content()
    here.chmod(0o555)
    try:
        for name in ("export.db", "database.db"):
            import_recordings(empty, here / name)
        assert content() == before
    finally:
        here.chmod(0o755)


def test_a_killed_import_leaves_nothing_behind(file: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "SQLITE_TMPDIR": str(temporary)}
    before = {p.name for p in tmp_path.iterdir()} | {"empty.db", "empty.db-wal", "empty.db-shm"}
    code = f"""
        import os, signal
        from spectune.db import open_database
        from spectune.traces.store.transfer import import_recordings
        database = open_database({str(tmp_path / "empty.db")!r})
        # Killed when the first recording is to be written: the file has been looked through.
        database.write = lambda: os.kill(os.getpid(), signal.SIGKILL)
        import_recordings(database, {str(file)!r})
    """
    assert in_process(code, env=environment).returncode == -signal.SIGKILL
    assert list(temporary.iterdir()) == []
    assert {p.name for p in tmp_path.iterdir()} <= before
