"""HeteroSpec: what an entropy bin does to a round (section 4.3). Bins are fitted in
:mod:`optimizer.fit.heterospec`; Phi is summed up where trees grow
(:func:`runtime.trees.grow.grow_level`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from spectune.runtime.policies.blocks import Artifact, Block
from spectune.runtime.policies.jit import compiled


class Stratify(Block):
    """HeteroSpec: entropy bins (``fit bins``); in the i-th lowest of ``len(fractions)`` bins the
    tree grows ``alpha - i`` levels deeper and keeps ``fractions[i]`` of top_n nodes plus ``alpha -
    i``."""

    artifact: Artifact
    alpha: Annotated[int, Field(ge=0, le=32)] = 3
    fractions: Annotated[
        tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...], Field(min_length=1, max_length=8)
    ] = (0.3, 0.6, 1.0)


@compiled()
def bin_of(phi: int, depth: int, thresholds: npt.NDArray[np.int64], fitted_depth: int) -> int:
    """The bin of Phi (in 1/256 nat, a sum over ``depth`` levels): how many thresholds it exceeds.

    Thresholds belong to sums over ``fitted_depth`` levels; other depths are compared by Phi per
    level, in whole numbers."""
    low_bins = 0
    for threshold in thresholds:
        low_bins += phi * fitted_depth > threshold * depth
    return low_bins


def kept_nodes(top_n: int, fractions: Sequence[float], alpha: int) -> tuple[int, ...]:
    """N' of each low bin: max(1, round(fraction N)) + max(0, alpha - i), halves rounded up."""
    return tuple(
        max(1, math.floor(f * top_n + 0.5)) + max(0, alpha - i) for i, f in enumerate(fractions)
    )
