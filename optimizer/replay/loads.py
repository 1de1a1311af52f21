"""Load: how requests come, and what their users waited for, whether they were served or
simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import isfile
from typing import Any, Final

import numpy as np

from spectune.engines.engine import Load
from spectune.optimizer.replay.arrivals import Unit, read_arrivals
from spectune.optimizer.replay.chain_tables import Index
from spectune.settings import LoadSettings
from spectune.traces.cost_table import FloatArray
from spectune.traces.errors import TraceError
from spectune.traces.recording import RecordedRequest, ServedRequest
from spectune.traces.schema import quantiles

GRAMMAR: Final = "FILE, FILE@RATE, recorded, poisson:RATE or clients:N"


def loads_of(
    arrivals: str,
    requests: Sequence[RecordedRequest | ServedRequest],
    count: int,
    limit: int | None = None,
    *,
    unit: Unit | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Load]:
    """The loads that ``--arrivals`` asks for, by name: one, or one for each of several numbers
    (``poisson:1,2,4``). ``count`` requests come by chance, always by the same; of those recorded or
    in a file all, or the first ``limit``. ``unit`` is that of a file's numbers
    (:func:`read_arrivals`); ``tell`` is told how a file was read. Raises TraceError for anything
    else, with what is known.
    """
    kind, _, numbers = arrivals.partition(":")
    if unit and (arrivals.partition("@")[0] == "recorded" or kind in ("clients", "poisson")):
        tell(f"no effect on --arrivals {arrivals}, which is no file: load.unit")
    if kind == "clients" and numbers:
        return {f"clients:{n:g}": Load(int(n)) for n in _numbers(numbers, arrivals, integers=True)}
    if kind == "poisson" and numbers:
        gaps = np.random.default_rng(0).exponential(size=count)
        return {
            f"poisson:{rate:g}": _at_rate(np.cumsum(gaps), rate)
            for rate in _numbers(numbers, arrivals)
        }
    path, _, rates = arrivals.rpartition("@")
    if not path or isfile(arrivals):
        path, rates = arrivals, ""
    if path == "recorded":
        moments = recorded_arrivals(requests)
    else:
        missing = f"there is no such file; it takes {GRAMMAR}"
        moments = read_arrivals(path, tell, missing, unit, scaled=bool(rates))
    moments = np.sort(moments)[:limit] - moments.min()
    if not rates:
        return {arrivals: _at_rate(moments, 1.0)}
    if moments[-1] <= 0:
        raise TraceError(
            f"--arrivals {arrivals}: all requests arrive at one moment, which has no rate"
        )
    at_rate_1 = moments * len(moments) / moments[-1]
    return {f"{path}@{rate:g}": _at_rate(at_rate_1, rate) for rate in _numbers(rates, arrivals)}


def _at_rate(moments: FloatArray, rate: float) -> Load:
    return Load(arrivals=tuple((moments / rate).tolist()))


def _numbers(text: str, arrivals: str, *, integers: bool = False) -> list[float]:
    try:
        numbers = [int(n) if integers else float(n) for n in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < n < 1e9 for n in numbers):
        raise TraceError(
            f"--arrivals {arrivals}: {text!r} is no number above 0, nor several with commas; it "
            f"takes {GRAMMAR}"
        )
    return numbers


def recorded_arrivals(requests: Sequence[RecordedRequest | ServedRequest]) -> FloatArray:
    """When the requests of a recording reached its engine. Raises TraceError where that was not
    recorded."""
    moments = [r.steps[0].arrived_s if r.steps else 0.0 for r in requests]
    if not moments or not all(moments):
        raise TraceError(
            "--arrivals recorded: when its requests arrived was not recorded; say poisson:RATE, "
            "clients:N or a file"
        )
    return np.array(moments)


@dataclass(frozen=True)
class Objective:
    """What a table is to make best: ``throughput`` (tokens a second), ``tpot`` (the mean time per
    output token) or ``goodput`` (requests a second whose first token comes within ``ttft_s`` and
    whose later ones take at most ``tpot_s`` each)."""

    kind: str = "throughput"
    ttft_s: float | None = None
    tpot_s: float | None = None

    def worth(self, served: Served) -> float:
        """How good it is: above 0, the larger the better. Where not one request is good, half a
        one is."""
        if self.kind == "tpot":
            return 1 / max(served.mean_tpot_s, 1e-9)
        figure = served.goodput(self) if self.kind == "goodput" else served.tokens_per_s
        return max(figure, 0.5 / max(served.seconds, 1e-9))


def objective_of(load: LoadSettings) -> Objective:
    """What is best under a load, by its settings: where requests arrive at a rate of their own, a
    server that keeps up serves no more tokens/s, so that is time per token. Raises TraceError for
    goodput without a limit."""
    if load.objective == "goodput" and load.ttft is None and load.tpot is None:
        raise TraceError(
            "goodput needs ttft or tpot: which requests are good (load.ttft, load.tpot)"
        )
    by_clients = (load.arrivals or "").startswith("clients:")
    kind = load.objective or ("throughput" if by_clients else "tpot")
    return Objective(kind, load.ttft, load.tpot)


@dataclass(frozen=True, eq=False)
class Served:
    """Requests as they were served, or simulated to be: when each arrived, when its first token and
    its last were there, and how many it has. Arrays [requests], seconds from the start."""

    arrived_s: FloatArray
    first_s: FloatArray
    finished_s: FloatArray
    tokens: Index

    @property
    def seconds(self) -> float:
        """From the first arrival to the last answer."""
        return float(self.finished_s.max() - self.arrived_s.min()) if len(self.tokens) else 0.0

    @property
    def tokens_per_s(self) -> float:
        return float(self.tokens.sum() / self.seconds) if self.seconds > 0 else 0.0

    @property
    def ttft_s(self) -> FloatArray:
        """Time to first token, of every request."""
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> FloatArray:
        """Time per output token after the first, of every request; 0 of those with one token."""
        return np.where(
            self.tokens > 1, (self.finished_s - self.first_s) / np.maximum(1, self.tokens - 1), 0.0
        )

    @property
    def mean_tpot_s(self) -> float:
        """Of requests of two tokens or more."""
        later = self.tpot_s[self.tokens > 1]
        return float(later.mean()) if len(later) else 0.0

    def goodput(self, level: Objective) -> float:
        """Requests a second that meet an objective's limits."""
        good = np.ones(len(self.tokens), bool)
        if level.ttft_s is not None:
            good &= self.ttft_s <= level.ttft_s
        if level.tpot_s is not None:
            good &= self.tpot_s <= level.tpot_s
        return float(good.sum() / self.seconds) if self.seconds > 0 else 0.0

    def to_json(self, level: Objective) -> dict[str, Any]:
        """Figures for people and programs; times in seconds."""
        later = self.tpot_s[self.tokens > 1]
        return {
            "requests": len(self.tokens),
            "seconds": self.seconds,
            "tokens": int(self.tokens.sum()),
            "tokens_per_s": self.tokens_per_s,
            "requests_per_s": len(self.tokens) / self.seconds if self.seconds > 0 else 0.0,
            "time_to_first_token_s": quantiles(self.ttft_s.tolist()),
            "time_per_output_token_s": quantiles(later.tolist()),
            "latency_s": quantiles((self.finished_s - self.arrived_s).tolist()),
            "goodput_requests_per_s": self.goodput(level),
        }
