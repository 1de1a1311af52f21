"""Search, split and verdict on traces whose best policy is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from synthetic import flat_profile

from spectune.optimizer.execute import Comparison, Timings
from spectune.optimizer.record import split
from spectune.optimizer.search import TIE, Study, Trial, complexity, finalists, search
from spectune.optimizer.simulate.replay import replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.spaces import TreeLimit, TreeSpace, enumerated, enumerated_trees
from spectune.optimizer.verdict import Candidate, fastest_of, verdict
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.schema import (
    AGREE_NO,
    AGREE_YES,
    ChainPanorama,
    Counts,
    Outcome,
    RequestOutcome,
    Sampling,
    Trajectory,
)

GAMMA_MAX = 8


def trace(acceptance: float, *, requests: int = 12, length: int = 80, seed: int = 0) -> ReplayTrace:
    """Texts whose draft ``near`` agrees independently with the given probability at every position."""
    rng = np.random.default_rng(seed)
    trajectories, panoramas = [], []
    for i in range(requests):
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
        logp = np.where(agree, rng.integers(0, 200, length), rng.integers(100, 900, length)).astype(np.uint16)
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
    """No fixed window, nor any enumerated policy, beats the search's best by more than the tie it allows itself."""
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
        assert replay(recorded, trial.policy, profile).total.tokens_per_s == pytest.approx(trial.value)


def test_ties_go_to_the_simpler_and_finalists_differ() -> None:
    """Within 1% the simplest wins; each further finalist is of another family; incumbents are tried."""
    recorded, profile = trace(0.8), flat_profile("p", ["near"])
    incumbent = parse_policy({"draft": "near", "window": {"kind": "fixed", "gamma": 3}, "stop": {"kind": "joint_prob"}})
    study = search(recorded, profile, ["near"], gamma_max=GAMMA_MAX, trials=20, incumbents=[incumbent])
    assert incumbent.id in {t.policy.id for t in study.trials}
    best = study.best()
    for trial in study.trials:
        if trial.value >= max(t.value for t in study.trials) * (1 - TIE):
            assert complexity(best.policy) <= complexity(trial.policy)
    chosen = finalists(study, 5)
    families = [(t.policy.draft, t.policy.window.kind, t.policy.stop.kind) for t in chosen]
    assert len(set(families)) == len(families) == 5


def test_finalists_draft_differently_and_no_close_draft_is_left_out() -> None:
    """Windows of one draft do not crowd out another draft, unless it is predicted to be much slower."""

    def trial(draft: str, window: str, value: float) -> Trial:
        return Trial(parse_policy({"draft": draft, "window": {"kind": window}}), value, "")

    trials = [trial("near", "fixed", 100.0), trial("near", "fsm", 99.0), trial("near", "cache_fsm", 98.0)]
    trials += [trial("far", "fixed", 90.0), trial("far", "fsm", 89.0), trial("ngram", "fixed", 60.0)]
    names = [t.policy.label() for t in finalists(Study(tuple(trials), 0, ""), 2)]
    assert names == [trials[0].policy.label(), trials[3].policy.label()]
    slow = [replace(t, value=80.0) if t.policy.draft == "far" else t for t in trials]
    assert [t.policy.draft for t in finalists(Study(tuple(slow), 0, ""), 1)] == ["near"]
    assert [t.policy.draft for t in finalists(Study(tuple(trials), 0, ""), 1)] == ["near", "far"]


def test_split_is_stable_disjoint_and_by_category() -> None:
    """Every request is in one part; a prefix of the workload is split like the whole; one request is in both."""
    categories = ["a", "b", "c"] * 20
    ids = [str(i) for i in range(60)]
    search_part, test_part = split(ids, categories)
    assert sorted(search_part + test_part) == list(range(60))
    assert {c: sum(categories[i] == c for i in test_part) for c in "abc"} == {"a": 8, "b": 8, "c": 8}
    half = split(ids[:30], categories[:30])
    assert half[1] == [i for i in test_part if i < 30]
    assert split(["x"], ["a"]) == ([0], [0])


def executed(policy: Policy, seconds: Sequence[float]) -> Outcome:
    rows = tuple(RequestOutcome(str(i), "a", Counts(1, 10, 50, 40, 60, 60, 70, s)) for i, s in enumerate(seconds))
    return Outcome(policy.label(), "executed", rows)


def verdict_of(incumbent_s: Sequence[float], challenger_s: Sequence[float], published: bool) -> tuple[str, str, bool]:
    challenger = parse_policy({"draft": "near", "window": {"kind": "fixed", "gamma": 3}})
    outcomes = {AUTOREGRESSIVE.id: executed(AUTOREGRESSIVE, incumbent_s), challenger.id: executed(challenger, challenger_s)}
    timings = Timings({p: np.array([[r.counts.seconds] for r in o.per_request]) for p, o in outcomes.items()})
    compared = Comparison(outcomes, {AUTOREGRESSIVE.id: AUTOREGRESSIVE, challenger.id: challenger}, 0, timings, tuple(outcomes))
    rows = [
        Candidate(role, p, outcomes[p.id], outcomes[p.id], compared.ratio(p.id, AUTOREGRESSIVE.id))
        for role, p in (("finalist 1", challenger), ("incumbent", AUTOREGRESSIVE))
    ]
    reason, chosen, publish = verdict(fastest_of(rows, compared, 0.02), rows[1], published)
    return reason, chosen.policy.id, publish


def test_only_a_gain_beyond_noise_is_published() -> None:
    """Clearly faster: published. Faster by luck: the incumbent stays. Slower: the incumbent stays, or is published as the first."""
    rng = np.random.default_rng(0)
    base = 1.0 + 0.05 * rng.random(20)
    reason, chosen, publish = verdict_of(base, base / 1.5, True)
    assert publish
    assert chosen != AUTOREGRESSIVE.id
    assert reason.startswith("1.5")
    noisy = base * (1 + 0.3 * rng.standard_normal(20))
    reason, chosen, publish = verdict_of(base, np.abs(noisy), True)
    assert chosen == AUTOREGRESSIVE.id
    assert not publish
    reason, chosen, publish = verdict_of(base, base * 1.2, False)
    assert chosen == AUTOREGRESSIVE.id
    assert publish
    assert "autoregression is published" in reason


LIMIT = TreeLimit(3, 11, bins="bins", fitted_depth=5, classifier="grower", grown=10, static=(((0,), (0, 0), (1,)),), sharpness=2.4)


def test_every_tree_policy_of_the_enumeration_can_seed_the_sampler() -> None:
    """The parameters of a policy make that policy again, so that what is enqueued is what was meant."""
    space = TreeSpace(("small",), 16, trees={"small": LIMIT})
    policies = enumerated_trees({"small": LIMIT})
    for policy in [*policies[::11], *(p for p in policies if p.growth.kind in ("static", "classifier"))]:
        params = space.params(policy)
        assert params is not None, policy.label()
        made = space.policy(params)
        blocks = ("draft", "stop", "growth", "select", "stratify", "shortlist", "depth_max")
        assert [getattr(made, b) for b in blocks] == [getattr(policy, b) for b in blocks], policy.label()
        assert made.window.kind == policy.window.kind
        domains = space.distributions(params["window"], params["stop"], params["growth"])
        assert domains.keys() == params.keys()
        assert all(domains[name]._contains(domains[name].to_internal_repr(value)) for name, value in params.items())
    kinds = {(p.growth.kind, p.stratify is not None, p.depth_max) for p in policies}
    assert {("top_k", True, 9), ("top_k", True, 11), ("classifier", False, 11), ("static", False, 2)} <= kinds
    assert {p.stratify.fractions for p in policies if p.stratify} == {(0.3, 0.6, 1.0)}
    assert {p.growth.sharpness for p in policies if p.growth.kind == "top_k" and p.growth.score == "coupled"} == {1.5, 2.4, 3.0}
    assert any(p.growth.kind == "classifier" and p.growth.width == 1 for p in policies), "C2T's chain mode"
