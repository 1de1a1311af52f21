"""`tune`: the whole circle."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import flag, is_given, option
from spectune.optimizer.commands.options import (
    MOMENT,
    SEED,
    checked,
    decode_options,
    search_asked,
    workload_of,
)
from spectune.optimizer.commands.outputs import check_writable, kept_unless_stored
from spectune.optimizer.commands.printing import Command, Meter, as_json, emit, note, say, to_type
from spectune.optimizer.commands.shared import (
    fit_to,
    load,
    nothing_decoded,
    open_store,
    pair_spec,
    typed,
)
from spectune.optimizer.commands.under_load import (
    check_no_load,
    check_typed,
    load_options,
    objective_option,
    recording_on,
    tune_load,
)

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore

QUICK: Final = {
    "tree_width": 0,
    "trials": 100,
    "finalists": 2,
    "limit": 48,
    "max_new_tokens": 48,
    "budget": "40s",
}
"""What --quick makes of options that nobody gave."""
UNDER_LOAD: Final = (
    *("recording_id", "engine", "arrivals", "ttft", "tpot", "objective", "limit"),
    *(
        "execute",
        "no_publish",
        "budget",
        "threads",
        "pair",
        "target",
        "drafts",
        "deployment",
        "search_seed",
    ),
)
"""Options that --arrivals reads."""


def _budget(text: str) -> str:
    from spectune.optimizer.schedule.times import parse_duration

    parse_duration(text)
    return text


@click.command(cls=Command)
@opts.decoding
@opts.deployment
@opts.search
@option(
    "--budget",
    "Time for race and confirmation, e.g. 90s, 10m.",
    key="budget",
    default="80s",
    callback=checked(_budget),
)
@flag("--quick", "About two minutes: chains only, fewer requests and trials, a shorter race.")
@option("--search-seed", type=SEED, default=0)
@option("--recording recording_id", "Tune on this recording instead of decoding a workload.")
@option(
    "--since",
    "Tune on a sample of what the pair decoded since so long ago (24h), or a moment (UTC).",
    MOMENT,
)
@load_options
@objective_option
@flag(
    "--execute",
    "With --arrivals: serve the finalists on the engine too, under the same loads, for --budget, "
    "and publish what is proved.",
)
@opts.workers
@flag("--fresh", "Record and profile anew, whatever is stored.")
@flag("--no-publish", "Show the evidence, publish nothing.")
@option(
    "--report report_path",
    "The page that says what was found; none: no page; default: spectune-report-STUDY.html beside "
    "the database.",
)
def tune(**kw: Any) -> None:
    """Find the fastest policy, prove it by execution, and publish it.

    Records the workload (or resumes, or finds it recorded), profiles the device, searches in
    simulation, executes the best beside plain baselines on requests the search has not seen, and
    publishes the winner if it beats the incumbent beyond noise on others that were held out for
    this.

    \b
    Example:  cli.py tune --pair demo --limit 60 --max-new-tokens 96
              cli.py tune --pair demo --quick
              cli.py tune --pair pair.json --workload chats.jsonl --budget 10m
              cli.py tune --engine vllm --arrivals poisson:1,4,16 --objective goodput --ttft 500ms
              cli.py tune --engine openvino --arrivals clients:1,4,8 --limit 48 --execute
    """
    if kw["engine"] is not None or kw["arrivals"] is not None or kw["execute"]:
        tune_under_load(kw)
        return
    check_no_load("ttft", "tpot", "objective")
    recorded = kw["recording_id"] is not None or kw["since"] is not None
    if recorded:
        nothing_decoded("--recording" if kw["recording_id"] else "--since")
    if kw["recording_id"] and kw["since"]:
        raise click.UsageError("give either --recording or --since, not both")
    from spectune.optimizer.schedule import parse_duration

    if kw["report_path"] != "none":
        check_writable(("--report", kw["report_path"]))
    quick = _be_quick(kw) if kw["quick"] else ""
    budget_s, publish = float(parse_duration(kw["budget"])), not kw["no_publish"]
    with open_store() as store:
        spec = pair_spec(kw, store, kw["recording_id"])
        workload = None if recorded else workload_of(kw, spec)
        from spectune.optimizer.confirm import check_sample_size
        from spectune.optimizer.inputs import recording_of
        from spectune.optimizer.traffic import gather

        if workload is not None:  # before the pair is loaded
            check_sample_size([r.category for r in workload.requests], publish=publish)
        searched, options = search_asked(kw), decode_options(kw)
        pair = load(kw, spec)
        if workload is not None:
            workload = fit_to(pair, workload, options, kw["overlong"])
        else:
            name = kw["recording_id"]
            if kw["since"] is not None:
                key = f"tune since {kw['since'].isoformat()}"
                name = gather(store, spec.id, store.clock() - kw["since"], key=key, tell=note)
            info = recording_of(store, name, spec)
            if info.state != "complete" and info.workload_id is not None:
                note(
                    f"recording {info.id} was never finished: tuning on the {info.n_requests} "
                    f"requests it holds (`record --resume {info.id}` makes the others)"
                )
        from spectune.optimizer.processes import dask_workers
        from spectune.optimizer.report.tables import evidence_table
        from spectune.optimizer.report.words import closing
        from spectune.optimizer.tune import TuneOptions, tune_recording
        from spectune.optimizer.tune import tune as do_tune

        wanted = TuneOptions(
            options=options,
            seed=kw["search_seed"],
            budget_s=budget_s,
            fresh=kw["fresh"],
            publish=publish,
            deployment=kw["deployment"],
            tell=note,
            publishing=lambda tuned: kept_unless_stored(tuned.to_json),
            **searched,
        )
        if quick:
            note(quick)
        with dask_workers(kw["workers"]), Meter() as meter:
            if workload is None:
                tuned = tune_recording(store, pair, info.id, wanted, progress=meter)
            else:
                tuned = do_tune(store, pair, workload, wanted, progress=meter)
        page, failed = page_of(store, tuned.study, kw["report_path"])
        found = {**tuned.to_json(), "heads": pair.hidden_states, "report": page}
    emit(found, lambda: evidence_table(tuned))
    if not as_json():
        where = f"in deployment {kw['deployment']}, for pair {pair.spec.name} on {pair.device.type}"
        say(closing(found, where, _next(found)))
    if failed is not None:
        raise failed


def tune_under_load(kw: dict[str, Any]) -> None:
    """`tune --engine`: the table that is best at the loads asked for, found by simulating what the
    engine recorded. It is printed, with the command that puts it in force. With ``--execute`` the
    engine serves it too, beside the best constants, no speculation and what is in force, and the
    best of them is published where it is proved better than that."""
    from spectune.optimizer.inputs import recording_of
    from spectune.traces.errors import PairError, TraceError

    if kw["arrivals"] is None:
        raise TraceError(
            "--engine and --execute tune for a load: say --arrivals poisson:RATE, clients:N, "
            "recorded or a CSV"
        )
    check_typed(UNDER_LOAD)
    if not kw["execute"] and typed("budget", "threads"):
        raise TraceError(
            "--budget and --threads are for --execute; say that too, or leave them out"
        )
    with open_store(create=False) as store:
        info = recording_on(store, kw["recording_id"] or "latest", kw["engine"])
        spec = None
        if kw["execute"] or typed("pair", "target", "drafts"):
            spec = pair_spec(kw, store, info.id)
            info = recording_of(store, info.id, spec)
        else:
            with suppress(PairError):  # the command that is printed last names it
                pair_spec(kw, store, info.id)
        tune_load(store, info, spec if kw["execute"] else None, kw)


def _be_quick(kw: dict[str, Any]) -> str:
    """Puts :data:`QUICK` where nothing was given; a line on what that leaves out."""
    kw |= {name: value for name, value in QUICK.items() if not is_given(name)}
    trees = "" if kw["tree_width"] else "; draft trees are not tried"
    on = (
        "what is recorded"
        if kw["recording_id"] or kw["since"]
        else f"at most {kw['limit']} requests of at most {kw['max_new_tokens']} tokens"
    )
    return (
        f"quick: {on}, {kw['trials']} trials, a race of {kw['budget']}{trees} (`tune` without "
        f"--quick tries all)"
    )


def page_of(
    store: TraceStore, study: str, path: str | None = None
) -> tuple[str | None, Exception | None]:
    """Writes the report: (where, None); (None, None) where none is wanted or a page that nobody
    asked for cannot be made, which costs a line; (None, why) for one that was asked for: the
    results are printed first."""
    from spectune.db.errors import DatabaseError
    from spectune.optimizer.commands.report import write_report
    from spectune.traces.errors import OutputError

    if path == "none":
        return None, None
    try:
        return str(write_report(store, study, path)["path"]), None
    except (OutputError, DatabaseError) as error:
        if path is not None:
            return None, error
        note(f"{error}; `report {study} --out report.html` writes the report elsewhere")
        return None, None


def _next(tuned: dict[str, Any]) -> list[tuple[str, str]]:
    """What to type after a tuning, and what it is for."""
    winner, page = tuned["winner"]["id"], tuned["report"]
    look = (f"policies show {winner}", "the policy, key by key")
    then = ("run --policy active", "decodes with what is published")
    if tuned["published"]:
        look = ("policies show active", "the published policy, and its evidence")
    elif winner != tuned["baselines"]["incumbent"]["id"] and not tuned["superseded_by"]:
        then = (f"policies activate {winner}", "publishes the winner")
    typed = [(to_type(words), what) for words, what in (look, then)]
    if page is not None:
        what = "predicted against measured, the race, latency, what was tried: open it"
        typed.append((page, what))
    return typed
