"""`simulate`: replay a recording under any policy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.executed import rounds_of
from spectune.optimizer.commands.outputs import check_writable, kept_unless_stored, write_rounds
from spectune.optimizer.commands.shared import (
    Meter,
    Whole,
    deployment_option,
    emit,
    on_pair_of,
    open_store,
    policy_named,
    profile_of,
    say,
    with_json,
    workers_option,
)
from spectune.optimizer.commands.under_load import load_options, recording_on, simulate_under_load

if TYPE_CHECKING:
    from spectune.optimizer.simulate.trace import Simulated
    from spectune.runtime.policies.document import AnyPolicy
    from spectune.traces.recording import RecordingInfo
    from spectune.traces.schema import LatencyProfile
    from spectune.traces.store import TraceStore


@click.command()
@click.option(
    "--policy",
    "policy_name",
    required=True,
    help="FILE, inline JSON, ID, active, or autoregressive.",
)
@click.option(
    "--recording",
    default="latest",
    show_default=True,
    help="Id, or FILE.parquet that `traces export --whole` wrote.",
)
@load_options
@click.option(
    "--profile",
    "profile_id",
    help="Profile id; default: the latest of the recording's pair and device.",
)
@click.option("--device", help="Device whose profile is taken; default: the recording's.")
@deployment_option
@click.option("--limit", type=Whole(1), help="Only the first N requests.")
@click.option("--per-round", type=click.Path(dir_okay=False), help="Write one JSON line per round.")
@click.option(
    "--skip-corrupted",
    is_flag=True,
    help="Leave damaged chunks out instead of stopping at the first.",
)
@click.option(
    "--keep-q-table",
    is_flag=True,
    help="Store what a q_learning window has learned as an artifact, and print its id.",
)
@workers_option
@with_json
def simulate(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Replay a recording under any policy: rounds and tokens exactly, seconds by a latency profile.

    \b
    Example:  cli.py simulate --policy '{"draft": "small", "window": {"kind": "fixed", "gamma": 4}}'
              cli.py simulate --policy active --workers tcp://scheduler:8786
              cli.py simulate --policy active --engine vllm --arrivals poisson:2,8 --tpot 40ms
    """
    check_writable(ctx, ("--per-round", kw["per_round"]))
    with open_store(ctx, create=False) as store:
        if kw["recording"].endswith(".parquet"):
            from spectune.traces.store.parquet import RecordingFile

            store = RecordingFile(store.database, path=kw["recording"])
        info = recording_on(store, kw["recording"], kw["engine"])
        device = kw["device"] or str(info.options.get("device", "cpu"))
        on_pair_of(store, info.pair_id)
        if kw["arrivals"] is not None:
            simulate_under_load(store, info, kw, as_json=as_json)
            return
        policy = policy_named(store, kw["policy_name"], info.pair_id, device, kw["deployment"])
        found = profile_of(store, kw["profile_id"], info.pair_id, device)
        from spectune.optimizer.artifacts import keep_q_table, q_table
        from spectune.optimizer.inputs import outcome_json
        from spectune.optimizer.report.tables import outcome_table
        from spectune.runtime.policies.document import ChooserPolicy
        from spectune.traces.errors import PolicyError

        if kw["keep_q_table"] and isinstance(policy, ChooserPolicy):
            raise PolicyError(
                "--keep-q-table: a chooser's candidates keep their tables to themselves; simulate "
                "one of them"
            )
        from spectune.optimizer.simulate.counted import counted, holds_counts

        if holds_counts(info):
            refused = [
                name for name in ("per_round", "keep_q_table", "limit", "workers") if kw[name]
            ]
            if refused:
                flag = f"--{refused[0].replace('_', '-')}"
                raise PolicyError(
                    f"{flag}: recording {info.id} has counts of rounds, and no requests to replay"
                )
            outcome, approximate = counted(info, policy)
            told = {
                **outcome_json(outcome, policy),
                **({"approximate": True} if approximate else {}),
            }
            say(f"approximate: {approximate}", err=True) if approximate else None
            emit(as_json, told, lambda: outcome_table(outcome))
            return
        replayed, skipped, approximate = _replayed(store, info, policy, found, kw)
        for chunk in skipped:
            click.echo(
                f"left out: request {chunk.ordinal} of {chunk.recording}: {chunk.problem}", err=True
            )
        if found is None:
            say(
                "no latency profile of this pair and device: seconds are left at 0 (run `profile`)",
                err=True,
            )
        if kw["per_round"]:
            pairs = zip(replayed.names, replayed.steps(), strict=True)
            write_rounds(
                kw["per_round"],
                (row for (request, _), steps in pairs for row in rounds_of(request, steps)),
            )
        outcome = replayed.outcome()
        data = outcome_json(outcome, policy)
        if replayed.chosen:
            data["picks"] = dict(sorted(Counter(replayed.chosen).items()))
        if kw["keep_q_table"]:
            about = {"recording": info.id, "policy": policy.spelled_out()}
            with kept_unless_stored(
                ctx, "simulate", lambda: {**data, "q_table": q_table(replayed.state).tolist()}
            ):
                data["artifact"] = keep_q_table(store, replayed.state, info.pair_id, about)
            click.echo(f"artifact {data['artifact']}", err=True)
    if approximate:
        click.echo(f"approximate: {approximate}", err=True)
        data["approximate"] = True
    emit(as_json, data, lambda: outcome_table(outcome))


def _replayed(
    store: TraceStore,
    info: RecordingInfo,
    policy: AnyPolicy,
    profile: LatencyProfile | None,
    kw: dict[str, Any],
) -> Simulated:
    """In this process, or by the workers that are asked for."""
    asked = {
        "limit": kw["limit"],
        "per_round": kw["per_round"] is not None,
        "skip_corrupted": kw["skip_corrupted"],
    }
    if kw["workers"] is None:
        from spectune.optimizer.simulate.trace import simulate

        return simulate(store, info.id, policy, profile, **asked)
    from spectune.optimizer.simulate.distributed import connected, simulate_on

    with connected(kw["workers"]) as client, Meter() as meter:
        return simulate_on(
            client,
            store,
            info,
            policy,
            profile,
            **asked,
            progress=lambda done, total: meter("read", done, total),
        )
