"""`db`: the schema, whether all is sound, and everything that has an id."""

from __future__ import annotations

from typing import Any

import click

from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.options import MOMENT, Whole
from spectune.optimizer.commands.printing import Group, emit, table
from spectune.optimizer.commands.shared import database_url, open_store

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
    from spectune.traces.store.export import plain
    from spectune.traces.store.inventory import counts, list_kind

    with open_store(create=False) as store:
        if kind is None:
            found = counts(store)
            emit(found, table([{"kind": k, "how_many": n} for k, n in found.items()]))
            return
        rows = [plain(row) for row in list_kind(store, kind, limit=limit)]
    # The beginning of a workload's long id is enough for `db show`.
    told = [{k: v[:12] if k == "workload_id" and v else v for k, v in row.items()} for row in rows]
    emit({kind: rows}, table(told, title=kind) if rows else f"no {kind}")


@db.command("show")
@click.argument("name", metavar="ID")
def db_show(name: str) -> None:
    """What an id stands for, whatever it is of; its beginning suffices.

    \b
    Example:  cli.py db show run-3f2a
    """
    from spectune.traces.store.export import plain
    from spectune.traces.store.inventory import show

    with open_store(create=False) as store:
        kind, columns = show(store, name)
        if kind == "artifacts":
            found = store.get_artifact(columns["id"])
            shapes = {key: list(array.shape) for key, array in found.arrays.items()}
            columns |= {"document": found.document, "arrays": shapes}
    emit({"of": kind, **plain(columns)})


@db.command("prune")
@click.argument(
    "kinds", type=click.Choice(("recordings", "runs", "studies", "profiles", "artifacts")), nargs=-1
)
@option("--older-than before", "Only what is older than, e.g., 30d.", MOMENT)
@option("--keep-last", "Of each kind, keep the newest N.", Whole(0))
@flag("--dry-run", "Only say what would be removed.")
def db_prune(kinds: tuple[str, ...], **rule: Any) -> None:
    """Remove what is old, of all kinds or of those named. What the evidence or the policy of a
    publication names is spared, and the newest profile of each pair, device and dtype.

    \b
    Example:  cli.py db prune --older-than 30d --dry-run
              cli.py db prune runs studies --keep-last 100
    """
    from spectune.traces.store.inventory import PRUNED, prune

    if rule["before"] is None and rule["keep_last"] is None:
        raise click.UsageError("say what to keep: --older-than AGE, --keep-last N, or both")
    with open_store(create=False) as store:
        found = prune(store, kinds or PRUNED, **rule)
        if not rule["dry_run"]:
            store.database.vacuum()
    rows = [
        {"kind": k, "removed": len(v["removed"]), "spared": len(v["spared"]), "ids": v["removed"]}
        for k, v in found.items()
    ]
    told = {key: {k: v[key] for k, v in found.items()} for key in ("removed", "spared")}
    data = {**told, "dry_run": rule["dry_run"]}
    emit(data, table(rows, title="would be removed" if rule["dry_run"] else "removed"))


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
    """Check integrity, foreign keys, schema and every blob; exit code 1 if anything is
    wrong.

    \b
    Example:  cli.py db check
    """
    from spectune.db.check import check

    report = check(database_url())
    emit(report.to_json(), "the database is sound" if report.ok else "\n".join(report.problems))
    if not report.ok:
        ctx.exit(1)
