"""Tables and figures in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def table_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Lines of a table of figures by column, empty where one is missing."""
    return table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])


def _cell(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else value


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}%"


def ratio(interval: Sequence[float | None]) -> str:
    """A ratio with its interval; one that is too wide says nothing."""
    value, low, high = interval
    if low is None or high is None or high > 4 * low:
        return "too few executions"
    return f"{value:.3f} ({low:.3f} to {high:.3f})"
