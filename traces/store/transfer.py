"""Whole recordings moved between databases, in a file that is itself a small database of the same
schema.

So the file's format is the schema: chunks travel as they are stored, checksums and all, and
``--db FILE`` opens one to look around. What it holds is trusted like a checkpoint.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import inspect, select
from sqlalchemy.orm import Session, undefer

from spectune.db import CorruptedChunkError, Database, open_database, open_file
from spectune.db.failures import translated
from spectune.traces.blobs import Damaged
from spectune.traces.errors import TraceError
from spectune.traces.files import why_not_writable
from spectune.traces.store.rows import insert_absent, resolve_all
from spectune.traces.tables import (
    Pair,
    Panorama,
    Recording,
    StoredPolicy,
    StoredWorkload,
    Trajectory,
)
from spectune.traces.text import shortened

_BATCH = 256


@dataclass(frozen=True)
class Transfer:
    """What was moved: ids of recordings that were new to the receiver, ids that it had in full
    already, and chunks copied."""

    added: tuple[str, ...]
    present: tuple[str, ...]
    chunks: int


def export_recordings(database: Database, recordings: Sequence[str], path: str | Path) -> Transfer:
    """Writes whole recordings (ids, beginnings of ids, or ``latest``) with their pair, workload and
    policies to a new file.

    Raises :class:`TraceError` if the file exists or cannot be written, NotFoundError for an unknown
    recording, CorruptedChunkError for a damaged chunk.
    """
    target = Path(path)
    if problem := why_not_writable(target):
        raise TraceError(f"cannot write {shortened(str(target))}: {problem}")
    if target.exists():
        raise TraceError(f"{target} exists already; remove it or name another file")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".spectune-export-") as folder:
            part = Path(folder) / "part.db"
            with open_database(str(part)) as receiver, database.snapshot() as session:
                names = resolve_all(session, Recording, recordings)
                moved = _move(database, session, receiver, names)
            # Out of WAL mode a database is one file.
            with closing(sqlite3.connect(part)) as connection:
                connection.execute("PRAGMA journal_mode=DELETE")
            part.replace(target)
    except OSError as error:
        raise TraceError(f"cannot write {target}: {error.strerror}") from None
    return moved


def import_recordings(database: Database, path: str | Path) -> Transfer:
    """Adds every recording of an exported file, or of a database that is in use; what is here
    already stays as it is, so importing twice changes nothing.

    Each recording is one transaction. Raises :class:`TraceError` if the file is missing or a
    recording differs from the one of the same id here, SchemaError if it is no export or another
    version's, CorruptedChunkError if a chunk is damaged, and DatabaseError if the file is; nothing
    of that recording is imported.
    """
    source = Path(path)
    if not os.path.isfile(source):  # Path.is_file raises for names that are too long
        raise TraceError(f"there is no file {shortened(str(source))} to import")
    with open_file(source) as opened, opened.snapshot() as session:
        query = select(Recording.id).order_by(Recording.created_at, Recording.id)
        return _move(opened, session, database, session.scalars(query).all())


def _move(
    source: Database, session: Session, receiver: Database, recordings: Sequence[str]
) -> Transfer:
    added: list[str] = []
    present: list[str] = []
    chunks = 0
    for recording in recordings:
        is_new = False
        with receiver.write() as sink:
            for row in _rows(source, session, recording):
                if isinstance(row, Recording):
                    _check_same(sink, row)
                is_added = _copy(sink, row)
                if isinstance(row, Recording):
                    is_new = is_added
                elif isinstance(row, Trajectory | Panorama):
                    chunks += is_added
        (added if is_new else present).append(recording)
    return Transfer(tuple(added), tuple(present), chunks)


def _check_same(sink: Session, row: Recording) -> None:
    there = sink.get(Recording, row.id)
    if there is not None and there.asked_sha256 != row.asked_sha256:
        raise TraceError(
            f"a different recording is called {row.id} in the database imported into; nothing of "
            "it was imported"
        )


def _rows(source: Database, session: Session, recording: str) -> Iterator[Any]:
    """All rows that belong to a recording, those that others refer to first, a batch of chunks in
    memory at a time. Raises DatabaseError of the source, TraceError, CorruptedChunkError."""
    with translated(source.url):
        row = session.get_one(Recording, recording)
        yield _required(session, Pair, row.pair_id, recording)
        if row.workload_id is not None:
            yield _required(session, StoredWorkload, row.workload_id, recording)
        yield row
        policies: set[str] = set()
        for table in (Trajectory, Panorama):
            for chunk in _chunks(session, table, recording):
                yield chunk
                if isinstance(chunk, Trajectory):
                    policies.update(chunk.by_policy)
        yield from session.scalars(select(StoredPolicy).where(StoredPolicy.id.in_(policies)))


def _required(session: Session, table: type[Any], name: str, recording: str) -> Any:
    row = session.get(table, name)
    if row is None:
        raise TraceError(f"recording {recording}: its {table.__tablename__} {name!r} is missing")
    return row


def _chunks(session: Session, table: type[Any], recording: str) -> Iterator[Any]:
    query = (
        select(table)
        .where(table.recording_id == recording)
        .order_by(table.ordinal)
        .execution_options(yield_per=_BATCH)
    )
    if table is Trajectory:
        query = query.options(undefer(Trajectory.steps))
    for row in session.scalars(query):
        if any(isinstance(value, Damaged) for value in vars(row).values()):
            what = row.__tablename__
            raise CorruptedChunkError(
                f"recording {recording}, request {row.ordinal}: its {what} is damaged; "
                "nothing of the recording was taken over"
            )
        yield row
        session.expunge(row)


def _copy(sink: Session, row: Any) -> bool:
    names = [column.key for column in inspect(type(row)).column_attrs]
    return insert_absent(sink, type(row), {name: getattr(row, name) for name in names})
