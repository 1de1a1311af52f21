"""What a tuning needs before it may search trees and shortlists: everything fitted to the
recording, by draft."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from spectune.db.errors import CorruptedChunkError, NotFoundError
from spectune.optimizer.fit.c2t import fit_c2t
from spectune.optimizer.fit.clusters import default_clusters
from spectune.optimizer.fit.dynaspec import EPOCHS, HIDDEN, LABELS, fit_router
from spectune.optimizer.fit.fr_spec import fit_fr_spec
from spectune.optimizer.fit.heterospec import ALPHA, fit_heterospec
from spectune.optimizer.fit.ranks import recorded_ranks
from spectune.optimizer.fit.recorded_trees import TreeSource, tree_source
from spectune.optimizer.fit.sequoia import fit_sequoia
from spectune.optimizer.fit.shared import search_texts
from spectune.optimizer.simulate.shortlist_ranks import Ranks
from spectune.optimizer.spaces import ShortlistLimit, TreeLimit
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import ROUTER
from spectune.runtime.policies.document import Policy
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import PolicyError, TraceError
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
    (of those named in ``routed``, if given), to the search part of a recording, and says what may
    be tried.

    Drafts without an output head, or whose trees were not recorded (shortlists are replayed from
    those), are left out; a router that cannot be fitted (too little text) is too. Raises TraceError
    for a recording of another pair or without texts.
    """
    trees = store.get_recording(recording).with_trees
    usable = [d for d in drafts if d in pair.models and d in trees]
    if not usable:
        return {}
    texts = len(search_texts(store, recording, pair.spec))
    order = fit_fr_spec(store, recording, pair, ranked=False, progress=progress).artifact
    limits: dict[str, ShortlistLimit] = {}
    for n, draft in enumerate(usable):
        router = None
        if routed is None or draft in routed:
            with suppress(TraceError):  # texts too few: the shortlists that need no router remain
                router = _router(store, pair, recording, draft, texts, seed, progress)
        rows = pair.models[draft].output.rows
        clusters = default_clusters(rows) if router else 0
        limits[draft] = ShortlistLimit(rows, order, router, clusters)
        progress("fit shortlists", n + 1, len(usable))
    return limits


def _router(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    draft: str,
    texts: int,
    seed: int,
    progress: Progress,
) -> str:
    """A router for a draft: the newest one that was fitted with the defaults to the same requests,
    head and seed, else a new one. Raises TraceError for too few texts."""
    output = pair.models[draft].output
    same = {
        "recording": recording,
        "requests": texts,
        "left_out": None,
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
    how: dict[str, Any] = {"ranked": False, "seed": seed, "progress": progress}
    return fit_router(store, recording, pair, draft, **how).artifact


def ranks_for(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    limits: Mapping[str, ShortlistLimit],
    policies: Sequence[Policy] = (),
    *,
    progress: Progress = silent,
) -> dict[tuple[str, str], Ranks]:
    """What shortlists of ``limits``, and those of ``policies``, are replayed from, by draft and
    artifact. Policies whose artifact is gone, or whose draft's trees were not recorded, are passed
    over. Raises PolicyError and TraceError where that holds for a limit."""
    found: dict[tuple[str, str], Ranks] = {}

    def rank(draft: str, orders: Collection[str]) -> None:
        new = [name for name in dict.fromkeys(orders) if (draft, name) not in found]
        if new:
            ranks = recorded_ranks(store, pair, recording, draft, new, progress=progress)
            found.update({(draft, name): r for name, r in zip(new, ranks, strict=True)})

    for draft, limit in limits.items():
        fits = limit.fits
        rank(draft, [*fits["clusters"], *(fits["frequency"] if draft in pair.drafts else ())])
    for policy in policies:
        routed = policy.shortlist.kind == "clusters"
        if policy.shortlisted and (routed or policy.draft in pair.drafts):
            with suppress(PolicyError, TraceError, NotFoundError):
                rank(policy.draft, [getattr(policy.shortlist, "artifact", "")])
    return found
