"""Whether the rounds that an engine served are those that replay finds: where they are not, the
engine does something that replay does not know, and no prediction for it can be trusted."""

from __future__ import annotations

from typing import Final

import numpy as np

from spectune.engines.abilities import engine_named
from spectune.optimizer.replay.trace import Opened
from spectune.runtime.policies.document import GAMMA_LIMIT, FixedWindow, Policy
from spectune.runtime.policies.stops import compile_stop
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore

COMPARED: Final = 500
"""Most requests whose rounds are compared, the first."""


def differing_rounds(store: TraceStore, opened: Opened, draft: str) -> str:
    """A line on the served rounds of a draft that differ from their replay; empty where none does,
    none was served, or they cannot be replayed.

    How many tokens of a chain are kept depends on where it begins and how long it is, not on the
    policy that asked for it: so every round is compared, whatever policy served it.
    """
    trace, info = opened.trace, opened.info
    drawn = info.verifier == "rejection" and not info.sampling.greedy
    if engine_named(info.engine).windows is None or drawn:
        return ""
    place = {ordinal: n for n, ordinal in enumerate(opened.ordinals[:COMPARED])}
    rows: list[tuple[int, int, int, int, int]] = []
    for r in store.load(info.id, (), steps=True, ordinals=[*place]).requests:
        prompt = len(r.trajectory.prompt_ids)
        begin, end = trace.offsets[place[r.ordinal] :][:2]
        longest = prompt  # of the step that drafted for the next
        for s in r.steps:
            if s.start and s.drafted and s.draft == draft:
                at = begin + s.start - 1  # the trace begins after the first token
                is_blind = 0 < trace.drafts_up_to < longest
                drafted = 0 if is_blind else s.drafted
                rows.append((at, end - at, drafted, s.emitted, prompt + s.start))
            longest = prompt + s.start + s.drafted
    if not rows:
        return ""
    at, left, drafted, served, length = np.array(rows, np.int64).T
    most = min(GAMMA_LIMIT, max(1, int(drafted.max())))
    policy = Policy(draft=draft, window=FixedWindow(gamma=most))
    try:
        words = trace.outcomes(policy, compile_stop(policy.stop))
    except TraceError:  # it was recorded to fewer tokens
        return ""
    run = (words[at] & 255).astype(np.int64)
    replayed = np.minimum(np.minimum(run, drafted) + 1, left)
    differ = np.flatnonzero(served != replayed)
    if not len(differ):
        return ""
    line = (
        f"{len(differ)} of {len(at)} rounds that were served with draft {draft!r} differ from "
        f"their replay: a round yielded {served.mean():.2f} tokens, and {replayed.mean():.2f} are "
        "predicted"
    )
    if (served[differ] == 1).all() and len(differ) > 1:
        line += (
            f"; all of them kept nothing, from texts of {length[differ].min()} tokens on, as where "
            "a draft's own length ends"
        )
    return f"{line}; what is predicted below is not what this server does"
