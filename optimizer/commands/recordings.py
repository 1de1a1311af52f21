"""`traces`: what is recorded, looked at, counted, moved and removed."""

from __future__ import annotations

import sys
from datetime import UTC
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.database import moment_before
from spectune.optimizer.commands.options import FILE, FiniteRange, Whole, together
from spectune.optimizer.commands.outputs import check_writable
from spectune.optimizer.commands.printing import Group, as_json, emit, table
from spectune.optimizer.commands.shared import open_store

if TYPE_CHECKING:
    from spectune.traces.store.query import TraceFilter


@click.group(cls=Group)
def traces() -> None:
    """Recordings: list, show, stats, query, export, import, prune."""


SHARE = FiniteRange(0, 1)
filter_options = together(
    option("--recording recordings", "Id, beginning of one, or latest; repeatable.", multiple=True),
    option("--pair-id pair", "Pair id."),
    option("--category categories", "Repeatable.", multiple=True),
    option("--since", "Recorded at or after (UTC).", click.DateTime()),
    option("--until", "Recorded before (UTC).", click.DateTime()),
    option("--draft", "Draft whose acceptance is meant."),
    option("--min-acceptance", type=SHARE),
    option("--max-acceptance", type=SHARE),
)


def _filter(kw: dict[str, Any]) -> TraceFilter:
    from spectune.traces.store.query import TraceFilter

    moments = {k: kw[k] and kw[k].replace(tzinfo=UTC) for k in ("since", "until")}
    return TraceFilter(**{**kw, **moments})


@traces.command("list")
@filter_options
def traces_list(**kw: Any) -> None:
    """Recordings that hold a matching request, newest first.

    \b
    Example:  cli.py traces list --category code
    """
    from spectune.traces.store.query import list_recordings

    with open_store(create=False) as store:
        found = list_recordings(store.database, _filter(kw))
    rows = [info.to_json() for info in found]
    told = [{**row, "drafts": info.shown()} for row, info in zip(rows, found, strict=True)]
    size = ("n_requests", "n_output_tokens", "max_new_tokens", "drafts", "created_at")
    columns = ("id", "pair_id", "source", "state", *size)
    emit({"recordings": rows}, table(told, columns, "recordings"))


@traces.command("show")
@click.argument("recording", default="latest")
@option("--request request_id", "One request: its text's rounds.")
def traces_show(recording: str, request_id: str | None) -> None:
    """One recording: what was asked, and its requests; or the rounds of one request.

    \b
    Example:  cli.py traces show latest --request code-003
    """
    from spectune.traces.errors import TraceError
    from spectune.traces.store.query import RequestRow, TraceFilter, request_rows

    with open_store(create=False) as store:
        info = store.get_recording(recording)
        if request_id is not None:
            every = store.iterate(info.id, drafts=(), steps=True)
            found = next((r for r in every if r.trajectory.request_id == request_id), None)
            if found is None:
                raise TraceError(
                    f"recording {info.id} has no request {request_id!r} (see `traces query "
                    f"--recording {info.id}`)"
                )
            steps = [s._asdict() for s in found.steps]
            counts = ("start", "drafted", "verified", "accepted", "emitted", "draft_steps", "lag")
            ids = found.trajectory.output_ids.tolist()
            data = {"request": request_id, "output_ids": ids, "steps": steps}
            emit(
                data,
                table(steps, (*counts, "draft_s", "verify_s", "round_s"), f"{request_id}: rounds"),
            )
            return
        rows = [
            r.to_json() for r in request_rows(store.database, TraceFilter(recordings=(info.id,)))
        ]
    columns = tuple(c for c in RequestRow.columns() if c not in ("recording", "recorded_at"))
    title = f"recording {info.id}: {info.state}; panoramas of {info.shown() or 'nothing'}"
    emit({**info.to_json(), "requests": rows}, table(rows, columns, title))


@traces.command("stats")
@filter_options
@option("--by", "Of draft, category, recording; comma-separated.", default="draft,category")
@flag("--executed", "Over the rounds executed, not over every start of the panoramas.")
def traces_stats(by: str, executed: bool, **kw: Any) -> None:
    """Acceptance, overall and by position in the draft.

    marginal: share of the chains drafted as far that are kept up to a position; conditional: of
    those that are kept up to the one before.

    \b
    Example:  cli.py traces stats --by draft,category
    """
    from spectune.traces.store.query import GROUPS, acceptance_stats, executed_stats

    known = {str(group): group for group in GROUPS}  # looked up, a text is a GroupBy to mypy
    names = [name.strip() for name in by.split(",")]
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"{name!r}: one of {', '.join(GROUPS)} is expected", param_hint="--by"
            )
    groups = [known[name] for name in names]
    with open_store(create=False) as store:
        call = executed_stats if executed else acceptance_stats
        rows = [s.to_json() for s in call(store.database, _filter(kw), groups)]
    for row in rows:
        row["by_position"] = " ".join(f"{x:.2f}" for x in row["marginal"][:10])
    columns = (*groups, "requests", "acceptance", "mean_accepted_length", "by_position")
    emit({"stats": rows}, table(rows, columns, "acceptance"))


@traces.command("query")
@filter_options
@option("--format kind", type=click.Choice(["table", "json", "csv"]), default="table")
def traces_query(kind: str, **kw: Any) -> None:
    """One row per request and draft.

    \b
    Example:  cli.py traces query --draft small --max-acceptance 0.5 --format csv
    """
    from spectune.traces.store.export import write_rows
    from spectune.traces.store.query import RequestRow, request_rows

    with open_store(create=False) as store:
        found = list(request_rows(store.database, _filter(kw)))
    if kind in ("json", "csv") and not as_json():
        write_rows(found, sys.stdout, "json" if kind == "json" else "csv")
        return
    rows = [r.to_json() for r in found]
    columns = tuple(c for c in RequestRow.columns() if c != "recorded_at")
    emit({"requests": rows}, table(rows, columns))


@traces.command("export")
@click.argument("path", type=FILE)
@flag(
    "--whole",
    "To .parquet: one recording's texts and panoramas, for `simulate --recording FILE`.",
)
@filter_options
def traces_export(path: str, whole: bool, **kw: Any) -> None:
    """Rows to .json, .csv or .parquet; whole recordings, to be imported elsewhere, to .db.

    \b
    Example:  cli.py traces export rows.parquet --category code
              cli.py traces export recording.db --recording latest
              cli.py traces export recording.parquet --whole --recording latest
    """
    from spectune.traces.store.export import export_rows
    from spectune.traces.store.query import list_recordings, request_rows
    from spectune.traces.store.transfer import export_recordings

    check_writable(("export to", path))
    data: dict[str, Any] = {"path": path}
    with open_store(create=False) as store:
        if path.endswith(".db"):
            names = [r.id for r in list_recordings(store.database, _filter(kw))]
            moved = export_recordings(store.database, names, path)
            data |= {"recordings": list(moved.added), "chunks": moved.chunks}
        elif whole:
            from spectune.traces.store.parquet import write_recording

            names = [r.id for r in list_recordings(store.database, _filter(kw))]
            if len(names) != 1 or not path.endswith(".parquet"):
                raise click.UsageError(
                    "--whole writes one recording to a .parquet file; name it by --recording"
                )
            data |= {"recordings": names, "chunks": write_recording(store, names[0], path)}
        else:
            data["rows"] = export_rows(request_rows(store.database, _filter(kw)), path)
    emit(data, ", ".join(f"{k} {v}" for k, v in data.items()))


@traces.command("import")
@click.argument("path", type=FILE)
def traces_import(path: str) -> None:
    """Add the recordings of an exported .db file; what is here already stays as it is.

    \b
    Example:  cli.py traces import recording.db
    """
    from spectune.traces.store.transfer import import_recordings

    with open_store() as store:
        moved = import_recordings(store.database, path)
    added, present = (", ".join(names) or "nothing" for names in (moved.added, moved.present))
    emit(
        {"added": list(moved.added), "present": list(moved.present), "chunks": moved.chunks},
        f"added {added}; already here: {present}",
    )


@traces.command("prune")
@option("--recording recordings", "Remove this one; repeatable.", multiple=True)
@option("--older-than", "Remove recordings older than, e.g., 30d.")
@option("--keep-last", "Keep the newest N.", Whole(0))
@flag("--force", "Remove even what a publication's evidence refers to.")
@flag("--dry-run", "Only say what would be removed.")
def traces_prune(older_than: str | None, **kw: Any) -> None:
    """Remove old recordings; those that a publication rests on are spared.

    \b
    Example:  cli.py traces prune --older-than 30d --dry-run
    """
    from spectune.traces.store.prune import prune

    with open_store(create=False) as store:
        before = moment_before(store, older_than)
        report = prune(store.database, before=before, **kw)
        if not report.dry_run:
            store.database.vacuum()
    verb = "would remove" if report.dry_run else "removed"
    names = ", ".join(p.recording for p in report.removed) or "nothing"
    kept = f"; spared as evidence: {', '.join(report.kept)}" if report.kept else ""
    emit(report.to_json(), f"{verb} {names} ({report.size_bytes} bytes){kept}")
