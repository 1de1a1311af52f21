"""`schedule`: tuning again and again, and the workers that do it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.on_engine import deployment_on
from spectune.optimizer.commands.options import drawn, search_asked, turns_of
from spectune.optimizer.commands.printing import Group, Meter, emit, note, table
from spectune.optimizer.commands.shared import (
    nothing_decoded,
    open_store,
    pair_spec,
    quiet_transformers,
)
from spectune.optimizer.commands.tune import page_of
from spectune.optimizer.commands.under_load import load_options, objective_of, objective_option

if TYPE_CHECKING:
    from spectune.optimizer.schedule import Job

SETTINGS: Final = (
    *("device", "dtype", "threads", "deployment", "max_new_tokens"),
    *("temperature", "top_k", "top_p", "seed", "verifier", "budget"),
)
"""Options that a schedule stores as they are."""
SHOWN: Final = ("name", "cron", "tz", "next_at", "worker", "last", "result", "report")
ATTEMPTS: Final = ("slot", "attempt", "worker", "ended_at", "outcome", "result", "report")


@click.group(cls=Group)
def schedule() -> None:
    """Scheduled re-optimization: add, list, run, remove."""


@schedule.command("add")
@click.argument("name")
@option("--cron", 'Five fields, e.g. "0 3 * * *", or @hourly, @daily, @weekly.', required=True)
@option("--tz", "Time zone of the cron fields.", default="UTC")
@flag("--now", "Due at once, and then as --cron says.")
@option("--budget", "Time for race and confirmation of a run.", default="80s")
@option(
    "--recorded",
    'Tune on what was recorded in the last, e.g., "24h" instead of decoding a workload.',
)
@load_options
@objective_option
@opts.search
@opts.pair
@opts.workload
@opts.sampling
@opts.devices
@opts.deployment
def schedule_add(name: str, **kw: Any) -> None:
    """Add a schedule; workers (`schedule run`) tune when it is due.

    \b
    Example:  cli.py schedule add nightly --cron "0 3 * * *" --tz Europe/Berlin --pair pair.json
              cli.py schedule add drift --cron "0 */6 * * *" --recorded 24h --budget 2m
              cli.py schedule add chains --cron @daily --now --tree-width 0
              cli.py schedule add load --cron @daily --engine vllm --arrivals recorded
    """
    if kw["recorded"]:
        nothing_decoded("--recorded")
    from spectune.optimizer.schedule import add_schedule
    from spectune.optimizer.schedule.settings import TuneSettings

    settings: dict[str, Any] = {
        "pair": pair_spec(kw).to_json(),
        **{key: kw[key] for key in SETTINGS},
        "stop_strings": list(kw["stop_strings"]),
        "chat": not kw["no_chat"],
        **search_asked(kw),
    }
    if kw["engine"]:
        objective_of(kw)
        keys = ("engine", "arrivals", "objective", "ttft", "tpot", "limit")
        settings |= {key: kw[key] for key in keys} | {"arrivals": kw["arrivals"] or "recorded"}
        settings["deployment"] = deployment_on(kw["engine"])
    elif kw["recorded"]:
        settings["recorded"] = kw["recorded"]
    else:
        drawn(kw)
        files = [path if path == "demo" else str(Path(path).resolve()) for path in kw["workloads"]]
        settings |= {
            "workload": files or ["demo"],  # found by a worker in another folder, too
            "categories": list(kw["categories"]),
            **{key: kw[key] for key in ("limit", "limit_seed", "column", "overlong", "bad_rows")},
            "turns": turns_of(kw),
            "fresh": True,
        }
    TuneSettings.read(settings)
    with open_store() as store:
        added = add_schedule(
            store.database, name, kw["cron"], settings, tz=kw["tz"], at_once=kw["now"]
        )
    first = f"{added.next_at:%Y-%m-%d %H:%M:%S} UTC"
    emit(added.to_json(), f"schedule {name}: {added.cron} ({added.tz}), first at {first}")


@schedule.command("list")
@click.argument("name", required=False)
def schedule_list(name: str | None) -> None:
    """All schedules, with their last results; or one, with the attempts that ended.

    \b
    Example:  cli.py schedule list
              cli.py schedule list nightly
    """
    from spectune.optimizer.schedule import history, list_schedules

    with open_store(create=False) as store:
        schedules = [row.to_json() for row in list_schedules(store.database, name)]
        if name is not None:
            schedules[0]["attempts"] = [a.to_json() for a in history(store.database, name)]
    if name is None:
        rows = [{**row, "worker": row["lease_owner"], **_ended(row["last"])} for row in schedules]
        text = table(rows, SHOWN, "schedules")
    else:
        attempts = [{**row, **_ended(row)} for row in schedules[0]["attempts"]]
        text = table(attempts, ATTEMPTS, f"attempts of {name} that ended")
    emit({"schedules": schedules}, text)


def _ended(attempt: Mapping[str, Any] | None) -> dict[str, Any]:
    """An attempt's outcome as columns of a table."""
    if attempt is None:
        return {}
    result = attempt["result"] or {}
    text = attempt["error"] or result.get("label")
    if result.get("published"):
        text = f"{text}, published as version {result['published']}"
    return {"last": attempt["outcome"], "result": text, "report": result.get("report")}


@schedule.command("remove")
@click.argument("name")
def schedule_remove(name: str) -> None:
    """Remove a schedule and its history; a worker that is busy with it publishes nothing.

    \b
    Example:  cli.py schedule remove nightly
    """
    from spectune.optimizer.schedule import remove_schedule

    with open_store(create=False) as store:
        removed = remove_schedule(store.database, name)
    emit(removed.to_json(), f"schedule {name} is removed")


@schedule.command("run")
@option("--poll", "How often to look for what is due.", default="30s")
@flag("--once", "Run what is due, then end: for cron and systemd timers.")
def schedule_run(poll: str, once: bool) -> None:
    """Work: run what is due, until SIGINT or SIGTERM. Any number of workers may share a database.

    \b
    Example:  cli.py schedule run --poll 10s
              cli.py schedule run --once
    """
    from spectune.optimizer.schedule import parse_duration, run_worker

    poll_s = float(parse_duration(poll))
    with open_store() as store:
        from spectune.optimizer.schedule.tuning import tuning_job

        quiet_transformers()
        with Meter() as meter:
            run = tuning_job(
                store, progress=meter, page=lambda study: page_of(store, study)[0], tell=note
            )
            outcomes = run_worker(store.database, run, once=once, poll_s=poll_s, watch=_note_end)
    emit(outcomes, ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items()))


def _note_end(job: Job, outcome: str, result: Mapping[str, Any] | None, error: str | None) -> None:
    report = (result or {}).get("report")
    about = f": {error}" if error else f", its page is {report}" if report else ""
    note(f"{job.name}: slot of {job.slot:%Y-%m-%d %H:%M:%S} UTC: {outcome}{about}")
