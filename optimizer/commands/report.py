"""`report`: a tuning as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.options import FILE, LARGEST, FiniteRange, Whole
from spectune.optimizer.commands.outputs import check_writable, database_files, write_text
from spectune.optimizer.commands.printing import Command, Meter, emit
from spectune.optimizer.commands.shared import open_store
from spectune.runtime.progress import Progress

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore
    from spectune.traces.store.catalog import Study


@click.command(cls=Command)
@click.argument("study", default="latest")
@option("--out", "The page; default: spectune-report-STUDY.html beside the database.", FILE)
@option(
    "--price",
    "Price of a device for an hour, e.g. 2.50.",
    FiniteRange(0.0, float(LARGEST), min_open=True),
)
@option("--gpus", "Devices that serve this traffic.", Whole(1, 1_000_000), default=1)
@flag("--no-trees", "Leave out the figures of the tree papers.")
def report(study: str, out: str | None, no_trees: bool, **cost: Any) -> None:
    """What a tuning found, as one HTML page that needs nothing else: what to deploy and what that
    saves, predicted against measured, the race, speed by category, latency, acceptance, what was
    tried and what not.

    STUDY is the id that `tune` printed, the beginning of one, or latest.

    \b
    Example:  cli.py report
              cli.py report latest --out report.html --price 2.50 --gpus 8
    """
    check_writable(("--out", out))
    with open_store(create=False) as store, Meter() as meter:
        found = write_report(store, study, out, None if no_trees else meter, **cost)
    emit(found, f"{found['path']}: {found['sentence']}")


def write_report(
    store: TraceStore,
    study: str,
    out: str | None,
    trees: Progress | None,
    *,
    gpus: int = 1,
    price: float | None = None,
) -> dict[str, Any]:
    """Writes the page of a study, and says where and what its first sentence is; ``trees`` is told
    how far the figures of the tree papers are, None leaves them out. Raises OutputError."""
    from spectune.optimizer.report.tuning import headline, page, report_on

    found = report_on(store, study)
    name = found.study.id
    beside = database_files()[:1]  # none of one on a server
    folder = beside[0].parent if beside else Path()
    path = out or str(folder / f"spectune-report-{name}.html")
    more = [] if trees is None else _trees(store, found.study, trees)
    write_text(path, [page(found, gpus=gpus, price=price, more=more)])
    return {"path": path, "study": name, "sentence": headline(found, gpus=gpus, price=price)}


def _trees(store: TraceStore, study: Study, progress: Progress) -> list[str]:
    """The figures of the trees of the draft whose trees were fastest; none where none were
    tried."""
    from spectune.db.errors import DatabaseError
    from spectune.optimizer.report.charts import safe, section
    from spectune.optimizer.report.tree_page import figures, lead
    from spectune.optimizer.simulate.tree_sources import report_of
    from spectune.traces.errors import SpectuneError

    tried = [t["policy"] for t in study.trials]  # best first
    grown = [p["draft"] for p in tried if p.get("growth", {}).get("kind", "chain") != "chain"]
    if study.recording_id is None or not grown:
        return []
    try:
        report, _ = report_of(
            store,
            study.recording_id,
            grown[0],
            top_n=60,
            progress=lambda done, total: progress("replay trees", done, total),
        )
    except (SpectuneError, DatabaseError) as error:
        return [f"<p>{safe(f'No figures of draft trees: {error}')}</p>"]
    return [
        section(f"Draft trees of {report.draft}", *figures(report)),
        f"<p>{safe(lead(report))}</p>",
    ]
