"""What a tuning needs before it may search shortlists: frequencies and routers fitted to the recording, by draft."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from db.errors import CorruptedChunkError, NotFoundError
from optimizer.fit.cluster_ranks import cluster_ranks
from optimizer.fit.clusters import default_clusters
from optimizer.fit.dynaspec import EPOCHS, HIDDEN, LABELS
from optimizer.fit.frequency_ranks import frequency_ranks
from optimizer.fit.shared import Progress
from optimizer.fit.shortlist_fits import LeftOut, fit_frequencies_artifact, fit_router_artifact, search_texts
from optimizer.shortlist_ranks import Ranks
from optimizer.spaces import Fold, ShortlistLimit
from runtime.decoder import shortlisted_model
from runtime.loading import LoadedPair
from runtime.policies.document import Policy
from runtime.policies.dynaspec import ROUTER
from traces.errors import PolicyError, TraceError
from traces.store import TraceStore

FOLDS: Final = 3
"""Parts of the search part: what is fitted to two of them is judged by the third."""


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

    Tokens counted on a text hold that text better than any to come, so each is fitted again without a third of the texts, three times, and
    a search judges a shortlist by those (:class:`optimizer.spaces.Fold`). A router that was fitted to the same requests, head and ``seed``
    with the defaults before is found again. Drafts without an output head, or whose trees were not recorded (shortlists are replayed from
    those), are left out; a router that cannot be fitted (too little text) is too. Raises TraceError for a recording of another pair or
    without texts.
    """
    trees = store.get_recording(recording).trees
    found: dict[str, ShortlistLimit] = {}
    usable = [d for d in drafts if d in (*pair.drafts, *pair.heads) and d in trees and trees[d].width > 1]
    if not usable:
        return {}
    texts = [t.request_id for t in search_texts(store, recording, pair)]
    parts: list[LeftOut] = [(i, min(FOLDS, len(texts))) for i in range(FOLDS)] if len(texts) > 1 else []
    parts = parts[: len(texts)]
    frequencies = fit_frequencies_artifact(store, recording, pair, progress=progress)
    without = [fit_frequencies_artifact(store, recording, pair, left_out=part, progress=progress).artifact for part in parts]

    def router_of(draft: str, left_out: LeftOut | None) -> str:
        """A router for a draft. Raises TraceError for too few texts."""
        output = shortlisted_model(pair, draft).output
        same = {
            "recording": recording,
            "requests": len(texts) if left_out is None else sum(i % left_out[1] != left_out[0] for i in range(len(texts))),
            "left_out": None if left_out is None else list(left_out),
            "draft": draft,
            "head": output.hash,
            "clusters": default_clusters(output.rows),
            "hidden": HIDDEN,
            "label_tokens": LABELS,
            "epochs": EPOCHS,
            "seed": seed,
        }
        before = _fitted_before(store, pair.id, same)
        return before or fit_router_artifact(store, recording, pair, draft, seed=seed, left_out=left_out, progress=progress).artifact

    for n, draft in enumerate(usable):
        rows = shortlisted_model(pair, draft).output.rows
        routers: list[str | None] = [None] * (1 + len(parts))
        if routed is None or draft in routed:
            with suppress(TraceError):  # texts too few: the shortlists that need no router remain
                routers = [router_of(draft, part) for part in (None, *parts)]
        router, *without_part = routers
        apart = tuple(
            Fold(frozenset(texts[part[0] :: part[1]]), order, of_part)
            for part, order, of_part in zip(parts, without, without_part, strict=True)
        )
        found[draft] = ShortlistLimit(rows, frequencies.artifact, router, default_clusters(rows) if router else 0, apart)
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


def ranks_for(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    limits: Mapping[str, ShortlistLimit],
    policies: Sequence[Policy] = (),
    *,
    progress: Progress = lambda phase, done, total: None,
) -> dict[tuple[str, str], Ranks]:
    """What shortlists of ``limits``, and those of ``policies``, are replayed from, by draft and artifact. Policies whose artifact is gone,
    or whose draft's trees were not recorded, are passed over. Raises PolicyError and TraceError where that holds for a limit."""
    found: dict[tuple[str, str], Ranks] = {}

    def rank(draft: str, kind: str, artifact: str) -> None:
        if (draft, artifact) in found:
            return
        if kind == "clusters":
            found[draft, artifact] = cluster_ranks(store, pair, recording, draft, artifact, progress=progress)
        elif draft in pair.drafts:
            found[draft, artifact] = frequency_ranks(store, pair, recording, draft, artifact, progress=progress)

    for draft, limit in limits.items():
        fits = [(limit.router, limit.frequencies), *((fold.router, fold.frequencies) for fold in limit.apart)]
        for router, frequencies in fits:
            for kind, artifact in (("clusters", router), ("frequency", frequencies)):
                if artifact is not None:
                    rank(draft, kind, artifact)
    for policy in policies:
        if policy.shortlisted:
            with suppress(PolicyError, TraceError, NotFoundError):
                rank(policy.draft, policy.shortlist.kind, getattr(policy.shortlist, "artifact", ""))
    return found
