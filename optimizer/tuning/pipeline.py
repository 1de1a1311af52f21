"""The one tuning: a bench proposes policies, a race chooses one, a confirmation measures that one
against what is in force, and what is confirmed is published (:func:`tune`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from sqlalchemy.orm import Session

from spectune.db.database_errors import StaleVersionError
from spectune.optimizer.deployment import Place, other_sampling, refusal, sampling_of
from spectune.optimizer.inputs import published_policy
from spectune.optimizer.profiles import common_factor
from spectune.optimizer.report.evidence import put_evidence
from spectune.optimizer.report.names import short_name
from spectune.optimizer.report.words import confirmed_in_words, counted, sampling_in_words
from spectune.optimizer.tuning.bench import Bench, Prediction, RecordedTexts, Tunable
from spectune.optimizer.tuning.confirm import (
    RACE_SHARE,
    Spread,
    check_sample_size,
    confirm,
    left_s,
    missed_in_words,
    planned,
    power_in_words,
    spread_of,
)
from spectune.optimizer.tuning.confirmation import Confirmation
from spectune.optimizer.tuning.race import PASSES, Comparison, fastest_of, race
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.optimizer.tuning.tuned import Candidate, PublishedAs, Tuned, is_finalist
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.sanity import checked
from spectune.traces.store import TraceStore
from spectune.traces.store.confirmations import count_confirmation
from spectune.traces.tables import Publication


@dataclass(frozen=True)
class ProveOptions:
    """Race and confirmation take about ``budget_s`` together. ``guard`` is called in the
    transaction that publishes, and raises where the caller may not. ``tell`` is called with what a
    user should know before the work goes on."""

    budget_s: float = 80.0
    publish: bool = True
    actor: str = "tune"
    idempotency_key: str | None = None
    guard: Callable[[Session], None] | None = None
    tell: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Raced:
    """The ``candidates`` by role, the ``winner`` and the ``incumbent`` among them, and the race,
    which took so many ``seconds``. ``unit``, ``gain``: as the bench has them."""

    candidates: tuple[Candidate, ...]
    winner: Candidate
    incumbent: Candidate
    race: Comparison
    seconds: float
    unit: str
    gain: str

    @property
    def unproved(self) -> str:
        """Why nothing was confirmed where the incumbent won: nobody was faster, or nobody beyond
        noise; and what would tell more."""
        timings, incumbent = self.race.timings, self.incumbent.policy.id
        executed, units = self.incumbent.units, len(timings.seconds[incumbent])
        faster = "no executed policy was faster than the incumbent"
        if timings.leader([incumbent, *self.race.survivors]) == incumbent:
            return f"{faster} on {counted(executed, self.unit)}"
        more = "raise --budget" if executed < units else "give more requests"
        return f"{faster} beyond noise on {counted(executed, self.unit)}: {more} to tell"


def run_race(
    bench: Bench,
    roles: Mapping[str, Policy],
    incumbent: Policy,
    options: ProveOptions,
    *,
    passes: int = PASSES,
    progress: Progress = silent,
) -> Raced:
    """Races policies, by role, on the bench's race part, in its share of the budget, and chooses by
    execution and prediction together. A policy of several roles is executed once. Those that are no
    finalists are executed on all of the part."""
    policies = {policy.id: policy for policy in (*roles.values(), incumbent)}
    predictions: dict[str, Prediction] = {}
    for name, policy in policies.items():
        try:
            predictions[name] = bench.predict(policy, "race")
        except (PolicyError, TraceError) as error:
            options.tell(f"{policy.label()} is raced without a prediction: {error}")
    began = bench.clock()
    comparison = race(
        bench,
        list(policies.values()),
        predictions,
        baselines={p.id for role, p in roles.items() if not is_finalist(role)},
        passes=passes,
        budget_s=options.budget_s * RACE_SHARE,
        clock=bench.clock,
        progress=lambda done, total: progress("execute", done, total),
    )
    seconds, timings = bench.clock() - began, comparison.timings
    leader = timings.leader(comparison.survivors)
    candidates = {
        role: Candidate(
            role,
            policy,
            predictions[policy.id].result.outcome() if policy.id in predictions else None,
            comparison.outcomes[policy.id],
            timings.ratio(policy.id, incumbent.id),
            timings.ratio(policy.id, AUTOREGRESSIVE.id),
            timings.ratio(policy.id, leader, projected=True),
            policy.id in comparison.survivors,
            int((~np.isnan(timings.seconds[policy.id])).any(1).sum()),
        )
        for role, policy in roles.items()
    }
    fastest = fastest_of(
        [policies[name] for name in comparison.survivors],
        timings,
        {name: prediction.speed for name, prediction in predictions.items()},
        bench.spread,
    )
    winner = next(c for c in candidates.values() if c.policy.id == fastest.id)
    base = next(c for c in candidates.values() if c.policy.id == incumbent.id)
    about = comparison, seconds, bench.unit, bench.gain
    return Raced(tuple(candidates.values()), winner, base, *about)


def confirm_winner(
    bench: Bench,
    raced: Raced,
    options: ProveOptions,
    *,
    passes: int = PASSES,
    progress: Progress = silent,
) -> tuple[Confirmation | None, ComparedTexts]:
    """The race's winner and the incumbent alone, on the part that nothing was fitted to or chosen
    by, in at most what the race left of the budget; and all texts compared. The power is told
    beforehand. None where the incumbent won."""
    names = winner, incumbent = raced.winner.policy.id, raced.incumbent.policy.id
    if winner == incumbent:
        return None, raced.race.texts
    timings, units, budget_s = raced.race.timings, bench.units("confirm"), options.budget_s
    groups = bench.groups("confirm")
    # A cost need not be seconds; what a unit takes is in proportion to it.
    pace = raced.seconds / sum(float(np.nansum(of)) for of in timings.seconds.values())
    both_s = pace * sum(float(np.nanmean(timings.seconds[name])) for name in names)
    spread = spread_of(timings, winner, incumbent) or Spread()
    most = planned(units, both_s, left_s(budget_s, raced.seconds), passes)
    executions = min(most, max(units, spread.enough(len(np.unique(groups)), most)))
    used = min(units, executions)
    independent = len(np.unique(groups[:used]))
    unit = "conversations" if independent < used else bench.unit
    time_s = {"seconds": both_s, "budget_s": budget_s}
    power = power_in_words(
        spread, independent, executions, unit=unit, most=units * passes, **time_s
    )
    name, rare = short_name(raced.winner.policy), missed_in_words(independent, unit)
    options.tell(f"confirming {name} on {used} {bench.unit}: {power}; {rare}")
    policies, expected = [raced.winner.policy, raced.incumbent.policy], {}
    for policy in policies:
        try:
            expected[policy.id] = bench.predict(policy, "confirm").costs
        except (PolicyError, TraceError):
            continue  # then nothing is projected
    with bench.execute(policies, "confirm") as execution:
        confirmation = confirm(
            *names,
            execution,
            units=units,
            executions=executions,
            expected=expected,
            by_size=bench.by_size,
            groups=groups,
            unit=bench.unit,
            chance=spread.chance(independent, executions),
            progress=lambda done, total: progress("confirm", done, total),
        )
        return confirmation, raced.race.texts + execution.texts


class Decision(NamedTuple):
    """What is to be in force, why, and whether it takes the place of what is."""

    candidate: Candidate
    reason: str
    replaces: bool


def decide(raced: Raced, confirmed: Confirmation | None, stays: str) -> Decision:
    """The winner, where it is confirmed to be faster than the incumbent; else what the deployment
    does ``stays`` (in words), also where that is not published."""
    winner, incumbent = raced.winner, raced.incumbent
    if confirmed is None:
        return Decision(incumbent, f"{raced.unproved}; {stays}", False)
    names = short_name(winner.policy), short_name(incumbent.policy)
    reason = confirmed_in_words(confirmed, *names, raced.gain)
    if confirmed.against:
        return Decision(incumbent, f"{reason}; {stays}", False)
    return Decision(winner, reason, True)


def tune(
    store: TraceStore,
    bench: Tunable,
    place: Place,
    options: ProveOptions,
    *,
    progress: Progress = silent,
) -> Tuned:
    """Tunes on the texts of a bench, for a place: proposes, races, confirms, decides, publishes,
    and stores what the page of the study shows.

    The winner is published only if it beats what the deployment does (``place``) beyond noise on
    requests that neither search nor race has used. What came into force after ``place`` was read is
    never replaced: it was not compared. Raises PolicyError or TraceError when nothing can be
    searched, raced or confirmed, what the bench raises, and what ``options.guard`` raises.
    """
    texts = bench.texts
    of = texts.conversations
    check_sample_size(texts.categories, publish=options.publish, parts=texts.parts, of=of)
    workload = checked(texts.trajectories)
    for line in workload.lines():
        options.tell(line)
    first = texts.trajectories[0]
    line = other_sampling(place.over, first.sampling, first.verifier)
    if line and options.publish:
        options.tell(f"warning: {line}")
    incumbent, unusable = incumbent_of(place, bench)
    proposals = bench.propose(incumbent)
    # What cannot be started after all is found at once.
    roles = {"incumbent": incumbent}
    roles |= {f"finalist {n}": policy for n, policy in enumerate(proposals.finalists, 1)}
    roles |= proposals.baselines
    bench.probe()
    with bench.timed("execute"):
        raced = run_race(bench, roles, incumbent, options, progress=progress)
    bench.probe()
    pace = pace_of_race(bench.probes)
    with bench.timed("confirm"):
        confirmed, compared = confirm_winner(bench, raced, options, progress=progress)
    bench.probe()
    texts, earlier = bench.texts, 0
    if confirmed is not None:
        held = [texts.ordinals[text] for text in texts.parts.confirm]
        earlier = count_confirmation(store, texts.recording.id, held)
    put_executions(store, texts, raced.candidates, proposals.study)
    with bench.timed("execute"):
        beside = bench.beside(raced, options.budget_s, progress)
    raced = at_pace(raced, pace)
    decision = decide(raced, confirmed, place.stays(unusable))
    said = unusable, place.reference(unusable), bench.doubts, decision.reason
    tuned = Tuned.of(
        decision.candidate,
        raced.candidates,
        confirmed,
        reason="; ".join(filter(None, said)),
        common_factor=common_factor(raced.race.timings) * pace,
        probes_s=tuple(bench.probes),
        unit=raced.unit,
        gain=raced.gain,
        recording=texts.recording.id,
        profile=bench.profile_id,
        study=proposals.study,
        texts=compared,
        search_requests=len(texts.parts.search),
        trials=proposals.trials,
        seconds=bench.seconds,
        workload=workload,
        earlier_confirmations=earlier,
        **beside,
    )
    published = None
    if decision.replaces and options.publish:
        tuned, published = publish(store, tuned, texts, place, options)
    about = {"deployment": place.deployment, "sampling": sampling_in_words(first.sampling)}
    head = {**bench.head(), "device": place.device, **about}
    rounds = bench.rounds(decision.candidate)
    put_evidence(store, texts.recording.pair_id, tuned, raced.candidates, rounds, head)
    if published is not None:
        bench.put_in_force(published, options.tell)
    return tuned


def put_executions(
    store: TraceStore, texts: RecordedTexts, candidates: Sequence[Candidate], study: str
) -> None:
    """Stores the policies of a race, and what of each was executed, as a run of the study."""
    info = texts.recording
    device, dtype = (str(info.options.get(name, "")) for name in ("device", "dtype"))
    for one in {c.policy.id: c for c in candidates}.values():
        store.put_policy(one.policy.id, one.policy.spelled_out(), one.policy.label())
        store.put_run(
            info.pair_id,
            one.policy.id,
            one.executed,
            device=device,
            dtype=dtype,
            workload_id=info.workload_id,
            purpose=f"tune {study}",
        )


def pace_of_race(probes: Sequence[float]) -> float:
    """How many times as long work took beside the race (the last two probes) as it did beside the
    profile (the first); 1 where that is not known."""
    if len(probes) < 3:
        return 1.0
    return (probes[-1] + probes[-2]) / 2 / probes[0]


def at_pace(raced: Raced, pace: float) -> Raced:
    """The candidates with their predictions as seconds of the machine of the race. Ratios, by which
    policies were chosen, are the same."""

    def scaled(candidate: Candidate) -> Candidate:
        predicted = candidate.predicted
        return replace(candidate, predicted=predicted and predicted.scaled(pace))

    candidates = tuple(map(scaled, raced.candidates))
    return replace(
        raced,
        candidates=candidates,
        winner=scaled(raced.winner),
        incumbent=scaled(raced.incumbent),
    )


def incumbent_of(place: Place, bench: Tunable) -> tuple[Policy, str]:
    """What there is to beat, and why what is published is not that; empty where it is, or where
    nothing is published."""
    serves, over = place.serves or AUTOREGRESSIVE, place.over
    if over is None:
        return serves, ""
    try:
        policy = published_policy(over)
        bench.check(policy)
    except PolicyError as error:
        why = str(error).removeprefix(f"publication {over.version}: ")
        return serves, f"publication {over.version} cannot run ({why}), so {place.otherwise}"
    return policy, ""


def publish(
    store: TraceStore, tuned: Tuned, texts: RecordedTexts, place: Place, options: ProveOptions
) -> tuple[Tuned, Publication | None]:
    """The results with the publication of their winner, once per idempotency key, with its evidence
    and the sampling that it was tuned for; or with why it was not published, and None."""
    policy, pair_id = tuned.winner.policy, texts.recording.pair_id
    if refused := refusal(place.deployment, policy):
        return tuned.model_copy(update={"blocked": refused}), None
    try:
        published = store.publish(
            pair_id,
            place.device,
            policy.id,
            deployment=place.deployment,
            expected=place.over.version if place.over else 0,
            actor=options.actor,
            sampling=sampling_of(texts.trajectories),
            evidence=tuned.to_json(),
            reason=tuned.reason,
            idempotency_key=options.idempotency_key,
            guard=options.guard,
        )
    except StaleVersionError:
        version = store.active_version(pair_id, place.device, place.deployment) or 0
        blocked = (
            f"version {version} came into force meanwhile and was not compared, so it stays; "
            f"`tune --recording {tuned.recording}` compares with it"
        )
        return tuned.model_copy(update={"blocked": blocked}), None
    named = PublishedAs(**published.told())
    return tuned.model_copy(update={"published": named}), published
