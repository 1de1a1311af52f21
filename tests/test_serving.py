"""The serving simulator against a plain one that keeps the books as vLLM's scheduler does, and the
figures it gives."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import scipy.stats
from databases import opened
from doors import Door
from sqlalchemy import LargeBinary, literal, update
from synthetic import policy
from trace_values import a_panorama, a_trajectory

from spectune.engines.abilities import OPENVINO, VLLM, Engine
from spectune.engines.protocol import Answered, Load, Prompt, Running, Wanted, chain_round
from spectune.engines.rules import ServingRules, rules_of
from spectune.optimizer import executed_load
from spectune.optimizer import under_load as under_load_module
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.executed_load import Executed
from spectune.optimizer.on_engine import about_recording
from spectune.optimizer.proven_load import proof_of
from spectune.optimizer.python import simulate
from spectune.optimizer.simulate.chain_tables import AGREE_NONE, AGREE_YES
from spectune.optimizer.simulate.load import Objective, Served, loads_of
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.served_costs import (
    ServedCosts,
    ServedStep,
    _made_by,
    costs_of_engine,
    fit_served,
    served_steps,
)
from spectune.optimizer.simulate.serving import Simulated, serve
from spectune.optimizer.simulate.step_costs import (
    StepCosts,
    StepLoad,
    step_costs,
    step_seconds,
    step_terms,
)
from spectune.optimizer.texts import ComparedTexts
from spectune.optimizer.timings import TIE
from spectune.optimizer.under_load import Search, UnderLoad, under_load
from spectune.runtime.hardware import hardware
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.stops import compile_stop
from spectune.runtime.progress import silent
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import EngineError, PolicyError, TraceError
from spectune.traces.recording import RecordedRequest
from spectune.traces.schema import Sampling, Step, Tokens
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import LatencyProfile, Panorama, Recording

PROFILE = LatencyProfile(
    "pair", "cpu", "float32",
    {
        "step": CostTable((2e-3, 3e-3, 9e-3), ("batch",), ((1.0, 2.0, 8.0),)),
        "step target": CostTable(
            (1e-3, 2e-3, 4e-3, 8e-3, 9e-3, 13e-3), ("rows", "context"),
            ((1.0, 8.0, 32.0), (0.0, 500.0)),
        ),
        "step prompts": CostTable((0.0, 3e-3), ("rows",), ((0.0, 50.0),)),
        "step draft/small": CostTable(
            (1e-3, 2e-3, 2e-3, 4e-3, 6e-3, 9e-3), ("passes", "batch"),
            ((0.0, 1.0, 6.0), (1.0, 8.0)),
        ),
        "step draft prompts/small": CostTable((0.0, 1e-3), ("rows",), ((0.0, 50.0),)),
    },
)  # fmt: skip
COSTS = step_costs(PROFILE, "small")


def trace_of(count: int, none: float = 0.0, budget: int = 0) -> ReplayTrace:
    """Texts of an engine from their second token on: of 2 to 60 tokens, of one budget or each of
    its own, a half of which ends before."""
    rng = np.random.default_rng(count)
    made = []
    for i in range(count):
        t = a_trajectory(i, n=int(rng.integers(1, 60)))
        prompt = rng.integers(0, 4096, int(rng.integers(2, 90))).astype(np.int32)
        most = budget or len(t.output_ids) + 9 * (i % 2)
        made.append(replace(t, tokens=Tokens(prompt, t.output_ids), max_new_tokens=most))
    return ReplayTrace(made, {"small": [a_panorama(t, "small", none=none) for t in made]})


window = partial(policy, "small")


def tables(policy: Policy, rules: ServingRules) -> tuple[int, ...]:
    return VLLM.gammas(policy, draft="small", most=64, max_num_seqs=rules.max_num_seqs)


@dataclass
class Booked:
    """A request as vLLM's books have it."""

    name: int
    prompt: int
    length: int
    budget: int
    agree: list[int]
    arrived: float
    computed: int = 0
    placeholders: int = 0
    spec: int = 0
    out: int = 0
    first: float = -1.0
    finished: float = -1.0


@dataclass
class Oracle:
    """A server step by step: lists and sums, nothing shared with the simulator but the cost of a
    step."""

    rules: ServingRules
    gammas: tuple[int, ...]
    costs: StepCosts
    waiting: list[Booked] = field(default_factory=list)
    running: list[Booked] = field(default_factory=list)
    members: list[tuple[int, int, int]] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)

    def schedule(self) -> list[tuple[Booked, int, int]]:
        budget = given = self.rules.max_batched_tokens
        scheduled: list[tuple[Booked, int, int]] = []
        for r in list(self.running):
            if budget <= 0 or given <= self.rules.draft_slots:
                break
            if r.placeholders and r.computed + 2 - r.placeholders >= r.prompt + r.budget:
                continue
            spec = r.spec
            if not r.placeholders and r.computed >= r.prompt:  # the draft's own proposals are known
                spec = min(spec, self.proposals(r))
            new = r.prompt + r.out + spec + r.placeholders - r.computed
            if not self.rules.drafts_after and r.computed >= r.prompt:
                new = min(new, r.budget - r.out)  # no more than the request may still have
            room = given - self.rules.draft_slots, self.rules.max_len - r.computed - 1
            new = min(new, budget, *room)
            if new <= 0:
                continue
            drafted = -1
            if r.computed + new >= r.prompt:
                drafted = max(0, new + r.computed - r.prompt - r.out - r.placeholders)
            scheduled.append((r, new, drafted))
            budget, given, r.spec = budget - new, given - new - self.rules.draft_slots, 0
        while (
            self.waiting
            and budget > 0
            and given > self.rules.draft_slots
            and len(self.running) < self.rules.max_num_seqs
        ):
            r = self.waiting.pop(0)
            self.running.append(r)
            new = min(r.prompt, budget, given - self.rules.draft_slots)
            scheduled.append((r, new, 0 if new == r.prompt else -1))
            budget, given = budget - new, given - new - self.rules.draft_slots
        return scheduled

    def proposals(self, r: Booked) -> int:
        at = r.agree[r.out :]
        left = next((i for i, a in enumerate(at) if a != AGREE_YES), None)
        return left if left is not None and at[left] == AGREE_NONE else 999

    def seconds(self, scheduled: list[tuple[Booked, int, int]]) -> float:
        reading = [r.computed < r.prompt for r, *_ in scheduled]
        prompts = sum(new for (_, new, _), read in zip(scheduled, reading, strict=True) if read)
        rows = sum(new for _, new, _ in scheduled) - prompts
        context = sum(
            r.computed if read else r.prompt + r.out - 1
            for (r, *_), read in zip(scheduled, reading, strict=True)
        )
        drafted = max(0, *(d for *_, d in scheduled))
        passes = self.gammas[len(scheduled)] if self.rules.drafts_after else drafted
        self.steps.append([len(scheduled), rows, prompts, context, passes])
        load = StepLoad("small", rows, prompts, len(scheduled), context, passes)
        return sum(
            count
            * float(PROFILE.terms[term].at(rows=rows, context=context, passes=passes, batch=batch))
            for term, count, rows, context, passes, batch in step_terms(load)
        )

    def after_schedule(self, scheduled: list[tuple[Booked, int, int]]) -> None:
        for r, new, drafted in scheduled:
            r.computed += new
            self.members.append((len(self.steps) - 1, r.name, drafted))
            if drafted >= 0:
                r.placeholders += 1 + drafted
                r.spec = self.gammas[len(scheduled)]

    def update(self, scheduled: list[tuple[Booked, int, int]], now: float) -> list[Booked]:
        ended = []
        for r, _, drafted in scheduled:
            if r.finished >= 0 or drafted < 0:
                continue
            ahead = r.agree[r.out : min(r.length, r.out + drafted)] if r.out else []
            accepted = [*(a == AGREE_YES for a in ahead), False].index(False)
            r.computed -= drafted - accepted
            r.placeholders -= drafted + 1
            r.out = min(r.length, r.out + accepted + 1)
            r.first = now if r.first < 0 else r.first
            if r.out == r.length:
                r.finished = now
                ended.append(r)
        self.running = [r for r in self.running if r.finished < 0]
        return ended

    def serve(self, every: list[Booked], clients: int) -> None:
        coming, sent, now, busy = list(every), len(every), 0.0, 0.0
        if clients:
            sent = min(clients, len(every))
        flying: list[tuple[float, list[tuple[Booked, int, int]]]] = []
        while True:
            while coming and coming[0].name < sent and coming[0].arrived <= now:
                self.waiting.append(coming.pop(0))
            scheduled = self.schedule()
            if scheduled:
                busy = max(now, busy) + self.seconds(scheduled)
                self.after_schedule(scheduled)
                flying.append((busy, scheduled))
                if len(flying) <= self.rules.ahead:
                    continue
            if not flying:
                if not coming or coming[0].name >= sent:
                    return
                now = max(now, coming[0].arrived)
                continue
            end, scheduled = flying.pop(0)
            now = max(now, end)
            for _ in self.update(scheduled, now):
                if clients and sent < len(every):
                    every[sent].arrived = max(now, every[sent - 1].arrived) + self.rules.reply_s
                    sent += 1


def by_oracle(
    trace: ReplayTrace, policy: Policy, load: Load, rules: ServingRules
) -> tuple[Oracle, list[Booked]]:
    oracle = Oracle(rules, tables(policy, rules), COSTS)
    count, every = len(load.arrivals) or len(trace.order), []
    for i in range(count):
        t = trace.trajectories[int(trace.order[i % len(trace.order)])]
        chains = trace.chains["small"]
        begin = int(trace.offsets[trace.order[i % len(trace.order)]])
        agree = [0, *chains.agree[begin : begin + len(t.output_ids)].tolist()]
        arrived = load.arrivals[i] if load.arrivals else i * rules.reply_s
        lengths = len(t.prompt_ids) - 1, len(t.output_ids) + 1, t.max_new_tokens + 1
        every.append(Booked(i, *lengths, agree, arrived))
    oracle.serve(every, 0 if load.arrivals else load.clients)
    return oracle, every


RULES = ServingRules(max_num_seqs=8, max_batched_tokens=512, max_len=400, reply_s=1e-4)
NARROW = RULES._replace(draft_slots=1, max_len=0)


def poisson(rate: float, count: int = 60) -> Load:
    gaps = np.random.default_rng(0).exponential(1 / rate, count)
    return Load(arrivals=tuple(np.cumsum(gaps).tolist()))


@pytest.mark.parametrize(
    ("rules", "load", "gamma", "none"),
    [
        (RULES, Load(1), 4, 0.0),
        (RULES, Load(8), {"1": 5, "4": 3, "6": 0}, 0.0),
        (RULES, Load(13), {"1": 2, "3": 6}, 0.1),
        (RULES, poisson(20.0), {"1": 5, "4": 1}, 0.0),
        (RULES, poisson(90.0), 0, 0.0),
        (RULES._replace(max_batched_tokens=48, draft_slots=1), poisson(60.0), 6, 0.0),
        (NARROW._replace(max_batched_tokens=23), Load(6), {"1": 6, "5": 2}, 0.1),
        (RULES._replace(ahead=1), Load(8), {"1": 5, "4": 3, "7": 0}, 0.0),
        (NARROW._replace(ahead=1, max_batched_tokens=37), poisson(70.0), 5, 0.0),
        (RULES._replace(drafts_after=False), poisson(50.0), {"1": 5, "4": 1}, 0.1),
    ],
)
def test_every_step_is_the_plain_simulators(
    rules: ServingRules, load: Load, gamma: Any, none: float
) -> None:
    trace = trace_of(40, none)
    policy = window(gamma)
    if not rules.max_len:  # texts end at the engine's limit, before which fewer tokens are drafted
        rules = rules._replace(max_len=trace.max_context)
    found = serve(trace, policy.draft, tables(policy, rules), load, rules, COSTS, members=True)
    oracle, every = by_oracle(trace, policy, load, rules)
    assert found.members.tolist() == [list(m) for m in oracle.members]
    assert found.steps.tolist() == oracle.steps
    assert len(found.steps) > 50
    np.testing.assert_allclose(found.served.first_s, [r.first for r in every], rtol=1e-9)
    np.testing.assert_allclose(found.served.finished_s, [r.finished for r in every], rtol=1e-9)
    np.testing.assert_allclose(found.served.arrived_s, [r.arrived for r in every], rtol=1e-9)


def simulated(trace: ReplayTrace, policy: Policy, load: Load) -> Simulated:
    gammas = tables(policy, RULES)
    return serve(trace, policy.draft, gammas, load, RULES, COSTS, members=True)


def recorded(
    trace: ReplayTrace, found: Simulated, policy: Policy, at: float = 1e-6
) -> list[RecordedRequest]:
    """What an engine would have recorded of a simulation: each request with its rounds."""
    words = trace.outcomes(policy, compile_stop(policy.stop))[0]
    steps: list[list[Step]] = [[] for _ in found.counts]
    for step, request, drafted in found.members.tolist():
        t, out = (
            int(trace.order[request % len(trace.order)]),
            sum(s.emitted for s in steps[request]),
        )
        left = len(trace.trajectories[t].output_ids) + 1 - out
        if drafted < 0 or left < 1:
            continue
        kept = min(drafted, int(words[trace.offsets[t] + out - 1]) & 255 if out else 0)
        times = {
            "arrived_s": at + float(found.served.arrived_s[request]),
            "ended_s": at + float(found.ends_s[step]),
            "round_s": 0.01,
        }
        done = chain_round(
            out, drafted, kept, min(left, kept + 1), draft="small", policy="", **times
        )
        steps[request].append(done._replace(batch=int(found.steps[step, 0])))
    made = []
    for i, own in enumerate(steps):
        t = trace.trajectories[int(trace.order[i % len(trace.order)])]
        output = np.concatenate((t.prompt_ids[-1:], t.output_ids))
        whole = replace(t, tokens=Tokens(t.prompt_ids[:-1], output))
        assert sum(s.emitted for s in own) == len(whole.output_ids)
        made.append(RecordedRequest(i, whole, steps=tuple(own)))
    return made


@pytest.fixture(scope="module")
def fitted() -> ServedCosts:
    """Costs fitted to what a server recorded that drafted 0, 2 and 6 tokens, one to twelve
    clients."""
    trace, steps = trace_of(40), list[ServedStep]()
    for gamma in (0, 2, 6):
        for clients in (1, 3, 12):
            found = simulated(trace, window(gamma), Load(clients))
            steps += served_steps(recorded(trace, found, window(gamma)), RULES)
    kept = [(load._replace(draft="small"), seconds) for load, seconds in steps]
    return fit_served(kept, "pair", "cpu", "float32", "`profile`")


def test_costs_fitted_to_served_steps_predict_a_table_that_was_never_served(
    fitted: ServedCosts,
) -> None:
    trace = trace_of(40)
    for gamma in ({"1": 6, "3": 4, "7": 1}, 3, 0):
        gammas = tables(window(gamma), RULES)
        for load in (Load(5), poisson(30.0)):
            true = serve(trace, "small", gammas, load, RULES, COSTS)
            told = serve(trace, "small", gammas, load, RULES, fitted.of("small", gammas))
            assert told.served.tokens_per_s == pytest.approx(true.served.tokens_per_s, rel=0.02)
            assert told.served.mean_tpot_s == pytest.approx(true.served.mean_tpot_s, rel=0.03)
    assert fitted.check["median_error"] < 0.02
    assert abs(fitted.check["total_error"]) < 0.01


def test_prompts_that_are_seldom_read_together_cost_what_their_tokens_do() -> None:
    """Ten steps in two thousand read forty prompts; the smoothness of the costs does not make them
    cheap. A draft that is loaded reads them too, for a fifth of what the target takes."""
    rng = np.random.default_rng(0)
    steps: list[ServedStep] = []
    for n in range(2000):
        batch = int(rng.integers(1, 33))
        prompts = 2000.0 if n % 200 == 0 else float(rng.choice([0, 0, 0, 0, 20, 60, 150]))
        draft = "small" if n % 400 < 200 else ""
        load = StepLoad(draft, 4.0 * batch, prompts, batch, 90.0 * batch, 0)
        noise = float(np.exp(0.15 * rng.standard_normal()))
        per_token = 0.00024 if draft else 0.0002
        steps.append((load, (0.005 + 0.0003 * load.rows + per_token * prompts) * noise))
    costs = fit_served(steps, "pair", "cpu", "float32", "`profile`")
    for draft, per_token in (("", 0.0002), ("small", 0.00024)):
        of = costs.of(draft, [0])
        for prompts in (150.0, 500.0, 1000.0, 2000.0):
            told = step_seconds(of, 64.0, prompts, 16.0, 1440.0, 0.0)
            assert told == pytest.approx(0.005 + 0.0003 * 64 + per_token * prompts, rel=0.08)


def test_what_was_not_served_is_refused_with_what_to_record(fitted: ServedCosts) -> None:
    assert fitted.passes == {"small": (0, 6)}
    with pytest.raises(PolicyError, match=r"draft 7, 8 tokens with 'small' .* drafted 0 to 6"):
        fitted.of("small", [0, 7, 8])
    with pytest.raises(
        PolicyError, match=r"draft 'medium' were recorded .with: small.; serve with"
    ):
        fitted.of("medium", [1])
    with pytest.raises(PolicyError, match=r"without a draft were recorded .* restart it without"):
        fitted.of("", [0])
    with pytest.raises(TraceError, match="0 steps of this engine were recorded with their times"):
        fit_served(served_steps([], RULES), "pair", "cpu", "float32", "`profile`")
    full = RULES._replace(cache_tokens=300)
    with pytest.raises(TraceError, match="need more than the 300 tokens of the engine's cache"):
        serve(trace_of(40), "small", (0,) * 9, Load(8), full, COSTS)
    assert rules_of("vllm", {"max_num_seqs": 3, "other": 1}).max_num_seqs == 3
    with pytest.raises(TraceError, match="'native', which serves one request at a time"):
        rules_of("native")


def test_figures_of_what_was_served() -> None:
    served = Served(
        np.array([0.0, 1.0]), np.array([2.0, 2.0]), np.array([4.0, 10.0]), np.array([5, 1])
    )
    told = served.to_json(Objective("goodput", 1.0, 0.6))
    assert (told["requests"], told["tokens"]) == (2, 6)
    assert (told["seconds"], told["tokens_per_s"]) == (10.0, 0.6)
    assert told["time_to_first_token_s"]["mean"] == 1.5
    assert told["time_per_output_token_s"] == {"mean": 0.5, "p50": 0.5, "p95": 0.5, "p99": 0.5}
    assert told["latency_s"]["p50"] == 6.5
    limits = {(1.0, None): 0.1, (2.0, 0.5): 0.2, (2.0, 0.4): 0.1, (0.5, None): 0.0}
    for most, good in limits.items():
        assert served.goodput(Objective("goodput", *most)) == good


def test_arrivals_as_they_are_asked_for(tmp_path: Path) -> None:
    trace = trace_of(5)
    requests = recorded(trace, simulated(trace, window(0), Load(2)), window(0))
    assert loads_of("clients:1,4", requests, 5) == {"clients:1": Load(1), "clients:4": Load(4)}
    fast = loads_of("poisson:2,8", requests, 400)
    assert len(fast["poisson:8"].arrivals) == 400
    assert 400 / fast["poisson:8"].arrivals[-1] == pytest.approx(8, rel=0.2)
    np.testing.assert_allclose(fast["poisson:2"].arrivals, np.array(fast["poisson:8"].arrivals) * 4)
    again = loads_of("recorded", requests, 5)["recorded"].arrivals
    assert again[:2] == pytest.approx((0.0, RULES.reply_s))
    file, moments = tmp_path / "a@b.csv", ("03.9799600", "05.9799600", "04.47996")
    rows = "".join(f"2023-11-16 18:17:{m}+00:00,1\n" for m in moments)
    file.write_text(f"TIMESTAMP,ContextTokens\n{rows}")
    assert loads_of(str(file), requests, 5)[str(file)].arrivals == pytest.approx((0.0, 0.5, 2.0))
    faster = loads_of(f"{file}@3", requests, 5, 2)[f"{file}@3"].arrivals
    assert faster == pytest.approx((0.0, 2 / 3))
    for asked, said in (
        ("clients:0", "no number above 0"),
        ("poisson:x", "no number above 0"),
        ("nowhere.csv", "no such file"),
    ):
        with pytest.raises(TraceError, match=said):
            loads_of(asked, requests, 5)
    for text in ("when\n1\n", "TIMESTAMP\n1\nnan\n", "TIMESTAMP\n1\ninf\n"):
        file.write_text(text)
        with pytest.raises(TraceError, match=r"a@b\.csv(:3)?: .*needs a column TIMESTAMP"):
            loads_of(str(file), requests, 5)
    with pytest.raises(TraceError, match="was not recorded"):
        loads_of("recorded", [replace(requests[0], steps=())], 5)


AZURE = "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6805900,374\n2023-11-16 18:15:48.1805900,9\n"
BURST = "Timestamp,Model,Request tokens\n5,ChatGPT,472\n45,GPT-4,1087\n"
MOON = '{"timestamp": 0, "input_length": 7, "hash_ids": [0]}\n{"timestamp": 3000, "hash_ids": []}\n'
MIXED = "TIMESTAMP\n2024-05-10 00:00:00+00:00\n2024-05-10 00:00:01.5\n"
TRACES = (
    ("\ufeff" + AZURE, 1.5, "of 'TIMESTAMP', dates"),
    (MIXED, 1.5, "dates"),
    (BURST, 40.0, "of 'Timestamp', numbers in s"),
    (MOON, 3.0, "of 'timestamp', numbers in ms"),
    ('[{"arrival_time": 1}, {"arrival_time": 3.5}]', 2.5, "numbers in s"),
    ("time_us,n\n0,1\n2500000,1\n", 2.5, "of 'time_us', numbers in us"),
    ("Arrival Time (ms)\n0\n2500\n", 2.5, "numbers in ms"),
    ("TIMESTAMP\n1715299200\n1715299201\n", 1.0, "numbers in s"),
    ("TIMESTAMP\n1715299200000\n1715299201000\n", 1.0, "numbers in ms"),
    ("TIMESTAMP\n1715299200000000000\n1715299201000000000\n", 1.0, "numbers in ns"),
)
NO_TRACES = (
    ("TIMESTAMP\n1\n\n,2\n", "a.csv:4: '' is no date and no number"),
    ("TIMESTAMP\n1\n2024-05-10\n", "'TIMESTAMP' has dates and numbers"),
    ('{"timestamp": 1}\n{"timestamp": null}', "a.csv:2: None is no date and no number"),
    ('{"timestamp": 1}\n5', "a.csv:2: expected an object, not int"),
    ("TIMESTAMP\n", "holds no request"),
)


def test_public_traces_are_read_and_their_unit_is_said(tmp_path: Path) -> None:
    file, said = tmp_path / "a.csv", list[str]()
    for text, span_s, says in TRACES:
        file.write_text(text, encoding="utf-8")
        ((_, load),) = loads_of(str(file), (), 5, tell=said.append).items()
        assert load.arrivals == pytest.approx((0.0, span_s), abs=1e-4), text
        assert f"a.csv: 2 arrivals in {span_s:.6g} s" in said[-1]
        assert says in said[-1]
    for text, says in NO_TRACES:
        file.write_text(text)
        with pytest.raises(TraceError, match=says):
            loads_of(str(file), (), 5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Door:
    """A database with what a server recorded that drafted 0 to 6 tokens for one client and for
    eight."""
    url = str(tmp_path_factory.mktemp("server") / "traffic.db")
    trace, at, ordinal = trace_of(40, budget=70), 1.0, 0
    serving = {"max_num_seqs": 8, "max_batched_tokens": 512, "max_len": 400, "ahead": 0}
    about = {"engine": "vllm", "engine_version": "0.32.0", "serving": serving}
    with opened(url) as store:
        spec = read_pair("demo")
        store.put_pair(spec.id, spec.name, spec.to_json())
        asked = Asked(spec.id, None, Sampling(), 64, options=about, source="serve")
        info = store.create_recording(asked)
        for gamma in (0, 1, 3, 6):
            for clients in (1, 8):
                found = simulated(trace, window(gamma), Load(clients))
                for r in recorded(trace, found, window(gamma), at):
                    text = replace(r.trajectory, request_id=f"r{ordinal}")
                    store.append_trajectory(info.id, ordinal, text, r.steps)
                    panorama = a_panorama(r.trajectory, "small", none=0.0)
                    store.put_panoramas(info.id, [(ordinal, panorama)])
                    ordinal += 1
                at += 10 + float(found.ends_s[-1])
    return Door(url)


def test_a_policy_is_simulated_under_load_by_command(server: Door, tmp_path: Path) -> None:
    policy = '{"draft": "small", "window": {"kind": "by_batch", "gamma": {"1": 6, "4": 2}}}'
    asked = ("simulate", "--policy", policy)
    loads = ("--arrivals", "clients:1,8", "--tpot", "40ms")
    found = server.json(*asked, "--engine", "vllm", *loads)
    alone, crowded = found["loads"]
    assert [one["load"] for one in (alone, crowded)] == ["clients:1", "clients:8"]
    assert (alone["mean_batch"], found["engine"], found["max_num_seqs"]) == (1.0, "vllm", 8)
    assert crowded["tokens_per_s"] > alone["tokens_per_s"]
    assert set(alone["latency_s"]) == {"mean", "p50", "p95", "p99"}
    assert found["costs"]["median_error"] < 0.05
    again = server.json(*asked, "--arrivals", "poisson:40", "--limit", "500")
    assert again["loads"][0]["requests"] == 500
    file = tmp_path / "trace.csv"
    file.write_text(BURST)
    told = server.call(*asked, "--arrivals", file, "--tpot", "40ms")
    assert "2 arrivals in 40 s, of 'Timestamp', numbers in s" in told.stderr
    told = server.call(*asked, "--arrivals", "clients:12")
    assert "had 8 seats (max_num_seqs): of 12 clients the others wait" in told.stderr
    fsm, seven = '{"draft": "small", "window": {"kind": "fsm"}}', window(7).model_dump_json()
    for wanted, more, said in (
        (fsm, "--arrivals clients:2", "vLLM cannot run a window of kind"),
        (seven, "--arrivals clients:2", "recorded drafted 0 to 6"),
        (policy, "--arrivals poisson:-1", "no number above 0"),
        (policy, "--engine openvino --arrivals clients:2", "nothing that it served was recorded"),
        (policy, "--arrivals clients:2 --tpot 40", "write for example 500ms"),
        (policy, "--arrivals clients:2 --per-round x", "--per-round says nothing of a load"),
        (policy, "--arrivals clients:2 --keep-q-table", "--keep-q-table says nothing of a load"),
        (policy, "--tpot 40ms", "--tpot is of requests under a load; say --arrivals too"),
    ):
        assert said in server.error("simulate", "--policy", wanted, *more.split())


def without_a_draft(url: Path, clients: int) -> Door:
    """A database with what a server recorded that had no draft loaded, for so many clients."""
    trace = trace_of(40, budget=70)
    serving = {"max_num_seqs": 8, "max_batched_tokens": 512, "max_len": 400, "ahead": 0}
    about = {"engine": "openvino", "engine_version": "2026.4", "serving": serving}
    with opened(str(url)) as store:
        spec = read_pair("demo")
        store.put_pair(spec.id, spec.name, spec.to_json())
        info = store.create_recording(Asked(spec.id, None, Sampling(), 64, options=about))
        found = simulated(trace, window(0), Load(clients))
        for n, r in enumerate(recorded(trace, found, window(0))):
            steps = [s._replace(draft="") for s in r.steps]
            store.append_trajectory(info.id, n, r.trajectory, steps)
            for draft in spec.draft_names:
                store.put_panoramas(info.id, [(n, a_panorama(r.trajectory, draft))])
    return Door(str(url))


def test_drafts_that_no_server_ran_are_not_judged(tmp_path: Path) -> None:
    """`record --engine` serves without a draft: nothing then says what one costs, and `tune` said
    that not to speculate is best."""
    door = without_a_draft(tmp_path / "plain.db", 8)
    for arrivals in ("clients:1,8", "poisson:4"):
        said = door.error("tune", "--engine", "openvino", "--arrivals", arrivals)
        assert "no steps that draft were recorded, so no draft can be judged" in said
        assert re.search("or have `.*profile --engine openvino.*` serve every draft", said)
    drafted = '{"draft": "small", "window": {"kind": "fixed", "gamma": 2}}'
    assert "no steps of this engine with draft 'small' were recorded" in door.error(
        "simulate", "--policy", drafted, "--arrivals", "clients:8"
    )


def test_loads_of_other_batches_than_were_recorded_are_warned_of(tmp_path: Path) -> None:
    door = without_a_draft(tmp_path / "eight.db", 8)
    asked = ("simulate", "--policy", "autoregressive", "--arrivals")
    said = " ".join(door.call(*asked, "clients:1,8").stderr.split())
    assert "clients:1: 100% of its steps are of more or fewer requests than any" in said
    assert "clients:8: " not in said


def test_a_search_says_what_servers_without_a_draft_do_or_that_it_is_not_known(
    server: Door,
) -> None:
    asked = ("tune", "--engine", "vllm", "--arrivals", "clients:1,8")
    found = server.json(*asked)
    assert [load["off"] for load in found["loads"]] == [None, None]
    assert all(load["loaded_0_tokens"]["tokens_per_s"] > 0 for load in found["loads"])
    assert "medium" in found["drafts_not_served"]
    told = server.call(*asked)
    shown = " ".join(told.output.split())
    assert "off (no draft loaded): not measured: restart vLLM without the draft" in shown
    assert re.search("or `.*profile --engine vllm.*` measures it on a server of its own", shown)
    assert "not judged, as no step with them was recorded: medium" in " ".join(told.stderr.split())


def test_the_command_that_a_search_under_load_prints_last_does_what_it_says(
    server: Door, tmp_path: Path
) -> None:
    """It names the pair, which the search took from the recording."""
    shutil.copy(server.db, tmp_path / "own.db")
    own = Door(str(tmp_path / "own.db"))
    last = own.call("tune", "--engine", "vllm", "--arrivals", "clients:1,8", "--limit", "40")
    what, command = last.stdout.splitlines()[-2:]
    assert what == "# publishes it"
    words = shlex.split(command)
    assert own.json(*words[words.index("policies") :])["version"] == 1


def test_a_table_is_found_for_several_loads(server: Door, tiny_pair: Path, tmp_path: Path) -> None:
    found = server.json("tune", "--engine", "vllm", "--arrivals", "clients:1,3,8")
    shares = [load["relative"] for load in found["loads"]]
    assert min(shares) > 0.97
    assert sum(shares) >= 3 * (1 - TIE) - 1e-3  # as good as each load's own best constant
    for gamma in {load["best"]["gamma"] for load in found["loads"]}:
        asked = ("--policy", window(gamma).model_dump_json(), "--arrivals", "clients:1,3,8")
        beside = zip(server.json("simulate", *asked)["loads"], found["loads"], strict=True)
        others = [c["tokens_per_s"] / f["best_constant"]["tokens_per_s"] for c, f in beside]
        assert sum(shares) >= sum(others) - 3 * TIE
    table = parse_policy(found["policy"])
    assert isinstance(table, Policy)
    assert found["policy_id"] == table.id
    tune = ("tune", "--engine", "vllm")
    config = tmp_path / "spectune.toml"  # what stands there is for other commands too
    config.write_text('budget = "5m"\nthreads = 1\n[sampling]\ntemperature = 0.7\n')
    shown = server.call("--config", config, *tune, "--arrivals", "clients:1,8").output
    assert "policies simulated. Best over these loads together" in shown
    assert server.call(*tune).exit_code == 2
    goodput = server.call(*tune, "--arrivals", "clients:1", "--objective", "goodput")
    assert "needs --ttft or --tpot" in goodput.output
    for more in ("--quick", "--temperature 0.7", "--workers 2", "--report x"):
        said = f"{more.split()[0]} says nothing of a load"
        assert said in server.refused(*tune, "--arrivals", "clients:1", *more.split())
    assert "are for --execute" in server.refused(*tune, "--arrivals", "clients:1", "--threads", "1")
    assert "say --arrivals too" in server.refused("tune", "--objective", "tpot")
    other = ("--arrivals", "clients:1", "--pair", str(tiny_pair))
    assert "was made with pair" in server.refused(*tune, *other)


@pytest.mark.parametrize(
    ("best", "near", "table"),
    [
        ({1: 4, 2: 3, 4: 1, 8: 1}, {(2, 4): 0.005, (2, 2): 0.005}, {1: 4, 4: 1}),
        ({1: 4, 2: 3, 4: 1, 8: 1}, {(2, 4): 0.03, (2, 2): 0.03}, {1: 4, 2: 3, 4: 1}),
        # Without the entry of four the sum is better than without that of one, but four lose.
        ({1: 4, 2: 4, 4: 3, 8: 1}, {(1, 3): 0.009, (2, 3): 0.009, (4, 4): 0.013}, {1: 3, 8: 1}),
    ],
)
def test_a_table_has_no_entry_that_its_costs_cannot_tell(
    best: dict[int, int], near: dict[tuple[int, int], float], table: dict[int, int]
) -> None:
    """Made-up speeds: so many tokens are ``best`` for so many clients, others lose what ``near``
    says, or much. What loses less than 1% is left out."""

    def simulate(policy: Policy, load: Load) -> Simulated:
        clients = int(load.clients or 0)
        gamma = tables(policy, RULES)[clients]
        loss = near.get((clients, gamma), 0.1 * abs(gamma - best[clients]))
        done = np.array([1.0 / (1.0 - loss)])
        served = Served(np.zeros(1), done / 2, done, np.array([100]))
        return cast(Simulated, SimpleNamespace(served=served, batches=np.array([clients])))

    lab = SimpleNamespace(
        loads={f"clients:{c}": Load(c) for c in best},
        costs=SimpleNamespace(passes={"small": (1, 5)}, beyond=lambda draft, batches: 0.0),
        rules=RULES,
        engine=VLLM,
        objective=Objective(),
        server_draft=lambda policy: "small",
        simulate=simulate,
    )
    found = Search(cast(UnderLoad, lab), silent).run()
    assert found.table.policy.window.model_dump()["gamma"] == table


class Simulating:
    """An engine that answers at once what the simulator says of those texts, a little faster or
    slower each time. Of the requests whose numbers are in ``rounded`` the last token is another
    from the second execution on, as in arithmetic of low precision."""

    engine, version, serving = VLLM, "0.32.0", dict[str, Any]()
    runs_on: ClassVar = {"device": "cuda", "dtype": "bfloat16"}

    def __init__(self, noise: np.random.Generator, rounded: Collection[str] = ()) -> None:
        self.noise, self.rounded = noise, rounded

    def execute(
        self, prompts: Sequence[Prompt], policy: Policy, load: Load, **_: Any
    ) -> Iterator[Answered]:
        if len(prompts) == 1:  # before what counts
            return
        trace, pace = trace_of(len(prompts), budget=70), float(np.exp(self.noise.normal(0, 0.002)))
        found = simulated(trace, policy, load)
        for prompt, request in zip(prompts, recorded(trace, found, policy), strict=True):
            steps = (
                s._replace(arrived_s=s.arrived_s * pace, ended_s=s.ended_s * pace)
                for s in request.steps
            )
            assert prompt.ids == tuple(request.trajectory.prompt_ids)
            text = replace(request.trajectory, request_id=prompt.id)
            if prompt.id in self.rounded:
                output = text.output_ids.copy()
                output[-1] += 1
                text = replace(text, tokens=Tokens(text.prompt_ids, output))
            yield Answered(text, tuple(steps))

    def close(self) -> None:
        pass


EXECUTE = "tune --engine vllm --limit 40 --execute --arrivals"


@pytest.fixture
def executing(monkeypatch: pytest.MonkeyPatch) -> list[Wanted]:
    """An engine that cannot copy from prompts; how it was started."""
    noise, started = np.random.default_rng(1), list[Wanted]()

    def start(_name: str, _spec: PairSpec, wanted: Wanted) -> Simulating:
        started.append(wanted)
        if wanted.draft == "ngram":
            raise EngineError("it cannot load ngram")
        return Simulating(noise)

    monkeypatch.setattr(executed_load, "start", start)
    return started


@pytest.mark.usefixtures("executing")
def test_what_is_proved_by_execution_is_published(server: Door) -> None:
    """In the engine's deployment, once: what is in force is then what is to be beaten."""
    asked = (*EXECUTE.split(), "clients:1,8", "--budget")
    first = server.json(*asked, "1s")
    assert (first["passes"], first["published"]) == (1, None)
    needs = int(re.findall(r"--budget (\d+)s fits 4 passes", first["reason"])[0])
    loads = {one["label"]: one["loads"] for one in first["executed"]}
    # No server without a draft was recorded: nothing is predicted of one, and it is executed.
    for label, predicted in (("autoregressive", False), ("small fixed(gamma=0)", True)):
        assert [load["load"] for load in loads[label]] == ["clients:1", "clients:8"]
        known = [load["predicted_tokens_per_s"] is not None for load in loads[label]]
        assert known == [predicted] * 2
    assert server.json(*asked, f"{needs}s", "--no-publish")["reason"].endswith("--no-publish")
    found = server.json(*asked, f"{needs}s")
    assert found["passes"] == 4
    winner = found["winner"]["id"]
    assert found["published"] == {"version": 1, "policy": winner, "deployment": "vllm"}
    low, high = found["ratio_interval"]
    assert 1.01 < low < found["ratio_to_incumbent"] < high
    nothing = {"version": None, "id": AUTOREGRESSIVE.id, "label": "autoregressive"}
    assert found["incumbent"] == nothing
    assert found["texts"]["differ"] == 0
    with opened(server.db) as store:
        kept = store.active_publication(read_pair("demo").id, "cpu", "vllm")
    assert kept is not None
    assert (kept.reason, kept.actor) == (found["reason"], "tune")
    assert kept.evidence["executed"] == found["executed"]
    assert kept.sampling is not None
    assert kept.sampling["temperature"] == 0
    again = " ".join(server.call(*asked, f"{needs}s").output.split())
    assert (
        f"nothing executed is better than {kept.label}. Published before in deployment vllm"
        in again
    )
    assert f"version 1, {kept.label}, stays." in again
    in_force = "simulate --policy active --arrivals clients:8"
    assert server.json(in_force)["policy_id"] == winner
    assert simulate("active", db=server.db)["policy_id"] == winner
    said = server.error(in_force, "--deployment", "other")  # where nothing is in force
    assert "no steps of this engine without a draft were recorded" in said


def test_differing_texts_are_told_beside_autoregression_repeated(
    server: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's last token is another from each draft's second start on."""
    started = list[str]()

    def start(_name: str, _spec: PairSpec, wanted: Wanted) -> Simulating:
        started.append(wanted.draft)
        rounded = {"3"} if started.count(wanted.draft) > 1 else ()
        return Simulating(np.random.default_rng(1), rounded)

    monkeypatch.setattr(executed_load, "start", start)
    asked = (*EXECUTE.split(), "clients:1,8", "--no-publish", "--budget")
    once = server.json(*asked, "1s")
    policies = len(once["executed"])
    assert once["texts"] == {
        "differ": 0,
        "compared": 2 * 40 * policies,
        "dtype": "bfloat16",
        "autoregression_repeated": None,
    }
    started.clear()
    often = server.json(*asked, "60s")
    again = often["passes"] - 1
    assert again > 0
    differ, compared = 2 * again * policies, 2 * 40 * often["passes"] * policies
    plain = 2  # a server without a draft, and one that drafts 0 tokens
    assert often["texts"] == {
        "differ": differ,
        "compared": compared,
        "dtype": "bfloat16",
        "autoregression_repeated": {"differ": 2 * again * plain, "compared": 80 * again * plain},
    }
    started.clear()
    told = server.call(*asked, "60s").output
    assert (
        f"Beside those recorded: {differ} of {compared} texts differ (bfloat16; autoregression "
        f"repeated under the same load: {2 * again * plain} of {80 * again * plain})"
    ) in told


def test_what_cannot_run_is_not_what_is_to_be_beaten(server: Door, executing: list[Wanted]) -> None:
    """A tree in force is said and passed over; a window that was never served is executed without a
    prediction; a draft that the engine cannot load is found at its first start."""
    asked = (*EXECUTE.split(), "clients:8", "--budget", "1s", "--threads", "1")
    tree, wide = '{"draft": "small", "growth": {"kind": "top_k"}}', window(7).model_dump_json()
    copied = '{"draft": "ngram", "window": {"kind": "fixed", "gamma": 2}}'
    for wanted, name in ((tree, "trees"), (wide, "wide"), (copied, "copied")):
        server.json("policies", "activate", wanted, "--pair", "demo", "--deployment", name)
    found = server.json(*asked, "--deployment", "trees")
    assert "cannot run (vLLM cannot run trees" in found["reason"]
    assert found["incumbent"]["id"] == AUTOREGRESSIVE.id
    found = server.json(*asked, "--deployment", "wide")
    (one,) = (one for one in found["executed"] if one["policy_id"] == found["incumbent"]["id"])
    assert [load["predicted_tokens_per_s"] for load in one["loads"]] == [None]
    assert found["published"] is None
    assert {wanted.threads for wanted in executing} == {1}
    executing.clear()
    assert "it cannot load ngram" in server.error(*asked, "--deployment", "copied")
    assert [wanted.draft for wanted in executing] == ["ngram"]


def test_texts_that_cannot_be_served_again_are_said() -> None:
    texts = trace_of(3, budget=70).trajectories
    for found, said in (
        ([replace(t, finish="stop") for t in texts], "a stop string or token, or were left by"),
        (list(trace_of(3).trajectories), "for different numbers of tokens"),
    ):
        lab = SimpleNamespace(info=SimpleNamespace(id="rec-1"), trace=ReplayTrace(found, {}))
        with pytest.raises(TraceError, match=f"recording rec-1: its requests asked .*{said}"):
            executed_load._texts(cast(UnderLoad, lab))


def stored(
    store: TraceStore,
    ended: Sequence[RecordedRequest],
    source: str = "record",
    drafts: Sequence[str] = ("small",),
    lacking: Sequence[int] = (),
) -> Recording:
    """A recording of vLLM, some requests of which have no panoramas."""
    store.put_pair("pair", "pair", {})
    about = {"engine": "vllm", "serving": {"max_num_seqs": 8, "ahead": 0}}
    asked = Asked("pair", None, Sampling(), 70, options=about, source=source)
    info = store.create_recording(asked)
    for n, r in enumerate(ended):
        store.append_trajectory(info.id, n, r.trajectory, r.steps)
        panoramas = [(n, a_panorama(r.trajectory, draft)) for draft in drafts]
        store.put_panoramas(info.id, [] if n in lacking else panoramas)
    return info


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_recorded_requests_arrive_each_with_its_own_text(
    store: TraceStore, fitted: ServedCosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are stored as they ended. A damaged panorama of another draft is not read for it."""
    trace = trace_of(3, budget=70)
    ended = recorded(trace, simulated(trace, window(0), Load(1)), window(0))[::-1]
    info = stored(store, ended, drafts=("small", "other"))
    with store.database.write() as session:
        session.execute(
            update(Panorama)
            .filter_by(recording_id=info.id, ordinal=0, draft="other")
            .values(trie=literal(b"x", LargeBinary))
        )
    monkeypatch.setattr(under_load_module, "costs_of_engine", lambda *_: fitted)
    monkeypatch.chdir(tmp_path)
    Path("recorded-x.csv").write_text("TIMESTAMP\n1\n2\n")

    def order(asked: str) -> list[int]:
        return under_load(store, info, [window(3)], asked, Objective()).trace.order.tolist()

    assert order("recorded") == order("recorded@2") == [2, 1, 0]
    assert order("recorded-x.csv") == [0, 1, 2]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_a_server_has_added_since_is_left_out(
    store: TraceStore, fitted: ServedCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording that is made here is refused until it is whole."""
    trace = trace_of(3, budget=70)
    ended = recorded(trace, simulated(trace, window(0), Load(1)), window(0))[::-1]
    monkeypatch.setattr(under_load_module, "costs_of_engine", lambda *_: fitted)
    found = {source: stored(store, ended, source, lacking=[1]) for source in ("serve", "record")}
    for asked in ("recorded", "clients:2"):
        lab = under_load(store, found["serve"], [window(3)], asked, Objective())
        texts = [t.request_id for t in lab.trace.trajectories]
        assert sorted(texts) == sorted(ended[n].trajectory.request_id for n in (0, 2))
        assert len(lab.trace.order) == 2
    with pytest.raises(TraceError, match="2 panoramas of draft 'small' for 3 requests"):
        under_load(store, found["record"], [window(3)], "clients:2", Objective())


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_steps_on_other_hardware_are_named_where_they_are_missed(
    store: TraceStore, fitted: ServedCosts
) -> None:
    store.put_pair("pair", "pair", {})
    serving = {"max_num_seqs": 8, "ahead": 0}
    for name in ("cpu, threads: 1", "cpu, threads: 2"):
        about = {"engine": "vllm", "serving": serving, "hardware": name}
        info = store.create_recording(Asked("pair", None, Sampling(), 9, options=about))
    said = "on cpu, threads: 2, as steps on cpu, threads: 1 tell nothing of it"
    with pytest.raises(TraceError, match=f"serve more requests.*`profile --engine vllm`; {said}"):
        costs_of_engine(store, info)
    with pytest.raises(PolicyError, match=f"by `profile --engine vllm`; {said}"):
        replace(fitted, served_by=f"`profile --engine vllm`; {said}").of("small", [7])


def test_costs_are_of_one_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that do not name theirs are older, and alike."""

    def made_by(**options: str) -> tuple[Any, ...]:
        return _made_by(cast(Recording, SimpleNamespace(options=options)))

    assert made_by(engine="vllm") == made_by(engine="vllm", device="cpu")
    named = {made_by(hardware=name) for name in ("a", "b", "a")} | {made_by()}
    assert len(named) == 3
    assert hardware("cpu", 3).endswith(", threads: 3")
    assert hardware("xpu") == "xpu"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA X")
    for seen, names in ((True, ("NVIDIA X", "2 x NVIDIA X")), (False, ("cuda", "2 x cuda"))):
        monkeypatch.setattr("spectune.runtime.hardware.sees_cuda", lambda seen=seen: seen)
        assert (hardware("cuda"), hardware("cuda", count=2)) == names

    def about(engine: Engine) -> dict[str, Any]:
        on = {"device": "cpu", "dtype": "float32"}
        how = {"version": "1", "serving": {}, "runs_on": on, "wanted": Wanted("none", threads=3)}
        running = SimpleNamespace(engine=engine, **how)
        return about_recording(cast(Running, running), DecodeOptions())

    assert about(OPENVINO)["hardware"] == hardware("cpu", 3)
    assert "hardware" not in about(VLLM)  # it is another process, which names its own


def test_what_passes_prove() -> None:
    """By hand: Student's interval of the logarithms of ratios of passes, averaged over loads."""

    def one(policy: Policy, *passes: tuple[float, float]) -> Executed:
        """Seconds of each pass at two loads, 100 tokens each."""
        loads = zip(
            *(
                [Served(*map(np.array, ([0.0], [s / 2], [s], [100]))) for s in both]
                for both in passes
            ),
            strict=True,
        )
        return Executed(
            policy, {}, dict(zip(("a", "b"), loads, strict=True)), ComparedTexts(0, 0, "")
        )

    plain = one(AUTOREGRESSIVE, (10.0, 20.0), (11.0, 20.0), (10.0, 21.0))
    fast = one(window(3), (5.0, 20.0), (6.0, 19.0), (5.0, 21.0))
    apart = [(np.log(10 / 5)) / 2, (np.log(11 / 6) + np.log(20 / 19)) / 2, np.log(10 / 5) / 2]
    half = scipy.stats.sem(apart) * scipy.stats.t.ppf(0.995, 2)
    found = proof_of([plain, fast], AUTOREGRESSIVE, Objective())
    mean = np.mean(apart)
    assert found.winner == window(3)
    assert np.log(found.ratio) == pytest.approx([mean, mean - half, mean + half])
    assert found.against == ""
    same = proof_of([plain, fast], window(3), Objective())
    assert same.against.startswith("nothing executed is better")
    once = [one(AUTOREGRESSIVE, (10.0, 20.0)), one(window(3), (5.0, 20.0))]
    few = proof_of(once, AUTOREGRESSIVE, Objective("tpot"))
    assert (few.ratio[0], few.wants) == (pytest.approx(np.sqrt(2)), 4)
    assert few.to_json()["ratio_interval"] == [0.0, None]
    assert "one pass" in few.against
    noisy = one(window(1), (5.0, 20.0), (11.0, 19.0), (9.0, 21.0))
    unsure = proof_of([plain, noisy], AUTOREGRESSIVE, Objective("goodput", ttft_s=4.0))
    assert "not beyond noise" in unsure.against
