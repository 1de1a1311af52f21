"""Replaying a chooser of drafts: each request under the candidate that it chooses for the prompt, and the charge for choosing.

Choices are those of a decoder with the same profile: the artifact holds what was predicted of every prompt of the recording it was fitted
to, which takes models to know of any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optimizer.replay import ROUND_COLUMNS, Replay, ReplayTrace, run_replay
from optimizer.shortlist_ranks import Ranks, stored_ranks
from runtime.policies.document import ChooserPolicy, FullShortlist, Policy
from runtime.policies.plan import QTables, prepare
from runtime.policies.prepared_chooser import stored_chooser
from runtime.policies.tree_rules import Artifacts
from runtime.policies.windows import init_state
from traces.errors import PolicyError, TraceError
from traces.recording import Skipped
from traces.schema import LatencyProfile, Proposals, Step, TreePanorama
from traces.store import RecordingInfo, TraceStore


def trace_for(
    store: TraceStore, info: RecordingInfo, policies: Iterable[Policy], *, skip_corrupted: bool = False
) -> tuple[ReplayTrace, tuple[Skipped, ...]]:
    """What several policies are replayed from, and the damaged chunks that were left out. Raises PolicyError for the first of them
    whose draft the recording does not hold, TraceError where no request is left."""
    chains: set[str] = set()
    grown: set[tuple[str, Proposals]] = set()
    ranks: dict[tuple[str, str], Ranks] = {}
    for policy in (p for p in policies if p.speculates):
        draft = policy.draft
        proposals: Proposals = getattr(policy.growth, "proposals", "coupled")
        trees = info.trees if proposals == "coupled" else info.trees_q
        as_tree = policy.is_tree or (draft in trees and draft not in info.drafts)
        if draft not in (trees if as_tree or policy.shortlisted else info.drafts):
            flags = f" --tree-width 8 --tree-depth {max(8, policy.depth_max)}" if draft in info.drafts or policy.is_tree else ""
            raise PolicyError(
                f"draft: recording {info.id} has not what {policy.label()} is replayed from; `record --resume {info.id}{flags}` makes it"
            )
        if not as_tree:
            chains.add(draft)
        if as_tree or policy.shortlisted:
            grown.add((draft, proposals))
        if (found := ranks_of(store, info.id, policy)) is not None:
            ranks[draft, found.fitted] = found
    loaded = store.load(info.id, sorted({*chains, *(d for d, _ in grown)}), trees=bool(grown), skip_corrupted=skip_corrupted)
    skipped = loaded.skipped
    loaded = loaded.having(chains)
    for draft, proposals in grown:
        loaded = loaded.having(trees=[draft], proposals=proposals)
    if not loaded.requests:
        raise TraceError(f"recording {info.id} has no usable request")
    panoramas = {d: loaded.panoramas(d) for d in sorted(chains)}
    forests: dict[tuple[str, str], Sequence[TreePanorama]] = {(d, kind): loaded.trees(d, kind) for d, kind in sorted(grown)}
    return ReplayTrace(loaded.trajectories, panoramas, trees=forests, ranks=ranks or None), skipped


def ranks_of(store: TraceStore, recording: str, policy: Policy) -> Ranks | None:
    """What is stored of a shortlisted policy's order over a recording, as a ReplayTrace takes it. Raises NotFoundError where its artifact
    is unknown."""
    shortlist = policy.shortlist
    if not policy.speculates or isinstance(shortlist, FullShortlist):
        return None
    return stored_ranks(store, recording, policy.draft, shortlist.artifact, getattr(policy.growth, "proposals", "coupled"))


@dataclass(frozen=True, eq=False)
class ChosenReplay(Replay):
    """A chooser's :class:`optimizer.replay.Replay`. ``parts``: which requests (places in the replayed order) each candidate decoded,
    and its replay of them. ``state`` is no candidate's: they are in the parts."""

    parts: tuple[tuple[npt.NDArray[np.int64], Replay], ...] = ()

    def steps(self) -> list[list[Step]]:
        out: list[list[Step]] = [[] for _ in self.trace.order]
        for places, part in self.parts:
            for place, steps in zip(places.tolist(), part.steps(), strict=True):
                out[place] = steps
        return out

    @property
    def chosen(self) -> list[str]:
        """The draft that each request was decoded with."""
        drafts = [""] * len(self.trace.order)
        for places, part in self.parts:
            for place in places.tolist():
                drafts[place] = part.policy.draft
        return drafts


def run_chosen(
    trace: ReplayTrace,
    policy: ChooserPolicy,
    profile: LatencyProfile | None = None,
    *,
    per_round: bool = False,
    q_tables: QTables | None = None,
    artifacts: Artifacts | None = None,
    approximate: bool = False,
) -> ChosenReplay:
    """:func:`optimizer.replay.run_replay` for a chooser. A request's seconds include the pass that reads its prompt's perplexity.

    Raises TraceError for prompts that are not of the recording it was fitted to, where it chooses, PolicyError without a profile, and what
    replaying a candidate raises.
    """
    chooser = stored_chooser(policy, artifacts)[0]
    everyone = [*chooser.drafts, chooser.features.reader]
    ready = prepare(policy, everyone, profile=profile, q_tables=q_tables, artifacts=artifacts)
    assert ready.chooser is not None
    texts = [trace.trajectories[r] for r in trace.order]
    picks = [ready.chooser.of_recorded(t.prompt_ids, t.max_new_tokens, t.sampling).policy.draft for t in texts]
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
            q_tables=q_tables,
            artifacts=artifacts,
            approximate=approximate,
        )
        counts[places], seconds[places] = part.counts[:, :6], part.seconds
        parts.append((places, part))
    if profile is not None:
        seconds += chooser.reading_seconds(profile, trace.prompts[trace.order], picks)
    rounds, round_s = _joined(parts) if per_round else (None, None)
    missing = sum(part.missing for _, part in parts)
    return ChosenReplay(policy, trace, counts, seconds, init_state(ready.window), rounds, round_s, missing, tuple(parts))


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
