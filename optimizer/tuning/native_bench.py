"""The native decoder as a bench: a unit is a request, and costs its seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from spectune.optimizer.execute import Executor, encode_recorded
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.tuning.bench import Bench, Execution, PartName, Prediction
from spectune.optimizer.tuning.parts import Parts
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import Policy
from spectune.traces.conversations import Index
from spectune.traces.tables import LatencyProfile


class NativeBench(Bench):
    """Replays policies on the parts of a recorded trace, and decodes its requests again under
    them."""

    def __init__(
        self,
        pair: LoadedPair,
        trace: ReplayTrace,
        parts: Parts,
        profile: LatencyProfile,
        artifacts: Artifacts | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pair, self.trace, self.parts = pair, trace, parts
        self.profile, self.artifacts, self.clock = profile, artifacts, clock

    @cached_property
    def _traces(self) -> dict[str, ReplayTrace]:
        return {name: self.trace.select(part) for name, part in self.parts._asdict().items()}

    def units(self, part: PartName) -> int:
        return len(getattr(self.parts, part))

    def groups(self, part: PartName) -> Index:
        numbers: Index = self.trace.conversations[getattr(self.parts, part)]
        return numbers

    def predict(self, policy: Policy, part: PartName) -> Prediction:
        """``result`` is the :class:`optimizer.replay.replay_trace.Replay`."""
        trace = self._traces[part]
        replay = run_replay(trace, policy, self.profile, artifacts=self.artifacts)
        return Prediction(replay.seconds, replay.total.tokens_per_s, replay)

    @contextmanager
    def execute(self, policies: Sequence[Policy], part: PartName) -> Iterator[Execution]:
        texts = [self.trace.trajectories[i] for i in getattr(self.parts, part)]
        yield Executor(
            self.pair,
            policies,
            encode_recorded(self.pair, texts),
            profile=self.profile,
            artifacts=self.artifacts,
            clock=self.clock,
        )
