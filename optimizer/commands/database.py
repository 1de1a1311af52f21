"""`db`: the schema, and whether all is sound."""

from __future__ import annotations

import click

from spectune.optimizer.commands.shared import emit, json_option, with_context


@click.group()
def db() -> None:
    """The database: upgrade, check."""


@db.command("upgrade")
@json_option
@with_context
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
@json_option
@with_context
def db_check(ctx: click.Context, as_json: bool) -> None:
    """Check integrity, foreign keys, schema and the checksum of every chunk; exit code 1 if anything is wrong.

    \b
    Example:  cli.py db check
    """
    from spectune.db.check import check

    report = check(ctx.find_root().obj)
    emit(as_json, report.to_json(), "\n".join(report.problems) if not report.ok else "the database is sound")
    if not report.ok:
        ctx.exit(1)
