"""What a tuning on the latest traffic would gain, by simulation: the best constant number of draft
tokens, or none, over the policy in force. A tuning searches more, so this is the least."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from spectune.optimizer.inputs import published_policy
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.trace import open_trace
from spectune.optimizer.stored_artifacts import fitted
from spectune.runtime.policies.document import AUTOREGRESSIVE, FixedWindow, Policy
from spectune.settings import LoadSettings
from spectune.traces.errors import SpectuneError, TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Publication, Recording

SINCE: Final = timedelta(hours=1)
"""The traffic that is simulated."""
GAMMA_MAX: Final = 8
"""Most draft tokens that are tried on the native decoder; of an engine, all that it served."""
LEAST: Final = 1.03
"""How many times as fast a policy has to be that a tuning is made due for."""
FEWEST: Final = 20
"""Requests that tell something."""

log = logging.getLogger("spectune.drift")


class Gain(NamedTuple):
    """How many times as fast the best was (None: not known), and what it is, or why not."""

    ratio: float | None
    why: str


def what_if(
    store: TraceStore,
    p: Publication,
    info: Recording | None,
    settings: Mapping[str, Any],
    since: datetime | None = None,
) -> Gain:
    """Simulates the last hour of what a recording (None: nothing was served) is a part of, or what
    came ``since`` a later moment, under the load of a schedule's ``settings``."""
    if info is None:
        return Gain(None, "not simulated: nothing was served lately")
    try:
        since = max(store.clock() - SINCE, since or datetime.min.replace(tzinfo=UTC))
        if info.engine == "native":
            current, speeds = _native(store, p, info, since)
        else:
            # It reads what a search does.
            from spectune.optimizer.drift.what_if_load import speeds_under_load

            load = LoadSettings(**settings.get("load", {}))
            current, speeds = speeds_under_load(store, p, info, load, since, LEAST)
    except Exception as error:  # a tuning is due where nothing is known
        if not isinstance(error, (SpectuneError, ImportError)):
            log.exception("what a tuning would gain cannot be simulated")
        return Gain(None, f"not simulated: {error}")
    speed, best = max(speeds, key=lambda one: one[0])
    ratio = speed / current
    return Gain(ratio, f"simulated: {best.label()} is {ratio:.2f} times as fast")


def _native(
    store: TraceStore, p: Publication, info: Recording, since: datetime
) -> tuple[float, list[tuple[float, Policy]]]:
    """Tokens a second of one request at a time under the policy in force, and under the others,
    where an earlier tuning made the panoramas of what was served."""
    current = published_policy(p)
    profile = store.profile_of(p.pair_id, device=p.device, dtype=info.options.get("dtype"))
    if profile is None:
        raise TraceError("there is no latency profile")
    drafts = {one.draft for one in current.candidates if one.speculates} or {*profile.chain_drafts}
    windows = [FixedWindow(gamma=n) for n in range(1, GAMMA_MAX + 1)]
    others = [Policy(draft=draft, window=window) for draft in sorted(drafts) for window in windows]
    trace = open_trace(store, info.id, [current, *others], since=since).trace
    if len(trace.trajectories) < FEWEST:
        raise TraceError(f"panoramas of {len(trace.trajectories)} requests are too few")

    def speed_of(policy: Policy) -> float:
        replayed = run_replay(trace, policy, profile, artifacts=fitted(store, p.pair_id))
        return replayed.total.tokens_per_s

    speeds: list[tuple[float, Policy]] = [(speed_of(AUTOREGRESSIVE), AUTOREGRESSIVE)]
    for policy in others:
        with suppress(TraceError):  # it was recorded to fewer tokens
            speeds.append((speed_of(policy), policy))
    return speed_of(current), speeds
