"""Tuning the native decoder for loads: what is predicted of several requests is what is executed,
and a table of policies by load is proposed, raced and published."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from databases import opened as opened_store
from doors import Door, put_made_up_profile, write_workload
from synthetic import flat_profile, policy, with_terms
from test_publishing import QUICK, WORKLOAD

from spectune.engines.engine import Load
from spectune.optimizer.replay.loads import Objective, Served
from spectune.optimizer.report.tuning_page import page, report_on
from spectune.optimizer.tuning.load_search import PolicyStudy, policies_by_load
from spectune.optimizer.tuning.native import native_bench, native_place
from spectune.optimizer.tuning.pair_load import PairLoadBench
from spectune.optimizer.tuning.pipeline import tune
from spectune.optimizer.tuning.under_load import LoadOutcome
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, LoadPolicy, Policy, parse_policy
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile

LOADS = {"clients:1": Load(1), "clients:3": Load(3)}
SEATS = 3


def made_up(pair: LoadedPair, further_s: float = 1e-4) -> LatencyProfile:
    """What each request beyond one takes is ``further_s`` of a step, and as much of a pass."""
    flat = flat_profile(pair.id, pair.drafts)
    table = CostTable((further_s, 4 * further_s), ("batch",), ((1.0, 4.0),))
    names = ["further target", "further round", *(f"further pass/{d}" for d in pair.draft_names)]
    terms: dict[str, CostTable | None] = dict.fromkeys(names, table)
    return replace(with_terms(flat, terms), environment={"requests": SEATS})


def opened(store: TraceStore, pair: LoadedPair, **how: Any) -> PairLoadBench:
    put_made_up_profile(store, pair, made_up(pair))
    make = partial(PairLoadBench, loads=LOADS, objective=Objective(), count=12, seats=SEATS)
    options = replace(QUICK, **how)
    bench = native_bench(
        store, pair, WORKLOAD, options, make=make, requests=SEATS, clock=time.thread_time
    )
    assert isinstance(bench, PairLoadBench)
    return bench


TABLE = parse_policy(
    {"by_load": {"1": policy("near", 4).spelled_out(), "3": policy("far", 1).spelled_out()}}
)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)])
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_is_predicted_under_a_load_is_executed(
    store: TraceStore, pair: LoadedPair, sampling: Sampling
) -> None:
    """By clients, run by run: requests, rounds, drafted and accepted tokens; and every text is the
    recorded one."""
    options = replace(QUICK.options, sampling=sampling)
    bench = opened(store, pair, options=options)
    policies = [TABLE, policy("near", 3), AUTOREGRESSIVE]
    for part in ("race", "confirm"):
        with bench.execute(policies, part) as execution:  # type: ignore[arg-type]
            for each in policies:
                predicted = bench.predict(each, part).result.outcome()  # type: ignore[arg-type]
                costs = [execution(each.id, unit) for unit in range(bench.units(part))]  # type: ignore[arg-type]
                executed = execution.outcome(each.id, costs)  # type: ignore[arg-type]
                assert isinstance(predicted, LoadOutcome)
                assert isinstance(executed, LoadOutcome)
                for one, other in zip(predicted.runs, executed.runs, strict=True):
                    assert one.load == other.load
                    for name in (
                        "requests", "rounds", "emitted_tokens", "accepted_tokens",
                        "drafted_tokens",
                    ):  # fmt: skip
                        assert getattr(one.counts, name) == getattr(other.counts, name), name
            assert execution.texts.differ == 0
            assert execution.texts.compared > 0


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_load_is_tuned_to_a_verdict(store: TraceStore, pair: LoadedPair) -> None:
    bench = opened(store, pair, trials=20)
    tuned = tune(store, bench, native_place(store, pair, "default"), bench.options)
    assert {"incumbent", "autoregressive", "finalist 1"} <= {c.role for c in tuned.candidates}
    study = store.get_study(tuned.study)
    assert study.document["load"] == [*LOADS]
    assert study.document["seats"] == SEATS
    tried = [parse_policy(trial["policy"]) for trial in study.trials]
    assert any(isinstance(each, LoadPolicy) for each in tried)
    assert AUTOREGRESSIVE in tried
    rows = bench.by_load
    assert [row["load"] for row in rows] == [*LOADS]
    assert all(row["best"]["label"] and row["off"]["tokens_per_s"] > 0 for row in rows)
    assert "clients:3" in page(report_on(store, tuned.study))


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_policy_of_one_request_at_a_time_is_no_incumbent(
    store: TraceStore, pair: LoadedPair
) -> None:
    bench = opened(store, pair)
    learns = parse_policy({"draft": "near", "window": {"kind": "q_learning", "gamma_max": 3}})
    with pytest.raises(PolicyError, match="learns from one request to the next"):
        bench.check(learns)


def test_tables_say_an_entry_once() -> None:
    near, far = policy("near", 3), policy("far", 2)
    assert policies_by_load({1: near, 2: near, 4: near}) == near
    table = policies_by_load({1: near, 2: near, 4: far, 8: far})
    assert isinstance(table, LoadPolicy)
    assert table.by_load == {1: near, 4: far}


def test_the_best_table_is_found_where_each_load_wants_another(
    store: TraceStore, pair: LoadedPair
) -> None:
    """By made-up speeds: the search proposes what is best of each number of clients, and leaves out
    entries that lose less than a tie."""
    near, far = policy("near", 4), policy("far", 1)
    best = {1: near, 2: near, 4: far}

    class MadeUp(PairLoadBench):
        def __init__(self) -> None:
            self.loads = {f"clients:{n}": Load(n) for n in (1, 2, 4)}
            self.objective, self.seats = Objective(), 4

        search_trace = None  # type: ignore[assignment]

        def simulate(self, policy: Policy, load: Load, *_: Any) -> Any:
            own = policy.at(load.clients) if isinstance(policy, LoadPolicy) else policy
            speed = 1.0 if own == best[load.clients] else 0.8
            served = Served(np.zeros(1), np.ones(1) / speed, np.ones(1) / speed, np.array([100]))
            batches = np.array([load.clients])
            about: Any = {"batches": batches, "contexts": np.ones(1), "counts": np.ones((1, 3))}
            return SimpleNamespace(served=served, **about)

    study = PolicyStudy(MadeUp(), num_trials=20, pool=[near, far])
    assert study.run().policy == policies_by_load({1: near, 4: far})


def test_by_command(tmp_path: Path, tiny_pair: Path) -> None:
    """`tune --arrivals` without an engine, `simulate --arrivals` of what that recorded, and `run
    --concurrency` of a table: its texts are those of one request at a time."""
    door = Door(str(tmp_path / "load.db"), str(tiny_pair))
    write_workload(tmp_path / "work.jsonl", 18)
    said = {"pair": tiny_pair, "workload": tmp_path / "work.jsonl", "max_new_tokens": 8}
    loaded = load_pair(read_pair(str(tiny_pair)), device="cpu")
    with opened_store(door.db or "") as store:
        put_made_up_profile(store, loaded, made_up(loaded))
    less: dict[str, Any] = {"trials": 5, "budget": "0.3s", "gamma_max": 4, "tree_width": 0}
    tuned = door.json("tune", **said, **less, arrivals="clients:1,3", report="none")
    assert [row["load"] for row in tuned["loads"]] == [*LOADS]
    assert tuned["seats"] == SEATS
    assert {row["policy_id"] for row in tuned["executed"]}
    table = json.dumps(TABLE.spelled_out())
    simulated = door.json("simulate", "--policy", table, arrivals="clients:1,3")
    assert [row["load"] for row in simulated["loads"]] == [*LOADS]
    outputs = []
    for clients in (1, 3):
        name = tmp_path / f"texts-{clients}.jsonl"
        ran = door.json("run", "--policy", table, **said, concurrency=clients, outputs=name)
        outputs.append(name.read_text())
        assert ran["rounds"] < ran["emitted_tokens"]
        assert ran.get("concurrency", 1) == clients
        assert ran["latency"]
    assert outputs[0] == outputs[1]
    again = door.json("record", **said, gamma_max=4, concurrency=3, fresh=True)
    assert again["n_requests"] == 18
    refused = door.refused(
        "run", "--policy", '{"draft": "near", "window": {"kind": "q_learning"}}', **said,
        concurrency=2,
    )  # fmt: skip
    assert "learns from one request to the next; it decodes one request at a time" in refused
    assert "name whose traffic is meant" in door.refused("tune", **said, arrivals="recorded")
