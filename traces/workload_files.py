"""Where workloads come from: JSON lines, JSON, CSV, Parquet, data sets of Hugging Face."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from spectune.traces.errors import WorkloadError
from spectune.traces.files import SIZE_LIMIT, check_storable, parse_json, read_text
from spectune.traces.schema import Workload
from spectune.traces.text import printable, shortened
from spectune.traces.workloads import FORMATS, PROMPTS, BadRows, Line, Turns, make_workload

COLUMNS = ("prompt", "turns", "messages", "conversations")
"""Columns that hold prompts where none is named; the first that there is."""
DATA_SET = "hf:"
"""Begins the name of a data set: ``hf:NAME``, ``hf:NAME:SPLIT``, ``hf:NAME,CONFIG:SPLIT``; NAME may
be a folder."""


def read_workload(
    paths: Sequence[str],
    *,
    turns: Turns | None = None,
    column: str | None = None,
    bad_rows: BadRows = "few",
) -> Workload:
    """Reads files and data sets, in order, as one workload. A request without an id is called by
    its file and line.

    ``column`` names the column, or key, that holds the prompts; of several files those that have
    none of that name are read as they are, which a note of the workload says. ``bad_rows`` is
    :func:`make_workload`'s. Raises WorkloadError naming file and line.
    """
    notes: list[str] = []
    read = [_read(path) for path in paths]
    own = [file.has(column) for file in read]
    if column and len(paths) > 1 and not any(own):
        raise WorkloadError(f"--column {column}: none of the files has it; it names their prompts")

    def lines() -> Iterator[Line]:
        names = [Path(path).name for path in paths]
        for path, name, file, has in zip(paths, names, read, own, strict=True):
            called = name if names.count(name) == 1 else path
            asked = column if has or len(paths) == 1 else None
            if column and asked is None:
                notes.append(
                    f"{shortened(path)}: no {column!r} in it, so it is read without --column"
                )
            for number, where, data in file.objects(asked):
                yield Line(where, data, shortened(printable(f"{called}:{number}")), path)

    joined = shortened(printable("+".join(Path(p).stem for p in paths)))
    made = make_workload(joined, lines(), turns=turns, bad_rows=bad_rows)
    return replace(made, notes=(*notes, *made.notes))


@dataclass(frozen=True)
class _File:
    """What a file or data set holds: (number, where, object or why there is none) of its rows;
    ``columns`` where it is a table, whose head stands at ``where``."""

    rows: Iterable[tuple[int, str, Any]]
    where: str
    columns: Sequence[str] | None = None

    def has(self, column: str | None) -> bool:
        """Whether a column, or a row's key, has this name."""
        if column is None or self.columns is not None:
            return column in (self.columns or ())
        return any(isinstance(data, Mapping) and column in data for _, _, data in self.rows)

    def objects(self, column: str | None) -> Iterator[tuple[int, str, Any]]:
        """The rows, their prompts under a key that tells what they are. Raises WorkloadError where
        a table has no column of prompts."""
        if self.columns is not None:
            column = _column(self.columns, self.where, column)
        for number, where, data in self.rows:
            if column is None or isinstance(data, WorkloadError):
                yield number, where, data
            else:
                yield number, where, _named(data, where, column)


def _read(path: str) -> _File:
    """A file or data set. Raises WorkloadError."""
    if path.startswith(DATA_SET):
        return _typed(_data_set(path), f"--workload {shortened(path)}")
    magic = b""
    if os.path.isfile(path):
        with suppress(OSError), open(path, "rb") as file:
            magic = file.read(4)
    if magic == b"PAR1":
        return _typed(_parquet(path), path)
    missing = "no such file (write 'demo', the path of a file, or hf:NAME of a data set)"
    text = read_text(path, f"--workload {path}", WorkloadError, missing=missing)
    if Path(path).suffix.lower() in (".csv", ".tsv"):
        return _table(text, path)
    rows = _items(text, path) if text.lstrip().startswith("[") else _lines(text, path)
    return _File(list(rows), path)


def _lines(text: str, path: str) -> Iterator[tuple[int, str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}"
        if line.strip() and not line.lstrip().startswith(tuple('{["-0123456789tfn')):
            why = f"not JSON ({FORMATS}; a table's name ends in .csv, .tsv or .parquet)"
            yield number, where, WorkloadError(f"{where}: {why}")
        elif line.strip():
            yield number, where, _tried(partial(parse_json, line, where, WorkloadError))


def _items(text: str, path: str) -> Iterator[tuple[int, str, Any]]:
    """The items of one JSON list, as ShareGPT's files are."""
    items = parse_json(text, f"{path}:1", WorkloadError, storable=False)
    for number, item in enumerate(items, 1):
        where = f"{path}: item {number}"
        yield number, where, _tried(partial(check_storable, item, where, WorkloadError)) or item


def _tried(read: Callable[[], Any]) -> Any:
    """What is read, or the WorkloadError that says why it cannot be."""
    try:
        return read()
    except WorkloadError as problem:
        return problem


def _table(text: str, path: str) -> _File:
    csv.field_size_limit(SIZE_LIMIT)
    delimiter = "\t" if Path(path).suffix.lower() == ".tsv" else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[tuple[int, str, Any]] = []
    try:
        header = next(reader, [])
        for row in filter(None, reader):
            where, size = f"{path}:{reader.line_num}", len(header)
            wrong = WorkloadError(f"{where}: {len(row)} fields, the first line has {size}")
            fits = len(row) == size
            data = dict(zip(header, row, strict=True)) if fits else wrong
            rows.append((reader.line_num, where, data))
    except csv.Error as problem:
        raise WorkloadError(f"{path}:{reader.line_num}: not CSV ({problem})") from None
    return _File(rows, f"{path}:1", header)


def _typed(found: tuple[Sequence[str], Iterable[Any]], where: str) -> _File:
    """A table which may hold conversations."""
    columns, rows = found
    numbered = ((n, f"{where}: row {n}", row) for n, row in enumerate(rows, 1))
    return _File(numbered, where, columns)


def _column(columns: Sequence[str], where: str, column: str | None) -> str:
    """The column that holds the prompts."""
    for name in (column,) if column else COLUMNS:
        if name in columns:
            return name
    asked = f"name the column that holds the prompts by --column (or call it {COLUMNS[0]!r})"
    problem = f"no column {column!r}" if column else asked
    raise WorkloadError(f"{where}: {problem}; it has: {shortened(', '.join(columns)) or 'none'}")


def _named(data: Any, where: str, column: str) -> Any:
    """An object whose prompts are under ``column``, as one whose key tells what they are; the
    WorkloadError that says so where it has none."""
    if not isinstance(data, Mapping) or column not in data:
        return WorkloadError(f"{where}: no {column!r} (--column) in it")
    value = data[column]
    known = {k: v for k, v in data.items() if k not in (*PROMPTS, column) and v not in (None, "")}
    if not isinstance(value, list) or not value or isinstance(value[0], int):
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
