"""All that a user can say: the options of every command, the keys of ``spectune.toml`` and the
keywords of the Python calls are the fields of these models (:mod:`spectune.options`).

A field's place is its key (``sampling.temperature``), its option's name is the keyword in Python
(``temperature``) and, where the command shows it, the option (``--temperature``). Importing this
module imports neither torch nor a database.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    model_validator,
)

from spectune.traces.text import check_name

FILE = "spectune.toml"
LARGEST = 2**31 - 1
"""Largest count: what an integer column of a database and the sizes of a tensor hold."""
POOL_LIMIT = 8192
"""Most candidates of a tree, as :mod:`runtime.policies.blocks` has it."""
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


# ---------------------------------------------------------------------------------- kinds of values


@dataclass(frozen=True)
class OptionKind:
    """What the values of an option look like; ``many``: it may be repeated."""

    metavar: str
    many: bool = False


def _duration(value: Any) -> float:
    """Seconds of ``30s``, ``5m``, ``1h30m``, a timedelta or a number."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, str):
        parts = re.findall(r"(\d{1,9}(?:\.\d{1,9})?)(ms|[smhdw])", value)
        if not parts or "".join(map("".join, parts)) != value.strip():
            raise ValueError("a time is expected, such as 30s, 5m, 24h or 500ms")
        value = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not isinstance(value, (int, float)) or not 0 < value <= 1e9:
        raise ValueError("a time above 0 is expected, such as 30s, 5m, 24h or 500ms")
    return float(value)


def _moment(value: Any) -> datetime:
    """So long ago (``24h``), or a date or time (UTC where it says no zone)."""
    if isinstance(value, (timedelta, str)):
        try:
            return datetime.now(UTC) - timedelta(seconds=_duration(value))
        except (ValueError, OverflowError):
            pass
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a time is expected, such as 24h, 7d or 2026-11-25T09:00") from None


def _since(value: Any) -> timedelta | datetime:
    """An age, which counts from when it is used, or a moment (:func:`_moment`)."""
    if isinstance(value, timedelta):
        return value
    try:
        return timedelta(seconds=_duration(value))
    except (ValueError, OverflowError):
        return _moment(value)


def _since_text(value: timedelta | datetime) -> str:
    """As it may be typed: in hours or minutes where these are whole."""
    if isinstance(value, datetime):
        return value.isoformat()
    seconds = value.total_seconds()
    unit = next(
        unit for unit in ("h", "m", "s", "ms") if unit == "ms" or not seconds % _UNITS[unit]
    )
    return f"{seconds / _UNITS[unit]:g}{unit}"


def _text(value: Any) -> Any:
    """A path, or a policy's document, as text."""
    if isinstance(value, Mapping):
        return json.dumps(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _texts(value: Any) -> Any:
    """A tuple; of one where a single text, path or document stands."""
    return tuple(map(_text, value if isinstance(value, (list, tuple)) else [value]))


def _numbers(value: Any) -> Any:
    """``32,160,384`` as its parts."""
    return value.split(",") if isinstance(value, str) else value


def _by_name(value: Any) -> Any:
    """``NAME=PATH``, or paths named by their folders, as a dictionary."""
    if isinstance(value, (str, os.PathLike)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    paths = {}
    for item in value:
        name, equals, path = str(item).partition("=")
        if not equals:
            name, path = os.path.basename(name.rstrip("/\\")), name
        if not name or not path:
            raise ValueError("NAME=PATH is expected")
        if name in paths:
            raise ValueError(f"the name {name!r} is used twice")
        paths[name] = path
    return paths


def _deployment(value: str) -> str:
    return check_name(value, "deployment", ValueError)


def _device_name(value: Any) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\S.*)?", str(value)):
        raise ValueError("auto, cpu, cuda (of any name) or cuda:NAME is expected")
    return str(value)


def _size(value: Any) -> int:
    """Bytes of ``2GB``, ``500MB`` or a number."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?) ?([kMGT]?)B?", str(value).strip())
    if match is None:
        raise ValueError("a size is expected, such as 500MB or 2GB")
    return int(float(match[1]) * 1000 ** ("kMGT".find(match[2]) + 1 if match[2] else 0))


def _noted_texts(value: Any) -> str | float:
    """``all``, ``none`` or a share."""
    if value in ("all", "none"):
        return str(value)
    try:
        if 0 <= float(value) <= 1:
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ValueError("all, none or a share such as 0.1 is expected")


Duration = Annotated[float, BeforeValidator(_duration), OptionKind("TIME")]
Size = Annotated[int, BeforeValidator(_size), OptionKind("SIZE")]
NotedTexts = Annotated[str | float, BeforeValidator(_noted_texts), OptionKind("all|none|SHARE")]
Moment = Annotated[datetime, BeforeValidator(_moment), OptionKind("AGE|TIME")]
Since = Annotated[
    timedelta | datetime,
    BeforeValidator(_since),
    PlainSerializer(_since_text),
    OptionKind("AGE|TIME"),
]
AnyPath = Annotated[str, BeforeValidator(_text), OptionKind("FILE")]
PolicyName = Annotated[str, BeforeValidator(_text), OptionKind("POLICY")]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts), OptionKind("TEXT", many=True)]
PolicyNames = Annotated[tuple[str, ...], BeforeValidator(_texts), OptionKind("POLICY", many=True)]
Paths = Annotated[dict[str, str], BeforeValidator(_by_name), OptionKind("[NAME=]PATH", many=True)]
Lengths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=LARGEST)], ...],
    BeforeValidator(_numbers),
    OptionKind("N,N"),
]
Deployment = Annotated[str, BeforeValidator(_deployment), OptionKind("NAME")]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
EngineName = Literal["native", "vllm"]
Device = Literal["auto", "cpu", "cuda"]
DeviceName = Annotated[str, BeforeValidator(_device_name), OptionKind("DEVICE")]


WHERE = {
    "native": "on the native decoder",
    "engine": "with --engine",
    "server": "with --url",
    "texts": "where texts are decoded",
    "since": "with --since",
    "executed": "where policies are executed",
    "panoramas": "where drafts read texts",
    "load": "under a load",
    "alone": "without --arrivals",
    "search": "where policies are searched",
    "trees": "where trees are measured",
    "bins": "on bins",
    "classifier": "on classifier",
    "static-tree": "on static-tree",
    "router": "on router",
}
"""Where a setting may act, in words: on a bench, or where requests are decoded, a sample is taken,
policies are executed, and the like; what is fitted."""


def setting(
    default: Any,
    help: str,
    *,
    option: str = "",
    env: str = "",
    hidden: bool = False,
    argument: bool = False,
    positional: bool = False,
    acts: str = "",
    **bounds: Any,
) -> Any:
    """A field: its default, its help, its option where that has another name, and the environment
    variable that may say it. A ``hidden`` one has no option and is said by ``--set KEY=VALUE``; an
    ``argument`` is a word without an option's name, and in Python ``positional``, as others may be.
    A trailing underscore of a field's name is no part of its key. ``acts``: where it acts, some
    of :data:`WHERE`; everywhere if empty."""
    extra: dict[str, Any] = {"option": option, "env": env, "hidden": hidden, "argument": argument}
    extra["acts"] = acts.split()
    extra["positional"] = argument or positional
    return Field(default, description=help, json_schema_extra=extra, **bounds)


def argument(default: Any, help: str) -> Any:
    """A word of a command."""
    return setting(default, help, argument=True)


def group(default: Group, *options: str) -> Any:
    """Fields of a group, of which these have options of their own; the others are said by
    ``--set KEY=VALUE``."""
    return Field(default, json_schema_extra={"options": [*options]})


# ------------------------------------------------------------------------------------------- groups


class Group(BaseModel):
    """Fields that stand in a table of ``spectune.toml``. ``acts``: where those act that say nothing
    themselves (:func:`setting`)."""

    acts: ClassVar[str] = ""
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True,
        alias_generator=lambda name: name.rstrip("_"), validate_by_name=True,
    )  # fmt: skip


class RequestsSettings(Group):
    """Which requests of a workload, and how they are read."""

    acts: ClassVar[str] = "texts"

    limit: Count | None = setting(
        None,
        "N requests, drawn from every file and category alike.",
        acts="texts since engine server",
    )
    category: Texts = setting((), "Only requests of this category; repeatable.")
    seed: Seed = setting(0, "Another seed draws other requests.", option="limit-seed")
    column: str | None = setting(None, "The column, or key, that holds the prompts.")
    turns: Literal["first", "all"] | None = setting(
        None, "Of several turns, the first alone or each as a prompt."
    )
    bad_rows: Literal["few", "error", "skip"] = setting(
        "few",
        "Rows that cannot be read: leave out a few (at most a quarter), refuse, leave out all.",
    )
    overlong: Literal["error", "skip", "truncate"] = setting(
        "error",
        "Prompts beyond the context: refuse, leave out, or cut their beginning.",
    )


class SamplingSettings(Group):
    """How texts are decoded."""

    acts: ClassVar[str] = "texts"

    max_new_tokens: Count = setting(128, "Most tokens of a text.")
    temperature: float = setting(0.0, "0: greedy.", ge=0, le=10)
    top_k: int = setting(0, "0: off.", ge=0, le=LARGEST)
    top_p: float = setting(1.0, "1: off.", gt=0, le=1)
    seed: Seed = setting(0, "Seed of the texts.")
    verifier: Literal["coupled", "rejection"] = setting(
        "coupled", "How drafted tokens are accepted; rejection is for chains alone."
    )
    stop: Texts = setting((), "End a text at this string; repeatable.")
    chat: bool = setting(True, "Apply the tokenizer's chat template.")


class SearchSettings(Group):
    """What `tune` tries by replay."""

    gamma_max: int = setting(
        16, "Longest drafts recorded and searched.", ge=2, le=64, acts="native panoramas"
    )
    trials: int = setting(
        400,
        "Optuna trials, dealt among the drafts; for an engine so many tables of each draft.",
        ge=0,
        le=1_000_000,
    )
    seed: Seed = setting(0, "Seed of the search.", option="search-seed")
    by_prompt: bool = setting(
        False, "Try a policy for each prompt, too; reads all prompts.", acts="native"
    )


class TreesSettings(Group):
    """Draft trees that are recorded and searched."""

    acts: ClassVar[str] = "native"

    width: int = setting(
        8,
        "Children of a node (EAGLE-2's k); 0: chains only.",
        option="tree-width",
        ge=0,
        le=32,
    )
    depth: int = setting(8, "Levels of the deepest trees.", option="tree-depth", ge=1, le=64)

    @model_validator(mode="after")
    def _check_pool(self) -> TreesSettings:
        candidates = self.width + (self.depth - 1) * self.width**2
        if candidates > POOL_LIMIT:
            raise ValueError(
                f"trees of {candidates} candidates, more than any policy may grow ({POOL_LIMIT}); "
                "lower one of them"
            )
        return self


class RaceSettings(Group):
    """Executions that decide between the best by replay."""

    budget: Duration = setting(
        80.0, "Time for executing policies: race and confirmation.", acts="executed"
    )
    finalists: int = setting(
        4, "Policies executed beside the baselines.", ge=1, le=16, acts="native"
    )


class LoadSettings(Group):
    """How requests come, many at once."""

    acts: ClassVar[str] = "load"

    arrivals: str | None = setting(
        None,
        "recorded, FILE.csv, FILE.csv@RATE, poisson:RATE or clients:N; several with commas.",
    )
    unit: Literal["s", "ms"] | None = setting(
        None,
        "Unit of the numbers in a file of arrivals; default: as its format has it.",
        option="arrivals-unit",
    )
    objective: Literal["throughput", "tpot", "goodput"] | None = setting(
        None,
        "What is best: tokens/s (default for clients), time per token (default for requests that "
        "arrive), or requests/s within ttft and tpot.",
        acts="search",
    )
    ttft: Duration | None = setting(None, "Goodput: the most to the first token, e.g. 500ms.")
    tpot: Duration | None = setting(None, "Goodput: the most per later token, e.g. 40ms.")
    seats: int | None = setting(
        None,
        "Requests at once on the native decoder; default: the clients, else 8; at most 64.",
        ge=1,
        le=64,
        acts="native",
    )


# ------------------------------------------------------------------ what several commands have

TYPED = "typed"
"""Where a value stands that is typed, or given in Python."""


class Settings(Group):
    """What a command takes."""

    example: ClassVar[str] = ""
    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _file: str | None = PrivateAttr(default=None)

    db: AnyPath = setting("spectune.db", "Database: a file, or postgresql://...", env="SPECTUNE_DB")

    @property
    def sources(self) -> Mapping[str, str]:
        """What says the keys that are no defaults: ``typed``, a variable, or a file."""
        return self._sources

    @property
    def config_file(self) -> str | None:
        """The file of defaults that was read."""
        return self._file

    def typed(self, *keys: str) -> bool:
        """Whether one of these was typed."""
        return any(self._sources.get(key) == TYPED for key in keys)

    def as_typed(self, **values: Any) -> Self:
        """A copy in which these values stand as if they were typed."""
        copy = self.model_copy(update=values)
        copy._sources = {**self._sources, **dict.fromkeys(values, TYPED)}
        return copy

    def as_meant(self) -> Self:
        """What a command line means that gives arguments by their order."""
        return self


class OnPair(Settings):
    """Names a pair of models."""

    pair: Any = setting(None, "A pair file, or 'demo'.", env="SPECTUNE_PAIR")
    target: AnyPath | None = setting(
        None, "Target checkpoint, instead of a pair file.", hidden=True
    )
    drafts: Paths = setting({}, "Draft checkpoints by name, with a target.", hidden=True)


class InPlace(Settings):
    """Names a deployment."""

    deployment: Deployment = setting(
        "default", "Name under which a policy is in force.", env="SPECTUNE_DEPLOYMENT"
    )


class OnDevice(Settings):
    """Says where models run."""

    device: Device = setting("auto", "Device of the models.", acts="native server panoramas")
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = setting(
        "auto", "Type of the weights.", hidden=True, acts="native server panoramas"
    )
    threads: Count | None = setting(
        None, "CPU threads; by default 1 for a small pair.", hidden=True, acts="native executed"
    )


class OnWorkload(OnDevice, OnPair):
    """Names a workload, and how it is decoded. ``prompts`` are Python's: texts, objects as the
    lines of a workload are, or a Workload."""

    workload: Texts = setting(
        (), "'demo' (default), or files (JSONL, JSON, CSV, Parquet).", acts="texts"
    )
    prompts: Any = Field(None, exclude=True)
    requests: RequestsSettings = group(RequestsSettings(), "limit")
    sampling: SamplingSettings = group(SamplingSettings(), "max_new_tokens", "temperature")


class File(InPlace, OnWorkload):
    """What ``spectune.toml`` may hold."""

    search: SearchSettings = group(SearchSettings())
    trees: TreesSettings = group(TreesSettings())
    race: RaceSettings = group(RaceSettings())
    load: LoadSettings = group(LoadSettings())


# ----------------------------------------------------------------------------------------- commands


class Init(Settings):
    """Write a spectune.toml with every key and a comment."""

    example = "init --pair pair.json"

    pair: AnyPath | None = setting(None, "'demo', or a pair file: written into it.")
    out: AnyPath = setting(FILE, "The file.")
    force: bool = setting(False, "Replace a file that is there.")


class Filter(Settings):
    """Which stored requests are meant."""

    recording: Texts = setting((), "Id, beginning of one, or latest; repeatable.")
    request: str | None = setting(None, "Id of a request.")
    pair_id: str | None = setting(None, "Id or name of a pair.")
    source: str | None = setting(
        None, "Only these: record (by record and tune), serve (traffic), sample, profile."
    )
    category: Texts = setting((), "Only requests of this category; repeatable.")
    since: Moment | None = setting(None, "Decoded since so long ago (24h), or a moment (UTC).")
    until: Moment | None = setting(None, "Decoded before; as --since.")
    policy: PolicyName | None = setting(None, "Id or label of a policy that decoded some of it.")
    draft: str | None = setting(None, "A draft whose proposals are recorded, and are meant.")
    min_acceptance: Share | None = setting(None, "Least share of drafted tokens accepted.")
    max_acceptance: Share | None = setting(None, "Largest share of drafted tokens accepted.")


class TracesList(Filter):
    """Recordings that hold a matching request, newest first."""

    example = "traces list --category code --since 7d"


ROWS = "Show at most N."


class TracesShow(Filter):
    """A recording and its requests, a row per request and policy that decoded it; with --request
    its text and its rounds. RECORDING `all` means every recording."""

    example = "traces show all --sort tokens_per_s --rows 20 --since 24h"

    recording: str = argument(  # type: ignore[assignment]
        "latest", "Id, beginning of one, latest, or all."
    )
    sort: str | None = setting(None, "A column; - before it: largest first (`--sort=-seconds`).")
    rows: Count = setting(100, ROWS)


class TracesStats(Filter):
    """Acceptance by position in the draft, or tokens/s and tau.

    marginal: share of the chains drafted as far that are kept up to a position; conditional: of
    those that are kept up to the one before. tau: tokens a round, of rounds that were executed;
    mean accepted length: what tau were if rounds began at every position alike, and drafted all
    that is recorded."""

    example = "traces stats --by policy,day --since 7d"

    by: str | None = setting(
        None, "Comma-separated: draft, policy, category, day, recording, pair, source."
    )
    executed: bool = setting(False, "Acceptance over rounds executed, not over every start.")
    speed: bool = setting(False, "Tokens/s and tau of the rounds executed; --by policy too.")


class TracesCompare(Filter):
    """Two recordings, runs or policies (an id, a file, inline JSON) on the requests that both
    decoded: how many times as fast the first is, with its 95% interval."""

    example = "traces compare latest autoregressive --since 24h"

    left: PolicyName = argument(..., "The first.")
    right: PolicyName = argument(..., "The second.")


class TracesExport(Filter):
    """Rows to .json, .csv or .parquet; whole recordings, to be imported elsewhere."""

    example = "traces export rounds.parquet --per rounds --since 24h"

    out: AnyPath = argument(..., "The file.")
    per: Literal["requests", "rounds", "positions"] = setting(
        "requests", "A row for each of these (a position: of every draft's proposals)."
    )
    whole: bool = setting(False, "To .parquet: all that replay needs, for `traces import`.")


class TracesImport(Settings):
    """Add the recordings that `traces export --whole` wrote; what is here already stays."""

    example = "traces import recording.parquet"

    file: AnyPath = argument(..., "The file.")


class DbShow(Settings):
    """How many there are of each kind; of one kind (recordings, profiles, artifacts, studies, runs,
    policies, pairs, workloads) all, newest first; or what an id stands for, whatever it is of."""

    example = "db show runs --rows 20"

    what: str | None = argument(None, "A kind, an id, or the beginning of one.")
    rows: Count | None = setting(None, "Only the newest N.")


class DbPrune(Settings):
    """Remove what is old, of all kinds or of those named. What the evidence or the policy of a
    publication names is spared, and the newest profile of each pair, device and dtype."""

    example = "db prune recordings runs --older-than 30d --dry-run"

    kinds: Texts = argument((), "recordings, profiles, artifacts, studies or runs.")
    id: Texts = setting((), "Remove this one; repeatable.")
    older_than: Moment | None = setting(None, "Only what is older than, e.g., 30d.")
    keep_last: int | None = setting(None, "Of each kind, keep the newest N.", ge=0, le=LARGEST)
    force: bool = setting(False, "Remove even what a publication's evidence names.")
    dry_run: bool = setting(False, "Only say what would be removed.")


class DbCheck(Settings):
    """Check integrity, foreign keys, schema and every blob; exit code 1 if anything is wrong."""

    example = "db check"

    upgrade: bool = setting(False, "Make the tables of a new database first, or renew old ones.")


class Placed(InPlace, OnPair):
    """Where a policy is in force."""

    device: DeviceName = setting("auto", "Device that it is in force on: cpu, cuda, cuda:NAME.")


class StatusCommand(Settings):
    """What each deployment runs: the policy in force, since when and why, what it gained when it
    was confirmed, what its traffic has shown since, and what is scheduled."""

    example = "status"

    deployment: str | None = setting(None, "Only this one; default: all.")


class PoliciesList(OnPair):
    """Publications, newest first, and what each server did with them: all there are, or those of a
    pair and its device where one is named. For each deployment, pair and device the newest is in
    force."""

    example = "policies list --in-force"

    device: DeviceName = setting("auto", "Device that they are in force on.")
    deployment: str | None = setting(None, "Only publications of this one; default: of all.")
    in_force: bool = setting(False, "Only what is in force now.")


class PoliciesShow(Placed):
    """A policy document with every default spelled out, and the evidence it was published with;
    with two policies what differs between them."""

    example = "policies show candidate.json active"

    policy: PolicyName = argument("active", "A file, inline JSON, an id, or active.")
    other: PolicyName | None = argument(None, "Another one.")


WAIT = "Wait so long for the servers; exit code 1 where one refuses it or none applies it."


class PoliciesActivate(Placed):
    """Publish a policy: running decoders of the deployment take it up between two rounds, and
    `policies list` shows who did. What the deployment's engine, or each server that is followed
    there, cannot run is refused.

    A policy that was tuned keeps what sampling it was tuned for."""

    example = "policies activate active --from canary"

    policy: PolicyName = argument(..., "A file, inline JSON, an id, or active.")
    from_: str | None = setting(None, "Deployment whose `active` is promoted.")
    reason: str | None = setting(None, "Kept with it.")
    wait: Duration | None = setting(None, WAIT)


class PoliciesRollback(Placed):
    """Publish an earlier policy of the deployment again, as a new version: the last one that a
    server applied, or where none has answered that was published; typed again, the one before.
    What servers refused, and what a rollback has left, is passed over."""

    example = "policies rollback --wait 10s"

    to: Count | None = setting(None, "Version to go back to.")
    wait: Duration | None = setting(None, WAIT)


BLOCK = "Length of a rollout's blocks, one of each policy in turns."


class PoliciesRollout(Placed):
    """Have a policy take turns with what is in force on the servers that are followed, by blocks,
    until it is proved faster and published, does harm, or neither is shown. It is conducted until
    then; ended before, it goes on where this is typed again or `schedule run` runs."""

    example = "policies rollout candidate.json --deployment vllm"

    policy: PolicyName = argument(..., "A file, inline JSON, or an id.")
    reason: str | None = setting(None, "Kept with it.")
    first_token: Duration | None = setting(
        None, "Revert where 95% of the first tokens come no sooner."
    )
    conduct: bool = setting(True, "Conduct it here: leave that to `schedule run`.")
    block: Duration = setting(45.0, BLOCK, hidden=True)


class PoliciesAbort(Placed):
    """End the open rollout of a deployment: its servers go on with what is in force."""

    example = "policies abort --deployment vllm"

    reason: str = setting("by hand", "Kept with it.")


class PoliciesThaw(InPlace):
    """Let rollouts begin again in a deployment where three did harm."""

    example = "policies thaw --deployment vllm"


class PoliciesExport(Placed):
    """Print a policy as a document, or as another engine's settings where they can say the same:
    JSON on stdout, and on stderr the line that serves with them."""

    example = "policies export active --for vllm"

    policy: PolicyName = argument("active", "A file, inline JSON, an id, or active.")
    for_: Literal["spectune", "vllm", "sglang"] = setting("spectune", "Whose form.")


class Engines(OnPair):
    """The engines: which are installed, tested, and what each can do. `engines vllm` prints two
    command lines: a server with our agent, and `follow` beside it.

    It drafts --gamma tokens until a policy is published in its deployment, and what that says from
    the next step on. A --gamma-max above --gamma needs a schedule by batch size, with which vLLM
    captures other CUDA graphs from its start on (docs/vllm.md)."""

    example = "engines vllm --pair pair.json --draft small --gamma 3"

    engine: Literal["vllm"] | None = argument(None, "Print its server's command line.")
    draft: str | None = setting(None, "The draft that it loads, or ngram; default: the first.")
    gamma: int = setting(3, "Tokens drafted until something is published.", ge=1, le=64)
    gamma_max: int | None = setting(None, "Longest draft that it may be told.", ge=1, le=64)
    max_num_seqs: int = setting(256, "Most requests in a step.", ge=2, le=LARGEST)
    folder: AnyPath = setting("spectune-folder", "Where the agent and `follow` meet.")
    deployment: Deployment = setting("vllm", "Name of what it follows.", env="SPECTUNE_DEPLOYMENT")


class Follow(OnPair):
    """Follow a vLLM server by the folder that its agent writes into: requests go to the database,
    what is published goes into the folder (docs/production.md). Ends by Ctrl-C or SIGTERM; typed
    again it goes on where it was."""

    example = "follow /var/lib/spectune --pair pair.json --keep 7d"

    folder: AnyPath = argument(..., "The folder that SPECTUNE_FOLDER names at the server.")
    deployment: Deployment = setting("vllm", "Name of what it follows.", env="SPECTUNE_DEPLOYMENT")
    texts: NotedTexts | None = setting(
        None, "Requests whose tokens are stored: all, none or a share; default: as the agent says."
    )
    keep: Duration | None = setting(None, "Forget requests that ended longer ago, e.g. 7d.")
    keep_size: Size | None = setting(None, "Forget the oldest beyond this size, e.g. 2GB.")
    keep_files: Size = setting(0, "Keep files that are in, compressed, up to this size.")
    once: bool = setting(False, "Do what there is to do, then end.")
    metrics: str | None = setting(
        None, "Show Prometheus' metrics at this address: PORT, or HOST:PORT for other machines."
    )


class Check(OnWorkload):
    """Is a draft worth tuning? Before any server runs: whether it goes with the target, how many of
    its tokens are accepted on a few prompts, below what cost it gains, what it costs here, its
    memory, and how long a `tune` takes. Nothing is stored unless --db is typed."""

    example = "check models/target --draft models/small chats.jsonl"

    target: AnyPath | None = argument(None, "A target checkpoint, a pair file, or 'demo'.")
    drafts: Paths = setting({}, "Draft of the target; repeatable.", option="draft")
    workload: Texts = argument((), "Files of prompts; default: 'demo'.")
    requests: RequestsSettings = group(RequestsSettings(limit=32), "limit")
    sampling: SamplingSettings = group(
        SamplingSettings(max_new_tokens=64), "max_new_tokens", "temperature"
    )
    search: SearchSettings = group(SearchSettings(gamma_max=8), "gamma_max")
    budget: Duration = setting(60.0, "Read fewer prompts where all would take longer.")

    def as_meant(self) -> Self:
        """Beside --pair, all arguments are files of prompts."""
        if self.target is None or not self.typed("pair"):
            return self
        files = (self.target, *self.workload)
        copy = self.model_copy(update={"target": None, "workload": files})
        others = {key: said for key, said in self._sources.items() if key != "target"}
        copy._sources = {**others, "workload": TYPED}
        return copy


class Retrace(Settings):
    """Ask a running vLLM server what its draft proposes at every position of recorded texts, so
    that they are replayed under any number of draft tokens, of any method that vLLM has.

    The server needs spectune's agent and prefix caching (docs/engines.md). Typed again it goes on
    where it was."""

    example = "retrace latest --url http://localhost:8000 --folder /var/lib/spectune"

    recording: str = argument("latest", "Id of a recording, or the beginning of one.")
    url: str = setting(..., "The server, e.g. http://localhost:8000.")
    folder: AnyPath = setting(..., "The folder that SPECTUNE_FOLDER names at the server.")
    outstanding: int = setting(4, "Most requests that the server is sent at a time.", ge=1, le=256)
    share: float = setting(
        1.0, "Most of the time that they may be in the server: 0.1 beside traffic.", gt=0, le=1
    )


class Report(Settings):
    """What a tuning found, as one HTML page that needs nothing else: what to deploy and what that
    saves, predicted against measured, the race, latency, acceptance, what was tried and what not.

    STUDY is the id that `tune` printed, the beginning of one, or latest."""

    example = "report latest --out report.html --price 2.50 --gpus 8"

    study: str = argument("latest", "Id of a tuning.")
    out: AnyPath | None = setting(None, "The page; by default beside the database.")
    price: float | None = setting(None, "Price of a device for an hour, e.g. 2.50.", gt=0)
    gpus: int = setting(1, "Devices that serve this traffic.", ge=1, le=1_000_000)


WORKERS = "Record on a Dask cluster too: its scheduler's address, tcp://HOST:8786."


class WithPolicy(InPlace, OnWorkload):
    """Decodes a workload with a policy, by the native decoder or another engine."""

    policy: PolicyName = setting(
        "active", "A file, inline JSON, an id, active, autoregressive.", positional=True
    )
    engine: EngineName = setting("native", "What executes (`engines` lists what each can do).")
    concurrency: Count = setting(1, "Requests at a time.")


class RunCommand(WithPolicy):
    """Execute a policy on a workload and measure it. With --policy active, publications made
    meanwhile are picked up between two rounds."""

    example = "run --pair demo --policy policy.json --limit 32 --outputs texts.jsonl"

    requests: RequestsSettings = group(RequestsSettings(), "limit", "category")
    profile: str | None = setting(
        None, "Profile for windows that need costs; default: the latest.", hidden=True
    )
    outputs: AnyPath | None = setting(None, "Write the texts, one JSON line per request.")
    per_round: AnyPath | None = setting(None, "Write one JSON line per round.")
    record: bool = setting(False, "Keep the texts as a recording, for `tune` and schedules.")
    store: bool = setting(True, "Keep the run in the database.")


class Record(WithPolicy):
    """Decode a workload, store the texts, and compute each draft's proposals at every position.

    An unfinished recording of the same arguments is resumed. Trees are recorded on request; with
    --resume they may be made wider or deeper than before."""

    example = "record --pair pair.json --workload chats.jsonl --temperature 0.7"

    search: SearchSettings = group(SearchSettings(), "gamma_max")
    trees: TreesSettings = group(TreesSettings(width=0), "width", "depth")
    resume: str | None = setting(None, "Make the panoramas that this recording lacks.")
    fresh: bool = setting(
        False, "Begin anew instead of resuming an unfinished recording.", acts="texts"
    )
    workers: str | None = setting(None, WORKERS, hidden=True)


class Profile(OnDevice, OnPair):
    """Measure what every part of a round costs on this device.

    What drafting and verifying trees costs depends on the text, so `record` first. On an engine
    that batches, measure what its steps cost, with each draft of the pair and without: its
    recordings tell `simulate --arrivals` and `tune --arrivals` so."""

    example = "profile --pair pair.json --engine vllm --concurrency 8 --gamma-max 6"

    engine: EngineName = setting("native", "What executes (`engines` lists what each can do).")
    concurrency: Count | None = setting(
        None, "Measure from 1 to N requests at a time; default: 1, on an engine 8."
    )
    gamma_max: int | None = setting(
        None, "Longest drafts measured; default: 16, on an engine 8.", ge=1, le=64
    )
    contexts: Lengths = setting(
        (), "Context lengths; default: those that the recording serves.", acts="native"
    )
    repeats: int = setting(1, "Sweeps over all that is measured.", ge=1, le=10_000, acts="native")
    trees: bool = setting(True, "Measure what trees cost.", acts="native")
    recording: str | None = setting(
        None, "Measure on its texts; default: the pair's newest.", acts="trees engine"
    )


class Simulate(InPlace):
    """Replay a recording under any policy: rounds and tokens exactly, seconds by a latency profile.
    With --arrivals, under a load of many requests at once."""

    example = """simulate --policy '{"draft": "small", "window": {"kind": "fixed", "gamma": 4}}'"""

    policy: PolicyName = setting(
        ..., "A file, inline JSON, an id, active, or autoregressive.", positional=True
    )
    recording: str = setting(
        "latest", "Id of a recording, or the beginning of one.", positional=True
    )
    since: Moment | None = setting(
        None, "All decoded since so long ago (24h), or a moment.", acts="alone"
    )
    limit: Count | None = setting(
        None, "N requests, from every category alike; with --arrivals, so many arrive."
    )
    profile: str | None = setting(
        None, "Latency profile; default: the latest that fits.", acts="alone native"
    )
    engine: Literal["vllm"] | None = setting(None, "This engine's latest recording.")
    device: Device = setting("auto", "Whose profile; default: as recorded.", hidden=True)
    load: LoadSettings = group(LoadSettings(), "arrivals", "ttft", "tpot")
    per_round: AnyPath | None = setting(None, "Write one JSON line per round.", acts="alone")


class Tune(InPlace, OnWorkload):
    """Find the fastest policy, prove it by execution, and publish it.

    Records the workload (or resumes, or finds it recorded), profiles the device, searches in
    simulation, executes the best beside plain baselines on requests the search has not seen, and
    publishes the winner if it beats the incumbent beyond noise on others that were held out for
    this. With --arrivals, for a load of many requests at once, on the native decoder or an engine;
    with --url, on a vLLM server that runs (docs/vllm.md)."""

    example = "tune --pair pair.json --workload chats.jsonl --temperature 0.7 --budget 10m"

    device: Device = setting(
        "auto", "Device of the models.", hidden=True, acts="native server panoramas"
    )
    deployment: Deployment = setting(
        "default", "Name under which a policy is in force.", env="SPECTUNE_DEPLOYMENT"
    )
    recording: str | None = setting(None, "Tune on this recording; latest: the newest.")
    since: Since | None = setting(None, "Tune on a sample of what was decoded since, e.g. 24h.")
    engine: Literal["vllm"] | None = setting(None, "With --arrivals: its recording.")
    load: LoadSettings = group(LoadSettings(), "arrivals")
    serve: bool = setting(
        False, "With --engine: start servers, execute there, and publish.", acts="engine"
    )
    url: str | None = setting(None, "A vLLM server that runs: tune it, with --folder.")
    folder: AnyPath | None = setting(None, "With --url: the folder of its SPECTUNE_FOLDER.")
    search: SearchSettings = group(SearchSettings())
    trees: TreesSettings = group(TreesSettings())
    race: RaceSettings = group(RaceSettings(), "budget")
    quick: bool = setting(
        False, "About two minutes: chains only, fewer requests and trials.", acts="native"
    )
    publish: bool = setting(True, "Publish the winner.", acts="executed")
    rollout: bool = setting(
        False,
        "Publish by a rollout, which proves it on the servers' traffic.",
    )
    block: Duration = setting(45.0, BLOCK, hidden=True)
    fresh: bool = setting(
        False, "Record and profile anew, whatever is stored.", hidden=True, acts="native server"
    )
    report: AnyPath | None = setting(
        None, "The page; none: no page; default: beside the database.", hidden=True, acts="executed"
    )
    workers: str | None = setting(None, WORKERS, hidden=True, acts="native server")


class Generate(InPlace, OnDevice, OnPair):
    """Stream a text, showing which tokens were drafted and accepted and which the target
    supplied."""

    example = 'generate "def fibonacci(n):" --pair demo --max-new-tokens 64'

    prompt: str = argument(..., "The prompt.")
    policy: PolicyName = setting("active", "A file, inline JSON, an id, active, autoregressive.")
    compare: bool = setting(True, "Decode again autoregressively for comparison.")
    sampling: SamplingSettings = group(SamplingSettings(), "max_new_tokens", "temperature")


class Serve(InPlace, OnDevice, OnPair):
    """Serve a pair by OpenAI's HTTP API (docs/serve.md), many requests at once, under what is
    published, now and later; requests are recorded for `tune --since`. Ends by Ctrl-C or SIGTERM,
    when what is being answered has ended."""

    example = "serve --pair pair.json --port 8000"

    policy: PolicyName = setting("active", "A file, inline JSON, an id, active, autoregressive.")
    host: str = setting("127.0.0.1", "Address to listen on; beyond this machine needs --key-file.")
    port: int = setting(8000, "Port; 0: any that is free.", ge=0, le=65535)
    key_file: AnyPath | None = setting(None, "File with the key that requests must have.")
    seats: int | None = setting(
        None, "Texts decoded at once; default: 8 on a CPU, 1 on a GPU.", ge=1, le=64
    )
    waiting: Count = setting(64, "Texts that may wait for a seat; further requests get 429.")
    slots: Count | None = setting(
        None, "Tokens that the caches hold in all; default: they grow.", hidden=True
    )
    chat_tokens: Count = setting(1024, "New tokens of a chat that asks for no number.")
    timeout: Duration = setting(600.0, "The most that a request may take, waiting included.")
    drain: Duration = setting(30.0, "The most that answers may take after SIGTERM.")
    record: bool = setting(True, "Record what is served.")
    texts: NotedTexts = setting("all", "Requests whose tokens are stored: all, none or a share.")


class Working(Settings):
    """Jobs are run."""

    nice: int = setting(
        10, "Tunings yield processors: 10 takes a tenth of one that others want.", ge=0, le=19
    )


class Control(Working):
    """Watch a fleet: run due schedules, conduct rollouts, look for drift, and show what is in force
    and why: a page, JSON, Prometheus' metrics, probes (docs/production.md). By HTTP nothing can be
    changed. Any number may share a PostgreSQL database. Ends by Ctrl-C or SIGTERM, when the job at
    hand has."""

    example = "control --port 8090"

    host: str = setting(
        "127.0.0.1", "Address to listen on; beyond this machine needs --token-file."
    )
    port: int = setting(8090, "Port; 0: any that is free.", ge=0, le=65535)
    token_file: AnyPath | None = setting(None, "File with the token that requests must have.")
    schedules: bool = setting(True, "Run due schedules: leave them to `schedule run`.")
    look: Duration = setting(600.0, "How often to look for drift.", hidden=True)
    poll: Duration = setting(30.0, "How often to look for what is due.", hidden=True)


class Fitting(Group):
    """How much a fit takes; what is not said is as the paper, or the recording, has it. ``acts``:
    the kinds that take it."""

    depth: int | None = setting(
        None, "Levels of the trees.", ge=1, le=64, acts="bins classifier static-tree"
    )
    width: int | None = setting(None, "Children of a node.", ge=1, le=32, acts="bins classifier")
    top_n: int | None = setting(None, "Bins: nodes kept of a tree.", ge=1, le=256, acts="bins")
    nodes: int | None = setting(None, "Static tree: its nodes.", ge=1, le=256, acts="static-tree")
    starts: Count | None = setting(
        None, "Rounds of trees that are fitted to, at most.", acts="bins classifier"
    )
    hidden: int | None = setting(None, "Hidden units.", ge=2, le=65_536, acts="classifier router")
    epochs: int | None = setting(
        None, "Passes over the examples.", ge=1, le=1000, acts="classifier router"
    )
    clusters: Count | None = setting(
        None, "Token clusters; by default by the size of the head.", acts="router"
    )
    labels: Count | None = setting(
        None, "Router: most probable tokens that are positive.", acts="router"
    )
    contexts: Count | None = setting(
        None, "Router: contexts of a corpus; by default a million.", acts="router"
    )
    seed: Seed = setting(0, "Seed of the fit.", acts="bins classifier router")


class Fit(InPlace, OnDevice, OnPair):
    """Fit to a recording what policies need, and store it as an artifact.

    Of trees: bins (`stratify`, HeteroSpec), classifier (`growth`, C2T), static-tree (`growth`,
    Sequoia). Of shortlists: frequencies (FR-Spec), router (DynaSpec). Of prompts: chooser, a draft
    for each prompt."""

    example = "fit bins --draft small --set fit.depth=5"

    kind: Literal["bins", "classifier", "static-tree", "frequencies", "router", "chooser"] = (
        argument(..., "What is fitted.")
    )
    recording: str = setting("latest", "Id of a recording, or the beginning of one.")
    since: Since | None = setting(None, "A sample of what its pair decoded since (24h) instead.")
    draft: str | None = setting(None, "Draft that is fitted to, by name.")
    policy: PolicyNames = setting((), "Chooser: one of the policies to choose from; repeatable.")
    profile: str | None = setting(None, "Chooser: profile whose costs count; default: the latest.")
    corpus: Texts = setting(
        (), "Of shortlists: text, JSON lines or folders to fit to instead; repeatable."
    )
    fit: Fitting = group(Fitting())


class ScheduleAdd(Tune):
    """Add a schedule: a `tune` that workers (`schedule run`) do when it is due, with the settings
    of `tune`."""

    example = 'schedule add nightly --cron "0 3 * * *" --tz Europe/Berlin --since 24h'

    name: str = argument(..., "Its name.")
    cron: str = setting(..., 'Five fields, e.g. "0 3 * * *", or @hourly, @daily, @weekly.')
    tz: str = setting("UTC", "Time zone of the cron fields.")
    now: bool = setting(False, "Due at once, and then as --cron says.")


class ScheduleEdit(ScheduleAdd):
    """Change a schedule: what is said is new, all else stays, its history too. A run at hand ends
    as it began."""

    example = "schedule edit nightly --cron @weekly --budget 5m"

    cron: str | None = setting(None, "Other cron fields.")  # type: ignore[assignment]


class ScheduleList(Settings):
    """All schedules, with their last results; or one, with the attempts that ended."""

    example = "schedule list nightly"

    name: str | None = argument(None, "Its name.")


class ScheduleRemove(Settings):
    """Remove a schedule and its history; a worker that is busy with it publishes nothing."""

    example = "schedule remove nightly"

    name: str = argument(..., "Its name.")


class ScheduleRun(Working):
    """Work: run what is due, until SIGINT or SIGTERM, or with --once until nothing waits (for cron
    and systemd timers); or one schedule, now. Any number of workers may share a database."""

    example = "schedule run --poll 10s"

    name: str | None = argument(None, "Run this one now, due or not, then end.")

    poll: Duration = setting(30.0, "How often to look for what is due.")
    once: bool = setting(False, "Run what is due, then end.")
