"""`schedule run`: a worker."""

from __future__ import annotations

from spectune.optimizer.commands.decoding import quiet_transformers
from spectune.optimizer.commands.report import page_of
from spectune.optimizer.commands.results import Result
from spectune.optimizer.commands.session import Talk, open_store
from spectune.optimizer.schedule import run_worker
from spectune.optimizer.schedule.tuning import tuning_job
from spectune.settings import ScheduleRun


def run(s: ScheduleRun, talk: Talk) -> Result:
    with open_store(s, create=True) as store:
        quiet_transformers(talk)

        def page(study: str) -> str | None:
            return page_of(store, study, s.db, None, talk.tell)[0]

        job = tuning_job(store, progress=talk.progress, page=page, tell=talk.tell)
        outcomes = run_worker(store.database, job, once=s.once, poll_s=s.poll, tell=talk.tell)
    text = ", ".join(f"{number} {name}" for name, number in outcomes.items())
    # With --once somebody asks how it went: cron, systemd.
    return Result(text, outcomes, exit_code=1 if s.once and outcomes["failed"] else 0)
