"""What a tuning keeps for its report, beside its study: its results, the race as it went, speed by
category, and the rounds of one request."""

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

LOOKS: Final = 12
"""Moments of a race that are kept."""
DIGITS: Final = 5


def race_as_it_went(compared: Comparison, base: str) -> list[dict[str, Any]]:
    """Of each policy, at some moments until it was dropped: ``turn`` (requests executed by then,
    over all passes) and its speed over ``base``'s with its interval, of what had been executed.
    JSON-ready."""
    seconds = compared.timings.seconds
    requests, passes = seconds[base].shape
    order = np.arange(requests)[:, None] + requests * np.arange(passes)[None, :]
    executed = {p: int(order[~np.isnan(s)].max(initial=-1)) + 1 for p, s in seconds.items()}
    end = max(executed.values())
    looks = sorted({int(t) for t in np.linspace(min(BLOCK, end), end, LOOKS)})
    found = []
    for policy, last in executed.items():
        points = []
        for turn in sorted({t for t in looks if t < last} | {last} - {0}):
            part = {p: np.where(order < turn, seconds[p], np.nan) for p in (policy, base)}
            ratio = Timings(part, compared.timings.expected).ratio(policy, base)
            points.append([turn, *(None if v is None else round(v, DIGITS) for v in finite(ratio))])
        dropped = policy not in compared.survivors
        found.append({"policy": policy, "dropped": dropped, "points": points})
    return found


def rounds_of_one(
    trace: ReplayTrace,
    request: int,
    policies: Iterable[Policy],
    profile: LatencyProfile,
    artifacts: Artifacts,
    text_of: Callable[[list[int]], str],
) -> dict[str, Any]:
    """The rounds of one request (by its place in the trace) under policies, as replay knows them:
    ``rounds`` by policy id as [drafted, accepted, emitted], and ``text``, a piece per token.
    Policies that cannot be replayed round by round are left out. JSON-ready."""
    trajectory, alone = trace.trajectories[request], trace.select([request])
    rounds: dict[str, list[list[int]]] = {}
    for policy in policies:
        with suppress(SpectuneError):
            ran = run_replay(
                alone, policy, profile, per_round=True, artifacts=artifacts, approximate=True
            )
            rounds[policy.id] = [[s.drafted, s.accepted, s.emitted] for s in ran.steps()[0]]
    text = [text_of([token]) for token in trajectory.output_ids.tolist()]
    return {"request": trajectory.request_id, "text": text, "rounds": rounds}


def evidence_document(
    tuned: Tuned, compared: Comparison, rounds: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """What is stored. ``about``: whatever the report's head is to say. JSON-ready."""
    speeds = {c.policy.id: c.executed.by_category for c in tuned.candidates}
    return {
        "tuned": tuned.to_json(),
        "race": race_as_it_went(compared, tuned.winner.policy.id),
        "categories": {
            policy: {name: round(counts.tokens_per_s, 2) for name, counts in of.items()}
            for policy, of in speeds.items()
        },
        "rounds": dict(rounds),
        "about": dict(about),
    }


def middle_request(trace: ReplayTrace, names: Iterable[str]) -> int:
    """The place of the one of these requests whose text has the median length."""
    wanted = set(names)
    found = [
        (len(t.output_ids), i) for i, t in enumerate(trace.trajectories) if t.request_id in wanted
    ]
    return sorted(found)[len(found) // 2][1]
