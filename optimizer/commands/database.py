"""`db`: the schema, whether all is sound, and everything that has an id."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.options import Whole
from spectune.optimizer.commands.printing import Group, emit, table
from spectune.optimizer.commands.shared import database_url, open_store

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore

KINDS = ("recordings", "profiles", "artifacts", "studies", "runs", "policies", "pairs", "workloads")


@click.group(cls=Group)
def db() -> None:
    """The database: list, show, prune, upgrade, check."""


@db.command("list")
@click.argument("kind", type=click.Choice(KINDS), required=False)
@option("--limit", "Only the newest N.", Whole(1))
def db_list(kind: str | None, limit: int | None) -> None:
    """How many there are of each kind; of one kind all, newest first.

    \b
    Example:  cli.py db list
              cli.py db list runs --limit 20
    """
    from spectune.traces.store.kinds import counts, list_kind

    with open_store(create=False) as store:
        if kind is None:
            found = counts(store.database)
            emit(found, table([{"kind": k, "how_many": n} for k, n in found.items()]))
            return
        rows = list(list_kind(store.database, kind, limit=limit))
    emit({kind: rows}, table(rows, title=kind) if rows else f"no {kind}")


@db.command("show")
@click.argument("name", metavar="ID")
def db_show(name: str) -> None:
    """What an id stands for, whatever it is of; its beginning suffices.

    \b
    Example:  cli.py db show run-3f2a
    """
    from spectune.traces.store.kinds import find

    with open_store(create=False) as store:
        kind, found = find(store.database, name)
        emit({"kind": kind, "id": found, **_content(store, kind, found)})


def _content(store: TraceStore, kind: str, name: str) -> dict[str, Any]:
    """What is shown of one thing, JSON-ready: arrays, texts and trials stay packed."""
    if kind == "recordings":
        return dict(store.get_recording(name).to_json())
    if kind == "workloads":
        workload = store.get_workload(name)
        return {"name": workload.name, "requests": [r.id for r in workload.requests]}
    one = kind.replace("ies", "y").removesuffix("s")
    found: Any = getattr(store, f"get_{one}")(name)
    created = {"created_at": found.created_at.isoformat()}
    if kind == "profiles":
        return {**found.to_json(), **created}
    if kind == "artifacts":
        return {
            "kind_of_artifact": found.kind,
            "pair_id": found.pair_id,
            "provenance": dict(found.provenance),
            "document": found.document,
            "arrays": {key: list(array.shape) for key, array in found.arrays.items()},
            **created,
        }
    columns = {f.name: getattr(found, f.name) for f in fields(found)}
    if kind == "runs":
        columns["outcome"] = found.outcome.to_json()
    shown = columns.keys() - {"id", "kind", "trials"}
    return {**{name: columns[name] for name in columns if name in shown}, **created}


def moment_before(store: TraceStore, age: str | None) -> datetime | None:
    """The moment so long ago (``30d``). Raises ScheduleError."""
    from spectune.optimizer.schedule import parse_duration

    return None if age is None else store.clock() - timedelta(seconds=parse_duration(age))


@db.command("prune")
@click.argument(
    "kinds", type=click.Choice(("recordings", "runs", "studies", "profiles", "artifacts")), nargs=-1
)
@option("--older-than", "Only what is older than, e.g., 30d.")
@option("--keep-last", "Of each kind, keep the newest N.", Whole(0))
@flag("--dry-run", "Only say what would be removed.")
def db_prune(
    kinds: tuple[str, ...], older_than: str | None, keep_last: int | None, dry_run: bool
) -> None:
    """Remove what is old, of all kinds or of those named. What a publication, a schedule or
    anything else that stays refers to is spared; recordings only where a publication's evidence
    refers to them. What a study's page draws goes with the study.

    \b
    Example:  cli.py db prune --older-than 30d --dry-run
              cli.py db prune runs studies --keep-last 100
    """
    from spectune.traces.store.kinds import PRUNED, prune_kinds
    from spectune.traces.store.prune import prune

    if older_than is None and keep_last is None:
        raise click.UsageError("say what to keep: --older-than AGE, --keep-last N, or both")
    with open_store(create=False) as store:
        rule: dict[str, Any] = {"keep_last": keep_last, "dry_run": dry_run}
        rule["before"] = moment_before(store, older_than)
        wanted = [kind for kind in PRUNED if kind in kinds or not kinds]
        removed, spared = prune_kinds(store.database, wanted, **rule)
        if not kinds or "recordings" in kinds:
            report = prune(store.database, **rule)
            removed["recordings"] = [p.recording for p in report.removed]
            spared["recordings"] = list(report.kept)
        if not dry_run:
            store.database.vacuum()
    rows = [
        {"kind": k, "removed": len(names), "spared": len(spared[k]), "ids": names}
        for k, names in removed.items()
    ]
    data = {"removed": removed, "spared": spared, "dry_run": dry_run}
    emit(data, table(rows, title="would be removed" if dry_run else "removed"))


@db.command("upgrade")
def db_upgrade() -> None:
    """Make the tables of a new database; one that has them stays as it is.

    \b
    Example:  cli.py --db postgresql://user@host/spectune db upgrade
    """
    from spectune.db.database import upgrade

    before, after = upgrade(database_url())
    done = f"already at {after}" if before == after else f"{before or 'new'} -> {after}"
    emit({"before": before, "after": after}, f"schema {done}")


@db.command("check")
@click.pass_context
def db_check(ctx: click.Context) -> None:
    """Check integrity, foreign keys, schema and the checksum of every chunk; exit code 1 if
    anything is wrong.

    \b
    Example:  cli.py db check
    """
    from spectune.db.check import check

    report = check(database_url())
    emit(report.to_json(), "the database is sound" if report.ok else "\n".join(report.problems))
    if not report.ok:
        ctx.exit(1)
