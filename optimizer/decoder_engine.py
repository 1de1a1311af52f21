"""The native decoder as an engine: many requests at once, under a load, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spectune.engines.abilities import NATIVE
from spectune.engines.engine import Answered, ExecutionPlan, Load, Running, Wanted
from spectune.runtime.decoder import Decoder, check_together, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, StaticSource
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.traces.schema import Request, Step, Verifier, request_seed
from spectune.traces.tables import LatencyProfile


@dataclass
class LoadQueue:
    """Requests that come as a ``load`` says, by a ``clock``, from its making on. ``arrived_s``:
    when each came that did, seconds since then; its user calls :meth:`answered` as one ends."""

    requests: Sequence[DecodeRequest]
    load: Load
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    arrived_s: list[float] = field(default_factory=list)
    taken: int = 0
    ended: int = 0
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def answered(self) -> None:
        self.ended += 1

    def wait(self) -> bool:
        if self.taken == len(self.requests):
            return False
        while self.first() is None:
            moment = self.load.arrivals[self.taken] + self.began
            self.sleep(max(0.0, moment - self.clock()))
        return True

    def first(self) -> DecodeRequest | None:
        now_s, came = self.clock() - self.began, len(self.arrived_s)
        due = min(self.load.due(now_s, came, came - self.ended), len(self.requests) - came)
        for n in range(came, came + due):
            self.arrived_s.append(self.load.arrivals[n] if self.load.arrivals else now_s)
        return self.requests[self.taken] if self.taken < len(self.arrived_s) else None

    def take(self) -> DecodeRequest:
        self.taken += 1
        return self.requests[self.taken - 1]


class DecoderEngine(Running):
    """A loaded pair that serves up to ``seats`` requests at once, in caches of ``slots`` (None:
    that grow). ``profile`` is for windows that weigh costs, ``artifacts`` finds what policies
    name."""

    engine = NATIVE
    version = "native"

    def __init__(
        self,
        pair: LoadedPair,
        seats: int,
        slots: int | None = None,
        *,
        verifier: Verifier = "coupled",
        profile: LatencyProfile | None = None,
        artifacts: Artifacts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        most = pair.context(()).positions
        self.pair, self.profile, self.artifacts, self.clock = pair, profile, artifacts, clock
        self.wanted = Wanted("", 0, seats, most)
        self.serving = {"max_num_seqs": seats, "slots": slots}
        self.runs_on: dict[str, Any] = dict(pair.place)
        self._source = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
        self._decoder = Decoder(pair, self._source, verifier, clock, seats, slots)
        self._plans: dict[str, Plan] = {}

    def check(self, policy: Policy) -> Plan:
        """The policy made ready. Raises PolicyError for one that cannot serve several requests."""
        if policy.id not in self._plans:
            how: dict[str, Any] = {"profile": self.profile, "artifacts": self.artifacts}
            plan = prepare_for(self.pair, policy, **how)
            if self.wanted.max_num_seqs > 1:
                check_together(plan)
            self._plans[policy.id] = plan
        return self._plans[policy.id]

    def put_in_force(self, policy: Policy) -> None:
        self._source.prepared = self.check(policy)

    def _serve(self, asked: ExecutionPlan) -> Generator[Answered, None, None]:
        self.put_in_force(asked.policy)
        requests = []
        for prompt in asked.prompts:
            ids, most = list(prompt.ids), asked.most_tokens(prompt)
            item = Request(prompt.id, prompt.category)
            request = self._decoder.request(item, ids, asked.sampling, most, drafts=())
            seed = request_seed(asked.sampling.seed, prompt.seeded_as or prompt.id)
            requests.append(replace(request, seed=seed))
        return self._rounds(asked, requests)

    def _rounds(
        self, asked: ExecutionPlan, requests: Sequence[DecodeRequest]
    ) -> Generator[Answered, None, None]:
        queue = LoadQueue(requests, asked.load, self.clock)
        of = {request.id: n for n, request in enumerate(requests)}
        steps: list[list[Step]] = [[] for _ in requests]
        tokens: list[list[int]] = [[] for _ in requests]
        for rounds in self._decoder.steps(queue):
            ended_s = self.clock() - queue.began
            for one in rounds:
                n = of[one.request.id]
                moments: Any = {"arrived_s": queue.arrived_s[n], "ended_s": ended_s}
                steps[n].append(one.step._replace(batch=len(rounds), **moments))
                tokens[n] += one.tokens
            for one in rounds:
                if one.finish is not None:
                    queue.answered()
                    n = of[one.request.id]
                    verifier = self._decoder.verifier
                    ids = asked.prompts[n], tokens[n], one.finish, steps[n]
                    yield asked.answered(*ids, verifier)

    def close(self) -> None:
        """Nothing is left running."""
