"""The fast replay: what a policy would have done on recorded texts, exactly, at tens of millions of
rounds a second.

The text does not depend on the policy, so a round is a few look-ups: the window says gamma,
:mod:`optimizer.simulate.chain_tables` says how many tokens are drafted from here and how many of
them the text accepts, :mod:`runtime.costs` says how long that takes, and the window learns of it
through the very function that the runtime calls. One compiled loop does this for all requests of a
trace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.optimizer.simulate.chains import ROUND_COLUMNS, Sums, replay_chains
from spectune.optimizer.simulate.replay_trace import Replay, ReplayTrace, together
from spectune.optimizer.simulate.trees import TreeLimits, replay_trees
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AnyPolicy, ChooserPolicy, Policy
from spectune.runtime.policies.plan import Plan, compile_plan
from spectune.runtime.policies.prepared_chooser import prepare_chooser, stored_chooser
from spectune.runtime.policies.windows import WindowState, init_state
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import LatencyProfile, Outcome

FloatArray = npt.NDArray[np.float64]


def replay(
    trace: ReplayTrace,
    policy: AnyPolicy,
    profile: LatencyProfile | None = None,
    *,
    artifacts: Artifacts | None = None,
    approximate: bool = False,
) -> Outcome:
    """What the policy costs and yields on the trace. Rounds are exact; seconds are the profile's,
    or 0 without one.

    Raises TraceError if the recording or the profile does not hold what the policy needs,
    PolicyError if the policy needs costs and there is no profile.
    """
    replayed = run_replay(trace, policy, profile, artifacts=artifacts, approximate=approximate)
    return replayed.outcome()


def run_replay(
    trace: ReplayTrace,
    policy: AnyPolicy,
    profile: LatencyProfile | None = None,
    *,
    per_round: bool = False,
    state: WindowState | None = None,
    artifacts: Artifacts | None = None,
    approximate: bool = False,
) -> Replay:
    """:func:`replay` with arrays instead of values, and on request every round. Releases the GIL
    while it runs.

    ``state`` goes on from an earlier session's (it is copied); by default the policy's window
    starts anew. ``artifacts`` finds what the policy names that was fitted. A tree that would read
    distributions which were not recorded raises TraceError, unless ``approximate``: then such nodes
    have no children, and ``Replay.missing`` counts the rounds. It also counts those whose shortlist
    holds none of the children recorded, where the proposal is taken to be wrong.
    """
    if isinstance(policy, ChooserPolicy):
        if state is not None:
            raise ValueError(
                "a chooser's candidates begin with windows of their own: replay one of them to go "
                "on from a state"
            )
        return _run_chosen(
            trace,
            policy,
            profile,
            per_round=per_round,
            artifacts=artifacts,
            approximate=approximate,
        )
    if profile is None and not policy.replays_exactly:
        raise PolicyError(
            "window.costs 'recent' reads the clock, which a replay takes from a latency profile: "
            "give one"
        )
    prepared = compile_plan(policy, [policy.draft], profile=profile, artifacts=artifacts)
    state = init_state(prepared.window) if state is None else state.fork()
    if trace.uses_trees(policy):
        return _run_trees(
            trace, policy, prepared, state, profile, per_round=per_round, approximate=approximate
        )
    words, doubtful = trace.outcomes(policy, prepared.stop, prepared.shortlist)
    costs, before = trace.costs(prepared, profile)
    sums = _sums(trace, before, per_round=per_round or len(doubtful) > 0)
    used = replay_chains(prepared.window, state, trace.texts, words, costs, sums)
    rounds, round_s = sums.rounds[:used].copy(), sums.round_s[:used].copy()
    known = (
        doubtful[trace.offsets[trace.order[rounds[:, 0]]] + rounds[:, 1]]
        if len(doubtful)
        else rounds[:, 2]
    )
    missing = int((known < rounds[:, 2]).sum())
    made = Replay(
        policy, trace.names, sums.counts[:, :6], sums.seconds, state, ((policy, missing),)
    )
    return replace(made, rounds=rounds, round_s=round_s) if per_round else made


def _sums(trace: ReplayTrace, before: FloatArray, *, per_round: bool) -> Sums:
    size = trace.tokens if per_round else 0
    rounds = np.zeros((size, len(ROUND_COLUMNS)), dtype=np.int32)
    return Sums(
        np.zeros((len(trace.order), 7), dtype=np.int64),
        before[trace.order],
        per_round,
        rounds,
        np.zeros((size, 3)),
    )


def _run_trees(
    trace: ReplayTrace,
    policy: Policy,
    prepared: Plan,
    state: WindowState,
    profile: LatencyProfile | None,
    *,
    per_round: bool,
    approximate: bool,
) -> Replay:
    assert prepared.rules is not None
    growth = trace.growth(policy, prepared.rules, prepared.shortlist)
    costs, before = trace.costs(prepared, profile, growth)
    forest = trace.forests[policy.draft, getattr(policy.growth, "proposals", "coupled")]
    stops = trace.stops(growth, prepared.rules)
    limits = TreeLimits.of(prepared.rules[0], rereads=not forest.shared)
    sums = _sums(trace, before, per_round=per_round)
    used = replay_trees(
        prepared.window, state, trace.texts, growth, stops, trace.cached_from, limits, costs, sums
    )
    missing = int(sums.counts[:, 6].sum())
    if missing and not approximate and prepared.shortlist is None:
        raise TraceError(
            f"{missing} of {int(sums.counts[:, 0].sum())} rounds of {policy.label()} would read "
            f"distributions of draft {policy.draft!r} that the recording does not hold (it holds "
            f"width {forest.width}, depth {forest.depth}): `record --resume ID --cover POLICY` "
            "records them"
        )
    made = Replay(
        policy, trace.names, sums.counts[:, :6], sums.seconds, state, ((policy, missing),)
    )
    return (
        replace(made, rounds=sums.rounds[:used].copy(), round_s=sums.round_s[:used].copy())
        if per_round
        else made
    )


def _run_chosen(
    trace: ReplayTrace,
    policy: ChooserPolicy,
    profile: LatencyProfile | None,
    *,
    per_round: bool,
    artifacts: Artifacts | None,
    approximate: bool,
) -> Replay:
    """Each request under the candidate that the chooser takes for its prompt. A request's seconds
    include the pass that reads its prompt's perplexity.

    Choices are those of a decoder with the same profile: the artifact holds what was predicted of
    every prompt of the recording it was fitted to, which takes models to know of any other. Raises
    TraceError for those where it chooses, PolicyError without a profile, and what replaying a
    candidate raises.
    """
    chooser = stored_chooser(policy, artifacts)[0]
    ready = prepare_chooser(
        policy, [*chooser.drafts, chooser.features.reader], profile=profile, artifacts=artifacts
    )
    texts = [trace.trajectories[r] for r in trace.order]
    picks = [
        ready.of_recorded(t.prompt_ids, t.max_new_tokens, t.sampling).policy.draft for t in texts
    ]
    how: dict[str, Any] = {
        "per_round": per_round,
        "artifacts": artifacts,
        "approximate": approximate,
    }
    parts = []
    for draft in dict.fromkeys(picks):
        places = np.flatnonzero(np.array(picks) == draft)
        parts.append(
            (
                places,
                run_replay(
                    trace.select(trace.order[places]), chooser.candidates[draft], profile, **how
                ),
            )
        )
    made = replace(together(policy, parts), chosen=tuple(picks))
    if profile is None:
        return made
    return replace(
        made,
        seconds=made.seconds + chooser.reading_seconds(profile, trace.prompts[trace.order], picks),
    )
