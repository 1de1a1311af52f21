"""Which latency profile a pair's policies are judged by: found or measured, and how far it is to be
trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np

from spectune.optimizer.execute import probe_s
from spectune.optimizer.recording.record import whole_texts
from spectune.optimizer.tuning.timings import Timings
from spectune.runtime.loading import LoadedPair
from spectune.runtime.profiling.measure import environment, measure_profile
from spectune.runtime.progress import Progress, silent
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Trajectory

PROFILE_AGE: Final = timedelta(hours=24)
"""A profile of the same environment is used again for so long."""
LEAST_SPREAD: Final = 0.01
"""Predicted ratios of speeds are taken to be no surer than this, however well a check went."""


def stored_profile(
    store: TraceStore,
    pair: LoadedPair,
    drafts: tuple[str, ...],
    since: datetime,
    *,
    gamma_max: int,
    trees: bool = False,
    requests: int = 1,
) -> LatencyProfile | None:
    """The newest profile since then of this pair in this environment that covers the drafts (and
    their ``trees``), windows up to ``gamma_max`` and so many ``requests`` at once."""
    grown = {d for d in drafts if d != "ngram" and trees}
    here = environment(pair)
    same = {key: here[key] for key in ("device", "torch", "threads", "dtype")}.items()
    for profile in store.profiles(pair.id, pair.device.type, here["dtype"]):
        covers = set(drafts) <= set(profile.drafts) and grown <= set(profile.tree_drafts)
        covers &= profile.environment.get("gamma_max", 0) >= gamma_max
        covers &= profile.environment.get("requests", 1) >= requests
        if same <= profile.environment.items() and profile.created_at >= since and covers:
            return profile
    return None


def prediction_spread(profile: LatencyProfile, *, trees: bool) -> float:
    """The standard deviation, relative, of a predicted ratio of two policies' speeds: what the
    profile's check found, the larger of that of chains and of trees."""
    spreads = (check["policy_spread"] for check in profile.checks(trees=trees))
    return float(max(LEAST_SPREAD, *spreads))


def doubts(profile: LatencyProfile, *, trees: bool) -> str:
    """What is to be said of a profile that failed its check; empty for one that passed."""
    if profile.accepted(trees=trees):
        return ""
    checks = profile.checks(trees=trees)
    error = 100 * max(float(check["policy_error"]) for check in checks)
    return (
        f"profile {profile.id} failed its check: the median error of predicted policies is "
        f"{error:.0f}%"
    )


def served_contexts(trajectories: Iterable[Trajectory]) -> tuple[int, ...]:
    """The contexts between which rounds of these texts begin: quantiles 0.05, 0.5 and 0.95."""
    spans = [len(t.prompt_ids) + np.arange(len(t.output_ids)) for t in trajectories]
    if not spans:
        return ()
    quantiles = np.quantile(np.concatenate(spans), [0.05, 0.5, 0.95])
    return tuple(dict.fromkeys(int(q) for q in quantiles))


def profile_for(
    store: TraceStore,
    pair: LoadedPair,
    drafts: tuple[str, ...],
    *,
    gamma_max: int = 16,
    trees: bool = True,
    requests: int = 1,
    trajectories: Sequence[Trajectory] = (),
    since: datetime | None = None,
    tell: Callable[[str], None] = lambda line: None,
    progress: Progress = silent,
) -> LatencyProfile:
    """A profile of this environment that was made after ``since`` (None: a day ago) and passed its
    check, else a new measurement on the texts and contexts of ``trajectories``, with up to so many
    ``requests`` at once, of two sweeps where its check fails after one. Where it fails after both,
    :func:`doubts` says so."""
    oldest = since or datetime.now(UTC) - PROFILE_AGE
    what: dict[str, Any] = {"gamma_max": gamma_max, "trees": trees, "requests": requests}
    stored = stored_profile(store, pair, drafts, oldest, **what)
    if stored is not None:
        failed = doubts(stored, trees=trees)
        if not failed:
            return stored
        tell(f"{failed}: it is measured anew")
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    probe = probe_s(pair)
    measured = measure_profile(
        pair,
        **what,
        most=2,
        texts=whole_texts(trajectories),
        contexts=served_contexts(trajectories),
        progress=lambda what, done, total: progress("profile", done, total),
    )
    measured = replace(measured, environment={**measured.environment, "probe_s": probe})
    return store.get_profile(store.put_profile(measured))


def common_factor(timings: Timings) -> float:
    """The one factor that brings predicted speeds to those executed: the median, over the requests
    of every policy of which something was predicted, of predicted over executed seconds (a request
    counts with the median of its executions); 1 where nothing was predicted.

    It is fitted to the executions beside which it is then shown, so what is off after it says how
    policies compare, not how fast they are.
    """
    ratios: list[float] = []
    for policy, expected in (timings.expected or {}).items():
        seconds = timings.seconds[policy]
        ran = ~np.isnan(seconds).all(1)
        if ran.any():
            executed = np.nanmedian(seconds[ran], axis=1)
            both = (expected[ran] > 0) & (executed > 0)
            ratios += (expected[ran][both] / executed[both]).tolist()
    return float(np.median(ratios)) if ratios else 1.0
