"""How long a tuning will take, stage by stage, and how far it has come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from spectune.optimizer.confirm import RACE_SHARE
from spectune.optimizer.profiles import usable_profile
from spectune.optimizer.record import asked_of

if TYPE_CHECKING:
    from spectune.optimizer.execute import DecodeOptions
    from spectune.optimizer.tune import TuneOptions
    from spectune.runtime.loading import LoadedPair
    from spectune.traces.schema import Workload
    from spectune.traces.store import TraceStore

TYPICAL = {
    "record": 90.0,
    "profile": 30.0,
    "fit": 12.0,
    "search": 22.0,
    "execute": 53.0,
    "confirm": 27.0,
}
"""Seconds of the demo's tuning on two CPU cores: a bar's proportions while nothing is known of a
pair, and never told."""
LOOKED_AT = 5
"""Earlier tunings of a pair that an estimate is made of."""
TOLD = 3.0
"""Seconds below which a stage is not worth telling."""


@dataclass
class Course:
    """A tuning's stages in order with their expected seconds, and how far it is. ``known``: these
    are told to a user."""

    stages: Sequence[tuple[str, float]]
    known: bool
    at: int = -1
    within: float = 0.0
    _phases: dict[str, tuple[int, int]] = field(default_factory=dict)

    def begin(self, stage: str) -> None:
        """A stage begins, and those before it are over. One that is begun again goes on."""
        names = [name for name, _ in self.stages]
        if names[self.at : self.at + 1] != [stage]:
            self.at = names.index(stage, self.at + 1)
            self.within, self._phases = 0.0, {}

    def tell(self, phase: str, done: int, total: int) -> None:
        """A stage's phases count together, as they may run side by side."""
        self._phases[phase] = (done, max(1, total))
        counted = [sum(column) for column in zip(*self._phases.values(), strict=True)]
        self.within = max(self.within, min(1.0, counted[0] / counted[1]))

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self.stages)

    @property
    def done_s(self) -> float:
        """Expected seconds of what is done."""
        before = sum(seconds for _, seconds in self.stages[: max(0, self.at)])
        return before + (self.within * self.stages[self.at][1] if self.at >= 0 else 0.0)

    def left_s(self, elapsed_s: float) -> float | None:
        """Seconds to go, at the pace so far once a tenth is done; None while nobody knows."""
        paced = self.done_s > 0.1 * self.total_s
        if not (paced or self.known):
            return None
        return (self.total_s - self.done_s) * (elapsed_s / self.done_s if paced else 1.0)

    def told(self, budget_s: float) -> str:
        """The estimate, in a line."""
        if not self.known:
            return (
                "no tuning of this pair is stored, so nobody knows yet how long recording it "
                f"takes; race and confirmation take {spoken(budget_s)} at most"
            )
        parts: dict[str, float] = {}
        for name, seconds in self.stages:
            parts[name] = parts.get(name, 0.0) + seconds
        shown = ", ".join(
            f"{name} {spoken(seconds)}" for name, seconds in parts.items() if seconds >= TOLD
        )
        return f"about {spoken(self.total_s)}: {shown} (as earlier tunings of this pair took)"


def spoken(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def course(
    store: TraceStore,
    pair: LoadedPair,
    wanted: TuneOptions,
    workload: Workload | None,
    stages: Sequence[str],
) -> Course:
    """What the tuning of a workload, or of a recording (None), is expected to take, from the
    seconds of earlier ones of the pair on this device; texts are taken to be as long as they may
    be."""
    like = {"device": pair.device.type, "trees": wanted.tree_size[0] > 0}
    paces = [study.document.get("pace") or {} for study in store.list_studies(pair.id)]
    every = [p for p in paces if p.get("tokens") and like.items() <= p.items()]
    alike = every[:LOOKED_AT]
    # Those that found all recorded say nothing of recording.
    made = [p for p in every if p["seconds"].get("record", 0.0) >= TOLD][:LOOKED_AT]
    tokens = None if workload is None else len(workload.requests) * wanted.options.max_new_tokens
    told = [(name, pace) for pace in alike for name in pace["seconds"]]
    told += [("record", pace) for pace in made]
    expected: dict[str, float] = {}
    for name, pace in told:
        scale = 1.0 if tokens is None or name == "profile" else tokens / pace["tokens"]
        expected[name] = max(expected.get(name, 0.0), pace["seconds"][name] * scale)
    race_s = wanted.budget_s * RACE_SHARE
    expected = (expected if alike else TYPICAL) | {
        "execute": race_s,
        "confirm": wanted.budget_s - race_s,
    }
    if not wanted.fresh:
        drafts, trees, now = wanted.drafts_of(pair), wanted.prices_trees(pair), datetime.now(UTC)
        most = wanted.gamma_max
        if usable_profile(store, pair, drafts, now, gamma_max=most, trees=trees) is not None:
            expected["profile"] = 0.0
        if workload is not None and _is_recorded(store, pair, wanted.options, workload):
            expected["record"] = 0.0
    count = Counter(stages)
    return Course([(name, expected.get(name, 0.0) / count[name]) for name in stages], bool(alike))


def _is_recorded(
    store: TraceStore, pair: LoadedPair, options: DecodeOptions, workload: Workload
) -> bool:
    asked = asked_of(pair, workload.digest(), options)
    return store.find_recording(asked, state="complete") is not None
