"""Several requests at once as a bench: a unit is a short run of every load with some of the texts.
It costs the inverse of what the objective makes of it, in the geometric mean of the loads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.engines.engine import Answered, Load, Prompt, Running, numbered
from spectune.optimizer.execute import DecodeOptions, counts_of
from spectune.optimizer.recording.on_engine import execute
from spectune.optimizer.replay.loads import Objective, Served
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.serving import Simulated
from spectune.optimizer.tuning.bench import Bench, PartName, Prediction
from spectune.optimizer.tuning.parts import Parts
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.optimizer.tuning.tuned import AT_A_RATE, GAINS
from spectune.runtime.policies.document import Policy
from spectune.traces.conversations import Index
from spectune.traces.cost_table import FloatArray
from spectune.traces.schema import Counts, Outcome, RequestOutcome, Sampling, latency_json
from spectune.traces.tables import Trajectory

UNITS: Final = 8
"""Most units of a part; each has texts of its own."""
LEAST_REQUESTS: Final = 4
"""Fewest requests that a unit serves of a load; else two for each client."""
ARRIVALS_S: Final = 10.0
"""Seconds of arrivals that a unit serves."""


class UnderLoad(Bench):
    """A bench whose units are runs of ``loads``. Each load serves ``count`` requests, or as many as
    arrive, from the first text again where there are fewer; of a unit some of them
    (:meth:`unit_load`). ``max_num_seqs``: requests that are served at once, at most."""

    trace: ReplayTrace
    parts: Parts
    loads: Mapping[str, Load]
    objective: Objective
    count: int
    by_size = False
    block = 1
    unit = "runs"

    @property
    def gain(self) -> str:
        if self.objective.kind == "throughput" and any(x.arrivals for x in self.loads.values()):
            return AT_A_RATE
        return GAINS[self.objective.kind]

    @property
    @abstractmethod
    def max_num_seqs(self) -> int: ...

    @property
    @abstractmethod
    def sampling(self) -> Sampling:
        """By which the texts were recorded, and are executed."""

    @property
    @abstractmethod
    def recorded(self) -> Sequence[Trajectory]:
        """The texts, whole."""

    @abstractmethod
    def simulate(
        self,
        policy: Policy,
        load: Load,
        trace: ReplayTrace | None = None,
        count: int | None = None,
    ) -> Simulated:
        """A policy under a load on some of the texts (None: on all), by so many requests (None:
        ``self.count``). Raises PolicyError where it cannot run, or where what it costs is not
        known."""

    def beyond(self, policy: Policy, batches: npt.NDArray[np.int32]) -> float:
        """The share of simulated steps, given by their numbers of requests, whose costs are
        extrapolated."""
        return 0.0

    @property
    def search_trace(self) -> ReplayTrace:
        """The texts that are searched on."""
        return self._unit_traces["search"][0]

    @abstractmethod
    def start_for(self, policies: Sequence[Policy], longest: int) -> Running:
        """Starts what executes policies of one group, on texts of at most so many tokens."""

    @property
    @abstractmethod
    def typical(self) -> Policy:
        """A policy whose run takes about as long as others'."""

    def unit_texts(self, part: PartName, unit: int) -> list[int]:
        """The numbers of a unit's texts, whole conversations. Those searched on are one unit."""
        numbers, units = self._places(part), self.units(part)
        return [text for text, place in numbers.items() if place % units == unit]

    def units(self, part: PartName) -> int:
        return 1 if part == "search" else min(UNITS, len(set(self._places(part).values())))

    def groups(self, part: PartName) -> Index:
        """Each unit is one of its own, as it has conversations of its own."""
        return np.arange(self.units(part))

    def _places(self, part: PartName) -> dict[int, int]:
        """The number of each text of a part, and of its conversation among those of the part."""
        numbers: list[int] = list(getattr(self.parts, part))
        of = self.trace.conversations[numbers].tolist()
        places = {conversation: place for place, conversation in enumerate(dict.fromkeys(of))}
        return {text: places[conversation] for text, conversation in zip(numbers, of, strict=True)}

    @cached_property
    def _unit_traces(self) -> dict[str, list[ReplayTrace]]:
        names: tuple[PartName, ...] = ("search", "race", "confirm")
        return {
            part: [self.trace.select(self.unit_texts(part, n)) for n in range(self.units(part))]
            for part in names
        }

    def unit_load(self, load: Load, part: PartName, unit: int) -> tuple[Load, int]:
        """What a unit serves of a load, and the number of its requests: two for each client, or
        what arrives in :data:`ARRIVALS_S` seconds, where each unit begins at another place."""
        if not load.arrivals:
            return load, min(self.count, max(LEAST_REQUESTS, 2 * load.clients))
        first = unit * len(load.arrivals) // self.units(part)
        moments = np.array(load.arrivals[first:]) - load.arrivals[first]
        moments = moments[: max(LEAST_REQUESTS, int((moments <= ARRIVALS_S).sum()))]
        return Load(arrivals=tuple(moments.tolist())), len(moments)

    def simulate_loads(self, policy: Policy, trace: ReplayTrace) -> dict[str, Simulated]:
        """A policy under each load, by name."""
        return {name: self.simulate(policy, load, trace) for name, load in self.loads.items()}

    def predict(self, policy: Policy, part: PartName) -> Prediction:
        """``speed`` is the geometric mean of what the objective makes of the loads."""
        units = []
        for n, trace in enumerate(self._unit_traces[part]):
            loads = {name: self.unit_load(load, part, n) for name, load in self.loads.items()}
            units.append({
                name: self.simulate(policy, load, trace, count)
                for name, (load, count) in loads.items()
            })  # fmt: skip
        costs = np.array([self.cost([s.served for s in unit.values()]) for unit in units])
        speed = float(self._scale / np.exp(np.log(costs).mean()))
        runs = [self.run_of(name, one) for unit in units for name, one in unit.items()]
        return Prediction(costs, speed, outcome_of(policy, "replayed", runs))

    def cost(self, served: Iterable[Served]) -> float:
        """What a run costs: the inverse of the mean worth of its loads, so scaled that it is about
        the seconds that the run takes."""
        return float(
            self._scale * np.exp(-np.mean([np.log(self.objective.worth(s)) for s in served]))
        )

    @cached_property
    def _scale(self) -> float:
        """The seconds of one policy's run over the inverse of its worth."""
        runs = [s.served for s in self.simulate_loads(self.typical, self.trace).values()]
        worth = np.exp(np.mean([np.log(self.objective.worth(served)) for served in runs]))
        return float(worth * sum(served.seconds for served in runs))

    @contextmanager
    def execute(self, policies: Sequence[Policy], part: PartName) -> Iterator[LoadExecution]:
        execution = LoadExecution(self, {p.id: p for p in policies}, part)
        with closing(execution):
            yield execution

    def run_of(self, load: str, simulated: Simulated) -> LoadRun:
        """A simulated run."""
        return run_of(load, simulated, reads_prompts=True)


@dataclass
class LoadExecution:
    """Serves the texts of a part under policies. A server runs until a policy needs another."""

    bench: UnderLoad
    policies: Mapping[str, Policy]
    part: PartName
    texts: ComparedTexts = field(
        default_factory=lambda: ComparedTexts(0, 0, "", batch="under the same load")
    )
    _servers: dict[str, Running] = field(default_factory=dict)
    """The one that runs, by the group of its policies; none before the first."""
    _runs: dict[str, list[LoadRun]] = field(default_factory=dict)
    _plain: dict[tuple[str, int, str], Any] = field(default_factory=dict)
    """The tokens that autoregression gave first, by load, unit and request."""

    def close(self) -> None:
        while self._servers:
            self._servers.popitem()[1].close()

    def __call__(self, policy_id: str, unit: int) -> float:
        """Raises EngineError where the engine fails, PairError where it cannot load the draft."""
        bench, policy = self.bench, self.policies[policy_id]
        texts = [bench.recorded[n] for n in bench.unit_texts(self.part, unit)]
        options = DecodeOptions(bench.sampling, max(t.max_new_tokens for t in texts))
        served = {}
        for name, load in bench.loads.items():
            load, count = bench.unit_load(load, self.part, unit)
            prompts = numbered(map(_prompt, texts), count)
            running = self._server(policy)
            answered = list(execute(running, prompts, policy, load, options))
            served[name] = served_of(answered)
            counts = sum((counts_of(a.steps, 0.0) for a in answered), Counts())
            self._runs.setdefault(policy_id, []).append(LoadRun(name, served[name], counts))
            if options.sampling.greedy or running.engine.own_noise:
                self._compare(policy, (name, unit), answered, texts, running.runs_on["dtype"])
        return bench.cost(served.values())

    def _server(self, policy: Policy) -> Running:
        bench, group = self.bench, self.bench.group(policy)
        if group not in self._servers:
            self.close()
            same = [p for p in self.policies.values() if bench.group(p) == group]
            longest = max(len(t.prompt_ids) + t.max_new_tokens for t in bench.recorded)
            self._servers[group] = bench.start_for(same, longest)
        return self._servers[group]

    def _compare(
        self,
        policy: Policy,
        place: tuple[str, int],
        answered: Sequence[Answered],
        recorded: Sequence[Trajectory],
        dtype: str,
    ) -> None:
        """Counts texts beside those recorded; autoregression's also beside its first here."""
        differ = repeats_differ = repeats = 0
        for request in answered:
            name, tokens = request.trajectory.request_id, request.trajectory.output_ids
            differ += not np.array_equal(tokens, recorded[int(name) % len(recorded)].output_ids)
            if not policy.speculates:
                first = self._plain.setdefault((*place, name), tokens)
                repeats += first is not tokens
                repeats_differ += not np.array_equal(tokens, first)
        more = ComparedTexts(differ, len(answered), dtype, repeats_differ, repeats)
        self.texts = replace(self.texts + more, dtype=dtype)

    def outcome(self, policy_id: str, costs: FloatArray) -> Outcome:
        return outcome_of(self.policies[policy_id], "executed", self._runs[policy_id])


class LoadRun(NamedTuple):
    """A load, by name, as it was served or simulated."""

    load: str
    served: Served
    counts: Counts

    @property
    def waits(self) -> list[tuple[float, float, int]]:
        """Of each request the seconds to its first token and to its last, and its tokens."""
        served = self.served
        columns = served.ttft_s, served.finished_s - served.arrived_s, served.tokens
        return list(zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True)
class LoadOutcome(Outcome):
    """An outcome whose rows are ``runs``, each in the category of its load."""

    runs: tuple[LoadRun, ...] = ()

    def outcome(self) -> Outcome:
        return self

    def latency(self) -> dict[str, Any] | None:
        return latency_json([wait for run in self.runs for wait in run.waits])

    def loads(self, objective: Objective) -> dict[str, dict[str, Any]]:
        """Figures by load; times in seconds."""
        rows = {}
        for name, counts in self.by_category.items():
            runs = [run for run in self.runs if run.load == name]
            rows[name] = {
                "tokens_per_s": counts.tokens_per_s,
                "each_tokens_per_s": [run.served.tokens_per_s for run in runs],
                "goodput_requests_per_s": float(
                    np.mean([r.served.goodput(objective) for r in runs])
                ),
                **(latency_json([wait for run in runs for wait in run.waits]) or {}),
            }
        return rows


def outcome_of(
    policy: Policy, kind: Literal["replayed", "executed"], runs: Sequence[LoadRun]
) -> LoadOutcome:
    """What runs under loads came to; the seconds are those of the clock."""
    rows = [
        RequestOutcome(f"run {n}", run.load, replace(run.counts, seconds=run.served.seconds))
        for n, run in enumerate(runs)
    ]
    return LoadOutcome(policy.label(), kind, tuple(rows), tuple(runs))


def run_of(load: str, simulated: Simulated, *, reads_prompts: bool) -> LoadRun:
    """A simulated run. ``reads_prompts``: of each request one round more read its prompt and gave
    the first token."""
    served, (rounds, accepted, drafted) = simulated.served, simulated.counts.sum(0).tolist()
    requests, prompts = len(served.tokens), len(served.tokens) if reads_prompts else 0
    return LoadRun(
        load,
        served,
        Counts(
            requests=requests,
            rounds=rounds + prompts,
            emitted_tokens=int(served.tokens.sum()),
            accepted_tokens=accepted,
            drafted_tokens=drafted,
            draft_steps=drafted,
            verified_tokens=drafted + rounds + prompts,
            prompt_steps=prompts,
        ),
    )


def served_of(answered: Sequence[Answered]) -> Served:
    """What was executed, as a simulation has it."""
    return Served(
        np.array([a.arrived_s for a in answered]),
        np.array([a.first_token_s for a in answered]),
        np.array([a.finished_s for a in answered]),
        np.array([len(a.trajectory.output_ids) for a in answered], dtype=np.int64),
    )


def _prompt(text: Trajectory) -> Prompt:
    """A recorded text's request. One that a stop string or its client ended is to end where it
    did."""
    most = len(text.output_ids) if text.finish == "stop" else text.max_new_tokens
    ids = tuple(text.prompt_ids.tolist())
    return Prompt("", text.category, ids, most, seeded_as=text.request_id)
