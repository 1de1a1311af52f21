"""Fitting a chooser of drafts to a recording, and keeping it as the artifact that ``"draft":
{"kind": "ols"}`` names.

It is fitted to the requests that a search may see (:func:`optimizer.parts.split`) and scored on the
others. Like the fits of shortlists it needs the pair itself: its smallest draft reads the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from spectune.db.errors import CorruptedChunkError
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.fit.on_the_fly import FloatArray, fit_chooser, predict_each, read_prompts
from spectune.optimizer.fit.shared import StoredFit, keep, profile_of
from spectune.optimizer.inputs import recording_of
from spectune.optimizer.parts import recorded_parts
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.trace import open_trace
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import DRAFT_CHOOSER
from spectune.runtime.policies.document import AUTOREGRESSIVE, ChooserPolicy, Policy, parse_policy
from spectune.runtime.policies.draft_choice import NO_DRAFT, Chooser, Rule
from spectune.runtime.policies.prepared_chooser import PREDICTED, prompt_key
from spectune.runtime.policies.prompt_features import Prompt
from spectune.runtime.progress import Progress, silent
from spectune.runtime.prompts import prompt_reader
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import LatencyProfile, Trajectory
from spectune.traces.store import RecordingInfo, TraceStore

TRIED: Final = 3
"""Policies of each draft that are taken from a recording's studies, the fastest."""


@dataclass(frozen=True)
class ChooserSource:
    """What a chooser is fitted to: recorded texts as a trace, their prompts as read by the pair's
    :func:`prompt_reader`, in order, and what the artifact's document says of them."""

    trace: ReplayTrace
    prompts: tuple[Prompt, ...]
    about: Mapping[str, Any]


def fit_chooser_artifact(
    store: TraceStore,
    recording: str,
    pair: LoadedPair,
    candidates: Mapping[str, Policy] | None = None,
    *,
    profile: str | None = None,
    rule: Rule = "throughput",
    seed: int = 0,
    progress: Progress = silent,
) -> StoredFit:
    """Fits a chooser of ``candidates`` (a policy by draft; by default :func:`best_by_draft`) to a
    recording of this pair and stores it.

    ``profile``: the id of a stored one, by default the latest of the pair and its device. The
    document has :func:`optimizer.fit.on_the_fly.evaluate`'s scores on the requests held out. Raises
    PolicyError for candidates that cannot be weighed, TraceError where the recording is another
    pair's, or lacks a draft, or there is no profile.
    """
    costs, profile_id = profile_of(store, pair.id, profile, **pair.place)
    info = recording_of(store, recording, pair.spec)
    if candidates is None:
        tried = _tried(store, info, pair)
        chains = [Policy.model_validate({"draft": d}) for d in pair.draft_names if d in info.drafts]
        wanted = [*chains, *(p for found in tried.values() for p in found)]
        opened = open_trace(store, info.id, wanted, skip_corrupted=True)
        seen = opened.trace.select(recorded_parts(store, info.id, opened.ordinals).search)
        candidates = best_by_draft(store, seen, pair, tried, costs, progress=progress)
    else:
        unknown = sorted(candidates.keys() - {NO_DRAFT, *pair.draft_names})
        if unknown:
            known = ", ".join(sorted(pair.draft_names))
            raise PolicyError(f"draft: this pair has no draft {unknown[0]!r}; it has: {known}")
        opened = open_trace(store, info.id, candidates.values(), skip_corrupted=True)
    trace = opened.trace
    progress("reading prompts", 0, 1)
    about = {
        "recording": info.id,
        "profile": profile_id,
        "sampling": asdict(info.sampling),
        "seed": seed,
    }
    source = ChooserSource(trace, read_prompts(pair, trace.trajectories), about)
    progress("reading prompts", 1, 1)
    chooser = fit_chooser(
        trace,
        source.prompts,
        candidates,
        costs,
        parts=recorded_parts(store, info.id, opened.ordinals),
        reader=prompt_reader(pair),
        rule=rule,
        seed=seed,
        artifacts=fitted(store, pair.id),
    )
    return keep_chooser(store, pair, source, chooser)


def keep_chooser(
    store: TraceStore, pair: LoadedPair, source: ChooserSource, chooser: Chooser
) -> StoredFit:
    """Stores a chooser with what it predicts for every prompt of a source, and the candidates as
    policies."""
    described, arrays = chooser.to_document()
    rows, predicted = predictions(chooser, source.trace.trajectories, source.prompts)
    document = {**source.about, "pair": pair.id, **described, **rows}
    artifact = keep(
        store,
        DRAFT_CHOOSER,
        document,
        {**arrays, **predicted},
        pair_id=pair.id,
        fitted_to=list(predicted.values()),
        recording=source.about.get("recording"),
    )
    for policy in chooser.candidates.values():  # rounds name the candidate that drafted
        store.put_policy(policy.id, policy.spelled_out(), policy.label())
    return StoredFit(artifact, DRAFT_CHOOSER, document, ChooserPolicy.of(artifact).spelled_out())


def predictions(
    chooser: Chooser, texts: Sequence[Trajectory], prompts: Sequence[Prompt]
) -> tuple[dict[str, Any], dict[str, FloatArray]]:
    """What an artifact's document and its arrays hold of the recorded texts' prompts: which they
    are, and what the chooser predicts for them."""
    rows = [{"prompt": prompt_key(t.prompt_ids)} for t in texts]
    return {PREDICTED: rows}, {PREDICTED: predict_each(chooser, prompts)}


def best_by_draft(
    store: TraceStore,
    trace: ReplayTrace,
    pair: LoadedPair,
    tried: Mapping[str, Sequence[Policy]],
    profile: LatencyProfile,
    *,
    progress: Progress = silent,
) -> dict[str, Policy]:
    """The fastest policy of every draft by replay of ``trace``, the requests that a search may see:
    of all chains that :func:`optimizer.spaces.enumerated` has, and of those in ``tried``. ``none``
    comes first.

    Policies that the recording or the profile is not enough for are passed over, and drafts of
    which nothing is left. Raises TraceError where no draft is.
    """
    from spectune.optimizer.spaces import enumerated  # optuna takes a while to import

    find = fitted(store, pair.id)
    found = {NO_DRAFT: AUTOREGRESSIVE}
    drafts = dict.fromkeys([*trace.chains, *trace.forests])
    for n, draft in enumerate(drafts):
        if draft in trace.chains:
            depth = trace.chains[draft].gamma_max
        else:
            depth = trace.forests[draft].depth
        chains = [p for p in enumerated((draft,), depth) if p.speculates]
        seconds: dict[str, tuple[float, Policy]] = {}
        for policy in [*chains, *tried.get(draft, ())]:
            with suppress(PolicyError, TraceError):
                replayed = run_replay(trace, policy, profile, artifacts=find)
                seconds[policy.id] = float(replayed.seconds.sum()), policy
        if seconds:
            found[draft] = min(seconds.values(), key=lambda s: (s[0], s[1].id))[1]
        progress("replaying drafts", n + 1, len(drafts))
    if len(found) == 1:
        raise TraceError(
            "the recording has nothing that a draft's policy could be replayed from; `record "
            "--resume ID` makes it"
        )
    return found


def _tried(store: TraceStore, info: RecordingInfo, pair: LoadedPair) -> dict[str, list[Policy]]:
    """The fastest few policies of each draft in the recording's studies. Heads have no chain
    panorama, so their chains are named here."""
    found = {draft: _fastest(store, info, draft) for draft in pair.draft_names}
    for draft in found.keys() & info.trees.keys() - set(pair.chain_drafts):
        found[draft] = found[draft] or [
            Policy.model_validate({"draft": draft, "window": {"kind": "fixed", "gamma": 2}})
        ]
    return found


def _fastest(store: TraceStore, info: RecordingInfo, draft: str) -> list[Policy]:
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
            if isinstance(policy, Policy) and policy.speculates:
                found.setdefault(policy.id, policy)
        if len(found) == TRIED:
            break
    return list(found.values())
