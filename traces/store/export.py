"""Rows for other tools: JSON, CSV or Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from spectune.traces.errors import TraceError
from spectune.traces.files import replacing
from spectune.traces.store.query import RequestRow
from spectune.traces.text import printable

_BATCH = 10_000
_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")
"""How a text begins that a spreadsheet would compute."""


def export_rows(rows: Iterable[RequestRow], path: str | Path) -> int:
    """Writes rows to a file, whole or not at all, in the format that its ending names; how many
    there were.

    JSON is a list of objects; CSV and Parquet have the columns of
    :class:`traces.store.query.RequestRow`. Raises :class:`TraceError` when the ending names no
    format, the folder does not exist, or Parquet is asked for without pyarrow.
    """
    target = Path(path)
    ending = target.suffix.lower()
    if ending not in (".json", ".csv", ".parquet"):
        raise TraceError(
            f"cannot tell the format of {target.name}: end it with .json, .csv or .parquet"
        )
    try:
        with replacing(target) as file:
            if ending == ".parquet":
                return _write_parquet(rows, file)
            with io.TextIOWrapper(file, encoding="utf-8", newline="") as out:
                return write_rows(rows, out, "csv" if ending == ".csv" else "json")
    except OSError as error:
        raise TraceError(f"cannot write {target}: {error.strerror}") from None


def write_rows(rows: Iterable[RequestRow], out: IO[str], format: Literal["json", "csv"]) -> int:
    """Writes rows as JSON or CSV to an open text file; how many there were.

    Texts of a CSV are without control characters; those that a spreadsheet would take for a formula
    begin with an apostrophe, which it hides.
    """
    count = 0
    if format == "csv":
        writer = csv.DictWriter(out, RequestRow.columns())
        writer.writeheader()
        for count, row in enumerate(rows, 1):  # noqa: B007  # the count is what is returned
            writer.writerow({name: _cell(value) for name, value in row.to_json().items()})
        return count
    out.write("[")
    for count, row in enumerate(rows, 1):
        out.write(("\n " if count == 1 else ",\n ") + json.dumps(row.to_json(), ensure_ascii=False))
    out.write("\n]\n")
    return count


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    shown = printable(value)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def _write_parquet(rows: Iterable[RequestRow], file: BinaryIO) -> int:
    pa, pq = pyarrow_modules()
    known = {"int": pa.int64(), "float": pa.float64(), "str": pa.string()}
    known["datetime"] = pa.timestamp("us", tz="UTC")
    types = {f.name: known[str(f.type).removesuffix(" | None")] for f in fields(RequestRow)}
    schema = pa.schema(list(types.items()))
    count, left = 0, iter(rows)
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while batch := list(islice(left, _BATCH)):
            columns = {name: [getattr(row, name) for row in batch] for name in types}
            writer.write_table(pa.table(columns, schema=schema))
            count += len(batch)
    return count


def pyarrow_modules() -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``. Raises TraceError where it is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise TraceError("Parquet needs pyarrow: `pip install pyarrow`") from None
    return pa, pq
