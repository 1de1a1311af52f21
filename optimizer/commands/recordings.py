"""`traces`: what is recorded, looked at, counted, compared, moved and removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.options import FILE, MOMENT, FiniteRange, Whole, together
from spectune.optimizer.commands.outputs import check_writable
from spectune.optimizer.commands.printing import Group, as_json, emit, note, say, table
from spectune.optimizer.commands.shared import open_store, typed

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore


@click.group(cls=Group)
def traces() -> None:
    """Stored requests: list, show, stats, query, compare, export, import, prune."""


SHARE = FiniteRange(0, 1)
filter_options = together(
    option("--recording recordings", "Id, beginning of one, or latest; repeatable.", multiple=True),
    option("--request", "Id of a request."),
    option("--pair-id pair", "Pair id."),
    option("--category categories", "Repeatable.", multiple=True),
    option("--since", "Stored since so long ago (24h), or a moment (UTC).", MOMENT),
    option("--until", "Stored before; as --since.", MOMENT),
    option("--policy", "Id or label of a policy that decoded some of it."),
    option("--draft", "A draft whose proposals are recorded, and whose acceptance is meant."),
    option("--min-acceptance", type=SHARE),
    option("--max-acceptance", type=SHARE),
)
limit_option = option("--limit", "The first N; `traces export` has all.", Whole(1), default=100)
GROUPS = "draft, policy, category, day, recording, pair, source"
OF_REQUEST = (
    *("request_id", "category", "policy", "context", "rounds", "tau", "acceptance"),
    "tokens_per_s",
)
"""Columns of a request that a table shows."""


@traces.command("list")
@filter_options
def traces_list(**kw: Any) -> None:
    """Recordings that hold a matching request, newest first.

    \b
    Example:  cli.py traces list --category code --since 7d
    """
    from spectune.traces.store.query import TraceFilter, list_recordings

    with open_store(create=False) as store:
        found = list_recordings(store, TraceFilter(**kw))
    rows = [info.to_json() for info in found]
    told = [{**row, "drafts": info.shown()} for row, info in zip(rows, found, strict=True)]
    size = ("n_requests", "n_output_tokens", "drafts", "created_at")
    columns = ("id", "pair_id", "source", "state", *size)
    view = table(told, columns, "recordings") if rows else "nothing of that is stored"
    emit({"recordings": rows}, view)


@traces.command("show")
@click.argument("recording", default="latest")
@option("--request", "One request: its text and its rounds.")
@limit_option
def traces_show(recording: str, request: str | None, limit: int) -> None:
    """One recording: what was asked, and its requests; or the text and the rounds of one request.

    \b
    Example:  cli.py traces show latest --request code-003
    """
    from spectune.traces.store.export import plain
    from spectune.traces.store.query import TraceFilter, requests

    with open_store(create=False) as store:
        if request is not None:
            _show_request(store, recording, request)
            return
        info = store.get_recording(recording)
        only = TraceFilter(recordings=(info.id,))
        rows = [plain(row) for row in _first(limit, requests(store, only, limit=limit + 1))]
    title = f"recording {info.id}: {info.state}; panoramas of {info.shown() or 'nothing'}"
    emit({**info.to_json(), "requests": rows}, table(rows, OF_REQUEST, title))


def _show_request(store: TraceStore, recording: str, request: str) -> None:
    from spectune.optimizer.request_text import request_text
    from spectune.traces.store.export import plain

    data = request_text(store, recording, request)
    data["rounds"] = [plain(row) for row in data["rounds"]]
    if not as_json():
        ids = f"not decoded: {data['undecoded']}\nids: {data['output_ids']}"
        say(ids if data["text"] is None else f"{data['prompt']}\n---\n{data['text']}\n---")
    counts = ("round", "policy_id", "start", "drafted", "verified", "accepted", "emitted")
    emit(data, table(data["rounds"], (*counts, "draft_s", "verify_s", "round_s"), "rounds"))


@traces.command("stats")
@filter_options
@option("--by", f"Comma-separated: {GROUPS}; by default draft or policy, and category or day.")
@flag("--executed", "Acceptance over the rounds executed, not over every start of the panoramas.")
@flag("--speed", "Tokens/s and tau of the rounds executed; --by policy says it too.")
def traces_stats(by: str | None, executed: bool, speed: bool, **kw: Any) -> None:
    """Acceptance by position in the draft, or tokens/s and tau.

    marginal: share of the chains drafted as far that are kept up to a position; conditional: of
    those that are kept up to the one before.

    \b
    Example:  cli.py traces stats --by draft,category
              cli.py traces stats --by policy,day --since 7d
    """
    from spectune.traces.store import query

    usual = "policy,day" if speed else "policy,category" if executed else "draft,category"
    names = [name.strip() for name in (by or usual).split(",")]
    only = query.TraceFilter(**kw)
    with open_store(create=False) as store:
        if speed or ("policy" in names and not executed):
            rows = query.speed(store, only, names)
            columns: tuple[str, ...] = ("requests", "seconds", "tokens_per_s", "tau", "acceptance")
        else:
            rows = query.acceptance(store, only, names, executed=executed)
            columns = ("requests", "mean_accepted_length", "by_position")
    told = [
        {
            **{key.replace("policy_id", "id"): value for key, value in row.items()},
            "by_position": " ".join(f"{x:.2f}" for x in row.get("marginal", ())[:10]),
        }
        for row in rows
    ]
    keys = (
        [key for key in told[0] if key in (*query.GROUPS.values(), "policy", "id")] if told else ()
    )
    emit(
        {"stats": rows},
        table(told, (*keys, *columns), "stats") if rows else "nothing of that is stored",
    )


@traces.command("query")
@filter_options
@option("--sort", "A column; - before it: largest first (`--sort=-seconds`).")
@limit_option
def traces_query(sort: str | None, limit: int, **kw: Any) -> None:
    """A row per request and policy that decoded it.

    \b
    Example:  cli.py traces query --sort tokens_per_s --limit 20 --since 24h
              cli.py traces query --draft small --max-acceptance 0.5 --json
    """
    from spectune.traces.store.export import plain
    from spectune.traces.store.query import TraceFilter, requests

    with open_store(create=False) as store:
        found = requests(store, TraceFilter(**kw), sort=sort, limit=limit + 1)
    rows = [plain(row) for row in _first(limit, found)]
    meant = "draft_acceptance" if kw["draft"] else "acceptance"
    columns = ("recording_id", *(meant if c == "acceptance" else c for c in OF_REQUEST))
    emit(
        {"requests": rows},
        table(rows, columns, "requests") if rows else "nothing of that is stored",
    )


@traces.command("compare")
@click.argument("left")
@click.argument("right")
@filter_options
def traces_compare(left: str, right: str, **kw: Any) -> None:
    """Two recordings, runs or policies (an id, a file, inline JSON) on the requests that both
    decoded: how many times as fast the first is, with its 95% interval.

    \b
    Example:  cli.py traces compare 3f1c0a9be2d4 autoregressive --since 24h
    """
    from spectune.optimizer.inputs import named_policy
    from spectune.traces.store.compare import compare
    from spectune.traces.store.query import TraceFilter

    with open_store(create=False) as store:
        given = {name: named_policy(name) for name in (left, right)}
        one, other = (name if (p := given[name]) is None else p.id for name in (left, right))
        found = compare(store, one, other, TraceFilter(**kw))
    left, right = (name if (p := given[name]) is None else p.label() for name in (left, right))
    told = [{**row, "name": name} for row, name in zip(found["rows"], (left, right), strict=True)]
    between = (
        "" if found["interval"] is None else "95%: {:.2f} to {:.2f}, ".format(*found["interval"])
    )
    said = (
        f"{left}: {found['ratio']:.2f} times as fast as {right} ({between}{found['requests']} "
        "requests that both decoded)"
    )
    emit(found, table(told, title=said))


@traces.command("export")
@click.argument("path", type=FILE)
@option(
    "--rows kind",
    "A row per request, per executed round, or per position of every draft's proposals.",
    click.Choice(["requests", "rounds", "positions"]),
    default="requests",
)
@flag("--whole", "To .parquet: recordings with all that replay needs, for `traces import`.")
@filter_options
def traces_export(path: str, kind: str, whole: bool, **kw: Any) -> None:
    """Rows to .json, .csv or .parquet; whole recordings, to be imported elsewhere.

    \b
    Example:  cli.py traces export rounds.parquet --rows rounds --since 24h
              cli.py traces export recording.parquet --whole --recording latest
    """
    from spectune.traces.store import query
    from spectune.traces.store.export import export_recordings, export_rows

    check_writable(("export to", path))
    only = query.TraceFilter(**kw)
    data: dict[str, Any] = {"path": path}
    with open_store(create=False) as store:
        if whole:
            if not path.endswith(".parquet"):
                raise click.UsageError(f"--whole writes Parquet: end {path} with .parquet")
            data["recordings"] = [info.id for info in query.list_recordings(store, only)]
            data["rows"] = export_recordings(store, data["recordings"], path)
        else:
            data["rows"] = export_rows(getattr(query, kind)(store, only), path)
    of = f", recordings {', '.join(data['recordings'])}" if whole else ""
    emit(data, f"{path}: {data['rows']} rows{of}")


@traces.command("import")
@click.argument("path", type=FILE)
def traces_import(path: str) -> None:
    """Add the recordings that `traces export --whole` wrote; what is here already stays as it is.

    \b
    Example:  cli.py traces import recording.parquet
    """
    from spectune.traces.store.export import import_recordings

    with open_store() as store:
        added, present = import_recordings(store, path)
    said = [", ".join(names) or "nothing" for names in (added, present)]
    emit({"added": added, "present": present}, f"added {said[0]}; already here: {said[1]}")


@traces.command("prune")
@option("--recording named", "Remove this one; repeatable.", multiple=True)
@option("--older-than before", "Whose last request was stored longer ago than, e.g., 30d.", MOMENT)
@option("--keep-last", "Keep the newest N.", Whole(0))
@flag("--force", "Remove even what a publication's evidence names.")
@flag("--dry-run", "Only say what would be removed.")
def traces_prune(named: tuple[str, ...], **kw: Any) -> None:
    """Remove old recordings; those that a publication rests on are spared.

    \b
    Example:  cli.py traces prune --older-than 30d --dry-run
    """
    from spectune.traces.store.inventory import prune

    with open_store(create=False) as store:
        ids = [store.resolve_recording(name) for name in named]
        found = prune(store, ["recordings"], named=ids, **kw)["recordings"]
        if not kw["dry_run"]:
            store.database.vacuum()
    verb = "would remove" if kw["dry_run"] else "removed"
    spared = f"; spared: {', '.join(found['spared'])}" if found["spared"] else ""
    emit(
        {**found, "dry_run": kw["dry_run"]},
        f"{verb} {', '.join(found['removed']) or 'nothing'}{spared}",
    )


def _first(limit: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first rows of one more; that there are others is said where nobody asked for so many."""
    if len(rows) > limit and not typed("limit"):
        note(f"the first {limit}; --limit says how many, and `traces export rows.csv` writes all")
    return rows[:limit]
