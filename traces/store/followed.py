"""What `follow` brings in from the folder of an engine's agent: the requests, and in the same
transaction up to where its files are read, so that a kill loses and doubles nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import delete, func, select, tuple_, update
from sqlalchemy.orm import Session

from spectune.db import NotFoundError
from spectune.traces.recording import Asked
from spectune.traces.schema import Step
from spectune.traces.store.recordings import request_row
from spectune.traces.store.rows import Storage, insert, insert_absent, is_stored
from spectune.traces.tables import (
    FollowedServer,
    Panorama,
    Publication,
    Recording,
    Trajectory,
)

BATCH = 500
"""Requests that one transaction forgets."""


class FilePlace(NamedTuple):
    """Up to where the files of a server are in: the number of a file, and bytes of it."""

    file: int
    bytes: int


@dataclass(frozen=True)
class Arrived:
    """A served request: the digest of what its recording is asked for, and when it ended."""

    recording: str
    trajectory: Trajectory
    steps: Sequence[Step]
    ended_at: datetime


@dataclass(frozen=True)
class Arrivals:
    """What stands in the files of a server between two places; ``recordings`` by digest."""

    requests: Sequence[Arrived] = ()
    recordings: Mapping[str, Asked] = field(default_factory=dict)
    skipped: int = 0


class Followed(Storage):
    """Servers that are followed, and their requests."""

    def followed_server(self, boot: str) -> FollowedServer | None:
        """A boot of a server, or None."""
        with self.database.read() as session:
            return session.get(FollowedServer, boot)

    def follow_server(
        self,
        boot: str,
        pair_id: str,
        engine: Mapping[str, Any],
        *,
        deployment: str,
        node: str,
        place: str,
        models: Mapping[str, Any],
    ) -> FollowedServer:
        """The row of a boot, which is stored where there is none yet."""
        values = {"boot": boot, "pair_id": pair_id, "engine": dict(engine), "file": 0, "bytes": 0}
        values |= {"requests": 0, "skipped": 0, "recordings": {}, "dropped": 0, "fault": ""}
        values |= {"deployment": deployment, "node": node, "place": place, "models": dict(models)}
        with self.database.write() as session:
            insert_absent(session, FollowedServer, {**values, "created_at": self.clock()})
            return session.get_one(FollowedServer, boot)

    def hear(
        self,
        boot: str,
        deployment: str,
        heard_at: datetime | None,
        dropped: int = 0,
        fault: str = "",
        **more: Any,
    ) -> None:
        """Stores when a boot, followed for a deployment, said something last, None of one that has
        ended; and how it is, with ``more`` fields of it (:class:`FollowedServer`)."""
        f = FollowedServer
        more |= {"dropped": dropped, "fault": fault}
        values = {"deployment": deployment, "heard_at": heard_at, "looked_at": self.clock(), **more}
        with self.database.write() as session:
            session.execute(update(f).where(f.boot == boot).values(**values))

    def followed_servers(self) -> tuple[FollowedServer, ...]:
        """The boots of which an agent was heard, by place, the last one at the end."""
        f = FollowedServer
        query = select(f).where(f.heard_at.is_not(None)).order_by(f.place, f.heard_at)
        with self.database.read() as session:
            return tuple(session.scalars(query))

    def server_names(self, boots: Collection[str]) -> dict[str, tuple[str, str]]:
        """Of boots that were followed the place and the node (:class:`FollowedServer`)."""
        f = FollowedServer
        with self.database.read() as session:
            rows = session.execute(select(f.boot, f.place, f.node).where(f.boot.in_(boots)))
            return {boot: (place, node) for boot, place, node in rows}

    def bring_in(
        self, server: FollowedServer, end: FilePlace, arrivals: Arrivals
    ) -> FollowedServer | None:
        """Stores what stands in the files up to ``end``, in one transaction: the row as it is then.
        None, changing nothing, where another process has brought it in meanwhile. Raises
        NotFoundError where the server's row is gone."""
        with self.database.write() as session:
            row = session.get(FollowedServer, server.boot, with_for_update=True)
            if row is None:
                raise NotFoundError(f"nothing is stored of the server {server.boot}")
            if (row.file, row.bytes) != (server.file, server.bytes):
                return None
            names: dict[str, str] = dict(row.recordings)
            for digest, recording in arrivals.recordings.items():
                if not is_stored(session, Recording.id, names.get(digest)):
                    names[digest] = self._begin(session, digest, recording)
            rows = [
                request_row((names[r.recording], number), r.ended_at, r.trajectory, r.steps)
                for number, r in enumerate(arrivals.requests, row.requests)
            ]
            if rows:
                session.execute(insert(session, Trajectory.__table__), rows)
            row.recordings, row.requests = names, row.requests + len(rows)
            row.skipped += arrivals.skipped
            row.file, row.bytes = end
            return row

    def _begin(self, session: Session, digest: str, recording: Asked) -> str:
        columns = {**vars(recording), "options": dict(recording.options), "asked_sha256": digest}
        return self._put_new(session, Recording, "rec", **columns, state="recording")

    def published_policy_id(self, version: int) -> str | None:
        """The id of the policy of a publication, None where there is no such publication."""
        query = select(Publication.policy_id).where(Publication.version == version)
        with self.database.read() as session:
            return session.scalar(query)

    def forget(
        self,
        pair_ids: Collection[str],
        *,
        before: datetime | None = None,
        most_bytes: int | None = None,
    ) -> int:
        """Removes requests of what was followed of these pairs, also from the samples that list
        them, oldest first: those that ended ``before`` a moment, and those beyond ``most_bytes`` of
        texts, rounds and panoramas. Returns how many."""
        with self.database.read() as session:
            names = self._recordings_of(session, pair_ids)
            excess = 0 if most_bytes is None else self._bytes(session, names) - most_bytes
        t, removed = Trajectory, 0
        oldest = (
            select(t.recording_id, t.ordinal, t.created_at, _request_bytes())
            .where(t.recording_id.in_(names))
            .order_by(t.created_at, t.recording_id, t.ordinal)
            .limit(BATCH)
        )
        while names:
            with self.database.write() as session:
                keys = []
                for name, ordinal, ended_at, size in session.execute(oldest):
                    if not (excess > 0 or (before is not None and ended_at < before)):
                        break
                    keys.append((name, ordinal))
                    excess -= size
                if keys:
                    session.execute(delete(t).where(tuple_(t.recording_id, t.ordinal).in_(keys)))
            removed += len(keys)
            if len(keys) < BATCH:
                break
        return removed

    def stored_bytes(self, pair_ids: Collection[str]) -> int:
        """Bytes of texts, rounds and panoramas that :meth:`forget` may remove."""
        with self.database.read() as session:
            return self._bytes(session, self._recordings_of(session, pair_ids))

    def _recordings_of(self, session: Session, pair_ids: Collection[str]) -> list[str]:
        """Of servers that `follow` follows: of `serve` nobody asked to forget."""
        f = FollowedServer
        by_server = session.execute(select(f.engine, f.recordings).where(f.pair_id.in_(pair_ids)))
        read = [names for engine, names in by_server if engine.get("engine") != "native"]
        return sorted({name for names in read for name in names.values()})

    def _bytes(self, session: Session, names: Collection[str]) -> int:
        t, p = Trajectory, Panorama
        texts = func.sum(_length(t.tokens) + _length(t.steps))
        of_texts = session.scalar(select(texts).where(t.recording_id.in_(names)))
        tries = select(func.sum(func.length(p.trie))).where(p.recording_id.in_(names))
        return int(of_texts or 0) + int(session.scalar(tries) or 0)


def _request_bytes() -> Any:
    """Bytes of a request's text, rounds and panoramas."""
    t, p = Trajectory, Panorama
    tries = (
        select(func.coalesce(func.sum(func.length(p.trie)), 0))
        .where(p.recording_id == t.recording_id, p.ordinal == t.ordinal)
        .scalar_subquery()
    )
    return _length(t.tokens) + _length(t.steps) + tries


def _length(blob: Any) -> Any:
    """The bytes of a column, 0 where nothing is stored."""
    return func.coalesce(func.length(blob), 0)
