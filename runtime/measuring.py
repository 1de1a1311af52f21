"""What every measurement of a profile shares: a pair under the clock, and how samples become curves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.decoder import ModelBackend
from runtime.loading import LoadedPair
from runtime.loop import DecodeRequest
from runtime.pacing import Pacer, around
from runtime.policies.document import Policy
from runtime.policies.plan import Plan, prepare
from traces.schema import CostCurve, Sampling

LAGS = (1, 2, 3, 5, 9, 17, 33)
"""Tokens a draft may have to read at once, as measured."""
PROMPTS = (8, 32, 128, 256, 512)
"""Prompt lengths at which prefill is measured."""
ACCEPTED_ERROR = 0.08
"""Median relative error of composed rounds up to which a profile is accepted."""

Progress = Callable[[str, int, int], None]
"""Called with (what is measured, done, total)."""


@dataclass
class Bench:
    """One pair under measurement: a request of random tokens whose text is set to the context wanted."""

    pair: LoadedPair
    gamma_max: int
    repeats: int
    progress: Progress
    clock: Callable[[], float] = time.perf_counter
    done: int = 0
    total: int = 1
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    passes_s: list[float] = field(default_factory=list)
    """What the passes that tell the machine's pace took, one after another."""

    def __post_init__(self) -> None:
        self.backend = ModelBackend(self.pair)
        self.backend.every_shape = True
        self.pacer = Pacer(self.pair, self.clock) if self.pair.device.type == "cpu" else None

    def pace(self) -> None:
        """To be called after a round: times the passes that tell the pace. Only a CPU, shared as a rule, changes its own."""
        if self.pacer is not None:
            self.pacer()
            self.passes_s.extend(self.pacer.taken().tolist())

    def around_s(self, rounds: int = 1) -> NDArray[np.float64]:
        """The pace at the last rounds, [rounds]: seconds of a pass before and after each, the mean. Ones where there is no pacer."""
        if self.pacer is None:
            return np.ones(rounds)
        return around(np.array(self.passes_s[-rounds - 1 :]))[-rounds:]

    @property
    def usual_s(self) -> float:
        """The usual pace of the measurement, slow moments included: what is measured is kept as so many passes, and costs their usual
        seconds."""
        return 1.0 if self.pacer is None else center(self.passes_s)

    def tick(self, what: str) -> None:
        self.done += 1
        self.progress(what, self.done, self.total)

    def tokens(self, count: int) -> list[int]:
        low = min(16, self.pair.target.vocab_size // 2)
        return [int(t) for t in self.rng.integers(low, self.pair.target.vocab_size, count)]

    def begin(self, context: int, policy: Policy, sampling: Sampling | None = None, end: Sequence[int] = ()) -> list[int]:
        """Begins a request with ``context`` tokens in the target's cache; the prompt, a token longer, which ends with ``end``."""
        request = DecodeRequest(
            id="profile",
            prompt_ids=[*self.tokens(max(0, context + 1 - len(end))), *end][-(context + 1) :],
            sampling=sampling or Sampling(),
            seed=1,
            max_new_tokens=self.gamma_max + max(LAGS) + 2,
        )
        self.backend.begin(request, prepare(policy, self.pair.draft_names))
        return list(request.prompt_ids)

    def timed(self, work: Callable[[], Any]) -> float:
        began = self.clock()
        work()
        if self.pair.device.type == "cuda":
            torch.cuda.synchronize()
        return self.clock() - began


class Turns:
    """A policy source whose policy is set before every round."""

    def __init__(self, prepared: Plan) -> None:
        self.prepared = prepared

    def current(self) -> Plan:
        return self.prepared


def center(samples: Sequence[float]) -> float:
    """The mean, samples beyond three medians counted as three: a machine's slow moments count, a lost second does not."""
    limit = 3 * statistics.median(samples)
    return statistics.mean(min(s, limit) for s in samples)


def spread(values: Sequence[float]) -> float:
    """Interquartile range."""
    low, high = np.quantile(np.asarray(values), [0.25, 0.75])
    return float(high - low)


def curve(cells: dict[tuple[int, int], list[float]], widths: Sequence[int], contexts: tuple[int, ...]) -> CostCurve:
    """Samples by (width, context) as a curve; widths not measured at every context are left out."""
    used = [w for w in widths if all((w, c) in cells for c in contexts)]
    return CostCurve(
        tuple(used),
        contexts,
        tuple(tuple(statistics.median(cells[w, c]) for c in contexts) for w in used),
        tuple(tuple(spread(cells[w, c]) for c in contexts) for w in used),
        tuple(tuple(center(cells[w, c]) for c in contexts) for w in used),
    )


def errors(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """How well (composed, executed) seconds of rounds agree, and whether that is accepted."""
    apart = [abs(composed - executed) / executed for composed, executed in pairs]
    return {
        "rounds": len(pairs),
        "median_error": statistics.median(apart),
        "p90_error": float(np.quantile(apart, 0.9)),
        "total_error": sum(c for c, _ in pairs) / sum(e for _, e in pairs) - 1,
        "accepted": statistics.median(apart) <= ACCEPTED_ERROR,
    }
