"""What a tuning executed and decided, as it is printed, stored and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from spectune.optimizer.report.words import AS_FAST
from spectune.optimizer.tuning.confirm import Confirmation
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.optimizer.tuning.timings import finite
from spectune.runtime.policies.document import Policy
from spectune.traces.sanity import Sanity
from spectune.traces.schema import Outcome
from spectune.traces.tables import Publication

if TYPE_CHECKING:
    from spectune.optimizer.tuning.rejection import NotTried, RejectionChain


def described(policy: Policy) -> dict[str, Any]:
    """A policy for people and programs."""
    return {"id": policy.id, "label": policy.label(), "policy": policy.spelled_out()}


def is_finalist(role: str) -> bool:
    """Whether a policy of this role was proposed by the search, and is no baseline."""
    return role.startswith("finalist")


@dataclass(frozen=True)
class Candidate:
    """One raced policy beside its prediction. Speeds in tokens/s; ``ratio`` is its speed over the
    incumbent's, with a 95% interval over requests, and ``over_plain`` over autoregression's, each
    on the race's requests that both were executed on. ``raced`` is its speed over the leader's,
    projected to all of the race's requests, and ``survived`` says whether the race ended with it.
    ``units``: how many units of the bench it was executed on in the race.
    ``predicted`` is by the profile as it was measured, and None where the recording lacks what it
    is replayed from. The best of many is flattered by these:
    :class:`optimizer.tuning.confirm.Confirmation` is what counts."""

    role: str
    policy: Policy
    predicted: Outcome | None
    executed: Outcome
    ratio: tuple[float, float, float]
    over_plain: tuple[float, float, float] = (1.0, 1.0, 1.0)
    raced: tuple[float, float, float] = (1.0, 1.0, 1.0)
    survived: bool = True
    units: int = 0

    @property
    def predicted_tokens_per_s(self) -> float | None:
        return None if self.predicted is None else self.predicted.total.tokens_per_s

    def to_json(self, factor: float | None) -> dict[str, Any]:
        """``factor``: :attr:`Tuned.factor`."""
        predicted = self.predicted_tokens_per_s
        return {
            "role": self.role,
            **described(self.policy),
            "predicted_tokens_per_s": predicted,
            "predicted_after_factor_tokens_per_s": predicted and factor and predicted * factor,
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
            "left_in_race": self.survived,
            "executed_requests": self.units,
        }


@dataclass(frozen=True)
class Tuned:
    """What a tuning executed and decided, and why (``reason``). ``winner`` is to be in force: what
    ``confirmed`` compares with the incumbent on requests held out (None where the incumbent won the
    race), or the incumbent. ``published`` is the new publication; None where nothing was to be
    published, or where that was ``blocked`` (why).
    ``common_factor``: :func:`optimizer.profiles.common_factor` of the race.
    ``earlier_confirmations``: on the requests that were held out, by tunings before.
    ``rejection``: the best chain of that verifier, or why it was not tried; None at temperature 0,
    where it is in use, and on an engine. ``executed``: of an engine what was predicted and measured
    of each candidate, by load. ``probes``: seconds of one fixed piece of work, beside the profile,
    before and after the race, and after the confirmation. ``unit``, ``gain``: as the bench has
    them: a unit need not be a request, nor a ratio one of speeds."""

    winner: Candidate
    incumbent: Candidate
    candidates: tuple[Candidate, ...]
    recording: str
    study: str
    texts: ComparedTexts
    search_requests: int
    trials: int
    reason: str
    profile: str = ""
    published: Publication | None = None
    confirmed: Confirmation | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    workload: Sanity = field(default_factory=Sanity)
    blocked: str = ""
    common_factor: float = 1.0
    rejection: RejectionChain | NotTried | None = None
    earlier_confirmations: int = 0
    executed: Sequence[Mapping[str, Any]] = ()
    probes: tuple[float, ...] = ()
    unit: str = "requests"
    gain: str = AS_FAST

    @property
    def test_requests(self) -> int:
        """Most units that a policy was executed on in the race."""
        return max(c.units for c in self.candidates)

    @property
    def _predicted_ratios(self) -> list[float]:
        """Predicted over executed speed of each policy of which one was predicted."""
        unique = {c.policy.id: c for c in self.candidates}.values()
        return [
            c.predicted_tokens_per_s / c.executed.total.tokens_per_s
            for c in unique
            if c.predicted_tokens_per_s and c.executed.total.tokens_per_s
        ]

    @property
    def factor(self) -> float | None:
        """The common factor where predicted speeds are nearer to those executed after it: in the
        median, and the farthest no farther. None where they are not."""
        ratios = self._predicted_ratios
        if not ratios:
            return None
        (median_before, largest_before), (median_after, largest_after) = (
            _errors(ratios, factor) for factor in (1.0, self.common_factor)
        )
        helps = median_after < median_before and largest_after <= largest_before
        return self.common_factor if helps else None

    @property
    def prediction(self) -> dict[str, Any] | None:
        """How far predicted speeds are off those executed, relative, of the policies of which one
        was predicted: as predicted, and after one common factor that is fitted to the same
        executions, where that helps. None where nothing was predicted."""
        ratios, factor = self._predicted_ratios, self.factor
        if not ratios:
            return None
        before = _errors(ratios)
        after = (None, None) if factor is None else _errors(ratios, factor)
        return {
            "policies": len(ratios),
            "median_error": before[0],
            "largest_error": before[1],
            "common_factor": factor,
            "median_error_after_factor": after[0],
            "largest_error_after_factor": after[1],
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
        winner, factor = self.winner, self.factor
        baselines = [c for c in self.candidates if not is_finalist(c.role)]
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
            "earlier_confirmations": self.earlier_confirmations,
            "published": self.published and self.published.told(),
            "rejection": self.rejection and self.rejection.to_json(),
            "reason": self.reason,
            "blocked": self.blocked or None,
            "recording": self.recording,
            "profile": self.profile,
            "study": self.study,
            "search_requests": self.search_requests,
            "test_requests": self.test_requests,
            "unit": self.unit,
            "gain": self.gain,
            "trials": self.trials,
            "texts": self.texts.to_json(),
            "workload": self.workload.to_json(),
            "seconds": dict(self.seconds),
            "executed": list(self.executed),
            "probes_s": list(self.probes),
        }


def _errors(ratios: Sequence[float], factor: float = 1.0) -> tuple[float, float]:
    """Median and largest distance from 1 of ratios times a factor."""
    errors = [abs(ratio * factor - 1) for ratio in ratios]
    return median(errors), max(errors)
