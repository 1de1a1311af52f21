"""What an execution under load proves of its best policy, and putting that in force."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy.special import stdtrit

from spectune.optimizer.confirm import FLOOR, LEVEL
from spectune.optimizer.deployment import Place, Superseded, publish_winner, tuned_for
from spectune.optimizer.executed_load import MOST_PASSES, Executed
from spectune.optimizer.simulate.load import Objective
from spectune.optimizer.timings import finite
from spectune.optimizer.under_load import UnderLoad
from spectune.optimizer.verdict import described
from spectune.runtime.policies.document import Policy
from spectune.traces.cost_table import FloatArray
from spectune.traces.store import TraceStore
from spectune.traces.tables import Publication

ENOUGH: Final = 4
"""Passes whose interval is narrow enough to prove a common gain; of two and three it is many times
as wide."""


@dataclass(frozen=True)
class Proof:
    """How good the ``winner`` was beside the ``incumbent`` by an objective: the ratio over the
    ``passes`` in which both were executed in turn, averaged over the loads (both geometrically),
    and its :data:`optimizer.confirm.LEVEL` interval, Student's of the passes' logarithms. At that
    level the best of five is wrongly found better at most once in forty."""

    winner: Policy
    incumbent: Policy
    ratio: tuple[float, float, float]
    passes: int

    @property
    def against(self) -> str:
        """What speaks against a publication; empty where nothing does."""
        if self.winner.id == self.incumbent.id:
            return f"nothing executed is better than {self.incumbent.label()}"
        if self.passes < 2:
            return "one pass has no interval, so that nothing is proved"
        if self.ratio[1] <= FLOOR:
            return (
                "that is not beyond noise, or not worth a change (the interval is to lie above "
                f"{FLOOR})"
            )
        return ""

    @property
    def wants(self) -> int:
        """Passes with which it may be proved; 0 where more would not help."""
        if self.winner.id == self.incumbent.id or self.passes == MOST_PASSES:
            return 0
        return min(MOST_PASSES, max(ENOUGH, self.passes + 2))

    def __str__(self) -> str:
        if self.winner.id == self.incumbent.id:
            return ""
        (value, low, high), names = self.ratio, (self.winner.label(), self.incumbent.label())
        said = f"{names[0]} was {value:.3f} times as good as {names[1]}"
        if self.passes < 2:
            return said
        spread = f"{100 * LEVEL:.0f}% interval {low:.3f} to {high:.3f}"
        return f"{said} ({spread}, {self.passes} passes)"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; an interval's end that is not known is None."""
        return {
            "winner": described(self.winner),
            "ratio_to_incumbent": self.ratio[0],
            "ratio_interval": finite(self.ratio[1:]),
            "level": LEVEL,
            "floor": FLOOR,
            "passes": self.passes,
        }


def proof_of(executed: Sequence[Executed], incumbent: Policy, objective: Objective) -> Proof:
    """The best of those executed, the incumbent among them, beside the incumbent."""
    logs = {one.policy.id: _logs(one, objective) for one in executed}
    best = max(executed, key=lambda one: float(logs[one.policy.id].mean()))
    apart = logs[best.policy.id] - logs[incumbent.id]
    mean, passes, half = float(apart.mean()), len(apart), math.inf
    if passes > 1:
        half = float(stdtrit(passes - 1, (1 + LEVEL) / 2) * apart.std(ddof=1) / math.sqrt(passes))
    ratio = math.exp(mean), math.exp(mean - half), math.exp(mean + half)
    return Proof(best.policy, incumbent, ratio, passes)


def _logs(one: Executed, objective: Objective) -> FloatArray:
    """The logarithm of how good each pass was, the larger the better, averaged over the loads:
    float64 [passes]."""
    worth = [[objective.worth(served) for served in passes] for passes in one.served.values()]
    return np.asarray(np.log(worth).mean(0))


def publish_proven(
    store: TraceStore,
    lab: UnderLoad,
    winner: Policy,
    place: Place,
    why: str,
    evidence: Mapping[str, Any],
) -> Publication | str:
    """Puts a policy in force for what the recording was sampled with. Where another version came
    into force since ``place`` was read nothing is published, and a line says so."""
    info, text = lab.info, lab.trace.trajectories[0]
    made = publish_winner(
        store,
        info.pair_id,
        place,
        winner,
        actor="tune",
        sampling=tuned_for(info.sampling, text.verifier),
        evidence=evidence,
        reason=why,
    )
    return f"{made}; the same command compares with it" if isinstance(made, Superseded) else made
