"""Replaying a chooser of drafts: each request under the candidate that it chooses for the prompt, and the charge for choosing.

Choices are those of a decoder with the same profile: the artifact holds what was predicted of every prompt of the recording it was fitted
to, which takes models to know of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spectune.optimizer.simulate.chains import ROUND_COLUMNS
from spectune.optimizer.simulate.replay_trace import Replay, ReplayTrace
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import ChooserPolicy
from spectune.runtime.policies.prepared_chooser import prepare_chooser, stored_chooser
from spectune.runtime.policies.windows import init_state
from spectune.traces.schema import LatencyProfile, Step


@dataclass(frozen=True, eq=False)
class ChosenReplay(Replay):
    """A chooser's :class:`optimizer.simulate.replay_trace.Replay`. ``parts``: which requests (places in the replayed order)
    each candidate decoded,
    and its replay of them. ``state`` is that of the last part."""

    parts: tuple[tuple[npt.NDArray[np.int64], Replay], ...] = ()

    def steps(self) -> list[list[Step]]:
        out: list[list[Step]] = [[] for _ in self.trace.order]
        for places, part in self.parts:
            for place, steps in zip(places.tolist(), part.steps(), strict=True):
                out[place] = steps
        return out


def run_chosen(
    trace: ReplayTrace,
    policy: ChooserPolicy,
    run_replay: Callable[..., Replay],
    profile: LatencyProfile | None = None,
    *,
    per_round: bool = False,
    artifacts: Artifacts | None = None,
    approximate: bool = False,
) -> ChosenReplay:
    """:func:`optimizer.simulate.replay.run_replay` for a chooser, by that function for each
    candidate. A request's seconds include the pass that reads its prompt's perplexity.

    Raises TraceError for prompts that are not of the recording it was fitted to, where it chooses, PolicyError without a profile, and what
    replaying a candidate raises.
    """
    chooser = stored_chooser(policy, artifacts)[0]
    everyone = [*chooser.drafts, chooser.features.reader]
    ready = prepare_chooser(policy, everyone, profile=profile, artifacts=artifacts)
    texts = [trace.trajectories[r] for r in trace.order]
    picks = [ready.of_recorded(t.prompt_ids, t.max_new_tokens, t.sampling).policy.draft for t in texts]
    counts = np.zeros((len(texts), 6), dtype=np.int64)
    seconds = np.zeros(len(texts))
    parts: list[tuple[npt.NDArray[np.int64], Replay]] = []
    for draft in dict.fromkeys(picks):
        places = np.flatnonzero(np.array(picks) == draft)
        part = run_replay(
            trace.select(trace.order[places]),
            chooser.candidates[draft],
            profile,
            per_round=per_round,
            artifacts=artifacts,
            approximate=approximate,
        )
        counts[places], seconds[places] = part.counts[:, :6], part.seconds
        parts.append((places, part))
    if profile is not None:
        seconds += chooser.reading_seconds(profile, trace.prompts[trace.order], picks)
    rounds, round_s = _joined(parts) if per_round else (None, None)
    missing = sum(part.missing for _, part in parts)
    state = parts[-1][1].state if parts else init_state(ready.candidates[0].window)
    return ChosenReplay(policy, trace, counts, seconds, state, rounds, round_s, missing, tuple(picks), tuple(parts))


def _joined(
    parts: Sequence[tuple[npt.NDArray[np.int64], Replay]],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """All parts' rounds in the order of the requests."""
    rounds, seconds = [np.zeros((0, len(ROUND_COLUMNS)), dtype=np.int32)], [np.zeros((0, 3))]
    for places, part in parts:
        assert part.rounds is not None
        assert part.round_s is not None
        rounds.append(np.concatenate([places[part.rounds[:, :1]], part.rounds[:, 1:]], axis=1).astype(np.int32))
        seconds.append(part.round_s)
    joined = np.concatenate(rounds)
    order = np.argsort(joined[:, 0], kind="stable")
    return joined[order], np.concatenate(seconds)[order]
