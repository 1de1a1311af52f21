"""A cost as a plain value: seconds that are piecewise linear over at most two axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

AXES: Final = ("rows", "context", "passes", "batch")
"""What a cost may depend on: rows in the pass (or tokens evaluated by an output head), tokens in
the cache, passes of the round, requests."""


def hats(knots: Sequence[float], places: npt.ArrayLike) -> FloatArray:
    """Linear interpolation between ``knots`` at n places as weights, float64 [n, knots]; outer
    slopes go on beyond the knots."""
    x, grid = np.atleast_1d(np.asarray(places, np.float64)), np.asarray(knots, np.float64)
    if len(grid) == 1:
        return np.ones((len(x), 1))
    lower = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    share = (x - grid[lower]) / (grid[lower + 1] - grid[lower])
    weights, n = np.zeros((len(x), len(grid))), np.arange(len(x))
    weights[n, lower], weights[n, lower + 1] = 1.0 - share, share
    return weights


@dataclass(frozen=True)
class CostTable:
    """Seconds of one term, linear between the knots of at most two of :data:`AXES`, with the outer
    slopes beyond them.

    ``seconds``: at every combination of knots, those of the last axis first; none is negative. A
    table without axes is a constant.
    """

    seconds: tuple[float, ...]
    axes: tuple[str, ...] = ()
    knots: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        size = int(np.prod([len(k) for k in self.knots], initial=1))
        if len(self.axes) != len(self.knots) or len(self.axes) > 2 or size != len(self.seconds):
            raise ValueError(
                f"a cost table of axes {self.axes} has {len(self.seconds)} seconds at {size} "
                "combinations of knots"
            )

    def weights(self, places: Mapping[str, npt.ArrayLike]) -> FloatArray:
        """The share of each of ``seconds`` at n places, float64 [n, len(seconds)]; ``places``: [n]
        by axis."""
        weights = np.ones((1, 1))
        for axis, knots in zip(self.axes, self.knots, strict=True):
            along = hats(knots, places[axis])[:, None, :]
            size = weights.shape[1] * len(knots)
            weights = (weights[:, :, None] * along).reshape(len(along), size)
        return weights

    def at(self, **places: npt.ArrayLike) -> FloatArray:
        """Seconds at places that broadcast together, in their shape; never negative. Places along
        other axes only shape the result."""
        shape = np.broadcast_shapes(*map(np.shape, places.values()))
        flat = {axis: np.broadcast_to(places[axis], shape).ravel() for axis in self.axes}
        seconds = np.maximum(0.0, self.weights(flat) @ np.array(self.seconds))
        return np.asarray(np.broadcast_to(seconds, int(np.prod(shape, initial=1))).reshape(shape))

    def grid(self, rows: FloatArray, contexts: FloatArray) -> FloatArray:
        """Seconds at all combinations of ``contexts`` and ``rows``, float64 [contexts, rows]."""
        if self.axes != ("rows", "context"):
            return self.at(rows=rows[None], context=contexts[:, None])
        seconds = np.array(self.seconds).reshape(len(self.knots[0]), -1)
        grid = hats(self.knots[1], contexts) @ seconds.T @ hats(self.knots[0], rows).T
        return np.asarray(np.maximum(0.0, grid))


def terms_to_json(terms: Mapping[str, CostTable]) -> dict[str, Any]:
    """Cost tables by name, JSON-ready."""
    return {name: asdict(table) for name, table in terms.items()}


def terms_from_json(data: Mapping[str, Any]) -> dict[str, CostTable]:
    """Rebuilds cost tables from :func:`terms_to_json`."""
    return {
        name: CostTable(tuple(t["seconds"]), tuple(t["axes"]), tuple(map(tuple, t["knots"])))
        for name, t in data.items()
    }
