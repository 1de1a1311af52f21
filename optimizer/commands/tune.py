"""`tune`: the whole circle."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from spectune.optimizer.commands.config import is_given, option
from spectune.optimizer.commands.outputs import check_writable, kept_unless_stored, to_type
from spectune.optimizer.commands.shared import (
    SEED,
    Meter,
    decode_options,
    decoding_options,
    deployment_option,
    emit,
    fit_to,
    load,
    open_store,
    pair_spec,
    same_pair,
    say,
    search_asked,
    search_options,
    with_json,
    workers_option,
    workload_of,
)
from spectune.optimizer.commands.under_load import (
    execute_found,
    load_options,
    place_of,
    recording_on,
    search_under_load,
    show_search,
)
from spectune.runtime.progress import silent

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


def _budget(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    from spectune.optimizer.schedule.times import parse_duration

    parse_duration(text)
    return text


@click.command()
@decoding_options
@deployment_option
@search_options
@option(
    "--budget",
    key="budget",
    default="80s",
    show_default=True,
    callback=_budget,
    help="Time for race and confirmation, e.g. 90s, 10m.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="About two minutes: chains only, fewer requests and trials, a shorter race.",
)
@click.option("--search-seed", type=SEED, default=0, show_default=True)
@click.option(
    "--recording", "recording_id", help="Tune on this recording instead of decoding a workload."
)
@load_options
@click.option(
    "--objective",
    type=click.Choice(["throughput", "tpot", "goodput"]),
    default="throughput",
    show_default=True,
    help="With --arrivals: tokens a second, time per output token, or requests a second within "
    "--ttft and --tpot.",
)
@click.option(
    "--execute",
    is_flag=True,
    help="With --arrivals: serve the finalists on the engine too, under the same loads, for "
    "--budget, and publish what is proved.",
)
@workers_option
@click.option("--fresh", is_flag=True, help="Record and profile anew, whatever is stored.")
@click.option("--no-publish", is_flag=True, help="Show the evidence, publish nothing.")
@click.option(
    "--report",
    "report_path",
    help="The page that says what was found; none: no page; default: spectune-report-STUDY.html "
    "beside the database.",
)
@with_json
def tune(ctx: click.Context, as_json: bool, **kw: Any) -> None:
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
        tune_under_load(ctx, kw, as_json=as_json)
        return
    from spectune.optimizer.schedule import parse_duration

    if kw["report_path"] not in (None, "none"):
        check_writable(ctx, ("--report", kw["report_path"]))
    quick = _be_quick(ctx, kw) if kw.pop("quick") else ""
    budget_s = float(parse_duration(kw.pop("budget")))
    with open_store(ctx) as store:
        spec = pair_spec(kw, store, kw["recording_id"])
        workload = None if kw["recording_id"] else workload_of(kw, spec, chat=not kw["no_chat"])
        from spectune.optimizer.confirm import said_of

        if workload is not None:  # told again of what is left once the pair is loaded
            said_of([r.category for r in workload.requests], publish=not kw["no_publish"])
        searched = search_asked(kw)
        options = decode_options(kw)
        pair = load(kw, store, spec)
        if workload is None:
            recording = store.resolve_recording(kw["recording_id"])
            info = store.get_recording(recording)
            same_pair(info.pair_id, pair, recording)
            texts = store.load(recording, (), skip_corrupted=True).trajectories
            said_of([text.category for text in texts], publish=not kw["no_publish"])
            if info.state != "complete" and info.workload_id is not None:
                say(
                    f"recording {recording} was never finished: tuning on the {info.n_requests} "
                    f"requests it holds (`record --resume {recording}` makes the others)",
                    err=True,
                )
        workload = workload and fit_to(pair, workload, options, kw["overlong"])
        from spectune.optimizer.estimate import course
        from spectune.optimizer.report.tables import evidence_table
        from spectune.optimizer.report.words import closing
        from spectune.optimizer.tune import STAGES, TuneOptions, tune_recording
        from spectune.optimizer.tune import tune as do_tune

        wanted = TuneOptions(
            options=options,
            seed=kw["search_seed"],
            budget_s=budget_s,
            fresh=kw["fresh"],
            publish=not kw["no_publish"],
            deployment=kw["deployment"],
            workers=kw["workers"],
            tell=lambda line: say(line, err=True),
            publishing=lambda tuned: kept_unless_stored(ctx, "tune", tuned.to_json),
            **searched,
        )
        expected = course(store, pair, wanted, workload, [name for name, _ in STAGES])
        say(quick + expected.told(budget_s), err=True)
        with Meter(expected) as meter:
            wanted = replace(wanted, begins=expected.begin)
            if workload is None:
                tuned = tune_recording(store, pair, recording, wanted, progress=meter)
            else:
                tuned = do_tune(store, pair, workload, wanted, progress=meter)
        page, failed = page_of(ctx, store, tuned.study, kw["report_path"])
        found = {**tuned.to_json(), "report": page}
    emit(as_json, found, lambda: evidence_table(tuned))
    if not as_json:
        where = f"in deployment {kw['deployment']}, for pair {pair.spec.name} on {pair.device.type}"
        say(closing(found, where, _next(ctx, found)))
    if failed is not None:
        raise failed


def tune_under_load(ctx: click.Context, kw: dict[str, Any], *, as_json: bool) -> None:
    """`tune --engine`: the table that is best at the loads asked for, found by simulating what the
    engine recorded. It is printed, with the command that puts it in force. With ``--execute`` the
    engine serves it too, beside the best constants, no speculation and what is in force, and the
    best of them is published where it is proved better than that."""
    from spectune.traces.errors import TraceError

    if kw["workers"] is not None:
        raise TraceError(
            "--workers replays what is searched for one request at a time; with --arrivals "
            "leave it out"
        )
    if kw["arrivals"] is None:
        raise TraceError(
            "--engine and --execute tune for a load: say --arrivals poisson:RATE, clients:N, "
            "recorded or a CSV"
        )
    with open_store(ctx, create=False) as store:
        info = recording_on(store, kw["recording_id"] or "latest", kw["engine"])
        spec = pair_spec(kw, store, info.id) if kw["execute"] else None
        if spec is not None and spec.id != info.pair_id:
            raise TraceError(
                f"recording {info.id} is of pair {info.pair_id}, not of {spec.name} ({spec.id}), "
                "which --execute would serve"
            )
        searched, place = search_under_load(store, info, kw), place_of(ctx, store, info)
        proved = None if spec is None else execute_found(ctx, store, searched, spec, place)
    show_search(ctx, searched, place, proved, as_json=as_json)


def _be_quick(ctx: click.Context, kw: dict[str, Any]) -> str:
    """Puts :data:`QUICK` where nothing was given; a line on what that leaves out."""
    kw |= {name: value for name, value in QUICK.items() if not is_given(ctx, name)}
    trees = (
        ""
        if kw["tree_width"]
        else "; draft trees are not tried: what they could reach at best is told below"
    )
    on = (
        "the recording"
        if kw["recording_id"]
        else f"at most {kw['limit']} requests of at most {kw['max_new_tokens']} tokens"
    )
    return (
        f"quick: {on}, {kw['trials']} trials, a race of {kw['budget']}{trees} (`tune` without "
        f"--quick tries all)\n"
    )


def page_of(
    ctx: click.Context, store: TraceStore, study: str, path: str | None = None
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
        return str(write_report(ctx, store, study, path, silent)["path"]), None
    except (OutputError, DatabaseError) as error:
        if path is not None:
            return None, error
        say(f"{error}; `report {study} --out report.html` writes the report elsewhere", err=True)
        return None, None


def _next(ctx: click.Context, tuned: dict[str, Any]) -> list[tuple[str, str]]:
    """What to type after a tuning, and what it is for."""
    winner = tuned["winner"]["id"]
    commands = [
        (f"policies show {winner}", "the policy, key by key"),
        ("run --policy active", "decodes with what is in force"),
    ]
    if tuned["published"]:
        commands[0] = ("policies show active", "the policy in force, and its evidence")
    elif winner != tuned["baselines"]["incumbent"]["id"]:
        commands[1] = (f"policies activate {winner}", "puts the winner in force")
    typed = [(to_type(ctx, words), what) for words, what in commands]
    page = tuned["report"]
    return (
        typed
        if page is None
        else [
            *typed,
            (page, "predicted against measured, the race, latency, what was tried: open it"),
        ]
    )
