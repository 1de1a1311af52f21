"""Rollouts: begun by compare-and-swap on what is in force, conducted and ended under a lease, which
follows the database's clock alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.orm import Session, undefer

from spectune.db import DatabaseError, NotFoundError
from spectune.traces.blobs import Damaged
from spectune.traces.schema import Step, kind_of
from spectune.traces.store.publications import Publications, replaceable
from spectune.traces.store.rows import given, insert_absent
from spectune.traces.tables import (
    HARM,
    FollowedServer,
    Publication,
    Rollout,
    RolloutTurn,
    Trajectory,
)

HARMS: Final = 3
"""Rollouts of a deployment that did harm, after which none begins until somebody thaws it."""
BATCH: Final = 200


class RolloutError(DatabaseError):
    """A rollout cannot begin or end as it is asked."""


@dataclass(frozen=True)
class Conducting:
    """The lease of an open rollout: ``claims`` is its token."""

    rollout: Rollout
    owner: str
    claims: int

    def is_held(self) -> ColumnElement[bool]:
        mine = Rollout.claims == self.claims, Rollout.lease_owner == self.owner
        return and_(Rollout.id == self.rollout.id, Rollout.verdict.is_(None), *mine)


class Rollouts(Publications):
    """What takes turns with what is in force."""

    def begin_rollout(
        self,
        rollout: Rollout,
        *,
        expected: int,
        guard: Callable[[Session], None] | None = None,
    ) -> Rollout:
        """Begins a rollout of a stored policy against the version ``expected`` (0: none), as
        :meth:`publish` publishes; returns it as it is stored. Raises StaleVersionError where
        another is in force, and RolloutError where one is open there, or the deployment is
        frozen."""
        pair_id, device, deployment = place = rollout.pair_id, rollout.device, rollout.deployment
        with self.database.write() as session:
            self.database.lock(session, f"publish {deployment} {pair_id} {kind_of(device)}")
            if guard is not None:
                guard(session)
            if (key := rollout.idempotency_key) is not None:
                self.database.lock(session, f"key {key}")
                of_key = select(Rollout).where(Rollout.idempotency_key == key)
                if done := session.scalars(of_key).first():
                    return done
            current = replaceable(session, rollout.policy_id, place, expected)
            self._check_free(session, deployment, pair_id, device)
            rollout.incumbent, rollout.created_at = current or None, self.clock()
            session.add(rollout)
            session.flush()
            session.refresh(rollout)  # with its policy
            return rollout

    def _check_free(self, session: Session, deployment: str, pair_id: str, device: str) -> None:
        r = Rollout
        of = (r.deployment == deployment, r.pair_id == pair_id, r.device == device)
        if (other := session.scalar(select(r.id).where(r.verdict.is_(None), *of))) is not None:
            raise RolloutError(
                f"rollout {other} is open in deployment {deployment} on {device}; `policies abort "
                f"--pair PAIR --device {device!r} --deployment {deployment}` ends it"
            )
        harms = select(func.count()).where(
            r.deployment == deployment, r.verdict == HARM, r.is_forgiven.is_(False)
        )
        if (session.scalar(harms) or 0) >= HARMS:
            raise RolloutError(
                f"deployment {deployment} is frozen: {HARMS} rollouts did harm there; `policies "
                f"thaw --deployment {deployment}` allows others"
            )

    def thaw(self, deployment: str) -> int:
        """Lets rollouts begin again in a deployment; how many that did harm are forgiven."""
        of = (Rollout.deployment == deployment, Rollout.verdict == HARM)
        forgive = update(Rollout).where(*of, Rollout.is_forgiven.is_(False))
        with self.database.write() as session:
            done = session.scalars(forgive.values(is_forgiven=True).returning(Rollout.id))
            return len(done.all())

    def rollouts(
        self, deployment: str | None = None, *, is_open: bool = False, limit: int | None = None
    ) -> tuple[Rollout, ...]:
        """Those of a deployment, or of all, newest first."""
        query = select(Rollout).filter_by(**given(deployment=deployment))
        if is_open:
            query = query.where(Rollout.verdict.is_(None))
        with self.database.read() as session:
            return tuple(session.scalars(query.order_by(Rollout.id.desc()).limit(limit)))

    def rollout(self, number: int) -> Rollout | None:
        with self.database.read() as session:
            return session.get(Rollout, number)

    def conducted_rollouts(self, deployment: str) -> tuple[Rollout, ...]:
        """The open ones of a deployment that somebody conducts now: the cheap question that a
        follower polls."""
        with self.database.read() as session:
            query = select(Rollout).where(
                Rollout.deployment == deployment, Rollout.verdict.is_(None)
            )
            found = tuple(session.scalars(query))
            now = self.database.now(session) if found else None
        return tuple(r for r in found if now and r.lease_until and r.lease_until > now)

    # ---------------------------------------------------------------------------------- turns

    def take_turns(self, rollout_id: int, boot: str, since: float, problem: str = "") -> None:
        """Stores since when a server takes turns, or why it does not."""
        values = {"rollout_id": rollout_id, "boot": boot, "since": since, "problem": problem}
        with self.database.write() as session:
            insert_absent(session, RolloutTurn, values)

    def turns(self, rollout_id: int) -> tuple[RolloutTurn, ...]:
        """By boot, in order."""
        query = select(RolloutTurn).where(RolloutTurn.rollout_id == rollout_id)
        with self.database.read() as session:
            ordered = query.order_by(RolloutTurn.boot, RolloutTurn.since)
            return tuple(session.scalars(ordered))

    def served_by(
        self, boot: str, since: datetime, after: Mapping[str, int] | None = None
    ) -> Iterator[tuple[tuple[str, int], tuple[Step, ...]]]:
        """The rounds of the requests of a boot that ended ``since`` a moment, by recording and
        ordinal; of each recording those ``after`` an ordinal, in order, a batch in memory at a
        time."""
        with self.database.read() as session:
            server = session.get(FollowedServer, boot)
        for name in () if server is None else server.recordings.values():
            yield from self._served_in(name, since, (after or {}).get(name, -1))

    def _served_in(
        self, name: str, since: datetime, after: int
    ) -> Iterator[tuple[tuple[str, int], tuple[Step, ...]]]:
        t = Trajectory
        while True:
            query = (
                select(t)
                .where(t.recording_id == name, t.created_at >= since, t.ordinal > after)
                .order_by(t.ordinal)
                .limit(BATCH)
                .options(undefer(t.steps))
            )
            with self.database.read() as session:
                rows = session.scalars(query).all()
            for row in rows:
                after = row.ordinal
                if row.steps is not None and not isinstance(row.steps, Damaged):
                    yield (name, after), row.steps
            if len(rows) < BATCH:
                return

    # ---------------------------------------------------------------------------- conducting

    def conduct(self, owner: str, lease_s: float, number: int | None = None) -> Conducting | None:
        """Leases an open rollout (of this number) that nobody conducts; None where none is."""
        r = Rollout
        with self.database.write() as session:
            now = self.database.now(session)
            is_free = or_(r.lease_until.is_(None), r.lease_until <= now)
            query = select(r).where(r.verdict.is_(None), is_free).order_by(r.id).limit(1)
            if number is not None:
                query = query.where(r.id == number)
            row = session.scalars(query.with_for_update(of=r, skip_locked=True)).first()
            if row is None:
                return None
            row.claims, row.lease_owner = row.claims + 1, owner
            row.lease_until = now + timedelta(seconds=lease_s)
            session.flush()
            return Conducting(row, owner, row.claims)

    def extend_rollout(
        self, lease: Conducting, lease_s: float, standing: Mapping[str, Any]
    ) -> bool:
        """Keeps conducting it, and stores what was seen. False where it has ended, or is another's
        by now."""
        with self.database.write() as session:
            until = self.database.now(session) + timedelta(seconds=lease_s)
            values = {"lease_until": until, "standing": dict(standing)}
            return _swap(session, lease.is_held(), **values)

    def end_rollout(
        self, lease: Conducting, verdict: str, why: str, standing: Mapping[str, Any]
    ) -> bool:
        """Ends it without a publication. False where it has ended, or is another's by now."""
        with self.database.write() as session:
            values = {"why": why, "standing": dict(standing), "ended_at": self.clock()}
            return _swap(session, lease.is_held(), verdict=verdict, **values)

    def promote_rollout(
        self, lease: Conducting, why: str, standing: Mapping[str, Any]
    ) -> Publication:
        """Ends it and publishes its policy, in one transaction. Raises StaleVersionError where
        something was published since, and RolloutError where it has ended, or is another's."""
        rollout = lease.rollout

        def end(session: Session) -> None:
            values = {"why": why, "standing": dict(standing), "ended_at": self.clock()}
            if not _swap(session, lease.is_held(), verdict="promoted", **values):
                raise RolloutError(f"rollout {rollout.id} has ended, or another conducts it")

        return self.publish(
            rollout.pair_id,
            rollout.device,
            rollout.policy_id,
            actor=rollout.actor,
            deployment=rollout.deployment,
            sampling=rollout.sampling,
            evidence={**rollout.evidence, "rollout": {"id": rollout.id, **standing}},
            reason=f"rollout {rollout.id}: {why}",
            expected=rollout.incumbent or 0,
            guard=end,
        )

    def abort_rollout(self, number: int, why: str) -> Rollout:
        """Ends an open rollout, whoever conducts it. Raises NotFoundError where it has ended."""
        is_open = and_(Rollout.id == number, Rollout.verdict.is_(None))
        with self.database.write() as session:
            values = {"verdict": "aborted", "why": why, "ended_at": self.clock()}
            if not _swap(session, is_open, **values):
                raise NotFoundError(f"there is no open rollout {number}")
            return session.get_one(Rollout, number)


def _swap(session: Session, where: ColumnElement[bool], **values: Any) -> bool:
    done = update(Rollout).where(where).values(**values).returning(Rollout.id)
    return session.scalar(done) is not None
