"""Whole recordings moved between databases, in a file that is itself a small database of the same
schema.

So the file's format is the schema: chunks travel as they are stored, checksums and all, an old file
is upgraded by the same migrations as an old database, and ``--db FILE`` opens one to look around.
Nothing that a file says is believed (:mod:`traces.store.foreign`).
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic.util.exc import CommandError
from sqlalchemy import StaticPool, create_engine, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Session

from spectune.db import CorruptedChunkError, Database, SchemaError, migrate, open_database
from spectune.db.models import (
    PairRow,
    PanoramaChunkRow,
    PolicyRow,
    RecordingRow,
    StepChunkRow,
    TrajectoryRow,
    WorkloadRow,
)
from spectune.traces.errors import TraceError
from spectune.traces.files import why_not_writable
from spectune.traces.store.foreign import (
    check_hashed,
    check_pair,
    check_panorama,
    check_recording,
    check_steps,
    check_trajectory,
)
from spectune.traces.store.rows import insert_absent, resolve_all, values_of
from spectune.traces.text import shortened

_BATCH = 256
_BUSY_S = 60
_PAGES = 4096
"""Pages copied at a time, so that Ctrl-C is heard."""
_STRANGE = """
    SELECT type, name FROM sqlite_master
    WHERE coalesce(rootpage, 0) = 0
       OR NOT (type = 'table' AND sql LIKE 'CREATE TABLE%'
               OR type = 'index' AND (sql IS NULL OR sql LIKE 'CREATE INDEX%'
                                      OR sql LIKE 'CREATE UNIQUE INDEX%'))
    UNION ALL
    SELECT 'computed column', m.name || '.' || x.name FROM sqlite_master AS m,
        pragma_table_xinfo(m.name) AS x
    WHERE m.type = 'table' AND x.hidden <> 0
"""
"""What no file of ours holds: views, triggers, virtual tables, computed columns. Reading them would
run what the file says."""


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

    Raises :class:`TraceError` if the file exists or cannot be written, or a recording is none that
    could be imported, NotFoundError for an unknown recording, CorruptedChunkError for a damaged
    chunk.
    """
    target = Path(path)
    if problem := why_not_writable(target):
        raise TraceError(f"cannot write {shortened(str(target))}: {problem}")
    if target.exists():
        raise TraceError(f"{target} exists already; remove it or name another file")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".spectune-export-") as folder:
            part = Path(folder) / "part.db"
            with open_database(str(part)) as receiver, database.snapshot() as source:
                moved = _move(source, receiver, resolve_all(source, RecordingRow, recordings))
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

    Each recording is looked through before it is one transaction. Raises :class:`TraceError` if the
    file is missing, cannot be read, or a recording is not what its hashes say or differs from the
    one of the same id here, SchemaError if it is no export, CorruptedChunkError if a chunk is
    damaged; nothing of that recording is imported.
    """
    source = Path(path)
    if not os.path.isfile(source):
        raise TraceError(f"there is no file {shortened(str(source))} to import")
    with _opened(source) as session:
        recordings = session.scalars(
            select(RecordingRow.id).order_by(RecordingRow.created_at, RecordingRow.id)
        ).all()
        if not all(isinstance(name, str) for name in recordings):
            raise TraceError(f"cannot import {path}: the id of a recording is no text")
        return _move(session, database, recordings)


@contextmanager
def _opened(path: Path) -> Iterator[Session]:
    """A session on a copy of a file at our schema. Raises TraceError, or SchemaError where the file
    is not ours.

    The copy is SQLite's own temporary database: it has no name, so that nothing of it is left
    whatever ends this process.
    """
    copy = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    engine = create_engine("sqlite://", creator=lambda: copy, poolclass=StaticPool)
    try:
        _copy_into(copy, path)
        _examine(copy, path)
        with engine.connect() as connection:
            found, known = migrate.current(connection), migrate.revisions()
            if found is None:
                raise SchemaError(
                    f"{path} is not a spectune database; import a file that `traces export "
                    "recordings.db` wrote"
                )
            if found not in known:
                raise SchemaError(
                    f"{path} has schema {found}, newer than this program's {known[-1]}; upgrade "
                    "spectune"
                )
            if found != known[-1]:
                migrate.migrate(connection)
        with Session(engine) as session:
            yield session
    except (sqlite3.Error, SQLAlchemyError, CommandError) as error:
        # Whatever a file that is not ours lacks or holds twice.
        cause = shortened(" ".join(str(getattr(error, "orig", None) or error).split()))
        raise TraceError(f"cannot import {path}: {cause}") from None
    finally:
        engine.dispose()
        copy.close()


def _copy_into(copy: sqlite3.Connection, path: Path) -> None:
    """Copies every committed page, also those of a write-ahead log beside the file, and leaves the
    file and its folder as they are.

    Raises TraceError, or sqlite3.Error.
    """
    path = path.resolve()
    log = path.with_name(f"{path.name}-wal")
    before = _stamp(path)
    # Opening a file of WAL mode makes a log beside it. Where there is none nobody uses the file,
    # and it can be read as it lies.
    alone = _says_wal(path) and not log.exists()
    name = f"{path.as_uri()}?{'immutable=1' if alone else 'mode=ro'}"
    with closing(sqlite3.connect(name, uri=True, timeout=_BUSY_S, isolation_level=None)) as source:
        # One snapshot for all of the copy; and whoever holds the file is waited for here, where
        # there is a limit.
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()
        source.backup(copy, pages=_PAGES)
    if alone and (log.exists() or _stamp(path) != before):
        raise TraceError(f"{path} was written to while it was read; import it again")


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _says_wal(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\x02\x02"


def _examine(copy: sqlite3.Connection, path: Path) -> None:
    """Raises TraceError unless a file is whole and holds tables and indexes alone. From here on
    nothing that it says is run."""
    for pragma in ("trusted_schema=OFF", "ignore_check_constraints=ON", "cell_size_check=ON"):
        copy.execute(f"PRAGMA {pragma}")
    strange = copy.execute(_STRANGE).fetchone()
    if strange is not None:
        raise TraceError(
            f"cannot import {path}: it holds a {strange[0]} named {shortened(str(strange[1]))!r}, "
            "which no export does"
        )
    # Pages that belong to two rows would make a small file endless.
    (found,) = copy.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise TraceError(
            f"cannot import {path}: the file is damaged ({shortened(' '.join(found.split()))})"
        )


def _move(source: Session, receiver: Database, recordings: Sequence[str]) -> Transfer:
    added: list[str] = []
    present: list[str] = []
    chunks = 0
    for recording in recordings:
        try:
            policies = _check(source, recording)
        except (TraceError, CorruptedChunkError) as error:
            raise type(error)(
                f"recording {shortened(recording)}, {error}; nothing of it was taken over"
            ) from None
        except (TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
            # A column of JSON that is none, a moment that is none.
            raise TraceError(
                f"recording {shortened(recording)} cannot be read ({error}); nothing of it was "
                "taken over"
            ) from None
        with receiver.write() as sink:
            is_new, copied = _move_one(source, sink, recording, policies)
        (added if is_new else present).append(recording)
        chunks += copied
    return Transfer(tuple(added), tuple(present), chunks)


def _check(source: Session, recording: str) -> frozenset[str]:
    """The policies that a recording's rounds name, once everything of it is known to be sound."""
    row = source.get_one(RecordingRow, recording)
    check_recording(row)
    check_pair(_there(source, PairRow, row.pair_id))
    if row.workload_id is not None:
        check_hashed(_there(source, WorkloadRow, row.workload_id))
    positions: dict[int, int] = {}
    for trajectory in _chunks(source, TrajectoryRow, recording):
        check_trajectory(trajectory)
        positions[trajectory.ordinal] = trajectory.n_output
    used: set[str] = set()
    for panorama in _chunks(source, PanoramaChunkRow, recording):
        check_panorama(panorama, _of(positions, panorama))
    for steps in _chunks(source, StepChunkRow, recording):
        _of(positions, steps)
        check_steps(steps)
        used.update(steps.policies)
    for policy in _named(source, used):
        check_hashed(policy)
    return frozenset(used)


def _there(source: Session, table: type[Any], name: str) -> Any:
    found = source.get(table, name)
    if found is None:
        raise TraceError(f"its {table.__tablename__} {shortened(str(name))!r} is missing")
    return found


def _of(positions: dict[int, int], row: Any) -> int:
    if row.ordinal not in positions:
        raise TraceError(
            f"{row.__tablename__.replace('_', ' ')} {row.ordinal!r} belongs to no request of it"
        )
    return positions[row.ordinal]


def _chunks(source: Session, table: type[Any], recording: str) -> Iterator[Any]:
    """Rows of a recording in order, one in memory at a time."""
    query = (
        select(table)
        .where(table.recording_id == recording)
        .order_by(table.ordinal)
        .execution_options(yield_per=_BATCH)
    )
    for row in source.scalars(query):
        yield row
        source.expunge(row)


def _named(source: Session, policies: Collection[str]) -> Iterable[PolicyRow]:
    return source.scalars(select(PolicyRow).where(PolicyRow.id.in_(policies)))


def _move_one(
    source: Session, sink: Session, recording: str, policies: frozenset[str]
) -> tuple[bool, int]:
    """Whether the recording is new to ``sink``, and how many chunks were."""
    row = source.get_one(RecordingRow, recording)
    there = sink.get(RecordingRow, recording)
    if there is not None and there.spec_sha256 != row.spec_sha256:
        raise TraceError(
            f"a different recording is called {recording} in the database imported into; nothing "
            "of it was imported"
        )
    _copy(sink, source.get_one(PairRow, row.pair_id))
    if row.workload_id is not None:
        _copy(sink, source.get_one(WorkloadRow, row.workload_id))
    _copy(sink, row)
    copied = 0
    for table in (TrajectoryRow, PanoramaChunkRow, StepChunkRow):
        copied += sum(_copy(sink, chunk) for chunk in _chunks(source, table, recording))
    for policy in _named(source, policies):
        _copy(sink, policy)
    return there is None, copied


def _copy(sink: Session, row: DeclarativeBase) -> bool:
    values = values_of(row)
    if isinstance(row, StepChunkRow):
        del values["id"]  # rounds have a number of their own in each database
    return insert_absent(sink, type(row), values)
