"""The door: gathers the commands (:mod:`optimizer.commands`), and turns errors into one line.

Importing this module imports no torch, so that --help answers at once; commands import what they
need.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import click
from click.core import ParameterSource

from spectune.optimizer.commands.config import option, use_config
from spectune.optimizer.commands.database import db
from spectune.optimizer.commands.engines import engines
from spectune.optimizer.commands.fits import fit
from spectune.optimizer.commands.generate import generate
from spectune.optimizer.commands.init import init
from spectune.optimizer.commands.policies import policies
from spectune.optimizer.commands.printing import whole
from spectune.optimizer.commands.profile import profile
from spectune.optimizer.commands.record import record
from spectune.optimizer.commands.recordings import traces
from spectune.optimizer.commands.report import report
from spectune.optimizer.commands.run import run
from spectune.optimizer.commands.schedules import schedule
from spectune.optimizer.commands.simulate import simulate
from spectune.optimizer.commands.tune import tune
from spectune.traces.text import one_line

AGAIN_S = 0.5
"""Seconds until a Ctrl-C that nobody heard is raised again."""


RESUMING = ("record", "tune", "schedule")
"""Commands that go on, typed again, with what an interrupted one has committed."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: what Ctrl-C would have closed is closed; a second one kills at once."""


def _terminate(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Terminated


class _Interrupts:
    """Ctrl-C, raised again until it is heard: inside a callback (a weak reference's, a compiler's)
    Python drops it, or another error comes of it."""

    seen = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.seen = True
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        if number == signal.SIGINT or not self._heard():
            raise KeyboardInterrupt

    def _heard(self) -> bool:
        """Whether what is open is being closed because of it."""
        error = sys.exc_info()[1]
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__context__
        return error is not None


class Door(click.Group):
    """Turns the project's errors and the system's into one line on stderr and exit code 2, Ctrl-C
    into 130 and SIGTERM into 143."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for argument in args:
            if "\0" in argument or any("\ud800" <= character <= "\udfff" for character in argument):
                raise click.UsageError(
                    f"{one_line(argument)}: an argument that is no text (NUL, or bytes that are "
                    "not UTF-8)"
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        from spectune.db.errors import DatabaseError
        from spectune.traces.errors import SpectuneError

        # A second Ctrl-C may come while the first one's connections are handed back; the pool would
        # log that with a traceback.
        logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, _terminate) if in_main else None
        interrupts = _Interrupts()
        ours = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours:
            signal.signal(signal.SIGINT, interrupts)
            signal.signal(signal.SIGALRM, interrupts)
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            said = error.format_message()
            line = one_line(said)
            # A group without a command is an error whose message is its help.
            if line == said or (error.ctx is not None and said == error.ctx.get_help()):
                raise
            raise click.UsageError(line, error.ctx) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(1)
        except (SpectuneError, DatabaseError) as error:
            _refuse(ctx, str(error))
        except OSError as error:
            # What no command foresaw: a name that is too long, a folder that went away, a full
            # disk.
            _refuse(ctx, f"{error.filename or 'the system'}: {error.strerror or error}")
        except click.exceptions.Exit:
            raise
        except (KeyboardInterrupt, RuntimeError) as stopped:
            if isinstance(stopped, RuntimeError) and not interrupts.seen:
                raise
            resumes = ctx.invoked_subcommand in RESUMING
            then = "goes on from there" if resumes else "begins anew"
            click.echo(
                f"interrupted; what was committed is kept, the same command {then}", err=True
            )
            ctx.exit(143 if isinstance(stopped, Terminated) else 130)
        finally:
            if ours:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if in_main:
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _refuse(ctx: click.Context, message: str) -> None:
    click.echo(f"error: {whole(one_line(message))}", err=True)
    ctx.exit(2)


@click.group(
    cls=Door,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "show_default": True,
    },
)
@option(
    "--db db_url",
    "Database: a file, or postgresql://...",
    envvar="SPECTUNE_DB",
    default="spectune.db",
)
@option(
    "--config",
    "File of defaults; spectune.toml of the working folder if it is there.",
    envvar="SPECTUNE_CONFIG",
)
@click.version_option(package_name="spectune", message="spectune, %(version)s")
@click.pass_context
def main(ctx: click.Context, db_url: str, config: str | None) -> None:
    """Finds, proves and keeps the best speculative-decoding policy for your models, device and
    traffic.

    \b
    Start here:  cli.py init --pair demo   options for this folder: a pair, a workload, a database
                 cli.py tune               record, search, execute, publish
                 cli.py generate "def "    decode with the policy in force
    """
    found = None if ctx.invoked_subcommand == "init" else use_config(ctx, config)
    if found is not None and ctx.get_parameter_source("db_url") is ParameterSource.DEFAULT:
        db_url = str(found.values.get("database", db_url))
    ctx.obj = db_url


for command in (init, record, profile, simulate, run, tune, report, generate, fit):
    main.add_command(command)
for group in (policies, traces, db, schedule, engines):
    main.add_command(group)

if __name__ == "__main__":
    main()
