"""`simulate`: replay a recording under any policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from spectune.db.database_errors import NotFoundError
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
from spectune.optimizer.inputs import outcome_json, policy_of
from spectune.optimizer.replay.replay_trace import Replay
from spectune.optimizer.replay.served_rounds import differing_rounds
from spectune.optimizer.replay.trace import simulate as replay
from spectune.optimizer.report.words import interval
from spectune.optimizer.tuning.confirmation import ends_of
from spectune.optimizer.tuning.sources import recording_named
from spectune.optimizer.worth import speedup
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.settings import Simulate
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Recording


def simulate(s: Simulate, talk: Talk) -> Result:
    check_writable(s, per_round=s.per_round)
    with open_store(s) as store:
        info = recording_named(store, s.recording, engine=s.engine)
        here = "native" if info.engine == "native" else "engine"
        talk.no_effect(s, ["alone" if s.load.arrivals is None else "load", here])
        device = str(info.options.get("device", "cpu")) if s.device == "auto" else s.device
        deployment = deployment_for(s, info.engine)
        named = info.device_name if s.device == "auto" else ""
        where = info.pair_id, named or device, deployment
        policy = policy_named(store, s.policy, *where, talk)
        if s.load.arrivals is not None:
            if info.engine == "native":
                from spectune.optimizer.commands.load import simulate_decoder

                dtype = info.options.get("dtype")
                profile = store.profile_of(info.pair_id, s.profile, device=device, dtype=dtype)
                return simulate_decoder(store, info, policy, profile, s, talk)
            # It reads what a search does, torch with it.
            from spectune.optimizer.commands.load import simulate_under_load

            return simulate_under_load(store, info, policy, s, talk)
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
        if profile is not None and info.engine == "native":
            data["speedups"] = _speedups(store, info, where, replayed, profile, s)
        if replayed.chosen:
            picks = Counter(candidate.label() for candidate in replayed.chosen)
            data["picks"] = dict(sorted(picks.items()))
    if approximate:
        talk.tell(f"approximate: {approximate}")
        data["approximate"] = True
    result = outcome_result(outcome, data)
    lines = [result.text, *_in_words(data.get("speedups", {}))]
    return replace(result, text="\n".join(lines))


def _speedups(
    store: TraceStore,
    info: Recording,
    where: tuple[str, str, str],
    replayed: Replay,
    profile: LatencyProfile,
    s: Simulate,
) -> dict[str, Any]:
    """The policy's predicted speed over no draft's, and over that of what is in force (``where``:
    pair, device, deployment), where the same requests of the recording tell that."""
    others = {"autoregressive": AUTOREGRESSIVE}
    with suppress(NotFoundError, PolicyError):
        if (active := policy_of(store, "active", *where)) is not None:
            others["active"] = active
    conversations = np.array([number for _, _, number in replayed.names], dtype=np.int64)
    speedups = {}
    for name, other in others.items():
        if other.id in (replayed.policy.id, AUTOREGRESSIVE.id if name == "active" else ""):
            continue
        try:
            base = replay(store, info.id, other, profile, since=s.since, limit=s.limit).replay
        except (PolicyError, TraceError):  # its draft was not recorded
            continue
        if base.names == replayed.names:
            ratio = speedup(base.seconds, replayed.seconds, conversations)
            about = {"id": other.id, "label": other.label()}
            speedups[name] = {**about, "ratio": ratio[0], "interval": ends_of(ratio)}
    return speedups


def _in_words(speedups: Mapping[str, Any]) -> list[str]:
    """A line for each policy that another is compared with."""
    names = {"autoregressive": "no draft", "active": "what is in force"}
    return [
        f"predicted {of['ratio']:.2f} times as fast as {names[name]}"
        f"{f', {label}' if (label := of['label']) != name else ''}{interval(of['interval'])}"
        for name, of in speedups.items()
    ]


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
