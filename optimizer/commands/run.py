"""`run`: execute a policy on a workload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.executed import finish_run
from spectune.optimizer.commands.on_engine import (
    NATIVE,
    OnEngine,
    check_engine,
    engine_options,
    run_on_engine,
)
from spectune.optimizer.commands.outputs import check_writable
from spectune.optimizer.commands.shared import (
    Meter,
    check_policy,
    decode_options,
    decoding_options,
    deployment_option,
    dtype_of,
    fit_to,
    load,
    open_store,
    pair_spec,
    prepared,
    profile_of,
    say,
    say_unpublished,
    with_json,
    workload_of,
)

if TYPE_CHECKING:
    from spectune.optimizer.execute import DecodeOptions
    from spectune.runtime.decoder import Decoded
    from spectune.runtime.loading import LoadedPair
    from spectune.runtime.loop import PolicySource
    from spectune.traces.schema import LatencyProfile
    from spectune.traces.store import TraceStore


@click.command()
@click.option(
    "--policy",
    "policy_name",
    default="active",
    show_default=True,
    help="FILE, inline JSON, ID, active, or autoregressive.",
)
@decoding_options
@engine_options
@deployment_option
@click.option(
    "--profile", "profile_id", help="Profile for windows that need costs; default: the latest."
)
@click.option(
    "--outputs", type=click.Path(dir_okay=False), help="Write the texts, one JSON line per request."
)
@click.option("--per-round", type=click.Path(dir_okay=False), help="Write one JSON line per round.")
@click.option(
    "--record",
    "keep_texts",
    is_flag=True,
    help="Keep the texts as a recording, for `tune --recording` and schedules.",
)
@click.option("--no-store", is_flag=True, help="Do not keep the run in the database.")
@with_json
def run(ctx: click.Context, **kw: Any) -> None:
    """Execute a policy on a workload and measure it.

    With --policy active, publications made meanwhile are picked up between two rounds.

    \b
    Example:  cli.py run --pair demo --policy policy.json --limit 32 --outputs texts.jsonl
              cli.py run --pair demo --policy policy.json --engine openvino --concurrency 8
    """
    check_writable(ctx, ("--outputs", kw["outputs"]), ("--per-round", kw["per_round"]))
    check_engine(kw)
    with open_store(ctx) as store:
        spec = pair_spec(kw, store)
        check_policy(store, kw["policy_name"])
        options = decode_options(kw)
        if kw["engine"] != NATIVE:
            run_on_engine(ctx, OnEngine(store, spec, kw, options))
            return
        workload = workload_of(kw, spec, chat=options.chat)
        pair = load(kw, store, spec)
        from spectune.optimizer.changes import changes_of, label_of, shares_of
        from spectune.optimizer.execute import encode, outcome
        from spectune.optimizer.execute import run as execute
        from spectune.optimizer.record import record_served, recording_options

        workload = fit_to(pair, workload, options, kw["overlong"])
        encoded = encode(pair, workload, options)
        profile = profile_of(store, kw["profile_id"], pair.id, pair.device.type)
        about = recording_options(pair, options)
        recording = (
            record_served(store, pair.id, pair.spec, options, about)
            if kw["keep_texts"]
            else nullcontext()
        )
        decoded: list[Decoded] = []
        with (
            _source(store, pair, kw, profile, options) as source,
            recording as writer,
            Meter() as meter,
        ):
            if writer is not None:
                click.echo(f"recording {writer.recording}", err=True)
            for done in execute(pair, source, encoded):
                decoded.append(done)
                for change in changes_of([done], decoded[-2].plans[-1][1] if decoded[1:] else None):
                    say(str(change), err=True)
                if writer is not None:
                    writer.put(done.trajectory, done.steps)
                meter("run", len(decoded), len(encoded.items))
        shares, changes = shares_of(decoded), changes_of(decoded)
        plans = [
            plan
            for done in decoded
            for _, whole in done.plans
            for plan in (whole, *whole.candidates)
        ]
        finish_run(
            ctx,
            store,
            pair.spec,
            pair,
            workload,
            decoded,
            outcome(label_of(shares, changes), decoded),
            shares,
            changes,
            device=pair.device.type,
            dtype=dtype_of(pair),
            policies={plan.policy.id: plan.policy for plan in plans}.values(),
            writer=writer,
        )


@contextmanager
def _source(
    store: TraceStore,
    pair: LoadedPair,
    kw: dict[str, Any],
    profile: LatencyProfile | None,
    options: DecodeOptions,
) -> Iterator[PolicySource]:
    """A policy source: the policy named for ever, or for ``active`` whatever is published in the
    deployment, now and later."""
    name, deployment = kw["policy_name"], kw["deployment"]
    from spectune.runtime.loop import StaticSource

    if name != "active":
        yield StaticSource(prepared(store, pair, name, options, profile))
        return
    from spectune.optimizer.serving import watch

    if not store.active_version(pair.id, pair.device.type, deployment):
        say_unpublished(pair.id, pair.device.type, deployment)
    with watch(
        store,
        pair,
        None,
        profile,
        deployment=deployment,
        verifier=options.verifier,
        sampling=options.sampling,
    ) as source:
        if source.last_error:
            say(
                f"publication {source.seen} is refused: {source.last_error}; using "
                f"{source.current().label}",
                err=True,
            )
        yield source
    if source.left:
        click.echo(source.left, err=True)
