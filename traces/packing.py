"""The values of :mod:`traces.schema` as chunks, each with its inverse: ``unpack_x(pack_x(value)) == value``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from traces.codec import Chunk, CodecError, Column, pack, unpack
from traces.schema import ChainPanorama, Int32Array, Step

NANOSECONDS = 1e9
_STEP_COUNTS = ("start", "drafted", "verified", "accepted", "emitted", "draft_steps", "lag")
_STEP_TIMES = ("draft_s", "verify_s", "round_s")


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


def pack_steps(steps: Sequence[Step]) -> Chunk:
    """The rounds of one request. Times are kept to the nanosecond."""
    drafts = sorted({s.draft for s in steps})
    policies = sorted({s.policy for s in steps})
    columns: dict[str, Column] = {name: np.array([getattr(s, name) for s in steps], dtype=np.int32) for name in _STEP_COUNTS}
    for name in _STEP_TIMES:
        columns[name] = np.rint(np.array([getattr(s, name) for s in steps], dtype=np.float64) * NANOSECONDS).astype(np.int64)
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
    return tuple(Step(*row) for row in zip(*counts, drafts, policies, *times, strict=True))


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
