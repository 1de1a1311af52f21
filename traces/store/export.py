"""Rows of questions as JSON, CSV or Parquet, and whole recordings as Parquet files that another
database imports, trusted as a checkpoint is."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Final

from sqlalchemy import Column, LargeBinary, Select, insert, or_, select, tuple_
from sqlalchemy.orm import Session

from spectune.db.base import UtcDateTime
from spectune.db.migrate import HEAD
from spectune.traces import tables
from spectune.traces.errors import TraceError
from spectune.traces.files import replacing
from spectune.traces.store import TraceStore
from spectune.traces.store.inventory import as_stored
from spectune.traces.views import ACCEPTANCE, REQUESTS

Row = Mapping[str, Any]
_KIND: Final = b"spectune recordings"
_BATCH, _ROWS = 10_000, 64
"""Rows of an answer, and of a whole recording, in memory at a time."""


def export_rows(rows: Iterable[Row], path: str | Path) -> int:
    """Writes rows to a file, whole or not at all, in the format that its ending names (.json, .csv,
    .parquet); how many there were. Raises TraceError for another ending, no rows, a file that
    cannot be written, and Parquet without pyarrow."""
    ending = Path(path).suffix.lower()
    if ending not in (".json", ".csv", ".parquet"):
        raise TraceError(f"cannot tell the format of {path}: end it with .json, .csv or .parquet")
    left, count = iter(rows), 0
    with _written(path) as file:
        rows = chain(_some(islice(left, 1), path), left)
        if ending == ".parquet":
            return _write_parquet(rows, file)
        with io.TextIOWrapper(file, encoding="utf-8", newline="") as out:
            writer = csv.writer(out)
            for count, row in enumerate(map(plain, rows), 1):
                if ending == ".json":
                    out.write(
                        ("[\n " if count == 1 else ",\n ") + json.dumps(row, ensure_ascii=False)
                    )
                else:
                    cells = [*map(_cell, row.values())]
                    writer.writerows([row, cells] if count == 1 else [cells])
            if ending == ".json":
                out.write("\n]\n")
        return count


def _cell(value: Any) -> Any:
    """A value as a spreadsheet shows it: text that it would take for a formula, which clients may
    send as a label, stands behind an apostrophe."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value


def _some(rows: Iterable[Any], path: str | Path) -> list[Any]:
    """Rows as a list. Raises TraceError where there are none: not every reader takes an empty
    file, and one that is there already stays."""
    found = list(rows)
    if not found:
        raise TraceError(f"nothing that is stored matches; {path} is not written")
    return found


def plain(row: Row) -> dict[str, Any]:
    """A row as JSON takes it: moments in ISO 8601."""
    return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in row.items()}


def _write_parquet(rows: Iterable[Row], file: BinaryIO) -> int:
    pa, pq = _pyarrow()
    types = {str: pa.string(), int: pa.int64(), datetime: pa.timestamp("us", tz="UTC")}
    left, count = iter(rows), 0
    batch = list(islice(left, _BATCH))
    kinds = {name: type(value) for row in batch for name, value in row.items()}
    views = {c.name: c.type for c in (*REQUESTS.c, *ACCEPTANCE.c) if c.name in kinds}
    kinds |= {
        name: datetime if isinstance(of, UtcDateTime) else of.python_type
        for name, of in views.items()
    }
    schema = pa.schema([(name, types.get(kind, pa.float64())) for name, kind in kinds.items()])
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while batch:
            writer.write_table(pa.Table.from_pylist(batch, schema))
            count += len(batch)
            batch = list(islice(left, _BATCH))
    return count


def export_recordings(store: TraceStore, recordings: Sequence[str], path: str | Path) -> int:
    """Writes whole recordings (ids) to a Parquet file: texts, panoramas and rounds, with their
    pair, workload, policies and latency profiles; of a sample what it lists, as its own. Returns
    how many rows. Raises TraceError as :func:`export_rows` does."""
    pa, pq = _pyarrow()
    blobs = sorted({c.name for table in _TABLES.values() for c in table.c if _is_blob(c)})
    types = [("table", pa.string()), ("columns", pa.string()), *((b, pa.binary()) for b in blobs)]
    schema, count = pa.schema(types, metadata={_KIND: HEAD}), 0
    with (
        _written(path) as file,
        pq.ParquetWriter(file, schema, compression="none") as writer,
        store.database.snapshot() as session,
    ):
        names = _some(recordings, path)
        rows = chain.from_iterable(_rows_of(session, name) for name in names)
        while batch := list(islice(rows, _ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, schema))
            count += len(batch)
    return count


def import_recordings(store: TraceStore, path: str | Path) -> tuple[list[str], list[str]]:
    """Adds the recordings of a file that :func:`export_recordings` wrote, in one transaction: (ids
    added, ids that are here already and stay as they are). Raises TraceError for a file that is
    none, or is damaged, or of another version."""
    pa, pq = _pyarrow()
    added: list[str] = []
    present: list[str] = []
    try:
        with ExitStack() as stack:
            file = stack.enter_context(pq.ParquetFile(stack.enter_context(open(path, "rb"))))
            found = (file.schema_arrow.metadata or {}).get(_KIND, b"").decode()
            if found != HEAD:
                raise TraceError(
                    f"{path}: {'made by another version of spectune' if found else 'no recording'};"
                    " `traces export FILE.parquet --whole` writes what can be imported"
                )
            session = stack.enter_context(store.database.write())
            parts = (groupby(b.to_pylist(), itemgetter("table")) for b in file.iter_batches(_ROWS))
            for name, batch in chain.from_iterable(parts):
                table = _TABLES[name]
                values = [_values(table, row) for row in batch]
                if "id" in table.c:
                    ids = [row["id"] for row in values]
                    here = set(session.scalars(select(table.c.id).where(table.c.id.in_(ids))))
                    values = [row for row in values if row["id"] not in here]
                    if name == "recording":
                        present += [i for i in ids if i in here]
                        added += [row["id"] for row in values]
                else:
                    values = [row for row in values if row["recording_id"] in added]
                if values:
                    session.execute(insert(table), values)
    except (OSError, pa.ArrowException, json.JSONDecodeError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be read ({why})") from None
    return added, present


_TABLES: Final = {
    of.__tablename__: as_stored(of)  # what others refer to first
    for of in (
        *(tables.Pair, tables.StoredWorkload, tables.Recording, tables.StoredPolicy),
        *(tables.LatencyProfile, tables.Trajectory, tables.Panorama),
    )
}


def _rows_of(session: Session, recording: str) -> Iterator[dict[str, Any]]:
    """The rows of a recording and of what it names, as the file has them."""
    c = {name: table.c for name, table in _TABLES.items()}
    of = select(c["recording"].pair_id, c["recording"].workload_id)
    pair, workload = session.execute(of.where(c["recording"].id == recording)).one()
    v, sampled_request = REQUESTS.c, as_stored(tables.SampledRequest)
    s = sampled_request.c
    listed = select(s.recording_id, s.ordinal).where(s.sample_id == recording)
    is_listed = tuple_(v.recording_id, v.ordinal).in_(listed)
    policies = select(v.policy_id).where(or_(v.recording_id == recording, is_listed))
    chosen = {
        "pair": c["pair"].id == pair,
        "workload": c["workload"].id == workload,
        "recording": c["recording"].id == recording,
        "policy": c["policy"].id.in_(policies),
        "latency_profile": c["latency_profile"].pair_id == pair,
        "trajectory": c["trajectory"].recording_id == recording,
        "panorama": c["panorama"].recording_id == recording,
    }
    for name, table in _TABLES.items():
        query = select(table).where(chosen[name])
        if name in ("trajectory", "panorama"):
            query = query.order_by(table.c.ordinal)
        rows: Iterable[Row] = _mappings(session, query)
        if name in ("trajectory", "panorama"):
            at = (s.recording_id == table.c.recording_id) & (s.ordinal == table.c.ordinal)
            query = select(table, s.number, s.is_text, s.is_load).join(sampled_request, at)
            query = query.where(s.sample_id == recording).order_by(s.number)
            sampled = (_as_listed(recording, row) for row in _mappings(session, query))
            rows = chain(rows, filter(None, sampled))
        for row in rows:
            blobs = {column.name: row[column.name] for column in table.c if _is_blob(column)}
            columns = {key: value for key, value in row.items() if key not in blobs}
            yield {"table": name, "columns": json.dumps(plain(columns)), **blobs}


def _mappings(session: Session, query: Select[Any]) -> Iterator[dict[str, Any]]:
    for row in session.execute(query.execution_options(yield_per=_ROWS)).mappings():
        yield dict(row)


def _as_listed(sample: str, row: dict[str, Any]) -> dict[str, Any] | None:
    """The row of a request or a panorama as if it were stored in a sample that lists it: without
    the text, or the rounds, that are not of it. None for a panorama of such a text."""
    row |= {"recording_id": sample, "ordinal": row.pop("number")}
    is_text, is_load = row.pop("is_text"), row.pop("is_load")
    if "trie" in row:
        return row if is_text else None
    if not is_text:
        row["tokens"] = None
    if not is_load:
        row["steps"] = None
    return row


def _values(table: Any, row: Row) -> dict[str, Any]:
    """A row of the file as a row of its table."""
    values: dict[str, Any] = json.loads(row["columns"])
    for column in table.c:
        if _is_blob(column):
            values[column.name] = row[column.name]
        elif isinstance(column.type, UtcDateTime) and values[column.name] is not None:
            values[column.name] = datetime.fromisoformat(values[column.name])
    return values


def _is_blob(column: Column[Any]) -> bool:
    return isinstance(column.type, LargeBinary)


@contextmanager
def _written(path: str | Path) -> Iterator[BinaryIO]:
    try:
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror or error}") from None


def _pyarrow() -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``. Raises TraceError where it is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise TraceError("Parquet needs pyarrow: `pip install pyarrow`") from None
    return pa, pq
