"""A policy's shortlist block with what it names that was fitted: how much of the vocabulary each
draft step evaluates. Drafting by it is :mod:`runtime.shortlists`'s; replay needs no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from spectune.runtime.policies.artifacts import FREQUENCIES, ROUTER, Artifacts, read_artifact
from spectune.runtime.policies.document import (
    ClustersShortlist,
    FrequencyShortlist,
    FullShortlist,
    Policy,
    PositionFrequencyShortlist,
)
from spectune.runtime.policies.dynaspec import Routing
from spectune.runtime.policies.fr_spec import Frequencies


@dataclass(frozen=True, eq=False)
class ShortlistRule:
    """A policy's shortlist block with the artifact it names: ``frequencies`` for kinds
    ``frequency`` and ``position_frequency``, ``routing`` for ``clusters``."""

    block: FrequencyShortlist | PositionFrequencyShortlist | ClustersShortlist
    draft: str
    frequencies: Frequencies | None = None
    routing: Routing | None = None

    @property
    def routed(self) -> bool:
        """Whether the shortlist depends on the context."""
        return self.routing is not None

    def budget(self, step: int) -> int:
        """Tokens, or clusters of each node, at draft step ``step``, counted from 0 within a round
        (equation 3; appendix A.3)."""
        return self.block.budget(step)


def compile_shortlist(policy: Policy, artifacts: Artifacts | None) -> ShortlistRule | None:
    """The rule of a policy's shortlist; None where the draft evaluates its whole head.

    Raises PolicyError when the artifact is missing, malformed, of another kind, or was fitted on
    another draft.
    """
    block = policy.shortlist
    if isinstance(block, FullShortlist):
        return None
    if isinstance(block, ClustersShortlist):
        routing = read_artifact(policy, "shortlist", ROUTER, artifacts, Routing.from_document)
        return ShortlistRule(block, policy.draft, routing=routing)
    order = read_artifact(policy, "shortlist", FREQUENCIES, artifacts, Frequencies.from_document)
    return ShortlistRule(block, policy.draft, frequencies=order)
