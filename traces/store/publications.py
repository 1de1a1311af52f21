"""Policies in force: an append-only list per deployment, pair and device, and what each node did
with its entries. What is published for all devices of a kind (``cuda``) holds for each of them
(``cuda:NVIDIA L4``) until something newer is published for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from spectune.db import NotFoundError, StaleVersionError
from spectune.traces.schema import devices_of, kind_of
from spectune.traces.store.rows import Storage, given, is_stored, require
from spectune.traces.tables import Acknowledgement, AckStatus, Pair, Publication, StoredPolicy
from spectune.traces.views import IN_FORCE

DEFAULT_DEPLOYMENT: Final = "default"


class Newest(NamedTuple):
    """What is in force in a deployment, for a pair on a device; ``models``: the pair's."""

    version: int
    deployment: str
    device: str
    pair_id: str
    pair_name: str
    models: Mapping[str, Any]


class Publications(Storage):
    """Publishing and watching. Nothing here changes a row: a rollback publishes the older policy
    again."""

    def publish(
        self,
        pair_id: str,
        device: str,
        policy_id: str,
        *,
        actor: str,
        deployment: str = DEFAULT_DEPLOYMENT,
        sampling: Mapping[str, Any] | None = None,
        evidence: Mapping[str, Any] | None = None,
        reason: str = "",
        idempotency_key: str | None = None,
        expected: int | None = None,
        guard: Callable[[Session], None] | None = None,
    ) -> Publication:
        """Puts a stored policy in force in a deployment, for a pair on a device.

        ``guard`` is called first, in the transaction that publishes; what it raises is passed on,
        and nothing is published. With an ``idempotency_key`` seen before, the publication made then
        is returned and nothing is added, whatever else is given. ``expected`` is the version the
        caller believes is in force (0: none); if another is, StaleVersionError is raised. Raises
        NotFoundError for an unknown pair or policy.
        """
        with self.database.write() as session:
            # On PostgreSQL writers run side by side: without the lock two of them could both find
            # `expected` in force. For all devices of a kind, as what holds for one may be
            # published for all.
            self.database.lock(session, f"publish {deployment} {pair_id} {kind_of(device)}")
            if guard is not None:
                guard(session)
            if idempotency_key is not None:
                self.database.lock(session, f"key {idempotency_key}")
                if done := _of_key(session, idempotency_key):
                    return done
            place = pair_id, device, deployment
            current = replaceable(session, policy_id, place, expected)
            publication = Publication(
                deployment=deployment,
                sampling=None if sampling is None else dict(sampling),
                pair_id=pair_id,
                device=device,
                policy_id=policy_id,
                supersedes=current or None,
                evidence=dict(evidence or {}),
                actor=actor,
                reason=reason,
                idempotency_key=idempotency_key,
                created_at=self.clock(),
            )
            session.add(publication)
            session.flush()
            session.refresh(publication)  # with its policy
            return publication

    def active_version(
        self, pair_id: str, device: str, deployment: str = DEFAULT_DEPLOYMENT
    ) -> int:
        """The version in force, 0 if none: the cheap question a watcher polls."""
        with self.database.read() as session:
            return active_version(session, pair_id, device, deployment)

    def active_publication(
        self, pair_id: str, device: str, deployment: str = DEFAULT_DEPLOYMENT
    ) -> Publication | None:
        """The publication in force in a deployment, for a pair on a device, or None."""
        found = self.list_publications(pair_id, device, deployment, limit=1)
        return found[0] if found else None

    def published_under(self, idempotency_key: str) -> Publication | None:
        """The publication made under a key, or None."""
        with self.database.read() as session:
            return _of_key(session, idempotency_key)

    def list_publications(
        self,
        pair_id: str | None = None,
        device: str | None = None,
        deployment: str | None = None,
        *,
        limit: int | None = None,
    ) -> tuple[Publication, ...]:
        """Publications of a pair, for a device (those for all of its kind among them) and of a
        deployment, each optional, newest first."""
        of = given(pair_id=pair_id, deployment=deployment)
        query = select(Publication).filter_by(**of)
        if device is not None:
            query = query.where(Publication.device.in_(devices_of(device)))
        with self.database.read() as session:
            return tuple(session.scalars(query.order_by(Publication.version.desc()).limit(limit)))

    def in_force(self) -> tuple[Publication, ...]:
        """What is in force in every deployment, for every pair and device, by their names."""
        of = (Publication.deployment, Publication.pair_id, Publication.device)
        newest = select(IN_FORCE.c.version).where(IN_FORCE.c.until.is_(None))
        query = select(Publication).where(Publication.version.in_(newest)).order_by(*of)
        with self.database.read() as session:
            return tuple(session.scalars(query))

    def newest_publications(self, deployment: str | None = None) -> tuple[Newest, ...]:
        """What is in force for each pair and device of a deployment, or of every one, by version:
        the cheap question of who does not know the pair."""
        p = Publication
        newest = select(func.max(p.version)).group_by(p.deployment, p.pair_id, p.device)
        query = (
            select(p.version, p.deployment, p.device, p.pair_id, Pair.name, Pair.models)
            .join(Pair, Pair.id == p.pair_id)
            .where(p.version.in_(newest.filter_by(**given(deployment=deployment))))
            .order_by(p.version)
        )
        with self.database.read() as session:
            return tuple(Newest(*row) for row in session.execute(query))

    def acknowledge(self, version: int, node: str, status: AckStatus, reason: str = "") -> None:
        """Adds what a node did with a publication. Raises NotFoundError for an unknown one."""
        with self.database.write() as session:
            if not is_stored(session, Publication.version, version):
                raise NotFoundError(f"there is no publication {version}")
            session.add(Acknowledgement(version, node, status, reason, self.clock()))

    def acknowledgements(
        self, version: int | None = None, node: str | None = None
    ) -> tuple[Acknowledgement, ...]:
        """Acknowledgements of a publication, or of all, by a node, or by all, oldest first."""
        query = select(Acknowledgement).filter_by(**given(version=version, node=node))
        query = query.order_by(Acknowledgement.id)
        with self.database.read() as session:
            return tuple(session.scalars(query))


def _of_key(session: Session, key: str) -> Publication | None:
    return session.scalars(select(Publication).where(Publication.idempotency_key == key)).first()


def replaceable(
    session: Session, policy_id: str, place: tuple[str, str, str], expected: int | None
) -> int:
    """The version in force (0: none) at a place, a pair's id, device and deployment, which a stored
    policy may replace. Raises NotFoundError for an unknown pair or policy, StaleVersionError where
    another than the ``expected`` one (None: any) is in force."""
    pair_id, device, deployment = place
    require(session, Pair, pair_id)
    require(session, StoredPolicy, policy_id)
    current = active_version(session, pair_id, device, deployment)
    if expected is not None and expected != current:
        raise StaleVersionError(
            f"publication {current} is in force, not {expected} as expected; look at it and "
            "publish again"
        )
    return current


def active_version(session: Session, pair_id: str, device: str, deployment: str) -> int:
    p = Publication
    of = (p.pair_id == pair_id, p.device.in_(devices_of(device)), p.deployment == deployment)
    return session.scalar(select(func.max(p.version)).where(*of)) or 0
