"""What a tuning stores for its page, beside its study: its results, speed by category, and the
rounds of one request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.report.words import EVIDENCE
from spectune.optimizer.tuning.tuned import Tuned
from spectune.runtime.policies.artifacts import Artifacts
from spectune.traces.errors import SpectuneError
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile


def put_evidence(
    store: TraceStore,
    pair_id: str,
    tuned: Tuned,
    rounds: Mapping[str, Any],
    about: Mapping[str, Any],
) -> None:
    """Stores the results beside the study. ``about``: facts for the page's head, ``device`` and
    ``deployment`` among them; ``load`` too where it was tuned under one."""
    document = {
        "tuned": tuned.to_json(),
        "categories": {
            c.policy.id: {
                name: round(counts.tokens_per_s, 2)
                for name, counts in c.executed.by_category.items()
            }
            for c in tuned.candidates
        },
        "rounds": dict(rounds),
        "about": dict(about),
    }
    store.put_artifact(EVIDENCE, document, pair_id=pair_id, provenance={"study": tuned.study})


def rounds_of_one(
    tuned: Tuned,
    trace: ReplayTrace,
    profile: LatencyProfile,
    artifacts: Artifacts,
    text_of: Callable[[list[int]], str],
) -> dict[str, Any]:
    """The executed request whose text has the median length, replayed under the winner: ``rounds``
    as [drafted, accepted, emitted] (none where it cannot be replayed), and its ``text``."""
    executed = {r.request_id for r in tuned.winner.executed.per_request}
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
            *(alone, tuned.winner.policy, profile),
            per_round=True,
            artifacts=artifacts,
            approximate=True,
        )
        rounds = [(s.drafted, s.accepted, s.emitted) for s in replay.steps()[0]]
    text = text_of(trajectory.output_ids.tolist())
    return {"request": trajectory.request_id, "text": text, "rounds": rounds}
