"""Everything that has an id, of whatever kind: listed, found by its id alone, and pruned."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from spectune.db import Database, NotFoundError
from spectune.db.schedules import JobRow, ScheduleRow
from spectune.traces.store.prune import older
from spectune.traces.store.rows import beginning_with, newest
from spectune.traces.tables import (
    Artifact,
    LatencyProfile,
    Pair,
    Publication,
    Recording,
    Run,
    StoredPolicy,
    StoredWorkload,
    Study,
)
from spectune.traces.text import shortened

_PROFILED = (LatencyProfile.pair_id, LatencyProfile.device, LatencyProfile.dtype)
_COLUMNS: Final[Mapping[str, tuple[Any, ...]]] = {
    "recordings": (Recording.id, Recording.pair_id, Recording.source, Recording.state),
    "profiles": (LatencyProfile.id, *_PROFILED),
    "artifacts": (Artifact.id, Artifact.kind, Artifact.pair_id),
    "studies": (
        Study.id,
        Study.pair_id,
        Study.recording_id,
        Study.sampler,
        Study.n_trials,
    ),
    "runs": (
        Run.id,
        Run.kind,
        Run.purpose,
        Run.pair_id,
        Run.policy_id,
        Run.device,
    ),
    "policies": (StoredPolicy.id, StoredPolicy.label),
    "pairs": (Pair.id, Pair.name),
    "workloads": (StoredWorkload.id, StoredWorkload.name, StoredWorkload.n_requests),
}
"""What a list shows of each kind, its id first; when it was made follows."""
KINDS: Final = tuple(_COLUMNS)
EVIDENCE: Final = "tuning"
"""The kind of artifact that belongs to a study: what its page draws
(:mod:`optimizer.report.evidence`)."""
PRUNED: Final = ("runs", "studies", "profiles", "artifacts")
"""Kinds that :func:`prune_kinds` removes; recordings are :mod:`traces.store.prune`'s, the others
hardly take room."""


def counts(database: Database) -> dict[str, int]:
    """How many there are of each kind."""
    with database.read() as session:
        return {
            kind: session.scalar(select(func.count()).select_from(_table(kind))) or 0
            for kind in KINDS
        }


def list_kind(
    database: Database, kind: str, *, limit: int | None = None
) -> tuple[dict[str, Any], ...]:
    """Column to value of everything of a kind, newest first, the moment in ISO 8601; nothing is
    unpacked."""
    row = _table(kind)
    query = newest(row, *_COLUMNS[kind], row.created_at).limit(limit)
    with database.read() as session:
        return tuple(
            {**row, "created_at": row["created_at"].isoformat()}
            for row in session.execute(query).mappings()
        )


def find(database: Database, text: str) -> tuple[str, str]:
    """(kind, id) of the one thing whose id ``text`` is, or begins. Raises NotFoundError for none,
    or more than one."""
    near: list[tuple[str, str]] = []
    with database.read() as session:
        for kind in KINDS:
            found = beginning_with(session, _COLUMNS[kind][0], text)
            if found == [text]:
                return kind, text
            near += [(kind, name) for name in found]
    if len(near) == 1:
        return near[0]
    if near:
        names = ", ".join(name for _, name in near[:5])
        raise NotFoundError(f"{shortened(text)} is ambiguous: {names}...")
    raise NotFoundError(
        f"nothing has the id {shortened(text)}; `db list` shows what there is ({', '.join(KINDS)})"
    )


def prune_kinds(
    database: Database,
    kinds: Sequence[str] = PRUNED,
    *,
    before: datetime | None = None,
    keep_last: int | None = None,
    dry_run: bool = False,
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Removes of each kind what was made ``before`` a moment and is not among the newest
    ``keep_last``; (removed, spared) by kind.

    What a tuning's page draws goes with its study, and not before. Spared is what anything that
    stays names: a publication, a schedule or its jobs, a policy, a run, a study, an artifact; and
    of each pair, device and dtype the newest profile, which everything is predicted by.
    """
    with database.read() if dry_run else database.write() as session:
        chosen = {kind: older(session, _table(kind), before, keep_last) for kind in kinds}
        pages = _pages(session)
        doomed = {name for names in chosen.values() for name in names} - pages.keys()
        spared = _named_elsewhere(session, doomed) | _newest_profiles(session)
        gone = doomed - spared
        removed = {kind: [n for n in names if n in gone] for kind, names in chosen.items()}
        if of_gone := [page for page, study in pages.items() if study in gone]:
            removed["artifacts"] = [*removed.get("artifacts", ()), *of_gone]
        if not dry_run:
            for kind, names in removed.items():
                session.execute(delete(_table(kind)).where(_COLUMNS[kind][0].in_(names)))
    return removed, {
        kind: [n for n in chosen.get(kind, ()) if n not in names] for kind, names in removed.items()
    }


def _table(kind: str) -> Any:
    return _COLUMNS[kind][0].class_


def _newest_profiles(session: Session) -> set[str]:
    found: dict[tuple[Any, ...], str] = {}
    for name, *of in session.execute(newest(LatencyProfile, *_COLUMNS["profiles"])):
        found.setdefault(tuple(of), name)
    return set(found.values())


def _pages(session: Session) -> dict[str, str]:
    """The study, while it is stored, of each artifact that a tuning's page draws."""
    studies = set(session.scalars(select(Study.id)))
    drawn = select(Artifact.id, Artifact.provenance).where(Artifact.kind == EVIDENCE)
    return {
        name: study
        for name, origin in session.execute(drawn)
        if (study := origin.get("study")) in studies
    }


def _named_elsewhere(session: Session, doomed: set[str]) -> set[str]:
    """Those that a row names which stays, also because another one names it. Artifacts may be named
    by the beginning of an id, or as the latest."""
    told: list[Any] = [
        select(Publication.policy_id, Publication.evidence),
        select(ScheduleRow.payload),
        select(JobRow.result),
        select(StoredPolicy.document),
        select(Recording.options),
    ]
    owned: list[Any] = [
        select(Artifact.id, Artifact.provenance).where(Artifact.kind != EVIDENCE),
        select(Run.id, Run.options),
        select(Study.id, Study.document),
    ]
    owners = {name: _as_text(said) for query in owned for name, *said in session.execute(query)}
    stay = [_as_text(row) for query in told for row in session.execute(query)]
    stay += [said for name, said in owners.items() if name not in doomed]
    latest = session.scalar(newest(Artifact, Artifact.id).limit(1))
    spared: set[str] = set()
    while stay:
        words = {word for text in stay for word in _WORD.findall(text)}
        begun = {name for text in stay for name in _ARTIFACT.findall(text)}
        begins = tuple(filter(None, (latest if name == "latest" else name for name in begun)))
        found = {name for name in doomed - spared if name in words or name.startswith(begins)}
        spared |= found
        stay = [owners[name] for name in found if name in owners]
    return spared


_WORD: Final = re.compile(r"[\w-]+")
_ARTIFACT: Final = re.compile(r'"artifact": "([^"]*)"')


def _as_text(values: Sequence[Any]) -> str:
    return json.dumps(list(values), default=str, ensure_ascii=False)
