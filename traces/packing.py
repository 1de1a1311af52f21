"""The values of :mod:`traces.schema` as chunks, each with its inverse: ``unpack_x(pack_x(value)) ==
value``. An inverse raises :class:`CodecError` for a chunk that is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.traces.codec import Chunk, Column, pack, unpack
from spectune.traces.schema import (
    NO_BIN,
    ChainPanorama,
    Int32Array,
    Step,
    TreePanorama,
)

NANOSECONDS = 1e9
_TREE_META = ("draft", "width", "depth", "shared")
"""What a tree panorama says of itself beside its columns and covers."""
_TOKEN_DTYPES = {2: "<u2", 4: "<i4"}
"""Of token ids, by the bytes that each takes."""

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


def pack_chain(panorama: ChainPanorama) -> Chunk:
    """All columns of a chain panorama."""
    columns = {name: getattr(panorama, name) for name in panorama.columns()}
    meta = {"kind": "chain", "draft": panorama.draft, "gamma_max": panorama.gamma_max}
    return pack(columns, meta)


def unpack_chain(chunk: Chunk) -> ChainPanorama:
    """The panorama. Raises :class:`CodecError`."""
    columns, meta = unpack(chunk)
    return ChainPanorama(draft=meta["draft"], gamma_max=meta["gamma_max"], **columns)


def pack_tree(panorama: TreePanorama) -> Chunk:
    """All columns of a tree panorama, recoded to take less room (``docs/log.md`` has what it
    gains).

    ``tokens`` are the bytes of whole ids, node by node (the least of 2 and 4 each), because cousins
    share children. Codes of siblings are stored as differences, modulo 65536: where every node's
    ``logp`` ascends ``logp`` from the sibling before and ``gap`` from what
    ``logp`` says of it, else ``logp`` as it is and ``gap`` from the sibling before.
    """
    p, columns = panorama, {name: getattr(panorama, name) for name in panorama.columns()}
    fits = not p.tokens.size or (p.tokens.min() >= 0 and p.tokens.max() <= np.iinfo(np.uint16).max)
    size = 2 if fits else 4
    ids = np.ascontiguousarray(p.tokens, dtype=_TOKEN_DTYPES[size])
    columns["tokens"] = ids.view(np.uint8).reshape(-1)
    by_q = bool((p.logp[:, 1:] >= p.logp[:, :-1]).all())
    columns["logp"] = _steps(p.logp) if by_q else p.logp
    columns["gap"] = p.gap - (p.logp - p.logp[:, :1]) if by_q else _steps(p.gap)
    meta = {"kind": "tree", **{name: getattr(p, name) for name in _TREE_META}}
    meta |= {"covers": list(p.covers), "token_bytes": size, "by_q": by_q}
    return pack(columns, meta)


def unpack_tree(chunk: Chunk) -> TreePanorama:
    """The panorama. Raises :class:`CodecError`."""
    columns, meta = unpack(chunk)
    ids = columns["tokens"].view(_TOKEN_DTYPES[meta["token_bytes"]])
    columns["tokens"] = ids.reshape(-1, meta["width"]).astype(np.int32)
    if meta["by_q"]:
        logp = columns["logp"] = _sums(columns["logp"])
        columns["gap"] = columns["gap"] + (logp - logp[:, :1])
    else:
        columns["gap"] = _sums(columns["gap"])
    named: dict[str, Any] = {name: meta[name] for name in _TREE_META}
    return TreePanorama(**{**named, "covers": tuple(meta["covers"]), **columns})


def pack_panorama(panorama: ChainPanorama | TreePanorama) -> Chunk:
    return pack_tree(panorama) if isinstance(panorama, TreePanorama) else pack_chain(panorama)


def _steps(codes: Column) -> Column:
    """Differences from the sibling before, uint16 [N, K] modulo 65536; the first child as it is."""
    out = codes.copy()
    out[:, 1:] -= codes[:, :-1]
    return out


def _sums(steps: Column) -> Column:
    """The inverse of :func:`_steps`."""
    return np.cumsum(steps, axis=1, dtype=np.uint16)


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
