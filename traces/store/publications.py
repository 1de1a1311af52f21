"""Policies in force: an append-only list per deployment, pair and class of device, and what each
node did with its entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from spectune.db import NotFoundError, StaleVersionError
from spectune.db.models import AcknowledgementRow, PairRow, PolicyRow, PublicationRow
from spectune.traces.store.rows import Storage, equal, is_stored, require, value_of

AckStatus = Literal["applied", "refused"]
DEFAULT_DEPLOYMENT: Final = "default"


@dataclass(frozen=True)
class Publication:
    """A policy put in force. ``version`` grows; the largest of a deployment, pair and device is in
    force. ``sampling`` is what it was tuned for (``temperature``, ``top_k``, ``top_p``,
    ``verifier``), None where nobody knows. ``document`` is the policy's."""

    version: int
    pair_id: str
    device: str
    policy_id: str
    label: str
    document: Mapping[str, Any]
    supersedes: int | None
    evidence: Mapping[str, Any]
    actor: str
    reason: str
    idempotency_key: str | None
    created_at: datetime
    deployment: str = DEFAULT_DEPLOYMENT
    sampling: Mapping[str, Any] | None = None

    def told(self) -> dict[str, Any]:
        """What is said of one just made. JSON-ready."""
        return {"version": self.version, "policy": self.policy_id, "deployment": self.deployment}


@dataclass(frozen=True)
class Acknowledgement:
    """What a node did with a publication; ``reason`` is empty when it applied it."""

    version: int
    node: str
    status: AckStatus
    reason: str
    at: datetime


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
            # `expected` in force.
            self.database.lock(session, f"publish {deployment} {pair_id} {device}")
            if guard is not None:
                guard(session)
            if idempotency_key is not None:
                self.database.lock(session, f"key {idempotency_key}")
                if done := _of_key(session, idempotency_key):
                    return done
            require(session, PairRow, pair_id)
            require(session, PolicyRow, policy_id)
            current = _version(session, pair_id, device, deployment)
            if expected is not None and expected != current:
                raise StaleVersionError(
                    f"publication {current} is in force, not {expected} as expected; look at it "
                    "and publish again"
                )
            row = PublicationRow(
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
            session.add(row)
            session.flush()
            return _publication(row, session.get_one(PolicyRow, policy_id))

    def active_version(
        self, pair_id: str, device: str, deployment: str = DEFAULT_DEPLOYMENT
    ) -> int:
        """The version in force, 0 if none: the cheap question a watcher polls."""
        with self.database.read() as session:
            return _version(session, pair_id, device, deployment)

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
        """Publications of a pair, device and deployment (each optional), newest first."""
        query = _publications().where(*_of(pair_id, device, deployment))
        with self.database.read() as session:
            rows = session.execute(query.order_by(PublicationRow.id.desc()).limit(limit))
            return tuple(_publication(*row) for row in rows)

    def in_force(self) -> tuple[Publication, ...]:
        """What is in force in every deployment, for every pair and device, by their names."""
        of = (PublicationRow.deployment, PublicationRow.pair_id, PublicationRow.device)
        newest = select(func.max(PublicationRow.id)).group_by(*of)
        query = _publications().where(PublicationRow.id.in_(newest)).order_by(*of)
        with self.database.read() as session:
            return tuple(_publication(*row) for row in session.execute(query))

    def acknowledge(self, version: int, node: str, status: AckStatus, reason: str = "") -> None:
        """Adds what a node did with a publication. Raises NotFoundError for an unknown one."""
        with self.database.write() as session:
            if not is_stored(session, PublicationRow.id, version):
                raise NotFoundError(f"there is no publication {version}")
            said = {"node": node, "status": status, "reason": reason, "at": self.clock()}
            session.add(AcknowledgementRow(publication_id=version, **said))

    def acknowledgements(self, version: int | None = None) -> tuple[Acknowledgement, ...]:
        """Acknowledgements of a publication, or of all, oldest first."""
        wanted = equal({AcknowledgementRow.publication_id: version})
        query = select(AcknowledgementRow).where(*wanted).order_by(AcknowledgementRow.id)
        with self.database.read() as session:
            rows = session.scalars(query)
            return tuple(value_of(Acknowledgement, row, version=row.publication_id) for row in rows)


def _publications() -> Any:  # Select's parameters differ between SQLAlchemy 2.0 and 2.1
    return select(PublicationRow, PolicyRow).join(
        PolicyRow, PolicyRow.id == PublicationRow.policy_id
    )


def _of(
    pair_id: str | None, device: str | None, deployment: str | None
) -> list[ColumnElement[bool]]:
    row = PublicationRow
    return equal({row.pair_id: pair_id, row.device: device, row.deployment: deployment})


def _of_key(session: Session, key: str) -> Publication | None:
    row = session.execute(_publications().where(PublicationRow.idempotency_key == key)).first()
    return None if row is None else _publication(*row)


def _version(session: Session, pair_id: str, device: str, deployment: str) -> int:
    newest = select(func.max(PublicationRow.id)).where(*_of(pair_id, device, deployment))
    return session.scalar(newest) or 0


def _publication(row: PublicationRow, policy: PolicyRow) -> Publication:
    return value_of(Publication, row, version=row.id, label=policy.label, document=policy.document)
