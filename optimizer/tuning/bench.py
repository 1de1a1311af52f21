"""A bench: where policies are predicted and executed, and, where it is :class:`Tunable`, proposed.
The native decoder is one (:mod:`optimizer.tuning.native`), an engine that is started here
(:mod:`optimizer.tuning.load_bench`) and a server that runs (:mod:`optimizer.tuning.server_bench`)
are others.

A bench is made over the recorded texts that are tuned on, and measures in *units*: of the native
decoder a unit is a request and costs its seconds; of an engine a unit is a run of its loads with
some of the requests, and costs what is to be small (seconds a token, say). Policies are compared by
ratios of costs. The pipeline (:func:`optimizer.tuning.pipeline.tune`) reads nothing of a bench but
what stands here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

from spectune.optimizer.tuning.parts import Parts
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.optimizer.tuning.tuned import AS_FAST, Candidate, RoundsOfOne
from spectune.runtime.policies.document import Policy
from spectune.runtime.progress import Progress
from spectune.traces.conversations import Index
from spectune.traces.cost_table import FloatArray
from spectune.traces.schema import Outcome
from spectune.traces.tables import Recording, Trajectory

if TYPE_CHECKING:
    from spectune.optimizer.tuning.pipeline import Raced
    from spectune.traces.tables import Publication

PartName = Literal["search", "race", "confirm"]
"""Of :class:`optimizer.tuning.parts.Parts`."""


class Predicted(Protocol):
    """What a bench predicts from, a replay or simulation."""

    def outcome(self) -> Outcome:
        """Its sums by request."""


@dataclass(frozen=True)
class Prediction:
    """What a bench expects of a policy: the cost of each unit, float64 [units], and ``speed``, the
    larger the better (tokens/s, or what an objective makes of a load)."""

    costs: FloatArray
    speed: float
    result: Predicted


@dataclass(frozen=True)
class Proposals:
    """What is to be executed: ``finalists``, the best by prediction; ``baselines`` by role, which
    are executed on every unit of the race. ``study``: the id of the stored search, which tried so
    many policies (``trials``)."""

    finalists: Sequence[Policy]
    baselines: Mapping[str, Policy]
    study: str
    trials: int


class Execution(Protocol):
    """Policies made ready to be executed on a part."""

    @property
    def texts(self) -> ComparedTexts:
        """The texts of all executions so far, compared."""

    def __call__(self, policy_id: str, unit: int) -> float:
        """Executes a policy on a unit; its cost. Raises PolicyError if the policy cannot run."""

    def outcome(self, policy_id: str, costs: FloatArray) -> Outcome:
        """What a policy did in all its executions, whose ``costs`` are float64 [units, passes], NaN
        where not executed."""


@dataclass(frozen=True)
class RecordedTexts:
    """The recorded texts that a bench is made over: their ``ordinals`` in the ``recording``, the
    number of each one's conversation (int64 [texts]), and their ``parts``."""

    recording: Recording
    trajectories: Sequence[Trajectory]
    ordinals: Sequence[int]
    conversations: Index
    parts: Parts

    @property
    def categories(self) -> list[str]:
        return [text.category for text in self.trajectories]


class Bench(ABC):
    """Where policies are predicted and executed: what a race and a confirmation read."""

    by_size: bool = True
    """Whether units weigh by what they cost, so that ratios are of sums (requests), or alike, so
    that ratios are geometric means (loads)."""
    block: int = 4
    """Units that a race executes between two looks at who is to be dropped."""
    unit: str = "requests"
    """What a unit is, in the plural."""
    clock: Callable[[], float] = staticmethod(time.perf_counter)
    """Seconds, from any moment on."""

    @property
    def gain(self) -> str:
        """How a ratio of a policy's worth to another's is told, between the ratio and the other's
        name."""
        return AS_FAST

    @property
    def spread(self) -> float:
        """The standard deviation, relative, of the error of a predicted ratio of two policies."""
        return 0.02

    @abstractmethod
    def units(self, part: PartName) -> int:
        """How many units a part has."""

    @abstractmethod
    def groups(self, part: PartName) -> Index:
        """The number of the conversation that each unit of a part is of, int64 [units]: units of
        one are no independent samples."""

    @abstractmethod
    def predict(self, policy: Policy, part: PartName) -> Prediction:
        """What to expect of a policy. Raises PolicyError or TraceError where nothing can be
        said."""

    @abstractmethod
    def execute(
        self, policies: Sequence[Policy], part: PartName
    ) -> AbstractContextManager[Execution]:
        """Makes policies ready to be executed on a part, for as long as the context lasts."""

    def group(self, policy: Policy) -> str:
        """Policies of one group are executed one after the other: to go from group to group takes
        time (another server). Each its own where it takes none."""
        return policy.id


class Tunable(Bench):
    """A bench that also proposes policies: what a tuning is done on."""

    profile_id: str = ""
    """Of the latency profile that predictions are made by, where there is one."""
    doubts: str = ""
    """What is to be said of the predictions; empty where nothing is."""

    @cached_property
    def seconds(self) -> dict[str, float]:
        """What a tuning took so far, by stage."""
        return {}

    @cached_property
    def probes(self) -> list[float]:
        """Seconds of one fixed piece of work, each time that :meth:`probe` was called, the first
        beside what predictions are made by; empty where there is no such work."""
        return []

    def probe(self) -> None:
        """Measures how fast the machine is now."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds what the block takes to :attr:`seconds`."""
        began = self.clock()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self.clock() - began

    @property
    @abstractmethod
    def texts(self) -> RecordedTexts:
        """What is tuned on. It may shrink while policies are proposed, never grow."""

    def check(self, policy: Policy) -> None:
        """Raises PolicyError for a policy that cannot be executed."""

    @abstractmethod
    def propose(self, incumbent: Policy) -> Proposals:
        """Searches by prediction, and stores the study. Raises PolicyError or TraceError where
        nothing can be searched."""

    def beside(self, raced: Raced, budget_s: float, progress: Progress) -> Mapping[str, Any]:
        """Further fields of :class:`optimizer.tuning.tuned.Tuned`, which neither race nor
        publication reads; what is executed for them takes a part of ``budget_s``."""
        return {}

    def head(self) -> dict[str, Any]:
        """Facts for the head of the page."""
        return {}

    def rounds(self, winner: Candidate) -> RoundsOfOne:
        """The rounds of one request, for the page; none where they are not known."""
        return RoundsOfOne()

    def put_in_force(self, published: Publication, tell: Callable[[str], None]) -> None:
        """Called after a publication, where what executes does not follow by itself."""
