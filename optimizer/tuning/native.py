"""Tuning: the whole circle for one pair, device and workload. :data:`STAGES` is its order.

Every stage stores what it made, and uses what an interrupted run had made: a recording is resumed,
a profile of the same environment is used again, the search is a function of both, and a publication
carries an idempotency key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from spectune import settings
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.deployment import Place, other_sampling, sampling_of
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.fit.by_prompt import MOST, fit_chooser
from spectune.optimizer.fit.tuning import fit_drafts
from spectune.optimizer.inputs import in_force, published_policy
from spectune.optimizer.profiles import doubts, prediction_spread, profile_for
from spectune.optimizer.record import PanoramaSpec, draft_reader, record, record_panoramas
from spectune.optimizer.report.evidence import put_evidence, rounds_of_one
from spectune.optimizer.report.words import sampling_in_words
from spectune.optimizer.search import Study, finalists, is_fixed, rivals, search
from spectune.optimizer.serving import earlier_winners, ready_plan
from spectune.optimizer.shortlisted import ShortlistedDrafts
from spectune.optimizer.simulate.replay import could_reach, run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.trace import open_trace
from spectune.optimizer.spaces import (
    DraftLimits,
    Space,
    plain_trees,
    transformers_heuristic,
)
from spectune.optimizer.tuning.confirm import Confirmation, check_sample_size
from spectune.optimizer.tuning.decoder import NativeBench
from spectune.optimizer.tuning.parts import Parts, mixed, recorded_parts, split
from spectune.optimizer.tuning.pipeline import (
    ProveOptions,
    Raced,
    conclude,
    confirm_winner,
    run_race,
)
from spectune.optimizer.tuning.rejection import (
    BUDGET_SHARE,
    NotTried,
    RejectionChain,
    rejection_chain,
)
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.optimizer.tuning.tuned import Tuned
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    FixedWindow,
    Policy,
    parse_policy,
)
from spectune.runtime.policies.plan import prepare
from spectune.runtime.progress import Progress, silent
from spectune.traces.acceptance import hardly_accepted
from spectune.traces.conversations import Index, conversations, conversations_of
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.sanity import Sanity, checked
from spectune.traces.schema import Workload
from spectune.traces.store import TraceStore
from spectune.traces.store.confirmations import count_confirmation
from spectune.traces.store.publications import DEFAULT_DEPLOYMENT
from spectune.traces.store.query import first_positions
from spectune.traces.tables import LatencyProfile, Trajectory

FEW_REQUESTS = 6
"""Requests of the search part on which every draft's trees are recorded."""
TREES_COULD_GAIN = 0.1
"""How far, relative to the fastest policy, the best plain tree of a draft may lie behind on those
and its trees be recorded on all requests: bins, classifiers and a finer search may gain as much."""


@dataclass(frozen=True)
class TuneOptions(ProveOptions):
    """How a tuning is done. ``tree_width`` 0 leaves trees out. ``finalists`` of different kinds
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
    def of(cls, s: settings.Tune | settings.Scheduled, **about: Any) -> TuneOptions:
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


def tune(
    store: TraceStore,
    pair: LoadedPair,
    workload: Workload,
    settings: TuneOptions,
    *,
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Tunes a pair for a workload on the device it is loaded on, from recording to publication.

    The winner is published only if it beats the incumbent (the active policy, or autoregression
    while there is none) beyond noise on requests that neither search nor race has used. What came
    into force after the incumbent was read is never replaced: it was not compared. Raises
    PolicyError or TraceError when nothing can be searched, raced or confirmed, and what
    ``settings.guard`` raises.
    """
    requests = workload.requests
    categories, of = [r.category for r in requests], conversations([r.id for r in requests])
    tell_power(settings, categories, split(categories, of.tolist()), of)
    began = clock()
    info = record(
        store,
        pair,
        workload,
        settings.options,
        PanoramaSpec(pair.chain_drafts, settings.gamma_max),
        StaticSource(prepare(_recording_policy(pair), pair.draft_names)),
        fresh=settings.fresh,
        reuse_complete=True,
        progress=progress,
    )
    seconds = {"record": clock() - began}
    return _run(Tuning(store, pair, info.id, settings, progress, clock, seconds))


def tune_recording(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    settings: TuneOptions,
    *,
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Tunes on an existing recording (of served traffic, say), whose texts say by what sampling and
    verifier. Raises TraceError where an engine sampled them."""
    requests = store.load(recording, (), skip_corrupted=True).requests
    settings = as_recorded(settings, recording, requests[0].trajectory)
    parts = recorded_parts(store, recording, [r.ordinal for r in requests])
    texts = [r.trajectory for r in requests]
    tell_power(settings, [text.category for text in texts], parts, conversations_of(texts))
    return _run(Tuning(store, pair, recording, settings, progress, clock, {}))


def _run(tuning: Tuning) -> Tuned:
    for name, stage in STAGES:
        began = tuning.clock()
        stage(tuning)
        tuning.seconds[name] = tuning.seconds.get(name, 0.0) + tuning.clock() - began
    return tuning.conclude()


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


@dataclass
class Tuning:
    """A tuning as it goes: a method for each of :data:`STAGES`, which reads what those before it
    made and adds its own."""

    store: TraceStore
    pair: LoadedPair
    recording: str
    settings: TuneOptions
    progress: Progress
    clock: Callable[[], float]
    seconds: dict[str, float]
    """By stage."""
    trace: ReplayTrace = field(init=False)
    ordinals: tuple[int, ...] = field(init=False)
    """Of the trace's requests, in the recording."""
    parts: Parts = field(init=False)
    """Those of the race and the confirmation in an order whose every beginning has all categories.
    """
    profile: LatencyProfile = field(init=False)
    prices_trees: bool = field(init=False)
    """Whether the profile has what rounds of trees cost."""
    place: Place = field(init=False)
    incumbent: Policy = field(init=False)
    unusable: str = field(init=False)
    """Why what is in force cannot be the incumbent; empty where it is."""
    artifacts: Artifacts = field(init=False)
    workload: Sanity = field(init=False)
    grown: tuple[str, ...] = ()
    """Drafts whose trees are replayed, and heads, whose chains are recorded as trees."""
    limits: dict[str, DraftLimits] = field(default_factory=dict)
    study: Study = field(init=False)
    study_id: str = field(init=False)
    choice: Policy | None = None
    """What chooses for each prompt, where that is asked for and predicted to gain."""
    bench: NativeBench = field(init=False)
    raced: Raced = field(init=False)
    confirmed: Confirmation | None = None
    earlier_confirmations: int = 0
    texts: ComparedTexts = field(init=False)
    rejection: RejectionChain | NotTried | None = None

    @property
    def drafts(self) -> tuple[str, ...]:
        return self.settings.drafts_of(self.pair)

    @property
    def chains(self) -> tuple[str, ...]:
        """Drafts whose chains are functions of the text: what is recorded first."""
        return self.pair.chain_drafts

    @property
    def heads(self) -> tuple[str, ...]:
        """Drafts whose chains are recorded as trees of width 1."""
        return tuple(d for d in self.drafts if d not in self.chains)

    def record_panoramas(self, spec: PanoramaSpec, ordinals: Sequence[int] | None = None) -> None:
        """Records the panoramas that are lacking, of some requests or all."""
        record_panoramas(
            self.store,
            self.pair,
            self.recording,
            spec,
            ordinals=ordinals,
            progress=self.progress,
        )

    def open(self) -> None:
        """Opens the trace anew, as something was recorded since."""
        self.trace, self.ordinals = self.opened({*self.chains, *self.grown})
        categories = [t.category for t in self.trace.trajectories]
        of = self.trace.conversations.tolist()
        fit, search, *rest = recorded_parts(self.store, self.recording, self.ordinals)
        self.parts = Parts(fit, search, *(mixed(part, categories, of) for part in rest))

    def opened(self, drafts: Collection[str], **how: Any) -> tuple[ReplayTrace, tuple[int, ...]]:
        """A trace of the recording, which reads what replays lack, and its ordinals."""
        store, pair, name = self.store, self.pair, self.recording
        opened = open_trace(store, name, drafts=drafts, **how)
        trace, ordinals = opened.trace, opened.ordinals
        here = store, pair, name
        trace.reader = draft_reader(
            *here, trace.trajectories, trace.panoramas, ordinals, self.progress
        )
        trace.on_demand = ShortlistedDrafts(
            *here, ordinals, fitted(store, pair.id), progress=self.progress
        )
        return trace, ordinals

    def search(self, trials: int, study: Study | None = None) -> None:
        """Replays policies on the search part; those of ``study`` are not replayed again."""
        store, pair, settings = self.store, self.pair, self.settings
        first = self.trace.trajectories[0]
        earlier = earlier_winners(store, pair, first.verifier, first.sampling)
        self.study = search(
            self.trace.select(self.parts.search),
            self.profile,
            Space(
                tuple(d for d in self.drafts if d in self.chains or d in self.grown),
                settings.gamma_max,
                self.limits,
            ),
            trials=trials,
            seed=settings.seed,
            incumbents=[
                *self.incumbent.candidates,
                *(p for p in earlier if p.draft in (*self.drafts, "none")),
            ],
            artifacts=self.artifacts,
            earlier=study,
            progress=lambda done, total, best: self.progress(
                f"search, best {best:.0f} tokens/s", done, total
            ),
        )

    def record_chains(self) -> None:
        """The panoramas that the recording lacks."""
        self.record_panoramas(PanoramaSpec(self.chains, self.settings.gamma_max))
        self.open()
        texts = self.trace.trajectories
        if len(texts) != self.store.get_recording(self.recording).n_requests:  # some are damaged
            categories = [t.category for t in texts]
            tell_power(self.settings, categories, self.parts, conversations_of(texts))
        self.workload = checked(texts)
        for line in (*self.workload.lines(), *self._hardly_accepted(self.chains)):
            self.settings.tell(line)

    def _hardly_accepted(self, drafts: Iterable[str]) -> list[str]:
        """Warnings of drafts that are next to never right on the recorded texts."""
        first = first_positions(self.store, self.recording)
        return hardly_accepted({d: first[d] for d in drafts if d in first}, self.pair.heads)

    def measure(self) -> None:
        """What rounds cost on this device, and with that, what there is to beat."""
        store, pair, settings, texts = self.store, self.pair, self.settings, self.trace.trajectories
        active = store.active_publication(pair.id, pair.device_name, settings.deployment)
        self.place = Place(pair.device_name, settings.deployment, active)
        self.prices_trees = bool(settings.tree_size[0] or self.heads)
        if active is not None and not self.prices_trees:
            with suppress(PolicyError):  # what is wrong with it is said below
                self.prices_trees = any(p.is_tree for p in published_policy(active).candidates)
        self.profile = profile_for(
            store,
            pair,
            self.drafts,
            gamma_max=settings.gamma_max,
            trees=self.prices_trees,
            trajectories=texts,
            since=store.clock() if settings.fresh else None,
            tell=settings.tell,
            progress=self.progress,
        )
        first = texts[0]
        line = other_sampling(active, first.sampling, first.verifier)
        if line and settings.publish:
            settings.tell(f"warning: {line}")
        self.incumbent, self.unusable = in_force(
            active,
            lambda p: ready_plan(store, pair, p, self.profile, first.verifier, first.sampling),
            "autoregression is the incumbent",
        )
        self.artifacts = fitted(store, pair.id)

    def search_chains(self) -> None:
        """The screen of what needs no trees."""
        self.search(0)

    def record_trees(self) -> None:
        """Chains of heads; and trees, on a few requests, then on all of them where they could win
        or are in force."""
        settings, size, heads = self.settings, self.settings.tree_size, self.heads
        if heads:
            self.record_panoramas(PanoramaSpec(heads, settings.gamma_max))
        trees = [d for d in self.drafts if d != "ngram" and size[0]]
        categories = [t.category for t in self.trace.trajectories]
        few = [self.ordinals[i] for i in mixed(self.parts.search, categories)[:FEW_REQUESTS]]
        could_win = {p.draft for p in self.incumbent.candidates if p.is_tree} & set(trees)
        for draft in (d for d in trees if d not in could_win):
            self.record_panoramas(PanoramaSpec([draft], settings.gamma_max, *size), few)
            share = self._best_tree(draft, few)
            if share > 1 - TREES_COULD_GAIN:
                could_win.add(draft)
            else:
                self.settings.tell(
                    f"Trees of {draft} cannot win: on {len(few)} requests their best is "
                    f"{100 * (1 - share):.0f}% slower than the fastest policy."
                )
        grown = [d for d in trees if d in could_win]
        if grown:
            self.record_panoramas(PanoramaSpec(grown, settings.gamma_max, *size))
        self.grown = tuple(d for d in self.drafts if d in {*heads, *grown})
        if self.grown:
            self.open()
            for line in self._hardly_accepted(d for d in self.grown if d not in self.chains):
                settings.tell(line)

    def _best_tree(self, draft: str, ordinals: Sequence[int]) -> float:
        """The speed of a draft's best plain tree on a few requests, as a share of the best policy
        so far (of a tree's own chain, where nothing else was tried)."""
        trace, _ = self.opened({*self.chains, draft}, ordinals=ordinals)
        best = self.study.best()

        def speed(policy: Policy) -> float:
            replay = run_replay(
                trace, policy, self.profile, artifacts=self.artifacts, approximate=True
            )
            return could_reach(replay)

        trees = max(map(speed, plain_trees(draft, *self.settings.tree_size)))
        return trees / (speed(best.policy) if best is not None else trees)

    def fit(self) -> None:
        """Bins, classifiers and static trees; frequencies and routers of the drafts whose passes
        are faster over fewer tokens."""
        faster = {d: _faster_passes(self.profile, d) for d in self.drafts if d in self.pair.models}
        self.limits = fit_drafts(
            self.store,
            self.pair,
            self.recording,
            self.drafts,
            fixed=[draft for draft, passes in faster.items() if passes],
            routed=[draft for draft, passes in faster.items() if "routed" in passes],
            seed=self.settings.seed,
            progress=self.progress,
        )
        slow = [draft for draft, passes in faster.items() if not passes]
        if slow:
            self.settings.tell(
                f"Shortlists of {', '.join(slow)}: not tried; passes over fewer tokens are not "
                "faster."
            )

    def search_all(self) -> None:
        """The joint space."""
        self.search(self.settings.trials, self.study)

    def choose(self) -> None:
        """A choice by prompt between the best policies of the drafts, where that is asked for and
        predicted to gain beyond noise. Stores the study, and why there is none."""
        study = self.study
        document = {
            "recording": self.recording,
            "profile": self.profile.id,
            "requests": list(study.requests),
            "trials": len(study.trials),
        }
        if self.settings.by_prompt:
            document["by_prompt"] = self._fit_choice()
        self.study_id = self.store.put_study(
            self.pair.id,
            sampler=study.sampler,
            seed=study.seed,
            document=document,
            trials=[t.to_json() for t in study.trials],
            recording_id=self.recording,
        )

    def _fit_choice(self) -> str:
        """Fits :attr:`choice`; what it is predicted to gain, or why nothing can be told."""
        try:
            made = fit_chooser(
                self.store,
                self.pair,
                self.trace,
                self.parts,
                self.study.best_of_drafts()[:MOST],
                self.profile,
                {"recording": self.recording, "profile": self.profile.id},
                artifacts=self.artifacts,
                approximate=True,
                progress=self.progress,
            )
        except (PolicyError, TraceError) as error:
            return str(error)
        self.choice = parse_policy(made.policy) if made.document["chooses"] else None
        return str(made.document["reason"])

    def roles(self) -> dict[str, Policy]:
        """Who is executed, by role; a policy that has several roles appears under each."""
        study, settings, incumbent = self.study, self.settings, self.incumbent
        best = finalists(study, settings.finalists)
        best += rivals(study, [trial.policy for trial in best])
        chosen = [incumbent if study.same(t.policy, incumbent) else t.policy for t in best]
        chosen += [self.choice] if self.choice is not None else []
        roles = {f"finalist {i + 1}": policy for i, policy in enumerate(chosen)}
        roles["autoregressive"] = AUTOREGRESSIVE
        fixed = study.best(lambda policy: is_fixed(policy) and not policy.is_tree)
        if fixed is not None:
            plain = transformers_heuristic(fixed.policy.draft, settings.gamma_max)
            roles |= {"best fixed gamma": fixed.policy, "transformers heuristic": plain}
        return {**roles, "incumbent": incumbent}

    def race(self) -> None:
        """The best few, the incumbent and plain baselines race on requests that the search has not
        seen."""
        self.bench = NativeBench(
            self.pair,
            self.trace,
            self.parts,
            self.profile,
            self.artifacts,
            spread=prediction_spread(self.profile, trees=self.settings.tree_size[0] > 0),
            clock=self.clock,
        )
        self.raced = run_race(
            self.bench,
            self.roles(),
            self.incumbent,
            self.settings,
            clock=self.clock,
            progress=self.progress,
        )

    def confirm(self) -> None:
        """The race's winner against the incumbent, on requests held out."""
        self.confirmed, self.texts = confirm_winner(
            self.bench, self.raced, self.settings, progress=self.progress
        )
        if self.confirmed is not None:
            held = [self.ordinals[i] for i in self.parts.confirm]
            self.earlier_confirmations = count_confirmation(self.store, self.recording, held)

    def try_rejection(self) -> None:
        """The best chain of the verifier `rejection` beside the race's winner, where that has
        another distribution of rounds; neither race nor publication read it."""
        settings = self.settings
        if settings.options.verifier != "coupled" or settings.options.sampling.greedy:
            return
        self.rejection = rejection_chain(
            self.bench,
            self.raced.winner.policy,
            gamma_max=settings.gamma_max,
            budget_s=BUDGET_SHARE * settings.budget_s,
            clock=self.clock,
            progress=self.progress,
        )

    def conclude(self) -> Tuned:
        """The results, published if the winner is to take the place of what is in force. Stores
        what the report draws beside the study."""
        store, pair, settings, trace = self.store, self.pair, self.settings, self.trace
        tuned = conclude(
            store,
            pair.id,
            self.raced,
            self.confirmed,
            self.place,
            settings,
            sampling=sampling_of(trace.trajectories),
            unusable=self.unusable,
            doubts=doubts(self.profile, trees=self.prices_trees),
            recording=self.recording,
            profile=self.profile.id,
            study=self.study_id,
            texts=self.texts,
            search_requests=len(self.parts.search),
            trials=len(self.study.trials),
            seconds=self.seconds,
            workload=self.workload,
            rejection=self.rejection,
            earlier_confirmations=self.earlier_confirmations,
        )
        about = {
            "pair": f"{pair.spec.name} ({pair.id})",
            "device": pair.device.type,
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "deployment": settings.deployment,
            "sampling": sampling_in_words(trace.trajectories[0].sampling),
        }
        rounds = rounds_of_one(tuned, trace, self.profile, self.artifacts, pair.text)
        put_evidence(store, pair.id, tuned, rounds, about)
        return tuned


STAGES: tuple[tuple[str, Callable[[Tuning], None]], ...] = (
    ("record", Tuning.record_chains),
    ("profile", Tuning.measure),
    ("search", Tuning.search_chains),
    ("record", Tuning.record_trees),
    ("fit", Tuning.fit),
    ("search", Tuning.search_all),
    ("chooser", Tuning.choose),
    ("execute", Tuning.race),
    ("confirm", Tuning.confirm),
    ("execute", Tuning.try_rejection),
)
"""What a tuning does, in order, by the name that its seconds are told under."""


def _faster_passes(profile: LatencyProfile, draft: str) -> list[str]:
    """Which passes of a draft, ``fixed`` over a shortlist or ``routed``, are faster than over its
    whole output head, at the smallest size that was measured."""
    faster = []
    for kind in ("fixed", "routed"):
        routed = kind == "routed"
        for size in profile.shortlist_sizes(draft, routed=routed)[:1]:
            if float(profile.shortlist_seconds(draft, size, routed=routed)) < 0:
                faster.append(kind)
    return faster
