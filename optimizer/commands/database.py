"""`db`: the schema, whether all is sound, and everything that has an id."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from spectune.optimizer.commands.shared import Whole, emit, open_store, with_json

KINDS = ("recordings", "profiles", "artifacts", "studies", "runs", "policies", "pairs", "workloads")


@click.group()
def db() -> None:
    """The database: list, show, prune, upgrade, check."""


@db.command("list")
@click.argument("kind", type=click.Choice(KINDS), required=False)
@click.option("--limit", type=Whole(1), help="Only the newest N.")
@with_json
def db_list(ctx: click.Context, as_json: bool, kind: str | None, limit: int | None) -> None:
    """How many there are of each kind; of one kind all, newest first.

    \b
    Example:  cli.py db list
              cli.py db list runs --limit 20
    """
    from spectune.optimizer.report.tables import rows_table
    from spectune.traces.store.kinds import counts, list_kind

    with open_store(ctx, create=False) as store:
        if kind is None:
            found = counts(store.database)
            rows = [{"kind": name, "how_many": count} for name, count in found.items()]
            emit(as_json, found, lambda: rows_table(rows, ("kind", "how_many")))
            return
        rows = list(list_kind(store.database, kind, limit=limit))
    emit(
        as_json,
        {kind: rows},
        lambda: rows_table(rows, tuple(rows[0]), kind) if rows else f"no {kind}",
    )


@db.command("show")
@click.argument("name", metavar="ID")
@with_json
def db_show(ctx: click.Context, as_json: bool, name: str) -> None:
    """What an id stands for, whatever it is of; its beginning suffices.

    \b
    Example:  cli.py db show run-3f2a
    """
    import json

    from spectune.traces.store.kinds import find

    with open_store(ctx, create=False) as store:
        kind, found = find(store.database, name)
        data = {"kind": kind, "id": found, **_content(store, kind, found)}
    emit(as_json, data, lambda: json.dumps(data, indent=2, ensure_ascii=False))


def _content(store: Any, kind: str, name: str) -> dict[str, Any]:
    """What is shown of one thing, JSON-ready: arrays, texts and trials stay packed."""
    if kind == "recordings":
        return dict(store.get_recording(name).to_json())
    if kind == "profiles":
        found = store.get_profile(name)
        return {**found.profile.to_json(), "created_at": found.created_at.isoformat()}
    if kind == "workloads":
        workload = store.get_workload(name)
        return {"name": workload.name, "requests": [r.id for r in workload.requests]}
    if kind == "artifacts":
        made = store.get_artifact(name)
        shapes = {key: list(array.shape) for key, array in made.arrays.items()}
        about = {
            "kind_of_artifact": made.kind,
            "pair_id": made.pair_id,
            "provenance": dict(made.provenance),
        }
        return {
            **about,
            "document": made.document,
            "arrays": shapes,
            "created_at": made.created_at.isoformat(),
        }
    if kind == "runs":
        run = store.get_run(name)
        said = {k: v for k, v in asdict(run).items() if k not in ("id", "outcome", "created_at")}
        return {**said, "outcome": run.outcome.to_json(), "created_at": run.created_at.isoformat()}
    getter = {"studies": store.get_study, "policies": store.get_policy, "pairs": store.get_pair}[
        kind
    ]
    plain = {k: v for k, v in vars(getter(name)).items() if k not in ("id", "trials", "problem")}
    return {**plain, "created_at": plain["created_at"].isoformat()}


@db.command("prune")
@click.argument(
    "kinds", type=click.Choice(("recordings", "runs", "studies", "profiles", "artifacts")), nargs=-1
)
@click.option("--older-than", help="Only what is older than, e.g., 30d.")
@click.option("--keep-last", type=Whole(0), help="Of each kind, keep the newest N.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@with_json
def db_prune(ctx: click.Context, as_json: bool, kinds: tuple[str, ...], **kw: Any) -> None:
    """Remove what is old, of all kinds or of those named. What a publication, a schedule or
    anything else that stays refers to is spared; recordings only where a publication's evidence
    refers to them. What a study's page draws goes with the study.

    \b
    Example:  cli.py db prune --older-than 30d --dry-run
              cli.py db prune runs studies --keep-last 100
    """
    from datetime import timedelta

    from spectune.optimizer.schedule import parse_duration
    from spectune.traces.store.kinds import PRUNED, prune_kinds
    from spectune.traces.store.prune import prune

    if kw["older_than"] is None and kw["keep_last"] is None:
        raise click.UsageError("say what to keep: --older-than AGE, --keep-last N, or both")
    with open_store(ctx, create=False) as store:
        before = (
            store.clock() - timedelta(seconds=parse_duration(kw["older_than"]))
            if kw["older_than"]
            else None
        )
        rule = {"before": before, "keep_last": kw["keep_last"], "dry_run": kw["dry_run"]}
        wanted = [kind for kind in PRUNED if kind in kinds or not kinds]
        removed, spared = prune_kinds(store.database, wanted, **rule)
        if not kinds or "recordings" in kinds:
            report = prune(store.database, **rule)
            removed["recordings"], spared["recordings"] = (
                [p.recording for p in report.removed],
                list(report.kept),
            )
        if not kw["dry_run"]:
            store.database.vacuum()
    rows = [
        {"kind": k, "removed": len(names), "spared": len(spared[k]), "ids": names}
        for k, names in removed.items()
    ]
    from spectune.optimizer.report.tables import rows_table

    title = "would be removed" if kw["dry_run"] else "removed"
    data = {"removed": removed, "spared": spared, "dry_run": kw["dry_run"]}
    emit(as_json, data, lambda: rows_table(rows, ("kind", "removed", "spared", "ids"), title))


@db.command("upgrade")
@with_json
def db_upgrade(ctx: click.Context, as_json: bool) -> None:
    """Bring the database to this program's schema (a new one is created).

    \b
    Example:  cli.py --db postgresql://user@host/spectune db upgrade
    """
    from spectune.db.database import upgrade

    before, after = upgrade(ctx.find_root().obj)
    note = f"already at {after}" if before == after else f"{before or 'new'} -> {after}"
    emit(as_json, {"before": before, "after": after}, f"schema {note}")


@db.command("check")
@with_json
def db_check(ctx: click.Context, as_json: bool) -> None:
    """Check integrity, foreign keys, schema and the checksum of every chunk; exit code 1 if
    anything is wrong.

    \b
    Example:  cli.py db check
    """
    from spectune.db.check import check

    report = check(ctx.find_root().obj)
    emit(
        as_json,
        report.to_json(),
        "\n".join(report.problems) if not report.ok else "the database is sound",
    )
    if not report.ok:
        ctx.exit(1)
