"""What a tuning executed and decided: one value, which is stored, printed, and drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, computed_field

from spectune.optimizer.tuning.confirmation import Confirmation, Ends, Interval, ends_of
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.traces.sanity import Sanity
from spectune.traces.schema import Outcome
from spectune.traces.tables import Publication

EVIDENCE: Final = "tuning"
"""The kind of artifact that holds a :class:`TuningEvidence`."""
AS_FAST: Final = "times as fast as"
"""Of two policies that do the same work, in more or less time."""
AT_A_RATE: Final = "times the tokens/s of"
"""Where requests come at a rate of their own: a server that keeps up serves no more tokens/s."""
GAINS: Final = {
    "throughput": AS_FAST,
    "tpot": "times as fast per output token as",
    "goodput": "times the goodput of",
}
"""By objective, what a ratio of two policies' worth says."""


def is_finalist(role: str) -> bool:
    """Whether a policy of this role was proposed by the search, and is no baseline."""
    return role.startswith("finalist")


def _policy(document: Any) -> Policy:
    return document if isinstance(document, Policy) else parse_policy(document)


class Stored(BaseModel):
    """A value that is stored as JSON. Keys that it does not know are not read: properties are
    stored too, for SQL and programs."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; a number that is not finite is None."""
        document: dict[str, Any] = json.loads(self.model_dump_json())
        return document


def _document(policy: Policy) -> dict[str, Any]:
    return policy.spelled_out()


class NamedPolicy(Stored):
    """A policy, with its id and label."""

    policy: Annotated[Policy, PlainValidator(_policy), PlainSerializer(_document)]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def id(self) -> str:
        return self.policy.id

    @computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        return self.policy.label()


class RacedPolicy(NamedPolicy):
    """One policy of the race beside its prediction. Speeds in tokens/s, intervals of 95% over
    requests. ``ratio_to_incumbent`` and ``ratio_to_autoregressive`` are its speed over theirs on
    the race's requests that both were executed on; ``ratio_to_leader`` is projected to all of the
    race's requests. ``left_in_race``: whether the race ended with it; ``executed_requests``: how
    many units of the bench it was executed on. Predictions are by the profile as it was measured,
    and None where the recording lacks what the policy is replayed from; those after the factor
    (:attr:`PredictionErrors.common_factor`) None where it does not help. The best of many is
    flattered by these ratios: :class:`optimizer.tuning.confirm.Confirmation` is what counts."""

    role: str
    predicted_tokens_per_s: float | None
    predicted_after_factor_tokens_per_s: float | None
    measured_tokens_per_s: float
    measured_interval: Ends
    mean_accepted_length: float
    latency: dict[str, Any] | None
    ratio_to_incumbent: float
    ratio_interval: Ends
    ratio_to_autoregressive: float
    ratio_to_autoregressive_interval: Ends
    ratio_to_leader: float
    ratio_to_leader_interval: Ends
    left_in_race: bool
    executed_requests: int


@dataclass(frozen=True)
class Candidate:
    """A policy of the race with all that was predicted and executed of it, by request;
    :class:`RacedPolicy` is what is kept of it, and says what the ratios are."""

    role: str
    policy: Policy
    predicted: Outcome | None
    executed: Outcome
    ratio: Interval
    over_plain: Interval = (1.0, 1.0, 1.0)
    raced: Interval = (1.0, 1.0, 1.0)
    survived: bool = True
    units: int = 0

    @property
    def predicted_tokens_per_s(self) -> float | None:
        return None if self.predicted is None else self.predicted.total.tokens_per_s

    def kept(self, factor: float | None) -> RacedPolicy:
        """``factor``: :attr:`PredictionErrors.common_factor`."""
        predicted, executed = self.predicted_tokens_per_s, self.executed.total
        return RacedPolicy(
            policy=self.policy,
            role=self.role,
            predicted_tokens_per_s=predicted,
            predicted_after_factor_tokens_per_s=predicted and factor and predicted * factor,
            measured_tokens_per_s=executed.tokens_per_s,
            measured_interval=self.executed.tokens_per_s_interval(),
            mean_accepted_length=executed.mean_accepted_length,
            latency=self.executed.latency(),
            ratio_to_incumbent=self.ratio[0],
            ratio_interval=ends_of(self.ratio),
            ratio_to_autoregressive=self.over_plain[0],
            ratio_to_autoregressive_interval=ends_of(self.over_plain),
            ratio_to_leader=self.raced[0],
            ratio_to_leader_interval=ends_of(self.raced),
            left_in_race=self.survived,
            executed_requests=self.units,
        )


class PredictionErrors(Stored):
    """How far predicted speeds are off those executed, relative, of the ``policies`` of which one
    was predicted: as predicted, and after one common factor that is fitted to the same executions.
    ``common_factor`` and what is after it are None where the factor does not help."""

    policies: int
    median_error: float
    largest_error: float
    common_factor: float | None = None
    median_error_after_factor: float | None = None
    largest_error_after_factor: float | None = None

    @classmethod
    def of(cls, candidates: Sequence[Candidate], factor: float) -> PredictionErrors | None:
        """None where nothing was predicted. ``factor``: :func:`optimizer.profiles.common_factor`
        of the race. It helps where predictions are nearer after it in the median, and the farthest
        is no farther."""
        ratios = [
            c.predicted_tokens_per_s / c.executed.total.tokens_per_s
            for c in {c.policy.id: c for c in candidates}.values()
            if c.predicted_tokens_per_s and c.executed.total.tokens_per_s
        ]
        if not ratios:
            return None
        (middle, largest), (middle_after, largest_after) = (
            (median(errors), max(errors))
            for errors in ([abs(ratio * by - 1) for ratio in ratios] for by in (1.0, factor))
        )
        if middle_after >= middle or largest_after > largest:
            return cls(policies=len(ratios), median_error=middle, largest_error=largest)
        return cls(
            policies=len(ratios),
            median_error=middle,
            largest_error=largest,
            common_factor=factor,
            median_error_after_factor=middle_after,
            largest_error_after_factor=largest_after,
        )


class RejectionChain(NamedPolicy):
    """The best chain of the verifier ``rejection`` beside the race's winner, ``beside``, which
    ``coupled`` verifies.

    Ratios are its speed over that one's in the geometric mean of ``requests`` held out to confirm,
    by seconds a token, as its texts are others; ``predicted_ratio`` is None where that one cannot
    be replayed."""

    beside: NamedPolicy
    predicted_ratio: float | None
    executed_ratio: float
    executed_interval: Ends
    predicted_mean_accepted_length: float
    executed_mean_accepted_length: float
    requests: int


class RejectionNotTried(Stored):
    """Why there is no :class:`RejectionChain`."""

    not_tried: str


class PublishedAs(Stored):
    """A publication, by its version."""

    version: int
    policy: str
    deployment: str


class Tuned(Stored):
    """What a tuning executed and decided, and why (``reason``).

    ``winner`` is to be in force: what ``confirmed`` compares with the incumbent on requests held
    out (None where the incumbent won the race), or the incumbent; ``predicted`` and ``measured``
    are its speed and counts, and ``ratio_to_incumbent`` its speed over the incumbent's with an
    interval, as confirmed (1 where the incumbent stays). ``published`` is None where nothing was to
    be published, or where that was ``blocked`` (why).

    ``earlier_confirmations``: on the requests that were held out, by tunings before. ``rejection``:
    the best chain of that verifier, or why it was not tried; None at temperature 0, where it is in
    use, and on an engine. ``executed``: of an engine what was predicted and measured of each
    candidate, by load. ``probes_s``: seconds of one fixed piece of work, beside the profile, before
    and after the race, and after the confirmation. ``unit``, ``gain``: as the bench has them: a
    unit need not be a request, nor a ratio one of speeds. ``trials``: how many policies were
    replayed."""

    winner: NamedPolicy
    candidates: tuple[RacedPolicy, ...]
    predicted: dict[str, Any] | None
    measured: dict[str, Any]
    prediction: PredictionErrors | None
    ratio_to_incumbent: tuple[float, float | None, float | None]
    confirmed: Confirmation | None = None
    reason: str
    published: PublishedAs | None = None
    blocked: str = ""
    recording: str
    profile: str = ""
    study: str
    search_requests: int
    trials: int
    texts: ComparedTexts
    workload: Sanity = Sanity()
    earlier_confirmations: int = 0
    rejection: RejectionChain | RejectionNotTried | None = None
    executed: tuple[dict[str, Any], ...] = ()
    probes_s: tuple[float, ...] = ()
    seconds: dict[str, float] = {}
    unit: str = "requests"
    gain: str = AS_FAST

    @classmethod
    def of(
        cls,
        winner: Candidate,
        candidates: Sequence[Candidate],
        confirmed: Confirmation | None = None,
        *,
        common_factor: float = 1.0,
        **more: Any,
    ) -> Tuned:
        """``candidates``: the incumbent by that role among them. ``common_factor``: that of the
        race (:func:`optimizer.profiles.common_factor`). ``more``: further fields."""
        prediction = PredictionErrors.of(candidates, common_factor)
        factor = None if prediction is None else prediction.common_factor
        ratio = winner.ratio[0], *ends_of(winner.ratio)
        if confirmed is not None and confirmed.id == winner.policy.id:
            ratio = confirmed.ratio, *confirmed.interval
        return cls(
            winner=NamedPolicy(policy=winner.policy),
            candidates=tuple(c.kept(factor) for c in candidates),
            predicted=None if winner.predicted is None else winner.predicted.to_json(),
            measured=winner.executed.to_json(),
            prediction=prediction,
            ratio_to_incumbent=ratio,
            confirmed=confirmed,
            **more,
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def baselines(self) -> dict[str, RacedPolicy]:
        """By role, those that the search did not propose."""
        return {c.role: c for c in self.candidates if not is_finalist(c.role)}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def test_requests(self) -> int:
        """Most units that a policy was executed on in the race."""
        return max(c.executed_requests for c in self.candidates)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def confirm_requests(self) -> int:
        return self.confirmed.requests if self.confirmed else 0

    @property
    def incumbent(self) -> RacedPolicy:
        return self.baselines["incumbent"]

    @property
    def policies(self) -> dict[str, RacedPolicy]:
        """The candidates by the id of their policy: of one that has several roles the last."""
        return {c.id: c for c in self.candidates}

    @property
    def deploys(self) -> bool:
        """Whether a policy is to take the incumbent's place."""
        return self.winner.id != self.incumbent.id


class RoundsOfOne(Stored):
    """One executed request, replayed under the winner: ``rounds`` as [drafted, accepted, emitted],
    none where it cannot be replayed."""

    request: str = ""
    text: str = ""
    rounds: tuple[tuple[int, int, int], ...] = ()


class TuningEvidence(Stored):
    """What a tuning stores beside its study, for its page. ``categories``: tokens/s by policy id
    and category of request; ``about``: facts for the page's head, ``device`` and ``deployment``
    among them, and ``load`` where it was tuned under one."""

    tuned: Tuned
    categories: dict[str, dict[str, float]]
    rounds: RoundsOfOne
    about: dict[str, Any]


def tuned_of(publication: Publication) -> Tuned | None:
    """The tuning that a publication is the result of; None of one that none made."""
    evidence: Mapping[str, Any] = publication.evidence
    return Tuned.model_validate(evidence) if "winner" in evidence else None


def proof_of(evidence: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The ``ratio`` and ``interval`` by which what was published was proved: of the last look of a
    rollout, or of what a tuning confirmed; None without either."""
    looks = (evidence.get("rollout") or {}).get("looks") or [evidence.get("confirmed") or {}]
    return looks[-1] if "ratio" in looks[-1] else None


def proof_in_words(proof: Mapping[str, Any]) -> str:
    """A proof's ratio, with the ends of its interval where it has both."""
    ends = [end for end in proof["interval"] or () if end is not None]
    interval = f" ({ends[0]:.2f} to {ends[1]:.2f})" if len(ends) == 2 else ""
    return f"{proof['ratio']:.2f}{interval}"
