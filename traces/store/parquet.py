"""A recording as a Parquet file, for workers that share a disk and no database (docs/simulator.md).

A row of the file is a row of the database: a text (``draft`` is empty) or a panorama, its chunk as
it is stored, checksum and all. Rows are in the order of the requests, a few requests a row group,
so that a part of a recording is read without the rest. Executed rounds stay behind.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from spectune.traces.blobs import pack_tokens, pack_trie, unpack_tokens, unpack_trie
from spectune.traces.errors import TraceError
from spectune.traces.files import replacing
from spectune.traces.recording import RecordedRequest, Skipped
from spectune.traces.schema import Extent, Sampling
from spectune.traces.store import TraceStore
from spectune.traces.store.export import pyarrow_modules
from spectune.traces.store.recordings import BATCH
from spectune.traces.tables import Panorama, Recording, Trajectory

COLUMNS: Final = ("ordinal", "draft", "data", "rest")
"""``rest`` holds the other columns of a row, as JSON."""
_OF_TEXT = ("request_id", "category", "max_new_tokens", "finish", "verifier", "stop_strings")
_MOMENTS = ("created_at", "finished_at")
_OF_PANORAMA = ("gamma_max", "width", "depth", "shared", "covers")


def write_recording(store: TraceStore, recording: str, path: str | Path) -> int:
    """Writes a recording's texts and panoramas to a Parquet file, whole or not at all; how many
    chunks. Raises TraceError without pyarrow and where the file cannot be written, NotFoundError
    for an unknown recording."""
    pa, pq = pyarrow_modules()
    info = store.get_recording(recording)
    types = zip(COLUMNS, (pa.int64(), pa.string(), pa.binary(), pa.string()), strict=True)
    schema = pa.schema(list(types), metadata={"recording": json.dumps(info.to_json())})
    ordinals, chunks = sorted(store.recorded_ordinals(info.id)), 0
    try:
        with replacing(path) as file, pq.ParquetWriter(file, schema, compression="none") as writer:
            for i in range(0, len(ordinals), BATCH):
                requests = store.iterate(info.id, ordinals=ordinals[i : i + BATCH])
                rows = [row for request in requests for row in _rows(request)]
                writer.write_table(pa.Table.from_pylist(rows, schema))
                chunks += len(rows)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None
    return chunks


def _rows(request: RecordedRequest) -> Iterator[dict[str, Any]]:
    t, n = request.trajectory, request.ordinal
    rest = {name: getattr(t, name) for name in _OF_TEXT} | {"sampling": asdict(t.sampling)}
    yield {"ordinal": n, "draft": "", "data": pack_tokens(t.tokens), "rest": json.dumps(rest)}
    for draft, p in request.panoramas.items():
        rest = {name: getattr(p, name) for name in _OF_PANORAMA}
        yield {"ordinal": n, "draft": draft, "data": pack_trie(p.trie), "rest": json.dumps(rest)}


@dataclass(frozen=True)
class RecordingFile(TraceStore):
    """A store whose only recording is that of a Parquet file; all else is in the database, which
    reading the file does not take.

    Its methods raise TraceError where the file is none of :func:`write_recording`'s.
    """

    path: str = ""

    def get_recording(self, text: str = "") -> Recording:
        return _file(self.path)[0]

    def recorded_ordinals(self, recording: str = "", after: int = -1) -> frozenset[int]:
        with _understood(self.path):
            found = _file(self.path)[1].read(["ordinal", "draft"]).to_pylist()
        texts = {row["ordinal"] for row in found if not row["draft"]}
        return frozenset(ordinal for ordinal in texts if ordinal > after)

    def iterate(
        self,
        recording: str,
        drafts: Collection[str] | None = None,
        *,
        steps: bool = False,
        ordinals: Collection[int] | None = None,
        skipped: list[Skipped] | None = None,
    ) -> Iterator[RecordedRequest]:
        _, file, first, last = _file(self.path)
        chosen = self.recorded_ordinals() if ordinals is None else set(ordinals)
        if not chosen:
            return
        groups = np.flatnonzero((last >= min(chosen)) & (first <= max(chosen)))
        with _understood(self.path):
            rows = file.read_row_groups(groups.tolist()).to_pylist() if len(groups) else []
            for ordinal, of in groupby(rows, key=itemgetter("ordinal")):
                if ordinal in chosen:
                    yield _request(ordinal, [*of], drafts)


def _request(
    ordinal: int, rows: Sequence[dict[str, Any]], drafts: Collection[str] | None
) -> RecordedRequest:
    text, *others = rows
    rest = json.loads(text["rest"])
    rest |= {"sampling": Sampling(**rest["sampling"]), "stop_strings": tuple(rest["stop_strings"])}
    panoramas = {}
    for row in others:
        if drafts is None or row["draft"] in drafts:
            about = json.loads(row["rest"])
            about["covers"] = tuple(about["covers"])
            trie = unpack_trie(row["data"])
            panoramas[row["draft"]] = Panorama(draft=row["draft"], trie=trie, **about)
    return RecordedRequest(
        ordinal, Trajectory(tokens=unpack_tokens(text["data"]), **rest), panoramas
    )


def _file(path: str) -> tuple[Recording, Any, Any, Any]:
    """The recording of a file, the file, and the first and last request of each row group, int64;
    remembered until the file changes."""
    with _understood(path):
        found = Path(path).stat()
    return _opened(path, (found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=4)
def _opened(path: str, stamp: tuple[int, ...]) -> tuple[Recording, Any, Any, Any]:
    _, pq = pyarrow_modules()
    with _understood(path):
        file = pq.ParquetFile(path)
        info = _recording(json.loads((file.schema_arrow.metadata or {})[b"recording"]))
        groups = (
            file.metadata.row_group(n).column(0).statistics for n in range(file.num_row_groups)
        )
        bounds = np.array([(s.min, s.max) for s in groups], dtype=np.int64).reshape(-1, 2)
    return info, file, bounds[:, 0], bounds[:, 1]


def _recording(data: dict[str, Any]) -> Recording:
    moments = {name: data[name] and datetime.fromisoformat(data[name]) for name in _MOMENTS}
    drafts = {draft: Extent(**extent) for draft, extent in data["drafts"].items()}
    values = {**data, **moments, "drafts": drafts, "sampling": Sampling(**data["sampling"])}
    return Recording(**values, asked_sha256="")


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
