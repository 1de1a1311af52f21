"""`report`: a tuning as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.config import option
from spectune.optimizer.commands.options import FILE, LARGEST, FiniteRange, Whole
from spectune.optimizer.commands.outputs import check_writable, database_files, write_text
from spectune.optimizer.commands.printing import Command, emit
from spectune.optimizer.commands.shared import open_store

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore


@click.command(cls=Command)
@click.argument("study", default="latest")
@option("--out", "The page; default: spectune-report-STUDY.html beside the database.", FILE)
@option(
    "--price",
    "Price of a device for an hour, e.g. 2.50.",
    FiniteRange(0.0, float(LARGEST), min_open=True),
)
@option("--gpus", "Devices that serve this traffic.", Whole(1, 1_000_000), default=1)
def report(study: str, out: str | None, **cost: Any) -> None:
    """What a tuning found, as one HTML page that needs nothing else: what to deploy and what that
    saves, predicted against measured, the race, speed by category, latency, acceptance, what was
    tried and what not.

    STUDY is the id that `tune` printed, the beginning of one, or latest.

    \b
    Example:  cli.py report
              cli.py report latest --out report.html --price 2.50 --gpus 8
    """
    check_writable(("--out", out))
    with open_store(create=False) as store:
        written = write_report(store, study, out, **cost)
    emit(written, f"{written['path']}: {written['sentence']}")


def write_report(
    store: TraceStore, study: str, out: str | None, *, gpus: int = 1, price: float | None = None
) -> dict[str, Any]:
    """Writes the page of a study: ``path``, ``study`` and ``sentence``, its headline. Raises
    NotFoundError or OutputError."""
    from spectune.optimizer.report.tuning import page, report_on
    from spectune.optimizer.report.words import headline

    report = report_on(store, study)
    name = report.study.id
    beside = database_files()[:1]  # none of one on a server
    folder = beside[0].parent if beside else Path()
    path = out or str(folder / f"spectune-report-{name}.html")
    write_text(path, [page(report, gpus=gpus, price=price)])
    return {"path": path, "study": name, "sentence": headline(report.evidence["tuned"])}
