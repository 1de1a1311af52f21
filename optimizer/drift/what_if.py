"""What a tuning on the latest traffic would gain, by simulation: the best constant number of draft
tokens, or none, over the policy in force. A tuning searches more, so this is the least."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
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

log = logging.getLogger("spectune.drift")


class Speed(NamedTuple):
    """A policy, and how fast it is, in one unit with others."""

    policy: Policy
    speed: float


class Gain(NamedTuple):
    """How many times as fast the best was (None: not known), and what it is, or why not."""

    ratio: float | None
    why: str


def what_if(
    store: TraceStore, p: Publication, info: Recording | None, settings: Mapping[str, Any]
) -> Gain:
    """Simulates the last hour of what a recording (None: nothing was served) is a part of, under
    the load of a schedule's ``settings``."""
    if info is None:
        return Gain(None, "not simulated: nothing was served lately")
    try:
        current, speeds = (_native if info.engine == "native" else _engine)(
            store, p, info, settings
        )
    except Exception as error:  # a tuning is due where nothing is known
        if not isinstance(error, SpectuneError):
            log.exception("what a tuning would gain cannot be simulated")
        return Gain(None, f"not simulated: {error}")
    best = max(speeds, key=lambda one: one.speed)
    ratio = best.speed / current
    return Gain(ratio, f"simulated: {best.policy.label()} is {ratio:.2f} times as fast")


def _engine(
    store: TraceStore, p: Publication, info: Recording, settings: Mapping[str, Any]
) -> tuple[float, list[Speed]]:
    """What the load's objective makes of the policy in force, and of the others."""
    # They read what a search does.
    from spectune.optimizer.replay.loads import objective_of
    from spectune.optimizer.tuning.engine_bench import constant, engine_bench
    from spectune.optimizer.tuning.load_search import TokenStudy
    from spectune.optimizer.tuning.sources import ServerTuned, sample_since

    load = LoadSettings(**settings.get("load", {}))
    arrivals = load.arrivals or "recorded"
    is_given = not arrivals.startswith("clients")
    if is_given and load.objective == "throughput":  # what arrives says how much is served
        load = load.model_copy(update={"objective": "tpot"})
    key = f"drift {p.deployment} {p.version} {store.clock():%Y-%m-%d %H:%M}"
    server = ServerTuned(str(info.options.get("boot", "")), info.device_name)
    sample = sample_since(store, info.pair_id, SINCE, key=key, engine=info.engine, server=server)
    bench = engine_bench(store, sample, [], arrivals, objective_of(load))
    study, passes = TokenStudy(bench), bench.costs.passes
    current, (loaded, *others) = published_policy(p), [draft for draft in passes if draft]
    if current.speculates and current.draft != loaded and not others:  # another pair's name of it
        current = current.model_copy(update={"draft": loaded})
    policies = [Policy()] if "" in passes else []
    for draft in (loaded, *others):
        least, most = passes[draft]
        policies += [constant(draft, gamma) for gamma in range(least, most + 1)]
    speeds = [Speed(policy, study.trial(policy).value) for policy in policies]
    speed = study.trial(current).value
    server = store.followed_server(str(info.options.get("boot", "")))
    most = 0 if server is None else server.engine.get("num_speculative_tokens") or 0
    unknown = any(least > 0 or last < most for draft, (least, last) in passes.items() if draft)
    if unknown and max(one.speed for one in speeds) < LEAST * speed:
        raise TraceError(f"what steps cost is known of {passes} drafted tokens alone")
    return speed, speeds


def _native(
    store: TraceStore, p: Publication, info: Recording, settings: Mapping[str, Any]
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
    trace = open_trace(store, info.id, [current, *others], since=store.clock() - SINCE).trace
    if len(trace.trajectories) < FEWEST:
        raise TraceError(f"panoramas of {len(trace.trajectories)} requests are too few")

    def speed_of(policy: Policy) -> float:
        replayed = run_replay(trace, policy, profile, artifacts=fitted(store, p.pair_id))
        return replayed.total.tokens_per_s

    speeds = [Speed(AUTOREGRESSIVE, speed_of(AUTOREGRESSIVE))]
    for policy in others:
        with suppress(TraceError):  # it was recorded to fewer tokens
            speeds.append(Speed(policy, speed_of(policy)))
    return speed_of(current), speeds
