"""The serving simulator against a plain one that keeps the books as vLLM's scheduler does; what
steps cost; arrivals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_traces import COSTS, PROFILE, RULES, recorded, simulated, tables, trace_of, window

from spectune.engines.abilities import ServingRules, rules_of
from spectune.engines.engine import Load
from spectune.optimizer.replay.chain_tables import AGREE_NONE, AGREE_YES
from spectune.optimizer.replay.loads import Objective, Served, loads_of
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.served_costs import (
    ServedCosts,
    ServedStep,
    costs_of_engine,
    fit_served,
    served_steps,
)
from spectune.optimizer.replay.serving import serve
from spectune.optimizer.replay.step_costs import StepCosts, StepLoad, step_seconds, step_terms
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Sampling
from spectune.traces.store import Asked, TraceStore


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
    blind: bool = False
    """Whether ``spec`` are dummies, as of the steps in execution ``dummies`` says."""
    dummies: list[bool] = field(default_factory=list)
    out: int = 0
    first: float = -1.0
    finished: float = -1.0


@dataclass
class Oracle:
    """A server step by step: lists and sums, nothing shared with the simulator but the cost of a
    step."""

    rules: ServingRules
    tables: dict[int, tuple[int, ...]]
    costs: StepCosts
    waiting: list[Booked] = field(default_factory=list)
    running: list[Booked] = field(default_factory=list)
    members: list[tuple[int, int, int]] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    context: float = 0.0
    is_blind: bool = False
    """Whether a text of the step is too long for the draft."""

    @property
    def gammas(self) -> tuple[int, ...]:
        """By batch size, at the mean context of the requests that run as a step begins."""
        return self.tables[max(least for least in self.tables if least <= self.context)]

    def schedule(self) -> list[tuple[Booked, int, int]]:
        self.context = sum(r.computed for r in self.running) / max(1, len(self.running))
        budget = given = self.rules.max_batched_tokens
        scheduled: list[tuple[Booked, int, int]] = []
        for r in list(self.running):
            if budget <= 0 or given <= self.rules.draft_slots:
                break
            if r.placeholders and r.computed + 2 - r.placeholders >= r.prompt + r.budget:
                continue
            spec = r.spec
            known = not r.placeholders and r.computed >= r.prompt and not r.blind
            if known:  # the draft's own proposals
                spec = min(spec, self.proposals(r))
            new = r.prompt + r.out + spec + r.placeholders - r.computed
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
        longest = max(r.computed + new for r, new, _ in scheduled)
        self.is_blind = 0 < self.rules.drafts_up_to < longest
        passes = 0 if self.is_blind else self.gammas[len(scheduled)]
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
                r.dummies.append(r.blind)
                r.spec, r.blind = self.gammas[len(scheduled)], self.is_blind

    def update(self, scheduled: list[tuple[Booked, int, int]], now: float) -> list[Booked]:
        ended = []
        for r, _, drafted in scheduled:
            if r.finished >= 0 or drafted < 0:
                continue
            kept = 0 if r.dummies.pop(0) else drafted
            ahead = r.agree[r.out : min(r.length, r.out + kept)] if r.out else []
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


NARROW = RULES._replace(draft_slots=1, max_len=0)
LONGER = {
    "kind": "by_load",
    "gamma": {"1": 5, "4": 2},
    "contexts": {"40": {"1": 3, "5": 0}, "75": {"1": 6}},
}
"""From which context on other numbers of tokens are drafted."""


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
        (RULES, poisson(50.0), {"1": 5, "4": 1}, 0.1),
        (RULES._replace(drafts_up_to=60), Load(8), {"1": 5, "4": 3, "7": 0}, 0.1),
        (RULES._replace(drafts_up_to=80, ahead=1), poisson(60.0), 6, 0.0),
        (RULES, Load(6), LONGER, 0.0),
        (NARROW._replace(ahead=1, max_batched_tokens=37), poisson(70.0), LONGER, 0.0),
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
            told = serve(trace, "small", gammas, load, RULES, fitted.of("small", gammas[0]))
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
        serve(trace_of(40), "small", {0: (0,) * 9}, Load(8), full, COSTS)
    assert rules_of("vllm", {"max_num_seqs": 3, "other": 1}).max_num_seqs == 3
    with pytest.raises(TraceError, match="load is simulated for vllm, not for 'native'"):
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
BAILIAN = """
{"chat_id": 1, "timestamp": 0.0, "input_length": 9, "turn": 1, "hash_ids": [1]}
{"chat_id": 2, "timestamp": 14.62, "input_length": 9, "turn": 1, "hash_ids": [2]}
"""
TEXTS = """
{"timestamp": 0, "text_input": "one paragraph\u2028and \x85another"}
{"timestamp": 500, "text_input": "plain"}
"""
MIXED = "TIMESTAMP\n2024-05-10 00:00:00+00:00\n2024-05-10 00:00:01.5\n"
TRACES = (
    ("\ufeff" + AZURE, 1.5, "of 'TIMESTAMP', dates"),
    (MIXED, 1.5, "dates"),
    (BURST, 40.0, "of 'Timestamp', numbers in s"),
    (MOON, 3.0, "of 'timestamp', numbers in ms"),
    (BAILIAN, 14.62, "numbers in s"),
    ("arrived_at,num_prefill_tokens\n0.5,9\n3,9\n", 2.5, "numbers in s"),
    (TEXTS, 0.5, "numbers in ms"),
)
NO_TRACES = (
    ("TIMESTAMP\n1\n\n,2\n", "a.csv:4: '' is no date and no number"),
    ("TIMESTAMP\n1\n2024-05-10\n", "'TIMESTAMP' has dates and numbers"),
    ('{"timestamp": 1}\n{"timestamp": null}', "a.csv:2: None is no date and no number"),
    ('{"timestamp": 1}\n5', "a.csv:2: expected an object, not int"),
    ("TIMESTAMP\n", "holds no request"),
    ("TIMESTAMP\n1715299200\n", "'TIMESTAMP' holds numbers, and not in which unit: say --set"),
    (
        '{"timestamp": 0.5, "hash_ids": [1]}',
        "holds fractions, where .*load.unit=s or =ms",
    ),
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


def test_a_unit_that_is_said_counts_and_too_dense_a_load_is_warned_of(tmp_path: Path) -> None:
    file, said = tmp_path / "a.csv", list[str]()
    file.write_text("TIMESTAMP\n1715299200\n1715299204\n")
    for unit, rate, span_s in (("s", "", 4.0), ("ms", "", 4e-3), (None, "@4", 0.5)):
        loads = loads_of(f"{file}{rate}", (), 5, unit=unit, tell=said.append)
        assert loads[f"{file}{rate}"].arrivals == pytest.approx((0.0, span_s))
    assert [line.partition(": ")[0] for line in said] == [str(file)] * 3
    file.write_text("\n".join(["TIMESTAMP", *["2024-05-10 00:00:00"] * 12]))
    loads_of(str(file), (), 5, unit="s", tell=said.append)
    assert "dates, on which load.unit has no effect" in said[-2]
    assert said[-1].startswith(f"warning: {file}: 12 arrivals in 0 s are more than 1,000 a second")
    loads_of("poisson:2", (), 5, unit="s", tell=said.append)
    assert said[-1] == "no effect on --arrivals poisson:2, which is no file: load.unit"


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_costs_are_of_one_hardware(store: TraceStore) -> None:
    """Steps on other hardware are named where they are missed."""
    store.put_pair("pair", "pair", {})
    for name in ("cpu, threads: 1", "cpu, threads: 2"):
        serving = {"max_num_seqs": 8, "ahead": 0}
        options = {"engine": "vllm", "serving": serving, "hardware": name}
        info = store.create_recording(Asked("pair", None, Sampling(), 9, options=options))
    said = "on cpu, threads: 2, as steps on cpu, threads: 1 tell nothing of it"
    with pytest.raises(TraceError, match=f"serve more requests.*`profile --engine vllm`; {said}"):
        costs_of_engine(store, info)
