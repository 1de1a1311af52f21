"""What changed in the traffic of a deployment, by river's ADWIN over series of figures.

Bifet, Gavaldà: Learning from time-changing data with adaptive windowing (SDM 2007). ADWIN takes
figures in [0, 1] and cuts off what came before a change of their mean. A series is kept as its
figures and read again at each look: the same figures give the same windows, whoever reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from spectune.traces.errors import ConfigError


class Sensitivity(NamedTuple):
    """``delta``: ADWIN's confidence, which the series of a kind share. ``least``: changes below are
    none, relative, of a share absolute. ``fewest``: figures after a change that tell its size."""

    delta: float
    least: float
    fewest: int


KINDS: Final = {
    "acceptance": Sensitivity(0.001, 0.15, 40),
    "seconds": Sensitivity(0.3, 0.15, 8),
    "mix": Sensitivity(0.001, 0.1, 16),
}
"""ADWIN's bound is wide where figures are few, and takes them to be independent: `bench/run.py
drift` counts what comes of these."""
SLOWER: Final = 0.5
"""Logarithms of measured over predicted seconds are clipped to this, either way."""
SLOT_S: Final = 600.0
"""Seconds of which the median ratio is one figure: a machine's pace wanders for minutes."""
BLOCK: Final = 4
"""Requests of which the share of a category is one figure: those of one user come together."""
NAMED: Final = 16
"""Requests of a look that a category has at least to be told apart, and a twentieth of them."""
CATEGORIES: Final = 16
"""Most categories told apart: clients name them."""
SERIES: Final = 64
FIGURES: Final = 4000
"""Most series, and figures of one that are kept, the last."""


class Watched(NamedTuple):
    """A request: the mean share of the drafted tokens that were accepted, by how many a round
    drafted (``kept``)."""

    category: str
    kept: Mapping[int, float]


class Change(NamedTuple):
    """A mean that is another since ``since`` figures, and was ``before`` over ``until``."""

    what: str
    category: str | None
    drafted: int
    before: float
    after: float
    until: int
    since: int


@dataclass
class Detector:
    """Series since a policy came into force. ``costs``: what seconds are predicted by, of an
    engine (:meth:`LatencyProfile.to_json`'s terms)."""

    requests: int = 0
    names: list[str] = field(default_factory=list)
    """The categories that are told apart."""
    series: dict[tuple[str, str | None, int], list[float]] = field(default_factory=dict)
    block: list[str | None] = field(default_factory=list)
    slot: int = 0
    ratios: list[float] = field(default_factory=list)
    """Of the slot that has not ended."""
    read: dict[str, int] = field(default_factory=dict)
    """By recording, the last request that was read."""
    costs: dict[str, Any] = field(default_factory=dict)

    def add(
        self, requests: Sequence[Watched], ratios: Iterable[tuple[float, float]] = ()
    ) -> list[Change]:
        """Takes requests, in the order in which they ended, and (when, measured over predicted
        seconds); what changed. Each change is told once: its series goes on with what came after
        it."""
        self._name_categories(requests)
        for request in requests:
            category = request.category if request.category in self.names else None
            for drafted, share in request.kept.items():
                self._append(("acceptance", category, drafted), share)
            self.block.append(category)
            if len(self.block) == BLOCK:
                for name in self.names:
                    self._append(("mix", name, 0), self.block.count(name) / BLOCK)
                self.block.clear()
        self.requests += len(requests)
        for at, ratio in sorted(ratios):
            if (slot := int(at // SLOT_S)) > self.slot:
                self._end_slot()
                self.slot = slot
            self.ratios.append(max(0.01, round(ratio, 4)))
        found = [self._change(key) for key in self.series]
        return [change for change in found if change is not None]

    def _name_categories(self, requests: Sequence[Watched]) -> None:
        """A category that is named late had no share before."""
        counts = Counter(request.category for request in requests)
        blocks = self.requests // BLOCK
        for name, count in counts.most_common(CATEGORIES):
            is_large = count >= max(NAMED, len(requests) / 20)
            if is_large and name not in self.names and len(self.names) < CATEGORIES:
                self.names.append(name)
                self.series["mix", name, 0] = [0.0] * min(blocks, FIGURES)

    def _append(self, key: tuple[str, str | None, int], value: float) -> None:
        if key in self.series or len(self.series) < SERIES:
            self.series.setdefault(key, []).append(round(value, 4))

    def _end_slot(self) -> None:
        if self.ratios:
            clipped = min(SLOWER, max(-SLOWER, log(median(self.ratios))))
            self._append(("seconds", None, 0), (clipped + SLOWER) / (2 * SLOWER))
        self.ratios.clear()

    def _change(self, key: tuple[str, str | None, int]) -> Change | None:
        """What ADWIN cuts off a series, where what is left is another by enough."""
        values, (what, category, drafted) = self.series[key], key
        del values[:-FIGURES]
        kind = KINDS[what]
        adwin = _adwin(kind.delta / sum(other == what for other, *_ in self.series))
        for value in values:
            adwin.update(value)
        cut = len(values) - int(adwin.width)
        if not cut or len(values) - cut < kind.fewest:
            return None
        before, after = fmean(values[:cut]), fmean(values[cut:])
        if what == "seconds":
            before, after = (exp(2 * SLOWER * x - SLOWER) for x in (before, after))
        change = abs(after - before) / (1.0 if what == "mix" else max(before, 1e-9))
        if change < kind.least:
            return None
        del values[:cut]
        return Change(what, category, drafted, before, after, cut, len(values))

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_json` is the inverse."""
        return {**vars(self), "series": [[*key, of] for key, of in self.series.items()]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Detector:
        series = {(what, *key): of for what, *key, of in document["series"]}
        return cls(**{**document, "series": series})


def check_installed() -> None:
    """Raises ConfigError where river is not."""
    _adwin(1.0)


def _adwin(delta: float) -> Any:
    try:
        from river.drift.adwin import ADWIN
    except ImportError:
        raise ConfigError(
            "watching for drift needs river: `pip install 'spectune[control]'`"
        ) from None
    return ADWIN(delta=delta, clock=1)
