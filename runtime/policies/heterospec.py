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

from spectune.runtime.policies.blocks import Artifact, Block, Fitted, Search
from spectune.runtime.policies.jit import compiled

FRACTIONS = (
    (0.3, 0.6, 1.0), (0.5, 0.8, 1.0), (0.7, 0.9, 1.0), (1.0, 1.0, 1.0), (0.3, 0.6), (0.5, 0.8),
    (0.3,), (0.6,),
)  # fmt: skip
"""Fractions that are tried, the paper's first."""


class Stratify(Block):
    """HeteroSpec: entropy bins (``fit bins``); in the i-th lowest of ``len(fractions)`` bins the
    tree grows ``alpha - i`` levels deeper and keeps ``fractions[i]`` of top_n nodes plus ``alpha -
    i``."""

    scales_growth = True
    artifact: Annotated[Artifact, Fitted()]
    alpha: Annotated[int, Field(ge=0, le=32), Search(1, 4)] = 3
    fractions: Annotated[
        tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...],
        Field(min_length=1, max_length=8),
        Search(choices=FRACTIONS),
    ] = FRACTIONS[0]


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
