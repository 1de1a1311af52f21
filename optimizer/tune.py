"""Tuning: the whole circle for one pair, device and workload. Record, profile, search, execute, publish.

Every phase stores what it made, and finds what an interrupted run had made: a recording is resumed, a profile of the same
environment is used again, the search is a function of both, and a publication carries an idempotency key. Runs under one key share
what they make even where they are to begin anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from sqlalchemy.orm import Session

from db.errors import CorruptedChunkError, StaleVersionError
from optimizer.artifacts import fitted, q_tables
from optimizer.execute import Comparison, DecodeOptions, Expected, encode_recorded, race
from optimizer.fit.chooser_fits import fit_chooser_artifact
from optimizer.fit.on_the_fly import read_prompts
from optimizer.fit.tuning import fit_shortlists, fit_trees, ranks_for
from optimizer.inputs import published_policy
from optimizer.record import RecordRequest, cover_of, record, retrace, retrace_trees, split, whole_texts
from optimizer.replay import ReplayTrace, replay
from optimizer.search import TIE, Study, complexity, finalists, is_fixed, rivals, search, worth_trying
from optimizer.spaces import transformers_heuristic
from runtime.decoder import output_hashes
from runtime.loading import LoadedPair
from runtime.loop import StaticSource
from runtime.policies.document import AUTOREGRESSIVE, ChooserPolicy, Policy, parse_policy
from runtime.policies.draft_choice import Chooser
from runtime.policies.plan import QTables, prepare
from runtime.policies.prepared_chooser import PREDICTED, prompt_key
from runtime.policies.tree_rules import Artifacts
from runtime.profiler import environment, measure_profile
from runtime.tree_panorama import Cover
from traces.errors import PolicyError, TraceError
from traces.recording import Recording
from traces.schema import LatencyProfile, Outcome, Trajectory, Workload
from traces.store import Publication, StoredProfile, TraceStore

PROFILE_AGE = timedelta(hours=24)
"""A profile of the same environment is used again for so long."""

PREDICTION_SPREAD = 0.02
"""Standard deviation, relative, of a predicted ratio of two policies' speeds (the median error of the fidelity checks)."""
MOST_COVERS = 4
"""Growths of one draft beyond the recording that are recorded as well; each makes every tree larger."""
Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""


@dataclass(frozen=True)
class TuneOptions:
    """How a tuning is done. ``drafts`` empty means all of the pair's; ``tree_width`` 0 leaves trees out. ``finalists`` of
    different kinds and ``rivals``
    (fixed windows too close for prediction) race against the baselines, in at most ``passes`` and about ``budget_s``. ``fresh`` uses
    nothing that was stored before, but what was made under the same ``idempotency_key``. ``guard`` is called in the transaction that
    publishes, and raises where the caller may not; ``publishing`` is entered around it, with what is published."""

    options: DecodeOptions = field(default_factory=DecodeOptions)
    drafts: tuple[str, ...] = ()
    gamma_max: int = 16
    trials: int = 400
    seed: int = 0
    finalists: int = 4
    rivals: int = 6
    passes: int = 8
    budget_s: float = 120.0
    fresh: bool = False
    publish: bool = True
    actor: str = "tune"
    idempotency_key: str | None = None
    guard: Callable[[Session], None] | None = None
    publishing: Callable[[Tuned], AbstractContextManager[object]] = nullcontext
    tree_width: int = 8
    tree_depth: int = 8


def finite(values: Sequence[float]) -> list[float | None]:
    """For JSON, which has no infinity: an interval's end that is not known is None."""
    return [v if math.isfinite(v) else None for v in values]


@dataclass(frozen=True)
class Candidate:
    """One executed policy beside its prediction. Speeds in tokens/s; ``ratio`` is its speed over the incumbent's, with a 95%
    interval over requests, and ``over_plain`` over autoregression's, each on the requests that both were executed on. ``raced`` is its
    speed over the leader's of the race, projected to the whole workload, and ``left`` says whether the race ended with it."""

    role: str
    policy: Policy
    predicted: Outcome
    executed: Outcome
    ratio: tuple[float, float, float]
    over_plain: tuple[float, float, float] = (1.0, 1.0, 1.0)
    raced: tuple[float, float, float] = (1.0, 1.0, 1.0)
    left: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "id": self.policy.id,
            "label": self.policy.label(),
            "policy": self.policy.spelled_out(),
            "predicted_tokens_per_s": self.predicted.total.tokens_per_s,
            "measured_tokens_per_s": self.executed.total.tokens_per_s,
            "measured_interval": list(self.executed.tokens_per_s_interval()),
            "mean_accepted_length": self.executed.total.mean_accepted_length,
            "ratio_to_incumbent": self.ratio[0],
            "ratio_interval": finite(self.ratio[1:]),
            "ratio_to_autoregressive": self.over_plain[0],
            "ratio_to_autoregressive_interval": finite(self.over_plain[1:]),
            "ratio_to_leader": self.raced[0],
            "ratio_to_leader_interval": finite(self.raced[1:]),
            "left_in_race": self.left,
            "executed_requests": len(self.executed.per_request),
        }


@dataclass(frozen=True)
class Tuned:
    """What a tuning found and did. ``published`` is the new publication, None when the incumbent stays (``reason`` says why);
    ``beyond`` is :meth:`optimizer.search.Study.left_out`."""

    winner: Candidate
    incumbent: Candidate
    candidates: tuple[Candidate, ...]
    recording: str
    profile: str
    study: str
    texts_differ: int
    test_requests: int
    search_requests: int
    trials: int
    reason: str
    published: Publication | None
    seconds: Mapping[str, float] = field(default_factory=dict)
    beyond: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The contract's keys ``winner``, ``predicted``, ``measured``, ``baselines``, ``published``, and the evidence."""
        return {
            "winner": {
                "id": self.winner.policy.id,
                "label": self.winner.policy.label(),
                "policy": self.winner.policy.spelled_out(),
            },
            "predicted": self.winner.predicted.to_json(),
            "measured": self.winner.executed.to_json(),
            "baselines": {c.role: c.to_json() for c in self.candidates if not c.role.startswith("finalist")},
            "candidates": [c.to_json() for c in self.candidates],
            "ratio_to_incumbent": finite(self.winner.ratio),
            "published": None
            if self.published is None
            else {"version": self.published.version, "policy": self.published.policy_id},
            "reason": self.reason,
            "recording": self.recording,
            "profile": self.profile,
            "study": self.study,
            "search_requests": self.search_requests,
            "test_requests": self.test_requests,
            "trials": self.trials,
            "texts_differ": self.texts_differ,
            "beyond_the_recording": dict(self.beyond),
            "seconds": dict(self.seconds),
        }


def usable_profile(
    store: TraceStore,
    pair: LoadedPair,
    drafts: tuple[str, ...],
    now: datetime,
    *,
    trees: bool = False,
    since: datetime | None = None,
) -> StoredProfile | None:
    """The newest accepted profile of this pair in this environment that covers the drafts (and their ``trees``), unless it is a day
    old, or older than ``since``."""
    grown = {d for d in drafts if d != "ngram" and trees}
    here = environment(pair)
    for found in store.list_profiles(pair.id, pair.device.type, here["dtype"]):
        same = all(found.profile.environment.get(k) == here[k] for k in ("device", "torch", "threads", "dtype"))
        same = same and (since is None or found.created_at >= since)
        if same and now - found.created_at < PROFILE_AGE and set(drafts) <= set(found.profile.priced_drafts):
            if grown and (found.profile.trees is None or not grown <= set(found.profile.trees.level)):
                continue
            return found if _checked(found.profile, trees)[0] else None
    return None


def _checked(profile: LatencyProfile, trees: bool) -> tuple[bool, float]:
    """Whether composed rounds are close enough to executed ones, and the median error; with ``trees`` of theirs too, the larger one."""
    checks = [profile.check, *([profile.check["trees"]] if trees and "trees" in profile.check else [])]
    return all(c.get("accepted", False) for c in checks), max(c.get("median_error", math.inf) for c in checks)


def tune(
    store: TraceStore,
    pair: LoadedPair,
    workload: Workload,
    wanted: TuneOptions,
    *,
    progress: Progress = lambda phase, done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Tunes a pair for a workload on the device it is loaded on, from recording to publication.

    The winner is published only if it beats the incumbent (the active policy, or autoregression while there is none) beyond noise on
    requests that the search has not seen. What came into force after the incumbent was read is never replaced: it was not compared.
    Raises PolicyError or TraceError when nothing can be searched, and what ``wanted.guard`` raises.
    """
    drafts = wanted.drafts or _drafts(wanted, pair)
    times: dict[str, float] = {}
    slot = (wanted.idempotency_key or "") if wanted.fresh else ""
    began = clock()
    info = record(
        store,
        pair,
        RecordRequest(workload, wanted.options, drafts, wanted.gamma_max, *_tree_size(wanted), slot=slot),
        StaticSource(prepare(_recording_policy(pair), pair.draft_names)),
        fresh=wanted.fresh and not slot,
        reuse_complete=True,
        progress=progress,
    )
    times["record"] = clock() - began
    return tune_recording(store, pair, info.id, wanted, times=times, progress=progress, clock=clock)


def tune_recording(
    store: TraceStore,
    pair: LoadedPair,
    recording_id: str,
    wanted: TuneOptions,
    *,
    times: dict[str, float] | None = None,
    progress: Progress = lambda phase, done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Tunes on an existing recording (of served traffic, say): retraces what is missing, then searches, executes, publishes."""
    times = {} if times is None else times
    drafts = wanted.drafts or _drafts(wanted, pair)
    retrace(store, pair, recording_id, drafts, wanted.gamma_max, progress=progress)
    retrace_trees(store, pair, recording_id, drafts, *_tree_size(wanted), chain_depth=wanted.gamma_max, progress=progress)
    chains = tuple(d for d in drafts if d in pair.chain_drafts)
    grown = tuple(d for d in drafts if d not in pair.chain_drafts or (_tree_size(wanted)[0] and d != "ngram"))
    recording = store.load(recording_id, drafts, skip_corrupted=True, trees=bool(grown)).having(chains, trees=grown)
    if not recording.requests:
        raise TraceError(f"recording {recording_id} has no usable request; record again")
    began = clock()
    own = recording.info.created_at if wanted.idempotency_key else None
    stored = profile_for(store, pair, drafts, wanted, whole_texts(recording.trajectories), own_since=own, progress=progress)
    times["profile"] = clock() - began
    profile = stored.profile

    began = clock()
    trajectories = recording.trajectories
    trees = {(d, "coupled"): recording.trees(d) for d in grown}
    panoramas = {d: recording.panoramas(d) for d in chains}
    trace = ReplayTrace(trajectories, panoramas, trees=trees)
    limits = {}
    if _tree_size(wanted)[0]:
        limits = fit_trees(store, recording_id, grown, profile=stored.id, seed=wanted.seed, progress=progress)
        times["fit"] = clock() - began
        began = clock()
    search_part, test_part = split([t.request_id for t in trajectories], [t.category for t in trajectories])
    active = store.active_publication(pair.id, pair.device.type)
    incumbent, unusable = incumbent_of(store, pair, active, profile)
    seeds = [incumbent, *(p for p in _earlier_winners(store, pair) if p.draft in (*drafts, "none"))]
    find, candidates = _artifacts(store, pair, incumbent, trajectories)

    def searched(trials: int, **more: Any) -> Study:
        return search(
            trace.select(search_part),
            profile,
            drafts,
            gamma_max=wanted.gamma_max,
            trials=trials,
            seed=wanted.seed,
            incumbents=seeds,
            q_tables=q_tables(store),
            artifacts=find,
            trees=limits,
            progress=lambda done, total, best: progress(f"search, best {best:.0f} tokens/s", done, total),
            **more,
        )

    first = searched(0)
    times["search"] = clock() - began
    began = clock()
    covered = _cover(store, pair, recording_id, first, wanted, find, progress)
    if covered:
        loaded = store.load(recording_id, covered, skip_corrupted=True, trees=True).having(trees=covered)
        place = {r.ordinal: i for i, r in enumerate(loaded.requests)}
        for draft in covered:
            made = loaded.trees(draft)
            trees[draft, "coupled"] = tuple(made[place[r.ordinal]] for r in recording.requests)
        trace = ReplayTrace(trajectories, panoramas, trees=trees)
        first = searched(0, known=first.trials)
        times["cover"] = clock() - began
        began = clock()
    # Only where, by what was measured and replayed without, a shortlist could win, is anything fitted.
    worth = worth_trying(first.bounds) if grown else {}
    routers = [draft for draft, passes in worth.items() if "routed" in passes]
    shortlists = fit_shortlists(store, pair, recording_id, list(worth), routed=routers, seed=wanted.seed, progress=progress)
    ranks = ranks_for(store, pair, recording_id, shortlists, candidates, progress=progress)
    if ranks:
        trace = ReplayTrace(trajectories, panoramas, trees=trees, ranks=ranks)
    times["shortlists"] = clock() - began
    began = clock()
    study = searched(wanted.trials, shortlists=shortlists, known=first.trials)
    times["search"] += clock() - began
    began = clock()
    chooser, why = _chooser(store, pair, recording_id, study, stored, wanted, progress)
    times["chooser"] = clock() - began
    study_id = store.put_study(
        pair.id,
        sampler=study.sampler,
        seed=study.seed,
        document={
            "recording": recording_id,
            "profile": stored.id,
            "requests": list(study.requests),
            "trials": len(study.trials),
            "shortlists": study.on_shortlists(),
            "beyond_the_recording": study.left_out(),
            "chooser": why,
        },
        trials=[t.to_json() for t in study.trials],
        recording_id=recording_id,
    )

    began = clock()
    roles = _roles(study, incumbent, wanted, chooser)
    encoded = encode_recorded(pair, [trajectories[i] for i in test_part], wanted.options.chat)
    compared = race(
        pair,
        list(roles.values()),
        encoded,
        whole={p.id for role, p in roles.items() if not role.startswith("finalist")},
        expected=expected_seconds(trace, test_part, roles.values(), profile, q_tables(store), find),
        profile=profile,
        passes=wanted.passes,
        budget_s=wanted.budget_s,
        clock=clock,
        progress=lambda done, total: progress("execute", done, total),
        q_tables=q_tables(store),
        artifacts=find,
    )
    times["execute"] = clock() - began
    executed = _candidates(roles, compared, trace.select(test_part), profile, incumbent, q_tables(store), find)
    winner = _winner(executed, compared)
    current = next(c for c in executed if c.policy.id == incumbent.id)
    reason, chosen, fresh_choice = _verdict(winner, current, active is not None and not unusable)
    reason = f"{unusable}; {reason}" if unusable else reason
    tuned = Tuned(
        winner=chosen,
        incumbent=current,
        candidates=tuple(executed),
        recording=recording_id,
        profile=stored.id,
        study=study_id,
        texts_differ=compared.texts_differ,
        test_requests=len(winner.executed.per_request),
        search_requests=len(search_part),
        trials=len(study.trials),
        reason=reason,
        published=None,
        seconds=times,
        beyond=study.left_out(),
    )
    if not (fresh_choice and wanted.publish):
        return tuned
    with wanted.publishing(tuned):
        return publish(store, pair, tuned, wanted, over=active)


def profile_for(
    store: TraceStore,
    pair: LoadedPair,
    drafts: tuple[str, ...],
    wanted: TuneOptions,
    texts: Sequence[Sequence[int]] = (),
    *,
    own_since: datetime | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> StoredProfile:
    """A profile fit for use: a recent one of this environment, else a new measurement, on ``texts`` (tried twice if its check fails).

    A fresh tuning uses only one that was made after ``own_since``, when its first attempt began; None: this is the first.
    """
    trees = _tree_size(wanted)[0] > 0
    if not wanted.fresh or own_since is not None:
        since = own_since if wanted.fresh else None
        found = usable_profile(store, pair, drafts, datetime.now(UTC), trees=trees, since=since)
        if found is not None:
            return found
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
    best: LatencyProfile | None = None
    for _ in range(2):
        profile = measure_profile(
            pair,
            gamma_max=wanted.gamma_max,
            trees=trees,
            texts=texts,
            progress=lambda what, done, total: progress("profile", done, total),
        )
        accepted, error = _checked(profile, trees)
        if best is None or error < _checked(best, trees)[1]:
            best = profile
        if accepted:
            break
    assert best is not None
    return store.get_profile(store.put_profile(best))


def publish(store: TraceStore, pair: LoadedPair, tuned: Tuned, wanted: TuneOptions, *, over: Publication | None) -> Tuned:
    """Puts the winner in force with its evidence, once per idempotency key, in place of ``over`` (None: of nothing).

    Where another version came into force meanwhile nothing is published, and the reason says so. Raises what ``wanted.guard`` raises.
    """
    policy = tuned.winner.policy
    store.put_policy(policy.id, policy.spelled_out(), policy.label())
    try:
        published = store.publish(
            pair.id,
            pair.device.type,
            policy.id,
            actor=wanted.actor,
            evidence=tuned.to_json(),
            reason=tuned.reason,
            idempotency_key=wanted.idempotency_key,
            expected=over.version if over else 0,
            guard=wanted.guard,
        )
    except StaleVersionError:
        now = store.active_version(pair.id, pair.device.type)
        reason = f"version {now} came into force meanwhile and was not compared, so it stays"
        return replace(tuned, reason=f"{reason}; `tune --recording {tuned.recording}` compares with it")
    return replace(tuned, published=published)


def _drafts(wanted: TuneOptions, pair: LoadedPair) -> tuple[str, ...]:
    """The pair's drafts that the verifier can be used with."""
    chains_only = wanted.options.verifier == "rejection" and not wanted.options.sampling.greedy
    return tuple(d for d in pair.draft_names if d in pair.chain_drafts or not chains_only)


def _tree_size(wanted: TuneOptions) -> tuple[int, int]:
    """Width and depth of the trees to record: none where the verifier is for chains."""
    if wanted.options.verifier == "rejection" and not wanted.options.sampling.greedy:
        return 0, 0
    return wanted.tree_width, wanted.tree_depth


def _cover(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    study: Study,
    wanted: TuneOptions,
    find: Artifacts,
    progress: Progress,
) -> list[str]:
    """Records the growths that read more than was recorded (C2T at a low threshold grows where EAGLE-2 would not), where what is known
    of them promises more than the best of the others; the drafts whose trees were recorded anew."""
    if not _tree_size(wanted)[0]:
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
        retrace_trees(
            store,
            pair,
            recording,
            [draft],
            *_tree_size(wanted),
            covers=tuple(own.values()),
            chain_depth=wanted.gamma_max,
            progress=progress,
        )
    return list(covers)


def _recording_policy(pair: LoadedPair) -> Policy:
    """What a recording is decoded by when nothing better is known: any policy gives the same text, a short window is quicker."""
    if not pair.drafts:
        return AUTOREGRESSIVE
    smallest = min(pair.drafts, key=lambda n: pair.drafts[n].num_parameters)
    return Policy.model_validate({"draft": smallest, "window": {"kind": "fixed", "gamma": 2}})


def incumbent_of(store: TraceStore, pair: LoadedPair, active: Publication | None, profile: LatencyProfile) -> tuple[Policy, str]:
    """(the policy in force, ""), or where there is none or it cannot run, (autoregression, why)."""
    if active is None:
        return AUTOREGRESSIVE, ""
    try:
        policy = published_policy(active)
        prepare(
            policy,
            pair.draft_names,
            profile=profile,
            q_tables=q_tables(store),
            artifacts=fitted(store, pair.id),
            head_hashes=output_hashes(pair),
        )
    except PolicyError as error:
        said = str(error).removeprefix(f"publication {active.version}: ")
        return AUTOREGRESSIVE, f"publication {active.version} cannot run ({said}), so autoregression is the incumbent"
    return policy, ""


def _artifacts(
    store: TraceStore, pair: LoadedPair, incumbent: Policy, trajectories: Sequence[Trajectory]
) -> tuple[Artifacts, tuple[Policy, ...]]:
    """What finds artifacts, and the policies that the incumbent may decode by. A chooser in force was fitted to another recording; what it
    predicts of this one's prompts is added to what is found of it, so that it replays."""
    find = fitted(store, pair.id)
    if not isinstance(incumbent, ChooserPolicy):
        return find, (incumbent,)
    (name,) = incumbent.artifacts
    held = find(name)
    chooser = Chooser.from_document(held.document, held.arrays)
    if chooser.chooses:
        prompts = read_prompts(pair, trajectories, reader=chooser.features.reader)
        predicted = np.concatenate([chooser.accuracies(chooser.features.transform([p])) for p in prompts])
        rows = [{"prompt": prompt_key(t.prompt_ids)} for t in trajectories]
        held = replace(held, document={**held.document, PREDICTED: rows}, arrays={**held.arrays, PREDICTED: predicted})
    return lambda asked: held if asked == name else find(asked), tuple(chooser.used.values())


def _chooser(
    store: TraceStore,
    pair: LoadedPair,
    recording_id: str,
    study: Study,
    stored: StoredProfile,
    wanted: TuneOptions,
    progress: Progress,
) -> tuple[Policy | None, str]:
    """A chooser over the best policy of each draft, where choosing is predicted to gain beyond noise, and what its fit says of that."""
    best: dict[str, Policy] = {}
    for trial in study.trials:
        if not isinstance(trial.policy, ChooserPolicy):
            best.setdefault(trial.policy.draft, trial.policy)
    try:
        made = fit_chooser_artifact(store, recording_id, pair, best, profile=stored.id, seed=wanted.seed, progress=progress)
    except (PolicyError, TraceError, CorruptedChunkError) as error:
        return None, str(error)
    return parse_policy(made.policy) if made.document["chooses"] else None, str(made.document["reason"])


def _earlier_winners(store: TraceStore, pair: LoadedPair, count: int = 5) -> list[Policy]:
    found: dict[str, Policy] = {}
    for publication in store.list_publications(pair.id, limit=count):
        try:
            policy = published_policy(publication)
        except PolicyError:
            continue
        found[policy.id] = policy
    return list(found.values())


def expected_seconds(
    trace: ReplayTrace,
    executed: Sequence[int],
    policies: Iterable[Policy],
    profile: LatencyProfile,
    tables: QTables | None = None,
    artifacts: Artifacts | None = None,
) -> Expected:
    """What replay predicts for the requests of a trace that are executed (indices), and for all of it.

    Where a shortlist or a chooser is among the policies, those executed are all: it was fitted to the others' texts, on which it accepts
    more than on any to come.
    """
    policies = list(policies)
    fitted_to_texts = any(p.shortlisted or isinstance(p, ChooserPolicy) for p in policies)
    over = list(executed) if fitted_to_texts else range(len(trace.order))
    requests, whole = {}, {}
    for policy in policies:
        predicted = replay(trace, policy, profile, q_tables=tables, artifacts=artifacts, approximate=True)
        seconds = np.array([r.counts.seconds for r in predicted.per_request])
        requests[policy.id], whole[policy.id] = seconds[list(executed)], float(seconds[list(over)].sum())
    return Expected(requests, whole)


def _roles(study: Study, incumbent: Policy, wanted: TuneOptions, chooser: Policy | None = None) -> dict[str, Policy]:
    """Who is executed, by role; a policy that has several roles appears under each."""
    chosen = [trial.policy for trial in finalists(study, wanted.finalists)]
    chosen += [trial.policy for trial in rivals(study, chosen, wanted.rivals)]
    chosen += [chooser] if chooser is not None else []
    roles = {f"finalist {i + 1}": policy for i, policy in enumerate(chosen)}
    roles["autoregressive"] = AUTOREGRESSIVE
    fixed = study.best(is_fixed)
    if fixed is not None:
        roles["best fixed gamma"] = fixed.policy
        roles["transformers heuristic"] = transformers_heuristic(fixed.policy.draft, wanted.gamma_max)
    roles["incumbent"] = incumbent
    return roles


def _candidates(
    roles: Mapping[str, Policy],
    compared: Comparison,
    trace: ReplayTrace,
    profile: LatencyProfile,
    incumbent: Policy,
    tables: QTables,
    artifacts: Artifacts,
) -> list[Candidate]:
    leader = compared.timings.leader(compared.survivors)
    return [
        Candidate(
            role,
            policy,
            replay(trace, policy, profile, q_tables=tables, artifacts=artifacts, approximate=True),
            compared.outcomes[policy.id],
            compared.ratio(policy.id, incumbent.id),
            compared.ratio(policy.id, AUTOREGRESSIVE.id),
            compared.ratio(policy.id, leader, projected=True),
            policy.id in compared.survivors,
        )
        for role, policy in roles.items()
    ]


def _winner(candidates: list[Candidate], compared: Comparison) -> Candidate:
    """The fastest on the whole workload of those that the race left (:func:`_estimate`); of those that are as fast, within 1% with
    their whole interval, the simplest kind. Windows of one kind are equally simple whatever their length."""
    left = [c for c in candidates if c.left]
    fastest = max(left, key=lambda c: _estimate(c, left[0], compared))
    tied = []
    for candidate in left:
        lead, low, high = compared.ratio(fastest.policy.id, candidate.policy.id, projected=True)
        if candidate.policy.id == fastest.policy.id or (low <= 1.0 and high <= 1.0 + TIE):
            tied.append((complexity(candidate.policy)[:-1], lead, candidate))
    return min(tied, key=lambda t: t[:2])[2]


def _estimate(candidate: Candidate, base: Candidate, compared: Comparison) -> float:
    """Log speed over ``base``, :func:`weighed`. Where execution is precise it decides alone; where it cannot tell two policies apart,
    prediction, which knows their rounds exactly, says more than noise."""
    if candidate.policy.id == base.policy.id:
        return 0.0
    predicted = candidate.predicted.total.tokens_per_s / max(1e-12, base.predicted.total.tokens_per_s)
    return weighed(compared.ratio(candidate.policy.id, base.policy.id, projected=True), predicted)


def weighed(executed: tuple[float, float, float], predicted: float, predicted_spread: float = PREDICTION_SPREAD) -> float:
    """Logarithm of a speed-up: as executed (ratio, 95% interval) and as predicted, each weighed by the inverse of its variance."""
    ratio, low, high = executed
    if not (low > 0.0 and math.isfinite(high)) or predicted <= 0.0:
        return math.log(ratio)
    spread = max(1e-6, math.log(high / low) / (2 * 1.96))
    of_executed, of_predicted = spread**-2, predicted_spread**-2
    return (of_executed * math.log(ratio) + of_predicted * math.log(predicted)) / (of_executed + of_predicted)


def _verdict(winner: Candidate, incumbent: Candidate, published: bool) -> tuple[str, Candidate, bool]:
    """(why, the candidate to be in force, whether that is to be published)."""
    ratio, low, high = winner.ratio
    stays = "the incumbent stays" if published else "autoregression is published"
    if winner.policy.id == incumbent.policy.id:
        return f"nothing executed is faster than the incumbent; {stays}", incumbent, not published
    shown = f"{ratio:.3f} times the incumbent's speed (95% interval {low:.3f} to {high:.3f})"
    if not math.isfinite(low) or low <= 1.0:
        return f"{shown}: not beyond noise; {stays}", incumbent, not published
    return shown, winner, True


def describe(recording: Recording) -> str:
    """One line on a recording, for messages."""
    tokens = sum(len(t.output_ids) for t in recording.trajectories)
    return f"{recording.info.id}: {len(recording.requests)} requests, {tokens} tokens"
