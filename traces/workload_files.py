"""Where workloads come from: JSON lines, JSON, CSV, Parquet, data sets of Hugging Face."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spectune.traces.errors import WorkloadError
from spectune.traces.files import SIZE_LIMIT, parse_json, read_text
from spectune.traces.schema import Workload
from spectune.traces.text import printable, shortened
from spectune.traces.workloads import FORMATS, Line, Turns, make_workload

COLUMNS = ("prompt", "turns", "messages", "conversations")
"""Columns that hold prompts where none is named; the first that there is."""
DATA_SET = "hf:"
"""Begins the name of a data set: ``hf:NAME``, ``hf:NAME:SPLIT``, ``hf:NAME,CONFIG:SPLIT``; NAME may
be a folder."""


def read_workload(
    paths: Sequence[str], *, turns: Turns | None = None, column: str | None = None
) -> Workload:
    """Reads files and data sets, in order, as one workload. A request without an id is called by
    its file and line.

    ``column`` names the column, or key, that holds the prompts. Raises WorkloadError naming file
    and line.
    """

    def lines() -> Iterator[Line]:
        names = [Path(path).name for path in paths]
        for path, name in zip(paths, names, strict=True):
            own = name if names.count(name) == 1 else path
            for number, where, data in _objects(path, column):
                yield Line(where, data, shortened(printable(f"{own}:{number}")), path)

    return make_workload(
        shortened(printable("+".join(Path(p).stem for p in paths))), lines(), turns=turns
    )


def _objects(path: str, column: str | None) -> Iterator[tuple[int, str, Any]]:
    """(number, where, object) of everything in a file or data set."""
    if path.startswith(DATA_SET):
        return _rows(_data_set(path), f"--workload {shortened(path)}", column)
    magic = b""
    if os.path.isfile(path):
        with suppress(OSError), open(path, "rb") as file:
            magic = file.read(4)
    if magic == b"PAR1":
        return _rows(_parquet(path), path, column)
    missing = "no such file (write 'demo', the path of a file, or hf:NAME of a data set)"
    text = read_text(path, f"--workload {path}", WorkloadError, missing=missing)
    if Path(path).suffix.lower() in (".csv", ".tsv"):
        return _table(text, path, column)
    found = _items(text, path) if text.lstrip().startswith("[") else _lines(text, path)
    return ((n, at, _named(data, at, column) if column else data) for n, at, data in found)


def _lines(text: str, path: str) -> Iterator[tuple[int, str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}"
        if line.strip() and not line.lstrip().startswith(tuple('{["-0123456789tfn')):
            raise WorkloadError(
                f"{where}: not JSON ({FORMATS}; a table's name ends in .csv, .tsv or .parquet)"
            )
        if line.strip():
            yield number, where, parse_json(line, where, WorkloadError)


def _items(text: str, path: str) -> Iterator[tuple[int, str, Any]]:
    """The items of one JSON list, as ShareGPT's files are."""
    for number, item in enumerate(parse_json(text, f"{path}:1", WorkloadError), 1):
        yield number, f"{path}: item {number}", item


def _table(text: str, path: str, column: str | None) -> Iterator[tuple[int, str, Any]]:
    csv.field_size_limit(SIZE_LIMIT)
    delimiter = "\t" if Path(path).suffix.lower() == ".tsv" else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        column = _column(header, f"{path}:1", column)
        for row in filter(None, reader):
            where = f"{path}:{reader.line_num}"
            if len(row) != len(header):
                raise WorkloadError(f"{where}: {len(row)} fields, the first line has {len(header)}")
            yield reader.line_num, where, _named(dict(zip(header, row, strict=True)), where, column)
    except csv.Error as problem:
        raise WorkloadError(f"{path}:{reader.line_num}: not CSV ({problem})") from None


def _rows(
    rows: tuple[Sequence[str], Iterable[Any]], where: str, column: str | None
) -> Iterator[tuple[int, str, Any]]:
    """Rows of a typed table, which may hold conversations."""
    column = _column(rows[0], where, column)
    for number, row in enumerate(rows[1], 1):
        here = f"{where}: row {number}"
        yield number, here, _named(row, here, column)


def _column(columns: Sequence[str], where: str, column: str | None) -> str:
    """The column that holds the prompts."""
    for name in (column,) if column else COLUMNS:
        if name in columns:
            return name
    asked = f"name the column that holds the prompts by --column (or call it {COLUMNS[0]!r})"
    problem = f"no column {column!r}" if column else asked
    raise WorkloadError(f"{where}: {problem}; it has: {shortened(', '.join(columns)) or 'none'}")


def _named(data: Any, where: str, column: str) -> Any:
    """An object whose prompts are under ``column``, as one whose key tells what they are."""
    if not isinstance(data, Mapping) or column not in data:
        raise WorkloadError(f"{where}: no {column!r} (--column) in it")
    known = {key: data[key] for key in ("id", "category") if data.get(key) not in (None, "")}
    value = data[column]
    if not isinstance(value, list):
        return {**known, "prompt": value}
    return {**known, "turns" if all(isinstance(v, str) for v in value) else "messages": value}


def _parquet(path: str) -> tuple[Sequence[str], Iterable[Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise WorkloadError(
            f"{path}: reading Parquet needs pyarrow; `pip install pyarrow`, or write it as CSV or "
            "JSON lines"
        ) from None
    try:
        table = pyarrow.parquet.read_table(path)
        return table.column_names, table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        raise WorkloadError(f"{path}: not Parquet ({problem})") from None


def _data_set(path: str) -> tuple[Sequence[str], Iterable[Any]]:
    """A data set's columns and rows. Raises WorkloadError where none is, or it has several splits
    and none is named."""
    where = f"--workload {shortened(path)}"
    try:
        import datasets
    except ImportError:
        raise WorkloadError(
            f"{where}: data sets need the package datasets; `pip install datasets`, or give a file"
        ) from None
    named, _, split = path.removeprefix(DATA_SET).partition(":")
    name, _, config = named.partition(",")
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(name)
            found = found[split] if split else found
        else:
            found = datasets.load_dataset(name, config or None, split=split or None)
    except Exception as problem:  # the hub, the disk, pyarrow and the package have their own
        raise WorkloadError(
            f"{where}: cannot be loaded ({type(problem).__name__}: {problem})"
        ) from None
    if isinstance(found, Mapping):
        if len(found) != 1:
            raise WorkloadError(
                f"{where}: it has the splits {', '.join(map(str, found))}; write hf:{named}:SPLIT"
            )
        (found,) = found.values()
    return found.column_names, found
