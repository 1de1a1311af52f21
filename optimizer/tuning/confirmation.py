"""What a confirmation showed of a policy, as it is stored and told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, computed_field

LEVEL: Final = 0.98
"""Two-sided level of the interval: its lower end is above the truth in one of 100 confirmations
(`bench/checks/nulls.py` counts them)."""
FLOOR: Final = 1.01
"""A ratio below is not worth a publication."""
LEAST: Final = 5
"""Units to confirm on without which nothing is published."""

Interval = tuple[float, float, float]
"""A value and the ends of its interval, which are infinite where they are not known."""
Ends = tuple[float | None, float | None]
"""The ends of an interval for JSON, which has no infinity."""


def ends_of(interval: Interval) -> Ends:
    """The ends of an interval; one that is not known is None."""
    low, high = finite(interval[1:])
    return low, high


def finite(values: Sequence[float]) -> list[float | None]:
    """For JSON, which has no infinity: an interval's end that is not known is None."""
    return [v if math.isfinite(v) else None for v in values]


def missed_share(requests: int) -> float:
    """The share of all requests that a slowdown may fall on unseen: with a chance of 5%, none of so
    many requests held out is among them."""
    return 1.0 - math.pow(0.05, 1.0 / max(1, requests))


class Confirmation(BaseModel):
    """The speed of the policy of this ``id`` over the incumbent's on ``requests`` held out (or
    other units of a bench), executed at most ``passes`` times by both, and its interval of
    :data:`LEVEL`. ``chance_of_5_percent``: of a gain of 5% to be published by so many executions,
    as was told before them; None: not told. ``conversations``: how many the requests are of, where
    some are turns of one."""

    model_config = ConfigDict(frozen=True)

    id: str
    ratio: float
    interval: Ends
    requests: int
    passes: int
    unit: str = "requests"
    chance_of_5_percent: float | None = None
    conversations: int | None = None
    level: float = LEVEL
    floor: float = FLOOR

    @classmethod
    def of(
        cls, winner: str, ratio: Interval, requests: int, passes: int, **more: Any
    ) -> Confirmation:
        """``more``: further fields."""
        about = {"requests": requests, "passes": passes, **more}
        return cls(id=winner, ratio=ratio[0], interval=ends_of(ratio), **about)

    @property
    def independent(self) -> int:
        """How many units tell something of their own."""
        return self.requests if self.conversations is None else self.conversations

    @computed_field  # type: ignore[prop-decorator]
    @property
    def missed(self) -> float:
        """:func:`missed_share` of the requests held out."""
        return missed_share(self.independent)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def holds(self) -> bool:
        """Whether it is a gain beyond noise, and worth having."""
        return not self.against

    @computed_field  # type: ignore[prop-decorator]
    @property
    def against(self) -> str:
        """What speaks against a publication; empty where nothing does."""
        if self.independent < LEAST:
            unit = self.unit if self.conversations is None else "conversations"
            return f"{self.independent} {unit} are too few, {LEAST} are needed"
        if (self.interval[0] or 0.0) <= 1.0:
            return "the gain is not beyond noise"
        if self.ratio < self.floor:
            return f"a ratio below {self.floor} is not worth a change"
        return ""
