"""Search, split and verdict on traces whose best policy is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import optuna
import pytest
from synthetic import flat_profile

from spectune.optimizer.confirm import Confirmation
from spectune.optimizer.parts import mixed, split
from spectune.optimizer.search import (
    TIE,
    Study,
    Trial,
    _Judge,
    _seeded_study,
    complexity,
    finalists,
    search,
)
from spectune.optimizer.simulate.replay import replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.spaces import Space, TreeLimit, enumerated, enumerated_trees
from spectune.optimizer.verdict import Candidate, verdict
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.schema import (
    AGREE_NO,
    AGREE_YES,
    ChainPanorama,
    Outcome,
    Sampling,
    Trajectory,
)

GAMMA_MAX = 8


def trace(acceptance: float) -> ReplayTrace:
    """Texts whose draft ``near`` agrees independently with the given probability at every
    position."""
    rng, length = np.random.default_rng(0), 80
    trajectories, panoramas = [], []
    for i in range(12):
        agree = rng.random(length) < acceptance
        branches = int((~agree).sum()) + 1
        trajectories.append(
            Trajectory(
                request_id=str(i),
                category="abc"[i % 3],
                prompt_ids=np.arange(20, dtype=np.int32),
                output_ids=np.arange(length, dtype=np.int32) + 100,
                sampling=Sampling(),
                max_new_tokens=length,
                finish="length",
            )
        )
        logp = np.where(agree, rng.integers(0, 200, length), rng.integers(100, 900, length)).astype(
            np.uint16
        )
        panoramas.append(
            ChainPanorama(
                "near",
                GAMMA_MAX,
                np.where(agree, AGREE_YES, AGREE_NO).astype(np.uint8),
                logp,
                logp.copy(),
                np.where(agree, 65535, 0).astype(np.uint16),
                rng.integers(100, 900, (branches, GAMMA_MAX)).astype(np.uint16),
                rng.integers(100, 900, (branches, GAMMA_MAX)).astype(np.uint16),
                np.full(branches, GAMMA_MAX - 1, dtype=np.uint8),
            )
        )
    return ReplayTrace(trajectories, {"near": panoramas})


@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.9])
def test_search_finds_at_least_the_best_of_an_exhaustive_enumeration(acceptance: float) -> None:
    """No fixed window, nor any enumerated policy, beats the search's best by more than the tie it
    allows itself."""
    recorded, profile = trace(acceptance), flat_profile("p", ["near"])
    study = search(recorded, profile, ["near"], gamma_max=GAMMA_MAX, trials=30, seed=1)
    best = study.best()
    for policy in enumerated(["near"], GAMMA_MAX):
        assert replay(recorded, policy, profile).total.tokens_per_s <= best.value / (1 - TIE) + 1e-9
    if acceptance < 0.1:
        assert not best.policy.speculates
    else:
        assert best.value > replay(recorded, AUTOREGRESSIVE, profile).total.tokens_per_s


def test_search_is_a_function_of_its_arguments() -> None:
    """The same trace, profile and seed give the same trials; values are the replay's own."""
    recorded, profile = trace(0.7), flat_profile("p", ["near"])
    one = search(recorded, profile, ["near"], gamma_max=GAMMA_MAX, trials=25, seed=3)
    two = search(recorded, profile, ["near"], gamma_max=GAMMA_MAX, trials=25, seed=3)
    assert one == two
    for trial in one.trials[::17]:
        assert replay(recorded, trial.policy, profile).total.tokens_per_s == pytest.approx(
            trial.value
        )


def test_ties_go_to_the_simpler_and_finalists_differ() -> None:
    """Within 1% the simplest wins; each further finalist is of another family; incumbents are
    tried."""
    recorded, profile = trace(0.8), flat_profile("p", ["near"])
    incumbent = parse_policy(
        {"draft": "near", "window": {"kind": "fixed", "gamma": 3}, "stop": {"kind": "joint_prob"}}
    )
    study = search(
        recorded, profile, ["near"], gamma_max=GAMMA_MAX, trials=20, incumbents=[incumbent]
    )
    assert incumbent.id in {t.policy.id for t in study.trials}
    best = study.best()
    for trial in study.trials:
        if trial.value >= max(t.value for t in study.trials) * (1 - TIE):
            assert complexity(best.policy) <= complexity(trial.policy)
    chosen = finalists(study, 5)
    families = [(t.policy.draft, t.policy.window.kind, t.policy.stop.kind) for t in chosen]
    assert len(set(families)) == len(families) == 5


def test_finalists_draft_differently_and_no_close_draft_is_left_out() -> None:
    """Windows of one draft do not crowd out another draft, unless it is predicted to be much
    slower."""

    def trial(draft: str, window: str, value: float) -> Trial:
        return Trial(parse_policy({"draft": draft, "window": {"kind": window}}), value, "")

    trials = [
        trial("near", "fixed", 100.0),
        trial("near", "fsm", 99.0),
        trial("near", "cache_fsm", 98.0),
    ]
    trials += [
        trial("far", "fixed", 90.0),
        trial("far", "fsm", 89.0),
        trial("ngram", "fixed", 60.0),
    ]
    names = [t.policy.label() for t in finalists(Study(tuple(trials), 0, ""), 2)]
    assert names == [trials[0].policy.label(), trials[3].policy.label()]
    slow = [replace(t, value=80.0) if t.policy.draft == "far" else t for t in trials]
    assert [t.policy.draft for t in finalists(Study(tuple(slow), 0, ""), 1)] == ["near"]
    assert [t.policy.draft for t in finalists(Study(tuple(trials), 0, ""), 1)] == ["near", "far"]


def test_split_is_stable_disjoint_and_by_category() -> None:
    """Every request is in one part; a prefix of the workload is split like the whole; small
    categories fill every part."""
    categories = ["a", "b", "c"] * 20
    parts = split(categories)
    assert sorted([*parts.search, *parts.race, *parts.confirm]) == list(range(60))
    for part, share in zip(parts, (10, 4, 6), strict=True):
        assert {c: sum(categories[i] == c for i in part) for c in "abc"} == {
            "a": share,
            "b": share,
            "c": share,
        }
    assert split(categories[:30]).confirm == [i for i in parts.confirm if i < 30]
    assert [len(part) for part in split([str(i // 2) for i in range(20)])] == [10, 4, 6]
    assert split(["a"]) == ([0], [], [])


def test_the_beginning_of_a_part_has_every_category() -> None:
    """Also where the workload has one after the other."""
    categories = ["a"] * 20 + ["b"] * 10
    order = mixed(range(30), categories)
    assert sorted(order) == list(range(30))
    assert [sum(categories[i] == "b" for i in order[:n]) for n in (3, 6, 15)] == [1, 2, 5]


def verdict_of(low: float, ratio: float, requests: int, published: bool) -> tuple[str, bool, bool]:
    """(why, whether the challenger is to be in force, whether to publish) of a winner that was
    confirmed so."""
    challenger = parse_policy({"draft": "near", "window": {"kind": "fixed", "gamma": 3}})
    rows = [
        Candidate(role, p, *[Outcome(p.label(), "executed", ())] * 2, (2.0, 1.9, 2.1))
        for role, p in (("finalist 1", challenger), ("incumbent", AUTOREGRESSIVE))
    ]
    confirmed = Confirmation(challenger.id, (ratio, low, ratio**2 / low), requests, 2)
    reason, chosen, publish = verdict(*rows, confirmed, published)
    assert verdict(rows[1], rows[1], None, published)[1:] == (rows[1], not published)
    return reason, chosen.policy == challenger, publish


def test_only_a_confirmed_gain_is_published() -> None:
    """Whatever the race said: beyond noise, worth having, and on enough requests. Else the
    incumbent stays, or is published as the first."""
    reason, *came = verdict_of(1.45, 1.5, 12, True)
    assert came == [True, True]
    assert reason.startswith(
        "1.500 times the incumbent's speed (99% interval 1.450 to 1.552) on 12 requests held out"
    )
    for low, ratio, requests, why in (
        (0.99, 1.3, 12, "not beyond noise"),
        (1.001, 1.005, 12, "1.01"),
        (1.4, 1.5, 4, "5 are needed"),
    ):
        reason, *came = verdict_of(low, ratio, requests, True)
        assert came == [False, False]
        assert why in reason
    reason, *came = verdict_of(0.99, 1.3, 12, False)
    assert came == [False, True]
    assert reason.endswith("autoregression is published")


LIMIT = TreeLimit(
    3, 11, bins="bins", classifier="grower", grown=10, static=(((0,), (0, 0), (1,)),), sharpness=2.4
)


def test_every_tree_policy_of_the_enumeration_can_seed_the_sampler() -> None:
    """The parameters of a policy make that policy again, so that what is enqueued is what was
    meant."""
    space = Space(("small",), 16, trees={"small": LIMIT})
    policies = enumerated_trees({"small": LIMIT})
    for policy in [
        *policies[::11],
        *(p for p in policies if p.growth.kind in ("static", "classifier")),
    ]:
        params = space.params(policy)
        assert params is not None, policy.label()
        made = space.policy(params)
        blocks = ("draft", "stop", "growth", "select", "stratify", "shortlist", "depth_max")
        assert [getattr(made, b) for b in blocks] == [getattr(policy, b) for b in blocks], (
            policy.label()
        )
        assert made.window.kind == policy.window.kind
        domains = space.distributions(params)
        assert domains.keys() == params.keys()
        assert all(
            domains[name]._contains(domains[name].to_internal_repr(value))
            for name, value in params.items()
        )
    kinds = {(p.growth.kind, p.stratify is not None, p.depth_max) for p in policies}
    assert {
        ("top_k", True, 9),
        ("top_k", True, 11),
        ("classifier", False, 11),
        ("static", False, 2),
    } <= kinds
    assert {p.stratify.fractions for p in policies if p.stratify} == {(0.3, 0.6, 1.0)}
    assert {
        p.growth.sharpness
        for p in policies
        if p.growth.kind == "top_k" and p.growth.score == "coupled"
    } == {1.5, 2.4, 3.0}
    assert any(p.growth.kind == "classifier" and p.growth.width == 1 for p in policies), (
        "C2T's chain mode"
    )


def test_policies_that_did_the_same_race_once_as_the_simplest() -> None:
    """A draft that is always right: whatever stops it or adapts it, every window of a length does
    the same. A stand-in that did the same at a lower cost by more than a tie stays."""
    recorded, profile = trace(1.0), flat_profile("p", ["near"])
    fixed = {"kind": "fixed", "gamma": GAMMA_MAX}
    alike = [
        parse_policy(
            {
                "draft": "near",
                "window": {"kind": "fsm", "gamma_max": GAMMA_MAX, "gamma_min": GAMMA_MAX},
            }
        ),
        *(
            parse_policy(
                {"draft": "near", "window": fixed, "stop": {"kind": "joint_prob", "threshold": t}}
            )
            for t in (0.001, 0.002, 0.003, 0.004)
        ),
    ]
    study = search(recorded, profile, ["near"], gamma_max=GAMMA_MAX, trials=0, incumbents=alike)
    (plain,) = (
        t for t in study.trials if t.policy == parse_policy({"draft": "near", "window": fixed})
    )
    same = [t for t in study.trials if t.did == plain.did]
    assert {p.id for p in alike} < {t.policy.id for t in same}
    assert [t for t in study.distinct() if t.did == plain.did] == [plain]
    raced = [t.policy.id for t in finalists(study, 9)]
    assert plain.policy.id in raced
    assert not {p.id for p in alike} & set(raced)
    cheaper = replace(same[1] if same[0] == plain else same[0], value=plain.value * (1 + 2 * TIE))
    kept = replace(
        study, trials=(cheaper, *(t for t in study.trials if t.policy != cheaper.policy))
    ).distinct()
    assert [t for t in kept if t.did == plain.did] == [cheaper, plain]
    assert study.same(plain.policy, alike[0])
    assert not study.same(plain.policy, AUTOREGRESSIVE)


def test_start_up_trials_are_random_whatever_the_seeds_were_worth() -> None:
    """What is enqueued fills none of Optuna's start-up: the trials after it do not depend on what
    was found, those after them do."""
    space = Space(("near",), GAMMA_MAX)
    ranked = search(
        trace(0.7), flat_profile("p", ["near"]), ["near"], gamma_max=GAMMA_MAX, trials=0
    ).trials
    asked: list[list[Policy]] = []
    for sign in (1.0, -1.0):
        study = _seeded_study(space, ranked, 200, 0)
        asked.append([])
        for _ in range(60):
            trial = study.ask()
            asked[-1].append(space.suggest(trial))
            study.tell(trial, sign * asked[-1][-1].gamma_max)
    one, other = asked
    assert one[:40] == other[:40]
    assert len({p.label() for p in one[20:40]}) == 20
    assert one[40:] != other[40:]


def test_what_was_not_recorded_is_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not a policy of 0 tokens/s: a study that learns from such figures is told of none."""
    made: list[optuna.study.Study] = []
    create = optuna.create_study
    monkeypatch.setattr(
        optuna, "create_study", lambda **how: made.append(create(**how)) or made[-1]
    )
    monkeypatch.setattr(
        _Judge, "value", lambda self, policy, origin: None if policy.gamma_max > 4 else 100.0
    )
    search(trace(0.7), flat_profile("p", ["near"]), ["near"], gamma_max=GAMMA_MAX, trials=30)
    states = {t.params["gamma"] > 4: t.state.name for t in made[0].trials}
    assert states == {True: "PRUNED", False: "COMPLETE"}
    assert {t.value for t in made[0].trials} == {None, 100.0}
