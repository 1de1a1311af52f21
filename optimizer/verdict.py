"""What a race and the predictions beside it say: which policy is fastest, and whether that is beyond noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spectune.optimizer.execute import Comparison
from spectune.optimizer.search import TIE, complexity
from spectune.runtime.policies.document import AUTOREGRESSIVE, AnyPolicy
from spectune.traces.sanity import Sanity
from spectune.traces.schema import Outcome
from spectune.traces.store import Publication


def finite(values: Sequence[float]) -> list[float | None]:
    """For JSON, which has no infinity: an interval's end that is not known is None."""
    return [v if math.isfinite(v) else None for v in values]


@dataclass(frozen=True)
class Candidate:
    """One executed policy beside its prediction. Speeds in tokens/s; ``ratio`` is its speed over the incumbent's, with a 95%
    interval over requests, and ``over_plain`` over autoregression's, each on the requests that both were executed on. ``raced`` is its
    speed over the leader's of the race, projected to the whole workload, and ``left`` says whether the race ended with it."""

    role: str
    policy: AnyPolicy
    predicted: Outcome
    executed: Outcome
    ratio: tuple[float, float, float]
    over_plain: tuple[float, float, float] = (1.0, 1.0, 1.0)
    raced: tuple[float, float, float] = (1.0, 1.0, 1.0)
    left: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "id": self.policy.id,
            "label": self.policy.label(),
            "policy": self.policy.spelled_out(),
            "predicted_tokens_per_s": self.predicted.total.tokens_per_s,
            "measured_tokens_per_s": self.executed.total.tokens_per_s,
            "measured_interval": list(self.executed.tokens_per_s_interval()),
            "mean_accepted_length": self.executed.total.mean_accepted_length,
            "latency": self.executed.latency(),
            "ratio_to_incumbent": self.ratio[0],
            "ratio_interval": finite(self.ratio[1:]),
            "ratio_to_autoregressive": self.over_plain[0],
            "ratio_to_autoregressive_interval": finite(self.over_plain[1:]),
            "ratio_to_leader": self.raced[0],
            "ratio_to_leader_interval": finite(self.raced[1:]),
            "left_in_race": self.left,
            "executed_requests": len(self.executed.per_request),
        }


@dataclass(frozen=True)
class Tuned:
    """What a tuning found and did. ``published`` is the new publication, None when the incumbent stays (``reason`` says why);
    ``beyond`` is :meth:`optimizer.search.Study.left_out`."""

    winner: Candidate
    incumbent: Candidate
    candidates: tuple[Candidate, ...]
    recording: str
    profile: str
    study: str
    texts_differ: int
    test_requests: int
    search_requests: int
    trials: int
    reason: str
    published: Publication | None
    seconds: Mapping[str, float] = field(default_factory=dict)
    beyond: Mapping[str, Any] = field(default_factory=dict)
    workload: Sanity = field(default_factory=Sanity)

    def to_json(self) -> dict[str, Any]:
        """The contract's keys ``winner``, ``predicted``, ``measured``, ``baselines``, ``published``, and the evidence."""
        return {
            "winner": {
                "id": self.winner.policy.id,
                "label": self.winner.policy.label(),
                "policy": self.winner.policy.spelled_out(),
            },
            "predicted": self.winner.predicted.to_json(),
            "measured": self.winner.executed.to_json(),
            "baselines": {c.role: c.to_json() for c in self.candidates if not c.role.startswith("finalist")},
            "candidates": [c.to_json() for c in self.candidates],
            "ratio_to_incumbent": finite(self.winner.ratio),
            "published": None
            if self.published is None
            else {
                "version": self.published.version,
                "policy": self.published.policy_id,
                "deployment": self.published.deployment,
            },
            "reason": self.reason,
            "recording": self.recording,
            "profile": self.profile,
            "study": self.study,
            "search_requests": self.search_requests,
            "test_requests": self.test_requests,
            "trials": self.trials,
            "texts_differ": self.texts_differ,
            "beyond_the_recording": dict(self.beyond),
            "workload": self.workload.to_json(),
            "seconds": dict(self.seconds),
        }


def candidates_of(
    roles: Mapping[str, AnyPolicy], compared: Comparison, predicted: Mapping[str, Outcome], incumbent: AnyPolicy
) -> list[Candidate]:
    """Those who raced, by role, each beside its prediction (by policy id)."""
    leader = compared.timings.leader(compared.survivors)
    return [
        Candidate(
            role,
            policy,
            predicted[policy.id],
            compared.outcomes[policy.id],
            compared.ratio(policy.id, incumbent.id),
            compared.ratio(policy.id, AUTOREGRESSIVE.id),
            compared.ratio(policy.id, leader, projected=True),
            policy.id in compared.survivors,
        )
        for role, policy in roles.items()
    ]


def fastest_of(candidates: Sequence[Candidate], compared: Comparison, spread: float) -> Candidate:
    """The fastest on the whole workload of those that the race did not drop (:func:`_estimate`); of those that are as fast, within 1%
    with their whole interval, the simplest kind. Windows of one kind are equally simple whatever their length."""
    left = [c for c in candidates if c.left]
    fastest = max(left, key=lambda c: _estimate(c, left[0], compared, spread))
    tied = []
    for candidate in left:
        lead, low, high = compared.ratio(fastest.policy.id, candidate.policy.id, projected=True)
        if candidate.policy.id == fastest.policy.id or (low <= 1.0 and high <= 1.0 + TIE):
            tied.append((complexity(candidate.policy)[:-1], lead, candidate))
    return min(tied, key=lambda t: t[:2])[2]


def _estimate(candidate: Candidate, base: Candidate, compared: Comparison, spread: float) -> float:
    """Log speed over ``base``, :func:`weighed` by the ``spread`` of predicted ratios. Where execution is precise it decides alone; where
    it cannot tell two policies apart, prediction, which knows their rounds exactly, says more than noise."""
    if candidate.policy.id == base.policy.id:
        return 0.0
    predicted = candidate.predicted.total.tokens_per_s / max(1e-12, base.predicted.total.tokens_per_s)
    return weighed(compared.ratio(candidate.policy.id, base.policy.id, projected=True), predicted, spread)


def weighed(executed: tuple[float, float, float], predicted: float, predicted_spread: float) -> float:
    """Logarithm of a speed-up: as executed (ratio, 95% interval) and as predicted, each weighed by the inverse of its variance."""
    ratio, low, high = executed
    if not (low > 0.0 and math.isfinite(high)) or predicted <= 0.0:
        return math.log(ratio)
    spread = max(1e-6, math.log(high / low) / (2 * 1.96))
    of_executed, of_predicted = spread**-2, predicted_spread**-2
    return (of_executed * math.log(ratio) + of_predicted * math.log(predicted)) / (of_executed + of_predicted)


def verdict(winner: Candidate, incumbent: Candidate, published: bool) -> tuple[str, Candidate, bool]:
    """(why, the candidate to be in force, whether that is to be published)."""
    ratio, low, high = winner.ratio
    stays = "the incumbent stays" if published else "autoregression is published"
    if winner.policy.id == incumbent.policy.id:
        return f"nothing executed is faster than the incumbent; {stays}", incumbent, not published
    shown = f"{ratio:.3f} times the incumbent's speed (95% interval {low:.3f} to {high:.3f})"
    if not math.isfinite(low) or low <= 1.0:
        return f"{shown}: not beyond noise; {stays}", incumbent, not published
    return shown, winner, True
