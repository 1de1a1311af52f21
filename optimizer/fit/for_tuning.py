"""What a tuning fits to a recording before it searches, and so may try with each draft."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from spectune.optimizer.fit.c2t import fit_c2t
from spectune.optimizer.fit.dynaspec import default_clusters, fit_router
from spectune.optimizer.fit.fr_spec import fit_fr_spec
from spectune.optimizer.fit.heterospec import ALPHA, fit_heterospec
from spectune.optimizer.fit.recorded_trees import TreeSource, tree_source
from spectune.optimizer.fit.sequoia import fit_sequoia
from spectune.optimizer.fit.shared import StoredFit
from spectune.optimizer.spaces import DraftLimits
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import StaticGrowth
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore

STATIC_SIZES: Final = (
    (2, 2), (4, 2), (4, 3), (8, 3), (8, 4), (12, 4), (16, 5), (24, 6), (32, 8), (48, 8), (64, 10),
)  # fmt: skip
"""(nodes, depth) of the static trees that a search tries."""
FEWEST_TOP_N: Final = 24
WIDTH: Final = 10
"""Children that bins and classifiers are fitted with at most, EAGLE-2's."""


def fit_drafts(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    drafts: Sequence[str],
    *,
    fixed: Collection[str],
    routed: Collection[str],
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, DraftLimits]:
    """Fits to a recording all that policies with some drafts may need, and says what may be tried:
    bins, classifier and static trees of drafts whose trees were recorded, the frequency order for
    those in ``fixed``, and a router for each of ``routed``.

    The fits are functions of what was recorded and of ``seed``, so fitting again changes nothing.
    What cannot be fitted (too little text, or ranks that do not depend on entropy) is left out.
    """
    with_trees = store.get_recording(recording).with_trees
    orders: tuple[str, ...] = ()
    if fixed:
        orders = _fitted(partial(fit_fr_spec, store, recording, pair))
    limits = {}
    for n, draft in enumerate(drafts):
        of = DraftLimits()
        if draft in with_trees:
            with suppress(TraceError):
                of = _tree_limits(tree_source(store, recording, draft), seed)
        if draft in pair.models:
            rows = pair.models[draft].output.rows
            fits: dict[str, tuple[Any, ...]] = {}
            if draft in fixed:
                fits |= {"frequency": orders, "position_frequency": orders}
            if draft in routed:
                router = partial(fit_router, store, recording, pair, draft, seed=seed)
                fits["clusters"] = _fitted(router)
            of = replace(of, rows=rows, clusters=default_clusters(rows), fits={**of.fits, **fits})
        limits[draft] = of
        progress("fit", n + 1, len(drafts))
    return limits


def _tree_limits(source: TreeSource, seed: int) -> DraftLimits:
    extent = source.info.drafts[source.trees.forest.draft]
    width, depth = min(WIDTH, extent.width), max(1, extent.depth - ALPHA)
    sizes: dict[str, Any] = {"depth": depth, "width": width, "top_n": FEWEST_TOP_N}
    trees: dict[Any, None] = {}
    for nodes, levels in STATIC_SIZES:
        with suppress(TraceError):
            fit = fit_sequoia(source, nodes=nodes, depth=min(levels, extent.depth))
            trees[StaticGrowth(paths=fit.document["paths"]).paths] = None
    fits: Mapping[str, tuple[Any, ...]] = {
        "static": tuple(trees),
        "classifier": _fitted(partial(fit_c2t, source, width=width, seed=seed)),
        "stratify": _fitted(partial(fit_heterospec, source, **sizes, seed=seed)),
    }
    return DraftLimits(extent.width, extent.depth, fits=fits)


def _fitted(fit: Callable[[], StoredFit]) -> tuple[str, ...]:
    """The artifact of a fit, if there was enough to fit to."""
    with suppress(TraceError):
        return (fit().artifact,)
    return ()
