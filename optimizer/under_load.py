"""Policies under load, in simulation: what one comes to, and which table (draft, draft tokens by
batch size) is best at given loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Final

import numpy as np

from spectune.engines.abilities import Engine, engine_named
from spectune.engines.protocol import Load
from spectune.engines.rules import ServingRules, rules_of
from spectune.optimizer.simulate.load import Objective, Served, loads_of, recorded_arrivals
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.served_costs import ServedCosts, costs_of_engine
from spectune.optimizer.simulate.serving import Simulated, serve
from spectune.optimizer.simulate.trace import open_trace
from spectune.optimizer.timings import TIE
from spectune.runtime.policies.document import ByBatchWindow, FixedWindow, Policy
from spectune.runtime.progress import Progress
from spectune.traces.errors import PolicyError
from spectune.traces.recording import RecordedRequest
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording

SWEEPS: Final = 3
"""Most times that a search goes over the sizes of a table."""


@dataclass(frozen=True)
class UnderLoad:
    """What an engine's recording says of load: its texts, its rules, what its steps cost, and the
    loads and objective asked for."""

    info: Recording
    engine: Engine
    rules: ServingRules
    costs: ServedCosts
    trace: ReplayTrace
    loads: Mapping[str, Load]
    objective: Objective
    count: int
    unserved: tuple[str, ...] = ()
    """Drafts of the pair with which no steps were recorded."""

    def server_draft(self, policy: Policy) -> str:
        """The draft that the server of a policy has loaded, "" for none. An engine that decides on
        a draft at the beginning of a step goes without it at 0 tokens."""
        drafts = policy.speculates or (policy.draft != "none" and self.rules.drafts_after)
        return policy.draft if drafts else ""

    def simulate(self, policy: Policy, load: Load) -> Simulated:
        """A policy under a load. Raises PolicyError where the engine cannot run it, or where too
        little was served to know what it costs."""
        gammas = self.engine.gammas(
            policy, draft=policy.draft, most=policy.gamma_max, max_num_seqs=self.rules.max_num_seqs
        )
        return serve(
            self.trace,
            policy.draft,
            gammas,
            load,
            self.rules,
            self.costs.of(self.server_draft(policy), gammas[1:]),
            count=self.count,
        )


def under_load(
    store: TraceStore,
    info: Recording,
    policies: Sequence[Policy],
    asked: str,
    objective: Objective,
    *,
    limit: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> UnderLoad:
    """Makes ready to simulate policies, or none: those of every draft that the engine had loaded,
    under the loads that ``asked`` says; ``tell`` is told how a file of arrivals was read. Raises as
    :func:`open_trace`, :func:`loads_of` and :func:`costs_of_engine` do."""
    engine, rules = engine_named(info.engine), rules_of(info.engine, info.options.get("serving"))
    for policy in policies:
        engine.runs(policy)
    costs = costs_of_engine(store, info)
    wanted = policies or [
        _constant(draft, costs.passes[draft][1]) for draft in costs.drafts if draft
    ]
    opened = open_trace(store, info.id, wanted)
    trace = opened.trace
    requests: Sequence[RecordedRequest] = ()
    if asked.partition("@")[0] == "recorded":
        requests = store.load(info.id, (), steps=True, ordinals=opened.ordinals).requests
        # They are stored in the order in which they ended.
        trace = trace.select(np.argsort(recorded_arrivals(requests), kind="stable"))
    count = limit or len(trace.order)
    loads = loads_of(asked, requests, count, limit, tell=tell)
    drafts = dict(store.get_pair(info.pair_id).document.get("drafts", {}))
    unserved = tuple(draft for draft in drafts if draft not in costs.drafts)
    return UnderLoad(info, engine, rules, costs, trace, loads, objective, count, unserved)


def _constant(draft: str, gamma: int) -> Policy:
    return Policy(draft=draft, window=FixedWindow(gamma=gamma))


@dataclass(frozen=True)
class Scored:
    """A policy and how it does under each load, by name."""

    policy: Policy
    served: Mapping[str, Served]


@dataclass(frozen=True)
class Found:
    """What a search found. ``table``: the policy that is best over all loads together, ``relative``
    to the best constant number of tokens at each. ``constants``: every draft with every constant,
    and no draft; ``best``: of these the best by load. ``simulated``: policies tried;
    ``beyond``: by load the share of steps of more or fewer requests than were recorded, where there
    are any."""

    table: Scored
    constants: tuple[Scored, ...]
    best: Mapping[str, Scored]
    relative: Mapping[str, float]
    simulated: int
    beyond: Mapping[str, float]

    @property
    def off(self) -> Scored | None:
        """How a server without a draft does, where one was recorded."""
        return next((s for s in self.constants if s.policy.draft == "none"), None)

    @property
    def idle(self) -> Scored | None:
        """How a server does that has a draft loaded and drafts 0 tokens, where that is known: the
        table's draft, else any. None for an engine that goes without its draft then."""
        idle = {s.policy.draft: s for s in self.constants if not s.policy.speculates}
        idle.pop("none", None)
        return idle.get(self.table.policy.draft) or next(iter(idle.values()), None)

    @property
    def stops_at(self) -> str | None:
        """The first load from which on not to speculate is best, None where there is none."""
        stops = None
        for name, scored in self.best.items():
            stops = (stops or name) if not scored.policy.gamma_max else None
        return stops


class Search:
    """The search over tables: every constant, then size by size from each draft's best. Sizes are
    doubled: 1, 2, 4 and so on."""

    def __init__(self, lab: UnderLoad, progress: Progress) -> None:
        self.lab, self._progress = lab, progress
        self._known: dict[str, Scored] = {}
        self._reach: dict[str, float] = {}
        self._beyond = dict.fromkeys(lab.loads, 0.0)

    def run(self) -> Found:
        """Raises PolicyError where no steps with a draft were recorded: no draft can be judged."""
        every = list(self._constants())
        if not any(policy.speculates for policy in every):
            costs = self.lab.costs
            raise PolicyError(
                "no steps that draft were recorded, so no draft can be judged; serve with a draft "
                f"for a while, or have {costs.served_by} serve every draft of the pair"
            )
        constants = []
        for done, policy in enumerate(every, 1):
            constants.append(self.scored(policy))
            self._progress("constants", done, len(every))
        best = {name: max(constants, key=partial(self._worth, name)) for name in self.lab.loads}
        self._reach = {name: self.lab.objective.worth(s.served[name]) for name, s in best.items()}
        table = max(constants, key=self._worth_of_all)
        drafts = dict.fromkeys(s.policy.draft for s in constants if s.policy.gamma_max)
        for draft in drafts if self.lab.engine.by_batch else ():
            first = max(
                (s for s in constants if s.policy.draft == draft and s.policy.gamma_max),
                key=self._worth_of_all,
            )
            table = max(table, self._simplest(self._descended(first)), key=self._worth_of_all)
        beyond = {name: share for name, share in self._beyond.items() if share}
        relative = self._relative(table)
        return Found(table, tuple(constants), best, relative, len(self._known), beyond)

    def scored(self, policy: Policy) -> Scored:
        """A policy under every load, remembered."""
        if policy.id not in self._known:
            served = {}
            for name, load in self.lab.loads.items():
                simulated = self.lab.simulate(policy, load)
                served[name] = simulated.served
                share = self.lab.costs.beyond(self.lab.server_draft(policy), simulated.batches)
                self._beyond[name] = max(self._beyond[name], share)
            self._known[policy.id] = Scored(policy, served)
        return self._known[policy.id]

    def _constants(self) -> Iterator[Policy]:
        """No draft, where such a server was recorded, and every number of tokens of every draft
        that was; 0 where that leaves the draft loaded."""
        passes, least_of_all = self.lab.costs.passes, 0 if self.lab.rules.drafts_after else 1
        if "" in passes:
            yield Policy()
        for draft, (least, most) in passes.items():
            if draft:
                for gamma in range(max(least_of_all, least), most + 1):
                    yield _constant(draft, gamma)

    @property
    def _sizes(self) -> list[int]:
        return [1 << n for n in range(self.lab.rules.max_num_seqs.bit_length())]

    def _simplest(self, best: Scored) -> Scored:
        """The best table of fewer entries of those that lose no more than a tie under any load:
        costs of single steps are not known better than that."""
        sizes, found, reach = self._sizes, best, self._relative(best)
        while isinstance(found.policy.window, ByBatchWindow):
            runs = [list(run) for _, run in groupby(sizes, found.policy.window.at)]
            fewer = []
            for left, right in pairwise(runs):
                for gone, stays in ((left, right), (right, left)):
                    gammas = [
                        found.policy.window.at(stays[0] if size in gone else size) for size in sizes
                    ]
                    fewer.append(self.scored(_by_batch(found.policy.draft, sizes, gammas)))
            near = [
                one
                for one in fewer
                if all(r >= reach[name] * (1 - TIE) for name, r in self._relative(one).items())
            ]
            if not near:
                break
            found = max(near, key=self._worth_of_all)
        return found

    def _descended(self, scored: Scored) -> Scored:
        """The best that is found by changing the tokens of one size at a time."""
        draft, sizes = scored.policy.draft, self._sizes
        least, most = self.lab.costs.passes[draft]
        gammas = [scored.policy.gamma_max] * len(sizes)
        for sweep in range(SWEEPS):
            before = list(gammas)
            for n in range(len(sizes)):
                self._progress(f"{draft} by batch", sweep * len(sizes) + n, SWEEPS * len(sizes))
                for gamma in range(least, most + 1):
                    tried = self.scored(
                        _by_batch(draft, sizes, [*gammas[:n], gamma, *gammas[n + 1 :]])
                    )
                    if self._worth_of_all(tried) > self._worth_of_all(scored):
                        scored, gammas = tried, [*gammas[:n], gamma, *gammas[n + 1 :]]
            if gammas == before:
                break
        self._progress(f"{draft} by batch", SWEEPS * len(sizes), SWEEPS * len(sizes))
        return scored

    def _worth(self, name: str, scored: Scored) -> tuple[float, float]:
        served = scored.served[name]
        return _rounded(self.lab.objective.worth(served)), -served.mean_tpot_s

    def _worth_of_all(self, scored: Scored) -> tuple[float, float]:
        relative = self._relative(scored)
        return _rounded(sum(relative.values())), -sum(s.mean_tpot_s for s in scored.served.values())

    def _relative(self, scored: Scored) -> dict[str, float]:
        """How good it is by load, as parts of the best constant's."""
        worth = self.lab.objective.worth
        return {name: worth(served) / self._reach[name] for name, served in scored.served.items()}


def _by_batch(draft: str, sizes: Sequence[int], gammas: Sequence[int]) -> Policy:
    """A table in as few entries as say it."""
    kept = {
        str(size): gamma
        for n, (size, gamma) in enumerate(zip(sizes, gammas, strict=True))
        if not n or gamma != gammas[n - 1]
    }
    if len(kept) == 1:
        return _constant(draft, gammas[0])
    return Policy(
        draft=draft, window=ByBatchWindow.model_validate({"kind": "by_batch", "gamma": kept})
    )


def _rounded(worth: float) -> float:
    """To four digits: a table that gains less is not taken for better, the shorter time per output
    token then decides."""
    return float(f"{worth:.4g}")
