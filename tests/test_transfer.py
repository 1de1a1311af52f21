"""Files for other tools and other databases: rows as Parquet, CSV and JSON; whole recordings."""

from __future__ import annotations

import csv
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from databases import opened
from doors import Door
from synthetic import flat_profile
from trace_values import PAIR, POLICY, POLICY_ID, a_recording, a_trajectory

from spectune.db import check
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore, query
from spectune.traces.store.export import export_recordings, export_rows
from spectune.traces.store.inventory import prune

FIXED = '{"draft": "small", "window": {"kind": "fixed", "gamma": 4}}'
NGRAM = '{"draft": "ngram"}'


def filled(store: TraceStore) -> str:
    """A recording with rounds, chains, trees, and a request that has neither; what prices it."""
    store.put_policy(POLICY_ID, POLICY, "small")
    recording = a_recording(store, n=4, drafts=("small", "ngram"), trees=True)
    store.put_profile(flat_profile(PAIR, ["small"]))
    store.append_trajectory(recording, 9, a_trajectory(9))
    return recording


# --- rows


@pytest.mark.parametrize("kind", ["requests", "rounds", "positions"])
def test_pandas_and_duckdb_read_rows_as_they_are(
    store: TraceStore, url: str, tmp_path: Path, kind: str
) -> None:
    filled(store)
    rows = list(getattr(query, kind)(store))
    paths = {ending: tmp_path / f"rows.{ending}" for ending in ("parquet", "csv", "json")}
    for path in paths.values():
        assert Door(url).json("traces export", path, per=kind)["rows"] == len(rows)
    frame = pandas.read_parquet(paths["parquet"])
    assert list(frame.columns) == list(rows[0])
    assert str(frame.created_at.dtype) == "datetime64[us, UTC]"
    told = frame.astype(object).where(frame.notna(), None).to_dict("records")
    assert told == rows
    answer = duckdb.sql(f"SELECT request_id, created_at FROM '{paths['parquet']}'").fetchall()
    assert [name for name, _ in answer] == [row["request_id"] for row in rows]
    assert json.loads(paths["json"].read_text()) == [
        {**row, "created_at": row["created_at"].isoformat()} for row in rows
    ]
    with open(paths["csv"], newline="") as file:
        read = list(csv.DictReader(file))
    assert [{k: v or None for k, v in row.items()} for row in read] == [
        {k: None if v is None else str(v) for k, v in row.items()}
        for row in json.loads(paths["json"].read_text())
    ]


def test_columns_without_any_value_keep_their_types(tmp_path: Path) -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [{"request_id": "a", "created_at": moment, "policy": None, "rounds": None, "tau": None}]
    assert export_rows(rows, tmp_path / "rows.parquet") == 1
    types = {f.name: str(f.type) for f in pq.read_schema(tmp_path / "rows.parquet")}
    assert (types["policy"], types["rounds"], types["tau"]) == ("string", "int64", "double")


def test_an_export_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TraceError, match=r"end it with \.json, \.csv or \.parquet"):
        export_rows([], tmp_path / "rows.txt")
    with pytest.raises(TraceError, match=r"cannot write .*No such file"):
        export_rows([{}], tmp_path / "nowhere" / "rows.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match="`pip install pyarrow`"):
        export_rows([{}], tmp_path / "rows.parquet")
    for ending in ("json", "csv", "parquet"):
        with pytest.raises(TraceError, match=f"matches; .*{ending} is not written"):
            export_rows([], tmp_path / f"rows.{ending}")
    assert list(tmp_path.iterdir()) == []


# --- whole recordings


def test_an_imported_recording_simulates_byte_for_byte(
    store: TraceStore, url: str, tmp_path: Path
) -> None:
    recording, here = filled(store), Door(url)
    other, file = a_recording(store, n=2), tmp_path / "moved.parquet"
    asked = ("simulate", "--recording", recording, "--json", "--policy")
    before = [here.call(*asked, policy).stdout for policy in (FIXED, NGRAM)]
    assert all(json.loads(told)["seconds"] for told in before)
    whole = here.json("traces export", file, "--whole", recording=[recording, other])
    assert whole["recordings"] == [other, recording]
    with opened(tmp_path / "second.db") as second:
        door = Door(str(tmp_path / "second.db"))
        assert door.json("traces import", file) == {"added": [other, recording], "present": []}
        assert door.json("traces import", file) == {"added": [], "present": [other, recording]}
        after = [door.call(*asked, policy).stdout for policy in (FIXED, NGRAM)]
        assert after == before
        assert second.load(recording, steps=True) == store.load(recording, steps=True)
        assert query.requests(second) == query.requests(store)
        assert check(str(tmp_path / "second.db")).ok
    # Back, where one of the two is gone.
    prune(store, ["recordings"], named=[recording])
    assert here.json("traces import", file) == {"added": [recording], "present": [other]}
    assert [here.call(*asked, policy).stdout for policy in (FIXED, NGRAM)] == before


def test_a_file_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    file, spoilt = tmp_path / "moved.parquet", tmp_path / "spoilt.parquet"
    with opened(tmp_path / "a.db") as store:
        export_recordings(store, [filled(store)], file)
        export_rows(query.requests(store), tmp_path / "rows.parquet")
    whole, door = file.read_bytes(), Door(str(tmp_path / "b.db"))
    found = pq.read_table(file)
    for content, says in (
        (whole[: len(whole) // 2], "cannot be read"),
        (b"no Parquet", "cannot be read"),
        ((tmp_path / "rows.parquet").read_bytes(), "spoilt.parquet: no recording; `"),
        (found.replace_schema_metadata({"spectune recordings": "0000"}), "another version"),
    ):
        if isinstance(content, pa.Table):
            pq.write_table(content, spoilt)
        else:
            spoilt.write_bytes(content)
        line = door.refused("traces import", spoilt)
        assert "spoilt.parquet: " in line
        assert says in line
    assert not (tmp_path / "b.db").exists()
    assert "gone.parquet: cannot be read (" in door.refused(
        "traces import", tmp_path / "gone.parquet"
    )
    with opened(tmp_path / "b.db") as other:
        assert not other.list_recordings()
        assert not other.list_pairs()


def test_what_is_damaged_inside_is_named_when_it_is_used(tmp_path: Path) -> None:
    """A file is trusted: its blobs are not read by the import, nor is the rest given up."""
    file = tmp_path / "moved.parquet"
    with opened(tmp_path / "a.db") as store:
        export_recordings(store, [filled(store)], file)
    table = pq.read_table(file)
    rows: list[dict[str, Any]] = table.to_pylist()
    (hit,) = (
        row
        for row in rows
        if row["table"] == "panorama"
        and {"ordinal": 2, "draft": "small"}.items() <= json.loads(row["columns"]).items()
    )
    hit["trie"] = hit["trie"][:-40]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), file)
    door = Door(str(tmp_path / "b.db"))
    assert len(door.json("traces import", file)["added"]) == 1
    rest = door.call("simulate", "--policy", FIXED, "--json")
    assert "left out: the panorama of draft 'small' of request 2" in rest.stderr
    assert json.loads(rest.stdout)["requests"] == 3


def test_whole_recordings_are_parquet(tmp_path: Path) -> None:
    door = Door(str(tmp_path / "a.db"))
    with opened(str(door.db)) as store:
        filled(store)
    assert (
        "--whole writes Parquet" in door.call("traces export", tmp_path / "a.csv", "--whole").stderr
    )
