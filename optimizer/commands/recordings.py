"""`traces`: what is recorded, looked at, counted, drawn, moved and removed."""

from __future__ import annotations

import sys
from typing import Any

import click

from spectune.optimizer.commands.outputs import check_writable, write_text
from spectune.optimizer.commands.shared import (
    FiniteRange,
    Meter,
    Whole,
    console_for,
    emit,
    open_store,
    pair_options,
    pair_spec,
    together,
    with_json,
)


@click.group()
def traces() -> None:
    """Recordings: list, show, stats, report, query, export, import, ingest, prune."""


filter_options = together(
    click.option(
        "--recording",
        "recordings",
        multiple=True,
        help="Id, beginning of one, or latest; repeatable.",
    ),
    click.option("--pair-id", "pair", help="Pair id."),
    click.option("--category", "categories", multiple=True, help="Repeatable."),
    click.option("--since", type=click.DateTime(), help="Recorded at or after (UTC)."),
    click.option("--until", type=click.DateTime(), help="Recorded before (UTC)."),
    click.option("--draft", "draft", help="Draft whose acceptance is meant."),
    click.option("--min-acceptance", type=FiniteRange(0, 1)),
    click.option("--max-acceptance", type=FiniteRange(0, 1)),
)


def _filter(kw: dict[str, Any]) -> Any:
    from datetime import UTC

    from spectune.traces.store.query import TraceFilter

    moments = {k: kw[k].replace(tzinfo=UTC) if kw[k] else None for k in ("since", "until")}
    return TraceFilter(**{**kw, **moments})


@traces.command("list")
@filter_options
@with_json
def traces_list(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Recordings that hold a matching request, newest first.

    \b
    Example:  cli.py traces list --category code
    """
    from spectune.optimizer.report.tables import rows_table
    from spectune.traces.store.query import list_recordings

    with open_store(ctx, create=False) as store:
        found = list_recordings(store.database, _filter(kw))
    rows = [info.to_json() for info in found]
    columns = (
        "id",
        "pair_id",
        "source",
        "state",
        "n_requests",
        "n_output_tokens",
        "max_new_tokens",
        "drafts",
        "trees",
        "created_at",
    )
    table = [{**row, "trees": info.trees_shown()} for row, info in zip(rows, found, strict=True)]
    emit(as_json, {"recordings": rows}, lambda: rows_table(table, columns, "recordings"))


@traces.command("show")
@click.argument("recording", default="latest")
@click.option("--request", "request_id", help="One request: its text's rounds.")
@with_json
def traces_show(ctx: click.Context, as_json: bool, recording: str, request_id: str | None) -> None:
    """One recording: what was asked, and its requests; or the rounds of one request.

    \b
    Example:  cli.py traces show latest --request code-003
    """

    from spectune.optimizer.report.tables import rows_table
    from spectune.traces.errors import TraceError
    from spectune.traces.store.query import RequestRow, TraceFilter, request_rows

    with open_store(ctx, create=False) as store:
        name = store.resolve_recording(recording)
        info = store.get_recording(name)
        if request_id is not None:
            found = next(
                (
                    r
                    for r in store.iterate(name, drafts=(), steps=True)
                    if r.trajectory.request_id == request_id
                ),
                None,
            )
            if found is None:
                raise TraceError(
                    f"recording {name} has no request {request_id!r} (see `traces query "
                    f"--recording {name}`)"
                )
            steps = [s._asdict() for s in found.steps]
            shown = (
                "start",
                "drafted",
                "verified",
                "accepted",
                "emitted",
                "draft_steps",
                "lag",
                "draft_s",
                "verify_s",
                "round_s",
            )
            emit(
                as_json,
                {
                    "request": request_id,
                    "output_ids": found.trajectory.output_ids.tolist(),
                    "steps": steps,
                },
                lambda: rows_table(steps, shown, f"{request_id}: rounds"),
            )
            return
        rows = [r.to_json() for r in request_rows(store.database, TraceFilter(recordings=(name,)))]
    columns = tuple(c for c in RequestRow.columns() if c not in ("recording", "recorded_at"))
    title = f"recording {name}: {info.state}" + (
        f"; trees of {grown}" if (grown := info.trees_shown()) else ""
    )
    emit(as_json, {**info.to_json(), "requests": rows}, lambda: rows_table(rows, columns, title))


@traces.command("stats")
@filter_options
@click.option(
    "--by",
    default="draft,category",
    show_default=True,
    help="Of draft, category, recording; comma-separated.",
)
@click.option(
    "--executed",
    is_flag=True,
    help="Over the rounds executed, not over every start of the panoramas.",
)
@with_json
def traces_stats(ctx: click.Context, as_json: bool, by: str, executed: bool, **kw: Any) -> None:
    """Acceptance, overall and by position in the draft.

    marginal: share of chains that reach a position; conditional: of those that reached the one
    before.

    \b
    Example:  cli.py traces stats --by draft,category
    """
    from spectune.optimizer.report.tables import rows_table
    from spectune.traces.store.query import GROUPS, GroupBy, acceptance_stats, executed_stats

    groups: list[GroupBy] = []
    for name in by.split(","):
        match = next((g for g in GROUPS if g == name.strip()), None)
        if match is None:
            raise click.BadParameter(
                f"{name!r}: one of {', '.join(GROUPS)} is expected", param_hint="--by"
            )
        groups.append(match)
    with open_store(ctx, create=False) as store:
        call = executed_stats if executed else acceptance_stats
        rows = [s.to_json() for s in call(store.database, _filter(kw), groups)]
    for row in rows:
        row["by_position"] = " ".join(f"{x:.2f}" for x in row["marginal"][:10])
    shown = tuple(g for g in groups if not (executed and g == "draft"))
    columns = (*shown, "requests", "acceptance", "mean_accepted_length", "by_position")
    emit(as_json, {"stats": rows}, lambda: rows_table(rows, columns, "acceptance"))


@traces.command("report")
@click.argument("recording", default="latest")
@click.option(
    "--draft",
    help="Draft whose trees are meant; default: the first that has trees of every request.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="The page; default: trees-RECORDING-DRAFT.html here.",
)
@click.option(
    "--top-n",
    type=click.IntRange(1, 256),
    default=60,
    show_default=True,
    help="Nodes kept of a tree.",
)
@click.option(
    "--width", type=click.IntRange(2, 32), help="Children of a node; default: as recorded."
)
@click.option("--depth", type=click.IntRange(1, 64), help="Levels; default: as recorded.")
@with_json
def traces_report(ctx: click.Context, as_json: bool, recording: str, **kw: Any) -> None:
    """Draw what a recording's draft trees do: one HTML page that needs nothing else, with the
    figures of the tree papers.

    Terminal Confidence Ranks, probability and acceptance by entropy and rank, tau by window and by
    verified tokens for many policies, entropy bins, categories. The recording must hold trees
    (`record --tree-width 8 --tree-depth 8`).

    \b
    Example:  cli.py traces report latest --out trees.html
              cli.py traces report latest --draft small --top-n 32 --depth 6
    """
    from spectune.optimizer.simulate.tree_sources import report_of

    check_writable(ctx, ("--out", kw["out"]))
    with open_store(ctx, create=False) as store, Meter() as meter:
        report, name = report_of(
            store,
            store.resolve_recording(recording),
            kw["draft"],
            top_n=kw["top_n"],
            width=kw["width"],
            depth=kw["depth"],
            progress=lambda done, total: meter("replay", done, total),
        )
    from spectune.optimizer.report.tree_page import page

    out = kw["out"] or f"trees-{name}-{report.draft}.html"
    write_text(out, [page(report)])
    data = {"path": out, "recording": name, **report.to_json()}
    left_out = f", {len(report.skipped)} policies left out" if report.skipped else ""
    emit(
        as_json,
        data,
        f"{out}: trees of draft {report.draft}, {len(report.points)} policies{left_out}",
    )


@traces.command("query")
@filter_options
@click.option(
    "--format",
    "kind",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    show_default=True,
)
@with_json
def traces_query(ctx: click.Context, as_json: bool, kind: str, **kw: Any) -> None:
    """One row per request and draft.

    \b
    Example:  cli.py traces query --draft small --max-acceptance 0.5 --format csv
    """
    from spectune.optimizer.report.tables import rows_table
    from spectune.traces.store.export import write_rows
    from spectune.traces.store.query import RequestRow, request_rows
    from spectune.traces.text import json_line

    with open_store(ctx, create=False) as store:
        rows = list(request_rows(store.database, _filter(kw)))
    if as_json:
        click.echo(json_line({"requests": [r.to_json() for r in rows]}))
    elif kind in ("json", "csv"):
        write_rows(rows, sys.stdout, "json" if kind == "json" else "csv")
    else:
        columns = tuple(c for c in RequestRow.columns() if c != "recorded_at")
        console_for().print(rows_table([r.to_json() for r in rows], columns))


@traces.command("export")
@click.argument("path", type=click.Path(dir_okay=False))
@click.option(
    "--whole",
    is_flag=True,
    help="To .parquet: one recording's texts and panoramas, for `simulate --recording FILE`.",
)
@filter_options
@with_json
def traces_export(ctx: click.Context, as_json: bool, path: str, whole: bool, **kw: Any) -> None:
    """Rows to .json, .csv or .parquet; whole recordings, to be imported elsewhere, to .db.

    \b
    Example:  cli.py traces export rows.parquet --category code
              cli.py traces export recording.db --recording latest
              cli.py traces export recording.parquet --whole --recording latest
    """
    from spectune.traces.store.export import export_rows
    from spectune.traces.store.query import list_recordings, request_rows
    from spectune.traces.store.transfer import export_recordings

    check_writable(ctx, ("export to", path))
    with open_store(ctx, create=False) as store:
        if path.endswith(".db"):
            names = [r.id for r in list_recordings(store.database, _filter(kw))]
            moved = export_recordings(store.database, names, path)
            data: dict[str, Any] = {
                "path": path,
                "recordings": list(moved.added),
                "chunks": moved.chunks,
            }
        elif whole:
            from spectune.traces.store.parquet import write_recording

            names = [r.id for r in list_recordings(store.database, _filter(kw))]
            if len(names) != 1 or not path.endswith(".parquet"):
                raise click.UsageError(
                    "--whole writes one recording to a .parquet file; name it by --recording"
                )
            data = {
                "path": path,
                "recordings": names,
                "chunks": write_recording(store, names[0], path),
            }
        else:
            data = {
                "path": path,
                "rows": export_rows(request_rows(store.database, _filter(kw)), path),
            }
    emit(as_json, data, ", ".join(f"{k} {v}" for k, v in data.items()))


@traces.command("import")
@click.argument("path", type=click.Path(dir_okay=False))
@with_json
def traces_import(ctx: click.Context, as_json: bool, path: str) -> None:
    """Add the recordings of an exported .db file; what is here already stays as it is.

    \b
    Example:  cli.py traces import recording.db
    """
    from spectune.traces.store.transfer import import_recordings

    with open_store(ctx) as store:
        moved = import_recordings(store.database, path)
    data = {"added": list(moved.added), "present": list(moved.present), "chunks": moved.chunks}
    emit(
        as_json,
        data,
        f"added {', '.join(moved.added) or 'nothing'}; already here: "
        f"{', '.join(moved.present) or 'nothing'}",
    )


@traces.command("ingest")
@click.argument("path", metavar="RESPONSES", type=click.Path(dir_okay=False))
@pair_options
@click.option(
    "--draft-name",
    "draft",
    required=True,
    metavar="NAME",
    help="The draft that the server loaded, or ngram.",
)
@click.option(
    "--temperature",
    type=FiniteRange(0.0, 10.0),
    default=0.0,
    show_default=True,
    help="As the requests asked for.",
)
@click.option("--top-k", type=Whole(0), default=0, help="0: off.")
@click.option("--top-p", type=FiniteRange(0.0, 1.0, min_open=True), default=1.0, help="1: off.")
@with_json
def traces_ingest(ctx: click.Context, as_json: bool, path: str, draft: str, **kw: Any) -> None:
    """Record what responses of vLLM or SGLang, one a line, say of their drafts: for servers without
    our plugin.

    With token ids (vLLM's return_token_ids) texts are recorded, and `record --resume` makes them
    replayable under any window and draft. Without, only how many rounds kept how many tokens is,
    which `simulate` does not extrapolate.

    \b
    Example:  cli.py traces ingest responses.jsonl --pair pair.json --draft-name small
    """
    from spectune.engines.ingest import keep, read_responses
    from spectune.traces.errors import PairError
    from spectune.traces.schema import Sampling

    sampling = Sampling(kw.pop("temperature"), kw.pop("top_k"), kw.pop("top_p"))
    spec = pair_spec(kw)
    if draft not in spec.draft_names:
        raise PairError(
            f"--draft-name {draft}: pair {spec.name} has no such draft; it has: "
            f"{', '.join(spec.draft_names)}"
        )
    found = read_responses(path, draft, sampling)
    with open_store(ctx) as store:
        recording = keep(store, spec, found, draft, sampling)
    rounds = sum(found.rounds.values())
    data = {
        "recording": recording,
        "engine": found.engine,
        "requests": len(found.requests),
        "rounds": rounds,
    }
    data |= {"responses": found.responses, "without": found.without, "counts": found.counts()}
    what = (
        f"{len(found.requests)} requests with their texts"
        if found.requests
        else "counts without texts"
    )
    left = f"; {found.without} say nothing of rounds" if found.without else ""
    emit(
        as_json,
        data,
        f"recording {recording}: {what}, {rounds} rounds of {found.responses} responses of "
        f"{found.engine}{left}",
    )


@traces.command("prune")
@click.option("--recording", "recordings", multiple=True, help="Remove this one; repeatable.")
@click.option("--older-than", help="Remove recordings older than, e.g., 30d.")
@click.option("--keep-last", type=Whole(0), help="Keep the newest N.")
@click.option("--force", is_flag=True, help="Remove even what a publication's evidence refers to.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@with_json
def traces_prune(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Remove old recordings; those that a publication rests on are spared.

    \b
    Example:  cli.py traces prune --older-than 30d --dry-run
    """
    from datetime import timedelta

    from spectune.optimizer.schedule import parse_duration
    from spectune.traces.store.prune import prune

    with open_store(ctx, create=False) as store:
        before = (
            store.clock() - timedelta(seconds=parse_duration(kw["older_than"]))
            if kw["older_than"]
            else None
        )
        report = prune(
            store.database,
            recordings=kw["recordings"],
            before=before,
            keep_last=kw["keep_last"],
            force=kw["force"],
            dry_run=kw["dry_run"],
            vacuum=not kw["dry_run"],
        )
    verb = "would remove" if report.dry_run else "removed"
    names = ", ".join(p.recording for p in report.removed) or "nothing"
    kept = f"; spared as evidence: {', '.join(report.kept)}" if report.kept else ""
    emit(as_json, report.to_json(), f"{verb} {names} ({report.size_bytes} bytes){kept}")
