"""Alarms: traffic that is no longer what it was when a policy came into force."""

from __future__ import annotations

from sqlalchemy import select

from spectune.traces.store.rows import Storage, given
from spectune.traces.tables import Alarm


class Alarms(Storage):
    """What :mod:`optimizer.drift` saw."""

    def alarms(
        self, deployment: str | None = None, newest: int | None = 20, *, version: int | None = None
    ) -> tuple[Alarm, ...]:
        """The newest of a deployment, or of all, or since a version came into force, newest
        first."""
        query = select(Alarm).filter_by(**given(deployment=deployment, version=version))
        with self.database.read() as session:
            return tuple(session.scalars(query.order_by(Alarm.id.desc()).limit(newest)))
