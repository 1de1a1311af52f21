"""The door: the commands of :mod:`spectune.api` with options made from :mod:`spectune.settings`;
errors become one line.

Importing this module imports no torch, so that --help answers at once.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from difflib import get_close_matches
from types import FrameType
from typing import Any

try:
    import click

    from spectune import api
    from spectune.options import (
        Option,
        options_of,
        read_config,
        settings_of,
        unknown,
        where_in_words,
    )
    from spectune.settings import Settings, Tune
    from spectune.traces.errors import ConfigError, SpectuneError
    from spectune.traces.text import one_line
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    # Started as a file, by a Python that nothing was installed for.
    print(
        f"error: {error.name} is not installed for {sys.executable}; `make tune` installs into "
        ".venv, whose command is .venv/bin/spectune",
        file=sys.stderr,
    )
    sys.exit(2)

RESUMING = ("record", "tune", "schedule", "follow", "retrace")
"""Commands that go on, typed again, with what an interrupted one has committed."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: what Ctrl-C would have closed is closed; a second one kills at once."""


def _terminate(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Terminated


class Door(click.Group):
    """Turns the project's errors and the system's into one line on stderr and exit code 2, any
    other into one line and exit code 1, Ctrl-C into 130 and SIGTERM into 143."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for argument in args:
            if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in argument):
                raise click.UsageError(f"{one_line(argument)}: no text (NUL, or no UTF-8)")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        from spectune.db.database_errors import DatabaseError

        # A second Ctrl-C may come while the first one's connections are handed back; the pool would
        # log that with a traceback.
        logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, _terminate) if in_main else None
        try:
            return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            _refuse(ctx, _usage(error))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(1)
        except (SpectuneError, DatabaseError) as error:
            _refuse(ctx, str(error))
        except OSError as error:
            # What no command foresaw: a name that is too long, a folder that went away, a full
            # disk.
            _refuse(ctx, f"{error.filename or 'the system'}: {error.strerror or error}")
        except (click.exceptions.Exit, click.exceptions.Abort):
            raise
        except KeyboardInterrupt as stopped:
            resumes = ctx.invoked_subcommand in RESUMING
            then = "goes on from there" if resumes else "begins anew"
            click.echo(
                f"interrupted; what was committed is kept, the same command {then}", err=True
            )
            ctx.exit(143 if isinstance(stopped, Terminated) else 130)
        except Exception as error:
            _unexpected(error)
            ctx.exit(1)
        finally:
            if in_main:
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _refuse(ctx: click.Context, message: str) -> None:
    click.echo(f"error: {one_line(message)}", err=True)
    ctx.exit(2)


def _unexpected(error: Exception) -> None:
    """Says what nobody foresaw in one line, and in which file its traceback is."""
    said = ": ".join([*getattr(error, "__notes__", ()), type(error).__name__, str(error)])
    try:
        file, path = tempfile.mkstemp(prefix="spectune-", suffix=".txt")
        with open(file, "w", encoding="utf-8", errors="backslashreplace") as out:
            out.writelines(traceback.format_exception(error))
    except OSError:
        raise error from None
    click.echo(f"error: {one_line(said, 1_000)}; unexpected: the traceback is in {path}", err=True)


def _usage(error: click.UsageError) -> str:
    """What click refuses: a command or an option that there is not, with the nearest."""
    ctx = error.ctx
    path = " ".join(ctx.command_path.split()[1:]) if ctx is not None else ""
    if isinstance(error, click.NoSuchOption) and ctx is not None:
        further = {o.name: key for key, o in getattr(ctx.command, "further", {}).items()}
        name = error.option_name.lstrip("-")
        if name in further:
            return f"no option {error.option_name} of `{path}`: say --set {further[name]}=VALUE"
        options = [p for p in ctx.command.params if isinstance(p, click.Option)]
        if any(p.name == name for p in ctx.command.params if p not in options):
            return f"no option {error.option_name} of `{path}`: write {name.upper()} without it"
        flags = [opt.lstrip("-") for p in options for opt in p.opts]
        near = get_close_matches(name, [*flags, *further], n=1)
        if near and near[0] not in flags:
            return f"no option {error.option_name}; did you mean --set {further[near[0]]}=VALUE?"
        hint = f"did you mean --{near[0]}?" if near else f"see `{path} --help`"
        return f"no option {error.option_name}; {hint}"
    if isinstance(ctx and ctx.command, click.Group) and "No such command" in error.message:
        names = list(ctx.command.commands)  # type: ignore[union-attr]
        word = error.message.split("'")[1]
        near = get_close_matches(word, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
        return f"no command {word!r}; {hint}"
    return error.format_message()


class Command(click.Command):
    """A command made from its settings (:data:`spectune.api.COMMANDS`)."""

    def __init__(self, path: str) -> None:
        self.path, self.model = path, api.COMMANDS[path][0]
        self.options = options_of(self.model)
        self.further = {k: o for k, o in self.options.items() if o.hidden}
        params = [_parameter(o) for k, o in self.options.items() if k != "db" and not o.hidden]
        json_help = "Print one JSON object."
        params.append(click.Option(["--json", "as_json"], is_flag=True, help=json_help))
        if self.further:
            set_help = "One of the further settings (--help-all); repeatable."
            params += [
                click.Option(["--set"], multiple=True, metavar="KEY=VALUE", help=set_help),
                click.Option(
                    ["--help-all"], is_flag=True, is_eager=True, expose_value=False,
                    callback=self._help_all, help="All settings.",
                ),
            ]  # fmt: skip
        about = inspect.cleandoc(self.model.__doc__ or "")
        text = f"{about}\n\n\b\nExample:  spectune {self.model.example}"
        super().__init__(path.split()[-1], params=params, callback=self._run, help=text)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Those of a tuning by where they act."""
        by_keyword = {o.keyword: o for o in self.options.values()}
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                sections.setdefault(self._acts(by_keyword.get(param.name or "")), []).append(row)
        for where, rows in sections.items():
            with formatter.section(f"Options {where}".strip()):
                formatter.write_dl(rows)

    def _acts(self, option: Option | None) -> str:
        """Where an option of a tuning acts; empty where it acts everywhere, and for others."""
        if option is None or not issubclass(self.model, Tune):
            return ""
        return where_in_words(option.acts)

    def _help_all(self, ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if not value:
            return
        formatter = ctx.make_formatter()
        sections: dict[str, list[tuple[str, str]]] = {}
        for key, o in self.further.items():
            sections.setdefault(self._acts(o), []).append((f"{key}={o.kind.metavar}", _help(o)))
        for where, rows in sections.items():
            title = " ".join(filter(None, ("Further settings", where)))
            with formatter.section(f"{title} (--set KEY=VALUE, or in spectune.toml)"):
                formatter.write_dl(rows)
        click.echo(f"{ctx.get_help()}\n\n{formatter.getvalue()}", nl=False)
        ctx.exit()

    def settings(self, typed: Mapping[str, Any], db: str | None, config: str | None) -> Settings:
        """What is typed, with the environment and the file. Raises ConfigError."""
        keys = {o.key if o.argument else o.keyword: key for key, o in self.options.items()}
        values = {keys[k]: v for k, v in typed.items() if k in keys and v is not None and v != ()}
        values |= self._set(typed.get("set", ()))
        if db is not None:
            values["db"] = db
        file = None if self.path == "init" else read_config(config)
        return settings_of(self.model, values, file)

    def _run(self, as_json: bool, **typed: Any) -> None:
        ctx = click.get_current_context()
        settings = self.settings(typed, **ctx.find_root().params)
        from spectune.optimizer.commands.terminal import Terminal

        with Terminal(as_json=as_json) as terminal:
            result = api.perform(self.path, settings, terminal.talk)
            terminal.print(result)
        if result.failed is not None:  # what it found is printed first
            raise result.failed
        ctx.exit(result.exit_code)

    def _set(self, items: tuple[str, ...]) -> Mapping[str, Any]:
        """Values by key of ``--set``. Raises ConfigError."""
        values: dict[str, Any] = {}
        for item in items:
            key, equals, value = item.partition("=")
            group, _, name = key.rpartition(".")
            if not equals:
                raise ConfigError(f"--set {item}: write --set KEY=VALUE")
            if group in self.options:  # a dictionary: drafts.NAME=PATH
                values.setdefault(group, {})[name] = value
            elif key not in self.options:
                raise unknown(key, self.options, "key of --set")
            elif self.options[key].kind.many:
                values.setdefault(key, []).append(value)
            else:
                values[key] = value
        return values


def _parameter(option: Option) -> click.Parameter:
    """A field as click has it: its value stays text, which :mod:`spectune.settings` reads."""
    many, required = option.kind.many, option.field.is_required()
    if option.argument:
        name = option.key.upper() + "..." * many
        return click.Argument(
            [option.key], required=required, nargs=-1 if many else 1, metavar=name
        )
    flag: dict[str, Any] = {"default": None, "type": bool, "help": _help(option)}
    if option.field.annotation is not bool:
        names = [f"--{option.name}", option.keyword]
        return click.Option(names, multiple=many, metavar=option.kind.metavar, help=flag["help"])
    if not option.default:
        return click.Option([f"--{option.name}", option.keyword], flag_value=True, **flag)
    # On unless the option says otherwise.
    flag["help"] = f"Do not {flag['help'][0].lower()}{flag['help'][1:]}"
    return click.Option([f"--no-{option.name}", option.keyword], flag_value=False, **flag)


def _help(option: Option) -> str:
    notes = [f"default: {option.default_text}"] if option.default_text else []
    notes += [option.env] if option.env else []
    text = str(option.field.description)
    return text if option.field.annotation is bool or not notes else f"{text} [{'; '.join(notes)}]"


@click.group(
    cls=Door,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option("--db", metavar="FILE", help=_help(options_of(Settings)["db"]))
@click.option("--config", metavar="FILE", help="File of defaults; spectune.toml if it is there.")
@click.version_option(package_name="spectune", message="spectune, %(version)s")
def main(db: str | None, config: str | None) -> None:
    """Finds, proves and keeps the best speculative-decoding policy for your models, device and
    traffic.

    \b
    Start here:  spectune init --pair demo   a spectune.toml here: pair, workload, database
                 spectune tune               record, search, execute, publish
                 spectune generate "def "    decode with the policy in force
    """


GROUPS = {
    "schedule": "Tuning again and again: add, edit, list, remove, run.",
    "policies": "Policies: list, show, activate, rollback, rollout, abort, thaw, export.",
    "traces": "Stored requests: list, show, stats, compare, export, import.",
    "db": "The database: show, prune, check.",
}


def _add(path: str) -> None:
    *group, name = path.split()
    parent: click.Group = main
    if group:
        if group[0] not in main.commands:
            main.add_command(click.Group(group[0], help=GROUPS[group[0]]))
        parent = main.commands[group[0]]  # type: ignore[assignment]
    parent.add_command(Command(path), name)


for path in api.COMMANDS:
    _add(path)

if __name__ == "__main__":
    main(prog_name="spectune")
