"""The native decoder as what is tuned: a recording of a pair, to which search adds what it needs.

Every stage stores what it made, and uses what an interrupted run had made: a recording is resumed,
a profile of the same environment is used again, the search is a function of both, and a publication
carries an idempotency key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spectune import settings
from spectune.optimizer.deployment import Place
from spectune.optimizer.execute import DecodeOptions, probe_s
from spectune.optimizer.in_force import ready_plan
from spectune.optimizer.inputs import published_policy
from spectune.optimizer.profiles import doubts, prediction_spread, profile_for
from spectune.optimizer.recording.record import PanoramaSpec, draft_reader, record, record_panoramas
from spectune.optimizer.recording.shortlisted import ShortlistedDrafts
from spectune.optimizer.replay.trace import Opened, open_trace
from spectune.optimizer.report.evidence import rounds_of_one
from spectune.optimizer.stored_artifacts import fitted
from spectune.optimizer.tuning.bench import Proposals, RecordedTexts, Tunable
from spectune.optimizer.tuning.confirm import check_sample_size
from spectune.optimizer.tuning.native_bench import NativeBench
from spectune.optimizer.tuning.pair_search import PairSearch
from spectune.optimizer.tuning.parts import Parts, mixed, recorded_parts, split
from spectune.optimizer.tuning.pipeline import ProveOptions, Raced, tune
from spectune.optimizer.tuning.rejection import BUDGET_SHARE, rejection_chain
from spectune.optimizer.tuning.tuned import Candidate, RoundsOfOne, Tuned
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    FixedWindow,
    Policy,
)
from spectune.runtime.policies.plan import prepare
from spectune.runtime.progress import Progress, silent
from spectune.traces.acceptance import hardly_accepted
from spectune.traces.conversations import Index, conversations, conversations_of
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Workload
from spectune.traces.store import TraceStore
from spectune.traces.store.publications import DEFAULT_DEPLOYMENT
from spectune.traces.store.query import first_positions
from spectune.traces.tables import LatencyProfile, Publication, Trajectory


@dataclass(frozen=True)
class TuneOptions(ProveOptions):
    """How a pair is tuned. ``tree_width`` 0 leaves trees out. ``finalists`` of different kinds
    race against the baselines, and the winner is confirmed. ``by_prompt`` tries a choice by prompt
    between the best of the drafts. ``fresh`` uses no recording and no profile that was stored
    before. What is in force in the ``deployment`` is the incumbent, and is what is replaced."""

    options: DecodeOptions = field(default_factory=DecodeOptions)
    gamma_max: int = 16
    trials: int = 400
    seed: int = 0
    finalists: int = 4
    by_prompt: bool = False
    fresh: bool = False
    deployment: str = DEFAULT_DEPLOYMENT
    tree_width: int = 8
    tree_depth: int = 8

    @classmethod
    def of(cls, s: settings.Tune, **about: Any) -> TuneOptions:
        """What settings say, and what else a tuning is told."""
        return cls(
            options=DecodeOptions.of(s.sampling),
            gamma_max=s.search.gamma_max,
            trials=s.search.trials,
            seed=s.search.seed,
            by_prompt=s.search.by_prompt,
            finalists=s.race.finalists,
            budget_s=s.race.budget,
            tree_width=s.trees.width,
            tree_depth=s.trees.depth if s.trees.width else 0,
            deployment=s.deployment,
            **about,
        )

    @property
    def chains_only(self) -> bool:
        """Whether the verifier is for chains of language models alone."""
        return self.options.verifier == "rejection" and not self.options.sampling.greedy

    @property
    def tree_size(self) -> tuple[int, int]:
        """Width and depth of the trees to record."""
        return (0, 0) if self.chains_only else (self.tree_width, self.tree_depth)

    def drafts_of(self, pair: LoadedPair) -> tuple[str, ...]:
        """The drafts that the verifier can be used with."""
        return pair.chain_drafts if self.chains_only else pair.draft_names


def tune_pair(
    store: TraceStore,
    pair: LoadedPair,
    source: Workload | str,
    options: TuneOptions,
    *,
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Tunes a pair on the device it is loaded on, from recording to publication
    (:func:`optimizer.tuning.pipeline.tune`): for a workload, or on the texts of a recording, by its
    id. Raises as the pipeline and :func:`native_bench` do."""
    bench = native_bench(store, pair, source, options, progress=progress, clock=clock)
    place = native_place(store, pair, options.deployment)
    return tune(store, bench, place, bench.options, progress=progress)


def native_place(store: TraceStore, pair: LoadedPair, deployment: str) -> Place:
    """Where a policy for the native decoder is put in force."""
    active = store.active_publication(pair.id, pair.device_name, deployment)
    return Place(pair.device_name, deployment, active)


def native_bench(
    store: TraceStore,
    pair: LoadedPair,
    source: Workload | str,
    options: TuneOptions,
    *,
    make: Callable[..., PairBench] | None = None,
    requests: int = 1,
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> PairBench:
    """The native decoder as a bench, over a workload (recorded, resumed, or found recorded) or a
    recording (its id), whose texts say by what sampling and verifier. The power of its confirmation
    is told before any work. ``make`` makes the bench (None: that of one request at a time), which
    serves up to ``requests`` at once. Raises TraceError for too few requests, and where an engine
    sampled the texts."""
    began = clock()
    if isinstance(source, Workload):
        asked = source.requests
        categories, of = [r.category for r in asked], conversations([r.id for r in asked])
        tell_power(options, categories, split(categories, of.tolist()), of)
        name = _record(store, pair, source, options, progress)
    else:
        recorded = store.load(source, (), skip_corrupted=True).requests
        if not recorded:
            raise TraceError(f"recording {source} holds no text; `record` its workload")
        options = as_recorded(options, source, recorded[0].trajectory)
        parts = recorded_parts(store, source, [r.ordinal for r in recorded])
        each = [r.trajectory for r in recorded]
        tell_power(options, [t.category for t in each], parts, conversations_of(each))
        name = source
    recording = PairRecording(store, pair, name, options.tell, progress)
    recording.add(PanoramaSpec(pair.chain_drafts, options.gamma_max))
    opened = recording.open(pair.chain_drafts)
    recorded_s = clock() - began
    if len(opened.ordinals) != opened.info.n_texts:  # some are damaged
        whole = opened.trace.trajectories
        parts = recorded_parts(store, name, opened.ordinals)
        tell_power(options, [t.category for t in whole], parts, opened.trace.conversations)
    active = store.active_publication(pair.id, pair.device_name, options.deployment)
    grows = prices_trees(options, pair, active)
    profile = profile_for(
        store,
        pair,
        options.drafts_of(pair),
        gamma_max=options.gamma_max,
        trees=grows,
        requests=requests,
        trajectories=opened.trace.trajectories,
        since=store.clock() if options.fresh else None,
        tell=options.tell,
        progress=progress,
    )
    bench = (make or PairBench)(
        recording, opened, profile, options, prices_trees=grows, clock=clock
    )
    bench.seconds.update(record=recorded_s, profile=clock() - began - recorded_s)
    recording.tell_hardly_accepted(pair.chain_drafts)
    return bench


def _record(
    store: TraceStore,
    pair: LoadedPair,
    workload: Workload,
    options: TuneOptions,
    progress: Progress,
) -> str:
    """The id of the workload's recording."""
    drafts = PanoramaSpec(pair.chain_drafts, options.gamma_max)
    source = StaticSource(prepare(_recording_policy(pair), pair.draft_names))
    how: Any = {"fresh": options.fresh, "reuse_complete": True, "progress": progress}
    return record(store, pair, workload, options.options, drafts, source, **how).id


def prices_trees(options: TuneOptions, pair: LoadedPair, active: Publication | None) -> bool:
    """Whether a profile has to have what rounds of trees cost: where trees are searched, chains of
    heads, or trees are in force."""
    if options.tree_size[0] or len(options.drafts_of(pair)) > len(pair.chain_drafts):
        return True
    try:
        return active is not None and any(p.is_tree for p in published_policy(active).candidates)
    except PolicyError:  # what is wrong with it is said by the pipeline
        return False


def as_recorded(settings: TuneOptions, recording: str, text: Trajectory) -> TuneOptions:
    """A tuning by the sampling and the verifier of a recorded text, whatever was asked for. Raises
    TraceError for one that an engine sampled: no policy decodes it here."""
    if text.verifier == "greedy" and not text.sampling.greedy:
        raise TraceError(
            f"recording {recording} was sampled by an engine, which drafts greedily; "
            "`tune --arrivals recorded` tunes for an engine's traffic, or `record` its prompts here"
        )
    how = replace(settings.options, sampling=text.sampling, verifier=text.verifier)
    return replace(settings, options=how)


def tell_power(settings: TuneOptions, categories: Sequence[str], parts: Parts, of: Index) -> None:
    """Tells, before any work, what a confirmation on so many requests can show. Raises TraceError
    for too few requests. ``of``: the number of each request's conversation."""
    line = check_sample_size(categories, publish=settings.publish, parts=parts, of=of)
    settings.tell(line)


def _recording_policy(pair: LoadedPair) -> Policy:
    """What a recording is decoded by when nothing better is known: any policy gives the same text,
    a short window is quicker."""
    if not pair.drafts:
        return AUTOREGRESSIVE
    smallest = min(pair.drafts, key=lambda n: pair.drafts[n].num_parameters)
    return Policy(draft=smallest, window=FixedWindow(gamma=2))


@dataclass(frozen=True)
class PairRecording:
    """A recording of a pair, by its id, to which panoramas are added and from which traces are
    opened."""

    store: TraceStore
    pair: LoadedPair
    id: str
    tell: Callable[[str], None] = lambda line: None
    progress: Progress = silent

    def add(self, spec: PanoramaSpec, ordinals: Sequence[int] | None = None) -> None:
        """Records the panoramas that are lacking, of some requests or all."""
        how: Any = {"ordinals": ordinals, "progress": self.progress}
        record_panoramas(self.store, self.pair, self.id, spec, **how)

    def open(self, drafts: Collection[str], ordinals: Collection[int] | None = None) -> Opened:
        """A trace, of some requests or all, which reads from the pair what replays lack, and stores
        it."""
        opened = open_trace(self.store, self.id, drafts=drafts, ordinals=ordinals)
        trace, here = opened.trace, (self.store, self.pair, self.id)
        reader = draft_reader(
            *here, trace.trajectories, trace.panoramas, opened.ordinals, self.progress
        )
        on_demand = ShortlistedDrafts(
            *here, opened.ordinals, fitted(self.store, self.pair.id), progress=self.progress
        )
        return opened._replace(trace=trace.reading(reader, on_demand))

    def tell_hardly_accepted(self, drafts: Iterable[str]) -> None:
        """Warns of drafts that are next to never right on the recorded texts."""
        first = first_positions(self.store, self.id)
        shares = {draft: first[draft] for draft in drafts if draft in first}
        for line in hardly_accepted(shares, self.pair.heads):
            self.tell(line)


class PairBench(NativeBench, Tunable):
    """The native decoder over a recording of its pair, as what is tuned."""

    def __init__(
        self,
        recording: PairRecording,
        opened: Opened,
        profile: LatencyProfile,
        options: TuneOptions,
        *,
        prices_trees: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.fitted = fitted(recording.store, recording.pair.id)
        parts = Parts([], [], [], [])
        super().__init__(recording.pair, opened.trace, parts, profile, self.fitted, clock=clock)
        self.recording, self.options = recording, options
        self.profile_id, self.doubts = profile.id, doubts(profile, trees=prices_trees)
        self.take(opened)
        if beside_profile := profile.environment.get("probe_s"):
            self.probes.append(beside_profile)

    def probe(self) -> None:
        if (seconds := probe_s(self.pair, self.clock)) is not None:
            self.probes.append(seconds)

    def take(self, opened: Opened) -> None:
        """Replays this trace from here on."""
        self.trace, self.ordinals = opened.trace, opened.ordinals
        for tabulated in ("_traces", "_unit_traces"):
            self.__dict__.pop(tabulated, None)
        categories = [t.category for t in self.trace.trajectories]
        of, name = self.trace.conversations.tolist(), self.recording.id
        fit, search, *rest = recorded_parts(self.recording.store, name, self.ordinals)
        # Every beginning of those that are executed has all categories.
        self.parts = Parts(fit, search, *(mixed(part, categories, of) for part in rest))

    @property
    def texts(self) -> RecordedTexts:
        info, trace = self.recording.store.get_recording(self.recording.id), self.trace
        return RecordedTexts(
            info, trace.trajectories, self.ordinals, trace.conversations, self.parts
        )

    @property
    def spread(self) -> float:
        return prediction_spread(self.profile, trees=self.options.tree_size[0] > 0)

    def check(self, policy: Policy) -> None:
        first, here = self.trace.trajectories[0], (self.recording.store, self.pair)
        ready_plan(*here, policy, self.profile, first.verifier, first.sampling)

    def propose(self, incumbent: Policy) -> Proposals:
        return PairSearch(self, incumbent).run()

    def beside(self, raced: Raced, budget_s: float, progress: Progress) -> Mapping[str, Any]:
        """The best chain of the verifier `rejection` beside the race's winner, where that has
        another distribution of rounds."""
        how = self.options.options
        if how.verifier != "coupled" or how.sampling.greedy:
            return {}
        chain = rejection_chain(
            self,
            raced.winner.policy,
            gamma_max=self.options.gamma_max,
            budget_s=BUDGET_SHARE * budget_s,
            clock=self.clock,
            progress=progress,
        )
        return {"rejection": chain}

    def head(self) -> dict[str, Any]:
        pair = self.pair
        dtype = str(pair.target.dtype).removeprefix("torch.")
        return {"pair": f"{pair.spec.name} ({pair.id})", "dtype": dtype}

    def rounds(self, winner: Candidate) -> RoundsOfOne:
        return rounds_of_one(winner, self.trace, self.profile, self.fitted, self.pair.text)
