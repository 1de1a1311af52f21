"""docs/traces.md is run: every Python block in order, every SQL block on the databases it is for;
its tables are the schema's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from trace_values import PAIR, POLICY, POLICY_ID, a_recording

from spectune.db import Database, open_database
from spectune.db.models import PACKED, metadata
from spectune.db.schedules import FireRow, JobRow, ScheduleRow
from spectune.traces.store import TraceStore
from spectune.traces.store.query import acceptance_stats

PAGE = Path(__file__).parent.parent / "docs" / "traces.md"
BLOCKS = re.findall(r"^```(\w+) ?(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def example(database: Database) -> TraceStore:
    store = TraceStore(database)
    store.put_policy(POLICY_ID, POLICY, "small")
    a_recording(store, n=9, drafts=("ngram", "small"), trees=True)
    store.publish(PAIR, "cpu", POLICY_ID, actor="docs")
    return store


def test_the_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_database("spectune.db") as database:
        example(database)
    code = "\n".join(block for language, _, block in BLOCKS if language == "python")
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert (tmp_path / "hard.parquet").is_file()
    opened = names["database"]
    assert isinstance(opened, Database)
    opened.close()


def test_the_sql_examples_run_and_agree_with_the_calls(database: Database) -> None:
    example(database)
    results = []
    with database.read() as session:
        for language, dialect, block in BLOCKS:
            if language == "sql" and dialect in ("", database.dialect):
                results.append(session.execute(sa.text(block)).all())
    assert len(results) == 4
    assert all(results)
    by_draft = {dict(s.group)["draft"]: s.survival for s in acceptance_stats(database)}
    for draft, survival in by_draft.items():
        rows = [row for row in results[-1] if row.draft == draft]
        assert [float(row.marginal) for row in rows] == pytest.approx(
            survival.marginal[: len(rows)]
        )
        assert [float(row.conditional) for row in rows] == pytest.approx(
            survival.conditional[: len(rows)]
        )


def test_the_table_of_tables_is_the_schema() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    scheduler = {row.__tablename__ for row in (ScheduleRow, FireRow, JobRow)}
    assert set(listed) == set(metadata.tables) - scheduler
    packed = {row.__tablename__ for row in PACKED}  # type: ignore[attr-defined]
    for name, columns in listed.items():
        also = {"schema_version", "codec", "sha256", "data"} if name in packed else set()
        assert set(re.findall(r"`(\w+)`", columns)) | also == set(
            metadata.tables[name].columns.keys()
        ), name
        assert ("packed" in columns) == (name in packed)
