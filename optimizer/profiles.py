"""Which latency profile a pair's policies are judged by: found or measured, and how far it is to be
trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np

from spectune.optimizer.record import whole_texts
from spectune.optimizer.timings import Timings
from spectune.runtime.loading import LoadedPair
from spectune.runtime.profiling import environment, measure_profile
from spectune.runtime.progress import Progress, silent
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Trajectory

PROFILE_AGE: Final = timedelta(hours=24)
"""A profile of the same environment is used again for so long."""
LEAST_SPREAD: Final = 0.01
"""Predicted ratios of speeds are taken to be no surer than this, however well a check went."""


def usable_profile(
    store: TraceStore,
    pair: LoadedPair,
    drafts: tuple[str, ...],
    now: datetime,
    *,
    gamma_max: int,
    trees: bool = False,
    since: datetime | None = None,
) -> LatencyProfile | None:
    """The newest accepted profile of this pair in this environment that covers the drafts (and
    their ``trees``) and windows up to ``gamma_max``, unless it is a day old, or older than
    ``since``."""
    grown = {d for d in drafts if d != "ngram" and trees}
    here = environment(pair)
    same = {key: here[key] for key in ("device", "torch", "threads", "dtype")}.items()
    for profile in store.profiles(pair.id, pair.device.type, here["dtype"]):
        made = profile.created_at
        recent = now - made < PROFILE_AGE and (since is None or made >= since)
        covers = set(drafts) <= set(profile.drafts) and grown <= set(profile.tree_drafts)
        covers &= profile.environment.get("gamma_max", 0) >= gamma_max
        if same <= profile.environment.items() and recent and covers:
            return profile if profile.accepted(trees=trees) else None
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
        f"profile {profile.id} failed its check: policies are predicted within {error:.0f}% "
        "(median), so the race weighs more"
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
    fresh: bool = False,
    trajectories: Sequence[Trajectory] = (),
    own_since: datetime | None = None,
    progress: Progress = silent,
) -> LatencyProfile:
    """A profile fit for use: a recent one of this environment, else a new measurement on the texts
    and contexts of ``trajectories``, of two sweeps where its check fails after one. Where it fails
    after both, :func:`doubts` says so.

    A ``fresh`` tuning uses only one that was made after ``own_since``, when its first attempt
    began; None: this is the first.
    """
    if not fresh or own_since is not None:
        since = own_since if fresh else None
        now = datetime.now(UTC)
        found = usable_profile(
            store, pair, drafts, now, gamma_max=gamma_max, trees=trees, since=since
        )
        if found is not None:
            return found
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
    measured = measure_profile(
        pair,
        gamma_max=gamma_max,
        most=2,
        trees=trees,
        texts=whole_texts(trajectories),
        contexts=served_contexts(trajectories),
        progress=lambda what, done, total: progress("profile", done, total),
    )
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
            known = (expected[ran] > 0) & (executed > 0)
            ratios += (expected[ran][known] / executed[known]).tolist()
    return float(np.median(ratios)) if ratios else 1.0
