"""What every engine that executes for us looks like: started once, given requests and a policy any
number of times, closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, ClassVar

import numpy as np

from spectune.engines.abilities import Engine
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import TraceError, WorkloadError
from spectune.traces.schema import Finish, Sampling, Step, Tokens, Verifier
from spectune.traces.tables import Trajectory


@dataclass(frozen=True)
class Prompt:
    """A request to execute: its id, unique in the execution, its category, its token ids, and the
    most new tokens where it asks for fewer than others. ``seeded_as``: the id of the request whose
    text it is to have above temperature 0, where that is another; an engine that draws its own
    noise does not read it."""

    id: str
    category: str
    ids: tuple[int, ...]
    max_new_tokens: int | None = None
    seeded_as: str = ""


@dataclass(frozen=True)
class Load:
    """How requests come: ``clients`` at a time, each sending its next when its last has ended; or,
    with ``arrivals``, each at its moment, seconds from the start, one a request and never falling.
    Raises TraceError for what is neither."""

    clients: int = 1
    arrivals: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise TraceError(f"{self.clients} clients: at least one sends requests")
        if any(b < a for a, b in zip((0.0, *self.arrivals), self.arrivals, strict=False)):
            raise TraceError("arrivals are seconds from the start, and never fall")

    def due(self, now_s: float, sent: int, running: int) -> int:
        """How many requests have come by ``now_s`` that were not sent yet: ``sent`` were,
        ``running`` of them are not answered. May be more than there are."""
        if self.arrivals:
            return bisect_right(self.arrivals, now_s) - sent
        return max(0, self.clients - running)


@dataclass(frozen=True)
class Answered:
    """A request as an engine served it. Its rounds say their policy, batch size and seconds;
    ``arrived_s`` and ``ended_s`` are seconds since the execution began."""

    trajectory: Trajectory
    steps: tuple[Step, ...]

    @property
    def arrived_s(self) -> float:
        return self.steps[0].arrived_s

    @property
    def first_token_s(self) -> float:
        """When its first token was there."""
        return self.steps[0].ended_s

    @property
    def finished_s(self) -> float:
        return self.steps[-1].ended_s


@dataclass(frozen=True)
class Wanted:
    """How a pair is to be served: the draft that is loaded, the most tokens that it drafts in a
    round, the most requests in a step, and the most tokens of a text, its prompt among them.
    ``threads``: of a CPU; None: the engine's own choice."""

    draft: str
    most: int = 8
    max_num_seqs: int = 8
    max_len: int = 2048
    threads: int | None = None


@dataclass(frozen=True)
class ExecutionPlan:
    """Requests that an engine was found able to serve."""

    prompts: Sequence[Prompt]
    policy: Policy
    load: Load
    sampling: Sampling
    max_new_tokens: int

    def most_tokens(self, prompt: Prompt) -> int:
        """The most new tokens of a request."""
        return min(self.max_new_tokens, prompt.max_new_tokens or self.max_new_tokens)

    def answered(
        self,
        prompt: Prompt,
        tokens: Sequence[int],
        finish: Finish,
        steps: Sequence[Step],
        above_zero: Verifier = "greedy",
    ) -> Answered:
        """A request with the tokens that it got. ``above_zero``: how the engine keeps drafted
        tokens above temperature 0, most where they are the draft's likeliest and the target draws
        them."""
        text = Trajectory(
            prompt.id,
            prompt.category,
            Tokens(np.array(prompt.ids, np.int32), np.array(tokens, np.int32)),
            self.sampling,
            self.most_tokens(prompt),
            finish,
            "coupled" if self.sampling.greedy else above_zero,
        )
        return Answered(text, tuple(steps))


class Running(ABC):
    """A pair in an engine, which takes another policy while it serves.

    ``version`` is the engine's; ``serving`` says how it fills its steps, by the names of
    :class:`engines.abilities.ServingRules`; ``runs_on`` has its ``device`` and ``dtype``, as
    recordings have them. Raises, as it is made, EngineError where the engine is not installed or
    cannot load a checkpoint, PairError for a draft that the pair has not.
    """

    engine: ClassVar[Engine]
    version: str
    wanted: Wanted
    serving: dict[str, Any]
    runs_on: dict[str, Any]

    def execute(
        self,
        prompts: Sequence[Prompt],
        policy: Policy,
        load: Load,
        *,
        sampling: Sampling,
        max_new_tokens: int,
    ) -> Generator[Answered, None, None]:
        """Serves every request, and yields each as it ends. Raises PolicyError at once for a policy
        that it cannot run, WorkloadError for a request that is empty or longer than it was started
        for, and EngineError where the engine fails."""
        server, longest = self.wanted, self.wanted.max_len
        self.engine.runs_with(policy, draft=server.draft, most=server.most)
        asked = ExecutionPlan(prompts, policy, load, sampling, max_new_tokens)
        for prompt in prompts:
            if not prompt.ids:
                raise WorkloadError(f"request {prompt.id}: the prompt has no tokens")
            most = asked.most_tokens(prompt)
            if len(prompt.ids) + most > longest:
                raise WorkloadError(
                    f"request {prompt.id}: {len(prompt.ids)} prompt tokens + {most} new ones "
                    f"exceed the {longest} that the engine was started for"
                )
        return self._serve(asked)

    @abstractmethod
    def _serve(self, asked: ExecutionPlan) -> Generator[Answered, None, None]:
        """Raises at once for what else it cannot do."""

    @abstractmethod
    def put_in_force(self, policy: Policy) -> None:
        """Has it take a policy, unless that is in force, and waits until it is. Raises PolicyError
        where it refuses, EngineError where it does not answer."""

    @abstractmethod
    def close(self) -> None:
        """Ends it. Harmless when it has ended."""


def numbered(prompts: Iterable[Prompt], count: int) -> tuple[Prompt, ...]:
    """So many requests of these prompts in order, from the first again where there are fewer."""
    again = enumerate(islice(cycle(prompts), count))
    return tuple(replace(prompt, id=f"{n}") for n, prompt in again)


def chain_round(
    start: int, drafted: int, accepted: int, emitted: int, *, draft: str = "", **more: Any
) -> Step:
    """A round that drafted a chain. ``more``: its policy, batch and times, by :class:`Step`'s
    names."""
    counts = start, drafted, drafted + 1, accepted, emitted, drafted
    return Step(*counts, draft=draft if drafted else "", depth=drafted, **more)
