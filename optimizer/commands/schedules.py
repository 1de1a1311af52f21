"""`schedule`: tuning again and again; what the schedules are, and how they ended last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spectune.engines.abilities import VLLM
from spectune.engines.vllm.running import without_credentials
from spectune.optimizer.commands.common import (
    Talk,
    deployment_for,
    open_store,
    pair_of,
)
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.commands.tune_settings import bench_of, checked
from spectune.optimizer.inputs import read_files
from spectune.optimizer.schedule import add_schedule, history, list_schedules, remove_schedule
from spectune.runtime.pair import check_threads
from spectune.settings import ScheduleAdd, ScheduleList, ScheduleRemove, Tune
from spectune.traces.errors import ConfigError

SHOWN = ("name", "cron", "tz", "next_at", "worker", "last", "result", "report")
ATTEMPTS = ("slot", "attempt", "worker", "ended_at", "last", "result", "report")


def add(s: ScheduleAdd, talk: Talk) -> Result:
    if bench_of(s) == "engine" and not s.serve:
        raise ConfigError("a schedule publishes what it proves: say --serve with --engine")
    settings = _to_store(checked(s, talk))
    if not (settings.recording or settings.since or settings.engine):
        for line in read_files(settings.workload, settings.requests).notes:
            talk.tell(line)
    about = {
        "db",
        "target",
        "drafts",
        "report",
        *(ScheduleAdd.model_fields.keys() - Tune.model_fields),
    }
    document = settings.model_dump(mode="json", exclude=about, exclude_none=True)
    with open_store(s, create=True) as store:
        row = add_schedule(store.database, s.name, s.cron, document, tz=s.tz, at_once=s.now)
    first = f"{row.next_at:%Y-%m-%d %H:%M:%S} UTC"
    return Result(f"schedule {s.name}: {row.cron} ({row.tz}), first at {first}", row.to_json())


def _to_store(s: ScheduleAdd) -> ScheduleAdd:
    """The settings as they are stored: the same wherever a worker stands. Raises PairError,
    TraceError and ConfigError."""
    check_threads(s.threads)
    values: dict[str, Any] = {"pair": pair_of(s).to_json(), "target": None, "drafts": {}}
    if bench_of(s) == "server":
        if s.url and without_credentials(s.url) != s.url:
            raise ConfigError(
                "--url: a schedule is stored, and a password in its URL with it; leave that out, "
                "and set VLLM_API_KEY where `schedule run` runs"
            )
        values["folder"] = str(Path(s.folder or "").resolve())
    if bench_of(s) != "native":
        values["deployment"] = deployment_for(s, s.engine or VLLM.name)
    files = tuple(name if name == "demo" else str(Path(name).resolve()) for name in s.workload)
    return s.model_copy(update=values | {"workload": files or ("demo",)})


def list_all(s: ScheduleList, talk: Talk) -> Result:
    with open_store(s) as store:
        schedules = [row.to_json() for row in list_schedules(store.database, s.name)]
        if s.name is not None:
            schedules[0]["attempts"] = [a.to_json() for a in history(store.database, s.name)]
    if s.name is None:
        rows = [{**row, "worker": row["lease_owner"], **_ended(row["last"])} for row in schedules]
        table = Table(rows, SHOWN, "schedules")
    else:
        rows = [{**row, **_ended(row)} for row in schedules[0]["attempts"]]
        table = Table(rows, ATTEMPTS, f"attempts of {s.name} that ended")
    text = "" if rows else "no schedules" if s.name is None else "no attempt has ended"
    return Result(text, {"schedules": schedules}, rows, [table] if rows else [])


def _ended(attempt: Mapping[str, Any] | None) -> dict[str, Any]:
    """An attempt's outcome as columns of a table."""
    if attempt is None:
        return {}
    result = attempt["result"] or {}
    text = attempt["error"] or result.get("label")
    if result.get("published"):
        text = f"{text}, published as version {result['published']}"
    return {"last": attempt["outcome"], "result": text, "report": result.get("report")}


def remove(s: ScheduleRemove, talk: Talk) -> Result:
    with open_store(s) as store:
        row = remove_schedule(store.database, s.name)
    return Result(f"schedule {s.name} is removed", row.to_json())
