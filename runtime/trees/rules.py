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
    GAMMA_LIMIT,
    ChainGrowth,
    ClassifierGrowth,
    EntropyStop,
    NoStop,
    Policy,
    StaticGrowth,
    TopKGrowth,
    parse_plain_policy,
)
from spectune.runtime.policies.eagle2 import INFINITE
from spectune.runtime.policies.heterospec import kept_nodes
from spectune.runtime.policies.sequoia import static_levels
from spectune.runtime.policies.stops import compile_stop
from spectune.runtime.trees.grow import TreeRule
from spectune.traces.schema import TREE_SCALE

BINS_LIMIT = 64
"""Most thresholds of entropy bins."""


def compile_tree(policy: Policy, *, sampled: bool, artifacts: Artifacts | None = None) -> TreeRule:
    """The rule of a policy's trees; a chain is a tree of width 1. ``sampled``: the temperature is
    above 0.

    Raises PolicyError when an artifact is missing, of another kind, or was fitted on another draft.
    """
    growth = policy.growth
    stop = compile_stop(policy.stop, scale=TREE_SCALE)
    common: dict[str, Any] = {
        "top_n": policy.select.top_n,
        "reads_stop": not isinstance(policy.stop, NoStop),
        "max_logp": min(stop.max_logp_code, INFINITE),
        "max_joint": min(stop.max_joint_code, INFINITE),
        "max_entropy": min(stop.max_entropy_code, INFINITE)
        if isinstance(policy.stop, EntropyStop)
        else INFINITE,
        "keep_last": stop.keep_last,
    }
    if isinstance(growth, ChainGrowth):
        return TreeRule(width=1, frontier=1, **common)
    common["by_probability"] = growth.proposals == "probability"
    if isinstance(growth, StaticGrowth):
        paths = growth.paths or read_artifact(policy, "growth", STATIC_TREE, artifacts, read_paths)
        width, levels = static_levels(paths)
        return TreeRule(
            width=width, frontier=max(len(x.expanded) for x in levels), static=levels, **common
        )
    common["coupled"] = growth.score == "coupled" or (
        growth.score == "auto" and sampled and growth.proposals == "coupled"
    )
    common["sharpness"] = growth.sharpness
    if policy.stratify is not None:
        assert policy.select.top_n is not None
        common["thresholds"], common["fitted_depth"] = read_artifact(
            policy, "stratify", BINS, artifacts, lambda document, _: read_bins(document)
        )
        common["alpha"] = policy.stratify.alpha
        # The bin of the highest entropy is never a low one, however few the bins are.
        kept = kept_nodes(policy.select.top_n, policy.stratify.fractions, policy.stratify.alpha)
        common["kept"] = kept[: len(common["thresholds"])]
    if isinstance(growth, TopKGrowth):
        return TreeRule(width=growth.width, frontier=growth.frontier, **common)
    assert isinstance(growth, ClassifierGrowth)
    weights = read_artifact(
        policy, "growth", CLASSIFIER, artifacts, lambda _, arrays: read_weights(arrays)
    )
    table = confidence_table(weights).astype(np.int32)
    return TreeRule(
        width=growth.width,
        frontier=growth.frontier,
        confidence=table,
        beta_code=beta_code(growth.beta),
        **common,
    )


def read_paths(document: Mapping[str, Any], _: object) -> tuple[tuple[int, ...], ...]:
    """The paths of an artifact of kind :data:`STATIC_TREE`, by the rules of a policy's. Raises
    PolicyError."""
    growth = {"kind": "static", "paths": document["paths"]}
    stated = {"draft": "stored", "window": {"kind": "fixed", "gamma": 1}, "growth": growth}
    static = parse_plain_policy(stated, where="growth.artifact").growth
    assert isinstance(static, StaticGrowth)
    return static.paths


def read_bins(document: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """(thresholds in 1/16 nat, ascending; the depth that they were fitted to) of an artifact of
    kind :data:`BINS`. Raises ValueError."""
    thresholds, depth = document.get("thresholds"), document.get("depth")
    if not isinstance(thresholds, (list, tuple)) or len(thresholds) > BINS_LIMIT:
        raise ValueError(
            f"not bins: its document lacks thresholds, a list of at most {BINS_LIMIT} whole numbers"
        )
    if not all(type(t) is int and 0 <= t < 2**31 for t in thresholds) or sorted(thresholds) != list(
        thresholds
    ):
        raise ValueError(
            f"not bins: the thresholds must be whole numbers from 0 on, ascending, not {thresholds}"
        )
    if type(depth) is not int or not 1 <= depth <= GAMMA_LIMIT:
        raise ValueError(
            f"not bins: depth must be a whole number within 1..{GAMMA_LIMIT}, not {depth!r}"
        )
    return tuple(thresholds), depth
