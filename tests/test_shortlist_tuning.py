"""Shortlists as a dimension of the search: where the head costs much they win, where it does not
they are left out; `tune` fits them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from databases import opened, put_in_force
from doors import put_made_up_profile, write_workload
from pairs import chain, make_pair
from recorded_texts import trace_of
from synthetic import flat_profile, over_rows, policy, with_terms

import spectune.optimizer.fit.tuning as tuning
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.fit import by_prompt
from spectune.optimizer.fit.fr_spec import count_tokens, token_ids
from spectune.optimizer.fit.shared import search_texts
from spectune.optimizer.fit.tuning import FOLDS, fit_shortlists, ranks_for
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.record import PanoramaSpec, record
from spectune.optimizer.search import Study, Trial, search, shortlist_bounds, worth_trying
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.spaces import SHORTLIST_ORDER, Kinds, ShortlistLimit, Space, TreeLimit
from spectune.optimizer.timings import TIE
from spectune.optimizer.tune import TuneOptions, Tuning, tune
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import ROUTER
from spectune.runtime.policies.document import AUTOREGRESSIVE, PromptPolicy, parse_policy
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.plan import prepare
from spectune.runtime.progress import silent
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import TraceError
from spectune.traces.schema import Counts, Sampling, Workload
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile

ROWS, CLUSTERS, GAMMA = 300, 16, 6
LIMIT = ShortlistLimit(ROWS, "f" * 12, "r" * 12, CLUSTERS)
OPTIONS = DecodeOptions(Sampling(), 24)


def priced(profile: LatencyProfile, rows: int, fixed: float, routed: float) -> LatencyProfile:
    """A pass of ``near`` takes 1 ms with its whole head; over a 64th of it that much of it less,
    and linearly between."""
    sizes, step = (max(1, rows // 64), rows), CostTable((0.0,))
    head, gathered = (over_rows(sizes, (1e-3 * (1 - saved), 1e-3)) for saved in (fixed, routed))
    return with_terms(profile, {"head/near": head, "gathered/near": gathered, "pass/near": step})


@dataclass(frozen=True)
class Recorded:
    store: TraceStore
    pair: LoadedPair
    workload: Workload
    recording: str
    limits: dict[str, ShortlistLimit]
    trace: ReplayTrace

    def priced(self, fixed: float, routed: float) -> LatencyProfile:
        return priced(flat_profile("p", ["near"]), self.limits["near"].rows, fixed, routed)

    def search(self, profile: LatencyProfile, **how: object) -> Study:
        given = {
            "gamma_max": GAMMA,
            "trials": 30,
            "seed": 2,
            "shortlists": self.limits,
            "artifacts": fitted(self.store),
        }
        return search(self.trace, profile, ["near"], **{**given, **how})  # type: ignore[arg-type]


def kinds_of(study: Study) -> set[str]:
    return {t.policy.shortlist.kind for t in study.trials}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A tiny pair, texts with trees of ``near``, and what shortlists need."""
    folder = tmp_path_factory.mktemp("tuning")
    pair = load_pair(read_pair(str(make_pair(folder))), device="cpu", drafts=("near",))
    workload = load_workload([str(write_workload(folder / "w.jsonl", 8))])
    with opened(folder / "spectune.db") as store:
        plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
        recording = record(
            store, pair, workload, OPTIONS, PanoramaSpec(("near",), GAMMA, 6, 3), plain
        ).id
        limits = fit_shortlists(store, pair, recording, ["near", "ngram"], seed=1)
        ranks = ranks_for(store, pair, recording, limits)
        trace = trace_of(store, recording, ["near"], ranks)
        yield Recorded(store, pair, workload, recording, limits, trace)


@pytest.fixture(scope="module")
def dear(recorded: Recorded) -> LatencyProfile:
    """A pass is its head for the most part."""
    return recorded.priced(0.9, 0.8)


@pytest.fixture(scope="module")
def study(recorded: Recorded, dear: LatencyProfile) -> Study:
    return recorded.search(dear)


@pytest.mark.parametrize(
    "trees", [{}, {"near": TreeLimit(6, 4, bins="b" * 12)}], ids=["chains", "trees"]
)
def test_shortlists_are_a_dimension_of_the_space(trees: dict[str, TreeLimit]) -> None:
    """Every kind is suggested; what is suggested comes back from its parameters; other artifacts
    and other drafts are outside."""
    space = Space(("near", "far"), 8, trees=trees, shortlists={"near": LIMIT})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    kinds = set()
    for _ in range(200):
        policy = space.suggest(study.ask())
        params = space.params(policy)
        assert params is not None
        assert space.policy(params) == policy
        assert policy.draft == "near" or not policy.shortlisted
        kinds.add(policy.shortlist.kind)
    assert kinds == set(SHORTLIST_ORDER)
    other = {"kind": "frequency", "size": 20, "artifact": "other"}
    assert space.params(parse_policy(chain("near", 3, shortlist=other))) is None
    routed = {"kind": "clusters", "k0": 4, "k1": 2, "k_min": 1, "artifact": LIMIT.router}
    fixed = Space(("near",), 8, trees=trees, shortlists={"near": LIMIT.only(["fixed"])})
    assert fixed.params(parse_policy(chain("near", 3, shortlist=routed))) is None


def test_the_bound_is_what_the_smallest_shortlist_would_give() -> None:
    """Half of each second goes to 500 passes of 1 ms: saving 0.6 ms of each gives 1 / 0.7; where
    nothing is saved, nothing is gained."""
    policy = parse_policy({"draft": "near", "window": {"kind": "fixed", "gamma": 3}})
    trials = [Trial(policy, 100.0, "x", 500.0), Trial(AUTOREGRESSIVE, 80.0, "x")]
    profile = priced(flat_profile("p", ["near"]), ROWS, 0.6, -0.2)
    bounds = shortlist_bounds(trials, profile)
    assert bounds["near"] == {"fixed": pytest.approx(1 / 0.7), "routed": pytest.approx(1.0)}
    assert worth_trying(bounds) == {"near": ("fixed",)}
    slower = [replace(trials[0], value=50.0), trials[1]]
    assert shortlist_bounds(slower, profile)["near"]["fixed"] == pytest.approx(50 / 0.7 / 80)
    assert shortlist_bounds(trials, flat_profile("p", ["near"])) == {}


def test_where_the_head_dominates_a_shortlist_wins(
    recorded: Recorded, dear: LatencyProfile, study: Study
) -> None:
    """The winner restricts the head and beats all that do not beyond a tie; values are the
    replay's."""
    best = study.best()
    assert best.policy.shortlisted
    assert best.value > max(t.value for t in study.trials if not t.policy.shortlisted) * (1 + TIE)
    assert kinds_of(study) == set(SHORTLIST_ORDER)
    assert study.shortlists == {"near": ("frequency", "position_frequency", "clusters")}
    find, apart = fitted(recorded.store), recorded.limits["near"].apart
    ids = recorded.trace.request_ids
    for trial in study.trials[::41]:
        judged = [(recorded.trace, trial.policy)]
        if trial.policy.shortlisted:
            fixed, rest = "frequency" in trial.policy.shortlist.kind, set(range(len(ids)))
            judged = []
            for name, fit in {f.frequencies if fixed else f.router: f for f in apart}.items():
                mine = [n for n, request in enumerate(ids) if request in fit.requests]
                block = trial.policy.shortlist.model_copy(update={"artifact": name})
                policy = trial.policy.model_copy(update={"shortlist": block})
                judged.append((recorded.trace.select(mine), policy))
                rest -= set(mine)
            judged.append((recorded.trace.select(sorted(rest)), trial.policy))
        counts = [
            run_replay(part, policy, dear, artifacts=find, approximate=True).total
            for part, policy in judged
        ]
        assert sum(counts, Counts()).tokens_per_s == pytest.approx(trial.value)


def test_where_no_shortlist_saves_anything_they_are_left_out(recorded: Recorded) -> None:
    """And the study says so; a kind that saves nothing is left out by itself; asked for all the
    same they are tried."""
    slow = recorded.priced(-0.1, -0.5)
    study = recorded.search(slow)
    assert not any(t.policy.shortlisted for t in study.trials)
    said = study.on_shortlists()
    assert said["searched"] == {}
    assert max(said["most_gained"]["near"].values()) <= said["least_worth"]
    assert kinds_of(recorded.search(slow, bounded=False)) == set(SHORTLIST_ORDER)
    half = recorded.search(recorded.priced(0.9, -0.5))
    assert kinds_of(half) == {"full", "frequency", "position_frequency"}


def test_what_is_known_is_not_tried_again_and_kinds_are_kept_to(
    recorded: Recorded, dear: LatencyProfile, study: Study
) -> None:
    """A search that goes on from an enumeration finds what one search finds; kinds leave the others
    out."""
    first = recorded.search(dear, trials=0, shortlists=None)
    assert not any(t.policy.shortlisted for t in first.trials)
    assert recorded.search(dear, known=first).trials == study.trials
    kinds = Kinds(windows=("fixed", "fsm"), stops=("none",), shortlists=("full", "frequency"))
    kept = recorded.search(dear, kinds=kinds)
    assert all(kinds.hold(t.policy) for t in kept.trials)
    assert kinds_of(kept) == {"full", "frequency"}


def test_a_router_is_found_again(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recording, head and seed: no second fit. Another seed, or none wanted: another
    router, or none."""
    again = (recorded.store, recorded.pair, recorded.recording, ["near"])
    assert recorded.limits.keys() == {"near"}
    assert recorded.limits["near"].kinds == SHORTLIST_ORDER[1:]
    assert recorded.limits["near"].rows == recorded.pair.target.vocab_size

    def refuse(*_: object, **__: object) -> None:
        raise TraceError("fitted again")

    monkeypatch.setattr(tuning, "fit_router", refuse)
    assert fit_shortlists(*again, seed=1) == recorded.limits
    assert fit_shortlists(*again, seed=9)["near"].router is None
    assert fit_shortlists(*again, routed=[], seed=1)["near"].kinds == SHORTLIST_ORDER[1:3]


def test_shortlists_are_judged_by_texts_they_were_not_fitted_to(recorded: Recorded) -> None:
    """Each request of the search part is in one fold, whose order was counted without it; a token
    that no other text holds is last there. Judged by the order of all texts a small shortlist would
    look better than it is."""
    store, limit = recorded.store, recorded.limits["near"]
    part = search_texts(store, recorded.recording, recorded.pair.spec)
    ids = [t.request_id for t in part]
    assert sorted(name for fold in limit.apart for name in fold.requests) == sorted(ids)
    assert len({fit.router for fit in (limit, *limit.apart)}) == 1 + FOLDS
    for fold in limit.apart:
        others = token_ids([t for t in part if t.request_id not in fold.requests])
        counts = count_tokens(others, recorded.pair.target.vocab_size)
        assert fold.frequencies is not None
        held = store.get_artifact(fold.frequencies)
        order = Frequencies.from_document(held.document, held.arrays)
        assert (np.diff(counts[order.order[order.always :]]) <= 0).all()
    profile = recorded.priced(0.9, 0.8)
    places = [n for n, name in enumerate(recorded.trace.request_ids) if name in ids]
    seen = replace(recorded, trace=recorded.trace.select(places))
    block = limit.block({"shortlist": "frequency", "size": 24})
    policy = parse_policy(chain("near", 4, shortlist=block))
    whole = run_replay(seen.trace, policy, profile, artifacts=fitted(store)).total
    study = seen.search(profile, trials=0, incumbents=[policy])
    (judged,) = (t for t in study.trials if t.policy.id == policy.id)
    assert judged.value < whole.tokens_per_s * 0.99


def test_no_shortlist_above_half_of_a_head_is_proposed() -> None:
    """Whatever size is drawn, of whichever kind, and of the papers' settings at any share."""
    limit = ShortlistLimit(rows=101, frequencies="f", router="r", clusters=9)
    names = ("size", "k_max", "k0", "k1")
    blocks = [block for share in (1, 2, 4) for block in limit.papers(share)]
    for kind in limit.kinds:
        for n in (1, 50, 51, 101):
            drawn = {"shortlist": kind, "k_min": 1, **dict.fromkeys(names, n)}
            blocks.append(limit.block(drawn))
    most = {"frequency": ("size", 50), "position_frequency": ("k_max", 50), "clusters": ("k0", 4)}
    for kind, (name, half) in most.items():
        assert max(block[name] for block in blocks if block and block["kind"] == kind) == half


def test_a_longer_window_under_a_router_is_priced_to_its_end(recorded: Recorded) -> None:
    """Whatever was replayed before it under the same router and profile."""
    block = recorded.limits["near"].block({"shortlist": "clusters", "k0": 4, "k1": 2, "k_min": 1})
    short, long = (chain("near", g, shortlist=block) for g in (2, GAMMA))
    seconds = []
    for before in ([], [short]):
        profile = recorded.priced(0.9, 0.8)
        for document in (*before, long):
            replayed = run_replay(
                recorded.trace,
                parse_policy(document),
                profile,
                artifacts=fitted(recorded.store),
                approximate=True,
            )
        seconds.append(replayed.total.seconds)
    assert seconds[0] == seconds[1]


def tune_options(trials: int, **how: int) -> TuneOptions:
    least: dict[str, Any] = {"budget_s": 2, "publish": False, **how}
    return TuneOptions(OPTIONS, ("near",), GAMMA, trials, **least)


def test_a_shortlist_in_force_is_not_ranked_where_trees_are_left_out(recorded: Recorded) -> None:
    """Its ranks are of trees that are recorded, but that the tuning does not open."""
    block = recorded.limits["near"].block({"shortlist": "frequency", "size": 24})
    here = recorded.store, recorded.pair, recorded.recording, tune_options(0, tree_width=0)
    chains = Tuning(*here, silent, time.perf_counter, {})
    chains.incumbent = parse_policy({"draft": "near", "shortlist": block})
    chains.artifacts = fitted(recorded.store)
    chains.study = Study((), 0, "", bounds={"near": {"fixed": 2.0}})
    chains.open()
    chains.fit_shortlists()
    assert chains.trace.ranked == {}


@pytest.mark.parametrize("saved", [0.9, -0.5], ids=["head dear", "head cheap"])
def test_tune_fits_and_executes_shortlists_where_they_may_win(
    recorded: Recorded, tmp_path: Path, saved: float
) -> None:
    """With a profile in which the head dominates, a shortlist is among those executed; in one where
    it does not, nothing is fitted."""
    pair = recorded.pair
    plain, rows = flat_profile(pair.id, pair.drafts), recorded.limits["near"].rows
    with opened(tmp_path / "spectune.db") as store:
        put_made_up_profile(store, pair, priced(plain, rows, saved, saved))
        wanted = tune_options(5, finalists=2, tree_width=4, tree_depth=3)
        tuned = tune(store, pair, recorded.workload, wanted)
        document = store.get_study(tuned.study).document
        routers = store.list_artifacts(ROUTER)
    said = document["shortlists"]
    assert "too few to tell whether choosing gains" in document["by_prompt"]
    assert not any(isinstance(c.policy, PromptPolicy) for c in tuned.candidates)
    executed = {c.policy.shortlist.kind for c in tuned.candidates}
    if saved > 0:
        assert set(said["searched"]["near"]) == {"frequency", "position_frequency", "clusters"}
        assert executed & {"frequency", "position_frequency", "clusters"}
        assert len(routers) == 1 + FOLDS
    else:
        assert (said["searched"], executed, routers) == ({}, {"full"}, ())
    assert tuned.texts.differ == 0


def test_a_choice_by_prompt_is_raced_where_it_is_predicted_to_gain(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that the tuning fits, predicted round by round; and the incumbent, which was fitted
    to other prompts, without a prediction."""
    worth = by_prompt.worth
    monkeypatch.setattr(by_prompt, "worth", lambda *a: {**worth(*a), "interval": [0.1, 0.2]})
    store, pair = recorded.store, recorded.pair
    put_made_up_profile(store, pair)
    plain, look = (
        StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names)),
        PanoramaSpec(("near",), GAMMA),
    )
    before = load_workload([str(write_workload(tmp_path / "before.jsonl", 20))])
    recording = record(store, pair, before, OPTIONS, look, plain).id
    candidates = AUTOREGRESSIVE, policy("near", 3)
    incumbent = parse_policy(by_prompt.fit_recorded(store, recording, pair, candidates).policy)
    put_in_force(store, pair.id, incumbent)
    others = load_workload(
        [str(write_workload(tmp_path / "w.jsonl", 20, ("for i in", "Ann has 3 apples")))]
    )
    tuned = tune(store, pair, others, tune_options(3, finalists=1, tree_width=0))
    raced = {c.role: c for c in tuned.candidates if isinstance(c.policy, PromptPolicy)}
    chosen, _ = raced  # the last of the finalists, and the incumbent
    assert raced["incumbent"].policy == tuned.incumbent.policy == incumbent
    assert raced["incumbent"].predicted is None
    fitted_here = raced[chosen]
    assert fitted_here.predicted is not None
    rounds = {r.request_id: r.counts.rounds for r in fitted_here.predicted.per_request}
    for request in fitted_here.executed.per_request:
        assert request.counts.rounds == rounds[request.request_id]
    assert tuned.texts.differ == 0
