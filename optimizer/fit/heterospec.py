"""HeteroSpec's entropy bins (section 4.2): a regression tree over Phi, read off as integer
thresholds.

Phi is the sum of the top-entropies along a round's most confident path (equation 1), in 1/256 nat.
The Terminal Confidence Rank (TCR) is the rank, from 1, that the deepest accepted node has among the
N selected ones by joint cost; 0 when nothing was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sklearn.tree import DecisionTreeRegressor

from spectune.optimizer.fit.recorded_trees import RecordedTrees, TreeSource
from spectune.optimizer.fit.shared import StoredFit
from spectune.optimizer.replay.forest import tabulate_growth
from spectune.optimizer.replay.tree_tables import NEVER
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
    progress("bins", 0, 1)
    rounds = bin_rounds(source.trees, width, depth, top_n, count=starts, seed=seed)
    bins = fit_bins(rounds)
    progress("bins", 1, 1)
    if not bins["thresholds"]:
        raise TraceError(
            f"recording {source.info.id}: ranks do not depend on entropy in the {bins['rounds']} "
            f"rounds of draft {forest.draft!r}, so there is but one bin; record more requests, or "
            "fit deeper trees (--set fit.depth=D)"
        )
    sizes = {"depth": depth, "width": width, "top_n": top_n, "starts": len(rounds.phi)}
    return source.keep(
        BINS,
        {**bins, **sizes, "seed": seed},
        depth,
        lambda artifact: {
            "growth": {"kind": "top_k", "width": width},
            "select": {"top_n": top_n},
            "stratify": {"artifact": artifact, "alpha": max(0, min(ALPHA, forest.depth - depth))},
        },
    )


def bin_rounds(
    trees: RecordedTrees, width: int, depth: int, top_n: int, *, count: int, seed: int = 0
) -> Rounds:
    """The rounds of at most ``count`` starts under EAGLE-2's growth. Starts whose text ends within
    ``depth`` tokens are left out: what they would have accepted is not known. Raises TraceError
    when too little was recorded."""
    by_temperature, starts = trees.rules(width, depth), trees.pick(depth, count, seed)
    forest, sampled = trees.forest, trees.sampled[starts]
    forest = replace(forest, root=forest.root[starts], limit=forest.limit[starts])
    rules = [(rule, np.flatnonzero(sampled == hot)) for hot, rule in enumerate(by_temperature)]
    table = tabulate_growth(forest, rules, depth)
    complete = (table.missing == NEVER) | (table.missing > depth)
    rank = table.rank[complete, depth - 1].astype(np.int64)
    accepted = np.logical_and.accumulate(rank < top_n, axis=1).sum(1)
    deepest = np.take_along_axis(rank, np.maximum(accepted - 1, 0)[:, None], 1)[:, 0]
    phi = table.phi[complete, depth - 1].astype(np.int64)
    return Rounds(phi, np.where(accepted > 0, deepest + 1, 0), accepted == depth)


def fit_bins(rounds: Rounds) -> dict[str, Any]:
    """Thresholds of Phi, and what they were fitted to, JSON-ready: a bin is the number of
    ``thresholds`` below Phi.

    As in the paper only the fully accepted rounds are fitted, all of them where those are fewer
    than :data:`MIN_FULL` (``fallback``). A tree may find fewer than 8 bins. ``statistics`` of each
    bin: over the fitted rounds ``count`` and ``mean_tcr``; over all rounds the ``share`` that falls
    into it, and ``fully_accepted``, the share of those. ``explained`` is R^2, 0 where all ranks are
    equal. Raises TraceError without rounds.
    """
    if not len(rounds.phi):
        raise TraceError("bins cannot be fitted to no rounds; record more, or longer, requests")
    full = rounds.fully_accepted
    fallback = int(full.sum()) < MIN_FULL
    fitted = np.ones_like(full) if fallback else full
    phi, tcr = rounds.phi[fitted], rounds.tcr[fitted].astype(np.float64)
    leaf = max(1, int(MIN_SHARE * len(phi)))
    model = DecisionTreeRegressor(max_depth=LAYERS, min_samples_leaf=leaf, random_state=0)
    tree = model.fit(phi[:, None], tcr).tree_
    splits = np.asarray(tree.threshold)[np.asarray(tree.children_left) >= 0]
    # scikit-learn goes left where x <= t, so for whole x floor(t) splits alike
    thresholds = np.unique(np.floor(splits).astype(np.int64))
    bins, every_bin = np.searchsorted(thresholds, phi), np.searchsorted(thresholds, rounds.phi)
    return {
        "thresholds": thresholds.tolist(),
        "rounds": len(phi),
        "statistics": [
            {
                "count": int((bins == b).sum()),
                "mean_tcr": float(tcr[bins == b].mean()),
                "share": float((every_bin == b).mean()),
                "fully_accepted": float(full[every_bin == b].mean()),
            }
            for b in range(len(thresholds) + 1)
        ],
        "explained": float(model.score(phi[:, None], tcr)) if tcr.var() else 0.0,
        "fallback": fallback,
    }
