"""The fast replay: what a policy would have done on recorded texts, exactly, at tens of millions of
rounds a second.

The text does not depend on the policy, so a round is a few look-ups: the window says gamma,
:mod:`optimizer.replay.chain_tables` says how many tokens are drafted from here and how many of
them the text accepts, :mod:`runtime.costs` says how long that takes, and the window learns of it
through the very function that the runtime calls. One compiled loop does this for all requests of a
trace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from spectune.optimizer.replay.chains import ROUND_COLUMNS, Sums, replay_chains
from spectune.optimizer.replay.replay_trace import Replay, ReplayTrace, together
from spectune.optimizer.replay.trees import TreeLimits, replay_trees
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.by_prompt import stored_chooser
from spectune.runtime.policies.document import FullShortlist, LoadPolicy, Policy, PromptPolicy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.runtime.policies.windows import WindowState, init_state
from spectune.traces.errors import TraceError
from spectune.traces.tables import LatencyProfile


def run_replay(
    trace: ReplayTrace,
    policy: Policy,
    profile: LatencyProfile | None = None,
    *,
    per_round: bool = False,
    state: WindowState | None = None,
    artifacts: Artifacts | None = None,
    approximate: bool = False,
) -> Replay:
    """What the policy costs and yields on the trace, and on request every round. Rounds are exact;
    seconds are the profile's, or 0 without one. Releases the GIL while it runs.

    ``state`` goes on from an earlier session's (it is copied); by default the policy's window
    starts anew, and those of a choice by prompt always do. Of a table by load this is the entry of
    one request. ``artifacts`` finds what the policy
    names that was fitted. Distributions that a tree lacks are read, level by level, by the trace's
    reader; without one they raise TraceError. If ``approximate``, nothing is read: such nodes have
    no children, and ``Replay.missing`` counts the rounds. A shortlist that was not recorded is
    replayed by ``trace.on_demand`` where there is that.

    Raises TraceError if the recording or the profile does not hold what the policy needs,
    PolicyError if the policy needs costs and there is no profile.
    """
    if isinstance(policy, LoadPolicy):
        how: Any = {"per_round": per_round, "approximate": approximate, "state": state}
        alone = run_replay(trace, policy.at(1), profile, artifacts=artifacts, **how)
        return replace(alone, policy=policy)
    if isinstance(policy, PromptPolicy):
        chosen = {"per_round": per_round, "approximate": approximate}
        return _run_chosen(trace, policy, profile, artifacts, **chosen)
    if trace.on_demand is not None and trace.lacks_shortlist(policy):
        options = {"per_round": per_round, "artifacts": artifacts, "approximate": approximate}
        return trace.on_demand(trace, policy, profile, **options)
    plan = prepare(policy, [policy.draft], profile=profile, artifacts=artifacts)
    state = init_state(plan.window) if state is None else state
    replay = _run_plan(trace, plan, profile, state.fork(), per_round=per_round)
    if approximate or plan.rules is None:
        return replay
    for _ in range(policy.depth_max):
        if not replay.missing:
            break
        growth = trace.growth(policy, plan.rules)
        if not trace.read_lacking(policy, plan.rules, growth):
            break
        replay = _run_plan(trace, plan, profile, state.fork(), per_round=per_round)
    if replay.missing:
        raise TraceError(
            f"{replay.missing} of {replay.total.rounds} rounds of {policy.label()} would read "
            f"distributions of draft {policy.draft!r} that the recording does not hold, and the "
            "draft is not at hand to read them"
        )
    return replay


def _run_plan(
    trace: ReplayTrace,
    plan: Plan,
    profile: LatencyProfile | None,
    state: WindowState,
    *,
    per_round: bool,
) -> Replay:
    """One replay with what is recorded."""
    policy, growth = plan.policy, None
    if trace.uses_trees(policy):
        assert plan.rules is not None
        growth = trace.growth(policy, plan.rules)
    else:
        words = trace.outcomes(policy, plan.stop)
    costs, before = trace.costs(plan, profile, growth)
    size = trace.tokens if per_round else 0
    sums = Sums(
        np.zeros((len(trace.order), 7), dtype=np.int64),
        before[trace.order],
        size > 0,
        np.zeros((size, len(ROUND_COLUMNS)), dtype=np.int32),
        np.zeros((size, 3)),
    )
    if growth is None:
        used = replay_chains(plan.window, state, trace.texts, words, costs, sums)
        missing = 0
    else:
        assert plan.rules is not None
        stops = trace.stops(growth, plan.rules)
        limits = TreeLimits.of(plan.rules[0], rereads=trace.is_head(policy.draft))
        tables = growth, stops, trace.cached_from, limits
        used = replay_trees(plan.window, state, trace.texts, *tables, costs, sums)
        missing = int(sums.counts[:, 6].sum())
    replay = Replay(
        policy, trace.names, sums.counts[:, :6], sums.seconds, state, ((policy, missing),)
    )
    if missing and growth is not None:
        replay = replace(replay, lacks_text=not trace.forest(policy.draft).shared)
    if not per_round:
        return replay
    return replace(replay, rounds=sums.rounds[:used].copy(), round_s=sums.round_s[:used].copy())


def _run_chosen(
    trace: ReplayTrace,
    policy: PromptPolicy,
    profile: LatencyProfile | None,
    artifacts: Artifacts | None,
    **options: Any,
) -> Replay:
    """Each request under the candidate that a decoder would choose. Raises TraceError for prompts
    that the choice was not fitted to."""
    chooser = stored_chooser(policy, artifacts)
    prompts = [trace.trajectories[r].prompt_ids for r in trace.order]
    picks = np.array([chooser.choose_recorded(ids) for ids in prompts], dtype=np.int64)
    parts = []
    for pick in np.unique(picks):
        places, candidate = np.flatnonzero(picks == pick), policy.candidates[pick]
        part = trace.select(trace.order[places])
        parts.append((places, run_replay(part, candidate, profile, artifacts=artifacts, **options)))
    chosen = tuple(policy.candidates[pick] for pick in picks)
    return replace(together(policy, parts), chosen=chosen)


def could_reach(replay: Replay) -> float:
    """Returns the tokens/s that a replay could reach if the distributions it lacked were read.

    A draft model's lacking distributions lie off the text: with them there are more candidates to
    verify, none of which is accepted, so what was replayed is the most. A head's may hold the
    text's tokens: each round that lacks any could have accepted its whole tree, so that fewer
    rounds would have emitted as much.
    """
    total, speed = replay.total, replay.total.tokens_per_s
    if not replay.lacks_text or not replay.missing:
        return speed
    spared = replay.missing * replay.policy.depth_max / total.mean_accepted_length
    return speed * total.rounds / max(1.0, total.rounds - spared)


def shortlist_could_reach(
    trace: ReplayTrace, policy: Policy, profile: LatencyProfile, artifacts: Artifacts | None = None
) -> float:
    """Returns the tokens/s of a policy whose shortlist costs what it does and whose draft is
    accepted as with the whole head: about the most, before any of it is recorded. Raises TraceError
    and PolicyError as :func:`run_replay` does."""
    plan = prepare(policy, [policy.draft], profile=profile, artifacts=artifacts)
    whole = replace(plan, policy=policy.model_copy(update={"shortlist": FullShortlist()}))
    return could_reach(_run_plan(trace, whole, profile, init_state(plan.window), per_round=False))
