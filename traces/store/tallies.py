"""How many rollouts, alarms and attempts at jobs there were, by how they ended."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import func, select

from spectune.db.schedules import Attempt, Schedule
from spectune.traces.store import TraceStore
from spectune.traces.tables import Alarm, Rollout


class Tallies(NamedTuple):
    """Rows of keys and a number: ``rollouts`` by deployment and verdict (``open`` where there is
    none yet), ``alarms`` by deployment, what changed and outcome, ``attempts`` by schedule and
    outcome."""

    rollouts: tuple[tuple[Any, ...], ...]
    alarms: tuple[tuple[Any, ...], ...]
    attempts: tuple[tuple[Any, ...], ...]


def tallies(store: TraceStore) -> Tallies:
    verdict = func.coalesce(Rollout.verdict, "open")
    of_schedule = Attempt.schedule_id == Schedule.id
    queries = (
        select(Rollout.deployment, verdict, func.count()).group_by(Rollout.deployment, verdict),
        select(*(keys := (Alarm.deployment, Alarm.what, Alarm.outcome)), func.count()).group_by(
            *keys
        ),
        select(Schedule.name, Attempt.outcome, func.count())
        .join(Attempt, of_schedule)
        .group_by(Schedule.name, Attempt.outcome),
    )
    with store.database.read() as session:
        return Tallies(*(tuple(map(tuple, session.execute(query))) for query in queries))
