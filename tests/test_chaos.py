"""The chaos run's judge finds each promise that is broken, and nothing in a run that kept all."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

from chaos_judge import Fault, History, Job, Publication, Said, Watched, due, judge

WELL = History(
    publications=[
        Publication(1, "a", "k1", "p", 10.0),
        Publication(2, "a", None, "garbage", 20.0, is_good=False),
        Publication(3, "a", "k3", "p", 30.0, attempt=1),
        Publication(4, "b", "k4", "p", 31.0),
    ],
    said=[
        Said(1, "w", "applied", "", 11.1),
        Said(2, "w", "refused", "null is no policy", 21.0),
        Said(3, "w", "applied", "", 30.6),
    ],
    watched=[Watched("w", "a", 0.0, [(1.0, 0), (11.0, 1), (30.5, 3)])],
    acknowledged=[("k1", 1), ("k1", 1), ("k4", 4)],
    attempts=[("k3", 1, 29.0)],
    jobs=[Job("k3", "often", "done", 3, None)],
    slots={"often": (5, [10, 20, 15])},
    until=50.0,
)


def restart(begin: float, end: float, keeps: tuple[str, ...] | None = None) -> Fault:
    return Fault("server restart", "", begin, end, keeps)


def without(history: History, version: int, **more: Any) -> History:
    """The same, had the watcher not seen that publication."""
    kept = [(at, v) for at, v in history.watched[0].in_force if v != version]
    said = [s for s in history.said if s.version != version]
    return replace(history, said=said, watched=[replace(history.watched[0], in_force=kept)], **more)


def test_a_run_that_kept_its_promises_is_counted_and_has_no_failure() -> None:
    verdict = judge(WELL)
    assert verdict.failures == []
    assert verdict.judged == {"good": 2, "bad": 1}
    assert verdict.latencies_s == [0.5, 1.0]


def saying(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None) -> History:
    """The same, had the watcher said something else of the first two publications."""
    one, two, three = WELL.said
    return replace(WELL, said=[replace(one, **first or {}), replace(two, **second or {}), three])


def in_force(*moments: tuple[float, int]) -> History:
    return replace(WELL, watched=[Watched("w", "a", 0.0, moments)])


FAILED = Job("k3", "often", "failed", None, "the database went away")
TWICE = Publication(5, "b", "k4", "p", 32.0)


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (without(WELL, 1), "applied late"),
        (without(WELL, 3), "applied late"),
        (without(WELL, 2), "refused late"),
        (in_force((12.5, 1), (30.5, 3)), "applied late"),
        (saying({"committed": 12.5}), "applied late"),
        (saying({"status": "refused", "reason": "database gone"}), "good refused"),
        (saying(second={"status": "applied"}), "bad applied"),
        (saying(second={"reason": " "}), "refused without a reason"),
        (replace(WELL, acknowledged=[("k9", 9)]), "lost"),
        (replace(WELL, acknowledged=[("k1", 3)]), "lost"),
        (replace(WELL, acknowledged=[("k1", 1), ("k1", 3)]), "doubled"),
        (replace(WELL, publications=[*WELL.publications, TWICE]), "doubled"),
        (replace(WELL, attempts=[("k3", 1, 20.0), ("k3", 2, 29.5)]), "fence"),
        (replace(WELL, jobs=[FAILED]), "job failed"),
        (replace(WELL, jobs=[Job("k3", "often", "done", 4, None)]), "job"),
        (replace(WELL, slots={"often": (5, [10, 20])}), "slots"),
        (replace(WELL, slots={"often": (5, [10, 10, 15])}), "slots"),
        (replace(WELL, slots={"often": (5, [])}), "slots"),
        (replace(WELL, problems=[("process gone", "w0")]), "process gone"),
    ],
)
def test_a_broken_promise_is_found(broken: History, kind: str) -> None:
    assert kind in {found for found, _ in judge(broken).failures}


def test_time_is_counted_from_the_end_of_a_fault_that_came_in_between() -> None:
    assert due(10.0, []) == (12.0, 10.0)
    assert due(10.0, [restart(5.0, 9.9)]) == (12.0, 10.0)
    assert due(10.0, [restart(11.0, 14.0), restart(15.0, 18.0), restart(21.0, 22.0)]) == (
        20.0,
        18.0,
    )


def test_a_publication_is_late_only_when_nothing_excuses_it() -> None:
    late = replace(in_force((13.5, 1), (30.5, 3)), said=saying({"committed": 13.6}).said)
    assert judge(replace(late, faults=[restart(11.0, 12.5)])).failures == []
    assert judge(replace(late, faults=[restart(11.0, 12.5, keeps=("w",))])).failures == []
    assert judge(replace(late, faults=[restart(11.0, 12.5, keeps=("other",))])).failures
    first, second, *others = WELL.publications
    soon = [first, replace(second, committed=11.5), *others]
    overtaken = without(WELL, 1, publications=soon)
    assert "applied late" not in {kind for kind, _ in judge(overtaken).failures}
    assert judge(overtaken).judged["superseded"] == 1
