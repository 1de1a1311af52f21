"""Compiling a policy's tree blocks, with the artifacts they name, into a
:class:`runtime.trees.grow.TreeRule`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spectune.runtime.policies.artifacts import (
    BINS,
    CLASSIFIER,
    STATIC_TREE,
    Artifacts,
    read_artifact,
)
from spectune.runtime.policies.c2t import beta_code, confidence_table, read_weights
from spectune.runtime.policies.document import (
    ChainGrowth,
    ClassifierGrowth,
    Policy,
    StaticGrowth,
)
from spectune.runtime.policies.heterospec import kept_nodes
from spectune.runtime.policies.sequoia import static_levels
from spectune.runtime.policies.stops import compile_stop
from spectune.runtime.trees.grow import TreeRule


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
        common |= {
            "thresholds": thresholds,
            "fitted_depth": depth,
            "alpha": alpha,
            "bin_top_n": kept_nodes(policy.select.top_n, fractions, alpha)[: len(thresholds)],
        }
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
