"""Files of recordings, and databases that are in use, imported: a recording whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import opened, run_sql
from doors import Door
from trace_values import POLICY, POLICY_ID, a_recording, a_trajectory, steps_of

from spectune.db import Database, open_database
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.traces.schema import policy_id
from spectune.traces.store import TraceStore, transfer
from spectune.traces.store.query import list_recordings
from spectune.traces.store.transfer import export_recordings, import_recordings
from spectune.traces.tables import StoredPolicy, StoredWorkload


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


def nothing_of(database: Database) -> bool:
    store = TraceStore(database)
    with database.read() as session:
        rows = session.query(StoredPolicy).count() + session.query(StoredWorkload).count()
    return not list_recordings(database) and not store.list_pairs() and not rows


# --- ids that are hashes

OTHER = parse_policy({"draft": "ngram", "window": {"kind": "fixed", "gamma": 64}})


def test_the_hash_of_a_policy_is_of_its_document_as_stored() -> None:
    for policy in (
        AUTOREGRESSIVE,
        OTHER,
        parse_policy({"draft": "a", "growth": {"kind": "top_k", "width": 3}}),
    ):
        stored = json.loads(json.dumps(policy.spelled_out()))
        assert policy_id(stored) == policy.id
        assert policy_id(stored | {"stratify": {}}) != policy.id


# --- files that are no export, or not whole


MISTAKES = {
    "damaged": (
        "UPDATE trajectory SET tokens = x'00' WHERE ordinal = 1",
        "request 1: its trajectory is damaged",
    ),
    "no pair": ("DELETE FROM pair", "its pair '.*' is missing"),
    "another version": (
        "UPDATE spectune_schema SET version_num = '0099'",
        "was made by another version of spectune",
    ),
    "another program's": ("DROP TABLE spectune_schema", "is not a spectune database"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_file_that_cannot_be_imported_is_one_line(
    file: Path, empty: Database, mistake: str
) -> None:
    statement, says = MISTAKES[mistake]
    run_sql(file, statement)
    line = Door(empty.name).refused("traces", "import", str(file))
    assert re.search(says, line)
    assert nothing_of(empty)


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + b"\xff" * 2000])
def test_a_file_that_is_no_database_is_one_line(
    empty: Database, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "bad.db").write_bytes(content)
    assert "bad.db" in Door(empty.name).refused("traces", "import", str(tmp_path / "bad.db"))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_file_that_was_cut_off_is_one_line_that_names_it(
    file: Path, empty: Database, share: float
) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    line = Door(empty.name).refused("traces", "import", str(file))
    assert f"{file} is damaged" in line
    assert nothing_of(empty)


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
    recording, resolved = a_recording(store, n=2), transfer.resolve_all

    def resolve_while_one_is_appended(*arguments: Any) -> list[str]:
        names = resolved(*arguments)
        later = a_trajectory(5)
        store.append_trajectory(recording, 5, later, steps_of(later))
        return names

    monkeypatch.setattr(transfer, "resolve_all", resolve_while_one_is_appended)
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
