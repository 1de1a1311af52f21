"""Searching policies on a recorded trace: enumerate what is small, give Optuna the rest.

Every trial is a replay, so nothing is pruned or extrapolated. Fixed windows, state machines,
schedules and trees are enumerated, and the papers' shortlists on the best of these; the joint space
of draft, window, growth, stop, selection, bins, shortlist and their parameters goes to a TPE study
in memory, seeded with the incumbents and with the best that was enumerated. Within a tie the
simpler policy wins.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import optuna

from spectune.optimizer.simulate.replay import could_reach, run_replay
from spectune.optimizer.simulate.replay_trace import Replay, ReplayTrace, together
from spectune.optimizer.spaces import (
    ALL_KINDS,
    GROWTH_ORDER,
    PASSES,
    SHARES,
    SHORTLIST_ORDER,
    STOP_ORDER,
    WINDOW_ORDER,
    Kinds,
    ShortlistLimit,
    Space,
    TreeLimit,
    enumerated,
    enumerated_trees,
    with_shortlist,
)
from spectune.optimizer.timings import TIE
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import Policy, PromptPolicy
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.tables import LatencyProfile

PREDICTION_ERROR = 0.06
"""Relative difference in predicted tokens/s below which execution has to tell which policy is
faster."""
RULED_OUT = 0.15
"""Relative difference in predicted tokens/s beyond which another draft is taken to be slower."""
LEAST_SHARE = 0.05
"""Part of a round's time that no saving on the draft's passes takes away."""
SHORTLISTED = 3
"""Chains, and trees, of each draft that the papers' shortlists are tried with, each of another
family."""


@dataclass(frozen=True)
class Trial:
    """One policy tried: its predicted tokens/s on the search split, what proposed it, and the
    passes of its draft in a predicted second. ``did`` is a digest of the counts of every request:
    equal where two policies did the same; empty: not known."""

    policy: Policy
    value: float
    origin: str
    passes_per_s: float = 0.0
    did: bytes = b""

    def reach(self, saved_s: float) -> float:
        """Its tokens/s if every pass of its draft took ``saved_s`` seconds less."""
        return self.value / max(LEAST_SHARE, 1.0 - saved_s * self.passes_per_s)

    def same(self, other: Trial) -> bool:
        """Whether both did the same on every request, at speeds that are predicted within a tie."""
        tied = min(self.value, other.value) >= max(self.value, other.value) * (1 - TIE)
        return self.did == other.did != b"" and tied

    def to_json(self) -> dict[str, Any]:
        policy = {"policy": self.policy.spelled_out(), "id": self.policy.id}
        return {**policy, "value": self.value, "origin": self.origin}


@dataclass(frozen=True)
class Study:
    """What a search tried, best first, and how to repeat it. ``bounds``: :func:`shortlist_bounds`
    of what was tried without shortlists, and ``shortlists``, by draft, the kinds that were
    searched. ``beyond``: what lacks distributions that were not recorded, and could not win if they
    were read, by what it could reach, best first."""

    trials: tuple[Trial, ...]
    seed: int
    sampler: str
    requests: tuple[str, ...] = field(default=())
    bounds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    shortlists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    beyond: tuple[Trial, ...] = ()

    def best(self, match: Callable[[Policy], bool] = lambda policy: True) -> Trial | None:
        """The fastest trial whose policy matches; ties within 1% go to the simpler."""
        fitting = [t for t in self.trials if match(t.policy)]
        if not fitting:
            return None
        least = max(t.value for t in fitting) * (1 - TIE)
        return min((t for t in fitting if t.value >= least), key=_simplest_first)

    def distinct(self) -> list[Trial]:
        """The trials worth telling apart, fastest first: of those that did the same on every
        request, the simplest, and a more elaborate one only where it is predicted to be faster by
        more than a tie (its passes cost less)."""
        kept: dict[object, list[Trial]] = {}
        for trial in sorted(self.trials, key=_simplest_first):
            simpler = kept.setdefault(trial.did or trial.policy.id, [])
            if not any(trial.same(t) or t.value >= trial.value for t in simpler):
                simpler.append(trial)
        return _fastest_first(t for group in kept.values() for t in group)

    def same(self, one: Policy, other: Policy) -> bool:
        """Whether two policies did the same (:meth:`Trial.same`), as far as they were tried."""
        found = {t.policy.id: t for t in self.trials if t.policy.id in (one.id, other.id)}
        return len(found) == 2 and found[one.id].same(found[other.id])

    def left_out(self, most: int = 8) -> dict[str, Any]:
        """How many policies read more than was recorded, and the ``most`` promising of them.
        JSON-ready."""
        best = (
            {"id": t.policy.id, "label": t.policy.label(), "value": t.value} for t in self.beyond
        )
        return {"policies": len(self.beyond), "best": list(islice(best, most))}

    def on_shortlists(self) -> dict[str, Any]:
        """By draft the kinds of shortlists that were searched, and why no others: what each kind of
        pass could gain at most over the fastest policy without a shortlist. JSON-ready."""
        searched = {draft: list(kinds) for draft, kinds in self.shortlists.items()}
        bounds = {
            d: {kind: round(b - 1.0, 4) for kind, b in found.items()}
            for d, found in self.bounds.items()
        }
        return {"searched": searched, "most_gained": bounds, "least_worth": TIE}


def complexity(policy: Policy) -> tuple[int, int, int, int, int]:
    """Orders policies from simple to elaborate: no speculation, chains before trees, whole heads
    before shortlists, then by the kinds of window and stop, then the shorter window. Choices by
    prompt come last."""
    if isinstance(policy, PromptPolicy):
        return 1 + 2 * len(GROWTH_ORDER), 0, 0, 0, 0
    growth = GROWTH_ORDER.index(policy.growth.kind) + len(GROWTH_ORDER) * int(
        policy.stratify is not None
    )
    return (
        int(policy.speculates) + growth,
        SHORTLIST_ORDER.index(policy.shortlist.kind),
        (*WINDOW_ORDER, "by_batch").index(policy.window.kind),
        STOP_ORDER.index(policy.stop.kind),
        policy.gamma_max,
    )


def _simplest_first(trial: Trial) -> tuple[tuple[int, ...], float]:
    return complexity(trial.policy), -trial.value


def _fastest_first(trials: Iterable[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda t: -t.value)


def shortlist_bounds(
    trials: Iterable[Trial], profile: LatencyProfile
) -> dict[str, dict[str, float]]:
    """By draft and kind of pass (``fixed``, ``routed``) the speed that shortlists could reach over
    the fastest trial without any, if every pass took what the smallest measured size takes and no
    less were accepted than with the whole head.

    A shortlist may also keep a wrong proposal out, so this is an estimate, and seldom a low one.
    Drafts of which no shortlist was measured, or nothing was tried, are left out.
    """
    plain = [t for t in trials if not t.policy.shortlisted]
    fastest = max((t.value for t in plain), default=0.0)
    found: dict[str, dict[str, float]] = {}
    for draft in profile.drafts:
        own = [t for t in plain if t.policy.draft == draft]
        if own and fastest > 0 and profile.shortlist_sizes(draft, routed=True):
            saved = {kind: saved_s(profile, draft, kind) for kind in ("fixed", "routed")}
            found[draft] = {
                kind: max(t.reach(s) for t in own) / fastest for kind, s in saved.items()
            }
    return found


def saved_s(profile: LatencyProfile, draft: str, kind: str) -> float:
    """Seconds that a pass over a shortlist of the smallest measured size saves, at least 0. (The
    least of many noisy costs would say more than there is.)"""
    routed = kind == "routed"
    smallest = profile.shortlist_sizes(draft, routed=routed)[0]
    return max(0.0, -float(profile.shortlist_seconds(draft, smallest, routed=routed)))


def worth_trying(bounds: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[str, ...]]:
    """By draft the kinds of passes whose shortlists could win, that is gain more than a tie; drafts
    without any are left out."""
    kept = {
        draft: tuple(kind for kind, bound in found.items() if bound > 1.0 + TIE)
        for draft, found in bounds.items()
    }
    return {draft: kinds for draft, kinds in kept.items() if kinds}


def enumerated_shortlists(
    trials: Iterable[Trial], shortlists: Mapping[str, ShortlistLimit], profile: LatencyProfile
) -> list[Policy]:
    """The papers' shortlists (a quarter of the vocabulary down to a 32nd) on the best chains and
    trees of each draft: those that would be fastest if passes took what the smallest shortlist
    takes."""
    policies: list[Policy] = []
    plain = [t for t in trials if t.policy.speculates and not t.policy.shortlisted]
    for draft, limit in shortlists.items():
        saved = max(saved_s(profile, draft, PASSES[kind]) for kind in limit.kinds)
        own = sorted((t for t in plain if t.policy.draft == draft), key=lambda t: -t.reach(saved))
        for tree in (False, True):
            best: dict[tuple[str, ...], Policy] = {}
            for trial in own:
                if trial.policy.is_tree == tree:
                    best.setdefault(_family(trial.policy), trial.policy)
            policies += [
                with_shortlist(policy, block)
                for policy in islice(best.values(), SHORTLISTED)
                for share in SHARES
                for block in limit.papers(share)
            ]
    return list({p.id: p for p in policies}.values())


def search(
    trace: ReplayTrace,
    profile: LatencyProfile,
    drafts: Sequence[str],
    *,
    gamma_max: int = 16,
    trials: int = 400,
    seed: int = 0,
    incumbents: Iterable[Policy] = (),
    progress: Callable[[int, int, float], None] = lambda done, total, best: None,
    trees: Mapping[str, TreeLimit] | None = None,
    shortlists: Mapping[str, ShortlistLimit] | None = None,
    artifacts: Artifacts | None = None,
    known: Study | None = None,
    kinds: Kinds = ALL_KINDS,
    bounded: bool = True,
) -> Study:
    """Searches the joint space on a trace; ``gamma_max`` is the largest window tried (the
    panorama's, for policies with stops).
    ``trees`` and ``shortlists`` say of each draft what may be tried (none by default). A shortlist
    is judged on each fold of its limit by what was fitted without it. Shortlists that could not win
    by :func:`shortlist_bounds` are left out, unless ``bounded`` is false. ``known``: what was tried
    on this trace and profile before; it is not tried again. ``kinds`` leaves other policies out,
    incumbents and known ones excepted.

    ``progress`` is called with (trials done, in all, best tokens/s). The result is a function of
    the arguments alone.
    """
    trees, shortlists, known = trees or {}, shortlists or {}, known or Study((), seed, "")
    done, missed = ({t.policy.id: t for t in found} for found in (known.trials, known.beyond))
    judge = _Judge(trace, profile, shortlists, artifacts, done, missed)
    for policy in incumbents:
        # Its draft or artifact may be gone, or its trees not recorded.
        with suppress(PolicyError, TraceError):
            judge.value(policy, "incumbent")
    small = [p for p in (*enumerated(drafts, gamma_max), *enumerated_trees(trees)) if kinds.hold(p)]
    for i, policy in enumerate(small):
        judge.value(policy, "enumerated")
        progress(i + 1, len(small) + trials, judge.best)
    bounds = shortlist_bounds(judge.done.values(), profile)
    worth: Mapping[str, Iterable[str]] = worth_trying(bounds) if bounded else bounds
    possible = {draft: limit.only(worth.get(draft, ())) for draft, limit in shortlists.items()}
    possible = {d: one for d, one in possible.items() if set(one.kinds) & set(kinds.shortlists)}
    short = enumerated_shortlists(judge.done.values(), possible, profile)
    short = [p for p in short if kinds.hold(p)]
    tried, total = len(small) + len(short), len(small) + len(short) + trials
    for i, policy in enumerate(short):
        judge.value(policy, "enumerated")
        progress(len(small) + i + 1, total, judge.best)
    space = Space(tuple(drafts), gamma_max, kinds, trees, possible)
    study = _seeded_study(space, judge.ranked(), trials, seed)
    for i in range(trials):
        asked = study.ask()
        policy = space.suggest(asked)
        value = judge.value(policy, "optuna") if kinds.hold(policy) else None
        study.tell(asked, value, optuna.trial.TrialState.PRUNED if value is None else None)
        progress(tried + i + 1, total, judge.best)
    return Study(
        tuple(judge.ranked()),
        seed,
        "enumeration + TPE (multivariate, group)",
        trace.request_ids,
        bounds,
        {draft: limit.kinds for draft, limit in possible.items()},
        tuple(_fastest_first(judge.beyond.values())),
    )


@dataclass
class _Judge:
    """Replays each policy once. ``done`` are the trials by policy id, ``beyond`` those that lack
    distributions and could not win with them."""

    trace: ReplayTrace
    profile: LatencyProfile
    shortlists: Mapping[str, ShortlistLimit]
    artifacts: Artifacts | None
    done: dict[str, Trial]
    beyond: dict[str, Trial] = field(default_factory=dict)
    best: float = 0.0

    def __post_init__(self) -> None:
        self.best = max((t.value for t in self.done.values()), default=0.0)

    def ranked(self) -> list[Trial]:
        """Fastest first."""
        return _fastest_first(self.done.values())

    def value(self, policy: Policy, origin: str) -> float | None:
        """Predicted tokens/s; None for a policy beyond the recording."""
        key = policy.id
        if key not in self.done and key not in self.beyond:
            replayed = self._replayed(policy)
            total = replayed.total
            passes_per_s = total.draft_steps / total.seconds if total.seconds > 0 else 0.0
            did = hashlib.blake2b(replayed.counts.tobytes(), digest_size=16).digest()
            trial = Trial(policy, total.tokens_per_s, origin, passes_per_s, did)
            lacks = replayed.missing > 0 and not policy.shortlisted
            if lacks:
                trial = replace(trial, value=could_reach(replayed))
            (self.beyond if lacks else self.done)[key] = trial
            self.best = max(self.best, 0.0 if lacks else trial.value)
        return self.done[key].value if key in self.done else None

    def _replayed(self, policy: Policy) -> Replay:
        """A replay with what is recorded; where that lacks distributions and the policy could still
        win, they are read."""
        replayed = self._approximate(policy)
        if not replayed.missing or policy.shortlisted:
            return replayed
        if self.trace.reader is None or could_reach(replayed) < self.best * (1 - TIE):
            return replayed
        return run_replay(self.trace, policy, self.profile, artifacts=self.artifacts)

    def _approximate(self, policy: Policy) -> Replay:
        replays = []
        for part, judged in _parts(self.trace, policy, self.shortlists.get(policy.draft)):
            made = run_replay(
                part, judged, self.profile, artifacts=self.artifacts, approximate=True
            )
            replays.append((part.order, made))
        return together(policy, replays)


def _seeded_study(
    space: Space, ranked: Sequence[Trial], trials: int, seed: int
) -> optuna.study.Study:
    """A study that tries first what was fastest so far, the best of each paper's methods before the
    others; then as many at random (Optuna counts what is enqueued among its start-up trials); then
    what TPE suggests."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    few = max(10, trials // 10)
    first = {_method(t.policy): t for t in reversed(ranked)}
    for trial in dict.fromkeys([*sorted(first.values(), key=lambda t: -t.value), *ranked]):
        params = space.params(trial.policy) if space.kinds.hold(trial.policy) else None
        if params is not None:
            study.enqueue_trial(params, skip_if_exists=True)
        if len(study.trials) >= few:
            break
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # `group` is one
        study.sampler = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, n_startup_trials=len(study.trials) + few
        )
    return study


def _method(policy: Policy) -> tuple[str, ...]:
    """What a policy has of the papers': window, growth, bins, shortlist."""
    bins = str(policy.stratify is not None)
    return policy.window.kind, policy.growth.kind, bins, policy.shortlist.kind


def _parts(
    trace: ReplayTrace, policy: Policy, limit: ShortlistLimit | None
) -> list[tuple[ReplayTrace, Policy]]:
    """What a policy is judged on: the trace, or with a shortlist of ``limit`` each of its folds and
    what is in none."""
    folds = [] if limit is None else limit.judged(policy)
    if not folds:
        return [(trace, policy)]
    found, rest = [], set(trace.order.tolist())
    for requests, judged in folds:
        mine = [r for r in trace.order.tolist() if trace.trajectories[r].request_id in requests]
        rest -= set(mine)
        found.append((trace.select(mine), judged))
    if rest:
        found.append((trace.select([r for r in trace.order.tolist() if r in rest]), policy))
    return [(part, judged) for part, judged in found if len(part.order)]


def finalists(study: Study, count: int = 4) -> list[Trial]:
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


def rivals(study: Study, chosen: Iterable[Policy], count: int = 3) -> list[Trial]:
    """Fixed windows that prediction cannot tell from the best of them, fastest first, beside those
    that are chosen already."""
    fixed = [t for t in study.distinct() if is_fixed(t.policy)]
    have = {p.id for p in chosen}
    close = [t for t in fixed if t.value >= fixed[0].value * (1 - PREDICTION_ERROR)]
    return [t for t in close if t.policy.id not in have][:count]


def is_fixed(policy: Policy) -> bool:
    """Whether a policy drafts a fixed window with the whole output head, and nothing stops it."""
    plain = policy.stop.kind == "none" and not policy.shortlisted
    return policy.speculates and policy.window.kind == "fixed" and plain


def _family(policy: Policy) -> tuple[str, ...]:
    return policy.draft, policy.stop.kind, *_method(policy)


def _drafting(policy: Policy) -> tuple[str, ...]:
    """What a policy drafts from and how its trees grow. Windows and stops beside that differ by
    less than prediction errs."""
    _, *drafting = _method(policy)
    return policy.draft, *drafting
