"""What a tuning on the latest traffic would gain, by simulation: the best constant number of draft
tokens, or none, over the policy in force. A tuning searches more, so this is the least."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from spectune.optimizer.inputs import published_policy
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

Speed = tuple[float, Policy]
"""How fast a policy is, in one unit with others."""
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
            current, speeds = _engine(store, p, info, settings, since)
    except Exception as error:  # a tuning is due where nothing is known
        if not isinstance(error, (SpectuneError, ImportError)):
            log.exception("what a tuning would gain cannot be simulated")
        return Gain(None, f"not simulated: {error}")
    speed, best = max(speeds, key=lambda one: one[0])
    ratio = speed / current
    return Gain(ratio, f"simulated: {best.label()} is {ratio:.2f} times as fast")


def _engine(
    store: TraceStore,
    p: Publication,
    info: Recording,
    settings: Mapping[str, Any],
    since: datetime,
) -> tuple[float, list[Speed]]:
    """What the load's objective makes of the policy in force, and of the others."""
    # They read what a search does.
    from spectune.optimizer.replay.loads import objective_of
    from spectune.optimizer.tuning.engine_bench import constant, engine_bench
    from spectune.optimizer.tuning.load_search import TokenStudy
    from spectune.optimizer.tuning.sources import ServerTuned, sample_since

    load = LoadSettings(**settings.get("load", {}))
    arrivals = load.arrivals or "recorded"
    key = f"drift {p.deployment} {p.version} {store.clock():%Y-%m-%d %H:%M}"
    server = ServerTuned(str(info.options.get("boot", "")), info.device_name)
    sample = sample_since(store, info.pair_id, since, key=key, engine=info.engine, server=server)
    bench = engine_bench(store, sample, [], arrivals, objective_of(load))
    study, current = TokenStudy(bench), published_policy(p)
    passes = {draft: served for draft, served in bench.costs.passes.items() if draft}
    if not passes:
        raise TraceError("no step that drafts was recorded")
    if current.speculates and len(passes) == 1:  # another pair may have another name of it
        current = current.model_copy(update={"draft": next(iter(passes))})
    policies = [
        constant(draft, gamma)
        for draft, (least, most) in passes.items()
        for gamma in range(least, most + 1)
    ]
    speeds = [(study.trial(policy).value, policy) for policy in policies]
    speed = study.trial(current).value
    row = store.followed_server(server.boot)
    most = 0 if row is None else row.engine.get("num_speculative_tokens") or 0
    unknown = any(least > 0 or last < most for least, last in passes.values())
    if unknown and max(one for one, _ in speeds) < LEAST * speed:
        raise TraceError(f"what steps cost is known of {passes} drafted tokens alone")
    return speed, speeds


def _native(
    store: TraceStore, p: Publication, info: Recording, since: datetime
) -> tuple[float, list[Speed]]:
    """Tokens a second of one request at a time under the policy in force, and under the others,
    where an earlier tuning made the panoramas of what was served."""
    from spectune.optimizer.replay.fast_replay import run_replay
    from spectune.optimizer.replay.trace import open_trace
    from spectune.optimizer.stored_artifacts import fitted

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

    speeds: list[Speed] = [(speed_of(AUTOREGRESSIVE), AUTOREGRESSIVE)]
    for policy in others:
        with suppress(TraceError):  # it was recorded to fewer tokens
            speeds.append((speed_of(policy), policy))
    return speed_of(current), speeds
