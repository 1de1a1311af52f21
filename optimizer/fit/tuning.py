"""What a tuning needs before it may search trees and shortlists: everything fitted to the
recording, by draft."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from spectune.db.errors import CorruptedChunkError
from spectune.optimizer.fit.c2t import fit_c2t
from spectune.optimizer.fit.dynaspec import (
    EPOCHS,
    HIDDEN,
    LABELS,
    default_clusters,
    fit_router,
)
from spectune.optimizer.fit.fr_spec import fit_fr_spec
from spectune.optimizer.fit.heterospec import ALPHA, fit_heterospec
from spectune.optimizer.fit.recorded_trees import TreeSource, tree_source
from spectune.optimizer.fit.sequoia import fit_sequoia
from spectune.optimizer.fit.shared import search_texts
from spectune.optimizer.spaces import ShortlistLimit, TreeLimit
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import ROUTER
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore

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
    """Fits bins, classifier and static trees of every draft to the search part of a recording, and
    says what may be tried.

    The fits are functions of what was recorded and of ``seed``, so fitting again changes nothing.
    What cannot be fitted (too little text, or ranks that do not depend on entropy) is left out.
    ``profile``: the one whose costs choose a static tree; without, trees of a few sizes are chosen
    by acceptance alone.
    """
    info = store.get_recording(recording)
    found: dict[str, TreeLimit] = {}
    for n, draft in enumerate(drafts):
        if draft in info.with_trees:
            with suppress(TraceError):
                found[draft] = _fit_draft(tree_source(store, recording, draft), profile, seed)
            progress("fit", n + 1, len(drafts))
    return found


def _fit_draft(source: TreeSource, profile: str | None, seed: int) -> TreeLimit:
    extent = source.info.drafts[source.trees.forest.draft]
    width, depth = min(WIDTH, extent.width), max(1, extent.depth - ALPHA)
    bins = classifier = None
    with suppress(TraceError):
        found = fit_heterospec(source, depth=depth, width=width, top_n=FEWEST_TOP_N, seed=seed)
        bins = found.artifact
    with suppress(TraceError):
        classifier = fit_c2t(source, width=width, seed=seed).artifact
    sizes: list[dict[str, Any]] = [
        {"nodes": nodes, "depth": min(levels, extent.depth)} for nodes, levels in STATIC_SIZES
    ]
    if profile:
        sizes.insert(0, {"profile": profile})
    static: dict[tuple[tuple[int, ...], ...], None] = {}
    for size in sizes:
        with suppress(TraceError):
            paths = fit_sequoia(source, **size).document["paths"]
            static[tuple(tuple(path) for path in paths)] = None
    return TreeLimit(extent.width, extent.depth, bins, classifier, tuple(static))


def fit_shortlists(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    drafts: Sequence[str],
    *,
    routed: Collection[str] | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, ShortlistLimit]:
    """Fits the frequency order of the vocabulary, and a router for each draft with an output head
    (of those named in ``routed``, if given), to one half of the search part of a recording, and
    says what may be tried; the other half judges.

    Drafts without an output head are left out; a router that cannot be fitted (too little text) is
    too. Raises TraceError for a recording of another pair or without texts.
    """
    usable = [draft for draft in drafts if draft in pair.models]
    if not usable:
        return {}
    how: dict[str, Any] = {"half": True, "progress": progress}
    order = fit_fr_spec(store, recording, pair, **how).artifact
    limits: dict[str, ShortlistLimit] = {}
    for n, draft in enumerate(usable):
        rows, router = pair.models[draft].output.rows, None
        if routed is None or draft in routed:
            router = _stored_router(store, pair, recording, draft, seed)
            if router is None:
                with suppress(TraceError):
                    router = fit_router(store, recording, pair, draft, seed=seed, **how).artifact
        clusters = 0 if router is None else default_clusters(rows)
        limits[draft] = ShortlistLimit(rows, order, router, clusters)
        progress("fit shortlists", n + 1, len(usable))
    return limits


def _stored_router(
    store: TraceStore, pair: LoadedPair, recording: str, draft: str, seed: int
) -> str | None:
    """The newest router that was fitted with the defaults to the same texts, head and seed."""
    output = pair.models[draft].output
    texts = search_texts(store, recording, pair.spec, half=True)
    same = {
        "recording": recording,
        "request_ids": [t.request_id for t in texts],
        "draft": draft,
        "head": output.hash,
        "clusters": default_clusters(output.rows),
        "hidden": HIDDEN,
        "label_tokens": LABELS,
        "epochs": EPOCHS,
        "seed": seed,
    }
    for router in store.list_artifacts(ROUTER, pair.id):
        with suppress(CorruptedChunkError):
            if same.items() <= store.get_artifact(router.id).document.items():
                return router.id
    return None
