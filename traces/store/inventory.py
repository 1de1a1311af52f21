"""Everything that has an id, of whatever kind: listed, found by its id alone, and pruned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import JSON, LargeBinary, column, delete, func, literal, select, table
from sqlalchemy.orm import Session

from spectune.db import NotFoundError
from spectune.traces import tables
from spectune.traces.blobs import Blob, JsonOf
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore
from spectune.traces.text import shortened


def as_stored(of: type[tables.Value]) -> Any:
    """A table whose values come as they are stored: JSON as JSON, blobs as bytes."""
    kinds = {c.name: c.type for c in of.__table__.c}
    raw = {n: kind.impl if isinstance(kind, (Blob, JsonOf)) else kind for n, kind in kinds.items()}
    return table(of.__tablename__, *(column(name, kind) for name, kind in raw.items()))


KINDS: Final = {
    "recordings": as_stored(tables.Recording),
    "profiles": as_stored(tables.LatencyProfile),
    "artifacts": as_stored(tables.Artifact),
    "studies": as_stored(tables.Study),
    "runs": as_stored(tables.Run),
    "policies": as_stored(tables.StoredPolicy),
    "pairs": as_stored(tables.Pair),
    "workloads": as_stored(tables.StoredWorkload),
}
PRUNED: Final = ("recordings", "profiles", "artifacts", "studies", "runs")
"""Kinds that :func:`prune` removes; the others hardly take room."""
STILL_WRITTEN: Final = timedelta(days=1)
"""An unfinished recording whose last text is younger is not pruned by age."""


def counts(store: TraceStore) -> dict[str, int]:
    """How many there are of each kind."""
    with store.database.read() as session:
        number = {kind: select(func.count()).select_from(of) for kind, of in KINDS.items()}
        return {kind: session.scalar(query) or 0 for kind, query in number.items()}


def list_kind(store: TraceStore, kind: str, *, limit: int | None = None) -> list[dict[str, Any]]:
    """The plain columns of everything of a kind, newest first."""
    of = KINDS[kind]
    columns = [c for c in of.c if not isinstance(c.type, (JSON, LargeBinary))]
    query = select(*columns).order_by(of.c.created_at.desc(), of.c.id).limit(limit)
    with store.database.read() as session:
        return [dict(row) for row in session.execute(query).mappings()]


def show(store: TraceStore, text: str) -> tuple[str, dict[str, Any]]:
    """The kind and the columns, but for blobs, of the one thing whose id ``text`` is, or begins.
    Raises NotFoundError for none, or more than one."""
    found: list[tuple[str, Any]] = []
    with store.database.read() as session:
        for kind, of in KINDS.items():
            columns = [c for c in of.c if not isinstance(c.type, LargeBinary)]
            begun = of.c.id.startswith(text, autoescape=True)
            rows = session.execute(
                select(*columns).where(begun).order_by(of.c.id).limit(5)
            ).mappings()
            found += [(kind, dict(row)) for row in rows]
    exact = [(kind, row) for kind, row in found if row["id"] == text]
    if len(found) == 1 or exact:
        return (exact or found)[0]
    if found:
        names = ", ".join(row["id"] for _, row in found[:5])
        raise NotFoundError(f"{shortened(text)} is ambiguous: {names}...")
    raise NotFoundError(
        f"nothing has the id {shortened(text)}; `db show` shows what there is ({', '.join(KINDS)})"
    )


def prune(
    store: TraceStore,
    kinds: Sequence[str] = PRUNED,
    *,
    named: Sequence[str] = (),
    before: datetime | None = None,
    keep_last: int | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> dict[str, dict[str, list[str]]]:
    """Removes of each kind what is ``named`` by its id, or else what was made ``before`` a moment
    and is not among the newest ``keep_last``, with all that belongs to it: by kind, the ids
    ``removed`` and ``spared``.

    Spared unless ``force`` is what the evidence or the policy of a publication names, of a sample
    also the recordings that it was taken of, and the newest profile of each pair, device and dtype.
    The age of a recording is that of its last text; an unfinished one is :data:`STILL_WRITTEN` for
    a day. Raises TraceError where nothing says what to remove, or a name and a rule do, or what is
    named is spared.
    """
    if bool(named) == (before is not None or keep_last is not None):
        raise TraceError(
            "say what to prune: either --id ID, or --older-than AGE, --keep-last N or both"
        )
    report: dict[str, dict[str, list[str]]] = {}
    with store.database.read() if dry_run else store.database.write() as session:
        if not dry_run:
            # Whoever writes to a recording is waited for: what he writes may be why it stays.
            session.execute(select(KINDS["recordings"].c.id).with_for_update()).all()
        needed = set() if force else {*_published(session), *_newest_profiles(session)}
        s = tables.SampledRequest
        sampled = session.execute(select(s.sample_id, s.recording_id).distinct())
        needed |= {recording for sample, recording in sampled if sample in needed}
        for kind in kinds:
            if named:
                of_kind = select(KINDS[kind].c.id).where(KINDS[kind].c.id.in_(named))
                chosen = list(session.scalars(of_kind))
            else:
                rest = list(_ages(session, kind, store.clock()))[keep_last or 0 :]
                chosen = [i for i, moment in rest if before is None or moment < before]
            # Policies may name an artifact by the beginning of its id.
            begun = tuple(needed) if kind == "artifacts" else ()
            spared = [i for i in chosen if i in needed or i.startswith(begun)]
            if named and spared:
                raise TraceError(
                    f"{spared[0]} is what a publication rests on; --force removes it all the same"
                )
            removed = [i for i in chosen if i not in spared]
            report[kind] = {"removed": removed, "spared": spared}
            if not dry_run:
                session.execute(delete(KINDS[kind]).where(KINDS[kind].c.id.in_(removed)))
    return report


def _ages(session: Session, kind: str, now: datetime) -> Iterator[tuple[str, datetime]]:
    """The id and the moment of everything of a kind, newest first, but for recordings that are
    :data:`STILL_WRITTEN`."""
    of, t = KINDS[kind], tables.Trajectory
    last = select(func.max(t.created_at)).where(t.recording_id == of.c.id).scalar_subquery()
    is_recording = kind == "recordings"
    moment = func.coalesce(last, of.c.created_at) if is_recording else of.c.created_at
    state = of.c.state if is_recording else literal("")
    query = select(of.c.id, moment, state).order_by(moment.desc(), of.c.id)
    for name, made, how in session.execute(query):
        if how != "recording" or made <= now - STILL_WRITTEN:
            yield name, made


def _newest_profiles(session: Session) -> set[str]:
    p, newest = tables.LatencyProfile, dict[Any, str]()
    for name, *place in session.execute(
        select(p.id, p.pair_id, p.device, p.dtype).order_by(p.created_at)
    ):
        newest[tuple(place)] = name
    return set(newest.values())


def _published(session: Session) -> Iterator[str]:
    """Every text in the evidence and the policies of publications, ids among them."""
    b, y = tables.Publication, tables.StoredPolicy
    inside = [
        *session.scalars(select(b.evidence)),
        *session.scalars(select(y.document).where(y.id.in_(select(b.policy_id)))),
    ]
    while inside:
        value = inside.pop()
        if isinstance(value, str) and len(value) > 3:
            yield value
        elif isinstance(value, dict):
            inside += value.values()
        elif isinstance(value, list):
            inside += value
