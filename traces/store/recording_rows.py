"""A recording's rows and the values they hold: helpers of :mod:`traces.store.recordings`, which
owns the transactions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from spectune.db import CorruptedChunkError, NotFoundError
from spectune.db.models import PanoramaChunkRow, RecordingRow, StepChunkRow, TrajectoryRow
from spectune.traces.acceptance import compact, keep_probability, step_survival, survival
from spectune.traces.codec import CodecError
from spectune.traces.packing import unpack_tokens
from spectune.traces.recording import RecordingInfo, TreeExtent
from spectune.traces.schema import (
    AGREE_NONE,
    AGREE_YES,
    ChainPanorama,
    Proposals,
    Sampling,
    Step,
    Trajectory,
    TreePanorama,
    Verifier,
)
from spectune.traces.store.rows import chunk_of, value_of

CHAIN = "chain"
TREE_KINDS: dict[Proposals, str] = {"coupled": "tree", "probability": "tree_q"}
"""The kind of a panorama's row, by how the trees' children are ranked."""


def step_row(
    recording: str | None,
    run: str | None,
    ordinal: int,
    request_id: str,
    category: str,
    steps: Sequence[Step],
    chunk: Mapping[str, Any],
) -> StepChunkRow:
    """The row of one request's rounds, with its summaries."""
    sums = step_survival(steps)
    return StepChunkRow(
        recording_id=recording,
        run_id=run,
        ordinal=ordinal,
        request_id=request_id,
        category=category,
        policies=sorted({s.policy for s in steps}),
        at_risk=compact(sums.at_risk),
        survived=compact(sums.survived),
        **step_sums(steps),
        **chunk,
    )


def step_sums(steps: Sequence[Step]) -> dict[str, Any]:
    """Sums over a request's rounds, by column name."""
    return {
        "rounds": len(steps),
        "drafted": sum(s.drafted for s in steps),
        "accepted": sum(s.accepted for s in steps),
        "emitted": sum(s.emitted for s in steps),
        "seconds": sum(s.round_s for s in steps),
    }


def chain_values(panorama: ChainPanorama, verifier: Verifier) -> dict[str, Any]:
    """A chain panorama's columns beside its chunk, with its summaries."""
    sums, n = survival(panorama, verifier), panorama.positions
    return {
        "kind": CHAIN,
        "gamma_max": panorama.gamma_max,
        "n": n,
        "agree_count": int((panorama.agree == AGREE_YES).sum()),
        "none_count": int((panorama.agree == AGREE_NONE).sum()),
        "acceptance": float(keep_probability(panorama, verifier).mean()) if n else 0.0,
        "at_risk": compact(sums.at_risk),
        "survived": compact(sums.survived),
    }


def tree_values(panorama: TreePanorama, _: Verifier) -> dict[str, Any]:
    """The same of a tree panorama."""
    n = panorama.positions
    agree = int((panorama.text_slot[:n] == 0).sum())
    return {
        "kind": TREE_KINDS[panorama.proposals],
        "gamma_max": panorama.depth,
        "width": panorama.width,
        "covers": list(panorama.covers),
        "n": n,
        "agree_count": agree,
        "none_count": 0,
        "acceptance": agree / n if n else 0.0,
        "at_risk": [],
        "survived": [],
    }


def spec_hash(
    pair_id: str,
    workload_id: str | None,
    sampling: Sampling,
    max_new_tokens: int,
    verifier: Verifier,
    options: Mapping[str, Any] | None,
    source: str,
) -> str:
    """SHA-256 of everything a recording was asked for, hex: equal questions, equal hash."""
    spec = [
        pair_id,
        workload_id,
        asdict(sampling),
        max_new_tokens,
        verifier,
        dict(options or {}),
        source,
    ]
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()


def recording_row(session: Session, recording: str, *, writing: bool = False) -> RecordingRow:
    """Raises NotFoundError. With ``writing`` other writers of this recording, and its removal, wait
    until the transaction ends."""
    row = session.get(
        RecordingRow, recording, with_for_update={"key_share": True} if writing else None
    )
    if row is None:
        raise NotFoundError(
            f"there is no recording {recording!r}; `traces list` shows those there are"
        )
    return row


def trajectory_of(row: TrajectoryRow) -> Trajectory:
    """The value a row holds. Raises :class:`CodecError`."""
    prompt, output = unpack_tokens(chunk_of(row))
    try:
        sampling, stop_strings = Sampling(**row.sampling), tuple(row.stop_strings)
    except TypeError:
        raise CodecError("its sampling parameters or stop strings are none") from None
    return value_of(
        Trajectory,
        row,
        prompt_ids=prompt,
        output_ids=output,
        sampling=sampling,
        stop_strings=stop_strings,
    )


def infos(session: Session, rows: Sequence[RecordingRow]) -> list[RecordingInfo]:
    """Recordings with the counts of what they hold, in two queries however many there are."""
    ids = [row.id for row in rows]
    requests = {
        name: (count, tokens)
        for name, count, tokens in session.execute(
            select(TrajectoryRow.recording_id, func.count(), func.sum(TrajectoryRow.n_output))
            .where(TrajectoryRow.recording_id.in_(ids))
            .group_by(TrajectoryRow.recording_id)
        )
    }
    drafts: dict[str, dict[str, int]] = {}
    trees: dict[tuple[str, str], dict[str, TreeExtent]] = {}
    p = PanoramaChunkRow
    counted = (
        select(
            p.recording_id, p.kind, p.draft, func.count(), func.min(p.width), func.min(p.gamma_max)
        )
        .where(p.recording_id.in_(ids))
        .group_by(p.recording_id, p.kind, p.draft)
        .order_by(p.draft)
    )
    for name, kind, draft, count, width, depth in session.execute(counted):
        if kind == CHAIN:
            drafts.setdefault(name, {})[draft] = count
        else:
            trees.setdefault((name, kind), {})[draft] = TreeExtent(count, width, depth)
    return [
        value_of(
            RecordingInfo,
            row,
            sampling=Sampling(**row.sampling),
            n_requests=int(requests.get(row.id, (0, 0))[0]),
            n_output_tokens=int(requests.get(row.id, (0, 0))[1]),
            drafts=drafts.get(row.id, {}),
            trees=trees.get((row.id, TREE_KINDS["coupled"]), {}),
            trees_q=trees.get((row.id, TREE_KINDS["probability"]), {}),
        )
        for row in rows
    ]


def corrupted(recording: str, ordinal: int, what: str, error: CodecError) -> CorruptedChunkError:
    """The error that names a damaged chunk."""
    return CorruptedChunkError(
        f"recording {recording}, request {ordinal}: {what} cannot be used ({error}); the others "
        "still can"
    )
