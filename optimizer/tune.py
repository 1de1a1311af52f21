"""Tuning: the whole circle for one pair, device and workload. :data:`STAGES` is its order.

Every stage stores what it made, and finds what an interrupted run had made: a recording is resumed,
a profile of the same environment is used again, the search is a function of both, and a publication
carries an idempotency key. Runs under one key share what they make even where they are to begin
anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from sqlalchemy.orm import Session

from spectune.db.errors import CorruptedChunkError
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.ceiling import tree_ceiling
from spectune.optimizer.confirm import RACE_SHARE, Confirmation, confirm, left_s, planned, said_of
from spectune.optimizer.deployment import sampling_of, tunes_over
from spectune.optimizer.estimate import pace
from spectune.optimizer.execute import Comparison, DecodeOptions, Executor, encode_recorded
from spectune.optimizer.fit.chooser_fits import fit_chooser_artifact
from spectune.optimizer.fit.on_the_fly import read_prompts
from spectune.optimizer.fit.tuning import fit_shortlists, fit_trees, ranks_for
from spectune.optimizer.inputs import published_policy
from spectune.optimizer.parts import Parts, mixed, split
from spectune.optimizer.processes import kept_helpers
from spectune.optimizer.profiles import (
    at_pace_of,
    doubts,
    expected_seconds,
    prediction_spread,
    profile_for,
)
from spectune.optimizer.publish import earlier_winners, incumbent_of, publish
from spectune.optimizer.record import Look, cover_of, look_around, record
from spectune.optimizer.report.evidence import evidence_document, middle_request, rounds_of_one
from spectune.optimizer.report.words import sampling_in_words
from spectune.optimizer.search import TIE, Study, finalists, is_fixed, rivals, search, worth_trying
from spectune.optimizer.simulate.replay import replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.trace import Grown, open_trace
from spectune.optimizer.spaces import ShortlistLimit, TreeLimit, transformers_heuristic
from spectune.optimizer.verdict import Candidate, Tuned, candidates_of, fastest_of, verdict
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    AnyPolicy,
    ChooserPolicy,
    Policy,
    parse_policy,
)
from spectune.runtime.policies.draft_choice import Chooser
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.policies.prepared_chooser import PREDICTED, plain_policies, prompt_key
from spectune.runtime.progress import Progress, silent
from spectune.runtime.recording.trees import Cover
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.recording import TREE_DEPTH
from spectune.traces.sanity import Sanity, checked
from spectune.traces.schema import Sampling, Trajectory, Verifier, Workload
from spectune.traces.store import Publication, StoredProfile, TraceStore
from spectune.traces.store.kinds import EVIDENCE
from spectune.traces.store.publications import DEFAULT_DEPLOYMENT

if TYPE_CHECKING:
    from spectune.optimizer.simulate.distributed import Shards

MOST_COVERS = 4
"""Growths of one draft beyond the recording that are recorded as well; each makes every tree
larger."""


@dataclass(frozen=True)
class TuneOptions:
    """How a tuning is done. ``drafts`` empty means all of the pair's; ``tree_width`` 0 leaves trees
    out. ``finalists`` of different kinds and ``rivals`` (fixed windows too close for prediction)
    race against the baselines, and the winner is confirmed, in at most ``passes`` each and together
    about ``budget_s``. ``fresh`` uses nothing that was stored before, but what was made under the
    same ``idempotency_key``. ``guard`` is called in the transaction that publishes, and raises
    where the caller may not; ``publishing`` is entered around it, with what is published. What is
    in force in the ``deployment`` is the incumbent, and is what is replaced. ``tell`` is called
    with what a user should know of the workload before the work goes on, ``begins`` with the name
    of each of :data:`STAGES`. ``workers``: who replay what is searched
    (:func:`optimizer.simulate.distributed.connected`); None: this process."""

    options: DecodeOptions = field(default_factory=DecodeOptions)
    drafts: tuple[str, ...] = ()
    gamma_max: int = 16
    trials: int = 400
    seed: int = 0
    finalists: int = 4
    rivals: int = 3
    passes: int = 8
    budget_s: float = 80.0
    fresh: bool = False
    publish: bool = True
    deployment: str = DEFAULT_DEPLOYMENT
    actor: str = "tune"
    idempotency_key: str | None = None
    guard: Callable[[Session], None] | None = None
    publishing: Callable[[Tuned], AbstractContextManager[object]] = nullcontext
    tell: Callable[[str], None] = lambda line: None
    begins: Callable[[str], None] = lambda stage: None
    tree_width: int = 8
    tree_depth: int = 8
    workers: str | None = None

    @property
    def chains_only(self) -> bool:
        """Whether the verifier is for chains of language models alone."""
        return self.options.verifier == "rejection" and not self.options.sampling.greedy

    @property
    def tree_size(self) -> tuple[int, int]:
        """Width and depth of the trees to record."""
        return (0, 0) if self.chains_only else (self.tree_width, self.tree_depth)

    def prices_trees(self, pair: LoadedPair) -> bool:
        """Whether rounds of trees need costs: a head's chains are drafted, recorded and priced as
        trees of width 1."""
        return self.tree_size[0] > 0 or any(
            d not in pair.chain_drafts for d in self.drafts_of(pair)
        )

    def drafts_of(self, pair: LoadedPair) -> tuple[str, ...]:
        """The drafts to tune: those named, or all that the verifier can be used with."""
        return self.drafts or tuple(
            d for d in pair.draft_names if d in pair.chain_drafts or not self.chains_only
        )


@kept_helpers()
def tune(
    store: TraceStore,
    pair: LoadedPair,
    workload: Workload,
    wanted: TuneOptions,
    *,
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Tunes a pair for a workload on the device it is loaded on, from recording to publication.

    The winner is published only if it beats the incumbent (the active policy, or autoregression
    while there is none) beyond noise on requests that neither search nor race has used. What came
    into force after the incumbent was read is never replaced: it was not compared. Raises
    PolicyError or TraceError when nothing can be searched, raced or confirmed, and what
    ``wanted.guard`` raises.
    """
    _tell_number(wanted, [r.category for r in workload.requests])
    slot = (wanted.idempotency_key or "") if wanted.fresh else ""
    wanted.begins("record")
    began = clock()
    chains = tuple(d for d in wanted.drafts_of(pair) if d in pair.chain_drafts)
    info = record(
        store,
        pair,
        workload,
        wanted.options,
        Look(chains, wanted.gamma_max),
        StaticSource(prepare(_recording_policy(pair), pair.draft_names)),
        slot=slot,
        fresh=wanted.fresh and not slot,
        reuse_complete=True,
        progress=progress,
    )
    return tune_recording(
        store,
        pair,
        info.id,
        wanted,
        seconds={"record": clock() - began},
        progress=progress,
        clock=clock,
    )


@kept_helpers()
def tune_recording(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    wanted: TuneOptions,
    *,
    seconds: Mapping[str, float] | None = None,
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Tunes on an existing recording (of served traffic, say). ``seconds`` are those that stages
    took before."""
    if seconds is None:
        texts = store.load(recording, (), skip_corrupted=True).trajectories
        _tell_number(wanted, [t.category for t in texts])
    tuning = Tuning(store, pair, recording, wanted, progress, clock, dict(seconds or {}))
    for name, stage in STAGES:
        began = clock()
        wanted.begins(name)
        stage(tuning)
        tuning.seconds[name] = tuning.seconds.get(name, 0.0) + clock() - began
    tuned, replaces = _conclude(tuning)
    policy = tuned.winner.policy
    store.put_policy(policy.id, policy.spelled_out(), policy.label())
    with wanted.publishing(tuned):
        if replaces and wanted.publish:
            tuned = publish(
                store,
                pair,
                tuned,
                over=tuning.active,  # another version that came into force meanwhile stays
                deployment=wanted.deployment,
                sampling=sampling_of(tuning.trace.trajectories),
                actor=wanted.actor,
                idempotency_key=wanted.idempotency_key,
                guard=wanted.guard,
            )
        _keep_evidence(tuning, tuned)
    return tuned


@dataclass
class Tuning:
    """What the stages of a tuning hand on: each reads what those before it made, and adds its
    own."""

    store: TraceStore
    pair: LoadedPair
    recording: str
    wanted: TuneOptions
    progress: Progress
    clock: Callable[[], float]
    seconds: dict[str, float]
    trace: ReplayTrace = field(init=False)
    ordinals: tuple[int, ...] = field(init=False)
    """Of the trace's requests, in the recording."""
    parts: Parts = field(init=False)
    """Those of the race and the confirmation in an order whose every beginning has all categories.
    """
    profile: StoredProfile = field(init=False)
    active: Publication | None = field(init=False)
    incumbent: AnyPolicy = field(init=False)
    unusable: str = field(init=False)
    """Why what is in force cannot be the incumbent; empty where it is."""
    artifacts: Artifacts = field(init=False)
    workload: Sanity = field(init=False)
    grown: tuple[str, ...] = ()
    """Drafts whose trees are replayed: all heads', and those that could win."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why trees were not tried, and what they could reach, by ``trees of DRAFT``."""
    trees: dict[str, TreeLimit] = field(default_factory=dict)
    shortlists: dict[str, ShortlistLimit] = field(default_factory=dict)
    study: Study = field(init=False)
    study_id: str = field(init=False)
    chooser: AnyPolicy | None = None
    compared: Comparison = field(init=False)
    roles: dict[str, AnyPolicy] = field(init=False)
    executed: list[Candidate] = field(init=False)
    winner: Candidate = field(init=False)
    confirmed: Confirmation | None = None
    texts_differ: int = 0

    @property
    def drafts(self) -> tuple[str, ...]:
        return self.wanted.drafts_of(self.pair)

    @property
    def chains(self) -> tuple[str, ...]:
        """Drafts whose chains are replayed from panoramas; a head's are recorded as trees."""
        return tuple(d for d in self.drafts if d in self.pair.chain_drafts)

    @property
    def verified(self) -> tuple[Verifier, Sampling]:
        """How the texts are verified and sampled."""
        first = self.trace.trajectories[0]
        return first.verifier, first.sampling

    def open(self, **more: Any) -> None:
        """Opens the trace anew, as something was recorded or ranked since."""
        grown: list[Grown] = [(d, "coupled") for d in self.grown]
        opened = open_trace(
            self.store, self.recording, chains=self.chains, trees=grown, skip_corrupted=True, **more
        )
        self.trace, self.ordinals = opened.trace, opened.ordinals
        texts = self.trace.trajectories
        categories = [t.category for t in texts]
        parts = split(categories)
        self.parts = Parts(
            parts.search, mixed(parts.race, categories), mixed(parts.confirm, categories)
        )

    @contextmanager
    def searched(self) -> Iterator[ReplayTrace | Shards]:
        """The search part: here, or on the workers that are asked for, for as long as they search
        (they know no shortlists)."""
        if self.wanted.workers is None or self.shortlists:
            yield self.trace.select(self.parts.search)
            return
        from spectune.optimizer.simulate.distributed import Shards, connected, homes, stored_shards

        read = [Policy(draft=draft) for draft in self.chains]
        read += [
            Policy.model_validate({"draft": draft, "growth": {"kind": "top_k"}})
            for draft in self.grown
        ]
        part = [self.ordinals[i] for i in self.parts.search]
        with connected(self.wanted.workers) as client:
            info = self.store.get_recording(self.recording)
            sources = stored_shards(
                self.store, info, read, len(homes(client)), ordinals=part, skip_corrupted=True
            )
            yield Shards(client, sources, self.profile.profile)

    def search(self, trials: int, known: Study | None = None) -> None:
        """Replays policies on the search part; those of ``known`` are not replayed again."""
        with self.searched() as trace:
            self.study = search(
                trace,
                self.profile.profile,
                [d for d in self.drafts if d in self.chains or d in self.grown],
                gamma_max=self.wanted.gamma_max,
                trials=trials,
                seed=self.wanted.seed,
                incumbents=[
                    *plain_policies(self.incumbent, self.artifacts),
                    *(
                        p
                        for p in earlier_winners(self.store, self.pair, *self.verified)
                        if p.draft in (*self.drafts, "none")
                    ),
                ],
                artifacts=self.artifacts,
                trees=self.trees,
                shortlists=self.shortlists,
                known=known,
                progress=lambda done, total, best: self.progress(
                    f"search, best {best:.0f} tokens/s", done, total
                ),
            )

    def executor(self, policies: Iterable[AnyPolicy], part: Sequence[int]) -> Executor:
        """Who decodes some of the requests again under policies."""
        encoded = encode_recorded(
            self.pair, [self.trace.trajectories[i] for i in part], self.wanted.options.chat
        )
        return Executor(
            self.pair,
            policies,
            encoded,
            profile=self.profile.profile,
            artifacts=self.artifacts,
            clock=self.clock,
        )


def _tell_number(wanted: TuneOptions, categories: Sequence[str]) -> None:
    """What so many requests will not show, before any work. Raises TraceError where they are too
    few."""
    line = said_of(categories, publish=wanted.publish)
    if line:
        wanted.tell(line)


def _look(tuning: Tuning, look: Look) -> None:
    look_around(tuning.store, tuning.pair, tuning.recording, look, progress=tuning.progress)
    tuning.open()


def _record(tuning: Tuning) -> None:
    """The panoramas that the recording lacks."""
    wanted = tuning.wanted
    _look(tuning, Look(tuning.chains, wanted.gamma_max))
    texts = tuning.trace.trajectories
    if len(texts) != tuning.store.get_recording(tuning.recording).n_requests:  # some are damaged
        _tell_number(wanted, [t.category for t in texts])
    tuning.workload = checked(texts)
    for line in tuning.workload.lines():
        wanted.tell(line)


def _profile(tuning: Tuning) -> None:
    """What rounds cost on this device, and with that, what there is to beat."""
    store, pair, wanted = tuning.store, tuning.pair, tuning.wanted
    began = store.get_recording(tuning.recording).created_at if wanted.idempotency_key else None
    tuning.active = store.active_publication(pair.id, pair.device.type, wanted.deployment)
    weighs = [p for p in _weighing_costs(store, pair, tuning.active) if p.draft in pair.draft_names]
    tuning.profile = profile_for(
        store,
        pair,
        tuple(dict.fromkeys((*tuning.drafts, *(p.draft for p in weighs)))),
        gamma_max=wanted.gamma_max,
        trees=wanted.prices_trees(pair)
        or any(p.is_tree or p.draft not in pair.chain_drafts for p in weighs),
        fresh=wanted.fresh,
        trajectories=tuning.trace.trajectories,
        own_since=began,
        progress=tuning.progress,
    )
    if wanted.publish and (
        line := tunes_over(tuning.active, sampling_of(tuning.trace.trajectories))
    ):
        wanted.tell(f"warning: {line}")
    tuning.incumbent, tuning.unusable = incumbent_of(
        store, pair, tuning.active, tuning.profile.profile, *tuning.verified
    )
    tuning.artifacts = _artifacts(store, pair, tuning.incumbent, tuning.trace.trajectories)


def _weighing_costs(
    store: TraceStore, pair: LoadedPair, active: Publication | None
) -> Sequence[Policy]:
    """The policies in force that weigh costs: they cannot run without those of their draft, whether
    it is tuned or not."""
    try:
        policy = published_policy(active) if active else AUTOREGRESSIVE
        return plain_policies(policy, fitted(store, pair.id)) if policy.needs_profile else []
    except PolicyError:
        return []


def _search_chains(tuning: Tuning) -> None:
    """What needs no trees; then what trees could reach beside it."""
    tuning.search(0)
    wanted, profile, found = tuning.wanted, tuning.profile.profile, tuning.study
    fastest = max((t.value for t in found.trials), default=0.0)
    texts = [tuning.trace.trajectories[i] for i in tuning.parts.search]
    trusted = profile.accepted(trees=wanted.prices_trees(tuning.pair))
    held = {p.draft for p in plain_policies(tuning.incumbent, tuning.artifacts)} | set(
        worth_trying(found.bounds)
    )
    grown = [d for d in tuning.drafts if d not in tuning.pair.chain_drafts]
    for draft in (d for d in tuning.drafts if d != "ngram" and not wanted.chains_only):
        deepest = max(
            wanted.tree_depth or TREE_DEPTH, tuning.store.tree_limits(tuning.recording, draft)[1]
        )
        most = tree_ceiling(profile, draft, texts, deepest)
        hopeless = trusted and most <= fastest * (1 + TIE)
        if wanted.tree_size[0] and (not hopeless or draft in held or draft in grown):
            grown += [draft] * (draft not in grown)
            continue
        tuning.left_out[f"trees of {draft}"] = (
            f"{'cannot win' if hopeless else 'not tried'}: at best {most:.0f} tokens/s, were every "
            f"token that they draft right; {fastest:.0f} is reached without trees"
        )
    tuning.grown = tuple(d for d in tuning.drafts if d in grown)
    for what, why in tuning.left_out.items():
        wanted.tell(f"left out: {what} ({why})")


def _record_trees(tuning: Tuning) -> None:
    """The trees that the recording lacks, of drafts that could win by them, and chains of heads."""
    if tuning.grown:
        _look(tuning, Look(tuning.grown, tuning.wanted.gamma_max, *tuning.wanted.tree_size))


def _fit(tuning: Tuning) -> None:
    """Bins, classifiers, static trees and scores, fitted to the search part."""
    if tuning.wanted.tree_size[0]:
        tuning.trees = fit_trees(
            tuning.store,
            tuning.recording,
            tuning.grown,
            profile=tuning.profile.id,
            seed=tuning.wanted.seed,
            progress=tuning.progress,
        )


def _search_first(tuning: Tuning) -> None:
    """All that is enumerated, without shortlists."""
    tuning.search(0, tuning.study)


def _cover(tuning: Tuning) -> None:
    """Records growths that promise more than the recording can tell, and searches again with what
    they read."""
    if record_beyond(
        tuning.store,
        tuning.pair,
        tuning.recording,
        tuning.study,
        tuning.wanted,
        tuning.artifacts,
        tuning.progress,
    ):
        tuning.open()
        tuning.search(0, replace(tuning.study, beyond=()))


def _shortlists(tuning: Tuning) -> None:
    """Frequencies and routers, fitted only where by what was measured and replayed without them a
    shortlist could win."""
    store, pair, progress = tuning.store, tuning.pair, tuning.progress
    worth = worth_trying(tuning.study.bounds) if tuning.grown else {}
    routed = [draft for draft, passes in worth.items() if "routed" in passes]
    tuning.shortlists = fit_shortlists(
        store,
        pair,
        tuning.recording,
        list(worth),
        routed=routed,
        seed=tuning.wanted.seed,
        progress=progress,
    )
    policies = plain_policies(tuning.incumbent, tuning.artifacts)
    ranks = ranks_for(store, pair, tuning.recording, tuning.shortlists, policies, progress=progress)
    if ranks:
        tuning.open(ranks=ranks)


def _search_all(tuning: Tuning) -> None:
    """The joint space, shortlists included."""
    tuning.search(tuning.wanted.trials, tuning.study)


def _choose(tuning: Tuning) -> None:
    """A chooser over the best policy of each draft, where choosing is predicted to gain beyond
    noise. The study is stored with it."""
    best: dict[str, Policy] = {}
    for trial in tuning.study.trials:
        best.setdefault(trial.policy.draft, trial.policy)
    profile, seed = tuning.profile.id, tuning.wanted.seed
    try:
        made = fit_chooser_artifact(
            tuning.store,
            tuning.recording,
            tuning.pair,
            best,
            profile=profile,
            seed=seed,
            progress=tuning.progress,
        )
    except (PolicyError, TraceError, CorruptedChunkError) as error:
        why = str(error)
    else:
        why = str(made.document["reason"])
        tuning.chooser = parse_policy(made.policy) if made.document["chooses"] else None
    study = tuning.study
    tuning.study_id = tuning.store.put_study(
        tuning.pair.id,
        sampler=study.sampler,
        seed=study.seed,
        document={
            "recording": tuning.recording,
            "profile": profile,
            "requests": list(study.requests),
            "trials": len(study.trials),
            "shortlists": study.on_shortlists(),
            "beyond_the_recording": study.left_out(),
            "left_out": tuning.left_out,
            "chooser": why,
            "pace": pace(
                tuning.seconds,
                device=tuning.pair.device.type,
                trees=tuning.wanted.tree_size[0] > 0,
                tokens=sum(t.max_new_tokens for t in tuning.trace.trajectories),
            ),
        },
        trials=[t.to_json() for t in study.trials],
        recording_id=tuning.recording,
    )


def _execute(tuning: Tuning) -> None:
    """The best few, the incumbent and plain baselines race on requests that the search has not
    seen; who wins is then known."""
    wanted, profile, part = tuning.wanted, tuning.profile.profile, tuning.parts.race
    tuning.roles = _roles(tuning.study, tuning.incumbent, wanted, tuning.chooser)
    policies, trace = {p.id: p for p in tuning.roles.values()}, tuning.trace.select(part)
    predictable = dict(policies)
    try:
        replay(trace, tuning.incumbent, profile, artifacts=tuning.artifacts, approximate=True)
    except (
        PolicyError,
        TraceError,
    ) as error:  # a tuning of chains records no trees, which may be in force
        del predictable[tuning.incumbent.id]
        wanted.tell(f"{tuning.incumbent.label()}, in force, is raced without a prediction: {error}")
    tuning.compared = tuning.executor(policies.values(), part).race(
        whole={p.id for role, p in tuning.roles.items() if not role.startswith("finalist")},
        expected=expected_seconds(trace, predictable.values(), profile, tuning.artifacts),
        passes=wanted.passes,
        budget_s=wanted.budget_s * RACE_SHARE,
        progress=lambda done, total: tuning.progress("execute", done, total),
    )
    timings, artifacts = tuning.compared.timings, tuning.artifacts
    at_pace = at_pace_of(profile, timings)
    predicted = {
        p.id: replay(trace, p, at_pace, artifacts=artifacts, approximate=True)
        for p in predictable.values()
    }
    tuning.executed = candidates_of(tuning.roles, tuning.compared, predicted, tuning.incumbent)
    fastest = fastest_of(
        [policies[name] for name in tuning.compared.survivors],
        timings,
        {name: outcome.total.tokens_per_s for name, outcome in predicted.items()},
        prediction_spread(profile, trees=wanted.tree_size[0] > 0),
    )
    tuning.winner = next(c for c in tuning.executed if c.policy.id == fastest.id)
    tuning.texts_differ = tuning.compared.texts_differ


def _confirm(tuning: Tuning) -> None:
    """The race's winner and the incumbent alone, on requests that nothing was fitted to or chosen
    by, in what is left of the time."""
    wanted, seconds = tuning.wanted, tuning.compared.timings.seconds
    winner, incumbent = tuning.winner.policy, tuning.incumbent
    if winner.id == incumbent.id:
        return
    both_s = sum(float(np.nanmean(seconds[p.id])) for p in (winner, incumbent))
    left = left_s(wanted.budget_s, sum(float(np.nansum(s)) for s in seconds.values()))
    requests, passes = planned(len(tuning.parts.confirm), both_s, left, wanted.passes)
    executor = tuning.executor([winner, incumbent], tuning.parts.confirm[:requests])
    tuning.confirmed = confirm(
        winner.id,
        incumbent.id,
        executor,
        requests=requests,
        passes=passes,
        progress=lambda done, total: tuning.progress("confirm", done, total),
    )
    tuning.texts_differ += executor.texts_differ


STAGES: tuple[tuple[str, Callable[[Tuning], None]], ...] = (
    ("record", _record),
    ("profile", _profile),
    ("search", _search_chains),
    ("record", _record_trees),
    ("fit", _fit),
    ("search", _search_first),
    ("cover", _cover),
    ("shortlists", _shortlists),
    ("search", _search_all),
    ("chooser", _choose),
    ("execute", _execute),
    ("confirm", _confirm),
)
"""What a tuning does, in order, by the name that its seconds are told under."""


def _conclude(tuning: Tuning) -> tuple[Tuned, bool]:
    """What was found, and whether it is to take the place of what is in force."""
    trees = tuning.wanted.prices_trees(tuning.pair)
    incumbent = next(c for c in tuning.executed if c.policy.id == tuning.incumbent.id)
    in_force = tuning.active is not None and not tuning.unusable
    reason, chosen, replaces = verdict(tuning.winner, incumbent, tuning.confirmed, in_force)
    tuned = Tuned(
        winner=chosen,
        incumbent=incumbent,
        candidates=tuple(tuning.executed),
        recording=tuning.recording,
        profile=tuning.profile.id,
        study=tuning.study_id,
        texts_differ=tuning.texts_differ,
        test_requests=max(len(c.executed.per_request) for c in tuning.executed),
        search_requests=len(tuning.parts.search),
        trials=len(tuning.study.trials),
        reason="; ".join(
            filter(None, (tuning.unusable, doubts(tuning.profile, trees=trees), reason))
        ),
        published=None,
        confirmed=tuning.confirmed,
        seconds=tuning.seconds,
        beyond=tuning.study.left_out(),
        left_out=tuning.left_out,
        workload=tuning.workload,
    )
    return tuned, replaces


def _keep_evidence(tuning: Tuning, tuned: Tuned) -> None:
    """Stores what the report draws beside the study."""
    pair, trace = tuning.pair, tuning.trace
    shown = {c.policy.id: c.policy for c in (tuned.winner, tuned.incumbent)}
    request = middle_request(trace, (r.request_id for r in tuned.winner.executed.per_request))
    rounds = rounds_of_one(
        trace, request, shown.values(), tuning.profile.profile, tuning.artifacts, pair.text
    )
    about = {
        "pair": f"{pair.spec.name} ({pair.id})",
        "device": pair.device.type,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "deployment": tuning.wanted.deployment,
        "sampling": sampling_in_words(trace.trajectories[request].sampling),
    }
    document = evidence_document(tuned, tuning.compared, rounds, about)
    tuning.store.put_artifact(
        EVIDENCE, document, pair_id=pair.id, provenance={"study": tuned.study}
    )


def _roles(
    study: Study, incumbent: AnyPolicy, wanted: TuneOptions, chooser: AnyPolicy | None = None
) -> dict[str, AnyPolicy]:
    """Who is executed, by role; a policy that has several roles appears under each."""
    best = finalists(study, wanted.finalists)
    best += rivals(study, [trial.policy for trial in best], wanted.rivals)
    chosen: list[AnyPolicy] = [
        incumbent if study.same(t.policy, incumbent) else t.policy for t in best
    ]
    chosen += [chooser] if chooser is not None else []
    roles: dict[str, AnyPolicy] = {f"finalist {i + 1}": policy for i, policy in enumerate(chosen)}
    roles["autoregressive"] = AUTOREGRESSIVE
    fixed = study.best(is_fixed)
    if fixed is not None:
        roles["best fixed gamma"] = fixed.policy
        roles["transformers heuristic"] = transformers_heuristic(
            fixed.policy.draft, wanted.gamma_max
        )
    roles["incumbent"] = incumbent
    return roles


def _recording_policy(pair: LoadedPair) -> Policy:
    """What a recording is decoded by when nothing better is known: any policy gives the same text,
    a short window is quicker."""
    if not pair.drafts:
        return AUTOREGRESSIVE
    smallest = min(pair.drafts, key=lambda n: pair.drafts[n].num_parameters)
    return Policy.model_validate({"draft": smallest, "window": {"kind": "fixed", "gamma": 2}})


def _artifacts(
    store: TraceStore, pair: LoadedPair, incumbent: AnyPolicy, trajectories: Sequence[Trajectory]
) -> Artifacts:
    """What finds artifacts. A chooser in force was fitted to another recording; what it predicts of
    this one's prompts is added to what is found of it, so that it replays."""
    find = fitted(store, pair.id)
    if not isinstance(incumbent, ChooserPolicy):
        return find
    name = incumbent.draft.artifact
    held = find(name)
    chooser = Chooser.from_document(held.document, held.arrays)
    if chooser.chooses:
        prompts = read_prompts(pair, trajectories, reader=chooser.features.reader)
        predicted = np.concatenate(
            [chooser.accuracies(chooser.features.transform([p])) for p in prompts]
        )
        rows = [{"prompt": prompt_key(t.prompt_ids)} for t in trajectories]
        held = replace(
            held,
            document={**held.document, PREDICTED: rows},
            arrays={**held.arrays, PREDICTED: predicted},
        )
    return lambda asked: held if asked == name else find(asked)


def record_beyond(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    study: Study,
    wanted: TuneOptions,
    find: Artifacts,
    progress: Progress,
) -> list[str]:
    """Records the growths that read more than was recorded (C2T at a low threshold grows where
    EAGLE-2 would not), where what is known of them promises more than the best of the others; the
    drafts whose trees were recorded anew."""
    if not wanted.tree_size[0]:
        return []
    best = max((t.value for t in study.trials), default=0.0)
    sampled = not store.get_recording(recording).sampling.greedy
    covers: dict[str, dict[str, Cover]] = {}
    for trial in (t for t in study.beyond if t.value > best and t.policy.is_tree):
        cover = cover_of(trial.policy, sampled=sampled, artifacts=find)
        own = covers.setdefault(trial.policy.draft, {})
        if cover.name in own or len(own) < MOST_COVERS:
            own[cover.name] = max(cover, own.get(cover.name, cover), key=lambda c: c.depth)
    for draft, own in covers.items():
        look = Look([draft], wanted.gamma_max, *wanted.tree_size, covers=tuple(own.values()))
        look_around(store, pair, recording, look, progress=progress)
    return list(covers)
