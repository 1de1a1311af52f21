"""Shortlists as a dimension of the search: where the head costs much they win; `tune` fits them
where passes over fewer tokens are faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from spectune.optimizer.fit.tuning import fit_shortlists, ranks_for
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.record import PanoramaSpec, record
from spectune.optimizer.search import search
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.spaces import GROUPS, ShortlistLimit, Space
from spectune.optimizer.timings import TIE
from spectune.optimizer.tune import TuneOptions, tune
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import ROUTER
from spectune.runtime.policies.document import AUTOREGRESSIVE, PromptPolicy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling, Workload
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


def test_where_the_head_dominates_a_shortlist_wins(recorded: Recorded) -> None:
    """A pass is its head for the most part: the winner restricts it and beats all that do not
    beyond a tie."""
    space = Space(("near",), GAMMA, shortlists=recorded.limits)
    how: dict[str, Any] = {"trials": 60, "seed": 2, "artifacts": fitted(recorded.store)}
    study = search(recorded.trace, recorded.priced(0.9, 0.8), space, **how)
    best = study.best()
    assert best is not None
    assert best.policy.shortlisted
    assert best.value > max(t.value for t in study.trials if not t.policy.shortlisted) * (1 + TIE)
    assert {t.policy.shortlist.kind for t in study.trials} == set(GROUPS["shortlist"])


def test_a_router_is_found_again(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recording, head and seed: no second fit. Another seed, or none wanted: another
    router, or none."""
    again = (recorded.store, recorded.pair, recorded.recording, ["near"])
    assert recorded.limits.keys() == {"near"}
    assert all(recorded.limits["near"].fits.values())
    assert recorded.limits["near"].rows == recorded.pair.target.vocab_size

    def refuse(*_: object, **__: object) -> None:
        raise TraceError("fitted again")

    monkeypatch.setattr(tuning, "fit_router", refuse)
    assert fit_shortlists(*again, seed=1) == recorded.limits
    assert fit_shortlists(*again, seed=9)["near"].router is None
    assert fit_shortlists(*again, routed=[], seed=1)["near"].fits["clusters"] == ()


def test_a_longer_window_under_a_router_is_priced_to_its_end(recorded: Recorded) -> None:
    """Whatever was replayed before it under the same router and profile."""
    block = {"kind": "clusters", "k0": 4, "k1": 2, "k_min": 1}
    block["artifact"] = recorded.limits["near"].router
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
    assert "too few to tell whether choosing gains" in document["by_prompt"]
    assert not any(isinstance(c.policy, PromptPolicy) for c in tuned.candidates)
    executed = {c.policy.shortlist.kind for c in tuned.candidates}
    if saved > 0:
        assert executed & {"frequency", "position_frequency", "clusters"}
        assert len(routers) == 1
    else:
        assert (executed, routers) == ({"full"}, ())
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
