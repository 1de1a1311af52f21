"""`simulate`: replay a recording under any policy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.on_engine import NATIVE, deployment_on
from spectune.optimizer.commands.options import MOMENT, Whole
from spectune.optimizer.commands.outputs import check_writable, kept_unless_stored, write_rounds
from spectune.optimizer.commands.printing import Command, emit, note
from spectune.optimizer.commands.run import rounds_of
from spectune.optimizer.commands.shared import (
    on_pair_of,
    open_store,
    policy_named,
    say_unseen,
)
from spectune.optimizer.commands.under_load import (
    check_no_load,
    check_typed,
    load_options,
    recording_on,
    simulate_under_load,
)

if TYPE_CHECKING:
    from spectune.optimizer.simulate.trace import Simulated
    from spectune.runtime.policies.document import Policy
    from spectune.traces.store import TraceStore
    from spectune.traces.tables import LatencyProfile, Recording

UNDER_LOAD: Final = (
    *("policy_name", "recording", "engine", "arrivals", "ttft", "tpot"),
    *("device", "deployment", "limit"),
)
"""Options that --arrivals reads."""


@click.command(cls=Command)
@option("--policy policy_name", "FILE, inline JSON, ID, active, or autoregressive.", required=True)
@option("--recording", "Id of a recording, or the beginning of one.", default="latest")
@option(
    "--since",
    "All that the recording's pair and engine decoded since so long ago (24h), or a moment (UTC).",
    MOMENT,
)
@load_options
@option(
    "--profile profile_id", "Profile id; default: the latest of the recording's pair and device."
)
@option("--device", "Device whose profile is taken; default: the recording's.")
@opts.deployment
@option("--limit", "Only the first N requests.", Whole(1))
@opts.per_round
@flag("--skip-corrupted", "Leave damaged requests out instead of stopping at the first.")
@flag(
    "--keep-q-table",
    "Store what a q_learning window has learned as an artifact, and print its id.",
)
def simulate(**kw: Any) -> None:
    """Replay a recording under any policy: rounds and tokens exactly, seconds by a latency profile.

    \b
    Example:  cli.py simulate --policy '{"draft": "small", "window": {"kind": "fixed", "gamma": 4}}'
              cli.py simulate --policy active --since 24h
              cli.py simulate --policy active --engine vllm --arrivals poisson:2,8 --tpot 40ms
    """
    if kw["arrivals"] is not None:
        check_typed(UNDER_LOAD)
    else:
        check_no_load("ttft", "tpot")
    check_writable(("--per-round", kw["per_round"]))
    with open_store(create=False) as store:
        info = recording_on(store, kw["recording"], kw["engine"])
        device = kw["device"] or str(info.options.get("device", "cpu"))
        on_pair_of(store, info.pair_id)
        deployment = deployment_on(info.engine)
        policy = policy_named(store, kw["policy_name"], info.pair_id, device, deployment)
        if kw["arrivals"] is not None:
            simulate_under_load(store, info, policy, kw)
            return
        dtype = info.options.get("dtype")
        found = store.profile_of(info.pair_id, kw["profile_id"], device=device, dtype=dtype)
        from spectune.optimizer.artifacts import keep_q_table, q_table
        from spectune.optimizer.inputs import outcome_json
        from spectune.optimizer.report.tables import outcome_table
        from spectune.runtime.policies.document import PromptPolicy
        from spectune.traces.errors import PolicyError

        if kw["keep_q_table"] and isinstance(policy, PromptPolicy):
            raise PolicyError(
                "--keep-q-table: the policies that are chosen from keep tables of their own; "
                "simulate one of them"
            )
        replayed, skipped, approximate = _replayed(store, info, policy, found, kw)
        for chunk in skipped:
            note(f"left out: request {chunk.ordinal} of {chunk.recording}: {chunk.problem}")
        if kw["limit"] is None and kw["since"] is None:
            say_unseen(info, len(replayed.names) + len(skipped))
        if info.engine != NATIVE:
            seconds = "not known" if found is None else "the native decoder's"
            note(
                f"seconds are {seconds}: those of {info.engine} depend on its load, which "
                "--arrivals says (clients:8, say)"
            )
        elif found is None:
            note(
                "no latency profile of this pair and device in the recording's dtype: seconds are "
                "left at 0 (run `profile`)"
            )
        if kw["per_round"]:
            pairs = zip(replayed.names, replayed.steps(), strict=True)
            rows = (row for (request, _), steps in pairs for row in rounds_of(request, steps))
            write_rounds(kw["per_round"], rows)
        outcome = replayed.outcome()
        data = outcome_json(outcome, policy)
        if replayed.chosen:
            data["picks"] = dict(sorted(Counter(replayed.chosen).items()))
        if kw["keep_q_table"]:
            about = {"recording": info.id, "policy": policy.spelled_out()}
            with kept_unless_stored(lambda: {**data, "q_table": q_table(replayed.state).tolist()}):
                data["artifact"] = keep_q_table(store, replayed.state, info.pair_id, about)
            note(f"artifact {data['artifact']}")
    if approximate:
        note(f"approximate: {approximate}")
        data["approximate"] = True
    emit(data, lambda: outcome_table(outcome))


def _replayed(
    store: TraceStore,
    info: Recording,
    policy: Policy,
    profile: LatencyProfile | None,
    kw: dict[str, Any],
) -> Simulated:
    from spectune.optimizer.simulate.trace import simulate

    how = {key: kw[key] for key in ("since", "limit", "skip_corrupted")}
    how["per_round"] = kw["per_round"] is not None
    return simulate(store, info.id, policy, profile, tell=note, **how)
