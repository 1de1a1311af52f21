"""Confirming a winner: what is executed, what holds, what is said before; and how often the
evidence as a whole is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from spectune.optimizer.confirm import (
    LEAST,
    Confirmation,
    confirm,
    planned,
    said_of,
)
from spectune.traces.errors import TraceError

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import nulls


def test_both_are_executed_alternately_and_the_ratio_is_of_total_speed() -> None:
    """The winner begins; a stall of one execution is outvoted by two others."""
    size, calls = np.arange(1.0, 9.0), []

    def execute(policy: str, n: int) -> float:
        calls.append((policy, n))
        stall = 50.0 if calls.count((policy, n)) == 2 and n == 3 and policy == "new" else 1.0
        return float(size[n] * stall * ((1.0 if n % 2 else 0.9) if policy == "new" else 1.2))

    found = confirm("new", "old", execute, requests=8, passes=3)
    assert calls[:4] == [("new", 0), ("old", 0), ("old", 1), ("new", 1)]
    assert calls[16:18] == [("old", 0), ("new", 0)], "the second pass is in the other order"
    assert (found.requests, found.passes, len(calls)) == (8, 3, 2 * 8 * 3)
    assert found.ratio[0] == pytest.approx(
        1.2 * size.sum() / (size * np.where(np.arange(8) % 2, 1.0, 0.9)).sum()
    )
    assert not found.against
    assert found.to_json()["interval"] == list(found.ratio[1:])
    unknown = Confirmation("p", (1.2, 0.0, float("inf")), 1, 1)
    assert unknown.to_json()["interval"] == [0.0, None]


def test_executions_are_planned_by_the_time_that_is_left() -> None:
    """All requests once before any twice, at least as many as a publication needs."""
    for asked, used in (
        ((20, 1.0, 10.0, 8), (10, 1)),
        ((20, 1.0, 45.0, 8), (20, 2)),
        ((20, 0.01, 45.0, 8), (20, 8)),
        ((20, 60.0, 10.0, 8), (LEAST, 1)),
        ((3, 1.0, 10.0, 8), (3, 3)),
    ):
        assert planned(*asked) == used


def test_what_so_many_requests_cannot_show_is_said_with_what_would() -> None:
    assert said_of(["a"] * 400, publish=True) == ""
    assert "gains below about" in said_of(["a", "b", "c"] * 16, publish=True)
    with pytest.raises(
        TraceError,
        match="10 requests leave 3 to confirm a winner on, and 5 are needed to publish it: give 16",
    ):
        said_of(["a"] * 10, publish=True)
    assert said_of(["a"] * 16, publish=True)
    assert "3 of 10 requests are held out" in said_of(["a"] * 10, publish=False)


@pytest.mark.parametrize("categories", ["aaa", "aaabbc", "abc", ""])
@pytest.mark.parametrize("publish", [False, True])
def test_the_number_said_to_suffice_suffices_and_one_fewer_does_not(
    categories: str, publish: bool
) -> None:
    """Six requests of three categories leave nothing to race on; of one category four are
    enough."""
    with pytest.raises(
        TraceError, match="too few requests to search, race and confirm on different ones"
    ) as raised:
        said_of(categories, publish=publish)
    least = int(str(raised.value).partition("give ")[2].split()[0])
    more = [(categories or "a")[i % max(1, len(categories))] for i in range(least)]
    assert said_of(more, publish=publish)
    with pytest.raises(TraceError, match="give "):
        said_of(more[:-1], publish=publish)


def test_the_best_of_twelve_equals_is_seldom_published_and_a_gain_is() -> None:
    """100 tunings whose candidates are as fast as the incumbent: of series with a rate of 1%, one
    in 50 has four or more. Of 20 with a gain of 30% nearly all are published."""
    found = nulls.series(100, 12, 80, 1.0, 1)
    assert found["confirmed"] > 50
    assert found["published"] <= 3
    assert nulls.series(20, 12, 80, 1.3, 1)["published"] >= 17
