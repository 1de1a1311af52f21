"""What all commands share: groups of options, and how a store is opened, a pair loaded, a result
printed."""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click
from click.core import ParameterSource

from spectune.optimizer.commands.config import PAIR_FOUND, RECORDINGS, RUNNING, blamed, option
from spectune.optimizer.commands.outputs import whole

if TYPE_CHECKING:
    from rich.console import Console

    from spectune.optimizer.estimate import Course
    from spectune.optimizer.execute import DecodeOptions
    from spectune.optimizer.overlong import Overlong
    from spectune.runtime.loading import LoadedPair
    from spectune.runtime.pair import PairSpec
    from spectune.runtime.policies.document import AnyPolicy
    from spectune.runtime.policies.prepared_chooser import AnyPlan
    from spectune.runtime.words import Words
    from spectune.traces.schema import LatencyProfile, Workload
    from spectune.traces.store import Publication, TraceStore
    from spectune.traces.workloads import Turns

F = TypeVar("F", bound=Callable[..., Any])


def with_context(command: F) -> F:
    """click.pass_context, typed so that a command keeps its own signature."""

    def passed(ctx: click.Context, *arguments: Any, **options: Any) -> Any:
        ctx.meta[RUNNING] = ctx
        return command(ctx, *arguments, **options)

    return cast(F, click.pass_context(functools.update_wrapper(passed, command)))


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order of ``--help``."""

    def apply(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


LARGEST: Final = 2**31 - 1
"""Largest count that an option takes: what an integer column of a database and the sizes of a
tensor hold."""


class Whole(click.IntRange):
    """A whole number from ``least`` to ``most``, which is never open."""

    def __init__(self, least: int, most: int = LARGEST) -> None:
        super().__init__(least, most)


class FiniteRange(click.FloatRange):
    """A number in a range. No comparison refuses nan, so it is refused by itself; infinity too,
    where the range is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


SEED: Final = click.IntRange(0, 2**32 - 1)
"""Seeds that every generator takes: numpy's and scikit-learn's end there."""

with_json = together(
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print one JSON object on stdout; all else goes to stderr.",
    ),
    with_context,
)
"""``--json``, and the command's context before its options."""
pair_options = together(
    option(
        "--pair",
        key="pair",
        envvar="SPECTUNE_PAIR",
        help="A pair file, or 'demo'; default: SPECTUNE_PAIR, or spectune.toml's.",
    ),
    click.option("--target", help="Target checkpoint, instead of --pair."),
    click.option(
        "--draft",
        "drafts",
        multiple=True,
        metavar="NAME=PATH",
        help="Draft checkpoint, with --target; repeatable.",
    ),
)


def _threads(_ctx: click.Context, _param: click.Parameter, threads: int | None) -> int | None:
    from spectune.runtime.pair import check_threads

    check_threads(threads)
    return threads


def _deployment(_ctx: click.Context, _param: click.Parameter, name: str | None) -> str | None:
    from spectune.optimizer.deployment import check_deployment

    return None if name is None else check_deployment(name)


deployment_option = option(
    "--deployment",
    key="deployment",
    envvar="SPECTUNE_DEPLOYMENT",
    default="default",
    show_default=True,
    callback=_deployment,
    help="Name under which a policy is in force; each has one.",
)
device_options = together(
    option(
        "--threads",
        key="threads",
        type=click.IntRange(1),
        callback=_threads,
        help="CPU threads; default: 1 for a small pair, else torch's choice.",
    ),
    option(
        "--device",
        key="device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
    ),
    option(
        "--dtype",
        key="dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
    ),
)
workload_options = together(
    option(
        "--workload",
        "workloads",
        key="workload",
        multiple=True,
        help="'demo' (default), files (JSONL, JSON, CSV, Parquet), or hf:NAME, a Hugging Face data "
        "set; repeatable.",
    ),
    option("--column", key="column", help="The column, or key, that holds the prompts."),
    click.option(
        "--category",
        "categories",
        multiple=True,
        help="Only requests of this category; repeatable.",
    ),
    click.option(
        "--all-turns",
        is_flag=True,
        help="Of several turns, each as a prompt (in a conversation with what was said before).",
    ),
    click.option("--first-turn", is_flag=True, help="Of several turns, the first alone."),
    click.option(
        "--limit",
        type=Whole(1),
        help="N requests, drawn from every file and category in proportion.",
    ),
    click.option(
        "--limit-seed",
        type=SEED,
        default=0,
        show_default=True,
        help="Another seed, other requests.",
    ),
    option(
        "--overlong",
        key="overlong",
        type=click.Choice(["error", "skip", "truncate"]),
        default="error",
        show_default=True,
        help="Prompts beyond the context: refuse, leave out, or cut their beginning.",
    ),
)
sampling_options = together(
    option("--max-new-tokens", key="max_new_tokens", type=Whole(1), default=128, show_default=True),
    option(
        "--temperature",
        key="temperature",
        type=FiniteRange(0.0, 10.0),
        default=0.0,
        show_default=True,
    ),
    option("--top-k", key="top_k", type=Whole(0), default=0, help="0: off."),
    option(
        "--top-p",
        key="top_p",
        type=FiniteRange(0.0, 1.0, min_open=True),
        default=1.0,
        help="1: off.",
    ),
    option("--seed", key="seed", type=SEED, default=0, show_default=True),
    option(
        "--verifier",
        key="verifier",
        type=click.Choice(["coupled", "rejection"]),
        default="coupled",
        show_default=True,
    ),
    option(
        "--stop",
        "stop_strings",
        key="stop",
        multiple=True,
        help="End a text at this string; repeatable.",
    ),
    click.option("--no-chat", is_flag=True, help="Do not apply the tokenizer's chat template."),
)
decoding_options = together(pair_options, workload_options, sampling_options, device_options)

search_options = together(
    click.option(
        "--trials",
        type=Whole(0, 1_000_000),
        default=400,
        show_default=True,
        help="Optuna trials beside the enumeration.",
    ),
    click.option(
        "--gamma-max",
        type=click.IntRange(2, 64),
        default=16,
        show_default=True,
        help="Longest drafts searched.",
    ),
    click.option(
        "--tree-width",
        type=click.IntRange(0, 32),
        default=8,
        show_default=True,
        help="Children of the widest trees recorded and searched (EAGLE-2's k); 0: chains only.",
    ),
    click.option(
        "--tree-depth",
        type=click.IntRange(1, 64),
        default=8,
        show_default=True,
        help="Levels of the deepest trees, HeteroSpec's extension included.",
    ),
    click.option(
        "--finalists",
        type=click.IntRange(1, 16),
        default=4,
        show_default=True,
        help="Policies executed beside the baselines, and beside drafts that may be as fast.",
    ),
)


def _workers(_ctx: click.Context, _param: click.Parameter, workers: str | None) -> str | None:
    if workers is None or (workers.isdecimal() and 0 < int(workers) <= 1024) or "://" in workers:
        return workers
    raise click.BadParameter(
        f"{workers!r} is neither a number of processes (4) nor a Dask scheduler's address "
        "(tcp://HOST:8786)."
    )


workers_option = click.option(
    "--workers",
    metavar="N|ADDRESS",
    callback=_workers,
    help="Work on N processes of this machine, or on a Dask cluster: its scheduler's address, "
    "tcp://HOST:8786.",
)


def search_asked(kw: dict[str, Any]) -> dict[str, Any]:
    """What of TuneOptions :data:`search_options` says. Raises TraceError for trees that are too
    large."""
    from spectune.optimizer.inputs import tree_size

    chosen = {
        name: kw.pop(name)
        for name in ("trials", "gamma_max", "tree_width", "tree_depth", "finalists")
    }
    if chosen["tree_width"]:
        tree_size(chosen["tree_width"], chosen["tree_depth"])
    else:
        chosen["tree_depth"] = 0
    return chosen


def decode_options(kw: dict[str, Any]) -> DecodeOptions:
    """What :data:`sampling_options` say, taken out of ``kw``."""
    from spectune.optimizer.execute import DecodeOptions
    from spectune.traces.schema import Sampling

    sampling = Sampling(kw.pop("temperature"), kw.pop("top_k"), kw.pop("top_p"), kw.pop("seed"))
    return DecodeOptions(
        sampling,
        kw.pop("max_new_tokens"),
        kw.pop("verifier"),
        tuple(kw.pop("stop_strings")),
        not kw.pop("no_chat"),
    )


def _typed(*options: str) -> bool:
    """Whether one of these was typed, and is no default of the environment's or the file's."""
    ctx = click.get_current_context()
    return any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in options)


def pair_spec(
    kw: dict[str, Any], store: TraceStore | None = None, recording: str | None = None
) -> PairSpec:
    """The pair meant, its checkpoints there, its options taken out of ``kw``: the one that is
    typed, else that of a recording that is, else the environment's or spectune.toml's, else of a
    ``recording`` by default. Imports no torch. Raises PairError, also where nothing names one: no
    pair is taken in silence."""
    from spectune.runtime.pair import PairSpec, read_pair
    from spectune.traces.errors import PairError

    ctx = click.get_current_context()
    pair, target, drafts = kw.pop("pair"), kw.pop("target"), kw.pop("drafts")
    if target is not None or drafts or _typed("pair"):
        spec = read_pair(pair if _typed("pair") else None, target, drafts)
    elif store is not None and recording is not None and (pair is None or _typed(*RECORDINGS)):
        where = f"the pair of recording {recording}"
        stored = store.get_pair(store.get_recording(recording).pair_id)
        ctx.meta[PAIR_FOUND] = spec = PairSpec.from_json(stored.document, where=where)
        try:
            spec.check()
        except PairError as error:
            raise PairError(f"{where}: {error}; say where it is now by --pair") from None
    elif pair is None:
        raise PairError(
            f"{ctx.info_name}: no pair is named; say --pair FILE (or --pair demo), "
            "set SPECTUNE_PAIR, or put pair = ... in spectune.toml (`init` writes one)"
        )
    else:
        with blamed(ctx, "pair", ctx.get_parameter_source("pair")):
            spec = read_pair(pair)
    spec.check()
    return spec


def load(kw: dict[str, Any], store: TraceStore, spec: PairSpec) -> LoadedPair:
    """Loads a pair as :data:`device_options` say, taken out of ``kw``. Raises PairError.

    What ``store`` holds of it under a former id is said (:func:`say_former`).
    """
    say_former(store, spec)
    from spectune.runtime.loading import load_pair

    return load_pair(
        spec, device=kw.pop("device"), dtype=kw.pop("dtype"), threads=kw.pop("threads")
    )


def say_former(store: TraceStore, spec: PairSpec) -> None:
    """Says in one line that an earlier version stored a pair under another id, while nothing new
    takes the place of what is there."""
    from spectune.runtime.pair import former_id

    known = {pair.id for pair in store.list_pairs()}
    if not known:
        return
    former = former_id(spec)
    if former not in known:
        return
    forces = [(device, store.active_publication(former, device)) for device in ("cpu", "cuda")]
    idle = [
        (device, was)
        for device, was in forces
        if was is not None and not store.active_version(spec.id, device)
    ]
    if spec.id in known and not idle:
        return
    again = "".join(
        f"; `policies activate {was.policy_id} --device {device}` puts in force again what was"
        for device, was in idle
    )
    say(
        f"pair {spec.name} was {former} by an earlier version, whose ids left out most of the "
        f"weights, and is {spec.id} now: what is stored under {former} may be of other weights and "
        f"is left alone; `tune` begins anew{again}",
        err=True,
    )


def workload_of(kw: dict[str, Any], spec: PairSpec, *, chat: bool) -> Workload:
    """Reads what :data:`workload_options` say, taken out of ``kw``, for a pair that is not loaded
    yet. Raises WorkloadError, also for a conversation without a chat template."""
    from spectune.optimizer.inputs import load_workload

    workload = load_workload(
        kw.pop("workloads"), turns=turns_of(kw), **{key: kw.pop(key) for key in DRAWN}
    )
    from spectune.runtime.words import check_conversations

    check_conversations(spec.target, workload.requests, chat=chat)
    return workload


DRAWN: Final = ("limit", "categories", "column", "limit_seed")
"""Options of a workload that :func:`optimizer.inputs.load_workload` takes as they are."""


def fit_to(
    pair: LoadedPair | Words, workload: Workload, options: DecodeOptions, overlong: Overlong
) -> Workload:
    """The workload with its prompts in the pair's context (:func:`optimizer.overlong.made_to_fit`);
    what was done is said."""
    from spectune.optimizer.overlong import made_to_fit

    kept, done = made_to_fit(pair, workload, options, overlong)
    if done:
        say(done, err=True)
    return kept


def turns_of(kw: dict[str, Any]) -> Turns | None:
    """What :data:`workload_options` say of turns, taken out of ``kw``; None where they say nothing.
    Raises click.UsageError for both."""
    every, first = kw.pop("all_turns"), kw.pop("first_turn")
    if every and first:
        raise click.UsageError("give either --all-turns or --first-turn, not both")
    return "all" if every else "first" if first else None


@contextmanager
def open_store(ctx: click.Context, *, create: bool = True) -> Iterator[TraceStore]:
    """The store of ``--db``. A database that does not exist is an error unless ``create``, and is
    made by what is stored first: a command that fails before leaves none behind. Raises
    DatabaseError."""
    from spectune.db.database import open_database
    from spectune.traces.store import TraceStore

    with open_database(ctx.find_root().obj, create=create, lazily=True) as database:
        yield TraceStore(database)


def on_pair_of(store: TraceStore, pair_id: str) -> None:
    """The commands that this one prints are of a stored pair, where it can be read."""
    from spectune.runtime.pair import PairSpec
    from spectune.traces.errors import PairError

    with suppress(PairError):
        spec = PairSpec.from_json(store.get_pair(pair_id).document, where=pair_id)
        click.get_current_context().meta[PAIR_FOUND] = spec


def check_policy(store: TraceStore, name: str, *, option: str = "--policy") -> None:
    """Raises PolicyError for a name that is no policy's: called before a model is loaded."""
    if name != "active":
        policy_named(store, name, "", "", option=option)


def console_for(stderr: bool = False) -> Console:
    """Rich's console, which reads no markup and no names of emoji in what it prints; 100 columns
    wide where there is no terminal."""
    from rich.console import Console

    is_known = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    width = None if is_known else 100
    return Console(
        stderr=stderr, width=width, soft_wrap=False, highlight=False, markup=False, emoji=False
    )


def emit(as_json: bool, data: Any, view: Any) -> None:
    """Prints ``data`` as JSON, or what ``view()`` builds as a table; a line of text as it is,
    control characters spelled out."""
    from rich.text import Text

    from spectune.traces.text import json_line, printable

    if as_json:
        click.echo(json_line(data))
        return
    built = view() if callable(view) else view
    console = console_for()
    if isinstance(built, str):
        console.print(Text(printable(built)), soft_wrap=not console.is_terminal)
    else:
        console.print(built)


def say(text: str, *, err: bool = False) -> None:
    """Prints lines that may hold what others wrote (:func:`traces.text.printable`), their commands
    whole."""
    from spectune.traces.text import printable

    ctx = click.get_current_context(silent=True)
    click.echo(printable(text if ctx is None else whole(ctx, text)), err=err)


class Meter:
    """Progress on stderr: a bar on a terminal, a line per phase otherwise. With a ``course`` one
    bar goes over all its stages, the time left beside it."""

    def __init__(self, course: Course | None = None) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._course, self._began = course, time.monotonic()
        last = [MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
        last = last if course is None else [TimeElapsedColumn(), TextColumn("{task.fields[left]}")]

        self._console = console_for(stderr=True)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=40 if course is None else 20),
            *last,
            console=self._console,
            disable=not self._live,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Meter:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        from spectune.traces.text import one_line

        phase = one_line(phase)
        key = phase.split(",")[0]
        if key not in self._tasks:
            bar = key if self._course is None else "all"
            if bar not in self._tasks:
                self._tasks[bar] = self._progress.add_task(phase, total=total, left="")
            self._tasks[key] = self._tasks[bar]
            if not self._live:
                click.echo(f"{key}: {total}", err=True)
        if self._course is None:
            self._progress.update(self._tasks[key], completed=done, total=total, description=phase)
            return
        from spectune.optimizer.estimate import spoken

        self._course.tell(key, done, total)
        left = self._course.left_s(time.monotonic() - self._began)
        self._progress.update(
            self._tasks[key],
            completed=self._course.done_s,
            total=self._course.total_s,
            description=f"{phase} {done}/{total}",
            left="" if left is None else f"{spoken(left)} left",
        )


def policy_named(
    store: TraceStore,
    name: str,
    pair_id: str,
    device: str,
    deployment: str = "default",
    *,
    option: str = "--policy",
    warns: Callable[[Publication], str] = lambda active: "",
) -> AnyPolicy:
    """A policy by built-in name, file, inline JSON, id, or ``active``; what ``warns`` says of the
    publication in force goes to stderr. Raises PolicyError."""
    from spectune.db.errors import NotFoundError
    from spectune.optimizer.inputs import named_policy, published_policy, stored_policy
    from spectune.runtime.policies.document import AUTOREGRESSIVE
    from spectune.traces.errors import PolicyError
    from spectune.traces.text import shortened

    found = named_policy(name)
    if found is not None:
        return found
    if name == "active":
        active = store.active_publication(pair_id, device, deployment)
        if active is None:
            say_unpublished(pair_id, device, deployment)
            return AUTOREGRESSIVE
        policy = published_policy(active)
        if warning := warns(active):
            say(f"warning: {warning}", err=True)
        return policy
    try:
        stored = store.get_policy(name)
    except NotFoundError as error:
        raise PolicyError(
            f"{option} {shortened(name)}: neither a file, a JSON document, 'active' nor "
            f"'autoregressive', and {shortened(str(error))} (see `policies list`)"
        ) from None
    return stored_policy(stored)


def say_unpublished(pair_id: str, device: str, deployment: str) -> None:
    say(
        f"no policy is published for pair {pair_id} on {device} in deployment {deployment}; "
        "decoding autoregressively",
        err=True,
    )


def prepared(
    store: TraceStore,
    pair: LoadedPair,
    name: str,
    options: DecodeOptions,
    profile: LatencyProfile | None,
    deployment: str = "default",
) -> AnyPlan:
    """A policy by name (:func:`policy_named`), ready to decode with a loaded pair. Says on stderr
    where it was tuned for another sampling. Raises PolicyError."""
    from spectune.optimizer.deployment import other_sampling

    sampling = options.sampling
    policy = policy_named(
        store,
        name,
        pair.id,
        pair.device.type,
        deployment,
        warns=lambda active: other_sampling(active, sampling, options.verifier),
    )
    from spectune.optimizer.artifacts import fitted
    from spectune.runtime.decoder import prepare_for

    return prepare_for(pair, policy, profile=profile, artifacts=fitted(store, pair.id))


def profile_of(
    store: TraceStore, wanted: str | None, pair_id: str, device: str
) -> LatencyProfile | None:
    """The profile named, else the latest of this pair and device; None where there is none."""
    found = store.get_profile(wanted) if wanted else store.latest_profile(pair_id, device)
    return None if found is None else found.profile


def dtype_of(pair: LoadedPair) -> str:
    return str(pair.target.dtype).removeprefix("torch.")


def same_pair(pair_id: str, pair: LoadedPair, recording: str) -> None:
    """Raises TraceError where a recording is of another pair than the one that is loaded."""
    from spectune.runtime.pair import former_id
    from spectune.traces.errors import TraceError

    if pair_id == pair.id:
        return
    if pair_id == former_id(pair.spec):
        raise TraceError(
            f"recording {recording} was made with pair {pair_id}, as {pair.spec.name} was called "
            "by an earlier version, whose ids left "
            "out most of the weights: it may be of others; `record` makes one of these"
        )
    raise TraceError(
        f"recording {recording} was made with pair {pair_id}, not with {pair.id} "
        f"({pair.spec.name}); give that pair"
    )
