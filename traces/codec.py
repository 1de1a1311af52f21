"""Arrays of numbers to checksummed bytes and back: safetensors, compressed by zstd. The header says
which schema was written, and what the arrays are of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard
from safetensors import numpy as safetensors

SCHEMA: Final = 1
"""What :mod:`traces.packing` writes; another is refused."""
LEVEL: Final = 9

Column = npt.NDArray[Any]


class CodecError(ValueError):
    """Bytes that are not those that were packed, or of another schema."""


@dataclass(frozen=True)
class Chunk:
    """A packed blob: ``data`` and the SHA-256 of it."""

    sha256: bytes
    data: bytes


def pack(columns: Mapping[str, Column], meta: Mapping[str, Any]) -> Chunk:
    """Packs arrays of numbers with JSON-ready ``meta``: equal ones to equal bytes."""
    # Of several entries the header has no fixed order.
    header = {"spectune": json.dumps({"schema": SCHEMA, "meta": meta}, allow_nan=False)}
    arrays = {name: np.asarray(column, order="C") for name, column in columns.items()}
    data = zstandard.ZstdCompressor(level=LEVEL).compress(safetensors.save(arrays, header))
    return Chunk(hashlib.sha256(data).digest(), data)


def unpack(chunk: Chunk) -> tuple[dict[str, Column], dict[str, Any]]:
    """The columns and meta that :func:`pack` was given. Raises :class:`CodecError` when the bytes
    are not those that were packed, or are of another schema."""
    if hashlib.sha256(chunk.data).digest() != chunk.sha256:
        raise CodecError("checksum differs")
    raw = zstandard.ZstdDecompressor().decompress(chunk.data)
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    header = json.loads(header["spectune"])
    if header["schema"] != SCHEMA:
        raise CodecError(f"written as schema {header['schema']}, this program reads {SCHEMA}")
    columns = {name: column.copy() for name, column in safetensors.load(raw).items()}
    return columns, header["meta"]
