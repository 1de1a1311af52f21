"""The values of :mod:`traces.schema` as chunks, each with its inverse: ``unpack_x(pack_x(value)) == value``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from traces.codec import Chunk, CodecError, Column, pack, unpack
from traces.schema import NO_BIN, ChainPanorama, Int32Array, Step, TreePanorama

NANOSECONDS = 1e9
_STEP_COUNTS = ("start", "drafted", "verified", "accepted", "emitted", "draft_steps", "lag")
_STEP_TIMES = ("draft_s", "verify_s", "round_s")
_TREE_COUNTS = {"depth": np.int32, "bin": np.uint8}
"""Columns that rounds recorded before there were trees do not have."""
_TREE_META: dict[str, Callable[[Any], Any]] = {"draft": str, "width": int, "depth": int, "proposals": str, "shared": bool}
"""What a tree panorama says of itself beside its columns and covers, and the types of it."""


def pack_tokens(prompt_ids: Int32Array, output_ids: Int32Array) -> Chunk:
    """Token ids of a prompt and of its output."""
    return pack({"prompt": prompt_ids.astype(np.int32), "output": output_ids.astype(np.int32)}, {"kind": "tokens"})


def unpack_tokens(chunk: Chunk) -> tuple[Int32Array, Int32Array]:
    """(prompt ids, output ids), int32. Raises :class:`CodecError`."""
    columns, _ = _of_kind(chunk, "tokens")
    return columns["prompt"], columns["output"]


def pack_chain(panorama: ChainPanorama) -> Chunk:
    """All columns of a chain panorama."""
    columns = {name: getattr(panorama, name) for name in panorama.columns()}
    return pack(columns, {"kind": "chain", "draft": panorama.draft, "gamma_max": panorama.gamma_max})


def unpack_chain(chunk: Chunk) -> ChainPanorama:
    """The panorama. Raises :class:`CodecError`."""
    columns, meta = _of_kind(chunk, "chain")
    try:
        return ChainPanorama(draft=meta["draft"], gamma_max=meta["gamma_max"], **columns)
    except (TypeError, ValueError, KeyError) as error:
        raise CodecError(f"is no chain panorama: {error}") from error


def pack_tree(panorama: TreePanorama) -> Chunk:
    """All columns of a tree panorama, recoded to take less room (``docs/log.md`` has what it gains).

    ``tokens`` are the bytes of whole ids, node by node (the least of 2 and 4 each), because cousins share children. Codes of siblings
    are stored as differences, modulo 256: where every node's ``logp`` ascends (children ranked by q) ``logp`` from the sibling before
    and ``gap`` from what ``logp`` says of it, else ``logp`` as it is and ``gap`` from the sibling before.
    """
    p, columns = panorama, {name: getattr(panorama, name) for name in panorama.columns()}
    fits = not p.tokens.size or (p.tokens.min() >= 0 and p.tokens.max() <= np.iinfo(np.uint16).max)
    size = 2 if fits else 4
    columns["tokens"] = np.ascontiguousarray(p.tokens, dtype=f"<u{size}" if fits else "<i4").view(np.uint8).reshape(-1)
    by_q = bool((p.logp[:, 1:] >= p.logp[:, :-1]).all())
    columns["logp"] = _steps(p.logp) if by_q else p.logp
    columns["gap"] = p.gap - (p.logp - p.logp[:, :1]) if by_q else _steps(p.gap)
    named = {name: getattr(p, name) for name in _TREE_META}
    return pack(columns, {"kind": "tree", **named, "covers": list(p.covers), "token_bytes": size, "by_q": by_q})


def unpack_tree(chunk: Chunk) -> TreePanorama:
    """The panorama. Raises :class:`CodecError`."""
    columns, meta = _of_kind(chunk, "tree")
    try:
        named: dict[str, Any] = {name: kind(meta[name]) for name, kind in _TREE_META.items()}
        nodes, width = len(columns["text_slot"]), named["width"]
        ids = np.ascontiguousarray(columns["tokens"]).view({2: "<u2", 4: "<i4"}[meta["token_bytes"]])
        columns["tokens"] = ids.reshape(nodes, width).astype(np.int32)
        if meta["by_q"]:
            logp = columns["logp"] = _sums(columns["logp"])
            columns["gap"] = columns["gap"] + (logp - logp[:, :1])
        else:
            columns["gap"] = _sums(columns["gap"])
        found = TreePanorama(**{**named, "covers": tuple(meta["covers"]), **columns})
    except (TypeError, ValueError, KeyError, IndexError) as error:
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
    """Raises :class:`CodecError` unless every node is a child that its parent has, parents first, and dtypes are right."""
    for name in panorama.columns():
        wanted = np.int32 if name in ("parent", "tokens") else np.uint8
        if getattr(panorama, name).dtype != wanted:
            raise CodecError(f"is no tree panorama: column {name} is {getattr(panorama, name).dtype}, not {np.dtype(wanted)}")
    parent, slot, count = panorama.parent, panorama.slot, panorama.count
    own = np.arange(len(count) - len(parent), len(count))
    if panorama.proposals not in ("coupled", "probability"):
        raise CodecError(f"is no tree panorama: proposals {panorama.proposals!r}")
    if ((parent < 0) | (parent >= own)).any() or (slot >= count[parent]).any() or (count > panorama.width).any():
        raise CodecError("is no tree panorama: a node is not among the children of an earlier one")


def pack_steps(steps: Sequence[Step]) -> Chunk:
    """The rounds of one request. Times are kept to the nanosecond."""
    drafts = sorted({s.draft for s in steps})
    policies = sorted({s.policy for s in steps})
    columns: dict[str, Column] = {name: np.array([getattr(s, name) for s in steps], dtype=np.int32) for name in _STEP_COUNTS}
    for name in _STEP_TIMES:
        columns[name] = np.rint(np.array([getattr(s, name) for s in steps], dtype=np.float64) * NANOSECONDS).astype(np.int64)
    if any(s.depth != s.drafted or s.bin != NO_BIN for s in steps):
        for name, kind in _TREE_COUNTS.items():
            columns[name] = np.array([getattr(s, name) for s in steps], dtype=kind)
    columns["draft"] = np.array([drafts.index(s.draft) for s in steps], dtype=np.uint16)
    columns["policy"] = np.array([policies.index(s.policy) for s in steps], dtype=np.uint16)
    return pack(columns, {"kind": "steps", "drafts": drafts, "policies": policies})


def unpack_steps(chunk: Chunk) -> tuple[Step, ...]:
    """The rounds in order. Raises :class:`CodecError`."""
    columns, meta = _of_kind(chunk, "steps")
    counts = [columns[name].tolist() for name in _STEP_COUNTS]
    times = [(columns[name] / NANOSECONDS).tolist() for name in _STEP_TIMES]
    drafts = [meta["drafts"][i] for i in columns["draft"]]
    policies = [meta["policies"][i] for i in columns["policy"]]
    depths = (columns["depth"] if "depth" in columns else columns["drafted"]).tolist()
    bins = columns["bin"].tolist() if "bin" in columns else [NO_BIN] * len(depths)
    return tuple(Step(*row) for row in zip(*counts, drafts, policies, *times, depths, bins, strict=True))


def pack_document(document: Any, arrays: Mapping[str, Column] | None = None) -> Chunk:
    """A JSON-ready document with arrays of numbers beside it: an artifact, or the trials of a study."""
    return pack(arrays or {}, {"kind": "document", "document": document})


def unpack_document(chunk: Chunk) -> tuple[Any, dict[str, Column]]:
    """(document, arrays). Raises :class:`CodecError`."""
    columns, meta = _of_kind(chunk, "document")
    return meta["document"], columns


def _of_kind(chunk: Chunk, kind: str) -> tuple[dict[str, Column], dict[str, Any]]:
    columns, meta = unpack(chunk)
    if meta.get("kind") != kind:
        raise CodecError(f"holds {meta.get('kind')!r}, not {kind!r}")
    return columns, meta
