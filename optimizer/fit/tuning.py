"""What a tuning needs before it may search trees: everything fitted to the recording, by draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from optimizer.fit.shared import (
    ALPHA,
    fit_bins_artifact,
    fit_classifier_artifact,
    fit_score_artifact,
    fit_static_tree_artifact,
    tree_source,
)
from optimizer.spaces import TreeLimit
from runtime.tree_panorama import SHARPNESSES
from traces.errors import TraceError
from traces.store import TraceStore

Progress = Callable[[str, int, int], None]
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
    progress: Progress = lambda phase, done, total: None,
) -> dict[str, TreeLimit]:
    """Fits bins, classifier, static trees and the score's sharpness of every draft to the search part of a recording, and says what may
    be tried.

    The fits are functions of what was recorded and of ``seed``, and artifacts are kept under the hash of their content, so
    that fitting again
    what is not stale changes nothing. What cannot be fitted (too little text) is left out. ``profile``: the one whose costs choose
    a static tree; without, trees of a few sizes are chosen by acceptance alone.
    """
    info = store.get_recording(recording)
    found: dict[str, TreeLimit] = {}
    for n, draft in enumerate(drafts):
        extent = info.trees.get(draft)
        if extent is None or extent.width < 2:
            continue
        width = min(WIDTH, extent.width)
        bins = classifier = source = sharpness = None
        depth = max(1, extent.depth - ALPHA)
        # What cannot be fitted (texts too short for this depth, ranks that do not depend on entropy) keeps nothing else from being.
        with suppress(TraceError):
            source = tree_source(store, recording, draft)
        if source is not None:
            with suppress(TraceError):
                bins = fit_bins_artifact(
                    store, recording, draft, depth=depth, width=width, top_n=FEWEST_TOP_N, seed=seed, source=source
                ).artifact
            with suppress(TraceError):
                classifier = fit_classifier_artifact(store, recording, draft, width=width, seed=seed, source=source).artifact
            with suppress(TraceError):
                score = fit_score_artifact(store, recording, draft, width=width, seed=seed, source=source).document
                if score["loss"]["fitted"] < score["loss"]["default"] and score["sharpness"] not in SHARPNESSES:
                    sharpness = score["sharpness"]
        static: dict[tuple[tuple[int, ...], ...], None] = {}
        sizes: list[tuple[int | None, int | None, str | None]] = [(a, min(d, extent.depth), None) for a, d in STATIC_SIZES]
        for nodes, levels, costs in [(None, None, profile), *sizes] if profile else sizes:
            try:
                fit = fit_static_tree_artifact(store, recording, draft, nodes=nodes, depth=levels, profile=costs, source=source)
            except TraceError:
                continue
            static[tuple(tuple(path) for path in fit.document["paths"])] = None
        found[draft] = TreeLimit(extent.width, extent.depth, bins, depth, classifier, width, tuple(static), sharpness)
        progress("fit", n + 1, len(drafts))
    return found
