"""`schedule`: tuning again and again; what the schedules are, and how they ended last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spectune.db.database import Database
from spectune.engines.abilities import VLLM
from spectune.optimizer.commands.common import (
    Talk,
    deployment_for,
    open_store,
    pair_of,
)
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.commands.tune_settings import bench_of, checked
from spectune.optimizer.inputs import read_files
from spectune.optimizer.schedule import (
    Schedule,
    add_schedule,
    edit_schedule,
    history,
    list_schedules,
    remove_schedule,
)
from spectune.options import from_keywords, options_of, settings_of, value_of
from spectune.runtime.pair import check_threads
from spectune.settings import ScheduleAdd, ScheduleEdit, ScheduleList, ScheduleRemove, Tune
from spectune.traces.errors import ConfigError
from spectune.traces.text import without_credentials

SHOWN = ("name", "cron", "tz", "next_at", "tunes", "worker", "last", "result", "report")
SOURCES = {"workload", "prompts", "recording", "since"}
"""Keys that say which texts are tuned on, of which one is used."""
ATTEMPTS = ("slot", "attempt", "worker", "ended_at", "last", "result", "report")


def add(s: ScheduleAdd, talk: Talk) -> Result:
    document = _document(s, talk)
    with open_store(s, create=True) as store:
        row = add_schedule(store.database, s.name, s.cron, document, tz=s.tz, at_once=s.now)
    return _added(row)


def edit(s: ScheduleEdit, talk: Talk) -> Result:
    with open_store(s) as store:
        (before,) = list_schedules(store.database, s.name)
        options = options_of(ScheduleAdd)
        stored = from_keywords(ScheduleAdd, before.settings)
        kept = {
            key: value
            for key, value in stored.items()
            if value not in (options[key].default, [], {})
        }
        typed = {key: value_of(s, key) for key in options if s.typed(key)}
        if SOURCES & typed.keys():  # one source takes the place of another
            kept = {key: value for key, value in kept.items() if key not in SOURCES}
        when = {"name": s.name, "cron": before.cron, "tz": before.tz}
        changed = settings_of(ScheduleAdd, {**when, **kept, **typed}, None)
        document, place = _document(changed, talk), (s.name, changed.cron)
        row = edit_schedule(store.database, *place, document, tz=changed.tz, at_once=changed.now)
    return _added(row)


def _document(s: ScheduleAdd, talk: Talk) -> dict[str, Any]:
    """The settings of the `tune`, as they are stored. Raises what :func:`checked` raises, and
    PairError and TraceError."""
    if bench_of(s) == "engine" and not (s.serve or s.rollout):
        raise ConfigError(
            "a schedule publishes what it proves: say --rollout, or --serve, with --engine"
        )
    settings = _to_store(checked(s, talk))
    if not (settings.recording or settings.since or settings.engine):
        for line in read_files(settings.workload, settings.requests).notes:
            talk.tell(line)
    own = ScheduleAdd.model_fields.keys() - Tune.model_fields
    about = {"db", "target", "drafts", "report", *own}
    return settings.model_dump(mode="json", exclude=about, exclude_none=True)


def _added(row: Schedule) -> Result:
    first = f"{row.next_at:%Y-%m-%d %H:%M:%S} UTC"
    what = f"tunes {tunes(row.settings)}"
    text = f"schedule {row.name}: {row.cron} ({row.tz}), next at {first}; {what}"
    return Result(text, row.to_json())


def tunes(settings: Mapping[str, Any]) -> str:
    """What a schedule tunes, in words, by the settings that it stores."""
    pair = settings.get("pair") or {}
    name = pair.get("name") or Path(str(pair.get("target", ""))).name
    source = ", ".join(Path(str(file)).name for file in settings.get("workload", ()))
    if since := settings.get("since"):
        source = f"what was decoded since {since}"
    elif recording := settings.get("recording"):
        source = f"recording {recording}"
    where = ""
    if url := settings.get("url"):
        where = f" through {url}"
    elif engine := settings.get("engine"):
        where = f" on {engine}"
    if load := (settings.get("load") or {}).get("arrivals"):
        where += f" under {load}"
    deployment = settings.get("deployment", "default")
    return f"{name} on {source}{where}, for deployment {deployment}"


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
    if s.recording is None and s.since is None:
        files = tuple(name if name == "demo" else str(Path(name).resolve()) for name in s.workload)
        values["workload"] = files or ("demo",)
    return s.model_copy(update=values)


def list_all(s: ScheduleList, talk: Talk) -> Result:
    with open_store(s) as store:
        schedules = schedule_rows(store.database, s.name)
        if s.name is not None:
            schedules[0]["attempts"] = [a.to_json() for a in history(store.database, s.name)]
    if s.name is None:
        table = table_of(schedules)
        rows = [*table.rows]
    else:
        rows = [{**row, **_ended(row)} for row in schedules[0]["attempts"]]
        table = Table(rows, ATTEMPTS, f"attempts of {s.name} that ended")
    text = "" if rows else "no schedules" if s.name is None else "no attempt has ended"
    return Result(text, {"schedules": schedules}, rows, [table] if rows else [])


def schedule_rows(database: Database, name: str | None = None) -> list[dict[str, Any]]:
    """All schedules, or the one of a name, with what they tune. JSON-ready."""
    found = list_schedules(database, name)
    return [{**row.to_json(), "tunes": tunes(row.settings)} for row in found]


def table_of(schedules: Iterable[Mapping[str, Any]]) -> Table:
    """Schedules as they are shown."""
    rows = [{**row, "worker": row["lease_owner"], **_ended(row["last"])} for row in schedules]
    return Table(rows, SHOWN, "schedules")


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
