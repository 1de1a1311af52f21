"""What a tuning stores for its page, beside its study: its results, the race as it went, speed by
category, and the rounds of one request. All is JSON-ready."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np

from spectune.optimizer.execute import BLOCK, Comparison
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.timings import Timings, finite
from spectune.optimizer.verdict import Tuned
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import SpectuneError
from spectune.traces.tables import LatencyProfile

POINTS: Final = 12
"""Moments of a race that are stored."""


def race_as_it_went(compared: Comparison, base: str) -> list[dict[str, Any]]:
    """For each policy whether it was ``dropped``, and ``points`` until its last execution: requests
    executed by then over all passes, its speed over ``base``'s on them, and the interval's ends."""
    seconds = compared.timings.seconds
    requests, passes = seconds[base].shape
    order = np.arange(requests)[:, None] + requests * np.arange(passes)[None, :]
    executed = {p: int(order[~np.isnan(s)].max(initial=-1)) + 1 for p, s in seconds.items()}
    end = max(executed.values())
    moments = {int(moment) for moment in np.linspace(min(BLOCK, end), end, POINTS)}
    race = []
    for policy, last in executed.items():
        points = []
        for moment in sorted({m for m in moments if m < last} | {last} - {0}):
            part = {p: np.where(order < moment, seconds[p], np.nan) for p in (policy, base)}
            ratio = finite(Timings(part, compared.timings.expected).ratio(policy, base))
            points.append([moment, *(None if v is None else round(v, 5) for v in ratio)])
        dropped = policy not in compared.survivors
        race.append({"policy": policy, "dropped": dropped, "points": points})
    return race


def rounds_of_one(
    trace: ReplayTrace,
    request: int,
    policies: Iterable[Policy],
    profile: LatencyProfile,
    artifacts: Artifacts,
    text_of: Callable[[list[int]], str],
) -> dict[str, Any]:
    """The rounds of one request (by its place in the trace) as replayed under policies: ``rounds``
    by policy id as [drafted, accepted, emitted], and ``text``, a piece per token. Policies that
    cannot be replayed round by round are absent."""
    trajectory, alone = trace.trajectories[request], trace.select([request])
    rounds: dict[str, list[list[int]]] = {}
    for policy in policies:
        with suppress(SpectuneError):
            replay = run_replay(
                alone, policy, profile, per_round=True, artifacts=artifacts, approximate=True
            )
            rounds[policy.id] = [[s.drafted, s.accepted, s.emitted] for s in replay.steps()[0]]
    text = [text_of([token]) for token in trajectory.output_ids.tolist()]
    return {"request": trajectory.request_id, "text": text, "rounds": rounds}


def evidence_document(
    tuned: Tuned, compared: Comparison, rounds: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """What is stored. ``about``: facts for the page's head, ``device`` among them."""
    speeds = {c.policy.id: c.executed.by_category for c in tuned.candidates}
    return {
        "tuned": tuned.to_json(),
        "race": race_as_it_went(compared, tuned.winner.policy.id),
        "categories": {
            policy: {name: round(counts.tokens_per_s, 2) for name, counts in categories.items()}
            for policy, categories in speeds.items()
        },
        "rounds": dict(rounds),
        "about": dict(about),
    }


def middle_request(trace: ReplayTrace, names: Iterable[str]) -> int:
    """The place of the one of these requests whose text has the median length."""
    lengths = {t.request_id: (len(t.output_ids), i) for i, t in enumerate(trace.trajectories)}
    ordered = sorted(lengths[name] for name in set(names) & lengths.keys())
    return ordered[len(ordered) // 2][1]
