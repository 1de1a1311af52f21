"""Searching policies on a recorded trace.

A screen of baselines and of the papers' own settings is tried first, then what Optuna's TPE
suggests. Each draft takes turns with chains, with trees and with trees in entropy bins, as far as
it has them, each in a study of its own: a race and a choice by prompt need the best policy of every
draft, and no form is given up after a few trials. Every trial is a replay. Within a tie the simpler
policy wins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import optuna

from spectune.optimizer.replay.fast_replay import could_reach, run_replay, shortlist_could_reach
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.spaces import Space, complexity
from spectune.optimizer.tuning.timings import TIE
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.tables import LatencyProfile

PREDICTION_ERROR = 0.06
"""Relative difference in predicted tokens/s below which execution has to tell which policy is
faster."""
RULED_OUT = 0.15
"""Relative difference in predicted tokens/s beyond which another draft is taken to be slower."""
RETRIES = 3
"""Suggestions beyond the first that a trial may take to be a new policy."""


@dataclass(frozen=True)
class Trial:
    """One policy tried: its predicted tokens/s on the search part, and where it comes from
    (``incumbent``, ``screen``, ``optuna``). ``digest`` is of the counts of every request: equal
    where two policies behaved alike; empty: unknown."""

    policy: Policy
    value: float
    origin: str
    digest: bytes = b""

    def behaves_like(self, other: Trial) -> bool:
        """Whether both did the same on every request, at speeds that are predicted within a tie."""
        tied = min(self.value, other.value) >= max(self.value, other.value) * (1 - TIE)
        return self.digest == other.digest != b"" and tied

    def to_json(self) -> dict[str, Any]:
        policy = {"policy": self.policy.spelled_out(), "id": self.policy.id}
        return {**policy, "value": self.value, "origin": self.origin}


@dataclass(frozen=True)
class SearchStudy:
    """What a search tried, fastest first."""

    trials: tuple[Trial, ...]
    seed: int
    sampler: str
    requests: tuple[str, ...] = ()

    def best(self, match: Callable[[Policy], bool] = lambda policy: True) -> Trial | None:
        """The fastest trial whose policy matches; ties within 1% go to the simpler."""
        trials = [t for t in self.trials if match(t.policy)]
        least = max((t.value for t in trials), default=0.0) * (1 - TIE)
        return min((t for t in trials if t.value >= least), key=_simplest_first, default=None)

    def best_of_drafts(self) -> list[Policy]:
        """The best policy of each draft (:meth:`best`), fastest first."""
        drafts: dict[str, list[Trial]] = {}
        for trial in self.trials:
            drafts.setdefault(trial.policy.draft, []).append(trial)
        best = (replace(self, trials=tuple(trials)).best() for trials in drafts.values())
        return [trial.policy for trial in best if trial is not None]

    def distinct(self) -> list[Trial]:
        """The trials worth telling apart, fastest first: of those that behave alike the simplest,
        and a more elaborate one only where it is predicted to be faster by more than a tie (its
        passes cost less)."""
        alike: dict[object, list[Trial]] = {}
        for trial in sorted(self.trials, key=_simplest_first):
            simpler = alike.setdefault(trial.digest or trial.policy.id, [])
            if not any(trial.behaves_like(t) or t.value >= trial.value for t in simpler):
                simpler.append(trial)
        return _fastest_first(t for group in alike.values() for t in group)

    def same(self, one: Policy, other: Policy) -> bool:
        """Whether two policies behave alike (:meth:`Trial.behaves_like`), if both were tried."""
        trials = {t.policy.id: t for t in self.trials if t.policy.id in (one.id, other.id)}
        return len(trials) == 2 and trials[one.id].behaves_like(trials[other.id])


def search(
    trace: ReplayTrace,
    profile: LatencyProfile,
    space: Space,
    *,
    trials: int = 400,
    seed: int = 0,
    incumbents: Iterable[Policy] = (),
    earlier: SearchStudy | None = None,
    artifacts: Artifacts | None = None,
    progress: Callable[[int, int, float], None] = lambda trial, trials, best: None,
) -> SearchStudy:
    """Searches a space on a trace.

    ``earlier`` is a study of this trace and profile that goes on: nothing in it is tried again.
    ``progress`` is called with (trials done, in all, best tokens/s). The result is a function of
    the arguments alone.
    """
    tried = {t.policy.id: t for t in (earlier.trials if earlier else ())}
    beyond = set[str]()

    def value_of(policy: Policy, origin: str) -> float | None:
        """Predicted tokens/s; None for a policy that lacks distributions and could not win with
        them. Where it could, they are read, and a shortlist recorded."""
        if policy.id in beyond:
            return None
        if policy.id not in tried:
            best = max((t.value for t in tried.values()), default=0.0)
            if trace.on_demand is not None and trace.lacks_shortlist(policy):
                with suppress(TraceError):  # its trees may be beyond the recording
                    if shortlist_could_reach(trace, policy, profile, artifacts) < best * (1 - TIE):
                        beyond.add(policy.id)
                        return None
            replay = run_replay(trace, policy, profile, artifacts=artifacts, approximate=True)
            if replay.missing:
                could_win = trace.reader is not None and could_reach(replay) >= best * (1 - TIE)
                # Of a shortlist it means that so many were recorded that no other is.
                if policy.shortlisted or not could_win:
                    beyond.add(policy.id)
                    return None
                replay = run_replay(trace, policy, profile, artifacts=artifacts)
            digest = hashlib.blake2b(replay.counts.tobytes(), digest_size=16).digest()
            tried[policy.id] = Trial(policy, replay.total.tokens_per_s, origin, digest)
        return tried[policy.id].value

    for policy in incumbents:
        with suppress(PolicyError, TraceError):  # its draft or artifact may be gone
            value_of(policy, "incumbent")
    for policy in space.screen():
        value_of(policy, "screen")
    turns, studies = space.turns(), _studies(space, trials, seed)
    for n in range(trials):
        turn = turns[n % len(turns)]
        for _ in range(1 + RETRIES):
            trial, before = studies[turn].ask(), len(tried) + len(beyond)
            value = value_of(space.suggest(trial, *turn), "optuna")
            pruned = optuna.trial.TrialState.PRUNED if value is None else None
            studies[turn].tell(trial, value, pruned)
            if len(tried) + len(beyond) > before:
                break
        progress(n + 1, trials, max(t.value for t in tried.values()))
    order = tuple(_fastest_first(tried.values()))
    return SearchStudy(order, seed, "TPE by draft and form", trace.request_ids)


def _studies(space: Space, trials: int, seed: int) -> dict[tuple[str, str], optuna.study.Study]:
    """A study of each draft in each form, which begins with a tenth of its trials at random."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    turns = space.turns()
    startup = max(5, trials // (10 * len(turns)))
    return {
        turn: optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(
                seed=seed * len(turns) + n, n_startup_trials=startup
            ),
        )
        for n, turn in enumerate(turns)
    }


def finalists(study: SearchStudy, count: int = 4) -> list[Trial]:
    """The policies worth executing, ``count`` of them: the tie-broken best, then the best that
    draft in another way and that prediction cannot rule out (:data:`RULED_OUT`), then the best of
    other windows and stops, fastest first. Beyond ``count``, the best of every draft that it cannot
    rule out."""
    first = study.best()
    if first is None:
        return []
    trials = [t for t in study.distinct() if t.policy.speculates]
    close = [t for t in trials if t.value >= (1 - RULED_OUT) * study.trials[0].value]
    chosen = [first]
    for among, kind, most in (
        (close, _drafting, count),
        (trials, _family, count),
        (close, lambda policy: policy.draft, len(trials)),
    ):
        seen = {kind(t.policy) for t in chosen}
        for trial in among:
            if len(chosen) < most and kind(trial.policy) not in seen:
                seen.add(kind(trial.policy))
                chosen.append(trial)
    return chosen


def rivals(study: SearchStudy, chosen: Iterable[Policy], count: int = 3) -> list[Trial]:
    """Fixed windows that prediction cannot tell from the best of them, fastest first, beside those
    that are chosen already."""
    fixed = [t for t in study.distinct() if is_fixed(t.policy)]
    chosen_ids = {p.id for p in chosen}
    close = [t for t in fixed if t.value >= fixed[0].value * (1 - PREDICTION_ERROR)]
    return [t for t in close if t.policy.id not in chosen_ids][:count]


def is_fixed(policy: Policy) -> bool:
    """Whether a policy drafts a fixed window with the whole output head, and nothing stops it."""
    plain = policy.stop.kind == "none" and not policy.shortlisted
    return policy.speculates and policy.window.kind == "fixed" and plain


def _drafting(policy: Policy) -> tuple[str, ...]:
    """What a policy drafts from and how its trees grow. Windows and stops beside that differ by
    less than prediction errs."""
    bins = str(policy.stratify is not None)
    return policy.draft, policy.growth.kind, bins, policy.shortlist.kind


def _family(policy: Policy) -> tuple[str, ...]:
    return *_drafting(policy), policy.window.kind, policy.stop.kind


def _simplest_first(trial: Trial) -> tuple[tuple[int, ...], float]:
    return complexity(trial.policy), -trial.value


def _fastest_first(trials: Iterable[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda t: -t.value)
