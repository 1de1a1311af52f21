"""Options that several commands have, and what they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from spectune.optimizer.commands.config import F, flag, option
from spectune.optimizer.commands.printing import note

if TYPE_CHECKING:
    from spectune.optimizer.execute import DecodeOptions
    from spectune.runtime.pair import PairSpec
    from spectune.traces.schema import Workload
    from spectune.traces.workloads import Turns

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


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """So long ago (``24h``), or a date or time in UTC (``2026-11-25T09:00``)."""

    name = "AGE|TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from spectune.optimizer.schedule.times import ScheduleError, parse_duration

        if not isinstance(value, str):
            return value
        try:
            return datetime.now(UTC) - timedelta(seconds=parse_duration(value))
        except ScheduleError as error:
            try:
                moment = datetime.fromisoformat(value)
                return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
            except (ValueError, OverflowError):
                name = param.opts[0] if param else "time"
                raise ScheduleError(f"{name}: {error}, or 2026-11-25T09:00") from None


MOMENT: Final = Moment()
SEED: Final = Whole(0, 2**32 - 1)
"""Seeds that every generator takes: numpy's and scikit-learn's end there."""
TEMPERATURE: Final = FiniteRange(0.0, 10.0)
TOP_P: Final = FiniteRange(0.0, 1.0, min_open=True)
FILE: Final = click.Path(dir_okay=False)
"""A file, no folder."""


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order of ``--help``."""

    def apply(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def checked(check: Callable[[Any], Any]) -> Callable[..., Any]:
    """A callback of an option whose value is what ``check`` makes of it; None stays."""

    def callback(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
        return None if value is None else check(value)

    return callback


def _threads(threads: int) -> int:
    from spectune.runtime.pair import check_threads

    check_threads(threads)
    return threads


def _deployment(name: str) -> str:
    from spectune.optimizer.deployment import check_deployment

    return check_deployment(name)


def _workers(workers: str) -> str:
    if "://" in workers:
        return workers
    raise click.BadParameter(
        f"{workers!r} is no Dask scheduler's address (tcp://HOST:8786); the cores of this machine "
        "are used without it."
    )


pair = together(
    option(
        "--pair",
        "A pair file, or 'demo'; default: SPECTUNE_PAIR, or spectune.toml's.",
        key="pair",
        envvar="SPECTUNE_PAIR",
    ),
    option("--target", "Target checkpoint, instead of --pair."),
    option(
        "--draft drafts",
        "Draft checkpoint, with --target; repeatable.",
        multiple=True,
        metavar="NAME=PATH",
    ),
)
deployment = option(
    "--deployment",
    "Name under which a policy is in force; each has one.",
    key="deployment",
    envvar="SPECTUNE_DEPLOYMENT",
    default="default",
    callback=checked(_deployment),
)
device = option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), key="device", default="auto"
)
devices = together(
    option(
        "--threads",
        "CPU threads; default: 1 for a small pair, else torch's choice.",
        click.IntRange(1),
        key="threads",
        callback=checked(_threads),
    ),
    device,
    option(
        "--dtype",
        type=click.Choice(["auto", "float64", "float32", "bfloat16", "float16"]),
        key="dtype",
        default="auto",
    ),
)
place = together(pair, device, deployment)
workload = together(
    option(
        "--workload workloads",
        "'demo' (default), or files (JSONL, JSON, CSV, Parquet); repeatable.",
        key="workload",
        multiple=True,
    ),
    option(
        "--column",
        "The column, or key, that holds the prompts, in the rows that have it.",
        key="column",
    ),
    option(
        "--bad-rows",
        "Rows that hold no prompt: leave out a few (a quarter at most), refuse the first, or leave "
        "out all.",
        click.Choice(["few", "error", "skip"]),
        key="bad_rows",
        default="few",
    ),
    option("--category categories", "Only requests of this category; repeatable.", multiple=True),
    flag(
        "--all-turns",
        "Of several turns, each as a prompt (in a conversation with what was said before).",
    ),
    flag("--first-turn", "Of several turns, the first alone."),
    option("--limit", "N requests, drawn from every file and category in proportion.", Whole(1)),
    option("--limit-seed", "Another seed, other requests.", SEED, default=0),
    option(
        "--overlong",
        "Prompts beyond the context: refuse, leave out, or cut their beginning.",
        click.Choice(["error", "skip", "truncate"]),
        key="overlong",
        default="error",
    ),
)

sampling = together(
    option("--max-new-tokens", type=Whole(1), key="max_new_tokens", default=128),
    option("--temperature", type=TEMPERATURE, key="temperature", default=0.0),
    option("--top-k", "0: off.", Whole(0), key="top_k", default=0),
    option("--top-p", "1: off.", TOP_P, key="top_p", default=1.0),
    option("--seed", type=SEED, key="seed", default=0),
    option(
        "--verifier",
        type=click.Choice(["coupled", "rejection"]),
        key="verifier",
        default="coupled",
    ),
    option(
        "--stop stop_strings", "End a text at this string; repeatable.", key="stop", multiple=True
    ),
    flag("--no-chat", "Do not apply the tokenizer's chat template."),
)
decoding = together(pair, workload, sampling, devices)
search = together(
    option("--trials", "Optuna trials, dealt among the drafts.", Whole(0, 1_000_000), default=400),
    option("--gamma-max", "Longest drafts searched.", Whole(2, 64), default=16),
    option(
        "--tree-width",
        "Children of the widest trees recorded and searched (EAGLE-2's k); 0: chains only.",
        Whole(0, 32),
        default=8,
    ),
    option(
        "--tree-depth",
        "Levels of the deepest trees, HeteroSpec's extension included.",
        Whole(1, 64),
        default=8,
    ),
    option(
        "--finalists",
        "Policies executed beside the baselines, and beside drafts that may be as fast.",
        Whole(1, 16),
        default=4,
    ),
)
workers = option(
    "--workers",
    "Record on a Dask cluster too: its scheduler's address, tcp://HOST:8786.",
    metavar="ADDRESS",
    callback=checked(_workers),
)
per_round = option("--per-round", "Write one JSON line per round.", FILE)


def search_asked(kw: dict[str, Any]) -> dict[str, Any]:
    """What of TuneOptions :data:`search` say. Raises TraceError for trees that are too
    large."""
    from spectune.optimizer.inputs import tree_size
    from spectune.optimizer.schedule.settings import SEARCHED

    chosen = {name: kw[name] for name in SEARCHED}
    if chosen["tree_width"]:
        tree_size(chosen["tree_width"], chosen["tree_depth"])
    else:
        chosen["tree_depth"] = 0
    return chosen


def decode_options(kw: dict[str, Any]) -> DecodeOptions:
    """What :data:`sampling` say."""
    from spectune.optimizer.execute import DecodeOptions
    from spectune.traces.schema import Sampling

    sampling = Sampling(*(kw[key] for key in ("temperature", "top_k", "top_p", "seed")))
    stops, chat = tuple(kw["stop_strings"]), not kw["no_chat"]
    return DecodeOptions(sampling, kw["max_new_tokens"], kw["verifier"], stops, chat)


def workload_of(kw: dict[str, Any], spec: PairSpec) -> Workload:
    """Reads what :data:`workload` say, for a pair that is not loaded yet. Raises
    WorkloadError, also for a conversation without a chat template."""
    from spectune.runtime.text_codec import check_conversations

    workload = drawn(kw)
    check_conversations(spec.target, workload.requests, chat=not kw["no_chat"])
    return workload


def drawn(kw: dict[str, Any]) -> Workload:
    """The workload of :data:`workload`; how it was read is said. Raises WorkloadError."""
    from spectune.optimizer.inputs import load_workload

    own = {key: kw[key] for key in ("limit", "categories", "column", "limit_seed", "bad_rows")}
    workload = load_workload(kw["workloads"], turns=turns_of(kw), **own)
    for line in workload.notes:
        note(line)
    return workload


def turns_of(kw: dict[str, Any]) -> Turns | None:
    """What :data:`workload` say of turns; None where they say nothing. Raises
    click.UsageError for both."""
    if kw["all_turns"] and kw["first_turn"]:
        raise click.UsageError("give either --all-turns or --first-turn, not both")
    return "all" if kw["all_turns"] else "first" if kw["first_turn"] else None


def device_of(kw: dict[str, Any]) -> str:
    """``--device``, where ``auto`` is what torch would find."""
    from spectune.runtime.hardware import sees_cuda

    if kw["device"] != "auto":
        return str(kw["device"])
    return "cuda" if sees_cuda() else "cpu"
