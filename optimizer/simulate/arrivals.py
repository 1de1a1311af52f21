"""Files of arrivals: when requests came, as public traces have it (Azure's, BurstGPT's,
Mooncake's)."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from spectune.traces.cost_table import FloatArray
from spectune.traces.errors import TraceError
from spectune.traces.files import parse_json, read_text
from spectune.traces.text import shortened

NAMES: Final = (
    *("timestamp", "arrival_timestamp", "arrival_time", "arrived_at", "arrived", "arrival", "time"),
)
"""Columns of moments, in any case; the first that there is."""
UNITS: Final = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""What a column's name may end in, and how many of it are a second."""
SINCE_1970: Final = {"ns": 1e17, "us": 1e14, "ms": 1e11}
"""From where on numbers are taken for times since 1970: 1e11 s would be the year 5138."""
MOONCAKE: Final = {"hash_ids", "input_length", "text_input"}
"""Keys beside which a `timestamp` is in milliseconds, as Mooncake and AIPerf write it."""


def read_arrivals(path: str, tell: Callable[[str], None], missing: str) -> FloatArray:
    """The moments of a CSV or of JSON lines, seconds; ``tell`` is told what was read, and in which
    unit. Raises TraceError for a file that has none, ``missing`` where there is no such file."""
    where = f"--arrivals {path}"
    text = read_text(path, where, TraceError, missing=missing)
    is_json = text.lstrip().startswith(("{", "["))
    rows = list(_objects(text, path) if is_json else _table(text, where))
    if not rows:
        raise TraceError(f"{where}: holds no request")
    column, unit = _column(rows[0][1])
    if column is None:
        has = shortened(", ".join(map(str, rows[0][1]))) or "nothing"
        raise TraceError(f"{where}: needs a column TIMESTAMP of dates or numbers; it has: {has}")
    moments = np.array([_moment(row.get(column), at, column) for at, row in rows])
    is_date = isinstance(rows[0][1][column], str) and not _number(rows[0][1][column])
    if any(is_date == _number(row[column]) for _, row in rows):
        raise TraceError(f"{where}: {column!r} has dates and numbers; write all in one way")
    if not (is_date or unit):
        least = moments.min()
        unit = next((name for name, most in SINCE_1970.items() if least >= most), "")
        unit = unit or ("ms" if is_json and MOONCAKE & rows[0][1].keys() else "s")
    moments = moments / UNITS[unit or "s"]
    kind = "dates" if is_date else f"numbers in {unit} (a name in _s, _ms, _us or _ns says another)"
    tell(f"{path}: {len(rows)} arrivals in {np.ptp(moments):.6g} s, of {column!r}, {kind}")
    return moments


def _table(text: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            yield f"{where}:{reader.line_num}", {k: v for k, v in row.items() if k is not None}
    except csv.Error as problem:
        raise TraceError(f"{where}: not CSV ({problem})") from None


def _objects(text: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    where = f"--arrivals {path}"
    if text.lstrip().startswith("["):
        items = parse_json(text, where, TraceError)
        rows = [(f"{where}: item {n}", item) for n, item in enumerate(items, 1)]
    else:
        lines = ((f"{where}:{n}", line) for n, line in enumerate(text.split("\n"), 1))
        rows = [(at, parse_json(line, at, TraceError)) for at, line in lines if line.strip()]
    for at, row in rows:
        if not isinstance(row, dict):
            raise TraceError(f"{at}: expected an object, not {type(row).__name__}")
        yield at, row


def _column(row: dict[str, Any]) -> tuple[str | None, str]:
    """(the column that holds moments, the unit that its name ends in or nothing)."""
    columns: dict[str, tuple[str, str]] = {}
    for column in row:
        plain = re.sub(r"[^a-z0-9]+", "_", str(column).lower()).strip("_")
        name, _, unit = plain.rpartition("_")
        name, unit = (name, unit) if unit in UNITS else (plain, "")
        columns.setdefault(name, (column, unit))
    return next((columns[name] for name in NAMES if name in columns), (None, ""))


def _number(value: Any) -> bool:
    try:
        return math.isfinite(float(value)) and not isinstance(value, bool)
    except (TypeError, ValueError, OverflowError):
        return False


def _moment(value: Any, where: str, column: str) -> float:
    """A number as it stands, or a date as seconds; one without a time zone is read as UTC."""
    if _number(value):
        return float(value)
    try:
        date = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        shown = shortened(repr(value), 40)
        raise TraceError(
            f"{where}: {shown} is no date and no number; it needs a column TIMESTAMP of dates or "
            f"numbers ({column!r} was read)"
        ) from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
