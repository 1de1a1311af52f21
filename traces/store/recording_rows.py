"""A recording's rows and the values they hold: helpers of :mod:`traces.store.recordings`, which
owns the transactions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from spectune.db import NotFoundError
from spectune.db.models import PanoramaChunkRow, RecordingRow, TrajectoryRow
from spectune.traces.acceptance import compact, keep_probability, step_survival, survival
from spectune.traces.packing import pack_steps, pack_tokens, unpack_tokens
from spectune.traces.recording import Asked, Extent, RecordingInfo
from spectune.traces.schema import Panorama, Sampling, Step, Trajectory, Verifier
from spectune.traces.store.rows import value_of


def step_values(steps: Sequence[Step]) -> dict[str, Any]:
    """A request's rounds as columns: their chunk and its summaries."""
    sums = step_survival(steps)
    return {
        "policies": sorted({s.policy for s in steps}),
        "at_risk": compact(sums.at_risk),
        "survived": compact(sums.survived),
        **step_sums(steps),
        **vars(pack_steps(steps)),
    }


def step_sums(steps: Sequence[Step]) -> dict[str, Any]:
    """Sums over a request's rounds, by column name."""
    return {
        "rounds": len(steps),
        "drafted": sum(s.drafted for s in steps),
        "accepted": sum(s.accepted for s in steps),
        "emitted": sum(s.emitted for s in steps),
        "seconds": sum(s.round_s for s in steps),
    }


def trajectory_values(trajectory: Trajectory, steps: Sequence[Step]) -> dict[str, Any]:
    """A decoded request as columns: its chunk, and the sums of its rounds."""
    t, sums = trajectory, step_sums(steps)
    own = ("request_id", "category", "max_new_tokens", "verifier", "finish")
    return {
        **{name: getattr(t, name) for name in own},
        "sampling": asdict(t.sampling),
        "stop_strings": list(t.stop_strings),
        "n_prompt": len(t.prompt_ids),
        "n_output": len(t.output_ids),
        **{name: sums[name] for name in ("rounds", "drafted", "accepted", "seconds")},
        **vars(pack_tokens(t.prompt_ids, t.output_ids)),
    }


def panorama_values(panorama: Panorama, verifier: Verifier) -> dict[str, Any]:
    """A panorama's columns beside its chunk, with its summaries; ``verifier`` is its text's."""
    n, sums = panorama.positions, survival(panorama, verifier)
    of = ("draft", "gamma_max", "width", "depth")
    return {
        **{name: getattr(panorama, name) for name in of},
        "covers": list(panorama.covers),
        "n": n,
        "agree_count": int((panorama.text_slot[:n] == 0).sum()),
        "acceptance": float(keep_probability(panorama, verifier).mean()) if n else 0.0,
        "at_risk": compact(sums.at_risk),
        "survived": compact(sums.survived),
    }


def spec_hash(asked: Mapping[str, Any]) -> str:
    """SHA-256 of the columns that say what a recording was asked for (:class:`Asked`), hex."""
    spec = [asked[field.name] for field in fields(Asked)]
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


def trajectory_of(row: Any) -> Trajectory:
    """The value that the row of a text holds. Raises :class:`CodecError`."""
    prompt, output = unpack_tokens(row)
    asked: dict[str, Any] = {
        "sampling": Sampling(**row.sampling),
        "stop_strings": tuple(row.stop_strings),
    }
    return value_of(Trajectory, row, prompt_ids=prompt, output_ids=output, **asked)


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
    drafts: dict[str, dict[str, Extent]] = {}
    p = PanoramaChunkRow
    held = (func.min(column) for column in (p.gamma_max, p.width, p.depth))
    counted = (
        select(p.recording_id, p.draft, func.count(), *held)
        .where(p.recording_id.in_(ids))
        .group_by(p.recording_id, p.draft)
        .order_by(p.draft)
    )
    for name, draft, *extent in session.execute(counted):
        drafts.setdefault(name, {})[draft] = Extent(*extent)
    return [
        value_of(
            RecordingInfo,
            row,
            sampling=Sampling(**row.sampling),
            n_requests=int(requests.get(row.id, (0, 0))[0]),
            n_output_tokens=int(requests.get(row.id, (0, 0))[1]),
            drafts=drafts.get(row.id, {}),
        )
        for row in rows
    ]
