"""An engine under a load as a bench: a unit is a short run of every load with some of the texts. It
costs the inverse of what the objective makes of it, in the geometric mean of the loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from spectune.engines.abilities import Engine, ServingRules, engine_named, rules_of
from spectune.engines.engine import Answered, Load, Prompt, Running, Wanted, numbered
from spectune.optimizer.execute import DecodeOptions, counts_of
from spectune.optimizer.recording.on_engine import execute
from spectune.optimizer.replay.arrivals import Unit
from spectune.optimizer.replay.loads import Objective, Served, loads_of, recorded_arrivals
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.served_costs import ServedCosts, costs_of_engine
from spectune.optimizer.replay.served_rounds import differing_rounds
from spectune.optimizer.replay.serving import Simulated, serve
from spectune.optimizer.replay.trace import open_trace
from spectune.optimizer.tuning.bench import Bench, PartName, Prediction
from spectune.optimizer.tuning.parts import Parts, recorded_parts
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.optimizer.tuning.tuned import AT_A_RATE, GAINS
from spectune.runtime.policies.document import FixedWindow, Policy
from spectune.traces.conversations import Index
from spectune.traces.cost_table import FloatArray
from spectune.traces.errors import PolicyError
from spectune.traces.recording import ServedRequest
from spectune.traces.schema import Counts, Outcome, RequestOutcome, Tokens, latency_json
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording, Trajectory

UNITS: Final = 8
"""Most units of a part; each has texts of its own."""
LEAST_REQUESTS: Final = 4
"""Fewest requests that a unit serves of a load; else two for each client."""
ARRIVALS_S: Final = 10.0
"""Seconds of arrivals that a unit serves."""
LEAST_SPREAD: Final = 0.02
"""A predicted ratio of two policies is taken to be no surer than this."""


@dataclass(frozen=True)
class EngineBench(Bench):
    """What an engine recorded, by which policies are simulated under ``loads``: its ``rules``, what
    its steps cost, its texts, from their second token on, and their ``parts``. Each load serves
    ``count`` requests, or as many as arrive, from the first text again where there are fewer; of a
    unit some of them (:meth:`unit_load`). ``ordinals``: of the trace's texts, in the recording.
    ``unserved``: drafts of the pair with which no step was recorded. ``start`` returns a server for
    what is wanted; without it policies are only predicted. ``loaded``: the draft of the one server
    that there is (``none``: none); None: a server is started for each draft."""

    info: Recording
    engine: Engine
    rules: ServingRules
    costs: ServedCosts
    trace: ReplayTrace
    parts: Parts
    loads: Mapping[str, Load]
    objective: Objective
    count: int
    ordinals: Sequence[int] = ()
    unserved: tuple[str, ...] = ()
    start: Callable[[Wanted], Running] | None = None
    loaded: str | None = None

    by_size = False
    block = 1
    unit = "runs"

    @property
    def gain(self) -> str:
        if self.objective.kind == "throughput" and any(x.arrivals for x in self.loads.values()):
            return AT_A_RATE
        return GAINS[self.objective.kind]

    @cached_property
    def spread(self) -> float:
        return max(LEAST_SPREAD, float(self.costs.check["median_error"]))

    def server_draft(self, policy: Policy) -> str:
        """The draft that the server of a policy has loaded, "" for none."""
        draft = policy.draft if self.loaded is None else self.loaded
        return "" if draft == "none" else draft

    def group(self, policy: Policy) -> str:
        return self.server_draft(policy)

    def check(self, policy: Policy) -> None:
        """Raises PolicyError for a policy that cannot be executed."""
        self.engine.runs(policy)
        if self.loaded is not None and policy.speculates and policy.draft != self.loaded:
            raise PolicyError(f"the server has loaded {self.loaded!r}, not {policy.draft!r}")

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
    def recorded(self) -> list[Trajectory]:
        """The texts, whole."""
        return [_with_first_token(text) for text in self.trace.trajectories]

    @cached_property
    def _traces(self) -> dict[str, list[ReplayTrace]]:
        names: tuple[PartName, ...] = ("search", "race", "confirm")
        return {
            part: [self.trace.select(self.unit_texts(part, n)) for n in range(self.units(part))]
            for part in names
        }

    @property
    def search_trace(self) -> ReplayTrace:
        """The texts that are searched on."""
        return self._traces["search"][0]

    def unit_load(self, load: Load, part: PartName, unit: int) -> tuple[Load, int]:
        """What a unit serves of a load, and the number of its requests: two for each client, or
        what arrives in :data:`ARRIVALS_S` seconds, where each unit begins at another place."""
        if not load.arrivals:
            return load, min(self.count, max(LEAST_REQUESTS, 2 * load.clients))
        first = unit * len(load.arrivals) // self.units(part)
        moments = np.array(load.arrivals[first:]) - load.arrivals[first]
        moments = moments[: max(LEAST_REQUESTS, int((moments <= ARRIVALS_S).sum()))]
        return Load(arrivals=tuple(moments.tolist())), len(moments)

    def simulate(
        self,
        policy: Policy,
        load: Load,
        trace: ReplayTrace | None = None,
        count: int | None = None,
    ) -> Simulated:
        """A policy under a load on some of the texts (None: on all), by so many requests (None:
        ``self.count``). Raises PolicyError where the engine cannot run it, or where too little was
        served to know what it costs."""
        server: dict[str, Any] = {"draft": policy.draft, "most": policy.gamma_max}
        server["max_num_seqs"] = self.rules.max_num_seqs
        tables = self.engine.tables(policy, **server)
        return serve(
            self.trace if trace is None else trace,
            policy.draft,
            tables,
            load,
            self.rules,
            self.costs.of(self.server_draft(policy), [g for t in tables.values() for g in t[1:]]),
            count=self.count if count is None else count,
        )

    def simulate_loads(self, policy: Policy, trace: ReplayTrace) -> dict[str, Simulated]:
        """A policy under each load, by name."""
        return {name: self.simulate(policy, load, trace) for name, load in self.loads.items()}

    def predict(self, policy: Policy, part: PartName) -> Prediction:
        """``speed`` is the geometric mean of what the objective makes of the loads."""
        units = []
        for n, trace in enumerate(self._traces[part]):
            loads = {name: self.unit_load(load, part, n) for name, load in self.loads.items()}
            units.append({
                name: self.simulate(policy, load, trace, count)
                for name, (load, count) in loads.items()
            })  # fmt: skip
        costs = np.array([self.cost([s.served for s in unit.values()]) for unit in units])
        speed = float(self._scale / np.exp(np.log(costs).mean()))
        runs = [run_of(name, one) for unit in units for name, one in unit.items()]
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
        draft, (_, most) = next(iter(self.costs.passes.items()))
        policy = constant(draft, most) if draft else Policy()
        runs = [s.served for s in self.simulate_loads(policy, self.trace).values()]
        worth = np.exp(np.mean([np.log(self.objective.worth(served)) for served in runs]))
        return float(worth * sum(served.seconds for served in runs))

    @contextmanager
    def execute(self, policies: Sequence[Policy], part: PartName) -> Iterator[EngineExecution]:
        execution = EngineExecution(self, {p.id: p for p in policies}, part)
        with closing(execution):
            yield execution


@dataclass
class EngineExecution:
    """Serves the texts of a part under policies. A server runs until a policy needs another."""

    bench: EngineBench
    policies: Mapping[str, Policy]
    part: PartName
    texts: ComparedTexts = field(
        default_factory=lambda: ComparedTexts(0, 0, "", batch="under the same load")
    )
    _servers: dict[str, Running] = field(default_factory=dict)
    """The one that runs, by its draft; none before the first."""
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
        options = DecodeOptions(bench.info.sampling, max(t.max_new_tokens for t in texts))
        served = {}
        for name, load in bench.loads.items():
            load, count = bench.unit_load(load, self.part, unit)
            prompts = numbered(map(_prompt, texts), count)
            running = self._server(policy)
            answered = list(execute(running, prompts, policy, load, options))
            served[name] = served_of(answered)
            counts = sum((counts_of(a.steps, 0.0) for a in answered), Counts())
            self._runs.setdefault(policy_id, []).append(LoadRun(name, served[name], counts))
            if options.sampling.greedy:
                self._compare(policy, (name, unit), answered, texts, running.runs_on["dtype"])
        return bench.cost(served.values())

    def _server(self, policy: Policy) -> Running:
        draft, bench = self.bench.server_draft(policy) or "none", self.bench
        if draft not in self._servers:
            assert bench.start is not None
            self.close()
            same = [p for p in self.policies.values() if bench.group(p) == bench.group(policy)]
            longest = max(len(t.prompt_ids) + t.max_new_tokens for t in bench.recorded)
            most = max(1, *(p.gamma_max for p in same))
            server = Wanted(draft, most, bench.rules.max_num_seqs, longest)
            self._servers[draft] = bench.start(server)
        return self._servers[draft]

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


def run_of(load: str, simulated: Simulated) -> LoadRun:
    """A simulated run."""
    served, (rounds, accepted, drafted) = simulated.served, simulated.counts.sum(0).tolist()
    requests = len(served.tokens)
    return LoadRun(
        load,
        served,
        Counts(
            requests=requests,
            rounds=rounds + requests,
            emitted_tokens=int(served.tokens.sum()),
            accepted_tokens=accepted,
            drafted_tokens=drafted,
            draft_steps=drafted,
            verified_tokens=drafted + rounds + requests,
            prompt_steps=requests,
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
    return Prompt("", text.category, tuple(text.prompt_ids.tolist()), most)


def _with_first_token(text: Trajectory) -> Trajectory:
    """A text of the trace with its first token, which the trace counts to the prompt."""
    prompt, first = text.prompt_ids[:-1], text.prompt_ids[-1:]
    tokens = Tokens(prompt, np.concatenate((first, text.output_ids)))
    return replace(text, tokens=tokens, max_new_tokens=text.max_new_tokens + 1)


def engine_bench(
    store: TraceStore,
    info: Recording,
    policies: Sequence[Policy],
    arrivals: str,
    objective: Objective,
    *,
    limit: int | None = None,
    unit: Unit | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> EngineBench:
    """The bench of an engine's recording, for policies, or where there are none for those of every
    draft that the engine had loaded, under the loads that ``arrivals`` names, the numbers of a
    file in ``unit``; ``tell`` is told first where served rounds differ from their replay, and how a
    file of arrivals was read. Raises as :func:`open_trace`, :func:`loads_of` and
    :func:`costs_of_engine` do."""
    engine, rules = engine_named(info.engine), rules_of(info.engine, info.options.get("serving"))
    for policy in policies:
        engine.runs(policy)
    costs = costs_of_engine(store, info)
    replayed = policies or [constant(d, costs.passes[d][1]) for d in costs.drafts if d]
    opened = open_trace(store, info.id, replayed)
    trace, requests = opened.trace, list[ServedRequest]()
    fit, search, *rest = recorded_parts(store, info.id, opened.ordinals)
    parts = Parts([], sorted([*fit, *search]), *rest)  # nothing is fitted to these
    if arrivals.partition("@")[0] == "recorded":
        requests = arrived_requests(store, info)
        texts, number = texts_of(requests, info, opened.ordinals)
        trace = trace.select(texts)
        if number:
            tell(
                f"{number} of the {len(requests)} requests that arrived have no text here, as it "
                "is not stored, was sampled otherwise or lacks panoramas: each is served another's"
            )
    count = limit or len(trace.order)
    of_file = list[str]()  # what is wrong with it is said before anything else
    loads = loads_of(arrivals, requests, count, limit, unit=unit, tell=of_file.append)
    for draft in sorted({p.draft for policy in replayed for p in policy.candidates}):
        if apart := differing_rounds(store, opened, draft):
            tell(f"warning: {apart}")
    for line in of_file:
        tell(line)
    drafts = store.get_pair(info.pair_id).document.get("drafts", {})
    unserved = tuple(draft for draft in drafts if draft not in costs.drafts)
    about = info, engine, rules, costs, trace, parts, loads, objective
    return EngineBench(*about, count, opened.ordinals, unserved)


def arrived_requests(store: TraceStore, info: Recording) -> list[ServedRequest]:
    """All requests that the server of a recording was sent, of every sampling, whether their texts
    are stored or not, in the order of their arrival. Raises TraceError where that was not
    recorded."""
    recordings = store.list_recordings(info.pair_id, with_counts=False)
    requests = store.served_requests([i.id for i in recordings if i.start == info.start])
    # They are stored in the order in which they ended.
    order = np.argsort(recorded_arrivals(requests), kind="stable")
    return [requests[n] for n in order]


def texts_of(
    requests: Sequence[ServedRequest], info: Recording, ordinals: Sequence[int]
) -> tuple[Index, int]:
    """The number of the text, among those of a recording with these ``ordinals``, that each request
    is served, int64 [requests], and how many have none: theirs are drawn from all, always the
    same."""
    place = {(info.id, ordinal): n for n, ordinal in enumerate(ordinals)}
    own = np.array([place.get((r.recording, r.ordinal), -1) for r in requests], np.int64)
    drawn = np.random.default_rng(0).integers(len(ordinals), size=len(requests))
    return np.where(own < 0, drawn, own), int((own < 0).sum())


def constant(draft: str, gamma: int) -> Policy:
    return Policy(draft=draft, window=FixedWindow(gamma=gamma))
