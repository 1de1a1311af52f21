"""The values of :mod:`traces.schema` as chunks, each with its inverse: ``unpack_x(pack_x(value)) ==
value``.

Whatever bytes a chunk holds, an inverse gives a value that code may index by without looking, or
raises :class:`CodecError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.traces.codec import RAW_LIMIT, Chunk, CodecError, Column, pack, unpack
from spectune.traces.schema import AGREE_NONE, NO_BIN, ChainPanorama, Int32Array, Step, TreePanorama

NANOSECONDS = 1e9
_STEP_COUNTS = ("start", "drafted", "verified", "accepted", "emitted", "draft_steps", "lag")
_STEP_TIMES = ("draft_s", "verify_s", "round_s")
_LATER_COUNTS = {"depth": np.int32, "bin": np.uint8, "batch": np.int32}
_LATER_TIMES = ("arrived_s", "ended_s")
"""Columns that came later, and are left out where they say nothing: no trees, one request in every
step, no clock."""
_TREE_META: dict[str, type] = {
    "draft": str,
    "width": int,
    "depth": int,
    "proposals": str,
    "shared": bool,
}
"""What a tree panorama says of itself beside its columns and covers, and the types of it."""
_OFF_TEXT = 255
"""``text_slot`` of a node none of whose children is the text's next token."""

_KINDS = {
    "tokens": "pair of texts",
    "chain": "chain panorama",
    "tree": "tree panorama",
    "steps": "list of rounds",
    "document": "document",
}
"""What chunks hold, for messages."""

_Layout = Mapping[str, tuple[npt.DTypeLike, int]]
"""Columns of a kind: dtype and number of axes."""
_TOKENS: _Layout = {"prompt": (np.int32, 1), "output": (np.int32, 1)}
_CHAIN: _Layout = {
    "agree": (np.uint8, 1),
    **dict.fromkeys(("logp", "entropy", "accept"), (np.uint16, 1)),
    **dict.fromkeys(("branch_logp", "branch_entropy"), (np.uint16, 2)),
    "branch_len": (np.uint8, 1),
}
_TREE: _Layout = {
    "parent": (np.int32, 1),
    "slot": (np.uint8, 1),
    "tokens": (np.uint8, 1),
    **dict.fromkeys(("logp", "gap"), (np.uint8, 2)),
    **dict.fromkeys(("count", "entropy", "top_entropy", "text_slot"), (np.uint8, 1)),
}
_STEPS: _Layout = {
    **dict.fromkeys(_STEP_COUNTS, (np.int32, 1)),
    **dict.fromkeys(_STEP_TIMES, (np.int64, 1)),
    **dict.fromkeys(("draft", "policy"), (np.uint16, 1)),
}
_LATER_STEPS: _Layout = {
    **{name: (kind, 1) for name, kind in _LATER_COUNTS.items()},
    **dict.fromkeys(_LATER_TIMES, (np.int64, 1)),
}


def pack_tokens(prompt_ids: Int32Array, output_ids: Int32Array) -> Chunk:
    """Token ids of a prompt and of its output."""
    return pack(
        {"prompt": prompt_ids.astype(np.int32), "output": output_ids.astype(np.int32)},
        {"kind": "tokens"},
    )


def unpack_tokens(chunk: Chunk) -> tuple[Int32Array, Int32Array]:
    """(prompt ids, output ids), int32. Raises :class:`CodecError`."""
    columns, _ = _of_kind(chunk, "tokens", _TOKENS)
    return columns["prompt"], columns["output"]


def pack_chain(panorama: ChainPanorama) -> Chunk:
    """All columns of a chain panorama."""
    columns = {name: getattr(panorama, name) for name in panorama.columns()}
    return pack(
        columns, {"kind": "chain", "draft": panorama.draft, "gamma_max": panorama.gamma_max}
    )


def unpack_chain(chunk: Chunk) -> ChainPanorama:
    """The panorama. Raises :class:`CodecError`."""
    columns, meta = _of_kind(chunk, "chain", _CHAIN)
    draft, gamma_max = _said(meta, "draft", str), _said(meta, "gamma_max", int)
    try:
        found = ChainPanorama(draft=draft, gamma_max=gamma_max, **columns)
    except ValueError as error:
        raise CodecError(f"is no chain panorama: {error}") from error
    if (found.agree > AGREE_NONE).any() or (found.branch_len > gamma_max).any():
        raise CodecError("is no chain panorama: its codes are out of range")
    return found


def pack_tree(panorama: TreePanorama) -> Chunk:
    """All columns of a tree panorama, recoded to take less room (``docs/log.md`` has what it
    gains).

    ``tokens`` are the bytes of whole ids, node by node (the least of 2 and 4 each), because cousins
    share children. Codes of siblings are stored as differences, modulo 256: where every node's
    ``logp`` ascends (children ranked by q) ``logp`` from the sibling before and ``gap`` from what
    ``logp`` says of it, else ``logp`` as it is and ``gap`` from the sibling before.
    """
    p, columns = panorama, {name: getattr(panorama, name) for name in panorama.columns()}
    fits = not p.tokens.size or (p.tokens.min() >= 0 and p.tokens.max() <= np.iinfo(np.uint16).max)
    size = 2 if fits else 4
    columns["tokens"] = (
        np.ascontiguousarray(p.tokens, dtype=f"<u{size}" if fits else "<i4")
        .view(np.uint8)
        .reshape(-1)
    )
    by_q = bool((p.logp[:, 1:] >= p.logp[:, :-1]).all())
    columns["logp"] = _steps(p.logp) if by_q else p.logp
    columns["gap"] = p.gap - (p.logp - p.logp[:, :1]) if by_q else _steps(p.gap)
    named = {name: getattr(p, name) for name in _TREE_META}
    return pack(
        columns,
        {"kind": "tree", **named, "covers": list(p.covers), "token_bytes": size, "by_q": by_q},
    )


def unpack_tree(chunk: Chunk) -> TreePanorama:
    """The panorama. Raises :class:`CodecError`."""
    columns, meta = _of_kind(chunk, "tree", _TREE)
    named: dict[str, Any] = {name: _said(meta, name, kind) for name, kind in _TREE_META.items()}
    nodes, width = len(columns["text_slot"]), named["width"]
    size, by_q = _said(meta, "token_bytes", int), _said(meta, "by_q", bool)
    if size not in (2, 4) or width < 1 or columns["tokens"].size != nodes * width * size:
        raise CodecError("is no tree panorama: its tokens do not add up")
    columns["tokens"] = (
        columns["tokens"].view("<u2" if size == 2 else "<i4").reshape(nodes, width).astype(np.int32)
    )
    try:
        if by_q:
            logp = columns["logp"] = _sums(columns["logp"])
            columns["gap"] = columns["gap"] + (logp - logp[:, :1])
        else:
            columns["gap"] = _sums(columns["gap"])
        found = TreePanorama(**{**named, "covers": tuple(_words(meta, "covers")), **columns})
    except ValueError as error:
        raise CodecError(f"is no tree panorama: {error}") from error
    _check_tree(found)
    return found


def _steps(codes: Column) -> Column:
    """Differences from the sibling before, uint8 [N, K] modulo 256; the first child as it is."""
    out = codes.copy()
    out[:, 1:] -= codes[:, :-1]
    return out


def _sums(steps: Column) -> Column:
    """The inverse of :func:`_steps`."""
    return np.cumsum(steps, axis=1, dtype=np.uint8)


def _check_tree(panorama: TreePanorama) -> None:
    """Raises :class:`CodecError` unless every node is a child that its parent has, parents first,
    and no code is out of range."""
    parent, slot, count = panorama.parent, panorama.slot, panorama.count
    own = np.arange(len(count) - len(parent), len(count))
    if panorama.proposals not in ("coupled", "probability"):
        raise CodecError(f"is no tree panorama: proposals {panorama.proposals!r}")
    if (
        ((parent < 0) | (parent >= own)).any()
        or (slot >= count[parent]).any()
        or (count > panorama.width).any()
    ):
        raise CodecError("is no tree panorama: a node is not among the children of an earlier one")
    if (
        (panorama.text_slot >= panorama.width) & (panorama.text_slot != _OFF_TEXT)
    ).any() or panorama.depth < 1:
        raise CodecError("is no tree panorama: its codes are out of range")


def pack_steps(steps: Sequence[Step]) -> Chunk:
    """The rounds of one request. Times are kept to the nanosecond."""
    values = (
        dict(zip(Step._fields, zip(*steps, strict=True), strict=True))
        if steps
        else dict.fromkeys(Step._fields, ())
    )
    columns: dict[str, Column] = {
        name: np.array(values[name], dtype=np.int32) for name in _STEP_COUNTS
    }
    for name in (*_STEP_TIMES, *(_LATER_TIMES if any(values["ended_s"]) else ())):
        columns[name] = np.rint(np.array(values[name], dtype=np.float64) * NANOSECONDS).astype(
            np.int64
        )
    later = (
        ["depth", "bin"]
        if values["depth"] != values["drafted"] or any(b != NO_BIN for b in values["bin"])
        else []
    )
    later += ["batch"] if any(b != 1 for b in values["batch"]) else []
    for name in later:
        columns[name] = np.array(values[name], dtype=_LATER_COUNTS[name])
    drafts, policies = (sorted(set(values[name])) for name in ("draft", "policy"))
    columns["draft"] = np.array([drafts.index(d) for d in values["draft"]], dtype=np.uint16)
    columns["policy"] = np.array([policies.index(p) for p in values["policy"]], dtype=np.uint16)
    return pack(columns, {"kind": "steps", "drafts": drafts, "policies": policies})


def unpack_steps(chunk: Chunk) -> tuple[Step, ...]:
    """The rounds in order. Raises :class:`CodecError`."""
    columns, meta = _of_kind(chunk, "steps", _STEPS, _LATER_STEPS)
    if len({len(column) for column in columns.values()}) > 1:
        raise CodecError("is no list of rounds: its columns have different lengths")
    counts = [columns[name].tolist() for name in _STEP_COUNTS]
    times = [(columns[name] / NANOSECONDS).tolist() for name in _STEP_TIMES]
    names = []
    for column, table in (("draft", _words(meta, "drafts")), ("policy", _words(meta, "policies"))):
        if (columns[column] >= len(table)).any():
            raise CodecError(f"is no list of rounds: it names a {column} that it does not list")
        names.append([table[i] for i in columns[column]])
    depths = (columns["depth"] if "depth" in columns else columns["drafted"]).tolist()
    bins = columns["bin"].tolist() if "bin" in columns else [NO_BIN] * len(depths)
    batches = columns["batch"].tolist() if "batch" in columns else [1] * len(depths)
    clocks = [
        (columns[name] / NANOSECONDS).tolist() if name in columns else [0.0] * len(depths)
        for name in _LATER_TIMES
    ]
    return tuple(
        Step(*row)
        for row in zip(*counts, *names, *times, depths, bins, batches, *clocks, strict=True)
    )


def pack_document(document: Any, arrays: Mapping[str, Column] | None = None) -> Chunk:
    """A JSON-ready document with arrays of numbers beside it: an artifact, or the trials of a
    study."""
    return pack(arrays or {}, {"kind": "document", "document": document})


def unpack_document(chunk: Chunk) -> tuple[Any, dict[str, Column]]:
    """(document, arrays). Raises :class:`CodecError`."""
    columns, meta = unpack(chunk, header_limit=RAW_LIMIT)
    _expect_kind(meta, "document")
    if "document" not in meta:
        raise CodecError("is no document: it holds none")
    return meta["document"], columns


def _of_kind(
    chunk: Chunk, kind: str, layout: _Layout, optional: _Layout | None = None
) -> tuple[dict[str, Column], dict[str, Any]]:
    """The columns and meta of a chunk that holds exactly the columns of its kind, and of
    ``optional`` any. Raises CodecError."""
    columns, meta = unpack(chunk)
    _expect_kind(meta, kind)
    known = {**layout, **(optional or {})}
    if not layout.keys() <= columns.keys() <= known.keys():
        raise CodecError(f"is no {_KINDS[kind]}: it has other columns")
    for name, column in columns.items():
        dtype, axes = known[name]
        if column.dtype != dtype or column.ndim != axes:
            raise CodecError(
                f"is no {_KINDS[kind]}: column {name} is {column.dtype} {column.shape}, not "
                f"{np.dtype(dtype)} of {axes} axes"
            )
    return columns, meta


def _expect_kind(meta: Mapping[str, Any], kind: str) -> None:
    if meta.get("kind") != kind:
        raise CodecError(f"holds {str(meta.get('kind'))[:40]!r}, not {kind!r}")


def _said(meta: Mapping[str, Any], name: str, kind: type) -> Any:
    """An entry of a known kind's meta, of exactly this type. Raises :class:`CodecError`."""
    if type(meta.get(name)) is not kind:
        raise CodecError(f"is no {_KINDS[meta['kind']]}: it does not say its {name}")
    return meta[name]


def _words(meta: Mapping[str, Any], name: str) -> list[str]:
    """An entry of meta that is a list of texts. Raises :class:`CodecError`."""
    found: list[Any] = _said(meta, name, list)
    if not all(isinstance(word, str) for word in found):
        raise CodecError(f"is no {_KINDS[meta['kind']]}: its {name} are no texts")
    return found
