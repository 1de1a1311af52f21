"""Drafts under shortlists (FR-Spec, DynaSpec), recorded when something replays a policy with them:
first on a few requests, and on the others only where the shortlist is faster there than the whole
head."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from spectune.optimizer.recording.record import draft_reader, make_panoramas
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import Replay, ReplayTrace
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import FullShortlist, Policy
from spectune.runtime.policies.rules import compile_shortlist, compile_tree
from spectune.runtime.progress import Progress, silent
from spectune.runtime.recording.panoramas import RecordedGrowth, record_shortlisted
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile

FEW = 6
"""Requests that an untried shortlist is recorded on first."""
DEPTH = 8
"""Tokens of a chain, and levels of a tree, that are recorded at least: other windows then replay
from the same."""
MOST_SETTINGS = 40
"""Shortlists that are recorded on demand; after so many, others are not tried."""


def recorded_name(store: TraceStore, policy: Policy) -> str:
    """:attr:`Policy.recorded_draft` with the whole id of the shortlist's artifact. Raises
    NotFoundError where that is unknown."""
    if not policy.shortlisted:
        return policy.draft
    artifact = store.get_artifact(getattr(policy.shortlist, "artifact", "")).id
    shortlist = policy.shortlist.model_copy(update={"artifact": artifact})
    return policy.model_copy(update={"shortlist": shortlist}).recorded_draft


def record_setting(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    policy: Policy,
    ordinals: Collection[int],
    artifacts: Artifacts,
    *,
    progress: Progress = silent,
) -> int:
    """Stores what a policy's draft proposes under its shortlist, for those of some requests that do
    not hold chains as long, or nodes of as many children; how many were recorded. Raises
    PolicyError for a draft that the pair does not have, or an artifact that does not fit it."""
    rule = compile_shortlist(policy, artifacts)
    if rule is None or policy.draft not in pair.models:
        raise PolicyError(f"draft: this pair has no draft {policy.draft!r} with an output head")
    name, sampled = recorded_name(store, policy), not store.get_recording(recording).sampling.greedy
    gamma_max, width, growth = max(DEPTH, policy.depth_max), 1, None
    if policy.is_tree:
        tree = compile_tree(policy, sampled=sampled, artifacts=artifacts)
        gamma_max, width = 1, tree.width
        growth = RecordedGrowth(tree, max(DEPTH, policy.depth_max))
    missing = {*store.missing_panoramas(recording, name, gamma_max, width)} & {*ordinals}
    for request in store.iterate(recording, drafts=(name,), ordinals=sorted(missing)):
        if (before := request.panoramas.get(name)) is not None:  # what replaces it is as large
            gamma_max, width = max(gamma_max, before.gamma_max), max(width, before.width)
    size: dict[str, Any] = {"gamma_max": gamma_max, "width": width, "growth": growth}
    make = partial(record_shortlisted, rule=rule, name=name, **size)
    return make_panoramas(store, pair, recording, policy.draft, make, missing, progress=progress)


@dataclass
class ShortlistedDrafts:
    """Replays policies under shortlists on a recording, and records what that lacks: the
    ``on_demand`` of a trace whose requests have these ``ordinals``.

    Requests that were not recorded count as the same policy with the whole head does, scaled by the
    ratio of the two on the others."""

    store: TraceStore
    pair: LoadedPair | Callable[[], LoadedPair]
    """May be loaded when it is first needed."""
    recording: str
    ordinals: Sequence[int]
    artifacts: Artifacts
    few: int = FEW
    """Requests that are recorded first; 0: all are."""
    most: int = MOST_SETTINGS
    progress: Progress = silent
    settings: set[str] = field(default_factory=set)
    """Names of the drafts that were recorded."""
    _traces: dict[tuple[str, tuple[int, ...]], ReplayTrace] = field(default_factory=dict)

    def __call__(
        self,
        trace: ReplayTrace,
        policy: Policy,
        profile: LatencyProfile | None,
        **options: Any,
    ) -> Replay:
        """What a policy costs and yields on the requests of a trace; exact where the shortlist is
        faster on the first few than the whole head. Where ``most`` shortlists were recorded, all
        rounds under another count as missing."""
        name, order = recorded_name(self.store, policy), trace.order.tolist()
        few = order[:: max(1, len(order) // max(1, self.few))][: self.few]
        whole = policy.model_copy(update={"shortlist": FullShortlist()})
        base: Replay | None = None
        with suppress(TraceError, PolicyError):  # its trees may be beyond the recording
            base = run_replay(trace, whole, profile, **{**options, "per_round": False})
        if base is not None and name not in self.settings and len(self.settings) >= self.most:
            return replace(base, policy=policy, missed=((policy, base.total.rounds),))
        self.settings.add(name)
        if base is None or profile is None or options.get("per_round") or not self.few:
            return self._recorded(trace, policy, profile, order, options)
        seconds = dict(zip(order, base.seconds.tolist(), strict=True))
        part = self._recorded(trace, policy, profile, few, options)
        if part.seconds.sum() < sum(seconds[r] for r in few):
            return self._recorded(trace, policy, profile, order, options)
        if few == order:
            return part
        ratio = float(part.seconds.sum()) / sum(seconds[r] for r in few)
        counts, seconds_of = base.counts.copy(), base.seconds * ratio
        places = [order.index(r) for r in few]
        counts[places], seconds_of[places] = part.counts, part.seconds
        return replace(part, names=trace.names, counts=counts, seconds=seconds_of)

    def _recorded(
        self,
        trace: ReplayTrace,
        policy: Policy,
        profile: LatencyProfile | None,
        requests: Sequence[int],
        options: dict[str, Any],
    ) -> Replay:
        """The policy on some requests, by number, recorded where they are not."""
        if not isinstance(self.pair, LoadedPair):
            self.pair = self.pair()
        name, ordinals = recorded_name(self.store, policy), [self.ordinals[r] for r in requests]
        here = self.store, self.pair, self.recording
        key = name, tuple(requests)
        if record_setting(*here, policy, ordinals, self.artifacts, progress=self.progress):
            self._traces = {k: part for k, part in self._traces.items() if k[0] != name}
        if key not in self._traces:
            loaded = self.store.load(self.recording, (name,), ordinals=ordinals)
            recorded = {r.ordinal: r.panoramas[name] for r in loaded.requests}
            if len(recorded) < len(ordinals):
                raise TraceError(
                    f"texts of {self.recording} were removed while it was replayed; run it again"
                )
            texts = [trace.trajectories[r] for r in requests]
            panoramas = {
                policy.draft: [trace.panoramas[policy.draft][r] for r in requests],
                name: [recorded[ordinal] for ordinal in ordinals],
            }
            part = ReplayTrace(texts, panoramas, seed=trace.seed, past=trace.past)
            rule = compile_shortlist(policy, self.artifacts)
            assert rule is not None
            of_part = part.trajectories, part.panoramas, ordinals
            reader = draft_reader(*here, *of_part, rules={name: rule})
            self._traces[key] = part.reading(reader)
        return run_replay(self._traces[key], policy, profile, **{**options, "approximate": False})
