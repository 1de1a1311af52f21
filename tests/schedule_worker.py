"""Workers of schedules as processes of their own. They import no more than this module does, so
that eight of them cost little."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import text

from spectune.db.database import open_database
from spectune.optimizer.schedule import Job, run_worker

T0 = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)


def publish(job: Job) -> None:
    """As a store does: under the lease, and once per key."""
    with job.database.write() as session:
        job.check(session)
        values = {"key": job.idempotency_key, "owner": job.worker}
        session.execute(
            text("INSERT INTO published VALUES (:key, :owner) ON CONFLICT DO NOTHING"), values
        )


class Script:
    """A job function in a worker process. Each step leaves a row or a file, so that the test knows
    how far it came."""

    def __init__(self, folder: Path, steps: str) -> None:
        self.folder, self.steps = folder, steps

    def __call__(self, job: Job) -> Mapping[str, Any]:
        for step in self.steps.split():
            if step == "run":
                with job.database.write() as session:
                    values = {"key": job.idempotency_key, "owner": job.worker}
                    session.execute(text("INSERT INTO executed VALUES (:key, :owner)"), values)
            elif step == "publish":
                publish(job)
            elif step == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                while not (self.folder / step).exists():
                    time.sleep(0.01)
        return {"from": job.worker}


def serve(url: str, folder: Path, owner: str, steps: str, **leased: float) -> None:
    """A worker process; its clock stands at the hour that is written in a file."""

    def clock() -> datetime:
        (folder / owner).touch()  # it is at work, and signals are heard
        return T0 + int((folder / "hour").read_text() or 0) * HOUR

    how: dict[str, Any] = {"owner": owner, "poll_s": 0.1, "clock": clock, **leased}
    with open_database(url) as database:
        run_worker(database, Script(folder, steps), **how)
