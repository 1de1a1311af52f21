"""The door: gathers the commands (:mod:`optimizer.commands`), and turns errors into one line.

Importing this module imports no torch, so that --help answers at once; commands import what they need.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click

from optimizer.commands import circle
from optimizer.commands.database import db
from optimizer.commands.fits import fit
from optimizer.commands.policies import policies
from optimizer.commands.recordings import traces
from optimizer.commands.schedules import schedule
from optimizer.commands.shared import with_context

DEFAULT_DB = "spectune.db"


class Door(click.Group):
    """Turns the project's errors into one line on stderr and exit code 2, and Ctrl-C into 130."""

    def invoke(self, ctx: click.Context) -> Any:
        from db.errors import DatabaseError
        from traces.errors import SpectuneError
        from traces.text import printable

        # A second Ctrl-C may come while the first one's connections are handed back; the pool would log that with a traceback.
        logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
        try:
            return super().invoke(ctx)
        except (SpectuneError, DatabaseError) as error:
            click.echo(f"error: {printable(' '.join(str(error).splitlines()))}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted; what was committed is kept, the same command goes on from there", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(1)


def _show_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("spectune")
    except PackageNotFoundError:
        found = "not installed, run from its source folder"
    click.echo(f"spectune, {found}")
    ctx.exit()


@click.group(cls=Door, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--db", "db_url", envvar="SPECTUNE_DB", default=DEFAULT_DB, show_default=True, help="Database: a file, or postgresql://..."
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version and exit."
)
@with_context
def main(ctx: click.Context, db_url: str) -> None:
    """Finds, proves and keeps the best speculative-decoding policy for your models, device and traffic.

    \b
    Start here:  cli.py tune              record, search, execute, publish for the demo pair
                 cli.py generate "def "   decode with the policy in force
    """
    ctx.obj = db_url


for command in (circle.record, circle.profile, circle.simulate, circle.run, circle.tune, circle.generate):
    main.add_command(command)
for group in (fit, policies, traces, db, schedule):
    main.add_command(group)

if __name__ == "__main__":
    main()
