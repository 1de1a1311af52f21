"""What a race, the predictions beside it and a confirmation say: which policy is fastest, and
whether that is beyond noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from spectune.optimizer.confirm import Confirmation
from spectune.optimizer.race import Comparison
from spectune.optimizer.spaces import complexity
from spectune.optimizer.texts import ComparedTexts
from spectune.optimizer.timings import TIE, Timings, finite
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, PromptPolicy
from spectune.traces.sanity import Sanity
from spectune.traces.schema import Outcome
from spectune.traces.tables import Publication


def described(policy: Policy) -> dict[str, Any]:
    """A policy for people and programs."""
    return {"id": policy.id, "label": policy.label(), "policy": policy.spelled_out()}


@dataclass(frozen=True)
class Candidate:
    """One raced policy beside its prediction. Speeds in tokens/s; ``ratio`` is its speed over the
    incumbent's, with a 95% interval over requests, and ``over_plain`` over autoregression's, each
    on the race's requests that both were executed on. ``raced`` is its speed over the leader's,
    projected to all of the race's requests, and ``left`` says whether the race ended with it.
    ``predicted`` is by the profile as it was measured, and None where the recording lacks what it
    is replayed from. The best of many is flattered by these:
    :class:`optimizer.confirm.Confirmation` is what counts."""

    role: str
    policy: Policy
    predicted: Outcome | None
    executed: Outcome
    ratio: tuple[float, float, float]
    over_plain: tuple[float, float, float] = (1.0, 1.0, 1.0)
    raced: tuple[float, float, float] = (1.0, 1.0, 1.0)
    left: bool = True

    @property
    def predicted_tokens_per_s(self) -> float | None:
        return None if self.predicted is None else self.predicted.total.tokens_per_s

    def to_json(self, common_factor: float) -> dict[str, Any]:
        """``common_factor``: :attr:`Tuned.common_factor`."""
        predicted = self.predicted_tokens_per_s
        return {
            "role": self.role,
            **described(self.policy),
            "predicted_tokens_per_s": predicted,
            "predicted_after_factor_tokens_per_s": predicted and predicted * common_factor,
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
    """What a tuning found and did. ``published`` is the new publication, None when the incumbent
    stays (``reason`` says why), or version ``superseded_by`` that came into force meanwhile;
    ``confirmed`` is what the race's winner was against the incumbent on requests held out, None
    where that is the incumbent; ``refused``: why the deployment's engine cannot run it; ``beyond``
    is :meth:`optimizer.search.Study.left_out`; ``common_factor``:
    :func:`optimizer.profiles.common_factor` of the race."""

    winner: Candidate
    incumbent: Candidate
    candidates: tuple[Candidate, ...]
    recording: str
    profile: str
    study: str
    texts: ComparedTexts
    test_requests: int
    search_requests: int
    trials: int
    reason: str
    published: Publication | None
    confirmed: Confirmation | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    beyond: Mapping[str, Any] = field(default_factory=dict)
    workload: Sanity = field(default_factory=Sanity)
    superseded_by: int | None = None
    refused: str = ""
    common_factor: float = 1.0

    @property
    def prediction(self) -> dict[str, Any] | None:
        """How far predicted speeds are off those executed, relative, of the policies of which one
        was predicted: as predicted, and after one common factor that is fitted to the same
        executions. None where nothing was predicted."""
        unique = {c.policy.id: c for c in self.candidates}.values()
        ratios = [
            c.predicted_tokens_per_s / c.executed.total.tokens_per_s
            for c in unique
            if c.predicted_tokens_per_s and c.executed.total.tokens_per_s
        ]
        if not ratios:
            return None
        before = [abs(ratio - 1) for ratio in ratios]
        after = [abs(ratio * self.common_factor - 1) for ratio in ratios]
        return {
            "policies": len(ratios),
            "median_error": median(before),
            "largest_error": max(before),
            "common_factor": self.common_factor,
            "median_error_after_factor": median(after),
            "largest_error_after_factor": max(after),
        }

    @property
    def ratio(self) -> tuple[float, float, float]:
        """The winner's speed over the incumbent's and its interval, as confirmed; 1 where the
        incumbent stays."""
        confirmed = self.confirmed
        if confirmed is not None and confirmed.winner == self.winner.policy.id:
            return confirmed.ratio
        return self.winner.ratio

    def to_json(self) -> dict[str, Any]:
        """The contract's keys ``winner``, ``predicted``, ``measured``, ``baselines``,
        ``published``, and the evidence."""
        winner, factor = self.winner, self.common_factor
        baselines = [c for c in self.candidates if not c.role.startswith("finalist")]
        return {
            "winner": described(winner.policy),
            "predicted": winner.predicted and winner.predicted.to_json(),
            "measured": winner.executed.to_json(),
            "prediction": self.prediction,
            "baselines": {c.role: c.to_json(factor) for c in baselines},
            "candidates": [c.to_json(factor) for c in self.candidates],
            "ratio_to_incumbent": finite(self.ratio),
            "confirmed": self.confirmed and self.confirmed.to_json(),
            "confirm_requests": self.confirmed.requests if self.confirmed else 0,
            "published": self.published and self.published.told(),
            "reason": self.reason,
            "superseded_by": self.superseded_by,
            "refused": self.refused or None,
            "recording": self.recording,
            "profile": self.profile,
            "study": self.study,
            "search_requests": self.search_requests,
            "test_requests": self.test_requests,
            "trials": self.trials,
            "texts": self.texts.to_json(),
            "beyond_the_recording": dict(self.beyond),
            "workload": self.workload.to_json(),
            "seconds": dict(self.seconds),
        }


def candidates_of(
    roles: Mapping[str, Policy],
    compared: Comparison,
    predicted: Mapping[str, Outcome],
    incumbent: Policy,
) -> list[Candidate]:
    """Those who raced, by role, each beside its prediction (by policy id)."""
    leader = compared.timings.leader(compared.survivors)
    return [
        Candidate(
            role,
            policy,
            predicted.get(policy.id),
            compared.outcomes[policy.id],
            compared.timings.ratio(policy.id, incumbent.id),
            compared.timings.ratio(policy.id, AUTOREGRESSIVE.id),
            compared.timings.ratio(policy.id, leader, projected=True),
            policy.id in compared.survivors,
        )
        for role, policy in roles.items()
    ]


def fastest_of(
    policies: Sequence[Policy], timings: Timings, predicted: Mapping[str, float], spread: float
) -> Policy:
    """The fastest of the policies that a race did not drop, by execution and ``predicted`` tokens/s
    (by id, where known; ``spread``: of their ratios) together; of those that it is not faster than
    beyond noise, and that are predicted within a tie, the simplest. A tree of at most three nodes
    beats what is simpler beyond noise or not at all."""
    first = policies[0]

    def estimate(policy: Policy) -> float:
        if policy.id == first.id:
            return 0.0
        speed, base = predicted.get(policy.id), predicted.get(first.id)
        ratio = 0.0 if speed is None or base is None else speed / max(1e-12, base)
        return weighed(timings.ratio(policy.id, first.id, projected=True), ratio, spread)

    fastest = max(policies, key=estimate)
    tied = [fastest]
    for policy in policies:
        _, low, high = timings.ratio(fastest.id, policy.id, projected=True)
        close = predicted.get(fastest.id, math.inf) <= predicted.get(policy.id, 0.0) * (1 + TIE)
        if low <= 1.0 and (close or high <= 1.0 + TIE or _is_slight(fastest)):
            tied.append(policy)
    return min(tied, key=lambda p: (complexity(p), -estimate(p)))


def _is_slight(policy: Policy) -> bool:
    """Whether a policy is a tree of at most three nodes."""
    if isinstance(policy, PromptPolicy) or not policy.is_tree:
        return False
    nodes = getattr(policy.growth, "paths", None) or range(policy.select.top_n or 4)
    return len(nodes) <= 3


def weighed(
    executed: tuple[float, float, float], predicted: float, predicted_spread: float
) -> float:
    """Logarithm of a speed-up: as executed (ratio, 95% interval) and as predicted, each weighed by
    the inverse of its variance."""
    ratio, low, high = executed
    if not (low > 0.0 and math.isfinite(high)) or predicted <= 0.0:
        return math.log(ratio)
    spread = max(1e-6, math.log(high / low) / (2 * 1.96))
    of_executed, of_predicted = spread**-2, predicted_spread**-2
    both = of_executed * math.log(ratio) + of_predicted * math.log(predicted)
    return both / (of_executed + of_predicted)


@dataclass(frozen=True)
class Decision:
    """Which candidate is to be in force, why, and whether that is to be published now."""

    candidate: Candidate
    reason: str
    may_publish: bool


def decide(
    winner: Candidate,
    incumbent: Candidate,
    confirmed: Confirmation | None,
    *,
    in_force: bool,
    publish: bool = True,
) -> Decision:
    """What follows from a confirmation. ``in_force``: whether the incumbent is published already;
    ``publish``: whether this tuning publishes anything."""
    if confirmed is not None and not confirmed.against:
        return Decision(winner, str(confirmed), publish)
    reason = "nothing executed is faster than the incumbent"
    if confirmed is not None:
        reason = f"{winner.policy.label()} was {confirmed}: {confirmed.against}"
    first = "autoregression is published" if publish else "decoding without a draft stays"
    stays = "the incumbent stays" if in_force else first
    return Decision(incumbent, f"{reason}; {stays}", publish and not in_force)
