"""`report`: a tuning as a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from spectune.db.database_errors import DatabaseError
from spectune.optimizer.commands.common import (
    Talk,
    check_writable,
    database_files,
    open_store,
    write_text,
)
from spectune.optimizer.commands.results import Result
from spectune.optimizer.report.tuning_page import page, report_on
from spectune.optimizer.report.words import headline
from spectune.settings import Report
from spectune.traces.errors import OutputError
from spectune.traces.store import TraceStore


def report(s: Report, talk: Talk) -> Result:
    check_writable(s, out=s.out)
    with open_store(s) as store:
        data = write_report(store, s.db, s.study, s.out, gpus=s.gpus, price=s.price)
    return Result(f"{data['path']}: {data['sentence']}", data)


def write_report(
    store: TraceStore,
    db: str,
    study: str,
    out: str | None,
    *,
    gpus: int = 1,
    price: float | None = None,
) -> dict[str, Any]:
    """Writes the page of a study, by default beside the database, and says where and what its first
    sentence is. Raises OutputError."""
    report = report_on(store, study)
    name = report.study.id
    beside = database_files(db)[:1]  # none of one on a server
    folder = beside[0].parent if beside else Path()
    path = out or str(folder / f"spectune-report-{name}.html")
    named = ""  # its command is typed where the page lies, or wherever it was copied to
    if db != Report.model_fields["db"].default:
        named = str(beside[0].resolve()) if beside else store.database.name
    write_text(path, [page(report, gpus=gpus, price=price, db=named)])
    return {"path": path, "study": name, "sentence": headline(report.evidence.tuned)}


def page_of(
    store: TraceStore, study: str, db: str, path: str | None, tell: Callable[[str], None]
) -> tuple[str | None, Exception | None]:
    """Writes the report: (where, None); (None, None) where none is to be, or a page that nobody
    asked for cannot be made, which costs a line; (None, why) for one that was asked for."""
    if path == "none":
        return None, None
    try:
        return str(write_report(store, db, study, path)["path"]), None
    except (OutputError, DatabaseError) as error:
        if path is not None:
            return None, error
        tell(f"{error}; `report {study} --out report.html` writes the report elsewhere")
        return None, None
