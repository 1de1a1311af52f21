"""The API: every command as a function that takes its settings as keywords and returns a
:class:`Result`; the command line is a door to the same functions.

Importing this module imports neither torch nor a database: a function's module is imported when it
is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from spectune import settings as of
from spectune.options import from_keywords, options_of, read_config, settings_of
from spectune.settings import Settings
from spectune.traces.errors import ConfigError

if TYPE_CHECKING:
    from spectune.optimizer.commands.results import Result as Result
    from spectune.traces.store import TraceStore

COMMANDS: dict[str, tuple[type[Settings], str]] = {
    "init": (of.Init, "init.init"),
    "check": (of.Check, "check.check"),
    "record": (of.Record, "record.record"),
    "profile": (of.Profile, "profile.profile"),
    "simulate": (of.Simulate, "simulate.simulate"),
    "run": (of.RunCommand, "run.run"),
    "tune": (of.Tune, "tune.tune"),
    "fit": (of.Fit, "fit.fit"),
    "report": (of.Report, "report.report"),
    "status": (of.StatusCommand, "status.status"),
    "generate": (of.Generate, "run.generate"),
    "serve": (of.Serve, "service.serve.serve"),
    "control": (of.Control, "service.control.control"),
    "policies list": (of.PoliciesList, "policies.list_publications"),
    "policies show": (of.PoliciesShow, "policies.show"),
    "policies activate": (of.PoliciesActivate, "policies.activate"),
    "policies rollback": (of.PoliciesRollback, "policies.rollback"),
    "policies rollout": (of.PoliciesRollout, "rollouts.rollout"),
    "policies abort": (of.PoliciesAbort, "rollouts.abort"),
    "policies thaw": (of.PoliciesThaw, "rollouts.thaw"),
    "policies export": (of.PoliciesExport, "policies.export"),
    "traces list": (of.TracesList, "traces.list_recordings"),
    "traces show": (of.TracesShow, "traces.show"),
    "traces stats": (of.TracesStats, "traces.stats"),
    "traces compare": (of.TracesCompare, "compare.compare"),
    "traces export": (of.TracesExport, "traces.export"),
    "traces import": (of.TracesImport, "traces.import_"),
    "db show": (of.DbShow, "database.show"),
    "db prune": (of.DbPrune, "database.prune"),
    "db check": (of.DbCheck, "database.check"),
    "schedule add": (of.ScheduleAdd, "schedules.add"),
    "schedule edit": (of.ScheduleEdit, "schedules.edit"),
    "schedule list": (of.ScheduleList, "schedules.list_all"),
    "schedule remove": (of.ScheduleRemove, "schedules.remove"),
    "schedule run": (of.ScheduleRun, "work.run"),
    "engines": (of.Engines, "engines.engines"),
    "follow": (of.Follow, "follow.follow"),
    "retrace": (of.Retrace, "retrace.retrace"),
}
"""Every command: its settings, and the function that does it, of a module of
:mod:`spectune.optimizer.commands` or of one that is named in full."""

EXTRAS = {
    **dict.fromkeys(
        ("simulate", "traces compare", "report", "retrace", "policies rollout"), ("search",)
    ),
    **dict.fromkeys(("run", "generate", "profile"), ("native",)),
    **dict.fromkeys(("check", "record", "fit", "tune", "schedule run"), ("native", "search")),
    "serve": ("native", "serve"),
    "control": ("control",),
}
"""The extras of the package that commands need; others need none."""
LIBRARIES = {
    **dict.fromkeys(("torch", "transformers", "tokenizers", "joblib"), "native"),
    **dict.fromkeys(("numba", "scipy", "optuna", "sklearn", "matplotlib"), "search"),
    **dict.fromkeys(("httpx2", "jinja2"), "search"),
    **dict.fromkeys(("fastapi", "uvicorn"), "serve"),
    **{"psycopg": "postgresql", "pyarrow": "parquet", "distributed": "dask"},
}
"""The extra that a library comes with."""


def perform(command: str, settings: Settings, talk: Any) -> Result:
    """Does what a command's settings say. Raises SpectuneError and DatabaseError."""
    module, _, name = COMMANDS[command][1].rpartition(".")
    place = "spectune" if "." in module else "spectune.optimizer.commands"
    if isinstance(settings, of.OnPair):  # before a command imports torch
        common = import_module("spectune.optimizer.commands.common")
        common.check_pair(settings)
        if isinstance(settings, of.OnWorkload):
            common.check_templates(settings)
    try:
        function = getattr(import_module(f"{place}.{module}"), name)
        result: Result = function(settings, talk)
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library not in LIBRARIES:
            raise
        extras = ",".join(EXTRAS.get(command, (LIBRARIES[library],)))
        raise ConfigError(
            f"{command} needs {library}, which is not installed: pip install 'spectune[{extras}]'"
        ) from None
    return result


def _function(command: str) -> Callable[..., Result]:
    """A command as a function."""
    model = COMMANDS[command][0]
    options = options_of(model).values()
    words = [option.keyword for option in options if option.positional]

    def call(*positional: Any, progress: Any = None, **keywords: Any) -> Result:
        if len(positional) > len(words):
            raise ConfigError(f"{call.__name__}: at most {len(words)} arguments without a name")
        keywords |= zip(words, positional, strict=False)
        values = from_keywords(model, keywords)
        settings = settings_of(model, values, read_config(None), python=True)
        common, terminal = (
            import_module(f"spectune.optimizer.commands.{name}") for name in ("common", "terminal")
        )
        shown = terminal.meter_of_python() if progress is None else nullcontext(progress)
        with shown as meter:
            result = perform(command, settings, common.Talk(progress=meter))
        if result.failed is not None:
            raise result.failed
        return result

    call.__name__ = call.__qualname__ = command.replace(" ", "_")
    lines = [f"    {option.keyword}: {option.field.description}" for option in options]
    lines.append("    progress: Called with a phase, how much of it is done, and of how much.")
    call.__doc__ = "\n".join([model.__doc__ or "", "", *lines])
    first = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in words]
    names = dict.fromkeys(option.keyword for option in options if not option.positional)
    rest = [Parameter(name, Parameter.KEYWORD_ONLY) for name in (*names, "progress")]
    call.__signature__ = Signature([*first, *rest])  # type: ignore[attr-defined]
    return call


@contextmanager
def open(db: Any = None, *, create: bool = False) -> Iterator[TraceStore]:
    """The store of a database, closed at the end of the block: recordings, studies, publications.
    Without ``create`` it must exist, with it a new one is made by what is stored first. ``db`` is a
    file or a URL, by default as for every call. Raises DatabaseError."""
    values = {} if db is None else {"db": db}
    settings = settings_of(Settings, values, read_config(None), python=True)
    common = import_module("spectune.optimizer.commands.common")
    with common.open_store(settings, create=create) as store:
        yield store


FUNCTIONS = {command.replace(" ", "_"): _function(command) for command in COMMANDS}
__all__ = ["Result", "open", *FUNCTIONS]


def __getattr__(name: str) -> Any:
    """``Result``, and the functions."""
    if name == "Result":
        return import_module("spectune.optimizer.commands.results").Result
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    raise AttributeError(f"module 'spectune' has no attribute {name!r}")
