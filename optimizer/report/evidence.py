"""What a tuning stores for its page, beside its study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.tuning.tuned import (
    EVIDENCE,
    Candidate,
    RoundsOfOne,
    Tuned,
    TuningEvidence,
)
from spectune.runtime.policies.artifacts import Artifacts
from spectune.traces.errors import SpectuneError
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile


def put_evidence(
    store: TraceStore,
    pair_id: str,
    tuned: Tuned,
    candidates: Sequence[Candidate],
    rounds: RoundsOfOne,
    about: Mapping[str, Any],
) -> None:
    """Stores a :class:`TuningEvidence` beside the study."""
    categories = {
        c.policy.id: {
            name: round(counts.tokens_per_s, 2) for name, counts in c.executed.by_category.items()
        }
        for c in candidates
    }
    evidence = TuningEvidence(tuned=tuned, categories=categories, rounds=rounds, about=dict(about))
    document = evidence.to_json()
    store.put_artifact(EVIDENCE, document, pair_id=pair_id, provenance={"study": tuned.study})


def rounds_of_one(
    winner: Candidate,
    trace: ReplayTrace,
    profile: LatencyProfile,
    artifacts: Artifacts,
    text_of: Callable[[list[int]], str],
) -> RoundsOfOne:
    """The executed request whose text has the median length, replayed under the winner."""
    executed = {r.request_id for r in winner.executed.per_request}
    lengths = [
        (len(t.output_ids), place)
        for place, t in enumerate(trace.trajectories)
        if t.request_id in executed
    ]
    _, place = sorted(lengths)[len(lengths) // 2]
    trajectory, alone = trace.trajectories[place], trace.select([place])
    rounds: list[tuple[int, int, int]] = []
    with suppress(SpectuneError):
        replay = run_replay(
            *(alone, winner.policy, profile),
            per_round=True,
            artifacts=artifacts,
            approximate=True,
        )
        rounds = [(s.drafted, s.accepted, s.emitted) for s in replay.steps()[0]]
    text = text_of(trajectory.output_ids.tolist())
    return RoundsOfOne(request=trajectory.request_id, text=text, rounds=tuple(rounds))
