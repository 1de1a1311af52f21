"""What a tuning needs before it may search trees: everything fitted to the recording, by draft."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from optimizer.fit.c2t import fit_c2t
from optimizer.fit.heterospec import ALPHA, fit_heterospec
from optimizer.fit.recorded_trees import TreeSource, tree_source
from optimizer.fit.score import fit_score
from optimizer.fit.sequoia import fit_sequoia
from optimizer.fit.shared import Progress, silent
from optimizer.spaces import TreeLimit
from runtime.tree_panorama import SHARPNESSES
from traces.errors import TraceError
from traces.store import TraceStore

STATIC_SIZES = ((4, 2), (8, 3), (12, 4), (16, 5), (24, 6), (32, 8))
"""(nodes, depth) of static trees tried beside the one that measured costs choose."""
FEWEST_TOP_N = 24
WIDTH = 10
"""Children that bins and classifiers are fitted with at most, EAGLE-2's."""


def fit_trees(
    store: TraceStore,
    recording: str,
    drafts: Sequence[str],
    *,
    profile: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, TreeLimit]:
    """Fits bins, classifier, static trees and the score's sharpness of every draft to the search
    part of a recording, and says what may be tried.

    The fits are functions of what was recorded and of ``seed``, so fitting again changes nothing.
    What cannot be fitted (too little text, or ranks that do not depend on entropy) is left out.
    ``profile``: the one whose costs choose a static tree; without, trees of a few sizes are chosen
    by acceptance alone.
    """
    info = store.get_recording(recording)
    found: dict[str, TreeLimit] = {}
    for n, draft in enumerate(drafts):
        if draft in info.trees and info.trees[draft].width > 1:
            with suppress(TraceError):
                found[draft] = _fit_draft(tree_source(store, recording, draft), profile, seed)
            progress("fit", n + 1, len(drafts))
    return found


def _fit_draft(source: TreeSource, profile: str | None, seed: int) -> TreeLimit:
    extent = source.info.trees[source.trees.forest.draft]
    width, depth = min(WIDTH, extent.width), max(1, extent.depth - ALPHA)
    bins = classifier = sharpness = None
    with suppress(TraceError):
        bins = fit_heterospec(
            source, depth=depth, width=width, top_n=FEWEST_TOP_N, seed=seed
        ).artifact
    with suppress(TraceError):
        classifier = fit_c2t(source, width=width, seed=seed).artifact
    with suppress(TraceError):
        score = fit_score(source, width=width, seed=seed).document
        if (
            score["loss"]["fitted"] < score["loss"]["default"]
            and score["sharpness"] not in SHARPNESSES
        ):
            sharpness = score["sharpness"]
    static: dict[tuple[tuple[int, ...], ...], None] = {}
    limits: list[tuple[int | None, int | None, str | None]] = (
        [(None, None, profile)] if profile else []
    )
    for nodes, levels, costs in [
        *limits,
        *((nodes, min(levels, extent.depth), None) for nodes, levels in STATIC_SIZES),
    ]:
        with suppress(TraceError):
            paths = fit_sequoia(source, nodes=nodes, depth=levels, profile=costs).document["paths"]
            static[tuple(tuple(path) for path in paths)] = None
    return TreeLimit(
        extent.width, extent.depth, bins, depth, classifier, width, tuple(static), sharpness
    )
