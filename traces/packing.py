"""The values of :mod:`traces.schema` as chunks, each with its inverse: ``unpack_x(pack_x(value)) ==
value``. An inverse raises :class:`CodecError` for a chunk that is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.traces.codec import Chunk, Column, pack, unpack
from spectune.traces.schema import NO_BIN, Int32Array, Panorama, Step

NANOSECONDS = 1e9
_EXTENT = ("draft", "gamma_max", "width", "depth", "shared")
"""What a panorama says of itself beside its columns and covers."""

_STEP_TIMES = ("draft_s", "verify_s", "round_s", "arrived_s", "ended_s")
_STEPS: Mapping[str, npt.DTypeLike] = {
    **dict.fromkeys(
        ("start", "drafted", "verified", "accepted", "emitted", "draft_steps", "lag"), np.int32
    ),
    **dict.fromkeys(_STEP_TIMES, np.int64),
    "depth": np.int32,
    "bin": np.uint8,
    "batch": np.int32,
    **dict.fromkeys(("draft", "policy"), np.uint16),
}
"""In storage order; ``draft`` and ``policy`` are places in lists of names."""


def pack_tokens(prompt_ids: Int32Array, output_ids: Int32Array) -> Chunk:
    """Token ids of a prompt and of its output."""
    columns = {"prompt": prompt_ids.astype(np.int32), "output": output_ids.astype(np.int32)}
    return pack(columns, {"kind": "tokens"})


def unpack_tokens(chunk: Chunk) -> tuple[Int32Array, Int32Array]:
    """(prompt ids, output ids), int32. Raises :class:`CodecError`."""
    columns, _ = unpack(chunk)
    return columns["prompt"], columns["output"]


def pack_panorama(panorama: Panorama) -> Chunk:
    """All columns of a panorama. What compresses better is stored as a difference: a parent from
    the one before, a gap from what ``logp`` says of it (modulo 65536)."""
    p, columns = panorama, {name: getattr(panorama, name) for name in panorama.columns()}
    columns["parent"] = np.diff(p.parent, prepend=np.int32(0))
    columns["gap"] = p.gap - (p.logp - p.logp[:, :1])
    meta = {name: getattr(panorama, name) for name in _EXTENT}
    return pack(columns, {"kind": "panorama", **meta, "covers": list(panorama.covers)})


def unpack_panorama(chunk: Chunk) -> Panorama:
    """The panorama. Raises :class:`CodecError`."""
    columns, meta = unpack(chunk)
    columns["parent"] = np.cumsum(columns["parent"], dtype=np.int32)
    columns["gap"] += columns["logp"] - columns["logp"][:, :1]
    fields: dict[str, Any] = {name: meta[name] for name in _EXTENT} | columns
    return Panorama(covers=tuple(meta["covers"]), **fields)


def pack_steps(steps: Sequence[Step]) -> Chunk:
    """The rounds of one request. Times are kept to the nanosecond."""
    values: dict[str, Any] = {n: [getattr(step, n) for step in steps] for n in Step._fields}
    left_out = set[str]()
    if values["depth"] == values["drafted"] and set(values["bin"]) <= {NO_BIN}:
        left_out |= {"depth", "bin"}
    if set(values["batch"]) <= {1}:
        left_out.add("batch")
    if not any(values["ended_s"]):
        left_out |= {"arrived_s", "ended_s"}
    names = {name: sorted(set(values[name])) for name in ("draft", "policy")}
    columns: dict[str, Column] = {}
    for name, dtype in _STEPS.items():
        if name in _STEP_TIMES:
            values[name] = np.rint(np.array(values[name], dtype=np.float64) * NANOSECONDS)
        elif name in names:
            values[name] = [names[name].index(value) for value in values[name]]
        if name not in left_out:
            columns[name] = np.array(values[name], dtype=dtype)
    meta = {"kind": "steps", "drafts": names["draft"], "policies": names["policy"]}
    return pack(columns, meta)


def unpack_steps(chunk: Chunk) -> tuple[Step, ...]:
    """The rounds in order. Raises :class:`CodecError`."""
    columns, meta = unpack(chunk)
    n = len(columns["start"])
    alike = {"bin": NO_BIN, "batch": 1, "arrived_s": 0, "ended_s": 0}
    absent = {"depth": columns["drafted"], **{name: np.full(n, v) for name, v in alike.items()}}
    values: dict[str, list[Any]] = {}
    for name, column in {**absent, **columns}.items():
        values[name] = (column / NANOSECONDS if name in _STEP_TIMES else column).tolist()
    for name, table in (("draft", meta["drafts"]), ("policy", meta["policies"])):
        values[name] = [table[i] for i in columns[name]]
    return tuple(map(Step._make, zip(*(values[name] for name in Step._fields), strict=True)))


def pack_document(document: Any, arrays: Mapping[str, Column] | None = None) -> Chunk:
    """A JSON-ready document with arrays of numbers beside it: an artifact, or the trials of a
    study."""
    return pack(arrays or {}, {"kind": "document", "document": document})


def unpack_document(chunk: Chunk) -> tuple[Any, dict[str, Column]]:
    """(document, arrays). Raises :class:`CodecError`."""
    columns, meta = unpack(chunk)
    return meta["document"], columns
