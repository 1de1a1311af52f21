"""Files of arrivals: when requests came, as public traces have it (Azure's, BurstGPT's,
Mooncake's)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from spectune.traces.cost_table import FloatArray
from spectune.traces.errors import TraceError
from spectune.traces.files import parse_json, read_text
from spectune.traces.text import shortened

NAMES: Final = ("timestamp", "arrival_timestamp", "arrival_time", "arrived_at", "time")
"""Columns of moments, in any case; the first that there is."""
MOONCAKE: Final = {"hash_ids", "input_length", "text_input"}
"""Keys beside which a `timestamp` is in milliseconds, as Mooncake and AIPerf write it; other
numbers are seconds."""


def read_arrivals(path: str, tell: Callable[[str], None], missing: str) -> FloatArray:
    """The moments of a CSV or of JSON lines, seconds; ``tell`` is told what was read, and in which
    unit. Raises TraceError for a file that has none, ``missing`` where there is no such file."""
    where = f"--arrivals {path}"
    text = read_text(path, where, TraceError, missing=missing)
    rows = list(_objects(text, where) if text.lstrip().startswith("{") else _table(text, where))
    if not rows:
        raise TraceError(f"{where}: holds no request")
    columns = {str(column).lower(): column for column in rows[0][1]}
    column = next((columns[name] for name in NAMES if name in columns), None)
    if column is None:
        has = shortened(", ".join(columns)) or "nothing"
        raise TraceError(f"{where}: needs a column TIMESTAMP of dates or numbers; it has: {has}")
    moments = np.array([_moment(row.get(column), at, column) for at, row in rows])
    kinds = {isinstance(moment, datetime) for moment in moments}
    if len(kinds) > 1:
        raise TraceError(f"{where}: {column!r} has dates and numbers; write all in one way")
    kind = "numbers in s"
    if kinds == {True}:
        kind, moments = "dates", np.array([moment.timestamp() for moment in moments])
    elif MOONCAKE & rows[0][1].keys():
        kind, moments = "numbers in ms", moments / 1e3
    tell(f"{path}: {len(rows)} arrivals in {np.ptp(moments):.6g} s, of {column!r}, {kind}")
    return moments


def _table(text: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            yield f"{where}:{reader.line_num}", {k: v for k, v in row.items() if k is not None}
    except csv.Error as problem:
        raise TraceError(f"{where}: not CSV ({problem})") from None


def _objects(text: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for n, line in enumerate(text.splitlines(), 1):
        if line.strip():
            row = parse_json(line, f"{where}:{n}", TraceError)
            if not isinstance(row, dict):
                raise TraceError(f"{where}:{n}: expected an object, not {type(row).__name__}")
            yield f"{where}:{n}", row


def _moment(value: Any, where: str, column: str) -> float | datetime:
    """A number or a date; one without a time zone is read as UTC."""
    try:
        if isinstance(value, (str, int, float)) and math.isfinite(float(value)):
            return float(value)
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        shown = shortened(repr(value), 40)
        raise TraceError(
            f"{where}: {shown} is no date and no number; it needs a column TIMESTAMP of dates or "
            f"numbers ({column!r} was read)"
        ) from None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
