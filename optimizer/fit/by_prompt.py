"""Fitting a choice of a policy for each prompt (on-the-fly adaptation paper, section 5) to a
recording, and what it is worth on the rest of it.

Replay gives the seconds of every candidate for every recorded request, so that equation 5's least
squares predict what decides: the logarithm of a candidate's seconds over those of the fastest
single one. A ridge chosen by cross-validation, which leaves out one conversation at a time, keeps
to that one where prompts tell nothing. The requests of the search, which nothing is fitted to, tell
whether choosing gains anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from spectune.optimizer.fit.shared import StoredFit, keep
from spectune.optimizer.recording.shortlisted import ShortlistedDrafts
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.trace import open_trace
from spectune.optimizer.search import search
from spectune.optimizer.spaces import Space
from spectune.optimizer.stored_artifacts import fitted
from spectune.optimizer.tuning.confirmation import finite
from spectune.optimizer.tuning.parts import Parts, recorded_parts
from spectune.optimizer.tuning.sources import recording_named
from spectune.optimizer.tuning.timings import Timings
from spectune.runtime.loading import LoadedPair
from spectune.runtime.perplexity import log_perplexity
from spectune.runtime.policies.artifacts import DRAFT_CHOOSER, Artifacts
from spectune.runtime.policies.by_prompt import Chooser, prompt_key
from spectune.runtime.policies.document import Policy
from spectune.runtime.progress import Progress, silent
from spectune.traces.conversations import Index, summed
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile

FloatArray = npt.NDArray[np.float64]
Prompts = npt.NDArray[np.object_]
"""A row for each prompt: log length, log perplexity, token ids."""

MOST: Final = 3
"""Policies that are chosen from, each with another draft, unless the user names some."""
LEAST_REQUESTS: Final = 10
"""Requests below which nothing can be told."""
MAX_TERMS: Final = 4096
"""Most token ids that TF-IDF knows."""
RIDGES: Final = tuple(float(x) for x in np.logspace(-2, 5, 29))


def fit_recorded(
    store: TraceStore,
    recording: str,
    pair: LoadedPair,
    candidates: Sequence[Policy] = (),
    *,
    profile: str | None = None,
    progress: Progress = silent,
) -> StoredFit:
    """:func:`fit_chooser` of ``candidates`` (by default the best chains of three drafts, of which
    none is one) to a recording of this pair; ``profile``: the id of a stored one, by default the
    latest of the pair and its device. Raises PolicyError and TraceError for what is lacking.
    """
    info = recording_named(store, recording, pair=pair.spec)
    if info.engine != "native":
        raise TraceError(
            f"recording {info.id} is of {info.engine}, which follows no policy by prompt; "
            "`record` its prompts here and fit to that"
        )
    costs = store.profile_of(pair.id, profile, **pair.place)
    if costs is None or costs.pair_id != pair.id:
        where = f" on {pair.place['hardware']} in {pair.place['dtype']}" if not profile else ""
        raise TraceError(
            f"there is no latency profile {profile or ''} of pair {pair.id}{where}: run `profile`"
        )
    drafts = [draft for draft in pair.draft_names if draft in info.drafts]
    replayed = candidates or [Policy(draft=draft) for draft in drafts]
    opened = open_trace(store, info.id, replayed)
    trace, parts = opened.trace, recorded_parts(store, info.id, opened.ordinals)
    here = store, pair, info.id, opened.ordinals, fitted(store, pair.id)
    trace = trace.reading(None, ShortlistedDrafts(*here, few=0))
    if not candidates:
        longest = min((p.gamma_max for d in drafts for p in trace.panoramas[d]), default=1)
        space, seen = Space(tuple(drafts), longest), trace.select(parts.search)
        candidates = search(seen, costs, space, trials=0).best_of_drafts()[:MOST]
    about = {"recording": info.id, "profile": costs.id}
    return fit_chooser(store, pair, trace, parts, candidates, costs, about, progress=progress)


def fit_chooser(
    store: TraceStore,
    pair: LoadedPair,
    trace: ReplayTrace,
    parts: Parts,
    candidates: Sequence[Policy],
    profile: LatencyProfile,
    about: Mapping[str, Any],
    *,
    artifacts: Artifacts | None = None,
    approximate: bool = False,
    progress: Progress = silent,
) -> StoredFit:
    """Fits a choice between policies to the fit part of a trace, judges it on the search part, and
    stores it with ``about``. ``StoredFit.policy`` chooses where the gain is beyond noise, else
    it is the fastest single candidate. Raises TraceError for too few requests or policies, and for
    trees beyond the recording unless ``approximate``."""
    of = trace.conversations
    requests = len(np.unique(of[[*parts.fit, *parts.search]]))
    if requests < LEAST_REQUESTS or len(candidates) < 2:
        turns = " (turns of a conversation count as one)" if len(np.unique(of)) < len(of) else ""
        raise TraceError(
            f"{requests} requests{turns} and {len(candidates)} policies are too few to tell "
            f"whether choosing gains anything; it takes {LEAST_REQUESTS} and 2"
        )
    find = artifacts or fitted(store, pair.id)
    columns = [
        run_replay(trace, policy, profile, artifacts=find, approximate=approximate).seconds
        for policy in candidates
    ]
    seconds = np.stack(columns, axis=1)
    order = seconds[parts.search].sum(0).argsort(kind="stable")
    candidates, seconds = [candidates[k] for k in order], seconds[:, order]
    labels, prompts = [p.label() for p in candidates], _read_prompts(pair, trace, progress)
    ratios = np.log(seconds[parts.fit] / seconds[parts.fit, :1])
    columns = _columns().fit(prompts[parts.fit])
    ridge = fit_ridge(columns.transform(prompts[parts.fit]), ratios, of[parts.fit])
    chooser = _linear(columns, ridge, prompts)

    def worth_on(requests: Sequence[int]) -> dict[str, Any]:
        picks = [chooser.choose_recorded(ids) for ids in prompts[requests, 2]]
        return worth(seconds[requests], np.array(picks, dtype=np.int64), labels, of[requests])

    judged, rest = worth_on(parts.search), [*parts.race, *parts.confirm]
    low = judged["interval"][0]
    chooses = low is not None and low > 0
    document = {
        **about,
        "pair": pair.id,
        "candidates": [policy.id for policy in candidates],
        "policies": [policy.spelled_out() for policy in candidates],
        "perplexities": dict(chooser.perplexities),
        "judged": judged,
        "held_out": worth_on(rest) if rest else None,
        "chooses": chooses,
        "reason": f"on {len(parts.search)} requests that it was not fitted to, choosing gains "
        f"{100 * judged['gain']:.1f}% over {labels[0]} alone, {'' if chooses else 'not '}beyond "
        "noise",
    }
    arrays = {name: getattr(chooser, name) for name in ("terms", "idf", "weights", "intercept")}

    def policy(artifact: str) -> dict[str, Any]:
        first, *others = document["policies"]
        choice = {"by_prompt": {"artifact": artifact, "others": others}} if chooses else {}
        return {**first, **choice}

    return keep(store, DRAFT_CHOOSER, document, arrays, policy=policy)


def _read_prompts(pair: LoadedPair, trace: ReplayTrace, progress: Progress) -> Prompts:
    """Log length, log perplexity under the target and token ids of every prompt."""
    prompts = np.empty((len(trace.trajectories), 3), dtype=object)
    for n, text in enumerate(trace.trajectories):
        ids: list[int] = text.prompt_ids.tolist()
        prompts[n, 0], prompts[n, 1] = np.log(len(ids)), log_perplexity(pair.target, ids)
        prompts[n, 2] = ids
        progress("reading prompts", n + 1, len(prompts))
    return prompts


def worth(
    seconds: FloatArray, picks: Index, labels: Sequence[str], conversations: Index
) -> dict[str, Any]:
    """What choosing the candidates ``picks`` [n] is worth where they take ``seconds`` [n, K],
    JSON-ready: ``gain``, the speed over the first candidate's, less 1, with its 95% ``interval``
    over ``conversations`` [n]; ``oracle_gain``, that of the fastest for each request; ``chosen``,
    how often by label."""
    chosen = seconds[np.arange(len(picks)), picks]
    columns = {"chosen": chosen[:, None], "first": seconds[:, :1]}
    both = Timings({name: summed(column, conversations) for name, column in columns.items()})
    ratio, *interval = both.ratio("chosen", "first")
    return {
        "requests": len(picks),
        "gain": ratio - 1.0,
        "interval": finite([end - 1.0 for end in interval]),
        "oracle_gain": float(seconds[:, 0].sum() / seconds.min(1).sum()) - 1.0,
        "seconds": dict(zip(labels, seconds.sum(0).tolist(), strict=True)),
        "chosen": {label: int((picks == k).sum()) for k, label in enumerate(labels)},
    }


def _columns() -> ColumnTransformer:
    """From :data:`Prompts` to what is regressed on."""
    return ColumnTransformer([
        ("numbers", StandardScaler(), [0, 1]),
        ("terms", TfidfVectorizer(analyzer=list, max_features=MAX_TERMS), 2),
    ])  # fmt: skip


def fit_ridge(x: Any, y: FloatArray, conversations: Index) -> Ridge:
    """A ridge regression of ``y`` [n, K] on ``x`` [n, d], which may be sparse, fitted to all: of
    each column the one of :data:`RIDGES` whose squared error is least where ``conversations`` [n]
    are left out one at a time, as turns of one tell of each other.

    What is predicted without a group of rows follows from the fit to all: its errors there are
    (I - H)^-1 times those of that fit, H the group's block of the matrix that maps y to its fit.
    """
    n, groups = len(y), [np.flatnonzero(conversations == c) for c in np.unique(conversations)]
    if len(groups) < 2:
        return Ridge(RIDGES[-1]).fit(x, y)
    gram = np.asarray((x @ x.T).todense() if hasattr(x, "todense") else x @ x.T, dtype=np.float64)
    centre = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(centre @ gram @ centre)
    errors = []
    for ridge in RIDGES:
        kept = np.maximum(values, 0) / (np.maximum(values, 0) + ridge)
        rest = y - y.mean(0) - vectors @ (kept[:, None] * (vectors.T @ y))
        left_out = [
            np.linalg.solve(np.eye(len(g)) - 1 / n - (vectors[g] * kept) @ vectors[g].T, rest[g])
            for g in groups
        ]
        errors.append((np.concatenate(left_out) ** 2).sum(0))
    return Ridge(np.array(RIDGES)[np.argmin(errors, axis=0)]).fit(x, y)


def _linear(fitted: ColumnTransformer, ridge: Ridge, prompts: Prompts) -> Chooser:
    """A fitted regression as plain arrays, with the perplexities of the recorded prompts."""
    columns = fitted.named_transformers_
    numbers, tfidf = columns["numbers"], columns["terms"]
    weights = np.asarray(ridge.coef_.T, dtype=np.float64).copy()
    weights[:2] /= numbers.scale_[:, None]
    intercept = ridge.intercept_ - numbers.mean_ @ weights[:2]
    terms = np.array(tfidf.get_feature_names_out().tolist(), dtype=np.int64)
    perplexities = {prompt_key(ids): float(nats) for _, nats, ids in prompts}
    return Chooser(terms, tfidf.idf_.astype(np.float64), weights, intercept, perplexities)
