"""HeteroSpec's entropy bins (section 4.2): a regression tree over Phi, read off as integer
thresholds.

Phi is the sum of the top-entropies along a round's most confident path (equation 1), in 1/256 nat.
The Terminal Confidence Rank (TCR) is the rank, from 1, that the deepest accepted node has among the
N selected ones by joint cost; 0 when nothing was accepted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit.recorded_trees import RecordedTrees, TreeSource
from spectune.optimizer.fit.shared import StoredFit
from spectune.optimizer.simulate.forest import tabulate_growth
from spectune.optimizer.simulate.tree_tables import NEVER, GrowthTable
from spectune.runtime.policies.artifacts import BINS
from spectune.runtime.policies.document import DEFAULT_TOP_N
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import TraceError

Index = npt.NDArray[np.int64]

STARTS: Final = 20000
"""Starts that bins are fitted to: only fully accepted ones count in the end."""
ALPHA: Final = 3
"""Levels that HeteroSpec grows beyond the depth its bins are fitted at, at most."""
LAYERS: Final = 3
"""Layers of the paper's regression tree: at most 8 bins."""
MIN_FULL: Final = 50
"""Fully accepted rounds below which all rounds are fitted."""
MIN_SHARE: Final = 0.01
"""Smallest share of the fitted rounds that a bin may hold, so that no bin is one odd round; the
paper names none."""


@dataclass(frozen=True, eq=False)
class Rounds:
    """What rounds did, [n] each: ``phi`` int64 in 1/256 nat, ``tcr`` int64, ``fully_accepted``
    bool."""

    phi: Index
    tcr: Index
    fully_accepted: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Bins:
    """``thresholds`` in 1/256 nat, ascending, for Phi over ``depth`` distributions: the bin is the
    number of thresholds below Phi.

    ``statistics`` of each bin: over the fitted rounds ``count``, ``mean_tcr``, ``mean_phi`` in
    1/256 nat; over all rounds the ``share`` that falls into it, and ``fully_accepted``, the
    share of those.
    ``within_variance``: the sum over bins of |D_j| / |D| times the variance of the rank in D_j.
    Equation 2 as printed multiplies |D_j| / |D| with a sum over D_j and so counts the size twice,
    which CART does not. ``explained`` is R^2, 0 where all ranks are equal. ``fallback``: there were
    too few fully accepted rounds, and all were fitted. ``rounds``: how many were.
    """

    thresholds: tuple[int, ...]
    depth: int
    tree_depth: int
    rounds: int
    statistics: list[dict[str, float]]
    within_variance: float
    explained: float
    fallback: bool


def fit_heterospec(
    source: TreeSource,
    *,
    depth: int | None = None,
    top_n: int = DEFAULT_TOP_N,
    width: int | None = None,
    starts: int = STARTS,
    seed: int = 0,
    progress: Progress = silent,
) -> StoredFit:
    """Fits and stores entropy bins for trees ``depth`` levels deep of which ``top_n`` nodes are
    selected.

    By default the depth leaves room in the recording for :data:`ALPHA` levels more, and ``width``
    is as recorded. Raises TraceError when too little was recorded.
    """
    forest = source.trees.forest
    width = width or forest.width
    depth = depth or max(1, forest.depth - ALPHA)
    trees = source.trees
    rounds = bin_rounds(trees, width, depth, top_n, count=starts, seed=seed, progress=progress)
    bins = fit_bins(rounds, depth)
    if not bins.thresholds:
        raise TraceError(
            f"recording {source.info.id}: ranks do not depend on entropy in the {bins.rounds} "
            f"rounds of draft {forest.draft!r}, so there is but one bin; record more requests, or "
            "fit deeper trees (--set fit.depth=D)"
        )
    fitted = {"width": width, "top_n": top_n, "starts": len(rounds.phi), "seed": seed}
    return source.keep(
        BINS,
        asdict(bins) | fitted,
        {},
        (rounds.phi, rounds.tcr, rounds.fully_accepted),
        depth,
        lambda artifact: {
            "growth": {"kind": "top_k", "width": width},
            "select": {"top_n": top_n},
            "stratify": {"artifact": artifact, "alpha": max(0, min(ALPHA, forest.depth - depth))},
        },
    )


def terminal_ranks(table: GrowthTable, top_n: int) -> tuple[Index, Index]:
    """(accepted drafted tokens, TCR) of every start of a growth table at its whole depth under a
    selection of ``top_n``, int64 [starts]."""
    rank = table.rank[:, table.depth - 1].astype(np.int64)
    accepted = np.logical_and.accumulate(rank < top_n, axis=1).sum(1)
    deepest = np.take_along_axis(rank, np.maximum(accepted - 1, 0)[:, None], 1)[:, 0]
    return accepted, np.where(accepted > 0, deepest + 1, 0)


def bin_rounds(
    trees: RecordedTrees,
    width: int,
    depth: int,
    top_n: int,
    *,
    count: int,
    seed: int = 0,
    progress: Progress = silent,
) -> Rounds:
    """The rounds of at most ``count`` starts under EAGLE-2's growth. Starts whose text ends within
    ``depth`` tokens are left out: what they would have accepted is not known. Raises TraceError
    when too little was recorded."""
    by_temperature, starts = trees.rules(width, depth), trees.pick(depth, count, seed)
    progress("trees", 0, len(starts))
    forest, sampled = trees.forest, trees.sampled[starts]
    forest = replace(forest, root=forest.root[starts], limit=forest.limit[starts])
    rules = [(rule, np.flatnonzero(sampled == hot)) for hot, rule in enumerate(by_temperature)]
    table = tabulate_growth(forest, rules, depth)
    accepted, tcr = terminal_ranks(table, top_n)
    known = (table.missing == NEVER) | (table.missing > depth)
    progress("trees", len(starts), len(starts))
    phi = table.phi[known, depth - 1].astype(np.int64)
    return Rounds(phi, tcr[known], accepted[known] == depth)


def fit_bins(rounds: Rounds, depth: int) -> Bins:
    """Fits thresholds to rounds whose Phi is over ``depth`` distributions.

    As in the paper only the fully accepted rounds are fitted, all of them where those are fewer
    than :data:`MIN_FULL` (``fallback``). A tree may find fewer than 8 bins. Raises
    TraceError without rounds.
    """
    if not len(rounds.phi):
        raise TraceError("bins cannot be fitted to no rounds; record more, or longer, requests")
    full = rounds.fully_accepted
    fallback = int(full.sum()) < MIN_FULL
    which = np.ones_like(full) if fallback else full
    phi, tcr = rounds.phi[which], rounds.tcr[which]
    thresholds = _thresholds(phi, tcr)
    bins, everywhere = np.searchsorted(thresholds, phi), np.searchsorted(thresholds, rounds.phi)
    statistics: list[dict[str, float]] = []
    within = 0.0
    for b in range(len(thresholds) + 1):
        mine, found = bins == b, everywhere == b
        within += int(mine.sum()) * float(tcr[mine].var())
        statistics.append(
            {
                "count": int(mine.sum()),
                "mean_tcr": float(tcr[mine].mean()),
                "mean_phi": float(phi[mine].mean()),
                "share": float(found.mean()),
                "fully_accepted": float(full[found].mean()),
            }
        )
    within /= len(tcr)
    total = float(tcr.var())
    return Bins(
        thresholds=tuple(thresholds.tolist()),
        depth=depth,
        tree_depth=LAYERS,
        rounds=len(phi),
        statistics=statistics,
        within_variance=within,
        explained=1.0 - within / total if total else 0.0,
        fallback=fallback,
    )


def _thresholds(phi: Index, tcr: Index) -> Index:
    """The splits of a CART regression tree, ascending: scikit-learn goes left where x <= t, so for
    whole x floor(t) splits alike."""
    from sklearn.tree import DecisionTreeRegressor

    model = DecisionTreeRegressor(
        max_depth=LAYERS, min_samples_leaf=max(1, int(MIN_SHARE * len(phi))), random_state=0
    )
    tree = model.fit(phi.reshape(-1, 1), tcr.astype(np.float64)).tree_
    splits = np.asarray(tree.threshold)[np.asarray(tree.children_left) >= 0]
    return np.unique(np.floor(splits).astype(np.int64))
