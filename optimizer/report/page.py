"""The template of pages: a head, and sections of panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from spectune.optimizer.report.words import PolicyTable
from spectune.traces.text import one_line


@dataclass(frozen=True)
class Panel:
    """A chart, a table or a list of the page."""

    name: str
    title: str
    caption: str = ""
    svg: str = ""
    table: PolicyTable | None = None
    items: Sequence[str] = ()
    wide: bool = False


def rendered(
    *,
    title: str,
    lead: Sequence[str],
    facts: Sequence[tuple[str, Any]],
    sections: Sequence[tuple[str, Sequence[Panel]]],
    command: str = "",
    purpose: str = "",
    refresh_s: int = 0,
) -> str:
    """The HTML of a page, which a browser asks for again every ``refresh_s`` seconds (0: never).
    All that is no chart is escaped."""
    html = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=_shown
    )
    return html.get_template("page.html").render(
        title=title,
        command=command,
        purpose=purpose,
        lead=lead,
        facts=facts,
        sections=sections,
        refresh_s=refresh_s,
    )


def _shown(value: Any) -> Any:
    """A value as the page shows it, on one line without control characters."""
    if isinstance(value, Markup) or callable(value):
        return value
    if isinstance(value, float):
        return f"{value:.3f}"
    return "–" if value is None else one_line(str(value))
