"""Columns of numbers to checksummed bytes and back.

A chunk is one zstd frame around a header and the columns. The header is a line of JSON (``meta``,
then name, dtype and shape of every column), so that a chunk says by itself what it holds. Each
column follows transposed (last axis first, so that like meets like: entry j of every branch) and as
*byte planes* (all lowest bytes, then all second bytes, ...), because the high bytes of
log-probabilities are nearly constant and the low ones nearly random, and an entropy coder gains
from meeting them apart. ``docs/log.md`` holds the layouts that were measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from spectune.traces.errors import TraceError

SCHEMA_VERSION = 1
CODEC = "zstd-planes"
LEVEL = 9
_HEADERS = zstandard.ZstdCompressionDict(
    b'"planes":[{"kind":"document","document":[]},[]]'
    b'[{"kind":"steps","drafts":["ngram"],"policies":[""]},[["start","<i4",[32]],["drafted","<i4",[32]],["verified","<i4",[32]],'
    b'["accepted","<i4",[32]],["emitted","<i4",[32]],["draft_steps","<i4",[32]],["lag","<i4",[32]],["draft_s","<i8",[32]],'
    b'["verify_s","<i8",[32]],["round_s","<i8",[32]],["draft","<u2",[32]],["policy","<u2",[32]]]]'
    b'[{"kind":"tokens"},[["prompt","<i4",[128]],["output","<i4",[128]]]]'
    b'[{"kind":"chain","draft":"small","gamma_max":16},[["agree","|u1",[128]],["logp","<u2",[128]],["entropy","<u2",[128]],'
    b'["accept","<u2",[128]],["branch_logp","<u2",[45,16]],["branch_entropy","<u2",[45,16]],["branch_len","|u1",[45]]]]',
    dict_type=zstandard.DICT_TYPE_RAWCONTENT,
)
"""What headers look like, known to both sides beforehand, so that a header costs a few bytes. Part
of the format: never edited, a better one is a new schema version."""

RAW_LIMIT = 1 << 29
"""Bytes that a chunk may hold unpacked: several times the largest trees of the longest texts, so
that no chunk asks for all memory."""
_HEADER_LIMIT = 1 << 22
"""Bytes of a header, the document of a chunk of documents excepted."""
_AXES_LIMIT = 8
_DTYPES = frozenset(
    {"|b1", "|i1", "|u1", *(f"<{kind}{size}" for kind in "iuf" for size in (2, 4, 8))}
)
"""What a column may be made of: numbers of a fixed size."""

Column = npt.NDArray[Any]


class CodecError(ValueError):
    """Bytes that are not those that were packed, or a chunk of another version."""


@dataclass(frozen=True)
class Chunk:
    """A packed blob: ``data`` and the SHA-256 of it, with what is needed to read it."""

    schema_version: int
    codec: str
    sha256: bytes
    data: bytes


def pack(columns: Mapping[str, Column], meta: Mapping[str, Any]) -> Chunk:
    """Packs arrays of numbers, in order, with JSON-ready ``meta``. Raises :class:`TraceError` for
    more than ``RAW_LIMIT``, :class:`CodecError` for arrays of anything but numbers."""
    for name, column in columns.items():
        if column.dtype.kind not in "biuf":
            raise CodecError(f"column {name!r} is of dtype {column.dtype.str!r}")
    table = [[name, c.dtype.newbyteorder("<").str, list(c.shape)] for name, c in columns.items()]
    header = json.dumps(
        [meta, table], separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()
    if 4 + len(header) + sum(c.nbytes for c in columns.values()) > RAW_LIMIT:
        raise TraceError(
            f"more than {RAW_LIMIT >> 20} MiB in one chunk; record smaller trees or shorter texts"
        )
    parts = [len(header).to_bytes(4, "little"), header, *(_planes(c) for c in columns.values())]
    data = zstandard.ZstdCompressor(level=LEVEL, dict_data=_HEADERS, write_checksum=False).compress(
        b"".join(parts)
    )
    return Chunk(SCHEMA_VERSION, CODEC, hashlib.sha256(data).digest(), data)


def unpack(chunk: Chunk) -> tuple[dict[str, Column], dict[str, Any]]:
    """The columns and meta that :func:`pack` was given. Raises :class:`CodecError` when the bytes
    are not those that were packed, or are of another version."""
    if hashlib.sha256(chunk.data).digest() != chunk.sha256:
        raise CodecError("checksum differs")
    if (chunk.schema_version, chunk.codec) != (SCHEMA_VERSION, CODEC):
        raise CodecError(
            f"packed as {chunk.codec!r} version {chunk.schema_version}, this program reads {CODEC} "
            f"version {SCHEMA_VERSION}"
        )
    raw = memoryview(zstandard.ZstdDecompressor(dict_data=_HEADERS).decompress(chunk.data))
    start = 4 + int.from_bytes(raw[:4], "little")
    meta, table = json.loads(bytes(raw[4:start]))
    columns: dict[str, Column] = {}
    for name, dtype, shape in table:
        kind = np.dtype(dtype)
        stop = start + kind.itemsize * prod(shape)
        columns[name] = _unplanes(raw[start:stop], kind, shape)
        start = stop
    return columns, meta


def _planes(column: Column) -> bytes:
    flat = np.ascontiguousarray(column.T, dtype=column.dtype.newbyteorder("<")).reshape(-1)
    return np.ascontiguousarray(flat.view(np.uint8).reshape(-1, flat.dtype.itemsize).T).tobytes()


def _unplanes(data: memoryview, dtype: np.dtype[Any], shape: Sequence[int]) -> Column:
    count = prod(shape)
    flat = (
        np.ascontiguousarray(np.frombuffer(data, dtype=np.uint8).reshape(dtype.itemsize, count).T)
        .reshape(-1)
        .view(dtype)
    )
    return flat.reshape(tuple(reversed(shape))).T.astype(dtype.newbyteorder("="), order="C")
