"""C2T: the classifier that grows trees (section 4), as a table of whole numbers.

The paper evaluates a two-layer network on (joint probability, entropy, depth) of every node. All
three are codes here, so the network is evaluated once, over every combination, and
growing looks its confidence up: the same number in decoding and in replay, and cheaper than the
network. Training is :mod:`optimizer.fit.c2t`; the threshold beta, the cap and chain mode (``width``
1) are :class:`ClassifierGrowth`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from spectune.runtime.policies.blocks import (
    WIDTH_LIMIT,
    Artifact,
    Fitted,
    Search,
    TreeGrowth,
    Width,
)
from spectune.runtime.policies.jit import compiled
from spectune.traces.errors import PolicyError
from spectune.traces.schema import NAT_SCALE

FloatArray = npt.NDArray[np.float64]
WeightArray = npt.NDArray[np.float32]
TableArray = npt.NDArray[np.uint16]

STEP: Final = NAT_SCALE // 16
"""Codes that a table does not tell apart: it has a row for each 1/16 nat."""
FEATURES: Final = 4
JOINTS: Final = 512
"""Joint costs told apart: up to 32 nat, a probability of 1e-14."""
ENTROPIES: Final = 160
"""Entropies told apart: up to 10 nat."""
DEPTHS: Final = 24
"""Depths told apart."""
CONFIDENCE_SCALE: Final = 65535
"""A confidence of 1 in a table."""
WEIGHTS: Final = ("w1", "b1", "w2", "b2")


class ClassifierGrowth(TreeGrowth):
    """C2T: a node is drafted and expanded if a classifier's confidence in it exceeds ``beta``; of a
    level at most the ``cap`` most confident ones (the paper's second, optional use of top-k; None:
    no cap but :data:`WIDTH_LIMIT`). ``artifact`` names the classifier (``fit classifier``)."""

    shown = ("width", "beta")
    kind: Literal["classifier"] = "classifier"
    width: Annotated[Width, Search(1, 16)] = 15
    cap: Width | None = 15
    beta: Annotated[float, Field(ge=0.0, lt=1.0), Search(0.2, 0.9)] = 0.5
    artifact: Annotated[Artifact, Fitted()]

    @classmethod
    def nearest(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "cap": values["width"]}

    @property
    def frontier(self) -> int:
        """Nodes kept and expanded per level at most."""
        return WIDTH_LIMIT if self.cap is None else self.cap


@dataclass(frozen=True, eq=False)
class ClassifierWeights:
    """sigmoid(w2 . relu(w1 x + b1) + b2) over x = (joint probability, its logarithm, entropy in
    nats, depth from 1). The paper has no logarithm; without it a network cannot tell small
    probabilities apart, and ranks nodes below their joint probability.

    ``w1`` float32 [hidden, 4], ``b1`` [hidden], ``w2`` [hidden], ``b2`` [1]."""

    w1: WeightArray
    b1: WeightArray
    w2: WeightArray
    b2: WeightArray

    @property
    def hidden(self) -> int:
        return len(self.b1)

    def confidence(
        self, joint_code: npt.ArrayLike, entropy_code: npt.ArrayLike, depth: npt.ArrayLike
    ) -> FloatArray:
        """Confidences in 0..1 of codes that broadcast, float64 in their shape. Probability and
        entropy are looked at in 1/16 nat (:func:`nats`).

        Sums over the hidden units one after another, elementwise: no matrix product, whose order of
        summation varies. So a table holds exactly these; what entropy and depth give is added up
        first, which a table does once per row."""
        log, entropy = -nats(joint_code), nats(entropy_code)
        probability = np.exp(log)
        level = np.asarray(depth, dtype=np.float64)
        w1, b1, w2, b2 = (w.astype(np.float64) for w in (self.w1, self.b1, self.w2, self.b2))
        z = np.full(np.broadcast_shapes(probability.shape, entropy.shape, level.shape), b2[0])
        h = np.empty_like(z)
        for unit in range(self.hidden):
            row = w1[unit, 2] * entropy + w1[unit, 3] * level + b1[unit]
            np.add(w1[unit, 0] * probability + w1[unit, 1] * log, row, out=h)
            np.maximum(h, 0.0, out=h)
            np.multiply(h, w2[unit], out=h)
            z += h
        np.clip(z, -700.0, 700.0, out=z)
        return np.asarray(1.0 / (1.0 + np.exp(-z)), dtype=np.float64)

    def table(
        self, depths: int = DEPTHS, entropies: int = ENTROPIES, joints: int = JOINTS
    ) -> TableArray:
        """floor(confidence * 65535) of all codes, uint16 [depths, entropies, joints]: [depth - 1,
        entropy // STEP, joint // STEP].

        Depths and codes beyond it take the last entries (:func:`confidence_code`)."""
        out = np.empty((depths, entropies, joints), dtype=np.uint16)
        joint, entropy = np.arange(joints) * STEP, np.arange(entropies)[:, None] * STEP
        for level in range(depths):
            out[level] = np.floor(self.confidence(joint, entropy, level + 1) * CONFIDENCE_SCALE)
        return out


def nats(code: npt.ArrayLike) -> FloatArray:
    """Codes in nats, rounded down to 1/16, float64."""
    return np.asarray(np.asarray(code) // STEP * (STEP / NAT_SCALE), dtype=np.float64)


def read_weights(arrays: Mapping[str, npt.NDArray[Any]]) -> ClassifierWeights:
    """The weights in an artifact's arrays. Raises PolicyError for those of other features."""
    weights = ClassifierWeights(*(np.asarray(arrays[name], np.float32) for name in WEIGHTS))
    if weights.w1.shape[1:] != (FEATURES,):
        raise PolicyError("the classifier is of an earlier version; `fit classifier` makes another")
    return weights


def confidence_table(weights: ClassifierWeights) -> TableArray:
    """:meth:`ClassifierWeights.table`, remembered by content: a search prepares many policies with
    one classifier."""
    return _table(*(getattr(weights, name).astype(np.float32).tobytes() for name in WEIGHTS))


@lru_cache(maxsize=16)
def _table(w1: bytes, b1: bytes, w2: bytes, b2: bytes) -> TableArray:
    hidden_weight, *rest = (np.frombuffer(w, dtype=np.float32) for w in (w1, b1, w2, b2))
    table = ClassifierWeights(hidden_weight.reshape(-1, 4), *rest).table()
    table.setflags(write=False)
    return table


@compiled()
def confidence_code(table: npt.NDArray[np.int32], depth: int, entropy: int, joint: int) -> int:
    """A table's entry for codes and a depth from 1; those beyond the table take its last
    entries."""
    depths, entropies, joints = table.shape
    row, column = min(entropy // STEP, entropies - 1), min(joint // STEP, joints - 1)
    return int(table[min(depth, depths) - 1, row, column])


def beta_code(beta: float) -> int:
    """The largest confidence code that does not pass ``beta``."""
    return math.floor(beta * CONFIDENCE_SCALE + 1e-9)
