"""Deployments that are watched for drift, each by one at a time under a lease, and the alarms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.orm import Session, undefer

from spectune.traces.blobs import Damaged
from spectune.traces.schema import Step
from spectune.traces.store.rows import Storage, given, insert_absent
from spectune.traces.tables import Alarm, Publication, Trajectory, WatchedDeployment

BATCH: Final = 200
PENDING: Final = "pending"
HELD_BACK: Final = "held back"
"""The outcome of an alarm before a tuning may be due again."""


class WatchedRequest(NamedTuple):
    """A request as it is watched: its rounds, and no text."""

    ordinal: int
    category: str
    n_prompt: int
    ended_at: datetime
    steps: tuple[Step, ...]


class Alarms(Storage):
    """What :mod:`optimizer.drift` saw."""

    def alarms(
        self,
        deployment: str | None = None,
        newest: int | None = 20,
        *,
        version: int | None = None,
    ) -> tuple[Alarm, ...]:
        """The newest of a deployment, or of all, since a version came into force, newest first."""
        of = given(deployment=deployment, version=version)
        query = select(Alarm).filter_by(**of).order_by(Alarm.id.desc()).limit(newest)
        with self.database.read() as session:
            return tuple(session.scalars(query))

    def watched_deployments(self) -> tuple[WatchedDeployment, ...]:
        """What was seen last of each, by name."""
        with self.database.read() as session:
            return tuple(session.scalars(select(WatchedDeployment).order_by(*_KEY)))

    def begin_look(
        self, publication: Publication, owner: str, lease_s: float
    ) -> WatchedDeployment | None:
        """Leases the deployment, pair and device of a publication; None where another looks."""
        w, p = WatchedDeployment, publication
        key = {"deployment": p.deployment, "pair_id": p.pair_id, "device": p.device}
        with self.database.write() as session:
            new = {"version": 0, "claims": 0, "figures": {}, "state": {}}
            insert_absent(session, w, {**key, **new})
            now = self.database.now(session)
            is_free = or_(w.lease_until.is_(None), w.lease_until <= now)
            query = select(w).filter_by(**key).where(is_free).options(undefer(w.state))
            row = session.scalars(query.with_for_update(skip_locked=True)).first()
            if row is not None:
                row.claims, row.lease_owner = row.claims + 1, owner
                row.lease_until = now + timedelta(seconds=lease_s)
            return row

    def store_look(
        self,
        lease: WatchedDeployment,
        version: int,
        state: Mapping[str, Any],
        figures: Mapping[str, Any],
        alarms: Sequence[Alarm],
    ) -> bool:
        """Stores what was seen and the alarms, in one transaction, so that a kill loses and doubles
        none. False, changing nothing, where the lease is another's."""
        values = {"version": version, "state": dict(state), "figures": dict(figures)}
        with self.database.write() as session:
            is_held = _swap(session, lease, **values, looked_at=self.clock())
            if is_held:
                session.add_all(alarms)
        return is_held

    def end_look(self, lease: WatchedDeployment) -> None:
        """Lets another look."""
        with self.database.write() as session:
            _swap(session, lease, lease_owner=None, lease_until=None)

    def settle_alarms(
        self,
        lease: WatchedDeployment,
        alarms: Collection[Alarm],
        gain: float | None,
        settle: Callable[[Session, datetime | None], tuple[str, str, str | None]],
    ) -> tuple[Alarm, ...]:
        """Stores what came of pending alarms (outcome, why, and the schedule that was made due), as
        ``settle`` says in the transaction, which is told when a tuning of the deployment was made
        due last; these alarms. Nothing changes where the lease is another's."""
        a = Alarm
        last = select(a.due_at).where(a.deployment == lease.deployment, a.due_at.is_not(None))
        pending = and_(
            a.id.in_([alarm.id for alarm in alarms]), a.outcome.in_((PENDING, HELD_BACK))
        )
        with self.database.write() as session:
            self.database.lock(session, f"drift {lease.deployment}")  # all pairs and devices
            if not _swap(session, lease, lease_owner=lease.lease_owner):
                return ()
            due_at = session.scalar(last.order_by(a.due_at.desc()).limit(1))
            outcome, why, schedule = settle(session, due_at)
            values: dict[str, Any] = {"outcome": outcome, "why": why, "gain": gain}
            values |= {"schedule": schedule, "due_at": self.clock() if schedule else None}
            done = update(a).where(pending).values(**values).returning(a)
            return tuple(session.scalars(done))

    def count_since(self, recordings: Collection[str], since: datetime) -> int:
        """How many requests of these recordings ended since a moment."""
        t = Trajectory
        counted = select(func.count()).where(t.recording_id.in_(recordings), t.created_at >= since)
        with self.database.read() as session:
            return session.scalar(counted) or 0

    def requests_after(
        self, recording: str, ordinal: int, since: datetime
    ) -> Iterator[list[WatchedRequest]]:
        """The requests of a recording after one and ``since`` a moment that have rounds, in order;
        a batch in memory at a time."""
        t = Trajectory
        while True:
            query = (
                select(t.ordinal, t.category, t.n_prompt, t.created_at, t.steps)
                .where(t.recording_id == recording, t.ordinal > ordinal, t.created_at >= since)
                .order_by(t.ordinal)
                .limit(BATCH)
            )
            with self.database.read() as session:
                rows = session.execute(query).all()
            usable = [row for row in rows if row.steps and not isinstance(row.steps, Damaged)]
            if usable:
                yield [WatchedRequest(*row) for row in usable]  # type: ignore[arg-type]
            if len(rows) < BATCH:
                return
            ordinal = rows[-1].ordinal


_KEY = (WatchedDeployment.deployment, WatchedDeployment.pair_id, WatchedDeployment.device)


def _swap(session: Session, lease: WatchedDeployment, **values: Any) -> bool:
    w = WatchedDeployment
    of: list[ColumnElement[bool]] = [column == getattr(lease, column.key) for column in _KEY]
    mine = w.claims == lease.claims, w.lease_owner == lease.lease_owner
    done = update(w).where(*of, *mine).values(**values).returning(w.claims)
    return session.scalar(done) is not None
