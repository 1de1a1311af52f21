"""The values of :mod:`traces.schema` as chunks, each with its inverse: ``unpack_x(pack_x(value)) ==
value``.

Whatever bytes a chunk holds, an inverse gives a value that code may index by without looking, or
raises :class:`CodecError`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from spectune.traces.codec import RAW_LIMIT, Chunk, CodecError, Column, pack, unpack
from spectune.traces.schema import (
    AGREE_NONE,
    NO_BIN,
    ChainPanorama,
    Int32Array,
    Proposals,
    Step,
    TreePanorama,
)

NANOSECONDS = 1e9
_TREE_META: dict[str, type] = {
    "draft": str,
    "width": int,
    "depth": int,
    "proposals": str,
    "shared": bool,
}
"""What a tree panorama says of itself beside its columns and covers, and the types of it."""
_TOKEN_DTYPES = {2: "<u2", 4: "<i4"}
"""Of token ids, by the bytes that each takes."""
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
_STEP_TIMES = ("draft_s", "verify_s", "round_s", "arrived_s", "ended_s")
_STEPS: _Layout = {
    **dict.fromkeys(
        ("start", "drafted", "verified", "accepted", "emitted", "draft_steps", "lag"),
        (np.int32, 1),
    ),
    **dict.fromkeys(_STEP_TIMES, (np.int64, 1)),
    "depth": (np.int32, 1),
    "bin": (np.uint8, 1),
    "batch": (np.int32, 1),
    **dict.fromkeys(("draft", "policy"), (np.uint16, 1)),
}
"""In storage order; ``draft`` and ``policy`` are places in lists of names."""
_OPTIONAL = frozenset({"depth", "bin", "batch", "arrived_s", "ended_s"})
"""Columns that are left out where they say nothing: no trees, one request in every step, no
clock."""


def pack_tokens(prompt_ids: Int32Array, output_ids: Int32Array) -> Chunk:
    """Token ids of a prompt and of its output."""
    columns = {"prompt": prompt_ids.astype(np.int32), "output": output_ids.astype(np.int32)}
    return pack(columns, {"kind": "tokens"})


def unpack_tokens(chunk: Chunk) -> tuple[Int32Array, Int32Array]:
    """(prompt ids, output ids), int32. Raises :class:`CodecError`."""
    columns, _ = _of_kind(chunk, "tokens", _TOKENS)
    return columns["prompt"], columns["output"]


def pack_chain(panorama: ChainPanorama) -> Chunk:
    """All columns of a chain panorama."""
    columns = {name: getattr(panorama, name) for name in panorama.columns()}
    meta = {"kind": "chain", "draft": panorama.draft, "gamma_max": panorama.gamma_max}
    return pack(columns, meta)


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
    columns, meta = _of_kind(chunk, "tree", _TREE)
    named: dict[str, Any] = {name: _said(meta, name, kind) for name, kind in _TREE_META.items()}
    nodes, width = len(columns["text_slot"]), named["width"]
    size, by_q = _said(meta, "token_bytes", int), _said(meta, "by_q", bool)
    known = size in _TOKEN_DTYPES and width >= 1
    if not known or columns["tokens"].size != nodes * width * size:
        raise CodecError("is no tree panorama: its tokens do not add up")
    ids = columns["tokens"].view(_TOKEN_DTYPES[size]).reshape(nodes, width)
    columns["tokens"] = ids.astype(np.int32)
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


def pack_panorama(panorama: ChainPanorama | TreePanorama) -> Chunk:
    return pack_tree(panorama) if isinstance(panorama, TreePanorama) else pack_chain(panorama)


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
    if panorama.proposals not in get_args(Proposals):
        raise CodecError(f"is no tree panorama: proposals {panorama.proposals[:40]!r}")
    if ((parent < 0) | (parent >= own)).any() or (slot >= count[parent]).any():
        raise CodecError("is no tree panorama: a node is not among the children of an earlier one")
    known = (panorama.text_slot < panorama.width) | (panorama.text_slot == _OFF_TEXT)
    if (count > panorama.width).any() or not known.all() or panorama.depth < 1:
        raise CodecError("is no tree panorama: its codes are out of range")


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
    for name, (dtype, _) in _STEPS.items():
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
    columns, meta = _of_kind(chunk, "steps", _STEPS, _OPTIONAL)
    if len({len(column) for column in columns.values()}) > 1:
        raise CodecError("is no list of rounds: its columns have different lengths")
    n = len(columns["start"])
    alike = {"bin": NO_BIN, "batch": 1, "arrived_s": 0, "ended_s": 0}
    absent = {"depth": columns["drafted"], **{name: np.full(n, v) for name, v in alike.items()}}
    values: dict[str, list[Any]] = {}
    for name, column in {**absent, **columns}.items():
        values[name] = (column / NANOSECONDS if name in _STEP_TIMES else column).tolist()
    for name, table in (("draft", _words(meta, "drafts")), ("policy", _words(meta, "policies"))):
        if (columns[name] >= len(table)).any():
            raise CodecError(f"is no list of rounds: it names a {name} that it does not list")
        values[name] = [table[i] for i in columns[name]]
    return tuple(map(Step._make, zip(*(values[name] for name in Step._fields), strict=True)))


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
    chunk: Chunk, kind: str, layout: _Layout, optional: Collection[str] = ()
) -> tuple[dict[str, Column], dict[str, Any]]:
    """The columns and meta of a chunk that holds exactly the columns of its kind, but of those that
    are ``optional`` any. Raises CodecError."""
    columns, meta = unpack(chunk)
    _expect_kind(meta, kind)
    if not layout.keys() - set(optional) <= columns.keys() <= layout.keys():
        raise CodecError(f"is no {_KINDS[kind]}: it has other columns")
    for name, column in columns.items():
        dtype, axes = layout[name]
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
