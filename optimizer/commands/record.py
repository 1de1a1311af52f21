"""`record`: decode a workload, and compute each draft's proposals at every position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.on_engine import (
    NATIVE,
    OnEngine,
    check_engine,
    deployment_on,
    engine_options,
)
from spectune.optimizer.commands.options import Whole, decode_options, workload_of
from spectune.optimizer.commands.printing import Command, Meter, emit, note
from spectune.optimizer.commands.shared import (
    check_policy,
    fit_to,
    load,
    nothing_decoded,
    open_store,
    pair_spec,
    prepared,
)

if TYPE_CHECKING:
    from spectune.optimizer.execute import DecodeOptions
    from spectune.runtime.pair import PairSpec
    from spectune.traces.store import TraceStore


@click.command(cls=Command)
@opts.decoding
@engine_options
@opts.deployment
@option("--gamma-max", "Longest window the panorama holds.", Whole(2, 64), default=16)
@option("--policy policy_name", "Decodes the texts (never changes them).", default="active")
@flag("--fresh", "Begin anew instead of resuming an unfinished recording.")
@option(
    "--resume resumed_id",
    "Make what a recording lacks: texts, and panoramas of every draft.",
    metavar="ID",
)
@option(
    "--tree-width",
    "Record draft trees too, of so many children a node; default: 8 with --tree-depth.",
    int,
    metavar="1..32",
)
@option(
    "--tree-depth",
    "Record draft trees too, of so many levels; default: 8 with --tree-width.",
    int,
    metavar="1..64",
)
@opts.workers
def record(**kw: Any) -> None:
    """Decode a workload, store the texts, and what each draft proposes at every position.

    An unfinished recording of the same arguments is resumed, and so is the one that --resume names.
    Trees are recorded on request; with --resume they may be made wider or deeper than before.

    \b
    Example:  cli.py record --pair demo --limit 64 --max-new-tokens 96
              cli.py record --pair pair.json --workload chats.jsonl --temperature 0.7
              cli.py record --pair demo --engine openvino --concurrency 8 --policy policy.json
              cli.py record --resume latest --tree-width 8 --tree-depth 8
              cli.py record --resume latest --workers tcp://scheduler:8786
    """
    check_engine(kw)
    kw["deployment"] = deployment_on(kw["engine"])
    resumed, on_engine = kw["resumed_id"], kw["engine"] != NATIVE
    if on_engine:
        _without_trees(kw)
    if resumed:
        nothing_decoded("--resume", "fresh")
    with open_store() as store:
        spec = pair_spec(kw, store, resumed)
        if resumed:
            _go_on(kw, store)
        check_policy(store, kw["policy_name"])
        options = decode_options(kw)
        served = _served(store, spec, kw, options) if on_engine else None
        workload = None if resumed or on_engine else workload_of(kw, spec)
        pair = load(kw, spec)
        from spectune.optimizer.inputs import recording_of
        from spectune.optimizer.processes import dask_workers
        from spectune.optimizer.record import PanoramaSpec, begun_as, record_panoramas
        from spectune.optimizer.record import record as do_record
        from spectune.optimizer.serving import last_good
        from spectune.runtime.loop import StaticSource
        from spectune.traces.acceptance import hardly_accepted
        from spectune.traces.sanity import checked
        from spectune.traces.store.query import first_positions

        with dask_workers(kw["workers"]), Meter() as meter:
            begun = None
            if workload is None:
                before = recording_of(store, served or resumed, spec)
                if not served and before.state == "recording" and before.workload_id is not None:
                    begun, (workload, options) = before, begun_as(store, pair, before)
            spec_drafts = pair.chain_drafts if served else pair.draft_names
            panoramas = PanoramaSpec(spec_drafts, kw["gamma_max"], *_tree_size(kw))
            if workload is None:
                record_panoramas(store, pair, before.id, panoramas, progress=meter)
                if served:
                    store.finish_recording(served)
                info = store.get_recording(before.id)
            else:
                if begun is None:
                    workload = fit_to(pair, workload, options, kw["overlong"])
                profile = store.profile_of(pair.id, **pair.place)
                if kw["policy_name"] == "active":
                    plan = last_good(
                        store, pair, profile, options.verifier, options.sampling, kw["deployment"]
                    )
                else:
                    plan = prepared(store, pair, kw["policy_name"], options, profile)
                info = do_record(
                    store,
                    pair,
                    workload,
                    options,
                    panoramas,
                    StaticSource(plan),
                    fresh=kw["fresh"],
                    begun=begun,
                    progress=meter,
                )
        checks = checked(store.load(info.id, (), skip_corrupted=True).trajectories)
        first = first_positions(store, info.id)
    for line in (*checks.lines(), *hardly_accepted(first, pair.heads)):
        note(line)
    data = {"recording": info.id, "pair": info.pair_id, **info.to_json()}
    data["first_position"] = {draft: found.to_json() for draft, found in first.items()}
    emit(
        {**data, "heads": pair.hidden_states, "workload": checks.to_json()},
        f"recording {info.id}: {info.n_requests} requests, {info.n_output_tokens} tokens, "
        f"panoramas of {info.shown()}",
    )


def _served(store: TraceStore, spec: PairSpec, kw: dict[str, Any], options: DecodeOptions) -> str:
    """Serves the workload into a recording, which is looked around in and finished by who calls;
    its id."""
    from spectune.optimizer.on_engine import record_on

    asked = OnEngine(store, spec, kw, options, every_draft=True)
    texts = (asked.workload, asked.prompts, asked.policy, asked.load, options)
    with asked.started() as running, Meter() as meter:
        return record_on(store, spec, running, *texts, fresh=kw["fresh"], progress=meter).id


def _without_trees(kw: dict[str, Any]) -> None:
    """Raises UsageError for what an engine's recording cannot be asked for."""
    if kw["resumed_id"]:
        raise click.UsageError(
            "--resume goes on with what is recorded, without an engine; leave --engine out"
        )
    if any(kw[name] is not None for name in ("tree_width", "tree_depth")):
        raise click.UsageError(f"--engine {kw['engine']} drafts chains alone: leave --tree-... out")


def _go_on(kw: dict[str, Any], store: TraceStore) -> None:
    """Puts a recording that was not finished, named by its id alone, on the device and in the dtype
    that it was begun with."""
    before = store.get_recording(kw["resumed_id"])
    if before.state == "recording":
        for option in ("device", "dtype"):
            if kw[option] == "auto":
                kw[option] = before.options.get(option, "auto")


def _tree_size(kw: dict[str, Any]) -> tuple[int, int]:
    """Width and depth of the trees to record, (0, 0) for none. Raises TraceError."""
    from spectune.optimizer.inputs import tree_size

    width, depth = kw["tree_width"], kw["tree_depth"]
    return (0, 0) if width is None and depth is None else tree_size(width, depth)
