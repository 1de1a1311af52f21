"""`schedule`: tuning again and again, and the workers that do it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from spectune.optimizer.commands.shared import (
    DRAWN,
    Meter,
    Whole,
    deployment_option,
    device_options,
    emit,
    open_store,
    pair_options,
    pair_spec,
    sampling_options,
    say,
    search_asked,
    search_options,
    turns_of,
    with_json,
    workload_options,
)
from spectune.optimizer.commands.tune import page_of

if TYPE_CHECKING:
    from spectune.optimizer.schedule import Ended, Fire


TOLD: Final = (
    *("device", "dtype", "threads", "deployment", "max_new_tokens"),
    *("temperature", "top_k", "top_p", "seed", "verifier"),
)
"""Options that a job is told as they are."""


@click.group()
def schedule() -> None:
    """Scheduled re-optimization: add, list, show, pause, resume, remove, run, run-once, history."""


@schedule.command("add")
@click.argument("name")
@click.option("--cron", help='Five fields, e.g. "0 3 * * *".')
@click.option("--every", help="Interval, e.g. 6h, 30m, 1d.")
@click.option("--tz", default="UTC", show_default=True, help="Time zone of the cron fields.")
@click.option("--budget", default="10m", show_default=True, help="What one job may take.")
@click.option(
    "--misfire-grace",
    default="1h",
    show_default=True,
    help="A slot later than this is not run any more; or 'none'.",
)
@click.option(
    "--max-instances",
    type=Whole(1),
    default=1,
    show_default=True,
    help="Unfinished jobs at a time.",
)
@click.option(
    "--max-attempts",
    type=Whole(1),
    default=3,
    show_default=True,
    help="How often a job is begun at most.",
)
@click.option(
    "--no-coalesce", is_flag=True, help="Run every missed slot instead of the latest alone."
)
@click.option(
    "--recorded",
    help='Tune on what was recorded in the last, e.g., "24h" instead of decoding a workload.',
)
@search_options
@pair_options
@workload_options
@sampling_options
@device_options
@deployment_option
@with_json
def schedule_add(ctx: click.Context, as_json: bool, name: str, **kw: Any) -> None:
    """Add a schedule; workers (`schedule run`, `schedule run-once`) do its jobs.

    \b
    Example:  cli.py schedule add nightly --cron "0 3 * * *" --tz Europe/Berlin --pair pair.json
              cli.py schedule add drift --every 6h --recorded 24h --budget 20m
              cli.py schedule add chains --every 6h --tree-width 0
    """
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
        from spectune.optimizer.inputs import load_workload

        turns = turns_of(kw)
        load_workload(kw["workloads"], turns=turns, **{key: kw[key] for key in DRAWN})
        payload |= {
            "workload": [
                w if w == "demo" or w.startswith("hf:") else str(Path(w).resolve())
                for w in kw["workloads"]
            ]
            or ["demo"],
            "categories": list(kw["categories"]),
            **{key: kw[key] for key in ("limit", "limit_seed", "column", "overlong")},
            "turns": turns,
            "fresh": True,
        }
    check_payload(payload)
    with open_store(ctx) as store:
        added = add_schedule(
            store.database,
            name,
            **{
                key: kw[key]
                for key in ("cron", "every", "tz", "budget", "max_instances", "max_attempts")
            },
            payload=payload,
            misfire_grace=None if kw["misfire_grace"] == "none" else kw["misfire_grace"],
            coalesce=not kw["no_coalesce"],
        )
    emit(
        as_json,
        added.to_json(),
        f"schedule {name}: {added.when}, first at {added.next_fire_at:%Y-%m-%d %H:%M:%S} UTC",
    )


@schedule.command("list")
@with_json
def schedule_list(ctx: click.Context, as_json: bool) -> None:
    """All schedules.

    \b
    Example:  cli.py schedule list
    """
    from spectune.optimizer.report.tables import rows_table
    from spectune.optimizer.schedule import history, list_schedules

    with open_store(ctx, create=False) as store:
        found = list_schedules(store.database)
        done = {
            s.name: [
                f.job.result for f in history(store.database, s.name) if f.job and f.job.result
            ]
            for s in found
        }
    reports = {
        name: next((r["report"] for r in results if r.get("report")), None)
        for name, results in done.items()
    }
    rows = [{**s.to_json(), "when": s.when, "report": reports[s.name]} for s in found]
    emit(
        as_json,
        {"schedules": rows},
        lambda: rows_table(
            rows,
            ("name", "when", "next_fire_at", "enabled", "budget_s", "parked", "report"),
            "schedules",
        ),
    )


@schedule.command("show")
@click.argument("name")
@with_json
def schedule_show(ctx: click.Context, as_json: bool, name: str) -> None:
    """One schedule, whole.

    \b
    Example:  cli.py schedule show nightly
    """
    from spectune.optimizer.schedule import get_schedule

    with open_store(ctx, create=False) as store:
        found = get_schedule(store.database, name).to_json()
    emit(as_json, found, json.dumps(found, indent=2))


def _schedule_verb(verb: str, what: str, outcome: str) -> None:
    @schedule.command(verb, help=f"{what}\n\n\b\nExample:  cli.py schedule {verb} nightly")
    @click.argument("name")
    @with_json
    def command(ctx: click.Context, as_json: bool, name: str) -> None:
        import spectune.optimizer.schedule as schedules

        with open_store(ctx, create=False) as store:
            found = getattr(schedules, f"{verb}_schedule")(store.database, name)
        emit(as_json, found.to_json(), f"schedule {name} {outcome}")


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
@click.option("--limit", type=Whole(1), default=50, show_default=True)
@with_json
def schedule_history(ctx: click.Context, as_json: bool, name: str | None, limit: int) -> None:
    """Slots that fired, and what became of their jobs.

    \b
    Example:  cli.py schedule history nightly
    """
    from spectune.optimizer.report.tables import rows_table
    from spectune.optimizer.schedule import history

    with open_store(ctx, create=False) as store:
        fires = history(store.database, name, limit=limit)
    rows = [
        {
            "schedule": f.schedule,
            "fire_at": f.fire_at.isoformat(),
            "outcome": f.outcome,
            "state": f.job.state if f.job else None,
            "attempt": f.job.attempt if f.job else None,
            "result": (f.job.result or {}).get("label") if f.job else None,
            "published": (f.job.result or {}).get("published") if f.job else None,
            "error": f.job.error.splitlines()[0] if f.job and f.job.error else None,
        }
        for f in fires
    ]
    emit(
        as_json,
        {"history": [f.to_json() for f in fires]},
        lambda: rows_table(
            rows,
            ("schedule", "fire_at", "outcome", "state", "attempt", "result", "published", "error"),
            "history",
        ),
    )


@schedule.command("run")
@click.option("--poll", default="30s", show_default=True, help="How often to look for due slots.")
@with_json
def schedule_run(ctx: click.Context, as_json: bool, poll: str) -> None:
    """Work: fire what is due and run its jobs, until SIGINT or SIGTERM. Any number of workers may
    share a database.

    \b
    Example:  cli.py schedule run --poll 10s
    """
    from spectune.optimizer.schedule import parse_duration, run_worker

    _work(
        ctx,
        as_json,
        lambda database, execute, **kw: run_worker(
            database, execute, poll_s=float(parse_duration(poll)), **kw
        ),
    )


@schedule.command("run-once")
@with_json
def schedule_run_once(ctx: click.Context, as_json: bool) -> None:
    """Fire what is due, run every waiting job, and end: for cron and systemd timers.

    \b
    Example:  cli.py schedule run-once
    """
    from spectune.optimizer.schedule import run_once

    _work(ctx, as_json, run_once)


def _schedule_line(event: Fire | Ended) -> str:
    from spectune.optimizer.schedule import Fire

    if isinstance(event, Fire):
        return f"{event.schedule}: slot of {event.fire_at:%Y-%m-%d %H:%M:%S} UTC: {event.outcome}"
    said = f": {event.error.splitlines()[0]}" if event.error else ""
    if report := (event.result or {}).get("report"):
        said += f", its page is {report}"
    return f"{event.job.schedule}: job {event.job.id} {event.ending}{said}"


def _work(ctx: click.Context, as_json: bool, work: Callable[..., Any]) -> None:
    with open_store(ctx) as store:
        from spectune.optimizer.jobs import tuning_job

        with Meter() as meter:
            report = work(
                store.database,
                tuning_job(store, progress=meter, page=lambda study: page_of(ctx, store, study)[0]),
                watch=lambda event: say(_schedule_line(event), err=True),
            )
    data = report.to_json()
    emit(as_json, data, ", ".join(f"{v} {k}" for k, v in data.items()))
