"""A recording as a Parquet file, for workers that share a disk and no database (docs/simulator.md).

A row of the file is a row of the database: a text (``draft`` is empty) or a panorama, its chunk as
it is stored, checksum and all. Rows are in the order of the requests, a few requests a row group,
so that a part of a recording is read without the rest. Executed rounds stay behind.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from spectune.db.models import PanoramaChunkRow, TrajectoryRow
from spectune.traces.errors import TraceError
from spectune.traces.files import replacing
from spectune.traces.recording import RecordingInfo
from spectune.traces.store import TraceStore
from spectune.traces.store.export import pyarrow_modules
from spectune.traces.store.recordings import BATCH, Rows
from spectune.traces.store.rows import values_of

COLUMNS: Final = ("ordinal", "draft", "sha256", "data")
"""Columns of the tables that are columns of the file; ``rest`` holds the others, as JSON."""
LEFT: Final = ("recording_id", "created_at")
"""Columns that the file as a whole says."""


def write_recording(store: TraceStore, recording: str, path: str | Path) -> int:
    """Writes a recording's texts and panoramas to a Parquet file, whole or not at all; how many
    chunks. Raises TraceError without pyarrow and where the file cannot be written, NotFoundError
    for an unknown recording."""
    pa, pq = pyarrow_modules()
    info = store.get_recording(recording)
    text, blob, whole = pa.string(), pa.binary(), pa.int64()
    types = zip((*COLUMNS, "rest"), (whole, text, blob, blob, text), strict=True)
    schema = pa.schema(list(types), metadata={"recording": json.dumps(info.to_json())})
    ordinals, chunks = sorted(store.recorded_ordinals(info.id)), 0
    try:
        with replacing(path) as file, pq.ParquetWriter(file, schema, compression="none") as writer:
            for i in range(0, len(ordinals), BATCH):
                found = store.rows_of(info.id, ordinals[i : i + BATCH])
                rows = [_row(r) for r in (*found.texts, *found.panoramas)]
                rows.sort(key=lambda r: (r["ordinal"], r["draft"]))
                writer.write_table(pa.Table.from_pylist(rows, schema))
                chunks += len(rows)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None
    return chunks


def _row(row: Any) -> dict[str, Any]:
    values = {name: value for name, value in values_of(row).items() if name not in LEFT}
    own = {name: values.pop(name, "") for name in COLUMNS}
    return {**own, "rest": json.dumps(values)}


@dataclass(frozen=True)
class RecordingFile(TraceStore):
    """A store whose only recording is that of a Parquet file; all else is in the database, which
    reading the file does not take.

    Its methods raise TraceError where the file is none of :func:`write_recording`'s.
    """

    path: str = ""

    def get_recording(self, text: str = "") -> RecordingInfo:
        return _file(self.path)[0]

    def recorded_ordinals(self, recording: str = "", after: int = -1) -> frozenset[int]:
        with _understood(self.path):
            found = _file(self.path)[1].read(["ordinal", "draft"]).to_pylist()
        texts = {row["ordinal"] for row in found if not row["draft"]}
        return frozenset(ordinal for ordinal in texts if ordinal > after)

    def rows_of(
        self,
        recording: str,
        ordinals: Sequence[int],
        drafts: Collection[str] | None = None,
        *,
        steps: bool = False,
    ) -> Rows:
        info, file, first, last = _file(self.path)
        wanted = set(ordinals)
        groups = np.flatnonzero((last >= min(wanted)) & (first <= max(wanted)))
        rows = Rows([], [], [])
        with _understood(self.path):
            stored = file.read_row_groups(groups.tolist()).to_pylist() if len(groups) else []
            found = [_stored(values, info) for values in stored if values["ordinal"] in wanted]
        for row in found:
            if isinstance(row, TrajectoryRow):
                rows.texts.append(row)
            elif drafts is None or row.draft in drafts:
                rows.panoramas.append(row)
        return rows


def _stored(values: dict[str, Any], info: RecordingInfo) -> TrajectoryRow | PanoramaChunkRow:
    known = {**json.loads(values.pop("rest")), **values, "recording_id": info.id}
    if known["draft"]:
        return PanoramaChunkRow(**known)
    del known["draft"]
    return TrajectoryRow(**known, created_at=info.created_at)


def _file(path: str) -> tuple[RecordingInfo, Any, Any, Any]:
    """The recording of a file, the file, and the first and last request of each row group, int64;
    remembered until the file changes."""
    with _understood(path):
        found = Path(path).stat()
    return _opened(path, (found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=4)
def _opened(path: str, stamp: tuple[int, ...]) -> tuple[RecordingInfo, Any, Any, Any]:
    _, pq = pyarrow_modules()
    with _understood(path):
        file = pq.ParquetFile(path)
        info = RecordingInfo.from_json(json.loads((file.schema_arrow.metadata or {})[b"recording"]))
        groups = (
            file.metadata.row_group(n).column(0).statistics for n in range(file.num_row_groups)
        )
        bounds = np.array([(s.min, s.max) for s in groups], dtype=np.int64).reshape(-1, 2)
    return info, file, bounds[:, 0], bounds[:, 1]


@contextmanager
def _understood(path: str) -> Iterator[None]:
    """Raises TraceError for a file that is missing, damaged, or holds something else. (Arrow's
    errors are ValueErrors and OSErrors.)"""
    try:
        yield
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (TypeError, ValueError, KeyError, AttributeError):
        raise TraceError(
            f"{path}: no recording; `traces export FILE.parquet --whole` writes one"
        ) from None
