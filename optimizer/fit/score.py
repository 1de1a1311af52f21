"""How sharp the ``coupled`` score of nodes should be: one number, fitted so that the runtime's own estimate is near the chance of a child.

The estimate of a child, given that its parent was accepted, is softmax(-sharpness * gap) over the k children of a law
(:func:`runtime.policies.trees.local_costs`); here it is that very ratio of whole weights before its -log is rounded to 1/16 nat.

It is judged by binary log loss: of each child by itself, "is it the text's next token", over all laws, also those none of whose children
is. Joint costs compare nodes of different branches as -log of such chances, so it is these that have to be right; the multinomial loss
given that one child is taken would leave out just the laws where a sure estimate is wrong, and come out too sharp. The estimate itself
knows no "none of them": its children share a whole 1, and what k children miss has to be made up for by flatter weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from runtime.policies.document import TopKGrowth
from runtime.policies.trees import gap_weights

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

SCORE: Final = "score"
"""The artifact's kind. No policy names one: its ``sharpness`` is written into ``growth``."""
DEFAULT: Final = TopKGrowth().sharpness
LEAST: Final = 0.25
MOST: Final = 8.0
"""Where a sharpness is looked for."""
STEPS: Final = 21
"""Points of the first grid, at equal ratios: four to a doubling."""
HELD_OUT: Final = 0.2
"""Share of the groups (requests) that losses are reported on and nothing is fitted to."""
SURE: Final = 2.0**-24
"""Nothing is taken to be surer than this: the smallest weight of a gap."""


@dataclass(frozen=True, eq=False)
class ScoreLaws:
    """Laws after n prefixes of texts. ``gap`` int64 [n, k] in 1/16 nat and ``q`` float64 [n, k]: of their children, best first; ``count``
    int64 [n]: how many exist; ``taken`` int64 [n]: the child that is the text's next token, -1 if none of them is; ``start`` int64 [n]: the
    position where the round began that reads the law."""

    gap: IntArray
    q: FloatArray
    count: IntArray
    taken: IntArray
    start: IntArray

    def __post_init__(self) -> None:
        n, k = self.gap.shape
        if self.q.shape != (n, k) or any(x.shape != (n,) for x in (self.count, self.taken, self.start)):
            raise ValueError("columns of score laws differ in length")
        if ((self.count < 0) | (self.count > k) | (self.taken < -1) | (self.taken >= np.minimum(self.count, k))).any():
            raise ValueError(f"a law has from 0 to {k} children, and the one taken is among them or -1")

    def __len__(self) -> int:
        return len(self.count)

    def take(self, which: npt.NDArray[Any]) -> ScoreLaws:
        """The laws at some places (a mask or numbers)."""
        return ScoreLaws(self.gap[which], self.q[which], self.count[which], self.taken[which], self.start[which])

    @property
    def exists(self) -> npt.NDArray[np.bool_]:
        """Which children exist, bool [n, k]."""
        return np.asarray(np.arange(self.gap.shape[1]) < self.count[:, None])

    @property
    def hit(self) -> npt.NDArray[np.bool_]:
        """Which child is the text's next token, bool [n, k]."""
        return np.asarray(np.arange(self.gap.shape[1]) == self.taken[:, None])


@dataclass(frozen=True)
class Rank:
    """Acceptance of the children of one rank on the held-out laws: how many there are, the share ``observed``, and mean estimates by the
    fitted sharpness (``predicted``), the default one, and q (``probability``)."""

    rank: int
    laws: int
    observed: float
    predicted: float
    default: float
    probability: float


@dataclass(frozen=True)
class Score:
    """A fitted ``sharpness``, to two decimals. ``laws`` were fitted to, ``held_out`` others judged: ``loss`` there, in nats a child, by
    ``fitted``, ``default`` and ``probability`` (q itself); ``covered``: the share of them that has a child taken; ``ranks``: by rank.
    ``curve``: (sharpness, loss) of the first grid on the laws fitted to."""

    sharpness: float
    laws: int
    held_out: int
    covered: float
    loss: dict[str, float]
    ranks: tuple[Rank, ...]
    curve: tuple[tuple[float, float], ...]

    @property
    def at_border(self) -> bool:
        """Whether a sharpness beyond those looked at might be better still."""
        return self.sharpness in (LEAST, MOST)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "at_border": self.at_border}


def estimates(laws: ScoreLaws, sharpness: float) -> FloatArray:
    """The runtime's chance of each child given its parent, float64 [n, k]; 0 for children that do not exist."""
    weight, total, _ = _weights(laws, sharpness)
    return np.asarray(weight / np.maximum(total, 1)[:, None])


def coupled_loss(laws: ScoreLaws, sharpness: float) -> float:
    """Mean binary log loss of a child under a sharpness, in nats; laws of fewer than two children count for nothing."""
    laws = laws.take(laws.count > 1)
    weight, total, logs = _weights(laws, sharpness)
    # Differences of whole numbers, so that a chance next to 1 keeps its distance from it.
    others = np.log(np.maximum(total[:, None] - weight, 1))
    losses = np.log(np.maximum(total, 1))[:, None] - np.where(laws.hit, logs, others)
    return float(losses[laws.exists].mean())


def probability_loss(laws: ScoreLaws) -> float:
    """The same of q itself."""
    laws = laws.take(laws.count > 1)
    q = np.clip(laws.q, SURE, 1.0 - SURE)
    return float(-np.log(np.where(laws.hit, q, 1.0 - q))[laws.exists].mean())


def fit_score(laws: ScoreLaws, group: npt.NDArray[Any], *, seed: int = 0) -> Score:
    """The sharpness from :data:`LEAST` to :data:`MOST` with the least loss; of equal ones that nearest to the default.

    ``group`` [n]: laws of one group (a request) are fitted to or held out together, :data:`HELD_OUT` of the groups by ``seed``. Raises
    ValueError for fewer than two groups with laws of two or more children, or where no child is the text's token.
    """
    if group.shape != laws.count.shape:
        raise ValueError("score laws and their groups differ in length")
    useful = laws.count > 1
    laws, group = laws.take(useful), group[useful]
    names = np.unique(group)
    if len(names) < 2:
        raise ValueError("a score needs laws of two or more children, of two groups or more; record more or longer texts")
    drawn = np.random.default_rng(seed).permutation(names)[: max(1, round(HELD_OUT * len(names)))]
    apart = np.isin(group, drawn)
    fitted, held = laws.take(~apart), laws.take(apart)
    if not (fitted.taken >= 0).any():
        raise ValueError(f"none of the children of {len(fitted)} laws is the text's token; record more texts, or more children")
    curve, sharpness = _search(lambda s: coupled_loss(fitted, s))
    return Score(
        sharpness=sharpness,
        laws=len(fitted),
        held_out=len(held),
        covered=float((held.taken >= 0).mean()),
        loss={
            "fitted": coupled_loss(held, sharpness),
            "default": coupled_loss(held, DEFAULT),
            "probability": probability_loss(held),
        },
        ranks=_ranks(held, sharpness),
        curve=curve,
    )


def _weights(laws: ScoreLaws, sharpness: float) -> tuple[IntArray, IntArray, FloatArray]:
    """Whole weights of the children [n, k], 0 where there is none, their sums [n], and logarithms [n, k]."""
    whole, logs = (x.numpy() for x in gap_weights(sharpness, torch.device("cpu")))
    weight = np.where(laws.exists, whole[laws.gap], 0)
    return weight, weight.sum(1), logs[laws.gap]


def _search(loss: Callable[[float], float]) -> tuple[tuple[tuple[float, float], ...], float]:
    """(the first grid and its losses, the best sharpness to two decimals): between the neighbours of the grid's best point in twenty steps,
    between those of the best of these in hundredths."""
    ratios = (MOST / LEAST) ** (np.arange(STEPS) / (STEPS - 1))
    grid = [round(LEAST * float(r), 4) for r in ratios]
    known: dict[float, float] = {}

    def best(points: list[float]) -> float:
        for p in points:
            if p not in known:
                known[p] = loss(p)
        # Losses that differ by rounding alone are equal.
        return min(points, key=lambda p: (round(known[p], 12), abs(p - DEFAULT), p))

    at = grid.index(best(grid))
    curve = tuple((p, known[p]) for p in grid)
    low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
    finer = [round(float(x), 2) for x in np.linspace(low, high, 21)]
    middle, step = best(sorted({*finer, *([DEFAULT] if low <= DEFAULT <= high else [])})), (high - low) / 20
    around = np.arange(round(100 * max(LEAST, middle - step)), round(100 * min(MOST, middle + step)) + 1) / 100
    return curve, best(sorted({middle, *(float(x) for x in around)}))


def _ranks(laws: ScoreLaws, sharpness: float) -> tuple[Rank, ...]:
    ours, default, hit = estimates(laws, sharpness), estimates(laws, DEFAULT), laws.hit
    found = []
    for rank in range(laws.gap.shape[1]):
        there = laws.count > rank
        if there.any():
            means = (float(x[there, rank].mean()) for x in (hit, ours, default, laws.q))
            found.append(Rank(rank, int(there.sum()), *means))
    return tuple(found)
