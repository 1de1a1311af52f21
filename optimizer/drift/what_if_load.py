"""What a tuning of an engine would gain on the latest traffic: by the serving simulator."""

from __future__ import annotations

from datetime import datetime

from spectune.optimizer.inputs import published_policy
from spectune.optimizer.replay.loads import objective_of
from spectune.optimizer.tuning.engine_bench import constant, engine_bench
from spectune.optimizer.tuning.load_search import TokenStudy
from spectune.optimizer.tuning.sources import ServerTuned, sample_since
from spectune.runtime.policies.document import Policy
from spectune.settings import LoadSettings
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Publication, Recording


def speeds_under_load(
    store: TraceStore,
    p: Publication,
    info: Recording,
    load: LoadSettings,
    since: datetime,
    least: float,
) -> tuple[float, list[tuple[float, Policy]]]:
    """What a load's objective makes of the policy in force, and of constant numbers of draft tokens
    whose costs are known, on what came since a moment. Raises TraceError where the server may draft
    others, and none of these is ``least`` times as fast."""
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
        for draft, (first, last) in passes.items()
        for gamma in range(first, last + 1)
    ]
    speeds = [(study.trial(policy).value, policy) for policy in policies]
    speed = study.trial(current).value
    row = store.followed_server(server.boot)
    most = 0 if row is None else row.engine.get("num_speculative_tokens") or 0
    unknown = any(first > 0 or last < most for first, last in passes.values())
    if unknown and max(one for one, _ in speeds) < least * speed:
        raise TraceError(f"what steps cost is known of {passes} drafted tokens alone")
    return speed, speeds
