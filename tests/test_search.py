"""Search, split and verdict on traces whose best policy is known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import optuna
import pytest
from synthetic import chain_panorama, flat_profile

from spectune.optimizer.deployment import Place
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.search import (
    TIE,
    SearchStudy,
    Trial,
    finalists,
    search,
)
from spectune.optimizer.spaces import GROUPS, DraftLimits, Space, complexity, kind_of
from spectune.optimizer.tuning.confirmation import Confirmation
from spectune.optimizer.tuning.parts import mixed, split
from spectune.optimizer.tuning.pipeline import Raced, decide
from spectune.optimizer.tuning.race import Comparison
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.optimizer.tuning.timings import Timings
from spectune.optimizer.tuning.tuned import AS_FAST, Candidate
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.schema import Outcome, Sampling, Tokens
from spectune.traces.tables import Publication, Trajectory

GAMMA_MAX = 8


def trace(acceptance: float) -> ReplayTrace:
    """Texts whose draft ``near`` agrees independently with the given probability at every
    position."""
    rng, length = np.random.default_rng(0), 80
    ids, prompt = np.arange(length, dtype=np.int32) + 100, np.arange(20, dtype=np.int32)
    trajectories, panoramas = [], []
    for i in range(12):
        agree = rng.random(length) < acceptance
        branches = int((~agree).sum()) + 1
        trajectories.append(
            Trajectory(str(i), "abc"[i % 3], Tokens(prompt, ids), Sampling(), length, "length")
        )
        logp = np.where(agree, rng.integers(0, 200, length), rng.integers(100, 900, length))
        codes = logp[:, None].repeat(2, 1)
        off_text = rng.integers(100, 900, (branches, GAMMA_MAX - 1, 2))
        ends = np.full(branches, GAMMA_MAX - 1)
        panoramas.append(chain_panorama("near", GAMMA_MAX, agree, codes, off_text, ends))
    return ReplayTrace(trajectories, {"near": panoramas})


def near(window: str, gamma: int | None = None, draft: str = "near", **blocks: object) -> Policy:
    """A policy by the kind of its window."""
    size = {} if gamma is None else {"gamma" if window == "fixed" else "gamma_max": gamma}
    return parse_policy({"draft": draft, "window": {"kind": window, **size}, **blocks})


PROFILE = flat_profile("p", ["near"])


def searched(acceptance: float, **how: Any) -> SearchStudy:
    return search(trace(acceptance), PROFILE, Space(("near",), GAMMA_MAX), **how)


@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.9])
def test_a_search_tries_every_baseline_and_goes_on_from_there(acceptance: float) -> None:
    """Values are the replay's own, and the best is as good as every baseline but for the tie it
    allows itself. The same arguments give the same study; one that goes on tries nothing twice."""
    recorded, study = trace(acceptance), searched(acceptance, trials=30, seed=1)
    best, values = study.best(), {t.policy.id: t.value for t in study.trials}
    assert len(values) == len(study.trials)
    for policy in Space(("near",), GAMMA_MAX).screen():
        value = run_replay(recorded, policy, PROFILE).total.tokens_per_s
        assert values[policy.id] == pytest.approx(value)
        assert value <= best.value / (1 - TIE) + 1e-9
    if acceptance < 0.1:
        assert not best.policy.speculates
    else:
        assert best.value > values[AUTOREGRESSIVE.id]
    assert searched(acceptance, trials=30, seed=1) == study
    longer = searched(acceptance, trials=30, seed=2, earlier=study)
    assert {t.policy.id for t in longer.trials} > set(values)
    assert longer.trials[0].value >= study.trials[0].value


def test_ties_go_to_the_simpler_and_finalists_differ() -> None:
    """Within 1% the simplest wins; each further finalist is of another family; incumbents are
    tried."""
    incumbent = near("fixed", 3, stop={"kind": "joint_prob"})
    by_load = parse_policy({"draft": "near", "window": {"kind": "by_load", "gamma": {"1": 3}}})
    study = searched(0.8, trials=20, incumbents=[incumbent, by_load])
    assert {incumbent.id, by_load.id} <= {t.policy.id for t in study.trials}
    best = study.best()
    for trial in study.trials:
        if trial.value >= max(t.value for t in study.trials) * (1 - TIE):
            assert complexity(best.policy) <= complexity(trial.policy)
    assert complexity(AUTOREGRESSIVE) < complexity(near("fixed", 4))
    assert complexity(near("fixed", 4)) < complexity(near("q_learning", 8))
    chosen = finalists(study, 5)
    families = [(t.policy.draft, t.policy.window.kind, t.policy.stop.kind) for t in chosen]
    assert len(set(families)) == len(families) == 5


def test_finalists_draft_differently_and_no_close_draft_is_left_out() -> None:
    """Windows of one draft do not crowd out another draft, unless it is predicted to be much
    slower."""
    trials = [
        Trial(near(window, draft=draft), value, "")
        for draft, window, value in (
            ("near", "fixed", 100.0), ("near", "fsm", 99.0), ("near", "cache_fsm", 98.0),
            ("far", "fixed", 90.0), ("far", "fsm", 89.0), ("ngram", "fixed", 60.0),
        )
    ]  # fmt: skip
    names = [t.policy.label() for t in finalists(SearchStudy(tuple(trials), 0, ""), 2)]
    assert names == [trials[0].policy.label(), trials[3].policy.label()]
    slow = [replace(t, value=80.0) if t.policy.draft == "far" else t for t in trials]
    assert [t.policy.draft for t in finalists(SearchStudy(tuple(slow), 0, ""), 1)] == ["near"]
    assert [t.policy.draft for t in finalists(SearchStudy(tuple(trials), 0, ""), 1)] == [
        "near",
        "far",
    ]


def test_split_is_stable_disjoint_and_by_category() -> None:
    """Every request is in one part; a prefix of the workload is split like the whole; small
    categories fill every part."""
    categories = ["a", "b", "c"] * 20
    parts = split(categories)
    assert sorted(n for part in parts for n in part) == list(range(60))
    for part, share in zip(parts, (4, 6, 4, 6), strict=True):
        assert Counter(categories[i] for i in part) == dict.fromkeys("abc", share)
    assert split(categories[:30]).confirm == [i for i in parts.confirm if i < 30]
    assert [len(part) for part in split([str(i // 2) for i in range(20)])] == [4, 6, 4, 6]
    assert split(["a"]) == ([], [0], [], [])


def test_the_beginning_of_a_part_has_every_category() -> None:
    """Also where the workload has one after the other."""
    categories = ["a"] * 20 + ["b"] * 10
    order = mixed(range(30), categories)
    assert sorted(order) == list(range(30))
    assert [sum(categories[i] == "b" for i in order[:n]) for n in (3, 6, 15)] == [1, 2, 5]


@pytest.mark.parametrize(
    ("low", "ratio", "requests", "why"),
    [
        (1.45, 1.5, 12, ""),
        (1.45, 1.5, 5, ""),
        (0.99, 1.3, 12, "not beyond noise"),
        (1.001, 1.005, 12, "1.01"),
        (1.4, 1.5, 4, "5 are needed"),
    ],
)
def test_only_a_confirmed_gain_takes_the_place_of_what_a_deployment_does(
    low: float, ratio: float, requests: int, why: str
) -> None:
    """Whatever the race said: beyond noise, worth having, and on enough requests."""
    challenger = near("fixed", 3)
    raced = raced_by(challenger, [0.5], challenger)
    confirmed = Confirmation.of(challenger.id, (ratio, low, ratio**2 / low), requests, 2)
    decision = decide(raced, confirmed, "what was stays")
    faster = f"was {ratio:.3f} times as fast as autoregressive (98% interval {low:.3f} to"
    assert faster in decision.reason
    assert f"on {requests} requests held out" in decision.reason
    if why:
        assert (decision.candidate, decision.replaces) == (raced.incumbent, False)
        assert why in decision.reason
        assert decision.reason.endswith("; what was stays")
    else:
        assert (decision.candidate, decision.replaces) == (raced.winner, True)


def raced_by(challenger: Policy, seconds: list[float], winner: Policy) -> Raced:
    """A race over four requests, of which the first were executed by a challenger, in so many
    seconds each, and by autoregression, the incumbent, in one."""
    outcome, number = Outcome("", "executed", ()), len(seconds)
    rows = {challenger.id: seconds, AUTOREGRESSIVE.id: [1.0] * number}
    of = {name: np.array([[*row, *[np.nan] * (4 - number)]]).T for name, row in rows.items()}
    made = [
        Candidate("", policy, None, outcome, (1.0, 0.0, 2.0), units=number)
        for policy in (challenger, AUTOREGRESSIVE)
    ]
    race = Comparison({}, ComparedTexts(0, 0, ""), Timings(of), tuple(rows))
    won = made[winner == AUTOREGRESSIVE]
    return Raced(tuple(made), won, made[1], race, 1.0, "requests", AS_FAST)


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        ([0.9], "was faster than the incumbent beyond noise on 1 request: raise --budget to tell"),
        ([0.9, 1.2, 0.8, 1.0], "beyond noise on 4 requests: give more requests to tell"),
        ([1.1, 1.2, 1.1, 1.2], "no executed policy was faster than the incumbent on 4 requests"),
    ],
)
def test_where_the_incumbent_wins_a_race_it_is_said_how_much_was_seen(
    seconds: list[float], why: str
) -> None:
    """That somebody was ahead of it is no contradiction then."""
    raced = raced_by(near("fixed", 3), seconds, AUTOREGRESSIVE)
    decision = decide(raced, None, "what was stays")
    assert (decision.candidate, decision.replaces) == (raced.incumbent, False)
    assert decision.reason.endswith(f"{why}; what was stays")


def test_what_stays_is_what_the_deployment_does() -> None:
    """An engine's servers draft as they were started; that is only compared with where it is
    known."""
    active = cast("Publication", SimpleNamespace(version=3))
    for place, unusable, stays, compared in (
        (Place("cpu", "default", active), "", "the incumbent stays", ""),
        (Place("cpu", "default", active), "cannot run", "decoding without a draft stays", ""),
        (Place("cpu", "default", None), "", "decoding without a draft stays", ""),
        (Place("cpu", "v", None, near("fixed", 3), "vllm"), "", "what the server drafts stays", ""),
        (Place("cpu", "v", active, None, "vllm"), "", "the incumbent stays", ""),
        (Place("cpu", "v", None, None, "vllm"), "", "go on as they were started", "not known"),
        (Place("cpu", "v", active, None, "vllm"), "no", "go on as they were started", "not known"),
    ):
        assert stays in place.stays(unusable)
        assert compared in place.reference(unusable)
        assert bool(compared) == bool(place.reference(unusable))


FITS = {
    "static": (((0,),), ((0,), (1,), (0, 0))),
    "classifier": ("grower",),
    "stratify": ("bins",),
    "frequency": ("order",),
    "position_frequency": ("order",),
    "clusters": ("router",),
}
SPACE = Space(("small", "ngram"), 16, {"small": DraftLimits(6, 8, 101, 9, FITS)})


def test_the_space_is_read_off_the_blocks() -> None:
    """All kinds of blocks are proposed, where they do something and within what was recorded."""
    turns = SPACE.turns()
    assert turns == [
        *(("small", form) for form in ("chains", "trees", "trees in bins")), ("ngram", "chains")
    ]  # fmt: skip
    studies = [
        optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=n))
        for n in range(len(turns))
    ]
    kinds: dict[str, dict[str, set[str]]] = {d: {g: set() for g in GROUPS} for d in SPACE.drafts}
    for n in range(800):
        draft, form = turns[n % len(turns)]
        study = studies[n % len(turns)]
        asked = study.ask()
        policy = SPACE.suggest(asked, draft, form)
        study.tell(asked, 0.0)
        assert policy.is_tree == (form != "chains")
        assert (policy.stratify is not None) == (form == "trees in bins")
        assert policy.depth_max <= (8 if policy.is_tree else 16)
        assert getattr(policy.shortlist, "size", 1) <= 50
        for group, seen in kinds[policy.draft].items():
            seen.add(kind_of(group, policy))
    for group, seen in kinds["small"].items():
        assert seen == set(GROUPS[group]) - {"by_load"}
    simplest = {group: {next(iter(each))} for group, each in GROUPS.items()}
    assert kinds["ngram"] == {**simplest, "window": set(GROUPS["window"]) - {"by_load"}}


def test_policies_that_did_the_same_race_once_as_the_simplest() -> None:
    """A draft that is always right: whatever stops it or adapts it, every window of a length does
    the same. A stand-in that did the same at a lower cost by more than a tie stays."""
    stops = [{"kind": "joint_prob", "threshold": t} for t in (0.001, 0.002, 0.003, 0.004)]
    states = {"kind": "fsm", "gamma_max": GAMMA_MAX, "gamma_min": GAMMA_MAX}
    alike = [
        parse_policy({"draft": "near", "window": states}),
        *(near("fixed", GAMMA_MAX, stop=stop) for stop in stops),
    ]
    study = searched(1.0, trials=0, incumbents=alike)
    (plain,) = (t for t in study.trials if t.policy == near("fixed", GAMMA_MAX))
    same = [t for t in study.trials if t.digest == plain.digest]
    assert {p.id for p in alike} < {t.policy.id for t in same}
    assert [t for t in study.distinct() if t.digest == plain.digest] == [plain]
    raced = [t.policy.id for t in finalists(study, 9)]
    assert plain.policy.id in raced
    assert not {p.id for p in alike} & set(raced)
    cheaper = replace(same[1] if same[0] == plain else same[0], value=plain.value * (1 + 2 * TIE))
    others = (t for t in study.trials if t.policy != cheaper.policy)
    kept = replace(study, trials=(cheaper, *others)).distinct()
    assert [t for t in kept if t.digest == plain.digest] == [cheaper, plain]
    assert study.same(plain.policy, alike[0])
    assert not study.same(plain.policy, AUTOREGRESSIVE)
