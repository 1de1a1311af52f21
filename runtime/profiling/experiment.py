"""The designed experiment behind a profile: rounds of the loop that serves, under many policies in
short blocks of random order.

One request serves one draft; before every block the policy source puts another policy in force. So
texts, lags and acceptance are those of service, and what draft and target evict from each other's
caches is in every sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, product
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from spectune.runtime.costs import MeasuredRound, MeasuredStep, RoundKind
from spectune.runtime.cuda.graphs import prepare_graphs
from spectune.runtime.decoder import ModelBackend
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import (
    PROMPT_TOKENS,
    DecodeRequest,
    Round,
    StaticSource,
    Turn,
    Waiting,
    decode_rounds,
    decode_steps,
)
from spectune.runtime.policies.c2t import STEP, beta_code, nats
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    ClustersShortlist,
    EntropyStop,
    FixedWindow,
    FrequencyShortlist,
    JointProbStop,
    MaxProbStop,
    Policy,
    Select,
    StaticGrowth,
    TopKGrowth,
)
from spectune.runtime.policies.dynaspec import Clusters, Routing
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.plan import Plan, prepare
from spectune.runtime.policies.rules import ShortlistRule
from spectune.runtime.profiling.regression import Prefill
from spectune.runtime.session import Sessions
from spectune.runtime.shortlists import Shortlists
from spectune.traces.schema import Sampling

BLOCK: Final = 3
"""Rounds under one policy; the first of them pays for what the policy before left in the caches,
and is not counted."""
PER_REQUEST: Final = 10
"""Blocks of one request."""
CHECKS: Final = 3
CHECKED_TOKENS: Final = 12
"""Requests of each policy to check with in a sweep and at each temperature, and their tokens."""
LEVEL: Final = 2
"""Blocks of each cell of steps of several requests, when all of them run."""
PREFILLS: Final = 3
"""Prefills of each draft and length: one may be slow, as the first of a shape is on a GPU."""
SAMPLINGS: Final = (Sampling(), Sampling(temperature=1.0))
GAMMAS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
"""Lengths of the chains that are measured, beside the longest."""
TREES: Final = (
    *((1, 4, 4), (2, 2, 2), (2, 4, 6), (4, 1, 3), (4, 3, 7), (4, 4, 14)),
    *((8, 2, 10), (8, 4, 24), (8, 6, 31), (10, 6, 60), (10, 8, 48)),
)
"""(width, levels, nodes) of the top-k trees that are measured."""
CHAINS_TOGETHER: Final = (1, 3, 8)
TREES_TOGETHER: Final = ((2, 2, 4), (4, 3, 12), (8, 4, 32))
"""Chains and trees that are measured with several requests."""
STATIC_WIDTHS: Final = (1, 2, 6)
"""Branches of the static trees that are measured, each four tokens long."""
SHARES: Final = (64, 16, 4, 1)
"""Sizes of shortlists, as parts of the draft's output head."""
NEVER: Final = EntropyStop(threshold=0.0, scale=1e-3, keep_last=True)
"""A stop that is looked at and does not trigger."""
CLUSTERS: Final = 64
ROUTER_HIDDEN: Final = 128


class Cell(NamedTuple):
    """A policy to measure, and what its rounds are. ``head``: tokens that its draft's output head
    evaluates (0: not apart)."""

    plan: Plan
    kind: RoundKind
    head: int = 0


def tree_policy(draft: str, width: int, levels: int, nodes: int) -> Policy:
    """EAGLE-2's tree."""
    return Policy(
        draft=draft,
        window=FixedWindow(gamma=levels),
        growth=TopKGrowth(width=width),
        select=Select(top_n=nodes),
    )


@dataclass
class Experiment:
    """Rounds of one pair on ``texts`` (token ids of what is served), at contexts from
    ``contexts[0]`` to ``contexts[-1]``."""

    pair: LoadedPair
    contexts: Sequence[int]
    texts: Sequence[Sequence[int]]
    clock: Callable[[], float] = time.perf_counter
    rounds: list[MeasuredRound] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    checked: list[tuple[int, MeasuredRound]] = field(default_factory=list)
    """Rounds of policies to check with, beside the policy's number."""
    steps: list[MeasuredStep] = field(default_factory=list)
    """Steps of several requests."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.backend = ModelBackend(self.pair)
        window, names = FixedWindow(gamma=1), self.pair.draft_names
        policies = {name: Policy(draft=name, window=window) for name in self.pair.models}
        self._prefill_plans = {
            name: prepare(policy, names)
            for name, policy in {"": AUTOREGRESSIVE, **policies}.items()
        }
        """Plans whose requests are begun for the seconds of prefills, by draft (empty: none)."""

    def sweep(
        self,
        cells: Mapping[str, Sequence[Cell]],
        checked: Sequence[Cell] = (),
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Every cell of every draft once at each temperature, prefills, and short requests under
        each cell of ``checked``, in random order. ``progress``: called after each request with
        (done, total)."""
        plans = [cell.plan for cell in chain(*cells.values(), checked)]
        deepest = max((plan.policy.depth_max for plan in plans), default=0)
        longest = self.contexts[-1] + max(PER_REQUEST * BLOCK * (deepest + 1), CHECKED_TOKENS)
        self.pair.reserve(min(longest, self.pair.max_positions) + 2)
        for plan, sampling in product([*plans, *self._prefill_plans.values()], SAMPLINGS):
            prepare_graphs(self.pair, plan, sampling=sampling)
        work: list[Callable[[], None]] = []
        for (number, cell), sampling in product(enumerate(checked), SAMPLINGS * CHECKS):
            work.append(partial(self.check, number, cell, sampling))
        for group, sampling in product(cells.values(), SAMPLINGS):
            order = [group[i] for i in self.rng.permutation(len(group))]
            for i in range(0, len(order), PER_REQUEST):
                work.append(partial(self.request, order[i : i + PER_REQUEST], sampling))
        lengths = (min(8, self.contexts[0]), self.contexts[0], self.contexts[-1])
        for name, length in product(self._prefill_plans, lengths * PREFILLS):
            work.append(partial(self.prefill, name, length))
        for done, i in enumerate(self.rng.permutation(len(work)), 1):
            work[i]()
            progress(done, len(work))

    def request(self, cells: Sequence[Cell], sampling: Sampling) -> None:
        """One request, a block of rounds under each cell."""
        tokens = sum(BLOCK * (cell.plan.policy.depth_max + 1) for cell in cells) + 1
        prompt = self.prompt(min(tokens, 4 * BLOCK * len(cells)))
        source = StaticSource(cells[0].plan)
        rounds = self._rounds(prompt, tokens, sampling, source)
        for cell in cells:
            source.prepared = cell.plan
            for n, result in enumerate(islice(rounds, BLOCK)):
                if n or result.step.lag > 2:
                    self.rounds.append(measured(result, cell, len(prompt), sampling))

    def together(self, cells: Sequence[Cell], requests: int, sampling: Sampling) -> None:
        """Steps of one request more each, up to so many and :data:`LEVEL` times as long, under the
        cells in blocks of random order. One prompt is read before a step."""
        backend, source = ModelBackend(self.pair, seats=requests), StaticSource(cells[0].plan)
        steps = requests + LEVEL * len(cells) * BLOCK
        tokens = 2 * steps
        asked = [self.prompt(tokens) for _ in range(requests)]
        waiting = Waiting(self._request(prompt, tokens, sampling) for prompt in asked)
        before: Plan | None = None
        for n, rounds in enumerate(
            islice(decode_steps(backend, waiting, source, self.clock), steps)
        ):
            if not n:  # there is room for all, so what is captured now stays
                for each in cells:
                    prepare_graphs(self.pair, each.plan, sampling=sampling)
            cell = next(cell for cell in cells if cell.plan is source.prepared)
            if before is cell.plan:  # else it pays for what the one before left in the caches
                prompts = (len(one.request.prompt_ids) for one in rounds)
                self.steps.append([
                    measured(one, cell, prompt, sampling)
                    for one, prompt in zip(rounds, prompts, strict=True)
                ])  # fmt: skip
            before = cell.plan
            if n % BLOCK == BLOCK - 1:
                source.prepared = cells[int(self.rng.integers(len(cells)))].plan

    def check(self, number: int, cell: Cell, sampling: Sampling) -> None:
        """One request under one policy, whose rounds are kept apart from those to be fitted."""
        prompt = self.prompt(CHECKED_TOKENS)
        rounds = self._rounds(prompt, CHECKED_TOKENS, sampling, StaticSource(cell.plan))
        for result in islice(rounds, 1, None):
            self.checked.append((number, measured(result, cell, len(prompt), sampling)))

    def _rounds(
        self, prompt: list[int], tokens: int, sampling: Sampling, source: StaticSource
    ) -> Iterator[Round]:
        request = self._request(prompt, tokens, sampling)
        return decode_rounds(self.backend, request, source, self.clock)

    def _request(self, prompt: list[int], tokens: int, sampling: Sampling) -> DecodeRequest:
        """One whose text ends before the models' last position."""
        seed, budget = int(self.rng.integers(1 << 31)), self.pair.max_positions - len(prompt)
        return DecodeRequest("profile", prompt, sampling, seed, min(tokens, budget))

    def prefill(self, draft: str, rows: int) -> None:
        """What precedes the rounds of a request of which ``rows`` tokens are read, by ``draft``
        too (empty: by none)."""
        plan, prompt = self._prefill_plans[draft], self.prompt(1, rows + 1)
        turn = Turn(DecodeRequest("profile", prompt, Sampling(), 1, 2), Sessions())
        began = self.clock()
        self.backend.admit(turn, plan)
        for first in range(0, rows, PROMPT_TOKENS):
            self.backend.read_prompt(turn, min(PROMPT_TOKENS, rows - first))
        if self.pair.device.type == "cuda":
            torch.cuda.synchronize()
        self.prefills.append(Prefill(draft, rows, self.clock() - began))
        self.backend.release(turn)

    def prompt(self, budget: int, length: int = 0) -> list[int]:
        """The beginning of a text, of so many tokens, or up to a context that is served."""
        most = max(2, min(self.contexts[-1] + 1, self.pair.max_positions - budget))
        length = length or int(self.rng.integers(min(self.contexts[0] + 1, most), most + 1))
        usable = [t for t in self.texts if len(t) >= length]
        if not usable:
            low = min(16, self.pair.target.vocab_size // 2)
            return [int(t) for t in self.rng.integers(low, self.pair.target.vocab_size, length)]
        return list(usable[int(self.rng.integers(len(usable)))][:length])


def measured(result: Round, cell: Cell, prompt_tokens: int, sampling: Sampling) -> MeasuredRound:
    """A round of the loop as the fit reads it."""
    step, tree = result.step, result.tree
    rows: tuple[int, ...] = ()
    kind = (cell.kind if step.draft_steps else RoundKind())._replace(sampled=not sampling.greedy)
    if step.draft_steps:
        rows = (step.lag, *(tree.widths[1:] if tree else [1] * (step.draft_steps - 1)))
    return MeasuredRound(
        kind, prompt_tokens + step.start - 1, rows, step.drafted, step.emitted,
        step.draft_s, step.verify_s, step.round_s, cell.head,
    )  # fmt: skip


def cell_of(pair: LoadedPair, policy: Policy) -> Cell:
    """A policy to measure. Chains of a head are trees of width 1; an output head of few tokens has
    no shortlists."""
    tree = policy.is_tree or policy.draft not in (*pair.chain_drafts, "none")
    rows = pair.models[policy.draft].output.rows if policy.draft in pair.models else 0
    kind = RoundKind.of(policy, tree=tree)
    return Cell(prepare(policy, pair.draft_names), kind, rows if rows >= CLUSTERS else 0)


def cells_of(pair: LoadedPair, gamma_max: int, *, trees: bool) -> dict[str, list[Cell]]:
    """What is measured of each draft: chains of every length and stop, trees of every growth,
    shortlists of every size, and none."""
    by_draft = {}
    for name in pair.draft_names:
        cells = _chains(pair, name, gamma_max) if name in pair.chain_drafts else []
        if trees and name != "ngram":
            cells += _trees(pair, name)
        if cells and name != "ngram":
            cells += _shortlists(pair, name, gamma_max)
        if cells:
            by_draft[name] = [*cells, *[cell_of(pair, AUTOREGRESSIVE)] * 3]
    return by_draft


def cells_together(pair: LoadedPair, gamma_max: int, *, trees: bool) -> dict[str, list[Cell]]:
    """What is measured of each draft with several requests: a short and a long chain, a small and a
    large tree, and none."""
    by_draft = {}
    for name in pair.draft_names:
        policies = [AUTOREGRESSIVE]
        if name in pair.chain_drafts:
            gammas = dict.fromkeys(min(gamma, gamma_max) for gamma in CHAINS_TOGETHER)
            policies += [Policy(draft=name, window=FixedWindow(gamma=gamma)) for gamma in gammas]
        if trees and name != "ngram":
            policies += [tree_policy(name, *shape) for shape in TREES_TOGETHER]
        if len(policies) > 1:
            by_draft[name] = [cell_of(pair, policy) for policy in policies]
    return by_draft


def _chains(pair: LoadedPair, name: str, gamma_max: int) -> list[Cell]:
    gammas = [*(g for g in GAMMAS if g < gamma_max), gamma_max]
    policies = [Policy(draft=name, window=FixedWindow(gamma=g)) for g in gammas]
    if name != "ngram":
        window = FixedWindow(gamma=min(6, gamma_max))
        stops = MaxProbStop(threshold=1e-9), JointProbStop(threshold=0.0), NEVER
        policies += [Policy(draft=name, window=window, stop=stop) for stop in stops]
    return [cell_of(pair, policy) for policy in policies]


def _trees(pair: LoadedPair, name: str) -> list[Cell]:
    """Top-k trees, then one of each other kind. The classifier's confidence is the joint
    probability; the stop never triggers."""
    usual = tree_policy(name, 6, 4, 24)
    policies = [tree_policy(name, *shape) for shape in TREES]
    for width in STATIC_WIDTHS:
        paths = tuple((n, *(0,) * deeper) for n in range(width) for deeper in range(4))
        changes = {"growth": StaticGrowth(paths=paths), "select": Select()}
        policies.append(usual.model_copy(update=changes))
    policies += [usual.model_copy(update={"stop": NEVER})] * 2
    joint = np.rint(65535 * np.exp(-nats(np.arange(1024) * STEP))).astype(np.int32)
    confidence = np.broadcast_to(joint, (4, 256, 1024))
    classifier = {"confidence": confidence, "beta_code": beta_code(0.1), "top_n": None}
    plain = cell_of(pair, usual)
    return [
        *(cell_of(pair, policy) for policy in policies),
        *[_grown(plain, plain.kind._replace(growth="classifier"), **classifier)] * 2,
        *[_grown(plain, plain.kind._replace(blocks=(f"stratify/{name}",)), bin_top_n=(24,))] * 2,
    ]


def _grown(cell: Cell, kind: RoundKind, **changes: Any) -> Cell:
    """A cell whose trees grow by changed rules."""
    assert cell.plan.rules is not None
    greedy, sampled = (replace(rule, **changes) for rule in cell.plan.rules)
    return cell._replace(plan=replace(cell.plan, rules=(greedy, sampled)), kind=kind)


def _shortlists(pair: LoadedPair, name: str, gamma_max: int) -> Iterator[Cell]:
    """Trimmed heads, and routed ones by a router of the usual size with random weights over
    clusters of equal sizes."""
    policy = Policy(draft=name, window=FixedWindow(gamma=min(6, gamma_max)))
    model, (plan, kind, rows) = pair.models[name], cell_of(pair, policy)
    if not rows:
        return
    ids = model.output.ids
    order = np.concatenate([ids, np.setdiff1d(np.arange(model.vocab_size), ids)])
    frequencies = Frequencies(order.astype(np.int64))
    embedding = int(model.embedded(torch.zeros(1, dtype=torch.int64, device=pair.device)).shape[-1])
    routing = _routing(model.hidden_size + embedding, rows, model.output.hash)
    for size in sorted({max(1, rows // share) for share in SHARES}):
        fixed = FrequencyShortlist(size=size, artifact="profile")
        k = max(1, round(CLUSTERS * size / rows))
        routed = ClustersShortlist(k0=k, k1=k, k_min=k, artifact="profile")
        for rule in (
            ShortlistRule(fixed, name, frequencies=frequencies),
            ShortlistRule(routed, name, routing=routing),
        ):
            listed = replace(plan, shortlist=rule, shortlists=Shortlists(rule, model))
            yield Cell(listed, kind._replace(routed=rule.routed), size)


def _routing(inputs: int, rows: int, head: str) -> Routing:
    rng, hidden = np.random.default_rng(0), ROUTER_HIDDEN
    w1, w2 = rng.normal(size=(hidden, inputs)), rng.normal(size=(CLUSTERS, hidden))
    weights = w1 / np.sqrt(inputs), np.zeros(hidden), w2 / np.sqrt(hidden), np.zeros(CLUSTERS)
    floats = tuple(w.astype(np.float32) for w in weights)
    return Routing(floats, Clusters(np.arange(rows) % CLUSTERS, CLUSTERS), head)
