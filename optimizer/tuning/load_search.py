"""The search under load, in simulation: what to do at each number of running requests.

Every constant policy is simulated, and no draft. A table has an entry for each doubled number (1,
2, 4 and so on); its entries are searched by TPE, seeded with the constants and with what is best at
each number alone. Of what loses no more than a tie to the best, no draft is proposed, else a
constant, else the table of fewest entries.

Of an engine the entries are numbers of draft tokens (:class:`TokenStudy`); where the contexts of
steps vary, tables that differ below and above their median are searched, too. Of the native decoder
they are whole policies (:class:`PolicyStudy`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, product
from typing import Any, Final

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from spectune.engines.abilities import contexts_of
from spectune.engines.engine import Load
from spectune.optimizer.replay.loads import Served
from spectune.optimizer.replay.step_costs import step_seconds
from spectune.optimizer.tuning.engine_bench import EngineBench, constant
from spectune.optimizer.tuning.timings import TIE
from spectune.optimizer.tuning.under_load import UnderLoad
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    ByLoadWindow,
    LoadPolicy,
    Policy,
)
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import PolicyError

TRIALS: Final = 400
"""Tables that are tried, of an engine for each draft."""
CHOICES: Final = 12
"""Policies of which tables by load are made, at most."""
SPREAD: Final = 2.0
"""Tables by context are tried where the 90th percentile of the steps' mean contexts is so many
times the 10th."""
SEEDS: Final = 10
"""Tables by batch size alone that a search by context begins with, the best."""


@dataclass(frozen=True)
class LoadTrial:
    """A policy as simulated on the texts that are searched on: what was ``served`` of each load,
    and how good each is by the objective (``worth``)."""

    policy: Policy
    served: Mapping[str, Served]
    worth: Mapping[str, float]
    largest_batch: int
    contexts: tuple[float, float, float]
    """Percentiles 10, 50 and 90 of the mean context of a step's requests."""
    tokens_per_round: float

    @property
    def value(self) -> float:
        """The geometric mean over the loads."""
        return float(np.exp(np.mean(np.log(list(self.worth.values())))))

    def to_json(self) -> dict[str, Any]:
        policy = {"policy": self.policy.spelled_out(), "id": self.policy.id}
        return {**policy, "value": self.value, "worth": dict(self.worth)}

    def within_a_tie(self, best: LoadTrial) -> bool:
        """Whether it loses no more than a tie under any load."""
        return all(worth >= best.worth[name] * (1 - TIE) for name, worth in self.worth.items())


@dataclass
class LoadStudy(ABC):
    """The trials of a search, by policy id; see :meth:`run`."""

    bench: UnderLoad
    num_trials: int = TRIALS
    seed: int = 0
    progress: Progress = silent
    trials: dict[str, LoadTrial] = field(default_factory=dict)
    constants: list[LoadTrial] = field(default_factory=list)
    """Every policy that is alike at each load, no draft among them."""
    extrapolated: dict[str, float] = field(default_factory=dict)
    """By load the largest share of a policy's steps that are of more or fewer requests than were
    measured."""

    @abstractmethod
    def run(self) -> LoadTrial:
        """The policy to propose."""

    def try_constants(self, policies: Sequence[Policy]) -> None:
        for n, policy in enumerate(policies, 1):
            self.constants.append(self.trial(policy))
            self.progress("constants", n, len(policies))

    def trial(self, policy: Policy) -> LoadTrial:
        """A policy simulated on the texts that are searched on; remembered."""
        if policy.id not in self.trials:
            bench = self.bench
            simulated = bench.simulate_loads(policy, bench.search_trace)
            for name, one in simulated.items():
                share = bench.beyond(policy, one.batches)
                self.extrapolated[name] = max(share, self.extrapolated.get(name, 0.0))
            served = {name: one.served for name, one in simulated.items()}
            contexts = np.concatenate([one.contexts for one in simulated.values()])
            rounds, accepted, _ = sum(one.counts.sum(0) for one in simulated.values())
            self.trials[policy.id] = LoadTrial(
                policy,
                served,
                {name: bench.objective.worth(one) for name, one in served.items()},
                max(int(one.batches.max(initial=1)) for one in simulated.values()),
                tuple(np.quantile(contexts, (0.1, 0.5, 0.9)).tolist()),
                1 + float(accepted / max(1, rounds)),
            )
        return self.trials[policy.id]

    def best_constant(self, load: str) -> LoadTrial:
        """The best constant of a load; of equal ones the first, which drafts least."""
        return max(self.constants, key=lambda trial: float(f"{trial.worth[load]:.4g}"))

    @property
    def off(self) -> LoadTrial | None:
        """No draft loaded; None where no steps of that were measured."""
        return next((t for t in self.constants if t.policy.draft == "none"), None)

    @property
    def no_speculation_from(self) -> str | None:
        """The first load from which on not to speculate is best; None where there is none."""
        first = None
        for name in self.bench.loads:
            speculates = self.best_constant(name).policy.speculates
            first = None if speculates else (first or name)
        return first

    @property
    def _sizes(self) -> list[int]:
        """The batch sizes that a table has entries for: those that occur under the loads."""
        largest = max(trial.largest_batch for trial in self.constants)
        return [1 << n for n in range(min(largest, self.bench.max_num_seqs).bit_length())]

    def optimise(
        self,
        name: str,
        space: Mapping[str, BaseDistribution],
        seeds: Iterable[tuple[Mapping[str, Any], float | None]],
        policy_of: Callable[[Mapping[str, Any]], Policy],
    ) -> None:
        """Tries ``num_trials`` points of a space by TPE, beginning with ``seeds``: parameters, and
        what they are worth, None: not known yet."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=0)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for params, value in seeds:
            if value is None:
                study.enqueue_trial(dict(params))
                continue
            known = optuna.trial.create_trial(
                params=dict(params), distributions=dict(space), value=float(np.log(value))
            )
            study.add_trial(known)
        for n in range(self.num_trials):
            suggestion = study.ask(dict(space))
            trial = self.trial(policy_of(suggestion.params))
            study.tell(suggestion, float(np.log(trial.value)))
            self.progress(name, n + 1, self.num_trials)

    def simplest(self, best: LoadTrial) -> LoadTrial:
        """Of those within a tie of the best: no draft, else a constant, else the table of fewest
        entries. Costs of single steps are not known better than a tie."""
        tied = [trial for trial in self.constants if trial.within_a_tie(best)]
        plain = [trial for trial in tied if not trial.policy.speculates]
        if tied:
            return max(plain or tied, key=lambda trial: trial.value)
        simplest = best
        while fewer := [self.trial(policy) for policy in self.merged(simplest.policy)]:
            near = [trial for trial in fewer if trial.within_a_tie(best)]
            if not near:
                break
            simplest = max(near, key=lambda trial: trial.value)
        return simplest

    @abstractmethod
    def merged(self, policy: Policy) -> Iterator[Policy]:
        """The tables of one entry less, each entry in the place of a neighbour; none of a policy
        that is alike at each load."""


@dataclass
class TokenStudy(LoadStudy):
    """Draft tokens of an engine by batch size and context."""

    bench: EngineBench
    contexts: tuple[float, float, float] | None = None
    """:attr:`LoadTrial.contexts` of the best draft's best table; None where the engine has none."""
    context: int = 0
    """The context from which on other tables were tried; 0: none, as contexts vary little."""

    def run(self) -> LoadTrial:
        """Raises PolicyError where no steps with a draft were recorded: no draft can be judged."""
        policies = list(self._constants())
        if not any(policy.speculates for policy in policies):
            served_by = self.bench.costs.served_by
            raise PolicyError(
                "no steps that draft were recorded, so no draft can be judged; serve with a draft "
                f"for a while, or have {served_by} serve every draft of the pair"
            )
        self.try_constants(policies)
        for draft in dict.fromkeys(p.draft for p in policies if p.speculates):
            constants = [trial for trial in self.constants if trial.policy.draft == draft]
            self._search_tables(draft, {0: self._mean_context}, constants)
        self._search_contexts()
        return self.simplest(max(self.trials.values(), key=lambda trial: trial.value))

    def idle(self, draft: str) -> LoadTrial | None:
        """A server that has a draft loaded and drafts 0 tokens: this draft, else any. None where
        none was recorded."""
        idle = [t for t in self.constants if t.policy.draft != "none" and not t.policy.speculates]
        return next((t for t in idle if t.policy.draft == draft), next(iter(idle), None))

    def _constants(self) -> Iterator[Policy]:
        passes = self.bench.costs.passes
        if "" in passes:
            yield Policy()
        for draft, (least, most) in passes.items():
            if draft:
                for gamma in range(least, most + 1):
                    yield constant(draft, gamma)

    def _search_tables(
        self, draft: str, contexts: Mapping[int, float], seeds: Sequence[LoadTrial]
    ) -> None:
        """Tries tables of a draft by batch size from each of the contexts on, beginning with what
        ``seeds`` draft and what is best for a step of each size alone, at a context that is typical
        from there on."""
        places = list(product(contexts, self._sizes))
        least, most = self.bench.costs.passes[draft]
        space: dict[str, BaseDistribution] = {
            f"{context}/{size}": IntDistribution(least, most) for context, size in places
        }
        known: list[tuple[Mapping[str, Any], float | None]] = []
        for trial in seeds:
            gammas = [tokens_at(trial.policy, size, context) for context, size in places]
            known.append((dict(zip(space, gammas, strict=True)), trial.value))
        alone = self._best_alone(draft, list(product(contexts.values(), self._sizes)))
        known.append((dict(zip(space, alone, strict=True)), None))
        name = f"{draft} by batch" + " and context" * (len(contexts) > 1)

        def policy_of(params: Mapping[str, Any]) -> Policy:
            return by_load(draft, places, [params[name] for name in space])

        self.optimise(name, space, known, policy_of)

    def _search_contexts(self) -> None:
        """Tries tables of the best draft that differ below and above the median context of a step,
        where contexts vary."""
        tables = [trial for trial in self.trials.values() if trial.policy.draft != "none"]
        best, *_ = ranked = sorted(tables, key=lambda trial: -trial.value)
        self.contexts = low, middle, high = best.contexts
        if high >= SPREAD * low:
            draft, self.context = best.policy.draft, max(1, round(middle))
            seeds = [trial for trial in ranked if trial.policy.draft == draft][:SEEDS]
            self._search_tables(draft, {0: low, self.context: high}, seeds)

    @property
    def gain_by_context(self) -> float | None:
        """The best table that differs by context over the best policy that does not, as predicted
        on the texts that are searched on: below 1 where these lose. None where none was tried."""
        values: dict[bool, list[float]] = {True: [], False: []}
        for trial in self.trials.values():
            values[len(contexts_of(trial.policy)) > 1].append(trial.value)
        return max(values[True]) / max(values[False]) if values[True] else None

    @property
    def _mean_context(self) -> float:
        trace = self.bench.trace
        return float(np.mean(trace.prompts + np.diff(trace.offsets) / 2))

    def _best_alone(self, draft: str, places: Sequence[tuple[float, int]]) -> list[int]:
        """By context and size the number of tokens with which a step of so many requests emits
        fastest."""
        tried = [t for t in self.constants if t.policy.draft == draft]
        costs = self.bench.costs.of(draft, [trial.policy.gamma_max for trial in tried])

        def per_token_s(trial: LoadTrial, context: float, size: int) -> float:
            gamma = trial.policy.gamma_max
            step_s = step_seconds(costs, size * (1 + gamma), 0, size, size * context, gamma)
            return step_s / trial.tokens_per_round

        return [
            min(tried, key=lambda t: per_token_s(t, context, size)).policy.gamma_max
            for context, size in places
        ]

    def merged(self, policy: Policy) -> Iterator[Policy]:
        """Of two contexts also the table of each alone."""
        if not isinstance(policy.window, ByLoadWindow):
            return
        contexts = contexts_of(policy)
        places = list(product(contexts, self._sizes))
        gammas = {place: tokens_at(policy, place[1], place[0]) for place in places}
        for context in contexts if len(contexts) > 1 else ():
            yield by_load(policy.draft, places, [gammas[context, size] for _, size in places])
        for context in contexts:
            runs = [list(run) for _, run in groupby(self._sizes, lambda n: gammas[context, n])]  # noqa: B023
            for one, other in pairwise(runs):
                for replaced, by in ((one, other), (other, one)):
                    merged = {(context, size): gammas[context, by[0]] for size in replaced}
                    yield by_load(policy.draft, places, [*(gammas | merged).values()])


@dataclass
class PolicyStudy(LoadStudy):
    """Whole policies of the native decoder by the number of running requests, of a ``pool``."""

    pool: Sequence[Policy] = ()

    def run(self) -> LoadTrial:
        self.try_constants([AUTOREGRESSIVE, *self.pool])
        policies = [trial.policy for trial in self.constants]
        alone = self._best_alone(policies)
        # What is best nowhere is in no table: its neighbours were.
        good = list(dict.fromkeys([*alone, *self._best_of_loads()]))[:CHOICES]
        space: dict[str, BaseDistribution] = {
            f"{size}": CategoricalDistribution(good) for size in self._sizes
        }
        if len(good) > 1 and len(space) > 1:
            known: list[tuple[Mapping[str, Any], float | None]] = [
                (dict.fromkeys(space, name), self.trials[name].value) for name in good
            ]
            known.append((dict(zip(space, alone, strict=True)), None))
            by_id = {policy.id: policy for policy in policies}

            def policy_of(params: Mapping[str, Any]) -> Policy:
                return policies_by_load({int(n): by_id[params[n]] for n in space})

            self.optimise("policies by load", space, known, policy_of)
        return self.simplest(max(self.trials.values(), key=lambda trial: trial.value))

    def _best_alone(self, policies: Sequence[Policy]) -> list[str]:
        """By number of clients the policy that serves just so many fastest."""
        bench = self.bench
        best = []
        for n, size in enumerate(self._sizes, 1):
            served = {
                policy.id: bench.simulate(policy, Load(size), bench.search_trace).served
                for policy in policies
            }
            best.append(max(served, key=lambda name: served[name].tokens_per_s))
            self.progress("clients", n, len(self._sizes))
        return best

    def _best_of_loads(self) -> list[str]:
        """The constants, the best of any load first."""
        ranked = [
            sorted(self.constants, key=lambda trial: -trial.worth[load])
            for load in self.bench.loads
        ]
        return [trial.policy.id for places in zip(*ranked, strict=True) for trial in places]

    def merged(self, policy: Policy) -> Iterator[Policy]:
        if not isinstance(policy, LoadPolicy):
            return
        for one, other in pairwise(policy.by_load):
            for kept in (one, other):
                table = {n: entry for n, entry in policy.by_load.items() if n not in (one, other)}
                yield policies_by_load({**table, one: policy.by_load[kept]})


def policies_by_load(table: Mapping[int, Policy]) -> Policy:
    """A table in as few entries as say it, or the one policy that it holds."""
    entries: dict[int, Policy] = {}
    for least, policy in sorted(table.items()):
        if not entries or policy != [*entries.values()][-1]:
            entries[least] = policy
    if len(entries) == 1:
        return next(iter(entries.values()))
    return LoadPolicy.model_validate({"by_load": entries})


def tokens_at(policy: Policy, size: int, context: int) -> int:
    """What a constant or a table drafts in a step of so many requests of such contexts."""
    window = policy.window
    return window.at(size, context) if isinstance(window, ByLoadWindow) else policy.gamma_max


def by_load(draft: str, places: Sequence[tuple[int, int]], gammas: Sequence[int]) -> Policy:
    """A table in as few entries as say it: tokens for each context and batch size."""
    tables: dict[int, dict[int, int]] = {}
    for context, rows in groupby(zip(places, gammas, strict=True), key=lambda row: row[0][0]):
        runs = groupby(rows, key=lambda row: row[1])
        table = {next(run)[0][1]: gamma for gamma, run in runs}
        if table not in list(tables.values())[-1:]:
            tables[context] = table
    first = tables.pop(0)
    if not tables and len(first) == 1:
        return constant(draft, gammas[0])
    window: dict[str, Any] = {"kind": "by_load", "gamma": first, "contexts": tables}
    return Policy(draft=draft, window=ByLoadWindow.model_validate(window))
