"""Who decides best under load: rules of engines and tables of ours, by replay.

    python bench/run.py rules [--only replayed|executed] [--quick]

Each rule says before a step how many tokens the running requests draft and verify: the best
constant K, vLLM's table by batch size, SGLang's average of accepted lengths, vLLM's adaptive
verification, one tree, and a table of trees and chains by load. What a rule has free is chosen on
one half of the requests and played on the other, both ways, at three costs (95% intervals, by
drawing the requests that are played again). Engines' rules learn on the half that chooses, before
they are played. ``executed``: on this machine, in turns, those that the native decoder can run.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from bench.checks.load_native import (
    CLIENTS,
    FULL,
    HARDWARE,
    QUICK,
    TURNS,
    Hardware,
    Played,
    costs_at,
    kinds,
    opened,
    steps_profile,
)
from bench.harness import say
from bench.verdicts import of_draws
from spectune.engines.engine import Load
from spectune.optimizer.decoder_engine import LoadQueue
from spectune.optimizer.execute import Encoded, encode_recorded, warm
from spectune.optimizer.replay.batch_costs import BatchCosts, StepRows, batch_costs, batch_seconds
from spectune.optimizer.replay.batches import Seating, serve_decoder
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.round_tables import ACCEPTED, tabulate_rounds
from spectune.optimizer.tuning.load_search import policies_by_load
from spectune.runtime.costs import RoundKind
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import PROMPT_TOKENS, StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.traces.cost_table import FloatArray
from spectune.traces.schema import NAT_SCALE, Sampling

RESULT = "rules"
Ints = np.ndarray[Any, np.dtype[np.int64]]
MOST = 8
"""Tokens of the longest chain."""
COSTS = {
    **HARDWARE,
    "4 x H100, 70B, estimated": Hardware(
        lambda rows: np.maximum(11.75, 0.0585 * rows) + 0.65 * np.minimum(1.0, rows / 64),
        lambda rows: np.maximum(0.5, 0.0 * rows),
        0.042,
        2.5,
    ),
}
WARM = 600
"""Steps in which rules learn before they are played."""


# -------------------------------------------------------------------------------------- the rules


class Rule(ABC):
    """How many tokens are drafted for each request of a step (``ask``), of which so many are
    verified (``trim``), and what came of it (``tell``). Of each request its number, where its round
    begins (``starts``), and tokens ``drafted``, ``verified`` and ``accepted``."""

    @abstractmethod
    def ask(self, starts: Ints) -> int:
        """Before a step."""

    def trim(self, requests: Ints, starts: Ints, drafted: Ints) -> Ints:
        return drafted

    @abstractmethod
    def tell(self, starts: Ints, verified: Ints, accepted: Ints) -> None:
        """After it."""


@dataclass
class Constant(Rule):
    """K tokens, always."""

    steps: int

    def ask(self, starts: Ints) -> int:
        return self.steps

    def tell(self, starts: Ints, verified: Ints, accepted: Ints) -> None:
        """Nothing is learned of it."""


SHIPPED: Mapping[int, tuple[Sequence[int], float]] = {
    1: ((1, 3, 5, 7), -0.25),
    8: ((0, 1, 3), 0.0),
    32: ((0, 1), 0.0),
    64: ((0,), 0.0),
}
"""SGLang's default file: from which batch size on, which K, and the hysteresis downwards."""


@dataclass
class Slot:
    """The average of accepted lengths of batches of like sizes (``AdaptiveStepSlot``)."""

    candidates: Sequence[int]
    down: float
    steps: int = 3
    batches: int = 0

    def __post_init__(self) -> None:
        if self.steps not in self.candidates:
            self.steps = self.candidates[len(self.candidates) // 2]
        self.mean = self.steps - 1.0

    def update(self, accepted: Ints, alpha: float, every: int, warmup: int) -> None:
        if self.steps > 0:
            self.mean = (1 - alpha) * self.mean + alpha * float(accepted.mean())
        self.batches += 1
        if self.batches > warmup and (self.batches - warmup) % every == 0:
            self.steps = self._next()

    def _next(self) -> int:
        each, at = self.candidates, self.candidates.index(self.steps)
        if self.steps == 0:  # draft one step of the smallest K, to see
            target = each[min(at + 1, len(each) - 1)]
            if target > 0 and self.mean < 0:
                self.mean = target - 1.0
            return target
        low = at
        while low > 0 and self.mean <= max(each[low - 1], 1) - 0.5 + self.down:
            low -= 1
        if low < at:
            return each[low]
        while at < len(each) - 1 and self.mean > each[at] - 0.5:
            at += 1
        return each[at]


@dataclass
class Average(Rule):
    """SGLang's ``--speculative-adaptive``: K by an exponential average of accepted lengths, from
    candidates by batch size (``adaptive_spec_params.py``)."""

    file: Mapping[int, tuple[Sequence[int], float]]
    slots: dict[int, Slot] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = {size: Slot(*entry) for size, entry in self.file.items()}

    def _slot(self, requests: int) -> Slot:
        return self.slots[max(size for size in self.slots if size <= requests)]

    def ask(self, starts: Ints) -> int:
        return self._slot(len(starts)).steps

    def tell(self, starts: Ints, verified: Ints, accepted: Ints) -> None:
        self._slot(len(starts)).update(accepted, alpha=0.2, every=5, warmup=10)

    def table(self, draft: str) -> Policy:
        gamma = {str(size): slot.steps for size, slot in self.slots.items()}
        return parse_policy({"draft": draft, "window": {"kind": "by_load", "gamma": gamma}})


@dataclass
class Verification(Rule):
    """vLLM's ``enable_adaptive_verification``: K tokens are drafted, and those verified whose
    survival is the most worth its time (``adaptive_verification.py``). Acceptance is estimated
    online by a logistic regression on the draft's confidence (``acceptance_estimator.py``);
    ``logits`` [positions, K]. ``seconds`` [rows + 1]: of the target's pass by rows."""

    steps: int
    logits: FloatArray
    seconds: FloatArray
    draft_s: float
    slope: float = 0.5

    def __post_init__(self) -> None:
        self.bias, self.told = np.full(self.steps, -0.2), 0
        self.sums = np.zeros((self.steps, 6))
        self.stale: dict[int, FloatArray] = {}

    def ask(self, starts: Ints) -> int:
        return self.steps

    def _confidence(self, starts: Ints) -> FloatArray:
        return 1 / (1 + np.exp(-(self.slope * self.logits[starts, : self.steps] + self.bias)))

    def trim(self, requests: Ints, starts: Ints, drafted: Ints) -> Ints:
        now, size = self._confidence(starts), len(starts)
        # The budget goes by what was drafted a step before, which is on the host already.
        late = np.array([self.stale.get(n, np.ones(self.steps)) for n in requests.tolist()])
        eligible = np.arange(self.steps) < drafted[:, None]
        scores = np.sort(np.cumprod(late, axis=1)[eligible])[::-1]
        tokens = size + np.concatenate(([0.0], np.cumsum(scores)))
        rows = size + np.arange(len(scores) + 1)
        budget = int(np.argmax(tokens / (self.draft_s + self.seconds[rows])))
        self.stale = dict(zip(requests.tolist(), now, strict=True))
        survival = np.where(eligible, np.cumprod(now, axis=1), -np.inf)
        kept = np.argsort(-survival, axis=None, kind="stable")[:budget]
        return np.bincount(kept // self.steps, minlength=size)

    def tell(self, starts: Ints, verified: Ints, accepted: Ints) -> None:
        x, p = self.logits[starts, : self.steps], self._confidence(starts)
        k = np.arange(self.steps)
        seen = (k <= accepted[:, None]) & (k < verified[:, None])
        weight, wrong = p * (1 - p) * seen, ((k < accepted[:, None]) - p) * seen
        each = (weight * x * x, weight * x, weight, wrong * x, wrong, seen)
        self.sums += np.stack([part.sum(0) for part in each], axis=1)
        self.told += 1
        if self.told % 100 == 0:
            self._refit()

    def _refit(self) -> None:
        """A damped Newton step of the slope and of each position's intercept."""
        a, b, c, g0, g1, n = self.sums.T
        c = c + 1e-3
        step = (g0.sum() - (b * g1 / c).sum()) / (a.sum() + 1e-3 - (b * b / c).sum())
        step *= n.sum() / (n.sum() + 50)
        step = step if self.slope + step >= 0 else 0.0
        self.slope += float(step)
        self.bias += (g1 - b * step) / c * n / (n + 50)
        self.sums[:] = 0


# --------------------------------------------------------------------------------------- the loop


class Chain(NamedTuple):
    """A draft, and how many tokens of its chain of :data:`MOST` are ``accepted`` from every start
    of a trace, [positions]."""

    trace: ReplayTrace
    draft: str
    accepted: Ints

    @classmethod
    def of(cls, trace: ReplayTrace, draft: str) -> Chain:
        rounds = tabulate_rounds(trace, prepare(chain_of(draft, MOST), [draft])).rounds
        return cls(trace, draft, rounds[:, MOST, ACCEPTED].astype(np.int64))

    def logits(self) -> FloatArray:
        """The log-odds of a head's likeliest token at each place of its chains, [positions,
        MOST]."""
        policy = chain_of(self.draft, MOST)
        rules = prepare(policy, [self.draft]).rules
        assert rules is not None
        codes = self.trace.growth(policy, rules).best[:, :MOST, 0].astype(np.float64)
        q = np.exp(-codes / NAT_SCALE)
        odds: FloatArray = np.log(np.maximum(q, 1e-12) / np.maximum(1 - q, 1e-12))
        return odds


def chain_of(draft: str, gamma: int) -> Policy:
    return parse_policy({"draft": draft, "window": {"kind": "fixed", "gamma": gamma}})


def serve(
    rule: Rule, chain: Chain, order: Sequence[int], clients: int, costs: BatchCosts, count: int
) -> float:
    """Tokens/s of ``count`` requests that clients send, cycling through ``order``, as
    :func:`serve_decoder` has them, of a rule that is asked before each step."""
    trace, text = chain.trace, np.resize(np.array(order), count)
    lengths, begins, prompts = np.diff(trace.offsets), trace.offsets[:-1], trace.prompts
    out, unread, left = np.zeros(count, int), np.ones(count, int), prompts[text] - 1
    step = StepRows(np.zeros((MOST, 4), int), np.zeros(6, int), np.zeros(1, int))
    reading, running, now = deque(range(min(clients, count))), list[int](), 0.0
    sent, is_head = len(reading), trace.is_head(chain.draft)
    while reading or running:
        room = PROMPT_TOKENS
        while reading and (room or not left[reading[0]]):
            size = min(room, left[reading[0]])
            now += float(costs.prompt[:, size].sum())
            left[reading[0]] -= size
            room -= size
            if not left[reading[0]]:
                running.append(reading.popleft())
        if not running:
            continue
        ids = np.array(running)
        texts = text[ids]
        starts = begins[texts] + out[ids]
        drafted = np.minimum(rule.ask(starts), trace.budgets[texts] - out[ids] - 1)
        verified = rule.trim(ids, starts, drafted) if drafted.any() else drafted
        accepted = np.minimum(chain.accepted[starts], verified)
        emitted = np.minimum(accepted + 1, lengths[texts] - out[ids])
        _fill(step, drafted, verified, unread[ids], prompts[texts] + out[ids] - 1)
        now += batch_seconds(costs, 0, step)
        rule.tell(starts, verified, accepted)
        # A head reads all that is emitted again; a model has read all but its last proposal.
        read = np.zeros_like(drafted) if is_head else np.minimum(accepted, drafted - 1)
        unread[ids] = np.where(drafted > 0, emitted - read, unread[ids] + emitted)
        out[ids] += emitted
        ended = out[ids] == lengths[texts]
        running = ids[~ended].tolist()
        more = min(int(ended.sum()), count - sent)
        reading.extend(range(sent, sent + more))
        sent += more
    return float(out.sum() / now)


def _fill(step: StepRows, drafted: Ints, verified: Ints, unread: Ints, cached: Ints) -> None:
    """What a step of chains reads."""
    step.level[:] = 0
    for level in range(int(drafted.max())):
        on = drafted > level
        rows = unread[on].sum() if level == 0 else on.sum()
        step.level[level] = rows, 0, cached[on].sum(), on.sum()
    of_drafted = (verified + 1)[drafted > 0].sum()
    rows = (verified + 1).sum()
    step.verified[:] = rows, 0, of_drafted, cached.sum(), len(drafted), 0
    step.passes[0] = drafted.max()


# ------------------------------------------------------------------------------------ what is best


@dataclass
class Bench:
    """Plays policies (``play``) and rules (at ``costs``) on some requests of a ``chain``'s trace;
    each client sends ``turns`` of them, or each is sent once where that is more."""

    chain: Chain
    play: Callable[[Policy, Sequence[int], Load], float]
    costs: BatchCosts
    clients: Sequence[int]
    turns: int
    _learned: dict[tuple[int, int], Rule] = field(default_factory=dict)

    def __call__(self, what: Policy | Rule, texts: Sequence[int], clients: int) -> float:
        """Tokens/s."""
        if isinstance(what, Policy):
            return self.play(what, texts, Load(clients))
        count = max(len(texts), self.turns * clients)
        return serve(deepcopy(what), self.chain, texts, clients, self.costs, count)

    def warm(self, rule: Rule, texts: Sequence[int], clients: int) -> Rule:
        """The rule as it is after it has served these texts for a while."""
        key = id(rule), clients
        if key not in self._learned:
            tokens = float(np.diff(self.chain.trace.offsets)[list(texts)].mean())
            one, count = deepcopy(rule), math.ceil(WARM * clients * 2 / tokens)
            serve(one, self.chain, texts, clients, self.costs, max(clients, count))
            self._learned[key] = one
        return self._learned[key]


Choice = Callable[[int], Policy | Rule]
FILES = ((1, 3, 5, 7), (0, 1, 3), (0, 1), (0,), (1, 2, 3), (2, 3, 4, 5), (3, 5, 7), (5, 6, 7, 8))
"""Candidates of K among which a file for SGLang is chosen, by batch size."""


def choose(
    bench: Bench, fit: list[int], trees: Sequence[Policy], trimming: Iterable[Rule] = ()
) -> dict[str, Choice]:
    """What is best on some requests under each kind of rule, by clients; of ``trimming`` rules the
    best at all of them."""

    def best(
        among: Sequence[Any], clients: Sequence[int], play: Callable[[Any, int], float]
    ) -> Any:
        worth = [sum(math.log(play(one, n)) for n in clients) for one in among]
        return among[int(np.argmax(worth))]

    @cache
    def plain(policy: Policy, n: int) -> float:
        return bench(policy, fit, n)

    def learned(rule: Rule, n: int) -> float:
        return bench(bench.warm(rule, fit, n), fit, n)

    every = bench.clients
    chains = [chain_of(bench.chain.draft, k) for k in range(1, MOST + 1)]
    at = {n: best([AUTOREGRESSIVE, *chains], [n], plain) for n in every}
    with_trees = {n: best([at[n], *trees], [n], plain) for n in every}
    files = [Average({1: (steps, SHIPPED[1][1])}) for steps in FILES]
    shipped = Average(SHIPPED)
    tuned = Average({n: best(files, [n], learned).file[1] for n in every})
    constant, tree = (best(group, every, plain) for group in (chains, trees))
    of_chains, of_trees = policies_by_load(at), policies_by_load(with_trees)
    choices: dict[str, Choice] = {
        "none": lambda _: AUTOREGRESSIVE,
        "constant": lambda _: constant,
        "table": lambda _: of_chains,
        "average": lambda n: bench.warm(shipped, fit, n),
        "average, tuned": lambda n: bench.warm(tuned, fit, n),
        "tree": lambda _: tree,
        "trees by load": lambda _: of_trees,
    }
    if rules := list(trimming):
        verification = best(rules, every, learned)
        choices["verification"] = lambda n: bench.warm(verification, fit, n)
    return choices


# -------------------------------------------------------------------------------------- replayed


def replayed(quick: bool) -> dict[str, Any]:
    """Tokens/s of each rule by clients, over the best constant K of all loads."""
    size = QUICK if quick else FULL
    _, pair, trace = opened(size, Sampling(), "rules", quick)
    chain, trees = Chain.of(trace, "head"), kinds("head")["tree"]
    logits, constant = chain.logits(), chain_of("head", 4)
    halves = [list(range(n, len(trace.trajectories), 2)) for n in (0, 1)]
    rng = np.random.default_rng(0)
    drawn = [
        [half, *(rng.choice(half, len(half)).tolist() for _ in range(size.draws))]
        for half in halves
    ]
    rows, differ = list[dict[str, Any]](), 0.0
    for name, hardware in list(COSTS.items())[: 1 if quick else None]:
        play = Played(trace, pair, hardware, None)
        bench = Bench(chain, play, costs_at(hardware, 1, 1, prompts=False), CLIENTS, TURNS)
        target = 1e-3 * (
            hardware.target(np.arange(max(CLIENTS) * (MOST + 1) + 1.0)) + hardware.step
        )
        level = 1e-3 * float(hardware.level(np.ones(1))[0])
        trimming = [Verification(k, logits, target, k * level) for k in (3, 5, 7, 8)]
        chosen = [choose(bench, half, trees, trimming) for half in halves]
        logs = dict[tuple[str, int], FloatArray]()
        for n in CLIENTS:
            one, other = (bench(what, halves[0], n) for what in (constant, Constant(4)))
            differ = max(differ, abs(one / other - 1))
            for rule in chosen[0]:
                speeds = [
                    [bench(by[rule](n), texts, n) for texts in of]
                    for by, of in zip(chosen, drawn[::-1], strict=True)
                ]
                logs[rule, n] = np.log(np.array(speeds)).mean(0)
            say(f"{name}, {n}: { {r: round(float(np.exp(logs[r, n][0]))) for r in chosen[0]} }")
        rows += [{"hardware": name, **row} for row in _rows(logs, list(chosen[0]))]
    sizes = {"texts": size.texts, "tokens": size.tokens}
    return {"loops_differ_by": differ, **sizes, "rows": rows}


def _rows(logs: Mapping[tuple[str, int], FloatArray], rules: Sequence[str]) -> list[dict[str, Any]]:
    """By clients, and of all of them together (None), each rule's speed over the constant's."""
    rows = []
    for clients in (*CLIENTS, None):
        among = CLIENTS if clients is None else (clients,)
        mean = {rule: np.mean([logs[rule, n] for n in among], axis=0) for rule in rules}
        over = {rule: of_draws(np.exp(mean[rule] - mean["constant"])) for rule in rules}
        constant = float(np.exp(np.median(mean["constant"])))
        rows.append({"clients": clients, "constant": constant, "over": over})
    return rows


# -------------------------------------------------------------------------------------- executed

CLOCK = time.process_time
"""The processor's, so that who else uses the machine does not count; the pair runs in one
thread."""
CHOSEN, EXECUTED = (1, 4, 8, 16), (4, 16)
"""Clients at which is chosen what is best, and at which it is executed."""
DRAFT, PASSES = "small", 2


def executed(quick: bool) -> dict[str, Any]:
    """Tokens/s of the rules that the native decoder can run, as predicted and as executed on
    requests that chose nothing."""
    size = QUICK if quick else FULL
    _, pair, trace = opened(size, Sampling(), "rules", quick)
    seats = max(EXECUTED)
    profile = steps_profile(pair, trace, seats, CLOCK)
    policy = chain_of(DRAFT, MOST)
    costs = batch_costs(profile, [RoundKind.of(policy, tree=False)], [None], [DRAFT], seats)

    def play(policy: Policy, texts: Sequence[int], load: Load) -> float:
        plan, count = prepare(policy, pair.draft_names, profile=profile), 2 * load.clients
        how: dict[str, Any] = {"count": max(count, len(texts))}
        found = serve_decoder(trace.select(texts), plan, load, Seating(seats), profile, **how)
        return found.served.tokens_per_s

    fit, test = (list(range(n, len(trace.trajectories), 2)) for n in (0, 1))
    bench = Bench(Chain.of(trace, DRAFT), play, costs, CHOSEN, turns=2)
    trees = [tree for draft in (DRAFT, "head") for tree in kinds(draft)["tree"]]
    by = choose(bench, fit, trees)
    cells = [(n, rule) for n in EXECUTED for rule in by]
    speeds: dict[tuple[int, str], list[float]] = {cell: [] for cell in cells}
    encoded = encode_recorded(pair, [trace.trajectories[i] for i in test])
    warm(pair, encoded)
    rng = np.random.default_rng(0)
    for turn in range(PASSES):
        say(f"pass {turn + 1} of {PASSES}")
        for at in rng.permutation(len(cells)):
            n, rule = cells[at]
            count = max(2 * n, len(test))
            speeds[n, rule].append(decode(pair, by[rule](n), encoded, n, seats, count))
    rows = [
        {
            "clients": n, "rule": rule, "tokens_per_s": of,
            "predicted_tokens_per_s": bench(by[rule](n), test, n),
        }
        for (n, rule), of in speeds.items()
    ]  # fmt: skip
    say(str(rows))
    return {"rows": rows}


def decode(
    pair: LoadedPair,
    what: Policy | Average,
    encoded: Encoded,
    clients: int,
    seats: int,
    count: int = 0,
) -> float:
    """Tokens a second of the processor, of as many requests that clients send (0: each once), as
    the native decoder serves them; a rule puts its table in force after each step."""
    rule, plans = deepcopy(what), dict[Policy, Plan]()

    def plan() -> Plan:
        policy = rule if isinstance(rule, Policy) else rule.table(DRAFT)
        return plans.setdefault(policy, prepare(policy, pair.draft_names))

    source, asked = StaticSource(plan()), [request for _, request in encoded.items]
    decoder = Decoder(pair, source, seats=seats)
    requests = [replace(asked[n % len(asked)], id=f"{n}") for n in range(count or len(asked))]
    queue, tokens = LoadQueue(requests, Load(clients), CLOCK), 0
    for rounds in decoder.steps(queue):
        tokens += sum(len(one.tokens) for one in rounds)
        for one in rounds:
            if one.finish is not None:
                queue.answered()
        if isinstance(rule, Average):
            accepted = np.array([one.step.accepted for one in rounds])
            rule.tell(accepted, accepted, accepted)
            source.prepared = plan()
    return tokens / (CLOCK() - queue.began)


PARTS = {"replayed": replayed, "executed": executed}
