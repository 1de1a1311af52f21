"""Survival sums against the definition, start by start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from trace_values import a_panorama, a_trajectory, a_tree, steps_of

from spectune.traces.acceptance import (
    FirstPosition,
    Survival,
    compact,
    hardly_accepted,
    keep_probability,
    step_survival,
    survival,
)
from spectune.traces.schema import OFF_TEXT, PROB_SCALE, Step


@pytest.mark.parametrize(("seed", "n"), [(0, 0), (1, 1), (2, 7), (3, 60), (4, 60)])
def test_coupled_survival_counts_runs_from_every_start(seed: int, n: int) -> None:
    panorama = a_panorama(a_trajectory(seed, n=n), "small", seed=seed, gamma_max=9)
    runs = []
    for start in range(n):
        run = 0
        while run < 9 and start + run < n and panorama.trie.text_slot[start + run] == 0:
            run += 1
        runs.append(run)
    got = survival(panorama, "coupled")
    assert got.starts == n
    assert got.survived == tuple(sum(r > j for r in runs) for j in range(9))
    assert got.at_risk == tuple(
        sum(r >= j and s + j < n for s, r in enumerate(runs)) for j in range(9)
    )
    assert got.histogram == tuple(np.bincount(runs, minlength=10)) if n else tuple([0.0] * 10)
    assert got.mean_accepted_length == pytest.approx(1 + np.mean(runs) if n else 0.0)


def test_rejection_survival_is_the_expected_run() -> None:
    panorama = a_panorama(a_trajectory(1, n=12), "small", gamma_max=4)
    keep = panorama.trie.accept / PROB_SCALE
    want = [sum(np.prod(keep[s : s + j + 1]) for s in range(12 - j)) for j in range(4)]
    assert survival(panorama, "rejection").survived == pytest.approx(want)
    assert keep_probability(panorama, "rejection") == pytest.approx(keep)


@pytest.mark.parametrize("shared", [True, False])
def test_what_holds_no_chances_is_judged_by_the_text_under_rejection_too(shared: bool) -> None:
    """At temperature 0, and of a head, whose nodes on the text are its own."""
    made = a_tree(a_trajectory(3), "small", gamma_max=4)
    slot = made.trie.text_slot
    trie = replace(made.trie, text_slot=np.where(slot == OFF_TEXT, 0, slot))
    panorama = replace(made, shared=shared, trie=trie)
    assert survival(panorama, "rejection") == survival(panorama, "coupled")
    assert sum(survival(panorama, "coupled").survived[1:]) > 0


def test_tau_is_what_executed_rounds_emitted() -> None:
    steps = steps_of(a_trajectory(2, n=200))
    got = step_survival(steps)
    assert got.mean_accepted_length == pytest.approx(sum(s.emitted for s in steps) / len(steps))
    assert got.histogram == tuple(np.bincount([s.accepted for s in steps], minlength=5))
    for j, share in enumerate(got.conditional):
        reached = [s for s in steps if s.drafted > j and s.accepted >= j]
        assert share == sum(s.accepted > j for s in reached) / len(reached)
    for j, share in enumerate(got.marginal):
        tried = [s for s in steps if s.drafted > j]
        assert share == sum(s.accepted > j for s in tried) / len(tried)


def test_rounds_of_different_depths_are_counted_together() -> None:
    counts = (0, 2, 3, 1, 2, 2), (0, 4, 5, 4, 5, 4), (5, 0, 1, 0, 1, 0)
    found = step_survival([Step(*row) for row in counts])
    assert found == Survival(3, (2, 2, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1))
    assert step_survival([]).mean_accepted_length == 0.0


def test_sums_are_stored_short() -> None:
    assert compact([3.0, 0.0, 1 / 3]) == [3, 0, 0.333333]


@pytest.mark.parametrize(
    ("accepted", "positions", "warned"),
    [(0, 89, False), (0, 90, True), (1, 299, False), (14, 300, True), (15, 300, False)],
)
def test_none_of_fewer_tokens_is_enough_to_warn_of_a_draft(
    accepted: int, positions: int, warned: bool
) -> None:
    """Of a head, that its tokens may be named wrongly is said, too; prompt lookup may fail."""
    found = FirstPosition(accepted / positions, positions)
    lines = hardly_accepted({"head": found, "ngram": found}, heads=["head"])
    assert [f"of {positions} first tokens" in x and "its d2t" in x for x in lines] == [
        True
    ] * warned
