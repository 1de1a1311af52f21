"""The search under load: draft tokens by batch size and context, in simulation.

Every constant number of tokens of every draft is simulated, and no draft. A table says so many
tokens for each doubled batch size (1, 2, 4 and so on); its integers are searched by TPE, seeded
with the constants and with what is best for a step of each size alone. Where the contexts of steps
vary, tables that differ below and above their median are searched, too. Of what loses no more than
a tie to the best, no draft is proposed, else a constant, else the table of fewest entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, product
from typing import Any, Final

import numpy as np
import optuna

from spectune.engines.abilities import contexts_of
from spectune.optimizer.replay.loads import Served
from spectune.optimizer.replay.step_costs import step_seconds
from spectune.optimizer.tuning.engine_bench import EngineBench, constant
from spectune.optimizer.tuning.timings import TIE
from spectune.runtime.policies.document import ByLoadWindow, Policy
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import PolicyError

TRIALS: Final = 400
"""Tables of a draft that are tried."""
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
class LoadStudy:
    """The trials of a search, by policy id; see :meth:`run`."""

    bench: EngineBench
    num_trials: int = TRIALS
    seed: int = 0
    progress: Progress = silent
    trials: dict[str, LoadTrial] = field(default_factory=dict)
    constants: list[LoadTrial] = field(default_factory=list)
    """Every constant number of tokens of every draft, and no draft, whose steps were recorded."""
    contexts: tuple[float, float, float] | None = None
    """:attr:`LoadTrial.contexts` of the best draft's best table; None where the engine has none."""
    context: int = 0
    """The context from which on other tables were tried; 0: none, as contexts vary little."""
    extrapolated: dict[str, float] = field(default_factory=dict)
    """By load the largest share of a policy's steps that are of more or fewer requests than were
    recorded."""

    def run(self) -> LoadTrial:
        """The policy to propose. Raises PolicyError where no steps with a draft were recorded: no
        draft can be judged."""
        policies = list(self._constants())
        if not any(policy.speculates for policy in policies):
            served_by = self.bench.costs.served_by
            raise PolicyError(
                "no steps that draft were recorded, so no draft can be judged; serve with a draft "
                f"for a while, or have {served_by} serve every draft of the pair"
            )
        for n, policy in enumerate(policies, 1):
            self.constants.append(self.trial(policy))
            self.progress("constants", n, len(policies))
        for draft in dict.fromkeys(p.draft for p in policies if p.speculates):
            constants = [trial for trial in self.constants if trial.policy.draft == draft]
            self._search_tables(draft, {0: self._mean_context}, constants)
        self._search_contexts()
        return self._simplest(max(self.trials.values(), key=lambda trial: trial.value))

    def trial(self, policy: Policy) -> LoadTrial:
        """A policy simulated on the texts that are searched on; remembered."""
        if policy.id not in self.trials:
            bench = self.bench
            simulated = bench.simulate_loads(policy, bench.search_trace)
            for name, one in simulated.items():
                share = bench.costs.beyond(bench.server_draft(policy), one.batches)
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
        """A server without a draft; None where no steps of one were recorded."""
        return next((t for t in self.constants if t.policy.draft == "none"), None)

    def idle(self, draft: str) -> LoadTrial | None:
        """A server that has a draft loaded and drafts 0 tokens: this draft, else any. None where
        none was recorded."""
        idle = [t for t in self.constants if t.policy.draft != "none" and not t.policy.speculates]
        return next((t for t in idle if t.policy.draft == draft), next(iter(idle), None))

    @property
    def no_speculation_from(self) -> str | None:
        """The first load from which on not to speculate is best; None where there is none."""
        first = None
        for name in self.bench.loads:
            speculates = self.best_constant(name).policy.speculates
            first = None if speculates else (first or name)
        return first

    def _constants(self) -> Iterator[Policy]:
        passes = self.bench.costs.passes
        if "" in passes:
            yield Policy()
        for draft, (least, most) in passes.items():
            if draft:
                for gamma in range(least, most + 1):
                    yield constant(draft, gamma)

    @property
    def _sizes(self) -> list[int]:
        """The batch sizes that a table has entries for: those that occur under the loads."""
        largest = max(trial.largest_batch for trial in self.constants)
        return [1 << n for n in range(min(largest, self.bench.rules.max_num_seqs).bit_length())]

    def _search_tables(
        self, draft: str, contexts: Mapping[int, float], seeds: Sequence[LoadTrial]
    ) -> None:
        """Tries tables of a draft by batch size from each of the contexts on, beginning with what
        ``seeds`` draft and what is best for a step of each size alone, at a context that is typical
        from there on."""
        places = list(product(contexts, self._sizes))
        least, most = self.bench.costs.passes[draft]
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=0)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        space = {
            f"{context}/{size}": optuna.distributions.IntDistribution(least, most)
            for context, size in places
        }
        for trial in seeds:
            gammas = [tokens_at(trial.policy, size, context) for context, size in places]
            params, value = dict(zip(space, gammas, strict=True)), np.log(trial.value)
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=space, value=value)
            )
        alone = self._best_alone(draft, list(product(contexts.values(), self._sizes)))
        study.enqueue_trial(dict(zip(space, alone, strict=True)))
        name = f"{draft} by batch" + " and context" * (len(contexts) > 1)
        for n in range(self.num_trials):
            suggestion = study.ask(space)
            policy = by_load(draft, places, [suggestion.params[name] for name in space])
            study.tell(suggestion, float(np.log(self.trial(policy).value)))
            self.progress(name, n + 1, self.num_trials)

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
    def best_by_batch(self) -> LoadTrial:
        """The best of the trials that draft alike at every context."""
        alike = (t for t in self.trials.values() if len(contexts_of(t.policy)) == 1)
        return max(alike, key=lambda trial: trial.value)

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

    def _simplest(self, best: LoadTrial) -> LoadTrial:
        """Of those within a tie of the best: no draft, else a constant, else the table of fewest
        entries. Costs of single steps are not known better than a tie."""
        tied = [trial for trial in self.constants if trial.within_a_tie(best)]
        plain = [trial for trial in tied if not trial.policy.speculates]
        if tied:
            return max(plain or tied, key=lambda trial: trial.value)
        simplest = best
        while isinstance(simplest.policy.window, ByLoadWindow):
            fewer = [self.trial(policy) for policy in self._merged(simplest.policy)]
            near = [trial for trial in fewer if trial.within_a_tie(best)]
            if not near:
                break
            simplest = max(near, key=lambda trial: trial.value)
        return simplest

    def _merged(self, policy: Policy) -> Iterator[Policy]:
        """The tables of one entry less, each entry in the place of a neighbour; of two contexts
        also the table of each alone."""
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
