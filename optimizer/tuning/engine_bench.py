"""An engine that serves many requests at once as a bench, simulated by what it recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spectune.engines.abilities import Engine, ServingRules, engine_named, rules_of
from spectune.engines.engine import Load, Running, Wanted
from spectune.optimizer.replay.arrivals import Unit
from spectune.optimizer.replay.loads import Objective, loads_of, recorded_arrivals
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.served_costs import ServedCosts, costs_of_engine
from spectune.optimizer.replay.served_rounds import differing_rounds
from spectune.optimizer.replay.serving import Simulated, serve
from spectune.optimizer.replay.trace import open_trace
from spectune.optimizer.tuning.parts import Parts, recorded_parts
from spectune.optimizer.tuning.under_load import UnderLoad
from spectune.runtime.policies.document import FixedWindow, Policy
from spectune.traces.conversations import Index
from spectune.traces.errors import PolicyError
from spectune.traces.recording import ServedRequest
from spectune.traces.schema import Sampling, Tokens
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording, Trajectory

LEAST_SPREAD: Final = 0.02
"""A predicted ratio of two policies is taken to be no surer than this."""


@dataclass(frozen=True)
class EngineBench(UnderLoad):
    """What an engine recorded, by which policies are simulated under ``loads``: its ``rules``, what
    its steps cost, its texts, from their second token on, and their ``parts``. ``ordinals``: of the
    trace's texts, in the recording. ``unserved``: drafts of the pair with which no step was
    recorded. ``start`` returns a server for what is wanted; without it policies are only predicted.
    ``loaded``: the draft of the one server that there is (``none``: none); None: a server is
    started for each draft."""

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

    @property
    def max_num_seqs(self) -> int:
        return self.rules.max_num_seqs

    @property
    def sampling(self) -> Sampling:
        return self.info.sampling

    @property
    def typical(self) -> Policy:
        draft, (_, most) = next(iter(self.costs.passes.items()))
        return constant(draft, most) if draft else Policy()

    def start_for(self, policies: Sequence[Policy], longest: int) -> Running:
        assert self.start is not None
        draft = self.server_draft(policies[0]) or "none"
        most = max(1, *(p.gamma_max for p in policies))
        return self.start(Wanted(draft, most, self.max_num_seqs, longest))

    @cached_property
    def spread(self) -> float:
        """No less than single steps are off, noise included, which ratios of whole runs are not: a
        race trusts predictions under a load less than they may deserve, never more."""
        return max(LEAST_SPREAD, float(self.costs.check["median_error"]))

    def server_draft(self, policy: Policy) -> str:
        """The draft that the server of a policy has loaded, "" for none."""
        draft = policy.draft if self.loaded is None else self.loaded
        return "" if draft == "none" else draft

    def group(self, policy: Policy) -> str:
        return self.server_draft(policy)

    def beyond(self, policy: Policy, batches: npt.NDArray[np.int32]) -> float:
        return self.costs.beyond(self.server_draft(policy), batches)

    def check(self, policy: Policy) -> None:
        """Raises PolicyError for a policy that cannot be executed."""
        self.engine.runs(policy)
        if self.loaded is not None and policy.speculates and policy.draft != self.loaded:
            raise PolicyError(f"the server has loaded {self.loaded!r}, not {policy.draft!r}")

    @cached_property
    def recorded(self) -> list[Trajectory]:
        """The texts, whole."""
        return [_with_first_token(text) for text in self.trace.trajectories]

    def simulate(
        self,
        policy: Policy,
        load: Load,
        trace: ReplayTrace | None = None,
        count: int | None = None,
    ) -> Simulated:
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
    costs: ServedCosts | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> EngineBench:
    """The bench of an engine's recording, for policies, or where there are none for those of every
    draft that the engine had loaded, under the loads that ``arrivals`` names, the numbers of a file
    in ``unit``; ``costs`` are those of the recording's engine, fitted where they are not given;
    ``tell`` is told first where served rounds differ from their replay, and how a file of arrivals
    was read. Raises as :func:`open_trace`, :func:`loads_of` and :func:`costs_of_engine` do."""
    engine, rules = engine_named(info.engine), rules_of(info.engine, info.options.get("serving"))
    for policy in policies:
        engine.runs(policy)
    costs = costs or costs_of_engine(store, info)
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
