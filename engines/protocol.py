"""What every engine that executes for us looks like: started once, given requests and a policy any
number of times, closed."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spectune.engines.abilities import Engine
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import AnyPolicy
from spectune.traces.errors import PairError, TraceError, WorkloadError
from spectune.traces.schema import Sampling, Step, Trajectory


@dataclass(frozen=True)
class Prompt:
    """A request to execute: its id, unique in the execution, its category, and its token ids."""

    id: str
    category: str
    ids: tuple[int, ...]


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
            return sum(moment <= now_s for moment in self.arrivals[sent:])
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

    @property
    def seconds(self) -> float:
        """From its arrival to its end."""
        return self.finished_s - self.arrived_s


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


class Running(Protocol):
    """An engine that serves a pair."""

    @property
    def engine(self) -> Engine: ...

    @property
    def version(self) -> str: ...

    @property
    def serving(self) -> Mapping[str, Any]:
        """How it fills its steps, by the names of :class:`engines.rules.ServingRules`."""

    @property
    def runs_on(self) -> Mapping[str, str]:
        """Its ``device`` and ``dtype``, as recordings have them."""

    def execute(
        self,
        prompts: Sequence[Prompt],
        policy: AnyPolicy,
        load: Load,
        *,
        sampling: Sampling,
        max_new_tokens: int,
    ) -> Generator[Answered, None, None]:
        """Serves every request, and yields each as it ends. Raises PolicyError at once for a policy
        that it cannot run, and EngineError where the engine fails."""

    def close(self) -> None:
        """Ends it. Harmless when it has ended."""


def draft_of(engine: Engine, spec: PairSpec, wanted: Wanted) -> str | None:
    """The path of the draft that is to be loaded, None for ``none``. Raises PairError for one that
    the pair has not."""
    drafts = dict(spec.drafts)
    if wanted.draft not in (*drafts, "none"):
        raise PairError(
            f"{engine.title} drafts with a language model of the pair, not {wanted.draft!r}; it "
            f"has: {', '.join(drafts)}"
        )
    return drafts.get(wanted.draft)


def check_fits(prompts: Sequence[Prompt], max_new_tokens: int, max_len: int) -> None:
    """Raises WorkloadError for the first request that is empty or longer than an engine was started
    for."""
    for prompt in prompts:
        if not prompt.ids:
            raise WorkloadError(f"request {prompt.id}: the prompt has no tokens")
        if len(prompt.ids) + max_new_tokens > max_len:
            raise WorkloadError(
                f"request {prompt.id}: {len(prompt.ids)} prompt tokens + {max_new_tokens} new ones "
                f"exceed the {max_len} that the engine was started for"
            )
