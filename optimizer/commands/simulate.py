"""`simulate`: replay a recording under any policy."""

from __future__ import annotations

from collections import Counter

from spectune.optimizer.commands.common import (
    Talk,
    check_writable,
    deployment_for,
    open_store,
    policy_named,
    rounds_of,
    write_rows,
)
from spectune.optimizer.commands.outcomes import outcome_result
from spectune.optimizer.commands.results import Result
from spectune.optimizer.inputs import outcome_json
from spectune.optimizer.replay.served_rounds import differing_rounds
from spectune.optimizer.replay.trace import simulate as replay
from spectune.optimizer.tuning.sources import recording_named
from spectune.settings import Simulate
from spectune.traces.tables import LatencyProfile, Recording


def simulate(s: Simulate, talk: Talk) -> Result:
    check_writable(s, per_round=s.per_round)
    with open_store(s) as store:
        info = recording_named(store, s.recording, engine=s.engine)
        device = str(info.options.get("device", "cpu")) if s.device == "auto" else s.device
        deployment = deployment_for(s, info.engine)
        named = info.device_name if s.device == "auto" else ""
        where = info.pair_id, named or device, deployment
        policy = policy_named(store, s.policy, *where, talk)
        if s.load.arrivals is not None:
            keys = ("since", "profile", "per_round")
            talk.no_effect(s, "under a load, whose requests are those that were served", *keys)
            # It reads what a search does, torch with it.
            from spectune.optimizer.commands.load import simulate_under_load

            return simulate_under_load(store, info, policy, s, talk)
        talk.no_effect(s, "without --arrivals", "load.")
        dtype = info.options.get("dtype")
        profile = store.profile_of(info.pair_id, s.profile, device=device, dtype=dtype)
        replayed, opened, approximate = replay(
            store, info.id, policy, profile, since=s.since, tell=talk.tell, limit=s.limit,
            per_round=s.per_round is not None,
        )  # fmt: skip
        if policy.speculates and s.since is None:
            for draft in sorted({p.draft for p in policy.candidates if p.speculates}):
                if apart := differing_rounds(store, opened, draft):
                    talk.tell(f"warning: {apart}")
        for chunk in opened.skipped:
            talk.tell(f"left out: {chunk}")
        if opened.lacking:
            of = f"{opened.lacking} of {len(opened.ordinals) + opened.lacking} requests"
            talk.tell(
                f"left out: {of}, which lack panoramas; `record --resume {info.id}` makes them"
            )
        _tell_seconds(info, profile, talk)
        if s.per_round:
            pairs = zip(replayed.names, replayed.steps(), strict=True)
            write_rows(s.per_round, (r for (q, *_), steps in pairs for r in rounds_of(q, steps)))
        outcome = replayed.outcome()
        data = outcome_json(outcome, policy)
        if replayed.chosen:
            data["picks"] = dict(sorted(Counter(replayed.chosen).items()))
    if approximate:
        talk.tell(f"approximate: {approximate}")
        data["approximate"] = True
    return outcome_result(outcome, data)


def _tell_seconds(info: Recording, profile: LatencyProfile | None, talk: Talk) -> None:
    """Says whose seconds these are, where they are not simply the profile's."""
    if info.engine != "native":
        seconds = "not known" if profile is None else "the native decoder's"
        talk.tell(
            f"seconds are {seconds}: {info.engine}'s speed depends on its load: add --arrivals "
            "clients:8, say"
        )
    elif profile is None:
        talk.tell(
            "no latency profile of this pair and device in the recording's dtype: seconds are left "
            "at 0 (run `profile`)"
        )
