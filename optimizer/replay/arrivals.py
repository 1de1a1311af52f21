"""Files of arrivals: when requests came, as public traces have it (Azure's, BurstGPT's, Alibaba's,
Mooncake's)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, Literal

import numpy as np

from spectune.traces.cost_table import FloatArray
from spectune.traces.errors import TraceError
from spectune.traces.files import json_lines, read_text
from spectune.traces.text import shortened

Unit = Literal["s", "ms"]
NAMES: Final = ("timestamp", "arrival_timestamp", "arrival_time", "arrived_at", "time")
"""Columns of moments, in any case; the first that there is."""
FORMATS: Final[tuple[tuple[set[str], Unit], ...]] = (
    ({"chat_id"}, "s"),  # Alibaba's Bailian, beside Mooncake's keys
    ({"request tokens", "response tokens"}, "s"),  # BurstGPT
    ({"num_prefill_tokens", "num_decode_tokens"}, "s"),  # Vidur
    ({"prompt_size", "token_size"}, "s"),  # Splitwise
    ({"hash_ids", "input_length", "text_input"}, "ms"),  # Mooncake and AIPerf
)
"""Columns, in small letters, one of which tells the unit of a public trace's numbers; the first
that a file has."""
DENSE: Final = 1_000
"""Requests per second from which on a wrong unit is likelier."""
SAY_UNIT: Final = "say --set load.unit=s or =ms"


def read_arrivals(
    path: str,
    tell: Callable[[str], None],
    missing: str,
    unit: Unit | None = None,
    *,
    scaled: bool = False,
) -> FloatArray:
    """The moments of a CSV or of JSON lines, seconds; ``tell`` is told what was read, and in which
    unit. Numbers are in ``unit``, by default as the file's format has it. ``scaled``: they are
    brought to a rate, so that the unit does not matter. Raises TraceError for a file that has none
    or whose unit is not known, ``missing`` where there is no such file."""
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
    if kinds == {True}:
        kind, moments = "dates", np.array([moment.timestamp() for moment in moments])
        kind += ", on which load.unit has no effect" if unit else ""
    elif scaled:
        kind = "numbers" + (", on which load.unit has no effect" if unit else "")
    else:
        unit = unit or _unit(set(columns), moments, f"{where}: {column!r}")
        kind, moments = f"numbers in {unit}", moments / {"s": 1, "ms": 1e3}[unit]
    span = np.ptp(moments)
    lasts = "" if scaled else f" in {span:.6g} s"
    tell(f"{path}: {len(rows)} arrivals{lasts}, of {column!r}, {kind}")
    if not scaled and len(rows) - 1 > DENSE * span:
        tell(
            f"warning: {path}: {len(rows)} arrivals in {span:.6g} s are more than {DENSE:,} a "
            f"second; where its numbers have another unit, {SAY_UNIT}; FILE@RATE brings them to a "
            "rate"
        )
    return moments


def _unit(columns: set[str], moments: FloatArray, where: str) -> Unit:
    """The unit of a file's numbers, by its columns. Raises TraceError where they do not tell it, or
    the numbers contradict it."""
    unit = next((unit for keys, unit in FORMATS if keys & columns), None)
    if unit is None:
        raise TraceError(f"{where} holds numbers, and not in which unit: {SAY_UNIT}")
    if unit == "ms" and (moments % 1).any():
        raise TraceError(
            f"{where} holds fractions, where Mooncake's traces, whose columns these are, have "
            f"whole milliseconds: {SAY_UNIT}"
        )
    return unit


def _table(text: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            yield f"{where}:{reader.line_num}", {k: v for k, v in row.items() if k is not None}
    except csv.Error as problem:
        raise TraceError(f"{where}: not CSV ({problem})") from None


def _objects(text: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for _, place, row in json_lines(text, where, TraceError):
        if isinstance(row, TraceError):
            raise row
        if not isinstance(row, dict):
            raise TraceError(f"{place}: expected an object, not {type(row).__name__}")
        yield place, row


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
