"""Files of workloads: JSON lines, a JSON list, CSV, TSV, Parquet."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spectune.traces.errors import WorkloadError
from spectune.traces.files import json_lines, parse_json, read_text
from spectune.traces.schema import Workload
from spectune.traces.text import shortened
from spectune.traces.workloads import FORMATS, PROMPTS, BadRows, Turns, WorkloadRow, make_workload


def read_workload(
    paths: Sequence[str],
    *,
    turns: Turns | None = None,
    column: str | None = None,
    bad_rows: BadRows = "few",
) -> Workload:
    """Reads files, in order, as one workload. A request without an id is called by its file and
    line.

    ``column`` names the column, or key, that holds the prompts in the rows that have it; the others
    are read as they are. ``bad_rows`` is :func:`make_workload`'s. Raises WorkloadError naming file
    and line.
    """
    names = [Path(path).name for path in paths]
    lines: list[WorkloadRow] = []
    keys: dict[str, None] = {}
    for path, name in zip(paths, names, strict=True):
        called = name if names.count(name) == 1 else path
        for n, where, row in _rows(path):
            if isinstance(row, dict):
                keys |= dict.fromkeys(map(str, row))
                row = _with_prompt(row, column) if column and column in row else row
            lines.append(WorkloadRow(where, row, shortened(f"{called}:{n}"), path))
    if column and column not in keys:
        has = shortened(", ".join(keys)) or "none"
        raise WorkloadError(f"requests.column {column}: no row has such a key; there are: {has}")
    joined = shortened("+".join(Path(path).stem for path in paths))
    return make_workload(joined, lines, turns=turns, bad_rows=bad_rows)


def _with_prompt(row: dict[str, Any], column: str) -> dict[str, Any]:
    """A row with what its ``column`` holds under a key that tells what it is."""
    value, key = row[column], column if column in PROMPTS else "prompt"
    if key == "prompt" and isinstance(value, list) and value and not isinstance(value[0], int):
        key = "messages" if isinstance(value[0], dict) else "turns"
    return {k: v for k, v in row.items() if k not in (*PROMPTS, column)} | {key: value}


def _rows(path: str) -> Iterable[tuple[int, str, Any]]:
    """The rows of a file: number, where it stands, its object or the WorkloadError that says why
    there is none. Raises WorkloadError for a file that cannot be read at all."""
    suffix = Path(path).suffix.lower()
    if suffix == ".parquet" and os.path.isfile(path):
        rows = _parquet(path)
    else:
        missing = "no such file (write 'demo', or the path of a file)"
        text = read_text(path, f"--workload {path}", WorkloadError, missing=missing)
        if suffix in (".csv", ".tsv"):
            return _table(text, path, "\t" if suffix == ".tsv" else ",")
        if not text.lstrip().startswith("["):  # else one list, as ShareGPT's files are
            return _lines(text, path)
        rows = parse_json(text, f"{path}:1", WorkloadError)
    return [(n, f"{path}: row {n}", row) for n, row in enumerate(rows, 1)]


def _lines(text: str, path: str) -> Iterator[tuple[int, str, Any]]:
    for n, where, row in json_lines(text, path, WorkloadError):
        if isinstance(row, WorkloadError):
            why = f"not JSON ({FORMATS}; a table's name ends in .csv, .tsv or .parquet)"
            row = WorkloadError(f"{where}: {why}")
        yield n, where, row


def _table(text: str, path: str, delimiter: str) -> Iterator[tuple[int, str, Any]]:
    csv.field_size_limit(1 << 30)
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in table:
            where: str = f"{path}:{table.line_num}"
            if None in row or None in row.values():
                why = f"more or fewer than the {len(table.fieldnames or ())} fields of line 1"
                yield table.line_num, where, WorkloadError(f"{where}: {why}")
            else:
                yield table.line_num, where, {key: value or None for key, value in row.items()}
    except csv.Error as problem:
        raise WorkloadError(f"{path}:{table.reader.line_num}: not CSV ({problem})") from None


def _parquet(path: str) -> list[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        why = "Parquet needs pyarrow; `pip install pyarrow`, or write CSV or JSON lines"
        raise WorkloadError(f"{path}: {why}") from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        raise WorkloadError(f"{path}: not Parquet ({problem})") from None
    return [{key: _without_nulls(value) for key, value in row.items()} for row in rows]


def _without_nulls(value: Any) -> Any:
    """A value of a table without the nulls of its structs, at any depth: a column's structs have
    the keys of all, and those that a row did not say are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
