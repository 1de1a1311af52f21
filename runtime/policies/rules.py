"""A policy's tree and shortlist blocks, compiled with the artifacts that they name. Both need no
tensors: drafting with a shortlist is :mod:`runtime.shortlists`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.artifacts import (
    BINS,
    CLASSIFIER,
    FREQUENCIES,
    ROUTER,
    STATIC_TREE,
    Artifacts,
    read_artifact,
)
from spectune.runtime.policies.c2t import beta_code, confidence_table, read_weights
from spectune.runtime.policies.document import (
    GAMMA_LIMIT,
    ChainGrowth,
    ClassifierGrowth,
    ClustersShortlist,
    FrequencyShortlist,
    FullShortlist,
    Policy,
    PositionFrequencyShortlist,
    StaticGrowth,
)
from spectune.runtime.policies.dynaspec import Routing
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.heterospec import kept_nodes
from spectune.runtime.policies.sequoia import static_levels
from spectune.runtime.policies.stops import compile_stop
from spectune.runtime.trees.grow import TreeRule

FloatArray = npt.NDArray[np.float64]


def compile_tree(policy: Policy, *, sampled: bool, artifacts: Artifacts | None = None) -> TreeRule:
    """The rule of a policy's trees; a chain is a tree of width 1. ``sampled``: the temperature is
    above 0.

    Raises PolicyError when an artifact is missing, of another kind, or was fitted on another draft.
    """
    growth = policy.growth
    common: dict[str, Any] = {"top_n": policy.select.top_n, "stop": compile_stop(policy.stop)}
    if isinstance(growth, ChainGrowth):
        return TreeRule(width=1, frontier=1, **common)
    if isinstance(growth, StaticGrowth):
        paths = growth.paths or read_artifact(policy, "growth", STATIC_TREE, artifacts, read_paths)
        width, levels = static_levels(paths)
        return TreeRule(width, max(len(x.expanded) for x in levels), static=levels, **common)
    common["coupled"] = growth.is_coupled(sampled=sampled)
    common["sharpness"] = growth.sharpness
    if policy.stratify is not None:
        assert policy.select.top_n is not None
        alpha, fractions = policy.stratify.alpha, policy.stratify.fractions
        thresholds, depth = read_artifact(policy, "stratify", BINS, artifacts, read_bins)
        # The bin of the highest entropy is never a low one, however few the bins are.
        low = kept_nodes(policy.select.top_n, fractions, alpha)[: len(thresholds)]
        common |= {"thresholds": thresholds, "fitted_depth": depth}
        common |= {"alpha": alpha, "bin_top_n": low}
    if isinstance(growth, ClassifierGrowth):
        weights = read_artifact(
            policy, "growth", CLASSIFIER, artifacts, lambda _, arrays: read_weights(arrays)
        )
        common["confidence"] = confidence_table(weights).astype(np.int32)
        common["beta_code"] = beta_code(growth.beta)
    return TreeRule(growth.width, growth.frontier, **common)


def read_paths(document: Mapping[str, Any], _: object) -> tuple[tuple[int, ...], ...]:
    """The paths of an artifact of kind :data:`STATIC_TREE`."""
    return tuple(tuple(path) for path in document["paths"])


def read_bins(document: Mapping[str, Any], _: object) -> tuple[tuple[int, ...], int]:
    """(thresholds in 1/256 nat, ascending; the depth that they were fitted to) of an artifact of
    kind :data:`BINS`."""
    return tuple(document["thresholds"]), document["depth"]


@dataclass(frozen=True, eq=False)
class ShortlistRule:
    """How much of the vocabulary each draft step evaluates: a shortlist block with the artifact
    that it names, ``frequencies`` or, of kind ``clusters``, ``routing``."""

    block: FrequencyShortlist | PositionFrequencyShortlist | ClustersShortlist
    draft: str
    frequencies: Frequencies | None = None
    routing: Routing | None = None

    @property
    def routed(self) -> bool:
        """Whether the shortlist depends on the context."""
        return self.routing is not None

    @property
    def by_step(self) -> bool:
        """Whether the budget depends on the draft step."""
        return len({self.budget(step) for step in range(GAMMA_LIMIT)}) > 1

    def sizes(self, nodes: npt.NDArray[Any], step: int) -> FloatArray:
        """Tokens that a pass of draft step ``step`` over so many ``nodes`` evaluates, float64; of a
        router the expected union of clusters that nodes select independently of each other."""
        if self.routing is None:
            assert self.frequencies is not None
            return np.full(nodes.shape, float(self.frequencies.size(self.budget(step))))
        clusters = self.routing.clusters
        share = min(1.0, self.budget(step) / clusters.count)
        return np.asarray(clusters.vocab * (1.0 - (1.0 - share) ** nodes))

    def budget(self, step: int) -> int:
        """Tokens, or clusters of each node, at draft step ``step``, counted from 0 within a round
        (equation 3; appendix A.3)."""
        return self.block.budget(step)


def compile_shortlist(policy: Policy, artifacts: Artifacts | None) -> ShortlistRule | None:
    """The rule of a policy's shortlist; None where the draft evaluates its whole head.

    Raises PolicyError when the artifact is missing, malformed, of another kind, or was fitted on
    another draft."""
    block = policy.shortlist
    if isinstance(block, FullShortlist):
        return None
    if isinstance(block, ClustersShortlist):
        routing = read_artifact(policy, "shortlist", ROUTER, artifacts, Routing.from_document)
        return ShortlistRule(block, policy.draft, routing=routing)
    order = read_artifact(policy, "shortlist", FREQUENCIES, artifacts, Frequencies.from_document)
    return ShortlistRule(block, policy.draft, frequencies=order)
