"""Whole recordings moved between databases, in a file that is itself a small database of the same schema.

So the file's format is the schema: chunks travel as they are stored, checksums and all, an old file is upgraded by the same
migrations as an old database, and ``--db FILE`` opens one to look around.
"""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import inspect, select
from sqlalchemy.orm import DeclarativeBase, Session

from db import CorruptedChunkError, Database, open_database
from db.models import PairRow, PanoramaChunkRow, PolicyRow, RecordingRow, StepChunkRow, TrajectoryRow, WorkloadRow
from traces.errors import TraceError
from traces.rows import insert_absent, resolve

_CHUNKED: tuple[type[Any], ...] = (TrajectoryRow, PanoramaChunkRow, StepChunkRow)
_BATCH = 256


@dataclass(frozen=True)
class Transfer:
    """What was moved: ids of recordings that were new to the receiver, ids that it had in full already, and chunks copied."""

    added: tuple[str, ...]
    present: tuple[str, ...]
    chunks: int


def export_recordings(database: Database, recordings: Sequence[str], path: str | Path) -> Transfer:
    """Writes whole recordings (ids, beginnings of ids, or ``latest``) with their pair, workload and policies to a new file.

    Raises :class:`TraceError` if the file exists, NotFoundError for an unknown recording, CorruptedChunkError for a damaged
    chunk.
    """
    target = Path(path)
    if target.exists():
        raise TraceError(f"{target} exists already; remove it or name another file")
    if not target.parent.is_dir():
        raise TraceError(f"cannot write {target}: there is no folder {target.parent}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        part = Path(folder) / "part.db"
        with open_database(str(part)) as receiver:
            moved = _move(database, receiver, recordings)
        # Out of WAL mode a database is one file.
        connection = sqlite3.connect(part)
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.close()
        part.replace(target)
    return moved


def import_recordings(database: Database, path: str | Path) -> Transfer:
    """Adds every recording of an exported file; what is there already stays as it is, so importing twice changes nothing.

    Each recording is one transaction. Raises :class:`TraceError` if the file is missing or a recording differs from the one
    of the same id here, SchemaError if it is no export, CorruptedChunkError (nothing of that recording imported) if a chunk
    is damaged.
    """
    source = Path(path)
    if not source.is_file():
        raise TraceError(f"there is no file {source} to import")
    # A copy, because opening may upgrade it.
    with tempfile.TemporaryDirectory(prefix="spectune-import-") as folder:
        copy = Path(folder) / source.name
        shutil.copyfile(source, copy)
        with open_database(str(copy), create=False) as sender:
            with sender.read() as session:
                recordings = session.scalars(select(RecordingRow.id).order_by(RecordingRow.created_at, RecordingRow.id)).all()
            return _move(sender, database, recordings)


def _move(sender: Database, receiver: Database, recordings: Sequence[str]) -> Transfer:
    added: list[str] = []
    present: list[str] = []
    chunks = 0
    with sender.read() as source:
        ids = [resolve(source, RecordingRow.id, name, "recording", newest=RecordingRow.created_at) for name in recordings]
        for recording in dict.fromkeys(ids):
            with receiver.write() as sink:
                new, copied = _move_one(source, sink, recording)
            (added if new else present).append(recording)
            chunks += copied
    return Transfer(tuple(added), tuple(present), chunks)


def _move_one(source: Session, sink: Session, recording: str) -> tuple[bool, int]:
    row = source.get_one(RecordingRow, recording)
    there = sink.get(RecordingRow, recording)
    if there is not None and there.spec_sha256 != row.spec_sha256:
        raise TraceError(f"a different recording is called {recording} in the database imported into; nothing of it was imported")
    _copy(sink, PairRow, source.get_one(PairRow, row.pair_id))
    if row.workload_id is not None:
        _copy(sink, WorkloadRow, source.get_one(WorkloadRow, row.workload_id))
    _copy(sink, RecordingRow, row)
    used: set[str] = set()
    copied = 0

    def skip_steps_id(values: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in values.items() if k != "id"}

    for table in _CHUNKED:
        keep: Callable[[dict[str, Any]], dict[str, Any]] = skip_steps_id if table is StepChunkRow else dict
        query = select(table).where(table.recording_id == recording).order_by(table.ordinal).execution_options(yield_per=_BATCH)
        for chunk in source.scalars(query):
            if hashlib.sha256(chunk.data).digest() != chunk.sha256:
                name = table.__tablename__.replace("_", " ")
                raise CorruptedChunkError(
                    f"recording {recording}, request {chunk.ordinal}: its {name} is damaged (checksum differs)"
                )
            if table is StepChunkRow:
                used.update(chunk.policies)
            copied += insert_absent(sink, table, keep(_values(chunk)))
            source.expunge(chunk)
    for policy in source.scalars(select(PolicyRow).where(PolicyRow.id.in_(used))):
        _copy(sink, PolicyRow, policy)
    return there is None, copied


def _values(row: DeclarativeBase) -> dict[str, Any]:
    return {attribute.key: getattr(row, attribute.key) for attribute in inspect(row).mapper.column_attrs}


def _copy(sink: Session, table: type[DeclarativeBase], row: DeclarativeBase) -> None:
    insert_absent(sink, table, _values(row))
