"""A bench predicts policies, and executes them, on a part of the requests: the native decoder
(:mod:`optimizer.tuning.decoder`), or an engine under a load.

Search, race, confirmation and publication are written once over it. A bench measures in *units*: of
the native decoder a unit is a request and costs its seconds; of an engine a unit is a run of its
loads with some of the requests, and costs what is to be small (seconds a token, say). Policies are
compared by ratios of costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.runtime.policies.document import Policy
from spectune.traces.cost_table import FloatArray
from spectune.traces.schema import Outcome

PartName = Literal["search", "race", "confirm"]
"""Of :class:`optimizer.tuning.parts.Parts`."""


class Result(Protocol):
    """What a bench predicts from, a replay or simulation."""

    def outcome(self) -> Outcome:
        """Its sums by request."""


@dataclass(frozen=True)
class Prediction:
    """What a bench expects of a policy: the cost of each unit, float64 [units], and ``speed``, the
    larger the better (tokens/s, or what an objective makes of a load)."""

    costs: FloatArray
    speed: float
    result: Result


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


class Bench(Protocol):
    """Where policies are predicted and executed."""

    by_size: bool
    """Whether units weigh by what they cost, so that ratios are of sums (requests), or alike, so
    that ratios are geometric means (loads)."""
    block: int
    """Units that a race executes between two looks at who is to be dropped."""
    unit: str
    """What a unit is, in the plural."""

    @property
    def gain(self) -> str:
        """How a ratio of a policy's worth to another's is told, between the ratio and the other's
        name."""

    @property
    def spread(self) -> float:
        """The standard deviation, relative, of the error of a predicted ratio of two policies."""

    def units(self, part: PartName) -> int:
        """How many units a part has."""

    def groups(self, part: PartName) -> npt.NDArray[np.int64]:
        """The number of the conversation that each unit of a part is of, int64 [units]: units of
        one are no independent samples."""

    def predict(self, policy: Policy, part: PartName) -> Prediction:
        """What to expect of a policy. Raises PolicyError or TraceError where nothing can be
        said."""

    def execute(
        self, policies: Sequence[Policy], part: PartName
    ) -> AbstractContextManager[Execution]:
        """Makes policies ready to be executed on a part, for as long as the context lasts."""

    def group(self, policy: Policy) -> str:
        """Policies of one group are executed one after the other: to go from group to group takes
        time (another server). Each its own where it takes none."""
