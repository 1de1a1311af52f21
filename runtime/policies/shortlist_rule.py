"""A policy's shortlist block compiled: how much of the vocabulary each draft step evaluates.
Drafting by it is :mod:`runtime.shortlists`'s; replay needs no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spectune.runtime.policies.artifacts import FREQUENCIES, ROUTER, Artifacts, read_artifact
from spectune.runtime.policies.document import (
    ClustersShortlist,
    FrequencyShortlist,
    FullShortlist,
    Policy,
    PositionFrequencyShortlist,
)
from spectune.runtime.policies.dynaspec import cluster_budget
from spectune.runtime.policies.fr_spec import Frequencies, frequency_budget
from spectune.traces.errors import PolicyError

if TYPE_CHECKING:  # its weights are tensors
    from spectune.runtime.policies.router import Routing


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
        """Tokens, or clusters, of draft step ``step``, counted from 0 within a round (equation 3;
        appendix A.3)."""
        block = self.block
        if isinstance(block, FrequencyShortlist):
            return block.size
        if isinstance(block, PositionFrequencyShortlist):
            return frequency_budget(step, block.k_max)
        return cluster_budget(step, block.k0, block.k1, block.k_min)

    def check_head(self, found: str) -> None:
        """Raises PolicyError when ``found``, the hash of the draft's output head, is not that of
        the head the router was fitted on."""
        if self.routing is not None and found != self.routing.head:
            raise PolicyError(
                f"shortlist.artifact: {self.block.artifact} was fitted on another output head "
                f"(hash {self.routing.head}) than draft {self.draft!r} has here (hash {found}); "
                f"`fit router --recording ID --draft {self.draft}` makes one"
            )


def compile_shortlist(policy: Policy, artifacts: Artifacts | None) -> ShortlistRule | None:
    """The rule of a policy's shortlist; None where the draft evaluates its whole head.

    Raises PolicyError when the artifact is missing, malformed, of another kind, or was fitted on
    another draft.
    """
    block = policy.shortlist
    if isinstance(block, FullShortlist):
        return None
    if not isinstance(block, ClustersShortlist):
        order = read_artifact(
            policy, "shortlist", FREQUENCIES, artifacts, Frequencies.from_document
        )
        return ShortlistRule(block, policy.draft, frequencies=order)
    from spectune.runtime.policies.router import Routing

    routing = read_artifact(policy, "shortlist", ROUTER, artifacts, Routing.from_document)
    return ShortlistRule(block, policy.draft, routing=routing)
