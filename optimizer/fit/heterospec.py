"""HeteroSpec's entropy bins (section 4.2): a regression tree over Phi, read off as integer thresholds.

Phi is the sum of the top-entropies along a round's most confident path (equation 1), in 1/16 nat. The Terminal Confidence Rank
is the place, from 1, that the deepest accepted node has among the N kept nodes by joint cost; 0 when nothing was accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

TREE_DEPTH: Final = 3
"""Layers of the paper's tree: at most 8 bins."""
MIN_FULL: Final = 50
"""Fully accepted rounds below which all rounds are fitted."""
MIN_SHARE: Final = 0.01
"""Smallest share of the fitted rounds that a bin may hold, so that no bin is one odd round; the paper names none."""
LAYERS: Final = (4, 5, 6)
"""Deeper trees that appendix A.4 compares with three layers."""
LOW_BINS: Final = 3
"""Low-entropy bins in that comparison: those with fractions in section 4.3."""


@dataclass(frozen=True)
class Bin:
    """One bin: Phi's range is that between its thresholds. Figures over the fitted rounds but for the last two.

    ``count`` rounds, ``mean_tcr``, ``mean_phi`` in 1/16 nat; ``share``: of all rounds given; ``fully_accepted``: the share of
    the bin's rounds (of all given) that were.
    """

    count: int
    mean_tcr: float
    mean_phi: float
    share: float
    fully_accepted: float


@dataclass(frozen=True)
class Bins:
    """Thresholds in 1/16 nat, ascending, for Phi over ``depth`` laws: the bin is the number of thresholds below Phi.

    ``within_variance``: the sum over bins of |D_j| / |D| times the variance of the rank in D_j. Equation 2 as printed multiplies
    |D_j| / |D| with a sum over D_j and so counts the size twice, which CART does not. ``explained`` is R^2, 0 where all ranks
    are equal. ``jaccard`` is :func:`overlaps`, of trees with :data:`LAYERS` layers. ``fallback``: there were too few fully
    accepted rounds, and all rounds were fitted, ranks 0 included. ``rounds``: how many were fitted.
    """

    thresholds: tuple[int, ...]
    depth: int
    tree_depth: int
    rounds: int
    statistics: tuple[Bin, ...]
    within_variance: float
    explained: float
    jaccard: tuple[float, ...]
    fallback: bool

    def bin_of(self, phi: npt.ArrayLike, gamma: npt.ArrayLike) -> IntArray:
        """Bins of rounds whose Phi is the sum over ``gamma`` laws: the number of thresholds with Phi * depth > t * gamma.

        ``phi`` and ``gamma`` broadcast; the result has their shape.
        """
        scaled = np.asarray(phi, dtype=np.int64) * self.depth
        windows = np.asarray(gamma, dtype=np.int64)
        out = np.zeros(np.broadcast_shapes(scaled.shape, windows.shape), dtype=np.int64)
        for threshold in self.thresholds:
            out += scaled > threshold * windows
        return out

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Bins:
        """The bins of :meth:`to_json`'s document, from this process or through JSON text."""
        fields = dict(document)
        fields["thresholds"] = tuple(int(t) for t in fields["thresholds"])
        fields["statistics"] = tuple(Bin(**b) for b in fields["statistics"])
        fields["jaccard"] = tuple(float(j) for j in fields["jaccard"])
        return cls(**fields)


def fit_bins(
    phi: npt.ArrayLike,
    tcr: npt.ArrayLike,
    fully_accepted: npt.ArrayLike,
    *,
    depth: int,
    tree_depth: int = TREE_DEPTH,
    min_full: int = MIN_FULL,
    min_share: float = MIN_SHARE,
) -> Bins:
    """Fits thresholds to rounds: ``phi`` int [n] over ``depth`` laws each, ``tcr`` int [n], ``fully_accepted`` bool [n].

    As in the paper only the fully accepted rounds are fitted, all of them where those are fewer than ``min_full``
    (``fallback``). A tree may find fewer than 2^tree_depth bins. Raises ValueError for arrays that are empty, of different lengths or
    contradictory, and for a depth below 1.
    """
    x, y = _integers("phi", phi), _integers("tcr", tcr)
    full = np.asarray(fully_accepted, dtype=np.bool_)
    if not len(x):
        raise ValueError("bins cannot be fitted to no rounds")
    if full.shape != x.shape or y.shape != x.shape:
        raise ValueError(f"phi, tcr and fully_accepted differ in length: {x.shape}, {y.shape}, {full.shape}")
    if depth < 1 or tree_depth < 1:
        raise ValueError(f"depth and tree_depth must be at least 1, not {depth} and {tree_depth}")
    if (x < 0).any() or (y < 0).any():
        raise ValueError("phi and tcr cannot be negative")
    if (full & (y == 0)).any():
        raise ValueError("a fully accepted round has an accepted node, so its tcr cannot be 0")
    fallback = int(full.sum()) < min_full
    fitted = np.ones_like(full) if fallback else full
    fx, fy = x[fitted], y[fitted]
    thresholds = _thresholds(fx, fy, tree_depth, min_share)
    bins, everywhere = _place(fx, thresholds), _place(x, thresholds)
    statistics = tuple(
        Bin(
            count=int((bins == b).sum()),
            mean_tcr=float(fy[bins == b].mean()),
            mean_phi=float(fx[bins == b].mean()),
            share=float((everywhere == b).mean()),
            fully_accepted=float(full[everywhere == b].mean()),
        )
        for b in range(len(thresholds) + 1)
    )
    within = sum(s.count * float(fy[bins == b].var()) for b, s in enumerate(statistics)) / len(fy)
    total = float(fy.var())
    return Bins(
        thresholds=tuple(int(t) for t in thresholds),
        depth=depth,
        tree_depth=tree_depth,
        rounds=len(fx),
        statistics=statistics,
        within_variance=within,
        explained=1.0 - within / total if total else 0.0,
        jaccard=overlaps(fx, fy, min_share=min_share),
        fallback=fallback,
    )


def overlaps(
    phi: npt.ArrayLike, tcr: npt.ArrayLike, *, low_bins: int = LOW_BINS, min_share: float = MIN_SHARE
) -> tuple[float, ...]:
    """Appendix A.4: the Jaccard coefficient |A and B| / |A or B| of the low-entropy rounds of a tree of three layers with those
    of trees of :data:`LAYERS` layers.

    A holds the rounds in the three-layer tree's ``low_bins`` lowest bins (fewer where that would be all). The "equivalent
    proportional selection": B holds the rounds in so many of the deeper tree's lowest bins that their share of all rounds comes
    closest to A's, at least one bin, the smaller share where two are equally close. Both sets reach up from the lowest Phi, so
    one contains the other.
    """
    x, y = _integers("phi", phi), _integers("tcr", tcr)
    if not len(x) or x.shape != y.shape:
        raise ValueError(f"overlaps need as many phi as tcr, and at least one; there are {x.shape} and {y.shape}")
    reference = _place(x, _thresholds(x, y, TREE_DEPTH, min_share))
    low = reference < max(1, min(low_bins, int(reference.max())))
    found = []
    for layers in LAYERS:
        deeper = _place(x, _thresholds(x, y, layers, min_share))
        shares = np.cumsum(np.bincount(deeper)) / len(x)
        chosen = deeper <= int(np.argmin(np.abs(shares - low.mean())))
        found.append(float((low & chosen).sum() / (low | chosen).sum()))
    return tuple(found)


def _thresholds(phi: IntArray, tcr: IntArray, layers: int, min_share: float) -> IntArray:
    """The splits of a CART regression tree, ascending: scikit-learn goes left where x <= t, so for whole x floor(t) splits alike."""
    from sklearn.tree import DecisionTreeRegressor

    leaf = max(1, int(min_share * len(phi)))
    model = DecisionTreeRegressor(criterion="squared_error", max_depth=layers, min_samples_leaf=leaf, random_state=0)
    tree = model.fit(phi.reshape(-1, 1), tcr.astype(np.float64)).tree_
    splits = np.asarray(tree.threshold)[np.asarray(tree.children_left) >= 0]
    return np.unique(np.floor(splits).astype(np.int64))


def _place(phi: IntArray, thresholds: IntArray) -> IntArray:
    """The number of thresholds below each Phi."""
    return np.searchsorted(thresholds, phi, side="left").astype(np.int64)


def _integers(name: str, values: npt.ArrayLike) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be one-dimensional whole numbers, not {array.dtype} {array.shape}")
    return array.astype(np.int64)
