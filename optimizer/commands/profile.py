"""`profile`: measure what rounds cost on this device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.engine_profile import profile_on_engine
from spectune.optimizer.commands.on_engine import NATIVE, check_engine, engine_option
from spectune.optimizer.commands.outputs import kept_unless_stored
from spectune.optimizer.commands.shared import (
    Meter,
    Whole,
    device_options,
    emit,
    load,
    open_store,
    pair_options,
    pair_spec,
    same_pair,
    say,
    with_json,
)

if TYPE_CHECKING:
    from spectune.traces.schema import Trajectory


@click.command()
@pair_options
@device_options
@engine_option
@click.option(
    "--concurrency",
    type=Whole(1),
    help="Measure from 1 to N requests at a time, on an engine that batches; default: 8.",
)
@click.option(
    "--gamma-max",
    type=click.IntRange(1, 64),
    help="Longest drafts measured; default: 16, on another engine 8.",
)
@click.option(
    "--contexts",
    help="Context lengths to measure at, comma-separated; default: those that the recording "
    "serves, else 32,160,384.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 10_000),
    default=1,
    show_default=True,
    help="Sweeps over all that is measured.",
)
@click.option(
    "--no-trees", is_flag=True, help="Leave out what trees cost: quicker, for chains alone."
)
@click.option(
    "--recording",
    help="Measure trees on the texts of ID or latest, another engine on their prompts; default: "
    "the pair's newest complete one, else random tokens, or the demo's prompts.",
)
@with_json
def profile(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Measure what every part of a round costs on this device.

    What drafting and verifying trees costs depends on the text, so `record` first. On an engine
    that batches, measure what its steps cost, with each draft of the pair and without: its
    recordings tell `simulate --arrivals` and `tune --arrivals` so.

    \b
    Example:  cli.py profile --pair pair.json --device cpu
              cli.py profile --pair pair.json --engine openvino --concurrency 8 --gamma-max 6
    """
    if kw["engine"] != NATIVE:
        profile_on_engine(ctx, kw, as_json=as_json)
        return
    check_engine({**kw, "concurrency": kw["concurrency"] or 1})
    _profile_here(ctx, as_json=as_json, **kw)


def _profile_here(
    ctx: click.Context,
    *,
    as_json: bool,
    contexts: str | None,
    repeats: int,
    no_trees: bool,
    recording: str | None,
    **kw: Any,
) -> None:
    """`profile` of the native decoder."""
    try:
        lengths = tuple(sorted({int(c) for c in contexts.split(",")})) if contexts else ()
    except ValueError:
        raise click.BadParameter(
            "whole numbers separated by commas are expected", param_hint="--contexts"
        ) from None
    if lengths and lengths[0] < 1:
        raise click.BadParameter(
            f"{lengths[0]}: a context has at least 1 token", param_hint="--contexts"
        )
    if no_trees and recording is not None:
        raise click.UsageError(
            "--recording says on which texts trees are measured; leave it out, or --no-trees"
        )
    with open_store(ctx) as store:
        pair = load(kw, store, pair_spec(kw, store, recording))
        from spectune.optimizer.profiles import served_contexts
        from spectune.optimizer.record import texts_to_profile, whole_texts
        from spectune.optimizer.report.tables import profile_table
        from spectune.runtime.profiling import measure_profile

        texts: Sequence[Trajectory] = ()
        if not no_trees:
            if recording is not None:
                same_pair(store.get_recording(recording).pair_id, pair, recording)
            recording, texts = texts_to_profile(store, pair.id, recording)
            on = (
                f"the {len(texts)} texts of recording {recording}"
                if recording
                else "random tokens: nothing of this pair is recorded"
            )
            click.echo(f"trees are measured on {on}", err=True)
        with Meter() as meter:
            measured = measure_profile(
                pair,
                texts=whole_texts(texts),
                gamma_max=kw["gamma_max"] or 16,
                contexts=lengths or served_contexts(texts),
                repeats=repeats,
                trees=not no_trees,
                progress=lambda what, done, total: meter("profile", done, total),
            )
        with kept_unless_stored(ctx, "profile", measured.to_json):
            store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
            name = store.put_profile(measured)
    for what, check in (("policies", measured.check), ("trees", measured.check.get("trees"))):
        if check is not None and not check["accepted"]:
            say(
                f"warning: the predicted seconds of {what} are off by "
                f"{100 * check['policy_error']:.0f}% (median); "
                "the machine is busy, or changed its speed while measuring: run `profile` again",
                err=True,
            )
    emit(as_json, {"profile": name, **measured.to_json()}, lambda: profile_table(measured, name))
