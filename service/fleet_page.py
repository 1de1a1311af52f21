"""The page of a fleet: what is in force where, what was published and why, rollouts block by block,
alarms and jobs. It needs nothing from elsewhere, and no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from spectune.optimizer.commands import schedules, status
from spectune.optimizer.commands.results import Table, cell, headers
from spectune.optimizer.report import charts
from spectune.optimizer.report.page import Panel, rendered
from spectune.optimizer.report.words import PolicyTable, counted
from spectune.optimizer.tuning.tuned import proof_in_words, proof_of
from spectune.service.board import WINDOW, Figures

REFRESH_S: Final = 30
CHARTS: Final = 3
"""Rollouts that are drawn."""
SERVERS = ("server", "deployment", "model", "heard_at", "looked_at", "requests")
PUBLISHED = ("version", "created_at", "until", "deployment", "device", "label", "gained", "actor")
ALARMS = ("at", "deployment", "what", "category", "before", "after", "outcome", "gain", "schedule")
MOMENTS = {"at": "since"}
"""Columns of moments that go by another name."""
Row = Mapping[str, Any]


def fleet_page(figures: Figures, database: str) -> str:
    """The HTML of the page."""
    rows = figures.deployments
    is_open = [rollout for rollout in figures.rollouts if rollout["verdict"] is None]
    faults = [f"{s['server']}: its agent says: {s['fault']}" for s in figures.servers if s["fault"]]
    title = f"{counted(len(rows), 'deployments')}, {counted(len(figures.servers), 'servers')}"
    return rendered(
        title=title if not is_open else f"{title}, {counted(len(is_open), 'rollouts')} open",
        lead=[*faults, *(rollout["text"] for rollout in is_open)],
        facts=[
            ("database", database),
            ("as of", f"{figures.at:%Y-%m-%d %H:%M:%S} UTC"),
            ("served", f"in the last {WINDOW.total_seconds() / 60:.0f} minutes"),
        ],
        sections=[(heading, panels) for heading, panels in _sections(figures) if panels],
        refresh_s=REFRESH_S,
    )


def _sections(figures: Figures) -> Iterator[tuple[str, list[Panel]]]:
    yield "Fleet", list(_fleet(figures))
    published = [
        {
            **row,
            "servers": row["told"],
            "gained": proof_in_words(proof) if (proof := proof_of(row["evidence"])) else "",
        }
        for row in figures.publications
    ]
    columns = (*PUBLISHED, "reason", "servers")
    yield "Publications", _table("publications", published, columns, "The newest first")
    yield "Rollouts", list(_rollouts(figures.rollouts))
    yield "Drift", _table("alarms", figures.alarms, (*ALARMS, "why"), "The newest alarms first")
    shown = schedules.table_of(figures.schedules)
    yield "Jobs", _table("jobs", shown.rows, shown.columns, "Schedules")


def _fleet(figures: Figures) -> Iterator[Panel]:
    shown = status.table_of(figures.deployments)
    yield from _table("deployments", shown.rows, shown.columns, "What is in force")
    columns = (*SERVERS, *(n for n in ("skipped", "dropped") if any(s[n] for s in figures.servers)))
    yield from _table("servers", figures.servers, columns, "Servers that are followed")
    accepted = {
        f"{row['deployment']}: {row['label']}": row["acceptance_by_position"]
        for row in figures.deployments
        if row["acceptance_by_position"]
    }
    if accepted:
        caption = "Share of the drafts as long that are accepted up to a position."
        drawn = charts.positions(accepted)
        yield Panel("positions", "Acceptance of what was served", caption, drawn)


def _table(name: str, rows: Sequence[Row], columns: Sequence[str], title: str) -> list[Panel]:
    if not rows:
        return []
    names = Table(rows, columns).names
    cells = [[cell(row.get(c), MOMENTS.get(c, c)) for c in names] for row in rows]
    table = PolicyTable(headers(names), cells, words=len(names))
    return [Panel(name, title, table=table, wide=True)]


def _rollouts(rollouts: Sequence[Row]) -> Iterator[Panel]:
    """Those that are drawn block by block, and all in words."""
    drawn = [rollout for rollout in rollouts if rollout["standing"].get("newest")]
    for rollout in drawn[:CHARTS]:
        standing = rollout["standing"]
        ratios = [pair["ratio"] for pair in standing["newest"]]
        name = f"rollout-{rollout['id']}"
        svg = charts.pairs(name, ratios, standing["pairs"], standing.get("looks", ()))
        by = f"Conducted by {rollout['worker'] or 'nobody'}."
        yield Panel(name, rollout["text"], by if rollout["verdict"] is None else "", svg)
    if rollouts:
        yield Panel("rollouts", "The newest first", items=[one["text"] for one in rollouts])
