"""What a tree report reads from the database: a recording's trees, what was fitted to the draft,
and the policies tried on it before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from spectune.db.errors import CorruptedChunkError
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.report.trees import Stored, TreeReport, TreeShape, tree_report
from spectune.optimizer.report.words import sampling_in_words
from spectune.optimizer.simulate.trace import open_trace
from spectune.runtime.policies.artifacts import BINS, CLASSIFIER, STATIC_TREE
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.recording import TreeExtent, how_to_record_trees
from spectune.traces.schema import Proposals
from spectune.traces.store import RecordingInfo, TraceStore

TRIED = 100
"""Policies of a recording's studies that are replayed again: the fastest that draft with the
report's draft."""
FITTED = 3
"""Newest artifacts of a kind whose policies are replayed."""


def report_of(
    store: TraceStore,
    recording: str,
    draft: str | None = None,
    *,
    top_n: int,
    width: int | None = None,
    depth: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[TreeReport, str]:
    """The report on a stored recording, and the recording's id; ``width`` and ``depth`` are those
    of the recorded trees by default.

    Raises TraceError, saying how to record them, where the recording has no such trees.
    """
    info = store.get_recording(recording)
    name, proposals = _draft(info, draft)
    extent = (info.trees if proposals == "coupled" else info.trees_q)[name]
    wide, deep = extent.width if width is None else width, extent.depth if depth is None else depth
    if wide > extent.width or deep > extent.depth:
        raise TraceError(
            f"recording {info.id} holds trees of draft {name!r} of width {extent.width} and depth "
            f"{extent.depth}, not {wide} and {deep}; "
            + how_to_record_trees(
                info.id, max(wide, extent.width), max(deep, extent.depth), proposals
            )
        )
    trace = open_trace(
        store, info.id, chains=[name] if name in info.drafts else [], trees=[(name, proposals)]
    ).trace
    report = tree_report(
        trace,
        TreeShape(name, wide, deep, top_n, proposals),
        stored=stored_for(store, info.pair_id, name),
        tried=tried_on(store, info, name),
        artifacts=fitted(store, info.pair_id),
        profile=store.profile_of(info.pair_id, str(info.options.get("device", "cpu"))),
        about=_about(store, info),
        progress=progress,
    )
    return report, info.id


def _draft(info: RecordingInfo, wanted: str | None) -> tuple[str, Proposals]:
    """The draft meant and how its children are ranked: coupled trees before those by
    probability."""
    kinds: dict[Proposals, Mapping[str, TreeExtent]] = {
        "coupled": info.trees,
        "probability": info.trees_q,
    }
    whole = [
        (name, proposals)
        for proposals, extents in kinds.items()
        for name, extent in sorted(extents.items())
        if extent.count >= info.n_requests > 0
    ]
    for found in whole:
        if wanted in (None, found[0]):
            return found
    of = "no trees" if wanted is None else f"no trees of draft {wanted!r}"
    have = ", ".join(sorted({name for name, _ in whole}))
    raise TraceError(
        f"recording {info.id} has {of} of all its requests"
        f"{f' (it has those of: {have})' if have else ''}; {how_to_record_trees(info.id)}"
    )


def stored_for(store: TraceStore, pair_id: str, draft: str) -> list[Stored]:
    """What was fitted to a draft of a pair, the newest of each kind first; what is damaged is left
    out."""
    found = []
    for kind in (BINS, CLASSIFIER, STATIC_TREE):
        mine = 0
        for name, _, pair, _ in store.list_artifacts(kind):
            if mine == FITTED or pair not in (None, pair_id):
                continue
            with suppress(CorruptedChunkError):
                document = store.get_artifact(name).document
                if document.get("draft", draft) == draft:
                    mine += 1
                    thresholds = tuple(int(t) for t in document.get("thresholds", ()))
                    depth = int(document.get("depth", 1)) if kind == BINS else 1
                    found.append(Stored(name, kind, thresholds, depth))
    return found


def tried_on(store: TraceStore, info: RecordingInfo, draft: str) -> list[tuple[Policy, str]]:
    """The fastest trials of the studies of a recording that draft with ``draft``; documents of
    other versions, and damaged studies, are passed over."""
    documents: list[tuple[float, dict[str, Any]]] = []
    for name, *_ in store.list_studies(info.pair_id):
        with suppress(CorruptedChunkError):
            study = store.get_study(name)
            for trial in study.trials if study.recording_id == info.id else ():
                document = trial.get("policy")
                if isinstance(document, dict) and document.get("draft") == draft:
                    documents.append((float(trial.get("value") or 0.0), document))
    found: dict[str, Policy] = {}
    for _, document in sorted(documents, key=lambda d: -d[0]):
        with suppress(PolicyError):
            policy = parse_policy(document)
            if isinstance(policy, Policy) and policy.speculates and policy.replays_exactly:
                found.setdefault(policy.id, policy)
        if len(found) == TRIED:
            break
    return [(policy, "study") for policy in found.values()]


def _about(store: TraceStore, info: RecordingInfo) -> list[tuple[str, str]]:
    """The head of the page."""
    texts = f"{info.n_requests}, {info.n_output_tokens} tokens, at most {info.max_new_tokens} each"
    options = {"device": "cpu", "dtype": "float32", **info.options}
    return [
        ("recording", f"{info.id} ({info.state})"),
        ("pair", f"{store.get_pair(info.pair_id).name} ({info.pair_id})"),
        ("sampling", f"{sampling_in_words(info.sampling)}, {info.verifier} verifier"),
        ("requests", texts),
        ("trees", info.trees_shown()),
        ("recorded", f"{info.created_at:%Y-%m-%d %H:%M} UTC"),
        ("decoded on", f"{options['device']}, {options['dtype']}"),
    ]
