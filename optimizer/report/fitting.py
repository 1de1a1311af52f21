"""Tables that fit the terminal without cutting anything, and values as people write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text


class FittingTable(Table):
    """No word of a cell is cut or broken: other cells wrap instead, then the lines between columns
    go, and at last the rows stand below each other, a line per column."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [[Text.from_markup(str(c.header)), *map(_text, c.cells)] for c in self.columns]
        least = [_widest(column, str.split, 1) for column in cells]
        most = [_widest(column, str.splitlines, 0) for column in cells]
        n = len(cells)
        for box, beside in ((self.box, 3 * n + 1), (None, 2 * n)):
            room = options.max_width - beside
            if sum(least) <= room:
                self.box = box
                for column, width in zip(self.columns, _widths(least, most, room), strict=True):
                    column.width = width
                yield from super().__rich_console__(console, options)
                return
        yield from self._row_by_row(cells)

    def _row_by_row(self, cells: list[list[Text]]) -> RenderResult:
        if self.title is not None:
            yield self.title
        for i in range(1, self.row_count + 1):
            row = Table.grid(padding=(0, 2, 0, 0))
            row.add_column(style="dim", no_wrap=True)
            row.add_column(overflow="fold")
            for column in cells:
                if column[i].plain:
                    row.add_row(column[0], column[i])
            yield Text()
            yield row


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _widest(column: list[Text], parts: Callable[[str], list[str]], least: int) -> int:
    return max((cell_len(part) for t in column for part in parts(t.plain)), default=least)


def _widths(least: list[int], most: list[int], room: int) -> list[int]:
    """Widths from ``least`` to ``most``: what room is left goes to the narrowest of those that want
    more."""
    widths = list(least)
    for _ in range(max(0, room - sum(least))):
        wanting = [i for i, width in enumerate(widths) if width < most[i]]
        if not wanting:
            break
        widths[min(wanting, key=lambda i: widths[i])] += 1
    return widths


def header(column: str) -> str:
    """A column's name for people."""
    return column.removeprefix("n_").removesuffix("_at").removesuffix("_id").replace("_", " ")


def cell(value: Any, column: str = "", now: datetime | None = None) -> str:
    """A value for people: a moment (ISO 8601, where the column ends in ``_at``) as :func:`when` has
    it."""
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    if column.endswith("_at") and isinstance(value, str):
        return when(datetime.fromisoformat(value), now)
    if isinstance(value, float):
        return f"{value:.4g}"
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
