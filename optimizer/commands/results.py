"""What a command found, and how it is shown: as tables on a terminal, as JSON, in a notebook."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from spectune.traces.text import printable

SHOWN = 50
"""Rows of a result that a notebook shows."""
MOMENTS = ("since", "until")
Row = Mapping[str, Any]
_NUMBER = re.compile(r"[-+]?\d[\d.]*(%| |$)")


@dataclass(frozen=True)
class Table:
    """Rows to print; ``columns``: all that they have where none is named. ``best`` is the place of
    the row that won."""

    rows: Sequence[Row]
    columns: Sequence[str] = ()
    title: str = ""
    best: int | None = None

    @property
    def names(self) -> list[str]:
        """The columns to print."""
        return list(self.columns or dict.fromkeys(name for row in self.rows for name in row))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """No word of a cell is cut or broken: where a line does not take a row, rows stand below
        each other, a line per column."""
        cells = [[_plain(cell(row.get(name), name)) for name in self.names] for row in self.rows]
        heads = headers(self.names)
        title = Text(_plain(self.title), style="table.title") if self.title else None
        columns = [[head, *(row[i] for row in cells)] for i, head in enumerate(heads)]
        least = [max(cell_len(w) for c in column for w in c.split() or [""]) for column in columns]
        most = [max(map(cell_len, column)) for column in columns]
        n = len(heads)
        borders = next((b for b in (3 * n + 1, 2 * n) if sum(least) + b <= options.max_width), None)
        if borders is None:
            yield from self._row_by_row(title, heads, cells)
            return
        table = RichTable(title=title, title_justify="left")
        if borders == 2 * n:
            table.box = None
        widths = _widths(least, most, options.max_width - borders)
        for column, width in zip(columns, widths, strict=True):
            numbers = all(_NUMBER.match(text or "0") for text in column[1:])
            table.add_column(column[0], justify="right" if numbers else "left", width=width)
        for i, row in enumerate(cells):
            table.add_row(*map(Text, row), style="bold green" if i == self.best else "")
        yield table

    def _row_by_row(
        self, title: Text | None, heads: list[str], cells: list[list[str]]
    ) -> RenderResult:
        if title is not None:
            yield title
        for i, row in enumerate(cells):
            grid = RichTable.grid(padding=(0, 2, 0, 0))
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(overflow="fold", style="bold green" if i == self.best else "")
            for head, content in zip(heads, row, strict=True):
                if content:
                    grid.add_row(head, Text(content))
            yield Text()
            yield grid


@dataclass(frozen=True)
class Result:
    """What a call found. ``data`` is what the command prints with ``--json``, also by
    ``result[key]``; ``rows`` are its table; ``text`` says it in a sentence or a few."""

    text: str
    data: Mapping[str, Any]
    rows: Sequence[Row] = ()
    tables: Sequence[Table] = ()
    failed: Exception | None = None
    """What is to be refused once the result is printed."""
    exit_code: int = 0

    @classmethod
    def document(cls, data: Mapping[str, Any]) -> Result:
        """A result that is its data, indented."""
        return cls(json.dumps(data, indent=2, ensure_ascii=False), data)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __repr__(self) -> str:
        return self.text

    @property
    def policy(self) -> Mapping[str, Any]:
        """The policy's document: the winner's of a tuning. Raises KeyError where no policy was
        concerned."""
        document: Mapping[str, Any] = self.data.get("winner", self.data)["policy"]
        return document

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame. Raises ImportError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ImportError(
                "to_pandas() needs pandas: pip install pandas (`rows` has the same as dictionaries)"
            ) from None
        return pandas.DataFrame(list(self.rows))

    def print(self, console: Console, *, as_json: bool) -> None:
        """One JSON object on a line, or tables and the text."""
        if as_json:
            console.file.write(json.dumps(self.data, ensure_ascii=False) + "\n")
            return
        for table in self.tables:
            console.print(table)
        if self.text:
            console.print(Text(printable(self.text)), soft_wrap=not console.is_terminal)

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        head = "".join(f"<th>{escape(name)}</th>" for name in headers(names))
        body = "".join(
            f"<tr>{''.join(_html(row.get(name)) for name in names)}</tr>"
            for row in self.rows[:SHOWN]
        )
        more = f"<p>{len(self.rows) - SHOWN} more rows</p>" if len(self.rows) > SHOWN else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<p>{escape(self.text)}</p>{table if self.rows else ''}{more}"


def listed(key: str, rows: Sequence[Row], table: Table | None = None, **data: Any) -> Result:
    """A result that is its rows, under ``key`` in JSON, beside more ``data``."""
    tables = [table or Table(rows, title=key)] if rows else []
    return Result("" if rows else f"no {key} stored", {**data, key: rows}, rows, tables)


def _html(value: Any) -> str:
    side = "right" if isinstance(value, (int, float)) and not isinstance(value, bool) else "left"
    text = cell(value)
    text = text if len(text) <= 120 else text[:117] + "..."
    return f'<td style="text-align:{side}">{escape(text)}</td>'


def _widths(least: list[int], most: list[int], room: int) -> list[int]:
    """Widths from ``least`` to ``most``: what room is left goes to the narrowest of those that need
    more."""
    widths = list(least)
    for _ in range(room - sum(least)):
        short = [i for i, width in enumerate(widths) if width < most[i]]
        if not short:
            break
        widths[min(short, key=lambda i: widths[i])] += 1
    return widths


def _plain(text: str) -> str:
    """On one line, without what would act on a terminal."""
    return printable(text).replace("\n", "\\n")


def headers(columns: Sequence[str]) -> list[str]:
    """The columns' names for people: `policy id` stays where there is a `policy` too."""
    return [
        column.removeprefix("n_")
        .removesuffix("_at")
        .removesuffix("" if column.removesuffix("_id") in columns else "_id")
        .replace("_", " ")
        for column in columns
    ]


def cell(value: Any, column: str = "", now: datetime | None = None) -> str:
    """A value for people; a moment (ISO 8601, in a column that ends in ``_at`` or is one of
    :data:`MOMENTS`) as :func:`when` has it."""
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    if (column.endswith("_at") or column in MOMENTS) and isinstance(value, str):
        return when(datetime.fromisoformat(value), now)
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(v)}".rstrip() for name, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value))
    return str(value)


def when(moment: datetime, now: datetime | None = None) -> str:
    """``3 min ago`` for the last day, else ``2026-11-22 14:03`` (UTC)."""
    moment = moment.astimezone(UTC)
    since = (now or datetime.now(UTC)) - moment
    if since < timedelta(0) or since >= timedelta(days=1):
        return f"{moment:%Y-%m-%d %H:%M}"
    minutes = int(since.total_seconds()) // 60
    if minutes >= 60:
        return f"{minutes // 60} h ago"
    return f"{minutes} min ago" if minutes else "just now"
