"""What a tuning needs before it may search shortlists: frequencies and routers fitted to the recording, by draft."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from db.errors import CorruptedChunkError
from optimizer.fits.clusters import default_clusters
from optimizer.fits.router import EPOCHS, HIDDEN, LABELS
from optimizer.routing import cluster_ranks
from optimizer.search import ShortlistLimit
from optimizer.shortlist_fits import fit_frequencies_artifact, fit_router_artifact
from optimizer.shortlist_replay import ClusterRanks
from optimizer.tree_tuning import Progress
from runtime.decoder import shortlisted_model
from runtime.loading import LoadedPair
from runtime.policies.document import ClustersShortlist, Policy
from runtime.policies.dynaspec import ROUTER
from traces.errors import PolicyError, TraceError
from traces.store import TraceStore

Routed = dict[tuple[str, str], ClusterRanks]
"""What routed shortlists are replayed from, by draft and router (:class:`optimizer.replay.ReplayTrace`)."""


def fit_shortlists(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    drafts: Sequence[str],
    *,
    routed: Collection[str] | None = None,
    seed: int = 0,
    progress: Progress = lambda phase, done, total: None,
) -> dict[str, ShortlistLimit]:
    """Fits the frequency order of the vocabulary, and a router for each draft with an output head (of those named in ``routed``, if
    given), to the search part of a recording, and says what may be tried.

    A router that was fitted to the same requests, head and ``seed`` with the defaults before is found again. Drafts without an output
    head, or whose trees were not recorded (shortlists are replayed from those), are left out; a router that cannot be fitted (too
    little text) is too. Raises TraceError for a recording of another pair or without texts.
    """
    trees = store.get_recording(recording).trees
    found: dict[str, ShortlistLimit] = {}
    usable = [d for d in drafts if d in (*pair.drafts, *pair.heads) and d in trees and trees[d].width > 1]
    if not usable:
        return {}
    frequencies = fit_frequencies_artifact(store, recording, pair, progress=progress)
    for n, draft in enumerate(usable):
        output = shortlisted_model(pair, draft).output
        router, clusters = None, default_clusters(output.rows)
        if routed is None or draft in routed:
            same = {
                "recording": recording,
                "requests": frequencies.document["requests"],
                "draft": draft,
                "head": output.hash,
                "clusters": clusters,
                "hidden": HIDDEN,
                "label_tokens": LABELS,
                "epochs": EPOCHS,
                "seed": seed,
            }
            try:
                router = _fitted_before(store, pair.id, same)
                router = router or fit_router_artifact(store, recording, pair, draft, seed=seed, progress=progress).artifact
            except TraceError:
                pass  # texts too few: the shortlists that need no router remain
        found[draft] = ShortlistLimit(output.rows, frequencies.artifact, router, clusters if router else 0)
        progress("fit shortlists", n + 1, len(usable))
    return found


def _fitted_before(store: TraceStore, pair_id: str, same: Mapping[str, Any]) -> str | None:
    """The newest router of a pair whose document says all of ``same``."""
    for name, *_ in store.list_artifacts(ROUTER, pair_id):
        try:
            document = store.get_artifact(name).document
        except CorruptedChunkError:
            continue
        if all(document.get(key) == value for key, value in same.items()):
            return name
    return None


def routing_of(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    limits: Mapping[str, ShortlistLimit],
    policies: Sequence[Policy] = (),
    *,
    progress: Progress = lambda phase, done, total: None,
) -> Routed:
    """What routed shortlists of ``limits``, and those of ``policies``, are replayed from. Policies whose router is gone, or whose draft's
    trees were not recorded, are passed over. Raises PolicyError and TraceError where that holds for a limit."""
    found: Routed = {}
    for draft, limit in limits.items():
        if limit.router is not None:
            found[draft, limit.router] = cluster_ranks(store, pair, recording, draft, limit.router, progress=progress)
    for policy in policies:
        if isinstance(policy.shortlist, ClustersShortlist):
            key = policy.draft, policy.shortlist.artifact
            with suppress(PolicyError, TraceError):
                found[key] = found.get(key) or cluster_ranks(store, pair, recording, *key, progress=progress)
    return found
