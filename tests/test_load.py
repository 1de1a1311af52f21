"""Tuning under a load, by command: search in simulation, race and confirmation on an engine,
publication, the stored study and its page."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from agent_folder import PAIR, Agent
from browser import browser, laid_out
from databases import opened
from doors import Door
from served_traces import (
    COSTS,
    RULES,
    record_server,
    recorded,
    simulated,
    tables,
    trace_of,
    window,
)
from sqlalchemy import select

from spectune.api import simulate
from spectune.db import upgrade
from spectune.engines.abilities import VLLM
from spectune.engines.engine import Answered, Load, Prompt, Wanted
from spectune.engines.vllm.follow import Follower
from spectune.optimizer.commands.load import contexts_in_words
from spectune.optimizer.replay.loads import Objective, Served
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.serving import Simulated
from spectune.optimizer.tuning.engine_bench import EngineBench, engine_bench
from spectune.optimizer.tuning.load_search import TokenStudy
from spectune.optimizer.tuning.timings import TIE
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    ByLoadWindow,
    FixedWindow,
    Policy,
    parse_policy,
)
from spectune.traces.errors import EngineError
from spectune.traces.store.confirmations import count_confirmation
from spectune.traces.tables import Run

BY_LOAD = '{"draft": "small", "window": {"kind": "by_load", "gamma": {"1": 6, "4": 2}}}'
TUNE = "tune --engine vllm --arrivals"
APART = re.compile(r"warning: \d+ of \d+ rounds that were served with draft 'small' differ from")
FEW = ("--trials", 12)
"""Tables that are tried: what is found is seeded with the best constants."""


@pytest.fixture(scope="module")
def recorded_server(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("server") / "traffic.db")
    record_server(url)
    return url


@pytest.fixture
def server(recorded_server: str, tmp_path: Path) -> Door:
    shutil.copy(recorded_server, tmp_path / "traffic.db")
    return Door(str(tmp_path / "traffic.db"))


def test_a_policy_is_simulated_under_load_by_command(server: Door, tmp_path: Path) -> None:
    asked = ("simulate", "--policy", BY_LOAD)
    told = server.json(*asked, "--engine", "vllm", "--arrivals", "clients:1,8", "--tpot", "40ms")
    alone, crowded = told["loads"]
    assert [one["load"] for one in (alone, crowded)] == ["clients:1", "clients:8"]
    assert (alone["mean_batch"], told["engine"], told["max_num_seqs"]) == (1.0, "vllm", 8)
    assert crowded["tokens_per_s"] > alone["tokens_per_s"]
    assert told["costs"]["median_error"] < 0.05
    assert [one["off"] for one in (alone, crowded)] == [None, None]  # it was always loaded
    assert 0 < alone["loaded_0_tokens"]["tokens_per_s"] != alone["tokens_per_s"]
    again = server.json(*asked, "--arrivals", "poisson:40", "--limit", "500")
    assert again["loads"][0]["requests"] == 500
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP\n1\n41\n")
    assert "in which unit: say --set load.unit=s or =ms" in server.refused(*asked, arrivals=file)
    at = (*asked, "--arrivals", file, "--set", "load.unit=s")
    assert "2 arrivals in 40 s" in server.call(*at, "--tpot", "40ms").stderr
    said = server.call(*asked, "--arrivals", "clients:12").stderr
    assert APART.match(said)
    assert "had 8 seats (max_num_seqs): of 12 clients the others wait" in said
    fsm, seven = '{"draft": "small", "window": {"kind": "fsm"}}', window(7).model_dump_json()
    for wanted, more, said in (
        (fsm, "--arrivals clients:2", "vLLM cannot run a window of kind"),
        (seven, "--arrivals clients:2", "recorded drafted 0 to 6"),
        (BY_LOAD, "--arrivals poisson:-1", "no number above 0"),
        (BY_LOAD, "--arrivals clients:2 --tpot 40", "such as 30s, 5m, 24h or 500ms"),
    ):
        assert said in server.error("simulate", "--policy", wanted, *more.split())


def test_drafts_that_no_server_ran_are_not_judged(tmp_path: Path) -> None:
    """`record --engine` serves without a draft: nothing then says what one costs."""
    door = Door(str(tmp_path / "plain.db"))
    upgrade(f"sqlite:///{door.db}")
    asked = ("tune", "--engine", "vllm", "--arrivals", "clients:1,8")
    assert "nothing that it served was recorded" in door.error(*asked)
    record_server(str(door.db), gammas=())
    said = door.error(*asked)
    assert "no steps that draft were recorded, so no draft can be judged" in said
    told = door.call("simulate", "--policy", "autoregressive", "--arrivals", "clients:1,8").stderr
    assert "clients:1: 100% of its steps are of more or fewer requests" in " ".join(told.split())


def test_a_search_is_stored_and_says_what_is_not_known(server: Door) -> None:
    told = server.json(*TUNE.split(), "clients:1,3,8", *FEW)
    assert [load["off"] for load in told["loads"]] == [None] * 3
    assert all(load["loaded_0_tokens"]["tokens_per_s"] > 0 for load in told["loads"])
    low, middle, high = told["contexts"]["tokens"]
    assert high > 2 * low
    assert told["contexts"]["tried_from"] == round(middle)
    assert told["contexts"]["relative"] == pytest.approx(1, abs=0.5)
    assert "medium" in told["drafts_not_served"]
    shares = [load["relative"] for load in told["loads"]]
    assert sum(shares) >= 3 * (1 - TIE)
    with opened(server.db) as store:
        study = store.get_study(told["study"])
    assert study.n_trials == told["simulated"] > 7
    assert study.document["load"] == ["clients:1", "clients:3", "clients:8"]
    last = server.call(*TUNE.split(), "clients:1,8", "--limit", "40", *FEW)
    # Drafts as they are stored here are not those that were served.
    assert APART.match(last.stderr), "before anything else"
    shown = " ".join(last.output.split())
    assert "off (no draft loaded): not measured: restart vLLM without the draft" in shown
    what, command = last.stdout.splitlines()[-2:]
    assert what == "# publishes it"
    words = shlex.split(command)
    assert words[:3] == ["spectune", "--db", str(server.db)]
    assert server.json(*words[3:])["version"] == 1, "nothing else names the pair of the recording"


def test_options_that_say_nothing_of_a_load_are_named(server: Door, tiny_pair: Path) -> None:
    for more, said in (
        ("--objective goodput", "needs ttft or tpot"),
        (f"--pair {tiny_pair}", "nothing of pair"),
    ):
        assert said in server.refused(*TUNE.split(), "clients:1", *more.split())
    told = " ".join(
        server.call(*TUNE.split(), "clients:1", "--quick", "--threads", 1, *FEW).stderr.split()
    )
    assert "--quick (acts on the native decoder)" in told
    assert "--set threads (acts on the native decoder or where policies are executed)" in told
    assert "say --arrivals" in server.refused("tune", "--engine", "vllm")


def made_up_search(
    best: dict[tuple[int, int], int], near: dict[tuple[int, int], float]
) -> tuple[ByLoadWindow | FixedWindow, TokenStudy]:
    """The window found, and the study, where speeds are made up: for so many clients with such
    contexts so many tokens are ``best``; others, by clients and tokens, lose what ``near`` says, or
    much."""

    class MadeUp(EngineBench):
        search_trace = None  # type: ignore[assignment]

        def simulate_loads(self, policy: Policy, trace: object) -> dict[str, Simulated]:
            loads = {}
            for (clients, context), tokens in best.items():
                by_context = tables(policy, RULES)
                table = by_context[max(least for least in by_context if least <= context)]
                loss = near.get((clients, table[clients]), 0.1 * abs(table[clients] - tokens))
                done = np.array([1.0 / (1.0 - loss)])
                served = Served(np.zeros(1), done / 2, done, np.array([100]))
                one = {"batches": np.array([clients]), "counts": np.ones((1, 3), np.int64)}
                one["contexts"] = np.array([float(context)])
                loads[f"{clients}/{context}"] = SimpleNamespace(served=served, **one)
            return cast(dict[str, Simulated], loads)

    costs = SimpleNamespace(passes={"small": (0, 5)}, beyond=lambda draft, batches: 0.0)
    costs.of = lambda draft, gammas: COSTS
    loads = {f"{clients}/{context}": Load(clients) for clients, context in best}
    trace = SimpleNamespace(prompts=np.array([9]), offsets=np.array([0, 9]))
    values: Any = (None, VLLM, RULES, costs, trace, None, loads, Objective(), 1)
    study = TokenStudy(MadeUp(*values), num_trials=100)
    window = study.run().policy.window
    assert isinstance(window, (ByLoadWindow, FixedWindow))
    return window, study


@pytest.mark.parametrize(
    ("best", "near", "table"),
    [
        ({1: 4, 2: 3, 4: 1, 8: 1}, {(2, 4): 0.005, (2, 2): 0.005}, {1: 4, 4: 1}),
        ({1: 4, 2: 3, 4: 1, 8: 1}, {(2, 4): 0.03, (2, 2): 0.03}, {1: 4, 2: 3, 4: 1}),
        ({1: 0, 2: 3, 4: 3, 8: 3}, {(1, 3): 0.009}, 3),
        # Of no draft a tie is enough.
        ({1: 4, 2: 3, 4: 2, 8: 1}, {(n, 0): 0.009 for n in (1, 2, 4, 8)}, 0),
    ],
)
def test_a_table_has_no_entry_that_its_costs_cannot_tell(
    best: dict[int, int], near: dict[tuple[int, int], float], table: Any
) -> None:
    """What loses less than 1% is left out."""
    window, _ = made_up_search({(clients, 90): tokens for clients, tokens in best.items()}, near)
    assert window.model_dump()["gamma"] == table
    assert isinstance(window, FixedWindow) or not window.contexts


@pytest.mark.parametrize(
    ("best", "near", "gamma", "contexts"),
    [
        ({(1, 50): 1, (1, 500): 5}, {}, {1: 1}, {275: {1: 5}}),
        ({(1, 50): 1, (1, 500): 5, (2, 500): 5}, {}, {1: 1}, {500: {1: 5}}),
        # Contexts that are alike have one table.
        ({(1, 50): 1, (1, 90): 5}, {}, 3, None),
        # So have contexts whose own tables are within a tie of it.
        ({(1, 50): 1, (1, 500): 5}, {(1, 3): 0.005}, 3, None),
    ],
)
def test_a_table_of_its_own_for_longer_contexts_where_that_pays(
    best: dict[tuple[int, int], int], near: dict[tuple[int, int], float], gamma: Any, contexts: Any
) -> None:
    window, study = made_up_search(best, near)
    document = window.model_dump()
    assert (document["gamma"], document.get("contexts")) == (gamma, contexts)
    gain = study.gain_by_context
    assert (gain is not None and gain > 1.01) == (contexts is not None)


def test_tables_by_context_that_lose_are_told_as_such() -> None:
    """Where one number is best at every context, what differs by context is slower."""
    window, study = made_up_search({(1, 50): 3, (1, 500): 3}, {})
    gain = study.gain_by_context
    assert (window, gain) == (FixedWindow(gamma=3), pytest.approx(0.9**0.5))
    about = {"tokens": (50.0, 275.0, 500.0), "tried_from": 275, "relative": gain}
    assert contexts_in_words(about).endswith("from 275 tokens on is worth -5.1%, as predicted.")


@cache
def texts_that_were_recorded() -> ReplayTrace:
    """Those of :func:`served_traces.record_server`."""
    return trace_of(40, budget=70)


class Simulating:
    """An engine that answers at once what the simulator says of those texts, a little faster or
    slower each time, and ``drafting`` times as slow with a draft."""

    engine, version, serving = VLLM, "0.32.0", dict[str, Any]()
    runs_on: ClassVar = {"device": "cuda", "dtype": "bfloat16"}

    def __init__(self, noise: np.random.Generator, drafting: float = 1.0) -> None:
        self.noise, self.drafting, self.trace = noise, drafting, texts_that_were_recorded()
        texts = self.trace.trajectories
        self.place = {tuple(t.prompt_ids[:-1].tolist()): n for n, t in enumerate(texts)}

    def execute(
        self, prompts: Sequence[Prompt], policy: Policy, load: Load, **_: Any
    ) -> Iterator[Answered]:
        if len(prompts) == 1:  # before what counts
            return
        trace = self.trace.select([self.place[prompt.ids] for prompt in prompts])
        pace = float(np.exp(self.noise.normal(0, 0.002)))
        pace *= self.drafting if policy.speculates else 1.0
        served = recorded(trace, simulated(trace, policy, load), policy)
        for prompt, request in zip(prompts, served, strict=True):
            steps = (
                s._replace(arrived_s=s.arrived_s * pace, ended_s=s.ended_s * pace)
                for s in request.steps
            )
            yield Answered(replace(request.trajectory, request_id=prompt.id), tuple(steps))

    def close(self) -> None:
        pass


@pytest.fixture
def executing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Wanted]:
    """An engine that cannot copy from prompts; how it was started."""
    noise, started = np.random.default_rng(1), list[Wanted]()
    drafting = getattr(request, "param", 1.0)

    def start(_name: str, _spec: PairSpec, wanted: Wanted) -> Simulating:
        started.append(wanted)
        if wanted.draft == "ngram":
            raise EngineError("it cannot load ngram")
        return Simulating(noise, drafting)

    monkeypatch.setattr("spectune.optimizer.tuning.load_bench.start", start)
    return started


EXECUTE = (*TUNE.split(), "clients:1,8", "--limit", 24, "--serve", "--budget", "2s", *FEW)
NO_PAGE = ("--set", "report=none")


def test_what_is_confirmed_on_texts_held_out_is_published_with_a_page(
    server: Door, executing: list[Wanted], tmp_path: Path
) -> None:
    """In the engine's deployment, once: what is in force is then what is to be beaten."""
    told = server.json(*EXECUTE, "--threads", 1)
    assert {wanted.threads for wanted in executing} == {1}
    with opened(server.db) as store:
        info = store.get_recording(told["recording"])
        bench = engine_bench(store, info, [], "clients:1,8", Objective())
        with store.database.read() as session:
            runs = session.scalars(select(Run)).all()
        kept = store.active_publication(read_pair("demo").id, "cpu", "vllm")
        held = [bench.ordinals[text] for text in bench.parts.confirm]
        counted = [count_confirmation(store, info.id, held) for _ in range(2)]
        fitted_to = [bench.ordinals[text] for text in bench.parts.search]
        assert count_confirmation(store, info.id, fitted_to) == 0
    parts = [{*numbers} for numbers in bench.parts]
    assert not parts[0] & parts[1]
    assert not (parts[0] | parts[1]) & parts[2]
    confirmed, winner = told["confirmed"], told["winner"]["id"]
    assert confirmed["holds"]
    assert confirmed["id"] == winner
    low, high = confirmed["interval"]
    assert 1.01 < low < confirmed["ratio"] < high
    assert told["published"] == {"version": 1, "policy": winner, "deployment": "vllm"}
    assert told["earlier_confirmations"] == 0
    assert counted == [1, 2]
    assert told["baselines"]["incumbent"]["id"] == AUTOREGRESSIVE.id
    # No server without a draft was recorded: nothing is predicted of one, and it is executed.
    loads = {one["label"]: one["loads"] for one in told["executed"]}
    for label, is_predicted in (("autoregressive", False), ("small fixed(gamma=0)", True)):
        assert [load["load"] for load in loads[label]] == ["clients:1", "clients:8"]
        assert [load["predicted"] is not None for load in loads[label]] == [is_predicted] * 2
    assert told["texts"]["differ"] == 0
    assert told["texts"]["repeats_differ"] == 0
    assert {run.policy_id for run in runs} == {one["policy_id"] for one in told["executed"]}
    assert kept is not None
    assert kept.sampling is not None
    assert (kept.reason, kept.sampling["temperature"]) == (told["reason"], 0)
    page = tmp_path / "page.html"
    server.json("report", told["study"], "--out", page)
    text = page.read_text()
    assert "under clients:1, clients:8" in text
    assert "clients:8" in text
    assert browser() is None or laid_out({"under load": text}, tmp_path)[1] == []
    again = server.json(*EXECUTE, *NO_PAGE)
    assert again["published"] is None
    assert again["baselines"]["incumbent"]["id"] == winner
    in_force = "simulate --policy active --arrivals clients:8"
    assert server.json(in_force)["policy_id"] == winner
    assert simulate("active", db=server.db)["policy_id"] == winner


@pytest.mark.parametrize("executing", [3.0], indirect=True)
@pytest.mark.usefixtures("executing")
def test_no_draft_is_published_where_that_is_proved_faster_than_what_was_in_force(
    server: Door,
) -> None:
    """Not before something was: what servers draft by themselves was not measured."""
    shown = " ".join(server.call(*EXECUTE, *NO_PAGE).output.split())
    assert "No faster policy was confirmed. Nothing changes in deployment vllm on cpu" in shown
    assert "what servers of deployment vllm draft by themselves is not known: this" in shown
    assert "nothing is published, and servers of vllm go on as they were started" in shown
    there = ("--pair", "demo", "--deployment", "vllm")
    with opened(server.db) as store:
        assert store.list_publications() == ()
    server.json("policies", "activate", window(3).model_dump_json(), *there)
    told = server.json(*EXECUTE, *NO_PAGE)
    assert not parse_policy(told["winner"]["policy"]).speculates
    assert told["published"] == {
        "version": 2, "policy": told["winner"]["id"], "deployment": "vllm"
    }  # fmt: skip
    assert "not known" not in told["reason"]


def test_what_cannot_run_is_not_what_is_to_be_beaten(server: Door, executing: list[Wanted]) -> None:
    """A tree in force is said and passed over; a window that was never served is executed without a
    prediction; a draft that the engine cannot load is found at its first start."""
    tree, wide = '{"draft": "small", "growth": {"kind": "top_k"}}', window(7).model_dump_json()
    copied = '{"draft": "ngram", "window": {"kind": "fixed", "gamma": 2}}'
    for policy, name in ((tree, "trees"), (wide, "wide"), (copied, "copied")):
        server.json("policies", "activate", policy, "--pair", "demo", "--deployment", name)
    told = server.json(*EXECUTE, *NO_PAGE, "--no-publish", "--deployment", "trees")
    assert "cannot run (vLLM cannot run trees" in told["reason"]
    assert told["baselines"]["incumbent"]["id"] == AUTOREGRESSIVE.id
    assert told["published"] is None
    told = server.json(*EXECUTE, *NO_PAGE, "--no-publish", "--deployment", "wide")
    assert told["baselines"]["incumbent"]["predicted_tokens_per_s"] is None
    executing.clear()
    assert "it cannot load ngram" in server.error(*EXECUTE, "--deployment", "copied")
    assert [wanted.draft for wanted in executing] == ["ngram"]


@pytest.mark.usefixtures("executing")
def test_a_load_is_tuned_on_a_schedule(server: Door) -> None:
    at = ["--cron", "@daily", "--now", "--pair", "demo", "--budget", "4s", "--limit", "24", *FEW]
    how = ("--engine", "vllm", "--arrivals", "clients:1,8")
    said = server.refused("schedule", "add", "load", *at, *how)
    assert "say --rollout, or --serve, with --engine" in said
    server.json("schedule", "add", "load", *at, *how, "--serve")
    server.call("schedule", "run", "--once")
    (row,) = server.json("schedule", "list", "load")["schedules"]
    result = row["attempts"][0]["result"]
    assert result["published"] == 1
    with opened(server.db) as store:
        assert store.get_study(result["study"]).document["load"] == ["clients:1", "clients:8"]
        kept = store.active_publication(read_pair("demo").id, "cpu", "vllm")
    assert kept is not None
    assert (kept.actor, kept.evidence["study"]) == ("schedule", result["study"])
    assert Path(result["report"]).exists()


def test_what_is_searched_for_is_rolled_out_by_hand_and_on_a_schedule(
    server: Door, tmp_path: Path
) -> None:
    """To servers that are followed, without a request sent; a schedule begins it once."""
    how = ("--engine", "vllm", "--arrivals", "clients:1,8", *FEW)
    assert "no server follows deployment vllm" in server.error("tune", *how, "--rollout")
    with opened(server.db) as store:
        Follower(store, Agent(tmp_path / "f").folder, "vllm", print, pair=PAIR).once()
        told = server.json("tune", *how, "--rollout")
        assert told["published"] is None
        begun = store.rollout(told["rollout"]["id"])
        assert begun is not None
        assert (begun.policy_id, begun.verdict) == (told["winner"]["policy"], None)
        server.json(
            "policies", "abort", "--pair", "demo", "--device", "cpu", "--deployment", "vllm"
        )
        at = ("--cron", "@daily", "--now", "--pair", "demo", "--rollout")
        server.json("schedule", "add", "load", *at, *how)
        server.call("schedule", "run", "--once")
        (row,) = server.json("schedule", "list", "load")["schedules"]
        result = row["attempts"][0]["result"]
        (again,) = store.rollouts(is_open=True)
        assert (result["published"], result["rollout"]) == (None, again.id)
        assert (again.actor, again.evidence["study"]) == ("schedule", result["study"])
    native = server.error("tune", "--pair", "demo", "--rollout")
    assert "no server follows deployment default" in native
