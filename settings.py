"""All that a user can say: the options of every command, the keys of ``spectune.toml`` and the
keywords of the Python calls are the fields of these models.

A field's place is its key (``sampling.temperature``), its option's name is the keyword in Python
(``temperature``) and, where the command shows it, the option (``--temperature``). Importing this
module imports neither torch nor a database.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo

from spectune.traces.errors import ConfigError
from spectune.traces.files import read_text
from spectune.traces.text import check_name, shortened

FILE = "spectune.toml"
LARGEST = 2**31 - 1
"""Largest count: what an integer column of a database and the sizes of a tensor hold."""
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


# ---------------------------------------------------------------------------------- kinds of values


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


def _texts(value: Any) -> Any:
    """A tuple; of one where a single text or path is given."""
    return (os.fspath(value),) if isinstance(value, (str, os.PathLike)) else value


def _numbers(value: Any) -> Any:
    """``32,160,384`` as its parts."""
    return value.split(",") if isinstance(value, str) else value


def _named(value: Any) -> Any:
    """A list of ``NAME=PATH`` as a dictionary."""
    if not isinstance(value, (list, tuple)):
        return value
    named = {}
    for item in value:
        name, equals, path = str(item).partition("=")
        if not equals or not name or not path:
            raise ValueError("NAME=PATH is expected")
        if name in named:
            raise ValueError(f"the name {name!r} is used twice")
        named[name] = path
    return named


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _document(value: Any) -> Any:
    """A policy's document as text."""
    return json.dumps(value) if isinstance(value, Mapping) else _path(value)


def _documents(value: Any) -> Any:
    many = isinstance(value, (list, tuple))
    return tuple(map(_document, value)) if many else (_document(value),)


def _deployment(value: str) -> str:
    return check_name(value, "deployment", ValueError)


Duration = Annotated[float, BeforeValidator(_duration)]
Moment = Annotated[datetime, BeforeValidator(_moment)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Lengths = Annotated[tuple[Annotated[int, Field(ge=1, le=LARGEST)], ...], BeforeValidator(_numbers)]
Named = Annotated[dict[str, str], BeforeValidator(_named)]
AnyPath = Annotated[str, BeforeValidator(_path)]
PolicyName = Annotated[str, BeforeValidator(_document)]
PolicyNames = Annotated[tuple[str, ...], BeforeValidator(_documents)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
Engine = Literal["native", "vllm", "openvino"]


def setting(default: Any, help: str, *, option: str = "", env: str = "", **bounds: Any) -> Any:
    """A field: its default, its help, its option where that has another name, and the environment
    variable that may say it. A trailing underscore of a field's name
    is not part of its key."""
    return Field(
        default, description=help, json_schema_extra={"option": option, "env": env}, **bounds
    )


# ------------------------------------------------------------------------------------------- groups


class Group(BaseModel):
    """Fields that stand in a table of ``spectune.toml``."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True,
        alias_generator=lambda name: name.rstrip("_"), validate_by_name=True,
    )  # fmt: skip


class Requests(Group):
    """Which requests of a workload, and how they are read."""

    limit: Count | None = setting(None, "N requests, drawn from every file and category alike.")
    category: Texts = setting((), "Only requests of this category; repeatable.")
    seed: Seed = setting(0, "Another seed draws other requests.", option="limit-seed")
    column: str | None = setting(None, "The column, or key, that holds the prompts.")
    turns: Literal["first", "all"] | None = setting(
        None, "Of several turns, the first alone or each as a prompt."
    )
    bad_rows: Literal["few", "error", "skip"] = setting(
        "few", "Rows without a prompt: leave out a few (at most a quarter), refuse, leave out all."
    )
    overlong: Literal["error", "skip", "truncate"] = setting(
        "error", "Prompts beyond the context: refuse, leave out, or cut their beginning."
    )


class Sampling(Group):
    """How texts are decoded."""

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


class Search(Group):
    """What `tune` tries by replay."""

    gamma_max: int = setting(16, "Longest drafts recorded and searched.", ge=2, le=64)
    trials: int = setting(400, "Optuna trials, dealt among the drafts.", ge=0, le=1_000_000)
    seed: Seed = setting(0, "Seed of the search.", option="search-seed")


class Trees(Group):
    """Draft trees that are recorded and searched."""

    width: int = setting(
        8, "Children of a node (EAGLE-2's k); 0: chains only.", option="tree-width", ge=0, le=32
    )
    depth: int = setting(8, "Levels of the deepest trees.", option="tree-depth", ge=1, le=64)


class Race(Group):
    """Executions that decide between the best by replay."""

    budget: Duration = setting(80.0, "Time for executing policies: race and confirmation.")
    finalists: int = setting(4, "Policies executed beside the baselines.", ge=1, le=16)


class Load(Group):
    """How requests come to an engine that serves many at once."""

    arrivals: str | None = setting(
        None, "recorded, FILE.csv, FILE.csv@RATE, poisson:RATE or clients:N; several with commas."
    )
    objective: Literal["throughput", "tpot", "goodput"] = setting(
        "throughput", "What is best: tokens/s, time per token, or requests/s within ttft and tpot."
    )
    ttft: Duration | None = setting(None, "Goodput: the most to the first token, e.g. 500ms.")
    tpot: Duration | None = setting(None, "Goodput: the most per later token, e.g. 40ms.")


# ------------------------------------------------------------------ what several commands have


class Settings(Group):
    """What a command takes. ``arguments`` are words without an option's name; ``positional`` come
    first in Python; ``flags`` are the keys with options of their own (all where it is None), the
    others are said by ``--set KEY=VALUE``."""

    arguments: ClassVar[tuple[str, ...]] = ()
    positional: ClassVar[tuple[str, ...]] = ()
    flags: ClassVar[tuple[str, ...] | None] = None
    example: ClassVar[str] = ""
    _typed: frozenset[str] = PrivateAttr(default=frozenset())
    _said: frozenset[str] = PrivateAttr(default=frozenset())
    _config: Config | None = PrivateAttr(default=None)

    db: AnyPath = setting("spectune.db", "Database: a file, or postgresql://...", env="SPECTUNE_DB")

    def typed(self, *keys: str) -> bool:
        """Whether one of these was typed, and is no default of the environment's or the file's."""
        return any(key in self._typed for key in keys)

    @property
    def keys_said(self) -> frozenset[str]:
        """The keys that were typed, or that the environment or the file says."""
        return self._said

    @property
    def config(self) -> Config | None:
        """The file of defaults that was read."""
        return self._config

    def without_effect(self, *prefixes: str) -> str:
        """The options typed of these keys, to be named in a note; empty where there is none."""
        model, keys = type(self), sorted(self._typed)
        return ", ".join(spelled(model, key) for key in keys if key.startswith(prefixes))


class OnPair(Settings):
    """Names a pair of models."""

    pair: Any = setting(None, "A pair file, or 'demo'.", env="SPECTUNE_PAIR")
    target: AnyPath | None = setting(None, "Target checkpoint, instead of a pair file.")
    drafts: Named = setting({}, "Draft checkpoints by name, with a target.")


class InPlace(Settings):
    """Names a deployment."""

    deployment: Annotated[str, BeforeValidator(_deployment)] = setting(
        "default", "Name under which a policy is in force.", env="SPECTUNE_DEPLOYMENT"
    )


class OnDevice(Settings):
    """Says where models run."""

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Device of the models.")
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = setting(
        "auto", "Type of the weights."
    )
    threads: Count | None = setting(None, "CPU threads; by default 1 for a small pair.")


class Decoding(OnPair, OnDevice):
    """Names a workload, and how it is decoded. ``prompts`` are Python's: texts, objects as the
    lines of a workload are, or a Workload."""

    workload: Texts = setting((), "'demo' (default), or files (JSONL, JSON, CSV, Parquet).")
    prompts: Any = Field(None, exclude=True)
    requests: Requests = Requests()
    sampling: Sampling = Sampling()


class File(Decoding, InPlace):
    """What ``spectune.toml`` may hold."""

    search: Search = Search()
    trees: Trees = Trees()
    race: Race = Race()
    load: Load = Load()


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
    pair_id: str | None = setting(None, "Pair id.")
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

    arguments = positional = ("recording",)
    example = "traces show all --sort tokens_per_s --rows 20 --since 24h"

    recording: str = setting("latest", "Id, beginning of one, latest, or all.")  # type: ignore[assignment]
    sort: str | None = setting(None, "A column; - before it: largest first (`--sort=-seconds`).")
    rows: Count = setting(100, ROWS)


class TracesStats(Filter):
    """Acceptance by position in the draft, or tokens/s and tau.

    marginal: share of the chains drafted as far that are kept up to a position; conditional: of
    those that are kept up to the one before."""

    example = "traces stats --by policy,day --since 7d"

    by: str | None = setting(
        None, "Comma-separated: draft, policy, category, day, recording, pair, source."
    )
    executed: bool = setting(False, "Acceptance over rounds executed, not over every start.")
    speed: bool = setting(False, "Tokens/s and tau of the rounds executed; --by policy too.")


class TracesCompare(Filter):
    """Two recordings, runs or policies (an id, a file, inline JSON) on the requests that both
    decoded: how many times as fast the first is, with its 95% interval."""

    arguments = positional = ("left", "right")
    example = "traces compare latest autoregressive --since 24h"

    left: PolicyName = setting(..., "The first.")
    right: PolicyName = setting(..., "The second.")


class TracesExport(Filter):
    """Rows to .json, .csv or .parquet; whole recordings, to be imported elsewhere."""

    arguments = positional = ("out",)
    example = "traces export rounds.parquet --per rounds --since 24h"

    out: AnyPath = setting(..., "The file.")
    per: Literal["requests", "rounds", "positions"] = setting(
        "requests", "A row for each of these (a position: of every draft's proposals)."
    )
    whole: bool = setting(False, "To .parquet: all that replay needs, for `traces import`.")


class TracesImport(Settings):
    """Add the recordings that `traces export --whole` wrote; what is here already stays."""

    arguments = positional = ("file",)
    example = "traces import recording.parquet"

    file: AnyPath = setting(..., "The file.")


class DbShow(Settings):
    """How many there are of each kind; of one kind (recordings, profiles, artifacts, studies, runs,
    policies, pairs, workloads) all, newest first; or what an id stands for, whatever it is of."""

    arguments = positional = ("what",)
    example = "db show runs --rows 20"

    what: str | None = setting(None, "A kind, an id, or the beginning of one.")
    rows: Count | None = setting(None, "Only the newest N.")


class DbPrune(Settings):
    """Remove what is old, of all kinds or of those named. What the evidence or the policy of a
    publication names is spared, and the newest profile of each pair, device and dtype."""

    arguments = positional = ("kinds",)
    example = "db prune recordings runs --older-than 30d --dry-run"

    kinds: Texts = setting((), "recordings, profiles, artifacts, studies or runs.")
    id: Texts = setting((), "Remove this one; repeatable.")
    older_than: Moment | None = setting(None, "Only what is older than, e.g., 30d.")
    keep_last: int | None = setting(None, "Of each kind, keep the newest N.", ge=0, le=LARGEST)
    force: bool = setting(False, "Remove even what a publication's evidence names.")
    dry_run: bool = setting(False, "Only say what would be removed.")


class DbCheck(Settings):
    """Check integrity, foreign keys, schema and every blob; exit code 1 if anything is wrong."""

    example = "db check"

    upgrade: bool = setting(False, "Make the tables of a new database first, or renew old ones.")


class Placed(OnPair, InPlace):
    """Where a policy is in force."""

    flags: ClassVar[tuple[str, ...] | None] = ("pair", "device", "deployment")

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Device that it is in force on.")


class PoliciesList(OnPair):
    """Publications, newest first, and what each server did with them: all there are, or those of a
    pair and its device where one is named. For each deployment, pair and device the newest is in
    force."""

    flags = ("pair", "device", "deployment", "in_force")
    example = "policies list --in-force"

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Device that they are in force on.")
    deployment: str | None = setting(None, "Only publications of this one; default: of all.")
    in_force: bool = setting(False, "Only what is in force now.")


class PoliciesShow(Placed):
    """A policy document with every default spelled out, and the evidence it was published with;
    with two policies what differs between them."""

    arguments = positional = ("policy", "other")
    example = "policies show candidate.json active"

    policy: PolicyName = setting("active", "A file, inline JSON, an id, or active.")
    other: PolicyName | None = setting(None, "Another one.")


class PoliciesActivate(Placed):
    """Publish a policy: running decoders of the deployment take it up between two rounds, and
    `policies list` shows who did. What the deployment's engine cannot run is refused.

    A policy that was tuned keeps what sampling it was tuned for."""

    arguments = positional = ("policy",)
    flags = ("pair", "device", "deployment", "from", "reason")
    example = "policies activate active --from canary"

    policy: PolicyName = setting(..., "A file, inline JSON, an id, or active.")
    from_: str | None = setting(None, "Deployment whose `active` is promoted.")
    reason: str | None = setting(None, "Kept with it.")


class PoliciesRollback(Placed):
    """Publish an earlier policy of the deployment again, as a new version. Publications that hold
    no policy, or none that the deployment's engine can run, are passed over."""

    flags = ("pair", "device", "deployment", "to")
    example = "policies rollback"

    to: Count | None = setting(None, "Version to go back to; default: the one before the active.")


class PoliciesExport(Placed):
    """Print a policy as a document, or as another engine's settings where they can say the same:
    JSON on stdout, and on stderr the line that serves with them."""

    arguments = positional = ("policy",)
    flags = ("pair", "device", "deployment", "for")
    example = "policies export active --for vllm"

    policy: PolicyName = setting("active", "A file, inline JSON, an id, or active.")
    for_: Literal["spectune", "vllm", "sglang", "llamacpp"] = setting("spectune", "Whose form.")


class Engines(OnPair):
    """The engines: which are installed, tested, and what each can do. `engines vllm` prints the
    command line of a server that records its traffic and follows what is published.

    It drafts --gamma tokens until a policy is published in its deployment, and what that says from
    the next step on. A --gamma-max above --gamma needs a schedule by batch size, with which vLLM
    captures other CUDA graphs from its start on (docs/engines.md). A password in the database's URL
    is not printed: the line names the variable SPECTUNE_DB."""

    arguments = positional = ("engine",)
    flags = ("pair", "draft", "gamma", "gamma_max", "max_num_seqs", "deployment")
    example = "engines vllm --pair pair.json --draft small --gamma 3"

    engine: Literal["vllm"] | None = setting(None, "Print its server's command line.")
    draft: str | None = setting(None, "The draft that it loads, or ngram; default: the first.")
    gamma: int = setting(3, "Tokens drafted until something is published.", ge=1, le=64)
    gamma_max: int | None = setting(None, "Longest draft that it may be told.", ge=1, le=64)
    max_num_seqs: int = setting(256, "Most requests in a step.", ge=2, le=LARGEST)
    deployment: Annotated[str, BeforeValidator(_deployment)] = setting(
        "vllm", "Name of what it follows.", env="SPECTUNE_DEPLOYMENT"
    )


class Report(Settings):
    """What a tuning found, as one HTML page that needs nothing else: what to deploy and what that
    saves, predicted against measured, the race, latency, acceptance, what was tried and what not.

    STUDY is the id that `tune` printed, the beginning of one, or latest."""

    arguments = positional = ("study",)
    example = "report latest --out report.html --price 2.50 --gpus 8"

    study: str = setting("latest", "Id of a tuning.")
    out: AnyPath | None = setting(None, "The page; by default beside the database.")
    price: float | None = setting(None, "Price of a device for an hour, e.g. 2.50.", gt=0)
    gpus: int = setting(1, "Devices that serve this traffic.", ge=1, le=1_000_000)


WORKERS = "Record on a Dask cluster too: its scheduler's address, tcp://HOST:8786."


class Decoded(Decoding, InPlace):
    """Decodes a workload with a policy, by the native decoder or another engine."""

    positional = ("policy",)

    policy: PolicyName = setting("active", "A file, inline JSON, an id, active, autoregressive.")
    engine: Engine = setting("native", "What executes (`engines` lists what each can do).")
    concurrency: Count = setting(1, "Requests at a time, on an engine that batches.")


class Run(Decoded):
    """Execute a policy on a workload and measure it. With --policy active, publications made
    meanwhile are picked up between two rounds."""

    flags = (
        *("policy", "pair", "workload", "requests.limit", "requests.category"),
        *("sampling.max_new_tokens", "sampling.temperature", "device", "deployment", "engine"),
        *("concurrency", "outputs", "per_round", "record", "store"),
    )
    example = "run --pair demo --policy policy.json --limit 32 --outputs texts.jsonl"

    profile: str | None = setting(None, "Profile for windows that need costs; default: the latest.")
    outputs: AnyPath | None = setting(None, "Write the texts, one JSON line per request.")
    per_round: AnyPath | None = setting(None, "Write one JSON line per round.")
    record: bool = setting(False, "Keep the texts as a recording, for `tune` and schedules.")
    store: bool = setting(True, "Keep the run in the database.")


class Record(Decoded):
    """Decode a workload, store the texts, and compute each draft's proposals at every position.

    An unfinished recording of the same arguments is resumed, and so is the one that --resume names.
    Trees are recorded on request; with --resume they may be made wider or deeper than before."""

    flags = (
        *("pair", "workload", "requests.limit", "sampling.max_new_tokens", "sampling.temperature"),
        *("device", "engine", "concurrency", "policy", "search.gamma_max", "trees.width"),
        *("trees.depth", "resume", "fresh"),
    )
    example = "record --pair pair.json --workload chats.jsonl --temperature 0.7"

    search: Search = Search()
    trees: Trees = Trees(width=0)
    resume: str | None = setting(None, "Make what this recording lacks: texts and panoramas.")
    fresh: bool = setting(False, "Begin anew instead of resuming an unfinished recording.")
    workers: str | None = setting(None, WORKERS)


class Profile(OnPair, OnDevice):
    """Measure what every part of a round costs on this device.

    What drafting and verifying trees costs depends on the text, so `record` first. On an engine
    that batches, measure what its steps cost, with each draft of the pair and without: its
    recordings tell `simulate --arrivals` and `tune --arrivals` so."""

    flags = (
        *("pair", "device", "engine", "concurrency", "gamma_max", "contexts", "repeats", "trees"),
        "recording",
    )
    example = "profile --pair pair.json --engine openvino --concurrency 8 --gamma-max 6"

    engine: Engine = setting("native", "What executes (`engines` lists what each can do).")
    concurrency: Count = setting(8, "Measure from 1 to N requests at a time on an engine.")
    gamma_max: int | None = setting(
        None, "Longest drafts measured; default: 16, on an engine 8.", ge=1, le=64
    )
    contexts: Lengths = setting((), "Context lengths; default: those that the recording serves.")
    repeats: int = setting(1, "Sweeps over all that is measured.", ge=1, le=10_000)
    trees: bool = setting(True, "Measure what trees cost.")
    recording: str | None = setting(None, "Measure on its texts; default: the pair's newest.")


class Simulate(InPlace):
    """Replay a recording under any policy: rounds and tokens exactly, seconds by a latency profile.
    With --arrivals, an engine that serves many requests at once."""

    positional = ("policy", "recording")
    flags = (
        *("policy", "recording", "since", "limit", "profile", "engine", "load.arrivals"),
        *("load.ttft", "load.tpot", "deployment", "per_round"),
    )
    example = """simulate --policy '{"draft": "small", "window": {"kind": "fixed", "gamma": 4}}'"""

    policy: PolicyName = setting(..., "A file, inline JSON, an id, active, or autoregressive.")
    recording: str = setting("latest", "Id of a recording, or the beginning of one.")
    since: Moment | None = setting(None, "All decoded since so long ago (24h), or a moment.")
    limit: Count | None = setting(None, "Only the first N requests.")
    profile: str | None = setting(None, "Latency profile; default: the latest that fits.")
    engine: Literal["vllm", "openvino"] | None = setting(None, "This engine's latest recording.")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Whose profile; default: as recorded.")
    load: Load = Load()
    per_round: AnyPath | None = setting(None, "Write one JSON line per round.")
    skip_corrupted: bool = setting(False, "Leave damaged requests out.")
    keep_q_table: bool = setting(False, "Store what a q_learning window has learned.")


class Tune(Decoding, InPlace):
    """Find the fastest policy, prove it by execution, and publish it.

    Records the workload (or resumes, or finds it recorded), profiles the device, searches in
    simulation, executes the best beside plain baselines on requests the search has not seen, and
    publishes the winner if it beats the incumbent beyond noise on others that were held out for
    this. With --arrivals, for an engine that serves many requests at once."""

    flags = (
        *("pair", "workload", "requests.limit", "sampling.max_new_tokens", "sampling.temperature"),
        *("recording", "engine", "load.arrivals", "execute", "race.budget", "quick", "publish"),
    )
    example = "tune --pair pair.json --workload chats.jsonl --temperature 0.7 --budget 10m"

    recording: str | None = setting(None, "Tune on this recording; latest: the newest.")
    since: Moment | None = setting(None, "Tune on a sample of what was decoded since (24h).")
    engine: Literal["vllm", "openvino"] | None = setting(None, "With --arrivals: its recording.")
    load: Load = Load()
    execute: bool = setting(False, "With --arrivals: execute the finalists too, and publish.")
    search: Search = Search()
    trees: Trees = Trees()
    race: Race = Race()
    quick: bool = setting(False, "About two minutes: chains only, fewer requests and trials.")
    publish: bool = setting(True, "Publish the winner.")
    fresh: bool = setting(False, "Record and profile anew, whatever is stored.")
    report: AnyPath | None = setting(None, "The page; none: no page; default: beside the database.")
    workers: str | None = setting(None, WORKERS)


class Generate(OnPair, OnDevice, InPlace):
    """Stream a text, showing which tokens were drafted and accepted and which the target
    supplied."""

    arguments = ("prompt",)
    positional = ("prompt",)
    flags = (
        *("policy", "pair", "sampling.max_new_tokens", "sampling.temperature", "device"),
        *("deployment", "compare"),
    )
    example = 'generate "def fibonacci(n):" --pair demo --max-new-tokens 64'

    prompt: str = setting(..., "The prompt.")
    policy: PolicyName = setting("active", "A file, inline JSON, an id, active, autoregressive.")
    compare: bool = setting(True, "Decode again autoregressively for comparison.")
    sampling: Sampling = Sampling()


class Fitting(Group):
    """How much a fit takes; what is not said is as the paper, or the recording, has it."""

    depth: int | None = setting(None, "Levels of the trees.", ge=1, le=64)
    width: int | None = setting(None, "Children of a node.", ge=1, le=32)
    top_n: int | None = setting(None, "Bins: nodes kept of a tree.", ge=1, le=256)
    nodes: int | None = setting(None, "Static tree: most nodes.", ge=1, le=256)
    starts: Count | None = setting(None, "Rounds of trees that are fitted to, at most.")
    hidden: int | None = setting(None, "Hidden units.", ge=2, le=65_536)
    epochs: int | None = setting(None, "Passes over the examples.", ge=1, le=1000)
    clusters: Count | None = setting(None, "Token clusters; by default by the size of the head.")
    labels: Count | None = setting(None, "Router: most probable tokens that are positive.")
    seed: Seed = setting(0, "Seed of the fit.")


FitKind = Literal["bins", "classifier", "static-tree", "frequencies", "router", "chooser"]


class Fit(OnPair, OnDevice, InPlace):
    """Fit to a recording what policies need, and store it as an artifact.

    Of trees: bins (`stratify`, HeteroSpec), classifier (`growth`, C2T), static-tree (`growth`,
    Sequoia). Of shortlists: frequencies (FR-Spec), router (DynaSpec). Of prompts: chooser, a draft
    for each prompt."""

    arguments = positional = ("kind",)
    flags = ("pair", "recording", "since", "draft", "policy", "profile", "corpus")
    example = "fit bins --draft small --set fit.depth=5"

    kind: Literal["bins", "classifier", "static-tree", "frequencies", "router", "chooser"] = (
        setting(..., "What is fitted.")
    )
    recording: str = setting("latest", "Id of a recording, or the beginning of one.")
    since: Moment | None = setting(None, "A sample of what its pair decoded since (24h) instead.")
    draft: str | None = setting(None, "Draft that is fitted to, by name.")
    policy: PolicyNames = setting((), "Chooser: one of the policies to choose from; repeatable.")
    profile: str | None = setting(None, "Latency profile whose costs count; default: the latest.")
    corpus: Texts = setting((), "Frequencies: count these text files instead; repeatable.")
    fit: Fitting = Fitting()


class Scheduled(Decoding, InPlace):
    """What the runs of a schedule are told; stored as a document, with the pair's own."""

    recorded: Duration | None = setting(None, "Tune on what was recorded in the last, e.g., 24h.")
    engine: Literal["vllm", "openvino"] | None = setting(None, "Tune its recordings for a load.")
    load: Load = Load()
    search: Search = Search()
    trees: Trees = Trees()
    race: Race = Race()
    fresh: bool = setting(True, "Record and profile a workload anew each time.")


class ScheduleAdd(Scheduled):
    """Add a schedule; workers (`schedule run`) tune when it is due."""

    arguments = positional = ("name",)
    flags = (
        *("pair", "workload", "requests.limit", "sampling.max_new_tokens", "sampling.temperature"),
        *("deployment", "cron", "tz", "now", "recorded", "engine", "load.arrivals", "race.budget"),
    )
    example = 'schedule add nightly --cron "0 3 * * *" --tz Europe/Berlin --recorded 24h'

    name: str = setting(..., "Its name.")
    cron: str = setting(..., 'Five fields, e.g. "0 3 * * *", or @hourly, @daily, @weekly.')
    tz: str = setting("UTC", "Time zone of the cron fields.")
    now: bool = setting(False, "Due at once, and then as --cron says.")


class ScheduleList(Settings):
    """All schedules, with their last results; or one, with the attempts that ended."""

    arguments = positional = ("name",)
    example = "schedule list nightly"

    name: str | None = setting(None, "Its name.")


class ScheduleRemove(Settings):
    """Remove a schedule and its history; a worker that is busy with it publishes nothing."""

    arguments = positional = ("name",)
    example = "schedule remove nightly"

    name: str = setting(..., "Its name.")


class ScheduleRun(Settings):
    """Work: run what is due, until SIGINT or SIGTERM, or with --once until nothing waits (for cron
    and systemd timers). Any number of workers may share a database."""

    example = "schedule run --poll 10s"

    poll: Duration = setting(30.0, "How often to look for what is due.")
    once: bool = setting(False, "Run what is due, then end.")


# ------------------------------------------------------------------------------------------ fields


class Leaf(NamedTuple):
    """A field of a model or of one of its groups."""

    key: str
    field: FieldInfo
    default: Any
    option: str
    env: str

    @property
    def keyword(self) -> str:
        """Its name in Python."""
        name = self.option.replace("-", "_")
        return f"{name}_" if iskeyword(name) else name

    @property
    def reader(self) -> Any:
        """The function that reads its values; None where pydantic's own do."""
        readers: list[Any] = []
        for kind in (self.field, *get_args(self.field.annotation)):
            metadata: Any = getattr(kind, "metadata", None) or getattr(kind, "__metadata__", ())
            readers += [getattr(item, "func", None) for item in metadata]
        return next(filter(None, readers), None)

    @property
    def metavar(self) -> str:
        """What its values look like."""
        if (reader := self.reader) in READERS:
            return READERS[reader]
        kinds = (self.field.annotation, *get_args(self.field.annotation))
        if choices := [c for k in kinds if get_origin(k) is Literal for c in get_args(k)]:
            return "|".join(choices)
        texts = " ".join(map(str, kinds))
        if "bool" in texts:
            return "true|false"
        return "NUMBER" if "float" in texts else "N" if "int" in texts else "TEXT"

    def shown_default(self) -> str:
        """The default for people; empty where there is none."""
        if self.default is None or self.default in ((), {}):
            return ""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}{'s' * (self.reader is _duration)}" if isinstance(
            self.default, float) else str(self.default)  # fmt: skip


READERS = {
    **{
        _duration: "TIME",
        _moment: "AGE|TIME",
        _texts: "TEXT",
        _numbers: "N,N",
        _named: "NAME=PATH",
    },
    **{_path: "FILE", _document: "POLICY", _documents: "POLICY", _deployment: "NAME"},
}
MANY = (_texts, _named, _documents)
"""Readers of options that are repeated."""
PATHS = ("pair", "target", "workload", "db")
"""Keys whose values are relative to the file that they stand in, if they are no URL."""


def leaves(model: type[BaseModel], prefix: str = "", defaults: Any = None) -> dict[str, Leaf]:
    """The fields of a model and of its groups by their key, those of Python alone left out."""
    result: dict[str, Leaf] = {}
    for name, field in model.model_fields.items():
        key, kind = prefix + name.rstrip("_"), field.annotation
        default = field.default if defaults is None else getattr(defaults, name)
        if isinstance(kind, type) and issubclass(kind, Group):
            result |= leaves(kind, f"{key}.", default)
        elif isinstance(extra := field.json_schema_extra, dict):
            option = str(extra["option"]) or name.rstrip("_").replace("_", "-")
            default = None if field.is_required() else default
            result[key] = Leaf(key, field, default, option, str(extra["env"]))
    return result


def flags_of(model: type[Settings]) -> list[str]:
    """The keys that have options of their own, in their order."""
    every = (key for key in leaves(model) if key != "db" and key not in model.arguments)
    return list(every if model.flags is None else model.flags)


def unknown(name: str, names: Iterable[str], what: str) -> ConfigError:
    """The error for a name that there is not, with the nearest that there is."""
    group, _, last = name.rpartition(".")
    every = sorted(names, key=lambda n: (n.rpartition(".")[0] == group, n))
    by_last = {n.rpartition(".")[2]: n for n in every}  # of equal ones that of the same group
    near = get_close_matches(last, by_last, n=1)
    hint = f"did you mean {by_last[near[0]]!r}?" if near else f"there are: {', '.join(every)}"
    return ConfigError(f"unknown {what} {shortened(name)!r}; {hint}")


# ------------------------------------------------------------------------------- where values stand


class Config(NamedTuple):
    """A file of defaults, and its values by key."""

    file: Path
    values: Mapping[str, Any]


def read_config(file: str | None) -> Config | None:
    """The values of a file; by default of SPECTUNE_CONFIG's, else of the working folder's where
    there is one. Raises ConfigError."""
    named = file or os.environ.get("SPECTUNE_CONFIG")
    if named is None and not os.path.exists(FILE):
        return None
    path = Path(named or FILE)
    text = read_text(path, str(path), ConfigError)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    try:
        values = dict(_flat(document, File))
        File.model_validate(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {_reason(error, File)}") from None
    for key in PATHS:
        if key in values:
            many = isinstance(values[key], list)
            moved = [_from(path.parent, str(v)) for v in (values[key] if many else [values[key]])]
            values[key] = moved if many else moved[0]
    return Config(path, values)


def _from(folder: Path, name: str) -> str:
    """A path as seen from the working folder; ``demo`` and URLs as they are."""
    return name if name == "demo" or ":" in name else str(folder / name)


def _flat(document: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterator[Any]:
    """(key, value) of a nested document. Raises ConfigError for a key that there is not."""
    for name, value in document.items():
        field = model.model_fields.get(name)
        kind = None if field is None else field.annotation
        if isinstance(kind, type) and issubclass(kind, Group):
            if isinstance(value, Group):
                value = value.model_dump(exclude_unset=True)
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}: a table is expected: [{name}], its keys below it")
            yield from _flat(value, kind, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _reason(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing that is wrong, with its key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
    if first["type"] == "extra_forbidden":
        return str(unknown(key, leaves(model), "key"))
    return f"{key}: {_explained(first)}"


def _explained(error: Any) -> str:
    cause = error.get("ctx", {}).get("error")
    text = str(cause or error["msg"]).replace("Input should be", "it should be")
    shown = shortened(str(error["input"]), 60)
    return f"{shown!r}: {text}"


def from_keywords(model: type[Settings], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key of Python's keywords: options' names, and groups with a mapping. Raises
    ConfigError."""
    keys = {leaf.keyword: key for key, leaf in leaves(model).items()}
    keys |= {name: name for name, field in model.model_fields.items() if field.exclude}
    values: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in keys:
            values[keys[name]] = value
        elif name in model.model_fields:
            values |= dict(_flat({name: value}, model))
        else:
            raise unknown(name, keys, "argument")
    return values


S = TypeVar("S", bound=Settings)


def from_document(model: type[S], document: Mapping[str, Any], where: str) -> S:
    """Settings that were stored as a document. Raises ConfigError."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_reason(error, model)}") from None


def settings_of(
    model: type[S], typed: Mapping[str, Any], config: Config | None, *, python: bool = False
) -> S:
    """The settings of a command: what is typed (by key) wins over the environment, which wins over
    the file. Raises ConfigError that names option, variable or file and key."""
    known = leaves(model)
    nested: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, leaf in known.items():
        if key in typed:
            sources[key] = leaf.keyword if python else spelled(model, key)
        elif leaf.env and os.environ.get(leaf.env):
            sources[key], nested[key] = leaf.env, os.environ[leaf.env]
        elif config is not None and key in config.values:
            sources[key], nested[key] = f"{config.file}: {key}", config.values[key]
    document: dict[str, Any] = {}
    for key, value in {**nested, **typed}.items():
        *groups, name = key.split(".")
        inner = document
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    try:
        made = model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"] if isinstance(part, str)]
        key = next((k for n in (2, 1) if (k := ".".join(parts[:n])) in sources), ".".join(parts))
        if first["type"] == "missing":
            raise ConfigError(f"{spelled(model, key)} is needed") from None
        if first["type"] == "extra_forbidden":
            raise unknown(key, known, "key") from None
        raise ConfigError(f"{sources.get(key, key)}: {_explained(first)}") from None
    made._typed, made._said = frozenset(typed), frozenset(sources)
    made._config = config
    return made


def spelled(model: type[Settings], key: str) -> str:
    """A key as a user types it."""
    if key in model.arguments:
        return key.upper()
    leaf = leaves(model).get(key)
    return f"--{leaf.option}" if leaf and key in (*flags_of(model), "db") else f"--set {key}"


def table() -> list[str]:
    """The rows of the table in docs/configuration.md: every key of ``spectune.toml``."""
    return [
        f"| `{key}` | `{leaf.keyword}` | {leaf.shown_default() and f'`{leaf.shown_default()}`'} | "
        f"{leaf.field.description}{f' `{leaf.env}` may say it.' * bool(leaf.env)} |"
        for key, leaf in leaves(File).items()
    ]
