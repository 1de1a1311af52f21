"""Arrays of numbers as one blob in a column: safetensors in a zstd frame with a checksum. The
header holds the schema's version and what is JSON beside the arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import methodcaller
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import numpy as safetensors
from sqlalchemy import JSON, LargeBinary
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from spectune.db.compression import CHECKED, zstd
from spectune.traces.schema import Step, Tokens, Trie

SCHEMA: Final = 1
"""The version that is written; another is refused."""
LEVEL: Final = 3
Array = npt.NDArray[Any]
_NANOSECONDS = 1e9
_TIMES = ("draft_s", "verify_s", "round_s", "arrived_s", "ended_s")
_NAMES = ("draft", "policy")
_STEP_DTYPES: Mapping[str, npt.DTypeLike] = {
    **dict.fromkeys(Step._fields, np.int32),
    **dict.fromkeys(_TIMES, np.int64),
    **dict.fromkeys(_NAMES, np.uint16),
    "bin": np.uint8,
}

_MAY_BE_0 = {"slot": "parent", "gap": "logp", "top_entropy": "entropy"}
"""Arrays of a trie with one of the same shape."""


class BlobError(ValueError):
    """Bytes that are damaged or of another schema version."""


class Content(NamedTuple):
    """Arrays of numbers, and a JSON document beside them."""

    arrays: Mapping[str, Array]
    document: Any


def pack(arrays: Mapping[str, Array], document: Any = None) -> bytes:
    """Packs arrays of numbers with a JSON document: equal ones to equal bytes."""
    # Of several entries the header has no fixed order.
    content, number = {"schema": SCHEMA, "meta": document}, methodcaller("item")  # of numpy's
    header = {"spectune": json.dumps(content, allow_nan=False, default=number)}
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    options = CHECKED | {zstd.CompressionParameter.compression_level: LEVEL}
    return zstd.compress(safetensors.save(ordered, header), options=options)


def unpack(data: bytes) -> Content:
    """Returns what :func:`pack` was given. Raises :class:`BlobError`."""
    try:
        raw = zstd.decompress(data)
    except (zstd.ZstdError, MemoryError) as error:  # a damaged size asks for any memory
        raise BlobError(f"its bytes are damaged ({error})") from error
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    header = json.loads(header["spectune"])
    if header["schema"] != SCHEMA:
        raise BlobError(f"written as schema {header['schema']}, this program reads {SCHEMA}")
    arrays = {name: array.copy() for name, array in safetensors.load(raw).items()}
    return Content(arrays, header["meta"])


@dataclass(frozen=True)
class Damaged:
    """Stands where a damaged blob was read, so that the rows around it stay usable."""

    problem: str


class Blob(TypeDecorator[Any]):
    """A column of values that ``pack`` and ``unpack`` turn into bytes and back; :class:`Damaged`
    comes out where the bytes cannot be read."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]) -> None:
        super().__init__()
        self.pack, self.unpack = pack, unpack

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else self.pack(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        try:
            return None if value is None else self.unpack(bytes(value))
        except BlobError as error:
            return Damaged(str(error))


class JsonOf(TypeDecorator[Any]):
    """A JSON column of values that ``dump`` and ``load`` turn into JSON and back."""

    impl = JSON
    cache_ok = True

    def __init__(self, dump: Callable[[Any], Any], load: Callable[[Any], Any]) -> None:
        super().__init__()
        self.dump, self.load = dump, load

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return self.dump(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return self.load(value)


def pack_tokens(tokens: Tokens) -> bytes:
    """Packs the token ids of a prompt and of its output."""
    arrays = {"prompt": tokens.prompt, "output": tokens.output}
    return pack({name: array.astype(np.int32) for name, array in arrays.items()})


def unpack_tokens(data: bytes) -> Tokens:
    """The inverse of :func:`pack_tokens`."""
    return Tokens(**unpack(data).arrays)


def pack_trie(trie: Trie) -> bytes:
    """Packs a trie. What compresses better is stored as a difference: a parent from the one before,
    a gap from what ``logp`` says of it (modulo 65536). Of a chain some arrays are all 0, and left
    out."""
    arrays = {f.name: getattr(trie, f.name) for f in fields(trie)}
    arrays["parent"] = np.diff(trie.parent, prepend=np.int32(0))
    arrays["gap"] = trie.gap - (trie.logp - trie.logp[:, :1])
    return pack({name: a for name, a in arrays.items() if name not in _MAY_BE_0 or a.any()})


def unpack_trie(data: bytes) -> Trie:
    """The inverse of :func:`pack_trie`."""
    arrays = dict(unpack(data).arrays)
    for name, like in _MAY_BE_0.items():
        arrays.setdefault(name, np.zeros_like(arrays[like], np.uint8 if name == "slot" else None))
    arrays["parent"] = np.cumsum(arrays["parent"], dtype=np.int32)
    arrays["gap"] += arrays["logp"] - arrays["logp"][:, :1]
    return Trie(**arrays)


def pack_steps(steps: Sequence[Step]) -> bytes:
    """Packs the rounds of one request. Times are kept to the nanosecond; a column of one value is
    stored as that value."""
    names = {name: sorted({getattr(s, name) for s in steps}) for name in _NAMES}
    arrays: dict[str, Array] = {}
    for column, values in zip(Step._fields, zip(*steps, strict=True), strict=False):
        if column in _TIMES:
            numbers = np.rint(np.array(values, np.float64) * _NANOSECONDS)
        elif column in _NAMES:
            numbers = np.array([names[column].index(value) for value in values])
        else:
            numbers = np.array(values)
        array = numbers.astype(_STEP_DTYPES[column])
        arrays[column] = array[:1] if (array == array[0]).all() else array
    return pack(arrays, {"rounds": len(steps), "names": names})


def unpack_steps(data: bytes) -> tuple[Step, ...]:
    """The inverse of :func:`pack_steps`."""
    arrays, meta = unpack(data)
    columns = []
    for column in Step._fields if meta["rounds"] else ():
        array = np.broadcast_to(arrays[column], meta["rounds"])
        values: list[Any] = (array / _NANOSECONDS if column in _TIMES else array).tolist()
        columns.append([meta["names"][column][i] for i in values] if column in _NAMES else values)
    return tuple(map(Step._make, zip(*columns, strict=True)))


TOKENS: Final = Blob(pack_tokens, unpack_tokens)
TRIE: Final = Blob(pack_trie, unpack_trie)
STEPS: Final = Blob(pack_steps, unpack_steps)
CONTENT: Final = Blob(lambda content: pack(*content), unpack)
DOCUMENT: Final = Blob(lambda document: pack({}, document), lambda data: unpack(data).document)
"""Column types."""
