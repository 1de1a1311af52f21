"""Re-optimization on a schedule, by any number of workers on one database. ``docs/schedules.md``
says what is guaranteed."""

from spectune.optimizer.schedule.book import (
    add_schedule,
    get_job,
    get_schedule,
    history,
    list_schedules,
    pause_schedule,
    remove_schedule,
    resume_schedule,
)
from spectune.optimizer.schedule.lease import JobContext, LeaseLostError
from spectune.optimizer.schedule.tick import tick
from spectune.optimizer.schedule.times import ScheduleError, Timing, format_duration, parse_duration
from spectune.optimizer.schedule.values import Fire, Job, Schedule
from spectune.optimizer.schedule.worker import (
    Ended,
    Execute,
    HandBack,
    WorkReport,
    run_once,
    run_worker,
)

__all__ = [
    "Ended",
    "Execute",
    "Fire",
    "HandBack",
    "Job",
    "JobContext",
    "LeaseLostError",
    "Schedule",
    "ScheduleError",
    "Timing",
    "WorkReport",
    "add_schedule",
    "format_duration",
    "get_job",
    "get_schedule",
    "history",
    "list_schedules",
    "parse_duration",
    "pause_schedule",
    "remove_schedule",
    "resume_schedule",
    "run_once",
    "run_worker",
    "tick",
]
