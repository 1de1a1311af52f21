"""The door: each command opens, calls one function, and prints a table, or with --json one object on stdout.

Importing this module imports no torch, so that --help answers at once; commands import what they need.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from rich.console import Console

    from optimizer.execute import DecodeOptions
    from optimizer.fit import StoredFit
    from optimizer.schedule import Ended, Fire
    from optimizer.shortlist_ranks import Ranks
    from runtime.loading import LoadedPair
    from runtime.loop import PolicySource
    from runtime.policies.document import ChooserPolicy, Policy
    from traces.schema import LatencyProfile, Outcome, Proposals
    from traces.store import RecordingInfo, TraceStore

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_DB = "spectune.db"


def with_context(command: F) -> F:
    """click.pass_context, typed so that a command keeps its own signature."""
    passed: Any = click.pass_context(command)
    return cast(F, passed)


class Door(click.Group):
    """Turns the project's errors into one line on stderr and exit code 2, and Ctrl-C into 130."""

    def invoke(self, ctx: click.Context) -> Any:
        from db.errors import DatabaseError
        from traces.errors import SpectuneError

        # A second Ctrl-C may come while the first one's connections are handed back; the pool would log that with a traceback.
        logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
        try:
            return super().invoke(ctx)
        except (SpectuneError, DatabaseError) as error:
            click.echo(f"error: {' '.join(str(error).splitlines())}", err=True)
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


# ---------------------------------------------------------------------------------------------------- shared options


def _options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def apply(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout; all else goes to stderr.")
pair_options = _options(
    click.option("--pair", help="'demo' (default), or a pair file."),
    click.option("--target", help="Target checkpoint, instead of --pair."),
    click.option("--draft", "drafts", multiple=True, metavar="NAME=PATH", help="Draft checkpoint, with --target; repeatable."),
)
device_options = _options(
    click.option("--threads", type=click.IntRange(1), help="CPU threads; default: 1 for a small pair, else torch's choice."),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True),
)
workload_options = _options(
    click.option("--workload", "workloads", multiple=True, help="'demo' (default), or JSONL files; repeatable."),
    click.option("--category", "categories", multiple=True, help="Only requests of this category; repeatable."),
    click.option("--all-turns", is_flag=True, help="Every turn as a prompt of its own, not the first alone."),
    click.option("--limit", type=click.IntRange(1), help="Only the first N requests."),
)
sampling_options = _options(
    click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True),
    click.option("--temperature", type=click.FloatRange(0.0, 10.0), default=0.0, show_default=True),
    click.option("--top-k", type=click.IntRange(0), default=0, help="0: off."),
    click.option("--top-p", type=click.FloatRange(0.0, 1.0, min_open=True), default=1.0, help="1: off."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
    click.option("--verifier", type=click.Choice(["coupled", "rejection"]), default="coupled", show_default=True),
    click.option("--stop", "stop_strings", multiple=True, help="End a text at this string; repeatable."),
    click.option("--no-chat", is_flag=True, help="Do not apply the tokenizer's chat template."),
)

search_options = _options(
    click.option(
        "--trials", type=click.IntRange(0), default=400, show_default=True, help="Optuna trials beside the enumeration."
    ),
    click.option("--gamma-max", type=click.IntRange(2, 64), default=16, show_default=True, help="Longest drafts searched."),
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
        "--finalists", type=click.IntRange(1, 16), default=4, show_default=True, help="Policies executed beside the baselines."
    ),
)


def _search_options(kw: dict[str, Any]) -> dict[str, Any]:
    """What of TuneOptions :data:`search_options` says. Raises TraceError for trees that are too large."""
    from optimizer.record import tree_size

    chosen = {name: kw.pop(name) for name in ("trials", "gamma_max", "tree_width", "tree_depth", "finalists")}
    if chosen["tree_width"]:
        tree_size(chosen["tree_width"], chosen["tree_depth"])
    else:
        chosen["tree_depth"] = 0
    return chosen


def _decode_options(kw: dict[str, Any]) -> Any:
    from optimizer.execute import DecodeOptions
    from traces.schema import Sampling

    sampling = Sampling(kw.pop("temperature"), kw.pop("top_k"), kw.pop("top_p"), kw.pop("seed"))
    return DecodeOptions(
        sampling, kw.pop("max_new_tokens"), kw.pop("verifier"), tuple(kw.pop("stop_strings")), not kw.pop("no_chat")
    )


def _load(kw: dict[str, Any]) -> LoadedPair:
    from runtime.pair import read_pair

    spec = read_pair(kw.pop("pair"), kw.pop("target"), kw.pop("drafts"))
    spec.check()
    from runtime.loading import load_pair

    return load_pair(spec, device=kw.pop("device"), dtype=kw.pop("dtype"), threads=kw.pop("threads"))


def _workload(kw: dict[str, Any]) -> Any:
    from optimizer.inputs import load_workload

    return load_workload(
        kw.pop("workloads"), all_turns=kw.pop("all_turns"), limit=kw.pop("limit"), categories=kw.pop("categories")
    )


@contextmanager
def _store(ctx: click.Context, *, create: bool = True) -> Iterator[TraceStore]:
    from db.database import open_database
    from traces.store import TraceStore

    with open_database(ctx.find_root().obj, create=create) as database:
        yield TraceStore(database)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    width = None if (sys.stderr if stderr else sys.stdout).isatty() else 160
    return Console(stderr=stderr, width=width, soft_wrap=False, highlight=False)


def _emit(as_json: bool, data: Any, view: Any) -> None:
    """Prints ``data`` as JSON, or what ``view()`` builds as a table."""
    if as_json:
        click.echo(json.dumps(data, ensure_ascii=False))
    else:
        _console().print(view() if callable(view) else view)


class Meter:
    """Progress on stderr: a bar on a terminal, a line per phase otherwise."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = _console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
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
        key = phase.split(",")[0]
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(phase, total=total)
            if not self._live:
                click.echo(f"{key}: {total}", err=True)
        self._progress.update(self._tasks[key], completed=done, total=total, description=phase)


def _policy(store: TraceStore, name: str, pair_id: str, device: str, *, option: str = "--policy") -> Policy:
    """A policy by built-in name, file, inline JSON, id, or ``active``. Raises PolicyError."""
    from db.errors import NotFoundError
    from optimizer.inputs import named_policy
    from runtime.policies.document import AUTOREGRESSIVE, parse_policy
    from traces.errors import PolicyError

    found = named_policy(name)
    if found is not None:
        return found
    if name == "active":
        active = store.active_publication(pair_id, device)
        if active is None:
            click.echo(f"no policy is published for pair {pair_id} on {device}; decoding autoregressively", err=True)
            return AUTOREGRESSIVE
        return parse_policy(dict(active.document), where=f"publication {active.version}")
    try:
        stored = store.get_policy(name)
    except NotFoundError as error:
        raise PolicyError(
            f"{option} {name}: neither a file, a JSON document, 'active' nor 'autoregressive', and {error} (see `policies list`)"
        ) from None
    return parse_policy(dict(stored.document), where=f"policy {name}")


def _profile(store: TraceStore, wanted: str | None, pair_id: str, device: str, dtype: str | None = None) -> tuple[str, Any]:
    """(id, profile): the one named, else the latest of this pair and device; ("", None) when there is none."""
    found = store.get_profile(wanted) if wanted else store.latest_profile(pair_id, device, dtype)
    return ("", None) if found is None else (found.id, found.profile)


def _dtype(pair: LoadedPair) -> str:
    return str(pair.target.dtype).removeprefix("torch.")


def _write_rounds(path: str, rows: Iterator[dict[str, Any]]) -> None:
    """Writes JSON lines (:func:`_write_text`)."""
    _write_text(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _write_text(path: str, parts: Iterable[str]) -> None:
    """Writes beside the target and puts it in place at the end, so that a failure leaves nothing half-written."""
    from traces.errors import SpectuneError

    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for text in parts:
                file.write(text)
        part.replace(target)
    except OSError as error:
        raise SpectuneError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        if part.parent.is_dir():
            part.unlink(missing_ok=True)


def _check_writable(*options: tuple[str, str | None]) -> None:
    """Raises SpectuneError for an (option, path) that cannot be written, before the work is done whose result would go there."""
    from traces.errors import SpectuneError

    for option, path in options:
        if path is None:
            continue
        folder = Path(path).resolve().parent
        if not folder.is_dir():
            raise SpectuneError(f"{option} {path}: there is no folder {folder}; make it, or name another file")
        if not os.access(folder, os.W_OK):
            raise SpectuneError(f"{option} {path}: folder {folder} is not writable; name another file")


def _rounds(request: str, steps: Any) -> Iterator[dict[str, Any]]:
    for s in steps:
        yield {"request": request, "start": s.start, "drafted": s.drafted, "verified": s.verified, "accepted": s.accepted}


# ---------------------------------------------------------------------------------------------------------- commands


@main.command()
@pair_options
@workload_options
@sampling_options
@device_options
@click.option("--gamma-max", type=click.IntRange(2, 64), default=16, show_default=True, help="Longest window the panorama holds.")
@click.option("--policy", "policy_name", default="active", show_default=True, help="Decodes the texts (never changes them).")
@click.option("--fresh", is_flag=True, help="Begin anew instead of resuming an unfinished recording.")
@click.option("--resume", "resumed_id", metavar="ID", help="Make what a recording lacks: texts, and panoramas of every draft.")
@click.option(
    "--tree-width",
    type=int,
    metavar="1..32",
    help="Record draft trees too, of so many children a node; default: 8 with any --tree-... or --cover.",
)
@click.option(
    "--tree-depth",
    type=int,
    metavar="1..64",
    help="Record draft trees too, of so many levels; default: 8 with any --tree-... or --cover.",
)
@click.option(
    "--tree-proposals",
    type=click.Choice(["coupled", "probability"]),
    help="How trees rank children: with the target's noise, or by probability alone; default: as --cover has it, else coupled.",
)
@click.option(
    "--cover",
    "covers",
    multiple=True,
    metavar="POLICY",
    help="FILE, inline JSON or ID of a policy whose trees must replay exactly; repeatable. top_k needs none at its usual scores.",
)
@json_option
@with_context
def record(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Decode a workload, store the texts, and look around from every start of them.

    An unfinished recording of the same arguments is resumed, and so is the one that --resume names. Trees are recorded on request; with
    --resume they may be made wider, deeper, or cover more than before.

    \b
    Example:  cli.py record --limit 64 --max-new-tokens 96
              cli.py record --pair pair.json --workload chats.jsonl --temperature 0.7
              cli.py record --resume latest --tree-width 8 --tree-depth 8
    """
    options = _decode_options(kw)
    workload = None if kw["resumed_id"] else _workload(kw)
    for key in ("workloads", "all_turns", "limit", "categories"):
        kw.pop(key, None)
    with _store(ctx) as store:
        pair = _load(kw)
        from optimizer.artifacts import fitted, q_tables
        from optimizer.record import RecordRequest, begun_as, retrace, retrace_trees
        from optimizer.record import record as do_record
        from runtime.loop import StaticSource
        from runtime.policies.prepared import prepare

        with Meter() as meter:
            begun = None
            if kw["resumed_id"]:
                recording = store.resolve_recording(kw["resumed_id"])
                before = store.get_recording(recording)
                _same_pair(before.pair_id, pair, recording)
                if before.state == "recording" and before.workload_id is not None:
                    begun, (workload, options) = before, begun_as(store, pair, before)
            if workload is None:
                trees = _trees(store, pair, kw, sampled=not before.sampling.greedy)
                retrace(store, pair, recording, pair.draft_names, kw["gamma_max"], progress=meter)
                retrace_trees(
                    store,
                    pair,
                    recording,
                    pair.draft_names,
                    trees["tree_width"],
                    trees["tree_depth"],
                    proposals=trees["tree_proposals"],
                    covers=trees["covers"],
                    chain_depth=kw["gamma_max"],
                    progress=meter,
                )
                info = store.get_recording(recording)
            else:
                trees = _trees(store, pair, kw, sampled=not options.sampling.greedy)
                device = pair.device.type
                _, profile = _profile(store, None, pair.id, device)
                if kw["policy_name"] == "active":
                    from optimizer.serving import last_good

                    prepared = last_good(store, pair, profile, options.verifier, options.sampling)
                else:
                    prepared = prepare(
                        _policy(store, kw["policy_name"], pair.id, device),
                        pair.draft_names,
                        profile=profile,
                        q_tables=q_tables(store),
                        artifacts=fitted(store, pair.id),
                    )
                source = StaticSource(prepared)
                wanted = RecordRequest(workload, options, pair.draft_names, kw["gamma_max"], **trees)
                info = do_record(store, pair, wanted, source, fresh=kw["fresh"], begun=begun, progress=meter)
    data = {"recording": info.id, "pair": info.pair_id, **info.to_json()}
    _emit(
        as_json,
        data,
        f"recording {info.id}: {info.n_requests} requests, {info.n_output_tokens} tokens, panoramas of {', '.join(info.drafts)}"
        + (f"; trees of {shown}" if (shown := info.trees_shown()) else ""),
    )


def _trees(store: TraceStore, pair: LoadedPair, kw: dict[str, Any], *, sampled: bool) -> dict[str, Any]:
    """What ``record`` was asked for in trees, as arguments of RecordRequest. Raises PolicyError and TraceError."""
    from optimizer.artifacts import fitted
    from optimizer.record import cover_of, tree_size
    from traces.errors import PolicyError, TraceError

    wide, deep, proposals = kw["tree_width"], kw["tree_depth"], kw["tree_proposals"]
    if (wide, deep, proposals, kw["covers"]) == (None, None, None, ()):
        return {"tree_width": 0, "tree_depth": 0, "tree_proposals": "coupled", "covers": {}}
    named: list[tuple[str, Any]] = []
    by_draft: dict[str, list[Any]] = {}
    ranked: dict[str, str] = {}
    for name in kw["covers"]:
        policy = _policy(store, name, pair.id, pair.device.type, option="--cover")
        if policy.draft not in pair.draft_names:
            raise PolicyError(f"--cover {name}: the pair has no draft {policy.draft!r} (it has: {', '.join(pair.draft_names)})")
        cover = cover_of(policy, sampled=sampled, artifacts=fitted(store, pair.id))
        named.append((name, cover))
        by_draft.setdefault(policy.draft, []).append(cover)
        ranked[getattr(policy.growth, "proposals", "coupled")] = name
    asked = {proposals} if proposals else set(ranked) or {"coupled"}
    if len(asked | set(ranked)) > 1:
        other = next(r for r in ranked if r != proposals)
        raise TraceError(
            f"--cover {ranked[other]}: its trees rank children by proposals {other!r}, other trees asked for do not; "
            f"record those apart (`record --resume ID --tree-proposals {other} --cover ...`)"
        )
    width, depth = tree_size(wide, deep, named)
    return {"tree_width": width, "tree_depth": depth, "tree_proposals": asked.pop(), "covers": by_draft}


def _same_pair(pair_id: str, pair: LoadedPair, recording: str) -> None:
    from traces.errors import TraceError

    if pair_id != pair.id:
        raise TraceError(
            f"recording {recording} was made with pair {pair_id}, not with {pair.id} ({pair.spec.name}); give that pair"
        )


@main.command()
@pair_options
@device_options
@click.option("--gamma-max", type=click.IntRange(1, 64), default=16, show_default=True)
@click.option("--contexts", default="32,160,384", show_default=True, help="Context lengths to measure at, comma-separated.")
@click.option("--repeats", type=click.IntRange(3), default=6, show_default=True)
@click.option("--no-trees", is_flag=True, help="Leave out what trees cost: quicker, for chains alone.")
@click.option(
    "--recording", help="Measure trees on the texts of ID or latest; default: the pair's newest complete one, else random tokens."
)
@json_option
@with_context
def profile(
    ctx: click.Context, as_json: bool, gamma_max: int, contexts: str, repeats: int, no_trees: bool, recording: str | None, **kw: Any
) -> None:
    """Measure what every part of a round costs on this device.

    What drafting and verifying trees costs depends on the text, so `record` first.

    \b
    Example:  cli.py profile --device cpu
    """
    try:
        lengths = tuple(sorted({int(c) for c in contexts.split(",")}))
    except ValueError:
        raise click.BadParameter("whole numbers separated by commas are expected", param_hint="--contexts") from None
    if lengths[0] < 1:
        raise click.BadParameter(f"{lengths[0]}: a context has at least 1 token", param_hint="--contexts")
    if no_trees and recording is not None:
        raise click.UsageError("--recording says on which texts trees are measured; leave it out, or --no-trees")
    with _store(ctx) as store:
        pair = _load(kw)
        from optimizer.record import texts_to_profile
        from optimizer.report import profile_table
        from runtime.profiler import measure_profile

        texts: list[list[int]] = []
        if not no_trees:
            if recording is not None:
                _same_pair(store.get_recording(recording).pair_id, pair, recording)
            recording, texts = texts_to_profile(store, pair.id, recording)
            on = f"the {len(texts)} texts of recording {recording}" if recording else "random tokens: nothing of this pair is recorded"
            click.echo(f"trees are measured on {on}", err=True)
        with Meter() as meter:
            measured = measure_profile(
                pair,
                texts=texts,
                gamma_max=gamma_max,
                contexts=lengths,
                repeats=repeats,
                trees=not no_trees,
                progress=lambda what, done, total: meter("profile", done, total),
            )
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
        name = store.put_profile(measured)
    for what, check in (("rounds", measured.check), ("rounds of trees", measured.check.get("trees"))):
        if check is not None and not check["accepted"]:
            click.echo(
                f"warning: composed {what} are off by {100 * check['median_error']:.0f}% (median); the machine is busy, or changed "
                "its speed while measuring: run `profile` again",
                err=True,
            )
    _emit(as_json, {"profile": name, **measured.to_json()}, lambda: profile_table(measured, name))


@main.command()
@click.option("--policy", "policy_name", required=True, help="FILE, inline JSON, ID, active, or autoregressive.")
@click.option("--recording", default="latest", show_default=True)
@click.option("--profile", "profile_id", help="Profile id; default: the latest of the recording's pair and device.")
@click.option("--device", "on", help="Device whose profile is taken; default: the recording's.")
@click.option("--limit", type=click.IntRange(1), help="Only the first N requests.")
@click.option("--per-round", type=click.Path(dir_okay=False), help="Write one JSON line per round.")
@click.option("--skip-corrupted", is_flag=True, help="Leave damaged chunks out instead of stopping at the first.")
@click.option("--keep-q-table", is_flag=True, help="Store what a q_learning window has learned as an artifact, and print its id.")
@json_option
@with_context
def simulate(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Replay a recording under any policy: rounds and tokens exactly, seconds by a latency profile.

    \b
    Example:  cli.py simulate --policy '{"draft": "small", "window": {"kind": "fixed", "gamma": 4}}'
    """
    from runtime.policies.document import ChooserPolicy
    from traces.errors import PolicyError, TraceError

    _check_writable(("--per-round", kw["per_round"]))
    with _store(ctx, create=False) as store:
        recording = store.resolve_recording(kw["recording"])
        info = store.get_recording(recording)
        device = kw["on"] or str(info.options.get("device", "cpu"))
        policy = _policy(store, kw["policy_name"], info.pair_id, device)
        _, found = _profile(store, kw["profile_id"], info.pair_id, device)
        if isinstance(policy, ChooserPolicy):
            _simulate_chosen(store, policy, info, found, kw, as_json)
            return
        drafts = [policy.draft] if policy.speculates else []
        proposals: Proposals = getattr(policy.growth, "proposals", "coupled")
        grown = info.trees if proposals == "coupled" else info.trees_q
        as_tree = policy.is_tree or (policy.draft in grown and policy.draft not in info.drafts)
        trees = as_tree or policy.shortlisted  # a shortlist looks at the draft's laws
        if trees and policy.draft not in grown:
            flag = "" if proposals == "coupled" else f" --tree-proposals {proposals}"
            raise PolicyError(
                f"draft: recording {recording} has no trees of draft {policy.draft!r} (it has: {info.trees_shown() or 'none'}); "
                f"`record --resume {recording} --tree-width 8 --tree-depth {max(8, policy.depth_max)}{flag}` makes them"
            )
        if policy.speculates and not as_tree and policy.draft not in info.drafts:
            raise PolicyError(
                f"draft: recording {recording} has no panorama of draft {policy.draft!r}; it has: "
                f"{', '.join(sorted(info.drafts)) or 'none'}; `record --resume {recording}` makes those of every draft of its pair"
            )
        loaded = store.load(recording, drafts, trees=trees, skip_corrupted=kw["skip_corrupted"])
        ranks = _ranks(store, policy, recording, proposals) if policy.shortlisted else None
    for skipped in loaded.skipped:
        click.echo(f"left out: request {skipped.ordinal} of {skipped.recording}: {skipped.problem}", err=True)
    if found is None:
        click.echo("no latency profile of this pair and device: seconds are left at 0 (run `profile`)", err=True)
    from optimizer.artifacts import fitted, keep_q_table, q_tables
    from optimizer.replay import ReplayTrace, run_replay
    from optimizer.report import outcome_table
    from optimizer.shortlist_ranks import how_to_rank

    chains = [] if as_tree else drafts
    if kw["skip_corrupted"]:
        loaded = loaded.having(chains, trees=drafts if trees else (), proposals=proposals)
    if not loaded.requests:
        raise TraceError(f"recording {recording} has no usable request")
    trace = ReplayTrace(
        loaded.trajectories,
        {d: loaded.panoramas(d) for d in chains},
        trees={(d, proposals): loaded.trees(d, proposals) for d in drafts} if trees else None,
        ranks=ranks,
    )
    if kw["limit"]:
        trace = trace.select(range(min(kw["limit"], len(loaded.requests))))
    with _store(ctx, create=False) as store:
        replayed = run_replay(
            trace,
            policy,
            found,
            per_round=kw["per_round"] is not None,
            q_tables=q_tables(store),
            artifacts=fitted(store, info.pair_id),
        )
        learned = None
        if kw["keep_q_table"]:
            learned = keep_q_table(
                store, replayed.controller, info.pair_id, {"recording": recording, "policy": policy.spelled_out()}
            )
            click.echo(f"artifact {learned}", err=True)
    if kw["per_round"]:
        pairs = zip(trace.request_ids, replayed.steps(), strict=True)
        _write_rounds(kw["per_round"], (row for request, steps in pairs for row in _rounds(request, steps)))
    outcome = replayed.outcome()
    data = _outcome_json(outcome, policy) | ({"artifact": learned} if learned else {})
    if policy.shortlisted and (as_tree or policy.stop.kind != "none" or not all(f.full for f in trace.forests.values())):
        click.echo("approximate: trees, stops and filters under a shortlist read renormalised probabilities (docs/shortlists.md)", err=True)
        data["approximate"] = True
    elif replayed.missing:
        click.echo(
            f"approximate: in {replayed.missing} rounds the shortlist holds none of the recorded children; "
            + how_to_rank(recording, getattr(policy.shortlist, "artifact", "ID"), policy.draft, proposals, "frequencies")
            + ", with which it is exact",
            err=True,
        )
        data["approximate"] = True
    _emit(as_json, data, lambda: outcome_table(outcome))


def _simulate_chosen(
    store: TraceStore, policy: ChooserPolicy, info: RecordingInfo, profile: LatencyProfile | None, kw: dict[str, Any], as_json: bool
) -> None:
    """Replays a chooser of drafts: the recording must hold what each of its candidates is replayed from."""
    from optimizer.artifacts import fitted, q_tables
    from optimizer.chooser_replay import run_chosen, trace_for
    from optimizer.report import outcome_table
    from runtime.policies.prepared_chooser import stored_chooser
    from traces.errors import PolicyError

    if kw["keep_q_table"]:
        raise PolicyError("--keep-q-table: a chooser's candidates keep their tables to themselves; simulate one of them")
    find = fitted(store, info.pair_id)
    candidates = stored_chooser(policy, find)[0].used.values()
    trace, skipped = trace_for(store, info, candidates, skip_corrupted=kw["skip_corrupted"])
    for chunk in skipped:
        click.echo(f"left out: request {chunk.ordinal} of {chunk.recording}: {chunk.problem}", err=True)
    if kw["limit"]:
        trace = trace.select(range(min(kw["limit"], len(trace.trajectories))))
    replayed = run_chosen(trace, policy, profile, per_round=kw["per_round"] is not None, q_tables=q_tables(store), artifacts=find)
    if kw["per_round"]:
        pairs = zip(trace.request_ids, replayed.steps(), strict=True)
        _write_rounds(kw["per_round"], (row for request, steps in pairs for row in _rounds(request, steps)))
    outcome, chosen = replayed.outcome(), replayed.chosen
    picks = {draft: chosen.count(draft) for draft in sorted(set(chosen))}
    _emit(as_json, {**_outcome_json(outcome, policy), "picks": picks}, lambda: outcome_table(outcome))


def _ranks(store: TraceStore, policy: Policy, recording: str, proposals: Proposals) -> dict[tuple[str, str], Ranks]:
    """What is stored of a shortlist's order over a recording, as a ReplayTrace takes it. A router's must be there."""
    from optimizer.artifacts import fitted
    from optimizer.chooser_replay import ranks_of
    from optimizer.shortlist_ranks import how_to_rank
    from runtime.shortlists import compile_shortlist
    from traces.errors import PolicyError

    info = store.get_recording(recording)
    rule, found = compile_shortlist(policy, fitted(store, info.pair_id)), ranks_of(store, recording, policy)
    assert rule is not None
    if found is None and rule.routed:
        order = rule.block.artifact
        raise PolicyError(
            f"shortlist: recording {recording} has no cluster ranks of router {order}; "
            + how_to_rank(recording, order, policy.draft, proposals)
        )
    return {} if found is None else {(policy.draft, found.fitted): found}


def _outcome_json(outcome: Outcome, policy: Policy) -> dict[str, Any]:
    return {**outcome.to_json(), "policy": policy.spelled_out(), "policy_id": policy.id, "label": policy.label()}


@main.command()
@click.option(
    "--policy", "policy_name", default="active", show_default=True, help="FILE, inline JSON, ID, active, or autoregressive."
)
@pair_options
@workload_options
@sampling_options
@device_options
@click.option("--profile", "profile_id", help="Profile for windows that need costs; default: the latest.")
@click.option("--outputs", type=click.Path(dir_okay=False), help="Write the texts, one JSON line per request.")
@click.option("--per-round", type=click.Path(dir_okay=False), help="Write one JSON line per round.")
@click.option("--record", "keep_texts", is_flag=True, help="Keep the texts as a recording, for `tune --recording` and schedules.")
@click.option("--no-store", is_flag=True, help="Do not keep the run in the database.")
@json_option
@with_context
def run(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Execute a policy on a workload and measure it.

    With --policy active, publications made meanwhile are picked up between two rounds.

    \b
    Example:  cli.py run --policy policy.json --workload demo --limit 32 --outputs texts.jsonl
    """
    options = _decode_options(kw)
    _check_writable(("--outputs", kw["outputs"]), ("--per-round", kw["per_round"]))
    workload = _workload(kw)
    with _store(ctx) as store:
        pair = _load(kw)
        from optimizer.execute import encode, outcome
        from optimizer.execute import run as execute
        from optimizer.report import outcome_table

        encoded = encode(pair, workload, options)
        _, found = _profile(store, kw["profile_id"], pair.id, pair.device.type)
        with _source(store, pair, kw["policy_name"], found, options) as source, Meter() as meter:
            decoded = []
            for done in execute(pair, source, encoded):
                decoded.append(done)
                meter("run", len(decoded), len(encoded.items))
            last = source.current().policy
        result = outcome(last.label(), decoded)
        if not kw["no_store"]:
            _keep_run(store, pair, last, result, workload, decoded)
        if kw["keep_texts"]:
            from optimizer.record import keep_served

            click.echo(f"recording {keep_served(store, pair, options, decoded)}", err=True)
    if kw["outputs"]:
        _write_rounds(
            kw["outputs"],
            (
                {
                    "id": d.trajectory.request_id,
                    "token_ids": d.trajectory.output_ids.tolist(),
                    "text": pair.text(d.trajectory.output_ids.tolist()),
                }
                for d in decoded
            ),
        )
    if kw["per_round"]:
        _write_rounds(kw["per_round"], (row for d in decoded for row in _rounds(d.trajectory.request_id, d.steps)))
    _emit(as_json, _outcome_json(result, last), lambda: outcome_table(result))


def _keep_run(store: TraceStore, pair: LoadedPair, policy: Policy, result: Outcome, workload: Any, decoded: Any) -> None:
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
    store.put_policy(policy.id, policy.spelled_out(), policy.label())
    store.put_run(
        pair.id,
        policy.id,
        result,
        device=pair.device.type,
        dtype=_dtype(pair),
        workload_id=store.put_workload(workload),
        purpose="run",
        steps={d.trajectory.request_id: d.steps for d in decoded},
    )


@contextmanager
def _source(
    store: TraceStore, pair: LoadedPair, name: str, profile: LatencyProfile | None, options: DecodeOptions
) -> Iterator[PolicySource]:
    """A policy source: the policy named for ever, or for ``active`` whatever is published, now and later."""
    from optimizer.artifacts import fitted, q_tables
    from runtime.loop import StaticSource

    if name != "active":
        policy = _policy(store, name, pair.id, pair.device.type)
        from runtime.decoder import prepare_for

        prepared = prepare_for(
            pair,
            policy,
            profile=profile,
            q_tables=q_tables(store),
            artifacts=fitted(store, pair.id),
            sampling=options.sampling,
        )
        yield StaticSource(prepared)
        return
    from optimizer.serving import watch

    if not store.active_version(pair.id, pair.device.type):
        click.echo(f"no policy is published for pair {pair.id} on {pair.device.type}; decoding autoregressively", err=True)
    with watch(store, pair, None, profile, verifier=options.verifier, sampling=options.sampling) as source:
        if source.last_error:
            click.echo(f"publication {source.seen} is refused: {source.last_error}; using {source.current().label}", err=True)
        yield source


@main.command()
@pair_options
@workload_options
@sampling_options
@device_options
@search_options
@click.option("--budget", default="2m", show_default=True, help="Time for the executed comparison, e.g. 90s, 10m.")
@click.option("--search-seed", type=int, default=0, show_default=True)
@click.option("--recording", "recording_id", help="Tune on this recording instead of decoding a workload.")
@click.option("--fresh", is_flag=True, help="Record and profile anew, whatever is stored.")
@click.option("--no-publish", is_flag=True, help="Show the evidence, publish nothing.")
@json_option
@with_context
def tune(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Find the fastest policy, prove it by execution, and publish it.

    Records the workload (or resumes, or finds it recorded), profiles the device, searches in simulation, executes the best beside
    plain baselines on requests the search has not seen, and publishes the winner if it beats the incumbent beyond noise.

    \b
    Example:  cli.py tune --limit 60 --max-new-tokens 96
              cli.py tune --pair pair.json --workload chats.jsonl --budget 10m
    """
    from optimizer.schedule import parse_duration

    options = _decode_options(kw)
    budget_s = float(parse_duration(kw.pop("budget")))
    searched = _search_options(kw)
    workload = None if kw["recording_id"] else _workload(kw)
    with _store(ctx) as store:
        pair = _load(kw)
        from optimizer.report import evidence_table
        from optimizer.tune import TuneOptions, tune_recording
        from optimizer.tune import tune as do_tune

        wanted = TuneOptions(
            options=options,
            seed=kw["search_seed"],
            budget_s=budget_s,
            fresh=kw["fresh"],
            publish=not kw["no_publish"],
            **searched,
        )
        with Meter() as meter:
            if workload is None:
                recording = store.resolve_recording(kw["recording_id"])
                _same_pair(store.get_recording(recording).pair_id, pair, recording)
                active = store.active_publication(pair.id, pair.device.type)
                tuned = tune_recording(store, pair, recording, wanted, active=active, progress=meter)
            else:
                tuned = do_tune(store, pair, workload, wanted, progress=meter)
    _emit(as_json, tuned.to_json(), lambda: evidence_table(tuned))


@main.command()
@click.argument("prompt")
@pair_options
@sampling_options
@device_options
@click.option("--policy", "policy_name", default="active", show_default=True)
@click.option("--no-compare", is_flag=True, help="Do not decode again autoregressively for comparison.")
@click.option("--show-trees", is_flag=True, help="Draw the tree of every round, not of the last alone.")
@json_option
@with_context
def generate(ctx: click.Context, as_json: bool, prompt: str, **kw: Any) -> None:
    """Stream a text, showing which tokens were drafted and accepted and which the target supplied.

    Where the policy grows trees, the last round's is drawn below the text.

    \b
    Example:  cli.py generate "def fibonacci(n):" --max-new-tokens 64
    """
    from traces.errors import WorkloadError

    options = _decode_options(kw)
    if not prompt.strip():
        raise WorkloadError("the prompt is empty")
    with _store(ctx) as store:
        pair = _load(kw)
        from optimizer.artifacts import fitted, q_tables
        from optimizer.execute import encode
        from optimizer.generate import generate as do_generate
        from traces.schema import Request, Workload

        encode(
            pair, Workload("prompt", (Request("prompt", "prompt", (prompt,)),)), options
        )  # refused before anything else is said
        _, found = _profile(store, None, pair.id, pair.device.type)
        policy = _policy(store, kw["policy_name"], pair.id, pair.device.type)
        from runtime.decoder import prepare_for

        prepared = prepare_for(
            pair, policy, profile=found, q_tables=q_tables(store), artifacts=fitted(store, pair.id), sampling=options.sampling
        )
    console = _console(stderr=as_json)
    console.width = 10_000 if not console.is_terminal else console.width
    result = do_generate(pair, prepared, prompt, options, console, compare=not kw["no_compare"], show_trees=kw["show_trees"])
    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False))


# ---------------------------------------------------------------------------------------------------------- fitting


@main.group()
def fit() -> None:
    """Fit to a recording what trees (bins, classifier, score, static-tree), shortlists (frequencies, clusters, router) and a draft for each
    prompt (chooser) need."""


fit_options = _options(
    click.option("--recording", default="latest", show_default=True, help="One recorded with --tree-width and --tree-depth."),
    click.option("--draft", required=True, help="Draft whose trees are fitted to, by name."),
    click.option(
        "--proposals",
        type=click.Choice(["coupled", "probability"]),
        default="coupled",
        show_default=True,
        help="Trees recorded with these --tree-proposals.",
    ),
)
sample_options = _options(
    click.option("--width", type=click.IntRange(1, 32), help="Children of a node; default: as recorded."),
    click.option("--starts", type=click.IntRange(1), help="Fit to at most so many rounds; default: 20000, of a classifier 4000."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
)


def _emit_fit(as_json: bool, made: StoredFit, view: Callable[[dict[str, Any]], Any]) -> None:
    """Shows what was fitted, and the policy to begin with unless that is a draft alone."""
    data = made.to_json()
    _emit(as_json, data, lambda: view(data))
    if not as_json:
        start = "" if made.policy.keys() == {"draft"} and isinstance(made.policy["draft"], str) else json.dumps(made.policy)
        click.echo(f"artifact {made.artifact}" + (f"; a policy with it: {start}" if start else ""))


def _fitted(ctx: click.Context, as_json: bool, which: str, kw: dict[str, Any], view: Callable[[dict[str, Any]], Any]) -> None:
    """Runs one of optimizer.fit's functions on what was asked for and shows what came of it."""
    with _store(ctx, create=False) as store, Meter() as meter:
        import optimizer.fit as fits

        recording = store.resolve_recording(kw.pop("recording"))
        given = {key: value for key, value in kw.items() if value is not None}
        made = getattr(fits, which)(store, recording, given.pop("draft"), progress=meter, **given)
    _emit_fit(as_json, made, view)


@fit.command("bins")
@fit_options
@click.option("--depth", type=click.IntRange(1, 64), help="Levels of the trees; default: those recorded less 3.")
@click.option("--top-n", type=click.IntRange(1, 256), help="Nodes kept of a tree; default: 60.")
@sample_options
@json_option
@with_context
def fit_bins(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Entropy bins for `stratify` (HeteroSpec): which rounds are sure enough for a smaller, deeper tree.

    \b
    Example:  cli.py fit bins --draft small --depth 5
    """
    from optimizer.report import bins_table

    _fitted(ctx, as_json, "fit_bins_artifact", kw, bins_table)


@fit.command("classifier")
@fit_options
@click.option("--depth", type=click.IntRange(1, 64), help="Levels of the trees; default: as recorded.")
@click.option("--hidden", type=click.IntRange(2, 48), help="Hidden units; default: 48.")
@click.option(
    "--features",
    multiple=True,
    type=click.Choice(["probability", "entropy", "depth"]),
    help="Only these; repeatable. Default: all three.",
)
@click.option("--epochs", type=click.IntRange(1, 1000), help="Passes over the nodes; default: 10, more where these are few.")
@click.option("--from", "carried", metavar="ARTIFACT", help="Fine-tune this classifier, of any draft, instead of a new one.")
@click.option(
    "--fraction",
    type=click.FloatRange(0.0, 1.0),
    help="With --from: share of the rounds to fine-tune on; default: 0.1. 0: carried over as it is, only scored.",
)
@sample_options
@json_option
@with_context
def fit_classifier(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """The node classifier of `growth` classifier (C2T), trained, or carried over from another draft with --from.

    \b
    Example:  cli.py fit classifier --draft small
              cli.py fit classifier --draft medium --from 3f2a
    """
    from optimizer.report import classifier_table
    from traces.errors import PolicyError

    if kw["fraction"] is not None and kw["carried"] is None:
        raise PolicyError("--fraction says how much is fine-tuned on: give --from as well")
    _fitted(ctx, as_json, "fit_classifier_artifact", kw, classifier_table)


@fit.command("score")
@fit_options
@click.option("--depth", type=click.IntRange(1, 64), help="Levels of a head's trees; default: as recorded.")
@sample_options
@json_option
@with_context
def fit_score(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """The `sharpness` of the score `coupled`: how far a gap between siblings lowers the estimate that a node is accepted.

    \b
    Example:  cli.py fit score --draft small
              cli.py fit score --recording latest --draft head --width 6
    """
    from optimizer.report import score_table

    _fitted(ctx, as_json, "fit_score_artifact", kw, score_table)


@fit.command("static-tree")
@fit_options
@click.option("--nodes", type=click.IntRange(1, 256), help="Most nodes; default: 64.")
@click.option("--depth", type=click.IntRange(1, 64), help="Most levels; default: 16, or as recorded where replay needs that.")
@click.option("--profile", "profile", help="Latency profile whose costs count; default: the latest of the recording's pair.")
@json_option
@with_context
def fit_static_tree(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """The best fixed tree for `growth` static (Sequoia): the fastest by a profile, or with both --nodes and --depth and no
    --profile the one that accepts most.

    \b
    Example:  cli.py fit static-tree --draft small
              cli.py fit static-tree --draft small --nodes 16 --depth 6
    """
    from optimizer.report import static_tree_table

    _fitted(ctx, as_json, "fit_static_tree_artifact", kw, static_tree_table)


def _shortlist_fit(ctx: click.Context, as_json: bool, kw: dict[str, Any], which: str, *, drafted: bool) -> None:
    """Runs one of optimizer.shortlist_fits's functions, which read the pair itself, and shows what came of it."""
    named = [d for d in kw["drafts"] if "=" not in d]
    if drafted and len(named) != 1:
        raise click.UsageError("name one draft whose output head is fitted to, --draft NAME (of the pair; NAME=PATH gives its checkpoint)")
    if not drafted and named:
        raise click.BadParameter(f"{named[0]}: NAME=PATH is expected; frequencies are every draft's", param_hint="--draft")
    kw["drafts"] = tuple(d for d in kw["drafts"] if "=" in d)
    with _store(ctx) as store, Meter() as meter:
        asked = kw.pop("recording", None)
        recording = None if asked is None else store.resolve_recording(asked)
        pair = _load(kw)
        import optimizer.shortlist_fits as fits
        from optimizer.report import shortlist_fit_table

        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
        given = {key: value for key, value in kw.items() if value not in (None, ())}
        arguments = [] if which == "fit_clusters_artifact" else [recording or ""]
        made = getattr(fits, which)(store, *arguments, pair, *named, progress=meter, **given)
    _emit_fit(as_json, made, shortlist_fit_table)


@fit.command("chooser")
@pair_options
@device_options
@click.option("--recording", default="latest", show_default=True, help="Its requests are fitted to, and replayed under every candidate.")
@click.option(
    "--policies",
    multiple=True,
    metavar="POLICY",
    help="FILE, inline JSON or ID of a draft's policy; repeatable. Default: of every draft the fastest by replay, and none.",
)
@click.option("--rule", type=click.Choice(["throughput", "theorem_3"]), default="throughput", show_default=True)
@click.option("--profile", "profile", help="Latency profile that weighs the drafts; default: the latest of the pair and device.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Deals requests into the parts of cross-validation.")
@json_option
@with_context
def fit_chooser(ctx: click.Context, as_json: bool, policies: tuple[str, ...], **kw: Any) -> None:
    """A draft for each prompt (draft `ols`): accuracies predicted from length, perplexity and TF-IDF, and what follows for the speed.

    Unless choosing gains something beyond noise by cross-validation, the best single draft decodes everything.

    \b
    Example:  cli.py fit chooser
              cli.py fit chooser --rule theorem_3 --policies small.json --policies '{"draft": "ngram"}'
    """
    from traces.errors import PolicyError

    with _store(ctx) as store, Meter() as meter:
        recording = store.resolve_recording(kw.pop("recording"))
        pair = _load(kw)
        from optimizer.chooser_fits import fit_chooser_artifact
        from optimizer.report import chooser_table

        named = [_policy(store, name, pair.id, pair.device.type, option="--policies") for name in policies]
        candidates = {policy.draft: policy for policy in named} or None
        if candidates is not None and len(candidates) < len(named):
            raise PolicyError("--policies: two policies of one draft; a chooser has one for each")
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
        given = {key: kw[key] for key in ("rule", "profile", "seed")}
        made = fit_chooser_artifact(store, recording, pair, candidates, progress=meter, **given)
    _emit_fit(as_json, made, chooser_table)


@fit.command("frequencies")
@pair_options
@device_options
@click.option("--recording", default="latest", show_default=True, help="Its texts are counted, prompts included.")
@click.option("--corpus", multiple=True, metavar="FILE", help="Count these text files instead; repeatable.")
@json_option
@with_context
def fit_frequencies(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """The vocabulary by frequency, for shortlists `frequency` (FR-Spec) and `position_frequency` (PA-FR).

    \b
    Example:  cli.py fit frequencies
              cli.py fit frequencies --corpus notes.txt --corpus code.py
    """
    if kw["corpus"]:
        kw["recording"] = None
    _shortlist_fit(ctx, as_json, kw, "fit_frequencies_artifact", drafted=False)


@fit.command("clusters")
@pair_options
@device_options
@click.option("--clusters", "count", type=click.IntRange(1), help="M; default: by the size of the output head.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@json_option
@with_context
def fit_clusters(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Token clusters of a draft's output head (DynaSpec), to look at, or for `fit router --clusters-from`.

    \b
    Example:  cli.py fit clusters --draft small --clusters 64
    """
    _shortlist_fit(ctx, as_json, kw, "fit_clusters_artifact", drafted=True)


@fit.command("router")
@pair_options
@device_options
@click.option("--recording", default="latest", show_default=True, help="The texts whose contexts it learns.")
@click.option("--clusters", type=click.IntRange(1), help="M; default: by the size of the output head.")
@click.option("--clusters-from", metavar="ID", help="Stored clusters instead of new ones.")
@click.option("--hidden", type=click.IntRange(1), help="Hidden units; default: 128.")
@click.option("--labels", type=click.IntRange(1), help="L, most probable tokens whose clusters are positive; default: 8.")
@click.option("--epochs", type=click.IntRange(1))
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@json_option
@with_context
def fit_router(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Clusters and the router that selects them by context, for shortlists `clusters` (DynaSpec).

    \b
    Example:  cli.py fit router --draft small
              cli.py fit router --draft head --clusters 128
    """
    _shortlist_fit(ctx, as_json, kw, "fit_router_artifact", drafted=True)


@fit.command("ranks")
@pair_options
@device_options
@click.option("--recording", default="latest", show_default=True, help="One recorded with --tree-width and --tree-depth.")
@click.option("--router", metavar="ID", help="A router that `fit router` made.")
@click.option("--frequencies", metavar="ID", help="A frequency order that `fit frequencies` made.")
@click.option(
    "--proposals",
    type=click.Choice(["coupled", "probability"]),
    default="coupled",
    show_default=True,
    help="Trees recorded with these --tree-proposals.",
)
@json_option
@with_context
def fit_ranks(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Where a router puts the clusters of everything recorded, or a frequency order its tokens, so that `simulate` replays policies with
    it. `fit router` and `fit frequencies` make this for their own recording; here it is made for another, or for requests recorded since.

    \b
    Example:  cli.py fit ranks --draft small --router 7b41 --recording latest
              cli.py fit ranks --draft small --frequencies 09ac
    """
    _shortlist_fit(ctx, as_json, kw, "fit_ranks_artifact", drafted=True)


# ----------------------------------------------------------------------------------------------------- command groups


@main.group()
def policies() -> None:
    """Policies: list, show, diff, activate, rollback, export."""


def _pair_id(kw: dict[str, Any]) -> str:
    from runtime.pair import read_pair

    return read_pair(kw.pop("pair"), kw.pop("target"), kw.pop("drafts")).id


def _device(kw: dict[str, Any]) -> str:
    wanted = str(kw.pop("device"))
    if wanted != "auto":
        return wanted
    from runtime.models import pick_device

    return pick_device("auto").type


on_device = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)


@policies.command("list")
@pair_options
@on_device
@json_option
@with_context
def policies_list(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Publications for a pair and device, newest first, and what runtimes acknowledged.

    \b
    Example:  cli.py policies list
    """
    pair_id, device = _pair_id(kw), _device(kw)
    with _store(ctx) as store:
        found = store.list_publications(pair_id, device)
        rows = []
        for i, p in enumerate(found):
            acks = store.acknowledgements(p.version)
            rows.append(
                {
                    "version": p.version,
                    "active": i == 0,
                    "policy": p.policy_id,
                    "label": p.label,
                    "created_at": p.created_at.isoformat(),
                    "actor": p.actor,
                    "reason": p.reason,
                    "applied": sum(a.status == "applied" for a in acks),
                    "refused": [f"{a.node}: {a.reason}" for a in acks if a.status == "refused"],
                }
            )
        known = [{"policy": p.id, "label": p.label, "created_at": p.created_at.isoformat()} for p in store.list_policies()]
    from optimizer.report import rows_table

    columns = ("version", "active", "policy", "label", "created_at", "actor", "applied", "refused", "reason")
    data = {"pair": pair_id, "device": device, "publications": rows, "policies": known}
    _emit(as_json, data, lambda: rows_table(rows, columns, f"publications for pair {pair_id} on {device}"))


@policies.command("show")
@click.argument("policy_name", metavar="POLICY", default="active")
@pair_options
@on_device
@json_option
@with_context
def policies_show(ctx: click.Context, as_json: bool, policy_name: str, **kw: Any) -> None:
    """A policy document with every default spelled out, and the evidence it was published with.

    \b
    Example:  cli.py policies show active
              cli.py policies show '{"draft": "small"}'
    """
    pair_id, device = _pair_id(kw), _device(kw)
    with _store(ctx) as store:
        policy = _policy(store, policy_name, pair_id, device)
        published = [p for p in store.list_publications(pair_id, device) if p.policy_id == policy.id]
    data: dict[str, Any] = {"id": policy.id, "label": policy.label(), "policy": policy.spelled_out()}
    if published:
        data["publication"] = {
            "version": published[0].version,
            "reason": published[0].reason,
            "created_at": published[0].created_at.isoformat(),
            "evidence": dict(published[0].evidence),
        }
    if as_json:
        click.echo(json.dumps(data, ensure_ascii=False))
    else:
        click.echo(f"{policy.id}  {policy.label()}")
        click.echo(json.dumps(policy.spelled_out(), indent=2))
        if published:
            click.echo(
                f"published as version {published[0].version} ({published[0].created_at:%Y-%m-%d %H:%M} UTC): {published[0].reason}"
            )


@policies.command("diff")
@click.argument("left")
@click.argument("right", default="active")
@pair_options
@on_device
@json_option
@with_context
def policies_diff(ctx: click.Context, as_json: bool, left: str, right: str, **kw: Any) -> None:
    """What differs between two policies, key by key, defaults spelled out.

    \b
    Example:  cli.py policies diff candidate.json active
    """
    pair_id, device = _pair_id(kw), _device(kw)
    with _store(ctx) as store:
        one, other = (_policy(store, name, pair_id, device) for name in (left, right))
    from optimizer.report import rows_table
    from runtime.policies.document import differences

    rows = differences(one, other)
    _emit(
        as_json,
        {"left": one.id, "right": other.id, "differences": rows},
        lambda: rows_table(rows, ("key", "left", "right"), f"{one.id} and {other.id}") if rows else "no difference",
    )


@policies.command("activate")
@click.argument("policy_name", metavar="POLICY")
@click.option("--reason", default="activated by hand", show_default=True)
@pair_options
@on_device
@json_option
@with_context
def policies_activate(ctx: click.Context, as_json: bool, policy_name: str, reason: str, **kw: Any) -> None:
    """Publish a policy: running decoders take it up between two rounds.

    \b
    Example:  cli.py policies activate policy.json --reason "trying a longer window"
    """
    from runtime.pair import read_pair

    spec = read_pair(kw.pop("pair"), kw.pop("target"), kw.pop("drafts"))
    device = _device(kw)
    with _store(ctx) as store:
        policy = _policy(store, policy_name, spec.id, device)
        _check_runs(store, policy, spec.id, spec.draft_names, device)
        store.put_pair(spec.id, spec.name, spec.to_json())
        store.put_policy(policy.id, policy.spelled_out(), policy.label())
        published = store.publish(spec.id, device, policy.id, actor="cli", reason=reason)
    _emit(
        as_json, {"version": published.version, "policy": policy.id}, f"version {published.version}: {policy.label()} is in force"
    )


def _check_runs(store: TraceStore, policy: Policy, pair_id: str, drafts: tuple[str, ...], device: str) -> None:
    """Raises PolicyError now for what every runtime would refuse later."""
    from optimizer.artifacts import fitted, q_tables
    from runtime.policies.prepared import prepare

    _, found = _profile(store, None, pair_id, device)
    prepare(policy, drafts, profile=found, q_tables=q_tables(store), artifacts=fitted(store, pair_id))


@policies.command("rollback")
@click.option("--to", type=int, help="Version to go back to; default: the one before the active.")
@pair_options
@on_device
@json_option
@with_context
def policies_rollback(ctx: click.Context, as_json: bool, to: int | None, **kw: Any) -> None:
    """Publish an earlier policy again. Nothing is erased: the rollback is a new version.

    \b
    Example:  cli.py policies rollback
    """
    from traces.errors import PolicyError

    pair_id, device = _pair_id(kw), _device(kw)
    with _store(ctx) as store:
        found = store.list_publications(pair_id, device)
        active = found[0] if found else None
        if to is None:
            earlier = next((p for p in found[1:] if active and p.policy_id != active.policy_id), None)
        else:
            earlier = next((p for p in found if p.version == to), None)
        if active is None or earlier is None:
            raise PolicyError(
                f"no earlier policy to go back to for pair {pair_id} on {device}"
                if to is None
                else f"--to {to}: pair {pair_id} has no such version on {device} (see `policies list`)"
            )
        published = store.publish(
            pair_id,
            device,
            earlier.policy_id,
            actor="cli",
            reason=f"rollback of version {active.version} to {earlier.version}",
            expected=active.version,
        )
    _emit(
        as_json,
        {"version": published.version, "policy": published.policy_id},
        f"version {published.version}: {published.label} is in force again",
    )


@policies.command("export")
@click.argument("policy_name", metavar="POLICY", default="active")
@click.option(
    "--for", "engine", type=click.Choice(["spectune", "vllm", "sglang", "tensorrt-llm"]), default="spectune", show_default=True
)
@pair_options
@on_device
@json_option
@with_context
def policies_export(ctx: click.Context, as_json: bool, policy_name: str, engine: str, **kw: Any) -> None:
    """Print a policy as a document, or as another engine's settings where they can say the same (JSON either way).

    \b
    Example:  cli.py policies export active > policy.json
              cli.py policies export active --for vllm
    """
    from runtime.pair import read_pair

    spec = read_pair(kw.pop("pair"), kw.pop("target"), kw.pop("drafts"))
    device = _device(kw)
    with _store(ctx) as store:
        policy = _policy(store, policy_name, spec.id, device)
    from optimizer.export import engine_settings

    data = policy.spelled_out() if engine == "spectune" else engine_settings(policy, spec, engine)
    click.echo(json.dumps(data, indent=None if as_json else 2))


@main.group()
def traces() -> None:
    """Recordings: list, show, stats, report, query, export, import, prune."""


filter_options = _options(
    click.option("--recording", "recordings", multiple=True, help="Id, beginning of one, or latest; repeatable."),
    click.option("--pair-id", "pair", help="Pair id."),
    click.option("--category", "categories", multiple=True, help="Repeatable."),
    click.option("--since", type=click.DateTime(), help="Recorded at or after (UTC)."),
    click.option("--until", type=click.DateTime(), help="Recorded before (UTC)."),
    click.option("--draft", "draft", help="Draft whose acceptance is meant."),
    click.option("--min-acceptance", type=click.FloatRange(0, 1)),
    click.option("--max-acceptance", type=click.FloatRange(0, 1)),
)


def _filter(kw: dict[str, Any]) -> Any:
    from datetime import UTC

    from traces.query import TraceFilter

    moments = {k: kw[k].replace(tzinfo=UTC) if kw[k] else None for k in ("since", "until")}
    return TraceFilter(
        recordings=tuple(kw["recordings"]),
        pair=kw["pair"],
        categories=tuple(kw["categories"]),
        draft=kw["draft"],
        min_acceptance=kw["min_acceptance"],
        max_acceptance=kw["max_acceptance"],
        **moments,
    )


@traces.command("list")
@filter_options
@json_option
@with_context
def traces_list(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Recordings that hold a matching request, newest first.

    \b
    Example:  cli.py traces list --category code
    """
    from optimizer.report import rows_table
    from traces.query import list_recordings

    with _store(ctx, create=False) as store:
        found = list_recordings(store.database, _filter(kw))
    rows = [info.to_json() for info in found]
    columns = (
        "id",
        "pair_id",
        "source",
        "state",
        "n_requests",
        "n_output_tokens",
        "max_new_tokens",
        "drafts",
        "trees",
        "created_at",
    )
    table = [{**row, "trees": info.trees_shown()} for row, info in zip(rows, found, strict=True)]
    _emit(as_json, {"recordings": rows}, lambda: rows_table(table, columns, "recordings"))


@traces.command("show")
@click.argument("recording", default="latest")
@click.option("--request", "request_id", help="One request: its text's rounds.")
@json_option
@with_context
def traces_show(ctx: click.Context, as_json: bool, recording: str, request_id: str | None) -> None:
    """One recording: what was asked, and its requests; or the rounds of one request.

    \b
    Example:  cli.py traces show latest --request code-003
    """
    from dataclasses import asdict

    from optimizer.report import rows_table
    from traces.errors import TraceError
    from traces.query import RequestRow, TraceFilter, request_rows

    with _store(ctx, create=False) as store:
        name = store.resolve_recording(recording)
        info = store.get_recording(name)
        if request_id is not None:
            found = next((r for r in store.iterate(name, drafts=(), steps=True) if r.trajectory.request_id == request_id), None)
            if found is None:
                raise TraceError(f"recording {name} has no request {request_id!r} (see `traces query --recording {name}`)")
            steps = [asdict(s) for s in found.steps]
            shown = (
                "start",
                "drafted",
                "verified",
                "accepted",
                "emitted",
                "draft_steps",
                "lag",
                "draft_s",
                "verify_s",
                "round_s",
            )
            _emit(
                as_json,
                {"request": request_id, "output_ids": found.trajectory.output_ids.tolist(), "steps": steps},
                lambda: rows_table(steps, shown, f"{request_id}: rounds"),
            )
            return
        rows = [r.to_json() for r in request_rows(store.database, TraceFilter(recordings=(name,)))]
    columns = tuple(c for c in RequestRow.columns() if c not in ("recording", "recorded_at"))
    title = f"recording {name}: {info.state}" + (f"; trees of {grown}" if (grown := info.trees_shown()) else "")
    _emit(as_json, {**info.to_json(), "requests": rows}, lambda: rows_table(rows, columns, title))


@traces.command("stats")
@filter_options
@click.option("--by", default="draft,category", show_default=True, help="Of draft, category, recording; comma-separated.")
@click.option("--executed", is_flag=True, help="Over the rounds executed, not over every start of the panoramas.")
@json_option
@with_context
def traces_stats(ctx: click.Context, as_json: bool, by: str, executed: bool, **kw: Any) -> None:
    """Acceptance, overall and by position in the draft.

    marginal: share of chains that reach a position; conditional: of those that reached the one before.

    \b
    Example:  cli.py traces stats --by draft,category
    """
    from optimizer.report import rows_table
    from traces.query import GROUPS, GroupBy, acceptance_stats, executed_stats

    groups: list[GroupBy] = []
    for name in by.split(","):
        match = next((g for g in GROUPS if g == name.strip()), None)
        if match is None:
            raise click.BadParameter(f"{name!r}: one of {', '.join(GROUPS)} is expected", param_hint="--by")
        groups.append(match)
    with _store(ctx, create=False) as store:
        call = executed_stats if executed else acceptance_stats
        rows = [s.to_json() for s in call(store.database, _filter(kw), groups)]
    for row in rows:
        row["by_position"] = " ".join(f"{x:.2f}" for x in row["marginal"][:10])
    shown = tuple(g for g in groups if not (executed and g == "draft"))
    columns = (*shown, "requests", "acceptance", "mean_accepted_length", "by_position")
    _emit(as_json, {"stats": rows}, lambda: rows_table(rows, columns, "acceptance"))


@traces.command("report")
@click.argument("recording", default="latest")
@click.option("--draft", help="Draft whose trees are meant; default: the first that has trees of every request.")
@click.option("--out", type=click.Path(dir_okay=False), help="The page; default: trees-RECORDING-DRAFT.html here.")
@click.option("--top-n", type=click.IntRange(1, 256), default=60, show_default=True, help="Nodes kept of a tree.")
@click.option("--width", type=click.IntRange(2, 32), help="Children of a node; default: as recorded.")
@click.option("--depth", type=click.IntRange(1, 64), help="Levels; default: as recorded.")
@json_option
@with_context
def traces_report(ctx: click.Context, as_json: bool, recording: str, **kw: Any) -> None:
    """Draw what a recording's draft trees do: one HTML page that needs nothing else, with the figures of the tree papers.

    Terminal Confidence Ranks, probability and acceptance by entropy and rank, tau by window and by verified tokens for many policies,
    entropy bins, categories. The recording must hold trees (`record --tree-width 8 --tree-depth 8`).

    \b
    Example:  cli.py traces report latest --out trees.html
              cli.py traces report latest --draft small --top-n 32 --depth 6
    """
    from optimizer.tree_sources import report_of

    _check_writable(("--out", kw["out"]))
    with _store(ctx, create=False) as store, Meter() as meter:
        report, name = report_of(
            store,
            store.resolve_recording(recording),
            kw["draft"],
            top_n=kw["top_n"],
            width=kw["width"],
            depth=kw["depth"],
            progress=lambda done, total: meter("replay", done, total),
        )
    from optimizer.report_html import page

    out = kw["out"] or f"trees-{name}-{report.draft}.html"
    _write_text(out, [page(report)])
    data = {"path": out, "recording": name, **report.to_json()}
    left_out = f", {len(report.skipped)} policies left out" if report.skipped else ""
    _emit(as_json, data, f"{out}: trees of draft {report.draft}, {len(report.points)} policies{left_out}")


@traces.command("query")
@filter_options
@click.option("--format", "kind", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@json_option
@with_context
def traces_query(ctx: click.Context, as_json: bool, kind: str, **kw: Any) -> None:
    """One row per request and draft.

    \b
    Example:  cli.py traces query --draft small --max-acceptance 0.5 --format csv
    """
    from optimizer.report import rows_table
    from traces.export import write_rows
    from traces.query import RequestRow, request_rows

    with _store(ctx, create=False) as store:
        rows = list(request_rows(store.database, _filter(kw)))
    if as_json:
        click.echo(json.dumps({"requests": [r.to_json() for r in rows]}, ensure_ascii=False))
    elif kind in ("json", "csv"):
        write_rows(rows, sys.stdout, "json" if kind == "json" else "csv")
    else:
        columns = tuple(c for c in RequestRow.columns() if c != "recorded_at")
        _console().print(rows_table([r.to_json() for r in rows], columns))


@traces.command("export")
@click.argument("path", type=click.Path(dir_okay=False))
@filter_options
@json_option
@with_context
def traces_export(ctx: click.Context, as_json: bool, path: str, **kw: Any) -> None:
    """Rows to .json, .csv or .parquet; whole recordings, to be imported elsewhere, to .db.

    \b
    Example:  cli.py traces export rows.parquet --category code
              cli.py traces export recording.db --recording latest
    """
    from traces.export import export_rows
    from traces.query import list_recordings, request_rows
    from traces.transfer import export_recordings

    with _store(ctx, create=False) as store:
        if path.endswith(".db"):
            names = [r.id for r in list_recordings(store.database, _filter(kw))]
            moved = export_recordings(store.database, names, path)
            data: dict[str, Any] = {"path": path, "recordings": list(moved.added), "chunks": moved.chunks}
        else:
            data = {"path": path, "rows": export_rows(request_rows(store.database, _filter(kw)), path)}
    _emit(as_json, data, ", ".join(f"{k} {v}" for k, v in data.items()))


@traces.command("import")
@click.argument("path", type=click.Path(dir_okay=False))
@json_option
@with_context
def traces_import(ctx: click.Context, as_json: bool, path: str) -> None:
    """Add the recordings of an exported .db file; what is here already stays as it is.

    \b
    Example:  cli.py traces import recording.db
    """
    from traces.transfer import import_recordings

    with _store(ctx) as store:
        moved = import_recordings(store.database, path)
    data = {"added": list(moved.added), "present": list(moved.present), "chunks": moved.chunks}
    _emit(as_json, data, f"added {', '.join(moved.added) or 'nothing'}; already here: {', '.join(moved.present) or 'nothing'}")


@traces.command("prune")
@click.option("--recording", "recordings", multiple=True, help="Remove this one; repeatable.")
@click.option("--older-than", help="Remove recordings older than, e.g., 30d.")
@click.option("--keep-last", type=click.IntRange(0), help="Keep the newest N.")
@click.option("--force", is_flag=True, help="Remove even what a publication's evidence refers to.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
@with_context
def traces_prune(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Remove old recordings; those that a publication rests on are spared.

    \b
    Example:  cli.py traces prune --older-than 30d --dry-run
    """
    from datetime import timedelta

    from optimizer.schedule import parse_duration
    from traces.prune import prune

    with _store(ctx, create=False) as store:
        before = store.clock() - timedelta(seconds=parse_duration(kw["older_than"])) if kw["older_than"] else None
        report = prune(
            store.database,
            recordings=kw["recordings"],
            before=before,
            keep_last=kw["keep_last"],
            force=kw["force"],
            dry_run=kw["dry_run"],
            vacuum=not kw["dry_run"],
        )
    verb = "would remove" if report.dry_run else "removed"
    names = ", ".join(p.recording for p in report.removed) or "nothing"
    kept = f"; spared as evidence: {', '.join(report.kept)}" if report.kept else ""
    _emit(as_json, report.to_json(), f"{verb} {names} ({report.size_bytes} bytes){kept}")


@main.group()
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
    from db.database import upgrade

    before, after = upgrade(ctx.find_root().obj)
    note = f"already at {after}" if before == after else f"{before or 'new'} -> {after}"
    _emit(as_json, {"before": before, "after": after}, f"schema {note}")


@db.command("check")
@json_option
@with_context
def db_check(ctx: click.Context, as_json: bool) -> None:
    """Check integrity, foreign keys, schema and the checksum of every chunk; exit code 1 if anything is wrong.

    \b
    Example:  cli.py db check
    """
    from db.check import check

    report = check(ctx.find_root().obj)
    _emit(as_json, report.to_json(), "\n".join(report.problems) if not report.ok else "the database is sound")
    if not report.ok:
        ctx.exit(1)


@main.group()
def schedule() -> None:
    """Scheduled re-optimization: add, list, show, pause, resume, remove, run, run-once, history."""


@schedule.command("add")
@click.argument("name")
@click.option("--cron", help='Five fields, e.g. "0 3 * * *".')
@click.option("--every", help="Interval, e.g. 6h, 30m, 1d.")
@click.option("--tz", default="UTC", show_default=True, help="Time zone of the cron fields.")
@click.option("--budget", default="10m", show_default=True, help="What one job may take.")
@click.option("--misfire-grace", default="1h", show_default=True, help="A slot later than this is not run any more; or 'none'.")
@click.option("--max-instances", type=click.IntRange(1), default=1, show_default=True, help="Unfinished jobs at a time.")
@click.option("--max-attempts", type=click.IntRange(1), default=3, show_default=True, help="Workers that may die on a job.")
@click.option("--no-coalesce", is_flag=True, help="Run every missed slot instead of the latest alone.")
@click.option("--recorded", help='Tune on what was recorded in the last, e.g., "24h" instead of decoding a workload.')
@search_options
@pair_options
@workload_options
@sampling_options
@device_options
@json_option
@with_context
def schedule_add(ctx: click.Context, as_json: bool, name: str, **kw: Any) -> None:
    """Add a schedule; workers (`schedule run`, `schedule run-once`) do its jobs.

    \b
    Example:  cli.py schedule add nightly --cron "0 3 * * *" --tz Europe/Berlin
              cli.py schedule add drift --every 6h --recorded 24h --budget 20m
              cli.py schedule add chains --every 6h --tree-width 0
    """
    from optimizer.jobs import check_payload
    from optimizer.schedule import add_schedule
    from runtime.pair import read_pair

    spec = read_pair(kw["pair"], kw["target"], kw["drafts"])
    spec.check()
    payload: dict[str, Any] = {
        "pair": spec.to_json(),
        "device": kw["device"],
        "dtype": kw["dtype"],
        "threads": kw["threads"],
        "max_new_tokens": kw["max_new_tokens"],
        "temperature": kw["temperature"],
        "top_k": kw["top_k"],
        "top_p": kw["top_p"],
        "seed": kw["seed"],
        "verifier": kw["verifier"],
        "stop_strings": list(kw["stop_strings"]),
        "chat": not kw["no_chat"],
        **_search_options(kw),
    }
    if kw["recorded"]:
        payload["recorded"] = kw["recorded"]
    else:
        from optimizer.inputs import load_workload

        load_workload(kw["workloads"], all_turns=kw["all_turns"], limit=kw["limit"], categories=kw["categories"])
        payload |= {
            "workload": [w if w == "demo" else str(Path(w).resolve()) for w in kw["workloads"]] or ["demo"],
            "categories": list(kw["categories"]),
            "limit": kw["limit"],
            "all_turns": kw["all_turns"],
            "fresh": True,
        }
    check_payload(payload)
    with _store(ctx) as store:
        added = add_schedule(
            store.database,
            name,
            cron=kw["cron"],
            every=kw["every"],
            tz=kw["tz"],
            payload=payload,
            budget=kw["budget"],
            misfire_grace=None if kw["misfire_grace"] == "none" else kw["misfire_grace"],
            max_instances=kw["max_instances"],
            max_attempts=kw["max_attempts"],
            coalesce=not kw["no_coalesce"],
        )
    _emit(as_json, added.to_json(), f"schedule {name}: {added.when}, first at {added.next_fire_at:%Y-%m-%d %H:%M:%S} UTC")


@schedule.command("list")
@json_option
@with_context
def schedule_list(ctx: click.Context, as_json: bool) -> None:
    """All schedules.

    \b
    Example:  cli.py schedule list
    """
    from optimizer.report import rows_table
    from optimizer.schedule import list_schedules

    with _store(ctx) as store:
        found = list_schedules(store.database)
    rows = [{**s.to_json(), "when": s.when} for s in found]
    _emit(
        as_json,
        {"schedules": rows},
        lambda: rows_table(rows, ("name", "when", "next_fire_at", "enabled", "budget_s"), "schedules"),
    )


@schedule.command("show")
@click.argument("name")
@json_option
@with_context
def schedule_show(ctx: click.Context, as_json: bool, name: str) -> None:
    """One schedule, whole.

    \b
    Example:  cli.py schedule show nightly
    """
    from optimizer.schedule import get_schedule

    with _store(ctx) as store:
        found = get_schedule(store.database, name).to_json()
    _emit(as_json, found, json.dumps(found, indent=2))


def _schedule_verb(verb: str, what: str, say: str) -> None:
    @schedule.command(verb, help=f"{what}\n\n\b\nExample:  cli.py schedule {verb} nightly")
    @click.argument("name")
    @json_option
    @with_context
    def command(ctx: click.Context, as_json: bool, name: str) -> None:
        import optimizer.schedule as schedules

        with _store(ctx) as store:
            found = getattr(schedules, f"{verb}_schedule")(store.database, name)
        _emit(as_json, found.to_json(), f"schedule {name} {say}")


_schedule_verb("pause", "Let a schedule rest: none of its slots fires until it is resumed.", "is paused")
_schedule_verb("resume", "Wake a paused schedule; slots missed meanwhile are not made up for.", "is resumed")
_schedule_verb("remove", "Remove a schedule and its history.", "is removed")


@schedule.command("history")
@click.argument("name", required=False)
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True)
@json_option
@with_context
def schedule_history(ctx: click.Context, as_json: bool, name: str | None, limit: int) -> None:
    """Slots that fired, and what became of their jobs.

    \b
    Example:  cli.py schedule history nightly
    """
    from optimizer.report import rows_table
    from optimizer.schedule import history

    with _store(ctx) as store:
        fires = history(store.database, name, limit=limit)
    rows = [
        {
            "schedule": f.schedule,
            "fire_at": f.fire_at.isoformat(),
            "outcome": f.outcome,
            "state": f.job.state if f.job else None,
            "attempt": f.job.attempt if f.job else None,
            "result": (f.job.result or {}).get("label") if f.job else None,
            "published": (f.job.result or {}).get("published") if f.job else None,
            "error": f.job.error.splitlines()[0] if f.job and f.job.error else None,
        }
        for f in fires
    ]
    _emit(
        as_json,
        {"history": [f.to_json() for f in fires]},
        lambda: rows_table(
            rows, ("schedule", "fire_at", "outcome", "state", "attempt", "result", "published", "error"), "history"
        ),
    )


@schedule.command("run")
@click.option("--poll", default="30s", show_default=True, help="How often to look for due slots.")
@json_option
@with_context
def schedule_run(ctx: click.Context, as_json: bool, poll: str) -> None:
    """Work: fire what is due and run its jobs, until SIGINT or SIGTERM. Any number of workers may share a database.

    \b
    Example:  cli.py schedule run --poll 10s
    """
    from optimizer.schedule import parse_duration, run_worker

    _work(ctx, as_json, lambda database, execute, **kw: run_worker(database, execute, poll_s=float(parse_duration(poll)), **kw))


@schedule.command("run-once")
@json_option
@with_context
def schedule_run_once(ctx: click.Context, as_json: bool) -> None:
    """Fire what is due, run every waiting job, and end: for cron and systemd timers.

    \b
    Example:  cli.py schedule run-once
    """
    from optimizer.schedule import run_once

    _work(ctx, as_json, run_once)


def _schedule_line(event: Fire | Ended) -> str:
    from optimizer.schedule import Fire

    if isinstance(event, Fire):
        return f"{event.schedule}: slot of {event.fire_at:%Y-%m-%d %H:%M:%S} UTC: {event.outcome}"
    said = f": {event.error.splitlines()[0]}" if event.error else ""
    return f"{event.job.schedule}: job {event.job.id} {event.ending}{said}"


def _work(ctx: click.Context, as_json: bool, work: Callable[..., Any]) -> None:
    with _store(ctx) as store:
        from optimizer.jobs import tuning_job

        with Meter() as meter:
            report = work(
                store.database,
                tuning_job(store, progress=meter),
                watch=lambda event: click.echo(_schedule_line(event), err=True),
            )
    data = report.to_json()
    _emit(as_json, data, ", ".join(f"{v} {k}" for k, v in data.items()))


if __name__ == "__main__":
    main()
