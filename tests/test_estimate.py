"""What a tuning is expected to take, and how far it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from databases import opened
from doors import put_made_up_profile
from test_publishing import QUICK, WORKLOAD

from spectune.optimizer.estimate import LOOKED_AT, Course, course, spoken
from spectune.optimizer.tune import STAGES
from spectune.runtime.loading import LoadedPair

NAMES = [name for name, _ in STAGES]


def test_a_bar_goes_over_all_stages_and_never_back() -> None:
    found = Course(
        [("record", 60.0), ("search", 10.0), ("cover", 0.0), ("search", 10.0), ("execute", 20.0)],
        known=True,
    )
    assert (found.total_s, found.done_s, found.left_s(0.0)) == (100.0, 0.0, 100.0)
    found.begin("record")
    found.tell("decode", 5, 10)
    assert found.done_s == 30.0
    found.tell("trees near", 0, 10)
    assert found.done_s == 30.0, "what is still to be done is new, what is done is not undone"
    found.begin("record")
    found.tell("trees near", 10, 10)
    assert found.done_s == 45.0
    assert found.left_s(90.0) == pytest.approx(55.0 * 2), "twice as slow as expected"
    found.begin("search")
    found.begin("cover")
    found.begin("search")
    assert found.done_s == 70.0
    found.tell("search", 3, 3)
    found.begin("execute")
    found.tell("execute", 40, 20)
    assert found.left_s(1.0) == 0.0
    unknown = Course([("record", 90.0), ("execute", 80.0)], known=False)
    unknown.begin("record")
    assert unknown.left_s(5.0) is None
    unknown.tell("decode", 1, 2)
    assert unknown.left_s(10.0) == pytest.approx(10.0 * 125 / 45)
    assert "nobody knows yet" in unknown.told(80.0)
    assert [spoken(s) for s in (0.2, 89, 91, 7200)] == ["1 s", "89 s", "2 min", "2.0 h"]


def test_earlier_tunings_tell_what_the_next_one_takes(tmp_path: Path, pair: LoadedPair) -> None:
    with opened(tmp_path / "x.db") as store:
        put_made_up_profile(store, pair)
        assert not course(store, pair, QUICK, WORKLOAD, NAMES).known
        seconds = {"record": 20.0, "profile": 31.0, "search": 4.0, "cover": 1.0}
        for tokens, took, trees in ((72, seconds, False), (1, {"fit": 9.0}, True)):
            pace = {"seconds": took, "device": "cpu", "trees": trees, "tokens": tokens}
            store.put_study(pair.id, sampler="s", seed=0, document={"pace": pace})
        store.put_study(pair.id, sampler="s", seed=0, document={"trials": 4})
        last = "execute 53 s, confirm 27 s (as earlier tunings of this pair took)"
        known = course(store, pair, QUICK, WORKLOAD, NAMES).told(80.0)
        assert known == f"about 2 min: record 40 s, search 8 s, {last}"
        for took in [{**seconds, "record": 0.2}] * LOOKED_AT:  # found all recorded
            pace = {"seconds": took, "device": "cpu", "trees": False, "tokens": 72}
            store.put_study(pair.id, sampler="s", seed=0, document={"pace": pace})
        assert course(store, pair, QUICK, WORKLOAD, NAMES).told(80.0) == known
        on_recording = course(store, pair, QUICK, None, NAMES).told(80.0)  # of texts alone, maybe
        assert on_recording == f"about 2 min: record 20 s, search 4 s, {last}"
        fresh = course(store, pair, replace(QUICK, fresh=True), WORKLOAD, NAMES)
        assert "profile 31 s" in fresh.told(80.0)


def test_chains_of_a_head_are_priced_where_no_trees_are_searched(pair: LoadedPair) -> None:
    """A head drafts its chains as trees of width 1: without the costs of trees `tune --tree-width
    0` ended in an error."""
    assert not replace(QUICK, drafts=("near", "ngram")).prices_trees(pair)
    assert replace(QUICK, drafts=("near", "head")).prices_trees(pair)
    assert replace(QUICK, drafts=("near",), tree_width=2).prices_trees(pair)
