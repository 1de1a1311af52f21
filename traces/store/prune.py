"""Removing old recordings, but none that something published rests on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import LargeBinary, delete, func, select, type_coerce
from sqlalchemy.orm import Session

from spectune.db import Database
from spectune.db.schedules import JobRow
from spectune.traces.errors import TraceError
from spectune.traces.store.rows import newest, resolve_all
from spectune.traces.tables import Panorama, Publication, Recording, Trajectory

STILL_WRITTEN = timedelta(days=1)
"""An unfinished recording whose last text is younger counts as being written: panoramas, which come
after the texts, have no moment."""


@dataclass(frozen=True)
class Pruned:
    """One recording that was (or would be) removed, and how much it held."""

    recording: str
    created_at: datetime
    requests: int
    size_bytes: int


@dataclass(frozen=True)
class PruneReport:
    """What was removed, or would be with ``dry_run``; ``kept`` are ids spared because a
    publication's evidence refers to them."""

    removed: tuple[Pruned, ...]
    kept: tuple[str, ...]
    dry_run: bool

    @property
    def size_bytes(self) -> int:
        return sum(p.size_bytes for p in self.removed)

    def to_json(self) -> dict[str, Any]:
        removed = [{**asdict(p), "created_at": p.created_at.isoformat()} for p in self.removed]
        return {
            "removed": removed,
            "kept": list(self.kept),
            "size_bytes": self.size_bytes,
            "dry_run": self.dry_run,
        }


def prune(
    database: Database,
    *,
    recordings: Sequence[str] = (),
    before: datetime | None = None,
    keep_last: int | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> PruneReport:
    """Removes recordings with all they hold.

    Chosen are those named in ``recordings`` (ids, beginnings, ``latest``) or else those made
    ``before`` a moment and not among the newest ``keep_last``. Of unfinished ones only ``before``
    chooses, by their last text, and only those that nobody writes to any more
    (:func:`_abandoned`). One that a publication's evidence names is spared unless ``force``; naming
    it raises :class:`TraceError`. Raises TraceError when nothing says what to remove.
    """
    if not recordings and before is None and keep_last is None:
        raise TraceError(
            "say what to prune: recordings by id, an age (before), or how many to keep (keep_last)"
        )
    with database.read() if dry_run else database.write() as session:
        abandoned = None if before is None else min(before, database.now(session) - STILL_WRITTEN)

        def by_rule() -> list[str]:
            old = older(session, Recording, before, keep_last, Recording.state != "recording")
            return old if abandoned is None else old + _abandoned(session, abandoned)

        chosen = resolve_all(session, Recording, recordings) if recordings else by_rule()
        if not dry_run:
            locked = _locked(session, chosen)
            # Whoever wrote to one of them was waited for: what he wrote may be why it stays.
            chosen = [r for r in (chosen if recordings else by_rule()) if r in locked]
        cited = set() if force else _cited(session, chosen)
        if recordings and cited:
            name = sorted(cited)[0]
            raise TraceError(
                f"recording {name} is evidence of a publication; use --force to remove it all "
                "the same"
            )
        doomed = [r for r in chosen if r not in cited]
        report = PruneReport(
            tuple(_measure(session, r) for r in doomed),
            tuple(r for r in chosen if r in cited),
            dry_run,
        )
        if not dry_run:
            session.execute(delete(Recording).where(Recording.id.in_(doomed)))
    return report


def _cited(session: Session, candidates: Iterable[str]) -> set[str]:
    """Those of the candidates that the evidence of any publication names."""
    evidence = "\n".join(map(json.dumps, session.scalars(select(Publication.evidence))))
    return {name for name in candidates if name in evidence}


def _locked(session: Session, recordings: Sequence[str]) -> frozenset[str]:
    """Those that are still there, locked. First of all: who appends holds this row, and would wait
    for others that are removed before."""
    query = (
        select(Recording.id)
        .where(Recording.id.in_(recordings))
        .order_by(Recording.id)
        .with_for_update()
    )
    return frozenset(session.scalars(query))


def older(
    session: Session, row: type[Any], before: datetime | None, keep_last: int | None, *only: Any
) -> list[str]:
    """Ids of the rows that ``only`` holds of, made ``before`` a moment and not among the newest
    ``keep_last`` of them."""
    rows = session.execute(newest(row, row.id, row.created_at).where(*only)).all()
    return [name for name, made in rows[keep_last or 0 :] if before is None or made < before]


def _abandoned(session: Session, before: datetime) -> list[str]:
    """Unfinished recordings whose last text (or beginning, without any) is from ``before`` a
    moment, but for those of a job that is not finished, which its next attempt resumes, and served
    ones: a server that is asked nothing for long is silent, not gone."""
    jobs = select(JobRow.idempotency_key).where(JobRow.state.in_(("queued", "running")))
    unfinished = set(session.scalars(jobs))
    last = (
        select(func.max(Trajectory.created_at))
        .where(Trajectory.recording_id == Recording.id)
        .scalar_subquery()
    )
    begun = newest(Recording).where(
        Recording.state == "recording",
        Recording.source != "serve",
        func.coalesce(last, Recording.created_at) < before,
    )
    return [
        row.id
        for row in session.scalars(begun)
        if unfinished.isdisjoint(row.options.get(name) for name in ("slot", "gathered"))
    ]


def _measure(session: Session, recording: str) -> Pruned:
    def total(what: Any, row: Any) -> int:
        return int(session.scalar(select(what).where(row.recording_id == recording)) or 0)

    return Pruned(
        recording,
        session.get_one(Recording, recording).created_at,
        requests=total(func.count(Trajectory.ordinal), Trajectory),
        size_bytes=sum(
            total(func.sum(func.length(type_coerce(column, LargeBinary))), row)
            for row, column in (
                (Trajectory, Trajectory.tokens),
                (Trajectory, Trajectory.steps),
                (Panorama, Panorama.trie),
            )
        ),
    )
