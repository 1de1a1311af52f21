"""Questions about recordings: which there are, what their requests were like, how far drafts
survived.

These are the public calls behind ``cli.py traces list|show|stats|query|export``. All but what is
said of executed rounds is answered from summary columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.orm import Session, undefer

from spectune.db import CorruptedChunkError, Database
from spectune.traces.acceptance import FirstPosition, Survival, step_survival
from spectune.traces.blobs import Damaged
from spectune.traces.store.recordings import counted
from spectune.traces.store.rows import equal, newest, resolve_all
from spectune.traces.tables import Panorama, Recording, Trajectory

GroupBy = Literal["draft", "category", "recording"]
GROUPS: tuple[GroupBy, ...] = ("draft", "category", "recording")


@dataclass(frozen=True)
class TraceFilter:
    """Which requests are meant; every field narrows, absent ones do not.

    ``recordings`` are ids or beginnings of ids or ``latest``; ``pair`` an id or the beginning of
    one; ``since`` (inclusive) and ``until`` (exclusive) bound the moment a request was recorded.
    ``min_acceptance`` and ``max_acceptance`` (inclusive) bound the acceptance of the request's
    drafts, or of ``draft`` if it is given.
    """

    recordings: tuple[str, ...] = ()
    pair: str | None = None
    categories: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    draft: str | None = None
    min_acceptance: float | None = None
    max_acceptance: float | None = None
    source: str | None = None


EVERYTHING = TraceFilter()


@dataclass(frozen=True)
class RequestRow:
    """One request and draft (or one request, ``draft`` None, if it has no panorama).

    ``acceptance``: mean chance that a proposal of the draft is kept, over the positions of the
    text; ``tau``: mean accepted length of drafting up to gamma_max from every start. ``rounds`` to
    ``seconds`` are of the rounds it was decoded by, 0 if none were stored.
    """

    recording: str
    ordinal: int
    request_id: str
    category: str
    recorded_at: datetime
    finish: str
    n_prompt: int
    n_output: int
    draft: str | None
    gamma_max: int | None
    acceptance: float | None
    tau: float | None
    rounds: int
    drafted: int
    accepted: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Column to value, the moment in ISO 8601."""
        return {**asdict(self), "recorded_at": self.recorded_at.isoformat()}

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


@dataclass(frozen=True)
class AcceptanceStats:
    """Acceptance of one group: over every start of its panoramas, or over executed rounds."""

    group: tuple[tuple[str, str], ...]
    requests: int
    acceptance: float
    survival: Survival

    def to_json(self) -> dict[str, Any]:
        """The group's columns, then the figures; ``marginal``, ``conditional`` and ``histogram``
        are lists over positions."""
        return {
            **dict(self.group),
            "requests": self.requests,
            "acceptance": self.acceptance,
            **self.survival.to_json(),
        }


def list_recordings(database: Database, only: TraceFilter = EVERYTHING) -> tuple[Recording, ...]:
    """Recordings that hold a matching request (or, without request conditions, match themselves),
    newest first."""
    with database.read() as session:
        query = newest(Recording).where(*_recording_conditions(session, only))
        narrowed = _request_conditions(only)
        if narrowed:
            matching = select(Trajectory).where(Trajectory.recording_id == Recording.id)
            query = query.where(matching.where(*narrowed).exists())
        return counted(session, session.scalars(query).all())


def request_rows(database: Database, only: TraceFilter = EVERYTHING) -> Iterator[RequestRow]:
    """The matching requests, one row per draft, by recording, ordinal and draft; lazily, within one
    read transaction."""
    t, p, narrowed = Trajectory, Panorama, _panorama_conditions(only)
    with database.read() as session:
        query = (
            select(
                t.recording_id,
                t.ordinal,
                t.request_id,
                t.category,
                t.created_at,
                t.finish,
                t.n_prompt,
                t.n_output,
                p.draft,
                p.gamma_max,
                p.acceptance,
                t.rounds,
                t.drafted,
                t.accepted,
                t.seconds,
                p.n,
                p.survived,
            )
            .join(Recording, Recording.id == t.recording_id)
            .join(p, and_(_of_request(), *narrowed), isouter=not narrowed)
            .where(*_recording_conditions(session, only), *_request_conditions(only))
            .order_by(t.recording_id, t.ordinal, p.draft)
        )
        for *of_request, rounds, drafted, accepted, seconds, starts, survived in session.execute(
            query.execution_options(yield_per=500)
        ):
            sums = None if starts is None else Survival(starts, (), tuple(survived))
            tau = None if sums is None else sums.mean_accepted_length
            values: list[Any] = [*of_request, tau, rounds, drafted, accepted, seconds]
            yield RequestRow(*values)


def acceptance_stats(
    database: Database, only: TraceFilter = EVERYTHING, by: Sequence[GroupBy] = ("draft",)
) -> tuple[AcceptanceStats, ...]:
    """Acceptance by position, from every start of the panoramas of the matching requests, grouped
    and sorted by ``by``.

    Without ``draft`` in ``by`` drafts are pooled. Mean accepted length = 1 + sum of the marginals,
    exactly.
    """
    t, p = Trajectory, Panorama
    of: dict[GroupBy, Any] = {"draft": p.draft, "category": t.category, "recording": t.recording_id}
    with database.read() as session:
        query = (
            select(
                *(of[g] for g in by),
                t.recording_id,
                t.ordinal,
                p.acceptance * p.n,
                p.n,
                p.at_risk,
                p.survived,
            )
            .join(t, _of_request())
            .join(Recording, Recording.id == t.recording_id)
            .where(*_recording_conditions(session, only), *_request_conditions(only))
            .where(*_panorama_conditions(only))
        )
        found = (
            (tuple(key), (recording, ordinal), kept, n, Survival(n, tuple(risk), tuple(survived)))
            for *key, recording, ordinal, kept, n, risk, survived in session.execute(query)
        )
        return _grouped(by, found)


def first_positions(database: Database, recording: str) -> dict[str, FirstPosition]:
    """By draft, how often its first token is accepted, over every start of the panoramas of a
    recording."""
    p = Panorama
    query = (
        select(p.draft, func.sum(p.acceptance * p.n), func.sum(p.n))
        .where(p.recording_id == recording)
        .group_by(p.draft)
        .order_by(p.draft)
    )
    with database.read() as session:
        rows = session.execute(query).all()
    return {draft: FirstPosition(float(kept) / n, int(n)) for draft, kept, n in rows if n}


def executed_stats(
    database: Database, only: TraceFilter = EVERYTHING, by: Sequence[GroupBy] = ()
) -> tuple[AcceptanceStats, ...]:
    """The same from the rounds that the matching requests were really decoded by, which are read:
    ``draft`` is that of each round, and a position's marginal is of the rounds that drafted as far.

    ``acceptance`` is accepted over drafted tokens. Raises CorruptedChunkError for damaged rounds.
    """
    t = Trajectory
    query = select(t).join(Recording, Recording.id == t.recording_id).where(t.steps.is_not(None))

    def rows(session: Session) -> Iterator[_Row]:
        conditions = (*_recording_conditions(session, only), *_request_conditions(only))
        chosen = query.where(*conditions).options(undefer(t.steps))
        for text in session.scalars(chosen.execution_options(yield_per=500)):
            steps = text.steps
            if steps is None or isinstance(steps, Damaged):
                raise CorruptedChunkError(
                    f"the rounds of request {text.ordinal} of recording {text.recording_id} cannot "
                    "be used; the others still can"
                )
            of = {"category": text.category, "recording": text.recording_id}
            for draft in sorted({r.draft for r in steps}) if "draft" in by else [None]:
                own = [r for r in steps if draft in (None, r.draft)]
                key = tuple(str(draft) if g == "draft" else of[g] for g in by)
                kept, drafted = sum(r.accepted for r in own), sum(r.drafted for r in own)
                yield key, (text.recording_id, text.ordinal), kept, drafted, step_survival(own)

    with database.read() as session:
        return _grouped(by, rows(session))


_Row = tuple[tuple[str, ...], tuple[str, int], float, float, Survival]
"""Of a request or a part of it its group, whose it is (recording, ordinal), tokens kept, out of how
many, and its sums by position."""


def _grouped(by: Sequence[GroupBy], rows: Iterable[_Row]) -> tuple[AcceptanceStats, ...]:
    """Rows pooled by group."""
    sums: defaultdict[tuple[str, ...], Survival] = defaultdict(Survival)
    shares: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    requests: defaultdict[tuple[str, ...], set[tuple[str, int]]] = defaultdict(set)
    for key, request, kept, of, survival in rows:
        sums[key] += survival
        shares[key][0] += kept
        shares[key][1] += of
        requests[key].add(request)
    return tuple(
        AcceptanceStats(
            tuple(zip(by, key, strict=True)),
            len(requests[key]),
            shares[key][0] / shares[key][1] if shares[key][1] else 0.0,
            sums[key],
        )
        for key in sorted(sums)
    )


def _recording_conditions(session: Session, only: TraceFilter) -> list[ColumnElement[bool]]:
    conditions = equal({Recording.source: only.source})
    if only.recordings:
        conditions.append(Recording.id.in_(resolve_all(session, Recording, only.recordings)))
    if only.pair is not None:
        conditions.append(Recording.pair_id.startswith(only.pair, autoescape=True))
    return conditions


def _request_conditions(only: TraceFilter) -> list[ColumnElement[bool]]:
    t = Trajectory
    conditions: list[ColumnElement[bool]] = []
    if only.categories:
        conditions.append(t.category.in_(only.categories))
    if only.since is not None:
        conditions.append(t.created_at >= only.since)
    if only.until is not None:
        conditions.append(t.created_at < only.until)
    if narrowed := _panorama_conditions(only):
        panorama = select(Panorama.ordinal).where(_of_request(), *narrowed)
        conditions.append(panorama.exists().correlate(t))
    return conditions


def _of_request() -> ColumnElement[bool]:
    t, p = Trajectory, Panorama
    return and_(p.recording_id == t.recording_id, p.ordinal == t.ordinal)


def _panorama_conditions(only: TraceFilter) -> list[ColumnElement[bool]]:
    p = Panorama
    conditions = equal({p.draft: only.draft})
    if only.min_acceptance is not None:
        conditions.append(p.acceptance >= only.min_acceptance)
    if only.max_acceptance is not None:
        conditions.append(p.acceptance <= only.max_acceptance)
    return conditions
