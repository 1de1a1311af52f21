"""What a schedule tells its jobs: the keys of a payload, judged before they are stored and before
they are run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from spectune.optimizer.deployment import check_deployment
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.schedule import ScheduleError, parse_duration
from spectune.traces.schema import Workload
from spectune.traces.store.publications import DEFAULT_DEPLOYMENT
from spectune.traces.workloads import Turns

SEARCHED = ("trials", "gamma_max", "tree_width", "tree_depth", "finalists")
KEYS = {
    "pair", "workload", "column", "categories", "limit", "limit_seed", "overlong", "bad_rows",
    "turns", "recorded", "device", "dtype", "threads", "temperature",
    "top_k", "top_p", "seed", "max_new_tokens", "verifier", "stop_strings", "chat", "fresh",
    "sample", "deployment", *SEARCHED,
}  # fmt: skip


def check_payload(payload: Mapping[str, Any]) -> None:
    """Raises ScheduleError for a payload that no job could run, PolicyError for a deployment that
    has no name."""
    unknown = sorted(set(payload) - KEYS)
    if unknown:
        raise ScheduleError(
            f"unknown key {unknown[0]!r} in the schedule's payload; known keys: "
            f"{', '.join(sorted(KEYS))}"
        )
    if not isinstance(payload.get("pair"), Mapping):
        raise ScheduleError('the schedule\'s payload needs "pair"')
    if payload.get("recorded"):
        parse_duration(str(payload["recorded"]))
    turns_asked(payload)
    check_deployment(str(payload.get("deployment", DEFAULT_DEPLOYMENT)))


def turns_asked(payload: Mapping[str, Any]) -> Turns | None:
    """What a payload says of requests with several turns. Raises ScheduleError."""
    turns: Any = payload.get("turns")
    if turns not in (None, "first", "all"):
        raise ScheduleError(
            f'"turns" in the schedule\'s payload is {turns!r}; it must be "first", "all" or null'
        )
    return cast("Turns | None", turns)


def tuning_workload(payload: Mapping[str, Any]) -> Workload:
    """The workload that a schedule's payload names. Raises WorkloadError and ScheduleError."""
    return load_workload(
        list(payload.get("workload", ["demo"])),
        turns=turns_asked(payload),
        limit=payload.get("limit"),
        categories=tuple(payload.get("categories", ())),
        column=payload.get("column"),
        limit_seed=payload.get("limit_seed", 0),
        bad_rows=payload.get("bad_rows", "few"),
    )
