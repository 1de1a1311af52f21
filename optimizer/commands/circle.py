"""`record`, `profile`, `simulate`, `run`, `tune`, `generate`: the circle of ARCHITECTURE.md, a command for each part and for the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from optimizer.commands.outputs import check_writable, kept_unless_stored, write_rounds
from optimizer.commands.shared import (
    SEED,
    Meter,
    Whole,
    console_for,
    decode_options,
    device_options,
    dtype_of,
    emit,
    json_option,
    load,
    open_store,
    pair_options,
    policy_named,
    profile_of,
    sampling_options,
    say,
    search_asked,
    search_options,
    with_context,
    workload_of,
    workload_options,
)

if TYPE_CHECKING:
    from optimizer.execute import DecodeOptions
    from runtime.decoder import Decoded
    from runtime.loading import LoadedPair
    from runtime.loop import PolicySource
    from runtime.policies.document import Policy
    from traces.errors import OutputError
    from traces.schema import LatencyProfile, Outcome, Workload
    from traces.store import TraceStore


def _rounds(request: str, steps: Any) -> Iterator[dict[str, Any]]:
    for s in steps:
        yield {"request": request, "start": s.start, "drafted": s.drafted, "verified": s.verified, "accepted": s.accepted}


def _same_pair(pair_id: str, pair: LoadedPair, recording: str) -> None:
    from runtime.pair import former_id
    from traces.errors import TraceError

    if pair_id == pair.id:
        return
    if pair_id == former_id(pair.spec):
        raise TraceError(
            f"recording {recording} was made with pair {pair_id}, as {pair.spec.name} was called by an earlier version, whose ids left "
            "out most of the weights: it may be of others; `record` makes one of these"
        )
    raise TraceError(f"recording {recording} was made with pair {pair_id}, not with {pair.id} ({pair.spec.name}); give that pair")


@click.command()
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
    options = decode_options(kw)
    workload = None if kw["resumed_id"] else workload_of(kw)
    for key in ("workloads", "all_turns", "first_turn", "limit", "categories"):
        kw.pop(key, None)
    with open_store(ctx) as store:
        pair = load(kw, store)
        from optimizer.artifacts import fitted
        from optimizer.record import RecordRequest, begun_as, look_around
        from optimizer.record import record as do_record
        from runtime.loop import StaticSource
        from runtime.policies.plan import prepare

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
                look_around(
                    store,
                    pair,
                    recording,
                    pair.draft_names,
                    kw["gamma_max"],
                    trees["tree_width"],
                    trees["tree_depth"],
                    proposals=trees["tree_proposals"],
                    covers=trees["covers"],
                    progress=meter,
                )
                info = store.get_recording(recording)
            else:
                trees = _trees(store, pair, kw, sampled=not options.sampling.greedy)
                device = pair.device.type
                _, profile = profile_of(store, None, pair.id, device)
                if kw["policy_name"] == "active":
                    from optimizer.serving import last_good

                    prepared = last_good(store, pair, profile, options.verifier, options.sampling)
                else:
                    prepared = prepare(
                        policy_named(store, kw["policy_name"], pair.id, device),
                        pair.draft_names,
                        profile=profile,
                        artifacts=fitted(store, pair.id),
                    )
                source = StaticSource(prepared)
                wanted = RecordRequest(workload, options, pair.draft_names, kw["gamma_max"], **trees)
                info = do_record(store, pair, wanted, source, fresh=kw["fresh"], begun=begun, progress=meter)
    data = {"recording": info.id, "pair": info.pair_id, **info.to_json()}
    emit(
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
        policy = policy_named(store, name, pair.id, pair.device.type, option="--cover")
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


@click.command()
@pair_options
@device_options
@click.option("--gamma-max", type=click.IntRange(1, 64), default=16, show_default=True)
@click.option("--contexts", default="32,160,384", show_default=True, help="Context lengths to measure at, comma-separated.")
@click.option("--repeats", type=click.IntRange(3, 10_000), default=6, show_default=True)
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
    with open_store(ctx) as store:
        pair = load(kw, store)
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
        with kept_unless_stored(ctx, "profile", measured.to_json):
            store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
            name = store.put_profile(measured)
    for what, check in (("rounds", measured.check), ("rounds of trees", measured.check.get("trees"))):
        if check is not None and not check["accepted"]:
            click.echo(
                f"warning: composed {what} are off by {100 * check['median_error']:.0f}% (median); the machine is busy, or changed "
                "its speed while measuring: run `profile` again",
                err=True,
            )
    emit(as_json, {"profile": name, **measured.to_json()}, lambda: profile_table(measured, name))


@click.command()
@click.option("--policy", "policy_name", required=True, help="FILE, inline JSON, ID, active, or autoregressive.")
@click.option("--recording", default="latest", show_default=True)
@click.option("--profile", "profile_id", help="Profile id; default: the latest of the recording's pair and device.")
@click.option("--device", "on", help="Device whose profile is taken; default: the recording's.")
@click.option("--limit", type=Whole(1), help="Only the first N requests.")
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
    check_writable(ctx, ("--per-round", kw["per_round"]), reads=[kw["policy_name"]])
    with open_store(ctx, create=False) as store:
        info = store.get_recording(kw["recording"])
        device = kw["on"] or str(info.options.get("device", "cpu"))
        policy = policy_named(store, kw["policy_name"], info.pair_id, device)
        _, found = profile_of(store, kw["profile_id"], info.pair_id, device)
        from optimizer.artifacts import keep_q_table, q_table
        from optimizer.chooser_replay import ChosenReplay
        from optimizer.report import outcome_table
        from optimizer.trace import simulate as do_simulate
        from runtime.policies.document import ChooserPolicy
        from traces.errors import PolicyError

        if kw["keep_q_table"] and isinstance(policy, ChooserPolicy):
            raise PolicyError("--keep-q-table: a chooser's candidates keep their tables to themselves; simulate one of them")
        replayed, skipped, approximate = do_simulate(
            store,
            info.id,
            policy,
            found,
            limit=kw["limit"],
            per_round=kw["per_round"] is not None,
            skip_corrupted=kw["skip_corrupted"],
        )
        for chunk in skipped:
            click.echo(f"left out: request {chunk.ordinal} of {chunk.recording}: {chunk.problem}", err=True)
        if found is None:
            click.echo("no latency profile of this pair and device: seconds are left at 0 (run `profile`)", err=True)
        if kw["per_round"]:
            pairs = zip(replayed.trace.request_ids, replayed.steps(), strict=True)
            write_rounds(kw["per_round"], (row for request, steps in pairs for row in _rounds(request, steps)))
        outcome = replayed.outcome()
        data = _outcome_json(outcome, policy)
        if isinstance(replayed, ChosenReplay):
            data["picks"] = dict(sorted(Counter(replayed.chosen).items()))
        if kw["keep_q_table"]:
            about = {"recording": info.id, "policy": policy.spelled_out()}
            with kept_unless_stored(ctx, "simulate", lambda: {**data, "q_table": q_table(replayed.state).tolist()}):
                data["artifact"] = keep_q_table(store, replayed.state, info.pair_id, about)
            click.echo(f"artifact {data['artifact']}", err=True)
    if approximate:
        click.echo(f"approximate: {approximate}", err=True)
        data["approximate"] = True
    emit(as_json, data, lambda: outcome_table(outcome))


def _outcome_json(outcome: Outcome, policy: Policy) -> dict[str, Any]:
    return {**outcome.to_json(), "policy": policy.spelled_out(), "policy_id": policy.id, "label": policy.label()}


@click.command()
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
    options = decode_options(kw)
    files = [] if kw["pair"] is None else [kw["pair"], f"{kw['pair']}/pair.json"]
    reads = [*files, *kw["workloads"], kw["policy_name"]]
    check_writable(ctx, ("--outputs", kw["outputs"]), ("--per-round", kw["per_round"]), reads=reads)
    workload = workload_of(kw)
    with open_store(ctx) as store:
        pair = load(kw, store)
        from optimizer.execute import encode, outcome
        from optimizer.execute import run as execute
        from optimizer.record import record_served
        from optimizer.report import outcome_table

        encoded = encode(pair, workload, options)
        _, found = profile_of(store, kw["profile_id"], pair.id, pair.device.type)
        recording = record_served(store, pair, options) if kw["keep_texts"] else nullcontext()
        decoded: list[Decoded] = []
        with _source(store, pair, kw["policy_name"], found, options) as source, recording as writer, Meter() as meter:
            if writer is not None:
                click.echo(f"recording {writer.recording}", err=True)
            for done in execute(pair, source, encoded):
                decoded.append(done)
                if writer is not None:
                    writer.put(done.trajectory, done.steps)
                meter("run", len(decoded), len(encoded.items))
            last = source.current().policy
        result = outcome(last.label(), decoded)
        texts = _texts(pair, decoded)
        data = _outcome_json(result, last)
        failed = _write_results(kw, texts, decoded)
        with kept_unless_stored(ctx, "run", lambda: {"pair": pair.id, **data, "texts": _with_rounds(texts, decoded)}):
            if writer is not None:
                writer.check()
            if not kw["no_store"]:
                _keep_run(store, pair, last, result, workload, decoded)
            if failed is not None:
                raise failed
    emit(as_json, data, lambda: outcome_table(result))


def _texts(pair: LoadedPair, decoded: Iterable[Decoded]) -> list[dict[str, Any]]:
    outputs = [(d.trajectory.request_id, d.trajectory.output_ids.tolist()) for d in decoded]
    return [{"id": request, "token_ids": ids, "text": pair.text(ids)} for request, ids in outputs]


def _with_rounds(texts: Iterable[dict[str, Any]], decoded: Iterable[Decoded]) -> list[dict[str, Any]]:
    return [
        {**text, "seconds": d.seconds, "rounds": list(_rounds(d.trajectory.request_id, d.steps))}
        for text, d in zip(texts, decoded, strict=True)
    ]


def _write_results(kw: dict[str, Any], texts: Iterable[dict[str, Any]], decoded: Iterable[Decoded]) -> OutputError | None:
    """Writes the files that ``run`` was asked for. An error is returned: what can be stored is to be stored first."""
    from traces.errors import OutputError

    try:
        if kw["outputs"]:
            write_rounds(kw["outputs"], texts)
        if kw["per_round"]:
            write_rounds(kw["per_round"], (row for d in decoded for row in _rounds(d.trajectory.request_id, d.steps)))
    except OutputError as error:
        return error
    return None


def _keep_run(store: TraceStore, pair: LoadedPair, policy: Policy, result: Outcome, workload: Workload, decoded: Any) -> None:
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
    store.put_policy(policy.id, policy.spelled_out(), policy.label())
    store.put_run(
        pair.id,
        policy.id,
        result,
        device=pair.device.type,
        dtype=dtype_of(pair),
        workload_id=store.put_workload(workload),
        purpose="run",
        steps={d.trajectory.request_id: d.steps for d in decoded},
    )


@contextmanager
def _source(
    store: TraceStore, pair: LoadedPair, name: str, profile: LatencyProfile | None, options: DecodeOptions
) -> Iterator[PolicySource]:
    """A policy source: the policy named for ever, or for ``active`` whatever is published, now and later."""
    from optimizer.artifacts import fitted
    from runtime.loop import StaticSource

    if name != "active":
        policy = policy_named(store, name, pair.id, pair.device.type)
        from runtime.decoder import prepare_for

        prepared = prepare_for(
            pair,
            policy,
            profile=profile,
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
            say(f"publication {source.seen} is refused: {source.last_error}; using {source.current().label}", err=True)
        yield source
    if source.left:
        click.echo(source.left, err=True)


@click.command()
@pair_options
@workload_options
@sampling_options
@device_options
@search_options
@click.option("--budget", default="2m", show_default=True, help="Time for the executed comparison, e.g. 90s, 10m.")
@click.option("--search-seed", type=SEED, default=0, show_default=True)
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

    options = decode_options(kw)
    budget_s = float(parse_duration(kw.pop("budget")))
    searched = search_asked(kw)
    workload = None if kw["recording_id"] else workload_of(kw)
    with open_store(ctx) as store:
        pair = load(kw, store)
        from optimizer.report import evidence_table
        from optimizer.tune import TuneOptions, tune_recording
        from optimizer.tune import tune as do_tune

        wanted = TuneOptions(
            options=options,
            seed=kw["search_seed"],
            budget_s=budget_s,
            fresh=kw["fresh"],
            publish=not kw["no_publish"],
            publishing=lambda tuned: kept_unless_stored(ctx, "tune", tuned.to_json),
            **searched,
        )
        with Meter() as meter:
            if workload is None:
                recording = store.resolve_recording(kw["recording_id"])
                info = store.get_recording(recording)
                _same_pair(info.pair_id, pair, recording)
                if info.state != "complete" and info.workload_id is not None:
                    click.echo(
                        f"recording {recording} was never finished: tuning on the {info.n_requests} requests it holds "
                        f"(`record --resume {recording}` makes the others)",
                        err=True,
                    )
                tuned = tune_recording(store, pair, recording, wanted, progress=meter)
            else:
                tuned = do_tune(store, pair, workload, wanted, progress=meter)
    emit(as_json, tuned.to_json(), lambda: evidence_table(tuned))


@click.command()
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

    options = decode_options(kw)
    if not prompt.strip():
        raise WorkloadError("the prompt is empty")
    with open_store(ctx) as store:
        pair = load(kw, store)
        from optimizer.artifacts import fitted
        from optimizer.execute import encode
        from optimizer.generate import generate as do_generate
        from traces.schema import Request, Workload

        encode(
            pair, Workload("prompt", (Request("prompt", "prompt", (prompt,)),)), options
        )  # refused before anything else is said
        _, found = profile_of(store, None, pair.id, pair.device.type)
        policy = policy_named(store, kw["policy_name"], pair.id, pair.device.type)
        from runtime.decoder import prepare_for

        prepared = prepare_for(
            pair, policy, profile=found, artifacts=fitted(store, pair.id), sampling=options.sampling
        )
    console = console_for(stderr=as_json)
    console.width = 10_000 if not console.is_terminal else console.width
    result = do_generate(pair, prepared, prompt, options, console, compare=not kw["no_compare"], show_trees=kw["show_trees"])
    if as_json:
        emit(True, result, None)
