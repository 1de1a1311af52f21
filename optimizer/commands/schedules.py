"""`schedule`: tuning again and again, and the workers that do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.options import Whole, drawn, search_asked, turns_of
from spectune.optimizer.commands.printing import Group, Meter, emit, note, table
from spectune.optimizer.commands.shared import (
    nothing_decoded,
    open_store,
    pair_spec,
    quiet_transformers,
)
from spectune.optimizer.commands.tune import page_of

if TYPE_CHECKING:
    from spectune.optimizer.schedule import Ended, Fire


TOLD: Final = (
    *("device", "dtype", "threads", "deployment", "max_new_tokens"),
    *("temperature", "top_k", "top_p", "seed", "verifier"),
)
"""Options that a job is told as they are."""


@click.group(cls=Group)
def schedule() -> None:
    """Scheduled re-optimization: add, list, show, pause, resume, remove, run, run-once, history."""


@schedule.command("add")
@click.argument("name")
@option("--cron", 'Five fields, e.g. "0 3 * * *".')
@option("--every", "Interval, e.g. 6h, 30m, 1d.")
@option("--tz", "Time zone of the cron fields.", default="UTC")
@option(
    "--budget",
    "Race and confirmation of a job get a third of it; recording, profile and search take the time "
    "they need.",
    default="10m",
)
@option("--misfire-grace", "A slot later than this is not run any more; or 'none'.", default="1h")
@option("--max-instances", "Unfinished jobs at a time.", Whole(1), default=1)
@option("--max-attempts", "How often a job is begun at most.", Whole(1), default=3)
@flag("--no-coalesce", "Run every missed slot instead of the latest alone.")
@option(
    "--recorded",
    'Tune on what was recorded in the last, e.g., "24h" instead of decoding a workload.',
)
@opts.search
@opts.pair
@opts.workload
@opts.sampling
@opts.devices
@opts.deployment
def schedule_add(name: str, **kw: Any) -> None:
    """Add a schedule; workers (`schedule run`, `schedule run-once`) do its jobs.

    \b
    Example:  cli.py schedule add nightly --cron "0 3 * * *" --tz Europe/Berlin --pair pair.json
              cli.py schedule add drift --every 6h --recorded 24h --budget 20m
              cli.py schedule add chains --every 6h --tree-width 0
    """
    if kw["recorded"]:
        nothing_decoded("--recorded")
    from spectune.optimizer.payload import check_payload
    from spectune.optimizer.schedule import add_schedule

    payload: dict[str, Any] = {
        "pair": pair_spec(kw).to_json(),
        **{key: kw[key] for key in TOLD},
        "stop_strings": list(kw["stop_strings"]),
        "chat": not kw["no_chat"],
        **search_asked(kw),
    }
    if kw["recorded"]:
        payload["recorded"] = kw["recorded"]
    else:
        drawn(kw)
        payload |= {
            "workload": [_from_anywhere(name) for name in kw["workloads"]] or ["demo"],
            "categories": list(kw["categories"]),
            **{key: kw[key] for key in ("limit", "limit_seed", "column", "overlong", "bad_rows")},
            "turns": turns_of(kw),
            "fresh": True,
        }
    check_payload(payload)
    when = ("cron", "every", "tz", "budget", "max_instances", "max_attempts")
    with open_store() as store:
        added = add_schedule(
            store.database,
            name,
            **{key: kw[key] for key in when},
            payload=payload,
            misfire_grace=None if kw["misfire_grace"] == "none" else kw["misfire_grace"],
            coalesce=not kw["no_coalesce"],
        )
    emit(
        added.to_json(),
        f"schedule {name}: {added.when}, first at {added.next_fire_at:%Y-%m-%d %H:%M:%S} UTC",
    )


def _from_anywhere(workload: str) -> str:
    """A workload by a name that a worker in another folder finds it by."""
    return workload if workload == "demo" else str(Path(workload).resolve())


@schedule.command("list")
def schedule_list() -> None:
    """All schedules.

    \b
    Example:  cli.py schedule list
    """
    from spectune.optimizer.schedule import history, list_schedules

    rows = []
    with open_store(create=False) as store:
        for found in list_schedules(store.database):
            results = [f.job.result for f in history(store.database, found.name) if f.job]
            page = next((r["report"] for r in results if r and r.get("report")), None)
            rows.append({**found.to_json(), "when": found.when, "report": page})
    columns = ("name", "when", "next_fire_at", "enabled", "budget_s", "parked", "report")
    emit({"schedules": rows}, table(rows, columns, "schedules"))


@schedule.command("show")
@click.argument("name")
def schedule_show(name: str) -> None:
    """One schedule, whole.

    \b
    Example:  cli.py schedule show nightly
    """
    from spectune.optimizer.schedule import get_schedule

    with open_store(create=False) as store:
        emit(get_schedule(store.database, name).to_json())


def _schedule_verb(verb: str, what: str, outcome: str) -> None:
    @schedule.command(verb, help=f"{what}\n\n\b\nExample:  cli.py schedule {verb} nightly")
    @click.argument("name")
    def command(name: str) -> None:
        import spectune.optimizer.schedule as schedules

        with open_store(create=False) as store:
            found = getattr(schedules, f"{verb}_schedule")(store.database, name)
        emit(found.to_json(), f"schedule {name} {outcome}")


_schedule_verb(
    "pause", "Let a schedule rest: none of its slots fires until it is resumed.", "is paused"
)
_schedule_verb(
    "resume",
    "Wake a paused or parked schedule; slots missed meanwhile are not made up for.",
    "is resumed",
)
_schedule_verb("remove", "Remove a schedule and its history.", "is removed")


@schedule.command("history")
@click.argument("name", required=False)
@option("--limit", type=Whole(1), default=50)
def schedule_history(name: str | None, limit: int) -> None:
    """Slots that fired, and what became of their jobs.

    \b
    Example:  cli.py schedule history nightly
    """
    from spectune.optimizer.schedule import history

    with open_store(create=False) as store:
        fires = history(store.database, name, limit=limit)
    rows = []
    for f in fires:
        row: dict[str, Any] = {"schedule": f.schedule, "outcome": f.outcome}
        row["fire_at"] = f.fire_at.isoformat()
        if f.job:
            result = f.job.result or {}
            row |= {"state": f.job.state, "attempt": f.job.attempt, "result": result.get("label")}
            row["published"] = result.get("published")
            row["error"] = f.job.error.splitlines()[0] if f.job.error else None
        rows.append(row)
    ended = ("state", "attempt", "result", "published", "error")
    columns = ("schedule", "fire_at", "outcome", *ended)
    emit({"history": [f.to_json() for f in fires]}, table(rows, columns, "history"))


@schedule.command("run")
@option("--poll", "How often to look for due slots.", default="30s")
def schedule_run(poll: str) -> None:
    """Work: fire what is due and run its jobs, until SIGINT or SIGTERM. Any number of workers may
    share a database.

    \b
    Example:  cli.py schedule run --poll 10s
    """
    from spectune.optimizer.schedule import parse_duration, run_worker

    _work(run_worker, poll_s=float(parse_duration(poll)))


@schedule.command("run-once")
def schedule_run_once() -> None:
    """Fire what is due, run every waiting job, and end: for cron and systemd timers.

    \b
    Example:  cli.py schedule run-once
    """
    from spectune.optimizer.schedule import run_once

    _work(run_once)


def _schedule_line(event: Fire | Ended) -> str:
    from spectune.optimizer.schedule import Fire

    if isinstance(event, Fire):
        return f"{event.schedule}: slot of {event.fire_at:%Y-%m-%d %H:%M:%S} UTC: {event.outcome}"
    said = f": {event.error.splitlines()[0]}" if event.error else ""
    if report := (event.result or {}).get("report"):
        said += f", its page is {report}"
    return f"{event.job.schedule}: job {event.job.id} {event.ending}{said}"


def _work(work: Callable[..., Any], **how: Any) -> None:
    with open_store() as store:
        from spectune.optimizer.jobs import tuning_job

        quiet_transformers()
        with Meter() as meter:
            job = tuning_job(
                store, progress=meter, page=lambda study: page_of(store, study)[0], tell=note
            )
            report = work(store.database, job, watch=lambda e: note(_schedule_line(e)), **how)
    data = report.to_json()
    emit(data, ", ".join(f"{v} {k}" for k, v in data.items()))
